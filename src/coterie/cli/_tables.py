"""Tables: comparisons as tables of text, for the terminal and for pages."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from coterie.functional.metrics import REGISTRY, STD_OVER_CLUSTERS, Metric
from coterie.papers.compare import (
    ComparedNumber,
    Ordering,
    PairComparison,
    PaperComparison,
    StudyResult,
    ranking_metric,
)
from coterie.results.equal_bytes import EqualBytes
from coterie.results.pairs import find_leaders
from coterie.results.summary import MEANS
from coterie.results.tables import (
    BEST,
    SAME,
    STAR,
    TextTable,
    build_means_table,
    build_pairs_table,
    format_latex,
    format_markdown,
)

__all__ = [
    "TextTable",
    "build_equal_bytes_table",
    "build_paper_tables",
    "build_side_by_side",
    "build_study_tables",
    "format_latex",
    "format_markdown",
]


def build_paper_tables(comparison: PaperComparison) -> list[TextTable]:
    """Return the numbers beside the paper's, the chain of roles, and the clear pairs."""
    title, chosen = (
        f"{comparison.study} beside the paper",
        [line for line in comparison.lines if line.chosen],
    )
    own = [line for line in comparison.lines if not line.chosen and not line.predicted]
    tables = [_build_numbers_table(comparison, own, title)]
    if chosen:
        tables.append(
            _build_numbers_table(
                comparison,
                chosen,
                f"{comparison.study}: rows chosen here, beside the published ones",
            )
        )
    if ledger := [line for line in comparison.lines if line.predicted]:
        tables.append(build_cost_table(comparison.study, ledger))
    head = ("better", "worse", "paper", "here", "kept")
    if comparison.chain:
        rows = [_format_ordering(one, comparison) for one in comparison.chain]
        tables.append(TextTable("Orderings of the paper", head, rows))
    if comparison.pairs:
        broken = [_format_ordering(one, comparison) for one in comparison.pairs if not one.kept]
        kept = len(comparison.pairs) - len(broken)
        said = f"{kept} of the {len(comparison.pairs)} pairs that are clearly apart in the paper are in its order here."
        if broken:
            tables.append(
                TextTable(
                    "Pairs clearly apart in the paper and not in its order here", head, broken, said
                )
            )
        else:
            tables[-1] = replace(tables[-1], foot=f"{tables[-1].foot} {said}".strip())
    return tables


def build_cost_table(study: str, lines: Sequence[ComparedNumber]) -> TextTable:
    """Return what the ledger predicts of costs, beside what a paper prints."""
    rows = [
        (
            line.label,
            REGISTRY[line.metric].heading(),
            f"{line.ours:.4g}",
            f"{line.paper:.4g}",
            f"{line.difference:+.4g}",
            "yes" if line.within else "no",
        )
        for line in lines
    ]
    foot = (
        f"{sum(line.within is True for line in lines)} of {len(lines)} numbers are what is printed, rounded alike. "
        "They are predictions: no run is needed."
    )
    head = ("method", "metric", "here", "paper", "difference", "within")
    return TextTable(f"{study}: costs beside the paper, in models", head, rows, foot)


def _build_numbers_table(
    comparison: PaperComparison, lines: Sequence[ComparedNumber], title: str
) -> TextTable:
    names = list(dict.fromkeys(line.metric for line in lines))
    several = len({*names} - {STD_OVER_CLUSTERS.name}) > 1
    rows = [
        (
            line.label,
            *([REGISTRY[line.metric].heading()] if several else []),
            MEANS.get(line.cluster, line.cluster)
            if line.metric != STD_OVER_CLUSTERS.name
            else STD_OVER_CLUSTERS.title,
            _format_spread(REGISTRY[line.metric], line.ours, line.std),
            str(line.seeds),
            _format_spread(REGISTRY[line.metric], line.paper, line.paper_std),
            _format_signed(line),
            {True: "yes", False: "no", None: "cannot be told"}[line.within],
        )
        for line in lines
    ]
    inside, untold = (
        sum(line.within is True for line in lines),
        sum(line.within is None for line in lines),
    )
    foot = (
        f"{inside} of {len(lines)} numbers are within the rule: apart by at most twice the deviation of the "
        "difference, or one point of accuracy; n is the number of seeds."
    )
    if untold:
        foot += f" {untold} cannot be told: the published deviation is half of the number or more."
    if any(line.pooled is not None for line in lines):
        foot += " Where the paper prints no deviation, ours stands for it, pooled over the clusters of the row."
    if comparison.scale != 1:
        foot += f" Rounds scaled by {comparison.scale:g}."
    unit = (
        "" if several or not rows else f" ({REGISTRY[REGISTRY.choose_main(names)].heading('test')})"
    )
    head = (
        "method",
        *(["metric"] if several else []),
        "cluster",
        "here",
        "n",
        "paper",
        "difference",
        "within",
    )
    return TextTable(f"{title}{unit}", head, rows, foot)


