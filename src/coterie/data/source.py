"""Source: a dataset as a pool, from which clients draw their samples, and a test set.

Images are uint8, channels first; other inputs are floats.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from coterie.errors import DataError, require

Constants = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and standard deviation of each channel."""


def all_finite(values: Shaped[Tensor, "..."]) -> bool:
    """Whether no value is NaN or infinite; checks the extremes, which is much faster than every value."""
    return not values.numel() or all(bool(torch.isfinite(extreme)) for extreme in torch.aminmax(values))


def is_images(x: Shaped[Tensor, "*features"]) -> bool:
    """Whether an input is an image of bytes: uint8, channels first."""
    return x.dtype == torch.uint8 and x.ndim == 3


@dataclass(frozen=True)
class Part:
    """One tensor of an input that is several.

    Args:
        name: the argument of the module's `forward` that it is; empty for the next positional one.
        shape: of one sample.
        whole: whether the module takes it as whole numbers (int64), such as the codes of categories.
    """

    name: str
    shape: tuple[int, ...]
    whole: bool = False


@dataclass(frozen=True)
class Samples:
    """Inputs, targets and further columns of samples.

    Args:
        x: uint8 images, channels first, or floats.
        y: integer classes, or float targets.
        columns: further integers, such as the writer of each sample.
    """

    x: Shaped[Tensor, "samples *features"]
    y: Shaped[Tensor, "samples *targets"]
    columns: Mapping[str, Int[Tensor, " samples"]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.x)


@dataclass(frozen=True)
class Source:
    """A dataset: a pool, from which clients draw their samples, and a test set.

    Args:
        name: its name.
        train: the pool.
        test: the test set; it may be empty.
        classes: number of classes; 0 for regression.
        class_names: a name for each class, when known.
        standard: the usual mean and standard deviation of each channel; computed from the pool when not given.
    """

    name: str
    train: Samples
    test: Samples
    classes: int
    class_names: tuple[str, ...] = ()
    standard: Constants | None = None

    @property
    def is_images(self) -> bool:
        """Whether the inputs are uint8 images."""
        return self.train.x.dtype == torch.uint8 and self.train.x.ndim == 4

    @property
    def form(self) -> str:
        """The type and shape of one input, in words."""
        shape = "x".join(map(str, self.train.x.shape[1:])) or "scalar"
        return f"{shape} {str(self.train.x.dtype).removeprefix('torch.')} inputs"

    def constants(self, normalize: str) -> Constants:
        """Return mean and standard deviation of each channel for images; empty for "none" and for other inputs.

        Args:
            normalize: "half" (0.5 and 0.5), "standard" (the dataset's own) or "none".
        """
        require(normalize in ("half", "standard", "none"), "normalize", normalize, "'half', 'standard' or 'none'")
        if normalize == "none" or not self.is_images:
            return (), ()
        channels = self.train.x.shape[1]
        if normalize == "half":
            return (0.5,) * channels, (0.5,) * channels
        return self.standard or _moments(self.train.x)

    def check(self) -> "Source":
        """Check the data.

        Raises:
            DataError: on labels out of range, NaN, different lengths or shapes; with what to do.
        """
        for part, samples in (("training", self.train), ("test", self.test)):
            _check_samples(samples, self.classes, f"{self.name}: the {part} data")
        if len(self.test) and self.train.x.shape[1:] != self.test.x.shape[1:]:
            shapes = tuple(self.train.x.shape[1:]), tuple(self.test.x.shape[1:])
            raise DataError(
                f"{self.name}: training inputs have shape {shapes[0]}, test inputs {shapes[1]}; make them equal"
            )
        return self


def _moments(x: Shaped[Tensor, "samples *features"]) -> Constants:
    """Mean and standard deviation of each channel of uint8 images scaled to [0, 1], from a histogram."""
    values = torch.arange(256, dtype=torch.float64) / 255
    mean, std = [], []
    for channel in range(x.shape[1]):
        weight = torch.bincount(x[:, channel].flatten(), minlength=256).to(torch.float64)
        weight = weight / weight.sum()
        center = float((weight * values).sum())
        mean.append(round(center, 4))
        std.append(round(max(1e-4, float((weight * (values - center) ** 2).sum()) ** 0.5), 4))
    return tuple(mean), tuple(std)


def _check_samples(samples: Samples, classes: int, what: str) -> None:
    if samples.x.is_floating_point() and not all_finite(samples.x):
        bad = int(
            (~torch.isfinite(samples.x.flatten(1) if samples.x.ndim > 1 else samples.x[:, None])).any(1).nonzero()[0]
        )
        raise DataError(f"{what} have NaN or infinity in the inputs (first in sample {bad}); clean or drop them")
    if not classes:
        if not all_finite(samples.y):
            raise DataError(f"{what} have NaN or infinity in the targets; clean or drop them")
    elif len(samples.y) and not 0 <= int(samples.y.min()) <= int(samples.y.max()) < classes:
        low, high = int(samples.y.min()), int(samples.y.max())
        raise DataError(
            f"{what} have labels from {low} to {high}; expected 0 to {classes - 1}: raise `classes` or map the labels"
        )


def as_samples(x: Any, y: Any, classes: int | None, columns: Mapping[str, Tensor] | None = None) -> Samples:
    """Make samples from arrays or tensors.

    Args:
        x: uint8 images ([samples, height, width] or [samples, channels, height, width]) or numbers of any shape, which
            become float32 (float16 stays).
        y: integer classes, or float targets for regression.
        classes: 0 for regression; None to infer it from the type of y.
        columns: further integers.

    Raises:
        DataError: when the arrays cannot be used.
    """
    x, y = _tensor(x, "x"), _tensor(y, "y")
    if len(x) != len(y):
        raise DataError(f"there are {len(x)} inputs and {len(y)} targets; expected one target for each input")
    if x.dtype == torch.uint8 and x.ndim == 3:
        x = x[:, None]
    if x.dtype == torch.uint8 and x.ndim == 4 and x.shape[1] > 4 and x.shape[3] in (1, 3, 4):
        raise DataError(
            f"x has shape {tuple(x.shape)}, channels last; expected channels first: x.transpose(0, 3, 1, 2)"
        )
    if x.dtype not in (torch.uint8, torch.float16, torch.float32):
        x = x.float()
    regression = y.is_floating_point() if classes is None else classes == 0
    if not regression:
        if y.is_floating_point() and not bool((y == y.round()).all()):
            raise DataError("y has fractions; expected whole numbers as classes, or classes=0 for regression")
        y = y.squeeze(-1) if y.ndim == 2 and y.shape[1] == 1 else y
        if y.ndim != 1:
            raise DataError(f"y has shape {tuple(y.shape)}; expected one class for each sample")
    return Samples(x, y.float() if regression else y.long(), columns or {})


def _tensor(value: Any, name: str) -> Tensor:
    if isinstance(value, Tensor):
        return torch.atleast_1d(value.detach().cpu())
    array = np.asarray(value)
    if array.dtype.kind not in "buif":
        raise DataError(f"{name} has type {array.dtype}; expected numbers")
    return torch.from_numpy(np.ascontiguousarray(array))
