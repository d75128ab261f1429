"""Layers written faster give the same values and gradients."""

import copy
import subprocess
import sys
from functools import partial

import pytest
import torch
from tests.selection import first_only
from torch import nn
from torch.nn import functional

from coterie.engine import _rewrites
from coterie.engine._base import cross_entropy
from coterie.engine._rewrites import (
    ReplacedFunctions,
    convolve_unfolded,
    convolve_windowed,
    cross_entropy_by_gather,
    grad_and_value,
    normalize_batch,
    pool_by_slices,
    with_counted_batches,
)


def replacing(functions, module):
    """Return a function that runs a module with other functions of PyTorch."""

    def run(x):
        with ReplacedFunctions(functions):
            return module(x)

    return run


@pytest.mark.parametrize(
    ("kernel", "shape"),
    [(2, (3, 2, 8, 8)), (2, (2, 4, 11, 7)), (3, (1, 2, 9, 10)), ((1, 2), (2, 3, 4, 5))],
)
def test_strided_slices_give_the_values_and_gradients_of_max_pooling(kernel, shape):
    stream = torch.Generator().manual_seed(0)
    for draw in (
        torch.randn(shape, generator=stream),
        torch.randn(shape, generator=stream).clamp(min=0),
    ):
        results = []
        plain = nn.MaxPool2d(kernel)
        for pool in (plain, replacing({functional.max_pool2d: pool_by_slices}, plain)):
            x = draw.clone().requires_grad_()
            y = pool(x)
            (y * torch.arange(y.numel()).reshape(y.shape)).sum().backward()
            with torch.no_grad():
                assert torch.equal(pool(x), y)
            results.append((y.detach(), x.grad))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])


def test_of_equal_entries_the_first_gets_the_gradient_and_nan_wins():
    x = torch.tensor([[1.0, 2.0, 5.0, torch.nan], [2.0, 2.0, 7.0, 3.0]])[
        None, None
    ].requires_grad_()
    y = pool_by_slices(x, 2)
    assert y[0, 0, 0, 0] == 2
    assert bool(y[0, 0, 0, 1].isnan())
    y[0, 0, 0, 0].backward()
    assert x.grad is not None
    assert x.grad[0, 0].tolist() == [[0, 1, 0, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 3, "stride": 2},
        {"kernel_size": 2, "padding": 1},
        {"kernel_size": 2, "ceil_mode": True},
        {"kernel_size": 2, "dilation": 2},
        {"kernel_size": 2, "return_indices": True},
    ],
)
def test_pooling_of_other_kinds_is_left_to_pytorch(options):
    assert pool_by_slices(torch.zeros(1, 1, 9, 9), **options) is NotImplemented


@pytest.mark.parametrize("convolve", [convolve_unfolded, convolve_windowed])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"padding": 2},
        {"stride": 2},
        {"stride": (2, 3), "padding": (0, 2), "dilation": (2, 1)},
        {"bias": False},
        {"padding": "valid"},
    ],
)
@pytest.mark.parametrize("most", [_rewrites._MAX_WINDOW_ENTRIES, 0])
def test_convolutions_as_products_have_the_values_and_gradients_of_convolutions(
    convolve, options, most, monkeypatch
):
    """Of one client, and of three at once; where windows take too much memory, too."""
    monkeypatch.setattr(_rewrites, "_MAX_WINDOW_ENTRIES", most)
    stream = torch.Generator().manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(2, 3, 3, **options)).double()
    calls = []

    def counted(*args, **kwargs):
        found = convolve(*args, **kwargs)
        calls.append(found is not NotImplemented)
        return found

    def scored(functions, tensors, x):
        with ReplacedFunctions(functions):
            y = torch.func.functional_call(plain, tensors, (x,))
        return (y.sin() * torch.arange(y.numel()).reshape(y.shape)).sum()

    def drawn(*shape):
        return torch.randn(shape, generator=stream, dtype=torch.float64)

    tensors = {name: drawn(3, *value.shape) for name, value in plain.named_parameters()}
    x = drawn(3, 4, 2, 9, 11)
    results = [
        torch.func.vmap(torch.func.grad_and_value(partial(scored, functions), (0, 1)))(tensors, x)
        for functions in ({}, {torch.conv2d: counted})
    ]
    assert set(calls) == {most > 0 or convolve is convolve_unfolded}
    torch.testing.assert_close(results[1], results[0])
    first = x[0].clone().requires_grad_()
    scored(
        {torch.conv2d: convolve}, {name: value[0] for name, value in tensors.items()}, first
    ).backward()
    torch.testing.assert_close(first.grad, results[0][0][1][0])


