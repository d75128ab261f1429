"""Runs on a cluster as a user meets them: Ctrl-C, a machine that asked and is lost, and nothing left behind."""

import os
import signal
from pathlib import Path

import pytest
from tests.e2e.test_cli import TINY, finish, results, start, wait_for

pytest.importorskip("ray")
pytestmark = [pytest.mark.e2e, pytest.mark.slow]
LONG = TINY.replace("rounds = 8", "rounds = 100").replace("seeds = [0, 1]", "seeds = [0]")
ON = ("--on", "ray:local", "--workers", "1")


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The folder of a study that was computed here, without an interruption."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "tiny.toml").write_text(LONG)
    status, _, err = finish(start(folder, "run", "tiny.toml", "--workers", "1"))
    assert status == 0, err
    return folder / "runs" / "tiny"


def of_session(session: int) -> list[str]:
    """The commands of the processes of a session that have not ended; Ray's have sessions of their own."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            fields = (place / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found.append((place / "cmdline").read_text().replace("\0", " "))
        except (OSError, ValueError):
            continue
    return found


def test_ctrl_c_leaves_a_study_that_goes_on_to_the_same_bytes_here_or_there(tmp_path, whole):
    (tmp_path / "tiny.toml").write_text(LONG)
    process = start(tmp_path, "run", "tiny.toml", *ON)
    wait_for(process, tmp_path / "runs/tiny/random/seed-0", 4)
    os.kill(process.pid, signal.SIGINT)
    status, out, err = finish(process)
    assert status == 130, err
    assert "Traceback" not in out + err
    assert err.strip().splitlines()[-1] == "stopped; continue with: coterie resume runs/tiny --on ray:local"
    assert of_session(process.pid) == []
    assert results(tmp_path / "runs/tiny") != results(whole)
    status, out, err = finish(start(tmp_path, "resume", "runs/tiny", *ON))
    assert status == 0, err
    assert results(tmp_path / "runs/tiny") == results(whole)


def test_a_study_whose_machine_was_lost_goes_on_to_the_same_bytes(tmp_path, whole):
    (tmp_path / "tiny.toml").write_text(LONG)
    process = start(tmp_path, "run", "tiny.toml", *ON)
    wait_for(process, tmp_path / "runs/tiny/random/seed-0", 6)
    os.killpg(process.pid, signal.SIGKILL)
    assert finish(process)[0] == -signal.SIGKILL
    status, _, err = finish(start(tmp_path, "resume", "runs/tiny", "--workers", "1"))
    assert status == 0, err
    assert results(tmp_path / "runs/tiny") == results(whole)
