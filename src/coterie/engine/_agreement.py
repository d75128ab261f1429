"""Whether an engine that writes programs of its own computes what PyTorch's module does."""

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from coterie.engine._base import MODULE_ERRORS, Engine
from coterie.engine._loop import LoopEngine
from coterie.engine._work import RawSamples, TrainingWork
from coterie.engine.optim import LocalTraining
from coterie.models.layout import Layout

_ROUNDING = 8  # times the loop engine's own rounding that a program may differ from it
# Of the largest entry, in addition to that: far above what sums round, far below a wrong formula.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-9}
_SHORT = 5e-2  # the same, where mantissas are shorter


def agrees_with_module(
    engine: Engine, x: Float[Tensor, "samples *features"], y: Shaped[Tensor, "samples *targets"]
) -> bool:
    """Take one gradient step with an engine and with the loop engine, and compare the results.

    Rounding alone may move a result far: a batch normalization that sees few values magnifies it,
    and a gate that it opens or shuts changes a gradient at once. So the engine may differ by as
    much as the loop engine in double precision does, and it has to agree on one of three batches: a
    wrong one agrees on none.

    Args:
        engine: the engine.
        x: a small batch of prepared inputs.
        y: its targets.
    """
    # The whole batch, and its halves.
    half = len(x) // 2
    parts = (slice(None), slice(half), slice(half, None))
    return any(len(x[part]) and _agrees(engine, x[part], y[part]) for part in parts)


def _agrees(engine: Engine, x: Tensor, y: Tensor) -> bool:
    layout, precision = engine.layout, engine.precision
    row = layout.own_values()[None]
    ours = _step(engine, row, x, y)
    exact = theirs = _step(LoopEngine(layout, engine.objective, precision), row, x, y)
    if layout.dtype == torch.float32:
        exact = _step_exactly(engine, row, x, y)
    share = _TOLERANCE[layout.dtype] if precision == "full" else _SHORT

    def near(own: Tensor, other: Tensor, true: Tensor) -> bool:
        rounding = float((other - true).abs().max())
        limit = share * max(1.0, float(other.abs().max())) + _ROUNDING * rounding
        return bool(((own - other).abs() <= limit).all())

    return all(map(near, ours, theirs, exact))


def _step_exactly(engine: Engine, row: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return a step in double precision: how far rounding alone moves those in float32.

    A module that makes float32 tensors of its own, such as the first state of an LSTM cell, has
    none: there the weights are moved by a unit of the last place instead.
    """
    layout = engine.layout
    try:
        double = LoopEngine(Layout(layout.train_module, torch.float64), engine.objective)
        return _step(double, row.double(), x, y)
    except MODULE_ERRORS:
        moved = row.clone()
        moved[:, : layout.trainable] *= 1 + torch.finfo(row.dtype).eps
        return _step(LoopEngine(layout, engine.objective), moved, x, y)


def _step(engine: Engine, row: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of one step of an engine, and how far it moves a row."""
    layout, dtype = engine.layout, row.dtype
    keys = None
    if layout.draws[True]:
        keys = torch.ones(1, dtype=torch.int64, device=x.device)
    work = TrainingWork(
        RawSamples(x.to(dtype), y, dtype), torch.arange(len(x), device=x.device)[None, None],
        torch.tensor([[len(x)]]),
        LocalTraining(optimizer="sgd", lr=1.0), draw_keys=keys,
        inputs={name: value.to(dtype) for name, value in _unequal_inputs(layout).items()},
    )  # fmt: skip
    rows = row.clone()
    return engine.train(rows, work, 1), rows - row


def _unequal_inputs(layout: Layout) -> dict[str, Tensor]:
    """Return values of input buffers that differ in each entry: weights of endpoints."""
    values = {}
    for name, own in layout.zero_inputs(1).items():
        if own.is_floating_point():
            weights = torch.arange(1, own[0].numel() + 1, dtype=layout.dtype).reshape(own.shape)
            values[name] = (weights / weights.sum())[:, None]
    return values
