r"""Adversarial bandits whose arms are groups of members: Tsallis-INF among groups that may be best.

Rewards are in [0, 1]. What a group earned bounds what a group that shares members with it can earn
(a correlated bandit): with $u$ of $M$ members in common at most $\min(r + q / u, 1)$. Groups whose
bound is below the best mean reward are not played.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, combinations

import numpy as np
from jaxtyping import Bool, Float, Int

from coterie.errors import ConfigError

MOST_GROUPS = 1 << 18
"""The largest number of arms, each of which is looked at in every round.

100 clients have 156,849 groups of 3.
"""
# Relative width of the interval in which the multiplier of Tsallis-INF is found.
_PRECISION = 1e-12


def check_groups(members: int, size: int) -> None:
    """Check that there are not too many groups of some members.

    Raises:
        ConfigError: with the number.
    """
    count = math.comb(members, size)
    if count > MOST_GROUPS:
        raise ConfigError(
            f"{members} other members make {count:,} groups of {size}; expected at most "
            f"{MOST_GROUPS:,}: choose a smaller group_size"
        )


@lru_cache(maxsize=4)
def list_groups(members: int, size: int) -> Int[np.ndarray, "groups size"]:
    """Return every group of some members, each once, in lexicographic order.

    Args:
        members: how many there are, numbered from 0.
        size: members of a group.

    Raises:
        ConfigError: when there are more than `MOST_GROUPS`.

    Example:
        >>> list_groups(3, 2).tolist()
        [[0, 1], [0, 2], [1, 2]]
    """
    check_groups(members, size)
    count = math.comb(members, size)
    flat = chain.from_iterable(combinations(range(members), size))
    found = np.fromiter(flat, dtype=np.int16, count=count * size).reshape(count, size)
    found.flags.writeable = False  # it is shared by all clients
    return found


def tsallis_weights(
    losses: Float[np.ndarray, " played"], others: int, plays: int
) -> tuple[Float[np.ndarray, " played"], float]:
    r"""Return the probabilities of Tsallis-INF with $\alpha = 1/2$: $w_k = t / (L_k - x)^2$.

    $x$ is below all losses, and such that the probabilities sum to 1 (Zimmert, Seldin, An optimal
    algorithm for stochastic and adversarial bandits, 2019, https://arxiv.org/abs/1807.07623).

    Args:
        losses: $L_k$, the sums of the estimated losses of arms that were played.
        others: number of arms that were not; their sums are 0.
        plays: $t$, plays so far, 1 or more.

    Returns:
        The probability of each played arm, and that of each other one.

    Example:
        >>> weights, rest = tsallis_weights(np.array([0.0, 0.0]), 2, 1)
        >>> [round(float(w), 6) for w in (*weights, rest)]
        [0.25, 0.25, 0.25]
    """
    arms = len(losses) + others
    # Arms that were not played have sums of 0.
    least = float(losses.min(initial=0.0) if others else losses.min())

    def weigh(x: float) -> tuple[np.ndarray, float]:
        return plays / (losses - x) ** 2, plays / x**2 if others else 0.0

    # At the low end all losses count as the least: the sum is at most 1. At the high end the best
    # arm alone has probability 1.
    low, high = least - math.sqrt(arms * plays), least - math.sqrt(plays)
    while high - low > _PRECISION * max(1.0, abs(low)):
        middle = (low + high) / 2
        weights, rest = weigh(middle)
        if float(weights.sum()) + others * rest < 1:
            low = middle
        else:
            high = middle
    weights, rest = weigh(low)
    total = float(weights.sum()) + others * rest
    return weights / total, rest / total


@dataclass(frozen=True)
class Plays:
    """What a client has played, and what it earned: one entry for each play.

    Args:
        groups: the members of the group, ascending.
        rewards: in [0, 1].
        chances: the probability with which the group was drawn.
        spreads: $q$ when it was played.
    """

    groups: Int[np.ndarray, "plays size"]
    rewards: Float[np.ndarray, " plays"]
    chances: Float[np.ndarray, " plays"]
    spreads: Float[np.ndarray, " plays"]

    def __len__(self) -> int:
        return len(self.rewards)


def bound_rewards(
    rewards: Float[np.ndarray, " plays"], spreads: Float[np.ndarray, " plays"], size: int
) -> Float[np.ndarray, " overlap"]:
    r"""Return the bounds that plays of one group put on groups with 0, 1, ... members in common.

    The mean over the plays of $\min(r + q / u, 1)$; 1 for none in common, and $r$ for all.

    Example:
        >>> bound_rewards(np.array([0.5]), np.array([0.2]), 3).round(6).tolist()
        [1.0, 0.7, 0.6, 0.5]
    """
    bounds = [1.0]
    for overlap in range(1, size):
        bounds.append(float(np.minimum(rewards + spreads / overlap, 1.0).mean()))
    return np.array([*bounds, float(rewards.mean())])


def find_competitive(
    groups: Int[np.ndarray, "groups size"],
    played: Int[np.ndarray, "played size"],
    means: Float[np.ndarray, " played"],
    bounds: Float[np.ndarray, "played overlap"],
    members: int,
) -> Bool[np.ndarray, " groups"]:
    """Return which groups no play has ruled out: their bounds are not below the best mean reward.

    Args:
        groups: all of them.
        played: the groups that were played, each once.
        means: their mean rewards.
        bounds: what each of them says of groups with 0, 1, ... members in common.
        members: how many there are.
    """
    best = means.max()
    # What is ruled out is not looked at again: of many groups that were played, few are left soon.
    left, columns = np.arange(len(groups)), groups.T
    for group, limits in zip(played, bounds, strict=True):
        below = np.flatnonzero(limits < best)
        if not len(below):
            continue
        inside = np.zeros(members, dtype=np.int8)
        inside[group] = 1
        # From so many members in common on, a group is ruled out: bounds fall with the overlap.
        ruled = sum(inside[column] for column in columns) >= below[0]
        if ruled.any():
            left, columns = left[~ruled], columns[:, ~ruled]
    competitive = np.zeros(len(groups), dtype=bool)
    competitive[left] = True
    return competitive


def draw_group(
    plays: Plays,
    members: int,
    size: int,
    allowed: Bool[np.ndarray, " members"],
    noise: Float[np.ndarray, "size members"],
) -> tuple[Sequence[int], float]:
    """Draw the next group: by Tsallis-INF, where no play has ruled it out.

    Args:
        plays: what was played before.
        members: how many there are, numbered from 0.
        size: members of a group.
        allowed: the members that can be in it.
        noise: standard Gumbel draws, a row for each member to draw.

    Returns:
        The group, ascending, and the probability with which it was drawn; no group, and 0, where
        fewer members than a group needs are allowed.
    """
    if int(allowed.sum()) < size:
        return [], 0.0
    groups = list_groups(members, size)
    free = np.ones(len(groups), dtype=bool)
    if not allowed.all():
        free = np.asarray(allowed[groups].all(1))
    weights = np.ones(len(groups))
    if len(plays):
        weights = _weigh_groups(plays, groups, members, free)
    weights = np.where(free, weights, 0.0)
    at = _draw_by_members(weights, groups, noise)
    return groups[at].tolist(), float(weights[at] / weights.sum())


def _draw_by_members(
    weights: Float[np.ndarray, " groups"],
    groups: Int[np.ndarray, "groups size"],
    noise: Float[np.ndarray, "size members"],
) -> int:
    """Draw a group by its weight, member by member: no draw depends on the members' numbers.

    A member is drawn by the weight of all groups with it and all drawn before. That is the same as
    drawing a group, and naming its members in random order.
    """
    left, drawn = weights.copy(), list[int]()
    for draws in noise:
        each = np.zeros(len(draws))
        for column in groups.T:
            each += np.bincount(column, weights=left, minlength=len(draws))
        each[drawn] = 0
        with np.errstate(divide="ignore"):
            # The largest of log-weights with Gumbel draws is a draw by the weights.
            scores = np.where(each > 0, np.log(each) + draws, -np.inf)
        drawn.append(int(scores.argmax()))
        left = np.where((groups == drawn[-1]).any(1), left, 0.0)
    return int(left.argmax())


def _weigh_groups(
    plays: Plays,
    groups: Int[np.ndarray, "groups size"],
    members: int,
    free: Bool[np.ndarray, " groups"],
) -> Float[np.ndarray, " groups"]:
    """Return the weight of each group in the next draw; 0 of groups that are ruled out."""
    played, at = np.unique(plays.groups, axis=0, return_inverse=True)
    at = at.reshape(-1)
    number = len(played)
    means, bounds, losses = np.zeros(number), [], np.zeros(number)
    for arm in range(number):
        mine = at == arm
        means[arm] = plays.rewards[mine].mean()
        bounds.append(bound_rewards(plays.rewards[mine], plays.spreads[mine], groups.shape[1]))
        # Estimates without bias: what was seen rarely counts for more.
        losses[arm] = ((1 - plays.rewards[mine]) / plays.chances[mine]).sum()
    played_weights, rest = tsallis_weights(losses, len(groups) - number, len(plays))
    weights = np.full(len(groups), rest)
    places = _find_places(groups, played, members)
    weights[places] = played_weights
    competitive = find_competitive(groups, played, means, np.array(bounds), members)
    # The group that has earned most is always among them.
    competitive[places[int(means.argmax())]] = True
    if not bool((competitive & free).any()):
        return weights
    return np.where(competitive, weights, 0.0)


def _find_places(
    groups: Int[np.ndarray, "groups size"], played: Int[np.ndarray, "played size"], members: int
) -> Int[np.ndarray, " played"]:
    """Return the places of some groups in the list of all: both are in lexicographic order."""
    powers = members ** np.arange(groups.shape[1] - 1, -1, -1, dtype=np.int64)
    return np.searchsorted(groups.astype(np.int64) @ powers, played.astype(np.int64) @ powers)
