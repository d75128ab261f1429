"""Studies: folders that are never overwritten unasked, and runs that go on to the same bytes."""

import json
import re
import shutil
import threading
import unicodedata
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pandas as pd
import pytest
from tests.selection import first_only

from coterie._util.claims import claim_folder
from coterie.errors import CheckpointError, ConfigError, FolderInUse, RunExistsError
from coterie.results import stored_runs
from coterie.results.stored_runs import load_runs
from coterie.runtime import checkpoint
from coterie.simulation.workers import fan_out
from coterie.studies import config
from coterie.studies.run import (
    Job,
    find_studies,
    load_stored_study,
    load_study_results,
    resume_study,
    run_folder,
    run_study,
)
from coterie.testing import tiny_federation

STUDY = """
name = "tiny"
rounds = 3
seeds = [0, 1]
checkpoint_seconds = 0
dtype = "float64"
model = { kind = "linear" }
data = { dataset = "digits" }
local = { batch_size = 5, optimizer = "sgd", lr = 0.1 }

[[methods]]
kind = "random"
num_peers = 2

[[methods]]
kind = "local"
label = "Alone"
"""
FILES = ("checkpoint.safetensors", "metrics.parquet", "edges.parquet")


def small(*changes):
    return config.parse_study_text(STUDY, overrides=changes)


def contents(folder):
    return {
        p.relative_to(folder).as_posix(): p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.name in FILES
    }


def shown(folder):
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    return run_study(small(), out=out, federation=lambda seed: tiny_federation(seed=seed))


class Interrupted(Exception):
    pass


@pytest.mark.full
def test_a_study_leaves_the_agreed_files(finished):
    folder = finished.folder
    assert folder.name == "tiny"
    files = {"config.toml", "engines.json", "federation.json", "summary.json", "B2SUMS"}
    assert shown(folder) == {*files, "random", "Alone"}
    for label in ("random", "Alone"):
        for seed in (0, 1):
            names = shown(folder / label / f"seed-{seed}")
            others = {
                "checkpoint-before.safetensors",
                "config.toml",
                "models.safetensors",
                "provenance.json",
                "B2SUMS",
            }
            assert names == {*FILES, *others}


@pytest.mark.full
def test_a_study_is_shown_in_a_few_words(finished):
    """In a notebook too, where everything that it holds would fill the screen."""
    lines = [line.split(None, 1) for line in str(finished).splitlines()]
    shown = {"Study": "'tiny'", "methods": "random, Alone", "seeds": "0, 1", "runs": "4 finished"}
    assert dict(lines[:-1]) == shown
    assert lines[-1] == ["folder", str(finished.folder)]


def test_the_config_of_a_run_is_a_study_of_that_run_alone(finished):
    study = config.load_study(finished.folder / "Alone" / "seed-1" / "config.toml")
    assert ([entry.label for entry in study.methods], study.seeds) == (["Alone"], (1,))
    assert study.settings == small().settings


def test_the_summary_has_the_agreed_shape_and_numbers(finished):
    """The mean over clients of a method is the mean of its final test rows, over clients and then over seeds."""
    content = json.loads((finished.folder / "summary.json").read_text())
    assert set(content) >= {"study", "rows", "timing"}
    assert set(content["rows"][0]) == {
        "method",
        "label",
        "cluster",
        "metric",
        "mean",
        "std",
        "seeds",
    }
    assert set(content["timing"][0]) == {"label", "seed", "wall_s", "train_s", "train_samples"}
    per_seed = []
    for seed in (0, 1):
        table = pd.read_parquet(finished.folder / "random" / f"seed-{seed}" / "metrics.parquet")
        last = table[
            (table["split"] == "test") & (table["metric"] == "accuracy") & (table["round"] == 2)
        ]
        per_seed.append(last["value"].mean())
    rows = finished.rows
    row = rows[
        (rows["label"] == "random") & (rows["cluster"] == "all") & (rows["metric"] == "accuracy")
    ].iloc[0]
    assert row["mean"] == pytest.approx(sum(per_seed) / 2)
    assert row["std"] == pytest.approx(abs(per_seed[0] - per_seed[1]) / 2)
    assert (row["method"], row["seeds"]) == ("random", 2)


