"""SosicFL: endpoints, mixtures and regions; what it reduces to; what regions are good for."""

import copy
import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.decomposition import LatentDirichletAllocation
from torch import Tensor, nn
from torch.nn import functional

from coterie import testing
from coterie.data.federation import Federation, TestSet
from coterie.engine.task import LocalTraining, Task
from coterie.errors import ConfigError, ModelError
from coterie.exchange.base import Message
from coterie.functional import simplex
from coterie.methods.base import Method
from coterie.methods.ditto import Ditto
from coterie.methods.fedavg import FedAvg
from coterie.methods.server import ServerContext, fetch_served_models
from coterie.methods.sosicfl import SosicFl, SosicFlAll, SosicFlPlus
from coterie.models import simplex_layers
from coterie.models.layout import Layout
from coterie.papers.sosicfl import PublishedSosicFl, PublishedSosicFlAll, PublishedSosicFlPlus
from coterie.rng import Rng
from coterie.runtime.loop import Loop
from coterie.testing.tiny import build_task

pytestmark = pytest.mark.paper
SGD = LocalTraining(batch_size=20, optimizer="sgd", lr=0.2)


def follow(
    method: Method, federation: Federation | None = None, model: Any = "linear", **settings: Any
) -> Loop:
    """Run a method to its end."""
    return testing.run_method(
        method, federation=federation, model=model, settings=testing.tiny_settings(**settings)
    )


def mlp() -> nn.Module:
    """Two layers with a batch normalization between."""
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


