"""One step of an optimizer for all clients in one pass over parameters, gradients and moments."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from coterie.engine.kernels.rules import LAUNCH, move_by_adam, move_by_sgd

_BLOCK = 1024  # parameters of a program


@triton.jit
def _update(
    rows, grads, first, second, numbers, row_stride, grad_stride, first_stride, second_stride, size,
    pieces, rate, keep, shrink, decay, momentum, share, kept, added, eps,
    ADAM: tl.constexpr, EACH: tl.constexpr, SHRINK: tl.constexpr, DECAY: tl.constexpr,
    MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, NEAR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # A matrix may have more entries than 32 bits count.
    client = (tl.program_id(0) // pieces).to(tl.int64)
    column = (tl.program_id(0) % pieces) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    if EACH:
        rate = tl.load(numbers + client * 3)
        keep = tl.load(numbers + client * 3 + 1)
        shrink = tl.load(numbers + client * 3 + 2)
    row = rows + client * row_stride + column
    w = tl.load(row, mask=inside)
    g = tl.load(grads + client * grad_stride + column, mask=inside)
    if SHRINK:
        w = w * shrink
    if DECAY:
        g = g + w * decay
    if ADAM:
        at = first + client * first_stride + column
        below = second + client * second_stride + column
        mean, square = tl.load(at, mask=inside), tl.load(below, mask=inside)
        w, mean, square = move_by_adam(  # type: ignore[misc]
            w, g, mean, square, rate, keep, share, kept, added, eps, NEAR
        )
        tl.store(at, mean, mask=inside)
        tl.store(below, square, mask=inside)
    else:
        velocity = g
        at = first + client * first_stride + column
        if MOMENTUM:
            velocity = tl.load(at, mask=inside)
        w, velocity = move_by_sgd(  # type: ignore[misc]
            w, g, velocity, rate, keep, momentum, MOMENTUM, NESTEROV
        )
        if MOMENTUM:
            tl.store(at, velocity, mask=inside)
    tl.store(row, w, mask=inside)


def update_rows(
    optimizer: str,
    arguments: Mapping[str, Any],
    rows: Float[Tensor, "clients trainable"],
    grads: Float[Tensor, "clients trainable"],
    moments: Sequence[Float[Tensor, "clients trainable"]],
    rate: float | Float[Tensor, "clients 1"],
    count: int | Float[Tensor, "clients 1"],
) -> None:
    """Take one step of an optimizer in place; `engine.optim.RowOptimizer.step` says how.

    Args:
        optimizer: "sgd", "adam" or "adamw".
        arguments: of the optimizer other than the rate.
        rows: float32 parameters whose columns lie side by side.
        grads: their gradients.
        moments: as `RowOptimizer` has them.
        rate: the learning rate, or that of each client in float64.
        count: the number of the step, from 1, or that of each client in float64.
    """
    clients, size = rows.shape
    if not clients or not size:
        return
    # Columns of a slice of rows lie side by side, and those of an expanded gradient may not.
    grads = grads.contiguous()
    numbers = compute_step_numbers(optimizer, arguments, rate, count)
    each = any(isinstance(one, Tensor) for one in numbers)
    table, scalars = rows, (0.0, 0.0, 0.0)
    if each:
        table = rows.new_empty(clients, 3)
        for column, value in enumerate(numbers):
            table[:, column] = value[:, 0] if isinstance(value, Tensor) else value
    else:
        scalars = numbers
    first, second = [*moments, rows, rows][:2]  # the rows stand for what is not read
    adam, decay = optimizer != "sgd", arguments["weight_decay"]
    momentum, beta1, beta2 = 0.0, 0.0, 0.0
    if adam:
        beta1, beta2 = arguments["betas"]
    else:
        momentum = arguments["momentum"]
    pieces = triton.cdiv(size, _BLOCK)
    # A launch goes to the current device.
    with torch.cuda.device(rows.device) if rows.is_cuda else nullcontext():
        _update[(clients * pieces,)](
            rows, grads, first, second, table, rows.stride(0), grads.stride(0), first.stride(0),
            second.stride(0), size, pieces, *scalars, decay, momentum, 1 - beta1, beta2, 1 - beta2,
            arguments.get("eps", 0.0), ADAM=adam, EACH=each,
            SHRINK=bool(decay) and optimizer == "adamw", DECAY=bool(decay) and optimizer != "adamw",
            MOMENTUM=momentum > 0, NESTEROV=bool(arguments.get("nesterov")), NEAR=1 - beta1 < 0.5,
            BLOCK=_BLOCK, **LAUNCH,  # type: ignore[arg-type]
        )  # fmt: skip


def compute_step_numbers(
    optimizer: str,
    arguments: Mapping[str, Any],
    rate: float | Float[Tensor, "clients 1"],
    count: int | Float[Tensor, "clients 1"],
) -> tuple[Any, Any, Any]:
    """Return the numbers that change from step to step, in double precision.

    Returns:
        Of "sgd": the rate, and 1 minus the dampening. Of "adam" and "adamw": the rate over
        1 - beta1^t, and the root of 1 - beta2^t. Third, the factor of decoupled weight decay.
    """
    if optimizer == "sgd":
        # The first gradient of all is not dampened.
        later = (count > 1).double() if isinstance(count, Tensor) else count > 1
        return rate, 1.0 - arguments["dampening"] * later, 1.0
    beta1, beta2 = arguments["betas"]
    shrink = 1 - rate * arguments["weight_decay"] if optimizer == "adamw" else 1.0
    return rate / (1 - beta1**count), (1 - beta2**count) ** 0.5, shrink
