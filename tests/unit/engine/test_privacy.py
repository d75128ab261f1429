"""Differentially private training: the arithmetic of a step, equal in every engine, and what it costs."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import integrate, optimize, stats
from tests.selection import first_only
from torch import nn

from coterie.data.build import build_federation
from coterie.engine.privacy import DPSGD, PrivacyLedger, PrivateQuery, clip_factors
from coterie.engine.task import LocalTraining
from coterie.errors import ConfigError, ModelError
from coterie.methods.local import Local
from coterie.rng import Rng
from coterie.studies import config
from coterie.testing import run_grouped, tiny_federation, tiny_settings
from coterie.testing.tiny import build_task

ENGINES = ["loop", "vmap", "compiled"]
DP = {"clip": 0.5, "noise_multiplier": 1.5}
SGD = LocalTraining(epochs=2, batch_size=4, optimizer="sgd", lr=0.1, dp=DP)


class Custom(nn.Module):
    """Dropout, group normalization, a layer used twice."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(4, 6), nn.GroupNorm(2, 6), nn.Dropout(0.4)
        self.shared, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        h = self.drop(torch.relu(self.norm(self.first(x))))
        return self.head(h + torch.tanh(self.shared(self.shared(h))))


def ragged(noise=True):
    """Clients with 12, 11, 7, 5, 3 and 2 training samples."""
    federation = tiny_federation()
    split = federation.split.clone()
    for client, count in enumerate((12, 11, 7, 5, 3, 2)):
        split[client, count:12] = -1
    levels = torch.tensor([0.0, 0.5, 0.0, 0.2, 0.0, 0.1], dtype=torch.float64)
    return replace(federation, split=split, noise=levels if noise else None)


def task(engine="vmap", model="linear", federation=None, **kwargs):
    return build_task(
        (federation or ragged()).host(range(6)), model, engine=engine, dtype=torch.float64, **kwargs
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_is_that_of_the_paper(engine):
    """Sampling, clipping, noise and the division are written out again; the gradient is PyTorch's own."""
    federation = ragged(noise=False)
    own, local = task(engine, federation=federation), replace(SGD, epochs=1, steps=3)
    start, rng = own.initial_models(Rng(0)) * 3 + 0.1, Rng(0).at_round(1)
    found, info, _ = own.train(start, rng, local)
    for row, count in enumerate((12, 11, 7, 5, 3, 2)):
        weights, size = start[row].clone(), min(4, count)
        inside = rng.generator("batches", row).random((3, count)) < size / count
        for step in range(3):
            total, losses = torch.zeros_like(weights), []
            for sample in inside[step].nonzero()[0]:
                w = weights.clone().requires_grad_()
                outputs = w[:12].reshape(3, 4) @ federation.x[row, sample] + w[12:]
                loss = torch.nn.functional.cross_entropy(outputs, federation.y[row, sample])
                loss.backward()
                total += w.grad * min(1.0, 0.5 / float(w.grad.norm()))
                losses.append(loss.detach())
            noise = rng.generator(f"batches.dp.{step}.0", row).standard_normal(15)
            weights -= 0.1 * (total + 0.5 * 1.5 * torch.from_numpy(noise)) / size
            mean = (
                torch.stack(losses).mean()
                if losses
                else torch.tensor(math.nan, dtype=torch.float64)
            )
            torch.testing.assert_close(
                info["losses"][row, step], mean, rtol=0, atol=1e-12, equal_nan=True
            )
        torch.testing.assert_close(found[row], weights, rtol=0, atol=1e-12)
    assert info["train_samples"].tolist() == info["train_samples"].clamp(max=12 * 3).tolist()


@pytest.mark.full
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("model", ["linear", Custom])
def test_engines_agree(model, optimizer):
    """With dropout, noise on inputs, a proximal term and steps without any sample."""
    local = replace(
        SGD,
        optimizer=optimizer,
        epochs=1,
        batch_size=1,
        momentum=0.9 if optimizer == "sgd" else 0.0,
    )
    ends = []
    for engine in ENGINES:
        own = task(engine, model)
        assert own.engine.name == engine
        start = own.initial_models(Rng(0)).clone()
        ends.append(own.train(start, Rng(0).at_round(2), local, anchor=start + 0.1, prox=0.3))
    assert bool(ends[0][1]["losses"][0].isnan().any())  # a batch that nobody is in
    for params, info, _ in ends[1:]:
        torch.testing.assert_close(params, ends[0][0], rtol=0, atol=1e-10)
        for name, value in info.items():
            torch.testing.assert_close(value, ends[0][1][name], rtol=0, atol=1e-10, equal_nan=True)


@pytest.mark.slow
def test_engines_agree_on_augmented_images():
    federation = build_federation(config.load_study("rotated-digits").data, 0)
    local = replace(SGD, steps=2, batch_size=6, augment="crop-flip", padding=1)
    ends = []
    for engine in ENGINES:
        own = build_task(federation.host(range(3)), "cnn-b", engine=engine, dtype=torch.float64)
        ends.append(own.train(own.initial_models(Rng(0)), Rng(0).at_round(1), local)[0])
    for params in ends[1:]:
        torch.testing.assert_close(params, ends[0], rtol=0, atol=1e-10)


@pytest.mark.full
@pytest.mark.parametrize("engine", first_only(ENGINES, slow=True))
def test_who_is_hosted_beside_changes_no_bit(engine):
    settings = replace(tiny_settings(rounds=2), local=SGD, engine=engine, evaluate="final")
    federation = tiny_federation()
    together = run_grouped(
        federation, Local(), [[0, 1, 2, 3, 4, 5]], model=Custom, settings=settings
    )
    apart = run_grouped(
        federation, Local(), [[4, 1], [0, 2, 3], [5]], model=Custom, settings=settings
    )
    assert torch.equal(together, apart)


@pytest.mark.full
def test_a_block_may_host_none_of_the_clients_of_a_round():
    settings = replace(tiny_settings(rounds=2), local=SGD, engine="loop", participation=1)
    data = tiny_federation()
    whole = run_grouped(data, Local(), [[0, 1, 2, 3, 4, 5]], settings=settings)
    apart = run_grouped(data, Local(), [[0], [1, 2, 3], [4, 5]], settings=settings)
    assert torch.equal(whole, apart)


@pytest.mark.full
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_step_by_step_is_train(engine, optimizer):
    own, local = task(engine, Custom), replace(SGD, batch_size=2, optimizer=optimizer)
    start, rng = own.initial_models(Rng(0)).clone(), Rng(0).at_round(2)
    expected, told, _ = own.train(start, rng, local)
    params, steps = start.clone(), own.train_stepwise(rng, local)
    once = dict(own.trainer.totals.privacy.uses)
    for step in range(steps.num_steps):
        steps.apply_gradient(params, steps.compute_gradient(params, step), step)
    found = steps.finish(params)
    torch.testing.assert_close(params, expected, rtol=0, atol=1e-12)
    for name, value in told.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12, equal_nan=True)
    assert own.trainer.totals.privacy.uses == {key: 2 * times for key, times in once.items()}


