r"""SosicFL, SosicFL-All (endpoints in all layers) and SosicFL+ (personal models)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from coterie._util.settings import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from coterie.engine.optim import LocalTraining
from coterie.engine.task import Task
from coterie.errors import ConfigError, require
from coterie.exchange.base import Inbox, Message, Reply, ReplyForm
from coterie.functional import simplex
from coterie.functional.robust import Aggregation
from coterie.methods.base import Info, Round, State
from coterie.methods.cost import Cost, CostSetting, Phase
from coterie.methods.ditto import personal_training
from coterie.methods.fedavg import OneModel
from coterie.methods.server import (
    NO_MODEL,
    Averaging,
    Clusters,
    ServerContext,
    ask_server,
    empty_reply,
    fetch_served_models,
    first_models,
)
from coterie.models import simplex_layers
from coterie.models.layout import ModelFactory
from coterie.rng import Rng


@dataclass(frozen=True)
class SimplexClusters(Clusters):
    r"""One simplex model, and the regions that clients train in.

    Args:
        counts: samples of each class at each member of the population; 0 until it enrolled.
        region: the region of each member.
        centers: $\mu_l$.
        radius: of each region.
    """

    counts: Int[Tensor, "population classes"]
    region: Int[Tensor, " population"]
    centers: Float[Tensor, "regions topics"]
    radius: Float[Tensor, " regions"]


@dataclass(frozen=True)
class SimplexMethod(OneModel):
    r"""Simplex of models $w(\alpha) = (\theta_f, \sum_m \alpha_m \Theta_m)$, averaged as in FedAvg.

    From round `warmup_rounds` on a client draws $\alpha$ in every step uniformly from the region of
    its group, $\{\alpha : \lVert \alpha - \mu_l \rVert_1 \le r\}$, and is served $w(\mu_l)$;
    before, from the whole simplex, and is served its center.

    Args:
        endpoints: $M$; with label counts at most the number of classes.
        regions: $L$, with label counts.
        warmup_rounds: $\tau$; as many as the rounds of the run for plain simplex learning.
        assignment: "labels": each client's label counts, sent once, are described as mixtures of
            $M$ topics and grouped; "gradient" (Floco): the updates of all clients in round
            `warmup_rounds` place each client.
        radius: $\rho$; $r = \rho \bar d$ with the mean distance of the simplex to the centers. The
            paper's values are lost; 0.3 is ours.
        per_sample: one $\alpha$ for each sample instead of each mini-batch.
        head_lr_scale: factor of the endpoints' step size under SGD; the composed head moves by
            $\lVert \alpha \rVert^2$ times a plain head's step.
        test_samples: predicted probabilities are averaged over so many draws from the region; 1
            serves the center. Divides `endpoints`.
        aggregation: how models are merged: a rule of `functional.robust.RULES`, by its name or as a
            table with its settings, or the import path of a custom rule, a function of
            `functional.aggregation.ReceivedModels`; the mean when not given.

    Options of the published code are those of `papers.sosicfl.PublishedSimplex`.
    """

    scope: ClassVar[Literal["head", "all"]] = "head"
    needs_single_models: ClassVar[str] = (
        "its server groups clients by what each sends of its labels or gradients"
    )
    endpoints: PositiveInt = 10
    regions: PositiveInt = 10
    warmup_rounds: NonNegativeInt = 0
    assignment: Literal["labels", "gradient"] = "labels"
    radius: NonNegativeFloat = 0.3
    per_sample: bool = False
    head_lr_scale: PositiveFloat = 1.0
    test_samples: PositiveInt = 1
    aggregation: Aggregation | None = None

    @property
    def averaging(self) -> Averaging:
        """By samples, or by a rule."""
        return Averaging(rule=self.aggregation)

    def check(self) -> None:
        """Draws divide the endpoints; updates place clients after a round at least."""
        divides = self.endpoints % self.test_samples == 0
        require(
            divides, "test_samples", self.test_samples, f"a divisor of endpoints = {self.endpoints}"
        )
        early = self.assignment == "gradient" and self.warmup_rounds < 1
        require(
            not early,
            "warmup_rounds",
            self.warmup_rounds,
            f"at least 1 with assignment = {self.assignment!r}",
        )

    def build_model(self, source: ModelFactory) -> ModelFactory:
        """Give the last layer endpoints."""
        # The gain scales the layer in the forward pass and its gradient in the backward pass: a
        # step under SGD grows by its square.
        gain, bias = math.sqrt(self.head_lr_scale), self._bias_has_endpoints()
        return simplex_layers.simplex_head(
            source, self.endpoints, bias=bias, gain=gain, ensemble=self.test_samples > 1
        )

    def draw_first_model(self, task: Task, rng: Rng) -> Float[Tensor, " params"]:
        """Return the first model, with independently drawn endpoints.

        All endpoints of a module that was given start at its weights, and its served model is what
        was given; training separates them, since each has a weight of its own in every step.
        """
        rows = task.draw_models(rng, self.endpoints)
        xavier = self._draws_xavier() and not task.model.keeps_given
        gain = math.sqrt(self.head_lr_scale)
        return simplex_layers.independent_endpoints(
            task.layout, rows, rng, xavier=xavier, gain=gain
        )

    def _bias_has_endpoints(self) -> bool:
        return True

    def _draws_xavier(self) -> bool:
        """Return whether endpoints are drawn by Xavier's normal law with zero bias."""
        return self.scope == "head"

    def init_state(self, task: Task, rng: Rng) -> State:
        """Return the initial state; endpoints that stay at home are drawn independently."""
        state = super().init_state(task, rng)
        if task.sharing.shares_all:
            return state
        return replace(state, params=self.draw_first_model(task, rng).repeat(len(task), 1))

    def init_server_state(self, task: Task, rng: Rng) -> SimplexClusters:
        """Return the first model and one region: the whole simplex."""
        if self.assignment == "labels" and not task.classes:
            raise ConfigError(
                f"{self.kind} compares clients by how many samples of each class they have; "
                "these targets are not one "
                "class a sample: set assignment = 'gradient' (and warmup_rounds, 1 or more), or "
                "take another method"
            )
        begin = Averaging().init_clusters(
            self.draw_first_model(task, rng)[None], task.population, task.layout
        )
        # The barycenter of the simplex.
        middle = torch.full((1, self.endpoints), 1 / self.endpoints, dtype=torch.float64)
        counts = torch.zeros(task.population, task.classes, dtype=torch.int64)
        # No two points of the simplex are further apart than 2 in L1: radius 2 is all of it.
        whole = torch.full((1,), 2.0, dtype=torch.float64)
        return SimplexClusters(
            begin.models, begin.velocity, begin.label, counts, begin.label, middle, whole
        )

    # ---------------------------------------------------------------- where the server role is

    def select_cohort(
        self, shared: SimplexClusters, rng: Rng, population: int, participation: float | int
    ) -> Int[Tensor, " active"]:
        """Everybody in the round whose updates place the clients."""
        # Clients outside this round's cohort would never be placed.
        if self.assignment == "gradient" and rng.round == self.warmup_rounds:
            return torch.arange(population)
        return super().select_cohort(shared, rng, population, participation)

    def reply(
        self, context: ServerContext, shared: SimplexClusters, message: Message
    ) -> tuple[SimplexClusters, Reply]:
        """Place the clients when it is time; answer with the model and the client's region."""
        assert message.ids is not None
        # With `warmup_rounds` 0 clients are grouped while they enroll, in `_register_counts`.
        due = context.index == self.warmup_rounds > 0 and not context.evaluating
        if due and self.assignment == "labels":
            shared = self._group_by_labels(context, shared)
        # A row for each region, all views of the one model: the row picks the fields of the region.
        table = shared.models.expand(len(shared.centers), -1)
        fields = {"center": shared.centers, "radius": shared.radius}
        return shared, Reply(table, shared.region[message.ids][:, None], fields)

    def aggregate(
        self, context: ServerContext, shared: SimplexClusters, message: Message
    ) -> SimplexClusters:
        """Average; place the clients when their updates do it."""
        merged = super().aggregate(context, shared, message)
        if self.assignment == "labels" or context.index != self.warmup_rounds:
            return merged
        return self._place_by_gradients(context, shared, merged, message)

    def _register_counts(
        self, context: ServerContext, shared: SimplexClusters, message: Message
    ) -> tuple[SimplexClusters, Reply]:
        """Take note of label counts."""
        assert message.ids is not None
        # Label counts arrive from one device or another; the server keeps them on the CPU.
        shared = replace(
            shared, counts=shared.counts.index_copy(0, message.ids, message.fields["counts"].cpu())
        )
        if self.warmup_rounds == 0:
            shared = self._group_by_labels(context, shared)
        return shared, empty_reply(message)

    def _group_by_labels(self, context: ServerContext, shared: SimplexClusters) -> SimplexClusters:
        """Group clients by what their labels are mixed of."""
        # The stream of the enrollment, so that the groups do not depend on the round in which they
        # are found.
        stream = context.rng.at_round(-1).generator("regions")
        region, centers = self._cluster_mixtures(self._label_mixtures(shared, stream), stream)
        return replace(shared, region=region, centers=centers, radius=self._compute_radii(centers))

    def _label_mixtures(
        self, shared: SimplexClusters, stream: np.random.Generator
    ) -> Float[Tensor, "population topics"]:
        """Describe each client's labels as a mixture of topics, by latent Dirichlet allocation."""
        # scikit-learn takes seeds as 32-bit integers.
        seed = int(stream.integers(1 << 31))
        return simplex.topic_mixtures(shared.counts, self.endpoints, seed=seed)

    def _cluster_mixtures(
        self, mixtures: Float[Tensor, "population topics"], stream: np.random.Generator
    ) -> tuple[Int[Tensor, " population"], Float[Tensor, "regions topics"]]:
        """Group clients by mixtures; return each client's group and the centers of groups."""
        return simplex.cluster_points(
            mixtures, self.regions, stream, distance="l1", center="medoid"
        )

    def _place_by_gradients(
        self,
        context: ServerContext,
        before: SimplexClusters,
        shared: SimplexClusters,
        message: Message,
    ) -> SimplexClusters:
        """Place each client by its head's update; who did not answer keeps the whole simplex."""
        assert message.ids is not None
        # Columns that stay at home are 0 in every message: they say nothing about a client.
        inside, slots = context.part.shared.mask, simplex_layers.endpoint_slots(context.layout)
        received = [slot for slot in slots if bool(inside[slot.start : slot.stop].all())]
        if not received:
            raise ConfigError(
                f"{self.kind}: assignment = 'gradient' places clients by the updates of the "
                "endpoints, which stay at "
                "home with this `shared`; set assignment = 'labels', or share them"
            )
        columns = torch.cat([torch.arange(s.start, s.stop) for s in received])
        # Sent minus returned: the sign matters, see `simplex.gradient_points`.
        updates = (before.models - message.params)[:, columns.to(message.params.device)]
        centers = shared.centers[:1].expand(context.population, -1).clone()
        centers[message.ids] = simplex.gradient_points(updates.cpu(), self.endpoints)
        # Clients that did not answer keep the whole simplex (L1 radius 2).
        radius = torch.full((context.population,), 2.0, dtype=torch.float64)
        radius[message.ids] = self._compute_radii(centers)[message.ids]
        # Every client is a region of its own.
        return replace(
            shared, region=torch.arange(context.population), centers=centers, radius=radius
        )

    def _compute_radii(self, centers: Float[Tensor, "regions topics"]) -> Float[Tensor, " regions"]:
        radius = float(self.radius * self._radius_scale(centers))
        return torch.full((len(centers),), radius, dtype=torch.float64)

    def _radius_scale(self, centers: Float[Tensor, "regions topics"]) -> float | Tensor:
        return simplex.mean_distance(centers).mean()

    # ---------------------------------------------------------------- where the clients are

    def reply_form(self) -> ReplyForm:
        """One model, and the client's region."""
        return ReplyForm(
            1, {"center": (torch.float64, (self.endpoints,)), "radius": (torch.float64, ())}
        )

    @property
    def privacy_leak(self) -> str:
        """See `Method.privacy_leak`."""
        if self.assignment == "gradient":
            return ""
        return "the number of samples of each class is sent"

    def enroll(self, rnd: Round, state: State) -> State:
        """Send the server each client's number of samples of each class."""
        if self.assignment == "gradient":
            return state
        message = Message(state.params[:, :0], {"counts": rnd.task.class_counts()})
        return replace(
            state, shared=ask_server(rnd, self._register_counts, message, state.shared, NO_MODEL)[0]
        )

    def _region_sampler(self) -> Callable[..., Tensor]:
        """Return the function that draws points of a region."""
        return simplex.sample_region

    def draw_points(
        self, rnd: Round, offer: Inbox, purpose: str, counts: Sequence[int]
    ) -> Float[Tensor, "clients count topics"]:
        """Draw points from each client's region, from the client's own stream.

        Args:
            rnd: the round.
            offer: the server's answer, with the regions.
            purpose: names the streams.
            counts: points of each client. Where others have more, its center fills the rest.
        """
        sample = self._region_sampler()
        # The answer has one slot for each client.
        center, radius = (
            offer.field_by_slot("center")[:, 0].cpu(),
            offer.field_by_slot("radius")[:, 0].tolist(),
        )
        # Client by client, each from its own stream and as many as it needs, since a sampler draws
        # other points where it is asked for more: the draws do not depend on who else is hosted.
        out = center.double()[:, None].repeat(1, max(counts, default=0), 1)
        for row, (client, count) in enumerate(zip(rnd.ids.tolist(), counts, strict=True)):
            stream = rnd.rng.generator(purpose, client)
            out[row, :count] = sample(stream, center[row], radius[row], count)
        return out

    def draw_alpha_inputs(
        self, rnd: Round, offer: Inbox, purpose: str, local: LocalTraining
    ) -> dict[str, Tensor]:
        """Return the input buffers of a local training: one mixture a step, or one a sample."""
        # A mixture for each place of a batch; short batches leave some unused.
        each = 1
        if self.per_sample:
            each = rnd.local.batch_size
        steps = rnd.task.count_steps(local)
        alpha = self.draw_points(rnd, offer, purpose, [number * each for number in steps])
        if self.per_sample:
            alpha = alpha.unflatten(1, (max(steps, default=0), each))
        alpha = alpha.to(rnd.task.device, rnd.task.dtype)
        return simplex_layers.alpha_inputs(rnd.task.layout, alpha)

    def local_update(self, rnd: Round, state: State, reply: Inbox) -> tuple[State, Info]:
        """Train the simplex, each step at another of its points."""
        inputs = self.draw_alpha_inputs(rnd, reply, "alpha", rnd.local)
        return rnd.train(state, inputs=inputs)

    def compose_models(
        self, rnd: Round, rows: Float[Tensor, "clients params"], offer: Inbox
    ) -> Float[Tensor, "clients params"]:
        """Return models at the centers of their clients' regions, or at draws from them."""
        if self.test_samples == 1:
            alpha = offer.field_by_slot("center")
        else:
            alpha = self.draw_points(rnd, offer, "alpha.test", [self.test_samples] * len(rnd.ids))
        return simplex_layers.compose_endpoints(rnd.task.layout, rows, alpha)

    def serving_model(
        self, rnd: Round, state: State
    ) -> tuple[Float[Tensor, "clients params"], Info]:
        """Fetch the simplex and evaluate at the client's region center."""
        offer = fetch_served_models(self, rnd, state)
        rows = rnd.task.apply_buffer_policy(state.params, first_models(offer))
        return self.compose_models(rnd, rows, offer), {"label": offer.peers[:, 0]}

    def newcomer_candidates(
        self, context: ServerContext, shared: SimplexClusters
    ) -> Float[Tensor, "models params"]:
        """Return the model at the barycenter of the simplex."""
        middle = torch.full((1, 1, self.endpoints), 1 / self.endpoints, dtype=torch.float64)
        return simplex_layers.compose_endpoints(context.layout, shared.models[:1], middle)

    def newcomer_model(self, rnd: Round, state: State) -> Float[Tensor, "clients params"]:
        """Fetch the simplex and stand at its barycenter."""
        offer = fetch_served_models(self, rnd, state)
        rows = rnd.task.apply_buffer_policy(state.params, first_models(offer))
        # A newcomer has no region yet.
        middle = torch.full((len(rows), 1, self.endpoints), 1 / self.endpoints, dtype=torch.float64)
        return simplex_layers.compose_endpoints(rnd.task.layout, rows, middle)

    def cost(self, setting: CostSetting, phase: Phase) -> Cost:
        """Say that it depends on the model and the stage."""
        raise ConfigError(
            f"what {self.kind} sends depends on the model and the stage; count what a run of it "
            "cost"
        )


