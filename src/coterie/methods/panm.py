"""PANM: neighbors are the most similar of a few candidates, then by a mixture of Gaussians."""

import warnings
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from coterie._util.settings import NonNegativeFloat, PositiveInt, Share
from coterie.engine.task import Task
from coterie.exchange.base import Inbox, Message
from coterie.functional import aggregation, gaussian_mixture, selection, similarity
from coterie.functional.member_lists import MemberLists
from coterie.methods import dac
from coterie.methods.base import (
    ROWS_AT_ONCE,
    Info,
    Order,
    PeerMethod,
    Round,
    RowsOfMembers,
    State,
    draw_peers_uniformly,
    mixing_report,
    publish_all,
    similarity_report,
)  # fmt: skip
from coterie.methods.cost import Cost, CostSetting, Phase, cost_of_reading
from coterie.rng import Rng

_PAIRS_AT_ONCE = 1 << 26  # entries of a mask of clients and members, of a byte each


@final
@dataclass(frozen=True)
class PanmMemory(MemberLists):
    """The memory of each client.

    Args:
        members: the bag $B_i$ of stage two, in stage one the neighbors; -1 behind the last.
        neighbors: the list $N_i$ of stage one; -1 behind the last.
        update: $g_i$, the change of the trained parameters in the last local training; without
            columns for PANMLoss.
        origin: $w^0$ where messages carry it; else without columns.
    """

    fills: ClassVar[Mapping[str, int]] = {"members": -1}
    members: Int[Tensor, "clients slots"]
    neighbors: Int[Tensor, "clients neighbors"]
    update: Float[Tensor, "clients update"]
    origin: Float[Tensor, "clients origin"]


@dataclass(frozen=True)
class _Bags:
    """Bags of the hosted clients as masks, of a few clients at a time.

    Args:
        members: see `PanmMemory`.
        population: number of clients in all.
    """

    members: Int[Tensor, "clients slots"]
    population: int

    def inside(self, rows: Int[Tensor, " rows"]) -> Bool[Tensor, "rows population"]:
        """Return the members of the bags of some clients."""
        return selection.mask_from_ids(self.members[rows].long(), self.population)

    def outside(self, rows: Int[Tensor, " rows"]) -> Bool[Tensor, "rows population"]:
        """Return all others."""
        return ~self.inside(rows)


