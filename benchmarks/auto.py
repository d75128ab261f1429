"""Where one client after another is faster than a block of clients at once: what "auto" decides by, on a CPU.

    python benchmarks/auto.py --out docs/reference/runs/performance/auto.json

Clients train for one epoch with each engine, in one thread, in turn; the fastest of three counts.
"""

import argparse
import itertools
import time
from pathlib import Path
from typing import Any

import torch

from coterie._util.origin import write_results
from coterie.engine._choice import count_products, explain_one_by_one
from coterie.engine.task import LocalTraining
from coterie.models.layout import ModelSource, resolve_model
from coterie.models.simplex_layers import simplex_head
from coterie.rng import Rng
from coterie.testing import tiny_federation
from coterie.testing.tiny import build_task

CLIENTS, REPEATS = (4, 8, 16, 32), 3
CELLS: dict[str, tuple[tuple[int, ...], int]] = {
    "linear": ((64,), 100),
    "mlp-c": ((1, 28, 28), 100),
    "cnn-b": ((1, 8, 8), 100),
    "cnn-b, large": ((1, 28, 28), 50),
    "lenet-5": ((1, 28, 28), 50),
    "simple-cnn, simplex of 5": ((3, 32, 32), 50),
}


def network(name: str, features: tuple[int, ...]) -> ModelSource:
    """Return the model of a cell."""
    kind, _, form = name.partition(", ")
    return (
        simplex_head(resolve_model(kind, features, 10), 5) if form.startswith("simplex") else kind
    )


def cell(name: str, batch_size: int, clients: int) -> dict[str, Any]:
    """Time the two engines."""
    features, samples = CELLS[name]
    data = tiny_federation(
        clients, 2, train=samples, validation=2, features=features, classes=10
    ).host(range(clients))
    local, best, tasks = LocalTraining(batch_size=batch_size), {}, {}
    for engine in ("loop", "vmap"):
        tasks[engine] = build_task(data, network(name, features), engine=engine)
    start = {engine: task.initial_models(Rng(0)).clone() for engine, task in tasks.items()}
    for _ in range(REPEATS):
        for engine, task in tasks.items():
            began = time.perf_counter()
            task.train(start[engine], Rng(0).at_round(0), local)
            best[engine] = min(best.get(engine, float("inf")), time.perf_counter() - began)
    layout, x = tasks["loop"].layout, torch.zeros(2, *features)
    products = count_products(layout, x)
    one_by_one = explain_one_by_one(products, batch_size, clients)
    return {
        "model": name,
        "inputs": "x".join(map(str, features)),
        "batch": batch_size,
        "clients": clients,
        "products a sample": products,
        "ms a client, loop": 1000 * best["loop"] / clients,
        "ms a client, vmap": 1000 * best["vmap"] / clients,
        "vmap over loop": best["vmap"] / best["loop"],
        "auto takes": "loop" if one_by_one else "vmap",
    }


def main() -> None:
    """Measure every cell and write the rows."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [cell(*one) for one in itertools.product(CELLS, (8, 50), CLIENTS)]
    write_results(options.out, rows, ("engine", "models"), vars(options), order=50)


if __name__ == "__main__":
    main()