def convolutional() -> nn.Module:
    """Ends like SqueezeNet: a 1x1 convolution, ReLU, mean over the image."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.ReLU(),
        nn.Conv2d(4, 3, 1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


def sequential() -> nn.Module:
    """Two linear layers."""
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def drawn(factory: Any, endpoints: int) -> tuple[Layout, Tensor]:
    """A layout and a row whose endpoints are drawn independently."""
    with Rng(0).temporary_torch_seed("shape"):
        layout = Layout(factory(), torch.float64)
    row = torch.from_numpy(Rng(1).generator("row").normal(size=layout.size)) / 2
    for slot in layout.slots:
        if "running_var" in slot.name:
            row[slot.start : slot.stop] = 1.0
    assert endpoints in {slot.shape[0] for slot in simplex_layers.endpoint_slots(layout)}
    return layout, row


def outputs(
    layout: Layout, row: Tensor, alpha: Tensor, x: Tensor, *, training: bool = False
) -> Tensor:
    """Run a simplex model at a point of the simplex."""
    inputs = simplex_layers.alpha_inputs(layout, alpha)
    module = layout.train_module if training else layout.eval_module
    return torch.func.functional_call(module, {**layout.split_rows(row), **inputs}, (x,))


@pytest.mark.parametrize("plain", [sequential, convolutional])
def test_a_corner_is_its_endpoint(plain: Any):
    """w(e_m) is the plain model with endpoint m for its last layer, linear or a 1x1 convolution."""
    factory = simplex_layers.simplex_head(plain, 3)
    layout, row = drawn(factory, 3)
    x = torch.from_numpy(
        Rng(2).generator("x").normal(size=(6, 4) if plain is sequential else (6, 2, 5, 5))
    )
    views = layout.split_rows(row)
    for m in range(3):
        module = plain().double()
        named = dict(module.named_parameters())
        with torch.no_grad():
            for name, tensor in named.items():
                tensor.copy_(views[name][m] if name.startswith("2.") else views[name])
        torch.testing.assert_close(outputs(layout, row, torch.eye(3).double()[m], x), module(x))


def test_equal_endpoints_make_the_position_irrelevant():
    """With identical endpoints neither the outputs nor the update of the features depend on alpha."""
    layout, row = drawn(simplex_layers.simplex_head(sequential, 2), 2)
    for slot in simplex_layers.endpoint_slots(layout):
        first = row[slot.start : slot.stop].reshape(slot.shape)[:1]
        row[slot.start : slot.stop] = first.expand(slot.shape).reshape(-1)
    x = torch.from_numpy(Rng(2).generator("x").normal(size=(6, 4)))
    results = []
    for alpha in (torch.tensor([0.1, 0.9]).double(), torch.tensor([0.7, 0.3]).double()):
        leaf = row.clone().requires_grad_()
        value = outputs(layout, leaf, alpha, x, training=True)
        (gradient,) = torch.autograd.grad(value.square().sum(), leaf)
        own = torch.cat(
            [gradient[s.start : s.stop] for s in layout.slots if s.name.startswith("0.")]
        )
        results.append(torch.cat([value.detach().flatten(), own]))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    "make",
    [
        lambda: simplex_layers.simplex_head(sequential, 3),
        lambda: simplex_layers.simplex_all(sequential, 3),
    ],
)
def test_gradients_of_endpoints_are_scaled_by_their_share(make: Any):
    """Finite differences; and the gradient of endpoint m is alpha_m times that of the composed tensor."""
    layout, row = drawn(make(), 3)
    x = torch.from_numpy(Rng(2).generator("x").normal(size=(6, 4)))
    alpha = torch.tensor([0.5, 0.3, 0.2]).double()

    def loss(row: Tensor) -> Tensor:
        return outputs(layout, row, alpha, x, training=True).square().mean()

    leaf = row.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(leaf), leaf)
    step = 1e-6
    for place in range(0, layout.trainable, 7):
        nudge = torch.zeros_like(row)
        nudge[place] = step
        numeric = float(loss(row + nudge) - loss(row - nudge)) / (2 * step)
        assert float(gradient[place]) == pytest.approx(numeric, abs=1e-7)
    slots = simplex_layers.endpoint_slots(layout)
    assert slots
    for slot in slots:
        parts = gradient[slot.start : slot.stop].reshape(slot.shape)
        whole = parts.sum(0)
        for m in range(3):
            torch.testing.assert_close(parts[m], alpha[m] * whole)


def test_each_sample_can_have_its_own_mixture():
    """Against one forward a sample, for both kinds of heads; a shorter batch uses the first mixtures."""
    for plain, shape in ((sequential, (4,)), (convolutional, (2, 5, 5))):
        for bias in (True, False):
            layout, row = drawn(simplex_layers.simplex_head(plain, 3, bias=bias), 3)
            x = torch.from_numpy(Rng(2).generator("x").normal(size=(4, *shape)))
            alpha = torch.from_numpy(Rng(3).generator("alpha").dirichlet([1, 1, 1], 6))
            single = torch.cat([outputs(layout, row, alpha[i], x[i : i + 1]) for i in range(4)])
            torch.testing.assert_close(outputs(layout, row, alpha, x), single)


def test_a_shared_bias_is_one_tensor():
    """With simplex_bias off the bias is a plain parameter, and only the weight has endpoints."""
    layout = Layout(simplex_layers.simplex_head(sequential, 4, bias=False)())
    shapes = {slot.name: slot.shape for slot in layout.slots}
    assert shapes["2.weight"] == (4, 3, 5)
    assert shapes["2.bias"] == (3,)
    assert [slot.name for slot in simplex_layers.endpoint_slots(layout)] == ["2.weight"]


def test_endpoints_of_all_layers():
    """Every trained tensor has endpoints, the affine part of the normalization too; running statistics do not."""
    layout = Layout(simplex_layers.simplex_all(mlp, 2)())
    trained = [slot for slot in layout.slots if slot.stop <= layout.trainable]
    assert {slot.name for slot in trained} == {
        slot.name for slot in simplex_layers.endpoint_slots(layout)
    }
    assert all(slot.shape[0] == 2 for slot in trained)
    assert sum(slot.stop - slot.start for slot in trained) == 2 * sum(
        p.numel() for p in mlp().parameters()
    )
    assert [slot.shape for slot in layout.slots if "running" in slot.name] == [(5,), (5,)]


def test_only_heads_that_can_be_mixed_are_taken():
    """A last layer of another kind, grouped convolutions and modules for SosicFL-All are refused with the reason."""
    with pytest.raises(
        ModelError, match="the last layer is a BatchNorm1d; a simplex head takes Linear or Conv2d"
    ):
        simplex_layers.simplex_head(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), 2)
    with pytest.raises(ModelError, match="convolutions without groups"):
        simplex_layers.simplex_head(nn.Conv2d(2, 2, 1, groups=2), 2)


def test_endpoints_of_a_given_module_start_at_its_weights_and_it_is_not_changed():
    """A pretrained module: all endpoints are its last layer, whatever the seed; the module itself stays as it was."""
    module = mlp().double()
    before = copy.deepcopy(module.state_dict())
    task = task_of(SosicFl(endpoints=3, regions=2), module, init="given")
    row = SosicFl(endpoints=3, regions=2).draw_first_model(task, Rng(0))
    views = task.layout.split_rows(row)
    assert torch.equal(views["0.weight"], before["0.weight"])
    for endpoint in range(3):
        assert torch.equal(views["3.weight"][endpoint], before["3.weight"])
        assert torch.equal(views["3.bias"][endpoint], before["3.bias"])
    assert all(torch.equal(module.state_dict()[name], value) for name, value in before.items())
    assert torch.equal(SosicFl(endpoints=3, regions=2).draw_first_model(task, Rng(1)), row)


def task_of(
    method: Method, model: Any, federation: Federation | None = None, **settings: Any
) -> Task:
    """A task in float64 for a method's form of a model."""
    federation = federation or testing.tiny_federation()
    return build_task(
        federation.host(federation.ids), method.build_model(model), dtype=torch.float64, **settings
    )


def by_plain_name(layout: Layout, row: Tensor) -> dict[str, Tensor]:
    """The tensors of a model with one endpoint, flat, under the names that they have without endpoints."""
    return {
        slot.name.replace(".parametrizations", "").replace(".original", ""): row[
            slot.start : slot.stop
        ]
        for slot in layout.slots
    }


@pytest.mark.parametrize("kind", [PublishedSosicFl, PublishedSosicFlAll])
def test_one_endpoint_is_fedavg(kind: type[PublishedSosicFl]):
    """M = 1 with the model's own first draw: the same served models, bit for bit."""
    method = kind(endpoints=1, regions=1, endpoint_start="model", assignment="labels", topics="lda")
    ours = follow(method, model=sequential)
    plain = follow(FedAvg(), model=sequential)
    views = by_plain_name(ours.task.layout, ours.state.shared.models[0])
    expected = plain.task.layout.split_rows(plain.state.shared.models[0])
    for name, value in expected.items():
        torch.testing.assert_close(views[name], value.flatten(), rtol=0, atol=1e-13)


def test_one_endpoint_with_personal_models_is_ditto():
    """M = 1: the same served model of every client, pulled to the global one by the same force."""
    method = PublishedSosicFlPlus(endpoints=1, regions=1, endpoint_start="model", lam=0.7)
    ours, theirs = (follow(each, model=sequential, local=SGD) for each in (method, Ditto(lam=0.7)))
    everybody = torch.arange(6)
    served = method.serving_model(ours._make_round(2, everybody, everybody), ours.state)[0]
    views, expected = (
        by_plain_name(ours.task.layout, served[5]),
        theirs.task.layout.split_rows(theirs.state.memory.model[5]),
    )
    assert not torch.equal(theirs.state.memory.model[5], theirs.state.shared.models[0])
    assert views.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(views[name], value.flatten(), rtol=0, atol=1e-13)


def test_warmup_rounds_never_is_plain_simplex_learning():
    """tau = T and M = 2: FedAvg on a line of models, written out by hand with the clients' own draws."""
    rounds, method = 3, SosicFl(endpoints=2, regions=2, warmup_rounds=3)
    federation = testing.tiny_federation()
    loop = follow(method, federation, local=SGD, rounds=rounds, evaluate="final")
    start = method.draw_first_model(loop.task, Rng(3))
    endpoints, bias = start[:24].reshape(2, 3, 4), start[24:].reshape(2, 3)
    for index in range(rounds):
        returned = []
        for client in range(6):
            alpha = Rng(3).at_round(index).generator("alpha", client).uniform(0.0, 1.0, 1)
            mixture = torch.tensor([alpha[0], 1 - alpha[0]])
            x, y = federation.x[client, :12], federation.y[client, :12]
            w = torch.einsum("m,mij->ij", mixture, endpoints).requires_grad_()
            b = (mixture @ bias).requires_grad_()
            loss = functional.cross_entropy(x @ w.T + b, y)
            gw, gb = torch.autograd.grad(loss, [w, b])
            returned.append(
                (endpoints - 0.2 * mixture[:, None, None] * gw, bias - 0.2 * mixture[:, None] * gb)
            )
        endpoints, bias = (torch.stack(parts).mean(0) for parts in zip(*returned, strict=True))
    expected = torch.cat([endpoints.flatten(), bias.flatten()])
    torch.testing.assert_close(loop.state.shared.models[0], expected, rtol=0, atol=1e-12)
    # every client is served the barycenter, to the end
    middle = torch.full((6, 1, 2), 0.5, dtype=torch.float64)
    torch.testing.assert_close(
        loop.evaluate_final(),
        simplex_layers.compose_endpoints(loop.task.layout, expected.expand(6, -1), middle),
    )


def test_the_head_step_is_scaled():
    """One SGD step at the barycenter moves the composed head by 1/M of a plain head's step; scale M undoes that."""
    moves = {}
    for scale in (1.0, 4.0):
        method = PublishedSosicFl(
            endpoints=4, regions=1, warmup_rounds=9, head_lr_scale=scale, endpoint_start="model"
        )
        task = task_of(method, sequential)
        start = method.draw_first_model(task, Rng(0)).expand(6, -1)
        alpha = simplex_layers.alpha_inputs(
            task.layout, torch.full((6, 1, 4), 0.25, dtype=torch.float64)
        )
        after, _, _ = task.train(
            start, Rng(0).at_round(0), dataclasses.replace(SGD, steps=1), inputs=alpha
        )
        slot = next(s for s in task.layout.slots if s.name == "2.weight")
        moved = (after - start)[:, slot.start : slot.stop].reshape(6, 4, -1).mean(1) * math.sqrt(
            scale
        )
        moves[scale] = moved
    torch.testing.assert_close(moves[4.0], 4 * moves[1.0])


