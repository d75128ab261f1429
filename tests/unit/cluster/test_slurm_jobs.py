"""What is done with jobs of Slurm, with a pretended submitit: submission, waiting, states and reasons."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coterie.cluster import slurm
from coterie.cluster.place import Place
from coterie.cluster.slurm import ASKED, FOLDER, SlurmRuns
from coterie.errors import ConfigError, DataError, FolderInUse
from coterie.simulation.run import Progress
from coterie.simulation.workers import WorkerDied

submitit = pytest.importorskip("submitit")
GPU = Place("slurm", "gpu:time=90,mem=4GB")


@dataclass(frozen=True)
class Work:
    """Work whose jobs are runs of a study."""

    folder: Path

    def job_folder(self, job: Any) -> Path:
        return self.folder / job.label / f"seed-{job.seed}"


@dataclass(frozen=True)
class Job:
    """A run."""

    label: str
    seed: int = 0

    def __str__(self) -> str:
        return self.label


@dataclass
class Submitted:
    """A job that submitit has submitted; it is done at the second look.

    Args:
        task: what it does.
        number: of it.
        outcome: what submitit read of it: ("success", answer) or ("error", text).
    """

    task: Any
    number: int
    outcome: Any = ("success", ("done", True))
    looks: int = 0
    state: str = "COMPLETED"
    log: str | None = None

    @property
    def job_id(self) -> str:
        return f"9_{self.number}"

    def done(self) -> bool:
        self.looks += 1
        return self.looks > 1

    def stderr(self) -> str | None:
        return self.log

    def _get_outcome_and_result(self) -> Any:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    def result(self) -> Any:
        kind, value = self._get_outcome_and_result()
        if kind == "error":
            raise RuntimeError(value)
        return value


@dataclass
class Executor:
    """submitit's executor: it notes what it was asked for."""

    outcomes: dict[str, dict[str, Any]] = field(default_factory=dict)
    jobs: list[Submitted] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    most: int = 0

    def submit(self, task: Any) -> Submitted:
        more = self.outcomes.get(str(task.job), {})
        self.jobs.append(Submitted(task, len(self.jobs), **more))
        self.most = max(self.most, sum(one.looks < 2 for one in self.jobs))
        return self.jobs[-1]

    @contextlib.contextmanager
    def batch(self) -> Any:
        before = len(self.jobs)
        yield
        self.batches.append(len(self.jobs) - before)


@pytest.fixture
def submit(monkeypatch, tmp_path):
    """Run jobs with a pretended executor; return the results, the executor, and seconds slept."""
    slept: list[float] = []
    monkeypatch.setattr(slurm, "time", SimpleNamespace(sleep=slept.append))

    def run(jobs, *, place=GPU, workers=4, outcomes=None, heard=None, cpus=1):
        executor, asked = Executor(outcomes or {}), []

        @contextlib.contextmanager
        def make(*arguments):
            asked.append(arguments)
            arguments[1].mkdir(exist_ok=True)  # as the real one does
            yield executor

        monkeypatch.setattr(slurm, "_make_executor", make)
        over = SlurmRuns(place, cpus=cpus, gpus=2.0)
        found = over(Work(tmp_path), iter(jobs), workers, (heard or []).append)
        return found, executor, slept, asked

    return run


def test_all_runs_are_one_array_and_each_gives_its_result(submit, tmp_path):
    jobs = [Job("a"), Job("b", 1), Job("c")]
    found, executor, slept, asked = submit(jobs, workers=2, cpus=3)
    assert list(found) == [(job, True) for job in jobs]
    assert executor.batches == [3]
    assert asked == [(GPU, tmp_path / FOLDER, 3, 2, 2, tmp_path)], "two of them at once"
    assert slept == [slurm._TURN], "one look, a pause, and the second look"
    request = json.loads((tmp_path / FOLDER / ASKED).read_text())
    assert request["place"] == "slurm:gpu:time=90,mem=4GB"
    assert request["jobs"] == {"a/seed-0": "9_0", "b/seed-1": "9_1", "c/seed-0": "9_2"}
    for job, one in zip(jobs, executor.jobs, strict=True):
        task = one.task
        assert (task.job, task.batch, task.cpus) == (job, request["batch"], 3)
        assert task.argv == sys.argv
        assert set(task.wanted) == {"coterie", "code", "torch", "python"}


