"""Oracle: gossip with peers of the client's own planted cluster."""

from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch
from jaxtyping import UInt8
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

_SLOTS = 256  # members asked for their cluster at once, at most; whole bytes of the memory
_PAIRS_AT_ONCE = 1 << 18  # messages at once; what is made of them takes about 80 bytes each


@final
@dataclass(frozen=True)
class OracleMemory:
    """The members of each client's planted cluster.

    Args:
        same: eight members in a byte, see `selection.pack_mask`.
    """

    same: UInt8[Tensor, "clients bytes"]


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

    @property
    def reads_everybody(self) -> str:
        """See `Method.reads_everybody`."""
        return "it asks all members for their cluster"

    def init_memory(self, task: Task, rng: Rng) -> OracleMemory:
        """Return empty clusters."""
        width = (task.population + 7) // 8
        return OracleMemory(torch.zeros(len(task.ids), width, dtype=torch.uint8))

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
        same = torch.zeros_like(state.memory.same)
        # A few at a time, so that clients x population messages are never in memory at once: as many
        # in each process that hosts clients of the population, since all make these exchanges.
        population = rnd.task.population
        slots = max(8, min(_SLOTS, _PAIRS_AT_ONCE // population // 8 * 8))
        for members in torch.arange(population).split(slots):
            peers = rnd.keep_candidates(members.expand(len(clusters), -1))
            inbox = rnd.exchange.pull(message, peers)
            alike = inbox.mask & (inbox.field_by_slot("cluster") == clusters[:, None])
            packed, first = selection.pack_mask(alike), int(members[0]) // 8
            same[:, first : first + packed.shape[1]] = packed
        return replace(state, memory=OracleMemory(same))

    def exchange(self, rnd: Round, state: State) -> tuple[State, Info]:
        """Draw peers from the client's cluster, pull, average."""
        memory: OracleMemory = state.memory
        peers = draw_peers_uniformly(
            rnd,
            self.num_peers,
            lambda rows: selection.unpack_mask(memory.same[rows], rnd.task.population),
        )
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
