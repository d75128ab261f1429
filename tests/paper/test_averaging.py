"""FedAvg and its relatives: what reduces to what."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from coterie import testing
from coterie.data.federation import Federation
from coterie.engine.task import LocalTraining
from coterie.exchange.base import Message
from coterie.methods import METHODS, server
from coterie.methods.base import Method
from coterie.methods.ditto import Ditto, personal_training
from coterie.methods.fedavg import FairAvg, FedAvg, FedAvgM
from coterie.methods.fedprox import FedProx
from coterie.methods.server import Averaging, Clusters, ServerContext, gradient_variance_report
from coterie.rng import Rng
from coterie.runtime.loop import Loop

pytestmark = pytest.mark.paper
SGD = LocalTraining(batch_size=5, optimizer="sgd", lr=0.1)


def follow(method: Method, federation: Federation | None = None, **settings: Any) -> Loop:
    """Run a method to its end on the tiny federation."""
    return testing.run_method(
        method, federation=federation, settings=testing.tiny_settings(**settings)
    )


def model(loop: Loop) -> Tensor:
    """The server's only model."""
    return loop.state.shared.models[0]


def uneven() -> Federation:
    """A federation whose clients have 12, 11, ... training samples."""
    federation = testing.tiny_federation()
    split = federation.split.clone()
    for client in range(len(split)):
        split[client, :client] = -1
    return dataclasses.replace(federation, split=split)


def test_one_full_batch_step_is_gradient_descent_on_all_data():
    """FedAvg with one full-batch step a round moves as the pooled data's gradient does, whatever their sizes."""
    federation = uneven()
    local = LocalTraining(steps=1, batch_size=100, optimizer="sgd", lr=0.5)
    loop = follow(FedAvg(), federation, local=local, rounds=3)
    row = loop.task.draw_models(Rng(3), 1)[0]
    inside = federation.split == 0
    x, y = federation.x[inside], federation.y[inside]
    weight, bias = row[:12].reshape(3, 4).clone(), row[12:].clone()
    for _ in range(3):
        weight, bias = weight.requires_grad_(), bias.requires_grad_()
        loss = torch.nn.functional.cross_entropy(x @ weight.T + bias, y)
        g_weight, g_bias = torch.autograd.grad(loss, [weight, bias])
        weight, bias = (weight - 0.5 * g_weight).detach(), (bias - 0.5 * g_bias).detach()
    torch.testing.assert_close(model(loop), torch.cat([weight.flatten(), bias]), rtol=0, atol=1e-12)


def test_the_first_loss_is_that_of_the_model_sent():
    """Losses are measured before the step: the first full batch shows the broadcast model's loss."""
    loop = follow(FedAvg(), local=dataclasses.replace(SGD, batch_size=100), rounds=1)
    start = loop.task.draw_models(Rng(3), 1).expand(6, -1)
    _, info, _ = loop.task.train(
        start, Rng(3).at_round(0), dataclasses.replace(SGD, batch_size=100)
    )
    torch.testing.assert_close(info["losses"][:, 0], loop.task.loss(start, "train"))


def test_equal_samples_make_fedavg_fair():
    """With the same number of samples FedAvg and FairAvg are one method; with different ones they are not."""
    assert torch.equal(model(follow(FedAvg())), model(follow(FairAvg())))
    assert not torch.equal(model(follow(FedAvg(), uneven())), model(follow(FairAvg(), uneven())))
    assert torch.equal(
        model(follow(FedAvg(weights="uniform"), uneven())), model(follow(FairAvg(), uneven()))
    )


def test_a_server_without_momentum_is_fedavg():
    """FedAvgM with beta = 0 and a step of 1."""
    assert torch.equal(model(follow(FedAvgM(momentum=0.0))), model(follow(FedAvg())))
    with_momentum = model(follow(FedAvgM(momentum=0.9), rounds=3))
    assert not torch.allclose(with_momentum, model(follow(FedAvg(), rounds=3)))
    assert not torch.allclose(
        with_momentum, model(follow(FedAvgM(momentum=0.9, nesterov=True), rounds=3))
    )