def test_each_submission_has_a_mark_of_its_own(submit, tmp_path):
    marks = []
    for _ in range(2):
        list(submit([Job("a")])[0])
        marks.append(json.loads((tmp_path / FOLDER / ASKED).read_text())["batch"])
    assert marks[0] != marks[1]


@pytest.mark.parametrize(("workers", "cores", "most"), [(3, 2, 2), (1, 8, 1), (2, 8, 2)])
def test_processes_of_this_machine_are_as_many_as_it_has_cores(
    submit, tmp_path, monkeypatch, workers, cores, most
):
    monkeypatch.setattr(slurm, "count_cores", lambda: cores)
    jobs = [Job(name) for name in "abcde"]
    found, executor, slept, _ = submit(jobs, place=Place("slurm", "local"), workers=workers)
    assert sorted(job.label for job, _ in found) == list("abcde")
    assert (executor.most, executor.batches) == (most, [])
    assert set(slept) == {0.2}
    # The ids of all are there, also of those that were submitted last.
    assert len(json.loads((tmp_path / FOLDER / ASKED).read_text())["jobs"]) == 5


def test_a_failure_does_not_stop_the_others_and_the_first_is_raised(submit):
    outcomes = {
        "a": {"outcome": ("success", ("failed", DataError("a is bad")))},
        "c": {"outcome": ("success", ("failed", ConfigError("c is bad")))},
    }
    found, *_ = submit([Job("a"), Job("b"), Job("c")], outcomes=outcomes)
    seen = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with pytest.raises(DataError, match=r"^a is bad$"):
            seen.extend(found)
    assert seen == [(Job("b"), True)]
    # After the last there are no others.
    assert [str(one.message) for one in said] == ["a failed: a is bad; the others go on"]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"outcome": ("error", "Trace\n  KeyError: 'x'\n")}, "KeyError: 'x'"),
        ({"outcome": ("error", "x" * 300)}, "x" * 200),
        ({"outcome": OSError(), "log": "first\nmore\n\n last line \n \n"}, "last line"),
        ({"outcome": OSError(), "log": "y" * 300}, "y" * 200),
        ({"outcome": OSError(), "state": "TIMEOUT"}, "Slurm says TIMEOUT"),
        ({"outcome": OSError(), "log": "", "state": "TIMEOUT"}, "Slurm says TIMEOUT"),
    ],
)
def test_a_job_without_a_result_says_why(given, reason):
    job = Submitted(None, 4, **given)
    assert slurm._failure_reason(job) == reason
    with pytest.raises(WorkerDied) as told:
        slurm._job_result(job)
    assert str(told.value) == f"job 9_4 ended without a result: {reason}; resume goes on"


def test_a_job_with_a_result_or_its_own_error_has_that():
    done = Submitted(None, 0, ("success", ("done", 5)))
    assert (slurm._job_result(done), slurm._failure_reason(done)) == (5, "")
    failed = Submitted(None, 0, ("success", ("failed", DataError("one\nmore\nline two "))))
    with pytest.raises(DataError):
        slurm._job_result(failed)
    assert slurm._failure_reason(failed) == "line two"
    silent = Submitted(None, 0, ("success", ("failed", MemoryError())))
    assert slurm._failure_reason(silent) == "MemoryError"


