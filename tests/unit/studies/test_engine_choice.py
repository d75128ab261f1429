"""The engines of a plan are chosen by the work of all its runs, and stay with what is added to it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from coterie import FedAvg, LocalTraining, Settings, simulate
from coterie.engine import EngineChoice, _choice
from coterie.engine.task import Workload
from coterie.runtime.task import make_task
from coterie.studies import config, engine_choice
from coterie.studies.run import run_study
from coterie.studies.sweep import run_sweep
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


class Small(nn.Linear):
    """A linear model with a name of its own."""

    def __init__(self) -> None:
        super().__init__(4, 3)


class Other(Small):
    """The same, as another model."""


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


def load_chosen(folder: Path) -> dict[str, str]:
    """Return the engine that a plan has stored for each method."""
    stored = json.loads((folder / engine_choice.FILE).read_text())
    return {label: one["name"] for label, one in stored.items()}


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
    assert load_chosen(tmp_path / "tiny") == {"fedavg": "compiled", "local": "compiled"}


@pytest.mark.full
def test_added_seeds_take_the_engine_of_the_others(tmp_path: Path) -> None:
    few = do_study(tmp_path, "seeds=[0]")
    assert {one["name"] for one in few.values()} == {"loop"}
    more = do_study(tmp_path, "seeds=[0,1,2]")
    assert len(more) == 6
    assert {one["name"] for one in more.values()} == {"loop"}
    # A study that was begun before plans stored their engines has those of its runs.
    (tmp_path / "tiny" / engine_choice.FILE).unlink()
    assert len(do_study(tmp_path, "seeds=[0,1,2,3]")) == 8
    assert load_chosen(tmp_path / "tiny") == {"fedavg": "loop", "local": "loop"}


def test_the_work_of_a_plan_is_the_sum_over_runs_with_the_same_graph() -> None:
    """By hand: 6 clients of 12 samples, 10 epochs, so 720 samples a round."""
    work = engine_choice.PlanWork[str]()
    federation = tiny_federation()

    def add(key: str, seeds: int, model: str = "linear", **changes: object) -> None:
        local = LocalTraining(epochs=10, batch_size=changes.pop("batch_size", 6), lr=0.1)
        settings = Settings(local=local, **changes)
        task = make_task(federation, FedAvg(), model, replace(settings, engine="loop"))
        work.add_method(key, task, settings, seeds, model)

    asked: list[Workload] = []

    def note(loop: object, x: object, y: object, work: Workload, precision: str) -> EngineChoice:
        asked.append(work)
        return EngineChoice("loop", str(len(asked)))

    add("few rounds", 2, rounds=3)
    add("many rounds", 1, rounds=9)
    add("half of the clients", 1, rounds=4, participation=0.5)
    add("large batches", 1, rounds=3, batch_size=12)
    add("other model", 5, "mlp-c", rounds=3)
    add("other numbers", 1, rounds=3, dtype="float64")
    add("named", 7, rounds=3, engine="vmap")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_choice, "choose_engine", note)
        found = work.choose_engines(stored=["few rounds"])
    # 720 samples a round, and a warm-up of all: 2 x 4 + 10 + (2 + 1) + 4 rounds of linear models.
    samples = (2 * 4 + 10 + 3 + 4) * 720
    steps = (2 * 4 + 10 + 3) * 120 + 4 * 60
    linear = {"train_samples": samples, "train_steps": steps, "runs": 5}
    assert asked == [
        Workload(9, clients=6, batch_size=6, **linear),
        Workload(4, clients=3, batch_size=6, **linear),
        Workload(3, clients=6, batch_size=12, **linear),
        Workload(3, 5 * 4 * 720, 6, 6, train_steps=5 * 4 * 120, runs=5),
        Workload(3, 4 * 720, 6, 6, train_steps=4 * 120),
    ]
    assert [*found] == [
        "many rounds",
        "half of the clients",
        "large batches",
        "other model",
        "other numbers",
    ]
    assert [one.reason for one in found.values()] == ["1", "2", "3", "4", "5"]


@pytest.mark.full
def test_points_of_a_sweep_that_share_a_graph_build_it_once_and_others_do_not(
    tmp_path: Path,
) -> None:
    """Three runs are worthwhile: the two of each model are not, and all four of one are."""

    def sweep(name: str, path: str, values: list[object]) -> list[dict[str, str]]:
        content = {"sweep": {path: values}, "name": name, "seeds": [0]}
        study = replace(config.parse_study_text(STUDY), **content)
        done = run_sweep(study, out=tmp_path, federation=tiny_federation())
        return [load_chosen(one.folder) for one in done]

    compiled, loop = (dict.fromkeys(("fedavg", "local"), name) for name in ("compiled", "loop"))
    assert sweep("data", "data.train", [12, 13]) == [compiled] * 2
    models = [f"{__name__}:Small", f"{__name__}:Other"]
    assert sweep("models", "model.kind", models) == [loop] * 2


def test_a_scaled_study_has_less_work(tmp_path: Path) -> None:
    """A third of three rounds and the one before: half of the work, that of two runs."""
    do_study(tmp_path, "scale=0.34")
    assert load_chosen(tmp_path / "tiny") == {"fedavg": "loop", "local": "loop"}


@pytest.mark.full
def test_what_a_store_has_chooses_no_engine(tmp_path: Path) -> None:
    """A run that is taken from another study was trained by a loop; the plan compiles the others."""
    do_study(tmp_path, "name='short'", "seeds=[0]")
    assert load_chosen(tmp_path / "short") == {"fedavg": "loop", "local": "loop"}
    found = do_study(tmp_path)
    names = {run: one["name"] for run, one in found.items()}
    assert names == {
        "fedavg/seed-0": "loop", "fedavg/seed-1": "compiled", "local/seed-0": "loop", "local/seed-1": "compiled",
    }  # fmt: skip
    assert load_chosen(tmp_path / "tiny") == {"fedavg": "compiled", "local": "compiled"}
