"""Results by phase, where the data change over the rounds: what a change costs, and who is read.

Everything is read from the tables of a run: where the planted cluster of a client changes, a phase
begins.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from coterie.functional.metrics import Metric
from coterie.results import graph
from coterie.results.stored_runs import StoredRun, compute_test_curve, group_by_label

WINDOW = 3
"""Rounds over which shares of reads are averaged: few, since clients read a few models a round."""
_ABOVE_CHANCE = 1.25  # times the share of random reads, below which there is nothing to recover


def summarize_phases(runs: Sequence[StoredRun], metric: str) -> list[dict[str, Any]]:
    """Summarize each phase of each method; empty where the data do not change over the rounds.

    Args:
        runs: of a study.
        metric: the test metric.

    Returns:
        A row for each method and phase, with its `first` and `last` round and the number of
        `seeds`. `begins` and `mean` are the metric of the newest models after these two rounds on
        the test sets of the phase, means over clients and then over seeds, and `std` the deviation
        over seeds of the latter. `moved` is the number of clients whose planted cluster changes at
        the beginning. Of methods that read peers, `share_before`, `share_begins` and `share` are
        the shares of reads within the reader's cluster in the last `WINDOW` rounds before the
        phase, its first and its last ones; of methods that find groups whose clients share a model,
        the shares of pairs in a group that are of one cluster; `recovered` has for each seed the rounds until the share
        was what it was before, None where that did not happen (see `find_recovery`); `chance` is
        the share of random reads in the phase.
    """
    rows = []
    for label, group in group_by_label(runs).items():
        firsts = group[0].planted_phases.firsts.tolist()
        if len(firsts) < 2:
            continue
        # A study has the same phases with every seed, but for a run that has not reached the last.
        group = [run for run in group if run.planted_phases.firsts.tolist() == firsts]
        ends = [first - 1 for first in firsts[1:]]
        for number, first in enumerate(firsts):
            last = ends[number] if number < len(ends) else group[0].num_rounds - 1
            before = firsts[number - 1] if number else None
            found = [_measure_phase(run, metric, before, first, last) for run in group]
            row: dict[str, Any] = {"label": label, "phase": number, "first": first, "last": last}
            row |= {"metric": metric, "seeds": len(group)}
            planted = group[0].planted_phases.select(first)
            row["chance"] = graph.expected_share(np.delete(planted, group[0].late_clients))
            for name in ("moved", "begins", "mean", "share_before", "share_begins", "share"):
                # A seed in which a model diverged leaves no mean.
                row[name] = float(np.mean([one[name] for one in found]))
            means = [one["mean"] for one in found]
            row["std"] = float(np.std(means)) if len(group) > 1 else None
            row["recovered"] = []
            for one in found:
                reached = one["recovered"]
                row["recovered"].append(None if math.isnan(reached) else int(reached))
            rows.append(row)
    return rows


def _measure_phase(
    run: StoredRun, metric: str, before: int | None, first: int, last: int
) -> dict[str, float]:
    """Measure a phase of a run; NaN where something is not known.

    Args:
        run: the run.
        metric: the test metric.
        before: the first round of the phase before; None for the first phase.
        first: of this phase.
        last: its last round.
    """
    tested = dict(zip(*compute_test_curve(run.metrics, metric), strict=True))
    found = {"begins": tested.get(first, math.nan), "mean": tested.get(last, math.nan)}
    phases, found["moved"] = run.planted_phases, 0.0
    if before is not None:
        found["moved"] = float((phases.select(first) != phases.select(before)).sum())
    share = graph.within_share(run.edges, phases)
    if share.empty:
        share = graph.within_share_of_groups(run.metrics, phases)
    found["share_begins"] = _mean_share(share, first, min(first + WINDOW - 1, last))
    found["share"] = _mean_share(share, max(first, last - WINDOW + 1), last)
    found["share_before"] = found["recovered"] = math.nan
    if before is not None:
        found["share_before"] = _mean_share(share, max(before, first - WINDOW), first - 1)
        found["recovered"] = find_recovery(share, found["share_before"], first, last)
    return found


def _mean_share(share: pd.Series, first: int, last: int) -> float:
    """Return the mean share over rounds; NaN without any."""
    own = share[(share.index >= first) & (share.index <= last)]
    return float(own.mean()) if len(own) else math.nan


def find_recovery(share: pd.Series, before: float, first: int, last: int) -> float:
    """Return the rounds from a change until reads are within clusters as often as before it.

    Args:
        share: the share of each round, indexed by round; see `graph.within_share`.
        before: the share before the change.
        first: the first round with the new data.
        last: the last round of the phase.

    Returns:
        The rounds from `first` to the end of the first `WINDOW` rounds whose mean share is at least
        `before`; NaN where none is.

    Example:
        >>> share = pd.Series([0.8, 0.8, 0.8, 0.2, 0.5, 0.8, 0.8, 0.8])
        >>> find_recovery(share, 0.8, first=3, last=7)
        5.0
    """
    for end in range(first + WINDOW - 1, last + 1):
        # Rounding of sums must not delay it; NaN, of a method without reads, is never reached.
        if _mean_share(share, end - WINDOW + 1, end) >= before - 1e-9:
            return float(end - first + 1)
    return math.nan


HEAD = ("method", "rounds", "moved", "begins", "ends", "own cluster (chance)", "recovered")


def build_phase_rows(rows: Sequence[Mapping[str, Any]], metric: Metric) -> list[tuple[str, ...]]:
    """Format the rows of `summarize_phases` for a table whose columns are `HEAD`."""
    found, chances = [], dict[str, float]()
    for row in rows:
        # That of the phase before, whose clusters may be of other sizes.
        chance = chances.get(row["label"], float(row["chance"]))
        chances[row["label"]] = float(row["chance"])
        ends = metric.format_value(row["mean"], brief=True)
        if row["std"] is not None and row["mean"] is not None:
            ends += f" ±{metric.format_value(row['std'], brief=True)}"
        shares = [row["share_begins"], row["share"]]
        if row["phase"]:
            shares.insert(0, row["share_before"])
        # JSON has None for NaN: a method that reads nobody has no share.
        known = [one for one in shares if one is not None and math.isfinite(one)]
        path = "–"
        if known:
            path = " → ".join(f"{100 * one:.0f}" for one in known) + f" ({100 * row['chance']:.0f})"
        found.append(
            (
                str(row["label"]),
                f"{row['first']} to {row['last']}",
                f"{row['moved']:g}" if row["phase"] else "–",
                metric.format_value(row["begins"], brief=True),
                ends,
                path,
                _format_recovery(row, chance) if known and row["phase"] else "–",
            )
        )
    return found


def _format_recovery(row: Mapping[str, Any], chance: float) -> str:
    """Format the rounds until reads recovered: the median of the seeds, and how many did."""
    before = row["share_before"]
    if before is not None and before < _ABOVE_CHANCE * chance:
        return "at chance"
    reached = [one for one in row["recovered"] if one is not None]
    if not reached:
        return "no"
    text = f"{np.median(reached):g} rounds"
    if len(reached) < row["seeds"]:
        text += f" ({len(reached)} of {row['seeds']} seeds)"
    return text


def describe_columns(metric: Metric) -> str:
    """Describe the columns of `HEAD` in a sentence each."""
    return (
        f"By phase: {metric.heading('test')} of the newest models on the test sets of the phase, "
        "after its first and its last round; the number of clients whose cluster changed; the "
        "share in % of reads from the own cluster, or of pairs that share a model and a cluster, "
        f"in the {WINDOW} rounds before the change, the first {WINDOW} and the last {WINDOW} of "
        "the phase (that of random reads); and rounds from the change until that share was what "
        "it was before, unless it was that of chance."
    )