def test_the_round_of_a_run_is_told_when_its_checkpoint_has_a_later_one(monkeypatch, tmp_path):
    """A checkpoint after r rounds was written by round r - 1; one more is to come until it is done."""
    stored = iter([None, 0, 2, 2, 3, 5])
    monkeypatch.setattr(slurm.checkpoint, "count_stored_rounds", lambda folder: next(stored))
    monkeypatch.setattr(slurm.checkpoint, "is_done", lambda folder: seen == 5)
    heard: list[Any] = []
    rounds: dict[int, int] = {}
    job = SimpleNamespace(job=SimpleNamespace(label="DAC", seed=4, point="lr=0.1"))
    for index in range(6):
        seen = index
        slurm._report_progress(tmp_path, job, rounds, 1, heard.append)
    assert all(isinstance(one, Progress) for one in heard)
    assert [(one.round, one.rounds) for one in heard] == [(1, 3), (2, 4), (4, 5)]
    assert {(one.label, one.seed, one.point, one.seconds) for one in heard} == {
        ("DAC", 4, "lr=0.1", 0.0)
    }
    assert all(one.loss != one.loss and one.score != one.score for one in heard)


def test_what_a_place_says_reaches_the_executor(monkeypatch, tmp_path):
    asked: list[Any] = []

    class Auto:
        def __init__(self, **given):
            asked.append(given)

        def update_parameters(self, **given):
            asked.append(given)

    monkeypatch.setattr(submitit, "AutoExecutor", Auto)
    with slurm._make_executor(GPU, tmp_path / "jobs", 3, 2, 0, Path("mine")) as executor:
        assert isinstance(executor, Auto)
    assert asked == [
        {"folder": tmp_path / "jobs", "cluster": "slurm", "slurm_max_num_timeout": 20},
        {"name": "coterie-mine", "timeout_min": 90, "cpus_per_task": 3},
        {
            "slurm_partition": "gpu",
            "slurm_array_parallelism": 1,
            "gpus_per_node": 2,
            "slurm_mem": "4GB",
        },
    ]
    assert (tmp_path / "jobs").is_dir()
    asked.clear()
    with slurm._make_executor(Place("slurm", "local"), tmp_path / "jobs", 1, 0, 5, Path("mine")):
        pass
    assert [one.get("cluster") for one in asked] == ["local", None], "no partition of this machine"
    assert asked[1]["timeout_min"] == 24 * 60, "a day, where the place says none"


def test_a_setting_that_submitit_does_not_know_is_one_line(monkeypatch, tmp_path):
    def refuse(**_):
        raise NameError("Unknown arguments:\nslurm_mme")

    monkeypatch.setattr(submitit, "AutoExecutor", refuse)
    with (
        pytest.raises(ConfigError, match=r"^--on slurm:gpu:.*: Unknown arguments: slurm_mme$"),
        slurm._make_executor(GPU, tmp_path, 1, 0, 1, Path("mine")),
    ):
        pass


# ---------------------------------------------------------------- states


def write_request(folder: Path, place: str, jobs: dict[str, str]) -> None:
    (folder / FOLDER).mkdir(exist_ok=True)
    (folder / FOLDER / ASKED).write_text(json.dumps({"place": place, "jobs": jobs}))


def test_the_state_of_each_job_is_that_of_slurm_by_the_folder_of_its_run(monkeypatch, tmp_path):
    made = []

    def job(folder, job_id):
        made.append((folder, job_id))
        outcome = ("success", ("done", 1)) if job_id == "9_0" else OSError()
        return Submitted(None, 0, outcome, state=f"Cancelled {job_id}", log="no room\n")

    monkeypatch.setattr(submitit, "SlurmJob", job)
    write_request(tmp_path, "slurm:gpu", {"a/seed-0": "9_0", "b/seed-0": "9_1"})
    assert slurm.load_job_states(tmp_path) == {
        tmp_path / "a/seed-0": ("CANCELLED 9_0", ""),
        tmp_path / "b/seed-0": ("CANCELLED 9_1", "no room"),
    }
    assert made[0] == (tmp_path / FOLDER, "9_0")


