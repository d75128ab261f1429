"""Each client fills empty entries of a table, and scales numbers, by its own training rows.

A client uses neither other clients' rows nor its own validation and test rows to decide what to
fill in.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

# What divides a column of whose scale a client knows nothing: whatever is there becomes 0, and not
# a number in other units. Infinity would do the same, and JSON has none.
_NO_SCALE = float(np.finfo(np.float64).max)


def _most_frequent(values: Float[np.ndarray, " samples"]) -> float:
    """The value that occurs most often; the smallest of equals."""
    found, counts = np.unique(values, return_counts=True)
    return float(found[counts.argmax()])


def _measure_scale(values: Float[np.ndarray, "samples 1"]) -> tuple[float, float]:
    """Return the center and the spread of values; the spread of constant ones is 1."""
    if len(values) and values.min() == values.max():
        # Sums round: the mean of equal numbers may be another number, and their deviation not 0.
        return float(values.min()), 1.0
    center, spread = float(values.mean()), float(values.std())
    # A deviation within the rounding of the sums is none.
    rounding = len(values) * np.finfo(np.float64).eps * max(abs(center), spread)
    return center, spread if spread > rounding else 1.0


FILLS: Mapping[str, Callable[[Float[np.ndarray, " samples"]], float]] = {
    "mean": lambda values: float(np.mean(values)),
    "median": lambda values: float(np.median(values)),
    "most-frequent": _most_frequent,
}
"""What can be filled in for an empty entry, from a client's values of the column."""


@dataclass(frozen=True)
class TableColumn:
    """A column of a table, as it is read into entries of an input.

    Args:
        name: of the column.
        categories: its values, in order, each with an entry of its own; None for numbers.
        codes: whether it is one entry instead, the number of the category.
        filled: whether a client's preparation says what an empty entry becomes.
        indicator: whether the entry is not the number in the column, but 1 where the column is
            empty and 0 elsewhere.
        kind: what the column is: "numbers", "true or false" (1 and 0), or "text" for categories.
        scaled: whether a client subtracts the mean of its training rows, and divides by their
            deviation.
        impute: what fills an empty entry: a key of FILLS, a number, or a category as text; None
            where nothing does, and in data that were stored without it.
    """

    name: str
    categories: tuple[Any, ...] | None = None
    codes: bool = False
    filled: bool = False
    indicator: bool = False
    kind: str = "numbers"
    scaled: bool = False
    impute: str | float | None = None

    def to_fields(self) -> list[Any]:
        """Return the values of the fields in order, as JSON stores them."""
        fields = list(astuple(self))
        # Without a filler a column has the bytes, and the digest, of data stored before it was one.
        return fields if self.impute is not None else fields[:-1]


@dataclass(frozen=True)
class ColumnPreparation:
    """One column of a table, as entries of an input.

    Args:
        name: of the column.
        start: its first entry.
        width: number of entries: one for numbers and codes, one for each category otherwise
            ("one-hot").
        impute: what fills an empty entry: a key of FILLS, a number, or the code of a category.
        scale: whether to subtract the mean and divide by the standard deviation.
        indicated: whether another entry says where it was empty; then a client may have no value at
            all.
    """

    name: str
    start: int
    width: int = 1
    impute: str | float | None = None
    scale: bool = False
    indicated: bool = False

    def fit(
        self, x: Float[np.ndarray, "samples entries"]
    ) -> tuple[Float[np.ndarray, " width"], float, float] | None:
        """Return the filler of empty entries, the center and the spread; None without any value."""
        own = x[:, self.start : self.start + self.width]
        # An empty entry is NaN in all its columns.
        known = own[~np.isnan(own[:, 0])]
        if isinstance(self.impute, str):
            if not len(known):
                return None
            # One entry for each category: the place of the 1 is the code.
            values = known.argmax(1) if self.width > 1 else known[:, 0]
            value = FILLS[self.impute](values.astype(np.float64))
        else:
            # A column that is only scaled has no empty entry: its table was refused otherwise.
            value = 0.0 if self.impute is None else float(self.impute)
        # A category is filled in as its row of a one-hot coding.
        fill = np.eye(self.width)[int(value)] if self.width > 1 else np.array([value])
        if not self.scale:
            return fill, 0.0, 1.0
        if not len(known):
            return fill, value, _NO_SCALE
        filled = np.where(np.isnan(own), fill, own).astype(np.float64)
        return fill, *_measure_scale(filled)


