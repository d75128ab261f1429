"""The loop engine: one client after another, with PyTorch's kernels, for any module."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from coterie._util import pages
from coterie._util.tensors import index_each, index_optional
from coterie.engine._base import Engine, Objective
from coterie.engine._flat import FlatModel, FlatOptimizer
from coterie.engine._rewrites import align_memory, plain_attention
from coterie.engine._work import TrainingWork
from coterie.engine.optim import LocalTraining
from coterie.engine.precision import product_precision
from coterie.engine.privacy import clip_factors
from coterie.models.draws import KEY, KeyedDraws, RefuseDraws
from coterie.models.layout import Layout

# As oneDNN's kernels for AVX-512 take channels; see `has_unsafe_convolution`.
_VECTOR = 16  # numbers in the widest registers


def has_unsafe_convolution(module: nn.Module) -> bool:
    """Return whether a convolution may write beyond its memory with channels last.

    oneDNN does, in the gradient of the weights of a 1x1 convolution with a stride and fewer input
    channels than a vector holds (https://github.com/uxlfoundation/oneDNN/issues/6035): results are
    wrong, or the process dies.
    """
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            few_channels = part.in_channels // part.groups < _VECTOR
            if max(part.kernel_size) == 1 and max(part.stride) > 1 and few_channels:
                return True
    return False


class TrialStep(NamedTuple):
    """A client of a trial of an engine: its model, before and after, its loss and its gradient."""

    row: Float[Tensor, " params"]
    after: Float[Tensor, " params"]
    loss: Float[Tensor, ""]
    gradient: Float[Tensor, " trainable"]


class LoopEngine(Engine):
    """One client after another, each copied into one flat model and trained there.

    Args:
        layout: of the module.
        objective: the loss of each sample.
        precision: see `engine.precision.product_precision`.
        channels_last: see `FlatModel`; faster on a CPU, but not for modules that view what a
            convolution returns. Left out where it is not safe; see `has_unsafe_convolution`.

    Attributes:
        tried: what `make_engine` has seen of it; None before.
    """

    name: ClassVar[str] = "loop"
    description: ClassVar[str] = "one client after another"
    copies_rows: ClassVar[bool] = True

    def __init__(
        self,
        layout: Layout,
        objective: Objective,
        precision: str = "full",
        channels_last: bool = False,
    ) -> None:
        super().__init__(layout, objective, precision)
        self.channels_last = channels_last and not has_unsafe_convolution(layout.train_module)
        self.tried: TrialStep | None = None
        # whether the last forward pass in each mode has drawn
        self.drew = {True: False, False: False}
        self._backward_is_known = False
        self._thread_local = threading.local()  # a model and its optimizers in each thread
        # A trial of the engine hooks these modules, to name the layer that fails.
        model = self._flat_model(next(layout.train_module.parameters()).device)
        self.modules = (model.train_module, model.eval_module)

    def runs_one_by_one(self, device: torch.device) -> bool:
        """See `Engine.runs_one_by_one`."""
        return True

    def _flat_model(self, device: torch.device) -> FlatModel:
        models: dict[torch.device, FlatModel] = self._thread_local.__dict__.setdefault("models", {})
        if device not in models:
            models[device] = FlatModel(self.layout, device, self.channels_last)
        return models[device]

    def _flat_optimizer(self, model: FlatModel, local: LocalTraining) -> FlatOptimizer:
        optimizers: dict[FlatModel, FlatOptimizer] = self._thread_local.__dict__.setdefault(
            "optimizers", {}
        )
        if model not in optimizers or optimizers[model].local != local:
            optimizers[model] = FlatOptimizer(model, local)
        return optimizers[model]

    def train(self, rows: Tensor, work: TrainingWork, block: int) -> Tensor:
        """See `Engine.train`; `block` has no effect. Modules may draw from PyTorch's generator."""
        if rows.device.type == "cpu":
            # Otherwise the C library gives the activations of each step back to the system.
            pages.keep_small_blocks()
        losses = rows.new_full(work.batch_sizes.shape, torch.nan)
        for row in range(len(rows)):
            # The base class takes private steps: one client at a time, so that PyTorch draws
            # from the stream of that client.
            if work.private is not None:
                one = slice(row, row + 1)
                with work.seed_torch(row):
                    losses[one] = self._train_block(rows[one], work.select_clients(one))
                continue
            with work.seed_torch(row), self._product_precision(rows.device):
                found = self._train_one(rows[row], work, row)
            if found:
                losses[row, : len(found)] = torch.stack(found)
        return losses.cpu()

    def _train_one(self, row: Tensor, work: TrainingWork, number: int) -> list[Tensor]:
        """Train a client in place; return the loss of each of its steps."""
        model = self._flat_model(row.device)
        optimizer = self._flat_optimizer(model, work.local)
        # `away` is room for the difference from the anchor in each step.
        away, anchor = None, None
        if work.anchor is not None and work.prox:
            away, anchor = torch.empty_like(model.trained), torch.empty_like(model.trained)
            # In the order of the model's vector, so that one subtraction serves all tensors.
            model.copy_from_row(anchor, work.anchor[number, : self.layout.trainable])
        moments = index_optional(work.moments, number)
        taken = index_optional(work.steps_taken, number)
        rates: list[float | None] = [None] * work.num_steps
        if work.rates is not None:
            rates = work.rates[number].tolist()
        losses: list[Tensor] = []
        model.load_row(row)
        with optimizer.use_state(moments, taken):
            # A client may take fewer steps than the table of rates has columns.
            for rate, (x, y, inputs) in zip(rates, work.iterate_batches(number), strict=False):
                losses.append(self._run_backward(model, x, y, inputs))
                if away is not None and anchor is not None:
                    model.gradient.add_(torch.sub(model.trained, anchor, out=away), alpha=work.prox)
                optimizer.step(rate)
        model.store_row(row)
        return losses

    def _sum_clipped_gradients(
        self, rows: Tensor, work: TrainingWork, members: Tensor, step: int, clip: float
    ) -> tuple[Tensor, Tensor]:
        """See `Engine._sum_clipped_gradients`; each model is loaded once, if it keeps no state."""
        alone, owner = work.split_into_samples(members, step)
        model, places = self._flat_model(rows.device), owner.tolist()
        total, sums = rows.new_zeros(len(rows)), torch.zeros_like(rows[:, : self.layout.trainable])
        # own: the sum of the clipped gradients of one client, whose samples follow each other.
        own, loaded = torch.zeros_like(model.gradient), -1
        for sample, row in enumerate(places):
            if row != loaded or self.layout.size > self.layout.trainable:
                model.load_row(rows[row])
            if row != loaded:
                own.zero_()
            loaded = row
            x, y, inputs = next(alone.iterate_batches(sample))
            with self._product_precision(rows.device):
                total[row] += self._run_backward(model, x, y, inputs)
            # Clipped one by one, before they are added: no sample may move the sum by more.
            own.add_(model.gradient.mul_(clip_factors(model.gradient[None], clip)[0]))
            if sample + 1 == len(places) or places[sample + 1] != row:
                model.copy_to_row(own, sums[row])
        return total / work.batch_sizes[members, step].to(total), sums

    def _run_backward(
        self, model: FlatModel, x: Tensor, y: Tensor, inputs: Mapping[str, Tensor]
    ) -> Tensor:
        """Set a model's gradient and update its running statistics; return the loss."""
        model.set_inputs(inputs)
        model.gradient.zero_()
        with self._forward_precision(x.device), self._keyed_draws(inputs, x.device, True):
            outputs = model.train_module(x)
        # Autocast leaves bfloat16; losses have the type of the model.
        loss = self._mean_loss(outputs.to(self.layout.dtype), y)
        # The mode sees every operation, which costs time: the first backward pass shows it for all.
        watched = self.drew[True] and not self._backward_is_known
        with RefuseDraws() if watched else nullcontext():
            loss.backward()
        self._backward_is_known |= watched
        model.sync_running_stats()
        return loss.detach()

    def changed_buffers(self, device: torch.device) -> list[str]:
        """Return the names of buffers in no row that the last forward passes have changed."""
        return self._flat_model(device).changed_buffers()

    @contextmanager
    def _keyed_draws(
        self, inputs: Mapping[str, Tensor], device: torch.device, training: bool
    ) -> Iterator[None]:
        """Make what a forward pass draws of its key."""
        # The mode sees every operation, which costs time.
        if not self.layout.draws[training]:
            yield
            return
        # A trial of the engine has no keys; what it draws does not matter.
        key = inputs.get(KEY, torch.zeros((), dtype=torch.int64)).to(device)
        with plain_attention(device), KeyedDraws(key) as draws:
            yield
        self.drew[training] = draws.number > 0

    def _forward_precision(self, device: torch.device) -> AbstractContextManager[None]:
        """Set what only a forward pass takes."""
        if self.precision != "bf16":
            return nullcontext()
        return product_precision(self.precision, device)

    def compute_gradients(
        self, rows: Tensor, x: Tensor, y: Tensor, inputs: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Engine.compute_gradients`."""
        model, trainable = self._flat_model(rows.device), self.layout.trainable
        losses, after = rows.new_empty(len(rows)), rows.clone()
        gradients = torch.empty_like(rows[:, :trainable])
        for i, row in enumerate(rows):
            model.load_row(row)
            with self._product_precision(rows.device):
                own = index_each(inputs, i)
                losses[i] = self._run_backward(model, align_memory(x[i]), y[i], own)
            model.copy_to_row(model.gradient, gradients[i])
            model.store_row(after[i])
        return losses, gradients, after[:, trainable:]

    def forward(self, rows: Tensor, x: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        """See `Engine.forward`."""
        model, outputs = self._flat_model(rows.device), []
        x = x.expand(len(rows), *x.shape[1:])
        with torch.no_grad(), product_precision(self.precision, rows.device):
            for i, row in enumerate(rows):
                model.load_row(row)
                own = index_each(inputs, i)
                model.set_inputs(own)
                with self._keyed_draws(own, rows.device, False):
                    outputs.append(model.eval_module(align_memory(x[i])))
        return torch.stack(outputs).to(rows.dtype)
