"""A training step as a list of PyTorch operations, recorded while it runs on a few samples.

Every operation below autograd is recorded, forward and backward. Writes in place become new values,
so that a trace is a plain data flow. The step is recorded for two batch sizes; a number that
differs between the two records is a linear function of the batch size (`Dim`), so that a program
made of the trace runs with any.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from coterie._util.mappings import map_values
from coterie._util.tensors import index_each
from coterie.engine._base import Objective
from coterie.engine._rewrites import ReplacedFunctions, normalize_batch, with_counted_batches
from coterie.engine.precision import product_precision
from coterie.errors import first_line
from coterie.functional.scores import mark_not_finite
from coterie.models.draws import DispatchMode, KeyedDraws, is_keyed, is_random
from coterie.models.layout import Layout

aten = torch.ops.aten
_BATCHES = (3, 5)  # samples of the two records
_SMALL = 1 << 16  # entries of a constant that is kept
_VIEWS = {
    "view", "_unsafe_view", "t", "transpose", "permute", "expand", "squeeze", "unsqueeze", "select",
    "slice", "detach",
    "alias", "as_strided", "unbind", "split", "split_with_sizes", "diagonal", "_reshape_alias",
    "lift_fresh",
}  # fmt: skip


class NotTraceableError(Exception):
    """Why a module cannot be made a native program: the operation, or what it does."""


@dataclass(frozen=True)
class Dim:
    """A number that depends on the number of samples n: `slope * n + start`."""

    slope: int
    start: int = 0

    def _with(self, slope: int, start: int) -> "Dim | int":
        # What does not depend on n is a plain integer.
        return Dim(slope, start) if slope else start

    def __add__(self, other: "Dim | int") -> "Dim | int":
        other = other if isinstance(other, Dim) else Dim(0, other)
        return self._with(self.slope + other.slope, self.start + other.start)

    __radd__ = __add__

    def __neg__(self) -> "Dim | int":
        return Dim(-self.slope, -self.start)

    def __sub__(self, other: "Dim | int") -> "Dim | int":
        return self + -other

    def __rsub__(self, other: int) -> "Dim | int":
        return -self + other

    def __mul__(self, other: "Dim | int") -> "Dim | int":
        if isinstance(other, Dim):
            raise NotTraceableError("it compares every sample of a batch with every other")
        return self._with(self.slope * other, self.start * other)

    __rmul__ = __mul__

    def __floordiv__(self, other: "Dim | int") -> "Dim | int":
        if isinstance(other, Dim):
            if (
                # Both are multiples of the same function of n.
                self.start * other.slope == self.slope * other.start
                and self.slope % other.slope == 0
            ):
                return self.slope // other.slope
            raise NotTraceableError("a shape of it is no multiple of the number of samples")
        if self.slope % other or self.start % other:
            raise NotTraceableError("a shape of it is no multiple of the number of samples")
        return Dim(self.slope // other, self.start // other)

    def at(self, samples: int) -> int:
        """Return the number for a batch."""
        return self.slope * samples + self.start

    def __str__(self) -> str:
        text = "n" if self.slope == 1 else f"n * {self.slope}"
        return f"({text} + {self.start})" if self.start else f"({text})"


Size = int | Dim


def evaluate_size(size: Size, samples: int) -> int:
    """Return a size for a batch."""
    return size if isinstance(size, int) else size.at(samples)


def fixed_sizes(shape: Sequence[Size]) -> list[int]:
    """Return the sizes of an image's axes.

    Raises:
        NotTraceableError: when one depends on the number of samples.
    """
    if any(isinstance(size, Dim) for size in shape):
        raise NotTraceableError("images whose size depends on the number of samples")
    return [size for size in shape if isinstance(size, int)]


def read_pair(values: Any, default: Any = None) -> tuple[int, int]:
    """Return an operation's argument for rows and columns, which may be one number for both.

    Args:
        values: as the trace has it; None or an empty list where it is not given.
        default: what counts then.
    """
    if values is None or values == []:
        values = default
    if not isinstance(values, list | tuple):
        values = [values]
    return values[0], values[-1]


def read_windows(
    kernel: Any, stride: Any, padding: Any, dilation: Any
) -> tuple[tuple[int, int], ...]:
    """Return these options of a pooling for rows and columns; windows do not overlap by default."""
    return read_pair(kernel), read_pair(stride, kernel), read_pair(padding), read_pair(dilation)


@dataclass(frozen=True)
class Ref:
    """A value of a trace."""

    number: int


@dataclass(frozen=True)
class Ratio:
    """A number that depends on the samples n: `value / n`, or `places n / (places n - 1)`."""

    value: float = 0.0
    places: int = 0


@dataclass(frozen=True)
class ArrayKind:
    """Shape and type of a value."""

    shape: tuple[Size, ...]
    dtype: torch.dtype


@dataclass
class Operation:
    """One operation.

    Args:
        name: PyTorch's, without its overload.
        args: its arguments; values are `Ref`s.
        kwargs: by name.
        outs: the values it makes; None for an output that is no tensor.
        layer: path of the module that ran it, forward.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: tuple[Ref | None, ...]
    layer: str = ""

    def refs(self) -> list[Ref]:
        """Return the values it reads."""
        return [*iterate_refs((self.args, *self.kwargs.values()))]


