r"""Compare DAC with tables of bounded size to DAC with a memory of all pairs: the gate of the tables.

    python benchmarks/peer_tables.py --out docs/reference/runs/tables/gate.json

Each cell is a run of 25 samples a client (20 for training). Clients are in clusters of equal size,
planted by one of three shifts:

* "rules": every cluster labels Gaussian inputs of 16 numbers by its own linear rule of 5 classes,
* "labels": every cluster names the digits of scikit-learn by its own permutation of the classes,
* "pixels": every cluster has its own permutation of the pixels of these digits.

A linear model learns the first two, and an MLP with 32 hidden units the third. The samples of a
client are drawn from the 1,500 digits for training, so that clients have some in common. The
accuracy is that of the clients' last models on their cluster's test set (297 digits, or 200 inputs
of a rule); the reads are those of the first and of the last five rounds. Finished cells are kept
below `--kept`: the same command goes on where it was stopped.
"""

import argparse
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from coterie._util.files import write_atomically
from coterie._util.origin import write_results
from coterie.data.datasets import load_digits_source
from coterie.data.federation import Federation, TestSet, Truth
from coterie.engine.task import LocalTraining
from coterie.methods.base import Method
from coterie.methods.dac import Dac
from coterie.methods.oracle import Oracle
from coterie.methods.random_gossip import Random
from coterie.rng import Rng
from coterie.runtime.settings import Settings
from coterie.simulation.run import simulate

SHIFTS = ("rules", "labels", "pixels")
TRAIN, VALIDATION = 20, 5
SIZE, CLASSES, TESTS = 16, 5, 200
ROUNDS = {1000: 60, 10_000: 20}
METHODS: dict[str, Method] = {
    "all pairs": Dac(),
    "table": Dac(table=64),
    "table, one explored": Dac(table=64, explore=1),
    # Beside, without a memory: peers drawn uniformly, and those of the planted cluster.
    "random": Random(),
    "oracle": Oracle(),
}
GATE = ("all pairs", "table", "table, one explored")


@dataclass(frozen=True)
class Cell:
    """One run.

    Args:
        shift: one of `SHIFTS`.
        clients: of the population.
        clusters: planted.
        absent: share of the clients that miss a round, others in each.
        method: a key of `METHODS`.
        seed: of the data and of the run.
    """

    shift: str
    clients: int
    clusters: int
    absent: float
    method: str
    seed: int

    @property
    def name(self) -> str:
        """The name of the file in which its row is kept."""
        return "-".join(map(str, asdict(self).values())).replace(", ", "-").replace(" ", "-")


def list_cells(seeds: Sequence[int]) -> Iterator[Cell]:
    """Return all cells, seed by seed; in each those of the larger population last."""
    for seed in seeds:
        for shift, clusters, method in itertools.product(SHIFTS, (4, 20, 200), METHODS):
            yield Cell(shift, 1000, clusters, 0.0, method, seed)
        for shift, clusters, method in itertools.product(SHIFTS[:2], (20, 200), GATE[:2]):
            yield Cell(shift, 1000, clusters, 0.1, method, seed)
        for clusters, method in itertools.product((20, 2000), GATE):
            yield Cell("rules", 10_000, clusters, 0.0, method, seed)


