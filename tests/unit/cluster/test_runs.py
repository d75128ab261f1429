"""Whole runs on Ray: the files of this machine, whatever happens to workers."""

import json
import os
import signal
import sys
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from coterie.cluster import actors, doctor, runs
from coterie.cluster.blocks import simulate_in_blocks
from coterie.cluster.place import connect_ray, parse_place
from coterie.cluster.runs import RayRuns, open_ray_runs
from coterie.data.arrays import from_arrays
from coterie.errors import ConfigError
from coterie.methods import Local
from coterie.simulation.run import Progress
from coterie.simulation.workers import WorkerDied
from coterie.studies import config
from coterie.studies.run import run_study
from coterie.studies.sweep import run_sweep
from coterie.studies.tune import tune_study
from coterie.testing import tiny_federation, tiny_settings

ray = pytest.importorskip("ray")
pytestmark = [
    # Ray leaves files and sockets to the collector
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
]

STUDY = """
name = "tiny"
rounds = 3
seeds = [0, 1]
model = { kind = "linear" }
checkpoint_seconds = 0
engine = "vmap"

[data]
dataset = "digits"
num_clients = 4
train = 16
validation = 8
shift = [{ kind = "rotation", degrees = [0, 180] }]

[[methods]]
kind = "random"
label = "Gossip"

[[methods]]
kind = "local"
"""
MORTAL = """
import os
from dataclasses import dataclass
from pathlib import Path

from coterie.methods import Local
from mortal_words import signal_number


@dataclass(frozen=True)
class Mortal(Local):
    \"\"\"Local training whose first process dies in its third round.\"\"\"

    kind = "mortal"
    mark: str = ""

    def round(self, rnd, state):
        if self.mark and rnd.index == 2 and not Path(self.mark).exists():
            Path(self.mark).touch()
            os.kill(os.getpid(), signal_number())
        return super().round(rnd, state)
"""


@pytest.fixture(scope="module")
def cluster():
    """A Ray of this machine, with two processors and a GPU that is only said to be there."""
    with connect_ray(
        parse_place("ray:local"), num_cpus=2, num_gpus=1, object_store_memory=80 * 2**20
    ):
        yield


def _enter(context):
    with context:
        pass


