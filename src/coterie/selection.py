"""Whom to read: choices of peers as pure functions of keyed random draws.

Every random choice over the population takes one Gumbel draw for each pair (client, member of the population), so
that relabelling the clients relabels the choice and hosting them elsewhere changes nothing.
"""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def top(
    scores: Float[Tensor, "clients population"], count: int, allowed: Bool[Tensor, "clients population"]
) -> Int[Tensor, "clients peers"]:
    """Return the ids with the `count` largest scores among those allowed; ties go to the lowest id.

    Args:
        scores: finite or infinite; NaN counts as the lowest.
        count: how many, clamped to what the population can offer (population - 1).
        allowed: whom each client may choose.

    Returns:
        Ids, best first; -1 where a client has too few to choose from.

    Example:
        >>> top(torch.tensor([[0.1, 0.9, 0.5]]), 2, torch.tensor([[False, True, True]]))
        tensor([[1, 2]])
    """
    count = max(0, min(count, scores.shape[1] - 1))
    lowest = torch.finfo(scores.dtype).min
    scores = torch.nan_to_num(scores, nan=lowest, neginf=lowest)
    scores = torch.where(allowed, scores, -torch.inf)
    chosen = torch.argsort(scores, dim=1, descending=True, stable=True)[:, :count]
    return torch.where(allowed.gather(1, chosen), chosen, -1)


def sample(
    log_weights: Float[Tensor, "clients population"],
    noise: Float[Tensor, "clients population"],
    count: int,
    allowed: Bool[Tensor, "clients population"],
) -> Int[Tensor, "clients peers"]:
    """Draw without replacement with probabilities proportional to exp(log_weights): Gumbel top-m.

    The law is that of successive draws with renormalisation; members of zero weight are drawn only when nothing else
    is left. See Kool et al., Stochastic beams and where to find them, 2019.

    Args:
        log_weights: log of the (unnormalised) probabilities.
        noise: one standard Gumbel draw for each pair, from `Rng.gumbel`.
        count: how many.
        allowed: whom each client may choose.
    """
    floor = torch.finfo(torch.float64).min / 2
    return top(log_weights.double().clamp(min=floor) + noise, count, allowed)


def uniform(
    noise: Float[Tensor, "clients population"], count: int, allowed: Bool[Tensor, "clients population"]
) -> Int[Tensor, "clients peers"]:
    """Draw uniformly without replacement among those allowed."""
    return top(noise, count, allowed)


def among(peers: Int[Tensor, "clients peers"], population: int) -> Bool[Tensor, "clients population"]:
    """Return which members of the population occur in each client's list of ids (-1 is nobody)."""
    out = torch.zeros(len(peers), population + 1, dtype=torch.bool)
    out.scatter_(1, torch.where(peers >= 0, peers, population), True)
    return out[:, :population]


def cohort_size(members: int, participation: float | int, least: int = 1) -> int:
    r"""Return how many of a group's members take part in a round.

    A share gives $\min(K, \max(\mathrm{least}, \lfloor \rho K + 1/2 \rfloor))$, a count $m$ gives $\min(K, m)$.

    Args:
        members: how many there are ($K$).
        participation: a share in (0, 1] ($\rho$), or a count above 1 ($m$).
        least: at least so many, when `participation` is a share.

    Example:
        >>> cohort_size(100, 0.1, least=3), cohort_size(25, 0.1, least=3), cohort_size(25, 10)
        (10, 3, 10)
    """
    if participation > 1:
        return min(members, int(participation))
    return min(members, max(least, math.floor(participation * members + 0.5)))


def cohort(
    noise: Float[Tensor, " population"],
    count: int,
    *,
    log_weights: Float[Tensor, " population"] | None = None,
    members: Bool[Tensor, " population"] | None = None,
) -> Int[Tensor, " active"]:
    """Draw clients without replacement by Gumbel top-m.

    Args:
        noise: one standard Gumbel draw for each client.
        count: how many; at most the members.
        log_weights: log of the (unnormalised) probabilities; uniform by default.
        members: who can be drawn; everybody by default.

    Returns:
        Ids in ascending order.
    """
    scores = noise if log_weights is None else noise + log_weights
    if members is not None:
        scores = torch.where(members, scores, -torch.inf)
    return torch.argsort(scores, descending=True, stable=True)[:count].sort().values