def make_federation(cell: Cell) -> Federation:
    """Return the clients of a cell; client i is in cluster i modulo their number."""
    stream = Rng(cell.seed).generator("benchmark.peer_tables")
    of = np.arange(cell.clients) % cell.clusters
    samples = TRAIN + VALIDATION
    if cell.shift == "rules":
        rules = stream.normal(size=(cell.clusters, SIZE, CLASSES))
        x = stream.normal(size=(cell.clients, samples, SIZE))
        y = np.einsum("isf,ifc->isc", x, rules[of]).argmax(2)
        held = stream.normal(size=(TESTS, SIZE))
        tests = [(held, (held @ rule).argmax(1)) for rule in rules]
        classes = CLASSES
    else:
        digits, classes = load_digits_source(), 10
        whole, apart = digits.train.x, digits.test.x
        assert isinstance(whole, torch.Tensor)
        assert isinstance(apart, torch.Tensor)
        images, held = whole.flatten(1).numpy() / 255, apart.flatten(1).numpy() / 255
        names, right = digits.train.y.numpy(), digits.test.y.numpy()
        # Each client's own draw, without a digit twice.
        chosen = stream.random((cell.clients, len(images))).argpartition(samples, 1)[:, :samples]
        x, y = images[chosen], names[chosen]
        width = classes if cell.shift == "labels" else images.shape[1]
        orders = stream.random((cell.clusters, width)).argsort(1)
        if cell.shift == "labels":
            y = orders[of[:, None], y]
            tests = [(held, order[right]) for order in orders]
        else:
            x = np.take_along_axis(x, orders[of][:, None, :], 2)
            tests = [(held[:, order], right) for order in orders]
    split = torch.zeros(cell.clients, samples, dtype=torch.int64)
    split[:, TRAIN:] = 1
    cluster, ids = torch.from_numpy(of), torch.arange(cell.clients)
    titles = tuple(f"{cell.shift} {number}" for number in range(cell.clusters))
    return Federation(
        x=torch.from_numpy(x).float(),
        y=torch.from_numpy(y).long(),
        split=split,
        tests=tuple(
            TestSet(torch.from_numpy(a).float(), torch.from_numpy(b).long(), title)
            for (a, b), title in zip(tests, titles, strict=True)
        ),
        test_of=cluster,
        ids=ids,
        population=cell.clients,
        classes=classes,
        truth=Truth(cluster, titles, tuple(titles[number] for number in of)),
        name=cell.shift,
    )


def make_mlp() -> nn.Module:
    """Return a perceptron of the pixels of a digit with 32 hidden units."""
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def measure(cell: Cell) -> dict[str, Any]:
    """Run a cell and return its row."""
    federation, rounds = make_federation(cell), ROUNDS[cell.clients]
    local = LocalTraining(optimizer="sgd", lr=0.1, batch_size=8)
    settings = Settings(
        rounds=rounds, local=local, engine="compiled", evaluate="final",
        participation=1 - cell.absent, validate_every=rounds, check=False,
    )  # fmt: skip
    began = time.perf_counter()
    run = simulate(
        federation,
        METHODS[cell.method],
        model=make_mlp if cell.shift == "pixels" else "linear",
        settings=settings,
        seed=cell.seed,
    )
    seconds = time.perf_counter() - began
    accuracy = run.metrics.query("split == 'test' and metric == 'accuracy'")["value"].to_numpy()
    assert len(accuracy) == cell.clients
    edges = run.edges
    own = (edges["reader"] % cell.clusters == edges["read"] % cell.clusters).to_numpy()
    when = edges["round"].to_numpy()
    return {
        **asdict(cell),
        "rounds": rounds,
        "accuracy": float(accuracy.mean()),
        "own cluster, first rounds": float(own[when < 5].mean()),
        "own cluster, last rounds": float(own[when >= rounds - 5].mean()),
        "seconds of the run": round(seconds, 1),
    }


def main() -> None:
    """Run what is not there yet, and write the file of results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--kept", type=Path, default=Path("runs/peer-tables"))
    parser.add_argument("--out", type=Path, help="the file of results")
    given = parser.parse_args()
    rows = []
    given.kept.mkdir(parents=True, exist_ok=True)
    for cell in list_cells(given.seeds):
        path = given.kept / f"{cell.name}.json"
        if not path.exists():
            write_atomically(path, json.dumps(measure(cell)).encode())
        rows.append(json.loads(path.read_text()))
        print(rows[-1], flush=True)
    if given.out is not None:
        settings = {"seeds": given.seeds, "methods": list(METHODS)}
        speaks_of = ("engine", "exchange", "functional", "methods", "simulation")
        write_results(given.out, rows, speaks_of, settings, seeds=given.seeds)


if __name__ == "__main__":
    main()
