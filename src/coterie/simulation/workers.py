"""Jobs over worker processes of one machine.

A job's result does not depend on the number of workers: PyTorch computes with one thread in every
process (native programs, whose results do not depend on the number of threads, use the remaining
cores), and jobs share nothing. When a worker dies, the others are stopped; the files they have
written stay, and their runs can be resumed.
"""

import multiprocessing
import os
import pickle
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import torch
import torch.multiprocessing  # tensors are sent through shared memory

from coterie.engine import use_threads
from coterie.errors import ConfigError, CoterieError, DiskFull, first_line

J = TypeVar("J")
R = TypeVar("R")
Emit = Callable[[object], None]
Work = Callable[[J, Emit], R]
# The name of worker processes, which they have while they import the program that started them.
_NAME = "coterie-worker"
# The exit status of a worker that was made to start a study; see `end_unguarded_import`.
_UNGUARDED = 86


@runtime_checkable
class FanOut(Protocol):
    """Runs jobs in place of `fan_out`, on a cluster (`coterie.cluster`)."""

    far: bool
    """Whether workers cannot read files of this machine: each job then carries its data."""

    def __call__(
        self, work: Work[J, R], jobs: Iterable[J], workers: int, emit: Emit
    ) -> Iterator[tuple[J, R]]:
        """Run every job and yield (job, result) as they finish; see `fan_out`."""
        ...


class WorkerDied(CoterieError, RuntimeError):
    """A worker process ended without a result: killed, out of memory, or by a printed error."""


@dataclass
class _Worker(Generic[J]):
    process: BaseProcess
    connection: Connection
    job: J | None = None


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    # Only the cores that this process may use, where the system says which.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def default_workers(device: str) -> int:
    """Return the default number of processes: one for each core, or one for a device's memory."""
    if device != "cpu":
        return 1
    return count_cores()


