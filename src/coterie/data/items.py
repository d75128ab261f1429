"""Read datasets of PyTorch and of Hugging Face item by item, each once and in order.

An item is a pair (input, target), or a table such as {"image": ..., "label": ...}.
"""

import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset

from coterie._util.mappings import drop_keys, map_values, select_keys
from coterie.data.arrow_items import ArrowItems
from coterie.data.folders import as_pixels
from coterie.errors import ConfigError, DataError, describe_unknown
from coterie.rng import Rng

TARGETS = ("label", "labels", "target", "targets", "y")
"""The keys of an item that are taken for its target when none is named."""

TOKENIZED = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
"""The keys of an item that a tokenizer of transformers made: its inputs when none are named."""

TEST_SPLITS = ("test", "validation", "valid")
"""Splits used as test set: the first of these that exists."""

# Few, since reading may be slow; random transforms mostly act on every item.
_READ_TWICE = 16  # items of a dataset that are read again, to see whether they stay the same


@dataclass(frozen=True)
class ItemForm:
    """What an item of a dataset is.

    Args:
        transform: applied to each input.
        inputs: the key of the input, or the keys of several, where items are tables; when not given
            those of `TOKENIZED` where these are all that is left, else the only key that is left.
        target: the key of the target; the one of `TARGETS` that occurs when not given.
        client: the key that says whose an item is; none when not given.
    """

    transform: Callable[[Any], Any] | None = None
    inputs: str | Sequence[str] | None = None
    target: str | None = None
    client: str | None = None

    def split_item(self, item: Any, what: str) -> tuple[Any, Any, Any]:
        """Return the input, the target and the client of an item.

        Args:
            item: as the dataset returned it.
            what: the item, in words.

        Raises:
            ConfigError: when a key is missing, or must be named.
            DataError: when the item is neither a pair nor a table.
        """
        if isinstance(item, Mapping):
            return self._split_table(item, what)
        if not isinstance(item, tuple | list) or len(item) != 2:
            found = f"a {type(item).__name__}"
            advice = ""
            if isinstance(item, tuple | list):
                found += f" of {len(item)}"
                advice = ", where several inputs are a tuple: ((first, second), target)"
            raise DataError(f"{what} is {found}; expected a pair (input, target){advice}")
        for name in ("inputs", "target", "client"):
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"{name} is {getattr(self, name)!r}, and {what} is a pair; that names a key of "
                    "items that are tables: leave it out"
                )
        return item[0], item[1], None

    def _split_table(self, item: Mapping[Any, Any], what: str) -> tuple[Any, Any, Any]:
        keys = ", ".join(map(str, item))
        target = self.target
        if target is None:
            known = [key for key in TARGETS if key in item]
            if len(known) != 1:
                raise ConfigError(
                    f"{what} has the keys {keys}; say which is learned, such as target='label'"
                )
            # One known name alone: of two, such as "label" and "target", nobody can say which is
            # learned.
            target = known[0]
        left = [key for key in item if key not in (target, self.client)]
        names = [self.inputs] if isinstance(self.inputs, str) else self.inputs
        if names is None:
            tokens = [key for key in TOKENIZED if key in left]
            # Ids and other columns next to the input must not become features silently.
            if len(left) != 1 and set(left) != {*tokens, "input_ids"}:
                example: Any = left[0] if left else "image"
                if "input_ids" in tokens:
                    example = tokens
                raise ConfigError(
                    f"{what} has the keys {keys}; say which are the inputs, such as "
                    f"inputs={example!r}"
                )
            names = tokens or left
        for name in (target, *names, self.client):
            if name is not None and name not in item:
                raise ConfigError(f"{what}: {describe_unknown('key', name, list(item))}")
        found: Any = select_keys(item, names)
        if len(names) == 1:
            found = item[names[0]]
        return found, item[target], None if self.client is None else item[self.client]


