"""Samples a second of local training, by engine, beside the usual research loop: one module a client, torch.optim.

    make bench

One thread, batches of 8, Adam, as in the papers. Compiling is not counted: the first call of each engine is a warm-up.
"""

import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from coterie.engine import ENGINES
from coterie.federation import Federation
from coterie.models import build
from coterie.rng import Rng
from coterie.task import LocalTraining, Task

CLIENTS, SAMPLES, BATCH, REPEATS = 10, 80, 8, 3
CASES = {"net A, 3x32x32": ("cnn-a", (3, 32, 32)), "net B, 1x28x28": ("cnn-b", (1, 28, 28))}


def federation(features: tuple[int, ...]) -> Federation:
    stream = Rng(0).generator("benchmark")
    x = torch.from_numpy(stream.integers(0, 256, size=(CLIENTS, SAMPLES, *features)).astype("uint8"))
    y = torch.from_numpy(stream.integers(0, 10, size=(CLIENTS, SAMPLES)))
    ids, channels = torch.arange(CLIENTS), features[0]
    half = (0.5,) * channels
    split = torch.zeros(CLIENTS, SAMPLES, dtype=torch.int64)
    return Federation(x, y, split, (), torch.zeros_like(ids), ids, CLIENTS, 10, mean=half, std=half)


def rate(work: Callable[[], object]) -> float:
    work()
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return CLIENTS * SAMPLES / min(times)


def usual_loop(kind: str, data: Federation) -> Callable[[], object]:
    modules = [build(kind, data.features, 10) for _ in range(CLIENTS)]

    def train(module: nn.Module, client: int) -> None:
        optimiser = torch.optim.Adam(module.parameters(), lr=1e-3)
        pairs = torch.utils.data.TensorDataset((data.x[client] / 255 - 0.5) / 0.5, data.y[client])
        for x, y in torch.utils.data.DataLoader(pairs, batch_size=BATCH, shuffle=True):
            optimiser.zero_grad()
            functional.cross_entropy(module(x), y).backward()
            optimiser.step()

    return lambda: [train(module, client) for client, module in enumerate(modules)]


def engine_loop(kind: str, data: Federation, engine: str) -> Callable[[], object]:
    task = Task(data, kind, engine=engine)
    params = task.init(Rng(0))
    local = LocalTraining(epochs=1, batch_size=BATCH, lr=1e-3)
    return lambda: task.train(params, Rng(0), local)


def main() -> None:
    torch.set_num_threads(1)
    for name, (kind, features) in CASES.items():
        data = federation(features)
        usual = rate(usual_loop(kind, data))
        print(f"{name}: usual loop {usual:,.0f} samples/s")
        for engine in ENGINES:
            found = rate(engine_loop(kind, data, engine))
            print(f"  {engine:<10}{found:>10,.0f} samples/s  {found / usual:.1f}x")


if __name__ == "__main__":
    main()
