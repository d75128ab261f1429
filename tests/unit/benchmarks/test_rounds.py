"""The comparison of full-size rounds: ratios within a turn, refusals, code of a commit, and a small run."""

import subprocess
from pathlib import Path

import pytest

from benchmarks import rounds
from benchmarks._measured import images
from benchmarks.rounds import Timing
from coterie.errors import CoterieError


def test_ratios_are_taken_within_a_turn():
    """Medians 4 beside 2, 6 beside 1 and 4 beside 4 are 2, 6 and 1 times as fast."""
    turns = [
        {"loop": Timing(9.0, (3.0, 4.0, 9.0), 1.5), "auto": Timing(12.0, (2.0,), 1.501)},
        {"loop": Timing(7.0, (6.0,), 1.5), "auto": Timing(3.0, (1.0,), 1.501)},
        {"loop": Timing(8.0, (4.0,), 1.5), "auto": Timing(4.0, (4.0,), 1.501)},
    ]
    first, second = rounds.rows("fedgwc", turns)
    assert (first["engine"], first["seconds a round"], first["times loop"]) == ("loop", 4.0, 1.0)
    assert (second["engine"], second["seconds a round"]) == ("auto", 2.0)
    assert (second["from"], second["times loop"], second["to"]) == (1.0, 2.0, 6.0)
    assert second["start and first round, s"] == 4.0


@pytest.mark.parametrize("loss", [1.52, float("nan")])
def test_sides_that_learn_something_else_are_refused(loss):
    turn = {"loop": Timing(1.0, (1.0,), 1.5), "auto": Timing(1.0, (1.0,), loss)}
    with pytest.raises(
        rounds.DifferentResultsError, match=r"sosicfl: the loss is .* with auto and 1.5 with loop"
    ):
        rounds.rows("sosicfl", [turn])


def test_the_code_of_a_commit_is_that_of_the_repository(tmp_path: Path):
    git = ["git", "-C", str(rounds.ROOT)]
    if subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, check=False).returncode:
        pytest.skip("this is no repository")
    there = subprocess.run(
        [*git, "show", "HEAD:src/coterie/rng.py"], capture_output=True, check=True
    ).stdout
    assert (rounds.source("HEAD", tmp_path) / "coterie/rng.py").read_bytes() == there
    with pytest.raises(CoterieError, match="found the commit 'nothing'; git says: "):
        rounds.source("nothing", tmp_path)


def test_this_code_is_that_which_runs(tmp_path: Path):
    assert (rounds.source("", tmp_path) / "coterie/rng.py").is_file()


@pytest.mark.full
@pytest.mark.parametrize("name", rounds.STUDIES)
def test_a_study_runs_for_some_rounds(name: str, monkeypatch: pytest.MonkeyPatch):
    """On ten tiny images a client and with a linear model: a time for each round after the first, and a loss."""
    plain, asked = rounds.simulate, []

    def few(clients: int, samples: int, side: int, channels: int, **named: int):
        asked.append((clients, samples, side, channels))
        return images(clients, 10, 4, channels, **named)

    monkeypatch.setattr(rounds, "images", few)
    monkeypatch.setattr(
        rounds, "simulate", lambda *args, **named: plain(*args, **named | {"model": "linear"})
    )
    found = rounds.run(name, "loop", 3)
    assert asked == [(100, {"fedgwc": 500, "sosicfl": 400}[name], 32, 3)]
    assert len(found.rounds) == 2
    assert min(found.first, *found.rounds) > 0
    assert found.loss > 0
