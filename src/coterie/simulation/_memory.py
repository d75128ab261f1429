"""Estimate the memory of a run before it starts, and refuse a run that cannot fit."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from coterie.errors import ConfigError, OutOfMemory

_COPIES = 3  # of the models: before a round's exchange, mixed, and while they are trained
_ROWS = 4  # of a block, per client: parameters, gradients and two moments


@dataclass(frozen=True)
class Forecast:
    """Estimated bytes that a run holds at one time; `benchmarks/memory.py` measures the error.

    Args:
        models: the population's models, the best models where they are kept, and copies within a round.
        block: parameters, gradients and optimizer state of the clients trained at once.
        data: inputs and targets; in memory already when a run on a CPU starts.
    """

    models: int
    block: int
    data: int

    @property
    def needed(self) -> int:
        """Bytes beside the data."""
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
    """Return the estimated memory of a run.

    Args:
        clients: number of clients hosted here.
        params: numbers in a model.
        itemsize: bytes of a number.
        block: clients trained at once.
        data: bytes of inputs and targets.
        keeps_best: whether each client's best model is kept beside its current one.
        moments: optimizer values per parameter that are kept between rounds; a round has two copies.
        further: copies of the models beyond those of a round that ends with training; see `copies`.

    Example:
        >>> forecast(clients=10, params=100, itemsize=4, block=5, data=7, keeps_best=True)
        Forecast(models=16000, block=8000, data=7)
    """
    row = params * itemsize
    held = _COPIES + keeps_best + 2 * moments + further
    return Forecast(clients * row * held, min(block, clients) * row * _ROWS, data)


def copies(*, server: bool, whole: bool, tracks: int, train_first: bool) -> int:
    """Return the number of copies of all models in a round beyond those of a round that ends with training.

    Args:
        server: whether the method has a server: models sent to it are copies of those that clients keep.
        whole: whether all clients take part; if not, nothing is counted for a server.
        tracks: models that each client trains; each further one needs two copies.
        train_first: whether training comes first: the trained, the mixed and the previous models exist together.

    Example:
        >>> copies(server=True, whole=True, tracks=2, train_first=False)
        3
    """
    if server:
        return (1 + 2 * (tracks - 1)) * whole
    return 2 * train_first


def available(device: str) -> int | None:
    """Return the bytes available on a device now; None where this is unknown."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(device)[0]
    table = Path("/proc/meminfo")
    lines = table.read_text().splitlines() if table.exists() else []
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return found[0] if device == "cpu" and found else None


def check(wanted: Forecast, device: str, limit: int | None) -> None:
    """Refuse a run that cannot fit.

    Args:
        wanted: the estimate.
        device: the device of the run.
        limit: available bytes; None for unknown.

    Raises:
        ConfigError: with the numbers.
    """
    if limit is not None and wanted.needed > limit:
        raise ConfigError(
            f"this run needs about {_size(wanted.needed)} of memory on {device} beside its data "
            f"({_size(wanted.data)}): {_size(wanted.models)} for models, {_size(wanted.block)} for the clients trained "
            f"at once; found {_size(limit)}. Take fewer clients, a smaller model or a smaller block"
        )


@contextmanager
def told(device: str) -> Iterator[None]:
    """Say in one line that the memory was used up during the block, whichever library said so.

    Args:
        device: the device of the run.

    Raises:
        OutOfMemory: in the place of the library's error.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not OutOfMemory.is_said_by(error):
            raise
        raise OutOfMemory(
            f"{device} has no more memory: set a smaller block, use fewer workers, or take a smaller model; the run "
            "goes on from its checkpoint"
        ) from error


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
