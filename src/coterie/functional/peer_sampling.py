r"""Peer sampling: which few members of a large population a client can draw in a round.

A client's view are its neighbors on a few rings. A ring is a keyed pseudorandom order of the whole
population, closed to a circle; it follows from the seed of the run and its own number. So a client
computes its view alone, in time and memory of the view's size, and every process finds the same. In
each round the oldest rings of the views end and new ones begin. See decision 044.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int, UInt64
from numpy.typing import NDArray
from torch import Tensor

from coterie._util.settings import Configurable, NonNegativeInt, PositiveInt
from coterie.errors import require
from coterie.rng import Rng

# Of the Feistel network. Four make a permutation that looks random to who does not know the keys;
# small populations have few bits a round, so there are twice as many.
_ROUNDS = 8
# Entries of the tables in which neighbors are looked for, so that they stay in the cache.
_LOOKED_AT = 1 << 16


@dataclass(frozen=True)
class PeerSampling(Configurable):
    """How large the views of clients are, and how fast they change.

    Args:
        view: members in a client's view, its two neighbors on each of view / 2 rings; an even
            number.
        shuffle: how many of them are replaced in each round, the oldest first; an even number, at
            most `view`. With 0 views stay.
    """

    view: PositiveInt = 30
    shuffle: NonNegativeInt = 8

    def check(self) -> None:
        """Each ring gives two neighbors."""
        require(self.view % 2 == 0, "view", self.view, "an even number: two on each ring")
        fits = self.shuffle % 2 == 0 and self.shuffle <= self.view
        require(fits, "shuffle", self.shuffle, f"an even number, at most view ({self.view})")

    def list_rings(self, round: int) -> range:
        """Return the numbers of the rings of a round, the oldest first.

        Args:
            round: from -1 on.

        Example:
            >>> PeerSampling(view=6, shuffle=2).list_rings(10)
            range(11, 14)
        """
        first = (round + 1) * self.shuffle // 2
        return range(first, first + self.view // 2)

    def draw_views(
        self, rng: Rng, ids: Int[Tensor, " clients"], reachable: Bool[Tensor, "*clients population"]
    ) -> Int[Tensor, "clients view"]:
        """Return the members in each client's view, each once; -1 in empty slots.

        On each ring a client has the next member on either side that it can reach, so that one who
        has left is replaced by the next.

        Args:
            rng: the random streams of the round.
            ids: the clients.
            reachable: which members of the population can be read; with a clients axis where that
                differs.
        """
        population, mask, own = reachable.shape[-1], reachable.numpy(), ids.numpy()
        number = np.broadcast_to(mask.sum(-1), own.shape)
        number = number - (mask[own] if mask.ndim == 1 else mask[np.arange(len(own)), own])
        views, rows = np.full((len(own), self.view), -1), np.flatnonzero(number)
        rings = Rings.make(rng, self.list_rings(rng.round), population)
        if len(rows):
            views[rows] = _find_neighbors(rings, rows, own[rows], mask)
        return torch.from_numpy(views)


@dataclass(frozen=True)
class Rings:
    """Pseudorandom orders of a population: the place of each member, and the member at each place.

    Each is a Feistel network over two digits of bases near the root of the population, whose
    results outside of the population are put in again (Black, Rogaway, Ciphers with arbitrary
    finite domains, 2002).

    Args:
        keys: of each ring, one for each round of the network.
        population: number of members.
    """

    keys: UInt64[np.ndarray, "rings rounds"]
    population: int

    @staticmethod
    def make(rng: Rng, numbers: range, population: int) -> "Rings":
        """Return the rings of some numbers, 0 or larger."""
        keys = np.empty((len(numbers), _ROUNDS), dtype=np.uint64)
        for row, number in enumerate(numbers):
            # Keyed by the number of the ring in place of that of the round: rings outlast rounds.
            stream = rng.at_round(number).generator("rings")
            keys[row] = stream.integers(1 << 64, size=_ROUNDS, dtype=np.uint64)
        return Rings(keys, population)

    def locate(self, members: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the places of members, [..., rings], or [..., 1] for the same member on all."""
        return self._map_digits(members, forth=True)

    def members_at(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the members at places, [..., rings]."""
        return self._map_digits(places, forth=False)

    def _map_digits(self, values: NDArray[np.int64], forth: bool) -> NDArray[np.int64]:
        shape = np.broadcast_shapes(values.shape, (len(self.keys),))
        found = np.ascontiguousarray(np.broadcast_to(values, shape)).astype(np.uint64)
        ring = np.broadcast_to(np.arange(len(self.keys)), shape)
        left = np.ones(shape, dtype=bool)
        while left.any():
            found[left] = self._map_once(found[left], ring[left], forth)
            left = found >= self.population
        return found.astype(np.int64)

    def _map_once(
        self, values: UInt64[np.ndarray, " n"], ring: Int[np.ndarray, " n"], forth: bool
    ) -> UInt64[np.ndarray, " n"]:
        base = np.uint64(math.isqrt(self.population - 1) + 1)
        bases = (base, (np.uint64(self.population) + base - np.uint64(1)) // base)
        digits = [values % base, values // base]
        for number in range(_ROUNDS) if forth else reversed(range(_ROUNDS)):
            side = number % 2
            shift = _mix_bits(digits[1 - side] + self.keys[ring, number]) % bases[side]
            # Backwards the same is subtracted.
            digits[side] = (digits[side] + (shift if forth else bases[side] - shift)) % bases[side]
        return digits[0] + digits[1] * base


def _mix_bits(words: UInt64[np.ndarray, " n"]) -> UInt64[np.ndarray, " n"]:
    """Return words that depend on all bits of the given ones (the finalizer of SplitMix64)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        words = (words ^ (words >> np.uint64(shift))) * np.uint64(factor)
    return words ^ (words >> np.uint64(31))


def _find_neighbors(
    rings: Rings,
    rows: Int[np.ndarray, " clients"],
    own: Int[np.ndarray, " clients"],
    mask: Bool[np.ndarray, "*all population"],
) -> Int[np.ndarray, "clients slots"]:
    """Return each client's next reachable members on both sides of each ring; a second one is -1.

    Args:
        rings: the rings.
        rows: of the clients in `mask`, where that has a row for each.
        own: their ids; each reaches at least one other member.
        mask: the members that can be reached.
    """
    number = len(rings.keys)
    at = rings.locate(own[:, None])
    found = np.empty((len(own), number, 2), dtype=np.int64)
    for side, step in enumerate((1, -1)):
        # All are one step away where everybody can be reached; who is not found is looked for in
        # twice as many steps the next time.
        clients, which = map(np.ravel, np.indices((len(own), number)))
        done, steps = 0, 1
        while len(clients):
            left = []
            for part in np.array_split(
                np.arange(len(clients)), 1 + len(clients) * steps // _LOOKED_AT
            ):
                who, ring = clients[part], which[part]
                offsets = step * np.arange(done + 1, done + steps + 1)
                places = (at[who, ring][:, None] + offsets) % rings.population
                picked = Rings(rings.keys[ring], rings.population)
                members = picked.members_at(places.T).T
                good = mask[members] if mask.ndim == 1 else mask[rows[who][:, None], members]
                first = good.argmax(1)
                hit = good[np.arange(len(part)), first]
                found[who[hit], ring[hit], side] = members[hit, first[hit]]
                left.append(part[~hit])
            rest = np.concatenate(left)
            clients, which = clients[rest], which[rest]
            done, steps = done + steps, 2 * steps
    slots = found.reshape(len(own), 2 * number)
    # Sorted stably, each but the first of a member is behind it.
    order = slots.argsort(axis=1, kind="stable")
    ordered = np.take_along_axis(slots, order, 1)
    again = np.zeros(slots.shape, dtype=bool)
    np.put_along_axis(again, order[:, 1:], ordered[:, 1:] == ordered[:, :-1], 1)
    return np.where(again, -1, slots)