@dataclass
class Trace:
    """A recorded function.

    Args:
        nodes: its operations in order.
        kinds: of every value.
        inputs: the values of its arguments.
        outputs: of its results; None where a result is no tensor.
        constants: values that depend on no input, as far as they are small: what the module holds,
            or makes of it.
        drawn: shapes of what was drawn.
    """

    nodes: list[Operation] = field(default_factory=list)
    kinds: dict[int, ArrayKind] = field(default_factory=dict)
    inputs: list[Ref] = field(default_factory=list)
    outputs: list[Ref | None] = field(default_factory=list)
    constants: dict[int, Tensor] = field(default_factory=dict)
    drawn: list[tuple[int, ...]] = field(default_factory=list)

    def kind_of(self, ref: Ref) -> ArrayKind:
        """Return the shape and the type of a value."""
        return self.kinds[ref.number]

    def count_uses(self) -> dict[Ref, int]:
        """Return how often each value is an argument of an operation, or a result."""
        arguments = chain.from_iterable(node.refs() for node in self.nodes)
        results = (ref for ref in self.outputs if ref is not None)
        return dict(Counter(chain(arguments, results)))

    def lower_each(self, lower: Callable[[Operation], None]) -> None:
        """Call a function for each operation in order.

        Raises:
            NotTraceableError: of the function, with the layer that the operation belongs to.
        """
        for node in self.nodes:
            try:
                lower(node)
            except NotTraceableError as error:
                where = f" in {node.layer!r}" if node.layer else ""
                raise NotTraceableError(f"{error}{where}") from error


@dataclass
class _Group:
    """Tensors that share memory: views of `base`. A write makes what the others saw out of date."""

    base: Tensor
    version: int = 0


@dataclass
class _Tracked:
    """A tensor with its value, which is out of date when the group's version is another."""

    tensor: Tensor  # kept, so that its id stays its own
    ref: Ref
    group: _Group
    version: int


