r"""Membership inference: attacks that guess whether a model was trained on a sample, and scores.

Values and memberships have a row for each of several runs, trained alike on different halves of the
same samples: runs $2k$ and $2k + 1$ are a pair, in which each sample is a member of exactly one.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from coterie.errors import require
from coterie.rng import Rng

_LEAST = 1e-7  # loss: a probability nearer to 1 is rounding


def logit_confidence(losses: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    r"""Return the logit of the probability $p = e^{-\ell}$ behind a cross-entropy, in float64.

    Over models it is close to normally distributed, which losses are not (Carlini et al. 2022). It
    falls as the loss rises, for any loss.

    Example:
        >>> logit_confidence(torch.tensor([0.6931472])).round(decimals=4).abs().tolist()
        [0.0]
    """
    # expm1 overflows above a loss of 709. A NaN counts as an infinite loss.
    value = losses.double().nan_to_num(nan=torch.inf).clamp(_LEAST, 500.0)
    # log(p / (1 - p)) = -log(e^l - 1), without the cancellation of 1 - p where p is near 1.
    return -torch.log(torch.expm1(value))


def likelihood_ratio(
    values: Float[Tensor, "runs samples"], member: Bool[Tensor, "runs samples"]
) -> Float[Tensor, "runs samples"]:
    r"""Return LiRA's score of each sample in each run: how much likelier its value is for a member.

    Two normal distributions of a sample's value, with and without it in the training data, are
    fitted to the runs outside the attacked run's pair; both kinds are equally many. Means are of
    the sample, variances of all samples together, as the paper advises for few models.

    N. Carlini et al., Membership inference attacks from first principles, 2022,
    https://arxiv.org/abs/2112.03570.

    Args:
        values: such as `logit_confidence`; an even number of runs, 6 at least.
        member: whether a sample is in a run's training data.
    """
    runs = len(values)
    # Of the four runs that six leave, each sample is a member in two: no variance needs fewer.
    require(runs >= 6 and runs % 2 == 0, "runs", runs, "an even number, 6 or more")
    scores = torch.empty_like(values)
    for run in range(runs):
        others = torch.ones(runs, dtype=torch.bool)
        # Both runs of the pair go, so that each sample is a member of half of the others.
        others[run // 2 * 2 : run // 2 * 2 + 2] = False
        inside, outside = member[others], ~member[others]
        fitted = [_fit_normal(values[others], inside), _fit_normal(values[others], outside)]
        (mean_in, spread_in), (mean_out, spread_out) = fitted
        away_in, away_out = (
            (values[run] - mean_in) / spread_in,
            (values[run] - mean_out) / spread_out,
        )
        # The log of the ratio of two normal densities.
        scores[run] = (away_out.square() - away_in.square()) / 2 + torch.log(spread_out / spread_in)
    return scores


def _fit_normal(
    values: Float[Tensor, "runs samples"], chosen: Bool[Tensor, "runs samples"]
) -> tuple[Float[Tensor, " samples"], Float[Tensor, ""]]:
    """Return the mean of each sample's chosen values, and their common standard deviation."""
    count = chosen.sum(0)
    mean = (values * chosen).sum(0) / count
    # Each sample's mean takes one degree of freedom from the pooled variance.
    away = ((values - mean) * chosen).square().sum() / (count - 1).sum()
    # Values that are all equal must not divide by 0.
    return mean, away.sqrt().clamp(min=1e-12)


def attack_auc(scores: Float[Tensor, " cases"], member: Bool[Tensor, " cases"]) -> float:
    """Return how often a member scores above a non-member, ties as one half: 0.5 for guessing.

    Example:
        >>> attack_auc(torch.tensor([3.0, 1.0, 2.0, 0.0]), torch.tensor([True, True, False, False]))
        0.75
    """
    _, place, count = scores.unique(return_inverse=True, return_counts=True)
    rank = (count.cumsum(0) - (count - 1) / 2)[place].double()  # from 1, ties share the mean
    # The rank sum of the members less its smallest possible value counts the pairs in which the
    # member is above (Mann-Whitney).
    inside, outside = int(member.sum()), int((~member).sum())
    return float((rank[member].sum() - inside * (inside + 1) / 2) / (inside * outside))


def true_positive_rate(
    scores: Float[Tensor, " cases"], member: Bool[Tensor, " cases"], false: float = 0.01
) -> float:
    """Return the true positive rate of an attack at a false positive rate of at most `false`.

    Example:
        >>> member = torch.tensor([True, True, False, False])
        >>> true_positive_rate(torch.tensor([3.0, 1.0, 2.0, 0.0]), member, 0.0)
        0.5
    """
    outside = scores[~member].sort(descending=True).values
    # At most int(false * n) non-members are strictly above this one.
    threshold = outside[min(len(outside) - 1, int(false * len(outside)))]
    return float((scores[member] > threshold).double().mean())


def draw_bootstrap(cases: int, times: int) -> Int[Tensor, "times cases"]:
    """Draw samples with replacement, for bootstrap intervals."""
    stream = Rng(0).generator("membership.bootstrap")
    return torch.from_numpy(stream.integers(cases, size=(times, cases)))
