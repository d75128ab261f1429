"""What a run tells of itself, and what an editor shows of the functions that make one."""

import dataclasses
import inspect
import json
import re

import numpy as np
import pandas as pd
import pytest

import coterie
from coterie.errors import ConfigError
from coterie.methods.local import Local
from coterie.methods.random_gossip import Random
from coterie.simulation.run import Note, _check_types, simulate
from coterie.testing import tiny_federation, tiny_settings


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return simulate(
        tiny_federation(),
        Random(num_peers=2),
        model="linear",
        settings=tiny_settings(rounds=2),
        seed=3,
        folder=folder,
    )


def test_print_tells_method_rounds_the_final_test_metrics_and_the_folder(run):
    last = run.metrics[(run.metrics["split"] == "test") & (run.metrics["round"] == 1)]
    values = last[(last["metric"] == "accuracy") & (last["model"] == "best")]["value"].to_numpy()
    if not len(values):
        values = last[(last["metric"] == "accuracy") & (last["model"] == "current")][
            "value"
        ].to_numpy()
    assert len(values) == 6
    title, facts = run.facts()
    assert title == "Run of 'random' with seed 3"
    assert (facts["rounds"], facts["clients"], facts["diverged"]) == (2, 6, "no client")
    shown = f"{100 * np.mean(values):.2f} ± {100 * np.std(values):.2f} (mean ± std over clients)"
    assert facts["test accuracy in %"] == shown
    for part in (title, "Random(num_peers=2)", shown, str(run.folder)):
        assert part in str(run)
        assert part.replace("'", "&#x27;") in run._repr_html_()


def test_clients_that_diverged_are_counted(run):
    assert (
        dataclasses.replace(run, diverged=(1, 4), folder=None).facts()[1]["diverged"]
        == "2 of 6 clients"
    )


@pytest.mark.parametrize(
    "name",
    [
        "from_arrays",
        "from_dataset",
        "from_datasets",
        "simulate",
        "run_study",
        "resume_study",
        "resume_plan",
        "run_sweep",
        "make_study",
    ],
)
def test_every_argument_of_the_front_door_has_a_name_and_a_type(name):
    """An editor can complete each: no *args, no **options."""
    for parameter in inspect.signature(getattr(coterie, name)).parameters.values():
        assert parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL), (
            parameter.name
        )
        assert parameter.annotation is not parameter.empty, parameter.name


def test_a_dataset_takes_what_arrays_take():
    arrays, dataset, datasets = (
        inspect.signature(getattr(coterie, name)).parameters
        for name in ("from_arrays", "from_dataset", "from_datasets")
    )
    # A test set may also be a dataset, or one for each client, where the data are datasets.
    shared = set(arrays) - {"x", "y", "clients", "num_clients", "test"}
    for other in (dataset, datasets):
        assert other["test"].default is arrays["test"].default is None
        assert {name: other[name] for name in shared} == {name: arrays[name] for name in shared}


@pytest.mark.full
def test_a_run_tells_that_it_compiles(monkeypatch, tmp_path):
    """Once: the next run finds the program in the cache."""
    monkeypatch.setenv("COTERIE_CACHE", str(tmp_path))
    said = []
    for seed in (4, 5):
        settings = tiny_settings(rounds=1, engine="compiled")
        simulate(
            tiny_federation(),
            Local(),
            model="linear",
            settings=settings,
            seed=seed,
            notes=said.append,
        )
    assert said == [Note("local", 4, "compiling the model (once for this machine)")]


NAMES = ("Oslo", "مستشفى الملك", "<script>", "🏥", 'O\'Hara "B"', "Lima")


def test_names_of_clients_reach_the_run_and_its_files_and_tables_keep_ids(tmp_path):
    federation = dataclasses.replace(tiny_federation(), client_names=NAMES)
    named = simulate(
        federation, Local(), model="linear", settings=tiny_settings(rounds=1), folder=tmp_path
    )
    assert named.metrics["client"].dtype == "int32"
    by_name = named.metrics_by_name
    for client, name in enumerate(NAMES):
        own = named.metrics.loc[named.metrics["client"] == client, "value"]
        assert by_name.loc[by_name["client"] == name, "value"].tolist() == own.tolist()
    stored = json.loads((tmp_path / "provenance.json").read_text("utf-8"))
    assert stored["client_names"] == {str(client): name for client, name in enumerate(NAMES)}
    lost = dataclasses.replace(named, diverged=(1, 4))
    assert lost.facts()[1]["diverged"] == '2 of 6 clients (مستشفى الملك, O\'Hara "B")'