def test_first_endpoints_are_xaviers_whatever_the_heads_step():
    """The composed head is gain times the mixture: endpoints times gain have deviation sqrt(2 / (200 + 100)).

    Of 4 x 20,000 normal draws the deviation is within 1.25 % of its mean (5 standard errors of 0.25
    %).
    """
    for scale in (1.0, 9.0):
        method = SosicFl(endpoints=4, regions=1, head_lr_scale=scale)
        task = task_of(
            method, lambda: nn.Sequential(nn.Linear(4, 200), nn.Tanh(), nn.Linear(200, 100))
        )
        weight = task.layout.split_rows(method.draw_first_model(task, Rng(0)))["2.weight"]
        assert float(weight.std()) * math.sqrt(scale) == pytest.approx(
            math.sqrt(2 / 300), rel=0.0125
        )


def test_an_update_at_the_barycenter_is_the_gain_times_the_mean():
    """Endpoints of the head moved by 1, 2 and 6, the features by 5: a gain of 2 makes that 2 x 3."""
    layout = Layout(simplex_layers.simplex_head(sequential, 3, gain=2.0)(), torch.float64)
    update = torch.full((1, layout.size), 5.0, dtype=torch.float64)
    for slot in simplex_layers.endpoint_slots(layout):
        moved = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64).repeat_interleave(
            (slot.stop - slot.start) // 3
        )
        update[0, slot.start : slot.stop] = moved
    # 15 weights, 3 biases
    assert simplex_layers.compose_last_layer(layout, update).tolist() == [[6.0] * 18]


def test_composed_models_no_longer_depend_on_their_position():
    """compose(alpha) computes what the simplex computes at alpha, wherever it is asked."""
    for factory in (simplex_layers.simplex_head(mlp, 3), simplex_layers.simplex_all(mlp, 3)):
        layout, row = drawn(factory, 3)
        x = torch.from_numpy(Rng(2).generator("x").normal(size=(6, 4)))
        alpha = torch.tensor([0.6, 0.3, 0.1]).double()
        fixed = simplex_layers.compose_endpoints(layout, row[None], alpha[None, None])[0]
        expected = outputs(layout, row, alpha, x)
        torch.testing.assert_close(
            outputs(layout, fixed, torch.tensor([0.0, 0.0, 1.0]).double(), x), expected
        )


def test_predictions_can_be_averaged_over_draws():
    """With test samples the served model predicts the mean of the probabilities at its draws."""
    layout, row = drawn(simplex_layers.simplex_head(sequential, 4, ensemble=True), 4)
    alpha = torch.from_numpy(Rng(3).generator("alpha").dirichlet([1] * 4, 2))
    x = torch.from_numpy(Rng(2).generator("x").normal(size=(6, 4)))
    served = simplex_layers.compose_endpoints(layout, row[None], alpha[None])[0]
    single = [outputs(layout, row, a, x, training=True).softmax(1) for a in alpha]
    ours = outputs(layout, served, torch.full((4,), 0.25).double(), x).exp()
    torch.testing.assert_close(ours, torch.stack(single).mean(0))


def label_skewed(clients: int = 12, classes: int = 4) -> Federation:
    """Inputs say nothing of the labels; clients of group g have only the classes 2g and 2g + 1, in odds 3 to 1."""
    stream = Rng(0).generator("skewed")
    group = torch.arange(clients) % 2

    def draw(g: int, number: int) -> tuple[Tensor, Tensor]:
        labels = 2 * g + (stream.random(number) < 0.25).astype(int)
        return torch.from_numpy(stream.normal(size=(number, 3))), torch.from_numpy(labels)

    parts = [draw(int(g), 24) for g in group]
    split = torch.zeros(clients, 24, dtype=torch.int64)
    split[:, 20:] = 1
    tests = tuple(TestSet(*draw(g, 200), f"group {g}") for g in range(2))
    x, y = torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts])
    return Federation(x, y, split, tests, group, torch.arange(clients), clients, classes)


