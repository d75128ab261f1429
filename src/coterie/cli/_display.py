"""Terminal output: progress while runs go on, and the tables at the end.

On a terminal, progress is one live line per method; in a pipe or a plain terminal, a plain line
every few seconds. Everything fits 80 columns.
"""

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from rich.console import Console, Group
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from coterie._util.mappings import select_keys
from coterie._util.names import format_clients
from coterie.functional.metrics import DIVERGED, REGISTRY, Metric, Metrics
from coterie.results import by_phase, pairs
from coterie.results.clients import load_client_rows
from coterie.results.coverage import describe_coverage, describe_skipped_rounds
from coterie.results.pairs import Pair
from coterie.results.summary import MEANS, describe_new_clients
from coterie.results.tables import SAME, SAME_OF_ROW, STAR
from coterie.simulation.run import Note
from coterie.simulation.run import Progress as Step
from coterie.studies.definition import StudyConfig
from coterie.studies.run import FoundRuns, FoundTable, Study

RunObserver = Callable[[Step | Note], None]
Observer = Callable[[Step | Note | FoundRuns | FoundTable], None]

FEW_CLIENTS = 12
"""Up to so many clients with names are shown one by one with the results of a study."""
SECONDS = 10.0  # between two lines about a run that is not at its end, in a pipe


def is_live_terminal(console: Console) -> bool:
    """Whether a live line can be drawn: on a terminal with colors and a cursor.

    Not in a pipe, with TERM = "dumb", NO_COLOR or CI set, or in an old Windows console.
    """
    # A live line needs a cursor that moves; a log of a build shows every frame of it.
    plain = (
        console.is_dumb_terminal
        or console.legacy_windows
        or console.no_color
        or bool(os.environ.get("CI"))
    )
    return console.is_terminal and not plain


@contextmanager
def show_progress(
    studies: Sequence[StudyConfig], console: Console, quiet: bool
) -> Iterator[Observer]:
    """Show the progress of a study's runs during the block.

    Args:
        studies: the studies that run, with the same methods.
        console: where to write.
        quiet: show nothing.

    Yields:
        The observer to call after each round, and with the notes of a run before its first round.
    """
    if quiet:
        yield lambda step: None
    elif is_live_terminal(console):
        with _show_bars(studies, console) as observer:
            yield _announce_start(console, observer)
    else:
        yield _announce_start(console, _make_line_observer(console))


def _announce_start(console: Console, observer: RunObserver) -> Observer:
    """Print what is there, and which engine trains, once for each engine, before the rounds."""
    announced: set[str] = set()

    def observe(step: Step | Note | FoundRuns | FoundTable) -> None:
        # Notes about runs that exist already; nothing is trained, and no engine to be named.
        if isinstance(step, FoundRuns | FoundTable):
            console.print(str(step), highlight=False, markup=False, soft_wrap=True)
            return
        # A study can use several engines: its methods differ in their models.
        if isinstance(step, Step) and step.engine and step.engine not in announced:
            announced.add(step.engine)
            console.print(f"engine: {step.engine}", highlight=False, markup=False)
        observer(step)

    return observe


@contextmanager
def _show_bars(studies: Sequence[StudyConfig], console: Console) -> Iterator[RunObserver]:
    # Their widths add to less than 80 columns: labels are cut to 14 letters, and none is wrapped.
    columns = (
        TextColumn("{task.description:<14.14}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[value]:<16}"),
        TimeRemainingColumn(compact=True),
    )
    # Transient: the bars vanish at the end, and the tables take their place.
    with Progress(*columns, console=console, transient=True) as bars:
        tasks: dict[str, TaskID] = {}
        latest: dict[str, int] = {}
        for entry in studies[0].methods:
            rounds = 0
            for study in studies:
                # One more round than is set: the warm-up before the first exchange.
                own = study.scale_method(entry.label).settings.rounds + 1
                rounds += own * len(study.seeds)
            tasks[entry.label] = bars.add_task(entry.label, total=rounds, value="")

        def observe(step: Step | Note) -> None:
            """Advance the bar of a run.

            A resumed run starts late, and a run stops early when all its clients have: both count
            as done.
            """
            if isinstance(step, Note):
                bars.console.print(str(step), highlight=False, markup=False)
                # A column of 16 letters has room for one word.
                bars.update(tasks[step.label], value=f"{step.text.partition(' ')[0]} ...")
                return
            # -2: one before the warm-up, so that the first report of a resumed run counts the
            # rounds before it.
            advance = step.round - latest.get(step.run_name, -2)
            latest[step.run_name] = step.round
            bars.update(tasks[step.label], advance=advance, value=step.describe_score())

        yield observe


