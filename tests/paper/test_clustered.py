"""IFCA, FeSEM, CFL and one-shot clustering: what they reduce to, and the groups they find."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from coterie import testing
from coterie.data.federation import Federation, TestSet
from coterie.engine.task import LocalTraining
from coterie.exchange.base import Message
from coterie.methods.base import Method
from coterie.methods.cfl import Cfl, CflClusters
from coterie.methods.fedavg import FairAvg, FedAvg
from coterie.methods.fesem import FeSem, FeSemClusters
from coterie.methods.ifca import Ifca, IfcaModels, _choose_candidates
from coterie.methods.oneshot import OneShot
from coterie.methods.server import Clusters, ServerContext
from coterie.models.layout import Layout
from coterie.rng import Rng
from coterie.runtime.loop import Loop

pytestmark = pytest.mark.paper


def follow(
    method: Method, federation: Federation | None = None, model: Any = "linear", **settings: Any
) -> Loop:
    """Run a method to its end."""
    return testing.run_method(
        method, federation=federation, model=model, settings=testing.tiny_settings(**settings)
    )


def regressions(directions: Tensor, clients: int, *, noise: float = 0.0) -> Federation:
    """Client i has targets y = x . w with w the direction i modulo their number; 20 samples in the plane."""
    stream = Rng(0).generator("regressions")
    x = torch.from_numpy(stream.normal(size=(clients, 20, 2)))
    truth = torch.arange(clients) % len(directions)
    y = torch.einsum("cnd,cd->cn", x, directions[truth]) + noise * torch.from_numpy(
        stream.normal(size=(clients, 20))
    )
    test = TestSet(x[0], y[0][:, None], "first")
    zeros = torch.zeros(clients, dtype=torch.int64)
    split = torch.zeros(clients, 20, dtype=torch.int64)
    split[:, 16:] = 1
    return Federation(x, y[:, :, None], split, (test,), zeros, torch.arange(clients), clients, 0)


def slope() -> nn.Module:
    """y = x . w, from w = 0 unless it is drawn."""
    return nn.Linear(2, 1, bias=False)


def angles(*degrees: float) -> Tensor:
    """Unit vectors."""
    radians = torch.tensor(degrees, dtype=torch.float64) * math.pi / 180
    return torch.stack([radians.cos(), radians.sin()], dim=1)


def same_groups(label: Tensor, truth: Tensor) -> bool:
    """Whether two groupings are one."""
    return torch.equal(label[:, None] == label, truth[:, None] == truth)


DESCENT = LocalTraining(epochs=5, batch_size=20, optimizer="sgd", lr=0.1)

# ---------------------------------------------------------------- IFCA


def test_ifca_with_one_cluster_is_fedavg():
    """C = 1, for averaging models and for averaging gradients with equal samples."""
    plain = follow(FedAvg()).state.shared.models
    assert torch.equal(follow(Ifca(clusters=1)).state.shared.models, plain)
    by_gradients = follow(Ifca(clusters=1, averaging_of="gradients")).state.shared.models
    torch.testing.assert_close(by_gradients, plain, rtol=0, atol=1e-12)


def test_ifca_breaks_ties_towards_the_first_cluster_and_keeps_empty_ones():
    """With two equal models everybody takes cluster 0, and cluster 1 stays as it was, bit for bit."""
    loop = follow(Ifca(clusters=2), rounds=0)
    models = loop.state.shared.models[:1].expand(2, -1).clone()
    loop.state = dataclasses.replace(
        loop.state, shared=dataclasses.replace(loop.state.shared, models=models)
    )
    loop.settings = dataclasses.replace(loop.settings, rounds=1)
    loop.run_next_round()
    after = loop.state.shared.models
    assert torch.equal(after[1], models[1])
    assert not torch.equal(after[0], models[0])


@pytest.mark.option("Ifca.averaging_of", "gradients")
def test_ifca_divides_gradients_by_all_participants():
    """Two of six clients chose cluster 1: it moves by 2/6 of their mean update; a lone group of one can be skipped."""
    layout = Layout(nn.Linear(2, 1), torch.float64)
    context, old = (
        ServerContext(0, Rng(0).at_round(0), layout, 6),
        torch.zeros(2, 3, dtype=torch.float64),
    )
    params = torch.arange(18, dtype=torch.float64).reshape(6, 3)
    fields = {"label": torch.tensor([0, 1, 0, 0, 1, 0]), "samples": torch.arange(1.0, 7.0)}
    message = Message(params, fields, torch.arange(6))
    shared = dataclasses.replace(follow(Ifca(clusters=2), rounds=0).state.shared, models=old)
    moved = (
        Ifca(clusters=2, averaging_of="gradients", step=0.5)
        .aggregate(context, shared, message)
        .models
    )
    torch.testing.assert_close(moved[1], 0.5 * params[[1, 4]].sum(0) / 6)
    skipped = Ifca(clusters=2, min_group=3).aggregate(context, shared, message).models
    assert torch.equal(skipped[1], old[1])
    assert not torch.equal(skipped[0], old[0])


def test_ifca_can_share_all_but_the_last_layer():
    """The first layer is the mean over everybody in every cluster, the last one only over its own clients."""
    layout = Layout(nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1)), torch.float64)
    params = torch.tensor([[1.0, 10.0, 100.0], [3.0, 30.0, 300.0]], dtype=torch.float64)
    message = Message(
        params,
        {"label": torch.tensor([0, 1]), "samples": torch.tensor([1.0, 1.0])},
        torch.arange(2),
    )
    shared = dataclasses.replace(
        follow(Ifca(clusters=2), rounds=0).state.shared, models=torch.zeros_like(params)
    )
    merged = Ifca(clusters=2, share_representation=True).aggregate(
        ServerContext(0, Rng(0), layout, 2), shared, message
    )
    assert merged.models.tolist() == [[2.0, 10.0, 100.0], [2.0, 30.0, 300.0]]


def test_ifca_recovers_a_mixture_of_regressions():
    """Two opposite slopes: from balanced first models the groups are exact and the models are the slopes."""
    federation = regressions(angles(20, 200), 8)
    loop = follow(
        Ifca(clusters=2, start="resample", resample_share=0.4),
        federation,
        slope,
        local=DESCENT,
        rounds=12,
    )
    served, info = loop.method.serving_model(
        loop._make_round(11, torch.arange(8), torch.arange(8)), loop.state
    )
    assert same_groups(info["label"], torch.arange(8) % 2)
    torch.testing.assert_close(served, angles(20, 200)[torch.arange(8) % 2], rtol=0, atol=1e-3)


def test_ifca_resamples_until_clusters_attract_their_share():
    """The first set leaves a cluster empty, the second is balanced, the third too: the second is kept."""
    method = Ifca(clusters=2, start="resample", candidates=3, resample_share=0.5)
    loop = follow(method, rounds=0)
    assert loop.state.shared.models.shape == (2, 15)
    candidates = IfcaModels(torch.arange(6.0).reshape(6, 1))
    votes = torch.tensor([[0, 0, 1], [0, 1, 0]])
    message = Message(torch.zeros(2, 0), {"label": votes}, torch.arange(2))
    kept, _ = _choose_candidates(
        method, ServerContext(-1, Rng(0), loop.task.layout, 2), candidates, message
    )
    assert kept.models.flatten().tolist() == [2.0, 3.0]
    lopsided = Message(
        torch.zeros(2, 0), {"label": torch.zeros(2, 3, dtype=torch.int64)}, torch.arange(2)
    )
    kept, _ = _choose_candidates(
        method, ServerContext(-1, Rng(0), loop.task.layout, 2), candidates, lopsided
    )
    assert kept.models.flatten().tolist() == [0.0, 1.0]


@pytest.mark.option("Ifca.start", "random_groups")
def test_ifca_can_start_with_random_groups():
    """While groups are random, each cluster is the FedAvg of its own; afterwards the loss decides."""
    method = Ifca(clusters=2, start="random_groups", group_rounds=1)
    loop = follow(method, rounds=1)
    order = Rng(3).generator("ifca.groups").permutation(6)
    group = torch.from_numpy(order) % 2
    start = loop.task.draw_models(Rng(3), 2)
    trained, _, _ = loop.task.train(start[group], Rng(3).at_round(0), loop.settings.local)
    for cluster in range(2):
        expected = trained[group == cluster].mean(0)
        torch.testing.assert_close(loop.state.shared.models[cluster], expected, rtol=0, atol=1e-12)


def test_a_diverged_model_is_chosen_by_nobody():
    """The first of two models is NaN, so its loss is: everybody trains the second."""
    loop = follow(Ifca(clusters=2), rounds=0)
    models = loop.state.shared.models.clone()
    models[0] = torch.nan
    loop.state = dataclasses.replace(loop.state, shared=IfcaModels(models))
    everybody = torch.arange(6)
    served, info = loop.method.serving_model(loop._make_round(0, everybody, everybody), loop.state)
    assert info["label"].tolist() == [1] * 6
    assert torch.equal(served, models[1].expand(6, -1))


def test_ifca_keeps_the_most_balanced_candidates_when_none_attracts_its_share():
    """The smaller cluster attracts none, one and none of four clients: the second set is kept."""
    method = Ifca(clusters=2, start="resample", candidates=3, resample_share=0.5)
    votes = torch.tensor([[0, 0, 1], [0, 0, 1], [0, 0, 1], [0, 1, 1]])
    message = Message(torch.zeros(4, 0), {"label": votes}, torch.arange(4))
    context = ServerContext(-1, Rng(0), Layout(nn.Linear(1, 1)), 4)
    kept, _ = _choose_candidates(
        method, context, IfcaModels(torch.arange(6.0).reshape(6, 1)), message
    )
    assert kept.models.flatten().tolist() == [2.0, 3.0]


def test_ifcas_groups_are_random_for_so_many_rounds():
    """Two rounds: in rounds 0 and 1 each client is offered one model, from round 2 on all."""
    method, shared = (
        Ifca(clusters=3, start="random_groups", group_rounds=2),
        IfcaModels(torch.zeros(3, 2)),
    )
    message, layout = Message(torch.zeros(6, 0), {}, torch.arange(6)), Layout(nn.Linear(1, 1))
    offered = [
        method.reply(ServerContext(t, Rng(0).at_round(t), layout, 6), shared, message)[
            1
        ].index.shape[1]
        for t in range(4)
    ]
    assert offered == [1, 1, 3, 3]


# ---------------------------------------------------------------- FeSEM


def test_fesem_with_one_center_averages():
    """C = 1 is FairAvg, or FedAvg with weights by samples."""
    assert torch.equal(
        follow(FeSem(clusters=1)).state.shared.models, follow(FairAvg()).state.shared.models
    )
    assert torch.equal(
        follow(FeSem(clusters=1, weights="samples")).state.shared.models,
        follow(FedAvg()).state.shared.models,
    )


@pytest.mark.parametrize("seed", range(5))
def test_both_steps_of_fesem_lower_the_objective(seed: int):
    """The mean squared distance to one's center never rises, in the E-step and in the M-step."""
    layout = Layout(nn.Linear(3, 1), torch.float64)
    points = torch.from_numpy(Rng(seed).generator("points").normal(size=(12, 4)))
    label = torch.from_numpy(Rng(seed).generator("label").integers(0, 3, 12))
    centers = torch.from_numpy(Rng(seed).generator("centers").normal(size=(3, 4)))

    def objective(centers: Tensor, label: Tensor) -> float:
        return float((points - centers[label]).square().sum(1).mean())

    shared = FeSemClusters(centers, centers[:, :0], label, torch.zeros(12, dtype=torch.bool))
    message = Message(points, {"samples": torch.ones(12, dtype=torch.float64)}, torch.arange(12))
    merged = FeSem(clusters=3).aggregate(ServerContext(0, Rng(0), layout, 12), shared, message)
    before, between = objective(centers, label), objective(centers, merged.label)
    assert objective(merged.models, merged.label) <= between <= before
    frozen = FeSem(clusters=3, recluster_every=2).aggregate(
        ServerContext(1, Rng(0), layout, 12), shared, message
    )
    assert torch.equal(frozen.label, label)