class _Recorder(DispatchMode):
    """Records what runs while it is active."""

    def __init__(
        self,
        inputs: list[Tensor],
        layer: Callable[[], str],
        known: Callable[[str], bool],
        draws: KeyedDraws | None = None,
    ) -> None:
        super().__init__()
        self.draws = draws
        self.trace, self.layer, self.known = Trace(), layer, known
        self._tracked: dict[int, _Tracked] = {}
        # operations that are being made of simpler ones, which may come back to them
        self._within: list[Any] = []
        self.trace.inputs = list(map(self._new, inputs))

    def _numbered(self, tensor: Tensor) -> Ref:
        """Return a new value of the kind of a tensor."""
        ref = Ref(len(self.trace.kinds))
        self.trace.kinds[ref.number] = ArrayKind(tuple(tensor.shape), tensor.dtype)
        return ref

    def _new(self, tensor: Tensor, group: _Group | None = None) -> Ref:
        """Follow a tensor, and return its value; `group` is that of the tensor it is a view of."""
        group = group or _Group(tensor)
        ref = self._numbered(tensor)
        self._tracked[id(tensor)] = _Tracked(tensor, ref, group, group.version)
        return ref

    def _add(
        self,
        name: str,
        args: tuple,
        kwargs: dict,
        made: Sequence[Any],
        outs: tuple[Ref | None, ...],
    ) -> None:
        """Add an operation with what it made; what it makes of constants is one."""
        self.trace.nodes.append(Operation(name, args, kwargs, outs, self.layer()))
        given = {ref.number for ref in iterate_refs((args, *kwargs.values()))}
        # What is made of constants alone is a constant: it was computed in this very call.
        if given <= self.trace.constants.keys():
            for ref, tensor in zip(outs, made, strict=True):
                if ref is not None and tensor.numel() <= _SMALL:
                    self.trace.constants[ref.number] = tensor.detach().clone()

    def ref(self, tensor: Tensor) -> Ref:
        """Return the value of a tensor, updated by what was written to its memory since."""
        if id(tensor) not in self._tracked:
            ref = self._new(tensor)
            # No recorded operation has made it, so the module holds it.
            self.trace.constants[ref.number] = tensor.detach().clone()
        known = self._tracked[id(tensor)]
        if known.version != known.group.version:
            base = self._tracked[id(known.group.base)]
            known.ref, known.version = self._numbered(tensor), known.group.version
            self._add(
                "as_strided",
                (base.ref, *self._place(tensor, base.tensor)),
                {},
                (tensor,),
                (known.ref,),
            )
        return known.ref

    @staticmethod
    def _place(tensor: Tensor, base: Tensor) -> tuple[list[int], list[int], int, list[int]]:
        """Return a view's place in its base: sizes, strides, offset, and the base's strides."""
        offset = int(tensor.storage_offset() - base.storage_offset())
        return [*tensor.shape], [*tensor.stride()], offset, [*base.stride()]

    def _wrote(self, tensor: Tensor, value: Ref) -> None:
        """Assign a value to a tensor and, where the tensor is a view, to its part of the base."""
        known = self._tracked[id(tensor)]
        base = self._tracked[id(known.group.base)]
        whole = tensor.shape == base.tensor.shape and tensor.stride() == base.tensor.stride()
        # A write through a view changes the part of the base that the view shows.
        if base is not known:
            before = self.ref(base.tensor)
            base.ref = self._numbered(base.tensor)
            if whole:
                self._add("alias", (value,), {}, (base.tensor,), (base.ref,))
            else:
                place = self._place(tensor, base.tensor)
                self._add("write", (before, value, *place), {}, (base.tensor,), (base.ref,))
        known.ref = value
        known.group.version += 1
        # These two are up to date; all other views are taken from the base again when they are
        # read.
        known.version = base.version = known.group.version

    def _take(self, value: Any) -> Any:
        """Return an argument with the values of its tensors."""
        if isinstance(value, Tensor):
            return self.ref(value)
        if isinstance(value, list | tuple):
            return list(map(self._take, value))
        return value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation and record it."""
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if is_random(func):
            return self._draw(func, name, args, kwargs)
        if name in ("_local_scalar_dense", "is_nonzero", "nonzero", "_unique2"):
            raise NotTraceableError("what it computes depends on its data")
        taken = tuple(map(self._take, args))
        named = map_values(self._take, kwargs)
        if func._schema.is_mutable:
            return self._in_place(func, name, args, kwargs, taken, named)
        takes_tensors = any(isinstance(argument, Tensor) for argument in args)
        known = self.known(name) or name in _VIEWS or func in self._within
        if takes_tensors and not known:
            simpler = _decomposition(func)
            if simpler is not None:
                # A decomposition runs under the recorder, which sees its parts.
                self._within.append(func)
                with self:
                    out = simpler(*args, **kwargs)
                self._within.pop()
                return out
        # PyTorch counts the offset from the start of the storage, a record from the tensor; the
        # strides of the tensor say how it lies.
        if name == "as_strided":
            tensor, shape, strides, *offsets = args
            offset = 0  # where none is given
            if offsets and offsets[0] is not None:
                offset = offsets[0] - tensor.storage_offset()
            taken = (taken[0], [*shape], [*strides], offset, [*tensor.stride()])
        out = func(*args, **kwargs)
        # The operation has returned its argument: there is nothing new to follow.
        if isinstance(out, Tensor) and any(out is a for a in args):
            return out
        outs, group = (out,), None
        if isinstance(out, list | tuple):
            outs = tuple(out)
        if name in _VIEWS:
            group = self._tracked[id(args[0])].group
        made: list[Ref | None] = [None] * len(outs)
        for place, part in enumerate(outs):
            if isinstance(part, Tensor):
                made[place] = self._new(part, group)
        self._add(name, taken, named, outs, tuple(made))
        return out

    def _draw(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Record a random operation as the arithmetic that makes it of the key."""
        if self.draws is None or not is_keyed(func):
            raise NotTraceableError(f"it draws random numbers of its own ({name})")
        with self:
            found = self.draws.compute(func, args, kwargs)
        if not name.endswith("_"):
            return found
        # What stood there before matters to nobody, so that a trace has no read of it.
        self.ref(args[0])
        args[0].copy_(found)
        self._wrote(args[0], self.ref(found))
        return args[0]

    def _in_place(
        self, func: Any, name: str, args: Any, kwargs: Any, taken: tuple, named: dict
    ) -> Any:
        """Run an operation that changes its first argument; record it as making a new value."""
        others = [a.alias_info for a in func._schema.arguments[1:] if a.alias_info]
        # By PyTorch's convention such an operation changes its first argument, and no other.
        if not name.endswith("_") or any(alias.is_write for alias in others):
            raise NotTraceableError(f"the operation {name} is not known")
        pure = name.removesuffix("_")
        # the tensor itself becomes another view
        turned = pure in ("transpose", "t", "squeeze", "unsqueeze")
        if not turned and not self.known(pure):
            simpler = getattr(getattr(aten, pure, None), func._overloadname, None)
            if simpler is not None and _decomposition(simpler) is not None:
                with self:
                    # Simpler operations and a copy back, both of them recorded.
                    return args[0].copy_(simpler(*args, **kwargs))
        out = func(*args, **kwargs)
        ref = self._numbered(args[0])
        self._add(pure, taken, named, args[:1], (ref,))
        if turned:
            self._tracked[id(args[0])].ref = ref
        else:
            self._wrote(args[0], ref)
        return out


