"""What the command line shows of server studies: every final metric, time to accuracy, total participation."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from coterie.methods import METHODS
from coterie.studies.run import Study

SHORT = {
    "balanced_accuracy": "balanced", "train_prior_accuracy": "train-prior", "global_accuracy": "global",
    "accuracy_max": "max", "balanced_accuracy_max": "balanced max", "global_accuracy_max": "global max",
    "accuracy_sample_weighted": "by samples", "accuracy_cluster_then_client": "by cluster",
    "n_clusters": "clusters", "rand": "Rand", "adjusted_rand": "adj. Rand", "was": "WAS", "wadb": "WADB",
}  # fmt: skip
"""Headings of the further metrics; "max" is the largest over rounds, on test data, of the mean over clients."""


def rounds(study: Study, console: Console) -> None:
    """Print further metrics, time to accuracy and total participation, where a method of the study has a server.

    Args:
        study: the study.
        console: where to write.
    """
    if not any(METHODS[entry.kind].server for entry in study.config.methods if entry.kind in METHODS):
        return
    further(study.summary["rows"], console)
    for row in study.summary.get("undefined", ()):
        console.print(f"{row['label']}: {row['reason']}", markup=False, highlight=False)
    timed = study.summary.get("time_to_accuracy", ())
    if timed:
        console.print("\nTime to the baseline's best accuracy (TTA)", style="italic")
        console.print(_times(timed))
        for text in dict.fromkeys(f"{row['label']}: {row['reason']}" for row in timed if row["reason"]):
            console.print(text, markup=False, highlight=False)
    console.print("\nTotal participation, client-rounds of training a run", style="italic")
    console.print(_participation(study.summary.get("participation", ())))


def further(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print the final metrics beside the main one: means over clients and seeds; "-" where a method has none."""
    chosen = [row for row in rows if row["cluster"] == "all" and row["metric"] in SHORT]
    names = [name for name in SHORT if any(row["metric"] == name for row in chosen)]
    for first in range(0, len(names), 5):  # 80 columns
        part = names[first : first + 5]
        table = Table(box=None, pad_edge=False, header_style="dim")
        table.add_column("", overflow="fold")
        for name in part:
            table.add_column(SHORT[name], justify="right")
        for label in dict.fromkeys(row["label"] for row in chosen):
            cells = {row["metric"]: row["mean"] for row in chosen if row["label"] == label}
            table.add_row(label, *(_cell(name, cells[name]) if name in cells else "-" for name in part))
        console.print("\nFurther test metrics, accuracies in %" if not first else "", style="italic")
        console.print(table)


def _cell(name: str, value: float | None) -> str:
    if value is None or math.isnan(value):
        return "undefined"
    return f"{100 * value:.1f}" if "accuracy" in name else f"{value:.3g}"


def _times(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("", overflow="fold")
    for head in ("baseline", "accuracy", "round", "times sooner", "reached"):
        table.add_column(head, justify="right")
    for row in rows:
        kind = "global" if row["metric"] == "global_accuracy" else "local"
        time = "never" if not row["reached"] else f"{row['tta']:.0f}"
        ratio = "undefined" if row["ratio"] is None or math.isnan(row["ratio"]) else f"{row['ratio']:.2f}"
        table.add_row(row["label"], row["base"], kind, time, ratio, f"{row['reached']} of {row['seeds']}")
    return table


def _participation(rows: Sequence[Mapping[str, Any]]) -> str:
    totals: dict[str, list[int]] = {}
    for row in rows:
        totals.setdefault(row["label"], []).append(row["client_rounds"])
    return ", ".join(f"{label} {sum(found) / len(found):.0f}" for label, found in totals.items())
