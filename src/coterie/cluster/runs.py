"""Whole runs on Ray: the jobs of a study or of tuning as Ray tasks.

    with open_ray_runs("ray:auto") as over:
        run_study("study.toml", over=over)

Each run is one task. Ray decides where it goes, by the processors and GPUs that it asks for. This
process claims its folder, sends the files in it, and writes the files that come back with each
checkpoint: no folder is shared. When a worker dies, its run starts again from the last checkpoint
that came back. Each machine holds the data of a seed once.
"""

import atexit
import math
import queue
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from coterie._util import manifest
from coterie._util.claims import claim_folder
from coterie._util.names import shorten_error
from coterie.cluster import doctor, folders, packing, place
from coterie.cluster.packing import Packed
from coterie.cluster.place import Place, connect_ray
from coterie.data.federation import Federation
from coterie.errors import CoterieError, FolderInUse, require
from coterie.simulation.run import FilesSaved
from coterie.simulation.workers import Emit, FanOut, WorkerDied
from coterie.studies.run import FAILURE_FILE, write_failure

RETRIES = 3
_TOGETHER = 0.2  # seconds for which messages of a worker are collected before they are sent
_TURN = 1.0  # seconds between two counts of the cluster's free room


@runtime_checkable
class FolderWork(Protocol):
    """Work whose jobs write folders."""

    folder: Path

    def job_folder(self, job: Any, /) -> Path:
        """Return the folder of a job, below `folder`."""
        ...

    def relocate(self, folder: Path, /) -> "FolderWork":
        """Return the same work in another folder, on another machine."""
        ...


@dataclass(frozen=True)
class SentBytes:
    """What a fan-out has sent and lost, for measurements.

    Args:
        data: bytes put into Ray's store: of work, data and stored files of runs.
        home: bytes of files that came back.
        lost: workers that died.
    """

    data: int = 0
    home: int = 0
    lost: int = 0


@contextmanager
def open_ray_runs(
    where: Place | str,
    *,
    cpus: float = 1,
    gpus: float = 0,
    retries: int = RETRIES,
    check: bool | None = None,
    **started: Any,
) -> Iterator["RayRuns"]:
    """Connect to a Ray cluster for the block, check its machines, and yield what does runs there.

    Args:
        where: a place of Ray, or a value of `--on`.
        cpus: processors of a run, which are its threads.
        gpus: GPUs of a run; below 1, several runs share one.
        retries: how often a run starts again after its worker died.
        check: whether the machines are compared with this one first; None where they are not this
            machine.
        started: further arguments of `ray.init` for "ray:local".

    Raises:
        ConfigError: when no Ray answers, or a machine has another version of Coterie or torch.
    """
    require(cpus > 0, "cpus", cpus, "more than 0")
    require(
        gpus >= 0 and (gpus < 1 or gpus == int(gpus)),
        "gpus",
        gpus,
        "a share of one below 1, or a whole number",
    )
    require(retries >= 0, "retries", retries, "0 or more")
    where = place.parse_place(where) if isinstance(where, str) else where
    with connect_ray(where, **started):
        if check is None:
            check = where.address != "local"
        if check:
            doctor.check_equal_software(doctor.look_at_machines())
        yield RayRuns(cpus, gpus, retries)


@dataclass
class _ActiveRun:
    """A job that is under way."""

    job: Any
    payload: Any
    claim: ExitStack
    folder: Path | None
    tries: int = 1


