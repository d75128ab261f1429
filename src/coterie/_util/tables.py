"""Settings: a table of plain values (as TOML gives it) becomes a frozen dataclass, strictly; and back to TOML.

A dataclass that calls `settle` in its `__post_init__` is checked however it was made: from a file, from the command
line or in Python. Lists become tuples and whole numbers become floats where a float is expected; nothing else is
converted, so the text "false" is never a true value.
"""

import json
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from coterie.errors import ConfigError, unknown

T = TypeVar("T")

NONE = "none"
"""What stands for "not set" in a file and on a command line, where a setting may be unset: TOML has no null."""

_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): f'"{NONE}"'}


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
        raise ConfigError(f"{name} is {found!r}; expected {words(hint)}")
    return value


def _fit(value: Any, hint: Any) -> tuple[bool, Any]:
    """Whether a value fits an annotation, and the value to keep."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True, value
    if origin in (types.UnionType, typing.Union):
        options = [_fit(value, option) for option in inner]
        return next((option for option in options if option[0]), (False, value))
    if hint is type(None):
        return value is None or value == NONE, None
    if origin is Literal:
        return any(type(value) is type(option) and value == option for option in inner), value
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


def words(hint: Any) -> str:
    """Say an annotation in words."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(words(option) for option in inner if not (option is int and float in inner))
    if origin is Literal:
        return " or ".join(repr(option) for option in inner)
    if origin is not None and issubclass(origin, Mapping):
        return "a table"
    if origin is not None and issubclass(origin, Sequence):
        return f"a list (of {words(inner[0])})"
    return _WORDS.get(hint, getattr(hint, "__name__", str(hint)))


def plain(value: Any) -> Any:
    """Return plain values: the inverse of `parse`. Settings that are None are left out.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Peers:
        ...     num: int = 5
        ...     seen: tuple[float, ...] = (0.5,)
        ...     limit: int | None = None
        >>> plain(Peers())
        {'num': 5, 'seen': [0.5]}
    """
    if is_dataclass(value) and not isinstance(value, type):
        kind = getattr(type(value), "kind", None)
        every = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
        own = {name: plain(found) for name, found in every.items() if found is not None}
        return {"kind": kind, **own} if isinstance(kind, str) and "kind" not in own else own
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items() if v is not None}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return str(value) if isinstance(value, Path) else value


def dumps(data: Mapping[str, Any]) -> str:
    """Write a table of plain values as TOML.

    Example:
        >>> print(dumps({"rounds": 3, "local": {"lr": 0.001}, "methods": [{"kind": "dac"}]}), end="")
        rounds = 3
        <BLANKLINE>
        [local]
        lr = 0.001
        <BLANKLINE>
        [[methods]]
        kind = "dac"
    """
    lines = [f"{_key(k)} = {_inline(v)}" for k, v in data.items() if not _is_section(v)]
    for key, value in data.items():
        if _is_section(value):
            for part in [value] if isinstance(value, Mapping) else value:
                head = f"[{_key(key)}]" if isinstance(value, Mapping) else f"[[{_key(key)}]]"
                lines += ["", head, *(f"{_key(k)} = {_inline(v)}" for k, v in part.items())]
    return "\n".join(lines).lstrip("\n") + "\n"


def _is_section(value: Any) -> bool:
    return isinstance(value, Mapping) or (
        isinstance(value, list) and bool(value) and all(isinstance(v, Mapping) for v in value)
    )


def _key(key: str) -> str:
    return key if key.replace("-", "").replace("_", "").isalnum() and key.isascii() else _text(key)


def _inline(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(k)} = {_inline(v)}" for k, v in value.items()) + " }" if value else "{}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_inline(v) for v in value) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    return _text(str(value))


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