def test_a_scaled_study_says_so_in_its_summary(finished, tmp_path):
    scaled = run_study(small("scale=0.5", "seeds=[0]"), out=tmp_path, federation=tiny_federation())
    assert scaled.summary["scale"] == 0.5
    assert "scale" not in finished.summary


def test_each_client_is_compared_with_itself_trained_alone(finished):
    gains = finished.gains()
    assert gains["baseline"] == "Alone"
    assert [row["label"] for row in gains["rows"]] == ["random"]


@pytest.mark.slow
def test_the_results_do_not_depend_on_the_number_of_workers(finished, tmp_path):
    """Two processes of one thread leave the bytes that one leaves. The data come from a folder they can both read."""
    one = run_study(
        small("data.num_clients=4", "data.train=20", "data.validation=5"), out=tmp_path / "one"
    )
    two = run_study(
        small("data.num_clients=4", "data.train=20", "data.validation=5"),
        out=tmp_path / "two",
        workers=2,
    )
    assert contents(one.folder) == contents(two.folder)
    assert len(contents(one.folder)) == 4 * len(FILES)


@pytest.mark.full
@pytest.mark.parametrize(("free", "given"), [(10**6, True), (0, False)])
def test_data_are_shared_with_the_workers_where_the_shared_memory_has_room(
    free, given, tmp_path, monkeypatch
):
    """Else every worker builds its own."""
    study = small("data.num_clients=4", "data.train=20", "data.validation=5", "rounds=1")
    sent = []

    def alone(work, jobs, workers, emit):
        sent.extend(jobs)
        return fan_out(work, sent, 1, emit)

    monkeypatch.setattr(
        "coterie.studies.run.shutil.disk_usage", lambda path: SimpleNamespace(free=free)
    )
    monkeypatch.setattr("coterie.studies.run.fan_out", alone)
    run_study(study, out=tmp_path, workers=2)
    assert [str(job) for job in sent] == [
        "random, seed 0",
        "Alone, seed 0",
        "random, seed 1",
        "Alone, seed 1",
    ]
    assert [job.federation is not None for job in sent] == [given] * 4


def test_a_study_with_other_settings_is_refused_and_stays_as_it_is(finished):
    before = contents(finished.folder)
    with pytest.raises(CheckpointError, match=r"rounds is 3 there and 1 here.*--overwrite"):
        run_study(small("rounds=1"), out=finished.folder.parent, federation=tiny_federation())
    assert contents(finished.folder) == before
    with pytest.raises(RunExistsError, match="expected a new folder"):
        run_study(small(), out=finished.folder.parent, resume=False, federation=tiny_federation())
    assert contents(finished.folder) == before


def test_the_same_call_on_a_finished_study_runs_nothing(finished):
    before, steps, notes = contents(finished.folder), [], []
    again = run_study(
        small(), out=finished.folder.parent, federation=lambda seed: tiny_federation(seed=seed),
        observer=steps.append, notes=notes.append,
    )  # fmt: skip
    assert [str(note) for note in notes] == ["4 of 4 runs are there"]
    assert steps == []
    assert contents(finished.folder) == before
    assert again.summary == finished.summary


def test_a_folder_that_is_no_study_is_never_touched(tmp_path):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "thesis.txt").write_text("precious")
    with pytest.raises(RunExistsError, match="is no study"):
        run_study(small(), out=tmp_path, overwrite=True, federation=tiny_federation())
    assert (tmp_path / "tiny" / "thesis.txt").read_text() == "precious"


def test_bad_data_is_found_before_anything_is_deleted(finished):
    before = contents(finished.folder)
    with pytest.raises(ConfigError, match="dataset"):
        run_study(small("data.dataset=nowhere"), out=finished.folder.parent, overwrite=True)
    assert contents(finished.folder) == before


