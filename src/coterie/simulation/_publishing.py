"""What clients publish before a round, for schedules in which others read it at another time."""

import dataclasses
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from coterie.engine.task import Task
from coterie.errors import ConfigError
from coterie.exchange.base import Message
from coterie.exchange.narrowed import narrow_message
from coterie.methods.base import PeerMethod, State, publish_all
from coterie.rng import Rng


class StandingExchange:
    """What exchanges of messages that stand until their client acts again have in common."""

    def begin_round(self, rng: Rng) -> None:
        """Do nothing: messages stand."""

    def agree_on_cohort(self, compute: Any) -> Int[Tensor, " active"]:
        """Choose who takes part."""
        return compute()

    def retire_clients(
        self, ids: Int[Tensor, " stopped"], params: Float[Tensor, "stopped params"]
    ) -> None:
        """Do nothing: stopped clients are on the board."""

    def skip_round(self, exchanges: int) -> None:
        """Do nothing."""


def check_messages(method: PeerMethod, task: Task, state: State, schedule: str) -> list[Message]:
    """Return what one client publishes, and check that it is known before a round.

    Args:
        method: of the run.
        task: of all hosted clients.
        state: before the first round.
        schedule: of the run.

    Raises:
        ConfigError: when the method cannot say in advance what it publishes.
    """
    # One client is enough, since `publish` has the same form for all.
    one = torch.zeros(1, dtype=torch.int64)
    try:
        return make_published_messages(method, task.select_clients(one), state.select_rows(one))
    except ConfigError as error:
        raise ConfigError(f"schedule = {schedule!r}: {error}; use 'synchronous'") from error


def make_published_messages(method: PeerMethod, task: Task, state: State) -> list[Message]:
    """Return what leaves clients in each exchange; models shared by exchanges are cut once."""
    models: dict[int, Tensor] = {}
    out = []
    for message in publish_all(method, task, state):
        key = id(message.params)
        if key not in models:
            models[key] = narrow_message(task.sharing, message).params
        out.append(dataclasses.replace(message, params=models[key]))
    return out
