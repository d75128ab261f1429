r"""Write docs/reference/personalized.md: personalized methods compared, and what is established.

    coterie tune personalized/feature-shift --widenings 0 --out tuned        (and label-shift)
    coterie run personalized/feature-shift
    python scripts/stored.py keep runs/personalized/feature-shift
    cp tuned/personalized/feature-shift-tuned.json \
        docs/reference/runs/personalized/feature-shift/trials.json
    python scripts/personalized.py            (`--check` only compares the page)

No number of the tables is typed: each comes from the stored studies or the trials of their tuning.
"""

import json
import math
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from _pages import REFERENCE, STORED, table, write
from stored import told

from coterie.functional.metrics import ACCURACY
from coterie.results import pairs
from coterie.results.pairs import Pair

PAGE = REFERENCE / "personalized.md"
STUDIES = {
    "feature-shift": "Feature shift: the same digits, in four rotations",
    "label-shift": "Label shift: a mixture of digits for each client",
}
NUMBERS = {5: "five", 8: "eight", 10: "ten"}
NOT_CHOSEN = {"label", "seed", "metric", "value"}


def stored(name: str, file: str) -> Any:
    """Return a file of a stored study."""
    return json.loads((STORED / "personalized" / name / file).read_text("utf-8"))


def trials(name: str) -> dict[str, dict[tuple, float]]:
    """Return by method the mean validation accuracy of each setting tried; NaN where a client diverged."""
    found: dict[str, dict[tuple, list[float]]] = {}
    for one in stored(name, "trials.json"):
        point = tuple((key, value) for key, value in one.items() if key not in NOT_CHOSEN)
        value = math.nan if one["value"] is None else one["value"]
        found.setdefault(one["label"], {}).setdefault(point, []).append(value)
    return {
        label: {p: float(np.mean(own)) for p, own in points.items()}
        for label, points in found.items()
    }


def best(points: Mapping[tuple, float]) -> tuple[tuple, float]:
    """Return the setting with the best value, the first of equals; NaN is never best."""
    point = max(points, key=lambda p: points[p] if math.isfinite(points[p]) else -math.inf)
    return point, points[point]


def edges(points: Mapping[tuple, float]) -> list[str]:
    """Return the settings whose best value is the smallest or the largest tried."""
    found, _ = best(points)
    out = []
    for key, value in found:
        tried = sorted({dict(p)[key] for p in points}, key=str)
        numbers = [v for v in tried if isinstance(v, int | float)]
        if len(numbers) > 1 and value in (min(numbers), max(numbers)):
            out.append(f"{key} {value:g}")
    return out


def check(name: str) -> None:
    """Make sure that the study has the values that tuning found."""
    config = tomllib.loads((STORED / "personalized" / name / "config.toml").read_text("utf-8"))
    for entry in config["methods"]:
        for key, value in best(trials(name)[entry["label"]])[0]:
            there = entry.get(key, config["local"].get(key, config.get(key)))
            if there != value:
                sys.exit(
                    f"scripts/personalized.py: {name}: {entry['label']}.{key} is {there!r}; tuning found {value!r}"
                )


def percent(value: float) -> str:
    """Write an accuracy."""
    return f"{100 * value:.1f}"


def against(all_: Sequence[Pair], baseline: str) -> dict[str, str]:
    """Return the difference of each method from one, with its interval; bold where it is established."""
    found = {}
    for pair in pairs.select_pairs(all_, metric="accuracy", baseline=baseline):
        size, interval = pairs.format_difference(pair, ACCURACY)
        text = f"{size} ({interval})" if interval else size
        found[pair.method_a] = f"**{text}**" if pair.established else text
    return found


def names(labels: Iterable[str]) -> str:
    """Join labels; a dash for none."""
    return ", ".join(labels) or "–"


