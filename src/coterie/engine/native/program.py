"""The program of a stack: the C++ text of its training step, on the kernels in kernels.h and driver.h."""

import math
from dataclasses import dataclass, field
from pathlib import Path

import torch

from coterie.engine.native.stack import (
    Activation,
    Convolution,
    Dropout,
    Flatten,
    Layer,
    Linear,
    MaxPool,
    NotAStackError,
    Simplex,
)
from coterie.models.layout import Layout

SAMPLES = 8
"""Number of samples of a batch that are processed at once."""


@dataclass
class _Array:
    """An activation: its shape, and the zeros kept around it for the convolution that reads it."""

    name: str
    shape: tuple[int, int, int]
    padding: tuple[int, int] = (0, 0)
    tanh: bool = False

    @property
    def row(self) -> int:
        return self.shape[2] + 2 * self.padding[1]

    @property
    def plane(self) -> int:
        return (self.shape[1] + 2 * self.padding[0]) * self.row

    @property
    def inside(self) -> str:
        """Where its first place lies."""
        start = self.padding[0] * self.row + self.padding[1]
        return f"{self.name} + {start}" if start else self.name

    @property
    def grid(self) -> str:
        return "Grid<{}, {}, {}, {}, {}>".format(*self.shape, self.row, self.plane)

    @property
    def plain(self) -> str:
        """The grid of its gradient, which has no zeros around it."""
        channels, height, width = self.shape
        return f"Grid<{channels}, {height}, {width}, {width}, {height * width}>"


@dataclass
class _Text:
    """The parts of the program as they are written."""

    members: list[str] = field(default_factory=list)
    mix: list[str] = field(default_factory=list)  # before a batch
    forward: list[str] = field(default_factory=list)
    # of each layer; the last layer comes first in the program
    backward: list[list[str]] = field(default_factory=list)

    def array(self, kind: str, name: str, size: int | str) -> None:
        self.members.append(f"alignas(64) {kind} {name}[{size}] = {{}};")


