"""Indexing of tensors that may be absent, of several alike, and without copies."""

from collections.abc import Mapping
from typing import Any

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
    """Return some rows of a table: a view where it is a single one on a CPU, else a copy."""
    if len(rows) == 1 and rows.device.type == "cpu":  # a device would have to be waited for
        return table.narrow(0, int(rows), 1)
    return table[rows]
