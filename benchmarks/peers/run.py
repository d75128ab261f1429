"""The same FedAvg cell through Coterie and through other frameworks, on this machine, in turn.

    python benchmarks/peers/run.py --out docs/reference/runs/performance/peers.json

Every framework is installed from PyPI into an environment of its own in the cache folder
(coterie-peers), where it is not there already, and gets the same data, first model and order of
samples. Each run of a framework has a run of Coterie right before it; the ratio is of the medians
of their rounds after the first. Nothing is reported when the last models differ by more than FEW
(after a few steps) or MANY (of the runs that are timed) of the way that Coterie's went: once in
some thousand steps a unit's input is zero but for rounding, and frameworks go two ways from there.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cell import Cell
from coterie_cell import network, orders

from coterie._util.origin import describe_machine, write_results
from coterie.errors import CoterieError
from coterie.models.layout import Layout, draw_initial_params
from coterie.rng import Rng
from coterie.simulation.workers import count_cores

HERE = Path(__file__).resolve().parent
BATCH = 8
FEW, MANY = 1e-3, 5e-2  # of the way from the first model to the last
# clients, samples and rounds of the first comparison: few enough that no unit is undecided
SMALL = (10, 16, 2)
MEASURED = 50  # samples a client whose loss is taken at the end
PINS = {
    "flower": ("torch==2.13.0", "numpy==2.4.6", "flwr[simulation]==1.41.0"),
    "pfl": ("torch==2.13.0", "numpy==2.4.6", "pfl==0.6.0"),
    "fedjax": (  # what FedJAX and Haiku import has gone from newer releases of JAX
        "fedjax==0.0.17",
        "jax==0.4.30",
        "jaxlib==0.4.30",
        "dm-haiku==0.0.12",
        "optax==0.2.3",
        "chex==0.1.86",
        "numpy==2.0.2",
        "scipy==1.14.1",
    ),
}
FRAMEWORKS = {
    "Flower": ("flower", ("flower_cell.py",), ()),
    "pfl": (
        "pfl",
        ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node={cores}", "pfl_cell.py"),
        (),
    ),
    "FedJAX, jit": ("fedjax", ("fedjax_cell.py",), ("jit",)),
    "FedJAX, pmap": ("fedjax", ("fedjax_cell.py",), ("pmap",)),
}
QUIET = {  # nothing is sent home; a worker of Ray has the priority of who started it
    "FLWR_TELEMETRY_ENABLED": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
}

Model = Mapping[str, np.ndarray]


class DifferentResultsError(CoterieError, RuntimeError):
    """Two frameworks do not compute the same: nothing is reported."""


@dataclass(frozen=True)
class Timing:
    """One run of a framework.

    Args:
        first: seconds from the start of the process to the end of the first round.
        rounds: seconds of each round after it.
        model: the last model.
        versions: of what ran.
    """

    first: float
    rounds: tuple[float, ...]
    model: Model
    versions: Mapping[str, str]


def environment(name: str) -> Path:
    """Return the Python of a framework's environment, made and filled where needed."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "coterie-peers"
    python = cache / name / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(cache / name)], check=True)
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", *PINS[name]], check=True)
    return python


def prepare(folder: Path, clients: int, samples: int, rounds: int) -> Cell:
    """Write the cell: classes that differ in a pattern under noise, and Coterie's order of samples."""
    stream = np.random.default_rng(0)
    y = stream.integers(10, size=(clients, samples))
    patterns = stream.standard_normal((10, 3, 32, 32), dtype=np.float32)
    x = np.lib.format.open_memmap(folder / "x.npy", "w+", np.float32, (clients, samples, 3, 32, 32))
    for client in range(clients):
        x[client] = patterns[y[client]] + stream.standard_normal(x.shape[1:], dtype=np.float32)
    x.flush()
    layout = Layout(network())
    start = layout.split_rows(draw_initial_params(network, layout, Rng(0)))
    cell = Cell(folder, rounds, BATCH, 0.05, count_cores())
    np.save(folder / "y.npy", y)
    np.save(folder / "order.npy", orders(clients, samples, rounds, cell.batch_size).numpy())
    np.savez(folder / "start.npz", **{name: value.numpy() for name, value in start.items()})  # type: ignore[arg-type]
    settings = {name: value for name, value in asdict(cell).items() if name != "folder"}
    (folder / "cell.json").write_text(json.dumps(settings))
    return cell


