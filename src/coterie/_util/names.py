"""Names of clients for display: tables hold the id of a client, and pages show its name."""

import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping


def format_client(names: Mapping[int, str], client: int) -> str:
    """Return the name of a client, or else "client 7".

    Example:
        >>> format_client({0: "Oslo"}, 0), format_client({}, 7)
        ('Oslo', 'client 7')
    """
    if client in names:
        return to_one_line(names[client])
    return f"client {client}"


def distinguish_clients(names: Mapping[int, str], clients: Iterable[int]) -> dict[int, str]:
    """Return the name of each client as `format_client` has it, and its id where names look alike.

    Names that differ in white space alone are those of several clients. "all" and "clusters" are
    what tables call means.

    Example:
        >>> distinguish_clients({0: "Nord", 1: "Nord ", 2: "Süd"}, range(4))
        {0: 'Nord (client 0)', 1: 'Nord (client 1)', 2: 'Süd', 3: 'client 3'}
    """
    shown = {client: format_client(names, client) for client in clients}
    count = Counter(shown.values()) + Counter(("all", "clusters"))
    for client, text in shown.items():
        if count[text] > 1:
            shown[client] = f"{text} (client {client})"
    return shown


def shorten_clients(
    names: Mapping[int, str], clients: Iterable[int], most: int = 24
) -> dict[int, str]:
    """Return the name of each client with at most so many characters, which differ from each other.

    Example:
        >>> names = {0: "St. Olavs hospital, ward A", 1: "St. Olavs hospital, ward B", 2: "Oslo"}
        >>> shorten_clients(names, names, 16)
        {0: 'St. Olavs h… (0)', 1: 'St. Olavs h… (1)', 2: 'Oslo'}
    """
    whole = distinguish_clients(names, clients)
    shown = {client: shorten_text(text, most) for client, text in whole.items()}
    count = Counter(shown.values())
    for client, text in shown.items():
        if count[text] > 1:
            mark = f" ({client})"
            shown[client] = shorten_text(whole[client], max(1, most - len(mark))) + mark
    return shown


def format_clients(names: Mapping[int, str], clients: Iterable[int], most: int = 5) -> str:
    """Return the first of some clients, by name where they have one, else by id.

    Example:
        >>> format_clients({}, range(7), 3), format_clients({0: "Oslo", 1: "Lima"}, [0, 1])
        ('0, 1, 2, ...', 'Oslo, Lima')
    """
    ids, shown = list(clients), []
    for client in ids[:most]:
        # One long name must not push the others off the line.
        shown.append(shorten_text(names.get(client, str(client)), 40))
    if len(ids) > most:
        shown.append("...")
    return ", ".join(shown)


def shorten_text(text: str, most: int = 24) -> str:
    """Return a text on one line, with an ellipsis in place of characters beyond a limit.

    Example:
        >>> shorten_text("St. Olavs hospital, Trondheim", 10)
        'St. Olavs…'
    """
    line = to_one_line(text)
    if len(line) <= most:
        return line
    return line[: most - 1].rstrip() + "…"


def shorten_error(error: BaseException, most: int = 200) -> str:
    """Return the beginning of an error's message on one line; its class where it has none."""
    return " ".join(str(error).split())[:most] or type(error).__name__


def to_one_line(text: str) -> str:
    """Return a text without line breaks and other control characters, which terminals interpret."""
    # Cc is Unicode's category of control characters, escape and line breaks among them.
    visible = (" " if unicodedata.category(char) == "Cc" else char for char in text)
    return " ".join("".join(visible).split())
