"""The usual loop of research code: one module, one DataLoader and one torch.optim.Adam per client.

Nothing of the engines is used here. It is what one finds in published code, with its costs kept
low: samples are normalized beforehand, scores are taken with large batches, and a module is made
once per client.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

Batches = Sequence[Sequence[int]]
_SCORE_BATCH = 128


class UsualClient:
    """One client with its module, data and optimizer.

    Args:
        module: its own network.
        x: its training inputs, normalized.
        y: its classes.
    """

    def __init__(self, module: nn.Module, x: Tensor, y: Tensor) -> None:
        self.module, self.data = module, TensorDataset(x, y)

    def train(self, batches: Batches, lr: float) -> list[float]:
        """Train on the given batches with a fresh Adam; return the loss of each step."""
        optimizer = torch.optim.Adam(self.module.parameters(), lr=lr)
        self.module.train()
        losses = []
        for x, y in DataLoader(self.data, batch_sampler=batches):  # type: ignore[arg-type]
            optimizer.zero_grad()
            loss = functional.cross_entropy(self.module(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    def score(self, models: Sequence[nn.Module]) -> list[float]:
        """Return the mean loss of each model on the client's training data."""
        scores = []
        with torch.no_grad():
            for model in models:
                model.eval()
                total = 0.0
                for x, y in DataLoader(self.data, batch_size=_SCORE_BATCH):
                    total += functional.cross_entropy(model(x), y, reduction="sum").item()
                scores.append(total / len(self.data))
        return scores

    def mix(self, models: Sequence[nn.Module], weights: Sequence[float], own: float) -> None:
        """Average the client's model with others, tensor by tensor."""
        others = [model.state_dict() for model in models]
        mine = self.module.state_dict()
        mixed = {}
        for name, tensor in mine.items():
            mixed[name] = own * tensor
            for weight, other in zip(weights, others, strict=True):
                mixed[name] = mixed[name] + weight * other[name]
        self.module.load_state_dict(mixed)
