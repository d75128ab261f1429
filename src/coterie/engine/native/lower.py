"""PyTorch's operations as statements of a native program: what each node of a trace becomes.

A method `_op_NAME` of `Lowering` makes the operation NAME; simple elementwise ones are entries of
`_UNARY`, `_BINARY` and the tables next to them. Elementwise operations and views make expressions;
products, convolutions, pooling and sums make calls of `blocks.h` or loops.
"""

import inspect
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch

from coterie._util.mappings import map_values
from coterie.engine.native.loops import (
    MANY,
    Leaf,
    Program,
    Value,
    by_strides,
    combine,
    common_shape,
    dense_strides,
    expand,
    in_memory,
    number,
    order_of,
    reshape,
)
from coterie.engine.native.trace import (
    ArrayKind,
    Dim,
    NotTraceableError,
    Operation,
    Ratio,
    Ref,
    Size,
    Trace,
    evaluate_size,
)

_LARGE = 40  # operations of an expression above which it is computed into memory
_OFTEN = 4  # products with one matrix for which packing it pays whatever they are
_LONG = 48  # sums of a product from which dot products pay
_ROWS = 48  # rows of a product from which packing its other matrix pays

Number = int | float | bool | Dim | Ratio
Operand = Value | Number

_BINARY = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_LOGIC = {"logical_and": "&&", "logical_or": "||", "logical_xor": "!="}
_BITS = {"bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^"}
# Costs are in additions, roughly; only their order matters, against `_LARGE` and each other.
_UNARY: dict[str, tuple[str, int]] = {  # text, cost
    "neg": ("(-{0})", 1), "abs": ("std::fabs({0})", 1), "relu": ("chosen({0} < 0, 0, {0})", 1),
    "exp": ("exponential({0})", 8), "log": ("std::log({0})", 8), "log1p": ("std::log1p({0})", 8),
    "log2": ("std::log2({0})", 8), "expm1": ("std::expm1({0})", 8), "sqrt": ("std::sqrt({0})", 6),
    "rsqrt": ("(1 / std::sqrt({0}))", 8), "reciprocal": ("(1 / {0})", 4),
    "sigmoid": ("sigmoid({0})", 10),
    "tanh": ("hyperbolic({0})", 10), "erf": ("error_function({0})", 12),
    "sin": ("std::sin({0})", 8),
    "cos": ("std::cos({0})", 8), "floor": ("std::floor({0})", 1), "ceil": ("std::ceil({0})", 1),
    "round": ("std::nearbyint({0})", 1), "trunc": ("std::trunc({0})", 1),
    "sign": ("(T({0} > 0) - T({0} < 0))", 2), "atan": ("std::atan({0})", 8),
    "sinh": ("std::sinh({0})", 8), "cosh": ("std::cosh({0})", 8),
    "silu": ("({0} * sigmoid({0}))", 11),
    "hardsigmoid": ("chosen({0} < -3, 0, chosen({0} > 3, 1, {0} / 6 + T(0.5)))", 3),
    "hardswish": ("({0} * chosen({0} < -3, 0, chosen({0} > 3, 1, {0} / 6 + T(0.5))))", 4),
    "mish": ("({0} * hyperbolic(softened({0}, 1, 20)))", 24),
    "log_sigmoid_forward": ("(-softened(-{0}, 1, 20))", 12),
}  # fmt: skip
# of (gradient, saved value); PyTorch too rounds 1 / 6 to 32 bits
_BACKWARD: dict[str, tuple[str, int]] = {
    "tanh_backward": ("({0} * (1 - {1} * {1}))", 3),
    "sigmoid_backward": ("({0} * {1} * (1 - {1}))", 3),
    "silu_backward": ("({0} * silu_slope({1}))", 14),
    "hardsigmoid_backward": ("chosen({1} > -3 && {1} < 3, {0} * T(1.0f / 6), 0)", 2),
    "hardswish_backward": (
        "chosen({1} < -3, 0, chosen({1} > 3, {0}, {0} * ({1} / 3 + T(0.5))))", 4
    ),
    "mish_backward": ("({0} * mish_slope({1}))", 40),
}  # fmt: skip

_TABLES: tuple[Collection[str], ...] = (_UNARY, _BACKWARD, _BINARY, _COMPARE, _LOGIC, _BITS)
ELEMENTWISE = set(chain.from_iterable(_TABLES))
"""Operations that the tables above describe."""


