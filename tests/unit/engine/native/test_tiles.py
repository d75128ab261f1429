"""Tiles of work whose inputs are read from a disk: every sample once, in order, and no more than there is room for."""

import random
from itertools import pairwise

import numpy as np
import pytest
import torch

from coterie.data.rows import ClientRows, StoredRows
from coterie.engine._work import EvaluationPairs, RawSamples, TrainingWork
from coterie.engine.native import tiles
from coterie.engine.task import LocalTraining

WIDTH = 4  # numbers of a sample: 16 bytes


def numbers(count: int) -> np.ndarray:
    """The sample of place i has the entries 4 i to 4 i + 3."""
    return np.arange(count * WIDTH, dtype=np.float32).reshape(count, WIDTH)


def stored(count: int, **options) -> RawSamples:
    """Samples on a disk, whose places are another order than that of its rows."""
    table = StoredRows.open(numbers(count), torch.clone)
    index = torch.randperm(count, generator=torch.Generator().manual_seed(1))
    x = ClientRows(table, index, **options)
    return RawSamples(x, torch.zeros(count, dtype=torch.int64), torch.float32)


def training(samples: RawSamples, sizes: list[list[int]], width: int) -> TrainingWork:
    sizes = torch.tensor(sizes)
    stream = torch.Generator().manual_seed(2)
    places = torch.randint(0, len(samples), (*sizes.shape, width), generator=stream)
    return TrainingWork(samples, places, sizes, LocalTraining())


def make_room(monkeypatch: pytest.MonkeyPatch, samples: int, clients: int = 16) -> None:
    monkeypatch.setattr(tiles, "_TILE_BYTES", samples * 4 * WIDTH + 3)
    monkeypatch.setattr(tiles, "_MIN_CLIENTS", clients)


def check_training(work: TrainingWork, room: int) -> list[tuple[slice, slice]]:
    """Check that each batch is in one tile, with its inputs, after those of earlier steps of its client."""
    clients, steps, width = work.sample_indices.shape
    seen = torch.zeros(clients, steps, dtype=torch.int64)
    found = []
    for tile in tiles.iterate_training_tiles(work):
        assert not tile.is_all
        assert not seen[tile.owners, tile.part.start :].any(), "steps are in order"
        seen[tile.owners, tile.part] += 1
        places = work.sample_indices[tile.owners, tile.part]
        assert places.shape[0] * places.shape[1] * width <= max(room, width)
        inside = torch.arange(width) < work.batch_sizes[tile.owners, tile.part, None]
        own, where = places[inside], tile.where[tile.owners, tile.part][inside]
        rows = work.samples.x.index[own]
        assert torch.equal(tile.x[where], torch.from_numpy(numbers(len(work.samples)))[rows])
        assert len(tile.x) == len(rows.unique()), "each row is read once"
        found.append((tile.owners, tile.part))
    assert bool((seen == 1).all())
    return found


def test_whole_clients_are_one_tile_where_they_fit(monkeypatch):
    """Room for 40 samples: clients of 3 steps of 4 are 12 each, so 3 of them and the rest."""
    make_room(monkeypatch, 40, clients=2)
    work = training(stored(30), [[4, 4, 2]] * 5, 4)
    found = check_training(work, 40)
    assert found == [(slice(0, 3), slice(0, 3)), (slice(3, 6), slice(0, 3))]


def test_steps_are_divided_where_clients_do_not_fit(monkeypatch):
    """Room for 10 batches of 4: 5 clients at least, so 2 of their 7 steps a tile."""
    make_room(monkeypatch, 40, clients=5)
    found = check_training(training(stored(30), [[4, 3, 4, 4, 1, 4, 4]] * 6, 4), 40)
    parts = [slice(0, 2), slice(2, 4), slice(4, 6), slice(6, 7)]
    assert found == [(owners, part) for owners in (slice(0, 5), slice(5, 10)) for part in parts]


