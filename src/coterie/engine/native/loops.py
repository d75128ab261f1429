"""Values of a native program, the loops that compute them, and the memory that holds them.

A value is an expression over places in memory: elementwise operations and views only change the
expression, and one loop computes as many of them as meet. Memory is one arena; a place is used
again when its value was read last.
"""

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise

import torch

from coterie.engine.native.trace import Dim, NotTraceableError, Size, evaluate_size

# samples at which sizes are compared; a prime, so that no product of other sizes equals one of them
MANY = 1009
_PART = 64  # numbers that are added in one precision before the next level of a sum
_COLUMNS = 4096  # sums side by side, at most
_ROOM = 64  # bytes at the end of each buffer, which loads of whole vectors may read


def c_type(dtype: torch.dtype) -> str:
    """Return the type of the program's numbers for a type of PyTorch's."""
    if dtype.is_floating_point:
        return "T"
    if dtype == torch.bool:
        return "uint8_t"
    return "int64_t"


@dataclass(frozen=True)
class Leaf:
    """Places: entry (i, j, ...) is `buffer[offset + i * strides[0] + j * strides[1] + ...]`.

    With an empty `buffer` an entry is the number in brackets itself.
    """

    buffer: str
    offset: Size
    strides: tuple[Size, ...]

    @property
    def pointer(self) -> str:
        """The C++ of the address of the first entry."""
        return f"{self.buffer} + {self.offset}"

    def text(self, index: Sequence[str]) -> str:
        """Return the C++ of one entry."""
        terms = []
        if self.offset != 0:
            terms.append(str(self.offset))
        for name, stride in zip(index, self.strides, strict=True):
            if stride == 0 or name == "0":
                continue
            term = name
            if stride != 1:
                term += f" * {stride}"
            terms.append(term)
        place = " + ".join(terms) or "0"
        if not self.buffer:
            return f"({place})"
        return f"{self.buffer}[{place}]"


@dataclass(frozen=True)
class Value:
    """An array as an expression.

    Args:
        shape: its sizes.
        leaves: what it is made of, each with a stride (or 0) for each axis.
        make: (text of each leaf) -> text of an entry.
        dtype: of an entry.
        cost: how many operations an entry takes; 0 for what lies in memory, and for constants.
    """

    shape: tuple[Size, ...]
    leaves: tuple[Leaf, ...]
    make: Callable[[Sequence[str]], str]
    dtype: torch.dtype
    cost: int = 0

    @property
    def leaf(self) -> Leaf | None:
        """The memory of a value that is no expression."""
        if self.make is _first and self.leaves[0].buffer:
            return self.leaves[0]
        return None

    @property
    def memory(self) -> Leaf:
        """The memory of a value of which it is known that it is no expression."""
        leaf = self.leaf
        assert leaf is not None
        return leaf

    def is_dense(self, order: Sequence[int]) -> bool:
        """Return whether a value has no gaps in memory with its axes ordered from the outermost."""
        if self.leaf is None:
            return False
        places = zip(self.leaf.strides, dense_strides(self.shape, order), self.shape, strict=True)
        return all(stride == wanted or size == 1 for stride, wanted, size in places)

    def moved(self, shape: Sequence[Size], move: Callable[[Leaf], Leaf]) -> "Value":
        """Return a view."""
        return replace(self, shape=tuple(shape), leaves=tuple(map(move, self.leaves)))


def _leaves_of(values: Sequence[Value]) -> list[Leaf]:
    return list(chain.from_iterable(value.leaves for value in values))


def _first(parts: Sequence[str]) -> str:
    return parts[0]


def in_memory(
    buffer: str,
    shape: Sequence[Size],
    strides: Sequence[Size],
    dtype: torch.dtype,
    offset: Size = 0,
) -> Value:
    """Return a value that lies in memory."""
    return Value(tuple(shape), (Leaf(buffer, offset, tuple(strides)),), _first, dtype)


