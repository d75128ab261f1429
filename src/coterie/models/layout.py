"""Models: an nn.Module as rows of one flat matrix (Layout), and the papers' reference networks.

A population's models are a `clients x params` matrix. A row holds what differs between clients:
first the trainable parameters, then the floating-point state that is not trained (running
statistics). So mixing, comparing and storing models are operations on one array; comparisons use
the trainable part only. Frozen weights (`requires_grad` is False) are in no row: they are one
tensor for all clients, which nobody sends.

Modules with hidden state or hidden randomness cannot be run over many rows at once. `Layout`
therefore works on a copy in which batch normalization returns its new statistics instead of writing
them in place, and dropout draws from a counter-based stream whose key is an input. Both compute
what the originals compute.
"""

import copy
import functools
import hashlib
import inspect
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from coterie._util.importing import import_object
from coterie.data.source import InputPart
from coterie.errors import ConfigError, ModelError, describe_unknown
from coterie.models import networks
from coterie.rng import EVERYONE, Rng

ModelFactory = Callable[[], nn.Module] | nn.Module


@dataclass(frozen=True)
class NamedModel:
    """A model by name, with arguments.

    Args:
        kind: a name of `NETS`, or the import path, "package.module:Net", of a subclass of nn.Module
            or of a function that returns a module.
        options: arguments of what the import path names. `features` (the shape of one input) and
            `outputs` (classes, or numbers of a target) are added where it takes them and they are
            not given.
    """

    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return (
            f"{self.kind} {json.dumps(self.options, sort_keys=True, default=str)}"
            if self.options
            else self.kind
        )


ModelSource = str | NamedModel | ModelFactory
BUFFER_POLICIES = ("average", "local", "reset")


