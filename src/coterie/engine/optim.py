"""Optimizers on rows of parameters, each client with its own state; equal to torch.optim's."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import chain
from typing import Annotated, Any

import torch
from annotated_types import Ge, Lt
from jaxtyping import Float, Int
from torch import Tensor

from coterie._util.importing import find_import_path
from coterie._util.settings import (
    Configurable,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Share,
)
from coterie._util.tensors import index_optional
from coterie.engine import _own_optimizer
from coterie.engine._augment import import_augmentation
from coterie.engine.privacy import DPSGD, check_accountant, dp_table
from coterie.engine.schedules import (
    CustomSchedule,
    LrSchedule,
    compute_learning_rates,
    parse_schedules,
    schedule_tables,
)
from coterie.errors import ConfigError, describe_unknown, first_line, require

# In this order native programs number them (`native.library`), so that new ones come last.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.0, "dampening": 0.0, "nesterov": False, "weight_decay": 0.0},
    "adam": {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
    "adamw": {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01},
    "rmsprop": {
        "alpha": 0.99,
        "eps": 1e-8,
        "momentum": 0.0,
        "centered": False,
        "weight_decay": 0.0,
    },
    "adagrad": {
        "lr_decay": 0.0,
        "initial_accumulator_value": 0.0,
        "eps": 1e-10,
        "weight_decay": 0.0,
    },
}
"""The optimizers of every engine: arguments other than the rate, and PyTorch's defaults."""

_OPTIMIZER_ARGUMENTS = tuple(dict.fromkeys(chain.from_iterable(OPTIMIZERS.values())))
ADDED_FIELDS = (
    *(name for name in _OPTIMIZER_ARGUMENTS if name not in ("momentum", "weight_decay")),
    "optimizer_options",
    "lr_schedule",
    "dp",
)
"""Fields of `LocalTraining` that are younger than runs that are about."""

_Decay = Annotated[float, Ge(0), Lt(1)]


AUGMENTATIONS = ("none", "crop-flip")
"""The built-in values of `LocalTraining.augment`."""


