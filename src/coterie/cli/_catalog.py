"""Names, defaults and meanings of the parameters of a configuration class, from its fields and docstring."""

import inspect
import re
from dataclasses import MISSING, dataclass, fields
from typing import Any, get_type_hints

from coterie._util.tables import words


@dataclass(frozen=True)
class Parameter:
    """One documented field of a configuration class.

    Args:
        name: its name.
        expects: its type, in words.
        default: its default; None when it has none.
        text: its entry in the class's docstring.
    """

    name: str
    expects: str
    default: Any
    text: str


def parameters(cls: type[Any]) -> list[Parameter]:
    """Return the fields of a dataclass with their defaults and the texts of its docstring's Args section."""
    texts, kinds = {}, get_type_hints(cls)
    for base in reversed(cls.__mro__):
        texts |= arguments(inspect.cleandoc(base.__doc__ or ""))
    found = []
    for field in fields(cls):
        default = field.default
        if default is MISSING and field.default_factory is not MISSING:
            default = field.default_factory()
        if field.init:
            text = texts.get(field.name, "")
            found.append(Parameter(field.name, words(kinds[field.name]), None if default is MISSING else default, text))
    return found


def arguments(doc: str) -> dict[str, str]:
    r"""Return the entries of the Args section of a Google-style docstring.

    Example:
        >>> arguments("Sum.\n\nArgs:\n    a: the first,\n        and more.\n    b, c: others.\n\nReturns:\n    x")
        {'a': 'the first, and more.', 'b': 'others.', 'c': 'others.'}
    """
    match = re.search(r"^Args:\n((?:[ \t]+.*\n?|\n)*)", doc, re.MULTILINE)
    entries: dict[str, str] = {}
    names: list[str] = []
    for line in inspect.cleandoc("\n" + match.group(1)).splitlines() if match else ():
        head = re.match(r"([\w, ]+): (.*)", line)
        if head and not line.startswith(" "):
            names = [name.strip() for name in head.group(1).split(",")]
            entries |= dict.fromkeys(names, head.group(2))
        elif line.strip():
            entries |= {name: f"{entries[name]} {line.strip()}" for name in names}
    return entries


def default(value: Any) -> str:
    """Return a default as it is written in a study file."""
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def description(cls: type[Any]) -> str:
    """Return the text of a class's docstring before its sections."""
    doc = inspect.getdoc(cls) or ""
    return re.split(r"^\w+:\n", doc, maxsplit=1, flags=re.MULTILINE)[0].strip()
