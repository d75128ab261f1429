"""Work on the whole matrix of models: no needless copies, and the same bytes as with them."""

from dataclasses import replace

import torch

from coterie.engine.task import LocalTraining
from coterie.exchange.base import Inbox, Message
from coterie.exchange.in_memory import InMemory
from coterie.functional.selection import sample_uniformly
from coterie.methods import METHODS
from coterie.methods.base import draw_peers_uniformly
from coterie.methods.server import first_models
from coterie.rng import Rng
from coterie.runtime.loop import Loop
from coterie.runtime.record import Record
from coterie.simulation.run import simulate
from coterie.testing import tiny_federation, tiny_settings
from coterie.testing.tiny import build_task


def inbox(params: int) -> Inbox:
    """Three models read by two clients; one message did not come."""
    index, mask = torch.tensor([[2, 1], [0, 0]]), torch.tensor([[True, True], [True, False]])
    table = torch.arange(3.0 * params).reshape(3, params)
    return Inbox(
        table, index, torch.tensor([[2, 1], [0, 2]]), mask, torch.zeros_like(index), {}, mask * 4
    )


def test_wide_models_are_mixed_as_narrow_ones_and_a_model_without_weight_has_no_influence():
    wide = inbox(10_000)
    wide.table[2, 7] = torch.nan
    weights, own = torch.tensor([[0.0, 0.5], [0.25, 0.25]]), torch.ones(2, 10_000)
    mixed = wide.mix(weights, own=own, own_weight=torch.tensor([0.5, 0.75]))
    for columns in (slice(0, 4), slice(4, 8), slice(9_996, 10_000)):
        narrow = replace(wide, table=wide.table[:, columns])
        expected = narrow.mix(weights, own=own[:, columns], own_weight=torch.tensor([0.5, 0.75]))
        assert torch.equal(mixed[:, columns], expected)
    assert mixed[0, 7] == 0.5 + 0.5 * 10_007


def test_all_rows_of_a_message_in_their_order_are_the_message_itself():
    message = Message(torch.eye(3), {"samples": torch.arange(3)})
    assert message.take_rows(torch.arange(3)) is message
    assert message.take_rows(torch.tensor([2, 0])).fields["samples"].tolist() == [2, 0]


def test_one_model_offered_to_all_is_not_copied():
    offer = replace(inbox(5), index=torch.tensor([[1, 1], [1, 0]]))
    assert first_models(offer).data_ptr() == offer.table[1].data_ptr()
    assert first_models(offer).tolist() == offer.table[[1, 1]].tolist()
    assert first_models(inbox(5)).tolist() == inbox(5).table[[2, 0]].tolist()


def test_training_in_place_changes_the_models_and_gives_the_same_ones():
    task = build_task(tiny_federation(), "linear", engine="loop")
    params, rng = task.initial_models(Rng(1)).clone(), Rng(1).at_round(0)
    before = params.clone()
    copied, _, _ = task.train(params, rng, LocalTraining())
    assert torch.equal(params, before)
    trained, _, _ = task.train(params, rng, LocalTraining(), in_place=True)
    assert trained.data_ptr() == params.data_ptr()
    assert torch.equal(trained, copied)


def test_uniform_peers_are_those_of_the_largest_gumbel_draws(monkeypatch):
    """Drawn two clients at a time, without a logarithm."""
    monkeypatch.setattr("coterie.methods.base.ROWS_AT_ONCE", 2)
    federation = tiny_federation()
    loop = Loop(*_parts(federation))
    rnd = loop._make_round(0, torch.arange(len(federation)), torch.arange(len(federation)))
    noise = rnd.rng.gumbel("peers", rnd.ids, len(federation))
    assert torch.equal(
        draw_peers_uniformly(rnd, 2, rnd.candidates), sample_uniformly(noise, 2, rnd.candidates)
    )


def _parts(federation):
    number = len(federation)
    record = Record(torch.full((number,), -1))
    door = InMemory(federation.ids, number)
    return (
        build_task(federation, "linear", engine="loop"),
        METHODS["random"](),
        door,
        tiny_settings(),
        Rng(3),
        record,
    )


def test_served_models_are_fetched_once_at_the_end(monkeypatch):
    """Also where metrics ask who belongs where: once for each validation and once for the end."""
    rounds: list[int] = []
    served = Loop._fetch_served_models
    monkeypatch.setattr(
        Loop,
        "_fetch_served_models",
        lambda self, index: rounds.append(index) or served(self, index),
    )
    settings = tiny_settings(
        rounds=2, evaluate="final", engine="loop", metrics=("clusters", "reductions")
    )
    simulate(tiny_federation(), METHODS["fedavg"](), model="linear", settings=settings)
    assert rounds == [-1, 0, 1, 1]
