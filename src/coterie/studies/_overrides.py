"""`path=value`: one assignment into the table of a study file."""

import json
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from coterie.errors import ConfigError, unknown


def assign(content: dict[str, Any], assignment: str) -> None:
    """Put one `path=value` into the table of a study file, in place.

    The value is TOML; what is not TOML is taken as text. `methods.NAME.key` reaches the method of that label, or else
    all methods of that kind.

    Raises:
        ConfigError: when it is no assignment, or leads nowhere.

    Example:
        >>> content = {"methods": [{"kind": "dac"}]}
        >>> assign(content, "methods.dac.tau=30")
        >>> content
        {'methods': [{'kind': 'dac', 'tau': 30}]}
    """
    path, equals, value = assignment.partition("=")
    if not equals or not path.strip():
        raise ConfigError(f"--set got {assignment!r}; expected path=value, such as methods.dac.tau=30")
    try:
        nested = tomllib.loads(assignment)
    except tomllib.TOMLDecodeError:
        try:
            nested = tomllib.loads(f"{path} = {json.dumps(value.strip())}")
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(
                f"--set got {assignment!r}; quote names with spaces: 'methods.\"my DAC\".tau=3'"
            ) from error
    _merge(content, nested, "")


def put(content: dict[str, Any], path: str | Sequence[str], value: Any) -> None:
    """Put a plain value at a path, dotted or in parts, into the table of a study file; see `assign`."""
    nested: Any = value
    for key in reversed(keys(path) if isinstance(path, str) else path):
        nested = {key: nested}
    _merge(content, nested, "")


def keys(path: str) -> list[str]:
    """Return the parts of a dotted path, as TOML reads it.

    Example:
        >>> keys('methods."my DAC".tau')
        ['methods', 'my DAC', 'tau']
    """
    try:
        nested: Any = tomllib.loads(f"{path} = 0")
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path!r} is no path of a setting, such as methods.dac.tau: {error}") from error
    parts = []
    while isinstance(nested, dict):
        parts.append(next(iter(nested)))
        nested = nested[parts[-1]]
    return parts


def _merge(content: dict[str, Any], nested: Mapping[str, Any], path: str) -> None:
    for key, value in nested.items():
        here = f"{path}.{key}" if path else key
        if here == "methods" and isinstance(value, Mapping):
            _merge_methods(content.get("methods", []), value)
        elif isinstance(value, Mapping) and isinstance(content.get(key), dict):
            _merge(content[key], value, here)
        elif isinstance(value, Mapping) and isinstance(content.get(key), list):
            raise ConfigError(f"{here} is a list; give the whole list, as in --set '{here}=[...]'")
        else:
            content[key] = value


def _merge_methods(methods: Sequence[dict[str, Any]], changes: Mapping[str, Any]) -> None:
    for name, change in changes.items():
        if not isinstance(change, Mapping):
            raise ConfigError(f"methods.{name} is a method, not a setting; expected methods.{name}.SETTING=value")
        for entry in _named(methods, name):
            _merge(entry, change, f"methods.{name}")


def _named(methods: Sequence[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """The methods of a label, or else those of a kind."""
    labels = [str(entry.get("label", entry.get("kind"))) for entry in methods]
    kinds = [str(entry.get("kind")) for entry in methods]
    for names in (labels, kinds):
        found = [entry for entry, own in zip(methods, names, strict=True) if own.lower() == name.lower()]
        if found:
            return found
    raise ConfigError(unknown("method of this study", name, {*labels, *kinds}))
