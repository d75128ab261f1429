"""Small stored runs of every method: a change of results is never an accident.

`make golden` writes what is missing or is another result by more than rounding, and leaves all other
entries as they are; a change needs a reason in the changelog.
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from tests.golden.keeping import REWRITES, keep_stored, read_entries, write_entries

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


def is_same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Whether two outcomes differ by rounding at most."""
    return (
        (found["reads"], found["who_read_whom"]) == (expected["reads"], expected["who_read_whom"])
        and found["norms"] == pytest.approx(expected["norms"], rel=1e-8)
        and found["accuracy"] == pytest.approx(expected["accuracy"], rel=1e-8)
    )


def write(
    file: Path, kinds: Iterable[str], make: Callable[[str], dict[str, Any]] = outcome
) -> None:
    fresh = {kind: make(kind) for kind in sorted(kinds)}
    write_entries(file, keep_stored(read_entries(file), fresh, is_same))


@pytest.fixture(scope="module")
def stored() -> dict[str, Any]:
    if REWRITES:
        write(FILE, METHODS)
    return read_entries(FILE)


@pytest.mark.parametrize("kind", sorted(METHODS))
def test_a_method_still_gives_the_stored_run(kind, stored):
    assert kind in stored, "a method without a stored run: run make golden"
    found, expected = outcome(kind), stored[kind]
    assert is_same(found, expected), f"found {found}; expected {expected}"


def test_every_stored_run_is_of_a_method_that_exists(stored):
    assert set(stored) <= set(METHODS), "a stored run of no method: run make golden"


def test_what_is_written_is_what_is_missing_or_another_result(tmp_path):
    """By hand: rounding stays as it is stored, a new method is added, a real change is written."""
    file = tmp_path / "runs.json"
    run = {"norms": [1.0, 2.0], "accuracy": [0.5, 1.0], "reads": 4, "who_read_whom": "ab"}
    before = {
        "rounded": {**run, "norms": [1.0, 2.0 + 1e-12]},
        "norms": {**run, "norms": [1.0, 2.001]},
        "accuracy": {**run, "accuracy": [0.75, 1.0]},
        "read": {**run, "who_read_whom": "cd"},
        "gone": run,
    }
    write_entries(file, before)
    kinds = ["added", "rounded", "norms", "accuracy", "read"]
    write(file, kinds, lambda kind: run)
    after = read_entries(file)
    assert list(after) == sorted(kinds)
    assert after.pop("rounded") == before["rounded"]
    assert all(entry == run for entry in after.values())
    written = file.read_bytes()
    write(file, kinds, lambda kind: run)
    assert file.read_bytes() == written


def test_where_nothing_has_changed_the_stored_file_keeps_its_bytes(tmp_path):
    file, kind = tmp_path / "runs.json", "local"
    write_entries(file, {kind: read_entries(FILE)[kind]})
    before = file.read_bytes()
    write(file, [kind])
    assert file.read_bytes() == before
