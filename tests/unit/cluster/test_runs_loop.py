"""What a fan-out over Ray does with the messages of its tasks: in this process, with pretended tasks."""

import math
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coterie._util.claims import claim_folder, find_owner
from coterie.cluster import folders, packing, runs
from coterie.cluster.runs import RayRuns
from coterie.errors import ConfigError
from coterie.methods import Local
from coterie.simulation.workers import WorkerDied
from coterie.studies.run import FAILURE_FILE

ray = pytest.importorskip("ray")
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
]


@dataclass(frozen=True)
class Work:
    """Work whose jobs write folders."""

    folder: Path

    def job_folder(self, job: str) -> Path:
        return self.folder / job

    def relocate(self, folder: Path) -> "Work":
        return replace(self, folder=folder)

    def __call__(self, job: str, emit: Any) -> str:
        return job


@dataclass
class Pretended:
    """Tasks that answer what a test says, one batch of messages for each start.

    Args:
        answer: the messages of a start, by the number of starts of its job before.
    """

    answer: Callable[[str, int], list[tuple[str, Any]]]
    started: list[tuple[int, str, dict[str, bytes], str]] = field(default_factory=list)
    most: int = 0
    stopped: int = 0
    left: dict[int, str] = field(default_factory=dict)

    def start(self, number: int, common: Any, payload: Any, there: Any, home: str) -> None:
        job = packing.unpack(payload[0])
        assert not [one for one in self.started if one[0] == number], "a number is used once"
        self.left[number] = job
        self.most = max(self.most, len(self.left))
        self.started.append((number, job, dict(there), home))

    def wait(self, seconds: float) -> list[tuple[int, str, Any]]:
        assert seconds > 0
        number, job = next(iter(self.left.items()))
        before = sum(one[1] == job for one in self.started) - 1
        messages = self.answer(job, before)
        if messages[-1][0] in ("done", "failed", "lost"):
            del self.left[number]
        return [(number, kind, value) for kind, value in messages]

    def stop(self) -> None:
        self.stopped += 1


@pytest.fixture
def fan_out(monkeypatch):
    """Run jobs over pretended tasks; return the results, what was emitted, and the tasks."""

    def run(answer, jobs, work=print, *, workers=8, has=None, retries=3, heard=None, over=None):
        tasks = Pretended(answer)
        monkeypatch.setattr(runs, "_make_tasks", lambda ray, cpus, gpus: tasks)
        monkeypatch.setattr(runs, "_put_object", lambda value: value)
        monkeypatch.setattr(ray, "cluster_resources", lambda: has or {"CPU": 2.0})
        over = RayRuns(retries=retries) if over is None else over
        heard = [] if heard is None else heard
        return over(work, jobs, workers, heard.append), heard, tasks

    return run


def done(job, before):
    return [("progress", f"{job} works"), ("done", job.upper())]


def test_each_job_gives_its_result_and_what_it_emits(fan_out):
    found, heard, tasks = fan_out(done, iter("abc"))
    assert list(found) == [("a", "A"), ("b", "B"), ("c", "C")]
    assert heard == ["a works", "b works", "c works"]
    assert [one[1:] for one in tasks.started] == [(job, {}, "") for job in "abc"]
    assert tasks.stopped == 1


@pytest.mark.parametrize(
    ("workers", "cpus", "most"),
    [(8, 2.0, 4), (8, 1.0, 3), (3, 2.0, 3), (1, 4.0, 1)],
    ids=["two more than fit", "one fits", "fewer are wanted", "one at a time"],
)
def test_no_more_jobs_are_under_way_than_fit_and_two(fan_out, workers, cpus, most):
    found, _, tasks = fan_out(done, iter("abcdefgh"), workers=workers, has={"CPU": cpus})
    assert [job for job, _ in found] == list("abcdefgh")
    assert tasks.most == most


def test_the_room_is_counted_again_while_jobs_are_under_way(fan_out, monkeypatch):
    """Machines join: the first count has room for one, the later ones for four."""
    clock = iter(range(100, 10_000, 10))
    monkeypatch.setattr(runs.time, "monotonic", lambda: next(clock))
    rooms = iter([1.0] + [4.0] * 50)
    found, _, tasks = fan_out(done, iter("abcdefgh"))
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": next(rooms)})
    assert len(list(found)) == 8
    assert tasks.most == 6


