"""SGD and Adam on rows of parameters, each client with its own state; equal to torch.optim's."""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Lt
from jaxtyping import Float, Int
from torch import Tensor

from coterie._util.settings import Configurable, NonNegativeFloat, NonNegativeInt, PositiveInt
from coterie.errors import require

ADAM_BETAS, ADAM_EPS = (0.9, 0.999), 1e-8


@dataclass(frozen=True)
class LocalTraining(Configurable):
    """How a client trains on its own data between two exchanges.

    Args:
        epochs: passes over the local training data ($E$).
        steps: optimizer steps instead of epochs ($S$); the data are reshuffled when they are used up.
        batch_size: samples a step ($B$); a client with fewer samples uses all of them.
        optimizer: "adam" or "sgd". Its state starts fresh in every round, but see `persistent_client_optimizer`.
        lr: step size, above 0 (0 is allowed and trains nothing).
        momentum: of SGD, in [0, 1).
        weight_decay: L2 penalty added to the gradient, 0 or larger.
        drop_last: leave out the last, smaller batch of an epoch.
        augment: "crop-flip" pads images by `padding` black pixels, cuts random pieces and mirrors half of them.
        padding: see `augment`.
        persistent_client_optimizer: each client keeps the state of its optimizer (the moments, and with Adam the count
            of its steps) from round to round, whatever model it trains next. Some published code works so; it needs
            an optimizer with a state, and the synchronous schedule.
    """

    epochs: NonNegativeInt = 1
    steps: NonNegativeInt | None = None
    batch_size: PositiveInt = 8
    optimizer: Literal["adam", "sgd"] = "adam"
    lr: NonNegativeFloat = 1e-3
    momentum: Annotated[float, Ge(0), Lt(1)] = 0.0
    weight_decay: NonNegativeFloat = 0.0
    drop_last: bool = False
    augment: Literal["none", "crop-flip"] = "none"
    padding: NonNegativeInt = 4
    persistent_client_optimizer: bool = False

    def check(self) -> None:
        """Only an optimizer with a state can keep it."""
        stateless = self.persistent_client_optimizer and not self.moments
        sentence = "momentum above 0, or optimizer = 'adam': plain SGD has no state to keep"
        require(not stateless, "persistent_client_optimizer", True, sentence)

    @property
    def moments(self) -> int:
        """How many numbers the optimizer remembers of each parameter."""
        return 2 if self.optimizer == "adam" else int(self.momentum > 0)


@dataclass(frozen=True)
class Moments:
    """What clients keep of their optimizers between rounds, for each model that they train (a track).

    Args:
        values: the first moment, and with Adam the second, of each trained parameter.
        taken: steps taken so far.
    """

    values: Float[Tensor, "clients tracks moments trainable"]
    taken: Int[Tensor, "clients tracks"]

    @staticmethod
    def zeros(local: LocalTraining, tracks: int, rows: Float[Tensor, "clients trainable"]) -> "Moments":
        """Return those of clients that have not trained.

        Args:
            local: the optimizer.
            tracks: how many models each client trains in a round.
            rows: the trainable parameters; only their shape and type are used.
        """
        clients, trainable = rows.shape
        values = rows.new_zeros(clients, tracks, local.moments, trainable)
        return Moments(values, torch.zeros(clients, tracks, dtype=torch.int64))


class RowOptimizer:
    """One optimizer state for each row, updated in place.

    Args:
        local: which optimizer and its settings.
        rows: the trainable parameters; only their shape and type are used.
        moments: the state to go on from, updated in place; a fresh one when None.
        taken: with `moments`: steps taken before.
    """

    def __init__(
        self,
        local: LocalTraining,
        rows: Float[Tensor, "clients trainable"],
        moments: Float[Tensor, "clients moments trainable"] | None = None,
        taken: Int[Tensor, " clients"] | None = None,
    ) -> None:
        self.local, self.taken = local, None if taken is None else taken.to(rows.device)
        state = [torch.zeros_like(rows) for _ in range(local.moments)] if moments is None else [*moments.unbind(1)]
        self.first, self.second = (*state, None, None)[:2]

    def step(
        self, rows: Float[Tensor, "clients trainable"], grads: Float[Tensor, "clients trainable"], number: int
    ) -> None:
        """Update `rows` in place; `grads` may be overwritten.

        Products with `rows` are rounded before they are added: a row then ends with the same bits whether it is part
        of a larger matrix or not.

        Args:
            rows: the trainable parameters.
            grads: their gradients.
            number: of this step in this training, from 1.
        """
        if self.local.weight_decay:
            grads = grads.add_(rows * self.local.weight_decay)
        if self.local.optimizer == "sgd":
            self._sgd(rows, grads)
        else:
            self._adam(rows, grads, number)

    def _sgd(self, rows: Tensor, grads: Tensor) -> None:
        if self.first is not None:
            grads = self.first.mul_(self.local.momentum).add_(grads)
        rows.sub_(grads * self.local.lr)

    def _adam(self, rows: Tensor, grads: Tensor, number: int) -> None:
        assert self.first is not None
        assert self.second is not None
        beta1, beta2 = ADAM_BETAS
        self.first.lerp_(grads, 1 - beta1)
        self.second.mul_(beta2).addcmul_(grads, grads, value=1 - beta2)
        count: int | Tensor = number
        if self.taken is not None:  # each client has its own
            count = (self.taken + number)[:, None].double()
        scale = self.second.sqrt().div_((1 - beta2**count) ** 0.5).add_(ADAM_EPS)
        rows.sub_(torch.div(self.first, scale).mul_(self.local.lr / (1 - beta1**count)))

    def take(self, chosen: Tensor) -> "RowOptimizer":
        """Return the optimizer of some rows, on copies of their state."""
        part = RowOptimizer(self.local, torch.empty(0, 0))
        part.first = None if self.first is None else self.first[chosen]
        part.second = None if self.second is None else self.second[chosen]
        part.taken = None if self.taken is None else self.taken[chosen]
        return part

    def put(self, chosen: Tensor, part: "RowOptimizer") -> None:
        """Take back the state of some rows."""
        if self.first is not None and part.first is not None:
            self.first[chosen] = part.first
        if self.second is not None and part.second is not None:
            self.second[chosen] = part.second
