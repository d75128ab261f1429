"""Write docs/reference/reproduction.md: stored studies beside the numbers of their papers.

    coterie run similarity/synthetic
    python scripts/reproduction.py store runs/similarity/synthetic "coterie run similarity/synthetic" [--in-parts]
    python scripts/reproduction.py            (`--check` only says whether the page is up to date)

A stored study is docs/reference/runs/<study>/: summary.json and config.toml as the study left them, origin.json with
the command and the machine (and the duration, but of a study that was run `--in-parts`), notes.md, written by hand,
with what explains the differences, and where needed trials.json with further runs. No number of the tables is typed.
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
from _pages import REFERENCE, STORED, markdown, table, write

from coterie.cli import _tables
from coterie.papers import compare
from coterie.results import coverage, summary
from coterie.simulation import final_metrics

HEAD = """# Reproduction of the papers

Written by `make docs` from the stored summaries of `docs/reference/runs`; do not edit. `coterie compare RUN --paper`
prints the same tables for your own run.

A number is *within* when its distance from the paper's is at most twice the standard deviation of their difference, or
one point of accuracy. Standard deviations are population deviations over seeds, as in the papers; where a paper prints
none, it counts as zero. Rows that are not in the paper (tuned, or with another learning rate) are compared with the
published row that they explain, and say so in their names.
"""


def store(run: Path, command: str, *, in_one_go: bool = True) -> Path:
    """Keep what a study came to: summary, settings, and where it comes from; its duration if it ran in one go."""
    content = summary.summarize(run)
    content["rows"] += _left_out(run, content["rows"])
    target = STORED / content["study"]
    target.mkdir(parents=True, exist_ok=True)
    (target / "summary.json").write_text(json.dumps(summary.json_ready(content), indent=1, ensure_ascii=False) + "\n")
    shutil.copy(run / summary.CONFIG, target / summary.CONFIG)
    runs = _compared(run)
    first = runs[0].provenance
    origin = {
        "command": command,
        "python": first["python"],
        "packages": {name: first["packages"][name] for name in ("torch", "numpy")},
        "hardware": first["hardware"],
        "engines": sorted({run.provenance["engine"]["name"] for run in runs}),
        "runs": len(runs),
        "rounds": max(run.rounds for run in runs),
        "rounds_trained": {label: round(_trained(group), 1) for label, group in summary.by_label(runs).items()},
        "wall_s": round(sum(t["wall_s"] for t in content["timing"]), 1),
        "train_samples": sum(t["train_samples"] for t in content["timing"]),
    }
    if in_one_go:
        started, ended = (run / summary.CONFIG).stat().st_mtime, (run / "summary.json").stat().st_mtime
        origin["elapsed_s"] = round(ended - started, 1)
    (target / "origin.json").write_text(json.dumps(origin, indent=1) + "\n")
    return target


def _compared(folder: Path) -> list[summary.StoredRun]:
    """Return the runs that the summary is made of."""
    return summary.compared(*summary.find_runs([folder]))


def _left_out(folder: Path, known: list[dict]) -> list[dict]:
    """Return what the tables of the runs hold and was not asked for: scores of the clusters, and the best rounds."""
    there = {(row["label"], row["metric"]) for row in known}
    rows = []
    for label, group in summary.by_label(_compared(folder)).items():
        found: dict[str, list[float]] = {}
        for run in group:
            for name, value in _outcome(run).items():
                found.setdefault(name, []).append(value)
        rows += [
            {
                "method": group[0].method, "label": label, "cluster": "all", "metric": name,
                **dict(zip(("mean", "std"), summary.over_seeds(np.array(values)), strict=True)), "seeds": len(values),
            }
            for name, values in found.items() if (label, name) not in there
        ]  # fmt: skip
    return rows


def _outcome(run: summary.StoredRun) -> dict[str, float]:
    """Return the Rand indices and the number of the clusters that a run ended with, and its best rounds."""
    table = run.metrics
    values = {name: float(value.mean()) for name, value in final_metrics.maxima(table).items()}
    labels = table.loc[(table["metric"] == "label").to_numpy()]
    if len(labels):
        last = labels.loc[(labels["round"] == labels["round"].max()).to_numpy()].sort_values("client")
        found, truth = (torch.tensor(last[name].to_numpy(dtype=int)) for name in ("value", "cluster"))
        values |= final_metrics.cluster_metrics(found, truth, torch.zeros(len(last), 0, dtype=torch.int64))
    return values


def _trained(runs: list[summary.StoredRun]) -> float:
    """Return in how many rounds a client trained, mean over clients and runs: fewer than all where it stopped."""
    total = 0
    for run in runs:
        rows = run.metrics
        total += int(((rows["split"] == "train") & (rows["metric"] == "loss") & (rows["round"] >= 0)).sum())
    return total / sum(len(run.clients) for run in runs)


def section(folder: Path) -> str:
    """Return the part of the page on one stored study."""
    result = compare.read(folder)
    comparison = None if result.experiment is None else compare.with_paper(result)
    origin = json.loads((folder / "origin.json").read_text())
    machine, packages = origin["hardware"], origin["packages"]
    cores = f"{machine['cores']} {machine['machine']} cores"
    if "elapsed_s" in origin:
        took = f"{origin['elapsed_s']:,.0f} s elapsed on {cores}, one thread a run"
    else:
        took = f"{origin['wall_s']:,.0f} s over all runs, on {cores} shared with other work"
    runs = f"{origin['runs']} run{'s' if origin['runs'] != 1 else ''}"
    cost = (
        f"{runs}, {origin['train_samples']:,} training samples, {took}; Python "
        f"{origin['python']}, torch {packages['torch']}, numpy {packages['numpy']}, engine "
        f"{' and '.join(origin['engines'])}. Seconds a run, by method: {_seconds(folder)}."
    )
    trained = origin["rounds_trained"].values()
    if min(trained) < origin["rounds"] and result.study.settings.participation == 1.0:
        cost += (
            f" With early stopping, clients trained in {min(trained):g} to {max(trained):g} of the {origin['rounds']} "
            "rounds on average, by method."
        )
    parts = [
        f"## {result.study.name}",
        result.study.description,
        *([] if comparison is None else [f"Paper: {comparison.reference}."]),
        f"```console\n$ {origin['command']}\n```",
        cost,
    ]
    missing = coverage.notes({"rows": result.rows, "seeds": result.seeds, "left_out": result.left_out})
    parts += ["\n".join(f"* {note}" for note in missing)] if missing else []
    notes = folder / "notes.md"
    if notes.exists():
        parts.append(notes.read_text().strip())
    trials = folder / "trials.json"
    if trials.exists():
        parts += [
            "### Further runs with one setting changed",
            _trials(json.loads(trials.read_text())),
        ]
    if comparison is None:
        return "\n\n".join([*parts, _alone(result)]) + "\n"
    for beside in _tables.against_paper(comparison):
        parts += [f"### {beside.title}", markdown(beside)]
    if comparison.notes:
        parts.append("On the printed numbers: " + " ".join(comparison.notes))
    return "\n\n".join(parts) + "\n"


def _alone(result: compare.Result) -> str:
    """Return the numbers of a study that repeats no published experiment."""
    rows = [row for row in result.rows if row["cluster"] == "all" and row["mean"] is not None]
    cells = [(row["label"], row["metric"].replace("_", " "), f"{row['mean']:.4g}", str(row["seeds"])) for row in rows]
    return table(("method", "metric, mean over clients", "here", "seeds"), cells)


def _seconds(folder: Path) -> str:
    """Return how long the runs of each method took, mean over seeds."""
    took: dict[str, list[float]] = {}
    for run in json.loads((folder / "summary.json").read_text())["timing"]:
        took.setdefault(run["label"], []).append(run["wall_s"])
    return ", ".join(f"{label} {sum(values) / len(values):,.3g}" for label, values in took.items())


def _trials(rows: list[dict]) -> str:
    """Return the experiments that explain differences."""
    values = [f"{row['mean']:.2f}" + (f" ± {row['std']:.2f}" if row["seeds"] > 1 else "") for row in rows]
    cells = [(row["label"], row["changes"], value, str(row["seeds"])) for row, value in zip(rows, values, strict=True)]
    return table(("method", "changed", f"test {rows[0]['metric']}", "seeds"), cells)


def page() -> str:
    """Return the page."""
    folders = sorted(path.parent for path in STORED.rglob("origin.json"))
    return "\n".join([HEAD, *map(section, folders)])


if __name__ == "__main__":
    if sys.argv[1:2] == ["store"]:
        print(store(Path(sys.argv[2]), sys.argv[3], in_one_go="--in-parts" not in sys.argv))
    else:
        sys.exit(write({REFERENCE / "reproduction.md": page()}))
