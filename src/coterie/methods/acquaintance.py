"""Acquaintance: what a client knows of every member of the population, measured itself or told by a peer."""

from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from coterie import selection
from coterie.exchange import Inbox

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
        return {"similarity": torch.where(told, self.similarity, 0).to(dtype), "known": told}

    def told(self, ids: Int[Tensor, " clients"], relays: Inbox, pick: str) -> "Acquaintance":
        """Estimate similarities to members never measured from what the chosen relays say.

        Args:
            ids: the hosted clients.
            relays: messages with the extras of `vouched`.
            pick: believe the "most" or the "least" similar relay.
        """
        preference = self.similarity.gather(1, relays.peers.clamp(min=0)) * (1 if pick == "most" else -1)
        heard = relays.mask & (relays.peers >= 0)
        estimate, found = selection.two_hop(
            (self.status == MEASURED) | ~selection.others(ids, self.similarity.shape[1]),
            relays.peers,
            torch.where(heard, preference, -torch.inf),
            relays.index,
            relays.fields["similarity"],
            relays.fields["known"],
        )
        status = torch.where(found, ESTIMATED, self.status.to(torch.int64)).to(torch.int8)
        return replace(self, similarity=torch.where(found, estimate, self.similarity), status=status)
