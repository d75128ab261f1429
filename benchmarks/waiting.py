"""Wait for slow clients, to a deadline, or for nobody: the studies `stragglers/*` after equal time.

    python benchmarks/waiting.py --out docs/reference/runs/waiting/stragglers.json
    python benchmarks/waiting.py --runs runs --seeds 2

Each study runs with slow clients that take 1, 2, 5 and 10 times as long as the others. What is
compared is the test accuracy of a method that waits with that of the same method that does not, or
not beyond a deadline, when both have taken as many seconds of virtual time, by seed and client. Runs
are kept below `--runs`: the same command goes on where it was stopped. CIFAR-10 is read from the
folder that the environment variable COTERIE_DATA names.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coterie._util.origin import write_results
from coterie.results.equal_budget import EqualBudget, rank_at_equal_budget
from coterie.results.pairs import Pair
from coterie.studies.config import load_study
from coterie.studies.run import run_study

STUDIES = ("stragglers/digits", "stragglers/cifar10", "stragglers/hospitals")
SLOWER = (1, 2, 5, 10)
"""How many times as long as the others slow clients take."""
WAYS = ("no waiting", "deadline")
"""What a method's label ends with that does not wait for everybody."""
SPEAKS_OF = ("data", "engine", "exchange", "methods", "runtime", "simulation", "studies/builtin")


def list_seconds(study: str, slower: int) -> list[int]:
    """Return the seconds of a local training of each client; the study has 10 for the slow ones."""
    time = load_study(study).methods[0].settings.time or {}
    return [slower if seconds > 1 else 1 for seconds in time["round_seconds"]]


def list_changes(study: str, slower: int) -> list[str]:
    """Return what makes slow clients of a study so slow, in all its methods.

    In step, methods do as many rounds as fit into the time that the others take: later ones are not
    compared.
    """
    seconds, asked = list_seconds(study, slower), load_study(study)
    changes = [f"time.round_seconds={seconds}"]
    for method in asked.methods:
        time = method.settings.time or {}
        if "deadline_seconds" in time:
            changes.append(f'methods."{method.label}".time.round_seconds={seconds}')
        elif method.settings.schedule == "synchronous":
            rounds = method.settings.rounds // slower
            changes.append(f'methods."{method.label}".rounds={rounds}')
    return changes


def run_point(study: str, slower: int, out: Path, seeds: int | None, workers: int) -> EqualBudget:
    """Run a study at one speed of its slow clients, and rank its methods at equal time."""
    name = f"{study}-{slower}".replace("/", "-")
    changes = [*list_changes(study, slower), f'name="{name}"']
    if seeds is not None:
        changes.append(f"seeds={seeds}")
    run_study(load_study(study, changes), out=out, workers=workers)
    return rank_at_equal_budget(out / name, unit="seconds")


def compare_ways(found: EqualBudget) -> Iterator[dict[str, Any]]:
    """Return for each method how much better it is when it does not wait, after equal time."""
    rows = {row.label: row for row in found.rows}
    for label, waits in rows.items():
        for way in WAYS:
            free = rows.get(f"{label}, {way}")
            if free is None:
                continue
            pair = find_pair(found, free.label, label)
            yield {
                "method": label, "way": way, "seconds": found.budget, "seeds": len(found.seeds),
                "rounds that wait": waits.rounds, "in step": waits.value, "value": free.value,
                "difference": pair.difference, "low": pair.low, "high": pair.high, "overlap": pair.overlap,
            }  # fmt: skip


def find_pair(found: EqualBudget, one: str, other: str) -> Pair:
    """Return the pair of two methods, that says by how much the first is better."""
    for pair in found.pairs:
        if pair.key == {one, other}:
            return pair if pair.method_a == one else pair.swap_methods()
    raise LookupError(f"no pair of {one} and {other}")


def main() -> None:
    """Run what is not there yet, and write the file of results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="the file of results")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where runs are kept")
    parser.add_argument("--seeds", type=int, help="fewer or more than the studies have")
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    rows = []
    for study in STUDIES:
        for slower in SLOWER:
            found = run_point(study, slower, given.runs, given.seeds, given.workers)
            for row in compare_ways(found):
                rows.append({"study": study, "times slower": slower, **row})
                print(rows[-1], flush=True)
    if given.out:
        settings = {"studies": list(STUDIES), "slower": list(SLOWER), "seeds": given.seeds}
        write_results(given.out, rows, SPEAKS_OF, settings)


if __name__ == "__main__":
    main()
