"""PENS: gossip with peers whose models fit the client's data more often than chance."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, final

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from coterie._util.settings import NonNegativeInt, PositiveInt
from coterie.engine.task import Task
from coterie.errors import require
from coterie.functional import selection
from coterie.functional.member_lists import find_columns
from coterie.functional.robust import Aggregation
from coterie.methods.base import (
    LARGEST_WITH_PAIRS,
    Info,
    PeerMethod,
    Round,
    State,
    average_models,
    draw_peers_uniformly,
)
from coterie.methods.cost import Cost, CostSetting, Phase, cost_of_reading
from coterie.rng import Rng


@final
@dataclass(frozen=True)
class PensMemory:
    """How often each client kept members of the population in stage one ($q_{ij}$).

    A client keeps at most `num_kept` members a round, so it has a column for each that it can keep
    in all of stage one, and not for each member of the population.

    Args:
        ids: the members that it kept, each once, in the order in which it first kept them; -1
            behind the last.
        count: how often; 0 in an empty column.
    """

    ids: Int[Tensor, "clients slots"]
    count: Int[Tensor, "clients slots"]

    @staticmethod
    def nobody_kept(clients: int, slots: int) -> "PensMemory":
        """Return the memory of clients that kept nobody."""
        ids = torch.full((clients, slots), -1, dtype=torch.int32)
        return PensMemory(ids, torch.zeros_like(ids))

    def add_kept(
        self, peers: Int[Tensor, "clients peers"], keep: Bool[Tensor, "clients peers"]
    ) -> "PensMemory":
        """Return the memory after a round.

        Args:
            peers: ids of the peers that were read, each once.
            keep: which of them are kept.
        """
        ids, count = self.ids.clone(), self.count.clone()
        columns = find_columns(ids, peers, keep)
        # Stage one fills a row at most. A client in whose place a round is only computed, as when
        # another joins after the run, may have a full one.
        rows, slots = ((columns >= 0) & (columns < ids.shape[1])).nonzero(as_tuple=True)
        at = rows, columns[rows, slots]
        ids[at] = peers[rows, slots].to(ids.dtype)
        # Peers of a row are distinct, so that no index occurs twice.
        count[at] += 1
        return PensMemory(ids, count)


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

    @property
    def memory_bound(self) -> int:
        """See `Method.memory_bound`: as many members as all of stage one can keep."""
        return self.num_kept * self.stage_one_rounds

    def init_memory(self, task: Task, rng: Rng) -> PensMemory:
        """Return counts of 0."""
        slots = min(self.memory_bound, max(0, task.population - 1))
        return PensMemory.nobody_kept(len(task.ids), slots)

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

    def find_neighbors(self, memory: PensMemory, population: int) -> Int[Tensor, "clients slots"]:
        """Return the members with which each client gossips in stage two; -1 for none."""
        # A threshold below 0 must not admit peers that were never kept.
        often = memory.count > max(0.0, self.min_times_kept(population))
        return memory.ids.long().masked_fill(~often, -1)

    def describe_standstill(self, population: int, participation: float | int, rounds: int) -> str:
        """See `Method.describe_standstill`: thresholds that nobody reaches by being kept."""
        length, least = self.stage_one_rounds, max(0.0, self.min_times_kept(population))
        if rounds <= length or population < 2:
            return ""
        if least >= length:
            return (
                "in stage two every client trains alone: it reads members that it kept more than "
                f"{least:.4g} times in stage one, which has {length} rounds; expected num_kept "
                f"({self.num_kept}) below the number of others ({population - 1}), and "
                "stage_one_rounds of 1 or more"
            )
        cohort = selection.cohort_size(population, participation)
        share = cohort / population
        # Counts are whole: thresholds between the same two of them admit the same members.
        if math.floor(least) == math.floor(least * share):
            return ""
        return (
            f"with {cohort} of {population} clients a round, a client takes part in about "
            f"{share * length:.0f} of the {length} rounds of stage one, and in stage two reads only "
            f"members that it kept more than {least:.4g} times, as often as chance gives in all "
            f"{length}: many clients then train alone; raise participation"
        )

    def exchange(self, rnd: Round, state: State) -> tuple[State, Info]:
        """Draw, pull, in stage one score and keep the best, average."""
        memory: PensMemory = state.memory
        population = rnd.task.population
        message = self.publish(rnd.task, state)
        cost: dict[str, Tensor] = {}
        if rnd.index < self.stage_one_rounds:
            peers = draw_peers_uniformly(rnd, self.num_sampled, large=LARGEST_WITH_PAIRS)
            inbox = rnd.exchange.pull(message, peers)
            keep = selection.select_lowest(
                rnd.task.score(inbox).cpu(), peers, self.num_kept, inbox.mask
            )
            memory = memory.add_kept(peers, keep)
            cost["passes"] = inbox.mask.sum(1) * rnd.task.count_samples("train")
        else:
            friends = self.find_neighbors(memory, population)
            peers = draw_peers_uniformly(
                rnd,
                self.num_peers,
                lambda rows: selection.mask_from_ids(friends[rows], population),
                large=LARGEST_WITH_PAIRS,
                found=True,
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
