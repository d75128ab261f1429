"""Places of arrays in memory, the loops over them and the arena that holds them: by hand."""

import math

import pytest
import torch

from coterie.engine.native import loops
from coterie.engine.native.loops import Buffer, Leaf, Nest, Program, Value
from coterie.engine.native.trace import Dim, NotTraceableError

T = torch.float32
N = Dim(1)
"""The number of samples."""


def lying(shape, strides, offset=0, buffer="b"):
    """A value in memory."""
    return loops.in_memory(buffer, shape, strides, T, offset)


def strides_of(value):
    return [list(leaf.strides) for leaf in value.leaves]


# ---------------------------------------------------------------- sizes and strides


def test_sizes_multiply_also_with_the_number_of_samples():
    assert math.prod([2, N, 3]) == math.prod([N, 6]) == Dim(6)


def test_arrays_without_gaps_have_the_strides_of_their_order():
    assert loops.dense_strides([2, 3, 4]) == [12, 4, 1]
    # Channels last: channels are neighbors.
    assert loops.dense_strides([2, 3, 4, 5], (0, 2, 3, 1)) == [60, 1, 15, 3]
    assert loops.dense_strides([N, 3]) == [3, 1]
    assert loops.dense_strides([3, N]) == [N, 1]


@pytest.mark.parametrize(
    ("value", "order", "dense"),
    [
        (lying([2, 3], [3, 1]), [0, 1], True),
        (lying([2, 3], [3, 1]), [1, 0], False),
        (lying([2, 3], [1, 2]), [1, 0], True),
        (lying([2, 3], [4, 1]), [0, 1], False),
        (lying([1, 3], [99, 1]), [0, 1], True),  # one entry has no gap
        (loops.combine("{0}".format, [lying([2, 3], [3, 1])], T, 1, [2, 3]), [0, 1], False),
    ],
)
def test_what_is_dense_has_no_gap(value, order, dense):
    assert value.is_dense(order) is dense


def test_types_of_numbers_are_those_of_the_program():
    kinds = {
        torch.float64: "T",
        T: "T",
        torch.bool: "uint8_t",
        torch.int64: "int64_t",
        torch.int32: "int64_t",
    }
    assert {dtype: loops.c_type(dtype) for dtype in kinds} == kinds


def test_an_entry_is_written_with_what_its_place_consists_of():
    leaf = Leaf("b", 5, (12, 0, 1))
    assert leaf.text(["i", "j", "k"]) == "b[5 + i * 12 + k]"
    assert leaf.text(["0", "j", "0"]) == "b[5]"
    assert Leaf("b", 0, (0, 0, 0)).text(["i", "j", "k"]) == "b[0]"
    # Without memory an entry is the number itself.
    assert Leaf("", 3, (2,)).text(["i"]) == "(3 + i * 2)"
    assert leaf.pointer == "b + 5"


# ---------------------------------------------------------------- views


def test_an_array_grows_along_axes_of_size_one_and_by_new_ones_in_front():
    value = lying([3, 1], [7, 5], 2)
    assert loops.expand(value, [3, 1]) is value
    found = loops.expand(value, [4, 3, 6])
    assert (found.shape, strides_of(found), found.leaves[0].offset) == ((4, 3, 6), [[0, 7, 0]], 2)
    assert strides_of(loops.expand(lying([1], [5]), [2, 1])) == [[0, 5]]


@pytest.mark.parametrize(
    ("shape", "strides", "new", "expected"),
    [
        ([2, 3], [3, 1], [6], [1]),
        ([6], [1], [2, 3], [3, 1]),
        ([6], [4], [2, 3], [12, 4]),
        ([2, 3, 4], [12, 4, 1], [6, 4], [4, 1]),
        ([2, 3, 4], [12, 4, 1], [2, 12], [12, 1]),
        ([2, 1, 3], [3, 9, 1], [2, 3], [3, 1]),
        ([2, 3], [3, 1], [2, 1, 3, 1], [3, 0, 1, 0]),
        ([1, 1], [9, 9], [1], [0]),
        ([2, 3], [1, 2], [6], None),  # columns lie side by side
        ([2, 3], [4, 1], [6], None),  # a gap between the rows
        ([2, 3], [4, 1], [2, 3, 1], [4, 1, 0]),  # and none that matters
        ([N, 4], [4, 1], [N, 2, 2], [4, 2, 1]),
    ],
)
def test_an_array_has_another_shape_where_its_axes_lie_side_by_side(shape, strides, new, expected):
    found = loops.reshape(lying(shape, strides), new)
    if expected is None:
        assert found is None
        return
    assert found is not None
    assert (found.shape, strides_of(found)) == (tuple(new), [expected])


