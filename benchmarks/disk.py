"""Data larger than the memory: speed and peak memory of training on inputs of a disk.

    python benchmarks/disk.py --out docs/reference/runs/performance/disk.json

A file of random images is trained on by FedAvg for some rounds, in processes of their own: with all
of it read into memory, and as a memory map with a limit on the memory of the process. Both are
started in turn. Before each run the system is asked to forget the file, so that it is read from the
disk; what is compared is the training time that a run reports. Linux only.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _measured import resident

from coterie import FedAvg, LocalTraining, Settings, from_arrays, simulate
from coterie._util.origin import write_results
from coterie.rng import Rng

GIB = 1 << 30
SHAPE = (3, 32, 32)
CLIENTS, ROUNDS = 8, 1
_PIECE = 10_000  # images that are written at once


def make_file(path: Path, size: float) -> int:
    """Write a file of random images, and return their number."""
    number = int(size * GIB) // int(np.prod(SHAPE))
    stream = Rng(0).generator("benchmark.disk")
    with path.open("wb") as file:
        for start in range(0, number, _PIECE):
            count = min(_PIECE, number - start)
            file.write(stream.integers(0, 256, (count, *SHAPE), dtype=np.uint8).tobytes())
    return number


def forget_file(path: Path) -> None:
    """Ask the system to drop what it keeps of a file in memory."""
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def run_side(path: Path, engine: str, model: str, limit: float) -> dict[str, Any]:
    """Run one side in this process; `limit` is 0 for data in memory."""
    torch.set_num_threads(1)
    x: Any = np.memmap(path, dtype=np.uint8, mode="r").reshape(-1, *SHAPE)
    y, owners = np.arange(len(x)) % 10, np.arange(len(x)) % CLIENTS
    if limit:
        # Counts all memory of the process but that of files, which the system can take back.
        resource.setrlimit(resource.RLIMIT_DATA, (int(limit * GIB),) * 2)
    else:
        x = np.array(x)
    data = from_arrays(x, y, clients=owners)
    local = LocalTraining(batch_size=64, lr=0.01)
    settings = Settings(rounds=ROUNDS, engine=engine, local=local, warmup_epochs=0, check=False)
    cpu = sum(os.times()[:2])
    run = simulate(data, FedAvg(), model=model, settings=settings)
    return {
        "train_s": run.timing["train_s"],
        "wall_s": run.timing["wall_s"],
        "cpu_s": sum(os.times()[:2]) - cpu,
        "samples": run.timing["train_samples"],
        "anonymous_gib": (resident(name="RssAnon") or 0) / GIB,
        "sum": float(run.params.double().sum()),
    }


def start_side(path: Path, engine: str, model: str, limit: float) -> dict[str, Any]:
    """Run one side in a process of its own."""
    forget_file(path)
    command = [sys.executable, __file__, "--side", str(path), engine, model, str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def compare_sides(path: Path, engine: str, model: str, limit: float, number: int) -> dict[str, Any]:
    """Return the speed on a disk in units of that in memory, as the median of turns."""
    turns = []
    for _ in range(number):
        inside = start_side(path, engine, model, 0)
        outside = start_side(path, engine, model, limit)
        assert inside["sum"] == outside["sum"], "the same models"
        turns.append((inside, outside))
    return {
        "engine": engine,
        "model": model,
        "speed": statistics.median(a["train_s"] / b["train_s"] for a, b in turns),
        "speed by processor time": statistics.median(a["cpu_s"] / b["cpu_s"] for a, b in turns),
        "train_s in memory": statistics.median(a["train_s"] for a, _ in turns),
        "train_s on disk": statistics.median(b["train_s"] for _, b in turns),
        "GiB after the run, in memory": max(a["anonymous_gib"] for a, _ in turns),
        "GiB after the run, on disk": max(b["anonymous_gib"] for _, b in turns),
    }


def main() -> None:
    """Measure, and write the file of results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--size", type=float, default=3.0, help="GiB of images")
    parser.add_argument("--limit", type=float, default=2.0, help="GiB of memory on a disk")
    parser.add_argument("--cells", nargs="+", default=["compiled:lenet-5", "compiled:mlp-c"])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--side", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        path, engine, model, limit = given.side
        print(json.dumps(run_side(Path(path), engine, model, float(limit))))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "images.bin"
        make_file(path, given.size)
        cells = [
            compare_sides(path, *cell.split(":"), given.limit, given.turns) for cell in given.cells
        ]
    for cell in cells:
        print(cell)
    if given.out:
        settings = {name: value for name, value in vars(given).items() if name != "side"}
        write_results(given.out, cells, ("data", "engine"), settings)


if __name__ == "__main__":
    main()
