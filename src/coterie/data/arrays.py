"""Federations from your own data: arrays, tables, datasets, folders of images and LEAF's layout."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

from coterie._util.files import expand_home
from coterie._util.mappings import prefix_keys
from coterie._util.settings import parse_settings
from coterie.data.build import DataConfig, Split, build_from_sources
from coterie.data.federation import Federation
from coterie.data.folders import FolderOptions, load_image_folder
from coterie.data.items import (
    ItemForm,
    collate_items,
    find_class_names,
    is_dataset,
    is_dataset_dict,
    list_partitions,
    open_files,
    read_datasets,
    split_dataset_dict,
)
from coterie.data.leaf import load_leaf
from coterie.data.schema import apply_schema
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
    test: tuple[Any, ...] | None = None,
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
            order, and keep their ids as names, unless these are the numbers from 0.
        num_clients: instead of `clients`: divide the samples among this many clients.
        test: (x, y) of a test set for all clients, or (x, y, clients) of each client's own test
            samples; without it, each client holds out a share of its samples.
        clusters: the known cluster of each client, in the order of the clients or by client id; for
            Oracle, metrics and reports.
        classes: number of classes of labels from 0; by default the labels that occur in `y` are the
            classes, sorted. 0 makes whole numbers, and floats of two values, a regression.
        class_names: all labels, in order: text, whole numbers, true and false. Other names are
            those of the classes 0, 1, and so on.
        split: how samples are divided, and distribution shifts to add.
        normalize: normalization of images: "half", "standard" or "none".
        name: a name for the data.

    Raises:
        ConfigError: when the arguments contradict each other.
        DataError: on data that cannot be used: NaN, labels out of range, wrong shapes, too few
            samples.

    Example:
        >>> import torch
        >>> x, y = torch.rand(40, 3), torch.arange(40) % 2
        >>> federation = from_arrays(x, y, clients=["ann"] * 15 + ["bob"] * 25)
        >>> federation.count_samples("train").tolist(), [len(test.x) for test in federation.tests]
        ([10, 16], [3, 5])
    """
    # Both or none: one says whose the samples are, the other that they are to be drawn.
    if (clients is None) == (num_clients is None):
        raise ConfigError(
            "give either clients (the client id of each sample) or num_clients (how many to make)"
        )
    # Clients that are drawn do not exist yet: nobody can know their clusters.
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
    # The other fields of both classes have the same names and meanings.
    shared = {}
    for item in fields(Split):
        if item.name != "seed":
            shared[item.name] = getattr(split, item.name)
    config = DataConfig(
        dataset=source.name,
        num_clients=num_clients,
        normalize=normalize,
        # A test set of the source serves all clients of a cluster; without one each client holds
        # out its own.
        test="cluster" if len(source.test) else "client",
        **shared,
    )
    seed, fold = config.data_seed_and_fold(split.seed)
    return build_from_sources(config, (source,), Rng(seed), fold)


