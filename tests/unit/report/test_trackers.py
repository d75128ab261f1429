import sqlite3
import sys

import pytest
from typer.testing import CliRunner

from coterie.cli.app import app
from coterie.errors import ConfigError, DataError
from coterie.report import trackers
from coterie.results.stored_runs import load_runs
from coterie.simulation.run import Progress


class Kept:
    """A writer that keeps what it is told: the protocol, and nothing more."""

    def __init__(self, name, settings):
        self.name, self.settings, self.steps, self.closed = name, settings, [], False

    def log(self, step, values):
        self.steps.append((step, dict(values)))

    def close(self):
        self.closed = True


@pytest.fixture
def kept():
    """What was opened, and the opener."""
    opened = []

    def open_writer(name, settings):
        opened.append(Kept(name, settings))
        return opened[-1]

    return opened, open_writer


def test_a_live_study_feeds_a_writer_for_each_run(kept):
    """Warm-up is step 0; a value that is not a number (no accuracy in regression) is left out; all are closed."""
    opened, open_writer = kept
    with trackers.feed_while_running(open_writer, {"rounds": 2}) as observe:
        for label, seed in (("DAC", 0), ("DAC", 1)):
            for index in (-1, 0):
                observe(
                    Progress(
                        label, seed, index, 2, loss=1.0 + index, score=float("nan"), seconds=3.0
                    )
                )
        assert not opened[0].closed
    assert [(one.name, one.settings, one.closed) for one in opened] == [
        ("DAC-seed-0", {"rounds": 2, "seed": 0}, True),
        ("DAC-seed-1", {"rounds": 2, "seed": 1}, True),
    ]
    assert opened[0].steps == [
        (0, {"validation/loss": 0.0, "seconds": 3.0}),
        (1, {"validation/loss": 1.0, "seconds": 3.0}),
    ]


def test_writers_are_closed_when_a_study_is_interrupted(kept):
    """What was logged is kept."""
    opened, open_writer = kept

    def interrupted():
        with trackers.feed_while_running(open_writer) as observe:
            observe(Progress("DAC", 0, 0, 2, loss=1.0, score=0.5, seconds=1.0))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert opened[0].closed


def test_stored_runs_are_exported_with_means_over_clients_and_clusters(small, kept):
    """DAC, seed 0: test accuracy of the best models .625, in cluster 0 .7; settings by dotted path."""
    opened, open_writer = kept
    runs, _ = load_runs([small])
    assert trackers.export_runs(runs, open_writer) == 4
    assert opened[0].name == "small-DAC-seed-0"
    ((step, values),) = opened[0].steps
    assert step == 2
    assert values["best test/accuracy"] == pytest.approx(0.625)
    assert values["best test/accuracy/cluster 0"] == pytest.approx(0.7)
    assert opened[0].settings["methods.0.kind"] == "dac"
    assert opened[0].settings["data.num_clients"] == 4


def test_runs_of_one_name_are_not_written_over_each_other(tmp_path, write_run, final_rows, kept):
    """Two copies of a study, and two names that a tracker writes alike: both would be one run there."""
    opened, open_writer = kept
    for place, study, label in (("a", "s", "DAC"), ("b", "s", "DAC"), ("c", "s-DAC", "x")):
        folder = tmp_path / place / study / label / "seed-0"
        metrics = final_rows([0.5], (0,))
        write_run(folder, kind="dac", label=label, seed=0, study=study, metrics=metrics)
    write_run(
        tmp_path / "d" / "s" / "DAC-x" / "seed-0", kind="dac", label="DAC-x", seed=0, study="s",
        metrics=metrics,
    )  # fmt: skip
    for first, second, name in (("a", "b", "s-DAC-seed-0"), ("c", "d", "s-DAC-x-seed-0")):
        with pytest.raises(DataError, match=f"would both be '{name}'"):
            trackers.export_runs(load_runs([tmp_path / first, tmp_path / second])[0], open_writer)
    assert not opened
    assert trackers.export_runs(load_runs([tmp_path / "a", tmp_path / "d"])[0], open_writer) == 2


def test_rounds_are_exported_in_order(population, kept):
    """Ten rounds are steps 1 to 10."""
    opened, open_writer = kept
    trackers.export_runs(load_runs([population / "DAC" / "seed-0"])[0], open_writer)
    assert [step for step, _ in opened[0].steps] == list(range(1, 11))


def test_an_unknown_tracker_is_refused(tmp_path):
    """With the names of those that there are."""
    with pytest.raises(ConfigError, match="expected one of: tensorboard, mlflow, wandb"):
        trackers.make_opener("tensorbord", tmp_path)


def test_a_tracker_that_is_not_installed_says_how_to_install_it(tmp_path, monkeypatch):
    """One line, not a traceback of an import."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"pip install 'wandb>="):
        trackers.make_opener("wandb", tmp_path)("run", {})


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_tensorboard_reads_back_what_was_written(small, tmp_path):
    """Its own reader finds the value at its step."""
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trackers.export_runs(
        load_runs([small / "DAC" / "seed-0"])[0], trackers.make_opener("tensorboard", tmp_path)
    )
    events = EventAccumulator(str(tmp_path / "small-DAC-seed-0")).Reload()
    (event,) = events.Scalars("best test/accuracy")
    assert (event.step, event.value) == (2, pytest.approx(0.625))


@pytest.mark.filterwarnings("ignore")
def test_mlflow_reads_back_what_was_written(small, tmp_path):
    """Its store is a file of this machine."""
    pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    trackers.export_runs(
        load_runs([small / "DAC" / "seed-0"])[0], trackers.make_opener("mlflow", tmp_path)
    )
    store = sqlite3.connect(tmp_path / "mlflow.db")
    rows = store.execute(
        "select step, value from metrics where key = 'best test/accuracy'"
    ).fetchall()
    store.close()
    assert rows == [(2, pytest.approx(0.625))]


@pytest.mark.filterwarnings("ignore")
def test_weights_and_biases_stays_offline(small, tmp_path):
    """A folder of an offline run, ready for `wandb sync`."""
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    trackers.export_runs(
        load_runs([small / "DAC" / "seed-0"])[0], trackers.make_opener("wandb", tmp_path)
    )
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    assert list(folder.glob("*.wandb"))


def test_the_command_copies_every_run_and_names_what_it_left_out(small, tmp_path, monkeypatch):
    """Three runs can be read; the fourth is damaged."""
    opened = []
    monkeypatch.setattr(
        trackers,
        "make_opener",
        lambda to, out: lambda name, settings: opened.append(name) or Kept(name, {}),
    )
    (small / "DAC" / "seed-0" / "metrics.parquet").write_bytes(b"")
    told = CliRunner().invoke(
        app, ["track", str(small), "--to", "wandb", "--out", str(tmp_path / "t")]
    )
    assert "DAC: seed 0 damaged" in told.stderr
    assert told.stdout == f"3 runs written to {tmp_path / 't'}\n"
    assert opened == ["small-DAC-seed-1", "small-Local-seed-0", "small-Local-seed-1"]


def test_a_tracker_is_told_the_names_of_clients(kept, named):
    opened, open_writer = kept
    study, names = named
    trackers.export_runs(load_runs([study])[0], open_writer)
    assert opened[0].settings["client_names"] == ", ".join(names.values())