REFERENCES = (
    "Grinwald, Wiesner, Nakajima, Federated learning over connected modes, 2024, "
    "https://arxiv.org/abs/2403.03333",
)


@dataclass(frozen=True)
class SosicFl(SimplexMethod):
    """Federated averaging of a simplex of heads; client groups train and use their own region.

    See `SimplexMethod` for the settings.
    """

    kind: ClassVar[str] = "sosicfl"
    summary: ClassVar[str] = (
        "FedAvg of a simplex of heads; groups of clients train and use their own region of it"
    )
    references: ClassVar[tuple[str, ...]] = REFERENCES


@dataclass(frozen=True)
class SosicFlAll(SimplexMethod):
    """SosicFL with endpoints of every trained tensor and one mixture; M times the traffic.

    Running statistics stay single. See `SimplexMethod` for the settings; the head has no scale of
    its own here.
    """

    kind: ClassVar[str] = "sosicfl-all"
    summary: ClassVar[str] = "SosicFL with endpoints in all layers"
    references: ClassVar[tuple[str, ...]] = REFERENCES
    scope: ClassVar = "all"

    def check(self) -> None:
        """One mixture for all layers has no head of its own."""
        super().check()
        for name, only in (("per_sample", False), ("test_samples", 1), ("head_lr_scale", 1.0)):
            require(getattr(self, name) == only, name, getattr(self, name), f"{only}")

    def build_model(self, source: ModelFactory) -> ModelFactory:
        """Give every layer endpoints."""
        return simplex_layers.simplex_all(source, self.endpoints)


