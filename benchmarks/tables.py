r"""Compare DAC with tables of bounded size to DAC with a memory of all pairs.

    python benchmarks/tables.py --out docs/reference/runs/performance/tables.json

Each cell is a run in a process of its own: a linear model of 16 inputs and 5 classes, 20 training
and 5 validation samples a client. Every cluster labels Gaussian inputs by its own linear rule. The
accuracy is that of the clients' last models on 200 test samples of their cluster; the reads are
those of the first and the last five rounds.
"""

import argparse
import json
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coterie._util.origin import write_results
from coterie.data.federation import Federation, TestSet
from coterie.engine.task import LocalTraining
from coterie.methods.dac import Dac
from coterie.rng import Rng
from coterie.runtime.settings import Settings
from coterie.simulation.run import Progress, simulate
from coterie.testing import tiny_federation

SIZE, CLASSES, TESTS = 16, 5, 200


def make_federation(clients: int, clusters: int, seed: int) -> Federation:
    """Return clients whose clusters have rules of their own, with larger test sets."""
    federation = tiny_federation(
        clients, clusters, train=20, validation=5, features=(SIZE,), classes=CLASSES, seed=seed
    )
    # The generator of the tiny federation draws the rules first.
    rules = Rng(seed).generator("testing.federation").normal(size=(clusters, SIZE, CLASSES))
    inputs = Rng(seed).generator("benchmark").normal(size=(TESTS, SIZE))
    tests = []
    for rule, old in zip(rules, federation.tests, strict=True):
        y = torch.from_numpy((inputs @ rule).argmax(1))
        assert isinstance(old.x, torch.Tensor)
        assert np.array_equal((old.x.numpy() @ rule).argmax(1), old.y.numpy())
        tests.append(TestSet(torch.from_numpy(inputs).float(), y, old.name))
    assert isinstance(federation.x, torch.Tensor)
    return replace(federation, x=federation.x.float(), tests=tuple(tests))


def measure(clients: int, clusters: int, table: int, rounds: int, seed: int) -> dict[str, Any]:
    """Run one cell and return its row; a table of 0 is a memory of all pairs."""
    federation = make_federation(clients, clusters, seed)
    local = LocalTraining(optimizer="sgd", lr=0.1, batch_size=8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds: dict[int, float] = {}

    def note(progress: Progress) -> None:
        seconds[progress.round] = progress.seconds

    run = simulate(
        federation,
        Dac(table=table or None),
        model="linear",
        settings=Settings(rounds=rounds, local=local, engine="compiled", evaluate="final"),
        seed=seed,
        observer=note,
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    accuracy = run.metrics.query("split == 'test' and metric == 'accuracy'")["value"].to_numpy()
    edges = run.edges
    own = (edges["reader"] % clusters == edges["read"] % clusters).to_numpy()
    when = edges["round"].to_numpy()
    return {
        "clients": clients,
        "clusters": clusters,
        "table": table or "all pairs",
        "seed": seed,
        "accuracy": float(accuracy.mean()),
        "own cluster, first rounds": float(own[when < 5].mean()),
        "own cluster, last rounds": float(own[when >= rounds - 5].mean()),
        "seconds a round": (seconds[rounds - 1] - seconds[0]) / (rounds - 1),
        "memory of the run, MiB": (peak - before) / 1024,
    }


def main() -> None:
    """Measure and print, and write where asked."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cells", nargs="+", default=["1000/4", "1000/20", "1000/200"])
    parser.add_argument("--tables", type=int, nargs="+", default=[0, 64])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", nargs=5, type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(*arguments.one)))
        return
    rows = []
    for cell in arguments.cells:
        for seed in arguments.seeds:
            for table in arguments.tables:
                numbers = [*cell.split("/"), table, arguments.rounds, seed]
                command = [sys.executable, __file__, "--one", *map(str, numbers)]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                rows.append(json.loads(done.stdout.splitlines()[-1]))
                print(rows[-1], flush=True)
    if arguments.out is not None:
        write_results(arguments.out, rows, ("methods",), vars(arguments), order=91)


if __name__ == "__main__":
    main()
