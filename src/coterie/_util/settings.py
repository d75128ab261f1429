"""Everything that can be set: declared once, on the field of a frozen dataclass, and checked however it is made.

A field's annotation says its type, its range (`annotated_types`: Ge, Gt, Le, Lt, MinLen) and its
choices (`Literal`); the same words refuse a value from Python, from a file and from the command
line. Lists become tuples and whole numbers become floats where a float is expected; nothing else is
converted, so the text "false" is never a true value.
"""

import functools
import inspect
import json
import math
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, InitVar, dataclass, field, fields, is_dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeGuard, TypeVar

from annotated_types import Ge, Gt, Le, Lt, MinLen

from coterie._util.importing import find_import_path
from coterie.errors import ConfigError, describe_unknown

T = TypeVar("T")

PositiveInt = Annotated[int, Ge(1)]
NonNegativeInt = Annotated[int, Ge(0)]
PositiveFloat = Annotated[float, Gt(0)]
NonNegativeFloat = Annotated[float, Ge(0)]
Share = Annotated[float, Ge(0), Le(1)]


@dataclass(frozen=True)
class Importable:
    """Marks a text that names a function of the user's, which is imported when it is needed and not before."""


CustomFunction = Annotated[str | Callable[..., Any], Importable()]
"""A function by its import path, "package.module:name"; one that is given itself is kept as its path."""

_IMPORT_PATH = re.compile(r"[\w.]+:[\w.]+")

NONE = "none"
"""What stands for "not set" in a file and on a command line, where a setting may be unset: TOML has no null."""

_BOUNDS: dict[type, tuple[Callable[[Any, Any], bool], str]] = {
    Ge: (lambda value, bound: value >= bound.ge, "{0.ge} or more"),
    Gt: (lambda value, bound: value > bound.gt, "above {0.gt}"),
    Le: (lambda value, bound: value <= bound.le, "at most {0.le}"),
    Lt: (lambda value, bound: value < bound.lt, "below {0.lt}"),
    MinLen: (lambda value, bound: len(value) >= bound.min_length, "{0.min_length} or more of them"),
}
_LARGEST = 2**63  # what the libraries below hold as a whole number
_WORDS = {
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("text", "texts"),
}


class Configurable:
    """The base of every frozen dataclass that can be set, in Python or in a file.

    A value that its field does not accept is refused with one line: `dac: num_peers is 2.5;
    expected a whole number, 1 or more`.
    """

    # run-time type checkers would refuse a value first, in words of their own
    __no_type_check__ = True

    def __post_init__(self) -> None:
        cls = type(self)
        try:
            for name, hint in settable_fields(cls).items():
                object.__setattr__(self, name, _check_value(name, getattr(self, name), hint))
            self.check()
        except ConfigError as error:
            raise ConfigError(f"{_owner_name(cls)}: {error}") from None

    def check(self) -> None:
        """Check the rules that concern several fields.

        Raises:
            ConfigError: with the field, what was found and what was expected.
        """


@dataclass(frozen=True)
class WithPresets(Configurable):
    """Settings some of which follow a preset unless they are given.

    A class has a field `preset`, and in `presets` the values that differ from its fields' defaults.
    What is given wins over the preset, and `dataclasses.replace` keeps it: the others follow when
    the preset changes.
    """

    presets: ClassVar[Mapping[str, Mapping[str, Any]]]
    given: InitVar[frozenset[str]] = field(default=frozenset(), kw_only=True)

    def __new__(cls, *args: Any, **kwargs: Any):
        made = object.__new__(cls)
        if args or kwargs:
            names = [*list(settable_fields(cls))[: len(args)], *kwargs]
            # `replace` passes what it changes, then what it keeps: `given` and then the fields
            if "given" in kwargs:
                names = names[: names.index("given")]
            object.__setattr__(made, "_named", names)
        return made

    def __post_init__(self, given: frozenset[str]) -> None:
        object.__setattr__(self, "given", given.union(self.__dict__.pop("_named", ())))
        preset = self.presets.get(str(getattr(self, "preset")), {})  # noqa: B009 (a subclass has it)
        for name in self.preset_fields():
            object.__setattr__(self, name, preset.get(name, getattr(type(self), name)))
        super().__post_init__()

    def preset_fields(self) -> set[str]:
        """Return the fields that follow the preset."""
        return {
            name
            for values in self.presets.values()
            for name in values
            if name not in self.__dict__["given"]
        }


