r"""Compare the trainings a second of clients that do not wait with those of clients in step.

    python benchmarks/asynchronous.py --out docs/reference/runs/performance/asynchronous.json

LeNet-5 on images of 28 x 28, 60 training and 15 validation samples a client, Random with five peers,
the compiled engine on one thread. Speeds are lognormal (sigma 0.7, and 0.1 in each round), so the
fastest of 1,000 clients is about a hundred times as fast as the slowest. Seconds are those of the
processor, after the warm-up, so that other work on the machine does not count.
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from coterie._util.origin import write_results
from coterie.data.federation import Federation
from coterie.engine.task import LocalTraining
from coterie.methods.random_gossip import Random
from coterie.runtime.settings import Settings
from coterie.simulation.run import Progress, simulate
from coterie.testing import tiny_federation

SPEEDS = {"round_seconds": {"kind": "lognormal", "median": 1.0, "sigma": 0.7}, "jitter": 0.1}


def make_images(clients: int) -> Federation:
    """Return clients with images in single precision."""
    federation = tiny_federation(
        clients, 4, train=60, validation=15, features=(1, 28, 28), classes=10
    )
    assert isinstance(federation.x, torch.Tensor)
    tests = []
    for test in federation.tests:
        assert isinstance(test.x, torch.Tensor)
        tests.append(replace(test, x=test.x.float()))
    return replace(federation, x=federation.x.float(), tests=tuple(tests))


def measure(federation: Federation, rounds: int, **schedule: Any) -> tuple[int, float]:
    """Return how many trainings a run did after its warm-up, and the processor's seconds."""
    times: list[float] = []

    def note(progress: Progress) -> None:
        times.append(time.process_time())

    local = LocalTraining(batch_size=8, lr=0.001)
    settings = Settings(
        rounds=rounds, local=local, engine="compiled", evaluate="final", check=False, **schedule
    )
    run = simulate(federation, Random(5), model="lenet-5", settings=settings, observer=note)
    done = len(federation) * rounds
    own = run.metrics[run.metrics["metric"] == "own_rounds"]
    if len(own):
        done = int(own.loc[own["round"] == rounds - 1, "value"].sum())
    return done, times[-1] - times[0]


def main() -> None:
    """Measure and print, and write where asked."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    federation, rows = make_images(arguments.clients), []
    schedules = {"in step": {}, "not waiting": {"schedule": "asynchronous", "time": SPEEDS}}
    for name, schedule in schedules.items():
        done, seconds = measure(federation, arguments.rounds, **schedule)
        rate = done / seconds
        rows.append({"clients": arguments.clients, "schedule": name, "trainings": done})
        rows[-1] |= {"trainings a second": rate, "share of in step": 1.0}
        rows[-1]["share of in step"] = rate / rows[0]["trainings a second"]
        print(rows[-1], flush=True)
    if arguments.out is not None:
        write_results(arguments.out, rows, ("simulation",), vars(arguments), order=92)


if __name__ == "__main__":
    main()
