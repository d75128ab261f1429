"""Jobs over worker processes of one machine.

A job's result does not depend on the number of workers: PyTorch computes with one thread in every
process (native programs, whose results do not depend on the number of threads, use the remaining
cores), and jobs share nothing. When a worker dies, the others are stopped; the files they have
written stay, and their runs can be resumed.
"""

import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import torch
import torch.multiprocessing  # tensors are sent through shared memory

from coterie.engine import use_threads
from coterie.errors import CoterieError, DiskFull

J = TypeVar("J")
R = TypeVar("R")
Emit = Callable[[object], None]
Work = Callable[[J, Emit], R]


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
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_workers(device: str) -> int:
    """Return the default number of processes: one for each core, or one for a device's memory."""
    return count_cores() if device == "cpu" else 1


def fan_out(work: Work[J, R], jobs: Iterable[J], workers: int, emit: Emit) -> Iterator[tuple[J, R]]:
    """Run every job and yield (job, result) as they finish.

    Args:
        work: (job, emit) -> result; it must be picklable when there is more than one worker.
        jobs: the jobs; each worker takes the next one when it is free. Tensors of a job reach the
            worker through shared memory, not as copies.
        workers: number of processes; 1 runs the jobs in this process.
        emit: receives the values that jobs emit while they run.

    Raises:
        CoterieError, OSError, MemoryError: the error of a job, after all workers have been stopped.
        WorkerDied: when a worker ended without a result.
    """
    waiting = iter(jobs)
    # With one worker or one job, this process does the work: another one would only cost time.
    first = list(islice(waiting, max(1, workers)))
    if len(first) <= 1:
        with use_one_thread():
            use_threads(count_cores())
            for job in chain(first, waiting):
                yield job, work(job, emit)
        return
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
    process = context.Process(target=_serve_jobs, args=(theirs, work, threads), daemon=True)
    with _block_interrupts():
        process.start()
    # Only the worker holds this end now, so its death shows as the end of the stream.
    theirs.close()
    ours.send(job)
    return _Worker(process, ours, job)


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
            worker.connection.send(worker.job)
        yield job, value


def _serve_jobs(connection: Connection, work: Work[J, Any], threads: int) -> None:
    """Run jobs in a worker process and send progress and results, until the connection closes."""
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
