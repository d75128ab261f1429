"""What a run passes on on its way: progress, times, checkpoints, forecasts and the engine of earlier runs."""

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from coterie.engine import EngineChoice
from coterie.errors import CheckpointError, ConfigError, RunExistsError
from coterie.methods import METHODS
from coterie.methods.local import Local
from coterie.methods.random_gossip import Random
from coterie.runtime import checkpoint
from coterie.runtime.task import make_task
from coterie.simulation import _memory
from coterie.simulation import run as running
from coterie.simulation.run import Note, Progress, check_run, reopen_loop, simulate
from coterie.testing import tiny_federation, tiny_settings


def go(folder=None, *, federation=None, method=None, **options):
    settings = tiny_settings(**{"rounds": 2, "engine": "loop", **options.pop("settings", {})})
    return simulate(
        federation or tiny_federation(),
        method or Random(2),
        model="linear",
        settings=settings,
        seed=3,
        folder=folder,
        **options,
    )


# ---------------------------------------------------------------- progress


def test_an_observer_receives_each_round_with_the_means_of_the_table():
    heard: list[Progress] = []
    run = go(observer=heard.append, label="Mine", settings={"eval_every": 1})
    assert [one.round for one in heard] == [-1, 0, 1]
    assert {(one.label, one.seed, one.rounds, one.metric) for one in heard} == {
        ("Mine", 3, 2, "accuracy")
    }
    table = run.metrics[
        (run.metrics["split"] == "validation") & (run.metrics["model"] == "current")
    ]
    for one in heard:
        own = table[table["round"] == one.round].groupby("metric", observed=True)["value"].mean()
        assert one.loss == pytest.approx(own["loss"])
        assert one.score == one.accuracy == pytest.approx(own["accuracy"])
        assert (one.diverged, one.engine) == (0, run.engine)
    seconds = [one.seconds for one in heard]
    assert seconds == sorted(seconds)
    assert 0 < seconds[0] < seconds[-1] <= run.timing["wall_s"]
    assert heard[-1].describe_round().startswith("round 2/2, val. acc. ")


def test_targets_that_are_no_classes_have_another_score_and_no_accuracy():
    heard: list[Progress] = []
    run = go(
        federation=tiny_federation(kind="labels"),
        observer=heard.append,
        settings={"loss": "multi-label"},
    )
    last, table = heard[-1], run.metrics
    own = table[(table["split"] == "validation") & (table["round"] == 1)]
    own = own[(own["metric"] == last.metric) & (own["model"] == "current")]
    assert last.metric not in ("accuracy", "loss")
    assert math.isnan(last.accuracy)
    assert last.score == pytest.approx(own["value"].mean())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"loss": 0.5, "score": 0.25}, "val. acc. 25.0 %"),
        ({"loss": 0.123456, "score": math.nan}, "val. loss 0.1235"),
        ({"loss": math.nan, "score": math.nan}, ""),
        ({"loss": 0.5, "score": 0.25, "metric": "r2"}, "val. R² 0.25"),
    ],
)
def test_the_score_or_else_the_loss_is_said_in_a_few_words(given, words):
    step = Progress("DAC", 4, 0, 9, seconds=1.0, **given)
    assert step.describe_score() == words
    assert step.describe_round() == ", ".join(filter(None, ["round 1/9", words]))


def test_a_run_is_named_by_its_method_its_seed_and_its_point():
    assert Progress("DAC", 4, 0, 9, 0.0, 0.0, 0.0).run_name == "DAC, seed 4"
    assert Progress("DAC", 4, 0, 9, 0.0, 0.0, 0.0, point="lr=1").run_name == "DAC, seed 4, lr=1"
    assert str(Note("DAC", 4, "compiling", "lr=1")) == "DAC, seed 4, lr=1: compiling ..."


# ---------------------------------------------------------------- what is returned


def test_a_run_gives_its_models_by_client():
    run = go()
    x, params = torch.rand(5, 4), run.params[2].float()
    weight, bias = params[:12].reshape(3, 4), params[12:]
    expected = x @ weight.T + bias
    assert torch.allclose(run.model(2)(x), expected, atol=1e-5)
    assert np.allclose(run.predict(2, x, batch_size=2), expected, atol=1e-5)
    assert np.array_equal(np.asarray(run.predict(2, x, "classes")), expected.argmax(1))
    with pytest.raises(ConfigError, match="this run has no models"):
        dataclasses.replace(run, models=None).predict(2, x)


def test_a_label_is_the_kind_where_none_is_given_and_a_seed_is_zero():
    run = simulate(tiny_federation(), Local(), model="linear", settings=tiny_settings(rounds=1))
    assert (run.label, run.seed, run.folder) == ("local", 0, None)
    assert run.facts()[1]["folder"] == "none: nothing was written"
    assert run.facts()[1]["engine"] == run.engine


# ---------------------------------------------------------------- checkpoints


