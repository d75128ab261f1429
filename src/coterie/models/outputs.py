"""What a module returns, as the one tensor that losses and metrics take."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from coterie.errors import ModelError


@dataclass(frozen=True)
class OutputConversion:
    """How what `forward` returns becomes one tensor: a hook after `forward`.

    A tensor is taken as it is. Of an object, a mapping or a sequence one entry is taken: the named
    one; without a name `logits`, or the only tensor.

    Args:
        name: an attribute, a key, or the place in a sequence; "" for none.

    Example:
        >>> import torch
        >>> found = (torch.zeros(2, 3), torch.ones(2, 8))
        >>> OutputConversion("1")(None, (), found).shape
        torch.Size([2, 8])
    """

    name: str = ""

    def __call__(self, module: Any, args: Any, returned: Any) -> Tensor:
        """Return the output.

        Raises:
            ModelError: when nothing, or more than one thing, may be the output.
        """
        # A module may return more than its output in training only.
        found = returned
        if not isinstance(found, Tensor):
            found = self._select_entry(returned)
        if not found.is_floating_point() or found.ndim == 0:
            raise ModelError(
                f"the output of the module is a tensor of {found.dtype} and shape "
                f"{tuple(found.shape)}; expected floating-point numbers with a row a sample"
            )
        return found

    def _select_entry(self, returned: Any) -> Tensor:
        entries = _list_entries(returned)
        if returned is None:
            raise ModelError(
                "the module's forward returned None; expected its output, a tensor: is a `return` "
                "missing?"
            )
        tensors = [name for name, value in entries.items() if isinstance(value, Tensor)]
        wanted = self.name
        # A named tuple has names and places.
        if wanted.isdecimal() and isinstance(returned, tuple) and wanted not in tensors:
            wanted = dict(enumerate(entries)).get(int(wanted), wanted)
        if not wanted and "logits" in tensors:
            wanted = "logits"
        if not wanted and len(tensors) == 1:
            wanted = tensors[0]
        if wanted in tensors:
            return entries[wanted]
        kind = type(returned).__name__
        if not tensors:
            raise ModelError(
                f"the module's forward returned a {kind} without a tensor in it; expected its "
                "output, a tensor, or a dict, a tuple or an object of which one entry is the output"
            )
        listed = ", ".join(f"{name!r} {tuple(entries[name].shape)}" for name in tensors[:8])
        if wanted:
            raise ModelError(
                f"output is {wanted!r}; the module's forward returned a {kind} whose tensors are "
                f"{listed}: name one of them"
            )
        raise ModelError(
            f"the module's forward returned a {kind} with the tensors {listed}; name the one that "
            f'is its output: output = "{tensors[0]}"'
        )


def _list_entries(returned: Any) -> dict[str, Any]:
    """Return the entries of what a module returned by name, or by place."""
    if isinstance(returned, Mapping):
        return {str(name): value for name, value in returned.items()}
    fields = getattr(returned, "_fields", None)
    if isinstance(returned, Sequence) and not isinstance(returned, str | bytes):
        # A named tuple's entries go by name as well; the names are listed.
        return dict(zip(fields or map(str, range(len(returned))), returned, strict=True))
    # of a dataclass or another object: its attributes
    found = dict(getattr(returned, "__dict__", {}))
    logits = getattr(returned, "logits", None)  # a property is in no `__dict__`
    if logits is not None:
        found = {"logits": logits, **found}
    return found
