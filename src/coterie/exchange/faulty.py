"""Faulty: an exchange that loses and delays messages, for experiments and tests."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor

from coterie.errors import ExchangeError
from coterie.exchange.base import (
    ExchangeWrapper,
    Inbox,
    Message,
    make_inbox,
    messages_from_tensors,
    messages_to_tensors,
)
from coterie.exchange.in_memory import InMemory
from coterie.rng import Rng

_ROWS_AT_ONCE = 32  # readers of which draws are there at a time


class Faulty(ExchangeWrapper[InMemory]):
    """A wrapper of another exchange that drops, delays and duplicates messages.

    Args:
        inner: the exchange underneath.
        drop: probability that a message does not arrive, in [0, 1].
        delay: probability that an older message (of the previous round) arrives instead, in [0, 1].
        duplicate: probability that a message arrives twice: it costs its bytes again and changes
            nothing else.
    """

    def __init__(
        self, inner: InMemory, *, drop: float = 0.0, delay: float = 0.0, duplicate: float = 0.0
    ) -> None:
        for name, value in (("drop", drop), ("delay", delay), ("duplicate", duplicate)):
            if not 0 <= value <= 1:
                raise ExchangeError(f"{name} is {value}; expected a probability between 0 and 1")
        self.inner, self.drop, self.delay, self.duplicate = inner, drop, delay, duplicate
        self._rng, self._number = Rng(0), 0
        self._old: dict[int, Message] = {}

    def begin_round(self, rng: Rng) -> None:
        """Start a round."""
        self._rng, self._number = rng, 0
        self.inner.begin_round(rng)

    def pull(self, message: Message, peers: Int[Tensor, "clients peers"]) -> Inbox:
        """Pull with faults, drawn for each (round, exchange, reader, peer)."""
        number, self._number = self._number, self._number + 1
        own = self.inner.active
        inbox = self.inner.pull(message, peers)
        column = peers.clamp(min=0)

        def draw_faults(kind: str, chance: float) -> Tensor:
            # Streams are keyed: a draw that is left out changes no other.
            if chance == 0:
                return torch.zeros_like(inbox.mask)
            found = []
            # A few rows at a time: a draw for each pair of a large population fits no memory.
            for rows in torch.arange(len(own)).split(_ROWS_AT_ONCE):
                draws = self._rng.uniform(
                    f"faults.{kind}.{number}", own[rows], self.inner.population
                )
                found.append(draws.gather(1, column[rows]) < chance)
            return torch.cat(found) & inbox.mask

        late = draw_faults("delay", self.delay)
        # A message is at most one round late: the newest one replaces it.
        before, self._old[number] = self._old.get(number), replace(message, ids=own)
        if bool(late.any()):
            inbox = _replace_late(inbox, late, before, own, self.inner.population)
        # A late message may be lost as well.
        mask = inbox.mask & ~draw_faults("drop", self.drop)
        twice = draw_faults("duplicate", self.duplicate) & mask
        return replace(
            inbox, mask=mask, bytes=inbox.bytes * (mask.to(torch.int64) + twice.to(torch.int64))
        )

    def snapshot(self) -> dict[str, Tensor]:
        """Return the state that a later round depends on."""
        return self.inner.snapshot() | (messages_to_tensors("old", self._old) if self.delay else {})

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the result of `snapshot`."""
        self.inner.restore(tensors)
        self._old |= messages_from_tensors("old", tensors)


def _replace_late(
    inbox: Inbox, late: Tensor, before: Message | None, own: Tensor, population: int
) -> Inbox:
    """Put the previous round's messages into the late slots; without one, nothing arrives."""
    # A message of another form, such as that of an enrollment, is no earlier one of this exchange.
    if (
        before is None
        or before.fields.keys() != inbox.fields.keys()
        or before.params.shape[1:] != inbox.table.shape[1:]
    ):
        return replace(inbox, mask=inbox.mask & ~late, bytes=inbox.bytes * ~late)
    old = make_inbox(before, own, torch.where(late, inbox.peers, -1), population)
    # the old messages' rows come behind those of the table
    offset, fields = len(inbox.table), {}
    for name, value in inbox.fields.items():
        fields[name] = torch.cat([value, old.fields[name].to(value.device)])
    return replace(
        inbox,
        table=torch.cat([inbox.table, old.table.to(inbox.table.device)]),
        fields=fields,
        index=torch.where(late & old.mask, old.index + offset, inbox.index),
        mask=torch.where(late, old.mask, inbox.mask),
        age=torch.where(late & old.mask, 1, inbox.age),
        bytes=torch.where(late, old.bytes, inbox.bytes),
    )