def test_names_do_not_change_a_run(run, tmp_path):
    federation = dataclasses.replace(tiny_federation(), client_names=NAMES)
    settings = tiny_settings(rounds=2)
    named = simulate(
        federation, Random(num_peers=2), model="linear", settings=settings, seed=3, folder=tmp_path
    )
    for file in ("metrics.parquet", "edges.parquet", "checkpoint.safetensors"):
        assert (tmp_path / file).read_bytes() == (run.folder / file).read_bytes()
    assert "client_names" not in json.loads((run.folder / "provenance.json").read_text("utf-8"))
    assert named.metrics_by_name["client"].nunique() == 6


def test_clients_without_names_are_numbered(run):
    assert set(run.metrics_by_name["client"]) == {f"client {client}" for client in range(6)}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"federation": (1, 2)},
            "federation is (1, 2); expected a Federation, as `from_arrays` makes one",
        ),
        (
            {"method": "local"},
            "method is 'local'; expected a method, such as METHODS['dac'](num_peers=5)",
        ),
        ({"method": Local}, "method is <class 'coterie.methods.local.Local'>; expected a method"),
        ({"model": 5}, "model is 5; expected a name, an nn.Module, or a function that makes one"),
        ({"settings": {"rounds": 3}}, "settings is {'rounds': 3}; expected Settings(...)"),
    ],
)
def test_what_is_of_another_kind_is_refused_at_the_door(change, said):
    given = {
        "federation": tiny_federation(),
        "method": Local(),
        "model": "linear",
        "settings": tiny_settings(),
    }
    with pytest.raises(ConfigError, match=re.escape(said)):
        _check_types(**{**given, **change})


@pytest.mark.parametrize("seed", [-1, 2**63, 10**30])
def test_a_seed_that_no_stream_has_is_refused(seed):
    with pytest.raises(ConfigError, match="expected a whole number, 0 or more and below"):
        simulate(tiny_federation(), Local(), model="linear", settings=tiny_settings(), seed=seed)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [(0.5, "60.00 ± 10.00"), (float("nan"), "– ± –")],
    ids=["its data leave it undefined", "it diverged"],
)
def test_a_printed_mean_leaves_out_what_data_leave_undefined_and_no_model_that_diverged(
    run, loss, expected
):
    """Accuracies 0.5, 0.7 and none: 0.6 ± 0.1, unless the third model has no loss either."""
    values = {"accuracy": [0.5, 0.7, float("nan")], "loss": [1.0, 2.0, loss]}
    final = run.metrics.loc[run.metrics["split"] == "test"].iloc[:1]
    rows = [
        final.assign(client=client, metric=name, value=value)
        for name, own in values.items()
        for client, value in enumerate(own)
    ]
    table = pd.concat(rows, ignore_index=True)
    facts = dataclasses.replace(run, metrics=table).facts()[1]
    assert facts["test accuracy in %"] == f"{expected} (mean ± std over clients)"


@pytest.mark.filterwarnings("ignore:.*provenance.json is missing")
def test_times_that_were_lost_are_not_known(tmp_path):
    """The run goes on from its checkpoint, and the rounds before it did not take 0 seconds."""

    def go_on(rounds):
        run = simulate(
            tiny_federation(), Local(), model="linear", settings=tiny_settings(rounds=rounds),
            folder=tmp_path, resume=True,
        )  # fmt: skip
        return run.timing, json.loads((tmp_path / "provenance.json").read_text())["timing"]

    timing, stored = go_on(1)
    assert timing == stored
    assert timing["wall_s"] > timing["train_s"] > 0
    (tmp_path / "provenance.json").unlink()
    timing, stored = go_on(2)
    assert np.isnan([timing["wall_s"], timing["train_s"]]).all()
    assert stored == {"train_samples": timing["train_samples"]}
    assert go_on(3)[1].keys() == {"train_samples"}
