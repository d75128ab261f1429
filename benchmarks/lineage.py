"""Run a registered grid of settings that published numbers may come from, and score its points.

    python -m benchmarks.lineage                                  (lists the grids)
    python -m benchmarks.lineage dac-cifar10-network --stage 1
    python -m benchmarks.lineage dac-cifar10-network --stage 2    (the best two of the first stage)

The grids are in benchmarks/lineage.toml, with the dates on which they were written down. A point is
scored over all its cells, the published numbers of its methods: the mean of the squared difference
in the paper's deviations (`score`). The lowest score is best. Runs are kept below `--runs`, so that
the same command goes on where it was stopped; the result is written when the last point is done, to
docs/reference/runs/lineage. Datasets are read from the folder that COTERIE_DATA names.
"""

import argparse
import hashlib
import json
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from coterie._util.origin import write_results
from coterie.cli._display import show_progress
from coterie.functional.metrics import REGISTRY
from coterie.papers import compare
from coterie.results import stored_runs, summary
from coterie.studies.config import load_study
from coterie.studies.run import run_study

ROOT = Path(__file__).resolve().parent.parent
GRIDS = Path(__file__).with_suffix(".toml")
STORED = ROOT / "docs/reference/runs/lineage"
SPEAKS_OF = ("data", "engine", "functional", "methods", "models", "simulation", "studies/builtin")
STAGES = {1: "first", 2: "full"}
BEST = 2
"""How many points of the first stage the second one runs."""


def load_grids(path: Path = GRIDS) -> dict[str, dict[str, Any]]:
    """Return the registered grids by name."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


def compute_digest(grid: Mapping[str, Any]) -> str:
    """Return a digest of a grid, which a result holds so that a later change of the grid shows."""
    text = json.dumps(grid, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def list_changes(grid: Mapping[str, Any], point: Mapping[str, Any], stage: int) -> list[str]:
    """Return the assignments of a point in a stage; the point's own come last and win."""
    own = grid[STAGES[stage]]
    methods = json.dumps(grid["methods"])
    seeds = f"seeds={own['seeds']}"
    return [f"use_methods={methods}", *own["set"], seeds, *point["set"]]


def find_cells(grid: Mapping[str, Any], study: str, folder: Path) -> list[dict[str, Any]]:
    """Return the scored cells of a study that ran: ours, the paper's, and the deviation.

    Each has in how many rounds a client of its method trained, too.

    Raises:
        LookupError: when a registered cell has no number here.
    """
    result = compare.load_result(folder)
    lines = [
        line for line in compare.compare_with_paper(result).lines
        if not line.chosen and not line.predicted and line.verdict != "undecided"
    ]  # fmt: skip
    wanted = grid.get("cells")
    if wanted is None:
        chosen = [(line, line.paper, line.paper_std) for line in lines]
    else:
        chosen = []
        for cell in wanted:
            line = _find_line(lines, study, cell)
            # A number that no table of the paper prints stands in the grid.
            paper = (cell["mean"], cell.get("std")) if "mean" in cell else None
            chosen.append((line, *(paper or (line.paper, line.paper_std))))
    runs, _ = stored_runs.load_runs([folder])
    trained = {
        label: summary.compute_mean_rounds(group)
        for label, group in stored_runs.group_by_label(runs).items()
    }
    cells = []
    for line, paper, deviation in chosen:
        scale = REGISTRY[line.metric].scale
        cells.append(
            {
                "study": study, "row": line.row, "cluster": line.cluster, "metric": line.metric,
                "ours": scale * line.ours, "seeds": line.seeds, "paper": scale * paper,
                "deviation": scale * deviation if deviation else grid["deviation"],
                "rounds": trained[line.label],
            }
        )  # fmt: skip
    return cells


def _find_line(
    lines: Sequence[compare.ComparedNumber], study: str, cell: Mapping[str, Any]
) -> compare.ComparedNumber:
    metric = cell.get("metric", "accuracy")
    for line in lines:
        if (line.row, line.cluster, line.metric) == (cell["row"], cell["cluster"], metric):
            return line
    raise LookupError(
        f"{study} has no {metric} of {cell['row']}, {cell['cluster']}; it has "
        f"{', '.join(f'{line.metric} of {line.row}, {line.cluster}' for line in lines)}"
    )


