"""Measuring the cells: both sides in turn, the median of the ratios, and how near the machine's limit that is."""

import math
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks._measured import resident
from benchmarks._peak import Peak, machine_with_peak
from coterie._util import pages
from coterie._util.origin import write_results
from coterie.engine import use_threads
from coterie.errors import ConfigError, describe_unknown

from .cells import SHAPES, WORKS, Cell, Coterie, Usual, compare
from .processes import Processes

# the usual loop costs the same for every client, so a few of them give the cost of one
USUAL_CLIENTS = 4
POPULATIONS = (100, 1000)
FREE = 0.95  # share of the processor from which timings are undisturbed
SLOW_CLIENTS = 20  # so do the engines that are not compiled
_LEAST = 0.05  # seconds of one timing


@dataclass(frozen=True)
class Row:
    """One cell with one engine.

    Args:
        net, clients, samples, work: see `Cell`.
        engine: which engine.
        threads: how many threads it used; the usual loop has one.
        milliseconds: of the engine for one client-round (median).
        usual_milliseconds: of the usual loop in its best form.
        usual_form: which form that was: one process, with several threads, or several processes.
        ratio: the median of the ratios of the two, each pair measured in turn.
        low, high: the smallest and the largest of these ratios.
        samples_per_second: training samples a second, for "train".
        share_of_peak: floating-point operations of the matrix products a second, as a share of what
            the fused multiply-adds of the cores used can do.
        memory_mb: the largest resident memory of the process while the engine worked, torch and
            both sides' data included.
        processor_share: processor time over elapsed time of all timings: below 1 with one thread,
            other work was run.
    """

    net: str
    clients: int
    samples: int
    work: str
    engine: str
    threads: int
    milliseconds: float
    usual_milliseconds: float
    usual_form: str
    ratio: float
    low: float
    high: float
    samples_per_second: float
    share_of_peak: float
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


def measure(cell: Cell, engine: str, repeats: int, threads: int = 1) -> Row:
    """Measure one cell with one engine.

    Args:
        cell: what to do.
        engine: which engine.
        repeats: how many pairs of timings.
        threads: for native programs; the usual loop takes the best of one thread, of these, and of
            as many processes.

    Raises:
        DifferentResultsError: when the engine and the usual loop do not compute the same.
    """
    ours = Coterie(cell, engine, None if engine == "compiled" else SLOW_CLIENTS)
    theirs = Usual(ours, USUAL_CLIENTS)
    compare(ours.run(), theirs.run(), cell.work)
    several = Processes(cell, threads, USUAL_CLIENTS) if threads > 1 else None
    peak = Peak()
    pairs: list[Pair] = []
    started, worked = time.perf_counter(), time.process_time()
    with pages.reuse_pages():  # as in a run
        for _ in range(repeats):
            usual = best(forms(theirs, several, threads))
            speed = peak.flops()
            _forget_peak()
            pairs.append(Pair(_ours(ours, threads), *usual, threads * speed))
    passed, worked = time.perf_counter() - started, time.process_time() - worked
    if several is not None:
        passed -= several.waited
        several.close()
    return row(cell, engine, threads, pairs, ours.flops, worked / passed)


@dataclass(frozen=True)
class Pair:
    """A timing of both sides.

    Args:
        ours: seconds of a client-round.
        usual: of the usual loop in its best form.
        form: which one that is.
        peak: floating-point operations a second of the cores used.
    """

    ours: float
    usual: float
    form: str
    peak: float


def row(
    cell: Cell, engine: str, threads: int, pairs: Sequence[Pair], flops: float, share: float
) -> Row:
    """Return the row of some pairs of timings.

    Args:
        cell: what was done.
        engine: which engine.
        threads: how many.
        pairs: the timings.
        flops: floating-point operations of one client-round.
        share: of the processor.
    """
    mine = statistics.median(pair.ours for pair in pairs)
    ratios = [pair.usual / pair.ours for pair in pairs]
    return Row(
        **asdict(cell),
        engine=engine,
        threads=threads,
        milliseconds=1e3 * mine,
        usual_milliseconds=1e3 * statistics.median(pair.usual for pair in pairs),
        usual_form=statistics.mode(pair.form for pair in pairs),
        ratio=statistics.median(ratios),
        low=min(ratios),
        high=max(ratios),
        samples_per_second=cell.samples / mine if cell.work == "train" else 0.0,
        share_of_peak=statistics.median(flops / pair.ours / pair.peak for pair in pairs),
        memory_mb=_peak(),
        processor_share=share,
    )


def forms(theirs: Usual, several: Processes | None, threads: int) -> dict[str, float]:
    """Return the seconds of a client-round of the usual loop in each of its forms.

    Args:
        theirs: the usual loop in this process.
        several: in as many processes as there are threads; None for one thread.
        threads: at most.
    """
    found = {"1 process": _usual(theirs, 1)}
    if several is not None:
        found[f"{threads} threads"] = _usual(theirs, threads)
        times = math.ceil(4 * _LEAST / (found["1 process"] * len(theirs.clients)))
        found[f"{threads} processes"] = several.seconds(times)
    return found


def best(found: Mapping[str, float]) -> tuple[float, str]:
    """Return the least seconds, and the form that took them."""
    return min((seconds, form) for form, seconds in found.items())


def _usual(theirs: Usual, threads: int) -> float:
    """Return the seconds of the usual loop in this process for one client-round."""
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
    """Reset the largest resident memory, where the system can."""
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
        f"{row.net:6} {row.clients:5} clients  {row.work:12} {row.engine:8} {row.ratio:6.1f}x the usual loop in "
        f"{row.usual_form} ({row.low:.1f} to {row.high:.1f}); {row.milliseconds:.2f} against "
        f"{row.usual_milliseconds:.2f} ms a client-round; {row.share_of_peak:.0%} of peak; {row.memory_mb:.0f} MB"
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
                raise ConfigError(describe_unknown(kind, name, known))
        if clients != "*" and int(clients) < 2:
            raise ConfigError(
                f"found {clients} clients in the cell {pattern!r}; expected at least 2"
            )
        for one in SHAPES if net == "*" else (net,):
            for size in POPULATIONS if clients == "*" else (int(clients),):
                found |= {
                    Cell(one, size, samples, each) for each in (WORKS if work == "*" else (work,))
                }
    order = list(SHAPES)
    return sorted(
        found, key=lambda cell: (cell.clients, order.index(cell.net), WORKS.index(cell.work))
    )


def write(rows: Sequence[Row], path: Path, settings: Mapping[str, Any]) -> None:
    """Write the rows as JSON, with the settings and the machine."""
    write_results(
        path,
        [asdict(row) for row in rows],
        ("engine", "functional"),
        settings,
        where=machine_with_peak(),
    )