def _format_number(metric: Metric, value: float) -> str:
    if not math.isfinite(value):
        return "–"
    value *= metric.scale
    return f"{value:.2f}" if abs(value) < 1000 else f"{value:.0f}"


def _format_spread(metric: Metric, mean: float, std: float | None) -> str:
    return _format_number(metric, mean) + (
        "" if std is None or not math.isfinite(std) else f" ± {_format_number(metric, std)}"
    )


def _format_signed(line: ComparedNumber) -> str:
    text = _format_number(REGISTRY[line.metric], line.difference)
    return text if line.difference < 0 else f"+{text}"


def _format_ordering(one: Ordering, comparison: PaperComparison) -> tuple[str, ...]:
    metric = REGISTRY[str(ranking_metric(comparison.lines))]
    paper, ours = (
        " / ".join(_format_number(metric, value) for value in pair)
        for pair in (one.paper, one.ours)
    )
    return one.better, one.worse, paper, ours, "yes" if one.kept else "no"


def build_side_by_side(
    results: Sequence[StudyResult], metric: str | None = None
) -> list[TextTable]:
    """Return the methods of several studies beside each other, means over clients: a table for each metric.

    Args:
        results: the studies.
        metric: this one alone.
    """
    known = results[0].known
    main = known[metric or results[0].main_metric]
    further = [
        one for one in known.values() if one.shown == "further" and one != main and metric is None
    ]
    there = {row["metric"] for result in results for row in result.rows}
    return [_build_side_by_side(results, one) for one in (main, *further) if one.name in there]


def _build_side_by_side(results: Sequence[StudyResult], metric: Metric) -> TextTable:
    labels = list(dict.fromkeys(label for result in results for label in result.method_labels))
    leading = [find_leaders(result.rows, result.pairs, metric, "all") for result in results]
    rows, strong = [], set()
    for i, label in enumerate(labels):
        cells = [
            _format_cell(metric, result.find_row(label, "all", metric.name)) for result in results
        ]
        for j, first in enumerate(leading):
            if label in first and len(first) > 1:
                cells[j] = (cells[j][0] + STAR, cells[j][1])
            elif label in first:
                strong.add((i, 2 * j + 1))
        rows.append((label, *(part for cell in cells for part in cell)))
    names = [result.study.name for result in results]
    unique = names if len(set(names)) == len(names) else [str(result.folder) for result in results]
    heads = [head for name in unique for head in (name, "n")]
    title = metric.heading("test") + (f", {metric.better} is better" if metric.better else "")
    over = "" if metric.over == "run" else ", mean over clients"
    marks = [SAME] * any(len(first) > 1 for first in leading) + [BEST] * bool(strong)
    return TextTable(
        title[0].upper() + title[1:] + over, ("method", *heads), rows, " ".join(marks), strong
    )


def build_study_tables(one: PairComparison, *, whole: bool) -> list[TextTable]:
    """Return the pairs of a study's methods.

    Args:
        one: the study.
        whole: with a table before it of the means of its methods, by clusters, with their
            intervals.
    """
    tables = []
    if whole:
        title = f"{one.result.study.name}: {one.metric.heading('test')}, 95 % intervals over n seeds in brackets"
        tables = [build_means_table(one.result.rows, one.result.pairs, one.metric, title, MEANS)]
    return [*tables, *([build_pairs_table(one.pairs, one.metric)] if one.pairs else [])]


def _format_cell(metric: Metric, row: Mapping[str, Any] | None) -> tuple[str, str]:
    """A mean with its deviation, and over how many seeds; a single seed has no deviation."""
    if row is None or row["mean"] is None:
        return "", ""
    return _format_spread(metric, row["mean"], row["std"] if row["seeds"] > 1 else None), str(
        row["seeds"]
    )


def build_equal_bytes_table(ranking: EqualBytes) -> TextTable:
    """Return a ranking at equal bytes."""
    metric = REGISTRY[ranking.metric]
    rows = [
        (
            row.label,
            f"{row.rounds:.0f}",
            f"{row.used / 1e6:.2f}",
            _format_spread(metric, row.value, row.std),
            str(row.seeds),
        )
        for row in ranking.rows
    ]
    title = (
        f"{ranking.study}: {ranking.heading}, when a client has used {ranking.budget / 1e6:.2f} MB"
    )
    return TextTable(title, ("method", "rounds", "MB used", metric.heading(), "n"), rows)
