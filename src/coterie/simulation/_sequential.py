"""Sequential schedules: clients act one after another and read each other's newest models.

The published code of two papers works this way. It is reproduced in simulation over live tables,
one for each exchange of a round: a table holds what a client published before the round until that
client acts, and then what it would publish with its new state. So a method must be able to say what
it publishes in each exchange before the round (`PeerMethod.publish`). Clients that do not depend on
each other act together. Real machines have no such order.
"""

import dataclasses
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from coterie._util.mappings import map_values, number_items
from coterie.errors import ConfigError
from coterie.exchange.base import ExchangeWrapper, Inbox, Message, Rule, make_inbox
from coterie.exchange.narrowed import narrow_exchange, narrow_message
from coterie.methods.base import (
    Info,
    Method,
    PeerMethod,
    Round,
    State,
    concatenate_rows,
    exchange_with_retries,
    map_tensors,
    publish_all,
    train_locally,
)
from coterie.runtime.loop import Loop
from coterie.runtime.settings import Settings
from coterie.simulation._asynchronous import AsynchronousLoop
from coterie.simulation._asynchronous_server import AsynchronousServerLoop
from coterie.simulation._deadlines import DeadlineLoop
from coterie.simulation._publishing import StandingExchange, check_messages, make_published_messages


class SequentialLoop(Loop):
    """The rounds of a run in which clients act one after another; see `Loop`.

    Raises:
        ConfigError: when the method cannot be run by clients that act in sequence.
    """

    schedules = frozenset({"sequential_exchange", "sequential"})

    def _prepare_schedule(self) -> None:
        method, schedule = self.method, self.settings.schedule
        if not isinstance(method, PeerMethod):
            raise ConfigError(
                f"schedule = {schedule!r} is for peer-to-peer methods; {method.kind} has a server"
            )
        # Before the first round, because nothing may be written for a method that cannot do it.
        check_messages(method, self.task, self.state, schedule)

    def _apply_method(self, rnd: Round, state: State) -> tuple[State, Info]:
        assert isinstance(self.method, PeerMethod)
        standing = self._make_standing_messages(self.method)
        return run_sequential_round(self.method, rnd, state, self.settings.schedule, standing)

    def _make_standing_messages(self, method: PeerMethod) -> list[Message]:
        """Return what stopped clients keep publishing in each exchange; empty without any."""
        stopped = self.tracker.stopped.nonzero().flatten()
        if not len(stopped):
            return []
        models = self.tracker.best
        if self.settings.stopped_broadcast == "last":
            models = self.state.params
        state = dataclasses.replace(self.state.select_rows(stopped), params=models[stopped])
        # Stopped clients publish in every exchange, as if they acted with these models.
        messages = publish_all(method, self.task.select_clients(stopped), state)
        return [dataclasses.replace(message, ids=self.task.ids[stopped]) for message in messages]


def select_loop(settings: Settings, method: Method) -> type[Loop]:
    """Return the class of loop that runs the schedule of the settings with a method.

    Raises:
        ConfigError: when the settings are those of nodes alone.
    """
    if settings.pace != "common":
        raise ConfigError(
            f"pace is {settings.pace!r}, which is of nodes on machines; a simulation in which "
            "nobody waits has schedule = 'asynchronous' and a table of time"
        )
    if settings.schedule == "asynchronous" and method.server:
        return AsynchronousServerLoop
    if settings.has_deadline:
        return DeadlineLoop
    for loop in (Loop, AsynchronousLoop):
        if settings.schedule in loop.schedules:
            return loop
    return SequentialLoop


