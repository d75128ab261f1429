"""Contract tests of shifts and partitions."""

import copy
import inspect
from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import torch

from coterie.data.build import DataConfig, build_from_sources
from coterie.data.plan import Client, Clients, Shift, apply_shift
from coterie.data.shifts import Partition, parse_shift, shift_to_table
from coterie.data.source import Source
from coterie.rng import Rng
from coterie.testing._promises import are_identical, assert_accepted, import_again
from coterie.testing.tiny import tiny_source

_EACH, _TRAIN, _VALIDATION = 20, 12, 4


def check_shift(shift: Shift, *, source: Source | None = None, num_clients: int = 6) -> None:
    """Check the guarantees that every shift must give.

    It is a frozen dataclass that a study file can name. It plans as many clients as it is given,
    the same ones for the same random streams, and changes no data. Its transforms keep shape and
    type, change no input in place, and treat each sample by itself.

    Args:
        shift: the shift.
        source: the dataset; tiny gray images by default.
        num_clients: clients of the plan.

    Raises:
        AssertionError: naming the broken guarantee.
    """
    source = source or tiny_source()
    cls = type(shift)
    frozen = getattr(cls, "__dataclass_params__").frozen  # noqa: B009
    assert frozen, "a shift is a frozen dataclass: its fields are the keys of its table"
    known = getattr(cls, "__dataclass_fields__")  # noqa: B009
    # Annotations of the class itself that are no fields: the decorator is missing on it.
    plain = [name for name in inspect.get_annotations(cls) if name not in known]
    assert not plain, f"{plain[0]} is no field: write @dataclass(frozen=True) above the class"
    with assert_accepted("a study file can name it"):
        table = shift_to_table(shift)
        again = parse_shift(table)
    assert again == shift, f"read from its own table {table} it is another shift"
    before = copy.deepcopy(source)
    # The second plan is of the shift that was read from its table: both must be the same.
    first = _plan_clients(shift, source, num_clients)
    second = _plan_clients(again, source, num_clients)
    kept = are_identical((before.train, before.test), (source.train, source.test))
    assert kept, "apply changed the dataset: copy what you change in place"
    assert first == second, (
        "apply gave two plans for the same random streams: draw from `client_stream` alone, and "
        "make transforms dataclasses, which compare by value"
    )
    x = source.train.x[:8]
    # Each transform once, in the order of the clients.
    transforms = chain.from_iterable(client.recipe.transforms for client in first)
    for transform in dict.fromkeys(transforms):
        kept = x.clone()
        out, twice = transform(x), transform(x)
        assert torch.equal(x, kept), f"the transform {transform!r} changes its input in place"
        assert torch.equal(out, twice), (
            f"the transform {transform!r} gave two results for the same inputs"
        )
        # A transform that looks at its whole batch differs for one sample at a time.
        alone = torch.cat([transform(x[row : row + 1]) for row in range(len(x))])
        assert torch.equal(out, alone), (
            f"the transform {transform!r} of a sample depends on the others of its batch"
        )
    with assert_accepted("a federation can be built with it"):
        data = DataConfig(
            source.name,
            num_clients=num_clients,
            train=_TRAIN,
            validation=_VALIDATION,
            shift=[shift],
            test="client",
        )
        federation = build_from_sources(data, (source,), Rng(0))
    assert bool((federation.count_samples("train") > 0).all()), "a client has no training samples"


def _plan_clients(shift: Shift, source: Source, num_clients: int) -> Clients:
    # Of a client's samples: for training, for validation, and for tests.
    shares = _TRAIN / _EACH, _VALIDATION / _EACH, 1 - (_TRAIN + _VALIDATION) / _EACH
    clients = (Client(_EACH, shares),) * num_clients

    def client_stream(client: int) -> np.random.Generator:
        return Rng(0).generator("testing.shift", client)

    with assert_accepted("apply returns the plan of the clients that it is given"):
        return apply_shift(shift, clients, (source,), client_stream)


def check_partition(
    function: str | Callable[..., Any], *, source: Source | None = None, num_clients: int = 6
) -> None:
    """Check the guarantees that every partition must give.

    It is found by its import path, gives every sample to one client or to none and every client a
    sample, for this number of clients and for two. It does the same for equal generators, and
    changes no data.

    Args:
        function: the function, or its import path.
        source: the dataset; tiny gray images by default.
        num_clients: how many clients there are.

    Raises:
        AssertionError: naming the broken guarantee.
    """
    source = source or tiny_source()
    _, path = import_again(function, "the partition")
    shift = Partition(path)
    for number in (num_clients, 2):
        before = copy.deepcopy(source.train)
        with assert_accepted("every client gets samples, every sample one client or none"):
            # Two generators in the same state.
            one, other = [Rng(0).generator("testing.partition") for _ in range(2)]
            first = shift.find_owners(source.train, number, one)
            second = shift.find_owners(source.train, number, other)
        assert are_identical(before, source.train), (
            "the partition changes the samples that it is given"
        )
        assert np.array_equal(first, second), (
            "the partition gave two results for equal generators: it draws from another one or "
            "remembers something"
        )
    check_shift(shift, source=source, num_clients=2)