@pytest.mark.parametrize(("over", "state"), [(False, "RUNNING"), (True, "FINISHED")])
def test_whether_a_job_of_this_machine_runs_is_asked_of_the_system(
    monkeypatch, tmp_path, over, state
):
    asked = []
    monkeypatch.setattr(slurm, "is_over", lambda job: asked.append(job) or over)
    monkeypatch.setattr(
        submitit, "LocalJob", lambda folder, job_id: Submitted(None, 0, state="finished")
    )
    write_request(tmp_path, "slurm:local", {"a/seed-0": "4711"})
    assert slurm.load_job_states(tmp_path) == {tmp_path / "a/seed-0": (state, "")}
    assert asked == ["local:4711"]


@pytest.mark.parametrize("text", [None, "{", '{"jobs": {}}'])
def test_without_a_request_there_are_no_states(tmp_path, text):
    if text is not None:
        (tmp_path / FOLDER).mkdir()
        (tmp_path / FOLDER / ASKED).write_text(text)
    assert slurm.load_job_states(tmp_path) == {}


@pytest.mark.parametrize(
    ("state", "over"),
    [
        ("completed", True),
        ("CANCELLED by 1000", True),
        ("OUT_OF_MEMORY", True),
        ("TIMEOUT", True),
        ("RUNNING", False),
        ("PENDING", False),
        ("COMPLETING", False),
        ("UNKNOWN", False),
    ],
)
def test_a_job_of_slurm_is_over_when_slurm_says_so_now(monkeypatch, state, over):
    asked = []

    def get_state(job, mode):
        asked.append((job, mode))
        return state

    watcher = SimpleNamespace(get_state=get_state)
    monkeypatch.setattr(submitit, "SlurmJob", lambda folder, job: SimpleNamespace(watcher=watcher))
    assert slurm.is_over("17_0") is over
    assert asked == [("17_0", "force")]


def test_a_job_of_which_slurm_says_nothing_is_not_over(monkeypatch):
    def refuse(folder, job):
        raise OSError("no answer")

    monkeypatch.setattr(submitit, "SlurmJob", refuse)
    assert slurm.is_over("17_0") is False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="states are read from /proc")
def test_a_process_that_has_ended_and_was_not_waited_for_is_over():
    process = subprocess.Popen([sys.executable, "-c", ""])
    end = time.monotonic() + 60
    try:
        while not slurm.is_over(f"local:{process.pid}") and time.monotonic() < end:
            time.sleep(0.02)
        os.kill(process.pid, 0)  # still in the table of processes
        assert slurm.is_over(f"local:{process.pid}")
    finally:
        process.wait()


# ---------------------------------------------------------------- in a job


@pytest.mark.parametrize(
    ("cluster", "expected"), [("slurm", "17_0"), ("local", "local:17_0"), ("debug", "local:17_0")]
)
def test_a_job_knows_its_own_id(monkeypatch, cluster, expected):
    environment = SimpleNamespace(cluster=cluster, job_id="17_0")
    monkeypatch.setattr(submitit, "JobEnvironment", lambda: environment)
    assert slurm._own_job_id() == expected


def make_task(tmp_path, monkeypatch, does):
    """Return a task of a study that was submitted as "mine", and the threads that it sets."""
    monkeypatch.setattr(sys, "argv", ["other"])
    threads = []
    monkeypatch.setattr(slurm, "use_threads", threads.append)
    monkeypatch.setattr(slurm, "_own_job_id", lambda: "17_0")
    monkeypatch.setattr(slurm.doctor, "check_same_software", lambda wanted: None)
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / ASKED).write_text('{"batch": "mine"}')

    class Doing(Work):
        def __call__(self, job, emit):
            emit("dropped")
            return does(self.job_folder(job))

    task = slurm._SlurmTask(Doing(tmp_path), Job("a"), "mine", ["coterie", "run"], {}, 3)
    return task, threads


