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

from coterie.results.tables import TextTable

PAGE = ROOT / "docs/explanation/bounded-tables.md"
NAME = "tables/gate"
MOST_LOST = 0.01
"""Accuracy that a table may lose against all pairs: one point."""
DENSE, TABLES = "all pairs", ("table", "table, one explored")
OPENINGS = {"table": "With a table", "table, one explored": "With a table and `explore = 1`"}
BESIDE = ("random", "oracle")
MEMORY, REMEMBERING = (
    "performance/memory-methods",
    ("dac", "dac, table = 64", "dac, table = 64, own rule", "random", "random, own rule"),
)
"""The stored memory of methods, and those of the page."""
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
SAVED = """## What it saves, and what a rule of yours takes

Memory of a run in KiB a client, as it is forecast before the first round, and in brackets what the process grew by where the run was made
([how it was measured](../reference/performance.md#memory-of-all-methods-by-population)). Where ten times the clients leave a
number as it is, memory grows with the clients; where they make it ten times as large, with their pairs. A table computes 30 MB for some
clients at a time, however many there are, which counts for 1,000 clients.

{table}

*Own rule* is a [selection rule of yours](../how-to/own-aggregation.md), which chooses the peers that a client reads. It is asked with what the table
holds; without a table (Random, DFedAlt) with a list of the members that the client has read, 12 bytes for each, so that nothing is forgotten and the
list grows with the rounds (here two, of five reads each). DAC without a table remembers all pairs, with a rule or without. Time is another matter:
for each client of each round a rule is given, and returns, a number for each member, so it grows with the pairs.
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
    return f"{clients:,} clients, {shift}, clusters of {clients // clusters:,}{away}"


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
        return f"{OPENINGS[name]} it is reached in all {tried} settings."
    return f"{OPENINGS[name]} it is missed in {len(failed)} of {tried} settings."


def list_lessons(groups: Mapping[Setting, Any]) -> str:
    """Return a line for each setting in which a table fails, and one for its largest gain."""
    lines = []
    for name in TABLES:
        for setting in find_failures(groups, name)[0]:
            lost = format_points(list_differences(groups[setting], name))
            lines.append(f"* {OPENINGS[name]}, {name_setting(setting)}: {lost} points.")
    gains = {setting: list_differences(methods, TABLES[0]) for setting, methods in groups.items()}
    best = max(gains, key=lambda setting: sum(gains[setting]))
    lines.append(
        f"* The largest gain, with a table, {name_setting(best)}: {format_points(gains[best])} points."
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


def show_memory(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of forecasts and measured memory."""
    by_method, sizes = {row["method"]: row for row in rows}, ("1,000", "10,000", "100,000")
    lines = []
    for name in REMEMBERING:
        line = [name]
        for size in sizes:
            found = f"{by_method[name][f'{size} clients: forecast, KiB a client']:,.1f}"
            if (measured := by_method[name].get(f"{size} clients: measured")) is not None:
                found += f" ({measured:,.1f})"
            line.append(found)
        lines.append(line)
    return table(["", *(f"{size} clients" for size in sizes)], lines)


def describe_source(name: str, origin: Mapping[str, Any]) -> str:
    """Return how a stored result was made."""
    age = told(name, origin).replace("(stored-results.md)", "(../reference/stored-results.md)")
    machine = origin["machine"]
    return f"`{origin['command']}`, Python {machine['python']}, torch {machine['torch']}. {age}\n"


def page() -> str:
    """Return the page."""
    memory = json.loads((STORED / f"{MEMORY}.json").read_text("utf-8"))
    stored = json.loads((STORED / f"{NAME}.json").read_text("utf-8"))
    origin, groups = stored["origin"], group_rows(stored["results"])
    seeds = len(next(iter(groups.values()))[DENSE])
    verdict = " ".join(describe_gate(groups, name) for name in TABLES)
    blind, failed = list_seen(groups)
    parts = [
        HEAD.format(verdict=verdict),
        f"## Accuracy against all pairs\n\nThe mean difference over {seeds} seeds in points of test accuracy, in brackets the lowest "
        f"and the highest of a seed; bold where more than a point is lost. *One explored* is `explore = 1`.\n\n"
        f"{show_differences(groups)}\n",
        "## Reads from the own cluster\n\nThe share of reads from the own cluster in the last five rounds, and the accuracy, both in "
        "percent. In addition: gossip with members drawn uniformly, and with the planted cluster.\n\n"
        f"{show_reads(groups)}\n",
        "## What to take from it\n\nWhere more than a point is lost, and where most is gained:\n\n"
        f"{list_lessons(groups)}\n\n"
        f"In {blind} of the {failed} settings in which a table loses more, DAC with all pairs reads its own cluster at most twice as often as by "
        "chance: it has not found the clusters either, and is gossip with nearly uniform peers. The likely reason for the loss: a full table "
        "reads the same few models again and again, so that fewer are averaged. Where clusters are found, a client with a table reads its own "
        "far more often. `explore = 1` gives up much of the gains for smaller losses. So take a table where the memory of all pairs does "
        "not fit, or where clusters have hundreds of members; and look at the reads in the report: "
        "near chance they say that neither way has found anything.\n",
        describe_source(NAME, origin),
        SAVED.format(table=show_memory(memory["results"])),
        describe_source(MEMORY, memory["origin"]),
    ]
    return "\n".join(parts)


if __name__ == "__main__":
    sys.exit(write({PAGE: page()}))
