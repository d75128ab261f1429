"""Modules that are a plain stack of layers: recognized by tracing, described layer by layer.

Most networks of the federated-learning literature are stacks: convolutions, pooling, (leaky) ReLU,
dropout, linear layers, each fed by the one before. For a stack the compiled engine can write the
whole training step as one program.
"""

import copy
import operator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.fx.proxy import TraceError
from torch.nn import functional

from coterie.engine._rewrites import make_strided_pool
from coterie.models.layout import FunctionalBatchNorm, KeyedDropout
from coterie.models.simplex_layers import SimplexHead


class NotAStackError(Exception):
    """The module is not a plain stack of known layers; the text says why."""


@dataclass(frozen=True)
class Convolution:
    """A convolution with stride 1: names of its tensors, size of its kernel, zeros added around the input."""

    weight: str
    bias: str | None
    outputs: int
    kernel: tuple[int, int]
    padding: tuple[int, int]


@dataclass(frozen=True)
class MaxPool:
    """Max-pooling over windows that do not overlap."""

    size: tuple[int, int]


@dataclass(frozen=True)
class Linear:
    """A linear layer."""

    weight: str
    bias: str | None
    outputs: int


@dataclass(frozen=True)
class Simplex:
    """A linear layer that is a mixture of endpoints; see `heads.SimplexHead`. `alpha` names the mixture's weights."""

    weight: str
    bias: str | None
    outputs: int
    endpoints: int
    shared_bias: bool
    gain: float
    alpha: str


@dataclass(frozen=True)
class Dropout:
    """Keyed dropout; see `models.KeyedDropout`."""

    p: float
    channels: bool
    layer: int


@dataclass(frozen=True)
class Activation:
    """An elementwise function: "relu", with a slope below zero ("leaky") where it has one, or "tanh"."""

    kind: str
    slope: float = 0.0


@dataclass(frozen=True)
class Flatten:
    """All axes but the first become one."""


Layer = Convolution | MaxPool | Linear | Simplex | Dropout | Activation | Flatten

_ACTIVATIONS: dict[Any, str] = {
    nn.ReLU: "relu", nn.Tanh: "tanh", torch.relu: "relu", torch.relu_: "relu", functional.relu: "relu",
    functional.relu_: "relu", torch.tanh: "tanh", functional.tanh: "tanh", "relu": "relu", "relu_": "relu",
    "tanh": "tanh",
}  # fmt: skip
_TRACE_ERRORS = (
    TraceError, TypeError, ValueError, RuntimeError, AttributeError, NameError, LookupError, AssertionError,
)  # fmt: skip


def is_stack(module: nn.Module) -> bool:
    """Return whether a module is a plain stack of known layers."""
    try:
        return bool(layers(module))
    except NotAStackError:
        return False


def layers(module: nn.Module) -> list[Layer]:
    """Return the layers of a module that is a plain stack.

    Raises:
        NotAStackError: when it is not a stack, or has an unknown layer.
    """
    if any(part._forward_pre_hooks or part._forward_hooks for part in module.modules()):
        raise NotAStackError("it has hooks")
    if not all(one.requires_grad for one in module.parameters()):
        raise NotAStackError("it has frozen weights")
    try:
        graph = _graph(module)
    except _TRACE_ERRORS as error:
        raise NotAStackError(f"its forward cannot be traced: {error}") from error
    modules = dict(module.named_modules())
    found: list[Layer] = []
    used: set[str] = set()
    before: fx.Node | None = None
    for node in graph.nodes:
        if node.op == "placeholder":
            before = node
        elif node.op == "get_attr":
            continue
        elif node.op == "output":
            if node.args[0] is not before:
                raise NotAStackError("it does not return its last layer's output")
        elif _is_size(node):
            continue
        elif node.args[:1] != (before,) or before is None:
            raise NotAStackError(
                f"{node.target} does not take the output of the layer before it alone"
            )
        else:
            layer = (
                _from_module(modules[str(node.target)], str(node.target))
                if node.op == "call_module"
                else None
            )
            layer = layer or _from_call(node)
            for name in (getattr(layer, "weight", None), getattr(layer, "bias", None)):
                if name in used:
                    raise NotAStackError(f"{name} is used more than once")
                used |= {name} if name else set()
            found += [] if isinstance(layer, Dropout) and layer.p == 0 else [layer]
            before = node
    return found


def _graph(module: nn.Module) -> fx.Graph:
    """Return the calls of layers and functions in a forward pass; tensors of the module are unknown values in it.

    PyTorch's own tracer puts itself between every module of the process and its calls, also those
    of other threads that train meanwhile; here only the layers of a copy record.
    """
    module, tracer = copy.deepcopy(module), fx.Tracer()
    tracer.root, tracer.graph, tracer.tensor_attrs = module, fx.Graph(), {}
    x = tracer.create_proxy("placeholder", "x", (), {})
    for path, part in module.named_modules():
        head = f"{path}." if path else ""
        for tensors in (part._parameters, part._buffers):
            for name in [name for name, tensor in tensors.items() if tensor is not None]:
                del tensors[name]
                part.__dict__[name] = tracer.create_proxy("get_attr", head + name, (), {})
        known = isinstance(part, KeyedDropout | FunctionalBatchNorm | SimplexHead)
        if path and (known or tracer.is_leaf_module(part, path)):
            call = partial(tracer.create_proxy, "call_module", path)
            part.__dict__["forward"] = lambda *args, call=call, **kwargs: call(args, kwargs)
    tracer.create_node("output", "output", (tracer.create_arg(module(x)),), {})
    return tracer.graph