def test_times_of_a_run_that_goes_on_are_those_of_all_its_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "load", lambda *_: {"wall_s": 1000.0, "train_s": 500.0})
    run = go(tmp_path, resume=True)
    assert 1000 < run.timing["wall_s"] < 1100
    assert 500 < run.timing["train_s"] < 600
    # Six clients of some samples each, in the warm-up and two rounds.
    samples = int((tiny_federation().split == 0).sum())
    assert run.timing["train_samples"] == 3 * samples


@pytest.fixture
def saves(monkeypatch):
    """A clock that a save moves by a second and a round by `of_round`; and the rounds of the saves."""
    state = SimpleNamespace(now=0.0, of_round=1.0, of_save=1.0, rounds=[], said=0)
    save, step = checkpoint.save, running.Loop.run_next_round

    def save_slowly(folder, loop, *rest):
        state.now += state.of_save
        state.rounds.append(loop.next_round)
        save(folder, loop, *rest)

    def run_slowly(loop):
        state.now += state.of_round
        step(loop)

    monkeypatch.setattr(checkpoint, "save", save_slowly)
    monkeypatch.setattr(running.Loop, "run_next_round", run_slowly)
    monkeypatch.setattr(running, "time", SimpleNamespace(perf_counter=lambda: state.now))
    return state


@pytest.mark.parametrize(
    ("seconds", "of_save", "rounds"),
    [
        (0, 1.0, [0, 1, 2, 3, 4]),  # after each round, but not twice after the last
        (2, 0.0, [1, 3, 4]),
        (2, 0.1, [1, 3, 4]),  # 20 x 0.1 is not more than the two seconds
        (2, 0.15, [1, 4]),  # three seconds: a twentieth of the time, and no more
        (1000, 1.0, [4]),
    ],
)
def test_checkpoints_are_as_far_apart_as_was_asked_and_take_a_twentieth_of_the_time(
    tmp_path, saves, seconds, of_save, rounds
):
    """Each round takes a second and a quarter; the last checkpoint is that after the last round."""
    saves.of_save, saves.of_round, said = of_save, 1.25, []
    go(
        tmp_path,
        settings={"rounds": 4, "checkpoint_seconds": seconds},
        saved=lambda: said.append(1),
    )
    assert saves.rounds == rounds
    assert len(said) == len(rounds) + 1, "and the results"


def test_a_folder_with_a_run_is_refused_unless_it_is_to_go_on(tmp_path):
    go(tmp_path)
    with pytest.raises(RunExistsError, match="holds a run already; resume it, overwrite it"):
        go(tmp_path)
    assert go(tmp_path, resume=True).folder == tmp_path


def test_a_stored_run_is_opened_again_as_it_ended_and_an_empty_folder_is_none(tmp_path):
    run = go(tmp_path, settings={"attacks": [{"kind": "label-flip", "clients": [1]}]})
    given = {"method": Random(2), "model": "linear", "settings": run.settings, "seed": 3}
    loop = reopen_loop(tmp_path, tiny_federation(), **given)
    assert loop.next_round == 2
    assert torch.equal(loop.evaluate_final(), run.params)
    hidden = loop.record.metrics
    assert 1 not in set(hidden["client"])
    with pytest.raises(CheckpointError, match="expected the folder of a run that has begun"):
        reopen_loop(tmp_path / "none", tiny_federation(), **given)


def test_newcomers_are_no_part_of_the_rounds_of_a_run_that_is_opened_again(tmp_path):
    run = go(tmp_path, settings={"new_clients": 2})
    loop = reopen_loop(
        tmp_path, tiny_federation(), method=Random(2), model="linear", settings=run.settings, seed=3
    )
    assert len(loop.state.params) == 4


def test_what_the_check_of_the_translation_says_is_a_note_of_the_run(monkeypatch):
    monkeypatch.setattr(running.Loop, "check_translation", lambda _self, _data: ["one", "two"])
    said: list[Note] = []
    go(notes=said.append, label="mine")
    assert [(one.label, one.seed, one.text) for one in said] == [
        ("mine", 3, "one"),
        ("mine", 3, "two"),
    ]


# ---------------------------------------------------------------- the engine of earlier runs


def test_why_an_engine_was_chosen_is_said_again_by_what_goes_on_with_it(tmp_path):
    """Of a run that is resumed, and of one of a plan: it was not set, though it is fixed now."""
    chosen = {"engine": "auto"}
    first = go(tmp_path / "seed-0", settings=chosen)
    assert "as set" not in first.engine
    again = go(tmp_path / "seed-0", settings={**chosen, "rounds": 3}, resume=True)
    assert again.engine == first.engine
    planned = EngineChoice("vmap", "vmap, which the plan took")
    other = go(tmp_path / "seed-1", settings=chosen, plan_engine=planned)
    assert other.engine == checkpoint.load_engine_reason(tmp_path / "seed-1") == planned.reason
    # What a run began with comes first, and what its settings name.
    again = go(
        tmp_path / "seed-0", settings={**chosen, "rounds": 4}, resume=True, plan_engine=planned
    )
    assert again.engine == first.engine
    named = go(settings={"engine": "loop"}, plan_engine=planned)
    assert named.engine == "loop, one client after another: as set"


# ---------------------------------------------------------------- memory


