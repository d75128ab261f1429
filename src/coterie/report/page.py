"""The report: one page that opens from disk, made from stored run folders.

The first view (the study in words, the result tables) is written here as plain HTML, so that people
without JavaScript and programs can read it: every number carries its exact value in `data-value`.
The other views are drawn in the page by assets/*.js from the reduced data of `payload`; the
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

from coterie._util.files import write_atomically
from coterie._util.names import format_clients, shorten_text
from coterie.functional.metrics import EPSILON, Metric
from coterie.report.data import build_empty_payload, build_payload
from coterie.results import pairs
from coterie.results.stored_runs import (
    StoredRun,
    UnreadableRun,
    collect_metrics,
    group_by_label,
    load_runs,
)
from coterie.results.summary import MEANS, describe_new_clients
from coterie.results.tables import STAR

SHARE = Metric("lost", unit="%", scale=100.0, digits=2)
MOST_NAMED = 12
"""Clients with names of which a table shows each."""
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
    """As `write_report`; with the lines that the page begins with where not every run is in its tables."""
    path = Path(out) if out is not None else Path(study) / "report.html"
    runs, problems = load_runs([study])
    data = _build_data(runs, problems, Path(study))
    write_atomically(path, render_page(data, render_overview(data, runs)).encode())
    return path, data["notes"]


def _build_data(
    runs: Sequence[StoredRun], problems: Sequence[UnreadableRun], folder: Path
) -> dict[str, Any]:
    return build_payload(runs, problems, folder) if runs else build_empty_payload(folder, problems)


def render_runs(runs: Sequence[StoredRun], problems: Sequence[UnreadableRun], folder: Path) -> str:
    """Return the report of some runs of one study as text."""
    data = _build_data(runs, problems, folder)
    return render_page(data, render_overview(data, runs))


def render_page(data: Mapping[str, Any], first: str, *, connect: str = "'none'") -> str:
    """Put a page together.

    Args:
        data: what `payload` returned.
        first: the first view, as `render_overview` returned it.
        connect: where the page's scripts may connect to, in the words of a content security policy.
    """
    slots = {
        "title": escape(str(data["study"])),
        "subtitle": escape(format_subtitle(data)),
        "connect": connect,
        "style": load_asset("report.css"),
        "overview": first,
        "footer": "Made by Coterie from the run folders alone; the parquet files beside this page hold every value. "
        "Charts: Apache ECharts (Apache License 2.0).",
        "data": encode_for_script(data),
        "library": load_asset("vendor/echarts.min.js"),
        "script": "\n".join(load_asset(name) for name in SCRIPTS),
    }
    return fill_template("report.html", slots)


def fill_template(name: str, slots: Mapping[str, str]) -> str:
    """Return a file of the page with each [[name]] in it replaced."""
    return re.sub(r"\[\[(\w+)\]\]", lambda match: slots[match[1]], load_asset(name))


@cache
def load_asset(name: str) -> str:
    """Return the text of a file that is part of the page."""
    return resources.files("coterie.report").joinpath("assets", name).read_text("utf-8")


def encode_for_script(data: Mapping[str, Any]) -> str:
    """Write data as JSON that cannot end the script element it stands in."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def format_subtitle(data: Mapping[str, Any]) -> str:
    """One line under the title: what was compared, on how many clients."""
    if not data["methods"]:
        return "No run could be read."
    compared, results = len(data["results"]["seeds"]), data["results"]
    seeds = len({*results["seeds"], *(one["seed"] for one in results["left_out"])})
    parts = [_format_count(len(data["cluster"]), "client")]
    if len(data["clusters"]) > 1:
        parts.append(f"{len(data['clusters'])} planted clusters")
    known = (
        f"{compared} of {_format_count(seeds, 'seed')}"
        if 0 < compared < seeds
        else _format_count(seeds, "seed")
    )
    parts += [_format_count(len(data["methods"]), "method"), known]
    return ", ".join(parts)