def test_an_optimizer_that_is_kept_counts_steps_without_a_sample():
    """Adam corrects its means by the number of steps: two trainings of two steps end where one of four does."""
    own, local = (
        task(federation=tiny_federation()),
        replace(SGD, optimizer="adam", batch_size=1, steps=6),
    )
    kept = replace(local, persistent_client_optimizer=True)
    begun = own.trainer.init_optimizer_state(kept)
    _, info, left = own.train(own.initial_models(Rng(0)), Rng(0), kept, optimizer=begun)
    assert bool(info["losses"].isnan().any())
    assert left is not None
    assert left.taken.flatten().tolist() == [6] * 6


def test_a_secret_draws_other_noise_and_batches():
    own = [task(secret=secret) for secret in (None, 0, 1)]
    plain, same, other = (
        one.train(one.initial_models(Rng(0)), Rng(0).at_round(0), SGD)[0] for one in own
    )
    assert torch.equal(plain, same)  # the seed of the run is 0 too
    assert not torch.equal(plain, other)
    without = replace(SGD, dp=None)
    assert torch.equal(
        *(
            one.train(one.initial_models(Rng(0)), Rng(0).at_round(0), without)[0]
            for one in (own[0], own[2])
        )
    )


def test_clipping_bounds_what_is_not_finite():
    gradients = torch.tensor(
        [[3.0, 4.0], [math.inf, 1.0], [math.nan, 0.0], [3e38, 3e38], [0.0, 0.0]]
    )
    factor = clip_factors(gradients, 1.0)
    assert torch.isfinite(gradients * factor).all()
    assert (gradients * factor).norm(dim=1).max() <= 1 + 1e-6
    assert factor.flatten()[[1, 2]].tolist() == [0, 0]


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"clip": 0, "noise_multiplier": 1}, "clip is 0; expected a number, above 0"),
        ({"clip": 1}, "noise_multiplier is missing"),
        (
            {"clip": 1, "noise_multiplier": 1, "delta": 1},
            "delta is 1; expected a number, above 0 and below 1",
        ),
        ({"clip": 1, "noise": 1}, "unknown key 'noise'"),
        (3, "dp is 3; expected a table"),
    ],
)
def test_settings_are_checked(change, text):
    with pytest.raises(ConfigError, match=text):
        LocalTraining(dp=change)


def test_settings_are_kept_as_a_table():
    full = {"clip": 1.0, "noise_multiplier": 2.0, "delta": 1e-5}
    for given in ({"clip": 1, "noise_multiplier": 2}, full, DPSGD(1.0, 2.0)):
        assert LocalTraining(dp=given).dp == full
    assert LocalTraining(dp="none") == LocalTraining()
    assert "dp" not in LocalTraining().result_settings()
    with pytest.raises(ConfigError, match=r"optimizer is 'torch.optim:NAdam'; expected one of sgd"):
        LocalTraining(optimizer="torch.optim:NAdam", dp=full)


class Normalized(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))


