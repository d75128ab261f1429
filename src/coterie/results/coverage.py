"""Which runs of a study exist, and over which seeds its methods are compared.

Methods are averaged over the same seeds: the seeds that every method finished. A method that
finished no seed is named and does not count. Runs that are missing, damaged, unfinished or left
out are listed, one line for each method.

Everything here is about names and numbers of runs, so it works for run folders and for a stored
summary.json alike.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from coterie._util.mappings import drop_empty

RunState = Literal["finished", "unfinished", "damaged", "missing"]


class IncompleteStudyWarning(UserWarning):
    """A result was made from a study some of whose runs are missing; the message lists them."""


@dataclass(frozen=True)
class RunStatus:
    """The status of a run of a study.

    Args:
        label: its method.
        seed: its seed.
        state: "finished"; "unfinished" when it has begun; "damaged" when it cannot be read;
            "missing" when its folder does not exist.
        reason: details in a few words: the round that it has reached, or what is damaged.
    """

    label: str
    seed: int
    state: RunState
    reason: str = ""


def find_common_seeds(finished: Mapping[str, Collection[int]]) -> list[int]:
    """Return the seeds that all methods with finished seeds have, in ascending order.

    Example:
        >>> find_common_seeds({"DAC": [0, 1, 2], "Local": [2, 0], "Late": []})
        [0, 2]
    """
    # A method without any finished seed would leave no common one.
    known = list(map(set, drop_empty(finished).values()))
    return sorted(set.intersection(*known)) if known else []


def format_seed_ranges(seeds: Iterable[int]) -> str:
    """Format seeds in ascending order, three or more consecutive ones as a range.

    Example:
        >>> format_seed_ranges([7, 0, 1, 2, 3, 5, 6])
        '0-3, 5-7'
        >>> format_seed_ranges([0, 1])
        '0, 1'
    """
    groups: list[list[int]] = []
    for seed in sorted(set(seeds)):
        if groups and seed == groups[-1][-1] + 1:
            groups[-1].append(seed)
        else:
            groups.append([seed])
    parts = []
    for own in groups:
        # "0, 1" is as short as "0-1" and reads better.
        parts += [f"{own[0]}-{own[-1]}"] if len(own) > 2 else map(str, own)
    return ", ".join(parts)


def format_statuses(statuses: Iterable[RunStatus]) -> list[str]:
    """Format one line for each method, seeds grouped by state; equal lines are merged.

    Example:
        >>> statuses = [RunStatus("DAC", 0, "missing")]
        >>> format_statuses([*statuses, RunStatus("DAC", 1, "unfinished", "round 3 of 20")])
        ['DAC: seed 0 missing; seed 1 unfinished (round 3 of 20)']
    """
    by_label: dict[str, dict[str, list[int]]] = {}
    for one in statuses:
        state = f"{one.state} ({one.reason})" if one.reason else one.state
        by_label.setdefault(one.label, {}).setdefault(state, []).append(one.seed)
    labels_of: dict[str, list[str]] = {}
    for label, states in by_label.items():
        parts = []
        for state, seeds in states.items():
            parts.append(f"seed{'s' * (len(seeds) > 1)} {format_seed_ranges(seeds)} {state}")
        labels_of.setdefault("; ".join(parts), []).append(label)
    return [f"{', '.join(labels)}: {text}" for text, labels in labels_of.items()]


def describe_incomplete_runs(content: Mapping[str, Any]) -> list[str]:
    """Describe the runs that are missing, damaged or not finished, one line for each method.

    The argument is that of `describe_coverage`.
    """
    return format_statuses(one for one in _parse_left_out(content) if one.state != "finished")


def _parse_left_out(content: Mapping[str, Any]) -> list[RunStatus]:
    return [RunStatus(**one) for one in content.get("left_out", ())]


def describe_coverage(content: Mapping[str, Any]) -> list[str]:
    """Describe which runs the tables of a summary leave out; nothing when every run counts.

    Args:
        content: the content of summary.json: `rows`, `seeds` and `left_out`. A summary that was
            stored without the latter two has nothing to describe.

    Returns:
        A line for each method that lacks runs, and one that names the seeds that the means are
        over.
    """
    out, lines = _parse_left_out(content), describe_incomplete_runs(content)
    if not out:
        return []
    # Finished, but not of the common seeds.
    unused: dict[str, list[int]] = {}
    for one in out:
        if one.state == "finished":
            unused.setdefault(one.label, []).append(one.seed)
    parts = [f"{label} {format_seed_ranges(seeds)}" for label, seeds in unused.items()]
    finished = "; ".join(parts)
    # No common seed; single methods may have finished some.
    if not content["seeds"]:
        if not finished:
            return [*lines, "No run is finished: there is nothing to compare."]
        nothing = "No seed was finished by all methods, so nothing is compared; finished: "
        return [*lines, f"{nothing}{finished}."]
    text = f"Means are over the seeds that all have: {format_seed_ranges(content['seeds'])}"
    if finished:
        text += f"; left out: {finished}"
    compared = {row["label"] for row in content["rows"]}
    # Methods that are in no mean at all.
    never = dict.fromkeys(one.label for one in out if one.label not in compared)
    if never:
        text += f"; no finished run: {', '.join(never)}"
    return [*lines, f"{text}."]


MARKED_ROUNDS = {
    "skipped": "were left out, not trained: the others went on",
    "alone": "were done alone: no message of another member arrived in them",
}
"""What is said of the rounds of a node that its provenance lists by these keys."""


def describe_skipped_rounds(content: Mapping[str, Any]) -> list[str]:
    """Describe the rounds that nodes skipped or did alone, a line for each run of summary.json."""
    lines = []
    for key, what in MARKED_ROUNDS.items():
        for row in content.get(key, ()):
            gaps = []
            for first, last in row["rounds"]:
                gaps.append(f"{first} to {last}" if last > first else str(first))
            rounds = ", ".join(gaps)
            lines.append(f"{row['label']}, seed {row['seed']}: rounds {rounds} {what}.")
    return lines


def statuses_to_json(statuses: Sequence[RunStatus]) -> list[dict[str, Any]]:
    """Return plain values, for JSON; the key `reason` is there only when a reason is known."""
    rows = []
    for one in statuses:
        row = {"label": one.label, "seed": one.seed, "state": one.state}
        if one.reason:
            row["reason"] = one.reason
        rows.append(row)
    return rows