class LiveExchange(StandingExchange):
    """An exchange whose tables change during the round.

    Args:
        boards: the messages of each exchange at the start, with ids; copied.
        population: number of clients.
    """

    def __init__(self, boards: Sequence[Message], population: int) -> None:
        # exchanges of the same models share one copy
        models = {id(board.params): board.params.clone() for board in boards}
        self.boards = []
        for board in boards:
            fields = map_values(Tensor.clone, board.fields)
            self.boards.append(Message(models[id(board.params)], fields, board.ids))
        self.population = population
        self._reader, self._number = torch.zeros(1, dtype=torch.int64), 0

    def set_active(self, ids: Int[Tensor, " active"]) -> None:
        """Set the clients that act now. Their exchanges are numbered from 0."""
        self._reader, self._number = ids, 0

    def pull(self, message: Message, peers: Int[Tensor, "clients peers"]) -> Inbox:
        """Read the newest messages of the chosen peers in this exchange.

        Raises:
            ConfigError: when the method sends something else than its `publish` announced.
        """
        # A method that exchanges more often has no table for that exchange.
        if self._number >= len(self.boards):
            raise ConfigError(
                f"a method pulled more often in a round than the {len(self.boards)} exchanges "
                "that it declares"
            )
        board = self.boards[self._number]
        self._number += 1
        if (
            set(message.fields) != set(board.fields)
            or message.params.shape[1] != board.params.shape[1]
        ):
            raise ConfigError(
                f"exchange {self._number - 1} of a round publishes {_describe_message(message)}; "
                f"by `publish` it is {_describe_message(board)}"
            )
        return make_inbox(board, self._reader, peers, self.population)

    def update(self, rows: Int[Tensor, " rows"], messages: Sequence[Message]) -> None:
        """Replace the messages of some clients."""
        for board, message in zip(self.boards, messages, strict=True):
            # In place: clients that act later read the new rows.
            board.params[rows] = message.params
            for name, value in message.fields.items():
                board.fields[name][rows] = value

    def ask_server(self, message: Message, rule: Rule, shared: Any) -> tuple[Any, Inbox]:
        """Refuse: sequential schedules are for peer-to-peer methods."""
        raise ConfigError(
            "a sequential schedule is for peer-to-peer methods; this one has a server"
        )


def run_sequential_round(
    method: PeerMethod, rnd: Round, state: State, schedule: str, standing: Sequence[Message]
) -> tuple[State, Info]:
    """Run one round client after client, in an order drawn for each round.

    Clients that do not depend on each other act together, which changes only the speed.

    Args:
        method: a peer-to-peer method that says in `publish` what it publishes.
        rnd: the round, with all clients that take part.
        state: their state; not changed.
        schedule: "sequential_exchange" (all exchange one after another, then all train; with the
            order train_first all train before) or "sequential" (each client exchanges and trains,
            or trains and exchanges, before the next one acts).
        standing: the messages that stopped clients keep publishing in each exchange, with ids;
            empty when no client has stopped.
    """
    early = rnd.order == "train_first"
    together: dict[str, Tensor] = {}  # what training all clients at once reports
    if early and schedule == "sequential_exchange":
        state, info = train_locally(method, rnd, state)
        together = {**info, "trained": state.params}
    # Copies: rows are assigned below, and the caller's state must not change.
    state = State(state.params.clone(), map_tensors(state.memory, torch.clone), state.shared)
    shares = rnd.task.sharing
    boards = []
    published = make_published_messages(method, rnd.task, state)
    for board, kept in zip_longest(published, standing):
        if kept is not None:
            kept = narrow_message(shares, kept)
        boards.append(_add_standing_message(board, rnd.ids, kept))
    live = LiveExchange(boards, rnd.task.population)
    # The order is drawn from the round's own stream, for all clients that take part.
    order = rnd.rng.generator("order").permutation(len(rnd.ids)).tolist()
    # a client that trains first may choose other peers than from its state now
    readings = None
    if not early or schedule != "sequential":
        readings = _predict_reads(method, rnd, state, live)
    if readings is None:
        # One client at a time, since a later choice may depend on an earlier action.
        acted = [torch.tensor([row]) for row in order]
    else:
        acted = group_into_waves(order, readings)
    infos: list[Info] = []
    # Each wave reads the tables as the waves before left them.
    for rows in acted:
        own, info = state.select_rows(rows), {}
        part = dataclasses.replace(rnd, task=rnd.task.select_clients(rows))
        if schedule == "sequential" and early:
            own, trained = train_locally(method, part, own)
            info = {**trained, "trained": own.params}
        live.set_active(part.ids)
        door = narrow_exchange(live, shares, own.params)
        own, report = exchange_with_retries(method, dataclasses.replace(part, exchange=door), own)
        info = {**info, **report}
        if schedule == "sequential" and not early:
            own, trained = train_locally(method, part, own)
            info = {**info, **trained}
        state = state.assign_rows(rows, own)
        # After the whole wave: its clients do not depend on each other.
        live.update(rows, make_published_messages(method, part.task, own))
        infos.append(info)
    joined = _join_reports(infos, acted) | together
    if schedule == "sequential_exchange" and not early:
        state, trained = train_locally(method, rnd, state)
        joined |= trained
    return state, joined


