"""Nothing goes wrong without a word: damage, kills, a refusing system, and several processes on one study.

The experiments of benchmarks/reliability.py, with fewer trials and another seed than the stored
ones.
"""

import collections
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from benchmarks import reliability
from coterie.results.stored_runs import load_runs
from coterie.studies import config
from coterie.studies.run import run_study

STUDY = """
name = "shared"
rounds = 3
seeds = [0]
data = { dataset = "digits", num_clients = 4 }
model = { kind = "linear" }

[[methods]]
kind = "random"
num_peers = 2

[[methods]]
kind = "local"
"""


@pytest.mark.slow
def test_every_damage_ends_in_the_right_bytes_or_in_one_clear_line():
    rows = reliability.corruptions(32, seed=101)
    bad = [row for row in rows if row["outcome"].isupper()]
    assert not bad, bad[0]
    happened = collections.Counter(row["outcome"] for row in rows)
    assert min(happened["right"], happened["right, and said"], happened["refused"]) > 0, happened


@pytest.mark.slow
def test_a_run_that_was_killed_at_any_moment_goes_on_to_the_same_bytes():
    rows = reliability.kills(8, seed=102)
    assert all(row["killed"] and row["whole"] for row in rows)
    assert {row["outcome"] for row in rows} <= {"right", "right, and said"}
    assert {row["writing"] for row in rows} == {True, False}


@pytest.mark.slow
def test_every_plan_that_was_killed_ends_in_the_same_bytes_and_does_no_run_twice():
    rows = reliability.plans(12, seed=104)
    assert {row["kind"] for row in rows} == {*reliability.PLANS}
    assert all(row["killed"] for row in rows)
    assert {row["outcome"] for row in rows} <= {"right", "right, and said"}
    assert sum(row["finished"] for row in rows) > 4 * 12, "four are there before"
    assert not any(row["twice"] for row in rows)


@pytest.mark.slow
def test_a_full_or_failing_disk_and_the_end_of_memory_are_one_line_and_lose_nothing():
    rows = reliability.faults(8, seed=103)
    assert all(row["one_line"] for row in rows)
    assert {row["outcome"] for row in rows} <= {"right", "right, and said"}


@pytest.mark.slow
def test_three_processes_share_a_study(tmp_path: Path):
    """Each adds two seeds to one folder at the same time: no run is done twice, and none is lost."""
    (tmp_path / "shared.toml").write_text(STUDY)
    start = [
        sys.executable,
        "-m",
        "coterie",
        "run",
        "shared.toml",
        "--resume",
        "--workers",
        "1",
        "--seeds",
    ]
    crew = [
        subprocess.Popen(
            [*start, seeds], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for seeds in ("0,1", "1,2", "2,3")
    ]
    said = [process.communicate(timeout=300) for process in crew]
    assert [process.returncode for process in crew] == [0, 0, 0], said
    folder = tmp_path / "runs" / "shared"
    assert sorted(tomllib.loads((folder / "config.toml").read_text())["seeds"]) == [0, 1, 2, 3]
    runs, problems = load_runs([folder])
    assert not problems
    assert sorted((run.label, run.seed) for run in runs if run.is_finished) == [
        (label, seed) for label in ("local", "random") for seed in range(4)
    ]
    alone = run_study(
        config.load_study(tmp_path / "shared.toml", ["seeds=[2]"]), out=tmp_path / "alone"
    ).folder
    for path in alone.rglob("*.parquet"):
        there = folder / path.relative_to(alone)
        assert there.read_bytes() == path.read_bytes(), f"{there} is not that of one process alone"
