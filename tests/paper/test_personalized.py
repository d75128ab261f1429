"""Baselines with a personal model: claims of their papers where the answer is known, above all linear regression."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from coterie import testing
from coterie.data.federation import Federation
from coterie.engine.task import LocalTraining
from coterie.errors import ConfigError
from coterie.methods.apfl import Apfl
from coterie.methods.base import Method
from coterie.methods.fedavg import FedAvg
from coterie.methods.fedper import DFedAlt, FedBN, FedPer, FedRep
from coterie.methods.perfedavg import PerFedAvg
from coterie.methods.pfedme import PFedMe
from coterie.rng import Rng
from coterie.runtime.loop import Loop

pytestmark = pytest.mark.paper
SGD = LocalTraining(batch_size=5, optimizer="sgd", lr=0.1)
WHOLE = LocalTraining(steps=1, batch_size=100, optimizer="sgd", lr=0.1)
"""One step on all data of a client."""


def follow(method: Method, federation: Federation | None = None, **settings: Any) -> Loop:
    """Run a method to its end on the tiny federation."""
    return testing.run_method(
        method, federation=federation, settings=testing.tiny_settings(**{"local": SGD, **settings})
    )


def model(loop: Loop) -> Tensor:
    """The server's only model."""
    return loop.state.shared.models[0]


def served(loop: Loop) -> Tensor:
    """The model of each client after the last round."""
    last = loop.settings.rounds - 1
    return loop.method.serving_model(
        loop._make_round(last, torch.arange(6), torch.arange(6)), loop.state
    )[0]


class Quadratic:
    """Linear regression, in which each client's loss is a parabola with a known minimum."""

    def __init__(self) -> None:
        tiny = testing.tiny_federation()
        rule = torch.tensor([[1.0, -2.0, 0.5, 0.0], [-1.0, 1.0, 0.0, 2.0]], dtype=torch.float64)

        def targets(x: Tensor, cluster: Tensor | int) -> Tensor:
            return (
                x * rule[cluster].reshape(*rule[cluster].shape[:-1], *[1] * (x.ndim - 2), 4)
            ).sum(-1, keepdim=True)

        tests = tuple(
            dataclasses.replace(test, y=targets(test.x, c)) for c, test in enumerate(tiny.tests)
        )
        noise = torch.from_numpy(Rng(0).generator("noise").normal(size=(6, 16, 1)))
        y = torch.stack([targets(x, i % 2) for i, x in enumerate(tiny.x)]) + noise
        self.federation = dataclasses.replace(tiny, y=y, tests=tests, classes=0)
        rows = torch.cat([tiny.x[:, :12], torch.ones(6, 12, 1, dtype=torch.float64)], 2)
        self.hessian = 2 * rows.mT @ rows / 12
        self.minimum = torch.linalg.lstsq(rows, y[:, :12]).solution[..., 0]

    def gradient(self, params: Tensor) -> Tensor:
        """Of each client's loss at its model."""
        return (self.hessian @ (params - self.minimum)[..., None])[..., 0]

    def start(self) -> Tensor:
        """The first model."""
        return follow(FedAvg(), self.federation, rounds=0).state.shared.models[0]


QUADRATIC = Quadratic()
EYE = torch.eye(5, dtype=torch.float64)


def test_the_parabolas_are_the_losses():
    """FedAvg with one step on all data is a step along the mean gradient."""
    expected = QUADRATIC.start() - 0.1 * QUADRATIC.gradient(QUADRATIC.start().expand(6, -1)).mean(0)
    loop = follow(FedAvg(), QUADRATIC.federation, rounds=1, local=WHOLE)
    torch.testing.assert_close(model(loop), expected, rtol=0, atol=1e-12)


