"""Local training of many models by every engine, the usual loop and a lean loop of PyTorch.

    python benchmarks/models.py --out docs/reference/runs/performance/models.json
    python benchmarks/models.py --only resnet8-bn gru --batches 8 32
    python benchmarks/models.py --only tabular-bn gru --rounds 2 10 --clients 8 1000

A cell is a model of `zoo` with a batch size. Clients train for one epoch with Adam, in one thread:
by whole calls of `Task.train` with each engine, by the usual loop (a DataLoader that shuffles,
torch.optim.Adam, the loss of each step as a number) and by a lean loop (slices of shuffled tensors,
foreach or fused Adam, whichever is faster). All sides are timed in turn, again and again; ratios
are taken within a turn. With --rounds, a cell is a model with a number of rounds and of clients:
whole runs of clients with 128 samples, alone and as one of a study, next to the lean loop.

The file is written after each cell: the same command goes on where it was stopped, unless the code
is another one by then.
"""

import argparse
import copy
import itertools
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _measured import flops, keep_freed_memory
from _peak import Peak, machine_with_peak
from _whole_runs import measure_runs
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from zoo import ZOO, Entry

from coterie._util import origin, pages
from coterie.data.federation import Federation
from coterie.engine import ENGINES
from coterie.engine.task import LocalTraining, Task
from coterie.errors import CoterieError
from coterie.rng import Rng
from coterie.testing.tiny import build_task

BATCHES = (8, 32, 64)
# training samples of the run for which "auto" chooses: 100 clients, 500 samples, 100 rounds
RUN = 5_000_000
LEAST, TURNS = 3, 7  # turns of a cell: at least, and at most
SLOW_TURNS = 2  # of an engine that takes more than twice as long as the lean loop
LONG = 0.3  # seconds of one timing, about
SHORT = 0.03  # a shorter timing is repeated within itself
_SAME = 1e-3  # relative difference of the first losses of two engines


class DifferentResultsError(CoterieError, RuntimeError):
    """Two engines do not compute the same: nothing is reported."""


# ---------------------------------------------------------------- what is trained


@dataclass(frozen=True)
class Size:
    """How much one timing trains.

    Args:
        clients: how many.
        steps: of each.
        batch: samples of a step.
    """

    clients: int
    steps: int
    batch: int

    @property
    def samples(self) -> int:
        """Training samples of a client: whole batches."""
        return self.steps * self.batch


def size(seconds: float, batch: int) -> Size:
    """Return how much to train in one timing: an epoch of at least 4 steps for each of 1 to 32 clients.

    Args:
        seconds: of a step of the lean loop.
        batch: samples of a step.
    """
    steps = 16 if 16 * seconds < LONG else 4
    return Size(max(1, min(32, round(LONG / (steps * seconds)))), steps, batch)


def samples(entry: Entry, of: Size) -> tuple[Tensor, Tensor]:
    """Return the inputs and classes of all clients (clients, samples, ...)."""
    x, y = entry.data(of.clients * of.samples, torch.Generator().manual_seed(0))
    return x.unflatten(0, (of.clients, of.samples)), y.unflatten(0, (of.clients, of.samples))


def federation(x: Tensor, y: Tensor, classes: int) -> Federation:
    """Return a federation without test samples."""
    ids = torch.arange(len(x))
    return Federation(
        x=x, y=y, split=torch.zeros_like(y), tests=(), test_of=torch.zeros_like(ids), ids=ids, population=len(x),
        classes=classes,
    )  # fmt: skip


def operations(entry: Entry, batch: int) -> int:
    """Return the floating-point operations of the products of one step.

    Args:
        entry: the model.
        batch: samples of a step.
    """
    return flops(made(entry), *entry.data(batch, torch.Generator().manual_seed(0)))


def made(entry: Entry) -> nn.Module:
    """Return a module of the model in training mode, the same each time."""
    with Rng(0).temporary_torch_seed("bench.models"):
        return entry.make().train()


# ---------------------------------------------------------------- the two loops of plain PyTorch


