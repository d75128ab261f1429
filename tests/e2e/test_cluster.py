"""Runs on a cluster as a user meets them: Ctrl-C, a machine that is lost, and nothing left behind."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from tests.e2e.test_cli import TINY, finish, results, start, wait_for
from tests.unit.cluster.test_runs import STUDY, files

from benchmarks import kills
from coterie.cluster.runs import RayRuns
from coterie.studies import config
from coterie.studies.run import run_study

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    # Ray leaves files and sockets to the collector
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
]
LONG = TINY.replace("rounds = 8", "rounds = 100").replace("seeds = [0, 1]", "seeds = [0]")
ON = ("--on", "ray:local", "--workers", "1")
WAITING = """
import time
from dataclasses import dataclass
from pathlib import Path

import ray
from coterie.methods import Local


@dataclass(frozen=True)
class Waiting(Local):
    \"\"\"Local training that says in its third round where it is, and waits there until it is told to go on.\"\"\"

    kind = "waiting"
    place: str = ""

    def round(self, rnd, state):
        place = Path(self.place)
        if rnd.index == 2 and not (place / "go").exists():
            node = ray.get_runtime_context().get_node_id()
            (place / f"{node}.tmp").touch()
            (place / f"{node}.tmp").rename(place / node)
            while not (place / "go").exists():
                time.sleep(0.1)
        return super().round(rnd, state)
"""


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
    assert (
        err.strip().splitlines()[-1]
        == "stopped; continue with: coterie resume runs/tiny --on ray:local"
    )
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


def test_runs_of_a_machine_that_is_lost_go_on_on_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Three runs wait in their third round, one on each machine; a machine dies with all that runs on it."""
    (tmp_path / "waiting.py").write_text(WAITING)
    (place := tmp_path / "place").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    method = f'kind = "waiting:Waiting"\nlabel = "Gossip"\nplace = "{place}"'
    text = STUDY.replace('kind = "random"\nlabel = "Gossip"', method).replace(
        "seeds = [0, 1]", "seeds = [0, 1, 2]"
    )
    study = config.parse_study_text(text.rpartition("[[methods]]")[0])
    (place / "go").touch()
    run_study(study, out=tmp_path / "here")
    (place / "go").unlink()

    with kills.three() as nodes:
        over = RayRuns()

        def lose() -> None:
            """Wait until all three are there, and kill one that is not this machine's."""
            while len([*place.iterdir()]) < 3:
                time.sleep(0.1)
            nodes.kill(next(name for name in nodes.mortal if (place / name).exists()))
            (place / "go").touch()

        loser = threading.Thread(target=lose, daemon=True)
        loser.start()
        with pytest.warns(UserWarning, match="try 2 goes on where it was"):
            run_study(study, out=tmp_path / "there", over=over, workers=3)
        loser.join(60)
    here, there = files(tmp_path / "here"), files(tmp_path / "there")
    assert here.keys() == there.keys()
    assert [name for name in here if here[name] != there[name]] == []
    assert over.sent.lost == 1