@functools.cache
def settable_fields(cls: type[Any]) -> dict[str, Any]:
    """Return what can be set on a dataclass: its fields by name, with their annotations."""
    hints: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        hints |= inspect.get_annotations(base, eval_str=True)
    return {item.name: hints[item.name] for item in fields(cls) if item.init}


def format_brief(value: Configurable) -> str:
    """Write an instance with the fields that differ from their defaults."""
    said = [item for item in fields(value) if getattr(value, item.name) != item.default]  # type: ignore[arg-type]
    return f"{type(value).__name__}({', '.join(f'{item.name}={getattr(value, item.name)!r}' for item in said)})"


def required_fields(cls: type[Any]) -> set[str]:
    """Return the fields of a dataclass that have no default."""
    return {
        f.name
        for f in fields(cls)
        if f.init and f.default is MISSING and f.default_factory is MISSING
    }


def parse_settings(cls: type[T], table: Mapping[str, object], where: str) -> T:
    """Make a `Configurable` from a table of settings.

    Args:
        cls: a dataclass.
        table: its fields by name; fields with a default may be left out.
        where: how the user finds this table, such as "data.shift[0]"; it starts every message.

    Raises:
        ConfigError: on an unknown key (with the nearest valid one), a missing key, or a value that
            does not fit.
    """
    known = settable_fields(cls)
    for key in table:
        if key not in known:
            raise ConfigError(f"{where}: {describe_unknown('key', str(key), known)}")
    for name, hint in known.items():
        if name in required_fields(cls) and name not in table:
            raise ConfigError(f"{where}: {name} is missing; expected {describe_hint(hint)}")
    try:
        return cls(**table)
    except ConfigError as error:
        raise ConfigError(f"{where}: {str(error).removeprefix(f'{_owner_name(cls)}: ')}") from None


def _owner_name(cls: type[Any]) -> str:
    """How messages call a class: by its kind where it has one that is not itself a setting."""
    kind = getattr(cls, "kind", None)
    return kind if isinstance(kind, str) and "kind" not in settable_fields(cls) else cls.__name__


def _check_value(name: str, found: Any, hint: Any) -> Any:
    """Return a value as it is kept, or refuse it."""
    fits, value = _fit_value(found, hint)
    if not fits:
        large = any(
            isinstance(one, int) and abs(one) >= _LARGEST
            for one in (found if _is_list(found) else [found])
        )
        raise ConfigError(
            f"{name} is {found!r}; expected {describe_hint(hint)}{' and below 2^63' if large else ''}"
        )
    return value


def _is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, list | tuple)


def _fit_value(value: Any, hint: Any) -> tuple[bool, Any]:
    """Whether a value fits an annotation, and the value to keep."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True, value
    if is_importable(hint):
        if callable(value):
            return True, find_import_path(value, "the function")
        return isinstance(value, str) and bool(_IMPORT_PATH.fullmatch(value)), value
    if origin is Annotated:
        fits, value = _fit_value(value, inner[0])
        return fits and all(_BOUNDS[type(bound)][0](value, bound) for bound in inner[1:]), value
    if origin in (types.UnionType, typing.Union):
        options = [_fit_value(value, option) for option in inner]
        return next((option for option in options if option[0]), (False, value))
    if hint is type(None):
        return value is None or (isinstance(value, str) and value == NONE), None
    if origin is Literal:
        return any(type(value) is type(option) and value == option for option in inner), value
    if hint is float:
        number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
        return number, float(value) if number else value
    if hint is int:
        number = isinstance(value, Integral) and not isinstance(value, bool)
        return number and -_LARGEST <= int(value) < _LARGEST, int(value) if number else value
    if origin is Callable:
        return callable(value), value
    if origin is not None and issubclass(origin, Mapping):
        return isinstance(value, Mapping), value
    if origin is not None and issubclass(origin, Sequence):
        if not _is_list(value):
            return False, value
        items = [_fit_value(item, inner[0]) for item in value]
        return all(fits for fits, _ in items), tuple(item for _, item in items)
    return isinstance(value, hint), value


def is_importable(hint: Any) -> bool:
    """Whether an annotation is that of a function by its import path."""
    return typing.get_origin(hint) is Annotated and Importable() in typing.get_args(hint)[1:]


def custom_functions(value: Configurable) -> dict[str, str]:
    """Return the import paths of the user's functions among some settings, by the name of the setting."""
    hints = {
        name: hint
        for name, hint in settable_fields(type(value)).items()
        if _may_be_importable(hint)
    }
    found = {name: getattr(value, name) for name in hints}
    return {
        name: path
        for name, path in found.items()
        if isinstance(path, str) and _IMPORT_PATH.fullmatch(path)
    }


