"""Optimizers like torch.optim's by import path, on the loop engine's flat vector.

A step on the vector has to be what steps on the tensors in it would be, so an optimizer must treat
every entry alone.
"""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from coterie._util.importing import import_object
from coterie.errors import ConfigError, first_line
from coterie.rng import Rng

# Of the trial below: several steps, since an optimizer's state acts from the second one on.
_STEPS, _RATE = 4, 0.01


def make_custom_optimizer(
    path: str, options: Mapping[str, Any], lr: float, parameters: Sequence[nn.Parameter]
) -> torch.optim.Optimizer:
    """Make an optimizer.

    Args:
        path: "package.module:Class", a class like those of torch.optim.
        options: its arguments other than `lr`.
        lr: learning rate.
        parameters: what it changes.

    Raises:
        ConfigError: when there is no such class, or it does not take these arguments.
    """
    what = f"optimizer {path!r}"
    kind = import_object(path, what)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise ConfigError(
            f"{what} is {kind!r}; expected a class that extends torch.optim.Optimizer"
        )
    arguments = dict(options)
    for key, value in options.items():
        # Study files have lists where torch.optim has tuples, such as betas.
        if isinstance(value, list):
            arguments[key] = tuple(value)
    try:
        return kind(list(parameters), lr=lr, **arguments)  # type: ignore[call-arg]
    # A foreign class may raise anything.
    except Exception as error:
        raise ConfigError(
            f"{what} cannot be made with lr and optimizer_options = {dict(options)}: "
            f"{first_line(error)}"
        ) from error


def check_custom_optimizer(path: str, options: Mapping[str, Any]) -> None:
    """Check that an optimizer needs no closure and treats every entry alone, on a few numbers.

    Raises:
        ConfigError: when it does not, or cannot be made.
    """
    try:
        text = json.dumps(dict(options), sort_keys=True)
    except TypeError as error:
        said = f"optimizer_options = {dict(options)} cannot be written to a study file"
        raise ConfigError(
            f"{said} ({error}); expected numbers, texts, true or false, and lists of them"
        ) from error
    # The text is a key of the cache, which a mapping cannot be.
    _check_elementwise(path, text)


@lru_cache(maxsize=64)
def _check_elementwise(path: str, options: str) -> None:
    """Let it step on a vector, and on the matrix and the two vectors that lie in it."""
    start, *gradients = torch.from_numpy(
        Rng(0).generator("optimizer.check").normal(size=(1 + _STEPS, 12))
    )
    # The parts that are compared have gradients of very different size: an optimizer that uses the
    # norm of a tensor steps otherwise on the parts than on the whole.
    scale = torch.tensor([1.0] * 6 + [100.0] * 3 + [0.01] * 3, dtype=torch.float64)
    steps = [gradient * scale for gradient in gradients]
    arguments = json.loads(options)
    whole = _run_steps(path, arguments, start, steps, ((12,),))
    parts = _run_steps(path, arguments, start, steps, ((2, 3), (3,), (3,)))
    # In float64 equal steps differ by rounding alone, which is far below this.
    if not torch.allclose(whole, parts, rtol=1e-9, atol=1e-12):
        raise ConfigError(
            f"optimizer {path!r} does not treat every parameter alone: a step on a vector differs "
            "from steps on its parts; expected an elementwise optimizer, such as torch.optim:NAdam"
        )


def _run_steps(
    path: str,
    options: Mapping[str, Any],
    start: Tensor,
    gradients: Sequence[Tensor],
    shapes: Sequence[tuple[int, ...]],
) -> Tensor:
    """Return a vector after some steps, cut into tensors of some shapes."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    pieces = zip(start.clone().split(sizes), shapes, strict=True)
    parts = [nn.Parameter(piece.reshape(shape)) for piece, shape in pieces]
    optimizer = make_custom_optimizer(path, options, _RATE, parts)
    for gradient in gradients:
        for part, one in zip(parts, gradient.split(sizes), strict=True):
            part.grad = one.reshape(part.shape).clone()
        try:
            optimizer.step()
        except Exception as error:
            raise ConfigError(
                f"optimizer {path!r} cannot take a step from gradients alone "
                f"({first_line(error)}); expected one that needs no closure, and takes dense "
                "gradients of any shape"
            ) from error
    return torch.cat([part.detach().reshape(-1) for part in parts])
