"""PENS: gossip with peers whose models fit the client's data more often than chance."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, final

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from coterie._util.settings import NonNegativeInt, PositiveInt
from coterie.engine.task import Task
from coterie.errors import require
from coterie.functional import selection
from coterie.functional.robust import Aggregation
from coterie.methods.base import Info, PeerMethod, Round, State, average_models
from coterie.methods.cost import Cost, CostSetting, Phase, cost_of_reading
from coterie.rng import Rng


@final
@dataclass(frozen=True)
class PensMemory:
    """How often each client kept each member of the population in stage one ($q_{ij}$)."""

    kept: Int[Tensor, "clients population"]


@final
@dataclass(frozen=True)
class Pens(PeerMethod):
    r"""Performance-based neighbor selection.

    Stage one: read `num_sampled` peers drawn uniformly, keep the `num_kept` whose models have the
    lowest loss on the client's training data, average with those. Stage two: gossip with the
    members kept more often than a threshold. A client without any trains alone.

    Args:
        num_sampled: peers read each round of stage one ($n_s$); clamped to population - 1.
        num_kept: number of them that are kept and averaged with ($m$).
        num_peers: peers read each round of stage two.
        stage_one_rounds: length of stage one ($T_1$).
        threshold: strict lower bound on the number of times kept: "expected", $m T_1 / (K - 1)$,
            the chance mean; "dac_repo", $m T_1 / K$; "pens_repo", $m T_1 / (K - 1) - 1$, among
            those kept at least once.
        aggregation: how models are merged: a rule of `functional.robust.RULES`, by its name or as a
            table with its settings, or the import path of a custom rule, a function of
            `functional.aggregation.ReceivedModels`; the average by numbers of
            samples when not given.
    """

    kind: ClassVar[str] = "pens"
    summary: ClassVar[str] = (
        "average with peers whose models had a low loss on the client's data more often than chance"
    )
    references: ClassVar[tuple[str, ...]] = (
        "Onoszko, Karlsson, Mogren, Listo Zec, Decentralized federated learning of deep neural "
        "networks on non-iid "
        "data, 2021, https://arxiv.org/abs/2107.08517",
    )
    num_sampled: PositiveInt = 10
    num_kept: PositiveInt = 2
    num_peers: PositiveInt = 5
    stage_one_rounds: NonNegativeInt = 20
    threshold: Literal["expected", "dac_repo", "pens_repo"] = "expected"
    aggregation: Aggregation | None = None

    def check(self) -> None:
        """Keep no more than are read."""
        fits = self.num_sampled >= self.num_kept
        require(fits, "num_sampled", self.num_sampled, f"at least num_kept = {self.num_kept}")

    def init_memory(self, task: Task, rng: Rng) -> PensMemory:
        """Return counts of 0."""
        return PensMemory(torch.zeros(len(task.ids), task.population, dtype=torch.int64))

    @property
    def privacy_leak(self) -> str:
        """See `Method.privacy_leak`."""
        return "models are chosen by their losses on the training data"

    def min_times_kept(self, population: int) -> float:
        r"""Return the threshold $\theta$ for a population of that size."""
        # The mean number of times that chance alone would keep a peer.
        chances = max(1, population - 1)
        if self.threshold == "dac_repo":  # which counts the client itself
            chances = population
        return self.num_kept * self.stage_one_rounds / chances - (self.threshold == "pens_repo")

    def find_neighbors(
        self, kept: Int[Tensor, "clients population"]
    ) -> Bool[Tensor, "clients population"]:
        """Return the members with which each client gossips in stage two."""
        # A threshold below 0 must not admit peers that were never kept.
        return (kept > self.min_times_kept(kept.shape[1])) & (kept > 0)

    def exchange(self, rnd: Round, state: State) -> tuple[State, Info]:
        """Draw, pull, in stage one score and keep the best, average."""
        memory: PensMemory = state.memory
        noise = rnd.rng.gumbel("peers", rnd.ids, rnd.task.population)
        message = self.publish(rnd.task, state)
        cost: dict[str, Tensor] = {}
        if rnd.index < self.stage_one_rounds:
            peers = selection.sample_uniformly(noise, self.num_sampled, rnd.candidates)
            inbox = rnd.exchange.pull(message, peers)
            keep = selection.select_lowest(
                rnd.task.score(inbox).cpu(), peers, self.num_kept, inbox.mask
            )
            # A row's peers are distinct: no index occurs twice.
            rows, slots = keep.nonzero(as_tuple=True)
            kept = memory.kept.clone()
            kept[rows, peers[rows, slots]] += 1
            memory = PensMemory(kept)
            cost["passes"] = inbox.mask.sum(1) * rnd.task.count_samples("train")
        else:
            peers = selection.sample_uniformly(
                noise, self.num_peers, rnd.candidates & self.find_neighbors(memory.kept)
            )
            inbox = rnd.exchange.pull(message, peers)
            keep = inbox.mask
        state, report = average_models(
            rnd, replace(state, memory=memory), inbox, self.aggregation, keep
        )
        return state, {**report, **cost}

    def cost(self, setting: CostSetting, phase: Phase) -> Cost:
        """Read and score in stage one, read those found in stage two."""
        if isinstance(phase, str):
            return Cost()
        if phase >= self.stage_one_rounds:
            return cost_of_reading(setting, min(self.num_peers, setting.num_cluster_peers))
        peers = min(self.num_sampled, setting.num_others)
        return cost_of_reading(setting, peers, scored=peers)
