"""The loop engine: one client after another, with PyTorch's own modules and kernels. It runs any module."""

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from coterie._util import pages
from coterie.engine._base import Engine, Objective, cross_entropy
from coterie.engine._flat import FlatModel, FlatOptimizer
from coterie.engine._rewrites import placed
from coterie.engine._work import Training
from coterie.engine.optim import LocalTraining
from coterie.engine.precision import computing
from coterie.engine.privacy import shares
from coterie.models.layout import Layout

_VECTOR = 16  # numbers in the widest registers


def writes_beyond(module: nn.Module) -> bool:
    """Return whether a convolution of a module writes beyond its memory on some processors, with channels last.

    oneDNN does, in the gradient of the weights of a 1x1 convolution with a stride and fewer input
    channels than a vector holds (https://github.com/uxlfoundation/oneDNN/issues/6035): results are
    wrong, or the process dies.
    """
    convolutions = [part for part in module.modules() if isinstance(part, nn.Conv2d)]
    return any(
        max(part.kernel_size) == 1
        and max(part.stride) > 1
        and part.in_channels // part.groups < _VECTOR
        for part in convolutions
    )


class LoopEngine(Engine):
    """One client after another, each copied into one flat model and trained there.

    Args:
        layout: of the module.
        objective: the loss of each sample.
        precision: see `engine.precision.computing`.
        channels_last: see `FlatModel`; faster on a CPU, but not for modules that view what a
            convolution returns. Left out where it is not safe; see `writes_beyond`.
    """

    name: ClassVar[str] = "loop"
    does: ClassVar[str] = "one client after another"

    def __init__(
        self,
        layout: Layout,
        objective: Objective,
        precision: str = "full",
        channels_last: bool = False,
    ) -> None:
        super().__init__(layout, objective, precision)
        self.channels_last = channels_last and not writes_beyond(layout.train_module)
        self._plain = objective == cross_entropy
        self._room = threading.local()  # a model and its optimizers in each thread
        model = self._model(next(layout.train_module.parameters()).device)
        self.modules = (model.train_module, model.eval_module)

    def one_by_one(self, device: torch.device) -> bool:
        """See `Engine.one_by_one`."""
        return True

    def _model(self, device: torch.device) -> FlatModel:
        models: dict[torch.device, FlatModel] = self._room.__dict__.setdefault("models", {})
        if device not in models:
            models[device] = FlatModel(self.layout, device, self.channels_last)
        return models[device]

    def _optimizer(self, model: FlatModel, local: LocalTraining) -> FlatOptimizer:
        optimizers: dict[FlatModel, FlatOptimizer] = self._room.__dict__.setdefault(
            "optimizers", {}
        )
        if model not in optimizers or optimizers[model].local != local:
            optimizers[model] = FlatOptimizer(model, local)
        return optimizers[model]

    def train(self, rows: Tensor, work: Training, block: int) -> Tensor:
        """See `Engine.train`; `block` does not matter. Foreign modules may draw from PyTorch's own generator."""
        if rows.device.type == "cpu":
            pages.settle()
        losses = rows.new_full(work.length.shape, torch.nan)
        for row in range(len(rows)):
            if work.private is not None:
                one = slice(row, row + 1)
                with work.foreign(row):
                    losses[one] = self._train_block(rows[one], work.part(one))
                continue
            with work.foreign(row), self._products(rows.device):
                found = self._train_one(rows[row], work, row)
            if found:
                losses[row, : len(found)] = torch.stack(found)
        return losses.cpu()

    def _train_one(self, row: Tensor, work: Training, number: int) -> list[Tensor]:
        """Train a client in place; return the loss of each of its steps."""
        model = self._model(row.device)
        optimizer = self._optimizer(model, work.local)
        away, anchor = None, None
        if work.anchor is not None and work.prox:
            away, anchor = torch.empty_like(model.trained), torch.empty_like(model.trained)
            model.take(anchor, work.anchor[number, : self.layout.trainable])
        moments = None if work.moments is None else work.moments[number]
        taken = None if work.taken is None else work.taken[number]
        rates = None if work.rates is None else work.rates[number].tolist()
        losses: list[Tensor] = []
        model.load(row)
        with optimizer.state(moments, taken):
            for x, y, inputs in work.batches(number):
                rate = None if rates is None else rates[len(losses)]
                losses.append(self._backward(model, x, y, inputs))
                if away is not None and anchor is not None:
                    model.gradient.add_(torch.sub(model.trained, anchor, out=away), alpha=work.prox)
                optimizer.step(rate)
        model.store(row)
        return losses

    def _clipped(
        self, rows: Tensor, work: Training, members: Tensor, step: int, clip: float
    ) -> tuple[Tensor, Tensor]:
        """See `Engine._clipped`: each model is loaded once for its batch, unless samples could change its state."""
        alone, owner, _ = work.alone(members, step)
        model, places = self._model(rows.device), owner.tolist()
        total, sums = rows.new_zeros(len(rows)), torch.zeros_like(rows[:, : self.layout.trainable])
        own, loaded = torch.zeros_like(model.gradient), -1
        for sample, row in enumerate(places):
            if row != loaded or self.layout.size > self.layout.trainable:
                model.load(rows[row])
            if row != loaded:
                own.zero_()
            loaded = row
            x, y, inputs = next(alone.batches(sample))
            with self._products(rows.device):
                total[row] += self._backward(model, x, y, inputs)
            own.add_(model.gradient.mul_(shares(model.gradient[None], clip)[0]))
            if sample + 1 == len(places) or places[sample + 1] != row:
                model.give(own, sums[row])
        return total / work.length[members, step].to(total), sums

    def _backward(
        self, model: FlatModel, x: Tensor, y: Tensor, inputs: Mapping[str, Tensor]
    ) -> Tensor:
        """Set a model's gradient and update its running statistics; return the loss."""
        model.set_inputs(inputs)
        model.gradient.zero_()
        with self._lower(x.device):
            outputs = model.train_module(x)
        outputs = outputs.to(self.layout.dtype)
        loss = (
            functional.cross_entropy(outputs, y)
            if self._plain
            else self.objective(outputs, y).mean()
        )
        loss.backward()
        model.settle()
        return loss.detach()

    def _products(self, device: torch.device) -> AbstractContextManager[None]:
        """Set PyTorch's products for forward and backward passes."""
        return computing("full" if self.precision == "bf16" else self.precision, device)

    def _lower(self, device: torch.device) -> AbstractContextManager[None]:
        """Set what only a forward pass takes."""
        return computing(self.precision, device) if self.precision == "bf16" else nullcontext()

    def gradients(
        self, rows: Tensor, x: Tensor, y: Tensor, inputs: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Engine.gradients`."""
        model, trainable = self._model(rows.device), self.layout.trainable
        losses, gradients, after = (
            rows.new_empty(len(rows)),
            torch.empty_like(rows[:, :trainable]),
            rows.clone(),
        )
        for i, row in enumerate(rows):
            model.load(row)
            with self._products(rows.device):
                own = {name: value[i] for name, value in inputs.items()}
                losses[i] = self._backward(model, placed(x[i]), y[i], own)
            model.give(model.gradient, gradients[i])
            model.store(after[i])
        return losses, gradients, after[:, trainable:]

    def forward(self, rows: Tensor, x: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        """See `Engine.forward`."""
        model, outputs = self._model(rows.device), []
        with torch.no_grad(), computing(self.precision, rows.device):
            for i, row in enumerate(rows):
                model.load(row)
                model.set_inputs({name: value[i] for name, value in inputs.items()})
                outputs.append(model.eval_module(placed(x[i if len(x) > 1 else 0])))
        return torch.stack(outputs).to(rows.dtype)
