r"""Measure the cost of a client-round, the memory and the files of a run, by population size.

    python benchmarks/population.py --out docs/reference/runs/performance/population.json
    python benchmarks/population.py --methods random fedavg --clients 1000 10000 100000 \
        --model linear --side 8
    python benchmarks/population.py --methods dac --table 64 --clients 1000 10000 100000 \
        --model linear mlp-32 --side 8

Every cell is a run in a process of its own: net B on random digits (1x28x28 bytes), a few samples a
client, with as many threads as there are cores. "mlp-32" is a perceptron with 32 hidden units. Its time is the mean of the rounds after the first.
Its memory is the largest resident set of the process before the report is made, data and
interpreter included. The last checkpoint, the tables of results and the report are measured after
that, in seconds and in size. Clients train, exchange and validate in every round.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from _measured import images
from torch import nn

from coterie import METHODS
from coterie._util import manifest
from coterie._util.origin import describe_machine, write_results
from coterie.engine import use_threads
from coterie.engine.task import LocalTraining
from coterie.methods.dac import Dac
from coterie.report.page import write_report
from coterie.results.stored_runs import CONFIG
from coterie.runtime import checkpoint
from coterie.runtime.record import EDGES, METRICS
from coterie.runtime.settings import Settings
from coterie.simulation import workers
from coterie.simulation.run import Progress, simulate


def make_mlp(side: int) -> nn.Module:
    """Return a perceptron of gray images with 32 hidden units and 10 outputs."""
    return nn.Sequential(nn.Flatten(), nn.Linear(side * side, 32), nn.ReLU(), nn.Linear(32, 10))


def cell(
    kind: str,
    clients: int,
    rounds: int,
    model: str = "cnn-b",
    side: int = 28,
    table: int | None = None,
) -> dict[str, str | int | float]:
    """Run one method over one population and return its row.

    Args:
        kind: of the method.
        clients: of the population.
        rounds: of the run.
        model: a name of `models.NETS`, or "mlp-32".
        side: of the images.
        table: members that a client of DAC remembers; all when None.
    """
    seconds: dict[int, float] = {}

    def note(progress: Progress) -> None:
        seconds[progress.round] = progress.seconds

    settings = Settings(
        rounds=rounds, local=LocalTraining(batch_size=8), engine="compiled", evaluate="final"
    )
    with workers.use_one_thread(), tempfile.TemporaryDirectory() as home:
        use_threads(workers.count_cores())
        folder = Path(home) / "population" / kind / "seed-0"
        folder.mkdir(parents=True)
        data, method = images(clients, 20, side, 1), METHODS[kind]()
        if table is not None:
            assert isinstance(method, Dac)
            method = replace(method, table=table)
        net = partial(make_mlp, side) if model == "mlp-32" else model
        simulate(data, method, model=net, settings=settings, observer=note, folder=folder)
        left = _left(folder, kind, rounds)
    each = (seconds[rounds - 1] - seconds[0]) / (rounds - 1)
    return {
        "method": kind,
        "model": model,
        **({} if table is None else {"table": table}),
        "clients": clients,
        "rounds": rounds,
        "seconds a round": each,
        "ms a client-round": 1000 * each / clients,
        **left,
    }


def _left(folder: Path, kind: str, rounds: int) -> dict[str, float]:
    """Return the memory so far, the sizes of a run's files, and what its report takes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    text = f'name = "population"\nrounds = {rounds}\nseeds = [0]\n\n[[methods]]\nkind = "{kind}"\nlabel = "{kind}"\n'
    manifest.replace_files(folder, {CONFIG: text.encode()})
    began = time.perf_counter()
    report = write_report(folder.parents[1])
    return {
        "peak memory, GiB": peak / 2**30,
        "checkpoint, MB": (folder / checkpoint.FILE).stat().st_size / 1e6,
        "tables, MB": sum((folder / name).stat().st_size for name in (METRICS, EDGES)) / 1e6,
        "report, s": time.perf_counter() - began,
        "report, MB": report.stat().st_size / 1e6,
    }


def rows(passes: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return a row for each population of a method: medians of the times and of the ratios of each pass.

    Args:
        passes: a row for each population, the first one being what the others are compared with.
    """
    name, out = "ms a client-round", []
    for place, first in enumerate(passes[0]):
        cells = [each[place] for each in passes]
        middle = {
            key: statistics.median(one[key] for one in cells)
            for key in ("seconds a round", name, "report, s")
        }
        ratios = [one[name] / each[0][name] for one, each in zip(cells, passes, strict=True)]
        peak = max(one["peak memory, GiB"] for one in cells)
        times = {
            "times that of the first": statistics.median(ratios),
            "from": min(ratios),
            "to": max(ratios),
        }
        out.append({**first, **middle, "peak memory, GiB": peak, **times})
    return out


def _rounds(clients: int, client_rounds: int) -> int:
    return min(41, max(3, client_rounds // clients))


def _alone(kind: str, model: str, clients: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run a cell in a process of its own."""
    same = [
        sys.executable,
        __file__,
        "--cell",
        "--methods",
        kind,
        "--clients",
        str(clients),
        "--model",
        model,
    ]
    how = ["--side", str(options.side), "--client-rounds", str(options.client_rounds)]
    if options.table is not None:
        how += ["--table", str(options.table)]
    done = subprocess.run([*same, *how], check=True, stdout=subprocess.PIPE, text=True)
    row = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(row), flush=True)
    return row


def main() -> int:
    """Run the cells, print each row, and write all of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--methods", nargs="+", default=["dac", "random", "fedavg"])
    parser.add_argument("--clients", nargs="+", type=int, default=[100, 1000, 10000])
    parser.add_argument(
        "--model", nargs="+", default=["cnn-b"], help="names of models.NETS, or mlp-32"
    )
    parser.add_argument("--side", type=int, default=28, help="of the images")
    parser.add_argument("--table", type=int, help="members that a client of DAC remembers")
    parser.add_argument(
        "--client-rounds",
        type=int,
        default=20000,
        help="of a cell, shared out over 3 rounds or more",
    )
    parser.add_argument(
        "--repeats", type=int, default=1, help="the populations of a method in turn, so many times"
    )
    parser.add_argument(
        "--cell", action="store_true", help="run one cell in this process and print its row"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = []
    for kind in options.methods:
        if options.cell:
            clients, rounds = options.clients[0], _rounds(options.clients[0], options.client_rounds)
            row = cell(kind, clients, rounds, options.model[0], options.side, options.table)
            print(json.dumps(row))
            continue
        for model in options.model:
            passes = [
                [_alone(kind, model, clients, options) for clients in options.clients]
                for _ in range(options.repeats)
            ]
            results += rows(passes)
    if options.cell:
        return 0
    if options.out is not None:
        where = describe_machine() | {
            "memory_GiB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
        }
        speaks_of = ("engine", "exchange", "methods", "report", "results", "simulation")
        write_results(options.out, results, speaks_of, vars(options), where=where, order=40)
    return 0


if __name__ == "__main__":
    sys.exit(main())
