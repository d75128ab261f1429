"""Compare methods in pairs: which of two is better, in numbers and in words.

Differences are paired by seed and client and averaged over the clients of a seed; the interval is
Student's over the means of the seeds (`functional.paired`). Holm's correction is over the pairs of
one metric and one cluster, which are the pairs of one column of the table of results.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int
from scipy import sparse, special

from coterie._util.mappings import select_keys
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
from coterie.results.planted import MOST_CLUSTERS

# Rounded, since 1 - 0.95 is a little above 0.05 in binary numbers.
SIGNIFICANCE_LEVEL = round(1 - CONFIDENCE, 10)
REFERENCES = {"truth": "knows the clusters", "pool": "has everybody's data in one place"}
"""What a method may need that no client has (`Method.needs`); such methods are not ranked."""


@dataclass(frozen=True)
class Pair:
    """Two methods compared by a metric over the seeds that both have.

    Args:
        method_a: the label of the method with the better mean; with a baseline, of the method that
            is compared with it.
        method_b: the label of the other method.
        metric: what is compared.
        cluster: over which clients: "all", "clusters" (the mean over planted clusters), or the name
            of one cluster.
        difference: by how much `method_a` is better, mean over clients and seeds; with the opposite
            sign for a loss, so that above 0 is always better. None when a client of either
            diverged.
        low: lower end of the 95 % interval of the difference; None for one seed, or when all seeds
            gave the same.
        high: its upper end.
        p: of the t test that there is no difference; None when there is no interval.
        p_corrected: for the number of pairs, by Holm's rule.
        effect: the difference in standard deviations over seeds.
        gained: the share of clients, over all seeds, that do better under `method_a`.
        lost: the share that do better under `method_b`.
        seeds: their number.
        clients: compared in each seed (the fewest in any).
        seeds_needed: the number of seeds that would establish a difference of this size, with 80 %
            power and a correction for as many pairs; None when it is unknown, or above 1,000.
        established: whether `p_corrected` is 0.05 or less.
        overlap: what the interval is widened by for training data that seeds share, as folds do:
            tested samples over trained samples; 0 when seeds are independent.
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
        """Return the same comparison with the two methods swapped."""
        return replace(
            self,
            method_a=self.method_b,
            method_b=self.method_a,
            difference=_negate(self.difference),
            effect=_negate(self.effect),
            # The lower end becomes the upper one.
            low=_negate(self.high),
            high=_negate(self.low),
            gained=self.lost,
            lost=self.gained,
        )


def compare_pairs(
    values: Mapping[str, Mapping[int, pd.Series]],
    planted: Mapping[int, pd.Series],
    metric: Metric,
    names: Mapping[int, str],
    overlap: float = 0.0,
) -> list[Pair]:
    """Compare methods in pairs: over all clients, over each planted cluster, and over clusters.

    Of more than `MOST_CLUSTERS` planted clusters, over all clients and over clusters alone: nobody
    reads hundreds of columns, and each has few clients.

    Args:
        values: by method and seed the final value of each client, indexed by client id; without
            clients whose test samples leave the metric undefined. Two methods are compared over the
            seeds that both have.
        planted: by seed the planted cluster of each client, -1 when it is unknown.
        metric: the metric of the values; it must have a better direction.
        names: of the planted clusters.
        overlap: of the data that seeds train on; see `functional.paired.mean_difference`.

    Returns:
        For each of these groups of clients all pairs, in the order of the methods; in each the
        better one first.
    """
    labels = list(values)
    seeds = sorted(set().union(*values.values()))
    known: list[int] = []
    # A metric of a whole run has one value, so it has no clusters.
    if metric.over != "run":
        found = set()
        for own in planted.values():
            found.update(own.unique())
        known = sorted(int(cluster) for cluster in found if cluster >= 0)
    columns = [names.get(cluster, str(cluster)) for cluster in known]
    columns += ["all", "clusters"] if known else ["all"]
    # The last ones are those over all clients and over clusters.
    left_out = len(known) if len(known) > MOST_CLUSTERS else 0
    columns = columns[left_out:]
    # [seeds, methods, methods, groups of clients]
    means = np.full((len(seeds), len(labels), len(labels), len(columns)), np.nan)
    wins, counts = np.zeros_like(means), np.zeros_like(means)
    for s, seed in enumerate(seeds):
        # The clients of this seed: seeds may have other ones.
        ids = planted[seed].index
        table, there = _stack_values([own.get(seed) for own in values.values()], ids)
        groups = _mark_groups(planted[seed].to_numpy(), known)
        for m in range(len(labels)):
            parts = _compare_with_each(
                m, metric.sign * table, there, groups, left_out + len(columns)
            )
            means[s, m], wins[s, m], counts[s, m] = (part[:, left_out:] for part in parts)
    out = []
    for column, cluster in enumerate(columns):
        pairs = []
        # Only pairs m < n: (n, m) is the same pair with the opposite sign.
        for m, n in combinations(range(len(labels)), 2):
            pair = _build_pair(
                (labels[m], labels[n]),
                metric.name,
                cluster,
                means[:, m, n, column],
                (wins[:, m, n, column], wins[:, n, m, column]),
                counts[:, m, n, column],
                overlap,
            )
            if pair is not None:
                pairs.append(pair)
        out += correct_p_values(pairs)
    return out


