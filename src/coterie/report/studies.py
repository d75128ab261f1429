"""Several studies on one page: what each establishes about the methods, with links to each study's own report.

The page is plain HTML without charts. Studies are shown beside each other and never averaged
together; each is over its own seeds.
"""

import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from coterie._util.files import write_atomically
from coterie.errors import DataError
from coterie.functional.metrics import Metric
from coterie.report.page import fill_template, load_asset, render_cell, render_notes
from coterie.results import coverage, pairs, stored_runs, summary
from coterie.results.tables import STAR

PAGE = "studies.html"


def write_studies(
    studies: Sequence[str | Path], reports: Sequence[str | Path], out: str | Path | None = None
) -> Path:
    """Write a page with several studies.

    Args:
        studies: their folders.
        reports: the report of each, which the page leads to.
        out: the file to write; by default studies.html in the folder that they have in common.

    Returns:
        The path of the page.

    Raises:
        DataError: when a folder holds no run, or one of them is given twice.
    """
    folders = [Path(folder) for folder in studies]
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise DataError(f"a study was given twice: {', '.join(map(str, folders))}; give each once")
    path = (
        Path(out)
        if out is not None
        else Path(os.path.commonpath([one.resolve().parent for one in folders])) / PAGE
    )
    told = []
    for folder, report in zip(folders, reports, strict=True):
        runs, problems = stored_runs.load_runs([folder])
        content = summary.replace_nonfinite(summary.summarize_runs(runs, folder, problems))
        metric = (
            stored_runs.collect_metrics(runs)[stored_runs.main_metric(runs)]
            if runs
            else Metric("loss")
        )
        link = Path(os.path.relpath(Path(report).resolve(), path.resolve().parent)).as_posix()
        told.append(_StudySection(folder, content, metric, quote(link)))
    names = [one.content["study"] for one in told]
    for one in told:
        one.name = (
            one.content["study"] if names.count(one.content["study"]) == 1 else str(one.folder)
        )
    write_atomically(path, render_studies(told).encode())
    return path


class _StudySection:
    """One study as the page shows it."""

    def __init__(self, folder: Path, content: Mapping[str, Any], metric: Metric, link: str) -> None:
        self.folder, self.content, self.metric, self.link = folder, content, metric, link
        self.name = ""
        own = [
            row
            for row in content["rows"]
            if (row["metric"], row["cluster"]) == (metric.name, "all")
        ]
        self.rows = {row["label"]: row for row in own}
        self.pairs = pairs.select_pairs(pairs.parse_pairs(content), metric=metric.name)
        self.leading = pairs.find_leaders(own, self.pairs, metric, "all")
        self.standing = pairs.describe_leaders(own, self.pairs, metric)

    def format_link(self, **asked: str) -> str:
        """Where a link leads: into the study's report, to a method or a pair."""
        ((kind, text),) = asked.items()
        return escape(f"{self.link}#{kind}={text}")


def render_studies(told: Sequence[_StudySection]) -> str:
    """Return the page as text."""
    titles = ", ".join(one.name for one in told)
    notes = [
        f"{one.name}: {note}" for one in told for note in coverage.describe_coverage(one.content)
    ]
    parts = [render_notes(notes), "<h2>Methods and studies</h2>", _render_table(told)]
    for one in told:
        parts.append(
            f'<h2>{escape(one.name)}</h2><p><a href="{escape(one.link)}">The report of this study</a></p>'
        )
        parts.append(_render_verdicts(one))
    return fill_template(
        "studies.html",
        {
            "title": escape(titles),
            "subtitle": f"{len(told)} studies",
            "style": load_asset("report.css"),
            "content": "\n".join(parts),
            "footer": "Made by Coterie from the run folders alone.",
            "script": load_asset("theme.js"),
        },
    )


def _render_table(told: Sequence[_StudySection]) -> str:
    """Methods by studies: means over clients with what is established as best; a metric a study."""
    labels = dict.fromkeys(label for one in told for label in one.rows)
    head = ""
    for one in told:
        link = f'<a href="{escape(one.link)}">{escape(one.name)}</a>'
        head += f'<th scope="col">{link}<br><small>{escape(_describe_metric(one))}</small></th>'
    body = []
    for label in labels:
        line = [f'<th scope="row">{escape(label)}</th>']
        for one in told:
            row = one.rows.get(label)
            if row is None:
                line.append("<td>–</td>")
                continue
            text = one.metric.format_value(row["mean"])
            if row["std"] is not None:
                text += f" <small>± {one.metric.format_value(row['std'])}</small>"
            if label in one.leading and len(one.leading) > 1:
                text += STAR
            link = f'<a href="{one.format_link(method=quote(label, safe=""))}">{text}</a>'
            line.append(render_cell(row["mean"], link, "best" if one.leading == [label] else ""))
        body.append(f'<tr data-label="{escape(label)}">{"".join(line)}</tr>')
    references = "".join(
        f"{said}. "
        for said in pairs.describe_unranked(row for one in told for row in one.rows.values())
    )
    caption = (
        "Mean over clients ± population standard deviation over seeds, each study over its own. In bold what is "
        f"established as the best of its column; {STAR} cannot be told apart from it; of a single seed nothing is. "
        f"{references}Studies stand beside each other; their numbers "
        "are not compared with each other, since clients, data and seeds may differ."
    )
    return (
        f'<div class="scroll"><table class="studies"><caption>{escape(caption)}</caption>'
        f'<thead><tr><th scope="col">Method</th>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'
    )


def _describe_metric(one: _StudySection) -> str:
    seeds = len(one.content["seeds"])
    return f"{one.metric.heading('test')}, {seeds} seed{'s' if seeds != 1 else ''}"


def _render_verdicts(one: _StudySection) -> str:
    """What a study establishes, pair by pair, each with a link to it."""
    parts = [f'<p class="standing">{escape(one.standing)}</p>'] if one.standing else []
    lines = []
    for pair in one.pairs:
        named = ",".join(quote(label, safe="") for label in (pair.method_a, pair.method_b))
        said = escape(pairs.describe_pair(pair, one.metric))
        lines.append(f'<li><a href="{one.format_link(pair=named)}">{said}</a></li>')
    parts.append(
        f"<ul>{''.join(lines)}</ul>"
        if lines
        else "<p>Nothing to compare: fewer than two methods finished.</p>"
    )
    about = str(one.content.get("about", ""))
    return "".join([*parts, f'<p class="note">{escape(about)}</p>' if about else ""])
