"""APFL: each client mixes a personal model with the shared one, which all train by FedAvg."""

from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor

from coterie._util.settings import Share
from coterie.engine.task import Task
from coterie.exchange.base import Inbox
from coterie.functional.metrics import Metric
from coterie.functional.robust import Aggregation
from coterie.methods.base import Info, Round, State
from coterie.methods.ditto import PersonalModels
from coterie.methods.server import Averaging, Weights
from coterie.rng import Rng


@dataclass(frozen=True)
class ApflMemory:
    r"""What a client keeps to itself.

    Args:
        model: the personal part ($v_i$); $w^0$ until the client first takes part. Its running
            statistics are those of the mixture.
        alpha: the share of the personal part ($\alpha_i$).
    """

    model: Float[Tensor, "clients params"]
    alpha: Float[Tensor, " clients"]


@final
@dataclass(frozen=True)
class Apfl(PersonalModels):
    r"""Each client uses $\bar v_i = \alpha_i v_i + (1 - \alpha_i) w_i$; FedAvg trains only $w_i$.

    On each batch $w_i$ takes a step along $\nabla f_i(w_i)$, and $v_i$ one along $\nabla_{v}
    f_i(\bar v_i) = \alpha_i \nabla f_i(\bar v_i)$, from the values before the step and each with an
    optimizer of its own (the paper's is SGD). A client is served the mixture that it trained last.
    The authors' code mixes the outputs of the two models instead of their parameters, and takes the
    step of $v_i$ after that of $w_i$.

    Args:
        alpha: $\alpha_i$, from 0 (FedAvg's model of the own last training) to 1 (local training).
        adaptive: let $\alpha_i$ go down its own gradient, $\langle v_i - w_i, \nabla f_i(\bar v_i)
            \rangle$, with the learning rate of the run and within [0, 1], in each step, as the
            paper's formula has it. The authors' code does so in the first step of a round alone and
            adds $0.02 \alpha_i$ to the gradient.
        weights: weights of the clients in the mean of the $w_i$: "uniform" as in the paper, or
            "samples".
        aggregation: how models are merged: a rule of `functional.robust.RULES`, by its name or as a
            table with its settings, or the import path of a custom rule, a function of
            `functional.aggregation.ReceivedModels`; the weighted mean when not given.
    """

    kind: ClassVar[str] = "apfl"
    tracks: ClassVar[int] = 2
    summary: ClassVar[str] = "each client mixes a model of its own with its copy of FedAvg's"
    references: ClassVar[tuple[str, ...]] = (
        "Deng, Kamani, Mahdavi, Adaptive personalized federated learning, 2020, "
        "https://arxiv.org/abs/2003.13461",
    )
    reports: ClassVar[tuple[Metric, ...]] = (
        Metric(
            "alpha", "share of the personal model in a client's mixture", "personal share", digits=3
        ),
    )
    alpha: Share = 0.5
    adaptive: bool = False
    weights: Weights = "uniform"
    aggregation: Aggregation | None = None

    @property
    def averaging(self) -> Averaging:
        """Uniform, by samples, or by a custom rule."""
        return Averaging(self.weights, rule=self.aggregation)

    def count_step_models(self, moments: int) -> int:
        """See `Method.count_step_models`: two gradients, one scaled, the mixture, two optimizers."""
        # With alpha's own gradient also products with the difference of the models.
        return 4 + self.adaptive + 2 * moments

    def init_memory(self, task: Task, rng: Rng) -> ApflMemory:
        """Everybody starts at the first model."""
        model = task.initial_models(rng).clone()
        return ApflMemory(model, torch.full_like(model[:, 0], self.alpha))

    def local_update(self, rnd: Round, state: State, reply: Inbox) -> tuple[State, Info]:
        """Train both parts on the same batches."""
        memory: ApflMemory = state.memory
        steps, trainable = rnd.train_stepwise(state), rnd.task.layout.trainable
        shared, model, alpha = state.params.clone(), memory.model.clone(), memory.alpha.clone()
        for step in range(steps.num_steps):
            slope = steps.compute_gradient(shared, step)
            mixture = mix_models(model, shared, alpha, trainable)
            personal = steps.compute_gradient(mixture, step)
            # The gradient at the mixture updated the mixture's running statistics.
            model[:, trainable:] = mixture[:, trainable:]
            share = alpha[:, None]
            if self.adaptive:
                # $\langle v_i - w_i, \nabla f_i(\bar v_i) \rangle$, the derivative by $\alpha_i$.
                products = (model - shared)[:, :trainable] * personal
                # Row by row: the bits of a client do not depend on the other hosted clients.
                towards = torch.stack([row.sum() for row in products])
                # Clients without a batch in this step keep their alpha.
                rates = steps.learning_rates(step).to(alpha)
                alpha = torch.where(
                    steps.active_clients(step).to(alpha.device), alpha - rates * towards, alpha
                ).clamp(0, 1)
            # Both gradients were taken before either model moves.
            steps.apply_gradient(shared, slope, step)
            # The chain rule: $\bar v_i$ depends on $v_i$ by the factor $\alpha_i$.
            steps.apply_gradient(model, personal * share, step, track=1)
        report = steps.finish(shared, model)
        memory = ApflMemory(model, alpha)
        new = replace(state, params=shared, memory=memory, moments=steps.optimizer)
        return new, {**report, "alpha": alpha}

    def serving_model(
        self, rnd: Round, state: State
    ) -> tuple[Float[Tensor, "clients params"], Info]:
        """Each client has its own, of its two parts as it trained them last."""
        memory = state.memory
        return mix_models(memory.model, state.params, memory.alpha, rnd.task.layout.trainable), {}


def mix_models(
    model: Float[Tensor, "clients params"],
    shared: Float[Tensor, "clients params"],
    alpha: Float[Tensor, " clients"],
    trainable: int,
) -> Float[Tensor, "clients params"]:
    r"""Return $\alpha_i v_i + (1 - \alpha_i) w_i$; the running statistics are those of $v_i$."""
    own, share = model.clone(), alpha[:, None]
    own[:, :trainable] = own[:, :trainable] * share + shared[:, :trainable] * (1 - share)
    return own
