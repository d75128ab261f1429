"""Write docs/reference/poisoning.md: methods under every attack, with and without acceptance, and by rules of aggregation.

    python benchmarks/poisoning.py --out docs/reference/runs/poisoning.json
    python -m benchmarks.aggregations --out docs/reference/runs/aggregations.json
    python scripts/poisoning.py              (`--check` only says whether the page is up to date)

No number of the page is typed.
"""

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

from _pages import REFERENCE, STORED, table, write
from stored import told

HEAD = """<!-- made by scripts/poisoning.py; do not edit -->
# Poisoning, measured

Every peer-to-peer method under every attack of the [simulator](../how-to/hostile-members.md), by 10 and 30 % of the
clients, with the acceptance step and without: {clients} clients hold digits turned by 0, 90, 180 or 270 degrees, five
clients each, with 60 training and 15 validation samples; a small CNN, {rounds} rounds, seed{seeds}. Accuracies are
means over the honest clients, on test digits turned like theirs, of each client's best model on its validation data.
Below are [rules of aggregation](#rules-of-aggregation), with a server too.
**One federation of one small data set: the table shows what goes wrong and what helps, not how much it is elsewhere.**
Differences of one or two points are within the noise of a seed.
"""

ACCURACY = """## Accuracy of the honest

In percent; *without -> with* acceptance.
"""
WEIGHT = """## How much attackers are mixed

The attackers' share of the honest clients' mixing weight in percent, after clipping, over all rounds; *without ->
with* acceptance. A method that weighs everybody alike gives 10 % of attackers about a tenth less than their share of
those it reads, for its own model counts too.
"""
COST = """## What it costs without attackers

The accuracy is that of the column *none* above. *Refused* is the share of all models read that honest clients refused
of each other, because they belong to a cluster with another rotation, or learn slowly. *Further passes* are
forward passes of one sample to test models, per client and round, in addition to the 120 samples that it trains on. It is below
0 where a method no longer measures what was refused. Durations are of one run each, on a machine with other work.
"""
RULES = """## Rules of aggregation

Attacks as above, by 30 % and two of them by 10 % too, where a server merges what came back (FedAvg, and IFCA with 4
clusters), and where clients merge their own model with three others (Random, DAC), with each of the
[rules that bound one member](../how-to/hostile-members.md#rules-that-bound-one-member) in place of the mean;
*acceptance* is the mean with received models tested. The data are those above, at seeds {seeds}; the model is smaller (one hidden
layer of 32), batches have 20 samples and the learning rate is 0.01, so that accuracies here do not compare with those above.
Trimmed mean and Krum suspect 30 % of the models: six of a server's 20, one of a client's four. Free riders were left out.
Each client's model is the best on its validation data, so that a run that an attack ruins late loses less in the table.

Each entry has the accuracy of the honest in percent without attackers, then under the attack that leaves the least of it.
"""
UNDER = "Accuracy of the honest in percent: mean ± standard deviation over the seeds.\n"
REFUSED = """### What was refused

In percent of the messages that a server got, or of the models that honest clients read; with acceptance. The rules refuse
nothing: they merge what came, and servers left out no message as one that nobody honest sends.
"""
Rows = list[dict[str, Any]]
CLIENTS = 20
"""As benchmarks/poisoning.py has it."""


def _cells(rows: Rows, value: Callable[[dict[str, Any]], float | None], *, none: bool) -> str:
    attacks = [("none", 0.0)] if none else []
    attacks += dict.fromkeys((row["attack"], row["attackers"]) for row in rows if row["attackers"])
    methods = list(dict.fromkeys(row["method"] for row in rows))

    def mean(method: str, attack: tuple[str, float], accepts: bool) -> str:
        found = [
            value(row)
            for row in rows
            if (row["method"], row["attack"], row["attackers"], row["acceptance"])
            == (method, *attack, accepts)
        ]
        known = [one for one in found if one is not None]
        return f"{100 * sum(known) / len(known):.0f}" if known else "–"

    lines = [
        (
            f"{attack[0]}, {attack[1]:.0%}" if attack[1] else "none",
            *(
                f"{mean(method, attack, False)} -> {mean(method, attack, True)}"
                for method in methods
            ),
        )
        for attack in attacks
    ]
    return table(("attack", *methods), lines)


