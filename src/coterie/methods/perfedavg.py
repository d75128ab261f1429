"""Per-FedAvg: a shared model that is good after one step on a client's data (MAML)."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, final

from jaxtyping import Float
from torch import Tensor

from coterie._util.settings import NonNegativeInt, PositiveFloat, PositiveInt
from coterie.engine.task import LocalTraining
from coterie.exchange.base import Inbox
from coterie.functional.robust import Aggregation
from coterie.methods.base import Info, Round, State
from coterie.methods.fedavg import OneModel
from coterie.methods.server import Averaging, Weights


@final
@dataclass(frozen=True)
class PerFedAvg(OneModel):
    r"""FedAvg on $F_i(w) = f_i(w - \alpha \nabla f_i(w))$: the loss after a local step.

    In each step of local training $\tilde w = w - \alpha \nabla f_i(w; D)$, then the run's
    optimizer moves $w$ along $(I - \alpha \nabla^2 f_i(w; D''))\, \nabla f_i(\tilde w; D')$ (the
    paper's is SGD with learning rate $\beta$). The batches $D$, $D'$ and $D''$ come from passes
    over the client's data of their own. A client uses the shared model after `adapt_steps` steps on
    its training data; the code of pFedMe's authors, which others have copied, adapts it to a batch
    of its test data.

    Args:
        alpha: $\alpha$: the step of the adaptation, in training and for use.
        hessian: "first_order" leaves out the term with the Hessian (the paper's FO); "free"
            computes its product with $u = \nabla f_i(\tilde w; D')$ as $(\nabla f_i(w + \delta u) -
            \nabla f_i(w - \delta u)) / 2 \delta$ (HF), for twice as many gradients.
        delta: $\delta$ of "free".
        adapt_steps: gradient steps that make a client's model of the shared one; 1 in the paper.
        adapt_batch_size: samples of such a step; all training samples of the client when None, and
            then nothing is drawn.
        weights: weights of the clients in the mean: "uniform" as in the paper, or "samples".
        aggregation: how models are merged: a rule of `functional.robust.RULES`, by its name or as a
            table with its settings, or the import path of a custom rule, a function of
            `functional.aggregation.ReceivedModels`; the weighted mean when not given.
    """

    kind: ClassVar[str] = "per-fedavg"
    summary: ClassVar[str] = "a shared model from which one step on the own data makes a good one"
    references: ClassVar[tuple[str, ...]] = (
        "Fallah, Mokhtari, Ozdaglar, Personalized federated learning with theoretical "
        "guarantees: a model-agnostic "
        "meta-learning approach, 2020, https://arxiv.org/abs/2002.07948",
    )
    alpha: PositiveFloat = 0.01
    hessian: Literal["first_order", "free"] = "first_order"
    delta: PositiveFloat = 0.001
    adapt_steps: NonNegativeInt = 1
    adapt_batch_size: PositiveInt | None = None
    weights: Weights = "uniform"
    aggregation: Aggregation | None = None

    @property
    def averaging(self) -> Averaging:
        """Uniform, by samples, or by a custom rule."""
        return Averaging(self.weights, rule=self.aggregation)

    def count_step_models(self, moments: int) -> int:
        """See `Method.count_step_models`: the adapted model and the gradient at it."""
        # For the product with the Hessian two more of each.
        return (2 if self.hessian == "first_order" else 6) + moments

    def local_update(self, rnd: Round, state: State, reply: Inbox) -> tuple[State, Info]:
        """Go down the gradient of the loss after adaptation."""
        # Batches D, D' and D'' come from streams of their own.
        first = rnd.train_stepwise(state)
        second = rnd.train_stepwise(state, purpose="batches.adapted")
        third = None
        if self.hessian == "free":
            third = rnd.train_stepwise(state, purpose="batches.hessian")
        params = state.params.clone()
        for step in range(first.num_steps):
            # $\tilde w = w - \alpha \nabla f(w; D)$
            adapted = self._move_along(params, first.compute_gradient(params, step), -self.alpha)
            # $u = \nabla f(\tilde w; D')$
            slope = second.compute_gradient(adapted, step)
            if third is not None:
                ahead = self._move_along(params, slope, self.delta)
                behind = self._move_along(params, slope, -self.delta)
                # $\nabla^2 f(w; D'')\, u$ by a central difference.
                product = (
                    third.compute_gradient(ahead, step)
                    .sub_(third.compute_gradient(behind, step))
                    .div_(2 * self.delta)
                )
                # $(I - \alpha \nabla^2 f)\, u$
                slope = slope.sub_(product.mul_(self.alpha))
            first.apply_gradient(params, slope, step)
        info = first.finish(params)
        # Each training counts the samples of its own gradients.
        for other in (second, third):
            if other is not None:
                info["train_samples"] = (
                    info["train_samples"] + other.finish(params)["train_samples"]
                )
        return replace(state, params=params, moments=first.optimizer), info

    def _move_along(self, params: Tensor, direction: Tensor, by: float) -> Tensor:
        """Return models that went along a direction; the others are not changed."""
        moved = params.clone()
        # Gradients have the trained columns only, which come first in a row.
        moved[:, : direction.shape[1]] += direction * by
        return moved

    def serving_model(
        self, rnd: Round, state: State
    ) -> tuple[Float[Tensor, "clients params"], Info]:
        """Fetch the shared model and adapt it to each client's training data."""
        shared, info = super().serving_model(rnd, state)
        size = self.adapt_batch_size
        if size is None:
            # A batch as large as the largest client holds all samples of each: nothing is left to
            # draw.
            size = max(1, int(rnd.task.num_samples.max()))
        local = LocalTraining(
            steps=self.adapt_steps, batch_size=size, optimizer="sgd", lr=self.alpha
        )
        return rnd.task.train(shared, rnd.rng, local, purpose="batches.adapt")[0], info

    def newcomer_model(self, rnd: Round, state: State) -> Float[Tensor, "clients params"]:
        """Fetch the shared model."""
        return super().serving_model(rnd, state)[0]
