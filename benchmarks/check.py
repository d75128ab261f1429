"""What the check of the translation costs before the first round, by model and engine.

    python -m benchmarks.check --out docs/reference/runs/performance/check.json

Each cell makes the task of a run and checks it, in one thread, in turn; the fastest of three counts, in
seconds of the processor.
The usual step is forward, backward and update of the untouched module on a batch of 32.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import zoo
from coterie import from_arrays
from coterie._util.origin import write_results
from coterie.engine.task import LocalTraining
from coterie.methods.fedavg import FedAvg
from coterie.models.layout import build_model
from coterie.rng import Rng
from coterie.runtime.settings import Settings
from coterie.runtime.task import make_task
from coterie.runtime.translation import check_translation

REPEATS, BATCH = 3, 32
CELLS = {
    "linear": (8, 1), "mlp-bn": (28, 1), "mlp-c": (28, 1), "cnn-b": (28, 1), "cnn-a": (32, 3),
    "simple-cnn": (32, 3), "resnet-20": (32, 3), "resnet-18": (32, 3),
}  # fmt: skip
"""Side and channels of the images that each model gets."""

OTHERS: dict[str, Callable[[], nn.Module]] = {
    "resnet-20": lambda: zoo.resnet(3, nn.BatchNorm2d),
    "resnet-18": lambda: zoo.resnet(2, nn.BatchNorm2d, (64, 128, 256, 512)),
}
"""Models of the cells that the package has no name for; the last is slow on a processor."""


def usual_step(model: str, side: int, channels: int) -> float:
    """Return the seconds of a step of the module in plain PyTorch."""
    if model in OTHERS:
        module = OTHERS[model]()
    else:
        module = build_model(model, (channels, side, side), 10)
    x, y = torch.rand(BATCH, channels, side, side), torch.arange(BATCH) % 10
    best = float("inf")
    for _ in range(10):
        began = time.process_time()
        module.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        with torch.no_grad():
            for one in module.parameters():
                one.sub_(one.grad, alpha=1e-3)  # type: ignore[arg-type]
        best = min(best, time.process_time() - began)
    return best


def cell(model: str, engine: str) -> dict[str, Any]:
    """Time the check of a model in an engine."""
    side, channels = CELLS[model]
    stream = torch.Generator().manual_seed(0)
    x = torch.randint(256, (2000, channels, side, side), generator=stream, dtype=torch.uint8)
    data = from_arrays(x, torch.arange(2000) % 10, clients=[row % 20 for row in range(2000)])
    local = LocalTraining(batch_size=BATCH)
    task = make_task(data, FedAvg(), OTHERS.get(model, model), Settings(engine=engine, local=local))
    seconds = []
    for _ in range(REPEATS):
        began = time.process_time()
        check_translation(task, data, local, Rng(0))
        seconds.append(time.process_time() - began)
    step = usual_step(model, side, channels)
    return {
        "model": model,
        "inputs": f"{channels}x{side}x{side}",
        "engine": task.engine.name,
        "first, s": seconds[0],
        "check, s": min(seconds),
        "usual step, ms": 1000 * step,
        "limit, s": max(1.0, 2 * step),
    }


def main() -> None:
    """Measure every cell and write the rows."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [cell(model, engine) for model in CELLS for engine in ("loop", "vmap", "compiled")]
    write_results(options.out, rows, ("engine", "models", "runtime"), vars(options), order=55)


if __name__ == "__main__":
    main()