def test_the_first_round_with_momentum_is_not_lost():
    """v = d in the first round: FedAvgM starts as FedAvg does, with half a step where the server's lr is 1/2."""
    plain, start = (
        model(follow(FedAvg(), rounds=1)),
        follow(FedAvg(), rounds=0).state.shared.models[0],
    )
    torch.testing.assert_close(model(follow(FedAvgM(), rounds=1)), plain, rtol=0, atol=1e-15)
    half = model(follow(FedAvgM(server_lr=0.5), rounds=1))
    torch.testing.assert_close(half, (start + plain) / 2, rtol=0, atol=1e-15)


def test_fedprox_without_penalty_is_fedavg():
    """mu = 0."""
    assert torch.equal(model(follow(FedProx(mu=0.0))), model(follow(FedAvg())))


def test_the_penalty_acts_from_the_second_step_on():
    """At the anchor its gradient is 0, so the first step is FedAvg's and the second is not."""
    one, two = dataclasses.replace(SGD, steps=1), dataclasses.replace(SGD, steps=2)
    assert torch.equal(
        model(follow(FedProx(mu=1.0), local=one, rounds=1)),
        model(follow(FedAvg(), local=one, rounds=1)),
    )
    gap = model(follow(FedProx(mu=1.0), local=two, rounds=1)) - model(
        follow(FedAvg(), local=two, rounds=1)
    )
    assert float(gap.abs().max()) > 1e-3


def test_a_stronger_penalty_keeps_clients_nearer():
    """The distance from the model sent falls with mu (an aliased anchor would leave it unchanged)."""
    loop = follow(FedAvg(), rounds=0)
    start = loop.task.draw_models(Rng(3), 1).expand(6, -1)
    gaps = []
    for mu in (0.0, 0.1, 1.0, 4.0):
        params, _, _ = loop.task.train(start, Rng(3).at_round(0), SGD, anchor=start, prox=mu)
        gaps.append(float((params - start).norm()))
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] < 0.8 * gaps[0]


