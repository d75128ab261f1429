"""Lines about inputs whose meaning is assumed: what was assumed, and how to say otherwise.

Numbers do not say whether they are pixels, tokens or ids. What is unusual for what they are taken
for is said at once, as nothing would fail later.
"""

import unicodedata
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor

from coterie.data.rows import StoredRows, iterate_pieces
from coterie.errors import DataError

LARGEST = 1 << 24
"""The largest whole number of an input: float32 represents all up to it exactly."""

_CHANNELS = (1, 3, 4)  # gray, color, and color with transparency
_SIDE = 8  # the smallest side of what may be an image
_BYTE = 255  # the largest pixel of 8 bits
_DARK = 16  # largest value up to which numbers are hardly pixels
_CONSECUTIVE, _DISTINCT = 50, 100  # samples from which on distinct whole numbers look like ids
# Share of test samples, and number, that may be training samples as well without a word.
_SHARED, _FEW = 0.01, 9
_MOST = 100_000  # samples by which the precision of numbers is judged
_COARSE = 0.01  # share of a column's deviation that rounding to float32 may take without a word


def warn_about_inputs(
    x: Shaped[Tensor, "samples *features"], name: str, kind: str, columns: tuple[str, ...] = ()
) -> None:
    """Warn where inputs may mean something else than they are taken for.

    Args:
        x: the inputs as they were given.
        name: of the inputs, as messages call them.
        kind: their type as they were given, such as "uint16", which PyTorch may not have.
        columns: names of the features, when known.
    """
    if not len(x) or not x[0].numel() or x.dtype == torch.bool:
        return
    low, high = map(float, torch.aminmax(x))
    # One line for an input: of several doubts the first is said.
    said = _doubt_pixels(x, name, kind, low, high)
    if not said:
        said = _doubt_order(x, name)
    if x.dtype == torch.float64:
        # Without a large number none is lost, and a copy of all inputs is saved.
        if max(abs(low), abs(high)) > LARGEST:
            said = said or _doubt_size(x)
        said = said or _doubt_precision(x[:_MOST])
    if x.ndim == 2:
        said = said or _doubt_ids(x, name, columns)
    if said:
        warnings.warn(f"{name} {said}", stacklevel=4)


def _is_picture(x: Tensor) -> bool:
    """Whether the shape is that of pictures: square and gray, or with an axis of channels."""
    if x.ndim == 3:
        return x.shape[1] == x.shape[2] >= _SIDE
    if x.ndim != 4:
        return False
    first = x.shape[1] in _CHANNELS and min(x.shape[2:]) >= _SIDE
    last = x.shape[3] in _CHANNELS and min(x.shape[1:3]) >= _SIDE
    return first or last


def _doubt_pixels(x: Tensor, name: str, kind: str, low: float, high: float) -> str:
    """Describe doubts about whether numbers are pixels."""
    shape = " x ".join(map(str, x.shape[1:]))
    if x.dtype == torch.uint8:
        if x.ndim in (3, 4) and 0 < high <= 1:
            return (
                f"is uint8 of shape {shape} and holds 0 and 1 alone: taken as images, whose pixels "
                "run from 0 to 255, so that 1 becomes nearly black; if it is no image, such as "
                f"one-hot codes or a mask, give {name} as float32"
            )
        return ""
    if kind in ("uint16", "uint32") and x.ndim >= 3:
        return (
            f"is {kind} of shape {shape}: taken as whole numbers up to {high:,.0f}, which are not "
            f"scaled; if they are pixels, give floats, such as {name} / {np.iinfo(kind).max}"
        )
    if not _is_picture(x) or low < 0 or not _DARK < high <= _BYTE:
        return ""
    taken = "numbers" if x.is_floating_point() else "whole numbers, such as tokens"
    return (
        f"has shape {shape} and numbers from {low:g} to {high:g}: taken as {taken}, which are not "
        "scaled; if they are pixels, give uint8, which is normalized"
    )


def _doubt_order(x: Tensor, name: str) -> str:
    """Describe doubts about the axis of channels."""
    if x.ndim != 4 or x.dtype == torch.uint8 or x.shape[1] in _CHANNELS:
        return ""
    if x.shape[3] not in _CHANNELS or min(x.shape[1:3]) < _SIDE:
        return ""
    channels, *sides = x.shape[1:]
    return (
        f"is taken as {channels} channels of {' x '.join(map(str, sides))}; if channels are last, "
        f"give channels first: {name}.transpose(0, 3, 1, 2), or {name}.permute(0, 3, 1, 2) of a "
        "tensor"
    )


