"""Exchange: the only door to other clients.

A method publishes a `Message` for the clients hosted here and pulls an `Inbox` of the messages that
chosen peers published in the same exchange. Rounds are simultaneous: `pull` never returns a model
that was merged in this round. A message is addressed by (round, number of the exchange in the
round, client id); one that does not arrive is `mask == False`, never an exception. In a simulation
all clients are hosted, so `InMemory` is indexing; `mailbox.Mailbox` joins several threads, and the
network has its own exchange with the same contract.

Rows of parameters are where the task's models are; ids, masks, weights and other small extras are
on the CPU.
"""

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Generic, Protocol, TypeVar, runtime_checkable

import torch
from annotated_types import Ge, Gt, Le
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from coterie._util import pages
from coterie._util.finite import not_finite
from coterie._util.mappings import prefix_keys, select_prefix
from coterie._util.settings import Configurable
from coterie._util.tensors import index_each, index_optional
from coterie.errors import ExchangeError
from coterie.models.part import ParameterSharing
from coterie.rng import Rng

# Entries that are mixed at once, so that the temporary stays in a CPU's cache.
_CHUNK = {"cpu": 1 << 19, "cuda": 1 << 27}
SAMPLES = "samples"
"""The extra that holds each client's number of training samples."""
# From this size on, a model is mixed by itself and without a temporary: the loop over senders then
# costs less than gathering their rows.
_WIDE = 1 << 13


@dataclass(frozen=True)
class ReplyForm:
    """The shape of a server's answer to each client, fixed by the method.

    Between machines any other answer is refused.

    Args:
        models: how many models.
        fields: type and shape of each extra of one model.
    """

    models: int
    fields: Mapping[str, tuple[torch.dtype, tuple[int, ...]]] = field(default_factory=dict)


@dataclass(frozen=True)
class SecureAggregation(Configurable):
    """How a server that averages gets a sum of masked models, and no single one.

    Args:
        threshold: more than this share of a round's clients must take part to the end. It must be
            above 1/2. Against a server that lies about who left, with `c` of `m` clients on its
            side, it must be at least (1 + c/m) / 2: the default holds up to a third.
        min_clients: fewer clients are never summed.
    """

    threshold: Annotated[float, Gt(0.5), Le(1)] = 2 / 3
    min_clients: Annotated[int, Ge(3)] = 3

    def smallest_sum(self, cohort: int) -> int:
        """Return how many clients of a cohort must take part to the end.

        Example:
            >>> [SecureAggregation().smallest_sum(cohort) for cohort in (2, 3, 4, 6, 100)]
            [3, 3, 3, 5, 67]
        """
        # Rounded first: 2/3 of 3 is 2, whatever the last bit says.
        share = min(cohort, math.floor(round(self.threshold * cohort, 9)) + 1)
        return max(self.min_clients, share)


@dataclass(frozen=True)
class Message:
    """The messages of the hosted clients in one exchange of a round.

    Args:
        params: a model for each hosted client; without columns in an exchange of extras alone.
        fields: named extras, one row per client (samples, similarity vectors, loss traces).
        ids: the clients' ids; set by the exchange.
        expects: the form of a server's answer to it; None where the method does not fix one.
        sum_only: the terms under which the server may learn the weighted mean of the models and no
            single one; None where it sees each.
    """

    params: Float[Tensor, "clients params"]
    fields: Mapping[str, Shaped[Tensor, "clients ..."]] = field(default_factory=dict)
    ids: Int[Tensor, " clients"] | None = None
    expects: ReplyForm | None = None
    sum_only: SecureAggregation | None = None

    def __len__(self) -> int:
        return len(self.params)

    def take_rows(self, rows: Int[Tensor, " rows"]) -> "Message":
        """Return some of the rows; without a copy when they are all rows in order."""
        if torch.equal(rows, torch.arange(len(self))):
            return self
        fields, ids = index_each(self.fields, rows), index_optional(self.ids, rows)
        return replace(self, params=self.params[rows], fields=fields, ids=ids)

    @property
    def row_bytes(self) -> int:
        """The payload of one client's message, in bytes."""
        return sum(map(row_nbytes, (self.params, *self.fields.values())))


