"""A client axis for the trained layers of a module, whose other layers are one for all clients.

The samples of all clients lie one after another along the first axis of a batch, so that a layer
that is not trained runs on all of them as it is. A trained layer gets each client's samples apart.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from coterie.engine._rewrites import ALIGNMENT, align_memory
from coterie.models.draws import KeyedDraws
from coterie.models.layout import Layout, join_path, module_of

# Entries that a vectorized loop of PyTorch takes at once, at most: what is left over at its end is
# computed one by one, and some functions round otherwise there.
_LOOP = 64
# share of the frozen weights from which a layer that runs client by client leaves nothing to share
_MUCH = 0.1


class NoClientAxisError(RuntimeError):
    """A layer or an operation that cannot be run with the samples of many clients in one batch."""


class ClientAxis:
    """The clients of a forward pass, whose samples lie client by client along the first axis.

    Attributes:
        clients: how many.
        samples: of each.
        draws: what the pass draws; None where it draws nothing.
        alone: the client whose samples alone are run now; None for all.
    """

    def __init__(self) -> None:
        self.clients, self.samples = 1, 1
        self.draws: KeyedDraws | None = None
        self.alone: int | None = None

    @contextmanager
    def use(self, clients: int, samples: int, draws: KeyedDraws | None) -> Iterator[None]:
        """Begin a pass and end it."""
        self.clients, self.samples, self.draws, self.alone = clients, samples, draws, None
        try:
            yield
        finally:
            self.draws, self.alone = None, None

    def is_along(self, value: Any) -> bool:
        """Return whether a value is a tensor whose first axis is that of all samples."""
        return (
            isinstance(value, Tensor)
            and value.ndim > 0
            and value.shape[0] > 0
            and value.shape[0] % (self.clients * self.samples) == 0
        )

    def split(self, tensor: Tensor) -> Sequence[Tensor]:
        """Return the part of each client, aligned like a tensor of its own."""
        parts = tensor.split(tensor.shape[0] // self.clients)
        return [align_memory(part) for part in parts]

    def join(self, parts: Sequence[Any]) -> Any:
        """Return the results of all clients as one; tables and lists of tensors, one by one."""
        first = parts[0]
        if isinstance(first, Tensor):
            if first.numel() * first.element_size() % ALIGNMENT:
                return _JoinAligned.apply(*parts)  # type: ignore[no-untyped-call]
            return torch.cat(list(parts))
        if type(first) in (tuple, list):
            return type(first)(self.join(one) for one in zip(*parts, strict=True))
        if first is None:
            return None
        raise NoClientAxisError(f"it returns a {type(first).__name__}; expected tensors")

    def run_each(self, run: Callable[[int], Any]) -> Any:
        """Return the results of a function of each client, joined.

        What one of them draws are the draws of that client.
        """
        draws, parts, start = self.draws, [], 0
        if draws is not None:
            start = draws.number
        try:
            for client in range(self.clients):
                self.alone = client
                if draws is not None:
                    # Clients run one after another, and each has the same operations.
                    draws.model, draws.number = client, start
                parts.append(run(client))
        finally:
            self.alone = None
            if draws is not None:
                draws.model = None
        return self.join(parts)


class _JoinAligned(torch.autograd.Function):
    """Tensors one after another; the gradient of each is aligned like a tensor of its own."""

    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:
        """Join parts of one shape."""
        ctx.size = len(parts[0])
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        """Split the gradient."""
        return tuple(align_memory(part) for part in grads[0].split(ctx.size))


# ---------------------------------------------------------------- trained layers


class TrainedLayer:
    """A layer with trained tensors, each of which gets an axis of clients.

    Args:
        part: the layer, whose `forward` is replaced.
        names: the trained tensors that it has itself: the name in a row of each, by attribute.
        axis: of the pass.
    """

    def __init__(self, part: nn.Module, names: Mapping[str, str], axis: ClientAxis) -> None:
        self.part, self.names, self.axis = part, dict(names), axis
        self._run_alone = part.forward
        self._stacked: dict[str, Tensor] = {}
        self._own: dict[bool, dict[str, Sequence[Tensor]]] = {}  # by whether gradients are wanted
        self._batched = _find_batched_form(part)
        for name in names:
            # An attribute, because a parameter must be a leaf and a slice of many is none.
            del part._parameters[name]
        part.forward = self._run  # type: ignore[method-assign]

    def bind(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the tensors of the clients of a pass, by their names in a row."""
        self._stacked = {name: tensors[row_name] for name, row_name in self.names.items()}
        self.part.__dict__.update(self._stacked)

    def release(self) -> None:
        """Let go of the tensors of a pass."""
        for name in self.names:
            self.part.__dict__.pop(name, None)
        self._stacked, self._own = {}, {}

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        axis = self.axis
        if axis.alone is not None:
            return self._run_client(axis.alone, args, kwargs)
        if not any(map(axis.is_along, (*args, *kwargs.values()))):
            return axis.run_each(lambda client: self._run_for_all_samples(client, args, kwargs))
        if self._batched is not None and args and not kwargs and args[0].device.type != "cpu":
            return self._batched(self.part, axis.clients, *args)
        given = [axis.split(one) if axis.is_along(one) else None for one in args]
        named = {name: axis.split(one) for name, one in kwargs.items() if axis.is_along(one)}

        def run(client: int) -> Any:
            own = [
                one if parts is None else parts[client]
                for one, parts in zip(args, given, strict=True)
            ]
            by_name = {name: parts[client] for name, parts in named.items()}
            return self._run_client(client, own, {**kwargs, **by_name})

        return axis.run_each(run)

    def _run_for_all_samples(
        self, client: int, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Tensor:
        """Run a layer whose result is one for all samples of a client, such as their positions."""
        out = self._run_client(client, args, kwargs)
        if not isinstance(out, Tensor) or out.ndim == 0 or len(out) != 1:
            raise NoClientAxisError("it gets no tensor whose first axis is that of the samples")
        return out.expand(self.axis.samples, *out.shape[1:])

    def _run_client(self, client: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the layer of one client on its samples."""
        # A layer that is checkpointed may run without gradients first, and with them later.
        mode = torch.is_grad_enabled()
        if mode not in self._own:
            self._own[mode] = {}
            for name, stacked in self._stacked.items():
                self._own[mode][name] = [align_memory(one) for one in stacked.unbind()]
        held = self.part.__dict__
        held.update({name: own[client] for name, own in self._own[mode].items()})
        try:
            return self._run_alone(*args, **kwargs)
        finally:
            # Code that reads a weight without running its layer must not get that of one client.
            held.update(self._stacked)


def add_client_axis(module: nn.Module, layout: Layout, axis: ClientAxis) -> list[TrainedLayer]:
    """Give the trained layers of a copy of the training module an axis of clients, in place.

    Args:
        module: the copy.
        layout: of the module.
        axis: of the passes.

    Returns:
        The layers.

    Raises:
        NoClientAxisError: when most of the module would run client by client all the same.
    """
    trained = {slot.name for slot in layout.trained_slots}
    first = {id(one): name for name, one in module.named_parameters()}
    # A tied tensor is in several layers, each of which takes the same one.
    found: dict[str, dict[str, str]] = {}
    for name, one in module.named_parameters(remove_duplicate=False):
        if first[id(one)] in trained:
            path = module_of(name)
            found.setdefault(path, {})[name[len(path) :].lstrip(".")] = first[id(one)]
    total = sum(one.numel() for one in layout.frozen.values())
    layers = []
    for path, names in found.items():
        part = module.get_submodule(path)
        inside = sum(one.numel() for one in part.parameters() if not one.requires_grad)
        if inside > _MUCH * total:
            raise NoClientAxisError(
                f"{join_path(path, next(iter(names)))!r} is trained, and belongs to a layer with "
                f"{inside / total:.0%} of the frozen weights, which would run client by client"
            )
        layers.append(TrainedLayer(part, names, axis))
    return layers


# ---------------------------------------------------------------- one launch for all clients


def _find_batched_form(part: nn.Module) -> Callable[..., Tensor] | None:
    """Return what computes a layer of all clients at once on a device; None client by client."""
    # A layer may have a `forward` of its own in place of that of its class.
    form = None if "forward" in vars(part) else _BATCHED.get(type(part).forward)
    if form is _embed and (
        part.padding_idx is not None or part.max_norm is not None or part.scale_grad_by_freq
    ):
        return None
    return form


def _multiply(part: Any, clients: int, x: Tensor) -> Tensor:
    rows = x.reshape(clients, -1, x.shape[-1])
    weight = part.weight.transpose(1, 2)
    if part.bias is None:
        out = torch.bmm(rows, weight)
    elif part.bias.ndim == 1:  # a frozen one
        out = torch.bmm(rows, weight) + part.bias
    else:
        out = torch.baddbmm(part.bias[:, None], rows, weight)
    return out.reshape(*x.shape[:-1], out.shape[-1])


def _scale(y: Tensor, part: Any, clients: int, name: str, shape: int) -> Tensor:
    """Return a tensor of a layer with axes that fit to those of its normalized inputs."""
    own: Tensor = getattr(part, name)
    if own.ndim == shape:
        return own
    return own.reshape(clients, *[1] * (y.ndim - own.ndim), *own.shape[1:])


def _normalize_layer(part: Any, clients: int, x: Tensor) -> Tensor:
    shape = part.normalized_shape
    y = functional.layer_norm(x, shape, None, None, part.eps).unflatten(0, (clients, -1))
    if part.weight is not None:
        y = y * _scale(y, part, clients, "weight", len(shape))
    if part.bias is not None:
        y = y + _scale(y, part, clients, "bias", len(shape))
    return y.flatten(0, 1)


def _embed(part: Any, clients: int, x: Tensor) -> Tensor:
    # Each client's rows of one table of all of them.
    starts = torch.arange(clients, device=x.device) * part.num_embeddings
    own = x.reshape(clients, -1) + starts[:, None]
    return functional.embedding(own.reshape(x.shape), part.weight.flatten(0, 1))


_BATCHED: dict[Any, Callable[..., Tensor]] = {
    nn.Linear.forward: _multiply,
    nn.LayerNorm.forward: _normalize_layer,
    nn.Embedding.forward: _embed,
}

# ---------------------------------------------------------------- functions of PyTorch on a CPU


class ClientFunctions(TorchFunctionMode):
    """While active, functions that may round by the size of a batch run client by client.

    On a CPU the bits of a client must not depend on who else is in a pass. Products are chosen and
    blocked by the sizes of their factors, and loops compute what is left over at their end in
    another way. Everything else runs on all samples at once.

    Args:
        axis: of the pass.
    """

    def __init__(self, axis: ClientAxis) -> None:
        super().__init__()
        self.axis = axis

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one function."""
        kwargs, axis = kwargs or {}, self.axis
        place = _BY_CLIENT.get(func)
        # Not for one client alone: then its layer calls what it always calls.
        if place is None or axis.alone is not None or len(args) <= place:
            return func(*args, **kwargs)
        x = args[place]
        if not axis.is_along(x):
            return func(*args, **kwargs)
        if func is functional.linear and not kwargs:
            return _multiply_frozen(axis, *args)
        if func in _POINTWISE and not _is_left_over(x, axis.clients):
            return func(*args, **kwargs)
        try:
            split = [_split_like(axis, func, x, one) for one in args]
            named = {name: _split_like(axis, func, x, one) for name, one in kwargs.items()}
        except NoClientAxisError:  # of shapes that are rare: only the rounding suffers
            return func(*args, **kwargs)
        return axis.run_each(
            lambda client: func(
                *(one[client] for one in split),
                **{name: one[client] for name, one in named.items()},
            )
        )


def _split_like(axis: ClientAxis, func: Any, x: Tensor, value: Any) -> Sequence[Any]:
    """Return what each client gets of an argument of a function, whose samples are those of `x`."""
    shared = [value] * axis.clients
    if value is x:
        return axis.split(x)
    # Axes are aligned with the last ones of `x`: one with fewer has none of samples.
    if func not in _OF_SAMPLES or not isinstance(value, Tensor) or value.ndim < x.ndim:
        return shared
    if value.ndim == x.ndim and len(value) == 1:
        return shared
    if func in _MATRICES and value.ndim == x.ndim == 2:
        return shared
    if value.ndim > x.ndim or x.ndim < 3 or len(value) != len(x):
        raise NoClientAxisError("its factors have different axes")
    return axis.split(value)


def _is_left_over(x: Tensor, clients: int) -> bool:
    """Return whether a loop over all entries may compute some of a client's in another way."""
    return x.numel() // clients % _LOOP > 0 or torch.get_num_threads() > 1


def _multiply_frozen(
    axis: ClientAxis, x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Compute `functional.linear` client by client."""
    if weight.requires_grad or (bias is not None and bias.requires_grad):
        raise NoClientAxisError("a trained weight multiplies the samples of all clients")
    if torch.is_autocast_enabled(x.device.type):
        kind = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(kind), weight.to(kind)
        bias = None if bias is None else bias.to(kind)
    with torch.autocast(x.device.type, enabled=False):
        return _FrozenLinear.apply(x, weight, bias, axis.clients)  # type: ignore[no-untyped-call]


class _FrozenLinear(torch.autograd.Function):
    """A linear layer with one weight for all clients, whose rows are multiplied client by client.

    Results go into one tensor, so that nothing is copied.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, clients: int) -> Tensor:
        """Multiply."""
        ctx.clients, ctx.weight = clients, weight
        rows = x.reshape(clients, -1, x.shape[-1])
        out = rows.new_empty(*rows.shape[:2], len(weight))
        turned = weight.t()
        for own, part in zip(rows.unbind(), out.unbind(), strict=True):
            if bias is None:
                _store_product(part, torch.mm, own, turned)
            else:
                _store_product(part, functools.partial(torch.addmm, bias), own, turned)
        return out.reshape(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Multiply the gradient."""
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        grad, weight = grads[0], ctx.weight
        rows = grad.reshape(ctx.clients, -1, grad.shape[-1])
        out = rows.new_empty(*rows.shape[:2], weight.shape[1])
        # Functions are those of PyTorch here, though a mode may be active for a checkpoint.
        with torch._C.DisableTorchFunction():
            for own, part in zip(rows.unbind(), out.unbind(), strict=True):
                _store_product(part, torch.mm, own, weight)
        return out.reshape(*grad.shape[:-1], weight.shape[1]), None, None, None


def _store_product(out: Tensor, product: Callable[..., Tensor], a: Tensor, b: Tensor) -> None:
    """Write a product into a part of a tensor; its bits do not depend on which part it is."""
    a = align_memory(a)
    if out.data_ptr() % ALIGNMENT:
        out.copy_(product(a, b))
    else:
        product(a, b, out=out)


_MATRICES: set[Any] = {torch.matmul, Tensor.matmul, Tensor.__matmul__}
# functions whose arguments all have samples where they have as many axes as the first one
_OF_SAMPLES: set[Any] = {
    *_MATRICES,
    torch.bmm,
    Tensor.bmm,
    torch.baddbmm,
    functional.scaled_dot_product_attention,
}
_POINTWISE: set[Any] = {
    functional.gelu,
    functional.silu,
    functional.mish,
    functional.softplus,
    functional.logsigmoid,
    functional.elu,
    functional.selu,
    functional.celu,
    functional.sigmoid,
    torch.sigmoid,
    Tensor.sigmoid,
}
# the place of the argument with the samples
_BY_CLIENT: dict[Any, int] = {
    **dict.fromkeys([*_OF_SAMPLES, *_POINTWISE], 0),
    functional.linear: 0,
    torch.mm: 0,
    Tensor.mm: 0,
    torch.addmm: 1,
    torch.baddbmm: 1,
    functional.conv1d: 0,
    functional.conv2d: 0,
    functional.conv3d: 0,
    functional.conv_transpose1d: 0,
    functional.conv_transpose2d: 0,
    functional.conv_transpose3d: 0,
}
