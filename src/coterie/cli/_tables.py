"""Comparisons as tables of text, for the terminal and for pages."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
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
from coterie.papers.counting import SeedDeviations, TableBias, count_verdicts, measure_bias
from coterie.results.equal_budget import EqualBudget
from coterie.results.pairs import find_leaders
from coterie.results.summary import MEANS
from coterie.results.tables import BEST, SAME, STAR, TextTable, build_means_table, build_pairs_table
from coterie.results.varied import VariedResults


def build_paper_tables(
    comparison: PaperComparison, deviations: SeedDeviations | None = None, *, compact: bool = False
) -> list[TextTable]:
    """Build the numbers next to the paper's, the chain of roles, and the clear pairs.

    Args:
        comparison: the study and its paper.
        deviations: how far seeds move numbers; those of this study when not given.
        compact: whether numbers have a row for each method, and a letter for each verdict.
    """
    deviations = deviations or SeedDeviations.measure([comparison])
    build = _build_compact_table if compact else _build_numbers_table
    chosen = [line for line in comparison.lines if line.chosen]
    predicted = [line for line in comparison.lines if line.predicted]
    # Rows that were chosen here, and predictions, have tables of their own below.
    own = [line for line in comparison.lines if not line.chosen and not line.predicted]
    study = comparison.study
    tables = [build(comparison, own, deviations, f"{study} compared with the paper")]
    if chosen:
        title = f"{study}: rows chosen here, compared with the published ones"
        tables.append(build(comparison, chosen, deviations, title))
    if predicted:
        tables.append(build_cost_table(study, predicted))
    # Orderings and pairs have one head: both are pairs of methods.
    head = ("better", "worse", "paper", "here", "kept")
    if comparison.chain:
        rows = [format_ordering(one, comparison) for one in comparison.chain]
        tables.append(TextTable("Orderings of the paper", head, rows))
    if comparison.pairs:
        broken = [format_ordering(one, comparison) for one in comparison.pairs if not one.kept]
        kept = len(comparison.pairs) - len(broken)
        foot = (
            f"{kept} of the {len(comparison.pairs)} pairs that are clearly apart in the paper "
            "are in its order here."
        )
        if broken:
            title = "Pairs clearly apart in the paper and not in its order here"
            tables.append(TextTable(title, head, broken, foot))
        else:
            # All pairs are kept: a line below the last table says it.
            tables[-1] = replace(tables[-1], foot=f"{tables[-1].foot} {foot}".strip())
    return tables


def build_cost_table(study: str, lines: Sequence[ComparedNumber]) -> TextTable:
    """Build the predicted costs, next to the costs that a paper prints."""
    rows = []
    for line in lines:
        row = [line.label, REGISTRY[line.metric].heading(), f"{line.ours:.4g}"]
        row += [f"{line.paper:.4g}", f"{line.difference:+.4g}"]
        rows.append((*row, "yes" if line.within else "no"))
    inside = sum(line.within is True for line in lines)
    foot = (
        f"{inside} of {len(lines)} numbers are what is printed, rounded alike. "
        "They are predictions: no run is needed."
    )
    head = ("method", "metric", "here", "paper", "difference", "within")
    return TextTable(f"{study}: costs compared with the paper, in models", head, rows, foot)


LETTERS = {"paper": "p", "point": "1", "ours": "o", "outside": "x", "undecided": "?"}
"""A letter for each verdict, for tables with little room."""
# As short as a column of a terminal allows, under the head "within".
_WITHIN = {
    "paper": "paper's deviation",
    "point": "one point",
    "ours": "ours alone",
    "outside": "no",
    "undecided": "undecided",
}
FEW_SEEDS = "*"
"""Marks a verdict that rests on few seeds."""


def _build_numbers_table(
    comparison: PaperComparison,
    lines: Sequence[ComparedNumber],
    deviations: SeedDeviations,
    title: str,
) -> TextTable:
    several = _has_several_metrics(lines)
    rows = []
    for line in lines:
        metric = REGISTRY[line.metric]
        row = [line.label, metric.heading()] if several else [line.label]
        row.append(_name_cluster(line))
        row.append(_format_spread(metric, line.ours, line.std))
        row.append(str(line.seeds))
        row.append(_format_spread(metric, line.paper, line.paper_std))
        row.append(format_difference(line))
        few = deviations.rests_on_few_seeds(line, comparison.source)
        row.append(_WITHIN[line.verdict] + FEW_SEEDS * few)
        rows.append(tuple(row))
    head = ["method", "metric"] if several else ["method"]
    head += ["cluster", "here", "n", "paper", "difference", "within"]
    title += _name_metric(lines, several)
    foot = (
        "A number is within the rule when it is apart by at most twice the deviation of the "
        "difference, or one point of accuracy; n is the number of seeds."
    )
    if any(line.pooled is not None for line in lines):
        foot += (
            " Where the paper prints no deviation, ours stands for it, pooled over the "
            "clusters of the row."
        )
    foot += f" {_describe_numbers(comparison, lines, deviations, several)}"
    return TextTable(title, tuple(head), rows, foot)


def _build_compact_table(
    comparison: PaperComparison,
    lines: Sequence[ComparedNumber],
    deviations: SeedDeviations,
    title: str,
) -> TextTable:
    """Build the numbers with a row for each method and a column for each cluster and metric."""
    several = _has_several_metrics(lines)
    seeds = sorted({line.seeds for line in lines})
    clusters = sorted(set(map(_name_cluster, lines)))
    # What all cells share is said once, below the table.
    foot = ""
    if several and len(clusters) == 1:
        foot += f"{clusters[0].capitalize()}. "
    if len(seeds) == 1:
        foot += f"{seeds[0]} {'seed' if seeds == [1] else 'seeds'}. "
    cells: dict[str, dict[str, str]] = {}
    for line in lines:
        metric = REGISTRY[line.metric]
        column = _name_cluster(line)
        if several:
            own = column if len(clusters) > 1 else ""
            column = ", ".join(filter(None, (metric.heading(), own)))
        cell = f"{_format_spread(metric, line.ours, line.std)} / "
        cell += f"{_format_spread(metric, line.paper, line.paper_std)} {LETTERS[line.verdict]}"
        if deviations.rests_on_few_seeds(line, comparison.source):
            cell += FEW_SEEDS
        if len(seeds) > 1:
            cell += f" (n {line.seeds})"
        cells.setdefault(line.label, {})[column] = cell
    columns = list(dict.fromkeys(chain.from_iterable(cells.values())))
    rows = []
    for label, own in cells.items():
        rows.append((label, *(own.get(column, "") for column in columns)))
    title += _name_metric(lines, several)
    foot += _describe_numbers(comparison, lines, deviations, several)
    return TextTable(title, ("method", *columns), rows, foot)


def _has_several_metrics(lines: Sequence[ComparedNumber]) -> bool:
    # The deviation over clusters has a column of its own sense: it does not make several metrics.
    return len({line.metric for line in lines} - {STD_OVER_CLUSTERS.name}) > 1


def _name_metric(lines: Sequence[ComparedNumber], several: bool) -> str:
    """Return the metric for a title; with several metrics each number says its own."""
    if several or not lines:
        return ""
    names = list(dict.fromkeys(line.metric for line in lines))
    return f" ({REGISTRY[REGISTRY.choose_main(names)].heading('test')})"


def _name_cluster(line: ComparedNumber) -> str:
    # The deviation over clusters is of no single cluster, so its name takes the place.
    if line.metric == STD_OVER_CLUSTERS.name:
        return REGISTRY[line.metric].title
    return MEANS.get(line.cluster, line.cluster)


def _describe_numbers(
    comparison: PaperComparison,
    lines: Sequence[ComparedNumber],
    deviations: SeedDeviations,
    several: bool,
) -> str:
    """Return what is said below a table of numbers: how many are within, by what, on which seeds."""
    counts = count_verdicts([(comparison.source, line) for line in lines], deviations)
    foot = f"{counts.within} of {len(lines)} numbers are within the rule."
    if counts.undecided:
        foot += (
            f" {counts.undecided} undecided: the published deviation is half of the number or more."
        )
    if counts.few_seeds:
        foot += (
            f" {counts.few_seeds} of {counts.judged} verdicts rest on fewer than three seeds "
            f"({FEW_SEEDS})."
        )
    for one in measure_bias(replace(comparison, lines=lines), deviations):
        lead = f"{REGISTRY[one.metric].heading()}: " if several else ""
        foot += f" {lead}{describe_bias(one)}"
    # A shorter run can fall short of the paper without any other reason.
    if comparison.scale != 1:
        foot += f" Rounds scaled by {comparison.scale:g}."
    return foot


def describe_bias(one: TableBias) -> str:
    """Say in a sentence whether numbers lie to one side of the paper's, and by what they pass."""
    side, count = one.side
    verdicts = one.verdicts
    said = (
        f"On average {format_difference(one)} from the paper, {count} of {one.compared} {side} it"
    )
    if verdicts.within:
        said += (
            f"; {verdicts.paper} within by the paper's own deviation, {verdicts.point} within one "
            f"point, {verdicts.ours} by ours alone"
        )
    return f"{said}."


