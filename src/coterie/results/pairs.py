"""Methods compared in pairs: what is established about which of two is better, in numbers and in words.

Differences are paired by seed and client and averaged over the clients of a seed; the interval is
Student's over the seeds' means (`functional.paired`). Holm's correction is over the pairs of one
metric and one cluster, which are those of a column of the table of results.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float
from scipy import stats

from coterie.functional.metrics import Metric
from coterie.functional.paired import (
    CONFIDENCE,
    MOST_SEEDS,
    correct_holm,
    find_seeds_needed,
    mean_difference,
    overlap_from_share,
)
from coterie.methods import METHODS

SIGNIFICANCE_LEVEL = round(1 - CONFIDENCE, 10)
REFERENCES = {"truth": "knows the clusters", "pool": "has everybody's data in one place"}
"""What a method may need that no client has (`Method.needs`), in words: methods that need some are not ranked."""


@dataclass(frozen=True)
class Pair:
    """Two methods compared by a metric over the seeds that both have.

    Args:
        method_a: the label of the one with the better mean; with a baseline, of the method that is
            compared with it.
        method_b: the label of the other.
        metric: what is compared.
        cluster: over which clients: "all", "clusters" (the mean over planted clusters), or the name
            of one.
        difference: by how much `method_a` is better, mean over clients and seeds; turned round
            where less is better, so that above 0 is always better. None where a client of either
            diverged.
        low: lower end of the 95 % interval of the difference; None for one seed, or where all seeds
            gave the same.
        high: its upper end.
        p: of the t test that there is no difference; None where there is no interval.
        p_corrected: for the number of pairs, by Holm's rule.
        effect: the difference in standard deviations over seeds.
        gained: the share of clients, over all seeds, that do better under `method_a`.
        lost: the share that do better under `method_b`.
        seeds: their number.
        clients: compared in each seed (the fewest in any).
        seeds_needed: the number of seeds that would establish a difference of this size, with 80 %
            power and a correction for as many pairs; None where it is not known, or above 1,000.
        established: whether `p_corrected` is 0.05 or less.
        overlap: what the interval is widened by for training data that seeds share, as folds do:
            tested samples over those trained on; 0 where seeds are independent.
    """

    method_a: str
    method_b: str
    metric: str
    cluster: str
    difference: float | None
    low: float | None
    high: float | None
    p: float | None
    p_corrected: float | None
    effect: float | None
    gained: float | None
    lost: float | None
    seeds: int
    clients: int
    seeds_needed: int | None
    established: bool
    overlap: float = 0.0

    @property
    def key(self) -> frozenset[str]:
        """The two methods, in no order."""
        return frozenset((self.method_a, self.method_b))

    def swap_methods(self) -> "Pair":
        """Return the same with the two methods the other way round."""
        less = {
            name: None if (value := getattr(self, name)) is None else -value
            for name in ("difference", "effect")
        }
        low, high = (None if end is None else -end for end in (self.high, self.low))
        return replace(
            self, method_a=self.method_b, method_b=self.method_a, low=low, high=high, gained=self.lost,
            lost=self.gained, **less,
        )  # fmt: skip


def compare_pairs(
    values: Mapping[str, Mapping[int, pd.Series]],
    planted: Mapping[int, pd.Series],
    metric: Metric,
    names: Mapping[int, str],
    overlap: float = 0.0,
) -> list[Pair]:
    """Compare methods in pairs: over all clients, over each planted cluster, and over clusters.

    Args:
        values: by method and seed the final value of each client, indexed by client id; without
            clients whose test samples leave the metric undefined. Of each two methods the seeds are
            compared that both have.
        planted: by seed the planted cluster of each client, -1 where none is known.
        metric: what the values are of; it must have a better direction.
        names: of the planted clusters.
        overlap: of the data that seeds train on; see `functional.paired.mean_difference`.

    Returns:
        For each of these groups of clients all pairs, in the order of the methods; in each the
        better one first.
    """
    labels = list(values)
    seeds = sorted({seed for own in values.values() for seed in own})
    known = sorted({int(c) for own in planted.values() for c in own.unique() if c >= 0})
    if metric.over == "run":
        known = []
    columns = [*(names.get(c, str(c)) for c in known), "all", *(["clusters"] if known else [])]
    means = np.full((len(seeds), len(labels), len(labels), len(columns)), np.nan)
    wins, counts = np.zeros_like(means), np.zeros_like(means)
    for s, seed in enumerate(seeds):
        ids = planted[seed].index
        table = np.stack([
            own[seed].reindex(ids).to_numpy(float) if seed in own else np.full(len(ids), np.nan)
            for own in values.values()
        ])  # fmt: skip
        there = np.stack(
            [ids.isin(own[seed].index) if seed in own else ids.isin([]) for own in values.values()]
        )
        member = np.stack(
            [*(planted[seed].to_numpy() == c for c in known), np.ones(len(ids), bool)]
        )
        for m in range(len(labels)):
            means[s, m], wins[s, m], counts[s, m] = _compare_with_each(
                m, metric.sign * table, there, member, len(columns)
            )
    out = []
    for column, cluster in enumerate(columns):
        found = [
            _build_pair(labels[m], labels[n], metric.name, cluster, means[:, m, n, column], wins[:, m, n, column],
                  wins[:, n, m, column], counts[:, m, n, column], overlap)
            for m in range(len(labels))
            for n in range(m + 1, len(labels))
        ]  # fmt: skip
        out += _correct_p_values([pair for pair in found if pair is not None])
    return out


def _compare_with_each(
    method: int,
    table: Float[np.ndarray, "methods clients"],
    there: Bool[np.ndarray, "methods clients"],
    member: Bool[np.ndarray, "groups clients"],
    columns: int,
) -> tuple[Float[np.ndarray, "methods columns"], ...]:
    """One seed: how much better a method is than each, with how many of its clients, and how many clients both have."""
    both, groups = there[method] & there, member.T.astype(float)
    with np.errstate(invalid="ignore", divide="ignore"):
        better = np.where(both, table[method] - table, 0.0)
        counts = both @ groups
        parts = better @ groups / counts, ((better > 0) & both) @ groups, counts
    if columns == len(member):
        return parts
    over_clusters = parts[0][:, :-1].mean(1), parts[1][:, -1], parts[2][:, -1]
    return tuple(
        np.column_stack([part, last]) for part, last in zip(parts, over_clusters, strict=True)
    )


def _build_pair(
    a: str,
    b: str,
    metric: str,
    cluster: str,
    means: Float[np.ndarray, " seeds"],
    wins: Float[np.ndarray, " seeds"],
    losses: Float[np.ndarray, " seeds"],
    counts: Float[np.ndarray, " seeds"],
    overlap: float,
) -> Pair | None:
    """One pair, the better method first, not corrected yet; None where no seed has both."""
    has = counts > 0
    if not has.any():
        return None
    total, found = counts[has].sum(), mean_difference(means[has], overlap=overlap)
    mean, low, high, p, effect = map(
        _finite_or_none, (found.mean, found.low, found.high, found.p, found.effect)
    )
    gained, lost = (
        None if mean is None else float(part[has].sum() / total) for part in (wins, losses)
    )
    seeds, clients = int(has.sum()), int(counts[has].min())
    pair = Pair(
        a, b, metric, cluster, mean, low, high, p, None, effect, gained, lost, seeds, clients, None,
        established=False, overlap=overlap,
    )  # fmt: skip
    return pair.swap_methods() if mean is not None and mean < 0 else pair


def _finite_or_none(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None


def _correct_p_values(pairs: Sequence[Pair]) -> list[Pair]:
    """Correct the p values of some pairs for their number, and say how many seeds each would need."""
    tested = sum(pair.p is not None for pair in pairs)
    corrected = correct_holm(
        np.array([np.nan if pair.p is None else pair.p for pair in pairs], dtype=float)
    )
    out = []
    for pair, value in zip(pairs, corrected, strict=True):
        needed = None
        if pair.effect is not None:
            needed = find_seeds_needed(
                pair.effect, level=SIGNIFICANCE_LEVEL / tested, overlap=pair.overlap
            )
        p = _finite_or_none(value)
        out.append(
            replace(
                pair,
                p_corrected=p,
                seeds_needed=needed,
                established=p is not None and p <= SIGNIFICANCE_LEVEL,
            )
        )
    return out


def select_pairs(
    pairs: Iterable[Pair], *, metric: str | None = None, cluster: str = "all", baseline: str | None = None,
    share: float = 0.0,
) -> list[Pair]:  # fmt: skip
    """Return the pairs of one metric and one group of clients, corrected for as many as these.

    Args:
        pairs: of a study.
        metric: of these alone; of all when None (they are then of one).
        cluster: over which clients.
        baseline: only the pairs with this method, which comes second in each: fewer pairs, a
            smaller correction.
        share: of the samples that each seed tests on, where seeds split the same samples anew and
            the question is about new samples; see `functional.paired.mean_difference`. Pairs that
            were widened already stay as they are.
    """
    own = [pair for pair in pairs if metric in (None, pair.metric) and pair.cluster == cluster]
    if baseline is not None:
        own = [
            pair.swap_methods() if pair.method_a == baseline else pair
            for pair in own
            if baseline in pair.key
        ]
    return _correct_p_values([_widen_interval(pair, overlap_from_share(share)) for pair in own])


def _widen_interval(pair: Pair, overlap: float) -> Pair:
    """Correct the interval and the p value of a pair for training data that its seeds share."""
    if not overlap or pair.overlap:
        return pair
    if pair.p is None or pair.low is None or pair.high is None or pair.difference is None:
        return pair
    wider = math.sqrt(1 + overlap * pair.seeds)
    half = wider * (pair.high - pair.low) / 2
    error = half / stats.t.ppf((1 + CONFIDENCE) / 2, pair.seeds - 1)
    p = float(2 * stats.t.sf(abs(pair.difference) / error, pair.seeds - 1))
    return replace(
        pair, low=pair.difference - half, high=pair.difference + half, p=p, overlap=overlap
    )


def pairs_to_json(pairs: Iterable[Pair]) -> list[dict[str, Any]]:
    """Return plain values, for summary.json."""
    return [asdict(pair) for pair in pairs]


def parse_pairs(content: Mapping[str, Any]) -> list[Pair]:
    """Return the pairs of a summary; none of one that was stored before there were any."""
    known = {
        field.name: None if field.default is MISSING else field.default for field in fields(Pair)
    }
    return [
        Pair(**{name: one.get(name, other) for name, other in known.items()})
        for one in content.get("pairs") or ()
    ]


# ---------------------------------------------------------------------- in words


def find_leaders(
    rows: Iterable[Mapping[str, Any]], pairs: Iterable[Pair], metric: Metric, cluster: str
) -> list[str]:
    """Return the method with the best mean, and after it those that cannot be told apart from it.

    References, as Oracle is, are not ranked. There is no leader where fewer than two methods are,
    or where the pairs say nothing: of a single seed, or of a summary that was stored before there
    were any.

    Args:
        rows: of a summary: `method` (the kind), `label`, `cluster`, `metric`, `mean`, and `needs`
            where a method has some.
        pairs: of the same summary.
        metric: what is compared.
        cluster: over which clients.

    Returns:
        Labels; a single one is established as the best.
    """
    ranked = {
        row["label"]: metric.sign * row["mean"]
        for row in rows
        if (row["metric"], row["cluster"]) == (metric.name, cluster)
        and not _describe_needs(row)
        and row["mean"] is not None
        and math.isfinite(row["mean"])
    }
    own = {
        pair.key: pair for pair in pairs if (pair.metric, pair.cluster) == (metric.name, cluster)
    }
    if not metric.sign or len(ranked) < 2:
        return []
    order = sorted(ranked, key=lambda label: -ranked[label])
    with_best = {label: own.get(frozenset((order[0], label))) for label in order[1:]}
    if all(pair is None or pair.seeds < 2 for pair in with_best.values()):
        return []
    return [
        order[0],
        *(label for label, pair in with_best.items() if pair is None or not pair.established),
    ]


def _describe_needs(row: Mapping[str, Any]) -> list[str]:
    """Return in words what the method of a row has that no client has; its class tells of rows that do not say."""
    needs = row.get("needs")
    if needs is None:
        needs = METHODS[row["method"]].needs if row["method"] in METHODS else ()
    return [words for need, words in REFERENCES.items() if need in needs]


def describe_unranked(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Say which methods are not ranked and why.

    Args:
        rows: of a summary: `method` (the kind), `label`, and `needs` where a method has some.
    """
    by_label = {row["label"]: _describe_needs(row) for row in rows}
    return [
        f"{label}, which {' and '.join(words)}, is not ranked"
        for label, words in by_label.items()
        if words
    ]