@dataclass
class _Items:
    """What was read of one dataset.

    Args:
        inputs: by part; the key is None where an input is one tensor. Of a dataset that stays on
            disk the first item's alone.
        targets: of the items.
        owners: their clients, where items name them.
    """

    inputs: dict[Any, list[Tensor]] = field(default_factory=dict)
    targets: list[Any] = field(default_factory=list)
    owners: list[Any] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class DatasetRows:
    """The inputs of a map-style dataset as an array whose rows are read when they are needed.

    Args:
        dataset: whose items are the same each time.
        form: what its items are.
        what: the dataset, in words.
        shape: of the array.
        dtype: of the array.
    """

    dataset: Any
    form: ItemForm
    what: str
    shape: tuple[int, ...]
    dtype: np.dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> np.ndarray:
        return self.read_rows(np.arange(*rows.indices(len(self))))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[:], dtype)

    def read_rows(self, rows: np.ndarray) -> np.ndarray:
        """Read rows by their numbers, all at once where the dataset can.

        Raises:
            DataError: when an input has another shape or type than the first one.
        """
        places = rows.tolist()
        # PyTorch's own name for reading many at once, as its data loader does.
        if hasattr(self.dataset, "__getitems__"):
            items = self.dataset.__getitems__(places)
        else:
            items = [self.dataset[place] for place in places]
        out = np.empty((len(places), *self.shape[1:]), self.dtype)
        for number, (place, item) in enumerate(zip(places, items, strict=True)):
            parts, _, _ = _convert_item(item, f"item {place}", self.what, self.form)
            found = parts[None].numpy()
            if found.shape != self.shape[1:] or found.dtype != self.dtype:
                raise DataError(
                    f"{self.what}: the input of item {place} is {found.dtype} of shape "
                    f"{found.shape}; expected {self.dtype} of shape {self.shape[1:]}"
                )
            out[number] = found
        return out


def is_dataset(value: Any) -> bool:
    """Whether a value is a dataset: it has items, and is no array, table or list."""
    # Arrays and tables have items too.
    plain = isinstance(value, Tensor | np.ndarray | str | list | tuple | Mapping)
    # Arrays of other libraries are inputs, whole, and not items.
    if plain or hasattr(value, "__array__"):
        return False
    return hasattr(value, "__getitem__") or hasattr(value, "__iter__")


def list_partitions(datasets: Any) -> Any:
    """Return the partitions of a federated dataset of Flower; other values as they are.

    Args:
        datasets: has `load_partition` and `num_partitions`, or `load_partition` and
            `partitioners`.
    """
    if not hasattr(datasets, "load_partition"):
        return datasets
    partitioners = getattr(datasets, "partitioners", None)
    if partitioners is None:
        return list(map(datasets.load_partition, range(datasets.num_partitions)))
    split = next(iter(partitioners))
    if len(partitioners) > 1:
        if "train" not in partitioners:
            raise ConfigError(
                f"the dataset has partitions of {', '.join(partitioners)}; expected those of "
                "'train': give a list of its partitions"
            )
        split = "train"
    # The number of partitions is known once the data are there, which the first one loads.
    found = [datasets.load_partition(0, split)]
    for place in range(1, partitioners[split].num_partitions):
        found.append(datasets.load_partition(place, split))
    return found


def split_dataset_dict(dataset: Any) -> tuple[Any, Any]:
    """Return the training and the test split of a table of splits; (dataset, None) of others."""
    if not is_dataset_dict(dataset):
        return dataset, None
    test = find_test_split(dataset)
    unused = [name for name in dataset if name not in ("train", test)]
    if unused:
        warnings.warn(
            f"the splits {', '.join(unused)} are not used: train is, and {test or 'no split'} as "
            "test set",
            stacklevel=3,
        )
    return dataset["train"], None if test is None else dataset[test]


def find_test_split(splits: Container[str]) -> str | None:
    """Return the split that is used as test set, by `TEST_SPLITS`; None where there is none."""
    for name in TEST_SPLITS:
        if name in splits:
            return name
    return None


def is_dataset_dict(value: Any) -> bool:
    """Whether a table holds splits, such as "train" and "test", and not clients."""
    return isinstance(value, Mapping) and "train" in value and set(value) <= _SPLITS


# The last two are of the Hub's imdb and svhn: any other name could be a client's.
_SPLITS = {"train", *TEST_SPLITS, "unsupervised", "extra"}


