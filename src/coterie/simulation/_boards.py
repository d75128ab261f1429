"""Boards: what clients published at which virtual time, and what of it a reader finds.

A board keeps the messages of each client that some reader may still find: the newest one that has
reached everybody, and all that are on their way. A message is on its way for as long as the clock
says. Rows of messages lie in pools, whose rows are used again when nobody can read them any more.
"""

import dataclasses
from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from coterie._util import pages
from coterie.errors import ConfigError
from coterie.exchange.base import Inbox, Message, Rule, check_peers, find_withheld
from coterie.runtime.virtual_time import Clock
from coterie.simulation._publishing import StandingExchange

# The name of models in a pool; extras have theirs.
_MODELS = ""
# The time of publication in a place without a message: after every other time.
_NOBODY = np.iinfo(np.int64).max


@dataclasses.dataclass(frozen=True)
class Found:
    """Which message each slot of some readers finds.

    Args:
        version: its place among the sender's messages; -1 for none.
        age: its age in rounds of the reader; 0 for none.
        nanoseconds: its age in virtual time; 0 for none.
    """

    version: np.ndarray
    age: np.ndarray
    nanoseconds: np.ndarray


class Boards(StandingExchange):
    """The messages of all clients of a simulation in virtual time: an exchange.

    Args:
        forms: a message of each exchange of a round, whose rows say what all rows look like.
        population: number of clients, all of them hosted here.
        clock: says how long messages take.
        max_staleness: rounds of the reader after which a message is too old; None for never.
        max_staleness_nanoseconds: virtual time after which it is; None for never.
    """

    def __init__(
        self,
        forms: Sequence[Message],
        population: int,
        clock: Clock,
        max_staleness: int | None = None,
        max_staleness_nanoseconds: int | None = None,
    ) -> None:
        self.forms, self.population, self.clock = list(forms), population, clock
        self.max_staleness = max_staleness
        self.max_staleness_nanoseconds = max_staleness_nanoseconds
        self.size = max((form.row_bytes for form in forms), default=0)
        self.longest = clock.longest_delays(self.size)
        # exchanges of the same models share one pool
        self.pools = _make_pools(forms)
        self.free: list[int] = []
        self.capacity = 0
        # of each exchange and row: whether the message reaches nobody, since it is not finite
        self.withheld = [np.zeros(0, dtype=bool) for _ in forms]
        # by client and version, oldest first: when it was published, and its row of the pools
        self.published = np.full((population, 2), _NOBODY)
        self.row = np.zeros((population, 2), dtype=np.int64)
        self.count = np.zeros(population, dtype=np.int64)
        # whose last message is repeated for ever, so that it never grows old
        self.standing = np.zeros(population, dtype=bool)
        # of each client: when its rounds met the others, ascending
        self.acted = [array("q") for _ in range(population)]
        self._just: tuple[list[int], Sequence[Message]] | None = None
        self._readers = torch.zeros(0, dtype=torch.int64)
        self._times, self._number = np.zeros(0, dtype=np.int64), 0

    # ------------------------------------------------------------------ publishing

    def publish(
        self, ids: Sequence[int], times: Sequence[int], messages: Sequence[Message]
    ) -> None:
        """Publish messages of some clients.

        Args:
            ids: the clients.
            times: when each of them publishes, later than its messages before.
            messages: of each exchange, a row for each of them.
        """
        self._just = list(ids), messages
        rows = self._take_rows(len(ids))
        seen = set[int]()
        for number, message in enumerate(messages):
            pool = self.pools[number]
            place = torch.tensor(rows)
            # exchanges with the same models have the same tensor
            if id(pool[_MODELS]) not in seen:
                pool[_MODELS][place] = message.params
                seen.add(id(pool[_MODELS]))
            for name, value in message.fields.items():
                pool[name][place] = value
            lost = find_withheld(dataclasses.replace(message, ids=torch.tensor(list(ids))))
            self.withheld[number][rows] = lost[:-1].numpy()
        if len(ids) and int(self.count[list(ids)].max()) == self.published.shape[1]:
            more = np.full_like(self.published, _NOBODY)
            self.published = np.concatenate([self.published, more], axis=1)
            self.row = np.concatenate([self.row, np.zeros_like(self.row)], axis=1)
        for client, time, row in zip(ids, times, rows, strict=True):
            place = self.count[client]
            self.published[client, place], self.row[client, place] = time, row
            self.count[client] += 1
            # a client reads when it publishes, so that these are the times of its rounds
            if not self.acted[client] or self.acted[client][-1] < time:
                self.acted[client].append(time)

    def retire(self, client: int, time: int, models: Sequence[Float[Tensor, "1 params"]]) -> None:
        """Make a client keep publishing these models, with the extras of its last message.

        Args:
            client: which one.
            time: from when on.
            models: in each exchange.
        """
        self.standing[client] = True
        if not self.count[client]:
            return  # it has never published: there are no extras to repeat
        last = torch.tensor([self.row[client, self.count[client] - 1]])
        messages = []
        for form, pool, params in zip(self.forms, self.pools, models, strict=True):
            fields = {name: pool[name][last] for name in form.fields}
            messages.append(Message(params, fields))
        self.publish([client], [time], messages)

    def forget(self, now: int) -> None:
        """Forget messages that no reader can find from a time on, since a newer one has arrived."""
        self._just = None
        for client in (self.count > 1).nonzero()[0].tolist():
            count = int(self.count[client])
            arrived = self.published[client, 1:count] + self.longest[client] <= now
            # the newest that has arrived everywhere stays, and all after it
            gone = int(arrived.sum())
            if not gone:
                continue
            self.free += self.row[client, :gone].tolist()
            left = count - gone
            self.row[client, :left] = self.row[client, gone:count]
            self.published[client, :left] = self.published[client, gone:count]
            self.published[client, left:] = _NOBODY
            self.count[client] = left

    def _take_rows(self, number: int) -> list[int]:
        """Return free rows of the pools, which grow where there are too few."""
        short = number - len(self.free)
        if short > 0:
            # an eighth more, so that pools do not grow with every wave
            more = short + self.capacity // 8
            grown: dict[int, Tensor] = {}
            for pool in self.pools:
                for name, old in pool.items():
                    if id(old) not in grown:
                        grown[id(old)] = torch.cat([old, old.new_zeros(more, *old.shape[1:])])
                    pool[name] = grown[id(old)]
            # the smallest rows are taken first
            self.free = [*range(self.capacity + more - 1, self.capacity - 1, -1), *self.free]
            self.capacity += more
            new = np.zeros(more, dtype=bool)
            self.withheld = [np.concatenate([old, new]) for old in self.withheld]
        return [self.free.pop() for _ in range(number)]

    # ------------------------------------------------------------------ reading

    def set_readers(self, ids: Int[Tensor, " readers"], times: np.ndarray) -> None:
        """Set the clients that read now, and when each of them does."""
        self._readers, self._times, self._number = ids, times, 0

    def find_messages(
        self, ids: Int[Tensor, " readers"], times: np.ndarray, peers: Int[Tensor, "readers peers"]
    ) -> Found:
        """Return which message of each peer has reached a reader and is not too old.

        Args:
            ids: the readers.
            times: when each of them reads.
            peers: ids of the peers; -1 for an unused slot.
        """
        readers, asked = ids.numpy(), peers.numpy()
        safe = np.maximum(asked, 0)
        delay = self.clock.message_delays(readers[:, None], safe, self.size)
        # the newest message that was published early enough; times ascend within a sender
        latest = times[:, None] - delay
        version = (self.published[safe] <= latest[:, :, None]).sum(2) - 1
        version[asked < 0] = -1
        # of no message: any time that is not in the future
        sent = self.published[safe, np.maximum(version, 0)]
        sent = np.where(version < 0, times[:, None], sent)
        # what a stopped client published is repeated: it is always new
        repeated = self.standing[safe] & (version == self.count[safe] - 1)
        sent = np.where(repeated, times[:, None], sent)
        age = np.zeros_like(version)
        for place, client in enumerate(readers.tolist()):
            acted = self.acted[client]
            before = bisect_left(acted, int(times[place]))
            # rounds of the reader that began since: from the publication on, and before now
            for slot, time in enumerate(sent[place].tolist()):
                age[place, slot] = before - bisect_left(acted, time, 0, before)
        old = times[:, None] - sent
        late = np.zeros(version.shape, dtype=bool)
        if self.max_staleness is not None:
            late |= age > self.max_staleness
        if self.max_staleness_nanoseconds is not None:
            late |= old > self.max_staleness_nanoseconds
        missing = late | (version < 0)
        return Found(
            np.where(late, -1, version), np.where(missing, 0, age), np.where(missing, 0, old)
        )

    def pull(self, message: Message, peers: Int[Tensor, "clients peers"]) -> Inbox:
        """Read the newest messages of the chosen peers that have arrived, in this exchange.

        Raises:
            ConfigError: when the method sends something else than its `publish` announced.
        """
        if self._number >= len(self.forms):
            raise ConfigError(
                f"a method pulled more often in a round than the {len(self.forms)} exchanges "
                "that it declares"
            )
        number, ids = self._number, self._readers
        self._number += 1
        check_peers(ids, peers, self.population)
        self._check_own(number, message)
        found = self.find_messages(ids, self._times, peers)
        mask = found.version >= 0
        # a table with each message once, in the order of senders and their messages
        width = self.published.shape[1]
        keys = np.where(mask, peers.numpy() * width + found.version, -1)
        used, index = np.unique(keys[mask], return_inverse=True)
        senders, versions = used // width, used % width
        rows = torch.from_numpy(self.row[senders, versions])
        arrived = mask.copy()
        arrived[mask] = ~self.withheld[number][rows.numpy()][index]
        place = np.zeros(keys.shape, dtype=np.int64)
        place[mask] = index
        if not len(rows):
            # Every index of an inbox is legal: one row of zeros stands for no message.
            form = self.forms[number]
            table = form.params.new_zeros(1, *form.params.shape[1:])
            fields = {k: value.new_zeros(1, *value.shape[1:]) for k, value in form.fields.items()}
        elif 4 * len(rows) > self.capacity:
            # The pool itself, where copying its rows takes longer than what methods do with all.
            place[mask] = rows.numpy()[index]
            pool = self.pools[number]
            table, fields = pool[_MODELS], {name: pool[name] for name in self.forms[number].fields}
        else:
            table, fields = self._take(number, rows)
        received = torch.from_numpy(arrived)
        return Inbox(
            table=table,
            index=torch.from_numpy(place),
            peers=peers,
            mask=received,
            age=torch.from_numpy(found.age),
            fields=fields,
            bytes=received * self.forms[number].row_bytes,
        )

    def _take(self, number: int, rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the models and the extras in some rows of an exchange."""
        pool = self.pools[number]
        fields = {name: pages.take_rows(pool[name], rows) for name in self.forms[number].fields}
        return pages.take_rows(pool[_MODELS], rows), fields

    def _check_own(self, number: int, message: Message) -> None:
        """Refuse a message that is not what the same client has published."""
        # What the loop has just published for these clients is the same tensor.
        if self._is_just_published(number, message):
            return
        own = self._readers.numpy()
        newest = (self.published[own] <= self._times[:, None]).sum(1) - 1
        rows = torch.from_numpy(self.row[own, newest])
        params, fields = self._take(number, rows)
        same = set(fields) == set(message.fields) and _are_equal(params, message.params)
        if not same or not all(_are_equal(fields[name], message.fields[name]) for name in fields):
            raise ConfigError(
                f"exchange {number} of a round sends what the method's `publish` did not say "
                "before the round; a client that nobody waits for has published it by then: use "
                "schedule = 'synchronous'"
            )

    def _is_just_published(self, number: int, message: Message) -> bool:
        if not self._just:
            return False
        ids, messages = self._just
        known = messages[number]
        same = ids == self._readers.tolist() and known.fields.keys() == message.fields.keys()
        return (
            same
            and message.params.shape == known.params.shape
            and message.params.data_ptr() == known.params.data_ptr()
            and all(_are_equal(known.fields[name], message.fields[name]) for name in known.fields)
        )

    # ------------------------------------------------------------------ the rest of an exchange

    def set_active(self, ids: Int[Tensor, " active"]) -> None:
        """Do nothing: see `set_readers`."""

    def ask_server(self, message: Message, rule: Rule, shared: Any) -> tuple[Any, Inbox]:
        """Refuse: there is no server."""
        raise ConfigError(
            "schedule = 'asynchronous' is for peer-to-peer methods; this one has a server"
        )

    # ------------------------------------------------------------------ checkpoints

    def snapshot(self) -> dict[str, Tensor]:
        """Return what later rounds depend on, for a checkpoint."""
        held = np.arange(self.published.shape[1]) < self.count[:, None]
        rows, out = torch.from_numpy(self.row[held]), {}
        for number in range(len(self.forms)):
            params, fields = self._take(number, rows)
            out[f"{number}.params"] = params
            out |= {f"{number}.field.{name}": value for name, value in fields.items()}
        return out | {
            "count": torch.from_numpy(self.count.copy()),
            "published": torch.from_numpy(self.published[held]),
            "standing": torch.from_numpy(self.standing.copy()),
            "acted": torch.from_numpy(
                np.concatenate([np.array(one, dtype=np.int64) for one in self.acted])
            ),
            "acts": torch.tensor(list(map(len, self.acted))),
        }

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the result of `snapshot`."""
        count = tensors["count"].numpy().copy()
        width = max(2, int(count.max(initial=0)))
        self.pools, self.free, self.capacity = _make_pools(self.forms), [], 0
        self.withheld = [np.zeros(0, dtype=bool) for _ in self.forms]
        self.published = np.full((self.population, width), _NOBODY)
        self.row = np.zeros((self.population, width), dtype=np.int64)
        self.count, self.standing = count, tensors["standing"].numpy().copy()
        held = np.arange(width) < count[:, None]
        rows = self._take_rows(int(count.sum()))
        self.published[held], self.row[held] = tensors["published"].numpy(), rows
        place = torch.tensor(rows, dtype=torch.int64)
        for number, pool in enumerate(self.pools):
            for name in pool:
                key = f"{number}.field.{name}"
                if name == _MODELS:
                    key = f"{number}.params"
                pool[name][place] = tensors[key].to(pool[name].device)
            fields = {name: pool[name] for name in self.forms[number].fields}
            self.withheld[number] = (
                find_withheld(Message(pool[_MODELS], fields))[:-1].numpy().copy()
            )
        ends = np.cumsum(tensors["acts"].numpy())
        parts = np.split(tensors["acted"].numpy(), ends[:-1])
        self.acted = [array("q", part.tolist()) for part in parts]


def _make_pools(forms: Sequence[Message]) -> list[dict[str, Tensor]]:
    """Return empty pools of each exchange; those of the same models share them."""
    models: dict[int, Tensor] = {}
    pools = []
    for form in forms:
        key = id(form.params)
        if key not in models:
            models[key] = form.params.new_zeros(0, *form.params.shape[1:])
        pool = {_MODELS: models[key]}
        for name, value in form.fields.items():
            pool[name] = value.new_zeros(0, *value.shape[1:])
        pools.append(pool)
    return pools


def _are_equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal; NaN equals NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    b = b.to(a.device)
    if torch.equal(a, b):
        return True
    if a.is_floating_point():
        return bool(((a == b) | (a.isnan() & b.isnan())).all())
    return False
