"""Mailbox: an exchange between several hosts in one program, for tests and threads.

It has the contract of every exchange, so a population hosted in any grouping must give the result
of a simulation.
"""

from collections.abc import Callable
from dataclasses import replace
from threading import Condition
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from coterie.errors import ExchangeError
from coterie.exchange.base import COHORT, Inbox, Message, Reply, Rule, check_peers, make_inbox
from coterie.exchange.in_memory import InMemory
from coterie.rng import Rng


class PostOffice:
    """The messages of several hosts in one program, for tests and threads.

    Args:
        population: number of clients in all. Create the mailboxes of all hosts before the first one
            starts.
        timeout: seconds to wait for the others before a message counts as missing.
    """

    def __init__(self, population: int, timeout: float = 60.0) -> None:
        self.population, self.timeout = population, timeout
        self._boxes: dict[tuple[int, int], dict[int, tuple[Message, int]]] = {}
        self._replies: dict[tuple[int, int], tuple[Any, Reply, Tensor]] = {}
        self._cohorts: dict[tuple[int, int], Tensor] = {}
        self._rounds: dict[int, int] = {}  # of each host
        self._change = Condition()

    def begin_round(self, host: object, round: int) -> None:
        """Record that a host starts a round, and drop messages of rounds that all hosts passed."""
        with self._change:
            self._rounds[id(host)] = round
            # A host that lags may still read the messages of its round.
            oldest = min(self._rounds.values())
            for shelf in (self._boxes, self._replies, self._cohorts):
                for address in list(shelf):
                    if address[0] < oldest:
                        del shelf[address]

    def post_message(self, address: tuple[int, int], message: Message) -> None:
        """Publish a message with ids at (round, number of the exchange)."""
        assert message.ids is not None
        with self._change:
            box = self._boxes.setdefault(address, {})
            for row, client in enumerate(message.ids.tolist()):
                box[client] = (message, row)
            self._change.notify_all()

    def collect_messages(self, address: tuple[int, int], wanted: set[int]) -> Message | None:
        """Wait for some clients' messages, and return the arrived ones in the order of ids."""
        with self._change:
            self._change.wait_for(lambda: wanted <= set(self._boxes.get(address, {})), self.timeout)
            # Other hosts go on adding to the box when the lock is released.
            box = dict(self._boxes.get(address, {}))
        came = sorted(wanted & set(box))
        if not came:
            return None
        parts, fields = [], {}
        for client in came:
            message, row = box[client]
            parts.append(message.take_rows(torch.tensor([row])))
        for name in parts[0].fields:
            fields[name] = torch.cat([part.fields[name] for part in parts])
        return Message(torch.cat([part.params for part in parts]), fields, torch.tensor(came))

    def announce_cohort(self, address: tuple[int, int], ids: Int[Tensor, " active"]) -> None:
        """Publish the server's cohort, at (round, number of the cohort in it)."""
        with self._change:
            self._cohorts[address] = ids
            self._change.notify_all()

    def wait_for_cohort(self, address: tuple[int, int]) -> Int[Tensor, " active"]:
        """Wait for the server's cohort."""
        with self._change:
            if not self._change.wait_for(lambda: address in self._cohorts, self.timeout):
                raise ExchangeError(
                    f"no server chose a cohort in round {address[0]}; "
                    "is a process in the server role?"
                )
            return self._cohorts[address]

    def post_reply(self, address: tuple[int, int], shared: Any, reply: Reply, ids: Tensor) -> None:
        """Publish a server's reply."""
        with self._change:
            self._replies[address] = (shared, reply, ids)
            self._change.notify_all()

    def wait_for_reply(self, address: tuple[int, int]) -> tuple[Any, Reply, Tensor]:
        """Wait for a server's reply."""
        with self._change:
            if not self._change.wait_for(lambda: address in self._replies, self.timeout):
                raise ExchangeError(
                    f"no server answered in round {address[0]}; is one process in the server role?"
                )
            return self._replies[address]


