"""Write docs/reference/lineage.md: registered grids over settings of the papers, and what came out.

    python scripts/lineage.py            (`--check` only says whether the page is up to date)

The grids are in benchmarks/lineage.toml, results in docs/reference/runs/lineage.
"""

import json
import sys
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from _pages import REFERENCE, ROOT, STORED, table, write
from stored import told

GRIDS, RESULTS = ROOT / "benchmarks/lineage.toml", STORED / "lineage"
PAGE = REFERENCE / "lineage.md"
STAGES = {1: ("first", "First stage"), 2: ("full", "Full size")}
HEAD = """<!-- made by scripts/lineage.py; do not edit -->
# Settings behind the papers' numbers

Where a table differs from its paper, its numbers may come from another fork of the code. Each grid below was written
to `benchmarks/lineage.toml` before it ran. A point is scored over all its cells: the mean of
((here - paper) / deviation)², with the paper's printed deviation or the one named here. The lowest score is best. A
first stage has fewer rounds, clients or seeds than the study: it ranks points, and none of its numbers counts as a
[reproduction](reproduction.md). The best two points of a grid go on to full size.

`python -m benchmarks.lineage NAME --stage 1` runs a grid, and goes on where it was stopped.
"""


def show_grid(name: str, grid: Mapping[str, Any]) -> str:
    """Return the part of the page on a grid."""
    studies = ", ".join(f"`{one}`" for one in grid["studies"])
    stages = "; ".join(
        f"{title.lower()}: {', '.join(f'`{one}`' for one in grid[key]['set']) or 'as in the study'}"
        f", {_count(len(grid[key]['seeds']), 'seed')}"
        for key, title in STAGES.values()
    )
    what = (
        f"{_count(len(grid['cells']), 'number')} of {', '.join(grid['methods'])}"
        if "cells" in grid
        else f"all printed numbers of {', '.join(grid['methods'])}"
    )
    parts = [
        f"## {name}",
        grid["difference"],
        f"Registered {grid['registered']}. Study: {studies}. Scored: {what}; where the paper prints no deviation, "
        f"{grid['deviation']:g}. {stages[0].upper()}{stages[1:]}.",
        f"**What would be concluded.** {grid['conclude']}",
    ]
    found = {stage: _load(name, stage) for stage in STAGES}
    rows = []
    for point in grid["points"]:
        settings = ", ".join(f"`{one}`" for one in point["set"]) or "none"
        rows.append((point["name"], point["found_in"], settings))
    parts.append(table(("point", "found in", "changed"), rows))
    for stage, result in found.items():
        if result is not None:
            parts.append(_show_result(name, stage, result))
    if not any(found.values()):
        parts.append("Not run yet.")
    return "\n\n".join(parts) + "\n"


def _load(name: str, stage: int) -> dict[str, Any] | None:
    path = RESULTS / f"{name}-stage-{stage}.json"
    return json.loads(path.read_text()) if path.exists() else None


def _show_result(name: str, stage: int, result: Mapping[str, Any]) -> str:
    """Return the scores of a stage, best first, with a column for each cell where they are few."""
    ranked = sorted(result["results"], key=lambda row: row["score"])
    first = ranked[0]["cells"]
    few = len(first) <= 6
    # What all cells have in common is not in their names.
    keys = ("study", "row", "cluster", "metric")
    apart = [key for key in keys if len({one[key] for one in first}) > 1] or ["row"]
    names = [", ".join(_shorten(key, one[key]) for key in apart) for one in first]
    head = ["point", "score", "mean difference", "largest difference"]
    methods = _list_stopping(result["results"])
    rows: list[list[object]] = []
    for row in ranked:
        cells = [f"{one['ours']:.2f} / {one['paper']:.2f}" for one in row["cells"]] if few else []
        numbers = f"{row['score']:.2f}", f"{row['mean difference']:+.2f}"
        rounds = {(one["study"], one["row"]): one.get("rounds") for one in row["cells"]}
        rows.append([
            row["point"], *numbers, f"{row['largest difference']:+.2f}", *cells,
            *(f"{rounds[one]:.1f}" for one in methods),
        ])  # fmt: skip
    made = result["origin"]
    title = f"### {name}: {STAGES[stage][1].lower()}"
    where = told(f"lineage/{name}-stage-{stage}", made)
    command = f"```console\n$ {made['command']}\n```"
    several = "study" in apart
    stopped = [
        "rounds trained, "
        + (f"{_shorten('study', study)}, " if several else "")
        + _shorten("row", row)
        for study, row in methods
    ]
    shown = table([*head, *(names if few else ()), *stopped], rows)
    return f"{title}\n\n{command}\n\n{shown}\n\nHere / paper. {where}"


def _list_stopping(results: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return studies and rows whose clients train in more rounds with one point than another."""
    found: dict[tuple[str, str], set[float | None]] = {}
    for row in results:
        for one in row["cells"]:
            found.setdefault((one["study"], one["row"]), set()).add(one.get("rounds"))
    return [key for key, rounds in found.items() if len(rounds) > 1]


def _shorten(key: str, name: str) -> str:
    # A study without its paper, a row without its aggregation.
    return {"study": name.rpartition("/")[2], "row": name.partition("/")[0]}.get(key, name)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def page() -> str:
    """Return the page."""
    grids = tomllib.loads(GRIDS.read_text(encoding="utf-8"))
    return "\n".join([HEAD, *(show_grid(name, grid) for name, grid in grids.items())])


if __name__ == "__main__":
    sys.exit(write({PAGE: page()}))
