"""Tuning: the best point by validation, wider grids, and test sets that nothing depends on."""

import json
from dataclasses import replace

import pytest
import torch
from tests.selection import first_only
from typer.testing import CliRunner

from coterie.cli.app import app
from coterie.data.arrays import from_arrays
from coterie.data.build import Split, build_federation
from coterie.data.federation import TestSet
from coterie.errors import CheckpointError, ConfigError, DataError
from coterie.methods.registry import with_published_options
from coterie.papers.fedgwc import PublishedFedGwc
from coterie.results.conditions import count_tried_settings
from coterie.results.stored_runs import load_runs
from coterie.runtime.task import make_task
from coterie.studies import config, tune
from coterie.studies.definition import is_label
from coterie.studies.inputs import StudyInputs
from coterie.studies.run import FoundRuns, resume_study
from coterie.studies.sweep import load_plan

STUDY = """
name = "small"
rounds = 2
seeds = [0]
engine = "loop"
[data]
dataset = "synthetic-regression"
num_clients = 4
train = 20
validation = 10
test_samples = 20
options = { dim = 3, test = 20 }
shift = [{ kind = "regression-targets", clusters = 2 }]
[model]
kind = "linear"
[local]
optimizer = "sgd"
lr = 0.001
[[methods]]
kind = "random"
label = "Random"
num_peers = 1
[[methods]]
kind = "local"
label = "Alone"
"""


@pytest.fixture
def study():
    return config.parse_study_text(STUDY)


@pytest.mark.parametrize("poison", first_only([float("nan"), 1e30]))
def test_no_choice_depends_on_the_test_sets(study, poison):
    """With test sets of NaN, or of other numbers, every trial is what it was."""

    def poisoned(seed):
        federation = build_federation(study.data, seed)
        tests = tuple(
            TestSet(torch.full_like(t.x, poison), torch.full_like(t.y, poison), t.name)
            for t in federation.tests
        )
        return replace(federation, tests=tests)

    grid = {"lr": [0.001, 0.003]}
    honest = tune.tune_study(study, grid, widenings=0)
    blinded = tune.tune_study(study, grid, widenings=0, federation=poisoned)
    assert honest.trials == blinded.trials
    assert config.format_study(honest.study) == config.format_study(blinded.study)


def test_a_blind_federation_has_nothing_of_its_test_sets(study):
    federation = build_federation(study.data, 0)
    found = StudyInputs(study).without_tests()(0)
    assert [t.name for t in found.tests] == [t.name for t in federation.tests]
    assert all(len(t.x) == 1 and not t.x.any() and not t.y.any() for t in found.tests)
    assert torch.equal(found.x, federation.x)
    assert torch.equal(found.split, federation.split)


def test_no_trial_has_the_test_sets(study, monkeypatch):
    """Whatever a method or a metric may look at: there is one sample of zeros."""
    seen: list[int] = []

    def spy(federation, *args, **kwargs):
        seen.extend(len(test.x) for test in federation.tests)
        return make_task(federation, *args, **kwargs)

    monkeypatch.setattr("coterie.simulation.run.make_task", spy)
    tune.tune_study(study, {"lr": [0.001]}, widenings=0)
    assert set(seen) == {1}


class Stopped(Exception):
    pass


@pytest.fixture
def stopped(study, tmp_path):
    """Tuning of six trials that is stopped after the third."""
    seen = []

    def stop(trial):
        seen.append(trial)
        if len(seen) == 3:
            raise Stopped

    with pytest.raises(Stopped):
        tune.tune_study(study, GRID, widenings=0, out=tmp_path, observer=stop)
    return seen


GRID = {"lr": [0.001, 0.003, 0.009]}