def _format_count(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' if count != 1 else ''}"


def describe_privacy(runs: Sequence[StoredRun]) -> list[str]:
    """Say what private training has cost clients, method by method; nothing where none is private."""
    found: dict[str, list[float]] = {}
    for run in runs:
        if EPSILON.name in run.result_metrics:
            found.setdefault(run.label, []).extend(run.final_values(EPSILON.name).tolist())
    said = [
        f"{label} {EPSILON.format_value(sum(values) / len(values))} ({EPSILON.format_value(max(values))})"
        for label, values in found.items()
        if values
    ]
    return (
        [
            f"Epsilon of differential privacy, mean over clients and seeds (largest): {', '.join(said)}"
        ]
        if said
        else []
    )


def render_overview(data: Mapping[str, Any], runs: Sequence[StoredRun]) -> str:
    """The first view as HTML: what is not in the tables, the study in words, the results, the gains."""
    parts = [render_notes(data["notes"])]
    if not runs:
        return "".join(
            [*parts, "<p>Nothing to show yet: no run of this study has finished a round.</p>"]
        )
    parts.append("<h2>The study</h2>" + render_study_description(runs[0].config, data))
    known, names = (
        collect_metrics(runs),
        dict.fromkeys(row["metric"] for row in data["results"]["rows"]),
    )
    shown = sorted((known[name] for name in names), key=lambda one: one.name != data["metric"])
    if shown:
        parts.append(
            f"<h2>Results</h2>{render_result_table(data, shown[0])}{render_client_table(data, runs, shown[0])}"
        )
        parts += [f"<p>{escape(line)}.</p>" for line in describe_privacy(runs)]
        parts += [
            f"<p>{escape(line)}.</p>"
            for line in describe_new_clients(data["results"], data["metric"])
        ]
        parts.append(
            "<h2>Gain over training alone</h2>"
            + render_gain_table(data, known[data["gains"]["metric"]])
        )
        for one in shown[1:]:
            title = escape(one.heading("test"))
            tables = render_result_table(data, one) + render_client_table(data, runs, one)
            parts.append(f"<details><summary>The same for {title}</summary>{tables}</details>")
    parts.append('<div id="glance"></div>')
    return "\n".join(parts)


def render_client_table(data: Mapping[str, Any], runs: Sequence[StoredRun], metric: Metric) -> str:
    """Every client's value as a table, mean over seeds; where there are a few, with names and of no known clusters."""
    names = list(data.get("names") or ())
    if (
        not all(names)
        or not 0 < len(names) <= MOST_NAMED
        or data["clusters"]
        or metric.over == "run"
    ):
        return ""
    chosen = [run for run in runs if run.is_finished and run.seed in data["results"]["seeds"]]
    body = []
    for label, group in group_by_label(chosen).items():
        values = [
            run.final_values(metric.name).reindex(range(len(names))).to_numpy() for run in group
        ]
        known = [
            [one for one in column if math.isfinite(one)] for column in zip(*values, strict=True)
        ]
        means = [float(sum(column)) / len(column) if column else None for column in known]
        cells = "".join(render_cell(mean, metric.format_value(mean)) for mean in means)
        body.append(f'<tr><th scope="row">{escape(label)}</th>{cells}</tr>')
    head = "".join(f'<th scope="col">{escape(shorten_text(name))}</th>' for name in names)
    caption = f"{metric.heading('test')} of each client, mean over seeds; a dash where it is not defined in any."
    return (
        f'<div class="scroll"><table class="results by-client"><caption>{escape(caption[0].upper() + caption[1:])}'
        f'</caption><thead><tr><th scope="col">Method</th>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _describe_folds(folds: int | None) -> str:
    """What seeds are where they test folds."""
    if not folds:
        return ""
    return (
        f"{folds}: each seed tests another part of every client's samples, {folds} seeds all of them; intervals are "
        "widened for the training samples that seeds share"
    )


def render_notes(notes: Sequence[str]) -> str:
    """Name the runs that are not in the tables, the seeds that are, and rounds that were left out."""
    if not notes:
        return ""
    lines = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f'<div class="problem" role="alert"><p>What to know beside the tables:</p><ul>{lines}</ul></div>'


def render_study_description(config: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    """The study in words, as a list of terms and descriptions."""
    settings, local, model = (config.get(key) or {} for key in ("data", "local", "model"))
    clusters = ", ".join(_describe_cluster(cluster) for cluster in data["clusters"])
    many = [f"{len(data['cluster'])}"]
    if names := {client: name for client, name in enumerate(data.get("names") or ()) if name}:
        many = [f"{many[0]} ({format_clients(names, names)})"]
    if settings.get("train"):
        many.append(
            f"each with {settings['train']} training and {settings.get('validation', 0)} validation samples"
        )
    entries = {
        "Data": _format_value(settings.get("dataset")),
        "Shift": "; ".join(_describe_shift(one) for one in settings.get("shift") or []),
        "Clients": ", ".join(many),
        "Folds": _describe_folds(settings.get("folds")),
        "Planted clusters": clusters,
        "Model": _format_value(model.get("kind")),
        "Compared": ", ".join(
            f"{method['label']} ({method['kind']})" for method in data["methods"]
        ),
        "Training": _describe_training(config, local),
        "Evaluated": _describe_evaluation(config),
        "Averaged": _describe_averaging(bool(clusters)),
        "Compared in pairs": "paired by seed and client, with Student's interval over the seeds, corrected for the "
        "number of pairs by Holm's rule"
        if data.get("pairs", {}).get("families")
        else "",
    }
    rows = "".join(
        f"<dt>{escape(term)}</dt><dd>{escape(text)}</dd>" for term, text in entries.items() if text
    )
    return f'<dl class="words">{rows}</dl>'


def _describe_averaging(clusters: bool) -> str:
    first = "per client on the test set of its own cluster; then over the clients of a cluster, over all clients, or over "
    first += "clusters with equal weight" if clusters else ""
    last = "then mean ± population standard deviation over the n seeds that all methods finished"
    return (
        f"{first if clusters else 'per client on its own test set; then over all clients'}; {last}"
    )


def _describe_cluster(cluster: Mapping[str, Any]) -> str:
    """One planted cluster and its size; a node's roster gives clusters numbers, no names."""
    name, size = cluster["name"], cluster["size"]
    return (
        f"{f'cluster {name}' if name.isdigit() else name} ({size} client{'s' if size != 1 else ''})"
    )


def _format_value(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(_format_value(entry) for entry in value)
    return f"{value:g}" if isinstance(value, float) else str("" if value is None else value)


def _describe_shift(shift: Mapping[str, Any]) -> str:
    rest = ", ".join(
        f"{key} {_format_value(value)}" for key, value in shift.items() if key != "kind"
    )
    return f"{shift.get('kind', 'shift')}: {rest}" if rest else str(shift.get("kind", ""))


def _describe_training(config: Mapping[str, Any], local: Mapping[str, Any]) -> str:
    parts = [f"{config['rounds']} rounds"] if "rounds" in config else []
    if local.get("epochs"):
        parts.append(f"{local['epochs']} local epoch{'s' if local['epochs'] != 1 else ''} a round")
    if local.get("optimizer"):
        parts.append(
            f"{local['optimizer']}, {_describe_learning_rate(local)}, batches of {local.get('batch_size')}"
        )
    if isinstance(dp := local.get("dp"), Mapping):
        parts.append(
            f"differentially private ({', '.join(f'{key} {_format_value(value)}' for key, value in dp.items())})"
        )
    return ", ".join(parts)


def _describe_learning_rate(local: Mapping[str, Any]) -> str:
    given = local.get("lr_schedule") or []
    each = given if isinstance(given, list) else [given]
    kinds = ", ".join(
        str(one.get("kind")) if isinstance(one, Mapping) else str(one) for one in each
    )
    return f"learning rate {local.get('lr')}" + (f" ({kinds})" if kinds else "")


def _describe_evaluation(config: Mapping[str, Any]) -> str:
    final = config.get("evaluate") == "final"
    which = (
        "the model after the last round"
        if final
        else "each client's best model on its validation set"
    )
    return f"{which}, on test data that no client trained on"


def render_cell(value: float | None, text: str, css: str = "") -> str:
    """One number of a table, with its exact value for programs."""
    exact = "" if value is None else f' data-value="{value!r}"'
    return f"<td{exact}{f' class={css!r}' if css else ''}>{text}</td>"


def render_result_table(data: Mapping[str, Any], metric: Metric) -> str:
    """The table of one metric: methods by planted clusters, over all clients and over clusters."""
    whole = metric.over == "run"
    rows = [
        r
        for r in data["results"]["rows"]
        if r["metric"] == metric.name and (r["cluster"] == "all" or not whole)
    ]
    columns = list(dict.fromkeys(row["cluster"] for row in rows))
    found = {(row["label"], row["cluster"]): row for row in rows}
    count = {row["label"]: row["seeds"] for row in rows}
    names = {"all": "whole run"} if whole else MEANS
    head = "".join(
        f'<th scope="col">{escape(names.get(column) or column)}</th>' for column in columns
    )
    compared = {
        one["cluster"]: one for one in data["pairs"]["families"] if one["metric"] == metric.name
    }
    leading = {
        column: compared[column]["leaders"] if column in compared else [] for column in columns
    }
    body = []
    for label in count:
        line = [f'<th scope="row">{escape(label)}</th><td>{count[label]}</td>']
        for column in columns:
            row = found.get((label, column))
            if row is None:
                line.append("<td>–</td>")
                continue
            text = metric.format_value(row["mean"])
            if row["seeds"] > 1:
                text += f" <small>± {metric.format_value(row['std'])}</small>"
            if label in leading[column] and len(leading[column]) > 1:
                text += (
                    f'<abbr title="cannot be told apart from the best of its column">{STAR}</abbr>'
                )
            line.append(
                render_cell(row["mean"], text, "best" if leading[column] == [label] else "")
            )
        body.append(f'<tr data-label="{escape(label)}">{"".join(line)}</tr>')
    title = metric.heading("test")
    order = f", {metric.better} is better" if metric.better else ""
    if any(len(first) == 1 for first in leading.values()):
        order += "; in bold what is established as the best of its column"
    if any(len(first) > 1 for first in leading.values()):
        order += f"; {STAR} cannot be told apart from the best of its column"
    if any(leading.values()):
        order += "".join(f"; {said}" for said in pairs.describe_unranked(rows))
    caption = f"{title[0].upper()}{title[1:]}{order}."
    said = compared["all"]["standing"] if "all" in compared else ""
    return (
        f'<div class="scroll"><table class="results" data-metric="{escape(metric.name)}">'
        f"<caption>{escape(caption)}</caption>"
        f'<thead><tr><th scope="col">Method</th><th scope="col">n</th>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
        + (f'<p class="standing">{escape(said)}</p>' if said else "")
    )


def render_gain_table(data: Mapping[str, Any], metric: Metric) -> str:
    """Each client's gain over the baseline, in summaries."""
    gains = data["gains"]
    if gains["baseline"] is None or not gains["rows"]:
        return "<p>No gains: the study has no finished run of Local, against which they are measured.</p>"
    body = []
    for row in gains["rows"]:
        line = [f'<th scope="row">{escape(row["label"])}</th><td>{row["seeds"]}</td>']
        for name in ("mean", "worst_tenth", "lost"):
            kind, signed = (SHARE, False) if name == "lost" else (metric, True)
            text = kind.format_value(row[name], signed=signed)
            low, high = row[f"{name}_low"], row[f"{name}_high"]
            if low is not None:
                if name == "lost":
                    low, high = max(low, 0.0), min(high, 1.0)
                text += f" <small>[{kind.format_value(low, signed=signed)}, {kind.format_value(high, signed=signed)}]</small>"
            sure = name == "mean" and row["mean_established"]
            line.append(
                render_cell(
                    row[name], text, "" if not sure else "worse" if row[name] < 0 else "better"
                )
            )
        body.append(f'<tr data-label="{escape(row["label"])}">{"".join(line)}</tr>')
    points = f"percentage points of test {metric.title}"
    unit = points if metric.unit == "%" else f"{metric.heading('test')}, signed so that + is better"
    caption = (
        f"Gain of each client over the same client under {gains['baseline']} with the same seed, in {unit}; in "
        f"brackets Student's t interval over the n seeds ({round(100 * gains['confidence'])} % confidence). In color "
        "mean gains and losses that are established, corrected for the number of methods; the worst clients of many "
        "are below 0 by chance too."
    )
    return (
        f'<div class="scroll"><table class="gains" data-metric="{escape(metric.name)}">'
        f"<caption>{escape(caption)}</caption>"
        '<thead><tr><th scope="col">Method</th><th scope="col">n</th><th scope="col">mean gain</th>'
        '<th scope="col">worst tenth of clients</th><th scope="col">clients that lost, %</th></tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )
