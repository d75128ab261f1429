"""Every peer-to-peer method under every attack, with and without the acceptance step: what is left of the accuracy?

    python benchmarks/poisoning.py --out docs/reference/runs/poisoning.json

Twenty clients hold digits that are turned by 0, 90, 180 or 270 degrees, five clients each; none,
two or six of them attack. Accuracies are of the honest clients, on test digits turned like theirs.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from coterie._util.origin import write_results
from coterie.data.build import DataConfig, build_federation
from coterie.engine.task import LocalTraining
from coterie.exchange.attacking import KINDS
from coterie.functional import metrics
from coterie.methods import METHODS
from coterie.methods.base import Method
from coterie.runtime.final_metrics import select_final_tests
from coterie.runtime.settings import Settings
from coterie.simulation.run import Run, simulate

CLIENTS, PEERS, ROUNDS = 20, 3, 15
PEER_METHODS: dict[str, Method] = {
    "random": METHODS["random"](num_peers=PEERS),
    "fix-topology": METHODS["fix-topology"](num_peers=PEERS),
    "oracle": METHODS["oracle"](num_peers=PEERS),
    "dac": METHODS["dac"](num_peers=PEERS, tau=10),
    "dac-var": METHODS["dac-var"](num_peers=PEERS, tau=10),
    "dac-no-two-hop": METHODS["dac-no-two-hop"](num_peers=PEERS, tau=10),
    "pens": METHODS["pens"](num_sampled=6, num_kept=2, num_peers=PEERS, stage_one_rounds=8),
    "panm-loss": METHODS["panm-loss"](
        num_peers=PEERS, num_candidates=PEERS, stage_one_rounds=8, interval=3
    ),
    "panm-grad": METHODS["panm-grad"](
        num_peers=PEERS, num_candidates=PEERS, stage_one_rounds=8, interval=3
    ),
}
SHARES = (0.1, 0.3)
PARTS = ("exchange", "functional", "methods", "simulation", "engine")


def federation(seed: int) -> Any:
    """Return the clients' data."""
    shift = [{"kind": "rotation", "degrees": [0, 90, 180, 270], "sizes": [CLIENTS // 4] * 4}]
    return build_federation(
        DataConfig("digits", num_clients=CLIENTS, train=60, validation=15, shift=shift), seed
    )


def settings(accepts: bool, attack: str, share: float, rounds: int, **rules: Any) -> Settings:
    """Return the settings of a run."""
    return Settings(
        rounds=rounds,
        local=LocalTraining(epochs=2, batch_size=8, optimizer="adam", lr=0.003),
        acceptance=(rules or True) if accepts else None,
        attacks=[{"kind": attack, "clients": share}] if share else None,
    )


def row(
    run: Run, kind: str, attack: str, share: float, accepts: bool, seconds: float
) -> dict[str, Any]:
    """Return the results of a run."""
    tests = select_final_tests(run.metrics)

    def mean(name: str) -> float | None:
        values = tests.loc[(tests["metric"] == name).to_numpy(), "value"]
        return float(values.mean()) if len(values) else None

    edges = run.edges
    purposes = edges["purpose"].value_counts()
    passes = run.metrics.loc[
        (run.metrics["metric"] == metrics.PASSES.name).to_numpy(), "value"
    ].sum()
    return {
        "method": kind,
        "attack": attack if share else "none",
        "attackers": share,
        "acceptance": accepts,
        "seed": run.seed,
        "accuracy": mean(metrics.ACCURACY.name),
        "attackers' weight": mean(metrics.ATTACKER_WEIGHT.name),
        "mixed models of attackers": mean(metrics.ATTACKER_READS.name),
        "refused share of reads": int(purposes.get("refused", 0)) / max(1, len(edges)),
        "forward passes": float(passes),
        "seconds": round(seconds, 2),
    }


def measure(
    methods: Sequence[str], attacks: Sequence[str], seeds: Sequence[int], rounds: int, **rules: Any
) -> list[dict[str, Any]]:
    """Run every cell."""
    rows: list[dict[str, Any]] = []
    for seed in seeds:
        data = federation(seed)
        cells = [("none", 0.0), *((attack, share) for attack in attacks for share in SHARES)]
        for kind in methods:
            for attack, share in cells:
                for accepts in (True,) if rules else (False, True):
                    began = time.perf_counter()
                    given = settings(accepts, attack, share, rounds, **rules)
                    run = simulate(
                        data, PEER_METHODS[kind], model="cnn-b", settings=given, seed=seed
                    )
                    rows.append(row(run, kind, attack, share, accepts, time.perf_counter() - began))
                    print(
                        *(f"{v:.3f}" if isinstance(v, float) else v for v in rows[-1].values()),
                        flush=True,
                    )
    return rows


def main() -> None:
    """Measure every cell and write the rows."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--methods", nargs="*", default=list(PEER_METHODS))
    parser.add_argument("--attacks", nargs="*", default=list(KINDS))
    parser.add_argument("--seeds", type=int, nargs="*", default=[1])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--rules", nargs="*", default=[], help="such as worse=1.5")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rules = {name: float(value) for name, value in (one.split("=") for one in options.rules)}
    rows = measure(options.methods, options.attacks, options.seeds, options.rounds, **rules)
    if options.out:
        write_results(options.out, rows, PARTS, vars(options), seeds=options.seeds)


if __name__ == "__main__":
    main()
