"""Peers compared by what they publish without their models: sketches, and predictions for a public set."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.selection import first_only

import coterie
from coterie.errors import ConfigError
from coterie.exchange.base import Inbox
from coterie.functional.sketches import count_sketch
from coterie.methods.peer_profiles import compare_profiles, count_numbers, predict_profile
from coterie.rng import Rng
from coterie.runtime.task import make_task
from coterie.simulation.run import simulate
from coterie.testing import check_method, tiny_federation, tiny_settings

PUBLIC = 9


def public(kind="classes", seed=5, samples=PUBLIC):
    """The tiny problem with a public set of inputs of its kind."""
    other = tiny_federation(1, 1, kind=kind, seed=seed, train=samples - 4)
    return tiny_federation(kind=kind).with_public_set(replace(other, tests=()))


METHODS = [
    coterie.Dac(num_peers=2, similarity="public_agreement"),
    coterie.Dac(num_peers=2, similarity="cos_grad", sketch=8, num_candidates=2),
    coterie.Dac(num_peers=2, similarity="inv_l2", sketch=8, aggregation="fedsim"),
    coterie.Dac(num_peers=2, similarity="cos_weight", sketch=8, table=4, num_candidates=3),
    coterie.DacVar(num_peers=2, similarity="cos_grad", sketch=8),
]


@pytest.mark.full
@pytest.mark.parametrize(
    "method", first_only(METHODS, slow=True), ids=lambda one: f"{one.similarity}"
)
def test_methods_keep_their_promises(method):
    # Candidates of a table are drawn by position, and candidates in all by their own streams.
    check_method(method, federation=public(), relabel=method.num_candidates is None)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*clients start from different models")
@pytest.mark.parametrize("method", METHODS[1:2], ids=["cos_grad"])
def test_methods_keep_their_promises_where_clients_start_apart(method):
    settings = tiny_settings(init="per_client")
    check_method(method, federation=public(), settings=settings, relabel=False)


def trained_alone(data, rounds=0, **given):
    """The models that clients have before their first exchange: after the warm-up."""
    return simulate(
        data, coterie.Local(), model="linear", settings=tiny_settings(rounds=rounds, **given)
    )


def first_round(data, method, **given):
    settings = tiny_settings(rounds=1, record_similarities=True, **given)
    return simulate(data, method, model="linear", settings=settings)


@pytest.mark.option("Dac.similarity", "public_agreement")
@pytest.mark.parametrize("kind", ["classes", "labels", "tokens"])
def test_what_counts_is_the_share_of_the_public_set_with_the_same_class(kind):
    """Of what the untouched modules return, worked out with numpy."""
    data = public(kind)
    loss = {"classes": "cross-entropy", "labels": "multi-label", "tokens": "tokens"}[kind]
    model = Embedded if kind == "tokens" else "linear"
    method = coterie.Dac(num_peers=2, similarity="public_agreement")
    # From models of their own, since one warm-up leaves all embeddings alike.
    given = {"loss": loss, "init": "per_client" if kind == "tokens" else "shared"}
    settings = tiny_settings(rounds=1, record_similarities=True, **given)
    run = simulate(data, method, model=model, settings=settings)
    settings = tiny_settings(rounds=0, **given)
    alone = simulate(data, coterie.Local(), model=model, settings=settings)
    assert data.public is not None
    assert len(data.public.x) == PUBLIC
    predicted = []
    for client in range(6):
        with torch.no_grad():
            outputs = alone.model(client).double()(data.public.x)
        predicted.append(((outputs > 0) if kind == "labels" else outputs.argmax(-1)).numpy())
    assert len(run.edges) == 12
    for row in run.edges.itertuples():
        expected = float(np.mean(predicted[row.reader] == predicted[row.read]))
        assert row.similarity == pytest.approx(expected, abs=1e-6)
    assert run.edges["similarity"].nunique() > 1
    passes = run.metrics[run.metrics["metric"] == "passes"]["value"]
    assert passes.tolist() == [PUBLIC] * 6


class Embedded(torch.nn.Module):
    """A class for each entry of an input of whole numbers."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(3, 5)
        self.head = torch.nn.Linear(5, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.table(x.long())))


SKETCHED = ("cos_weight", "cos_grad", "inv_l2")