def _make_line_observer(console: Console) -> RunObserver:
    """Print a line for each finished run, and otherwise one every few seconds."""
    # A clock that is never set back.
    started = shown = time.monotonic()

    def observe(step: Step | Note) -> None:
        nonlocal shown
        if isinstance(step, Note):
            console.print(str(step), highlight=False, markup=False)
            return
        now, number = time.monotonic(), step.round + 1
        if number == step.rounds or now - shown >= SECONDS:
            shown = now
            parts = f"{step.run_name}: round {number}/{step.rounds}", step.describe_score()
            text = ", ".join(filter(None, parts))
            console.print(f"{text} ({now - started:.0f} s)", highlight=False, markup=False)

    return observe


def print_results(study: Study, console: Console) -> None:
    """Print the tables of a study: what is missing, test results, and gains over training alone."""
    for note in describe_coverage(study.summary):
        console.print(note, markup=False, highlight=False, style="yellow")
    if study.summary["rows"]:
        # In the order of the summary, each once.
        names = list(dict.fromkeys(row["metric"] for row in study.summary["rows"]))
        known = collect_study_metrics(study)
        metric = known[known.choose_main(names)]
        labels = [entry.label for entry in study.config.methods]
        rows = [row for row in study.summary["rows"] if row["metric"] == metric.name]
        compared = pairs.parse_pairs(study.summary)
        console.print(_build_results_table(rows, metric, labels, console.width, compared))
        if said := pairs.describe_leaders(study.summary["rows"], compared, metric):
            console.print(said, markup=False, highlight=False)
        # Numbered clients are shown by `show --clients` alone.
        if 0 < len(study.names) <= FEW_CLIENTS:
            console.print()
            console.print(build_client_table(study, console.width))
        gains = study.gains()
        if gains["rows"]:
            console.print(_build_gain_table(gains, known[gains["metric"]], labels))
        if phases := study.summary.get("phases"):
            console.print(_build_phase_table(phases, known[phases[0]["metric"]]))
        for line in describe_new_clients(study.summary, metric.name):
            console.print(f"\n{line}", markup=False, highlight=False)
    for job, clients in study.diverged.items():
        lost = (
            f"{job}: {len(clients)} clients diverged (their loss became NaN or infinite): "
            f"{format_clients(study.names, clients)}"
        )
        console.print(lost, highlight=False, markup=False, style="bold red")
    # Below all numbers, which nobody should take for those of the full study.
    if study.config.scale != 1:
        console.print(
            f"Rounds were scaled by {study.config.scale:g}: this is a quick test, not the "
            "full study."
        )


def _build_phase_table(rows: Sequence[Mapping[str, Any]], metric: Metric) -> Table:
    """Build the table of the phases of each method, where the data change over the rounds."""
    table = Table(
        title=f"\n{by_phase.describe_columns(metric)}", title_justify="left", title_style="",
        box=None, pad_edge=False, header_style="dim",
    )  # fmt: skip
    for place, head in enumerate(by_phase.HEAD):
        table.add_column(head, justify="right" if place else "left", overflow="fold")
    for row in by_phase.build_phase_rows(rows, metric):
        table.add_row(*map(Text, row))
    return table


def build_client_table(study: Study, width: int) -> Group:
    """Build the table of each client's final test result: methods x clients, or the other way."""
    rows = load_client_rows(study.folder)
    # All rows are of one metric: that by which methods are compared.
    metric = collect_study_metrics(study)[rows[0]["metric"]]
    labels = [entry.label for entry in study.config.methods]
    return _build_results_table(rows, metric, labels, width, title="of each client")


def collect_study_metrics(study: Study) -> Metrics:
    """Return the built-in metrics, and the metrics that the study's methods declared."""
    return REGISTRY.add_stored(study.summary.get("metrics") or {})


def format_number(metric: Metric, value: float, *, signed: bool = False) -> str:
    """Format a value in the unit of its heading."""
    # One client that diverged makes a mean over clients infinite or NaN.
    if not np.isfinite(value):
        return DIVERGED.title
    return metric.format_value(value, brief=True, signed=signed)