def _mark_groups(clusters: Int[np.ndarray, " clients"], known: Sequence[int]) -> Any:
    """Return [clients, groups], 1 for a client of a group: of planted clusters, then everybody.

    Of many clusters the matrix is sparse.
    """
    if len(known) <= MOST_CLUSTERS:
        member = np.ones((len(known) + 1, len(clusters)))
        for group, cluster in enumerate(known):
            member[group] = clusters == cluster
        return member.T
    everybody = np.arange(len(clusters))
    inside = np.flatnonzero(clusters >= 0)
    group = np.searchsorted(known, clusters[inside])
    rows = np.concatenate([inside, everybody])
    columns = np.concatenate([group, np.full(len(everybody), len(known))])
    shape = len(clusters), len(known) + 1
    return sparse.csr_array((np.ones(len(rows)), (rows, columns)), shape=shape)


def _stack_values(
    series: Sequence[pd.Series | None], ids: pd.Index
) -> tuple[Float[np.ndarray, "methods clients"], Bool[np.ndarray, "methods clients"]]:
    """Stack the values of one seed, NaN where a method has none, and whether it has one."""
    table = np.full((len(series), len(ids)), np.nan)
    there = np.zeros(table.shape, dtype=bool)
    for row, own in enumerate(series):
        if own is not None:
            table[row] = own.reindex(ids).to_numpy(float)
            # A diverged client is there, with NaN; one whose test samples do not define the metric
            # is not.
            there[row] = ids.isin(own.index)
    return table, there


def _compare_with_each(
    method: int,
    table: Float[np.ndarray, "methods clients"],
    there: Bool[np.ndarray, "methods clients"],
    groups: Any,
    columns: int,
) -> tuple[Float[np.ndarray, "methods columns"], ...]:
    """Compare one method with each method in one seed.

    Args:
        method: its row.
        table: the value of each client.
        there: whether a method has it.
        groups: [clients, groups], as numbers, so that one matrix product counts and sums.
        columns: of the result: the groups, and the mean over clusters where there are any.

    Returns:
        By method and group of clients: how much better it is, with how many of its clients, and how
        many clients both have.
    """
    both = there[method] & there
    with np.errstate(invalid="ignore", divide="ignore"):
        # 0 where one lacks the client, so that it adds nothing.
        better = np.where(both, table[method] - table, 0.0)
        counts = both @ groups
        # A diverged client makes the means of its own groups unknown. It is counted apart, since
        # in the product below NaN * 0 would be NaN in all groups.
        lost = ~np.isfinite(better)
        sums = np.where((lost @ groups) > 0, np.nan, np.where(lost, 0.0, better) @ groups)
        parts = sums / counts, ((better > 0) & both) @ groups, counts
    if columns == groups.shape[1]:
        return parts
    # Mean of the clusters' means; shares and counts are those of everybody. Clusters of other seeds
    # have no client in this one, as in the means of a summary.
    of_clusters, own = parts[0][:, :-1], counts[:, :-1]
    present = np.asarray(groups.sum(0)).ravel()[:-1] > 0
    if not present.all():
        of_clusters, own = of_clusters[:, present], own[:, present]
    if present.any():
        # Where no client of a cluster has the metric under both, nothing is compared over clusters.
        known = (own > 0).all(1)
        over_clusters = of_clusters.mean(1), parts[1][:, -1] * known, parts[2][:, -1] * known
    else:
        over_clusters = np.full(len(table), np.nan), *np.zeros((2, len(table)))
    joined = []
    for part, last in zip(parts, over_clusters, strict=True):
        joined.append(np.column_stack([part, last]))
    return tuple(joined)


