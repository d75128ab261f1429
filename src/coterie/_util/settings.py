"""Settings: each is declared once, on the field of a frozen dataclass, and checked everywhere.

A field's annotation declares its type, its range (`annotated_types`: Ge, Gt, Le, Lt, MinLen) and
its choices (`Literal`). A value from Python, from a file or from the command line is checked
against it and refused with the same message. Lists become tuples and whole numbers become floats
where a float is expected; nothing else is converted, so the text "false" is never a true value.
"""

import functools
import inspect
import itertools
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
    """Marks a text that names a custom function, which is imported only when it is needed."""


CustomFunction = Annotated[str | Callable[..., Any], Importable()]
"""A function or its import path, "package.module:name"; a function is stored as its path."""

_IMPORT_PATH = re.compile(r"[\w.]+:[\w.]+")

NONE = "none"
"""The value for "not set" in a file and on a command line, because TOML has no null."""

_BOUNDS: dict[type, tuple[Callable[[Any, Any], bool], str]] = {
    Ge: (lambda value, bound: value >= bound.ge, "{0.ge} or more"),
    Gt: (lambda value, bound: value > bound.gt, "above {0.gt}"),
    Le: (lambda value, bound: value <= bound.le, "at most {0.le}"),
    Lt: (lambda value, bound: value < bound.lt, "below {0.lt}"),
    MinLen: (lambda value, bound: len(value) >= bound.min_length, "{0.min_length} or more of them"),
}
_LARGEST = 2**63  # the libraries below hold whole numbers in 64 bits
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

    # a run-time type checker would refuse a value before `check` does, with another message
    __no_type_check__ = True

    def __post_init__(self) -> None:
        cls = type(self)
        try:
            for name, hint in settable_fields(cls).items():
                # The dataclass is frozen: values are stored in checked form, past it.
                value, default = getattr(self, name), getattr(cls, name, None)
                _check_not_empty(name, value, default)
                # Where leaving it out means something else, this word alone says "not set".
                is_said = isinstance(value, str) and value == NONE
                if is_said and default is not None and _fit_value(None, hint)[0]:
                    value = None
                object.__setattr__(self, name, _check_value(name, value, hint))
            self._check_rules()
        except ConfigError as error:
            raise ConfigError(f"{_owner_name(cls)}: {error}") from None

    def _check_rules(self) -> None:
        """Call `check`; a class with a field of that name has its rules here."""
        self.check()

    def check(self) -> None:
        """Check the rules that concern several fields.

        Raises:
            ConfigError: with the field, what was found and what was expected.
        """


@dataclass(frozen=True)
class WithPresets(Configurable):
    """Settings some of which follow a preset unless they are given.

    A class has a field `preset`, and in `presets` the values that differ from its fields' defaults.
    An explicit value wins over the preset, also after `dataclasses.replace`; the other fields
    follow when the preset changes.
    """

    presets: ClassVar[Mapping[str, Mapping[str, Any]]]
    given: InitVar[frozenset[str]] = field(default=frozenset(), kw_only=True)

    def __new__(cls, *args: Any, **kwargs: Any):
        made = object.__new__(cls)
        if args or kwargs:
            names = [*list(settable_fields(cls))[: len(args)], *kwargs]
            # `dataclasses.replace` passes its changes first, then `given` and the unchanged fields
            if "given" in kwargs:
                names = names[: names.index("given")]
            object.__setattr__(made, "_named", names)
        return made

    def __post_init__(self, given: frozenset[str]) -> None:
        object.__setattr__(self, "given", given.union(self.__dict__.pop("_named", ())))
        # a subclass has the field, which the type checker cannot know
        preset = self.presets.get(str(getattr(self, "preset")), {})  # noqa: B009
        for name in self.preset_fields():
            object.__setattr__(self, name, preset.get(name, getattr(type(self), name)))
        super().__post_init__()

    def preset_fields(self) -> set[str]:
        """Return the fields that follow the preset."""
        set_by_presets = set(itertools.chain.from_iterable(self.presets.values()))
        return set_by_presets - set(self.__dict__["given"])


@functools.cache
def settable_fields(cls: type[Any]) -> dict[str, Any]:
    """Return the fields of a dataclass that can be set, by name, with their annotations."""
    hints: dict[str, Any] = {}
    # The annotation of a subclass replaces that of its base.
    for base in reversed(cls.__mro__):
        hints |= inspect.get_annotations(base, eval_str=True)
    return {item.name: hints[item.name] for item in fields(cls) if item.init}


def format_brief(value: Configurable) -> str:
    """Format an instance with the fields that differ from their defaults."""
    shown = []
    for item in fields(value):  # type: ignore[arg-type]
        found = getattr(value, item.name)
        if found != item.default:
            shown.append(f"{item.name}={found!r}")
    return f"{type(value).__name__}({', '.join(shown)})"