def warn_about_ids(columns: Mapping[str, Shaped[np.ndarray, "samples entries"]]) -> None:
    """Warn of columns of a table that look like the ids or numbers of its rows.

    Args:
        columns: of numbers, by name; NaN where an entry is empty.
    """
    # A table with one column of numbers has nothing else to learn from.
    if len(columns) < 2:
        return
    found = []
    for name, values in columns.items():
        if len(values) >= _CONSECUTIVE and _is_like_ids(torch.from_numpy(values[:, 0])):
            found.append(name)
    if found:
        more = f" (and {len(found) - 1} further columns)" if len(found) > 1 else ""
        samples = len(columns[found[0]])
        warnings.warn(
            f"column {found[0]!r}{more} has another whole number for each of the {samples} rows: "
            "taken as a number to learn from; if it is an id or a row's number, leave it out: name "
            "the inputs with features",
            stacklevel=4,
        )


def warn_about_columns(columns: Mapping[str, Shaped[np.ndarray, "samples entries"]]) -> None:
    """Warn of columns of a table with whole numbers that float32 does not hold.

    Args:
        columns: the ones without scaling, by name; NaN where an entry is empty.
    """
    found = {}
    for name, values in columns.items():
        said = _doubt_size(torch.from_numpy(values), "give scale='standard'")
        said = said or _doubt_precision(torch.from_numpy(values), "give scale='standard'")
        if said:
            found[name] = said
    if found:
        first, said = next(iter(found.items()))
        more = f" (and {len(found) - 1} further columns)" if len(found) > 1 else ""
        warnings.warn(f"column {first!r}{more} {said}", stacklevel=4)


def _doubt_size(x: Tensor, advice: str = "subtract a start and scale") -> str:
    """Describe whole numbers that float32 does not hold."""
    lost = (x.float().double() != x) & (x == x.round())
    if not bool(lost.any()):
        return ""
    first = float(x[lost][0])
    return (
        f"has whole numbers such as {first:,.0f}, which becomes {np.float32(first):,.0f} as "
        f"float32: models see no difference; {advice}, or leave them out"
    )


def warn_about_targets(
    y: Shaped[Tensor, "samples *targets"] | Shaped[np.ndarray, "samples *targets"], what: str
) -> None:
    """Warn of targets of a regression whose differences float32 does not hold.

    Args:
        y: the targets as they were given.
        what: they are, for the message.
    """
    # Other types are float32 already, or hold no number that float32 rounds.
    if str(y.dtype).removeprefix("torch.") not in ("float64", "int64") or not len(y):
        return
    some = y[:_MOST]
    numbers = torch.from_numpy(some.astype(np.float64)) if isinstance(some, np.ndarray) else some
    said = _doubt_precision(numbers.detach().double().cpu(), "subtract a start, or scale them")
    if said:
        warnings.warn(f"{what} {said}", stacklevel=4)


def _doubt_precision(x: Tensor, advice: str = "subtract a start, or scale") -> str:
    """Describe a column whose values are so much alike that float32 rounds their differences."""
    if not x.numel():
        return ""
    flat = x.reshape(len(x), -1)
    lost = (flat.float().double() - flat).abs().nan_to_num().amax(0)
    if not bool(lost.any()):
        return ""
    center = flat.nanmean(0)
    spread = (flat - center).square().nanmean(0).sqrt()
    # A constant column has no differences that rounding could take.
    coarse = (lost > _COARSE * spread) & (spread > 0)
    if not bool(coarse.any()):
        return ""
    place = int(coarse.nonzero()[0])
    first = float(center[place])
    step = float(np.spacing(np.float32(first)))
    return (
        f"has numbers near {first:g} that differ by {float(spread[place]):.3g} on average, of "
        f"which float32 keeps steps of {step:.2g}: {advice}"
    )


def _doubt_ids(x: Tensor, name: str, columns: tuple[str, ...]) -> str:
    """Describe a feature that has another whole number for each sample."""
    samples = len(x)
    # One feature is what is learned from, whatever it is.
    if x.shape[1] < 2 or samples < _CONSECUTIVE:
        return ""
    # Two rows rule out most columns of fractions, so that only few are sorted.
    for place in (x[:2] == x[:2].round()).all(0).nonzero().flatten().tolist():
        if not _is_like_ids(x[:, place]):
            continue
        feature = repr(columns[place]) if columns else f"{name}[:, {place}]"
        return (
            f"has another whole number for each of the {samples} samples in the feature {feature}: "
            "taken as a number to learn from; if it is an id or a row's number, leave it out"
        )
    return ""


