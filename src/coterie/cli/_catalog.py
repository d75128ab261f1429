"""Names, defaults and meanings of the parameters of a configuration class, from its fields and docstring."""

import inspect
import re
from dataclasses import MISSING, dataclass, fields
from typing import Any

from coterie._util.settings import required, settable, words

REQUIRED = "required"
"""The default of what must be given."""


@dataclass(frozen=True)
class Parameter:
    """One documented field of a configuration class.

    Args:
        name: its name.
        expects: what it accepts, in words.
        default: its default as a study file would write it, or `REQUIRED`.
        text: its entry in the class's docstring.
    """

    name: str
    expects: str
    default: str
    text: str


def parameters(cls: type[Any]) -> list[Parameter]:
    """Return the fields of a dataclass with their defaults and the texts of its docstring's Args section."""
    texts, must = {}, required(cls)
    for base in reversed(cls.__mro__):
        texts |= arguments(inspect.cleandoc(base.__doc__ or ""))
    defaults = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(cls)}
    return [
        Parameter(name, words(hint), REQUIRED if name in must else _said(defaults[name]), texts.get(name, ""))
        for name, hint in settable(cls).items()
    ]


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


def _said(value: Any) -> str:
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def description(cls: type[Any]) -> str:
    """Return the text of a class's docstring before its sections."""
    doc = inspect.getdoc(cls) or ""
    return re.split(r"^\w+:\n", doc, maxsplit=1, flags=re.MULTILINE)[0].strip()
