"""Sweeps: every point once, on the same data where it can be, in studies of its own where it cannot."""

import json
import shutil
from dataclasses import replace

import pytest

from coterie.errors import ConfigError, CoterieError, DataError, RunExistsError
from coterie.methods import METHODS
from coterie.methods.registry import find_published, with_published_options
from coterie.results.stored_runs import load_federation_description
from coterie.simulation.workers import fan_out
from coterie.studies import config
from coterie.studies.run import FoundRuns, load_stored_study, run_study
from coterie.studies.sweep import (
    expand_sweep,
    format_setting,
    join_summaries,
    load_sweep_results,
    run_sweep,
)
from coterie.studies.tune import resume_plan
from coterie.testing import tiny_federation

STUDY = """
name = "tiny"
rounds = 1
seeds = [0]
model = { kind = "linear" }

[data]
dataset = "digits"
num_clients = 4
train = 16
validation = 8

[[methods]]
kind = "random"
label = "Gossip"
paper = "random/fedavg"
num_peers = 2

[[methods]]
kind = "local"
lr = 0.01
"""


def sweep(**axes):
    lines = [
        f"{json.dumps(path.replace('__', '.'))} = {json.dumps(values)}"
        for path, values in axes.items()
    ]
    return config.parse_study_text(STUDY + "\n[sweep]\n" + "\n".join(lines))


def labels(study):
    return [entry.label for entry in study.methods]


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (30, "30"), (-1, "-1"), (-0.5, "-0.5"), (1e-5, "1e-05"), (True, "true"), ([0.1, 1], "0.1-1"),
        ([-1, 2], "-1-2"), (["a", "b"], "a-b"), ("x/y.toml", "x-y.toml"), ("../up", "up"),
    ],
)  # fmt: skip
def test_a_value_in_a_name_keeps_its_sign(value, name):
    """Settings of 1 and -1 would otherwise have one folder and one label."""
    assert format_setting("lr", value) == f"lr={name}"


def test_a_study_that_sweeps_nothing_is_itself():
    study = config.parse_study_text(STUDY)
    assert expand_sweep(study) == (study,)


def test_a_setting_of_a_method_repeats_that_method_alone_and_has_no_published_row():
    (study,) = expand_sweep(sweep(methods__gossip__num_peers=[1, 3]))
    assert labels(study) == ["Gossip num_peers=1", "Gossip num_peers=3", "local"]
    assert [entry.method.num_peers for entry in study.methods[:2]] == [1, 3]
    assert [entry.paper for entry in study.methods] == [None, None, None]
    assert (study.name, study.sweep) == ("tiny", {})


def test_a_kind_reaches_all_its_methods_and_two_axes_make_a_grid():
    (study,) = expand_sweep(sweep(methods__random__num_peers=[1, 2], methods__local__lr=[0.1, 0.2]))
    assert labels(study) == [
        "Gossip num_peers=1",
        "Gossip num_peers=2",
        "local lr=0.1",
        "local lr=0.2",
    ]
    assert [entry.settings.local.lr for entry in study.methods[2:]] == [0.1, 0.2]


def test_a_name_of_a_sweep_reaches_what_it_reaches_with_set():
    """`methods.random` is every method of the kind, also beside one that is labeled Random."""
    text = (
        STUDY
        + '[[methods]]\nkind = "random"\nlabel = "Random"\n[sweep]\n"methods.NAME.num_peers" = [1, 3]\n'
    )
    for name, varied in (
        ("random", ["Gossip", "Random"]),
        ("Random", ["Random"]),
        ("RANDOM", ["Random"]),
    ):
        (study,) = expand_sweep(config.parse_study_text(text.replace("NAME", name)))
        assert {label.split()[0] for label in labels(study) if "num_peers" in label} == {*varied}, (
            name
        )


def test_a_setting_of_training_repeats_every_method_even_one_that_overrides_it():
    (study,) = expand_sweep(sweep(local__lr=[0.5, 0.25], rounds=[2]))
    assert labels(study)[0] == "Gossip lr=0.5 rounds=2"
    assert [entry.settings.local.lr for entry in study.methods] == [0.5, 0.25, 0.5, 0.25]
    assert {entry.settings.rounds for entry in study.methods} == {2}