def find_class_names(datasets: Iterable[Any], target: str | None) -> tuple[str, ...]:
    """Return the names of the classes that datasets of Hugging Face know; none where they differ.

    Args:
        datasets: any datasets.
        target: the key of the target; see `ItemForm`.
    """
    found = set()
    for dataset in datasets:
        features = getattr(dataset, "features", None)
        if not isinstance(features, Mapping):
            return ()
        key = target or next((key for key in TARGETS if key in features), "")
        found.add(tuple(getattr(features.get(key), "names", None) or ()))
    return found.pop() if len(found) == 1 else ()


def read_datasets(
    datasets: Mapping[str, Any], form: ItemForm, seed: int = 0, in_memory: bool = True
) -> tuple[Any, Any, list[Any], list[int]]:
    """Read datasets, each item once and in order, and join them.

    Args:
        datasets: by the words that messages call them.
        form: what their items are.
        seed: of PyTorch's own generator while they are read, for items that draw from it.
        in_memory: whether inputs are kept; else they are read again when they are needed.

    Returns:
        Inputs and targets as `from_arrays` takes them, the client of each sample where items name
        it, and the number of samples of each dataset.

    Raises:
        DataError: when items cannot be used, or differ in shape, or change although they are not
            kept.
    """
    datasets = map_values(open_files, datasets)
    read: list[_Items] = []
    changing: list[str] = []
    for number, (what, dataset) in enumerate(datasets.items()):
        # A seed for each dataset: what one draws does not depend on the length of the others.
        with Rng(seed).temporary_torch_seed("data.read", number):
            read.append(_read_items(dataset, what, form, in_memory))
            difference = _find_changing_item(dataset, what, form, read[-1])
        if difference:
            changing.append(difference)
    if changing and not in_memory:
        raise DataError(
            f"{changing[0]}; with in_memory=False items are read again in each round: leave the "
            "random transform out of the dataset, and draw it in each step with "
            "LocalTraining(augment='module:function')"
        )
    if changing:
        more = f" (and {len(changing) - 1} further datasets)" if len(changing) > 1 else ""
        warnings.warn(
            f"{changing[0]}{more}: the dataset is random, and it is read once, so that every round "
            "trains on the same draw, and testing takes it too; leave the random transform out of "
            "the dataset, and draw it in each step with LocalTraining(augment='module:function')",
            stacklevel=3,
        )
    owners: list[Any] = []
    for one in read:
        owners += one.owners
    x, y = _join_items(read)
    if not in_memory:
        # `_join_items` has compared shapes and types: the first input stands for all.
        first = read[0].inputs[None][0].numpy()
        sources = [*datasets.values()]
        joined = sources[0] if len(sources) == 1 else ConcatDataset(sources)
        what = next(iter(datasets)) if len(sources) == 1 else "the datasets"
        x = DatasetRows(joined, form, what, (len(y), *first.shape), first.dtype)
    return x, y, owners, [len(one.targets) for one in read]


def open_files(dataset: Any) -> Any:
    """Return the items of files where a dataset is given as their path; others as they are."""
    return ArrowItems(dataset) if isinstance(dataset, str | Path) else dataset


