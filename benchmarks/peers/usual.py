"""Net A and its local training in PyTorch, for the frameworks whose users write them."""

import torch
from torch import nn


def network() -> nn.Module:
    """Return net A: LeNet-style, 62,006 parameters."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def epoch(module: nn.Module, x: torch.Tensor, y: torch.Tensor, batch_size: int, lr: float) -> None:
    """Train for one epoch on slices of tensors: a DataLoader would cost more than it gives here."""
    optimizer = torch.optim.SGD(module.parameters(), lr=lr)
    for inputs, classes in zip(x.split(batch_size), y.split(batch_size), strict=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(inputs), classes).backward()
        optimizer.step()
