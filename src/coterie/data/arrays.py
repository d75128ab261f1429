"""Federations from your own data: arrays, tables, PyTorch datasets and folders of images."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from coterie._util.settings import parse_settings
from coterie.data.build import DataConfig, Split, build_from_sources
from coterie.data.federation import Federation
from coterie.data.folders import FolderOptions, as_pixels, load_image_folder
from coterie.data.source import Source
from coterie.data.tables import Encode, Impute, TableOptions, read_table
from coterie.errors import ConfigError, DataError
from coterie.rng import Rng


def from_arrays(
    x: Any,
    y: Any,
    *,
    clients: Any = None,
    num_clients: int | None = None,
    test: tuple[Any, Any] | None = None,
    clusters: Sequence[int] | Mapping[Any, int] | None = None,
    classes: int | None = None,
    class_names: Sequence[str] = (),
    split: Split = Split(),
    normalize: Literal["half", "standard", "none"] = "half",
    name: str = "arrays",
) -> Federation:
    """Make a federation from arrays or tensors.

    Args:
        x: uint8 images (channels first), or numbers of any shape; integers are kept, up to
            16,777,216. A tuple or a table of arrays where an input is several tensors: the
            arguments of the module's `forward`, in order or by name; images among them are
            normalized at once.
        y: one class a sample, as integers or text; or targets of any shape, as integers or floats.
        clients: client id of each sample, of any sortable type. The clients are numbered in sorted
            order, and keep their ids as names unless these are the numbers from 0.
        num_clients: instead of `clients`: divide the samples among this many clients.
        test: (x, y) of a test set for all clients; without it, each client holds out a share of
            its samples.
        clusters: the known cluster of each client, in the order of the clients or by client id; for
            Oracle, metrics and reports.
        classes: number of classes; one more than the largest label by default, 0 where a target is
            not one class.
        class_names: a name for each class; where labels are text, all of them in order (sorted by
            default).
        split: how samples are divided, and distribution shifts to add.
        normalize: normalization of images: "half", "standard" or "none".
        name: a name for the data.

    Raises:
        ConfigError: when the arguments contradict each other.
        DataError: on data that cannot be used: NaN, labels out of range, wrong shapes, too few
            samples.

    Example:
        >>> x, y = torch.rand(40, 3), torch.arange(40) % 2
        >>> federation = from_arrays(x, y, clients=["ann"] * 15 + ["bob"] * 25)
        >>> federation.count_samples("train").tolist(), [len(test.x) for test in federation.tests]
        ([10, 16], [3, 5])
    """
    if (clients is None) == (num_clients is None):
        raise ConfigError(
            "give either clients (the client id of each sample) or num_clients (how many to make)"
        )
    if clients is None and clusters is not None:
        raise ConfigError("clusters is given without clients; planted clusters come from shift")
    source = Source.from_arrays(
        x,
        y,
        clients=clients,
        clusters=clusters,
        test=test,
        classes=classes,
        class_names=class_names,
        normalize=normalize,
        name=name,
    )
    return _build_from_source(source, split, num_clients=num_clients, normalize=normalize)


def _build_from_source(
    source: Source,
    split: Split,
    *,
    num_clients: int | None = None,
    normalize: Literal["half", "standard", "none"] = "half",
) -> Federation:
    """Divide a source among its clients; clients without a test set hold out their own samples."""
    config = DataConfig(
        dataset=source.name,
        num_clients=num_clients,
        normalize=normalize,
        test="cluster" if len(source.test) else "client",
        # The other fields of both classes have the same names and meanings.
        **{item.name: getattr(split, item.name) for item in fields(Split) if item.name != "seed"},
    )
    seed, fold = config.data_seed_and_fold(split.seed)
    return build_from_sources(config, (source,), Rng(seed), fold)


def from_table(
    table: Any,
    *,
    target: str | Sequence[str],
    client: str | None = None,
    num_clients: int | None = None,
    features: Sequence[str] | None = None,
    encode: Encode = "one-hot",
    impute: Impute = None,
    indicate: Sequence[str] = (),
    scale: Literal["standard"] | None = None,
    categories: Mapping[str, Sequence[Any]] | None = None,
    class_names: Sequence[str] = (),
    classes: int | None = None,
    test: Any = None,
    clusters: Mapping[Any, int] | None = None,
    split: Split = Split(),
    name: str = "table",
) -> Federation:
    """Make a federation from a table.

    Columns of numbers, of true and false, and of text or categories can be inputs. The categories
    and the classes are those of the whole table: where each machine reads a table of its own, give
    `categories` and `class_names`, so that an entry and a class mean the same on all.

    Args:
        table: of pandas, polars or arrow, or the path of a CSV or parquet file.
        target: the column to learn. Text and categories, and whole numbers, are classes; other
            numbers are a regression. Several columns of numbers are a regression with several
            outputs.
        client: the column with the client of each row.
        num_clients: instead of `client`: divide the rows among this many clients.
        features: the columns of the inputs; all others by default.
        encode: how a column of text or categories is encoded: "one-hot" (an entry for each
            category), or "codes" (its number, for an embedding); for all columns, or a table by
            column. Codes next to numbers make an input of two tensors: the module's `forward` takes
            the numbers and the codes, whole numbers.
        impute: what fills empty entries: "mean", "median", "most-frequent" or a number, for all
            columns or a table by column. Each client takes it from its own training rows; text is
            filled with the most frequent category, or in a table by column with the one named. A
            column without any value in a client's training rows gets 0.
        indicate: columns of numbers that get a further entry, such as "age is empty": 1 where the
            column is empty, 0 elsewhere.
        scale: "standard" for columns of numbers: less the mean, divided by the standard deviation,
            of the client's own training rows (after filling).
        categories: all values of a column of text or categories, in order, by column.
        class_names: all values of a target of text, in order.
        classes: number of classes of a target of whole numbers; one more than the largest by
            default, 0 makes it a regression.
        test: a table that is the test set of all clients; each client fills and scales it by its
            own rows.
        clusters: the known cluster of each client, by client; for Oracle, metrics and reports.
        split: how samples are divided, and distribution shifts to add.
        name: a name for the data.

    Raises:
        ConfigError: when an argument names no column, or arguments contradict each other.
        DataError: when columns cannot be used: empty entries, dates, values outside `categories`.

    Example:
        >>> import pandas as pd
        >>> table = pd.DataFrame({"age": [30, 40] * 2, "color": ["red", "blue"] * 2})
        >>> table["ill"], table["site"] = ["no", "yes"] * 2, "é"
        >>> federation = from_table(table, target="ill", client="site")
        >>> federation.feature_names, federation.class_names, federation.client_names
        (('age', 'color=blue', 'color=red'), ('no', 'yes'), ('é',))
    """
    if (client is None) == (num_clients is None):
        raise ConfigError(
            "give either client (the column that says whose a row is) or num_clients (how many to "
            "make)"
        )
    settings = {
        "target": [target] if isinstance(target, str) else list(target),
        "client": client,
        "encode": encode,
        "features": None if features is None else list(features),
        "impute": impute,
        "indicate": list(indicate),
        "scale": scale,
        "categories": categories or {},
        "class_names": list(class_names),
        "classes": classes,
        "clusters": clusters,
    }
    # The same checks as those of a study file.
    source = read_table(
        table, parse_settings(TableOptions, settings, "from_table"), test=test, name=name
    )
    return _build_from_source(source, split, num_clients=num_clients)


def from_folder(
    path: str | Path,
    *,
    transform: Callable[[Any], Any] | None = None,
    size: int | Sequence[int] | None = None,
    class_names: Sequence[str] = (),
    clusters: Mapping[str, int] | None = None,
    split: Split = Split(),
    normalize: Literal["half", "standard", "none"] = "half",
    name: str = "",
) -> Federation:
    """Make a federation from a folder of images: `path/CLIENT/CLASS/picture.png`.

    The folders of clients and classes name them; a client may lack classes. Every format that
    Pillow reads will do.

    Args:
        path: the folder.
        transform: makes the input from a picture of Pillow: a picture, an array or a tensor; all of
            one shape.
        size: height and width, or one number for both, to which pictures are resized; needed where
            they differ and no transform makes them equal.
        class_names: all classes, in order; by default the names of all folders of classes,
            sorted.
        clusters: the known cluster of each client, by client; for Oracle, metrics and reports.
        split: how samples are divided, and distribution shifts to add.
        normalize: normalization of images: "half", "standard" or "none".
        name: a name for the data; that of the folder by default.

    Raises:
        DataError: when the folder is laid out otherwise, a picture is damaged, or sizes differ.
    """
    if size is not None and transform is not None:
        raise ConfigError("from_folder: size and transform are both given; resize in the transform")
    settings = parse_settings(
        FolderOptions,
        {"size": size, "class_names": list(class_names), "clusters": clusters},
        "from_folder",
    )
    source = load_image_folder(path, settings, transform=transform, name=name)
    return _build_from_source(source, split, normalize=normalize)


def from_dataset(
    dataset: Any,
    clients: Any,
    *,
    transform: Callable[[Any], Any] | None = None,
    test: tuple[Any, Any] | None = None,
    clusters: Sequence[int] | Mapping[Any, int] | None = None,
    classes: int | None = None,
    class_names: Sequence[str] = (),
    split: Split = Split(),
    normalize: Literal["half", "standard", "none"] = "half",
    name: str = "arrays",
) -> Federation:
    """Make a federation from a PyTorch dataset of (input, target) pairs, read once and in order.

    The dataset is map-style or iterable; an input is an array, a picture of Pillow, or a tuple or
    table of several. `transform` is applied to each input while it is read, as to make pictures one
    size. `clients` has the client id of each sample; the other arguments are those of
    `from_arrays`.

    Raises:
        DataError: when its items are not pairs, or differ in shape.
    """
    x, y = _join_datasets([_collect_pairs(dataset, "the dataset", transform)])
    return from_arrays(
        x,
        y,
        clients=clients,
        test=test,
        clusters=clusters,
        classes=classes,
        class_names=class_names,
        split=split,
        normalize=normalize,
        name=name,
    )


def from_datasets(
    datasets: Sequence[Any] | Mapping[str, Any],
    *,
    transform: Callable[[Any], Any] | None = None,
    test: tuple[Any, Any] | None = None,
    clusters: Sequence[int] | Mapping[Any, int] | None = None,
    classes: int | None = None,
    class_names: Sequence[str] = (),
    split: Split = Split(),
    normalize: Literal["half", "standard", "none"] = "half",
    name: str = "arrays",
) -> Federation:
    """Make a federation from PyTorch datasets, one for each client, of (input, target) pairs.

    A table of datasets names the clients. The other arguments are those of `from_dataset`.

    Raises:
        DataError: when there are no datasets, or items differ in shape.
    """
    if not datasets:
        raise DataError("there are no datasets; expected one for each client")
    by_client: Mapping[Any, Any] = dict(enumerate(datasets))
    if isinstance(datasets, Mapping):
        by_client = datasets
    read, owners = [], []
    for client, dataset in by_client.items():
        read.append(_collect_pairs(dataset, f"dataset {client}", transform))
        owners += [client] * len(read[-1][1])
    x, y = _join_datasets(read)
    return from_arrays(
        x,
        y,
        clients=owners,
        test=test,
        clusters=clusters,
        classes=classes,
        class_names=class_names,
        split=split,
        normalize=normalize,
        name=name,
    )


_Items = tuple[dict[Any, list[Any]], list[Any]]
"""A dataset's inputs by part (None where an input is one tensor), and its targets."""


