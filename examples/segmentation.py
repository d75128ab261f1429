"""Each pixel's class: squares and discs on noise, with Dice as the loss."""

import torch
from torch import nn

import coterie

stream = torch.Generator().manual_seed(0)
clients = torch.arange(6).repeat_interleave(40)
line = torch.arange(24)
middle = torch.randint(6, 18, (240, 2), generator=stream)
away = (line[None] - middle[:, :1])[:, :, None], (line[None] - middle[:, 1:])[:, None, :]
square = torch.maximum(away[0].abs(), away[1].abs()) <= 4
disc = away[0] ** 2 + away[1] ** 2 <= 25
round_ = torch.rand(240, generator=stream) < 0.5
y = torch.where(round_[:, None, None], 2 * disc.long(), square.long())
x = (80 * (y > 0) + torch.randint(0, 100, (240, 24, 24), generator=stream)).to(torch.uint8)[:, None]

# Coterie
federation = coterie.from_arrays(x, y, clients=clients)
network = nn.Sequential(nn.Conv2d(1, 8, 9, padding=4), nn.ReLU(), nn.Conv2d(8, 3, 5, padding=2))
settings = coterie.Settings(rounds=5, loss="segmentation", metrics=["iou"], local=coterie.LocalTraining(lr=0.01))
run = coterie.simulate(federation, coterie.METHODS["fedavg"](), model=network, settings=settings)
print(run)
