"""The next batch is read from a disk while the engine computes with this one."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def read_ahead(items: Iterable[T]) -> Iterator[T]:
    """Return the items of an iterable, each of which a thread makes before it is asked for.

    Only that thread runs the iterable, so that a file which cannot be read by two threads at once
    is not.

    Args:
        items: their making waits for a disk.

    Example:
        >>> list(read_ahead(number * number for number in range(4)))
        [0, 1, 4, 9]
    """
    iterator, end = iter(items), object()
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(next, iterator, end)
        while (item := coming.result()) is not end:
            coming = thread.submit(next, iterator, end)
            yield item  # type: ignore[misc]
