"""The update rules of optimizers on a tile of numbers, for every kernel that moves parameters.

Functions here are compiled by Triton from their source. Each follows `engine.optim.RowOptimizer`
operation by operation; launched with `LAUNCH` SGD ends with the same bits.
"""

from typing import Any

import triton
import triton.language as tl

LAUNCH: dict[str, Any] = {"enable_fp_fusion": False}
"""Options of every launch: a product is rounded before it is added, as by PyTorch's operations."""


@triton.jit
def move_by_sgd(
    w, g, velocity, rate, keep, momentum, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr
):
    """Return parameters and momentum after a step; `keep` is 1 minus the dampening."""
    if MOMENTUM:
        velocity = velocity * momentum + g * keep
        if NESTEROV:
            g = g + velocity * momentum
        else:
            g = velocity
    return w - g * rate, velocity


@triton.jit
def move_by_adam(w, g, mean, square, step, root, share, kept, added, eps, NEAR: tl.constexpr):
    """Return parameters and moments after a step.

    Args:
        w: parameters.
        g: their gradient.
        mean: of gradients.
        square: mean of their squares.
        step: lr / (1 - beta1^t).
        root: the square root of 1 - beta2^t.
        share: 1 - beta1.
        kept: beta2.
        added: 1 - beta2.
        eps: added to the root of the mean square.
        NEAR: whether 1 - beta1 is below a half: PyTorch's `lerp` starts at the nearer end.
    """
    if NEAR:
        mean = mean + share * (g - mean)
    else:
        mean = g - (g - mean) * (1 - share)
    square = square * kept + added * (g * g)
    # The usual root and quotient of Triton are approximations.
    scale = tl.div_rn(tl.sqrt_rn(square), root) + eps
    return w - tl.div_rn(mean, scale) * step, mean, square


@triton.jit
def move_tile(
    row, anchor, first, second, place, inside, g, rate, keep, shrink, decay, prox, momentum, share,
    kept, added, eps, ADAM: tl.constexpr, SHRINK: tl.constexpr, DECAY: tl.constexpr,
    PROX: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    """Let the parameters at some places of a row take a step, with their moments."""
    # `prox` times the distance to the anchor is added to the gradient `g`; `rate`, `keep` and
    # `shrink` are those of `kernels.update.compute_step_numbers`; what follows is of the rules.
    w = tl.load(row + place, mask=inside)
    if PROX:
        g = g + (w - tl.load(anchor + place, mask=inside)) * prox
    if SHRINK:
        w = w * shrink
    if DECAY:
        g = g + w * decay
    if ADAM:
        mean = tl.load(first + place, mask=inside)
        square = tl.load(second + place, mask=inside)
        w, mean, square = move_by_adam(  # type: ignore[misc]
            w, g, mean, square, rate, keep, share, kept, added, eps, NEAR
        )
        tl.store(first + place, mean, mask=inside)
        tl.store(second + place, square, mask=inside)
    else:
        velocity = g
        if MOMENTUM:
            velocity = tl.load(first + place, mask=inside)
        w, velocity = move_by_sgd(  # type: ignore[misc]
            w, g, velocity, rate, keep, momentum, MOMENTUM, NESTEROV
        )
        if MOMENTUM:
            tl.store(first + place, velocity, mask=inside)
    tl.store(row + place, w, mask=inside)