def dense_strides(shape: Sequence[Size], order: Sequence[int] | None = None) -> list[Size]:
    """Return the strides of an array without gaps; `order` has its axes from the outermost."""
    strides: list[Size] = [0] * len(shape)
    step: Size = 1
    if order is None:
        order = range(len(shape))
    for axis in reversed(order):
        strides[axis] = step
        step = step * shape[axis]
    return strides


def combine(
    make: Callable[..., str],
    values: Sequence[Value],
    dtype: torch.dtype,
    cost: int,
    shape: Sequence[Size],
) -> Value:
    """Return an elementwise function of values, broadcast to a shape."""
    leaves, counts = [], []
    for value in values:
        value = expand(value, shape)
        leaves += value.leaves
        counts.append(len(value.leaves))

    def text(parts: Sequence[str]) -> str:
        pieces, start = [], 0
        for value, count in zip(values, counts, strict=True):
            pieces.append(value.make(parts[start : start + count]))
            start += count
        return make(*pieces)

    return Value(tuple(shape), tuple(leaves), text, dtype, cost + sum(v.cost for v in values))


def common_shape(shapes: Sequence[Sequence[Size]]) -> tuple[Size, ...]:
    """Return the shape that shapes are broadcast to."""
    result: list[Size] = [1] * max(map(len, shapes), default=0)
    for shape in shapes:
        for k, size in enumerate(reversed(shape), 1):
            if size != 1:
                result[-k] = size
    return tuple(result)


def expand(value: Value, shape: Sequence[Size]) -> Value:
    """Return a value broadcast to a shape."""
    if tuple(shape) == value.shape:
        return value
    missing = len(shape) - len(value.shape)
    # An axis that grows from size 1 is read with stride 0.
    same = [old != 1 or new == 1 for old, new in zip(value.shape, shape[missing:], strict=True)]

    def move(leaf: Leaf) -> Leaf:
        strides = list(map(operator.mul, leaf.strides, same))
        return replace(leaf, strides=(*[0] * missing, *strides))

    return value.moved(shape, move)


def reshape(value: Value, shape: Sequence[Size]) -> Value | None:
    """Return a value in another shape, or None where that takes a copy."""
    # Axes can be split and joined only inside a group.
    groups = _groups(value.shape, shape)
    leaves = []
    for leaf in value.leaves:
        strides: list[Size] = [0] * len(shape)
        for old, new in groups:
            inner = [axis for axis in old if value.shape[axis] != 1]
            for a, b in pairwise(inner):
                # The axes leave a gap between them.
                if leaf.strides[a] != leaf.strides[b] * value.shape[b]:
                    return None
            step: Size = 0
            if inner:
                step = leaf.strides[inner[-1]]
            for axis in reversed(new):
                if shape[axis] != 1:
                    strides[axis] = step
                step = step * shape[axis]
        leaves.append(replace(leaf, strides=tuple(strides)))
    return replace(value, shape=tuple(shape), leaves=tuple(leaves))


def in_shape(value: Value, shape: Sequence[Size]) -> Value:
    """Return a value without gaps in another shape."""
    found = reshape(value, shape)
    assert found is not None
    return found


def _groups(old: Sequence[Size], new: Sequence[Size]) -> list[tuple[list[int], list[int]]]:
    """Split the axes of two shapes into the smallest groups of equal size."""
    groups = []
    i = j = 0
    while i < len(old) or j < len(new):
        left, right = [], []
        sizes = [1, 1]
        while sizes[0] != sizes[1] or not (left or right):
            if i < len(old) and (sizes[0] < sizes[1] or not left):
                sizes[0] *= evaluate_size(old[i], MANY)
                left.append(i)
                i += 1
            if j < len(new) and (sizes[1] < sizes[0] or not right):
                sizes[1] *= evaluate_size(new[j], MANY)
                right.append(j)
                j += 1
            # The smaller side has to grow, and has no axes left.
            left_ends = sizes[0] < sizes[1] and i == len(old)
            right_ends = sizes[1] < sizes[0] and j == len(new)
            if left_ends or right_ends:
                raise NotTraceableError("two shapes of it do not match")
        groups.append((left, right))
    return groups