def messages_to_tensors(name: str, messages: Mapping[int, Message]) -> dict[str, Tensor]:
    """Return messages with ids, by the number of their exchange, as tensors for a checkpoint.

    Their names begin with `name.NUMBER`.
    """
    out: dict[str, Tensor] = {}
    for number, message in messages.items():
        assert message.ids is not None
        out |= {f"{name}.{number}.params": message.params, f"{name}.{number}.ids": message.ids}
        out |= prefix_keys(f"{name}.{number}.field.", message.fields)
    return out


def messages_from_tensors(name: str, tensors: Mapping[str, Tensor]) -> dict[int, Message]:
    """Invert `messages_to_tensors`; tensors with other names are ignored."""
    out = {}
    for number in {int(key.split(".")[1]) for key in tensors if key.startswith(f"{name}.")}:
        fields = select_prefix(f"{name}.{number}.field.", tensors)
        out[number] = Message(
            tensors[f"{name}.{number}.params"], fields, tensors[f"{name}.{number}.ids"]
        )
    return out


@dataclass(frozen=True)
class Limits:
    """How far messages may move their reader; see `exchange.accepting`.

    Args:
        own: the models that the readers published in this exchange.
        scale: the fraction, in [0, 1], of the way from the reader's own model to each slot's model
            that counts.
        samples: the most training samples that a peer counts for.
    """

    own: Float[Tensor, "clients params"]
    scale: Float[Tensor, "clients peers"]
    samples: Float[Tensor, " clients"]