@dataclass
class RayRuns(FanOut):
    """`fan_out` over the Ray that this process is connected to; `open_ray_runs` makes it.

    Args:
        cpus: processors of a run.
        gpus: GPUs of a run.
        retries: how often a run starts again after its worker died.
        far: that workers cannot read files of this machine.
        sent: numbers, for measurements.
    """

    cpus: float = 1
    gpus: float = 0
    retries: int = RETRIES
    far: bool = True
    sent: SentBytes = field(default_factory=SentBytes)

    def __call__(
        self, work: Any, jobs: Iterable[Any], workers: int, emit: Emit
    ) -> Iterator[tuple[Any, Any]]:
        """Run every job and yield (job, result) as they finish.

        Args:
            work: as that of `fan_out`; with `folder`, `job_folder` and `relocate` its jobs write
                folders, which are copied back.
            jobs: the jobs. One whose folder another process has claimed gives False.
            workers: the largest number of runs under way; there are also no more than the cluster
                has room for, and two that wait.
            emit: receives the values that jobs emit.

        Raises:
            CoterieError, OSError, MemoryError: the error of a job.
            WorkerDied: when a worker died more often than `retries`, or failed with an unexpected
                error.
        """
        import ray
        from ray.exceptions import RayError

        keeper = work if isinstance(work, FolderWork) else None
        # A study's work is packed without the large data in it; each job carries its own part.
        packed = packing.pack(work if keeper is None else keeper.relocate(keeper.folder))
        self._add_sent(data=packed.nbytes)
        carried = packing.collect_modules(_find_modules(work))
        # Once into Ray's store: all tasks of a machine read the same copy.
        common = _put_object((packed, carried, list(sys.argv), self.cpus))
        store = _FederationStore(self)
        tasks = _make_tasks(ray, self.cpus, self.gpus)
        waiting, under_way = iter(jobs), dict[int, _ActiveRun]()
        number, more, last_room = 0, True, (0.0, 0)
        try:
            while True:
                # Machines can join and leave in the middle of a study, so the room is counted
                # again and again.
                if time.monotonic() - last_room[0] > _TURN:
                    last_room = time.monotonic(), self._count_room(ray)
                # Two more than fit: a worker that becomes free finds the next job on its machine.
                while more and len(under_way) < min(workers, last_room[1] + 2):
                    job = next(waiting, _NOTHING)
                    if job is _NOTHING:
                        more = False
                        break
                    run = self._claim_run(job, keeper)
                    if run is None:
                        yield job, False
                        continue
                    run.payload = store.make_payload(
                        job, [one.payload for one in under_way.values()]
                    )
                    under_way[(number := number + 1)] = run
                    self._start_run(tasks, number, run, common)
                if not under_way:
                    return
                for key, kind, value in tasks.wait(_TURN):
                    run = under_way[key]
                    if kind == "files":
                        self._add_sent(home=sum(map(len, value.files.values())))
                        # Files that come back are on disk before a later message of the run is
                        # handled.
                        if run.folder is not None:
                            folders.apply_update(value, run.folder)
                    elif kind == "progress":
                        emit(value)
                    elif kind == "warning":
                        warnings.warn(value, stacklevel=2)
                    elif kind == "done":
                        del under_way[key]
                        run.claim.close()
                        yield run.job, value
                    # Out of memory is treated as a death: on another machine, or later, there may
                    # be room.
                    elif kind == "lost" or (kind == "failed" and isinstance(value, MemoryError)):
                        self._add_sent(lost=1)
                        if run.tries > self.retries:
                            raise self._make_final_error(run, value)
                        run.tries += 1
                        why = value if kind == "lost" else "its machine has no more memory"
                        warnings.warn(
                            f"{run.job}: {why}; try {run.tries} goes on where it was", stacklevel=2
                        )
                        # A new number: late messages of the lost task must not count for the new
                        # one.
                        del under_way[key]
                        under_way[(number := number + 1)] = run
                        self._start_run(tasks, number, run, common)
                    else:
                        # The error of a job would come again, so it is not tried again.
                        if run.folder is not None:
                            write_failure(run.folder, value)
                        raise value
        except (RayError, ConnectionError) as error:
            raise WorkerDied(
                f"the connection to Ray is lost: {shorten_error(error)}; resume goes on"
            ) from None
        finally:
            # Tasks end before the claims: no other process may take a folder that a task still
            # reports to.
            tasks.stop()
            for run in under_way.values():
                run.claim.close()

    def _make_final_error(self, run: _ActiveRun, value: Any) -> Exception:
        """Return the error of a run whose worker died too often."""
        if not isinstance(value, MemoryError):
            value = WorkerDied(f"{run.job}: {value}, {run.tries} times; resume goes on")
        if run.folder is not None:
            write_failure(run.folder, value)
        return value

    def _claim_run(self, job: Any, keeper: FolderWork | None) -> _ActiveRun | None:
        """Return a job with its folder claimed; None when another process has it."""
        claim = ExitStack()
        if keeper is None:
            return _ActiveRun(job, None, claim, None)
        folder = keeper.job_folder(job)
        try:
            claim.enter_context(claim_folder(folder))
        except FolderInUse:
            return None
        (folder / FAILURE_FILE).unlink(missing_ok=True)
        return _ActiveRun(job, None, claim, folder)

    def _start_run(self, tasks: Any, number: int, run: _ActiveRun, common: Any) -> None:
        """Start a run, or start it again, from what is in its folder."""
        there = {} if run.folder is None else folders.load_files(run.folder)
        self._add_sent(data=sum(map(len, there.values())))
        tasks.start(
            number, common, run.payload, there, "" if run.folder is None else str(run.folder)
        )

    def _count_room(self, ray: Any) -> int:
        """Return how many runs the cluster has room for now."""
        have = ray.cluster_resources()
        room = have.get("CPU", 0.0) / self.cpus
        if self.gpus:
            cards = have.get("GPU", 0.0)
            runs = cards / self.gpus
            # A share below 1 must lie on one card, so each card holds a whole number of runs.
            if self.gpus < 1:
                runs = cards * math.floor(1 / self.gpus)
            room = min(room, runs)
        # At least 1, so that a job is submitted even where there is no room now: Ray lets it wait.
        return max(1, int(room))

    def _add_sent(self, *, data: int = 0, home: int = 0, lost: int = 0) -> None:
        now = self.sent
        self.sent = SentBytes(now.data + data, now.home + home, now.lost + lost)


