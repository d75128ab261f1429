"""FedProx: FedAvg with a proximal term that keeps clients near the model they received."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from coterie._util.settings import NonNegativeFloat
from coterie.engine.task import Task
from coterie.errors import require
from coterie.exchange.base import Inbox, Message, Reply
from coterie.functional import selection
from coterie.functional.robust import Aggregation
from coterie.methods.base import Info, Round, State, draw_cohort_noise
from coterie.methods.fedavg import OneModel
from coterie.methods.server import (
    NO_MODEL,
    Averaging,
    Clusters,
    ServerContext,
    Weights,
    ask_server,
    empty_reply,
    extend_labels,
)
from coterie.rng import Rng


@dataclass(frozen=True)
class FedProxClusters(Clusters):
    """Clusters, and how many training samples each client has: filled while clients enroll."""

    samples: Float[Tensor, " population"]


@final
@dataclass(frozen=True)
class FedProx(OneModel):
    r"""FedAvg with the objective $F_k(\theta) + \frac{\mu}{2} \lVert \theta - \theta^t \rVert^2$.

    The reported loss does not include the penalty.

    Args:
        mu: weight of the penalty ($\mu$); the papers try 0.001, 0.01, 0.1 and 1.
        weights: weights of the clients in the mean: "samples" or "uniform".
        sampling: clients are drawn uniformly, or with probability proportional to their samples
            (then the paper averages with uniform weights).
        aggregation: how models are merged: a rule of `functional.robust.RULES`, by its name or as a
            table with its settings, or the import path of a custom rule, a function of
            `functional.aggregation.ReceivedModels`; the weighted mean when not given.
    """

    kind: ClassVar[str] = "fedprox"
    summary: ClassVar[str] = (
        "FedAvg with a proximal term that keeps clients near the model they received"
    )
    references: ClassVar[tuple[str, ...]] = (
        "Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, Federated optimization in heterogeneous "
        "networks, 2020, "
        "https://arxiv.org/abs/1812.06127",
    )
    mu: NonNegativeFloat = 0.01
    weights: Weights = "samples"
    sampling: Literal["uniform", "samples"] = "uniform"
    aggregation: Aggregation | None = None

    @property
    def averaging(self) -> Averaging:
        """By samples, uniform, or by a custom rule."""
        return Averaging(self.weights, rule=self.aggregation)

    def init_server_state(self, task: Task, rng: Rng) -> FedProxClusters:
        """Return the server's state; nobody's samples are known yet."""
        start = self.averaging.init_clusters(task.draw_models(rng, 1), task.population, task.layout)
        return FedProxClusters(
            start.models,
            start.velocity,
            start.label,
            # Equal counts until clients enroll: a uniform draw.
            torch.ones(task.population, dtype=torch.float64),
        )

    def enroll(self, rnd: Round, state: State) -> State:
        """Send the server each client's number of samples, when it draws by them."""
        if self.sampling == "uniform":
            return state
        message = Message(state.params[:, :0], {"samples": rnd.task.num_samples})
        return replace(
            state, shared=ask_server(rnd, _register_samples, message, state.shared, NO_MODEL)[0]
        )

    def select_cohort(
        self, shared: FedProxClusters, rng: Rng, population: int, participation: float | int
    ) -> Int[Tensor, " active"]:
        """Draw uniformly, or by samples."""
        # As in `Method.select_cohort`; with equal counts the draw is the same.
        count = selection.cohort_size(population, participation, least=3)
        return selection.draw_cohort(
            draw_cohort_noise(rng, population), count, log_weights=shared.samples.log()
        )

    def local_update(self, rnd: Round, state: State, reply: Inbox) -> tuple[State, Info]:
        """Train with the penalty."""
        return rnd.train(state, anchor=state.params, prox=self.mu)

    def add_members(
        self, shared: FedProxClusters, models: Float[Tensor, "newcomers params"]
    ) -> FedProxClusters:
        """Add newcomers, unless clients are drawn by samples: the server lacks their numbers."""
        fits = self.sampling == "uniform"
        require(
            fits,
            "new_client_others",
            "training",
            f"'frozen' with {self.kind}'s sampling = {self.sampling!r}",
        )
        # As for all others: with uniform sampling nobody's samples are known.
        more = torch.ones(len(models), dtype=shared.samples.dtype)
        return replace(
            shared, label=extend_labels(shared, models), samples=torch.cat([shared.samples, more])
        )

    def adapt_newcomer(
        self, rnd: Round, state: State, received: Float[Tensor, "clients params"]
    ) -> State:
        """Train with the penalty, near the model that was received."""
        return rnd.train(state, anchor=received, prox=self.mu)[0]


def _register_samples(
    context: ServerContext, shared: FedProxClusters, message: Message
) -> tuple[FedProxClusters, Reply]:
    assert message.ids is not None
    # float64, as the logarithms of the draw.
    samples = shared.samples.index_copy(0, message.ids, message.fields["samples"].double())
    return replace(shared, samples=samples), empty_reply(message)
