"""Tables: comparisons as tables of text, for the terminal and for pages."""

from collections.abc import Sequence
from dataclasses import dataclass

from coterie.functional.metrics import REGISTRY, STD_OVER_CLUSTERS, Metric
from coterie.papers.compare import Comparison, EqualBytes, Line, Ordering, Result, ranked
from coterie.results.summary import MEANS


@dataclass(frozen=True)
class TextTable:
    """A table of text.

    Args:
        title: what it shows.
        head: names of the columns.
        rows: the cells.
        foot: one line below it; empty for none.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    foot: str = ""


def markdown(table: TextTable) -> str:
    """Return a table as a Markdown table, numbers to the right."""
    lines = [table.head, ["---", *["---:"] * (len(table.head) - 1)], *table.rows]
    text = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    return f"{text}\n\n{table.foot}\n" if table.foot else f"{text}\n"


def against_paper(comparison: Comparison) -> list[TextTable]:
    """Return the numbers beside the paper's, the chain of roles, and the clear pairs."""
    tables = [_numbers(comparison)]
    if comparison.chain:
        tables.append(
            TextTable(
                "Orderings of the paper",
                ("better", "worse", "paper", "here", "kept"),
                [_ordering(one, comparison) for one in comparison.chain],
            )
        )
    if comparison.pairs:
        broken = [one for one in comparison.pairs if not one.kept]
        kept = len(comparison.pairs) - len(broken)
        foot = f"{kept} of the {len(comparison.pairs)} pairs that are clearly apart in the paper are in its order here."
        tables.append(
            TextTable(
                "Pairs clearly apart in the paper and not in its order here",
                ("better", "worse", "paper", "here", "kept"),
                [_ordering(one, comparison) for one in broken],
                foot,
            )
        )
    return tables


def _numbers(comparison: Comparison) -> TextTable:
    several = len({line.metric for line in comparison.lines} - {STD_OVER_CLUSTERS.name}) > 1
    rows = [
        (
            line.label,
            *([REGISTRY[line.metric].title] if several else []),
            MEANS.get(line.cluster, line.cluster) if line.metric != STD_OVER_CLUSTERS.name else STD_OVER_CLUSTERS.title,
            _spread(REGISTRY[line.metric], line.ours, line.std if line.seeds > 1 else None),
            _spread(REGISTRY[line.metric], line.paper, line.paper_std),
            _signed(line),
            "yes" if line.within else "no",
        )
        for line in comparison.lines
    ]
    inside = sum(line.within for line in comparison.lines)
    seeds = max((line.seeds for line in comparison.lines), default=0)
    scaled = "" if comparison.scale == 1 else f" Rounds scaled by {comparison.scale:g}."
    foot = (
        f"{inside} of {len(comparison.lines)} numbers are within the rule: apart by at most twice the deviation of the "
        f"difference, or one point of accuracy. {seeds} seed{'s' if seeds != 1 else ''}.{scaled}"
    )
    title = f"{comparison.study} beside the paper ({_unit(comparison.lines)})"
    head = ("method", *(["metric"] if several else []), "cluster", "here", "paper", "difference", "within")
    return TextTable(title, head, rows, foot)


def _unit(lines: Sequence[Line]) -> str:
    shown = [REGISTRY[name] for name in dict.fromkeys(line.metric for line in lines)]
    alike = len({one.unit for one in shown}) < 2
    return REGISTRY[REGISTRY.main(one.name for one in shown)].heading("test") if alike else "shares in %"


def _number(metric: Metric, value: float) -> str:
    value *= metric.scale
    return f"{value:.2f}" if abs(value) < 1000 else f"{value:.0f}"


def _spread(metric: Metric, mean: float, std: float | None) -> str:
    return _number(metric, mean) + ("" if std is None else f" ± {_number(metric, std)}")


def _signed(line: Line) -> str:
    text = _number(REGISTRY[line.metric], line.difference)
    return text if line.difference < 0 else f"+{text}"


def _ordering(one: Ordering, comparison: Comparison) -> tuple[str, ...]:
    metric = REGISTRY[str(ranked(comparison.lines))]
    paper, ours = (" / ".join(_number(metric, value) for value in pair) for pair in (one.paper, one.ours))
    return one.better, one.worse, paper, ours, "yes" if one.kept else "no"


def side_by_side(results: Sequence[Result]) -> list[TextTable]:
    """Return the methods of several studies beside each other, means over clients: a table for each metric."""
    known = results[0].known
    further = [one for one in known.values() if one.shown == "further"]
    there = {row["metric"] for result in results for row in result.rows}
    return [_side_by_side(results, one) for one in (known[results[0].metric], *further) if one.name in there]


def _side_by_side(results: Sequence[Result], metric: Metric) -> TextTable:
    labels = list(dict.fromkeys(entry.label for result in results for entry in result.study.methods))
    rows = []
    for label in labels:
        found = [result.value(label, "all", metric.name) for result in results]
        cells = [
            "" if row is None or row["mean"] is None else _spread(metric, row["mean"], row["std"]) for row in found
        ]
        rows.append((label, *cells))
    names = [result.study.name for result in results]
    heads = names if len(set(names)) == len(names) else [str(result.folder) for result in results]
    title = metric.heading("test") + (f", {metric.better} is better" if metric.better else "")
    over = "" if metric.over == "run" else ", mean over clients"
    return TextTable(title[0].upper() + title[1:] + over, ("method", *heads), rows)


def equal_bytes(ranking: EqualBytes) -> TextTable:
    """Return a ranking at equal bytes."""
    metric = REGISTRY[ranking.metric]
    rows = [
        (row.label, f"{row.rounds:.0f}", f"{row.used / 1e6:.2f}", _number(metric, row.value)) for row in ranking.rows
    ]
    used = f"when a client has used {ranking.budget / 1e6:.2f} MB"
    title = f"{ranking.study}: {metric.heading(ranking.split)} {used}"
    return TextTable(title, ("method", "rounds", "MB used", metric.heading()), rows)
