"""The same task by a transformer with causal attention."""

import torch
from torch import nn

import coterie

LETTERS, LENGTH = 16, 12


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(LETTERS, 32)
        self.places = nn.Embedding(LENGTH, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.scores = nn.Linear(32, LETTERS)

    def forward(self, tokens):
        seen = self.embedding(tokens) + self.places.weight
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=seen.dtype)
        return self.scores(self.layer(seen, src_mask=mask, is_causal=True))


stream = torch.Generator().manual_seed(0)
clients = torch.arange(6).repeat_interleave(60)
first = torch.randint(0, LETTERS, (360, 1), generator=stream)
texts = (first + (1 + 2 * (clients % 2))[:, None] * torch.arange(LENGTH + 1)) % LETTERS

# Coterie
federation = coterie.from_arrays(texts[:, :-1], texts[:, 1:], clients=clients, clusters=[0, 1] * 3)
settings = coterie.Settings(rounds=5, loss="tokens", local=coterie.LocalTraining(optimizer="adamw", lr=0.003))
run = coterie.simulate(federation, coterie.METHODS["dac"](num_peers=2), model=Transformer, settings=settings)
print(run)
