"""FedDrift: a client whose loss rises starts a model of its own; models that do alike are merged."""

from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from coterie._util.settings import NonNegativeFloat, PositiveInt
from coterie.engine.task import Task
from coterie.exchange.base import Message, Reply
from coterie.functional import clustering
from coterie.functional.robust import Aggregation
from coterie.methods.base import Info, Round, State
from coterie.methods.cost import Cost, CostSetting, Phase
from coterie.methods.server import (
    Averaging,
    Clusters,
    ServerContext,
    ServerMethod,
    ask_server,
    gradient_variance_report,
    model_request,
    send_models,
    traffic_report,
)
from coterie.rng import Rng

_WORST = 1e30  # the loss of a model that diverged: a message holds finite numbers


@dataclass(frozen=True)
class FedDriftClusters(Clusters):
    """The models, whose each client is, and which are in use.

    Args:
        used: the last round in which each model had a client; -1 for an empty place.
    """

    used: Int[Tensor, " clusters"]


@dataclass(frozen=True)
class LastLoss:
    r"""What clients remember: $\ell_c^{(t-1)}$, infinite before their first time step."""

    loss: Float[Tensor, " clients"]


@final
@dataclass(frozen=True)
class FedDrift(ServerMethod):
    r"""Clusters that follow drifts: local detection, then hierarchical merging.

    A time step $t$ is `every` rounds. In its first round each client of the cohort receives all
    models and measures their losses $\ell_c^{(t)}(\theta_m)$ on its training data. It takes the best
    one, unless $\min_m \ell_c^{(t)}(\theta_m) > \ell_c^{(t-1)} + \delta$, where $\ell_c^{(t-1)}$ is
    the least loss of its last time step: then it has drifted, and isolates itself with a new model,
    which begins from the best one. The server then merges models with clients, by complete linkage
    up to $\delta$, of the distances $D(i, j) = \max(L_{ij} - L_{ii}, L_{ji} - L_{jj}, 0)$, where
    $L_{ij}$ is the loss of model $j$ on the data of the clients of model $i$; models that are new in
    this step wait for the next one. In all rounds a model becomes the mean of what its clients
    return. The authors' code measures accuracies in place of losses; in both, clients of a model that
    is merged train it from where they were, so that it is merged in the mean of the step's first
    round.

    A model without clients stays, for a concept that comes back, until its place is needed. Clients
    train on the data that they have now: of earlier time steps nothing is kept.

    Args:
        delta: $\delta$, in units of the loss.
        every: rounds of a time step ($R$).
        most: models at most; with none to spare a client that drifts takes the best one.
        aggregation: how models are merged: a rule of `functional.robust.RULES`, by its name or as a
            table with its settings, or the import path of a custom rule, a function of
            `functional.aggregation.ReceivedModels`; the mean when not given.
    """

    kind: ClassVar[str] = "feddrift"
    summary: ClassVar[str] = (
        "a client whose loss rises starts a new model; models that do alike are merged"
    )
    references: ClassVar[tuple[str, ...]] = (
        "Jothimurugesan, Hsieh, Wang, Joshi, Gibbons, Federated learning under distributed concept "
        "drift, 2022, https://arxiv.org/abs/2206.00799",
    )
    needs_single_models: ClassVar[str] = "its server averages the groups that single clients chose"
    delta: NonNegativeFloat = 0.1
    every: PositiveInt = 5
    most: PositiveInt = 10
    aggregation: Aggregation | None = None

    @property
    def averaging(self) -> Averaging:
        """By samples, or by a rule."""
        return Averaging(rule=self.aggregation)

    @property
    def privacy_leak(self) -> str:
        """See `Method.privacy_leak`."""
        return "the losses of the models on the training data are sent, and choose the cluster"

    def _begins_step(self, index: int) -> bool:
        return index >= 0 and index % self.every == 0

    def init_memory(self, task: Task, rng: Rng) -> LastLoss:
        """Return a loss above which nothing rises."""
        return LastLoss(torch.full((len(task),), torch.inf, dtype=torch.float64))

    def init_server_state(self, task: Task, rng: Rng) -> FedDriftClusters:
        """Return one model of which everybody is, and empty places."""
        first = task.draw_models(rng, 1)
        models = torch.cat([first, first.new_zeros(self.most - 1, first.shape[1])])
        begin = Averaging().init_clusters(models, task.population, task.layout)
        used = torch.full((self.most,), -1)
        used[0] = 0
        return FedDriftClusters(begin.models, begin.velocity, begin.label, used)

    # ---------------------------------------------------------------- where the server role is

    def reply_form(self) -> None:
        """How many models there are is not known before."""

    def reply(
        self, context: ServerContext, shared: FedDriftClusters, message: Message
    ) -> tuple[FedDriftClusters, Reply]:
        """Answer with all models at the beginning of a time step, else with the client's."""
        if context.evaluating or not self._begins_step(context.index):
            return super().reply(context, shared, message)
        rows = (shared.used >= 0).nonzero().flatten()
        table = shared.models[rows.to(shared.models.device)]
        reply = Reply.to_every_client(table, len(message))
        return shared, replace(reply, fields={"place": rows})

    def aggregate(
        self, context: ServerContext, shared: FedDriftClusters, message: Message
    ) -> FedDriftClusters:
        """Average cluster by cluster; at the beginning of a time step found and merge first."""
        assert message.ids is not None
        if self._begins_step(context.index):
            shared = self._follow_drift(context, shared, message)
        group = shared.label[message.ids]
        new = self.averaging.update_models(shared, message, group, 1, context)
        used = shared.used.index_fill(0, shared.label.unique(), context.index)
        return replace(new, used=used)

    def _follow_drift(
        self, context: ServerContext, shared: FedDriftClusters, message: Message
    ) -> FedDriftClusters:
        """Return the state with the clients' clusters of a new time step."""
        assert message.ids is not None
        chosen, drifted = message.fields["label"], message.fields["drifted"] > 0
        rows, used = (shared.used >= 0).nonzero().flatten(), shared.used.clone()
        label = shared.label.index_copy(0, message.ids, chosen)
        stay = message.take_rows((~drifted).nonzero().flatten())
        target = self._merge_clusters(rows, stay)
        label = target[label]
        # Merged models free their places.
        used[target != torch.arange(len(target))] = -1
        for client in message.ids[drifted].tolist():
            serves = torch.zeros(self.most, dtype=torch.bool)
            serves[label] = True
            # An empty place (-1) first, then the model that has had no client for longest.
            place = int(torch.where(serves, torch.iinfo(torch.int64).max, used).argmin())
            if not serves[place]:
                label[client], used[place] = place, context.index
        return replace(shared, label=label, used=used)

    def _merge_clusters(
        self, rows: Int[Tensor, " models"], message: Message
    ) -> Int[Tensor, " clusters"]:
        """Return into which model each one is merged: itself where it is not.

        Args:
            rows: the places of the models that were offered.
            message: of the clients that chose one of them.
        """
        target, choice = torch.arange(self.most), message.fields["label"]
        weights = self.averaging.client_weights(message).double()
        losses = message.fields["model_losses"].double()
        # Models that somebody chose: only of their clients there are losses.
        there = torch.tensor([place for place in rows.tolist() if bool((choice == place).any())])
        if len(there) < 2:
            return target
        columns = torch.searchsorted(rows, there)
        mean = []
        for place in there.tolist():
            own = choice == place
            share = weights[own] / weights[own].sum()
            mean.append((share[:, None] * losses[own][:, columns]).sum(0))
        group = clustering.merge_close(clustering.compute_loss_distances(torch.stack(mean)), self.delta)  # fmt: skip
        for number in group.unique().tolist():
            together = there[group == number]
            target[together] = together.min()
        return target

    # ---------------------------------------------------------------- where the clients are

    def round(self, rnd: Round, state: State) -> tuple[State, Info]:
        """Receive models, choose or drift at the beginning of a time step, train, send."""
        if not self._begins_step(rnd.index):
            return super().round(rnd, state)
        request = model_request(state)
        shared, offer = ask_server(rnd, self.reply, request, state.shared)
        losses = rnd.task.score(offer).double().cpu().nan_to_num(nan=_WORST).clamp(max=_WORST)
        least, best = losses.min(1)
        drifted = least > state.memory.loss + self.delta
        row = offer.index.gather(1, best.to(offer.index.device)[:, None])[:, 0]
        label = offer.fields["place"][row]
        start = rnd.task.apply_buffer_policy(state.params, offer.table[row])
        new, info = self.local_update(rnd, replace(state, params=start), offer)
        fields = {
            "samples": rnd.task.num_samples,
            "label": label,
            "drifted": drifted.to(torch.int64),
            "model_losses": losses,
        }
        message = Message(new.params, fields)
        shared, refused = send_models(self, rnd, message, shared)
        return replace(new, shared=shared, memory=LastLoss(least)), {
            **info,
            "label": label,
            # Each client evaluates every offered model on all its training samples.
            "passes": offer.mask.sum(1) * rnd.task.count_samples("train"),
            **refused,
            **traffic_report(rnd, offer, request, message),
            **gradient_variance_report(rnd, start, new.params),
        }

    def cost(self, setting: CostSetting, phase: Phase) -> Cost:
        """As long as there is one model: fetch it, score it in the first round of a step, send it."""
        found = super().cost(setting, phase)
        if isinstance(phase, str) or not self._begins_step(phase):
            return found
        return found + Cost(passes=setting.samples)