def score_cells(cells: Sequence[Mapping[str, Any]]) -> float:
    """Return the mean over cells of the squared difference in deviations.

    Example:
        >>> score_cells([{"ours": 30.0, "paper": 33.0, "deviation": 1.0},
        ...              {"ours": 40.0, "paper": 39.0, "deviation": 2.0}])
        4.625
    """
    squares = [((one["ours"] - one["paper"]) / one["deviation"]) ** 2 for one in cells]
    return sum(squares) / len(squares)


def score_point(cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the score of a point, and what it is made of."""
    differences = [one["ours"] - one["paper"] for one in cells]
    return {
        "score": score_cells(cells),
        "mean difference": sum(differences) / len(differences),
        "largest difference": max(differences, key=abs),
        "cells": list(cells),
    }


def choose_points(
    grid: Mapping[str, Any], digest: str, first: Mapping[str, Any]
) -> list[Mapping[str, Any]]:
    """Return the points of the second stage: the best of the first one.

    Raises:
        ValueError: when the first stage is of another grid.
    """
    if first["grid"] != digest:
        raise ValueError("the first stage was run with another grid; run it again")
    best = sorted(first["results"], key=lambda row: row["score"])[:BEST]
    names = {row["point"] for row in best}
    return [point for point in grid["points"] if point["name"] in names]


def run_point(
    grid: Mapping[str, Any], point: Mapping[str, Any], stage: int, out: Path, workers: int
) -> list[dict[str, Any]]:
    """Run a point in all studies of its grid, and return its cells."""
    cells = []
    for name in grid["studies"]:
        study = load_study(name, list_changes(grid, point, stage))
        # Hours of work: which run is at which round, on standard error.
        console = Console(stderr=True)
        console.print(f"{point['name']}: {study.name}", highlight=False, markup=False)
        with show_progress([study], console, quiet=False) as observer:
            run_study(study, out=out, workers=workers, observer=observer, notes=observer)
        cells += find_cells(grid, name, out / study.name)
    return cells


def run_grid(name: str, stage: int, runs: Path, stored: Path, workers: int) -> Path:
    """Run a stage of a grid as far as it is not there, and write its result."""
    grids = load_grids()
    if name not in grids:
        raise SystemExit(f"no grid {name!r}; registered are {', '.join(grids)}")
    grid, digest = grids[name], compute_digest(grids[name])
    points = grid["points"]
    if stage == 2:
        path = stored / f"{name}-stage-1.json"
        if not path.exists():
            raise SystemExit(f"{path} is not there; run --stage 1 of {name} first")
        points = choose_points(grid, digest, json.loads(path.read_text()))
    rows = []
    for index, point in enumerate(grid["points"]):
        if point not in points:
            continue
        out = runs / name / f"stage-{stage}" / f"{index}"
        cells = run_point(grid, point, stage, out, workers)
        rows.append({"point": point["name"], **score_point(cells)})
        shown = {key: value for key, value in rows[-1].items() if key != "cells"}
        print(json.dumps(shown), flush=True)
    path = stored / f"{name}-stage-{stage}.json"
    changes = {point["name"]: list_changes(grid, point, stage) for point in points}
    write_results(
        path, rows, SPEAKS_OF, {"grid": name, "stage": stage, "changes": changes},
        seeds=grid[STAGES[stage]]["seeds"], grid=digest, registered=str(grid["registered"]),
    )  # fmt: skip
    return path


def main() -> None:
    """Run a grid, or list them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?", help="a grid of benchmarks/lineage.toml")
    parser.add_argument("--stage", type=int, choices=(1, 2), default=1)
    parser.add_argument("--runs", type=Path, default=Path("runs/lineage"), help="where runs are")
    parser.add_argument("--workers", type=int, default=1)
    given = parser.parse_args()
    if given.name is None:
        for name, grid in load_grids().items():
            print(f"{name}: {len(grid['points'])} points, registered {grid['registered']}")
        return
    # Networks of the grid are imported from here.
    sys.path.insert(0, str(ROOT))
    run_grid(given.name, given.stage, given.runs, STORED, given.workers)


if __name__ == "__main__":
    main()