@pytest.mark.option("Apfl.weights", "uniform")
@pytest.mark.option("PFedMe.weights", "uniform")
@pytest.mark.option("PerFedAvg.weights", "uniform")
@pytest.mark.option("FedPer.weights", "uniform")
@pytest.mark.option("FedRep.weights", "uniform")
@pytest.mark.option("FedBN.weights", "uniform")
@pytest.mark.option("Apfl.weights", "samples")
@pytest.mark.option("PFedMe.weights", "samples")
@pytest.mark.option("PerFedAvg.weights", "samples")
@pytest.mark.option("FedPer.weights", "samples")
@pytest.mark.option("FedRep.weights", "samples")
@pytest.mark.option("FedBN.weights", "samples")
@pytest.mark.parametrize(
    "method",
    [Apfl(), PFedMe(), PerFedAvg(), FedPer(0), FedRep(0), FedBN()],
    ids=lambda method: method.kind,
)
def test_models_count_alike_or_by_samples(method: Any):
    """Clients with 12, 11, ..., 7 samples send models; the server's is the mean that each setting names."""
    tiny = testing.tiny_federation()
    split = tiny.split.clone()
    for client in range(6):
        split[client, :client] = -1
    federation = dataclasses.replace(tiny, split=split)
    samples = torch.arange(12.0, 6.0, -1.0, dtype=torch.float64)
    for weights, share in (("uniform", torch.ones_like(samples)), ("samples", samples)):
        loop = follow(dataclasses.replace(method, weights=weights), federation, rounds=1)
        expected = (loop.state.params * (share / share.sum())[:, None]).sum(0)
        torch.testing.assert_close(model(loop), expected, rtol=0, atol=1e-12)


# ---------------------------------------------------------------- APFL


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_apfls_shared_model_is_fedavgs(alpha: float):
    """What clients keep to themselves leaves no trace in it."""
    expected = model(follow(FedAvg(), participation=0.5))
    torch.testing.assert_close(
        model(follow(Apfl(alpha), participation=0.5)), expected, rtol=0, atol=1e-12
    )


def test_apfl_goes_from_fedavg_to_local_training():
    """With alpha = 1 a client's model never hears of the others; with 0 it is what it sent to FedAvg's server."""
    loop, fedavg = follow(Apfl(1.0), rounds=3), follow(FedAvg(), rounds=3)
    alone = loop.task.initial_models(Rng(3))
    for index in range(3):
        alone, _, _ = loop.task.train(alone, Rng(3).at_round(index), SGD)
    torch.testing.assert_close(served(loop), alone, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        served(follow(Apfl(0.0), rounds=3)), fedavg.state.params, rtol=0, atol=1e-12
    )


@pytest.mark.option("Apfl.adaptive", False)
@pytest.mark.option("Apfl.adaptive", True)
@pytest.mark.parametrize("adaptive", [False, True])
def test_apfls_steps_are_the_papers(adaptive: bool):
    """Three rounds of one step, written out on parabolas: w, v and alpha move from the values before the step."""
    loop = follow(Apfl(0.4, adaptive=adaptive), QUADRATIC.federation, rounds=3, local=WHOLE)
    w = v = QUADRATIC.start().expand(6, -1)
    alpha = torch.full((6, 1), 0.4, dtype=torch.float64)
    for _ in range(3):
        slope = QUADRATIC.gradient(alpha * v + (1 - alpha) * w)
        own, received = w - 0.1 * QUADRATIC.gradient(w), alpha
        if adaptive:
            alpha = (alpha - 0.1 * ((v - w) * slope).sum(1, keepdim=True)).clamp(0, 1)
        v, w = v - 0.1 * received * slope, own.mean(0).expand(6, -1)
    torch.testing.assert_close(loop.state.memory.alpha, alpha[:, 0], rtol=0, atol=1e-12)
    torch.testing.assert_close(served(loop), alpha * v + (1 - alpha) * own, rtol=0, atol=1e-12)
    recorded = loop.record.metrics
    last = recorded[(recorded["metric"] == "alpha") & (recorded["round"] == 2)]["value"]
    assert last.tolist() == pytest.approx(alpha[:, 0].tolist())


