"""Pooled: one model trained on the rows of everybody, in one place."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

import torch
from jaxtyping import Int
from torch import Tensor

from coterie.engine.task import Task
from coterie.methods.base import Info, Method, Round, State
from coterie.rng import Rng


@final
@dataclass(frozen=True)
class Pooled(Method):
    """One model, trained on all clients' training rows together: learning without federation.

    No method between hospitals can do this; it is the reference that says what keeping the data
    apart costs. Every client gives all its rows, whatever the participation, each filled and scaled
    as the client does it. A round is one local training of the settings, on the pool: an epoch
    passes over everybody's rows. Nothing that is sent is counted, since what is sent are the data,
    once.
    """

    kind: ClassVar[str] = "pooled"
    summary: ClassVar[str] = (
        "train one model on the data of all clients in one place, as a reference"
    )
    needs: ClassVar[frozenset[str]] = frozenset({"pool"})
    exchanges: ClassVar[int] = 0

    def init_state(self, task: Task, rng: Rng) -> State:
        """Return the first model, at every client."""
        return State(task.initial_models(rng)[:1].expand(len(task), -1).clone())

    def select_cohort(
        self, shared: Any, rng: Rng, population: int, participation: float | int
    ) -> Int[Tensor, " active"]:
        """Take everybody: the rows are in one place."""
        return torch.arange(population)

    def round(self, rnd: Round, state: State) -> tuple[State, Info]:
        """Train on the pool, and give the model to every client."""
        # All rows are the same model: the first stands for it.
        model, info, moments = rnd.task.train_pooled(
            state.params[:1], rnd.rng, rnd.local, optimizer=state.moments
        )
        everybody = len(rnd.ids)
        shared = {name: value.expand(everybody, *value.shape[1:]) for name, value in info.items()}
        # Each client counts its share of the samples, so that their sum is the pool's.
        samples = (
            info["train_samples"] * rnd.task.num_samples.double() / rnd.task.num_pooled_samples
        )
        params = model.expand(everybody, -1).clone()
        return replace(state, params=params, moments=moments), {
            **shared,
            "train_samples": samples.long(),
        }