class _Writer:
    """Writes the layers of a stack one after another."""

    def __init__(self, stack: list[Layer], layout: Layout, features: tuple[int, ...]) -> None:
        self.stack, self.slots = stack, {slot.name: slot.start for slot in layout.slots}
        self.shapes = {slot.name: slot.shape for slot in layout.slots}
        self.text = _Text()
        self.number = 0
        # whether a layer with parameters has been written: those before need no gradient
        self.trained = False
        height, width = (1, math.prod(features[1:])) if len(features) != 3 else features[1:]
        self.input = self.now = self._new((features[0], height, width), 0)

    def _new(self, shape: tuple[int, int, int], position: int) -> _Array:
        padding = (0, 0)
        for layer in self.stack[position:]:
            if isinstance(layer, Convolution):
                padding = layer.padding
            if not isinstance(layer, Activation | Dropout):
                break
        array = _Array(f"a{self.number}", shape, padding)
        self.number += 1
        self.text.array("V", array.name, shape[0] * array.plane)
        self.text.array("V", f"g{array.name}", math.prod(shape))
        return array

    def write(self) -> _Text:
        position = 0
        while position < len(self.stack):
            layer = self.stack[position]
            if isinstance(layer, Convolution):
                position += self._convolution(layer, position)
            elif isinstance(layer, MaxPool):
                self._pool(layer, position)
            elif isinstance(layer, Linear):
                self._linear(layer, position)
            elif isinstance(layer, Simplex):
                self._simplex(layer, position)
            elif isinstance(layer, Flatten):
                if self.now.padding != (0, 0):
                    raise NotAStackError("a flattened input is convolved")
                self.now = _Array(
                    self.now.name, (math.prod(self.now.shape), 1, 1), tanh=self.now.tanh
                )
            else:
                self._in_place(layer)
            position += 1
        return self.text

    def _bias(self, layer: Convolution | Linear) -> tuple[str, int]:
        if layer.bias is None:
            return "nullptr", -1
        return f"w + {self.slots[layer.bias]}", self.slots[layer.bias]

    def _convolution(self, layer: Convolution, position: int) -> int:
        """Write a convolution with the pooling after it; return how many further layers that took."""
        x, (kh, kw), (ph, pw) = self.now, layer.kernel, layer.padding
        channels, height, width = x.shape
        if self.shapes[layer.weight][1] != channels:
            raise NotAStackError(f"{layer.weight} does not fit {channels} channels")
        height, width = height + 2 * ph - kh + 1, width + 2 * pw - kw + 1
        pool, taken = self._pool_after(position)
        size = pool.size if pool else (1, 1)
        pooled = (layer.outputs, height // size[0], width // size[1])
        if min(pooled) < 1:
            raise NotAStackError("an input is smaller than its kernel")
        y = self._new(pooled, position + 1 + taken)
        # of what the pooling reads
        full = (layer.outputs, pooled[1] * size[0], pooled[2] * size[1])
        kernel, (bias, bias_at), weight = f"{kh}, {kw}", self._bias(layer), self.slots[layer.weight]
        padded = f"Grid<{channels}, {x.plane // x.row}, {x.row}, {x.row}, {x.plane}>"
        left = kw - 1 - pw if self.trained else 0
        row = left + max(full[2], x.shape[2] + pw) if self.trained else full[2]
        wide = f"Grid<{full[0]}, {full[1]}, {full[2]}, {row}, {full[1] * row}>"
        gradient = f"g{y.name}"
        back: list[str] = []
        if bias_at >= 0:
            back.append(
                f"bias_gradient<{pooled[0]}, {pooled[1] * pooled[2]}>({gradient}, step, {bias_at});"
            )
        windows = ""
        if pool is not None:
            windows = f"{size[0]}, {size[1]}"
            self.text.array("VI", f"at_{y.name}", math.prod(pooled))
            self.text.forward.append(
                f"convolve_pool<{padded}, {y.grid}, {kernel}, {windows}>"
                f"({x.name}, w + {weight}, {bias}, {y.inside}, at_{y.name});"
            )
        else:
            self.text.forward.append(
                f"convolve<{padded}, {y.grid}, {kernel}>({x.name}, w + {weight}, {bias}, {y.inside});"
            )
        if self.trained:
            self.text.array("V", f"w{y.name}", full[0] * full[1] * row + kw)
            gradient = f"w{y.name} + {left}"
            back.append(
                f"pool_back<{wide}, {y.plain}, {windows}>(g{y.name}, at_{y.name}, {gradient});"
                if pool
                else f"copy<{y.plain}, {wide}>(g{y.name}, {gradient});"
            )
            back.append(
                f"convolve_back<{x.plain}, {wide}, {kernel}, {ph}, {pw}>({gradient}, w + {weight}, g{x.name});"
            )
        if pool is not None and not self.trained:
            back.append(
                f"convolve_pool_weights<{padded}, {y.plain}, {kernel}, {windows}>"
                f"({x.name}, {gradient}, at_{y.name}, step, {weight});"
            )
        else:
            back.append(
                f"convolve_weights<{padded}, {wide}, {kernel}>({x.name}, {gradient}, step, {weight});"
            )
        self._finish(back, y)
        # what rises and max-pooling can change places: the larger of two is the same before and
        # after
        if taken == 2:
            activation = self.stack[position + 1]
            assert isinstance(activation, Activation)
            self._in_place(activation)
        return taken

    def _pool_after(self, position: int) -> tuple[MaxPool | None, int]:
        rest = self.stack[position + 1 : position + 3]
        if rest and isinstance(rest[0], MaxPool):
            return rest[0], 1
        match rest:
            case [Activation(kind="relu" | "leaky"), MaxPool() as pool]:
                return pool, 2
        return None, 0

    def _finish(self, back: list[str], y: _Array) -> None:
        self.text.backward.append(back)
        self.now = y
        self.trained = True

    def _pool(self, layer: MaxPool, position: int) -> None:
        x, (ph, pw) = self.now, layer.size
        y = self._new((x.shape[0], x.shape[1] // ph, x.shape[2] // pw), position + 1)
        if min(y.shape) < 1:
            raise NotAStackError("an input is smaller than the window of a pooling")
        at = f"at_{y.name}"
        self.text.array("VI", at, math.prod(y.shape))
        self.text.forward.append(
            f"pool<{x.grid}, {y.grid}, {ph}, {pw}>({x.inside}, {y.inside}, {at});"
        )
        if self.trained:
            self.text.backward.append(
                [f"pool_back<{x.plain}, {y.plain}, {ph}, {pw}>(g{y.name}, {at}, g{x.name});"]
            )
        self.now = y

    def _linear(self, layer: Linear, position: int) -> None:
        x, (bias, bias_at), weight = self.now, self._bias(layer), self.slots[layer.weight]
        entries = x.shape[0]
        if x.shape[1:] != (1, 1) or self.shapes[layer.weight][1] != entries:
            raise NotAStackError(f"{layer.weight} does not take a flat input of {entries} entries")
        y = self._new((layer.outputs, 1, 1), position + 1)
        sizes = f"{entries}, {layer.outputs}"
        self._product(x, y, f"w + {weight}", bias)
        back = (
            [f"linear_back<{sizes}>(g{y.name}, w + {weight}, g{x.name});"] if self.trained else []
        )
        back.append(f"linear_weights<{sizes}>(s{x.name}, g{y.name}, step, {weight});")
        if bias_at >= 0:
            back.append(f"bias_gradient<{layer.outputs}, 1>(g{y.name}, step, {bias_at});")
        self._finish(back, y)

    def _product(self, x: _Array, y: _Array, weights: str, bias: str) -> None:
        """Write a linear layer's outputs, and its inputs sample by sample, which its weights' gradient needs too."""
        entries, outputs = x.shape[0], y.shape[0]
        self.text.array("T", f"s{x.name}", f"N * Inputs<{entries}>::ROW")
        self.text.forward.append(f"by_sample<{entries}>({x.name}, s{x.name});")
        self.text.forward.append(
            f"linear<{entries}, {outputs}>({x.name}, s{x.name}, {weights}, {bias}, {y.name});"
        )

    def _simplex(self, layer: Simplex, position: int) -> None:
        x, weight = self.now, self.slots[layer.weight]
        entries, outputs = x.shape[0], layer.outputs
        if x.shape[1:] != (1, 1) or self.shapes[layer.weight][2] != entries:
            raise NotAStackError(f"{layer.weight} does not take a flat input of {entries} entries")
        y = self._new((outputs, 1, 1), position + 1)
        mixed, shares = (
            f"w{y.name}",
            f"{layer.endpoints}, {{}}>(w + {{}}, alpha, T({layer.gain!r}), {{}});",
        )
        self.text.array("T", mixed, outputs * entries)
        self.text.mix += [
            "mixture = alpha;",
            "mix_endpoints<" + shares.format(outputs * entries, weight, mixed),
        ]
        bias, bias_at = "nullptr", -1
        if layer.bias is not None:
            bias_at = self.slots[layer.bias]
            bias = f"w + {bias_at}"
            if not layer.shared_bias:
                bias = f"b{y.name}"
                self.text.array("T", bias, outputs)
                self.text.mix.append("mix_endpoints<" + shares.format(outputs, bias_at, bias))
        sizes = f"{entries}, {outputs}"
        self._product(x, y, mixed, bias)
        back = [f"linear_back<{sizes}>(g{y.name}, {mixed}, g{x.name});"] if self.trained else []
        shared = str(layer.shared_bias).lower()
        endpoints = f"Endpoints<{layer.endpoints}, {sizes}, Step>{{step, mixture, T({layer.gain!r}), {weight}, {shared}}}"
        back.append(f"linear_weights<{sizes}>(s{x.name}, g{y.name}, {endpoints}, {weight});")
        if bias_at >= 0:
            back.append(f"bias_gradient<{outputs}, 1>(g{y.name}, {endpoints}, {bias_at});")
        self._finish(back, y)

    def _in_place(self, layer: Activation | Dropout) -> None:
        x = self.now
        if isinstance(layer, Dropout):
            if x.tanh:
                raise NotAStackError("dropout follows tanh directly")
            kept = f"kept{len(self.text.forward)}"
            self.text.array("VI", kept, math.prod(x.shape))
            scale = repr(1 - layer.p)
            self.text.forward.append(
                f"if (TRAIN) dropout<{x.grid}, {str(layer.channels).lower()}>({x.inside}, {kept}, key, {layer.layer}u, "
                f"{int(layer.p * (1 << 53))}u, T({scale}), sample);"
            )
            back = f"dropout_back<{x.plain}>({kept}, g{x.name}, T({scale}));"
        else:
            name = {"relu": "relu", "leaky": "leaky", "tanh": "hyperbolic"}[layer.kind]
            slope = f", T({layer.slope!r})" if layer.kind == "leaky" else ""
            x.tanh = x.tanh or layer.kind == "tanh"
            self.text.forward.append(f"{name}<{x.grid}>({x.inside}{slope});")
            back = f"{name}_back<{x.grid}, {x.plain}>({x.inside}, g{x.name}{slope});"
        if self.trained:
            self.text.backward.append([back])


def write(
    stack: list[Layer], layout: Layout, features: tuple[int, ...], any_optimizer: bool = False
) -> str:
    """Return the C++ text of a stack's program.

    Args:
        stack: the layers.
        layout: where their tensors lie in a row.
        features: the shape of one input.
        any_optimizer: for every optimizer, in a program of its own: one for SGD with momentum and
            Adam with the usual betas alone is compiled faster, and rounds as it always has.

    Raises:
        NotAStackError: when the layers do not fit each other.
    """
    writer = _Writer(stack, layout, features)
    text = writer.write()
    if not writer.trained or writer.now.padding != (0, 0):
        raise NotAStackError("it has no layer with parameters")
    number, integer = (
        ("float", "int32_t") if layout.dtype == torch.float32 else ("double", "int64_t")
    )
    here = Path(__file__).parent
    parts = [
        f"#include <cstdint>\ntypedef {number} T;\ntypedef {integer} I;\nconstexpr int N = {SAMPLES};",
        *(["#define ANY_OPTIMIZER"] if any_optimizer else []),
        (here / "samples.h").read_text(),
        (here / "kernels.h").read_text(),
        f"constexpr int PARAMS = {layout.size}, OUTPUTS = {math.prod(writer.now.shape)};",
        f"constexpr int ENDPOINTS = {max((part.endpoints for part in stack if isinstance(part, Simplex)), default=0)};",
        f"using Input = {writer.input.grid};",
        "struct Net {",
        *(f"  {line}" for line in text.members),
        f"  V* input() {{ return {writer.input.inside}; }}",
        f"  V* output() {{ return {writer.now.name}; }}",
        f"  V* output_gradient() {{ return g{writer.now.name}; }}",
        "  const T* mixture = nullptr;",
        "  void mix(const T* w, const T* alpha) {",
        *(f"    {line}" for line in text.mix),
        "  }",
        "  template <bool TRAIN>",
        "  void forward(const T* w, uint64_t key, int sample) {",
        *(f"    {line}" for line in text.forward),
        "  }",
        "  template <class Step>",
        "  void backward(const T* w, const Step& step) {",
        *(f"    {line}" for lines in reversed(text.backward) for line in lines),
        "  }",
        "};",
        (here / "driver.h").read_text(),
    ]
    return "\n".join(parts)
