"""Convolution networks with the samples of a batch across the vector, as calls of `sample_lanes.h`.

A vector holds the same place of an image in `LANES` samples. So it is full however few channels a
layer has, where neighboring channels or pixels would leave part of it empty. A call computes
exactly `LANES` samples; missing samples of a batch are copies of its first one, with weight 0.
"""

import math
from collections.abc import Sequence
from typing import Any

from coterie.engine.native.images import (
    PLANES,
    SAMPLES,
    ImageLowering,
    _buffer,
    _Convolution,
    _name,
)
from coterie.engine.native.loops import Value, in_memory
from coterie.engine.native.lower import ELEMENTWISE
from coterie.engine.native.simple import LARGE
from coterie.engine.native.trace import ArrayKind, Dim, NotTraceableError, Trace

LANES = 8
"""Samples of a call."""

# Operations that are known to be as fast with samples across the vector.
_KNOWN = {
    *ELEMENTWISE, "threshold_backward", "leaky_relu", "leaky_relu_backward", "elu", "elu_backward",
    "gelu",
    "gelu_backward", "hardtanh", "hardtanh_backward", "clamp", "clamp_min", "clamp_max", "pow",
    "rsub", "where",
    "__rshift__", "remainder", "mse_loss", "mse_loss_backward", "_to_copy", "clone", "detach",
    "alias", "zeros",
    "zeros_like", "ones", "ones_like", "full", "full_like", "arange", "permute", "transpose", "t",
    "unsqueeze",
    "squeeze", "expand", "view", "_unsafe_view", "_reshape_alias", "addmm", "mm", "sum", "mean",
    "argmax",
    "_log_softmax", "_log_softmax_backward_data", "nll_loss_forward", "nll_loss_backward",
    "max_pool2d_with_indices", "max_pool2d_with_indices_backward", "avg_pool2d",
    "avg_pool2d_backward",
    "_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward", "convolution", "convolution_backward",
}  # fmt: skip


def samples_pay(trace: Trace, size: int) -> bool:
    """Return whether samples across the vector are faster than channels or pixels, in all layers.

    Args:
        trace: of the module's training step, whose samples do not need each other.
        size: numbers of the model.
    """
    convolutions = [node for node in trace.nodes if node.name == "convolution"]
    if not convolutions or size > LARGE or any(node.name not in _KNOWN for node in trace.nodes):
        return False
    return all(_has_kernel(trace, node.args) for node in convolutions)


def _has_kernel(trace: Trace, args: Sequence[Any]) -> bool:
    """Return whether `sample_lanes.h` has the convolution of some arguments."""
    try:
        conv = _convolution(trace.kind_of(args[0]), trace.kind_of(args[1]), args[3:])
    except NotTraceableError:
        return False
    plain = conv.groups == 1 and conv.stride == (1, 1) and (conv.dh, conv.dw) == (1, 1)
    inside = conv.padding[0] < conv.kh and conv.padding[1] < conv.kw
    return plain and inside and conv.cut == (0, 0)


def _convolution(
    x: Value | ArrayKind, w: Value | ArrayKind, options: Sequence[Any]
) -> _Convolution:
    """Return the numbers of a convolution from the arguments of the operation behind the bias."""
    stride, padding, dilation, transposed, _output_padding, groups = options[:6]
    return _Convolution(x, w, stride, padding, dilation, transposed, groups)


def _grid(channels: int, height: int, width: int, row: int) -> str:
    """Return the C++ of planes whose rows begin `row` places apart."""
    return f"across::Grid<{channels}, {height}, {width}, {row}, {height * row}>"