def test_a_job_is_taken_from_the_source_only_when_there_is_room(fan_out):
    taken = []

    def source():
        for job in "abcdef":
            taken.append(job)
            yield job

    found, _, _ = fan_out(done, source(), workers=2)
    assert next(found) == ("a", "A")
    assert taken == ["a", "b"]


def test_a_warning_of_a_task_is_given_here(fan_out):
    found, _, _ = fan_out(lambda *_: [("warning", UserWarning("odd")), ("done", 1)], ["a"])
    with pytest.warns(UserWarning, match="^odd$"):
        assert list(found) == [("a", 1)]


def test_a_lost_run_starts_again_from_what_came_home(fan_out, tmp_path):
    """Its folder is claimed all the time, and its earlier failure is forgotten."""
    claimed = []

    def answer(job, before):
        claimed.append(bool(find_owner(tmp_path / job)))
        if before:
            return [("done", True)]
        text = {"checkpoint.safetensors": b"half"}
        return [("files", folders.FolderUpdate(text, {})), ("lost", "its worker died")]

    (tmp_path / "a").mkdir()
    (tmp_path / "a" / FAILURE_FILE).write_text("of yesterday")
    over = RayRuns()
    found, _, tasks = fan_out(answer, ["a"], Work(tmp_path), over=over)
    with pytest.warns(UserWarning, match="^a: its worker died; try 2 goes on where it was$"):
        assert list(found) == [("a", True)]
    (first, *_), (second, _, there, home) = tasks.started
    assert first != second, "late messages of the lost task must not count"
    assert there["checkpoint.safetensors"] == b"half"
    assert home == str(tmp_path / "a")
    assert claimed == [True, True]
    assert not find_owner(tmp_path / "a")
    assert not (tmp_path / "a" / FAILURE_FILE).exists()
    assert (tmp_path / "a" / "checkpoint.safetensors").read_bytes() == b"half"
    # What came home is four bytes; what went out again is that, and the manifest.
    went = sum(map(len, folders.load_files(tmp_path / "a").values()))
    assert (over.sent.home, over.sent.lost) == (4, 1)
    packed = packing.pack(Work(tmp_path)).nbytes
    assert over.sent.data == packed + went


@pytest.mark.parametrize("retries", [0, 2])
def test_a_run_that_is_always_lost_is_given_up(fan_out, tmp_path, retries):
    found, _, tasks = fan_out(
        lambda *_: [("lost", "its machine is gone")], ["a"], Work(tmp_path), retries=retries
    )
    with (
        pytest.warns(UserWarning, match="goes on where it was") if retries else ExitStack(),
        pytest.raises(
            WorkerDied, match=rf"^a: its machine is gone, {retries + 1} times; resume goes on$"
        ),
    ):
        list(found)
    assert len(tasks.started) == retries + 1
    assert "its machine is gone" in (tmp_path / "a" / FAILURE_FILE).read_text()
    assert tasks.stopped == 1
    assert not find_owner(tmp_path / "a")


def test_the_end_of_memory_is_tried_again_and_is_itself_in_the_end(fan_out, tmp_path):
    error = MemoryError("full")
    found, _, tasks = fan_out(lambda *_: [("failed", error)], ["a"], Work(tmp_path), retries=1)
    with (
        pytest.warns(UserWarning, match="a: its machine has no more memory; try 2 goes on"),
        pytest.raises(MemoryError) as caught,
    ):
        list(found)
    assert caught.value is error
    assert len(tasks.started) == 2
    assert (tmp_path / "a" / FAILURE_FILE).read_text() == "full"


def test_the_error_of_a_job_is_raised_at_once_and_written_down(fan_out, tmp_path):
    def answer(job, before):
        return [("failed", ConfigError("no such model"))] if job == "b" else done(job, before)

    found, _, tasks = fan_out(answer, ["a", "b", "c", "d"], Work(tmp_path))
    assert next(found) == ("a", "A")
    with pytest.raises(ConfigError, match=r"^no such model$"):
        list(found)
    assert (tmp_path / "b" / FAILURE_FILE).read_text() == "no such model"
    assert tasks.stopped == 1
    assert sorted(tasks.left.values()) == ["c", "d"], "they were under way"
    for job in "bcd":
        assert not find_owner(tmp_path / job)


