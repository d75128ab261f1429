"""The local training of a block of clients: step after step, all members at once."""

from collections.abc import Callable, Iterator, Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor

from coterie.engine.base import Engine
from coterie.engine.optim import LocalTraining, RowOptimizer

Batch = tuple[Tensor, Tensor, Mapping[str, Tensor]]
"""Inputs, targets and values of the input buffers of some members of a block."""

BatchOf = Callable[[Tensor, int, int], Batch]
"""(members of the block, step, batch size) -> their batches."""


def train_block(
    engine: Engine,
    rows: Float[Tensor, "clients params"],
    length: Int[Tensor, "clients steps"],
    local: LocalTraining,
    batch: BatchOf,
    near: tuple[Float[Tensor, "clients params"], float] | None = None,
) -> Float[Tensor, "clients steps"]:
    """Train a block of clients in place.

    Args:
        engine: takes the gradients.
        rows: the models, changed in place.
        length: size of each client's batch in each step; 0 for none.
        local: optimiser and its settings.
        batch: returns the batches.
        near: models to stay near, and the weight of the penalty.

    Returns:
        The loss of each step before its update; NaN where a client had no batch.
    """
    trainable = engine.layout.trainable
    optimizer = RowOptimizer(local, rows[:, :trainable])
    losses = torch.full(length.shape, torch.nan, dtype=rows.dtype)
    for step in range(length.shape[1]):
        for size, members in _groups(length[:, step]):
            whole = len(members) == len(rows)
            part, state = (rows, optimizer) if whole else (rows[members], optimizer.take(members))
            loss, grads, buffers = engine.gradients(part, *batch(members, step, size))
            if near is not None:
                grads = grads.add_(part[:, :trainable] - near[0][members, :trainable], alpha=near[1])
            state.step(part[:, :trainable], grads, step + 1)
            if engine.layout.size > trainable:
                part[:, trainable:] = buffers
            losses[members, step] = loss.to(losses)
            if not whole:
                rows[members] = part
                optimizer.put(members, state)
    return losses


def _groups(length: Int[Tensor, " clients"]) -> Iterator[tuple[int, Int[Tensor, " members"]]]:
    """Group the clients that have a batch by its size, so that no batch is padded."""
    for size in torch.unique(length).tolist():
        if size:
            yield size, (length == size).nonzero().flatten()