def _is_size(node: fx.Node) -> bool:
    """Return whether a node is the number of samples: x.size(0), x.shape[0]."""
    if node.op == "call_method" and node.target == "size":
        return node.args[1:] == (0,)
    if node.op == "call_function" and node.target is getattr:
        return node.args[1:] == ("shape",)
    return node.op == "call_function" and node.target is operator.getitem and node.args[1:] == (0,)


def _from_module(part: nn.Module, path: str) -> Layer | None:
    kind = type(part)
    if isinstance(part, nn.Conv2d) and kind is nn.Conv2d:
        if (
            part.stride != (1, 1)
            or part.dilation != (1, 1)
            or part.groups != 1
            or part.padding_mode != "zeros"
        ):
            raise NotAStackError(
                f"{path} is a convolution with stride, dilation, groups or padding of another mode"
            )
        kernel = (part.kernel_size[0], part.kernel_size[1])
        padding = (part.padding[0], part.padding[1]) if not isinstance(part.padding, str) else None
        if padding is None or padding[0] >= kernel[0] or padding[1] >= kernel[1]:
            raise NotAStackError(f"{path} is a convolution with padding {part.padding}")
        bias = None if part.bias is None else f"{path}.bias"
        return Convolution(f"{path}.weight", bias, part.out_channels, kernel, padding)
    if isinstance(part, nn.Linear) and kind is nn.Linear:
        return Linear(
            f"{path}.weight", None if part.bias is None else f"{path}.bias", part.out_features
        )
    if isinstance(part, SimplexHead):
        return _simplex(part, path)
    if isinstance(part, nn.MaxPool2d):
        pool = make_strided_pool(part)
        if pool is None:
            raise NotAStackError(f"{path} is a pooling with windows that overlap or are padded")
        return MaxPool((pool.height, pool.width))
    if isinstance(part, KeyedDropout):
        return Dropout(part.p, part.channels, part.layer)
    if isinstance(part, nn.LeakyReLU) and kind is nn.LeakyReLU and part.negative_slope > 0:
        return Activation("leaky", part.negative_slope)
    if kind in _ACTIVATIONS:
        return Activation(_ACTIVATIONS[kind])
    if isinstance(part, nn.Flatten) and (part.start_dim, part.end_dim) == (1, -1):
        return Flatten()
    if isinstance(part, nn.Identity):
        return Dropout(0.0, False, 0)
    raise NotAStackError(f"{path or 'it'} is of a kind that is not known here ({kind.__name__})")


def _simplex(part: SimplexHead, path: str) -> Simplex:
    if part.ensemble or part.weight.ndim != 3:
        raise NotAStackError(
            f"{path} is a simplex of convolutions, or predicts with all of its endpoints"
        )
    bias, prefix = part.bias, f"{path}." if path else ""
    outputs = part.weight.shape[1]
    return Simplex(
        f"{prefix}weight", None if bias is None else f"{prefix}bias", outputs, part.endpoints, part.shared_bias,
        part.gain, f"{prefix}alpha",
    )  # fmt: skip


def _from_call(node: fx.Node) -> Layer:
    target = node.target
    if target in _ACTIVATIONS:
        return Activation(_ACTIVATIONS[target])
    arguments = {**dict(enumerate(node.args[1:])), **node.kwargs}
    if target is functional.max_pool2d or target is torch.max_pool2d:
        known = {0, 1, "kernel_size", "stride"}
        extra = {
            key: value
            for key, value in arguments.items()
            if key not in known and value not in (0, 1, False)
        }
        kernel = arguments.get(0, arguments.get("kernel_size"))
        stride = arguments.get(1, arguments.get("stride"))
        pool = make_strided_pool(nn.MaxPool2d(kernel, stride)) if not extra else None  # type: ignore[arg-type]
        if pool is None:
            raise NotAStackError("it has a pooling with windows that overlap or are padded")
        return MaxPool((pool.height, pool.width))
    if target is torch.flatten or target == "flatten":
        if (
            arguments.get(0, arguments.get("start_dim")) == 1
            and arguments.get(1, arguments.get("end_dim", -1)) == -1
        ):
            return Flatten()
    elif target in ("view", "reshape") and len(node.args) == 3:
        samples, rest = node.args[1:]
        if (
            (isinstance(samples, fx.Node) or samples == -1)
            and isinstance(rest, int)
            and (samples, rest) != (-1, -1)
        ):
            return Flatten()
    raise NotAStackError(f"{target} is not known here")