def _may_be_importable(hint: Any) -> bool:
    union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    return is_importable(hint) or (union and any(map(is_importable, typing.get_args(hint))))


def describe_hint(hint: Any, *, many: bool = False) -> str:
    """Say an annotation in words; `many`: as the items of a list.

    Example:
        >>> words(Annotated[int, Ge(1)]), words(Sequence[float] | None)
        ('a whole number, 1 or more', 'a list of numbers or "none"')
    """
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if is_importable(hint):
        return "import paths" if many else "an import path (package.module:name)"
    if origin is Annotated:
        size = any(isinstance(bound, MinLen) for bound in inner)
        return f"{describe_hint(inner[0], many=many)}, {'each ' if many and not size else ''}{_describe_range(inner[1:])}"
    if origin in (types.UnionType, typing.Union):
        options = [describe_hint(option, many=many) for option in inner]
        return (", or " if any(", " in option for option in options) else " or ").join(options)
    if origin is Literal:
        *most, last = map(repr, inner)
        return f"{', '.join(most)} or {last}" if most else last
    if origin is Callable:
        return "functions" if many else "a function"
    if origin is not None and issubclass(origin, Mapping):
        return "tables" if many else "a table"
    if origin is not None and issubclass(origin, Sequence):
        return f"{'lists' if many else 'a list'} of {describe_hint(inner[0], many=True)}"
    if hint is bool:
        return "true or false"
    if hint is type(None):
        return f'"{NONE}"'
    return _WORDS.get(hint, (hint.__name__, hint.__name__))[many]


def _describe_range(bounds: Sequence[Any]) -> str:
    if [type(bound) for bound in bounds] == [Ge, Le]:
        return f"from {bounds[0].ge} to {bounds[1].le}"
    return " and ".join(_BOUNDS[type(bound)][1].format(bound) for bound in bounds)


def to_plain(value: Any, *, decided: bool = True) -> Any:
    """Return plain values: the inverse of `parse_settings`. Settings that are None are left out.

    Args:
        value: settings, or values of them.
        decided: say also what a preset decides.

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
        left_out = value.preset_fields() if isinstance(value, WithPresets) and not decided else ()
        every = {
            f.name: getattr(value, f.name)
            for f in fields(value)
            if f.init and f.name not in left_out
        }
        own = {
            name: to_plain(found, decided=decided)
            for name, found in every.items()
            if found is not None
        }
        return {"kind": kind, **own} if isinstance(kind, str) and "kind" not in own else own
    if isinstance(value, Mapping):
        return {str(k): to_plain(v, decided=decided) for k, v in value.items() if v is not None}
    if isinstance(value, (list, tuple)):
        return [to_plain(v, decided=decided) for v in value]
    return str(value) if isinstance(value, Path) else value


def to_toml(data: Mapping[str, Any]) -> str:
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
    lines = [
        f"{_format_key(k)} = {_format_value(v)}" for k, v in data.items() if not _is_section(v)
    ]
    for key, value in data.items():
        if _is_section(value):
            for part in [value] if isinstance(value, Mapping) else value:
                head = (
                    f"[{_format_key(key)}]"
                    if isinstance(value, Mapping)
                    else f"[[{_format_key(key)}]]"
                )
                lines += [
                    "",
                    head,
                    *(f"{_format_key(k)} = {_format_value(v)}" for k, v in part.items()),
                ]
    return "\n".join(lines).lstrip("\n") + "\n"


def _is_section(value: Any) -> bool:
    return isinstance(value, Mapping) or (
        isinstance(value, list) and bool(value) and all(isinstance(v, Mapping) for v in value)
    )


def _format_key(key: str) -> str:
    return (
        key
        if key.replace("-", "").replace("_", "").isalnum() and key.isascii()
        else _quote_text(key)
    )


def _format_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return (
            "{ "
            + ", ".join(f"{_format_key(k)} = {_format_value(v)}" for k, v in value.items())
            + " }"
            if value
            else "{}"
        )
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_format_value(v) for v in value) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    return _quote_text(str(value))


def _quote_text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
