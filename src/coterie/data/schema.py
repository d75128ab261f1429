"""The schema of a table: what its columns are and how they are coded, decided once and kept.

A later file, a test table or the table of another hospital is read with the schema of the first.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from coterie._util.files import write_atomically
from coterie._util.mappings import map_values
from coterie._util.names import shorten_text
from coterie.data.coding import write_category
from coterie.data.federation import Federation
from coterie.data.preparation import TableColumn
from coterie.errors import ConfigError, DataError

FILE = "table.json"
"""The schema in a study's folder."""
# Raised when a file of an older version would be misread.
_VERSION = 1
_SHOWN = 120  # letters of a line
_LISTED = 50  # columns in words


@dataclass(frozen=True)
class TableSchema:
    """What the columns of a table are, and how they become inputs and targets.

    Args:
        columns: those of the inputs, in the order of the entries.
        target: the columns to learn.
        classes: number of classes; 0 for a regression.
        class_names: the values of the target, in order; empty where these are the numbers from 0.
    """

    columns: tuple[TableColumn, ...]
    target: tuple[str, ...]
    classes: int
    class_names: tuple[str, ...] = ()

    @staticmethod
    def from_federation(federation: Federation) -> "TableSchema | None":
        """Return the schema of the table that a federation was made from; None without any."""
        if not federation.table or not federation.targets:
            return None
        return TableSchema(
            federation.table, federation.targets, federation.classes, federation.class_names
        )

    def to_text(self) -> str:
        """Return the content of a schema's file: JSON, which people can read."""
        stored = {"coterie table": _VERSION, **asdict(self)}
        return json.dumps(stored, indent=1, ensure_ascii=False) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the schema to a file."""
        write_atomically(Path(path), self.to_text().encode())

    @staticmethod
    def load(path: str | Path) -> "TableSchema":
        """Read a schema that `save` wrote.

        Raises:
            DataError: when the file is missing, or no schema.
        """
        try:
            stored = json.loads(Path(path).read_text(encoding="utf-8"))
            if stored.pop("coterie table") != _VERSION:
                raise ValueError("it is of another version")
            columns = []
            for one in stored.pop("columns"):
                if one["categories"] is not None:
                    one["categories"] = tuple(one["categories"])
                columns.append(TableColumn(**one))
            # JSON has lists, and a schema must be equal to the one that was stored.
            for name in ("target", "class_names"):
                stored[name] = tuple(stored[name])
            return TableSchema(tuple(columns), **stored)
        except OSError as error:
            raise DataError(f"cannot read the schema {path}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"{path} is no schema of a table ({error}); expected the {FILE} of a study's "
                "folder, or a file of TableSchema.save"
            ) from None

    def to_options(self) -> dict[str, Any]:
        """Return the settings of a table that give this schema, by the names of `TableOptions`."""
        features, indicate, coded, categories = [], [], {}, {}
        for one in self.columns:
            # An indicator has the name of the column from which it is made.
            (indicate if one.indicator else features).append(one.name)
            if one.codes:
                coded[one.name] = "codes"
            if one.categories is not None:
                categories[one.name] = list(one.categories)
        # Several columns are a regression, or labels: never one class.
        classes = self.classes if len(self.target) == 1 else None
        return {
            "target": list(self.target),
            "features": features,
            "encode": coded or "one-hot",
            "indicate": indicate,
            # One setting of the whole table: all columns of numbers are scaled, or none.
            "scale": "standard" if any(one.scaled for one in self.columns) else None,
            "categories": categories,
            "class_names": list(self.class_names),
            "classes": classes,
            **({} if self._is_without_fills else {"impute": self._list_fills()}),
        }

    @property
    def _is_without_fills(self) -> bool:
        """Whether the file is of a time when schemas said that a column is filled, not by what."""
        return any(one.filled and one.impute is None for one in self.columns)

    @property
    def _plain_columns(self) -> list[TableColumn]:
        """The columns of the table itself: without the indicators that were made of them."""
        return [one for one in self.columns if not one.indicator]

    def _list_fills(self) -> dict[str, Any]:
        """Return what fills empty entries, by column."""
        fills = {}
        for one in self.columns:
            if one.impute is not None:
                fills[one.name] = one.impute
        return fills

    def spread_impute(self, impute: Any) -> Mapping[str, Any] | None:
        """Return by column what a setting `impute` fills."""
        if impute is None or isinstance(impute, Mapping):
            return impute
        numbers = [one.name for one in self.columns if one.categories is None and not one.indicator]
        fills = dict.fromkeys(numbers, impute)
        # A number fills no category, and a mean of categories is the most frequent.
        if isinstance(impute, str):
            names = [one.name for one in self.columns if one.categories is not None]
            fills.update(dict.fromkeys(names, "most-frequent"))
        return fills

    def list_coding(self) -> dict[str, str]:
        """Return what must be equal wherever such a table is read, by column, in words."""
        coding = {
            "target": ", ".join(self.target),
            "classes": str(self.classes),
            "class_names": ", ".join(self.class_names),
            "inputs": ", ".join(one.name for one in self.columns),
        }
        plain = self._plain_columns
        for column in plain[:_LISTED]:
            coding[f"column {column.name}"] = _describe_column(column)
        # A hash stands for the rest of a wide table: messages between nodes are short.
        rest = "; ".join(map(_describe_column, plain[_LISTED:]))
        coding["other columns"] = hashlib.sha256(rest.encode()).hexdigest()[:16]
        return {_cut(name): _cut(text) for name, text in coding.items()}

    def describe(self, notes: Sequence[str] = ()) -> list[str]:
        """Return the schema in a few lines.

        Args:
            notes: how the file was read.
        """
        what = "a regression"
        if self.classes:
            names = ", ".join(self.class_names) or f"0 to {self.classes - 1}"
            what = f"{self.classes} classes ({names})"
        lines = [f"target: {', '.join(self.target)}, {what}"]
        plain = self._plain_columns
        for kind in ("numbers", "true or false"):
            for scaled in (False, True):
                names = [one.name for one in plain if (one.kind, one.scaled) == (kind, scaled)]
                how = ", scaled by each client's training rows" * scaled
                if names:
                    lines.append(f"{kind}{how}: {', '.join(names)}")
        for one in plain:
            if one.kind == "text":
                values = ", ".join(map(str, one.categories or ()))
                lines.append(f"text: {one.name} ({values}{', codes' * one.codes})")
        marked = [one.name for one in self.columns if one.indicator]
        if marked:
            lines.append(f"marked where empty: {', '.join(marked)}")
        fills = [f"{name} ({write_category(one)})" for name, one in self._list_fills().items()]
        if fills:
            lines.append(f"filled where empty: {', '.join(fills)}")
        if notes:
            lines.append(f"read with: {', '.join(notes)}")
        return [shorten_text(line, _SHOWN) for line in lines]


def _describe_column(column: TableColumn) -> str:
    """Return how a column is coded, in words; 1, 1.0 and "1" are one category."""
    filled = "" if column.impute is None else f", empty: {write_category(column.impute)}"
    if column.categories is None:
        return "numbers" + ", scaled" * column.scaled + filled
    values = ", ".join(map(write_category, column.categories))
    return f"{'codes' if column.codes else 'one-hot'} of {values}{filled}"


def _write_fills(fills: Mapping[str, Any] | None) -> dict[str, str]:
    return map_values(write_category, fills or {})


def _cut(text: str) -> str:
    """Return a text of limited length: a long one ends with a hash of the whole."""
    # The hash keeps texts apart that differ behind the cut.
    if len(text) <= _SHOWN:
        return text
    return f"{text[:_SHOWN]}... {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def apply_schema(given: Mapping[str, Any], path: str | Path) -> dict[str, Any]:
    """Return the settings of a table with those of a schema.

    Args:
        given: settings of a table, by the names of `TableOptions`; the schema adds what is missing.
        path: of the schema's file.

    Raises:
        ConfigError: when a setting contradicts the schema.
        DataError: when there is no such schema.
    """
    schema = TableSchema.load(path)
    found = schema.to_options()
    for name, value in found.items():
        own = given.get(name)
        if name == "target" and isinstance(own, str):
            own = [own]
        elif name == "impute":
            # However each writes it: 1 and "1" are one category, 7 and 7.0 one number.
            own, value = _write_fills(schema.spread_impute(own)), _write_fills(value)
        elif isinstance(own, tuple):
            own = list(own)
        # "one-hot" is the default, so that it may not have been chosen.
        is_default = name == "encode" and own == "one-hot"
        if own not in (None, [], {}) and own != value and not is_default:
            here, there = shorten_text(repr(own), _SHOWN), shorten_text(repr(value), _SHOWN)
            raise ConfigError(
                f"{name} is {here}, and {there} in the schema {path}; leave it out, or make "
                "them equal"
            )
    # The schema wins: what was given is equal to it, or nothing.
    return {**given, **found}
