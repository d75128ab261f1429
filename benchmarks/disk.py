"""Data larger than the memory: speed and peak memory of training on inputs of a disk.

    python benchmarks/disk.py --out docs/reference/runs/performance/disk.json
    python benchmarks/disk.py --size 28 --limit 4 --inside 1 --steps 1500

A file of random images is trained on by FedAvg for a round, in processes of their own: read into
memory, and as a memory map with a limit on the memory of the process. Both are started in turn.
Before each run the system is asked to forget the file, so that it is read from the disk; what is
compared is the training samples a second, by the time that a run reports. Of a file that is larger
than the memory, the side in memory has a part. Linux only.
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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _measured import resident

from coterie import FedAvg, LocalTraining, Settings, Split, from_arrays, simulate
from coterie._util.origin import write_results
from coterie.data.rows import StoredRows
from coterie.rng import Rng

GIB = 1 << 30
SHAPE = (3, 32, 32)
CLIENTS, ROUNDS = 8, 1
# Training is measured: validation and tests have one sample in a thousand.
SPLIT = Split(validation_fraction=0.001, test_fraction=0.001)
_PIECE = 10_000  # images that are written at once
_AT_ONCE = 2_700  # images that are read at once: 8 MiB, as in training


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


@dataclass(frozen=True)
class Side:
    """One run.

    Args:
        path: of the file.
        engine: that trains.
        model: that is trained.
        inside: GiB of the file that are read into memory before; 0 for data on the disk.
        limit: GiB of memory of the process, where data are on the disk.
        steps: of each client; an epoch when None.
    """

    path: str
    engine: str
    model: str
    inside: float
    limit: float
    steps: int | None


def open_images(path: str | Path) -> np.memmap:
    """Return the images of a file."""
    return np.memmap(path, dtype=np.uint8, mode="r").reshape(-1, *SHAPE)  # type: ignore[return-value]


def run_side(side: Side) -> dict[str, Any]:
    """Run one side in this process."""
    torch.set_num_threads(1)
    x: Any = open_images(side.path)
    if side.inside:
        x = np.array(x[: int(side.inside * GIB) // int(np.prod(SHAPE))])
    else:
        # Counts all memory of the process but that of files, which the system can take back.
        resource.setrlimit(resource.RLIMIT_DATA, (int(side.limit * GIB),) * 2)
    y, owners = np.arange(len(x)) % 10, np.arange(len(x)) % CLIENTS
    data = from_arrays(x, y, clients=owners, split=SPLIT)
    local = LocalTraining(batch_size=64, lr=0.01, steps=side.steps)
    engine, model = side.engine, side.model
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


def start_side(side: Side) -> dict[str, Any]:
    """Run one side in a process of its own."""
    forget_file(Path(side.path))
    command = [sys.executable, __file__, "--side", json.dumps(asdict(side))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def compare_sides(side: Side, inside: float, number: int) -> dict[str, Any]:
    """Return the speed on a disk in units of that in memory, as the median of turns.

    Args:
        side: on the disk.
        inside: GiB of the file that the side in memory has.
        number: of turns.
    """
    turns = []
    for _ in range(number):
        within, outside = start_side(replace(side, inside=inside)), start_side(side)
        if within["samples"] == outside["samples"] and not side.steps:
            assert within["sum"] == outside["sum"], "the same models"
        turns.append((within, outside))

    def rate(run: dict[str, Any], seconds: str) -> float:
        return run["samples"] / run[seconds]

    def median(of: str, number: int) -> float:
        return statistics.median(rate(turn[number], of) for turn in turns)

    def ratio(of: str) -> float:
        return statistics.median(rate(b, of) / rate(a, of) for a, b in turns)

    return {
        "engine": side.engine,
        "model": side.model,
        "samples": turns[0][1]["samples"],
        "speed": ratio("train_s"),
        "speed by processor time": ratio("cpu_s"),
        "samples a second in memory": median("train_s", 0),
        "samples a second on disk": median("train_s", 1),
        "GiB after the run, in memory": max(a["anonymous_gib"] for a, _ in turns),
        "GiB after the run, on disk": max(b["anonymous_gib"] for _, b in turns),
    }


def measure_reads(path: Path, seconds: float = 10) -> float:
    """Return how many samples in no order the disk gives in a second, without any training."""
    forget_file(path)
    table = StoredRows.open(open_images(path), lambda x: x)
    draws, number = Rng(1).generator("benchmark.disk"), 0
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        rows = torch.from_numpy(draws.integers(0, len(table), _AT_ONCE))
        number += len(table[rows])
    return number / (time.perf_counter() - began)


def main() -> None:
    """Measure, and write the file of results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--size", type=float, default=3.0, help="GiB of images")
    parser.add_argument("--limit", type=float, default=2.0, help="GiB of memory on a disk")
    parser.add_argument("--inside", type=float, help="GiB of the file in memory; all by default")
    parser.add_argument("--steps", type=int, help="of each client; an epoch by default")
    parser.add_argument("--file", type=Path, help="images that are there; made by default")
    parser.add_argument("--cells", nargs="+", default=["compiled:lenet-5", "compiled:mlp-c"])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        print(json.dumps(run_side(Side(**json.loads(given.side)))))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = given.file
        if path is None:
            path = Path(folder) / "images.bin"
            make_file(path, given.size)
        reads = measure_reads(path)
        cells = []
        for cell in given.cells:
            side = Side(str(path), *cell.split(":"), 0.0, given.limit, given.steps)
            found = compare_sides(side, given.inside or given.size, given.turns)
            cells.append({**found, "samples a second read alone": reads})
    for cell in cells:
        print(cell)
    if given.out:
        settings = {
            name: value for name, value in vars(given).items() if name not in ("side", "file")
        }
        write_results(given.out, cells, ("data", "engine"), settings)


if __name__ == "__main__":
    main()