def required_fields(cls: type[Any]) -> set[str]:
    """Return the fields of a dataclass that have no default."""
    given = [f for f in fields(cls) if f.init]
    needed = [f for f in given if f.default is MISSING and f.default_factory is MISSING]
    return {f.name for f in needed}


def parse_settings(cls: type[T], table: Mapping[str, object], where: str, **decided: object) -> T:
    """Make a `Configurable` from a table of settings.

    Args:
        cls: a dataclass.
        table: its fields by name; fields with a default may be left out.
        where: the table's name in a study file, such as "data.shift[0]"; every message begins with
            it.
        **decided: fields that the caller sets; in the table they are unknown keys.

    Raises:
        ConfigError: on an unknown key (with the nearest valid one), a missing key, or a value that
            does not fit.
    """
    known = {name: hint for name, hint in settable_fields(cls).items() if name not in decided}
    # Here, since Python's own message for an unknown argument names neither table nor near keys.
    for key in table:
        if key not in known:
            raise ConfigError(f"{where}: {describe_unknown('key', str(key), known)}")
    for name, hint in known.items():
        if name in required_fields(cls) and name not in table:
            raise ConfigError(f"{where}: {name} is missing; expected {describe_hint(hint)}")
    try:
        return cls(**table, **decided)
    except ConfigError as error:
        raise ConfigError(f"{where}: {str(error).removeprefix(f'{_owner_name(cls)}: ')}") from None


def _owner_name(cls: type[Any]) -> str:
    """Return a class's name in messages: its kind, unless that is itself a setting."""
    kind = getattr(cls, "kind", None)
    if isinstance(kind, str) and "kind" not in settable_fields(cls):
        return kind
    return cls.__name__


def _check_not_empty(name: str, found: Any, default: Any) -> None:
    """Refuse an empty text, unless the field's default says "not set" with one."""
    if isinstance(found, str) and not found.strip() and default != "":
        raise ConfigError(f"{name} is {found!r}; expected a value: leave it out for the default")


def _check_value(name: str, found: Any, hint: Any) -> Any:
    """Return a value as it is stored, or refuse it."""
    fits, value = _fit_value(found, hint)
    if fits:
        return value
    expected = describe_hint(hint)
    values = found
    if not _is_list(values):
        values = [values]
    if any(isinstance(one, int) and abs(one) >= _LARGEST for one in values):
        expected += " and below 2^63"
    raise ConfigError(f"{name} is {found!r}; expected {expected}")


def _is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, list | tuple)


def _fit_value(value: Any, hint: Any) -> tuple[bool, Any]:
    """Return whether a value fits an annotation, and the value to store."""
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
        for option in inner:  # the first that fits decides what is stored
            fits, stored = _fit_value(value, option)
            if fits:
                return True, stored
        return False, value
    if hint is type(None):
        return value is None or (isinstance(value, str) and value == NONE), None
    if origin is Literal:
        # True == 1 and 1 == 1.0 to Python.
        return any(type(value) is type(option) and value == option for option in inner), value
    if hint is float:
        # True is a number to Python, and never meant as one
        if isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value):
            return True, float(value)
        return False, value
    if hint is int:
        if isinstance(value, Integral) and not isinstance(value, bool):
            return -_LARGEST <= int(value) < _LARGEST, int(value)
        return False, value
    if origin is Callable:
        return callable(value), value
    if origin is not None and issubclass(origin, Mapping):
        return isinstance(value, Mapping), value
    if origin is not None and issubclass(origin, Sequence):
        # A text is a sequence to Python, and never meant as one.
        if not _is_list(value):
            return False, value
        all_fit, items = True, []
        for item in value:
            fits, stored = _fit_value(item, inner[0])
            all_fit = all_fit and fits
            items.append(stored)
        # A tuple: settings are hashed and never changed.
        return all_fit, tuple(items)
    return isinstance(value, hint), value


def accepts(value: Any, hint: Any) -> bool:
    """Return whether a field with an annotation takes a value."""
    return _fit_value(value, hint)[0]


def is_importable(hint: Any) -> bool:
    """Return whether an annotation is that of a function by its import path."""
    return typing.get_origin(hint) is Annotated and Importable() in typing.get_args(hint)[1:]


def custom_functions(value: Configurable) -> dict[str, str]:
    """Return the import paths of custom functions among some settings, by the setting's name."""
    found = {}
    for name, hint in settable_fields(type(value)).items():
        path = getattr(value, name)
        is_path = isinstance(path, str) and _IMPORT_PATH.fullmatch(path) is not None
        if is_path and _may_be_importable(hint):
            found[name] = path
    return found


def _may_be_importable(hint: Any) -> bool:
    is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    return is_importable(hint) or (is_union and any(map(is_importable, typing.get_args(hint))))


