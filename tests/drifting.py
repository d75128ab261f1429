"""Small data that change over the rounds, and what clients have in a phase."""

import torch
from torch import Tensor

from coterie.data.build import DataConfig, build_federation
from coterie.data.federation import Federation, Phase


def build(*changes, seed=0, **settings) -> Federation:
    """Eight clients of 20 training and 8 validation digits, with changes."""
    config = DataConfig(
        "digits", num_clients=8, train=20, validation=8, drift=list(changes) or None, **settings
    )
    return build_federation(config, seed)


def active(data: Federation, phase: Phase | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the samples that are in use in a phase, or before all, client by client."""
    split = data.split if phase is None else phase.split
    rows = [one >= 0 for one in split]
    return (
        torch.stack([data.x[number][row] for number, row in enumerate(rows)]),
        torch.stack([data.y[number][row] for number, row in enumerate(rows)]),
        torch.stack([split[number][row] for number, row in enumerate(rows)]),
    )
