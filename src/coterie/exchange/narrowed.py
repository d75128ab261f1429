"""Narrowed: an exchange of the shared columns of models alone.

Methods see whole rows on both sides of it. What leaves a client is cut to the columns that are
shared, and what comes is widened again with zeros in the others. So nothing that stays at home is
in any message, whatever carries it.
"""

from dataclasses import replace
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from coterie.errors import ExchangeError
from coterie.exchange.base import Around, Exchange, Inbox, Message, Rule
from coterie.models.part import Part


class Narrowed(Around[Exchange]):
    """A wrapper of another exchange that lets only the shared columns of models pass.

    Args:
        inner: the exchange underneath.
        part: what is shared.
        own: the models of the clients that take part, for what comes in answer to a message without
            models.
    """

    def __init__(self, inner: Exchange, part: Part, own: Float[Tensor, "clients params"]) -> None:
        self.inner, self.part, self.own = inner, part, own

    def pull(self, message: Message, peers: Int[Tensor, "clients peers"]) -> Inbox:
        """Publish what is shared, and read what is shared of others: see `Exchange.pull`."""
        return self._received(self.inner.pull(cut(self.part, message), peers), message)

    def serve(self, message: Message, rule: Rule, shared: Any) -> tuple[Any, Inbox]:
        """Send what is shared; the rule sees zeros at home columns, and only shared ones of its answer are sent."""

        def narrow(state: Any, cohort: Message) -> tuple[Any, Any]:
            state, reply = rule(state, replace(cohort, params=self._wide(cohort.params)))
            return state, replace(reply, table=_cut(self.part, reply.table))

        new, inbox = self.inner.serve(cut(self.part, message), narrow, shared)
        return new, self._received(inbox, message)

    def retire(self, ids: Int[Tensor, " stopped"], params: Float[Tensor, "stopped params"]) -> None:
        """Make stopped clients keep publishing what is shared of these models."""
        self.inner.retire(ids, _cut(self.part, params))

    def _received(self, inbox: Inbox, message: Message) -> Inbox:
        if not inbox.table.shape[1]:
            return inbox
        own = message.params if message.params.shape[1] else self.own
        return replace(inbox, table=self._wide(inbox.table), part=self.part, own=own)

    def _wide(self, rows: Tensor) -> Tensor:
        count = self.part.shared.count
        if rows.shape[1] not in (0, count):
            raise ExchangeError(
                f"a model of {rows.shape[1]} numbers was received; expected {count}, those shared"
            )
        return self.part.shared.widened(rows) if rows.shape[1] else rows


def narrowed(exchange: Exchange, part: Part, own: Float[Tensor, "clients params"]) -> Exchange:
    """Return an exchange of what is shared: the exchange itself, where that is everything."""
    return exchange if part.whole else Narrowed(exchange, part, own)


def cut(part: Part, message: Message) -> Message:
    """Return a message with the shared columns alone."""
    return message if part.whole else replace(message, params=_cut(part, message.params))


def _cut(part: Part, rows: Tensor) -> Tensor:
    size = part.shared.size
    if rows.shape[1] not in (0, size):
        raise ExchangeError(
            f"a message has rows of {rows.shape[1]} numbers; expected none, or whole models, {size}, of which "
            f"{part.shared.count} are shared"
        )
    return part.shared.of(rows) if rows.shape[1] else rows
