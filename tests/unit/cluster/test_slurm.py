"""Runs as jobs, with submitit's executor of this machine and a pretended Slurm; and how a study stands."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coterie.cli.app import app
from coterie.cluster import slurm, status
from coterie.cluster.place import Place, parse_place
from coterie.cluster.slurm import ASKED, FOLDER, SlurmRuns
from coterie.cluster.status import JobStatus, load_statuses
from coterie.errors import ConfigError, CoterieError
from coterie.runtime import checkpoint
from coterie.studies import config
from coterie.studies.run import FAILURE_FILE, Job, run_folder, run_study

from .pretend_slurm import COMMANDS

submitit = pytest.importorskip("submitit")
STUDY = """
name = "tiny"
rounds = 1
seeds = [0]
model = { kind = "linear" }
engine = "vmap"

[data]
dataset = "digits"
num_clients = 4
train = 16
validation = 8
shift = [{ kind = "rotation", degrees = [0, 180] }]

[[methods]]
kind = "local"

[[methods]]
kind = "random"
label = "Gossip"
"""


@pytest.fixture
def jobs(monkeypatch):
    """What submitit starts imports this tree."""
    package = Path(config.__file__).parents[2]
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(package), os.environ.get("PYTHONPATH", "")])
    )


@pytest.fixture
def partition(jobs, monkeypatch, tmp_path):
    """Slurm's commands on the path; give their folder."""
    place = tmp_path / "slurm"
    place.mkdir()
    text = Path(__file__).with_name("pretend_slurm.py").read_text()
    for name in COMMANDS:
        (place / name).write_text(f"#!{sys.executable}\n{text}")
        (place / name).chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(place), os.environ["PATH"]]))
    monkeypatch.setattr(slurm, "_TURN", 0.1)
    # not ten minutes
    monkeypatch.setattr(submitit.SlurmJob, "watcher", type(submitit.SlurmJob.watcher)(delay_s=1))
    yield place
    (place / "hold").unlink(missing_ok=True)
    for path in place.glob("*.json"):
        if "process" in (job := json.loads(path.read_text())):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job["process"], signal.SIGKILL)


def tables(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.suffix in (".parquet", ".safetensors", ".toml") and FOLDER not in path.parts
    }


@pytest.mark.full
def test_a_study_as_jobs_leaves_the_bytes_of_this_machine(jobs, tmp_path):
    study = config.parse_study_text(STUDY)
    run_study(study, out=tmp_path / "here")
    over = SlurmRuns(parse_place("slurm:local"))
    done = run_study(study, out=tmp_path / "there", over=over, workers=2)
    assert tables(tmp_path / "here") == tables(tmp_path / "there")
    assert len(done.summary["timing"]) == 2
    asked = json.loads((tmp_path / "there/tiny" / FOLDER / ASKED).read_text())
    assert set(asked["jobs"]) == {"local/seed-0", "Gossip/seed-0"}
    assert [one.state for one in load_statuses(tmp_path / "there/tiny")] == ["done", "done"]


@pytest.mark.slow
def test_an_array_of_slurm_leaves_the_bytes_of_this_machine(partition, tmp_path):
    """One array for all runs, with what the place says; a method in a file beside the study, in another folder."""
    study = config.parse_study_text(STUDY)
    run_study(study, out=tmp_path / "here")
    heard = []
    run_study(
        study, out=tmp_path / "there", over=SlurmRuns(parse_place("slurm:cpu:time=7,mem=2GB"), cpus=2), workers=2,
        observer=heard.append,
    )  # fmt: skip
    assert tables(tmp_path / "here") == tables(tmp_path / "there")
    (script,) = partition.glob("*.sbatch")
    asked = {
        line.partition("=")[0]: line.partition("=")[2] for line in script.read_text().splitlines()
    }
    said = {
        name: asked[f"#SBATCH --{name}"]
        for name in ("array", "partition", "time", "mem", "cpus-per-task")
    }
    assert said == {
        "array": "0-1%2",
        "partition": "cpu",
        "time": "7",
        "mem": "2GB",
        "cpus-per-task": "2",
    }
    assert {step.label for step in heard} == {"local", "Gossip"}
    assert [one.state for one in load_statuses(tmp_path / "there/tiny")] == ["done", "done"]


