"""CFL: a cluster is split in two when its mean update vanishes while single updates do not."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from coterie._util.settings import NonNegativeFloat, NonNegativeInt, PositiveInt
from coterie.engine.task import Task
from coterie.exchange.base import Message
from coterie.functional import clustering
from coterie.functional.aggregation import average_models
from coterie.functional.robust import Aggregation
from coterie.methods.server import (
    Averaging,
    Clusters,
    ServerContext,
    ServerMethod,
    cluster_sizes,
    describe_rare_averages,
)
from coterie.rng import Rng


@dataclass(frozen=True)
class CflClusters(Clusters):
    r"""Clusters, and the last update of each client (no columns with full participation).

    Args:
        last: $\Delta_k$ of the trained parameters.
        since: the round it is from; -1 for never.
    """

    last: Float[Tensor, "population trainable"]
    since: Int[Tensor, " population"]


@final
@dataclass(frozen=True)
class Cfl(ServerMethod):
    r"""Clustered federated learning by bipartition of update cosines.

    A cluster is tested once $\lVert \sum_k (n_k / n_c) \Delta_k \rVert < \varepsilon_1$ and $\max_k
    \lVert \Delta_k \rVert > \varepsilon_2$; it is split so that the largest cosine across is least.
    Children start from the parent's model. Every client takes part in every round unless
    `participation` says otherwise.

    Args:
        eps1: $\varepsilon_1$.
        eps2: $\varepsilon_2$.
        warmup_rounds: no split before this round.
        linkage: "single" is the exact bipartition, "complete" what the authors' code does.
        gamma_max: accept a split only if this is below $\sqrt{(1 - a^{max}_{cross}) / 2}$; None for
            always.
        min_cluster_size: a split with a smaller part is refused.
        participation: "full": all clients in every round, whatever the run's participation;
            "partial": the run's participation, and a cluster is tested once every member's last
            update is known.
        max_age: with partial participation, rounds after which a last update is too old to count;
            None for never.
        aggregation: how models are merged: a rule of `functional.robust.RULES`, by its name or as a
            table with its settings, or the import path of a custom rule, a function of
            `functional.aggregation.ReceivedModels`; the mean when not given.
    """

    kind: ClassVar[str] = "cfl"
    summary: ClassVar[str] = (
        "clusters are split in two by the cosines of updates once the mean update vanishes"
    )
    references: ClassVar[tuple[str, ...]] = (
        "Sattler, Müller, Samek, Clustered federated learning: model-agnostic distributed "
        "multitask optimization "
        "under privacy constraints, 2020, https://arxiv.org/abs/1910.01991",
    )
    needs_single_models: ClassVar[str] = (
        "its server splits clusters by the updates of single clients"
    )
    eps1: NonNegativeFloat = 0.4
    eps2: NonNegativeFloat = 1.6
    warmup_rounds: NonNegativeInt = 20
    linkage: Literal["single", "complete"] = "single"
    gamma_max: NonNegativeFloat | None = None
    min_cluster_size: PositiveInt = 3
    participation: Literal["full", "partial"] = "full"
    max_age: NonNegativeInt | None = None
    aggregation: Aggregation | None = None

    @property
    def averaging(self) -> Averaging:
        """By samples, or by a rule."""
        return Averaging(rule=self.aggregation)

    def describe_standstill(self, population: int, participation: float | int, rounds: int) -> str:
        """See `Method.describe_standstill`: cohorts too small for the two parts of a split."""
        splits = population >= 2 * self.min_cluster_size and rounds > self.warmup_rounds + 1
        if self.participation == "full" or not splits:
            return ""
        said = describe_rare_averages(population, participation, 2)
        return said and f"once it has split, {said}"

    def init_server_state(self, task: Task, rng: Rng) -> CflClusters:
        """Return one cluster and no updates."""
        start = Averaging().init_clusters(task.draw_models(rng, 1), task.population, task.layout)
        # With full participation every update is there when a cluster is tested: none is stored.
        width = 0
        if self.participation == "partial":
            width = task.sharing.compared.num_columns
        last = torch.zeros(task.population, width, dtype=task.dtype, device=task.device)
        return CflClusters(
            start.models, start.velocity, start.label, last, torch.full((task.population,), -1)
        )

    def select_cohort(
        self, shared: Any, rng: Rng, population: int, participation: float | int
    ) -> Int[Tensor, " active"]:
        """All clients, or the run's share of them."""
        if self.participation == "full":
            return torch.arange(population)
        return super().select_cohort(shared, rng, population, participation)

    def aggregate(
        self, context: ServerContext, shared: CflClusters, message: Message
    ) -> CflClusters:
        """Average or split each cluster."""
        assert message.ids is not None
        group = shared.label[message.ids]
        # Update of each client from its cluster's model: `trained` for the norms, `compared` for
        # the cosines.
        moved = message.params - shared.models[group.to(message.params.device)]
        updates, alike = (
            context.part.trained.select_from(moved),
            context.part.compared.select_from(moved),
        )
        if self.participation == "partial":
            last = shared.last.index_copy(0, message.ids.to(shared.last.device), alike)
            shared = replace(
                shared, last=last, since=shared.since.index_fill(0, message.ids, context.index)
            )
        members = cluster_sizes(shared.label, len(shared.models))
        # All clusters are averaged first; split clusters are overwritten below.
        merged = self.averaging.update_models(
            shared, message, group, members.clamp(max=context.min_updates), context
        )
        for cluster in range(len(members)):
            rows = (group == cluster).nonzero().flatten()
            # `shared`, from before the averaging: the labels and models that clients trained
            # with.
            part = self._find_split(context, shared, cluster, message, rows, updates, alike)
            if part is not None:
                # children start from it, not from this round's mean
                parent = shared.models[cluster]
                models = torch.cat([merged.models, parent[None]])
                models[cluster] = parent
                label = merged.label.index_fill(0, part, len(models) - 1)
                velocity = torch.cat([merged.velocity, merged.velocity[cluster : cluster + 1]])
                merged = replace(merged, models=models, label=label, velocity=velocity)
        return merged

    def _find_split(
        self,
        context: ServerContext,
        shared: CflClusters,
        cluster: int,
        message: Message,
        rows: Tensor,
        updates: Tensor,
        alike: Tensor,
    ) -> Tensor | None:
        """Return the ids that leave a cluster, or None; `alike` holds the updates to compare."""
        assert message.ids is not None
        if context.index < self.warmup_rounds or len(rows) == 0:
            return None
        # The paper's two conditions: the mean update vanishes, the largest does not.
        mean = average_models(updates[rows], message.fields["samples"][rows])
        if not (
            float(mean.norm()) < self.eps1 and float(updates[rows].norm(dim=1).max()) > self.eps2
        ):
            return None
        ids, known = message.ids[rows], alike[rows]
        # With full participation a missing update makes `ids` shorter than `members`: no split.
        members = (shared.label == cluster).nonzero().flatten()
        if self.participation == "partial":
            ids, known = members, shared.last[members.to(shared.last.device)]
            age = context.index - shared.since[members]
            if bool((shared.since[members] < 0).any()) or (
                self.max_age is not None and int(age.max()) > self.max_age
            ):
                return None
        if len(ids) < len(members) or len(ids) <= 2:
            return None
        cosines = clustering.compute_update_cosines(known)
        part = clustering.find_bipartition(cosines.cpu(), self.linkage)
        if min(int(part.sum()), int((~part).sum())) < self.min_cluster_size:
            return None
        across = clustering.max_cross_similarity(cosines.cpu(), part)
        if self.gamma_max is not None and not self.gamma_max < ((1 - across) / 2) ** 0.5:
            return None
        return ids[part]