class SampleLowering(ImageLowering):
    """Lowers networks that `samples_pay` accepts, for calls of `LANES` samples."""

    def _order_read_by(self, conv: _Convolution) -> tuple[int, ...]:
        return SAMPLES

    def _order_to_pool(self, x: Value) -> tuple[int, ...]:
        return SAMPLES

    # ------------------------------------------------------------------ convolution

    def _convolved(self, x: Value, w: Value, bias: Value | None, conv: _Convolution) -> Value:
        y = self._images(x.shape[0], [conv.o, conv.ho, conv.wo], SAMPLES)
        grids = f"{self._read_grid(conv)}, {_grid(conv.o, conv.ho, conv.wo, conv.wo)}"
        self._convolve(f"convolve<{grids}, {conv.kh}, {conv.kw}>", x, w, bias, conv, [_name(y)])
        return y

    def _op_convolution_pool(
        self, x: Value, w: Value, bias: Value | None, *options: Any
    ) -> list[Value]:
        conv, (high, wide) = _convolution(x, w, options), options[6]
        shape = self._kind.shape
        y = self._target(shape, self.dtype, SAMPLES)
        # Places lie as the images do, so that the kernel writes both at one index.
        places = in_memory(
            self.program.buffer(math.prod(shape), "I"),
            shape,
            y.memory.strides,
            self._kinds[1].dtype,
        )
        pooled = _grid(conv.o, conv.ho // high, conv.wo // wide, conv.wo // wide)
        grids = f"{self._read_grid(conv)}, {pooled}"
        kernel = f"convolve_pool<{grids}, {conv.kh}, {conv.kw}, {high}, {wide}>"
        self._convolve(kernel, x, w, bias, conv, [_name(y), _name(places)])
        return [y, places]

    def _convolve(
        self,
        kernel: str,
        x: Value,
        w: Value,
        bias: Value | None,
        conv: _Convolution,
        outputs: list[str],
    ) -> None:
        images = self._padded(x, SAMPLES, conv.c, conv.padding, conv.padding)
        weights, own = self._plain(w), "nullptr"
        if bias is not None:
            own = self._plain(bias)
        call = f"across::{kernel}({images}, {weights}, {own}, {', '.join(outputs)});"
        self.program.emit(call, [_buffer(images), _buffer(weights), _buffer(own)], outputs)

    @staticmethod
    def _read_grid(conv: _Convolution) -> str:
        """Return the C++ of the images that a convolution reads, with the zeros around them."""
        height, width = conv.h + 2 * conv.padding[0], conv.w + 2 * conv.padding[1]
        return _grid(conv.c, height, width, width)

    def _convolved_back(
        self, g: Value, x: Value, w: Value, conv: _Convolution, mask: Sequence[bool]
    ) -> list[Value | None]:
        # Zeros on both sides of each row of the gradient, so that a turned kernel slides over it
        # without conditions at the edges.
        left = 0
        if mask[0]:
            left = conv.kw - 1 - conv.padding[1]
        if left:
            framed = self._in_frame(g.shape, self.dtype, SAMPLES, conv.o, (0, left), (0, left))
            self.program.assign(framed.memory, g)
            g = framed
        else:
            g = self.program.make_contiguous(g, SAMPLES)
        row, grads = conv.wo + 2 * left, g.memory.pointer
        gx = gw = gb = None
        if mask[2]:
            gb = self._reduce(g, [0, 2, 3], False, "sum")
        if mask[0]:
            gx = self._input_gradient(grads, row, x, w, conv)
        if mask[1]:
            gw = self._weight_gradient(grads, row, x, w, conv)
        return [gx, gw, gb]

    def _op_convolution_pool_backward(
        self, g: Value, x: Value, w: Value, places: Value, _bias: Any, *options: Any
    ) -> list[Value | None]:
        conv = _convolution(x, w, options)
        mask, (high, wide) = options[6:]
        g = self.program.make_contiguous(g, SAMPLES)
        height, width = conv.ho // high, conv.wo // wide
        pooled = _grid(conv.o, height, width, width)
        gw = gb = None
        if mask[2]:
            gb = self._reduce(g, [0, 2, 3], False, "sum")
        # A first layer needs the gradient of its weights alone, which takes pooled gradients with
        # their places as they are.
        if not mask[0]:
            if mask[1]:
                grids = f"{self._read_grid(conv)}, {pooled}"
                kernel = f"convolve_pool_weights<{grids}, {conv.kh}, {conv.kw}, {high}, {wide}>"
                gw = self._call_for_weights(
                    kernel, f"{g.memory.pointer}, {_name(places)}", x, w, conv
                )
            return [None, gw, gb]
        left = conv.kw - 1 - conv.padding[1]
        # what no window covers has no gradient: zeros there too
        right = left + conv.wo - width * wide
        # The kernels below see only what windows cover.
        conv.ho, conv.wo = height * high, width * wide
        row = left + conv.wo + right
        shape = (x.shape[0], conv.o, conv.ho, conv.wo)
        inside = self._in_frame(shape, self.dtype, SAMPLES, conv.o, (0, left), (0, right)).memory
        call = (
            f"across::pool_back<{_grid(conv.o, conv.ho, conv.wo, row)}, {pooled}, {high}, {wide}>"
        )
        self.program.emit(
            f"{call}({g.memory.pointer}, {_name(places)}, {inside.pointer});",
            [_name(g), _name(places), inside.buffer],
            [inside.buffer],
        )
        gx = self._input_gradient(inside.pointer, row, x, w, conv)
        if mask[1]:
            gw = self._weight_gradient(inside.pointer, row, x, w, conv)
        return [gx, gw, gb]

    def _input_gradient(
        self, grads: str, row: int, x: Value, w: Value, conv: _Convolution
    ) -> Value:
        """Return the input's gradient from the output's, whose rows have zeros on both sides."""
        gx = self._images(x.shape[0], [conv.c, conv.h, conv.w], SAMPLES)
        weights = self._plain(w)
        grids = f"{_grid(conv.c, conv.h, conv.w, conv.w)}, {_grid(conv.o, conv.ho, conv.wo, row)}"
        numbers = f"{conv.kh}, {conv.kw}, {conv.padding[0]}, {conv.padding[1]}"
        call = f"across::convolve_back<{grids}, {numbers}>({grads}, {weights}, {_name(gx)});"
        self.program.emit(call, [_buffer(grads), _buffer(weights)], [_name(gx)])
        return gx

    def _weight_gradient(
        self, grads: str, row: int, x: Value, w: Value, conv: _Convolution
    ) -> Value:
        grids = f"{self._read_grid(conv)}, {_grid(conv.o, conv.ho, conv.wo, row)}"
        return self._call_for_weights(
            f"convolve_weights<{grids}, {conv.kh}, {conv.kw}>", grads, x, w, conv
        )

    def _call_for_weights(
        self, kernel: str, grads: str, x: Value, w: Value, conv: _Convolution
    ) -> Value:
        images = self._padded(x, SAMPLES, conv.c, conv.padding, conv.padding)
        gw = self._target(w.shape, self.dtype)
        name = _name(gw)
        # The kernel can add to the gradient of earlier pieces of the batch.
        self.more[name] = "MORE"
        reads = list(map(_buffer, (images, *grads.split(", "))))
        self.program.emit(
            f"across::{kernel}({images}, {grads}, {name}, MORE_{name});", reads, [name]
        )
        return gw

    # -------------------------------------------------------------- from places to samples and back

    def _op_view(self, x: Value, shape: Any) -> Value:
        """See `Lowering`; rows that become images are transposed, so that samples are adjacent."""
        images = super()._op_view(x, shape)
        if len(images.shape) != 4 or not images.is_dense(PLANES):
            return images
        # Rows of samples have the samples outermost; kernels for images read them innermost.
        turned = self._target(images.shape, self.dtype, SAMPLES)
        entries, source = math.prod(images.shape[1:]), images.memory.pointer
        call = f"across::by_place<{entries}>({source}, {_name(turned)});"
        self.program.emit(call, [_name(images)], [_name(turned)])
        return turned

    _op__unsafe_view = _op_view

    def _product(self, a: Value, b: Value) -> Value:
        return super()._product(self._by_sample(a), self._by_sample(b))

    def _by_sample(self, x: Value) -> Value:
        """Return a matrix by rows of samples as it is, or one with adjacent samples transposed."""
        # Weights have sizes that are plain numbers: only a matrix of samples has a Dim of rows.
        if len(x.shape) != 2 or not isinstance(x.shape[0], Dim):
            return x
        if x.leaf is None:
            x = self.program.store(x)
        # Only a matrix whose samples lie side by side is turned over.
        if x.memory.strides != (1, x.shape[0]):
            return x
        key = ("rows", x)
        if key not in self._made:
            rows = self._target(x.shape, self.dtype)
            call = f"across::by_sample<{x.shape[1]}>({x.memory.pointer}, {_name(rows)});"
            self.program.emit(call, [x.memory.buffer], [_name(rows)])
            self._made[key] = rows
        return self._made[key]
