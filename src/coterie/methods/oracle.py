"""Oracle: gossip with peers of the client's own planted cluster."""

from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch
from jaxtyping import Bool
from torch import Tensor

from coterie._util.settings import PositiveInt
from coterie.engine.task import Task
from coterie.errors import ConfigError
from coterie.exchange.base import Message
from coterie.functional import selection
from coterie.functional.robust import Aggregation
from coterie.methods.base import (
    Info,
    PeerMethod,
    Round,
    State,
    average_models,
    draw_peers_uniformly,
)
from coterie.methods.cost import Cost, CostSetting, Phase, cost_of_reading
from coterie.rng import Rng

_SLOTS = 256  # members asked for their cluster at once


@final
@dataclass(frozen=True)
class OracleMemory:
    """The members of each client's planted cluster."""

    same: Bool[Tensor, "clients population"]


@final
@dataclass(frozen=True)
class Oracle(PeerMethod):
    """Gossip averaging inside the planted clusters: what perfect knowledge of them would give.

    A client that is alone in its cluster trains alone. Clients publish their cluster once, before
    the first round, in messages without a model.

    Args:
        num_peers: peers read each round ($m$); clamped to the size of the cluster - 1.
        aggregation: how models are merged: a rule of `functional.robust.RULES`, by its name or as a
            table with its settings, or the import path of a custom rule, a function of
            `functional.aggregation.ReceivedModels`; the average by numbers of
            samples when not given.
    """

    kind: ClassVar[str] = "oracle"
    summary: ClassVar[str] = "average with peers of the client's planted cluster"
    references: ClassVar[tuple[str, ...]] = (
        "Listo Zec, Ekblom, Willbo, Mogren, Girdzijauskas, Decentralized adaptive clustering of "
        "deep nets is "
        "beneficial for client collaboration, 2022, https://arxiv.org/abs/2206.08839",
    )
    needs: ClassVar[frozenset[str]] = frozenset({"truth"})
    num_peers: PositiveInt = 5
    aggregation: Aggregation | None = None

    def init_memory(self, task: Task, rng: Rng) -> OracleMemory:
        """Return empty clusters."""
        return OracleMemory(torch.zeros(len(task.ids), task.population, dtype=torch.bool))

    def enroll(self, rnd: Round, state: State) -> State:
        """Learn the members of each client's cluster."""
        clusters = rnd.task.clusters
        if clusters is None:
            raise ConfigError(
                "oracle needs the planted cluster of each client; found none: pass `clusters` to "
                "the task"
            )
        # No model is needed to learn the clusters.
        message = Message(state.params[:, :0], {"cluster": clusters})
        everybody = torch.arange(rnd.task.population).expand(len(clusters), -1)
        same = torch.zeros_like(state.memory.same)
        # `_SLOTS` at a time, so that clients x population messages are never in memory at once.
        for peers in selection.keep_allowed(everybody, rnd.candidates).split(_SLOTS, dim=1):
            inbox = rnd.exchange.pull(message, peers)
            alike = inbox.mask & (inbox.field_by_slot("cluster") == clusters[:, None])
            same = same | selection.mask_from_ids(
                torch.where(alike, peers, -1), rnd.task.population
            )
        return replace(state, memory=OracleMemory(same))

    def exchange(self, rnd: Round, state: State) -> tuple[State, Info]:
        """Draw peers from the client's cluster, pull, average."""
        peers = draw_peers_uniformly(rnd, self.num_peers, state.memory.same)
        inbox = rnd.exchange.pull(self.publish(rnd.task, state), peers)
        return average_models(rnd, state, inbox, self.aggregation)

    def cost(self, setting: CostSetting, phase: Phase) -> Cost:
        """Read the peers' models, and once before all clients' clusters (eight bytes each)."""
        others = setting.num_others
        if phase == "enroll":
            return Cost(messages=others, extra_floats=others, bytes=8 * others)
        if phase == "evaluate":
            return Cost()
        return cost_of_reading(setting, min(self.num_peers, setting.num_cluster_peers))
