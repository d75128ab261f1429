"""Tables as data: columns of numbers, booleans, text or categories, with a client per row."""

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from itertools import chain
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
import torch
from annotated_types import Ge, MinLen
from jaxtyping import Float

from coterie._util.mappings import number_items
from coterie._util.settings import Configurable
from coterie.data.coding import MOST, WHOLE, code_targets, number_clients, write_category
from coterie.data.guesses import (
    fold_look,
    warn_about_columns,
    warn_about_ids,
    warn_about_lookalikes,
    warn_about_shared_samples,
)
from coterie.data.preparation import FILLS, ColumnPreparation, Preparation, TableColumn
from coterie.data.schema import TableSchema
from coterie.data.source import InputPart, Samples, Source
from coterie.data.table_files import (
    CsvFormat,
    Kind,
    check_column,
    decide_types,
    follow_types,
    load_table,
    read_ids,
    require_no_dates,
    warn_of_empty_words,
)
from coterie.errors import ConfigError, DataError, describe_unknown

Code = Literal["one-hot", "codes"]
Encode = Code | Mapping[str, Code]
Impute = str | float | Mapping[str, str | float] | None


@dataclass(frozen=True)
class TableOptions(Configurable):
    """The roles of the columns of a table; see `from_table`.

    Args:
        target: the column to learn, or several of numbers.
        client: the column that says whose a row is; none for a table that others divide.
        features: the columns of the inputs; all others when not given.
        encode: "one-hot" or "codes" for columns of text or categories; for all, or a table by
            column.
        impute: "mean", "median", "most-frequent" or a number for empty entries; for all columns, or
            a table by column.
        indicate: columns of numbers that get a further entry, 1 where the column is empty and 0
            elsewhere.
        scale: "standard" for columns of numbers.
        categories: all values of columns of text or categories, in order, by column.
        class_names: all values of the target, in order: text, whole numbers, true and false. Other
            names are those of the classes 0, 1, and so on.
        classes: number of classes of a target of whole numbers from 0; when not given, the values
            that occur are the classes. 0 makes it a regression.
        clusters: the known cluster of each client, by client.
        split_column: the column that says of each row whether it is for "train", "validation" or
            "test"; each client's own test rows are then its test set. Without validation rows,
            some of the training rows are taken.
        schema: the path of the schema of a table read before, such as `table.json` in a study's
            folder: columns, categories, classes, scaling and what fills empty entries are then
            those of that table.
        separator: what divides the columns of a CSV file, one character or "tab"; found when not
            given.
        decimal: the sign before the fraction of a number in a CSV file; found when not given.
        encoding: of a CSV file, such as "cp1252"; UTF-8, or UTF-16 with its mark, when not given.
    """

    target: str | Annotated[Sequence[str], MinLen(1)]
    client: str | None = None
    features: Annotated[Sequence[str], MinLen(1)] | None = None
    encode: Code | Mapping[str, Any] = "one-hot"
    impute: float | str | Mapping[str, Any] | None = None
    indicate: Sequence[str] = ()
    scale: Literal["standard"] | None = None
    categories: Mapping[str, Any] = field(default_factory=dict)
    class_names: Sequence[str] = ()
    classes: Annotated[int, Ge(0)] | None = None
    clusters: Mapping[Any, Any] | None = None
    split_column: str | None = None
    schema: str | None = None
    separator: str | None = None
    decimal: Literal[".", ","] | None = None
    encoding: str | None = None

    def check(self) -> None:
        """Check the settings that are given by column."""
        for name, code in self.encode.items() if isinstance(self.encode, Mapping) else ():
            if code not in ("one-hot", "codes"):
                raise ConfigError(f"encode of {name!r} is {code!r}; expected 'one-hot' or 'codes'")
        for name, values in self.categories.items():
            # A value that stands twice would have two codes, of which one is never used.
            if not isinstance(values, list | tuple) or len(set(values)) < len(values):
                raise ConfigError(
                    f"categories of {name!r} is {values!r}; expected a list of values, each once"
                )
        # Clusters are of clients; rows that clients draw have none that could be looked up.
        if self.clusters is not None and self.client is None:
            raise ConfigError("clusters is given without client; planted clusters come from shift")
        if isinstance(self.impute, str) and self.impute not in FILLS:
            raise ConfigError(f"impute is {self.impute!r}; expected {_FILLED}")
        self.csv_format.check()

    @property
    def csv_format(self) -> CsvFormat:
        """What a CSV file does not say."""
        return CsvFormat(self.separator, self.decimal, self.encoding)

    @property
    def target_names(self) -> Sequence[str]:
        """The columns to learn."""
        return [self.target] if isinstance(self.target, str) else self.target

    def select_inputs(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the columns of the inputs.

        Raises:
            ConfigError: when a setting names a column that the table lacks, or none is left.
        """
        # In a fixed order, so that a message names the same column every time.
        taken = list(self.target_names)
        for role in (self.client, self.split_column):
            if role is not None:
                taken.append(role)
        chosen = list(self.features or ())
        if self.features is None:
            chosen = [name for name in names if name not in taken]
            # Only where all columns are taken: by its name nobody can ask for it.
            if "" in chosen:
                raise ConfigError(
                    f"column {names.index('')} of the table has no name, such as an index that "
                    "was written with it; give it one, or leave it out of features"
                )
        named = [*taken, *chosen]
        for setting in (self.encode, self.impute, self.categories):
            if isinstance(setting, Mapping):
                named += setting
        # A wide table has 10,000 columns; a search in their list for each would be slow.
        known = frozenset(names)
        for name in named:
            if name not in known:
                raise ConfigError(describe_unknown("column", name, names))
        for name in self.indicate:
            if name not in chosen:
                raise ConfigError(
                    f"indicate: {describe_unknown('column of the inputs', name, chosen)}"
                )
        # What is learned must not be among the inputs: it would be predicted from itself.
        for name in chosen:
            if name in taken:
                raise ConfigError(
                    f"{name!r} is among the features, and is what is learned or the client; leave "
                    "it out"
                )
        if not chosen:
            raise ConfigError(
                f"the table has the columns {', '.join(names)}; none is left as an input"
            )
        return tuple(chosen)


_PLAIN_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?([eE][+-]?\d+)?")
# Numbers with a decimal comma or with parted thousands count here, and are then named as the error.
_NUMBER = re.compile(
    r"[+-]?(\d{1,3}(['’.,\u00a0\u202f ]\d{3})+([.,]\d+)?|\d+([.,]\d+)?)([eE][+-]?\d+)?"
)
# A number with the sign of a currency before it, or with a unit behind it: $5, 27.5%, 12 mg.
_WITH_UNIT = re.compile(
    r"(?P<before>[$€£¥]?)\s*[+-]?\d+(?:[.,]\d+)*\s*(?P<behind>[^\d\s+.,-][^\d\s+-]*)?"
)
# With at most this many numbers, a column of text is taken for categories.
_FEW = 20
_FILLED = f"{', '.join(map(repr, FILLS))}, a number, or a table of these by column"


def read_table(
    table: Any,
    columns: TableOptions,
    *,
    test: Any = None,
    name: str = "table",
    shared: bool = False,
) -> Source:
    """Make a source from a table.

    Args:
        table: of pandas, polars or arrow, a table of arrays by column, or the path of a CSV or
            parquet file.
        columns: the roles of its columns.
        test: a table that is the test set of all clients.
        name: a name for the data.
        shared: whether other machines read tables of their own: classes and categories must then be
            given.

    Raises:
        ConfigError: when a setting names no column, or is missing.
        DataError: when columns cannot be used.
    """
    # Both say which rows are for testing.
    if columns.split_column is not None and test is not None:
        raise ConfigError("split_column and test are both given; leave one out")
    tables, notes = _load_tables(table, test, columns, name)
    pool, chosen = tables[0], columns.select_inputs(tables[0].arrow.column_names)
    read = [_convert_column(tables, feature, columns) for feature in chosen]
    # Nodes see their own rows alone: what a table leaves open they would each fill in otherwise.
    if shared and columns.schema is None:
        _require_shared_settings(read, tables, columns)
    # Indicators come behind all other columns of numbers, in the order of these.
    for one in tuple(read):
        if one.name in columns.indicate:
            read.append(_make_indicator(one))
    # Numbers come first, then codes: they are the two tensors of an input that has both.
    numbers, codes = [], []
    for one in read:
        (codes if one.codes else numbers).append(one)
    ordered = [*numbers, *codes]
    fitted, entries = _list_preparations(ordered, columns)
    # Codes alone are whole numbers; with numbers they become a part of their own.
    whole = bool(codes) and not numbers
    kind = torch.int32 if whole else torch.float32
    if fitted:
        kind = torch.float64  # NaN stands for empty entries until clients have filled them
    found_numbers = {}
    for one in numbers:
        if one.numeric:
            found_numbers[one.name] = np.concatenate(one.values)
    warn_about_ids(found_numbers)
    # Columns are scaled in float64, where large whole numbers stay apart.
    if columns.scale is None:
        warn_about_columns(found_numbers)
    y, class_names, classes = _convert_target(tables, columns)
    samples = []
    for place, one in enumerate(tables):
        # In the order of `entries`, in which `fitted` counts places.
        x = np.concatenate([column.values[place] for column in ordered], axis=1)
        samples.append(Samples(torch.from_numpy(x).to(kind), y[place], one.owners or {}))
    validation = ""
    if columns.split_column is not None:
        samples, validation = _divide_rows(pool, samples[0], columns.split_column)
    elif test is None:
        samples.append(Samples(samples[0].x[:0], samples[0].y[:0]))
    if len(samples[1]):
        pool_rows, held = ((one.x, one.y) for one in samples)
        warn_about_shared_samples(pool_rows, held, name)
    parts = ()
    if numbers and codes:
        width = sum(one.num_entries for one in numbers)
        # Without names they are the first two arguments of the module's `forward`.
        parts = (InputPart("", (width,)), InputPart("", (len(codes),), whole=True))
    preparation = Preparation(tuple(fitted), whole) if fitted else None
    return Source(
        name,
        samples[0],
        samples[1],
        classes,
        class_names,
        clients="" if columns.client is None else "client",
        client_names=pool.names,
        feature_names=tuple(entries),
        parts=parts,
        preparation=preparation,
        table=tuple(one.describe(columns.scale is not None) for one in ordered),
        targets=tuple(columns.target_names),
        notes=notes,
        validation=validation,
    ).check()


def _list_preparations(
    ordered: Sequence["_InputColumn"], columns: TableOptions
) -> tuple[list[ColumnPreparation], list[str]]:
    """Return what clients fill and scale, and the names of all entries of an input."""
    fitted: list[ColumnPreparation] = []
    entries: list[str] = []
    for one in ordered:
        scaled = one.numeric and columns.scale is not None
        if scaled or one.impute is not None:
            indicated = one.name in columns.indicate
            fitted.append(
                ColumnPreparation(
                    one.name, len(entries), one.num_entries, one.impute, scaled, indicated
                )
            )
        entries += one.names
    return fitted, entries


# Codes by the words that programs write: 0 for training, 1 for validation, 2 for testing.
_SPLITS = {
    **dict.fromkeys(("train", "training"), 0),
    **dict.fromkeys(("validation", "valid", "val", "dev"), 1),
    **dict.fromkeys(("test", "testing"), 2),
}


def _divide_rows(table: "_ArrowTable", samples: Samples, name: str) -> tuple[list[Samples], str]:
    """Return the rows for training and validation, those for testing, and the column of validation.

    Raises:
        DataError: when a row is for nothing of the three, or a client has none for training.
    """
    words = table.get_column(name).to_pylist()
    codes = np.array([_SPLITS.get(str(one).strip().casefold(), -1) for one in words], np.int64)
    if (codes < 0).any():
        row = int(np.flatnonzero(codes < 0)[0])
        raise DataError(
            f"column {name!r} is {words[row]!r} {table.locate_row(row)}; expected train, "
            "validation or test"
        )
    if not (codes == 2).any():
        raise DataError(f"column {name!r} says test in no row; expected each client's test rows")
    if "client" in samples.columns:
        owners = samples.columns["client"].numpy()
        # A client needs rows of both; those for validation may be missing.
        for what, code in (("train", 0), ("test", 2)):
            counts = np.bincount(owners[codes == code], minlength=owners.max() + 1)
            if not counts.all():
                missing = int(np.flatnonzero(counts == 0)[0])
                who = repr(table.names[missing]) if table.names else str(missing)
                raise DataError(
                    f"column {name!r} says {what} in no row of client {who}; expected one at "
                    "least: add it, or leave the client out"
                )
    # Training and validation rows stay one pool, with a column that says which is which.
    divided = []
    for kept in (codes < 2, codes == 2):
        rows = torch.from_numpy(np.flatnonzero(kept))
        columns = {key: values[rows] for key, values in samples.columns.items()}
        divided.append(Samples(samples.x[rows], samples.y[rows], columns))
    if not (codes == 1).any():
        return divided, ""
    columns = {**divided[0].columns, "validation": torch.from_numpy(codes[codes < 2])}
    divided[0] = replace(divided[0], columns=columns)
    return divided, "validation"


def _load_tables(
    table: Any, test: Any, columns: TableOptions, name: str
) -> tuple[list["_ArrowTable"], tuple[str, ...]]:
    """Load the table and the one for testing, whose columns are what those of the first are."""
    loaded = load_table(table, columns.csv_format, name)
    chosen = columns.select_inputs(loaded.names)
    # Ids before types are decided: as a number 1.10 would be 1.1.
    owners = [] if columns.client is None else read_ids(loaded, columns.client)
    needed = [*chosen, *columns.target_names]
    arrow, notes = decide_types(loaded, needed, columns.categories, columns.decimal)
    if columns.schema is not None:
        known = _ArrowTable(arrow, None, name)
        # As a later table is compared with the first: a schema stands for the first table.
        for one, kind in _list_kinds(TableSchema.load(columns.schema).columns).items():
            _require_kind(known, one, kind, "the schema")
    pool = _ArrowTable(arrow, columns.client, name, owners, columns.clusters)
    if test is None:
        return [pool], (*loaded.notes, *notes)
    what = f"{name}: the test table"
    held = load_table(test, columns.csv_format, what)
    if columns.client is not None and columns.client in held.names:
        warnings.warn(
            f"column {columns.client!r} of the test table is not used: each client is tested on "
            f"all {held.arrow.num_rows} rows; for each client's own test rows put them into the "
            "same table, with split_column",
            stacklevel=2,
        )
    for one in needed:
        check_column(held.arrow, one, what)
    kinds: dict[str, Kind] = {one: _find_kind(arrow[one].type) for one in needed}
    # Categories that were given make text of any column, as in the first table.
    for one in columns.categories:
        if one in chosen:
            kinds[one] = "text"
    later = _ArrowTable(follow_types(held, kinds, columns.categories, columns.decimal), None, what)
    for one, kind in kinds.items():
        _require_kind(later, one, kind)
    return [pool, later], (*loaded.notes, *notes)


def _find_kind(kind: pa.DataType) -> Kind:
    if _is_text(kind):
        return "text"
    return "true or false" if pa.types.is_boolean(kind) else "numbers"


def _list_kinds(columns: Sequence[TableColumn]) -> dict[str, Kind]:
    """Return what each column of a table is, by its name."""
    kinds: dict[str, Kind] = {}
    for column in columns:
        if column.categories is not None:
            kinds[column.name] = "text"
        elif not column.indicator:  # that has the name of the column whose empty entries it marks
            truth = column.kind == "true or false"
            kinds[column.name] = "true or false" if truth else "numbers"
    return kinds


def _require_kind(table: "_ArrowTable", name: str, kind: Kind, known: str = "training") -> None:
    """Check that a later table has numbers, or true and false, where the first has them.

    Raises:
        DataError: when it has text, or other numbers than 1 and 0.
    """
    values = table.get_column(name)
    if kind != "text" and _is_text(values.type):
        value = next((one for one in values.to_pylist() if one is not None), None)
        raise DataError(
            f"column {name!r} of {table.what} is text, such as {value!r}; expected {kind}, as in "
            f"{known}"
        )
    if kind == "true or false" and not pa.types.is_boolean(values.type):
        numbers = table.get_numbers(name)
        # 1 and 0 are how other programs write true and false.
        others = np.flatnonzero(~np.isnan(numbers) & (numbers != 0) & (numbers != 1))
        if len(others):
            raise DataError(
                f"column {name!r} of {table.what} is {numbers[others[0]]:g} in row {others[0]}; "
                f"expected true or false (1 or 0), as in {known}"
            )


def read_inputs(table: Any, columns: Sequence[TableColumn]) -> Float[np.ndarray, "samples entries"]:
    """Read rows with the encoding of a training table; NaN where an entry is empty.

    Args:
        table: as `read_table` takes it; columns that are not asked for are left.
        columns: what to read, in order.

    Raises:
        ConfigError: when a column is missing.
        DataError: when a column cannot be used: a category that was not there, or an empty entry
            that nothing fills.
    """
    loaded, entries = load_table(table), []
    kinds, categories = _list_kinds(columns), {}
    for column in columns:
        check_column(loaded.arrow, column.name, "the table")
        if column.categories is not None:
            categories[column.name] = column.categories
    found = _ArrowTable(follow_types(loaded, kinds, categories), None, loaded.what)
    # Rows that have been empty in all columns so far.
    has_none = np.ones(loaded.arrow.num_rows, bool)
    for column in columns:
        if column.categories is None:
            _require_kind(found, column.name, kinds[column.name])
            _require_numbers(found.get_column(column.name).type, column.name)
            values = found.get_numbers(column.name)[:, None]
            if column.indicator:
                values = np.isnan(values).astype(np.float64)
        else:
            _, codes = _encode_categories([found], column.name, column.categories)
            values = codes[0][:, None]
            if not column.codes:
                # An empty entry is NaN in all categories, as in training.
                places = np.arange(len(column.categories))
                values = np.where(np.isnan(values), np.nan, values == places)
        # The first entry is enough: an empty row is NaN in all entries of its column.
        empty = np.flatnonzero(np.isnan(values[:, 0]))
        if len(empty) and not column.filled:
            raise DataError(
                f"column {column.name!r} is empty {found.locate_row(int(empty[0]))}; it was full "
                "in training, and impute said nothing of it: fill or drop it"
            )
        entries.append(values)
        if not column.indicator:
            has_none &= np.isnan(values).all(axis=1)
    if has_none.any():
        rows = np.flatnonzero(has_none)
        warnings.warn(
            f"{found.what} has {len(rows)} rows without any input, the first "
            f"{found.locate_row(int(rows[0]))}: what is said of them comes from fills alone; drop "
            "them if they are no samples",
            stacklevel=2,
        )
    return np.concatenate(entries, axis=1)


class _ArrowTable:
    """A table of arrow with the client of each row."""

    def __init__(
        self,
        arrow: pa.Table,
        client: str | None,
        what: str,
        ids: Sequence[Any] = (),
        clusters: Mapping[Any, Any] | None = None,
    ) -> None:
        self.arrow, self.what = arrow, what
        self.owners: Mapping[str, Any] | None = None
        self.names: tuple[str, ...] = ()
        if client is not None:
            for row, one in enumerate(ids):
                # NaN is unequal to itself.
                if one is None or one != one or one == "":
                    raise DataError(
                        f"column {client!r} has no client in row {row}; fill it, or drop the row"
                    )
            self.owners, self.names = number_clients(list(ids), len(ids), clusters)

    def get_column(self, name: str) -> pa.ChunkedArray:
        """Return a column."""
        check_column(self.arrow, name, self.what)
        return self.arrow[name]

    def get_type(self, name: str) -> pa.DataType:
        """Return the type of a column."""
        return self.get_column(name).type

    def locate_row(self, row: int) -> str:
        """Describe where a row is."""
        if self.owners is None:
            return f"in row {row}"
        client = int(self.owners["client"][row])
        who = repr(self.names[client]) if self.names else str(client)
        return f"in row {row}, of client {who}"

    def get_numbers(self, name: str) -> Float[np.ndarray, " samples"]:
        """Return a column of numbers; NaN where it is empty."""
        values = self.get_column(name)
        # A column without any value has no type to convert.
        if pa.types.is_null(values.type):
            return np.full(len(values), np.nan)
        if pa.types.is_boolean(values.type):
            values = values.cast(pa.int8())
        # safe=False: whole numbers and decimals beyond the digits of float64 are rounded.
        floats = values.cast(pa.float64(), safe=False)
        found = np.asarray(floats.to_numpy(zero_copy_only=False), np.float64)
        wrong = np.flatnonzero(np.isinf(found))
        if len(wrong):
            raise DataError(
                f"column {name!r} is infinite {self.locate_row(int(wrong[0]))}; replace it"
            )
        return found


@dataclass(frozen=True)
class _InputColumn:
    """A column of inputs, read from each table: its entries, and what fills empty ones."""

    name: str
    values: Sequence[Float[np.ndarray, "samples width"]]
    names: tuple[str, ...]
    impute: str | float | None
    numeric: bool = True
    codes: bool = False
    categories: tuple[Any, ...] | None = None
    indicates: str = ""
    kind: Kind = "numbers"

    @property
    def num_entries(self) -> int:
        return len(self.names)

    def describe(self, scaled: bool) -> TableColumn:
        """Return how the column is read, which later tables follow."""
        known = self.categories
        if known is not None:  # such as numbers of numpy, which no file of text has
            known = tuple(one.item() if isinstance(one, np.generic) else one for one in known)
        impute = self.impute
        if known is not None and isinstance(impute, float):
            impute = write_category(known[int(impute)])  # what fills a category is its code
        name, indicator = self.indicates or self.name, bool(self.indicates)
        return TableColumn(
            name,
            known,
            self.codes,
            impute is not None,
            indicator,
            self.kind,
            scaled and self.numeric,
            impute,
        )


def _convert_column(
    tables: Sequence[_ArrowTable], name: str, columns: TableOptions
) -> _InputColumn:
    encode, impute, is_named = columns.encode, columns.impute, name in columns.categories
    if isinstance(encode, Mapping):
        # A setting by name makes categories of a column, also of one of numbers.
        is_named = is_named or name in encode
        encode = encode.get(name, "one-hot")
    if isinstance(impute, Mapping):
        impute = impute.get(name)
    kinds = [table.get_type(name) for table in tables]
    if not is_named and not any(map(_is_text, kinds)):
        for kind in kinds:
            _require_numbers(kind, name)
        values = [table.get_numbers(name)[:, None] for table in tables]
        if isinstance(impute, str) and impute not in FILLS:
            raise ConfigError(f"impute of {name!r} is {impute!r}; expected {_FILLED}")
        fill = _choose_fill(tables, name, values, impute, columns.schema)
        return _InputColumn(name, values, (name,), fill, kind=_find_kind(kinds[0]))
    if not is_named:
        _check_text(tables, name)
        for table in tables:
            if _is_text(table.get_type(name)):
                warn_of_empty_words(name, table.get_column(name))
    known, codes = _encode_categories(tables, name, columns.categories.get(name))
    filled: str | float | None = impute
    # Only a setting by column can name a category.
    if isinstance(columns.impute, Mapping):
        place = -1 if impute is None else _CategoryPlaces(known, name)(impute)
        if place >= 0:
            filled = float(place)  # what fills a category is its code
        elif impute not in (None, "most-frequent"):
            words = list(map(write_category, known))
            raise ConfigError(
                f"impute of {name!r} is {impute!r}; expected 'most-frequent' or one of its "
                f"categories: {', '.join(words[:20])}"
            )
    elif isinstance(impute, str):
        filled = "most-frequent"
    elif impute is not None:
        filled = None  # a number fills columns of numbers
    values = [code[:, None] for code in codes]
    filled = _choose_fill(tables, name, values, filled, columns.schema)
    if encode == "codes":
        return _InputColumn(name, values, (name,), filled, False, True, tuple(known), kind="text")
    if len(known) > MOST:
        raise DataError(
            f"column {name!r} has {len(known):,} different values, too many for an entry each; "
            f"leave it out of features, or encode = {{ {name} = 'codes' }}"
        )
    # Among few rows all values may differ by chance.
    if len(known) > _FEW and len(known) == np.isfinite(codes[0]).sum():
        warnings.warn(
            f"column {name!r} has another value in each row, and becomes {len(known)} entries; if "
            "it is an id, leave it out of features",
            stacklevel=2,
        )
    # An empty entry is NaN in all categories, so that it is filled as one.
    spread = [np.where(np.isnan(code), np.nan, code == np.arange(len(known))) for code in values]
    entries = tuple(f"{name}={one}" for one in known)
    return _InputColumn(name, spread, entries, filled, False, False, tuple(known), kind="text")


def _make_indicator(read: _InputColumn) -> _InputColumn:
    """Make an entry that is 1 where a column of numbers is empty.

    Raises:
        ConfigError: when it is none of numbers.
    """
    if not read.numeric:
        raise ConfigError(
            f"indicate: {read.name!r} is a column of categories; give its empty entries one of "
            "their own, as in "
            f"categories = {{ {read.name} = [..., 'unknown'] }} and impute = {{ {read.name} = "
            "'unknown' }"
        )
    values = [np.isnan(own).astype(np.float64) for own in read.values]
    return _InputColumn(
        f"{read.name} is empty",
        values,
        (f"{read.name} is empty",),
        None,
        numeric=False,
        indicates=read.name,
    )


def _choose_fill(
    tables: Sequence[_ArrowTable],
    name: str,
    values: Sequence[Float[np.ndarray, "samples 1"]],
    impute: str | float | None,
    schema: str | None,
) -> str | float | None:
    """Return what fills the empty entries of a column: in these tables, and in later ones.

    Raises:
        DataError: when there are some, and nothing was chosen, here or in the schema.
    """
    for table, own in zip(tables, values, strict=True):
        empty = np.flatnonzero(np.isnan(own[:, 0]))
        if len(empty) and impute is None:
            kinds = '"mean", "median" or a number'
            if _is_text(table.get_type(name)):
                kinds = '"most-frequent"'
            choose = f"choose what fills them: impute = {kinds}"
            if schema is not None:
                choose = f"{choose} where the first table is read, since the schema has no impute"
            raise DataError(
                f"column {name!r} has {len(empty)} empty entries (the first "
                f"{table.locate_row(int(empty[0]))}); fill or drop them, or {choose}"
            )
    return impute


def _encode_categories(
    tables: Sequence[_ArrowTable], name: str, given: Sequence[Any] | None
) -> tuple[list[Any], list[Float[np.ndarray, " samples"]]]:
    """Return the values of a column in order, and the code of each row; NaN where empty."""
    arrays, values, ordered = [], [], []
    for table in tables:
        column = table.get_column(name)
        _require_category_values(column.type, name)
        if not _is_text(column.type):
            _require_numbers(column.type, name)
        in_order = pa.types.is_dictionary(column.type) and column.type.ordered
        if not pa.types.is_dictionary(column.type):
            if _is_text(column.type):
                # One type of text for all tables, so that their dictionaries can be compared.
                column = column.cast(pa.large_string())
            column = column.dictionary_encode()
        # Each chunk may have a dictionary of its own.
        encoded = column.unify_dictionaries().combine_chunks()
        arrays.append(encoded)
        values.append(list(map(_convert_decimal, encoded.dictionary.to_pylist())))
        if in_order:
            # An order that was given counts, also for categories of which no row has any.
            ordered += values[-1]
    # The categories given, or those of an ordered dictionary, or the values of the first table.
    known = list(given) if given is not None else list(dict.fromkeys(ordered))
    if not known:
        known = _sort_categories(values)
        warn_about_lookalikes(list(map(write_category, known)), f"column {name!r}: the categories")
        trained = set(map(write_category, values[0]))
        unknown = [one for one in known if write_category(one) not in trained]
        if unknown:
            shown = ", ".join(map(repr, unknown[:5]))
            warnings.warn(
                f"column {name!r} is {shown}{', ...' * (len(unknown) > 5)} in the test table "
                "alone: no client trains on it, so its weights are those of the first model; name "
                "the categories that are meant (categories), or correct the table",
                stacklevel=2,
            )
    find = _CategoryPlaces(known, name)
    codes = []
    for table, encoded, distinct in zip(tables, arrays, values, strict=True):
        # A column of empty entries alone has no dictionary: [0] keeps the lookup legal.
        of_value = np.array(list(map(find, distinct)) or [0], np.float64)
        # Any code stands in for an empty entry, which becomes NaN in the next line.
        index = encoded.indices.fill_null(0).to_numpy(zero_copy_only=False)
        code = np.where(np.asarray(encoded.is_null()), np.nan, of_value[index])
        strange = np.flatnonzero(code < 0)
        if len(strange):
            found = encoded[int(strange[0])].as_py()
            # The nearest mistake: the same word in another case or with other accents.
            look = fold_look(str(found)).casefold()
            alike = [one for one in map(str, known) if fold_look(one).casefold() == look]
            hint = ""
            if alike:
                hint = f"; it differs from {alike[0]!r} in case, spaces or how accents are written"
            raise DataError(
                f"column {name!r} is {found!r} {table.locate_row(int(strange[0]))}; expected one "
                "of its categories: "
                f"{', '.join(map(str, known[:20]))}{hint}"
            )
        codes.append(code)
    return known, codes


def _convert_decimal(value: Any) -> Any:
    """Return a decimal as a whole number or a float, which a schema stores; others as they are."""
    if not isinstance(value, Decimal):
        return value
    return int(value) if value == value.to_integral_value() else float(value)


def _sort_categories(values: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the values of all tables, sorted; as text where only some of them are."""
    found = [one for one in chain.from_iterable(values) if one is not None]
    if len({isinstance(one, str) for one in found}) > 1:
        found = list(map(write_category, found))
    return sorted(set(found))


class _CategoryPlaces:
    """The place of each category, however a later table writes it: 1, 1.0 or "1"."""

    def __init__(self, known: Sequence[Any], name: str) -> None:
        self.places = number_items(map(write_category, known))
        if len(self.places) < len(known):
            raise ConfigError(
                f"categories of {name!r} is {list(known)[:20]}; expected values that differ as text"
            )
        # Text is compared as it is written: "1.0" is not the category "1".
        self.are_text = any(isinstance(one, str) for one in known)

    def __call__(self, value: Any) -> int:
        """Return the place of a value; -1 where it is no category."""
        place = self.places.get(str(value), self.places.get(write_category(value), -1))
        if place >= 0 or self.are_text or not isinstance(value, str):
            return place
        # Categories that are numbers, or true and false, and a file of text.
        folded = value.strip().casefold()
        try:
            return self.places.get(folded, self.places.get(write_category(float(folded)), -1))
        except ValueError:
            return -1


def _convert_target(
    tables: Sequence[_ArrowTable], columns: TableOptions
) -> tuple[list[torch.Tensor], tuple[str, ...], int]:
    """Return the targets of each table, the names of the classes, and their number."""
    names = columns.target_names
    for name in names:
        for table in tables:
            _require_not_empty(table, name)
    if len(names) == 1:
        labels = [_read_labels(table, names[0]) for table in tables]
        what = f"target {names[0]!r}"
        if columns.schema is not None:
            _warn_of_numbered_labels(tables[0], columns)
        coded, found, classes = code_targets(
            labels, columns.classes, columns.class_names, what, _FEW
        )
        kind = np.int64 if classes else np.float32
        return [torch.from_numpy(np.array(one, kind)) for one in coded], found, classes
    # Several columns are targets of a regression or of labels, never one class.
    kinds = []
    for name in names:
        own = [table.get_type(name) for table in tables]
        if any(map(_is_text, own)):
            raise DataError(
                f"target {name!r} is text; expected numbers where several columns are learned"
            )
        kinds += own
    made = [np.stack(list(map(table.get_numbers, names)), axis=1) for table in tables]
    # Whole numbers are labels, of which a sample has several; numbers are a regression.
    whole = all(pa.types.is_integer(kind) or pa.types.is_boolean(kind) for kind in kinds)
    kind = torch.int64 if whole else torch.float32
    return [torch.from_numpy(one).to(kind) for one in made], (), 0


def _warn_of_numbered_labels(table: _ArrowTable, columns: TableOptions) -> None:
    """Warn of a target of numbers where the schema has words: their order may be another one."""
    (name,), words = columns.target_names, list(map(str, columns.class_names))
    kind = table.get_type(name)
    if _is_text(kind) or pa.types.is_boolean(kind) or not words:
        return
    if not any(map(WHOLE.fullmatch, words)):
        order = ", ".join(f"{place} is {one!r}" for place, one in enumerate(words[:5]))
        warnings.warn(
            f"target {name!r} of {table.what} is numbers, and the schema has words: {order}, in "
            "the order of the schema; write the words, unless that is how the numbers were meant",
            stacklevel=2,
        )


def _read_labels(table: _ArrowTable, name: str) -> Any:
    """Return a target: text, with the order of its categories, or numbers of their own type."""
    values = table.get_column(name)
    if _is_text(values.type):
        _require_category_values(values.type, name)
        _check_text([table], name)
        found = values.to_pandas()
        # A categorical column keeps the order of its categories, which are the classes.
        return found if hasattr(found, "cat") else found.to_numpy(object)
    _require_numbers(values.type, name)
    if pa.types.is_integer(values.type) or pa.types.is_boolean(values.type):
        return values.to_numpy()
    return table.get_numbers(name)


def _require_shared_settings(
    read: Sequence[_InputColumn], tables: Sequence[_ArrowTable], columns: TableOptions
) -> None:
    """Require settings without which the encoding depends on one machine's rows."""
    for one in read:
        # Each machine would find the categories of its own rows, and number them in its own way.
        if not one.numeric and one.name not in columns.categories:
            raise ConfigError(
                f"the categories of {one.name!r} are missing; every machine must name the same: "
                f"categories = {{ {one.name} = [...] }}"
            )
    kinds = list(map(tables[0].get_type, columns.target_names))
    text, whole = any(map(_is_text, kinds)), not any(map(pa.types.is_floating, kinds))
    if text and not columns.class_names:
        raise ConfigError(
            f"the classes of {columns.target_names[0]!r} are missing; every machine must name the "
            "same: class_names = [...]"
        )
    if not text and whole and len(kinds) == 1 and columns.classes is None:
        raise ConfigError(
            f"classes is missing; every machine must say how many {columns.target_names[0]!r} has "
            "(0 for regression)"
        )


def _require_not_empty(table: _ArrowTable, name: str) -> None:
    values = table.get_column(name)
    empty = np.asarray(values.is_null())
    if pa.types.is_floating(values.type):
        # An empty float may be null or NaN, by who wrote the file.
        empty |= np.isnan(table.get_numbers(name))
    rows = np.flatnonzero(empty)
    if len(rows):
        raise DataError(
            f"target {name!r} is empty in {len(rows)} rows (the first "
            f"{table.locate_row(int(rows[0]))}); drop those rows"
        )


def _check_text(tables: Sequence[_ArrowTable], name: str) -> None:
    """Refuse a column of text that was meant as dates or as numbers: most are, or have one unit."""
    for table in tables:
        column = table.get_column(name)
        if pa.types.is_dictionary(column.type) or not _is_text(column.type):
            continue
        # Each value is looked at once, and not each row.
        distinct = column.unique()
        require_no_dates(name, distinct)
        values = [value for value in distinct.to_pylist() if value is not None]
        if unit := _find_unit(values):
            raise DataError(
                f"column {name!r} is text: numbers with {unit!r}, such as {values[0]!r}; write the "
                "numbers alone, or give the column's categories"
            )
        others = [value for value in values if not _PLAIN_NUMBER.fullmatch(value.strip())]
        numbers = sum(bool(_NUMBER.fullmatch(value.strip())) for value in values)
        # A few numbers among words, such as "1" and "2" among grades, are categories.
        if numbers <= max(_FEW, len(values) / 2):
            continue
        if not others:
            # A leading zero is one of a code, such as a postal one.
            if any(re.match(r"\s*0\d", value) for value in values):
                continue
            raise DataError(
                f"column {name!r} is text, all of it numbers, such as {values[0]!r}; make it a "
                "column of numbers, or if they are codes, give the column's categories"
            )
        place = column.to_pylist().index(others[0])
        raise DataError(
            f"column {name!r} is text, though most of it are numbers: it has {others[0]!r} "
            f"{table.locate_row(place)}; "
            "correct that, leave it empty, or give the column's categories"
        )


def _find_unit(values: Sequence[str]) -> str:
    """Return the unit, or the sign of a currency, that all of many values have; "" if none."""
    if len(values) <= _FEW:
        return ""
    unit = ""
    for value in values:
        found = _WITH_UNIT.fullmatch(value.strip())
        own = "" if found is None else found["before"] + (found["behind"] or "")
        if not own or unit not in ("", own):
            return ""
        unit = own
    return unit


def _is_text(kind: pa.DataType) -> bool:
    """Whether a column holds text or categories."""
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    return text or pa.types.is_dictionary(kind)


def _require_category_values(kind: pa.DataType, name: str) -> None:
    """Refuse categories that are neither text nor numbers: no schema could store them."""
    if pa.types.is_dictionary(kind) and not _is_text(kind.value_type):
        _require_numbers(kind.value_type, name)


def _require_numbers(kind: pa.DataType, name: str) -> None:
    if pa.types.is_temporal(kind):
        raise DataError(
            f"column {name!r} holds dates or times ({kind}); turn it into numbers first, such as "
            "the days since the "
            "first, or leave it out of features"
        )
    if "binary" in str(kind):  # five types: of any or of one length, each also as a view or large
        raise DataError(
            f"column {name!r} holds bytes ({kind}); decode them to text first, or leave it out of "
            "features"
        )
    numbers = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    if not (numbers or pa.types.is_boolean(kind) or pa.types.is_null(kind)):
        raise DataError(
            f"column {name!r} holds {kind}; expected numbers, text or categories: leave it out of "
            "features"
        )