def files(folder: Path) -> dict[str, bytes]:
    """What a study left, without seconds, and what digests them."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if (
            path.is_file()
            and not path.name.startswith(".")
            and path.name not in ("B2SUMS", "report.html")
        ):
            content = path.read_bytes()
            if path.name in ("provenance.json", "summary.json"):
                told = json.loads(content)
                del told["timing"]
                told.get("check", {}).pop("seconds", None)
                content = json.dumps(told).encode()
            found[str(path.relative_to(folder))] = content
    return found


@pytest.mark.full
def test_a_study_leaves_the_bytes_of_this_machine(cluster, tmp_path):
    """Each run in another process, which shares no folder; the data of a seed are put into the store once."""
    study = config.parse_study_text(STUDY)
    over, heard = RayRuns(), []
    run_study(study, out=tmp_path / "here")
    done = run_study(study, out=tmp_path / "there", over=over, workers=4, observer=heard.append)
    here, there = files(tmp_path / "here"), files(tmp_path / "there")
    assert here.keys() == there.keys()
    assert [name for name in here if here[name] != there[name]] == []
    assert {name.rpartition("/")[2] for name in here} >= {
        "checkpoint.safetensors",
        "checkpoint-before.safetensors",
    }
    assert len(done.summary["timing"]) == 4
    assert {
        (step.label, step.seed, step.round) for step in heard if isinstance(step, Progress)
    } == {
        (label, seed, index)
        for label in ("Gossip", "local")
        for seed in (0, 1)
        for index in (-1, 0, 1, 2)
    }
    last = sum(
        len(content)
        for name, content in there.items()
        if name.count("/") == 3 and "before" not in name
    )
    assert last < over.sent.home < 5 * last, "what is new, at each of three checkpoints and the end"
    assert over.sent.lost == 0


@pytest.mark.slow
def test_a_worker_that_dies_costs_the_rounds_since_its_last_checkpoint(
    cluster, tmp_path, monkeypatch
):
    """The method is a file beside the study, with a module that it imports: both go to the workers."""
    (tmp_path / "mortal.py").write_text(MORTAL)
    (tmp_path / "mortal_words.py").write_text("def signal_number():\n    return 9\n")
    monkeypatch.syspath_prepend(tmp_path)
    text = STUDY.replace(
        'kind = "random"\nlabel = "Gossip"',
        'kind = "mortal:Mortal"\nlabel = "Gossip"\nmark = "MARK"',
    )
    mark = tmp_path / "mark"
    mark.touch()
    study = config.parse_study_text(text.replace("MARK", str(mark)))
    run_study(study, out=tmp_path / "here")
    mark.unlink()
    heard: list[Progress] = []
    with pytest.warns(UserWarning, match="its worker died; try 2 goes on where it was"):
        run_study(
            study,
            out=tmp_path / "there",
            over=(over := RayRuns()),
            workers=1,
            observer=heard.append,
        )
    here, there = files(tmp_path / "here"), files(tmp_path / "there")
    assert [name for name in here if here[name] != there.get(name)] == []
    assert over.sent.lost == 1
    rounds = [step.round for step in heard if (step.label, step.seed) == ("Gossip", 0)]
    assert rounds.count(-1) == 1, "it began once"
    for name in ("mortal", "mortal_words"):
        sys.modules.pop(name, None)


@pytest.mark.slow
def test_a_worker_that_always_dies_is_given_up(cluster):
    def die(job, emit):
        os.kill(os.getpid(), signal.SIGKILL)

    with (
        pytest.warns(UserWarning, match="one: its worker died; try 2"),
        pytest.raises(WorkerDied, match="one: its worker died, 2 times; resume goes on"),
    ):
        list(RayRuns(retries=1)(die, ["one"], 1, print))


@pytest.mark.slow
def test_the_error_of_a_job_is_that_of_this_machine_and_ends_the_others(cluster):
    def refuse(job, emit):
        raise ConfigError(f"{job} is refused")

    def fail(job, emit):
        raise KeyError("of nobody")

    with pytest.raises(ConfigError, match=r"^three is refused$"):
        list(RayRuns()(refuse, ["three"], 1, print))
    with pytest.raises(WorkerDied, match="KeyError: 'of nobody'"):
        list(RayRuns()(fail, ["four"], 1, print))


@pytest.mark.slow
@pytest.mark.parametrize("relayed", [False, True], ids=["within", "outside"])
def test_runs_see_the_gpu_that_ray_gives_them(cluster, relayed, monkeypatch):
    """Two halves of a GPU are the same one. A process outside of the cluster hears tasks through an actor in it."""
    if relayed:
        monkeypatch.setattr(runs, "_make_tasks", runs._Relay)

    def visible(job, emit):
        emit(f"doing {job}")
        return os.environ["CUDA_VISIBLE_DEVICES"]

    heard: list[object] = []
    found = dict(RayRuns(cpus=1, gpus=0.5)(visible, ["a", "b"], 2, heard.append))
    assert found == {"a": "0", "b": "0"}
    assert sorted(map(str, heard)) == ["doing a", "doing b"]


@pytest.mark.slow
def test_two_blocks_share_the_gpu_that_is_asked_for(cluster):
    left = []

    @contextmanager
    def start(given):
        with actors.start_actors(given, gpus=0.5) as crew:
            end = time.monotonic() + 30  # Ray's count of what is left comes late
            while (free := ray.available_resources().get("GPU", 0.0)) and time.monotonic() < end:
                time.sleep(0.1)
            left.append(free)
            yield crew

    settings = tiny_settings(rounds=1)
    simulate_in_blocks(
        tiny_federation(), Local(), model="linear", settings=settings, blocks=2, start=start
    )
    assert left == [0.0]


LARGE = """
name = "large"
data = { dataset = "own" }
model = { kind = "own" }
rounds = 2
seeds = [0, 1]
engine = "vmap"

