"""Sweeps and tunings that were stopped: list, status, show and resume know what is there and what is not."""

import shutil
from pathlib import Path

import pytest

from coterie.simulation import run as runs

STUDY = """
name = "tiny"
rounds = 1
seeds = [0]
engine = "loop"
model = { kind = "linear" }

[data]
dataset = "digits"
num_clients = 4
train = 16
validation = 8

[[methods]]
kind = "random"
label = "Gossip"

[[methods]]
kind = "local"
"""
SWEEP = STUDY + '[sweep]\n"data.train" = [8, 16]\n'


@pytest.fixture
def stop_in_run(monkeypatch):
    """Returns a function after which the n-th run is stopped in its first round, as by Ctrl-C."""
    true_progress = runs._make_progress

    def prepare(number):
        begun = []

        def report(loop, *rest):
            begun.append(loop.next_round)
            if begun.count(0) == number:
                raise KeyboardInterrupt
            return true_progress(loop, *rest)

        monkeypatch.setattr(runs, "_make_progress", report if number else true_progress)

    return prepare


@pytest.fixture
def stopped_sweep(coterie, stop_in_run):
    """A sweep of four runs that was stopped in its fourth."""
    Path("tiny.toml").write_text(SWEEP)
    stop_in_run(4)
    status, _, err = coterie("run", "tiny.toml", "-w", "1", "-q")
    assert (status, err.strip()) == (130, "stopped; continue with: coterie resume runs/tiny")
    stop_in_run(0)
    return Path("runs/tiny")


@pytest.mark.full
def test_a_sweep_that_was_stopped_is_listed_and_its_states_are_told(coterie, stopped_sweep):
    """Three of four runs are finished; the fourth has a configuration and no round."""
    assert coterie("list")[1].splitlines() == [
        "runs/tiny  tiny: 3 of 4 runs finished",
        "  train=8: Gossip, local: seed 0 finished",
        "  train=16: Gossip: seed 0 finished",
        "  train=16: local: seed 0 unfinished (metrics.parquet is not there (yet))",
    ]
    status, out, _ = coterie("status", "runs/tiny")
    assert status == 3
    lines = out.splitlines()
    assert lines[0] == "4 runs: 3 done, 1 stopped"
    assert lines[1:4] == [
        "done     Gossip, train=8: seed 0",
        "done     local, train=8: seed 0",
        "done     Gossip, train=16: seed 0",
    ]
    assert lines[4].startswith("stopped  local, train=16: seed 0")
    assert lines[-1] == "Continue with: coterie resume runs/tiny"


@pytest.mark.full
def test_the_folder_of_a_node_is_continued_by_its_node(coterie, stopped_sweep):
    """A node's folder has its roster next to its study, and data that no study file names."""
    Path("runs/roster.seen").write_text("")
    assert coterie("status", "runs/tiny")[1].splitlines()[-1] == (
        "Continue with: coterie node NODE.toml"
    )
    status, _, err = coterie("resume", "runs/tiny")
    assert status == 2
    assert "runs/tiny is the folder of a node" in err


@pytest.mark.parametrize("name", ["dac", "dac/samples", "a/b/c/d"])
def test_a_node_continues_a_study_whose_name_has_any_number_of_parts(coterie, stop_in_run, name):
    Path("tiny.toml").write_text(STUDY.replace('"tiny"', f'"{name}"'))
    stop_in_run(1)
    assert coterie("run", "tiny.toml", "-w", "1", "-q", "--out", "runs/n0")[0] == 130
    study = Path("runs/n0") / name
    run = study / "Gossip" / "seed-0"
    # A relay has its roster next to its settings, where people start simulations too.
    for above in (Path("roster.seen"), Path("runs/roster.seen")):
        above.write_text("")
    for folder in (study, run):
        last = coterie("status", str(folder))[1].splitlines()[-1]
        assert last == f"Continue with: coterie resume {folder}"
    Path("runs/n0/roster.seen").write_text("")
    for folder in (study, run):
        last = coterie("status", str(folder))[1].splitlines()[-1]
        assert last == "Continue with: coterie node NODE.toml"
        status, _, err = coterie("resume", str(folder))
        assert status == 2
        assert "is the folder of a node" in err


@pytest.mark.full
def test_a_sweep_that_was_stopped_shows_what_is_there(coterie, stopped_sweep):
    for options in ((), ("--clients",)):
        status, out, _ = coterie("show", "runs/tiny", *options)
        assert status == 0
        assert "tiny/train=8" in out
        assert "local: seed 0 unfinished" in out
        assert "no finished run: local" in out.replace("\n", " ")


@pytest.mark.full
def test_a_sweep_that_was_stopped_goes_on_also_in_a_moved_folder(coterie, stopped_sweep):
    Path("elsewhere").mkdir()
    shutil.move("runs/tiny", "elsewhere/other")
    status, _, err = coterie("resume", "elsewhere/other", "-w", "1")
    assert status == 0
    assert "3 of 4 runs are there" in err
    assert coterie("status", "elsewhere/other")[:2] == (
        0,
        "4 runs: 4 done\n"
        "done     Gossip, train=8: seed 0\ndone     local, train=8: seed 0\n"
        "done     Gossip, train=16: seed 0\ndone     local, train=16: seed 0\n",
    )


@pytest.mark.full
def test_a_sweep_of_which_no_run_has_begun_is_shown_as_such(coterie, stopped_sweep):
    for run in stopped_sweep.glob("*/*/seed-0"):
        shutil.rmtree(run)
    status, out, _ = coterie("show", "runs/tiny", "--clients")
    assert status == 0
    assert out.count("Gossip, local: seed 0 missing") == 2
    assert out.count("No run is finished: there is nothing to compare.") == 2
    assert coterie("list")[1].splitlines()[0] == "runs/tiny  tiny: 0 of 4 runs finished"
    assert coterie("show", "runs/tiny", "--clients", "--json")[1] != ""


@pytest.mark.slow
def test_a_tuning_that_was_stopped_is_listed_shown_and_resumed_by_its_folder(coterie, stop_in_run):
    Path("tiny.toml").write_text(STUDY)
    given = ("tune", "tiny.toml", "-g", "lr=0.01,0.02", "--widenings", "0", "-w", "1")
    stop_in_run(3)
    status, _, err = coterie(*given, "-q")
    assert (status, err.strip()) == (130, f"stopped; continue with: coterie {' '.join(given)} -q")
    stop_in_run(0)
    assert coterie("list", "tuned")[1].splitlines()[0] == (
        "tuned/tiny-trials  tiny-trials: 2 of 4 runs finished"
    )
    assert coterie("status", "tuned/tiny-trials")[1].startswith("4 runs: 2 done")
    status, out, _ = coterie("show", "tuned/tiny-trials")
    assert status == 0
    assert "Gossip lr=0.01  1  accuracy" in out
    assert "missing" in out
    status, out, err = coterie("resume", "tuned/tiny-trials", "-w", "1")
    assert status == 0
    assert "2 of 4 runs are there" in err
    assert f"Study: {Path('tuned').resolve()}/tiny-tuned.toml" in out
    whole = coterie(*given, "-q", "--out", "new")[1]
    assert whole.splitlines()[:2] == out.splitlines()[:2]
    for name in ("tiny-tuned.toml", "tiny-tuned.json"):
        assert Path("new", name).read_text() == Path("tuned", name).read_text()
