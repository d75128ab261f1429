"""What the measurements share: random images, and the memory of a process."""

import ctypes
import sys
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from coterie.data.federation import Federation, TestSet


def images(
    clients: int,
    samples: int,
    side: int,
    channels: int,
    *,
    classes: int = 10,
    validation: int | None = None,
) -> Federation:
    """Return random bytes as images for every client.

    Args:
        clients: how many.
        samples: of each, those for validation included.
        side: height and width.
        channels: of an image.
        classes: of the random labels.
        validation: samples of each client for validation; a fifth when None.
    """
    training = samples * 4 // 5 if validation is None else samples - validation
    stream = torch.Generator().manual_seed(0)

    def bytes_(*shape: int) -> torch.Tensor:
        return torch.randint(
            256, (*shape, channels, side, side), generator=stream, dtype=torch.uint8
        )

    def labels(*shape: int) -> torch.Tensor:
        return torch.randint(classes, shape, generator=stream)

    split = (torch.arange(samples) >= training).to(torch.int64).expand(clients, -1)
    ids = torch.arange(clients)
    test = TestSet(bytes_(32), labels(32), "all")
    return Federation(
        x=bytes_(clients, samples), y=labels(clients, samples), split=split, tests=(test,),
        test_of=torch.zeros_like(ids), ids=ids, population=clients, classes=classes,
    )  # fmt: skip


def resident(process: int | str = "self", name: str = "VmRSS") -> int | None:
    """Return the memory of a process in bytes, now ("VmRSS") or at most so far ("VmHWM"); None when it is gone."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), None)


def keep_freed_memory() -> None:
    """Let the C library keep what tensors free, where it is glibc: it would return it, and fault it in in every step.

    That alone takes a quarter from the time of some plain PyTorch loops, so a fair comparison gives
    it to all sides.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        # M_MMAP_, M_TRIM_THRESHOLD, M_TOP_PAD
        for option, value in ((-3, 1 << 30), (-1, 1 << 30), (-2, 64 << 20)):
            mallopt(option, value)


def flops(module: nn.Module, x: Tensor, y: Tensor) -> int:
    """Return the floating-point operations of the products of one step, forward and backward, without the optimizer.

    Fused kernels of recurrent layers and of attention are taken apart, as PyTorch counts products
    alone. Nobody needs the gradient of the inputs, so the first layer costs a third less than three
    times its forward pass.

    Args:
        module: in training mode; its gradients change.
        x: a batch.
        y: its classes.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a setting for other devices that this one touches
        fused = torch.backends.mkldnn.flags(enabled=False)  # type: ignore[attr-defined]
        with fused, sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            functional.cross_entropy(module(x), y).backward()
    return counter.get_total_flops()
