"""Random operations made of keys: same distribution as PyTorch's, another draw for each operation."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from coterie.models.draws import KeyedDraws, UnkeyedDrawError

NUMBER = 40_000


def drawn(make, key=1234):
    """Draw with a key."""
    with KeyedDraws(torch.tensor(key)):
        return make()


ONES = torch.ones(200, NUMBER // 200)

# what draws, with the mean and the standard deviation of its distribution
DISTRIBUTIONS = {
    "dropout": (lambda: functional.dropout(ONES, 0.3), 1, math.sqrt(0.3 / 0.7)),
    "dropout of nearly all": (lambda: functional.dropout(ONES, 0.9), 1, 3),
    "fused dropout": (lambda: torch.native_dropout(ONES, 0.3, True)[0], 1, math.sqrt(0.3 / 0.7)),
    "bernoulli": (lambda: torch.bernoulli(ONES * 0.2), 0.2, 0.4),
    "bernoulli in place": (lambda: torch.empty_like(ONES).bernoulli_(0.2), 0.2, 0.4),
    "bernoulli by tensor": (lambda: torch.empty_like(ONES).bernoulli_(ONES * 0.2), 0.2, 0.4),
    "rand": (lambda: torch.rand(NUMBER), 0.5, math.sqrt(1 / 12)),
    "rand_like": (lambda: torch.rand_like(ONES), 0.5, math.sqrt(1 / 12)),
    "uniform_": (lambda: torch.empty(NUMBER).uniform_(-2, 4), 1, math.sqrt(3)),
    "randn": (lambda: torch.randn(NUMBER, dtype=torch.float64), 0, 1),
    "randn_like": (lambda: torch.randn_like(ONES), 0, 1),
    "normal_": (lambda: torch.empty(NUMBER).normal_(3, 2), 3, 2),
    "normal of numbers": (lambda: torch.normal(3.0, 2.0, (NUMBER,)), 3, 2),
    "normal of tensors": (lambda: torch.normal(3 * ONES, 2 * ONES), 3, 2),
    "normal of a deviation": (lambda: torch.normal(3.0, 2 * ONES), 3, 2),
    "exponential_": (lambda: torch.empty(NUMBER).exponential_(0.5), 2, 2),
    "randint": (lambda: torch.randint(2, 7, (NUMBER,)).double(), 4, math.sqrt(2)),
    "randint_like": (lambda: torch.randint_like(ONES, 5), 2, math.sqrt(2)),
    "multinomial": (
        lambda: torch.multinomial(torch.tensor([1.0, 2.0, 1.0]), NUMBER, True).double(),
        1, math.sqrt(0.5),
    ),
    "multinomial of one": (
        lambda: torch.multinomial(torch.tensor([[1.0, 2.0, 1.0]] * NUMBER), 1).double(),
        1, math.sqrt(0.5),
    ),
    "geometric_": (lambda: torch.empty(NUMBER).geometric_(0.5), 2, math.sqrt(2)),
    "poisson": (lambda: torch.poisson(4 * ONES), 4, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_draws_have_the_mean_and_the_deviation_of_the_distribution(name):
    """Within five standard errors; the same for one key, others for another key."""
    make, mean, deviation = DISTRIBUTIONS[name]
    values = drawn(make).double().flatten()
    assert len(values) == NUMBER
    assert abs(float(values.mean()) - mean) < 5 * deviation / NUMBER**0.5
    # The kurtosis of these distributions is below 12.
    assert abs(float(values.std()) / deviation - 1) < 5 * math.sqrt(11 / 4 / NUMBER)
    assert torch.equal(values, drawn(make).double().flatten())
    assert not torch.equal(values, drawn(make, 1235).double().flatten())


def test_normal_numbers_are_normal():
    """The Kolmogorov-Smirnov distance from the normal distribution; 1.95 / sqrt(n) is p = 0.001."""
    for dtype in (torch.float32, torch.float64):
        values = drawn(lambda dtype=dtype: torch.randn(NUMBER, dtype=dtype)).double().sort().values
        expected = (1 + torch.erf(values / math.sqrt(2))) / 2
        steps = torch.arange(NUMBER + 1) / NUMBER
        distance = max((expected - steps[:-1]).abs().max(), (expected - steps[1:]).abs().max())
        assert float(distance) < 1.95 / NUMBER**0.5


def test_dropout_keeps_scales_and_is_off_in_evaluation():
    layer = nn.Dropout(0.3)
    out = drawn(lambda: layer(ONES))
    assert torch.allclose(out[out > 0], torch.tensor(1 / 0.7))
    assert torch.equal(drawn(lambda: layer.eval()(ONES)), ONES)
    assert torch.equal(drawn(lambda: nn.Dropout(1.0)(ONES)), torch.zeros_like(ONES))


@pytest.mark.parametrize(
    ("kind", "axes"), [(nn.Dropout1d, 1), (nn.Dropout2d, 2), (nn.Dropout3d, 3)]
)
def test_layers_that_drop_channels_drop_whole_channels(kind, axes):
    """Of each channel of ones all entries are 2 or all are 0."""
    out = drawn(lambda: kind(0.5)(torch.ones(50, 20, *[3] * axes)), 5).reshape(1000, 3**axes)
    assert bool(((out == 0).all(1) | (out == 2).all(1)).all())
    assert 400 < int((out[:, 0] == 0).sum()) < 600


def test_each_operation_of_a_pass_has_draws_of_its_own():
    """Of two layers that keep half, both with one key, a quarter is left, at 2 x 2 (4 standard errors of 0.14 %)."""
    layer = nn.Dropout(0.5)
    out = drawn(lambda: layer(layer(torch.ones(200, 500))))
    assert sorted(out.unique().tolist()) == [0.0, 4.0]
    assert abs(float((out > 0).float().mean()) - 0.25) < 0.0055


def test_masks_of_neighboring_keys_are_uncorrelated():
    masks = [
        (drawn(lambda: functional.dropout(torch.ones(4000)), key) > 0).double() for key in range(20)
    ]
    correlation = torch.corrcoef(torch.stack(masks)).fill_diagonal_(0)
    assert float(correlation.abs().max()) < 5 / 4000**0.5


def test_permutations_and_samples_without_replacement_have_no_repeats():
    order = drawn(lambda: torch.randperm(50))
    assert not torch.equal(order, torch.arange(50))
    assert torch.equal(order.sort().values, torch.arange(50))
    chosen = drawn(lambda: torch.multinomial(torch.tensor([1.0, 0.0, 1.0, 1.0]), 3))
    assert sorted(chosen.tolist()) == [0, 2, 3]


def test_leaky_slopes_lie_between_their_bounds():
    x = torch.full((NUMBER,), -1.0, requires_grad=True)
    out = drawn(lambda: functional.rrelu(x, 0.1, 0.5, training=True))
    out.sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, -out)
    assert abs(float(x.grad.mean()) - 0.3) < 5 * 0.4 / math.sqrt(12 * NUMBER)
    assert 0.1 <= float(x.grad.min()) < float(x.grad.max()) <= 0.5


@pytest.mark.parametrize("name", ["dropout", "rand", "randn_like", "bernoulli", "randint_like", "multinomial"])  # fmt: skip
def test_many_models_at_once_draw_what_each_draws_alone(name):
    make = DISTRIBUTIONS[name][0]
    keys = torch.tensor([3, 1 << 61, -5])
    with KeyedDraws(keys):
        together = torch.func.vmap(lambda _: make(), randomness="different")(torch.zeros(3))
    for key, found in zip(keys.tolist(), together, strict=True):
        assert torch.equal(found, drawn(make, key))


def test_many_models_at_once_refuse_what_has_no_key():
    for make in (lambda: torch.poisson(ONES), lambda: torch.randperm(4)):
        with pytest.raises(UnkeyedDrawError, match="random numbers of its own"), KeyedDraws(torch.arange(4)):  # fmt: skip
            torch.func.vmap(lambda _, make=make: make(), randomness="different")(torch.zeros(4))


def test_what_draws_nothing_has_no_number():
    with KeyedDraws(torch.tensor(0)) as draws:
        functional.dropout(ONES, 0.0)
        functional.dropout(ONES, 0.5, training=False)
        torch.empty(3).fill_(2).exp()
        functional.scaled_dot_product_attention(ONES[None], ONES[None], ONES[None])
    assert draws.number == 0