@pytest.mark.option("FeSem.features", "all", "last_layer")
def test_fesem_can_compare_last_layers():
    """The first layer says center 1, the last one center 0."""
    layout = Layout(
        nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)), torch.float64
    )
    centers = torch.tensor([[0.0, 0.0], [10.0, 5.0]], dtype=torch.float64)
    shared = FeSemClusters(
        centers, centers[:, :0], torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.bool)
    )
    message = Message(
        torch.tensor([[9.0, 1.0]], dtype=torch.float64),
        {"samples": torch.ones(1, dtype=torch.float64)},
        torch.arange(1),
    )
    context = ServerContext(0, Rng(0), layout, 1)
    assert FeSem(clusters=2).aggregate(context, shared, message).label.tolist() == [1]
    assert FeSem(clusters=2, features="last_layer").aggregate(
        context, shared, message
    ).label.tolist() == [0]


def test_strangers_are_served_by_the_largest_cluster():
    """Clients 0 to 2 were seen in cluster 1, client 3 in cluster 0; client 4 was not: it is served cluster 1."""
    models = torch.tensor([[0.0], [1.0]])
    seen = torch.tensor([True, True, True, True, False])
    shared = FeSemClusters(models, models[:, :0].double(), torch.tensor([1, 1, 1, 0, 0]), seen)
    message = Message(torch.zeros(5, 0), {}, torch.arange(5))
    method, context = FeSem(clusters=2), ServerContext(0, Rng(0), Layout(nn.Linear(1, 1)), 5)
    for evaluating, found in ((True, [1, 1, 1, 0, 1]), (False, [1, 1, 1, 0, 0])):
        asked = dataclasses.replace(context, evaluating=evaluating)
        assert method.reply(asked, shared, message)[1].index[:, 0].tolist() == found