def test_convolutions_with_groups_or_other_borders_are_left_to_pytorch():
    x, weight = torch.zeros(2, 2, 5, 5), torch.zeros(2, 2, 3, 3)
    for convolve in (convolve_unfolded, convolve_windowed):
        assert convolve(x, weight[:, :1], groups=2) is NotImplemented
        assert convolve(x, weight, padding="same") is NotImplemented
        assert convolve(x[0], weight) is NotImplemented
        assert convolve(x, weight).shape == (2, 2, 3, 3)


@pytest.mark.parametrize("options", [{}, {"momentum": 0.3, "affine": False}, {"momentum": None},
                                     {"track_running_stats": False}])  # fmt: skip
@pytest.mark.parametrize(
    ("kind", "shape"), [(nn.BatchNorm1d, (6, 3)), (nn.BatchNorm2d, (6, 3, 4, 4))]
)
def test_a_written_out_normalization_is_batch_normalization(kind, shape, options):
    """Outputs, gradients and statistics over three batches, and of a frozen layer."""
    plain = kind(3, **options).double()
    other = with_counted_batches(copy.deepcopy(plain))
    assert type(other) is kind
    run = replacing({functional.batch_norm: normalize_batch}, other)
    stream = torch.Generator().manual_seed(0)
    for training in (True, True, True, False):
        x = torch.randn(shape, generator=stream, dtype=torch.float64) * 2 + 1
        results = []
        for norm, call in ((plain, plain), (other, run)):
            norm.train(training)
            given = x.clone().requires_grad_()
            call(given).sin().sum().backward()
            results.append(given.grad)
        torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-12)
        for one, two in zip(plain.buffers(), other.buffers(), strict=True):
            torch.testing.assert_close(two, one, rtol=0, atol=1e-12)
        for one, two in zip(plain.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(two.grad, one.grad, rtol=0, atol=1e-11)


def test_gradients_without_pytorchs_compiler_are_those_of_torch_func_to_the_bit():
    """Over a batch of parameters, with something beside the loss, and a tensor that the loss does not use."""

    def loss(trained, x, y):
        hidden = torch.tanh(x @ trained["a"])
        return (hidden @ trained["b"] - y).square().mean(), {"largest": hidden.amax()}

    stream = torch.Generator().manual_seed(0)
    trained = {
        name: torch.randn(4, *shape, generator=stream)
        for name, shape in (("a", (5, 6)), ("b", (6,)), ("c", (2,)))
    }
    x, y = torch.randn(4, 7, 5, generator=stream), torch.randn(4, 7, generator=stream)
    grads, (losses, aux) = torch.func.vmap(grad_and_value(loss))(trained, x, y)
    theirs, (values, beside) = torch.func.vmap(torch.func.grad_and_value(loss, has_aux=True))(
        trained, x, y
    )
    assert torch.equal(losses, values)
    assert torch.equal(aux["largest"], beside["largest"])
    assert all(torch.equal(grads[name], theirs[name]) for name in trained)
    assert torch.equal(grads["c"], torch.zeros(4, 2))
    assert not losses.requires_grad


def test_the_gathered_cross_entropy_is_the_other_to_the_bit():
    stream = torch.Generator().manual_seed(0)
    results = []
    for objective in (cross_entropy, cross_entropy_by_gather):
        outputs = torch.randn(9, 4, generator=stream.manual_seed(1)).requires_grad_()
        losses = objective(outputs, torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 3]))
        losses.mean().backward()
        results.append((losses.detach(), outputs.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


TRAINING = """
import sys, torch
from coterie.engine.task import LocalTraining
from coterie.methods import METHODS
from coterie.simulation.run import simulate
from coterie.testing.tiny import tiny_federation, tiny_settings
layers = torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(8, 3)
local = LocalTraining(batch_size=5, optimizer=sys.argv[2])
settings = tiny_settings(rounds=1, engine=sys.argv[1], local=local)
simulate(tiny_federation(), METHODS["dac"](num_peers=2), model=torch.nn.Sequential(*layers), settings=settings)
print(*sorted({"torch._dynamo", "sympy"} & set(sys.modules)))
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("engine", "optimizer"),
    first_only(
        [("compiled", "adam"), ("loop", "adam"), ("vmap", "sgd"), ("vmap", "adam")], slow=True
    ),
)
def test_a_process_that_trains_loads_neither_pytorchs_compiler_nor_sympy(engine, optimizer):
    """Each takes more than a second, and nothing of them is used."""
    script = [sys.executable, "-c", TRAINING, engine, optimizer]
    assert (
        subprocess.run(
            script, capture_output=True, text=True, check=True, timeout=100
        ).stdout.split()
        == []
    )
