"""Tables: comparisons as tables of text, for the terminal and for pages."""

from collections.abc import Sequence
from dataclasses import dataclass

from coterie.papers.compare import Comparison, EqualBytes, Line, Ordering, Result, is_share, ranked
from coterie.results.summary import HIGHER_IS_BETTER

MEANS = {"all": "mean over clients", "clusters": "mean over clusters"}


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
    several = len({line.metric for line in comparison.lines} - {"std_over_clusters"}) > 1
    rows = [
        (
            line.label,
            *([line.metric.replace("_", " ")] if several else []),
            MEANS.get(line.cluster, line.cluster) if line.metric != "std_over_clusters" else "deviation over clusters",
            _spread(line.metric, line.ours, line.std if line.seeds > 1 else None),
            _spread(line.metric, line.paper, line.paper_std),
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
    if any(line.metric == "mse" for line in lines):
        return "test mean squared error"
    return "accuracy in %" if all(is_share(line.metric) for line in lines) else "accuracies in %"


def _number(metric: str, value: float, digits: int = 2) -> str:
    if is_share(metric) or metric == "std_over_clusters":
        return f"{100 * value:.{digits}f}"
    return f"{value:.{digits}f}" if abs(value) < 1000 else f"{value:.0f}"


def _spread(metric: str, mean: float, std: float | None) -> str:
    return _number(metric, mean) + ("" if std is None else f" ± {_number(metric, std)}")


def _signed(line: Line) -> str:
    text = _number(line.metric, line.difference)
    return text if line.difference < 0 else f"+{text}"


def _ordering(one: Ordering, comparison: Comparison) -> tuple[str, ...]:
    metric = ranked(comparison.lines) or ""
    paper, ours = (" / ".join(_number(metric, value) for value in pair) for pair in (one.paper, one.ours))
    return one.better, one.worse, paper, ours, "yes" if one.kept else "no"


def side_by_side(results: Sequence[Result]) -> TextTable:
    """Return the methods of several studies beside each other, means over clients."""
    metric = results[0].metric
    labels = list(dict.fromkeys(entry.label for result in results for entry in result.study.methods))
    rows = []
    for label in labels:
        found = [result.value(label, "all", metric) for result in results]
        cells = [
            "" if row is None or row["mean"] is None else _spread(metric, row["mean"], row["std"]) for row in found
        ]
        rows.append((label, *cells))
    names = [result.study.name for result in results]
    heads = names if len(set(names)) == len(names) else [str(result.folder) for result in results]
    unit = "accuracy in %" if metric in HIGHER_IS_BETTER else metric
    return TextTable(f"Test {unit}, mean over clients", ("method", *heads), rows)


def equal_bytes(ranking: EqualBytes) -> TextTable:
    """Return a ranking at equal bytes."""
    rows = [
        (row.label, f"{row.rounds:.0f}", f"{row.used / 1e6:.2f}", _number(ranking.metric, row.value))
        for row in ranking.rows
    ]
    unit = "accuracy in %" if ranking.metric in HIGHER_IS_BETTER else ranking.metric
    title = f"{ranking.study}: {ranking.split} {unit} when a client has used {ranking.budget / 1e6:.2f} MB"
    return TextTable(title, ("method", "rounds", "MB used", unit), rows)
