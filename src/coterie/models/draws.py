"""Random operations of any module as functions of a key.

A module draws where it likes: in dropout layers, inside attention, with `torch.rand_like` in its
`forward`. All of these are a few operations of PyTorch below autograd. `KeyedDraws` computes them
from a key, the operation's number within the forward pass and the entry, so that draws do not
depend on which clients are hosted, on the engine, or on the order of work.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from coterie.errors import ModelError

KEY = "key of draws"
"""Name of a forward pass's key among input buffers; no buffer can have it, as it has blanks."""

_BITS = (1 << 53) - 1  # 53 random bits, as many as a double has digits


class UnkeyedDrawError(RuntimeError):
    """A random operation that cannot be computed from keys here."""

    def __init__(self, name: str) -> None:
        super().__init__(f"it draws random numbers of its own ({name})")


def splitmix(z: Tensor) -> Tensor:
    """Return 64 mixed bits of each integer: SplitMix64 (Steele, Lea & Flood 2014), wrapping."""
    # The unsigned constants of SplitMix64 as int64, which wraps alike. `>>` repeats the sign bit of
    # int64; the masks cut the copies off.
    z = z * -7046029254386353131
    # In place, since a new tensor for each operation takes several times as long.
    z.bitwise_xor_((z >> 30).bitwise_and_((1 << 34) - 1)).mul_(-4658895280553007687)
    z.bitwise_xor_((z >> 27).bitwise_and_((1 << 37) - 1)).mul_(-7723592293110705685)
    return z.bitwise_xor_((z >> 31).bitwise_and_((1 << 33) - 1))


@functools.cache
def is_random(func: Any) -> bool:
    """Return whether one of PyTorch's operations draws random numbers.

    Fused attention and recurrent kernels, which may draw for their dropout, are not among them:
    with a dropout above 0, PyTorch computes them by simpler operations on a CPU.
    """
    return is_keyed(func) or any(one.name == "generator" for one in func._schema.arguments)


@functools.cache
def is_keyed(func: Any) -> bool:
    """Return whether `KeyedDraws` has a way of its own to compute a random operation."""
    return _name(func) in _DRAWS


@functools.cache
def _name(func: Any) -> str:
    """Return the name of an operation; to read its schema takes longer than to run it."""
    return func._schema.name.removeprefix("aten::")


