"""Two numbers to predict, with another rule in each of two groups of clients."""

import torch
from torch import nn

import coterie

stream = torch.Generator().manual_seed(0)
clients = torch.arange(10).repeat_interleave(80)
x = torch.randn(800, 6, generator=stream)
rules = torch.randn(2, 6, 2, generator=stream)
y = torch.einsum("sf,sfo->so", x, rules[clients % 2]) + 0.1 * torch.randn(800, 2, generator=stream)

# Coterie
federation = coterie.from_arrays(x, y, clients=clients, clusters=[0, 1] * 5)
network = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 2))
settings = coterie.Settings(rounds=10, loss="huber", metrics=["r2", "mae"])
run = coterie.simulate(federation, coterie.METHODS["panm-loss"](), model=network, settings=settings)
print(run)