def results(name: str) -> str:
    """Return the results of each method, as a table, the best first."""
    summary = stored(name, "summary.json")
    all_ = pairs.parse_pairs(summary)
    own = [pair for pair in all_ if (pair.metric, pair.cluster) == ("accuracy", "all")]
    rows = {
        r["label"]: r for r in summary["rows"] if (r["metric"], r["cluster"]) == ("accuracy", "all")
    }
    over = {baseline: against(all_, baseline) for baseline in ("Local", "FedAvg")}
    lines = []
    for label, row in sorted(rows.items(), key=lambda item: -item[1]["mean"]):
        above = [p.method_b for p in own if p.established and p.method_a == label]
        below = [p.method_a for p in own if p.established and p.method_b == label]
        lines.append((
            label, f"{percent(row['mean'])} ± {percent(row['std'])}",
            *(over[baseline].get(label, "") for baseline in over), f"{len(above)}", names(below),
        ))  # fmt: skip
    head = (
        "method",
        "test accuracy, %",
        "over Local",
        "over FedAvg",
        "better than, of 12",
        "established as worse than",
    )
    said = pairs.describe_leaders(summary["rows"], all_, ACCURACY)
    bold = table(head, lines).replace(r"\*\*", "**")
    return f"{bold}\n\n{said} {summary['about']}\n"


def spent(name: str) -> str:
    """Return what each method was given by tuning and what it cost, as a table."""
    summary, found = stored(name, "summary.json"), trials(name)
    cost = {row["label"]: row for row in summary["spent"]}
    trained: dict[str, list[int]] = {}
    for one in summary["timing"]:
        trained.setdefault(one["label"], []).append(one["train_samples"])
    fewest = min(np.mean(own) for own in trained.values())
    lines = []
    for label, points in found.items():
        chosen, value = best(points)
        settings = ", ".join(
            f"`{k}` {v:g}" if isinstance(v, int | float) else f"`{k}` {v}" for k, v in chosen
        )
        lines.append((
            label, settings, len(points), names(f"`{one}`" for one in edges(points)), percent(value),
            f"{cost[label]['bytes'] / 1e6:.1f}", f"{np.mean(trained[label]) / fewest:.1f}",
        ))  # fmt: skip
    head = (
        "method", "chosen", "tried", "at the edge of what was tried", "validation accuracy, %", "MB a client",
        "samples trained on, of Local's",
    )  # fmt: skip
    return table(head, lines) + "\n"


def statistics() -> str:
    """Return the best validation accuracy with averaged and with own running statistics, as a table."""
    found = {name: trials(name) for name in STUDIES}
    lines = []
    for label in found["feature-shift"]:
        cells = []
        for own in found.values():
            by = {
                policy: {p: v for p, v in own[label].items() if dict(p).get("buffers") == policy}
                for policy in ("average", "local")
            }
            if all(by.values()):
                both = [best(points)[1] for points in by.values()]
                cells += [*map(percent, both), f"{100 * (both[1] - both[0]):+.1f}"]
        if cells:
            lines.append((label, *cells))
    parts = [
        f"{name.replace('-', ' ')}, {what}"
        for name in STUDIES
        for what in ("averaged", "own", "gain")
    ]
    return table(("method", *parts), lines) + "\n"


def origin(name: str) -> str:
    """Return where a stored study comes from."""
    head = stored(name, "origin.json")
    machine, took = head["machine"], head.get("elapsed_s", head["wall_s"])
    return (
        f"`personalized/{name}`: {head['runs']} runs of {head['rounds']} rounds, {took:.0f} s on {machine['cores']} "
        f"{machine['machine']} cores that were shared with other work. {told(f'personalized/{name}', head)}"
    )


def head() -> str:
    """Return the beginning of the page, with the seeds of tuning and results."""
    name = next(iter(STUDIES))
    config = tomllib.loads((STORED / "personalized" / name / "config.toml").read_text("utf-8"))
    tried = sorted({one["seed"] for one in stored(name, "trials.json")})
    samples = len(tried) * config["data"]["num_clients"] * config["data"]["validation"]
    seeds = config["seeds"]
    return HEAD.format(
        tuning=f"one seed ({tried[0]})" if len(tried) == 1 else f"{len(tried)} seeds ({tried[0]} to {tried[-1]})",
        samples=samples, seeds=NUMBERS.get(len(seeds), len(seeds)), reported=f"{seeds[0]} to {seeds[-1]}",
    )  # fmt: skip


def page() -> str:
    """Return the page."""
    parts = [head()]
    for name, title in STUDIES.items():
        check(name)
        parts += [f"## {title}\n", results(name), "Tuned, and spent:\n", spent(name), READING[name]]
    parts += ["## Running statistics decide much\n", STATISTICS.format(table=statistics()), CANNOT]
    parts += ["## Where the numbers come from\n", *(f"* {origin(name)}" for name in STUDIES)]
    return "\n".join(parts) + "\n"


