"""The program of a module: one launch takes a step of many clients, a program of Triton for each."""

import hashlib
import linecache
from typing import Any, ClassVar

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from coterie.engine._base import Objective
from coterie.engine.kernels.images import KernelImageLowering
from coterie.engine.kernels.rules import LAUNCH, move_tile
from coterie.engine.kernels.update import StepNumbers, launch_on
from coterie.engine.native.pooling import pool_before_activations
from coterie.engine.native.trace import NotTraceableError, evaluate_size, record
from coterie.engine.optim import LocalTraining
from coterie.models.layout import Layout

_HEAD = """
@triton.jit
def step(
    rows, anchor, first, second, numbers, x, y, losses, scratch, constants, members, keys,
    row_stride, anchor_stride, moment_stride, scratch_size, x_size, y_size, n, rate, keep, shrink,
    decay, prox, momentum, share, kept, added, eps,
    EACH: tl.constexpr, ADAM: tl.constexpr, SHRINK: tl.constexpr, DECAY: tl.constexpr,
    PROX: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, NEAR: tl.constexpr,
    BF16: tl.constexpr, PRECISION: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)
    client = tl.load(members + at)
    key = tl.load(keys + at)
    row = rows + client * row_stride
    anchored = anchor + client * anchor_stride
    first_at = first + client * moment_stride
    second_at = second + client * moment_stride
    own_x = x + at * x_size
    own_y = y + at * y_size
    own = scratch + at * scratch_size
    if EACH:
        rate = tl.load(numbers + at * 3)
        keep = tl.load(numbers + at * 3 + 1)
        shrink = tl.load(numbers + at * 3 + 2)
"""
_TYPICAL = 16  # samples of a batch for which tiles are chosen; a program takes any number
_PRECISIONS = {"full": "ieee", "tf32": "tf32", "bf16": "ieee"}


def can_run_on(device: torch.device) -> bool:
    """Return whether kernels run on a device: on a CPU where Triton interprets them."""
    return device.type == "cuda" or type(move_tile).__name__ == "InterpretedFunction"


class ClientProgram:
    """The training step of a module as one kernel: forward, backward and update of each client.

    Args:
        layout: of the module.
        objective: the loss of each sample.
        x: some prepared inputs, on a CPU.
        y: their targets.
        precision: of products; see `engine.precision.product_precision`.

    Attributes:
        text: the source of the kernel.
        together: whether a sample's loss depends on the others of its batch.
        flags: how products are computed, for the compiler.
        warps: groups of 32 threads that compute a client; see `set_warps`.

    Raises:
        NotTraceableError: when the module cannot be traced, or does what no kernel here does.
    """

    tiles: ClassVar[dict[int, int]] = {4: 32, 8: 64}
    """Rows and columns of a tile of a product, at most, by `warps`: what their registers hold."""

    def __init__(
        self,
        layout: Layout,
        objective: Objective,
        x: Float[Tensor, "samples *features"],
        y: Shaped[Tensor, "samples *targets"],
        precision: str = "full",
    ) -> None:
        if layout.dtype != torch.float32:
            raise NotTraceableError(f"numbers of type {str(layout.dtype).removeprefix('torch.')}")
        if layout.inputs:
            raise NotTraceableError("it has input buffers")
        traces = record(layout, objective, x, y, KernelImageLowering.knows)
        self._trace = pool_before_activations(traces.train)
        self.layout, self.precision, self.together = layout, precision, traces.together
        self.flags = {"BF16": precision == "bf16", "PRECISION": _PRECISIONS[precision]}
        self.set_warps(min(self.tiles))

    def set_warps(self, warps: int) -> None:
        """Write the kernel for a number of threads of `tiles`."""
        lowering = KernelImageLowering(self._trace, self.layout, _TYPICAL, self.tiles[warps])
        lowering.run()
        self.warps, self.scratch = warps, lowering.scratch
        self._constants = torch.cat([*lowering.constants, torch.zeros(1)])
        self.text = _HEAD + "".join(f"    {line}\n" for line in lowering.lines)
        self._kernel = _compile(self.text)

    def step(
        self,
        rows: Float[Tensor, "clients params"],
        moments: Float[Tensor, "clients moments trainable"],
        members: Int[Tensor, " members"],
        x: Float[Tensor, "members samples *features"],
        y: Shaped[Tensor, "members samples *targets"],
        local: LocalTraining,
        rate: float | Float[Tensor, "members 1"],
        count: int | Float[Tensor, "members 1"],
        anchor: Float[Tensor, "clients params"] | None = None,
        prox: float = 0.0,
        keys: Int[Tensor, " members"] | None = None,
    ) -> Float[Tensor, " members"]:
        """Take a step of some clients in place, and return their mean losses before it.

        Args:
            rows: the models.
            moments: of their optimizers.
            members: the clients.
            x: a batch for each.
            y: its targets.
            local: the optimizer.
            rate: see `kernels.update.update_rows`.
            count: as well.
            anchor: models of the proximal term.
            prox: weight of the proximal term.
            keys: of what each draws in the step; see `models.draws`. None where nothing is drawn.
        """
        keys = torch.zeros_like(members) if keys is None else keys.to(members.device).contiguous()
        samples = x.shape[1]
        x, y = x.contiguous(), y.contiguous()
        losses = rows.new_empty(len(members))
        size = evaluate_size(self.scratch, samples)
        scratch = rows.new_empty(len(members) * max(1, size))
        if self._constants.device != rows.device:
            self._constants = self._constants.to(rows.device)
        numbers = StepNumbers.of(
            local.optimizer, local.optimizer_arguments, rate, count, len(members), rows.device,
            0.0 if anchor is None else prox,
        )  # fmt: skip
        table = losses if numbers.table is None else numbers.table
        anchor = rows if anchor is None else anchor
        # The rows stand for moments that are not read.
        first, second = [*moments.unbind(1), rows, rows][:2]
        with launch_on(rows):
            self._kernel[(len(members),)](
                rows, anchor, first, second, table, x, y, losses, scratch, self._constants, members, keys,
                rows.stride(0), anchor.stride(0), moments.stride(0), max(1, size), x[0].numel(),
                y[0].numel(), samples, *numbers.scalars, **numbers.flags,
                **self.flags, num_warps=self.warps, **LAUNCH,
            )  # fmt: skip
        return losses


def _compile(text: str) -> Any:
    """Return the kernel of a text, which Triton reads by the name of its file."""
    name = f"<kernel {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    names: dict[str, Any] = {
        "triton": triton, "tl": tl, "move_tile": move_tile, "__name__": __name__,
    }  # fmt: skip
    # Text of this package alone: names and numbers of a trace, none from a file or another machine.
    exec(compile(text, name, "exec"), names)
    return names["step"]
