"""Jobs over processes: results do not depend on how many, and errors stop everybody."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings
from multiprocessing.process import BaseProcess
from typing import Any
from unittest import mock

import pytest
import torch

from coterie.errors import ConfigError
from coterie.simulation.workers import (
    WorkerDied,
    _receive_message,
    _Worker,
    count_cores,
    default_workers,
    fan_out,
)


def square(job, emit):
    emit(f"doing {job}")
    return job * job, os.getpid(), torch.get_num_threads()


def refuse_three(job, emit):
    if job == 3:
        raise ConfigError("three is refused")
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


@pytest.mark.full
def test_two_workers_do_every_job_once_and_report():
    heard: list[object] = []
    done = list(fan_out(square, [1, 2, 3], 2, heard.append))
    assert sorted((job, result[0]) for job, result in done) == [(1, 1), (2, 4), (3, 9)]
    assert os.getpid() not in {result[1] for _, result in done}
    assert {result[2] for _, result in done} == {1}
    assert sorted(map(str, heard)) == ["doing 1", "doing 2", "doing 3"]


@pytest.mark.full
def test_a_warning_of_a_worker_is_given_here():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert len(list(fan_out(warn, [1, 2], 2, print))) == 2
    assert sorted(str(one.message) for one in said) == ["one of job 1", "one of job 2"]


@pytest.mark.full
def test_the_end_of_memory_in_a_worker_reaches_the_caller():
    with pytest.raises(MemoryError):
        list(fan_out(lack_memory, [1, 2], 2, print))


@pytest.mark.full
def test_tensors_of_a_job_are_shared_with_the_workers_not_copied():
    """What a worker writes into the tensor of a job is seen here."""
    table = torch.zeros(2, 3)
    done = list(fan_out(fill_row, [(0, table), (1, table)], 2, print))
    assert len(done) == 2
    assert table.tolist() == [[1.0] * 3, [2.0] * 3]


@pytest.mark.full
def test_a_job_is_taken_when_a_worker_is_free():
    """At most one a worker, and no job after an error."""
    taken: list[int] = []

    def jobs():
        for number in range(1, 9):
            taken.append(number)
            yield number

    with pytest.raises(ConfigError, match="three is refused"):
        list(fan_out(refuse_three, jobs(), 2, print))
    assert len(taken) < 8


@pytest.mark.full
@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_of_a_job_arrives_as_itself(workers):
    with pytest.raises(ConfigError, match="three is refused"):
        list(fan_out(refuse_three, [1, 2, 3, 4], workers, print))


@pytest.mark.full
def test_an_error_of_the_disk_arrives_with_its_number():
    with pytest.raises(OSError, match="No space left") as caught:
        list(fan_out(fill_the_disk, [1, 2], 2, print))
    assert caught.value.errno == 28


@pytest.mark.full
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
    [
        (["FILE"], START, 'put that below `if __name__ == "__main__":`, or set workers = 1'),
        (["-"], START, "the program was read from <stdin>, where worker processes cannot import"),
        (["-c", PROGRAM.replace("WORK", START)], START, "Can't get attribute 'double' on"),
    ],
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


@pytest.mark.full
def test_a_job_that_no_other_process_can_have_ends_all_workers():
    jobs = iter([1, 2, lambda: 3])
    with pytest.raises(ConfigError, match="cannot receive this study"):
        list(fan_out(refuse_three, jobs, 2, print))