def test_first_memberships_are_balanced():
    """Seven clients in three clusters: 3, 2 and 2."""
    loop = follow(FeSem(clusters=3), testing.tiny_federation(num_clients=7), rounds=0)
    assert sorted(torch.bincount(loop.state.shared.label).tolist()) == [2, 2, 3]


# ---------------------------------------------------------------- CFL

SPLITTER = Cfl(eps1=0.02, eps2=0.1, warmup_rounds=3)


def test_cfl_splits_two_opposite_groups_exactly():
    """The mean of two opposite slopes is stationary while no client is content: one split, the planted one."""
    loop = follow(SPLITTER, regressions(angles(0, 180), 8), slope, local=DESCENT, rounds=25)
    assert same_groups(loop.state.shared.label, torch.arange(8) % 2)
    torch.testing.assert_close(
        loop.state.shared.models[loop.state.shared.label],
        angles(0, 180)[torch.arange(8) % 2],
        rtol=0,
        atol=1e-2,
    )


@pytest.mark.full
@pytest.mark.parametrize("participation", ["full", "partial"])
def test_a_second_split_keeps_global_ids(participation: str):
    """Three interleaved groups need two splits; positions inside the first child are not client ids."""
    method = dataclasses.replace(SPLITTER, participation=participation)  # type: ignore[arg-type]
    loop = follow(method, regressions(angles(0, 100, 220), 12), slope, local=DESCENT, rounds=60)
    assert same_groups(loop.state.shared.label, torch.arange(12) % 3)


