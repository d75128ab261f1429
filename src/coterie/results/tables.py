"""Tables of text for the terminal, for pages and for papers: Markdown and LaTeX."""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scipy import stats

from coterie.functional.metrics import Metric
from coterie.functional.paired import CONFIDENCE
from coterie.results import pairs as comparing
from coterie.results.pairs import Pair

STAR = "*"
"""Stands behind a mean that cannot be told apart from the best of its column."""
SAME = f"{STAR} cannot be told apart from the best of its column."
SAME_OF_ROW = f"{STAR} cannot be told apart from the best of its row."
BEST = "Bold: established as the best of its column."


@dataclass(frozen=True)
class TextTable:
    """A table of text.

    Args:
        title: what it shows.
        head: names of the columns.
        rows: the cells.
        foot: one line below it; empty for none.
        strong: (row, column) of the cells in bold.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    foot: str = ""
    strong: Collection[tuple[int, int]] = ()


def format_markdown(table: TextTable) -> str:
    """Return a table as a Markdown table, numbers to the right."""

    def format_cell(row: int, column: int, text: str) -> str:
        escaped = text.replace("|", "\\|").replace("*", "\\*")
        return f"**{escaped}**" if (row, column) in table.strong else escaped

    body = [
        [format_cell(i, j, text) for j, text in enumerate(row)] for i, row in enumerate(table.rows)
    ]
    head = [text.replace("|", "\\|") for text in table.head]
    lines = [head, ["---", *["---:"] * (len(table.head) - 1)], *body]
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f"{text}\n\n{table.foot}\n" if table.foot else f"{text}\n"


SPECIAL = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "<": "$<$", ">": "$>$", "–": "--",
}  # fmt: skip


def format_latex(table: TextTable) -> str:
    """Return a table as LaTeX, numbers to the right; it needs the package booktabs."""

    def escape_text(text: str) -> str:
        escaped = "".join(SPECIAL.get(sign, sign) for sign in text)
        return re.sub(r"(?<![\w-])-(?=\d)", "$-$", escaped)  # a minus, not a hyphen

    def format_cell(row: int, column: int, text: str) -> str:
        return (
            rf"\textbf{{{escape_text(text)}}}"
            if (row, column) in table.strong
            else escape_text(text)
        )

    lines = [
        f"% {' '.join(table.title.split())}",
        rf"\begin{{tabular}}{{l{'r' * (len(table.head) - 1)}}}",
        r"\toprule",
    ]
    lines += [" & ".join(map(escape_text, table.head)) + r" \\", r"\midrule"]
    lines += [
        " & ".join(format_cell(i, j, text) for j, text in enumerate(row)) + r" \\"
        for i, row in enumerate(table.rows)
    ]
    lines += [r"\bottomrule", r"\end{tabular}"]
    return (
        "\n".join([*lines, *([f"% {' '.join(table.foot.split())}"] if table.foot else [])]) + "\n"
    )


def compute_mean_interval(row: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return Student's interval of a mean of a summary over its seeds; None for one seed.

    Args:
        row: of a summary: `mean`, `std` (of the population) and `seeds`.
    """
    seeds = int(row["seeds"])
    if seeds < 2 or row["std"] is None or row["mean"] is None:
        return None
    half = stats.t.ppf((1 + CONFIDENCE) / 2, seeds - 1) * row["std"] / math.sqrt(seeds - 1)
    return float(row["mean"] - half), float(row["mean"] + half)


def build_means_table(
    rows: Sequence[Mapping[str, Any]],
    pairs: Sequence[Pair],
    metric: Metric,
    title: str,
    names: Mapping[str, str],
) -> TextTable:
    """Return the methods of a study by clusters, each mean with the interval of its own.

    Args:
        rows: of a summary.
        pairs: of the same.
        metric: what is shown.
        title: of the table.
        names: of the columns, where they are not those of the clusters.
    """
    own = [row for row in rows if row["metric"] == metric.name]
    clusters = list(dict.fromkeys(str(row["cluster"]) for row in own))
    labels = list(dict.fromkeys(str(row["label"]) for row in own))
    found = {(row["label"], row["cluster"]): row for row in own}
    leading = {cluster: comparing.find_leaders(own, pairs, metric, cluster) for cluster in clusters}
    body, strong = [], set()
    for i, label in enumerate(labels):
        line = [label, str(max(int(row["seeds"]) for row in own if row["label"] == label))]
        for j, cluster in enumerate(clusters):
            row, first = found.get((label, cluster)), leading[cluster]
            line.append("–" if row is None else _format_with_interval(metric, row))
            if label in first and len(first) > 1:
                line[-1] += STAR
            elif label in first:
                strong.add((i, j + 2))
        body.append(line)
    marks = [SAME] * any(len(first) > 1 for first in leading.values()) + [BEST] * bool(strong)
    return TextTable(
        title, ("method", "n", *(names.get(c, c) for c in clusters)), body, " ".join(marks), strong
    )


def _format_with_interval(metric: Metric, row: Mapping[str, Any]) -> str:
    ends = compute_mean_interval(row)
    shown = metric.format_value(row["mean"])
    return (
        shown
        if ends is None
        else f"{shown} ({metric.format_value(ends[0])} to {metric.format_value(ends[1])})"
    )


def build_pairs_table(pairs: Sequence[Pair], metric: Metric) -> TextTable:
    """Return pairs with intervals, corrected p values and effect sizes.

    Args:
        pairs: of one metric and one group of clients, as `pairs.select_pairs` returns them.
        metric: what they compare.
    """
    tested = sum(pair.p is not None for pair in pairs)
    seeds = max((pair.seeds for pair in pairs), default=0)
    rows = [
        (
            f"{pair.method_a} over {pair.method_b}",
            _format_difference(pair, metric),
            format_p_value(pair.p_corrected),
            "–" if pair.effect is None else f"{pair.effect:.2f}",
            "–" if pair.gained is None else f"{100 * pair.gained:.0f} %",
            "yes" if pair.established else "no",
        )
        for pair in pairs
    ]
    title = f"Pairs, {metric.heading('test')}" + (f", {seeds} seeds" if seeds > 1 else ", one seed")
    corrected = f"p is corrected for {tested} pairs; " if tested > 1 else ""
    foot = (
        f"95 % intervals; {corrected}effect is the difference in standard deviations over seeds."
        if tested
        else ""
    )
    head = ("pair", "better by", "p", "effect", "gained", "established")
    strong = {(i, 1) for i, pair in enumerate(pairs) if pair.established}
    return TextTable(title, head, rows, foot, strong)


def _format_difference(pair: Pair, metric: Metric) -> str:
    difference, interval = comparing.format_difference(pair, metric)
    return difference if interval is None else f"{difference} ({interval})"


def format_p_value(p: float | None) -> str:
    """Write a p value; small ones as a bound.

    Example:
        >>> p_value(0.00012), p_value(0.0123), p_value(1.0), p_value(None)
        ('<0.001', '0.012', '1.000', '–')
    """
    return "–" if p is None else "<0.001" if p < 0.001 else f"{p:.3f}"