@pytest.mark.parametrize("room", [1, 4])
def test_a_tile_has_one_batch_at_least(monkeypatch, room):
    make_room(monkeypatch, room)
    found = check_training(training(stored(30), [[4, 2], [3, 0]], 4), room)
    ones = [slice(0, 1), slice(1, 2)]
    assert found == [(owner, step) for owner in ones for step in ones]


def test_any_work_is_divided_into_tiles_that_fit(monkeypatch):
    stream = random.Random(1)
    for _ in range(30):
        width, steps, clients = (stream.randint(1, 5) for _ in range(3))
        room = stream.randint(1, 60)
        make_room(monkeypatch, room, stream.randint(1, 4))
        sizes = [[stream.randint(0, width) for _ in range(steps)] for _ in range(clients)]
        sizes[0][0] = width
        check_training(training(stored(30), sizes, width), room)


def test_a_training_without_steps_has_no_tile(monkeypatch):
    make_room(monkeypatch, 40)
    work = TrainingWork(
        stored(3), torch.zeros(2, 0, 4, dtype=torch.int64), torch.zeros(2, 0, dtype=torch.int64), LocalTraining()
    )  # fmt: skip
    assert list(tiles.iterate_training_tiles(work)) == []


def test_samples_that_a_conversion_tells_apart_are_read_one_by_one(monkeypatch):
    """Two places have one row; one of them is doubled."""
    make_room(monkeypatch, 40)
    table = StoredRows.open(numbers(3), torch.clone)
    change = torch.tensor([-1, 0, -1])
    x = ClientRows(table, torch.tensor([1, 1, 2]), (lambda rows: rows * 2,), change)
    work = training(RawSamples(x, torch.zeros(3, dtype=torch.int64), torch.float32), [[3]], 3)
    work.sample_indices[:] = torch.tensor([0, 1, 2])
    (tile,) = tiles.iterate_training_tiles(work)
    expected = torch.from_numpy(numbers(3))[[1, 1, 2]] * torch.tensor([[1.0], [2.0], [1.0]])
    assert torch.equal(tile.x[tile.where[0, 0]], expected)


# ---------------------------------------------------------------- inputs in memory


def test_inputs_in_memory_are_one_tile_of_which_nothing_is_copied():
    x = torch.from_numpy(numbers(6))
    work = training(RawSamples(x, torch.zeros(6), torch.float32), [[2, 1]] * 3, 2)
    (tile,) = tiles.iterate_training_tiles(work)
    assert (tile.owners, tile.part, tile.where, tile.is_all) == (
        slice(0, 3),
        slice(0, 2),
        None,
        True,
    )
    assert tile.x is x
    pairs = measuring(work.samples, [2, 3])
    (tile,) = tiles.iterate_measuring_tiles(pairs, 4)
    assert (tile.owners, tile.part, tile.where, tile.is_all) == (
        slice(0, 2),
        slice(0, 3),
        None,
        True,
    )


def test_rows_of_a_table_in_memory_are_found_by_their_numbers():
    table = torch.from_numpy(numbers(6))
    x = ClientRows(table, torch.tensor([5, 3, -1, 0]))
    work = training(RawSamples(x, torch.zeros(4), torch.float32), [[2]], 2)
    work.sample_indices[:] = torch.tensor([3, 2])
    (tile,) = tiles.iterate_training_tiles(work)
    assert tile.x is table
    assert tile.is_all
    # Padding is read by nobody, and lies somewhere.
    assert tile.where.tolist() == [[[0, 0]]]
    work.sample_indices[:] = torch.tensor([0, 1])
    (tile,) = tiles.iterate_training_tiles(work)
    assert tile.where.tolist() == [[[5, 3]]]


# ---------------------------------------------------------------- measuring