def test_cfl_does_not_split_one_group():
    """All clients are content at the optimum: the largest update vanishes with the mean."""
    loop = follow(SPLITTER, regressions(angles(30), 8), slope, local=DESCENT, rounds=25)
    assert len(loop.state.shared.models) == 1


@pytest.mark.full
@pytest.mark.parametrize(
    "changes",
    [
        {"warmup_rounds": 99},
        {"eps1": 0.0},
        {"eps2": 9.0},
        {"min_cluster_size": 5},
        {"gamma_max": 1.0},
    ],
)
def test_every_condition_of_a_split_counts(changes: dict[str, Any]):
    """Each alone keeps one cluster: too early, mean too large, updates too small, parts too small, cut too weak."""
    method = dataclasses.replace(SPLITTER, **changes)
    assert (
        len(
            follow(
                method, regressions(angles(0, 180), 8), slope, local=DESCENT, rounds=25
            ).state.shared.models
        )
        == 1
    )


def test_cfl_accepts_a_clear_cut():
    """Opposite groups have cosine -1 across: any gamma below sqrt((1 + 1) / 2) = 1 accepts."""
    method = dataclasses.replace(SPLITTER, gamma_max=0.9, linkage="complete")
    loop = follow(method, regressions(angles(0, 180), 8), slope, local=DESCENT, rounds=25)
    assert same_groups(loop.state.shared.label, torch.arange(8) % 2)


