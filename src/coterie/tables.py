"""Settings: a table of plain values (as TOML gives it) becomes a frozen dataclass, strictly.

A dataclass that calls `settle` in its `__post_init__` is checked however it was made: from a file, from the command
line or in Python. Lists become tuples and whole numbers become floats where a float is expected; nothing else is
converted, so the text "false" is never a true value.
"""

import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, Literal, TypeVar

from coterie.errors import ConfigError, unknown

T = TypeVar("T")

_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "nothing"}


def parse(cls: type[T], table: Mapping[str, object], where: str) -> T:
    """Make a dataclass from a table of settings.

    Args:
        cls: a dataclass.
        table: its fields by name; fields with a default may be left out.
        where: how the user finds this table, such as "data.shift[0]"; it starts every message.

    Raises:
        ConfigError: on an unknown key (with the nearest valid one), a missing key, or a value that does not fit.
    """
    known = {field.name: field for field in fields(cls) if field.init}  # type: ignore[arg-type]
    for key in table:
        if key not in known:
            raise ConfigError(f"{where}: {unknown('key', str(key), known)}")
    for name, field in known.items():
        if name not in table and field.default is MISSING and field.default_factory is MISSING:
            raise ConfigError(f"{where}: {name} is missing; it has no default")
    hints = typing.get_type_hints(cls)
    try:
        return cls(**{name: _checked(name, value, hints[name]) for name, value in table.items()})
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def settle(instance: Any) -> None:
    """Check every field of a frozen dataclass against its annotation, and turn lists into tuples.

    Raises:
        ConfigError: with the field, what was found and what was expected.
    """
    hints = typing.get_type_hints(type(instance))
    for field in fields(instance):
        value = _checked(field.name, getattr(instance, field.name), hints[field.name])
        object.__setattr__(instance, field.name, value)


def _checked(name: str, found: Any, hint: Any) -> Any:
    """Return a value as it is kept, or refuse it."""
    fits, value = _fit(found, hint)
    if not fits:
        raise ConfigError(f"{name} is {found!r}; expected {_words(hint)}")
    return value


def _fit(value: Any, hint: Any) -> tuple[bool, Any]:
    """Whether a value fits an annotation, and the value to keep."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True, value
    if origin in (types.UnionType, typing.Union):
        options = [_fit(value, option) for option in inner]
        return next((option for option in options if option[0]), (False, value))
    if origin is Literal:
        return value in inner, value
    if hint is float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number, float(value) if number else value
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool), value
    if origin is not None and issubclass(origin, Mapping):
        return isinstance(value, Mapping), value
    if origin is not None and issubclass(origin, Sequence):
        return _fit_sequence(value, inner)
    return isinstance(value, hint), value


def _fit_sequence(value: Any, inner: tuple[Any, ...]) -> tuple[bool, Any]:
    if not isinstance(value, list | tuple):
        return False, value
    items = [_fit(item, inner[0]) for item in value]
    return all(fits for fits, _ in items), tuple(item for _, item in items)


def _words(hint: Any) -> str:
    """Say an annotation in words."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_words(option) for option in inner if not (option is int and float in inner))
    if origin is Literal:
        return " or ".join(repr(option) for option in inner)
    if origin is not None and issubclass(origin, Mapping):
        return "a table"
    if origin is not None and issubclass(origin, Sequence):
        return f"a list (of {_words(inner[0])})"
    return _WORDS.get(hint, getattr(hint, "__name__", str(hint)))