@contextlib.contextmanager
def handed_in(folder, text=STUDY):
    """A study that waits for its jobs in a thread; at the end of the block it is waited for, and told."""
    told = {}

    def wait():
        try:
            run_study(
                config.parse_study_text(text),
                out=folder,
                over=SlurmRuns(parse_place("slurm:cpu")),
                workers=2,
            )
        except CoterieError as error:
            told["error"] = str(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    try:
        place = folder / "tiny" / FOLDER
        until(lambda: (place / ASKED).exists() and json.loads((place / ASKED).read_text())["jobs"])
        yield told
    finally:
        waiting.join(120)
    assert not waiting.is_alive()


def until(true):
    """Wait for a condition, for a minute at most."""
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*the others go on")
def test_a_job_that_was_queued_and_cancelled_is_told_and_handed_in_again(partition, tmp_path):
    """One of two is cancelled while both wait; the other is done, and `resume` does the rest."""
    (partition / "hold").touch()
    with handed_in(tmp_path / "there") as told:
        folder = tmp_path / "there/tiny"
        assert [one.state for one in load_statuses(folder)] == ["queued", "queued"]
        subprocess.run([partition / "scancel", "1_1"], check=True)
        (partition / "hold").unlink()
    assert (
        told["error"] == "job 1_1 ended without a result: Slurm says CANCELLED by 0; resume goes on"
    )
    found = {one.job.label: (one.state, one.reason) for one in load_statuses(folder)}
    assert found == {"local": ("done", ""), "Gossip": ("failed", "Slurm says CANCELLED by 0")}
    study = config.parse_study_text(STUDY)
    run_study(study, out=tmp_path / "here")
    run_study(
        study,
        out=tmp_path / "there",
        over=SlurmRuns(parse_place("slurm:cpu")),
        workers=2,
        resume=True,
    )
    assert [one.state for one in load_statuses(folder)] == ["done", "done"]
    assert tables(tmp_path / "here") == tables(tmp_path / "there")


@pytest.mark.slow
def test_a_job_that_runs_out_of_time_goes_on_to_the_bytes_of_this_machine(partition, tmp_path):
    """Slurm tells it so by a signal; it hands itself in again, under its number, and begins at its checkpoint."""
    text = STUDY.replace("rounds = 1", "rounds = 300\ncheckpoint_seconds = 0")
    text = text.partition('[[methods]]\nkind = "random"')[0]
    run_study(config.parse_study_text(text), out=tmp_path / "here")
    with handed_in(tmp_path / "there", text) as told:
        run = tmp_path / "there/tiny/local/seed-0"
        until(lambda: (checkpoint.count_stored_rounds(run) or 0) > 5)
        subprocess.run([partition / "scancel", "1", "--signal", "USR2"], check=True)
        until(lambda: json.loads((partition / "1.json").read_text())["State"] == "PENDING")
        before = checkpoint.count_stored_rounds(run)
        assert 5 < before < 300
    assert told == {}
    assert tables(tmp_path / "here") == tables(tmp_path / "there")
    log = "".join(path.read_text() for path in (tmp_path / "there/tiny" / FOLDER).glob("*.out"))
    assert f"Requeued job 1 ({slurm.MAX_RESUBMISSIONS} remaining timeouts)" in log


def test_a_job_that_is_no_longer_asked_for_does_nothing(tmp_path):
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / ASKED).write_text('{"batch": "another"}')

    class Work:
        folder = tmp_path

        def job_folder(self, job):
            return tmp_path / job

        def __call__(self, job, emit):
            raise AssertionError

    assert slurm._SlurmTask(Work(), "DAC", "mine", list(sys.argv), {}, 1)() == ("done", False)
    assert (
        slurm._SlurmTask(Work(), "DAC", "mine", list(sys.argv), {"torch": "1.0"}, 1)()[0]
        == "failed"
    )


def test_gpus_are_whole():
    with pytest.raises(ConfigError, match=r"--gpus is 0.5; expected a whole number"):
        SlurmRuns(Place("slurm", "gpu"), gpus=0.5)


def test_where_there_is_no_slurm_one_line_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with (
        pytest.raises(ConfigError, match=r"--on slurm:cpu: .*srun") as told,
        slurm._make_executor(Place("slurm", "cpu"), tmp_path / FOLDER, 1, 0, 1, Path("study")),
    ):
        pass
    assert "\n" not in str(told.value)


def test_a_process_of_this_machine_is_over_when_it_has_ended():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert not slurm.is_over(f"local:{process.pid}")
    process.communicate(b"\n")
    assert slurm.is_over(f"local:{process.pid}")
    assert not slurm.is_over("local:nobody")


@pytest.mark.full
def test_each_state_of_a_run_is_told_with_its_reason(tmp_path, monkeypatch):
    study = config.parse_study_text(STUDY.replace("seeds = [0]", "seeds = [0, 1, 2]"))
    run_study(config.parse_study_text(STUDY), out=tmp_path)
    folder = tmp_path / "tiny"
    run_study(study, out=tmp_path, resume=True)
    waits, fails, stops, queues = (
        Job("local", 1),
        Job("local", 2),
        Job("Gossip", 1),
        Job("Gossip", 2),
    )
    for job in (waits, fails, queues):
        for path in run_folder(folder, job).iterdir():
            path.unlink()
    (run_folder(folder, fails) / FAILURE_FILE).write_text("the disk is full")
    told = run_folder(folder, stops) / "provenance.json"
    told.write_text(told.read_text().replace('"done": true', '"done": false'))
    monkeypatch.setattr(
        slurm, "load_job_states", lambda place: {place / "Gossip/seed-2": ("PENDING", "")}
    )
    found = {one.job: (one.state, one.reason) for one in load_statuses(folder)}
    assert found[Job("local", 0)] == ("done", "")
    assert found[waits] == ("waiting", "")
    assert found[fails] == ("failed", "the disk is full")
    assert found[stops][0] == "damaged"
    assert found[queues] == ("queued", "")
    done = CliRunner().invoke(app, ["status", str(folder)])
    assert done.exit_code == 1
    first, *rest = done.output.splitlines()
    assert first == "6 runs: 2 done, 1 queued, 1 failed, 1 damaged, 1 waiting"
    assert "failed   local: seed 2 (the disk is full)" in rest
    assert all(len(line) <= 80 for line in rest[:-1])


def test_the_exit_status_says_whether_there_is_more_to_do():
    one, two = Job("DAC", 0), Job("DAC", 1)
    assert status.exit_status([JobStatus(one, "done"), JobStatus(two, "done")]) == 0
    assert status.exit_status([JobStatus(one, "done"), JobStatus(two, "queued")]) == 3
    assert status.exit_status([JobStatus(one, "running"), JobStatus(two, "failed")]) == 1


@pytest.mark.parametrize("room", [-1, 0, 1, 2, 3])
def test_tasks_for_which_there_is_no_room_wait_and_none_is_lost(room):
    now, waiting = slurm._split_waiting(["a", "b"], room)
    assert now == ["a", "b"][: max(0, room)]
    assert now + waiting == ["a", "b"]
