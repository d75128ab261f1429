"""The vmap engine: a block of clients as one batched program (torch.func.vmap over grad)."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional

from coterie._util.mappings import drop_keys
from coterie._util.tensors import index_each
from coterie.engine._base import Engine, Objective
from coterie.engine._graphs import ReplayedFunction
from coterie.engine._rewrites import (
    ReplacedFunctions,
    UnbatchedProducts,
    attend_plainly,
    convolve_unfolded,
    convolve_windowed,
    cross_entropy_by_gather,
    grad_and_value,
    normalize_batch,
    plain_attention,
    pool_by_slices,
    with_counted_batches,
)
from coterie.engine.precision import product_precision
from coterie.models.draws import KEY, KeyedDraws
from coterie.models.layout import Layout

_CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
# layers that call none of these functions
_PLAIN = {
    nn.Sequential, nn.Linear, nn.Flatten, nn.Identity, nn.Dropout, nn.ReLU, nn.Tanh, nn.Sigmoid,
    nn.GELU,
}  # fmt: skip
_ATTENTION: dict[Any, Callable[..., Any]] = {
    functional.scaled_dot_product_attention: attend_plainly(
        functional.scaled_dot_product_attention
    ),
    functional.multi_head_attention_forward: attend_plainly(
        functional.multi_head_attention_forward
    ),
}
_BOTH = {functional.batch_norm: normalize_batch, **_ATTENTION}
# On a CPU a client's bits must not depend on the block; a device has a tolerance instead, and few
# launches count more.
_TRAINING: dict[str, dict[Any, Callable[..., Any]]] = {
    "cpu": {torch.conv2d: convolve_unfolded, **_BOTH},
    "other": {torch.conv2d: convolve_windowed, **_BOTH},
}
_EVALUATION: dict[Any, Callable[..., Any]] = {
    functional.max_pool2d: pool_by_slices,
    torch.max_pool2d: pool_by_slices,
    **_ATTENTION,
}


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
        self._train_module = with_counted_batches(layout.train_module)
        self._eval_module = layout.eval_module
        self.modules = (self._train_module, self._eval_module)
        kinds = set(map(type, layout.eval_module.modules()))
        self._replaces = not kinds <= _PLAIN
        self._has_convolutions = any(issubclass(kind, _CONVOLUTIONS) for kind in kinds)
        # What modules draw differs between clients: by their keys.
        run = partial(vmap, randomness="different")
        self._gradients = {}
        for device, functions in _TRAINING.items():
            loss = partial(self._batch_loss, functions)
            self._gradients[device] = run(grad_and_value(loss))
        self._replayed = ReplayedFunction(self._run_device_gradients) if cuda_graphs else None
        self._objective = cross_entropy_by_gather if self._is_cross_entropy else objective
        self._forward = run(self._model_outputs)
        # The batch has no axis of clients.
        self._forward_shared = run(self._model_outputs, in_dims=(0, None, 0))

    def _batch_loss(
        self,
        functions: Mapping[Any, Callable[..., Any]],
        trained: dict,
        state: dict,
        inputs: dict,
        x: Tensor,
        y: Tensor,
    ) -> tuple[Tensor, dict]:
        tensors = {**trained, **self.layout.unpack_state(state), **inputs}
        with self._replace_functions(functions):
            outputs = self.layout.call_module(self._train_module, tensors, x)
        # Autocast leaves bfloat16; losses have the type of the model.
        loss = self._objective(outputs.to(self.layout.dtype), y).mean()
        # The module has written into its buffers, or replaced them.
        return loss, {name: self._keep_fraction(state[name], tensors[name]) for name in state}

    @staticmethod
    def _keep_fraction(before: Tensor, after: Tensor) -> Tensor:
        """Return new state; a count that did not change keeps what an average has left of it."""
        if after.is_floating_point():
            return after.to(before.dtype)
        return torch.where(after == before.round().to(after.dtype), before, after.to(before.dtype))

    def _replace_functions(
        self, functions: Mapping[Any, Callable[..., Any]]
    ) -> AbstractContextManager[Any]:
        # The mode sees every call of PyTorch, which takes longer than small layers do.
        if not self._replaces:
            return nullcontext()
        return ReplacedFunctions(functions)

    @contextmanager
    def _set_products(self, device: torch.device) -> Iterator[None]:
        """Compute products at the engine's precision; on a CPU one by one."""
        with ExitStack() as modes:
            modes.enter_context(product_precision(self.precision, device))
            if device.type == "cpu":
                modes.enter_context(UnbatchedProducts())
            yield

    def _model_outputs(self, tensors: dict, x: Tensor, inputs: dict) -> Tensor:
        tensors = {**tensors, **self.layout.unpack_state(tensors), **inputs}
        with self._replace_functions(_EVALUATION):
            outputs = self.layout.call_module(self._eval_module, tensors, x)
        return outputs.to(self.layout.dtype)

    @contextmanager
    def _keyed_draws(
        self, inputs: Mapping[str, Tensor], keys: Tensor, training: bool
    ) -> Iterator[dict[str, Tensor]]:
        """Make what forward passes draw of their keys; give the inputs without keys.

        Args:
            inputs: of the pass.
            keys: zeros, where the inputs have no keys.
            training: whether in training.
        """
        buffers = drop_keys(inputs, {KEY})
        if not self.layout.draws[training]:
            yield buffers
            return
        keys = inputs.get(KEY, keys).to(keys.device)
        with plain_attention(keys.device), KeyedDraws(keys):
            yield buffers

    def runs_one_by_one(self, device: torch.device) -> bool:
        """See `Engine.runs_one_by_one`; a CPU is slow at convolutions with many weights."""
        return self._has_convolutions and device.type == "cpu"

    def compute_gradients(
        self, rows: Tensor, x: Tensor, y: Tensor, inputs: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Engine.compute_gradients`."""
        cpu = rows.device.type == "cpu"
        with self._set_products(rows.device):
            # A graph takes tensors by position.
            if self._replayed is not None and not cpu:
                keys = inputs.get(KEY, _zero_keys(rows))
                loss, grads, after = self._replayed(
                    rows, x, y, keys, *(inputs[name] for name in self.layout.inputs)
                )
                return loss, grads, after
            return self._run_gradients("cpu" if cpu else "other", rows, x, y, inputs)

    def _run_device_gradients(
        self, rows: Tensor, x: Tensor, y: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        names = (KEY, *self.layout.inputs)
        return self._run_gradients("other", rows, x, y, dict(zip(names, inputs, strict=True)))

    def _run_gradients(
        self, device: str, rows: Tensor, x: Tensor, y: Tensor, inputs: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        layout = self.layout
        views = layout.split_rows(rows.detach())
        trained = {slot.name: views[slot.name] for slot in layout.trained_slots}
        state = drop_keys(views, trained)
        with self._keyed_draws(inputs, _zero_keys(rows), True) as given:
            grads, (losses, new_state) = self._gradients[device](
                trained, state, {**given, **self._frozen_weights(rows)}, x, y
            )
        after = rows[:, layout.trainable :]
        if state:
            after = layout.join_tensors(new_state, trainable=False)
        return losses.detach(), layout.join_tensors(grads, trainable=True), after.detach()

    def forward(self, rows: Tensor, x: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        """See `Engine.forward`."""
        cpu = rows.device.type == "cpu"
        with torch.no_grad(), self._set_products(rows.device):
            views, given = self.layout.split_rows(rows), {**inputs, **self._frozen_weights(rows)}
            own_x = x.expand(len(rows), *x.shape[1:])
            if self.runs_one_by_one(rows.device):
                outputs = [self._forward_one(views, own_x, given, i) for i in range(len(rows))]
                return torch.stack(outputs)
            with self._keyed_draws(given, _zero_keys(rows), False) as given:
                # With a shared batch, vmap makes one product of all clients' weights, whose
                # rounding depends on how many they are: not on a CPU.
                if len(x) == 1 and not cpu:
                    return self._forward_shared(views, x[0], given)
                return self._forward(views, own_x, given)

    def _frozen_weights(self, rows: Tensor) -> dict[str, Tensor]:
        """Return the frozen weights for each row: a product with one for all rounds by number.

        On a GPU, where results agree within a tolerance, the module's own are faster.
        """
        if rows.device.type != "cpu":
            return {}
        found = {}
        for name, tensor in self.layout.frozen.items():
            # A view: each row reads the same memory.
            found[name] = tensor.expand(len(rows), *tensor.shape)
        return found

    def _forward_one(
        self, views: dict[str, Tensor], x: Tensor, inputs: Mapping[str, Tensor], i: int
    ) -> Tensor:
        own = index_each(inputs, i)
        with self._keyed_draws(own, _zero_keys(x)[0], False) as given:
            return self._model_outputs(index_each(views, i), x[i], given)


def _zero_keys(rows: Tensor) -> Tensor:
    return torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
