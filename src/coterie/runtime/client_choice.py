"""Clients that a setting chooses: a share of all, a count, or a list of names and numbers."""

from collections.abc import Sequence

from coterie.errors import ConfigError, describe_unknown, require


def count_clients(wanted: float, population: int, setting: str) -> int:
    """Return the number of clients that a share below 1 or a count means.

    Args:
        wanted: a share or a count.
        population: number of clients in all.
        setting: its name in messages.

    Raises:
        ConfigError: for a fraction above 1.

    Example:
        >>> count_clients(0.25, 10, "new_clients"), count_clients(3, 10, "new_clients")
        (2, 3)
    """
    if wanted < 1:
        return round(wanted * population)
    # A whole number may come as a float, such as 3.0 from a command line.
    fits = wanted == round(wanted)
    require(fits, setting, wanted, "a share below 1, a whole number, or a list")
    return round(wanted)


def find_client(wanted: int | str, population: int, names: Sequence[str], setting: str) -> int:
    """Return the row of the client that a name or a number means.

    Args:
        wanted: its name or its number; a number may be text.
        population: number of clients in all.
        names: of the clients; empty where they have none.
        setting: its name in messages.

    Raises:
        ConfigError: when there is no such client.
    """
    if isinstance(wanted, str):
        # A name wins over a number: clients may be called "0" or "1".
        if wanted in names:
            return names.index(wanted)
        if names and not wanted.isdecimal():
            raise ConfigError(f"{setting}: {describe_unknown('client', wanted, names)}")
    is_number = not isinstance(wanted, str) or wanted.isdecimal()
    fits = is_number and 0 <= int(wanted) < population
    require(fits, setting, wanted, f"0 to {population - 1}")
    return int(wanted)