@dataclass(frozen=True)
class LocalTraining(Configurable):
    """How a client trains on its own data between two exchanges.

    Args:
        epochs: passes over the local training data ($E$).
        steps: optimizer steps instead of epochs ($S$); the data are reshuffled when they are used
            up.
        batch_size: samples a step ($B$); a client with fewer samples uses all of them.
        optimizer: "adam", "adamw", "sgd", "rmsprop" or "adagrad", in every engine, with PyTorch's
            arguments and their defaults, except `lr`. Or the import path of any other class like
            torch.optim's that treats each parameter alone, such as "torch.optim:NAdam", in the loop
            engine. Its state starts fresh in every round, but see `persistent_client_optimizer`.
        lr: step size, above 0 (0 is allowed and trains nothing); 0.001 whatever the optimizer.
        momentum: of "sgd" and "rmsprop", in [0, 1).
        weight_decay: L2 penalty added to the gradient, 0 or larger; with "adamw" decoupled from it:
            each step shrinks parameters by `lr` times it. PyTorch's default when None: 0.01 for
            "adamw", 0 for the others.
        drop_last: leave out the last, smaller batch of an epoch.
        augment: "crop-flip" pads images by `padding` black pixels, cuts random pieces and mirrors
            half of them. Or a function (batch, generator) -> batch, by its import path, which is
            called in each step of each client; see the guide to own data.
        padding: see `augment`; with 0 images are mirrored only.
        persistent_client_optimizer: each client keeps the state of its optimizer (the moments, and
            the count of its steps) from round to round, whatever model it trains next. Some
            published code works so; it needs an optimizer with a state, and no sequential
            schedule.
        dampening: of the momentum of "sgd": every gradient but the first counts with 1 minus this.
        nesterov: step along the gradient plus `momentum` times the new momentum, of "sgd".
        betas: of "adam" and "adamw": shares of the old mean and of the old mean square of gradients
            that are kept.
        eps: added to the root of the mean square, of all but "sgd"; PyTorch's default when None:
            1e-8, and 1e-10 for "adagrad".
        alpha: of "rmsprop": share of the old mean square that is kept.
        centered: of "rmsprop": divide by the deviation of gradients instead of the root of their
            mean square.
        lr_decay: of "adagrad": the rate of step k, from 0, is divided by 1 + k times this.
        initial_accumulator_value: of "adagrad": of the sum of squares.
        optimizer_options: arguments of an optimizer that is given by import path, other than `lr`.
        lr_schedule: a factor on `lr` for each round or step: a table such as `{ kind = "cosine",
            over = "rounds" }`, a list of tables, whose factors multiply, or the import path of a
            function (number, total) -> factor. Kinds are "warmup", "linear", "cosine",
            "exponential" and "step"; see `engine.schedules`. None: a constant rate.
        dp: DP-SGD: a table such as `{ clip = 1.0, noise_multiplier = 1.1, delta = 1e-5 }`. Each
            step then takes each sample with probability `batch_size` / training samples, clips its
            gradient and adds noise; each client's epsilon is a metric. See `engine.privacy.DPSGD`.
            None: plain gradients, and no such guarantee.
    """

    epochs: NonNegativeInt = 1
    steps: NonNegativeInt | None = None
    batch_size: PositiveInt = 8
    optimizer: str = "adam"
    lr: NonNegativeFloat = 1e-3
    momentum: _Decay = 0.0
    weight_decay: NonNegativeFloat | None = None
    drop_last: bool = False
    augment: str = "none"
    padding: NonNegativeInt = 4
    persistent_client_optimizer: bool = False
    dampening: Share = 0.0
    nesterov: bool = False
    betas: Sequence[_Decay] = (0.9, 0.999)
    eps: NonNegativeFloat | None = None
    alpha: _Decay = 0.99
    centered: bool = False
    lr_decay: NonNegativeFloat = 0.0
    initial_accumulator_value: NonNegativeFloat = 0.0
    optimizer_options: Mapping[str, Any] | None = None
    lr_schedule: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None
    dp: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        """Keep what Python can name, and a file cannot, by its import path or as a table."""
        if isinstance(self.optimizer, type):
            object.__setattr__(self, "optimizer", find_import_path(self.optimizer, "optimizer"))
        if callable(self.augment):
            object.__setattr__(self, "augment", find_import_path(self.augment, "augment"))
        object.__setattr__(self, "lr_schedule", schedule_tables(self.lr_schedule))
        object.__setattr__(self, "dp", dp_table(self.dp))
        super().__post_init__()

    def check(self) -> None:
        """The arguments must be those of the optimizer, and only one with a state can keep it."""
        if self.custom_optimizer is None and self.optimizer not in OPTIMIZERS:
            raise ConfigError(
                f"{describe_unknown('optimizer', self.optimizer, OPTIMIZERS)}, or "
                "package.module:Class"
            )
        if self.custom_augment is None and self.augment not in AUGMENTATIONS:
            raise ConfigError(
                f"{describe_unknown('augment', self.augment, AUGMENTATIONS)}, or "
                "package.module:function"
            )
        # A setting of another optimizer is refused, not ignored, unless it has its default.
        usual = self._default_values()
        for name in _OPTIMIZER_ARGUMENTS:
            found = getattr(self, name)
            if name in OPTIMIZERS.get(self.optimizer, ()) or found == usual[name]:
                continue
            advice = "put it into optimizer_options"
            if not self.custom_optimizer:
                who = [other for other, arguments in OPTIMIZERS.items() if name in arguments]
                advice = f"leave it out, or take one of {', '.join(who)}"
            raise ConfigError(
                f"{name} is {found!r}; optimizer = {self.optimizer!r} has no such setting: {advice}"
            )
        plain = self.custom_optimizer is not None or not self.optimizer_options
        require(
            plain,
            "optimizer_options",
            self.optimizer_options,
            "none: they are for an optimizer by import path",
        )
        require(len(self.betas) == 2, "betas", self.betas, "two numbers")
        ahead = not self.nesterov or (self.momentum > 0 and self.dampening == 0)
        require(ahead, "nesterov", True, "momentum above 0 and dampening 0 with it")
        if self.persistent_client_optimizer:
            text = f"one of {', '.join(OPTIMIZERS)} with it: "
            text += f"the state of {self.optimizer!r} is not kept between rounds"
            require(self.custom_optimizer is None, "persistent_client_optimizer", True, text)
            sentence = (
                "momentum above 0, or an optimizer such as 'adam': plain SGD has no state to keep"
            )
            require(self.num_moments > 0, "persistent_client_optimizer", True, sentence)
        parse_schedules(self.lr_schedule)
        text = f"one of {', '.join(OPTIMIZERS)} with dp: "
        text += "another class may look at more than the gradient"
        require(self.custom_optimizer is None or self.dp is None, "optimizer", self.optimizer, text)

    def _default_values(self) -> dict[str, Any]:
        return {item.name: item.default for item in fields(self)}

    @property
    def dp_settings(self) -> DPSGD | None:
        """The settings of DP-SGD; None for plain gradients."""
        return None if self.dp is None else DPSGD(**self.dp)

    @property
    def custom_optimizer(self) -> str | None:
        """The import path of an optimizer that is not one of `OPTIMIZERS`; None for one of them."""
        return self.optimizer if ":" in self.optimizer else None

    @property
    def custom_augment(self) -> str | None:
        """The import path of a function that augments; None for one of `AUGMENTATIONS`."""
        return self.augment if ":" in self.augment else None

    @property
    def optimizer_arguments(self) -> dict[str, Any]:
        """The arguments of the optimizer other than `lr`, by PyTorch's names."""
        if self.custom_optimizer:
            return dict(self.optimizer_options or {})
        found = dict(OPTIMIZERS[self.optimizer])
        for name in found:
            value = getattr(self, name)
            if value is not None:  # None stands for PyTorch's default
                found[name] = value
        return found

    @property
    def schedules(self) -> tuple[LrSchedule, ...]:
        """The learning-rate schedules, whose factors multiply; none for a constant rate."""
        return parse_schedules(self.lr_schedule)

    @property
    def needs_rounds(self) -> bool:
        """Whether rates depend on the number of rounds of the run."""
        return any(one.over == "rounds" and one.needs_total for one in self.schedules)

    @property
    def num_moments(self) -> int:
        """How many numbers the optimizer remembers of each parameter."""
        moving = int(self.momentum > 0)
        counts = {
            "sgd": moving,
            "adam": 2,
            "adamw": 2,
            "rmsprop": 1 + moving + self.centered,
            "adagrad": 1,
        }
        return counts.get(self.optimizer, 0)

    def learning_rates(
        self, length: Int[Tensor, "clients steps"], round: int, rounds: int | None
    ) -> Float[Tensor, "clients steps"] | None:
        """Return the learning rate of each step of a local training; None where it is `lr`."""
        schedules = self.schedules
        if not schedules:
            return None
        return compute_learning_rates(schedules, self.lr, length, round, rounds)

    def check_imports(self) -> None:
        """Import what is named by its path and try it on a few numbers.

        Raises:
            ConfigError: when it is not there, or does not do what is needed.
        """
        if self.custom_optimizer:
            _own_optimizer.check_custom_optimizer(self.custom_optimizer, self.optimizer_arguments)
        if self.custom_augment:
            import_augmentation(self.custom_augment)
        if self.dp is not None:
            check_accountant()
        for schedule in self.schedules:
            if isinstance(schedule, CustomSchedule):
                schedule.import_function()

    def result_settings(self) -> dict[str, Any]:
        """Return what decides results; fields added later only where they differ from defaults."""
        usual = self._default_values()
        # Runs that are older than a field keep their identity as long as it has its default.
        younger = {*ADDED_FIELDS, "persistent_client_optimizer"}
        said = {k: v for k, v in asdict(self).items() if k not in younger or v != usual[k]}
        if not self.custom_optimizer:
            # None and PyTorch's default, written out, are one setting.
            said["weight_decay"] = self.optimizer_arguments["weight_decay"]
        return said


