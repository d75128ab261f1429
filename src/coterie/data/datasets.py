"""Datasets: bundled ones, those on disk, and one's own arrays, all as a `Source`.

A source is a pool that clients draw from, and a test set. Images are uint8, channels first; other inputs are floats.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from coterie.data.federation import all_finite
from coterie.errors import ConfigError, DataError, require, unknown
from coterie.rng import Rng

Constants = tuple[tuple[float, ...], tuple[float, ...]]

STANDARD: dict[str, Constants] = {
    "mnist": ((0.1307,), (0.3081,)),
    "fashion_mnist": ((0.2860,), (0.3530,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "cifar100": ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
}
"""Mean and standard deviation of each channel, as the papers use them."""

HUB_NAMES = {
    "mnist": "ylecun/mnist",
    "fashion_mnist": "zalando-datasets/fashion_mnist",
    "cifar10": "uoft-cs/cifar10",
    "cifar100": "uoft-cs/cifar100",
}
"""Where the Hugging Face Hub keeps the datasets that have a short name here."""

GATHERED = {
    "emnist": "EMNIST, split balanced: 47 classes, 112,800 training and 18,800 test images, a column `label`",
    "tiny_imagenet": "TinyImageNet: 200 classes, 100,000 training and 10,000 test images of 64x64, a column `label`",
    "landmarks-user-160k": "Landmarks-User-160K of Google Landmarks: columns `label` and `user_id` (the photographer)",
    "inaturalist-user-120k": "iNaturalist-User-120K: columns `label` and `user_id` (the observer)",
}
"""Datasets of built-in studies that users bring themselves, and what they are."""

BUNDLED = ("digits", "synthetic-regression")
"""Datasets that need no file."""


@dataclass(frozen=True)
class Samples:
    """Inputs, targets and what else is known of each sample.

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
    """A dataset: a pool that clients draw their samples from, and a test set.

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

    def constants(self, normalise: str) -> Constants:
        """Return mean and standard deviation of each channel for images; empty for "none" and for other inputs.

        Args:
            normalise: "half" (0.5 and 0.5), "standard" (the dataset's own) or "none".
        """
        require(normalise in ("half", "standard", "none"), "normalise", normalise, "'half', 'standard' or 'none'")
        if normalise == "none" or not self.is_images:
            return (), ()
        channels = self.train.x.shape[1]
        if normalise == "half":
            return (0.5,) * channels, (0.5,) * channels
        return self.standard or _moments(self.train.x)

    def check(self) -> "Source":
        """Check the data, once.

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
        centre = float((weight * values).sum())
        mean.append(round(centre, 4))
        std.append(round(max(1e-4, float((weight * (values - centre) ** 2).sum()) ** 0.5), 4))
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


def digits() -> Source:
    """Return scikit-learn's handwritten digits: 1,797 images of 8x8, of which 297 are the test set.

    The split is random and the same for every seed.
    """
    from sklearn.datasets import load_digits

    bunch: Any = load_digits()
    x = torch.from_numpy(np.rint(bunch.images * (255 / 16)).astype(np.uint8))[:, None]
    y = torch.from_numpy(bunch.target.astype(np.int64))
    order = torch.from_numpy(Rng(0).generator("data.digits").permutation(len(x)))
    test, train = order[:297], order[297:]
    return Source("digits", Samples(x[train], y[train]), Samples(x[test], y[test]), 10, tuple("0123456789"))


def synthetic_regression(
    rng: Rng,
    samples: int,
    *,
    dim: int = 10,
    noise: float | int = 3.0,
    test: int = 1000,
    low: float | int = -10.0,
    high: float | int = 10.0,
) -> Source:
    r"""Return a linear regression problem, $y = \langle x, \theta \rangle + e$, drawn from the run's seed.

    The inputs and the coefficients are uniform from `low` to `high`. Clusters with coefficients of their own are
    planted by the shift "regression-targets".

    Args:
        rng: the run's streams.
        samples: size of the pool.
        dim: number of features.
        noise: standard deviation of $e$.
        test: size of the test set.
        low: lower end of the range.
        high: upper end of the range.
    """
    for name, value in {"samples": samples, "dim": dim, "test": test}.items():
        require(value >= 1, name, value, "at least 1")
    require(noise >= 0, "noise", noise, "a number that is not negative")
    require(low < high, "low", low, f"a number below high ({high:g})")
    theta = rng.generator("data.synthetic.theta").uniform(low, high, dim)

    def draw(part: str, size: int) -> Samples:
        generator = rng.generator(f"data.synthetic.{part}")
        x = generator.uniform(low, high, (size, dim))
        y = x @ theta + noise * generator.standard_normal(size)
        return Samples(torch.from_numpy(x).float(), torch.from_numpy(y).float())

    return Source("synthetic-regression", draw("train", samples), draw("test", test), 0)


def as_samples(x: Any, y: Any, classes: int | None, columns: Mapping[str, Tensor] | None = None) -> Samples:
    """Make samples from arrays or tensors.

    Args:
        x: uint8 images ([samples, height, width] or [samples, channels, height, width]) or numbers of any shape, which
            become float32 (float16 stays).
        y: integer classes, or float targets for regression.
        classes: 0 for regression; None to tell from the type of y.
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


def load(
    name: str,
    *,
    data_dir: str | Path | None = None,
    label: str | None = None,
    download: bool = False,
    rng: Rng | None = None,
    samples: int = 0,
    options: Mapping[str, Any] | None = None,
) -> Source:
    """Read a dataset by name.

    Args:
        name: a bundled dataset, a folder of `data_dir`, or (with `download`) a name of the Hugging Face Hub.
        data_dir: where folders in the Hub's layout are; the environment's `COTERIE_DATA` when not given.
        label: the column with the classes; found when not given.
        download: whether the Hub may be asked.
        rng: the run's streams, for synthetic data.
        samples: size of the pool, for synthetic data.
        options: further arguments of a bundled dataset.

    Raises:
        ConfigError: on an unknown name or option.
        DataError: when the files are missing or cannot be used.
    """
    from coterie.data import _hub

    if name == "synthetic-regression":
        allowed = ("dim", "noise", "test", "low", "high")
        for key in options or {}:
            if key not in allowed:
                raise ConfigError(f"data.options: {unknown('key', key, allowed)}")
        return synthetic_regression(rng or Rng(0), samples, **(options or {}))
    if options:
        raise ConfigError(f"data.options is {dict(options)!r}; {name} has no options")
    if name == "digits":
        return digits()
    root = data_dir or os.environ.get("COTERIE_DATA")
    folder = None if root is None else Path(root).expanduser() / name
    if folder is not None and folder.is_dir():
        return _hub.read_folder(folder, label, STANDARD.get(name)).check()
    if download and name not in GATHERED:
        return _hub.download(HUB_NAMES.get(name, name), name, label, STANDARD.get(name)).check()
    raise _missing(name, None if root is None else Path(root).expanduser())


def _missing(name: str, root: Path | None) -> ConfigError | DataError:
    """Explain why a dataset is not there."""
    if root is not None and not root.is_dir():
        return DataError(
            f"the data folder {root} does not exist; give --data-dir or COTERIE_DATA the folder of the datasets"
        )
    here = sorted(p.name for p in root.iterdir() if p.is_dir()) if root is not None else []
    if name in GATHERED:
        place = "a folder" if root is None else f"the folder {root}"
        return DataError(
            f"dataset {name!r} is not here; get {GATHERED[name]}; put it as {name}/train-*.parquet and "
            f"{name}/test-*.parquet, with a column `image`, into {place} and give that as --data-dir (or "
            "COTERIE_DATA), or set data.dataset to OWNER/NAME of the Hugging Face Hub with data.download = true"
        )
    if name not in HUB_NAMES and "/" not in name and root is None:
        places = "or give --data-dir (or COTERIE_DATA) for a folder of yours"
        return ConfigError(f"{unknown('dataset', name, [*BUNDLED, *HUB_NAMES])}; {places}")
    if name not in HUB_NAMES and "/" not in name:
        return ConfigError(f"{unknown('dataset', name, [*BUNDLED, *HUB_NAMES, *here])} (data folder: {root})")
    where = f"{root} has no folder {name}" if root is not None else "there is no data folder"
    return DataError(
        f"dataset {name!r} is not here: {where}; give --data-dir (or COTERIE_DATA) the folder that holds "
        f"{name}/train-*.parquet, or pip install coterie[hub] and set data.download = true"
    )
