"""InMemory: the exchange of a simulation, where all clients are hosted and reading is indexing."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from coterie._util.mappings import number_items, prefix_keys, select_prefix
from coterie.errors import ExchangeError
from coterie.exchange.base import (
    Inbox,
    Message,
    Rule,
    check_reply,
    make_inbox,
    messages_from_tensors,
    messages_to_tensors,
)
from coterie.rng import Rng


class InMemory:
    """All clients of the population in one process: a pull is indexing.

    Args:
        ids: the ids of the rows of a full message.
        population: number of clients.

    Attributes:
        last: the messages of each exchange of a round, by its number, as published last.
        stopped: the models of stopped clients, by id.
    """

    def __init__(self, ids: Int[Tensor, " clients"], population: int) -> None:
        self.ids, self.population = ids, population
        self.last: dict[int, Message] = {}
        self.stopped: dict[int, Tensor] = {}
        self._number = 0
        self.active = ids

    def begin_round(self, rng: Rng) -> None:
        """Start a round."""
        self._number = 0

    def set_active(self, ids: Int[Tensor, " active"]) -> None:
        """Set the clients that take part in this round; messages have their ids, in this order."""
        self.active = ids

    def agree_on_cohort(
        self, compute: Callable[[], Int[Tensor, " active"]]
    ) -> Int[Tensor, " active"]:
        """Compute the cohort."""
        return compute()

    def retire_clients(
        self, ids: Int[Tensor, " stopped"], params: Float[Tensor, "stopped params"]
    ) -> None:
        """Make stopped clients keep publishing."""
        self.stopped |= {int(i): row.clone() for i, row in zip(ids, params, strict=True)}

    def skip_round(self, exchanges: int) -> None:
        """Do nothing: in one process no other process waits."""

    def publish_message(self, message: Message) -> Message:
        """Return all messages of this exchange, those of stopped clients included."""
        number, self._number = self._number, self._number + 1
        message = replace(message, ids=self.active)
        if len(message) != len(self.active):
            raise ExchangeError(
                f"a message has {len(message)} rows; "
                f"expected {len(self.active)}, one a client hosted"
            )
        here = set(self.active.tolist())
        # Nothing is joined, so no model is copied.
        if not self.stopped:
            self.last[number] = message
            return message
        # A stopped client repeats the extras that it published last in this exchange.
        previous = self.last.get(number, message)
        assert previous.ids is not None
        place = number_items(previous.ids.tolist())
        # a client that stopped before it published in this exchange has no extras to repeat
        gone = [c for c in sorted(self.stopped) if c not in here and c in place]
        rows = torch.tensor([place[c] for c in gone], dtype=torch.int64)
        params = message.params[:0]
        if gone:
            params = torch.stack([self.stopped[client] for client in gone])
        # an exchange of extras alone has no columns
        params = params[:, : message.params.shape[1]]
        fields = {}
        for name, value in message.fields.items():
            old = previous.fields[name][rows].to(value.device)
            fields[name] = torch.cat([value, old])
        board = Message(
            torch.cat([message.params, params.to(message.params.device)]),
            fields,
            torch.cat([self.active, torch.tensor(gone, dtype=torch.int64)]),
        )
        self.last[number] = board
        return board

    def pull(self, message: Message, peers: Int[Tensor, "clients peers"]) -> Inbox:
        """Publish and read: see `Exchange.pull`."""
        own = self.active
        board = self.publish_message(message)
        return make_inbox(board, own, peers, self.population)

    def ask_server(self, message: Message, rule: Rule, shared: Any) -> tuple[Any, Inbox]:
        """Apply the rule to the whole message, in the order of ids: see `Exchange.ask_server`."""
        message = replace(message, ids=self.active)
        # The rule sees ascending ids; argsort of the order is its inverse and gives each client its
        # row.
        order = torch.argsort(self.active)
        shared, reply = rule(shared, message.take_rows(order))
        check_reply(reply, message.expects)
        return shared, reply.to_inbox(torch.argsort(order))

    def snapshot(self) -> dict[str, Tensor]:
        """Return the state that a later round depends on, for a checkpoint."""
        # The last messages serve stopped clients only.
        if not self.stopped:
            return {}
        out = prefix_keys("stopped.", self.stopped)
        return out | messages_to_tensors("last", self.last)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the result of `snapshot`."""
        stopped = select_prefix("stopped.", tensors)
        self.stopped = {int(client): model for client, model in stopped.items()}
        self.last |= messages_from_tensors("last", tensors)
