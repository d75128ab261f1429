"""FixTopology: gossip with peers drawn once, before the first round."""

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from jaxtyping import Int
from torch import Tensor

from coterie._util.settings import PositiveInt
from coterie.engine.task import Task
from coterie.functional.robust import Aggregation
from coterie.methods.base import (
    LARGEST_WITH_PAIRS,
    Info,
    PeerMethod,
    Round,
    State,
    average_models,
    draw_members_uniformly,
)
from coterie.methods.cost import Cost, CostSetting, Phase, cost_of_reading
from coterie.rng import Rng


@final
@dataclass(frozen=True)
class FixTopologyMemory:
    """The peers that each client reads in every round."""

    peers: Int[Tensor, "clients peers"]


@final
@dataclass(frozen=True)
class FixTopology(PeerMethod):
    """Gossip averaging over a fixed random directed graph: i may read j while j does not read i.

    Args:
        num_peers: peers of each client ($m$); clamped to population - 1.
        aggregation: how models are merged: a rule of `functional.robust.RULES`, by its name or as a
            table with its settings, or the import path of a custom rule, a function of
            `functional.aggregation.ReceivedModels`; the average by numbers of
            samples when not given.
    """

    kind: ClassVar[str] = "fix-topology"
    summary: ClassVar[str] = "average with the same few peers in every round, drawn once"
    references: ClassVar[tuple[str, ...]] = (
        "Li, Wu, Towards effective clustered federated learning: a peer-to-peer framework with "
        "adaptive neighbor "
        "matching, 2022, https://arxiv.org/abs/2203.12285",
    )
    num_peers: PositiveInt = 5
    aggregation: Aggregation | None = None

    @property
    def reads_everybody(self) -> str:
        """See `Method.reads_everybody`."""
        return "its graph is drawn once among all members"

    def init_memory(self, task: Task, rng: Rng) -> FixTopologyMemory:
        """Draw the graph."""
        # One draw for each pair: relabeled clients get the relabeled graph.
        everybody = torch.ones(task.population, dtype=torch.bool)
        peers = draw_members_uniformly(
            rng, task.ids, self.num_peers, lambda rows: everybody, task.population, "peers",
            large=LARGEST_WITH_PAIRS,
        )  # fmt: skip
        return FixTopologyMemory(peers)

    def exchange(self, rnd: Round, state: State) -> tuple[State, Info]:
        """Pull from the peers that can be reached now, and average."""
        # The graph stays; a peer that cannot be reached now leaves its slot empty.
        peers = rnd.keep_candidates(state.memory.peers)
        inbox = rnd.exchange.pull(self.publish(rnd.task, state), peers)
        return average_models(rnd, state, inbox, self.aggregation)

    def cost(self, setting: CostSetting, phase: Phase) -> Cost:
        """Read the peers' models."""
        if isinstance(phase, str):
            return Cost()
        return cost_of_reading(setting, min(self.num_peers, setting.num_others))
