"""A module that a user gives: why it is refused, what it takes, and the shapes of lazy layers."""

import copy
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import (
    UninitializedBuffer,
    UninitializedTensorMixin,  # type: ignore[attr-defined]
)
from torch.nn.utils import parametrize
from torch.nn.utils.weight_norm import WeightNorm

from coterie.data.source import InputPart
from coterie.errors import RETURN_HINT, ModelError
from coterie.rng import Rng

ModuleType = TypeVar("ModuleType", bound=nn.Module)


def check_module(module: object, what: str) -> nn.Module:
    """Return a module that rows can be made of.

    Args:
        module: what was given, or what a factory returned.
        what: what it is, for messages.

    Raises:
        ModelError: when it is no module, or one whose tensors cannot be exchanged for others.
    """
    if not isinstance(module, nn.Module):
        raise ModelError(
            f"the model factory returned {type(module).__name__}; expected a torch.nn.Module"
            + RETURN_HINT * (module is None)
        )
    # Refused here, where the error can name the layer and say what to do.
    for path, part in module.named_modules():
        where = what
        if path:
            where = f"{what} has a layer, {path!r}, that"
        if isinstance(part, torch.jit.ScriptModule):
            raise ModelError(
                f"{where} is TorchScript, whose weights cannot be exchanged for those of a client; "
                "give the module that was scripted or traced"
            )
        if hasattr(part, "_orig_mod"):
            raise ModelError(
                f"{where} was compiled by torch.compile; give the module that was compiled: "
                "engines compile it themselves"
            )
        computed = _computed_tensors(part)
        if computed:
            raise ModelError(
                f"{where} computes its {computed[0]!r} from other tensors in a hook "
                "(torch.nn.utils.weight_norm, spectral_norm or prune), and cannot be copied; use "
                "torch.nn.utils.parametrizations.weight_norm or spectral_norm, or make the pruning "
                "permanent with prune.remove"
            )
    for name, parameter in module.named_parameters():
        if parameter.is_meta:
            raise ModelError(
                f"{what} has no values for {name!r}, which is on the device 'meta'; load or draw "
                "its weights first"
            )
        if _has_gradient_hook(parameter):
            raise ModelError(
                f"{what} has a hook on the gradient of {name!r} (Tensor.register_hook), which no "
                "copy of a module keeps, PyTorch's neither; change the gradient in forward, such "
                "as weight * mask + (weight * (1 - mask)).detach(), or take the hook away"
            )
    if set(map(id, module.parameters())) != {id(one) for _, one in module.named_parameters()}:
        raise ModelError(
            f"{what} has other parameters() than named_parameters(), so that it is not clear which "
            "are trained; take the override away, and freeze the others by requires_grad_(False)"
        )
    _warn_of_unregistered_layers(module)
    return module


def _warn_of_unregistered_layers(module: nn.Module) -> None:
    """Warn of a layer in a list or a table, which PyTorch neither trains nor stores."""
    known = set(map(id, module.modules()))
    for path, part in module.named_modules():
        if type(part).__module__.startswith("coterie."):
            continue  # layers that are made here hold prototypes so
        for name, value in vars(part).items():
            # `_modules` and the like are tables of what is registered.
            values = list(value.values()) if isinstance(value, dict) else value
            if not isinstance(values, list | tuple):
                continue
            for one in values:
                if not isinstance(one, nn.Module) or id(one) in known:
                    continue
                if any(tensor.requires_grad for tensor in one.parameters()):
                    where = f"{path}.{name}" if path else name
                    warnings.warn(
                        f"the module has a {type(one).__name__} in {where!r}, a "
                        f"{type(value).__name__}, where PyTorch neither trains nor stores it; use "
                        "nn.ModuleList or nn.ModuleDict, or freeze it if that is meant",
                        stacklevel=4,
                    )
                    return


def _has_gradient_hook(parameter: Tensor) -> bool:
    """Whether a function changes or reads a parameter's gradient; such hooks are no module's."""
    return bool(parameter._backward_hooks) or bool(
        getattr(parameter, "_post_accumulate_grad_hooks", None)
    )


def _computed_tensors(part: nn.Module) -> list[str]:
    """Return the attributes of a layer that hooks compute and that no deep copy can follow."""
    named = [hook.name for hook in part._forward_pre_hooks.values() if isinstance(hook, WeightNorm)]
    for name, value in vars(part).items():
        # What autograd computed is no leaf: `copy.deepcopy` refuses it.
        if isinstance(value, Tensor) and not value.is_leaf:
            named.append(name)
    return named


