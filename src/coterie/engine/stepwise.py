"""Local training step by step, for methods that choose gradients and moves themselves."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from coterie._util import pages
from coterie._util.tensors import index_optional
from coterie.engine._base import Engine, explain_module_errors
from coterie.engine._batches import BatchPlan, make_report
from coterie.engine._work import TrainingTotals, TrainingWork
from coterie.engine.optim import GRADIENT_ONLY, OptimizerState, RowOptimizer
from coterie.errors import ConfigError


@dataclass(eq=False)
class StepwiseTraining:
    """One local training whose steps a method takes itself; see `Task.train_stepwise`.

    Batches, dropout masks, augmentations and learning rates of a step are the ones `Task.train`
    would use.

    Args:
        engine: computes the gradients.
        work: the local training as a whole.
        block: clients trained at once.
        schedule: its batches.
        seed_torch: (step, client's row) -> a context in which PyTorch's own generator is that
            client's.
        totals: get the seconds that gradients and steps took.
        copy_track: (track) -> the state of an optimizer to go on from, which may be changed, and
            steps taken before.
        record_query: called with a step of whose batch a gradient was taken, and how many there
            were of it so far.
        optimizer: the state from which optimizers go on, and after `finish` the one they leave;
            None where it was not given.
        only: which trained parameters `apply_gradient` moves; all when None.

    Attributes:
        num_steps: the largest number of steps of any client.
        losses: the loss of the first gradient asked for in each step; NaN where there was none.
    """

    engine: Engine
    work: TrainingWork
    block: int
    schedule: BatchPlan
    seed_torch: Callable[[int, int], AbstractContextManager[None]]
    totals: TrainingTotals
    copy_track: Callable[[int], tuple[Tensor, Tensor] | tuple[None, None]]
    record_query: Callable[[int, int], None]
    optimizer: OptimizerState | None = None
    only: Bool[Tensor, " trainable"] | None = None
    losses: Float[Tensor, "clients steps"] = field(init=False)
    _samples: Int[Tensor, " clients"] = field(init=False)  # processed
    _optimizers: "dict[int, _TrackOptimizer]" = field(init=False, default_factory=dict)
    # gradients of each step's batch
    _asked: dict[int, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse an optimizer that cannot be asked for single steps."""
        if self.work.local.custom_optimizer:
            raise ConfigError(
                f"optimizer {self.work.local.custom_optimizer!r} is not known here; this method "
                "takes its steps itself, with one of "
                "Coterie's own optimizers: 'sgd' or 'adam', for example"
            )
        length = self.work.batch_sizes
        self.losses = torch.full(length.shape, torch.nan, dtype=self.engine.layout.dtype)
        self._samples = torch.zeros(len(length), dtype=torch.int64)

    @property
    def num_steps(self) -> int:
        """The largest number of steps of any client."""
        return self.work.num_steps

    def active_clients(self, step: int) -> Bool[Tensor, " clients"]:
        """Return, on the CPU, which clients have a batch in a step."""
        return self.schedule.active_steps[:, step]

    def compute_gradient(
        self, params: Float[Tensor, "clients params"], step: int
    ) -> Float[Tensor, "clients trainable"]:
        """Return the gradient of each client's mean loss; zeros for a client without a batch.

        Args:
            params: the models, whose rows lie apart. Running statistics are updated in place, as in
                training; trained parameters are not changed, unless their gradient is not finite:
                then they become NaN.
            step: which batch, from 0.
        """
        started = time.perf_counter()
        trainable = self.engine.layout.trainable
        shape = len(params), 1, trainable
        # The moments of a training with GRADIENT_ONLY: its momentum ends as the gradient. The
        # middle axis is that of moments, of which there is one.
        found = pages.empty(*shape, dtype=params.dtype, device=params.device).zero_()
        work = replace(
            self.work.single_step(step, self._asked.get(step, 0)),
            local=GRADIENT_ONLY,
            moments=found,
            steps_taken=torch.zeros(len(params), dtype=torch.int64),
            seed_torch=lambda row: self.seed_torch(step, row),
        )
        with explain_module_errors("in training"):
            losses = self.engine.train(params, work, self.block)[:, 0]
        # Each gradient of a batch has private noise of its own, and is charged by its number.
        self._asked[step] = self._asked.get(step, 0) + 1
        self.record_query(step, self._asked[step])
        # Later gradients of the step are taken at other points: its loss is that of the first.
        first = self.losses[:, step].isnan()
        self.losses[:, step] = torch.where(first, losses.to(self.losses), self.losses[:, step])
        self._samples += self.work.batch_sizes[:, step]
        self.totals.seconds += time.perf_counter() - started
        return found[:, 0]

    def apply_gradient(
        self,
        params: Float[Tensor, "clients params"],
        gradient: Float[Tensor, "clients trainable"],
        step: int,
        track: int = 0,
    ) -> None:
        """Take a step of the run's optimizer on the models of clients with a batch, in place.

        Args:
            params: the models.
            gradient: along which they go; may be overwritten.
            step: its number, from 0, which decides the learning rate and who takes part.
            track: which of the client's models this is: each has an optimizer of its own.
        """
        started = time.perf_counter()
        if track not in self._optimizers:
            self._optimizers[track] = _TrackOptimizer(
                *self.copy_track(track), torch.zeros(len(params), dtype=torch.int64)
            )
        self._optimizers[track].step(self, params, gradient, step)
        self.totals.seconds += time.perf_counter() - started

    def learning_rates(self, step: int) -> Float[Tensor, " clients"]:
        """Return the learning rate of each client in a step, in float64 and on the CPU."""
        if self.work.rates is None:
            return torch.full(
                (len(self.work.batch_sizes),), self.work.local.lr, dtype=torch.float64
            )
        return self.work.rates[:, step]

    def finish(self, *params: Float[Tensor, "clients params"]) -> dict[str, Tensor]:
        """End the training and return its report; `train_samples` counts all gradients'.

        Args:
            params: the models that it led to; a client with NaN or infinity in one of them has
                diverged.
        """
        initial = self.work.local.initial_accumulator_value
        for track, optimizer in self._optimizers.items():
            before, moments = optimizer.before, optimizer.moments
            if self.optimizer is not None and moments is not None and before is not None:
                self.optimizer = self.optimizer.replace_track(
                    track, moments, before + optimizer.taken, initial
                )
        return make_report(self.losses, self.schedule, self._samples, params)


@dataclass(eq=False)
class _TrackOptimizer:
    """An optimizer on the trained parameters of the clients, or on some of them.

    Args:
        moments: the state it goes on from, changed in place; a fresh one when None.
        before: with `moments`: steps taken before.
        taken: steps taken by each client.
    """

    moments: Float[Tensor, "clients moments trainable"] | None
    before: Int[Tensor, " clients"] | None
    taken: Int[Tensor, " clients"]
    _optimizer: RowOptimizer | None = None
    _calls: int = 0

    def step(self, steps: StepwiseTraining, params: Tensor, gradient: Tensor, step: int) -> None:
        """Take a step; a client with a batch now had one in each step before."""
        columns = _select_columns(steps.only, steps.engine.layout.trainable)
        inside = isinstance(columns, slice)
        # A range gives views that change in place; indices give copies, which are written back
        # below.
        rows, slope = params[:, columns], gradient[:, columns]
        if self._optimizer is None:
            moments = index_optional(self.moments, (slice(None), slice(None), columns))
            self._optimizer = RowOptimizer(steps.work.local, rows, moments, self.before)
        active, rate = steps.active_clients(step), None
        if steps.work.rates is not None:
            rate = steps.learning_rates(step)[:, None].to(params.device)
        # One count serves all, as a client that takes part now took part in each step before.
        self._calls += 1
        self.taken += active
        if bool(active.all()):
            self._optimizer.step(rows, slope, self._calls, rate)
        else:
            members = active.nonzero().flatten().to(params.device)
            part, some = self._optimizer.select_rows(members), rows[members]
            part.step(some, slope[members], self._calls, index_optional(rate, members))
            self._optimizer.store_rows(members, part)
            rows[members] = some
        if not inside:
            params[:, columns] = rows
            if self.moments is not None:
                self.moments[:, :, columns] = torch.stack(self._optimizer.state, 1)


def _select_columns(
    only: Bool[Tensor, " trainable"] | None, trainable: int
) -> slice | Int[Tensor, " columns"]:
    """Return the columns that are moved: a range where they lie together, without a copy."""
    if only is None:
        return slice(trainable)
    where = only.nonzero().flatten()
    if not len(where):
        return slice(0)
    first, last = int(where[0]), int(where[-1])
    if last - first + 1 == len(where):
        return slice(first, last + 1)
    return where
