"""The compiled engine: the whole step of a stack of layers as one native program."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from coterie.engine._base import Engine, Objective, cross_entropy, squared_error
from coterie.engine._loop import LoopEngine
from coterie.engine._vmap import VmapEngine
from coterie.engine._work import Pairs, RawSamples, Training
from coterie.engine.native.library import NativeProgram
from coterie.engine.native.stack import NotAStackError
from coterie.engine.optim import LocalTraining
from coterie.models.layout import Layout

_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-9}


class CompiledEngine(VmapEngine):
    """Trains and measures with the native program of a plain stack of layers, on a CPU.

    The program is compared with the loop engine on the sample batch before it is used.

    Args:
        layout: of the module.
        objective: cross-entropy or squared error.
        x: a small batch of prepared inputs.
        y: its targets.

    Raises:
        NotAStackError: when the module is no stack, or the program's results differ from the module's.
        CompilerError: when it cannot be compiled.
    """

    name: ClassVar[str] = "compiled"
    does: ClassVar[str] = "a native program of the whole step"

    def __init__(
        self,
        layout: Layout,
        objective: Objective,
        x: Float[Tensor, "samples *features"],
        y: Shaped[Tensor, "samples *targets"],
    ) -> None:
        super().__init__(layout, objective)
        if objective not in (cross_entropy, squared_error):
            raise NotAStackError("its objective is neither cross-entropy nor squared error")
        if x.device.type != "cpu":
            raise NotAStackError(f"native programs run on a CPU, not on {x.device.type}")
        self.program = NativeProgram(layout, tuple(x.shape[1:]))
        self.compile_seconds = self.program.seconds
        self._compare(x, y)

    def _compare(self, x: Tensor, y: Tensor) -> None:
        """Take one gradient step with the program and with the loop engine."""
        layout = self.layout
        classes = 0 if y.is_floating_point() else int(y.max()) + 1
        row = layout.flatten_copy(layout.train_module)[None]
        places = torch.arange(len(x))[None, None]
        keys = (torch.ones(1, dtype=torch.int64), layout.keys) if layout.keys else None
        work = Training(
            RawSamples(x, y, classes, layout.dtype), places, torch.tensor([[len(x)]]),
            LocalTraining(optimizer="sgd", lr=1.0), inputs=self._unequal(), keys=keys,
        )  # fmt: skip
        results = []
        engines: tuple[Engine, ...] = (self, LoopEngine(layout, self.objective))
        for engine in engines:
            rows = row.clone()
            results.append((engine.train(rows, work, 1), rows - row))
        for ours, theirs in zip(*results, strict=True):
            limit = _TOLERANCE[layout.dtype] * max(1.0, float(theirs.abs().max()))
            if bool(((ours - theirs).abs() > limit).any()):
                raise NotAStackError("its native program does not compute what it does")

    def _unequal(self) -> dict[str, Tensor]:
        """Return weights of the endpoints, if the module has any, that tell them apart."""
        if self.program.alpha is None:
            return {}
        endpoints = self.layout.zero_inputs(1)[self.program.alpha].shape[-1]
        weights = torch.arange(1, endpoints + 1, dtype=self.layout.dtype)
        return {self.program.alpha: (weights / weights.sum())[None, None]}

    def train(
        self, rows: Float[Tensor, "clients params"], work: Training, block: int
    ) -> Float[Tensor, "clients steps"]:
        """See `Engine.train`; `block` matters only where each sample has its own mixture of endpoints."""
        if any(name == self.program.alpha and value.ndim > 3 for name, value in work.inputs.items()):
            return super().train(rows, work, block)
        return self.program.train(rows, work)

    def measure(
        self, table: Float[Tensor, "models params"], pairs: Pairs, inputs: Mapping[str, Tensor], block: int
    ) -> dict[str, Float[Tensor, " pairs"]]:
        """See `Engine.measure`; `block` does not matter."""
        return self.program.measure(table, pairs, inputs)
