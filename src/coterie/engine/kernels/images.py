"""Convolutions, pooling and normalization of images in the program of a client.

A convolution is a product of matrices, one of which holds the windows over the images. No window is
written to memory: an entry of that matrix is read from the images where a tile needs it, and is zero
where a window reaches over their edge. The gradients are such products too: that of the images is
of windows over the gradient, and that of the weights sums over all places.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from coterie.engine.kernels.lower import (
    _ENTRIES,
    KernelLowering,
    KernelValue,
    Name,
    Product,
    view_as,
)
from coterie.engine.native.trace import NotTraceableError, Size, fixed_sizes, read_windows

Found = tuple[str, list[str]]  # an index, and what must hold for it to be one
Rule = Callable[[Name, str, str], Found]
_EXACT = 1 << 24  # whole numbers that float32 holds


@dataclass(frozen=True)
class Windows:
    """The windows along an axis of images.

    Args:
        size: entries of the axis.
        out: windows.
        kernel: entries of a window.
        stride: from a window to the next.
        padding: entries of the first window before the axis.
        dilation: from an entry of a window to the next.
    """

    size: int
    out: int
    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1

    @property
    def near(self) -> int:
        """How many windows an entry may be in."""
        return -(-((self.kernel - 1) * self.dilation + 1) // self.stride)

    @property
    def plain(self) -> bool:
        """Whether each window is one entry, in order."""
        return (self.kernel, self.stride, self.padding) == (1, 1, 0)

    def find_entry(self, name: Name, window: str, tap: str) -> Found:
        """Return an entry of a window."""
        place = name(_sum(_times(window, self.stride), _times(tap, self.dilation), -self.padding))
        needed = []
        if self.padding:
            needed.append(f"({place} >= 0)")
        last = (self.out - 1) * self.stride + (self.kernel - 1) * self.dilation - self.padding
        if last >= self.size:
            needed.append(f"({place} < {self.size})")
        return place, needed

    @property
    def parts(self) -> "list[Part]":
        """The entries, by the places that they have in windows."""
        if self.stride == 1:
            return [Part(self, 0, self.size, 0, self.kernel)]
        if self.dilation > 1:
            return [Part(self, 0, self.size, 0, self.kernel, mixed=True)]
        found = []
        for tap in range(self.stride):
            # The first entry that is this far from the beginning of a window.
            first = (tap - self.padding) % self.stride
            count = len(range(first, self.size, self.stride))
            taps = len(range(tap, self.kernel, self.stride))
            if count and taps:
                found.append(Part(self, first, count, tap, taps))
        return found

    def find_near(self, name: Name, entry: str, number: str) -> Found:
        """Return one of the windows that may hold an entry, the last one first."""
        place = name(_sum(entry, self.padding))
        last = name(f"{place} // {self.stride}") if self.stride > 1 else place
        window = name(_sum(last, _times(number, -1)))
        needed = []
        if (self.size - 1 + self.padding) // self.stride >= self.out:
            needed.append(f"({window} < {self.out})")
        if self.near > 1:
            needed.append(f"({window} >= 0)")
        if self.near * self.stride > (self.kernel - 1) * self.dilation + 1:
            needed.append(f"({place} - {window} * {self.stride} < {self.kernel * self.dilation})")
        return window, needed

    def count_entries(self, window: str, padded: bool) -> str:
        """Return how many entries a window has, with those of the padding or without."""
        if window == "0":
            end = min(self.kernel - self.padding, self.size + self.padding * padded)
            return str(end + self.padding * padded)
        reach = (self.out - 1) * self.stride + self.kernel - self.padding
        # The last windows may reach over the padding too.
        if reach <= self.size + (self.padding if padded else 0) and (padded or not self.padding):
            return str(self.kernel)
        first = _sum(_times(window, self.stride), -self.padding)
        end = f"tl.minimum({first} + {self.kernel}, {self.size + self.padding})"
        if padded:
            return f"({end} - {first})"
        return f"(tl.minimum({end}, {self.size}) - tl.maximum({first}, 0))"


@dataclass(frozen=True)
class Part:
    """Entries of an axis that have the same places in windows: a stride apart, all without a stride.

    Args:
        axis: the windows.
        first: the first entry.
        count: of entries.
        tap: their first place in a window.
        taps: how many places they have, a stride apart too.
        mixed: whether it is all entries, though they have different places.
    """

    axis: Windows
    first: int
    count: int
    tap: int
    taps: int
    mixed: bool = False

    @property
    def whole(self) -> bool:
        """Whether it is all entries."""
        return self.count == self.axis.size

    @property
    def step(self) -> int:
        """From an entry to the next."""
        return 1 if self.mixed else self.axis.stride

    def find_window(self, name: Name, entry: str, tap: str) -> Found:
        """Return the window in which an entry has a place; both are counted in this part."""
        axis, needed = self.axis, []
        away = axis.dilation * (1 if self.mixed else axis.stride) // self.step
        shift = (self.first + axis.padding - self.tap) // self.step
        window = name(_sum(entry, _times(tap, -away), shift))
        if (self.taps - 1) * away > shift:
            needed.append(f"({window} >= 0)")
        last = self.count - 1 + shift
        if self.mixed:
            needed.append(f"({window} % {axis.stride} == 0)")
            window, last = name(f"{window} // {axis.stride}"), last // axis.stride
        if last >= axis.out:
            needed.append(f"({window} < {axis.out})")
        return window, needed

    def locate(self, entry: str) -> str:
        """Return the place of an entry on the axis."""
        return _sum(_times(entry, self.step), self.first)


@dataclass(frozen=True)
class Areas:
    """The areas of almost equal size along an axis of images.

    Args:
        size: entries of the axis.
        out: areas.
    """

    size: int
    out: int

    @property
    def kernel(self) -> int:
        """Entries of the largest area."""
        return max(end - first for first, end in self._bounds())

    @property
    def near(self) -> int:
        """How many areas an entry may be in."""
        bounds = self._bounds()
        return max(sum(a <= entry < b for a, b in bounds) for entry in range(self.size))

    def _bounds(self) -> list[tuple[int, int]]:
        size, out = self.size, self.out
        return [(area * size // out, -(-(area + 1) * size // out)) for area in range(out)]

    def _first(self, area: str) -> str:
        return f"({area} * {self.size} // {self.out})"

    def _end(self, area: str) -> str:
        return f"(({area} * {self.size} + {self.size + self.out - 1}) // {self.out})"

    def find_entry(self, name: Name, area: str, tap: str) -> Found:
        """Return an entry of an area."""
        place = name(_sum(self._first(area), tap))
        return place, [f"({place} < {self._end(area)})"]

    def find_near(self, name: Name, entry: str, number: str) -> Found:
        """Return one of the areas that may hold an entry, the last one first."""
        # The last area that begins at an entry or before it.
        last = f"(({entry} * {self.out} + {self.out - 1}) // {self.size})"
        area = name(_sum(last, _times(number, -1)))
        return area, [f"({area} >= 0)", f"({entry} < {self._end(area)})"]

    def count_entries(self, area: str, _padded: bool = False) -> str:
        """Return how many entries an area has."""
        if self.size % self.out == 0:
            return str(self.size // self.out)
        return f"({self._end(area)} - {self._first(area)})"


@dataclass(frozen=True)
class _WindowedConvolution:
    """The numbers of a convolution, as of one over images.

    Args:
        axes: windows along rows and columns.
        groups: of channels that do not meet.
        inner: channels of the input of a group.
        outer: of its output.
    """

    axes: tuple[Windows, Windows]
    groups: int
    inner: int
    outer: int

    @staticmethod
    def of(
        x: Sequence[Size], w: Sequence[Size], stride: Any, padding: Any, dilation: Any,
        transposed: bool, groups: int,
    ) -> "_WindowedConvolution":  # fmt: skip
        """Return those of an operation on images of shape `x` with weights of shape `w`."""
        if transposed or len(x) not in (3, 4):
            raise NotTraceableError("a transposed or three-dimensional convolution")
        sizes, (o, inner, *kernels) = fixed_sizes(x[2:]), fixed_sizes(w)
        axes = []
        for size, kernel, step, pad, gap in zip(
            sizes, kernels, stride, padding, dilation, strict=True
        ):
            out = (size + 2 * pad - gap * (kernel - 1) - 1) // step + 1
            axes.append(Windows(size, out, kernel, step, pad, gap))
        if all(axis.plain for axis in axes):
            # A place meets no other: rows may follow each other in one.
            axes = [Windows(math.prod(sizes), math.prod(sizes), 1)]
        if len(axes) == 1:
            axes.insert(0, Windows(1, 1, 1))
        return _WindowedConvolution((axes[0], axes[1]), groups, inner, o // groups)

    @property
    def channels(self) -> int:
        """Channels of the output."""
        return self.groups * self.outer

    @property
    def sizes(self) -> list[int]:
        """Rows and columns of the images."""
        return [axis.size for axis in self.axes]

    @property
    def outs(self) -> list[int]:
        """Rows and columns of the result."""
        return [axis.out for axis in self.axes]

    @property
    def kernels(self) -> list[int]:
        """Rows and columns of the kernel."""
        return [axis.kernel for axis in self.axes]

    @property
    def taps(self) -> int:
        """Places of the kernel."""
        return math.prod(self.kernels)


def _times(text: str, factor: int) -> str:
    if text == "0" or factor == 0:
        return "0"
    if factor == 1:
        return text
    return f"{text} * {factor}"


def _sum(*terms: str | int) -> str:
    kept = [str(term) for term in terms if str(term) != "0"]
    if len(kept) == 1 and kept[0].isidentifier():
        return kept[0]
    return f"({' + '.join(kept)})" if kept else "0"


def _split_channels(value: KernelValue, sizes: tuple[int, int]) -> KernelValue:
    """Return a value with the axis of channels as two, without a division for an index."""

    def at(indices: Sequence[str], mask: str) -> str:
        pair = indices[1:3]
        first, second = ("0" if s == 1 else one for one, s in zip(pair, sizes, strict=True))
        own = _sum(_times(first, sizes[1]), second)
        return value.at([indices[0], own, *indices[3:]], mask)

    return view_as(value, [value.shape[0], *sizes, *value.shape[2:]], at)


class KernelImageLowering(KernelLowering):
    """Makes the statements of networks with images too."""

    # ------------------------------------------------------------------ windows

    def _pick(
        self, rules: Sequence[Rule], indices: Sequence[str], mask: str
    ) -> tuple[list[str], str]:
        """Return the axes of an entry of images, and a mask of where there are some.

        Args:
            rules: for rows and columns.
            indices: sample, channel, two of the result, two of a window.
            mask: of the result.
        """
        sample, channel, high, wide, down, right = indices
        row, some = rules[0](self._let, high, down)
        column, others = rules[1](self._let, wide, right)
        if some or others:
            mask = self._let(" & ".join([mask, *some, *others]))
        return [sample, channel, row, column], mask

    def _windows(
        self, x: KernelValue, rules: Sequence[Rule], sizes: Sequence[int], taps: Sequence[int]
    ) -> KernelValue:
        """Return what windows over images hold: samples x channels x `sizes` x `taps`.

        Args:
            x: the images.
            rules: for rows and columns.
            sizes: rows and columns of the result.
            taps: rows and columns of a window.
        """

        def at(indices: Sequence[str], mask: str) -> str:
            place, inside = self._pick(rules, indices, mask)
            text = x.at(place, inside)
            return text if inside == mask else f"tl.where({inside}, {text}, 0.0)"

        return KernelValue((*x.shape[:2], *sizes, *taps), x.dtype, at, x.cost + 2, None, x.of_row)

    def _matrix(self, value: KernelValue, groups: Sequence[Sequence[int]]) -> KernelValue:
        """Return a value with each of its new axes made of some axes, in their order."""

        def at(indices: Sequence[str], mask: str) -> str:
            found = [""] * len(value.shape)
            for index, axes in zip(indices, groups, strict=True):
                own = self._split(index, [value.shape[axis] for axis in axes])
                for axis, one in zip(axes, own, strict=True):
                    found[axis] = one
            return value.at(found, mask)

        shape = [math.prod([value.shape[axis] for axis in axes]) for axes in groups]
        return view_as(value, shape, at)

    # ------------------------------------------------------------------ convolution

    def _multiply(
        self, left: KernelValue, right: KernelValue, shape: Sequence[Size] | None = None
    ) -> Product:
        """Return the products of groups; of one group, that of two matrices."""
        if left.shape[0] == 1:
            left, right = (self._reshape(one, one.shape[1:]) for one in (left, right))
        made = Product.of(left, right)
        return made if shape is None else replace(made, shape=tuple(shape))

    def _op_convolution(
        self, x: KernelValue, w: KernelValue, bias: KernelValue | None, stride: Any, padding: Any,
        dilation: Any, transposed: bool, _output_padding: Any, groups: int,
    ) -> KernelValue:  # fmt: skip
        conv = _WindowedConvolution.of(
            x.shape, w.shape, stride, padding, dilation, transposed, groups
        )
        product = self._multiply(
            self._reshape(self._weights(w, conv), [groups, conv.outer, conv.inner * conv.taps]),
            self._matrix(self._over_input(x, conv), [[1], [2, 5, 6], [0, 3, 4]]),
        )
        return self._store_images(product, self._shape, bias)

    def _op_convolution_backward(
        self, g: KernelValue, x: KernelValue, w: KernelValue, _bias: Any, stride: Any, padding: Any,
        dilation: Any, transposed: bool, _output_padding: Any, groups: int, wanted: Sequence[bool],
    ) -> list[KernelValue | Product | None]:  # fmt: skip
        conv = _WindowedConvolution.of(
            x.shape, w.shape, stride, padding, dilation, transposed, groups
        )
        g, n = self._kept(g), x.shape[0]
        found: list[KernelValue | Product | None] = [None] * 3
        if wanted[0]:
            found[0] = self._inputs_back(
                self._reshape(g, [n, conv.channels, *conv.outs]), x, w, conv
            )
        if wanted[1]:
            flat = self._reshape(g, [n, groups, conv.outer, math.prod(conv.outs)])
            found[1] = self._multiply(
                self._matrix(flat, [[1], [2], [0, 3]]),
                self._matrix(self._over_input(x, conv), [[1], [0, 3, 4], [2, 5, 6]]),
                w.shape,
            )
        if wanted[2]:
            axes = [0, *range(2, len(g.shape))]
            found[2] = self._without(self._reduce(g, axes, "sum"), axes)
        return found

    def _inputs_back(
        self, g: KernelValue, x: KernelValue, w: KernelValue, conv: _WindowedConvolution
    ) -> KernelValue:
        """Return the gradient of the images."""
        made = self._new(x.shape, torch.float32)
        assert made.dense is not None
        parts = [axis.parts for axis in conv.axes]
        met = [sum(part.count for part in axis) for axis in parts]
        if met != conv.sizes:
            self._loop(x.shape, made.dense, self._filled(x.shape, 0.0, torch.float32))
        weights = self._weights(w, conv)
        for high, wide in itertools.product(*parts):
            some = self._taps(weights, (high, wide))
            windows = self._windows(
                g, [high.find_window, wide.find_window], [high.count, wide.count],
                [high.taps, wide.taps],
            )  # fmt: skip
            windows = _split_channels(windows, (conv.groups, conv.outer))
            product = self._multiply(
                self._matrix(some, [[0], [2], [1, 3, 4]]),
                self._matrix(windows, [[1], [2, 5, 6], [0, 3, 4]]),
            )
            self._write_images(product, made, conv.sizes, (high, wide))
        return made

    @staticmethod
    def _taps(weights: KernelValue, parts: Sequence[Part]) -> KernelValue:
        """Return the weights at the places of the kernel that entries have."""
        kernels = [part.taps for part in parts]
        if kernels == [*weights.shape[3:]]:
            return weights

        def at(indices: Sequence[str], mask: str) -> str:
            own = []
            for part, tap in zip(parts, indices[3:], strict=True):
                own.append(_sum(_times(tap, part.axis.stride), part.tap))
            return weights.at([*indices[:3], *own], mask)

        return view_as(weights, [*weights.shape[:3], *kernels], at)

    def _over_input(self, x: KernelValue, conv: _WindowedConvolution) -> KernelValue:
        """Return the windows over the images: n x groups x channels x rows x columns x kernel."""
        images = self._reshape(self._factor(x), [*x.shape[:2], *conv.sizes])
        rules = [axis.find_entry for axis in conv.axes]
        windows = self._windows(images, rules, conv.outs, conv.kernels)
        return _split_channels(windows, (conv.groups, conv.inner))

    def _weights(self, w: KernelValue, conv: _WindowedConvolution) -> KernelValue:
        """Return the weights as groups x outputs x inputs x rows x columns."""
        w = w if w.dense is not None else self.store(w)
        return self._reshape(w, [conv.groups, conv.outer, conv.inner, *conv.kernels])

    def _store_images(
        self, product: Product, shape: Sequence[Size], bias: KernelValue | None = None
    ) -> KernelValue:
        """Return a product of channels and places of all samples, as images in memory."""
        made = self._new(shape, torch.float32)
        sizes = [1, math.prod(fixed_sizes(shape[2:]))]
        parts = [Windows(size, size, 1).parts[0] for size in sizes]
        self._write_images(product, made, sizes, parts, bias)
        return made

    def _write_images(
        self, product: Product, made: KernelValue, sizes: Sequence[int], parts: Sequence[Part],
        bias: KernelValue | None = None,
    ) -> None:  # fmt: skip
        """Write a product to parts of the rows and columns of images.

        Args:
            product: its rows are channels, its columns the places of all samples.
            made: the images.
            sizes: rows and columns of them.
            parts: of the rows, and of the columns.
            bias: of each channel.
        """
        places, samples = math.prod(sizes), made.shape[0]
        counts = [part.count for part in parts]
        if all(part.whole for part in parts):
            counts = [1, places]  # which saves a division

        def body(row: str, column: str, inside: str, tile: str) -> list[str]:
            sample, *own = self._split(column, [samples, *counts])
            if counts == [1, places]:
                place = own[1]
            else:
                down, right = (part.locate(one) for part, one in zip(parts, own, strict=True))
                place = _sum(_times(down, sizes[1]), right)
            more = "" if bias is None else f" + {bias.at([row], inside)}"
            offset = _sum(_times(sample, made.shape[1] * places), f"{row} * {places}", place)  # type: ignore[arg-type]
            return [f"tl.store({made.dense} + {offset}, {tile}{more}, mask={inside})"]

        self._tiles(product, body)

    # ------------------------------------------------------------------ pooling

    def _largest(self, x: KernelValue, axes: Sequence[Windows | Areas]) -> list[KernelValue]:
        """Return the largest entry of each window, and its place in the image."""
        height, width = fixed_sizes(x.shape[2:])
        if height * width > _EXACT:
            raise NotTraceableError("it pools images of more than 16 million places")
        x = self._factor(x)
        shape = self._shape
        made, places = self._new(shape, torch.float32), self._new(shape, torch.float32)
        high, wide = (axis.kernel for axis in axes)
        self._loops += 1
        i, inside, start, tap = map(self._name, ("i", "inside", "start", "tap"))
        best, code, entry, better = map(self._name, ("best", "code", "entry", "better"))
        total = math.prod(shape)
        block = self._block(total, _ENTRIES)
        indices = [*self._split(i, shape), *self._split(tap, (high, wide))]
        place, there = self._pick([axis.find_entry for axis in axes], indices, inside)
        text = x.at(place, there)
        number = _sum(_times(place[2], width), place[3])
        self.lines += [
            f"for {start} in range(0, {total}, {block}):",
            f"    {i} = {start} + tl.arange(0, {block})",
            f"    {inside} = {i} < {total}",
            f'    {best} = tl.full(({block},), float("-inf"), tl.float32)',
            f"    {code} = tl.full(({block},), -1.0, tl.float32)",
            f"    for {tap}_own in range(0, {high * wide}):",
            f"        {tap} = {tap}_own + tl.zeros(({block},), tl.int32)",
            *self._named_lines(8),
            f"        {entry} = {text}",
            # The first of equal ones, and a number that is none in place of all others.
            f"        {better} = {there} & (({entry} > {best}) | ({entry} != {entry}) | ({code} < 0))",
            f"        {best} = tl.where({better}, {entry}, {best})",
            f"        {code} = tl.where({better}, {number} * 1.0, {code})",
            f"    tl.store({made.dense} + {i}, {best}, mask={inside})",
            f"    tl.store({places.dense} + {i}, {code}, mask={inside})",
            "tl.debug_barrier()",
        ]

        def at(indices: Sequence[str], mask: str) -> str:
            return f"{places.at(indices, mask)}.to(tl.int32)"

        return [made, KernelValue(tuple(shape), torch.int64, at, 1)]

    def _largest_back(
        self, g: KernelValue, x: KernelValue, places: KernelValue, axes: Sequence[Windows | Areas]
    ) -> KernelValue:
        """Return the gradient of the images whose largest entries were taken."""
        g, rules = self._kept(g), [axis.find_near for axis in axes]

        def at(indices: Sequence[str], mask: str) -> str:
            place, inside = self._pick(rules, indices, mask)
            own = self._let(_sum(_times(indices[2], x.shape[3]), indices[3]))  # type: ignore[arg-type]
            taken = f"{inside} & ({places.at(place, inside)} == {own})"
            return f"tl.where({taken}, {g.at(place, inside)}, 0.0)"

        return self._add_up(KernelValue((*x.shape, *(axis.near for axis in axes)), g.dtype, at, 6))

    def _add_up(self, windows: KernelValue) -> KernelValue:
        """Return the sum of each window."""
        shape = windows.shape[:4]
        if windows.shape[4:] == (1, 1):
            return self._reshape(windows, shape)
        return self._reshape(self._reduce(windows, [4, 5], "sum"), shape)

    def _average(
        self, x: KernelValue, axes: Sequence[Windows | Areas], padded: bool, divisor: int | None
    ) -> KernelValue:
        """Return the mean of each window."""
        rules, kernels = [axis.find_entry for axis in axes], [axis.kernel for axis in axes]
        windows = self._windows(self._factor(x), rules, self._shape[2:], kernels)  # type: ignore[arg-type]
        number = self._count(axes, padded, divisor)
        return self._map("({0} / {1})", self._add_up(windows), number)

    def _average_back(
        self, g: KernelValue, x: KernelValue, axes: Sequence[Windows | Areas], padded: bool,
        divisor: int | None,
    ) -> KernelValue:  # fmt: skip
        """Return the gradient of the images whose means were taken."""
        share = self._map("({0} / {1})", self._kept(g), self._count(axes, padded, divisor))
        rules, near = [axis.find_near for axis in axes], [axis.near for axis in axes]
        return self._add_up(self._windows(share, rules, fixed_sizes(x.shape[2:]), near))

    def _count(
        self, axes: Sequence[Windows | Areas], padded: bool, divisor: int | None
    ) -> KernelValue:
        """Return by how much the sum of each window is divided."""

        def at(indices: Sequence[str], _mask: str) -> str:
            counts = []
            for axis, index in zip(axes, indices[2:], strict=True):
                counts.append(axis.count_entries(index, padded))
            return f"{divisor}.0" if divisor else f"({' * '.join(counts)} * 1.0)"

        shape = (1, 1, *(axis.out for axis in axes))
        return KernelValue(shape, torch.float32, at, 2)

    def _pools(
        self, x: KernelValue, outs: Sequence[Size], kernel: Any, stride: Any, padding: Any,
        dilation: Any = 1,
    ) -> list[Windows]:  # fmt: skip
        """Return the windows of a pooling along rows and columns."""
        if len(x.shape) != 4:
            raise NotTraceableError("pooling of a single image")
        options = read_windows(kernel, stride, padding, dilation)
        sizes = zip(fixed_sizes(x.shape[2:]), fixed_sizes(outs[2:]), *options, strict=True)
        return [Windows(*given) for given in sizes]

    def _areas(self, x: KernelValue, outs: Sequence[Size]) -> list[Areas]:
        """Return the areas of a pooling along rows and columns."""
        if len(x.shape) != 4:
            raise NotTraceableError("pooling of a single image")
        return list(map(Areas, fixed_sizes(x.shape[2:]), fixed_sizes(outs[2:])))

    def _op_max_pool2d_with_indices(
        self, x: KernelValue, kernel: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
        _ceil: bool = False,
    ) -> list[KernelValue]:  # fmt: skip
        return self._largest(x, self._pools(x, self._shape, kernel, stride, padding, dilation))

    def _op_max_pool2d_with_indices_backward(
        self, g: KernelValue, x: KernelValue, kernel: Any, stride: Any, padding: Any, dilation: Any,
        _ceil: bool, places: KernelValue,
    ) -> KernelValue:  # fmt: skip
        axes = self._pools(x, g.shape, kernel, stride, padding, dilation)
        return self._largest_back(g, x, places, axes)

    def _op_adaptive_max_pool2d(self, x: KernelValue, _size: Any) -> list[KernelValue]:
        return self._largest(x, self._areas(x, self._shape))

    def _op_adaptive_max_pool2d_backward(
        self, g: KernelValue, x: KernelValue, places: KernelValue
    ) -> KernelValue:
        return self._largest_back(g, x, places, self._areas(x, g.shape))

    def _op_avg_pool2d(
        self, x: KernelValue, kernel: Any, stride: Any = None, padding: Any = 0, _ceil: bool = False,
        padded: bool = True, divisor: int | None = None,
    ) -> KernelValue:  # fmt: skip
        axes = self._pools(x, self._shape, kernel, stride, padding)
        return self._average(x, axes, padded, divisor)

    def _op_avg_pool2d_backward(
        self, g: KernelValue, x: KernelValue, kernel: Any, stride: Any, padding: Any, _ceil: bool,
        padded: bool, divisor: int | None,
    ) -> KernelValue:  # fmt: skip
        axes = self._pools(x, g.shape, kernel, stride, padding)
        return self._average_back(g, x, axes, padded, divisor)

    def _op__adaptive_avg_pool2d(self, x: KernelValue, _size: Any) -> KernelValue:
        return self._average(x, self._areas(x, self._shape), False, None)

    def _op__adaptive_avg_pool2d_backward(self, g: KernelValue, x: KernelValue) -> KernelValue:
        return self._average_back(g, x, self._areas(x, g.shape), False, None)

    # ------------------------------------------------------------------ normalization

    def _op_native_group_norm(
        self, x: KernelValue, weight: KernelValue | None, bias: KernelValue | None, n: Size, c: int,
        places: int, groups: int, eps: float,
    ) -> list[KernelValue]:  # fmt: skip
        x = self._kept(x)
        parts = self._reshape(x, [n, groups, c // groups, places])
        mean, scale = self._moments(parts, [2, 3], eps)
        own = [one and self._reshape(one, [1, groups, c // groups, 1]) for one in (weight, bias)]
        made = self._normalized(parts, mean, scale, *own)
        flat = [n, groups]
        return [self._reshape(made, x.shape), self._reshape(mean, flat), self._reshape(scale, flat)]

    def _op_native_group_norm_backward(
        self, g: KernelValue, x: KernelValue, mean: KernelValue, scale: KernelValue,
        weight: KernelValue | None, n: Size, c: int, places: int, groups: int, wanted: Sequence[bool],
    ) -> list[KernelValue | None]:  # fmt: skip
        x, g = self._kept(x), self._kept(g)
        shape = [n, groups, c // groups, places]
        means, scales = (self._reshape(one, [n, groups, 1, 1]) for one in (mean, scale))
        own = weight and self._reshape(weight, [1, groups, c // groups, 1])
        gx, gw, gb = self._gradients(
            self._reshape(g, shape), self._reshape(x, shape), means, scales, own, [2, 3], [0, 3],
            wanted,
        )  # fmt: skip
        return [
            gx and self._reshape(gx, x.shape),
            gw and self._reshape(gw, [c]),
            gb and self._reshape(gb, [c]),
        ]
