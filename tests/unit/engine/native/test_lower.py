"""Which kernels products are computed by, what is stored, and views that take no copy: plans, of which nothing is compiled."""

import math
import re

import pytest
import torch

from coterie.engine.native import lower
from coterie.engine.native.loops import Program, Value, common_shape, dense_strides, in_memory
from coterie.engine.native.lower import Lowering
from coterie.engine.native.trace import ArrayKind, Dim, NotTraceableError, Operation, Ref, Trace

T = torch.float32
N = Dim(1)


def lowering(trace: Trace | None = None, samples: int = 16) -> Lowering:
    return Lowering(Program(), trace or Trace(), samples, T)


def lying(shape, order=None, buffer="b", offset=0) -> Value:
    return in_memory(buffer, shape, dense_strides(shape, order), T, offset)


def texts(plan: Lowering) -> list[str]:
    return [statement.text for statement in plan.program.statements]


# ---------------------------------------------------------------- products

ROWS, TURNED = (0, 1), (1, 0)
"""A matrix whose columns lie side by side, and one whose rows do."""


@pytest.mark.parametrize(
    ("shape", "order", "columns", "expected"),
    [
        # Columns of the right factor lie side by side: nothing is done before.
        ((4, 30), ROWS, 5, ["product<5, 30, 1>(4, 30, a + 0, b + 0, 5, b0, MORE_b0);"]),
        ((N, 30), ROWS, 5, ["product<5, 30, 1>((n), 30, a + 0, b + 0, 5, b0, MORE_b0);"]),
        # The stride of one row, and of one column, is never used.
        ((1, 30), ROWS, 5, ["product<5, 0, 1>(1, 30, a + 0, b + 0, 5, b0, MORE_b0);"]),
        ((4, 1), ROWS, 5, ["product<5, 1, 0>(4, 1, a + 0, b + 0, 5, b0, MORE_b0);"]),
        # Rows of the left factor are strided.
        ((4, 30), TURNED, 5, ["product<5, 1, 4>(4, 30, a + 0, b + 0, 5, b0, MORE_b0);"]),
    ],
)
def test_products_of_columns_side_by_side_are_computed_as_they_lie(shape, order, columns, expected):
    plan = lowering()
    found = plan._product(lying(shape, order, "a"), lying((shape[1], columns)))
    assert texts(plan) == expected
    assert found.shape == (shape[0], columns)
    assert plan.more == {"b0": "MORE"}, "it can add to what is there"


LONG, SHORT = 48, 47
"""Sums of a product from which vectors pay, by measurement; the same number of rows is too many."""


@pytest.mark.parametrize(
    ("rows", "inner", "left", "dots"),
    [
        (N, LONG, ROWS, True),
        (N, SHORT, ROWS, False),
        (47, LONG, ROWS, True),
        (48, LONG, ROWS, False),
        (4, LONG, TURNED, False),
    ],
)
def test_few_rows_of_long_sums_are_products_of_vectors_and_others_are_packed(
    rows, inner, left, dots
):
    plan = lowering()
    plan._product(lying((rows, inner), left, "a"), lying((inner, 5), TURNED))
    found = [text.split("<")[0] for text in texts(plan)]
    assert found == (["dots"] if dots else ["pack_columns", "product"])
    if dots:
        size = "(n)" if rows is N else rows
        call = f"dots<5>({size}, {inner}, a + 0, {inner}, b + 0, {inner}, b0, MORE_b0);"
        assert texts(plan) == [call]


@pytest.mark.parametrize(("columns", "wide"), [(2, 16), (15, 16), (16, 16), (17, 32), (33, 48)])
def test_a_packed_matrix_has_rows_of_whole_vectors_and_is_packed_once(columns, wide):
    plan = lowering()
    right = lying((3, columns), TURNED)
    for _ in range(2):
        plan._product(lying((4, 3), ROWS, "a"), right)
    pack, one, other = texts(plan)
    packed = next(iter(plan.program.statements[0].writes))
    assert pack == f"pack_columns<{columns}, {wide}>(3, b + 0, 1, 3, {packed});"
    assert plan.program.buffers[packed].size == 3 * wide
    for text in (one, other):
        assert text.startswith(f"product<{columns}, 3, 1>(4, 3, a + 0, {packed} + 0, {wide}, ")
    # A matrix elsewhere in the same memory is another one.
    plan._product(lying((4, 3), ROWS, "a"), lying((3, columns), TURNED, offset=2))
    assert len([text for text in texts(plan) if text.startswith("pack_columns")]) == 2


