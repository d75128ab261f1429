"""A few facts about an object as text, for print, and as a table, for a notebook."""

import html
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any


class Described(ABC):
    """The base of objects that print as a title and a few facts, which subclasses return."""

    @abstractmethod
    def facts(self) -> tuple[str, Mapping[str, Any]]:
        """Return the title, and each fact by its name."""

    def __str__(self) -> str:
        title, facts = self.facts()
        width = max(map(len, facts))
        return "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in facts.items())])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        title, facts = self.facts()
        rows = "".join(
            f"<tr><th>{html.escape(k)}</th><td>{html.escape(str(v))}</td></tr>"
            for k, v in facts.items()
        )
        return f"<table><caption>{html.escape(title)}</caption>{rows}</table>"


def format_range(values: Any) -> str:
    """Format numbers as their common value, or as the smallest and the largest.

    Example:
        >>> format_range([3, 3]), format_range([3, 5]), format_range([])
        ('3', '3 to 5', 'none')
    """
    low, high = min(values, default=None), max(values, default=None)
    if low is None:
        return "none"
    return str(low) if low == high else f"{low} to {high}"