_NOTHING = object()


def _find_modules(work: Any) -> set[str]:
    """Return the modules that a work's settings name, and those of its functions and classes."""
    from coterie.studies import config

    names: set[str] = set()
    holders = work, getattr(work, "inputs", None)
    # A plain function has no attributes of its own.
    values = chain.from_iterable(getattr(one, "__dict__", {}).values() for one in holders)
    for value in (*values, *getattr(work, "studies", {}).values()):
        if isinstance(value, config.StudyConfig):
            names |= packing.find_named_modules(config.make_study_table(value))
        elif callable(value):
            names |= packing.find_defining_modules(value)
    return names


class _FederationStore:
    """Federations in Ray's store, each once while a job that is under way has it."""

    def __init__(self, owner: RayRuns) -> None:
        self._owner = owner
        self._held: dict[int, tuple[Federation, Any]] = {}

    def make_payload(self, job: Any, others: list[Any]) -> tuple[Packed, list[Any]]:
        """Return a job in which its federation is a reference.

        Args:
            job: with or without a `federation`.
            others: the payloads of the jobs under way; federations that none of them refers to are
                released.
        """
        data = getattr(job, "federation", None)
        # By identity: the payloads hold the very references of `_held`.
        used = set(map(id, chain.from_iterable(refs for _, refs in others)))
        for key, (value, ref) in list(self._held.items()):
            if id(ref) not in used and value is not data:
                del self._held[key]
        if not isinstance(data, Federation):
            return packing.pack(job), []
        # The id is that of a living object, since `_held` keeps the federation itself.
        if id(data) not in self._held:
            packed = packing.pack(data)
            self._owner._add_sent(data=packed.nbytes)
            self._held[id(data)] = data, _put_object(packed)
        return packing.pack(replace(job, federation=None)), [self._held[id(data)][1]]


def _put_object(value: Any) -> Any:
    """Put an object into Ray's store, which writes to disk what its memory has no room for.

    Raises:
        WorkerDied: when there is no room at all, or Ray is gone.
    """
    import ray
    from ray.exceptions import RayError

    try:
        return ray.put(value)
    except (RayError, ConnectionError) as error:
        raise WorkerDied(
            f"Ray does not take the data of a run: {shorten_error(error)}; resume goes on"
        ) from None