def test_sampling_by_samples_follows_the_counts():
    """Clients that enrolled with 9 of 12 samples are drawn 3/4 of the time (4 standard errors of 2,000 rounds)."""
    federation = testing.tiny_federation(num_clients=6)
    split = federation.split.clone()
    split[1:, 1:] = -1  # client 0 keeps 12 samples, the five others one each
    method = FedProx(sampling="samples")
    loop = follow(method, dataclasses.replace(federation, split=split), rounds=0)
    shared = loop.state.shared
    assert shared.samples.tolist() == [12.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    drawn = [method.select_cohort(shared, Rng(0).at_round(t), 6, 3).tolist() for t in range(1000)]
    absent = sum(0 not in cohort for cohort in drawn) / 1000
    expected = 5 / 17 * 4 / 16 * 3 / 15  # three draws without replacement miss client 0
    assert absent == pytest.approx(expected, abs=4 * (expected / 1000) ** 0.5)


def test_a_client_with_three_times_the_samples_is_drawn_three_times_as_likely():
    """Of weights (3, 1, 1, 1, 1, 1) two draws without replacement miss the first with probability 5/8 x 4/7."""
    method, federation = FedProx(sampling="samples"), testing.tiny_federation(num_clients=6)
    split = federation.split.clone()
    split[0, 3:], split[1:, 1:] = -1, -1
    shared = follow(method, dataclasses.replace(federation, split=split), rounds=0).state.shared
    assert shared.samples.tolist() == [3.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    absent = (
        sum(
            0 not in method.select_cohort(shared, Rng(0).at_round(t), 6, 2).tolist()
            for t in range(1000)
        )
        / 1000
    )
    expected = 20 / 56
    assert absent == pytest.approx(expected, abs=4 * (expected * (1 - expected) / 1000) ** 0.5)


def test_dittos_global_track_is_fedavg_bit_for_bit():
    """Personal training leaves no trace in it, interleaved or not, and both reach the same participants."""
    for interleaved in (False, True):
        ditto = follow(Ditto(interleaved=interleaved), participation=0.5)
        assert torch.equal(model(ditto), model(follow(FedAvg(), participation=0.5)))


@pytest.mark.option("Ditto.interleaved", False)
def test_ditto_without_penalty_is_local_training():
    """lambda = 0: each client's personal model is trained on its own data alone, from the first model."""
    loop = follow(Ditto(lam=0.0), rounds=3)
    params = loop.task.initial_models(Rng(3))
    for index in range(3):
        params, _, _ = loop.task.train(
            params, Rng(3).at_round(index), loop.settings.local, purpose="batches.personal"
        )
    assert torch.equal(loop.state.memory.model, params)
    assert torch.equal(
        loop.method.serving_model(
            loop._make_round(2, torch.arange(6), torch.arange(6)), loop.state
        )[0],
        params,
    )


@pytest.mark.option("Ditto.interleaved", True)
def test_interleaved_tracks_see_the_same_batches():
    """lambda = 0 from the same start: after one round the personal model is the one sent back."""
    loop = follow(Ditto(lam=0.0, interleaved=True), rounds=1)
    assert torch.equal(loop.state.memory.model, loop.state.params)


def test_a_large_penalty_holds_the_personal_model_at_the_global_one():
    """lambda * lr = 0.9 contracts the gap by 10 a step: v stays near the w that was received."""
    local = LocalTraining(epochs=1, batch_size=5, optimizer="sgd", lr=1e-3)
    near, far = (follow(Ditto(lam=lam), local=local, rounds=4) for lam in (900.0, 0.0))
    received = follow(FedAvg(), local=local, rounds=3).state.shared.models
    assert float((near.state.memory.model - received).abs().max()) < 1e-2
    assert float((near.state.memory.model - received).norm()) < 0.5 * float(
        (far.state.memory.model - received).norm()
    )


def test_personal_training_has_its_own_length():
    """Three steps instead of the run's; they count among the trained samples."""
    loop = follow(Ditto(personal_steps=3), rounds=1)
    # batches of 5, 5, 2: an epoch is 12 samples, three steps too
    assert loop.train_samples == 6 * (12 + 3 * 5 - 3)
    assert follow(Ditto(personal_epochs=0), rounds=1).train_samples == 6 * 12


def test_personal_epochs_replace_the_steps_of_a_run():
    """The run counts steps; two epochs of the personal model are two epochs all the same."""
    local = LocalTraining(steps=7, batch_size=5, optimizer="sgd")
    assert personal_training(local, 2, None) == LocalTraining(
        epochs=2, batch_size=5, optimizer="sgd"
    )
    assert personal_training(local, 2, 3) == dataclasses.replace(local, steps=3)
    assert personal_training(local, None, None) == local


def test_methods_see_the_same_participants_and_batches():
    """The cohort is keyed by the round alone, for every unclustered method."""
    federation = testing.tiny_federation(num_clients=20)
    cohorts = set()
    for method in (
        FedAvg(),
        FedAvgM(),
        FedProx(),
        FairAvg(),
        Ditto(),
        METHODS["ifca"](),
        METHODS["fesem"](),
    ):
        loop = follow(method, federation, rounds=1, participation=0.3)
        cohorts.add(
            tuple(method.select_cohort(loop.state.shared, Rng(3).at_round(5), 20, 0.3).tolist())
        )
    assert len(cohorts) == 1
    assert len(cohorts.pop()) == 6


@pytest.mark.parametrize(
    "kind", ["fedavg", "fedavgm", "fedprox", "ditto", "cfl", "fedgwc", "sosicfl"]
)
def test_a_cohort_of_two_trains(kind):
    """Where a run asks for two clients a round, their two updates are averaged: the floor of three is for lost ones."""
    options = (
        {"participation": "partial"}
        if kind == "cfl"
        else {"endpoints": 3, "regions": 2}
        if kind == "sosicfl"
        else {}
    )
    before, after = (
        follow(METHODS[kind](**options), rounds=rounds, participation=2, local=SGD)
        for rounds in (0, 2)
    )
    assert not torch.equal(model(before), model(after))


def test_too_few_updates_change_nothing():
    """Two of three clients answered: the privacy floor of three keeps the model; so does a cohort that diverged."""
    loop = follow(FedAvg(), rounds=0)
    context = ServerContext(0, Rng(3).at_round(0), loop.task.layout, 6)
    params = torch.randn(4, 15, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    message = Message(
        params, {"samples": torch.ones(4, dtype=torch.float64)}, torch.tensor([0, 2, 3, 5])
    )
    method, shared = FedAvg(), loop.state.shared
    assert torch.equal(
        method.aggregate(context, shared, message.take_rows(torch.tensor([0, 1]))).models,
        shared.models,
    )
    lost = dataclasses.replace(
        message, params=params.clone().index_fill_(0, torch.tensor([0]), torch.nan)
    )
    merged, reply = server._aggregate_valid(method, {}, context, shared, lost)
    torch.testing.assert_close(merged.models[0], params[1:].mean(0))
    assert reply.index.shape == (4, 0)
    nothing = dataclasses.replace(message, params=torch.full_like(params, torch.nan))
    assert server._aggregate_valid(method, {}, context, shared, nothing)[0] is shared


def test_momentum_rests_in_a_cluster_that_nobody_answered_for():
    """Cluster 0: d = 4 - 2, v = 0.5 * 1 + 2 = 2.5, so the model is 4 - 2.5; cluster 1 keeps its model and its v = 3."""
    models = torch.tensor([[4.0], [8.0]], dtype=torch.float64)
    shared = Clusters(
        models, torch.tensor([[1.0], [3.0]], dtype=torch.float64), torch.tensor([0, 1])
    )
    message = Message(
        torch.full((1, 1), 2.0, dtype=torch.float64), {"samples": torch.ones(1)}, torch.tensor([0])
    )
    moved = Averaging(momentum=0.5).update_models(shared, message, torch.tensor([0]), 1)
    assert moved.models.tolist() == [[1.5], [8.0]]
    assert moved.velocity.tolist() == [[2.5], [3.0]]


def test_models_that_diverged_do_not_count_in_the_variance_of_updates():
    """Five clients moved all 15 parameters by 1, ..., 5: the variance is 15 x 2; the sixth diverged."""
    loop = follow(FedAvg(), rounds=0)
    everybody = torch.arange(6)
    rnd = dataclasses.replace(
        loop._make_round(0, everybody, everybody), metrics=frozenset({"gradient_variance"})
    )
    start = torch.zeros(6, 15, dtype=torch.float64)
    params = torch.arange(1.0, 7.0, dtype=torch.float64)[:, None].expand(6, 15).clone()
    params[5, 3] = torch.nan
    assert gradient_variance_report(rnd, start, params)["gradient_variance"].tolist() == [30.0] * 6


def test_traffic_is_counted_from_the_tensors():
    """15 parameters in float64 down; as many and the number of samples up."""
    metrics = follow(FedAvg(), rounds=1).record.metrics
    down, up = (
        metrics.loc[metrics["metric"] == name, "value"] for name in ("bytes_down", "bytes_up")
    )
    assert down.tolist() == [15 * 8.0] * 6
    assert up.tolist() == [15 * 8.0 + 8] * 6


def test_pooled_training_is_training_on_all_rows_in_one_place():
    """Full-batch steps: gradient descent on everybody's rows, whatever the participation; all have the model."""
    federation = uneven()
    local = LocalTraining(steps=2, batch_size=100, optimizer="sgd", lr=0.5)
    loop = follow(METHODS["pooled"](), federation, local=local, rounds=3, participation=0.5)
    row = loop.task.draw_models(Rng(3), 1)[0]
    inside = federation.split == 0
    x, y = federation.x[inside], federation.y[inside]
    weight, bias = row[:12].reshape(3, 4).clone(), row[12:].clone()
    for _ in range(6):
        weight, bias = weight.requires_grad_(), bias.requires_grad_()
        loss = torch.nn.functional.cross_entropy(x @ weight.T + bias, y)
        g_weight, g_bias = torch.autograd.grad(loss, [weight, bias])
        weight, bias = (weight - 0.5 * g_weight).detach(), (bias - 0.5 * g_bias).detach()
    expected = torch.cat([weight.flatten(), bias]).expand(len(federation), -1)
    torch.testing.assert_close(loop.state.params, expected, rtol=0, atol=1e-12)
    assert loop.train_samples == 3 * 2 * int(inside.sum())


def test_pooled_training_goes_on_with_the_moments_of_its_optimizer():
    """Two rounds of three full-batch steps with momentum, kept, are one of six."""
    local = LocalTraining(
        steps=3,
        batch_size=100,
        optimizer="sgd",
        lr=0.1,
        momentum=0.9,
        persistent_client_optimizer=True,
    )
    twice = follow(METHODS["pooled"](), local=local, rounds=2).state.params
    once = follow(
        METHODS["pooled"](), local=dataclasses.replace(local, steps=6), rounds=1
    ).state.params
    torch.testing.assert_close(twice, once, rtol=0, atol=1e-12)
    fresh = dataclasses.replace(local, persistent_client_optimizer=False)
    assert not torch.allclose(follow(METHODS["pooled"](), local=fresh, rounds=2).state.params, once)
