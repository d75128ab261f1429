"""Shared parts: an exchange that transports only the shared columns of models.

Methods see whole rows on both sides of it. Outgoing models are cut to the shared columns, incoming
ones are widened again with zeros in the others. So private columns are in no message, whatever
exchange carries it.
"""

from dataclasses import replace
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from coterie.errors import ExchangeError
from coterie.exchange.base import Exchange, ExchangeWrapper, Inbox, Message, Rule
from coterie.models.part import ParameterSharing


class NarrowedExchange(ExchangeWrapper[Exchange]):
    """A wrapper of another exchange that lets only the shared columns of models pass.

    Args:
        inner: the exchange underneath.
        part: what is shared.
        own: the models of the clients that take part, for answers to a message without models.
    """

    def __init__(
        self, inner: Exchange, part: ParameterSharing, own: Float[Tensor, "clients params"]
    ) -> None:
        self.inner, self.part, self.own = inner, part, own

    def pull(self, message: Message, peers: Int[Tensor, "clients peers"]) -> Inbox:
        """Publish the shared columns, and read those of others: see `Exchange.pull`."""
        return self._widen_inbox(
            self.inner.pull(narrow_message(self.part, message), peers), message
        )

    def ask_server(self, message: Message, rule: Rule, shared: Any) -> tuple[Any, Inbox]:
        """Send the shared columns to the server.

        The server's rule sees zeros in private columns; only shared columns of its answer are sent.
        """

        def narrow_rule(state: Any, cohort: Message) -> tuple[Any, Any]:
            # The method's rule knows whole rows; columns that stay at home are 0 in them.
            state, reply = rule(state, replace(cohort, params=self._widen_rows(cohort.params)))
            return state, replace(reply, table=_narrow_rows(self.part, reply.table))

        new, inbox = self.inner.ask_server(narrow_message(self.part, message), narrow_rule, shared)
        return new, self._widen_inbox(inbox, message)

    def retire_clients(
        self, ids: Int[Tensor, " stopped"], params: Float[Tensor, "stopped params"]
    ) -> None:
        """Make stopped clients keep publishing the shared columns of these models."""
        self.inner.retire_clients(ids, _narrow_rows(self.part, params))

    def _widen_inbox(self, inbox: Inbox, message: Message) -> Inbox:
        if not inbox.table.shape[1]:
            return inbox
        # An exchange of extras has no own models: the method's current ones fill the columns at
        # home.
        own = message.params
        if not own.shape[1]:
            own = self.own
        return replace(inbox, table=self._widen_rows(inbox.table), part=self.part, own=own)

    def _widen_rows(self, rows: Tensor) -> Tensor:
        count = self.part.shared.num_columns
        if rows.shape[1] not in (0, count):
            raise ExchangeError(
                f"a model of {rows.shape[1]} numbers was received; expected {count}, those shared"
            )
        if not rows.shape[1]:
            return rows
        return self.part.shared.expand_to_rows(rows)


def narrow_exchange(
    exchange: Exchange, part: ParameterSharing, own: Float[Tensor, "clients params"]
) -> Exchange:
    """Return an exchange of the shared columns: the exchange itself if all columns are shared."""
    if part.shares_all:
        return exchange
    return NarrowedExchange(exchange, part, own)


def narrow_message(part: ParameterSharing, message: Message) -> Message:
    """Return a message with the shared columns alone."""
    if part.shares_all:
        return message
    return replace(message, params=_narrow_rows(part, message.params))


def _narrow_rows(part: ParameterSharing, rows: Tensor) -> Tensor:
    size = part.shared.size
    if rows.shape[1] not in (0, size):
        raise ExchangeError(
            f"a message has rows of {rows.shape[1]} numbers; "
            f"expected none, or whole models, {size}, of which {part.shared.num_columns} are shared"
        )
    if not rows.shape[1]:
        return rows
    return part.shared.select_from(rows)