def _build_results_table(
    rows: Sequence[Mapping[str, Any]],
    metric: Metric,
    labels: Sequence[str],
    width: int,
    compared: Sequence[Pair] = (),
    title: str = "",
) -> Group:
    """Build methods x clusters, or clusters x methods when the clusters do not fit the width.

    The established best is bold; when several are not distinguished, each has a star.
    """
    clusters = list(dict.fromkeys(row["cluster"] for row in rows))
    count: dict[str, int] = {}
    cells: dict[tuple[str, str], Mapping[str, Any]] = {}
    for row in rows:
        # A cluster that some seeds do not plant has fewer.
        count[row["label"]] = max(row["seeds"], count.get(row["label"], 0))
        cells[row["label"], row["cluster"]] = row
    # The order of the study, then what its summary has in addition.
    labels = list(select_keys(count, labels) | count)
    leading = {cluster: pairs.find_leaders(rows, compared, metric, cluster) for cluster in clusters}
    starred = any(len(first) > 1 for first in leading.values())

    def format_cell(label: str, cluster: str) -> str:
        row, first = cells.get((label, cluster)), leading[cluster]
        # Of a client no seed may have a value.
        if row is None or not row["seeds"]:
            return "-"
        text = format_number(metric, _nan_if_none(row["mean"]))
        if row.get("undefined"):
            text = "undefined"
        # A mean that is not known has no deviation.
        if row["seeds"] > 1 and np.isfinite(_nan_if_none(row["std"])):
            text += f" ±{format_number(metric, _nan_if_none(row['std']))}"
        if row["seeds"] < count[label]:
            text += f" (n {row['seeds']})"
        if first == [label]:
            text = f"[bold]{text}[/bold]"
        # Numbers without a star keep its place, so that decimal points stand below each other.
        mark = STAR if label in first and len(first) > 1 else " "
        return text + mark * starred

    # A method needs its name and 11 columns for each cluster.
    fits = max(map(len, labels)) + 3 + (11 + starred) * len(clusters) <= width
    # If neither way fits, the shorter lines win.
    across = fits or len(labels) > len(clusters)
    table = Table(box=None, pad_edge=False, header_style="dim")
    heads, lines = (clusters, labels) if across else (labels, clusters)
    table.add_column("", overflow="fold")
    if across:
        table.add_column("n", justify="right")
    for head in heads:
        # Escaped: names of clients and clusters may have brackets.
        table.add_column(escape(MEANS.get(head, head)), justify="right")
    if not across:
        table.add_row("n", *(str(count[label]) for label in labels))
    for line in lines:
        values = [str(count[line])] if across else []
        for head in heads:
            label, cluster = (line, head) if across else (head, line)
            values.append(format_cell(label, cluster))
        table.add_row(escape(MEANS.get(line, line)), *values)
    # Methods may have different numbers of seeds: each in its column n, the largest here.
    seeds = max(count.values())
    title = " ".join(filter(None, (metric.heading("test"), title)))
    # Not `capitalize`, which would make small letters of AUROC.
    title = title[0].upper() + title[1:]
    title += f": mean ± std over {seeds} seeds" if seeds > 1 else ": one seed"
    # A title of the table itself would wrap at the table's width.
    parts: list[Text | Table] = [Text(title, style="italic"), table]
    if starred:
        parts.append(Text(SAME if across else SAME_OF_ROW))
    return Group(*parts)


def _nan_if_none(value: float | None) -> float:
    """Return a value of a summary, in which None stands for one that is not finite."""
    return np.nan if value is None else value


def _build_gain_table(gains: dict[str, Any], metric: Metric, labels: Sequence[str]) -> Group:
    by_label = {row["label"]: row for row in gains["rows"]}
    title = f"\nGain over {gains['baseline']} of each client, {metric.heading()}: above 0 is better"
    if any(row.get("mean_low") is not None for row in gains["rows"]):
        title += f", {round(100 * gains['confidence'])} % intervals"
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("")
    for head in ("n", "mean", "worst tenth", "share that lost"):
        table.add_column(head, justify="right")
    # In the order of the study; a label may lack a gain, as the baseline does.
    for label in dict.fromkeys([*labels, *by_label]):
        if label in by_label:
            row = by_label[label]
            mean = _format_gain(metric, row, "mean")
            worst = _format_gain(metric, row, "worst_tenth")
            lost = f"{100 * row['lost']:.0f} %" if np.isfinite(row["lost"]) else DIVERGED.title
            table.add_row(label, str(row["seeds"]), mean, worst, lost)
    return Group(Text(title, style="italic"), table)


