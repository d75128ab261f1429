"""BlockExchange: the exchange between the blocks of one population.

Each block hosts some of the clients. In a pull it sends every other block the ids of the clients
that it reads there, and receives their messages alone; so a block holds its own rows and what its
clients read. In an exchange with a server every block gathers the messages of the cohort and
applies the method's pure rule itself: all end with the same bytes, and no block has the server
role. All blocks take part in every exchange, even if none of their clients does.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from threading import Condition
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from coterie.errors import CoterieError
from coterie.exchange.base import (
    Inbox,
    Message,
    Rule,
    check_peers,
    check_reply,
    make_inbox,
    messages_from_tensors,
    messages_to_tensors,
)
from coterie.exchange.in_memory import InMemory
from coterie.rng import Rng

Address = tuple[int, int, str]
"""Round, number of the exchange in it, and which part of the exchange."""
BlockPart = Message | Tensor | None
"""What a block sends to another one: messages with ids, or the ids of clients."""
Send = Callable[[Address, int, Any], None]
"""Sends a part to a block: the address, the number of the sender, and the part."""


class BlockInterrupted(CoterieError, RuntimeError):
    """Raised in a block that waits for another one which has ended."""


class Postbox:
    """The parts that other blocks sent to one block.

    Args:
        blocks: how many there are.
    """

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.parts: dict[Address, dict[int, Any]] = {}
        """What was received and is not collected yet: by address and sender."""
        # Ray may deliver a part twice, the copy soon after the first. A bound keeps the memory
        # constant.
        self._collected = deque[Address](maxlen=64)
        self._change = Condition()
        self._closed = False

    def put(self, address: Address, sender: int, part: Any) -> None:
        """Store a part; a copy of one that was collected already is ignored."""
        with self._change:
            if address in self._collected:
                return
            self.parts.setdefault(address, {})[sender] = part
            self._change.notify_all()

    def collect(self, address: Address) -> list[Any]:
        """Wait for the parts of all blocks, and return them in the order of blocks.

        Raises:
            BlockInterrupted: when the postbox was closed.
        """
        with self._change:
            self._change.wait_for(
                lambda: self._closed or len(self.parts.get(address, ())) == self.blocks
            )
            if self._closed:
                raise BlockInterrupted("another block of the population has ended")
            found = self.parts.pop(address)
            self._collected.append(address)
        # By number, not by arrival: what is computed from the parts must not depend on timing.
        return [found[number] for number in range(self.blocks)]

    def close(self) -> None:
        """Release a waiting thread with an error."""
        with self._change:
            self._closed = True
            self._change.notify_all()


class BlockLinks:
    """A block's connections to all others.

    Args:
        number: of this block.
        sends: sends a part to each block; its own entry is not used.
        postbox: of this block.
    """

    def __init__(self, number: int, sends: Sequence[Send], postbox: Postbox) -> None:
        self.number, self.sends, self.postbox = number, sends, postbox
        self.sent = 0
        """Bytes sent to other blocks so far."""

    def __len__(self) -> int:
        return len(self.sends)

    def all_to_all(self, address: Address, parts: Sequence[BlockPart]) -> list[BlockPart]:
        """All-to-all exchange: send each block its part, and return the parts received."""
        for number, (send, part) in enumerate(zip(self.sends, parts, strict=True)):
            if number != self.number:
                self.sent += count_bytes(part)
                send(address, self.number, part)
        # After the sends, so that the other blocks can go on while this one waits.
        self.postbox.put(address, self.number, parts[self.number])
        return self.postbox.collect(address)


def count_bytes(part: BlockPart) -> int:
    """Return the size of a part in bytes."""
    if part is None:
        return 0
    each = [part] if isinstance(part, Tensor) else [part.params, *part.fields.values()]
    return sum(one.numel() * one.element_size() for one in each)


def select_messages(board: Message | None, ids: Int[Tensor, " wanted"]) -> Message | None:
    """Return copies of the messages of some clients on a board; None without any.

    Not all of the clients need to be on it.

    Args:
        board: messages with ids, or none.
        ids: of the clients.
    """
    if board is None or not len(ids):
        return None
    assert board.ids is not None
    # Sort once, then find each id by bisection. `searchsorted` gives the length for an id above
    # all others, which clamp turns into a row that does not match.
    order = torch.argsort(board.ids)
    known = board.ids[order]
    at = torch.searchsorted(known, ids).clamp(max=max(0, len(known) - 1))
    rows = order[at][known[at] == ids] if len(known) else at[:0]
    if not len(rows):
        return None
    fields = {name: value[rows.to(value.device)] for name, value in board.fields.items()}
    return Message(board.params[rows.to(board.params.device)], fields, board.ids[rows])


def join_messages(parts: Sequence[BlockPart], like: Message) -> Message | None:
    """Return the messages of several blocks as one; None where no block has any."""
    found = [part for part in parts if isinstance(part, Message)]
    if not found:
        return None
    ids = torch.cat([part.ids for part in found if part.ids is not None])
    fields = {}
    for name, value in like.fields.items():
        fields[name] = torch.cat([part.fields[name].to(value.device) for part in found])
    return Message(torch.cat([part.params.to(like.params.device) for part in found]), fields, ids)


class BlockExchange:
    """One block's exchange with all others.

    Args:
        links: to the others.
        ids: the clients hosted here.
        owner: the block that hosts each member of the population.
        server: whether the method has a server: then every block does what a server does.
    """

    def __init__(
        self,
        links: BlockLinks,
        ids: Int[Tensor, " clients"],
        owner: Int[Tensor, " population"],
        *,
        server: bool,
    ) -> None:
        self.links, self.owner, self.server = links, owner, server
        self.population = len(owner)
        self.own = InMemory(ids, self.population)
        self._round, self._number, self._gathers = -1, 0, 0
        # By exchange: how many rows of the last board belong to clients that have not stopped.
        self._taking: dict[int, int] = {}

    def begin_round(self, rng: Rng) -> None:
        """Start a round."""
        self._round, self._number, self._gathers = rng.round, 0, 0
        self.own.begin_round(rng)

    def set_active(self, ids: Int[Tensor, " active"]) -> None:
        """Set the clients that take part from now on."""
        self.own.set_active(ids)

    def agree_on_cohort(
        self, compute: Callable[[], Int[Tensor, " active"]]
    ) -> Int[Tensor, " active"]:
        """Compute the cohort: every block knows what a server knows."""
        return compute()

    def retire_clients(
        self, ids: Int[Tensor, " stopped"], params: Float[Tensor, "stopped params"]
    ) -> None:
        """Make stopped clients keep publishing."""
        self.own.retire_clients(ids, params)

    def skip_round(self, exchanges: int) -> None:
        """Let other blocks read the stopped clients in a round without active clients here."""
        empty = torch.zeros(0, dtype=torch.int64)
        self.own.set_active(empty)
        for _ in range(exchanges):
            last = self.own.last.get(self._number)
            # An empty message with the fields of the last one: the board then has the stopped
            # clients alone.
            board = None if last is None else self._make_board(last.take_rows(empty))
            self._exchange_messages(board, empty)

    def pull(self, message: Message, peers: Int[Tensor, "clients peers"]) -> Inbox:
        """Publish, and read the chosen peers in any block; see `Exchange.pull`."""
        active = self.own.active
        check_peers(active, peers, self.population)
        # Each model travels once, however many clients of this block read it.
        came = self._exchange_messages(self._make_board(message), peers[peers >= 0].unique())
        board = join_messages(came, message)
        if board is None:
            # Ids outside of the population match no peer, so everything counts as missing.
            board = replace(message, ids=torch.full((len(message),), self.population))
        return make_inbox(board, active, peers, self.population)

    def ask_server(self, message: Message, rule: Rule, shared: Any) -> tuple[Any, Inbox]:
        """Gather the cohort's messages and apply the rule, as every block does."""
        message = replace(message, ids=self.own.active)
        whole = join_messages(
            self.links.all_to_all(self._make_address("cohort"), [message] * len(self.links)),
            message,
        )
        self._number += 1
        assert whole is not None
        assert whole.ids is not None
        # In ascending ids, as one process has them: the rule's sums must have the same order.
        order = torch.argsort(whole.ids)
        shared, reply = rule(shared, whole.take_rows(order))
        check_reply(reply, message.expects)
        return shared, reply.to_inbox(torch.searchsorted(whole.ids[order], self.own.active))

    def gather(self, rows: Float[Tensor, "clients _"]) -> Float[Tensor, "cohort _"]:
        """Return the rows of the cohort in the order of ids; see `exchange.base.Gather`.

        In a block where no client takes part, the rows may be of any width.
        """
        # A number of its own, because gathers do not count as exchanges of the method.
        own, address = Message(rows, {}, self.own.active), (self._round, self._gathers, "gathered")
        self._gathers += 1
        whole = join_messages(
            self.links.all_to_all(address, [own if len(rows) else None] * len(self.links)), own
        )
        if whole is None:
            return rows
        assert whole.ids is not None
        return whole.params[torch.argsort(whole.ids)]

    def snapshot(self) -> dict[str, Tensor]:
        """Return what a later round depends on: see `merge_snapshots`."""
        taking = {f"taking.{number}": torch.tensor(count) for number, count in self._taking.items()}
        return self.own.snapshot() | messages_to_tensors("last", self.own.last) | taking

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore this block's part of a snapshot of the whole population."""
        here = self.owner == self.links.number
        stopped = {}
        for name, value in tensors.items():
            # The second part of such a name is the client.
            if name.startswith("stopped.") and here[int(name.split(".")[1])]:
                stopped[name] = value
        self.own.restore(stopped)
        for number, board in messages_from_tensors("last", tensors).items():
            assert board.ids is not None
            # A board lists active clients in ascending ids, then stopped ones in ascending ids, so
            # the first fall separates them. Without a fall, both parts join in the same order
            # wherever the split is.
            falls = (board.ids[1:] < board.ids[:-1]).nonzero().flatten()
            taking = int(falls[0]) + 1 if len(falls) else len(board)
            mine = here[board.ids]
            self._taking[number] = int(mine[:taking].sum())
            self.own.last[number] = board.take_rows(mine.nonzero().flatten())

    def _make_address(self, part: str) -> Address:
        return self._round, self._number, part

    def _make_board(self, message: Message) -> Message:
        self._taking[self._number] = len(message)
        return self.own.publish_message(message)

    def _exchange_messages(
        self, board: Message | None, wanted: Int[Tensor, " wanted"]
    ) -> list[BlockPart]:
        """Exchange the wanted ids with all blocks, then the messages that they asked for."""
        # The owner answers for its clients: one question for each block, also an empty one.
        owner = self.owner[wanted]
        asked = self.links.all_to_all(
            self._make_address("wanted"), [wanted[owner == one] for one in range(len(self.links))]
        )
        parts = [select_messages(board, ids) if isinstance(ids, Tensor) else None for ids in asked]
        came = self.links.all_to_all(self._make_address("messages"), parts)
        self._number += 1
        return came


def merge_snapshots(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the snapshot of the whole population's `InMemory`, from those of its blocks."""
    out: dict[str, Tensor] = {}
    for part in parts:
        for name, value in part.items():
            if not name.startswith(("last.", "taking.")):
                out[name] = value
    # As in `InMemory`, boards of past rounds matter only where stopped clients repeat their
    # messages.
    if not any(name.startswith("stopped.") for name in out):
        return out
    boards = [messages_from_tensors("last", part) for part in parts]
    for number in sorted(set[int]().union(*boards)):
        # All active rows first, then all stopped ones: the order of a board in one process.
        taking, gone = list[Message](), list[Message]()
        for part, own in zip(parts, boards, strict=True):
            if number in own:
                split, rows = int(part[f"taking.{number}"]), torch.arange(len(own[number]))
                taking.append(own[number].take_rows(rows[:split]))
                gone.append(own[number].take_rows(rows[split:]))
        whole = join_messages([*taking, *gone], taking[0])
        assert whole is not None
        out |= messages_to_tensors("last", {number: whole})
    return out