@pytest.mark.slow
def test_tuning_goes_on_after_a_stop_with_the_trials_that_have_ended(study, tmp_path, stopped):
    notes = []
    again = tune.resume_plan(tmp_path / "small-trials", notes=notes.append)
    assert isinstance(again, tune.TuningResult)
    assert [str(note) for note in notes if isinstance(note, FoundRuns)] == ["3 of 6 runs are there"]
    whole = tune.tune_study(study, GRID, widenings=0)
    assert sorted(again.trials, key=str) == sorted(whole.trials, key=str)
    assert again.choices == whole.choices
    assert set(stopped) <= set(again.trials)


def test_of_equal_choices_the_first_wins_whichever_ended_first(study, tmp_path):
    """The second call finds the trial of the first choice, and runs that of the second."""

    def stop(trial):
        if dict(trial.point) == {"checkpoint_seconds": 7.0} and trial.label == "Random":
            raise Stopped

    grid = {"methods.Random.checkpoint_seconds": [7.0, 8.0]}
    with pytest.raises(Stopped):
        tune.tune_study(study, grid, widenings=0, out=tmp_path, observer=stop)
    again = tune.tune_study(study, grid, widenings=0, out=tmp_path)
    random = [one for one in again.trials if one.label == "Random"]
    assert len({one.value for one in random}) == 1
    assert dict(again.choices[0].point) == {"checkpoint_seconds": 7.0}
    assert [dict(one.point)["checkpoint_seconds"] for one in random] == [7.0, 8.0]


def test_trials_of_other_data_are_refused(study, tmp_path, stopped):
    other = replace(study, data=replace(study.data, train=21))
    with pytest.raises(CheckpointError, match="train is 20 there and 21 here"):
        tune.tune_study(other, GRID, widenings=0, out=tmp_path)


def test_a_folder_that_cannot_be_written_is_found_before_the_first_trial(study, tmp_path):
    (tmp_path / "small-trials").write_text("a file")
    trials = []
    with pytest.raises(ConfigError, match="small-trials is no folder; choose another"):
        tune.tune_study(study, GRID, widenings=0, out=tmp_path, observer=trials.append)
    assert trials == []


def test_a_result_that_cannot_be_written_is_found_before_the_first_trial(tmp_path):
    (tmp_path / "study.toml").write_text(STUDY)
    (tmp_path / "small-tuned.toml").mkdir()
    words = ["tune", str(tmp_path / "study.toml"), "--grid", "lr=0.1", "--out", str(tmp_path)]
    found = CliRunner().invoke(app, words)
    assert "small-tuned.toml is a folder" in str(found.exception)
    assert not (tmp_path / "small-trials").exists()


@pytest.mark.full
def test_trials_are_no_results(study, tmp_path, stopped):
    """They have no test data: what reads results refuses them, in whichever folder above they are."""
    trials = tmp_path / "small-trials"
    for folder in (trials, tmp_path):
        with pytest.raises(DataError, match="is a trial of tuning small, which has no test data"):
            load_runs([folder])
    with pytest.raises(
        ConfigError, match="holds trials of tuning small; go on with `coterie resume"
    ):
        resume_study(trials)
    (standings,) = load_plan(trials).list_standings().values()
    assert [one.state for one in standings].count("finished") == 3


def test_choices_whose_names_are_equal_or_too_long_are_kept_apart(study):
    """A minus at the start is no part of a name of a folder."""
    points = tune._list_points({"lr": (0.5, -0.5)})
    first = tune._name_trial("Alone", points[0], ())
    second = tune._name_trial("Alone", points[1], {first})
    long = tune._name_trial("Alone", (("note", "x" * 300),), ())
    assert first == "Alone lr=0.5"
    assert len({first, second, long}) == 3
    assert all(is_label(name) for name in (first, second, long))


def test_a_choice_reaches_a_label_of_any_script(study):
    """The label was found to be none only when all trials had ended."""
    label = "Größe 𝜏, 1.5"
    named = config.parse_study_text(STUDY, overrides=[f'methods.Alone.label="{label}"'])
    chosen = tune._apply_choices(named, {label: (("lr", 0.5),)})
    assert chosen.find_method(label).settings.local.lr == 0.5
    assert chosen.find_method("Random").settings.local.lr == 0.001


