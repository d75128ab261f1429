"""Tables of text for the terminal, for pages and for papers: Markdown and LaTeX."""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scipy import special

from coterie.functional.metrics import Metric
from coterie.functional.paired import CONFIDENCE, NO_SPREAD
from coterie.results import pairs as comparing
from coterie.results.pairs import Pair

STAR = "*"
"""Marks a mean that is not distinguished from the best of its column."""
SAME = f"{STAR} cannot be distinguished from the best of its column."
SAME_OF_ROW = f"{STAR} cannot be distinguished from the best of its row."
BEST = "Bold: established as the best of its column."


@dataclass(frozen=True)
class TextTable:
    """A table of text.

    Args:
        title: what it shows.
        head: names of the columns.
        rows: the cells.
        foot: one line below it; "" for none.
        strong: (row, column) of the cells in bold.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    foot: str = ""
    strong: Collection[tuple[int, int]] = ()


def format_markdown(table: TextTable) -> str:
    """Return a table as a Markdown table, numbers to the right."""
    lines = [list(map(_escape_markdown, table.head))]
    # First column left, numbers right.
    lines.append(["---", *["---:"] * (len(table.head) - 1)])
    for i, row in enumerate(table.rows):
        cells = []
        for j, text in enumerate(row):
            escaped = _escape_markdown(text)
            cells.append(f"**{escaped}**" if (i, j) in table.strong else escaped)
        lines.append(cells)
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    # A star at the beginning of a line would begin a list.
    foot = table.foot.replace("*", "\\*", 1) if table.foot.startswith("*") else table.foot
    return f"{text}\n\n{foot}\n" if foot else f"{text}\n"


def _escape_markdown(text: str) -> str:
    # A bar would end the cell, a star would begin emphasis.
    escaped = re.sub(r"[|*]", r"\\\g<0>", " ".join(text.splitlines()))
    # A tag would vanish, but for one in code.
    return re.sub(r"(`[^`]*`)|<(?=[A-Za-z/!?])", lambda found: found[1] or r"\<", escaped)


SPECIAL = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "<": "$<$",
    ">": "$>$",
    "–": "--",
}


def format_latex(table: TextTable) -> str:
    """Return a table as LaTeX, numbers to the right; it needs the package booktabs."""
    lines = [
        f"% {' '.join(table.title.split())}",
        rf"\begin{{tabular}}{{l{'r' * (len(table.head) - 1)}}}",
        r"\toprule",
        " & ".join(map(_escape_latex, table.head)) + r" \\",
        r"\midrule",
    ]
    for i, row in enumerate(table.rows):
        cells = []
        for j, text in enumerate(row):
            escaped = _escape_latex(text)
            # Bold around the escaped text, whose signs would be escaped otherwise.
            cells.append(rf"\textbf{{{escaped}}}" if (i, j) in table.strong else escaped)
        lines.append(" & ".join(cells) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}"]
    if table.foot:
        # In a comment, since a journal's own style decides how a table has notes.
        lines.append(f"% {' '.join(table.foot.split())}")
    return "\n".join(lines) + "\n"


def _escape_latex(text: str) -> str:
    # Sign by sign: replacing one after another would escape the escapes.
    escaped = text.translate(str.maketrans(SPECIAL))
    # A minus, not a hyphen.
    return re.sub(r"(?<![\w-])-(?=\d)", "$-$", escaped)


def compute_mean_interval(
    row: Mapping[str, Any], overlap: float = 0.0
) -> tuple[float, float] | None:
    """Return Student's interval of a mean of a summary over its seeds.

    None for one seed, and for seeds that gave the same, which count as one.

    Args:
        row: of a summary: `mean`, `std` (of the population) and `seeds`.
        overlap: of the data that seeds train on; see `functional.paired.mean_difference`.
    """
    seeds = int(row["seeds"])
    if seeds < 2 or row["std"] is None or row["mean"] is None:
        return None
    if row["std"] <= NO_SPREAD * abs(row["mean"]):
        return None
    # `std` is of the population: divided by sqrt(n - 1) it is the standard error.
    student = special.stdtrit(seeds - 1, (1 + CONFIDENCE) / 2)
    half = student * row["std"] / math.sqrt(seeds - 1)
    # As the intervals of pairs are: the variance of the mean grows from 1/n to 1/n + overlap.
    half *= math.sqrt(1 + overlap * seeds)
    return float(row["mean"] - half), float(row["mean"] + half)


def build_means_table(
    rows: Sequence[Mapping[str, Any]],
    pairs: Sequence[Pair],
    metric: Metric,
    title: str,
    names: Mapping[str, str],
) -> TextTable:
    """Build the table of methods by clusters, each mean with its own interval.

    Args:
        rows: of a summary.
        pairs: of the same summary.
        metric: what is shown.
        title: of the table.
        names: of the columns that are not named after their cluster.
    """
    own = [row for row in rows if row["metric"] == metric.name]
    clusters = list(dict.fromkeys(str(row["cluster"]) for row in own))
    by_label: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in own:
        by_label.setdefault(str(row["label"]), {})[str(row["cluster"])] = row
    leading = {cluster: comparing.find_leaders(own, pairs, metric, cluster) for cluster in clusters}
    overlap = max((pair.overlap for pair in pairs if pair.metric == metric.name), default=0.0)
    body, strong = [], set()
    for i, (label, cells) in enumerate(by_label.items()):
        seeds = max(int(row["seeds"]) for row in cells.values())
        line = [label, str(seeds)]
        for j, cluster in enumerate(clusters):
            row, first = cells.get(cluster), leading[cluster]
            line.append("–" if row is None else _format_with_interval(metric, row, overlap))
            # A cluster that some seeds do not plant has fewer.
            if row is not None and int(row["seeds"]) < seeds:
                line[-1] += f" (n {row['seeds']})"
            if label in first and len(first) > 1:
                line[-1] += STAR
            elif label in first:
                # Two columns stand before the clusters: method and n.
                strong.add((i, j + 2))
        body.append(line)
    marks = [SAME] if any(len(first) > 1 for first in leading.values()) else []
    if strong:
        marks.append(BEST)
    head = ("method", "n", *(names.get(cluster, cluster) for cluster in clusters))
    return TextTable(title, head, body, " ".join(marks), strong)


def _format_with_interval(metric: Metric, row: Mapping[str, Any], overlap: float) -> str:
    text = metric.format_value(row["mean"])
    if ends := compute_mean_interval(row, overlap):
        text += f" ({metric.format_value(ends[0])} to {metric.format_value(ends[1])})"
    return text


def build_pairs_table(
    pairs: Sequence[Pair], metric: Metric, split: str = "test", studies: str = ""
) -> TextTable:
    """Build the table of pairs with intervals, corrected p values and effect sizes.

    Args:
        pairs: of one metric and one group of clients, as `pairs.select_pairs` returns them.
        metric: what they compare.
        split: the data on which it was measured.
        studies: whose pairs they are, where several tables are shown.
    """
    rows, strong = [], set()
    for i, pair in enumerate(pairs):
        effect = "–" if pair.effect is None else f"{pair.effect:.2f}"
        gained = "–" if pair.gained is None else f"{100 * pair.gained:.0f} %"
        difference, interval = comparing.format_difference(pair, metric)
        if interval is not None:
            difference += f" ({interval})"
        row = [f"{pair.method_a} over {pair.method_b}", difference]
        row += [format_p_value(pair.p_corrected), effect, gained]
        rows.append((*row, "yes" if pair.established else "no"))
        # Column 1 is the difference.
        if pair.established:
            strong.add((i, 1))
    seeds = max((pair.seeds for pair in pairs), default=0)
    number = f"{seeds} seeds" if seeds > 1 else "one seed"
    # With one seed no pair has a p value, and nothing is corrected.
    tested = sum(pair.p is not None for pair in pairs)
    foot = ""
    if tested:
        corrected = f"p is corrected for {tested} pairs; " * (tested > 1)
        foot = f"95 % intervals; {corrected}effect is the difference in standard deviations "
        foot += "over seeds."
    head = ("pair", "better by", "p", "effect", "gained", "established")
    title = f"Pairs of {studies}" if studies else "Pairs"
    return TextTable(f"{title}, {metric.heading(split)}, {number}", head, rows, foot, strong)


def format_p_value(p: float | None) -> str:
    """Format a p value; a small one as a bound.

    Example:
        >>> format_p_value(0.00012), format_p_value(0.0123), format_p_value(None)
        ('<0.001', '0.012', '–')
    """
    if p is None:
        return "–"
    # Three digits: smaller values say no more than that the difference is hardly chance.
    return "<0.001" if p < 0.001 else f"{p:.3f}"