def format_difference(one: TableBias | ComparedNumber) -> str:
    """Return the difference of a number, or the mean difference of a table, with its sign."""
    text = _format_number(REGISTRY[one.metric], one.difference)
    return text if one.difference < 0 else f"+{text}"


def _format_number(metric: Metric, value: float) -> str:
    if not math.isfinite(value):
        return "–"
    value *= metric.scale
    # Decimals of thousands only widen the table.
    return f"{value:.2f}" if abs(value) < 1000 else f"{value:.0f}"


def _format_spread(metric: Metric, mean: float, std: float | None) -> str:
    text = _format_number(metric, mean)
    if std is None or not math.isfinite(std):
        return text
    return f"{text} ± {_format_number(metric, std)}"


def format_ordering(one: Ordering, comparison: PaperComparison) -> tuple[str, ...]:
    """Return the two rows, the paper's numbers, ours, and whether their order is the same."""
    metric = REGISTRY[str(ranking_metric(comparison.lines))]
    paper = " / ".join(_format_number(metric, value) for value in one.paper)
    ours = " / ".join(_format_number(metric, value) for value in one.ours)
    return one.better, one.worse, paper, ours, "yes" if one.kept else "no"


def build_side_by_side(
    results: Sequence[StudyResult], metric: str | None = None
) -> list[TextTable]:
    """Build a table for each metric: the methods of several studies side by side.

    Args:
        results: the studies.
        metric: this one alone.
    """
    known = results[0].known
    # Of the first study: the tables of all have one heading.
    main = known[metric or results[0].main_metric]
    shown = [main]
    if metric is None:
        # A metric that was asked for gets its table alone.
        shown += [one for one in known.values() if one.shown == "further" and one != main]
    # A metric that no study has gets no table.
    there = set()
    for result in results:
        for row in result.rows:
            there.add(row["metric"])
    return [_build_side_by_side(results, one) for one in shown if one.name in there]