@pytest.mark.full
def test_regions_fit_groups_that_one_model_cannot():
    """FedAvg can only learn the mean of two label distributions; each group's region learns its own. Local loss
    falls below what any single model can reach, and SosicFL+ fits the clients' data at least as well as SosicFL."""
    federation = label_skewed()
    local = LocalTraining(batch_size=20, optimizer="sgd", lr=0.5)
    runs = {
        method.kind: follow(method, federation, local=local, rounds=15)
        for method in (
            FedAvg(),
            SosicFl(endpoints=2, regions=2),
            SosicFlPlus(endpoints=2, regions=2, lam=0.1),
        )
    }
    loss, fit = {}, {}
    for kind, loop in runs.items():
        served, info = loop.method.serving_model(
            loop._make_round(14, torch.arange(12), torch.arange(12)), loop.state
        )
        loss[kind] = float(loop.task.evaluate(served)["loss"].mean())
        fit[kind] = float(loop.task.loss(served, "train").mean())
        if kind != "fedavg":
            truth = torch.arange(12) % 2
            assert torch.equal(info["label"][:, None] == info["label"], truth[:, None] == truth)
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    # a model that does not know the group halves every probability
    best_single = entropy + math.log(2)
    assert loss["fedavg"] > best_single - 0.02
    assert loss["sosicfl"] < best_single - 0.2
    assert fit["sosicfl-plus"] <= fit["sosicfl"]


@pytest.mark.option("PublishedSimplex.radius_rule", "relative")
def test_regions_follow_the_counts_and_the_radius():
    """Relative: rho times the mean distance of the simplex to the centers; absolute: rho. Centers sum to 1."""
    relative = follow(
        SosicFl(endpoints=2, regions=2, radius=0.5), label_skewed(), rounds=0
    ).state.shared
    scale = simplex.mean_distance(relative.centers).mean()
    torch.testing.assert_close(relative.radius, (0.5 * scale).expand(2).double())
    absolute = follow(
        PublishedSosicFl(endpoints=2, regions=2, radius=0.5, radius_rule="absolute"),
        label_skewed(),
        rounds=0,
    )
    assert absolute.state.shared.radius.tolist() == [0.5, 0.5]
    classes = PublishedSosicFl(
        endpoints=4, regions=2, topics="classes", center="mean", metric="hilbert"
    )
    centers = follow(classes, label_skewed(), rounds=0).state.shared.centers
    counts = relative.counts.double()
    for group in range(2):
        expected = (counts / counts.sum(1, keepdim=True))[torch.arange(12) % 2 == group].mean(0)
        assert float((centers - expected).abs().sum(1).min()) < 1e-12


@pytest.mark.option("SimplexMethod.assignment", "labels")
def test_regions_wait_for_the_warmup_rounds():
    """Before round tau = 2 there is one region, the whole simplex, after a run of tau rounds too; then the groups'."""
    for rounds, regions in ((1, 1), (2, 1), (3, 2)):
        shared = follow(
            SosicFl(endpoints=2, regions=2, warmup_rounds=2), label_skewed(), rounds=rounds
        ).state.shared
        assert len(shared.centers) == regions
        assert (float(shared.radius[0]) == 2.0) == (regions == 1)


@pytest.mark.option("SimplexMethod.assignment", "gradient")
@pytest.mark.option("PublishedSimplex.radius_rule", "absolute")
def test_floco_places_each_client_by_its_gradient():
    """In round tau everybody takes part; afterwards each client has a region of its own, near its group's."""
    method = PublishedSosicFl(
        endpoints=2, assignment="gradient", warmup_rounds=1, radius_rule="absolute", radius=0.1
    )
    loop = follow(method, label_skewed(), local=SGD, rounds=3, participation=0.5)
    shared, truth = loop.state.shared, torch.arange(12) % 2
    assert shared.centers.shape == (12, 2)
    assert torch.equal(shared.region, torch.arange(12))
    assert shared.radius.tolist() == [0.1] * 12
    assert (shared.centers[truth == 0, 0] > 0.5).unique().numel() == 1
    assert (
        float(shared.centers[truth == 0, 0].mean() - shared.centers[truth == 1, 0].mean()) ** 2
        > 0.1
    )
    sizes = loop.record.metrics.query("metric == 'bytes_up'").groupby("round").size()
    assert sizes.tolist() == [6, 12, 6]


def test_updates_have_the_sign_of_the_model_sent_minus_returned():
    """Placing uses theta^t - theta_k: the other sign gives other points."""
    method = SosicFl(endpoints=2, assignment="gradient", warmup_rounds=1)
    loop = follow(method, label_skewed(), rounds=0)
    shared = loop.state.shared
    noise = torch.from_numpy(Rng(0).generator("noise").normal(size=(12, loop.task.layout.size)))
    message = Message(
        shared.models + noise, {"samples": torch.ones(12, dtype=torch.float64)}, torch.arange(12)
    )
    merged = method.aggregate(
        ServerContext(1, Rng(0).at_round(1), loop.task.layout, 12), shared, message
    )
    slots = simplex_layers.endpoint_slots(loop.task.layout)
    columns = torch.cat([torch.arange(s.start, s.stop) for s in slots])
    torch.testing.assert_close(merged.centers, simplex.gradient_points(-noise[:, columns], 2))


