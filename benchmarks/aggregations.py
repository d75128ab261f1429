"""Every aggregation under attack, with a server and among peers: what is left of the accuracy of the honest?

    python -m benchmarks.aggregations --out docs/reference/runs/aggregations.json

The federation is that of poisoning.py. A smaller model, larger batches and fewer attacks make a cell
cost less than a second: there are more rules than could be measured otherwise, and three seeds. A
run that was stopped goes on where it was.
"""

import argparse
import itertools
import json
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.poisoning import PARTS, PEERS, federation, row, settings
from coterie._util.origin import describe_code, write_results
from coterie.engine.task import LocalTraining
from coterie.functional import metrics
from coterie.methods import METHODS
from coterie.runtime.loop import ServerRefused
from coterie.simulation.run import Run, simulate

ROUNDS = 15
METHOD_SETTINGS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "ifca": {"clusters": 4},
    "random": {"num_peers": PEERS},
    "dac": {"num_peers": PEERS, "tau": 10},
}
SHARE = 0.3
"""The share of models that rules with one suspect: as many as attack where most do."""
RULES: dict[str, str | dict[str, Any] | None] = {
    "mean": None,
    "median": "median",
    "trimmed-mean": {"kind": "trimmed-mean", "share": SHARE},
    "norm-clipping": "norm-clipping",
    "krum": {"kind": "krum", "share": SHARE},
    "geometric-median": "geometric-median",
}
DEFENSES = (("mean", False), ("mean", True), *((rule, False) for rule in RULES if rule != "mean"))
"""Each rule, and whether members are tested too (`acceptance`): with the mean alone, to tell what does what."""
ATTACKS = (
    ("none", 0.0),
    ("sign-flip", 0.1),
    ("sign-flip", 0.3),
    ("a-little-is-enough", 0.1),
    ("a-little-is-enough", 0.3),
    ("noise", 0.3),
    ("scale", 0.3),
    ("label-flip", 0.3),
)


class Cell(NamedTuple):
    """One run of the table."""

    seed: int
    method: str
    attack: str
    attackers: float
    aggregation: str
    acceptance: bool


def list_cells(
    seeds: Sequence[int],
    methods: Sequence[str] = tuple(METHOD_SETTINGS),
    attacks: Sequence[tuple[str, float]] = ATTACKS,
    defenses: Sequence[tuple[str, bool]] = DEFENSES,
) -> list[Cell]:
    """Return the cells, those of a seed together."""
    return [
        Cell(seed, method, *attack, *defense)
        for seed, method, attack, defense in itertools.product(seeds, methods, attacks, defenses)
    ]


def find_cell(one: Mapping[str, Any]) -> Cell:
    """Return the cell of which a row has the results."""
    return Cell(*(one[name] for name in Cell._fields))


def make_model() -> nn.Module:
    """Return a small network of one hidden layer: 2,410 parameters."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def compute_refused_share(run: Run) -> float:
    """Return the share of models that were refused: of those a server got, or honest clients read."""
    if run.method.server:
        refused = run.metrics.loc[(run.metrics["metric"] == metrics.REFUSED.name).to_numpy()]
        # Each client has the server's count of the round; without any refusal there is no row.
        counts = refused.groupby("round")["value"].first()
        return float(counts.sum()) / (run.settings.rounds * len(run.params))
    honest = run.metrics["client"].drop_duplicates()
    reads = run.edges.loc[run.edges["reader"].isin(honest).to_numpy()]
    return float((reads["purpose"] == "refused").to_numpy().mean())


def run_cell(data: Any, cell: Cell, rounds: int) -> dict[str, Any]:
    """Run a cell and return its row."""
    given = replace(
        settings(cell.acceptance, cell.attack, cell.attackers, rounds),
        local=LocalTraining(epochs=2, batch_size=20, optimizer="adam", lr=0.01),
        check=False,
    )
    options = dict(METHOD_SETTINGS[cell.method])
    if (rule := RULES[cell.aggregation]) is not None:
        options["aggregation"] = rule
    began = time.process_time()
    with warnings.catch_warnings():
        # The rows count what a server refused.
        warnings.simplefilter("ignore", ServerRefused)
        run = simulate(
            data, METHODS[cell.method](**options), model=make_model, settings=given, seed=cell.seed
        )
    seconds = time.process_time() - began
    found = row(run, cell.method, cell.attack, cell.attackers, cell.acceptance, seconds)
    found["refused share of reads"] = compute_refused_share(run)
    return {**found, "aggregation": cell.aggregation}


def measure(cells: Sequence[Cell], rounds: int) -> Iterator[dict[str, Any]]:
    """Run cells and yield the row of each once it is done."""
    data, seed = None, None
    for cell in cells:
        if data is None or cell.seed != seed:
            data, seed = federation(cell.seed), cell.seed
        yield run_cell(data, cell, rounds)


def load_rows(path: Path | None, cells: Sequence[Cell], rounds: int) -> list[dict[str, Any]]:
    """Return the rows that an earlier run left in the file.

    Raises:
        SystemExit: when they are of other code or of another table: one head speaks for all rows.
    """
    if path is None or not path.exists():
        return []
    stored = json.loads(path.read_text())
    head = stored["origin"]
    own = {**describe_code(), "rounds": rounds}
    found = {"commit": head["commit"], "dirty": head["dirty"], "rounds": head["config"]["rounds"]}
    strange = {find_cell(one) for one in stored["results"]} - set(cells)
    if found != own or strange:
        raise SystemExit(
            f"{path} has rows of another table: {found}, {len(strange)} that were not asked for; "
            f"expected {own}. Give another --out, or remove it"
        )
    return stored["results"]


def main() -> None:
    """Measure the cells that the file does not have, and write it after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--methods", nargs="+", choices=METHOD_SETTINGS, default=[*METHOD_SETTINGS])
    names = dict.fromkeys(name for name, _ in ATTACKS)
    parser.add_argument("--attacks", nargs="+", choices=names, default=[*names])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    attacks = [one for one in ATTACKS if one[0] in options.attacks]
    cells = list_cells(options.seeds, options.methods, attacks)
    rows = load_rows(options.out, cells, options.rounds)
    done = {find_cell(one) for one in rows}
    for one in measure([cell for cell in cells if cell not in done], options.rounds):
        rows.append(one)
        print(*find_cell(one), f"{one['accuracy']:.3f}", flush=True)
        if options.out:
            write_results(options.out, rows, PARTS, vars(options), seeds=options.seeds)


if __name__ == "__main__":
    main()