def test_settings_of_the_data_make_studies_of_their_own():
    studies = expand_sweep(
        sweep(data__num_clients=[4, 6], data__train=[8, 16], methods__gossip__num_peers=[1, 2])
    )
    assert [study.name for study in studies] == [
        "tiny/num_clients=4,train=8",
        "tiny/num_clients=4,train=16",
        "tiny/num_clients=6,train=8",
        "tiny/num_clients=6,train=16",
    ]
    assert [(study.data.num_clients, study.data.train) for study in studies] == [
        (4, 8),
        (4, 16),
        (6, 8),
        (6, 16),
    ]
    assert {tuple(labels(study)) for study in studies} == {
        ("Gossip num_peers=1", "Gossip num_peers=2", "local")
    }


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        ({"methods__gosip__num_peers": [1]}, "did you mean 'Gossip'"),
        ({"methods__gossip__num_peer": [1]}, "did you mean 'num_peers'"),
        ({"data__trains": [1]}, "did you mean 'train'"),
        ({"local__lr": ["fast"]}, "lr is 'fast'; expected a number"),
    ],
)
def test_a_sweep_over_what_does_not_exist_is_refused(axes, said):
    with pytest.raises(ConfigError) as caught:
        expand_sweep(sweep(**axes))
    assert said in str(caught.value)


@pytest.mark.slow
def test_two_points_with_one_folder_are_refused():
    """One of them would not be run, and nothing would say so."""
    study = sweep(model__options__path=["site a/x.csv", "site-a-x.csv"])
    with pytest.raises(ConfigError, match=r"two points .* the folder 'path=site-a-x\.csv'"):
        expand_sweep(study)
    assert len(expand_sweep(sweep(data__train=[16, 16]))) == 2


def test_a_sweep_runs_every_point_and_joins_the_summaries(tmp_path):
    study = sweep(data__train=[8, 16])
    heard = []
    done = run_sweep(study, out=tmp_path, observer=heard.append)
    assert {(step.label, step.round) for step in heard} == {
        (x, r) for x in ("Gossip", "local") for r in (-1, 0)
    }
    joined = json.loads((tmp_path / "tiny/summary.json").read_text())
    assert {row["label"] for row in joined["rows"]} == {
        f"{x}, train={n}" for x in ("Gossip", "local") for n in (8, 16)
    }
    assert len(joined["timing"]) == 4
    assert (tmp_path / "tiny/train=8/Gossip/seed-0/metrics.parquet").exists()
    assert [one.summary for one in load_sweep_results(tmp_path / "tiny")] == [
        one.summary for one in done
    ]
    heard.clear()
    with pytest.raises(RunExistsError, match="expected a new folder"):
        run_sweep(study, out=tmp_path, resume=False)
    # a report is of one point: its folder says which there are
    with pytest.raises(
        DataError, match="sweep of several studies; give one of them: train=16, train=8"
    ):
        load_federation_description(tmp_path / "tiny")
    run_sweep(study, out=tmp_path, observer=heard.append)
    assert heard == []
    with pytest.raises(RunExistsError, match=r"other values of data.train \(\[8, 16\] there"):
        run_sweep(sweep(data__train=[8, 24]), out=tmp_path)
    run_sweep(sweep(data__train=[8, 16, 24]), out=tmp_path, observer=heard.append)
    assert {step.label for step in heard} == {"Gossip", "local"}
    assert len(heard) == 4


@pytest.mark.full
def test_a_sweep_that_is_stopped_in_its_first_run_goes_on_by_its_folder(tmp_path):
    study = sweep(data__train=[8, 16])

    def stop(step):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_sweep(study, out=tmp_path, observer=stop)
    found, out = load_stored_study(tmp_path / "tiny", to_run=True)
    assert (found, out) == (study, tmp_path)
    done = resume_plan(tmp_path / "tiny")
    assert [len(one.summary["timing"]) for one in done] == [2, 2]


