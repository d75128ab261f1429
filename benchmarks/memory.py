"""How much memory a run takes compared with the forecast, and four workers with one.

    python benchmarks/memory.py forecast --out docs/reference/runs/performance/memory.json
    python benchmarks/memory.py workers --out docs/reference/runs/performance/workers.json
    python benchmarks/memory.py methods --out docs/reference/runs/performance/memory-methods.json

Linux only: sizes come from /proc. Every row is measured in a process of its own.
"""

import argparse
import ctypes
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _measured import images, resident
from torch import nn

from coterie import METHODS
from coterie._util.origin import write_results
from coterie.data.federation import Federation, Truth
from coterie.engine.task import LocalTraining
from coterie.errors import ConfigError
from coterie.functional.selection import PeerKnowledge
from coterie.methods.base import Method
from coterie.methods.dac import Dac
from coterie.methods.random_gossip import Random
from coterie.models.layout import ModelSource
from coterie.runtime.settings import Settings
from coterie.simulation import _memory
from coterie.simulation.run import simulate
from coterie.simulation.workers import Emit, fan_out, use_one_thread

MIB = 1 << 20
KINDS = ("random", "dac", "panm-loss", "fedavg", "fedavgm", "ditto", "sosicfl-plus")
CLIENTS, ROUNDS = 100, 2
SIDE = 8  # of the small images
LARGEST = 8 << 30  # bytes of a forecast up to which the run is measured
SECONDS = 60.0  # of processor time of a run that is measured
MANY = (
    100_000  # of so many clients these are measured, to show where memory grows with clients alone
)
OF_MANY = ("random", "fix-topology", "pens", "dac, table = 64", "fedavg", "local")


def forecast(kind: str) -> dict[str, Any]:
    """Run a method and return the peak of the run and its forecast."""
    data, settings = (
        images(CLIENTS, 10, 28, 1),
        Settings(rounds=ROUNDS, engine="compiled", local=LocalTraining(lr=0.01)),
    )
    # libraries are loaded
    simulate(images(3, 10, 28, 1), METHODS["local"](), model="mlp-c", settings=settings)
    asked: list[_memory.Forecast] = []
    check = _memory.check_forecast
    _memory.check_forecast = lambda wanted, device, limit: (
        asked.append(wanted),
        check(wanted, device, limit),
    )[1]
    before = resident() or 0
    simulate(data, METHODS[kind](), model="mlp-c", settings=settings)
    peak = (resident(name="VmHWM") or 0) - before
    return {
        "method": kind,
        "forecast, MiB": asked[0].needed_bytes / MIB,
        "peak, MiB": peak / MIB,
        "peak over forecast": peak / asked[0].needed_bytes,
    }


def planted(clients: int) -> Federation:
    """Return small images of clients in clusters of a quarter of them, drawn at random."""
    cluster = torch.randint(4, (clients,), generator=torch.Generator().manual_seed(1))
    truth = Truth(cluster, tuple(f"cluster {one}" for one in range(4)), ("none",) * clients)
    return replace(images(clients, 5, SIDE, 1), truth=truth)


class _Forecast(Exception):
    """What `check_forecast` was asked, in place of a run."""


def small_network() -> nn.Module:
    """Return a network about as large as the linear model, for methods that keep a layer at home."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(SIDE * SIDE, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10)
    )


def choose_model(kind: str) -> ModelSource:
    """Return the model of the runs of a method."""
    return small_network if kind in ("dfedalt", "fedbn", "fedper", "fedrep") else "linear"


def told(data: Federation, method: Method, settings: Settings) -> int | None:
    """Return the forecast of a run in bytes, None where its method refuses it; nothing is run."""

    def stop(wanted: _memory.Forecast, device: str, limit: int | None) -> None:
        raise _Forecast(wanted.needed_bytes)

    check, _memory.check_forecast = _memory.check_forecast, stop
    try:
        simulate(data, method, model=choose_model(method.kind), settings=settings)
    except _Forecast as found:
        return found.args[0]
    except ConfigError:
        return None
    finally:
        _memory.check_forecast = check
    raise AssertionError("a run asks for its memory")


def grow(data: Federation, method: Method, settings: Settings) -> tuple[int, float]:
    """Run a method; return the growth of this process in bytes, and its seconds of processor time."""
    # Its libraries are loaded.
    simulate(planted(16), method, model=choose_model(method.kind), settings=settings)
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is the present size
    before, began = resident() or 0, time.process_time()
    simulate(data, method, model=choose_model(method.kind), settings=settings)
    return (resident(name="VmHWM") or 0) - before, time.process_time() - began


def grow_alone(
    data: Federation, method: Method, settings: Settings, seconds: float
) -> tuple[int, float] | None:
    """Return what `grow` does, of a process of its own; None when it takes too long or fails."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def work() -> None:
        theirs.send(grow(data, method, settings))

    process = context.Process(target=work)
    process.start()
    theirs.close()
    found = None
    try:
        if ours.poll(seconds):
            found = ours.recv()
    except EOFError:
        pass
    process.kill()
    process.join()
    return found


