"""Jobs over processes: results do not depend on how many, and errors stop everybody."""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import warnings
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from tests.selection import first_only

from coterie.errors import ConfigError, DiskFull
from coterie.simulation import workers
from coterie.simulation.workers import (
    WorkerDied,
    _receive_message,
    _serve_jobs,
    _start_worker,
    _Worker,
    count_cores,
    default_workers,
    end_unguarded_import,
    fan_out,
    use_one_thread,
)


def square(job, emit):
    emit(f"doing {job}")
    return job * job, os.getpid(), torch.get_num_threads()


def refuse_three(job, emit):
    if job == 3:
        raise ConfigError("three is refused")
    time.sleep(0.1)  # else all others might be done before the second worker has started
    return job


def fill_the_disk(job, emit):
    raise OSError(28, "No space left on device", "somewhere")


def warn(job, emit):
    warnings.warn(f"one of job {job}", stacklevel=2)


def lack_memory(job, emit):
    raise MemoryError


def fill_row(job, emit):
    row, table = job
    table[row] = row + 1


def die(job, emit):
    os.kill(os.getpid(), signal.SIGKILL)


def test_one_worker_works_in_this_process_in_order_with_one_thread():
    heard: list[object] = []
    done = list(fan_out(square, [1, 2, 3], 1, heard.append))
    assert [(job, result[0]) for job, result in done] == [(1, 1), (2, 4), (3, 9)]
    assert {result[1:] for _, result in done} == {(os.getpid(), 1)}
    assert heard == ["doing 1", "doing 2", "doing 3"]


def test_runs_on_a_device_are_done_by_one_process_unless_somebody_says_otherwise():
    """Its memory is one: two runs at once would each plan with all of it."""
    assert (default_workers("cpu"), default_workers("cuda"), default_workers("cuda:1")) == (
        count_cores(),
        1,
        1,
    )


def make_worker() -> tuple[Any, Any]:
    """Return a worker that does job 1, and its end of the connection; there is no process."""
    ours, theirs = multiprocessing.Pipe()
    process = mock.Mock(spec=BaseProcess, exitcode=-9)
    return _Worker(process, ours, 1), theirs


def receive(*messages, waiting=()):
    """Receive messages of a worker; return the results, what was emitted, its next job, and what it was sent."""
    worker, theirs = make_worker()
    found, heard = [], []
    for message in messages:
        theirs.send(message)
        found += _receive_message(worker, iter(waiting), heard.append)
    return found, heard, worker.job, theirs.recv() if theirs.poll() else None


def test_each_kind_of_message_of_a_worker_is_received():
    """Progress is passed on and a warning given; only the answer ends the job, and the next is sent."""
    with pytest.warns(UserWarning, match="too large") as said:
        found = receive(("progress", "round 1"), ("warning", UserWarning("too large")), waiting=[2])
    assert (found, len(said)) == (([], ["round 1"], 1, None), 1)
    assert receive(("done", "answer"), waiting=[2, 3]) == ([(1, "answer")], [], 2, 2)
    assert receive(("done", "answer")) == ([(1, "answer")], [], None, None)


def test_an_error_of_a_worker_ends_its_job_and_its_silence_is_named():
    worker, theirs = make_worker()
    theirs.send(("failed", ConfigError("no such data")))
    with pytest.raises(ConfigError, match="no such data"):
        list(_receive_message(worker, iter([2]), print))
    assert (worker.job, theirs.poll()) == (None, False)
    worker.job = 1
    theirs.close()
    with pytest.raises(WorkerDied, match="the worker of 1 ended with status -9; resume goes on"):
        list(_receive_message(worker, iter([2]), print))


@pytest.mark.slow
def test_two_workers_do_every_job_once_and_report():
    heard: list[object] = []
    done = list(fan_out(square, [1, 2, 3], 2, heard.append))
    assert sorted((job, result[0]) for job, result in done) == [(1, 1), (2, 4), (3, 9)]
    assert os.getpid() not in {result[1] for _, result in done}
    assert {result[2] for _, result in done} == {1}
    assert sorted(map(str, heard)) == ["doing 1", "doing 2", "doing 3"]


