"""Large tensors whose memory costs little to get: on large pages, and used again within a run.

Matrices of a whole population are made anew in every round. Linux gives fresh memory in pages of 4 KiB, each of them a
fault when it is first written, and a virtual machine may have to ask its host as well: for gigabytes that takes
seconds. Here such memory is asked for in large pages, and while a run is on (`kept`) it is kept for the next tensor of
the same size when a tensor dies. Where a system has no such pages, tensors are PyTorch's own. No value depends on it.
"""

import math
import mmap
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor

_LEAST = 1 << 22  # bytes from which on it pays


class _Store:
    """Blocks of memory that no tensor uses, while somebody wants them kept."""

    def __init__(self) -> None:
        self.free: defaultdict[int, list[mmap.mmap]] = defaultdict(list)
        self.users, self.lock = 0, Lock()

    def take(self, size: int) -> mmap.mmap:
        """Return a block of so many bytes, whatever it holds."""
        try:
            return self.free[size].pop()
        except IndexError:
            pass
        try:
            return _fresh(size)
        except OSError:  # no memory is left: give back what waits, and try once more
            self.free.clear()
            return _fresh(size)

    def give(self, size: int, block: mmap.mmap) -> None:
        """Keep a block whose tensor died, or let it go."""
        if self.users:
            self.free[size].append(block)


_STORE = _Store()


def _fresh(size: int) -> mmap.mmap:
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.madvise(mmap.MADV_HUGEPAGE)
    return block


@contextmanager
def kept() -> Iterator[None]:
    """Keep the memory of dead tensors of this module for new ones, and let it go at the end."""
    with _STORE.lock:
        _STORE.users += 1
    try:
        yield
    finally:
        with _STORE.lock:
            _STORE.users -= 1
            if not _STORE.users:
                _STORE.free.clear()


def empty(*shape: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Return a tensor that nobody has written to yet.

    Args:
        shape: its sizes.
        dtype: of its entries.
        device: where it lies; only a CPU's memory has pages.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < _LEAST or torch.device(device).type != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(*shape, dtype=dtype, device=device)
    block = _STORE.take(size)
    array = np.frombuffer(block, dtype=np.uint8)
    weakref.finalize(array, _STORE.give, size, block).atexit = False  # when the tensor's storage dies
    return torch.from_numpy(array).view(dtype).view(shape)


def copy(tensor: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
    """Return a copy whose entries lie one after another, whatever the order of the original's."""
    return empty(*tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
