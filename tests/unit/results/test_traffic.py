"""The cost ledger: the papers' numbers, and that what is predicted is what is counted."""

import dataclasses
from dataclasses import replace

import pandas as pd
import pytest
from torch import nn

from coterie.errors import ConfigError
from coterie.methods import METHODS
from coterie.methods.cost import Cost, CostSetting
from coterie.methods.dac import Dac, DacNoTwoHop
from coterie.methods.fedavg import FedAvg
from coterie.methods.fix_topology import FixTopology
from coterie.methods.ifca import Ifca
from coterie.methods.local import Local
from coterie.methods.oracle import Oracle
from coterie.methods.panm import PanmGrad, PanmLoss
from coterie.methods.pens import Pens
from coterie.methods.random_gossip import Random
from coterie.methods.sosicfl import SimplexMethod
from coterie.papers.dac import PublishedDac
from coterie.results import traffic
from coterie.results.equal_budget import compute_bytes_per_client
from coterie.results.stored_runs import StoredRun
from coterie.runtime.task import make_task
from coterie.simulation.run import simulate
from coterie.testing import tiny_federation, tiny_settings

PAPER = CostSetting(population=100, params=62_006, samples=400, group=25)


@pytest.mark.parametrize("k", [2, 3])
def test_panm_reads_what_its_paper_counts_and_the_bag_it_averages_with(k):
    """Invariant 39: l = 4, T1 = 100, T2 = 200, a correction every 10 rounds: 4 + 99 (4 + k) + 20 x 8 + 180 k.

    The paper leaves out the members averaged with in a correction: k of a bag of 24, of which 4
    were read already. For k = 2 PANMGrad reads an update beside each model it scores: 4 + 99 x 6 +
    20 x 8.
    """
    loss, grad = (
        kind(num_peers=k, num_candidates=4, stage_one_rounds=100, interval=10)
        for kind in (PanmLoss, PanmGrad)
    )
    paper = 4 + 99 * (4 + k) + 20 * 8 + 180 * k
    for method in (loss, grad):
        assert traffic.predict_run_cost(method, PAPER, 300).models == pytest.approx(
            paper + 20 * k * (1 - 4 / 24)
        )
    assert traffic.predict_run_cost(grad, PAPER, 300).extra_models == 4 + 99 * (4 + k) + 20 * 8
    assert (
        traffic.predict_run_cost(dataclasses.replace(grad, alpha=0.0), PAPER, 300).extra_models == 0
    )


@pytest.mark.parametrize("clusters", [2, 3, 4])
def test_server_based_methods_cost_what_the_paper_says(clusters):
    """Invariant 39: FedAvg 2 models a round, IFCA 1 + c; over 300 rounds 600 and 300 (1 + c)."""
    assert traffic.predict_run_cost(FedAvg(), PAPER, 300).models == 600
    assert traffic.predict_run_cost(Ifca(clusters=clusters), PAPER, 300).models == 300 * (
        1 + clusters
    )


def test_loss_costs_forward_passes_and_products_do_not():
    """Five peers and 400 samples: 2000 passes for the inverse loss, none for the cosine."""
    loss, cosine = (Dac(similarity=name).cost(PAPER, 0) for name in ("inv_loss", "cos_weight"))
    assert (loss.passes, cosine.passes) == (2000, 0)
    assert loss.extra_floats == 500
    assert DacNoTwoHop().cost(PAPER, 0).extra_floats == 0


def test_pushing_the_loss_moves_nearly_twice_the_models():
    """Besides its 5 peers' models a client receives those of the 5 that ask it, but for the 5 / 99 it asked itself."""
    pushed = Dac(loss_direction="push").cost(PAPER, 0)
    assert pushed.models == 5
    assert pushed.extra_models == pytest.approx(5 * (1 - 5 / 99))
    assert pushed.messages == 99 + 5


def test_local_is_free_and_oracle_is_bounded_by_its_cluster():
    assert Local().cost(PAPER, 7) == Cost()
    alone = dataclasses.replace(PAPER, group=1)
    assert Oracle().cost(alone, 0).models == 0
    assert Oracle(num_peers=30).cost(PAPER, 0).models == 24


def test_pens_scores_in_stage_one_only():
    """Ten read and scored in rounds 0 .. 19, five read from round 20 on."""
    pens = Pens(num_sampled=10, num_kept=2, num_peers=5, stage_one_rounds=20)
    assert [pens.cost(PAPER, t).models for t in (0, 19, 20)] == [10, 10, 5]
    assert [pens.cost(PAPER, t).passes for t in (19, 20)] == [4000, 0]
    assert traffic.predict_run_cost(pens, PAPER, 30).models == 20 * 10 + 10 * 5


def test_every_method_is_predicted_or_says_why_not():
    """A method is in the ledger, or its refusal says that it has to be counted."""
    refused = {}
    for kind, method in METHODS.items():
        try:
            method().cost(PAPER, 0)
        except ConfigError as error:
            refused[kind] = str(error)
    assert set(refused) == {
        kind for kind, method in METHODS.items() if issubclass(method, SimplexMethod)
    }
    assert all("count" in text for text in refused.values())


RUNS = [
    (Local(), "shared"),
    (Random(num_peers=2), "shared"),
    (FixTopology(num_peers=2), "shared"),
    (Oracle(num_peers=4), "shared"),
    (Dac(num_peers=2), "shared"),
    (Dac(num_peers=2, similarity="inv_l2", two_hop=False), "shared"),
    (PublishedDac(num_peers=5, two_hop_scope="history"), "shared"),
    (Dac(num_peers=5, loss_direction="push"), "shared"),
    (Dac(num_peers=2, similarity="cos_weight", sketch=8, num_candidates=3), "shared"),
    (Dac(num_peers=2, similarity="cos_grad", sketch=8, two_hop=False), "per_client"),
    (Dac(num_peers=2, similarity="public_agreement", num_candidates=9), "shared"),
    (Pens(num_sampled=3, num_kept=1, stage_one_rounds=9), "shared"),
    (PanmLoss(num_peers=2, num_candidates=3), "shared"),
    (PanmGrad(num_peers=2, num_candidates=3, alpha=0.5), "shared"),
]


