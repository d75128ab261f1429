"""Rows of Arrow or parquet files as the items of a dataset, read when they are needed.

Arrow files are memory maps: a row is read from the disk alone. Parquet is compressed: a row group
is decoded for the rows that are asked of it, and the last ones are kept.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as arrow_compute
import pyarrow.parquet as arrow_parquet

from coterie._util.files import expand_home
from coterie.errors import DataError, first_line

_BLOCK = 64  # rows that are read at once where all are
_KEPT_GROUPS = 8  # decoded row groups of parquet that stay in memory
_KERNELS: Any = arrow_compute  # made when the library is loaded, which checkers do not see
_ARROW, _PARQUET = (".arrow", ".feather"), (".parquet", ".pq")


class ArrowItems:
    """A dataset whose items are the rows of files, as tables of the values of each column.

    A column is of numbers, of text, or of lists of numbers, which may be nested and are all of one
    length.

    Args:
        path: of a file, or of a folder, whose files are read in the order of their names.

    Raises:
        DataError: when there is no file of Arrow or parquet, or one cannot be read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = expand_home(path)
        files = [self.path]
        if self.path.is_dir():
            kinds = (*_ARROW, *_PARQUET)
            files = sorted(file for file in self.path.rglob("*") if file.suffix in kinds)
        if not files or not all(file.exists() for file in files):
            raise DataError(f"{self.path}: found no file; expected .arrow, .feather or .parquet")
        # Each part is a record batch, or a row group of a file.
        self._parts: list[pa.RecordBatch | tuple[arrow_parquet.ParquetFile, int]] = []
        # Part k has the rows from `_starts[k]` to `_starts[k + 1]`.
        self._starts, self._decoded = [0], OrderedDict[int, pa.Table]()
        for file in files:
            try:
                self._add_file(file)
            except (pa.ArrowException, OSError) as error:
                raise DataError(f"{file} cannot be read: {first_line(error)}") from error

    def _add_file(self, file: Path) -> None:
        if file.suffix in _PARQUET:
            opened = arrow_parquet.ParquetFile(file, memory_map=True)
            for number in range(opened.num_row_groups):
                self._parts.append((opened, number))
                self._starts.append(self._starts[-1] + opened.metadata.row_group(number).num_rows)
            return
        mapped = pa.memory_map(str(file))
        try:
            reader: Any = pa.ipc.open_file(mapped)
            batches = list(map(reader.get_batch, range(reader.num_record_batches)))
        except pa.ArrowInvalid:  # a stream, as `datasets` writes them
            batches = list(pa.ipc.open_stream(mapped))
        for batch in batches:
            self._parts.append(batch)
            self._starts.append(self._starts[-1] + batch.num_rows)

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, place: int) -> dict[str, Any]:
        if not -len(self) <= place < len(self):
            raise IndexError(f"row {place} of {len(self)}")
        return self.__getitems__([place % len(self)])[0]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for start in range(0, len(self), _BLOCK):
            yield from self.__getitems__(range(start, min(start + _BLOCK, len(self))))

    def __getitems__(self, places: Sequence[int]) -> list[dict[str, Any]]:
        """Return several rows in the order asked for; PyTorch's loaders use this name too."""
        wanted = np.asarray(places, np.int64)
        # Of several parts that start at a row, all but the last are empty: hence "right".
        parts = np.searchsorted(self._starts, wanted, side="right") - 1
        out: list[dict[str, Any]] = [{} for _ in places]
        # Part by part, so that a row group is decoded once for all of its rows.
        for part in np.unique(parts).tolist():
            chosen = np.flatnonzero(parts == part)
            rows = self._read_part(part).take(pa.array(wanted[chosen] - self._starts[part]))
            for name in rows.schema.names:
                values = _read_column(rows.column(name), name)
                for place, value in zip(chosen.tolist(), values, strict=True):
                    out[place][name] = value
        return out

    def _read_part(self, number: int) -> pa.RecordBatch | pa.Table:
        part = self._parts[number]
        if isinstance(part, pa.RecordBatch):
            return part
        if number not in self._decoded:
            file, group = part
            self._decoded[number] = file.read_row_group(group)
            if len(self._decoded) > _KEPT_GROUPS:
                # The one that was used longest ago: `move_to_end` below keeps them in that order.
                self._decoded.popitem(last=False)
        self._decoded.move_to_end(number)
        return self._decoded[number]

    def __reduce__(self) -> Any:
        # Another process opens the files again.
        return ArrowItems, (self.path,)


def _read_column(column: Any, name: str) -> Any:
    """Return the values of a column: an array with a row for each, or text."""
    values = column
    if isinstance(column, pa.ChunkedArray):
        values = pa.concat_arrays(column.chunks)
    # `datasets` writes arrays of several axes as a type of its own around plain lists.
    if isinstance(values, pa.ExtensionArray):
        values = values.storage
    count, shape = len(values), []
    while pa.types.is_list(values.type) or _is_other_list(values.type):
        lengths = _KERNELS.list_value_length(values).unique().to_pylist()
        if len(lengths) != 1 or lengths[0] is None:
            raise DataError(
                f"column {name!r} has lists of different lengths; make them equal, or leave it out"
            )
        # Each level of lists is one more axis of a row.
        shape.append(lengths[0])
        values = values.flatten()
    if not (pa.types.is_integer(values.type) or pa.types.is_floating(values.type)):
        return values.to_pylist()
    return values.to_numpy(zero_copy_only=False).reshape(count, *shape)


def _is_other_list(kind: pa.DataType) -> bool:
    return pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