@dataclass
class Statement:
    """A piece of a program, with the buffers it reads and writes."""

    text: str
    reads: frozenset[str]
    writes: frozenset[str]


@dataclass
class Buffer:
    """Memory of a program.

    Args:
        size: how many numbers it holds.
        type: of a number, as C++: "T" (the model's), "I" (a place in an image), "int64_t" or
            "uint8_t".
        place: the C++ that declares it, when it does not lie in the arena.
    """

    size: Size
    type: str
    place: str = ""


@dataclass
class Program:
    """Statements in order, and the buffers they use.

    Args:
        statements: in order.
        buffers: by name.
        number_bytes: of one of the model's numbers.
    """

    statements: list[Statement] = field(default_factory=list)
    buffers: dict[str, Buffer] = field(default_factory=dict)
    number_bytes: int = 4

    def buffer(self, size: Size, dtype: torch.dtype | str) -> str:
        """Make a new buffer and return its name."""
        name = f"b{len(self.buffers)}"
        self.buffers[name] = Buffer(size, dtype if isinstance(dtype, str) else c_type(dtype))
        return name

    def emit(self, text: str, reads: Sequence[str], writes: Sequence[str]) -> None:
        """Add a statement."""
        self.statements.append(Statement(text, frozenset(reads), frozenset(writes)))

    # ------------------------------------------------------------------ elementwise loops

    def assign(self, target: Leaf, value: Value, *, add: str = "") -> None:
        """Compute a value into memory.

        Args:
            target: where, with a stride for each axis of the value.
            value: what.
            add: C++ condition under which it is added to what is there.
        """
        nest = Nest(value.shape, (target, *value.leaves), by_strides(target.strides))
        entry = value.make([leaf.text(nest.names) for leaf in nest.leaves[1:]])
        place = nest.leaves[0].text(nest.names)
        if add:
            entry = f"({add} ? {place} : T(0)) + {entry}"
        line = f"{place} = {entry};"
        self.emit(nest.around(line), [leaf.buffer for leaf in value.leaves], [target.buffer])

    def store(self, value: Value, order: Sequence[int] | None = None) -> Value:
        """Return a value in memory: itself, or computed into a new buffer.

        Args:
            value: the value.
            order: its axes from the outermost to the innermost; None for where they lie best.
        """
        if order is None and value.leaf is not None:
            return value
        if order is None:
            order = order_of(value)
        strides = dense_strides(value.shape, order)
        name = self.buffer(math.prod(value.shape), value.dtype)
        result = in_memory(name, value.shape, strides, value.dtype)
        self.assign(result.memory, value)
        return result

    def make_contiguous(self, value: Value, order: Sequence[int] | None = None) -> Value:
        """Return a value in memory without gaps, in an order of its axes."""
        if order is None:
            order = range(len(value.shape))
        if not value.is_dense(order):
            return self.store(value, order)
        leaf = value.memory
        return in_memory(
            leaf.buffer, value.shape, dense_strides(value.shape, order), value.dtype, leaf.offset
        )

    # ------------------------------------------------------------------ reductions

    def reduce(self, values: Sequence[Value], axes: Sequence[int], kind: str) -> list[Value]:
        """Reduce values of one shape over axes, which stay with size 1.

        Args:
            values: sums of several are computed in one pass.
            axes: to reduce.
            kind: "sum", "max", "min", "any", "all", "argmax", "argmin", or "peak": the largest of a
                softmax.
        """
        # Fewer axes make longer loops.
        joined = self._joined(values, axes)
        if joined is not None:
            parts, joined_axes, kept_now = joined
            return [in_shape(result, kept_now) for result in self.reduce(parts, joined_axes, kind)]
        shape = values[0].shape
        axes = [axis for axis in axes if shape[axis] != 1]
        kept_shape = list(shape)
        for axis in axes:
            kept_shape[axis] = 1
        if not axes and not kind.startswith("arg"):
            return list(map(self.store, values))
        # The first value that is no constant; `max` returns the first of equal ones.
        typical = max(values, key=lambda value: len(value.leaves) > 0)
        order = [axis for axis in order_of(typical) if shape[axis] != 1]
        kept, gone = [a for a in order if a not in axes], [a for a in order if a in axes]
        inner = gone and kept and order[-1] in axes
        if (
            kind == "sum"
            and inner
            and order.index(gone[0]) < order.index(kept[-1])
            and evaluate_size(shape[order[-1]], MANY) < 64
        ):
            # Axes are summed on both sides of one that stays, and the innermost is short. The outer
            # ones go first: their loops then run along the inner axes, which all stay in that pass.
            first = [axis for axis in gone if order.index(axis) < order.index(kept[-1])]
            half = self.reduce(values, first, kind)
            return self.reduce(half, [a for a in gone if a not in first], kind)
        dtype = values[0].dtype
        if kind.startswith("arg"):
            dtype = torch.int64
        elif kind in ("any", "all"):
            dtype = torch.bool
        names = [self.buffer(math.prod(kept_shape), dtype) for _ in values]
        strides = dense_strides(
            kept_shape, [*sorted(set(range(len(shape))).difference(kept)), *kept]
        )
        results = [in_memory(name, kept_shape, strides, dtype) for name in names]
        targets = [expand(result, shape).leaves[0] for result in results]
        reads = [leaf.buffer for leaf in _leaves_of(values)]
        if kind == "sum":
            width = shape[kept[-1]] if kept and order[-1] in kept else None
            # Sums side by side are arrays on the stack, whose size is a constant of the program.
            if not isinstance(width, int) or width > _COLUMNS:
                width = None
            text = self._sums(shape, kept, gone, values, targets, width)
        else:
            text = self._extremes(shape, kept, gone, values[0], targets[0], kind)
        self.emit(text, reads, names)
        return results

    @staticmethod
    def _joined(
        values: Sequence[Value], axes: Sequence[int]
    ) -> tuple[list[Value], list[int], list[Size]] | None:
        """Join neighboring axes that both stay or both go, where they are adjacent in all values.

        Returns:
            The values, the axes to reduce and the shape of the results, or None where nothing is
            left to join.
        """
        shape = values[0].shape
        gone = set(axes)
        kept_shape = list(shape)
        for axis in gone:
            kept_shape[axis] = 1
        for axis in range(len(shape) - 1):
            if (axis in gone) != (axis + 1 in gone) or (shape[axis] == 1 and shape[axis + 1] == 1):
                continue
            joined = [*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :]]
            parts = []
            for value in values:
                part = reshape(value, joined)
                if part is None:
                    break
                parts.append(part)
            if len(parts) == len(values):
                # Axes behind the joined pair move up by one, and the second of the pair is the
                # first.
                after = {a - (a > axis) for a in axes}
                return parts, sorted(after), kept_shape
        return None

    @staticmethod
    def _sums(
        shape: Sequence[Size],
        kept: list[int],
        gone: list[int],
        values: Sequence[Value],
        targets: list[Leaf],
        width: int | None,
    ) -> str:
        """Sum in parts: a sum a row, or `width` sums side by side where the innermost axis stays."""
        leaves = (*targets, *_leaves_of(values))
        if width is None:
            nest = Nest(shape, leaves, [*kept, *gone], split=len(kept))
            loop, at, room = "", "", " = 0"
        else:
            order = [*kept[:-1], *gone, kept[-1]]
            nest = Nest(shape, leaves, order, split=len(kept) - 1, last=True)
            name = nest.names[kept[-1]]
            loop = f"for (long {name} = 0; {name} < {width}; {name}++) "
            at, room = f"[{name}]", f"[{width}] = {{}}"
        lines, totals, stores = [], [], []
        # `nest.leaves` has the targets first.
        start = len(targets)
        for k, (value, target) in enumerate(zip(values, nest.leaves, strict=False)):
            own = nest.leaves[start : start + len(value.leaves)]
            start += len(own)
            entry = value.make([leaf.text(nest.names) for leaf in own])
            lines.append(f"part{k}{at} += {entry};")
            totals.append(f"double total{k}{room};")
            stores.append(f"{loop}{target.text(nest.names)} = total{k}{at};")
        around, columns = "", ""
        if width is not None:
            around, columns = f"VECTORIZE {loop}".rstrip(), str(width)
        body = nest.summed(around, lines, len(values), columns)
        return nest.outer(f"{{ {' '.join(totals)} {body} {' '.join(stores)} }}")

    def _extremes(
        self,
        shape: Sequence[Size],
        kept: list[int],
        gone: list[int],
        value: Value,
        target: Leaf,
        kind: str,
    ) -> str:
        nest = Nest(
            shape,
            (target, *value.leaves),
            [*kept, *gone],
            split=len(kept),
            # An index must be that of its own axis.
            merge=not kind.startswith("arg"),
        )
        entry = value.make([leaf.text(nest.names) for leaf in nest.leaves[1:]])
        place = nest.leaves[0].text(nest.names)
        kept_type = c_type(value.dtype)
        if kind.startswith("arg"):
            sign = {"argmax": ">", "argmin": "<"}[kind]
            if len(gone) != 1:
                raise NotTraceableError(f"{kind} over several axes")
            step = nest.names[gone[0]]
            # The first of equal numbers stays, and a NaN wins over every number, as in PyTorch.
            better = f"{step} == 0 || v {sign} best || (v != v && best == best)"
            body = nest.inner(
                f"{{ {kept_type} v = {entry}; if ({better}) best = v, which = {step}; }}"
            )
            return nest.outer(
                f"{{ {kept_type} best = 0; int64_t which = 0; {body} {place} = which; }}"
            )
        if kind == "peak":  # of a softmax: a NaN may be passed over, since the sum of powers has it
            body = f"{{ const T v = {entry}; best = v > best ? v : best; }}"
            loops = nest.inner(body, '_Pragma("omp simd reduction(max:best)") ')
            return nest.outer(f"{{ T best = -INFINITY; {loops} {place} = best; }}")
        # `v != v` lets a NaN win: no comparison is true of it afterwards.
        start, take = {
            "max": ("-INFINITY", "best = (v > best || v != v) ? v : best;"),
            "min": ("INFINITY", "best = (v < best || v != v) ? v : best;"),
            "any": ("0", "best = best || v;"),
            "all": ("1", "best = best && v;"),
        }[kind]
        if kept_type == "int64_t":
            start = {"max": "INT64_MIN", "min": "INT64_MAX"}.get(kind, start)
        body = nest.inner(f"{{ {kept_type} v = {entry}; {take} }}")
        return nest.outer(f"{{ {kept_type} best = {start}; {body} {place} = best; }}")

    # ------------------------------------------------------------------ memory

    def arena(self, samples: int) -> tuple[dict[str, int], int]:
        """Return each buffer's place in bytes and the arena's size, for batches up to a size."""
        first: dict[str, int] = {}
        last: dict[str, int] = {}
        for number, statement in enumerate(self.statements):
            for name in statement.reads | statement.writes:
                first.setdefault(name, number)
                last[name] = number
        places: dict[str, int] = {}
        free: list[tuple[int, int]] = []
        sizes: dict[str, int] = {}
        top = 0
        for number, statement in enumerate(self.statements):
            # Sorted, since the order of a set of texts differs between processes: a model must have
            # one layout.
            for name in sorted(statement.writes | statement.reads):
                buffer = self.buffers.get(name)
                if buffer is None or buffer.place or first[name] != number:
                    continue
                # Each buffer begins at a multiple of 64 bytes, the longest vector.
                need = (self.bytes_of(buffer, samples) + _ROOM + 63) // 64 * 64
                fitting = [piece for piece in free if piece[1] >= need]
                if fitting:
                    # The smallest piece that is large enough.
                    start, length = min(fitting, key=lambda piece: (piece[1], piece[0]))
                    free.remove((start, length))
                    if length > need:
                        free.append((start + need, length - need))
                else:
                    start, top = top, top + need
                places[name], sizes[name] = start, need
            # What is read for the last time leaves its place to later buffers.
            for name in statement.reads | statement.writes:
                if name in places and last[name] == number:
                    free.append((places[name], sizes[name]))
            free = _merged(free)
        return places, top

    def bytes_of(self, buffer: Buffer, samples: int) -> int:
        """Return the bytes of a buffer."""
        # "I" are places in windows, as wide as numbers, so that vectors of both have as many lanes.
        width = {"T": self.number_bytes, "I": self.number_bytes, "int64_t": 8, "uint8_t": 1}[
            buffer.type
        ]
        return evaluate_size(buffer.size, samples) * width


