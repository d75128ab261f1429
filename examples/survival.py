"""Times until an event, some of them only known to be later (censored), by Cox regression."""

import torch
from torch import nn

import coterie

stream = torch.Generator().manual_seed(0)
clients = torch.arange(5).repeat_interleave(100)
x = torch.randn(500, 8, generator=stream)
risk = x[:, 0] - 0.5 * x[:, 1]
time = torch.empty(500).exponential_(generator=stream) * torch.exp(-risk)
limit = torch.empty(500).exponential_(generator=stream) * 2
y = torch.stack([torch.minimum(time, limit), (time <= limit).float()], 1)  # a time, and whether the event took place

# Coterie
federation = coterie.from_arrays(x, y, clients=clients)
settings = coterie.Settings(
    rounds=10, loss="cox", metrics=["concordance"], local=coterie.LocalTraining(batch_size=32, lr=0.1)
)
run = coterie.simulate(federation, coterie.METHODS["fedavg"](), model=nn.Linear(8, 1), settings=settings)
print(run)
