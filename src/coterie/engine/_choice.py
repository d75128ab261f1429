"""Which engine "auto" takes."""

import torch
from torch import Tensor, nn

from coterie.models.layout import Layout

_SECONDS = 2.0  # compiling takes two or three seconds, once for a machine and a model
_SAMPLE, _PRODUCT = 25e-6, 4.5e-10  # seconds of the vmap engine for a sample, and for a product in its forward pass

_BATCH = 2_000_000  # products of a client's batch above which a CPU is faster with one client after another


def products(layout: Layout, x: Tensor) -> int:
    """Return about how many products of two numbers the forward pass of one sample takes.

    Args:
        layout: of the module.
        x: a small batch of prepared inputs.

    Example:
        >>> products(Layout(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3))), torch.zeros(5, 1, 4, 4))
        96
    """
    found = 0

    def count(module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal found
        weight = module.weight
        assert isinstance(weight, Tensor)
        found += weight.numel() * (output[0].numel() // len(weight))

    known = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    hooks = [part.register_forward_hook(count) for part in layout.eval_module.modules() if isinstance(part, known)]
    try:
        with torch.no_grad():
            layout.eval_module(x.to(next(layout.eval_module.parameters()).device))
    finally:
        for hook in hooks:
            hook.remove()
    return found


def compiling_pays(layout: Layout, x: Tensor, expected: float | None) -> bool:
    """Return whether training is expected to take longer than compiling.

    The answer depends on the model and the amount of work alone, so that a run and its repetition agree.

    Args:
        layout: of the module.
        x: a small batch of prepared inputs.
        expected: how many samples will be trained on in all; None for a few.
    """
    if expected is None or x.device.type != "cpu":
        return False
    return expected * (_SAMPLE + _PRODUCT * products(layout, x)) > _SECONDS


def batching_pays(layout: Layout, x: Tensor, batch_size: int | None) -> bool:
    """Return whether a block of clients as one batched program is expected to be faster than one after another.

    Small products leave a CPU waiting for the interpreter, which many clients share in a batched program; large ones
    are faster alone. `benchmarks/auto.py` measures where the two meet.

    Args:
        layout: of the module.
        x: a small batch of prepared inputs.
        batch_size: samples of a client's step; None for unknown.
    """
    return x.device.type != "cpu" or batch_size is None or batch_size * products(layout, x) <= _BATCH
