"""Load datasets by name, each as a `Source`: bundled, on disk, of the Hub, or custom."""

import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coterie._util import extras
from coterie._util.files import expand_home
from coterie._util.importing import import_object
from coterie._util.settings import parse_settings
from coterie.data import heart_disease
from coterie.data.federation import Federation
from coterie.data.source import Constants, Samples, Source
from coterie.errors import ConfigError, DataError, describe_unknown, require
from coterie.rng import Rng

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
"""Names on the Hugging Face Hub of the datasets that have a short name here."""

GATHERED = {
    "emnist": (
        "EMNIST, split balanced: 47 classes, 112,800 training and 18,800 test images, a column "
        "`label`"
    ),
    "tiny_imagenet": (
        "TinyImageNet: 200 classes, 100,000 training and 10,000 test images of 64x64, a column "
        "`label`"
    ),
    "landmarks-user-160k": (
        "Landmarks-User-160K of Google Landmarks: columns `label` and `user_id` (the photographer)"
    ),
    "inaturalist-user-120k": "iNaturalist-User-120K: columns `label` and `user_id` (the observer)",
}
"""Datasets of built-in studies that users must provide, with descriptions."""

BUNDLED = ("digits", "heart-disease", "synthetic-regression")
"""Datasets that need no file."""

OWN_KINDS = ("table", "folder")
"""What `data.options.path` may lead to: a CSV or parquet file, or a folder of images by client."""


def load_digits_source() -> Source:
    """Return scikit-learn's handwritten digits: 1,797 images of 8x8, of which 297 are the test set.

    The split is random and the same for every seed.
    """
    from sklearn.datasets import load_digits

    bunch: Any = load_digits()
    # Pixels run from 0 to 16. The new axis is the channel.
    x = torch.from_numpy(np.rint(bunch.images * (255 / 16)).astype(np.uint8))[:, None]
    y = torch.from_numpy(bunch.target.astype(np.int64))
    # Seed 0 whatever the run's seed: all runs have one test set.
    order = torch.from_numpy(Rng(0).generator("data.digits").permutation(len(x)))
    # 1,500 are left for training.
    test, train = order[:297], order[297:]
    return Source(
        "digits", Samples(x[train], y[train]), Samples(x[test], y[test]), 10, tuple("0123456789")
    )


def make_synthetic_regression(
    rng: Rng,
    samples: int,
    *,
    dim: int = 10,
    noise: float | int = 3.0,
    test: int = 1000,
    low: float | int = -10.0,
    high: float | int = 10.0,
) -> Source:
    r"""Draw a linear regression problem, $y = \langle x, \theta \rangle + e$.

    It is drawn from the run's seed. The inputs and the coefficients are uniform in [`low`,
    `high`]. The shift "regression-targets" plants clusters with different coefficients.

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
    # A stream for each of coefficients, training and test data: the size of one changes no other.
    theta = rng.generator("data.synthetic.theta").uniform(low, high, dim)

    def draw_samples(part: str, size: int) -> Samples:
        generator = rng.generator(f"data.synthetic.{part}")
        # The order of the two draws is part of stored results. Sums are of float64, rounded once.
        x = generator.uniform(low, high, (size, dim))
        y = x @ theta + noise * generator.standard_normal(size)
        return Samples(torch.from_numpy(x).float(), torch.from_numpy(y).float())

    return Source(
        "synthetic-regression", draw_samples("train", samples), draw_samples("test", test), 0
    )


def load_dataset(
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
        name: a bundled dataset, "table" or "folder", the import path of a function, a folder of
            `data_dir`, or (with `download`) a name of the Hugging Face Hub.
        data_dir: folder of datasets in the Hub's layout; by default the environment variable
            `COTERIE_DATA`.
        label: the column with the classes; detected by default.
        download: whether to download from the Hub.
        rng: the run's streams, for synthetic data.
        samples: size of the pool, for synthetic data.
        options: further arguments: of a bundled dataset, of a table or folder, or of a function.

    Raises:
        ConfigError: on an unknown name or option.
        DataError: when the files are missing or cannot be used.
    """
    from coterie.data import hub

    # The only one that is drawn, and so the only bundled one with options.
    if name == "synthetic-regression":
        allowed = ("dim", "noise", "test", "low", "high")
        for key in options or {}:
            if key not in allowed:
                raise ConfigError(f"data.options: {describe_unknown('key', key, allowed)}")
        return make_synthetic_regression(rng or Rng(0), samples, **(options or {}))
    if ":" in name:
        made = call_dataset_function(name, options or {}, 0 if rng is None else rng.seed)
        if isinstance(made, Federation):
            raise ConfigError(
                f"{name!r} returned a federation, which cannot be one of several datasets"
            )
        return made
    # What is given in the call wins over the environment.
    root = data_dir or os.environ.get("COTERIE_DATA")
    if name in OWN_KINDS:
        return load_table_or_folder(name, options or {}, root)
    if options:
        raise ConfigError(f"data.options is {dict(options)!r}; {name} has no options")
    if name in ("digits", "heart-disease"):
        return load_digits_source() if name == "digits" else heart_disease.load_source()
    folder = None if root is None else expand_home(root) / name
    # What is on disk comes before a download.
    if folder is not None and folder.is_dir():
        return hub.load_folder(folder, label, STANDARD.get(name)).check()
    # Those of GATHERED come from elsewhere: their users put them into a folder.
    if download and name not in GATHERED:
        return hub.download_dataset(
            HUB_NAMES.get(name, name), name, label, STANDARD.get(name)
        ).check()
    raise _missing_dataset_error(name, None if root is None else expand_home(root))


