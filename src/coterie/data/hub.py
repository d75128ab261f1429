"""The layout of the Hugging Face Hub: images in parquet files, on disk or from the Hub itself.

A folder holds `train-*.parquet` and `test-*.parquet` with an image column (`struct<bytes, path>`),
integer columns, and the names of the classes in the schema's metadata. Images are decoded once and
stored in the cache folder.
"""

import hashlib
import importlib
import io
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from jaxtyping import Int, UInt8
from PIL import Image, UnidentifiedImageError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from coterie._util import extras
from coterie._util.files import cache_folder, replace_atomically, resolve_path
from coterie._util.mappings import drop_empty, map_values
from coterie.data.folders import has_deep_pixels
from coterie.data.items import TEST_SPLITS, find_test_split
from coterie.data.source import Constants, Samples, Source
from coterie.errors import ConfigError, DataError, describe_unknown

_GRAY = ("1", "L")  # Pillow's modes of one channel: black and white, and 8 bits


@dataclass(frozen=True)
class DecodedSplit:
    """One split, decoded.

    Args:
        images: channels first.
        columns: every integer column.
    """

    images: UInt8[Tensor, "samples channels height width"]
    columns: Mapping[str, Int[Tensor, " samples"]]


def load_folder(
    folder: Path, label: str | None = None, standard: Constants | None = None
) -> Source:
    """Read a folder in the layout of the Hub.

    Args:
        folder: the folder of the parquet files, or of a folder `data` with them.
        label: the column with the classes; "label", "fine_label" or the only one with class names
            when not given.
        standard: mean and standard deviation of the channels, when known.

    Raises:
        DataError: when files are missing, incomplete or damaged, or hold no images.
    """
    shards = {"train": _find_shards(folder, "train")}
    if not shards["train"]:
        raise DataError(
            f"{folder} has no train-*.parquet; expected the layout of the Hugging Face Hub"
        )
    for split in TEST_SPLITS:
        shards["test"] = _find_shards(folder, split)
        if shards["test"]:
            break

    # Called only where the cache has nothing.
    def load_tables() -> dict[str, pa.Table]:
        return map_values(_load_tables, drop_empty(shards))

    return _make_source(
        folder.name,
        [*shards["train"], *shards["test"]],
        str(resolve_path(folder)),
        load_tables,
        label,
        standard,
    )


def download_dataset(
    repository: str, name: str, label: str | None = None, standard: Constants | None = None
) -> Source:
    """Read a dataset from the Hub, which needs the extra `hub` and a network (the first time).

    Args:
        repository: the name on the Hub, such as "ylecun/mnist".
        name: the name here.
        label: the column with the classes.
        standard: mean and standard deviation of the channels, when known.

    Raises:
        DataError: when the extra is not installed, or the dataset has no images.
    """
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError as error:
        raise DataError(
            f"dataset {name!r} would come from the Hub ({repository}), which needs: "
            f"{extras.install_command('hub')}; "
            f"or give --data-dir the folder that holds {name}/train-*.parquet"
        ) from error
    splits = datasets.load_dataset(repository)
    test = find_test_split(splits)
    chosen = {"train": splits["train"]}
    if test is not None:
        chosen["test"] = splits[test]
    files = []
    for split in chosen.values():
        # Their names and times are the key of the cache of decoded images.
        files += [Path(file["filename"]) for file in split.cache_files]

    def load_tables() -> dict[str, pa.Table]:
        out = {}
        for split, data in chosen.items():
            for column, kind in data.features.items():
                if isinstance(kind, datasets.Image):
                    # The bytes as stored: all images are decoded in one place, below.
                    data = data.cast_column(column, datasets.Image(decode=False))
            table = data.with_format("arrow")[:]
            # The class names are in the metadata, which the table may lack.
            out[split] = table.replace_schema_metadata(data.features.arrow_schema.metadata)
        return out

    return _make_source(name, files, repository, load_tables, label, standard)


def _find_shards(folder: Path, split: str) -> list[Path]:
    """Return the files of a split, and check that none of a numbered set is missing."""
    files = sorted(folder.glob(f"{split}-*.parquet"))
    # A copy of a repository of the Hub has its files in a folder `data`.
    if not files:
        files = sorted((folder / "data").glob(f"{split}-*.parquet"))
    for file in files:
        # Shards are named such as train-00000-of-00005.
        _, dash, total = file.stem.partition("-of-")
        if dash and total.isdecimal() and int(total) != len(files):
            raise DataError(
                f"{file.parent} has {len(files)} of the {int(total)} files of the split {split!r}; "
                "fetch the others"
            )
    return files


