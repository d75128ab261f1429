"""A residual network with BatchNorm on color images, one class each; two groups of clients see other colors."""

import torch
from torch import nn

import coterie


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x):
        return torch.relu(x + self.inner(x))


def network():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), Block(8), nn.MaxPool2d(2), Block(8),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip


stream = torch.Generator().manual_seed(0)
clients = torch.arange(8).repeat_interleave(60)
y = torch.randint(0, 4, (480,), generator=stream)
x = torch.randint(0, 120, (480, 3, 16, 16), generator=stream, dtype=torch.uint8)
for k, (row, column) in enumerate([(0, 0), (0, 8), (8, 0), (8, 8)]):  # the class is where the image is bright
    x[y == k, :, row : row + 8, column : column + 8] += 100
x[clients % 2 == 1] = 255 - x[clients % 2 == 1]

# Coterie
federation = coterie.from_arrays(x, y, clients=clients, clusters=[0, 1] * 4)
settings = coterie.Settings(rounds=5, local=coterie.LocalTraining(lr=0.005))
run = coterie.simulate(federation, coterie.METHODS["dac"](num_peers=3), model=network, settings=settings)
print(run)
