"""How servers average, for every method with a server whose options say it."""

import dataclasses
import warnings

import pytest
import torch
from torch import nn

from coterie.errors import ConfigError
from coterie.exchange.base import Message
from coterie.methods.cfl import Cfl
from coterie.methods.ditto import Ditto
from coterie.methods.fedavg import FairAvg, FedAvg, FedAvgM
from coterie.methods.fedgwc import FedGwc
from coterie.methods.fedprox import FedProx
from coterie.methods.fesem import FeSem
from coterie.methods.oneshot import OneShot
from coterie.methods.pfedme import PFedMe
from coterie.methods.server import Averaging, Clusters, ServerContext, ServerMethod, TooFewUpdates
from coterie.models.layout import Layout
from coterie.papers.fedgwc import PublishedFedGwc
from coterie.rng import Rng
from coterie.runtime.task import StandsStill, make_task
from coterie.testing import run_method, tiny_federation, tiny_settings

LAYOUT = Layout(nn.Linear(1, 1, bias=False), torch.float64)
ANSWERS = Message(
    torch.tensor([[1.0], [2.0], [6.0]], dtype=torch.float64),
    {
        "samples": torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64),
        "losses": torch.zeros(3, 1, dtype=torch.float64),
    },
    torch.arange(3),
)
"""Three clients with 1, 2 and 3 samples return the models 1, 2 and 6."""


def averaged(method: ServerMethod, rounds: int = 1) -> float:
    """The server's one parameter, 10 at the start, after rounds with the same answers."""
    models = torch.full((1, 1), 10.0, dtype=torch.float64)
    shared = run_method(method, settings=tiny_settings(rounds=0)).state.shared
    velocity = torch.zeros(1, shared.velocity.shape[1] and 1, dtype=torch.float64)
    shared = dataclasses.replace(shared, models=models, velocity=velocity)
    for index in range(rounds):
        shared = method.aggregate(
            ServerContext(index, Rng(0).at_round(index), LAYOUT, 6), shared, ANSWERS
        )
    return float(shared.models[0, 0])


@pytest.mark.option("FedAvg.weights", "samples", "uniform")
@pytest.mark.option("FedProx.weights", "samples", "uniform")
@pytest.mark.option("Ditto.weights", "samples", "uniform")
@pytest.mark.option("FeSem.weights", "samples", "uniform")
@pytest.mark.parametrize(
    "method", [FedAvg, FedProx, Ditto, lambda weights: FeSem(clusters=1, weights=weights)]
)
def test_clients_weigh_by_samples_or_alike(method):
    """(1 + 2 x 2 + 3 x 6) / 6 = 23/6, or (1 + 2 + 6) / 3 = 3."""
    assert averaged(method(weights="samples")) == pytest.approx(23 / 6)
    assert averaged(method(weights="uniform")) == pytest.approx(3)


@pytest.mark.option("FairAvg.weights", "uniform")
def test_methods_that_fix_the_weights():
    """FairAvg weighs all alike; FedGWC as its aggregator does."""
    assert averaged(FairAvg()) == pytest.approx(3)
    assert averaged(FedGwc(aggregator="fairavg")) == pytest.approx(3)
    assert averaged(FedGwc(aggregator="fedavg"), rounds=2) == pytest.approx(23 / 6)


@pytest.mark.option("FedAvgM.nesterov", False, True)
@pytest.mark.option("PublishedFedGwc.nesterov", False, True)
@pytest.mark.parametrize(
    "method", [FedAvgM, lambda **options: PublishedFedGwc(aggregator="fedavgm", **options)]
)
def test_momentum_can_look_ahead(method):
    """beta = 1/2, a step of 1/5, mean 23/6.

    First d = v = 10 - 23/6 = 37/6: the model moves by v / 5, or by (d + v / 2) / 5. Then d is that
    much smaller.
    """
    first = 37 / 6
    plain, ahead = (
        dict(momentum=0.5, server_lr=0.2, nesterov=nesterov) for nesterov in (False, True)
    )
    model = 10 - first / 5
    velocity = first / 2 + (model - 23 / 6)
    assert averaged(method(**plain)) == pytest.approx(model)
    assert averaged(method(**plain), rounds=2) == pytest.approx(model - velocity / 5)
    model = 10 - (first + first / 2) / 5
    second = model - 23 / 6
    velocity = first / 2 + second
    assert averaged(method(**ahead)) == pytest.approx(model)
    assert averaged(method(**ahead), rounds=2) == pytest.approx(model - (second + velocity / 2) / 5)