def usual(module: nn.Module, x: Tensor, y: Tensor, batch: int) -> list[float]:
    """Train a client for an epoch as research code does; return the loss of each step."""
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)
    losses = []
    for inputs, classes in DataLoader(TensorDataset(x, y), batch_size=batch, shuffle=True):
        optimizer.zero_grad()
        loss = functional.cross_entropy(module(inputs), classes)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def lean(module: nn.Module, x: Tensor, y: Tensor, batch: int, adam: str) -> None:
    """Train a client for an epoch as plain PyTorch does it fastest.

    Args:
        module: trained.
        x: inputs.
        y: classes.
        batch: samples of a step.
        adam: "fused" or "foreach": PyTorch's two fast ways to compute the same.
    """
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-3, **{adam: True})
    order = torch.randperm(len(x))
    x, y = x[order], y[order]
    for at in range(0, len(x), batch):
        optimizer.zero_grad()
        functional.cross_entropy(module(x[at : at + batch]), y[at : at + batch]).backward()
        optimizer.step()


def faster_adam(entry: Entry, batch: int, steps: int) -> tuple[float, str]:
    """Return the seconds of a step of the lean loop, and the form of Adam with which it is faster.

    Args:
        entry: the model.
        batch: samples of a step.
        steps: of each of two timings.
    """
    x, y = samples(entry, Size(1, steps, batch))
    module, found = made(entry), []
    for adam in ("foreach", "fused"):
        lean(module, x[0, :batch], y[0, :batch], batch, adam)
        found.append(
            (
                min(
                    timed(lambda adam=adam: lean(module, x[0], y[0], batch, adam)) for _ in range(2)
                ),
                adam,
            )
        )
    seconds, adam = min(found)
    return seconds / steps, adam


def timed(function: Callable[[], object]) -> float:
    """Return the seconds of one call; short ones are repeated."""
    times, started = 0, time.perf_counter()
    while True:
        function()
        times += 1
        passed = time.perf_counter() - started
        if passed >= SHORT:
            return passed / times


# ---------------------------------------------------------------- a cell


@dataclass(frozen=True)
class Sides:
    """What is timed of a cell.

    Args:
        run: by name ("usual", "lean", engines): trains all clients for an epoch.
        auto: the engine that "auto" takes.
        reason: why, in its own words.
        missing: why another engine does not run the model, by name.
        ready: seconds until an engine had trained once, building included, by name.
    """

    run: Mapping[str, Callable[[], object]]
    auto: str
    reason: str
    missing: Mapping[str, str]
    ready: Mapping[str, float]