def test_who_sent_no_update_keeps_the_whole_simplex():
    """Ten of twelve clients answered: the other two stand in the middle, with the radius 2 of the whole simplex."""
    method = PublishedSosicFl(
        endpoints=2, assignment="gradient", warmup_rounds=1, radius_rule="absolute", radius=0.1
    )
    loop = follow(method, label_skewed(), rounds=0)
    shared, ids = loop.state.shared, torch.tensor([0, 1, 2, 3, 5, 6, 7, 8, 9, 11])
    noise = torch.from_numpy(Rng(0).generator("noise").normal(size=(10, loop.task.layout.size)))
    message = Message(shared.models + noise, {"samples": torch.ones(10, dtype=torch.float64)}, ids)
    merged = method.aggregate(
        ServerContext(1, Rng(0).at_round(1), loop.task.layout, 12), shared, message
    )
    assert merged.radius.tolist() == [0.1 if client in ids else 2.0 for client in range(12)]
    assert merged.centers[[4, 10]].tolist() == [[0.5, 0.5]] * 2
    assert not (merged.centers[ids] == 0.5).any()


def test_traffic_of_a_simplex():
    """Down: the features, M heads and the region (M + 1 floats); up: the same without the region, and n_k."""
    loop = follow(SosicFl(endpoints=3, regions=2), model=sequential, rounds=1)
    metrics = loop.record.metrics
    size = (4 * 5 + 5) + 3 * (5 * 3 + 3)
    assert loop.task.layout.size == size
    assert metrics.query("metric == 'bytes_down'")["value"].tolist() == [8.0 * (size + 4)] * 6
    assert metrics.query("metric == 'bytes_up'")["value"].tolist() == [8.0 * (size + 1)] * 6


def test_personal_simplexes():
    """lambda = 0 trains each alone; posthoc: the global model is final and personal ones start from it."""
    alone = follow(SosicFlPlus(endpoints=2, regions=2, lam=0.0), label_skewed(), rounds=2)
    plain = follow(SosicFl(endpoints=2, regions=2), label_skewed(), rounds=2)
    assert torch.equal(alone.state.shared.models, plain.state.shared.models)
    method = SosicFlPlus(endpoints=2, regions=2, global_rounds=2, lam=0.0)
    before, after = (follow(method, label_skewed(), rounds=rounds) for rounds in (2, 3))
    assert torch.equal(before.state.shared.models, after.state.shared.models)
    assert not before.state.memory.started.any()
    rnd = before._make_round(1, torch.arange(12), torch.arange(12))
    assert torch.equal(
        method.serving_model(rnd, before.state)[0],
        SosicFl(endpoints=2, regions=2).serving_model(rnd, before.state)[0],
    )
    assert bool(after.state.memory.started.all())
    assert float((after.state.memory.model - before.state.shared.models).norm()) > 0


@pytest.mark.option("SosicFlPlus.personal_region", "own", "whole")
def test_personal_models_keep_to_their_region_or_take_the_whole_simplex():
    """Endpoints e_1 and e_2: a client is served at its center, or at the middle, half of each; it trains there too."""
    for region in ("own", "whole"):
        method = SosicFlPlus(endpoints=2, regions=2, radius=0.0, personal_region=region)
        loop = follow(method, label_skewed(), rounds=1)
        everybody = torch.arange(12)
        rnd = loop._make_round(1, everybody, everybody)
        offer = fetch_served_models(method, rnd, loop.state)
        own = offer.field_by_slot("center")[:, 0]
        expected = own if region == "own" else torch.full((12, 2), 0.5, dtype=own.dtype)
        assert not torch.allclose(own, torch.full_like(own, 0.5))
        drawn = method.draw_points(
            rnd, method._personal_offer(offer), "alpha.personal", [200] * len(rnd.ids)
        )
        if region == "own":
            torch.testing.assert_close(drawn, own[:, None].expand_as(drawn))  # radius 0
        else:
            assert (drawn.min(1).values < 0.1).all(), "points from all over the simplex"
        served = method.serving_model(rnd, loop.state)[0]
        views = simplex_layers.compose_endpoints(
            loop.task.layout, loop.state.memory.model, expected[:, None]
        )
        torch.testing.assert_close(served, views)


