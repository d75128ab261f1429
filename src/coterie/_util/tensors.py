"""Indexing of tensors that may be absent, and of several alike."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def index_optional(values: Tensor | None, index: Any) -> Tensor | None:
    """Return part of a tensor; None where there is no tensor."""
    if values is None:
        return None
    return values[index]


def index_each(tensors: Mapping[str, Tensor], index: Any) -> dict[str, Tensor]:
    """Return the same part of each tensor."""
    return {name: tensor[index] for name, tensor in tensors.items()}