@pytest.mark.parametrize(
    ("method", "weight"),
    [
        (FedAvgM(momentum=0.9), -0.425),
        (FedGwc(aggregator="fedavgm", momentum=0.9), -0.425),
        (PFedMe(beta=3.0, weights="samples"), 3.25),
    ],
    ids=lambda one: getattr(one, "kind", ""),
)
def test_servers_that_go_beyond_the_mean_take_the_mean_of_running_statistics(method, weight):
    """Two clients return 0.1 and 0.3 in each entry, with 1 and 3 samples: their mean is 0.25.

    From 1, d = 0.75 and the weight becomes 0.25; then d = 0 and v = 0.9 x 0.75 moves it by 0.675.
    With a step of 3 it becomes 1 - 2.25, and d = -1.5 moves it to -1.25 + 4.5. A running variance
    that moved likewise would be below 0 with finite weights, and all outputs NaN.
    """
    layout = Layout(nn.BatchNorm1d(1), torch.float64)
    start = torch.ones(1, layout.size, dtype=torch.float64)
    shared = method.averaging.init_clusters(start, 2, layout)
    returned = torch.tensor([[0.1], [0.3]], dtype=torch.float64).expand(2, layout.size)
    message = Message(returned, {"samples": torch.tensor([1.0, 3.0])}, torch.arange(2))
    for _ in range(2):
        shared = method.averaging.update_models(shared, message, torch.zeros(2).long(), 1)
    trained, statistics = shared.models[0].split([2, layout.size - 2])
    assert trained.tolist() == pytest.approx([weight] * 2)
    assert statistics.tolist() == pytest.approx([0.25] * len(statistics))
    assert len(statistics) >= 2


def test_a_center_to_which_too_few_models_came_back_stays():
    """Three came back: their mean where three are enough, 10 where four are asked for."""
    assert averaged(FeSem(clusters=1, min_group=3)) == pytest.approx(3)
    assert averaged(FeSem(clusters=1, min_group=4)) == 10


def test_fedgwc_hands_its_penalty_to_fedprox():
    """The weight of the penalty is its own, not FedProx's default."""
    ours, plain, default = (
        run_method(method, settings=tiny_settings(rounds=2)).state.shared.models
        for method in (FedGwc(aggregator="fedprox", mu=1.0), FedProx(mu=1.0), FedProx())
    )
    assert torch.equal(ours, plain)
    assert not torch.equal(ours, default)


def test_the_personal_model_of_ditto_has_steps_of_its_own():
    """Twelve samples in batches of 5, 5 and 2 for the global model; five steps are 5, 5, 2, 5 and 5 more."""
    assert run_method(
        Ditto(personal_steps=5), settings=tiny_settings(rounds=1)
    ).train_samples == 6 * (12 + 22)


def median(received):
    return received.models.median(0).values


@pytest.mark.parametrize("method", [FedAvg, FairAvg, FedProx, Ditto])
def test_a_rule_merges_what_came_back(method):
    """The median of 1, 2 and 6, whatever the weights."""
    assert averaged(method(aggregation=median)) == 2


class Forgetful(FedAvg):  # type: ignore[misc]
    """Its merge has no return."""

    kind = "forgetful"

    def aggregate(self, context, shared, message):
        super().aggregate(context, shared, message)


def test_a_forgotten_return_of_a_server_is_one_line():
    with pytest.raises(
        ConfigError,
        match=r"forgetful: aggregate returned None; expected the server's new state: is a",
    ):
        run_method(Forgetful())


@pytest.mark.parametrize(
    "method",
    [OneShot(clusters=2, warmup_rounds=3), Cfl(participation="partial", warmup_rounds=3)],
    ids=lambda one: one.kind,
)
def test_cohorts_too_small_for_the_clusters_are_warned_of(method):
    """Four of twelve have three or more of one half in (20 x 6 + 15) of 495 cohorts, 27 %.

    Of eight they have them in 84 %, and the warning would be an error here.
    """
    federation = tiny_federation(12)
    line = rf"^{method.kind}: .*4 of 12 clients .* a cluster of 6 has the 3 .* about 27 % of the"
    with pytest.warns(StandsStill, match=line):
        make_task(federation, method, "linear", tiny_settings(rounds=9, participation=4))
    for quiet in ({"participation": 8}, {}, {"participation": 4, "rounds": 3}):
        make_task(federation, method, "linear", tiny_settings(**{"rounds": 9, **quiet}))


def test_a_cluster_that_stays_for_want_of_models_is_warned_of():
    """Two of three came back where three are needed: cluster 0 stays; one of one moves cluster 1."""
    models = torch.tensor([[4.0], [8.0]], dtype=torch.float64)
    shared = Clusters(models, models[:, :0], torch.tensor([0, 0, 0, 1]))
    message = Message(
        torch.tensor([[1.0], [2.0], [6.0]], dtype=torch.float64),
        {"samples": torch.ones(3)},
        torch.tensor([0, 1, 3]),
    )
    with pytest.warns(TooFewUpdates, match="its model stays as it was"):
        moved = Averaging().update_models(
            shared, message, shared.label[message.ids], torch.tensor([3, 1])
        )
    assert moved.models.tolist() == [[4.0], [6.0]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        moved = Averaging().update_models(
            shared, message, shared.label[message.ids], torch.tensor([2, 1])
        )
    assert moved.models.tolist() == [[1.5], [6.0]]
