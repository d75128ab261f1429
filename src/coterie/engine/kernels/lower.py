"""A traced training step as the text of a Triton program: forward, backward and update of a client.

The nodes of a trace (`engine.native.trace`) become statements of one function. A program computes
one client: elementwise operations and views stay expressions, and products, sums and what several
nodes read are loops over tiles that write into the client's part of a scratch memory. Between two
loops stands a barrier of the program's threads. Gradients of products are not stored: each of their
tiles moves the parameters that it is of.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from coterie._util.mappings import map_values
from coterie.engine.native.loops import common_shape, dense_strides
from coterie.engine.native.trace import Dim, NotTraceableError, Operation, Ratio, Ref, Size, Trace
from coterie.models.layout import Layout, Slot

Number = int | float | bool | Size | Ratio
Name = Callable[[str], str]  # gives a text a name

_MANY = 12  # operations of an expression above which it is computed once and stored
_ENTRIES = 1024  # of a tile of an elementwise loop or a sum
_DEPTH = 32  # terms of a product that are added at once
_LEAST = 16  # rows, columns or terms of a tile that a product takes

# {0} and {1} are operands
_UNARY = {
    "neg": "(-{0})", "abs": "tl.abs({0})", "relu": "tl.where({0} < 0, 0.0, {0})",
    "exp": "tl.exp({0})", "log": "tl.log({0})", "sqrt": "tl.sqrt_rn({0})",
    "rsqrt": "tl.div_rn(1.0, tl.sqrt_rn({0}))",
    "reciprocal": "(1.0 / {0})", "sigmoid": "(1.0 / (1.0 + tl.exp(-{0})))", "erf": "tl.erf({0})",
    "sin": "tl.sin({0})", "cos": "tl.cos({0})", "floor": "tl.floor({0})", "ceil": "tl.ceil({0})",
}  # fmt: skip
_BINARY = {
    "add": "({0} + {1})", "sub": "({0} - {1})", "mul": "({0} * {1})", "div": "({0} / {1})",
    "logical_and": "(({0} != 0) & ({1} != 0))", "logical_or": "(({0} != 0) | ({1} != 0))",
    "tanh_backward": "({0} * (1.0 - {1} * {1}))",
    "sigmoid_backward": "({0} * ((1.0 - {1}) * {1}))",
    "maximum": "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "minimum": "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
}  # fmt: skip
_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_BITS = {
    "bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^", "__rshift__": ">>", "__lshift__": "<<",
}  # fmt: skip


@dataclass(frozen=True)
class KernelValue:
    """What a node makes, entry by entry.

    Args:
        shape: its axes.
        dtype: its type.
        at: (index of each axis, mask) -> the text of an entry; a mask is read where memory is.
        cost: operations of an entry; 0 for memory and numbers.
        dense: the pointer of its first entry, where entries lie one after another.
        of_row: whether parameters of the client are read for it.
        literal: whether its text is a number.
    """

    shape: tuple[Size, ...]
    dtype: torch.dtype
    at: Callable[[Sequence[str], str], str]
    cost: int = 0
    dense: str | None = None
    of_row: bool = False
    literal: bool = False


@dataclass(frozen=True)
class Product:
    """A product of matrices, or of several pairs of them, that is not computed yet.

    Args:
        left: its left matrix, with an axis of pairs in front where there are several.
        right: its right matrix, likewise.
        shape: of the result, whose entries lie in the order of pairs, rows and columns.
    """

    left: KernelValue
    right: KernelValue
    shape: tuple[Size, ...]

    @staticmethod
    def of(left: KernelValue, right: KernelValue) -> "Product":
        """Return the product of two matrices, or of pairs of them."""
        return Product(left, right, (*left.shape[:-1], right.shape[-1]))

    @property
    def pairs(self) -> Size:
        """How many pairs of matrices there are."""
        return self.left.shape[0] if len(self.left.shape) == 3 else 1

    @property
    def rows(self) -> Size:
        """Rows of a product."""
        return self.left.shape[-2]

    @property
    def columns(self) -> Size:
        """Columns of a product."""
        return self.right.shape[-1]

    @property
    def of_row(self) -> bool:
        """Whether parameters of the client are read for it."""
        return self.left.of_row or self.right.of_row


def _offset(indices: Sequence[str], strides: Sequence[Size]) -> str:
    terms = []
    for index, stride in zip(indices, strides, strict=True):
        if index != "0" and stride != 0:
            terms.append(index if stride == 1 else f"{index} * {stride}")
    return f"({' + '.join(terms)})" if terms else "0"


def split_index(name: Name, index: str, shape: Sequence[Size]) -> list[str]:
    """Return the index of each axis of an entry by its number.

    Args:
        name: gives a text a name.
        index: the number.
        shape: of the axes.
    """
    found, rest = [], index
    for place, (size, stride) in enumerate(zip(shape, dense_strides(shape), strict=True)):
        if size == 1:
            found.append("0")
        elif all(one == 1 for one in shape[place + 1 :]):
            found.append(rest)
        else:
            found.append(name(f"{rest} // {stride}"))
            rest = name(f"{rest} - {found[-1]} * {stride}")
    return found


def in_memory(
    pointer: str, shape: Sequence[Size], strides: Sequence[Size], dtype: torch.dtype
) -> KernelValue:
    """Return an array in memory."""

    def at(indices: Sequence[str], mask: str) -> str:
        offset = _offset(indices, strides)
        # One entry for all: a pointer without axes takes no mask.
        if not any(index.isidentifier() for index in _words(offset)):
            return f"tl.load({pointer} + {offset})"
        return f"tl.load({pointer} + {offset}, mask={mask}, other=0)"

    shape = tuple(shape)
    dense = pointer if list(strides) == dense_strides(shape) else None
    return KernelValue(shape, dtype, at, 0, dense, pointer.startswith("row"))


def _words(text: str) -> list[str]:
    """Return the names in an index, but for the number of samples."""
    names = "".join(one if one.isalnum() or one == "_" else " " for one in text).split()
    return [name for name in names if name != "n"]


def view_as(
    value: KernelValue, shape: Sequence[Size], at: Callable[[Sequence[str], str], str]
) -> KernelValue:
    """Return entries of a value under another shape, where `at` finds them."""
    return KernelValue(tuple(shape), value.dtype, at, value.cost, None, value.of_row, value.literal)


def _permuted(value: KernelValue, axes: Sequence[int]) -> KernelValue:
    def at(indices: Sequence[str], mask: str) -> str:
        back = [""] * len(axes)
        for index, axis in zip(indices, axes, strict=True):
            back[axis] = index
        return value.at(back, mask)

    return view_as(value, [value.shape[axis] for axis in axes], at)


def _expanded(value: KernelValue, shape: Sequence[Size]) -> KernelValue:
    """Return a value with axes in front and with axes of one entry repeated."""
    shape = tuple(shape)
    if value.shape == shape:
        return value
    skipped = len(shape) - len(value.shape)
    own = value.shape

    def at(indices: Sequence[str], mask: str) -> str:
        kept = zip(indices[skipped:], own, strict=True)
        return value.at(["0" if size == 1 else index for index, size in kept], mask)

    return view_as(value, shape, at)


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


class KernelLowering:
    """Makes the statements of a traced training step.

    Args:
        trace: the step.
        layout: of the module.
        samples: the most samples of a batch, for which tiles are chosen.
        tile: rows or columns of a tile of a product, at most.

    Attributes:
        lines: the statements.
        scratch: numbers of a client that are kept in memory, as a function of its samples.
        constants: what the module holds, one after another; frozen weights among it.
    """

    def __init__(self, trace: Trace, layout: Layout, samples: int, tile: int) -> None:
        self.trace, self.layout, self.samples, self.tile = trace, layout, samples, tile
        self.lines: list[str] = []
        self.scratch: Size = 0
        self.constants: list[torch.Tensor] = []
        self._held = 0  # numbers in them
        self._loops = self._names = 0
        self._named: dict[str, str] = {}  # texts by what they are, in the loop that is written
        self._values: dict[Ref, Any] = {}
        self._uses = trace.count_uses()
        self._bind_inputs()

    def _bind_inputs(self) -> None:
        layout, inputs = self.layout, list(self.trace.inputs)
        for slot in layout.slots:
            self._values[inputs.pop(0)] = in_memory(
                f"row + {slot.start}", slot.shape, dense_strides(slot.shape), layout.dtype
            )
        for tensor in layout.frozen.values():
            self._values[inputs.pop(0)] = self._constant(tensor)
        weight, y, x = inputs.pop(), inputs.pop(), inputs.pop()
        for ref, name in ((x, "own_x"), (y, "own_y")):
            kind = self.trace.kinds[ref.number]
            self._values[ref] = in_memory(name, kind.shape, dense_strides(kind.shape), kind.dtype)
        # The mean of the losses.
        shape = self.trace.kinds[weight.number].shape
        self._values[weight] = self._filled(shape, Ratio(1.0), layout.dtype)
        # What a kernel draws follows from the key of the step; input buffers are refused before.
        self._values[inputs.pop()] = KernelValue((), torch.int64, lambda _indices, _mask: "key")

    # ------------------------------------------------------------------ statements

    def run(self) -> None:
        """Write the whole step.

        Raises:
            NotTraceableError: naming an operation that is not known, and the layer it belongs to.
        """
        self.trace.lower_each(self._add)
        layout = self.layout
        losses, *rest = self.trace.outputs
        gradients, state = rest[: len(layout.trained_slots)], rest[len(layout.trained_slots) :]
        assert losses is not None
        mean = self._sum(self._need(losses), None, scale=Ratio(1.0))
        text = mean.at((), "")
        self.lines += [*self._named_lines(0), f"tl.store(losses + at, {text})"]
        # Everything that reads the row comes before everything that writes it.
        moved = list(map(self._gradient, gradients))
        kept = []
        for slot, ref in zip(layout.state_slots, state, strict=True):
            value = None if ref is None else self._need(ref)
            if value is not None and value.dense != f"row + {slot.start}":
                kept.append((slot, self.store(value)))
        for slot, gradient in zip(layout.trained_slots, moved, strict=True):
            self._move(slot, gradient)
        for slot, value in kept:
            self._loop(slot.shape, f"row + {slot.start}", value)

    def _gradient(self, ref: Ref | None) -> KernelValue | Product | None:
        """Return the gradient of a slot, of which nothing reads the row any more."""
        if ref is None:
            return None
        value = self._operand(ref)
        if isinstance(value, Product) and not value.of_row:
            return value
        value = self._need(ref)
        return self.store(value) if value.of_row or value.cost else value

    def _name(self, name: str) -> str:
        """Return a name that no other loop has: Triton gives each one type."""
        return f"{name}_{self._loops}"

    def _let(self, text: str) -> str:
        """Return a name for a text, which is computed once in the loop that is being written."""
        if text.isidentifier() or text.isdigit():
            return text
        if text not in self._named:
            self._names += 1
            self._named[text] = f"t_{self._names}"
        return self._named[text]

    def _named_lines(self, indent: int) -> list[str]:
        """Return the statements of what was named since the last call."""
        lines = [f"{' ' * indent}{name} = {text}" for text, name in self._named.items()]
        self._named.clear()
        return lines

    def _split(self, index: str, shape: Sequence[Size]) -> list[str]:
        """Return the index of each axis of an entry by its number."""
        return split_index(self._let, index, shape)

    def _reshape(self, value: KernelValue, shape: Sequence[Size]) -> KernelValue:
        """Return the entries of a value in their order under another shape."""
        shape, old = tuple(shape), value.shape
        if value.dense is not None:
            return in_memory(value.dense, shape, dense_strides(shape), value.dtype)
        if shape == old:
            return value
        if [size for size in shape if size != 1] == [size for size in old if size != 1]:
            # Axes of one entry come or go.
            def same(indices: Sequence[str], mask: str) -> str:
                left = iter([one for one, size in zip(indices, shape, strict=True) if size != 1])
                return value.at(["0" if size == 1 else next(left) for size in old], mask)

            return view_as(value, shape, same)

        def at(indices: Sequence[str], mask: str) -> str:
            number = self._let(_offset(indices, dense_strides(shape)))
            return value.at(self._split(number, old), mask)

        return view_as(value, shape, at)

    def _loop(self, shape: Sequence[Size], pointer: str, value: KernelValue) -> None:
        """Write a value to memory, entry after entry."""
        self._loops += 1
        i, inside, start = self._name("i"), self._name("inside"), self._name("start")
        total = math.prod(shape)
        block = self._block(total, _ENTRIES)
        text = value.at(self._split(i, value.shape), inside)
        self.lines += [
            f"for {start} in range(0, {total}, {block}):",
            f"    {i} = {start} + tl.arange(0, {block})",
            f"    {inside} = {i} < {total}",
            *self._named_lines(4),
            f"    tl.store({pointer} + {i}, {text}, mask={inside})",
            "tl.debug_barrier()",
        ]

    def _block(self, size: Size, most: int) -> int:
        return min(most, _power_of_two(self._at_most(size)))

    def _at_most(self, size: Size) -> int:
        return size if isinstance(size, int) else size.at(self.samples)

    def _new(self, shape: Sequence[Size], dtype: torch.dtype) -> KernelValue:
        """Return new memory of the client."""
        if dtype != torch.float32:
            raise NotTraceableError(f"it keeps numbers of type {str(dtype).removeprefix('torch.')}")
        pointer = f"own + {self.scratch}"
        self.scratch = self.scratch + math.prod(shape)
        return in_memory(pointer, shape, dense_strides(shape), dtype)

    def store(self, value: KernelValue) -> KernelValue:
        """Return a value as an array in memory that nothing else writes."""
        if value.dense is not None and not value.of_row:
            return value
        made = self._new(value.shape, value.dtype)
        assert made.dense is not None
        self._loop(value.shape, made.dense, value)
        return made

    def _reduce(
        self, value: KernelValue, axes: Sequence[int], kind: str, made_of: str = "{0}"
    ) -> KernelValue:
        """Return sums or largest entries over some axes, which stay with one entry.

        Args:
            value: what is added up.
            axes: over which.
            kind: "sum" or "max".
            made_of: the text of what is kept, of the text of the sum.
        """
        rank = len(value.shape)
        axes = sorted(axis % rank for axis in axes)
        kept = [axis for axis in range(rank) if axis not in axes]
        outer, inner = [value.shape[a] for a in kept], [value.shape[a] for a in axes]
        made = self._new([1 if a in axes else s for a, s in enumerate(value.shape)], torch.float32)
        self._loops += 1
        o, r, inside = self._name("o"), self._name("r"), self._name("inside")
        start, under, total = self._name("start"), self._name("under"), self._name("total")
        entries, terms = math.prod(outer), math.prod(inner)
        depth = self._block(terms, _ENTRIES // 4)
        width = self._block(entries, _ENTRIES // depth)
        index = [""] * rank
        for places, text in ((kept, o), (axes, r)):
            for axis, own in zip(
                places, self._split(text, [value.shape[a] for a in places]), strict=True
            ):
                index[axis] = own
        text = value.at(index, inside)
        empty, join, finish = "0.0", "{0} + {1}", "tl.sum({0}, 1)"
        if kind == "max":
            empty, join, finish = 'float("-inf")', "tl.maximum({0}, {1})", "tl.max({0}, 1)"
        kept_text = made_of.format(finish.format(total))
        tile = f"({width}, {depth})"
        self.lines += [
            f"for {start} in range(0, {entries}, {width}):",
            f"    {total} = tl.full({tile}, {empty}, tl.float32)",
            f"    for {under} in range(0, {terms}, {depth}):",
            # Whole tiles of indices, since a pointer has the shape of its mask.
            f"        {o} = {start} + tl.arange(0, {width})[:, None] + tl.zeros({tile}, tl.int32)",
            f"        {r} = {under} + tl.arange(0, {depth})[None, :] + tl.zeros({tile}, tl.int32)",
            f"        {inside} = ({o} < {entries}) & ({r} < {terms})",
            *self._named_lines(8),
            f"        {total} = {join.format(total, f'tl.where({inside}, {text}, {empty})')}",
            f"    {o}_out = {start} + tl.arange(0, {width})",
            f"    tl.store({made.dense} + {o}_out, {kept_text}, mask={o}_out < {entries})",
            "tl.debug_barrier()",
        ]
        return made

    def _tiles(self, product: Product, body: Callable[[str, str, str, str], list[str]]) -> None:
        """Write a product tile by tile.

        Args:
            product: what is computed.
            body: (row counted through all pairs, column, mask, tile), each by name -> statements.
        """
        self._loops += 1
        rows, columns, pairs = product.rows, product.columns, product.pairs
        terms = product.left.shape[-1]
        high, wide = (max(_LEAST, self._block(size, self.tile)) for size in (rows, columns))
        deep = max(_LEAST, self._block(terms, _DEPTH))
        top, left, under, total = map(self._name, ("top", "left", "under", "total"))
        m, k, q, c, a, b = map(self._name, ("m", "k", "q", "c", "a", "b"))
        one, other, inside = map(self._name, ("one", "other", "inside"))
        here, there = self._name("r"), self._name("s")
        pair, mine, yours = map(self._name, ("pair", "mine", "yours"))

        def span(start: str, size: int, axis: str, tile: tuple[int, int]) -> str:
            return f"{start} + tl.arange(0, {size}){axis} + tl.zeros({tile}, tl.int32)"

        several = len(product.left.shape) == 3
        lines = [
            f"for {top} in range(0, {rows}, {high}):",
            f"    for {left} in range(0, {columns}, {wide}):",
            f"        {total} = tl.zeros(({high}, {wide}), tl.float32)",
            f"        for {under} in range(0, {terms}, {deep}):",
            f"            {m} = {span(top, high, '[:, None]', (high, deep))}",
            f"            {k} = {span(under, deep, '[None, :]', (high, deep))}",
            f"            {q} = {span(under, deep, '[:, None]', (deep, wide))}",
            f"            {c} = {span(left, wide, '[None, :]', (deep, wide))}",
            f"            {one} = ({m} < {rows}) & ({k} < {terms})",
            f"            {other} = ({q} < {terms}) & ({c} < {columns})",
        ]
        if several:
            lines += [
                f"            {mine} = {pair} + tl.zeros({(high, deep)}, tl.int32)",
                f"            {yours} = {pair} + tl.zeros({(deep, wide)}, tl.int32)",
            ]
        for name, value, mask, index in (
            (a, product.left, one, [mine, m, k]), (b, product.right, other, [yours, q, c]),
        ):  # fmt: skip
            text = value.at(index if several else index[1:], mask)
            lines += self._named_lines(12)
            lines.append(f"            {name} = tl.where({mask}, {text}, 0.0)")
        lines += [
            "            if BF16:",
            f"                {total} = tl.dot({a}.to(tl.bfloat16), {b}.to(tl.bfloat16), {total})",
            "            else:",
            f"                {total} = tl.dot({a}, {b}, {total}, input_precision=PRECISION)",
            f"        {here} = {span(top, high, '[:, None]', (high, wide))}",
            f"        {there} = {span(left, wide, '[None, :]', (high, wide))}",
            f"        {inside} = ({here} < {rows}) & ({there} < {columns})",
        ]
        row = self._let(f"{pair} * {rows} + {here}") if several else here
        statements = body(row, there, inside, total)
        lines += [*self._named_lines(8), *(f"        {line}" for line in statements)]
        if several:
            lines = [f"for {pair} in range(0, {pairs}):", *(f"    {line}" for line in lines)]
        self.lines += [*lines, "tl.debug_barrier()"]

    def _compute(self, product: Product, bias: KernelValue | None = None) -> KernelValue:
        """Return a product in memory, with a bias added to each row."""
        made = self._new(product.shape, torch.float32)
        columns = product.columns

        def body(m: str, c: str, inside: str, tile: str) -> list[str]:
            more = ""
            if bias is not None:
                more = f" + {_expanded(bias, product.shape).at((m, c), inside)}"
            place = f"{made.dense} + {m} * {columns} + {c}"
            return [f"tl.store({place}, {tile}{more}, mask={inside})"]

        self._tiles(product, body)
        return made

    def _move(self, slot: Slot, gradient: KernelValue | Product | None) -> None:
        """Write the step of the optimizer for a slot of the row."""
        call = (
            "move_tile(row, anchored, first_at, second_at, {place}, {inside}, {tile}, rate, keep, "
            "shrink, decay, prox, momentum, share, kept, added, eps, "
            "ADAM, SHRINK, DECAY, PROX, MOMENTUM, NESTEROV, NEAR)"
        )
        if isinstance(gradient, Product):
            columns = gradient.columns

            def body(m: str, c: str, inside: str, tile: str) -> list[str]:
                place = f"{slot.start} + {m} * {columns} + {c}"
                return [call.format(place=place, inside=inside, tile=tile)]

            self._tiles(gradient, body)
            return
        self._loops += 1
        i, inside, start = self._name("i"), self._name("inside"), self._name("start")
        total = math.prod(slot.shape)
        block = self._block(total, _ENTRIES)
        tile = f"tl.zeros(({block},), tl.float32)"
        if gradient is not None:
            tile = gradient.at(self._split(i, gradient.shape), inside)
        self.lines += [
            f"for {start} in range(0, {total}, {block}):",
            f"    {i} = {start} + tl.arange(0, {block})",
            f"    {inside} = {i} < {total}",
            *self._named_lines(4),
            "    " + call.format(place=f"{slot.start} + {i}", inside=inside, tile=tile),
        ]

    # ------------------------------------------------------------------ nodes

    @classmethod
    def knows(cls, name: str) -> bool:
        """Return whether an operation can be lowered as it is."""
        tables = (_UNARY, _BINARY, _COMPARE, _BITS)
        return hasattr(cls, f"_op_{name}") or any(name in table for table in tables)

    def _add(self, node: Operation) -> None:
        made = [ref for ref in node.outs if ref is not None]
        kind = self.trace.kinds[made[0].number]
        self._dtype, self._shape = kind.dtype, kind.shape
        if node.name != "arange" and all(ref.number in self.trace.constants for ref in made):
            return  # read from the record when it is needed
        result = self._result(node)
        results = result if isinstance(result, list) else [result]
        results += [None] * (len(node.outs) - len(results))
        for ref, value in zip(node.outs, results, strict=True):
            if ref is None:
                continue
            if value is None:  # what nobody reads
                self._values[ref] = None
                continue
            shape = self.trace.kinds[ref.number].shape
            if tuple(value.shape) != tuple(shape):
                raise NotTraceableError(f"the operation {node.name} made {value.shape} for {shape}")
            # What several read would be computed again for each of them.
            most = 1 if self._uses.get(ref, 0) > 1 else _MANY
            if isinstance(value, KernelValue) and value.cost > most:
                value = self._stored(value)
            self._values[ref] = value

    def _stored(self, value: KernelValue) -> KernelValue:
        """Return a value in memory, where numbers of its type are kept there."""
        if value.dtype == torch.bool:
            kept = self.store(self._map("{0}", value, cost=0, dtype=torch.float32))
            return self._map("({0} != 0)", kept, dtype=torch.bool)
        return self.store(value) if value.dtype == torch.float32 else value

    def _result(self, node: Operation) -> Any:
        name = node.name
        handler: Callable[..., Any] | None = getattr(self, f"_op_{name}", None)
        lazy = name in ("t", "detach", "alias", "mm")  # a product may stay one
        read = self._operand if lazy else self._argument
        args = list(map(read, node.args))
        kwargs = map_values(read, node.kwargs)
        if handler is not None:
            try:
                # An option that the handler does not take must not be passed over.
                inspect.signature(handler).bind(*args, **kwargs)
            except TypeError:
                raise NotTraceableError(
                    f"the operation {name} has an option that is not known"
                ) from None
            return handler(*args, **kwargs)
        if kwargs.pop("alpha", 1) != 1 or kwargs:
            raise NotTraceableError(f"the operation {name} has an option that is not known")
        if name in _UNARY and len(args) == 1:
            return self._map(_UNARY[name], *args, cost=2)
        if name in _BINARY and len(args) == 2:
            return self._map(_BINARY[name], *args)
        if name in _COMPARE and len(args) == 2:
            return self._map(f"({{0}} {_COMPARE[name]} {{1}})", *args)
        if name in _BITS and len(args) == 2:
            return self._map(f"({{0}} {_BITS[name]} {{1}})", *args)
        raise NotTraceableError(f"the operation {name} is not known")

    def _operand(self, value: Any) -> Any:
        """Return an argument; values as they are, products too."""
        if isinstance(value, list | tuple):
            return [self._operand(one) for one in value]
        if not isinstance(value, Ref):
            return value
        if value not in self._values:
            if value.number not in self.trace.constants:
                raise NotTraceableError("it makes a large constant")
            self._values[value] = self._constant(self.trace.constants[value.number])
        return self._values[value]

    def _argument(self, value: Any) -> Any:
        """Return an argument; products are computed."""
        if isinstance(value, Ref):
            return self._need(value)
        if isinstance(value, list | tuple):
            return [self._argument(one) for one in value]
        return value

    def _need(self, ref: Ref) -> Any:
        """Return a value; None for what is never read."""
        value = self._operand(ref)
        if isinstance(value, Product):
            value = self._values[ref] = self._compute(value)
        return value

    def _constant(self, tensor: torch.Tensor) -> KernelValue:
        if tensor.numel() == 1:
            return self._filled(tensor.shape, tensor.item(), tensor.dtype)
        if not tensor.is_floating_point():
            raise NotTraceableError("it holds a table of whole numbers")
        self.constants.append(tensor.detach().to("cpu", torch.float32).flatten())
        pointer = f"constants + {self._held}"
        self._held += tensor.numel()
        return in_memory(pointer, tensor.shape, dense_strides(tensor.shape), torch.float32)

    @staticmethod
    def _number(value: Any) -> str:
        if isinstance(value, Ratio):
            if value.places:
                return f"((n * {value.places}) / (n * {value.places} - 1))"
            return f"({value.value!r} / n)"
        if isinstance(value, bool):
            return str(value)
        if isinstance(value, float) and not math.isfinite(value):
            return f'float("{value}")'
        if not isinstance(value, int | float):
            return str(value)  # a number of samples
        return repr(value)

    def _filled(self, shape: Sequence[Size], value: Any, dtype: torch.dtype) -> KernelValue:
        if dtype.is_floating_point and isinstance(value, int):
            value = float(value)
        text = self._number(value)
        return KernelValue(tuple(shape), dtype, lambda _indices, _mask: text, literal=True)

    def _map(
        self, text: str, *operands: Any, cost: int = 1, dtype: torch.dtype | None = None
    ) -> KernelValue:
        """Return an elementwise function of values and numbers."""
        dtype = dtype or self._dtype
        if dtype.is_floating_point and dtype != torch.float32:
            raise NotTraceableError(f"numbers of type {str(dtype).removeprefix('torch.')}")
        values = [one for one in operands if isinstance(one, KernelValue)]
        floating = dtype.is_floating_point or any(one.dtype.is_floating_point for one in values)
        shape = common_shape([one.shape for one in values])
        parts: list[Any] = []
        for one in operands:
            if isinstance(one, KernelValue):
                parts.append((_expanded(one, shape), floating and not one.dtype.is_floating_point))
            else:
                parts.append(self._number(one))

        literal = all(one.literal for one in values)

        def at(indices: Sequence[str], mask: str) -> str:
            texts = []
            for place, part in enumerate(parts):
                if isinstance(part, str):
                    texts.append(part)
                    continue
                value, converted = part
                own = value.at(indices, mask)
                if converted and not value.literal:
                    own = f"{own}.to(tl.float32)"
                # What is read several times is computed once.
                several = text.count(f"{{{place}}}") > 1 and not value.literal
                texts.append(self._let(own) if several else own)
            made = text.format(*texts)
            # Random bits are mixed in steps that read the one before several times.
            return self._let(made) if dtype == torch.int64 and not literal else made

        total = cost + sum(one.cost for one in values)
        # What is made of numbers alone has no type of Triton's to convert.
        return KernelValue(shape, dtype, at, total, None, any(v.of_row for v in values), literal)

    # ------------------------------------------------------------------ elementwise

    def _op_rsub(self, a: KernelValue, b: Any) -> KernelValue:
        return self._map("({1} - {0})", a, b)

    def _op_pow(self, a: KernelValue, b: Any) -> KernelValue:
        texts = {
            2: "({0} * {0})", 3: "({0} * {0} * {0})", 0.5: "tl.sqrt_rn({0})", -1: "(1.0 / {0})",
            -2: "(1.0 / ({0} * {0}))", -0.5: "tl.div_rn(1.0, tl.sqrt_rn({0}))", 1: "({0})",
        }  # fmt: skip
        if isinstance(b, KernelValue) or b not in texts:
            raise NotTraceableError("it raises to a power that is not known")
        return self._map(texts[b], a, cost=2)

    def _op_round(self, x: KernelValue) -> KernelValue:
        # Halves go to the even neighbor.
        down = "tl.floor({0})"
        away = f"({{0}} - {down})"
        odd = f"(({down} - 2.0 * tl.floor({down} / 2.0)) != 0)"
        return self._map(
            f"({down} + tl.where(({away} > 0.5) | (({away} == 0.5) & {odd}), 1.0, 0.0))", x, cost=6
        )

    def _op_tanh(self, x: KernelValue) -> KernelValue:
        # exp of a negative number never overflows.
        small = "tl.exp(-2.0 * tl.abs({0}))"
        return self._map(
            f"(tl.where({{0}} < 0, -1.0, 1.0) * (1.0 - {small}) / (1.0 + {small}))", x, cost=8
        )

    def _op_where(self, condition: KernelValue, a: Any, b: Any) -> KernelValue:
        values = [condition, *(one for one in (a, b) if isinstance(one, KernelValue))]
        made = self._map("tl.where({0}, {1}, {2})", _as_is(condition), a, b)
        return _expanded(made, common_shape([one.shape for one in values]))

    def _op_leaky_relu(self, x: KernelValue, slope: float = 0.01) -> KernelValue:
        return self._map("tl.where({0} > 0, {0}, {0} * {1})", x, float(slope), cost=2)

    def _op_leaky_relu_backward(
        self, g: KernelValue, x: KernelValue, slope: float, _of_result: bool
    ) -> KernelValue:
        return self._map("tl.where({1} > 0, {0}, {0} * {2})", g, x, float(slope), cost=2)

    def _op_threshold_backward(
        self, g: KernelValue, x: KernelValue, threshold: float
    ) -> KernelValue:
        return self._map(f"tl.where({{1}} <= {threshold!r}, 0.0, {{0}})", g, x)

    def _op_logical_not(self, x: KernelValue) -> KernelValue:
        return self._map("({0} == 0)", x)

    _op_bitwise_not = _op_logical_not

    def _op__to_copy(self, x: KernelValue, **options: Any) -> KernelValue:
        if set(options) - {"dtype", "layout", "device", "memory_format", "pin_memory"}:
            raise NotTraceableError("the operation _to_copy has an option that is not known")
        if x.dtype == self._dtype:
            return x
        if self._dtype == torch.float32:
            return self._map("{0}", x, cost=0)
        if self._dtype == torch.int64 and not x.literal:
            return self._map("{0}.to(tl.int64)", _as_is(x), dtype=torch.int64)
        raise NotTraceableError("it converts to a type that is not known")

    def _op_arange(self, *given: int | Dim, **_options: Any) -> KernelValue:
        # arange(end), arange(start, end) or arange(start, end, step)
        if not all(isinstance(one, int | Dim) for one in given) or self._dtype != torch.int64:
            raise NotTraceableError("it counts in numbers that are not whole")
        start = given[0] if len(given) > 1 else 0
        step = given[2] if len(given) > 2 else 1

        def at(indices: Sequence[str], _mask: str) -> str:
            index = "0" if indices[0] == "0" else f"{indices[0]}.to(tl.int64)"
            return f"({index} * {step} + {start})"

        return KernelValue(self._shape, torch.int64, at, 1)

    def _op_clone(self, x: KernelValue, memory_format: Any = None) -> KernelValue:
        return x

    def _op_copy(
        self, _into: KernelValue, x: KernelValue, non_blocking: bool = False
    ) -> KernelValue:
        return _expanded(x, _into.shape)

    def _op_ones_like(self, x: KernelValue, **_options: Any) -> KernelValue:
        return self._filled(x.shape, 1, self._dtype)

    def _op_zeros_like(self, x: KernelValue, **_options: Any) -> KernelValue:
        return self._filled(x.shape, 0, self._dtype)

    # ------------------------------------------------------------------ views

    def _op_detach(self, x: KernelValue | Product) -> KernelValue | Product:
        return x

    _op_alias = _op_detach

    def _op_t(self, x: KernelValue | Product) -> KernelValue | Product:
        if isinstance(x, Product):
            if x.shape != (x.rows, x.columns):
                return self._op_t(self._compute(x))
            return Product.of(_permuted(x.right, (1, 0)), _permuted(x.left, (1, 0)))
        return _permuted(x, (1, 0)) if len(x.shape) == 2 else x

    def _op_transpose(self, x: KernelValue, one: int, other: int) -> KernelValue:
        axes = list(range(len(x.shape)))
        axes[one], axes[other] = axes[other], axes[one]
        return _permuted(x, axes)

    def _op_permute(self, x: KernelValue, axes: Sequence[int]) -> KernelValue:
        return _permuted(x, [axis % len(x.shape) for axis in axes])

    def _op_view(self, x: KernelValue, shape: Sequence[Size]) -> KernelValue:
        shape, total = list(shape), math.prod(x.shape)
        if -1 in shape:
            rest = math.prod([size for size in shape if size != -1])
            shape[shape.index(-1)] = total // rest  # type: ignore[operator]
        if math.prod(shape) != total:
            raise NotTraceableError("a view with another number of entries")
        return self._reshape(x, shape)

    _op__unsafe_view = _op_reshape = _op_view

    def _op_expand(
        self, x: KernelValue, shape: Sequence[Size], implicit: bool = False
    ) -> KernelValue:
        own: list[Size] = [1] * (len(shape) - len(x.shape)) + list(x.shape)
        return _expanded(x, [b if a == -1 else a for a, b in zip(shape, own, strict=True)])

    def _op_unsqueeze(self, x: KernelValue, axis: int) -> KernelValue:
        axis %= len(x.shape) + 1
        return self._reshape(x, [*x.shape[:axis], 1, *x.shape[axis:]])

    def _op_squeeze(self, x: KernelValue, axes: Any = None) -> KernelValue:
        rank = len(x.shape)
        if axes is None:
            axes = range(rank)
        chosen = {axis % rank for axis in ([axes] if isinstance(axes, int) else axes)}
        return self._reshape(x, [s for a, s in enumerate(x.shape) if a not in chosen or s != 1])

    def _op_select(self, x: KernelValue, axis: int, index: int) -> KernelValue:
        axis %= len(x.shape)
        chosen = self._place(x.shape[axis], index)

        def at(indices: Sequence[str], mask: str) -> str:
            return x.at([*indices[:axis], chosen, *indices[axis:]], mask)

        return view_as(x, [*x.shape[:axis], *x.shape[axis + 1 :]], at)

    def _op_select_backward(
        self, g: KernelValue, shape: Sequence[Size], axis: int, index: int
    ) -> KernelValue:
        axis %= len(shape)
        chosen = self._place(shape[axis], index)

        def at(indices: Sequence[str], mask: str) -> str:
            own = g.at([*indices[:axis], *indices[axis + 1 :]], mask)
            return f"tl.where({indices[axis]} == {chosen}, {own}, 0.0)"

        return KernelValue(tuple(shape), g.dtype, at, g.cost + 1, None, g.of_row)

    @staticmethod
    def _place(size: Size, index: Size) -> str:
        if isinstance(index, int) and index >= 0:
            return str(index)
        if isinstance(index, int) and isinstance(size, int):
            return str(index + size)
        raise NotTraceableError("it takes a place of an axis of samples from its end")

    # ------------------------------------------------------------------ sums

    def _axes(self, x: KernelValue, axes: Any) -> list[int]:
        if axes is None or axes == []:
            return list(range(len(x.shape)))
        return [axes] if isinstance(axes, int) else list(axes)

    def _sum(
        self, x: KernelValue, axes: Any, scale: Any = None, keepdim: bool = False
    ) -> KernelValue:
        chosen = self._axes(x, axes)
        if x.dtype == torch.bool:
            x = self._map("{0}", x, cost=0, dtype=torch.float32)
        if x.dtype != torch.float32:
            raise NotTraceableError("it adds up whole numbers")
        # Of no axis at all.
        made = self._reduce(x, chosen, "sum") if x.shape else x
        if scale is not None:
            made = self._map("({0} * {1})", made, scale, dtype=torch.float32)
        return made if keepdim else self._without(made, chosen)

    def _without(self, x: KernelValue, axes: Sequence[int]) -> KernelValue:
        rank = len(x.shape)
        gone = {axis % rank for axis in axes} if rank else set()
        return self._reshape(x, [size for axis, size in enumerate(x.shape) if axis not in gone])

    def _op_sum(
        self, x: KernelValue, axes: Any = None, keepdim: bool = False, dtype: Any = None
    ) -> KernelValue:
        return self._sum(x, axes, keepdim=keepdim)

    def _op_mean(
        self, x: KernelValue, axes: Any = None, keepdim: bool = False, dtype: Any = None
    ) -> KernelValue:
        number = math.prod([x.shape[axis] for axis in self._axes(x, axes)])
        made = self._sum(x, axes, keepdim=keepdim)
        return self._map("({0} / {1})", made, number)

    def _op_amax(self, x: KernelValue, axes: Any = (), keepdim: bool = False) -> KernelValue:
        chosen = self._axes(x, list(axes) if isinstance(axes, tuple) else axes)
        made = self._reduce(x, chosen, "max")
        return made if keepdim else self._without(made, chosen)

    # ------------------------------------------------------------------ products

    def _op_mm(self, a: KernelValue | Product, b: KernelValue | Product) -> Product:
        left, right = (self._factor(one) for one in (a, b))
        return Product.of(left, right)

    def _factor(self, value: KernelValue | Product) -> KernelValue:
        """Return a factor: what is computed again for each tile must be cheap."""
        if isinstance(value, Product):
            return self._compute(value)
        return self.store(value) if value.cost > 1 else value

    def _op_addmm(
        self, bias: KernelValue, a: KernelValue, b: KernelValue, beta: int = 1, alpha: int = 1
    ) -> KernelValue:
        if beta != 1 or alpha != 1:
            raise NotTraceableError("the operation addmm has an option that is not known")
        return self._compute(self._op_mm(a, b), bias)

    # ------------------------------------------------------------------ softmax and losses

    def _op__log_softmax(self, x: KernelValue, axis: int, _half: bool = False) -> KernelValue:
        x = self._kept(x)
        most = self._reduce(x, [axis], "max")
        away = self._map("({0} - {1})", x, most)
        total = self._reduce(self._map("tl.exp({0})", away), [axis], "sum")
        return self._map("({0} - tl.log({1}))", away, total, cost=3)

    def _op__log_softmax_backward_data(
        self, g: KernelValue, y: KernelValue, axis: int, _dtype: torch.dtype
    ) -> KernelValue:
        total = self._reduce(g, [axis], "sum")
        return self._map("({0} - tl.exp({1}) * {2})", g, y, total, cost=3)

    def _op__softmax(self, x: KernelValue, axis: int, _half: bool = False) -> KernelValue:
        x = self._kept(x)
        power = self._map("tl.exp({0} - {1})", x, self._reduce(x, [axis], "max"), cost=3)
        power = self.store(power)
        return self._map("({0} / {1})", power, self._reduce(power, [axis], "sum"), cost=2)

    def _op__softmax_backward_data(
        self, g: KernelValue, y: KernelValue, axis: int, _dtype: torch.dtype
    ) -> KernelValue:
        total = self._reduce(self._map("({0} * {1})", g, y), [axis], "sum")
        return self._map("({1} * ({0} - {2}))", g, y, total, cost=3)

    def _kept(self, x: KernelValue) -> KernelValue:
        """Return a value that may be read several times."""
        return self.store(x) if x.cost else x

    def _op_nll_loss_forward(
        self,
        x: KernelValue,
        y: KernelValue,
        weight: KernelValue | None,
        reduction: int,
        ignored: int,
    ) -> list[KernelValue | None]:
        self._check_losses(x, weight, reduction)
        x = self._kept(x)

        def at(indices: Sequence[str], mask: str) -> str:
            target = y.at(indices, mask)
            # An ignored class may be no place at all.
            known = f"({target} != {ignored})"
            place = f"tl.where({known}, {target}, 0).to(tl.int32)"
            return f"tl.where({known}, -{x.at([*indices, place], mask)}, 0.0)"

        return [KernelValue(y.shape, torch.float32, at, 3, None, x.of_row), None]

    def _op_nll_loss_backward(
        self, g: KernelValue, x: KernelValue, y: KernelValue, weight: KernelValue | None, reduction: int, ignored: int,
        _total: Any,
    ) -> KernelValue:  # fmt: skip
        self._check_losses(x, weight, reduction)

        def at(indices: Sequence[str], mask: str) -> str:
            sample, place = indices
            target = y.at([sample], mask)
            chosen = f"(({target} == {place}) & ({target} != {ignored}))"
            return f"tl.where({chosen}, -{g.at([sample], mask)}, 0.0)"

        return KernelValue(x.shape, torch.float32, at, 3 + g.cost, None, g.of_row)

    @staticmethod
    def _check_losses(x: KernelValue, weight: KernelValue | None, reduction: int) -> None:
        if weight is not None or reduction != 0 or len(x.shape) != 2:
            raise NotTraceableError("its loss of classes has a form that is not known")

    # ------------------------------------------------------------------ normalizations

    def _moments(
        self, x: KernelValue, axes: Sequence[int], eps: float
    ) -> tuple[KernelValue, KernelValue]:
        """Return means, and 1 / sqrt(variance + eps)."""
        number = math.prod([x.shape[axis] for axis in axes])
        mean = self._reduce(x, axes, "sum", f"{{0}} / {number}")
        away = self._map("(({0} - {1}) * ({0} - {1}))", x, mean, dtype=torch.float32)
        # Rounded as PyTorch rounds: the quotient, the root, and 1 by it.
        text = f"tl.div_rn(1.0, tl.sqrt_rn({{0}} / {number} + {eps!r}))"
        return mean, self._reduce(away, axes, "sum", text)

    def _normalized(
        self,
        x: KernelValue,
        mean: KernelValue,
        scale: KernelValue,
        weight: KernelValue | None,
        bias: KernelValue | None,
    ) -> KernelValue:
        made = self._map("(({0} - {1}) * {2})", x, mean, scale, cost=2)
        if weight is not None:
            made = self._map("({0} * {1})", made, weight)
        return made if bias is None else self._map("({0} + {1})", made, bias)

    def _gradients(
        self, g: KernelValue, x: KernelValue, mean: KernelValue, scale: KernelValue, weight: KernelValue | None,
        inner: Sequence[int], outer: Sequence[int], wanted: Sequence[bool],
    ) -> list[KernelValue | None]:  # fmt: skip
        """Return the gradients of a normalization.

        Args:
            g: of its result.
            x: what was normalized.
            mean: over `inner`.
            scale: 1 / sqrt(variance + eps).
            weight: of its entries.
            inner: axes over which statistics are taken.
            outer: axes over which the weight is repeated.
            wanted: whether the gradient of the input, the weight and the bias is.
        """
        g = self._kept(g)
        unit = self._map("(({0} - {1}) * {2})", x, mean, scale, cost=2)
        number = math.prod([x.shape[axis] for axis in inner])
        product = self._map("({0} * {1})", g, unit)
        found: list[KernelValue | None] = [None] * 3
        sums: dict[int, KernelValue] = {}
        if wanted[1]:
            sums[1] = self._reduce(product, outer, "sum")
        if wanted[2]:
            sums[2] = self._reduce(g, outer, "sum")
        for place, one in sums.items():
            found[place] = self._without(one, outer)
        if wanted[0]:
            if [*inner] == [*outer]:
                # The weight is the same in all that is added up.
                one = sums[2] if wanted[2] else self._reduce(g, inner, "sum")
                two = sums[1] if wanted[1] else self._reduce(product, inner, "sum")
                factor = 1.0 if weight is None else weight
                found[0] = self._map(
                    "({3} * {6} * ({0} - {1} / {5} - {2} * ({4} / {5})))",
                    g, one, unit, scale, two, number, factor, cost=7,
                )  # fmt: skip
            else:
                own = g if weight is None else self._map("({0} * {1})", g, weight)
                one = self._reduce(own, inner, "sum")
                two = self._reduce(self._map("({0} * {1})", own, unit), inner, "sum")
                found[0] = self._map(
                    "({3} * ({0} - {1} / {5} - {2} * ({4} / {5})))",
                    own, one, unit, scale, two, number, cost=6,
                )  # fmt: skip
        return found

    def _op_native_layer_norm(
        self,
        x: KernelValue,
        shape: Sequence[int],
        weight: KernelValue | None,
        bias: KernelValue | None,
        eps: float,
    ) -> list[KernelValue]:
        x = self._kept(x)
        axes = list(range(len(x.shape) - len(shape), len(x.shape)))
        mean, scale = self._moments(x, axes, eps)
        return [self._normalized(x, mean, scale, weight, bias), mean, scale]

    def _op_native_layer_norm_backward(
        self, g: KernelValue, x: KernelValue, shape: Sequence[int], mean: KernelValue, scale: KernelValue,
        weight: KernelValue | None, _bias: KernelValue | None, wanted: Sequence[bool],
    ) -> list[KernelValue | None]:  # fmt: skip
        rank = len(x.shape)
        inner, outer = range(rank - len(shape), rank), range(rank - len(shape))
        return self._gradients(g, x, mean, scale, weight, inner, outer, wanted)

    def _channels(self, value: KernelValue | None, x: KernelValue) -> KernelValue | None:
        if value is None:
            return None
        return self._reshape(
            value, [x.shape[1] if axis == 1 else 1 for axis in range(len(x.shape))]
        )

    def _op__native_batch_norm_legit(
        self, x: KernelValue, weight: KernelValue | None, bias: KernelValue | None, *rest: Any
    ) -> list[KernelValue]:
        # Training, momentum and eps: the form without running statistics.
        if len(rest) != 3:
            raise NotTraceableError("batch normalization of a form that is not known")
        x = self._kept(x)
        axes = [0, *range(2, len(x.shape))]
        mean, scale = self._moments(x, axes, rest[-1])
        made = self._normalized(x, mean, scale, self._channels(weight, x), self._channels(bias, x))
        return [made, self._reshape(mean, [x.shape[1]]), self._reshape(scale, [x.shape[1]])]

    def _op_native_batch_norm_backward(
        self, g: KernelValue, x: KernelValue, weight: KernelValue | None, _mean: Any, _var: Any, mean: KernelValue,
        scale: KernelValue, training: bool, _eps: float, wanted: Sequence[bool],
    ) -> list[KernelValue | None]:  # fmt: skip
        if not training:
            raise NotTraceableError("batch normalization of a form that is not known")
        axes = [0, *range(2, len(x.shape))]
        channels = [self._channels(one, x) for one in (mean, scale, weight)]
        return self._gradients(g, x, *channels, axes, axes, wanted)  # type: ignore[arg-type]


def _as_is(value: KernelValue) -> KernelValue:
    """Return a value that is not converted to a floating-point number where others are."""
    return replace(value, dtype=torch.float32, dense=None)
