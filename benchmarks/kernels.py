"""What kernels in Triton gain on a GPU, in under five minutes and without a network.

    python -m benchmarks.kernels --device cuda --out kernels.json

Whole training first: an epoch of 80 samples a client with Adam, as benchmarks/device.py measures
it, by the vmap engine, with either update, and by the engine "triton" with 4 and 8 warps, and how
far their losses differ. Beside each time is what is aimed at for 1,000 clients on an H100, either a
time or a share of its peak in float32; `--peak` is that of another device. Then the update: a step
of each optimizer for all clients by PyTorch's operations and by the one kernel, with the bandwidth
that it reaches, and how far the two differ. At last the same training in shorter precisions, and
with fewer clients. Each time is the median of some repeats after one that does not count; what
fails is a row with its error, and what there is no time for is a row that says so: nothing begins
after three minutes. No GPU has run it yet. Without one it tries itself out on a CPU, where Triton
interprets (`TRITON_INTERPRET=1`) and times mean nothing:

    TRITON_INTERPRET=1 python -m benchmarks.kernels --device cpu --clients 2 --models linear --sizes 1500 --repeats 1 --out kernels.json
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks._measured import flops
from benchmarks.zoo import four_groups, resnet
from coterie._util.origin import write_results
from coterie.engine import TritonEngine, VmapEngine, cross_entropy, optim
from coterie.engine import device as devices
from coterie.engine._work import RawSamples, TrainingWork
from coterie.engine.optim import LocalTraining, RowOptimizer
from coterie.errors import CoterieError, first_line
from coterie.models import layout as models
from coterie.models.layout import Layout


@dataclass(frozen=True)
class Net:
    """A network that is measured.

    Args:
        build: makes it.
        features: shape of an input.
        batch: samples of a batch.
        target: microseconds a client and epoch that are aimed at, for 1,000 clients on an H100.
        share: of the device's peak in float32 that is aimed at.
        classes: of its outputs.
    """

    build: Callable[[], nn.Module]
    features: tuple[int, ...]
    batch: int = 8
    target: float | None = None
    share: float | None = None
    classes: int = 10


def _built(name: str, classes: int = 10) -> tuple[Callable[[], nn.Module], tuple[int, ...]]:
    features = (1, 28, 28) if name == "cnn-b" else (3, 32, 32)
    return partial(models.NETS[name], features, classes), features


NETS: dict[str, Net] = {
    "cnn-a": Net(*_built("cnn-a"), target=40),
    "cnn-b": Net(*_built("cnn-b"), batch=32, target=40),
    "mlp-512": Net(
        lambda: nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10)), (784,), target=80
    ),
    # FedGWC's CNN
    "cnn-y": Net(*_built("cnn-y", 100), share=1 / 3, classes=100),
    "resnet8-bn": Net(partial(resnet, 1, nn.BatchNorm2d), (3, 32, 32), share=1 / 3),
    "resnet8-gn": Net(partial(resnet, 1, four_groups), (3, 32, 32)),
    "mlp-64-norm": Net(
        lambda: nn.Sequential(nn.Linear(784, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 10)),
        (784,),
    ),
    "linear": Net(lambda: nn.Linear(64, 10), (64,)),
}
MODELS = ["cnn-a", "cnn-b", "mlp-512", "cnn-y", "resnet8-bn"]
UPDATES: dict[str, dict[str, Any]] = {
    "sgd": {},
    "sgd, momentum": {"momentum": 0.9, "weight_decay": 1e-4},
    "adam": {},
    "adamw": {},
}
SAMPLES = 80  # of a client: ten batches of 8, or three of at most 32


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


def compare_training(
    name: str, clients: int, precision: str, device: str, repeats: int, peak: float
) -> dict[str, Any]:
    """Time an epoch of Adam for all clients by each engine."""
    net = NETS[name]
    layout = Layout(net.build()).to(device)
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(clients * SAMPLES, *net.features, generator=draws).to(device)
    y = torch.randint(0, net.classes, (clients * SAMPLES,), generator=draws).to(device)
    starts = range(0, SAMPLES, net.batch)
    sizes = [min(net.batch, SAMPLES - start) for start in starts]
    places = torch.zeros(clients, len(sizes), net.batch, dtype=torch.int64)
    own = torch.arange(clients * SAMPLES).reshape(clients, SAMPLES)
    for step, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        places[:, step, :size] = own[:, start : start + size]
    work = TrainingWork(
        RawSamples(x, y, x.dtype), places.to(device), torch.tensor([sizes] * clients),
        LocalTraining(),
    )  # fmt: skip
    rows = layout.own_values()[None].repeat(clients, 1)
    row: dict[str, Any] = {
        "what": f"training, {name}", "clients": clients, "batch": net.batch,
        "precision": precision,
    }  # fmt: skip
    losses: dict[str, Tensor] = {}
    times: dict[str, float] = {}

    def time_engine(engine: VmapEngine | TritonEngine, title: str) -> None:
        losses[title] = engine.train(rows.clone(), work, clients)
        took = measure(device, repeats, lambda: engine.train(rows.clone(), work, clients))
        times[title] = row[f"us a client, {title}"] = 1e3 * took / clients

    vmap = VmapEngine(layout, cross_entropy, precision)
    with mock.patch.object(optim, "find_fused_update", return_value=None):
        time_engine(vmap, "vmap")
    time_engine(vmap, "vmap, one update")
    engine = TritonEngine(layout, cross_entropy, x[:8], y[:8], precision)
    row["s, compile and check"] = engine.compile_seconds
    for warps in engine.program.tiles:
        engine.program.set_warps(warps)
        time_engine(engine, f"triton, {warps} warps")
    best = min(took for title, took in times.items() if title.startswith("triton"))
    # Of forward and backward; the update is not counted.
    work_done = flops(net.build(), x[:SAMPLES].cpu(), y[:SAMPLES].cpu())
    row |= {
        "us a client, aim": net.target if clients == 1000 and precision == "full" else None,
        "TFLOP/s, triton": work_done / best / 1e6,
        "share of the peak": work_done / best / 1e6 / peak,
        "share of the peak, aim": net.share if precision == "full" else None,
    }
    worst = max(float((found - losses["vmap"]).abs().max()) for found in losses.values())
    return row | {"difference": worst}


def iterate_cells(options: argparse.Namespace) -> Iterator[tuple[Callable[..., Any], tuple]]:
    """Give what is measured: the largest questions first, as time may end."""
    common = (options.device, options.repeats)
    clients = sorted(options.clients, reverse=True)
    training: list[tuple[Callable[..., Any], tuple]] = []
    for population in clients:
        for precision in options.precisions:
            for net in options.models:
                given = (net, population, precision, *common, options.peak)
                training.append((compare_training, given))
    yield from training[: len(options.models)]
    for size in options.sizes:
        for name in UPDATES:
            yield compare_updates, (name, clients[0], size, *common)
    yield from training[len(options.models) :]


def run_cells(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure until the time is up; return a row for everything."""
    rows, ends = [], time.monotonic() + options.seconds
    for function, given in iterate_cells(options):
        row: dict[str, Any] = {"what": f"{function.__name__}{given}"}
        if time.monotonic() > ends:
            row["error"] = f"left out: {options.seconds:g} s were over"
        else:
            try:
                row = function(*given)
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
    parser.add_argument("--models", nargs="+", default=MODELS, choices=NETS)
    parser.add_argument("--clients", nargs="+", type=int, default=[1000, 100])
    parser.add_argument("--sizes", nargs="+", type=int, default=[407_050, 62_006])
    parser.add_argument("--precisions", nargs="+", default=["full", "tf32", "bf16"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--peak", type=float, default=67.0, help="of the device in float32, TFLOP/s; 67: an H100"
    )
    parser.add_argument(
        "--seconds", type=float, default=180, help="after which nothing more begins"
    )
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
