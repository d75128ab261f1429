"""The runs of a plan, and what is said of them before the first one begins."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from coterie.simulation.run import name_run


@dataclass(frozen=True)
class Job:
    """One run of a plan: a method and a seed, and the point of a sweep ("num_clients=8")."""

    label: str
    seed: int
    point: str = ""

    def __str__(self) -> str:
        return name_run(self.label, self.seed, self.point)


@dataclass(frozen=True)
class FoundTable:
    """How the table of a study was read.

    Args:
        lines: the schema of the table, in words.
    """

    lines: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(f"table: {line}" for line in self.lines)


@dataclass(frozen=True)
class FoundRuns:
    """What of a plan was there before its first run began.

    Args:
        total: runs of the plan: of a study, or of all points of a sweep.
        finished: runs that are finished, the taken ones included.
        taken: for each study that has equal runs, how many were taken from it.
        engines: that trained the taken runs: engines agree up to rounding only, and this plan could
            have chosen another one.
    """

    total: int
    finished: int
    taken: Mapping[str, int] = field(default_factory=dict)
    engines: Collection[str] = ()

    def __str__(self) -> str:
        taken = ", ".join(f"{number} taken from {study}" for study, number in self.taken.items())
        if self.engines:
            taken += f", trained by {' and '.join(sorted(self.engines))}"
        return f"{self.finished} of {self.total} runs are there" + f" ({taken})" * bool(taken)
