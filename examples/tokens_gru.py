"""The next letter of short texts, by a GRU with a loss for each position; those after a text's end do not count."""

import torch
from torch import nn

import coterie

LETTERS, LENGTH, END = 16, 12, -100


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(LETTERS, 16)
        self.recurrent = nn.GRU(16, 32, batch_first=True)
        self.scores = nn.Linear(32, LETTERS)

    def forward(self, tokens):
        return self.scores(self.recurrent(self.embedding(tokens))[0])


stream = torch.Generator().manual_seed(0)
clients = torch.arange(6).repeat_interleave(60)
first = torch.randint(0, LETTERS, (360, 1), generator=stream)
step = (1 + 2 * (clients % 2))[:, None]  # half of the clients count in ones, half in threes
texts = (first + step * torch.arange(LENGTH + 1)) % LETTERS
x, y = texts[:, :-1], texts[:, 1:].clone()
y[torch.arange(LENGTH) >= torch.randint(6, LENGTH + 1, (360, 1), generator=stream)] = END

# Coterie
federation = coterie.from_arrays(x, y, clients=clients, clusters=[0, 1] * 3)
settings = coterie.Settings(rounds=5, loss="tokens", metrics=["perplexity"], local=coterie.LocalTraining(lr=0.01))
run = coterie.simulate(federation, coterie.METHODS["dac"](num_peers=2), model=Reader, settings=settings)
print(run)