@pytest.mark.slow
def test_a_warning_of_a_worker_is_given_here():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert len(list(fan_out(warn, [1, 2], 2, print))) == 2
    assert sorted(str(one.message) for one in said) == ["one of job 1", "one of job 2"]


@pytest.mark.slow
def test_the_end_of_memory_in_a_worker_reaches_the_caller():
    with pytest.raises(MemoryError):
        list(fan_out(lack_memory, [1, 2], 2, print))


@pytest.mark.slow
def test_tensors_of_a_job_are_shared_with_the_workers_not_copied():
    """What a worker writes into the tensor of a job is seen here."""
    table = torch.zeros(2, 3)
    done = list(fan_out(fill_row, [(0, table), (1, table)], 2, print))
    assert len(done) == 2
    assert table.tolist() == [[1.0] * 3, [2.0] * 3]


@pytest.mark.slow
def test_a_job_is_taken_when_a_worker_is_free():
    """At most one a worker, and no job after an error."""
    taken: list[int] = []

    def jobs():
        for number in range(1, 1000):
            taken.append(number)
            yield number

    with pytest.raises(ConfigError, match="three is refused"):
        list(fan_out(refuse_three, jobs(), 2, print))
    assert len(taken) < 999


@pytest.mark.full
@pytest.mark.parametrize("workers", first_only([1, 2], slow=True))
def test_an_error_of_a_job_arrives_as_itself(workers):
    with pytest.raises(ConfigError, match="three is refused"):
        list(fan_out(refuse_three, [1, 2, 3, 4], workers, print))


@pytest.mark.slow
def test_an_error_of_the_disk_arrives_with_its_number():
    with pytest.raises(OSError, match="No space left") as caught:
        list(fan_out(fill_the_disk, [1, 2], 2, print))
    assert caught.value.errno == 28


@pytest.mark.slow
def test_a_worker_that_is_killed_is_noticed():
    with pytest.raises(WorkerDied, match="ended with status -9"):
        list(fan_out(die, [1, 2], 2, print))


def test_there_is_at_least_one_core():
    assert 1 <= count_cores() <= (os.cpu_count() or 1)


SLOW_TO_IMPORT = """
import os, pathlib, sys, time

if __name__ != "__main__":  # a worker imports this file first
    pathlib.Path(f"importing-{os.getpid()}").touch()
    time.sleep(60)

from coterie.simulation.workers import fan_out

def work(job, emit):
    return job

if __name__ == "__main__":
    try:
        list(fan_out(work, [1, 2], 2, print))
    except KeyboardInterrupt:
        sys.exit("stopped")
"""