def from_table(
    table: Any,
    *,
    target: str | Sequence[str] | None = None,
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
    split_column: str | None = None,
    schema: str | Path | None = None,
    clusters: Mapping[Any, int] | None = None,
    separator: str | None = None,
    decimal: Literal[".", ","] | None = None,
    encoding: str | None = None,
    split: Split = Split(),
    name: str = "table",
) -> Federation:
    """Make a federation from a table.

    Columns of numbers, of true and false, and of text or categories can be inputs. The categories
    and the classes are those of the whole table: where each machine reads a table of its own, give
    `categories` and `class_names`, so that an entry and a class mean the same on all.

    A CSV file does not say what its columns are. The first file decides: a column is of numbers
    where all its entries are, of true and false likewise, and of text otherwise; ids of clients are
    text. A test table, and the rows given to `predict`, are read in the same way.

    Args:
        table: of pandas, polars or arrow, or the path of a CSV file (which gzip may have packed) or
            of a parquet file.
        target: the column to learn; needed unless a schema names it. Text and categories, and whole
            numbers, are classes; other numbers are a regression. Several columns of numbers are a
            regression with several outputs.
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
        class_names: all values of the target, in order: text, whole numbers, true and false. Other
            names are those of the classes 0, 1, and so on.
        classes: number of classes of a target of whole numbers from 0; by default the values that
            occur are the classes. 0 makes it a regression.
        test: a table that is the test set of all clients; each client fills and scales it by its
            own rows.
        split_column: the column that says of each row whether it is for "train", "validation" or
            "test"; each client's own test rows are then its test set. Without validation rows, a
            share of the training rows is taken.
        schema: the path of the schema of a table read before (`TableSchema.save`, or `table.json`
            in a study's folder): columns, categories, classes, scaling and what fills empty entries
            are then those of that table.
        clusters: the known cluster of each client, by client; for Oracle, metrics and reports.
        separator: what divides the columns of a CSV file: one character, or "tab". Commas,
            semicolons, tabs and bars are found when it is not given.
        decimal: the sign before the fraction of a number in a CSV file; a comma is found where no
            column has points, and its meaning is clear.
        encoding: of a CSV file. When not given, it is UTF-8, or UTF-16 with its mark, and else
            cp1252, with a warning.
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
    if target is None and schema is None:
        raise ConfigError("target is missing; name the column to learn")
    targets = [target] if isinstance(target, str) else list(target or ())
    settings: dict[str, Any] = {
        "target": targets,
        "client": client,
        "encode": encode,
        "features": None if features is None else list(features),
        "impute": impute,
        "indicate": list(indicate),
        "scale": scale,
        "categories": categories or {},
        "class_names": list(map(str, class_names)),
        "classes": classes,
        "clusters": clusters,
        "split_column": split_column,
        "separator": separator,
        "decimal": decimal,
        "encoding": encoding,
    }
    if schema is not None:
        # The path stays among the settings: `read_table` also compares the kinds of the columns
        # with it.
        settings = {**apply_schema(settings, schema), "schema": str(schema)}
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
    test: str | Path | None = None,
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
        test: a folder like `path`, with each client's own test pictures; without it, each client
            holds out a share of its pictures.
        clusters: the known cluster of each client, by client; for Oracle, metrics and reports.
        split: how samples are divided, and distribution shifts to add.
        normalize: normalization of images: "half", "standard" or "none".
        name: a name for the data; that of the folder by default.

    Raises:
        DataError: when the folder is laid out otherwise, a picture is damaged, or sizes differ.
    """
    # Which of the two comes first would decide what the transform sees.
    if size is not None and transform is not None:
        raise ConfigError("from_folder: size and transform are both given; resize in the transform")
    settings = parse_settings(
        FolderOptions,
        {"size": size, "class_names": list(class_names), "clusters": clusters},
        "from_folder",
    )
    source = load_image_folder(path, settings, test=test, transform=transform, name=name)
    return _build_from_source(source, split, normalize=normalize)


def from_leaf(
    path: str | Path,
    *,
    transform: Callable[[Any], Any] | None = None,
    clusters: Mapping[str, int] | None = None,
    classes: int | None = None,
    class_names: Sequence[str] = (),
    split: Split = Split(),
    normalize: Literal["half", "standard", "none"] = "half",
    name: str = "",
) -> Federation:
    """Make a federation from a dataset in the layout of LEAF: each user is a client.

    Read are `data/train/*.json` and `data/test/*.json`, each a table of "users", "num_samples" and
    "user_data", which has "x" and "y" of each user. A target that is text is a class.

    Args:
        path: the folder of the dataset, which holds `data`, or that folder itself.
        transform: applied to each input while it is read, as to code text or to give pixels their
            shape; it returns numbers or a picture of Pillow, all of one shape.
        clusters: the known cluster of each client, by client; for Oracle, metrics and reports.
        classes: number of classes; see `from_arrays`, as for all that follows. Needed where not
            every class occurs in training.
        class_names: all labels, in order.
        split: how samples are divided, and distribution shifts to add. Where there is no folder
            `test`, each client holds out a share of its samples.
        normalize: normalization of images.
        name: a name for the data; that of the folder by default.

    Raises:
        DataError: when a file is laid out otherwise or says other numbers of samples than it has,
            training and test have other users, or inputs are text.
    """
    train, test = load_leaf(path, transform)
    return from_arrays(
        train[0],
        train[1],
        clients=train[2],
        test=test,
        clusters=clusters,
        classes=classes,
        class_names=class_names,
        split=split,
        normalize=normalize,
        name=name or expand_home(path).resolve().name,
    )


