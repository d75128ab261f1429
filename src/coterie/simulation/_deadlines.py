"""Rounds with a deadline: who is not done by then misses the round.

A round ends when all are done, at its deadline at the latest. What comes later is dropped: a server
averages what it has, and a message of a peer counts as missing, with its bytes. The late client
goes on with its training; until that is over its model is the one from before, it is in no round,
and nobody can read it. It takes part again in the first round that begins afterwards.

So servers report in Bonawitz et al., Towards federated learning at scale: system design, 2019,
https://arxiv.org/abs/1902.01046: a device that reports after the window is ignored, and more are
chosen than needed (here `participation`). Nishio and Yonetani, Client selection for federated
learning with heterogeneous resources in mobile edge, 2019, https://arxiv.org/abs/1804.08333, choose
clients by what they can do before a deadline, which is not done here.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from coterie._util.mappings import prefix_keys, select_prefix
from coterie.errors import ConfigError
from coterie.exchange.base import Exchange, ExchangeWrapper, Inbox, Message, Reply, Rule
from coterie.functional import metrics
from coterie.methods.base import Info, Round, State, list_tensors
from coterie.rng import Rng
from coterie.runtime.extensions import TimeExtension
from coterie.runtime.loop import Loop
from coterie.runtime.virtual_time import SECOND, Clock
from coterie.simulation._asynchronous import copy_state, list_parts


class PunctualExchange(ExchangeWrapper[Exchange]):
    """A wrapper of another exchange that drops what comes after the deadline of a round.

    Args:
        inner: the exchange underneath, of a process that hosts all clients.
        exchanges: how many exchanges a round makes.
    """

    def __init__(self, inner: Exchange, exchanges: int) -> None:
        self.inner, self.exchanges = inner, exchanges
        self._round: _TimedRound | None = None

    def open_round(self, timed: "_TimedRound") -> None:
        """Drop what comes too late from now on."""
        self._round = timed

    def close_round(self) -> None:
        """Let everything pass: between rounds nothing takes time."""
        self._round = None

    def pull(self, message: Message, peers: Int[Tensor, "clients peers"]) -> Inbox:
        """Publish and read what comes in time: see `Exchange.pull`.

        The bytes of late messages are counted, except for a reader that is late itself, which does
        not ask.
        """
        inbox = self.inner.pull(message, peers)
        if self._round is None:
            return inbox
        late = self._round.find_late(inbox)
        asks = ~self._round.misses_exchange()[:, None]
        return replace(inbox, mask=inbox.mask & ~late & asks, bytes=inbox.bytes * asks)

    def ask_server(self, message: Message, rule: Rule, shared: Any) -> tuple[Any, Inbox]:
        """Send to the server, which sees what comes in time: see `Exchange.ask_server`."""
        timed = self._round
        if timed is None:
            return self.inner.ask_server(message, rule, shared)
        timed.sent += message.row_bytes
        timed.asked += 1
        if timed.asked == self.exchanges:
            rule = _leave_out(rule, timed.clients[timed.is_late_at_server()])
        shared, reply = self.inner.ask_server(message, rule, shared)
        timed.received += reply.bytes.sum(1).cpu().numpy()
        return shared, reply

    def snapshot(self) -> dict[str, Tensor]:
        """Return what the exchange underneath keeps."""
        return getattr(self.inner, "snapshot", dict)()

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the result of `snapshot`."""
        restore = getattr(self.inner, "restore", None)
        if restore is not None:
            restore(tensors)


def _leave_out(rule: Rule, late: Int[np.ndarray, " late"]) -> Rule:
    """Return the rule of a server that does not see the messages of late clients."""

    def see_others(shared: Any, message: Message) -> tuple[Any, Reply]:
        assert message.ids is not None
        rows = (~torch.isin(message.ids, torch.from_numpy(late))).nonzero().flatten()
        index = torch.zeros(len(message), 0, dtype=torch.int64)
        if not len(rows):
            return shared, Reply(message.params[:0], index)
        shared, reply = rule(shared, message.take_rows(rows))
        if len(rows) < len(message) and reply.index.shape[1]:
            raise ConfigError(
                "time.deadline_seconds is set, and the method's server answers the last exchange "
                "of a round with models; late clients are not there to receive them"
            )
        if not reply.index.shape[1]:
            reply = replace(reply, index=index)
        return shared, reply

    return see_others


class _TimedRound:
    """When the messages of one round come.

    Args:
        clock: says how long things take.
        index: number of the round.
        begin: when it begins, in nanoseconds.
        deadline: when it ends at the latest.
        clients: who takes part.
        reads_first: whether peers read before they train.
    """

    def __init__(
        self,
        clock: Clock,
        index: int,
        begin: int,
        deadline: int,
        clients: Int[np.ndarray, " clients"],
        *,
        reads_first: bool,
    ) -> None:
        self.clock, self.index, self.begin, self.deadline = clock, index, begin, deadline
        self.clients = clients
        self.sent = np.zeros(len(clients))
        self.received = np.zeros(len(clients))
        self.asked = 0
        # Of a peer that trains first a message leaves when its training ends; other messages, those
        # of clients that stopped included, are there from the beginning.
        self.published = np.full(len(clock.work), begin)
        if not reads_first:
            self.published[clients] = self._end_trainings(np.full(len(clients), begin))

    def _end_trainings(self, starts: Int[np.ndarray, " clients"]) -> Int[np.ndarray, " clients"]:
        ends = np.zeros_like(starts)
        for place, client in enumerate(self.clients.tolist()):
            ends[place], _ = self.clock.end_round(client, self.index, int(starts[place]))
        return ends

    def misses_exchange(self) -> Bool[Tensor, " clients"]:
        """Return which clients are not there to read: their training ends after the deadline."""
        return torch.from_numpy(self.published[self.clients] > self.deadline)

    def find_late(self, inbox: Inbox) -> Bool[Tensor, "clients peers"]:
        """Return which messages come after the deadline."""
        senders = inbox.peers.clamp(min=0).numpy()
        delays = self.clock.message_delays(self.clients[:, None], senders, inbox.bytes.numpy())
        return torch.from_numpy(self.published[senders] + delays > self.deadline)

    def is_late_at_server(self) -> Bool[np.ndarray, " clients"]:
        """Return whose trained model reaches the server after the deadline."""
        down = self.clock.move_to_server(self.clients, self.received)
        ends = self._end_trainings(self.begin + down)
        return ends + self.clock.move_to_server(self.clients, self.sent) > self.deadline


