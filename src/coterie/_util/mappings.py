"""Mappings made of others: of some keys, with other values, under other names."""

from collections.abc import Callable, Container, Hashable, Iterable, Mapping
from typing import Any, Protocol, TypeVar, runtime_checkable

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")
_Result = TypeVar("_Result")


@runtime_checkable
class Named(Protocol):
    """An object that has a name."""

    @property
    def name(self) -> str: ...


_Named = TypeVar("_Named", bound=Named)


def map_values(
    function: Callable[[_Value], _Result], mapping: Mapping[_Key, _Value]
) -> dict[_Key, _Result]:
    """Return a function of each value, under the same keys."""
    return {key: function(value) for key, value in mapping.items()}


def select_keys(mapping: Mapping[_Key, _Value], keys: Iterable[_Key]) -> dict[_Key, _Value]:
    """Return the entries of those keys that exist, in the order of `keys`."""
    return {key: mapping[key] for key in keys if key in mapping}


def drop_keys(mapping: Mapping[_Key, _Value], keys: Container[_Key]) -> dict[_Key, _Value]:
    """Return the entries of all other keys."""
    return {key: value for key, value in mapping.items() if key not in keys}


def drop_empty(mapping: Mapping[_Key, _Value]) -> dict[_Key, _Value]:
    """Return the entries whose value is neither empty nor 0, False or None."""
    return {key: value for key, value in mapping.items() if value}


def prefix_keys(prefix: str, mapping: Mapping[Any, _Value]) -> dict[str, _Value]:
    """Return all entries, with `prefix` before each name or number."""
    return {f"{prefix}{key}": value for key, value in mapping.items()}


def select_prefix(prefix: str, mapping: Mapping[str, _Value]) -> dict[str, _Value]:
    """Return the entries whose name begins with `prefix`, under the rest of the name."""
    found = {}
    for name, value in mapping.items():
        if name.startswith(prefix):
            found[name.removeprefix(prefix)] = value
    return found


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested tables by dotted path; items of a list of tables by number.

    Example:
        >>> flatten({"data": {"shift": [{"kind": "iid"}]}, "seeds": [0, 1]})
        {'data.shift.0.kind': 'iid', 'seeds': [0, 1]}
    """
    found = {}
    for key, value in table.items():
        if isinstance(value, list) and value and all(isinstance(one, Mapping) for one in value):
            value = prefix_keys("", dict(enumerate(value)))
        if isinstance(value, Mapping):
            found |= flatten(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def number_items(items: Iterable[_Key]) -> dict[_Key, int]:
    """Return the place of each item, from 0; of equal items the last one's."""
    return {item: place for place, item in enumerate(items)}


def index_by_name(items: Iterable[_Named]) -> dict[str, _Named]:
    """Return each item under its name; of one name the last item."""
    return {item.name: item for item in items}
