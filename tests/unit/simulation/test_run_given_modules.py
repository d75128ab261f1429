"""Runs with modules that once were trained as other models, with the values of plain PyTorch."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import coterie
from coterie.methods import METHODS
from coterie.testing import tiny_federation

ENGINES = ["loop", "vmap", "compiled"]


class ActivatesByType(nn.Module):
    """ReLU after every batch normalization, by type: as in VGGs written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Linear(2, 32), nn.BatchNorm1d(32), nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Linear(32, 2)]
        )  # fmt: skip

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            if isinstance(layer, nn.BatchNorm1d):
                x = torch.relu(x)
        return x


def two_squares() -> coterie.Federation:
    """XOR: a linear model is right for half of the samples."""
    x = torch.randn(1200, 2, generator=torch.Generator().manual_seed(0))
    labels = (x[:, 0] * x[:, 1] > 0).long()
    return coterie.from_arrays(x, labels, clients=[i % 4 for i in range(1200)])


@pytest.mark.full
@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_reported_is_what_the_model_taken_home_scores(engine):
    """Plain PyTorch reaches 0.99 here in twice the time, and a model without ReLU 0.56."""
    federation = two_squares()
    settings = coterie.Settings(
        rounds=8, engine=engine, evaluate="final",
        local=coterie.LocalTraining(lr=0.01, epochs=2, batch_size=16),
    )  # fmt: skip
    run = coterie.simulate(federation, coterie.FedAvg(), model=ActivatesByType, settings=settings)
    reported = run.metrics.query("split == 'test' and metric == 'accuracy'").value.mean()
    scores = []
    for client in range(4):
        test = federation.tests[int(federation.test_of[client])]
        scores.append(float((run.model(client)(test.x).argmax(1) == test.y).float().mean()))
    assert reported == pytest.approx(sum(scores) / 4, abs=1e-6)
    assert reported > 0.9


SEEN: list[int] = []


class Count(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.seen += 1
            if self.seen.numel() == 1 and not torch._C._functorch.is_functorch_wrapped_tensor(x):
                SEEN.append(int(self.seen.tolist()))
        return self.last(x)


def test_a_count_lives_from_round_to_round_and_goes_home():
    """Each of two clients takes two steps in each of three rounds: 1, 2, ..., 6."""
    local = coterie.LocalTraining(steps=2, batch_size=100)
    settings = coterie.Settings(
        rounds=3, evaluate="final", init="given", engine="loop", warmup_epochs=0, local=local
    )
    SEEN.clear()
    federation = tiny_federation(num_clients=2)
    run = coterie.simulate(federation, METHODS["local"](), model=Count(), settings=settings)
    assert SEEN[-12:] == [1, 2, 1, 2, 3, 4, 3, 4, 5, 6, 5, 6]
    assert [int(run.model(client).seen) for client in range(2)] == [6, 6]


class Bottleneck(nn.Module):
    """A variational bottleneck: the code is sampled, in evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.spread, self.last = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        mean = self.mean(x)
        return self.last(mean + torch.exp(0.5 * self.spread(x)) * torch.randn_like(mean))


@pytest.mark.full
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("evaluate", ["final", "best_val"])
def test_a_model_that_samples_in_evaluation_has_the_results_of_the_seed(engine, evaluate):
    """Whatever PyTorch's own generator is at, and whoever else is hosted."""
    settings = coterie.Settings(
        rounds=2, evaluate=evaluate, engine=engine, local=coterie.LocalTraining(lr=0.02)
    )
    method = METHODS["dac"](num_peers=1)
    results = []
    for state in (0, 1):
        torch.manual_seed(state)  # noqa: TID251
        run = coterie.simulate(
            tiny_federation(), method, model=Bottleneck, settings=settings, seed=state // 2
        )
        results.append(run.metrics)
    assert results[0].equals(results[1])


@pytest.mark.full
@pytest.mark.parametrize("engine", ["auto", *ENGINES])
def test_endpoints_of_all_layers_take_batch_normalization(engine):
    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))

    local = coterie.LocalTraining(steps=1, batch_size=4)
    settings = coterie.Settings(rounds=1, engine=engine, local=local)
    method = METHODS["sosicfl-all"](endpoints=3, regions=2)
    run = coterie.simulate(tiny_federation(num_clients=5), method, model=net, settings=settings)
    assert bool(torch.isfinite(run.params).all())


@pytest.mark.full
def test_tied_layers_train_in_every_engine():
    """One tensor of 36 numbers for two layers; engines agree."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    net[2].weight = net[0].weight
    found = []
    for engine in ENGINES:
        settings = coterie.Settings(rounds=2, engine=engine, init="given")
        run = coterie.simulate(tiny_federation(), METHODS["fedavg"](), model=net, settings=settings)
        assert run.params.shape[1] == 16 + 4 + 4 + 12 + 3
        home = run.model(0)
        assert home[0].weight is home[2].weight
        found.append(run.params)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found[2], found[0], rtol=1e-4, atol=1e-6)
    assert not torch.equal(found[0][0, :16], net[0].weight.detach().flatten())


@pytest.mark.full
def test_functional_dropout_is_the_same_run_as_its_layer():
    class Called(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x):
            return self.last(functional.dropout(self.first(x), 0.4, self.training))

    class Layer(Called):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.4)

        def forward(self, x):
            return self.last(self.drop(self.first(x)))

    for engine in ENGINES:
        settings = coterie.Settings(rounds=2, engine=engine)
        one, other = (
            coterie.simulate(tiny_federation(), METHODS["fedavg"](), model=model, settings=settings)
            for model in (Called, Layer)
        )
        assert torch.equal(one.params, other.params)