def _build_side_by_side(results: Sequence[StudyResult], metric: Metric) -> TextTable:
    labels = list(dict.fromkeys(chain.from_iterable(result.method_labels for result in results)))
    leading = [find_leaders(result.rows, result.pairs, metric, "all") for result in results]
    rows, strong = [], set()
    for i, label in enumerate(labels):
        row = [label]
        for j, (result, first) in enumerate(zip(results, leading, strict=True)):
            mean, seeds = _format_cell(metric, result.find_row(label, "all", metric.name))
            if label in first and len(first) > 1:
                mean += STAR
            elif label in first:
                # Each study has two columns, mean and n, behind the method's name.
                strong.add((i, 2 * j + 1))
            row += [mean, seeds]
        rows.append(tuple(row))
    names = [result.study.name for result in results]
    # Studies of the same name are known by their folders.
    if len(set(names)) < len(names):
        names = [str(result.folder) for result in results]
    head = ["method"]
    for name in names:
        head += [name, "n"]
    title = metric.heading("test")
    # Not `capitalize`, which would make small letters of AUROC.
    title = title[0].upper() + title[1:]
    if metric.better:
        title += f", {metric.better} is better"
    # A metric of the whole run, such as its traffic, has no mean over clients.
    if metric.over != "run":
        title += ", mean over clients"
    marks = [SAME] if any(len(first) > 1 for first in leading) else []
    if strong:
        marks.append(BEST)
    return TextTable(title, tuple(head), rows, " ".join(marks), strong)


def build_study_tables(one: PairComparison, name: str, *, whole: bool) -> list[TextTable]:
    """Build the pairs of a study's methods.

    Args:
        one: the study.
        name: of the study, where several are shown; else "".
        whole: begin with a table of the means of its methods, by clusters, with their intervals.
    """
    tables = []
    result, metric = one.result, one.metric
    if whole:
        title = f"{result.study.name}: {metric.heading('test')}, 95 % intervals over n seeds "
        title += "in brackets"
        tables.append(build_means_table(result.rows, result.pairs, metric, title, MEANS))
    if one.pairs:
        tables.append(build_pairs_table(one.pairs, metric, studies=name))
    return tables


def build_varied_table(found: VariedResults) -> TextTable:
    """Build the table of methods by the values of a setting, with intervals over seeds."""
    title = f"{found.metric.heading('test')} by {found.setting}, "
    title += "95 % intervals over n seeds in brackets"
    table = build_means_table(found.rows, found.pairs, found.metric, title, {})
    if not found.pairs:
        return table
    return replace(table, foot=f"{table.foot} Corrected for {len(found.pairs)} pairs.".strip())


def _format_cell(metric: Metric, row: Mapping[str, Any] | None) -> tuple[str, str]:
    """Format a mean with its deviation, and the number of seeds; a single seed has no deviation."""
    if row is None or row["mean"] is None:
        return "", ""
    std = row["std"] if row["seeds"] > 1 else None
    return _format_spread(metric, row["mean"], std), str(row["seeds"])


def build_equal_budget_table(ranking: EqualBudget) -> TextTable:
    """Build a ranking at equal bytes or at equal time."""
    metric = REGISTRY[ranking.metric]
    # Megabytes of 1e6 bytes, as in all tables.
    head, size, digits = ("MB used", 1e6, ".2f")
    if ranking.unit == "seconds":
        head, size, digits = ("seconds", 1.0, ".4g")
    rows = []
    for row in ranking.rows:
        value = _format_spread(metric, row.value, row.std)
        used = format(row.used / size, digits)
        rows.append((row.label, f"{row.rounds:.0f}", used, value, str(row.seeds)))
    budget = f"when a client has used {format(ranking.budget / size, digits)} MB"
    if ranking.unit == "seconds":
        budget = f"after {format(ranking.budget, digits)} seconds"
    title = f"{ranking.study}: {ranking.heading}, {budget}"
    return TextTable(title, ("method", "rounds", head, metric.heading(), "n"), rows)
