"""Layers written faster give the same values and gradients."""

import pytest
import torch
from torch import nn

from coterie.engine._rewrites import StridedMaxPool, faster


@pytest.mark.parametrize(
    ("kernel", "shape"), [(2, (3, 2, 8, 8)), (2, (2, 4, 11, 7)), (3, (1, 2, 9, 10)), ((1, 2), (2, 3, 4, 5))]
)
def test_strided_slices_give_the_values_and_gradients_of_max_pooling(kernel, shape):
    stream = torch.Generator().manual_seed(0)
    for draw in (torch.randn(shape, generator=stream), torch.randn(shape, generator=stream).clamp(min=0)):
        results = []
        for pool in (nn.MaxPool2d(kernel), faster(nn.Sequential(nn.MaxPool2d(kernel)))[0]):
            x = draw.clone().requires_grad_()
            y = pool(x)
            (y * torch.arange(y.numel()).reshape(y.shape)).sum().backward()
            with torch.no_grad():
                assert torch.equal(pool(x), y)
            results.append((y.detach(), x.grad))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])


def test_of_equal_entries_the_first_gets_the_gradient_and_nan_wins():
    x = torch.tensor([[1.0, 2.0, 5.0, torch.nan], [2.0, 2.0, 7.0, 3.0]])[None, None].requires_grad_()
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
    assert type(faster(nn.Sequential(pool))[0]) is nn.MaxPool2d


def test_the_original_module_is_not_changed():
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Sequential(nn.ReLU(), nn.MaxPool2d(2)))
    copy = faster(module)
    assert type(module[1][1]) is nn.MaxPool2d
    assert type(copy[1][1]) is StridedMaxPool
    assert copy.state_dict().keys() == module.state_dict().keys()
