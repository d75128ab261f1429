"""Federations from your own data: arrays and PyTorch datasets."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils.data import Dataset

from coterie.data.build import DataConfig, build_from_sources
from coterie.data.federation import Federation
from coterie.data.plan import Shift
from coterie.data.source import Samples, Source, as_samples
from coterie.errors import ConfigError, DataError, require
from coterie.rng import Rng


def from_arrays(
    x: Any,
    y: Any,
    *,
    clients: Any = None,
    num_clients: int | None = None,
    test: tuple[Any, Any] | None = None,
    shift: Sequence[Mapping[str, Any] | Shift] = (),
    clusters: Sequence[int] | Mapping[Any, int] | None = None,
    classes: int | None = None,
    class_names: Sequence[str] = (),
    train: int | None = None,
    validation: int | None = None,
    validation_fraction: float | int = 0.2,
    test_fraction: float | int = 0.2,
    normalize: Literal["half", "standard", "none"] = "half",
    seed: int = 0,
    name: str = "arrays",
) -> Federation:
    """Make a federation from arrays or tensors.

    Args:
        x: uint8 images (channels first), or numbers of any shape.
        y: integer classes, or float targets for regression.
        clients: client id of each sample, of any sortable type. The clients are numbered in sorted order.
        num_clients: instead of `clients`: divide the samples among this many clients.
        test: (x, y) of a test set for all clients; without it, each client holds out `test_fraction`.
        shift: distribution shifts to add, as in a study file.
        clusters: the known cluster of each client, in the order of the clients or by client id; for Oracle,
            metrics and reports.
        classes: number of classes; one more than the largest label by default, 0 for regression.
        class_names: a name for each class.
        train: training samples of each client; all by default.
        validation: validation samples of each client.
        validation_fraction: share for validation, when `validation` is not given.
        test_fraction: share held out for testing, when `test` is not given.
        normalize: normalization of images: "half", "standard" or "none".
        seed: seed of the split into clients and of the splits into training, validation and test sets.
        name: a name for the data.

    Raises:
        ConfigError: when the arguments contradict each other.
        DataError: on data that cannot be used: NaN, labels out of range, wrong shapes, too few samples.

    Example:
        >>> x, y = torch.rand(40, 3), torch.arange(40) % 2
        >>> federation = from_arrays(x, y, clients=["ann"] * 15 + ["bob"] * 25)
        >>> federation.counts("train").tolist(), [len(test.x) for test in federation.tests]
        ([10, 16], [3, 5])
    """
    if (clients is None) == (num_clients is None):
        raise ConfigError("give either clients (the client id of each sample) or num_clients (how many to make)")
    pool = as_samples(x, y, classes)
    shifts = list(shift)
    if clients is not None:
        columns = _columns(clients, len(pool), clusters)
        pool = Samples(pool.x, pool.y, columns)
        shifts.insert(
            0, {"kind": "natural", "column": "client", **({"cluster": "cluster"} if clusters is not None else {})}
        )
    elif clusters is not None:
        raise ConfigError("clusters is given without clients; planted clusters come from shift")
    if classes is None:
        classes = 0 if pool.y.is_floating_point() else int(pool.y.max()) + 1 if len(pool) else 1
    held = as_samples(*test, classes) if test is not None else Samples(pool.x[:0], pool.y[:0])
    require(len(class_names) in (0, classes), "class_names", tuple(class_names), f"{classes} names, one for each class")
    source = Source(name, pool, held, classes, tuple(class_names)).check()
    config = DataConfig(
        dataset=name,
        num_clients=num_clients,
        train=train,
        validation=validation,
        shift=shifts,
        normalize=normalize,
        test="cluster" if test is not None else "client",
        validation_fraction=validation_fraction,
        test_fraction=test_fraction,
    )
    return build_from_sources(config, (source,), Rng(seed))


def from_dataset(
    dataset: Dataset[Any],
    clients: Any,
    *,
    test: tuple[Any, Any] | None = None,
    shift: Sequence[Mapping[str, Any] | Shift] = (),
    clusters: Sequence[int] | Mapping[Any, int] | None = None,
    classes: int | None = None,
    class_names: Sequence[str] = (),
    train: int | None = None,
    validation: int | None = None,
    validation_fraction: float | int = 0.2,
    test_fraction: float | int = 0.2,
    normalize: Literal["half", "standard", "none"] = "half",
    seed: int = 0,
    name: str = "arrays",
) -> Federation:
    """Make a federation from a PyTorch dataset of (input, target) pairs, read once and in order.

    `clients` has the client id of each sample; the other arguments are those of `from_arrays`.

    Raises:
        DataError: when its items are not pairs, or differ in shape.
    """
    x, y = _read(dataset, "the dataset")
    return from_arrays(
        x, y, clients=clients, test=test, shift=shift, clusters=clusters, classes=classes, class_names=class_names,
        train=train, validation=validation, validation_fraction=validation_fraction, test_fraction=test_fraction,
        normalize=normalize, seed=seed, name=name,
    )  # fmt: skip


def from_datasets(
    datasets: Sequence[Dataset[Any]],
    *,
    test: tuple[Any, Any] | None = None,
    shift: Sequence[Mapping[str, Any] | Shift] = (),
    clusters: Sequence[int] | Mapping[Any, int] | None = None,
    classes: int | None = None,
    class_names: Sequence[str] = (),
    train: int | None = None,
    validation: int | None = None,
    validation_fraction: float | int = 0.2,
    test_fraction: float | int = 0.2,
    normalize: Literal["half", "standard", "none"] = "half",
    seed: int = 0,
    name: str = "arrays",
) -> Federation:
    """Make a federation from PyTorch datasets of (input, target) pairs, one for each client, in order.

    The other arguments are those of `from_arrays`.

    Raises:
        DataError: when the list is empty, or items differ in shape.
    """
    if not datasets:
        raise DataError("there are no datasets; expected one for each client")
    read = [_read(dataset, f"dataset {client}") for client, dataset in enumerate(datasets)]
    kinds = sorted({(str(x.dtype), tuple(x.shape[1:])) for x, _ in read})
    if len(kinds) > 1:
        raise DataError(
            f"the datasets have inputs of different types or shapes: {kinds[0]} and {kinds[1]}; make them equal"
        )
    owners = np.repeat(np.arange(len(read)), [len(x) for x, _ in read])
    x, y = (torch.cat(part) for part in zip(*read, strict=True))
    return from_arrays(
        x, y, clients=owners, test=test, shift=shift, clusters=clusters, classes=classes, class_names=class_names,
        train=train, validation=validation, validation_fraction=validation_fraction, test_fraction=test_fraction,
        normalize=normalize, seed=seed, name=name,
    )  # fmt: skip


def _columns(
    clients: Any, samples: int, clusters: Sequence[int] | Mapping[Any, int] | None
) -> dict[str, Int[Tensor, " samples"]]:
    """Number the clients, and note the cluster of every sample's client."""
    owners = np.asarray(clients)
    if owners.ndim != 1 or len(owners) != samples:
        raise DataError(f"clients has shape {owners.shape}; expected one value for each of the {samples} samples")
    names, owner = np.unique(owners, return_inverse=True)
    columns = {"client": torch.from_numpy(owner.astype(np.int64))}
    if clusters is None:
        return columns
    if isinstance(clusters, Mapping):
        missing = [name for name in names.tolist() if name not in clusters]
        if missing:
            raise DataError(f"clusters has nothing for client {missing[0]!r}; give the cluster of every client")
        clusters = [clusters[name] for name in names.tolist()]
    if len(clusters) != len(names):
        raise DataError(f"clusters has {len(clusters)} values; expected one for each of the {len(names)} clients")
    columns["cluster"] = torch.as_tensor(np.asarray(clusters), dtype=torch.int64)[columns["client"]]
    return columns


def _read(dataset: Any, what: str) -> tuple[Tensor, Tensor]:
    """Read all pairs of a dataset."""
    inputs, targets = [], []
    for place in range(len(dataset)):
        item = dataset[place]
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise DataError(f"{what}: item {place} is a {type(item).__name__}; expected a pair (input, target)")
        inputs.append(_as_tensor(item[0]))
        targets.append(torch.as_tensor(item[1]))
    if not inputs:
        raise DataError(f"{what} is empty; every client needs data")
    for kind, values in (("inputs", inputs), ("targets", targets)):
        shapes = sorted({tuple(value.shape) for value in values})
        if len(shapes) > 1:
            raise DataError(f"{what} has {kind} of different shapes: {shapes[0]} and {shapes[1]}; make them equal")
    return torch.stack(inputs), torch.stack(targets)


def _as_tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    array = np.array(value)
    if hasattr(value, "getbands") and array.ndim == 3:  # a color image of Pillow
        array = np.moveaxis(array, -1, 0)
    return torch.from_numpy(np.ascontiguousarray(array)) if array.ndim else torch.tensor(array.item())
