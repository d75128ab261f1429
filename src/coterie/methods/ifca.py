"""IFCA: several models; each client takes the one with the least loss on its data."""

import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from coterie._util.settings import NonNegativeFloat, NonNegativeInt, PositiveInt, Share
from coterie.engine.task import Task
from coterie.errors import require
from coterie.exchange.base import Inbox, Message, Reply, ReplyForm
from coterie.functional.robust import Aggregation
from coterie.methods.base import Info, Round, State
from coterie.methods.cost import Cost, CostSetting, Phase, cost_of_moving
from coterie.methods.server import (
    NO_MODEL,
    Averaging,
    ServerContext,
    ServerMethod,
    Weights,
    ask_server,
    empty_reply,
    fetch_served_models,
    gradient_variance_report,
    model_request,
    send_models,
    traffic_report,
)
from coterie.models.simplex_layers import last_layer_mask
from coterie.rng import Rng

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class IfcaModels:
    """The server's models. While clients enroll with `start="resample"`, all candidates."""

    models: Float[Tensor, "clusters params"]


@final
@dataclass(frozen=True)
class Ifca(ServerMethod):
    r"""Iterative federated clustering: $\hat c_k = \arg\min_c F_k(\theta_c)$ on the client's data.

    Every client of the cohort receives all models, trains the best one (ties go to the first) and
    returns it with its choice. Clients outside the cohort use the model that is best on their
    training data.

    Args:
        clusters: $C$.
        averaging_of: "models": a cluster's model becomes the mean of the returned models;
            "gradients": it moves by `step` times the sum of its clients' updates divided by the
            size of the whole cohort, which is gradient averaging when clients take one plain SGD
            step.
        step: see `averaging_of`.
        share_representation: all layers but the last are averaged over the whole cohort.
        start: "independent" models; "resample": of `candidates` sets of models the first in which
            every cluster attracts `resample_share` of the clients (else the most balanced one);
            "random_groups": for `group_rounds` rounds clients train the model of a random group
            instead of the best one.
        candidates: see `start`.
        resample_share: see `start`.
        group_rounds: see `start`.
        min_group: a cluster with fewer clients in a round keeps its model.
        aggregation: how models are merged: a rule of `functional.robust.RULES`, by its name or as a
            table with its settings, or the import path of a custom rule, a function of
            `functional.aggregation.ReceivedModels`; the mean when not given.
    """

    kind: ClassVar[str] = "ifca"
    summary: ClassVar[str] = (
        "several models; each client trains the one with the least loss on its data"
    )
    references: ClassVar[tuple[str, ...]] = (
        "Ghosh, Chung, Yin, Ramchandran, An efficient framework for clustered federated "
        "learning, 2020, "
        "https://arxiv.org/abs/2006.04088",
    )
    needs_single_models: ClassVar[str] = "its server averages the groups that single clients chose"
    clusters: PositiveInt = 3
    averaging_of: Literal["models", "gradients"] = "models"
    step: NonNegativeFloat = 1.0
    share_representation: bool = False
    start: Literal["independent", "resample", "random_groups"] = "independent"
    candidates: PositiveInt = 10
    resample_share: Share = 0.1
    group_rounds: NonNegativeInt = 20
    min_group: PositiveInt = 1
    aggregation: Aggregation | None = None

    @property
    def averaging(self) -> Averaging:
        """By samples, or uniform where updates are summed; or by a rule."""
        weights: Weights = "samples" if self.averaging_of == "models" else "uniform"
        return Averaging(weights, rule=self.aggregation)

    def check(self) -> None:
        """Every cluster can attract its share."""
        fits = self.resample_share * self.clusters <= 1
        require(
            fits,
            "resample_share",
            self.resample_share,
            f"at most 1 / clusters = {1 / self.clusters:.3g}",
        )

    @property
    def privacy_leak(self) -> str:
        """See `Method.privacy_leak`."""
        return "the cluster is chosen by the losses of the models on the training data"

    def init_server_state(self, task: Task, rng: Rng) -> IfcaModels:
        """Return independently drawn models."""
        # All candidate sets in one matrix: set by set, cluster by cluster.
        count = self.clusters
        if self.start == "resample":
            count *= self.candidates
        return IfcaModels(task.draw_models(rng, count, different=True))

    def enroll(self, rnd: Round, state: State) -> State:
        """Choose among candidates by what clients would choose among them."""
        if self.start != "resample":
            return state
        every = ReplyForm(self.candidates * self.clusters)
        shared, offer = ask_server(
            rnd, _reply_with_all_models, model_request(state), state.shared, every
        )
        # [clients, candidate sets, clusters]: the order in which the models were drawn.
        scores = replace_nan_losses(rnd.task.score(offer)).reshape(
            len(rnd.task), self.candidates, self.clusters
        )
        message = Message(state.params[:, :0], {"label": scores.argmin(2)})
        return replace(
            state,
            shared=ask_server(rnd, partial(_choose_candidates, self), message, shared, NO_MODEL)[0],
        )

    def reply_form(self) -> ReplyForm:
        """All models."""
        return ReplyForm(self.clusters)

    def reply(
        self, context: ServerContext, shared: IfcaModels, message: Message
    ) -> tuple[IfcaModels, Reply]:
        """Answer with all models; while groups are random, with the model of the client's group."""
        grouped = self.start == "random_groups" and context.index < self.group_rounds
        if context.evaluating or not grouped:
            return _reply_with_all_models(context, shared, message)
        assert message.ids is not None
        # The stream of the enrollment: the groups are the same in all rounds.
        order = context.rng.at_round(-1).generator("ifca.groups").permutation(context.population)
        group = torch.from_numpy(order)[message.ids][:, None] % self.clusters
        return shared, Reply(shared.models, group)

    def aggregate(self, context: ServerContext, shared: IfcaModels, message: Message) -> IfcaModels:
        """Average cluster by cluster."""
        label = message.fields["label"]
        old, groups = shared.models, torch.bincount(label, minlength=self.clusters)
        # A mean of one model is that model: other clients would receive a client's own model.
        lone = (groups == 1) & (self.min_group == 1)
        for cluster in lone.nonzero().flatten().tolist():
            logger.info(
                "cluster %d has a single client in round %d: its model is that client's",
                cluster,
                context.index,
            )
        new = self.averaging.merge_groups(message, label, old, self.min_group, context)
        if self.averaging_of == "gradients":
            # Unweighted: $n_c$ times the mean update is the sum of the updates.
            pull = (self.step * groups / len(message))[:, None].to(old)
            new = old + pull * (new - old)
        if self.share_representation:
            own = last_layer_mask(context.layout).to(old.device)
            # The representation is the mean over the cohort, whatever `min_group` keeps of the
            # heads.
            everybody = torch.zeros_like(label)
            whole = Averaging(rule=self.aggregation)
            # All models have one representation, so that any of them is the one before.
            new = torch.where(own, new, whole.merge_groups(message, everybody, old[:1], 1, context))
        return IfcaModels(new)

    def round(self, rnd: Round, state: State) -> tuple[State, Info]:
        """Receive the models, take the best, train it, send it with the choice."""
        request = model_request(state)
        grouped = self.start == "random_groups" and rnd.index < self.group_rounds
        form = ReplyForm(self.clusters)
        if grouped:
            form = ReplyForm(1)
        shared, offer = ask_server(rnd, self.reply, request, state.shared, form)
        label, model = choose_cluster(rnd.task, offer)
        start = rnd.task.apply_buffer_policy(state.params, model)
        new, info = self.local_update(rnd, replace(state, params=start), offer)
        message = Message(new.params, {"samples": rnd.task.num_samples, "label": label})
        shared, refused = send_models(self, rnd, message, shared)
        # Each client evaluates every offered model on all its training samples.
        passes = offer.mask.sum(1) * rnd.task.count_samples("train")
        return replace(new, shared=shared), {
            **info,
            "label": label,
            "passes": passes,
            **refused,
            **traffic_report(rnd, offer, request, message),
            **gradient_variance_report(rnd, start, new.params),
        }

    def serving_model(
        self, rnd: Round, state: State
    ) -> tuple[Float[Tensor, "clients params"], Info]:
        """Fetch all models and take the best on the training data."""
        offer = fetch_served_models(self, rnd, state)
        label, model = choose_cluster(rnd.task, offer)
        return rnd.task.apply_buffer_policy(state.params, model), {"label": label}

    def add_members(
        self, shared: IfcaModels, models: Float[Tensor, "newcomers params"]
    ) -> IfcaModels:
        """The server remembers nothing of its clients."""
        return shared

    def cost(self, setting: CostSetting, phase: Phase) -> Cost:
        """Fetch all models; in a round, score them and send one."""
        if phase == "enroll":
            return Cost()
        fetched = cost_of_moving(setting, self.clusters)
        if phase == "evaluate":
            return fetched
        scored = self.clusters * (self.clusters > 1)  # a single model is taken unseen
        return fetched + cost_of_moving(setting, 1) + Cost(passes=scored * setting.samples)


