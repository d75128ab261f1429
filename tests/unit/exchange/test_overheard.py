"""A listener hears what is published, and changes nothing."""

import torch

from coterie.exchange.base import Message
from coterie.exchange.overheard import OverheardExchange
from coterie.methods.registry import METHODS
from coterie.rng import Rng
from coterie.simulation.run import simulate
from coterie.testing import check_exchange, tiny_federation, tiny_settings


def test_it_is_an_exchange():
    check_exchange(
        lambda groups, population: [OverheardExchange(torch.tensor(groups[0]), population)],
        groups=((0, 1, 2, 3),),
    )


def test_the_newest_model_of_each_client_is_kept():
    ear = OverheardExchange(torch.arange(3), 3)
    ear.begin_round(Rng(0))
    ear.pull(Message(torch.ones(3, 2)), torch.full((3, 1), -1))
    ear.set_active(torch.tensor([2, 0]))
    ear.pull(Message(torch.tensor([[2.0, 2.0], [3.0, 3.0]])), torch.full((2, 1), -1))
    ear.pull(Message(torch.ones(2, 0)), torch.full((2, 1), -1))  # no model
    assert {client: row.tolist() for client, row in ear.published_models.items()} == {
        0: [3, 3],
        1: [1, 1],
        2: [2, 2],
    }


def test_runs_are_as_without_it():
    """FedAvg's last message is what the server averages: its mean is the model of everybody."""
    federation, settings = tiny_federation(), tiny_settings(rounds=3)
    for kind in ("random", "fedavg"):
        ear = OverheardExchange(federation.ids, 6)
        runs = [
            simulate(
                federation, METHODS[kind](), model="linear", settings=settings, exchange=exchange
            )
            for exchange in (None, ear)
        ]
        assert torch.equal(runs[0].params, runs[1].params)
        assert sorted(ear.published_models) == list(range(6))
