"""Modules of simple layers: stride-1 convolutions, max-pooling, linear layers and activations.

Their programs compile in a few seconds, and PyTorch runs them over many clients at once.
"""

from collections.abc import Sequence
from typing import Any

LARGE = 1_000_000
"""Numbers of a model above which passing over it for a few samples takes most of the time."""

_OPERATIONS = {
    "relu", "leaky_relu", "tanh", "addmm", "mm", "mul", "view", "_unsafe_view", "t", "transpose",
    "permute", "expand",
    "unsqueeze", "squeeze", "clone", "detach", "alias",
}  # fmt: skip


def is_simple(name: str, args: Sequence[Any]) -> bool:
    """Return whether one of PyTorch's operations is part of a simple layer's forward pass.

    Args:
        name: of the operation.
        args: its arguments, of which the tensors do not matter.
    """
    if name == "convolution":
        # Behind the input, the weights and the bias.
        stride, _padding, dilation, transposed, _output_padding, groups = args[3:9]
        return {*stride, *dilation, groups} == {1} and not transposed
    if name == "max_pool2d_with_indices":
        return separate_windows(args[1:]) is not None
    return name in _OPERATIONS


def separate_windows(options: Sequence[Any]) -> tuple[int, int] | None:
    """Return the window size of a max-pooling whose windows neither overlap nor overhang, or None.

    Args:
        options: of the pooling, from the size of its windows on.
    """
    # Options at the end may be left out.
    stride, padding, dilation, ceil = (*options[1:], *[None] * 4)[:4]
    high, wide = options[0][0], options[0][-1]
    if stride and (stride[0], stride[-1]) != (high, wide):
        return None
    if ceil or any(padding or []) or {*(dilation or [1])} != {1}:
        return None
    return high, wide