def replace_nan_losses(losses: Float[Tensor, "clients peers"]) -> Float[Tensor, "clients peers"]:
    """Return losses of which a diverged model never has the least."""
    return losses.nan_to_num(nan=torch.inf)


def choose_cluster(
    task: Task, offer: Inbox
) -> tuple[Int[Tensor, " clients"], Float[Tensor, "clients params"]]:
    """Return each client's cluster, that of the least training loss, and its offered model.

    What a client measured after a round holds for the offer of the next one: the server's models
    are the same.
    """
    best = (
        # argmin takes the first of equal losses.
        replace_nan_losses(task.score(offer, keep=True)).argmin(1).to(offer.index.device)[:, None]
    )
    # `peers` numbers the server's models, and `index` the rows that came: a node gets those alone
    # that its clients are shown.
    label = offer.peers.to(best.device).gather(1, best)[:, 0]
    return label, offer.table[offer.index.gather(1, best)[:, 0]]


def _reply_with_all_models(
    context: ServerContext, shared: IfcaModels, message: Message
) -> tuple[IfcaModels, Reply]:
    return shared, Reply.to_every_client(shared.models, len(message))


def _choose_candidates(
    method: Ifca, context: ServerContext, shared: IfcaModels, message: Message
) -> tuple[IfcaModels, Reply]:
    """Keep the first models where every cluster attracts its share, or the most balanced ones."""
    label = message.fields["label"]
    # [clusters, candidate sets]: the share of the least attractive cluster of each set.
    attracted = torch.stack([(label == c).float().mean(0) for c in range(method.clusters)]).amin(0)
    good = attracted >= method.resample_share
    chosen = int(attracted.argmax())
    if bool(good.any()):
        chosen = int(good.nonzero()[0])
    sets = shared.models.reshape(method.candidates, method.clusters, -1)
    return IfcaModels(sets[chosen].clone()), empty_reply(message)