GRADIENT_ONLY = LocalTraining(optimizer="sgd", lr=0.0, momentum=0.5)
"""A step that moves nothing and whose momentum becomes the gradient, in every engine."""


@dataclass(frozen=True)
class OptimizerState:
    """The state of the clients' optimizers, for each model that they train (a track).

    Args:
        values: what the optimizer remembers of each trained parameter, such as the first moment and
            the second of Adam; see `RowOptimizer`.
        taken: steps taken so far.
    """

    values: Float[Tensor, "clients tracks moments trainable"]
    taken: Int[Tensor, "clients tracks"]

    @staticmethod
    def initial(
        local: LocalTraining, tracks: int, rows: Float[Tensor, "clients trainable"]
    ) -> "OptimizerState":
        """Return those of clients that have not trained.

        Args:
            local: the optimizer.
            tracks: how many models each client trains in a round.
            rows: the trainable parameters; only their shape and type are used.
        """
        clients, trainable = rows.shape
        # Only "adagrad" can start elsewhere than at 0.
        values = rows.new_full(
            (clients, tracks, local.num_moments, trainable), local.initial_accumulator_value
        )
        return OptimizerState(values, torch.zeros(clients, tracks, dtype=torch.int64))

    def copy_track(
        self, track: int
    ) -> tuple[Float[Tensor, "clients moments trainable"], Int[Tensor, " clients"]]:
        """Return a copy of what the optimizers of one model remember, and their steps so far."""
        # Native programs take the address, so the copy has no gaps.
        values = self.values[:, track].clone(memory_format=torch.contiguous_format)
        return values, self.taken[:, track].clone()

    def replace_track(
        self,
        track: int,
        values: Float[Tensor, "clients moments trainable"],
        taken: Int[Tensor, " clients"],
        initial: float = 0.0,
    ) -> "OptimizerState":
        """Return the state after a training of one model of each client.

        Clients whose optimizer remembers a NaN or an infinity begin again.

        Args:
            track: which of the client's models was trained.
            values: what its optimizer remembers then.
            taken: steps taken by then.
            initial: what an optimizer remembers at first.
        """
        lost = ~torch.isfinite(values).flatten(1).all(1)
        out = OptimizerState(self.values.clone(), self.taken.clone())
        out.values[:, track] = values
        out.values[lost, track] = initial
        # The moments may be on a device; steps are counted on the CPU.
        out.taken[:, track] = taken.masked_fill(lost.cpu(), 0)
        return out


