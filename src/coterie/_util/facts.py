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
        lines = [title]
        for name, value in facts.items():
            lines.append(f"  {name:<{width}}  {value}")
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        title, facts = self.facts()
        rows = ""
        for name, value in facts.items():
            rows += f"<tr><th>{html.escape(name)}</th><td>{html.escape(str(value))}</td></tr>"
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
    if low == high:
        return str(low)
    return f"{low} to {high}"
