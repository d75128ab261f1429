"""Random: gossip with peers drawn uniformly in every round."""

from dataclasses import dataclass, replace
from typing import ClassVar, final

from coterie._util.settings import CustomFunction, PositiveInt
from coterie.engine.task import Task
from coterie.functional.robust import Aggregation
from coterie.methods.base import (
    Info,
    PeerMethod,
    ReadHistory,
    Round,
    State,
    average_models,
    choose_peers_by_rule,
    draw_peers_uniformly,
)
from coterie.methods.cost import Cost, CostSetting, Phase, cost_of_reading
from coterie.rng import Rng


@dataclass(frozen=True)
class Gossip(PeerMethod):
    """Averaging with peers that are drawn in every round.

    Args:
        num_peers: peers read each round ($m$); clamped to population - 1.
        selection: import path of a rule of yours that says which peers a client reads, a function
            of `functional.selection.PeerKnowledge`; a uniform draw when not given.
        aggregation: how models are merged: a rule of `functional.robust.RULES`, by its name or as a
            table with its settings, or the import path of a custom rule, a function of
            `functional.aggregation.ReceivedModels`; the average by numbers of
            samples when not given.
    """

    num_peers: PositiveInt = 5
    selection: CustomFunction | None = None
    aggregation: Aggregation | None = None

    def init_memory(self, task: Task, rng: Rng) -> ReadHistory | None:
        """Remember who was read, for a rule."""
        if self.selection is None:
            return None
        return ReadHistory.new_history(len(task))

    def count_list_bytes(self, rounds: int, others: int) -> int:
        """See `Method.count_list_bytes`: a rule may read another member each time."""
        if self.selection is None:
            return 0
        return ReadHistory.count_bytes(min(others, rounds * self.num_peers))

    def exchange(self, rnd: Round, state: State) -> tuple[State, Info]:
        """Draw, pull, average."""
        message = self.publish(rnd.task, state)
        if self.selection is None:
            inbox = rnd.exchange.pull(message, draw_peers_uniformly(rnd, self.num_peers))
        else:
            # Only a rule needs to know who was read.
            met: ReadHistory = state.memory
            peers = choose_peers_by_rule(self.selection, rnd, self.num_peers, met)
            inbox = rnd.exchange.pull(message, peers)
            # After the pull: only peers that answered were read.
            state = replace(state, memory=met.record_reads(inbox, rnd.index))
        return average_models(rnd, state, inbox, self.aggregation)

    def cost(self, setting: CostSetting, phase: Phase) -> Cost:
        """Read the peers' models."""
        if isinstance(phase, str):
            return Cost()
        return cost_of_reading(setting, min(self.num_peers, setting.num_others))


@final
@dataclass(frozen=True)
class Random(Gossip):
    """Gossip averaging with uniformly drawn peers.

    Args:
        num_peers: peers read each round ($m$); clamped to population - 1.
        selection: import path of a rule of yours that says which peers a client reads, a function
            of `functional.selection.PeerKnowledge`; a uniform draw when not given.
        aggregation: how models are merged: a rule of `functional.robust.RULES`, by its name or as a
            table with its settings, or the import path of a custom rule, a function of
            `functional.aggregation.ReceivedModels`; the average by numbers of
            samples when not given.
    """

    kind: ClassVar[str] = "random"
    summary: ClassVar[str] = "average with peers drawn uniformly in every round"
    references: ClassVar[tuple[str, ...]] = (
        "Boyd, Ghosh, Prabhakar, Shah, Randomized gossip algorithms, 2006, "
        "https://doi.org/10.1109/TIT.2006.874516",
    )
