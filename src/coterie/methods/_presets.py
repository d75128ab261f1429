"""Presets: a method's settings as this project recommends them, as the paper says, or as the authors' code does."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from coterie.errors import ConfigError, unknown

Preset = Literal["coterie", "paper", "released"]
Rules = TypeVar("Rules")


def resolve(method: Any, presets: Mapping[str, Any]) -> None:
    """Give every field that is None its preset's value; for `__post_init__` of a method with a field `preset`.

    Raises:
        ConfigError: for an unknown preset.
    """
    if method.preset not in presets:
        raise ConfigError(unknown(f"{method.kind}.preset", method.preset, presets))
    rules = presets[method.preset]
    for item in dataclasses.fields(rules):
        if getattr(method, item.name) is None:
            object.__setattr__(method, item.name, getattr(rules, item.name))


def rules_of(method: Any, kind: type[Rules]) -> Rules:
    """Return a method's resolved settings, with their types."""
    names = [item.name for item in dataclasses.fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: getattr(method, name) for name in names})
