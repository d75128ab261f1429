"""A bounded memory of peers: each client remembers the similarities of at most so many members.

Its size is clients x table, where a memory of all pairs has clients x population. See decision 036.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar, final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from coterie._util import pages
from coterie.exchange.base import Inbox
from coterie.functional import selection
from coterie.methods.base import RememberedPeers, Round

UNKNOWN, ESTIMATED, MEASURED, OWN = 0, 1, 2, 3
ROWS_OF_TABLES = 512
"""Clients per pass: each sorts its table together with those of its peers."""


T = TypeVar("T", bound="PeerTable")


def table_width(table: int, population: int) -> int:
    """Return the columns of a table: the members that a client remembers, and the client itself."""
    return min(table, population - 1) + 1


@dataclass(frozen=True)
class PeerTable:
    r"""Each hosted client's similarities to a few members of the population.

    A row has ids in ascending order, each once, and -1 behind the last. The client itself is always
    in it, so that a table of the whole population has the columns of a memory of all pairs. A
    member in no column is unknown.

    Class attributes:
        fills: the value in an empty column, by the name of each tensor with columns.

    Args:
        ids: members of the population; -1 for an empty column.
        similarity: $s_{ij}$; 0 where unknown.
        status: 0 unknown, 1 estimated from peers, 2 measured, 3 the client itself.
        count: how often i has read j since j is in its table.
        origin: $w^0$ of each client where messages carry it; else without columns.
    """

    fills: ClassVar[Mapping[str, int]] = {"ids": -1, "similarity": 0, "status": 0, "count": 0}
    ids: Int[Tensor, "clients slots"]
    similarity: Float[Tensor, "clients slots"]
    status: Int[Tensor, "clients slots"]
    count: Int[Tensor, "clients slots"]
    origin: Float[Tensor, "clients origin"]

    @staticmethod
    def all_unknown(
        own: Int[Tensor, " clients"], table: int, population: int, origin: Tensor
    ) -> "PeerTable":
        """Return tables without similarities.

        Args:
            own: ids of the hosted clients.
            table: members that each remembers at most.
            population: number of clients in all.
            origin: first models where messages carry them; else without columns.
        """
        shape = (len(own), table_width(table, population))
        ids = pages.empty(*shape, dtype=torch.int32)
        status = pages.empty(*shape, dtype=torch.int8).zero_()
        if shape[1] == population:
            # All members have their column from the start, and none is ever replaced.
            ids.copy_(torch.arange(population))
            status.scatter_(1, own[:, None], OWN)
        else:
            ids.fill_(-1)[:, 0] = own
            status[:, 0] = OWN
        similarity = pages.empty(*shape, dtype=torch.float64).zero_()
        count = pages.empty(*shape, dtype=torch.int32).zero_()
        return PeerTable(ids, similarity, status, count, origin)

    def select_rows(self: T, rows: slice) -> T:
        """Return the tables of some clients, not copied."""
        return replace(self, **{name: part[rows] for name, part in vars(self).items()})

    def with_measurements(
        self: T,
        peers: Int[Tensor, "clients peers"],
        similarity: Float[Tensor, "clients peers"],
        mask: Bool[Tensor, "clients peers"],
        *,
        reads: bool = True,
    ) -> T:
        """Return a copy with measured similarities, which all stay in it in this round.

        Args:
            peers: ids of the peers, at most as many as the table has members.
            similarity: that was measured.
            mask: which peers answered.
            reads: whether models were read, which `count` counts.
        """
        new = replace(self, **{name: _empty_like(getattr(self, name)) for name in self.fills})
        for rows in _split_rows(len(peers)):
            mine, read = self.select_rows(rows), mask[rows]
            asked = torch.where(read, peers[rows], -1)
            # Peers of a row are distinct, and so are the ids of a table.
            same = (asked[:, :, None] == mine.ids[:, None, :]) & read[:, :, None]
            columns = {
                "ids": asked,
                "similarity": torch.where(read, similarity[rows].double(), 0),
                "status": torch.full_like(asked, MEASURED),
            }
            # What was known before is kept.
            for name in self.fills.keys() - columns.keys():
                before, fill = getattr(mine, name), self.fills[name]
                columns[name] = (same * (before - fill)[:, None, :]).sum(2) + fill
            columns["count"] += int(reads)
            measured = _Entries(torch.zeros_like(asked), columns)
            merged = _Entries.of_table(mine, torch.ones_like(mine.ids)).join(measured)
            merged.write_into(new.select_rows(rows), stays=merged.rank == 0)
        return new

    def usable_members(self, *, drop_nonpositive: bool) -> Bool[Tensor, "clients slots"]:
        """Return the columns of members with a known similarity."""
        known = (self.status == ESTIMATED) | (self.status == MEASURED)
        if drop_nonpositive:
            known &= self.similarity > 0
        return known

    def scores_to_share(
        self, relay: str, *, drop_nonpositive: bool, dtype: torch.dtype
    ) -> dict[str, Shaped[Tensor, "..."]]:
        """Return the similarities that a client shares with its peers, as two extras of a message.

        Args:
            relay: "direct": those it measured itself; "any": estimates too.
            drop_nonpositive: leave out similarities of 0 and below.
            dtype: the type in which they are sent.
        """
        shared = self.usable_members(drop_nonpositive=drop_nonpositive)
        if relay == "direct":
            shared &= self.status == MEASURED
        return {
            "similarity": self.similarity.masked_fill(~shared, 0).to(dtype),
            "members": self.ids.masked_fill(~shared, -1),
        }

    def with_estimates(self: T, relays: Inbox, population: int, pick: str) -> T:
        """Estimate unmeasured similarities from the ones that peers share, in place.

        Args:
            relays: messages of peers that were measured in this round, with the extras of
                `scores_to_share`.
            population: number of clients in all; a peer that shares other ids is not believed.
            pick: use the estimate of the "most" or the "least" similar peer.
        """
        members, similarity = relays.fields["members"], relays.fields["similarity"]
        members = members.masked_fill((members < 0) | (members >= population), -1)
        for rows in _split_rows(len(relays.peers)):
            mine, peers, index = self.select_rows(rows), relays.peers[rows], relays.index[rows]
            answered = relays.mask[rows] & (peers >= 0)
            # What was read in this round is in the table, see `with_measurements`.
            same = (peers[:, :, None] == mine.ids[:, None, :]) & answered[:, :, None]
            preference = (same * mine.similarity[:, None, :]).sum(2)
            if pick == "least":
                preference = -preference
            place = selection.place_peers(preference, peers)
            width, shape = members.shape[1], (len(peers), -1)
            ids = torch.where(answered[:, :, None], members[index], -1).reshape(shape)
            columns = {name: torch.full_like(ids, fill) for name, fill in self.fills.items()}
            columns |= {
                "ids": ids,
                "similarity": similarity[index].double().reshape(shape),
                "status": torch.full_like(ids, ESTIMATED),
            }
            # The preferred peer has rank 1.
            shared = _Entries((place + 1).repeat_interleave(width, 1), columns)
            # What the client measured precedes all estimates, an older estimate follows them.
            last = peers.shape[1] + 1
            own = _Entries.of_table(mine, torch.where(mine.status >= MEASURED, 0, last))
            own.join(shared).write_into(mine)
        return self

    def list_columns(
        self,
        own: Int[Tensor, " clients"],
        population: int,
        views: Int[Tensor, "clients view"] | None = None,
    ) -> "TableColumns":
        """Return the columns among which each client draws.

        Args:
            own: ids of the clients.
            population: number of clients in all.
            views: the members among which each client finds new ones; None for all.
        """
        at = self.ids == own[:, None]
        status = self.status.masked_fill(at, UNKNOWN)
        column = at.to(torch.int8).argmax(1)
        if self.ids.shape[1] == population:
            return TableColumns(self.similarity, status, column, None)
        listed = self.ids >= 0
        # One more column for all members that are not in the table.
        others = (population - listed.sum(1))[:, None]
        if views is not None:
            others = self._list_unlisted(views).sum(1, keepdim=True)
        members = torch.cat([listed.to(others), others], dim=1)
        similarity = torch.nn.functional.pad(self.similarity, (0, 1))
        return TableColumns(similarity, torch.nn.functional.pad(status, (0, 1)), column, members)

    def _list_unlisted(self, views: Int[Tensor, "clients view"]) -> Bool[Tensor, "clients view"]:
        """Return which slots of views have a member that is not in the client's table."""
        return (views >= 0) & ~(views[:, :, None] == self.ids[:, None, :]).any(2)

    def draw_peers(
        self,
        rnd: Round,
        rows: slice,
        probability: Float[Tensor, "clients columns"],
        count: int,
        explore: int = 0,
        views: Int[Tensor, "clients view"] | None = None,
    ) -> tuple[Int[Tensor, "clients peers"], Float[Tensor, "clients peers"]]:
        """Draw peers of some clients without replacement; return them and their probabilities.

        Members of the table have a draw each. Of the others, which are equally probable, only those
        with the smallest draws matter: the order statistics of all their draws are drawn. The last
        `explore` of the peers drawn are replaced by members outside of the table.

        Args:
            rnd: the round.
            rows: of the clients in the round; this table has theirs alone.
            probability: of each column of `list_columns`.
            count: how many each draws.
            explore: how many of these are members outside of the table, where so many are left.
            views: as in `list_columns`.
        """
        own, ids = rnd.ids[rows], self.ids.long()
        readable = rnd.readable_by(torch.arange(len(rnd.ids))[rows])
        population, width = rnd.task.population, ids.shape[1]
        number = readable.sum(-1)
        reachable = readable.expand(len(own), -1)
        listed = reachable.gather(1, ids.clamp(min=0)) & (ids >= 0)
        if views is not None:
            # What is known can be read in any case; a table of all members lists unknown ones too.
            listed &= (self.status > UNKNOWN) | (ids[:, :, None] == views[:, None, :]).any(2)
            number = listed.sum(1) + self._list_unlisted(views).sum(1)
        allowed, mass = listed & (ids != own[:, None]), probability
        if width == population:
            draws = rnd.rng.pairs("peers", own, population)
        else:
            draws = rnd.rng.uniform("peers", own, width)
            count = min(count, population - 1)
            order = torch.arange(count)
            # Of n uniform draws the smallest is 1 - v^(1/n), the next the smallest of n - 1 above
            # it.
            others = (number - listed.sum(1))[:, None] - order
            steps = torch.log1p(-rnd.rng.uniform("peers outside", own, count))
            smallest = -torch.expm1((steps / others.clamp(min=1)).cumsum(1))
            draws = torch.cat([draws, smallest], dim=1)
            allowed = torch.cat([allowed, others > 0], dim=1)
            mass = torch.cat([mass[:, :width], mass[:, width:].expand(-1, count)], dim=1)
        columns, certain = selection.sample_peers_quickly(mass, draws, count, allowed)
        if not bool(certain.all()):
            rest = ~certain
            noise = -(-torch.log1p(-draws[rest])).log()
            columns[rest] = selection.sample_peers(mass[rest].log(), noise, count, allowed[rest])
        outside = columns >= width
        if explore and width < population:
            # Peers come best first, so those before the last are a draw of fewer.
            last = torch.arange(columns.shape[1]) >= columns.shape[1] - explore
            replaced = last & (columns >= 0) & ~outside
            left = number - listed.sum(1) - outside.sum(1)
            replaced &= replaced.cumsum(1) <= left[:, None]
            columns, outside = columns.masked_fill(replaced, width), outside | replaced
        prior = mass.gather(1, columns.clamp(min=0))
        inside = columns.clamp(min=0, max=width - 1)
        peers = torch.where(columns < 0, -1, ids.gather(1, inside))
        choice = readable if views is None else views
        _draw_unlisted(rnd, own, ids, choice, peers, outside)
        return peers, prior


