"""The cost ledger: the papers' numbers, and that what is predicted is what is counted."""

import dataclasses

import pytest
import torch

from coterie.errors import ConfigError
from coterie.methods import METHODS
from coterie.methods.dac import Dac, DacNoTwoHop
from coterie.methods.fedavg import FedAvg
from coterie.methods.fix_topology import FixTopology
from coterie.methods.ifca import Ifca
from coterie.methods.local import Local
from coterie.methods.oracle import Oracle
from coterie.methods.panm import PanmGrad, PanmLoss
from coterie.methods.pens import Pens
from coterie.methods.random_gossip import Random
from coterie.results import traffic
from coterie.simulation.run import simulate
from coterie.testing import tiny_federation, tiny_settings

PAPER = traffic.Setting(population=100, params=62_006, samples=400, group=25)


@pytest.mark.parametrize(("k", "models"), [(2, 1118), (3, 1397)])
@pytest.mark.parametrize("kind", [PanmLoss, PanmGrad])
def test_panm_costs_what_its_paper_says(kind, k, models):
    """Invariant 39: l = 4, T1 = 100, T2 = 200, a correction every 10 rounds: 4 + 99 (4 + k) + 20 x 8 + 180 k."""
    method = kind(num_peers=k, num_candidates=4, stage_one_rounds=100, interval=10)
    assert models == 4 + 99 * (4 + k) + 20 * 8 + 180 * k
    assert traffic.paper_cost(method, 300) == models


@pytest.mark.parametrize("clusters", [2, 3, 4])
def test_server_based_methods_cost_what_the_paper_says(clusters):
    """Invariant 39: FedAvg 2 models a round, IFCA 1 + c; over 300 rounds 600 and 300 (1 + c)."""
    assert traffic.paper_cost(FedAvg(), 300) == 600
    assert traffic.paper_cost(Ifca(clusters=clusters), 300) == 300 * (1 + clusters)


def test_the_true_cost_of_panm_is_higher():
    """Corrections average with k members of a bag of 24, of which 4 were read already: 20 k (1 - 4 / 24) more.

    PANMGrad reads an update beside each model it scores: 4 + 99 x 6 + 20 x 8 more for k = 2.
    """
    loss = PanmLoss(num_peers=2, num_candidates=4)
    assert traffic.true_cost(loss, PAPER, 300) == pytest.approx(1118 + 20 * 2 * (1 - 4 / 24))
    grad = PanmGrad(num_peers=2, num_candidates=4)
    expected = traffic.true_cost(loss, PAPER, 300) + 4 + 99 * 6 + 20 * 8
    assert traffic.true_cost(grad, PAPER, 300) == pytest.approx(expected)
    assert traffic.true_cost(dataclasses.replace(grad, alpha=0.0), PAPER, 300) == traffic.true_cost(loss, PAPER, 300)


def test_loss_costs_forward_passes_and_products_do_not():
    """Five peers and 400 samples: 2000 passes for the inverse loss, none for the cosine, which reads 11 vectors."""
    loss, cosine = (traffic.predicted(Dac(similarity=name), PAPER, 0) for name in ("inv_loss", "cos_weight"))
    assert (loss.passes, cosine.passes) == (2000, 0)
    assert loss.operations == 6 * 62_006
    assert cosine.operations == (6 + 11) * 62_006
    assert loss.extra_floats == 500
    assert traffic.predicted(DacNoTwoHop(), PAPER, 0).extra_floats == 0


def test_pushing_the_loss_moves_nearly_twice_the_models():
    """Besides its 5 peers' models a client receives those of the 5 that ask it, but for the 5 / 99 it asked itself."""
    pushed = traffic.predicted(Dac(loss_direction="push"), PAPER, 0)
    assert pushed.models == 5
    assert pushed.extra_models == pytest.approx(5 * (1 - 5 / 99))
    assert pushed.messages == 99 + 5


def test_local_is_free_and_oracle_is_bounded_by_its_cluster():
    assert traffic.predicted(Local(), PAPER, 7) == traffic.Cost()
    alone = dataclasses.replace(PAPER, group=1)
    assert traffic.predicted(Oracle(), alone, 0).models == 0
    assert traffic.predicted(Oracle(num_peers=30), PAPER, 0).models == 24


def test_pens_scores_in_stage_one_only():
    """Ten read and scored in rounds 0 .. 19, five read from round 20 on."""
    pens = Pens(num_sampled=10, num_kept=2, num_peers=5, stage_one_rounds=20)
    assert [traffic.predicted(pens, PAPER, t).models for t in (0, 19, 20)] == [10, 10, 5]
    assert [traffic.predicted(pens, PAPER, t).passes for t in (19, 20)] == [4000, 0]
    assert traffic.total(pens, PAPER, 30).models == 20 * 10 + 10 * 5


def test_every_method_is_predicted_or_says_why_not():
    """A method is in the ledger, or its refusal says that it has to be counted."""
    refused = {}
    for kind, method in METHODS.items():
        try:
            traffic.predicted(method(), PAPER, 0)
        except ConfigError as error:
            refused[kind] = str(error)
    assert set(refused) <= {"one-shot", "sosicfl", "sosicfl-all", "sosicfl-plus"}
    assert all("count" in text for text in refused.values())


RUNS = [
    (Local(), "shared"),
    (Random(num_peers=2), "shared"),
    (FixTopology(num_peers=2), "shared"),
    (Oracle(num_peers=4), "shared"),
    (Dac(num_peers=2), "shared"),
    (Dac(num_peers=2, similarity="inv_l2", two_hop=False), "shared"),
    (Dac(num_peers=5, two_hop_scope="history"), "shared"),
    (Dac(num_peers=5, loss_direction="push"), "shared"),
    (Pens(num_sampled=3, num_kept=1, stage_one_rounds=9), "shared"),
    (PanmLoss(num_peers=2, num_candidates=3), "shared"),
    (PanmGrad(num_peers=2, num_candidates=3, alpha=0.5), "shared"),
]


@pytest.mark.parametrize(("method", "init"), RUNS, ids=lambda v: getattr(v, "kind", v))
def test_what_is_predicted_is_what_is_counted(method, init):
    """Models, bytes, passes and everything beside, per client and round, in a run in which everybody answers."""
    federation = tiny_federation()
    run = simulate(federation, method, model="linear", settings=tiny_settings(rounds=3, init=init))
    table = traffic.counted(run.metrics, run.edges)
    setting = traffic.Setting(population=6, params=15, samples=12, group=3, number_bytes=8)
    for round in range(3):
        rows = table[table["round"] == round]
        expected = traffic.predicted(method, setting, round)
        for name in ("models", "extra_models", "extra_floats", "bytes", "passes"):
            mean = rows[name].sum() / 6
            assert mean == pytest.approx(getattr(expected, name)), f"{name} in round {round}"


def test_counting_a_server_based_run():
    """One model of 15 numbers down and one up, with what goes along."""
    run = simulate(tiny_federation(), FedAvg(), model="linear", settings=tiny_settings(rounds=2))
    table = traffic.counted(run.metrics, run.edges)
    rows = table[(table["round"] == 1) & (table["bytes_down"] > 0)]
    assert bool((rows["bytes"] == rows["bytes_down"] + rows["bytes_up"]).all())
    assert bool((rows["bytes"] >= 2 * 15 * 8).all())
    assert torch.isfinite(run.params).all()
