"""What one worker of Ray does with a job, and what is kept of its data: in this process, without Ray."""

import errno
import os
import sys
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from coterie._util import manifest
from coterie.cluster import packing, runs, slurm
from coterie.data.federation import Federation
from coterie.errors import ConfigError, DataError
from coterie.simulation.run import FilesSaved
from coterie.simulation.workers import WorkerDied
from coterie.testing import tiny_federation

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
]


@pytest.fixture(autouse=True)
def process(monkeypatch):
    """What a worker changes in its process is put back."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.setattr(runs, "_imported", set())
    monkeypatch.setattr("coterie.engine.use_threads", lambda number: None)


@dataclass(frozen=True)
class Job:
    """A job that may have data."""

    name: str
    federation: Federation | None = None


@dataclass(frozen=True)
class Work:
    """Writes a file, says so, and ends as its job's name says."""

    folder: Path

    def job_folder(self, job: Job) -> Path:
        return self.folder / job.name

    def relocate(self, folder: Path) -> "Work":
        return replace(self, folder=folder)

    def __call__(self, job: Job, emit: Any) -> Any:
        place = self.job_folder(job)
        emit("half")
        if job.name == "data":
            return None if job.federation is None else job.federation.population
        if job.name == "warns":
            warnings.warn(f"in {place}", stacklevel=1)
        if job.name == "refuses":
            raise DataError(f"{place} is bad")
        if job.name == "breaks":
            raise KeyError(job.name)
        if job.name == "exits":
            raise SystemExit(3)
        if job.name == "writes":
            manifest.replace_files(place, {"new": b"content"})
            emit(FilesSaved(place))
        return job.name


def do_job(job: Job, there: dict[str, bytes] | None = None, home: str = "", refs: Any = ()) -> Any:
    """Return the messages of a job, one after the other."""
    common = packing.pack(Work(Path("here"))), {}, ["coterie", "run"], 2.0
    payload = packing.pack(job), list(refs)
    return [one for batch in runs.run_job(common, payload, there or {}, home) for one in batch]


def test_a_job_gives_its_progress_and_its_result():
    assert do_job(Job("plain")) == [("progress", "half"), ("done", "plain")]
    assert sys.argv == ["coterie", "run"]


@pytest.mark.filterwarnings("default")
def test_a_warning_and_an_error_name_the_folder_of_the_sending_machine():
    (_, _), (kind, warning), last = do_job(Job("warns"), home="/home/study/run")
    assert (kind, str(warning), last) == ("warning", "in /home/study/run", ("done", "warns"))
    assert isinstance(warning, UserWarning)
    (_, _), (kind, error) = do_job(Job("refuses"), home="/home/study/run")
    assert (kind, type(error), str(error)) == ("failed", DataError, "/home/study/run is bad")
    # Without a folder there is nothing to rename.
    assert str(do_job(Job("refuses"))[-1][1]) == f"{Path('here/refuses')} is bad"


@pytest.mark.parametrize(("name", "word"), [("breaks", "KeyError"), ("exits", "SystemExit")])
def test_what_nobody_expected_ends_the_job_with_its_trace(name, word, capsys):
    kind, error = do_job(Job(name))[-1]
    assert (kind, type(error)) == ("failed", WorkerDied)
    assert word in str(error)
    assert word in capsys.readouterr().err


def test_the_files_of_a_job_are_there_and_only_new_ones_come_back(tmp_path):
    manifest.replace_files(tmp_path, {"old": b"old"})
    there = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    (_, _), (kind, update), last = do_job(Job("writes"), there, "/home/study/run")
    assert (kind, last) == ("files", ("done", "writes"))
    assert update.files == {"new": b"content"}


def test_files_go_at_once_and_progress_waits_for_what_follows(monkeypatch):
    """Files are what survives the death of a worker."""
    sent = [("progress", 1), ("progress", 2), ("files", 3), ("progress", 4), ("failed", 5)]

    def put_all(*arguments: Any) -> None:
        for message in sent:
            arguments[-1].put(message)

    monkeypatch.setattr(runs, "_run_in_thread", put_all)
    common = packing.pack(Work(Path())), {}, [], 1.0
    batches = list(runs.run_job(common, (packing.pack(Job("a")), []), {}, ""))
    assert batches == [sent[:3], sent[3:]]