def test_engines_agree_on_simplex_models():
    """Loop and vmap, for a head and for all layers, with running statistics."""
    for method in (SosicFl(endpoints=3, regions=2), SosicFlAll(endpoints=3, regions=2)):
        results = []
        for engine in ("loop", "vmap"):
            settings = testing.tiny_settings(engine=engine, rounds=2)
            results.append(
                testing.run_method(method, model=mlp, settings=settings).state.shared.models
            )
        torch.testing.assert_close(*results, rtol=0, atol=1e-10)


def test_settings_are_checked():
    """One line each: what was found, what is possible."""
    with pytest.raises(
        ConfigError, match=r"test_samples is 3; expected a divisor of endpoints = 4"
    ):
        SosicFl(endpoints=4, test_samples=3)
    with pytest.raises(
        ConfigError, match=r"warmup_rounds is 0; expected at least 1 with assignment = 'gradient'"
    ):
        SosicFl(assignment="gradient")
    with pytest.raises(ConfigError, match=r"sosicfl-all: test_samples is 2; expected 1"):
        SosicFlAll(test_samples=2)
    with pytest.raises(ConfigError, match="endpoints is 10; expected at most the 3 classes"):
        follow(SosicFl(regions=2), rounds=1)
    assert PublishedSosicFl(preset="released").warmup_rounds == 250


@pytest.mark.option("PublishedSimplex.preset", "coterie", "paper", "released")
def test_presets_are_the_paper_and_the_code():
    """The code's list of differences S2 to S7 of the specification; ours is the paper where the paper says it."""
    for preset in ("coterie", "paper"):
        method = PublishedSosicFl(preset=preset)
        assert (method.warmup_rounds, method.assignment, method.radius_rule, method.radius) == (
            0,
            "labels",
            "relative",
            0.3,
        )
        assert (method.sampler, method.simplex_bias) == ("exact", True)
    code = PublishedSosicFl(preset="released")
    assert (code.warmup_rounds, code.assignment, code.radius_rule, code.radius) == (
        250,
        "gradient",
        "absolute",
        0.1,
    )
    assert (code.sampler, code.simplex_bias) == ("released", False)


@pytest.mark.option("PublishedSimplex.simplex_bias", True, False)
def test_the_bias_has_endpoints_or_is_shared():
    """4 x 5 + 5 features, three endpoints of 5 x 3, and three biases of 3 or one."""
    for bias, size in ((True, 25 + 3 * 15 + 3 * 3), (False, 25 + 3 * 15 + 3)):
        assert (
            task_of(
                PublishedSosicFl(endpoints=3, regions=2, simplex_bias=bias), sequential
            ).layout.size
            == size
        )


@pytest.mark.option("PublishedSimplex.sampler", "exact", "released")
def test_mixtures_are_drawn_exactly_or_as_the_code_does():
    """Two endpoints: uniform on the interval of the region, or the center and a step up to 0.4 (L1) off the simplex."""
    for sampler in ("exact", "released"):
        method = PublishedSosicFl(
            endpoints=2, regions=2, sampler=sampler, radius=0.4, radius_rule="absolute"
        )
        loop = follow(method, label_skewed(), rounds=0)
        rnd = loop._make_round(0, torch.arange(12), torch.arange(12))
        offer = fetch_served_models(method, rnd, loop.state)
        found = method.draw_points(rnd, offer, "alpha", [5] * len(rnd.ids))
        centers = loop.state.shared.centers[loop.state.shared.region].numpy()
        for client in range(12):
            stream, center = rnd.rng.generator("alpha", client), centers[client]
            if sampler == "exact":
                first = stream.uniform(max(0.0, center[0] - 0.2), min(1.0, center[0] + 0.2), 5)
                expected = np.stack([first, 1 - first], axis=1)
            else:
                step = stream.uniform(-1, 1, (5, 2))
                length = stream.uniform(0, 0.4, (5, 1))
                expected = center + length * step / abs(step).sum(1, keepdims=True)
            np.testing.assert_allclose(found[client].numpy(), expected, atol=1e-15)


COUNTS = torch.tensor([[989, 1, 10], [800, 100, 100], [400, 300, 300], [300, 100, 600]])
"""By the sum of differences the first two clients are a group and the others; by ratios the first is alone."""


def placed(**options: Any) -> tuple[list[int], Tensor]:
    """The regions of four clients with COUNTS, and their centers."""
    method = PublishedSosicFl(endpoints=3, **options)
    loop = follow(method, testing.tiny_federation(num_clients=4), rounds=0)
    context = ServerContext(-1, Rng(0).at_round(-1), loop.task.layout, 4)
    shared = method._group_by_labels(context, dataclasses.replace(loop.state.shared, counts=COUNTS))
    return shared.region.tolist(), shared.centers