def test_the_best_point_is_chosen_and_the_grid_goes_on_beyond_its_edge(study):
    """Two rounds from zero want a larger step than 1e-4: the grid grows by its own ratio until a point is inside."""
    tuned = tune.tune_study(study, {"methods.Alone.lr": [0.0001, 0.0003]}, widenings=2)
    tried = sorted({dict(t.point)["lr"] for t in tuned.trials if t.label == "Alone"})
    assert tried == [0.0001, 0.0003, 0.0009, 0.0027]
    alone = next(c for c in tuned.choices if c.label == "Alone")
    values = {dict(t.point)["lr"]: t.value for t in tuned.trials if t.label == "Alone"}
    assert alone.value == min(values.values())
    assert dict(alone.point)["lr"] == min(values, key=lambda lr: values[lr])
    assert tuned.study.find_method("Alone").settings.local.lr == dict(alone.point)["lr"]
    assert tuned.study.find_method("Random").settings.local.lr == 0.001, "only Alone was tuned"


@pytest.mark.parametrize(
    ("values", "chosen", "wider"),
    [
        ((1, 10), 10, (1, 10, 100)),
        ((1.0, 0.1), 0.1, (1.0, 0.1, 0.01)),
        ((1, 2, 3), 2, (1, 2, 3)),
        ((0, 5), 5, (0, 5, 10)),
        ((0, 5), 0, (0, 5)),  # nothing below 0
        (("a", "b"), "b", ("a", "b")),
        ((3,), 3, (3,)),
        ((1, 2), 1, (1, 2)),  # half of 1 is no whole number above 0
    ],
)
def test_an_axis_is_continued_by_its_own_ratio_or_step(values, chosen, wider):
    assert tune._extend_axis(values, chosen) == wider


BUDGETS = [
    # choices, rounds, budget, and the rounds of each rung, worked by hand
    (4, 20, 2, [5, 10]),  # 4 x 5 and 2 x 10 are 40 rounds, two full runs
    (3, 20, 2, [6, 10]),
    (8, 24, 3, [3, 6, 12]),
    (2, 10, 9, [10]),  # no trial is longer than a run
    (1, 10, 1, [10]),
]


@pytest.mark.parametrize(("count", "rounds", "budget", "rungs"), BUDGETS)
def test_each_rung_trains_the_same_share_of_a_budget(study, count, rounds, budget, rungs):
    study = config.parse_study_text(config.format_study(study), overrides=[f"rounds={rounds}"])
    assert tune._plan_rungs(study, "Alone", {"lr": tuple(range(count))}, budget) == rungs


@pytest.mark.full
def test_with_a_budget_the_better_half_of_the_choices_goes_on(study, tmp_path):
    """Of four, two train for two rounds; the best of these two is chosen, and four count as tried."""
    lrs = [0.0001, 0.0003, 0.001, 0.003]
    tuned = tune.tune_study(study, {"methods.Alone.lr": lrs}, budget=4)
    alone = {(t.rounds, dict(t.point)["lr"]): t.value for t in tuned.trials if t.label == "Alone"}
    first = sorted(lrs, key=lambda lr: alone[1, lr])
    assert {lr for rounds, lr in alone if rounds == 2} == set(first[:2])
    choice = next(one for one in tuned.choices if one.label == "Alone")
    assert choice.value == min(alone[2, lr] for lr in first[:2])
    assert [t.rounds for t in tuned.trials if t.label == "Random"] == [2], "nothing to choose"
    path = tune.write_result(tuned, tmp_path).with_suffix(".json")
    assert count_tried_settings(path) == {"Alone": 4, "Random": 1}