@pytest.mark.full
def test_the_runs_of_all_points_are_one_list(tmp_path):
    """One fan-out gets all four; what is there is counted once, over all points."""
    study, calls, notes, steps = sweep(data__train=[8, 16]), [], [], []

    def note_jobs(work, jobs, workers, emit):
        listed = list(jobs)
        calls.append((workers, [str(job) for job in listed]))
        return fan_out(work, listed, 1, emit)

    note_jobs.far = False
    options = {"out": tmp_path, "workers": 8, "over": note_jobs, "notes": notes.append}
    run_sweep(study, observer=steps.append, **options)
    names = [f"{label}, seed 0, train={n}" for n in (8, 16) for label in ("Gossip", "local")]
    assert calls == [(4, names)]
    assert [step.run_name for step in steps if step.round == 0] == names
    shutil.rmtree(tmp_path / "tiny/train=16/local")
    run_sweep(study, **options)
    assert calls[1:] == [(1, names[3:])]
    found = [str(note) for note in notes if isinstance(note, FoundRuns)]
    assert found == ["3 of 4 runs are there"]


@pytest.mark.slow
def test_two_workers_share_the_points_and_leave_the_same_bytes(tmp_path):
    one = run_sweep(sweep(data__train=[8, 16]), out=tmp_path / "one")
    two = run_sweep(sweep(data__train=[8, 16]), out=tmp_path / "two", workers=2)
    for a, b in zip(one, two, strict=True):
        for path in sorted(a.folder.rglob("*.parquet")):
            assert path.read_bytes() == (b.folder / path.relative_to(a.folder)).read_bytes()


def test_a_point_that_cannot_run_is_refused_before_anything_is_written(tmp_path):
    """The second point: more clients than a training sample each for."""
    with pytest.raises(CoterieError):
        run_sweep(sweep(data__num_clients=[4, 100_000]), out=tmp_path)
    assert not (tmp_path / "tiny").exists()


@pytest.mark.slow
def test_points_of_a_sweep_are_joined_over_the_seeds_that_all_have(tmp_path):
    """Of the point train=16 seed 0 is deleted: both points are averaged over seed 1, and n is 1 in every row."""
    done = run_sweep(replace(sweep(data__train=[8, 16]), seeds=(0, 1)), out=tmp_path)
    shutil.rmtree(tmp_path / "tiny/train=16/Gossip/seed-0")
    joined_now = join_summaries(load_sweep_results(tmp_path / "tiny"))
    assert joined_now["seeds"] == [1]
    assert {row["seeds"] for row in joined_now["rows"]} == {1}
    said = {(one["label"], one["seed"], one["state"]) for one in joined_now["left_out"]}
    assert ("Gossip, train=16", 0, "missing") in said
    assert ("local, train=8", 0, "finished") in said
    shutil.rmtree(tmp_path / "tiny/train=16")
    first, second = load_sweep_results(tmp_path / "tiny")
    assert first.summary == done[0].summary
    assert second.summary["rows"] == []
    assert [(one["label"], one["seed"], one["state"]) for one in second.summary["left_out"]] == [
        (label, seed, "missing") for seed in (0, 1) for label in ("Gossip", "local")
    ]
    shutil.rmtree(tmp_path / "tiny/train=8")
    # A point without a folder is one of which no run is there.
    points = load_sweep_results(tmp_path / "tiny")
    assert [len(one.summary["left_out"]) for one in points] == [4, 4]


def test_a_sweep_over_methods_is_one_study(tmp_path):
    (done,) = run_sweep(
        sweep(methods__gossip__num_peers=[1, 2]), out=tmp_path, federation=tiny_federation()
    )
    assert done.folder == tmp_path / "tiny"
    assert list(done.rows["label"].unique()) == [
        "Gossip num_peers=1",
        "Gossip num_peers=2",
        "local",
    ]


def test_run_study_points_to_run_sweep(tmp_path):
    with pytest.raises(ConfigError, match="run_sweep"):
        run_study(sweep(data__train=[8]), out=tmp_path)


