"""Tables in files: parquet, and CSV as text, whose columns get a type once.

A CSV file does not say what its columns are. It is read as text here, in the encoding and with the
separator found or named. `decide_types` gives the columns of a first table their types, and
`follow_types` reads later tables with the same ones.
"""

import codecs
import csv
import gzip
import io
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import islice
from numbers import Integral
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as arrow_compute
import pyarrow.csv as arrow_csv
import pyarrow.parquet as arrow_parquet

from coterie._util.files import expand_home
from coterie._util.mappings import drop_keys
from coterie.data.coding import EMPTY, WHOLE
from coterie.errors import ConfigError, DataError, describe_unknown

# Its functions are made when it is imported, so that type checkers do not know them.
pc: Any = arrow_compute
Kind = Literal["numbers", "true or false", "text"]
_SEPARATORS = (",", ";", "\t", "|")
_WORDS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
# Patterns of RE2, of a whole entry without spaces around it.
_NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$|^[+-]?(inf|Inf|INF|[Ii]nfinity)$"
_WHOLE = r"^[+-]?\d{1,18}$"  # 18 digits always fit into int64
_WHOLE_OR_COMMA = r"^[+-]?(\d+|\d*,\d+)([eE][+-]?\d+)?$"
# 1,234 may be a thousand and more, or a little more than one.
_UNCLEAR = r"^[+-]?[1-9]\d{0,2},\d{3}$|^[+-]?\d+$"
_TRUTH = r"^([Tt]rue|TRUE|[Ff]alse|FALSE)$"
_NAMED_SEPARATOR = re.compile(r"sep=(?P<separator>[^\r\n])\r?\n")
_DATE = (
    r"^\d{4}-\d{2}-\d{2}([ T]\d{2}:\d{2}(:\d{2}([.,]\d+)?)?( ?(Z|[+-]\d{2}:?\d{2}))?)?$"
    r"|^\d{1,2}[./]\d{1,2}[./]\d{4}$|^\d{1,2}:\d{2}(:\d{2}([.,]\d+)?)?$"
)


@dataclass(frozen=True)
class LoadedTable:
    """A table, before its columns have types.

    Args:
        arrow: the table; all columns are text as written where `as_text` is set.
        what: the table, as errors name it.
        as_text: whether its types are still to be decided.
        notes: how the file was read, where that is not the usual way.
    """

    arrow: pa.Table
    what: str
    as_text: bool = False
    notes: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """The names of its columns."""
        return self.arrow.column_names


@dataclass(frozen=True)
class CsvFormat:
    """What a CSV file does not say; found where it is not named.

    Args:
        separator: between the columns; "tab" is one too.
        decimal: "." or ",", before the fraction of a number.
        encoding: of the text.
    """

    separator: str | None = None
    decimal: str | None = None
    encoding: str | None = None

    def check(self) -> None:
        """Check what is named.

        Raises:
            ConfigError: when it cannot be.
        """
        if self.separator is not None and len(self._character) != 1:
            raise ConfigError(
                f"separator is {self.separator!r}; expected one character, such as ';', or 'tab'"
            )
        if self.encoding is not None:
            try:
                codecs.lookup(self.encoding)
            except LookupError:
                raise ConfigError(
                    f"encoding is {self.encoding!r}; expected one that Python knows, such as "
                    "'utf-8' or 'cp1252'"
                ) from None

    @property
    def _character(self) -> str:
        return "\t" if self.separator == "tab" else self.separator or ""

    def decode_text(self, data: bytes, what: str) -> tuple[str, tuple[str, ...]]:
        """Return the text of a file, and a note on its encoding.

        Raises:
            DataError: when the bytes are not of the encoding named, or of none that is found.
        """
        if self.encoding is not None:
            try:
                # A byte order mark is no part of the first column's name.
                return data.decode(self.encoding).removeprefix("\ufeff"), ()
            except UnicodeError as error:
                raise DataError(
                    f"{what} is not {self.encoding} ({error}); name its encoding, or write it as "
                    "UTF-8"
                ) from None
        # First: UTF-16 is no UTF-8, and cp1252 would make other letters of it.
        if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            return data.decode("utf-16", "replace"), ("encoding UTF-16",)
        try:
            return data.decode("utf-8-sig"), ()
        except UnicodeDecodeError as error:
            line, byte = data[: error.start].count(b"\n") + 1, data[error.start]
            found = f"{what} is not UTF-8 (byte 0x{byte:02x} in line {line})"
        try:
            # Last, since it decodes nearly all bytes.
            text = data.decode("cp1252")
        except UnicodeDecodeError:
            raise DataError(
                f"{found} and not cp1252; name its encoding (encoding = ...), or write it as UTF-8"
            ) from None
        warnings.warn(
            f"{found}; it is read as cp1252, as Windows writes it: name its encoding (encoding = "
            '"cp1252"), or write it as UTF-8',
            stacklevel=2,
        )
        return text, ("encoding cp1252",)

    def choose_separator(self, text: str, usual: str) -> str:
        """Return the separator named, or the one that divides the first lines alike."""
        if self.separator is not None:
            return self._character
        found, most = usual, 1
        # The usual separator first: of two that divide into as many columns it stays.
        for separator in dict.fromkeys((usual, *_SEPARATORS)):
            # Six lines of a piece show how lines divide, however large the file is.
            rows = csv.reader(io.StringIO(text[:100_000]), delimiter=separator)
            widths = [len(row) for row in islice(rows, 6) if row]
            # The last line of the piece may be cut.
            if widths and widths[0] > most and len(set(widths[:-1])) <= 1:
                found, most = separator, widths[0]
        return found


