"""The engine of "auto" is chosen by the work of the whole plan, and stays with what is added to it."""

import json
from pathlib import Path

import pytest

from coterie import FedAvg, LocalTraining, Settings, simulate
from coterie.engine import _choice
from coterie.studies import config
from coterie.studies.run import run_study
from coterie.testing import tiny_federation

STUDY = """
name = "tiny"
rounds = 3
seeds = [0, 1]
dtype = "float32"
model = { kind = "linear" }
data = { dataset = "digits" }
local = { epochs = 10, batch_size = 6, optimizer = "sgd", lr = 0.1 }
warmup_epochs = 0

[[methods]]
kind = "fedavg"

[[methods]]
kind = "local"
"""
SAMPLES = 6 * 12 * 10 * 4  # clients, samples, epochs, rounds with the one before the first


@pytest.fixture(autouse=True)
def a_plan_of_three_runs_is_worthwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_choice, "_CALL", 0.0)
    monkeypatch.setattr(_choice, "_BUILD_NODE", 0.0)
    # A linear layer has 4 x 3 products: one run saves 0.4 of what building costs.
    monkeypatch.setattr(_choice, "_PRODUCT", 1 / (12 * SAMPLES))
    monkeypatch.setattr(_choice, "_BUILD", 2.5)


def do_study(folder: Path, *changes: str) -> dict[str, dict]:
    """Run a study; return what each run noted of its engine."""
    study = config.parse_study_text(STUDY, overrides=changes)
    done = run_study(study, out=folder, federation=lambda seed: tiny_federation(seed=seed))
    found = {}
    for path in sorted(done.folder.glob("*/seed-*/provenance.json")):
        found["/".join(path.parts[-3:-1])] = json.loads(path.read_text())["engine"]
    return found


def test_a_plan_is_compiled_where_one_of_its_runs_is_not(tmp_path: Path) -> None:
    local = LocalTraining(epochs=10, batch_size=6, optimizer="sgd", lr=0.1)
    settings = Settings(rounds=3, warmup_epochs=0, local=local)
    alone = simulate(tiny_federation(), FedAvg(), model="linear", settings=settings)
    gain = "too little work to compile, which takes over 2.5 s and would save at most 40.0% of what it takes"
    few = "6 clients in a round are too few for many at once"
    assert alone.engine == f"loop, one client after another: {gain}; {few}"
    assert f"engine {alone.engine}" in " ".join(str(alone).split())
    found = do_study(tmp_path)
    assert len(found) == 4
    assert {one["name"] for one in found.values()} == {"compiled"}
    # Written with each run, and the same in a repetition, which finds the program in the cache.
    again = do_study(tmp_path / "again")
    reasons = [[one["reason"] for one in each.values()] for each in (found, again)]
    assert reasons[0] == reasons[1] == ["compiled, a native program of the whole step"] * 4


@pytest.mark.full
def test_added_seeds_take_the_engine_of_the_others(tmp_path: Path) -> None:
    few = do_study(tmp_path, "seeds=[0]")
    assert {one["name"] for one in few.values()} == {"loop"}
    more = do_study(tmp_path, "seeds=[0,1,2]")
    assert len(more) == 6
    assert {one["name"] for one in more.values()} == {"loop"}
