"""Which runs can follow data that change over the rounds."""

from coterie.data.federation import Federation
from coterie.errors import ConfigError
from coterie.methods.base import Method
from coterie.runtime.settings import Settings, refuse_settings

_REASONS = {
    "schedule": "clients in virtual time have no common round in which data change, and clients "
    "that act in turn are not tested with it",
    "patience": "it stops clients before their data change",
    "new_clients": "clients that join have data of one phase",
    "attacks": "labels are flipped in the data of one phase",
    "local.dp": "privacy is counted for samples that stay the same",
}


def check_phases(
    federation: Federation, method: Method, settings: Settings, *, hosted_here: bool = True
) -> None:
    """Refuse a run that cannot follow the changes of its data.

    Args:
        federation: the data.
        method: the method.
        settings: of the run.
        hosted_here: whether one process hosts all clients.

    Raises:
        ConfigError: with the setting and the reason.
    """
    if not federation.phases:
        return
    refused = {
        "schedule": settings.schedule != "synchronous",
        "patience": settings.patience is not None,
        "new_clients": settings.new_clients is not None,
        "attacks": settings.attacks is not None,
        "local.dp": settings.local.dp_settings is not None,
    }
    refuse_settings(refused, _REASONS, "data.drift")
    if "pool" in method.needs:
        raise ConfigError(
            f"{method.kind} pools the data of all clients; with data.drift it cannot: the pool "
            "does not change"
        )
    if not hosted_here:
        raise ConfigError(
            "the clients are split into blocks; with data.drift they are not: run it in one "
            "process, or whole runs on a cluster"
        )
    last = federation.phases[-1].first
    if last >= settings.rounds:
        raise ConfigError(
            f"data.drift changes data in round {last}, and rounds is {settings.rounds}; expected "
            "every change, and its end, before the last round"
        )
