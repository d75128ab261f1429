"""Sequential schedules: clients act one after another and read each other's newest models.

Published code of two papers works so. It is reproduced in simulation by hosting one client at a time over a live
table; the methods do not change. Between real machines there is no such order, so these schedules stay here.
"""

import dataclasses
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from coterie.errors import ConfigError
from coterie.exchange import Inbox, Message, Rule, read
from coterie.methods.base import Info, PeerMethod, Round, State, map_tensors
from coterie.rng import Rng


class Live:
    """An exchange over a table that changes while the round goes on.

    Args:
        board: what can be read at first, with ids; copied.
        population: how many clients there are.
    """

    def __init__(self, board: Message, population: int) -> None:
        fields = {name: value.clone() for name, value in board.fields.items()}
        self.board = Message(board.params.clone(), fields, board.ids)
        self.population = population
        self._reader, self._pulled = torch.zeros(1, dtype=torch.int64), False

    def begin(self, rng: Rng) -> None:
        """Start a round: the table stays."""

    def enter(self, ids: Int[Tensor, " active"]) -> None:
        """Say who acts now."""
        self._reader, self._pulled = ids, False

    def pull(self, message: Message, peers: Int[Tensor, "clients peers"]) -> Inbox:
        """Read the newest models of the chosen peers."""
        if self._pulled:
            raise ConfigError("a method with two exchanges a round runs in the synchronous schedule only")
        self._pulled = True
        return read(self.board, self._reader, peers, self.population)

    def update(self, row: int, message: Message) -> None:
        """Show what one client publishes from now on."""
        self.board.params[row] = message.params[0]
        for name, value in message.fields.items():
            self.board.fields[name][row] = value[0]

    def serve(self, message: Message, rule: Rule, shared: Any) -> tuple[Any, Inbox]:
        """Refuse: sequential schedules are for peer-to-peer methods."""
        raise ConfigError("a sequential schedule is for peer-to-peer methods; this one has a server")

    def cohort(self, compute: Any) -> Int[Tensor, " active"]:
        """Choose who takes part."""
        return compute()

    def retire(self, ids: Int[Tensor, " stopped"], params: Float[Tensor, "stopped params"]) -> None:
        """Nothing to do: stopped clients are on the board."""

    def idle(self, exchanges: int) -> None:
        """Nothing to do."""


def sequential_round(
    method: PeerMethod, rnd: Round, state: State, schedule: str, standing: Message | None
) -> tuple[State, Info]:
    """Run one round client after client, in an order drawn anew each round.

    Args:
        method: a peer-to-peer method with one exchange a round.
        rnd: the round, with all clients that take part.
        state: their state; not changed.
        schedule: "sequential_exchange" (all exchange one after another, then all train) or "sequential" (each client
            exchanges and trains before the next one acts).
        standing: what the clients that stopped go on publishing, with ids.
    """
    state = State(state.params.clone(), map_tensors(state.memory, torch.clone), state.shared)
    info_of: list[dict[str, Tensor]] = [{} for _ in range(len(rnd.ids))]
    live = Live(_with_standing(method.message(rnd.task, state), rnd.ids, standing), rnd.task.population)
    for row in rnd.rng.generator("order").permutation(len(rnd.ids)).tolist():
        one = torch.tensor([row])
        alone = dataclasses.replace(rnd, task=rnd.task.rows(one), exchange=live)
        live.enter(alone.ids)
        new, info = method.settled_exchange(alone, state.take(one))
        if schedule == "sequential":
            new, trained = method.train(alone, new)
            info = {**info, **trained}
        _assign(state, row, new)
        live.update(row, method.message(alone.task, new))
        info_of[row] = dict(info)
    joined = {name: torch.cat([info[name] for info in info_of]) for name in (info_of[0] if info_of else {})}
    if schedule == "sequential_exchange":
        state, trained = method.train(rnd, state)
        joined |= trained
    return state, joined


def _with_standing(message: Message, ids: Tensor, standing: Message | None) -> Message:
    """Add the messages of stopped clients to a board."""
    if standing is None or standing.ids is None:
        return dataclasses.replace(message, ids=ids)
    fields = {name: torch.cat([value, standing.fields[name]]) for name, value in message.fields.items()}
    return Message(torch.cat([message.params, standing.params]), fields, torch.cat([ids, standing.ids]))


def _assign(state: State, row: int, new: State) -> None:
    """Put one client's new state into a state that is owned here."""
    state.params[row] = new.params[0]
    if state.memory is not None:
        for item in dataclasses.fields(state.memory):
            getattr(state.memory, item.name)[row] = getattr(new.memory, item.name)[0]
