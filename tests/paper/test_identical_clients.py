"""Clients with identical data who average with everybody are one centralized learner."""

import dataclasses

import pytest
import torch

from coterie.data.federation import Federation, TestSet
from coterie.engine.task import LocalTraining
from coterie.methods.dac import Dac
from coterie.methods.fedavg import FedAvg
from coterie.methods.random_gossip import Random
from coterie.rng import Rng
from coterie.runtime.settings import Settings
from coterie.simulation.run import simulate
from coterie.testing.tiny import build_task

pytestmark = pytest.mark.paper
CLIENTS, SAMPLES, ROUNDS, LR = 5, 12, 8, 0.05


def identical():
    draws = Rng(0).generator("test")
    x = torch.from_numpy(draws.normal(size=(SAMPLES, 4)))
    y = torch.from_numpy(draws.normal(size=SAMPLES))
    split = torch.zeros(CLIENTS, SAMPLES, dtype=torch.int64)
    split[:, 10:] = 1
    return Federation(
        x=x.expand(CLIENTS, -1, -1),
        y=y.expand(CLIENTS, -1),
        split=split,
        tests=(TestSet(x, y, "all"),),
        test_of=torch.zeros(CLIENTS, dtype=torch.int64),
        ids=torch.arange(CLIENTS),
        population=CLIENTS,
        classes=0,
    )


def gradient_descent(start, x, y, steps):
    """Full-batch descent on the mean squared error of a linear model with bias, by its formula."""
    weight, bias = start[:4].clone(), start[4].clone()
    for _ in range(steps):
        error = x @ weight + bias - y
        weight, bias = weight - LR * 2 * (x.T @ error) / len(x), bias - LR * 2 * error.mean()
    return torch.cat([weight, bias[None]])


@pytest.mark.parametrize(
    "method",
    [
        Random(num_peers=CLIENTS - 1),
        Dac(num_peers=CLIENTS - 1),
        Dac(num_peers=CLIENTS - 1, aggregation="fedsim"),
    ],
)
def test_gossip_with_everybody_is_centralized_gradient_descent(method):
    """Item 42: shared start, full-batch SGD, m = K - 1: after the warm-up and T rounds, T + 1 steps of descent."""
    federation = identical()
    local = LocalTraining(optimizer="sgd", lr=LR, batch_size=SAMPLES)
    settings = Settings(rounds=ROUNDS, local=local, dtype="float64", evaluate="final")
    run = simulate(federation, method, model="linear", settings=settings, seed=3)
    start = build_task(
        federation.host(federation.ids), "linear", dtype=torch.float64
    ).initial_models(Rng(3))[0]
    x, y = federation.x[0, :10], federation.y[0, :10]
    expected = gradient_descent(start, x, y, ROUNDS + 1)
    torch.testing.assert_close(run.params, expected.expand(CLIENTS, -1), rtol=0, atol=1e-12)


def test_gossip_with_everybody_is_federated_averaging():
    """Item 42: the models of FedAvg after one round more, since gossip first trains before round 0."""
    federation = identical()
    local = LocalTraining(optimizer="sgd", lr=LR, batch_size=SAMPLES)
    settings = Settings(rounds=ROUNDS, local=local, dtype="float64", evaluate="final")
    gossip = simulate(
        federation, Random(num_peers=CLIENTS - 1), model="linear", settings=settings, seed=3
    )
    later = dataclasses.replace(settings, rounds=ROUNDS + 1)
    server = simulate(federation, FedAvg(), model="linear", settings=later, seed=3)
    torch.testing.assert_close(gossip.params, server.params, rtol=0, atol=1e-12)