def _is_like_ids(values: Shaped[Tensor, " samples"]) -> bool:
    """Whether values are distinct whole numbers, and too many or too close to be so by chance."""
    # First, as most columns of numbers are fractions, and sorting takes far longer.
    if not bool((values == values.round()).all()):
        return False
    steps = values.sort().values.diff()
    # Distinct whole numbers are at least 1 apart.
    if bool((steps < 1).any()):
        return False
    # Few numbers differ by chance: only consecutive ones look like ids then.
    return len(values) >= _DISTINCT or not bool((steps > 1).any())


def fold_look(name: str) -> str:
    """Return a name without what nobody sees: further spaces, and how accents are written."""
    # NFC joins a letter with an accent that is a character of its own.
    return unicodedata.normalize("NFC", " ".join(name.split()))


def warn_about_lookalikes(names: Sequence[str], what: str) -> None:
    """Warn of two names that look the same, and of no further ones.

    Names that differ in case alone look the same. Single letters do not: they may be classes of
    characters.

    Args:
        names: of clients or classes, or the categories of a column.
        what: they are, for the message.
    """
    seen: dict[str, str] = {}
    for name in names:
        look = fold_look(name)
        if len(look) > 1:
            look = look.casefold()
        other = seen.setdefault(look, name)
        if other != name:
            warnings.warn(
                f"{what} {other!r} and {name!r} differ in spaces, in case or in how accents are "
                "written, and are two; make them equal if they are one",
                stacklevel=4,
            )


def warn_about_shared_samples(
    train: tuple[Tensor | StoredRows, Tensor], test: tuple[Tensor | StoredRows, Tensor], name: str
) -> None:
    """Warn where more test samples are training samples than chance explains.

    Args:
        train: inputs and targets.
        test: inputs and targets.
        name: of the data.
    """
    seen, held = _hash_rows(*train), _hash_rows(*test)
    if not len(held) or not len(seen):
        return
    # Hashes of input and target together: equal inputs with other targets are no copies.
    shared = float(np.isin(held, seen).mean())
    # Samples with few values repeat by chance, in the training data too.
    _, counts = np.unique(seen, return_counts=True)
    repeated = float(counts[counts > 1].sum()) / len(seen)
    if shared > repeated + _SHARED and shared * len(held) > _FEW:
        warnings.warn(
            f"{name}: {round(shared * len(held))} of {len(held)} test samples are training samples "
            "as well, input and target, so that results are better than on new samples; leave them "
            "out of one of the two",
            stacklevel=4,
        )


def _hash_rows(x: Tensor | StoredRows, y: Tensor) -> np.ndarray:
    """Return a hash of each sample."""
    found = []
    for start, piece in iterate_pieces(x):
        # As bytes, samples x bytes of the input and of the target.
        columns = []
        for one in (piece, y[start : start + len(piece)]):
            flat = one.reshape(len(one), -1).contiguous().numpy().view(np.uint8)
            columns.append(flat.reshape(len(flat), -1))
        rows = np.concatenate(columns, axis=1)
        # Python's hashes differ between processes; these are compared within one.
        found += [hash(row.tobytes()) for row in rows]
    return np.array(found)


def require_aligned(**given: Any) -> None:
    """Refuse columns of pandas whose rows have the same labels in another order.

    Args:
        given: what belongs together row by row, by the name of the argument.

    Raises:
        DataError: when two indexes hold the same labels in another order.
    """
    indexes: list[tuple[str, Any]] = []
    for name, value in given.items():
        # `iloc` too, since lists have an `index` that is a function.
        if hasattr(value, "index") and hasattr(value, "iloc"):
            indexes.append((name, value.index))
    for name, index in indexes[1:]:
        first, known = indexes[0]
        if index.equals(known) or len(index) != len(known):
            continue
        if bool(index.sort_values().equals(known.sort_values())):
            raise DataError(
                f"{first} and {name} have the same index in another order; rows are paired by "
                f"place: give {name}.loc[{first}.index], or {name}.to_numpy() where the places "
                "are right"
            )