@pytest.mark.parametrize(
    ("grid", "budget", "said"),
    [
        ({"lr": [0.1, 0.2, 0.3, 0.4]}, 1, "expected at least 4: each of 4 choices of Random needs"),
        ({"lr": [0.1]}, 0, "--budget is 0"),
        ({"rounds": [1, 2]}, 4, "--budget sets the rounds of trials; leave rounds out"),
    ],
)
def test_a_budget_that_cannot_be_kept_is_refused_before_the_first_trial(
    study, tmp_path, grid, budget, said
):
    with pytest.raises(ConfigError, match=said):
        tune.tune_study(study, grid, budget=budget, out=tmp_path)
    assert [*tmp_path.iterdir()] == []


def test_an_axis_may_be_given_for_every_method_of_a_kind(study):
    """As with --set, "methods.local.lr" means the methods of the kind local, whatever their labels are."""
    tuned = tune.tune_study(study, {"methods.local.lr": [0.0001, 0.001]}, widenings=0)
    assert {t.label for t in tuned.trials if t.point} == {"Alone"}


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "reached"), [("local", {"Alone", "Local"}), ("Local", {"Local"}), ("LOCAL", {"Local"})]
)
def test_a_name_reaches_what_it_reaches_with_set(study, name, reached):
    alone = study.find_method("Alone")
    two = replace(study, methods=(alone, replace(alone, label="Local")))
    tuned = tune.tune_study(two, {f"methods.{name}.lr": [0.001, 0.003]}, widenings=0)
    assert {trial.label for trial in tuned.trials if trial.point} == reached


@pytest.mark.full
def test_a_setting_of_local_training_has_both_of_its_names(study):
    """`lr`, and `local.lr` as --set and sweeps call it: the same trials."""
    alone = replace(study, methods=(study.find_method("Alone"),))
    short, long = (
        tune.tune_study(alone, {name: [0.001, 0.003]}, widenings=0) for name in ("lr", "local.lr")
    )
    assert [t.point for t in short.trials] == [t.point for t in long.trials]
    assert [t.value for t in short.trials] == [t.value for t in long.trials]


def test_a_setting_that_is_given_twice_is_refused():
    """The values that came first would not be tried."""
    with pytest.raises(ConfigError, match="--grid has lr twice"):
        tune.parse_grid(["lr=0.1,0.2", "tau=3", "lr=0.3"])


def test_a_setting_nobody_has_is_refused(study):
    with pytest.raises(ConfigError, match="no method of the study has a setting 'tua'"):
        tune.tune_study(study, {"tua": [1, 2]})
    with pytest.raises(
        ConfigError, match="unknown setting of Random 'num_peer'; did you mean 'num_peers'"
    ):
        tune.tune_study(study, {"methods.Random.num_peer": [1, 2]})


def test_clients_without_validation_data_cannot_be_tuned(study):
    bare = replace(study, data=replace(study.data, validation=0))
    with pytest.raises(ConfigError, match="validation data of every client"):
        tune.tune_study(bare, {"lr": [0.1]})


