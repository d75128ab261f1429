"""Measure what a round costs when a run is hosted in blocks: time, bytes moved, and memory.

    python benchmarks/blocks.py --out blocks.json
        1, 2 and 4 blocks of 40 clients over Ray
    python benchmarks/blocks.py --large 100000 --out blocks-large.json
        Random over clients of a linear model

Each number is compared with one process. Blocks are actors of a Ray that is started on this
machine. All of them share its processors, which the one process uses with as many threads, so the
figures show what blocks cost, not what several machines gain.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import ray
import torch
from _measured import images, resident

from coterie._util.origin import write_results
from coterie.cluster import actors
from coterie.cluster.actors import BlockActors
from coterie.cluster.blocks import BlockSpec, RoundReport, simulate_in_blocks
from coterie.cluster.place import connect_ray, parse_place
from coterie.data.federation import Federation, TestSet
from coterie.engine import use_threads
from coterie.methods import METHODS
from coterie.rng import Rng
from coterie.runtime.settings import Settings
from coterie.simulation.run import simulate


class Measured:
    """Starts blocks, and takes note of their rounds.

    Args:
        cpus: threads of each block.

    Attributes:
        sent: bytes that blocks sent each other, by round.
        seconds: of each round, as this process waits for it.
        most: the peak memory of each block's process, in bytes.
        ready: seconds until all blocks were there.
    """

    def __init__(self, cpus: int) -> None:
        self.cpus = cpus
        self.sent, self.seconds, self.most, self.ready = (
            list[int](),
            list[float](),
            list[int](),
            0.0,
        )

    @contextmanager
    def start(self, given: Iterable[BlockSpec]) -> Iterator[BlockActors]:
        """Start actors, as `actors.start_actors` does."""
        began = time.perf_counter()
        with actors.start_actors(given, cpus=self.cpus) as crew:
            self.ready, each = time.perf_counter() - began, crew.call_all

            def timed(name: str, *arguments: Any) -> list[Any]:
                began = time.perf_counter()
                found = each(name, *arguments)
                if name == "run_round" and isinstance(found[0], RoundReport):
                    self.seconds.append(time.perf_counter() - began)
                    self.sent.append(sum(one.sent for one in found))
                    pids = [pid for _, pid in ray.get([host.place.remote() for host in crew.hosts])]
                    self.most = [resident(pid, "VmHWM") or 0 for pid in pids]
                return found

            crew.call_all = timed
            yield crew


def rounds_of(
    kind: str, federation: Federation, model: str, settings: Settings, blocks: int | None
) -> dict[str, Any]:
    """Run a method, in one process or in blocks; say what a round of it cost, the first two left out."""
    cores = os.cpu_count() or 1
    times, measured = [time.perf_counter()], Measured(max(1, cores // (blocks or 1)))
    more: dict[str, Any] = {"model": model, "settings": settings, "seed": 0}

    def note(_: object) -> None:
        times.append(time.perf_counter())

    if blocks is None:
        use_threads(cores)
        simulate(federation, METHODS[kind](), observer=note, **more)
    else:
        simulate_in_blocks(
            federation, METHODS[kind](), observer=note, blocks=blocks, start=measured.start, **more
        )
    gaps = [b - a for a, b in pairwise(times[2:])]
    return {
        "method": kind,
        "clients": len(federation),
        "hosted in": "one process" if blocks is None else f"{blocks} block{'s' * (blocks > 1)}",
        "ms a round": 1000 * statistics.median(gaps),
        "of it in the blocks": 1000 * statistics.median(measured.seconds[2:])
        if measured.seconds
        else None,
        "KiB moved a round": statistics.median(measured.sent[2:]) / 1024 if measured.sent else 0.0,
        "s until all are there": measured.ready,
        "peak MiB of a block": max(measured.most, default=0) / 2**20,
        "peak MiB of this process": (resident(name="VmHWM") or 0) / 2**20,
    }


def large(clients: int, samples: int = 8, features: int = 8) -> Federation:
    """Make a population of many clients with a linear rule each of four clusters, and a test set for each cluster."""
    stream = Rng(0).generator("benchmarks.blocks")
    rules = stream.normal(size=(4, features, 3))
    cluster = torch.arange(clients) % 4
    x = torch.from_numpy(stream.normal(size=(clients, samples, features)).astype("float32"))
    values = torch.einsum("csf,cfk->csk", x, torch.from_numpy(rules).float()[cluster])
    split = torch.zeros(clients, samples, dtype=torch.int64)
    split[:, -2:] = 1
    tests = tuple(
        TestSet(
            t := torch.from_numpy(stream.normal(size=(30, features))).float(),
            (t @ rule).argmax(1),
            f"rule {c}",
        )
        for c, rule in enumerate(torch.from_numpy(rules).float())
    )
    return Federation(
        x=x, y=values.argmax(2), split=split, tests=tests, test_of=cluster, ids=torch.arange(clients),
        population=clients, classes=3, name="large",
    )  # fmt: skip


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--large", type=int, default=0, help="clients of a large population instead"
    )
    parser.add_argument("--blocks", type=int, default=4, help="blocks of the large population")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = list[dict[str, Any]]()
    with connect_ray(
        parse_place("ray:local"), num_cpus=os.cpu_count(), object_store_memory=1 << 30
    ):
        if arguments.large:
            data, kinds, model, counts = (
                large(arguments.large),
                ("random",),
                "linear",
                (arguments.blocks,),
            )
        else:
            data, kinds, model = images(40, 60, 28, 1), ("random", "dac", "fedavg"), "lenet-5"
            counts = (None, 1, 2, 4)
        settings = Settings(rounds=arguments.rounds, engine="vmap" if arguments.large else "auto")
        for kind in kinds:
            for blocks in counts:
                results.append(rounds_of(kind, data, model, settings, blocks))
                print(json.dumps(results[-1]), flush=True)
    if arguments.out is not None:
        order = 90 + bool(arguments.large)
        write_results(
            arguments.out,
            results,
            ("cluster", "exchange", "simulation"),
            vars(arguments),
            seeds=(0,),
            order=order,
        )


if __name__ == "__main__":
    main()