def load_table(table: Any, form: CsvFormat = CsvFormat(), what: str = "the table") -> LoadedTable:
    """Load a table of pandas, polars, arrow, arrays by column, or a file.

    Raises:
        DataError: when it is none, or cannot be read.
    """
    if isinstance(table, str | Path):
        return _load_file(expand_home(table), form)
    if hasattr(table, "iloc"):
        _require_distinct_names(list(map(str, table.columns)), what)
    try:
        try:
            made = _convert_to_arrow(table)
        except OverflowError:  # a whole number of Python that 64 bits do not hold
            made = _convert_to_arrow(_hold_large_numbers(table))
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        said = "; ".join(map(str, error.args))
        raise DataError(f"a column cannot be read ({said}); make its values of one kind") from None
    except (TypeError, ValueError) as error:
        raise DataError(
            f"the table is a {type(table).__name__} ({error}); expected one of pandas, polars or "
            "arrow, or the path of "
            "a CSV or parquet file"
        ) from None
    _require_distinct_names(made.column_names, what)
    return LoadedTable(_replace_text_views(made), what)


def _convert_to_arrow(table: Any) -> pa.Table:
    if hasattr(table, "iloc"):  # pandas, whose index is no column
        return pa.Table.from_pandas(table, preserve_index=False)
    if hasattr(table, "to_arrow"):
        return table.to_arrow()
    return pa.table(dict(table) if isinstance(table, Mapping) else table)


def _replace_text_views(table: pa.Table) -> pa.Table:
    """Return a table whose text of type `string_view` is of type `large_string`.

    Arrow, up to version 26 at least, lacks most functions of text for views.
    """
    changed = {}
    for field, column in zip(table.schema, table.columns, strict=True):
        kind = field.type
        if _is_text_view(kind):
            changed[field.name] = column.cast(pa.large_string())
        elif pa.types.is_dictionary(kind) and _is_text_view(kind.value_type):
            # Arrow has no cast of such a dictionary. Each chunk has one of its own.
            chunks = []
            for chunk in column.chunks:
                words = chunk.dictionary.cast(pa.large_string())
                chunks.append(
                    pa.DictionaryArray.from_arrays(chunk.indices, words, ordered=kind.ordered)
                )
            made = pa.dictionary(kind.index_type, pa.large_string(), kind.ordered)
            changed[field.name] = pa.chunked_array(chunks, made)
    return _replace_columns(table, changed) if changed else table


def _is_text_view(kind: pa.DataType) -> bool:
    # By its name: version 15 of pyarrow has no function for this type.
    return str(kind) == "string_view"


def _hold_large_numbers(table: Any) -> Any:
    """Return a table of pandas, or of arrays by column, whose large whole numbers are decimals.

    Arrow has no whole numbers of over 64 bits. So large are ids, of patients or of SIM cards, and
    decimals keep all of their digits.
    """
    changed = table.copy(deep=False) if hasattr(table, "iloc") else dict(table)
    for name in table:
        values = list(table[name])
        whole = [row for row, one in enumerate(values) if isinstance(one, Integral)]
        # From 2^63 on and not from 2^64: no type of 64 bits has both large and negative numbers.
        if any(abs(int(values[row])) >= 1 << 63 for row in whole):
            for row in whole:
                values[row] = Decimal(int(values[row]))
            changed[name] = values
    return changed


