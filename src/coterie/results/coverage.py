"""Which runs of a study are there, and over which seeds its methods are compared.

Methods are averaged over the same seeds: those that every method finished. A method that finished
none is named and does not count. What is missing, damaged, unfinished or left out is said, in one
line a method.

Everything here is about names and numbers of runs, so it tells the same of run folders and of a
stored summary.json.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

RunState = Literal["finished", "unfinished", "damaged", "missing"]


class IncompleteStudyWarning(UserWarning):
    """Something was made of a study whose runs are not all there; the message says which are not."""


@dataclass(frozen=True)
class RunStatus:
    """How a run of a study stands.

    Args:
        label: its method.
        seed: its seed.
        state: "finished"; "unfinished", where it has begun; "damaged", where it cannot be read;
            "missing", where nothing is there.
        reason: more in a few words: the round it has come to, or what is damaged.
    """

    label: str
    seed: int
    state: RunState
    reason: str = ""


def find_common_seeds(finished: Mapping[str, Collection[int]]) -> list[int]:
    """Return the seeds that all methods finished, of those that finished any, in ascending order.

    Example:
        >>> common({"DAC": [0, 1, 2], "Local": [2, 0], "Late": []})
        [0, 2]
    """
    known = [set(seeds) for seeds in finished.values() if seeds]
    return sorted(set.intersection(*known)) if known else []


def format_seed_ranges(seeds: Iterable[int]) -> str:
    """Write seeds in ascending order, three or more that follow one another as a range.

    Example:
        >>> ranges([7, 0, 1, 2, 3, 5, 6])
        '0-3, 5-7'
        >>> ranges([0, 1])
        '0, 1'
    """
    ordered = sorted(set(seeds))
    groups = [ordered[:1]] if ordered else []
    for before, seed in pairwise(ordered):
        if seed == before + 1:
            groups[-1].append(seed)
        else:
            groups.append([seed])
    parts = [f"{own[0]}-{own[-1]}" if len(own) > 2 else ", ".join(map(str, own)) for own in groups]
    return ", ".join(parts)


def format_statuses(standings: Iterable[RunStatus]) -> list[str]:
    """Write a line for each method, its seeds grouped by state; methods of which the same is to be said share a line.

    Example:
        >>> lines([Standing("DAC", 0, "missing"), Standing("DAC", 1, "unfinished", "round 3 of 20")])
        ['DAC: seed 0 missing; seed 1 unfinished (round 3 of 20)']
    """
    told: dict[str, dict[str, list[int]]] = {}
    for one in standings:
        said = f"{one.state} ({one.reason})" if one.reason else one.state
        told.setdefault(one.label, {}).setdefault(said, []).append(one.seed)
    together: dict[str, list[str]] = {}
    for label, states in told.items():
        parts = (
            f"seed{'s' * (len(own) > 1)} {format_seed_ranges(own)} {said}"
            for said, own in states.items()
        )
        together.setdefault("; ".join(parts), []).append(label)
    return [f"{', '.join(labels)}: {text}" for text, labels in together.items()]


def describe_incomplete_runs(content: Mapping[str, Any]) -> list[str]:
    """Write a line for each method of which runs are missing, damaged or not finished; see `describe_coverage`."""
    return format_statuses(one for one in _parse_left_out(content) if one.state != "finished")


def _parse_left_out(content: Mapping[str, Any]) -> list[RunStatus]:
    return [RunStatus(**one) for one in content.get("left_out", ())]


def describe_coverage(content: Mapping[str, Any]) -> list[str]:
    """Write what must be known beside the tables of a summary; nothing where every run counts.

    Args:
        content: that of summary.json: `rows`, `seeds` and `left_out`; one that was stored without
            the latter two tells nothing.

    Returns:
        A line for each method that lacks runs, and one that says which seeds the means are over.
    """
    out, said = _parse_left_out(content), describe_incomplete_runs(content)
    if not out:
        return []
    unused: dict[str, list[int]] = {}
    for one in out:
        if one.state == "finished":
            unused.setdefault(one.label, []).append(one.seed)
    finished = "; ".join(f"{label} {format_seed_ranges(seeds)}" for label, seeds in unused.items())
    if not content["seeds"]:
        nothing = (
            f"No seed was finished by all methods, so nothing is compared; finished: {finished}."
        )
        return [*said, nothing if finished else "No run is finished: there is nothing to compare."]
    whole = f"Means are over the seeds that all have: {format_seed_ranges(content['seeds'])}"
    compared = {row["label"] for row in content["rows"]}
    never = [label for label in dict.fromkeys(one.label for one in out) if label not in compared]
    more = {"left out: ": finished, "no finished run: ": ", ".join(never)}
    return [*said, "; ".join([whole, *(name + text for name, text in more.items() if text)]) + "."]


def describe_skipped_rounds(content: Mapping[str, Any]) -> list[str]:
    """Write which rounds nodes left out, a line for each run that did; `content` is that of summary.json."""
    lines = []
    for row in content.get("skipped", ()):
        gaps = ", ".join(
            f"{first} to {last}" if last > first else str(first) for first, last in row["rounds"]
        )
        lines.append(
            f"{row['label']}, seed {row['seed']}: rounds {gaps} were left out, not trained: the others went on."
        )
    return lines


def statuses_to_json(standings: Sequence[RunStatus]) -> list[dict[str, Any]]:
    """Return plain values, for JSON; without the reason where there is none to give."""
    return [
        {
            "label": one.label,
            "seed": one.seed,
            "state": one.state,
            **({"reason": one.reason} if one.reason else {}),
        }
        for one in standings
    ]
