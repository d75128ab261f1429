"""Write docs/explanation/when-to-wait.md: rounds that wait for slow clients, that end at a deadline, and clients that wait for nobody.

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

from coterie.results.tables import TextTable

METHODS = ("DAC", "PENS", "Random", "Ditto", "FedAvg", "Local")
PAGE = ROOT / "docs/explanation/when-to-wait.md"
NAME = "waiting/stragglers"
DATA = {
    "stragglers/digits": (
        "Digits in four rotations",
        "Twenty clients, five of each rotation, and every fourth client is slow; a small CNN ([study](../reference/studies.md)).",
    ),
    "stragglers/cifar10": (
        "CIFAR-10, vehicles or animals",
        "Ten clients of 100 pictures, four with vehicles and six with animals; one in each cluster is slow; a small CNN, 30 seconds.",
    ),
    "stragglers/hospitals": (
        "Four hospitals",
        "A logistic regression on 920 patients, and the fourth hospital is slow; each seed is one of five folds, so that intervals "
        "are wider by what the folds share.",
    ),
}

WAYS = {"no waiting": "Not waiting", "deadline": "A deadline of one second"}
"""The ways that are compared with waiting for everybody, as the page names them."""

HEAD = """<!-- made by scripts/waiting.py; do not edit -->
# When to wait for slow clients

A round in step lasts as long as its slowest client. [Clients that do not wait](../how-to/asynchronous.md) train again at once, on what
has reached them by then: they train more often, and read older models. In between are rounds with [a deadline](../how-to/asynchronous.md#deadlines):
who is late misses the round. What is better after the same time? Each method ran in all three ways (Local without the
deadline), while slow clients took 1, 2, 5 and 10 times as long as the others, who need a second for a training; the deadline is that
second, so that the slow ones are always late.
Servers (FedAvg, Ditto) that do not wait take in the updates of a quarter of the digits' clients, of three of CIFAR-10's, or of two hospitals,
at a time (FedBuff), so that they are another method with equal speeds too. Messages take no time here, so that only training is waited for.

The numbers are differences in test accuracy from waiting for everybody, after {seconds}, in points: above zero waiting is worse. In
brackets is the 95 % interval over {seeds} seeds, paired by seed and client; bold is an interval on one side of zero. Intervals are
not corrected for their number: where nothing differs, one in twenty is bold by chance.
[How pairs are compared](comparisons.md).
"""
TAIL = """## What to take from it

{lessons}

Not waiting is not free: a fast client trains as often as there are seconds, {most:.0f} times with the digits, where in step it trains {least:.0f}
times with clients that are ten times slower. Where processors or bytes are what is scarce, compare with `coterie compare --equal-bytes` instead.
With a deadline a server gets nothing of the clients that are always late, so that its model is that of the others; peers read them
in every few rounds. These are small problems; yours may differ, and the same command answers it: put `[time]` into your study, add each
method once more with `schedule = "asynchronous"` or with a `time` of its own that has `deadline_seconds`, and `coterie compare STUDY --equal-time`.
"""


def show_difference(row: Mapping[str, Any]) -> str:
    """Return a difference in points with its interval."""
    if row["difference"] is None:
        return "-"
    text = f"{100 * row['difference'] + 0.0:+.1f}"  # no -0.0
    if row["low"] is None or row["high"] is None:
        return text
    return f"{text} [{100 * row['low']:+.1f}, {100 * row['high']:+.1f}]"


def show_values(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the accuracy of all ways in percent."""
    values = [rows[0]["in step"], *(row["value"] for row in rows)]
    return " → ".join(f"{100 * value:.1f}" for value in values)


def side_of_zero(row: Mapping[str, Any]) -> int:
    """Return 1 where the whole interval is above zero, -1 where it is below, else 0."""
    if row["low"] is None or row["high"] is None:
        return 0
    return (row["low"] > 0) - (row["high"] < 0)


def show_study(study: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the section of a study: a table for each way, and one of the accuracies."""
    title, text = DATA[study]
    slower = sorted({row["times slower"] for row in rows})
    at = {(row["method"], row["way"], row["times slower"]): row for row in rows}
    head, parts = ["method", *(f"{number} times" for number in slower)], [f"## {title}", text]
    methods = [name for name in METHODS if any(row["method"] == name for row in rows)]
    for way, words in WAYS.items():
        lines, bold = [], set[tuple[int, int]]()
        for method in methods:
            own = [at[method, way, number] for number in slower if (method, way, number) in at]
            if not own:
                continue
            bold |= {(len(lines), place) for place, row in enumerate(own, 1) if side_of_zero(row)}
            lines.append([method, *map(show_difference, own)])
        parts += [f"{words}:", markdown(TextTable("", head, lines, strong=bold))]
    values = []
    for method in methods:
        ways = [way for way in WAYS if (method, way, slower[0]) in at]
        cells = [show_values([at[method, way, number] for way in ways]) for number in slower]
        values.append([method, *cells])
    parts += ["Accuracy in percent, in step → not waiting → to the deadline:", table(head, values)]
    return "\n\n".join(parts) + "\n"


def list_names(names: Sequence[str]) -> str:
    """Return names as a sentence has them."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def draw_lessons(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a line for each study, speed and way: for which methods it is better than waiting."""
    lines = []
    for study, (title, _) in DATA.items():
        for slower in sorted({row["times slower"] for row in rows if row["study"] == study}):
            speed = "equal speeds" if slower == 1 else f"slow clients take {slower} times as long"
            for way, words in WAYS.items():
                own = [row for row in rows if row["study"] == study and row["way"] == way]
                own = [row for row in own if row["times slower"] == slower]
                own.sort(key=lambda row: METHODS.index(row["method"]))
                # With equal speeds nobody is late, and a deadline is no other way.
                if own and not (slower == 1 and way == "deadline"):
                    lines.append(f"* {title}, {speed}. {words}: {judge_way(own)}.")
    return "\n".join(lines)


def judge_way(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return for which methods a way is better than waiting, worse, or not distinguished from it."""
    parts = []
    for side, words in ((1, "better for"), (-1, "worse for")):
        if names := [row["method"] for row in rows if side_of_zero(row) == side]:
            parts.append(f"{words} {list_names(names)}")
    if not parts:
        return "no difference from waiting is shown for any method"
    if rest := [row["method"] for row in rows if not side_of_zero(row)]:
        parts.append(f"not distinguished for {list_names(rest)}")
    return "; ".join(parts)


def say_seconds(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return after how many seconds the studies are compared."""
    found = sorted({row["seconds"] for row in rows}, reverse=True)
    return " or ".join(f"{seconds:.0f}" for seconds in found) + " seconds"


def page() -> str:
    """Return the page."""
    stored = json.loads((STORED / f"{NAME}.json").read_text("utf-8"))
    rows, origin = stored["results"], stored["origin"]
    parts = [HEAD.format(seconds=say_seconds(rows), seeds=rows[0]["seeds"])]
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
