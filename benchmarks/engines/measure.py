"""Measuring the cells: both sides in turn, the median of the ratios, and how near the machine's limit that is."""

import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks._measured import resident

from coterie._util import pages
from coterie._util.origin import keep, machine
from coterie.engine import use_threads
from coterie.errors import ConfigError, unknown

from .cells import SHAPES, WORKS, Cell, Coterie, Usual, compare

USUAL_CLIENTS = 4  # the usual loop costs the same for every client, so a few of them tell the cost of one
POPULATIONS = (100, 1000)
FREE = 0.95  # share of the processor from which timings are undisturbed
SLOW_CLIENTS = 20  # so do the engines that are not compiled
_SIDE = 512  # rows of the matrix product that tells the machine's speed
_LEAST = 0.05  # seconds of one timing


@dataclass(frozen=True)
class Row:
    """One cell with one engine.

    Args:
        net, clients, samples, work: see `Cell`.
        engine: which engine.
        threads: how many threads it used; the usual loop has one.
        milliseconds: of the engine for one client-round (median).
        usual_milliseconds: of the usual loop.
        ratio: the median of the ratios of the two, each pair measured in turn.
        low, high: the smallest and the largest of these ratios.
        samples_per_second: training samples a second, for "train".
        roofline: floating-point operations of the matrix products a second, as a share of this machine's speed with
            large matrices.
        memory_mb: the largest resident memory of the process while the engine worked, torch and both sides' data
            included.
        processor_share: processor time over elapsed time of all timings: below 1 with one thread, other work was run.
    """

    net: str
    clients: int
    samples: int
    work: str
    engine: str
    threads: int
    milliseconds: float
    usual_milliseconds: float
    ratio: float
    low: float
    high: float
    samples_per_second: float
    roofline: float
    memory_mb: float
    processor_share: float


def seconds(function: Callable[[], object]) -> float:
    """Return the time of one call; short calls are repeated."""
    times, started = 0, time.perf_counter()
    while True:
        function()
        times += 1
        passed = time.perf_counter() - started
        if passed >= _LEAST:
            return passed / times


def matrix_speed() -> float:
    """Return the floating-point operations a second of a product of two large matrices, with one thread."""
    a, b = torch.ones(_SIDE, _SIDE), torch.ones(_SIDE, _SIDE)
    return 2 * _SIDE**3 / min(seconds(lambda: a @ b) for _ in range(5))


def measure(cell: Cell, engine: str, repeats: int, threads: int = 1) -> Row:
    """Measure one cell with one engine.

    Args:
        cell: what to do.
        engine: which engine.
        repeats: how many pairs of timings.
        threads: for native programs, and at most for the usual loop.

    Raises:
        DifferentResultsError: when the engine and the usual loop do not compute the same.
    """
    ours = Coterie(cell, engine, None if engine == "compiled" else SLOW_CLIENTS)
    theirs = Usual(ours, USUAL_CLIENTS)
    compare(ours.run(), theirs.run(), cell.work)
    pairs: list[tuple[float, float, float]] = []
    started, worked = time.perf_counter(), time.process_time()
    with pages.kept():  # as in a run
        for _ in range(repeats):
            usual = min(_usual(theirs, number) for number in {1, threads})
            speed = matrix_speed()
            _forget_peak()
            pairs.append((_ours(ours, threads), usual, speed))
    mine = statistics.median(mine for mine, _, _ in pairs)
    ratios = [usual / mine for mine, usual, _ in pairs]
    return Row(
        **asdict(cell),
        engine=engine,
        threads=threads,
        milliseconds=1e3 * mine,
        usual_milliseconds=1e3 * statistics.median(usual for _, usual, _ in pairs),
        ratio=statistics.median(ratios),
        low=min(ratios),
        high=max(ratios),
        samples_per_second=cell.samples / mine if cell.work == "train" else 0.0,
        roofline=statistics.median(ours.flops / mine / speed / threads for mine, _, speed in pairs),
        memory_mb=_peak(),
        processor_share=(time.process_time() - worked) / (time.perf_counter() - started),
    )


def _usual(theirs: Usual, threads: int) -> float:
    """Return the seconds of the usual loop for one client-round."""
    theirs.reset()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return seconds(theirs.run) / len(theirs.clients)
    finally:
        torch.set_num_threads(before)


def _ours(ours: Coterie, threads: int) -> float:
    """Return the seconds of an engine for one client-round."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    use_threads(threads)
    try:
        return seconds(ours.run) / len(ours.task)
    finally:
        use_threads(0)
        torch.set_num_threads(before)


def _forget_peak() -> None:
    """Let the largest resident memory begin anew, where the system can."""
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5")


def _peak() -> float:
    """Return the largest resident memory of the process, in MB."""
    peak = resident(name="VmHWM")
    if peak is not None:
        return peak / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def line(row: Row) -> str:
    """Return a row as a line of text."""
    return (
        f"{row.net:6} {row.clients:5} clients  {row.work:12} {row.engine:8} {row.ratio:6.1f}x the usual loop "
        f"({row.low:.1f} to {row.high:.1f}); {row.milliseconds:.2f} against {row.usual_milliseconds:.2f} ms a "
        f"client-round; {row.roofline:.0%} of the matrix speed; {row.memory_mb:.0f} MB"
    )


def cells(patterns: str, samples: int) -> list[Cell]:
    """Return the cells that are asked for, the small populations first.

    Args:
        patterns: NETWORK/CLIENTS/WORK with * for all, several with commas.
        samples: training samples of each client.

    Raises:
        ConfigError: for a pattern that names no cell.
    """
    found: set[Cell] = set()
    for pattern in patterns.split(","):
        parts = pattern.split("/")
        if len(parts) != 3 or not (parts[1] == "*" or parts[1].isdecimal()):
            raise ConfigError(
                f"found the cell {pattern!r}; expected NETWORK/CLIENTS/WORK, as cnn-a/100/train or */100/*"
            )
        net, clients, work = parts
        for kind, name, known in (("network", net, SHAPES), ("work", work, WORKS)):
            if name != "*" and name not in known:
                raise ConfigError(unknown(kind, name, known))
        if clients != "*" and int(clients) < 2:
            raise ConfigError(f"found {clients} clients in the cell {pattern!r}; expected at least 2")
        for one in SHAPES if net == "*" else (net,):
            for size in POPULATIONS if clients == "*" else (int(clients),):
                found |= {Cell(one, size, samples, each) for each in (WORKS if work == "*" else (work,))}
    order = list(SHAPES)
    return sorted(found, key=lambda cell: (cell.clients, order.index(cell.net), WORKS.index(cell.work)))


def write(rows: Sequence[Row], path: Path, settings: Mapping[str, Any]) -> None:
    """Write the rows as JSON, with the settings and the machine."""
    where = machine() | {"matrix_gflops": round(matrix_speed() / 1e9, 1)}
    keep(path, [asdict(row) for row in rows], ("engine", "functional"), settings, where=where)
