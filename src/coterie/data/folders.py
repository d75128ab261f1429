"""A folder of images by client: `path/CLIENT/CLASS/picture.png`."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import MinLen
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from coterie._util.files import expand_home
from coterie._util.importing import import_object
from coterie._util.settings import Configurable, PositiveInt
from coterie.data.source import Source
from coterie.errors import ConfigError, DataError

# Pillow's modes: gray with and without transparency, and numbers of 32 bits or 16 ("I;16").
_GRAY, _DEEP = ("1", "L", "LA"), ("I", "F")


def has_deep_pixels(image: Any) -> bool:
    """Whether a picture has more than 8 bits a pixel."""
    return image.mode.partition(";")[0] in _DEEP


def as_pixels(image: Any) -> np.ndarray:
    """Return a picture of Pillow as an array: gray with two axes, or color with channels first."""
    if has_deep_pixels(image):
        return np.array(image)
    if image.mode in _GRAY:
        return np.array(image.convert("L"))
    # A transform may keep transparency as a fourth channel.
    color = image if image.mode == "RGBA" else image.convert("RGB")
    return np.ascontiguousarray(np.moveaxis(np.array(color), -1, 0))


@dataclass(frozen=True)
class FolderOptions(Configurable):
    """How a folder of images is read; see `from_folder`.

    Args:
        transform: the import path of a function that makes the input from a picture,
            "package.module:name".
        size: height and width, or one number for both, to which pictures are resized.
        class_names: all classes, in order; when not given, the names of the folders, sorted.
        clusters: the known cluster of each client, by client.
    """

    transform: str | None = None
    size: PositiveInt | Annotated[Sequence[PositiveInt], MinLen(2)] | None = None
    class_names: Sequence[str] = ()
    clusters: Mapping[str, Any] | None = None

    def check(self) -> None:
        """Check that at most one of size and transform is given."""
        if self.size is not None and self.transform is not None:
            raise ConfigError("size and transform are both given; resize in the transform")
        if not isinstance(self.size, int | None) and len(self.size) != 2:
            raise ConfigError(f"size is {self.size}; expected a number, or height and width")


def load_image_folder(
    path: str | Path,
    settings: FolderOptions,
    *,
    test: str | Path | None = None,
    transform: Callable[[Any], Any] | None = None,
    name: str = "",
) -> Source:
    """Read a folder of images by client and class.

    Args:
        path: the folder.
        settings: how to read it.
        test: a folder like it, with each client's own test pictures.
        transform: instead of the import path in the settings.
        name: a name for the data.

    Raises:
        DataError: when the folder is laid out otherwise, a picture is damaged, or sizes differ.
    """
    # A study file can name a function only by its import path.
    if transform is None and settings.transform is not None:
        transform = import_object(settings.transform, f"transform {settings.transform!r}")
    # Folders are listed before any picture is read, so that all know the same classes.
    folder, places = _list_classes(path)
    held, test_places = (folder, []) if test is None else _list_classes(test)
    # A class may have pictures for testing alone.
    found = {label.name for _, label in (*places, *test_places)}
    classes = tuple(settings.class_names) or tuple(sorted(found))

    def load_pictures(
        folder: Path, places: Sequence[tuple[Path, Path]]
    ) -> tuple[Tensor, list[str], list[str]]:
        return _load_pictures(folder, places, classes, transform, settings.size)

    x, labels, owners = load_pictures(folder, places)
    return Source.from_arrays(
        x,
        labels,
        clients=owners,
        clusters=settings.clusters,
        test=load_pictures(held, test_places) if test_places else None,
        class_names=classes,
        name=name or folder.name,
    )


def _list_classes(path: str | Path) -> tuple[Path, list[tuple[Path, Path]]]:
    """Return a folder, and the folders of each client and class in it."""
    folder = expand_home(path)
    if not folder.is_dir():
        raise DataError(
            f"there is no folder {folder}; expected one with a folder of pictures for each client"
        )
    places = []
    for client in _list_folders(folder):
        for label in _list_folders(client):
            places.append((client, label))
    if not places:
        raise DataError(
            f"{folder} has no pictures; expected {folder.name}/CLIENT/CLASS/picture.png"
        )
    return folder, places


def _load_pictures(
    folder: Path,
    places: Sequence[tuple[Path, Path]],
    classes: Sequence[str],
    transform: Callable[[Any], Any] | None,
    size: int | Sequence[int] | None,
) -> tuple[Tensor, list[str], list[str]]:
    """Return the pictures of a folder, their classes and their clients."""
    inputs: list[Tensor | np.ndarray] = []
    labels: list[str] = []
    owners: list[str] = []
    for client, label in places:
        # Only where `class_names` were given: else every folder is a class.
        if label.name not in classes:
            raise DataError(
                f"client {client.name!r} has a folder {label.name!r}; expected one of the classes "
                f"{', '.join(classes)}"
            )
        for file in _list_pictures(label):
            inputs.append(_load_picture(file, transform, size))
            labels.append(label.name)
            owners.append(client.name)
    with_pictures = frozenset(owners)
    for client in _list_folders(folder):
        # A client without pictures would be missing silently.
        if client.name not in with_pictures:
            raise DataError(
                f"client {client.name!r} has no pictures in folders of classes; expected "
                f"{client.name}/CLASS/picture.png: sort its pictures into classes, or remove its "
                "folder"
            )
    return _stack_inputs(inputs, folder), labels, owners


def _list_folders(path: Path) -> list[Path]:
    found = []
    # Sorted, because file systems list in any order; hidden folders are those of tools.
    for one in sorted(path.iterdir()):
        if one.name.startswith("."):
            continue
        if one.is_symlink():
            _require_way_on(one)
        if one.is_dir():
            found.append(one)
    return found


def _require_way_on(link: Path) -> None:
    """Refuse a link that leads nowhere, or to a folder that it is in, whose names would be classes."""
    found = os.path.realpath(link)
    # What is a loop of links has no real path, and does not exist.
    if not link.exists() or Path(os.path.realpath(link.parent)).is_relative_to(found):
        raise DataError(
            f"{link} is a link to {os.readlink(link)!r}, which is not there or is a folder that the "
            "link is in; expected a link to a folder elsewhere: remove it"
        )


def _list_pictures(path: Path) -> list[Path]:
    # Other files, such as lists of labels, lie next to pictures in many datasets.
    known = Image.registered_extensions()
    found = []
    for one in sorted(path.iterdir()):
        # Hidden files are no pictures, such as the "._" files of macOS.
        if one.suffix.lower() in known and not one.name.startswith("."):
            found.append(one)
    return found


def _load_picture(
    file: Path, transform: Callable[[Any], Any] | None, size: int | Sequence[int] | None
) -> Tensor | np.ndarray:
    try:
        with Image.open(file) as image:
            # Pillow reads pixels late; a damaged file must fail here.
            image.load()
            # Palettes and transparency become plain colors.
            if image.mode not in _GRAY and not has_deep_pixels(image):
                image = image.convert("RGB")
    except (UnidentifiedImageError, OSError) as error:
        raise DataError(
            f"{file} cannot be read as a picture ({error}); replace or remove it"
        ) from error
    if size is not None:
        height, width = (size, size) if isinstance(size, int) else size
        # Pillow's sizes are width first.
        made = image.resize((width, height), Image.Resampling.BILINEAR)
    else:
        made = image if transform is None else transform(image)
    if isinstance(made, Tensor):
        return made
    if hasattr(made, "getbands") and has_deep_pixels(made):
        raise DataError(
            f"{file} has more than 8 bits a pixel ({made.mode}); make numbers of it with transform="
        )
    return as_pixels(made) if hasattr(made, "getbands") else np.asarray(made)


def _stack_inputs(inputs: Sequence[Tensor | np.ndarray], folder: Path) -> Tensor:
    """Stack all inputs; gray pictures among colored ones get three equal channels."""
    tensors = []
    for one in inputs:
        if not isinstance(one, Tensor):
            one = torch.from_numpy(np.ascontiguousarray(one))
        tensors.append(one)
    # Gray pictures have two axes, colored ones three.
    if {one.ndim for one in tensors} == {2, 3}:
        for place, one in enumerate(tensors):
            if one.ndim == 2:
                tensors[place] = one.expand(3, *one.shape)
    shapes = sorted({tuple(one.shape) for one in tensors})
    if len(shapes) > 1:
        raise DataError(
            f"{folder} has pictures of {len(shapes)} sizes, such as {shapes[0]} and {shapes[1]}; "
            "make them equal with "
            "size=64, or with transform="
        )
    return torch.stack(tensors)