def list_lazy_tensors(module: nn.Module) -> list[str]:
    """Return the names of the parameters and buffers that have no shape yet."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return [name for name, tensor in tensors if isinstance(tensor, UninitializedTensorMixin)]


def _copy_lazy_module(module: nn.Module) -> nn.Module:
    """Return a copy of a module, some of whose tensors have no shape yet."""
    memo: dict[int, Any] = {}
    for buffer in module.buffers():
        # PyTorch copies lazy parameters, and has no copy of lazy buffers (up to 2.13).
        if isinstance(buffer, UninitializedBuffer):
            made = UninitializedBuffer(
                device=buffer.device,  # type: ignore[call-arg]
                dtype=buffer.dtype,  # type: ignore[call-arg]
            )
            # `copy.deepcopy` takes what its memo has for a copy that was made already.
            memo[id(buffer)] = made
    return copy_deeply(module, memo)


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
        if not self.parts and self.whole:
            return (args[0].long(), *args[1:]), kwargs
        if not self.parts:
            return args, kwargs
        given, named, start = [], dict(kwargs), 0
        for part in self.parts:
            stop = start + math.prod(part.shape)
            # A part without axes is one number a sample.
            value = args[0][:, start:stop].unflatten(1, part.shape or (1,))
            if not part.shape:
                value = value.squeeze(1)
            if part.whole:
                value = value.to(torch.int64)
            start = stop
            if part.name:
                named[part.name] = value
            else:
                given.append(value)
        return tuple(given), named


class ModuleMaker:
    """Makes the modules of a model: a factory, or a module whose lazy layers have no weights yet.

    Args:
        source: the factory or the module.
        features: the shape of one input.
        parts: the tensors that an input is made of; empty where it is one.
    """

    def __init__(
        self,
        source: Callable[[], nn.Module] | nn.Module,
        features: tuple[int, ...],
        parts: Sequence[InputPart] = (),
    ) -> None:
        self.source, self.features, self.parts = source, features, tuple(parts)

    def __call__(self) -> nn.Module:
        """Return a module whose tensors all have values; lazy layers draw theirs here.

        Raises:
            ModelError: when the source makes no module that can be trained.
        """
        if isinstance(self.source, nn.Module):
            module = _copy_lazy_module(self.source)
        else:
            module = check_module(self.source(), "what the model factory returned")
        lazy = list_lazy_tensors(module)
        if not lazy:
            return module
        return self._materialize(module, lazy)

    @functools.cached_property
    def template(self) -> nn.Module:
        """One module of the model for its shapes and frozen weights, made once; never changed.

        It has a stream of its own, the same in every run and on every machine.
        """
        with Rng(0).temporary_torch_seed("template"):
            return self()

    def _materialize(self, module: nn.Module, lazy: list[str]) -> nn.Module:
        """Give lazy layers their shapes by a forward pass of zeros, in evaluation."""
        was_training, errors = module.training, []
        convert = InputConversion(self.parts)
        with torch.no_grad():
            # Numbers first; embeddings take whole numbers alone.
            for dtype in (torch.get_default_dtype(), torch.int64):
                # Two samples: one would do, but not for every layer.
                args, named = convert(module, (torch.zeros(2, *self.features, dtype=dtype),), {})
                try:
                    # In evaluation, so that the zeros reach no running statistics.
                    module.eval()(*args, **named)
                    break
                except (RuntimeError, ValueError, TypeError, IndexError) as error:
                    errors.append(error)
        left = list_lazy_tensors(module)
        if left:
            reason = ""
            if errors:
                reason = f" ({' '.join(str(errors[0]).split()):.200})"
            raise ModelError(
                f"the lazy layers of the module, such as {left[0]!r}, got no shape from a forward "
                f"pass of inputs of shape {self.features}{reason}; run the module once on such an "
                "input, or use layers with sizes"
            )
        return module.train(was_training)


def copy_deeply(module: ModuleType, memo: dict[int, Any] | None = None) -> ModuleType:
    """Return a deep copy of a module; see `copy.deepcopy`.

    A recurrent layer lists its weights a second time. The list of a parametrized one has what
    autograd computed, which `copy.deepcopy` refuses: it is computed again, without gradients.
    """
    with torch.no_grad():
        for part in module.modules():
            if isinstance(part, nn.RNNBase) and parametrize.is_parametrized(part):
                part._flat_weights = [getattr(part, name) for name in part._flat_weights_names]
        try:
            return copy.deepcopy(module, memo)
        except TypeError as error:  # of a lock, a file or a generator, says Python
            raise ModelError(
                f"the module cannot be copied ({error}), and each client trains a copy: keep what "
                "cannot be copied outside of the module, or give the class a __deepcopy__"
            ) from error


def redraw_weights(module: nn.Module) -> nn.Module:
    """Return a copy of a module whose layers have drawn their weights again, in order.

    A layer whose parameters are frozen keeps its buffers: the statistics of a pretrained
    normalization belong to its weights, which stay too.
    """
    fresh = copy_deeply(module)
    for _, reset in _iterate_resets(fresh):
        reset()
    for name, given in module.named_modules():
        own = list(given.parameters(recurse=False))
        if own and not any(tensor.requires_grad for tensor in own):
            part = fresh.get_submodule(name)
            for buffer, value in zip(part.buffers(False), given.buffers(False), strict=True):
                buffer.copy_(value)
    return fresh


def list_kept_tensors(module: nn.Module) -> list[str]:
    """Return the trained parameters that `redraw_weights` leaves as they are."""
    drawn = set()
    for part, _ in _iterate_resets(module):
        drawn |= set(map(id, part.parameters()))
    named = module.named_parameters()
    return [name for name, t in named if t.requires_grad and id(t) not in drawn]


def _iterate_resets(module: nn.Module) -> Iterator[tuple[nn.Module, Callable[[], object]]]:
    """Give each layer that can draw its weights, and how."""
    for part in module.modules():
        # nn.MultiheadAttention and nn.Transformer have the second name.
        for name in ("reset_parameters", "_reset_parameters"):
            reset = getattr(part, name, None)
            if callable(reset):
                yield part, reset
                break