def _merged(pieces: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, length in sorted(pieces):
        if merged and sum(merged[-1]) == start:
            merged[-1] = (merged[-1][0], merged[-1][1] + length)
        else:
            merged.append((start, length))
    return merged


def by_strides(strides: Sequence[Size]) -> list[int]:
    """Return axes from the largest stride to the smallest."""
    return sorted(
        range(len(strides)), key=lambda axis: (-abs(evaluate_size(strides[axis], MANY)), axis)
    )


def order_of(value: Value) -> list[int]:
    """Return the axes of a value from the outermost to the innermost, by most of its leaves."""
    axes = range(len(value.shape))
    for leaf in value.leaves:
        # A leaf that is broadcast along an axis does not show where that axis lies best.
        if leaf.buffer and all(leaf.strides[a] != 0 for a in axes if value.shape[a] != 1):
            wide = [a for a in by_strides(leaf.strides) if value.shape[a] != 1]
            return [*(a for a in axes if value.shape[a] == 1), *wide]
    return list(axes)


class Nest:
    """Loops over a shape; axes that lie side by side in every leaf become one.

    Args:
        shape: the sizes.
        leaves: what the body reads and writes.
        order: axes from the outermost to the innermost loop.
        split: how many of the axes belong to the outer loops; those inside them are a reduction.
        last: whether the innermost axis is no part of the loops: the body runs over it.
        merge: whether axes may become one.

    Attributes:
        names: the index of each axis of `shape`; "0" where it takes part in another's.
        leaves: with the strides that belong to them.
    """

    def __init__(
        self,
        shape: Sequence[Size],
        leaves: Sequence[Leaf],
        order: Sequence[int],
        *,
        split: int | None = None,
        last: bool = False,
        merge: bool = True,
    ) -> None:
        sizes = list(shape)
        # An axis of size 1 needs no loop.
        names = [f"i{axis}" for axis in range(len(shape))]
        for axis, size in enumerate(shape):
            # An axis of one entry has no loop, so its counter does not exist.
            if size == 1:
                names[axis] = "0"
        reduced: set[int] = set()
        if split is not None:
            reduced = set(order[split:])
        loop = [axis for axis in order if shape[axis] != 1]
        end = len(loop) - last
        k = 0
        while merge and k + 1 < end:
            a, b = loop[k], loop[k + 1]
            # A step of the outer axis is a whole run of the inner one, in every leaf.
            adjacent = all(leaf.strides[a] == leaf.strides[b] * sizes[b] for leaf in leaves)
            if adjacent and (a in reduced) == (b in reduced):
                sizes[b] = sizes[b] * sizes[a]
                names[a] = "0"
                loop.pop(k)
                end -= 1
                # The joined axis may now join with the one before it.
                k = max(0, k - 1)
            else:
                k += 1
        self.names, self.sizes, self.leaves = names, sizes, list(leaves)
        body = loop
        if last:
            body = loop[:-1]
        self._outer = [axis for axis in body if axis not in reduced]
        self._inner = [axis for axis in body if axis in reduced]

    def _for(self, axis: int) -> str:
        name = self.names[axis]
        return f"for (long {name} = 0; {name} < {self.sizes[axis]}; {name}++) "

    def around(self, line: str) -> str:
        """Return the loops around a body; the innermost one is vectorized."""
        loops = list(map(self._for, [*self._outer, *self._inner]))
        if loops:
            loops[-1] = f"VECTORIZE {loops[-1]}"
        return "".join(loops) + "{ " + line + " }"

    def outer(self, line: str) -> str:
        """Return the outer loops around a body."""
        return "".join(map(self._for, self._outer)) + line

    def inner(self, line: str, pragma: str = "") -> str:
        """Return the loops of a reduction around a body; the pragma is of the innermost one."""
        return (
            "".join(map(self._for, self._inner[:-1]))
            + pragma
            + "".join(map(self._for, self._inner[-1:]))
            + line
        )

    def summed(self, loop: str, lines: Sequence[str], number: int, width: str = "") -> str:
        """Return the loops of sums, in parts added to `total0`, `total1`, ... in double precision.

        Args:
            loop: a loop over columns around the lines, if any.
            lines: what is added to `part0`, ...
            number: of sums.
            width: of the columns; empty without.
        """
        axis = self._inner[-1]
        name, size = self.names[axis], self.sizes[axis]
        # Without columns a part is spread over the lanes of a vector, each of which adds fewer
        # numbers.
        numbers = range(number)
        if width:
            part, vector = _PART, ""
            starts = " ".join(f"T part{k}[{width}] = {{}};" for k in numbers)
            adds = " ".join(f"total{k}[e] += part{k}[e];" for k in numbers)
            ends = f"for (long e = 0; e < {width}; e++) {{ {adds} }}"
        else:
            part = 8 * _PART
            names = ", ".join(f"part{k}" for k in numbers)
            vector = f'_Pragma("omp simd reduction(+:{names})") '
            starts = " ".join(f"T part{k} = 0;" for k in numbers)
            ends = " ".join(f"total{k} += part{k};" for k in numbers)
        # A part is added up in the model's precision, and parts in double precision: rounding grows
        # with the length of a part alone.
        text = " ".join(lines)
        inside = f"{loop} {{ {text} }}"
        start = f"s{name}"
        run = (
            f"for (long {start} = 0; {start} < {size}; {start} += {part}) {{ {starts} "
            f"const long e{name} = least({start} + {part}, {size}); "
            f"{vector}for (long {name} = {start}; {name} < e{name}; {name}++) {inside} {ends} }}"
        )
        return "".join(map(self._for, self._inner[:-1])) + run


def number(value: float | int | bool | Dim | object, kind: str = "T") -> str:
    """Return the C++ of a constant."""
    if isinstance(value, bool | int) and kind == "T":
        return f"T({int(value)})"
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, int):
        return f"int64_t({value}LL)"
    if isinstance(value, Dim) and kind == "T":
        return f"T{value}"
    if isinstance(value, Dim):
        return f"int64_t{value}"
    if isinstance(value, float):
        if math.isnan(value):
            return "T(NAN)"
        if value == math.inf:
            return "T(INFINITY)"
        if value == -math.inf:
            return "T(-INFINITY)"
        # repr writes every digit of a double.
        return f"T({value!r})"
    raise NotTraceableError(f"a constant of an unknown type ({type(value).__name__})")
