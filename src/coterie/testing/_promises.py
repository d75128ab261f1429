"""What the checks have in common."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie._util.importing import find_import_path, import_function
from coterie.errors import CoterieError


@contextmanager
def assert_accepted(guarantee: str) -> Iterator[None]:
    """Turn a refusal by the library into a broken guarantee."""
    try:
        yield
    except CoterieError as error:
        raise AssertionError(f"{guarantee}: {error}") from error


def import_again(function: str | Callable[..., Any], what: str) -> tuple[Callable[..., Any], str]:
    """Return a custom function and its import path, by which it must be found."""
    with assert_accepted(f"{what} is found by its import path"):
        if not isinstance(function, str):
            function = find_import_path(function, what)
        return import_function(function, f"{what} {function!r}"), function


def are_identical(a: Any, b: Any) -> bool:
    """Return whether two values are equal, tensors and arrays bit by bit and NaN like NaN."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return (
            a.dtype == b.dtype
            and a.shape == b.shape
            # Tolerances of 0: equal, and NaN equals NaN.
            and bool(torch.isclose(a, b, 0.0, 0.0, equal_nan=True).all())
        )
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(are_identical(a[key], b[key]) for key in a)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(are_identical, a, b))
    if dataclasses.is_dataclass(a) and type(a) is type(b):
        names = [f.name for f in dataclasses.fields(a)]
        return all(are_identical(getattr(a, name), getattr(b, name)) for name in names)
    return type(a) is type(b) and bool(a == b)


def check_pure_call(function: Callable[[Any], Any], given: Any) -> Any:
    """Call a rule twice on equal arguments; it leaves them as they are and returns the same."""
    before = copy.deepcopy(given)
    first = function(given)
    # Names the argument, where one comparison of the whole would only say that something changed.
    for item in dataclasses.fields(before):
        kept = are_identical(getattr(before, item.name), getattr(given, item.name))
        assert kept, f"the rule changed its argument {item.name}: copy what you change in place"
    # The copy from before the first call: equal arguments, even if the first call changed its own.
    second = function(before)
    assert are_identical(first, second), (
        "the rule gave two results for the same arguments: it draws random numbers or remembers "
        "something"
    )
    return first
