"""Convolution and pooling as calls of `blocks.h`.

A vector of the processor holds neighboring channels of a pixel or neighboring pixels of a row, whichever fills it better;
arrays lie accordingly (`LAST` or `PLANES`).
"""

from collections.abc import Sequence
from typing import Any

import torch

from coterie.engine.native.loops import Leaf, Value, dense, expanded, in_memory, order_of, product
from coterie.engine.native.lower import Lowering
from coterie.engine.native.trace import Dim, NotTraceableError, Size

LAST, PLANES = (0, 2, 3, 1), (0, 1, 2, 3)


def _sizes(shape: Sequence[Size]) -> list[int]:
    if any(isinstance(size, Dim) for size in shape):
        raise NotTraceableError("images whose size depends on the number of samples")
    return [size for size in shape if isinstance(size, int)]


def _pair(values: Any, default: Any = None) -> tuple[int, int]:
    values = default if values is None or values == [] else values
    values = values if isinstance(values, list | tuple) else [values]
    return (values[0], values[-1])


class ImageLowering(Lowering):
    """Lowers networks with images too."""

    @property
    def lanes(self) -> int:
        """Numbers in a vector."""
        return 64 // (4 if self.dtype == torch.float32 else 8)

    def _filled_part(self, size: int) -> float:
        """Return the share of vectors that `size` numbers fill."""
        return size / (self.lanes * -(-size // self.lanes))

    def _pixels_pay(self, channels: int, width: int, stride: tuple[int, int], kernel: tuple[int, int]) -> bool:
        return stride == (1, 1) and kernel != (1, 1) and self._filled_part(width) > 1.2 * self._filled_part(channels)

    def _padded(
        self, x: Value, order: Sequence[int], top: int, left: int, bottom: int, right: int, channels: int
    ) -> str:
        """Return the C++ of images with zeros around them, in an order of their axes and with so many channels."""
        n, c, h, w = x.shape
        key = ("padded", x, tuple(order), top, left, bottom, right, channels)
        if key not in self._made:
            if (top, left, bottom, right, channels) == (0, 0, 0, 0, c):
                plain = self.program.contiguous(x, order)
                self._made[key] = (plain.memory.buffer, plain.memory.offset)
            else:
                shape = (n, channels, h + top + bottom, w + left + right)
                target = self._zeros(shape, x.dtype, order)
                strides = target.memory.strides
                place = Leaf(target.memory.buffer, top * strides[2] + left * strides[3], strides)
                self.program.assign(place, x)
                self._made[key] = (target.memory.buffer, 0)
        buffer, offset = self._made[key]
        return f"{buffer} + {offset}"

    def _images(self, n: Size, sizes: Sequence[int], order: Sequence[int]) -> Value:
        return self._target((n, *sizes), self.dtype, order)

    def _weights(self, w: Value) -> str:
        plain = self.program.contiguous(w)
        return plain.memory.pointer

    def _pack(self, kind: str, call: str, w: str, size: int) -> str:
        key = (kind, w, call)
        if key not in self._made:
            name = self.program.buffer(size, self.dtype)
            self.program.emit(f"{call.format(w=w, p=name)};", [_buffer(w)], [name])
            self._made[key] = name
        return self._made[key]

    # ------------------------------------------------------------------ convolution

    def _op_convolution(
        self, x: Value, w: Value, bias: Value | None, stride: Any, padding: Any, dilation: Any, transposed: bool, _output_padding: Any,
        groups: int,
    ) -> Value:  # fmt: skip
        if len(x.shape) == 3:
            parts = (self._op_unsqueeze(x, 2), self._op_unsqueeze(w, 2))
            wide = [[1, *stride], [0, *padding], [1, *dilation]]
            return self._op_squeeze(self._op_convolution(*parts, bias, *wide, transposed, None, groups), 2)
        y = self._convolved(x, w, bias, _Convolution(x, w, stride, padding, dilation, transposed, groups))
        return y

    def _convolved(self, x: Value, w: Value, bias: Value | None, s: "_Convolution") -> Value:
        n = x.shape[0]
        if s.point:
            rows = self._shaped(self._op_permute(self.program.contiguous(x, LAST), LAST), [n * (s.h * s.w), s.c])
            y = self._product(rows, self._turned(self._shaped(w, [s.o, s.c])))
            y = self._op_permute(self._shaped(y, [n, s.h, s.w, s.o]), [0, 3, 1, 2])
            return y if bias is None else self._map(lambda a, b: f"({a} + {b})", y, self._shaped(bias, [1, s.o, 1, 1]))
        weights = self._weights(w)
        own = "nullptr"
        if bias is not None:
            plain = self.program.contiguous(bias)
            own = plain.memory.pointer
        reads = [_buffer(weights), *([_buffer(own)] if bias is not None else [])]
        if s.depthwise:
            y = self._images(n, [s.o, s.ho, s.wo], LAST)
            cp = -(-s.c // self.lanes) * self.lanes
            xp = self._padded(x, LAST, s.ph, s.pw, s.ph, s.pw, cp)
            p = self._pack("depthwise", f"pack_depthwise<{s.c}, {s.taps}>({{w}}, {{p}})", weights, s.taps * cp)
            self.program.emit(
                f"depthwise<{s.text(s.c, s.c)}>({n}, {xp}, {p}, {_name(y)});", [_buffer(xp), p], [_name(y)]
            )
            return y if bias is None else self._map(lambda a, b: f"({a} + {b})", y, self._shaped(bias, [1, s.o, 1, 1]))
        if s.groups == 1 and self._pixels_pay(s.o, s.wo, s.stride, s.kernel):
            y = self._images(n, [s.o, s.ho, s.wo], PLANES)
            xp = self._padded(x, PLANES, s.ph, s.pw, s.ph, s.pw, s.c)
            place = f"{s.c * s.taps}, {s.taps}, {s.kw}, 1"
            self.program.emit(
                f"pixels_convolve<{s.text(1, 1)}>({n}, {xp}, {weights}, {place}, {own}, {_name(y)});",
                [_buffer(xp), *reads],
                [_name(y)],
            )
            return y
        y = self._images(n, [s.o, s.ho, s.wo], LAST)
        xp = self._padded(x, LAST, s.ph, s.pw, s.ph, s.pw, s.c)
        for group in range(s.groups):
            part = f"{weights} + {group * s.og * s.cg * s.taps}" if group else weights
            size = -(-s.og // self.lanes) * self.lanes * s.cg * s.taps
            p = self._pack(
                "outputs",
                f"pack_outputs<{s.og}, {s.cg}, {s.taps}>({{w}}, {s.cg * s.taps}, {s.taps}, {{p}})",
                part,
                size,
            )
            of = f"{own} + {group * s.og}" if group and bias is not None else own
            self.program.emit(
                f"convolve<{s.text(s.c, s.o)}>({n}, {xp} + {group * s.cg}, {p}, {of}, {_name(y)} + {group * s.og});",
                [_buffer(xp), p, *reads, *([_name(y)] if group else [])], [_name(y)],
            )  # fmt: skip
        return y

    def _op_convolution_backward(
        self, g: Value, x: Value, w: Value, _bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool, _output_padding: Any,
        groups: int, mask: Sequence[bool],
    ) -> list[Value | None]:  # fmt: skip
        if len(x.shape) == 3:
            parts = [self._op_unsqueeze(v, 2) for v in (g, x, w)]
            wide = [[1, *stride], [0, *padding], [1, *dilation]]
            found = self._op_convolution_backward(*parts, None, *wide, transposed, None, groups, mask)
            return [v if v is None or len(v.shape) == 1 else self._op_squeeze(v, 2) for v in found]
        s = _Convolution(x, w, stride, padding, dilation, transposed, groups)
        if g.leaf is None:
            g = self.program.stored(
                g, LAST if s.point or not self._pixels_pay(s.o, s.wo, s.stride, s.kernel) else PLANES
            )
        gb = self._shaped(self.program.reduced([g], [0, 2, 3], "sum")[0], [s.o]) if mask[2] else None
        gw = self._weights_back(g, x, w, s) if mask[1] else None
        gx = self._inputs_back(g, x, w, s) if mask[0] else None
        return [gx, gw, gb]

    def _weights_back(self, g: Value, x: Value, w: Value, s: "_Convolution") -> Value:
        n = x.shape[0]
        if s.point:
            rows = [
                self._shaped(self._op_permute(self.program.contiguous(v, LAST), LAST), [n * (s.h * s.w), v.shape[1]])
                for v in (g, x)
            ]
            return self._shaped(self._product(self._turned(rows[0]), rows[1]), w.shape)
        gw = self._target(w.shape, self.dtype)
        name = _name(gw)
        self.more[name] = "MORE"
        if s.depthwise:
            cp = -(-s.c // self.lanes) * self.lanes
            xp = self._padded(x, LAST, s.ph, s.pw, s.ph, s.pw, cp)
            gp, frame = self._frame(g, LAST, s, cp)
            self.program.emit(
                f"depthwise_weights<{s.text(s.c, s.c)}, {frame}>({n}, {xp}, {gp}, {name}, MORE_{name});",
                [_buffer(xp), _buffer(gp)],
                [name],
            )
            return gw
        if s.groups == 1 and self._pixels_pay(s.o, s.wo, s.stride, s.kernel):
            xp, gp = self._padded(x, PLANES, s.ph, s.pw, s.ph, s.pw, s.c), self._padded(g, PLANES, 0, 0, 0, 0, s.o)
            self.program.emit(
                f"pixels_weights<{s.text(1, 1)}>({n}, {xp}, {gp}, {name}, MORE_{name});",
                [_buffer(xp), _buffer(gp)],
                [name],
            )
            return gw
        xp, gp = self._padded(x, LAST, s.ph, s.pw, s.ph, s.pw, s.c), self._padded(g, LAST, 0, 0, 0, 0, s.o)
        q = self.program.buffer(-(-s.og // self.lanes) * self.lanes * s.cg * s.taps, self.dtype)
        for group in range(s.groups):
            to = f"{name} + {group * s.og * s.cg * s.taps}"
            self.program.emit(
                f"convolve_weights<{s.text(s.c, s.o)}>({n}, {xp} + {group * s.cg}, {gp} + {group * s.og}, {q}, {s.cg * s.taps}, {s.taps}, "
                f"{to}, MORE_{name});",
                [_buffer(xp), _buffer(gp), *([name] if group else [])], [q, name],
            )  # fmt: skip
        return gw

    def _frame(self, g: Value, order: Sequence[int], s: "_Convolution", channels: int) -> tuple[str, str]:
        """Return the gradient of the output with the zeros that windows over it reach, and its frame as C++."""
        before = [max(0, -(-((k - 1) * d - p) // st)) for k, d, p, st in s.axes]
        after = [
            max(0, (size - 1 + p) // st - (out - 1)) + 1
            for (_k, _d, p, st), size, out in zip(s.axes, (s.h, s.w), (s.ho, s.wo), strict=True)
        ]
        text = self._padded(g, order, before[0], before[1], after[0], after[1], channels)
        return text, f"{s.ho + before[0] + after[0]}, {s.wo + before[1] + after[1]}, {before[0]}, {before[1]}"

    def _inputs_back(self, g: Value, x: Value, w: Value, s: "_Convolution") -> Value:
        n = x.shape[0]
        if s.point:
            rows = self._shaped(self._op_permute(self.program.contiguous(g, LAST), LAST), [n * (s.h * s.w), s.o])
            y = self._product(rows, self._shaped(w, [s.o, s.c]))
            return self._op_permute(self._shaped(y, [n, s.h, s.w, s.c]), [0, 3, 1, 2])
        weights = self._weights(w)
        if s.depthwise:
            gx = self._images(n, [s.c, s.h, s.w], LAST)
            cp = -(-s.c // self.lanes) * self.lanes
            gp, frame = self._frame(g, LAST, s, cp)
            p = self._pack("depthwise", f"pack_depthwise<{s.c}, {s.taps}>({{w}}, {{p}})", weights, s.taps * cp)
            call = f"depthwise_back<{s.text(s.c, s.c)}, {s.h}, {s.w}, {s.ph}, {s.pw}, {frame}>({n}, {gp}, {p}, {_name(gx)});"
            self.program.emit(call, [_buffer(gp), p], [_name(gx)])
            return gx
        room = ((s.kh - 1) * s.dh - s.ph, (s.kw - 1) * s.dw - s.pw)
        if s.groups == 1 and min(room) >= 0 and self._pixels_pay(s.c, s.w, s.stride, s.kernel):
            gx = self._images(n, [s.c, s.h, s.w], PLANES)
            gp = self._padded(g, PLANES, room[0], room[1], room[0], room[1], s.o)
            shape = f"Shape<{s.o}, 1, {s.c}, 1, {s.ho + 2 * room[0]}, {s.wo + 2 * room[1]}, {s.h}, {s.w}, {s.kh}, {s.kw}, 1, 1, {s.dh}, {s.dw}>"
            place = f"{s.taps}, {s.c * s.taps}, -{s.kw}, -1"
            self.program.emit(
                f"pixels_convolve<{shape}>({n}, {gp}, {weights} + {s.taps - 1}, {place}, nullptr, {_name(gx)});",
                [_buffer(gp), _buffer(weights)],
                [_name(gx)],
            )
            return gx
        gx = self._images(n, [s.c, s.h, s.w], LAST)
        gp, frame = self._frame(g, LAST, s, s.o)
        for group in range(s.groups):
            part = f"{weights} + {group * s.og * s.cg * s.taps}" if group else weights
            size = -(-s.cg // self.lanes) * self.lanes * s.og * s.taps
            p = self._pack(
                "inputs", f"pack_outputs<{s.cg}, {s.og}, {s.taps}>({{w}}, {s.taps}, {s.cg * s.taps}, {{p}})", part, size
            )
            self.program.emit(
                f"convolve_back<{s.text(s.c, s.o)}, {s.h}, {s.w}, {s.ph}, {s.pw}, {frame}>({n}, {gp} + {group * s.og}, {p}, "
                f"{_name(gx)} + {group * s.cg});",
                [_buffer(gp), p, *([_name(gx)] if group else [])], [_name(gx)],
            )  # fmt: skip
        return gx

    # ------------------------------------------------------------------ pooling

    def _pooled(self, x: Value) -> tuple[str, tuple[int, ...]]:
        """Return images that lie either way, and their order."""
        leaf = x.leaf
        order = LAST if (order_of(x)[-1] if leaf is None else _innermost(x)) == 1 else PLANES
        plain = self.program.contiguous(x, order)
        return plain.memory.pointer, order

    def _windows(
        self, x: Value, y: Sequence[Size], kernel: Any, stride: Any, padding: Any, dilation: Any, order: Sequence[int]
    ) -> str:
        c, h, w = _sizes(x.shape[1:])
        _c, ho, wo = _sizes(y[1:])
        pairs = (_pair(kernel), _pair(stride, kernel), _pair(padding), _pair(dilation))
        numbers = ", ".join(str(v) for v in (c, h, w, ho, wo, *(v for pair in pairs for v in pair)))
        return f"Windows<{numbers}, {'true' if tuple(order) == LAST else 'false'}>"

    def _op_max_pool2d_with_indices(
        self, x: Value, kernel: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, _ceil: bool = False
    ) -> list[Value]:
        if len(x.shape) != 4:
            raise NotTraceableError("pooling of a single image")
        source, order = self._pooled(x)
        y = self._target(self._kind.shape, self.dtype, order)
        at = self.program.buffer(product(self._kind.shape), "I")
        windows = self._windows(x, self._kind.shape, kernel, stride, padding, dilation, order)
        self.program.emit(
            f"largest<{windows}>({x.shape[0]}, {source}, {_name(y)}, {at});", [_buffer(source)], [_name(y), at]
        )
        return [y, in_memory(at, self._kind.shape, dense(self._kind.shape, order), torch.int64)]

    def _op_max_pool2d_with_indices_backward(
        self, g: Value, x: Value, kernel: Any, stride: Any, padding: Any, dilation: Any, _ceil: bool, at: Value
    ) -> Value:
        order = LAST if _innermost(at) == 1 else PLANES
        source = self.program.contiguous(g, order)
        gx = self._target(x.shape, self.dtype, order)
        windows = self._windows(x, g.shape, kernel, stride, padding, dilation, order)
        self.program.emit(
            f"largest_back<{windows}>({x.shape[0]}, {source.memory.pointer}, {at.memory.buffer}, {_name(gx)});",
            [source.memory.buffer, at.memory.buffer], [_name(gx)],
        )  # fmt: skip
        return gx

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
        source, order = self._pooled(x)
        y = self._target(self._kind.shape, self.dtype, order)
        windows = self._windows(x, self._kind.shape, kernel, stride, padding, 1, order)
        call = f"average<{windows}>({x.shape[0]}, {source}, {_name(y)}, {int(whole)}, {divisor or 0});"
        self.program.emit(call, [_buffer(source)], [_name(y)])
        return y

    def _op_avg_pool2d_backward(
        self, g: Value, x: Value, kernel: Any, stride: Any, padding: Any, _ceil: bool, whole: bool, divisor: int | None
    ) -> Value:
        source, order = self._pooled(g)
        gx = self._target(x.shape, self.dtype, order)
        windows = self._windows(x, g.shape, kernel, stride, padding, 1, order)
        call = f"average_back<{windows}>({x.shape[0]}, {source}, {_name(gx)}, {int(whole)}, {divisor or 0});"
        self.program.emit(call, [_buffer(source)], [_name(gx)])
        return gx

    def _areas(self, x: Value, y: Sequence[Size], source: str, target: Value, order: Sequence[int], back: bool) -> None:
        windows = self._windows(x, y, 1, 1, 0, 1, order)
        call = f"areas<{windows}, {'true' if back else 'false'}>({x.shape[0]}, {source}, {_name(target)});"
        self.program.emit(call, [_buffer(source)], [_name(target)])

    def _op__adaptive_avg_pool2d(self, x: Value, _size: Any) -> Value:
        source, order = self._pooled(x)
        y = self._target(self._kind.shape, self.dtype, order)
        self._areas(x, self._kind.shape, source, y, order, False)
        return y

    def _op__adaptive_avg_pool2d_backward(self, g: Value, x: Value) -> Value:
        source, order = self._pooled(g)
        gx = self._target(x.shape, self.dtype, order)
        self._areas(x, g.shape, source, gx, order, True)
        return gx

    def _op_upsample_nearest2d(self, x: Value, _size: Any, *_scales: Any) -> Value:
        n, c, h, w = x.shape
        high, wide = self._kind.shape[2] // h, self._kind.shape[3] // w
        parts = self._op_unsqueeze(self._op_unsqueeze(x, 4), 3)
        return self._shaped(expanded(parts, [n, c, h, high, w, wide]), self._kind.shape)

    def _op_upsample_nearest2d_backward(self, g: Value, _size: Any, shape: Sequence[Size], *_scales: Any) -> Value:
        n, c, h, w = shape
        parts = self._shaped(g, [n, c, h, g.shape[2] // h, w, g.shape[3] // w])
        return self._op_squeeze(self.program.reduced([parts], [3, 5], "sum")[0], [3, 5])


class _Convolution:
    """The numbers of a convolution over images."""

    def __init__(
        self, x: Value, w: Value, stride: Any, padding: Any, dilation: Any, transposed: bool, groups: int
    ) -> None:
        if transposed or len(x.shape) != 4:
            raise NotTraceableError("a transposed or three-dimensional convolution")
        self.c, self.h, self.w = _sizes(x.shape[1:])
        self.o, self.cg, self.kh, self.kw = _sizes(w.shape)
        self.stride, self.kernel = _pair(stride), (self.kh, self.kw)
        self.sh, self.sw = self.stride
        self.ph, self.pw = _pair(padding)
        self.dh, self.dw = _pair(dilation)
        self.groups, self.taps = groups, self.kh * self.kw
        self.og = self.o // groups
        self.ho = (self.h + 2 * self.ph - self.dh * (self.kh - 1) - 1) // self.sh + 1
        self.wo = (self.w + 2 * self.pw - self.dw * (self.kw - 1) - 1) // self.sw + 1
        self.depthwise = groups > 1 and self.cg == 1 and self.og == 1
        self.point = self.kernel == (1, 1) and self.stride == (1, 1) and (self.ph, self.pw) == (0, 0) and groups == 1
        self.axes = ((self.kh, self.dh, self.ph, self.sh), (self.kw, self.dw, self.pw, self.sw))

    def text(self, pixel: int, out: int) -> str:
        """Return the C++ of its shape, for one group; `pixel` and `out` numbers lie in a pixel of memory."""
        hp, wp = self.h + 2 * self.ph, self.w + 2 * self.pw
        c = self.c if self.depthwise else self.cg
        o = self.o if self.depthwise else self.og
        numbers = (c, pixel, o, out, hp, wp, self.ho, self.wo, self.kh, self.kw, self.sh, self.sw, self.dh, self.dw)
        return f"Shape<{', '.join(map(str, numbers))}>"


def _buffer(text: str) -> str:
    return text.split(" ", 1)[0]


def _name(value: Value) -> str:
    return value.memory.buffer


def _innermost(x: Value) -> int:
    leaf = x.leaf
    assert leaf is not None
    wide = [a for a in range(len(x.shape)) if x.shape[a] != 1]
    return min(wide, key=lambda a: leaf.strides[a] if isinstance(leaf.strides[a], int) else 1 << 40, default=3)
