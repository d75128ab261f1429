"""The loop engine: one client after another with plain autograd. Slow, simple, runs any module: the reference."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from coterie.engine._base import Engine
from coterie.engine._rewrites import placed
from coterie.engine._work import Training
from coterie.engine.precision import computing


class LoopEngine(Engine):
    """One client after another."""

    name: ClassVar[str] = "loop"

    def one_by_one(self, device: torch.device) -> bool:
        """See `Engine.one_by_one`."""
        return True

    def train(self, rows: Tensor, work: Training, block: int) -> Tensor:
        """See `Engine.train`; `block` does not matter. Foreign modules may draw from PyTorch's own generator."""
        losses = rows.new_full(work.length.shape, torch.nan)
        for row in range(len(rows)):
            part = slice(row, row + 1)
            with work.foreign(row):
                losses[part] = self._train_block(rows[part], work.part(part))
        return losses.cpu()

    def gradients(
        self, rows: Tensor, x: Tensor, y: Tensor, inputs: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Engine.gradients`."""
        layout = self.layout
        parts = []
        for i, row in enumerate(map(placed, rows)):
            tensors = {name: view.detach() for name, view in layout.views(row).items()}
            leaves = [tensors[s.name].requires_grad_() for s in layout.slots if s.stop <= layout.trainable]
            tensors |= {name: value[i] for name, value in inputs.items()}
            with computing(self.precision, rows.device):
                outputs = layout.call(tensors, placed(x[i]), training=True)
            loss = self.objective(outputs.to(rows.dtype), y[i]).mean()
            grads = torch.autograd.grad(loss, leaves, allow_unused=True)
            flat = [torch.zeros_like(p) if g is None else g for g, p in zip(grads, leaves, strict=True)]
            parts.append((loss.detach(), torch.cat([g.reshape(-1) for g in flat]), layout.state(tensors, row)))
        losses, gradients, states = zip(*parts, strict=True)
        return torch.stack(losses), torch.stack(gradients), torch.stack(states)

    def forward(self, rows: Tensor, x: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        """See `Engine.forward`."""
        outputs = []
        with torch.no_grad(), computing(self.precision, rows.device):
            for i, row in enumerate(map(placed, rows)):
                tensors = self.layout.views(row) | {name: value[i] for name, value in inputs.items()}
                outputs.append(self.layout.call(tensors, placed(x[i if len(x) > 1 else 0]), training=False))
        return torch.stack(outputs).to(rows.dtype)