def _build_pair(
    labels: tuple[str, str],
    metric: str,
    cluster: str,
    means: Float[np.ndarray, " seeds"],
    wins: tuple[Float[np.ndarray, " seeds"], Float[np.ndarray, " seeds"]],
    counts: Float[np.ndarray, " seeds"],
    overlap: float,
) -> Pair | None:
    """Build one pair, the better method first, not corrected yet; None when no seed has both."""
    has = counts > 0
    if not has.any():
        return None
    found = mean_difference(means[has], overlap=overlap)
    mean, gained, lost = _finite_or_none(found.mean), None, None
    if mean is not None:
        # Over the clients of all seeds together.
        total = counts[has].sum()
        gained, lost = (float(part[has].sum() / total) for part in wins)
    pair = Pair(
        *labels,
        metric,
        cluster,
        difference=mean,
        low=_finite_or_none(found.low),
        high=_finite_or_none(found.high),
        p=_finite_or_none(found.p),
        p_corrected=None,
        effect=_finite_or_none(found.effect),
        gained=gained,
        lost=lost,
        seeds=int(has.sum()),
        clients=int(counts[has].min()),
        seeds_needed=None,
        established=False,
        overlap=overlap,
    )
    return pair.swap_methods() if mean is not None and mean < 0 else pair