def test_a_matrix_that_steps_of_time_read_is_packed_whatever_the_rows():
    """Four products with views of the weights 1, of which one has two names."""
    nodes = [Operation("t", (Ref(1),), {}, (Ref(2),))]
    for step in range(4):
        nodes.append(Operation("mm", (Ref(0), Ref(2)), {}, (Ref(3 + step),)))
    trace = Trace(nodes, {number: ArrayKind((4, 4), T) for number in range(8)})
    assert lowering(trace)._again == {Ref(2)}
    del nodes[-1]
    assert lowering(trace)._again == set()
    nodes.append(Operation("detach", (Ref(2),), {}, (Ref(7),)))
    nodes.append(Operation("addmm", (Ref(0), Ref(0), Ref(7)), {}, (Ref(8),)))
    plan = lowering(trace)
    assert plan._again == {Ref(2), Ref(7)}
    plan._node_now = nodes[1]
    plan._product(lying((4, LONG), ROWS, "a"), lying((LONG, 5), TURNED))
    assert [text.split("<")[0] for text in texts(plan)] == ["pack_columns", "product"]


def test_products_of_many_pairs_are_a_loop_that_adds_to_nothing():
    plan = lowering()
    found = plan._product(lying((N, 4, 3), buffer="a"), lying((N, 3, 5)))
    assert texts(plan) == [
        "for (long q = 0; q < (n); q++) product<5, 3, 1>(4, 3, a + 0 + q * 12, b + 0 + q * 15, 5, "
        "b0 + q * 20, false);"
    ]
    assert plan.more == {}
    assert found.shape == (N, 4, 5)
    plan = lowering()
    plan._product(lying((6, 4, 3), buffer="a"), lying((6, 3, 5), (0, 2, 1)))
    pack, _product = texts(plan)
    assert pack == (
        "for (long q = 0; q < 6; q++) pack_columns<5, 16>(3, b + 0 + q * 15, 1, 3, b1 + q * 48);"
    )


def test_samples_are_rows_of_a_product_whatever_side_they_are_on():
    plan = lowering()
    found = plan._product(lying((4, 30), buffer="a"), lying((30, N), TURNED))
    assert found.shape == (4, N)
    assert found.memory.strides == (1, 4)
    assert texts(plan)[-1].startswith("product<4, 30, 1>((n), 30, b + 0, ")
    with pytest.raises(NotTraceableError, match="every sample of a batch with every other"):
        plan._product(lying((N, 4)), lying((4, N)))


# ---------------------------------------------------------------- what is stored


@pytest.mark.parametrize(
    ("uses", "cost", "dtype", "stored"),
    [
        (1, 1, T, False), (2, 1, T, True), (2, 0, T, False), (1, 40, T, False), (1, 41, T, True),
        (0, 1, T, False), (2, 41, torch.bool, False),
    ],
)  # fmt: skip
def test_long_expressions_and_those_that_several_read_are_computed_once(uses, cost, dtype, stored):
    nodes = [Operation("sin", (Ref(0),), {}, (Ref(1 + n),)) for n in range(uses)]
    plan = lowering(Trace(nodes))
    value = Value((N, 3), lying((N, 3)).leaves, lambda parts: f"f({parts[0]})", dtype, cost)
    found = plan._store_if_needed(Ref(0), value)
    assert (found is not value) == stored
    assert len(texts(plan)) == stored
    # A result of the trace is read, too.
    if uses == 1:
        plan = lowering(Trace(nodes, outputs=[Ref(0), None]))
        assert plan._store_if_needed(Ref(0), value) is not value


@pytest.mark.parametrize(
    ("given", "size", "expected"),
    [(None, 5, 0), (0, 5, 0), (2, 5, 2), (-2, 5, 3), (-5, 5, 0), (-9, 5, 0), (-1, Dim(2), Dim(2, -1)), (3, N, 3)],
)  # fmt: skip
def test_a_slice_starts_where_pythons_does(given, size, expected):
    assert lower._first_place(given, size) == expected
    if isinstance(size, int):
        assert expected == slice(given, None).indices(size)[0]


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ([], ()), ([()], ()), ([(3,), ()], (3,)), ([(4, 1), (3,)], (4, 3)), ([(1,), (N, 1, 1)], (N, 1, 1)),
        ([(N, 3), (1, 1)], (N, 3)),
    ],
)  # fmt: skip
def test_shapes_are_broadcast_from_the_last_axis(shapes, expected):
    assert common_shape(shapes) == expected
    if all(isinstance(size, int) for shape in shapes for size in shape):
        assert torch.broadcast_shapes(*shapes) == expected


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [((2, 3), (2, 3), True), ((2, 3), (3, 2), False), ((2,), (2, 1), False), ((N,), (N,), True), ((N,), (Dim(2),), False)],
)  # fmt: skip
def test_shapes_are_compared_for_any_number_of_samples(one, other, equal):
    assert lower._have_equal_sizes(one, other) is equal