@pytest.mark.full
def test_the_command_writes_a_study_that_can_be_run(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(STUDY)
    arguments = ["tune", str(path), "--grid", "lr=0.0003,0.001", "--out", str(tmp_path / "tuned")]
    done = CliRunner().invoke(app, [*arguments, "--workers", "1", "--widenings", "0", "--quiet"])
    assert done.exit_code == 0, done.output
    assert "Alone: lr = 0.001" in done.output
    chosen = config.load_study(tmp_path / "tuned" / "small-tuned.toml")
    assert chosen.name == "small-tuned"
    assert chosen.find_method("Alone").settings.local.lr == 0.001
    assert (tmp_path / "tuned" / "small-tuned.json").exists()


@pytest.mark.slow
def test_seeds_of_the_trials_are_apart_from_those_of_the_results(study, tmp_path):
    """Given, or in the grid; the study that is written keeps its own. Trials are those of a study with these seeds."""
    lrs = {"lr": [0.001, 0.003]}
    given = tune.tune_study(study, lrs, widenings=0, seeds=[7, 9])
    named = tune.tune_study(study, {**lrs, "seeds": [7, 9]}, widenings=0)
    assert {t.seed for t in given.trials} == {7, 9}
    assert tuple(given.study.seeds) == (0,)
    assert (
        given.trials
        == named.trials
        == tune.tune_study(replace(study, seeds=(7, 9)), lrs, widenings=0).trials
    )
    with pytest.raises(ConfigError, match="seeds"):
        tune.tune_study(study, lrs, seeds=[7, 7])


@pytest.mark.slow
def test_the_command_takes_seeds_of_the_trials_from_the_study_or_as_an_option(tmp_path):
    path, out = tmp_path / "small.toml", tmp_path / "tuned"
    path.write_text(STUDY + "[tune]\nlr = [0.001]\nseeds = [5, 6]\n")
    for options, seeds in (
        ([], {5, 6}),
        (["--seeds", "8"], set(range(8))),
        (["--seeds", "8,9"], {8, 9}),
    ):
        done = CliRunner().invoke(
            app, ["tune", str(path), "--out", str(out), "--workers", "1", "--quiet", *options]
        )
        assert done.exit_code == 0, done.output
        assert {one["seed"] for one in json.loads((out / "small-tuned.json").read_text())} == seeds
        assert list(config.load_study(out / "small-tuned.toml").seeds) == [0]


def test_settings_with_which_a_client_diverges_count_as_tried(study, tmp_path):
    """Their trials are written without a value, so that the effort of tuning is not understated."""
    study = config.parse_study_text(config.format_study(study), overrides=["evaluate=final"])
    found = tune.tune_study(study, {"methods.Alone.lr": [0.001, 1e30]}, widenings=0)
    path = tune.write_result(found, tmp_path).with_suffix(".json")
    alone = [one for one in json.loads(path.read_text()) if one["label"] == "Alone"]
    assert {one["lr"]: one["value"] is None for one in alone} == {0.001: False, 1e30: True}
    assert count_tried_settings(path) == {"Alone": 2, "Random": 1}


def test_a_grid_of_presets_tries_what_each_says():
    """The chosen preset is written with all that it decides; a run of it is what the trial was."""
    study = config.parse_study_text(STUDY + '[[methods]]\nkind = "fedgwc"\n')
    for preset in ("coterie", "released"):
        tried = tune._apply_choices(study, {"fedgwc": (("preset", preset),)})
        found = with_published_options(tried.find_method("fedgwc").method)
        assert found == PublishedFedGwc(preset=preset)
        assert config.parse_study_text(config.format_study(tried)) == tried


@pytest.mark.slow
def test_data_and_modules_of_ones_own_can_be_tuned(study):
    """A federation of one's own, and a module: here those that the study names, so that nothing may change."""
    grid = {"lr": [0.001, 0.003]}
    named = tune.tune_study(study, grid, widenings=0)
    own = replace(
        study, data=replace(study.data, dataset="own"), model=replace(study.model, kind="own")
    )
    given = tune.tune_study(
        own, grid, widenings=0, federation=build_federation(study.data, 0), model="linear"
    )
    assert given.trials == named.trials
    with pytest.raises(ConfigError, match="data of your own; give them from Python, as federation"):
        tune.tune_study(own, grid, model="linear")
    with pytest.raises(ConfigError, match="module of your own; give it from Python, as model"):
        tune.tune_study(own, grid, federation=build_federation(study.data, 0))


def made(seed: int):
    """A federation by import path, with clients that have names."""
    x = torch.arange(120.0).reshape(60, 2) / 60
    return from_arrays(x, x.sum(1), clients=["é", "b", "c"] * 20, split=Split(seed=seed))


@pytest.mark.slow
def test_data_by_import_path_can_be_tuned_by_the_command(tmp_path):
    head, _, rest = STUDY.partition("[data]")
    text = f'{head}[data]\ndataset = "{__name__}:made"\n[model]{rest.partition("[model]")[2]}'
    (tmp_path / "own.toml").write_text(text)
    told = CliRunner().invoke(
        app,
        [
            "tune",
            str(tmp_path / "own.toml"),
            "-g",
            "lr=0.001,0.01",
            "-o",
            str(tmp_path),
            "-w",
            "1",
            "--quiet",
        ],
    )
    assert told.exception is None, told.output
    tuned = config.load_study(tmp_path / "small-tuned.toml")
    assert tuned.data.dataset == f"{__name__}:made"


def test_the_client_without_validation_data_is_named(study):
    bare = from_arrays(
        torch.zeros(20, 3),
        torch.arange(20) / 8,
        clients=["é", "b"] * 10,
        split=Split(validation_fraction=0),
    )
    with pytest.raises(
        ConfigError, match=r"validation data of every client, and b has none; .*validation="
    ):
        tune.tune_study(study, {"lr": [0.1]}, federation=bare)


def test_numbers_next_to_words_stay_numbers():
    """So that what is refused is the word, and not the number in front of it."""
    assert tune.parse_grid(["lr=0.01,abc", "optimizer=sgd,adam"]) == {
        "lr": [0.01, "abc"],
        "optimizer": ["sgd", "adam"],
    }


def test_objectives_are_not_ranked_by_their_own_values():
    """Half of a squared error is less than the whole, and no better; by accuracy objectives can be ranked."""
    points = [(("loss", "mse"),), (("loss", "huber"),)]
    axes = {"loss": ("mse", "huber")}
    found = [tune.Trial("Local", point, 0, "loss", 1.0 / (1 + n)) for n, point in enumerate(points)]
    with pytest.raises(
        ConfigError, match="Local: trials with different losses have no value in common"
    ):
        tune._rank_points("Local", found, axes)
    # As `huber` beside `mse`, whose validation also has the absolute error.
    mixed = [found[0], replace(found[1], metric="mae")]
    with pytest.raises(ConfigError, match="they have loss and mae"):
        tune._rank_points("Local", mixed, axes)
    by_accuracy = [replace(one, metric="accuracy") for one in found]
    assert tune._rank_points("Local", by_accuracy, axes)[0].point == points[0]
    one = {"loss": ("mse",), "lr": (0.1, 0.2)}
    tried = [tune.Trial("Local", (("loss", "mse"), ("lr", lr)), 0, "loss", lr) for lr in one["lr"]]
    assert tune._rank_points("Local", tried, one)[0].value == 0.1


def test_a_grid_is_not_continued_by_a_value_that_no_method_can_have():
    """Momentum is below 1; after 0.5 and 0.9 the ratio leads to 1.62, which ended the tuning."""
    slow = config.parse_study_text(STUDY.replace("lr = 0.001", "lr = 0.00001"))
    found = tune.tune_study(slow, {"methods.Alone.momentum": [0.5, 0.9]}, widenings=2)
    alone = found.choices[1]
    assert (alone.point, alone.at_edge) == ((("momentum", 0.9),), ("momentum",))


@pytest.mark.parametrize(
    ("values", "chosen", "wider"),
    [
        ((0.5, 1.0), 1.0, (0.5, 1.0)),
        ((0.25, 0.5), 0.5, (0.25, 0.5, 1.0)),
        ((0.5, 1.0), 0.5, (0.5, 1.0, 0.25)),
        ((2, 4), 4, (2, 4, 8)),
    ],
)
def test_a_share_of_clients_is_not_continued_by_a_number_of_them(values, chosen, wider):
    """participation = 2 is two clients, not twice all of them."""
    choice = tune.Choice("A", (("participation", chosen),), "loss", 1.0, ())
    found = tune._widen_grid({"participation": values}, choice, lambda *_: True)
    assert found == {"participation": wider}


def test_an_infinite_budget_is_refused(study):
    with pytest.raises(ConfigError, match=r"--budget is inf; expected .* not infinite"):
        tune.tune_study(study, {"lr": [0.001, 0.003]}, budget=float("inf"))
