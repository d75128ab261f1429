"""Layers written faster give the same values and gradients."""

import subprocess
import sys

import pytest
import torch
from tests.selection import first_only
from torch import nn

from coterie.engine import _rewrites
from coterie.engine._base import cross_entropy
from coterie.engine._rewrites import (
    StridedMaxPool,
    WindowedConv2d,
    cross_entropy_by_gather,
    grad_and_value,
    with_strided_pools,
    with_unfolded_convolutions,
    with_windowed_convolutions,
)


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
        for pool in (
            nn.MaxPool2d(kernel),
            with_strided_pools(nn.Sequential(nn.MaxPool2d(kernel)))[0],
        ):
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
    y = StridedMaxPool(2, 2)(x)
    assert y[0, 0, 0, 0] == 2
    assert bool(y[0, 0, 0, 1].isnan())
    y[0, 0, 0, 0].backward()
    assert x.grad is not None
    assert x.grad[0, 0].tolist() == [[0, 1, 0, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize(
    "pool",
    [
        nn.MaxPool2d(3, stride=2),
        nn.MaxPool2d(2, padding=1),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.MaxPool2d(2, dilation=2),
        nn.MaxPool2d(2, return_indices=True),
    ],
)
def test_pooling_of_other_kinds_is_left_alone(pool):
    assert type(with_strided_pools(nn.Sequential(pool))[0]) is nn.MaxPool2d


@pytest.mark.parametrize("rewrite", [with_unfolded_convolutions, with_windowed_convolutions])
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
    rewrite, options, most, monkeypatch
):
    """Of one client, and of three at once; where windows take too much memory, too."""
    monkeypatch.setattr(_rewrites, "_MAX_WINDOW_ENTRIES", most)
    stream = torch.Generator().manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(2, 3, 3, **options)).double()
    rewritten = rewrite(plain)
    assert type(rewritten[0]) is not nn.Conv2d

    def scored(module, tensors, x):
        y = torch.func.functional_call(module, tensors, (x,))
        return (y.sin() * torch.arange(y.numel()).reshape(y.shape)).sum()

    def drawn(*shape):
        return torch.randn(shape, generator=stream, dtype=torch.float64)

    tensors = {name: drawn(3, *value.shape) for name, value in plain.named_parameters()}
    x = drawn(3, 4, 2, 9, 11)
    results = [
        torch.func.vmap(
            torch.func.grad_and_value(lambda *given, module=module: scored(module, *given), (0, 1))
        )(tensors, x)
        for module in (plain, rewritten)
    ]
    torch.testing.assert_close(results[1], results[0])
    first = x[0].clone().requires_grad_()
    scored(rewritten, {name: value[0] for name, value in tensors.items()}, first).backward()
    torch.testing.assert_close(first.grad, results[0][0][1][0])


def test_convolutions_with_groups_or_other_borders_are_left_alone():
    for options in ({"groups": 2}, {"padding": 1, "padding_mode": "circular"}, {"padding": "same"}):
        assert (
            type(with_windowed_convolutions(nn.Sequential(nn.Conv2d(2, 2, 3, **options)))[0])
            is nn.Conv2d
        )
    assert type(with_windowed_convolutions(nn.Sequential(nn.Conv2d(2, 2, 3)))[0]) is WindowedConv2d


def test_the_original_module_is_not_changed():
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Sequential(nn.ReLU(), nn.MaxPool2d(2)))
    copy = with_strided_pools(module)
    assert type(module[1][1]) is nn.MaxPool2d
    assert type(copy[1][1]) is StridedMaxPool
    assert copy.state_dict().keys() == module.state_dict().keys()


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


@pytest.mark.parametrize(
    ("engine", "optimizer"),
    first_only([("compiled", "adam"), ("loop", "adam"), ("vmap", "sgd"), ("vmap", "adam")]),
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
