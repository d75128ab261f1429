"""The engine of a CUDA device's own programs: each client's whole step in one kernel of Triton."""

import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from coterie._util.tensors import index_optional
from coterie.engine._agreement import agrees_with_module
from coterie.engine._base import Engine, Objective
from coterie.engine._vmap import VmapEngine
from coterie.engine._work import RawSamples, TrainingWork
from coterie.engine.native.trace import NotTraceableError
from coterie.engine.optim import LocalTraining
from coterie.errors import OutOfMemory, first_line
from coterie.models.draws import KEY
from coterie.models.layout import Layout

if TYPE_CHECKING:
    from coterie.engine.kernels.programs import ClientProgram

_OPTIMIZERS = ("sgd", "adam", "adamw")
# steps and clients of a trial, and how often it is repeated after a first time that compiles
_STEPS, _CLIENTS, _REPEATS = 4, 256, 3


class TritonEngine(Engine):
    """Trains each client by a program of its own on a CUDA device: forward, backward and update.

    The module is traced as for the compiled engine, and its step is written as one kernel. It is
    compared with the loop engine on the sample batch before it is used. What the kernel cannot do
    (another optimizer, private training, evaluation) is left to the vmap engine.

    Args:
        layout: of the module.
        objective: the loss of each sample.
        x: a small batch of prepared inputs.
        y: its targets.
        precision: see `engine.precision.product_precision`.

    Attributes:
        program: the kernel.

    Raises:
        NotTraceableError: when there is no Triton for the device, the module cannot be traced, or
            the kernel's results differ from the module's.
    """

    name: ClassVar[str] = "triton"
    description: ClassVar[str] = "a kernel of the whole step, a program for each client"

    def __init__(
        self,
        layout: Layout,
        objective: Objective,
        x: Float[Tensor, "samples *features"],
        y: Shaped[Tensor, "samples *targets"],
        precision: str = "full",
    ) -> None:
        super().__init__(layout, objective, precision)
        started = time.perf_counter()
        self.program = self._make_program(x, y)
        self._other = VmapEngine(layout, objective, precision)
        try:
            agrees = agrees_with_module(self, x, y)
        except Exception as error:  # Triton's own, those of a compiler or of the driver
            if OutOfMemory.matches(error):
                raise
            raise NotTraceableError(
                f"its kernel fails ({type(error).__name__}: {first_line(error)})"
            ) from error
        if not agrees:
            raise NotTraceableError("its kernel does not compute what it does")
        self.compile_seconds = time.perf_counter() - started

    def _make_program(self, x: Tensor, y: Tensor) -> "ClientProgram":
        try:
            from coterie.engine.kernels.programs import ClientProgram, can_run_on
        except ImportError:
            raise NotTraceableError("this build of PyTorch has no Triton") from None
        if not can_run_on(x.device):
            raise NotTraceableError(f"its kernels run on a CUDA device, not on {x.device.type}")
        # Traced on a CPU, for whose operations kernels are written.
        layout = self.layout.to("cpu")
        return ClientProgram(layout, self.objective, x.cpu(), y.cpu(), self.precision)

    # ------------------------------------------------------------------ what another engine does

    def compute_gradients(
        self, rows: Tensor, x: Tensor, y: Tensor, inputs: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Engine.compute_gradients`."""
        return self._other.compute_gradients(rows, x, y, inputs)

    def forward(self, rows: Tensor, x: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        """See `Engine.forward`."""
        return self._other.forward(rows, x, inputs)

    def runs_one_by_one(self, device: torch.device) -> bool:
        """See `Engine.runs_one_by_one`."""
        return self._other.runs_one_by_one(device)

    # ------------------------------------------------------------------ training

    def _fits(self, work: TrainingWork) -> bool:
        """Return whether the kernel trains this work."""
        # PyTorch refuses to normalize over one sample, in words that are better than a NaN.
        alone = self.program.together and bool((work.batch_sizes == 1).any())
        return work.private is None and work.local.optimizer in _OPTIMIZERS and not alone

    def _train_block(self, rows: Tensor, work: TrainingWork) -> Tensor:
        if not self._fits(work):
            return super()._train_block(rows, work)
        local, moments = work.local, work.moments
        if moments is None:
            moments = rows.new_zeros(len(rows), local.num_moments, self.layout.trainable)
        taken = None if work.steps_taken is None else work.steps_taken.to(rows.device)
        losses = rows.new_full(work.batch_sizes.shape, torch.nan)
        rates = work.rates_on(rows.device)
        for step, members, (x, y, given) in work.iterate_steps():
            rate = index_optional(rates, (members, step, None))
            count = step + 1 if taken is None else (taken[members] + step + 1)[:, None].double()
            losses[members, step] = self.program.step(
                rows, moments, members, x, y, local, local.lr if rate is None else rate, count,
                work.anchor, work.prox, given.get(KEY),
            )  # fmt: skip
        return losses

    # ------------------------------------------------------------------ choice

    def why_not_faster(self, other: Engine, x: Tensor, y: Tensor, clients: int, size: int) -> str:
        """Measure a few steps of both engines; return why the other is faster, or nothing.

        Args:
            other: the engine that would run otherwise.
            x: some prepared inputs, which are repeated.
            y: their targets.
            clients: that train in a round.
            size: samples of a batch.
        """
        clients = max(1, min(clients, _CLIENTS))
        places = (torch.arange(size, device=x.device) % len(x)).expand(clients, _STEPS, size)
        work = TrainingWork(
            RawSamples(x, y, x.dtype), places, torch.full((clients, _STEPS), size), LocalTraining(),
        )  # fmt: skip
        rows = self.layout.own_values()[None].repeat(clients, 1)
        best, warps = float("inf"), self.program.warps
        for tried in self.program.tiles:
            self.program.set_warps(tried)
            seconds = self._measure_if_right(x, y, rows, work)
            if seconds < best:
                best, warps = seconds, tried
        self.program.set_warps(warps)
        usual = _measure(other, rows, work)
        if best < usual:
            return ""
        return (
            f"in a trial the kernel took {1e3 * best:.3g} ms for {_STEPS} steps of {clients} "
            f"clients, and {other.name} {1e3 * usual:.3g} ms"
        )

    def _measure_if_right(self, x: Tensor, y: Tensor, rows: Tensor, work: TrainingWork) -> float:
        """Return the seconds of a training; infinity where the kernel fails or is wrong."""
        try:
            return _measure(self, rows, work) if agrees_with_module(self, x, y) else float("inf")
        except Exception as error:  # of Triton, a compiler or the driver: another kernel may work
            if OutOfMemory.matches(error):
                raise
            return float("inf")


def _measure(engine: Engine, rows: Tensor, work: TrainingWork) -> float:
    """Return the median seconds of a training, after a first one that compiles."""
    found = []
    for _ in range(1 + _REPEATS):
        own, started = rows.clone(), time.perf_counter()
        engine.train(own, replace(work), len(rows))  # losses come to the CPU: all is done
        found.append(time.perf_counter() - started)
    return statistics.median(found[1:])