class KeyedDropout(nn.Module):
    """Dropout whose mask is a function of a key (an input buffer), the layer and the element.

    Args:
        p: probability of zeroing, in [0, 1).
        channels: zero whole channels (axis 1), as `nn.Dropout2d` does.
        layer: a different number for each dropout layer of a network.
    """

    key: Tensor
    input_buffers = ("key",)

    def __init__(self, p: float, channels: bool, layer: int) -> None:
        super().__init__()
        self.p, self.channels, self.layer = p, channels, layer
        self.register_buffer("key", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Zero entries while training; pass through in evaluation."""
        if not self.training or self.p == 0:
            return x
        # Axes are samples, channels, places: whole channels have one draw for all places.
        shape = (*x.shape[:2], *(1 for _ in x.shape[2:])) if self.channels else tuple(x.shape)
        place = torch.arange(math.prod(shape), device=x.device)
        # The layer goes into the key before it is mixed, so that layers do not share draws.
        bits = splitmix(splitmix(self.key + self.layer) + place)
        # 53 random bits against p in units of 2^-53: integers on both sides.
        keep = ((bits & ((1 << 53) - 1)) >= int(self.p * (1 << 53))).reshape(shape)
        return x * keep.to(x.dtype) / (1 - self.p)


def splitmix(z: Tensor) -> Tensor:
    """Return 64 mixed bits of each integer: SplitMix64 (Steele, Lea & Flood 2014), wrapping."""
    # The unsigned constants of SplitMix64 as int64, which wraps alike. `>>` repeats the sign bit of
    # int64; the masks cut the copies off.
    z = z * -7046029254386353131
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * -4658895280553007687
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * -7723592293110705685
    return z ^ ((z >> 31) & ((1 << 33) - 1))


class FunctionalBatchNorm(nn.Module):
    """Batch normalization that replaces its running statistics instead of writing into them.

    Args:
        norm: the layer that it replaces; it takes over its parameters and statistics.

    Attributes:
        in_place: compute by PyTorch's fused kernel, which writes into the running statistics: where
            one model is trained at a time, whose tensors are the module's own.
    """

    in_place: bool = False
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    def __init__(self, norm: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) -> None:
        super().__init__()
        self.eps, self.momentum = norm.eps, norm.momentum
        self.weight, self.bias = norm.weight, norm.bias
        self.register_buffer("running_mean", norm.running_mean)
        self.register_buffer("running_var", norm.running_var)
        count = norm.num_batches_tracked
        self.register_buffer(
            "num_batches_tracked", None if count is None else count.to(torch.get_default_dtype())
        )

    def forward(self, x: Tensor) -> Tensor:
        """Normalize by the batch in training, by running statistics in evaluation."""
        # Mean and variance need more digits than bfloat16 has.
        x = x.float() if x.dtype == torch.bfloat16 else x
        if not self.training and self.running_mean is not None:
            return functional.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        axes = [axis for axis in range(x.ndim) if axis != 1]
        # Values of a channel: samples times places.
        places = x.numel() // x.shape[1]
        if places == 1:
            raise ValueError(
                "batch normalization takes more than one value a channel while training"
            )
        if self.in_place:
            return self._forward_fused(x)
        variance, mean = torch.var_mean(x, axes, correction=0, keepdim=True)
        if (
            self.running_mean is not None
            and self.running_var is not None
            and self.num_batches_tracked is not None
        ):
            count = self.num_batches_tracked + 1
            # Without a momentum, PyTorch's running statistics are the plain mean over batches.
            rate = 1 / count if self.momentum is None else self.momentum
            # PyTorch normalizes by the biased variance and tracks the unbiased one.
            unbiased = variance.detach().flatten() * (places / (places - 1))
            self.num_batches_tracked = count
            self.running_mean = self.running_mean + rate * (
                mean.detach().flatten() - self.running_mean
            )
            self.running_var = self.running_var + rate * (unbiased - self.running_var)
        # written out: the fused kernel's last bits depend on the other rows
        scale = torch.rsqrt(variance + self.eps)
        if self.weight is None:
            return (x - mean) * scale
        return (x - mean) * (scale * self.weight.reshape(mean.shape)) + self.bias.reshape(
            mean.shape
        )

    def _forward_fused(self, x: Tensor) -> Tensor:
        """Normalize by the batch, and write the running statistics where they are."""

        def normalize(mean: Tensor | None, variance: Tensor | None, rate: float) -> Tensor:
            cudnn = torch.backends.cudnn.enabled
            return torch.batch_norm(
                x, self.weight, self.bias, mean, variance, True, rate, self.eps, cudnn
            )

        if (
            self.running_mean is None
            or self.running_var is None
            or self.num_batches_tracked is None
        ):
            return normalize(None, None, 0.0)
        self.num_batches_tracked.add_(1)
        if self.momentum is not None:
            return normalize(self.running_mean, self.running_var, self.momentum)
        # At rate 1 the kernel leaves the batch's own statistics here, which then enter the plain
        # mean.
        mean, variance = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
        y = normalize(mean, variance, 1.0)
        rate = 1 / self.num_batches_tracked
        self.running_mean.lerp_(mean, rate)
        self.running_var.lerp_(variance, rate)
        return y


def make_functional(module: nn.Module) -> nn.Module:
    """Return a copy of a module without hidden state and randomness.

    Batch normalization and dropout layers are replaced; subclasses of them are not.
    """
    module = copy.deepcopy(module)
    layers = {nn.Dropout: False, nn.Dropout1d: True, nn.Dropout2d: True, nn.Dropout3d: True}
    norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    number = 0

    def visit(parent: nn.Module) -> None:
        nonlocal number
        for name, child in parent.named_children():
            # Not isinstance: a subclass may compute something else.
            if type(child) in layers:
                number += 1
                setattr(parent, name, KeyedDropout(child.p, layers[type(child)], number))  # type: ignore[arg-type]
            elif type(child) in norms:
                setattr(parent, name, FunctionalBatchNorm(child))  # type: ignore[arg-type]
            else:
                visit(child)

    # The module itself may be such a layer: it is visited as a child.
    holder = nn.ModuleList([module])
    visit(holder)
    return holder[0]


def copy_module(module: nn.Module) -> nn.Module:
    """Return a copy of a module that has the original's own frozen weights."""
    return copy.deepcopy(
        module, {id(one): one for one in module.parameters() if not one.requires_grad}
    )


@dataclass(frozen=True)
class InputConversion:
    """How one tensor of numbers becomes the arguments of a module's `forward`.

    Args:
        parts: the tensors that it is made of, one after another; empty where it is one.
        whole: without parts: whether the module takes whole numbers (int64).
    """

    parts: tuple[InputPart, ...] = ()
    whole: bool = False

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:
        """Return the arguments: a hook before `forward`."""
        if not self.parts:
            return ((args[0].long(), *args[1:]) if self.whole else args), kwargs
        given, named, start = [], dict(kwargs), 0
        for part in self.parts:
            stop = start + math.prod(part.shape)
            # A part without axes is one number a sample.
            value = args[0][:, start:stop].unflatten(1, part.shape or (1,))
            value = (value if part.shape else value.squeeze(1)).to(
                torch.int64 if part.whole else args[0].dtype
            )
            start = stop
            if part.name:
                named[part.name] = value
            else:
                given.append(value)
        return tuple(given), named


@dataclass(frozen=True)
class Slot:
    """The position of one tensor of a module in a row."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int


def layer_of(name: str) -> str:
    """Return the path of a tensor's layer; for a parametrized one, of the tensor it replaces."""
    return (
        name.partition("parametrizations.")[0].removesuffix(".")
        if "parametrizations." in name
        else module_of(name)
    )


def module_of(name: str) -> str:
    """Return the path of the module that owns a tensor or a module of a name."""
    return name.rpartition(".")[0]


class Layout:
    """The positions of a module's parameters and running statistics in a row.

    Args:
        module: the module; it is copied, never changed.
        dtype: floating-point type of the rows.
        arguments: what becomes of an input before the module takes it.

    Attributes:
        trainable: number of leading entries of a row that are trained.
        size: the length of a row.
        frozen: the parameters that are not trained, by name: of all clients alike, and in no row.
        inputs: names of the buffers that are set in every step and are no state; a submodule lists
            them in its class attribute `input_buffers` (the key of a dropout layer, the position in
            a simplex of models).
        keys: the input buffers that are keys of random streams.
        train_module, eval_module: the module in training and in evaluation mode.
        own: the module as it was given.

    Example:
        >>> layout = Layout(nn.Linear(3, 2))
        >>> layout.trainable, layout.size
        (8, 8)
    """

    def __init__(
        self,
        module: nn.Module,
        dtype: torch.dtype = torch.float32,
        arguments: InputConversion | None = None,
    ) -> None:
        self.dtype, self.arguments, self.original = dtype, arguments or InputConversion(), module
        self.train_module = make_functional(module).to(dtype).train()
        if self.arguments != InputConversion():
            self.train_module.register_forward_pre_hook(
                self.arguments, with_kwargs=True, prepend=True
            )
        owners = [
            (f"{path}." if path else "", part) for path, part in self.train_module.named_modules()
        ]
        self.inputs = tuple(
            path + name for path, part in owners for name in getattr(part, "input_buffers", ())
        )
        self.keys = tuple(path + "key" for path, part in owners if isinstance(part, KeyedDropout))
        # Two modules, because training and evaluation mode are state of a module; frozen weights
        # are shared.
        self.eval_module = copy_module(self.train_module).eval()
        self.slots: list[Slot] = []
        self.frozen: dict[str, Tensor] = {}
        position = 0
        for name, tensor in self.train_module.named_parameters():
            if tensor.requires_grad:
                position = self._add_slot(name, tensor, position)
            else:
                self.frozen[name] = tensor
        self.trainable = position
        # Running statistics lie behind the trained entries. Buffers of integers are in no row: rows
        # are of one floating-point type.
        for name, tensor in self.train_module.named_buffers():
            if tensor.is_floating_point() and name not in self.inputs:
                position = self._add_slot(name, tensor, position)
        self.size = position
        if not self.trainable:
            raise ModelError("the module has no trainable parameters; expected at least one")

    def to(self, device: str) -> "Layout":
        """Move the two modules to the device of the rows, and return the layout."""
        self.train_module.to(device)
        self.eval_module.to(device)
        return self

    def _add_slot(self, name: str, tensor: Tensor, start: int) -> int:
        stop = start + tensor.numel()
        self.slots.append(Slot(name, tuple(tensor.shape), start, stop))
        return stop

    @functools.cached_property
    def original_names(self) -> dict[str, tuple[str, ...]]:
        """The names of each slot's tensor in the original module: several where it is tied."""
        every: dict[int, list[str]] = {}
        for name, tensor in self.train_module.named_parameters(remove_duplicate=False):
            # A tied tensor has one slot and several names; a parametrized one is also known by its
            # layer's name.
            every.setdefault(id(tensor), []).append(name)
            plain = name.replace("parametrizations.", "").removesuffix(".original")
            every[id(tensor)] += [plain] if plain != name else []
        own = dict(self.train_module.named_parameters())
        return {
            s.name: tuple(every[id(own[s.name])]) if s.name in own else (s.name,)
            for s in self.slots
        }

    def layer_tensors(self) -> dict[str, tuple[str, ...]]:
        """Return, by path, the tensors of the layers with trained parameters, in order.

        Example:
            >>> Layout(nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1))).layer_tensors()
            {'0': ('0.weight', '0.bias'), '2': ('2.weight', '2.bias')}
        """
        found: dict[str, tuple[str, ...]] = {}
        for slot in self.slots:
            path = layer_of(slot.name)
            if slot.stop <= self.trainable or path in found:
                found[path] = (*found.get(path, ()), slot.name)
        return found

    def normalization_tensors(self) -> tuple[str, ...]:
        """Return the tensors of normalization layers: parameters and running statistics.

        Example:
            >>> Layout(nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))).normalization_tensors()
            ('1.weight', '1.bias')
        """
        kinds = (
            FunctionalBatchNorm,
            nn.modules.batchnorm._NormBase,
            nn.GroupNorm,
            nn.LayerNorm,
            nn.RMSNorm,
        )
        paths = {
            path for path, part in self.train_module.named_modules() if isinstance(part, kinds)
        }
        return tuple(slot.name for slot in self.slots if layer_of(slot.name) in paths)

    @functools.cached_property
    def frozen_digest(self) -> str:
        """The digest of the frozen weights: names, shapes and values; "" where there are none."""
        if not self.frozen:
            return ""
        digest = hashlib.sha256()
        for name, tensor in self.frozen.items():
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
            digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def flatten_module(self, module: nn.Module) -> Float[Tensor, " params"]:
        """Return a module's tensors as one row; the module has this layout's structure."""
        return self.flatten_rewritten(make_functional(module))

    def flatten_rewritten(self, module: nn.Module) -> Float[Tensor, " params"]:
        """Return the tensors of a copy of `train_module` as one row."""
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        missing = [slot.name for slot in self.slots if slot.name not in tensors]
        if missing:
            raise ModelError(
                f"the module has no tensor {missing[0]!r}; expected a module like the first one "
                "made"
            )
        return torch.cat(
            [tensors[slot.name].detach().reshape(-1).to(self.dtype) for slot in self.slots]
        )

    def split_rows(self, rows: Float[Tensor, "*batch params"]) -> dict[str, Tensor]:
        """Return each tensor as a view of a row, or of many rows with their leading axes."""
        return {
            s.name: rows[..., s.start : s.stop].reshape((*rows.shape[:-1], *s.shape))
            for s in self.slots
        }

    def join_tensors(
        self, tensors: Mapping[str, Tensor], *, trainable: bool, lead: int = 0
    ) -> Tensor:
        """Join tensors into rows: the inverse of `split_rows` for one part of a row.

        Args:
            tensors: one for each slot of the part.
            trainable: whether the part is the trained one.
            lead: number of leading (client) axes of the tensors.
        """
        chosen = [s for s in self.slots if (s.stop <= self.trainable) == trainable]
        return torch.cat(
            [tensors[s.name].reshape(*tensors[s.name].shape[:lead], -1) for s in chosen], dim=-1
        )

    def untrained_part(
        self, tensors: Mapping[str, Tensor], row: Float[Tensor, " params"]
    ) -> Float[Tensor, " untrained_part"]:
        """Return the untrained part of one row, from tensors that a call may have replaced."""
        if self.size == self.trainable:
            return row[self.trainable :]
        return self.join_tensors(tensors, trainable=False).detach()

    def zero_inputs(self, clients: int) -> dict[str, Tensor]:
        """Return the input buffers with the module's own values, for a number of clients."""
        named = dict(self.train_module.named_buffers())
        return {name: named[name].expand(clients, *named[name].shape) for name in self.inputs}

    def run_module(self, tensors: dict[str, Tensor], x: Tensor, *, training: bool) -> Tensor:
        """Run the module with the given tensors; running statistics are replaced in `tensors`."""
        return functional_call(self.train_module if training else self.eval_module, tensors, (x,))

    def build_module(
        self, row: Float[Tensor, " params"], *, dtype: torch.dtype | None = None
    ) -> nn.Module:
        """Return a copy of the original module with a row's tensors, for evaluation on the CPU.

        What no row has (frozen weights that are one for all, buffers of whole numbers) has this
        layout's values.

        Args:
            row: one model.
            dtype: floating-point type of the copy; the module's own when None.
        """
        module = copy.deepcopy(self.original).cpu()
        module = (module if dtype is None else module.to(dtype)).eval()
        return fill_module(module, {**self.other_tensors(), **self.split_rows(row)})

    def other_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the module that are in no row, without its input buffers."""
        held = {
            **dict(self.eval_module.named_parameters()),
            **dict(self.eval_module.named_buffers()),
        }
        inside = {slot.name for slot in self.slots} | set(self.inputs)
        return {name: tensor.detach() for name, tensor in held.items() if name not in inside}


def fill_module(module: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Write tensors into a module by name, each in the type that it has there.

    Counters of batches, which rows hold as floating-point numbers, are whole again.
    """
    with torch.no_grad():
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if name in tensors:
                value = tensors[name]
                # A count that was averaged is a fraction in a row.
                whole = value.is_floating_point() and not tensor.is_floating_point()
                tensor.copy_(value.round() if whole else value)
    return module


def draw_initial_params(
    source: ModelFactory, layout: Layout, rng: Rng, client: int = EVERYONE, purpose: str = "init"
) -> Tensor:
    """Draw the first parameters of a model from the stream of `client`.

    A factory is called again; a module is copied, and every submodule with `reset_parameters` draws
    again. Frozen weights are no part of it: they stay those of the layout.
    """
    with rng.temporary_torch_seed(purpose, client):
        # A factory draws in its constructor, a module in `reset_parameters`, in the order of its
        # submodules.
        if not isinstance(source, nn.Module):
            return layout.flatten_module(source())
        module = copy.deepcopy(source)
        for part in module.modules():
            reset = getattr(part, "reset_parameters", None)
            if callable(reset):
                reset()
        return layout.flatten_module(module)


# ---------------------------------------------------------------- the papers' reference networks


def _pooled_side(side: int, *kernels: int, pad: int = 0) -> int:
    for kernel in kernels:
        # A convolution, then pooling by 2 that drops an odd last place.
        side = (side + 2 * pad - kernel + 1) // 2
    return side


def cnn_a(features: tuple[int, ...], outputs: int, dropout: float = 0.0) -> nn.Module:
    """Net A of the DAC and similarity papers; 62,006 parameters at 3x32x32, 10 outputs.

    Args:
        features: the shape of an image: channels, height, width.
        outputs: classes.
        dropout: probability with which entries of the first hidden layer are zeroed while training.
            The code of DAC defines such a layer, of 0.5, and does not use it; `model.kind =
            "coterie.models.layout:cnn_a"` takes it.
    """
    channels, height, width = features
    flat = 16 * _pooled_side(height, 5, 5) * _pooled_side(width, 5, 5)
    hidden = [nn.Linear(flat, 120), nn.ReLU(), *([nn.Dropout(dropout)] if dropout else [])]
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        *hidden, nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, outputs),
    )  # fmt: skip