@pytest.mark.full
def test_apfls_share_grows_where_clients_differ():
    """The paper's reason for adapting it: the more clients differ, the larger their own share should be.

    Where all have the same data it falls to 0, which is FedAvg; where they differ it rises at most
    clients.
    """
    tiny, settings = (
        QUADRATIC.federation,
        {"rounds": 30, "local": dataclasses.replace(WHOLE, steps=3, lr=0.04)},
    )
    same = dataclasses.replace(tiny, x=tiny.x[:1].expand(6, -1, -1), y=tiny.y[:1].expand(6, -1, -1))
    alike, apart = (
        follow(Apfl(0.3, adaptive=True), data, **settings).state.memory.alpha
        for data in (same, tiny)
    )
    assert alike.tolist() == [0.0] * 6
    assert int((apart > 0.5).sum()) >= 4


# ---------------------------------------------------------------- pFedMe


@pytest.mark.full
def test_pfedmes_personal_model_is_the_proximal_point():
    """On a parabola the minimum of f(theta) + lambda/2 |theta - w|^2 is (H + lambda)^-1 (H c + lambda w)."""
    method = PFedMe(lam=3.0, inner_steps=70, eta=0.05)
    loop = follow(method, QUADRATIC.federation, rounds=2, local=WHOLE)
    w = QUADRATIC.start()
    for _ in range(2):
        pull = QUADRATIC.hessian @ QUADRATIC.minimum[..., None] + 3.0 * w[:, None]
        theta = torch.linalg.solve(QUADRATIC.hessian + 3.0 * EYE, pull)[..., 0]
        w = (w - 0.05 * 3.0 * (w - theta)).mean(0)
    torch.testing.assert_close(served(loop), theta, rtol=0, atol=1e-9)
    torch.testing.assert_close(model(loop), w, rtol=0, atol=1e-9)


@pytest.mark.full
def test_pfedme_minimizes_the_mean_of_the_moreau_envelopes():
    """Their gradients lambda (w - theta_i) = M_i (w - c_i) with M_i = lambda H_i (H_i + lambda)^-1 add up to zero."""
    method = PFedMe(lam=3.0, inner_steps=20, eta=0.8)
    loop = follow(method, QUADRATIC.federation, rounds=25, local=WHOLE, evaluate="final")
    pull = 3.0 * QUADRATIC.hessian @ torch.linalg.inv(QUADRATIC.hessian + 3.0 * EYE)
    expected = torch.linalg.solve(pull.sum(0), (pull @ QUADRATIC.minimum[..., None]).sum(0))[:, 0]
    torch.testing.assert_close(model(loop), expected, rtol=0, atol=1e-4)
    pooled = torch.linalg.solve(
        QUADRATIC.hessian.sum(0), (QUADRATIC.hessian @ QUADRATIC.minimum[..., None]).sum(0)
    )[:, 0]
    assert float((expected - pooled).abs().max()) > 1e-2  # which is FedAvg's, and another


def test_pfedme_with_one_inner_step_is_fedavg_with_a_small_one():
    """From theta = w the penalty has no gradient: w moves by eta lambda times the step of the personal model."""
    expected = follow(
        FedAvg(weights="uniform"), rounds=4, local=dataclasses.replace(WHOLE, lr=0.1 * 0.6)
    ).state
    loop = follow(PFedMe(lam=2.0, inner_steps=1, eta=0.3), rounds=4, local=WHOLE)
    torch.testing.assert_close(model(loop), expected.shared.models[0], rtol=0, atol=1e-12)


def test_pfedmes_server_takes_a_step_of_its_own():
    """w <- (1 - beta) w + beta mean."""
    start, whole = QUADRATIC.start(), follow(PFedMe(), QUADRATIC.federation, rounds=1)
    half = follow(PFedMe(beta=0.5), QUADRATIC.federation, rounds=1)
    torch.testing.assert_close(model(half), (start + model(whole)) / 2, rtol=0, atol=1e-12)


def test_pfedmes_clients_without_a_batch_rest():
    """A client with one step of local training moves w once, however many steps the others take."""
    tiny = testing.tiny_federation()
    split = tiny.split.clone()
    split[0, 5:] = -1
    loop = follow(PFedMe(eta=0.05), dataclasses.replace(tiny, split=split), rounds=1)
    start, theta = loop.task.draw_models(Rng(3), 1)[0], loop.state.memory.model[0]
    torch.testing.assert_close(
        loop.state.params[0], start - 0.75 * (start - theta), rtol=0, atol=1e-12
    )
    assert loop.train_samples == 5 * (5 + 5 * 12)  # five inner steps on each batch


