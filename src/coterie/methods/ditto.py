"""Ditto: FedAvg, and a personal model for each client that is kept near the global model."""

from dataclasses import dataclass, replace
from typing import ClassVar, final

from jaxtyping import Float
from torch import Tensor

from coterie._util.settings import NonNegativeFloat, NonNegativeInt
from coterie.engine.task import LocalTraining, Task
from coterie.exchange.base import Inbox
from coterie.functional.robust import Aggregation
from coterie.methods.base import Info, Round, State
from coterie.methods.cost import Cost, CostSetting, Phase, cost_of_moving
from coterie.methods.fedavg import OneModel
from coterie.methods.server import Averaging, Weights
from coterie.rng import Rng


@dataclass(frozen=True)
class PersonalMemory:
    """The personal model of each client ($v_k$); $w^0$ until it first takes part."""

    model: Float[Tensor, "clients params"]


@dataclass(frozen=True)
class PersonalModels(OneModel):
    """A server with one model, whose clients use models of their own, which they remember."""

    def serving_model(
        self, rnd: Round, state: State
    ) -> tuple[Float[Tensor, "clients params"], Info]:
        """Each client has its own."""
        return state.memory.model, {}

    def newcomer_model(self, rnd: Round, state: State) -> Float[Tensor, "clients params"]:
        """Fetch the server's model."""
        return super().serving_model(rnd, state)[0]

    def cost(self, setting: CostSetting, phase: Phase) -> Cost:
        """Fetch the server's model and send one; evaluating a personal model fetches nothing."""
        if isinstance(phase, str):
            return Cost()
        return cost_of_moving(setting, 2)


@final
@dataclass(frozen=True)
class Ditto(PersonalModels):
    r"""FedAvg, and for each client $\min_v F_k(v) + \frac{\lambda}{2} \lVert v - w \rVert^2$.

    The personal step is $v \leftarrow v - \eta (\nabla F_k(v) + \lambda (v - w^t))$ with the global
    model as received. The global models are FedAvg's, bit for bit. A client uses its personal
    model.

    Args:
        lam: $\lambda$; 0 is local training, and large values keep the personal model at the global
            one. The step is stable while `lam` times the step size is below 2.
        weights: weights of the clients in the global mean: "samples", or "uniform" as in the
            original code.
        interleaved: both models see the same mini-batches, as in the original code; otherwise each
            draws its own.
        personal_epochs: epochs of the personal model; those of the run when None.
        personal_steps: steps of the personal model instead.
        aggregation: how models are merged: a rule of `functional.robust.RULES`, by its name or as a
            table with its settings, or the import path of a custom rule, a function of
            `functional.aggregation.ReceivedModels`; the weighted mean when not given.
    """

    kind: ClassVar[str] = "ditto"
    tracks: ClassVar[int] = 2
    summary: ClassVar[str] = (
        "FedAvg, and a personal model for each client that stays near the global one"
    )
    references: ClassVar[tuple[str, ...]] = (
        "Li, Hu, Beirami, Smith, Ditto: fair and robust federated learning through "
        "personalization, 2021, "
        "https://arxiv.org/abs/2012.04221",
    )
    lam: NonNegativeFloat = 1.0
    weights: Weights = "samples"
    interleaved: bool = False
    personal_epochs: NonNegativeInt | None = None
    personal_steps: NonNegativeInt | None = None
    aggregation: Aggregation | None = None

    @property
    def averaging(self) -> Averaging:
        """By samples, uniform, or by a custom rule."""
        return Averaging(self.weights, rule=self.aggregation)

    def init_memory(self, task: Task, rng: Rng) -> PersonalMemory:
        """Everybody starts at the first model."""
        return PersonalMemory(task.initial_models(rng).clone())

    def local_update(self, rnd: Round, state: State, reply: Inbox) -> tuple[State, Info]:
        """Train the global model, then the personal one near the global model that was received."""
        trained, info = super().local_update(rnd, state, reply)
        # The same purpose draws the same batches.
        purpose = "batches.personal"
        if self.interleaved:
            purpose = "batches"
        local = personal_training(rnd.local, self.personal_epochs, self.personal_steps)
        personal, more = rnd.train(
            # `trained` carries the new state of the run; the anchor is the model as received, not
            # as trained.
            replace(trained, params=state.memory.model),
            local=local, anchor=state.params, prox=self.lam, purpose=purpose, track=1,
        )  # fmt: skip
        # The global model is sent, the personal one stays in the memory.
        new = replace(personal, params=trained.params, memory=PersonalMemory(personal.params))
        return new, {**info, "train_samples": info["train_samples"] + more["train_samples"]}

    def adapt_newcomer(
        self, rnd: Round, state: State, received: Float[Tensor, "clients params"]
    ) -> State:
        """Train the personal models, near the global one."""
        local = personal_training(rnd.local, self.personal_epochs, self.personal_steps)
        return rnd.train(
            state, local=local, anchor=received, prox=self.lam, purpose="batches.personal"
        )[0]


def personal_training(local: LocalTraining, epochs: int | None, steps: int | None) -> LocalTraining:
    """Return the run's local training with a personal length."""
    if steps is not None:
        return replace(local, steps=steps)
    # A number of steps would win over epochs: it is removed.
    return local if epochs is None else replace(local, epochs=epochs, steps=None)