[[methods]]
kind = "local"
"""


@pytest.mark.slow
def test_data_that_ray_has_no_room_for_in_memory_change_nothing(cluster, tmp_path):
    """Two seeds of 120 MB each; Ray was given 80 MB, and puts the rest on disk."""

    def federation(seed):
        draws = np.random.default_rng(seed)
        return from_arrays(
            draws.random((3000, 10_000), "float32"), draws.integers(0, 2, 3000), num_clients=4
        )

    assert federation(0).nbytes > 100 * 2**20
    study = config.parse_study_text(LARGE)
    more = {"federation": federation, "model": "linear"}
    run_study(study, out=tmp_path / "here", **more)
    run_study(study, out=tmp_path / "there", over=RayRuns(), workers=2, **more)
    here, there = files(tmp_path / "here"), files(tmp_path / "there")
    assert here.keys() == there.keys()
    assert [name for name in here if here[name] != there[name]] == []


@pytest.mark.slow
def test_tuning_chooses_what_this_machine_would(cluster):
    study = config.parse_study_text(
        STUDY.replace("rounds = 3", "rounds = 1").replace("seeds = [0, 1]", "seeds = [0]")
    )
    grid = {"lr": [0.01, 0.1]}
    here = tune_study(study, grid, widenings=0)
    there = tune_study(study, grid, widenings=0, over=RayRuns(), workers=4)
    assert sorted(map(str, here.trials)) == sorted(map(str, there.trials))
    assert here.choices == there.choices


@pytest.mark.slow
def test_a_sweep_leaves_the_bytes_of_this_machine(cluster, tmp_path):
    text = STUDY.replace("rounds = 3", "rounds = 1").replace(
        "seeds = [0, 1]", "seeds = [0]\nsweep = { lr = [0.1, 0.2] }"
    )
    study = config.parse_study_text(text)
    run_sweep(study, out=tmp_path / "here")
    run_sweep(study, out=tmp_path / "there", over=RayRuns(), workers=4)
    here, there = files(tmp_path / "here"), files(tmp_path / "there")
    assert here.keys() == there.keys()
    assert [name for name in here if here[name] != there[name]] == []
    assert len([name for name in here if name.endswith("metrics.parquet")]) == 4


@pytest.mark.full
def test_where_ray_has_no_room_for_data_one_line_says_so(cluster, monkeypatch):
    def full(value):
        raise ray.exceptions.ObjectStoreFullError("no space\nis left")

    monkeypatch.setattr(ray, "put", full)
    with pytest.raises(
        WorkerDied,
        match=r"^Ray does not take the data of a run: .*no space is left.*; resume goes on$",
    ):
        list(RayRuns()(print, ["one"], 1, print))


@pytest.mark.full
def test_the_machines_are_looked_at_before_the_first_run(cluster, monkeypatch):
    """Each answers for itself; what is equal is not spoken of, other software is refused."""
    own = doctor.describe_this_machine()
    assert doctor.describe_differences(doctor.look_at_machines(), own) == []
    with open_ray_runs("ray:local", check=True) as over:
        assert over.far
    old = doctor.Machine("here", {**own.facts, "torch": "1.0"})
    monkeypatch.setattr(doctor, "describe_this_machine", lambda: old)
    with pytest.raises(
        ConfigError, match=r"the cluster has other software .torch: .* has .*, this machine has 1.0"
    ):
        _enter(open_ray_runs("ray:local", check=True))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"gpus": 1.5}, "gpus is 1.5; expected a share"),
        ({"gpus": -0.5}, "gpus is -0.5; expected a share"),
        ({"gpus": -1}, "gpus is -1; expected a share"),
        ({"cpus": 0}, "cpus is 0; expected more"),
        ({"retries": -1}, "retries"),
    ],
)
def test_what_no_run_can_have_is_refused_before_anybody_is_called(options, said):
    with pytest.raises(ConfigError, match=said), open_ray_runs("ray:auto", **options):
        pass


@pytest.mark.parametrize("gpus", [0, 0.25, 1, 2, 3.0])
@pytest.mark.parametrize(
    ("where", "check", "looked"),
    [("ray:local", None, 0), ("ray:auto", None, 1), ("ray:local", True, 1), ("ray:auto", False, 0)],
)
def test_a_run_has_a_share_of_a_gpu_or_whole_ones_on_machines_that_were_looked_at(
    monkeypatch, gpus, where, check, looked
):
    said = []
    monkeypatch.setattr(runs, "connect_ray", lambda *_given, **_started: nullcontext())
    monkeypatch.setattr(runs.doctor, "look_at_machines", lambda: ["one"])
    monkeypatch.setattr(runs.doctor, "check_equal_software", said.append)
    with open_ray_runs(where, gpus=gpus, cpus=2, retries=0, check=check) as over:
        assert (over.cpus, over.gpus, over.retries) == (2, gpus, 0)
    assert said == [["one"]] * looked


@pytest.mark.parametrize(
    ("cpus", "gpus", "has", "room"),
    [
        (1, 0, {"CPU": 4.0}, 4),
        (2, 0, {"CPU": 5.0}, 2),  # a half run is none
        (8, 0, {"CPU": 4.0}, 1),  # Ray lets it wait
        (1, 1, {"CPU": 9.0, "GPU": 3.0}, 3),
        (1, 2, {"CPU": 9.0, "GPU": 3.0}, 1),
        (1, 0.4, {"CPU": 9.0, "GPU": 2.0}, 4),  # two on each card, not 2 / 0.4 = 5
        (1, 0.25, {"CPU": 3.0, "GPU": 1.0}, 3),  # the processors are fewer
        (1, 1, {"CPU": 9.0}, 1),
    ],
)
def test_no_more_runs_are_under_way_than_there_is_room_for(cpus, gpus, has, room):
    pretended = SimpleNamespace(cluster_resources=lambda: has)
    assert RayRuns(cpus=cpus, gpus=gpus)._count_room(pretended) == room
