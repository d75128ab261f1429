"""How much published models reveal of their training data, by method, without and with DP-SGD: membership inference.

    python benchmarks/leakage.py --out docs/reference/runs/privacy/leakage.json
    python benchmarks/leakage.py --table docs/reference/runs/privacy/leakage.json

Digits in four rotations at 8 clients with 75 samples each and linear models, which still learn with
so much noise; `coterie audit-privacy` measures any other study. The second form prints the table of
docs/reference/privacy.md.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from coterie._util.origin import write_results
from coterie.engine.privacy import DPSGD
from coterie.methods import METHODS
from coterie.studies import config, leakage
from coterie.studies.definition import MethodConfig, StudyConfig

SPEAKS_OF = ("engine", "exchange", "functional", "methods", "simulation", "studies/leakage.py")
SHADOWS, PRIVATE = 8, DPSGD(clip=1.0, noise_multiplier=2.0)
CHANGES = (
    *(
        "seeds=1",
        "rounds=10",
        "engine=vmap",
        "model.kind=linear",
        "data.num_clients=8",
        "data.train=150",
    ),
    'data.shift=[{kind="rotation", degrees=[0, 90, 180, 270], sizes=[2, 2, 2, 2]}]',
    *("local.optimizer=sgd", "local.lr=0.5", "local.batch_size=32", "local.epochs=4"),
)
KINDS: dict[str, dict[str, Any]] = {
    "local": {},
    "random": {"num_peers": 3},
    "dac": {"num_peers": 3, "tau": 10.0},
    "pens": {"num_sampled": 4, "num_kept": 2, "stage_one_rounds": 4},
    "fedavg": {},
    "ifca": {"clusters": 4},
    "ditto": {},
}


def study() -> StudyConfig:
    """Return the study that is attacked."""
    base = config.load_study("rotated-digits", CHANGES)
    methods = tuple(
        MethodConfig(kind, METHODS[kind](**given), base.settings) for kind, given in KINDS.items()
    )
    return replace(base, methods=methods)


def table(results: list[Mapping[str, Any]]) -> list[str]:
    """Return the rows of a Markdown table: one for each method, without and with privacy."""
    lines = [
        "| method | noise | ε | accuracy | AUC, loss | AUC, LiRA | found at 1 % false alarms, loss | LiRA |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    pairs: dict[tuple[str, Any], dict[str, Mapping[str, Any]]] = {}
    for row in results:
        pairs.setdefault((row["label"], row["noise_multiplier"]), {})[row["attack"]] = row
    for (label, noise), rows in pairs.items():
        first = rows["loss"]
        cells = [
            label,
            "–" if noise is None else f"{noise:g}",
            "–" if noise is None else f"{first['epsilon']:.1f}",
        ]
        cells.append(f"{100 * first['score']:.1f} %")
        both = [rows["loss"], rows["lira"]]
        cells += [f"{one['auc']:.3f} ({one['auc_low']:.3f}–{one['auc_high']:.3f})" for one in both]
        cells += [
            f"{100 * one['tpr']:.1f} % ({100 * one['tpr_low']:.1f}–{100 * one['tpr_high']:.1f})"
            for one in both
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    if options.table is not None:
        print("\n".join(table(json.loads(options.table.read_text())["results"])))
        return
    torch.set_num_threads(1)
    told = leakage.audit_study(
        study(), shadows=SHADOWS, private=PRIVATE, notify=lambda text: print(text, file=sys.stderr)
    )
    rows = leakage.make_table(list(told))
    write_results(options.out, rows, SPEAKS_OF, vars(options), shadows=SHADOWS)


if __name__ == "__main__":
    main()
