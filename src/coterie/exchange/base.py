"""Exchange: the only door to other clients.

A method publishes a `Message` for the clients hosted here and pulls an `Inbox` of what chosen peers published in the
same round. Rounds are simultaneous: `pull` never shows a model that was merged in this round. A message is addressed
by (round, number of the exchange in the round, client id); one that does not arrive is `mask == False`, never an
exception. In a simulation all clients are hosted, so `InMemory` is indexing; `mailbox.Mailbox` joins several threads,
and the network has its own exchange with the same contract.

Longer than other modules: the contract, its plainest form and the one that loses messages are read side by side.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from coterie._util import pages
from coterie.errors import ExchangeError
from coterie.rng import Rng

_CHUNK = 1 << 19  # entries of a mix done at once: the temporary stays in the cache
_WIDE = 1 << 13  # entries of a model from which on it is mixed by itself, without a temporary


@dataclass(frozen=True)
class Message:
    """What hosted clients publish in one exchange of a round.

    Args:
        params: a model for each hosted client; no columns at all in an exchange of extras alone.
        fields: named extras, one row a client (samples, similarity vectors, loss traces).
        ids: who they are; set by the exchange.
    """

    params: Float[Tensor, "clients params"]
    fields: Mapping[str, Shaped[Tensor, "clients ..."]] = field(default_factory=dict)
    ids: Int[Tensor, " clients"] | None = None

    def __len__(self) -> int:
        return len(self.params)

    def rows(self, rows: Int[Tensor, " rows"]) -> "Message":
        """Return some of the rows; all of them in their order are not copied."""
        if torch.equal(rows, torch.arange(len(self))):
            return self
        fields = {name: value[rows] for name, value in self.fields.items()}
        return Message(self.params[rows], fields, None if self.ids is None else self.ids[rows])

    @property
    def row_bytes(self) -> int:
        """The payload of one client's message, in bytes."""
        each = [self.params, *self.fields.values()]
        return sum(t[0].numel() * t.element_size() for t in each) if len(self.params) else 0


