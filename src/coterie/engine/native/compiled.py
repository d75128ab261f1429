"""The compiled engine: the whole training step of a module as one native program."""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from coterie.engine._base import MODULE_ERRORS, Engine, Objective
from coterie.engine._loop import LoopEngine
from coterie.engine._vmap import VmapEngine
from coterie.engine._work import EvaluationPairs, RawSamples, TrainingWork
from coterie.engine.native import compiler
from coterie.engine.native.trace import NotTraceableError, Traces
from coterie.engine.native.traced import TracedProgram
from coterie.engine.optim import GRADIENT_ONLY, LocalTraining
from coterie.models.layout import Layout

_ROUNDING = 8  # times the loop engine's own rounding that a program may differ from it
# Of the largest entry, in addition to that: far above what sums round, far below a wrong formula.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-9}


class CompiledEngine(Engine):
    """Trains and measures with a native program, on a CPU.

    The module is traced, and the operations of its step are written one after another. The program
    is compared with the loop engine on the sample batch before it is used. What a program cannot do
    (a mixture of endpoints for each sample, batch normalization of one sample) is left to another
    engine.

    Args:
        layout: of the module.
        objective: the loss of each sample.
        x: a small batch of prepared inputs.
        y: its targets.
        traces: what `trace_module` returned for these arguments; traced here when None.
        portable: compile for all processors of the last ten years; see `compiler.portable_code`.

    Raises:
        NotTraceableError: when the module cannot be traced, or the program's results differ from
            the module's.
        CompilerError: when it cannot be compiled.
    """

    name: ClassVar[str] = "compiled"
    description: ClassVar[str] = "a native program of the whole step"

    def __init__(
        self,
        layout: Layout,
        objective: Objective,
        x: Float[Tensor, "samples *features"],
        y: Shaped[Tensor, "samples *targets"],
        traces: Traces | None = None,
        portable: bool = False,
    ) -> None:
        super().__init__(layout, objective)
        if x.device.type != "cpu":
            raise NotTraceableError(f"native programs run on a CPU, not on {x.device.type}")
        with compiler.portable_code(portable):
            self.program = TracedProgram(layout, objective, x, y, traces)
        other = VmapEngine if self.program.simple else LoopEngine
        self._other = other(layout, objective)
        self.compile_seconds = self.program.seconds
        self._compare(x, y)

    def compute_gradients(
        self, rows: Tensor, x: Tensor, y: Tensor, inputs: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Engine.compute_gradients`."""
        return self._other.compute_gradients(rows, x, y, inputs)

    def forward(self, rows: Tensor, x: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        """See `Engine.forward`."""
        return self._other.forward(rows, x, inputs)

    def _compare(self, x: Tensor, y: Tensor) -> None:
        """Take one gradient step with the program and the loop engine, and compare the results.

        Rounding alone may move a result far: a batch normalization that sees few values magnifies
        it, and a gate that it opens or shuts changes a gradient at once. So the program may differ
        by as much as the loop engine in double precision does, and it has to agree on one of three
        batches: a wrong one agrees on none.
        """
        # The whole batch, and its halves.
        half = len(x) // 2
        for part in (slice(None), slice(half), slice(half, None)):
            if len(x[part]) and self._agrees(x[part], y[part]):
                return
        raise NotTraceableError("its native program does not compute what it does")

    def _agrees(self, x: Tensor, y: Tensor) -> bool:
        layout = self.layout
        row = layout.own_values()[None]
        ours = self._step(self, row, x, y)
        exact = theirs = self._step(LoopEngine(layout, self.objective), row, x, y)
        if layout.dtype == torch.float32:
            exact = self._step_exactly(row, x, y)

        def near(own: Tensor, other: Tensor, true: Tensor) -> bool:
            rounding = float((other - true).abs().max())
            limit = (
                _TOLERANCE[layout.dtype] * max(1.0, float(other.abs().max())) + _ROUNDING * rounding
            )
            return bool(((own - other).abs() <= limit).all())

        return all(map(near, ours, theirs, exact))

    def _step_exactly(self, row: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return a step in double precision: how far rounding alone moves those in float32.

        A module that makes float32 tensors of its own, such as the first state of an LSTM cell,
        has none: there the weights are moved by a unit of the last place instead.
        """
        try:
            double = LoopEngine(Layout(self.layout.train_module, torch.float64), self.objective)
            return self._step(double, row.double(), x, y)
        except MODULE_ERRORS:
            moved = row.clone()
            moved[:, : self.layout.trainable] *= 1 + torch.finfo(row.dtype).eps
            return self._step(LoopEngine(self.layout, self.objective), moved, x, y)

    def _step(self, engine: Engine, row: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of one step of an engine, and how far it moves a row."""
        layout, dtype = engine.layout, row.dtype
        keys = None
        if layout.draws[True]:
            keys = torch.ones(1, dtype=torch.int64)
        work = TrainingWork(
            RawSamples(x.to(dtype), y, dtype), torch.arange(len(x))[None, None],
            torch.tensor([[len(x)]]),
            LocalTraining(optimizer="sgd", lr=1.0), draw_keys=keys,
            inputs={name: value.to(dtype) for name, value in self._unequal().items()},
        )  # fmt: skip
        rows = row.clone()
        return engine.train(rows, work, 1), rows - row

    def _unequal(self) -> dict[str, Tensor]:
        """Return values of input buffers that differ in each entry: weights of endpoints."""
        values = {}
        for name, own in self.layout.zero_inputs(1).items():
            if own.is_floating_point():
                weights = torch.arange(1, own[0].numel() + 1, dtype=self.layout.dtype).reshape(
                    own.shape
                )
                values[name] = (weights / weights.sum())[:, None]
        return values

    def train(
        self, rows: Float[Tensor, "clients params"], work: TrainingWork, block: int
    ) -> Float[Tensor, "clients steps"]:
        """See `Engine.train`; `block` matters only where another engine trains."""
        # The base class clips and adds noise; it asks the program for gradients of single samples.
        if work.private is not None:
            return super().train(rows, work, block)
        if not self.program.fits(work):
            return self._other.train(rows, work, block)
        return self._run_program(rows, work)

    def _run_program(self, rows: Tensor, work: TrainingWork) -> Tensor:
        parts = work.split_for_programs()
        return torch.cat([self.program.train(rows[part], own) for part, own in parts])

    def sample_gradients(
        self, rows: Float[Tensor, "samples params"], work: TrainingWork
    ) -> tuple[Float[Tensor, " samples"], Float[Tensor, "samples trainable"]]:
        """See `Engine.sample_gradients`."""
        if not self.program.fits(work):
            return self._other.sample_gradients(rows, work)
        # With GRADIENT_ONLY the momentum ends as the gradient: samples x 1 moment x trainable.
        found = torch.zeros(len(rows), 1, self.layout.trainable, dtype=rows.dtype)
        none = torch.zeros(len(rows), dtype=torch.int64)
        losses = self._run_program(
            rows, replace(work, local=GRADIENT_ONLY, moments=found, steps_taken=none)
        )
        return losses[:, 0], found[:, 0]

    def measure_pairs(
        self,
        table: Float[Tensor, "models params"],
        pairs: EvaluationPairs,
        inputs: Mapping[str, Tensor],
        block: int,
    ) -> dict[str, Float[Tensor, " pairs"]]:
        """See `Engine.measure_pairs`; `block` matters only where another engine measures."""
        # The key of a set's draws changes from call to call; a program has one for all samples.
        if pairs.draw_keys is not None:
            return super().measure_pairs(table, pairs, inputs, block)
        # The program returns loss and score. Without a metric its score is the loss again: left
        # out.
        return dict(zip(self.metrics, self.program.measure(table, pairs, inputs), strict=False))