def _describe_message(message: Message) -> str:
    return f"models of {message.params.shape[1]} numbers with {sorted(message.fields) or 'nothing'}"


class _PeersAsked(Exception):
    """Carries the peers that a method asks for out of its exchange, before anything is computed."""

    def __init__(self, peers: Tensor, *, last: bool) -> None:
        super().__init__()
        self.peers, self.last = peers, last


class _PeerProbe(ExchangeWrapper[LiveExchange]):
    """An exchange that records which peers clients ask for first, skipping empty exchanges."""

    def __init__(self, live: LiveExchange) -> None:
        self.inner, self._left = live, len(live.boards)

    def pull(self, message: Message, peers: Int[Tensor, "clients peers"]) -> Inbox:
        """Record the peers and stop, unless there are none."""
        self._left -= 1
        # An exchange without any peers brings nothing, so the probe goes on to the next one.
        if self._left and not bool((peers >= 0).any()):
            return self.inner.pull(message, peers)
        raise _PeersAsked(peers, last=not self._left)


def _predict_reads(
    method: PeerMethod, rnd: Round, state: State, live: LiveExchange
) -> list[list[int]] | None:
    """Return the rows that each row will read in the round, or None where that is not known.

    A client chooses its peers from its state before the round. In a later exchange the choice may
    depend on what was read in an earlier one, so it is not known in advance.
    """
    # Prediction uses the same tables; `set_active` starts the count of exchanges again.
    live.set_active(rnd.ids)
    door = narrow_exchange(_PeerProbe(live), rnd.task.sharing, state.params)
    try:
        method.exchange(dataclasses.replace(rnd, exchange=door), state)
    except _PeersAsked as asked:
        if not asked.last:
            return None
        # Peers that are not active do not act in this round, so nobody has to wait for them.
        row_of = number_items(rnd.ids.tolist())
        reads = []
        for peers in asked.peers.tolist():
            reads.append([row_of[peer] for peer in peers if peer in row_of])
        return reads
    # The method ended without asking for anybody.
    return [[] for _ in range(len(rnd.ids))]


def group_into_waves(
    order: Sequence[int], readings: Sequence[Sequence[int]]
) -> list[Int[Tensor, " rows"]]:
    """Group clients that act one after another into waves of clients that can act together.

    For two clients of which the first acts earlier: if the second reads the first, it acts in a
    later wave; if the first reads the second, the second does not act in an earlier wave.

    Args:
        order: the rows in the order in which they act.
        readings: the rows that each row reads.

    Returns:
        The rows of each wave, ascending.

    Example:
        >>> # 0 reads what 2 publishes; 2 reads 1 before 1 acts
        >>> group_into_waves([2, 0, 1], [[2], [], [1]])
        [tensor([1, 2]), tensor([0])]
    """
    wave = [0] * len(order)
    acted: set[int] = set()
    for row in order:
        # A client that reads one which acted before comes in a later wave.
        before = [wave[other] + 1 for other in readings[row] if other in acted]
        wave[row] = max([wave[row], *before])
        # A client that is read before it acts must not act earlier than its reader.
        for other in readings[row]:
            if other not in acted:
                wave[other] = max(wave[other], wave[row])
        acted.add(row)
    number = torch.tensor(wave, dtype=torch.int64)
    return [(number == index).nonzero().flatten() for index in range(max(wave, default=-1) + 1)]


def _join_reports(infos: Sequence[Info], rows: Sequence[Tensor]) -> dict[str, Tensor]:
    """Join the reports of the waves in the order of the rows."""
    if not infos:
        return {}
    # The inverse of the order of the waves.
    place = torch.argsort(torch.cat(list(rows)))
    joined = {}
    for name in infos[0]:
        joined[name] = concatenate_rows(name, [info[name] for info in infos])[place]
    return joined


def _add_standing_message(message: Message, ids: Tensor, standing: Message | None) -> Message:
    """Add the messages of stopped clients to a board."""
    if standing is None or standing.ids is None:
        return dataclasses.replace(message, ids=ids)
    fields = {}
    for name, value in message.fields.items():
        fields[name] = torch.cat([value, standing.fields[name]])
    return Message(
        torch.cat([message.params, standing.params]), fields, torch.cat([ids, standing.ids])
    )
