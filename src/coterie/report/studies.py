"""Several studies on one page: what each establishes about the methods, with links to its report.

The page is plain HTML without charts. Studies are shown next to each other and never averaged
together; each has its own seeds.
"""

import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from coterie._util.files import check_replaceable, prepare_file, resolve_path, write_atomically
from coterie.errors import DataError
from coterie.functional.metrics import Metric
from coterie.report.page import (
    BEGINNING,
    fill_template,
    load_asset,
    render_cell,
    render_notes,
    render_table,
)
from coterie.results import coverage, pairs, stored_runs, summary
from coterie.results.tables import STAR

PAGE = "studies.html"


def write_studies(
    studies: Sequence[str | Path], reports: Sequence[str | Path], out: str | Path | None = None
) -> Path:
    """Write a page with several studies.

    Args:
        studies: their folders.
        reports: the report of each, which the page links to.
        out: the file to write; by default studies.html in the folder that they have in common.

    Returns:
        The path of the page.

    Raises:
        DataError: when a folder holds no run, or one of them is given twice.
    """
    folders = list(map(Path, studies))
    # Two paths may lead to one folder.
    if len(set(map(resolve_path, folders))) < len(folders):
        raise DataError(f"a study was given twice: {', '.join(map(str, folders))}; give each once")
    if out is None:
        # The parents: of a single study the common path would be its own folder.
        parents = [resolve_path(one).parent for one in folders]
        out = Path(os.path.commonpath(parents)) / PAGE
    check_replaceable(out, BEGINNING)
    path = prepare_file(out)
    sections = []
    for folder, report in zip(folders, reports, strict=True):
        runs, problems = stored_runs.load_runs([folder])
        content = summary.replace_nonfinite(summary.summarize_runs(runs, folder, problems))
        metric = Metric("loss")
        if runs:
            metric = stored_runs.collect_metrics(runs)[stored_runs.main_metric(runs)]
        # Relative, so that the folder can be moved; with slashes on Windows too.
        link = Path(os.path.relpath(resolve_path(report), resolve_path(path).parent)).as_posix()
        sections.append(_StudySection(folder, content, metric, quote(link)))
    names = [section.name for section in sections]
    for section in sections:
        # Studies of the same name are known by their folders.
        if names.count(section.content["study"]) > 1:
            section.name = str(section.folder)
    write_atomically(path, render_studies(sections).encode())
    return path


class _StudySection:
    """One study as the page shows it."""

    def __init__(self, folder: Path, content: Mapping[str, Any], metric: Metric, link: str) -> None:
        self.folder, self.content, self.metric, self.link = folder, content, metric, link
        self.name = content["study"]
        self.rows = {}
        for row in content["rows"]:
            if (row["metric"], row["cluster"]) == (metric.name, "all"):
                self.rows[row["label"]] = row
        own = list(self.rows.values())
        self.pairs = pairs.select_pairs(pairs.parse_pairs(content), metric=metric.name)
        self.leading = pairs.find_leaders(own, self.pairs, metric, "all")
        self.standing = pairs.describe_leaders(own, self.pairs, metric)

    def format_link(self, **asked: str) -> str:
        """Format a link into the study's report, to a method or a pair."""
        # Exactly one: `method` or `pair`.
        ((kind, text),) = asked.items()
        return escape(f"{self.link}#{kind}={text}")


def render_studies(sections: Sequence[_StudySection]) -> str:
    """Render the page."""
    notes, parts = [], []
    for section in sections:
        lines = coverage.describe_coverage(section.content)
        for line in lines:
            notes.append(f"{section.name}: {line}")
        link = f'<a href="{escape(section.link)}">The report of this study</a>'
        parts.append(f"<h2>{escape(section.name)}</h2><p>{link}</p>")
        parts.append(_render_verdicts(section))
    head = [render_notes(notes), "<h2>Methods and studies</h2>", _render_table(sections)]
    return fill_template(
        "studies.html",
        {
            "title": escape(", ".join(section.name for section in sections)),
            "subtitle": f"{len(sections)} studies",
            "style": load_asset("report.css"),
            "content": "\n".join([*head, *parts]),
            "footer": "Made by Coterie from the run folders alone.",
            "script": load_asset("theme.js"),
        },
    )


def _render_table(sections: Sequence[_StudySection]) -> str:
    """Render methods by studies: means over clients, the established best in bold."""
    heads, rows, labels = ["Method"], [], {}
    for section in sections:
        link = f'<a href="{escape(section.link)}">{escape(section.name)}</a>'
        metric = escape(_describe_metric(section))
        heads.append(f"{link}<br><small>{metric}</small>")
        rows += section.rows.values()
        # In the order in which the studies name them; no study need have all methods.
        labels |= section.rows
    body = []
    for label in labels:
        line = [f'<th scope="row">{escape(label)}</th>']
        for section in sections:
            line.append(_render_mean(section, label))
        body.append(f'<tr data-label="{escape(label)}">{"".join(line)}</tr>')
    unranked = "".join(f"{line}. " for line in pairs.describe_unranked(rows))
    caption = (
        "Mean over clients ± population standard deviation over seeds, each study over its own. "
        f"In bold what is established as the best of its column; {STAR} cannot be distinguished "
        f"from it; of a single seed nothing is. {unranked}Numbers of different studies are not "
        "compared, since clients, data and seeds may differ."
    )
    return render_table("studies", caption, heads, body)


def _render_mean(section: _StudySection, label: str) -> str:
    """Render the cell of a method in one study: bold if it is best, a star if it is tied."""
    row = section.rows.get(label)
    if row is None:
        return "<td>–</td>"
    text = section.metric.format_value(row["mean"])
    # One seed has no deviation.
    if row["std"] is not None:
        text += f" <small>± {section.metric.format_value(row['std'])}</small>"
    if label in section.leading and len(section.leading) > 1:
        text += STAR
    link = f'<a href="{section.format_link(method=quote(label, safe=""))}">{text}</a>'
    return render_cell(row["mean"], link, "best" if section.leading == [label] else "")


def _describe_metric(section: _StudySection) -> str:
    seeds = len(section.content["seeds"])
    return f"{section.metric.heading('test')}, {seeds} seed{'s' if seeds != 1 else ''}"


def _render_verdicts(section: _StudySection) -> str:
    """Render what a study establishes, pair by pair, each with a link to it."""
    parts = []
    if section.standing:
        parts.append(f'<p class="standing">{escape(section.standing)}</p>')
    lines = ""
    for pair in section.pairs:
        # Labels may contain commas: `quote` encodes them, so that a plain comma separates.
        named = f"{quote(pair.method_a, safe='')},{quote(pair.method_b, safe='')}"
        text = escape(pairs.describe_pair(pair, section.metric))
        lines += f'<li><a href="{section.format_link(pair=named)}">{text}</a></li>'
    nothing = "<p>Nothing to compare: fewer than two methods finished.</p>"
    parts.append(f"<ul>{lines}</ul>" if lines else nothing)
    if about := str(section.content.get("about", "")):
        parts.append(f'<p class="note">{escape(about)}</p>')
    return "".join(parts)