@pytest.mark.filterwarnings("ignore:.*clients start from different models")
@pytest.mark.parametrize(("method", "init"), RUNS, ids=lambda v: getattr(v, "kind", v))
def test_what_is_predicted_is_what_is_counted(method, init):
    """Models, bytes, passes and everything beside, per client and round, in a run in which everybody answers."""
    federation = tiny_federation().with_public_set(replace(tiny_federation(1, 1), tests=()))
    run = simulate(federation, method, model="linear", settings=tiny_settings(rounds=3, init=init))
    counted = (
        run.metrics[run.metrics["split"] == "train"]
        .groupby(["round", "metric"], observed=True)["value"]
        .sum()
    )
    setting = CostSetting(
        population=6, params=15, samples=12, group=3, number_bytes=8, public_samples=16,
        predictions=16, start_apart=init == "per_client",
    )  # fmt: skip
    for round in range(3):
        read = run.edges[(run.edges["round"] == round) & (run.edges["purpose"] != "missing")]
        found = {
            name: counted.get((round, name), 0.0)
            for name in ("extra_models", "extra_floats", "passes")
        }
        found |= {
            "models": len(read),
            "bytes": read["bytes"].sum() + counted.get((round, "extra_bytes"), 0.0),
        }
        expected = method.cost(setting, round)
        for name, value in found.items():
            assert value / 6 == pytest.approx(getattr(expected, name)), f"{name} in round {round}"


@pytest.mark.parametrize(
    "changes",
    [
        {"new_clients": [4, 5], "new_client_rounds": 1},
        {"attacks": [{"kind": "noise", "clients": [0, 5]}]},
    ],
    ids=["new clients", "attackers"],
)
def test_a_client_receives_as_much_whoever_joins_or_attacks(tmp_path, changes):
    """Each reads two models a round, of 15 numbers and one for the samples behind them."""
    settings = tiny_settings(rounds=2, **changes)
    run = simulate(tiny_federation(), Random(num_peers=2), model="linear", settings=settings)
    stored = StoredRun(tmp_path, {}, {}, run.metrics, run.edges)
    received = 2 * (15 + 1) * 8
    assert compute_bytes_per_client(stored).tolist() == [received, 2 * received]


def headed() -> nn.Module:
    """A layer, a normalization and a head: 20 + 8 + 15 trained numbers, and 9 of running statistics."""
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


PARTS = [
    (Random(num_peers=2), ["0"], [], 20, 20),
    (Dac(num_peers=2), ["!2"], [], 20 + 8 + 9, 20 + 8),
    (Dac(num_peers=2, similarity="cos_grad"), ["!1"], ["0.weight"], 20 + 15, 16),
    (PanmGrad(num_peers=2, num_candidates=3), ["!2"], [], 20 + 8 + 9, 20 + 8),
    (PanmGrad(num_peers=2, num_candidates=3), [], ["2"], 20 + 8 + 15 + 9, 15),
]


@pytest.mark.parametrize(("method", "shared", "on", "sent", "compared"), PARTS)
@pytest.mark.filterwarnings("ignore:.*clients start from different models")
def test_the_ledger_counts_what_is_shared_and_what_is_compared(method, shared, on, sent, compared):
    settings = tiny_settings(
        rounds=2, init="per_client", shared=shared, similarity_on=on, engine="loop"
    )
    federation = tiny_federation()
    run = simulate(federation, method, model=headed, settings=settings)
    apart = run.settings.init == "per_client"
    setting = CostSetting(population=6, params=sent, samples=12, group=3, number_bytes=8, start_apart=apart,
                      compared=compared)  # fmt: skip
    assert (
        replace(CostSetting.from_task(make_task(federation, method, headed, settings)), group=3)
        == setting
    )
    for round in range(2):
        read = run.edges[(run.edges["round"] == round) & (run.edges["purpose"] != "missing")]
        assert read["bytes"].sum() / 6 == pytest.approx(method.cost(setting, round).bytes)


def test_the_bytes_of_a_round_are_those_of_models_and_of_what_goes_beside_them():
    """Two models of 40 bytes in round 0 with 5 and 6 bytes of extras, 7 from the server in round 1 and 3 to it.

    What the warm-up counted is of no round.
    """
    columns = ["round", "client", "metric", "value"]
    counted = [(-1, 0, "extra_bytes", 100), (0, 0, "extra_bytes", 5), (0, 1, "extra_bytes", 6)]
    counted += [(1, 0, "bytes_down", 7), (1, 1, "bytes_up", 3), (1, 1, "loss", 9)]
    edges = pd.DataFrame({"round": [0, 0], "reader": [0, 1], "read": [1, 0], "bytes": [40, 40]})
    received, sent = traffic.count_traffic(pd.DataFrame(counted, columns=columns), edges, 3)
    assert received.tolist() == [91.0, 7.0, 0.0]
    assert sent.tolist() == [0.0, 3.0, 0.0]


def test_counting_a_server_based_run():
    """Six clients: a model of 15 numbers down and one up, with what goes along."""
    run = simulate(tiny_federation(), FedAvg(), model="linear", settings=tiny_settings(rounds=2))
    down, up = traffic.count_traffic(run.metrics, run.edges, 2)
    assert bool((down >= 6 * 15 * 8).all())
    assert bool((up >= 6 * 15 * 8).all())
