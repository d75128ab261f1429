"""Sums of matrix products as one product: the same numbers, by PyTorch's operations, and fewer of them."""

import random
from collections import Counter

import pytest
import torch
from tests.traces import build, evaluate

from coterie.engine.native.sums import join_products
from coterie.engine.native.trace import Dim, Operation, Ref


def count(trace) -> Counter:
    return Counter(node.name for node in trace.nodes)


def check(trace, joined) -> None:
    """Both compute the same, and the new values have the shapes that are noted for them."""
    stream = torch.Generator().manual_seed(1)
    values = [
        torch.randn(trace.kind_of(ref).shape, generator=stream, dtype=torch.float64)
        for ref in trace.inputs
    ]
    before, after = evaluate(trace, values), evaluate(joined, values)
    for ref in trace.outputs:
        torch.testing.assert_close(before[ref], after[ref])
    for ref, value in after.items():
        assert joined.kind_of(ref).shape == tuple(value.shape)
        assert joined.kind_of(ref).dtype == value.dtype


def test_a_sum_of_three_products_is_one_product():
    """Products as they are and turned, and sums that are turned."""
    trace = build(
        {0: (2, 3), 1: (3, 4), 2: (4, 5), 3: (5, 2), 4: (4, 6), 5: (6, 2)},
        ("mm", (0, 1), 6), ("mm", (2, 3), 7), ("mm", (4, 5), 8), ("add", (7, 8), 9), ("t", (9,), 10),
        ("add", (6, 10), 11),
        outputs=[11],
    )  # fmt: skip
    joined = join_products(trace)
    assert count(joined)["mm"] == 1
    assert not count(joined)["add"]
    check(trace, joined)


def test_sums_of_any_form_are_the_same_numbers():
    """Random sums of 1 to 7 products; those of three and more are joined."""
    stream = random.Random(2)
    for _ in range(40):
        kinds, nodes = {}, []

        def new(rows: int, columns: int, kinds=kinds) -> int:
            kinds[len(kinds)] = (rows, columns)
            return len(kinds) - 1

        def make(rows: int, columns: int, products: int, kinds=kinds, nodes=nodes, new=new) -> int:
            if stream.random() < 0.3:
                inner = make(columns, rows, products)
                nodes.append(("t", (inner,), new(rows, columns)))
            elif products == 1:
                width = stream.randint(1, 4)
                factors = new(rows, width), new(width, columns)
                nodes.append(("mm", factors, new(rows, columns)))
            else:
                some = stream.randint(1, products - 1)
                parts = make(rows, columns, some), make(rows, columns, products - some)
                nodes.append(("add", parts, new(rows, columns)))
            return len(kinds) - 1

        products = stream.randint(1, 7)
        out = make(2, 3, products)
        made = {number for _name, _args, number in nodes}
        trace = build(kinds, *nodes, outputs=[out], inputs=[n for n in kinds if n not in made])
        joined = join_products(trace)
        check(trace, joined)
        assert count(joined)["mm"] == (1 if products >= 3 else products)
        assert bool(count(joined)["cat"]) == (products >= 3)


def three(*last, outputs=(9,), more=()):
    return build(
        {0: (2, 2), 1: (2, 2), 2: (2, 2)},
        ("mm", (0, 1), 3), ("mm", (1, 2), 4), ("mm", (2, 0), 5), ("add", (3, 4), 6),
        *(last or [("add", (6, 5), 9)]), *more,
        outputs=outputs,
    )  # fmt: skip


@pytest.mark.parametrize(
    "trace",
    [
        three(outputs=(9, 6)),
        three(outputs=(9, 4)),
        three(more=[("tanh", (6,), 7)], outputs=(9, 7)),
        three(more=[("mm", (5, 3), 7)], outputs=(9, 7)),
        three(("tanh", (5,), 7), ("add", (6, 7), 9)),
        three(("tanh", (5,), 7), ("add", (7, 6), 9)),
        three(("add", (6, 2), 9)),
        build(
            {0: (2, 2), 1: (2, 2)}, ("mm", (0, 1), 3), ("mm", (1, 0), 4), ("add", (3, 4), 9), outputs=[9]
        ),
    ],
    ids=[
        "a sum is a result", "a product is a result", "a sum is read elsewhere", "a product is read elsewhere",
        "a function of a product, right", "a function of a product, left", "a matrix", "two products",
    ],
)  # fmt: skip
def test_other_sums_stay(trace):
    joined = join_products(trace)
    assert [node.name for node in joined.nodes] == [node.name for node in trace.nodes]
    check(trace, joined)


@pytest.mark.parametrize(
    "change",
    [
        lambda node: Operation("add", (*node.args, 2), {}, node.outs),
        lambda node: Operation("add", node.args, {"alpha": 2}, node.outs),
        lambda node: Operation("add", (node.args[0], 2.0), {}, node.outs),
        lambda node: Operation("sub", node.args, {}, node.outs),
    ],
    ids=["a factor", "a named factor", "a number", "a difference"],
)
def test_only_plain_sums_are_joined(change):
    trace = three()
    trace.nodes[-1] = change(trace.nodes[-1])
    assert [node.name for node in join_products(trace).nodes] == [node.name for node in trace.nodes]
    trace = three()
    trace.nodes[-2] = change(trace.nodes[-2])
    assert count(join_products(trace))["mm"] == 3


def test_rows_that_depend_on_samples_add_up():
    trace = three()
    for number in range(10):
        if number in trace.kinds:
            trace.kinds[number] = type(trace.kinds[number])((Dim(1), Dim(1)), torch.float64)
    joined = join_products(trace)
    (product,) = (node for node in joined.nodes if node.name == "mm")
    left, right = product.args
    assert joined.kind_of(left).shape == (Dim(1), Dim(3))
    assert joined.kind_of(right).shape == (Dim(3), Dim(1))
    assert Ref(9) in product.outs
