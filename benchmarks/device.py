"""What a CUDA device gains: one epoch of local training there, on a CPU, and with the usual loop.

    python -m benchmarks.device --device cuda --out docs/reference/runs/performance/device.json

For each model, population and batch size: what "auto" takes on the device, without and with
`cuda_graphs`, and on all cores of the CPU, with Adam on random bytes, and the usual loop of
research code (a module, a DataLoader and a torch.optim.Adam for each client) on the device. All in
turn, the median of some repeats after one that does not count (two with graphs, which are captured
then); all must come to the same losses. Ratios are of the training with graphs; the memory is the
device's largest during all trainings there, by PyTorch's count.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.engines.cells import Cell, federation, network
from benchmarks.engines.usual import UsualClient
from coterie._util import pages
from coterie._util.origin import write_results
from coterie.data.federation import Federation
from coterie.engine import device as devices
from coterie.engine._batches import draw_batches
from coterie.engine.task import LocalTraining
from coterie.errors import CoterieError
from coterie.rng import Rng
from coterie.testing.tiny import build_task

SAMPLES, USUAL, TOLERANCE = 80, 2, 5e-3
NETS, CLIENTS, BATCHES = ("mlp", "cnn-b", "cnn-a"), (10, 100, 1000), (8, 32)


def side(
    data: Federation, net: str, device: str, local: LocalTraining, *, graphs: bool = False
) -> Callable[[], Tensor]:
    """Return a training of all clients with what "auto" takes, which returns the losses of the steps."""
    # a hundred rounds: the CPU compiles where that pays
    expected = float(len(data) * SAMPLES * 100)
    task = build_task(
        data,
        lambda: network(net),
        device=device,
        train_samples=expected,
        batch_size=local.batch_size,
        cuda_graphs=graphs,
    )
    start = task.initial_models(Rng(1))

    def train() -> Tensor:
        return task.train(start, Rng(1).at_round(0), local)[1]["losses"]

    train.engine = task.engine.name  # type: ignore[attr-defined]
    return train


def usual(data: Federation, net: str, device: str, local: LocalTraining) -> Callable[[], Tensor]:
    """Return the usual loop's training of the first clients, from the same start with the same batches."""
    task = build_task(data, lambda: network(net), engine="loop")
    start = task.layout.build_module(task.initial_models(Rng(1))[0])
    schedule = draw_batches(
        local, task.count_samples("train"), task.ids, Rng(1).at_round(0), "batches"
    )
    batches = [
        [order[:size].tolist() for order, size in zip(orders, sizes.tolist(), strict=True)]
        for orders, sizes in zip(
            schedule.sample_order[:USUAL], schedule.batch_sizes[:USUAL], strict=True
        )
    ]
    x = data.x[:USUAL].to(torch.float32).div(255).sub(0.5).div(0.25).to(device)
    y = data.y[:USUAL].to(device)

    def train() -> Tensor:
        clients = [UsualClient(copy.deepcopy(start).to(device), x[i], y[i]) for i in range(len(x))]
        return torch.tensor(
            [one.train(mine, local.lr) for one, mine in zip(clients, batches, strict=True)]
        )

    return train


def cell(net: str, clients: int, batch_size: int, device: str, repeats: int) -> dict[str, Any]:
    """Time the sides of one cell.

    Raises:
        CoterieError: when they do not come to the same.
    """
    data, local = (
        federation(Cell(net, clients, SAMPLES, "train")),
        LocalTraining(batch_size=batch_size),
    )
    sides = {
        "device": side(data, net, device, local),
        "graphs": side(data, net, device, local, graphs=True),
    }
    sides |= {"cpu": side(data, net, "cpu", local), "usual": usual(data, net, device, local)}
    sides["graphs"]()  # some steps of each size run before they are captured
    losses = {name: train()[:USUAL] for name, train in sides.items()}
    worst = max(float((found - losses["cpu"]).abs().max()) for found in losses.values())
    if not worst < TOLERANCE:
        raise CoterieError(
            f"{net}: the sides differ by {worst:.1e}; expected at most {TOLERANCE:.0e}"
        )
    torch.cuda.reset_peak_memory_stats(device)
    times: dict[str, list[float]] = {name: [] for name in sides}
    with pages.reuse_pages():  # as in a run
        for _ in range(repeats):
            for name, train in sides.items():
                began = time.perf_counter()
                train()  # losses come to the CPU: all is done
                times[name].append(time.perf_counter() - began)
    each = {
        name: 1e3 * statistics.median(found) / (USUAL if name == "usual" else clients)
        for name, found in times.items()
    }
    return {
        "model": net,
        "clients": clients,
        "batch": batch_size,
        "engine there": sides["device"].engine,  # type: ignore[attr-defined]
        "engine here": sides["cpu"].engine,  # type: ignore[attr-defined]
        "ms a client, device": each["device"],
        "ms a client, device with graphs": each["graphs"],
        "ms a client, CPU": each["cpu"],
        "ms a client, usual loop on the device": each["usual"],
        "times without graphs": each["device"] / each["graphs"],
        "times a CPU": each["cpu"] / each["graphs"],
        "times the usual loop": each["usual"] / each["graphs"],
        "MB on the device": torch.cuda.max_memory_allocated(device) / 1e6,
    }


def main() -> None:
    """Measure every cell and write the rows."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", nargs="+", default=NETS)
    parser.add_argument("--clients", nargs="+", type=int, default=CLIENTS)
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    try:
        devices.check_device(options.device)
    except CoterieError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    rows = []
    for net in options.models:
        for clients in options.clients:
            for batch_size in options.batches:
                rows.append(cell(net, clients, batch_size, options.device, options.repeats))
                print(
                    {
                        name: f"{value:.3g}" if isinstance(value, float) else value
                        for name, value in rows[-1].items()
                    }
                )
    write_results(
        options.out,
        rows,
        ("engine", "models"),
        vars(options) | {"devices": devices.describe_devices()},
        order=200,
    )


if __name__ == "__main__":
    main()