@final
@dataclass(frozen=True)
class DatedTable(PeerTable):
    """Tables with the round of each read, for a custom selection rule.

    Args:
        last: the round in which i last read j since j is in its table; -1 for never.
    """

    fills: ClassVar[Mapping[str, int]] = {**PeerTable.fills, "last": -1}
    last: Int[Tensor, "clients slots"]

    @staticmethod
    def without_reads(table: PeerTable) -> "DatedTable":
        """Return tables of clients that have read nobody."""
        return DatedTable(**vars(table), last=torch.full_like(table.count, -1))

    def record_reads(self, inbox: Inbox, round: int) -> "DatedTable":
        """Return the memory after a round's reading; all that were read are in the tables."""
        last = pages.copy(self.last)
        for rows in _split_rows(len(last)):
            read = torch.where(inbox.mask[rows], inbox.peers[rows], -1)
            last[rows].masked_fill_(selection.find_listed(self.ids[rows], read), round)
        return replace(self, last=last)

    def recall(self, row: int, population: int) -> RememberedPeers:
        """See `base.PeerMemory.recall`: members outside of the table are unknown."""
        listed = self.ids[row] >= 0
        at, found = self.ids[row][listed].long(), {}
        for name, dtype in (
            ("count", torch.int64),
            ("last", torch.int64),
            ("similarity", torch.float64),
            ("status", torch.int8),
        ):
            whole = torch.full((population,), self.fills[name], dtype=dtype)
            whole[at] = getattr(self, name)[row][listed].to(dtype)
            found[name] = whole
        # The client itself is no peer.
        found["status"].masked_fill_(found["status"] == OWN, UNKNOWN)
        return RememberedPeers(**found)