class Lowering:
    """Makes the statements of a traced function.

    Args:
        program: gets them.
        trace: the function.
        samples: the most samples of a call.
        dtype: of the model.
    """

    def __init__(self, program: Program, trace: Trace, samples: int, dtype: torch.dtype) -> None:
        self.program, self.trace, self.samples, self.dtype = program, trace, samples, dtype
        self.values: dict[Ref, Any] = {}
        self.uses = trace.count_uses()
        self._made: dict[Any, Any] = {}  # padded and packed copies, by what they are copies of
        self.inner: dict[str, Value] = {}  # what lies in the middle of a buffer of zeros
        # buffers that a kernel can add to, with the text of that argument
        self.more: dict[str, str] = {}
        self._again = self._used_again()
        self._node_now: Operation | None = None

    def _used_again(self) -> set[Ref]:
        """Return right factors of which several are views of one matrix, as in steps of time."""
        roots: dict[Ref | None, Ref] = {}
        factors: dict[Ref, list[Ref]] = {}
        for node in self.trace.nodes:
            # A view has the matrix of what it is a view of.
            if node.name in ("t", "detach", "alias", "view"):
                source: Ref = node.args[0]
                roots[node.outs[0]] = roots.get(source, source)
            elif node.name in ("mm", "addmm"):
                factor: Ref = node.args[-1]
                factors.setdefault(roots.get(factor, factor), []).append(factor)
        often = [alike for alike in factors.values() if len(alike) >= _OFTEN]
        return set(chain.from_iterable(often))

    def run(self) -> None:
        """Lower every node.

        Raises:
            NotTraceableError: naming an operation that is not known, and the layer it belongs to.
        """
        self.trace.lower_each(self._node)

    @classmethod
    def knows(cls, name: str) -> bool:
        """Return whether an operation can be lowered as it is."""
        return hasattr(cls, f"_op_{name}") or name in ELEMENTWISE

    def _node(self, node: Operation) -> None:
        self._kinds = [self.trace.kinds[ref.number] for ref in node.outs if ref is not None]
        self._node_now = node
        try:
            result = self._result(node)
        except NotTraceableError:
            # An operation that is not known does no harm where the record has its results as
            # constants.
            result = []
            for ref in node.outs:
                if ref is not None and ref.number not in self.trace.constants:
                    raise
                result.append(ref and self._constant(self.trace.constants[ref.number]))
        if not isinstance(result, list):
            result = [result]
        # Outputs that a handler leaves out are never read.
        result += [None] * (len(node.outs) - len(result))
        for ref, value in zip(node.outs, result, strict=True):
            if ref is None:
                continue
            if value is None:  # what nobody reads
                self.values[ref] = None
                continue
            shape = self.trace.kinds[ref.number].shape
            # A result that has less than the recorded shape would be read beyond its memory.
            if not _have_equal_sizes(value.shape, shape):
                raise NotTraceableError(f"the operation {node.name} made {value.shape} for {shape}")
            self.values[ref] = self._store_if_needed(ref, value)

    @property
    def _kind(self) -> ArrayKind:
        """Shape and type of the first tensor that the node makes."""
        return self._kinds[0]

    def _result(self, node: Operation) -> Any:
        """Return what a node makes: a value, or a list of them with None for what is never read."""
        name = node.name
        args = list(map(self.operand, node.args))
        kwargs = map_values(self.operand, node.kwargs)
        handler: Callable[..., Any] | None = getattr(self, f"_op_{name}", None)
        if handler is not None:
            try:
                # An option that the handler does not take must not be passed over.
                inspect.signature(handler).bind(*args, **kwargs)
            except TypeError:
                raise NotTraceableError(
                    f"the operation {name} has an option that is not known"
                ) from None
            return handler(*args, **kwargs)
        if name in _UNARY:
            text, cost = _UNARY[name]
            return self._map(text.format, args[0], cost=cost)
        if name in _BACKWARD:
            text, cost = _BACKWARD[name]
            return self._map(text.format, args[0], args[1], cost=cost)
        if name in _BINARY:
            return self._arithmetic(_BINARY[name], *args, **kwargs)
        if name in _COMPARE:
            return self._map(f"({{0}} {_COMPARE[name]} {{1}})".format, args[0], args[1])
        if name in _LOGIC:
            return self._map(f"(({{0}} != 0) {_LOGIC[name]} ({{1}} != 0))".format, args[0], args[1])
        if name in _BITS:
            return self._map(f"({{0}} {_BITS[name]} {{1}})".format, args[0], args[1])
        raise NotTraceableError(f"the operation {name} is not known")

    def _store_if_needed(self, ref: Ref, value: Value) -> Value:
        """Return a value, in memory where several need it or it is a long expression."""
        used = self.uses.get(ref, 0)
        # An expression that several nodes read would be computed again for each of them.
        if value.dtype != torch.bool and ((used > 1 and value.cost) or value.cost > _LARGE):
            return self.program.store(value)
        return value

    def operand(self, value: Any) -> Any:
        """Return a node's argument or a function's result, with `Ref`s replaced by their values."""
        if isinstance(value, Ref):
            if value not in self.values:
                if value.number not in self.trace.constants:
                    raise NotTraceableError(
                        "a tensor that it makes is too large, or depends on the number of samples"
                    )
                self.values[value] = self._constant(self.trace.constants[value.number])
            return self.values[value]
        if isinstance(value, list | tuple):
            return list(map(self.operand, value))
        return value

    def _constant(self, tensor: torch.Tensor) -> Value:
        if tensor.numel() == 1:
            return self._filled(tensor.shape, tensor.item(), tensor.dtype)
        # Its numbers are written out in the text of the program.
        if tensor.numel() > 1 << 16:
            raise NotTraceableError(
                "it holds a large tensor that is neither a parameter nor a buffer of numbers"
            )
        name = self.program.buffer(tensor.numel(), tensor.dtype)
        buffer = self.program.buffers[name]
        entries = ", ".join(number(value, buffer.type) for value in tensor.flatten().tolist())
        buffer.place = f"static const {buffer.type} {name}_[] = {{{entries}}};"
        return in_memory(name, tensor.shape, dense_strides(tensor.shape), tensor.dtype)

    # ------------------------------------------------------------------ elementwise

    def _filled(self, shape: Sequence[Size], value: Any, dtype: torch.dtype) -> Value:
        text = self._number(value, dtype)
        return Value(tuple(shape), (), lambda _parts: text, dtype)

    @staticmethod
    def _number(value: Any, dtype: torch.dtype) -> str:
        if isinstance(value, Ratio):
            if value.places:
                return f"(T(n * {value.places}) / T(n * {value.places} - 1))"
            return f"(T({value.value!r}) / T(n))"
        return number(value, "T" if dtype.is_floating_point else "int64_t")

    def _map(
        self,
        make: Callable[..., str],
        *operands: Operand,
        cost: int = 1,
        dtype: torch.dtype | None = None,
    ) -> Value:
        """Return an elementwise function, in the type of the node's result."""
        dtype = dtype or self._kind.dtype
        # A program has one floating-point type, that of the model.
        if dtype.is_floating_point and dtype != self.dtype:
            raise NotTraceableError(f"numbers of type {str(dtype).removeprefix('torch.')}")
        values = [o for o in operands if isinstance(o, Value)]
        # Where one operand is a floating-point number, integers become such numbers too.
        floating = dtype.is_floating_point or any(v.dtype.is_floating_point for v in values)
        texts = []
        for operand in operands:
            if isinstance(operand, Value):
                texts.append(operand)
                continue
            fractional = floating or isinstance(operand, float)
            texts.append(self._number(operand, torch.float32 if fractional else torch.int64))

        def entry(*parts: str) -> str:
            given = iter(parts)
            pieces = []
            for text in texts:
                if isinstance(text, str):
                    pieces.append(text)
                elif floating and not text.dtype.is_floating_point:
                    pieces.append(f"T({next(given)})")
                else:
                    pieces.append(next(given))
            return make(*pieces)

        shape = common_shape([value.shape for value in values])
        return combine(entry, values, dtype, cost, shape)

    def _arithmetic(
        self,
        operator: str,
        a: Operand,
        b: Operand,
        *rest: Any,
        alpha: Number = 1,
        rounding_mode: Any = None,
    ) -> Value:
        # PyTorch takes alpha by position as well.
        if rest:
            alpha = rest[0]
        if rounding_mode is not None:
            round_ = {"floor": "std::floor", "trunc": "std::trunc"}[rounding_mode]
            return self._map(lambda p, q: f"{round_}(T({p}) / T({q}))", a, b, cost=5)
        if operator == "/" and isinstance(b, int | float):
            return self._map(lambda p, q: f"({p} / {q})", a, b, cost=2)
        if alpha != 1:
            return self._map(lambda p, q, s: f"({p} {operator} {s} * {q})", a, b, alpha, cost=2)
        # A division takes as long as several other operations.
        cost = {"/": 4}.get(operator, 1)
        return self._map(lambda p, q: f"({p} {operator} {q})", a, b, cost=cost)

    def _op_rsub(self, a: Operand, b: Operand, alpha: Number = 1) -> Value:
        return self._map(lambda p, q, s: f"({q} - {s} * {p})", a, b, alpha)

    def _op_pow(self, a: Operand, b: Operand) -> Value:
        # std::pow takes many times as long as these.
        simple = {2: "({0} * {0})", 1: "{0}", 3: "({0} * {0} * {0})", -1: "(1 / {0})",
        0.5: "std::sqrt({0})",
                  -0.5: "(1 / std::sqrt({0}))", -2: "(1 / ({0} * {0}))"}  # fmt: skip
        if isinstance(b, int | float) and b in simple:
            return self._map(simple[b].format, a, cost=2)
        return self._map(lambda p, q: f"std::pow({p}, {q})", a, b, cost=20)

    def _op_where(self, condition: Value, a: Operand, b: Operand) -> Value:
        if self._kind.dtype.is_floating_point:
            text = lambda c, p, q: f"chosen(({c}) != 0, {p}, {q})"  # noqa: E731
        else:
            text = lambda c, p, q: f"(({c}) != 0 ? int64_t({p}) : int64_t({q}))"  # noqa: E731
        return self._map(text, condition, a, b)

    def _op_masked_fill(self, x: Value, mask: Value, value: Operand) -> Value:
        return self._map(lambda m, p, q: f"chosen(({m}) != 0, {q}, {p})", mask, x, value)

    def _op_clamp(
        self,
        x: Value,
        low: Operand | None = None,
        high: Operand | None = None,
        *,
        min: Any = None,
        max: Any = None,
    ) -> Value:
        # No comparison is true of a NaN, which so passes through, as in PyTorch.
        low = min if low is None else low
        high = max if high is None else high
        if low is not None:
            x = self._map(lambda p, q: f"chosen({p} < {q}, {q}, {p})", x, low)
        if high is not None:
            x = self._map(lambda p, q: f"chosen({p} > {q}, {q}, {p})", x, high)
        return x

    def _op_clamp_min(self, x: Value, low: Operand) -> Value:
        return self._op_clamp(x, low)

    def _op_clamp_max(self, x: Value, high: Operand) -> Value:
        return self._op_clamp(x, None, high)

    def _op_hardtanh(self, x: Value, low: Number = -1.0, high: Number = 1.0) -> Value:
        return self._op_clamp(x, low, high)

    def _op_hardtanh_backward(self, g: Value, x: Value, low: Number, high: Number) -> Value:
        return self._map(
            lambda a, b, p, q: f"chosen({b} <= {p} || {b} >= {q}, 0, {a})", g, x, low, high
        )

    def _op_maximum(self, a: Value, b: Value) -> Value:
        # A NaN on either side is the result: of the left one by the test, of the right one as no
        # comparison with it is true.
        return self._map(lambda p, q: f"chosen({p} > {q} || {p} != {p}, {p}, {q})", a, b)

    def _op_minimum(self, a: Value, b: Value) -> Value:
        return self._map(lambda p, q: f"chosen({p} < {q} || {p} != {p}, {p}, {q})", a, b)

    def _op_threshold_backward(self, g: Value, x: Value, threshold: Number) -> Value:
        return self._map(lambda a, b, t: f"chosen({b} <= {t}, 0, {a})", g, x, threshold)

    def _op_leaky_relu(self, x: Value, slope: Number = 0.01) -> Value:
        return self._map(lambda a, s: f"chosen({a} > 0, {a}, {a} * {s})", x, slope)

    def _op_leaky_relu_backward(self, g: Value, x: Value, slope: Number, _is_result: bool) -> Value:
        return self._map(lambda a, b, s: f"chosen({b} > 0, {a}, {a} * {s})", g, x, slope)

    def _op__prelu_kernel(self, x: Value, weight: Value) -> Value:
        return self._map(lambda a, w: f"chosen({a} > 0, {a}, {a} * {w})", x, weight)

    def _op__prelu_kernel_backward(self, g: Value, x: Value, weight: Value) -> list[Value]:
        back = self._map(lambda a, b, w: f"chosen({b} > 0, {a}, {a} * {w})", g, x, weight)
        return [back, self._map(lambda a, b: f"chosen({b} > 0, 0, {a} * {b})", g, x)]

    def _op_elu(
        self, x: Value, alpha: Number = 1.0, scale: Number = 1.0, input_scale: Number = 1.0
    ) -> Value:
        text = "chosen({0} > 0, {0} * {2}, (exponential({0} * {3}) - 1) * {1} * {2})"
        return self._map(text.format, x, alpha, scale, input_scale, cost=10)

    def _op_elu_backward(
        self, g: Value, alpha: Number, scale: Number, input_scale: Number, is_result: bool, x: Value
    ) -> Value:
        # The saved value is the result of an activation in place, which holds exp(x) already.
        if is_result:
            text = "chosen({1} <= 0, {0} * {4} * ({1} + {2} * {3}), {0} * {3})"
        else:
            text = "chosen({1} <= 0, {0} * {4} * {2} * {3} * exponential({1} * {4}), {0} * {3})"
        return self._map(text.format, g, x, alpha, scale, input_scale, cost=10)

    def _op_softplus(self, x: Value, beta: Number = 1, threshold: Number = 20) -> Value:
        return self._map(
            "softened({0}, {1}, {2})".format, x, _real(beta), _real(threshold), cost=12
        )

    def _op_softplus_backward(self, g: Value, x: Value, beta: Number, threshold: Number) -> Value:
        # Above the threshold the function is x itself, in PyTorch too, and its slope 1.
        text = "chosen({1} * {2} > {3}, {0}, {0} * sigmoid({1} * {2}))"
        return self._map(text.format, g, x, _real(beta), _real(threshold), cost=12)

    def _op_log_sigmoid_backward(self, g: Value, x: Value, _buffer: Any) -> Value:
        return self._map("({0} * sigmoid(-{1}))".format, g, x, cost=10)

    def _op_gelu(self, x: Value, approximate: str = "none") -> Value:
        if approximate == "tanh":
            # 0.798 is sqrt(2 / pi); 0.707 below is 1 / sqrt(2).
            inner = "T(0.7978845608028654) * ({0} + T(0.044715) * {0} * {0} * {0})"
            return self._map(
                ("(T(0.5) * {0} * (1 + hyperbolic(" + inner + ")))").format, x, cost=16
            )
        # The constant is 1 / sqrt(2).
        return self._map(
            "(T(0.5) * {0} * (1 + error_function({0} * T(0.7071067811865476))))".format, x, cost=16
        )

    def _op_gelu_backward(self, g: Value, x: Value, approximate: str = "none") -> Value:
        name = "gelu_slope_tanh" if approximate == "tanh" else "gelu_slope"
        return self._map(("({0} * " + name + "({1}))").format, g, x, cost=24)

    def _op_logical_not(self, x: Value) -> Value:
        return self._map(lambda a: f"(!({a}))", x)

    def _op_bitwise_not(self, x: Value) -> Value:
        return (
            self._op_logical_not(x) if x.dtype == torch.bool else self._map(lambda a: f"(~{a})", x)
        )

    def _op_isnan(self, x: Value) -> Value:
        return self._map(lambda a: f"({a} != {a})", x)

    def _op___rshift__(self, a: Operand, b: Operand) -> Value:
        return self._map(lambda p, q: f"({p} >> {q})", a, b)

    def _op___lshift__(self, a: Operand, b: Operand) -> Value:
        return self._map(lambda p, q: f"({p} << {q})", a, b)

    _op_bitwise_right_shift, _op_bitwise_left_shift = _op___rshift__, _op___lshift__

    def _op_remainder(self, a: Operand, b: Operand) -> Value:
        if self._kind.dtype.is_floating_point:
            return self._map(lambda p, q: f"({p} - std::floor({p} / {q}) * {q})", a, b, cost=6)
        # The result has the sign of the divisor; the % of C++ has that of the dividend.
        return self._map(lambda p, q: f"((({p} % {q}) + {q}) % {q})", a, b, cost=6)

    def _op_mse_loss(self, a: Value, b: Value, reduction: int = 1) -> Value:
        _each(reduction)
        return self._map(lambda p, q: f"(({p} - {q}) * ({p} - {q}))", a, b, cost=2)

    def _op_mse_loss_backward(self, g: Value, a: Value, b: Value, reduction: int) -> Value:
        _each(reduction)
        return self._map(lambda d, p, q: f"(2 * ({p} - {q}) * {d})", g, a, b, cost=3)

    def _op_smooth_l1_loss(
        self, a: Value, b: Value, reduction: int = 1, beta: Number = 1.0
    ) -> Value:
        _each(reduction)
        square, line = (
            "T(0.5) * ({0} - {1}) * ({0} - {1}) / {2}",
            "std::fabs({0} - {1}) - T(0.5) * {2}",
        )
        text = f"chosen(std::fabs({{0}} - {{1}}) < {{2}}, {square}, {line})"
        return self._map(text.format, a, b, _real(beta), cost=8)

    def _op_smooth_l1_loss_backward(
        self, g: Value, a: Value, b: Value, reduction: int, beta: Number
    ) -> Value:
        _each(reduction)
        text = (
            "({0} * chosen({1} - {2} <= -{3}, -1, chosen({1} - {2} >= {3}, 1, ({1} - {2}) / {3})))"
        )
        return self._map(text.format, g, a, b, _real(beta), cost=8)

    def _op_huber_loss(self, a: Value, b: Value, reduction: int = 1, delta: Number = 1.0) -> Value:
        _each(reduction)
        square, line = (
            "T(0.5) * ({0} - {1}) * ({0} - {1})",
            "{2} * (std::fabs({0} - {1}) - T(0.5) * {2})",
        )
        text = f"chosen(std::fabs({{0}} - {{1}}) < {{2}}, {square}, {line})"
        return self._map(text.format, a, b, _real(delta), cost=8)

    def _op_huber_loss_backward(
        self, g: Value, a: Value, b: Value, reduction: int, delta: Number
    ) -> Value:
        _each(reduction)
        # The slope of the square, cut off at those of the two lines.
        text = "({0} * chosen({1} - {2} < -{3}, -{3}, chosen({1} - {2} > {3}, {3}, {1} - {2})))"
        return self._map(text.format, g, a, b, _real(delta), cost=8)

    def _op_binary_cross_entropy_with_logits(
        self,
        x: Value,
        y: Value,
        weight: Value | None = None,
        pos_weight: Value | None = None,
        reduction: int = 1,
    ) -> Value:
        _each(reduction)
        # softened(-x, 1, 80) is log(1 + exp(-x)) without overflow.
        if pos_weight is None:
            loss = self._map(
                lambda a, b: f"((1 - {b}) * {a} + softened(-{a}, 1, 80))", x, y, cost=16
            )
        else:
            loss = self._map(
                lambda a, b, p: (
                    f"((1 - {b}) * {a} + (1 + ({p} - 1) * {b}) * softened(-{a}, 1, 80))"
                ),
                x,
                y,
                pos_weight,
                cost=18,
            )
        if weight is not None:
            loss = self._map(lambda a, w: f"({a} * {w})", loss, weight)
        return loss

    # ------------------------------------------------------------------ types, fills and copies

    def _op__to_copy(self, x: Value, **_options: Any) -> Value:
        if self._kind.dtype == x.dtype:
            return x
        if self._kind.dtype.is_floating_point:
            return self._map(lambda a: a, x)
        if self._kind.dtype == torch.bool:
            return self._map(lambda a: f"({a} != 0)", x, dtype=torch.bool)
        text = "{}"
        if x.dtype.is_floating_point or x.dtype == torch.bool:
            text = "int64_t({})"
        return combine(text.format, [x], self._kind.dtype, 1, x.shape)

    # A value is never changed, so that it is its own copy.
    def _op_clone(self, x: Value, **_options: Any) -> Value:
        return x

    _op_detach = _op_alias = _op_lift_fresh = _op_lift_fresh_copy = _op_clone

    def _op_copy(self, x: Value, source: Value, *_rest: Any) -> Value:
        return expand(self._op__to_copy(source), x.shape)

    def _op_zero(self, x: Value) -> Value:
        return self._filled(x.shape, 0, x.dtype)

    def _op_fill(self, x: Value, value: Operand) -> Value:
        if isinstance(value, Value):
            return expand(value, x.shape)
        return self._filled(x.shape, value, x.dtype)

    def _like(self, value: Any) -> Value:
        return self._filled(self._kind.shape, value, self._kind.dtype)

    def _op_zeros(self, *_args: Any, **_options: Any) -> Value:
        return self._like(0)

    # Memory that PyTorch leaves undefined is zero here.
    _op_zeros_like = _op_new_zeros = _op_empty = _op_empty_like = _op_new_empty = (
        _op_empty_strided
    ) = _op_new_empty_strided = _op_zeros

    def _op_ones(self, *_args: Any, **_options: Any) -> Value:
        return self._like(1)

    _op_ones_like = _op_new_ones = _op_ones

    def _op_full(self, _shape: Any, value: Any, **_options: Any) -> Value:
        return self._like(value)

    _op_full_like = _op_full

    def _op_new_full(self, _x: Value, _shape: Any, value: Any, **_options: Any) -> Value:
        return self._like(value)

    def _op_scalar_tensor(self, value: Any, **_options: Any) -> Value:
        return self._like(value)

    def _op_arange(self, *args: Any, **_options: Any) -> Value:
        # arange(end), arange(start, end) or arange(start, end, step)
        start, step = 0, 1
        if len(args) > 1:
            start = args[0]
        if len(args) > 2:
            step = args[2]
        size = self._kind.shape[0]
        integers = (
            not self._kind.dtype.is_floating_point
            and isinstance(start, int)
            and isinstance(step, int)
        )
        if not integers or (isinstance(size, Dim) and size.start):
            raise NotTraceableError(
                "arange of numbers that are no integers, or not as many as samples"
            )
        # Without a buffer, an entry is its own place: start + i * step.
        leaf = Leaf("", start, (step,))
        if not isinstance(size, Dim):
            return Value(
                self._kind.shape, (leaf,), lambda parts: f"int64_t{parts[0]}", self._kind.dtype
            )
        # the entries of later samples go on where those of earlier ones end
        return Value(
            self._kind.shape,
            (leaf,),
            lambda parts: f"(int64_t{parts[0]} + from * {size.slope * step})",
            self._kind.dtype,
        )

    # ------------------------------------------------------------------ views

    def _op_permute(self, x: Value, axes: Sequence[int]) -> Value:
        return _take_axes(x, [axis % len(x.shape) for axis in axes])

    def _op_transpose(self, x: Value, a: int, b: int) -> Value:
        axes = list(range(len(x.shape)))
        axes[a], axes[b] = axes[b], axes[a]
        return self._op_permute(x, axes)

    def _op_t(self, x: Value) -> Value:
        if len(x.shape) < 2:
            return x
        return self._op_permute(x, [1, 0])

    def _op_unsqueeze(self, x: Value, axis: int) -> Value:
        axis %= len(x.shape) + 1
        shape = (*x.shape[:axis], 1, *x.shape[axis:])
        return x.moved(
            shape,
            lambda leaf: replace(leaf, strides=(*leaf.strides[:axis], 0, *leaf.strides[axis:])),
        )

    def _op_squeeze(self, x: Value, axes: Any = None) -> Value:
        if axes is None:
            axes = list(range(len(x.shape)))
        elif not isinstance(axes, list):
            axes = [axes]
        wanted = [axis % len(x.shape) for axis in axes]
        return _take_axes(x, [a for a, n in enumerate(x.shape) if n != 1 or a not in wanted])

    def _op_expand(self, x: Value, _shape: Any, **_options: Any) -> Value:
        return expand(x, self._kind.shape)

    def _op_select(self, x: Value, axis: int, place: Size) -> Value:
        axis %= len(x.shape)
        if isinstance(place, int) and place < 0:
            place = x.shape[axis] + place

        def move(leaf: Leaf) -> Leaf:
            return replace(leaf, offset=leaf.offset + place * leaf.strides[axis])

        return _take_axes(x.moved(x.shape, move), [a for a in range(len(x.shape)) if a != axis])

    def _op_slice(
        self, x: Value, axis: int = 0, start: Any = None, _end: Any = None, step: int = 1
    ) -> Value:
        axis %= len(x.shape)
        # The recorded shape has the length, so the end of the slice is not needed.
        return self._sliced(
            x, axis, _first_place(start, x.shape[axis]), self._kind.shape[axis], step
        )

    @staticmethod
    def _sliced(x: Value, axis: int, start: Size, length: Size, step: int = 1) -> Value:
        """Return every `step`-th of the places along an axis, `length` of them."""

        def move(leaf: Leaf) -> Leaf:
            stride = leaf.strides[axis]
            strides = _replace_entry(leaf.strides, axis, stride * step)
            return replace(leaf, offset=leaf.offset + start * stride, strides=strides)

        return x.moved(_replace_entry(x.shape, axis, length), move)

    def _op_flip(self, x: Value, axes: Sequence[int]) -> Value:
        for axis in axes:
            axis %= len(x.shape)

            def move(leaf: Leaf, axis: int = axis, end: Size = x.shape[axis] - 1) -> Leaf:
                # From the last place backwards.
                stride = leaf.strides[axis]
                strides = _replace_entry(leaf.strides, axis, -stride)
                return replace(leaf, offset=leaf.offset + end * stride, strides=strides)

            x = x.moved(x.shape, move)
        return x

    def _op_view(self, x: Value, shape: Any) -> Value:
        if isinstance(shape, torch.dtype):
            raise NotTraceableError("the bits of numbers as another type")
        return self._shaped(x, self._kind.shape)

    _op__unsafe_view = _op_view

    def _op__reshape_alias(
        self, x: Value, shape: Sequence[Size], _strides: Sequence[Size]
    ) -> Value:
        return self._op_view(x, shape)

    def _shaped(self, x: Value, shape: Sequence[Size]) -> Value:
        found = reshape(x, shape)
        # perhaps as it lies best, where the axes of some leaf cannot be joined
        if found is None and x.leaf is None:
            order = order_of(x)
            if (
                reshape(in_memory("", x.shape, dense_strides(x.shape, order), x.dtype), shape)
                is not None
            ):
                found = reshape(self.program.store(x, order), shape)
        if found is None:
            found = reshape(self.program.make_contiguous(x), shape)
        assert found is not None
        return found

    def _parts(self, x: Value, axis: int) -> list[Value]:
        axis %= len(x.shape)
        parts: list[Value] = []
        start: Size = 0
        for kind in self._kinds:
            parts.append(self._sliced(x, axis, start, kind.shape[axis]))
            start = start + kind.shape[axis]
        return parts

    def _op_split(self, x: Value, _size: Any, axis: int = 0) -> list[Value]:
        return self._parts(x, axis)

    _op_unsafe_split = _op_split_with_sizes = _op_unsafe_split_with_sizes = _op_split

    def _op_unbind(self, x: Value, axis: int = 0) -> list[Value]:
        return [self._op_select(x, axis, place) for place in range(len(self._kinds))]

    def _op_as_strided(
        self,
        x: Value,
        shape: Sequence[Size],
        strides: Sequence[Size],
        offset: Size,
        base: Sequence[Size],
    ) -> Value:
        # The strides count places in PyTorch's memory, so the base has to lie as there.
        flat, _axes = self._storage(x, base)
        leaf = flat.memory
        return in_memory(leaf.buffer, shape, strides, x.dtype, leaf.offset + offset)

    def _storage(self, x: Value, strides: Sequence[Size]) -> tuple[Value, list[int]]:
        """Return a value as it lies in PyTorch's memory."""
        axes = sorted(range(len(x.shape)), key=lambda axis: -evaluate_size(strides[axis], MANY))
        wanted = dense_strides(x.shape, axes)
        if any(a != b and size != 1 for a, b, size in zip(wanted, strides, x.shape, strict=True)):
            raise NotTraceableError("it writes into a part of a tensor that has gaps")
        return self.program.make_contiguous(x, axes), axes

    def _op_write(
        self,
        x: Value,
        value: Value,
        shape: Sequence[Size],
        strides: Sequence[Size],
        offset: Size,
        base: Sequence[Size],
    ) -> Value:
        _flat, axes = self._storage(x, base)
        # With an order, `store` makes a copy in any case, so that other readers keep the old value.
        copy = self.program.store(x, axes)
        target = Leaf(copy.memory.buffer, copy.memory.offset + offset, tuple(strides))
        self.program.assign(target, value)
        return copy

    # ------------------------------------------------------------------ joining, padding, picking

    def _op_cat(self, values: Sequence[Value], axis: int = 0) -> Value:
        # PyTorch joins empty vectors with tensors of any rank.
        values = [v for v in values if v.shape != (0,)]
        axis %= len(self._kind.shape)
        target = self._target(self._kind.shape, self._kind.dtype)
        start: Size = 0
        for value in values:
            self._place(target, axis, start, value)
            start = start + value.shape[axis]
        return target

    def _target(
        self, shape: Sequence[Size], dtype: torch.dtype, order: Sequence[int] | None = None
    ) -> Value:
        name = self.program.buffer(math.prod(shape), dtype)
        return in_memory(name, shape, dense_strides(shape, order), dtype)

    def _place(self, target: Value, axis: int, start: Size, value: Value, step: int = 1) -> None:
        part = self._sliced(target, axis, start, value.shape[axis], step)
        self.program.assign(part.memory, value)

    def _op_stack(self, values: Sequence[Value], axis: int = 0) -> Value:
        axis %= len(self._kind.shape)
        target = self._target(self._kind.shape, self._kind.dtype)
        for place, value in enumerate(values):
            self._place(target, axis, place, self._op_unsqueeze(value, axis))
        return target

    def _zeros(
        self, shape: Sequence[Size], dtype: torch.dtype, order: Sequence[int] | None = None
    ) -> Value:
        target = self._target(shape, dtype, order)
        name, size = target.memory.buffer, math.prod(shape)
        self.program.emit(f"memset({name}, 0, sizeof(*{name}) * {size});", [], [name])
        return target

    def _op_select_backward(self, g: Value, shape: Sequence[Size], axis: int, place: int) -> Value:
        target = self._zeros(shape, g.dtype)
        axis %= len(shape)
        start = _first_place(place, shape[axis])
        self._place(target, axis, start, self._op_unsqueeze(g, axis))
        return target

    def _op_slice_backward(
        self, g: Value, shape: Sequence[Size], axis: int, start: Size | None, _end: Any, step: int
    ) -> Value:
        target = self._zeros(shape, g.dtype)
        axis %= len(shape)
        self._place(target, axis, _first_place(start, shape[axis]), g, step)
        return target

    def _op_roll(self, x: Value, shifts: Sequence[int], axes: Sequence[int] = ()) -> Value:
        if not axes:
            raise NotTraceableError("roll over all axes")
        for shift, axis in zip(shifts, axes, strict=True):
            size = x.shape[axis]
            if isinstance(size, Dim):
                raise NotTraceableError("roll over the samples of a batch")
            # The entry that comes first afterwards.
            start = -shift % size
            axis %= len(x.shape)
            target = self._target(x.shape, x.dtype)
            self._place(target, axis, 0, self._sliced(x, axis, start, size - start))
            if start:
                self._place(target, axis, size - start, self._sliced(x, axis, 0, start))
            x = target
        return x

    def _op_constant_pad_nd(self, x: Value, pads: Sequence[int], value: Number = 0) -> Value:
        # Negative padding cuts off. Pads come in pairs, from the last axis on.
        for k in range(len(pads) // 2):
            axis = len(x.shape) - 1 - k
            before, after = min(0, pads[2 * k]), min(0, pads[2 * k + 1])
            x = self._sliced(x, axis, -before, x.shape[axis] + before + after)
        pads = [max(0, p) for p in pads]
        shape = list(x.shape)
        starts = [0] * len(shape)
        for k in range(len(pads) // 2):
            axis = len(shape) - 1 - k
            shape[axis], starts[axis] = shape[axis] + pads[2 * k] + pads[2 * k + 1], pads[2 * k]
        if value == 0:
            target = self._zeros(shape, x.dtype)
        else:
            target = self.program.store(self._filled(shape, value, x.dtype), range(len(shape)))
        part = target
        for axis, start in enumerate(starts):
            part = self._sliced(part, axis, start, x.shape[axis])
        self.program.assign(part.memory, x)
        return target

    def _op_repeat(self, x: Value, counts: Sequence[Size]) -> Value:
        missing = len(counts) - len(x.shape)
        for _ in range(missing):
            x = self._op_unsqueeze(x, 0)
        # Each axis becomes two, copies x size, of which the first is read with stride 0.
        mixed: list[Size] = []
        for count, size in zip(counts, x.shape, strict=True):
            mixed += [count, size]
        wide = x
        for axis in range(len(x.shape)):
            wide = self._op_unsqueeze(wide, 2 * axis)
        wide = expand(wide, mixed)
        return self._shaped(wide, [c * s for c, s in zip(counts, x.shape, strict=True)])

    def _picked(self, x: Value, axis: int, index: Value, shape: Sequence[Size]) -> Value:
        """Return entries at places along an axis; both have a stride per axis of the result."""
        leaf = x.memory
        stride = leaf.strides[axis]
        size = x.shape[axis]
        # The axis has stride 0, as `make` adds the place itself.
        fixed = replace(leaf, strides=_replace_entry(leaf.strides, axis, 0))

        def make(parts: Sequence[str]) -> str:
            place = index.make(parts[1:])
            # The part is the entry at place 0 of the axis: the wanted one is some strides behind
            # it. `inside` keeps a wrong index within the array.
            return f"(&{parts[0]})[inside({place}, {size}) * {stride}]"

        return Value(
            tuple(shape), (fixed, *expand(index, shape).leaves), make, x.dtype, 2 + index.cost
        )

    def _op_gather(self, x: Value, axis: int, index: Value, **_options: Any) -> Value:
        x = self.program.store(x)
        axis %= len(x.shape)
        return self._picked(x, axis, index, index.shape)

    def _op_embedding(self, weight: Value, index: Value, *_options: Any) -> Value:
        return self._rows_at(self.program.store(weight), 0, index)

    def _op_index_select(self, x: Value, axis: int, index: Value) -> Value:
        return self._rows_at(self.program.store(x), axis % len(x.shape), index)

    def _op_index(self, x: Value, indices: Sequence[Value | None]) -> Value:
        axis, index = self._only_index(x, indices)
        return self._rows_at(self.program.store(x), axis, index)

    @staticmethod
    def _only_index(x: Value, indices: Sequence[Value | None]) -> tuple[int, Value]:
        """Return the one indexed axis and its places; negative ones are counted from the end."""
        # A mask would make a shape that depends on data.
        given = [(axis, index) for axis, index in enumerate(indices) if index is not None]
        if len(given) != 1 or given[0][1].dtype == torch.bool:
            raise NotTraceableError("indexing with several tensors, or with a mask")
        axis, index = given[0]
        size = x.shape[axis]
        return axis, combine(
            lambda i: f"({i} < 0 ? {i} + {size} : {i})", [index], torch.int64, 1, index.shape
        )

    def _rows_at(self, x: Value, axis: int, index: Value) -> Value:
        """Return entries of `x` at places along an axis, which the places' axes replace."""
        many = len(index.shape)
        shape = [*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]]
        leaf = x.memory
        stride, size = leaf.strides[axis], x.shape[axis]
        fixed = replace(
            leaf, strides=(*leaf.strides[:axis], *[0] * many, *leaf.strides[axis + 1 :])
        )
        after = len(x.shape) - axis - 1
        count = len(index.leaves)
        leaves = []
        for part in index.leaves:
            leaves.append(replace(part, strides=(*[0] * axis, *part.strides, *[0] * after)))

        def make(parts: Sequence[str]) -> str:
            return f"(&{parts[0]})[inside({index.make(parts[1 : 1 + count])}, {size}) * {stride}]"

        return Value(tuple(shape), (fixed, *leaves), make, x.dtype, 2 + index.cost)

    def _added(self, shape: Sequence[Size], axis: int, index: Value, g: Value) -> Value:
        """Return zeros to which the entries of `g` are added at places along an axis, in order."""
        target = self._zeros(shape, g.dtype)
        self._write_rows(target, axis, index, g, "+=")
        return target

    def _write_rows(self, target: Value, axis: int, index: Value, g: Value, operator: str) -> None:
        """Write the entries of `g` to places along an axis; `g` has the axes of the index there."""
        g = expand(g, [*target.shape[:axis], *index.shape, *target.shape[axis + 1 :]])
        many = len(index.shape)
        leaf = target.memory
        fixed = replace(
            leaf, strides=(*leaf.strides[:axis], *[0] * many, *leaf.strides[axis + 1 :])
        )
        place = (index, range(axis, axis + many), target.shape[axis], leaf.strides[axis])
        self._write_at(fixed, *place, g, g.shape, operator)

    def _write_entries(self, x: Value, axis: int, index: Value, g: Value, operator: str) -> Value:
        """Return a copy of `x` with entries of `g` along an axis; index and `g` have its axes."""
        target = self.program.store(x, range(len(x.shape)))
        leaf = target.memory
        fixed = replace(leaf, strides=_replace_entry(leaf.strides, axis, 0))
        place = (index, range(len(g.shape)), x.shape[axis], leaf.strides[axis])
        self._write_at(fixed, *place, g, index.shape, operator)
        return target

    def _write_at(
        self,
        target: Leaf,
        index: Value,
        axes: Sequence[int],
        size: Size,
        stride: Size,
        g: Value,
        sizes: Sequence[Size],
        operator: str,
    ) -> None:
        """Write the entries of `g` one after another to places that may be named more than once.

        Args:
            target: memory, with a stride for each axis of `g`; 0 for those of the index.
            index: the place of each entry.
            axes: those of `g` that the index has.
            size: how many places there are.
            stride: from one to the next.
            g: what is written.
            sizes: how much of `g`.
            operator: "=" or "+=".
        """
        names = [f"i{axis}" for axis in range(len(g.shape))]
        own = [names[axis] for axis in axes]
        place = index.make([leaf.text(own) for leaf in index.leaves])
        entry = g.make([leaf.text(names) for leaf in g.leaves])
        # No VECTORIZE: a place may be named twice, and sums keep the order of the entries.
        loops = ""
        for name, size_ in zip(names, sizes, strict=True):
            loops += f"for (long {name} = 0; {name} < {size_}; {name}++) "
        inside = f"[inside({place}, {size}) * {stride}]"
        text = f"{loops}(&{target.text(names)}){inside} {operator} {entry};"
        reads = [leaf.buffer for leaf in (*index.leaves, *g.leaves)]
        self.program.emit(text, [*reads, target.buffer], [target.buffer])

    def _op_embedding_dense_backward(
        self, g: Value, index: Value, rows: int, padding: int, scale: bool
    ) -> Value:
        if scale:
            raise NotTraceableError("embeddings whose gradient is scaled by frequency")
        # The row for padding has no gradient.
        if padding >= 0:
            mask = self._condition(lambda a: f"({a} == {padding})", index)
            g = self._map(lambda m, a: f"chosen({m}, 0, {a})", self._op_unsqueeze(mask, -1), g)
        return self._added((rows, g.shape[-1]), 0, index, g)

    def _condition(self, make: Callable[..., str], *values: Value) -> Value:
        return combine(make, values, torch.bool, 1, common_shape([value.shape for value in values]))

    def _op_index_put(
        self, x: Value, indices: Sequence[Value | None], g: Value, accumulate: bool = False
    ) -> Value:
        axis, index = self._only_index(x, indices)
        if not accumulate:
            target = self.program.store(x, range(len(x.shape)))
            self._write_rows(target, axis, index, g, "=")
            return target
        added = self._added(x.shape, axis, index, g)
        return self._map(lambda a, b: f"({a} + {b})", x, added)

    _op__unsafe_index_put = _op_index_put

    def _op_index_add(
        self, x: Value, axis: int, index: Value, g: Value, alpha: Number = 1
    ) -> Value:
        added = self._added(x.shape, axis % len(x.shape), index, g)
        return self._map(lambda a, b, s: f"({a} + {s} * {b})", x, added, alpha)

    def _op_scatter(self, x: Value, axis: int, index: Value, source: Operand) -> Value:
        axis %= len(x.shape)
        one_a_row = index.shape == _replace_entry(x.shape, axis, 1)
        # A constant at one place of each row is an elementwise choice.
        if one_a_row and not isinstance(source, Value):
            text = "chosen({1} == {0}, {3}, {2})"
            return self._map(text.format, _places(x.shape, axis), expand(index, x.shape), x, source)
        if not isinstance(source, Value):
            source = self._filled(index.shape, source, x.dtype)
        return self._write_entries(x, axis, index, source, "=")

    def _op_scatter_add(self, x: Value, axis: int, index: Value, g: Value) -> Value:
        return self._write_entries(x, axis % len(x.shape), index, g, "+=")

    # ------------------------------------------------------------------ reductions

    def _axes(self, x: Value, axes: Any) -> list[int]:
        if axes is None or axes == []:
            return list(range(len(x.shape)))
        if not isinstance(axes, list):
            axes = [axes]
        return [axis % len(x.shape) for axis in axes]

    def _reduce(self, x: Value, axes: Any, keep: bool, kind: str) -> Value:
        gone = self._axes(x, axes)
        # The only place along the axis is 0.
        if kind.startswith("arg") and len(gone) == 1 and x.shape[gone[0]] == 1:
            result = self._filled(x.shape, 0, torch.int64)
        else:
            (result,) = self.program.reduce([x], gone, kind)
        if keep:
            return result
        return self._op_squeeze(result, gone)

    def _op_sum(self, x: Value, axes: Any = None, keepdim: bool = False, **_options: Any) -> Value:
        if x.dtype.is_floating_point:
            return self._reduce(x, axes, keepdim, "sum")
        # small integers, so without rounding
        # Sums are made in the type of the model alone.
        numbers = combine(lambda a: f"T({a})", [x], self.dtype, 1, x.shape)
        return combine(
            lambda a: f"int64_t({a})",
            [self._reduce(numbers, axes, keepdim, "sum")],
            torch.int64,
            1,
            self._kind.shape,
        )

    def _op_mean(self, x: Value, axes: Any = None, keepdim: bool = False, **_options: Any) -> Value:
        count = math.prod([x.shape[a] for a in self._axes(x, axes)])
        return self._map(
            lambda a, c: f"({a} / {c})", self._reduce(x, axes, keepdim, "sum"), count, cost=1
        )

    def _op_linalg_vector_norm(
        self, x: Value, order: Number = 2, axes: Any = None, keepdim: bool = False, **_options: Any
    ) -> Value:
        if order not in (1, 2):
            raise NotTraceableError(f"a norm of order {order}")
        if order == 1:
            return self._reduce(self._pointwise("std::fabs({0})".format, x), axes, keepdim, "sum")
        squares = self._pointwise(lambda a: f"({a} * {a})", x)
        return self._map(
            "std::sqrt({0})".format, self._reduce(squares, axes, keepdim, "sum"), cost=6
        )

    def _op_amax(self, x: Value, axes: Any = None, keepdim: bool = False) -> Value:
        return self._reduce(x, axes, keepdim, "max")

    def _op_amin(self, x: Value, axes: Any = None, keepdim: bool = False) -> Value:
        return self._reduce(x, axes, keepdim, "min")

    def _op_any(self, x: Value, axes: Any = None, keepdim: bool = False) -> Value:
        return self._reduce(x, axes, keepdim, "any")

    def _op_all(self, x: Value, axes: Any = None, keepdim: bool = False) -> Value:
        return self._reduce(x, axes, keepdim, "all")

    def _op_argmax(self, x: Value, axis: int | None = None, keepdim: bool = False) -> Value:
        if axis is None:
            raise NotTraceableError("argmax over all axes")
        return self._reduce(x, axis, keepdim, "argmax")

    def _op_argmin(self, x: Value, axis: int | None = None, keepdim: bool = False) -> Value:
        if axis is None:
            raise NotTraceableError("argmin over all axes")
        return self._reduce(x, axis, keepdim, "argmin")

    def _op_max(self, x: Value, axis: Any = None, keepdim: bool = False) -> Any:
        if axis is None:
            return self._reduce(x, None, False, "max")
        x = self.program.store(x)
        return [self._reduce(x, axis, keepdim, "max"), self._reduce(x, axis, keepdim, "argmax")]

    def _op_min(self, x: Value, axis: Any = None, keepdim: bool = False) -> Any:
        if axis is None:
            return self._reduce(x, None, False, "min")
        x = self.program.store(x)
        return [self._reduce(x, axis, keepdim, "min"), self._reduce(x, axis, keepdim, "argmin")]

    def _moments(self, x: Value, axes: list[int]) -> tuple[Value, Value]:
        """Return mean and mean squared distance from it."""
        count = _count_entries(x, axes)
        # In two passes: the mean square less the squared mean would cancel digits.
        share = f"({{}} / T({count}))".format
        mean = self._computed(share, self._reduce(x, axes, True, "sum"))
        distance = self._pointwise(lambda a, m: f"(({a} - {m}) * ({a} - {m}))", x, mean)
        return mean, self._computed(share, self._reduce(distance, axes, True, "sum"))

    def _computed(self, make: Callable[[str], str], x: Value) -> Value:
        return self.program.store(combine(make, [x], self.dtype, 1, x.shape))

    def _pointwise(self, make: Callable[..., str], *values: Value) -> Value:
        return combine(make, values, self.dtype, 2, common_shape([value.shape for value in values]))

    def _scale(self, variance: Value, eps: float) -> Value:
        """Return 1 / standard deviation."""
        return self._computed(lambda v: f"(1 / std::sqrt({v} + T({eps!r})))", variance)

    def _variance(self, x: Value, axes: Any, correction: Any, keep: bool) -> tuple[Value, Value]:
        x = self.program.store(x)
        gone = self._axes(x, axes)
        mean, variance = self._moments(x, gone)
        count = _count_entries(x, gone)
        # PyTorch's default is the unbiased variance.
        correction = 1 if correction is None else correction
        if correction:
            variance = self._computed(
                lambda a: f"({a} * (T({count}) / (T({count}) - {correction})))", variance
            )
        if keep:
            return variance, mean
        return self._op_squeeze(variance, gone), self._op_squeeze(mean, gone)

    def _op_var(
        self, x: Value, axes: Any = None, *, correction: Any = None, keepdim: bool = False
    ) -> Value:
        return self._variance(x, axes, correction, keepdim)[0]

    def _op_var_mean(
        self, x: Value, axes: Any = None, *, correction: Any = None, keepdim: bool = False
    ) -> list[Value]:
        return list(self._variance(x, axes, correction, keepdim))

    def _op_std(
        self, x: Value, axes: Any = None, *, correction: Any = None, keepdim: bool = False
    ) -> Value:
        return self._map(
            "std::sqrt({0})".format, self._variance(x, axes, correction, keepdim)[0], cost=6
        )

    # -------------------------------------------------------------- softmax and losses of classes

    def _op__softmax(self, x: Value, axis: int, _half: bool = False) -> Value:
        x = self.program.store(x)
        powers = self.program.store(self._powers(x, self._reduce(x, axis, True, "peak")))
        total = self._computed(lambda a: f"(1 / {a})", self._reduce(powers, axis, True, "sum"))
        return self._map(lambda a, s: f"({a} * {s})", powers, total)

    def _op__safe_softmax(self, x: Value, axis: int, *_options: Any) -> Value:
        x = self.program.store(x)
        # A row of -inf alone, as a mask makes it, has powers and a total of 0, and so becomes
        # zeros.
        top = self._reduce(x, axis, True, "peak")
        powers = self._pointwise(
            lambda a, m: f"exponential({a} - chosen({m} == -INFINITY, 0, {m}))", x, top
        )
        powers = self.program.store(powers)
        total = self._computed(
            lambda a: f"chosen({a} == 0, 0, 1 / {a})", self._reduce(powers, axis, True, "sum")
        )
        return self._map(lambda a, s: f"({a} * {s})", powers, total)

    def _powers(self, x: Value, top: Value) -> Value:
        """Return powers of e; without the peak `top` taken off, one could overflow."""
        return self._pointwise(lambda a, m: f"exponential({a} - {m})", x, top)

    def _op__softmax_backward_data(self, g: Value, y: Value, axis: int, _dtype: Any) -> Value:
        g, y = self.program.store(g), self.program.store(y)
        products = self._pointwise(lambda a, b: f"({a} * {b})", g, y)
        total = self._reduce(products, axis, True, "sum")
        return self._map(lambda a, b, s: f"(({a} - {s}) * {b})", g, y, total)

    def _op__log_softmax(self, x: Value, axis: int, _half: bool = False) -> Value:
        x = self.program.store(x)
        top = self._reduce(x, axis, True, "peak")
        total = self._reduce(self._powers(x, top), axis, True, "sum")
        log = self.program.store(self._pointwise(lambda s, m: f"(std::log({s}) + {m})", total, top))
        return self._map(lambda a, s: f"({a} - {s})", x, log)

    def _op__log_softmax_backward_data(self, g: Value, y: Value, axis: int, _dtype: Any) -> Value:
        g = self.program.store(g)
        total = self._reduce(g, axis, True, "sum")
        return self._map(lambda a, b, s: f"({a} - exponential({b}) * {s})", g, y, total, cost=10)

    def _op_logsumexp(self, x: Value, axes: Any, keepdim: bool = False) -> Value:
        x = self.program.store(x)
        top = self._reduce(x, axes, True, "peak")
        total = self._reduce(self._powers(x, top), axes, True, "sum")
        result = self._map(lambda s, m: f"(std::log({s}) + {m})", total, top, cost=8)
        return result if keepdim else self._op_squeeze(result, self._axes(x, axes))

    def _op_nll_loss_forward(
        self, x: Value, y: Value, weight: Value | None, reduction: int, ignore: int
    ) -> list[Any]:
        _each(reduction)
        axis = min(1, len(x.shape) - 1)
        x = self.program.store(x)
        # An ignored class may be no place at all: place 0 is read instead, and its value dropped.
        known = self._condition(lambda t: f"({t} == {ignore})", y)
        safe = combine(
            lambda t, k: f"({k} ? int64_t(0) : {t})", [y, known], torch.int64, 1, y.shape
        )
        picked = self._op_squeeze(
            self._picked(
                x, axis, self._op_unsqueeze(safe, axis), [*x.shape[:axis], 1, *x.shape[axis + 1 :]]
            ),
            axis,
        )
        if weight is None:
            return [self._map(lambda k, p: f"chosen({k} != 0, 0, -{p})", known, picked), None]
        scale = self._rows_at(self.program.store(weight), 0, safe)
        return [
            self._map(lambda k, p, w: f"chosen({k} != 0, 0, -{p} * {w})", known, picked, scale),
            None,
        ]

    def _op_nll_loss_backward(
        self,
        g: Value,
        x: Value,
        y: Value,
        weight: Value | None,
        reduction: int,
        ignore: int,
        _total: Any,
    ) -> Value:
        _each(reduction)
        axis = min(1, len(x.shape) - 1)
        # The gradient is -g at the class and 0 elsewhere: a comparison in each entry needs no zeros
        # and no write to places.
        y = self.program.store(y)
        sides = [expand(self._op_unsqueeze(one, axis), x.shape) for one in (y, g)]
        values, back = [_places(x.shape, axis), *sides], "-{2}"
        if weight is not None:
            w, back = self.program.store(weight), "-{2} * {3}"
            values.append(self._shaped(w, _replace_entry([1] * len(x.shape), axis, w.shape[0])))
        return self._map(f"chosen({{0}} == {{1}} && {{1}} != {ignore}, {back}, 0)".format, *values)

    _op_nll_loss2d_forward, _op_nll_loss2d_backward = _op_nll_loss_forward, _op_nll_loss_backward

    # ------------------------------------------------------------------ normalization

    def _op__native_batch_norm_legit(
        self, x: Value, weight: Value | None, bias: Value | None, *rest: Any
    ) -> list[Value]:
        eps = rest[-1]
        # Training, momentum and eps: the form without running statistics.
        if len(rest) != 3:
            raise NotTraceableError("batch normalization of a form that is not known")
        x = self.program.store(x)
        axes = [0, *range(2, len(x.shape))]
        mean, variance = self._moments(x, axes)
        scale = self._scale(variance, eps)
        y = self._normalized(x, mean, scale, self._channels(weight, x), self._channels(bias, x))
        return [y, self._shaped(mean, [x.shape[1]]), self._shaped(scale, [x.shape[1]])]

    def _op_native_batch_norm(
        self,
        x: Value,
        weight: Value | None,
        bias: Value | None,
        mean: Value | None,
        var: Value | None,
        training: bool,
        _momentum: float,
        eps: float,
    ) -> list[Value | None]:
        if training and mean is None:
            return [*self._op__native_batch_norm_legit(x, weight, bias, True, 0.0, eps)]
        mean, var = self._channels(mean, x), self._channels(var, x)
        if training or mean is None or var is None:
            raise NotTraceableError("a normalization that writes its statistics in place")
        scale = self._scale(var, eps)
        y = self._normalized(x, mean, scale, self._channels(weight, x), self._channels(bias, x))
        return [y, None, None]

    def _channels(self, value: Value | None, x: Value) -> Value | None:
        if value is None:
            return None
        return self._shaped(value, _replace_entry([1] * len(x.shape), 1, x.shape[1]))

    def _normalized(
        self, x: Value, mean: Value, scale: Value, weight: Value | None, bias: Value | None
    ) -> Value:
        # One factor of each channel instead of two products of each entry.
        if weight is not None and weight.shape == scale.shape:
            factor = self._pointwise(lambda s, w: f"({s} * {w})", scale, weight)
            scale, weight = self.program.store(factor), None
        values, text = [x, mean, scale], "({} - {}) * {}"
        if weight is not None:
            values, text = [*values, weight], f"{text} * {{}}"
        if bias is not None:
            values, text = [*values, bias], f"{text} + {{}}"
        return self._map(f"({text})".format, *values, cost=len(values))

    def _op_native_batch_norm_backward(
        self,
        g: Value,
        x: Value,
        weight: Value | None,
        _mean: Any,
        _var: Any,
        mean: Value,
        scale: Value,
        *_rest: Any,
    ) -> list[Value]:
        axes, channels = [0, *range(2, len(x.shape))], [x.shape[1]]
        shape = _replace_entry([1] * len(x.shape), 1, x.shape[1])
        mean, scale = self._shaped(mean, shape), self._shaped(scale, shape)
        weight = self._channels(weight, x)
        back, along, plain = self._normal_back(g, x, mean, scale, axes, weight, None)
        return [back, self._shaped(along, channels), self._shaped(plain, channels)]

    def _normal_back(
        self,
        g: Value,
        x: Value,
        mean: Value,
        scale: Value,
        axes: list[int],
        weight: Value | None,
        inner: Value | None,
    ) -> tuple[Value, Value, Value]:
        """Return the gradient of a normalization's input, and the sums of `g * normalized` and `g`.

        Args:
            g: gradient of the output.
            x: input.
            mean: of the input.
            scale: 1 / standard deviation.
            axes: over which both were taken.
            weight: of the shape of the mean.
            inner: weight of another shape, that is part of the sums.
        """
        x = self.program.store(x)
        # g lies as x does, so that one loop reads both in order.
        order = by_strides(x.memory.strides)
        if g.leaf is None:
            g = self.program.store(g, order)
        count = _count_entries(x, axes)
        if inner is None:
            away = self._pointwise(lambda a, b, m: f"({a} * ({b} - {m}))", g, x, mean)
            plain, moved = self.program.reduce([g, away], axes, "sum")
        else:
            away = self._pointwise(
                lambda a, w, b, m: f"({a} * {w} * ({b} - {m}))", g, inner, x, mean
            )
            plain, moved = self.program.reduce(
                [self._pointwise(lambda a, w: f"({a} * {w})", g, inner), away], axes, "sum"
            )
        # With r = 1 / standard deviation and d = x - mean, the result is
        # (g - mean(g) - d r^2 mean(g d)) r weight: `level` is mean(g), `slope` is r^2 mean(g d).
        along = self.program.store(self._pointwise(lambda s, q: f"({s} * {q})", scale, moved))
        slope = self.program.store(
            self._pointwise(lambda s, q: f"({s} * {q} / T({count}))", scale, along)
        )
        level = self._computed(lambda p: f"({p} / T({count}))", plain)
        factor = scale
        if weight is not None:
            factor = self.program.store(self._pointwise(lambda s, w: f"({s} * {w})", scale, weight))
        if inner is None:
            text = "(({0} - {1} - ({2} - {3}) * {4}) * {5})"
            return self._map(text.format, g, level, x, mean, slope, factor, cost=6), along, plain
        text = "(({0} * {6} - {1} - ({2} - {3}) * {4}) * {5})"
        return self._map(text.format, g, level, x, mean, slope, factor, inner, cost=7), along, plain

    def _op_native_layer_norm(
        self, x: Value, shape: Sequence[int], weight: Value | None, bias: Value | None, eps: float
    ) -> list[Value]:
        x = self.program.store(x)
        axes = list(range(len(x.shape) - len(shape), len(x.shape)))
        mean, variance = self._moments(x, axes)
        scale = self._scale(variance, eps)
        return [self._normalized(x, mean, scale, weight, bias), mean, scale]

    def _op_native_layer_norm_backward(
        self,
        g: Value,
        x: Value,
        shape: Sequence[int],
        mean: Value,
        scale: Value,
        weight: Value | None,
        _bias: Value | None,
        _mask: Sequence[bool],
    ) -> list[Value | None]:
        x, g = self.program.store(x), self.program.store(g)
        axes = list(range(len(x.shape) - len(shape), len(x.shape)))
        # All places of the outer axes share weight and bias, whose gradients are sums over them.
        outer = list(range(len(x.shape) - len(shape)))
        back, _along, _plain = self._normal_back(g, x, mean, scale, axes, None, weight)
        if weight is None:
            return [back, None, None]
        along = self._pointwise(lambda a, b, m, s: f"({a} * ({b} - {m}) * {s})", g, x, mean, scale)
        sums = self.program.reduce([along, g], outer, "sum")
        return [back, self._shaped(sums[0], shape), self._shaped(sums[1], shape)]

    def _grouped(self, x: Value, groups: int) -> Value:
        """Return N x C x ... as N x groups x C / groups x places."""
        n, c = x.shape[:2]
        return self._shaped(x, [n, groups, c // groups, math.prod(x.shape[2:])])

    def _of_channels(self, value: Value, parts: Value) -> Value:
        """Spread a group's value over its channels, so that loops do not stop at groups."""
        return self.program.store(expand(value, [*value.shape[:2], parts.shape[2], 1]), range(4))

    def _op_native_group_norm(
        self,
        x: Value,
        weight: Value | None,
        bias: Value | None,
        _n: Any,
        _c: int,
        _places: Any,
        groups: int,
        eps: float,
    ) -> list[Value]:
        x = self.program.store(x)
        parts = self._grouped(x, groups)
        mean, variance = self._moments(parts, [2, 3])
        scale = self._scale(variance, eps)
        own: list[Value | None] = []
        for p in (weight, bias):
            if p is not None:
                p = self._shaped(p, [1, groups, p.shape[0] // groups, 1])
            own.append(p)
        y = self._normalized(
            parts, self._of_channels(mean, parts), self._of_channels(scale, parts), *own
        )
        flat = [x.shape[0], groups]
        return [self._shaped(y, x.shape), self._shaped(mean, flat), self._shaped(scale, flat)]

    def _op_native_group_norm_backward(
        self,
        g: Value,
        x: Value,
        mean: Value,
        scale: Value,
        weight: Value | None,
        _n: Any,
        c: int,
        _places: Any,
        groups: int,
        _mask: Sequence[bool],
    ) -> list[Value | None]:
        x = self.program.store(x)
        if g.leaf is None:
            g = self.program.store(g, by_strides(x.memory.strides))
        gp, xp = self._grouped(g, groups), self._grouped(x, groups)
        shape = [x.shape[0], groups, 1, 1]
        mean, scale = self._shaped(mean, shape), self._shaped(scale, shape)
        means, scales = self._of_channels(mean, xp), self._of_channels(scale, xp)
        away = self._pointwise(lambda a, b, m: f"({a} * ({b} - {m}))", gp, xp, means)
        plain, moved = self.program.reduce([gp, away], [3], "sum")  # of each channel
        weights = self._filled([1, groups, c // groups, 1], 1, self.dtype)
        if weight is not None:
            weights = self._shaped(weight, weights.shape)
        own = [self._pointwise(lambda s, w: f"({s} * {w})", v, weights) for v in (plain, moved)]
        # As in `_normal_back`, with the weight of each channel inside the sums of a group.
        level, slope = self.program.reduce(own, [2], "sum")  # of each group
        count = xp.shape[2] * xp.shape[3]
        level = self._of_channels(self._pointwise(lambda s: f"({s} / T({count}))", level), xp)
        slope = self._pointwise(lambda s, r: f"({s} * {r} * {r} / T({count}))", slope, scale)
        values = (gp, weights, level, xp, means, self._of_channels(slope, xp), scales)
        back = self._map("(({0} * {1} - {2} - ({3} - {4}) * {5}) * {6})".format, *values, cost=7)
        if weight is None:
            return [self._shaped(back, x.shape), None, None]
        along = self._pointwise(lambda s, r: f"({s} * {r})", moved, scale)
        sums = self.program.reduce([along, plain], [0], "sum")
        return [self._shaped(back, x.shape), self._shaped(sums[0], [c]), self._shaped(sums[1], [c])]

    # ------------------------------------------------------------------ products

    def _op_mm(self, a: Value, b: Value) -> Value:
        return self._product(a, b)

    _op_bmm = _op_mm

    def _op_addmm(
        self, bias: Value, a: Value, b: Value, beta: Number = 1, alpha: Number = 1
    ) -> Value:
        if (beta, alpha) != (1, 1):
            raise NotTraceableError("addmm with factors")
        return self._map(lambda p, q: f"({p} + {q})", self._product(a, b), bias)

    def _op_baddbmm(
        self, bias: Value, a: Value, b: Value, beta: Number = 1, alpha: Number = 1
    ) -> Value:
        return self._map(
            lambda p, q, s, t: f"({s} * {q} + {t} * {p})",
            self._product(a, b),
            bias,
            _real(beta),
            _real(alpha),
        )

    def _op_mv(self, a: Value, b: Value) -> Value:
        return self._op_squeeze(self._product(a, self._op_unsqueeze(b, 1)), 1)

    def _op_dot(self, a: Value, b: Value) -> Value:
        return self._shaped(self._product(self._op_unsqueeze(a, 0), self._op_unsqueeze(b, 1)), [])

    def _matrix(self, x: Value, static: int) -> Value:
        """Store matrices with numbers as the last two strides; axis `static` has a known size."""
        leaf = x.leaf
        if leaf is not None and all(isinstance(stride, int) for stride in leaf.strides[-2:]):
            return x
        last = len(x.shape) - 1
        axes = list(range(len(x.shape)))
        if static == len(x.shape) - 2:
            # The axis of known size becomes the innermost, and so the stride of the other one a
            # number.
            axes[last], axes[last - 1] = last - 1, last
        return self.program.make_contiguous(x, axes)

    def _product(self, a: Value, b: Value) -> Value:
        """Return a product of matrices, M x K times K x N, or of as many pairs of them."""
        m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
        if isinstance(n, Dim):
            if isinstance(m, Dim):
                raise NotTraceableError("it compares every sample of a batch with every other")
            # The number of columns is a constant of the kernel: samples have to be rows.
            turned = self._product(self._turned(b), self._turned(a))
            return self._turned(turned)
        # The kernel depends on a typical number of samples, not on that of a call.
        rows = evaluate_size(m, self.samples)
        last = len(a.shape) - 1
        a = self._matrix(a, last - isinstance(k, Dim))
        sm, sk = a.memory.strides[-2:]
        # The stride of a single row or column is never used; with 0, equal products share a kernel.
        if m == 1:
            sm = 0
        if k == 1:
            sk = 0
        if b.leaf is None:
            b = self.program.make_contiguous(b)
        bk, bn = b.memory.strides[-2:]
        c = self._target((*a.shape[:-1], n), self.dtype)
        self.program.buffers[c.memory.buffer].size = math.prod(c.shape)
        # The kernels read columns of b side by side; otherwise there are dot products, for a few
        # rows of long sums, or a packed copy.
        direct = bn == 1 or n == 1
        along = (
            (bk == 1 or k == 1)
            and (sk in (0, 1))
            and rows < _ROWS
            and evaluate_size(k, self.samples) >= _LONG
        )
        # A matrix that several products read is packed once for all of them.
        again = self._node_now is not None and not self._again.isdisjoint(self._node_now.refs())
        if not direct and along and not again:
            call = f"dots<{n}>({m}, {k}, {{a}}, {sm}, {{b}}, {bn}, {{c}}, MORE)"
        else:
            if not direct:
                b = self._packed(b)
                bk = b.memory.strides[-2]
            # Strides of a are constants of the kernel, sizes but n are not.
            call = f"product<{n}, {sm}, {sk}>({m}, {k}, {{a}}, {{b}}, {bk}, {{c}}, MORE)"
        self._call(call, a, b, c)
        return c

    def _turned(self, x: Value) -> Value:
        return self._op_transpose(x, -1, -2)

    def _packed(self, b: Value) -> Value:
        """Return matrices with their columns side by side."""
        leaf = b.memory
        key = ("columns", leaf, b.shape)
        if key not in self._made:
            k, n = b.shape[-2:]
            assert isinstance(n, int)
            # 16 numbers of 4 bytes are the longest vector.
            wide = (n + 15) // 16 * 16
            many = math.prod(b.shape[:-2])
            packed = self._target((*b.shape[:-2], k, wide), self.dtype)
            sk, sn = leaf.strides[-2:]
            call = f"pack_columns<{n}, {wide}>({k}, {{b}}, {sk}, {sn}, {{c}})"
            if len(b.shape) == 2:
                text = call.format(b=leaf.pointer, c=packed.memory.buffer)
            else:
                inside = call.format(
                    b=f"{leaf.pointer} + q * {leaf.strides[0]}",
                    c=f"{packed.memory.buffer} + q * {k * wide}",
                )
                text = f"for (long q = 0; q < {many}; q++) {inside}"
            self.program.emit(f"{text};", [leaf.buffer], [packed.memory.buffer])
            view = replace(packed, shape=b.shape)
            self._made[key] = view
        return self._made[key]

    def _call(self, call: str, a: Value, b: Value, c: Value) -> None:
        """Emit a product, or a loop over many."""
        la, lb, lc = a.memory, b.memory, c.memory
        if len(c.shape) == 2:
            places = {"a": la.pointer, "b": lb.pointer, "c": lc.buffer}
            # A single product can add to a gradient that is there already; one of many pairs
            # cannot.
            self.more[lc.buffer] = "MORE"
            self.program.emit(
                call.format(**places).replace("MORE", f"MORE_{lc.buffer}") + ";",
                [la.buffer, lb.buffer],
                [lc.buffer],
            )
            return
        places = {
            "a": f"{la.pointer} + q * {la.strides[0]}", "b": f"{lb.pointer} + q * {lb.strides[0]}",
            "c": f"{lc.buffer} + q * {lc.strides[0]}",
        }  # fmt: skip
        text = call.format(**places).replace("MORE", "false")
        self.program.emit(
            f"for (long q = 0; q < {c.shape[0]}; q++) {text};", [la.buffer, lb.buffer], [lc.buffer]
        )


def _replace_entry(entries: Sequence[Size], place: int, entry: Size) -> tuple[Size, ...]:
    return (*entries[:place], entry, *entries[place + 1 :])


def _take_axes(x: Value, axes: Sequence[int]) -> Value:
    """Return a view with some axes in a new order; of the others the first place."""
    return x.moved(
        [x.shape[axis] for axis in axes],
        lambda leaf: replace(leaf, strides=tuple(leaf.strides[axis] for axis in axes)),
    )


def _have_equal_sizes(one: Sequence[Size], other: Sequence[Size]) -> bool:
    """Return whether two shapes are the same for any number of samples."""
    if len(one) != len(other):
        return False
    pairs = zip(one, other, strict=True)
    return all(evaluate_size(a, MANY) == evaluate_size(b, MANY) for a, b in pairs)


def _places(shape: Sequence[Size], axis: int) -> Value:
    """Return integers of a shape: the place of each entry along an axis."""
    steps = tuple(int(other == axis) for other in range(len(shape)))
    return Value(
        tuple(shape), (Leaf("", 0, steps),), lambda parts: f"int64_t{parts[0]}", torch.int64
    )


def _first_place(start: Size | None, size: Size) -> Size:
    """Return where a slice starts: from the end if negative, and never before the first place."""
    if not isinstance(start, int) or start >= 0:
        return start or 0
    if isinstance(size, Dim):
        return size + start
    return max(0, size + start)


def _real(value: Number) -> Number:
    """Return an integer as a number of the model's type."""
    if isinstance(value, int):
        return float(value)
    return value


def _each(reduction: int) -> None:
    if reduction != 0:
        raise NotTraceableError("the loss is not one a sample")


def _count_entries(x: Value, axes: Sequence[int]) -> Size:
    """Return the number of entries along some axes together."""
    return math.prod([x.shape[axis] for axis in axes])
