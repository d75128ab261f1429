"""What a task holds of the hosted clients, and what it looks for in their models."""

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from coterie.data.federation import Federation
from coterie.engine._work import Samples


@dataclass(frozen=True)
class Positions:
    """Where the samples of one split lie in each client's row, padded with 0."""

    at: Int[Tensor, "clients samples"]
    count: Int[Tensor, " clients"]


@dataclass
class Shared:
    """What all views of a task have in common: the data, stored once, and what is computed once."""

    federation: Federation
    samples: Samples  # every sample of every client, one after another
    tests: tuple[Samples, ...]
    positions: dict[str, Positions]
    origins: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    scored: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)  # by split: models, losses; NaN: not yet
    train_seconds: float = 0.0


def positions(split: Int[Tensor, "clients samples"], wanted: int) -> Positions:
    """Find the samples of one split.

    Args:
        split: the split of each sample.
        wanted: its number.
    """
    chosen = split == wanted
    count = chosen.sum(1)
    order = torch.argsort((~chosen).to(torch.int8), dim=1, stable=True)[:, : max(1, int(count.max()))]
    inside = torch.arange(order.shape[1]) < count[:, None]
    return Positions(torch.where(inside, order, 0), count)


def going_on(moments: Float[Tensor, "clients moments trainable"], taken: Int[Tensor, " clients"]) -> dict[str, Tensor]:
    """Report what clients keep of their optimisers; who diverged starts afresh."""
    lost = not_finite(moments.flatten(1))
    moments[lost] = 0
    return {"moments": moments, "taken": taken.masked_fill(lost.cpu(), 0)}


def not_finite(rows: Float[Tensor, "clients params"]) -> Bool[Tensor, " clients"]:
    """Return which rows hold a NaN or an infinity; where a sum is finite, no entry needs a look of its own."""
    suspect = ~torch.isfinite(rows.sum(1))
    return suspect.index_put((suspect.nonzero().flatten(),), ~torch.isfinite(rows[suspect]).all(1))