def test_one_leaf_that_takes_a_copy_is_enough_for_one():
    both = loops.combine(
        "{0} + {1}".format, [lying([2, 3], [3, 1]), lying([2, 3], [1, 2])], T, 1, [2, 3]
    )
    assert loops.reshape(both, [6]) is None


@pytest.mark.parametrize(
    ("old", "new", "groups"),
    [
        ([2, 3], [6], [([0, 1], [0])]),
        ([6], [2, 3], [([0], [0, 1])]),
        ([2, 3, 4], [2, 12], [([0], [0]), ([1, 2], [1])]),
        ([4, 6], [8, 3], [([0, 1], [0, 1])]),
        ([2, 2], [2, 2], [([0], [0]), ([1], [1])]),
        ([N, 4], [N, 2, 2], [([0], [0]), ([1], [1, 2])]),
        ([], [], []),
    ],
)
def test_axes_of_two_shapes_are_grouped_as_finely_as_their_sizes_allow(old, new, groups):
    assert loops._groups(old, new) == groups


@pytest.mark.parametrize(("old", "new"), [([2, 3], [4]), ([6], [2, 2]), ([2], [3]), ([4], [2, 4])])
def test_shapes_of_other_sizes_are_refused(old, new):
    with pytest.raises(NotTraceableError, match="two shapes of it do not match"):
        loops._groups(old, new)


def test_a_function_of_arrays_has_the_entries_of_each_and_adds_what_they_cost():
    double = loops.combine("(2 * {0})".format, [lying([3], [1], buffer="x")], T, 1, [2, 3])
    both = loops.combine(
        "({0} - {1})".format, [double, lying([2, 1], [1, 1], buffer="y")], T, 4, [2, 3]
    )
    assert both.make(["p", "q"]) == "((2 * p) - q)"
    assert (both.cost, both.shape) == (5, (2, 3))
    assert strides_of(both) == [[0, 1], [1, 0]]
    assert both.leaf is None
    assert lying([3], [1]).leaf == Leaf("b", 0, (1,))


# ---------------------------------------------------------------- orders of axes


def test_axes_are_ordered_from_the_largest_stride():
    assert loops.by_strides([1, 12, 4]) == [1, 2, 0]
    assert loops.by_strides([3, 3, -5]) == [2, 0, 1]
    # Strides of many samples are large.
    assert loops.by_strides([500, N]) == [1, 0]
    assert loops.by_strides([2000, N]) == [0, 1]


def test_the_order_of_a_value_is_that_of_a_leaf_that_is_broadcast_along_no_axis():
    broadcast, turned = Leaf("b", 0, (0, 1, 3)), Leaf("b", 0, (1, 9, 3))
    number = Leaf("", 0, (1, 9, 3))

    def order(*leaves, shape=(2, 3, 3)):
        return loops.order_of(Value(shape, leaves, "".join, T))

    assert order(broadcast) == [0, 1, 2]
    assert order(broadcast, turned) == [1, 2, 0]
    assert order(number) == [0, 1, 2], "a number lies nowhere"
    # An axis of one entry may have any stride, and comes first.
    assert order(Leaf("b", 0, (1, 0, 5)), shape=(3, 1, 3)) == [1, 2, 0]


# ---------------------------------------------------------------- loops


def test_axes_that_lie_side_by_side_in_every_leaf_are_one_loop():
    dense = Leaf("a", 0, (12, 4, 1))
    nest = Nest((2, 3, 4), (dense, dense), [0, 1, 2])
    assert (nest.names, nest.sizes[2]) == (["0", "0", "i2"], 24)
    assert nest.around("x;") == "VECTORIZE for (long i2 = 0; i2 < 24; i2++) { x; }"
    gaps = Leaf("b", 0, (20, 5, 1))
    nest = Nest((2, 3, 4), (dense, gaps), [0, 1, 2])
    assert nest.names == ["i0", "i1", "i2"]
    assert nest.sizes[2] == 4