def _require_distinct_names(names: Sequence[str], what: str) -> None:
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"{what} has two columns {twice!r}; give each a name of its own")


def _load_file(path: Path, form: CsvFormat) -> LoadedTable:
    form.check()
    if not path.is_file():
        raise DataError(f"there is no file {path}; expected a CSV or parquet file")
    packed = path.suffix.lower() == ".gz"
    ending = Path(path.stem if packed else path.name).suffix.lower()
    try:
        # Parquet is compressed inside, and needs places in the file that a packed one hides.
        if ending in (".parquet", ".pq") and not packed:
            made = arrow_parquet.read_table(path)
            _require_distinct_names(made.column_names, str(path))
            return LoadedTable(_replace_text_views(made), str(path))
        if ending in (".csv", ".tsv", ".txt"):
            data = path.read_bytes()
            return _parse_csv(gzip.decompress(data) if packed else data, path, ending, form)
    # EOFError is of a packed file that ends early.
    except (pa.ArrowInvalid, OSError, EOFError) as error:
        said = " ".join(str(error).split())
        raise DataError(f"{path} cannot be read ({said}); write it again") from error
    raise DataError(f"{path} is no table; expected a file .csv, .tsv or .parquet")


def _parse_csv(data: bytes, path: Path, ending: str, form: CsvFormat) -> LoadedTable:
    text, notes = form.decode_text(data, str(path))
    usual = "\t" if ending == ".tsv" else ","
    # Excel writes this line, and takes it for no part of the table.
    if named := _NAMED_SEPARATOR.match(text):
        text = text[named.end() :]
        form = replace(form, separator=form.separator or named["separator"])
    separator = form.choose_separator(text, usual)
    if separator != usual:
        notes = (*notes, f"separated by {_WORDS.get(separator, repr(separator))}")
    header = next(csv.reader(io.StringIO(text), delimiter=separator), [])
    if not header:
        raise DataError(f"{path} is empty; expected a line with the names of the columns")
    if text.startswith("#") and len(header) == 1:
        raise DataError(
            f"{path} begins with a comment ({header[0][:60]!r}); expected a line with the names of "
            "the columns: take the comment out"
        )
    # All columns as text: a type by file would differ between files, and change ids such as 1.10.
    # f0, f1, ... are the names that arrow gives to columns without a header.
    places = [f"f{place}" for place in range(len(header))]
    made = arrow_csv.read_csv(
        io.BytesIO(text.encode()),
        read_options=arrow_csv.ReadOptions(autogenerate_column_names=True),
        # Line breaks inside values need quotes; looking for them keeps arrow from using threads.
        parse_options=arrow_csv.ParseOptions(delimiter=separator, newlines_in_values='"' in text),
        # An empty entry stays "" here; `_clear_empty` knows the words for nothing.
        convert_options=arrow_csv.ConvertOptions(
            column_types=dict.fromkeys(places, pa.string()), strings_can_be_null=False
        ),
    )
    names = list(map(str.strip, header))
    # Columns without a name are left alone until one is asked for.
    _require_distinct_names(list(filter(None, names)), str(path))
    # The first row is the header.
    return LoadedTable(made.slice(1).rename_columns(names), str(path), True, notes)


def read_ids(loaded: LoadedTable, name: str) -> list[Any]:
    """Return the ids in a column: text as it is written, or as the table holds them.

    Whole numbers of a file that are written without further zeros or signs are numbers, so that
    they sort as such.
    """
    column = loaded.arrow[name]
    if not loaded.as_text:
        return column.to_pylist()
    distinct = column.unique().to_pylist()
    # Python refuses to read whole numbers of more than 4300 digits.
    if all(WHOLE.fullmatch(one) and len(one) < 4000 for one in distinct):
        return list(map(int, column.to_pylist()))
    words = [one for one in distinct if one.strip() and one.strip() in EMPTY]
    if words:
        warnings.warn(
            f"column {name!r} has {words[0]!r}, which programs write for an empty entry; it is "
            "kept as the id of a client: leave such rows out if they have none",
            stacklevel=2,
        )
    return column.to_pylist()