def test_what_joins_samples_is_refused():
    own = task("loop", Normalized)
    with pytest.raises(ModelError, match=r"BatchNorm1d '1' joins samples: take nn\.GroupNorm"):
        own.train(own.initial_models(Rng(0)), Rng(0), SGD)
    with pytest.raises(ConfigError, match=r"dp\.delta is 0\.1; expected less than 1 / 12"):
        task().trainer.check_private(replace(SGD, dp={**DP, "delta": 0.1}))


# ---------------------------------------------------------------- accounting


def test_epsilon_is_that_of_the_published_example():
    """Of the documentation of opacus's formulas: two mechanisms, orders up to 32; more orders are never worse."""
    spent = PrivacyLedger()
    spent.add_uses(3, PrivateQuery(1e-5, 1.0), 10)
    spent.add_uses(3, PrivateQuery(1e-4, 3.0), 4)
    found = spent.compute_epsilon(torch.tensor([0, 3]), 1e-5)
    assert found[0] == 0
    assert float(found[1]) == pytest.approx(0.336, abs=5e-3)


def exact(noise, delta):
    """The epsilon of one Gaussian mechanism of sensitivity 1 (Balle & Wang 2018, theorem 8)."""

    def gap(epsilon):
        a, b = 0.5 / noise, epsilon * noise
        return stats.norm.cdf(a - b) - math.exp(epsilon) * stats.norm.cdf(-a - b) - delta

    return optimize.brentq(gap, 1e-9, 200)


@pytest.mark.parametrize("noise", [0.7, 2.0, 20.0])
def test_epsilon_is_a_little_more_than_that_of_the_gaussian_mechanism(noise):
    """Four full batches are one of half the noise, and so are four gradients of one batch."""
    spent = PrivacyLedger()
    spent.add_uses(0, PrivateQuery(1.0, 2 * noise), 4)
    spent.add_uses(1, PrivateQuery(1.0, 2 * noise, 4), 1)
    one, other = spent.compute_epsilon(torch.arange(2), 1e-5).tolist()
    assert one == pytest.approx(other)
    assert exact(noise, 1e-5) <= one <= 1.2 * exact(noise, 1e-5) + 0.01


@pytest.mark.parametrize("gradients", [1, 3])
def test_epsilon_holds_for_a_batch_drawn_by_chance(gradients):
    """Delta of one subsampled step, by integrating densities of the noisy sum with and without the sample."""
    rate, sigma, delta = 0.3, 1.2, 1e-4
    spent = PrivacyLedger()
    spent.add_uses(0, PrivateQuery(rate, sigma, gradients), 1)
    epsilon = float(spent.compute_epsilon(torch.tensor([0]), delta))
    noise = sigma / gradients**0.5

    def without(z):
        return stats.norm.pdf(z, 0, noise)

    def with_it(z):
        return (1 - rate) * stats.norm.pdf(z, 0, noise) + rate * stats.norm.pdf(z, 1, noise)

    def hockey(epsilon):
        line = np.linspace(-30, 30, 600_001)
        p, q = with_it(line), without(line)
        ahead = integrate.simpson(np.maximum(p - math.exp(epsilon) * q, 0), x=line)
        behind = integrate.simpson(np.maximum(q - math.exp(epsilon) * p, 0), x=line)
        return max(ahead, behind)

    assert hockey(epsilon) <= delta
    assert hockey(epsilon / 2) > delta


def test_what_was_used_is_counted():
    own = task()
    own.train(own.initial_models(Rng(0)), Rng(0), SGD)
    own.select_clients(torch.tensor([5])).train(
        own.initial_models(Rng(0))[5:], Rng(0).at_round(1), replace(SGD, steps=7)
    )
    expected = {
        (client, PrivateQuery(min(4, n) / n, 1.5)): 2 * -(-n // 4)
        for client, n in enumerate((12, 11, 7, 5, 3, 2))
    }
    expected[5, PrivateQuery(1.0, 1.5)] += 7
    assert own.trainer.totals.privacy.uses == expected
    again = PrivacyLedger()
    again.restore(own.trainer.totals.privacy.snapshot())
    assert again == own.trainer.totals.privacy
    assert PrivacyLedger().snapshot() == {}


def test_several_gradients_of_a_batch_are_one_query():
    own = task()
    params, steps = (
        own.initial_models(Rng(0)).clone(),
        own.train_stepwise(Rng(0), replace(SGD, steps=2)),
    )
    first, second = (steps.compute_gradient(params, 0) for _ in range(2))
    steps.compute_gradient(params, 1)
    assert not torch.equal(first, second)  # noise of its own
    assert {
        query.gradients: times
        for (client, query), times in own.trainer.totals.privacy.uses.items()
        if client == 0 and times
    } == {2: 1, 1: 1}


def test_without_noise_there_is_no_privacy():
    spent = PrivacyLedger()
    spent.add_uses(0, PrivateQuery(0.1, 0.0), 1)
    assert float(spent.compute_epsilon(torch.tensor([0]), 1e-5)) == math.inf