@final
@dataclass(frozen=True)
class TableColumns:
    """The columns among which clients draw: their tables, and one for all members outside.

    Args:
        similarity: of each column; 0 where unknown.
        status: as in `PeerTable`; the client itself counts as unknown.
        own: the column of the client itself.
        members: how many members a column stands for; None where each is one.
    """

    similarity: Float[Tensor, "clients columns"]
    status: Int[Tensor, "clients columns"]
    own: Int[Tensor, " clients"]
    members: Int[Tensor, "clients columns"] | None

    def usable_members(self, *, drop_nonpositive: bool) -> Bool[Tensor, "clients columns"]:
        """Return the columns with a known similarity."""
        known = self.status > UNKNOWN
        if drop_nonpositive:
            known &= self.similarity > 0
        return known


@dataclass(frozen=True)
class _Entries:
    """What may stay in the tables of some clients, in any order; an id may occur several times.

    Args:
        rank: of entries with the same id the one of the lowest rank counts.
        columns: what a table holds of each, by the names of `PeerTable.fills`; an id of -1 is that
            of no entry.
    """

    rank: Int[Tensor, "clients entries"]
    columns: Mapping[str, Tensor]

    @staticmethod
    def of_table(table: PeerTable, rank: Int[Tensor, "clients slots"]) -> "_Entries":
        return _Entries(rank, {name: getattr(table, name) for name in table.fills})

    def join(self, other: "_Entries") -> "_Entries":
        def append(mine: Tensor, more: Tensor) -> Tensor:
            return torch.cat([mine.to(more.dtype), more], dim=1)

        columns = {name: append(part, other.columns[name]) for name, part in self.columns.items()}
        return _Entries(append(self.rank, other.rank), columns)

    def write_into(
        self, table: PeerTable, stays: Bool[Tensor, "clients entries"] | None = None
    ) -> None:
        """Write the entries that stay into a table of the same clients.

        The client itself stays, entries of `stays`, and of the measured members the most similar
        ones, up to half of the table. The other places go to the estimates of the preferred peer,
        the highest first, then to those of the next; to older estimates; and to the rest of what
        was measured. Ties go to the lowest id.
        """
        ids = self.columns["ids"]
        width, size = table.ids.shape[1], ids.shape[1]
        last = torch.iinfo(torch.int64).max
        key = ids.long() * (int(self.rank.max()) + 1) + self.rank
        order = torch.where(ids < 0, last, key).argsort(1)
        ids, similarity = ids.gather(1, order), self.columns["similarity"].gather(1, order)
        status = self.columns["status"].gather(1, order)
        valid = ids >= 0
        valid[:, 1:] &= ids[:, 1:] != ids[:, :-1]
        certain = valid & (status == OWN)
        if stays is not None:
            certain |= valid & stays.gather(1, order)
        # Estimates cannot displace what the client found itself: it is all that peers believe.
        found = valid & (status == MEASURED)
        best = similarity.masked_fill(~found, -torch.inf)
        best = best.argsort(dim=1, descending=True, stable=True)[:, : (width - 1) // 2]
        found &= torch.zeros_like(found).scatter_(1, best, True)
        # Estimates of the preferred peer come first; unknown members are in tables of the whole
        # population only, where all have a place.
        rank, most = self.rank.gather(1, order), int(self.rank.max()) + 3
        tier = torch.where(status == ESTIMATED, rank + 2, most)
        tier = tier.masked_fill_(found, 1).masked_fill_(certain, 0).masked_fill_(~valid, most + 1)
        chosen = similarity.argsort(dim=1, descending=True, stable=True)
        chosen = chosen.gather(1, tier.gather(1, chosen).argsort(dim=1, stable=True))[:, :width]
        # In the order of ids again, empty columns last.
        at = torch.where(valid.gather(1, chosen), chosen, size).sort(1).values
        empty, at = at == size, order.gather(1, at.clamp(max=size - 1))
        for name, fill in table.fills.items():
            part = self.columns[name].gather(1, at).masked_fill_(empty, fill)
            getattr(table, name).copy_(part)


def _empty_like(tensor: Tensor) -> Tensor:
    """Return an uninitialized tensor of the same form."""
    return pages.empty(*tensor.shape, dtype=tensor.dtype)


def _split_rows(rows: int) -> Iterator[slice]:
    for first in range(0, rows, ROWS_OF_TABLES):
        yield slice(first, first + ROWS_OF_TABLES)


def _draw_unlisted(
    rnd: Round,
    own: Int[Tensor, " clients"],
    ids: Int[Tensor, "clients slots"],
    choice: Bool[Tensor, "*clients population"] | Int[Tensor, "clients view"],
    peers: Int[Tensor, "clients peers"],
    outside: Bool[Tensor, "clients peers"],
) -> None:
    """Fill slots with distinct members that are not in the client's table.

    Args:
        rnd: the round.
        own: ids of the clients.
        ids: of their tables.
        choice: which members each can read, or their views.
        peers: written in place.
        outside: the slots to fill.
    """
    common, has_views = None, rnd.sampling is not None
    if choice.ndim == 1:
        common = np.flatnonzero(choice.numpy())
    rows = outside.any(1).nonzero().flatten()
    streams = rnd.rng.iterate_generators("peers unlisted", own[rows].tolist())
    for row, stream in zip(rows.tolist(), streams, strict=True):
        members, taken, found = common, set(ids[row].tolist()), []
        if has_views:
            members = choice[row][choice[row] >= 0].numpy()
        elif members is None:
            members = np.flatnonzero(choice[row].numpy())
        wanted = int(outside[row].sum())
        # Rejection is slow where most members are in the table: then their list is permuted.
        if 2 * (wanted + len(taken)) > len(members):
            rest = [member for member in members.tolist() if member not in taken]
            found = stream.permutation(rest)[:wanted].tolist()
        while len(found) < wanted:
            for place in stream.integers(len(members), size=2 * wanted).tolist():
                member = int(members[place])
                if len(found) < wanted and member not in taken:
                    found.append(member)
                    taken.add(member)
        peers[row, outside[row]] = torch.tensor(found)