def decide_types(
    loaded: LoadedTable,
    names: Sequence[str],
    categories: Mapping[str, Sequence[Any]] = MappingProxyType({}),
    decimal: str | None = None,
) -> tuple[pa.Table, tuple[str, ...]]:
    """Return a table whose columns have types, and notes on how numbers were read.

    A column of a file is of numbers where all its entries are, of true and false likewise, and of
    text otherwise. Words such as NA stand for empty entries, with a warning in columns of text,
    where they may be a category.

    Args:
        loaded: the first table.
        names: the columns that are used; the others stay as they are.
        categories: the categories of columns that stay text; none of them is an empty entry.
        decimal: the sign before the fraction of a number; found when not given.

    Raises:
        DataError: when a column holds dates, or it is not clear what a comma in numbers means.
    """
    if not loaded.as_text:
        return loaded.arrow, ()
    columns = {}
    for name in dict.fromkeys(names):
        columns[name] = _clear_empty(loaded.arrow[name], categories.get(name, ()))
    # Columns with categories stay text, and their commas say nothing about numbers.
    guessed = drop_keys(columns, categories)
    decimal = decimal or _find_decimal(guessed)
    read, padded = {}, []
    for name, column in columns.items():
        found = column
        if name in guessed:
            found = _convert_entries(column, decimal)
        if found is None:
            require_no_dates(name, column)
        # Such a column may hold codes; as numbers they lose their zeros, which is noted.
        if found is not None and pa.types.is_integer(found.type) and _any(column, r"^0\d"):
            padded.append(name)
        if found is None:
            _warn_of_words(name, loaded.arrow[name], column)
            found = column
        read[name] = found
    made = _replace_columns(loaded.arrow, read)
    notes = ("decimal commas",) if decimal == "," else ()
    if padded:
        notes = (*notes, f"numbers written with leading zeros: {', '.join(padded)}")
    return made, notes


def require_no_dates(name: str, column: pa.ChunkedArray | pa.Array) -> None:
    """Refuse a column of text all of whose entries are dates or times.

    Raises:
        DataError: when they are.
    """
    distinct = column.unique()  # a category is looked at once
    if _matches(distinct, _DATE):
        raise DataError(
            f"column {name!r} holds dates or times, such as {_first(distinct)!r}; turn it into "
            "numbers first, such as the days since the first, or leave it out of features"
        )


