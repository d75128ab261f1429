"""Traces in which max-pooling is rewritten, and those in which it must stay where it is."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from coterie.engine._base import cross_entropy
from coterie.engine.native.images import ImageLowering
from coterie.engine.native.pooling import join_convolutions_with_pooling, pool_before_activations
from coterie.engine.native.trace import record
from coterie.models.layout import Layout

POOL = "max_pool2d_with_indices"


class Net(nn.Module):
    """A convolution, a function of it and its pooling."""

    def __init__(self, function):
        super().__init__()
        self.conv, self.head, self.function = nn.Conv2d(1, 2, 3), nn.Linear(18, 3), function

    def forward(self, x):
        return self.head(self.function(self.conv(x)).flatten(1))


def operations(function, rewrite):
    """Return the names of the operations of a net's step before and after a trace is rewritten."""
    x = torch.randn(3, 1, 8, 8)
    traces = record(
        Layout(Net(function)), cross_entropy, x, torch.tensor([0, 1, 2]), ImageLowering.knows
    )
    before, after = traces.train, rewrite(traces.train)
    defined = {ref for node in after.nodes for ref in node.outs} | {*after.inputs}
    constants = {
        ref for ref in (r for n in after.nodes for r in n.refs()) if ref.number in after.constants
    }
    assert {ref for node in after.nodes for ref in node.refs()} <= defined | constants
    return [[node.name for node in trace.nodes] for trace in (before, after)]


@pytest.mark.parametrize(
    "activation",
    [functional.relu, functional.leaky_relu, lambda x: functional.relu(x, inplace=True)],
    ids=["relu", "leaky relu", "in place"],
)
def test_max_pooling_comes_before_a_function_that_never_falls(activation):
    before, after = operations(
        lambda x: functional.max_pool2d(activation(x), 2), pool_before_activations
    )
    name = next(n for n in before if "relu" in n)
    slope = {"relu": "threshold_backward", "leaky_relu": "leaky_relu_backward"}[name]
    assert before.index(name) < before.index(POOL)
    assert after.index(POOL) < after.index(name)
    assert before.index(f"{POOL}_backward") < before.index(slope)
    assert after.index(slope) < after.index(f"{POOL}_backward")


@pytest.mark.parametrize(
    "function",
    [
        lambda x: functional.max_pool2d(torch.tanh(x), 2),
        lambda x: functional.max_pool2d(functional.leaky_relu(x, -0.1), 2),
        lambda x: functional.max_pool2d(y := torch.relu(x), 2) + y[:, :, ::2, ::2],
    ],
    ids=["not a ReLU", "a negative slope", "another reader"],
)
def test_it_stays_behind_other_functions_and_where_others_read_their_results(function):
    before, after = operations(function, pool_before_activations)
    assert before == after


def test_a_convolution_and_the_pooling_of_its_results_become_one():
    def rewritten(trace):
        return join_convolutions_with_pooling(pool_before_activations(trace))

    _before, after = operations(lambda x: functional.max_pool2d(torch.relu(x), 2), rewritten)
    assert {"convolution_pool", "convolution_pool_backward"} <= {*after}
    assert not {"convolution", "convolution_backward", POOL, f"{POOL}_backward"} & {*after}


@pytest.mark.parametrize(
    "function",
    [
        lambda x: functional.max_pool2d(x, 3, 2, 1),
        lambda x: functional.max_pool2d(x, 2, ceil_mode=True),
        lambda x: functional.max_pool2d(x, 2) * x.mean(),
        lambda x: functional.max_pool2d(torch.tanh(x), 2),
    ],
    ids=[
        "windows that overlap",
        "windows over the edge",
        "another reader",
        "a function between them",
    ],
)
def test_they_stay_apart_where_the_results_are_needed(function):
    before, after = operations(function, join_convolutions_with_pooling)
    assert before == after
