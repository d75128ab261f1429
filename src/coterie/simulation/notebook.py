"""A bar below the cell of a notebook, for a run and for the runs of a plan."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from typing import Any

_SECONDS = 0.2  # between two frames
_SHOWN = 10  # results that stay below the bar


@contextmanager
def open_bar(total: int, unit: str, advice: str) -> Iterator["Bar | None"]:
    """Show a bar during the block where this process is the kernel of a notebook.

    Args:
        total: how much there is to do.
        unit: of it: "runs" or "rounds".
        advice: how to go on after a stop.

    Yields:
        The bar; None outside of a notebook.
    """
    # Only a program that runs in a notebook has imported it.
    ipython: Any = sys.modules.get("IPython")
    if ipython is None or not hasattr(ipython.get_ipython(), "kernel"):
        yield None
        return
    bar = Bar(total, unit, ipython.display.display)
    try:
        yield bar
    except KeyboardInterrupt:
        bar.draw(f"stopped; {advice}")
        raise
    except Exception:
        bar.draw(f"stopped by an error; {advice}")
        raise


class Bar:
    """What a notebook shows: a bar, what is done now, and the last results.

    Args:
        total: how much there is to do.
        unit: of it.
        display: of IPython.

    Attributes:
        done: how much is done.
        results: a line for each.
    """

    def __init__(self, total: int, unit: str, display: Callable[..., Any]) -> None:
        self.done, self.results = 0, list[str]()
        self._total, self._unit, self._now = total, unit, ""
        self._drawn = time.monotonic()
        # A display that can be updated takes no line of its own for each frame.
        self._handle = display(self, display_id=True)

    def draw(self, now: str) -> None:
        """Say what is done now."""
        self._now, self._drawn = now, time.monotonic()
        if self._handle is not None:
            self._handle.update(self)

    def draw_sometimes(self, now: str) -> None:
        """Say what is done now, unless the last frame is a moment old."""
        self._now = now
        if time.monotonic() - self._drawn > _SECONDS:
            self.draw(now)

    def _lines(self) -> list[str]:
        head = f"{self.done} of {self._total} {self._unit}"
        return [head, *filter(None, (self._now,)), *self.results[-_SHOWN:]]

    def __repr__(self) -> str:
        return "\n".join(self._lines())

    def _repr_html_(self) -> str:
        head, *rest = map(escape, self._lines())
        bar = f'<progress value="{self.done}" max="{self._total}"></progress> {head}'
        return "<br>".join([bar, *rest])
