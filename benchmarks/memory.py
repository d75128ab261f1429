"""How much memory a run takes compared with the forecast, and four workers with one.

    python benchmarks/memory.py forecast --out docs/reference/runs/performance/memory.json
    python benchmarks/memory.py workers --out docs/reference/runs/performance/workers.json

Linux only: sizes come from /proc. Every row is measured in a process of its own.
"""

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _measured import images, resident

from coterie import METHODS
from coterie._util.origin import write_results
from coterie.data.federation import Federation
from coterie.engine.task import LocalTraining
from coterie.runtime.settings import Settings
from coterie.simulation import _memory
from coterie.simulation.run import simulate
from coterie.simulation.workers import Emit, fan_out, use_one_thread

MIB = 1 << 20
KINDS = ("random", "dac", "panm-loss", "fedavg", "fedavgm", "ditto", "sosicfl-plus")
CLIENTS, ROUNDS = 100, 2


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
}


def main() -> None:
    """Measure every row in a process of its own and write them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=tuple(PARTS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--row")
    arguments = parser.parse_args()
    measure, rows, order = PARTS[arguments.part]
    if arguments.row is not None:
        print(json.dumps(measure(arguments.row)))
        return
    results = []
    for row in rows:
        asked = [sys.executable, __file__, arguments.part, "--row", row]
        done = subprocess.run(asked, capture_output=True, text=True, check=True)
        results.append(json.loads(done.stdout.splitlines()[-1]))
        print(results[-1])
    parts = {
        "forecast": ("data", "engine", "methods", "simulation"),
        "workers": ("data", "simulation"),
    }
    seeds = range(4) if arguments.part == "workers" else (0,)
    write_results(
        arguments.out, results, parts[arguments.part], vars(arguments), seeds=seeds, order=order
    )


if __name__ == "__main__":
    main()
