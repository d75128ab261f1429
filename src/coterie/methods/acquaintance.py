"""Acquaintance: what a client knows of every member of the population, measured itself or told by a peer."""

from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from coterie import selection
from coterie.exchange import Inbox
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
        zeros = torch.zeros(len(origin), population, dtype=torch.int64)
        return Acquaintance(zeros.double(), zeros.to(torch.int8), zeros, origin)

    def rows(self, rows: Int[Tensor, " rows"]) -> "Acquaintance":
        """Return what some of the clients know."""
        return Acquaintance(self.similarity[rows], self.status[rows], self.count[rows], self.origin[rows])

    def measured(
        self,
        peers: Int[Tensor, "clients peers"],
        similarity: Float[Tensor, "clients peers"],
        mask: Bool[Tensor, "clients peers"],
    ) -> "Acquaintance":
        """Take note of what was measured; of peers that did not answer everything stays as it was."""
        rows, slots = mask.nonzero(as_tuple=True)
        at = (rows, peers[rows, slots])
        values, status, count = self.similarity.clone(), self.status.clone(), self.count.clone()
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
        told = self.usable(drop_nonpositive=drop_nonpositive)
        if relay == "direct":
            told = told & (self.status == MEASURED)
        return {"similarity": self.similarity.to(dtype).masked_fill(~told, 0), "known": told}

    def told(self, ids: Int[Tensor, " clients"], relays: Inbox, pick: str) -> "Acquaintance":
        """Estimate similarities to members never measured from what the chosen relays say.

        Args:
            ids: the hosted clients.
            relays: messages with the extras of `vouched`.
            pick: believe the "most" or the "least" similar relay.
        """
        values, status = self.similarity.clone(), self.status.clone()
        for rows in torch.arange(len(ids)).split(ROWS):
            peers, known = relays.peers[rows], values[rows]
            preference = known.gather(1, peers.clamp(min=0)) * (1 if pick == "most" else -1)
            heard = relays.mask[rows] & (peers >= 0)
            estimate, found = selection.two_hop(
                (status[rows] == MEASURED) | ~selection.others(ids[rows], values.shape[1]),
                peers,
                torch.where(heard, preference, -torch.inf),
                relays.index[rows],
                relays.fields["similarity"],
                relays.fields["known"],
            )
            values[rows] = torch.where(found, estimate, known)
            status[rows] = status[rows].masked_fill(found, ESTIMATED)
        return replace(self, similarity=values, status=status)