class DeadlineLoop(Loop):
    """A run whose rounds end at a deadline; see `Loop`, and the module.

    Raises:
        ConfigError: when the process does not host all clients, nobody can be in time, or a setting
            or the method does not go with it.
    """

    def _prepare_schedule(self) -> None:
        method = self.method
        if "pool" in method.needs:
            raise ConfigError(
                f"time.deadline_seconds is set; {method.kind} has the data of all clients in one "
                "place, and nobody is late: leave it out"
            )
        self.exchange = self.door = PunctualExchange(self.exchange, method.exchanges)
        self.timing = next(one for one in self.extensions if isinstance(one, TimeExtension))
        self._check_deadline()
        # Models of late clients, as they are when their training is over; None before anybody is.
        self.flight: State | None = None
        # Until when each client trains on after a deadline, in nanoseconds; 0 for who does not.
        self.busy = torch.zeros(len(self.task), dtype=torch.int64)
        self._before = self.state

    def _check_deadline(self) -> None:
        """Require that one client can be in time."""
        assert self.timing.span is not None
        fastest = float(self.timing.clock.work.min())
        if fastest * SECOND > self.timing.span:
            raise ConfigError(
                f"time.deadline_seconds is {self.timing.span / SECOND:g}; expected at least "
                f"{fastest:g}, the seconds in which the fastest client trains: nobody would be in "
                "time"
            )

    def _run_round(self, index: int) -> None:
        self._before = self.state
        super()._run_round(index)

    def _begin_phase(self, index: int) -> None:
        super()._begin_phase(index)
        self._before = self.state
        # Who still trains enrolls again as well: what it remembers is of the new clusters.
        if "truth" in self.method.needs and self.flight is not None:
            new = list_tensors(self.state.memory)
            for mine, other in zip(list_tensors(self.flight.memory), new, strict=True):
                mine.copy_(other)

    def _choose_cohort(self, rng: Rng) -> Tensor:
        """Leave out who still trains."""
        cohort = super()._choose_cohort(rng)
        return cohort[self.busy[cohort] <= self.timing.now]

    def _apply_method(self, rnd: Round, state: State) -> tuple[State, Info]:
        self.door.open_round(
            _TimedRound(
                self.timing.clock,
                rnd.index,
                self.timing.now,
                self.timing.deadline,
                rnd.ids.numpy(),
                # A server's clients train in any case before they send.
                reads_first=rnd.order == "exchange_first" or self.method.server,
            )
        )
        try:
            return super()._apply_method(rnd, state)
        finally:
            self.door.close_round()

    def _finish_round(self, index: int, rows: Int[Tensor, " rows"], info: Info) -> None:
        """Hold back what late clients trained, and give out what is done by now."""
        if index >= 0 and len(rows):
            info = self._hold_back(rows, info)
        elif index >= 0:
            ended = torch.full((len(self.task),), self.timing.pass_round(), dtype=torch.float64)
            name = metrics.ELAPSED.name
            self.record.add_metrics(index, self.task.ids, "train", "current", {name: ended})
        self._give_out()
        super()._finish_round(index, rows, info)

    def _hold_back(self, rows: Int[Tensor, " rows"], info: Info) -> Info:
        """Keep the models of late clients as they were; return the report of the round."""
        late = torch.from_numpy(self.timing.late)
        held = rows[late]
        if not len(held):
            return info
        if self.flight is None:
            self.flight = copy_state(self.state)
        self.flight = self.flight.assign_rows(held, self.state.select_rows(held))
        before = replace(self._before.select_rows(held), shared=self.state.shared)
        self.state = self.state.replace_rows(held, before)
        self.busy[held] = torch.from_numpy(self.timing.done)[late]
        if "trained" in info:
            models, places = info["trained"], late.nonzero().flatten()
            info = {
                **info,
                "trained": models.index_copy(0, places.to(models.device), before.params),
            }
        return info

    def _give_out(self) -> None:
        """Give late clients the models whose training is over."""
        done = ((self.busy > 0) & (self.busy <= self.timing.now)).nonzero().flatten()
        if not len(done):
            return
        assert self.flight is not None
        new = replace(self.flight.select_rows(done), shared=self.state.shared)
        self.state = self.state.replace_rows(done, new)
        self.busy[done] = 0
        self.tracker = self.tracker.note_changed(done)

    def snapshot(self) -> dict[str, Tensor]:
        """Return who still trains, and what comes of it."""
        out = {"busy": self.busy}
        if self.flight is not None:
            out |= prefix_keys("flight.", list_parts(self.flight))
        return out

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the result of `snapshot`."""
        if not tensors:
            return
        self.busy = tensors["busy"].clone()
        held = select_prefix("flight.", tensors)
        self.flight = copy_state(self.state) if held else None
        if self.flight is not None:
            for name, mine in list_parts(self.flight).items():
                mine.copy_(held[name])
