"""What kills.py says of deaths; that they happen is tested with the actors."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import kills


def test_rounds_are_lost_that_are_begun_again():
    """One died in round 1, the next in round 2 before it had a checkpoint, the last while the warm-up was done."""
    assert kills.losses([-1, 0, 1, 1, 2, 1, 2, 3]) == [1, 2]
    assert kills.losses([-1, -1, 0, 1]) == [1]
    assert kills.losses([-1, 0, 1]) == []


def test_each_kind_of_death_is_in_a_round_of_its_own():
    drawn = [kills.deaths_of(kind, 6) for kind in ("dac", "fedavg", "random", "ifca")]
    for deaths in drawn:
        assert sorted(deaths.values()) == sorted(kills.KINDS)
        assert all(-1 <= index < 6 for index in deaths)
    assert len({tuple(deaths) for deaths in drawn}) > 1, "they are drawn for each method"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_a_process_started_and_what_that_started_is_found():
    below = "import subprocess, sys; one = subprocess.Popen(['sleep', '600']); print(one.pid, flush=True); one.wait()"
    with subprocess.Popen(
        [sys.executable, "-c", below], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        grandchild = int(process.stdout.readline())
        try:
            assert kills.children(process.pid) == [grandchild]
            assert {process.pid, grandchild} <= set(kills.children(os.getpid()))
        finally:
            os.kill(grandchild, 9)


def test_files_that_differ_are_named(tmp_path: Path):
    for number, folder in enumerate(("one", "other")):
        (tmp_path / folder).mkdir()
        for name in kills.FILES:
            (tmp_path / folder / name).write_text(
                str(number) if name.startswith("edges") else "same"
            )
    assert kills.unequal(tmp_path / "one", tmp_path / "other") == ["edges.parquet"]