def describe_leaders(
    rows: Sequence[Mapping[str, Any]], pairs: Sequence[Pair], metric: Metric, cluster: str = "all"
) -> str:
    """Say in a sentence which method is best, or which cannot be told apart; empty where nothing is compared.

    The arguments are those of `find_leaders`.
    """
    own = [pair for pair in pairs if (pair.metric, pair.cluster) == (metric.name, cluster)]
    leading = find_leaders(rows, pairs, metric, cluster)
    seeds = max((pair.seeds for pair in own), default=0)
    if not leading:
        return (
            "One seed settles nothing about other seeds: no method is shown as the best."
            if seeds == 1
            else ""
        )
    without = "".join(f" {said}." for said in describe_unranked(rows))
    if len(leading) == 1:
        return f"{leading[0]} is the best: its difference from each other method is established.{without}"
    *others, last = leading[1:]
    names = f"{', '.join(others)} and {last}" if others else last
    return f"{leading[0]} has the best mean, but {names} cannot be told apart from it with {seeds} seeds.{without}"


def format_difference(pair: Pair, metric: Metric) -> tuple[str, str | None]:
    """Write the difference of a pair, signed, and its interval if there is one: as many decimals as this can tell.

    Example:
        >>> from coterie.functional.metrics import ACCURACY, LOSS
        >>> numbers = dict(p=None, p_corrected=None, effect=None, gained=None, lost=None, seeds=8, clients=20)
        >>> numbers |= dict(seeds_needed=None, established=False)
        >>> shown(Pair("A", "B", "accuracy", "all", 0.021, 0.004, 0.038, **numbers), ACCURACY)
        ('+2.1', '0.4 to 3.8')
        >>> shown(Pair("A", "B", "loss", "all", 0.6441, 0.6065, 0.6817, **numbers), LOSS)
        ('+0.644', '0.607 to 0.682')
    """
    if pair.difference is None:
        return "–", None
    known = pair.low is not None and pair.high is not None
    width = (pair.high - pair.low) / 2 if known else abs(pair.difference)  # type: ignore[operator]
    size = math.floor(math.log10(metric.scale * width)) if width > 0 else 0
    decimals = min(9, max(1, -size) if metric.unit == "%" else max(0, 1 - size))
    mean, low, high = (
        None if one is None else metric.scale * one + 0.0
        for one in (pair.difference, pair.low, pair.high)
    )
    return f"{mean:+.{decimals}f}", f"{low:.{decimals}f} to {high:.{decimals}f}" if known else None


