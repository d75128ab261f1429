"""Learning-rate schedules: factors on the rate, by the number of the round or step.

A schedule is a frozen dataclass whose fields a study file sets: `lr_schedule = { kind = "cosine",
over = "rounds" }`. Several multiply: a warm-up and a cosine, one over rounds and one over steps.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Annotated, Any, ClassVar, Literal, final

import torch
from annotated_types import Gt, Le
from jaxtyping import Float, Int
from torch import Tensor

from coterie._util.importing import find_import_path, import_function, parse_kind
from coterie._util.settings import (
    NONE,
    Configurable,
    NonNegativeFloat,
    PositiveInt,
    parse_settings,
    to_plain,
)
from coterie.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LrSchedule(Configurable):
    """The base of schedules.

    Args:
        over: what it counts: "rounds" of the run, or "steps" of one local training, which begins
            again in every round. Both count from 0. What is trained before the first exchange has
            the rate of round 0.

    Attributes:
        kind: its name in study files.
        summary: what it is, in a line.
    """

    kind: ClassVar[str]
    summary: ClassVar[str]
    over: Literal["rounds", "steps"] = "rounds"

    @property
    def needs_total(self) -> bool:
        """Whether a factor depends on how many rounds or steps there are in all."""
        return False

    def lr_factor(self, number: int, total: int) -> float:
        """Return the factor on the learning rate.

        Args:
            number: of the round or step, from 0.
            total: rounds of the run, or steps of this client in this training.
        """
        raise NotImplementedError


@final
@dataclass(frozen=True, kw_only=True)
class WarmupSchedule(LrSchedule):
    """Rise in equal parts to the whole rate: `LinearLR` of PyTorch.

    Args:
        length: rounds or steps until the rate is whole.
        start: factor on the first, in (0, 1].
    """

    kind: ClassVar[str] = "warmup"
    summary: ClassVar[str] = "rise from `start` to 1 within `length`"
    length: PositiveInt
    start: Annotated[float, Gt(0), Le(1)] = 1 / 3

    def lr_factor(self, number: int, total: int) -> float:
        """See `LrSchedule.lr_factor`."""
        return self.start + (1 - self.start) * min(1.0, number / self.length)


@final
@dataclass(frozen=True, kw_only=True)
class LinearSchedule(LrSchedule):
    """Change in equal parts from one factor to another, then stay: `LinearLR` of PyTorch.

    Args:
        start: factor on the first, 0 or larger.
        end: factor after `length`, 0 or larger.
        length: rounds or steps; all of them when None.
    """

    kind: ClassVar[str] = "linear"
    summary: ClassVar[str] = "from `start` to `end` in equal parts within `length`, or within all"
    start: NonNegativeFloat = 1.0
    end: NonNegativeFloat = 0.0
    length: PositiveInt | None = None

    @property
    def needs_total(self) -> bool:
        """See `LrSchedule.needs_total`."""
        return self.length is None

    def lr_factor(self, number: int, total: int) -> float:
        """See `LrSchedule.lr_factor`."""
        # A run of no steps must not divide by zero.
        return self.start + (self.end - self.start) * min(
            1.0, number / (self.length or max(1, total))
        )


@final
@dataclass(frozen=True, kw_only=True)
class CosineSchedule(LrSchedule):
    """Fall along half a cosine, then stay: `CosineAnnealingLR` of PyTorch up to its `T_max`.

    Args:
        end: factor after `length`, 0 or larger (`eta_min` over the rate).
        length: rounds or steps; all of them when None.
    """

    kind: ClassVar[str] = "cosine"
    summary: ClassVar[str] = "from 1 to `end` along half a cosine within `length`, or within all"
    end: NonNegativeFloat = 0.0
    length: PositiveInt | None = None

    @property
    def needs_total(self) -> bool:
        """See `LrSchedule.needs_total`."""
        return self.length is None

    def lr_factor(self, number: int, total: int) -> float:
        """See `LrSchedule.lr_factor`."""
        # Stays at the end after `length`; a run of no steps must not divide by zero.
        way = min(1.0, number / (self.length or max(1, total)))
        return self.end + (1 - self.end) * (1 + math.cos(math.pi * way)) / 2


@final
@dataclass(frozen=True, kw_only=True)
class ExponentialSchedule(LrSchedule):
    """Multiply by a factor each time: `ExponentialLR` of PyTorch.

    Args:
        gamma: the factor, above 0.
    """

    kind: ClassVar[str] = "exponential"
    summary: ClassVar[str] = "times `gamma` each round or step"
    gamma: Annotated[float, Gt(0)]

    def lr_factor(self, number: int, total: int) -> float:
        """See `LrSchedule.lr_factor`."""
        return self.gamma**number


@final
@dataclass(frozen=True, kw_only=True)
class StepSchedule(LrSchedule):
    """Multiply by a factor now and then: `StepLR` and `MultiStepLR` of PyTorch.

    Args:
        every: how many rounds or steps lie between.
        at: or the rounds or steps from which on each holds.
        gamma: the factor, above 0.
    """

    kind: ClassVar[str] = "step"
    summary: ClassVar[str] = "times `gamma` after every `every`, or from each of `at` on"
    every: PositiveInt | None = None
    at: Sequence[PositiveInt] = ()
    gamma: Annotated[float, Gt(0)] = 0.1

    def check(self) -> None:
        """Require exactly one of `every` and `at`."""
        if (self.every is None) == (not self.at):
            raise ConfigError(
                f"every is {self.every!r} and at is {list(self.at)}; expected one of the two"
            )

    def lr_factor(self, number: int, total: int) -> float:
        """See `LrSchedule.lr_factor`."""
        if self.every is not None:
            return self.gamma ** (number // self.every)
        return self.gamma ** sum(number >= one for one in self.at)


@final
@dataclass(frozen=True, kw_only=True)
class CustomSchedule(LrSchedule):
    """A function of yours, (number, total) -> factor, by its import path.

    Args:
        path: "package.module:function". It is called with the number of the round or step, from 0,
            and with how many there are, and returns a number, 0 or larger.
    """

    kind: ClassVar[str] = "own"
    summary: ClassVar[str] = "a function of yours"
    path: str

    @property
    def needs_total(self) -> bool:
        """See `LrSchedule.needs_total`."""
        return True

    def lr_factor(self, number: int, total: int) -> float:
        """See `LrSchedule.lr_factor`."""
        found = self.import_function()(number, total)
        if (
            # Python counts True as 1.
            isinstance(found, bool)
            or not isinstance(found, Real)
            or not 0 <= float(found) < math.inf
        ):
            said = f"lr_schedule {self.path!r} returned {found!r} for ({number}, {total})"
            raise ConfigError(
                f"{said}; expected a factor on the learning rate: a number, 0 or larger"
            )
        return float(found)

    def import_function(self) -> Callable[[int, int], Any]:
        """Import the function.

        Raises:
            ConfigError: when it is not there, or does not take two numbers.
        """
        return import_function(self.path, f"lr_schedule {self.path!r}", ("number", "total"))


SCHEDULES: dict[str, type[LrSchedule]] = {
    WarmupSchedule.kind: WarmupSchedule,
    LinearSchedule.kind: LinearSchedule,
    CosineSchedule.kind: CosineSchedule,
    ExponentialSchedule.kind: ExponentialSchedule,
    StepSchedule.kind: StepSchedule,
}
"""Every bundled schedule by its name."""

ScheduleLike = str | Mapping[str, Any] | LrSchedule | Callable[[int, int], float]
"""One schedule, as users give it: a name, an import path, a table, an instance or a function."""


def parse_schedules(given: ScheduleLike | Sequence[ScheduleLike] | None) -> tuple[LrSchedule, ...]:
    """Make schedules, without importing what is named by its path.

    Args:
        given: one of them, or several that multiply. A name of SCHEDULES; an import path
            "package.module:function"; a table with one of these as `kind` and the fields; a
            schedule; or a function.

    Raises:
        ConfigError: on an unknown name or key, or a value that does not fit.

    Example:
        >>> parse_schedules({"kind": "step", "every": 10})
        (StepSchedule(over='rounds', every=10, at=(), gamma=0.1),)
    """
    if given is None:
        return ()
    # A text is a sequence too, but one name.
    if isinstance(given, Sequence) and not isinstance(given, str):
        return tuple(
            _parse_schedule(one, f"lr_schedule[{number}]") for number, one in enumerate(given)
        )
    return (_parse_schedule(given, "lr_schedule"),)


def _parse_schedule(given: ScheduleLike, where: str) -> LrSchedule:
    if isinstance(given, LrSchedule):
        return given
    kind, table = parse_kind(given, SCHEDULES, "schedule", where)
    if kind in SCHEDULES:
        return parse_settings(SCHEDULES[kind], table, where)
    # What is no bundled kind is an import path.
    return parse_settings(CustomSchedule, table, where, path=kind)


def schedule_tables(given: Any) -> Any:
    """Return schedules as a study file keeps them: what is no plain value becomes a table.

    Example:
        >>> schedule_tables(ExponentialSchedule(gamma=0.5))
        {'kind': 'exponential', 'over': 'rounds', 'gamma': 0.5}
    """
    if given == NONE:  # which is a text, as a name is
        return None
    if isinstance(given, list | tuple):
        return tuple(map(schedule_tables, given))
    if isinstance(given, CustomSchedule):
        return {"kind": given.path, "over": given.over}
    if isinstance(given, LrSchedule):
        return to_plain(given)
    if callable(given):
        return {"kind": find_import_path(given, "lr_schedule")}
    return given


def compute_learning_rates(
    schedules: Sequence[LrSchedule],
    lr: float,
    length: Int[Tensor, "clients steps"],
    round: int,
    rounds: int | None,
) -> Float[Tensor, "clients steps"]:
    """Return the learning rate of each step of a local training, in float64.

    Args:
        schedules: whose factors multiply.
        lr: the whole rate.
        length: the size of each batch; 0 after a client's last step.
        round: which it is; -1 before the first.
        rounds: of the run; None where that is not known.

    Raises:
        ConfigError: when a schedule needs to know the number of rounds.

    Example:
        >>> sizes = torch.tensor([[8, 8, 8, 2], [8, 2, 0, 0]])
        >>> compute_learning_rates([LinearSchedule(over="steps")], 1.0, sizes, 0, None).tolist()
        [[1.0, 0.75, 0.5, 0.25], [1.0, 0.5, 0.0, 0.0]]
    """
    own = (length > 0).sum(1)
    found = torch.full(length.shape, lr, dtype=torch.float64)
    for schedule in schedules:
        if schedule.over == "rounds":
            if schedule.needs_total and rounds is None:
                raise ConfigError(
                    f"lr_schedule {schedule} runs over all rounds; expected Task(rounds=...), "
                    "their number"
                )
            # What is trained before the first exchange (round -1) has the rate of round 0.
            found *= schedule.lr_factor(max(0, round), rounds or 0)
            continue
        # Clients with as many steps share their factors; no step is taken at the zeros behind them.
        for total in own.unique().tolist():
            factors = torch.zeros(length.shape[1], dtype=torch.float64)
            factors[:total] = torch.tensor(
                [schedule.lr_factor(step, total) for step in range(total)], dtype=torch.float64
            )
            found[own == total] *= factors
    return found
