"""The shared-backbone engine: all clients' batches in one forward pass over one frozen backbone."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from coterie._util import pages
from coterie._util.tensors import index_each
from coterie.engine._base import Engine
from coterie.engine._client_axis import (
    ClientAxis,
    ClientFunctions,
    NoClientAxisError,
    add_client_axis,
)
from coterie.engine._flat import copy_to_device
from coterie.engine._loop import LoopEngine
from coterie.engine._rewrites import plain_attention
from coterie.engine._work import TrainingWork
from coterie.engine.precision import product_precision
from coterie.models.draws import KEY, KeyedDraws, RefuseDraws
from coterie.models.layout import Layout

# Bytes that the backward pass of a block keeps. On a CPU larger blocks only leave the caches.
_MAX_KEPT_BYTES = {"cpu": 1 << 27, "cuda": 1 << 34}
# share by which averages of equal numbers differ from them, after many rounds too
_ROUNDING = 1e-5


class SharedBackboneEngine(Engine):
    """The batches of a block of clients one after another, in one pass; see `_client_axis`.

    Models are measured one by one, as by the loop engine.

    Args:
        loop: the loop engine of the module.

    Attributes:
        sample_bytes: what the last pass has kept of each sample for its backward pass.

    Raises:
        NoClientAxisError: for a module that cannot be run so.
    """

    name: ClassVar[str] = "shared-backbone"
    description: ClassVar[str] = "many clients in one pass over one frozen backbone"
    copies_rows: ClassVar[bool] = True

    def __init__(self, loop: LoopEngine) -> None:
        super().__init__(loop.layout, loop.objective, loop.precision)
        self._loop, self.sample_bytes = loop, 0
        self._backward_is_known = False
        self._thread_local = threading.local()  # a module in each thread
        if self.layout.inputs:
            raise NoClientAxisError(f"{self.layout.inputs[0]!r} is set for each client")
        # What rows hold besides trained tensors: the pass has it once, as the module has it.
        self._state = self.layout.own_values()[self.layout.trainable :]
        own = self._training_module(self._state.device)
        self.modules = (own.module, loop.modules[1])

    def _training_module(self, device: torch.device) -> "_TrainingModule":
        modules: dict[torch.device, _TrainingModule]
        modules = self._thread_local.__dict__.setdefault("modules", {})
        if device not in modules:
            modules[device] = _TrainingModule(self.layout, device)
        return modules[device]

    def runs_one_by_one(self, device: torch.device) -> bool:
        """See `Engine.runs_one_by_one`."""
        return True

    def limit_models(self, number: int, samples: int, device: torch.device) -> int:
        """See `Engine.limit_models`; by what a backward pass keeps of each sample."""
        budget = _MAX_KEPT_BYTES.get(device.type, _MAX_KEPT_BYTES["cuda"])
        return max(1, min(number, budget // max(1, samples * self.sample_bytes)))

    def train(self, rows: Tensor, work: TrainingWork, block: int) -> Tensor:
        """See `Engine.train`."""
        if rows.device.type == "cpu":
            # Otherwise the C library gives the activations of each step back to the system.
            pages.keep_small_blocks()
        return super().train(rows, work, block)

    def compute_gradients(
        self, rows: Tensor, x: Tensor, y: Tensor, inputs: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Engine.compute_gradients`."""
        after = rows[:, self.layout.trainable :]
        own = self._state.to(rows)
        # Averages of what is equal for all clients are so up to rounding. A client with other
        # numbers is alone with them.
        usual = ((after - own).abs() <= _ROUNDING * own.abs()).all(1)
        if not len(own) or bool(usual.all()):
            losses, gradients = self._run_pass(rows, x, y, inputs)
            return losses, gradients, after
        losses = rows.new_empty(len(rows))
        gradients = torch.empty_like(rows[:, : self.layout.trainable])
        after = after.clone()
        for chosen, shared in ((usual, True), (~usual, False)):
            some = chosen.nonzero().flatten()
            if not len(some):
                continue
            given = rows[some], x[some], y[some], index_each(inputs, some)
            if shared:
                losses[some], gradients[some] = self._run_pass(*given)
            else:
                losses[some], gradients[some], after[some] = self._loop.compute_gradients(*given)
        return losses, gradients, after

    def _run_pass(
        self, rows: Tensor, x: Tensor, y: Tensor, inputs: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return each client's loss and gradient."""
        clients, samples = x.shape[:2]
        own, device = self._training_module(rows.device), rows.device
        draws = self._make_draws(inputs, clients, samples, device)
        with ExitStack() as modes:
            for mode in (self._product_precision(device), own.axis.use(clients, samples, draws)):
                modes.enter_context(mode)
            trained = modes.enter_context(own.lend(rows))
            outputs = self._run_module(own, x.flatten(0, 1), draws)
            if len(outputs) != clients * samples:
                raise NoClientAxisError(
                    f"it returns {len(outputs)} outputs for {clients * samples} samples"
                )
            # Autocast leaves bfloat16; losses have the type of the model.
            parts = outputs.to(self.layout.dtype).unflatten(0, (clients, samples)).unbind()
            # Client by client, since a loss may join the samples of its batch.
            losses = [self._mean_loss(*one) for one in zip(parts, y, strict=True)]
            # The mode sees every operation: the first backward pass shows it for all.
            watched = draws is not None and draws.number > 0 and not self._backward_is_known
            with RefuseDraws() if watched else nullcontext(), own.use_functions(device):
                # Layers that are checkpointed run again in it, under the same mode. From an edge of
                # the graph, since a function of a tensor would be left to the mode itself.
                torch.autograd.backward(get_gradient_edge(torch.stack(losses).sum()))
            self._backward_is_known |= watched
        gradients = torch.zeros_like(rows[:, : self.layout.trainable])
        for slot in self.layout.trained_slots:
            grad = trained[slot.name].grad
            # What the loss does not depend on has none.
            if grad is not None:
                gradients[:, slot.start : slot.stop] = grad.flatten(1)
        return torch.stack(losses).detach(), gradients

    def _run_module(self, own: "_TrainingModule", x: Tensor, draws: KeyedDraws | None) -> Tensor:
        """Return what the module makes of the samples of all clients."""
        # Hooks take time: what the first pass keeps of a sample is what all keep.
        kept = None if self.sample_bytes else _KeptBytes(own.module)
        with ExitStack() as modes:
            modes.enter_context(kept or nullcontext())
            modes.enter_context(own.use_functions(x.device))
            # Autocast belongs around the forward pass alone: backward operations take its types.
            if self.precision == "bf16":
                modes.enter_context(product_precision(self.precision, x.device))
            if draws is not None:
                modes.enter_context(plain_attention(x.device))
                modes.enter_context(draws)
            outputs: Tensor = own.module(x)
        if kept is not None:
            self.sample_bytes = 1 + kept.total // len(x)
        return outputs

    def _make_draws(
        self, inputs: Mapping[str, Tensor], clients: int, samples: int, device: torch.device
    ) -> KeyedDraws | None:
        if not self.layout.draws[True]:
            return None
        # A trial of the engine has no keys; what it draws does not matter.
        keys = inputs.get(KEY, torch.zeros(clients, dtype=torch.int64))
        return KeyedDraws(keys.to(device), samples)

    def forward(self, rows: Tensor, x: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        """See `Engine.forward`."""
        return self._loop.forward(rows, x, inputs)


class _TrainingModule:
    """A copy of a training module whose trained layers have an axis of clients.

    Args:
        layout: of the module.
        device: where it is.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout, self.axis = layout, ClientAxis()
        self.module = copy_to_device(layout.train_module, device)
        self.layers = add_client_axis(self.module, layout, self.axis)

    def use_functions(self, device: torch.device) -> AbstractContextManager[Any]:
        """While active, functions run client by client where bits would depend on the others."""
        # A device has a tolerance instead, and few launches count more.
        return ClientFunctions(self.axis) if device.type == "cpu" else nullcontext()

    @contextmanager
    def lend(self, rows: Tensor) -> Iterator[dict[str, Tensor]]:
        """Give the module the trained tensors of some rows, and take them away again."""
        trained = {}
        for slot in self.layout.trained_slots:
            part = rows[:, slot.start : slot.stop].detach()
            own = part.reshape(len(rows), *slot.shape).clone(memory_format=torch.contiguous_format)
            trained[slot.name] = own.requires_grad_()
        for layer in self.layers:
            layer.bind(trained)
        try:
            yield trained
        finally:
            for layer in self.layers:
                layer.release()


class _KeptBytes(torch.autograd.graph.saved_tensors_hooks):
    """While active, counts what autograd keeps for a backward pass.

    Args:
        module: whose own tensors do not count.

    Attributes:
        total: bytes so far.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(self._count, lambda kept: kept)
        self.total = 0
        own = [*module.parameters(), *module.buffers()]
        self._seen = {one.untyped_storage().data_ptr() for one in own}

    def _count(self, tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        # Several operations may keep the same memory.
        if memory.data_ptr() not in self._seen:
            self._seen.add(memory.data_ptr())
            self.total += memory.nbytes()
        return tensor
