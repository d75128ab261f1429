"""Seconds to make a federation of many small clients from arrays.

python benchmarks/many_clients.py --out docs/reference/runs/performance/many-clients.json
"""

import argparse
import time
from pathlib import Path

import numpy as np

import coterie
from coterie._util.origin import write_results
from coterie.rng import Rng


def measure(clients: int, samples: int) -> dict[str, float]:
    """Return the seconds, and those of the processor, of `from_arrays` with so many samples of each client, in random order."""
    generator = Rng(0).generator("benchmark")
    x = generator.standard_normal((clients * samples, 8), dtype=np.float32)
    y = generator.integers(0, 3, len(x))
    owners = generator.permutation(np.repeat(np.arange(clients), samples))
    started, used = time.perf_counter(), time.process_time()
    federation = coterie.from_arrays(x, y, clients=owners)
    found = {
        "seconds": round(time.perf_counter() - started, 1),
        "processor seconds": round(time.process_time() - used, 1),
    }
    assert len(federation) == clients
    return found


def main() -> None:
    """Measure and print, and write where asked."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    measure(100, arguments.samples)  # the first call imports what is not measured
    results = []
    for clients in arguments.clients:
        found = measure(clients, arguments.samples)
        results.append({"clients": clients, "samples": arguments.samples, **found})
        print(results[-1])
    if arguments.out is not None:
        write_results(arguments.out, results, ("data",), vars(arguments), order=90)


if __name__ == "__main__":
    main()