def run(cell: Cell, command: Sequence[str], threads: int | None) -> Timing | str:
    """Run a script in a process of its own; return what it measured, or the last line of its error.

    Args:
        cell: what it runs.
        command: the Python, the script and its arguments; {cores} stands for how many there are.
        threads: of the libraries that ask OMP_NUM_THREADS; None leaves them alone.
    """
    with tempfile.TemporaryDirectory() as out:
        *before, script = [
            part.format(cores=cell.cores) for part in command if part not in ("jit", "pmap")
        ]
        after = [part for part in command if part in ("jit", "pmap")]
        whole = [*before, str(HERE / script), str(cell.folder), out, *after]
        variables = {**os.environ, **QUIET}
        if threads is not None:
            variables["OMP_NUM_THREADS"] = str(threads)
        started = time.time()
        done = subprocess.run(whole, env=variables, capture_output=True, text=True)
        if done.returncode:
            return (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        report = json.loads((Path(out) / "report.json").read_text())
        with np.load(Path(out) / "model.npz") as stored:
            model = dict(stored)
    times = report["times"]
    rounds = tuple(later - earlier for earlier, later in itertools.pairwise(times[1:]))
    return Timing(times[1] - started, rounds, model, report["versions"])


def difference(theirs: Model, ours: Model, start: Model) -> float:
    """Return how far two models are apart, as a share of the way that ours went."""
    apart = sum(float(((theirs[name] - ours[name]) ** 2).sum()) for name in ours)
    way = sum(float(((ours[name] - start[name]) ** 2).sum()) for name in ours)
    return (apart / way) ** 0.5


def check(name: str, found: float, allowed: float) -> None:
    """Refuse a framework that computed something else.

    Raises:
        DifferentResultsError: when the last models differ by more than is allowed.
    """
    if not found <= allowed:
        raise DifferentResultsError(
            f"{name}: the last model differs by {found:.1e}; expected at most {allowed:.0e}"
        )


def loss(cell: Cell, model: Model) -> float:
    """Return the mean loss of a model on some training data of every client."""
    module = network()
    module.load_state_dict({name: torch.from_numpy(value) for name, value in model.items()})
    x, y = (torch.from_numpy(np.concatenate(array[:, :MEASURED])) for array in (cell.x, cell.y))
    with torch.no_grad():
        return float(torch.nn.functional.cross_entropy(module(x), y))


def row(name: str, pairs: Sequence[tuple[Timing, Timing]]) -> dict[str, Any]:
    """Return a framework's row of the table.

    Args:
        name: of the framework.
        pairs: its runs, each with the run of Coterie before it.
    """
    rounds = [second for theirs, _ in pairs for second in theirs.rounds]
    ratios = [
        statistics.median(theirs.rounds) / statistics.median(ours.rounds) for theirs, ours in pairs
    ]
    return {
        "framework": name,
        "versions": ", ".join(f"{part} {number}" for part, number in pairs[0][0].versions.items()),
        "seconds a round": statistics.median(rounds),
        "fastest": min(rounds),
        "slowest": max(rounds),
        "times Coterie's": statistics.median(ratios),
        "from": min(ratios),
        "to": max(ratios),
        "start and first round, s": statistics.median(theirs.first for theirs, _ in pairs),
    }


def table(
    pairs: Mapping[str, Sequence[tuple[Timing, Timing]]],
    apart: Mapping[str, float],
    last: Mapping[str, float],
    failed: Mapping[str, str],
) -> list[dict[str, Any]]:
    """Return Coterie's row, the rows of frameworks that ran, the fastest first, and the failed ones.

    Args:
        pairs: the runs of each framework.
        apart: how far its model was from Coterie's after a few steps.
        last: the loss of its last model, and Coterie's.
        failed: the error of a framework that did not run.
    """
    ours = [(mine, mine) for each in pairs.values() for _, mine in each]
    rows = [row("Coterie", ours)] if ours else []
    ran = [row(name, each) for name, each in pairs.items() if each]
    rows += sorted(ran, key=lambda each: each["seconds a round"])
    for each in rows:
        each |= {"last loss": last[each["framework"]], "differs by": apart.get(each["framework"])}
    return rows + [
        {"framework": name, "versions": f"did not run: {error}"} for name, error in failed.items()
    ]


class Bench:
    """Runs frameworks and Coterie.

    Args:
        names: of the frameworks.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.pythons = {name: environment(FRAMEWORKS[name][0]) for name in names}
        self.names, self.failed = list(names), dict[str, str]()

    def pair(self, cell: Cell, name: str) -> tuple[Timing, Timing] | None:
        """Run Coterie and then a framework; return both, or None where the framework failed.

        Raises:
            CoterieError: when Coterie itself fails.
        """
        ours = run(cell, (sys.executable, "coterie_cell.py"), 1)
        if isinstance(ours, str):
            raise CoterieError(f"Coterie failed: {ours}")
        kind, command, options = FRAMEWORKS[name]
        theirs = run(
            cell, (str(self.pythons[name]), *command, *options), None if kind == "fedjax" else 1
        )
        if isinstance(theirs, str):
            self.failed[name] = theirs
            self.names.remove(name)
            return None
        print(
            f"{name}: {theirs.first}, {theirs.rounds} against {ours.first}, {ours.rounds}",
            file=sys.stderr,
            flush=True,
        )
        return theirs, ours

    def compare(self, cell: Cell, allowed: float) -> dict[str, float]:
        """Return how far the last model of each framework is from Coterie's.

        Raises:
            DifferentResultsError: when that is more than is allowed.
        """
        found = {}
        for name in list(self.names):
            both = self.pair(cell, name)
            if both is not None:
                found[name] = difference(both[0].model, both[1].model, cell.start)
                check(name, found[name], allowed)
        return found

    def measure(self, cell: Cell, apart: Mapping[str, float], repeats: int) -> list[dict[str, Any]]:
        """Run every framework with Coterie before it, `repeats` times in turn; return the rows.

        Args:
            cell: what to run.
            apart: how far the models were from Coterie's after a few steps.
            repeats: how often.

        Raises:
            DifferentResultsError: when a framework computed something else.
        """
        pairs: dict[str, list[tuple[Timing, Timing]]] = {name: [] for name in self.names}
        last: dict[str, float] = {}
        for _ in range(repeats):
            for name in list(self.names):
                both = self.pair(cell, name)
                if both is None:
                    continue
                theirs, ours = both
                check(name, difference(theirs.model, ours.model, cell.start), MANY)
                last |= {name: loss(cell, theirs.model), "Coterie": loss(cell, ours.model)}
                pairs[name].append(both)
        return table(pairs, apart, last, self.failed)


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--frameworks",
        nargs="+",
        choices=list(FRAMEWORKS),
        default=["Flower", "pfl", "FedJAX, pmap"],
    )
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument(
        "--samples", type=int, default=500, help=f"images of each client, at least {BATCH}"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="at least 2; the first one is reported apart"
    )
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.samples < BATCH or options.rounds < 2:
        parser.error(
            f"found {options.samples} samples and {options.rounds} rounds; expected at least {BATCH} and 2"
        )
    where = describe_machine() | {
        "cores": count_cores(),
        "load_average_before": round(os.getloadavg()[0], 1),
    }
    bench = Bench(options.frameworks)
    with tempfile.TemporaryDirectory() as folder:
        apart = bench.compare(prepare(Path(folder), *SMALL), FEW)
    with tempfile.TemporaryDirectory() as folder:
        cell = prepare(Path(folder), options.clients, options.samples, options.rounds)
        rows = bench.measure(cell, apart, options.repeats)
    print(json.dumps(rows, indent=1))
    if options.out is not None:
        parts = ("engine", "methods/fedavg.py", "simulation")
        write_results(options.out, rows, parts, vars(options), where=where, order=30)
    return 0


if __name__ == "__main__":
    sys.exit(main())
