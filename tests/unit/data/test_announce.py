"""Rows of a memory map that are read next: the system reads their pages, and only these."""

import ctypes
import mmap
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from coterie.data._announce import announce_rows

PAGE = mmap.PAGESIZE
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what is in memory")


def pages_in_memory(table: np.memmap) -> list[int]:
    """Return the pages of a map that are in memory, by mincore(2)."""
    mapped = np.frombuffer(table._mmap, np.uint8)  # type: ignore[attr-defined]
    found = np.zeros(-(-len(mapped) // PAGE), np.uint8)
    address, length = ctypes.c_void_p(mapped.ctypes.data), ctypes.c_size_t(len(mapped))
    failed = ctypes.CDLL(None, use_errno=True).mincore(
        address, length, ctypes.c_void_p(found.ctypes.data)
    )
    assert not failed, os.strerror(ctypes.get_errno())
    return np.flatnonzero(found & 1).tolist()


def forget(path: Path) -> None:
    """Ask the system to drop a file from memory."""
    file = os.open(path, os.O_RDWR)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def wait_for(holds: Callable[[], bool]) -> bool:
    """Wait for a disk, at most ten seconds."""
    end = time.monotonic() + 10
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    return holds()


def test_the_pages_of_announced_rows_are_read_and_few_others(tmp_path: Path) -> None:
    """Rows of half a page and a bit behind a header; by hand: row i lies in bytes 100 + 2500 i and 2,500 more."""
    size, count, header = 2500, 4000, 100
    path = tmp_path / "rows.bin"
    path.write_bytes(bytes(header) + os.urandom(size * count))
    table = np.memmap(path, np.uint8, "r", offset=header, shape=(count, size))[:]
    forget(path)
    if pages_in_memory(table):
        pytest.skip("this file system keeps files in memory")
    rows = np.array([0, 700, 701, 2000, 3999])
    announce_rows(table, rows)
    wanted = set()
    for row in rows.tolist():
        begin = header + size * row
        wanted |= set(range(begin // PAGE, (begin + size - 1) // PAGE + 1))
    assert wait_for(lambda: set(pages_in_memory(table)) >= wanted)
    # A file system may read in units of some pages; of all pages these are a few.
    assert len(pages_in_memory(table)) <= 4 * len(wanted)


def test_a_table_that_is_no_map_and_no_rows_are_left_alone(tmp_path: Path) -> None:
    announce_rows(np.zeros((3, 2)), np.array([1]))
    path = tmp_path / "rows.bin"
    path.write_bytes(bytes(24))
    announce_rows(np.memmap(path, np.uint8, "r", shape=(12, 2)), np.zeros(0, np.int64))
    columns = np.memmap(path, np.uint8, "r", shape=(12, 2), order="F")
    announce_rows(columns, np.array([1]))
    assert columns[1].tolist() == [0, 0]
