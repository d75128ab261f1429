"""The forecast of memory, and what is refused."""

import pytest

from coterie import Settings, memory, simulate
from coterie.errors import ConfigError
from coterie.methods import METHODS
from coterie.testing import tiny_federation

WANTED = memory.forecast(clients=10, params=100, itemsize=4, block=5, data=2048, keeps_best=False)


def test_a_forecast_is_worked_out_by_hand():
    """Ten rows of 400 bytes three times over; five of them with gradients and two moments."""
    assert (WANTED.models, WANTED.block, WANTED.needed) == (12000, 8000, 20000)


def test_what_fits_exactly_and_what_cannot_be_told_is_let_through():
    """A forecast is a lower bound: it refuses nothing that might fit."""
    memory.check(WANTED, "cpu", 20000)
    memory.check(WANTED, "cpu", None)


def test_a_run_that_cannot_fit_is_refused_with_the_numbers(monkeypatch):
    """Before anything is trained."""
    monkeypatch.setattr(memory, "available", lambda _device: 100)
    with pytest.raises(ConfigError, match=r"needs at least .* on cpu beside its data .* found 100 bytes"):
        simulate(tiny_federation(), METHODS["random"](), model="mlp-c", settings=Settings(rounds=1))