class Mailbox:
    """One process's exchange over a post office.

    Args:
        office: the post office shared with the other processes.
        ids: the clients hosted here.
        server: whether this process has the server role.
    """

    def __init__(
        self, office: PostOffice, ids: Int[Tensor, " clients"], *, server: bool = False
    ) -> None:
        self.office, self.ids, self.server = office, ids, server
        self._own = InMemory(ids, office.population)
        self._round, self._number, self._groups = 0, 0, 0
        self._expected: Tensor | None = None  # the clients that the server role waits for
        # Before the warm-up (-1): no message is dropped until every host has started.
        office.begin_round(self, -2)

    def begin_round(self, rng: Rng) -> None:
        """Start a round."""
        self._round, self._number, self._groups, self._expected = rng.round, 0, 0, None
        self._own.begin_round(rng)
        self.office.begin_round(self, rng.round)

    def set_active(self, ids: Int[Tensor, " active"]) -> None:
        """Set the clients that take part in this round."""
        self._own.set_active(ids)

    def _next_address(self) -> tuple[int, int]:
        number, self._number = self._number, self._number + 1
        return self._round, number

    def pull(self, message: Message, peers: Int[Tensor, "clients peers"]) -> Inbox:
        """Publish and wait for the chosen peers."""
        check_peers(self._own.active, peers, self.office.population)
        address = self._next_address()
        self.office.post_message(address, self._own.publish_message(message))
        board = self.office.collect_messages(address, set(peers[peers >= 0].tolist()))
        if board is None:
            # Nothing arrived: the own message stands in, under an id that no peer has.
            board = replace(message, ids=torch.full((len(message),), self.office.population))
        return make_inbox(board, self._own.active, peers, self.office.population)

    def ask_server(self, message: Message, rule: Rule, shared: Any) -> tuple[Any, Inbox]:
        """Send messages to the process in the server role, and wait for its answer."""
        address = self._next_address()
        ids = self._own.active
        # The server posts its own clients' messages first, and only then waits for the others'.
        self.office.post_message(address, replace(message, ids=ids))
        if self.server:
            expected = range(self.office.population)
            if self._expected is not None:
                expected = self._expected.tolist()
            whole = self.office.collect_messages(address, set(expected))
            if whole is None or whole.ids is None:
                raise ExchangeError(
                    f"no client's message reached the server in round {self._round}"
                )
            self.office.post_reply(address, *rule(shared, whole), whole.ids)
        new, reply, order = self.office.wait_for_reply(address)
        # The place of each hosted client among the messages that the server answered.
        rows = torch.tensor([int((order == client).nonzero()) for client in ids], dtype=torch.int64)
        if self.server:
            shared = new
        return shared, reply.to_inbox(rows)

    def agree_on_cohort(
        self, compute: Callable[[], Int[Tensor, " active"]]
    ) -> Int[Tensor, " active"]:
        """Compute the cohort in the server role, or receive it elsewhere.

        Exchanges are renumbered, so that a process that took no part in the last ones is in step
        again.
        """
        address, self._groups = (self._round, self._groups), self._groups + 1
        # Hosts without clients in an earlier group have made fewer exchanges.
        self._number = self._groups * COHORT
        if self.server:
            self.office.announce_cohort(address, compute())
        self._expected = self.office.wait_for_cohort(address)
        return self._expected

    def retire_clients(
        self, ids: Int[Tensor, " stopped"], params: Float[Tensor, "stopped params"]
    ) -> None:
        """Make stopped clients keep publishing."""
        self._own.retire_clients(ids, params)

    def skip_round(self, exchanges: int) -> None:
        """Publish the messages of stopped clients."""
        empty = torch.zeros(0, dtype=torch.int64)
        # No hosted client takes part: only the stopped ones are published.
        self._own.set_active(empty)
        for number in range(exchanges):
            address, last = self._next_address(), self._own.last.get(number)
            if last is not None:
                self.office.post_message(address, self._own.publish_message(last.take_rows(empty)))