def test_loops_keep_apart_what_is_reduced_what_must_not_merge_and_the_last():
    dense = Leaf("a", 0, (12, 4, 1))
    nest = Nest((2, 3, 4), (dense,), [0, 1, 2], split=1)
    assert nest.names == ["i0", "0", "i2"]
    assert (nest.outer("x;"), nest.inner("y;")) == (
        "for (long i0 = 0; i0 < 2; i0++) x;",
        "for (long i2 = 0; i2 < 12; i2++) y;",
    )
    nest = Nest((2, 3, 4), (dense,), [0, 1, 2], split=1, merge=False)
    assert (
        nest.inner("y;", "P ")
        == "for (long i1 = 0; i1 < 3; i1++) P for (long i2 = 0; i2 < 4; i2++) y;"
    )
    nest = Nest((2, 3, 4), (dense,), [0, 1, 2], last=True)
    assert nest.around("x;") == "VECTORIZE for (long i1 = 0; i1 < 6; i1++) { x; }"
    assert nest.names == ["0", "i1", "i2"], "the body runs over the last"
    nest = Nest((1, 1), (Leaf("a", 0, (1, 1)),), [0, 1])
    assert nest.around("x;") == "{ x; }", "one entry takes no loop"


def test_assignments_read_and_write_and_add_under_a_condition():
    program = Program()
    program.assign(Leaf("y", 0, (1,)), lying([3], [1], buffer="x"))
    program.assign(Leaf("y", 0, (1,)), lying([3], [1], buffer="x"), add="more")
    first, second = program.statements
    assert first.text == "VECTORIZE for (long i0 = 0; i0 < 3; i0++) { y[i0] = x[i0]; }"
    assert "y[i0] = (more ? y[i0] : T(0)) + x[i0];" in second.text
    assert (first.reads, first.writes) == ({"x"}, {"y"})


def test_what_lies_in_memory_is_not_computed_again():
    program = Program()
    value = lying([2, 3], [1, 2])
    assert program.store(value) is value
    assert program.make_contiguous(value, [1, 0]).leaves == value.leaves
    assert program.statements == []
    stored = program.make_contiguous(value)
    assert (strides_of(stored), len(program.statements)) == ([[3, 1]], 1)
    assert program.buffers[stored.memory.buffer] == Buffer(6, "T")
    # A value that is no dense array yet keeps the order in which it lies.
    half = loops.combine("({0} / 2)".format, [value], T, 1, [2, 3])
    assert strides_of(program.store(half)) == [[1, 2]]
    kept = program.make_contiguous(lying([2, 3], [3, 1], 4))
    assert kept.leaves[0].offset == 4


# ---------------------------------------------------------------- memory


def memory(*statements, **sizes):
    """The places of buffers that statements (reads, writes) use in order."""
    program = Program(buffers={name: Buffer(size, "T") for name, size in sizes.items()})
    for reads, writes in statements:
        program.emit("", reads, writes)
    return program.arena(10)


def test_a_place_is_used_again_after_its_last_reader():
    """64 bytes of room behind each, and multiples of 64: 4 x 16 + 64 = 128 bytes each."""
    chain = [("", "a"), ("a", "b"), ("b", "c")]
    places, top = memory(*chain, a=16, b=16, c=16)
    assert places == {"a": 0, "b": 128, "c": 0}
    assert top == 256
    # While a is read later it stays.
    places, top = memory(*chain, ("a", "d"), a=16, b=16, c=16, d=16)
    assert places["c"] == 256
    assert places["d"] == 128
    assert top == 384


def test_the_smallest_piece_that_is_large_enough_is_taken_and_the_rest_stays_free():
    """a: 384 bytes, then k: 128 that stays, then b: 128; c takes the place of b, and d that of a."""
    steps = [("", "a"), ("", "k"), ("", "b"), ("ab", "z"), ("z", "c"), ("c", "d"), ("dk", "e")]
    places, top = memory(*steps, a=80, k=16, b=16, z=16, c=16, d=80, e=16)
    assert [places[name] for name in "akbz"] == [0, 384, 512, 640]
    assert (places["c"], places["d"], top) == (512, 0, 768)
    # Of a piece that is larger than needed the rest stays free: 128 of 384 bytes, and 128 behind.
    steps = [("", "a"), ("", "k"), ("a", "z"), ("z", "c"), ("zc", "d"), ("cdk", "e")]
    places, top = memory(*steps, a=80, k=16, z=16, c=16, d=16, e=16)
    assert (places["c"], places["d"]) == (0, 128)


def test_free_pieces_side_by_side_become_one():
    assert loops._merged([(128, 64), (0, 64), (64, 64), (256, 8)]) == [(0, 192), (256, 8)]
    places, top = memory(("", "a"), ("a", "b"), ("b", "c"), ("", "d"), a=16, b=16, c=16, d=1)
    assert top == 256
    places, _ = memory(("", "a"), ("", "b"), ("ab", "c"), ("c", "d"), a=16, b=16, c=1, d=48)
    assert places["d"] == 0, "128 bytes of each are 256 together"


