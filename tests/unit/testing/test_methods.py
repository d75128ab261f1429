"""The checks of methods that need a method with a server, and what they say of a difference."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from coterie.engine.task import Task
from coterie.exchange.base import Inbox, Message, Reply, ReplyForm
from coterie.methods.base import Info, Round, State
from coterie.methods.ditto import PersonalMemory
from coterie.methods.server import (
    ServerContext,
    ServerMethod,
    ask_server,
    first_models,
    model_request,
)
from coterie.rng import Rng
from coterie.testing import check_method
from coterie.testing.methods import describe_difference


@dataclass(frozen=True)
class Cloud:
    """The newest model that the server has of each client; the first model until a client sends one."""

    models: Float[Tensor, "population params"]
    sent: Bool[Tensor, " population"]


@dataclass(frozen=True)
class FedAmp(ServerMethod):
    """FedAMP: the server sends each client a mean of the models near its own; a client trains near it.

    It forgets that newcomers have no model of their own.
    """

    kind: ClassVar[str] = "fedamp"
    summary: ClassVar[str] = "the server sends each client a mean of the models near its own"
    lam: float = 1.0
    alpha: float = 0.1
    sigma: float = 1.0

    def init_memory(self, task: Task, rng: Rng) -> PersonalMemory:
        return PersonalMemory(task.initial_models(rng).clone())

    def init_server_state(self, task: Task, rng: Rng) -> Cloud:
        models = task.draw_models(rng, 1).expand(task.population, -1).clone()
        return Cloud(models, torch.zeros(task.population).bool())

    def reply(self, context: ServerContext, shared: Cloud, message: Message) -> tuple[Cloud, Reply]:
        assert message.ids is not None
        own, rows = shared.models[message.ids], torch.arange(len(message))
        near = torch.cdist(own, shared.models).square_()
        weights = self.alpha / self.sigma * torch.exp(-near / self.sigma) * shared.sent
        weights[rows, message.ids] = 0
        weights /= weights.sum(1, keepdim=True).clamp(min=1)
        weights[rows, message.ids] = 1 - weights.sum(1)
        # model by model, so that the number of rows changes no bit
        means = torch.stack([(w[:, None] * shared.models).sum(0) for w in weights])
        return shared, Reply(means, rows[:, None])

    def aggregate(self, context: ServerContext, shared: Cloud, message: Message) -> Cloud:
        assert message.ids is not None
        models = shared.models.index_copy(0, message.ids, message.params)
        return Cloud(models, shared.sent.index_fill(0, message.ids, True))

    def local_update(self, rnd: Round, state: State, reply: Inbox) -> tuple[State, Info]:
        start = State(state.memory.model, shared=state.shared, moments=state.moments)
        new, info = rnd.train(start, anchor=state.params, prox=self.lam)
        return State(new.params, PersonalMemory(new.params), new.shared, new.moments), info

    def serving_model(self, rnd: Round, state: State) -> tuple[Tensor, Info]:
        return state.memory.model, {}


def _reply_with_mean(
    context: ServerContext, shared: Cloud, message: Message
) -> tuple[Cloud, Reply]:
    index = torch.zeros(len(message), 1, dtype=torch.int64)
    return shared, Reply(shared.models.mean(0, keepdim=True), index)


@dataclass(frozen=True)
class FedAmpWithMean(FedAmp):
    """The same method; a newcomer gets the mean of all models."""

    def newcomer_model(self, rnd: Round, state: State) -> Tensor:
        request = model_request(state)
        _, reply = ask_server(rnd, _reply_with_mean, request, state.shared, ReplyForm(1))
        return first_models(reply)


@dataclass(frozen=True)
class FedAmpWithOwnMeans(FedAmp):
    """The same method; a newcomer gets what the server sends to another client."""

    def newcomer_model(self, rnd: Round, state: State) -> Tensor:
        return ServerMethod.serving_model(self, rnd, state)[0]


@pytest.mark.slow
def test_a_newcomers_model_that_is_a_clients_own_is_found():
    """Without `newcomer_model`, it would be the personal model that `serving_model` returns."""
    with pytest.raises(AssertionError) as raised:
        check_method(FedAmp(), relabel=False)
    assert "newcomer_model depends on the model or the memory of a client" in str(raised.value)
    # what a client keeps is moved by 1; six clients have 15 parameters each
    assert "(differs by up to 1 in 90 of 90 numbers)" in str(raised.value)


@pytest.mark.slow
def test_a_cluster_has_one_model_for_newcomers():
    with pytest.raises(AssertionError, match="gives clients of one cluster different models"):
        check_method(FedAmpWithOwnMeans(), relabel=False)


@pytest.mark.slow
def test_a_newcomers_model_of_the_server_keeps_the_contract():
    check_method(FedAmpWithMean(), relabel=False)


def test_a_difference_is_described_by_its_size():
    """NaN equals NaN; one of two NaN is a difference whose size is not a number."""
    nan = float("nan")
    a = torch.tensor([[1.0, nan], [3.0, 4.0]], dtype=torch.float64)
    b = torch.tensor([[1.0 + 3e-7, nan], [3.0, 4.25]], dtype=torch.float64)
    assert describe_difference(a, b) == "differs by up to 0.25 in 2 of 4 numbers"
    assert describe_difference(b[1:], b[1:]) == "differs by up to 0 in 0 of 2 numbers"
    # what is not equal only because NaN is not equal to itself
    assert describe_difference(a, a) == "both are NaN in 1 of 4 numbers"
    assert describe_difference(a[:1], b[:1]) == "differs by up to 3e-07 in 1 of 2 numbers"