@functools.cache
def _arguments(func: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the names of an operation's arguments, and their defaults."""
    given: Given = {}
    for argument in func._schema.arguments:
        # Default types are numbers in a schema.
        if argument.has_default_value() and argument.name != "dtype":
            given[argument.name] = argument.default_value
    return tuple(argument.name for argument in func._schema.arguments), given


class DispatchMode(TorchDispatchMode):
    """A mode under which nothing is compiled: PyTorch need not load its compiler (a second)."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class RefuseDraws(DispatchMode):
    """While active, a random operation is an error: a backward pass must not draw.

    `torch.utils.checkpoint` computes layers again in the backward pass. It is unknown which of the
    forward pass's draws are meant, and the gradient would be of other ones.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation, unless it is random."""
        if is_random(func):
            raise ModelError(
                f"the model draws random numbers again in its backward pass ({_name(func)}), as "
                "with torch.utils.checkpoint: the gradient would be of other ones than the "
                "outputs; switch checkpointing off, or keep what draws outside of it"
            )
        return func(*args, **(kwargs or {}))


class KeyedDraws(DispatchMode):
    """While active, random operations are functions of keys.

    Args:
        keys: a key; or one for each of many models, where `torch.func.vmap` runs them at once with
            `randomness="different"`. Then results have a leading axis of models.
        samples: with a key for each of many models: how many samples each has, where all of them
            lie one after another along the first axis; see `engine._client_axis`. None where models
            have an axis of their own.

    Attributes:
        number: of the last random operation since the mode was made.
        model: with `samples`: the model that runs alone now; None for all.
        shapes: of the draws so far, without the axis of models.

    Example:
        >>> with KeyedDraws(torch.tensor(7)):
        ...     first = torch.rand(3)
        >>> with KeyedDraws(torch.tensor(7)):
        ...     print(torch.equal(first, torch.rand(3)), torch.equal(first, torch.rand(3)))
        True False
    """

    def __init__(self, keys: Int[Tensor, "*models"], samples: int | None = None) -> None:
        super().__init__()
        self._all_keys, self.samples, self.number = keys, samples, 0
        self.model: int | None = None
        self.shapes: list[tuple[int, ...]] = []

    @property
    def keys(self) -> Int[Tensor, "*models"]:
        """The keys of what is drawn now."""
        return self._all_keys if self.model is None else self._all_keys[self.model]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation."""
        kwargs = kwargs or {}
        if not is_random(func):
            return func(*args, **kwargs)
        return self.draw(func, args, kwargs)

    def draw(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Compute a random operation; one that writes in place writes into its first argument."""
        found = self.compute(func, args, kwargs)
        if _name(func).endswith("_"):
            return args[0].copy_(found)
        return found

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of a random operation, also of one that writes it in place.

        Raises:
            UnkeyedDrawError: for an operation that is not known here, of many models at once.
        """
        name = _name(func)
        self.number += 1
        if is_keyed(func) and not (name in _OF_ONE_MODEL and self.keys.ndim):
            return _DRAWS[name](self, _read_arguments(func, args, kwargs))
        if self.keys.ndim:
            raise UnkeyedDrawError(name)
        # A rare distribution: PyTorch's own draw, by a generator of the key.
        device = next((a.device for a in args if isinstance(a, Tensor)), torch.device("cpu"))
        # A seed is never negative: the sign bit of the key is cut off.
        seed = int(splitmix(self.keys + self.number)) & ((1 << 63) - 1)
        generator = torch.Generator(device).manual_seed(seed)
        return func(*args, **{**kwargs, "generator": generator})

    # ------------------------------------------------------------------ draws

    def bits(self, shape: tuple[int, ...]) -> Int[Tensor, "..."]:
        """Return 64 random bits for each entry of a shape."""
        own = tuple(shape)
        # The number goes into the key before it is mixed, so that operations do not share draws.
        start = splitmix(self.keys + self.number)
        if self.keys.ndim:
            own, start = self._own_shape(own), start[:, None]
        self.shapes.append(own)
        # As an operation, since the mode may be active in the middle of a call of PyTorch.
        place = torch.ops.aten.arange.default(math.prod(own), device=self.keys.device)
        return splitmix(start + place).reshape(shape)

    def _own_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the part of a shape that each of many models has."""
        models = len(self.keys)
        if self.samples is None and shape and shape[0] == models:
            return shape[1:]
        # The first axis may also hold other axes of each sample, such as heads.
        if self.samples is not None and shape and shape[0] % (models * self.samples) == 0:
            return (shape[0] // models, *shape[1:])
        raise UnkeyedDrawError("one draw for all clients")

    def keep(self, shape: tuple[int, ...], drop: float) -> Tensor:
        """Return which entries stay, where each is dropped with a probability."""
        # Integers on both sides: 53 random bits against the probability in units of 2^-53.
        return self.bits(shape).bitwise_and_(_BITS) >= int(drop * (1 << 53))

    def uniform(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return numbers of [0, 1), as many different ones as the type can hold."""
        digits = 24  # of the significands of float32, and of float64
        if dtype == torch.float64:
            digits = 53
        return (self.bits(shape) & ((1 << digits) - 1)).to(dtype) * 2.0**-digits

    def open_uniform(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return numbers of (0, 1], whose logarithms are finite."""
        return 1 - self.uniform(shape, dtype)

    def normal(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return standard normal numbers, by the Box-Muller transform."""
        # Two uniform numbers of one draw: float32 holds 24 bits of each.
        digits = 24
        if dtype == torch.float64:
            digits = 31
        # 31 and not 53: both numbers come from one draw of 64 bits, and must share none.
        mask, bits = (1 << digits) - 1, self.bits(shape)
        # Of (0, 1]: the logarithm of 0 would be infinite.
        first = ((bits & mask) + 1).to(dtype) * 2.0**-digits
        angle = ((bits >> 32) & mask).to(dtype) * (2 * math.pi * 2.0**-digits)
        return (-2 * first.log()).sqrt() * angle.cos()

    def whole(self, shape: tuple[int, ...], low: int, high: int) -> Int[Tensor, "..."]:
        """Return whole numbers of [low, high)."""
        # The sign is cut off; 63 bits leave no visible preference for small numbers.
        return low + (self.bits(shape) & ((1 << 63) - 1)) % (high - low)


Given = dict[str, Any]


def _read_arguments(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Given:
    """Return the arguments of a call by name; PyTorch leaves out what equals a default."""
    names, defaults = _arguments(func)
    return defaults | dict(zip(names, args, strict=False)) | dict(kwargs)


def _dtype(given: Given, default: torch.dtype) -> torch.dtype:
    return given.get("dtype") or default


def _draw_dropout(draws: KeyedDraws, given: Given) -> tuple[Tensor, Tensor]:
    x, drop = given["input"], given["p"]
    if given["train"] is False:
        # Nothing is drawn: the next operation gets the number, as in a module without this one.
        draws.number -= 1
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    keep = draws.keep(tuple(x.shape), drop)
    if drop == 1:
        return x * 0, keep
    return x * keep / (1 - drop), keep


def _draw_bernoulli(draws: KeyedDraws, given: Given) -> Tensor:
    x = given["self"]
    share = given.get("p", x)
    if isinstance(share, Tensor):
        return (draws.uniform(tuple(x.shape), share.dtype) < share).to(x.dtype)
    return draws.keep(tuple(x.shape), 1 - share).to(x.dtype)


def _draw_uniform(draws: KeyedDraws, given: Given) -> Tensor:
    x, low, high = given["self"], given["from"], given["to"]
    return draws.uniform(tuple(x.shape), x.dtype) * (high - low) + low


def _draw_normal_like(draws: KeyedDraws, given: Given) -> Tensor:
    x = given["self"]
    return draws.normal(tuple(x.shape), x.dtype) * given["std"] + given["mean"]


def _draw_normal(draws: KeyedDraws, given: Given) -> Tensor:
    mean, std = given["mean"], given["std"]
    tensors = [one for one in (mean, std) if isinstance(one, Tensor)]
    if tensors:
        shape = tuple(torch.broadcast_shapes(*[one.shape for one in tensors]))
        return draws.normal(shape, tensors[0].dtype) * std + mean
    return draws.normal(tuple(given["size"]), _dtype(given, torch.get_default_dtype())) * std + mean


def _draw_exponential(draws: KeyedDraws, given: Given) -> Tensor:
    x = given["self"]
    # -log(u) / lambda, the inverse of the distribution function at 1 - u.
    return -draws.open_uniform(tuple(x.shape), x.dtype).log() / given["lambd"]


def _draw_integers(draws: KeyedDraws, given: Given) -> Tensor:
    found = draws.whole(tuple(given["size"]), given.get("low", 0), given["high"])
    return found.to(_dtype(given, torch.int64))


def _draw_integers_like(draws: KeyedDraws, given: Given) -> Tensor:
    x = given["self"]
    found = draws.whole(tuple(x.shape), given.get("low", 0), given["high"])
    return found.to(_dtype(given, x.dtype))


def _draw_permutation(draws: KeyedDraws, given: Given) -> Tensor:
    # 64 random bits each: two that are equal are as good as impossible, so all orders are alike.
    return draws.bits((given["n"],)).argsort().to(_dtype(given, torch.int64))


def _draw_multinomial(draws: KeyedDraws, given: Given) -> Tensor:
    weights, count = given["self"], given["num_samples"]
    if given["replacement"]:
        # Each choice has a piece of [0, sum of weights) as long as its weight: a uniform number
        # falls into one of them. Weights need not add up to 1.
        ends = weights.cumsum(-1)
        found = draws.uniform((*weights.shape[:-1], count), weights.dtype) * ends[..., -1:]
        return torch.searchsorted(ends, found.contiguous(), right=True).clamp(
            max=weights.shape[-1] - 1
        )
    # A race: the first to come of exponential times with these rates, as PyTorch does it.
    times = -draws.open_uniform(tuple(weights.shape), weights.dtype).log() / weights
    return times.argsort(-1)[..., :count]


def _draw_leaky_slopes(draws: KeyedDraws, given: Given) -> Tensor:
    x, noise, low, high = given["self"], given["noise"], given["lower"], given["upper"]
    if not given["training"]:
        # The slope is then the mean of its range, and nothing is drawn; see `_draw_dropout`.
        draws.number -= 1
        return torch.where(x > 0, x, x * (low + high) / 2)
    slopes = draws.uniform(tuple(x.shape), x.dtype) * (high - low) + low
    noise.copy_(torch.where(x > 0, 1.0, slopes))
    return x * noise


def _filled(
    fill: Callable[[KeyedDraws, tuple[int, ...], torch.dtype], Tensor],
) -> Callable[[KeyedDraws, Given], Tensor]:
    """Return what draws a new tensor of a size, or of the size of another tensor."""

    def draw(draws: KeyedDraws, given: Given) -> Tensor:
        if "self" in given:
            x = given["self"]
            return fill(draws, tuple(x.shape), _dtype(given, x.dtype))
        return fill(draws, tuple(given["size"]), _dtype(given, torch.get_default_dtype()))

    return draw


_DRAWS: dict[str, Callable[[KeyedDraws, Given], Any]] = {
    "native_dropout": _draw_dropout,
    "bernoulli": _draw_bernoulli,
    "bernoulli_": _draw_bernoulli,
    "rand": _filled(KeyedDraws.uniform),
    "rand_like": _filled(KeyedDraws.uniform),
    "randn": _filled(KeyedDraws.normal),
    "randn_like": _filled(KeyedDraws.normal),
    "uniform": _draw_uniform,
    "uniform_": _draw_uniform,
    "normal": _draw_normal,
    "normal_": _draw_normal_like,
    "normal_functional": _draw_normal_like,
    "exponential_": _draw_exponential,
    "randint": _draw_integers,
    "randint_like": _draw_integers_like,
    "randperm": _draw_permutation,
    "multinomial": _draw_multinomial,
    "rrelu_with_noise": _draw_leaky_slopes,
}
# vmap runs these client by client, without saying for which
_OF_ONE_MODEL = {"randperm", "rrelu_with_noise"}