@pytest.fixture
def forecast(monkeypatch):
    """Return what the forecast of a run is made of, for the first clients of a population of six."""

    nothing = _memory.Forecast(0, 0, 0)

    def find(method, clients=6, server=False, **changes):
        settings = tiny_settings(**changes)
        federation = tiny_federation()
        task = make_task(federation.host(torch.arange(clients)), method, "linear", settings)
        found = {}

        def keep(**given):
            found.update(given)
            return nothing

        monkeypatch.setattr(_memory, "estimate_method_memory", lambda *_: (1000, 300))
        for name in ("forecast_memory", "forecast_driver_memory"):
            monkeypatch.setattr(_memory, name, keep)
        monkeypatch.setattr(_memory, "check_forecast", lambda *given: found.update(checked=given))
        monkeypatch.setattr(_memory, "available_bytes", lambda device: f"free on {device}")
        check = running.check_driver_memory if server else running.check_memory
        check(task, federation, method, settings)
        found["data of the federation"] = found["data"] == federation.nbytes
        return found

    return find


# Of the tiny federation, a linear model in double precision, and two peers in each round.
SIZES = {"clients": 6, "params": 15, "itemsize": 8, "rounds": 4, "reads": 2.0}
ADAM = {"optimizer": "adam", "lr": 0.1, "persistent_client_optimizer": True}


def test_a_forecast_is_of_the_run(forecast):
    """Six models of 15 numbers of eight bytes; everybody reads two others in each of four rounds."""
    found = forecast(Random(2), eval_every=1)
    assert {name: found[name] for name in SIZES} == SIZES
    assert (found["remembered"], found["published"], found["moments"]) == (1000, 300, 0)
    assert (found["stored"], found["received"], found["further"]) == (False, 0, 0)
    assert found["keeps_best"] is True
    assert found["data of the federation"]
    assert found["checked"] == (_memory.Forecast(0, 0, 0), "cpu", "free on cpu")


def test_a_forecast_counts_what_settings_add(forecast):
    from coterie.engine.optim import LocalTraining

    local = LocalTraining(**ADAM)
    assert forecast(Random(2), local=local)["moments"] == 2
    assert forecast(METHODS["apfl"](), local=local)["moments"] == 4, "of two models"
    # An id and a pause of four bytes each and a strike of one for all five others, and copies to judge.
    judged = forecast(Random(2), acceptance=True)
    assert (judged["remembered"], judged["further"]) == (1000 + 9 * 6 * 5, 1)
    assert forecast(Local(), acceptance=True)["remembered"] == 1000, "nobody reads anybody"
    assert forecast(Random(2), order="train_first")["further"] == 2
    assert forecast(METHODS["fedavg"]())["further"] == 1
    assert forecast(METHODS["fedavg"](), participation=0.5)["further"] == 0
    assert forecast(Random(2), shared=["1.weight"])["further"] == 2


def test_a_block_receives_the_models_that_it_reads_and_has_no_tables(forecast):
    """Two of six clients: four are elsewhere; two that read one peer each receive two models at most."""
    found = forecast(Random(1), clients=2)
    assert (found["clients"], found["rounds"], found["received"]) == (2, 0, 2.0)
    assert forecast(Random(5), clients=2)["received"] == 4, "there are no more"
    assert forecast(METHODS["fedavg"](), clients=2)["received"] == 4
    assert forecast(METHODS["fedavg"](), clients=2, participation=0.5)["received"] == 2
    # Three clients of six are half of them.
    assert forecast(METHODS["fedavg"](), clients=2, participation=3)["received"] == 2
    assert forecast(METHODS["fedavg"](), clients=2)["reads"] == 0


def test_a_method_that_does_not_say_what_it_reads_counts_ten(forecast, monkeypatch):
    def silent(self, setting, round):
        raise ConfigError("unknown")

    monkeypatch.setattr(Random, "cost", silent)
    assert forecast(Random(1))["reads"] == 10.0


def test_a_forecast_counts_what_is_read_in_the_first_round(forecast, monkeypatch):
    """Of a method that reads fewer and fewer."""
    monkeypatch.setattr(Random, "cost", lambda _self, _setting, at: SimpleNamespace(models=4 - at))
    assert forecast(Random(1))["reads"] == 4


def test_a_driver_holds_what_a_checkpoint_has(forecast):
    from coterie.engine.optim import LocalTraining

    found = forecast(Random(2), server=True, local=LocalTraining(**ADAM))
    assert {name: found[name] for name in SIZES} == SIZES
    assert (found["kept"], found["remembered"]) == (1 + 1 + 2, 1000)
    assert found["checked"][1:] == ("cpu", "free on cpu")
    assert forecast(Random(2), server=True, evaluate="final")["kept"] == 1


def test_a_run_is_tried_before_anything_is_written(monkeypatch):
    """The method's first state is made, and nothing counts as stored."""
    stored = []

    def forecast(*given, **more):
        stored.append(more["stored"])
        return _memory.Forecast(0, 0, 0)

    monkeypatch.setattr(running, "_forecast_run", forecast)
    check_run(tiny_federation(), Local(), "linear", tiny_settings())
    assert stored == [False]