def _load_tables(files: Sequence[Path]) -> pa.Table:
    tables = []
    for file in files:
        try:
            tables.append(pq.read_table(file))
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(
                f"{file} cannot be read as parquet ({error}); fetch it again"
            ) from error
    return pa.concat_tables(tables)


def _make_source(
    name: str,
    files: Sequence[Path],
    origin: str,
    read: Any,
    label: str | None,
    standard: Constants | None,
) -> Source:
    """Make a source; splits are decoded from the tables of `read` where the cache has none."""
    place = _cache_file(name, files, origin)
    cached = _load_cache(place)
    # Damaged or missing: whatever the reason, decoding again mends it.
    if cached is None:
        tables = read()
        names = _parse_class_names(tables["train"].schema.metadata)
        if "test" in tables:
            _compare_class_names(name, names, _parse_class_names(tables["test"].schema.metadata))
        splits = {split: _decode_table(own, f"{name}/{split}") for split, own in tables.items()}
        cached = splits, names
        _save_cache(place, *cached)
    splits, names = cached
    column = _find_label_column(name, label, splits["train"].columns, names)
    parts = {}
    for split, decoded in splits.items():
        parts[split] = Samples(decoded.images, decoded.columns[column], decoded.columns)
    train = parts["train"]
    test = parts["test"] if "test" in parts else train.drop_rows()
    # A class may occur in one of the two splits only.
    highest = max(int(part.y.max()) for part in (train, test) if len(part)) + 1
    classes = len(names.get(column, ())) or highest
    return Source(name, train, test, classes, names.get(column, ()), standard)


def _find_label_column(
    name: str, label: str | None, columns: Mapping[str, Tensor], names: Mapping[str, Any]
) -> str:
    if label is not None:
        if label not in columns:
            raise ConfigError(f"{name}: {describe_unknown('label column', label, columns)}")
        return label
    # Integer columns without names may be ids or counts.
    named = [column for column in columns if column in names]
    # "fine_label" is the column of the 100 classes of CIFAR-100.
    for candidate in ("label", "fine_label", *(named if len(named) == 1 else ())):
        if candidate in columns:
            return candidate
    raise ConfigError(
        f"{name} has the integer columns {', '.join(columns) or '(none)'}; say which are the "
        "classes: data.label"
    )


def _parse_class_names(metadata: Mapping[bytes, bytes] | None) -> dict[str, tuple[str, ...]]:
    """Read the names of the classes of every column from a schema's metadata."""
    stored = json.loads((metadata or {}).get(b"huggingface", b"{}"))
    found = {}
    for column, kind in stored.get("info", {}).get("features", {}).items():
        # Features that are no dict are lists of nested features.
        if isinstance(kind, dict) and "names" in kind:
            found[column] = tuple(kind["names"])
    return found


def _compare_class_names(
    name: str, train: Mapping[str, tuple[str, ...]], test: Mapping[str, tuple[str, ...]]
) -> None:
    """Check that a label means the same in the training and the test files.

    Raises:
        DataError: when it has different names.
    """
    for column in train.keys() & test.keys():
        if train[column] != test[column]:
            own, other = ", ".join(train[column][:10]), ", ".join(test[column][:10])
            raise DataError(
                f"{name}: the classes of {column!r} are {own} in the training files and {other} in "
                "the test files; write both with the same names in the same order"
            )


def _decode_table(table: pa.Table, where: str) -> DecodedSplit:
    """Decode the image column of a table and keep its integer columns."""
    images = [entry.name for entry in table.schema if _is_image(entry.type)]
    # One input a sample: of two columns of images nobody can say which is meant.
    if len(images) != 1:
        raise DataError(
            f"{where} has {len(images)} image columns (struct of bytes and path); expected one"
        )
    columns = {}
    for entry in table.schema:
        if pa.types.is_integer(entry.type):
            if table[entry.name].null_count:
                raise DataError(
                    f"{where}: column {entry.name} has {table[entry.name].null_count} empty "
                    "values; fill or drop them"
                )
            columns[entry.name] = torch.from_numpy(table[entry.name].to_numpy().astype(np.int64))
    encoded = []
    for chunk in table[images[0]].chunks:
        encoded += chunk.field("bytes").to_pylist()
    return DecodedSplit(_decode_images(encoded, where), columns)


