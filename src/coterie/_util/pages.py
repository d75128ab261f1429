"""Large tensors on large memory pages, which are reused within a run.

Matrices of a whole population are created in every round. Linux allocates memory in pages of 4 KiB,
with a page fault at each first write, and a virtual machine may have to ask its host as well: for
gigabytes that takes seconds. Here such memory is allocated in large pages, and during a run
(`reuse_pages`) the memory of a freed tensor serves the next tensor of the same size. Where a system
has no such pages, tensors are PyTorch's own. No value depends on it.
"""

import ctypes
import math
import mmap
import sys
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock

import numpy as np
import torch
from jaxtyping import Int, Shaped
from torch import Tensor

# Bytes from which on large pages, of 2 MiB each, pay.
_LEAST = 1 << 22
# M_MMAP_THRESHOLD, M_TRIM_THRESHOLD and M_TOP_PAD of malloc.h, in bytes.
# Blocks below 64 MiB are cut from the heap, which grows by 64 MiB and shrinks only when 1 GiB at
# its end is free.
_MALLOPT = {-3: 1 << 26, -1: 1 << 30, -2: 1 << 26}


class _PageStore:
    """Free blocks of memory that are retained for reuse during a run."""

    def __init__(self) -> None:
        self.free: defaultdict[int, list[mmap.mmap]] = defaultdict(list)
        self.users, self.lock = 0, Lock()

    def take(self, size: int) -> mmap.mmap:
        """Return a block of a size in bytes, or up to twice as large; its content is arbitrary."""
        # Of rounds with other numbers of clients the sizes differ: without larger blocks, those of
        # every size would be retained.
        larger = sorted(found for found in list(self.free) if size < found <= 2 * size)
        for found in (size, *larger):
            # tensors die in any thread: pop is atomic, a check before it would not be
            try:
                return self.free[found].pop()
            except IndexError:
                pass
        try:
            return _map_block(size)
        except OSError:  # no memory is left: release the free blocks, and try once more
            self.free.clear()
            return _map_block(size)

    def give(self, size: int, block: mmap.mmap) -> None:
        """Retain the block of a freed tensor during a run; otherwise it is released."""
        if self.users:
            self.free[size].append(block)


_STORE = _PageStore()


def _map_block(size: int) -> mmap.mmap:
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Advice: where the system has no large page left, small ones serve.
    block.madvise(mmap.MADV_HUGEPAGE)
    return block


@contextmanager
def reuse_pages() -> Iterator[None]:
    """Reuse the memory of this module's freed tensors, and release it at the end of the block."""
    with _STORE.lock:
        _STORE.users += 1
    try:
        yield
    finally:
        with _STORE.lock:
            _STORE.users -= 1
            # Runs may overlap: the last one to end releases the memory.
            if not _STORE.users:
                _STORE.free.clear()


def empty(*shape: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Return an uninitialized tensor.

    Args:
        shape: its sizes.
        dtype: type of its entries.
        device: its device; only CPU memory has pages.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < _LEAST or torch.device(device).type != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(*shape, dtype=dtype, device=device)
    block = _STORE.take(size)
    array = np.frombuffer(block, dtype=np.uint8, count=size)
    # runs when the tensor's storage, which refers to the array, dies
    weakref.finalize(array, _STORE.give, len(block), block).atexit = False
    return torch.from_numpy(array).view(dtype).view(shape)


def copy(tensor: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
    """Return a contiguous copy."""
    return empty(*tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def take_rows(
    tensor: Shaped[Tensor, "rows *columns"], rows: Int[Tensor, " take"]
) -> Shaped[Tensor, "take *columns"]:
    """Return a copy of some rows."""
    if tensor.device.type != "cpu":
        return tensor[rows]
    out = empty(len(rows), *tensor.shape[1:], dtype=tensor.dtype)
    return torch.index_select(tensor, 0, rows, out=out)


@cache
def keep_small_blocks() -> None:
    """Let the C library retain the memory of freed tensors below 64 MiB, from now on.

    Without this it returns the activations of each training step to the system and takes fresh
    pages for the next step: thousands of page faults a step. Only glibc has such settings;
    elsewhere nothing happens.
    """
    if sys.platform != "linux":
        return
    adjust = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if adjust is not None:
        for parameter, value in _MALLOPT.items():
            adjust(parameter, value)
