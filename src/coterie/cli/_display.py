"""Terminal output: progress while runs go on, and the tables at the end.

On a terminal, progress is one live line per method; in a pipe or a plain terminal, a plain line every few seconds.
Everything fits 80 columns.
"""

import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from coterie.methods import METHODS
from coterie.results.summary import HIGHER_IS_BETTER
from coterie.simulation import checkpoint
from coterie.simulation.run import Observer
from coterie.simulation.run import Progress as Step
from coterie.studies.definition import StudyConfig
from coterie.studies.run import Job, Study, run_folder

SECONDS = 10.0  # between two lines about a run that is not at its end, in a pipe
MEANS = {"all": "mean over clients", "clusters": "mean over clusters"}


def lively(console: Console) -> bool:
    """Whether a live line can be drawn: on a terminal with colors and a cursor.

    Not in a pipe, with TERM = "dumb", NO_COLOR or CI set, or in an old Windows console.
    """
    plain = console.is_dumb_terminal or console.legacy_windows or console.no_color or bool(os.environ.get("CI"))
    return console.is_terminal and not plain


@contextmanager
def progress(studies: Sequence[StudyConfig], console: Console, quiet: bool) -> Iterator[Observer]:
    """Show the progress of a study's runs.

    Args:
        studies: the studies that run one after another, with the same methods.
        console: where to write.
        quiet: show nothing.

    Yields:
        The observer to call after each round.
    """
    if quiet:
        yield lambda step: None
    elif lively(console):
        with _live(studies, console) as observer:
            yield observer
    else:
        yield _lines(console)