def test_a_job_whose_folder_another_has_is_left_to_it(fan_out, tmp_path):
    stop, there = threading.Event(), threading.Event()

    def hold():
        with claim_folder(tmp_path / "a"):
            there.set()
            stop.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    there.wait(60)
    try:
        found, _, tasks = fan_out(done, ["a", "b"], Work(tmp_path))
        assert list(found) == [("a", False), ("b", "B")]
        assert [one[1] for one in tasks.started] == ["b"]
    finally:
        stop.set()
        holder.join()


@pytest.mark.parametrize("error", [ConnectionError("gone\nfar"), ray.exceptions.RayError("gone")])
def test_a_lost_connection_is_one_line(fan_out, error):
    def answer(job, before):
        raise error

    found, _, tasks = fan_out(answer, ["a"])
    with pytest.raises(
        WorkerDied, match=r"^the connection to Ray is lost: .*gone.*; resume"
    ) as told:
        list(found)
    assert "\n" not in str(told.value)
    assert tasks.stopped == 1


def test_files_of_a_job_without_a_folder_go_nowhere(fan_out):
    update = folders.FolderUpdate({"x": b"12345"}, {})
    over = RayRuns()
    found, _, _ = fan_out(lambda *_: [("files", update), ("done", 1)], ["a"], over=over)
    assert list(found) == [("a", 1)]
    assert over.sent.home == 5


# ---------------------------------------------------------------- messages of Ray's tasks


class Stream:
    """What Ray gives for a task: batches of messages, or errors, in their order."""

    def __init__(self, *batches: Any) -> None:
        self.batches = list(batches)

    def __next__(self) -> Any:
        if not self.batches:
            raise StopIteration
        return self.batches.pop(0)


@pytest.fixture
def tasks(monkeypatch):
    """`Tasks` over a pretended Ray, whose streams a test puts in; and what Ray was asked for."""
    asked: dict[str, Any] = {"cancelled": []}

    def remote(**options):
        asked["options"] = options
        return lambda function: SimpleNamespace(remote=lambda stream: stream)

    def wait(streams, *, num_returns, timeout, fetch_local):
        asked["wait"] = (num_returns, timeout, fetch_local)
        return streams[:1], streams[1:]

    def get(value):
        if isinstance(value, Exception):
            raise value
        return value

    def cancel(stream, force):
        asked["cancelled"].append((stream, force))
        raise RuntimeError("the connection is gone")

    for name, fake in (("remote", remote), ("wait", wait), ("get", get), ("cancel", cancel)):
        monkeypatch.setattr(ray, name, fake)
    made = runs.Tasks(2.0, 0.5)
    return made, asked


def test_a_task_asks_for_its_processors_and_is_never_retried_by_ray(tasks):
    """Ray would begin at the start of the run, not at its last checkpoint."""
    _, asked = tasks
    assert asked["options"] == {
        "num_cpus": 2.0,
        "num_gpus": 0.5,
        "max_retries": 0,
        "num_returns": "streaming",
    }


def test_messages_come_with_the_number_of_their_task_until_its_last(tasks):
    made, asked = tasks
    made.start(7, Stream([("progress", 1), ("progress", 2)], [("files", 3)], [("done", 4)]))
    assert made.wait(1.5) == [(7, "progress", 1), (7, "progress", 2)]
    assert asked["wait"] == (1, 1.5, False)
    assert made.wait(1.0) == [(7, "files", 3)]
    assert made.wait(1.0) == [(7, "done", 4)]
    assert made.wait(1.0) == [], "nothing comes after the last"