@dataclass(frozen=True)
class Inbox:
    """What the hosted clients received: one slot for each peer asked.

    Args:
        table: the model of each distinct sender, once.
        index: which row of the table each slot shows; 0 where the mask is False.
        peers: the id asked in each slot; -1 for a slot that was not used.
        mask: whether the message arrived.
        age: how many rounds old it is.
        fields: the senders' extras, aligned with the table.
        bytes: payload received in each slot.
    """

    table: Float[Tensor, "senders params"]
    index: Int[Tensor, "clients peers"]
    peers: Int[Tensor, "clients peers"]
    mask: Bool[Tensor, "clients peers"]
    age: Int[Tensor, "clients peers"]
    fields: Mapping[str, Shaped[Tensor, "senders ..."]]
    bytes: Int[Tensor, "clients peers"]

    def field(self, name: str) -> Shaped[Tensor, "clients peers ..."]:
        """Return an extra of each slot's sender. Slots that did not arrive show some sender's value: use the mask."""
        return self.fields[name][self.index]

    def mix(
        self,
        weights: Shaped[Tensor, "clients peers"],
        *,
        own: Float[Tensor, "clients params"],
        own_weight: Shaped[Tensor, " clients"],
    ) -> Float[Tensor, "clients params"]:
        """Return `own_weight * own + sum of weights * received`, without an array of clients x peers x params.

        Slots that did not arrive count zero; nothing is renormalised here. Terms are added in the order of sender
        ids, client by client, so that neither the order of the slots nor who is hosted beside changes a bit.
        """
        order = torch.argsort(self.peers, dim=1, stable=True)
        index = self.index.gather(1, order)
        weights = torch.where(self.mask, weights, 0).gather(1, order).to(own.dtype)
        own_weight = own_weight.to(own.dtype)
        if own.shape[1] >= _WIDE and own.device.type == "cpu":
            out = pages.empty(*own.shape, dtype=own.dtype)
            for row, (slots, each) in enumerate(zip(index.tolist(), weights.tolist(), strict=True)):
                mixed = torch.mul(own[row], own_weight[row], out=out[row])
                for slot, sender in enumerate(slots):
                    if each[slot] != 0:  # a model that weighs nothing has no influence, be it NaN
                        mixed.addcmul_(weights[row, slot], self.table[sender])
            return out
        out = own * own_weight[:, None]
        step = max(1, _CHUNK // max(1, own.shape[1]))
        for start in range(0, len(own), step):
            rows = slice(start, start + step)
            for slot in range(index.shape[1]):
                weight, received = weights[rows, slot, None], self.table[index[rows, slot]]
                if not bool(weight.all()):  # a model that weighs nothing has no influence, be it NaN
                    received = received.masked_fill(weight == 0, 0)
                out[rows].addcmul_(weight, received)
        return out


@dataclass(frozen=True)
class Reply:
    """What a server answers: a table of models, and which of its rows each client gets.

    Args:
        table: the models, each once.
        index: rows of the table for each asking client, in the order of the message's rows.
        fields: extras aligned with the table.
    """

    table: Float[Tensor, "senders params"]
    index: Int[Tensor, "clients peers"]
    fields: Mapping[str, Shaped[Tensor, "senders ..."]] = field(default_factory=dict)

    @staticmethod
    def everything(table: Float[Tensor, "senders params"], clients: int) -> "Reply":
        """Answer every client with the whole table."""
        return Reply(table, torch.arange(len(table)).expand(clients, len(table)))

    def inbox(self, rows: Int[Tensor, " rows"] | None = None) -> Inbox:
        """Return the answer as an inbox of the clients at some rows; the senders are numbered as in the table."""
        index = self.index if rows is None else self.index[rows]
        size = nbytes_row(self.table) + sum(nbytes_row(v) for v in self.fields.values())
        return Inbox(
            table=self.table,
            index=index,
            peers=index,
            mask=torch.ones_like(index, dtype=torch.bool),
            age=torch.zeros_like(index),
            fields=self.fields,
            bytes=torch.full_like(index, size),
        )


COHORT = 1 << 10
"""Exchanges after the g-th choice of a cohort in a round are numbered from g times this, so that processes whose
clients sat out the exchanges before are in step again."""

Rule = Callable[[Any, Message], tuple[Any, Reply]]
"""A server's pure function: (shared state, message of the cohort in the order of ids) -> (shared state, reply)."""


def nbytes_row(table: Shaped[Tensor, "senders ..."]) -> int:
    """Return the size of one row in bytes."""
    return table.element_size() * (table[0].numel() if len(table) else 0)


class PeersMissing(ExchangeError):
    """Raised by `pull` of an exchange over a real network: the round may be drawn again without these peers.

    Only in the first exchange of a round, and a bounded number of times; a peer that is chosen again all the same, or
    is missing later, is `mask == False`.

    Args:
        ids: the clients that could not be read.
    """

    def __init__(self, ids: Int[Tensor, " lost"]) -> None:
        super().__init__(f"clients {ids.tolist()} could not be read in this round")
        self.ids = ids


@runtime_checkable
class Exchange(Protocol):
    """The only door to other clients. Its contract is `coterie.testing.check_exchange`."""

    def begin(self, rng: Rng) -> None:
        """Start a round: the round of `rng`. Exchanges in it are numbered from 0."""
        ...

    def enter(self, ids: Int[Tensor, " active"]) -> None:
        """Say which hosted clients take part from now on; messages have these ids, in this order."""
        ...

    def pull(self, message: Message, peers: Int[Tensor, "clients peers"]) -> Inbox:
        """Publish the message of the hosted clients and return what the chosen peers published in this exchange.

        Args:
            message: a row for each hosted client that takes part in the round.
            peers: ids to read for each of them; -1 leaves a slot empty.
        """
        ...

    def serve(self, message: Message, rule: Rule, shared: Any) -> tuple[Any, Inbox]:
        """Send the message to the server, which applies `rule` once to the whole cohort's, and return its answer."""
        ...

    def cohort(self, compute: Callable[[], Int[Tensor, " active"]]) -> Int[Tensor, " active"]:
        """Return who takes part from now on: computed in the server role, learnt from it elsewhere.

        The server role waits for these clients in `serve`. May be called again in a round, for another group.
        """
        ...

    def retire(self, ids: Int[Tensor, " stopped"], params: Float[Tensor, "stopped params"]) -> None:
        """Let clients that stopped go on publishing these models, with the extras of their last messages."""
        ...

    def idle(self, exchanges: int) -> None:
        """Pass a round in which no client of this process takes part, still publishing for those who stopped."""
        ...


class InMemory:
    """All clients of the population in one process: a pull is indexing.

    Args:
        ids: the ids of the rows of a full message.
        population: how many clients there are.
    """

    def __init__(self, ids: Int[Tensor, " clients"], population: int) -> None:
        self.ids, self.population = ids, population
        self.last: dict[int, Message] = {}
        self._stopped: dict[int, Tensor] = {}  # by id: the model
        self._number = 0
        self.active = ids

    def begin(self, rng: Rng) -> None:
        """Start a round."""
        self._number = 0

    def enter(self, ids: Int[Tensor, " active"]) -> None:
        """Say which clients take part in this round; their messages have these ids, in this order."""
        self.active = ids

    def cohort(self, compute: Callable[[], Int[Tensor, " active"]]) -> Int[Tensor, " active"]:
        """Choose who takes part: in one process there is nobody to ask."""
        return compute()

    def retire(self, ids: Int[Tensor, " stopped"], params: Float[Tensor, "stopped params"]) -> None:
        """Let stopped clients go on publishing."""
        self._stopped |= {int(i): row.clone() for i, row in zip(ids, params, strict=True)}

    def idle(self, exchanges: int) -> None:
        """Pass a round: in one process nobody waits."""

    def board(self, message: Message) -> Message:
        """Return all that can be read in this exchange: the message, and what stopped clients stand for."""
        number, self._number = self._number, self._number + 1
        message = replace(message, ids=self.active)
        if len(message) != len(self.active):
            raise ExchangeError(f"a message has {len(message)} rows; expected {len(self.active)}, one a client hosted")
        here = set(self.active.tolist())
        if not self._stopped:
            self.last[number] = message
            return message
        previous = self.last.get(number, message)
        assert previous.ids is not None
        place = {int(c): row for row, c in enumerate(previous.ids.tolist())}
        gone = [c for c in sorted(self._stopped) if c not in here and c in place]
        rows = torch.tensor([place[c] for c in gone], dtype=torch.int64)
        params = torch.stack([self._stopped[c] for c in gone]) if gone else message.params[:0]
        params = params[:, : message.params.shape[1]]  # no columns, when this exchange carries no models
        fields = {name: torch.cat([value, previous.fields[name][rows]]) for name, value in message.fields.items()}
        board = Message(
            torch.cat([message.params, params]),
            fields,
            torch.cat([self.active, torch.tensor(gone, dtype=torch.int64)]),
        )
        self.last[number] = board
        return board

    def pull(self, message: Message, peers: Int[Tensor, "clients peers"]) -> Inbox:
        """Publish and read: see `Exchange.pull`."""
        own = self.active
        board = self.board(message)
        return read(board, own, peers, self.population)

    def serve(self, message: Message, rule: Rule, shared: Any) -> tuple[Any, Inbox]:
        """Apply the rule to the whole message, in the order of ids: see `Exchange.serve`."""
        message = replace(message, ids=self.active)
        order = torch.argsort(self.active)
        shared, reply = rule(shared, message.rows(order))
        return shared, reply.inbox(torch.argsort(order))

    def snapshot(self) -> dict[str, Tensor]:
        """Return what a later round depends on, for a checkpoint."""
        out = {f"stopped.{client}": row for client, row in self._stopped.items()}
        for number, board in self.last.items() if self._stopped else ():
            assert board.ids is not None
            out |= {f"last.{number}.params": board.params, f"last.{number}.ids": board.ids}
            out |= {f"last.{number}.field.{name}": value for name, value in board.fields.items()}
        return out

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what `snapshot` returned."""
        self._stopped = {int(k.split(".")[1]): v for k, v in tensors.items() if k.startswith("stopped.")}
        numbers = {int(k.split(".")[1]) for k in tensors if k.startswith("last.")}
        for n in numbers:
            head = f"last.{n}.field."
            fields = {k.removeprefix(head): v for k, v in tensors.items() if k.startswith(head)}
            self.last[n] = Message(tensors[f"last.{n}.params"], fields, tensors[f"last.{n}.ids"])


def check_peers(own: Int[Tensor, " clients"], peers: Int[Tensor, "clients peers"], population: int) -> None:
    """Refuse wishes that no exchange can fulfil.

    Raises:
        ExchangeError: when a reader asks for itself or for an id outside the population.
    """
    itself = (peers == own[:, None]).any(1)
    if bool(itself.any()):
        raise ExchangeError(f"client {int(own[itself][0])} asked for its own message; a client is not its own peer")
    if bool((peers >= population).any()) or bool((peers < -1).any()):
        low, high = int(peers.min()), int(peers.max())
        raise ExchangeError(f"peer ids run from {low} to {high}; expected -1 to {population - 1}")


def read(board: Message, own: Int[Tensor, " clients"], peers: Int[Tensor, "clients peers"], population: int) -> Inbox:
    """Read chosen peers from a board of messages.

    Args:
        board: what can be read, with ids.
        own: ids of the readers.
        peers: whom each of them reads; -1 for nobody.
        population: ids are below this.

    Raises:
        ExchangeError: see `check_peers`.
    """
    check_peers(own, peers, population)
    assert board.ids is not None
    place = torch.full((population + 1,), -1, dtype=torch.int64)
    place[board.ids] = torch.arange(len(board))
    index = place[peers]
    mask = (index >= 0) & (peers >= 0)
    return Inbox(
        table=board.params,
        index=index.clamp(min=0),
        peers=peers,
        mask=mask,
        age=torch.zeros_like(index),
        fields=board.fields,
        bytes=mask * board.row_bytes,
    )


class Faulty:
    """Another exchange whose messages get lost, late or doubled.

    Args:
        inner: the exchange underneath.
        drop: probability that a message does not arrive, in [0, 1].
        delay: probability that an older message (of the previous round) arrives instead, in [0, 1].
        duplicate: probability that a message arrives twice: it costs its bytes again and changes nothing else.
    """

    def __init__(self, inner: "InMemory", *, drop: float = 0.0, delay: float = 0.0, duplicate: float = 0.0) -> None:
        for name, value in (("drop", drop), ("delay", delay), ("duplicate", duplicate)):
            if not 0 <= value <= 1:
                raise ExchangeError(f"{name} is {value}; expected a probability between 0 and 1")
        self.inner, self.drop, self.delay, self.duplicate = inner, drop, delay, duplicate
        self._rng, self._number = Rng(0), 0
        self._old: dict[int, Message] = {}

    def begin(self, rng: Rng) -> None:
        """Start a round."""
        self._rng, self._number = rng, 0
        self.inner.begin(rng)

    def enter(self, ids: Int[Tensor, " active"]) -> None:
        """Say which clients take part in this round."""
        self.inner.enter(ids)

    def pull(self, message: Message, peers: Int[Tensor, "clients peers"]) -> Inbox:
        """Read through the faults, drawn for each (round, exchange, reader, peer)."""
        number, self._number = self._number, self._number + 1
        own = self.inner.active
        inbox = self.inner.pull(message, peers)
        column = peers.clamp(min=0)

        def happens(kind: str, chance: float) -> Tensor:
            if chance == 0:
                return torch.zeros_like(inbox.mask)
            draws = self._rng.uniform(f"faults.{kind}.{number}", own, self.inner.population)
            return (draws.gather(1, column) < chance) & inbox.mask

        late = happens("delay", self.delay)
        before, self._old[number] = self._old.get(number), replace(message, ids=own)
        if bool(late.any()):
            inbox = _replace_late(inbox, late, before, own, self.inner.population)
        mask = inbox.mask & ~happens("drop", self.drop)
        twice = happens("duplicate", self.duplicate) & mask
        return replace(inbox, mask=mask, bytes=inbox.bytes * (mask.to(torch.int64) + twice.to(torch.int64)))

    def serve(self, message: Message, rule: Rule, shared: Any) -> tuple[Any, Inbox]:
        """Pass through: faults are between peers."""
        return self.inner.serve(message, rule, shared)

    def cohort(self, compute: Callable[[], Int[Tensor, " active"]]) -> Int[Tensor, " active"]:
        """Pass through."""
        return self.inner.cohort(compute)

    def retire(self, ids: Int[Tensor, " stopped"], params: Float[Tensor, "stopped params"]) -> None:
        """Pass through."""
        self.inner.retire(ids, params)

    def idle(self, exchanges: int) -> None:
        """Pass through."""
        self.inner.idle(exchanges)

    def snapshot(self) -> dict[str, Tensor]:
        """Return what a later round depends on."""
        out = self.inner.snapshot()
        for number, old in self._old.items() if self.delay else ():
            assert old.ids is not None
            out |= {f"old.{number}.params": old.params, f"old.{number}.ids": old.ids}
            out |= {f"old.{number}.field.{name}": value for name, value in old.fields.items()}
        return out

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what `snapshot` returned."""
        self.inner.restore(tensors)
        for n in {int(k.split(".")[1]) for k in tensors if k.startswith("old.")}:
            head = f"old.{n}.field."
            fields = {k.removeprefix(head): v for k, v in tensors.items() if k.startswith(head)}
            self._old[n] = Message(tensors[f"old.{n}.params"], fields, tensors[f"old.{n}.ids"])


def _replace_late(inbox: Inbox, late: Tensor, before: Message | None, own: Tensor, population: int) -> Inbox:
    """Show the previous round's message in the late slots; where there was none, nothing arrives."""
    if before is None:
        return replace(inbox, mask=inbox.mask & ~late, bytes=inbox.bytes * ~late)
    old = read(before, own, torch.where(late, inbox.peers, -1), population)
    offset = len(inbox.table)
    return replace(
        inbox,
        table=torch.cat([inbox.table, old.table]),
        fields={name: torch.cat([value, old.fields[name]]) for name, value in inbox.fields.items()},
        index=torch.where(late & old.mask, old.index + offset, inbox.index),
        mask=torch.where(late, old.mask, inbox.mask),
        age=torch.where(late & old.mask, 1, inbox.age),
        bytes=torch.where(late, old.bytes, inbox.bytes),
    )
