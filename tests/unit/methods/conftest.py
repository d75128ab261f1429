"""A population that steps round by round, with everything its method reports."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from coterie.data.federation import Federation
from coterie.exchange.base import Exchange, Inbox, Message, make_inbox
from coterie.exchange.in_memory import InMemory
from coterie.methods.base import Info, Method, State
from coterie.rng import Rng
from coterie.runtime.loop import Loop
from coterie.runtime.record import Record
from coterie.simulation._sequential import select_loop
from coterie.testing import tiny_federation, tiny_settings
from coterie.testing.tiny import build_task


@dataclasses.dataclass
class Play:
    """A population and its method, after `step` or `steps` rounds."""

    loop: Loop
    infos: list[Info]

    @property
    def state(self) -> State:
        return self.loop.state

    @property
    def memory(self) -> Any:
        return self.loop.state.memory

    def steps(self, rounds: int) -> "Play":
        for _ in range(rounds):
            self.loop.run_next_round()
        return self

    def exchange(self, **changes: Any) -> tuple[State, Info]:
        """One exchange on the present state, which stays as it is."""
        loop = self.loop
        everybody = torch.arange(len(loop.task))
        rnd = loop._make_round(loop.next_round, everybody, torch.arange(loop.task.population))
        rnd = dataclasses.replace(rnd, rng=loop.rng.at_round(loop.next_round), **changes)
        rnd.exchange.begin_round(rnd.rng)
        rnd.exchange.set_active(rnd.ids)
        return loop.method.exchange(rnd, loop.state)


@pytest.fixture
def play(monkeypatch):
    """Start a run of a method: `play(method, federation, exchange, model, **settings)` has done its warm-up."""

    def start(
        method: Method,
        federation: Federation | None = None,
        exchange: Exchange | None = None,
        model: Any = "linear",
        **settings: Any,
    ) -> Play:
        federation = federation or tiny_federation()
        chosen = tiny_settings(**{"rounds": 1000, **settings})
        clusters = federation.truth.cluster if federation.truth is not None else None
        task = build_task(
            federation.host(federation.ids),
            model,
            init=chosen.init,
            buffers=chosen.buffers,
            dtype=torch.float64,
            clusters=clusters if "truth" in method.needs else None,
        )
        infos: list[Info] = []
        record = Record(torch.full((federation.population,), -1))
        add = record.add_edges

        def listen(index: int, ids: Any, info: Info) -> None:
            infos.append(info)
            add(index, ids, info)

        monkeypatch.setattr(record, "add_edges", listen)
        door = exchange or InMemory(federation.ids, federation.population)
        result = Play(
            select_loop(chosen, method)(task, method, door, chosen, Rng(3), record), infos
        )
        return result.steps(1)

    return start


class Disturbed(InMemory):
    """Simulates one fault in one exchange of every round.

    Args:
        federation: whose clients are hosted.
        number: of the exchange.
        late: the messages are those of the round before.
        deaf: ids of the clients that receive none.
    """

    def __init__(
        self, federation: Federation, number: int, *, late: bool = False, deaf: tuple[int, ...] = ()
    ) -> None:
        super().__init__(federation.ids, federation.population)
        self.number, self.late, self.deaf = number, late, deaf

    def pull(self, message: Message, peers: Tensor) -> Inbox:
        number, before = self._number, self.last.get(self._number)
        inbox = super().pull(message, peers)
        if number != self.number:
            return inbox
        if self.late and before is not None:
            return make_inbox(before, self.active, peers, self.population)
        return dataclasses.replace(
            inbox, mask=inbox.mask & ~torch.isin(self.active, torch.tensor(self.deaf))[:, None]
        )


@pytest.fixture
def disturbed():
    """An exchange with one fault: `disturbed(federation, number, late=False, deaf=())`."""
    return Disturbed


@pytest.fixture
def planted():
    """Make a federation whose clusters have some sizes, one after another: `planted([3, 1])`."""

    def make(sizes: list[int]) -> Federation:
        cluster = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        federation = tiny_federation(len(cluster), len(sizes), train=4, validation=2)
        assert federation.truth is not None
        return dataclasses.replace(
            federation, truth=dataclasses.replace(federation.truth, cluster=cluster)
        )

    return make


@pytest.fixture
def uneven() -> Federation:
    """Six clients with 12, 11, ... 7 training samples."""
    federation = tiny_federation()
    split = federation.split.clone()
    for client in range(len(split)):
        split[client, :client] = -1
    return dataclasses.replace(federation, split=split)