# ---------------------------------------------------------------- Per-FedAvg


@pytest.mark.option("PerFedAvg.hessian", "first_order")
@pytest.mark.option("PerFedAvg.hessian", "free")
@pytest.mark.parametrize("hessian", ["first_order", "free"])
def test_per_fedavgs_steps_are_the_papers(hessian: Any):
    """The gradient of f(w - alpha grad f(w)) on a parabola is (I - alpha H) H (I - alpha H) (w - c), exactly."""
    method = PerFedAvg(alpha=0.2, hessian=hessian)
    loop = follow(method, QUADRATIC.federation, rounds=3, local=WHOLE)
    w, damped = QUADRATIC.start().expand(6, -1), EYE - 0.2 * QUADRATIC.hessian
    for _ in range(3):
        slope = QUADRATIC.hessian @ damped @ (w - QUADRATIC.minimum)[..., None]
        slope = damped @ slope if hessian == "free" else slope
        w = (w - 0.1 * slope[..., 0]).mean(0).expand(6, -1)
    torch.testing.assert_close(model(loop), w[0], rtol=0, atol=1e-9)
    torch.testing.assert_close(served(loop), w - 0.2 * QUADRATIC.gradient(w), rtol=0, atol=1e-9)
    assert loop.train_samples == 3 * 6 * 12 * (4 if hessian == "free" else 2)


@pytest.mark.full
def test_per_fedavg_minimizes_the_loss_after_adaptation():
    """With the Hessian it ends where the mean of those losses is least, which is not the pooled minimum."""
    method, local = PerFedAvg(alpha=0.1, hessian="free"), dataclasses.replace(WHOLE, lr=0.8)
    loop = follow(method, QUADRATIC.federation, rounds=40, local=local, evaluate="final")
    damped = EYE - 0.1 * QUADRATIC.hessian
    curves = damped @ QUADRATIC.hessian @ damped
    expected = torch.linalg.solve(curves.sum(0), (curves @ QUADRATIC.minimum[..., None]).sum(0))[
        :, 0
    ]
    torch.testing.assert_close(model(loop), expected, rtol=0, atol=1e-5)


def test_per_fedavg_without_adaptation_is_fedavg():
    """alpha near 0, in several steps a round."""
    loop = follow(PerFedAvg(alpha=1e-13, adapt_steps=0), local=dataclasses.replace(WHOLE, steps=3))
    fedavg = follow(FedAvg(weights="uniform"), local=dataclasses.replace(WHOLE, steps=3))
    torch.testing.assert_close(model(loop), model(fedavg), rtol=0, atol=1e-11)
    assert torch.equal(served(loop), model(loop).expand(6, -1))


def test_per_fedavg_adapts_in_as_many_steps_as_asked_for():
    """Three full steps, written out; on batches of 5 they are other ones."""
    loop = follow(PerFedAvg(alpha=0.1, adapt_steps=3), QUADRATIC.federation, rounds=1)
    params = model(loop).expand(6, -1)
    for _ in range(3):
        params = params - 0.1 * QUADRATIC.gradient(params)
    torch.testing.assert_close(served(loop), params, rtol=0, atol=1e-12)
    small = follow(
        PerFedAvg(alpha=0.1, adapt_steps=3, adapt_batch_size=5), QUADRATIC.federation, rounds=1
    )
    assert float((served(small) - params).abs().max()) > 1e-3


# ---------------------------------------------------------------- FedPer, FedRep, DFedAlt, FedBN


