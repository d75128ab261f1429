"""Paired comparisons of two methods: confidence interval, p value, effect size and power.

The unit is the seed. Clients of one seed share a split of the data and initial models, so their
differences are not independent; their mean is one number a seed. Student's t over these means is
exact where they are normal, and close to it with a few dozen clients a seed. With S seeds it has
S - 1 degrees of freedom: few seeds give wide intervals.
"""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from scipy import special

CONFIDENCE = 0.95
POWER = 0.8
MOST_SEEDS = 1000
"""The largest number of seeds that `find_seeds_needed` reports."""
NO_SPREAD = 1e-9
"""Differences count as equal when they spread by at most this share of the largest: rounding."""


@dataclass(frozen=True)
class Estimate:
    """The mean difference of one or many studies, each estimated from its seeds.

    Args:
        mean: over seeds.
        std: sample standard deviation over seeds (S - 1 in its denominator); NaN for one seed.
        low: lower end of the confidence interval of the mean; NaN where there is none: for one
            seed, and where all seeds gave the same difference, which then are one observation, not
            several.
        high: its upper end.
        p: of the two-sided t test that the mean is 0; NaN where there is no interval.
        effect: the mean in standard deviations over seeds (Cohen's d of paired differences); NaN
            where there is no interval.
    """

    mean: Float[np.ndarray, " *studies"]
    std: Float[np.ndarray, " *studies"]
    low: Float[np.ndarray, " *studies"]
    high: Float[np.ndarray, " *studies"]
    p: Float[np.ndarray, " *studies"]
    effect: Float[np.ndarray, " *studies"]


def overlap_from_share(share: float) -> float:
    r"""Return `n_test / n_train` for the share of the samples that each run tests on.

    Example:
        >>> overlap_from_share(0.2)
        0.25
    """
    return share / (1 - share)


def mean_difference(
    differences: Float[np.ndarray, "*studies seeds"],
    *,
    overlap: float = 0.0,
    confidence: float = CONFIDENCE,
) -> Estimate:
    r"""Return the mean of paired differences with Student's confidence interval.

    Many studies are estimated at once. The variance of the mean is \(s^2 (1/S + \text{overlap})\),
    with the sample variance \(s^2\) over the S seeds.

    Args:
        differences: one number a seed: the mean over its clients of one method's value minus the
            other's.
        overlap: 0 where seeds are independent. Where each seed splits the same samples again, as
            repeated folds do, runs share training data and the question is about new samples: then
            `n_test / n_train` (Nadeau and Bengio, Inference for the generalization error, 2003).
        confidence: of the interval.

    Example:
        >>> found = mean_difference(np.array([1.0, 2.0, 3.0]))
        >>> [round(float(value), 4) for value in (found.mean, found.low, found.high, found.p)]
        [2.0, -0.4841, 4.4841, 0.0742]
    """
    seeds = differences.shape[-1]
    mean = np.asarray(differences.mean(-1))
    if seeds < 2:
        return Estimate(mean, *[np.full(mean.shape, np.nan)] * 5)
    std = np.asarray(differences.std(-1, ddof=1))
    # Without spread there is no t statistic: interval, p value and effect become NaN.
    known = np.ptp(differences, axis=-1) > NO_SPREAD * np.abs(differences).max(-1)
    error = np.where(known, std, np.nan) * math.sqrt(1 / seeds + overlap)
    half = special.stdtrit(seeds - 1, (1 + confidence) / 2) * error
    p = 2 * special.stdtr(seeds - 1, -np.abs(mean / error))
    effect = mean / np.where(known, std, np.nan)
    return Estimate(mean, std, *map(np.asarray, (mean - half, mean + half, p, effect)))


def correct_holm(p: Float[np.ndarray, "*studies pairs"]) -> Float[np.ndarray, "*studies pairs"]:
    """Return p values corrected for their number by Holm's step-down rule.

    When corrected values of at most 0.05 are called established, the probability of even one wrong
    claim is at most 0.05, however the pairs depend on each other. NaN, of a pair without a test,
    stays NaN and does not count.

    Example:
        >>> correct_holm(np.array([0.01, 0.04, 0.03])).round(3).tolist()
        [0.03, 0.06, 0.06]
    """
    order = np.argsort(p, axis=-1)  # NaN comes last
    ordered = np.take_along_axis(p, order, axis=-1)
    # The smallest p value is multiplied by the number of tests, the next by one less, and so on; a
    # corrected value is never below an earlier one. fmax, unlike maximum, ignores NaN.
    left = np.isfinite(p).sum(-1, keepdims=True) - np.arange(p.shape[-1])
    steps = np.minimum(np.fmax.accumulate(ordered * np.maximum(left, 1), axis=-1), 1.0)
    out = np.full(p.shape, np.nan)
    np.put_along_axis(out, order, np.where(np.isnan(ordered), np.nan, steps), axis=-1)
    return out


def power_of_t_test(
    effect: float, seeds: int, *, level: float = 1 - CONFIDENCE, overlap: float = 0.0
) -> float:
    """Return the power of the two-sided t test for a mean of `effect` standard deviations.

    The statistic then has the noncentral t distribution.

    Args:
        effect: the true mean difference in standard deviations over seeds.
        seeds: their number, 2 or more.
        level: of the test.
        overlap: as in `mean_difference`.

    Example:
        >>> round(power_of_t_test(0.5, 34), 3)  # 34 pairs for a medium effect, as tables have it
        0.808
    """
    from scipy import stats  # takes half a second, and most of what imports this needs t alone

    critical = stats.t.isf(level / 2, seeds - 1)
    shift = abs(effect) / math.sqrt(1 / seeds + overlap)
    if shift > critical + 30:  # certain, and beyond what the distribution's series can do
        return 1.0
    # The two tails of the rejection region. SciPy may return NaN for the far one, which is then 0.
    return float(
        stats.nct.sf(critical, seeds - 1, shift)
        + np.nan_to_num(stats.nct.cdf(-critical, seeds - 1, shift))
    )


def find_seeds_needed(
    effect: float, *, level: float = 1 - CONFIDENCE, overlap: float = 0.0
) -> int | None:
    """Return the smallest number of seeds that finds a difference of this size with 80 % power.

    An effect that was estimated from few seeds is itself rough, and so is the answer.

    Args:
        effect: the mean difference in standard deviations over seeds.
        level: of the test.
        overlap: as in `mean_difference`.

    Returns:
        2 or more; None when more than `MOST_SEEDS` would be needed.

    Example:
        >>> find_seeds_needed(0.5), find_seeds_needed(1.0), find_seeds_needed(0.01)
        (34, 10, None)
    """

    def is_enough(seeds: int) -> bool:
        return power_of_t_test(effect, seeds, level=level, overlap=overlap) >= POWER

    if not math.isfinite(effect):
        return None
    # the number that a normal statistic would need is a close first guess; t needs a few more
    normal = float(-special.ndtri(level / 2) - special.ndtri(1 - POWER))
    left = (effect / normal) ** 2 - overlap
    seeds = MOST_SEEDS
    if left * MOST_SEEDS > 1:
        seeds = min(max(2, round(1 / left)), MOST_SEEDS)
    # The power grows with the seeds: at most one of the two loops runs.
    while seeds > 2 and is_enough(seeds - 1):
        seeds -= 1
    while seeds <= MOST_SEEDS and not is_enough(seeds):
        seeds += 1
    return seeds if seeds <= MOST_SEEDS else None
