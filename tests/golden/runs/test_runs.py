"""Small stored runs of every method: a change of results is never an accident.

`make golden` rewrites the file; a change needs a reason in the changelog.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from coterie.methods import METHODS
from coterie.simulation.run import simulate
from coterie.testing import tiny_federation, tiny_settings

FILE = Path(__file__).with_name("runs.json")
ROUNDS = 6
# Settings that suit six clients and six rounds, where the defaults do not.
SMALL: dict[str, dict[str, Any]] = {
    "cfl": {"eps1": 10.0, "eps2": 0.0, "warmup_rounds": 1},
    "dac": {"num_peers": 2},
    "dac-no-two-hop": {"num_peers": 2},
    "dac-var": {"num_peers": 2},
    "fedgwc": {"eps": 1.0, "patience": 1, "min_pair_updates": 0.0},
    "fedper": {"personal_layers": 0},  # the model has one layer
    "fedrep": {"personal_layers": 0},
    "dfedalt": {"personal_layers": 0},
    "fix-topology": {"num_peers": 2},
    "ifca": {"clusters": 2},
    "one-shot": {"warmup_rounds": 2},
    "oracle": {"num_peers": 1},
    "panm-grad": {"num_peers": 1, "num_candidates": 2, "stage_one_rounds": 3, "interval": 2},
    "panm-loss": {"num_peers": 1, "num_candidates": 2, "stage_one_rounds": 3, "interval": 2},
    "pens": {"num_sampled": 3, "num_kept": 1, "num_peers": 2, "stage_one_rounds": 3},
    "random": {"num_peers": 2},
    "sosicfl": {"endpoints": 3, "regions": 2, "warmup_rounds": 1},
    "sosicfl-all": {"endpoints": 3, "regions": 2},
    "sosicfl-plus": {"endpoints": 3, "regions": 2},
}


def outcome(kind: str) -> dict[str, Any]:
    """What a run came to: the length of each client's model, its test accuracy, and who read whom."""
    method = METHODS[kind](**SMALL.get(kind, {}))
    settings = tiny_settings(rounds=ROUNDS, engine="loop")
    run = simulate(tiny_federation(), method, model="linear", settings=settings, seed=1)
    table = run.metrics
    final = table[
        (table["split"] == "test")
        & (table["metric"] == "accuracy")
        & (table["round"] == table["round"].max())
    ]
    reads = run.edges[["round", "reader", "read"]].to_numpy().tolist()
    return {
        "norms": run.params.norm(dim=1).tolist(),
        "accuracy": final.sort_values("client")["value"].tolist(),
        "reads": len(reads),
        "who_read_whom": hashlib.sha256(json.dumps(reads).encode()).hexdigest()[:16],
    }


@pytest.fixture(scope="module")
def stored() -> dict[str, Any]:
    if os.environ.get("COTERIE_GOLDEN") == "rewrite":
        FILE.write_text(
            json.dumps({kind: outcome(kind) for kind in sorted(METHODS)}, indent=1) + "\n",
            encoding="utf-8",
        )
    return json.loads(FILE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("kind", sorted(METHODS))
def test_a_method_still_gives_the_stored_run(kind, stored):
    assert kind in stored, "a method without a stored run: run make golden"
    found, expected = outcome(kind), stored[kind]
    assert (found["reads"], found["who_read_whom"]) == (
        expected["reads"],
        expected["who_read_whom"],
    )
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-8)
    assert found["accuracy"] == pytest.approx(expected["accuracy"], rel=1e-8)


def test_every_stored_run_is_of_a_method_that_exists(stored):
    assert set(stored) <= set(METHODS), "a stored run of no method: run make golden"