def test_children_start_from_the_parents_model():
    """In the round of the split neither child is averaged: both have the model the parent had before it."""
    federation, before = regressions(angles(0, 180), 8), None
    for rounds in range(3, 26):
        shared = follow(SPLITTER, federation, slope, local=DESCENT, rounds=rounds).state.shared
        if len(shared.models) == 2:
            assert before is not None
            assert torch.equal(shared.models, before.expand(2, -1))
            return
        before = shared.models
    raise AssertionError("no split happened")


def split_in(index: int = 0, since: tuple[int, ...] = (0,) * 6, **changes: Any) -> list[int]:
    """The labels after a round in which two groups of three sent updates (1, 0) and (cos 60, sin 60): cosine 1/2.

    With partial participation the updates are known from the rounds `since` and only the first
    three clients answer.
    """
    method = Cfl(eps1=9.0, eps2=0.5, **{"warmup_rounds": 0, **changes})
    layout, partial = (
        Layout(nn.Linear(2, 1, bias=False), torch.float64),
        method.participation == "partial",
    )
    updates = angles(0, 60).repeat_interleave(3, 0)
    models = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    known = CflClusters(
        models, models[:, :0], torch.zeros(6, dtype=torch.int64), updates if partial else updates[:, :0],
        torch.tensor(since),
    )  # fmt: skip
    answered = torch.arange(3 if partial else 6)
    samples = torch.ones(len(answered), dtype=torch.float64)
    message = Message(models + updates[answered], {"samples": samples}, answered)
    return method.aggregate(ServerContext(index, Rng(0), layout, 6), known, message).label.tolist()


def test_gamma_max_is_compared_with_the_root():
    """The cosine across is 1/2, so the bound is sqrt((1 - 1/2) / 2) = 1/2, not 1/4."""
    assert split_in(gamma_max=0.4) == [0, 0, 0, 1, 1, 1]
    assert split_in(gamma_max=0.6) == [0] * 6


def test_an_update_is_old_after_more_than_so_many_rounds():
    """In round 5 an update of round 3 is two rounds old: young enough for a limit of 2, too old for 1."""
    since = (5, 5, 5, 3, 4, 4)
    assert split_in(5, since, participation="partial", max_age=2) == [0, 0, 0, 1, 1, 1]
    assert split_in(5, since, participation="partial", max_age=1) == [0] * 6
    assert split_in(5, (5, 5, 5, -1, 4, 4), participation="partial") == [0] * 6


