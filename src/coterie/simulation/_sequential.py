"""Sequential schedules: clients act one after another and read each other's newest models.

The published code of two papers works this way. It is reproduced in simulation over a live table; clients that do not
depend on each other act together, and methods need no change. Real machines have no such order.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from coterie.errors import ConfigError
from coterie.exchange.base import Inbox, Message, Rule, read
from coterie.exchange.narrowed import cut, narrowed
from coterie.methods.base import Info, PeerMethod, Round, State, map_tensors
from coterie.rng import Rng


class Live:
    """An exchange over a table that changes during the round.

    Args:
        board: the messages at the start, with ids; copied.
        population: number of clients.
    """

    def __init__(self, board: Message, population: int) -> None:
        fields = {name: value.clone() for name, value in board.fields.items()}
        self.board = Message(board.params.clone(), fields, board.ids)
        self.population = population
        self._reader, self._pulled = torch.zeros(1, dtype=torch.int64), False

    def begin(self, rng: Rng) -> None:
        """Start a round; the table is kept."""

    def enter(self, ids: Int[Tensor, " active"]) -> None:
        """Set the clients that act now."""
        self._reader, self._pulled = ids, False

    def pull(self, message: Message, peers: Int[Tensor, "clients peers"]) -> Inbox:
        """Read the newest models of the chosen peers."""
        if self._pulled:
            raise ConfigError("a method with two exchanges a round runs in the synchronous schedule only")
        self._pulled = True
        return read(self.board, self._reader, peers, self.population)

    def update(self, rows: Int[Tensor, " rows"], message: Message) -> None:
        """Replace the messages of some clients."""
        self.board.params[rows] = message.params
        for name, value in message.fields.items():
            self.board.fields[name][rows] = value

    def serve(self, message: Message, rule: Rule, shared: Any) -> tuple[Any, Inbox]:
        """Refuse: sequential schedules are for peer-to-peer methods."""
        raise ConfigError("a sequential schedule is for peer-to-peer methods; this one has a server")

    def cohort(self, compute: Any) -> Int[Tensor, " active"]:
        """Choose who takes part."""
        return compute()

    def retire(self, ids: Int[Tensor, " stopped"], params: Float[Tensor, "stopped params"]) -> None:
        """Do nothing: stopped clients are on the board."""

    def idle(self, exchanges: int) -> None:
        """Do nothing."""


def sequential_round(
    method: PeerMethod, rnd: Round, state: State, schedule: str, standing: Message | None
) -> tuple[State, Info]:
    """Run one round client after client, in an order drawn anew each round.

    Clients that do not depend on each other act together, which changes only the speed.

    Args:
        method: a peer-to-peer method with one exchange a round.
        rnd: the round, with all clients that take part.
        state: their state; not changed.
        schedule: "sequential_exchange" (all exchange one after another, then all train) or "sequential" (each client
            exchanges and trains before the next one acts).
        standing: the messages that stopped clients keep publishing, with ids.
    """
    state = State(state.params.clone(), map_tensors(state.memory, torch.clone), state.shared)
    shares = rnd.task.part
    standing = None if standing is None else cut(shares, standing)
    live = Live(_with_standing(cut(shares, method.message(rnd.task, state)), rnd.ids, standing), rnd.task.population)
    order = rnd.rng.generator("order").permutation(len(rnd.ids))
    infos: list[Info] = []
    acted = waves(order.tolist(), _readings(method, rnd, state))
    for rows in acted:
        door = narrowed(live, shares, state.params[rows])
        part = dataclasses.replace(rnd, task=rnd.task.rows(rows), exchange=door)
        live.enter(part.ids)
        new, info = method.settled_exchange(part, state.take(rows))
        if schedule == "sequential":
            new, trained = method.train(part, new)
            info = {**info, **trained}
        _assign(state, rows, new)
        live.update(rows, cut(shares, method.message(part.task, new)))
        infos.append(info)
    joined = _join(infos, acted)
    if schedule == "sequential_exchange":
        state, trained = method.train(rnd, state)
        joined |= trained
    return state, joined


class _Asked(Exception):
    """Carries the peers that a method asks for out of its exchange, before any result is computed."""

    def __init__(self, peers: Tensor) -> None:
        super().__init__()
        self.peers = peers


class _Listen(Live):
    """An exchange that only records which peers the clients ask for."""

    def __init__(self) -> None:
        """Hold nothing."""

    def pull(self, message: Message, peers: Int[Tensor, "clients peers"]) -> Inbox:
        """Record the peers and stop."""
        raise _Asked(peers)


def _readings(method: PeerMethod, rnd: Round, state: State) -> list[list[int]]:
    """Return the rows that each row will read; a client chooses them from its state before the round."""
    try:
        method.exchange(dataclasses.replace(rnd, exchange=_Listen()), state)
    except _Asked as asked:
        row_of = {client: row for row, client in enumerate(rnd.ids.tolist())}
        return [[row_of[peer] for peer in peers if peer in row_of] for peers in asked.peers.tolist()]
    return [[] for _ in range(len(rnd.ids))]


def waves(order: Sequence[int], readings: Sequence[Sequence[int]]) -> list[Int[Tensor, " rows"]]:
    """Group clients that act one after another into waves of clients that can act together.

    For two clients of which the first acts earlier: if the second reads the first, it acts in a later wave; if the
    first reads the second, the second does not act in an earlier wave.

    Args:
        order: the rows in the order in which they act.
        readings: the rows that each row reads.

    Returns:
        The rows of each wave, ascending.

    Example:
        >>> waves([2, 0, 1], [[2], [], [1]])  # 0 reads what 2 publishes; 2 reads 1 before 1 acts
        [tensor([1, 2]), tensor([0])]
    """
    wave = [0] * len(order)
    acted: set[int] = set()
    for row in order:
        before = [wave[other] + 1 for other in readings[row] if other in acted]
        wave[row] = max([wave[row], *before])
        for other in readings[row]:
            if other not in acted:
                wave[other] = max(wave[other], wave[row])
        acted.add(row)
    number = torch.tensor(wave, dtype=torch.int64)
    return [(number == index).nonzero().flatten() for index in range(max(wave, default=-1) + 1)]


def _join(infos: Sequence[Info], rows: Sequence[Tensor]) -> dict[str, Tensor]:
    """Join the reports of the waves in the order of the rows."""
    if not infos:
        return {}
    place = torch.argsort(torch.cat(list(rows)))
    return {name: torch.cat([info[name] for info in infos])[place] for name in infos[0]}


def _with_standing(message: Message, ids: Tensor, standing: Message | None) -> Message:
    """Add the messages of stopped clients to a board."""
    if standing is None or standing.ids is None:
        return dataclasses.replace(message, ids=ids)
    fields = {name: torch.cat([value, standing.fields[name]]) for name, value in message.fields.items()}
    return Message(torch.cat([message.params, standing.params]), fields, torch.cat([ids, standing.ids]))


def _assign(state: State, rows: Tensor, new: State) -> None:
    """Write the new state of some clients into a state owned by the caller."""
    state.params[rows] = new.params
    if state.memory is not None:
        for item in dataclasses.fields(state.memory):
            getattr(state.memory, item.name)[rows] = getattr(new.memory, item.name)