@pytest.mark.parametrize(("kind", "field"), [("fedgwc", "ddof"), ("sosicfl", "radius")])
def test_a_sweep_over_presets_runs_what_each_says(kind, field):
    """Also when it was written and read in between, and a setting that is given stays."""
    text = (
        STUDY
        + f'[[methods]]\nkind = "{kind}"\n[sweep]\n"methods.{kind}.preset" = ["coterie", "released"]\n'
    )
    published = find_published(METHODS[kind])
    study = config.parse_study_text(text)
    for one in (study, config.parse_study_text(config.format_study(study, decided=False))):
        (expanded,) = expand_sweep(one)
        methods = [with_published_options(entry.method) for entry in expanded.methods[2:]]
        assert methods == [published(preset="coterie"), published(preset="released")]
        assert len({getattr(method, field) for method in methods}) == 2
        assert config.parse_study_text(config.format_study(expanded)) == expanded
    value = getattr(published(), field)
    (kept,) = expand_sweep(
        config.parse_study_text(text, overrides=[f"methods.{kind}.{field}={value}"])
    )
    kept_methods = [with_published_options(entry.method) for entry in kept.methods[2:]]
    assert [getattr(method, field) for method in kept_methods] == [value, value]


def test_an_item_of_a_list_is_reached_by_its_number():
    """The shift's own setting varies; the rest of the list stays."""
    text = STUDY.replace(
        "validation = 8",
        "validation = 8\nshift = [{ kind = 'rotation', degrees = [0, 90], sizes = [2, 2] },"
        " { kind = 'iid' }]",
    )
    axis = '[sweep]\n"data.shift.0.degrees" = [[0, 90], [0, 180]]\n'
    points = expand_sweep(config.parse_study_text(f"{text}\n{axis}"))
    assert [one.data.shift[0]["degrees"] for one in points] == [[0.0, 90.0], [0.0, 180.0]]
    assert {one.data.shift[1]["kind"] for one in points} == {"iid"}
    assert [one.name for one in points] == ["tiny/degrees=0-90", "tiny/degrees=0-180"]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ("data.shift.1.degrees=[0]", "data.shift is a list and has no item '1' .* 0 to 0"),
        ("data.shift.first.degrees=[0]", "data.shift is a list and has no item 'first'"),
    ],
)
def test_an_item_that_is_not_there_is_named(change, match):
    text = STUDY.replace(
        "validation = 8", "shift = [{ kind = 'rotation', degrees = [0], sizes = [4] }]"
    )
    with pytest.raises(ConfigError, match=match):
        config.parse_study_text(text, overrides=(change,))


def test_settings_that_vary_together_make_a_point_for_each_pair():
    """Two of three methods' settings and the data: no product of the values."""
    study = sweep(**{"data.num_clients, rounds, methods.gossip.num_peers": [[4, 1, 1], [6, 2, 3]]})
    points = expand_sweep(study)
    found = [
        (one.data.num_clients, one.settings.rounds, one.methods[0].method.num_peers)
        for one in points
    ]
    assert found == [(4, 1, 1), (6, 2, 3)]
    assert [one.name for one in points] == [
        "tiny/num_clients=4,rounds=1,num_peers=1",
        "tiny/num_clients=6,rounds=2,num_peers=3",
    ]


def test_settings_of_methods_that_vary_together_stay_in_one_study():
    """A method has the values of its own settings; the local method takes the rate alone."""
    (study,) = expand_sweep(sweep(**{"methods.gossip.num_peers, lr": [[1, 0.1], [3, 0.2]]}))
    rates = {entry.label: entry.settings.local.lr for entry in study.methods}
    peers = [entry.method.num_peers for entry in study.methods if entry.kind == "random"]
    assert list(rates.values()) == [0.1, 0.2, 0.1, 0.2]
    assert peers == [1, 3]


def test_values_that_vary_together_are_as_many_as_the_settings():
    with pytest.raises(ConfigError, match=r"found \[4\]; expected a list of 2 values"):
        expand_sweep(sweep(**{"data.num_clients, rounds": [[4]]}))
