"""Random: gossip with peers drawn uniformly in every round."""

from dataclasses import dataclass, replace
from typing import ClassVar, final

from coterie._util.settings import OwnFunction, PositiveInt
from coterie.engine.task import Task
from coterie.methods.base import (
    Info,
    Met,
    PeerMethod,
    Round,
    State,
    averaged,
    chosen_by,
    drawn_uniformly,
)
from coterie.methods.cost import Cost, Setting, reading
from coterie.rng import Rng


@dataclass(frozen=True)
class Gossip(PeerMethod):
    """Averaging with peers that are drawn in every round.

    Args:
        num_peers: peers read each round ($m$); clamped to population - 1.
        selection: import path of a rule of yours that says whom a client reads, a function of
            `functional.selection.Known`; a uniform draw when not given.
        aggregation: import path of a rule of yours that merges what was received, a function of
            `functional.aggregation.Received`; the average by numbers of samples when not given.
    """

    num_peers: PositiveInt = 5
    selection: OwnFunction | None = None
    aggregation: OwnFunction | None = None

    def memory(self, task: Task, rng: Rng) -> Met | None:
        """Remember who was read, for a rule."""
        return None if self.selection is None else Met.nobody(len(task), task.population)

    def exchange(self, rnd: Round, state: State) -> tuple[State, Info]:
        """Draw, pull, average."""
        message = self.message(rnd.task, state)
        if self.selection is None:
            inbox = rnd.exchange.pull(message, drawn_uniformly(rnd, self.num_peers))
        else:
            met: Met = state.memory
            peers = chosen_by(self.selection, rnd, self.num_peers, met)
            inbox = rnd.exchange.pull(message, peers)
            state = replace(state, memory=met.read(inbox, rnd.index))
        return averaged(rnd, state, inbox, self.aggregation)

    def cost(self, setting: Setting, round: int) -> Cost:
        """Read the peers' models."""
        return reading(setting, min(self.num_peers, setting.others))


@final
@dataclass(frozen=True)
class Random(Gossip):
    """Gossip averaging with uniformly drawn peers.

    Args:
        num_peers: peers read each round ($m$); clamped to population - 1.
        selection: import path of a rule of yours that says whom a client reads, a function of
            `functional.selection.Known`; a uniform draw when not given.
        aggregation: import path of a rule of yours that merges what was received, a function of
            `functional.aggregation.Received`; the average by numbers of samples when not given.
    """

    kind: ClassVar[str] = "random"
    summary: ClassVar[str] = "average with peers drawn uniformly in every round"
    references: ClassVar[tuple[str, ...]] = (
        "Boyd, Ghosh, Prabhakar, Shah, Randomized gossip algorithms, 2006, https://doi.org/10.1109/TIT.2006.874516",
    )
