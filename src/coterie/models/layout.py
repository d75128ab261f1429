"""Models: an nn.Module as rows of one flat matrix (Layout), and the papers' reference networks.

A population's models are a `clients x params` matrix. A row holds what differs between clients:
first the trainable parameters, then the state that is not trained (running statistics, and counts
as floating-point numbers). So mixing, comparing and storing models are operations on one array;
comparisons use the trainable part only. Frozen weights (`requires_grad` is False) are in no row:
they are one tensor for all clients, which nobody sends.

A `Layout` copies the module and rewrites nothing in it. What a forward pass draws is made of keys
below the module (`models.draws`), and engines that run many rows at once replace functions of
PyTorch, not layers.
"""

import copy
import functools
import hashlib
import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Num, Shaped
from torch import Tensor, nn
from torch.func import functional_call

from coterie._util.importing import import_object
from coterie._util.settings import parse_settings
from coterie.data.source import InputPart
from coterie.errors import RETURN_HINT, ConfigError, ModelError, describe_unknown
from coterie.models import networks, pretrained
from coterie.models.draws import KeyedDraws
from coterie.models.given import (
    InputConversion,
    ModuleMaker,
    check_module,
    copy_deeply,
    list_lazy_tensors,
    redraw_weights,
)
from coterie.models.networks import pooled_side
from coterie.models.outputs import OutputConversion
from coterie.rng import EVERYONE, Rng

ModelFactory = Callable[[], nn.Module] | nn.Module


@dataclass(frozen=True)
class NamedModel:
    """A model by name, with arguments.

    Args:
        kind: a name of `NETS`; the import path, "package.module:Net", of a subclass of nn.Module or
            of a function that returns a module; or "hf:PATH_OR_NAME", a model of transformers, see
            `pretrained.load_pretrained`.
        options: arguments of what the import path or "hf:" names. `features` (the shape of one
            input) and `outputs` (classes, or numbers of a target) are added where it takes them and
            they are not given.
        output: which entry of what the module returns is its output; see `OutputConversion`.
        adapter: what is trained in place of the module's own weights: the settings of a
            `pretrained.AdapterConfig`; empty for none.
    """

    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)
    output: str = ""
    adapter: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        words = [self.kind]
        if self.options:
            words.append(json.dumps(self.options, sort_keys=True, default=str))
        if self.adapter:
            adapter = json.dumps(self.adapter, sort_keys=True, default=str)
            words.append(f"adapter={adapter}")
        if self.output:
            words.append(f"output={self.output}")
        return " ".join(words)


ModelSource = str | NamedModel | ModelFactory
BUFFER_POLICIES = ("average", "local", "reset")
# entries of a buffer of whole numbers above which it is a table and no count
_MAX_COUNTS = 1024


def _refuse_complex(module: nn.Module) -> None:
    for name, tensor in module.named_parameters():
        if tensor.is_complex() and tensor.requires_grad:
            raise ModelError(
                f"the parameter {name!r} is complex ({tensor.dtype}); rows hold real numbers: "
                "train its real and imaginary parts (torch.view_as_real) as one parameter"
            )


