"""Reading TOML: whatever a text holds, it is a table or one error."""

import tomllib
from pathlib import Path
from typing import Any

from coterie.errors import ConfigError

DEEPEST = 50
"""How deep tables and lists may be in each other; settings need four."""


def parse_toml(text: str) -> dict[str, Any]:
    """Return the table of a TOML text.

    Raises:
        TOMLDecodeError: when it is not valid, is nested too deeply, or has a number that Python
            does not read.

    Example:
        >>> parse_toml("a.b = 1")
        {'a': {'b': 1}}
    """
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError:
        raise tomllib.TOMLDecodeError(_describe_depth()) from None
    # For example a whole number of more than 4300 digits.
    except ValueError as error:
        raise tomllib.TOMLDecodeError(str(error)) from error
    # A parser that reads deep tables without recursion leaves them to functions that recurse.
    level: list[Any] = [content]
    # One more than the depth: the table itself is the first level.
    for _ in range(DEEPEST + 1):
        inner = []
        for value in level:
            if isinstance(value, dict):
                value = value.values()
            inner += [entry for entry in value if isinstance(entry, dict | list)]
        level = inner
        if not level:
            return content
    raise tomllib.TOMLDecodeError(_describe_depth())


def load_toml(path: Path) -> dict[str, Any]:
    """Return the table of a TOML file.

    Raises:
        ConfigError: when it cannot be read, or is not valid.
    """
    try:
        return parse_toml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def _describe_depth() -> str:
    return f"its tables and lists are in each other more than {DEEPEST} times"