class RowOptimizer:
    """One optimizer state for each row, updated in place.

    The moments are, of "sgd": the momentum, where there is one; of "adam" and "adamw": the mean
    gradient and the mean square; of "rmsprop": the mean square, then the momentum and the mean
    gradient, where there are such; of "adagrad": the sum of squares.

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
        if local.custom_optimizer:
            raise ConfigError(
                f"optimizer {local.custom_optimizer!r} trains one client after another; expected "
                "engine = 'loop'"
            )
        self.local, self.taken = local, None if taken is None else taken.to(rows.device)
        self.arguments = local.optimizer_arguments
        if moments is None:
            self.state = []
            for _ in range(local.num_moments):
                self.state.append(torch.full_like(rows, local.initial_accumulator_value))
        else:
            self.state = list(moments.unbind(1))

    def step(
        self,
        rows: Float[Tensor, "clients trainable"],
        grads: Float[Tensor, "clients trainable"],
        number: int,
        lr: float | Float[Tensor, "clients 1"] | None = None,
    ) -> None:
        """Update `rows` in place; `grads` may be overwritten.

        Products with `rows` are rounded before they are added: a row then ends with the same bits
        whether it is part of a larger matrix or not.

        Args:
            rows: the trainable parameters.
            grads: their gradients.
            number: of this step in this training, from 1.
            lr: the learning rate of this step, that of each client in float64; that of the settings
                when None.
        """
        rate: Any = self.local.lr if lr is None else lr
        count: Any = number
        if self.taken is not None:  # each client has its own
            # float64, in which beta^t and 1 - beta^t keep their digits.
            count = (self.taken + number)[:, None].double()
        fused = find_fused_update(self.local, rows, rate, count)
        if fused is not None:
            fused(self.local.optimizer, self.arguments, rows, grads, self.state, rate, count)
            return
        self._step_by_operations(rows, grads, rate, count)

    def _step_by_operations(self, rows: Tensor, grads: Tensor, rate: Any, count: Any) -> None:
        """Take a step, an operation of PyTorch after the other."""
        decay, kind = self.arguments["weight_decay"], self.local.optimizer
        # Decoupled decay comes before the step, as in torch.optim.AdamW.
        if decay and kind == "adamw":
            rows.mul_(_match_dtype(rows, 1 - rate * decay))
        elif decay:
            grads = grads.add_(rows * decay)
        steps = {
            "sgd": self._step_sgd,
            "rmsprop": self._step_rmsprop,
            "adagrad": self._step_adagrad,
        }
        steps.get(kind, self._step_adam)(rows, grads, rate, count)

    def _step_sgd(self, rows: Tensor, grads: Tensor, rate: Any, count: Any) -> None:
        momentum, dampening = self.arguments["momentum"], self.arguments["dampening"]
        if momentum:
            own = grads
            if dampening:
                # The first gradient of all is not dampened, as in torch.optim.SGD.
                later = (count > 1).double() if isinstance(count, Tensor) else count > 1
                own = grads * _match_dtype(rows, 1 - dampening * later)
            # v = momentum v + (1 - dampening) g; with Nesterov the step is along g + momentum v.
            velocity = self.state[0].mul_(momentum).add_(own)
            grads = grads.add_(velocity * momentum) if self.arguments["nesterov"] else velocity
        rows.sub_(grads * _match_dtype(rows, rate))

    def _step_adam(self, rows: Tensor, grads: Tensor, rate: Any, count: Any) -> None:
        first, second = self.state
        beta1, beta2 = self.arguments["betas"]
        # m = beta1 m + (1 - beta1) g, and v = beta2 v + (1 - beta2) g^2; both start at zero, which
        # the divisions by 1 - beta^t correct. eps comes after the correction, as in
        # torch.optim.Adam.
        first.lerp_(grads, 1 - beta1)
        second.mul_(beta2).addcmul_(grads, grads, value=1 - beta2)
        scale = second.sqrt().div_((1 - beta2**count) ** 0.5).add_(self.arguments["eps"])
        rows.sub_(torch.div(first, scale).mul_(rate / (1 - beta1**count)))

    def _step_rmsprop(self, rows: Tensor, grads: Tensor, rate: Any, count: Any) -> None:
        # The others are the momentum, if any, and then the mean gradient, if centered.
        square, *others = self.state
        alpha, momentum = self.arguments["alpha"], self.arguments["momentum"]
        square.mul_(alpha).addcmul_(grads, grads, value=1 - alpha)
        spread = square
        if self.arguments["centered"]:
            mean = others[-1].lerp_(grads, 1 - alpha)
            # The variance is the mean square less the squared mean.
            spread = torch.addcmul(square, mean, mean, value=-1)
        change = grads / spread.sqrt().add_(self.arguments["eps"])
        if momentum:
            change = others[0].mul_(momentum).add_(change)
        rows.sub_(change * _match_dtype(rows, rate))

    def _step_adagrad(self, rows: Tensor, grads: Tensor, rate: Any, count: Any) -> None:
        total = self.state[0].addcmul_(grads, grads)
        change = grads / total.sqrt().add_(self.arguments["eps"])
        # The rate is lr / (1 + (t - 1) lr_decay), with t from 1, as in torch.optim.Adagrad.
        rows.sub_(
            change * _match_dtype(rows, rate / (1 + (count - 1) * self.arguments["lr_decay"]))
        )

    def select_rows(self, chosen: Tensor) -> "RowOptimizer":
        """Return the optimizer of some rows, on copies of their state."""
        # Its state is replaced below, so that of a matrix without entries costs nothing.
        part = RowOptimizer(self.local, torch.empty(0, 0))
        part.state = [one[chosen] for one in self.state]
        part.taken = index_optional(self.taken, chosen)
        return part

    def store_rows(self, chosen: Tensor, part: "RowOptimizer") -> None:
        """Take back the state of some rows."""
        for own, other in zip(self.state, part.state, strict=True):
            own[chosen] = other


FusedUpdate = Callable[..., None]
"""See `engine.kernels.update.update_rows`."""


def find_fused_update(
    local: LocalTraining, rows: Tensor, rate: Any, count: Any
) -> FusedUpdate | None:
    """Return the step of an optimizer as one kernel, where it runs: on a CUDA device with Triton.

    Args:
        local: the optimizer.
        rows: the trainable parameters.
        rate: see `RowOptimizer.step`; with tensors of each client the kernel is another one.
        count: as well.

    Returns:
        The kernel, which was compared with PyTorch's operations; None where there is none.
    """
    known = local.optimizer in ("sgd", "adam", "adamw") and rows.dtype == torch.float32
    if not known or not _is_on_gpu(rows) or rows.stride(1) != 1:
        return None
    each = isinstance(rate, Tensor) or isinstance(count, Tensor)
    key = (local.optimizer, repr(local.optimizer_arguments), each, rows.device)
    if key not in _FUSED:
        _FUSED[key] = _try_fused_update(local, each, rows.device)
    return _FUSED[key]


def _is_on_gpu(rows: Tensor) -> bool:
    return rows.is_cuda


# what was found for each optimizer and device of this process
_FUSED: dict[tuple[str, str, bool, torch.device], FusedUpdate | None] = {}


def _try_fused_update(local: LocalTraining, each: bool, device: torch.device) -> FusedUpdate | None:
    """Return the kernel if two steps of it are those of PyTorch's operations, up to rounding."""
    try:
        from coterie.engine.kernels.update import update_rows
    except ImportError:  # a build of PyTorch without Triton
        return None
    # Two programs a client, the second of which is not full.
    start = torch.linspace(-2, 2, 3 * 1500).sin().reshape(3, -1).to(device)
    sides = [start.clone(), start.clone()]
    optimizers = [RowOptimizer(local, one) for one in sides]
    rate: Any = 0.1
    if each:
        rate = torch.tensor([[0.1], [0.2], [0.3]], dtype=torch.float64, device=device)
    try:
        for number in (1, 2):
            gradient = (start * (5 * number)).cos()
            update_rows(
                local.optimizer, local.optimizer_arguments, sides[0], gradient.clone(),
                optimizers[0].state, rate, number,
            )  # fmt: skip
            optimizers[1]._step_by_operations(sides[1], gradient, rate, number)
        found = [torch.stack([own, *one.state]) for own, one in zip(sides, optimizers, strict=True)]
        # Numbers of order 1: far above their rounding, far below what a wrong formula changes.
        if torch.allclose(*found, rtol=1e-5, atol=1e-6, equal_nan=True):
            return update_rows
        why = "it computes another step"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # Triton's own, those of a compiler or of the driver
        why = f"{type(error).__name__}: {first_line(error)}"
    warnings.warn(
        f"PyTorch's operations take the steps of {local.optimizer!r}: Triton's kernel cannot be "
        f"used ({why})",
        stacklevel=2,
    )
    return None


def _match_dtype(rows: Tensor, value: Any) -> Any:
    """Return a number of each row in the type of the rows, in which it then multiplies them."""
    if isinstance(value, Tensor):
        return value.to(rows.dtype)
    return value