def _collect_pairs(dataset: Any, what: str, transform: Callable[[Any], Any] | None) -> _Items:
    """Read all pairs of a dataset."""
    if isinstance(dataset, DataLoader):
        raise DataError(
            f"{what} is a DataLoader, which makes batches; give the dataset itself: its .dataset"
        )
    inputs: dict[Any, list[Any]] = {}
    targets: list[Any] = []
    for place, item in enumerate(_iterate_items(dataset, what)):
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise DataError(
                f"{what}: item {place} is a {type(item).__name__}; expected a pair (input, target)"
            )
        found = item[0] if transform is None else transform(item[0])
        # One tensor is one part with the key None.
        values: Mapping[Any, Any] = {None: found}
        if isinstance(found, Mapping):
            values = found
        elif isinstance(found, tuple):
            values = dict(enumerate(found))
        if inputs and list(values) != list(inputs):
            raise DataError(
                f"{what}: the input of item {place} has other parts than the first; make them equal"
            )
        for key, value in values.items():
            tensor = _as_tensor(value, f"{what}: the input of item {place}")
            inputs.setdefault(key, []).append(tensor)
        target = item[1]
        if not isinstance(target, str):
            target = _as_tensor(target, f"{what}: the target of item {place}")
        targets.append(target)
    if not targets:
        raise DataError(f"{what} is empty; every client needs data")
    for key, tensors in inputs.items():
        name = "" if key is None else f" {key!r}"
        _require_one_shape(tensors, f"{what} has inputs{name}", "input")
    if not _are_words(targets):
        _require_one_shape(targets, f"{what} has targets", "target")
    return inputs, targets


