"""Adapters of different ranks in rows of one width.

A row has room for the largest rank. In a client of a lower one the rest of A and of B is 0, and
stays so: the gradient of a row of A is a multiple of the column of B of the same number, and that
of the column a multiple of the row. So every engine and optimizer trains exactly an adapter of the
client's rank, and what a client receives is cut to it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from coterie.errors import ConfigError, ModelError
from coterie.functional.adapters import AdapterPair, find_pairs
from coterie.functional.aggregation import view_tensors
from coterie.models.layout import Layout


@dataclass(frozen=True, eq=False)
class ClientRanks:
    """The ranks of the adapters of clients.

    Args:
        ranks: of each client of a federation.
        unused: which columns of a row an adapter of a rank does not use, by rank.
    """

    ranks: Int[Tensor, " clients"]
    unused: Mapping[int, Bool[Tensor, " params"]]

    @staticmethod
    def build(layout: Layout, ranks: Sequence[int]) -> "ClientRanks":
        """Find the columns that adapters do not use.

        Args:
            layout: of rows with room for the largest rank.
            ranks: of each client.

        Raises:
            ConfigError: when there are no such adapters, or they do not begin at 0.
        """
        pairs = find_pairs(layout.slots, "model.adapter.r with several ranks")
        for a, b in (pair.read(layout.own_values()[None]) for pair in pairs):
            if bool(a.any()) and bool(b.any()):
                raise ConfigError(
                    "model.adapter.r has several ranks, and the adapters do not begin at 0: a part "
                    "of them cannot be left out; leave out options.init_lora_weights, or give one "
                    "rank"
                )
        unused = {}
        for rank in sorted(set(ranks)):
            row = torch.zeros(layout.size, dtype=torch.bool)
            views = view_tensors(row, layout.slots)
            for pair in pairs:
                views[pair.a.name][rank:] = True
                views[pair.b.name][:, rank:] = True
            unused[rank] = row.to(layout.own_values().device)
        return ClientRanks(torch.tensor(ranks), unused)

    def cut(
        self, rows: Float[Tensor, "rows params"], clients: Int[Tensor, " rows"]
    ) -> Float[Tensor, "rows params"]:
        """Return a copy of models in which adapters have no more than the rank of their client.

        Args:
            rows: the models.
            clients: the place of each one's client in the federation.
        """
        out, ranks = rows.clone(), self.ranks[clients]
        for rank, unused in self.unused.items():
            which = (ranks == rank).nonzero().flatten().to(rows.device)
            out[which] = out[which].masked_fill(unused, 0)
        return out


def cut_tensors(
    tensors: Mapping[str, Tensor], pairs: Sequence[AdapterPair], rank: int
) -> dict[str, Tensor]:
    """Return the tensors of a model with room for a larger rank as those of an adapter of a rank.

    Args:
        tensors: by name.
        pairs: its adapters.
        rank: the rank.

    Raises:
        ModelError: when the adapter has a larger rank.
    """
    found = dict(tensors)
    for pair in pairs:
        a, b = tensors[pair.a.name], tensors[pair.b.name]
        if bool(a[rank:].any()) or bool(b[:, rank:].any()):
            raise ModelError(
                f"the adapter {pair.a.name} is of a larger rank than {rank}, the client's own; "
                "take load_row, which has all numbers"
            )
        found[pair.a.name], found[pair.b.name] = a[:rank].clone(), b[:, :rank].clone()
    return found