def cnn_b(features: tuple[int, ...], outputs: int) -> nn.Module:
    """Net B of the DAC and similarity papers; 56,714 parameters at 1x28x28 and 10 outputs.

    Images too small for two unpadded 3x3 convolutions (under 10 pixels) are padded by one pixel
    before each.
    """
    channels, height, width = features
    pad = 1 if min(height, width) < 10 else 0
    flat = 32 * _pooled_side(height, 3, 3, pad=pad) * _pooled_side(width, 3, 3, pad=pad)
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=pad), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=pad), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(flat, 64), nn.ReLU(), nn.Linear(64, outputs),
    )  # fmt: skip


def mlp_c(features: tuple[int, ...], outputs: int) -> nn.Module:
    """Net C of the similarity paper: 784-512-outputs, dropout 0.2; 412,180 parameters at 20."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(math.prod(features), 512),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(512, outputs),
    )


def mlp_bn(features: tuple[int, ...], outputs: int) -> nn.Module:
    """Two layers of 64 with batch normalization; 9,226 parameters at 1x8x8, 10 outputs."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(math.prod(features), 64), nn.BatchNorm1d(64), nn.ReLU(),
        nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, outputs),
    )  # fmt: skip


def linear(features: tuple[int, ...], outputs: int) -> nn.Module:
    """A linear model with bias, as in the synthetic regression of the similarity paper."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(features), outputs))


NETS: dict[str, Callable[[tuple[int, ...], int], nn.Module]] = {
    "cnn-a": cnn_a,
    "cnn-b": cnn_b,
    "mlp-c": mlp_c,
    "mlp-bn": mlp_bn,
    "linear": linear,
    **networks.NETS,
}


def build_model(
    kind: str, features: tuple[int, ...], outputs: int, options: Mapping[str, Any] | None = None
) -> nn.Module:
    """Build a network by name for inputs of a shape.

    Args:
        kind: a name of `NETS`, or an import path; see `NamedModel`.
        features: the shape of one input.
        outputs: classes, or regression targets.
        options: arguments, for an import path.

    Raises:
        ConfigError: for an unknown name, or arguments that it does not take.
        ModelError: when the network cannot take inputs of that shape, or cannot be made.
    """
    if ":" in kind:
        return _build_custom_model(kind, {"features": features, "outputs": outputs}, options or {})
    if kind not in NETS:
        raise ConfigError(describe_unknown("model", kind, NETS))
    if options:
        raise ConfigError(
            f"model.options has {', '.join(options)}; {kind} takes none, import paths do"
        )
    if kind not in ("mlp-c", "mlp-bn", "linear") and len(features) != 3:
        raise ModelError(
            f"{kind} takes images (channels, height, width); found inputs of shape {features}"
        )
    try:
        return NETS[kind](features, outputs)
    # PyTorch raises it for sizes below 1, which small images lead to.
    except RuntimeError as error:
        raise ModelError(f"{kind} cannot take inputs of shape {features}: {error}") from error


def _build_custom_model(
    kind: str, known: Mapping[str, Any], options: Mapping[str, Any]
) -> nn.Module:
    """Make the model that an import path leads to."""
    what = f"model {kind!r}"
    found = import_object(kind, what)
    if not callable(found) or isinstance(found, nn.Module):
        raise ConfigError(
            f"{what} is a {type(found).__name__}; expected a subclass of torch.nn.Module, or a "
            "function that makes one"
        )
    try:
        takes = inspect.signature(found).parameters
    except (TypeError, ValueError):  # of some functions written in C
        takes = {}
    named = {
        name: one
        for name, one in takes.items()
        if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    }
    if takes and not any(one.kind == one.VAR_KEYWORD for one in takes.values()):
        for name in options:
            if name not in named:
                raise ConfigError(
                    f"model.options: {describe_unknown(f'argument of {kind}', name, named)}"
                )
    # A copy of the options: the model may change what it gets, and other clients get the same.
    arguments = {
        **{name: value for name, value in known.items() if name in named},
        **copy.deepcopy(dict(options)),
    }
    for name, one in named.items():
        if one.default is one.empty and name not in arguments:
            raise ConfigError(
                f"{what} takes {name!r}, which is not given; set model.options.{name}"
            )
    try:
        made = found(**arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        said = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        raise ModelError(f"{what} cannot be made with ({said}): {error}") from error
    if not isinstance(made, nn.Module):
        raise ModelError(
            f"{what} returned {type(made).__name__}; expected a torch.nn.Module"
            + _RETURN_HINT * (made is None)
        )
    return made


_RETURN_HINT = ": is a `return` missing?"


def resolve_model(
    model: ModelSource, features: tuple[int, ...], outputs: int
) -> Callable[[], nn.Module] | nn.Module:
    """Return the module or factory of a model given by name, module or factory."""
    named = NamedModel(model) if isinstance(model, str) else model
    if isinstance(named, NamedModel):
        with Rng(0).temporary_torch_seed(
            "template"
        ):  # a trial that must not draw from anybody's stream
            build_model(named.kind, features, outputs, named.options)
        return lambda: build_model(named.kind, features, outputs, named.options)
    return named


def custom_model_name(model: ModelSource) -> str:
    """Return a model's import path and arguments; "" for a model that has no import path."""
    named = NamedModel(model) if isinstance(model, str) else model
    return str(named) if isinstance(named, NamedModel) and ":" in named.kind else ""


def make_template(model: Callable[[], nn.Module] | nn.Module) -> nn.Module:
    """Return a module of the model, for its shapes and the frozen weights of all clients.

    A factory makes it with a stream of its own, the same in every run and on every machine.
    """
    if isinstance(model, nn.Module):
        return model
    with Rng(0).temporary_torch_seed("template"):
        module = model()
    if not isinstance(module, nn.Module):
        raise ModelError(
            f"the model factory returned {type(module).__name__}; expected a torch.nn.Module"
        )
    return module


def row_nbytes(params: Shaped[Tensor, "... params"]) -> int:
    """Return the size of one row in bytes, as it is sent."""
    return params.shape[-1] * params.element_size()
