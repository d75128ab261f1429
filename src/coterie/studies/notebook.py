"""Progress in a notebook: a bar below the cell that runs a plan, and each result as it comes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from coterie.simulation.notebook import Bar, open_bar
from coterie.simulation.run import Note, Progress
from coterie.studies.jobs import FoundRuns, Job


@contextmanager
def watch_in_notebook(total: int) -> Iterator[Callable[[object], None] | None]:
    """Show a bar during the block where this process is the kernel of a notebook.

    Args:
        total: runs of the plan.

    Yields:
        What receives the messages of the plan, and each run as it ends. None outside of a notebook.
    """
    with open_bar(total, "runs", "the same call goes on where it was") as bar:
        if bar is None:
            yield None
            return
        yield _PlanWatch(bar).receive
        # Once more at the end, when no run is going on.
        bar.draw("")


class _PlanWatch:
    def __init__(self, bar: Bar) -> None:
        self._bar, self._now = bar, ""
        self._latest: dict[str, Progress] = {}

    def receive(self, message: object) -> None:
        """Take a message of the plan, or a run that has ended."""
        if isinstance(message, Progress):
            self._latest[message.run_name] = message
            self._now = f"{message.run_name}: {message.describe_round()}"
            self._bar.draw_sometimes(self._now)
            return
        if isinstance(message, FoundRuns):
            self._bar.done = message.finished
            self._bar.results.append(str(message))
        elif isinstance(message, Note):
            self._now = str(message)
        elif isinstance(message, Job):
            self._bar.done += 1
            last = self._latest.pop(str(message), None)
            score = "" if last is None else last.describe_score()
            self._bar.results.append(": ".join(filter(None, (str(message), score))))
        self._bar.draw(self._now)
