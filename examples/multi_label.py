"""Several yes or no answers for each sample."""

import torch
from torch import nn

import coterie

stream = torch.Generator().manual_seed(0)
clients = torch.arange(8).repeat_interleave(60)
x = torch.randn(480, 10, generator=stream)
rules = torch.randn(2, 10, 5, generator=stream)
y = (torch.einsum("sf,sfo->so", x, rules[clients % 2]) > 0.5).float()

# Coterie
federation = coterie.from_arrays(x, y, clients=clients, clusters=[0, 1] * 4)
network = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 5))
settings = coterie.Settings(rounds=10, loss="multi-label", metrics=["auroc", "average_precision", "f1"])
run = coterie.simulate(federation, coterie.METHODS["dac"](num_peers=3), model=network, settings=settings)
print(run)
