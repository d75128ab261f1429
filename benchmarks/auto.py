"""Where one client after another is faster than a block of clients at once: what "auto" decides by, on a CPU.

    python benchmarks/auto.py --out docs/reference/runs/performance/auto.json

Ten clients train for one epoch with each engine, in one thread, in turn; the fastest of three
counts.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from coterie._util.origin import write_results
from coterie.engine._choice import count_products, is_batching_worthwhile
from coterie.engine.task import LocalTraining
from coterie.models.layout import ModelSource, resolve_model
from coterie.models.simplex_layers import simplex_head
from coterie.rng import Rng
from coterie.testing import tiny_federation
from coterie.testing.tiny import build_task

CLIENTS, REPEATS = 10, 3
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


def cell(name: str, batch_size: int) -> dict[str, Any]:
    """Time the two engines."""
    features, samples = CELLS[name]
    data = tiny_federation(
        CLIENTS, 2, train=samples, validation=2, features=features, classes=10
    ).host(range(CLIENTS))
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
    return {
        "model": name,
        "inputs": "x".join(map(str, features)),
        "batch": batch_size,
        "products a sample": count_products(layout, x),
        "ms a client, loop": 1000 * best["loop"] / CLIENTS,
        "ms a client, vmap": 1000 * best["vmap"] / CLIENTS,
        "vmap over loop": best["vmap"] / best["loop"],
        "auto takes": "vmap" if is_batching_worthwhile(layout, x, batch_size) else "loop",
    }


def main() -> None:
    """Measure every cell and write the rows."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [cell(name, batch_size) for name in CELLS for batch_size in (8, 50)]
    write_results(options.out, rows, ("engine", "models"), vars(options), order=50)


if __name__ == "__main__":
    main()