@pytest.mark.parametrize("rounds_done", first_only([5, 1, 9]))
def test_a_study_stopped_anywhere_goes_on_to_the_same_bytes(finished, tmp_path, rounds_done):
    heard = []

    def stop(step):
        heard.append(step)
        if len(heard) == rounds_done:
            raise Interrupted

    federation = {seed: tiny_federation(seed=seed) for seed in (0, 1)}
    with pytest.raises(Interrupted):
        run_study(small(), out=tmp_path, federation=federation.__getitem__, observer=stop)
    assert contents(tmp_path / "tiny") != contents(finished.folder)
    done = resume_study(tmp_path / "tiny", federation=federation.__getitem__)
    assert contents(done.folder) == contents(finished.folder)


def test_what_a_killed_process_left_half_written_is_cleared_away(tmp_path):
    federation = tiny_federation()

    def stop(step):
        raise Interrupted

    with pytest.raises(Interrupted):
        run_study(small("seeds=[0]"), out=tmp_path, federation=federation, observer=stop)
    half = run_folder(tmp_path / "tiny", Job("random", 0)) / ".metrics.parquet.abc.tmp"
    half.write_bytes(b"half")
    resume_study(tmp_path / "tiny", federation=federation)
    assert not half.exists()


def test_resuming_a_finished_study_runs_nothing(finished):
    before = contents(finished.folder)
    heard = []
    again = resume_study(
        finished.folder, federation=lambda seed: tiny_federation(seed=seed), observer=heard.append
    )
    assert heard == []
    assert contents(finished.folder) == before
    assert again.rows.equals(finished.rows)


@pytest.mark.full
def test_a_study_can_grow_by_seeds_and_methods(finished, tmp_path):
    federation = {seed: tiny_federation(seed=seed) for seed in (0, 1)}
    run_study(small("seeds=[0]"), out=tmp_path, federation=federation.__getitem__)
    heard = []
    run_study(
        small(), out=tmp_path, federation=federation.__getitem__, resume=True, observer=heard.append
    )
    assert {step.seed for step in heard} == {1}
    assert contents(tmp_path / "tiny") == contents(finished.folder)


@pytest.mark.full
def test_a_study_that_grows_by_a_seed_keeps_the_seeds_that_it_has(tmp_path):
    federation = {seed: tiny_federation(seed=seed) for seed in (0, 1)}
    run_study(small("seeds=[1]"), out=tmp_path, federation=federation.__getitem__)
    run_study(small("seeds=[0]"), out=tmp_path, federation=federation.__getitem__, resume=True)
    kept, _ = load_stored_study(tmp_path / "tiny")
    assert list(kept.seeds) == [1, 0]


def test_resuming_with_other_settings_is_refused_and_names_the_setting(finished):
    with pytest.raises(CheckpointError, match="rounds is 3 there and 4 here"):
        run_study(
            small("rounds=4"), out=finished.folder.parent, federation=tiny_federation(), resume=True
        )


def stopped(out):
    """A run that was stopped in its second round."""

    def stop(step):
        if step.round == 1:
            raise Interrupted

    with pytest.raises(Interrupted):
        run_study(small("seeds=[0]"), out=out, federation=tiny_federation(seed=0), observer=stop)
    return run_folder(out / "tiny", Job("random", 0))