def call_dataset_function(path: str, options: Mapping[str, Any], seed: int) -> Source | Federation:
    """Return the data that a function returns.

    Args:
        path: its import path, "package.module:function".
        options: its arguments; where it takes a `seed`, it also gets that of the data.
        seed: of the data.

    Raises:
        ConfigError: when there is no such function, or the options are not its arguments.
        DataError: when it returns no data.
    """
    function = import_object(path, f"dataset {path!r}")
    require(callable(function), f"dataset {path!r}", function, "a function")
    signature = inspect.signature(function)
    given = dict(options)
    if "seed" in signature.parameters:
        # Only where the function asks for it, and the study has not given one.
        given.setdefault("seed", seed)
    try:
        # Checked before the call: a TypeError from inside the function is the function's own.
        signature.bind(**given)
    except TypeError as error:
        raise ConfigError(f"data.options do not fit the arguments of {path!r}: {error}") from None
    return convert_returned_data(function(**given), path)


def convert_returned_data(made: Any, path: str) -> Source | Federation:
    """Convert what a user-defined function returned: a pair (x, y) becomes a source.

    Raises:
        DataError: when it is nothing of the kind.
    """
    if isinstance(made, Source):
        return made.check()
    if isinstance(made, Federation):
        return made.validate()
    if not _is_pair(made):
        raise DataError(
            f"{path!r} returned {type(made).__name__}; expected a coterie.Source, a federation, a "
            "pair (x, y), or two "
            "such pairs for training and testing"
        )
    # ((x, y), (x, y)) is training and test data, (x, y) training data alone.
    (x, y), test = made if all(map(_is_pair, made)) else (made, None)
    return Source.from_arrays(x, y, test=test, name=path.partition(":")[2])


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2


def load_table_or_folder(
    name: str, options: Mapping[str, Any], root: str | Path | None = None, *, shared: bool = False
) -> Source:
    """Read a table or a folder of images.

    Args:
        name: "table" or "folder".
        options: the path, and the other arguments of `from_table` or `from_folder`.
        root: the folder where the path is looked for when it is not found from here.
        shared: whether other machines read data of their own: classes and categories must then be
            given.

    Raises:
        ConfigError: on unknown options, or missing ones.
        DataError: when the data cannot be used.
    """
    from coterie.data.folders import FolderOptions, load_image_folder
    from coterie.data.schema import apply_schema
    from coterie.data.tables import TableOptions, read_table

    options = dict(options)
    # Paths are resolved here; all other options are fields of the classes below.
    keys = ("path", "test", "schema") if name == "table" else ("path", "test")
    paths = {}
    for key in keys:
        if options.get(key) is not None:
            paths[key] = options.pop(key)
    if "path" not in paths:
        raise ConfigError(
            f"data.options: path is missing; expected that of the {name}, such as path = "
            '"data/mine"'
        )
    found = {key: _resolve_path(value, root, f"data.options.{key}") for key, value in paths.items()}
    title = found["path"].stem if name == "table" else found["path"].name
    if name == "folder":
        pictures = parse_settings(FolderOptions, options, "data.options")
        if shared and not pictures.class_names:
            raise ConfigError(
                "data.options: class_names is missing; every machine must name the same classes"
            )
        return load_image_folder(found["path"], pictures, test=found.get("test"), name=title)
    if "schema" in found:
        options = {**apply_schema(options, found["schema"]), "schema": str(found["schema"])}
    columns = parse_settings(TableOptions, options, "data.options")
    return read_table(found["path"], columns, test=found.get("test"), name=title, shared=shared)


def _resolve_path(path: object, root: str | Path | None, where: str) -> Path:
    """Return a path as given, or relative to the folder of datasets."""
    require(isinstance(path, str | Path), where, path, "a path, as text")
    given = expand_home(str(path))
    # As given first: a path from here must not change its meaning with --data-dir.
    if given.exists():
        return given
    if root is not None and (expand_home(root) / given).exists():
        return expand_home(root) / given
    other_place = "" if root is None else f", and not in {root}"
    raise DataError(
        f"{where}: there is no {given} in {Path.cwd()}{other_place}; give a path that leads "
        "to it from here"
    )


def _missing_dataset_error(name: str, root: Path | None) -> ConfigError | DataError:
    """Explain why a dataset is not there."""
    if root is not None and not root.is_dir():
        return DataError(
            f"the data folder {root} does not exist; give --data-dir or COTERIE_DATA the folder of "
            "the datasets"
        )
    here: list[str] = []
    if root is not None:
        here = sorted(one.name for one in root.iterdir() if one.is_dir())
    if name in GATHERED:
        place = "a folder" if root is None else f"the folder {root}"
        return DataError(
            f"dataset {name!r} is not here; get {GATHERED[name]}; put it as {name}/train-*.parquet "
            "and "
            f"{name}/test-*.parquet, with a column `image`, into {place} and give that as "
            "--data-dir (or "
            "COTERIE_DATA), or set data.dataset to OWNER/NAME of the Hugging Face Hub with "
            "data.download = true"
        )
    if name not in HUB_NAMES and "/" not in name and root is None:
        places = "or give --data-dir (or COTERIE_DATA) for a folder of yours"
        return ConfigError(f"{describe_unknown('dataset', name, [*BUNDLED, *HUB_NAMES])}; {places}")
    if name not in HUB_NAMES and "/" not in name:
        return ConfigError(
            f"{describe_unknown('dataset', name, [*BUNDLED, *HUB_NAMES, *here])} (data folder: "
            f"{root})"
        )
    where = f"{root} has no folder {name}" if root is not None else "there is no data folder"
    return DataError(
        f"dataset {name!r} is not here: {where}; give --data-dir (or COTERIE_DATA) the folder that "
        "holds "
        f"{name}/train-*.parquet, or {extras.install_command('hub')} and set data.download = true"
    )
