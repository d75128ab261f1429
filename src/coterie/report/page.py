"""The report: one page that opens from disk, made from stored run folders.

The first view (the study in words, the result tables) is written here as plain HTML, so that people
without JavaScript and programs can read it: every number carries its exact value in `data-value`.
The other views are drawn in the page by assets/*.js from the reduced data of `build_payload`; the
plotting library, Apache ECharts, is embedded.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from coterie._util.facts import format_range
from coterie._util.files import check_replaceable, prepare_file, write_atomically
from coterie._util.mappings import drop_empty, drop_keys
from coterie._util.names import format_clients, shorten_clients
from coterie.functional.metrics import EPSILON, Metric
from coterie.report.data import build_empty_payload, build_payload
from coterie.results import by_phase, pairs
from coterie.results.clients import collect_client_values
from coterie.results.planted import MOST_CLUSTERS
from coterie.results.stored_runs import (
    StoredRun,
    UnreadableRun,
    collect_metrics,
    load_runs,
    merge_client_names,
)
from coterie.results.summary import MEANS, describe_new_clients
from coterie.results.tables import STAR

SHARE = Metric("lost", unit="%", scale=100.0, digits=2)
BEGINNING = b"<!doctype html>"
"""Of every page; a file that begins otherwise is never replaced by one."""
# More rows than a page shows at once; the chart of clients has all of them.
MOST_NAMED = 12
"""Clients with names of which a table shows each."""
# One script on the page, in this order: `core` has what the others use, `main` starts them.
SCRIPTS = (
    "core.js",
    "pairs.js",
    "curves.js",
    "reads.js",
    "graph.js",
    "clients.js",
    "cost.js",
    "data.js",
    "main.js",
)


def write_report(study: str | Path, out: str | Path | None = None) -> Path:
    """Write the report of a study.

    Args:
        study: the study's folder, or one run's.
        out: the file to write; default report.html in the study's folder.

    Returns:
        The path of the page.

    Raises:
        DataError: when the folder holds no run, or several studies. Runs of the study that are
            missing, damaged or not finished are named in the page instead.
    """
    return write_report_with_notes(study, out)[0]


def write_report_with_notes(
    study: str | Path, out: str | Path | None = None
) -> tuple[Path, list[str]]:
    """Write the report, and return its path and the notes at its top about runs that are not in it.

    The arguments are those of `write_report`.
    """
    path = Path(out) if out is not None else Path(study) / "report.html"
    # Before the runs are read, which may take a while.
    check_replaceable(path, BEGINNING)
    runs, problems = load_runs([study])
    prepare_file(path)
    # A folder whose runs are all unreadable still gets a page, which says so.
    data = build_data(runs, problems, Path(study))
    write_atomically(path, render_page(data, render_overview(data, runs)).encode())
    return path, data["notes"]


def build_data(
    runs: Sequence[StoredRun], problems: Sequence[UnreadableRun], folder: Path
) -> dict[str, Any]:
    """Return the data of the page, with runs or without any that could be read."""
    return build_payload(runs, problems, folder) if runs else build_empty_payload(folder, problems)


def render_page(data: Mapping[str, Any], first: str, *, connect: str = "'none'") -> str:
    """Render a page from its data and its first view.

    Args:
        data: what `build_payload` returned.
        first: the first view, as `render_overview` returned it.
        connect: where the page's scripts may connect to, as in a content security policy.
    """
    slots = {
        "title": escape(str(data["study"])),
        "subtitle": escape(format_subtitle(data)),
        # The page's own policy: opened from a disk it connects to nothing.
        "connect": connect,
        "style": load_asset("report.css"),
        "overview": first,
        "footer": "Made by Coterie from the run folders alone; the parquet files next to this page "
        "hold every value. "
        "Charts: Apache ECharts (Apache License 2.0).",
        "data": encode_for_script(data),
        # In the page itself, which must open without a network.
        "library": load_asset("vendor/echarts.min.js"),
        "script": "\n".join(map(load_asset, SCRIPTS)),
    }
    return fill_template("report.html", slots)


def fill_template(name: str, slots: Mapping[str, str]) -> str:
    """Return a file of the page with each [[name]] in it replaced."""
    # A function as replacement: in a text `re.sub` would interpret backslashes.
    return re.sub(r"\[\[(\w+)\]\]", lambda match: slots[match[1]], load_asset(name))


@cache
def load_asset(name: str) -> str:
    """Load the text of a file that is part of the page."""
    return resources.files("coterie.report").joinpath("assets", name).read_text("utf-8")


def encode_for_script(data: Mapping[str, Any]) -> str:
    """Encode data as JSON that cannot end the script element around it."""
    # NaN is not JSON: `allow_nan=False` raises instead of writing a page that no browser reads.
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # "<" cannot begin "</script>"; U+2028 and U+2029 end a line in older JavaScript.
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def format_subtitle(data: Mapping[str, Any]) -> str:
    """Format the line under the title: what was compared, on how many clients."""
    if not data["methods"]:
        return "No run could be read."
    results = data["results"]
    # Seeds that all methods finished, and all seeds that are known.
    compared = len(results["seeds"])
    seeds = len({*results["seeds"], *(one["seed"] for one in results["left_out"])})
    parts = [_format_count(len(data["cluster"]), "client")]
    if len(data["clusters"]) > 1:
        parts.append(f"{len(data['clusters'])} planted clusters")
    parts.append(_format_count(len(data["methods"]), "method"))
    known = _format_count(seeds, "seed")
    parts.append(f"{compared} of {known}" if 0 < compared < seeds else known)
    return ", ".join(parts)


def _format_count(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' if count != 1 else ''}"


def describe_privacy(runs: Sequence[StoredRun]) -> list[str]:
    """Describe the privacy that each method guarantees; nothing if none is private."""
    found: dict[str, list[float]] = {}
    for run in runs:
        if EPSILON.name in run.result_metrics:
            found.setdefault(run.label, []).extend(run.final_values(EPSILON.name).tolist())
    parts = []
    for label, values in found.items():
        if values:
            mean = EPSILON.format_value(sum(values) / len(values))
            # Not `max`, which finds NaN or not by the order of the values.
            largest = EPSILON.format_value(float(np.max(values)))
            parts.append(f"{label} {mean} ({largest})")
    if not parts:
        return []
    # The largest is the weakest guarantee that any client has.
    head = "Epsilon of differential privacy, mean over clients and seeds (largest)"
    return [f"{head}: {', '.join(parts)}"]


def render_overview(data: Mapping[str, Any], runs: Sequence[StoredRun]) -> str:
    """Render the first view as HTML: notes, the study in words, the results, the gains."""
    parts = [render_notes(data["notes"])]
    if not runs:
        nothing = "<p>Nothing to show yet: no run of this study has finished a round.</p>"
        return parts[0] + nothing
    parts.append("<h2>The study</h2>" + render_study_description(runs[0].config, data))
    known = collect_metrics(runs)
    names = list(dict.fromkeys(row["metric"] for row in data["results"]["rows"]))
    # The main metric comes first, the others in a fold below it.
    names.sort(key=lambda name: name != data["metric"])
    tables = {}
    for name in names:
        tables[name] = render_result_table(data, known[name])
        tables[name] += render_client_table(data, runs, known[name])
    if names:
        main, *others = names
        parts.append(f"<h2>Results</h2>{tables[main]}")
        new_clients = describe_new_clients(data["results"], data["metric"])
        for line in [*describe_privacy(runs), *new_clients]:
            parts.append(f"<p>{escape(line)}.</p>")
        if phases := data["results"].get("phases"):
            table = render_phase_table(phases, known[phases[0]["metric"]])
            parts.append(f"<h2>By phase</h2>{table}")
        gains = render_gain_table(data, known[data["gains"]["metric"]])
        parts.append(f"<h2>Gain over training alone</h2>{gains}")
        for name in others:
            summary = f"<summary>The same for {escape(known[name].heading('test'))}</summary>"
            parts.append(f"<details>{summary}{tables[name]}</details>")
    parts.append('<div id="glance"></div>')
    return "\n".join(parts)


def render_phase_table(rows: Sequence[Mapping[str, Any]], metric: Metric) -> str:
    """Render the phases of each method, where the data change over the rounds."""
    body = []
    for label, *cells in by_phase.build_phase_rows(rows, metric):
        values = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        body.append(f'<tr><th scope="row">{escape(label)}</th>{values}</tr>')
    return render_table("results", by_phase.describe_columns(metric), by_phase.HEAD, body)


def render_table(
    css: str, caption: str, heads: Sequence[str], rows: Sequence[str], metric: str = ""
) -> str:
    """Render a table of a metric, if it is of one; the heads and the rows are HTML already."""
    about = f' data-metric="{escape(metric)}"' if metric else ""
    head = "".join(f'<th scope="col">{one}</th>' for one in heads)
    return (
        f'<div class="scroll"><table class="{css}"{about}><caption>{escape(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def render_client_table(data: Mapping[str, Any], runs: Sequence[StoredRun], metric: Metric) -> str:
    """Render each client's value, mean over seeds; "" for many, unnamed or clustered clients."""
    names = list(data.get("names") or ())
    few_named = 0 < len(names) <= MOST_NAMED and all(names)
    if not few_named or data["clusters"] or metric.over == "run":
        return ""
    # Of the seeds that the table above has: both tables are of the same runs.
    chosen = [run for run in runs if run.is_finished and run.seed in data["results"]["seeds"]]
    found = collect_client_values(chosen, metric.name)
    called = shorten_clients(merge_client_names(chosen), sorted(set().union(*found.values())))
    body = []
    for label, own in found.items():
        cells = []
        for client in called:
            values = own.get(client)
            mean = float(np.mean(values)) if values else math.nan
            shown = mean if math.isfinite(mean) else None
            cells.append(render_cell(shown, metric.format_value(shown)))
        body.append(f'<tr><th scope="row">{escape(label)}</th>{"".join(cells)}</tr>')
    caption = (
        f"{metric.heading('test')} of each client, mean over seeds; a dash where a model diverged, "
        "or where it is not defined in any."
    )
    caption = caption[0].upper() + caption[1:]
    return render_table(
        "results by-client", caption, ["Method", *map(escape, called.values())], body
    )