@pytest.mark.full
@pytest.mark.parametrize("damage", [b"", b"not a checkpoint"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(finished, tmp_path, damage):
    (stopped(tmp_path) / checkpoint.FILE).write_bytes(damage)
    with pytest.warns(
        UserWarning, match=r"checkpoint\.safetensors is damaged.* goes on from checkpoint-before"
    ):
        resume_study(tmp_path / "tiny", federation=tiny_federation(seed=0))
    for name in FILES:
        path = f"random/seed-0/{name}"
        assert (tmp_path / "tiny" / path).read_bytes() == (finished.folder / path).read_bytes()


def test_two_damaged_checkpoints_are_one_clear_line(tmp_path):
    folder = stopped(tmp_path)
    (folder / checkpoint.FILE).write_bytes(b"not a checkpoint")
    (folder / checkpoint.BEFORE).unlink()
    text = r"checkpoint\.safetensors is damaged: .*; checkpoint-before\.safetensors is missing; delete the folder"
    with pytest.raises(CheckpointError, match=text) as caught:
        resume_study(tmp_path / "tiny", federation=tiny_federation(seed=0))
    assert "\n" not in str(caught.value)


def test_a_flipped_bit_that_is_still_a_checkpoint_is_not_believed(tmp_path):
    """The last byte belongs to a number: only its digest tells."""
    folder = stopped(tmp_path)
    data = bytearray((folder / checkpoint.FILE).read_bytes())
    data[-1] ^= 1
    (folder / checkpoint.FILE).write_bytes(data)
    with pytest.warns(UserWarning, match="damaged"):
        resume_study(tmp_path / "tiny", federation=tiny_federation(seed=0))


@pytest.mark.parametrize(
    "name", ["metrics.parquet", "edges.parquet", "provenance.json", "config.toml"]
)
def test_a_damaged_file_of_a_finished_run_is_written_again(finished, tmp_path, name):
    shutil.copytree(finished.folder, tmp_path / "tiny")
    path = tmp_path / "tiny/random/seed-1" / name
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert not finished_runs(tmp_path / "tiny") >= {"random/seed-1"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        resume_study(tmp_path / "tiny", federation=lambda seed: tiny_federation(seed=seed))
    assert len(finished_runs(tmp_path / "tiny")) == 4
    assert contents(tmp_path / "tiny") == contents(finished.folder)
    if name == "config.toml":
        assert path.read_bytes() == whole


def finished_runs(folder):
    runs, _ = load_runs([folder])
    return {run.folder.relative_to(folder).as_posix() for run in runs if run.is_finished}


def test_a_run_that_another_process_works_on_is_left_to_it(tmp_path):
    """It is named, not waited for; the others are done."""
    federation = tiny_federation(seed=0)
    run_study(small("seeds=[1]", "rounds=1"), out=tmp_path, federation=federation)
    job, ready, over = Job("random", 0), threading.Event(), threading.Event()

    def hold():
        with claim_folder(run_folder(tmp_path / "tiny", job)):
            ready.set()
            over.wait(60)

    other = threading.Thread(target=hold)
    other.start()
    ready.wait(60)
    done = run_study(
        small("seeds=[0]", "rounds=1"), out=tmp_path, federation=federation, resume=True
    )
    assert [str(one) for one in done.elsewhere] == ["random, seed 0"]
    assert finished_runs(tmp_path / "tiny") == {"random/seed-1", "Alone/seed-0", "Alone/seed-1"}
    with pytest.raises(FolderInUse, match="random/seed-0 is in use by process"):
        run_study(
            small("seeds=[0]", "rounds=1"), out=tmp_path, federation=federation, overwrite=True
        )
    assert (tmp_path / "tiny/Alone/seed-0/metrics.parquet").exists(), (
        "nothing is deleted while somebody works"
    )
    over.set()
    other.join()
    done = run_study(
        small("seeds=[0]", "rounds=1"), out=tmp_path, federation=federation, resume=True
    )
    assert (done.elsewhere, len(finished_runs(tmp_path / "tiny"))) == ({}, 4)


def test_a_study_that_was_killed_before_its_first_file_can_be_started(tmp_path):
    """There is a lock, and a manifest that lists what is to come."""
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny/B2SUMS").write_text(f"{'0' * 64}  config.toml\n")
    (tmp_path / "tiny/.lock").touch()
    done = run_study(
        small("seeds=[0]", "rounds=1"), out=tmp_path, federation=tiny_federation(seed=0)
    )
    assert len(done.rows)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/thesis.txt").touch()
    with pytest.raises(RunExistsError, match="exists and is no study"):
        run_study(small("name=other"), out=tmp_path, federation=tiny_federation(seed=0))


def test_a_damaged_study_file_is_named_and_written_again(finished, tmp_path):
    shutil.copytree(finished.folder, tmp_path / "tiny")
    path = tmp_path / "tiny" / "config.toml"
    whole = path.read_text()
    path.write_text(whole.replace("rounds = 3", "rounds = 2"))
    with pytest.raises(
        ConfigError, match=r"config\.toml is damaged.*`coterie run STUDY` writes it again"
    ):
        resume_study(tmp_path / "tiny", federation=lambda seed: tiny_federation(seed=seed))
    run_study(
        small(), out=tmp_path, federation=lambda seed: tiny_federation(seed=seed), resume=True
    )
    assert path.read_text() == whole


def test_a_run_is_found_from_its_own_folder_too(finished):
    study, out = load_stored_study(finished.folder / "random" / "seed-0")
    assert (study.name, out) == ("tiny", finished.folder.parent)
    with pytest.raises(ConfigError, match="holds no study"):
        load_stored_study(finished.folder.parent)


def test_finished_studies_are_listed_and_read_again(finished):
    assert find_studies(finished.folder.parent) == [finished.folder]
    assert load_study_results(finished.folder).rows.equals(finished.rows)


def test_a_study_with_a_slash_in_its_name_nests(tmp_path):
    done = run_study(
        small("name=a/b", "seeds=[0]", "rounds=1"), out=tmp_path, federation=tiny_federation()
    )
    assert done.folder == tmp_path / "a" / "b"
    assert load_stored_study(done.folder)[1] == tmp_path.resolve()


def test_a_diverged_client_is_named(tmp_path):
    study = small("seeds=[0]", "local.lr=1e308", "rounds=2")
    done = run_study(study, out=tmp_path, federation=tiny_federation(num_clients=2))
    assert done.diverged[Job("Alone", 0)] == (0, 1)


@pytest.mark.full
def test_resuming_with_other_data_is_refused_even_when_the_settings_are_the_same(tmp_path):
    """Finished runs would be kept beside new ones on other data. Another first seed has other data rightly."""
    one = small("seeds=[0]", "rounds=1")
    run_study(one, out=tmp_path, federation=tiny_federation(seed=0))
    described = (tmp_path / "tiny/federation.json").read_bytes()
    with pytest.raises(
        CheckpointError,
        match=r"was run with other data .*--overwrite starts again, --out keeps both",
    ):
        run_study(one, out=tmp_path, federation=tiny_federation(seed=1), resume=True)
    more = small("seeds=[3]", "rounds=1")
    run_study(more, out=tmp_path, federation=lambda seed: tiny_federation(seed=seed), resume=True)
    assert (tmp_path / "tiny/federation.json").read_bytes() == described
    run_study(one, out=tmp_path, federation=tiny_federation(seed=0), resume=True)


def test_a_seed_is_not_added_to_runs_of_other_settings_or_data(tmp_path):
    """All seeds are in one mean: those that are there count, though they are not run again."""

    def make(shift):
        return lambda seed: tiny_federation(seed=seed + shift)

    run_study(small("seeds=[0]", "rounds=1"), out=tmp_path, federation=make(0))
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match=r"other settings \(local.lr is 0.1 there and 0.2"):
        run_study(small("seeds=[1]", "rounds=1", "local.lr=0.2"), out=tmp_path, federation=make(0))
    with pytest.raises(CheckpointError, match="was run with other data"):
        run_study(small("seeds=[1]", "rounds=1"), out=tmp_path, federation=make(5))
    # A method that the study no longer has is in its tables all the same.
    one = ("seeds=[0]", 'use_methods=["Solo"]', "methods.Alone.label=Solo")
    with pytest.raises(CheckpointError, match=r"Alone.seed-0 was .*\(rounds is 1 there and 2 here"):
        run_study(small(*one, "rounds=2"), out=tmp_path, federation=make(0))
    assert contents(tmp_path) == before
    run_study(small(*one, "rounds=1"), out=tmp_path, federation=make(0))
    done = run_study(small("seeds=[1]", "rounds=1"), out=tmp_path, federation=make(0))
    assert done.config.seeds == (1,)
    assert load_stored_study(done.folder)[0].seeds == (0, 1)


def test_other_data_are_refused_where_the_file_that_describes_them_is_gone(tmp_path):
    """It is written again, of the new data: finished runs of the old ones would stay beside it."""

    def make(shift):
        return lambda seed: tiny_federation(seed=seed + shift)

    one = ("rounds=1", 'use_methods=["Solo"]', "methods.Alone.label=Solo")
    run_study(small("seeds=[0]", *one), out=tmp_path, federation=make(0))
    (tmp_path / "tiny/federation.json").unlink()
    with pytest.raises(CheckpointError, match=r"Solo.seed-0 was run with other data"):
        run_study(small("seeds=[0, 1]", *one), out=tmp_path, federation=make(5))
    done = run_study(small("seeds=[0, 1]", *one), out=tmp_path, federation=make(0))
    assert done.summary["seeds"] == [0, 1]
    assert (tmp_path / "tiny/federation.json").exists()


def test_a_table_that_has_changed_is_read_again(tmp_path, monkeypatch):
    """Also by the same process, which may be a notebook."""
    monkeypatch.chdir(tmp_path)
    text = (
        'name = "mine"\nrounds = 1\nseeds = [0]\nmodel.kind = "linear"\n[data]\ndataset = "table"\n'
        'options = { path = "t.csv", target = "y", client = "c" }\n[[methods]]\nkind = "local"\n'
    )
    rows = [f"{place / 3:.2f},{place % 2},{'ab'[place % 3 > 0]}" for place in range(30)]
    (tmp_path / "t.csv").write_text("\n".join(["x,y,c", *rows]))
    run_study(config.parse_study_text(text))
    run_study(config.parse_study_text(text), resume=True)
    (tmp_path / "t.csv").write_text("\n".join(["x,y,c", *rows, "9.0,1,a"]))
    with pytest.raises(CheckpointError, match="was run with other data"):
        run_study(config.parse_study_text(text), resume=True)


@pytest.fixture
def named():
    """Six clients of the tiny federation with names of several scripts."""
    names = ("Oslo", "مستشفى الملك", "<script>", "🏥", "O'Hara", "Lima")
    return lambda seed=0: replace(tiny_federation(seed=seed), client_names=names)


def test_a_study_knows_the_names_of_its_clients(tmp_path, named):
    done = run_study(small("seeds=[0]", "rounds=1"), out=tmp_path, federation=named)
    assert done.names[1] == "مستشفى الملك"
    assert load_study_results(done.folder).names == done.names == named().names_by_id
    assert stored_runs.load_federation_description(done.folder)["client_names"] == list(
        named().client_names
    )


def test_a_renamed_study_is_read_and_goes_on_under_its_new_name(finished, tmp_path):
    """Its folder may be called anything to be read; to go on it must be a name that a study can have."""
    copy = shutil.copytree(finished.folder, tmp_path / "Größe, neu!")
    assert load_study_results(copy).rows.equals(finished.rows)
    assert load_study_results(copy / "Alone" / "seed-0").config.name == "Größe, neu!"
    with pytest.raises(
        ConfigError, match="the name of the folder is 'Größe, neu!'; expected letters of any script"
    ):
        resume_study(copy, federation=lambda seed: tiny_federation(seed=seed))
    moved = copy.rename(tmp_path / "Größe")
    shutil.rmtree(moved / "Alone" / "seed-1")
    done = resume_study(moved, federation=lambda seed: tiny_federation(seed=seed))
    assert (done.folder, done.config.name) == (moved, "Größe")
    assert done.rows.equals(finished.rows)
    assert contents(moved) == contents(finished.folder)
    assert config.load_study(moved / "config.toml").name == "Größe"
    assert {path.name for path in tmp_path.iterdir()} == {"Größe"}


def test_a_study_in_several_folders_can_be_renamed_at_its_end(tmp_path):
    done = run_study(
        small("name=a/b", "seeds=[0]", "rounds=1"), out=tmp_path, federation=tiny_federation()
    )
    done.folder.rename(tmp_path / "a" / "c")
    study, out = load_stored_study(tmp_path / "a" / "c")
    assert (study.name, out) == ("c", tmp_path.resolve() / "a")


@pytest.mark.full
def test_names_and_labels_of_any_script_are_folders(tmp_path):
    """A name that was typed with its accent apart (NFD) is the same name, and is found again."""
    apart = unicodedata.normalize("NFD", "Größe")
    assert apart != "Größe"
    study = small(f"name={apart}", "methods.random.label=दक्षिण τ=30", "seeds=[0]", "rounds=1")
    done = run_study(study, out=tmp_path, federation=tiny_federation())
    assert done.folder == tmp_path / "Größe"
    assert (done.folder / "दक्षिण τ=30" / "seed-0" / "metrics.parquet").exists()
    assert set(load_study_results(done.folder).rows["label"]) == {"दक्षिण τ=30", "Alone"}
    assert find_studies(tmp_path) == [done.folder]
    more = small(f"name={apart}", "methods.random.label=दक्षिण τ=30", "seeds=[0, 1]", "rounds=1")
    again = run_study(more, out=tmp_path, federation=tiny_federation(), resume=True)
    assert (again.folder, again.summary["seeds"]) == (done.folder, [0, 1])


def test_data_that_a_method_can_do_nothing_with_are_refused_before_anything_is_written(tmp_path):
    text = STUDY.replace('kind = "random"\nnum_peers = 2', 'kind = "sosicfl"\nendpoints = 2')
    numbers = tiny_federation()
    regression = replace(numbers, y=numbers.y.double(), classes=0,
                         tests=tuple(replace(test, y=test.y.double()) for test in numbers.tests))  # fmt: skip
    with pytest.raises(
        ConfigError, match="sosicfl compares clients by how many samples of each class they have"
    ):
        run_study(config.parse_study_text(text), out=tmp_path, federation=regression)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("wrong", "right", "said"),
    [
        (
            "attacks=[{kind='noise', clients=['nobody']}]",
            "attacks=[{kind='noise', clients=[1]}]",
            "attacks[0]: clients is 'nobody'",
        ),
        (
            "attacks=[{kind='nowhere:zeros', clients=1}]",
            "attacks=[{kind='noise', clients=1}]",
            "there is no module 'nowhere'",
        ),
        ("new_clients=['nobody']", "new_clients=[1]", "new_clients is 'nobody'"),
        ("new_clients=5", "new_clients=1", "of 6 clients 1 would take part"),
        ("time={round_seconds=[1.0]}", "time={round_seconds=1.0}", "has 1 numbers"),
    ],
)
def test_clients_that_there_are_not_are_refused_before_anything_is_written(
    tmp_path, wrong, right, said
):
    """Else the setting that was mended would be refused as another one than that of the folder."""
    with pytest.raises(ConfigError, match=re.escape(said)):
        run_study(small(wrong), out=tmp_path, federation=tiny_federation())
    assert not list(tmp_path.iterdir())
    assert run_study(small(right), out=tmp_path, federation=tiny_federation()).folder.exists()


def test_an_attacker_that_one_seed_alone_lacks_is_found_before_the_first_run(tmp_path):
    """The first attack draws one of six clients, which is the named one with some seeds only."""
    attacks = "attacks=[{kind='noise', clients=1}, {kind='scale', clients=[0]}]"
    with pytest.raises(ConfigError, match="attack once"):
        run_study(
            small(attacks, "seeds=40"), out=tmp_path, federation=tiny_federation()
        )  # 1 - (5 / 6) ** 40 of all draws have it
    assert not list(tmp_path.iterdir())