def from_dataset(
    dataset: Any,
    clients: Any = None,
    *,
    num_clients: int | None = None,
    transform: Callable[[Any], Any] | None = None,
    inputs: str | Sequence[str] | None = None,
    target: str | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    in_memory: bool = True,
    test: Any = None,
    clusters: Sequence[int] | Mapping[Any, int] | None = None,
    classes: int | None = None,
    class_names: Sequence[str] = (),
    split: Split = Split(),
    normalize: Literal["half", "standard", "none"] = "half",
    name: str = "arrays",
) -> Federation:
    """Make a federation from one dataset, whose items are read once and in order.

    Args:
        dataset: map-style or iterable, of pairs (input, target), or of tables such as those of
            Hugging Face. An input is an array, a picture of Pillow, or a tuple or table of several.
            A table of splits, such as a `DatasetDict`, is its "train", with its "test" as test set.
            The path of an Arrow or parquet file, or of a folder of them, is a dataset of its rows.
        clients: the client id of each sample, or the key of an item that says it.
        num_clients: instead of `clients`: divide the samples among this many clients.
        transform: applied to each input while it is read, as to make pictures one size.
        inputs: the key of the input, or the keys of several, where items are tables; when not given
            the only one that is left, or all those of a tokenizer of transformers: "input_ids",
            "attention_mask", "token_type_ids" and "position_ids".
        target: the key of the target; when not given the one of "label", "labels", "target",
            "targets" and "y" that occurs.
        collate: makes one table of tensors of a list of items, such as a data collator of
            transformers that pads them to one length. It gets all items, with those of the test
            set, at once.
        in_memory: whether inputs are kept. If not, only targets are, and items are read again when
            they are needed, a batch at a time: for data that the memory does not hold. The dataset
            is map-style, an input is one array, and an item is the same each time.
        test: the test set of all clients, as (x, y) or a dataset; or each client's own, as (x, y,
            clients), (dataset, clients), or a dataset where `clients` is a key.
        clusters: the known cluster of each client; see `from_arrays`, as for all that follows.
        classes: number of classes.
        class_names: a name for each class; by default the names that a dataset of Hugging Face
            knows.
        split: how samples are divided, and distribution shifts to add.
        normalize: normalization of images.
        name: a name for the data.

    Raises:
        ConfigError: when arguments contradict each other, or name no key.
        DataError: when its items are neither pairs nor tables, or differ in shape.
    """
    key = clients if isinstance(clients, str) else None
    form = ItemForm(transform, inputs, target, key)
    # Before anything is read: a table of splits brings its own test set.
    dataset, held = split_dataset_dict(dataset)
    # As it was given: a collator makes a list of it, which knows no names of classes.
    known = dataset
    # A test set in the call wins over that of a table of splits.
    test = held if test is None else test
    if collate is not None:
        _require_in_memory(in_memory)
        dataset, test = _collate(collate, dataset, test, key)
    x, y, owners, _ = read_datasets({"the dataset": dataset}, form, split.seed, in_memory)
    return from_arrays(
        x,
        y,
        clients=clients if key is None else owners,
        num_clients=num_clients,
        test=_read_test(test, form, split.seed, in_memory),
        clusters=clusters,
        classes=classes,
        class_names=class_names or find_class_names([known], target),
        split=split,
        normalize=normalize,
        name=name,
    )


