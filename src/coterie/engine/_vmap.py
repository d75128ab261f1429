"""The vmap engine: a block of clients as one batched program (torch.func.vmap over grad)."""

from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from coterie.engine._base import Engine, Objective, cross_entropy
from coterie.engine._graphs import ReplayedFunction
from coterie.engine._rewrites import (
    UnbatchedProducts,
    cross_entropy_by_gather,
    grad_and_value,
    with_strided_pools,
    with_unfolded_convolutions,
    with_windowed_convolutions,
)
from coterie.engine.precision import product_precision
from coterie.models.layout import Layout

_CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)


class VmapEngine(Engine):
    """A block of clients at once.

    Args:
        layout: of the module.
        objective: the loss of each sample.
        precision: see `engine.precision.product_precision`.
        cuda_graphs: capture the gradients of a block as CUDA graphs and replay them; for a CUDA
            device.
    """

    name: ClassVar[str] = "vmap"
    description: ClassVar[str] = "many clients at once"

    def __init__(
        self,
        layout: Layout,
        objective: Objective,
        precision: str = "full",
        cuda_graphs: bool = False,
    ) -> None:
        super().__init__(layout, objective, precision)
        self._eval_module = with_strided_pools(layout.eval_module)
        # On a CPU a client's bits must not depend on the block; a device has a tolerance instead,
        # and few launches count more.
        trained = {
            "cpu": with_unfolded_convolutions(layout.train_module),
            "other": with_windowed_convolutions(layout.train_module),
        }
        self.modules = (*trained.values(), self._eval_module)
        self._has_convolutions = any(
            isinstance(part, _CONVOLUTIONS) for part in layout.eval_module.modules()
        )
        self._gradients = {
            device: vmap(grad_and_value(partial(self._batch_loss, module)))
            for device, module in trained.items()
        }
        self._replayed = ReplayedFunction(self._run_device_gradients) if cuda_graphs else None
        self._objective = cross_entropy_by_gather if objective == cross_entropy else objective
        self._forward = vmap(self._model_outputs)
        # The batch has no axis of clients.
        self._forward_shared = vmap(self._model_outputs, in_dims=(0, None, 0))

    def _batch_loss(
        self, module: nn.Module, trained: dict, state: dict, inputs: dict, x: Tensor, y: Tensor
    ) -> tuple[Tensor, dict]:
        tensors = {**trained, **state, **inputs}
        loss = self._objective(
            functional_call(module, tensors, (x,)).to(self.layout.dtype), y
        ).mean()
        # functional_call writes buffers that the module has replaced back into `tensors`.
        return loss, {name: tensors[name] for name in state}

    def _model_outputs(self, tensors: dict, x: Tensor, inputs: dict) -> Tensor:
        return functional_call(self._eval_module, {**tensors, **inputs}, (x,)).to(self.layout.dtype)

    def runs_one_by_one(self, device: torch.device) -> bool:
        """See `Engine.runs_one_by_one`; a CPU is slow at convolutions with many weights."""
        return self._has_convolutions and device.type == "cpu"

    def compute_gradients(
        self, rows: Tensor, x: Tensor, y: Tensor, inputs: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Engine.compute_gradients`."""
        cpu = rows.device.type == "cpu"
        with (
            product_precision(self.precision, rows.device),
            UnbatchedProducts() if cpu else nullcontext(),
        ):
            # A graph takes tensors by position.
            if self._replayed is not None and not cpu:
                loss, grads, after = self._replayed(
                    rows, x, y, *(inputs[name] for name in self.layout.inputs)
                )
                return loss, grads, after
            return self._run_gradients("cpu" if cpu else "other", rows, x, y, inputs)

    def _run_device_gradients(
        self, rows: Tensor, x: Tensor, y: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        return self._run_gradients(
            "other", rows, x, y, dict(zip(self.layout.inputs, inputs, strict=True))
        )

    def _run_gradients(
        self, device: str, rows: Tensor, x: Tensor, y: Tensor, inputs: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        layout = self.layout
        views = layout.split_rows(rows.detach())
        trained = {s.name: views[s.name] for s in layout.slots if s.stop <= layout.trainable}
        state = {name: view for name, view in views.items() if name not in trained}
        grads, (losses, new_state) = self._gradients[device](
            trained, state, {**inputs, **self._frozen_weights(rows)}, x, y
        )
        after = (
            layout.join_tensors(new_state, trainable=False, lead=1)
            if state
            else rows[:, layout.trainable :]
        )
        return losses.detach(), layout.join_tensors(grads, trainable=True, lead=1), after.detach()

    def forward(self, rows: Tensor, x: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        """See `Engine.forward`."""
        cpu = rows.device.type == "cpu"
        with (
            torch.no_grad(),
            product_precision(self.precision, rows.device),
            UnbatchedProducts() if cpu else nullcontext(),
        ):
            views, given = self.layout.split_rows(rows), {**inputs, **self._frozen_weights(rows)}
            if self.runs_one_by_one(rows.device):
                return torch.stack(
                    [self._forward_one(views, x, given, i) for i in range(len(rows))]
                )
            # With a shared batch, vmap makes one product of all clients' weights, whose rounding
            # depends on how many they are: not on a CPU.
            if len(x) == 1 and not cpu:
                return self._forward_shared(views, x[0], given)
            return self._forward(views, x.expand(len(rows), *x.shape[1:]), given)

    def _frozen_weights(self, rows: Tensor) -> dict[str, Tensor]:
        """Return the frozen weights for each row: a product with one for all rounds by number.

        On a GPU, where results agree within a tolerance, the module's own are faster.
        """
        if rows.device.type != "cpu":
            return {}
        return {
            name: tensor.expand(len(rows), *tensor.shape)
            for name, tensor in self.layout.frozen.items()
        }

    def _forward_one(
        self, views: dict[str, Tensor], x: Tensor, inputs: Mapping[str, Tensor], i: int
    ) -> Tensor:
        tensors = {name: view[i] for name, view in views.items()}
        return self._model_outputs(
            tensors, x[i if len(x) > 1 else 0], {name: value[i] for name, value in inputs.items()}
        )
