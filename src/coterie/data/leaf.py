"""The layout of LEAF: `data/train/*.json` and `data/test/*.json`, with the samples of each user."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coterie._util.files import expand_home
from coterie.data.coding import to_array
from coterie.data.folders import as_pixels
from coterie.errors import DataError

LeafSamples = tuple[np.ndarray, list[Any], list[str]]
"""Inputs, targets, and the user of each sample."""

_KEYS = ("users", "num_samples", "user_data")


def load_leaf(
    path: str | Path, transform: Callable[[Any], Any] | None = None
) -> tuple[LeafSamples, LeafSamples | None]:
    """Read the training and the test samples of a dataset of LEAF.

    Args:
        path: the folder of the dataset, which holds `data`, or that folder itself.
        transform: makes numbers, or a picture, of each input.

    Returns:
        Both samples; None for the test samples where there is no folder `test`.

    Raises:
        DataError: when a file is laid out otherwise, or training and test have other users.
    """
    folder = expand_home(path)
    if (folder / "data").is_dir():
        folder = folder / "data"
    if not (folder / "train").is_dir():
        raise DataError(f"there is no folder {folder / 'train'}; expected LEAF's data/train/*.json")
    train = _read_part(folder / "train", transform)
    if not (folder / "test").is_dir():
        return train, None
    test = _read_part(folder / "test", transform)
    # LEAF can also divide by user, so that no user has both.
    learned, held = set(train[2]), set(test[2])
    other = sorted(learned ^ held)
    if other:
        parts = ("training", "test") if other[0] in learned else ("test", "training")
        raise DataError(
            f"user {other[0]!r} has {parts[0]} samples and no {parts[1]} samples ({len(other)} of "
            f"{len(learned | held)} users have one of the two); expected both of each user, as "
            "LEAF divides with `-t sample`"
        )
    return train, test


def _read_part(folder: Path, transform: Callable[[Any], Any] | None) -> LeafSamples:
    """Read the files of a folder, in the order of their names."""
    files = sorted(folder.glob("*.json"))
    if not files:
        raise DataError(f"{folder} has no file *.json; expected the files that LEAF writes")
    inputs: list[np.ndarray] = []
    targets: list[Any] = []
    owners: list[str] = []
    file_of: dict[str, Path] = {}
    for file in files:
        for user, (x, y) in _read_file(file).items():
            if user in file_of:
                raise DataError(
                    f"user {user!r} is in {file_of[user]} and in {file.name}; expected each in one "
                    "file"
                )
            file_of[user] = file
            inputs.append(_convert_inputs(x, f"{file}: user {user!r}", transform))
            if inputs[-1].shape[1:] != inputs[0].shape[1:]:
                first, other = inputs[0].shape[1:], inputs[-1].shape[1:]
                raise DataError(
                    f"{folder}: user {owners[0]!r} has inputs of shape {first}, user {user!r} of "
                    f"{other}; make them equal with transform="
                )
            targets += y
            owners += [user] * len(y)
    return np.concatenate(inputs), targets, owners


def _read_file(file: Path) -> dict[str, tuple[list[Any], list[Any]]]:
    """Return the inputs and the targets of each user, after checking what the file says of them."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read as JSON ({error}); write it again") from None
    if not isinstance(found, Mapping) or any(key not in found for key in _KEYS):
        raise DataError(f"{file} is none of LEAF; expected a table of {', '.join(_KEYS)}")
    users, sizes, samples = (found[key] for key in _KEYS)
    if not (isinstance(users, list) and isinstance(sizes, list) and isinstance(samples, Mapping)):
        raise DataError(f"{file}: expected lists users and num_samples, and a table user_data")
    if len(users) != len(sizes):
        raise DataError(
            f"{file} has {len(users)} users and {len(sizes)} num_samples; expected one for each"
        )
    # A user who is listed twice would have the samples of one entry only.
    if sorted(map(str, users)) != sorted(samples):
        differ = sorted(set(map(str, users)) ^ set(samples)) or ["one that is listed twice"]
        raise DataError(
            f"{file}: users and user_data differ in {differ[0]!r}; expected each user once in both"
        )
    out = {}
    # Users may be numbers, but the keys of `user_data` are text, as all keys of JSON.
    for user, size in zip(map(str, users), sizes, strict=True):
        own = samples[user]
        own = own if isinstance(own, Mapping) else {}
        x, y = own.get("x"), own.get("y")
        if not isinstance(x, list) or not isinstance(y, list):
            raise DataError(f"{file}: user {user!r} has no lists x and y; expected both")
        if not len(x) == len(y) == size:
            raise DataError(
                f"{file}: user {user!r} has {len(x)} inputs and {len(y)} targets, and num_samples "
                f"says {size}; the file is incomplete: write it again"
            )
        if not size:
            raise DataError(f"{file}: user {user!r} has no samples; leave it out")
        _check_targets(y, f"{file}: user {user!r}")
        out[user] = x, y
    return out


def _check_targets(y: Sequence[Any], what: str) -> None:
    """Check that targets are text, numbers, or lists of numbers."""
    for place, one in enumerate(y):
        if not isinstance(one, str | int | float | list):
            raise DataError(
                f"{what}: target {place} is {str(one)[:60]!r}; expected a class, as text or a "
                "number, or numbers"
            )


def _convert_inputs(
    x: Sequence[Any], what: str, transform: Callable[[Any], Any] | None
) -> np.ndarray:
    """Return the inputs of a user as numbers: samples x features."""
    made: Any = x
    if transform is not None:
        made = []
        for one in map(transform, x):
            # Pictures of Pillow have bands.
            picture = hasattr(one, "getbands")
            made.append(as_pixels(one) if picture else to_array(one, f"{what}: an input"))
    array = to_array(made, f"{what}: x")
    # Booleans, unsigned and signed integers, floats.
    if array.dtype.kind not in "buif":
        first = next(place for place, one in enumerate(array) if not _is_numeric(one))
        raise DataError(
            f"{what}: input {first} is {str(x[first])[:60]!r}; expected numbers: code text with "
            "transform=, "
            "such as transform=lambda text: [ord(letter) for letter in text]"
        )
    return array


def _is_numeric(values: Any) -> bool:
    """Whether all entries of an input are numbers."""
    return all(isinstance(one, int | float) for one in np.asarray(values, object).flat)
