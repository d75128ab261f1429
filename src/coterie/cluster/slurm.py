"""Runs as jobs of Slurm through submitit: an array of jobs, in a folder that all machines see.

submitit writes and submits the jobs, receives their states, and submits a job again that ran out of
time. Its files are in the study's folder `.jobs`, with the request (`asked.json`), by which
`coterie status` finds them. A run continues from its checkpoint, whichever process made that.
"""

import json
import os
import re
import shutil
import sys
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie._util import origin
from coterie._util.claims import claim_folder
from coterie._util.files import write_atomically
from coterie._util.mappings import prefix_keys, select_keys
from coterie._util.names import shorten_error
from coterie.cluster import doctor, turns
from coterie.cluster.place import Place
from coterie.engine import use_threads
from coterie.errors import ConfigError, CoterieError, FolderInUse
from coterie.runtime import checkpoint
from coterie.simulation.run import Progress
from coterie.simulation.workers import Emit, FanOut, WorkerDied, count_cores, use_one_thread

FOLDER, ASKED = ".jobs", "asked.json"
MINUTES = 24 * 60
"""The time limit of a job, where the place says none."""
MAX_RESUBMISSIONS = 20
"""How often a job that runs out of its time is submitted again."""
_TURN = 5.0  # seconds between two looks at the jobs
# The states of a job that will not run any more; Slurm writes some with more words, such as
# "CANCELLED by 1000".
_ENDED = re.compile(
    r"COMPLETED|FAILED|CANCELLED.*|TIMEOUT|NODE_FAIL|OUT_OF_MEMORY|BOOT_FAIL|DEADLINE|FINISHED"
    r"|.*NO .*"
)


@dataclass
class SlurmRuns(FanOut):
    """`fan_out` over jobs of Slurm, which write into the study's folder that all machines see.

    Args:
        place: a partition, or "local" for processes of this machine.
        cpus: processors of a job.
        gpus: GPUs of a job.
        far: whether workers cannot see the files of this machine.
    """

    place: Place
    cpus: int = 1
    gpus: float = 0
    far: bool = False

    def __post_init__(self) -> None:
        if self.gpus != int(self.gpus):
            raise ConfigError(
                f"--gpus is {self.gpus:g}; expected a whole number: Slurm gives a job whole GPUs"
            )

    def __call__(
        self, work: Any, jobs: Iterable[Any], workers: int, emit: Emit
    ) -> Iterator[tuple[Any, Any]]:
        """Submit all jobs, and yield (job, result) as they end.

        A job that fails does not stop the others; the first error is raised when all have ended.

        Args:
            work: as that of `fan_out`, with `folder` and `job_folder`.
            jobs: the jobs.
            workers: how many may run at once.
            emit: receives the progress of runs, as their checkpoints show it.

        Raises:
            CoterieError, OSError, MemoryError: the error of a job.
            WorkerDied: when a job ended without a result: killed, out of time, or by an error in
                its log.
        """
        # All jobs at once: they become one array of Slurm.
        asked, failed = list(jobs), list[BaseException]()
        # A random number identifies this submission. Jobs of an earlier one see another, and do
        # nothing.
        batch, place = uuid.uuid4().hex, work.folder / FOLDER
        with _make_executor(
            self.place, place, self.cpus, int(self.gpus), min(workers, len(asked)), work.folder
        ) as executor:
            own = doctor.describe_this_machine().facts
            software = select_keys(own, doctor.REFUSED)
            tasks = []
            for job in asked:
                tasks.append(_SlurmTask(work, job, batch, list(sys.argv), software, self.cpus))
            # Before the first submission: a job that starts at once must find its own batch.
            _write_request(place, batch, self.place, {})
            local, handed_in = self.place.address == "local", dict[int, Any]()
            waiting, rounds = list(enumerate(tasks)), dict[int, int]()
            while waiting or handed_in:
                # Processes of this machine have no queue of their own, so no more start than there
                # are cores.
                room = min(workers, count_cores()) - len(handed_in) if local else len(waiting)
                now, waiting = _split_waiting(waiting, room)
                if now:
                    # Inside `batch`, submitit collects the calls and submits one array.
                    with _suppress_warnings(), nullcontext() if local else executor.batch():
                        new = [executor.submit(one) for _, one in now]
                    handed_in |= {number: job for (number, _), job in zip(now, new, strict=True)}
                    ids = {}
                    for number, job in handed_in.items():
                        ids[_run_key(work, asked[number])] = job.job_id
                    # The ids are written after each submission, so that `coterie status` finds
                    # every job.
                    _write_request(
                        place, batch, self.place, _load_request(place).get("jobs", {}) | ids
                    )
                for number, job in [*handed_in.items()]:
                    _report_progress(
                        work.job_folder(asked[number]), asked[number], rounds, number, emit
                    )
                    if not job.done():
                        continue
                    del handed_in[number]
                    try:
                        yield asked[number], _job_result(job)
                    except (CoterieError, OSError, MemoryError) as error:
                        # One failure does not end the others, which hold their own places in the
                        # queue.
                        failed.append(error)
                        if waiting or handed_in:
                            warnings.warn(
                                f"{asked[number]} failed: {error}; the others go on", stacklevel=2
                            )
                if handed_in:
                    # Processes of this machine can be looked at often; Slurm serves many users.
                    time.sleep(0.2 if local else _TURN)
        if failed:
            raise failed[0]


