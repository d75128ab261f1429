"""One-shot clustering: FedAvg, one k-means on the clients' models, then FedAvg in each cluster."""

from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch
from jaxtyping import Int
from torch import Tensor

from coterie._util.settings import PositiveInt
from coterie.exchange.base import Message
from coterie.functional import clustering
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


@final
@dataclass(frozen=True)
class OneShot(ServerMethod):
    """FedAvg that groups clients once, by k-means on their whole models.

    All clients take part in the round that groups them; a cluster starts from the mean of its
    members' models.

    Args:
        clusters: number of groups.
        warmup_rounds: rounds of plain FedAvg; the last of them groups the clients.
        aggregation: how models are merged: a rule of `functional.robust.RULES`, by its name or as a
            table with its settings, or the import path of a custom rule, a function of
            `functional.aggregation.ReceivedModels`; the mean when not given.
    """

    kind: ClassVar[str] = "one-shot"
    summary: ClassVar[str] = (
        "FedAvg, one k-means on the clients' models, then FedAvg in each cluster"
    )
    references: ClassVar[tuple[str, ...]] = (
        "Ghosh, Hong, Yin, Ramchandran, Robust federated learning in a heterogeneous "
        "environment, 2019, "
        "https://arxiv.org/abs/1906.06629",
    )
    needs_single_models: ClassVar[str] = "its server groups single models by k-means"
    clusters: PositiveInt = 2
    warmup_rounds: PositiveInt = 10
    aggregation: Aggregation | None = None

    @property
    def averaging(self) -> Averaging:
        """By samples, or by a rule."""
        return Averaging(rule=self.aggregation)

    def describe_standstill(self, population: int, participation: float | int, rounds: int) -> str:
        """See `Method.describe_standstill`: cohorts too small for the clusters."""
        if rounds <= self.warmup_rounds:
            return ""
        return describe_rare_averages(population, participation, self.clusters)

    def select_cohort(
        self, shared: Clusters, rng: Rng, population: int, participation: float | int
    ) -> Int[Tensor, " active"]:
        """Everybody in the round that groups the clients."""
        if rng.round == self.warmup_rounds - 1:
            return torch.arange(population)
        return super().select_cohort(shared, rng, population, participation)

    def aggregate(self, context: ServerContext, shared: Clusters, message: Message) -> Clusters:
        """Average, or group and average."""
        assert message.ids is not None
        label = shared.label
        if context.index == self.warmup_rounds - 1:
            # k-means cannot find more groups than there are models.
            count = min(self.clusters, len(message))
            # scikit-learn takes seeds as 32-bit integers.
            seed = int(context.rng.generator("one-shot").integers(1 << 31))
            found = clustering.k_means(
                context.part.compared.select_from(message.params).cpu(), count, seed=seed
            )
            label = label.index_copy(0, message.ids, found)
            # Only the shape counts: every group has members, so that no old model is used.
            models = shared.models.expand(int(found.max()) + 1, -1)
            models = self.averaging.merge_groups(message, found, models, 1, context)
            return replace(
                shared, models=models, velocity=shared.velocity.expand(len(models), -1), label=label
            )
        least = cluster_sizes(label, len(shared.models)).clamp(max=context.min_updates)
        return self.averaging.update_models(shared, message, label[message.ids], least, context)
