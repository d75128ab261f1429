"""Inputs for native programs from rows of a table: a part of the work at a time, read beforehand.

A program takes inputs by their address. Where they are rows of a table in memory, it takes the
place of each too. Those on a disk are read in tiles: the batches of some clients in some steps, or
some sets of samples, as many as `_TILE_BYTES` hold, while the program computes with the tile
before.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from coterie.data.rows import ClientRows, read_inputs
from coterie.engine._read_ahead import read_ahead
from coterie.engine._work import EvaluationPairs, RawSamples, TrainingWork

_TILE_BYTES = 32 << 20  # two tiles and what is read for them are in memory at once
_MIN_CLIENTS = 16  # clients of a tile where there are so many, for as many threads


@dataclass(frozen=True, eq=False)
class Tile:
    """A part of the work, with its inputs.

    Args:
        owners: the clients, or the sets.
        part: their steps, or their samples.
        x: the inputs, as stored.
        where: where the input of each place of all the work lies in `x`; valid for this part.
            None where it lies at the place itself.
        is_all: whether these are all inputs of the samples, which are in memory.
    """

    owners: slice
    part: slice
    x: Shaped[Tensor, "samples *features"]
    where: Int[Tensor, "..."] | None
    is_all: bool = False


def iterate_training_tiles(work: TrainingWork) -> Iterator[Tile]:
    """Return the tiles of a training: of some clients, step after step."""
    everything = slice(0, len(work.batch_sizes)), slice(0, work.num_steps)
    found = _find_in_memory(work.samples, work.sample_indices, *everything)
    if found is not None:
        yield found
        return
    width = work.sample_indices.shape[2]
    room = max(1, _TILE_BYTES // max(1, _row_bytes(work.samples) * width))
    # Whole clients where they fit, and parts of the training of a few where they do not.
    clients = max(min(_MIN_CLIENTS, room), room // max(1, work.num_steps))
    steps = max(1, room // clients)
    parts = []
    for start in range(0, len(work.batch_sizes), clients):
        for first in range(0, work.num_steps, steps):
            part = slice(first, min(first + steps, work.num_steps))
            parts.append((slice(start, start + clients), part))
    inside = torch.arange(width) < work.batch_sizes[:, :, None]
    yield from _read_tiles(work.samples, work.sample_indices, inside, parts)


def iterate_measuring_tiles(pairs: EvaluationPairs, most: int) -> Iterator[Tile]:
    """Return the tiles of a measurement: of some sets, samples after samples.

    Args:
        pairs: models and sets.
        most: samples of one call of a program, which tiles do not divide.
    """
    sets, width = pairs.sample_indices.shape
    everything = slice(0, sets), slice(0, width)
    found = _find_in_memory(pairs.samples, pairs.sample_indices, *everything)
    if found is not None:
        yield found
        return
    room = max(1, _TILE_BYTES // _row_bytes(pairs.samples))
    parts: list[tuple[slice, slice]] = []
    start, held = 0, 0
    for number, size in enumerate([*pairs.set_sizes.tolist(), room]):
        # The sets before this one are full, or there is no further one.
        if number > start and (held + size > room or number == sets):
            parts.append((slice(start, number), slice(0, width)))
            start, held = number, 0
        if number < sets and size > room:
            each = max(1, room // most) * most
            one = slice(number, number + 1)
            for first in range(0, size, each):
                parts.append((one, slice(first, min(first + each, size))))
            start = number + 1
        else:
            held += size
    inside = torch.arange(width) < pairs.set_sizes[:, None]
    yield from _read_tiles(pairs.samples, pairs.sample_indices, inside, parts)


def _find_in_memory(samples: RawSamples, places: Tensor, owners: slice, part: slice) -> Tile | None:
    """Return all of the work where inputs are in memory, as they are needed; else None."""
    if not isinstance(samples.x, ClientRows):
        return Tile(owners, part, samples.x, None, is_all=True)
    table = samples.x.table
    if not isinstance(table, Tensor) or samples.x.change_of is not None:
        return None
    where = samples.x.index[places].clamp(min=0)
    return Tile(owners, part, table, where, is_all=True)


def _row_bytes(samples: RawSamples) -> int:
    # Inputs that are no images become numbers of the models' type.
    item = 1 if samples.is_images else max(samples.dtype.itemsize, samples.x.dtype.itemsize)
    return max(1, math.prod(samples.input_shape) * item)


def _read_tiles(
    samples: RawSamples, places: Tensor, inside: Tensor, parts: list[tuple[slice, slice]]
) -> Iterator[Tile]:
    where = torch.zeros_like(places)

    def read(owners: slice, part: slice) -> Tile:
        used = inside[owners, part]
        own = places[owners, part][used]
        # Each sample once, though a client may see it in several epochs; in the order of the disk
        # where a row has one form only.
        if isinstance(samples.x, ClientRows) and samples.x.change_of is None:
            chosen, lies = torch.unique(samples.x.index[own], return_inverse=True)
            x = samples.x.table[chosen]
        else:
            chosen, lies = torch.unique(own, return_inverse=True)
            x = read_inputs(samples.x[chosen])
        # Each tile writes a part of `where` that no other one has.
        where[owners, part] = where[owners, part].masked_scatter(used, lies)
        return Tile(owners, part, x, where)

    yield from read_ahead(read(*one) for one in parts)