def _convert_numbers(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert a module's floating-point tensors to a type, and complex ones to its precision."""

    def convert(tensor: Tensor) -> Tensor:
        if tensor.is_complex():
            return tensor.to(dtype.to_complex())
        if tensor.is_floating_point():
            return tensor.to(dtype)
        return tensor

    # Not `to(dtype)`, which would cut complex numbers to their real part.
    return module._apply(convert)


def _find_aliases(module: nn.Module) -> dict[str, str]:
    """Return the first name of each tensor that has several, by each of the others."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for path, part in module.named_modules():
        for name, tensor in [*part._parameters.items(), *part._buffers.items()]:
            if tensor is None:  # a layer without a bias, for example
                continue
            full = join_path(path, name)
            if first.setdefault(id(tensor), full) != full:
                aliases[full] = first[id(tensor)]
    return aliases


def copy_module(module: nn.Module) -> nn.Module:
    """Return a copy of a module that has the original's own frozen weights."""
    # What the memo of a deep copy holds already is not copied.
    frozen = {id(one): one for one in module.parameters() if not one.requires_grad}
    return copy_deeply(module, frozen)


@dataclass(frozen=True)
class Slot:
    """The position of one tensor of a module in a row."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int


def layer_of(name: str) -> str:
    """Return the path of a tensor's layer; for a parametrized one, of the tensor it replaces."""
    if "parametrizations." in name:
        return name.partition("parametrizations.")[0].removesuffix(".")
    return module_of(name)


def join_path(path: str, name: str) -> str:
    """Return the name of a tensor in a module from that in the layer at a path; "" is the module.

    Example:
        >>> join_path("0", "weight"), join_path("", "weight")
        ('0.weight', 'weight')
    """
    return f"{path}.{name}".removeprefix(".")


def module_of(name: str) -> str:
    """Return the path of the module that owns a tensor or a module of a name."""
    return name.rpartition(".")[0]


class Layout:
    """The positions of a module's parameters and running statistics in a row.

    Args:
        module: the module; it is copied, never changed.
        dtype: floating-point type of the rows.
        arguments: what becomes of an input before the module takes it.
        output: what becomes of what the module returns.

    Attributes:
        trainable: number of leading entries of a row that are trained.
        size: the length of a row.
        frozen: the parameters that are not trained, by name: of all clients alike, and in no row.
        inputs: names of the buffers that are set in every step and are no state; a submodule lists
            them in its class attribute `input_buffers` (the position in a simplex of models).
        whole: types of the buffers of whole numbers that are in a row, by name.
        draws: whether the module draws random numbers, in training (True) and in evaluation
            (False); what has not been tried may.
        train_module, eval_module: a copy of the module in training and in evaluation mode.
        original: the module as it was given.

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
        output: OutputConversion | None = None,
    ) -> None:
        self.dtype, self.arguments, self.original = dtype, arguments or InputConversion(), module
        self.output = output or OutputConversion()
        _refuse_complex(module)
        self.train_module = _convert_numbers(copy_deeply(module), dtype).train()
        if self.arguments != InputConversion():
            # Before the module's own hooks, which take the arguments of its `forward`.
            self.train_module.register_forward_pre_hook(
                self.arguments, with_kwargs=True, prepend=True
            )
        # A hook, so that engines see one tensor whatever the module returns.
        self.train_module.register_forward_hook(self.output)
        inputs = []
        for path, part in self.train_module.named_modules():
            for name in getattr(part, "input_buffers", ()):
                inputs.append(join_path(path, name))
        self.inputs = tuple(inputs)
        # Until a trial of the engine has shown what is drawn in training and in evaluation.
        self.draws = {True: True, False: True}
        # Two modules, because training and evaluation mode are state of a module; frozen weights
        # are shared.
        self.eval_module = copy_module(self.train_module).eval()
        self.slots: list[Slot] = []
        self.frozen: dict[str, Tensor] = {}
        self.whole: dict[str, torch.dtype] = {}
        position = 0
        for name, tensor in self.train_module.named_parameters():
            if tensor.requires_grad:
                position = self._add_slot(name, tensor, position)
            else:
                self.frozen[name] = tensor
        self.trainable = position
        # The state that is not trained lies behind the trained entries.
        for name, tensor in self.train_module.named_buffers():
            if name in self.inputs:
                continue
            if tensor.is_floating_point():
                position = self._add_slot(name, tensor, position)
            elif self._is_count(name, tensor):
                # A count, such as the number of batches seen, is averaged as a number and rounded
                # when used.
                self.whole[name] = tensor.dtype
                position = self._add_slot(name, tensor, position)
        # Trained entries come first, so that optimizers and gradients take a slice of a row.
        self.size = position
        self._aliases = _find_aliases(self.train_module)
        if not self.trainable:
            raise ModelError("the module has no trainable parameters; expected at least one")

    def _is_count(self, name: str, tensor: Tensor) -> bool:
        """Return whether a buffer of whole numbers is state, such as a count of batches.

        That is one number, or several that are equal at first. Others are constants: what is not
        saved with the module, tables of places, and numbers that the type of the rows does not
        hold.
        """
        owner = self.train_module.get_submodule(module_of(name))
        if name.rpartition(".")[2] in owner._non_persistent_buffers_set:
            return False
        if tensor.is_complex() or not 0 < tensor.numel() <= _MAX_COUNTS:
            return False
        # A table of places in a row would be averaged, and no place would be left in it.
        if not bool((tensor == tensor.flatten()[0]).all()):
            return False
        return torch.equal(tensor.to(self.dtype).to(tensor.dtype), tensor)

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
    def trained_slots(self) -> tuple[Slot, ...]:
        """The slots of trained parameters, with which a row begins."""
        return tuple(slot for slot in self.slots if slot.stop <= self.trainable)

    @functools.cached_property
    def state_slots(self) -> tuple[Slot, ...]:
        """The slots of the state that is not trained, with which a row ends."""
        return tuple(self.slots[len(self.trained_slots) :])

    @functools.cached_property
    def original_names(self) -> dict[str, tuple[str, ...]]:
        """The names of each slot's tensor in the original module: several where it is tied."""
        every: dict[int, list[str]] = {}
        for name, tensor in self.train_module.named_parameters(remove_duplicate=False):
            # A tied tensor has one slot and several names; a parametrized one is also known by its
            # layer's name.
            every.setdefault(id(tensor), []).append(name)
            while name.endswith(".original"):  # a parametrization of one tensor: the last first
                owner, _, rest = name.rpartition("parametrizations.")
                name = owner + rest.removesuffix(".original")
                every[id(tensor)].append(name)
            plain = name.replace("parametrizations.", "")
            if plain != name:
                every[id(tensor)].append(plain)
        names: dict[str, tuple[str, ...]] = {slot.name: (slot.name,) for slot in self.slots}
        for name, tensor in self.train_module.named_parameters():
            if name in names:
                names[name] = tuple(every[id(tensor)])
        return names

    def layer_tensors(self) -> dict[str, tuple[str, ...]]:
        """Return, by path, the tensors of the layers with trained parameters, in order.

        Example:
            >>> Layout(nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1))).layer_tensors()
            {'0': ('0.weight', '0.bias'), '2': ('2.weight', '2.bias')}
        """
        found: dict[str, tuple[str, ...]] = {}
        for slot in self.slots:
            path = layer_of(slot.name)
            # Trained tensors come first: a buffer counts where its layer has been found by then.
            if slot.stop <= self.trainable or path in found:
                found[path] = (*found.get(path, ()), slot.name)
        return found

    def normalization_tensors(self) -> tuple[str, ...]:
        """Return the tensors of normalization layers: parameters and running statistics.

        Example:
            >>> Layout(nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))).normalization_tensors()
            ('1.weight', '1.bias')
        """
        # `_NormBase` is the base of all batch and instance normalizations.
        kinds = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
        modules = self.train_module.named_modules()
        paths = {path for path, part in modules if isinstance(part, kinds)}
        return tuple(slot.name for slot in self.slots if layer_of(slot.name) in paths)

    @functools.cached_property
    def frozen_digest(self) -> str:
        """The digest of the frozen weights: names, shapes and values; "" where there are none."""
        if not self.frozen:
            return ""
        digest = hashlib.sha256()
        for name, tensor in self.frozen.items():
            # With name and shape: equal bytes in another order are other weights.
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
            digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def flatten_module(self, module: nn.Module) -> Float[Tensor, " params"]:
        """Return a module's tensors as one row; the module has this layout's structure."""
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        parts = []
        for slot in self.slots:
            if slot.name not in tensors:
                raise ModelError(
                    f"the module has no tensor {slot.name!r}; expected a module like the first one "
                    "made"
                )
            parts.append(tensors[slot.name].detach().reshape(-1).to(self.dtype))
        return torch.cat(parts)

    def split_rows(self, rows: Float[Tensor, "*batch params"]) -> dict[str, Tensor]:
        """Return each tensor as a view of a row, or of many rows with their leading axes."""
        found = {}
        for slot in self.slots:
            part = rows[..., slot.start : slot.stop]
            found[slot.name] = part.reshape((*rows.shape[:-1], *slot.shape))
        return found

    def join_tensors(self, tensors: Mapping[str, Tensor], *, trainable: bool) -> Tensor:
        """Join tensors into rows: the inverse of `split_rows` for one part of a row.

        Args:
            tensors: one for each slot of the part, with a leading axis of clients.
            trainable: whether the part is the trained one.
        """
        parts = []
        for slot in self.trained_slots if trainable else self.state_slots:
            tensor = tensors[slot.name]
            parts.append(tensor.reshape(len(tensor), -1))
        return torch.cat(parts, dim=-1)

    def zero_inputs(self, clients: int) -> dict[str, Tensor]:
        """Return the input buffers with the module's own values, for a number of clients."""
        named = dict(self.train_module.named_buffers())
        return {name: named[name].expand(clients, *named[name].shape) for name in self.inputs}

    def call_module(
        self, module: nn.Module, tensors: dict[str, Tensor], x: Float[Tensor, "..."]
    ) -> Any:
        """Run one of the two modules, or a copy, with given tensors.

        Args:
            module: the module.
            tensors: by name. New running statistics are written into them, or replace them.
            x: the inputs.
        """
        # By all names of a tied tensor: PyTorch's own way to tie loses the tensors of a layer that
        # stands in two places.
        given = dict(tensors)
        for name, first in self._aliases.items():
            if first in given:
                given[name] = given[first]
        outputs = functional_call(module, given, (x,), tie_weights=False)
        tensors |= {name: given[name] for name in tensors}
        return outputs

    def try_module(self, x: Num[Tensor, "samples *features"]) -> Any:
        """Return what the module, with its own values, returns in evaluation; nobody's stream."""
        with torch.no_grad(), KeyedDraws(torch.tensor(0, device=x.device)):
            return self.eval_module(x)

    def own_values(self) -> Float[Tensor, " params"]:
        """Return the values of the module that this layout is of, as a row."""
        return self.flatten_module(self.train_module)

    def unpack_state(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the untrained tensors of rows in the types that the module has, as copies."""
        state: dict[str, Tensor] = {}
        for slot in self.state_slots:
            value = tensors[slot.name]
            if slot.name in self.whole:
                # A count that was averaged is a fraction in a row.
                state[slot.name] = value.round().to(self.whole[slot.name])
            else:
                state[slot.name] = value.clone()
        return state

    def build_module(
        self, row: Float[Tensor, " params"], *, dtype: torch.dtype | None = None
    ) -> nn.Module:
        """Return a copy of the original module with a row's tensors, for evaluation on the CPU.

        What no row has (frozen weights that are one for all, constants) has this layout's values.

        Args:
            row: one model.
            dtype: floating-point type of the copy; the module's own when None.
        """
        module = copy_deeply(self.original).cpu()
        if dtype is not None:
            module = module.to(dtype)
        return fill_module(module.eval(), {**self.other_tensors(), **self.split_rows(row)})

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
                if value.is_floating_point() and not tensor.is_floating_point():
                    value = value.round()
                tensor.copy_(value)
    return module


def draw_initial_params(
    source: ModelFactory, layout: Layout, rng: Rng, client: int = EVERYONE, purpose: str = "init"
) -> Tensor:
    """Draw the first parameters of a model from the stream of `client`.

    A factory is called again; a module is copied, and its layers draw again, see `redraw_weights`.
    Frozen weights are no part of it: they stay those of the layout.
    """
    with rng.temporary_torch_seed(purpose, client):
        if isinstance(source, nn.Module):
            return layout.flatten_module(redraw_weights(source))
        return layout.flatten_module(source())


# ---------------------------------------------------------------- the papers' reference networks


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
    flat = 16 * pooled_side(height, 5, 5) * pooled_side(width, 5, 5)
    hidden = [nn.Linear(flat, 120), nn.ReLU()]
    if dropout:
        hidden.append(nn.Dropout(dropout))
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
    # Images of 8x8, such as the bundled digits, would be too small for two convolutions otherwise.
    pad = 1 if min(height, width) < 10 else 0
    flat = 32 * pooled_side(height, 3, 3, pad=pad) * pooled_side(width, 3, 3, pad=pad)
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
        kind: a name of `NETS`, an import path, or a model of transformers; see `NamedModel`.
        features: the shape of one input.
        outputs: classes, or regression targets.
        options: arguments, for an import path or a model of transformers.

    Raises:
        ConfigError: for an unknown name, or arguments that it does not take.
        ModelError: when the network cannot take inputs of that shape, or cannot be made.
    """
    if kind.startswith(pretrained.PREFIX):
        name = kind.removeprefix(pretrained.PREFIX)
        return pretrained.load_pretrained(name, outputs, options)
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


def _build_named_model(model: NamedModel, features: tuple[int, ...], outputs: int) -> nn.Module:
    """Build a network by name, with its adapter where it has one."""
    module = build_model(model.kind, features, outputs, model.options)
    if not model.adapter:
        return module
    return pretrained.attach_adapter(module, model.adapter)


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
    rest = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = {name: one for name, one in takes.items() if one.kind not in rest}
    if takes and rest[1] not in [one.kind for one in takes.values()]:
        for name in options:
            if name not in named:
                raise ConfigError(
                    f"model.options: {describe_unknown(f'argument of {kind}', name, named)}"
                )
    arguments = {name: value for name, value in known.items() if name in named}
    # A copy of the options: the model may change what it gets, and other clients get the same.
    arguments |= copy.deepcopy(dict(options))
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
            + RETURN_HINT * (made is None)
        )
    return made


def resolve_model(
    model: ModelSource, features: tuple[int, ...], outputs: int, parts: Sequence[InputPart] = ()
) -> Callable[[], nn.Module] | nn.Module:
    """Return the module or factory of a model given by name, module or factory.

    Args:
        model: what was given.
        features: the shape of one input.
        outputs: classes, or numbers of a target.
        parts: the tensors that an input is made of; empty where it is one.

    Raises:
        ConfigError: for an unknown name, or arguments that it does not take.
        ModelError: for a module that cannot be trained.
    """
    if isinstance(model, ModuleMaker):
        return model
    if isinstance(model, nn.Module):
        check_module(model, "the model")
        # What a lazy layer lacks is drawn when its shape is known; all other weights stay.
        if not list_lazy_tensors(model):
            return model
        return ModuleMaker(model, features, parts)
    if isinstance(model, str):
        model = NamedModel(model)
    if not isinstance(model, NamedModel):
        return ModuleMaker(model, features, parts)
    build = functools.partial(_build_named_model, model, features, outputs)
    maker = ModuleMaker(build, features, parts)
    _ = maker.template  # refused here where it cannot be made; to load one may take seconds
    return maker


def find_output_name(model: ModelSource, setting: str | int | None = None) -> str:
    """Return which entry of what a module returns is its output; "" where none is named.

    Args:
        model: what was given; a model by name may name its output.
        setting: `Settings.output`.

    Raises:
        ConfigError: when both name one, and not the same.
    """
    wanted = own = ""
    if setting is not None:
        wanted = str(setting)
    if isinstance(model, NamedModel):
        own = model.output
    if wanted and own and wanted != own:
        raise ConfigError(
            f"output is {wanted!r} in the settings and {own!r} in the model; give one of them"
        )
    return wanted or own


def find_adapter(model: ModelSource | None) -> pretrained.AdapterConfig | None:
    """Return the adapter of a model by name; None for others, and without one.

    Raises:
        ConfigError: when its settings are not known.
    """
    if not isinstance(model, NamedModel) or not model.adapter:
        return None
    return parse_settings(pretrained.AdapterConfig, dict(model.adapter), "model.adapter")


def custom_model_name(model: ModelSource) -> str:
    """Return a model's import path and arguments; "" for a bundled one, or one without a name."""
    if isinstance(model, str):
        model = NamedModel(model)
    if isinstance(model, NamedModel) and (":" in model.kind or model.adapter):
        return str(model)
    return ""


def is_bundled(model: ModelSource) -> bool:
    """Return whether a model is a bundled network, of which its name and settings say all."""
    return isinstance(model, str | NamedModel) and not custom_model_name(model)


def make_template(model: Callable[[], nn.Module] | nn.Module) -> nn.Module:
    """Return a module of the model, for its shapes and the frozen weights of all clients.

    See `ModuleMaker.template`: who changes it takes a copy.
    """
    if isinstance(model, nn.Module):
        return model
    if not isinstance(model, ModuleMaker):
        model = ModuleMaker(model, ())
    return model.template


def row_nbytes(params: Shaped[Tensor, "... params"]) -> int:
    """Return the size of one row in bytes, as it is sent."""
    return params.shape[-1] * params.element_size()
