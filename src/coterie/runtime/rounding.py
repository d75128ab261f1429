"""What rounding makes of a module's results: the module against itself.

One part of the check of the translation. How much rounding moves a result depends on the module:
PyTorch adds the gradient of a convolution's bias term by term over all places, a batch
normalization subtracts a mean from values that are close to it, and a ReLU at its edge opens or
shuts. So what rounding explains is measured: how far the untouched module is from itself in
float64, and from itself where its weights, or what its layers return, are a unit of the last place
away.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from coterie.models.given import copy_deeply
from coterie.runtime._plain import PlainModule, Values

# What rounding leaves of a quantity, as a share of its scale. Products of a few thousand terms lose
# about a hundred units of the last place (2^-23 of float32); float64 has six digits to spare, since
# an operation that is left out, or another constant, is never as small as 1e-10. Products in
# bfloat16 and TF32 have 8 and 11 digits of the base 2.
LIMITS = {torch.float32: 1e-5, torch.float64: 1e-10, "bf16": 5e-2, "tf32": 5e-3}
# Weights are moved by about two units of the last place of products to see what rounding does.
UNITS = {torch.float32: 2.0**-22, torch.float64: 2.0**-51, "bf16": 2.0**-8, "tf32": 2.0**-10}
# How much further an engine may be from the module than the module is from itself: each engine adds
# in an order of its own. Of 720 nets, of which 110 were refused without this measure, a factor of 2
# leaves 5 refused, and 4 none.
FACTOR = 8
# Above it a share of a quantity's scale is no rounding: PyTorch itself is wrong in that form.
_MOST = 0.1
# In float64 a module has another function where its outputs differ by more limits than these: one
# that asks for the type, as `torch.finfo(x.dtype).eps` does.
_FAR = 1000
# A copy in float64 has at most this many weights: 1 GiB.
_MANY_WEIGHTS = 1 << 27


def find_largest(values: Tensor) -> float:
    """Return the largest absolute value; NaN where one is, and 0.0 of no values."""
    return float(values.detach().abs().max()) if values.numel() else 0.0


def find_distance(one: Tensor, other: Tensor) -> float:
    """Return the largest difference of two tensors of one shape; infinity where one is NaN."""
    gap = one.detach().cpu().double() - other.detach().cpu().double()
    # Otherwise an infinity would become the largest number.
    return find_largest(gap.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=torch.inf))


def find_scales(values: Values) -> dict[str, float]:
    """Return the scale of each quantity: its largest entry, and a least one of some.

    That of a gradient is a tenth of the largest one's: where a normalization follows, that of a
    bias is 0, and only rounding is left of it. That of a loss or a score is 1: they are means,
    whose terms may be larger than they are.
    """
    sizes = {name: find_largest(value) for name, value in values.items()}
    slope = 0.1 * max((s for n, s in sizes.items() if n.startswith("gradient")), default=0.0)
    for name in sizes:
        least = 1e-30
        if name.startswith("gradient"):
            least = max(slope, least)
        elif "loss" in name or "score" in name:
            least = 1.0
        sizes[name] = max(sizes[name], least)
    return sizes


@dataclass
class Rounding:
    """How far the untouched module is from itself, by quantity.

    Attributes:
        sizes: the largest distance of each quantity so far, over clients and weights.
    """

    sizes: dict[str, float] = field(default_factory=dict)

    def explain(self, name: str) -> float:
        """Return how large a difference of a quantity rounding explains, beyond its limit."""
        return FACTOR * self.sizes.get(name, 0.0)

    def add(
        self, one: Sequence[Values], other: Sequence[Values], most: float | None = None
    ) -> None:
        """Keep the finite distances of two runs; `most`: those up to that share of the scale."""
        for a, b in zip(one, other, strict=True):
            scales = find_scales(a)
            for name in a.keys() & b.keys():
                size = find_distance(a[name], b[name])
                if math.isfinite(size) and (most is None or size <= most * scales[name]):
                    self.sizes[name] = max(self.sizes.get(name, 0.0), size)


Run = Callable[[PlainModule], list[Values]]
"""Runs a form of the module at given weights: the quantities of each client."""


class OtherForms:
    """The untouched module in float64, and in the order of memory in which it trains.

    Args:
        plain: the module.
        channels_last: whether what trains stores images with their channels last. PyTorch's own
            sums are others there: those of a batch normalization lose forty times as much.
    """

    def __init__(self, plain: PlainModule, channels_last: bool) -> None:
        self._plain, self._channels_last = plain, channels_last
        self._exact: PlainModule | None = None
        self._is_tried = False

    def measure(
        self, rounding: Rounding, found: Sequence[Values], run: Run, limit: float
    ) -> Iterator[None]:
        """Add how far the module is from itself in a form, the cheaper one first; yield after each.

        Args:
            rounding: what it is added to.
            found: what the module computes.
            run: computes the same with another form.
            limit: share of the scale that is rounding in any case.
        """
        if self._channels_last:
            rounding.add(found, run(_replace_module(self._plain, torch.channels_last)), _MOST)
            yield
        exact = self._run_exact(found, run, limit)
        if exact is not None:
            rounding.add(exact, found)
            yield
        # Last: a program may add a bias first, and round once for each product that follows.
        rounding.add(found, run(_disturb_layers(self._plain)))
        yield

    def _run_exact(self, found: Sequence[Values], run: Run, limit: float) -> list[Values] | None:
        """Return what the module computes in float64; None where it cannot, or is another one."""
        if not self._is_tried:
            self._is_tried, self._exact = True, _widen(self._plain)
        if self._exact is None:
            return None
        try:
            exact = run(self._exact)
        except Exception:  # a module may refuse in any way
            exact = None
        if exact is None or not _is_same_function(exact, found, _FAR * limit):
            self._exact = None
            return None
        return exact


def _is_same_function(exact: Sequence[Values], found: Sequence[Values], limit: float) -> bool:
    """Return whether outputs and losses, which no gate makes jump, are about the same."""
    for one, other in zip(exact, found, strict=True):
        for name in one:
            if "loss" in name or "outputs" in name:
                scale = max(1.0, find_largest(one[name]))
                if not find_distance(one[name], other[name]) <= limit * scale:
                    return False
    return True


def _widen(plain: PlainModule) -> PlainModule | None:
    """Return a module in float64; None where there is nothing wider, or too much of it."""
    weights = sum(one.numel() for one in plain.module.parameters())
    if plain.dtype == torch.float64 or weights > _MANY_WEIGHTS:
        return None
    try:
        return _replace_module(plain, torch.float64)
    except Exception:  # a device without float64, or a module that refuses it
        return None


def _disturb_layers(plain: PlainModule) -> PlainModule:
    """Return the module with what each layer returns moved by a unit of the last place."""
    module, stream = copy_deeply(plain.module), torch.Generator().manual_seed(0)
    unit = UNITS[plain.roundoff]

    def disturb(layer: nn.Module, inputs: object, output: object) -> object:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return output
        noise = 2 * torch.rand(output.shape, generator=stream).to(output) - 1
        return output + unit * noise * output.detach()

    for layer in module.modules():
        if layer is not module and not list(layer.children()):
            layer.register_forward_hook(disturb)
    return replace(plain, module=module)


def _replace_module(plain: PlainModule, form: torch.dtype | torch.memory_format) -> PlainModule:
    """Return the module in float64, or with its weights in another order in memory."""
    module = copy_deeply(plain.module)
    if isinstance(form, torch.dtype):
        return replace(plain, module=module.to(form), dtype=form, precision="full")
    for one in module.parameters():
        if one.ndim == 4:
            one.data = one.data.contiguous(memory_format=form)
    return replace(plain, module=module)
