"""One step of an optimizer for all clients in one pass over parameters, gradients and moments."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from threading import RLock
from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from coterie.engine.kernels.rules import LAUNCH, move_tile

_BLOCK = 1024  # parameters of a program
_LAUNCHING = RLock()


@triton.jit
def _update(
    rows, grads, first, second, numbers, row_stride, grad_stride, first_stride, second_stride, size,
    pieces, rate, keep, shrink, decay, prox, momentum, share, kept, added, eps,
    EACH: tl.constexpr, ADAM: tl.constexpr, SHRINK: tl.constexpr, DECAY: tl.constexpr,
    PROX: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, NEAR: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    # A matrix may have more entries than 32 bits count.
    client = (tl.program_id(0) // pieces).to(tl.int64)
    column = (tl.program_id(0) % pieces) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    if EACH:
        rate = tl.load(numbers + client * 3)
        keep = tl.load(numbers + client * 3 + 1)
        shrink = tl.load(numbers + client * 3 + 2)
    g = tl.load(grads + client * grad_stride + column, mask=inside)
    move_tile(
        rows + client * row_stride, rows, first + client * first_stride,
        second + client * second_stride, column, inside, g, rate, keep, shrink, decay, prox,
        momentum, share, kept, added, eps, ADAM, SHRINK, DECAY, PROX, MOMENTUM, NESTEROV, NEAR,
    )  # fmt: skip


@dataclass(frozen=True)
class StepNumbers:
    """The numbers of one step of an optimizer, as kernels take them.

    Args:
        table: rate, keep and shrink of each client; None where all have the same.
        scalars: rate, keep, shrink, decay, prox, momentum, share, kept, added and eps; see
            `kernels.rules`.
        flags: which parts of the rules are compiled.
    """

    table: Float[Tensor, "clients 3"] | None
    scalars: tuple[float, ...]
    flags: dict[str, bool]

    @staticmethod
    def of(
        optimizer: str,
        arguments: Mapping[str, Any],
        rate: float | Float[Tensor, "clients 1"],
        count: int | Float[Tensor, "clients 1"],
        clients: int,
        device: torch.device,
        prox: float = 0.0,
    ) -> "StepNumbers":
        """Return the numbers of a step.

        Args:
            optimizer: "sgd", "adam" or "adamw".
            arguments: of the optimizer other than the rate.
            rate: the learning rate, or that of each client in float64.
            count: the number of the step, from 1, or that of each client in float64.
            clients: how many there are.
            device: where they are.
            prox: weight of the proximal term.
        """
        numbers = compute_step_numbers(optimizer, arguments, rate, count)
        table, given = None, numbers
        if any(isinstance(one, Tensor) for one in numbers):
            table = torch.empty(clients, 3, dtype=torch.float32, device=device)
            for column, value in enumerate(numbers):
                table[:, column] = value[:, 0] if isinstance(value, Tensor) else value
            given = (0.0, 0.0, 0.0)
        adam, decay = optimizer != "sgd", float(arguments["weight_decay"])
        momentum, beta1, beta2 = 0.0, 0.0, 0.0
        if adam:
            beta1, beta2 = arguments["betas"]
        else:
            momentum = arguments["momentum"]
        scalars = (
            *given, decay, prox, momentum, 1 - beta1, beta2, 1 - beta2, arguments.get("eps", 0.0),
        )  # fmt: skip
        flags = {
            "EACH": table is not None,
            "ADAM": adam,
            "SHRINK": decay > 0 and optimizer == "adamw",
            "DECAY": decay > 0 and optimizer != "adamw",
            "PROX": prox > 0,
            "MOMENTUM": momentum > 0,
            "NESTEROV": bool(arguments.get("nesterov")),
            "NEAR": 1 - beta1 < 0.5,
        }
        return StepNumbers(table, tuple(map(float, scalars)), flags)


@contextmanager
def launch_on(tensor: Tensor) -> Iterator[None]:
    """While active, launches go to the device of a tensor: Triton's go to the current one."""
    device = torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
    # Triton's interpreter changes its own language while it runs, for all threads.
    with _LAUNCHING, device:
        yield


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
    numbers = StepNumbers.of(optimizer, arguments, rate, count, clients, rows.device)
    table = rows if numbers.table is None else numbers.table
    first, second = [*moments, rows, rows][:2]  # the rows stand for what is not read
    pieces = triton.cdiv(size, _BLOCK)
    kernel: Any = _update[(clients * pieces,)]
    with launch_on(rows):
        kernel(
            rows, grads, first, second, table, rows.stride(0), grads.stride(0), first.stride(0),
            second.stride(0), size, pieces, *numbers.scalars, **numbers.flags,
            BLOCK=_BLOCK, **LAUNCH,
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