def test_a_result_of_another_size_than_recorded_is_refused():
    """Its readers would read beyond its memory."""
    kinds = {0: ArrayKind((2, 3), T), 1: ArrayKind((2, 4), T)}
    plan = lowering(Trace([Operation("sin", (Ref(0),), {}, (Ref(1),), "body.0")], kinds))
    plan.values[Ref(0)] = lying((2, 3))
    with pytest.raises(NotTraceableError, match=r"sin made \(2, 3\) for \(2, 4\) in 'body\.0'"):
        plan.run()


def test_views_take_no_statement():
    plan, x = lowering(), lying((N, 2, 3))
    turned = plan._op_permute(x, [0, 2, -2])
    assert (turned.shape, turned.memory.strides) == ((N, 3, 2), (6, 1, 3))
    assert plan._op_transpose(x, -1, 1).memory.strides == (6, 1, 3)
    wide = plan._op_unsqueeze(x, -1)
    assert (wide.shape, wide.memory.strides) == ((N, 2, 3, 1), (6, 3, 1, 0))
    assert plan._op_unsqueeze(x, 1).shape == (N, 1, 2, 3)
    assert plan._op_squeeze(wide, -1).shape == (N, 2, 3)
    assert plan._op_squeeze(wide, [1, 3]).shape == (N, 2, 3), "an axis of two entries stays"
    assert plan._op_squeeze(plan._op_unsqueeze(x, 0)).shape == (N, 2, 3)
    part = plan._sliced(x, 2, 1, 2)
    assert (part.shape, part.memory.strides, part.memory.offset) == ((N, 2, 2), (6, 3, 1), 1)
    every = plan._sliced(lying((9,)), 0, 2, 3, 3)
    assert (every.shape, every.memory.strides, every.memory.offset) == ((3,), (3,), 2)
    back = plan._op_flip(x, [-1])
    assert (back.memory.strides, back.memory.offset) == ((6, 3, -1), 2)
    assert plan._op_t(lying((4,))).shape == (4,)
    assert texts(plan) == []


# ---------------------------------------------------------------- expressions


def computed(value: Value, **of: float) -> float:
    """What an expression of one entry is, with numbers for its leaves, by Python."""
    text = value.make([str(of[leaf.buffer]) for leaf in value.leaves])
    text = re.sub(r"(\d)LL", r"\1", text.replace("std::", "math."))
    return eval(text, {"math": math, "T": float, "int64_t": int})


@pytest.mark.parametrize(
    "exponent", [-3, -2, -1, -0.5, 0, 0.25, 0.5, 1, 1.5, 2, 2.5, 3, 4, True, False]
)
def test_a_power_is_that_of_its_exponent_and_slow_only_where_no_shorter_one_is_known(exponent):
    plan = lowering()
    plan._kinds = [ArrayKind((N, 3), T)]
    found = plan._op_pow(lying((N, 3)), exponent)
    for base in (0.3, 2.0, 7.5):
        assert computed(found, b=base) == pytest.approx(base**exponent, rel=1e-12)
    if exponent in (-2, -1, -0.5, 0.5, 1, 2, 3):
        assert found.cost <= 3
    else:
        assert found.cost > 10
    of_values = plan._op_pow(lying((N, 3), buffer="a"), lying((N, 3)))
    assert computed(of_values, a=1.5, b=2.5) == pytest.approx(1.5**2.5, rel=1e-12)


@pytest.mark.parametrize("kind", ["argmax", "argmin"])
def test_the_place_of_the_largest_of_one_is_zero_and_a_whole_number(kind):
    plan = lowering()
    kept = plan._reduce(lying((N, 1, 3)), 1, True, kind)
    assert (kept.shape, kept.dtype, computed(kept)) == ((N, 1, 3), torch.int64, 0)
    assert plan._reduce(lying((N, 1, 3)), -2, False, kind).shape == (N, 3)
    assert texts(plan) == []
