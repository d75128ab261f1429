"""Traces in which max-pooling is rewritten, and those in which it must stay where it is."""

import pytest
import torch
from tests.traces import build, evaluate
from torch import nn
from torch.nn import functional

from coterie.engine._base import cross_entropy
from coterie.engine.native.images import ImageLowering
from coterie.engine.native.pooling import join_convolutions_with_pooling, pool_before_activations
from coterie.engine.native.simple import is_simple, separate_windows
from coterie.engine.native.trace import Operation, Ref, Trace, record
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


# ---------------------------------------------------------------- traces by hand

WINDOWS = ([2, 2], [2, 2], [0, 0], [1, 1], False)
"""Two by two pixels side by side: size, stride, padding, dilation, and nothing over the edge."""
IMAGES = {0: (2, 3, 4, 6), 1: (2, 3, 2, 3)}
"""Images, and gradients of what is pooled of them."""
POOLED = (POOL, (2,), (3, 4), *WINDOWS)


def activated(kind: str = "relu", slope: tuple[float, ...] = ()) -> Trace:
    """Return 3, the pooling of an activation 2 of the images 0; and 6, their gradient by way of 5."""
    back, read, more = "threshold_backward", 2, (0,)
    if kind == "leaky_relu":
        back, read, more = "leaky_relu_backward", 0, (slope[0] if slope else 0.01, False)
    pooling = Operation(f"{POOL}_backward", (Ref(1), Ref(2), *WINDOWS, Ref(4)), {}, (Ref(5),))
    trace = build(IMAGES, (kind, (0,), 2, *slope), POOLED, outputs=[2])
    trace.nodes.append(pooling)
    trace.nodes.append(Operation(back, (Ref(5), Ref(read), *more), {}, (Ref(6),)))
    for number in (5, 6):
        trace.kinds[number] = trace.kinds[0]
    trace.outputs = [Ref(3), Ref(6)]
    return trace


def check_equal(trace: Trace, other: Trace) -> None:
    stream = torch.Generator().manual_seed(1)
    values = [torch.randn(IMAGES[n], generator=stream, dtype=torch.float64) for n in (0, 1)]
    before, after = evaluate(trace, values), evaluate(other, values)
    for ref in trace.outputs:
        torch.testing.assert_close(before[ref], after[ref])
    for ref, value in after.items():
        assert other.kind_of(ref).shape == tuple(value.shape)


def names(trace: Trace) -> list[str]:
    return [node.name for node in trace.nodes]


@pytest.mark.parametrize(
    "made", [("relu",), ("leaky_relu",), ("leaky_relu", (0.3,))], ids=["relu", "leaky", "slope"]
)
@pytest.mark.parametrize("aliased", [False, True])
def test_a_trace_with_the_pooling_first_has_the_same_results(made, aliased):
    trace = activated(*made)
    if aliased:
        # The backward pass reads what was saved by another name.
        trace.nodes.insert(1, Operation("detach", (Ref(2),), {}, (Ref(7),)))
        trace.kinds[7] = trace.kinds[2]
        for node in trace.nodes[2:]:
            node.args = tuple(Ref(7) if one == Ref(2) else one for one in node.args)
    found = pool_before_activations(trace)
    activation, slope = made[0], trace.nodes[-1].name
    assert names(found) == [POOL, activation, slope, f"{POOL}_backward"]
    check_equal(trace, found)


def test_a_pooling_without_a_backward_pass_comes_first_too():
    trace = activated()
    del trace.nodes[2:]
    trace.outputs = [Ref(3)]
    found = pool_before_activations(trace)
    assert names(found) == [POOL, "relu"]
    check_equal(trace, found)
    # Where something else reads the activation, it stays.
    for change in (lambda: trace.outputs.append(Ref(2)), lambda: read_again(trace, 2)):
        trace.outputs = [Ref(3)]
        change()
        assert names(pool_before_activations(trace))[:2] == ["relu", POOL]


def read_again(trace: Trace, number: int) -> None:
    """Another function of a value, which the trace returns."""
    trace.nodes.append(Operation("sin", (Ref(number),), {}, (Ref(8),)))
    trace.kinds[8] = trace.kinds[number]
    trace.outputs.append(Ref(8))


def change_node(trace: Trace, place: int, *args: object, name: str = "") -> None:
    node = trace.nodes[place]
    trace.nodes[place] = Operation(name or node.name, args or node.args, {}, node.outs)


LEAKY = ("leaky_relu", (0.1,))