def _format_gain(metric: Metric, row: Mapping[str, Any], name: str) -> str:
    """Format a gain with the ends of its interval, if it has one."""
    text = format_number(metric, row[name], signed=True)
    low, high = row.get(f"{name}_low"), row.get(f"{name}_high")
    if low is None or high is None:
        return text
    return f"{text} ({format_number(metric, low)} to {format_number(metric, high)})"


def print_round_results(study: Study, console: Console) -> None:
    """Print further metrics, and for methods with a server time and participation.

    Args:
        study: the study.
        console: where to write.
    """
    known = collect_study_metrics(study)
    print_further_metrics(study.summary["rows"], console, known)
    for row in study.summary.get("undefined", ()):
        console.print(f"{row['label']}: {row['reason']}", markup=False, highlight=False)
    for text in describe_skipped_rounds(study.summary):
        console.print(text, markup=False, highlight=False)
    if not study.server:
        return
    timed = study.summary.get("time_to_accuracy", ())
    if timed:
        console.print("\nTime to the baseline's best accuracy (TTA)", style="italic")
        console.print(_build_times_table(timed))
        said: set[str] = set()
        for row in timed:
            text = f"{row['label']}: {row['reason']}"
            # Two metrics may have one reason.
            if row["reason"] and text not in said:
                said.add(text)
                console.print(text, markup=False, highlight=False)
    console.print(
        "\nTotal participation, client-rounds of training a run (without warm-ups)", style="italic"
    )
    console.print(_format_participation(study.summary.get("participation", ())))


def print_further_metrics(
    rows: Sequence[Mapping[str, Any]], console: Console, known: Metrics = REGISTRY
) -> None:
    """Print the final metrics except the main one, means over clients and seeds."""
    # The main metric has a table of its own.
    main = known.choose_main(row["metric"] for row in rows) if rows else ""
    by_label: dict[str, dict[str, Mapping[str, Any]]] = {}
    found: set[str] = set()
    for row in rows:
        metric = known.get(row["metric"])
        # A summary of another version may name metrics that are not known here.
        if metric is None or metric.shown != "further" or metric.name == main:
            continue
        if row["cluster"] == "all":
            by_label.setdefault(row["label"], {})[row["metric"]] = row
            found.add(row["metric"])
    shown = [metric for name, metric in known.items() if name in found]
    # Five columns of numbers fit 80 columns.
    for first in range(0, len(shown), 5):
        part = shown[first : first + 5]
        table = Table(box=None, pad_edge=False, header_style="dim")
        table.add_column("", overflow="fold")
        table.add_column("n", justify="right")
        for metric in part:
            unit = f", {metric.unit}" if metric.unit else ""
            table.add_column(metric.short + unit, justify="right")
        for label, own in by_label.items():
            cells = []
            for metric in part:
                row = own.get(metric.name)
                cells.append("-" if row is None else _format_cell(metric, row["mean"]))
            seeds = next(iter(own.values()))["seeds"]
            table.add_row(label, str(seeds), *cells)
        console.print("\nFurther metrics" if not first else "", style="italic")
        console.print(table)


def _format_cell(metric: Metric, value: float | None) -> str:
    if value is None or math.isnan(value):
        return "undefined"
    return metric.format_value(value, brief=True)


def _build_times_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("", overflow="fold")
    # Rounds of different length are compared by their time.
    timed = all("seconds" in row for row in rows)
    for head in ("baseline", "metric", "second" if timed else "round", "times sooner", "reached"):
        table.add_column(head, justify="right")
    for row in rows:
        metric = REGISTRY[row["metric"]].title
        time, ratio = "never", "undefined"
        if row["reached"]:
            time = f"{row['seconds']:.4g}" if timed else f"{row['tta']:.0f}"
        sooner = row["seconds_ratio" if timed else "ratio"]
        if sooner is not None and not math.isnan(sooner):
            ratio = f"{sooner:.2f}"
        reached = f"{row['reached']} of {row['seeds']}"
        table.add_row(row["label"], row["base"], metric, time, ratio, reached)
    return table


def _format_participation(rows: Sequence[Mapping[str, Any]]) -> str:
    totals: dict[str, list[int]] = {}
    for row in rows:
        totals.setdefault(row["label"], []).append(row["client_rounds"])
    return ", ".join(f"{label} {sum(found) / len(found):.0f}" for label, found in totals.items())
