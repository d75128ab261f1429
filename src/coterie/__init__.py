"""Coterie: personalized decentralized and clustered federated learning under distribution shift.

The public names, and nothing else: `__init__.pyi` lists them for type checkers and editors, and is
read here too. Each is loaded when it is first used, so that importing the package stays light.
"""

import ast
import importlib
from pathlib import Path
from typing import Any

__version__ = "0.1.0"


def _find_exports(file: Path) -> dict[str, str]:
    """Return the module of each name that a file re-exports, as type checkers see it.

    A file re-exports what it imports by `A as A` or by `*`. The name is the key.
    """
    found: dict[str, str] = {}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.names[0].name == "*":
                found |= _find_exports(
                    Path(__file__).parent.joinpath(*node.module.split(".")[1:], "__init__.py")
                )
            found |= {alias.name: node.module for alias in node.names if alias.asname == alias.name}
    return found


_HOME = _find_exports(Path(__file__).with_suffix(".pyi"))
__all__ = sorted([*_HOME, "__version__"])  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'coterie' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
