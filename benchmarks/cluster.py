"""Whole runs on a Ray of this machine compared with its own worker processes: seconds, start, and the bytes that move.

    python benchmarks/cluster.py --out docs/reference/runs/performance/cluster.json

A study with one round runs before, so that everything is compiled. The runs of one study are then
done in turns by both, and the medians compared. Ray's workers stay from study to study; our own
begin with each, which counts. One machine cannot show what a network costs; the bytes that would go
over it are counted.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from coterie._util.origin import write_results
from coterie.cluster.place import connect_ray, parse_place
from coterie.cluster.runs import RayRuns
from coterie.studies import config
from coterie.studies.definition import StudyConfig
from coterie.studies.run import run_study

STORE = 200 * 2**20


def study_of(rounds: int, seeds: int) -> StudyConfig:
    """Two methods of the bundled study, with some rounds and seeds."""
    own = [
        "methods=[{kind='dac'},{kind='random'}]",
        f"rounds={rounds}",
        f"seeds={list(range(seeds))}",
    ]
    return config.load_study("rotated-digits", own)


def seconds(study: StudyConfig, workers: int, over: RayRuns | None) -> float:
    """Run a study in an empty folder and return how long it took."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        run_study(study, out=folder, workers=workers, over=over)
        return time.perf_counter() - started


def main() -> None:
    """Measure both sides in turns and write a row of each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    study, short = study_of(given.rounds, given.seeds), study_of(1, given.workers)
    times: dict[str, list[float]] = {"local workers": [], "ray": []}
    begun = time.perf_counter()
    with connect_ray(parse_place("ray:local"), num_cpus=given.workers, object_store_memory=STORE):
        start = time.perf_counter() - begun
        first = seconds(short, given.workers, RayRuns())
        warm = seconds(short, given.workers, RayRuns())
        seconds(short, given.workers, None)
        for _ in range(given.repeats):
            times["local workers"].append(seconds(study, given.workers, None))
            over = RayRuns()
            times["ray"].append(seconds(study, given.workers, over))
    middle = {name: statistics.median(values) for name, values in times.items()}
    results: list[dict[str, Any]] = [
        {
            "where": name,
            "runs": len(study.methods) * len(study.seeds),
            "median, s": round(middle[name], 2),
            "all, s": [round(value, 2) for value in values],
            "throughput over local workers": round(middle["local workers"] / middle[name], 3),
        }
        for name, values in times.items()
    ]
    results[1] |= {
        "start of Ray, s": round(start, 2),
        "first short study, s": round(first, 2),
        "second short study, s": round(warm, 2),
        "sent, bytes": over.sent.data,
        "home, bytes": over.sent.home,
    }
    for row in results:
        print(row)
    if given.out is not None:
        write_results(
            given.out, results, ("cluster", "simulation", "studies"), vars(given), seeds=study.seeds
        )


if __name__ == "__main__":
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    main()