class Deep(nn.Sequential):
    """A linear representation and a head."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 2, bias=False), nn.Linear(2, 1, bias=False))


def deep(method: Method, **settings: Any) -> Loop:
    """Run a method with that model on the regression; 8 parameters of the body and 2 of the head."""
    changed = testing.tiny_settings(**{"local": WHOLE, **settings})
    return testing.run_method(method, federation=QUADRATIC.federation, model=Deep, settings=changed)


def slopes(params: Tensor) -> Tensor:
    """The gradient of each client's loss, by autograd."""
    found = []
    for row, x, y in zip(
        params, QUADRATIC.federation.x[:, :12], QUADRATIC.federation.y[:, :12], strict=True
    ):
        leaf = row.clone().requires_grad_()
        ((x @ leaf[:8].reshape(2, 4).T @ leaf[8:, None] - y) ** 2).mean().backward()
        found.append(leaf.grad)
    return torch.stack(found)


def test_fedper_averages_the_body_and_each_client_keeps_its_head():
    """Three rounds of one step, written out; a client outside the cohort keeps its head too."""
    loop = deep(FedPer(), rounds=3)
    params = loop.task.initial_models(Rng(3)).clone()
    for _ in range(3):
        params = params - 0.1 * slopes(params)
        sent, params = params, torch.cat([params[:, :8].mean(0).expand(6, -1), params[:, 8:]], 1)
    torch.testing.assert_close(loop.state.params, sent, rtol=0, atol=1e-12)
    torch.testing.assert_close(served(loop), params, rtol=0, atol=1e-12)
    assert not model(loop)[8:].any()
    table = loop.record.metrics
    # the body and the number of samples
    assert set(table[table["metric"] == "bytes_up"]["value"]) == {8 * 8.0 + 8}
    assert set(table[table["metric"] == "bytes_down"]["value"]) == {8 * 8.0}
    early, late = (deep(FedPer(), rounds=rounds, participation=3) for rounds in (0, 1))
    rests = torch.tensor(
        sorted({*range(6)} - {*loop.method.select_cohort(None, Rng(3).at_round(0), 6, 3).tolist()})
    )
    assert torch.equal(early.state.params[rests], late.state.params[rests])


def test_fedper_with_no_layer_of_its_own_is_fedavg_and_with_one_more_it_says_so():
    """The number of layers is counted from the end."""
    assert torch.equal(model(deep(FedPer(0))), model(deep(FedAvg())))
    with pytest.raises(ConfigError, match="nothing is left to share"):
        deep(FedPer(2))


def test_fedrep_fits_the_head_before_the_body():
    """Two rounds of three steps of the head and one of the body, each with the other part fixed, written out."""
    loop = deep(FedRep(head_epochs=3), rounds=2)
    params = loop.task.initial_models(Rng(3)).clone()
    for _ in range(2):
        for _ in range(3):
            params[:, 8:] -= 0.1 * slopes(params)[:, 8:]
        params[:, :8] -= 0.1 * slopes(params)[:, :8]
        sent, params = params, torch.cat([params[:, :8].mean(0).expand(6, -1), params[:, 8:]], 1)
    torch.testing.assert_close(loop.state.params, sent, rtol=0, atol=1e-12)
    assert loop.train_samples == 2 * 6 * 12 * 4


def test_dfedalt_where_everybody_reads_everybody_is_fedrep():
    """The mean over all peers is the server's, and what stays at home is in no message."""
    rest = {"rounds": 3, "local": SGD}
    loop = deep(DFedAlt(num_peers=5, head_epochs=2), order="train_first", **rest)
    fedrep = deep(FedRep(head_epochs=2), **rest)
    torch.testing.assert_close(loop.state.params, served(fedrep), rtol=0, atol=1e-12)
    assert loop.train_samples == fedrep.train_samples
    assert set(loop.record.edges["bytes"]) == {8 * 8.0 + 8}  # the body and the number of samples


