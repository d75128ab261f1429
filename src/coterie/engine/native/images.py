"""Convolution and pooling as calls of `blocks.h`.

A vector of the processor holds neighboring channels of a pixel or neighboring pixels of a row,
whichever fills it better; arrays lie accordingly (`LAST` or `PLANES`). Where every layer allows it,
`sample_lanes` puts the samples of a batch there instead (`SAMPLES`).
"""

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from typing import Any

import torch

from coterie.engine.native import compiler
from coterie.engine.native.loops import MANY, Value, dense_strides, expand, in_memory, order_of
from coterie.engine.native.lower import Lowering
from coterie.engine.native.trace import (
    ArrayKind,
    NotTraceableError,
    Ref,
    Size,
    evaluate_size,
    fixed_sizes,
    read_pair,
    read_windows,
)

# Axes of N x C x H x W from the outermost to the innermost: neighbors in memory are channels,
# pixels or samples.
LAST, PLANES, SAMPLES = (0, 2, 3, 1), (0, 1, 2, 3), (1, 2, 3, 0)


class ImageLowering(Lowering):
    """Lowers networks with images too."""

    @property
    def lanes(self) -> int:
        """Numbers in a vector."""
        return compiler.vector_bytes() // self.dtype.itemsize

    def _rounded(self, channels: int) -> int:
        """Return a number of channels that fills whole vectors."""
        return -(-channels // self.lanes) * self.lanes

    def _pixels_pay(self, channels: int, width: int, conv: "_Convolution") -> bool:
        """Return whether pixels fill vectors better than channels do, and a kernel is known."""
        if conv.groups > 1 or conv.taps == 1 or conv.stride != (1, 1):
            return False
        # Compares the filled share of vectors; pixels have to win by a fifth.
        return width / self._rounded(width) > 1.2 * channels / self._rounded(channels)

    def _padded(
        self,
        x: Value,
        order: Sequence[int],
        channels: int,
        before: tuple[int, int],
        after: tuple[int, int],
    ) -> str:
        """Return the C++ of images with zeros around them; copies are shared.

        Args:
            x: N x C x H x W.
            order: of its axes in memory.
            channels: of the copy, at least C.
            before: rows and columns of zeros in front.
            after: rows and columns of zeros at the end.
        """
        c, order = x.shape[1], tuple(order)
        key = ("padded", x, order, channels, before, after)
        if key not in self._made:
            # Nothing is added, so the images themselves will do.
            if (before, after, channels) == ((0, 0), (0, 0), c):
                self._made[key] = self.program.make_contiguous(x, order).memory.pointer
            else:
                inside = self._in_frame(x.shape, x.dtype, order, channels, before, after)
                self.program.assign(inside.memory, x)
                self._made[key] = f"{inside.memory.buffer} + 0"
        return self._made[key]

    def _in_frame(
        self,
        shape: Sequence[Size],
        dtype: torch.dtype,
        order: Sequence[int],
        channels: int,
        before: tuple[int, int],
        after: tuple[int, int],
    ) -> Value:
        """Return the inner part of memory for images with zeros around them, as `_padded` says."""
        n, c, h, w = shape
        wide = (n, channels, h + before[0] + after[0], w + before[1] + after[1])
        # The images fill the inside, so zeros are written to the frame alone. Further channels lie
        # between those of the images, and need zeros everywhere.
        if channels == c:
            frame = self._target(wide, dtype, order).memory
            many, unit = self._arrays(n, c, order)
            sides = f"{before[0]}, {before[1] * unit}, {after[0]}, {after[1] * unit}"
            call = f"frame({many}, {wide[2]}, {wide[3] * unit}, {sides}, {frame.buffer});"
            self.program.emit(call, [], [frame.buffer])
        else:
            frame = self._zeros(wide, dtype, order).memory
        _n, _c, down, right = frame.strides
        return in_memory(
            frame.buffer, shape, frame.strides, dtype, before[0] * down + before[1] * right
        )

    @staticmethod
    def _arrays(n: Size, c: Size, order: Sequence[int]) -> tuple[Size, Size]:
        """Return the number of planes of images in memory, and of numbers at each place."""
        if tuple(order) == SAMPLES:
            return c, n
        if tuple(order) == LAST:
            return n, c
        return n * c, 1

    def _store_if_needed(self, ref: Ref, value: Value) -> Value:
        """See `Lowering`; what a convolution reads with zeros around it is computed into them."""
        frame = self._frames.get(ref)
        if frame is None or not value.cost or self.uses.get(ref, 0) < 2:
            return super()._store_if_needed(ref, value)
        inside = self._in_frame(value.shape, value.dtype, *frame)
        self.program.assign(inside.memory, value)
        self._made["padded", inside, *frame] = f"{inside.memory.buffer} + 0"
        return inside

    @cached_property
    def _frames(self) -> dict[Ref, tuple[tuple[int, ...], int, tuple[int, int], tuple[int, int]]]:
        """What convolutions read: order, channels and zeros for `_padded`, if there are zeros."""
        frames = {}
        for node in self.trace.nodes:
            convolves = node.name in ("convolution", "convolution_pool")
            if not convolves or not isinstance(node.args[0], Ref):
                continue
            x, w = self.trace.kind_of(node.args[0]), self.trace.kind_of(node.args[1])
            stride, padding, dilation, transposed, _output_padding, groups = node.args[3:9]
            known = all(isinstance(size, int) for size in x.shape[1:])
            if len(x.shape) != 4 or transposed or not known:
                continue
            conv = _Convolution(x, w, stride, padding, dilation, transposed, groups)
            order = self._order_read_by(conv)
            channels = conv.c
            if conv.depthwise:
                channels = self._rounded(conv.c)
            # The first convolution that reads an image decides on its frame. Copies with further
            # channels are made by `_padded`.
            if conv.padding != (0, 0) and channels == conv.c:
                frames.setdefault(node.args[0], (order, channels, conv.padding, conv.padding))
        return frames

    def _order_read_by(self, conv: "_Convolution") -> tuple[int, ...]:
        """Return the order in memory of the images that a convolution reads."""
        if conv.depthwise:
            return LAST
        return self._best_order(conv.o, conv.wo, conv)

    def _best_order(self, channels: int, width: int, conv: "_Convolution") -> tuple[int, ...]:
        if self._pixels_pay(channels, width, conv):
            return PLANES
        return LAST

    def _images(self, n: Size, sizes: Sequence[int], order: Sequence[int]) -> Value:
        return self._target((n, *sizes), self.dtype, order)

    def _plain(self, x: Value) -> str:
        """Return the C++ of an array without gaps, as PyTorch orders it."""
        return self.program.make_contiguous(x).memory.pointer

    def _packed_weights(self, call: str, w: str, size: int) -> str:
        """Return the buffer of weights in the order that a kernel reads them in; copies are shared.

        Args:
            call: the C++ that copies {w} to {p}.
            w: the weights.
            size: of the copy.
        """
        key = ("weights", w, call)
        if key not in self._made:
            name = self.program.buffer(size, self.dtype)
            self.program.emit(f"{call.format(w=w, p=name)};", [_buffer(w)], [name])
            self._made[key] = name
        return self._made[key]

    def _depthwise_weights(self, w: Value, conv: "_Convolution") -> str:
        call = f"pack_depthwise<{conv.c}, {conv.taps}>({{w}}, {{p}})"
        return self._packed_weights(call, self._plain(w), conv.taps * self._rounded(conv.c))

    def _pixels(self, x: Value) -> Value:
        """Return images as a matrix of pixels x channels."""
        n, c, h, w = x.shape
        return self._shaped(
            self._op_permute(self.program.make_contiguous(x, LAST), LAST), [n * (h * w), c]
        )

    def _from_pixels(self, rows: Value, n: Size, h: int, w: int, c: int) -> Value:
        """Return a matrix of pixels x channels as images."""
        return self._op_permute(self._shaped(rows, [n, h, w, c]), [0, 3, 1, 2])

    def _biased(self, y: Value, bias: Value | None) -> Value:
        if bias is None:
            return y
        return self._map(lambda a, b: f"({a} + {b})", y, self._shaped(bias, [1, y.shape[1], 1, 1]))

    # ------------------------------------------------------------------ convolution

    def _op_convolution(
        self,
        x: Value,
        w: Value,
        bias: Value | None,
        stride: Any,
        padding: Any,
        dilation: Any,
        transposed: bool,
        _output_padding: Any,
        groups: int,
    ) -> Value:
        given = x
        x, w, conv = self._read_convolution(x, w, stride, padding, dilation, transposed, groups)
        y = self._convolved(x, w, bias, conv)
        return y if x is given else self._op_squeeze(y, 2)

    def _read_convolution(
        self, x: Value, w: Value, stride: Any, padding: Any, dilation: Any, *rest: Any
    ) -> tuple[Value, Value, "_Convolution"]:
        """Return the images, weights and numbers of a convolution; a sequence is images of one row."""
        if len(x.shape) == 3:
            x, w = self._op_unsqueeze(x, 2), self._op_unsqueeze(w, 2)
            # The kernel has one row too.
            stride, padding, dilation = [1, *stride], [0, *padding], [1, *dilation]
        return x, w, _Convolution(x, w, stride, padding, dilation, *rest)

    def _convolved(self, x: Value, w: Value, bias: Value | None, conv: "_Convolution") -> Value:
        n, c, o, taps, w = x.shape[0], conv.c, conv.o, conv.taps, conv.useful(w)
        if conv.point:
            rows = self._pixels(x)
            y = self._product(rows, self._turned(self._shaped(w, [o, c])))
            return self._biased(self._from_pixels(y, n, conv.h, conv.w, o), bias)
        weights = self._plain(w)
        if conv.depthwise:
            y = self._images(n, [o, conv.ho, conv.wo], LAST)
            images = self._padded(x, LAST, self._rounded(c), conv.padding, conv.padding)
            packed = self._depthwise_weights(w, conv)
            call = f"depthwise<{conv.text(c, c)}>({n}, {images}, {packed}, {_name(y)});"
            self.program.emit(call, [_buffer(images), packed], [_name(y)])
            return self._biased(y, bias)
        own, reads = "nullptr", [_buffer(weights)]
        if bias is not None:
            own = self._plain(bias)
            reads.append(_buffer(own))
        if self._pixels_pay(o, conv.wo, conv):
            y = self._images(n, [o, conv.ho, conv.wo], PLANES)
            images = self._padded(x, PLANES, c, conv.padding, conv.padding)
            # Of the weights: outputs, channels, rows and columns of the kernel.
            strides = f"{c * taps}, {taps}, {conv.kw}, 1"
            arguments = f"{n}, {images}, {weights}, {strides}, {own}, {_name(y)}"
            call = f"pixels_convolve<{conv.text(1, 1)}>({arguments});"
            self.program.emit(call, [_buffer(images), *reads], [_name(y)])
            return y
        y = self._images(n, [o, conv.ho, conv.wo], LAST)
        images = self._padded(x, LAST, c, conv.padding, conv.padding)
        cg, og = conv.cg, conv.og
        # A later group leaves the channels of earlier ones as they are, so its call counts as a
        # reader of what it writes.
        for group in range(conv.groups):
            part = _shift(weights, group * og * cg * taps)
            # Outputs become lanes of vectors.
            pack = f"pack_outputs<{og}, {cg}, {taps}>({{w}}, {cg * taps}, {taps}, {{p}})"
            packed = self._packed_weights(pack, part, self._rounded(og) * cg * taps)
            own_part = own
            if bias is not None:
                own_part = _shift(own, group * og)
            arrays = f"{images} + {group * cg}, {packed}, {own_part}, {_name(y)} + {group * og}"
            call = f"convolve<{conv.text(c, o)}>({n}, {arrays});"
            self.program.emit(call, [_buffer(images), packed, *reads], [_name(y)])
            reads.append(_name(y))
        return y

    def _op_convolution_backward(
        self,
        g: Value,
        x: Value,
        w: Value,
        _bias: Any,
        stride: Any,
        padding: Any,
        dilation: Any,
        transposed: bool,
        _output_padding: Any,
        groups: int,
        mask: Sequence[bool],
    ) -> list[Value | None]:
        x, w, conv = self._read_convolution(x, w, stride, padding, dilation, transposed, groups)
        if len(g.shape) == 4:
            return self._convolved_back(g, x, w, conv, mask)
        gx, gw, gb = self._convolved_back(self._op_unsqueeze(g, 2), x, w, conv, mask)
        return [gx and self._op_squeeze(gx, 2), gw and self._op_squeeze(gw, 2), gb]

    def _convolved_back(
        self, g: Value, x: Value, w: Value, conv: "_Convolution", mask: Sequence[bool]
    ) -> list[Value | None]:
        """Return the gradients of input, weights and bias; None where the mask is false."""
        w = conv.useful(w)
        # All gradients read it: as an expression it would be computed again for each.
        if g.leaf is None:
            order = LAST
            if not conv.point:
                order = self._best_order(conv.o, conv.wo, conv)
            g = self.program.store(g, order)
        gx = gw = gb = None
        if mask[2]:
            gb = self._reduce(g, [0, 2, 3], False, "sum")
        if mask[1]:
            gw = self._weights_back(g, x, w, conv)
            # The rim of the kernel meets padding alone, so its gradient is zero.
            if any(conv.cut):
                high, wide = conv.cut
                inner, gw = gw, self._op_constant_pad_nd(gw, [wide, wide, high, high])
                self.inner[_name(gw)] = inner
        if mask[0]:
            gx = self._inputs_back(g, x, w, conv)
        return [gx, gw, gb]

    def _weights_back(self, g: Value, x: Value, w: Value, conv: "_Convolution") -> Value:
        n, c, o, taps = x.shape[0], conv.c, conv.o, conv.taps
        if conv.point:
            outputs, inputs = self._pixels(g), self._pixels(x)
            return self._shaped(self._product(self._turned(outputs), inputs), w.shape)
        # The call can add to the gradient of earlier samples: see `_Function.write_gradients`.
        gw = self._target(w.shape, self.dtype)
        name = _name(gw)
        self.more[name] = "MORE"
        if conv.depthwise:
            images = self._padded(x, LAST, self._rounded(c), conv.padding, conv.padding)
            grads, frame = self._framed(g, conv, self._rounded(c))
            arguments = f"{n}, {images}, {grads}, {name}, MORE_{name}"
            call = f"depthwise_weights<{conv.text(c, c)}, {frame}>({arguments});"
            self.program.emit(call, [_buffer(images), _buffer(grads)], [name])
            return gw
        order = self._best_order(o, conv.wo, conv)
        images = self._padded(x, order, c, conv.padding, conv.padding)
        grads = self._padded(g, order, o, (0, 0), (0, 0))
        if order == PLANES:
            call = (
                f"pixels_weights<{conv.text(1, 1)}>({n}, {images}, {grads}, {name}, MORE_{name});"
            )
            self.program.emit(call, [_buffer(images), _buffer(grads)], [name])
            return gw
        cg, og = conv.cg, conv.og
        # Whole vectors of outputs, which the kernel moves to the order of the weights at the end.
        sums = self.program.buffer(self._rounded(og) * cg * taps, self.dtype)
        reads = [_buffer(images), _buffer(grads)]
        for group in range(conv.groups):
            arrays = f"{images} + {group * cg}, {grads} + {group * og}, {sums}, {cg * taps}, {taps}"
            part = f"{name} + {group * og * cg * taps}"
            call = f"convolve_weights<{conv.text(c, o)}>({n}, {arrays}, {part}, MORE_{name});"
            self.program.emit(call, reads, [sums, name])
            reads.append(name)
        return gw

    def _framed(self, g: Value, conv: "_Convolution", channels: int) -> tuple[str, str]:
        """Return the output's gradient with the zeros that windows over it reach, and its frame."""
        high, wide = conv.frames()
        text = self._padded(g, LAST, channels, (high[0], wide[0]), (high[1], wide[1]))
        return text, f"{conv.ho + sum(high)}, {conv.wo + sum(wide)}, {high[0]}, {wide[0]}"

    def _inputs_back(self, g: Value, x: Value, w: Value, conv: "_Convolution") -> Value:
        n, c, o, h, wide, taps = x.shape[0], conv.c, conv.o, conv.h, conv.w, conv.taps
        if conv.point:
            rows = self._product(self._pixels(g), self._shaped(w, [o, c]))
            return self._from_pixels(rows, n, h, wide, c)
        weights = self._plain(w)
        top, left = conv.padding
        if conv.depthwise:
            gx = self._images(n, [c, h, wide], LAST)
            grads, frame = self._framed(g, conv, self._rounded(c))
            packed = self._depthwise_weights(w, conv)
            numbers = f"{conv.text(c, c)}, {h}, {wide}, {top}, {left}, {frame}"
            self.program.emit(
                f"depthwise_back<{numbers}>({n}, {grads}, {packed}, {_name(gx)});",
                [_buffer(grads), packed],
                [_name(gx)],
            )
            return gx
        # Zeros around the gradient, with which the turned kernel reaches every input; below 0 where
        # the padding is wider than the reach of the kernel.
        room = ((conv.kh - 1) * conv.dh - top, (conv.kw - 1) * conv.dw - left)
        # the convolution of the gradient with turned kernels
        if min(room) >= 0 and self._pixels_pay(c, wide, conv):
            gx = self._images(n, [c, h, wide], PLANES)
            grads = self._padded(g, PLANES, o, room, room)
            frame = f"{conv.ho + 2 * room[0]}, {conv.wo + 2 * room[1]}"
            kernel = f"{conv.kh}, {conv.kw}, 1, 1, {conv.dh}, {conv.dw}"
            shape = f"Shape<{o}, 1, {c}, 1, {frame}, {h}, {wide}, {kernel}>"
            # Negative strides read the kernel from its end, so that no copy of it is turned.
            turned = f"{weights} + {taps - 1}, {taps}, {c * taps}, -{conv.kw}, -1"
            call = f"pixels_convolve<{shape}>({n}, {grads}, {turned}, nullptr, {_name(gx)});"
            self.program.emit(call, [_buffer(grads), _buffer(weights)], [_name(gx)])
            return gx
        gx = self._images(n, [c, h, wide], LAST)
        grads, frame = self._framed(g, conv, o)
        cg, og, reads = conv.cg, conv.og, [_buffer(grads)]
        for group in range(conv.groups):
            part = _shift(weights, group * og * cg * taps)
            # The gradient goes from outputs to inputs: these become the lanes.
            pack = f"pack_outputs<{cg}, {og}, {taps}>({{w}}, {taps}, {cg * taps}, {{p}})"
            packed = self._packed_weights(pack, part, self._rounded(cg) * og * taps)
            numbers = f"{conv.text(c, o)}, {h}, {wide}, {top}, {left}, {frame}"
            arrays = f"{grads} + {group * og}, {packed}, {_name(gx)} + {group * cg}"
            call = f"convolve_back<{numbers}>({n}, {arrays});"
            self.program.emit(call, [packed, *reads], [_name(gx)])
            reads.append(_name(gx))
        return gx

    # ------------------------------------------------------------------ pooling

    def _pooled(self, x: Value) -> tuple[str, tuple[int, ...]]:
        """Return the C++ of images as they lie, or of a copy, and their order."""
        if len(x.shape) != 4:
            raise NotTraceableError("pooling of a single image")
        order = self._order_to_pool(x)
        return self.program.make_contiguous(x, order).memory.pointer, order

    def _order_to_pool(self, x: Value) -> tuple[int, ...]:
        """Return the order in memory in which images are pooled: that in which they lie."""
        innermost = order_of(x)[-1]
        if x.leaf is not None:
            innermost = _innermost(x)
        if innermost == 1:
            return LAST
        return PLANES

    def _windows(
        self,
        x: Value,
        y: Sequence[Size],
        kernel: Any,
        stride: Any,
        padding: Any,
        dilation: Any,
        order: Sequence[int],
    ) -> tuple[str, Size]:
        """Return the C++ of windows over images `x` that make images like `y`, and their arrays.

        Where samples lie side by side, each channel is an array whose pixels have a number of each
        sample.
        """
        c, h, w = fixed_sizes(x.shape[1:])
        many, inner = x.shape[0], c
        if tuple(order) == SAMPLES:
            many, inner = inner, many
        _c, ho, wo = fixed_sizes(y[1:])
        pairs = read_windows(kernel, stride, padding, dilation)
        sizes = (inner, h, w, ho, wo, *chain.from_iterable(pairs))
        last = str(tuple(order) != PLANES).lower()
        return f"Windows<{', '.join(map(str, sizes))}, {last}>", many

    def _op_max_pool2d_with_indices(
        self,
        x: Value,
        kernel: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        _ceil: bool = False,
    ) -> list[Value]:
        source, order = self._pooled(x)
        y = self._target(self._kind.shape, self.dtype, order)
        # Places are as wide as numbers ("I"), so that vectors of both have as many lanes.
        places = self.program.buffer(math.prod(self._kind.shape), "I")
        windows, many = self._windows(x, self._kind.shape, kernel, stride, padding, dilation, order)
        self.program.emit(
            f"largest<{windows}>({many}, {source}, {_name(y)}, {places});",
            [_buffer(source)],
            [_name(y), places],
        )
        return [
            y,
            in_memory(
                places, self._kind.shape, dense_strides(self._kind.shape, order), torch.int64
            ),
        ]

    def _op_max_pool2d_with_indices_backward(
        self,
        g: Value,
        x: Value,
        kernel: Any,
        stride: Any,
        padding: Any,
        dilation: Any,
        _ceil: bool,
        places: Value,
    ) -> Value:
        # Places were written in the order of the images, which the gradient takes on.
        order = self._order_to_pool(places)
        source = self.program.make_contiguous(g, order)
        gx = self._target(x.shape, self.dtype, order)
        windows, many = self._windows(x, g.shape, kernel, stride, padding, dilation, order)
        self.program.emit(
            f"largest_back<{windows}>({many}, {source.memory.pointer}, {places.memory.buffer}, "
            f"{_name(gx)});",
            [source.memory.buffer, places.memory.buffer],
            [_name(gx)],
        )
        return gx

    def _average(
        self, kernel: str, x: Value, g: Value | None, options: tuple[Any, Any, Any], rest: str = ""
    ) -> Value:
        """Return means of windows over images `x`, or with `g` the gradient from there.

        Args:
            kernel: the C++ of the kernel, with a place for its windows.
            x: the images.
            g: gradient of the means.
            options: size of the windows, stride and padding.
            rest: further arguments of the kernel.
        """
        means = self._kind.shape if g is None else g.shape
        source, order = self._pooled(x if g is None else g)
        made = self._target(self._kind.shape if g is None else x.shape, self.dtype, order)
        windows, many = self._windows(x, means, *options, 1, order)
        call = f"{kernel.format(windows)}({many}, {source}, {_name(made)}{rest});"
        self.program.emit(call, [_buffer(source)], [_name(made)])
        return made

    def _op_avg_pool2d(
        self,
        x: Value,
        kernel: Any,
        stride: Any = None,
        padding: Any = 0,
        _ceil: bool = False,
        whole: bool = True,
        divisor: int | None = None,
    ) -> Value:
        rest = f", {int(whole)}, {divisor or 0}"
        return self._average("average<{}>", x, None, (kernel, stride, padding), rest)

    def _op_avg_pool2d_backward(
        self,
        g: Value,
        x: Value,
        kernel: Any,
        stride: Any,
        padding: Any,
        _ceil: bool,
        whole: bool,
        divisor: int | None,
    ) -> Value:
        rest = f", {int(whole)}, {divisor or 0}"
        return self._average("average_back<{}>", x, g, (kernel, stride, padding), rest)

    def _op__adaptive_avg_pool2d(self, x: Value, _size: Any) -> Value:
        return self._average("areas<{}, false>", x, None, (1, 1, 0))

    def _op__adaptive_avg_pool2d_backward(self, g: Value, x: Value) -> Value:
        return self._average("areas<{}, true>", x, g, (1, 1, 0))

    def _op_upsample_nearest2d(
        self, x: Value, size: Sequence[Size], *scales: float | None
    ) -> Value:
        n, c, h, w = x.shape
        down, right = _copies(x.shape, size, scales)
        # Each pixel is read several times, with stride 0: N x C x H x down x W x right.
        parts = self._op_unsqueeze(self._op_unsqueeze(x, 4), 3)
        return self._shaped(expand(parts, [n, c, h, down, w, right]), self._kind.shape)

    def _op_upsample_nearest2d_backward(
        self, g: Value, size: Sequence[Size], shape: Sequence[Size], *scales: float | None
    ) -> Value:
        n, c, h, w = shape
        down, right = _copies(shape, size, scales)
        # A pixel gets the sum of the gradients of its copies.
        parts = self._shaped(g, [n, c, h, down, w, right])
        return self._reduce(parts, [3, 5], False, "sum")


def _copies(
    shape: Sequence[Size], size: Sequence[Size], scales: Sequence[float | None]
) -> list[int]:
    """Return how often images are repeated along height and width to have another size."""
    small, large = fixed_sizes(shape[2:]), fixed_sizes(size)
    counts = []
    for few, many, scale in zip(small, large, scales or (None, None), strict=True):
        count, rest = divmod(many, few)
        # A scale that was given decides which pixels are read, even where sizes fit.
        if rest or scale not in (None, count):
            raise NotTraceableError("images that are enlarged by a factor that is no whole number")
        counts.append(count)
    return counts


class _Convolution:
    """The numbers of a convolution over images.

    Attributes:
        c, h, w: channels, height and width of the input.
        o, ho, wo: those of the output.
        cg, og: channels of the input and of the output in a group.
        kh, kw: size of the kernel, without its rim that only ever meets padding; `taps` is their
            product.
        cut: rows and columns of the kernel left out so, on each side.
        dh, dw: dilation.
        stride, padding: along the height and the width.
        depthwise: whether each channel has a kernel of its own.
        point: whether the kernel is one pixel, so that the convolution is a product of matrices.
    """

    def __init__(
        self,
        x: Value | ArrayKind,
        w: Value | ArrayKind,
        stride: Any,
        padding: Any,
        dilation: Any,
        transposed: bool,
        groups: int,
    ) -> None:
        if transposed or len(x.shape) != 4:
            raise NotTraceableError("a transposed or three-dimensional convolution")
        self.c, self.h, self.w = fixed_sizes(x.shape[1:])
        self.o, self.cg, self.kh, self.kw = fixed_sizes(w.shape)
        self.stride, self.padding, (self.dh, self.dw) = map(read_pair, (stride, padding, dilation))
        self.groups, self.og = groups, self.o // groups
        self.ho = (self.h + 2 * self.padding[0] - self.dh * (self.kh - 1) - 1) // self.stride[0] + 1
        self.wo = (self.w + 2 * self.padding[1] - self.dw * (self.kw - 1) - 1) // self.stride[1] + 1
        self.cut = (
            self._rim(0, self.h, self.kh, self.dh, self.ho),
            self._rim(1, self.w, self.kw, self.dw, self.wo),
        )
        self.kh, self.kw = self.kh - 2 * self.cut[0], self.kw - 2 * self.cut[1]
        # A kernel without its rim starts further inside the padding.
        self.padding = (
            self.padding[0] - self.cut[0] * self.dh,
            self.padding[1] - self.cut[1] * self.dw,
        )
        self.taps = self.kh * self.kw
        self.depthwise = groups > 1 and self.cg == 1 and self.og == 1
        self.point = self.taps == groups == 1 and (self.stride, self.padding) == ((1, 1), (0, 0))

    def _rim(self, axis: int, size: int, kernel: int, dilation: int, out: int) -> int:
        """Return how many places at each end of a kernel's axis meet nothing but padding."""
        stride, padding = self.stride[axis], self.padding[axis]
        met = []
        for k in range(kernel):
            places = range(k * dilation - padding, k * dilation - padding + out * stride, stride)
            if any(0 <= place < size for place in places):
                met.append(k)
        if not met:
            return 0
        # As much at both ends, since a convolution has one padding for both.
        return min(met[0], kernel - 1 - met[-1], padding // dilation)

    def useful(self, w: Value) -> Value:
        """Return the part of the weights that meets the input."""
        for axis, (cut, kernel) in enumerate(zip(self.cut, (self.kh, self.kw), strict=True), 2):
            if cut:
                w = Lowering._sliced(w, axis, cut, kernel)
        return w

    def frames(self) -> list[tuple[int, int]]:
        """Return the zeros (before, after) that the output's gradient needs along height and width.

        Each entry of the input then finds as many entries of the gradient as the kernel has.
        """
        axes = ((self.kh, self.dh, self.h, self.ho), (self.kw, self.dw, self.w, self.wo))
        found = []
        for (kernel, dilation, size, out), padding, stride in zip(
            axes, self.padding, self.stride, strict=True
        ):
            before = max(0, -(-((kernel - 1) * dilation - padding) // stride))
            found.append((before, max(0, (size - 1 + padding) // stride - (out - 1)) + 1))
        return found

    def text(self, pixel: int, out: int) -> str:
        """Return the C++ of its shape for one group; `pixel` and `out` count numbers of a pixel."""
        frame = (self.h + 2 * self.padding[0], self.w + 2 * self.padding[1])
        inputs, outputs = self.cg, self.og
        if self.depthwise:
            inputs, outputs = self.c, self.o
        numbers = (
            inputs,
            pixel,
            outputs,
            out,
            *frame,
            self.ho,
            self.wo,
            self.kh,
            self.kw,
            *self.stride,
            self.dh,
            self.dw,
        )
        return f"Shape<{', '.join(map(str, numbers))}>"


def _shift(address: str, numbers: int) -> str:
    """Return the C++ of an address some numbers further."""
    if not numbers:
        return address
    return f"{address} + {numbers}"


def _buffer(text: str) -> str:
    """Return the buffer of the C++ of an address."""
    return text.split(" ", 1)[0]


def _name(value: Value) -> str:
    return value.memory.buffer


def _innermost(x: Value) -> int:
    """Return the axis of an array in memory whose neighbors lie side by side."""
    # An axis of size 1 has no neighbors, so its stride says nothing.
    wide = [axis for axis, size in enumerate(x.shape) if size != 1]
    return min(wide, key=lambda axis: abs(evaluate_size(x.memory.strides[axis], MANY)), default=3)
