"""The compiled engine: the whole training step of a module as one native program."""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from coterie.engine._agreement import agrees_with_module
from coterie.engine._base import Engine, Objective
from coterie.engine._loop import LoopEngine
from coterie.engine._vmap import VmapEngine
from coterie.engine._work import EvaluationPairs, TrainingWork
from coterie.engine.native import compiler
from coterie.engine.native.trace import NotTraceableError, Traces
from coterie.engine.native.traced import TracedProgram
from coterie.engine.optim import GRADIENT_ONLY
from coterie.models.layout import Layout


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
        if not agrees_with_module(self, x, y):
            raise NotTraceableError("its native program does not compute what it does")

    def compute_gradients(
        self, rows: Tensor, x: Tensor, y: Tensor, inputs: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Engine.compute_gradients`."""
        return self._other.compute_gradients(rows, x, y, inputs)

    def forward(self, rows: Tensor, x: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        """See `Engine.forward`."""
        return self._other.forward(rows, x, inputs)

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
