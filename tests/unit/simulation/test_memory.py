"""The forecast of memory, and what is refused."""

import pytest

from coterie import Settings, simulate
from coterie.errors import ConfigError
from coterie.methods import METHODS
from coterie.simulation import _memory
from coterie.testing import tiny_federation

WANTED = _memory.forecast(clients=10, params=100, itemsize=4, block=5, data=2048, keeps_best=False)


def test_a_forecast_is_worked_out_by_hand():
    """Ten rows of 400 bytes three times over; five of them with gradients and two moments."""
    assert (WANTED.models, WANTED.block, WANTED.needed) == (12000, 8000, 20000)


def test_optimizer_states_that_are_kept_are_there_twice_in_a_round():
    """Two moments: four copies of the models of 4,000 bytes beside the three, and one of the best."""
    kept = _memory.forecast(clients=10, params=100, itemsize=4, block=5, data=0, keeps_best=True, moments=2)
    assert kept.models == (3 + 1 + 2 * 2) * 4000


def test_servers_second_models_and_training_first_take_further_copies():
    """A server that sees everybody: one copy; a second model of each client: two more. Trained models to judge: two."""
    whole = {"whole": True, "tracks": 1, "train_first": False}
    assert _memory.copies(server=False, **whole) == 0
    assert _memory.copies(server=True, **whole) == 1
    assert _memory.copies(server=True, **{**whole, "tracks": 2}) == 3
    assert _memory.copies(server=True, **{**whole, "whole": False}) == 0
    assert _memory.copies(server=False, **{**whole, "train_first": True}) == 2


def test_what_fits_exactly_and_what_cannot_be_told_is_let_through():
    """Of what is refused nothing fits, as far as is known."""
    _memory.check(WANTED, "cpu", 20000)
    _memory.check(WANTED, "cpu", None)


def test_a_run_that_cannot_fit_is_refused_with_the_numbers(monkeypatch):
    """Before anything is trained."""
    monkeypatch.setattr(_memory, "available", lambda _device: 100)
    with pytest.raises(ConfigError, match=r"needs about .* on cpu beside its data .* found 100 bytes"):
        simulate(tiny_federation(), METHODS["random"](), model="mlp-c", settings=Settings(rounds=1))
