"""Places: where the runs of a study are computed, as `--on` names them, and the connection to Ray.

local                 worker processes of this machine; the default
ray:auto              the Ray cluster that this machine is part of
ray:HOST:PORT         the same, by the address of its head
ray:local             a Ray that is started on this machine, and ends with the command
ray://HOST:PORT       a Ray cluster that this machine is no part of, through its client server
slurm:PARTITION       jobs of a partition of Slurm, into a folder that all its machines see
slurm:local           the same jobs as processes of this machine, to try it out
"""

import importlib.util
import logging
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from coterie._util import extras
from coterie._util.names import shorten_error
from coterie.errors import ConfigError

Kind = Literal["local", "ray", "slurm"]
PLACES = (
    "local, ray:auto, ray:local, ray:HOST:PORT, ray://HOST:PORT, slurm:PARTITION or slurm:local"
)
# HOST:PORT, or an IPv6 address in brackets.
_HOST = re.compile(r"[^\s/:@]+:\d{1,5}|\[[0-9a-fA-F:]+\]:\d{1,5}")
# PARTITION, or PARTITION:key=value,... with further settings of sbatch.
_PARTITION = re.compile(r"[\w.,-]+(:\w+=[^\s,=]+(,\w+=[^\s,=]+)*)?")
_SECONDS = 10.0  # for a connection
_MODULES = {"ray": "ray", "slurm": "submitit"}


@dataclass(frozen=True)
class Place:
    """Where runs are computed.

    Args:
        kind: "local": this process and its workers; "ray"; or "slurm".
        address: of Ray, as `ray.init` takes it: "auto", "local", "HOST:PORT" or "ray://HOST:PORT";
            of Slurm a partition, with settings after a colon, or "local"; empty for "local".
    """

    kind: Kind = "local"
    address: str = ""

    def __str__(self) -> str:
        if self.kind == "local":
            return "local"
        return self.address if self.address.startswith("ray://") else f"{self.kind}:{self.address}"


LOCAL = Place()


def parse_place(text: str) -> Place:
    """Return the place that a value of `--on` names; nothing is imported or connected.

    Raises:
        ConfigError: when it is not a place, or the package that it needs is not installed.

    Example:
        >>> parse_place("local")
        Place(kind='local', address='')
    """
    place = _parse_address(text.strip())
    if place.kind != "local":
        module = _MODULES[place.kind]
        if importlib.util.find_spec(module) is None:
            raise ConfigError(
                f"--on {text} needs {module}, which is not installed; "
                f"{extras.install_command('cluster')}"
            )
    return place


def _parse_address(text: str) -> Place:
    kind, _, rest = text.partition(":")
    if text == "local":
        return LOCAL
    if kind == "ray" and (rest in ("auto", "local") or _HOST.fullmatch(rest)):
        return Place("ray", rest)
    if kind == "ray" and rest.startswith("//") and _HOST.fullmatch(rest[2:]):
        return Place("ray", text)
    if kind == "slurm" and _PARTITION.fullmatch(rest):
        return Place("slurm", rest)
    raise ConfigError(f"--on is {text!r}; expected {PLACES}")


@contextmanager
def connect_ray(place: Place, **started: Any) -> Iterator[None]:
    """Connect to Ray for the block, without its messages.

    At its end the connection is closed, with which Ray ends every task and every actor of this
    process; a Ray that was started here is stopped. A connection that the process had before is
    used, and stays.

    Args:
        place: a place of Ray.
        started: for "ray:local": further arguments of `ray.init`, such as num_cpus, num_gpus or
            object_store_memory.

    Raises:
        ConfigError: when no Ray answers, or the place is not one of Ray.
    """
    if place.kind != "ray":
        raise ConfigError(
            f"--on is {place}; expected a place of Ray: ray:auto, ray:HOST:PORT or ray://HOST:PORT"
        )
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # read when Ray starts
    # Workers use their own environment as it is.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    import ray
    from ray.exceptions import RayError

    if ray.is_initialized():
        yield
        return
    # Ray's messages on its own start are not for the readers of a study's output.
    logging.getLogger("ray").setLevel(logging.ERROR)
    _check_reachable(place)
    if place.address == "local":
        # Without a writable home, Ray leaves no token either.
        with suppress(OSError, RuntimeError):
            # Ray would make this folder readable for all, and puts a token there.
            (Path.home() / ".ray").mkdir(mode=0o700, exist_ok=True)
    # The loopback address: a Ray for one command is not reachable from the network.
    own: dict[str, Any] = {}
    if place.address == "local":
        own = {"include_dashboard": False, "_node_ip_address": "127.0.0.1", **started}
    try:
        ray.init(address=place.address, log_to_driver=False, configure_logging=False, **own)
    except (ConnectionError, TimeoutError, RuntimeError, ValueError, RayError) as error:
        raise ConfigError(
            f"--on {place}: no Ray answers there ({shorten_error(error)}); {_advise_on_token()}"
        ) from None
    except ImportError as error:  # of a package that only Ray's client needs
        raise ConfigError(
            f"--on {place}: {shorten_error(error)}; {extras.install_command('cluster')}"
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


def _advise_on_token() -> str:
    """Return what to try where a Ray answers and refuses this process."""
    if os.environ.get("RAY_AUTH_MODE", "").lower() == "token":
        return (
            "put the token of that cluster into ~/.ray/auth_token here; `ray get-auth-token` there "
            "prints it"
        )
    return (
        "if it was started with a token, export RAY_AUTH_MODE=token, and copy ~/.ray/auth_token "
        "from there; else "
        "`ray status` on that machine shows whether it runs"
    )


def _check_reachable(place: Place) -> None:
    """Refuse at once where nothing listens: Ray itself waits for minutes.

    Raises:
        ConfigError: when nothing listens.
    """
    if place.address == "local":
        return
    address = place.address.removeprefix("ray://")
    if address == "auto":
        from ray._private.services import get_ray_address_from_environment

        none = (
            f"--on {place}: no Ray runs on this machine; `ray start` joins a cluster or begins one"
        )
        try:
            address = get_ray_address_from_environment(address, None)
        except ConnectionError:
            raise ConfigError(none) from None
        # The address comes from RAY_ADDRESS where that is set, and can then be any text.
        if not _HOST.fullmatch(address.removeprefix("ray://")):
            raise ConfigError(none)
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_SECONDS).close()
    # OverflowError: the pattern allows five digits, which can exceed the largest port.
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"--on {place}: no Ray answers at {address} ({error}); `ray status` on its machine "
            "shows whether it runs"
        ) from None