@pytest.mark.parametrize(
    ("made", "change"),
    [
        (("relu",), lambda trace: trace.outputs.append(Ref(2))),
        (("relu",), lambda trace: trace.outputs.append(Ref(5))),
        (("relu",), lambda trace: read_again(trace, 2)),
        (("relu",), lambda trace: read_again(trace, 5)),
        (("relu",), lambda trace: change_node(trace, 3, Ref(5), Ref(0), 0)),
        (("relu",), lambda trace: change_node(trace, 3, Ref(5), Ref(0), 0.1, False, name="leaky_relu_backward")),
        (LEAKY, lambda trace: change_node(trace, 3, Ref(5), Ref(0), 0.1, True)),
        (LEAKY, lambda trace: change_node(trace, 3, Ref(5), Ref(1), 0.1, False)),
        (LEAKY, lambda trace: change_node(trace, 3, Ref(5), Ref(0), 0, name="threshold_backward")),
        (LEAKY, lambda trace: change_node(trace, 0, Ref(0), -0.1)),
        (LEAKY, lambda trace: change_node(trace, 0, Ref(0), 0.0)),
        (LEAKY, lambda trace: read_again(trace, 2)),
        (("relu",), lambda trace: change_node(trace, 0, Ref(0), name="sin")),
    ],
    ids=[
        "the activation is a result", "the gradient between is a result", "the activation is read elsewhere",
        "the gradient between is read elsewhere", "another saved value", "the slope of another function",
        "the slope of a result in place", "a slope at another place", "another slope", "a function that falls",
        "a function that is flat", "a leaky activation is read elsewhere", "another function",
    ],
)  # fmt: skip
def test_the_order_stays_where_something_else_depends_on_it(made, change):
    trace = activated(*made)
    assert names(pool_before_activations(trace)) != names(trace)
    change(trace)
    assert names(pool_before_activations(trace)) == names(trace)


def convolved() -> Trace:
    """Return 4, the pooling of a convolution of the images 0 by 1 and 2; and the gradients 8, 9 and 10."""
    shapes = {0: (2, 3, 6, 8), 1: (4, 3, 3, 3), 2: (4,), 6: (2, 4, 2, 3)}
    options = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    trace = build(
        shapes, ("convolution", (0, 1, 2), 3, *options), (POOL, (3,), (4, 5), *WINDOWS), outputs=[4]
    )
    back = Operation(f"{POOL}_backward", (Ref(6), Ref(3), *WINDOWS, Ref(5)), {}, (Ref(7),))
    mask = [True, True, True]
    args = (Ref(7), Ref(0), Ref(1), [4], *options, mask)
    end = Operation("convolution_backward", args, {}, (Ref(8), Ref(9), Ref(10)))
    trace.nodes += [back, end]
    trace.outputs = [Ref(4), Ref(8), Ref(9), Ref(10)]
    return trace


def test_the_joined_operations_take_the_arguments_of_both():
    trace = convolved()
    conv, _pool, back, end = trace.nodes
    forward, backward = join_convolutions_with_pooling(trace).nodes
    assert (forward.name, forward.args) == ("convolution_pool", (*conv.args, (2, 2)))
    assert forward.outs == (Ref(4), Ref(5))
    assert backward.name == "convolution_pool_backward"
    # The gradient of what was pooled, images and weights, and the places of the largest.
    assert backward.args == (Ref(6), Ref(0), Ref(1), Ref(5), *end.args[3:], (2, 2))
    assert backward.outs == end.outs
    assert back.outs[0] not in backward.refs()
    del trace.nodes[2:]
    assert names(join_convolutions_with_pooling(trace)) == ["convolution_pool"]


@pytest.mark.parametrize(
    "change",
    [
        lambda trace: trace.outputs.append(Ref(3)),
        lambda trace: trace.outputs.append(Ref(7)),
        lambda trace: read_again(trace, 3),
        lambda trace: read_again(trace, 7),
        lambda trace: change_node(trace, 0, name="linear"),
        lambda trace: change_node(trace, 3, name="other_backward"),
        lambda trace: change_node(trace, 1, Ref(3), [2, 2], [1, 1]),
        lambda trace: trace.nodes.pop(),
    ],
    ids=[
        "images are a result", "their gradient is a result", "images are read elsewhere",
        "their gradient is read elsewhere", "another layer", "another gradient", "windows that overlap",
        "a gradient that nobody reads",
    ],
)  # fmt: skip
def test_a_convolution_stays_apart_where_something_else_needs_its_results(change):
    trace = convolved()
    trace.kinds[7] = trace.kinds[3]
    change(trace)
    assert names(join_convolutions_with_pooling(trace)) == names(trace)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (([2, 3], [2, 3], [0, 0], [1, 1], False), (2, 3)),
        (([2],), (2, 2)),
        (([2, 3], []), (2, 3)),
        (([3], [3]), (3, 3)),
        (([2, 3], [2]), None),
        (([2, 3], [3, 2]), None),
        (([2, 2], [2, 1]), None),
        (([2, 2], [1, 2]), None),
        (([2, 2], [2, 2], [0, 1]), None),
        (([2, 2], [2, 2], [0, 0], [1, 2]), None),
        (([2, 2], [2, 2], [0, 0], [2, 1]), None),
        (([2, 2], [2, 2], [0, 0], [1, 1], True), None),
    ],
)
def test_windows_are_separate_where_they_neither_overlap_nor_overhang(options, expected):
    assert separate_windows(options) == expected
    assert is_simple(POOL, (Ref(0), *options)) is (expected is not None)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [({}, True), ({3: [1, 2]}, False), ({3: [2, 1]}, False), ({4: [3, 3]}, True), ({5: [1, 2]}, False),
     ({6: True}, False), ({8: 2}, False)],
)  # fmt: skip
def test_a_simple_convolution_takes_every_pixel_once(changed, expected):
    args = [Ref(0), Ref(1), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1]
    for place, value in changed.items():
        args[place] = value
    assert is_simple("convolution", args) is expected
    assert is_simple("tanh", [Ref(0)])
    assert not is_simple("gelu", [Ref(0)])