def test_dfedalt_trains_the_head_before_the_body_between_its_exchanges():
    """One round with one peer, written out: exchange bodies, then three steps of the head and one of the body."""
    loop = deep(DFedAlt(num_peers=1, head_epochs=3), rounds=1, warmup_epochs=0)
    start = loop.task.initial_models(
        Rng(3)
    ).clone()  # shared by all, so that the exchange changes nothing
    params = start.clone()
    for _ in range(3):
        params[:, 8:] -= 0.1 * slopes(params)[:, 8:]
    params[:, :8] -= 0.1 * slopes(params)[:, :8]
    torch.testing.assert_close(loop.state.params, params, rtol=0, atol=1e-12)
    again = deep(DFedAlt(num_peers=1, head_epochs=3), rounds=2, warmup_epochs=0)
    edges = again.record.edges
    read = edges[edges["round"] == 1].set_index("reader")["read"]
    mixed = params.clone()
    for reader, sender in read.items():
        mixed[reader, :8] = (params[reader, :8] + params[sender, :8]) / 2
    for _ in range(3):
        mixed[:, 8:] -= 0.1 * slopes(mixed)[:, 8:]
    mixed[:, :8] -= 0.1 * slopes(mixed)[:, :8]
    torch.testing.assert_close(again.state.params, mixed, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_fedrep_finds_the_representation_that_clients_share():
    """The paper's claim: with heads of their own, clients find the subspace together that none can find alone.

    Twelve clients with 8 samples of 10 numbers, whose targets depend on two directions, each client
    in its own way. The distance of subspaces (sine of the largest angle) goes to 0; FedAvg's, with
    one head for all, does not.
    """
    stream = Rng(0).generator("subspace")
    basis = torch.linalg.qr(torch.from_numpy(stream.normal(size=(10, 2))))[0]
    tiny = testing.tiny_federation(12, train=8, features=(10,))
    rules = basis @ torch.from_numpy(stream.normal(size=(12, 2, 1)))
    tests = tuple(
        dataclasses.replace(test, y=test.x @ rules[c]) for c, test in enumerate(tiny.tests)
    )
    federation = dataclasses.replace(tiny, y=tiny.x @ rules, tests=tests, classes=0)

    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(10, 2, bias=False), nn.Linear(2, 1, bias=False))

    def distance(method: Method) -> float:
        settings = testing.tiny_settings(
            rounds=60, local=dataclasses.replace(WHOLE, steps=3), evaluate="final"
        )
        loop = testing.run_method(method, federation=federation, model=net, settings=settings)
        found = torch.linalg.qr(model(loop)[:20].reshape(2, 10).T)[0]
        return float(torch.linalg.matrix_norm(found - basis @ (basis.T @ found), 2))

    assert distance(FedRep(head_epochs=5)) < 0.15
    assert distance(FedAvg()) > 0.5


class Normalized(nn.Sequential):
    """A normalization and a linear layer."""

    def __init__(self) -> None:
        super().__init__(nn.BatchNorm1d(4), nn.Linear(4, 3))


@pytest.mark.full
def test_fedbn_gains_where_clients_scale_their_inputs_otherwise():
    """The paper's claim: under feature shift a normalization of one's own makes the clients' problems one problem.

    All label by one rule; inputs of client i are stretched by 4^i and moved by i. What each client
    keeps is its own.
    """
    tiny = testing.tiny_federation(clusters=1)
    scale = 4.0 ** torch.arange(6, dtype=torch.float64)[:, None, None]
    move = torch.arange(6, dtype=torch.float64)[:, None, None]
    (test,) = tiny.tests
    tests = tuple(dataclasses.replace(test, x=test.x * scale[i, 0] + move[i, 0]) for i in range(6))
    federation = dataclasses.replace(
        tiny, x=tiny.x * scale + move, tests=tests, test_of=torch.arange(6)
    )
    local = LocalTraining(epochs=2, batch_size=6, optimizer="sgd", lr=0.3)

    def accuracy(method: Method) -> tuple[float, Loop]:
        settings = testing.tiny_settings(rounds=12, local=local, evaluate="final")
        loop = testing.run_method(
            method, federation=federation, model=Normalized, settings=settings
        )
        return float(loop.task.evaluate(served(loop))["accuracy"].mean()), loop

    (own, loop), (one, _) = accuracy(FedBN()), accuracy(FedAvg())
    assert own > one + 0.15
    apart = served(loop)
    shared = dict(zip(loop.task.layout.original_names, loop.task.layout.slots, strict=True))
    for name, slot in shared.items():
        same = bool((apart[:, slot.start : slot.stop] == apart[:1, slot.start : slot.stop]).all())
        assert same == (name.startswith("1.") or name.endswith("num_batches_tracked"))