def _describe_folds(folds: int | None) -> str:
    """Describe how seeds test folds."""
    if not folds:
        return ""
    return (
        f"{folds}: each seed tests another part of every client's samples, {folds} seeds all of "
        "them; intervals are widened for the training samples that seeds share"
    )


def render_notes(notes: Sequence[str]) -> str:
    """Render the notes: left-out runs, compared seeds, and skipped rounds."""
    if not notes:
        return ""
    lines = "".join(f"<li>{escape(note)}</li>" for note in notes)
    head = "<p>What to know about the tables:</p>"
    return f'<div class="problem" role="alert">{head}<ul>{lines}</ul></div>'


def render_study_description(config: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    """Render the study in words, as a list of terms and descriptions."""
    settings, local = config.get("data") or {}, config.get("local") or {}
    model = config.get("model") or {}
    compared = [f"{method['label']} ({method['kind']})" for method in data["methods"]]
    in_pairs = ""
    if data.get("pairs", {}).get("families"):
        in_pairs = (
            "paired by seed and client, with Student's interval over the seeds, corrected for the "
            "number of pairs by Holm's rule"
        )
    entries = {
        "Data": _format_value(settings.get("dataset")),
        "Shift": "; ".join(map(_describe_shift, settings.get("shift") or [])),
        "Drift": "; ".join(map(_describe_shift, settings.get("drift") or [])),
        "Clients": _describe_clients(settings, data),
        "Folds": _describe_folds(settings.get("folds")),
        "Planted clusters": _describe_clusters(data["clusters"]),
        "Model": _format_value(model.get("kind")),
        "Compared": ", ".join(compared),
        "Training": _describe_training(config, local),
        "Evaluated": _describe_evaluation(config),
        "Averaged": _describe_averaging(bool(data["clusters"])),
        "Compared in pairs": in_pairs,
    }
    rows = ""
    for term, text in entries.items():
        if text:
            rows += f"<dt>{escape(term)}</dt><dd>{escape(text)}</dd>"
    return f'<dl class="words">{rows}</dl>'


def _describe_clients(settings: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    """Describe how many clients there are, with their names, and their numbers of samples."""
    text = f"{len(data['cluster'])}"
    names = drop_empty(dict(enumerate(data.get("names") or ())))
    if names:
        text += f" ({format_clients(names, names)})"
    if settings.get("train"):
        train, validation = settings["train"], settings.get("validation", 0)
        text += f", each with {train} training and {validation} validation samples"
    return text


def _describe_averaging(clusters: bool) -> str:
    """Describe what a mean is over, with planted clusters or without."""
    first = "per client on its own test set; then over all clients"
    if clusters:
        first = (
            "per client on the test set of its own cluster; then over the clients of a cluster, "
            "over all clients, or over clusters with equal weight"
        )
    last = "then mean ± population standard deviation over the n seeds that all methods finished"
    return f"{first}; {last}"


def _describe_clusters(clusters: Sequence[Mapping[str, Any]]) -> str:
    """Describe the planted clusters: each, or how many and how large where they are many."""
    if len(clusters) <= MOST_CLUSTERS:
        return ", ".join(map(_describe_cluster, clusters))
    sizes = [cluster["size"] for cluster in clusters]
    plural = "s" * (max(sizes) != 1)
    return f"{len(clusters)}, each of {format_range(sizes)} client{plural}"


def _describe_cluster(cluster: Mapping[str, Any]) -> str:
    """Describe a planted cluster and its size; a node's roster gives clusters numbers, no names."""
    name = cluster["name"]
    if name.isdigit():
        name = f"cluster {name}"
    return f"{name} ({_format_count(cluster['size'], 'client')})"


def _format_value(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_format_value, value))
    if value is None:
        return ""
    return f"{value:g}" if isinstance(value, float) else str(value)


def _describe_shift(shift: Mapping[str, Any]) -> str:
    rest = drop_keys(shift, {"kind"})
    if not rest:
        return str(shift.get("kind", ""))
    return f"{shift.get('kind', 'shift')}: {_format_settings(rest)}"


def _format_settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {_format_value(value)}" for key, value in settings.items())


def _describe_training(config: Mapping[str, Any], local: Mapping[str, Any]) -> str:
    parts = [f"{config['rounds']} rounds"] if "rounds" in config else []
    if local.get("epochs"):
        parts.append(f"{_format_count(local['epochs'], 'local epoch')} a round")
    if local.get("optimizer"):
        rate, size = _describe_learning_rate(local), local.get("batch_size")
        parts.append(f"{local['optimizer']}, {rate}, batches of {size}")
    if isinstance(dp := local.get("dp"), Mapping):
        parts.append(f"differentially private ({_format_settings(dp)})")
    return ", ".join(parts)


def _describe_learning_rate(local: Mapping[str, Any]) -> str:
    text = f"learning rate {local.get('lr')}"
    schedules = local.get("lr_schedule") or []
    if not isinstance(schedules, list):
        schedules = [schedules]
    kinds = [str(one.get("kind") if isinstance(one, Mapping) else one) for one in schedules]
    return f"{text} ({', '.join(kinds)})" if kinds else text


def _describe_evaluation(config: Mapping[str, Any]) -> str:
    which = "each client's best model on its validation set"
    if config.get("evaluate") == "final":
        which = "the model after the last round"
    return f"{which}, on test data that no client trained on"


def render_cell(value: float | None, text: str, css: str = "") -> str:
    """Render one number of a table, with its exact value for programs."""
    # `repr` gives the shortest text that reads back as the same number.
    exact = "" if value is None else f' data-value="{value!r}"'
    style = f" class={css!r}" if css else ""
    return f"<td{exact}{style}>{text}</td>"


def render_result_table(data: Mapping[str, Any], metric: Metric) -> str:
    """Render the table of one metric: methods by clusters, and over all clients."""
    # A metric of the whole run has one value: no clusters, no clients.
    whole = metric.over == "run"
    rows = []
    for row in data["results"]["rows"]:
        if row["metric"] == metric.name and (row["cluster"] == "all" or not whole):
            rows.append(row)
    columns = list(dict.fromkeys(row["cluster"] for row in rows))
    names = {"all": "whole run"} if whole else MEANS
    heads = ["Method", "n", *(escape(names.get(c) or c) for c in columns)]
    # A column without pairs, as of a single method, has no leaders.
    leading: dict[str, list[str]] = {column: [] for column in columns}
    standing = ""
    for family in data["pairs"]["families"]:
        if family["metric"] == metric.name:
            leading[family["cluster"]] = family["leaders"]
            if family["cluster"] == "all":
                standing = family["standing"]
    by_label: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        by_label.setdefault(row["label"], {})[row["cluster"]] = row
    body = []
    for label, cells in by_label.items():
        # A cluster that some seeds do not plant has fewer, which its cell says.
        seeds = max(row["seeds"] for row in cells.values())
        line = [f'<th scope="row">{escape(label)}</th><td>{seeds}</td>']
        for column in columns:
            line.append(_render_mean(cells.get(column), metric, leading[column], seeds))
        body.append(f'<tr data-label="{escape(label)}">{"".join(line)}</tr>')
    caption = _describe_result_table(metric, [leading[column] for column in columns], rows)
    table = render_table("results", caption, heads, body, metric.name)
    return table + (f'<p class="standing">{escape(standing)}</p>' if standing else "")


def _render_mean(
    row: Mapping[str, Any] | None, metric: Metric, leading: Sequence[str], seeds: int
) -> str:
    """Render the cell of a method in one column: bold if it is best, a star if it is tied.

    Args:
        row: of the summary; None where the method has no value in the column.
        metric: what it shows.
        leading: the methods that lead in the column.
        seeds: of the method's row; a cell over fewer says so.
    """
    if row is None:
        return "<td>–</td>"
    text = metric.format_value(row["mean"])
    # One seed has no deviation, and neither has a mean that is not known.
    if row["std"] is not None:
        text += f" <small>± {metric.format_value(row['std'])}</small>"
    if row["seeds"] < seeds:
        text += f" <small>(n {row['seeds']})</small>"
    if row["label"] in leading and len(leading) > 1:
        title = "cannot be distinguished from the best of its column"
        text += f'<abbr title="{title}">{STAR}</abbr>'
    # Bold alone where it stands alone: of several that are tied none is best.
    return render_cell(row["mean"], text, "best" if leading == [row["label"]] else "")


def _describe_result_table(
    metric: Metric, leading: Sequence[Sequence[str]], rows: Sequence[Mapping[str, Any]]
) -> str:
    """Describe a table of results: the metric, its marks, and which methods are not ranked."""
    parts = [f"{metric.heading('test')}, {metric.better} is better"]
    if not metric.better:
        parts = [metric.heading("test")]
    if any(len(first) == 1 for first in leading):
        parts.append("in bold what is established as the best of its column")
    if any(len(first) > 1 for first in leading):
        parts.append(f"{STAR} cannot be distinguished from the best of its column")
    if any(leading):
        parts += pairs.describe_unranked(rows)
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def render_gain_table(data: Mapping[str, Any], metric: Metric) -> str:
    """Render each client's gain over the baseline, summarized."""
    gains = data["gains"]
    # Without Local, or without a seed that Local and another method both have.
    if gains["baseline"] is None or not gains["rows"]:
        return (
            "<p>No gains: the study has no finished run of Local, against which they are "
            "measured.</p>"
        )
    body = []
    for row in gains["rows"]:
        line = [f'<th scope="row">{escape(row["label"])}</th><td>{row["seeds"]}</td>']
        for name in ("mean", "worst_tenth", "lost"):
            line.append(_render_gain(row, name, metric))
        body.append(f'<tr data-label="{escape(row["label"])}">{"".join(line)}</tr>')
    unit = f"{metric.heading('test')}, signed so that + is better"
    if metric.unit == "%":
        unit = f"percentage points of test {metric.title}"
    confidence = round(100 * gains["confidence"])
    caption = (
        f"Gain of each client over the same client under {gains['baseline']} with the same seed, "
        f"in {unit}; in brackets Student's t interval over the n seeds ({confidence} % "
        "confidence). In color mean gains and losses that are established, corrected for the "
        "number of methods; the worst clients of many are below 0 by chance too."
    )
    heads = ("Method", "n", "mean gain", "worst tenth of clients", "clients that lost, %")
    return render_table("gains", caption, heads, body, metric.name)


def _render_gain(row: Mapping[str, Any], name: str, metric: Metric) -> str:
    """Render a mean, a worst tenth or a share that lost, with its interval."""
    kind, signed = (SHARE, False) if name == "lost" else (metric, True)
    text = kind.format_value(row[name], signed=signed)
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    if low is not None:
        # Student's interval of a share can leave [0, 1].
        if name == "lost":
            low, high = max(low, 0.0), min(high, 1.0)
        lower, upper = kind.format_value(low, signed=signed), kind.format_value(high, signed=signed)
        text += f" <small>[{lower}, {upper}]</small>"
    # In color only what is established, as the caption says.
    css = ""
    if name == "mean" and row["mean_established"]:
        css = "worse" if row[name] < 0 else "better"
    return render_cell(row[name], text, css)
