"""What kernels in Triton gain on a GPU, in under five minutes and without a network.

    python -m benchmarks.kernels --device cuda --out kernels.json

First the update: a step of each optimizer for all clients by PyTorch's operations and by the one
kernel, with the share of the device's bandwidth that it reaches, and how far the two differ. Then
whole steps of local training: the vmap engine, with either update, and the engine "triton" with 4
and 8 warps, in each precision, and how far their losses differ. Each time is the median of some
repeats after one that does not count; what fails is a row with its error, and what there is no time
for is a row that says so. No GPU has run it yet. Without one it tries itself out on a CPU, where
Triton interprets (`TRITON_INTERPRET=1`) and times mean nothing:

    TRITON_INTERPRET=1 python -m benchmarks.kernels --device cpu --clients 2 --batches 4 --models linear --sizes 1500 --out kernels.json
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from coterie._util.origin import write_results
from coterie.engine import TritonEngine, VmapEngine, cross_entropy, optim
from coterie.engine import device as devices
from coterie.engine._work import RawSamples, TrainingWork
from coterie.engine.optim import LocalTraining, RowOptimizer
from coterie.errors import CoterieError, first_line
from coterie.models.layout import Layout

NETS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(64, 10),
    "mlp-512": lambda: nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10)),
    "mlp-64-norm": lambda: nn.Sequential(
        nn.Linear(784, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 10)
    ),
}
UPDATES: dict[str, dict[str, Any]] = {
    "sgd": {},
    "sgd, momentum": {"momentum": 0.9, "weight_decay": 1e-4},
    "adam": {},
    "adamw": {},
}
STEPS = 10


def measure(device: str, repeats: int, run: Callable[[], object]) -> float:
    """Return the median milliseconds of something, after a first time that compiles."""
    found = []
    for _ in range(1 + repeats):
        started = time.perf_counter()
        run()
        if device != "cpu":
            torch.cuda.synchronize(device)
        found.append(1e3 * (time.perf_counter() - started))
    return statistics.median(found[1:])


def compare_updates(
    name: str, clients: int, size: int, device: str, repeats: int
) -> dict[str, Any]:
    """Time a step of an optimizer by both ways."""
    from coterie.engine.kernels.update import update_rows

    local = LocalTraining(optimizer=name.partition(",")[0], lr=1e-3, **UPDATES[name])
    draws = torch.Generator().manual_seed(0)
    start = torch.randn(clients, size, generator=draws).to(device)
    gradient = torch.randn(clients, size, generator=draws).to(device)
    sides, moments, took = [], [], []
    for kernel in (False, True):
        rows, optimizer = start.clone(), RowOptimizer(local, start)

        def step(rows: Tensor = rows, optimizer: RowOptimizer = optimizer, kernel: bool = kernel):
            if kernel:
                update_rows(
                    local.optimizer, local.optimizer_arguments, rows, gradient, optimizer.state, 1e-3, 1
                )  # fmt: skip
            else:  # which may write into the gradient
                optimizer._step_by_operations(rows, gradient.clone(), 1e-3, 1)

        step()
        sides.append(rows.clone())
        moments.append(len(optimizer.state))
        took.append(measure(device, repeats, step))
    # Parameters and moments are read and written, gradients are read.
    moved = 4 * clients * size * (2 + 1 + 2 * moments[0])
    return {
        "what": f"update, {name}",
        "clients": clients,
        "parameters": size,
        "ms, operations": took[0],
        "ms, kernel": took[1],
        "times": took[0] / took[1],
        "GB/s, kernel": moved / took[1] / 1e6,
        "difference": float((sides[0] - sides[1]).abs().max()),
    }


def compare_steps(
    name: str, clients: int, batch: int, precision: str, device: str, repeats: int
) -> dict[str, Any]:
    """Time some steps of Adam for all clients by each engine."""
    layout = Layout(NETS[name]()).to(device)
    features = next(layout.train_module.parameters()).shape[1]
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(clients * batch, features, generator=draws).to(device)
    y = torch.randint(0, 10, (clients * batch,), generator=draws).to(device)
    places = torch.arange(clients * batch, device=device).reshape(clients, 1, batch)
    work = TrainingWork(
        RawSamples(x, y, x.dtype), places.repeat(1, STEPS, 1),
        torch.full((clients, STEPS), batch), LocalTraining(),
    )  # fmt: skip
    rows = layout.own_values()[None].repeat(clients, 1)
    row: dict[str, Any] = {
        "what": f"steps, {name}", "clients": clients, "batch": batch, "precision": precision,
    }  # fmt: skip
    losses: dict[str, Tensor] = {}

    def time_engine(engine: VmapEngine | TritonEngine, title: str) -> None:
        losses[title] = engine.train(rows.clone(), work, clients)
        took = measure(device, repeats, lambda: engine.train(rows.clone(), work, clients))
        row[f"us a client and step, {title}"] = 1e3 * took / clients / STEPS

    vmap = VmapEngine(layout, cross_entropy, precision)
    with mock.patch.object(optim, "find_fused_update", return_value=None):
        time_engine(vmap, "vmap")
    time_engine(vmap, "vmap, one update")
    engine = TritonEngine(layout, cross_entropy, x[:8], y[:8], precision)
    row["s, compile and check"] = engine.compile_seconds
    for warps in (4, 8):
        engine.program.warps = warps
        time_engine(engine, f"triton, {warps} warps")
    worst = max(float((found - losses["vmap"]).abs().max()) for found in losses.values())
    return row | {"difference": worst}


def iterate_cells(options: argparse.Namespace) -> Iterator[tuple[Callable[..., Any], tuple]]:
    """Give what is measured: the largest questions first, as time may end."""
    for size in options.sizes:
        for name in UPDATES:
            yield compare_updates, (name, options.clients[-1], size)
    for precision in options.precisions:
        for clients in reversed(options.clients):
            for net in options.models:
                for batch in options.batches:
                    yield compare_steps, (net, clients, batch, precision)


def run_cells(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure until the time is up; return a row for everything."""
    rows, ends = [], time.monotonic() + options.seconds
    for function, given in iterate_cells(options):
        row: dict[str, Any] = {"what": f"{function.__name__}{given}"}
        if time.monotonic() > ends:
            row["error"] = f"left out: {options.seconds:g} s were over"
        else:
            try:
                row = function(*given, options.device, options.repeats)
            except (
                Exception
            ) as error:  # of Triton, a compiler or the driver: the next cell may work
                row["error"] = f"{type(error).__name__}: {first_line(error)}"
        rows.append(row)
        print(
            {key: f"{one:.3g}" if isinstance(one, float) else one for key, one in row.items()},
            flush=True,
        )
    return rows


def main() -> None:
    """Measure every cell and write the rows."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", nargs="+", default=["mlp-512", "mlp-64-norm"], choices=NETS)
    parser.add_argument("--clients", nargs="+", type=int, default=[100, 1000])
    parser.add_argument("--batches", nargs="+", type=int, default=[8, 32])
    parser.add_argument("--sizes", nargs="+", type=int, default=[407_050, 62_006])
    parser.add_argument("--precisions", nargs="+", default=["full", "tf32", "bf16"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    try:
        devices.check_device(options.device)
    except CoterieError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    write_results(
        options.out,
        run_cells(options),
        ("engine", "models"),
        vars(options) | {"devices": devices.describe_devices()},
        order=210,
    )


if __name__ == "__main__":
    main()