HEAD = """<!-- made by scripts/personalized.py; do not edit -->
# Personalized methods, side by side

`coterie run personalized/feature-shift` and `coterie run personalized/label-shift` train thirteen methods on the
bundled digits: 20 clients with 24 training samples each, 16 to validate and 30 to test with, a net with two hidden
layers of 64 and batch normalization (`mlp-bn`), 30 rounds in which all clients take part, 2 local epochs of SGD. Each
client is tested with the model of the round in which its validation loss was least. With so few samples a client has
much to gain from the others; with this net and these data nothing is said of larger ones.

## How it is measured

*Tuning.* Every method is tried with 18 settings, by the mean accuracy of the clients' validation samples over {tuning},
without test sets: {samples} samples, which hardly distinguish settings that are close to each other. Results are over
{seeds} other seeds ({reported}). Most methods have 3 learning rates, 2 policies for running statistics
([`buffers`](study-files.md): averaged with the parameters, or each client's own) and 3 values of their own; FedAvg has
more learning rates instead, Local and FedBN have them alone. Other settings are as the study says, or defaults. The
grids were moved once, since in a first tuning most of the best values lay at an edge. All seeds draw from the same
1,797 images, so an image can be a validation sample of one seed and a test sample of another; what is chosen is a
handful of numbers, for all methods alike.

*Not equal* is what a method costs: see the tables. FedRep and DFedAlt train their heads in epochs of their own, Ditto
and APFL a second model, pFedMe five gradients a batch; peer-to-peer methods read up to five models a round.

*Comparing.* Differences are paired by client and seed; intervals are Student's over the {seeds} seeds, 95 % each. A
difference is established, and bold, where its p value is below 0.05 after Holm's correction: over 12 pairs in the
columns "over Local" and "over FedAvg", over all 78 pairs of a study in the last two
([comparisons](../explanation/comparisons.md)).
"""

READING = {
    "feature-shift": """\
Here all clients label alike and see otherwise. FedPer, FedRep and DFedAlt keep the last layer to
themselves, which is the part that clients could best learn together; what differs lies before it. That fits their
means, above Local's and below all others; it is an explanation, not a test of one.
""",
    "label-shift": """\
Here all clients see alike, and each has its own few digits, so that Local is hard to beat: no method
is established as better than it. Means lie within four points of each other.
""",
}
STATISTICS = """\
The best validation accuracy of each method (in %, over the seeds of tuning) with running statistics of the
normalizations averaged, and with each client's own:

{table}
Ditto, APFL and pFedMe use a personal model, whose statistics are the client's own either way; the policy reaches
them through the shared model alone.

With the first guesses of these studies (a learning rate of 0.05, averaged statistics) FedPer and FedRep were below
Local under both shifts. Their algorithms are not at fault: tests repeat them step by step, and the same runs with
`buffers = "local"`, or with the models that clients have before the mean is taken, are level with Local or above
it. A client's head is trained on features that the client's own batches normalize, and is tested on features that
the mean of all clients' statistics normalizes, which is nobody's. More rounds, fewer local epochs, or two or three
personal layers do not change that; group normalization in place of batch normalization does, and there FedPer
was above Local under both shifts (runs of three seeds that are not stored).

Own statistics are no rule either: under label shift they cost FedAvg more than all else in this table, where FedBN,
which keeps the learned scales and shifts of the normalizations as well, has no such loss. PFLlib keeps statistics
with the clients in every method, so that its numbers and those of code that averages them do not compare ([papers
and code](../explanation/papers-and-code.md#personalized-baselines)).
"""
CANNOT = """## What this cannot show

* Which method is best on other data, with more samples, a deeper net, fewer clients a round or more rounds. The
  papers' own experiments have hundreds of samples a client and more.
* Whether a difference that is not bold is real, or which of two methods is better where no difference is established.
* What each method could do with more tuning: most have two settings tried, and some have more, such as pFedMe's
  `eta`, Per-FedAvg's Hessian or APFL's adaptive share; the tables say where the best value lay at an edge.
* What is best at equal bytes or equal work. `coterie compare runs/personalized/feature-shift --equal-bytes` ranks
  at equal bytes where rounds were tested (`--set eval_every=1`).
"""


if __name__ == "__main__":
    sys.exit(write({PAGE: page()}))