@pytest.mark.full
def test_ctrl_c_while_workers_import_is_heard_by_the_main_process_alone(tmp_path):
    """Two workers are in the middle of an import when the signal reaches them: they go on until their parent says."""
    (tmp_path / "slow.py").write_text(SLOW_TO_IMPORT)
    process = subprocess.Popen(
        [sys.executable, "slow.py"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        until = time.monotonic() + 60
        while len(started := list(tmp_path.glob("importing-*"))) < 2:
            assert time.monotonic() < until
            time.sleep(0.05)
        for one in started:
            os.kill(int(one.name.removeprefix("importing-")), signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        os.kill(process.pid, signal.SIGINT)
        said = process.communicate(timeout=30)[1]
    finally:
        process.kill()
    assert said == "stopped\n"


PROGRAM = """
from coterie.simulation.workers import fan_out

def double(job, emit):
    return 2 * job

WORK
"""
START = "print([two for _, two in fan_out(double, range(2), 2, print)])"


def run_program(words, work, folder):
    """Run a program that starts workers; return its last line on standard error."""
    text = PROGRAM.replace("WORK", work)
    file = folder / "program.py"
    file.write_text(text)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, *(str(file) if word == "FILE" else word for word in words)],
        input=text, capture_output=True, text=True, check=False, env=environment, timeout=120,
    )  # fmt: skip
    # The workers write no traces of their own: the one at most is that of the program.
    assert done.stderr.count("Traceback") <= 1
    return done.stderr.strip().rpartition("\n")[2]


@pytest.mark.full
@pytest.mark.parametrize(
    ("words", "work", "line"),
    first_only(
        [
            (["FILE"], START, 'put that below `if __name__ == "__main__":`, or set workers = 1'),
            (
                ["-"],
                START,
                "the program was read from <stdin>, where worker processes cannot import",
            ),
            (["-c", PROGRAM.replace("WORK", START)], START, "Can't get attribute 'double' on"),
        ],
        slow=True,
    ),
    ids=["no guard", "standard input", "the command line"],
)
def test_a_program_that_workers_cannot_import_is_told_what_to_do(tmp_path, words, work, line):
    said = run_program(words, work, tmp_path)
    assert said.startswith("coterie.errors.ConfigError: ")
    assert line in said
    assert "workers = 1" in said


def make_local():
    def work(job, emit):
        return job

    return work


@pytest.mark.parametrize(
    "work", [lambda job, emit: job, make_local()], ids=["a lambda", "of a function"]
)
def test_work_that_no_other_process_can_have_is_told_what_to_do(work):
    with pytest.raises(ConfigError, match=r"cannot receive this study: Can't pickle .*workers = 1"):
        list(fan_out(work, range(3), 2, print))
    assert [two for _, two in fan_out(work, range(3), 1, print)] == [0, 1, 2]


@pytest.mark.slow
def test_a_job_that_no_other_process_can_have_ends_all_workers():
    jobs = iter([1, 2, lambda: 3])
    with pytest.raises(ConfigError, match="cannot receive this study"):
        list(fan_out(refuse_three, jobs, 2, print))


# ---------------------------------------------------------------- workers that are threads of this process


@pytest.fixture
def quiet(monkeypatch):
    """What a worker sets in its process: the signals that it ignores and the threads that it uses."""
    told = SimpleNamespace(signals=[], torch=[], engine=[])
    monkeypatch.setattr(workers, "signal", SimpleNamespace(
        signal=lambda *given: told.signals.append(given), SIGINT=signal.SIGINT, SIG_IGN=signal.SIG_IGN,
    ))  # fmt: skip
    monkeypatch.setattr(torch, "set_num_threads", told.torch.append)
    monkeypatch.setattr(workers, "use_threads", told.engine.append)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    return told


def serve(work, *jobs):
    """Return the messages of a worker that is sent this work and these jobs."""
    ours, theirs = multiprocessing.Pipe()
    for value in (work, *jobs):
        ours.send(value)
    thread = threading.Thread(target=_serve_jobs, args=(theirs, 3))
    thread.start()
    messages = []
    while len([kind for kind, _ in messages if kind in ("done", "failed")]) < max(1, len(jobs)):
        messages.append(ours.recv())
    ours.close()
    thread.join(60)
    assert not thread.is_alive(), "a closed connection ends it"
    return messages


def test_a_worker_answers_each_job_and_ignores_the_interrupt_of_its_group(quiet):
    found = serve(square, 2, 3)
    assert [(kind, value if kind == "progress" else value[0]) for kind, value in found] == [
        ("progress", "doing 2"), ("done", 4), ("progress", "doing 3"), ("done", 9),
    ]  # fmt: skip
    assert quiet.signals == [(signal.SIGINT, signal.SIG_IGN)]
    assert (quiet.torch, quiet.engine) == ([1], [3])


def raise_disk_of_a_library(job, emit):
    raise RuntimeError("write failed: No space left on device")


@pytest.mark.parametrize(
    ("work", "kind", "words"),
    [
        (refuse_three, ConfigError, "three is refused"),
        (fill_the_disk, OSError, "No space left"),
        (lack_memory, MemoryError, ""),
        (raise_disk_of_a_library, DiskFull, "No space left"),
    ],
)
def test_an_error_of_a_job_is_an_answer_of_its_worker(quiet, work, kind, words):
    ((state, error),) = serve(work, 3)
    assert (state, isinstance(error, kind)) == ("failed", True)
    assert words in str(error)


def test_a_warning_of_a_job_is_a_message(quiet):
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        (kind, warning), (last, _) = serve(warn, 7)
    assert (kind, str(warning), last) == ("warning", "one of job 7", "done")


class Unreadable:
    """Work of a module that a worker does not find."""

    def __reduce__(self):
        return pickle.loads, (b"cnowhere_at_all\nwork\n.",)


def test_work_that_a_worker_cannot_import_is_said_in_one_line(quiet):
    ((kind, error),) = serve(Unreadable())
    assert kind == "failed"
    assert str(error).startswith("worker processes cannot receive this study: No module named")
    assert "set workers = 1" in str(error)


@pytest.fixture
def crew(monkeypatch, quiet):
    """Workers that are threads; what was asked for and what became of each."""
    made = []

    class Threads:
        Pipe = staticmethod(multiprocessing.Pipe)

        @staticmethod
        def Process(target, args, name, daemon):  # noqa: N802: the name of the library
            # As with a process, this end has a copy of its own there.
            theirs, threads = args
            copy = multiprocessing.connection.Connection(os.dup(theirs.fileno()))
            thread = threading.Thread(target=target, args=(copy, threads), daemon=True)
            one = mock.Mock(spec=BaseProcess, exitcode=-9)
            one.did, one.threads, one.daemon, one.name = [], threads, daemon, name
            one.start.side_effect = thread.start

            def join() -> None:
                # A real one that waits for its next job would be waited for without end.
                thread.join(0.0 if one.did else 10)
                one.did.append("joined" if one.did or not thread.is_alive() else "never ends")

            one.join.side_effect = join
            one.terminate.side_effect = lambda: one.did.append("terminated")
            made.append(one)
            return one

    monkeypatch.setattr(workers.multiprocessing, "get_context", lambda how: {"spawn": Threads}[how])
    monkeypatch.setattr(workers, "count_cores", lambda: 7)
    return made


def test_jobs_go_to_workers_as_they_become_free(crew):
    heard: list[object] = []
    done = dict(fan_out(square, iter(range(5)), 2, heard.append))
    assert {job: value[0] for job, value in done.items()} == {0: 0, 1: 1, 2: 4, 3: 9, 4: 16}
    assert sorted(map(str, heard)) == [f"doing {job}" for job in range(5)]
    assert [one.threads for one in crew] == [3, 3], "the cores are divided"
    assert {(one.name, one.daemon) for one in crew} == {("coterie-worker", True)}
    assert [one.did for one in crew] == [["joined"]] * 2, "a closed connection ends them"


@pytest.mark.parametrize(
    ("jobs", "workers_", "started"), [(2, 8, 2), (3, 3, 3), (1, 8, 0), (4, 0, 0)]
)
def test_no_more_workers_are_started_than_there_are_jobs(crew, jobs, workers_, started):
    assert len(list(fan_out(square, range(jobs), workers_, print))) == jobs
    assert len(crew) == started


def test_the_workers_that_work_are_stopped_by_the_error_of_one(crew):
    with pytest.raises(ConfigError, match="three is refused"):
        list(fan_out(refuse_three, [3, 1, 2, 3], 2, print))
    assert [one.did[-1] for one in crew] == ["joined"] * 2
    # The one that failed has no job and ends by itself.
    assert crew[0].did == ["joined"]


def test_a_worker_is_sent_its_work_and_its_first_job(crew):
    worker = _start_worker(square, 5, 2)
    assert worker.job == 5
    assert worker.connection.recv() == ("progress", "doing 5")
    assert worker.connection.recv()[1][0] == 25
    worker.connection.close()


def test_a_job_that_cannot_be_sent_ends_its_worker(crew):
    with pytest.raises(ConfigError, match="worker processes cannot receive this study"):
        _start_worker(square, lambda: 1, 2)
    assert crew[0].did == ["terminated", "joined"]


def test_a_worker_that_died_before_it_was_sent_its_job_is_noticed_at_its_answer():
    worker, theirs = make_worker()
    theirs.close()
    workers._send(worker, 1)
    with pytest.raises(WorkerDied, match="the worker of 1 ended with status -9"):
        list(_receive_message(worker, iter([]), print))


def test_a_worker_that_would_start_the_study_again_says_what_to_write():
    worker, theirs = make_worker()
    worker.process.exitcode = workers._UNGUARDED
    theirs.close()
    with pytest.raises(ConfigError, match=r'put that below `if __name__ == "__main__":`, or set'):
        list(_receive_message(worker, iter([]), print))
    worker.process.join.assert_called_once()


@pytest.mark.parametrize(
    ("name", "importing", "ends"),
    [
        ("coterie-worker", True, True),
        ("coterie-worker", False, False),
        ("MainProcess", True, False),
    ],
)
def test_a_worker_that_is_still_importing_starts_no_study(monkeypatch, name, importing, ends):
    ended: list[int] = []
    process = SimpleNamespace(name=name, _inheriting=importing)
    monkeypatch.setattr(workers.multiprocessing, "current_process", lambda: process)
    monkeypatch.setattr(os, "_exit", ended.append)
    end_unguarded_import()
    assert ended == [86] * ends


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ({"__file__": "<stdin>", "__spec__": None}, True),
        ({"__file__": __file__, "__spec__": None}, False),
        ({"__spec__": None}, False),  # an interactive program
        ({"__file__": "<stdin>", "__spec__": object()}, False),  # `python -m`
    ],
)
def test_a_program_of_which_there_is_no_file_has_no_workers(monkeypatch, given, refused):
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(**given))
    if not refused:
        workers._check_main_program()
        return
    with pytest.raises(ConfigError, match="the program was read from <stdin>, where worker"):
        workers._check_main_program()


