"""What the measurements share: random images, and the memory of a process."""

import ctypes
import sys
from pathlib import Path

import torch

from coterie.data.federation import Federation, TestSet


def images(clients: int, samples: int, side: int, channels: int) -> Federation:
    """Return random bytes as images for every client, a fifth of them for validation."""
    stream = torch.Generator().manual_seed(0)

    def bytes_(*shape: int) -> torch.Tensor:
        return torch.randint(256, (*shape, channels, side, side), generator=stream, dtype=torch.uint8)

    def labels(*shape: int) -> torch.Tensor:
        return torch.randint(10, shape, generator=stream)

    split = (torch.arange(samples) >= samples * 4 // 5).to(torch.int64).expand(clients, -1)
    ids = torch.arange(clients)
    test = TestSet(bytes_(32), labels(32), "all")
    return Federation(
        x=bytes_(clients, samples), y=labels(clients, samples), split=split, tests=(test,),
        test_of=torch.zeros_like(ids), ids=ids, population=clients, classes=10,
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

    That alone takes a quarter from the time of some plain PyTorch loops, so a fair comparison gives it to all sides.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in ((-3, 1 << 30), (-1, 1 << 30), (-2, 64 << 20)):  # M_MMAP_, M_TRIM_THRESHOLD, M_TOP_PAD
            mallopt(option, value)