@dataclass
class _SlurmTask:
    """A run on another machine, if no other job has it and it is still requested."""

    work: Any
    job: Any
    batch: str
    argv: list[str]
    wanted: Mapping[str, str]
    cpus: int

    def __call__(self) -> tuple[str, Any]:
        """Return "done" and the result, or "failed" and an error that is expected."""
        sys.argv = self.argv  # what provenance says is the command that the user gave
        folder = self.work.job_folder(self.job)
        try:
            # First: other software must not write into the folder.
            doctor.check_same_software(self.wanted)
            if _load_request(self.work.folder / FOLDER).get("batch") != self.batch:
                return "done", False  # the study was submitted again since then
            with ExitStack() as claims:
                # The hard link for file systems without locks, then the lock that all local
                # processes use.
                try:
                    claims.enter_context(turns.claim_turn(folder, _own_job_id(), is_over))
                # Who submits sees locks alone, and would submit this run again and again.
                except FolderInUse as error:
                    return "failed", error
                claims.enter_context(claim_folder(folder))
                claims.enter_context(use_one_thread())
                use_threads(self.cpus)
                return "done", self.work(self.job, _ignore_message)
        # Another process does this run; that is no failure.
        except FolderInUse:
            return "done", False
        except (CoterieError, OSError, MemoryError) as error:
            return "failed", error

    def checkpoint(self) -> Any:
        """Resubmit on timeout: return the same task, which continues from its checkpoint."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def run_question(place: Place, question: Callable[[], Any]) -> Any:
    """Run a function as a job of a partition, and return its result.

    Raises:
        ConfigError: when it fails.
    """
    # In the working directory, which all machines see; the system's temporary folder is local.
    folder = Path(tempfile.mkdtemp(dir=Path.cwd(), prefix=".coterie-doctor-"))
    try:
        with (
            _make_executor(place, folder, 1, 0, 1, Path("doctor")) as executor,
            _suppress_warnings(),
        ):
            return executor.submit(question).result()
    # Before the general case: it describes itself already.
    except CoterieError:
        raise
    except Exception as error:  # of submitit, or of the job
        raise ConfigError(
            f"a job on {place} failed: {' '.join(str(error).split())[-300:]}"
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def load_job_states(study: Path) -> dict[Path, tuple[str, str]]:
    """Return Slurm's state of the job of each run's folder, and why it failed.

    Empty where no job was submitted, or submitit is not installed.
    """
    found = _load_request(study / FOLDER)
    if not found.get("jobs"):
        return {}
    try:
        import submitit
    except ImportError:
        return {}
    out = {}
    for run, job_id in found["jobs"].items():
        # The id of a local job is its process, and the process table knows whether it runs.
        if found["place"] == "slurm:local":
            job: Any = submitit.LocalJob(study / FOLDER, job_id)
            state = "RUNNING" if not is_over(f"local:{job_id}") else job.state
        else:
            job = submitit.SlurmJob(study / FOLDER, job_id)
            state = job.state
        out[study / run] = state.upper(), _failure_reason(job)
    return out


def is_over(job: str) -> bool:
    """Return whether a job has ended in any way; False where that is unknown.

    Args:
        job: "local:" and the process of this machine, or the id of a job of Slurm.
    """
    kind, _, process = job.rpartition(":")
    if kind == "local":
        try:
            # Signal 0 only asks whether the process exists.
            os.kill(int(process), 0)
        except ProcessLookupError:
            return True
        # The process exists and belongs to another user, or the id is not a number.
        except (PermissionError, ValueError):
            return False
        # A zombie has ended, and waits for its parent. The state follows the last bracket, because
        # the name of a program may contain brackets and spaces.
        state = Path(f"/proc/{process}/stat")
        return state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z"
    try:
        import submitit

        return bool(
            _ENDED.fullmatch(
                # "force" asks Slurm at once; otherwise submitit may answer from its cache.
                submitit.SlurmJob(Path.cwd(), job).watcher.get_state(job, mode="force").upper()
            )
        )
    except Exception:  # no submitit here, or Slurm does not answer
        return False


def _own_job_id() -> str:
    """Return this job's id; that of a process where it is one of this machine."""
    import submitit

    environment = submitit.JobEnvironment()
    return environment.job_id if environment.cluster == "slurm" else f"local:{environment.job_id}"