def _are_words(targets: Sequence[Any]) -> bool:
    """Whether all targets are text."""
    words = {isinstance(target, str) for target in targets}
    if len(words) > 1:
        raise DataError("the targets mix text and numbers; make all text, or all numbers")
    return words == {True}


def _iterate_items(dataset: Any, what: str) -> Iterable[Any]:
    """Return the items of a map-style or an iterable dataset."""
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        # By index: plain iteration of such a dataset ends only if it raises IndexError.
        return (dataset[place] for place in range(len(dataset)))
    if isinstance(dataset, Iterable):
        return dataset
    found = type(dataset).__name__
    raise DataError(
        f"{what} is a {found}; expected a dataset: with __len__ and __getitem__, or __iter__"
    )


def _require_one_shape(values: Sequence[Tensor], what: str, kind: str) -> None:
    shapes = sorted({tuple(value.shape) for value in values})
    if len(shapes) > 1:
        advice = "make them equal"
        if kind == "input":
            advice += " with transform=, such as transform=lambda image: image.resize((64, 64))"
        raise DataError(f"{what} of different shapes: {shapes[0]} and {shapes[1]}; {advice}")


def _join_datasets(read: Sequence[_Items]) -> tuple[Any, Any]:
    """Join the samples of several datasets."""
    parts = {}
    for key in read[0][0]:
        # Types, shapes and missing parts are compared over all datasets.
        stacks, kinds = [], set()
        for inputs, _ in read:
            if key in inputs:
                stacks.append(torch.stack(inputs[key]))
                kinds.add((str(stacks[-1].dtype), tuple(stacks[-1].shape[1:])))
            else:
                kinds.add(("none", ()))
        if len(kinds) > 1:
            first, second, *_ = sorted(kinds)
            raise DataError(
                f"the datasets have inputs of different types or shapes: {first} and {second}; "
                "make them equal"
            )
        parts[key] = torch.cat(stacks)
    targets: list[Any] = []
    for _, own in read:
        targets += own
    words = _are_words(targets)
    if not words:
        _require_one_shape(targets, "the datasets have targets", "target")
    y = np.array(targets) if words else torch.stack(targets)
    if None in parts:
        return parts[None], y
    # Positional parts have the keys 0, 1, ...; named ones their names.
    return (tuple(parts.values()) if 0 in parts else parts), y


def _as_tensor(value: Any, what: str) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if hasattr(value, "getbands"):  # a picture of Pillow
        return torch.from_numpy(as_pixels(value))
    array = np.array(value)
    # Booleans, unsigned and signed integers, floats.
    if array.dtype.kind not in "buif":
        raise DataError(
            f"{what} is {str(value)[:60]!r}; expected numbers or a picture: convert it, as with "
            "transform="
        )
    return (
        torch.from_numpy(np.ascontiguousarray(array)) if array.ndim else torch.tensor(array.item())
    )
