"""How received models are weighed: mixing weights as pure functions."""

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor


def fedavg(
    samples: Float[Tensor, "clients peers"], own: Float[Tensor, " clients"], mask: Bool[Tensor, "clients peers"]
) -> tuple[Float[Tensor, "clients peers"], Float[Tensor, " clients"]]:
    r"""Weigh by the number of training samples, the client itself included: $n_j / \sum_{k \in M_i \cup i} n_k$.

    Args:
        samples: $n_j$ of the peer in each slot.
        own: $n_i$.
        mask: which messages arrived; the others weigh nothing.

    Returns:
        Weights of the slots and of the own model; a row sums to 1.

    Example:
        >>> fedavg(torch.tensor([[1.0, 2.0]]), torch.tensor([1.0]), torch.tensor([[True, True]]))
        (tensor([[0.2500, 0.5000]]), tensor([0.2500]))
    """
    return normalise(torch.where(mask, samples, 0), own)


def normalise(
    weights: Shaped[Tensor, "clients peers"], own: Shaped[Tensor, " clients"]
) -> tuple[Shaped[Tensor, "clients peers"], Shaped[Tensor, " clients"]]:
    """Scale weights so that each row, own weight included, sums to 1; a row of zeros keeps the own model."""
    total = weights.sum(1) + own
    alone = total <= 0
    total = torch.where(alone, torch.ones_like(total), total)
    return weights / total[:, None], torch.where(alone, torch.ones_like(own), own / total)