def warn_of_empty_words(name: str, column: pa.ChunkedArray) -> None:
    """Warn of entries that programs write where there is none, in a column that keeps them."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    words = column.filter(
        pc.is_in(pc.utf8_trim_whitespace(column.cast(pa.string())), value_set=pa.array(EMPTY))
    )
    if len(words):
        warnings.warn(
            f"column {name!r} has {words[0].as_py()!r} ({len(words)} rows with such text), which "
            "programs write for an empty entry, and which is a value of its own here; make such "
            "entries empty (None), or give all that the column has as its categories",
            stacklevel=2,
        )


def _warn_of_words(name: str, written: pa.ChunkedArray, cleared: pa.ChunkedArray) -> None:
    """Warn of words in a column of text that were read as empty entries."""
    words = pc.utf8_trim_whitespace(written.filter(pc.is_null(cleared)))
    words = words.filter(pc.not_equal(words, ""))
    if not len(words):
        return
    word = words[0].as_py()
    warnings.warn(
        f"column {name!r} has {word!r} ({len(words)} rows with such words), which is read as an "
        "empty entry; if it is a category, give all that the column has: "
        f"categories = {{ {name} = [{word!r}, ...] }}",
        stacklevel=2,
    )


def follow_types(
    loaded: LoadedTable,
    kinds: Mapping[str, Kind],
    categories: Mapping[str, Sequence[Any]] = MappingProxyType({}),
    decimal: str | None = None,
) -> pa.Table:
    """Return a later table with its columns read as those of a first one.

    Args:
        loaded: the later table.
        kinds: what each column is.
        categories: those of columns of text, where they are known; none of them is an empty entry.
        decimal: the sign before the fraction of a number; found when not given.

    Raises:
        DataError: when a column is of another kind.
    """
    read, numbers = {}, {}
    for name in kinds:
        if loaded.as_text:
            read[name] = _clear_empty(loaded.arrow[name], categories.get(name, ()))
            if kinds[name] != "text":
                numbers[name] = read[name]
    decimal = decimal or _find_decimal(numbers)
    for name, column in numbers.items():
        found = _convert_entries(column, decimal)
        if found is None:
            pattern = _WHOLE_OR_COMMA if decimal == "," else _NUMBER
            row, value = _find_mismatch(column, pattern)
            raise DataError(
                f"column {name!r} is {value!r} in row {row} of {loaded.what}; expected "
                f"{kinds[name]}, as in training"
            )
        read[name] = found
    return _replace_columns(loaded.arrow, read)


def check_column(table: pa.Table, name: str, what: str) -> None:
    """Refuse a table, named `what`, without a column.

    Raises:
        ConfigError: with the names that are like it.
    """
    # Not `in column_names`: that is a new list each time, and a wide table has 10,000 columns.
    if table.schema.get_field_index(name) < 0:
        raise ConfigError(f"{what}: {describe_unknown('column', name, table.column_names)}")


def _replace_columns(table: pa.Table, columns: Mapping[str, pa.ChunkedArray]) -> pa.Table:
    """Return a table with some columns replaced, all at once: `set_column` copies the rest."""
    names = table.column_names
    made = [columns.get(name, old) for name, old in zip(names, table.columns, strict=True)]
    return pa.table(made, names=names)


def _clear_empty(column: pa.ChunkedArray, categories: Sequence[Any] = ()) -> pa.ChunkedArray:
    """Return a column of text with null where a word that is no category stands for nothing."""
    words = [word for word in EMPTY if word not in categories]
    empty = pc.is_in(pc.utf8_trim_whitespace(column), value_set=pa.array(words))
    return pc.if_else(empty, pa.scalar(None, pa.string()), column)


def _matches(column: pa.ChunkedArray | pa.Array, pattern: str) -> bool:
    """Whether there are entries, and all match."""
    found = pc.all(pc.match_substring_regex(pc.utf8_trim_whitespace(column), pattern=pattern))
    return bool(found.as_py()) and column.null_count < len(column)


def _any(column: pa.ChunkedArray, pattern: str) -> bool:
    found = pc.any(pc.match_substring_regex(pc.utf8_trim_whitespace(column), pattern=pattern))
    return bool(found.as_py())


def _first(column: pa.ChunkedArray | pa.Array, pattern: str = "") -> str:
    trimmed = pc.utf8_trim_whitespace(column.drop_null())
    return trimmed.filter(pc.match_substring_regex(trimmed, pattern=pattern))[0].as_py()


def _find_mismatch(column: pa.ChunkedArray, pattern: str) -> tuple[int, Any]:
    """Return the first entry that has not the form of a pattern, and its row."""
    for row, value in enumerate(column.to_pylist()):
        if value is not None and not _matches(pa.chunked_array([[value]]), pattern):
            return row, value
    raise AssertionError("the column as a whole does not match")


def _convert_entries(column: pa.ChunkedArray, decimal: str) -> pa.ChunkedArray | None:
    """Return a column as numbers, or as true and false; None where entries are neither."""
    # Without any entry no type can be found; as null it is read as numbers, all empty.
    if column.null_count == len(column):
        return pa.chunked_array([pa.nulls(len(column))])
    trimmed = pc.utf8_trim_whitespace(column)
    # Whole numbers first: as floats they are no classes, and large ones are rounded.
    if _matches(column, _WHOLE):
        # Arrow reads no plus sign.
        return pc.utf8_ltrim(trimmed, characters="+").cast(pa.int64())
    if decimal == "," and _matches(column, _WHOLE_OR_COMMA):
        return pc.replace_substring(trimmed, ",", ".").cast(pa.float64())
    if decimal == "." and _matches(column, _NUMBER):
        return trimmed.cast(pa.float64())
    if _matches(column, _TRUTH):
        return pc.equal(pc.utf8_lower(trimmed), "true")
    return None


def _find_decimal(columns: Mapping[str, pa.ChunkedArray]) -> str:
    """Return the sign before the fractions of the numbers of a file.

    Raises:
        DataError: when columns have different ones, or a comma may part thousands.
    """
    # The first column of each kind is enough: a file is written in one way.
    commas, points = "", ""
    for name, column in columns.items():
        if not commas and _matches(column, _WHOLE_OR_COMMA) and _any(column, ","):
            commas = name
            if _matches(column, _UNCLEAR):
                raise DataError(
                    f"column {name!r} has {_first(column, ',')!r}: the comma may stand before a "
                    'fraction or part thousands; say which with decimal = ",", or write the '
                    "numbers without commas"
                )
        if not points and _matches(column, _NUMBER) and _any(column, r"\."):
            points = name
    if commas and points:
        raise DataError(
            f"column {commas!r} has numbers with commas ({_first(columns[commas], ',')!r}), and "
            f"column {points!r} with points ({_first(columns[points], '[.]')!r}); write all alike"
        )
    return "," if commas else "."