def collate_items(
    collate: Callable[[list[Any]], Any],
    groups: Sequence[Mapping[str, Any]],
    client_keys: Sequence[str | None],
) -> list[dict[str, list[Any]]]:
    """Return the items of datasets as a collator makes them: all of one length.

    The collator gets all items of all groups at once, so that they are padded alike.

    Args:
        collate: takes a list of items and returns a table of arrays with a row for each, as the
            data collators of transformers do.
        groups: datasets by the words that messages call them.
        client_keys: for each group, the key of the client of its items; None for none. The collator
            sees none of these keys, since its tables have one set of keys for all items; an item
            keeps the one of its group as it is.

    Raises:
        DataError: when items are no tables, or the collator returns something else.
    """
    items, owners, sizes = [], [], []
    hidden = {key for key in client_keys if key is not None}
    for group, client_key in zip(groups, client_keys, strict=True):
        for what, dataset in group.items():
            before = len(items)
            for item in _iterate_items(open_files(dataset), what):
                if not isinstance(item, Mapping):
                    raise DataError(
                        f"{what} has items of {type(item).__name__}; collate takes tables, such as "
                        "{'input_ids': ..., 'labels': ...}"
                    )
                owner = {}
                if client_key in item:
                    owner[client_key] = item[client_key]
                owners.append(owner)
                items.append(drop_keys(item, hidden))
            sizes.append(len(items) - before)
    found = collate(items)
    # `keys`, since what a collator of transformers returns iterates over something else.
    keys = list(found.keys()) if hasattr(found, "keys") else []
    fits = hasattr(found, "keys") and {len(found[key]) for key in keys} <= {len(items)}
    if not fits:
        raise DataError(
            f"collate returned a {type(found).__name__} for {len(items)} items; expected a table "
            "of tensors with a row for each, as the data collators of transformers return"
        )
    columns = {key: _as_tensor(found[key], f"collate: {key!r}") for key in keys}
    rows, start = [], 0
    for place, owner in enumerate(owners):
        row = {key: column[place] for key, column in columns.items()}
        # The client's column went past the collator, which may take tensors of the model alone.
        rows.append({**row, **owner})
    out = []
    left = iter(sizes)
    for group in groups:
        made = {}
        for what in group:
            stop = start + next(left)
            made[what] = rows[start:stop]
            start = stop
        out.append(made)
    return out


def _read_items(dataset: Any, what: str, form: ItemForm, in_memory: bool) -> _Items:
    if not in_memory and not _is_map_style(dataset):
        raise DataError(
            f"{what} is a {type(dataset).__name__}; with in_memory=False items are read in any "
            "order: expected a dataset with __len__ and __getitem__"
        )
    if isinstance(dataset, DataLoader):
        raise DataError(
            f"{what} is a DataLoader, which makes batches; give the dataset itself: its .dataset"
        )
    out = _Items()
    for place, item in enumerate(_iterate_items(dataset, what)):
        parts, target, owner = _convert_item(item, f"item {place}", what, form)
        # As sets: named parts may come in any order.
        if out.inputs and set(parts) != set(out.inputs):
            raise DataError(
                f"{what}: the input of item {place} has other parts than the first; make them equal"
            )
        if not in_memory and list(parts) != [None]:
            raise DataError(
                f"{what} has inputs of several parts, which in_memory=False cannot read"
            )
        for key, tensor in parts.items():
            # On disk one input is kept for its form; the others are only compared with it.
            known = out.inputs.setdefault(key, [tensor])
            if in_memory and place:
                known.append(tensor)
            elif (tensor.shape, tensor.dtype) != (known[0].shape, known[0].dtype):
                _require_one_shape([known[0], tensor], f"{what} has inputs", "input")
                raise DataError(
                    f"{what} has inputs of {known[0].dtype} and {tensor.dtype}; make them equal"
                )
        out.targets.append(target)
        if form.client is not None:
            # Equal tensors are different keys of a table, equal numbers are one.
            out.owners.append(owner.item() if isinstance(owner, Tensor) else owner)
    if not out.targets:
        raise DataError(f"{what} is empty; every client needs data")
    for key, tensors in out.inputs.items():
        name = "" if key is None else f" {key!r}"
        _require_one_shape(tensors, f"{what} has inputs{name}", "input")
    if not _are_words(out.targets):
        _require_one_shape(out.targets, f"{what} has targets", "target")
    return out


def _convert_item(
    item: Any, name: str, what: str, form: ItemForm
) -> tuple[dict[Any, Tensor], Any, Any]:
    """Return the parts of an item's input, its target and its client."""
    found, target, owner = form.split_item(item, f"{what}: {name}")
    if form.transform is not None:
        found = form.transform(found)
    # One tensor is one part with the key None.
    values: Mapping[Any, Any] = {None: found}
    if isinstance(found, Mapping):
        values = found
    # A list stays one array; only a tuple is several inputs, by their places.
    elif isinstance(found, tuple):
        values = dict(enumerate(found))
    parts = {}
    for key, value in values.items():
        parts[key] = _as_tensor(value, f"{what}: the input of {name}")
    if not isinstance(target, str):
        target = _as_tensor(target, f"{what}: the target of {name}")
    return parts, target, owner


