"""Say which rows of a memory map are read next, so that the disk reads all of them at once.

A row that is not in memory is a page fault that waits for the disk by itself, and around which
Linux reads up to megabytes (`read_ahead_kb` of the disk) that nobody asked for. Asking takes
about a microsecond for each row, also of rows that are in memory.
"""

import mmap

import numpy as np
from jaxtyping import Int


def announce_rows(table: np.ndarray, rows: Int[np.ndarray, " rows"]) -> None:
    """Ask the system to read rows of a memory map; others are left alone, as where it cannot ask.

    Args:
        table: rows that lie one after another.
        rows: their numbers, in ascending order.
    """
    # Only a memory map of NumPy has `_mmap`; Windows has no `madvise`.
    mapped = getattr(table, "_mmap", None)
    if not isinstance(mapped, mmap.mmap) or not hasattr(mmap, "MADV_WILLNEED"):
        return
    if not len(rows) or not table.flags.c_contiguous:
        return
    size, page = table.strides[0], mmap.PAGESIZE
    # A table may begin anywhere in its file.
    begin = table.ctypes.data - np.frombuffer(mapped, np.uint8).ctypes.data
    # The first and the last page of each row, from the start of the file.
    first = (begin + rows * size) // page
    last = (begin + (rows + 1) * size - 1) // page
    # Rows whose pages follow each other are one request.
    starts = np.flatnonzero(np.r_[True, first[1:] > last[:-1] + 1])
    stops = np.r_[starts[1:], len(rows)] - 1
    for start, stop in zip(first[starts].tolist(), last[stops].tolist(), strict=True):
        end = min((stop + 1) * page, len(mapped))  # the last page may be a part of one
        mapped.madvise(mmap.MADV_WILLNEED, start * page, end - start * page)