def test_the_first_split_may_happen_right_after_the_warm_up():
    """Rounds 0 and 1 are warm-up; round 2 is not."""
    assert split_in(1, warmup_rounds=2) == [0] * 6
    assert split_in(2, warmup_rounds=2) == [0, 0, 0, 1, 1, 1]


@pytest.mark.full
def test_partial_participation_waits_for_every_member():
    """With half of the clients a round, everybody's last update must be known and, if asked, young enough."""
    federation = regressions(angles(0, 180), 8)
    method = dataclasses.replace(
        SPLITTER, eps1=9.0, eps2=0.0, participation="partial", warmup_rounds=0
    )
    first = follow(method, federation, slope, local=DESCENT, rounds=1, participation=0.5)
    assert len(first.state.shared.models) == 1
    assert int((first.state.shared.since >= 0).sum()) == 4
    later = follow(method, federation, slope, local=DESCENT, rounds=15, participation=0.5)
    assert len(later.state.shared.models) > 1
    strict = dataclasses.replace(method, max_age=0)
    assert (
        len(
            follow(
                strict, federation, slope, local=DESCENT, rounds=15, participation=0.5
            ).state.shared.models
        )
        == 1
    )


# ---------------------------------------------------------------- one-shot


def test_one_shot_clusters_once_and_everybody():
    """Before: FedAvg. In the round of the clustering everybody takes part, and the groups are the planted ones."""
    federation = regressions(angles(0, 180), 8)
    loop = follow(
        OneShot(clusters=2, warmup_rounds=3),
        federation,
        slope,
        local=DESCENT,
        rounds=2,
        participation=0.5,
    )
    plain = follow(FedAvg(), federation, slope, local=DESCENT, rounds=2, participation=0.5)
    assert torch.equal(loop.state.shared.models, plain.state.shared.models)
    whole = follow(
        OneShot(clusters=2, warmup_rounds=3),
        federation,
        slope,
        local=DESCENT,
        rounds=8,
        participation=0.5,
    )
    assert same_groups(whole.state.shared.label, torch.arange(8) % 2)
    sizes = whole.record.metrics.query("metric == 'bytes_up'").groupby("round").size()
    assert sizes.tolist() == [4, 4, 8, 4, 4, 4, 4, 4]


def test_one_shot_compares_trained_parameters_alone():
    """Two groups by their weights; running statistics, larger by far, would group them otherwise."""
    layout = Layout(nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1)), torch.float64)
    assert layout.trainable < layout.size
    params = torch.zeros(4, layout.size, dtype=torch.float64)
    params[:, 0] = torch.tensor([0.0, 1.0, 0.0, 1.0])
    params[:, layout.trainable] = torch.tensor([100.0, 100.0, -100.0, -100.0])
    shared = Clusters(params[:1], params[:1, :0], torch.zeros(4, dtype=torch.int64))
    message = Message(params, {"samples": torch.ones(4, dtype=torch.float64)}, torch.arange(4))
    merged = OneShot(clusters=2, warmup_rounds=1).aggregate(
        ServerContext(0, Rng(0).at_round(0), layout, 4), shared, message
    )
    assert merged.label.tolist() == [0, 1, 0, 1]


def test_a_client_is_offered_its_own_clusters_model():
    """Clients 1 and 3 of four ask; they are in the clusters 1 and 0."""
    models = torch.tensor([[5.0, 0.0], [7.0, 0.0]])
    shared = Clusters(models, models[:, :0].double(), torch.tensor([0, 1, 1, 0]))
    message = Message(torch.zeros(2, 0), {}, torch.tensor([1, 3]))
    _, reply = OneShot().reply(
        ServerContext(0, Rng(0), Layout(nn.Linear(1, 1)), 4), shared, message
    )
    assert reply.index.tolist() == [[1], [0]]
