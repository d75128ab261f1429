"""The names of clients as people read them: tables hold a client's id, and names are joined where they are shown."""

import unicodedata
from collections.abc import Iterable, Mapping


def format_client(names: Mapping[int, str], client: int) -> str:
    """Return how people call a client: by its name, else "client 7".

    Example:
        >>> called({0: "Oslo"}, 0), called({}, 7)
        ('Oslo', 'client 7')
    """
    return to_one_line(names[client]) if client in names else f"client {client}"


def format_clients(names: Mapping[int, str], clients: Iterable[int], most: int = 5) -> str:
    """Return the first of some clients, by their names where they have any, else by their ids.

    Example:
        >>> few({}, range(7), 3), few({0: "Oslo", 1: "Lima"}, [0, 1])
        ('0, 1, 2, ...', 'Oslo, Lima')
    """
    ids = list(clients)
    told = [
        shorten_text(format_client(names, client), 40) if client in names else str(client)
        for client in ids[:most]
    ]
    return ", ".join([*told, *(["..."] if len(ids) > most else [])])


def shorten_text(text: str, most: int = 24) -> str:
    """Return a text that is cut with an ellipsis where it has more than so many characters.

    Example:
        >>> short("St. Olavs hospital, Trondheim", 10)
        'St. Olavs…'
    """
    line = to_one_line(text)
    return line if len(line) <= most else line[: most - 1].rstrip() + "…"


def to_one_line(text: str) -> str:
    """Return a text without line breaks and other control characters, of which terminals make something else."""
    return " ".join("".join(" " if unicodedata.category(c) == "Cc" else c for c in text).split())