def _list_by_rows(
    clients: int, population: int, find: RowsOfMembers
) -> Int[Tensor, "clients slots"]:
    """Return the ids in masks that a function finds for a part of the clients at a time."""
    parts = []
    for rows in torch.arange(clients).split(max(ROWS_AT_ONCE, _PAIRS_AT_ONCE // population)):
        parts.append(selection.ids_from_mask(find(rows)).to(torch.int32))
    width = max(part.shape[1] for part in parts)
    padded = [torch.nn.functional.pad(part, (0, width - part.shape[1]), value=-1) for part in parts]
    return torch.cat(padded)


@dataclass(frozen=True)
class Panm(PeerMethod):
    r"""Personalized adaptive neighbor matching.

    Stage one: read $l$ candidates drawn uniformly and the present $k$ neighbors, keep the $k$ most
    similar as the new neighbors and average with them. Stage two starts with them as a bag. Every
    `interval` rounds $l$ members of the bag and $l$ others are scored, a mixture of two Gaussians
    separates neighbors from others, and the bag is corrected. In every round the client averages
    with $k$ members of the bag, drawn uniformly.

    Args:
        num_peers: neighbors averaged with ($k$).
        num_candidates: candidates scored in a round ($l$).
        stage_one_rounds: length of stage one ($T_1$).
        interval: rounds between two corrections of the bag ($\tau_{em}$).
        em: "hard" or "soft" assignment in the steps of EM.
        component: the neighbors' Gaussian: the one with the "larger" mean, or the "first", which
            starts with the bag.
        monotone: count all scores at or above that mean as neighbors.
    """

    references: ClassVar[tuple[str, ...]] = (
        "Li, Wu, Towards effective clustered federated learning: a peer-to-peer framework with "
        "adaptive neighbor "
        "matching, 2022, https://arxiv.org/abs/2203.12285",
    )
    exchanges: ClassVar[int] = 2
    order: ClassVar[Order] = "train_first"
    num_peers: PositiveInt = 5
    num_candidates: PositiveInt = 10
    stage_one_rounds: PositiveInt = 100
    interval: PositiveInt = 10
    em: gaussian_mixture.Em = "hard"
    component: gaussian_mixture.Component = "larger"
    monotone: bool = False

    @abstractmethod
    def score_peers(
        self, rnd: Round, state: State, inbox: Inbox
    ) -> tuple[Float[Tensor, "clients peers"], Info]:
        """Return the similarity of each slot, and the cost of measuring it."""

    def memory_widths(self, task: Task) -> tuple[int, int]:
        """Return how many parameters of the last update and the first model a client keeps."""
        return 0, 0

    def init_memory(self, task: Task, rng: Rng) -> PanmMemory:
        """Return a memory without neighbors."""
        update, origin = self.memory_widths(task)
        start = task.initial_models(rng)
        nobody = torch.zeros(len(task.ids), 0, dtype=torch.int32)
        list_size = min(self.num_peers, max(0, task.population - 1))
        none = torch.full((len(task.ids), list_size), -1)
        # `zeros_like` and `clone` of a slice: views would keep the whole matrix of first models
        # alive.
        return PanmMemory(
            nobody, none, torch.zeros_like(start[:, :update]), start[:, :origin].clone()
        )

    def count_list_bytes(self, rounds: int, others: int) -> int:
        """See `Method.count_list_bytes`: each correction takes all candidates into the bag."""
        taken = self.num_peers + self.num_candidates * -(-rounds // self.interval)
        return torch.int32.itemsize * min(others, taken)

    def publish(self, task: Task, state: State, exchange: int = 0) -> Message:
        """Publish the model, and in the first exchange what the score needs with it."""
        fields = {"samples": task.num_samples}
        # The second exchange only averages: it needs no update and no first model.
        if exchange == 0:
            for name in ("update", "origin"):
                value = getattr(state.memory, name)
                if value.shape[1]:
                    fields[name] = task.sharing.compared.select_from(value)
        return Message(state.params, fields)

    def exchange(self, rnd: Round, state: State) -> tuple[State, Info]:
        """Pull and score peers, match neighbors, pull the neighbors not read yet, average."""
        # The paper counts rounds from 1.
        memory, number = state.memory, rnd.index + 1
        before, population = memory.members, rnd.task.population
        to_score, to_average = publish_all(self, rnd.task, state)
        early = number <= self.stage_one_rounds
        believed, candidates = self.choose_peers_to_score(
            rnd, memory, early, number % self.interval == 0
        )
        # [clients, believed | candidates]: presumed neighbors come first.
        slots = torch.cat([believed, candidates], dim=1)
        # A neighbor found earlier may be out of reach now.
        scored = rnd.exchange.pull(to_score, rnd.keep_candidates(slots))
        scores, cost = self.score_peers(rnd, state, scored)
        # Marks the slots of the presumed neighbors.
        first = (torch.arange(slots.shape[1]) < believed.shape[1]).expand_as(slots)
        if early:
            chosen = selection.select_best(
                scores, slots, memory.neighbors.shape[1], scored.mask, first
            )
            memory = replace(memory, neighbors=chosen, members=chosen.to(torch.int32)).trim()
            # The new neighbors were scored, hence read: the second exchange sends no
            # request, but takes place.
            missing = chosen[:, :0]
        else:
            how = gaussian_mixture.MixtureOptions(self.em, self.component, self.monotone)

            presumed = _Bags(before, population)

            def correct(rows: Tensor) -> Tensor:
                return gaussian_mixture.correct_bags(
                    presumed.inside(rows),
                    slots[rows],
                    scores[rows],
                    first[rows],
                    scored.mask[rows],
                    how,
                )

            # No slots: nobody was scored, and bags stay.
            if slots.shape[1]:
                listed = _list_by_rows(len(slots), population, correct)
                memory = replace(memory, members=listed)
            bags = _Bags(memory.members, population)
            chosen = draw_peers_uniformly(rnd, self.num_peers, bags.inside, found=True)
            # Only peers that answered: the second exchange asks the others again.
            read = torch.where(scored.mask, slots, -1)
            missing = chosen.masked_fill(selection.find_listed(chosen, read), -1)
        rest = rnd.exchange.pull(to_average, missing)
        # Scored slots that are averaged too.
        wanted = selection.find_listed(slots, chosen) & scored.mask
        samples = torch.cat([scored.field_by_slot("samples"), rest.field_by_slot("samples")], dim=1)
        keep = torch.cat([wanted, rest.mask], dim=1)
        weights, own_weight = aggregation.fedavg_weights(samples, rnd.task.num_samples, keep)
        # Weights of the first inbox and of the second.
        parts = weights.tensor_split([slots.shape[1]], dim=1)
        mixed = scored.mix(parts[0], own=state.params, own_weight=own_weight)
        # The own model has its weight from the first sum: the second only adds to it.
        mixed = rest.mix(parts[1], own=mixed, own_weight=torch.ones_like(own_weight))
        report = mixing_report(scored, parts[0], own_weight)
        # Entries of slots are joined along the slots; `own_weight` has no slots and is reported
        # once.
        for name, value in mixing_report(rest, parts[1], own_weight).items():
            if value.ndim > 1:
                report[name] = torch.cat([report[name], value], dim=1)
        if rnd.record_similarities:
            unscored = torch.full(missing.shape, torch.nan, dtype=torch.float64)
            drawn = self._draw_probabilities(
                rnd, (before, memory.members), (believed, candidates, missing), early
            )
            report |= similarity_report(rnd, torch.cat([scores, unscored], dim=1), drawn)
        return replace(state, params=mixed, memory=memory), {**report, **cost}

    @staticmethod
    def _draw_probabilities(
        rnd: Round, bags: tuple[Tensor, Tensor], slots: tuple[Tensor, Tensor, Tensor], early: bool
    ) -> Float[Tensor, "clients peers"]:
        """Return the probability with which each slot's peer was drawn; 1 for kept neighbors.

        Args:
            rnd: the round.
            bags: before and after it.
            slots: presumed neighbors, candidates, and the neighbors that were not scored.
            early: whether it is a round of stage one.
        """
        # A uniform draw among n members chooses each with probability 1 / n.
        population, found = rnd.task.population, []
        before, after = (_Bags(bag, population) for bag in bags)
        kinds = (before.inside, before.outside, after.inside)
        for members, part in zip(kinds, slots, strict=True):
            sizes = []
            for rows in torch.arange(len(part)).split(ROWS_AT_ONCE):
                chosen_among = members(rows)
                # Members of a bag are found, and read outside of a view.
                found_already = None if members == before.outside else chosen_among
                possible = rnd.candidates_of(rows, found_already) & chosen_among
                sizes.append(possible.sum(1, keepdim=True).double())
            found.append((1 / torch.cat(sizes)).expand(part.shape))
        # Neighbors of stage one are kept, not drawn.
        if early:
            found[0] = torch.ones_like(found[0])
        return torch.cat(found, dim=1)

    def choose_peers_to_score(
        self, rnd: Round, memory: PanmMemory, early: bool, due: bool
    ) -> tuple[Int[Tensor, "clients believed"], Int[Tensor, "clients candidates"]]:
        """Return the peers to score: presumed neighbors, and candidates drawn from all others."""
        # No slots: the first exchange takes place all the same, so that nodes stay in step.
        if not early and not due:
            return memory.neighbors[:, :0], memory.neighbors[:, :0]
        bags = _Bags(memory.members, rnd.task.population)
        candidates = draw_peers_uniformly(rnd, self.num_candidates, bags.outside, "candidates")
        if early:
            return memory.neighbors, candidates
        believed = draw_peers_uniformly(
            rnd, self.num_candidates, bags.inside, "believed", found=True
        )
        return believed, candidates

    def count_reads(self, setting: CostSetting, round: int) -> tuple[float, float]:
        """Return how many models a client scores in a round, and how many it only averages with."""
        number, bag = round + 1, max(1, setting.num_cluster_peers)
        if number <= self.stage_one_rounds:
            # Round 1 has no neighbors yet.
            neighbors = min(self.num_peers, setting.num_others) * (number > 1)
            return neighbors + min(self.num_candidates, setting.num_others - neighbors), 0.0
        mixed = min(self.num_peers, bag)
        if number % self.interval:
            return 0.0, mixed
        believed = min(self.num_candidates, bag)
        # Of the members averaged with, the share believed / bag was scored already.
        return believed + min(self.num_candidates, setting.num_others - bag), mixed * (
            1 - believed / bag
        )


@final
@dataclass(frozen=True)
class PanmGrad(Panm):
    r"""PANM by cosines of updates; see `Panm`.

    $s_{ij} = \alpha \cos(g_i, g_j) + (1 - \alpha) \cos(h_i, h_j)$ with the last local update $g$
    and the difference $h$ from the first model. A peer sends $g_j$ with its model unless $\alpha
    = 0$.

    Args:
        alpha: weight $\alpha$ of the last update, in [0, 1].
    """

    kind: ClassVar[str] = "panm-grad"
    summary: ClassVar[str] = "match neighbors adaptively, by the cosines of updates"
    alpha: Share = 0.5

    def memory_widths(self, task: Task) -> tuple[int, int]:
        """Keep the updates that messages carry."""
        # Only the second cosine needs the first models.
        apart = task.model.init == "per_client" and self.alpha < 1
        if apart:
            text = "panm-grad: cosines of updates say little "
            text += "while clients start from different models (per_client)"
            warnings.warn(text, stacklevel=2)
        return task.layout.trainable * (self.alpha > 0), task.layout.trainable * apart

    def remember_update(self, state: State, before: Float[Tensor, "clients params"]) -> State:
        """Keep the update of the last local training."""
        # The memory has no columns with alpha = 0: then nothing is kept.
        columns = slice(state.memory.update.shape[1])
        update = state.params[:, columns] - before[:, columns]
        return replace(state, memory=replace(state.memory, update=update))

    def score_peers(
        self, rnd: Round, state: State, inbox: Inbox
    ) -> tuple[Float[Tensor, "clients peers"], Info]:
        """Compare updates with those received."""
        total = torch.zeros(inbox.mask.shape, dtype=torch.float64)
        if self.alpha > 0:
            update = rnd.task.sharing.compared.select_from(state.memory.update)
            last = similarity.cosine(update, inbox.fields["update"], inbox.index, inbox.mask)
            total = total + self.alpha * last
        if self.alpha < 1:
            total = total + (1 - self.alpha) * dac.cosine_since_start(rnd, state, inbox)
        # Each extra is as large as a model.
        copies = int(self.alpha > 0) + int(state.memory.origin.shape[1] > 0)
        return total, {"extra_models": inbox.mask.sum(1) * copies}

    def cost(self, setting: CostSetting, phase: Phase) -> Cost:
        """Read models, and an update or a first model with each scored one."""
        if isinstance(phase, str):
            return Cost()
        scored, rest = self.count_reads(setting, phase)
        updates = scored * ((self.alpha > 0) + (self.alpha < 1 and setting.start_apart))
        extra = Cost(
            extra_models=updates, bytes=updates * setting.num_compared * setting.number_bytes
        )
        return cost_of_reading(setting, scored + rest) + extra


@final
@dataclass(frozen=True)
class PanmLoss(Panm):
    r"""PANM by the loss of the peer's model on the client's data; see `Panm`.

    Args:
        transform: the similarity: "inverse", $1 / (\ell + \varepsilon)$, for losses that are never
            below 0, or "negative", $-\ell$. They rank alike but give different mixtures.
        eps: $\varepsilon$.
    """

    kind: ClassVar[str] = "panm-loss"
    summary: ClassVar[str] = (
        "match neighbors adaptively, by the loss of their models on the client's data"
    )
    transform: Literal["inverse", "negative"] = "inverse"
    eps: NonNegativeFloat = 1e-6

    @property
    def needs_positive_loss(self) -> str:
        """See `Method.needs_positive_loss`."""
        if self.transform == "inverse":
            return "transform = 'inverse' is 1 over the loss; take 'negative'"
        return ""

    @property
    def privacy_leak(self) -> str:
        """See `Method.privacy_leak`."""
        return "models are chosen and mixed by their losses on the training data"

    def score_peers(
        self, rnd: Round, state: State, inbox: Inbox
    ) -> tuple[Float[Tensor, "clients peers"], Info]:
        """Evaluate the received models on the client's training data."""
        loss = rnd.task.score(inbox).cpu().double()
        value = -loss
        if self.transform == "inverse":
            value = similarity.invert_cost(loss, self.eps)
        return value, {"passes": inbox.mask.sum(1) * rnd.task.count_samples("train")}

    def cost(self, setting: CostSetting, phase: Phase) -> Cost:
        """Read models, and score some by their loss."""
        if isinstance(phase, str):
            return Cost()
        scored, rest = self.count_reads(setting, phase)
        return cost_of_reading(setting, scored + rest, scored=scored)
