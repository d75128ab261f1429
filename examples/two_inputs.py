"""A module that takes a picture and a few numbers."""

import torch
from torch import nn

import coterie


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.picture = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.scores = nn.Linear(16 + 3, 2)

    def forward(self, picture, numbers):
        return self.scores(torch.cat([self.picture(picture), numbers], 1))


stream = torch.Generator().manual_seed(0)
clients = torch.arange(6).repeat_interleave(60)
pictures = torch.randint(0, 256, (360, 1, 12, 12), generator=stream, dtype=torch.uint8)
numbers = torch.randn(360, 3, generator=stream)
y = (pictures.float().mean((1, 2, 3)) / 255 - 0.5 + 0.1 * numbers[:, 0] > 0).long()

# Coterie
federation = coterie.from_arrays({"picture": pictures, "numbers": numbers}, y, clients=clients)
settings = coterie.Settings(rounds=5)
run = coterie.simulate(federation, coterie.METHODS["pens"](), model=Both, settings=settings)
print(run)
