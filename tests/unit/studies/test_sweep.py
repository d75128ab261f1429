"""Sweeps: every point once, on the same data where it can be, in studies of its own where it cannot."""

import json
import shutil
from dataclasses import replace

import pytest

from coterie.errors import ConfigError, RunExistsError
from coterie.methods import METHODS
from coterie.methods.registry import find_published, with_published_options
from coterie.studies import config
from coterie.studies.run import load_stored_study, run_study
from coterie.studies.sweep import expand_sweep, join_summaries, load_sweep_results, run_sweep
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
    run_sweep(study, out=tmp_path, observer=heard.append)
    assert heard == []
    with pytest.raises(RunExistsError, match=r"other values of data.train \(\[8, 16\] there"):
        run_sweep(sweep(data__train=[8, 24]), out=tmp_path)
    run_sweep(sweep(data__train=[8, 16, 24]), out=tmp_path, observer=heard.append)
    assert {step.label for step in heard} == {"Gossip", "local"}
    assert len(heard) == 4


def test_a_sweep_that_is_stopped_in_its_first_run_goes_on_by_its_folder(tmp_path):
    study = sweep(data__train=[8, 16])

    def stop(step):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_sweep(study, out=tmp_path, observer=stop)
    found, out = load_stored_study(tmp_path / "tiny", to_run=True)
    assert (found, out) == (study, tmp_path)
    done = run_sweep(found, out=out)
    assert [len(one.summary["timing"]) for one in done] == [2, 2]


@pytest.mark.full
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
        (label, seed, "missing") for label in ("Gossip", "local") for seed in (0, 1)
    ]
    shutil.rmtree(tmp_path / "tiny/train=8")
    with pytest.raises(ConfigError, match="holds no study"):
        load_sweep_results(tmp_path / "tiny")


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