def from_datasets(
    datasets: Any,
    *,
    transform: Callable[[Any], Any] | None = None,
    inputs: str | Sequence[str] | None = None,
    target: str | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    in_memory: bool = True,
    test: Any = None,
    clusters: Sequence[int] | Mapping[Any, int] | None = None,
    classes: int | None = None,
    class_names: Sequence[str] = (),
    split: Split = Split(),
    normalize: Literal["half", "standard", "none"] = "half",
    name: str = "arrays",
) -> Federation:
    """Make a federation from datasets, one for each client, whose items are read once.

    Args:
        datasets: a list, or a table by the names of the clients; or a federated dataset or a
            partitioner of Flower, each partition of which is a client. Their items are those of
            `from_dataset`.
        transform: applied to each input while it is read.
        inputs: the key of the input, or the keys of several; see `from_dataset`.
        target: the key of the target; see `from_dataset`.
        collate: see `from_dataset`.
        in_memory: see `from_dataset`.
        test: each client's own test set, as a list or table of datasets like `datasets`; or the
            test set of all clients, as (x, y) or one dataset; or (x, y, clients).
        clusters: the known cluster of each client; see `from_arrays`, as for all that follows.
        classes: number of classes.
        class_names: a name for each class; by default the names that datasets of Hugging Face know.
        split: how samples are divided, and distribution shifts to add.
        normalize: normalization of images.
        name: a name for the data.

    Raises:
        ConfigError: when arguments contradict each other, or name no key.
        DataError: when there are no datasets, or items differ in shape.
    """
    if is_dataset_dict(datasets):
        raise ConfigError(
            f"datasets is a table of {' and '.join(datasets)}, which are splits and not clients; "
            "expected a dataset for each client: from_dataset takes a table of splits"
        )
    form = ItemForm(transform, inputs, target)
    by_client = _list_by_client(list_partitions(datasets))
    # As in `from_dataset`: before a collator makes lists of them.
    known = by_client.values()
    if collate is not None:
        _require_in_memory(in_memory)
        by_client, test = _collate_clients(collate, by_client, test)
    x, y, owners = _read_clients(by_client, "dataset", form, split.seed, in_memory)
    partitions = hasattr(test, "load_partition")
    if isinstance(test, list | Mapping) or partitions:
        own = _list_by_client(list_partitions(test))
        # As text: a client may be a number in one table and text in the other.
        if set(map(str, own)) != set(map(str, by_client)):
            missing = sorted(set(map(str, own)) ^ set(map(str, by_client)))
            raise DataError(
                f"client {missing[0]!r} has only one of training and test data; expected a test "
                f"set for each of the {len(by_client)} clients, and no other"
            )
        held: Any = _read_clients(own, "test set", form, split.seed, in_memory)
    else:
        held = _read_test(test, form, split.seed, in_memory)
    return from_arrays(
        x,
        y,
        clients=owners,
        test=held,
        clusters=clusters,
        classes=classes,
        class_names=class_names or find_class_names(known, target),
        split=split,
        normalize=normalize,
        name=name,
    )


def _require_in_memory(in_memory: bool) -> None:
    if not in_memory:
        raise ConfigError("collate takes all items at once; in_memory=False: leave one of them out")


def _collate(
    collate: Callable[[list[Any]], Any], dataset: Any, test: Any, key: str | None
) -> tuple[Any, Any]:
    """Return a dataset and its test set with the items that a collator makes of them."""
    held, clients, test_key = test, None, key
    if isinstance(test, tuple) and len(test) == 2 and is_dataset(open_files(test[0])):
        held, clients = test
        # A column of the test set may be called otherwise than that of the training set.
        test_key = clients if isinstance(clients, str) else key
    _check_collated_test(held)
    groups = [{"the dataset": dataset}, {} if held is None else {"the test set": held}]
    # Both in one call: a collator pads all items to the longest one that it gets.
    first, second = collate_items(collate, groups, [key, test_key])
    if held is not None:
        held = second["the test set"]
        # In a pair a plain list would be taken for inputs; alone it is a list of items.
        test = held if clients is None else (_ItemList(held), clients)
    return first["the dataset"], test


