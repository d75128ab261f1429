"""Indexing of tensors that may be absent, of several alike, and without copies."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Int, Shaped
from torch import Tensor


def index_optional(values: Tensor | None, index: Any) -> Tensor | None:
    """Return part of a tensor; None where there is no tensor."""
    if values is None:
        return None
    return values[index]


def index_each(tensors: Mapping[str, Tensor], index: Any) -> dict[str, Tensor]:
    """Return the same part of each tensor."""
    return {name: tensor[index] for name, tensor in tensors.items()}


def select_rows(
    table: Shaped[Tensor, "rows *entries"], rows: Int[Tensor, " some"]
) -> Shaped[Tensor, "some *entries"]:
    """Return some rows of a table: a view where they follow each other on a CPU, else a copy."""
    if rows.device.type == "cpu" and len(rows):  # a device would have to be waited for
        first = int(rows[0])
        if len(rows) == 1 or torch.equal(rows, torch.arange(first, first + len(rows))):
            return table.narrow(0, first, len(rows))
    return table[rows]