def cost(rows: Rows, rounds: int) -> str:
    """Return the table of what acceptance costs where nobody attacks."""
    lines = []
    for method in dict.fromkeys(row["method"] for row in rows):
        found = {
            accepts: [
                row
                for row in rows
                if (row["method"], row["attackers"], row["acceptance"]) == (method, 0, accepts)
            ]
            for accepts in (False, True)
        }

        def mean(name: str, accepts: bool, found: dict[bool, Rows] = found) -> float:
            return sum(row[name] for row in found[accepts]) / len(found[accepts])

        more = mean("forward passes", True) - mean("forward passes", False)
        accuracy = [f"{100 * mean('accuracy', accepts):.1f}" for accepts in (False, True)]
        lines.append((
            method,
            " -> ".join(accuracy),
            f"{mean('refused share of reads', True):.0%}",
            f"{more / (CLIENTS * rounds):.0f}",
            f"{mean('seconds', True) / mean('seconds', False):.2f}",
        ))  # fmt: skip
    return table(("method", "accuracy in %", "refused", "further passes", "times as long"), lines)


def reading(rows: Rows) -> str:
    """Say what the table shows: the worst and the mean loss of accuracy, by attack."""
    clean = {
        (row["method"], row["seed"]): row["accuracy"]
        for row in rows
        if not row["attackers"] and not row["acceptance"]
    }
    lines = []
    for attack, share in dict.fromkeys(
        (row["attack"], row["attackers"]) for row in rows if row["attackers"]
    ):
        lost: dict[bool, list[float]] = {False: [], True: []}
        for row in rows:
            if (row["attack"], row["attackers"]) == (attack, share):
                lost[row["acceptance"]].append(
                    100 * (clean[row["method"], row["seed"]] - row["accuracy"])
                )
        means = [sum(lost[accepts]) / len(lost[accepts]) for accepts in (False, True)]
        worst = [max(lost[accepts]) for accepts in (False, True)]
        lines.append((
            f"{attack}, {share:.0%}",
            " -> ".join(f"{one:.1f}" for one in means),
            " -> ".join(f"{one:.1f}" for one in worst),
        ))  # fmt: skip
    return table(("attack", "points lost, mean over methods", "points lost, worst method"), lines)


def _name_defense(row: dict[str, Any]) -> str:
    if row["acceptance"]:
        return "acceptance"
    return row["aggregation"]


def _name_attack(row: dict[str, Any]) -> str:
    if not row["attackers"]:
        return "none"
    return f"{row['attack']}, {row['attackers']:.0%}"


