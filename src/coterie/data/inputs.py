"""Prepare new inputs for a trained model as its training data were prepared.

A federation holds prepared inputs. Later users of a model have rows of a table, uint8 images or
several arrays. `InputForm` records how inputs were prepared, and repeats it.
"""

from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor

from coterie.data.federation import Federation, parse_columns, parse_parts
from coterie.data.preparation import FittedPreparation, TableColumn
from coterie.data.source import InputPart, column_names, is_images, normalize_images, pack_inputs
from coterie.data.tables import read_inputs
from coterie.errors import ConfigError, DataError, describe_unknown


@dataclass(frozen=True)
class InputForm:
    """What an input is, the same for all clients.

    Args:
        features: the shape of one input.
        images: whether inputs are images of bytes, which are normalized.
        mean: per channel, of images; empty for "do not normalize".
        std: per channel.
        parts: what an input is made of, where it is several tensors.
        table: the columns of the table that inputs were read from; empty where they came otherwise.
        names: a name for each entry of an input, when known.
    """

    features: tuple[int, ...]
    images: bool = False
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    parts: tuple[InputPart, ...] = ()
    table: tuple[TableColumn, ...] = ()
    names: tuple[str, ...] = ()

    @staticmethod
    def from_federation(federation: Federation) -> "InputForm":
        """Return the form of the inputs of a federation."""
        x = federation.x
        # Axes are clients, samples, channels, height, width.
        images = x.dtype == torch.uint8 and x.ndim == 5
        kept = (federation.mean, federation.std) if images else ((), ())
        return InputForm(
            federation.features,
            images,
            *kept,
            federation.parts,
            federation.table,
            federation.feature_names,
        )

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` reads."""
        return {
            **asdict(self),
            "parts": list(map(astuple, self.parts)),
            "table": list(map(TableColumn.to_fields, self.table)),
        }

    @staticmethod
    def from_json(stored: Mapping[str, Any]) -> "InputForm":
        """Return the form that `to_json` described."""
        # JSON has lists; an InputForm is compared with others, and has tuples.
        lists = {name: tuple(stored[name]) for name in ("features", "mean", "std", "names")}
        parts, table = parse_parts(stored["parts"]), parse_columns(stored["table"])
        return InputForm(**lists, images=stored["images"], parts=parts, table=table)

    def prepare_inputs(
        self, x: Any, fitted: FittedPreparation | None = None
    ) -> Shaped[Tensor, "samples *features"]:
        """Convert raw inputs to the form in which a federation holds them.

        Args:
            x: for a model of a table, rows of such a table (pandas, polars, arrow, arrays by
                column, the path of a CSV or parquet file), which are filled and scaled here; arrays
                as `from_arrays` takes them, which for a model of a table are entries that are
                filled and scaled already.
            fitted: the client's preparation of rows of a table.

        Raises:
            ConfigError: when a table lacks a column that training had.
            DataError: when the inputs are of another kind or shape than those of the training.
        """
        names = _find_columns(x)
        # A table is encoded as in training; an array holds entries that are encoded already.
        if self.table and names:
            entries = torch.from_numpy(read_inputs(x, self.table))
            if fitted is not None:
                found = fitted(entries)
            else:
                # Codes alone are whole numbers, as for an embedding.
                whole = all(column.codes for column in self.table)
                found = entries.to(torch.int32 if whole else torch.float32)
        else:
            x = self._select_columns(x, names)
            found = pack_inputs(x, self.parts)
        return self._check_inputs(found)

    def _select_columns(self, x: Any, names: tuple[str, ...]) -> Any:
        """Return the columns of a table by their names, in the order of training.

        Raises:
            ConfigError: when one is missing.
        """
        # Columns that are numbered have no names of their own.
        if self.parts or not self.names or not names or all(map(str.isdecimal, names)):
            return x
        if names == ("file",):
            raise DataError(
                f"x is the path of a file, {str(x)!r}; expected arrays or a table, as in training"
            )
        for name in self.names:
            if name not in names:
                raise ConfigError(f"x: {describe_unknown('column', name, names)}")
        if isinstance(x, Mapping):
            return np.stack([np.asarray(x[name]) for name in self.names], axis=1)
        # polars and arrow select by method, pandas by index.
        return x.select(list(self.names)) if hasattr(x, "select") else x[list(self.names)]

    def _check_inputs(self, x: Tensor) -> Tensor:
        shape = " x ".join(map(str, self.features)) or "one number"
        if tuple(x.shape[1:]) != self.features:
            one = "; one sample is a batch too: x[None]" if tuple(x.shape) == self.features else ""
            found = " x ".join(map(str, x.shape))
            raise DataError(f"x is {found}; expected samples x {shape}{one}")
        if self.images and x.dtype != torch.uint8:
            kind = str(x.dtype).removeprefix("torch.")
            raise DataError(
                f"x is {kind}; expected uint8 images (0 to 255), as in training: they are "
                "normalized here, or give "
                "normalized ones to the module itself"
            )
        # Models that were trained on numbers from 0 to 1, say, would take bytes without an error.
        if not self.images and len(x) and is_images(x[0]):
            raise DataError(
                "x is uint8 images; expected numbers, as in training: scale them as you did there"
            )
        if x.is_floating_point() and not bool(torch.isfinite(x).all()):
            raise DataError("x has NaN or infinity; fill or drop those samples")
        return x

    def to_numbers(
        self, x: Shaped[Tensor, "samples *features"], dtype: torch.dtype
    ) -> Shaped[Tensor, "samples *features"]:
        """Return inputs as numbers, images normalized.

        Args:
            x: as `prepare_inputs` returns them.
            dtype: of the module.
        """
        if not self.images:
            return x.to(dtype)
        if not self.mean:
            return normalize_images(x, dtype)
        # Of shape channels x 1 x 1: one constant for all places of a channel.
        mean = torch.tensor(self.mean, dtype=dtype).reshape(-1, 1, 1)
        std = torch.tensor(self.std, dtype=dtype).reshape(-1, 1, 1)
        return normalize_images(x, dtype, mean, std)


def _find_columns(x: Any) -> tuple[str, ...]:
    """Return the columns of a table ("file" for a file); none of anything else."""
    if isinstance(x, Mapping):
        return tuple(map(str, x))
    if isinstance(x, str) or hasattr(x, "__fspath__"):
        return ("file",)
    return () if isinstance(x, Tensor | np.ndarray) else column_names(x)
