"""How each run of a study stands now: queued, running, done or failed, and why."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Literal

from coterie._util.claims import find_owner
from coterie.cluster import slurm, turns
from coterie.results.coverage import format_seed_ranges
from coterie.studies.run import Job, list_jobs, load_failure, run_folder
from coterie.studies.sweep import load_plan

State = Literal["done", "running", "queued", "failed", "damaged", "stopped", "waiting"]
STATES: tuple[State, ...] = ("done", "running", "queued", "failed", "damaged", "stopped", "waiting")
"""In the order of output. No process works on a "stopped" run; a "waiting" one has not begun."""


@dataclass(frozen=True)
class JobStatus:
    """How a run stands now.

    Args:
        job: the run.
        state: its state.
        reason: which process works on it, how far it is, or why it failed; "" without any of these.
    """

    job: Job
    state: State
    reason: str = ""


def load_statuses(folder: str | Path) -> list[JobStatus]:
    """Return how each run of a study, a sweep or a tuning stands now; nothing is written.

    Args:
        folder: of it, or of one of its runs.

    Raises:
        ConfigError: when there is no study in the folder.
    """
    plan = load_plan(folder)
    known = {}
    for point, standings in plan.list_standings().items():
        known |= {Job(one.label, one.seed, point): one for one in standings}
    # Jobs are submitted for a whole plan: those of a point lie in the folder of its sweep.
    handed_in = slurm.load_job_states(plan.folder.parent) | slurm.load_job_states(plan.folder)
    found = []
    for job in list_jobs(plan.points):
        run = run_folder(plan.folder, job)
        stood = known.get(job)
        word, why = handed_in.get(run, ("", ""))
        state, reason = (stood.state, stood.reason) if stood else ("missing", "")
        number, owner = turns.find_holder(run)
        by_job = ""
        # A claim by a job counts until the batch system says that the job is over.
        if number and owner and not slurm.is_over(owner["job"]):
            by_job = turns.describe_owner(owner)
        # The first that applies: a finished run is done, whatever claim or job is left over.
        if state == "finished":
            found.append(JobStatus(job, "done"))
        elif who := by_job or find_owner(run):
            found.append(JobStatus(job, "running", ", ".join(filter(None, (reason, who)))))
        # Slurm's states of a job that waits, then of one that runs.
        elif word in ("PENDING", "REQUEUED", "CONFIGURING"):
            found.append(JobStatus(job, "queued", reason))
        elif word in ("RUNNING", "COMPLETING"):
            found.append(JobStatus(job, "running", ", ".join(filter(None, (reason, "it begins")))))
        elif state == "damaged":
            found.append(JobStatus(job, "damaged", reason))
        # A failure of an earlier try counts only when no process works on the run now.
        elif text := why or load_failure(run):
            found.append(JobStatus(job, "failed", ", ".join(filter(None, (reason, text)))))
        elif state == "unfinished":
            found.append(JobStatus(job, "stopped", reason))
        else:
            found.append(JobStatus(job, "waiting"))
    return found


def format_statuses(stands: Sequence[JobStatus], width: int = 80) -> list[str]:
    """Format a line of counts, and a line for each group of runs of a method in the same state.

    Args:
        stands: the runs.
        width: of a line, in characters; longer ones go on below.

    Example:
        >>> done = JobStatus(Job("DAC", 0), "done")
        >>> failed = JobStatus(Job("DAC", 1), "failed", "no memory")
        >>> for line in format_statuses([done, failed]):
        ...     print(line)
        2 runs: 1 done, 1 failed
        done     DAC: seed 0
        failed   DAC: seed 1 (no memory)
    """
    counts = Counter(one.state for one in stands)
    listed = [f"{counts[state]} {state}" for state in STATES if counts[state]]
    out = [f"{len(stands)} runs: {', '.join(listed)}"]
    for state in STATES:
        groups: dict[tuple[str, str], list[int]] = {}
        for one in stands:
            if one.state == state:
                label = ", ".join(filter(None, (one.job.label, one.job.point)))
                groups.setdefault((label, one.reason), []).append(one.job.seed)
        for (label, reason), seeds in groups.items():
            text = f"{label}: seed{'s' * (len(seeds) > 1)} {format_seed_ranges(seeds)}"
            if reason:
                text += f" ({reason})"
            # The state takes nine letters at the beginning of each line.
            first, *rest = wrap(text, width - 9, break_on_hyphens=False)
            out += [f"{state:<9}{first}", *(f"{'':<9}{line}" for line in rest)]
    return out


def exit_status(stands: Sequence[JobStatus]) -> int:
    """Return 0 when all runs are done, 1 when one failed or is damaged, else 3."""
    states = {one.state for one in stands}
    if states & {"failed", "damaged"}:
        return 1
    return 0 if states <= {"done"} else 3
