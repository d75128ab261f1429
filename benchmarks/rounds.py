r"""Measure a full-size round of two papers' studies with several engines or commits in turn.

    python benchmarks/rounds.py --engines auto@f5a5d31 auto \
        --out docs/reference/runs/performance/rounds.json

A round has the settings of the built-in study, on random images of the same shapes: FedGWC with
CNN-100 on CIFAR-100 (100 clients with 500 images) and SosicFL with SimpleCNN on CIFAR-10 (100
clients with 400). ENGINE is "auto" or the name of an engine of this code; ENGINE@COMMIT is an
engine of an earlier commit of this repository. Each run is a process of its own with one thread,
as one of several seeds has. Ratios are taken within a turn, since the machine's speed drifts.
"""

import argparse
import io
import itertools
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from _measured import images

import coterie
from coterie._util.origin import write_results
from coterie.engine import use_threads
from coterie.errors import CoterieError
from coterie.functional.metrics import LOSS
from coterie.simulation import workers
from coterie.simulation.run import Progress, simulate
from coterie.studies import config

ROOT = Path(__file__).resolve().parents[1]
STUDIES = {
    "fedgwc": ("fedgwc/cifar100-clean-noise-blur", "FedGWC", 100),
    "sosicfl": ("sosicfl/cifar10-simplecnn-dirichlet", "SosicFL", 10),
}
"""Each with its study, the method's label and the number of classes."""
_SAME = 1e-2  # relative difference of the losses after the last round


class DifferentResultsError(CoterieError, RuntimeError):
    """Two sides do not compute the same: nothing is reported."""


@dataclass(frozen=True)
class Timing:
    """One run.

    Args:
        first: seconds from the start to the end of the first round: building, tracing and compiling
            included.
        rounds: seconds of each round after it.
        loss: the clients' mean training loss in the last round.
    """

    first: float
    rounds: tuple[float, ...]
    loss: float

    @property
    def middle(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.rounds)


def run(name: str, engine: str, rounds: int) -> Timing:
    """Run a study for some rounds in this process.

    Args:
        name: of STUDIES.
        engine: "auto" or an engine's name.
        rounds: at least 2.
    """
    study_name, label, classes = STUDIES[name]
    study = config.load_study(study_name)
    entry = study.find_method(label)
    data = images(
        study.data.num_clients, study.data.train + study.data.validation, 32, 3, classes=classes,
        validation=study.data.validation,
    )  # fmt: skip
    data = replace(data, mean=(0.5,) * 3, std=(0.25,) * 3)
    settings = replace(
        entry.settings,
        rounds=rounds,
        engine=engine,
        eval_every=0,
        validate_every=rounds,
        metrics=(),
    )
    ends, losses = [time.perf_counter()], []

    def note(progress: Progress) -> None:
        if progress.round >= 0:
            ends.append(time.perf_counter())
            losses.append(progress.reported[LOSS.name])

    model = study.model
    # earlier commits knew built-in names alone
    named = model.named_model if hasattr(model, "source") else model.kind
    simulate(data, entry.method, model=named, settings=settings, observer=note)
    return Timing(
        ends[1] - ends[0],
        tuple(later - earlier for earlier, later in itertools.pairwise(ends[1:])),
        losses[-1],
    )


def source(commit: str, folder: Path) -> Path:
    """Return the folder with the package of a commit.

    Args:
        commit: its name, or empty for this code.
        folder: where files may be written.

    Raises:
        CoterieError: when there is no such commit.
    """
    if not commit:
        return Path(coterie.__file__).resolve().parents[1]
    target = folder / commit.replace("/", "_")
    if not target.exists():
        done = subprocess.run(
            ["git", "-C", str(ROOT), "archive", commit, "src"], capture_output=True, check=False
        )
        if done.returncode:
            raise CoterieError(
                f"found the commit {commit!r}; git says: {done.stderr.decode().strip()}"
            )
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as files:
            files.extractall(target, filter="data")
    return target / "src"


def alone(name: str, side: str, rounds: int, folder: Path) -> Timing:
    """Run a study in a process of its own.

    Args:
        name: of STUDIES.
        side: ENGINE or ENGINE@COMMIT.
        rounds: how many.
        folder: where files may be written.

    Raises:
        CoterieError: when the run fails.
    """
    engine, _, commit = side.partition("@")
    variables = {**os.environ, "PYTHONPATH": str(source(commit, folder)), "OMP_NUM_THREADS": "1"}
    asked = [sys.executable, __file__, "--cell", name, "--engines", engine, "--rounds", str(rounds)]
    done = subprocess.run(asked, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise CoterieError(f"{name} with {side} failed: {last}")
    found = json.loads(done.stdout.splitlines()[-1])
    return Timing(found["first"], tuple(found["rounds"]), found["loss"])


def rows(name: str, turns: Sequence[Mapping[str, Timing]]) -> list[dict[str, Any]]:
    """Return a row for each side: medians over the turns, and how many times as fast as the first side it is.

    Args:
        name: of STUDIES.
        turns: a timing of each side in each turn.

    Raises:
        DifferentResultsError: when two sides do not compute the same.
    """
    before = next(iter(turns[0]))
    out = []
    for side in turns[0]:
        ratios = [turn[before].middle / turn[side].middle for turn in turns]
        loss, expected = turns[0][side].loss, turns[0][before].loss
        if not abs(loss - expected) < _SAME * abs(expected):
            raise DifferentResultsError(
                f"{name}: the loss is {loss:g} with {side} and {expected:g} with {before}"
            )
        out.append({
            "study": STUDIES[name][0],
            "method": STUDIES[name][1],
            "engine": side,
            "seconds a round": statistics.median(turn[side].middle for turn in turns),
            f"times {before}": statistics.median(ratios),
            "from": min(ratios),
            "to": max(ratios),
            "start and first round, s": statistics.median(turn[side].first for turn in turns),
            "last loss": loss,
        })  # fmt: skip
    return out


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every study and write the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--studies", nargs="+", choices=list(STUDIES), default=list(STUDIES))
    parser.add_argument("--engines", nargs="+", default=["loop", "auto"], metavar="ENGINE[@COMMIT]")
    parser.add_argument(
        "--rounds", type=int, default=3, help="at least 2; the first one is reported apart"
    )
    parser.add_argument("--repeats", type=int, default=3, help="turns")
    parser.add_argument(
        "--cell", choices=list(STUDIES), help="run one study in this process and print its times"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    if options.rounds < 2 or options.repeats < 1:
        parser.error(
            f"found {options.rounds} rounds and {options.repeats} repeats; expected at least 2 and 1"
        )
    if options.cell is not None:
        torch.set_num_threads(1)
        use_threads(1)
        with workers.use_one_thread():
            print(json.dumps(vars(run(options.cell, options.engines[0], options.rounds))))
        return
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.studies:
            turns: list[dict[str, Timing]] = []
            for _ in range(options.repeats):
                turns.append(
                    {
                        side: alone(name, side, options.rounds, Path(folder))
                        for side in options.engines
                    }
                )
                print(
                    {side: round(each.middle, 3) for side, each in turns[-1].items()},
                    file=sys.stderr,
                    flush=True,
                )
            results += rows(name, turns)
    print(json.dumps(results, indent=1))
    if options.out is not None:
        speaks_of = ("engine", "methods/fedgwc.py", "methods/sosicfl.py", "models", "simulation")
        write_results(options.out, results, speaks_of, vars(options), order=25)


if __name__ == "__main__":
    try:
        main()
    except CoterieError as error:
        sys.exit(f"python benchmarks/rounds.py: {error}")
