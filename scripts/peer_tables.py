"""Write docs/explanation/bounded-tables.md: what DAC loses, and gains, with a table in place of a memory of all pairs.

    python benchmarks/peer_tables.py --out docs/reference/runs/tables/gate.json
    python scripts/peer_tables.py            (`--check` only says whether the page is up to date)

No number of the page is typed.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from _pages import ROOT, STORED, markdown, table, write
from stored import told

from coterie.cli._tables import TextTable

PAGE = ROOT / "docs/explanation/bounded-tables.md"
NAME = "tables/gate"
MOST_LOST = 0.01
"""Accuracy that a table may lose against all pairs: one point."""
DENSE, TABLES = "all pairs", ("table", "table, one explored")
BESIDE = ("random", "oracle")
READS = "own cluster, last rounds"

HEAD = """<!-- made by scripts/peer_tables.py; do not edit -->
# What a bounded table costs

With `table = 64` a client of DAC remembers 64 members in place of all ([why and how](../decisions/036-tables-of-peers.md)), so that
100,000 clients fit into a machine ([the memory of every
method](../reference/performance.md#memory-of-all-methods-by-population)).
May one take it without loss? The aim is an accuracy within one point of DAC with all pairs, or
better, in every setting. {verdict}

Clients have 20 training samples, in clusters of equal size, planted by one of three shifts: *rules* (Gaussian inputs, labeled by a linear
rule of the cluster), *labels* (handwritten digits, whose classes the cluster permutes), and *pixels* (digits, whose pixels the cluster
permutes; an MLP with 32 hidden units, the others a linear model). All take part in every round; with 10 % away, others in each, where
the table says so. The settings of DAC are its defaults, five peers a round, and no setting was tuned. The rule that fills a table and
`explore` were chosen with seed 0, which is not here. The clients' digits are drawn from 1,500, so that some have samples in common.
"""


def format_points(values: Sequence[float]) -> str:
    """Return the mean of differences in points, with the lowest and the highest."""
    points = [100 * value for value in values]
    mean = sum(points) / len(points)
    return f"{mean:+.1f} ({min(points):+.1f} to {max(points):+.1f})"


def mean(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    """Return the mean of a value over the seeds."""
    return sum(row[name] for row in rows) / len(rows)


Setting = tuple[int, str, int, float]


def group_rows(
    rows: Sequence[Mapping[str, Any]],
) -> dict[Setting, dict[str, list[Mapping[str, Any]]]]:
    """Return the rows of each setting by method, in the order of the seeds."""
    found: dict[Setting, dict[str, list[Mapping[str, Any]]]] = {}
    order = ("clients", "absent", "shift", "clusters", "seed")
    for row in sorted(rows, key=lambda row: [row[name] for name in order]):
        setting = (row["clients"], row["shift"], row["clusters"], row["absent"])
        found.setdefault(setting, {}).setdefault(row["method"], []).append(row)
    return found


def list_differences(methods: Mapping[str, Sequence[Mapping[str, Any]]], name: str) -> list[float]:
    """Return how much more accurate a method is than DAC with all pairs, for each seed."""
    dense = {row["seed"]: row["accuracy"] for row in methods[DENSE]}
    assert dense.keys() == {row["seed"] for row in methods[name]}
    return [row["accuracy"] - dense[row["seed"]] for row in methods[name]]


def passes(differences: Sequence[float]) -> bool:
    """Return whether the mean over the seeds is within a point or better."""
    return sum(differences) / len(differences) >= -MOST_LOST


def name_setting(setting: Setting) -> str:
    """Return a setting in words."""
    clients, shift, clusters, absent = setting
    away = f", {100 * absent:.0f} % away" if absent else ""
    return f"{clients:,} clients, {shift}, {clusters:,} clusters{away}"


def show_differences(groups: Mapping[Setting, Any]) -> str:
    """Return the table of the gate; what fails is bold."""
    head = ["clients", "shift", "clusters of", "away", "all pairs, %", *(f"{name}, points" for name in TABLES)]  # fmt: skip
    rows, bold = [], set[tuple[int, int]]()
    for line, (setting, methods) in enumerate(groups.items()):
        clients, shift, clusters, absent = setting
        row = [f"{clients:,}", shift, f"{clients // clusters:,}", f"{100 * absent:.0f} %"]
        row.append(f"{100 * mean(methods[DENSE], 'accuracy'):.1f}")
        for name in TABLES:
            if name not in methods:
                row.append("-")
                continue
            differences = list_differences(methods, name)
            if not passes(differences):
                bold.add((line, len(row)))
            row.append(format_points(differences))
        rows.append(row)
    return markdown(TextTable("", head, rows, strong=bold))


def show_reads(groups: Mapping[Setting, Any]) -> str:
    """Return the table of accuracies and of reads from the own cluster."""
    names = (DENSE, *TABLES, *BESIDE)
    head = ["clients", "shift", "clusters of", "away", *names]
    rows = []
    for (clients, shift, clusters, absent), methods in groups.items():
        row = [f"{clients:,}", shift, f"{clients // clusters:,}", f"{100 * absent:.0f} %"]
        for name in names:
            if name not in methods:
                row.append("-")
                continue
            own, accuracy = mean(methods[name], READS), mean(methods[name], "accuracy")
            row.append(f"{100 * own:.1f} / {100 * accuracy:.1f}")
        rows.append(row)
    return table(head, rows)


def find_failures(groups: Mapping[Setting, Any], name: str) -> tuple[list[Setting], int]:
    """Return the settings in which a table loses more than a point, and in how many it was tried."""
    tried = {setting: methods for setting, methods in groups.items() if name in methods}
    failed = []
    for setting, methods in tried.items():
        if not passes(list_differences(methods, name)):
            failed.append(setting)
    return failed, len(tried)


def describe_gate(groups: Mapping[Setting, Any], name: str) -> str:
    """Return in a sentence whether a table keeps within a point everywhere."""
    failed, tried = find_failures(groups, name)
    if not failed:
        return f"A {name} keeps it in all {tried} settings."
    return f"A {name} fails in {len(failed)} of {tried} settings."


def list_lessons(groups: Mapping[Setting, Any]) -> str:
    """Return a line for each setting in which a table fails, and one for its largest gain."""
    lines = []
    for name in TABLES:
        for setting in find_failures(groups, name)[0]:
            lost = format_points(list_differences(groups[setting], name))
            lines.append(f"* A {name} is worse by {lost} points: {name_setting(setting)}.")
    gains = {setting: list_differences(methods, TABLES[0]) for setting, methods in groups.items()}
    best = max(gains, key=lambda setting: sum(gains[setting]))
    lines.append(
        f"* Its largest gain is {format_points(gains[best])} points: {name_setting(best)}."
    )
    return "\n".join(lines)


def list_seen(groups: Mapping[Setting, Any]) -> tuple[int, int]:
    """Return in how many failures DAC with all pairs reads its own cluster at most twice as often as by chance."""
    failed = find_failures(groups, TABLES[0])[0]
    blind = 0
    for setting in failed:
        clients, _, clusters, _ = setting
        chance = (clients // clusters - 1) / (clients - 1)
        blind += mean(groups[setting][DENSE], READS) <= 2 * chance
    return blind, len(failed)


def page() -> str:
    """Return the page."""
    stored = json.loads((STORED / f"{NAME}.json").read_text("utf-8"))
    origin, groups = stored["origin"], group_rows(stored["results"])
    seeds = len(next(iter(groups.values()))[DENSE])
    verdict = " ".join(describe_gate(groups, name) for name in TABLES)
    blind, failed = list_seen(groups)
    age = told(NAME, origin).replace("(stored-results.md)", "(../reference/stored-results.md)")
    machine = origin["machine"]
    parts = [
        HEAD.format(verdict=verdict),
        f"## Accuracy against all pairs\n\nThe mean difference over {seeds} seeds in points of test accuracy, in brackets the lowest "
        f"and the highest of a seed; bold where more than a point is lost. *One explored* is `explore = 1`.\n\n"
        f"{show_differences(groups)}\n",
        "## Reads from the own cluster\n\nThe share of reads from the own cluster in the last five rounds, and the accuracy, both in "
        "percent. In addition: gossip with members drawn uniformly, and with the planted cluster.\n\n"
        f"{show_reads(groups)}\n",
        f"## What to take from it\n\n{list_lessons(groups)}\n\n"
        f"In {blind} of the {failed} settings in which a table fails, DAC with all pairs reads its own cluster at most twice as often as by "
        "chance: it has not found the clusters either, and is gossip with nearly uniform peers. The likely reason for the loss: a full table "
        "reads the same few models again and again, so that fewer are averaged. Where clusters are found, a client with a table reads its own "
        "far more often. `explore = 1` gives up much of the gains for smaller losses. So take a table where the memory of all pairs does "
        "not fit, or where clusters have hundreds of members; and look at the reads in the report: "
        "near chance they say that neither way has found anything.\n",
        f"`{origin['command']}`, Python {machine['python']}, torch {machine['torch']}. {age}\n",
    ]
    return "\n".join(parts)


if __name__ == "__main__":
    sys.exit(write({PAGE: page()}))
