"""Lists of members, one for each client: a memory that grows with who was met, not with all pairs.

The lists of many clients are the rows of tensors, so all are as wide as the longest one. Clients
that are hosted, or take part, together have rows of one width, and other clients have others: rows
are padded before they are joined.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

L = TypeVar("L", bound="MemberLists")


class MemberLists:
    """Base of dataclasses of tensors, some of which have a column for each member in a list.

    A row has its members first, each once, and empty columns behind them.

    Class attributes:
        fills: the value in an empty column, by the name of each tensor with such columns.

    Args:
        members: ids; -1 in an empty column.
    """

    fills: ClassVar[Mapping[str, int]] = {}
    members: Int[Tensor, "clients slots"]

    @property
    def width(self) -> int:
        """The number of columns."""
        return self.members.shape[1]

    def pad_to(self: L, width: int) -> L:
        """Return the same lists with empty columns up to a width."""
        missing = width - self.width
        if missing <= 0:
            return self
        return self._replace_lists(
            lambda part, fill: torch.nn.functional.pad(part, (0, missing), value=fill)
        )

    def trim(self: L) -> L:
        """Return the same lists without the columns that are empty in all rows."""
        longest = 0
        if len(self.members):
            longest = int((self.members >= 0).sum(1).max())
        if longest == self.width:
            return self
        # Copies: a view would keep the wider tensor alive.
        return self._replace_lists(lambda part, fill: part[:, :longest].clone())

    def _replace_lists(self: L, function: Any) -> L:
        parts = {name: function(getattr(self, name), fill) for name, fill in self.fills.items()}
        # Subclasses are dataclasses, which a type checker cannot know of this one.
        return dataclasses.replace(self, **parts)  # type: ignore[type-var]


def align_lists(memories: Sequence[Any]) -> list[Any]:
    """Return memories with lists of the same width; those without lists as they are."""
    lists = [one for one in memories if isinstance(one, MemberLists)]
    if not lists:
        return list(memories)
    width = max(one.width for one in lists)
    return [one.pad_to(width) if isinstance(one, MemberLists) else one for one in memories]


def trim_lists(memory: Any) -> Any:
    """Return a memory without columns that are empty in all rows; one without lists as it is."""
    return memory.trim() if isinstance(memory, MemberLists) else memory


def find_columns(
    members: Int[Tensor, "clients slots"],
    peers: Int[Tensor, "clients peers"],
    mask: Bool[Tensor, "clients peers"],
) -> Int[Tensor, "clients peers"]:
    """Return the column of each peer in its client's list: the one it has, or the next empty one.

    Args:
        members: the lists; -1 behind the last of each.
        peers: ids, each once in a row.
        mask: which of them are meant.

    Returns:
        Columns, which may lie behind the last of the lists; -1 where the mask is False.

    Example:
        >>> lists, peers = torch.tensor([[7, -1], [4, 2]]), torch.tensor([[3, 7], [2, 9]])
        >>> find_columns(lists, peers, torch.ones(2, 2, dtype=torch.bool))
        tensor([[1, 0],
                [1, 2]])
    """
    used = (members >= 0).sum(1)
    columns = torch.full_like(peers, -1)
    # Few slots: a pass for each is cheaper than an array of clients x peers x slots.
    for slot in range(peers.shape[1]):
        meant = mask[:, slot]
        at, known = used, torch.zeros_like(meant)
        if members.shape[1]:  # `argmax` of no entries is an error
            same = members == peers[:, slot, None]
            known = same.any(1)
            at = torch.where(known, same.to(torch.int8).argmax(1), used)
        columns[:, slot] = at.masked_fill(~meant, -1)
        # Not in place: `at` may be the same tensor.
        used = used + (meant & ~known)
    return columns