@contextmanager
def _live(studies: Sequence[StudyConfig], console: Console) -> Iterator[Observer]:
    columns = (
        TextColumn("{task.description:<14.14}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[value]:<16}"),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        tasks: dict[str, TaskID] = {}
        latest: dict[tuple[str, int], int] = {}
        for entry in studies[0].methods:
            rounds = sum((study.scaled(entry.label).settings.rounds + 1) * len(study.seeds) for study in studies)
            tasks[entry.label] = bars.add_task(entry.label, total=rounds, value="")

        def observe(step: Step) -> None:
            """A run that is resumed starts late, and stops early when all its clients have: both count as done."""
            before = latest.get((step.label, step.seed), -2)
            advance = step.round - before if step.round > before else step.round + 2
            latest[step.label, step.seed] = step.round
            bars.update(tasks[step.label], advance=advance, value=_quality(step))

        yield observe


def _lines(console: Console, every: float = SECONDS) -> Observer:
    """A line for each run that has come to its end, and otherwise one every few seconds."""
    started = told = time.monotonic()

    def observe(step: Step) -> None:
        nonlocal told
        now, number = time.monotonic(), step.round + 1
        if number == step.rounds or now - told >= every:
            told = now
            parts = (f"{step.label}, seed {step.seed}: round {number}/{step.rounds}", _quality(step))
            text = ", ".join(filter(None, parts))
            console.print(f"{text} ({now - started:.0f} s)", highlight=False, markup=False)

    return observe


def _quality(step: Step) -> str:
    """The validation accuracy or loss, if this round was evaluated."""
    if not np.isnan(step.accuracy):
        return f"val. acc. {100 * step.accuracy:.1f} %"
    return "" if np.isnan(step.loss) else f"val. loss {step.loss:.4g}"


def states(folder: Path, study: StudyConfig) -> Iterator[str]:
    """The progress of a study's runs: a line per method, with its seeds grouped by state."""
    for entry in study.methods:
        rounds = study.scaled(entry.label).settings.rounds
        seeds: dict[str, list[str]] = {}
        for seed in study.seeds:
            run = run_folder(folder, Job(entry.label, seed))
            done = checkpoint.rounds_done(run)
            state = "not begun" if done is None else f"at round {max(done, 0)} of {rounds}"
            seeds.setdefault("finished" if checkpoint.finished(run) else state, []).append(str(seed))
        told = (f"seed{'s' * (len(own) > 1)} {', '.join(own)} {state}" for state, own in seeds.items())
        yield f"  {entry.label}: {'; '.join(told)}"


def results(study: Study, console: Console) -> None:
    """Print the tables of a study: test results, and the gains over training alone."""
    names = [str(metric) for metric in study.rows["metric"].unique()]
    metric = next(name for name in ("accuracy", "mse", "loss") if name in names)
    labels = [entry.label for entry in study.config.methods]
    rows = study.rows[study.rows["metric"] == metric]
    console.print(_table_of(rows, metric, labels, f"Test {unit(metric)}", console.width))
    gains = study.gains()
    if gains["rows"]:
        console.print(_gain_table(gains, labels))
    for job, clients in study.diverged.items():
        few = ", ".join(map(str, clients[:5])) + (", ..." if len(clients) > 5 else "")
        lost = f"{job}: {len(clients)} clients diverged (their loss became NaN or infinite): {few}"
        console.print(lost, highlight=False, markup=False, style="bold red")
    if study.config.scale != 1:
        console.print(f"Rounds were scaled by {study.config.scale:g}: a quick look, not the study as it is meant.")


def unit(metric: str) -> str:
    """Return a metric with its unit, for a heading."""
    return {"accuracy": "accuracy in %", "mse": "mean squared error"}.get(metric, metric)


def number(metric: str, value: float, digits: int = 1) -> str:
    """Return a value in the unit of its heading."""
    if not np.isfinite(value):
        return "diverged"
    return f"{100 * value:.{digits}f}" if metric == "accuracy" else f"{value:.4g}"


def _table_of(rows: Any, metric: str, labels: Sequence[str], title: str, width: int) -> Group:
    """Methods x clusters, or clusters x methods where the clusters do not fit the width."""
    clusters = list(dict.fromkeys(rows["cluster"]))
    seeds = int(rows["seeds"].max())
    cells = {(r.label, r.cluster): (r.mean, r.std) for r in rows.itertuples()}
    best = {
        cluster: (max if metric in HIGHER_IS_BETTER else min)(
            (cells[label, cluster][0] for label in labels if (label, cluster) in cells), default=None
        )
        for cluster in clusters
    }

    def cell(label: str, cluster: str) -> str:
        if (label, cluster) not in cells:
            return "-"
        mean, std = cells[label, cluster]
        text = number(metric, mean) + (f" ±{number(metric, std)}" if seeds > 1 else "")
        return f"[bold]{text}[/bold]" if mean == best[cluster] else text

    title += f": mean ± std over {seeds} seeds" if seeds > 1 else ": one seed"
    across = 12 + 11 * len(clusters) <= width or len(labels) > len(clusters)
    table = Table(box=None, pad_edge=False, header_style="dim")
    heads, lines = (clusters, labels) if across else (labels, clusters)
    table.add_column("", overflow="fold")
    for head in heads:
        table.add_column(MEANS.get(head, head), justify="right")
    for line in lines:
        values = [cell(line, head) if across else cell(head, line) for head in heads]
        table.add_row(MEANS.get(line, line), *values)
    return Group(Text(title, style="italic"), table)  # a title of the table itself would wrap at the table's width


def _gain_table(gains: dict[str, Any], labels: Sequence[str]) -> Group:
    metric = gains["metric"]
    by_label = {row["label"]: row for row in gains["rows"]}
    title = f"\nGain over {gains['baseline']} of each client, {unit(metric)}: above 0 is better"
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("")
    for head in ("mean", "worst tenth", "share that lost"):
        table.add_column(head, justify="right")
    for label in labels:
        if label in by_label:
            row = by_label[label]
            mean, worst = (_signed(metric, row[name]) for name in ("mean", "worst_tenth"))
            table.add_row(label, mean, worst, f"{100 * row['lost']:.0f} %")
    return Group(Text(title, style="italic"), table)


def _signed(metric: str, value: float) -> str:
    return ("+" if value >= 0 else "") + number(metric, value)


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