def _group_values(rows: Rows, value: str) -> dict[tuple[str, str, str], list[float]]:
    """Return the values over all seeds in percent, by method, attack and defense, in the order of the rows."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        key = (row["method"], _name_attack(row), _name_defense(row))
        found.setdefault(key, []).append(100 * row[value])
    return found


def _distinct(keys: Sequence[tuple[str, str, str]], place: int) -> list[str]:
    return list(dict.fromkeys(key[place] for key in keys))


def rules_in_short(rows: Rows) -> str:
    """Return the table of what each rule leaves without attackers and under the worst attack."""
    means = {key: statistics.fmean(one) for key, one in _group_values(rows, "accuracy").items()}
    methods, attacks, defenses = (_distinct([*means], place) for place in range(3))
    attacks.remove("none")
    lines = []
    for defense in defenses:
        cells = []
        for method in methods:
            worst = min(attacks, key=lambda one: means[method, one, defense])
            cells.append(
                f"{means[method, 'none', defense]:.0f} -> {means[method, worst, defense]:.0f} ({worst})"
            )
        lines.append((defense, *cells))
    return table(("rule", *methods), lines)


def rules_of_method(rows: Rows, method: str) -> str:
    """Return the table of a method: each attack under each rule."""
    found = _group_values([row for row in rows if row["method"] == method], "accuracy")
    attacks, defenses = _distinct([*found], 1), _distinct([*found], 2)
    lines = []
    for attack in attacks:
        values = [found[method, attack, defense] for defense in defenses]
        lines.append(
            (
                attack,
                *(f"{statistics.fmean(one):.0f} ± {statistics.stdev(one):.0f}" for one in values),
            )
        )
    return table(("attack", *defenses), lines)


def refused_by_acceptance(rows: Rows) -> str:
    """Return the table of what acceptance refused."""
    found = _group_values([row for row in rows if row["acceptance"]], "refused share of reads")
    methods, attacks = _distinct([*found], 0), _distinct([*found], 1)
    return table(
        ("attack", *methods),
        [
            (
                attack,
                *(
                    f"{statistics.fmean(found[method, attack, 'acceptance']):.0f}"
                    for method in methods
                ),
            )
            for attack in attacks
        ],
    )


def rules() -> list[str]:
    """Return the parts of the page on rules of aggregation."""
    stored = json.loads((STORED / "aggregations.json").read_text())
    rows, head = stored["results"], stored["origin"]
    seeds = head["config"]["seeds"]
    parts = [
        RULES.format(seeds=f"{', '.join(map(str, seeds[:-1]))} and {seeds[-1]}"),
        rules_in_short(rows) + "\n",
        (STORED / "aggregations.md").read_text("utf-8").strip() + "\n",
        UNDER,
    ]
    for method in dict.fromkeys(row["method"] for row in rows):
        parts += [f"### {method}\n", rules_of_method(rows, method) + "\n"]
    return [
        *parts,
        REFUSED,
        refused_by_acceptance(rows) + "\n",
        f"```console\n$ {head['command']}\n```\n",
        f"{told('aggregations', head)}\n",
    ]


def page() -> str:
    """Return the page."""
    files = sorted(STORED.glob("poisoning*.json"), key=lambda path: path.stem)
    stored = {path.stem: json.loads(path.read_text()) for path in files}
    # a later file wins
    found = {row["method"]: name for name, one in stored.items() for row in one["results"]}
    methods = stored["poisoning"]["origin"]["config"]["methods"]
    rows = [
        row
        for method in methods
        for row in stored[found[method]]["results"]
        if row["method"] == method
    ]
    head = stored["poisoning"]["origin"]
    where = ", ".join(
        f"{name.replace('_', ' ')} {value}" for name, value in head["machine"].items()
    )
    rounds = head["config"]["rounds"]
    seeds = sorted({row["seed"] for row in rows})
    told_seeds = f" {seeds[0]}" if len(seeds) == 1 else f"s {', '.join(map(str, seeds))}"
    parts = [
        HEAD.format(clients=CLIENTS, rounds=rounds, seeds=told_seeds),
        "## In short\n\nAccuracy lost against the same method without attackers and without acceptance, in points, "
        "*without -> with* acceptance; below 0 it gained.\n",
        reading(rows) + "\n",
        (STORED / "poisoning.md").read_text("utf-8").strip() + "\n",
        ACCURACY,
        _cells(rows, lambda row: row["accuracy"], none=True) + "\n",
        WEIGHT,
        _cells(rows, lambda row: row["attackers' weight"], none=False) + "\n",
        COST,
        cost(rows, rounds) + "\n",
        f"Measured with {where}.\n",
    ]
    for name, one in stored.items():
        mine = [method for method in methods if found[method] == name]
        parts.append(f"{', '.join(mine)}:\n\n```console\n$ {one['origin']['command']}\n```\n")
        parts.append(f"{told(name, one['origin'])}\n")
    return "\n".join(parts + rules())


if __name__ == "__main__":
    sys.exit(write({REFERENCE / "poisoning.md": page()}))
