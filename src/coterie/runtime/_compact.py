"""Lossless compact storage of sparse or low-precision tables in a checkpoint.

What a method remembers of the whole population (a row for each client, a column for each member) is
mostly zeros at first, and its entries need fewer bits than their type has. A table is stored as a
bit mask of its non-zero entries followed by those entries, where that takes less room than the
table itself. No method is known here.
"""

from typing import Any

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor

from coterie._util import pages
from coterie._util.mappings import map_values

MIN_BYTES = 1 << 20
"""Tables smaller than this number of bytes are stored unchanged."""
_MAX_SHARE = 0.75  # of the table: a compact form above this size is not worth it
_CHUNK_ROWS = 64  # packed at a time, so that no second copy of the table exists
_KNOWN = {
    torch.bool, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.float32,
    torch.float64,
}  # fmt: skip
_KEPT, _SHORT, _LONG, _WHICH = "#kept", "#short", "#long", "#which"


def pack_table(
    name: str, table: Shaped[Tensor, "..."]
) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """Return the tensors that store a table, and the header that `unpack_table` needs.

    The header is None where the table is stored unchanged, because the compact form would not be
    smaller.

    The parts are: `#kept`, a bit for each entry that says whether any of its bits is set, row by
    row; `#short`, those entries in order, in the smallest integer type that holds them all, or the
    float64 entries that float32 holds exactly; then `#long` has the other entries, and `#which` a
    bit for each entry that says which of the two it is in.

    Args:
        name: of the table in the checkpoint.
        table: only two-dimensional tables are made smaller.
    """
    whole = {name: table}
    if table.ndim != 2 or table.nbytes < MIN_BYTES or table.dtype not in _KNOWN:
        return whole, None
    rows = table.detach().cpu().contiguous()
    kept, parts, room = [], [], 0
    for chunk in rows.split(_CHUNK_ROWS):
        array = chunk.numpy()
        # Compared as bits, because a negative zero equals zero and must not be lost.
        some = _view_as_bits(array) != 0
        kept.append(np.packbits(some, axis=1))
        parts.append(array[some])
        room += parts[-1].nbytes
        if table.dtype != torch.bool and room > table.nbytes:
            return whole, None
    out = {name + _KEPT: np.concatenate(kept)}
    if table.dtype != torch.bool:
        for part, values in _narrow_values(np.concatenate(parts)).items():
            out[name + part] = values
    if sum(values.nbytes for values in out.values()) > _MAX_SHARE * table.nbytes:
        return whole, None
    header = {"shape": list(table.shape), "dtype": str(table.dtype).removeprefix("torch.")}
    return map_values(torch.from_numpy, out), header


def unpack_table(
    name: str, header: dict[str, Any], tensors: dict[str, Tensor]
) -> Shaped[Tensor, "rows columns"]:
    """Return the table that `pack_table` stored, bit for bit.

    Args:
        name: of the table.
        header: the shape and the type that `pack_table` returned with the parts.
        tensors: the tensors of the checkpoint, on the CPU.
    """
    (rows, columns), dtype = header["shape"], getattr(torch, header["dtype"])
    kept = tensors[name + _KEPT].numpy()
    # On large pages, as the tables of a running method are.
    out = pages.empty(rows, columns, dtype=dtype)
    values, start = None, 0
    if dtype != torch.bool:  # of which the bits are all there is
        values = _widen_values(name, tensors, out.numpy().dtype)
    for first in range(0, rows, _CHUNK_ROWS):
        # `count` leaves out the bits that fill up the last byte of a row.
        some = np.unpackbits(kept[first : first + _CHUNK_ROWS], axis=1, count=columns).view(bool)
        part = out[first : first + _CHUNK_ROWS].numpy()
        if values is None:
            part[:] = some
            continue
        number = int(some.sum())
        part[:] = 0
        part[some] = values[start : start + number]
        start += number
    return out


def _view_as_bits(array: np.ndarray) -> np.ndarray:
    """View the entries as unsigned integers: a negative zero or a NaN is an entry like others."""
    return array.view(f"u{array.itemsize}")


def _narrow_values(values: np.ndarray) -> dict[str, np.ndarray]:
    if values.dtype.kind in "iu" and len(values):
        ends = int(values.min()), int(values.max())
        fits = "uint8"
        if values.dtype.kind == "i":
            kinds = map(np.iinfo, ("int8", "int16", "int32", "int64"))
            fits = next(one.dtype for one in kinds if one.min <= ends[0] and ends[1] <= one.max)
        # The fitting type alone is not stored: the tensor itself has it.
        return {_SHORT: values.astype(fits)}
    if values.dtype != np.float64:
        return {_SHORT: values}
    # A value beyond float32 becomes infinite, and counts as one that does not fit.
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = values.astype(np.float32)
    # Compared as bits, so that the payload of a NaN counts as well.
    long = _view_as_bits(narrow.astype(np.float64)) != _view_as_bits(values)
    return {_SHORT: narrow[~long], _LONG: values[long], _WHICH: np.packbits(long)}


def _widen_values(name: str, tensors: dict[str, Tensor], dtype: np.dtype) -> np.ndarray:
    short = tensors[name + _SHORT].numpy()
    if dtype != np.float64:
        return short.astype(dtype, copy=False)
    long = tensors[name + _LONG].numpy()
    which = np.unpackbits(tensors[name + _WHICH].numpy(), count=len(short) + len(long)).view(bool)
    out = np.empty(len(which), dtype=dtype)
    out[~which], out[which] = short, long
    return out