@dataclass(frozen=True)
class Inbox:
    """The messages that the hosted clients received: one slot for each peer asked.

    Args:
        table: the model of each distinct sender, once; in a simulation also of members that
            nobody here asked, so that only rows in `index` where the mask is True are received.
        index: row of the table of each slot; 0 where the mask is False.
        peers: id of the peer asked in each slot; -1 for an unused slot.
        mask: whether the message arrived.
        age: age of the message in rounds.
        fields: the senders' extras, aligned with the table.
        bytes: payload received in each slot.
        part: the exchanged part of the models, if not all of them; other columns of the table are
            0.
        own: the reader's own models, if only a part was exchanged: they complete received parts
            before these are evaluated.
        limits: how far a message may move its reader, where that is bounded. `field_by_slot`,
            `mix` and `limited_models` apply it; `table` and `fields` hold what was sent.
    """

    table: Float[Tensor, "senders params"]
    index: Int[Tensor, "clients peers"]
    peers: Int[Tensor, "clients peers"]
    mask: Bool[Tensor, "clients peers"]
    age: Int[Tensor, "clients peers"]
    fields: Mapping[str, Shaped[Tensor, "senders ..."]]
    bytes: Int[Tensor, "clients peers"]
    part: ParameterSharing | None = None
    own: Float[Tensor, "clients params"] | None = None
    limits: Limits | None = None

    def field_by_slot(self, name: str) -> Shaped[Tensor, "clients peers ..."]:
        """Return an extra of each slot's sender.

        Slots without a message hold the value of an arbitrary sender: use the mask.
        """
        value = self.fields[name][self.index]
        if self.limits is None or name != SAMPLES:
            return value
        return torch.minimum(value, self.limits.samples[:, None].to(value))

    def first_slots(self, count: int) -> "Inbox":
        """Return the inbox with the first `count` slots of each client alone."""
        limits = self.limits
        if limits is not None:
            limits = replace(limits, scale=limits.scale[:, :count])
        return replace(
            self,
            index=self.index[:, :count],
            peers=self.peers[:, :count],
            mask=self.mask[:, :count],
            age=self.age[:, :count],
            bytes=self.bytes[:, :count],
            limits=limits,
        )

    def limited_models(
        self, row: int, slots: Int[Tensor, " slots"]
    ) -> Float[Tensor, "slots params"]:
        """Return the models in some slots of one client, each within the limits."""
        models = self.table[self.index[row, slots].to(self.table.device)]
        if self.limits is None:
            return models
        own, scale = self.limits.own[row], self.limits.scale[row, slots].to(models)[:, None]
        # A model within the limits keeps its bits.
        return torch.where(scale < 1, own + scale * (models - own), models)

    def mix(
        self,
        weights: Shaped[Tensor, "clients peers"],
        *,
        own: Float[Tensor, "clients params"],
        own_weight: Shaped[Tensor, " clients"],
    ) -> Float[Tensor, "clients params"]:
        """Return `own_weight * own + sum of weights * received`.

        No array of clients x peers x params is built. Columns that are not shared come from `own`.
        Slots without a message have weight 0; weights are not renormalized. Terms are added in the
        order of sender ids, client by client, so that the order of the slots and the other hosted
        clients change no bit. Where limits shorten a model's way, the rest of its weight goes to
        the model that the reader published.
        """
        if self.limits is None:
            mixed = self._mix_models(weights, own, own_weight)
        else:
            # A clipped model w + s (m - w) counts as s of it and 1 - s of the reader's own model.
            counted = (weights * self.limits.scale.to(weights)).to(weights.dtype)
            mixed = self._mix_models(counted, own, own_weight)
            order = torch.argsort(self.peers, dim=1, stable=True)
            # The rests are summed in the order of sender ids, as the models are.
            rest = torch.where(self.mask, weights - counted, 0).gather(1, order).sum(1)
            short = (rest != 0).nonzero().flatten().to(mixed.device)
            if len(short):
                mixed[short] += rest.to(mixed)[short, None] * self.limits.own[short]
        if self.part is not None:
            mixed = self.part.keep_local(own, mixed)
        return mixed

    def _mix_models(self, weights: Tensor, own: Tensor, own_weight: Tensor) -> Tensor:
        # Terms are added in the order of sender ids, whatever the order of the slots.
        order = torch.argsort(self.peers, dim=1, stable=True)
        index = self.index.gather(1, order)
        # Weights are rounded to the models' type once, before any product.
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
        # Looked up before the loop: a look at a device for each slot would wait for it.
        full = (weights != 0).all(0).tolist()
        index, weights = index.to(own.device), weights.to(own.device)
        out = own * own_weight.to(own.device)[:, None]
        # Clients at once; a client's sum is the same in any block.
        step = max(1, _CHUNK.get(own.device.type, _CHUNK["cuda"]) // max(1, own.shape[1]))
        for start in range(0, len(own), step):
            rows = slice(start, start + step)
            for slot in range(index.shape[1]):
                weight, received = weights[rows, slot, None], self.table[index[rows, slot]]
                if not full[slot]:  # a model that weighs nothing has no influence, be it NaN
                    received = received.masked_fill(weight == 0, 0)
                out[rows].addcmul_(weight, received)
        return out


@dataclass(frozen=True)
class Reply:
    """A server's answer: a table of models, and the rows of it that each client gets.

    Args:
        table: the models, each once.
        index: rows of the table for each client, in the order of the message's rows.
        fields: extras aligned with the table.
    """

    table: Float[Tensor, "senders params"]
    index: Int[Tensor, "clients peers"]
    fields: Mapping[str, Shaped[Tensor, "senders ..."]] = field(default_factory=dict)

    @staticmethod
    def to_every_client(table: Float[Tensor, "senders params"], clients: int) -> "Reply":
        """Answer every client with the whole table."""
        return Reply(table, torch.arange(len(table)).expand(clients, len(table)))

    def to_inbox(self, rows: Int[Tensor, " rows"] | None = None) -> Inbox:
        """Return the answer as an inbox of some clients; sender ids are rows of the table."""
        index = self.index
        if rows is not None:
            index = index[rows]
        size = row_nbytes(self.table) + sum(map(row_nbytes, self.fields.values()))
        return Inbox(
            table=self.table,
            index=index,
            peers=index,
            mask=torch.ones_like(index, dtype=torch.bool),
            age=torch.zeros_like(index),
            fields=self.fields,
            bytes=torch.full_like(index, size),
        )


def check_reply(reply: Reply, expects: ReplyForm | None) -> None:
    """Check a server's answer against the form that its method fixes.

    Raises:
        ExchangeError: with the found and the expected form.
    """
    if expects is None:
        return
    fields = {name: (value.dtype, tuple(value.shape[1:])) for name, value in reply.fields.items()}
    found = ReplyForm(reply.index.shape[1], fields)
    if found.models != expects.models or dict(found.fields) != dict(expects.fields):
        raise ExchangeError(
            f"the server's answer has {found.models} models with {dict(found.fields)}; "
            f"its method expects {expects.models} with {dict(expects.fields)}"
        )


COHORT = 1 << 10
"""Exchanges after the g-th choice of a cohort in a round are numbered from g times this.

So processes whose clients took no part in earlier exchanges use the same numbers again."""

Rule = Callable[[Any, Message], tuple[Any, Reply]]
"""A server's pure function: (shared state, message of the cohort) -> (shared state, reply).

The rows of the message are in the order of ids."""


def row_nbytes(table: Shaped[Tensor, "senders ..."]) -> int:
    """Return the size of one row in bytes."""
    if not len(table):
        return 0
    return table.element_size() * table[0].numel()


class PeersMissing(ExchangeError):
    """Some peers cannot be read: the caller may draw the round's peers again without them.

    Raised by `pull` of an exchange over a real network, only in the first exchange of a round, and
    a bounded number of times; a peer that is chosen again, or is missing later, is `mask == False`.

    Args:
        ids: ids of the missing peers.
    """

    def __init__(self, ids: Int[Tensor, " lost"]) -> None:
        super().__init__(f"clients {ids.tolist()} could not be read in this round")
        self.ids = ids


@runtime_checkable
class Exchange(Protocol):
    """The only door to other clients. Its contract is `coterie.testing.check_exchange`."""

    def begin_round(self, rng: Rng) -> None:
        """Start the round of `rng`. Its exchanges are numbered from 0."""
        ...

    def set_active(self, ids: Int[Tensor, " active"]) -> None:
        """Set the hosted clients that take part from now on; messages have their ids, in order."""
        ...

    def pull(self, message: Message, peers: Int[Tensor, "clients peers"]) -> Inbox:
        """Publish the hosted clients' messages, and return those of the chosen peers.

        Both are of this exchange.

        Args:
            message: a row for each hosted client that takes part in the round.
            peers: ids of the peers of each of them; -1 leaves a slot empty.
        """
        ...

    def ask_server(self, message: Message, rule: Rule, shared: Any) -> tuple[Any, Inbox]:
        """Send the messages to the server and return its answer.

        The server applies `rule` once, to the messages of the whole cohort.
        """
        ...

    def agree_on_cohort(
        self, compute: Callable[[], Int[Tensor, " active"]]
    ) -> Int[Tensor, " active"]:
        """Return the clients that take part from now on.

        The process in the server role computes them; others receive them from it. The server waits
        for these clients in `ask_server`. May be called again in a round, for another group.
        """
        ...

    def retire_clients(
        self, ids: Int[Tensor, " stopped"], params: Float[Tensor, "stopped params"]
    ) -> None:
        """Make stopped clients keep publishing these models, with their last messages' extras."""
        ...

    def skip_round(self, exchanges: int) -> None:
        """Pass a round without clients of this process; stopped clients still publish."""
        ...


Gather = Callable[[Float[Tensor, "clients _"]], Float[Tensor, "cohort _"]]
"""Collects the rows of all clients that take part, in the order of ids, from all processes.

Blocks of one population have it as `gather` and call it together. It serves experiments, whose
measurements and attacks see more than any client could. Exchanges between machines of several
owners have none.
"""


def find_gather(exchange: Exchange) -> Gather | None:
    """Return the function that collects rows of the whole cohort.

    None where all clients are hosted here, or where no process may see all of them.
    """
    return getattr(exchange, "gather", None)


Inner = TypeVar("Inner", bound=Exchange)


class ExchangeWrapper(Generic[Inner]):
    """An exchange around another one, `inner`: it passes on every call that a subclass keeps."""

    inner: Inner

    @property
    def server(self) -> bool:
        """Whether this process has the server role."""
        return bool(getattr(self.inner, "server", False))

    @property
    def gather(self) -> Gather | None:
        """The function that collects rows of the whole cohort; see `find_gather`."""
        return find_gather(self.inner)

    def begin_round(self, rng: Rng) -> None:
        """Pass on."""
        self.inner.begin_round(rng)

    def set_active(self, ids: Int[Tensor, " active"]) -> None:
        """Pass on."""
        self.inner.set_active(ids)

    def pull(self, message: Message, peers: Int[Tensor, "clients peers"]) -> Inbox:
        """Pass on."""
        return self.inner.pull(message, peers)

    def ask_server(self, message: Message, rule: Rule, shared: Any) -> tuple[Any, Inbox]:
        """Pass on."""
        return self.inner.ask_server(message, rule, shared)

    def agree_on_cohort(
        self, compute: Callable[[], Int[Tensor, " active"]]
    ) -> Int[Tensor, " active"]:
        """Pass on."""
        return self.inner.agree_on_cohort(compute)

    def retire_clients(
        self, ids: Int[Tensor, " stopped"], params: Float[Tensor, "stopped params"]
    ) -> None:
        """Pass on."""
        self.inner.retire_clients(ids, params)

    def skip_round(self, exchanges: int) -> None:
        """Pass on."""
        self.inner.skip_round(exchanges)


def check_peers(
    own: Int[Tensor, " clients"], peers: Int[Tensor, "clients peers"], population: int
) -> None:
    """Check the ids of the peers that clients ask for.

    Raises:
        ExchangeError: when a client asks for itself or for an id outside the population.
    """
    itself = (peers == own[:, None]).any(1)
    if bool(itself.any()):
        raise ExchangeError(
            f"client {int(own[itself][0])} asked for its own message; a client is not its own peer"
        )
    if bool((peers >= population).any()) or bool((peers < -1).any()):
        low, high = int(peers.min()), int(peers.max())
        raise ExchangeError(f"peer ids run from {low} to {high}; expected -1 to {population - 1}")


def find_withheld(board: Message) -> Bool[Tensor, " clients"]:
    """Return which messages reach nobody: those with a model that is NaN or infinite anywhere.

    The same holds for an extra. Nodes refuse to send them, so they do not count in one process
    either. The last entry is of no client.
    """
    lost = torch.zeros(len(board) + 1, dtype=torch.bool)
    lost[:-1] = not_finite(board.params)
    for name, value in board.fields.items():
        if not (value.is_floating_point() or value.is_complex()):
            continue
        unknown = not_finite(value)
        # Diverged models are reported by the loop; that an extra is the reason is said here.
        if bool((unknown & ~lost[:-1]).any()):
            warnings.warn(
                f"messages whose extra {name!r} holds NaN or infinity reach nobody, as between "
                "machines; send a finite number for an unknown value, and a second extra that "
                "says which are known",
                stacklevel=3,
            )
        lost[:-1] |= unknown
    return lost


def make_inbox(
    board: Message,
    own: Int[Tensor, " clients"],
    peers: Int[Tensor, "clients peers"],
    population: int,
) -> Inbox:
    """Read the messages of chosen peers from a board.

    Args:
        board: the published messages, with ids.
        own: ids of the reading clients.
        peers: ids of the peers of each of them; -1 for an unused slot.
        population: number of clients; ids are below it.

    Raises:
        ExchangeError: see `check_peers`.
    """
    check_peers(own, peers, population)
    assert board.ids is not None
    # The row of each member, -1 without a message. Peer -1 reads the last entry, which no id has.
    place = torch.full((population + 1,), -1, dtype=torch.int64)
    place[board.ids] = torch.arange(len(board))
    index = place[peers]
    mask = (index >= 0) & (peers >= 0) & ~find_withheld(board)[index]
    return Inbox(
        table=board.params,
        # Every index is legal; the mask says which ones count.
        index=index.clamp(min=0),
        peers=peers,
        mask=mask,
        age=torch.zeros_like(index),
        fields=board.fields,
        # What did not arrive costs nothing.
        bytes=mask * board.row_bytes,
    )
