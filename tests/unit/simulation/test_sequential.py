"""Sequential schedules: acting in waves is acting one after another."""

from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coterie.engine.optim import LocalTraining
from coterie.engine.task import Task
from coterie.methods.random_gossip import Random
from coterie.rng import Rng
from coterie.simulation import _sequential
from coterie.simulation.run import simulate
from coterie.testing.tiny import tiny_federation, tiny_settings


@st.composite
def _rounds(draw):
    size = draw(st.integers(1, 8))
    order = draw(st.permutations(range(size)))
    others = st.lists(st.integers(0, size - 1), max_size=4)
    readings = [[j for j in draw(others) if j != row] for row in range(size)]
    return order, readings


@given(_rounds())
def test_everybody_sees_in_waves_what_they_see_one_after_another(case):
    """Clients publish a text of what they have read; the texts are the same however they are grouped."""
    order, readings = case

    def play(groups):
        board = [str(row) for row in range(len(order))]
        for group in groups:
            said = {row: f"{row}({','.join(board[other] for other in readings[row])})" for row in group}
            for row, text in said.items():
                board[row] = text
        return board

    waves = [wave.tolist() for wave in _sequential.waves(order, readings)]
    assert sorted(row for wave in waves for row in wave) == sorted(order)
    assert play(waves) == play([[row] for row in order])


def test_clients_that_read_nobody_act_in_one_wave():
    assert [wave.tolist() for wave in _sequential.waves([2, 0, 1], [[], [], []])] == [[0, 1, 2]]


def test_a_chain_of_readers_acts_one_by_one():
    assert [wave.tolist() for wave in _sequential.waves([0, 1, 2], [[], [0], [1]])] == [[0], [1], [2]]


@pytest.mark.parametrize("schedule", ["sequential", "sequential_exchange"])
def test_a_run_in_waves_is_a_run_one_by_one(schedule, monkeypatch):
    settings = tiny_settings(schedule=schedule, init="per_client", local=LocalTraining(lr=0.01), rounds=4, patience=2)

    def run():
        return simulate(tiny_federation(), Random(2), model="linear", settings=settings, seed=3)

    in_waves = run()
    monkeypatch.setattr(_sequential, "waves", lambda order, _: [torch.tensor([row]) for row in order])
    one_by_one = run()
    assert torch.allclose(in_waves.params, one_by_one.params, rtol=1e-12, atol=0)
    assert in_waves.edges.equals(one_by_one.edges)
    assert (in_waves.metrics[["round", "client", "metric"]] == one_by_one.metrics[["round", "client", "metric"]]).all(
        axis=None
    )


def test_the_order_is_drawn_anew_in_every_round():
    """With lr = 0 and everyone reading everyone, three rounds of means taken one after another, by hand."""
    federation, number = tiny_federation(), 3
    settings = tiny_settings(
        schedule="sequential", init="per_client", local=LocalTraining(lr=0.0), rounds=number, evaluate="final"
    )
    result = simulate(federation, Random(5), model="linear", settings=settings, seed=1)
    live = Task(federation.host(range(6)), "linear", dtype=torch.float64, init="per_client").init(Rng(1)).clone()
    orders = [Rng(1).at(index).generator("order").permutation(6).tolist() for index in range(number)]
    assert len(set(map(tuple, orders))) == number
    for client in chain.from_iterable(orders):
        live[client] = live.mean(0)
    assert torch.allclose(result.params, live, rtol=0, atol=1e-12)
