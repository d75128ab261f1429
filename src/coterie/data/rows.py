"""Inputs that are read a batch at a time: rows on disk, and clients' rows without padding.

`StoredRows` is a table on disk of which rows are read when they are needed. `ClientRows` stands
where a federation else has a padded tensor: it knows which row of a table each sample is, and holds
no inputs itself.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from coterie.data._announce import announce_rows
from coterie.errors import DataError

MIN_STORED_BYTES = 64 << 20
"""Smaller arrays on disk are read at once: memory has room for them, and is faster."""

_PIECE = 16 << 20  # bytes that a pass over a table reads at once

Convert = Callable[[Tensor], Tensor]
"""Make rows as they are stored into rows as a federation holds them."""


def is_stored(value: Any) -> bool:
    """Return whether a value is a large array whose rows can be read from disk.

    A memory map of numpy, an array of HDF5 or Zarr, and anything else that has `shape`, `dtype`
    and rows by slices, and is not in memory already.

    Args:
        value: what was given as inputs.
    """
    if isinstance(value, np.memmap):
        return value.ndim > 0 and value.nbytes >= MIN_STORED_BYTES
    has_rows = all(hasattr(value, name) for name in ("shape", "dtype", "__getitem__"))
    # Arrays and tables in memory of other libraries offer one of these.
    in_memory = ("__array_interface__", "__dlpack__", "iloc", "to_numpy")
    if not has_rows or isinstance(value, Tensor) or any(hasattr(value, n) for n in in_memory):
        return False
    try:
        size = np.dtype(value.dtype).itemsize * math.prod(value.shape)
    except TypeError:
        return False
    return len(value.shape) > 0 and size >= MIN_STORED_BYTES


@dataclass(frozen=True, eq=False)
class StoredRows:
    """A table of inputs on disk.

    Args:
        array: has `shape`, `dtype` and rows by slices; see `is_stored`.
        convert: makes what is read of it into inputs as a federation holds them.
        shape: of the converted table.
        dtype: of the converted table.
    """

    array: Any
    convert: Convert
    shape: torch.Size
    dtype: torch.dtype

    @staticmethod
    def open(array: Any, convert: Convert) -> "StoredRows":
        """Return the table of an array, of which only one row is read.

        Args:
            array: see `StoredRows`.
            convert: see `StoredRows`; it treats each row like all others.

        Raises:
            DataError: when the array has no rows.
        """
        if not array.shape[0]:
            raise DataError("x has no rows; every client needs data")
        # One row says the shape and the type of all, after their conversion.
        first = convert(_to_rows(array[:1]))
        shape = torch.Size((int(array.shape[0]), *first.shape[1:]))
        return StoredRows(array, convert, shape, first.dtype)

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    def is_floating_point(self) -> bool:
        """Whether the inputs are floats."""
        return self.dtype.is_floating_point

    def float(self) -> "StoredRows":
        """Return the same table as float32."""
        return StoredRows(self.array, _Chain((self.convert, _to_float)), self.shape, torch.float32)

    def __getitem__(self, rows: slice | Int[Tensor, " rows"]) -> Shaped[Tensor, "rows *features"]:
        """Read rows, in the order asked for."""
        if isinstance(rows, slice):
            start, stop, step = rows.indices(len(self))
            if step == 1:
                # `indices` may put the end of an empty slice before its start.
                return self._read_range(start, max(start, stop))
            rows = torch.arange(start, stop, step)
        if not len(rows):
            return torch.empty((0, *self.shape[1:]), dtype=self.dtype)
        # Each row once and in ascending order, as a disk reads them fastest.
        chosen, places = torch.unique(rows, return_inverse=True)
        found = self.read_ascending(chosen.numpy())
        return found if torch.equal(chosen, rows) else found[places]

    def read_ascending(self, rows: Int[np.ndarray, " rows"]) -> Shaped[Tensor, "rows *features"]:
        """Read distinct rows in ascending order.

        Args:
            rows: their numbers.
        """
        if isinstance(self.array, np.ndarray):
            announce_rows(self.array, rows)
            # Rows that are chosen one by one are copied already.
            return self.convert(_to_rows(self.array[rows], copy=None))
        if hasattr(self.array, "read_rows"):
            return self.convert(_to_rows(self.array.read_rows(rows), copy=None))
        # Other arrays are read by ranges: those of a chunk at once, or rows that follow each other.
        chunk = (getattr(self.array, "chunks", None) or (1,))[0]
        # Equal for rows of a chunk, or for rows that follow each other: a difference of 1 cancels.
        groups = rows // chunk if chunk > 1 else rows - np.arange(len(rows))
        starts = np.flatnonzero(np.diff(groups, prepend=groups[:1] - 1))
        found = []
        for own in np.split(rows, starts[1:]):
            first, last = int(own[0]), int(own[-1])
            found.append(np.asarray(self.array[first : last + 1])[own - first])
        return self.convert(_to_rows(np.concatenate(found), copy=None))

    def _read_range(self, start: int, stop: int) -> Tensor:
        if start == stop:
            return torch.empty((0, *self.shape[1:]), dtype=self.dtype)
        return self.convert(_to_rows(self.array[start:stop]))

    def __reduce__(self) -> Any:
        # Pickle would copy a memory map, and cannot take a file of HDF5: both are opened again.
        array: Any = self.array
        if isinstance(array, np.memmap) and array.filename is not None:
            # The offset of a view differs from that of its map.
            order = "C" if array.flags.c_contiguous else "F"
            base = array
            while isinstance(base.base, np.memmap):
                base = base.base
            moved = array.__array_interface__["data"][0] - base.__array_interface__["data"][0]
            where = (str(array.filename), array.dtype, base.offset + moved, array.shape, order)
            if array.flags.c_contiguous or array.flags.f_contiguous:
                return _open_map, (where, self.convert, self.shape, self.dtype)
        if type(array).__module__.startswith("h5py"):
            where = (self.array.file.filename, self.array.name)
            return _open_hdf5, (where, self.convert, self.shape, self.dtype)
        # Any other array goes as it pickles itself; so does a view of a map that skips rows or
        # columns.
        return StoredRows, (array, self.convert, self.shape, self.dtype)


@dataclass(frozen=True)
class _Chain:
    """Conversions one after another."""

    steps: tuple[Convert, ...]

    def __call__(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        return x


# A function of the module, since other processes get it by pickle, which takes no lambda.
def _to_float(x: Tensor) -> Tensor:
    return x.float()


def _to_rows(values: Any, copy: bool | None = True) -> Tensor:
    """Return what was read of an array as a tensor in memory of its own.

    Args:
        values: what was read.
        copy: whether it shares the memory of the array, which nobody may write; None if not.
    """
    array = np.asarray(values)
    # PyTorch has numbers of this machine's byte order alone.
    kind = array.dtype.newbyteorder("=")
    if kind.kind in "ui" and kind != np.uint8:
        kind = np.dtype(np.int64)  # PyTorch has few unsigned integers
    return torch.from_numpy(np.array(array, dtype=kind, order="C", copy=copy))


def _open_map(where: tuple[Any, ...], *more: Any) -> StoredRows:
    filename, dtype, offset, shape, order = where
    if not Path(filename).exists():
        raise DataError(f"the inputs are in {filename}, which is not there; put it back")
    array = np.memmap(filename, dtype=dtype, mode="r", offset=offset, shape=shape, order=order)
    return StoredRows(array, *more)


def _open_hdf5(where: tuple[str, str], *more: Any) -> StoredRows:
    # Of the extra `disk`, which a machine without such arrays may lack.
    import h5py

    return StoredRows(h5py.File(where[0], "r")[where[1]], *more)


@dataclass(frozen=True, eq=False)
class ClientRows:
    """Inputs of samples as rows of a table, which are read when they are needed.

    It has the axes of the padded tensor for which it stands; `read` gives that tensor.

    Args:
        table: the inputs of all samples, in memory or on disk.
        index: the row of each sample; -1 for padding.
        changes: what is done to inputs after they are read; each treats a row like all others.
        change_of: which of `changes` a sample gets; -1 for none.
    """

    table: Shaped[Tensor, "rows *features"] | StoredRows
    index: Int[Tensor, "*samples"]
    changes: tuple[Convert, ...] = ()
    change_of: Int[Tensor, "*samples"] | None = field(default=None)

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, key: Any) -> "ClientRows":
        """Return some samples, of which none is read."""
        change_of = None if self.change_of is None else self.change_of[key]
        return replace(self, index=self.index[key], change_of=change_of)

    @property
    def shape(self) -> torch.Size:
        """The shape of the padded tensor."""
        return torch.Size((*self.index.shape, *self.table.shape[1:]))

    @property
    def ndim(self) -> int:
        """The number of axes of the padded tensor."""
        return len(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the inputs."""
        return self.table.dtype

    @property
    def nbytes(self) -> int:
        """Bytes in memory: of the table, where it is there, and of the numbers of its rows."""
        held = self.table.nbytes if isinstance(self.table, Tensor) else 0
        return held + self.index.nbytes

    @property
    def is_on_disk(self) -> bool:
        """Whether the table is on disk."""
        return isinstance(self.table, StoredRows)

    def is_floating_point(self) -> bool:
        """Whether the inputs are floats."""
        return self.dtype.is_floating_point

    def numel(self) -> int:
        """Return the number of entries of the padded tensor."""
        return math.prod(self.shape)

    def flatten(self, start: int, stop: int) -> "ClientRows":
        """Return the samples with some of their axes joined."""
        change_of = None if self.change_of is None else self.change_of.flatten(start, stop)
        return replace(self, index=self.index.flatten(start, stop), change_of=change_of)

    def read(self) -> Shaped[Tensor, "..."]:
        """Read the samples; padding is zero."""
        flat = self.index.flatten()
        # Row 0 is read in the place of padding.
        found = self.table[flat.clamp(min=0)]
        if self.change_of is not None:
            which = self.change_of.flatten()
            for number, change in enumerate(self.changes):
                mine = (which == number).nonzero().flatten()
                if len(mine):
                    found[mine] = change(found[mine])
        if bool((flat < 0).any()):
            found[flat < 0] = 0
        return found.reshape(self.shape)


Inputs = Tensor | ClientRows
"""The inputs of a federation: a padded tensor, or what stands for it."""


def read_inputs(x: Inputs) -> Tensor:
    """Return inputs as a tensor, read where they are not in memory."""
    return x if isinstance(x, Tensor) else x.read()


def iterate_pieces(x: Tensor | StoredRows) -> Iterator[tuple[int, Tensor]]:
    """Return a table in pieces: all of it in memory at once, or ranges of rows of a disk.

    Yields:
        The number of the first row, and the rows.
    """
    if isinstance(x, Tensor):
        yield 0, x
        return
    # One row at least, however large; an input of no entries has no bytes to divide by.
    size = max(1, _PIECE // max(1, math.prod(x.shape[1:]) * x.dtype.itemsize))
    for start in range(0, len(x), size):
        yield start, x[start : start + size]