def test_a_program_of_which_there_is_no_file_is_refused_before_a_worker_starts(crew, monkeypatch):
    """One job alone is done by the program itself."""
    program = SimpleNamespace(__file__="<stdin>", __spec__=None)
    monkeypatch.setitem(sys.modules, "__main__", program)
    with pytest.raises(ConfigError, match="the program was read from <stdin>, where worker"):
        list(fan_out(square, [1, 2], 2, print))
    assert crew == []
    assert [job for job, _ in fan_out(square, [1], 2, print)] == [1]


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="signals of a thread")
def test_an_interrupt_is_held_back_while_a_worker_starts_and_comes_after(monkeypatch):
    monkeypatch.setattr(workers.resource_tracker, "ensure_running", lambda: steps.append("tracker"))
    steps: list[object] = []
    with workers._block_interrupts():
        steps.append(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))
    steps.append(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))
    assert steps == ["tracker", True, False], "a tracker that starts later would unblock it"


def test_threads_are_put_back_after_an_error(monkeypatch):
    used = []
    monkeypatch.setattr(workers, "use_threads", used.append)
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        with use_one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == before + 1
        with pytest.raises(KeyError), use_one_thread():
            raise KeyError
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)
    assert used == [0, 0], "0: the engine decides again"


def test_one_worker_gives_the_engine_all_cores(monkeypatch):
    used = []
    monkeypatch.setattr(workers, "use_threads", used.append)
    monkeypatch.setattr(workers, "count_cores", lambda: 7)
    assert [one for one, _ in fan_out(square, [1, 2], 1, print)] == [1, 2]
    assert used == [7, 0]


@pytest.mark.parametrize(("allowed", "count"), [({0, 3, 5}, 3), (None, 6)])
def test_the_cores_are_those_that_this_process_may_use(monkeypatch, allowed, count):
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    if allowed is None:
        monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    else:
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: allowed, raising=False)
    assert count_cores() == count
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert count_cores() == (1 if allowed is None else 3)
