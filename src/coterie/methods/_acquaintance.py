"""Acquaintance: what a client knows of every member of the population, measured itself or told by a peer."""

from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from coterie._util import pages
from coterie.exchange.base import Inbox
from coterie.functional import selection
from coterie.methods.base import ROWS

UNKNOWN, ESTIMATED, MEASURED = 0, 1, 2


@final
@dataclass(frozen=True)
class Acquaintance:
    r"""The memory of each hosted client about the whole population.

    Args:
        similarity: $s_{ij}$; 0 where unknown.
        status: $\kappa_{ij}$: 0 unknown, 1 estimated at second hand, 2 measured.
        count: how often i has read j ($c_{ij}$).
        origin: $w^0$ of each client where it has to be told to others; else without columns.
    """

    similarity: Float[Tensor, "clients population"]
    status: Int[Tensor, "clients population"]
    count: Int[Tensor, "clients population"]
    origin: Float[Tensor, "clients origin"]

    @staticmethod
    def none(population: int, origin: Float[Tensor, "clients origin"]) -> "Acquaintance":
        """Know nobody."""
        kinds = (torch.float64, torch.int8, torch.int32)
        similarity, status, count = (pages.empty(len(origin), population, dtype=kind).zero_() for kind in kinds)
        return Acquaintance(similarity, status, count, origin)

    def rows(self, rows: slice) -> "Acquaintance":
        """Return what some of the clients know, not copied."""
        return Acquaintance(self.similarity[rows], self.status[rows], self.count[rows], self.origin[rows])

    def measured(
        self,
        peers: Int[Tensor, "clients peers"],
        similarity: Float[Tensor, "clients peers"],
        mask: Bool[Tensor, "clients peers"],
    ) -> "Acquaintance":
        """Take note of what was measured, in a copy; of peers that did not answer everything stays as it was."""
        rows, slots = mask.nonzero(as_tuple=True)
        at = (rows, peers[rows, slots])
        values, status, count = map(pages.copy, (self.similarity, self.status, self.count))
        values[at], status[at] = similarity[rows, slots].double(), MEASURED
        count[at] += 1
        return replace(self, similarity=values, status=status, count=count)

    def usable(self, *, drop_nonpositive: bool) -> Bool[Tensor, "clients population"]:
        """Return whose similarity counts as known."""
        known = self.status > UNKNOWN
        return known & (self.similarity > 0) if drop_nonpositive else known

    def vouched(self, relay: str, *, drop_nonpositive: bool, dtype: torch.dtype) -> dict[str, Shaped[Tensor, "..."]]:
        """Return what a client tells its peers of others, as two extras of a message.

        Args:
            relay: "direct": what it measured itself; "any": estimates too.
            drop_nonpositive: leave out similarities of 0 and below.
            dtype: in which the numbers are sent.
        """
        clients, population = self.status.shape
        values, known = (pages.empty(clients, population, dtype=kind) for kind in (dtype, torch.bool))
        for first in range(0, clients, ROWS):
            rows = slice(first, first + ROWS)
            mine = self.rows(rows)
            told = mine.usable(drop_nonpositive=drop_nonpositive)
            if relay == "direct":
                told &= mine.status == MEASURED
            known[rows] = told
            values[rows].copy_(mine.similarity).masked_fill_(~told, 0)
        return {"similarity": values, "known": known}

    def told(self, ids: Int[Tensor, " clients"], relays: Inbox, pick: str, *, fresh: bool = False) -> "Acquaintance":
        """Estimate similarities to members never measured from what the chosen relays say.

        Args:
            ids: the hosted clients.
            relays: messages with the extras of `vouched`.
            pick: believe the "most" or the "least" similar relay.
            fresh: change this memory instead of a copy: nobody else has it yet.
        """
        new = self if fresh else replace(self, similarity=pages.copy(self.similarity), status=pages.copy(self.status))
        for first in range(0, len(ids), ROWS):
            rows = slice(first, first + ROWS)
            mine, peers = new.rows(rows), relays.peers[rows]
            preference = mine.similarity.gather(1, peers.clamp(min=0)) * (1 if pick == "most" else -1)
            heard = relays.mask[rows] & (peers >= 0)
            measured = mine.status == MEASURED
            estimate, found = selection.two_hop(
                measured.scatter_(1, ids[rows, None], True),
                peers,
                torch.where(heard, preference, -torch.inf),
                relays.index[rows],
                relays.fields["similarity"],
                relays.fields["known"],
            )
            torch.where(found, estimate, mine.similarity, out=mine.similarity)
            mine.status.masked_fill_(found, ESTIMATED)
        return new