def _ignore_message(message: object) -> None:
    """Drop a message: jobs report through files, not live messages."""


@contextmanager
def _make_executor(
    place: Place, folder: Path, cpus: int, gpus: int, at_once: int, study: Path
) -> Iterator[Any]:
    """Yield submitit's executor of a place."""
    import submitit

    folder.mkdir(parents=True, exist_ok=True)
    partition, settings = _parse_partition(place)
    try:
        kind = "local" if partition == "local" else "slurm"
        executor = submitit.AutoExecutor(
            folder=folder, cluster=kind, **{f"{kind}_max_num_timeout": MAX_RESUBMISSIONS}
        )
        time_ = int(settings.pop("time", MINUTES))
        executor.update_parameters(
            name=f"coterie-{study.name}", timeout_min=time_, cpus_per_task=cpus
        )
        if partition != "local":
            more = prefix_keys("slurm_", settings)
            executor.update_parameters(
                slurm_partition=partition,
                # At least 1, also where there is no job to submit.
                slurm_array_parallelism=max(1, at_once),
                gpus_per_node=gpus,
                **more,
            )
    # submitit raises NameError for a parameter that it does not know.
    except (RuntimeError, ValueError, NameError) as error:
        raise ConfigError(f"--on {place}: {shorten_error(error, 300)}") from error
    yield executor


def _parse_partition(place: Place) -> tuple[str, dict[str, str]]:
    """Return the partition, and further settings of its jobs."""
    partition, _, rest = place.address.partition(":")
    return partition, dict(part.split("=", 1) for part in rest.split(",") if part)


@contextmanager
def _suppress_warnings() -> Iterator[None]:
    """Suppress submitit's warnings inside the block: they are for programmers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _job_result(job: Any) -> Any:
    """Return the result of a job.

    Raises:
        CoterieError, OSError, MemoryError: its own error.
        WorkerDied: when it has none.
    """
    try:
        kind, value = job.result()
    except Exception:  # of submitit: killed, out of time, or an unexpected error
        raise WorkerDied(
            f"job {job.job_id} ended without a result: {_failure_reason(job)}; resume goes on"
        ) from None
    if kind == "failed":
        raise value
    return value


def _failure_reason(job: Any) -> str:
    """Return why a job failed: its error, else the last line of its log; "" if it did not."""
    try:
        # Here an error of submitit and one that the task returned are both values; nothing is
        # raised for a job that ended with a result.
        outcome = job._get_outcome_and_result()
    except Exception:  # of submitit: there is no result
        log = job.stderr() or ""
        lines = [line.strip() for line in log.splitlines() if line.strip()]
        return lines[-1][:200] if lines else f"Slurm says {job.state}"
    # ("error", text) of submitit, or ("success", (kind, value)) with what `_SlurmTask` returned.
    kind, value = outcome if outcome[0] == "error" else outcome[1]
    if kind == "done":
        return ""
    # Some errors have no text, such as one of the end of memory.
    lines = str(value).strip().splitlines() or [type(value).__name__]
    return lines[-1].strip()[:200]


def _split_waiting(waiting: Sequence[Any], room: int) -> tuple[list[Any], list[Any]]:
    """Return the tasks that start now, as many as there is room for, and the waiting rest."""
    count = max(0, room)
    return list(waiting[:count]), list(waiting[count:])


def _run_key(work: Any, job: Any) -> str:
    return work.job_folder(job).relative_to(work.folder).as_posix()


def _load_request(place: Path) -> dict[str, Any]:
    try:
        return json.loads((place / ASKED).read_text("utf-8"))
    except (OSError, ValueError):
        return {}


def _write_request(folder: Path, batch: str, place: Place, jobs: Mapping[str, str]) -> None:
    """Write down which jobs were submitted, by run."""
    what = {
        "batch": batch,
        "place": str(place),
        "jobs": dict(jobs),
        "command": origin.format_command(),
    }
    write_atomically(folder / ASKED, json.dumps(what, indent=1).encode())


def _report_progress(
    folder: Path, job: Any, rounds: dict[int, int], number: int, emit: Emit
) -> None:
    """Report a run's round when its checkpoint has a later one than before."""
    # Jobs send no messages: the stored rounds show how far a run is.
    now = checkpoint.count_stored_rounds(folder) or 0
    if now <= rounds.get(number, 0):
        return
    rounds[number] = now
    # A study wraps its jobs with their data. What a run has measured is not read here.
    run, nothing = getattr(job, "job", job), float("nan")
    emit(
        Progress(
            run.label,
            run.seed,
            now - 1,
            now + (not checkpoint.is_done(folder)),
            nothing,
            nothing,
            0.0,
            point=getattr(run, "point", ""),
        )
    )
