"""Descriptions of methods, their parameters and the built-in studies, from classes and docstrings.

catalog.json in this folder holds them for everything built in, so that it is listed without
importing the classes; a test compares it with them, and `python scripts/reference.py` writes it.
"""

import inspect
import json
import re
from dataclasses import MISSING, asdict, dataclass, fields
from functools import cache
from importlib import resources
from typing import Any

from coterie._util.settings import describe_hint, required_fields, settable_fields

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


@dataclass(frozen=True)
class MethodEntry:
    """The description of a method.

    Args:
        kind: its name.
        summary: one line on what it does.
        description: its docstring before the sections.
        parameters: its settings.
        references: its papers.
    """

    kind: str
    summary: str
    description: str
    parameters: tuple[Parameter, ...]
    references: tuple[str, ...]


def describe_method(kind: str, cls: type[Any]) -> MethodEntry:
    """Describe a method.

    Args:
        kind: the name under which it is found.
        cls: its class.
    """
    return MethodEntry(
        kind, cls.summary, parse_description(cls), tuple(list_parameters(cls)), cls.references
    )


def load_methods() -> dict[str, MethodEntry]:
    """Load the descriptions of the built-in methods, by name."""
    found = {}
    for kind, one in _load_catalog()["methods"].items():
        given = tuple(Parameter(**parameter) for parameter in one["parameters"])
        found[kind] = MethodEntry(
            kind, one["summary"], one["description"], given, tuple(one["references"])
        )
    return found


def load_studies() -> dict[str, tuple[str, str]]:
    """Load the size and the description of each built-in study, by name."""
    return {name: (size, text) for name, (size, text) in _load_catalog()["studies"].items()}


@cache
def _load_catalog() -> dict[str, Any]:
    return json.loads(resources.files("coterie.cli").joinpath("catalog.json").read_text("utf-8"))


def build_catalog() -> str:
    """Build the text of catalog.json, from the classes and files themselves."""
    from coterie.methods import METHODS
    from coterie.studies import config

    entries = {kind: asdict(describe_method(kind, cls)) for kind, cls in METHODS.items()}
    sizes = {}
    for name in config.find_builtin_studies():
        one = config.load_study(name)
        size = f"{len(one.methods)} methods x {len(one.seeds)} seeds, {one.settings.rounds} rounds"
        sizes[name] = size, one.description
    return json.dumps({"methods": entries, "studies": sizes}, indent=1, ensure_ascii=False) + "\n"


def list_parameters(cls: type[Any]) -> list[Parameter]:
    """List the fields of a dataclass with their defaults and documentation."""
    texts, must = {}, required_fields(cls)
    # From the base class to the subclass, which may describe a setting again.
    for base in reversed(cls.__mro__):
        texts |= parse_arguments(inspect.cleandoc(base.__doc__ or ""))
    defaults = {}
    for item in fields(cls):
        defaults[item.name] = item.default
        # A factory is called: its default is the value, not the function.
        if item.default_factory is not MISSING:
            defaults[item.name] = item.default_factory()
    found = []
    for name, hint in settable_fields(cls).items():
        default = REQUIRED if name in must else _format_default(defaults[name])
        found.append(Parameter(name, describe_hint(hint), default, texts.get(name, "")))
    return found


def parse_arguments(doc: str) -> dict[str, str]:
    r"""Parse the entries of the Args section of a Google-style docstring.

    Example:
        >>> doc = "Sum.\n\nArgs:\n    a: the first,\n        and more.\n    b, c: others."
        >>> parse_arguments(doc)
        {'a': 'the first, and more.', 'b': 'others.', 'c': 'others.'}
    """
    # The section ends at the first line without indentation.
    match = re.search(r"^Args:\n((?:[ \t]+.*\n?|\n)*)", doc, re.MULTILINE)
    entries: dict[str, str] = {}
    names: list[str] = []
    section = match.group(1) if match else ""
    # `cleandoc` leaves the first line out when it looks for the common indentation.
    for line in inspect.cleandoc("\n" + section).splitlines():
        head = re.match(r"([\w, ]+): (.*)", line)
        # "name:" or "a, b:" without indentation begins an entry; `cleandoc` has removed the common
        # one.
        if head and not line.startswith(" "):
            names = list(map(str.strip, head.group(1).split(",")))
            entries |= dict.fromkeys(names, head.group(2))
        elif line.strip():
            # A line that is indented further continues the entry.
            for name in names:
                entries[name] += f" {line.strip()}"
    return entries


def _format_default(value: Any) -> str:
    # As a study file writes it: TOML has small letters for true and false, and nothing for none.
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def parse_description(cls: type[Any]) -> str:
    """Return the text of a class's docstring before its sections."""
    doc = inspect.getdoc(cls) or ""
    return re.split(r"^\w+:\n", doc, maxsplit=1, flags=re.MULTILINE)[0].strip()