def test_a_job_does_its_run_under_both_claims_with_its_threads(monkeypatch, tmp_path):
    def does(folder):
        seen.append((slurm.turns.find_holder(folder)[0], slurm.turns.find_holder(folder)[1]["job"]))
        seen.append(list(sys.argv))
        with pytest.raises(FolderInUse):
            slurm.claim_folder_of_another(folder)
        return "result"

    def other(folder):
        found: list[BaseException] = []

        def claim():
            try:
                with slurm.claim_folder(folder, 0.0):
                    pass
            except FolderInUse as error:
                found.append(error)

        thread = threading.Thread(target=claim)
        thread.start()
        thread.join()
        raise found[0]

    monkeypatch.setattr(slurm, "claim_folder_of_another", other, raising=False)
    seen: list[Any] = []
    task, threads = make_task(tmp_path, monkeypatch, does)
    assert task() == ("done", "result")
    assert seen == [(1, "17_0"), ["coterie", "run"]]
    assert threads[0] == 3
    assert slurm.turns.find_holder(tmp_path / "a/seed-0") == (0, {})
    again = task.checkpoint()
    assert again.function is task


@pytest.mark.parametrize("error", [DataError("bad"), OSError(28, "full"), MemoryError()])
def test_the_error_of_a_run_is_the_answer_of_its_job(monkeypatch, tmp_path, error):
    def does(folder):
        raise error

    assert make_task(tmp_path, monkeypatch, does)[0]() == ("failed", error)


def test_a_run_that_another_works_on_is_left_to_it(monkeypatch, tmp_path):
    def does(folder):
        raise FolderInUse("another")

    assert make_task(tmp_path, monkeypatch, does)[0]() == ("done", False)


def test_a_run_whose_turn_another_job_has_is_told(monkeypatch, tmp_path):
    """Where Slurm does not know whether that job is over, the run was submitted again for ever."""
    task, _ = make_task(tmp_path, monkeypatch, lambda folder: pytest.fail("it was run"))
    monkeypatch.setattr(slurm, "is_over", lambda job: False)
    folder = tmp_path / "a/seed-0"
    folder.mkdir(parents=True)
    turn = {"job": "9_1", "host": "n7", "since": "2026-11-02 10:00:00"}
    (folder / ".turn-4.json").write_text(json.dumps(turn))
    kind, error = task()
    assert kind == "failed"
    assert isinstance(error, FolderInUse)
    assert "a/seed-0 is in use by job 9_1 on n7 since 2026-11-02 10:00:00" in str(error)
    assert "delete .turn-4.json there" in str(error)


# ---------------------------------------------------------------- a question to a partition


@pytest.mark.parametrize("error", [None, ConfigError("own words"), RuntimeError("far\naway " * 90)])
def test_a_question_is_answered_by_a_job_and_leaves_nothing(monkeypatch, tmp_path, error):
    asked: list[Any] = []

    @contextlib.contextmanager
    def make(*arguments):
        asked.append(arguments)

        def result():
            if error is not None:
                raise error
            return "answer"

        yield SimpleNamespace(submit=lambda question: SimpleNamespace(result=result))

    monkeypatch.setattr(slurm, "_make_executor", make)
    monkeypatch.chdir(tmp_path)
    if error is None:
        assert slurm.run_question(GPU, print) == "answer"
    else:
        with pytest.raises(ConfigError) as told:
            slurm.run_question(GPU, print)
        text = str(told.value)
        assert "\n" not in text
        if isinstance(error, ConfigError):
            assert told.value is error
        else:
            # The end of a long text says what happened.
            assert text.startswith("a job on slurm:gpu:time=90,mem=4GB failed: ")
            assert text.endswith("far away")
            assert len(text) < 400
    ((place, folder, cpus, gpus, at_once, _),) = asked
    assert (place, cpus, gpus, at_once) == (GPU, 1, 0, 1)
    assert folder.parent == tmp_path, "which all machines see"
    assert list(tmp_path.iterdir()) == []