def describe_hint(hint: Any, *, many: bool = False) -> str:
    """Describe an annotation in words; `many`: in the plural, as the items of a list.

    Example:
        >>> describe_hint(Annotated[int, Ge(1)]), describe_hint(Sequence[float] | None)
        ('a whole number, 1 or more', 'a list of numbers or "none"')
    """
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if is_importable(hint):
        return ("an import path (package.module:name)", "import paths")[many]
    if origin is Annotated:
        of_length, each = any(isinstance(bound, MinLen) for bound in inner), ""
        if many and not of_length:
            each = "each "
        return f"{describe_hint(inner[0], many=many)}, {each}{_describe_range(inner[1:])}"
    if origin in (types.UnionType, typing.Union):
        options = [describe_hint(option, many=many) for option in inner]
        if any(", " in option for option in options):
            return ", or ".join(options)
        return " or ".join(options)
    if origin is Literal:
        *most, last = map(repr, inner)
        return f"{', '.join(most)} or {last}" if most else last
    if origin is Callable:
        return ("a function", "functions")[many]
    if origin is not None and issubclass(origin, Mapping):
        return ("a table", "tables")[many]
    if origin is not None and issubclass(origin, Sequence):
        return f"{('a list', 'lists')[many]} of {describe_hint(inner[0], many=True)}"
    if hint is bool:
        return "true or false"
    if hint is type(None):
        return f'"{NONE}"'
    return _WORDS.get(hint, (hint.__name__, hint.__name__))[many]


def _describe_range(bounds: Sequence[Any]) -> str:
    if list(map(type, bounds)) == [Ge, Le]:
        return f"from {bounds[0].ge} to {bounds[1].le}"
    return " and ".join(_BOUNDS[type(bound)][1].format(bound) for bound in bounds)


def to_plain(value: Any, *, decided: bool = True) -> Any:
    """Return settings as plain values: the inverse of `parse_settings`.

    None is left out where it is the default, and else written as the text "none".

    Args:
        value: settings, or values of them.
        decided: include the values that a preset decides.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Peers:
        ...     num: int = 5
        ...     seen: tuple[float, ...] = (0.5,)
        ...     limit: int | None = None
        >>> to_plain(Peers())
        {'num': 5, 'seen': [0.5]}
    """
    if is_dataclass(value) and not isinstance(value, type):
        kind = getattr(type(value), "kind", None)
        # What only follows the preset is left out, so that the preset still decides when it is read
        # again.
        left_out, own = set[str](), {}
        if isinstance(value, WithPresets) and not decided:
            left_out = value.preset_fields()
        for item in fields(value):
            if not item.init or item.name in left_out:
                continue
            if (found := getattr(value, item.name)) is not None:
                own[item.name] = to_plain(found, decided=decided)
            elif item.default is not None and item.default is not MISSING:
                own[item.name] = NONE
        if isinstance(kind, str) and "kind" not in own:
            own = {"kind": kind, **own}
        return own
    if isinstance(value, Mapping):
        return {str(k): to_plain(v, decided=decided) for k, v in value.items() if v is not None}
    if isinstance(value, (list, tuple)):
        return [to_plain(v, decided=decided) for v in value]
    if isinstance(value, Path):
        return str(value)
    return value


def to_toml(data: Mapping[str, Any]) -> str:
    """Write a table of plain values as TOML.

    Lists and nested tables stay on one line. Stored files are compared byte by byte, and the
    libraries that write TOML lay these out in other ways.

    Example:
        >>> study = {"rounds": 3, "local": {"lr": 0.001}, "methods": [{"kind": "dac"}]}
        >>> print(to_toml(study), end="")
        rounds = 3
        <BLANKLINE>
        [local]
        lr = 0.001
        <BLANKLINE>
        [[methods]]
        kind = "dac"
    """
    # what belongs to no section has to come first: a section ends only where the next one begins
    lines = _format_entries({k: v for k, v in data.items() if not _is_section(v)})
    for key, value in data.items():
        if isinstance(value, Mapping):
            lines += ["", f"[{_format_key(key)}]", *_format_entries(value)]
        elif _is_section(value):
            for part in value:
                lines += ["", f"[[{_format_key(key)}]]", *_format_entries(part)]
    return "\n".join(lines).lstrip("\n") + "\n"


def _is_section(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(isinstance(part, Mapping) for part in value)
    return isinstance(value, Mapping)


def _format_entries(table: Mapping[str, Any]) -> list[str]:
    return [f"{_format_key(key)} = {_format_value(value)}" for key, value in table.items()]


def _format_key(key: str) -> str:
    is_bare = key.replace("-", "").replace("_", "").isalnum() and key.isascii()
    if is_bare:
        return key
    return _quote_text(key)


def _format_value(value: Any) -> str:
    if isinstance(value, Mapping) and not value:
        return "{}"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(_format_entries(value)) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_format_value, value)) + "]"
    # A bool is an int to Python: it comes first.
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    return _quote_text(str(value))


def _quote_text(value: str) -> str:
    # A JSON text is a basic string of TOML, but for DEL, which TOML wants escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