@dataclass(frozen=True)
class FittedPreparation:
    """The preparation of one client's inputs, the same for training, validation and test.

    Args:
        fill: what each entry is where it is empty.
        center: what is subtracted.
        spread: what divides.
        whole: whether the result is whole numbers.
        empty: the columns without any value in the training rows, and without an entry that says
            so; their empty entries become 0, and scaled columns as a whole.
    """

    fill: Float[Tensor, " entries"]
    center: Float[Tensor, " entries"]
    spread: Float[Tensor, " entries"]
    whole: bool
    empty: tuple[str, ...]

    def __call__(self, x: Float[Tensor, "samples entries"]) -> Tensor:
        """Return filled and scaled inputs."""
        # In float64, rounded once at the end.
        filled = torch.where(torch.isnan(x), self.fill, x.double())
        return ((filled - self.center) / self.spread).to(
            torch.int32 if self.whole else torch.float32
        )


@dataclass(frozen=True)
class Preparation:
    """How every client prepares its inputs, each with its own numbers.

    Args:
        columns: those to fill or to scale.
        whole: whether inputs are whole numbers: the codes of categories, and nothing else.
    """

    columns: tuple[ColumnPreparation, ...]
    whole: bool = False

    def fit(self, x: Float[Tensor, "samples entries"]) -> FittedPreparation:
        """Fit a client's preparation.

        Args:
            x: its training rows; NaN where an entry is empty.
        """
        rows, entries = x.numpy(), x.shape[1]
        # Entries of other columns stay as they are: less 0, divided by 1.
        fill, center, spread = np.zeros(entries), np.zeros(entries), np.ones(entries)
        empty = []
        for column in self.columns:
            found = column.fit(rows)
            if found is None:
                # The column becomes 0. An indicator says that it is empty, which needs no warning.
                if not column.indicated:
                    empty.append(column.name)
                if column.scale:
                    spread[column.start] = _NO_SCALE
                continue
            place = slice(column.start, column.start + column.width)
            fill[place], center[place], spread[place] = found
        filled, centers, spreads = map(torch.from_numpy, (fill, center, spread))
        return FittedPreparation(filled, centers, spreads, self.whole, tuple(empty))


def stack_fitted(fitted: Sequence[FittedPreparation]) -> dict[str, Tensor]:
    """Return the preparations of clients as tensors: "prepared.fill", ..., a row for each client.

    Example:
        >>> fill, center, spread = torch.tensor([[1.0], [0.0], [2.0]])
        >>> one = FittedPreparation(fill, center, spread, False, ())
        >>> stack_fitted([one, one])["prepared.spread"].tolist()
        [[2.0], [2.0]]
    """
    if not fitted:
        return {}
    tensors = {f"{_STORED}.whole": torch.tensor([one.whole for one in fitted])}
    for name in _PARTS:
        tensors[f"{_STORED}.{name}"] = torch.stack([getattr(one, name) for one in fitted])
    return tensors


def unstack_fitted(tensors: Mapping[str, Tensor]) -> tuple[FittedPreparation, ...]:
    """Return the preparations that `stack_fitted` stacked; none where there are no tensors."""
    if f"{_STORED}.whole" not in tensors:
        return ()
    fill, center, spread = (tensors[f"{_STORED}.{name}"] for name in _PARTS)
    whole = tensors[f"{_STORED}.whole"].tolist()
    found = []
    for row, kind in enumerate(whole):
        found.append(FittedPreparation(fill[row], center[row], spread[row], kind, ()))
    return tuple(found)


_STORED, _PARTS = "prepared", ("fill", "center", "spread")