def _find_changing_item(dataset: Any, what: str, form: ItemForm, read: _Items) -> str:
    """Describe an item that differs when it is read again; empty when none does."""
    if not _is_map_style(dataset):
        return ""
    size = len(read.targets)
    # Evenly over the dataset, so that a transform of some classes only is noticed too.
    for place in np.unique(np.linspace(0, size - 1, min(size, _READ_TWICE)).astype(int)).tolist():
        parts, target, _ = _convert_item(dataset[place], f"item {place}", what, form)
        again = {}
        for key, values in read.inputs.items():
            if len(values) == size:
                again[key] = values[place]
        # On disk nothing was kept to compare with: the item is read once more.
        if not again:
            again, _, _ = _convert_item(dataset[place], f"item {place}", what, form)
        for key, tensor in parts.items():
            if not _is_equal(tensor, again[key]):
                return f"{what}: the input of item {place} differs when it is read again"
        if not _is_equal(target, read.targets[place]):
            return f"{what}: the target of item {place} differs when it is read again"
    return ""


def _is_equal(one: Any, other: Any) -> bool:
    # A target may be text.
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return one is other or one == other
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    # NaN is unequal to itself, and is refused later.
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _are_words(targets: Sequence[Any]) -> bool:
    """Whether all targets are text."""
    words = {isinstance(target, str) for target in targets}
    if len(words) > 1:
        raise DataError("the targets mix text and numbers; make all text, or all numbers")
    return words == {True}


def _is_map_style(dataset: Any) -> bool:
    # An iterable dataset has a __getitem__ too, which only raises.
    iterable = isinstance(dataset, IterableDataset)
    return not iterable and hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")


def _iterate_items(dataset: Any, what: str) -> Iterator[Any]:
    """Iterate over the items of a map-style or an iterable dataset."""
    if isinstance(dataset, ArrowItems):  # reads many rows at once
        yield from dataset
        return
    if _is_map_style(dataset):
        # By index: plain iteration of such a dataset ends only if it raises IndexError.
        size = len(dataset)
        for place in range(size):
            try:
                item = dataset[place]
            except IndexError as error:
                raise DataError(
                    f"{what} has no item {place} ({error}), and its length is {size}; make "
                    "__len__ the number of its items"
                ) from error
            yield item
        return
    if not isinstance(dataset, Iterable):
        found = type(dataset).__name__
        raise DataError(
            f"{what} is a {found}; expected a dataset: with __len__ and __getitem__, or __iter__"
        )
    number = 0
    for item in dataset:
        number += 1
        yield item
    if isinstance(dataset, Sized) and len(dataset) != number:
        warnings.warn(
            f"{what} has length {len(dataset)} and yields {number} items; these are used",
            stacklevel=2,
        )


def _require_one_shape(values: Sequence[Tensor], what: str, kind: str) -> None:
    shapes = sorted({tuple(value.shape) for value in values})
    if len(shapes) > 1:
        advice = "make them equal"
        if kind == "input":
            advice += " with transform=, such as transform=lambda image: image.resize((64, 64))"
        raise DataError(f"{what} of different shapes: {shapes[0]} and {shapes[1]}; {advice}")


def _join_items(read: Sequence[_Items]) -> tuple[Any, Any]:
    """Join the samples of several datasets."""
    parts = {}
    # Also the parts that a later dataset alone has, which are refused.
    for key in dict.fromkeys(chain.from_iterable(one.inputs for one in read)):
        # Types, shapes and missing parts are compared over all datasets.
        stacks, kinds = [], set()
        for one in read:
            if key in one.inputs:
                stacks.append(torch.stack(one.inputs[key]))
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
    for one in read:
        targets += one.targets
    words = _are_words(targets)
    if not words:
        _require_one_shape(targets, "the datasets have targets", "target")
    y = np.array(targets) if words else torch.stack(targets)
    # The key of inputs that are one tensor; see `_convert_item`.
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
    # One number gets torch's default type, float32, and not NumPy's float64.
    if not array.ndim:
        return torch.tensor(array.item())
    return torch.from_numpy(np.ascontiguousarray(array))