def _is_image(kind: pa.DataType) -> bool:
    """Whether a column is a struct with the bytes of an encoded image."""
    return pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0


def _decode_images(
    encoded: Sequence[bytes | None], where: str
) -> UInt8[Tensor, "samples channels height width"]:
    """Decode images of one size. They become gray if all of them are, and RGB otherwise."""
    # "L" is 8 bits of gray, to which black and white is converted too.
    mode, images = "L", []
    for place, one in enumerate(encoded):
        if one is None:
            raise DataError(
                f"{where}: image {place} is a path, not bytes; embed the images in the parquet "
                "files"
            )
        try:
            image = Image.open(io.BytesIO(one))
            image.load()
        except (UnidentifiedImageError, OSError) as error:
            raise DataError(
                f"{where}: image {place} cannot be decoded ({error}); fetch the data again"
            ) from error
        if has_deep_pixels(image):
            raise DataError(
                f"{where}: image {place} has more than 8 bits a pixel ({image.mode}), of which 8 "
                "would be kept; scale the images to 8 bits, or give them as arrays of floats"
            )
        # One colored image makes all of them RGB.
        mode = mode if image.mode in _GRAY else "RGB"
        images.append(image)
    sizes = {image.size for image in images}
    if len(sizes) != 1:
        raise DataError(
            f"{where} has images of {len(sizes)} sizes; expected one size: resize them first"
        )
    pixels = []
    for image in images:
        # `convert` copies, also where the mode is the same.
        pixels.append(np.asarray(image if image.mode == mode else image.convert(mode)))
    out = np.stack(pixels)
    # Gray images have no last axis yet: it becomes the channel.
    return torch.from_numpy(out.reshape(*out.shape[:3], -1)).movedim(-1, 1).contiguous()


def _cache_file(name: str, files: Sequence[Path], origin: str) -> Path:
    """Return the cache file of a dataset, named by the sizes and times of its source files."""
    # Sizes and times change with the files, and cost nothing to read.
    state = [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    return (
        cache_folder()
        / "datasets"
        / f"{name.replace('/', '--')}-{_hash_json(origin)}-{_hash_json(state)}.safetensors"
    )


def _hash_json(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]


def _load_cache(place: Path) -> tuple[dict[str, DecodedSplit], dict[str, tuple[str, ...]]] | None:
    """Read decoded splits; None when they are missing or damaged and must be decoded again."""
    if not place.exists():
        return None
    try:
        with safe_open(str(place), framework="pt") as file:
            meta = json.loads((file.metadata() or {})["coterie"])
        tensors = load_file(str(place))
        splits = {}
        for split, names in meta["splits"].items():
            columns = {name: tensors[f"{split}.columns.{name}"] for name in names}
            splits[split] = DecodedSplit(tensors[f"{split}.images"], columns)
    except (SafetensorError, KeyError, json.JSONDecodeError):
        return None
    return splits, map_values(tuple, meta["names"])


def _save_cache(
    place: Path, splits: Mapping[str, DecodedSplit], names: Mapping[str, tuple[str, ...]]
) -> None:
    """Write decoded splits atomically, and remove those of older files of the same origin."""
    tensors = {}
    for split, decoded in splits.items():
        tensors[f"{split}.images"] = decoded.images
        for column, values in decoded.columns.items():
            tensors[f"{split}.columns.{column}"] = values
    meta = {
        "splits": {split: list(decoded.columns) for split, decoded in splits.items()},
        "names": names,
    }
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with replace_atomically(place) as temporary:
            save_file(tensors, temporary, metadata={"coterie": json.dumps(meta)})
    # The cache only saves time: without it the images are decoded again in the next run.
    except (OSError, SafetensorError) as error:
        warnings.warn(
            f"decoded images are not kept: {error}; set COTERIE_CACHE to a folder with room",
            stacklevel=2,
        )
        return
    # The name ends with a hash of the files' state; the rest is the same for one origin.
    for old in place.parent.glob(f"{place.name.rsplit('-', 1)[0]}-*.safetensors"):
        if old != place:
            old.unlink(missing_ok=True)