def _finite_or_none(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None


def _negate(value: float | None) -> float | None:
    return None if value is None else -value


def correct_p_values(pairs: Sequence[Pair]) -> list[Pair]:
    """Correct p values for the number of pairs, and estimate the seeds each needs."""
    # None becomes NaN, which the correction leaves out.
    values = np.array([pair.p for pair in pairs], dtype=float)
    tested = int(np.isfinite(values).sum())
    out = []
    for pair, value in zip(pairs, correct_holm(values), strict=True):
        needed = None
        if pair.effect is not None:
            # Bonferroni's level, the strictest that Holm uses: the number of seeds is on the safe
            # side.
            level = SIGNIFICANCE_LEVEL / tested
            needed = find_seeds_needed(pair.effect, level=level, overlap=pair.overlap)
        p = _finite_or_none(value)
        established = p is not None and p <= SIGNIFICANCE_LEVEL
        out.append(replace(pair, p_corrected=p, seeds_needed=needed, established=established))
    return out


def select_pairs(
    pairs: Iterable[Pair],
    *,
    metric: str | None = None,
    cluster: str = "all",
    baseline: str | None = None,
) -> list[Pair]:
    """Select the pairs of one metric and one group of clients, corrected for as many as these.

    Args:
        pairs: of a study.
        metric: its name; None when the pairs are all of one metric.
        cluster: over which clients.
        baseline: select only the pairs with this method, which comes second in each: fewer pairs, a
            smaller correction.
    """
    own = []
    for pair in pairs:
        is_asked = metric in (None, pair.metric) and pair.cluster == cluster
        if is_asked and (baseline is None or baseline in pair.key):
            own.append(pair.swap_methods() if pair.method_a == baseline else pair)
    return correct_p_values(own)


def widen_intervals(pairs: Sequence[Pair], share: float) -> list[Pair]:
    """Correct all pairs of a study for training data that its seeds share.

    p values are corrected again within each column: the pairs of one metric and one group of
    clients.

    Args:
        pairs: of a study; a pair that was widened already stays as it is.
        share: the share of the samples that each seed tests on, when seeds split the same samples
            again and the question is about new samples; see `functional.paired.mean_difference`.
    """
    if not share:
        return list(pairs)
    columns: dict[tuple[str, str], list[int]] = {}
    for place, pair in enumerate(pairs):
        columns.setdefault((pair.metric, pair.cluster), []).append(place)
    out = list(pairs)
    for places in columns.values():
        wider = [_widen_interval(pairs[place], overlap_from_share(share)) for place in places]
        for place, pair in zip(places, correct_p_values(wider), strict=True):
            out[place] = pair
    return out


def _widen_interval(pair: Pair, overlap: float) -> Pair:
    """Correct the interval and the p value of a pair for training data that its seeds share."""
    if not overlap or pair.overlap:
        return pair
    if pair.p is None or pair.low is None or pair.high is None or pair.difference is None:
        return pair
    # Nadeau and Bengio: the variance of the mean grows from 1/n to 1/n + overlap.
    wider = math.sqrt(1 + overlap * pair.seeds)
    half = wider * (pair.high - pair.low) / 2
    # The interval's half width is the standard error times Student's quantile.
    error = half / special.stdtrit(pair.seeds - 1, (1 + CONFIDENCE) / 2)
    p = float(2 * special.stdtr(pair.seeds - 1, -abs(pair.difference) / error))
    return replace(
        pair, low=pair.difference - half, high=pair.difference + half, p=p, overlap=overlap
    )


def pairs_to_json(pairs: Iterable[Pair]) -> list[dict[str, Any]]:
    """Return plain values, for summary.json."""
    return list(map(asdict, pairs))


def parse_pairs(content: Mapping[str, Any]) -> list[Pair]:
    """Return the pairs of a summary; a summary that was stored before there were pairs has none."""
    known = {}
    # A stored pair of an older version lacks newer fields.
    for field in fields(Pair):
        known[field.name] = None if field.default is MISSING else field.default
    pairs = []
    for one in content.get("pairs") or ():
        pairs.append(Pair(**{name: one.get(name, default) for name, default in known.items()}))
    return pairs


# ---------------------------------------------------------------------- in words


def find_leaders(
    rows: Iterable[Mapping[str, Any]], pairs: Iterable[Pair], metric: Metric, cluster: str
) -> list[str]:
    """Return the method with the best mean, then each method that is not established as worse.

    References, as Oracle is, are not ranked. There is no leader when fewer than two methods are
    ranked, or when the pairs say nothing: with a single seed, or in a summary that was stored
    before there were pairs. Nor is there one when a method is established as better than that with
    the best mean: the means are then over different clients, see `find_contradiction`.

    Args:
        rows: of a summary: `method` (the kind), `label`, `cluster`, `metric`, `mean`, and `needs`
            when a method has some.
        pairs: of the same summary.
        metric: what is compared.
        cluster: over which clients.

    Returns:
        Labels; a single one is established as the best.
    """
    best, compared, others = _compare_with_best(rows, pairs, metric, cluster)
    # Without any of them all() holds: nothing was compared with the best mean.
    if all(pair.seeds < 2 for pair in compared.values()):
        return []
    leading = [best]
    for label in others:
        pair = compared.get(label)
        if pair is None or not pair.established:
            leading.append(label)
        elif _find_better(pair) != best:
            return []
    return leading


def find_contradiction(
    rows: Iterable[Mapping[str, Any]], pairs: Iterable[Pair], metric: Metric, cluster: str
) -> tuple[str, str] | None:
    """Return the method with the best mean, and one that is established as better than it.

    Both hold where a metric is undefined for other clients under each method, as F1 is where a
    model never predicts a class: a mean is over the clients that have a value under its method, a
    pair over the clients that have one under both.

    The arguments are those of `find_leaders`.
    """
    best, compared, _ = _compare_with_best(rows, pairs, metric, cluster)
    for label, pair in compared.items():
        if pair.established and _find_better(pair) != best:
            return best, label
    return None


def _find_better(pair: Pair) -> str:
    """Return the better method of a pair with a difference; with a baseline it may be either."""
    return pair.method_a if (pair.difference or 0.0) >= 0 else pair.method_b


def _compare_with_best(
    rows: Iterable[Mapping[str, Any]], pairs: Iterable[Pair], metric: Metric, cluster: str
) -> tuple[str, dict[str, Pair], list[str]]:
    """Return the ranked method with the best mean, its pairs by the other method, and the others.

    There is nothing in any of them when fewer than two methods are ranked.
    """
    ranked = {}
    for row in rows:
        if (row["metric"], row["cluster"]) != (metric.name, cluster) or _describe_needs(row):
            continue
        # Of a method that diverged it is not known where it stands.
        if row["mean"] is not None and math.isfinite(row["mean"]):
            ranked[row["label"]] = metric.sign * row["mean"]
    if not metric.sign or len(ranked) < 2:
        return "", {}, []
    # Equal means stay in the order of the rows.
    best, *others = sorted(ranked, key=lambda label: -ranked[label])
    with_best: dict[str, Pair] = {}
    for pair in pairs:
        if (pair.metric, pair.cluster) == (metric.name, cluster) and best in pair.key:
            (other,) = pair.key - {best}
            with_best[other] = pair
    return best, select_keys(with_best, others), others


def _describe_needs(row: Mapping[str, Any]) -> list[str]:
    """Describe what the method of a row has that no client has; old rows lack `needs`."""
    needs = row.get("needs")
    if needs is None:
        method = METHODS.get(row["method"])
        needs = () if method is None else method.needs
    return [text for need, text in REFERENCES.items() if need in needs]


def describe_unranked(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Describe which methods are not ranked and why.

    Args:
        rows: of a summary: `method` (the kind), `label`, and `needs` when a method has some.
    """
    by_label = {row["label"]: _describe_needs(row) for row in rows}
    lines = []
    for label, needs in by_label.items():
        if needs:
            lines.append(f"{label}, which {' and '.join(needs)}, is not ranked")
    return lines


def describe_unknown(rows: Iterable[Mapping[str, Any]], metric: Metric, cluster: str) -> list[str]:
    """Describe which methods are not ranked because their mean is not known.

    The arguments are those of `find_leaders`.
    """
    lines = []
    for row in rows:
        known = row["mean"] is not None and math.isfinite(row["mean"])
        if (row["metric"], row["cluster"]) != (metric.name, cluster) or known:
            continue
        reason = f"in some seed a client of it has no finite {metric.title} (it diverged)"
        if row.get("undefined"):
            reason = f"in some seed {metric.title} is undefined"
        lines.append(f"{row['label']} is not ranked: {reason}")
    return lines


OTHER_LOSSES = (
    "The methods minimize different losses, each in a unit of its own: these values are not "
    "compared. Name a metric of all of them in `metrics`, and compare by it: coterie compare "
    "--metric NAME."
)
"""What is said where methods have no other metric in common."""


def describe_leaders(
    rows: Sequence[Mapping[str, Any]], pairs: Sequence[Pair], metric: Metric, cluster: str = "all"
) -> str:
    """Describe in a sentence which methods are best; "" when nothing is compared.

    The arguments are those of `find_leaders`.
    """
    if any(row["metric"] == metric.name and not row.get("comparable", True) for row in rows):
        return OTHER_LOSSES
    leading = find_leaders(rows, pairs, metric, cluster)
    seeds = 0
    for pair in pairs:
        if (pair.metric, pair.cluster) == (metric.name, cluster):
            seeds = max(seeds, pair.seeds)
    unknown = describe_unknown(rows, metric, cluster)
    if not leading:
        parts = [f"{line}." for line in unknown]
        if found := find_contradiction(rows, pairs, metric, cluster):
            first, better = found
            parts.append(
                f"No method is shown as the best: {first} has the best mean, but {better} is better "
                f"over the clients that have a value under both; means are over the clients that "
                "have one under each."
            )
        if seeds == 1:
            parts.append(
                "One seed settles nothing about other seeds: no method is shown as the best."
            )
        return " ".join(parts)
    best, *tied = leading
    unranked = "".join(f" {line}." for line in [*describe_unranked(rows), *unknown])
    if not tied:
        return (
            f"{best} is the best: its difference from each other method is established.{unranked}"
        )
    *others, last = tied
    names = f"{', '.join(others)} and {last}" if others else last
    return (
        f"{best} has the best mean, but {names} cannot be distinguished from it with "
        f"{seeds} seeds.{unranked}"
    )


def format_difference(pair: Pair, metric: Metric) -> tuple[str, str | None]:
    """Format the signed difference of a pair, and its interval if there is one.

    The width of the interval decides the number of decimals.

    Example:
        >>> from coterie.functional.metrics import ACCURACY, LOSS
        >>> numbers = dict(p=None, p_corrected=None, effect=None, gained=None, lost=None, seeds=8)
        >>> numbers |= dict(clients=20, seeds_needed=None, established=False)
        >>> pair = Pair("A", "B", "accuracy", "all", 0.021, 0.004, 0.038, **numbers)
        >>> format_difference(pair, ACCURACY)
        ('+2.1', '0.4 to 3.8')
        >>> pair = Pair("A", "B", "loss", "all", 0.6441, 0.6065, 0.6817, **numbers)
        >>> format_difference(pair, LOSS)
        ('+0.644', '0.607 to 0.682')
    """
    if pair.difference is None:
        return "–", None
    width, known = abs(pair.difference), pair.low is not None and pair.high is not None
    if pair.low is not None and pair.high is not None:
        width = (pair.high - pair.low) / 2
    size = math.floor(math.log10(metric.scale * width)) if width > 0 else 0
    # Two significant digits of the width; of percentages at least one decimal.
    decimals = min(9, max(1, -size) if metric.unit == "%" else max(0, 1 - size))

    def format_scaled(value: float | None, sign: str = "") -> str:
        # Adding 0.0 turns -0.0 into 0.0.
        return "" if value is None else f"{metric.scale * value + 0.0:{sign}.{decimals}f}"

    interval = f"{format_scaled(pair.low)} to {format_scaled(pair.high)}"
    return format_scaled(pair.difference, "+"), interval if known else None


def describe_pair(pair: Pair, metric: Metric) -> str:
    """Describe what is established about a pair, or how many seeds would settle it.

    Example:
        >>> from coterie.functional.metrics import ACCURACY
        >>> numbers = dict(p=0.01, p_corrected=0.03, effect=1.3, gained=0.7, lost=0.2, seeds=8)
        >>> numbers |= dict(clients=20, seeds_needed=8, established=True)
        >>> pair = Pair("DAC", "Random", "accuracy", "all", 0.021, 0.004, 0.038, **numbers)
        >>> describe_pair(pair, ACCURACY)
        'DAC is better than Random by 2.1 (0.4 to 3.8)'
    """
    a, b = pair.method_a, pair.method_b
    if pair.difference is None:
        return (
            f"{a} and {b}: not known, since a client of one of them has no value in some seed "
            "(it diverged)"
        )
    difference, interval = format_difference(pair, metric)
    if interval is None:
        if pair.seeds > 1:
            return (
                f"{a} over {b}: {difference} in each of {pair.seeds} seeds; seeds that do not "
                "differ count as one"
            )
        gained = f"; {100 * (pair.gained or 0.0):.0f} % of clients gained"
        return (
            f"{a} over {b}: {difference} in one seed{gained * (pair.clients > 1)}; "
            "one seed settles nothing about others"
        )
    if pair.established:
        better = pair if pair.difference >= 0 else pair.swap_methods()
        size, ends = format_difference(better, metric)
        verdict = "better" if better is pair else "worse"
        return f"{a} is {verdict} than {b} by {size[1:]} ({ends})"
    why = ""
    # Both ends on one side of zero: their product is positive.
    without_zero = pair.low is not None and pair.high is not None and pair.low * pair.high > 0
    # The interval alone would establish it, so the reader needs the corrected p value.
    if without_zero and pair.p_corrected is not None:
        why = f", p = {pair.p_corrected:.2f} after correction"
    return (
        f"{a} over {b}: not established: {difference} ({interval}){why}; "
        f"{describe_seeds_needed(pair)}"
    )


def describe_seeds_needed(pair: Pair) -> str:
    """Describe how many seeds would establish a difference of the size seen."""
    if pair.seeds_needed is None:
        return f"more than {MOST_SEEDS:,} seeds would be needed for a difference of this size"
    return f"about {pair.seeds_needed} seeds would settle a difference of this size"


def describe_interval_scope(config: Mapping[str, Any], names: Mapping[int, str]) -> str:
    """Describe what the intervals over seeds of a study generalize to: what each seed draws again.

    Args:
        config: of one of its runs.
        names: of its clients, if they have any.
    """
    data = config.get("data") or {}
    if data.get("folds"):
        return (
            "Intervals are about new samples of the same clients: seeds are folds, "
            f"{data['folds']} a division, which "
            "share training data; for that, intervals and p values are widened (Nadeau and "
            "Bengio, 2003)."
        )
    if data.get("fixed_seed") is not None:
        return (
            "Intervals are about other seeds on the same split of the data: other initial "
            "models and draws in training."
        )
    if data.get("dataset") in (None, "own"):
        return (
            "Intervals are about other seeds of this study, with the clients and data that it "
            "was given."
        )
    if names:
        return (
            "Intervals are about other seeds with the same clients: other splits of their "
            "data, other initial models."
        )
    return (
        "Intervals are about other seeds, which draw other clients from the same data set, not "
        "about other data sets."
    )
