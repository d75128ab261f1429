"""What a run needs of memory, told before it starts, and a refusal where it cannot fit."""

from dataclasses import dataclass
from pathlib import Path

import torch

from coterie.errors import ConfigError

_COPIES = 3  # of the models: before a round's exchange, mixed, and while they are trained
_ROWS = 4  # of a block, per client: parameters, gradients and two moments


@dataclass(frozen=True)
class Forecast:
    """Bytes that a run holds at one time. `benchmarks/memory.py` measures how near that comes.

    Args:
        models: the population's models, their best ones where they are kept, and copies within a round.
        block: parameters, gradients and optimizer state of the clients trained at once.
        data: inputs and targets; in memory already when a run on a CPU starts.
    """

    models: int
    block: int
    data: int

    @property
    def needed(self) -> int:
        """What has to be found beside the data."""
        return self.models + self.block


def forecast(
    *,
    clients: int,
    params: int,
    itemsize: int,
    block: int,
    data: int,
    keeps_best: bool,
    moments: int = 0,
    further: int = 0,
) -> Forecast:
    """Return what a run needs.

    Args:
        clients: hosted here.
        params: numbers in a model.
        itemsize: bytes of a number.
        block: clients trained at once.
        data: bytes of inputs and targets.
        keeps_best: whether each client's best model is kept beside its current one.
        moments: numbers kept of each parameter between rounds, beside the models; there are two copies in a round.
        further: copies of the models beyond those of a round that ends with training; see `copies`.

    Example:
        >>> forecast(clients=10, params=100, itemsize=4, block=5, data=7, keeps_best=True)
        Forecast(models=16000, block=8000, data=7)
    """
    row = params * itemsize
    held = _COPIES + keeps_best + 2 * moments + further
    return Forecast(clients * row * held, min(block, clients) * row * _ROWS, data)


def copies(*, server: bool, whole: bool, tracks: int, train_first: bool) -> int:
    """Return how many more copies of the population's models a round holds than one that ends with training.

    Args:
        server: the models sent to a server lie beside those the clients keep.
        whole: whether all clients take part; else nothing is counted for a server.
        tracks: models each client trains; what a further one begins with and ends with.
        train_first: the trained models, which are judged, lie beside the mixed ones and those from before.

    Example:
        >>> copies(server=True, whole=True, tracks=2, train_first=False)
        3
    """
    if server:
        return (1 + 2 * (tracks - 1)) * whole
    return 2 * train_first


def available(device: str) -> int | None:
    """Return the bytes that can be had on a device now; None where this cannot be told."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(device)[0]
    table = Path("/proc/meminfo")
    lines = table.read_text().splitlines() if table.exists() else []
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return found[0] if device == "cpu" and found else None


def check(wanted: Forecast, device: str, limit: int | None) -> None:
    """Refuse a run that cannot fit.

    Args:
        wanted: what the run needs.
        device: where.
        limit: bytes that can be had; None for unknown.

    Raises:
        ConfigError: with the numbers.
    """
    if limit is not None and wanted.needed > limit:
        raise ConfigError(
            f"this run needs about {_size(wanted.needed)} of memory on {device} beside its data "
            f"({_size(wanted.data)}): {_size(wanted.models)} for models, {_size(wanted.block)} for the clients trained "
            f"at once; found {_size(limit)}. Take fewer clients, a smaller model or a smaller block"
        )


def _size(number: int) -> str:
    """Return bytes as text.

    Example:
        >>> _size(3 * 2**29), _size(2048)
        ('1.5 GiB', '2.0 KiB')
    """
    for power, name in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if number >= 1 << power:
            return f"{number / (1 << power):.1f} {name}"
    return f"{number} bytes"
