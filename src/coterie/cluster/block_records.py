"""Merge what the blocks of a population report into the tables of one process.

A block records its calls of the tables in order. The process that drives the blocks repeats each
call with the rows of all blocks, so that even the order of the names in the files is that of one
process.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from jaxtyping import Int
from torch import Tensor

from coterie.errors import CoterieError
from coterie.methods.base import SLOT_FILLS, concatenate_rows
from coterie.runtime.record import Record

# What the table of reads takes of a report.
_OF_READS = [name for name in SLOT_FILLS if name != "losses"]


@dataclass(frozen=True)
class RecordCall:
    """One call of a record.

    Args:
        kind: "metrics", "drop", "edges" or "undefined".
        round: its number.
        split: of metrics.
        model: of metrics.
        ids: the clients.
        values: by name, a row a client.
    """

    kind: str
    round: int
    split: str = ""
    model: str = ""
    ids: Int[Tensor, " clients"] = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    values: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def call_key(self) -> tuple[object, ...]:
        """The parts of a call that are the same in all blocks."""
        # Each block names only the metrics that some of its own clients lack, so these names may
        # differ.
        names = () if self.kind == "undefined" else tuple(sorted(self.values))
        return self.kind, self.round, self.split, self.model, names


class BlockRecord(Record):
    """A record that stores its calls instead of executing them."""

    def __init__(self, population: int) -> None:
        super().__init__(torch.full((population,), -1))
        self._entries: list[RecordCall] = []

    def add_metrics(
        self,
        round: int,
        ids: Int[Tensor, " clients"],
        split: str,
        model: str,
        values: Mapping[str, Tensor],
    ) -> None:
        """Store a call that adds metrics."""
        if values:
            # On the CPU and without a graph: the calls travel to the driver.
            values = {name: value.detach().cpu() for name, value in values.items()}
            self._entries.append(RecordCall("metrics", round, split, model, ids, values))

    def drop_metrics(self, round: int, split: str, model: str) -> None:
        """Store a call that drops metrics."""
        self._entries.append(RecordCall("drop", round, split, model))

    def add_edges(
        self, round: int, ids: Int[Tensor, " clients"], info: Mapping[str, Tensor]
    ) -> None:
        """Store a call that adds edges."""
        values = {name: info[name].cpu() for name in _OF_READS if name in info}
        if "peers" in values:
            self._entries.append(RecordCall("edges", round, ids=ids, values=values))

    def add_undefined(self, ids: Int[Tensor, " clients"], values: Mapping[str, Tensor]) -> None:
        """Store which clients have no value of a metric."""
        missing = {name: value.cpu().isnan() for name, value in values.items()}
        missing = {name: lost for name, lost in missing.items() if bool(lost.any())}
        if missing:
            self._entries.append(RecordCall("undefined", 0, ids=ids, values=missing))

    def take_calls(self) -> list[RecordCall]:
        """Return the calls since the last time, and forget them."""
        entries, self._entries = self._entries, []
        return entries


def merge_calls(blocks: Sequence[Sequence[RecordCall]]) -> list[RecordCall]:
    """Return the calls of one process, from those of its blocks in one round.

    Args:
        blocks: the calls of each block; some may have made fewer, in the same order.

    Raises:
        CoterieError: when their orders do not agree.
    """
    left, out = list(map(list, blocks)), []
    while any(left):
        heads = [entries[0].call_key for entries in left if entries]
        # A call may head one block and stand further back in another one that made an additional
        # call first. Only a head that is further back in no block is merged, so each call is
        # merged once.
        behind = set()
        for entries in left:
            behind |= {entry.call_key for entry in entries[1:]}
        key = next((one for one in heads if one not in behind), None)
        if key is None:
            raise CoterieError(
                f"the blocks of a population report {heads} in different orders; expected the "
                "same one"
            )
        same = [entries.pop(0) for entries in left if entries and entries[0].call_key == key]
        out.append(_merge_call(same))
    return out


def _merge_call(entries: Sequence[RecordCall]) -> RecordCall:
    first = entries[0]
    values = {}
    for name in dict.fromkeys(chain.from_iterable(entry.values for entry in entries)):
        parts = [entry.values.get(name) for entry in entries]
        values[name] = _concatenate_rows(name, parts, entries)
    return RecordCall(
        first.kind,
        first.round,
        first.split,
        first.model,
        torch.cat([e.ids for e in entries]),
        values,
    )


def _concatenate_rows(
    name: str, parts: Sequence[Tensor | None], entries: Sequence[RecordCall]
) -> Tensor:
    """Return the rows of all blocks; those with fewer slots get unused ones."""
    known = next(part for part in parts if part is not None)
    # Blocks lack a name only in "undefined" calls: none of their clients is without a value there.
    found = []
    for part, entry in zip(parts, entries, strict=True):
        if part is None:
            part = known.new_zeros((len(entry.ids), *known.shape[1:]))
        found.append(part)
    return concatenate_rows(name, found) if entries[0].kind == "edges" else torch.cat(found)