@dataclass(frozen=True)
class PersonalSimplex:
    """The personal simplex model of each client, and whether it has one yet."""

    model: Float[Tensor, "clients params"]
    started: Bool[Tensor, " clients"]


@dataclass(frozen=True)
class SosicFlPlus(SimplexMethod):
    r"""SosicFL with a personal simplex for each client, kept near the global one as in Ditto.

    The personal step adds $\lambda (v - w^t)$ on all parameters. A client is served its personal
    model at the center of the region that it was trained in. See `SimplexMethod` for the other
    settings.

    Args:
        lam: $\lambda$.
        global_rounds: train personal models only from this round on, each from the global model as
            it is then, which no longer changes; None trains both in every round.
        personal_region: where mixtures of the personal model are drawn: the client's "own" region,
            or the "whole" simplex, whose center is then served, as in all versions of the authors'
            code but one.
        personal_epochs: epochs of the personal model; those of the run when None.
        personal_steps: steps of the personal model instead.
    """

    kind: ClassVar[str] = "sosicfl-plus"
    tracks: ClassVar[int] = 2
    timed_against: ClassVar[str] = "ditto"
    summary: ClassVar[str] = "SosicFL with a personal simplex for each client, near the global one"
    references: ClassVar[tuple[str, ...]] = REFERENCES
    lam: NonNegativeFloat = 1.0
    global_rounds: PositiveInt | None = None
    personal_region: Literal["own", "whole"] = "own"
    personal_epochs: NonNegativeInt | None = None
    personal_steps: NonNegativeInt | None = None

    def _is_posthoc(self, index: int) -> bool:
        return self.global_rounds is not None and index >= self.global_rounds

    def init_memory(self, task: Task, rng: Rng) -> PersonalSimplex:
        """Everybody starts at the first model."""
        first_model = self.draw_first_model(task, rng).expand(len(task), -1).clone()
        # With `global_rounds` the personal models start from the final global model: none has
        # started yet.
        return PersonalSimplex(first_model, torch.full((len(task),), self.global_rounds is None))

    def aggregate(
        self, context: ServerContext, shared: SimplexClusters, message: Message
    ) -> SimplexClusters:
        """Average, unless the global model is final."""
        if self._is_posthoc(context.index):
            return shared
        return super().aggregate(context, shared, message)

    def local_update(self, rnd: Round, state: State, reply: Inbox) -> tuple[State, Info]:
        """Train the global simplex unless its time is over, then the personal ones."""
        posthoc, shared_round = self._is_posthoc(rnd.index), rnd
        if posthoc:
            # No step changes the model, but the report keeps its form.
            shared_round = replace(rnd, local=replace(rnd.local, steps=0))
        trained, info = super().local_update(shared_round, state, reply)
        if self.global_rounds is not None and not posthoc:
            return trained, info
        memory: PersonalSimplex = state.memory
        local = personal_training(rnd.local, self.personal_epochs, self.personal_steps)
        inputs = self.draw_alpha_inputs(rnd, self._personal_offer(reply), "alpha.personal", local)
        # A copy where some client has no personal model yet; only a copy may be trained in place.
        own = _own_or_received(memory, state.params)
        personal, more = rnd.train(
            replace(trained, params=own), local=local, anchor=state.params, prox=self.lam,
            inputs=inputs,
            purpose="batches.personal", track=1, in_place=own is not memory.model,
        )  # fmt: skip
        # A client that trained has a personal model from now on.
        memory = PersonalSimplex(personal.params, torch.ones_like(memory.started))
        new = replace(personal, params=trained.params, memory=memory)
        return new, {**info, "train_samples": info["train_samples"] + more["train_samples"]}

    def serving_model(
        self, rnd: Round, state: State
    ) -> tuple[Float[Tensor, "clients params"], Info]:
        """Evaluate at the region center of the client's own simplex, or else of the global one."""
        offer = fetch_served_models(self, rnd, state)
        received = rnd.task.apply_buffer_policy(state.params, first_models(offer))
        own = _own_or_received(state.memory, received)
        return self.compose_models(rnd, own, self._personal_offer(offer)), {
            "label": offer.peers[:, 0]
        }

    def _personal_offer(self, offer: Inbox) -> Inbox:
        """Return the offer with the region of the personal model in it."""
        if self.personal_region == "own":
            return offer
        center = torch.full_like(offer.fields["center"], 1 / self.endpoints)
        whole = {"center": center, "radius": torch.full_like(offer.fields["radius"], 2.0)}
        return replace(offer, fields={**offer.fields, **whole})


def _own_or_received(
    memory: PersonalSimplex, received: Float[Tensor, "clients params"]
) -> Float[Tensor, "clients params"]:
    """Return each client's personal model, or else what it received; no copy if all have one."""
    started = memory.started
    if bool(started.all()):
        return memory.model
    return torch.where(started.to(received.device)[:, None], memory.model, received)
