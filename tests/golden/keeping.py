"""What `make golden` writes: only what is missing, or is not what the test expects."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

REWRITES = os.environ.get("COTERIE_GOLDEN") == "rewrite"
"""Whether `make golden` runs the tests."""


def keep_stored(
    stored: Mapping[str, Any], fresh: Mapping[str, Any], is_same: Callable[[Any, Any], bool]
) -> dict[str, Any]:
    """Return the fresh entries, each as it is stored where that is the same."""
    out = dict(fresh)
    for name, entry in fresh.items():
        if name in stored and is_same(stored[name], entry):
            out[name] = stored[name]
    return out


def read_entries(file: Path) -> dict[str, Any]:
    """Return what a file holds; nothing where there is none."""
    return json.loads(file.read_text("utf-8")) if file.exists() else {}


def write_entries(file: Path, entries: Mapping[str, Any]) -> None:
    """Write a file as all of tests/golden are written."""
    file.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