def _make_tasks(ray: Any, cpus: float, gpus: float) -> Any:
    """Return what submits tasks and receives their messages, in this process or on the cluster.

    A process that is not part of the cluster needs an actor there.
    """
    if not ray.util.client.ray.is_connected():
        return Tasks(cpus, gpus)
    return _Relay(ray, cpus, gpus)


class Tasks:
    """Submits Ray tasks by number, and receives their messages.

    Args:
        cpus: processors of each.
        gpus: GPUs of each.
    """

    def __init__(self, cpus: float, gpus: float) -> None:
        import ray

        self._ray: Any = ray
        # No retries by Ray: they would begin at the start of the run, not at its last checkpoint.
        options = {"num_cpus": cpus, "num_gpus": gpus, "max_retries": 0, "num_returns": "streaming"}
        self._task = ray.remote(**options)(_run_task)
        self._numbers: dict[Any, int] = {}

    def start(self, number: int, *arguments: Any) -> None:
        """Start a task under a number that was not used before."""
        self._numbers[self._task.remote(*arguments)] = number

    def wait(self, seconds: float) -> list[tuple[int, str, Any]]:
        """Return messages of tasks as (number, kind, value); nothing after so many silent seconds.

        Kinds are "progress", "warning", "files", "failed" and "done"; "lost" where the worker died,
        with the reason. After the last three, nothing comes from that task.
        """
        ready, _ = self._ray.wait(
            [*self._numbers], num_returns=1, timeout=seconds, fetch_local=False
        )
        messages: list[tuple[int, str, Any]] = []
        for stream in ready:
            number = self._numbers[stream]
            try:
                batch = self._ray.get(next(stream))
            # A stream that ends without "done" or "failed" belongs to a worker that did not
            # finish.
            except StopIteration:
                batch = [("lost", "its worker ended without a result")]
            except self._ray.exceptions.RayTaskError as error:
                batch = [
                    ("failed", WorkerDied(f"a worker failed: {' '.join(str(error.cause).split())}"))
                ]
            except self._ray.exceptions.RayError as error:
                batch = [("lost", _describe_loss(error))]
            messages += [(number, kind, value) for kind, value in batch]
            if batch and batch[-1][0] in ("failed", "done", "lost"):
                del self._numbers[stream]
        return messages

    def stop(self) -> None:
        """End all tasks that are under way, at once."""
        for stream in self._numbers:
            with suppress(Exception):  # the connection may be gone, and the task with it
                self._ray.cancel(stream, force=True)
        self._numbers.clear()


class _Relay:
    """`Tasks` in an actor of the cluster: only there a task's yielded values can be received."""

    def __init__(self, ray: Any, cpus: float, gpus: float) -> None:
        self._ray = ray
        # It only passes messages on, so it takes no processor from a run.
        self._actor = ray.remote(num_cpus=0)(Tasks).remote(cpus, gpus)

    def start(self, number: int, *arguments: Any) -> None:
        # Ray replaces a reference by its object, but passes on references inside a list.
        passed = ([one] if _is_reference(one) else one for one in arguments)
        self._ray.get(self._actor.start.remote(number, *passed))

    def wait(self, seconds: float) -> list[tuple[int, str, Any]]:
        return self._ray.get(self._actor.wait.remote(seconds))

    def stop(self) -> None:
        with suppress(Exception):
            # A bound, since the connection may be gone; Ray ends the actor with it anyway.
            self._ray.get(self._actor.stop.remote(), timeout=10)
            self._ray.kill(self._actor)


def _is_reference(value: Any) -> bool:
    # By name: a client of Ray has another class for it.
    return type(value).__name__ in ("ObjectRef", "ClientObjectRef")


def _describe_loss(error: Exception) -> str:
    """Return in a few words why a worker is gone."""
    words = {
        "OutOfMemoryError": "its worker was ended, because the machine had no more memory",
        "NodeDiedError": "its machine is gone",
        "WorkerCrashedError": "its worker died",
        "ObjectLostError": "its machine is gone, and its result with it",
        "OwnerDiedError": "its machine is gone, and its result with it",
    }
    return words.get(type(error).__name__, f"its worker is gone ({type(error).__name__})")


def _run_task(common, payload, there, home):  # Ray asks for a plain generator
    yield from run_job(common, payload, there, home)