def task(entry: Entry, x: Tensor, y: Tensor, batch: int, engine: str) -> tuple[Task, str]:
    """Return the clients with an engine, and what was said against it."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        made_ = build_task(
            federation(x, y, entry.classes),
            entry.make,
            engine=engine,
            train_samples=RUN,
            batch_size=batch,
            block=None,
        )
    return made_, "; ".join(str(each.message) for each in said)


def sides(entry: Entry, of: Size, adam: str, engines: Sequence[str]) -> Sides:
    """Make all sides of a cell ready: everything has run once.

    Args:
        entry: the model.
        of: how much a timing trains.
        adam: for the lean loop.
        engines: to time in addition to what "auto" takes.

    Raises:
        DifferentResultsError: when two engines do not compute the same.
    """
    x, y = samples(entry, of)
    modules = [copy.deepcopy(made(entry)) for _ in range(of.clients)]
    clients = list(zip(modules, x, y, strict=True))
    run: dict[str, Callable[[], object]] = {
        "usual": lambda: [usual(module, *data, of.batch) for module, *data in clients],
        "lean": lambda: [lean(module, *data, of.batch, adam) for module, *data in clients],
    }
    for function in run.values():
        function()
    local, rng = LocalTraining(batch_size=of.batch), Rng(0).at_round(0)
    auto, reason, missing, ready, first = "", "", {}, {}, {}
    for name in ("auto", *engines):
        if name == auto:
            continue
        began = time.perf_counter()
        ours, said = task(entry, x, y, of.batch, name)
        engine = ours.engine.name
        if name == "auto":
            auto, reason = engine, getattr(ours.engine, "reason", "") or said
        elif engine != name:
            missing[name] = said
            continue
        start = ours.initial_models(Rng(0)).clone()
        first[engine] = ours.train(start, rng, local)[1]["losses"][:, 0]
        ready[engine] = time.perf_counter() - began
        run[engine] = lambda ours=ours, start=start: ours.train(start, rng, local)
    for name, losses in first.items():
        compare(name, losses, auto, first[auto])
    return Sides(run, auto, reason, missing, ready)


def compare(name: str, losses: Tensor, other: str, others: Tensor) -> None:
    """Check that the losses of the first steps agree.

    Raises:
        DifferentResultsError: when they do not.
    """
    apart = float(((losses - others).abs() / others.abs()).max())
    if not apart < _SAME:
        raise DifferentResultsError(
            f"the losses of {name} and {other} differ by {apart:.1e}; expected below {_SAME:g}"
        )


@dataclass(frozen=True)
class Times:
    """What was measured of a cell, turn by turn.

    Args:
        step: seconds of a step, by side; slow engines sit out the later turns.
        peak: floating-point operations a second of this core.
    """

    step: Mapping[str, list[float]]
    peak: list[float]


def measure(
    all_sides: Sides, of: Size, peak: Peak, until: float, least: int = LEAST, most: int = TURNS
) -> Times:
    """Time all sides in turn.

    Args:
        all_sides: ready to run.
        of: how much a timing trains.
        peak: measures the core.
        until: `time.monotonic()` after which no turn begins, once there are enough.
        least: turns at least.
        most: turns at most.
    """
    steps = of.clients * of.steps
    found = Times({name: [] for name in all_sides.run}, [])
    with pages.reuse_pages():  # as in a run
        while len(found.peak) < most and (len(found.peak) < least or time.monotonic() < until):
            found.peak.append(peak.flops(0.005, 3))
            for name, function in all_sides.run.items():
                times, beside = found.step[name], found.step["lean"]
                if len(times) >= SLOW_TURNS and statistics.median(times) > 2 * statistics.median(
                    beside
                ):
                    continue
                times.append(timed(function) / steps)
    return found


def ratios(times: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    """Return how many times as fast one side is as another: the median over the turns, the smallest and the largest.

    Args:
        times: of the side, in the first turns.
        others: of the other side, in all turns.
    """
    each = [other / mine for mine, other in zip(times, others, strict=False)]
    return {"median": statistics.median(each), "low": min(each), "high": max(each)}


def row(of: Size, step_flops: int, found: Times, all_sides: Sides) -> dict[str, Any]:
    """Return what is stored of a cell.

    Args:
        of: how much a timing trains.
        step_flops: floating-point operations of a step.
        found: the times.
        all_sides: what was timed.

    Returns:
        `ms` of a step and `share` of peak of each side (medians), `usual` and `lean`: how many
        times as fast as these loops each engine is; what "auto" takes, and why; why engines are
        missing; seconds until each was ready.
    """
    engines = [name for name in found.step if name not in ("usual", "lean")]
    return {
        "clients": of.clients,
        "steps": of.steps,
        "mflop": step_flops / 1e6,
        "ms": {name: 1e3 * statistics.median(times) for name, times in found.step.items()},
        "share": {
            name: statistics.median(
                step_flops / mine / peak for mine, peak in zip(times, found.peak, strict=False)
            )
            for name, times in found.step.items()
        },
        "usual": {name: ratios(found.step[name], found.step["usual"]) for name in engines},
        "lean": {name: ratios(found.step[name], found.step["lean"]) for name in engines},
        "auto": all_sides.auto,
        "reason": all_sides.reason,
        "missing": dict(all_sides.missing),
        "ready_s": dict(all_sides.ready),
    }


def cell(
    name: str, batch: int, engines: Sequence[str], until: float, quick: bool = False
) -> dict[str, Any]:
    """Measure a cell.

    Args:
        name: of the model.
        batch: samples of a step.
        engines: to time in addition to what "auto" takes.
        until: `time.monotonic()` at which it should end.
        quick: one turn of two clients with two steps: nothing to rely on.
    """
    entry = ZOO[name]
    seconds, adam = faster_adam(entry, batch, 2 if quick else 4)
    of = Size(2, 2, batch) if quick else size(seconds, batch)
    all_sides = sides(entry, of, adam, engines)
    turns = {"least": 1, "most": 1} if quick else {}
    found = measure(all_sides, of, Peak(), until, **turns)
    return {
        "model": name,
        "batch": batch,
        "lean_adam": adam,
        **row(of, operations(entry, batch), found, all_sides),
    }


def line(result: Mapping[str, Any]) -> str:
    """Return a cell as a line of text."""
    auto = result["auto"]
    times = ", ".join(f"{name} {each['median']:.2f}" for name, each in result["lean"].items())
    return (
        f"{result['model']:12} {result['batch']:3}  usual {result['ms']['usual']:.2f} ms, lean "
        f"{result['ms']['lean']:.2f} ms; times lean: {times}; auto: {auto}, {result['share'][auto]:.0%} of peak"
    )


# ---------------------------------------------------------------- the command


def done(path: Path | None, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows that the same command with the same code has already stored.

    Args:
        path: where they would be.
        settings: of the command.
    """
    code = origin.describe_code()
    if path is None or not path.exists() or code["commit"] is None or code["dirty"]:
        return []
    stored = json.loads(path.read_text("utf-8"))
    head = stored["origin"]
    same = (
        head["commit"] == code["commit"] and not head["dirty"] and head["config"] == dict(settings)
    )
    return stored["results"] if same else []