@pytest.mark.parametrize(
    ("batches", "kind", "words"),
    [
        ([], "lost", "its worker ended without a result"),
        ([ray.exceptions.NodeDiedError("x")], "lost", "its machine is gone"),
        ([ray.exceptions.WorkerCrashedError()], "lost", "its worker died"),
        ([ray.exceptions.OutOfMemoryError("x")], "lost", "had no more memory"),
        ([ray.exceptions.RayError("x")], "lost", "its worker is gone (RayError)"),
        (
            [ray.exceptions.RayTaskError("f", "trace", KeyError("of\nnobody"))],
            "failed",
            "a worker failed: 'of",
        ),
    ],
)
def test_the_end_of_a_worker_is_said_in_words_and_ends_its_task(tasks, batches, kind, words):
    made, _ = tasks
    made.start(3, Stream(*batches))
    ((number, found, value),) = made.wait(1.0)
    assert (number, found) == (3, kind)
    assert words in str(value)
    assert "\n" not in str(value)
    assert made.wait(1.0) == []


def test_tasks_under_way_are_ended_by_force_even_where_ray_is_gone(tasks):
    made, asked = tasks
    one, two = Stream([("progress", 1)]), Stream([("progress", 2)])
    made.start(1, one)
    made.start(2, two)
    made.stop()
    assert asked["cancelled"] == [(one, True), (two, True)]
    assert made.wait(1.0) == []


@pytest.mark.parametrize(("connected", "kind"), [(False, runs.Tasks), (True, runs._Relay)])
def test_a_process_outside_of_the_cluster_has_an_actor_there(tasks, monkeypatch, connected, kind):
    monkeypatch.setattr(ray.util.client.ray, "is_connected", lambda: connected)
    if connected:
        actor = SimpleNamespace(remote=lambda cpus, gpus: (cpus, gpus))
        monkeypatch.setattr(ray, "remote", lambda num_cpus: lambda one: actor)
    assert type(runs._make_tasks(ray, 1.0, 0.0)) is kind


def test_a_relay_passes_calls_on_and_keeps_references_as_they_are():
    """Ray would replace a reference by its object; inside a list it is passed on."""

    class ObjectRef:
        pass

    asked: list[Any] = []

    class Far:
        def __getattr__(self, name):
            return SimpleNamespace(remote=lambda *given: (name, given))

    def get(call, timeout=None):
        asked.append((*call, timeout))
        return [(4, "done", 1)]

    def options(num_cpus):
        assert num_cpus == 0, "it takes no processor from a run"
        return lambda one: SimpleNamespace(remote=lambda cpus, gpus: Far())

    killed = []
    relay = runs._Relay(SimpleNamespace(remote=options, get=get, kill=killed.append), 1.0, 0.0)
    reference = ObjectRef()
    relay.start(4, reference, {"a": b"1"}, "home")
    assert relay.wait(2.0) == [(4, "done", 1)]
    relay.stop()
    assert asked[0] == ("start", (4, [reference], {"a": b"1"}, "home"), None)
    assert asked[1] == ("wait", (2.0,), None)
    assert (asked[2][0], math.isfinite(asked[2][2])) == ("stop", True)
    assert len(killed) == 1


def test_a_full_store_and_a_lost_ray_are_one_line(monkeypatch):
    def full(value):
        raise ray.exceptions.ObjectStoreFullError("no space\nis left")

    monkeypatch.setattr(ray, "put", full)
    with pytest.raises(WorkerDied, match=r"^Ray does not take .* no space.*; resume goes on$"):
        runs._put_object(1)
    monkeypatch.setattr(ray, "put", lambda value: ("reference", value))
    assert runs._put_object(1) == ("reference", 1)


# ---------------------------------------------------------------- what goes along


def test_the_modules_of_settings_functions_and_classes_go_along():
    from coterie.studies import config

    text = """
    name = "s"
    model = { kind = "lab.nets:Small" }
    data = { dataset = "digits" }
    loss = "lab.losses:focal"
    methods = [{ kind = "local" }]
    """
    study = config.parse_study_text(text)
    named = runs._find_modules(
        SimpleNamespace(inputs=SimpleNamespace(model=Local), studies={"": study}, rule=Local)
    )
    assert {"lab.nets", "lab.losses", "coterie.methods.local"} <= named
    assert runs._find_modules(print) == set()


def test_numbers_of_what_was_sent_add_up():
    over = RayRuns()
    over._add_sent(data=3)
    over._add_sent(home=4, lost=1)
    over._add_sent(data=2)
    assert over.sent == runs.SentBytes(data=5, home=4, lost=1)