def _collate_clients(
    collate: Callable[[list[Any]], Any], by_client: Mapping[Any, Any], test: Any
) -> tuple[Mapping[Any, Any], Any]:
    """Return the datasets of clients and their test sets as a collator makes them."""
    own, group = None, {}
    if isinstance(test, list | Mapping) or hasattr(test, "load_partition"):
        own = _list_by_client(list_partitions(test))
        group = prefix_keys("test set ", own)
    elif test is not None:
        _check_collated_test(test)
        group = {"the test set": test}
    named = prefix_keys("dataset ", by_client)
    # As in `_collate`: training and test items must get one length.
    first, second = collate_items(collate, [named, group], [None, None])
    if own is not None:
        test = dict(zip(own, second.values(), strict=True))
    elif test is not None:
        test = second["the test set"]
        # A plain list would be a test set for each client.
        return dict(zip(by_client, first.values(), strict=True)), _ItemList(test)
    return dict(zip(by_client, first.values(), strict=True)), test


def _check_collated_test(test: Any) -> None:
    test = open_files(test)
    if test is not None and not is_dataset(test) and not isinstance(test, list):
        raise ConfigError(
            f"collate is given, and test is a {type(test).__name__}; expected a dataset of the "
            "same items, which is padded together with the others"
        )


class _ItemList:
    """Items as a dataset, where a list would be a test set for each client."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, place: int) -> Any:
        return self.items[place]


def _list_by_client(datasets: Any) -> Mapping[Any, Any]:
    """Return datasets by client: their names, or their numbers from 0."""
    found = datasets if isinstance(datasets, Mapping) else dict(enumerate(datasets))
    if not found:
        raise DataError("there are no datasets; expected one for each client")
    seen: dict[str, Any] = {}
    for client in found:
        other = seen.setdefault(str(client), client)
        if other != client:  # ids are text in the end
            raise DataError(
                f"the clients {other!r} and {client!r} are both called {str(client)!r}; expected "
                "another name for each: join their data if they are one"
            )
    return found


def _read_clients(
    by_client: Mapping[Any, Any], what: str, form: ItemForm, seed: int, in_memory: bool
) -> tuple[Any, Any, list[Any]]:
    """Read each client's dataset; return inputs, targets, and the client of each sample."""
    x, y, _, sizes = read_datasets(prefix_keys(f"{what} ", by_client), form, seed, in_memory)
    owners: list[Any] = []
    for client, size in zip(by_client, sizes, strict=True):
        owners += [client] * size
    return x, y, owners


def _read_test(test: Any, form: ItemForm, seed: int, in_memory: bool) -> tuple[Any, ...] | None:
    """Return a test set as `from_arrays` takes it, from one or from a dataset.

    Raises:
        ConfigError: when it is neither.
    """
    owners: Any = None
    # A pair may also be inputs and targets, which are no dataset.
    if isinstance(test, tuple) and len(test) == 2 and is_dataset(open_files(test[0])):
        test, owners = test
        # The key of an item, and not the clients themselves.
        if isinstance(owners, str):
            form, owners = replace(form, client=owners), None
    if test is None or isinstance(test, tuple):
        return test
    test = open_files(test)
    # A list holds the items of one dataset.
    if not is_dataset(test) and not isinstance(test, list):
        raise ConfigError(
            f"test is a {type(test).__name__}; expected (x, y), (x, y, clients), a dataset, or "
            "(dataset, clients)"
        )
    x, y, found, _ = read_datasets({"the test set": test}, form, seed, in_memory)
    # Clients that the items name come first; others are those of the pair.
    owners = found or owners
    return (x, y) if owners is None else (x, y, owners)
