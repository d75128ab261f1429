"""Write docs/explanation/when-to-wait.md: rounds that wait for slow clients, and clients that wait for nobody.

    python benchmarks/waiting.py --out docs/reference/runs/waiting/stragglers.json
    python scripts/waiting.py                (`--check` only says whether the page is up to date)

No number of the page is typed.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from _pages import ROOT, STORED, markdown, table, write
from stored import told

from coterie.cli._tables import TextTable

METHODS = ("DAC", "PENS", "Random", "Ditto", "FedAvg", "Local")
PAGE = ROOT / "docs/explanation/when-to-wait.md"
NAME = "waiting/stragglers"
DATA = {
    "stragglers/digits": (
        "Digits in four rotations",
        "Twenty clients, five of each rotation, and every fourth client is slow; a small CNN ([study](../reference/studies.md)).",
    ),
    "stragglers/hospitals": (
        "Four hospitals",
        "A logistic regression on 920 patients, and the fourth hospital is slow; each seed is one of five folds, so that intervals "
        "are wider by what the folds share.",
    ),
}

HEAD = """<!-- made by scripts/waiting.py; do not edit -->
# When to wait for slow clients

A round in step lasts as long as its slowest client. [Clients that do not wait](../how-to/asynchronous.md) train again at once, on what
has reached them by then: they train more often, and read older models. What is better after the same time? Each method ran both
ways, while slow clients took 1, 2, 5 and 10 times as long as the others, who need a second for a training.
Servers (FedAvg, Ditto) take in the updates of a quarter of the digits' clients, or of two hospitals, at a time (FedBuff), so that they are
another method with equal speeds too. Messages take no time here, so that only training is waited for.

The numbers are differences in test accuracy after {seconds:.0f} seconds, in points: above zero not waiting is better. In brackets is the 95 %
interval over {seeds} seeds, paired by seed and client; bold is an interval on one side of zero. [How pairs are compared](comparisons.md).
"""
TAIL = """## What to take from it

{lessons}

Not waiting is not free: a fast client trains as often as there are seconds, {most:.0f} times here, where in step it trains {least:.0f} times
with clients that are ten times slower. Where processors or bytes are what is scarce, compare with `coterie compare --equal-bytes` instead.
These are two small problems; yours may differ, and the same command answers it: put `[time]` into your study, add each method once
more with `schedule = "asynchronous"`, and `coterie compare STUDY --equal-time`.
"""


def show_difference(row: Mapping[str, Any]) -> str:
    """Return a difference in points with its interval."""
    if row["difference"] is None:
        return "-"
    text = f"{100 * row['difference'] + 0.0:+.1f}"  # no -0.0
    if row["low"] is None or row["high"] is None:
        return text
    return f"{text} [{100 * row['low']:+.1f}, {100 * row['high']:+.1f}]"


def show_values(row: Mapping[str, Any]) -> str:
    """Return the accuracy of both ways in percent."""
    return f"{100 * row['in step']:.1f} → {100 * row['no waiting']:.1f}"


def side_of_zero(row: Mapping[str, Any]) -> int:
    """Return 1 where the whole interval is above zero, -1 where it is below, else 0."""
    if row["low"] is None or row["high"] is None:
        return 0
    return (row["low"] > 0) - (row["high"] < 0)


def show_study(study: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the section of a study: its two tables."""
    title, text = DATA[study]
    slower = sorted({row["times slower"] for row in rows})
    at = {(row["method"], row["times slower"]): row for row in rows}
    head = ["method", *(f"{number} times" for number in slower)]
    differences, values, bold = [], [], set[tuple[int, int]]()
    for line, method in enumerate(METHODS):
        own = [at[method, number] for number in slower]
        differences.append([method, *map(show_difference, own)])
        values.append([method, *map(show_values, own)])
        bold |= {(line, place) for place, row in enumerate(own, 1) if side_of_zero(row)}
    shown = markdown(TextTable("", head, differences, strong=bold))
    return (
        f"## {title}\n\n{text}\n\n{shown}\n\n"
        f"Accuracy in percent, in step → not waiting:\n\n{table(head, values)}\n"
    )


def list_names(names: Sequence[str]) -> str:
    """Return names as a sentence has them."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def draw_lessons(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a line for each study and speed: for which methods which way is better."""
    lines = []
    for study, (title, _) in DATA.items():
        for slower in sorted({row["times slower"] for row in rows}):
            own = [row for row in rows if row["study"] == study and row["times slower"] == slower]
            own.sort(key=lambda row: METHODS.index(row["method"]))
            parts = []
            for side, words in ((1, "not waiting is better for"), (-1, "waiting is better for")):
                if names := [row["method"] for row in own if side_of_zero(row) == side]:
                    parts.append(f"{words} {list_names(names)}")
            if not parts:
                parts = ["neither way is shown to be better for any method"]
            elif rest := [row["method"] for row in own if not side_of_zero(row)]:
                parts.append(f"not distinguished for {list_names(rest)}")
            speed = "equal speeds" if slower == 1 else f"slow clients take {slower} times as long"
            lines.append(f"* {title}, {speed}: {'; '.join(parts)}.")
    return "\n".join(lines)


def page() -> str:
    """Return the page."""
    stored = json.loads((STORED / f"{NAME}.json").read_text("utf-8"))
    rows, origin = stored["results"], stored["origin"]
    parts = [HEAD.format(seconds=rows[0]["seconds"], seeds=rows[0]["seeds"])]
    for study in DATA:
        parts.append(show_study(study, [row for row in rows if row["study"] == study]))
    least = min(row["rounds that wait"] for row in rows)
    most = max(row["rounds that wait"] for row in rows)
    parts.append(TAIL.format(lessons=draw_lessons(rows), most=most, least=least))
    machine = origin["machine"]
    age = told(NAME, origin).replace("(stored-results.md)", "(../reference/stored-results.md)")
    parts.append(
        f"`{origin['command']}`, Python {machine['python']}, torch {machine['torch']}. {age}\n"
    )
    return "\n".join(parts)


if __name__ == "__main__":
    sys.exit(write({PAGE: page()}))