def methods(populations: str, only: Sequence[str] = ()) -> dict[str, Any]:
    """Return for each method the forecast and the growth a client.

    Args:
        populations: numbers of clients, ascending and with commas between them.
        only: names of methods; all when empty.
    """
    rows: dict[str, dict[str, Any]] = {}
    chosen = [one for one in list_methods() if not only or one[0] in only]
    for kind, _ in chosen:
        rows[kind] = {"method": kind}
    taken: dict[str, float] = {}
    settings = Settings(
        rounds=ROUNDS, engine="compiled", local=LocalTraining(batch_size=4), evaluate="final"
    )
    for clients in map(int, populations.split(",")):
        data = planted(clients)
        for kind, method in chosen:
            wanted = told(data, method, settings)
            if wanted is None:
                continue
            name = f"{clients:,} clients"
            row = rows[kind] | {f"{name}: forecast, KiB a client": wanted / clients / 1024}
            # Ten times the clients take ten times as long or longer.
            fits = wanted <= LARGEST and 10 * taken.get(kind, 0) <= SECONDS
            fits &= clients < MANY or kind in OF_MANY
            found = grow_alone(data, method, settings, 3 * SECONDS) if fits else None
            if found is None:
                taken[kind] = SECONDS
            else:
                taken[kind] = found[1]
                row[f"{name}: measured"] = found[0] / clients / 1024
            rows[kind] = row
            print(row, f"{taken[kind]:.0f} s", file=sys.stderr, flush=True)
    return {"rows": list(rows.values())}


def prefer_unread(known: PeerKnowledge) -> torch.Tensor:
    """A selection rule: who was read least often."""
    return known.noise - known.count


def list_methods() -> list[tuple[str, Method]]:
    """Return all methods, and those with a table or a selection rule, by their names."""
    rule = f"{__name__}:prefer_unread"
    return [
        *((kind, METHODS[kind]()) for kind in sorted(METHODS)),
        ("dac, table = 64", Dac(table=64)),
        ("dac, table = 64, own rule", Dac(table=64, selection=rule)),
        ("random, own rule", Random(selection=rule)),
    ]


def pss() -> int:
    """Return the memory of this process and its children in bytes; what several hold counts once."""
    total = 0
    for process in (os.getpid(), *(child.pid for child in multiprocessing.active_children())):
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has just ended
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024
    return total


def train(job: tuple[Federation, int], emit: Emit) -> float:
    """Run one seed."""
    data, seed = job
    settings = Settings(
        rounds=1, engine="loop", local=LocalTraining(steps=1, batch_size=50), warmup_epochs=0
    )
    return simulate(data, METHODS["random"](), model="linear", settings=settings, seed=seed).timing[
        "wall_s"
    ]


def workers(row: str) -> dict[str, Any]:
    """Run four seeds on one federation with some workers and return the peak of all processes together."""
    number, samples = row.split("/")
    data, over, peak = images(200, int(samples), 32, 3), threading.Event(), [0]

    def watch() -> None:
        while not over.wait(0.1):
            peak[0] = max(peak[0], pss())

    watcher = threading.Thread(target=watch)
    watcher.start()
    with use_one_thread():
        done = list(fan_out(train, [(data, seed) for seed in range(4)], int(number), print))
    over.set()
    watcher.join()
    assert len(done) == 4
    return {
        "workers": int(number),
        "data, MiB": data.nbytes / MIB,
        "all processes, MiB": peak[0] / MIB,
    }


PARTS: dict[str, tuple[Callable[[str], dict[str, Any]], tuple[str, ...], int]] = {
    "forecast": (forecast, KINDS, 60),
    "workers": (workers, ("1/10", "1/400", "4/10", "4/400"), 70),
    "methods": (methods, ("1000,10000,100000",), 61),
}


def main() -> None:
    """Measure every row in a process of its own and write them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=tuple(PARTS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--row")
    parser.add_argument("--only", nargs="+", default=[], help="of the part 'methods': their names")
    arguments = parser.parse_args()
    measure, rows, order = PARTS[arguments.part]
    if arguments.row is not None:
        if arguments.part == "methods":  # a forked process may not have the threads of its parent
            torch.set_num_threads(1)
            measure = partial(methods, only=arguments.only)
        print(json.dumps(measure(arguments.row)))
        return
    results = []
    for row in rows:
        asked = [sys.executable, __file__, arguments.part, "--row", row]
        if arguments.only:
            asked += ["--only", *arguments.only]
        done = subprocess.run(asked, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        results += found.get("rows", [found])
        print(found)
    parts = {
        "forecast": ("data", "engine", "methods", "simulation"),
        "workers": ("data", "simulation"),
        "methods": ("engine", "exchange", "functional", "methods", "simulation"),
    }
    seeds = range(4) if arguments.part == "workers" else (0,)
    write_results(
        arguments.out, results, parts[arguments.part], vars(arguments), seeds=seeds, order=order
    )


if __name__ == "__main__":
    main()