@pytest.mark.filterwarnings("ignore:.*clients start from different models")
@pytest.mark.parametrize("init", ["shared", "per_client"])
@pytest.mark.parametrize("kind", SKETCHED)
def test_similarities_are_those_of_sketches_of_what_is_compared(kind, init):
    data, width = tiny_federation(), 8
    run = first_round(data, coterie.Dac(num_peers=2, similarity=kind, sketch=width), init=init)
    rows = trained_alone(data, init=init).params
    if kind == "cos_grad":
        task = make_task(data, coterie.Local(), "linear", tiny_settings(init=init))
        rows = rows - task.initial_models(Rng(0))
    sketched = count_sketch(rows, width).numpy()
    for row in run.edges.itertuples():
        one, other = sketched[row.reader], sketched[row.read]
        expected = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
        if kind == "inv_l2":
            expected = 1 / (np.linalg.norm(one - other) + 1e-6)
        assert row.similarity == pytest.approx(float(expected), rel=1e-5)


def test_peers_are_drawn_by_what_was_compared_in_the_same_round():
    """With all as candidates already in round 0, in which DAC without sketches knows nobody: p_ij is e^(2 s_ij) over its sum."""
    data = tiny_federation(8)
    rows = count_sketch(trained_alone(data).params, 32).numpy()
    method = coterie.Dac(num_peers=2, similarity="inv_l2", sketch=32, tau=2.0)
    run = first_round(data, method)
    for row in run.edges.itertuples():
        distances = np.linalg.norm(rows - rows[row.reader], axis=1)
        shares = np.exp(2 / (distances + 1e-6), where=distances > 0, out=np.zeros(8))
        expected = shares[row.read] / shares.sum()
        # Each of the seven has a floor of 1e-6 more.
        assert row.probability == pytest.approx(float(expected), abs=1e-5)
    assert run.edges["probability"].nunique() > 4


def test_as_many_candidates_are_read_as_asked_and_a_read_of_one_is_no_read_of_a_model(play):
    played = play(
        coterie.Dac(num_peers=2, similarity="inv_l2", sketch=8, num_candidates=3),
        tiny_federation(9),
    )
    memory = played.steps(1).memory
    measured = (memory.status == 2).sum(1)
    assert bool(((measured >= 3) & (measured <= 5)).all())
    assert memory.count.sum(1).tolist() == [2] * 9
    # the profile of three candidates, 8 numbers of 8 bytes each
    assert played.infos[-1]["extra_bytes"].tolist() == [3 * 8 * 8] * 9


def test_predictions_for_another_public_set_are_not_compared():
    mine, theirs = (
        predict_profile(make_task(public(seed=seed), coterie.Local(), "linear", tiny_settings()), torch.zeros(6, 15).double())
        for seed in (5, 6)
    )  # fmt: skip
    assert count_numbers(mine) == PUBLIC + 1
    places = torch.arange(6)[:, None]
    ones = torch.ones(6, 1, dtype=torch.bool)
    for sent, expected in ((mine, 1.0), (theirs, 0.0)):
        none, numbers = torch.zeros(6, 0), torch.zeros(6, 1, dtype=torch.int64)
        inbox = Inbox(none, places, places, ones, numbers, sent, numbers)
        assert (
            compare_profiles(mine, inbox, "public_agreement", 0.0).flatten().tolist()
            == [expected] * 6
        )


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"sketch": 8}, "sketch is 8; expected none unless similarity is one of cos_weight, cos_grad"),
        ({"similarity": "agreement", "sketch": 8}, "sketch is 8; expected none unless"),
        ({"num_candidates": 3}, "num_candidates is 3; expected none unless sketch is given"),
        ({"similarity": "inv_l2", "sketch": 0}, "sketch is 0; expected a whole number, 1 or more"),
        ({"similarity": "inv_l2", "sketch": 8, "table": 5}, r"num_candidates is None; expected a number up to table \(5\)"),
        ({"similarity": "inv_l2", "sketch": 8, "table": 5, "num_candidates": 6}, "num_candidates is 6; expected a number up to"),
    ],
)  # fmt: skip
def test_settings_that_do_not_go_together_are_refused(fields, said):
    with pytest.raises(ConfigError, match=said):
        coterie.Dac(**fields)


def test_data_without_a_public_set_and_outputs_that_are_no_classes_are_refused():
    method = coterie.Dac(num_peers=2, similarity="public_agreement")
    with pytest.raises(ConfigError, match=r"these data have none; .*Federation.with_public_set"):
        simulate(tiny_federation(), method, model="linear", settings=tiny_settings())
    x = torch.randn(60, 4)
    data = coterie.from_arrays(x, x[:, 0], num_clients=4)
    data = data.with_public_set(coterie.from_arrays(x[:9], x[:9, 0], num_clients=1))
    settings = coterie.Settings(rounds=1, loss="mse", engine="loop")
    with pytest.raises(ConfigError, match="'public_agreement' compares predicted classes"):
        coterie.simulate(data, method, model="linear", settings=settings)
