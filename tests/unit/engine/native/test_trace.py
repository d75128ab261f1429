"""What a record of a step consists of: sizes as functions of the samples, constants, views and writes."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from coterie.engine.native import trace
from coterie.engine.native.trace import (
    ArrayKind,
    Dim,
    NotTraceableError,
    Operation,
    Ratio,
    Ref,
    Trace,
    fixed_sizes,
    read_pair,
)
from coterie.models.layout import Layout

N = Dim(2, 3)
"""2 n + 3."""


def recorded(function, *inputs, known=lambda name: True):
    """Record a function; return its trace, and the value of its result."""
    with trace._Recorder([*inputs], lambda: "layer", known) as recorder:
        out = function(*inputs)
        return recorder.trace, recorder.ref(out)


# ---------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (N + 4, Dim(2, 7)), (4 + N, Dim(2, 7)), (N - 4, Dim(2, -1)), (4 - N, Dim(-2, 1)),
        (-N, Dim(-2, -3)), (N * 5, Dim(10, 15)), (5 * N, Dim(10, 15)), (N * 0, 0),
        (N + Dim(3, 1), Dim(5, 4)), (N - N, 0), (N - Dim(2, 1), 2), (Dim(4, 6) // 2, N),
        (Dim(4, 6) // N, 2), (Dim(6) // Dim(3), 2),
    ],
)  # fmt: skip
def test_sizes_are_linear_functions_of_the_samples(made, expected):
    """What does not depend on the samples is a plain number."""
    assert made == expected
    assert type(made) is type(expected)
    for samples in (1, 7):
        assert trace.evaluate_size(made, samples) == trace.evaluate_size(expected, samples)


def test_a_size_is_evaluated_and_written_as_its_formula():
    assert (N.at(10), trace.evaluate_size(N, 10), trace.evaluate_size(6, 10)) == (23, 23, 6)
    assert [str(one) for one in (Dim(1), Dim(2), Dim(1, 4), N)] == [
        "(n)",
        "(n * 2)",
        "(n + 4)",
        "(n * 2 + 3)",
    ]


@pytest.mark.parametrize(
    ("divide", "words"),
    [
        (lambda: N // 2, "no multiple of the number of samples"),
        (lambda: Dim(2, 4) // 4, "no multiple"),
        (lambda: Dim(4, 1) // 4, "no multiple"),
        (lambda: Dim(5, 7) // N, "no multiple"),  # neither slope nor start
        (lambda: Dim(3, 0) // Dim(2, 0), "no multiple"),
        (lambda: N * N, "every sample of a batch with every other"),
    ],
)
def test_what_is_no_linear_function_of_the_samples_is_refused(divide, words):
    with pytest.raises(NotTraceableError, match=words):
        divide()


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (4, 4, 4),
        (3, 5, Dim(1, 0)),
        (7, 11, Dim(2, 1)),
        (1.5, 1.5, 1.5),
        (True, True, True),
        ([3, "a"], [5, "a"], [Dim(1, 0), "a"]),
        ((3, (6,)), (5, (10,)), (Dim(1, 0), (Dim(2, 0),))),
        (1 / 3, 1 / 5, Ratio(value=1.0)),  # a mean
        (4 / 3, 4 / 5, Ratio(value=4.0)),
        (3 / 2, 5 / 4, Ratio(places=1)),  # Bessel's correction
        (12 / 11, 20 / 19, Ratio(places=4)),
        (None, None, None),
    ],
)
def test_an_argument_of_records_of_three_and_of_five_samples_is_one_of_any_number(
    first, second, expected
):
    assert trace._unified(first, second, (3, 5)) == expected
    assert type(trace._unified(first, second, (3, 5))) is type(expected)


def test_a_number_that_is_none_is_the_same_number():
    assert math.isnan(trace._unified(math.nan, math.nan, (3, 5)))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (3, 6), (1, True), (1.5, 2.5), (0.0, 0.2), (1 / 3, 0.0), ("a", "b"), ([1], [1, 2]), ([1], 1),
        (1.0, 5 / 4), (3 / 2, 1.0), (12 / 11, 5 / 4), (3, 3.0),
    ],
)  # fmt: skip
def test_an_argument_that_follows_no_rule_is_refused(first, second):
    with pytest.raises(NotTraceableError, match="depend on the number of samples"):
        trace._unified(first, second, (3, 5))


def test_images_of_a_size_that_is_not_known_are_refused():
    assert fixed_sizes((3, 4)) == [3, 4]
    with pytest.raises(NotTraceableError, match="depends on the number of samples"):
        fixed_sizes((3, N))


@pytest.mark.parametrize(
    ("values", "default", "expected"),
    [(3, None, (3, 3)), ([2], None, (2, 2)), ([2, 3], None, (2, 3)), ((2, 3), 7, (2, 3)), (0, 7, (0, 0)),
     (None, 5, (5, 5)), ([], 5, (5, 5)), (None, [2, 3], (2, 3)), ([], [2, 3], (2, 3))],
)  # fmt: skip
def test_one_number_serves_both_axes_and_none_is_the_default(values, default, expected):
    assert read_pair(values, default) == expected


# ---------------------------------------------------------------- two records as one


def pair(*nodes, constants=None, kinds=None, outputs=(3,)):
    return Trace(
        nodes=list(nodes),
        kinds=kinds or {number: ArrayKind((3,), torch.float32) for number in range(6)},
        inputs=[Ref(0)],
        outputs=[None if one is None else Ref(one) for one in outputs],
        constants=constants or {},
    )


def node(name, reads, makes, *more, **named):
    return Operation(name, (*map(Ref, reads), *more), named, (Ref(makes),))


def test_operations_that_no_result_needs_are_left_out_and_the_order_stays():
    nodes = [node("a", [0], 1), node("b", [0], 2), node("c", [1], 3), node("d", [3], 4)]
    joined = trace._joined(pair(*nodes), pair(*nodes), (3, 5))
    assert [one.name for one in joined.nodes] == ["a", "c"]
    assert joined.outputs == [Ref(3)]
    nothing = trace._joined(pair(*nodes, outputs=(None,)), pair(*nodes, outputs=(None,)), (3, 5))
    assert nothing.nodes == []


def test_shapes_and_arguments_become_functions_of_the_samples():
    def of(samples):
        kinds = {number: ArrayKind((samples, 4), torch.float64) for number in range(6)}
        return pair(node("a", [0], 3, samples, scale=2 * samples), kinds=kinds)

    joined = trace._joined(of(3), of(5), (3, 5))
    assert joined.kinds[3] == ArrayKind((Dim(1), 4), torch.float64)
    assert joined.kind_of(Ref(3)) == joined.kinds[3]
    (one,) = joined.nodes
    assert (one.args, one.kwargs) == ((Ref(0), Dim(1)), {"scale": Dim(2)})
    assert one.refs() == [Ref(0)]


def test_a_constant_that_differs_between_records_is_none():
    def constants(*values):
        return dict(enumerate(map(torch.tensor, values)))

    first = pair(node("a", [0], 3), constants=constants([1.0], [2.0], [3.0, 3.0], [4.0]))
    second = pair(node("a", [0], 3), constants=constants([1.0], [9.0], [3.0]))
    joined = trace._joined(first, second, (3, 5))
    assert list(joined.constants) == [0]
    assert len(first.constants) == 4, "the record itself stays"


@pytest.mark.parametrize(
    "other",
    [
        pair(node("b", [0], 3)),
        pair(node("a", [0], 3), node("a", [0], 4)),
        pair(node("a", [0], 3), outputs=(2,)),
        pair(node("a", [0], 2)),
        pair(node("a", [0], 3, scale=1)),
        pair(node("a", [1], 3)),
    ],
)
def test_records_of_other_operations_are_refused(other):
    with pytest.raises(NotTraceableError, match="depend on the number of samples"):
        trace._joined(pair(node("a", [0], 3)), other, (3, 5))


@pytest.mark.parametrize(
    ("first", "second", "separate"),
    [
        ([], [], True),
        ([(3,)], [(5,)], True),
        ([(6, 2)], [(10, 2)], True),
        ([(4, 2)], [(4, 2)], True),  # it belongs to no sample
        ([()], [()], True),
        ([(6, 2)], [(10, 3)], False),
        ([(2, 3)], [(2, 5)], False),  # the samples do not come first
        ([(3,), (3, 3)], [(5,), (5, 5)], False),
        ([(6,)], [(9,)], False),
        ([(4,)], [(6,)], False),
    ],
)
def test_draws_lie_sample_after_sample_or_belong_to_none(first, second, separate):
    assert trace._draw_by_sample(first, second) is separate


# ---------------------------------------------------------------- one record


def test_what_is_made_of_constants_alone_is_a_constant():
    """A value that depends on an input is none, and one made of both neither."""
    x, held = torch.rand(3), torch.tensor([1.0, 2.0, 3.0])
    values = {}

    def function(x):
        twice = held * 2
        values["twice"], values["mixed"] = twice, twice + x
        return values["mixed"]

    with trace._Recorder([x], lambda: "layer", lambda name: True) as recorder:
        function(x)
        numbers = {name: recorder.ref(value).number for name, value in values.items()}
        numbers["held"], numbers["x"] = recorder.ref(held).number, recorder.ref(x).number
        constants = recorder.trace.constants
    assert set(constants) == {numbers["held"], numbers["twice"]}
    assert constants[numbers["twice"]].tolist() == [2.0, 4.0, 6.0]
    assert {one.layer for one in recorder.trace.nodes} == {"layer"}
    held += 1
    assert constants[numbers["held"]].tolist() == [1.0, 2.0, 3.0], "as it was"


@pytest.mark.parametrize(("entries", "kept"), [(1 << 16, True), ((1 << 16) + 1, False)])
def test_large_values_of_constants_are_made_again_and_not_kept(entries, kept):
    held = torch.zeros(1)
    found, out = recorded(lambda x: held.expand(entries) + 1, torch.rand(1))
    assert (out.number in found.constants) is kept


def test_a_write_through_a_view_is_one_to_its_base_and_to_all_other_views():
    """The program of the record, executed by hand: rows 0 of x doubled, and seen by all."""
    x = torch.arange(6.0).reshape(2, 3)

    def function(x):
        base = x * 1
        column, row = base[:, 1], base[0]
        row.mul_(2)
        return base.sum() + column.sum()

    found, _ = recorded(function, x)
    names = [one.name for one in found.nodes]
    assert names.count("write") == 1
    written = next(one for one in found.nodes if one.name == "write")
    sizes, strides, offset, of_base = written.args[2:]
    assert (sizes, strides, offset, of_base) == ([3], [1], 0, [3, 1])
    # The other view is taken from the base again: column 1 begins at place 1.
    again = next(one for one in found.nodes if one.name == "as_strided")
    assert again.args[0] == written.outs[0]
    assert list(again.args[1:]) == [[2], [3], 1, [3, 1]]


def test_a_write_to_the_whole_needs_no_place():
    def function(x):
        base = x * 1
        base.view(3).add_(1)
        base[:] = base + 1
        return base

    found, _ = recorded(function, torch.rand(3))
    names = [one.name for one in found.nodes]
    assert "write" not in names
    assert "alias" in names


def test_a_result_that_is_its_argument_is_no_new_value():
    x = torch.rand(3)
    found, out = recorded(torch.Tensor.contiguous, x)
    assert out == found.inputs[0]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: x * x.sum().item(), "depends on its data"),
        (torch.nonzero, "depends on its data"),
        (torch.unique, "depends on its data"),
        (lambda x: x + torch.rand_like(x), "draws random numbers of its own"),
    ],
)
def test_what_depends_on_data_or_on_chance_is_refused(function, words):
    with pytest.raises(NotTraceableError, match=words):
        recorded(function, torch.rand(3))


@pytest.mark.parametrize("classes", [1, 3])
def test_one_hot_vectors_are_pytorchs_where_the_number_of_classes_is_given(classes):
    x = torch.tensor([0, 2, 1]) % classes
    expected = functional.one_hot(x, classes)
    found = trace._compare_classes(x, classes)
    assert (found.dtype, found.tolist()) == (expected.dtype, expected.tolist())


def test_one_hot_vectors_of_classes_that_are_not_known_are_refused():
    x = torch.tensor([0, 2, 1])
    for given in ((), (-1,), (0,)):
        with pytest.raises(NotTraceableError, match="number of its classes depends on its data"):
            trace._compare_classes(x, *given)
    with pytest.raises(RuntimeError):
        functional.one_hot(x, 0)  # by PyTorch too


def test_an_operation_that_is_not_known_is_made_of_simpler_ones():
    def known(name):
        return name != "silu"

    found, _ = recorded(torch.nn.functional.silu, torch.rand(3), known=known)
    names = {one.name for one in found.nodes}
    assert "silu" not in names
    assert names
    in_place, _ = recorded(
        lambda x: torch.nn.functional.silu(x * 1, inplace=True), torch.rand(3), known=known
    )
    assert "silu" not in {one.name for one in in_place.nodes}


def test_a_frozen_normalization_is_made_of_simple_operations_where_it_has_a_gradient():
    """Its numbers are PyTorch's; without a gradient it stays one operation."""
    x, mean, var, weight, bias = torch.rand(5, 4, 3, 3, dtype=torch.float64).unbind(0)[0:1] + tuple(
        torch.rand(4, 3, dtype=torch.float64)
    )
    given = x[None].transpose(1, 3).contiguous(), mean, var, weight, bias
    found = trace._normalize_batch(*given, False, 0.1, 1e-3)
    expected = functional.batch_norm(*given, training=False, momentum=0.1, eps=1e-3)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    names = {
        one.name
        for one in recorded(lambda *parts: trace._normalize_batch(*parts, False), *given)[0].nodes
    }
    assert names
    assert not {name for name in names if "batch_norm" in name}
    with torch.no_grad():
        assert trace._normalize_batch(*given, False) is NotImplemented


