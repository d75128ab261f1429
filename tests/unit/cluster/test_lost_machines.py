"""Whole runs on a Ray of three machines, one of which is lost while it computes."""

import threading
import time
from pathlib import Path

import pytest

from benchmarks import kills
from coterie.cluster.runs import RayRuns
from coterie.studies import config
from coterie.studies.run import run_study

from .test_runs import STUDY, files

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Ray leaves files and sockets to the collector
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
]
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


def test_runs_of_a_machine_that_is_lost_go_on_on_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Three runs wait in their third round, one on each machine; a machine dies with all that runs on it."""
    (tmp_path / "waiting.py").write_text(WAITING)
    (place := tmp_path / "place").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    method = f'kind = "waiting:Waiting"\nlabel = "Gossip"\nplace = "{place}"'
    text = STUDY.replace('kind = "random"\nlabel = "Gossip"', method).replace("seeds = [0, 1]", "seeds = [0, 1, 2]")
    study = config.loads(text.partition('[[methods]]\n\nkind = "local"')[0].rpartition("[[methods]]")[0])
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
