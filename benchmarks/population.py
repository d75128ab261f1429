"""What a client-round costs, and how much memory a run takes, as the population grows.

    python benchmarks/population.py --out docs/reference/runs/performance/population.json

Every cell is a run in a process of its own: net B on random digits (1x28x28 bytes), a few samples a client, in this
one process with as many threads as there are cores. Its time is the mean of the rounds after the first; its memory the
process's largest resident set, data and interpreter included. Clients train, exchange and validate in every round.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _measured import images

from coterie import METHODS
from coterie._util.origin import keep, machine
from coterie.engine import use_threads
from coterie.engine.task import LocalTraining
from coterie.simulation import workers
from coterie.simulation.run import Progress, simulate
from coterie.simulation.settings import Settings


def cell(kind: str, clients: int, rounds: int) -> dict[str, str | int | float]:
    """Run one method over one population and return its row."""
    seconds: dict[int, float] = {}

    def note(progress: Progress) -> None:
        seconds[progress.round] = progress.seconds

    settings = Settings(rounds=rounds, local=LocalTraining(batch_size=8), engine="compiled", evaluate="final")
    with workers.one_thread():
        use_threads(workers.cores())
        simulate(images(clients, 20, 28, 1), METHODS[kind](), model="cnn-b", settings=settings, observer=note)
    each = (seconds[rounds - 1] - seconds[0]) / (rounds - 1)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "method": kind,
        "clients": clients,
        "rounds": rounds,
        "seconds a round": each,
        "ms a client-round": 1000 * each / clients,
        "peak memory, GiB": peak / 2**30,
    }


def rows(passes: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return a row for each population of a method: medians of the times and of the ratios of each pass.

    Args:
        passes: a row for each population, the first one being what the others are compared with.
    """
    name, out = "ms a client-round", []
    for place, first in enumerate(passes[0]):
        cells = [each[place] for each in passes]
        middle = {key: statistics.median(one[key] for one in cells) for key in ("seconds a round", name)}
        ratios = [one[name] / each[0][name] for one, each in zip(cells, passes, strict=True)]
        peak = max(one["peak memory, GiB"] for one in cells)
        times = {"times that of the first": statistics.median(ratios), "from": min(ratios), "to": max(ratios)}
        out.append({**first, **middle, "peak memory, GiB": peak, **times})
    return out


def _rounds(clients: int, client_rounds: int) -> int:
    return min(41, max(3, client_rounds // clients))


def _alone(kind: str, clients: int, client_rounds: int) -> dict[str, Any]:
    """Run a cell in a process of its own."""
    same = [sys.executable, __file__, "--cell", "--methods", kind, "--clients", str(clients)]
    done = subprocess.run([*same, "--client-rounds", str(client_rounds)], check=True, stdout=subprocess.PIPE, text=True)
    row = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(row), flush=True)
    return row


def main() -> int:
    """Run the cells, print each row, and write all of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--methods", nargs="+", default=["dac", "random", "fedavg"])
    parser.add_argument("--clients", nargs="+", type=int, default=[100, 1000, 10000])
    parser.add_argument("--client-rounds", type=int, default=20000, help="of a cell, shared out over 3 rounds or more")
    parser.add_argument("--repeats", type=int, default=1, help="the populations of a method in turn, so many times")
    parser.add_argument("--cell", action="store_true", help="run one cell in this process and print its row")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = []
    for kind in options.methods:
        if options.cell:
            print(json.dumps(cell(kind, options.clients[0], _rounds(options.clients[0], options.client_rounds))))
            continue
        passes = [
            [_alone(kind, clients, options.client_rounds) for clients in options.clients]
            for _ in range(options.repeats)
        ]
        results += rows(passes)
    if options.cell:
        return 0
    if options.out is not None:
        where = machine() | {"memory_GiB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)}
        speaks_of = ("engine", "exchange", "methods", "simulation")
        keep(options.out, results, speaks_of, vars(options), where=where, order=40)
    return 0


if __name__ == "__main__":
    sys.exit(main())