def squared(outputs, targets):
    """The loss of each sample."""
    return ((outputs - targets) ** 2).sum(1)


def test_a_step_is_recorded_with_its_gradients_and_the_paths_of_its_layers():
    """A linear model of two outputs: losses of n samples, gradients of its weight and its bias."""
    layout = Layout(nn.Sequential(nn.Linear(4, 2)), torch.float64)
    x, y = torch.rand(2, 4, dtype=torch.float64), torch.rand(2, 2, dtype=torch.float64)
    found = trace.record(layout, squared, x, y)
    kinds = [found.train.kind_of(ref).shape for ref in found.train.outputs if ref is not None]
    assert kinds[0] == (Dim(1),)
    assert sorted(map(len, kinds[1:])) == [1, 2]
    assert [found.judge.kind_of(ref).shape for ref in found.judge.outputs] == [(Dim(1),)] * 2
    assert not found.together
    assert any(one.layer.endswith("0") for one in found.train.nodes)


class OverTheBatch(nn.Module):
    """A model that subtracts the mean of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 2)

    def forward(self, x):
        return self.inner(x - x.mean(0))


class DrawsByFeature(nn.Module):
    """A model whose draws for a feature lie side by side: those of a sample depend on how many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 2)

    def forward(self, x):
        return self.inner(x * functional.dropout(torch.ones(4, len(x)).to(x), 0.5, True).t())


@pytest.mark.parametrize(
    ("module", "together"),
    [
        (DrawsByFeature, True),
        (OverTheBatch, True),
        (lambda: nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)), True),
        (lambda: nn.Sequential(nn.Linear(4, 2), nn.Tanh()), False),
        (lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 2)), False),
    ],
    ids=["draws by feature", "mean", "batch normalization", "none", "dropout"],
)
def test_whether_samples_depend_on_those_next_to_them_is_found(module, together):
    layout = Layout(nn.Sequential(module()), torch.float64)
    x, y = torch.rand(2, 4, dtype=torch.float64), torch.rand(2, 2, dtype=torch.float64)
    assert trace.record(layout, squared, x, y).together is together


def test_what_pytorch_chooses_is_put_back_after_a_record_and_after_an_error():
    def states():
        backends = torch.backends
        return (
            backends.mha.get_fastpath_enabled(), backends.cuda.flash_sdp_enabled(),
            backends.cuda.mem_efficient_sdp_enabled(), torch._C._get_mkldnn_enabled(),
        )  # fmt: skip

    before = states()
    with trace._plain_operations():
        assert states() == (False,) * 4
    assert states() == before
    with pytest.raises(KeyError), trace._plain_operations():
        raise KeyError
    assert states() == before
