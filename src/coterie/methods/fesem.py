"""FeSEM: several centers; each client trains from the one nearest to its last model."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from coterie._util.settings import PositiveInt
from coterie.engine.task import Task
from coterie.errors import require
from coterie.exchange.base import Message, Reply, ReplyForm
from coterie.functional import clustering
from coterie.functional.robust import Aggregation
from coterie.methods.server import Averaging, Clusters, ServerContext, ServerMethod, Weights
from coterie.models.simplex_layers import last_layer_mask
from coterie.rng import Rng


@dataclass(frozen=True)
class FeSemClusters(Clusters):
    """The centers, the membership of each client, and whether it has ever taken part."""

    seen: Bool[Tensor, " population"]


@final
@dataclass(frozen=True)
class FeSem(ServerMethod):
    r"""Multi-center federated learning: each client trains the center nearest to its model.

    It minimizes $\frac1K \sum_k \sum_c r_k^c \lVert W_k - \tilde W^c \rVert^2$.

    When models are returned, each of their clients joins the nearest center (E-step) and the
    centers become the means of the returned models (M-step); others keep their membership. First
    memberships are random and balanced, first centers are drawn independently. A client that never
    took part uses the model of the largest cluster.

    Args:
        clusters: $C$.
        weights: of the models in a center: "uniform" or by "samples".
        features: distances over "all" trained parameters, or those of the "last_layer" as in the
            authors' code.
        recluster_every: rounds between two E-steps.
        min_group: a center to which fewer models came back stays.
        aggregation: how models are merged: a rule of `functional.robust.RULES`, by its name or as a
            table with its settings, or the import path of a custom rule, a function of
            `functional.aggregation.ReceivedModels`; the mean when not given.
    """

    kind: ClassVar[str] = "fesem"
    summary: ClassVar[str] = (
        "several centers; clients train from the center nearest to their last model"
    )
    references: ClassVar[tuple[str, ...]] = (
        "Long, Xie, Shen, Zhou, Wang, Jiang, Multi-center federated learning: clients clustering "
        "for better "
        "personalization, 2023, https://arxiv.org/abs/2108.08647",
    )
    needs_single_models: ClassVar[str] = (
        "its server puts each client into the cluster whose model is nearest"
    )
    clusters: PositiveInt = 3
    weights: Weights = "uniform"
    features: Literal["all", "last_layer"] = "all"
    recluster_every: PositiveInt = 1
    min_group: PositiveInt = 1
    aggregation: Aggregation | None = None

    @property
    def averaging(self) -> Averaging:
        """Uniform or by samples."""
        return Averaging(self.weights, rule=self.aggregation)

    def init_server_state(self, task: Task, rng: Rng) -> FeSemClusters:
        """Return independent centers and random balanced memberships."""
        # No distance can be measured over columns that never arrive.
        apart = self.features == "last_layer" and not bool(
            (last_layer_mask(task.layout) & task.sharing.trained.mask).any()
        )
        require(
            not apart,
            "features",
            self.features,
            "'all': the last layer stays at home with this `shared`",
        )
        # A permutation modulo C: random, and balanced to within one member.
        order = rng.at_round(-1).generator("fesem.start").permutation(task.population)
        label = torch.from_numpy(order) % self.clusters
        models = task.draw_models(rng, self.clusters, different=True)
        # No momentum, hence no columns of velocity.
        return FeSemClusters(
            models, models[:, :0].double(), label, torch.zeros(task.population, dtype=torch.bool)
        )

    def reply_form(self) -> ReplyForm:
        """One model."""
        return ReplyForm(1)

    def reply(
        self, context: ServerContext, shared: FeSemClusters, message: Message
    ) -> tuple[FeSemClusters, Reply]:
        """Answer with the client's center, or the largest cluster's if it never took part."""
        assert message.ids is not None
        # First memberships are random: only those of clients that took part mean something.
        known = shared.label[shared.seen]
        label = shared.label
        if context.evaluating and len(known):
            label = torch.where(
                shared.seen, label, torch.bincount(known, minlength=self.clusters).argmax()
            )
        return shared, Reply(shared.models, label[message.ids][:, None])

    def aggregate(
        self, context: ServerContext, shared: FeSemClusters, message: Message
    ) -> FeSemClusters:
        """E-step and M-step over the models that came back."""
        assert message.ids is not None
        label = shared.label
        if context.index % self.recluster_every == 0:
            nearest = clustering.nearest_centers(
                self._select_features(context, message.params),
                self._select_features(context, shared.models),
            )
            # Other clients keep their membership.
            label = label.index_copy(0, message.ids, nearest.cpu())
        models = self.averaging.merge_groups(
            message, label[message.ids], shared.models, self.min_group, context
        )
        seen = shared.seen.index_fill(0, message.ids, True)
        return replace(shared, models=models, label=label, seen=seen)

    def _select_features(
        self, context: ServerContext, models: Float[Tensor, "rows params"]
    ) -> Float[Tensor, "rows features"]:
        if self.features == "all":
            return context.part.compared.select_from(models)
        return models[:, last_layer_mask(context.layout).to(models.device)]