def run_job(
    common: Any, payload: tuple[Packed, list[Any]], there: Mapping[str, bytes], home: str
) -> Iterator[list[tuple[str, Any]]]:
    """Do one job in a worker of Ray, and yield its messages; see `Tasks.wait`.

    Args:
        common: the work and custom modules, or a list with a reference to them.
        payload: the job, and references to its data.
        there: the files of its folder.
        home: the folder on the machine that sent it, as messages must name it; empty where the job
            has none.
    """
    import ray

    packed, carried, argv, cpus = ray.get(common[0]) if isinstance(common, list) else common
    messages: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
    with folders.temporary_folder() as root:
        # In a thread, because the generator has to yield messages while the job computes.
        arguments = (packed, carried, argv, cpus, payload, there, home, root, messages)
        threading.Thread(
            target=_run_in_thread, args=arguments, name="coterie-run", daemon=True
        ).start()
        ended = False
        while not ended:
            batch = [messages.get()]
            until = time.monotonic() + _TOGETHER
            while (
                # Files go at once, since they are what survives the death of the worker. Progress
                # can wait.
                batch[-1][0] not in ("done", "failed", "files")
                and (left := until - time.monotonic()) > 0
            ):
                with suppress(queue.Empty):
                    batch.append(messages.get(timeout=left))
            ended = batch[-1][0] in ("done", "failed")
            yield batch


def _run_in_thread(
    packed: Packed, carried: Mapping[str, bytes], argv: list[str], cpus: float,
    payload: tuple[Packed, list[Any]], there: Mapping[str, bytes], home: str, root: Path,
    messages: "queue.SimpleQueue[tuple[str, Any]]",
) -> None:  # fmt: skip
    """Do one job in a thread with its own arithmetic threads, and put all messages into a queue."""
    import ray
    import torch

    from coterie.engine import use_threads

    abroad = ""

    def localize_error(error: Any) -> Any:
        """Return an error that names the folder as on the sending machine."""
        # An error with other arguments than text stays as it is: its class may need them.
        if not abroad or not all(isinstance(part, str) for part in error.args):
            return error
        return type(error)(*(part.replace(abroad, home) for part in error.args))

    def report_warning(message: Warning | str, *_: object, **__: object) -> None:
        messages.put(
            ("warning", localize_error(message) if isinstance(message, Warning) else message)
        )

    try:
        sys.argv = argv  # provenance records it as the command that was given
        torch.set_num_threads(1)
        use_threads(max(1, int(cpus)))
        # `warnings.showwarning` belongs to the process, which does one job at a time.
        warnings.showwarning = report_warning
        _import_carried(carried)
        work, job = packing.unpack(packed), packing.unpack(payload[0])
        if payload[1]:
            job = replace(job, federation=packing.unpack(ray.get(payload[1][0])))
        known: dict[str, str] = {}
        folder = root
        if home:
            work = work.relocate(root / "study")
            folder = work.job_folder(job)
            abroad = str(folder)
            folders.write_files(there, folder)
            known = manifest.load_digests(folder)

        def report_message(message: object) -> None:
            nonlocal known
            if isinstance(message, FilesSaved):
                update, known = folders.collect_update(folder, known)
                messages.put(("files", update))
            else:
                messages.put(("progress", message))

        messages.put(("done", work(job, report_message)))
    except (CoterieError, OSError, MemoryError) as error:
        messages.put(("failed", localize_error(error)))
    # Also SystemExit: without a last message, the generator would wait forever.
    except BaseException as error:
        traceback.print_exc()
        messages.put(
            ("failed", WorkerDied(f"a worker failed: {''.join(traceback.format_exception(error))}"))
        )


_carried_folder = ExitStack()
_imported: set[str] = set()


def _import_carried(carried: Mapping[str, bytes]) -> None:
    """Make custom modules importable, once in a process: those of one command do not change."""
    if carried and not _imported:
        # The folder lives as long as the process: a module may be imported late.
        packing.install_modules(carried, _carried_folder.enter_context(folders.temporary_folder()))
        _imported.update(carried)
        atexit.register(_carried_folder.close)