def fan_out(work: Work[J, R], jobs: Iterable[J], workers: int, emit: Emit) -> Iterator[tuple[J, R]]:
    """Run every job and yield (job, result) as they finish.

    Args:
        work: (job, emit) -> result; it must be picklable when there is more than one worker.
        jobs: the jobs; each worker takes the next one when it is free. Tensors of a job reach the
            worker through shared memory, not as copies.
        workers: number of processes; 1 runs the jobs in this process.
        emit: receives the values that jobs emit while they run.

    Raises:
        ConfigError: when workers cannot be started from this program, or cannot receive the work.
        CoterieError, OSError, MemoryError: the error of a job, after all workers have been stopped.
        WorkerDied: when a worker ended without a result.
    """
    end_unguarded_import()
    waiting = iter(jobs)
    # With one worker or one job, this process does the work: another one would only cost time.
    first = list(islice(waiting, max(1, workers)))
    if len(first) <= 1:
        with use_one_thread():
            use_threads(count_cores())
            for job in chain(first, waiting):
                yield job, work(job, emit)
        return
    _check_main_program()
    crew: list[_Worker[J]] = []
    try:
        for job in first:
            # The cores are divided, so that native programs do not compete for them.
            crew.append(_start_worker(work, job, max(1, count_cores() // len(first))))
        while busy := [w for w in crew if w.job is not None]:
            for ready in wait([w.connection for w in busy]):
                worker = next(w for w in busy if w.connection is ready)
                yield from _receive_message(worker, waiting, emit)
    finally:
        for worker in crew:
            # A closed connection ends a worker that waits for its next job; one that works is
            # terminated.
            worker.connection.close()
            if worker.job is not None:
                worker.process.terminate()
            worker.process.join()


@contextmanager
def use_one_thread() -> Iterator[None]:
    """Compute with one thread, so that sums are added in the same order everywhere."""
    # PyTorch divides sums among its threads, and the division changes their last bits.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        use_threads(0)


def _start_worker(work: Work[J, Any], job: J, threads: int) -> _Worker[J]:
    # "spawn": a fork would copy locks that other threads hold.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve_jobs, args=(theirs, threads), name=_NAME, daemon=True)
    with _block_interrupts():
        process.start()
    # Only the worker holds this end now, so its death shows as the end of the stream.
    theirs.close()
    worker: _Worker[J] = _Worker(process, ours, None)
    # The work is no argument of the process: what goes wrong there is a trace on the terminal.
    _send(worker, work)
    _send(worker, job)
    worker.job = job
    return worker


def _send(worker: _Worker[Any], value: object) -> None:
    """Send a value to a worker; one that has died is noticed when its answer is received.

    Raises:
        ConfigError: when the value has something that no other process can receive.
    """
    try:
        worker.connection.send(value)
    except (BrokenPipeError, ConnectionResetError):
        pass
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        worker.process.terminate()
        worker.process.join()
        raise ConfigError(_describe_unsendable(error)) from None


def _describe_unsendable(error: Exception) -> str:
    return (
        f"worker processes cannot receive this study: {first_line(error)}; they import functions "
        "and classes, so define these by name at the top of a module (no lambda, nothing from "
        "standard input or within a function), or set workers = 1"
    )


def end_unguarded_import() -> None:
    """End this process if it is a worker that is still importing the program that started it.

    Where that program starts a study when it is imported,
    without `if __name__ == "__main__"`, each worker would start the study again. The first process
    sees the exit status and says what to do.
    """
    process = multiprocessing.current_process()
    # `multiprocessing` itself finds out in this way.
    if process.name == _NAME and getattr(process, "_inheriting", False):
        os._exit(_UNGUARDED)


def _check_main_program() -> None:
    """Check that a worker can import the program that this process runs.

    Raises:
        ConfigError: when it cannot.
    """
    program = sys.modules["__main__"]
    file = getattr(program, "__file__", None)
    # `python -m` and a console script have a module or a file; interactive programs have neither.
    if getattr(program, "__spec__", None) is None and file is not None and not Path(file).exists():
        raise ConfigError(
            f"the program was read from {file}, where worker processes cannot import it; save it "
            "as a file, or set workers = 1"
        )


@contextmanager
def _block_interrupts() -> Iterator[None]:
    """Block Ctrl-C for processes started inside the block.

    The signal goes to the whole process group, even to a worker that is still importing. The parent
    decides what to do with it.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # started with the first worker, it would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _receive_message(
    worker: _Worker[J], waiting: Iterator[J], emit: Emit
) -> Iterator[tuple[J, Any]]:
    """Receive one message of a worker; when its job is done, send it the next."""
    job = worker.job
    assert job is not None
    try:
        kind, value = worker.connection.recv()
    except (EOFError, ConnectionResetError):
        worker.process.join()
        if worker.process.exitcode == _UNGUARDED:
            raise ConfigError(
                "each worker process imports the program that starts it, and this one starts a "
                'study when it is imported; put that below `if __name__ == "__main__":`, or set '
                "workers = 1"
            ) from None
        raise WorkerDied(
            f"the worker of {job} ended with status {worker.process.exitcode}; resume goes on"
        ) from None
    if kind == "progress":
        emit(value)
    elif kind == "warning":
        warnings.warn(value, stacklevel=3)
    elif kind == "failed":
        worker.job = None
        raise value
    else:
        # The next job is sent before the result is yielded, so the worker does not wait for the
        # caller.
        worker.job = next(waiting, None)
        if worker.job is not None:
            _send(worker, worker.job)
        yield job, value


def _serve_jobs(connection: Connection, threads: int) -> None:
    """Run jobs in a worker process and send progress and results, until the connection closes.

    The first value that is received is the work; the others are jobs.
    """
    # Ctrl-C reaches the whole group; the parent decides
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # One thread in every process: see `use_one_thread`.
    torch.set_num_threads(1)
    use_threads(threads)

    def send_progress(message: object) -> None:
        connection.send(("progress", message))

    # shown in the main process, as if it was given there
    def send_warning(message: Warning | str, *_: object, **__: object) -> None:
        connection.send(("warning", message))

    warnings.showwarning = send_warning
    try:
        try:
            work = connection.recv()
        except (AttributeError, ImportError) as error:
            connection.send(("failed", ConfigError(_describe_unsendable(error))))
            return
        while True:
            job = connection.recv()
            try:
                answer = ("done", work(job, send_progress))
            except (CoterieError, OSError, MemoryError) as error:
                answer = ("failed", error)
            except Exception as error:  # of a library
                if not DiskFull.matches(error):
                    raise
                answer = ("failed", DiskFull(str(error)))
            connection.send(answer)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
