"""Measuring the cells: both sides in turn, the median of the ratios, and how near the machine's limit that is."""

import json
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from coterie.bench.cells import WORKS, Cell, Coterie, Usual, compare
from coterie.engine import use_threads

USUAL_CLIENTS = 4  # the usual loop costs the same for every client, so a few of them tell the cost of one
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
        memory_mb: the largest resident memory of the process so far.
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
        threads: for native programs.

    Raises:
        DifferentResultsError: when the engine and the usual loop do not compute the same.
    """
    ours = Coterie(cell, engine, None if engine == "compiled" else SLOW_CLIENTS)
    theirs = Usual(ours, USUAL_CLIENTS)
    compare(ours.run(), theirs.run(), cell.work)
    pairs: list[tuple[float, float, float]] = []
    use_threads(threads)
    try:
        for _ in range(repeats):
            theirs.reset()
            usual = seconds(theirs.run) / len(theirs.clients)
            speed = matrix_speed()
            pairs.append((seconds(ours.run) / len(ours.task), usual, speed))
    finally:
        use_threads(0)
    ratios = [usual / mine for mine, usual, _ in pairs]
    mine = statistics.median(mine for mine, _, _ in pairs)
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
        memory_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    )


def cells(nets: Sequence[str], clients: Sequence[int], samples: int) -> Iterator[Cell]:
    """Return every combination, the small populations first."""
    for number in sorted(clients):
        for net in nets:
            for work in WORKS:
                yield Cell(net, number, samples, work)


def machine() -> dict[str, Any]:
    """Describe the machine and the versions."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        name = lines[0].split(":", 1)[1].strip() if lines else name
    return {
        "processor": name,
        "cores": os.cpu_count(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "matrix_gflops": round(matrix_speed() / 1e9, 1),
    }


def write(rows: Sequence[Row], path: Path) -> None:
    """Write the rows and the machine as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine(), "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