def test_progress_is_not_held_back_for_ever(monkeypatch):
    monkeypatch.setattr(runs, "_TOGETHER", 0.05)

    def put_slowly(*arguments: Any) -> None:
        arguments[-1].put(("progress", 1))
        time.sleep(0.5)
        arguments[-1].put(("done", 2))

    monkeypatch.setattr(runs, "_run_in_thread", put_slowly)
    common = packing.pack(Work(Path())), {}, [], 1.0
    batches = list(runs.run_job(common, (packing.pack(Job("a")), []), {}, ""))
    assert batches == [[("progress", 1)], [("done", 2)]]


def test_custom_modules_are_installed_once_in_a_process(monkeypatch):
    installed = []
    monkeypatch.setattr(runs.packing, "install_modules", lambda files, _: installed.append(files))
    runs._import_carried({})
    assert installed == [], "nothing is carried"
    for _ in range(2):
        runs._import_carried({"mine.py": b"x = 1"})
    assert installed == [{"mine.py": b"x = 1"}]


def test_data_are_sent_once_and_held_while_a_job_under_way_has_them(monkeypatch):
    put: list[Any] = []

    def put_object(value: Any) -> Any:
        put.append(value)
        return object()

    sent: list[int] = []
    monkeypatch.setattr(runs, "_put_object", put_object)
    monkeypatch.setattr(runs.RayRuns, "_add_sent", lambda _, data: sent.append(data))
    data, other = tiny_federation(), tiny_federation()
    store = runs._FederationStore(runs.RayRuns())
    first = store.make_payload(Job("a", data), [])
    assert packing.unpack(first[0]) == Job("a"), "the data are no part of the job"
    second = store.make_payload(Job("b", data), [first])
    assert len(put) == 1
    assert first[1] == second[1]
    assert len(first[1]) == 1
    assert sent == [put[0].nbytes]
    # Other data; the first are held, since a job under way refers to them.
    third = store.make_payload(Job("c", other), [first, second])
    assert store.make_payload(Job("d", data), [second, third])[1] == first[1]
    assert len(put) == 2
    # A job without data; no job under way refers to the first data any more.
    assert store.make_payload(Job("e"), [third])[1] == []
    assert store.make_payload(Job("f", other), [third])[1] == third[1]
    assert store.make_payload(Job("g", data), [third])[1] != first[1]
    assert len(put) == 3


def test_a_job_gets_its_data_back(monkeypatch):
    data = tiny_federation()
    monkeypatch.setattr("ray.get", lambda ref: ref)
    messages = do_job(Job("data"), refs=[packing.pack(data)])
    assert messages[-1] == ("done", data.population)


@pytest.mark.parametrize(
    ("error", "over"),
    [(None, False), (ProcessLookupError, True), (PermissionError, False), (ValueError, False)],
)
def test_a_process_is_over_only_when_the_system_says_so(monkeypatch, error, over):
    def kill(process: int, signal: int) -> None:
        assert (process, signal) == (os.getpid(), 0)
        if error is not None:
            raise error(errno.EPERM, "no")

    monkeypatch.setattr(slurm.os, "kill", kill)
    assert slurm.is_over(f"local:{os.getpid()}") is over


def test_an_id_that_is_no_number_is_of_no_process_that_has_ended():
    assert slurm.is_over("local:x") is False


def test_an_error_that_is_not_made_of_texts_stays_as_it_is():
    class Numbered(ConfigError):
        def __init__(self, number: int) -> None:
            super().__init__(number)

    @dataclass(frozen=True)
    class Refusing(Work):
        def __call__(self, job: Job, emit: Any) -> Any:
            raise Numbered(7)

    common = packing.pack(Refusing(Path())), {}, [], 1.0
    ((kind, error),) = [
        one
        for batch in runs.run_job(common, (packing.pack(Job("a")), []), {}, "/home/run")
        for one in batch
    ]
    assert (kind, error.args) == ("failed", (7,))
