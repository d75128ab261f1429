"""Equal runs of other studies are taken, and only those."""

import json
import os
import shutil

import pytest
import torch
from tests.selection import first_only

from coterie._util import origin
from coterie.errors import ConfigError
from coterie.studies import config
from coterie.studies.run import FoundRuns, load_study_results, run_study
from coterie.testing import tiny_federation

STUDY = """
name = "first"
rounds = 2
seeds = [0, 1]
model = { kind = "linear" }
data = { dataset = "digits" }
local = { batch_size = 5, optimizer = "sgd", lr = 0.1 }

[[methods]]
kind = "random"
num_peers = 2

[[methods]]
kind = "local"
"""
TABLES = ("metrics.parquet", "edges.parquet", "models.safetensors", "checkpoint.safetensors")


def make_data(seed):
    return tiny_federation(seed=seed)


def run(out, *changes, data=make_data, **options):
    """Run the study with changes; return it, its rounds, and what was there at its start."""
    steps, notes = [], []
    done = run_study(
        config.parse_study_text(STUDY, overrides=changes), out=out, federation=data,
        observer=steps.append, notes=notes.append, **options,
    )  # fmt: skip
    found = [note for note in notes if isinstance(note, FoundRuns)]
    return done, {(step.label, step.seed) for step in steps}, found


@pytest.fixture
def out(tmp_path):
    run(tmp_path)
    return tmp_path


@pytest.mark.full
def test_runs_of_another_study_are_taken_and_the_rest_is_run(out):
    """Of the second study's six runs four are there: they are not run, and have the bytes of runs."""
    second, trained, found = run(out, "name=second", "seeds=[0, 1, 2]")
    assert trained == {("random", 2), ("local", 2)}
    said = f"4 of 6 runs are there (4 taken from {out / 'first'}, trained by loop)"
    assert [str(one) for one in found] == [said]
    alone, _, _ = run(out / "elsewhere", "name=second", "seeds=[0, 1, 2]")
    for label in ("random", "local"):
        for seed in (0, 1, 2):
            for name in TABLES:
                place = f"{label}/seed-{seed}/{name}"
                assert (second.folder / place).read_bytes() == (alone.folder / place).read_bytes()
    assert second.summary["rows"] == alone.summary["rows"]
    provenance = json.loads((second.folder / "local/seed-1/provenance.json").read_text())
    assert provenance["taken_from"] == "../../../first/local/seed-1"
    assert config.load_study(second.folder / "local/seed-1/config.toml").name == "second"


@pytest.mark.full
def test_a_taken_run_stays_when_its_source_is_deleted_or_moved(out):
    second, _, _ = run(out, "name=second")
    shutil.rmtree(out / "first")
    assert load_study_results(second.folder).rows.equals(second.rows)
    os.rename(out / "second", out / "third")
    _, trained, found = run(out, "name=third")
    assert trained == set()
    assert str(found[0]) == "4 of 4 runs are there"


@pytest.mark.full
@pytest.mark.parametrize(
    "change",
    first_only(
        ["rounds=3", "local.lr=0.2", "methods.random.num_peers=1", "engine=loop", "seeds=[7]"],
        2,
        slow=True,
    ),
)
def test_a_run_with_another_setting_is_not_taken(out, change):
    _, trained, found = run(out, "name=second", change)
    kept = {"local"} if "num_peers" in change else set()
    assert {label for label, _ in trained} == {"random", "local"} - kept
    assert sum(one.finished for one in found) == 2 * len(kept)


@pytest.mark.full
def test_a_run_of_other_data_is_not_taken(out):
    def other(seed):
        data = make_data(seed)
        data.y[0, 0] = 1 - data.y[0, 0].clamp(0, 1)
        return data

    assert len(run(out, "name=second", data=other)[1]) == 4


@pytest.mark.full
def test_a_run_of_other_code_is_not_taken(out, monkeypatch):
    monkeypatch.setattr(origin, "compute_code_digest", lambda: "of another version")
    assert len(run(out, "name=second")[1]) == 4


@pytest.mark.full
@pytest.mark.parametrize("name", TABLES)
def test_a_damaged_run_is_not_taken(out, name):
    path = out / "first/local/seed-0" / name
    path.write_bytes(path.read_bytes()[:-1])
    assert run(out, "name=second")[1] == {("local", 0)}


@pytest.mark.full
def test_an_unfinished_run_is_not_taken(out):
    for name in ("metrics.parquet", "provenance.json"):
        (out / "first/local/seed-0" / name).unlink()
    assert run(out, "name=second")[1] == {("local", 0)}


@pytest.mark.full
@pytest.mark.parametrize(
    ("change", "options"),
    [
        ("model.kind=own", {"model": lambda: torch.nn.Linear(4, 3)}),
        ("model.kind=coterie.models.layout:linear", {}),
    ],
)
def test_what_depends_on_code_of_the_user_is_not_taken(tmp_path, change, options):
    """A module given from Python, and code behind an import path, may have changed."""
    for name in ("first", "second"):
        assert len(run(tmp_path, f"name={name}", change, **options)[1]) == 4


@pytest.mark.slow
def test_overwrite_runs_all(out):
    assert len(run(out, "name=second", overwrite=True)[1]) == 4


@pytest.mark.slow
def test_a_run_that_has_begun_goes_on_and_nothing_is_taken(out, tmp_path):
    def stop(step):
        raise ConfigError("stopped")

    study = config.parse_study_text(STUDY, overrides=("name=second", "checkpoint_seconds=0"))
    with pytest.raises(ConfigError):
        run_study(study, out=tmp_path / "new", federation=make_data, observer=stop)
    _, trained, _ = run(tmp_path / "new", "name=second", "checkpoint_seconds=0")
    assert len(trained) == 4