def _decomposition(func: Any) -> Callable[..., Any] | None:
    """Return PyTorch's own way to compute an operation with simpler ones."""
    from torch._decomp import decomposition_table  # takes a second to load, and few modules need it

    if func in decomposition_table:
        return decomposition_table[func]
    if hasattr(func, "impl_aten"):  # one of `prims`, that decompositions are made of
        return func.impl_aten
    # PyTorch's own kernel for it calls simpler operations.
    composite = func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    if composite:
        return func.decompose
    return None


def _normalize_batch(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | Tensor = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Normalize with statistics as values of the trace, and the normalization as one operation."""
    x = input
    if not training:
        # Evaluation has one operation; its gradient, of a frozen layer, has simple ones.
        if not torch.is_grad_enabled():
            return NotImplemented
        return normalize_batch(x, running_mean, running_var, weight, bias, False, momentum, eps)

    def moments(x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        op = aten._native_batch_norm_legit.no_stats
        # Factor and addend of each channel are part of the operation.
        y, mean, scale = op(x, weight, bias, True, 0.0, eps)
        # scale is 1 / sqrt(variance + eps)
        return y, mean, scale.detach() ** -2 - eps

    return normalize_batch(x, running_mean, running_var, None, None, True, momentum, eps, moments)


def _compare_classes(tensor: Tensor, num_classes: int = -1) -> Tensor:
    """Make one-hot vectors without PyTorch's look at the data, which checks the classes' range."""
    if num_classes < 1:
        raise NotTraceableError("the number of its classes depends on its data")
    classes = torch.arange(num_classes, device=tensor.device)
    return (tensor[..., None] == classes).to(torch.int64)


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    functional.one_hot: _compare_classes,
    functional.batch_norm: _normalize_batch,
}


@contextmanager
def _plain_operations() -> Iterator[None]:
    """While active, PyTorch uses operations that a trace can name: no fused attention or oneDNN."""
    fast = torch.backends.mha.get_fastpath_enabled()
    flash = torch.backends.cuda.flash_sdp_enabled()
    efficient = torch.backends.cuda.mem_efficient_sdp_enabled()
    onednn = torch._C._get_mkldnn_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch._C._set_mkldnn_enabled(False)
        with ReplacedFunctions(_FUNCTIONS):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        torch.backends.cuda.enable_flash_sdp(flash)
        torch.backends.cuda.enable_mem_efficient_sdp(efficient)
        torch._C._set_mkldnn_enabled(onednn)


def _copy_tensors(layout: Layout) -> dict[str, Tensor]:
    """Return the module's values by slot, each as a tensor of its own.

    The recorder knows a tensor by its identity.
    """
    named = layout.split_rows(layout.own_values())
    return {slot.name: named[slot.name].clone() for slot in layout.slots}


def _copy_inputs(layout: Layout) -> dict[str, Tensor]:
    """Return the values of the input buffers, each as a tensor of its own."""
    return map_values(Tensor.clone, index_each(layout.zero_inputs(1), 0))


def _frozen(layout: Layout) -> dict[str, Tensor]:
    """Return the frozen weights as copies that a record can distinguish from its constants."""
    return {name: tensor.detach().clone() for name, tensor in layout.frozen.items()}


def _train_once(
    layout: Layout,
    module: nn.Module,
    objective: Objective,
    x: Tensor,
    y: Tensor,
    layer: Callable[[], str],
    known: Callable[[str], bool],
) -> Trace:
    """Record a step's losses, gradients and untrained state; the last input weighs the losses."""
    tensors = _copy_tensors(layout)
    leaves = [tensors[slot.name].requires_grad_() for slot in layout.trained_slots]
    key = torch.zeros((), dtype=torch.int64)
    values = _copy_inputs(layout)
    weight = torch.full((len(x),), 1.0 / len(x), dtype=layout.dtype)
    frozen = _frozen(layout)
    inputs = [
        *(tensors[s.name] for s in layout.slots),
        *frozen.values(),
        *values.values(),
        key,
        x,
        y,
        weight,
    ]
    draws = KeyedDraws(key)
    with torch.enable_grad(), _Recorder(inputs, layer, known, draws) as recorder:
        state = _State(layout, tensors, recorder)
        tensors |= values | frozen | state.given
        losses = objective(layout.call_module(module, tensors, x).to(layout.dtype), y)
        # A parameter that the loss does not depend on has None.
        grads = torch.autograd.grad((losses * weight).sum(), leaves, allow_unused=True)
        trace = recorder.trace
        trace.outputs = [recorder.ref(losses)]
        for grad in grads:
            trace.outputs.append(None if grad is None else recorder.ref(grad))
        trace.outputs += state.results(tensors)
    trace.drawn = draws.shapes
    return trace


class _State:
    """The untrained tensors of a record, counts as whole numbers.

    Args:
        layout: of the module.
        tensors: all tensors of a row.
        recorder: the record.
    """

    def __init__(self, layout: Layout, tensors: Mapping[str, Tensor], recorder: _Recorder) -> None:
        self.recorder, self.dtype = recorder, layout.dtype
        self.rows = {slot.name: tensors[slot.name] for slot in layout.state_slots}
        self.given = dict(self.rows)
        self._before: dict[str, Ref] = {}
        for name, dtype in layout.whole.items():
            self.given[name] = self.rows[name].round().to(dtype)
            self._before[name] = recorder.ref(self.given[name])

    def results(self, tensors: Mapping[str, Tensor]) -> list[Ref | None]:
        """Return the values at the end; of a count that did not change, that of the row."""
        found: list[Ref | None] = []
        for name, row in self.rows.items():
            value = tensors[name]
            if name in self._before:
                if self.recorder.ref(value) == self._before[name]:
                    value = row
                else:
                    value = value.to(self.dtype)
            found.append(self.recorder.ref(value))
        return found


def _judge_once(
    layout: Layout,
    objective: Objective,
    x: Tensor,
    y: Tensor,
    layer: Callable[[], str],
    known: Callable[[str], bool],
) -> Trace:
    """Record the loss of each sample in evaluation, and its score where the objective has one."""
    tensors, values = _copy_tensors(layout), _copy_inputs(layout)
    frozen = _frozen(layout)
    key = torch.zeros((), dtype=torch.int64)
    inputs = [*tensors.values(), *frozen.values(), *values.values(), key, x, y]
    with torch.no_grad(), _Recorder(inputs, layer, known, KeyedDraws(key)) as recorder:
        state = _State(layout, tensors, recorder)
        outputs = layout.call_module(
            layout.eval_module, {**tensors, **frozen, **values, **state.given}, x
        ).to(layout.dtype)
        # As in `Engine._sample_metrics`: outputs that are not finite have no score.
        lost = mark_not_finite(outputs)
        losses = objective(outputs, y) + lost
        # A program has two results: without a metric the second is the first again.
        scores = losses
        if getattr(objective, "metric", None) is not None:
            scores = objective.measure_samples(outputs, y)  # type: ignore[attr-defined]
            scores = scores.to(layout.dtype) + lost
        trace = recorder.trace
        trace.outputs = [recorder.ref(losses), recorder.ref(scores)]
    return trace


def _unified(first: Any, second: Any, sizes: tuple[int, int]) -> Any:
    """Return one argument of two records, as a function of the batch size where they differ."""
    if isinstance(first, list | tuple):
        if not isinstance(second, list | tuple) or len(first) != len(second):
            raise NotTraceableError("its operations depend on the number of samples")
        return type(first)(_unified(a, b, sizes) for a, b in zip(first, second, strict=True))
    # a NaN is no other number
    if type(first) is type(second) and (first == second or first != first):
        return first
    one, two = sizes
    if type(first) is int and type(second) is int:
        # The line through both records, where it has a whole slope and meets both.
        slope = (second - first) // (two - one)
        if first - slope * one == second - slope * two:
            return Dim(slope, first - slope * one)
    if isinstance(first, float) and isinstance(second, float) and first and second:
        # The factor of a mean, c / n.
        if abs(first * one - second * two) <= 1e-9 * abs(first * one):
            return Ratio(value=first * one)
        if first != 1 and second != 1:
            # Bessel's correction m / (m - 1), of m = places * n numbers.
            places = round(first / (first - 1) / one)
            m, n = places * one, places * two
            # The records have the same formula, so that only rounding is allowed for.
            if abs(first - m / (m - 1)) < 1e-12 and abs(second - n / (n - 1)) < 1e-12:
                return Ratio(places=places)
    raise NotTraceableError("its operations depend on the number of samples")


def _joined(first: Trace, second: Trace, sizes: tuple[int, int]) -> Trace:
    """Return two records of a function as one for any number of samples."""
    names = [[node.name for node in trace.nodes] for trace in (first, second)]
    if names[0] != names[1] or first.outputs != second.outputs:
        raise NotTraceableError("its operations depend on the number of samples")
    joined = Trace(inputs=first.inputs, outputs=first.outputs, constants=dict(first.constants))
    for number, kind in first.kinds.items():
        joined.kinds[number] = ArrayKind(
            _unified(kind.shape, second.kinds[number].shape, sizes), kind.dtype
        )
    for a, b in zip(first.nodes, second.nodes, strict=True):
        if a.outs != b.outs or a.kwargs.keys() != b.kwargs.keys():
            raise NotTraceableError("its operations depend on the number of samples")
        kwargs = {key: _unified(value, b.kwargs[key], sizes) for key, value in a.kwargs.items()}
        joined.nodes.append(
            Operation(a.name, _unified(a.args, b.args, sizes), kwargs, a.outs, a.layer)
        )
    for number in [*joined.constants]:
        same = (
            number in second.constants
            and second.constants[number].shape == joined.constants[number].shape
        )
        # A constant that differs between the records depends on the number of samples.
        if not same or not torch.equal(joined.constants[number], second.constants[number]):
            del joined.constants[number]
    # Operations that no result needs are left out, from the end on.
    needed = {ref for ref in joined.outputs if ref is not None}
    kept = []
    for node in reversed(joined.nodes):
        if any(out in needed for out in node.outs):
            kept.append(node)
            needed.update(node.refs())
    joined.nodes = kept[::-1]
    return joined


def iterate_refs(value: Any) -> Iterator[Ref]:
    """Give the values in an argument or a list of them."""
    if isinstance(value, Ref):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from iterate_refs(part)


@contextmanager
def _layer_of(module: nn.Module) -> Iterator[Callable[[], str]]:
    """Yield a function that returns the path of the layer that is running."""
    trail: list[str] = [""]
    handles = []
    for path, part in module.named_modules():
        handles.append(
            part.register_forward_pre_hook(lambda _module, _args, path=path: trail.append(path))
        )
        handles.append(
            # What a hook returns would replace the output; `__delitem__` returns None.
            part.register_forward_hook(lambda _module, _args, _out: trail.__delitem__(-1))
        )
    try:
        yield lambda: trail[-1]
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class Traces:
    """What a native program is made of.

    Args:
        train: (tensors of the row, frozen weights, input buffers, key of draws, x, y, weight) ->
            losses, gradients, new untrained state.
        judge: (tensors of the row, frozen weights, input buffers, key of draws, x, y) -> losses,
            scores.
        together: whether a sample's loss depends on the others of its batch, or a step changes the
            untrained state.
    """

    train: Trace
    judge: Trace
    together: bool


def record(
    layout: Layout,
    objective: Objective,
    x: Tensor,
    y: Tensor,
    known: Callable[[str], bool] = lambda _name: True,
) -> Traces:
    """Record a module's training step and its evaluation.

    Args:
        layout: of the module.
        objective: the loss of each sample.
        x: some prepared inputs; they are repeated to the sizes of the batches.
        y: their targets.
        known: (name of an operation) -> whether it is recorded as it is; others are made of simpler
            ones where PyTorch can.

    Raises:
        NotTraceableError: when operations depend on values, on chance or on the number of samples.
    """
    module = with_counted_batches(layout.train_module)
    separate = True  # whether each sample has draws of its own

    def pair(function: Callable[[Tensor, Tensor], Trace]) -> Trace:
        traces = []
        for samples in _BATCHES:
            chosen = torch.arange(samples) % len(x)
            traces.append(function(x[chosen].clone(), y[chosen].clone()))
        nonlocal separate
        separate = separate and _draw_by_sample(traces[0].drawn, traces[1].drawn)
        return _joined(traces[0], traces[1], _BATCHES)

    try:
        with product_precision("full", torch.device("cpu")), _plain_operations():
            with _layer_of(module) as layer:
                train = pair(
                    lambda a, b: _train_once(layout, module, objective, a, b, layer, known)
                )
            with _layer_of(layout.eval_module) as layer:
                judge = pair(lambda a, b: _judge_once(layout, objective, a, b, layer, known))
            state = train.outputs[1 + len(layout.trained_slots) :]
            # The inputs begin with the slots of a row; untrained slots hold running statistics.
            before = train.inputs[len(layout.trained_slots) : len(layout.slots)]
            # Statistics that come out as they went in are not changed by a step.
            together = not separate or state != before or _together(layout, module, objective, x, y)
    # PyTorch raises it for what cannot run under the modes of the record.
    except RuntimeError as error:
        raise NotTraceableError(first_line(error)) from error
    return Traces(train, judge, together)


def _draw_by_sample(first: list[tuple[int, ...]], second: list[tuple[int, ...]]) -> bool:
    """Return whether draws of two records lie sample after sample, or belong to no sample."""
    for one, other in zip(first, second, strict=False):
        samples = one[:1] == (one[0] // _BATCHES[0] * _BATCHES[0],) if one else False
        leading = samples and other[0] * _BATCHES[0] == one[0] * _BATCHES[1]
        if one != other and not (leading and one[1:] == other[1:]):
            return False
    return True


def _together(
    layout: Layout, module: nn.Module, objective: Objective, x: Tensor, y: Tensor
) -> bool:
    """Try whether the losses of two samples change with the samples next to them."""
    views = layout.split_rows(layout.own_values())
    views |= layout.unpack_state(views)
    values: Mapping[str, Tensor] = index_each(layout.zero_inputs(1), 0)
    losses = []
    for others in (torch.zeros_like(x[:1]), torch.full_like(x[:1], 0.5), x[:1]):
        # The two samples keep their places, 1 and 2; those around them change.
        batch = torch.cat([others, x[:1], x[-1:], others])
        targets = torch.cat([y[:1], y[:1], y[-1:], y[:1]])
        # One key, so that the two samples draw the same each time.
        with torch.no_grad(), KeyedDraws(torch.tensor(0)):
            outputs = layout.call_module(module, {**views, **values}, batch).to(layout.dtype)
            losses.append(objective(outputs, targets)[1:3])
    # Rounding may differ with the batch; a normalization over it moves losses by far more.
    return not all(torch.allclose(losses[0], other, rtol=1e-5, atol=1e-7) for other in losses[1:])