def measure_whole_runs(
    options: argparse.Namespace, settings: Mapping[str, Any], rows: list[dict[str, Any]]
) -> None:
    """Measure whole runs of every cell, and write the rows; what is there stays."""
    there = {(each["model"], each["clients"], each["rounds"]) for each in rows}
    for cell in itertools.product(options.only, options.clients, options.rounds):
        if cell in there:
            continue
        name, clients, rounds = cell
        rows.append(measure_runs(name, ZOO[name], rounds, clients, options.turns, made, lean))
        print(rows[-1], flush=True)
        if options.out is not None:
            origin.write_results(options.out, rows, ("engine", "models", "runtime"), settings)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every cell and write the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, help="a JSON file, written after each cell")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(ZOO),
        default=list(ZOO),
        metavar="MODEL",
        help=", ".join(ZOO),
    )
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument(
        "--engines",
        nargs="*",
        choices=list(ENGINES),
        default=["loop", "vmap", "compiled"],
        help="in addition to auto's",
    )
    parser.add_argument(
        "--rounds", nargs="+", type=int, default=[], help="measure whole runs of so many rounds"
    )
    parser.add_argument("--clients", nargs="+", type=int, default=[8], help="of a whole run")
    parser.add_argument(
        "--turns", type=int, default=TURNS, help="of a whole run, of which times are medians"
    )
    parser.add_argument(
        "--minutes", type=float, default=24, help="for all cells; each has at least three turns"
    )
    parser.add_argument(
        "--quick", action="store_true", help="one short turn a cell: whether everything works"
    )
    options = parser.parse_args(arguments)
    if min(options.batches) < 2:
        parser.error(
            f"found batches of {min(options.batches)}; expected at least 2, for models with BatchNorm"
        )
    torch.set_num_threads(1)
    keep_freed_memory()
    settings = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(options).items()
    }
    rows = done(options.out, settings)
    if options.rounds:
        measure_whole_runs(options, settings, rows)
        return
    there = {(each["model"], each["batch"]) for each in rows}
    cells = [
        (name, batch)
        for name in options.only
        for batch in options.batches
        if (name, batch) not in there
    ]
    end = time.monotonic() + 60 * options.minutes
    for number, (name, batch) in enumerate(cells):
        left = (end - time.monotonic()) / (len(cells) - number)
        with warnings.catch_warnings():
            # of PyTorch, where the vmap engine is slow; engines' own are in the rows
            warnings.simplefilter("ignore")
            rows.append(cell(name, batch, options.engines, time.monotonic() + left, options.quick))
        print(line(rows[-1]), flush=True)
        if options.out is not None:
            origin.write_results(
                options.out,
                rows,
                ("engine", "models"),
                settings,
                where=machine_with_peak(),
                order=20,
            )


if __name__ == "__main__":
    try:
        main()
    except CoterieError as error:
        sys.exit(f"python benchmarks/models.py: {error}")