def describe_pair(pair: Pair, metric: Metric) -> str:
    """Say in a line what is established about a pair, with its interval, and else what would settle it.

    Example:
        >>> from coterie.functional.metrics import ACCURACY
        >>> numbers = dict(p=0.01, p_corrected=0.03, effect=1.3, gained=0.7, lost=0.2, seeds=8, clients=20)
        >>> numbers |= dict(seeds_needed=8, established=True)
        >>> pair = Pair("DAC", "Random", "accuracy", "all", 0.021, 0.004, 0.038, **numbers)
        >>> verdict(pair, ACCURACY)
        'DAC is better than Random by 2.1 (0.4 to 3.8)'
    """
    a, b = pair.method_a, pair.method_b
    if pair.difference is None:
        return f"{a} and {b}: not known, since a client of one of them has no value in some seed (it diverged)"
    difference, interval = format_difference(pair, metric)
    if interval is None:
        if pair.seeds == 1:
            many = (
                f"; {100 * (pair.gained or 0.0):.0f} % of clients gained"
                if pair.clients > 1
                else ""
            )
            return f"{a} over {b}: {difference} in one seed{many}; one seed settles nothing about others"
        return f"{a} over {b}: {difference} in each of {pair.seeds} seeds; seeds that do not differ count as one"
    if pair.established:
        worse = pair.difference < 0
        size, ends = format_difference(pair.swap_methods() if worse else pair, metric)
        return f"{a} is {'worse' if worse else 'better'} than {b} by {size[1:]} ({ends})"
    alone = pair.low is not None and pair.high is not None and (pair.low > 0 or pair.high < 0)
    why = (
        f", p = {pair.p_corrected:.2f} after correction"
        if alone and pair.p_corrected is not None
        else ""
    )
    return f"{a} over {b}: not established: {difference} ({interval}){why}; {describe_seeds_needed(pair)}"


def describe_seeds_needed(pair: Pair) -> str:
    """Say how many seeds would settle a difference of the size seen."""
    if pair.seeds_needed is None:
        return f"more than {MOST_SEEDS:,} seeds would be needed for a difference of this size"
    return f"about {pair.seeds_needed} seeds would settle a difference of this size"


def describe_interval_scope(config: Mapping[str, Any], names: Mapping[int, str]) -> str:
    """Say what intervals over seeds speak of in a study: what another seed draws anew, and what it does not.

    Args:
        config: of one of its runs.
        names: of its clients, where they have any.
    """
    data = config.get("data") or {}
    if data.get("folds"):
        return (
            f"Intervals are about new samples of the same clients: seeds are folds, {data['folds']} a division, which "
            "share training data; for that, intervals and p values are widened (Nadeau and Bengio, 2003)."
        )
    if data.get("fixed_seed") is not None:
        return "Intervals are about other seeds on the same split of the data: other initial models and draws in training."
    if data.get("dataset") in (None, "own"):
        return "Intervals are about other seeds of this study, with the clients and data that it was given."
    if names:
        return "Intervals are about other seeds with the same clients: other splits of their data, other initial models."
    return "Intervals are about other seeds, which draw other clients from the same data set, not about other data sets."