def measuring(samples: RawSamples, sizes: list[int]) -> EvaluationPairs:
    stream = torch.Generator().manual_seed(3)
    places = torch.randint(0, len(samples), (len(sizes), max(sizes)), generator=stream)
    some = torch.arange(len(sizes))
    return EvaluationPairs(samples, places, torch.tensor(sizes), some, some)


def check_measuring(sizes: list[int], room: int, most: int) -> list[tuple[slice, slice]]:
    """Check that each sample is in one tile, and each tile fits and divides no call."""
    pairs = measuring(stored(30), sizes)
    width, found = max(sizes), []
    seen = torch.zeros(len(sizes), width, dtype=torch.int64)
    inside = torch.arange(width) < pairs.set_sizes[:, None]
    for tile in tiles.iterate_measuring_tiles(pairs, most):
        chosen = inside[tile.owners, tile.part]
        places = pairs.sample_indices[tile.owners, tile.part][chosen]
        rows = pairs.samples.x.index[places]
        where = tile.where[tile.owners, tile.part][chosen]
        assert torch.equal(tile.x[where], torch.from_numpy(numbers(30))[rows])
        seen[tile.owners, tile.part] += chosen
        assert len(places) <= max(room, most)
        assert tile.part.start % most == 0
        assert not tile.is_all
        found.append((tile.owners, tile.part))
    assert torch.equal(seen, inside.long())
    return found


def test_sets_are_measured_together_as_many_as_fit(monkeypatch):
    make_room(monkeypatch, 10)
    found = check_measuring([4, 6, 1, 9, 2, 8], 10, 4)
    whole = slice(0, 9)
    assert found == [
        (slice(0, 2), whole), (slice(2, 4), whole), (slice(4, 6), whole),
    ]  # fmt: skip


def test_a_set_that_does_not_fit_is_divided_between_calls(monkeypatch):
    """Room for 10: calls of 4 samples, two of them a tile; a set of exactly 10 stays whole."""
    make_room(monkeypatch, 10)
    found = check_measuring([3, 19, 10, 11], 10, 4)
    assert found == [
        (slice(0, 1), slice(0, 19)),
        (slice(1, 2), slice(0, 8)), (slice(1, 2), slice(8, 16)), (slice(1, 2), slice(16, 19)),
        (slice(2, 3), slice(0, 19)),
        (slice(3, 4), slice(0, 8)), (slice(3, 4), slice(8, 11)),
    ]  # fmt: skip


def test_any_sets_are_divided_into_tiles_that_fit(monkeypatch):
    stream = random.Random(2)
    for _ in range(40):
        sizes = [stream.randint(0, 20) for _ in range(stream.randint(1, 6))]
        sizes[stream.randrange(len(sizes))] = stream.randint(1, 20)
        room, most = stream.randint(1, 25), stream.randint(1, 6)
        make_room(monkeypatch, room)
        found = check_measuring(sizes, room, most)
        # Of two neighbors whose sets are whole, the first had no room for the next set.
        whole = [owners for owners, part in found if part == slice(0, max(sizes))]
        for first, second in pairwise(whole):
            if first.stop == second.start:
                assert sum(sizes[first]) + sizes[second.start] > room


# ---------------------------------------------------------------- bytes of a sample


@pytest.mark.parametrize(
    ("x", "dtype", "expected"),
    [
        (torch.zeros(2, 3, 4, 5, dtype=torch.uint8), torch.float64, 60),  # images stay bytes
        (torch.zeros(2, 6, dtype=torch.uint8), torch.float32, 24),
        (torch.zeros(2, 6, dtype=torch.float32), torch.float64, 48),
        (torch.zeros(2, 6, dtype=torch.int64), torch.float32, 48),
        (torch.zeros(2), torch.float32, 4),
        (torch.zeros(2, 0), torch.float32, 1),
    ],
)
def test_a_sample_takes_what_it_is_read_as_or_becomes(x, dtype, expected):
    assert tiles._row_bytes(RawSamples(x, torch.zeros(2), dtype)) == expected
