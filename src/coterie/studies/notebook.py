"""Progress in a notebook: a bar below the cell that runs a plan, and each result as it comes."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from typing import Any

from coterie.simulation.run import Note, Progress
from coterie.studies.jobs import FoundRuns, Job

_SECONDS = 0.2  # between two frames
_SHOWN = 10  # results that stay below the bar


@contextmanager
def watch_in_notebook(total: int) -> Iterator[Callable[[object], None] | None]:
    """Show a bar during the block where this process is the kernel of a notebook.

    Args:
        total: runs of the plan.

    Yields:
        What receives the messages of the plan, and each run as it ends. None outside of a notebook.
    """
    # Only a program that runs in a notebook has imported it.
    ipython: Any = sys.modules.get("IPython")
    if ipython is None or not hasattr(ipython.get_ipython(), "kernel"):
        yield None
        return
    bar = _Bar(total, ipython.display.display)
    try:
        yield bar.receive
    except KeyboardInterrupt:
        bar.end("stopped; the same call goes on where it was")
        raise
    except Exception:
        bar.end("stopped by an error; the same call goes on where it was")
        raise
    bar.end("")


class _Bar:
    def __init__(self, total: int, display: Callable[..., Any]) -> None:
        self._total, self._done, self._now = total, 0, ""
        self._results: list[str] = []
        self._latest: dict[str, Progress] = {}
        self._drawn = time.monotonic()
        # A display that can be updated takes no line of its own for each frame.
        self._handle = display(self, display_id=True)

    def receive(self, message: object) -> None:
        """Take a message of the plan, or a run that has ended."""
        if isinstance(message, FoundRuns):
            self._done = message.finished
            self._results.append(str(message))
        elif isinstance(message, Progress):
            self._latest[message.run_name] = message
            rounds = f"{message.run_name}: round {message.round + 1}/{message.rounds}"
            self._now = ", ".join(filter(None, (rounds, message.describe_score())))
        elif isinstance(message, Note):
            self._now = str(message)
        elif isinstance(message, Job):
            self._done += 1
            last = self._latest.pop(str(message), None)
            score = "" if last is None else last.describe_score()
            self._results.append(": ".join(filter(None, (str(message), score))))
        if not isinstance(message, Progress) or time.monotonic() - self._drawn > _SECONDS:
            self._draw()

    def end(self, text: str) -> None:
        """Draw the last frame."""
        self._now = text
        self._draw()

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        if self._handle is not None:
            self._handle.update(self)

    def _lines(self) -> list[str]:
        head = f"{self._done} of {self._total} runs"
        return [head, *filter(None, (self._now,)), *self._results[-_SHOWN:]]

    def __repr__(self) -> str:
        return "\n".join(self._lines())

    def _repr_html_(self) -> str:
        head, *rest = map(escape, self._lines())
        bar = f'<progress value="{self._done}" max="{self._total}"></progress> {head}'
        return "<br>".join([bar, *rest])
