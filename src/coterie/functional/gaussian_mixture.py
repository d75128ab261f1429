"""A two-component Gaussian mixture over each client's scores: which peers are neighbors (PANM)."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from coterie.functional import selection

# EM ends after so many steps; a client whose shares still move keeps the last ones.
_ITERATIONS = 100
_SETTLED = 1e-9  # soft EM ends when no responsibility moves by more

Em = Literal["hard", "soft"]
Component = Literal["larger", "first"]


@dataclass(frozen=True)
class MixtureOptions:
    """How the mixture is fitted, and which component counts as the neighbors.

    Args:
        em: "hard": every score belongs to one component in each step; "soft": it belongs to both,
            in proportion, until the end.
        component: which component holds the neighbors: the one with the "larger" mean, or the
            "first" one.
        monotone: count every score at or above that component's mean too.
    """

    em: Em = "hard"
    component: Component = "larger"
    monotone: bool = False


def find_neighbors(
    scores: Float[Tensor, "clients peers"],
    first: Bool[Tensor, "clients peers"],
    mask: Bool[Tensor, "clients peers"],
    how: MixtureOptions,
) -> tuple[Bool[Tensor, "clients peers"], Bool[Tensor, " clients"]]:
    r"""Split each client's scores into neighbors and others by EM over two Gaussians.

    Component 0 starts with the presumed neighbors, component 1 with the others. Each has a weight
    $\beta_r = n_r / |M|$, a mean and a population standard deviation, the latter at least 0.01 of
    that of all scores and 1e-8, so that the split does not depend on the scores' scale or offset.

    Args:
        scores: similarities; larger is more similar.
        first: slots that start in component 0 (PANM: those from the bag, $S$); the others are
            candidates ($C$).
        mask: which slots arrived; the others are ignored.
        how: the options.

    Returns:
        Which slots are neighbors, and for which clients the split is usable: not where one
        component was empty at the start, or component 0 became empty.

    References:
        Li, Wu, Towards effective clustered federated learning, 2022,
        https://arxiv.org/abs/2203.12285
    """
    # A slot that did not arrive is 0 with share 0 in both components.
    scores = torch.where(mask, scores.double(), 0)
    number = mask.sum(1).clamp(min=1)
    # A component of one score would have deviation 0 and a density without bound.
    floor = (0.01 * _mean_and_deviation(scores, mask.double(), number)[1]).clamp(min=1e-8)
    share = (first & mask).double()
    # A component without a score has no mean to start from.
    start = (share.sum(1) > 0) & ((mask.double() - share).sum(1) > 0)
    running = start.clone()
    for _ in range(_ITERATIONS):
        new = torch.where(mask, _em_step(scores, share, mask, number, floor, how.em), 0)
        # A client stops by itself, when it is settled or one component is empty: the number of
        # steps never depends on who is hosted with it.
        moved = ((new - share).abs() > _SETTLED).any(1)
        share = torch.where(running[:, None], new, share)
        running = running & moved & (share.sum(1) > 0) & ((mask.double() - share).sum(1) > 0)
        if not bool(running.any()):
            break
    inside = share > 0.5
    usable = start & inside.any(1)
    zero, one = inside.double(), (mask & ~inside).double()
    mean_zero, _ = _mean_and_deviation(scores, zero, zero.sum(1).clamp(min=1))
    mean_one, _ = _mean_and_deviation(scores, one, one.sum(1).clamp(min=1))
    # EM may move component 0, which starts with the presumed neighbors, below the other.
    switch = (one.sum(1) > 0) & (mean_one > mean_zero) & torch.tensor(how.component == "larger")
    chosen = torch.where(switch[:, None], mask & ~inside, inside)
    # The wider component wins both tails, so a large score may fall to the one with the lower mean.
    if how.monotone:
        chosen = chosen | (mask & (scores >= torch.where(switch, mean_one, mean_zero)[:, None]))
    return chosen & usable[:, None], usable


def correct_bags(
    bag: Bool[Tensor, "clients population"],
    slots: Int[Tensor, "clients peers"],
    scores: Float[Tensor, "clients peers"],
    first: Bool[Tensor, "clients peers"],
    mask: Bool[Tensor, "clients peers"],
    how: MixtureOptions,
) -> Bool[Tensor, "clients population"]:
    r"""Correct each client's bag of neighbors: $B \leftarrow H \cup (B \setminus S)$.

    Args:
        bag: $B$; it never becomes empty.
        slots: ids of the scored peers.
        scores: their similarities.
        first: which of them are from the bag ($S$).
        mask: which of them arrived; a member of the bag that did not arrive stays in it.
        how: the options of the split that finds $H$.
    """
    neighbor, usable = find_neighbors(scores, first, mask, how)
    # The members of the bag whose scores were examined ($S$), and the neighbors ($H$).
    examined = selection.mask_from_ids(torch.where(first & mask, slots, -1), bag.shape[1])
    found = selection.mask_from_ids(torch.where(neighbor, slots, -1), bag.shape[1])
    return torch.where(usable[:, None], found | (bag & ~examined), bag)


def _mean_and_deviation(scores: Tensor, share: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and population standard deviation of each row.

    Scores are weighted by `share`, whose row sums are `number`.
    """
    mean = (share * scores).sum(1) / number
    variance = (share * (scores - mean[:, None]).square()).sum(1) / number
    return mean, variance.sqrt()


def _em_step(
    scores: Tensor, share: Tensor, mask: Tensor, number: Tensor, floor: Tensor, em: Em
) -> Tensor:
    """Return each score's share in component 0 after one step of EM from the previous shares."""
    # log(beta_0 N_0 / (beta_1 N_1)): what both densities have in common cancels.
    log_odds = torch.zeros_like(scores)
    for part, sign in ((share, 1), (mask.double() - share, -1)):
        size = part.sum(1)
        # An empty component has mean 0 / tiny = 0 in place of 0 / 0.
        mean, deviation = _mean_and_deviation(
            scores, part, size.clamp(min=torch.finfo(torch.float64).tiny)
        )
        deviation = torch.maximum(deviation, floor)
        likelihood = (
            -0.5 * ((scores - mean[:, None]) / deviation[:, None]).square()
            - deviation.log()[:, None]
        )
        log_odds = log_odds + sign * ((size / number).log()[:, None] + likelihood)
    if em == "hard":
        return (log_odds > 0).double()
    return torch.sigmoid(log_odds)