@pytest.mark.option("PublishedSimplex.metric", "l1", "hilbert")
def test_groups_are_near_in_differences_or_in_ratios():
    """To the second client the first is 0.378 away and the third 0.8; ln 123.6 and ln 6 by Hilbert's distance."""
    for metric, expected in (("l1", [0, 0, 1, 1]), ("hilbert", [0, 1, 1, 1])):
        region, _ = placed(regions=2, topics="classes", metric=metric)
        assert [number != region[0] for number in region] == [number != 0 for number in expected]


@pytest.mark.option("PublishedSimplex.center", "medoid", "mean")
def test_a_center_is_a_member_or_the_mean():
    """One region of all: the second client is nearest to the others together (0.378 + 0.8 + 1), or the mean."""
    points = COUNTS.double() / 1000
    torch.testing.assert_close(placed(regions=1, topics="classes")[1][0], points[1])
    torch.testing.assert_close(
        placed(regions=1, topics="classes", center="mean")[1][0], points.mean(0)
    )


@pytest.mark.option("PublishedSimplex.topics", "lda", "classes")
def test_clients_are_mixtures_of_topics_or_of_classes():
    """Four regions for four clients: the centers are the clients' points, by scikit-learn or by division."""
    seed = int(Rng(0).at_round(-1).generator("regions").integers(1 << 31))
    model = LatentDirichletAllocation(3, learning_method="online", random_state=seed)
    points = {
        "lda": torch.from_numpy(model.fit_transform(COUNTS.numpy())),
        "classes": COUNTS.double() / 1000,
    }
    for topics, expected in points.items():
        region, centers = placed(regions=4, topics=topics)
        torch.testing.assert_close(centers[region], expected)


@pytest.mark.option("SimplexMethod.per_sample", False, True)
def test_a_mixture_is_drawn_for_each_batch_or_each_sample():
    """One full-batch step of every client, written out by hand with its own draws."""
    federation = testing.tiny_federation()
    for per_sample in (False, True):
        method = SosicFl(endpoints=2, regions=1, warmup_rounds=9, per_sample=per_sample)
        loop = follow(method, federation, local=SGD, rounds=1)
        start = method.draw_first_model(loop.task, Rng(3))
        endpoints, bias = start[:24].reshape(2, 3, 4), start[24:].reshape(2, 3)
        returned = []
        for client in range(6):
            first = (
                Rng(3)
                .at_round(0)
                .generator("alpha", client)
                .uniform(0.0, 1.0, 20 if per_sample else 1)
            )
            alpha = torch.from_numpy(np.stack([first, 1 - first], axis=1)).expand(20, 2)[:12]
            order = torch.from_numpy(
                Rng(3).at_round(0).generator("batches", client).permutation(12)
            )
            x, y = federation.x[client, order], federation.y[client, order]
            w, b = endpoints.clone().requires_grad_(), bias.clone().requires_grad_()
            outputs = torch.einsum("nm,mij,nj->ni", alpha, w, x) + alpha @ b
            gw, gb = torch.autograd.grad(functional.cross_entropy(outputs, y), [w, b])
            returned.append(
                torch.cat([(endpoints - 0.2 * gw).flatten(), (bias - 0.2 * gb).flatten()])
            )
        expected = torch.stack(returned).mean(0)
        torch.testing.assert_close(loop.state.shared.models[0], expected, rtol=0, atol=1e-12)


@pytest.mark.option("PublishedSimplex.endpoint_start", "xavier", "model")
def test_endpoints_start_by_xaviers_law_or_as_the_model_draws_its_head():
    """Ten endpoints of 3 x 4 weights: deviation sqrt(2 / 7) and no bias; or the ten models' own."""
    for start in ("xavier", "model"):
        method = PublishedSosicFl(endpoints=10, regions=2, endpoint_start=start)
        task = task_of(method, lambda: nn.Linear(4, 3))
        views = task.layout.split_rows(method.draw_first_model(task, Rng(1)))
        own = [task.layout.split_rows(row) for row in task.draw_models(Rng(1), 10)]
        weights, biases = (
            torch.stack([one[name][m] for m, one in enumerate(own)]) for name in ("weight", "bias")
        )
        if start == "model":
            assert torch.equal(views["weight"], weights)
            assert torch.equal(views["bias"], biases)
        else:
            deviation = math.sqrt(2 / 7)
            assert float(views["weight"].std()) == pytest.approx(
                deviation, abs=4 * deviation / math.sqrt(240)
            )
            assert not views["bias"].any()