def test_buffers_of_the_caller_have_no_place_in_the_arena():
    program = Program(buffers={"x": Buffer(16, "T", "T *x = given;"), "y": Buffer(16, "T")})
    program.emit("", ["x"], ["y"])
    assert program.arena(1) == ({"y": 0}, 128)


@pytest.mark.parametrize(
    ("kind", "number_bytes", "expected"),
    [("T", 4, 120), ("T", 8, 240), ("I", 8, 240), ("int64_t", 4, 240), ("uint8_t", 8, 30)],
)
def test_bytes_of_a_buffer_are_those_of_its_numbers(kind, number_bytes, expected):
    assert Program(number_bytes=number_bytes).bytes_of(Buffer(Dim(3), kind), 10) == expected


# ---------------------------------------------------------------- constants and sums


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (3, "T", "T(3)"), (True, "T", "T(1)"), (True, "uint8_t", "1"), (3, "int64_t", "int64_t(3LL)"),
        (Dim(1), "T", "T(n)"), (Dim(1), "int64_t", "int64_t(n)"), (0.1, "T", "T(0.1)"),
        (math.nan, "T", "T(NAN)"), (math.inf, "T", "T(INFINITY)"), (-math.inf, "T", "T(-INFINITY)"),
    ],
)  # fmt: skip
def test_constants_are_written_with_their_type(value, kind, text):
    assert loops.number(value, kind) == text


def test_a_constant_of_another_type_is_refused():
    with pytest.raises(NotTraceableError, match=r"unknown type \(complex\)"):
        loops.number(1j)


def text_of(values, axes, kind):
    program = Program()
    found = program.reduce(values, axes, kind)
    return found, program.statements


def test_an_axis_of_one_entry_is_no_sum():
    (found,), statements = text_of([lying([1, 3], [3, 1])], [0], "sum")
    assert found.shape == (1, 3)
    assert statements == []


def test_rows_are_summed_in_parts_of_512_and_columns_in_parts_of_64_side_by_side():
    """A part is added up in the model's precision, so that rounding grows with its length alone."""
    (found,), (one,) = text_of([lying([5, 700], [700, 1])], [1], "sum")
    assert found.shape == (5, 1)
    assert "s" in one.text
    assert "+= 512)" in one.text
    assert "double total0 = 0;" in one.text
    (found,), (one,) = text_of([lying([700, 5], [5, 1])], [0], "sum")
    assert found.shape == (1, 5)
    assert "+= 64)" in one.text
    assert "double total0[5]" in one.text
    # Sums side by side lie on the stack: not too many.
    _, (one,) = text_of([lying([7, 4096], [4096, 1])], [0], "sum")
    assert "total0[4096]" in one.text
    _, (one,) = text_of([lying([7, 4097], [4097, 1])], [0], "sum")
    assert "total0 = 0" in one.text


def test_several_sums_are_one_pass():
    values = [lying([5, 7], [7, 1], buffer="x"), lying([5, 7], [7, 1], buffer="y")]
    found, (one,) = text_of(values, [1], "sum")
    assert [value.shape for value in found] == [(5, 1)] * 2
    assert "part0 += x[" in one.text
    assert "part1 += y[" in one.text
    assert (one.reads, len(one.writes)) == ({"x", "y"}, 2)


@pytest.mark.parametrize(
    ("kind", "dtype", "start"),
    [("max", T, "-INFINITY"), ("min", T, "INFINITY"), ("max", torch.int64, "INT64_MIN"),
     ("min", torch.int64, "INT64_MAX"), ("any", torch.bool, "0"), ("all", torch.bool, "1")],
)  # fmt: skip
def test_extremes_begin_below_and_above_every_number(kind, dtype, start):
    (found,), (one,) = text_of([loops.in_memory("b", [5, 7], [7, 1], dtype)], [1], kind)
    assert f"best = {start};" in one.text
    assert found.dtype == (torch.bool if kind in ("any", "all") else dtype)


def test_the_place_of_an_extreme_is_that_of_one_axis():
    (found,), _ = text_of([lying([5, 7], [7, 1])], [1], "argmax")
    assert found.dtype == torch.int64
    with pytest.raises(NotTraceableError, match="argmax over several axes"):
        Program()._extremes(
            [5, 7], [], [0, 1], lying([5, 7], [7, 1]), Leaf("y", 0, (0, 0)), "argmax"
        )
