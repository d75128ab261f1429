"""Eavesdropping: the exchange of a simulation in which an attacker sees every published model."""

from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from coterie.exchange.base import Inbox, Message, Rule
from coterie.exchange.in_memory import InMemory


class OverheardExchange(InMemory):
    """An `InMemory` that remembers the newest model that each client published.

    Args:
        ids: the ids of the rows of a full message.
        population: number of clients.

    Attributes:
        published_models: by client id, the shared part of the newest model in its messages.
    """

    def __init__(self, ids: Int[Tensor, " clients"], population: int) -> None:
        super().__init__(ids, population)
        self.published_models: dict[int, Float[Tensor, " shared"]] = {}

    def _record_models(self, ids: Int[Tensor, " clients"], params: Tensor) -> None:
        if not params.shape[1]:  # an exchange of extras alone
            return
        for client, row in zip(ids.tolist(), params, strict=True):
            # A view would keep the whole matrix in memory.
            self.published_models[client] = row.clone()

    def pull(self, message: Message, peers: Int[Tensor, "clients peers"]) -> Inbox:
        """Record the published models, and read."""
        self._record_models(self.active, message.params)
        return super().pull(message, peers)

    def ask_server(self, message: Message, rule: Rule, shared: Any) -> tuple[Any, Inbox]:
        """Record the models sent to the server, and send them."""
        self._record_models(self.active, message.params)
        return super().ask_server(message, rule, shared)

    def retire_clients(
        self, ids: Int[Tensor, " stopped"], params: Float[Tensor, "stopped params"]
    ) -> None:
        """Record the models that stopped clients keep publishing."""
        self._record_models(ids, params)
        super().retire_clients(ids, params)
