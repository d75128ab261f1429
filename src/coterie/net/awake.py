"""The time in which this program could work, as its event loop counts it.

Who asks others and is starved, stopped or asleep itself finds its patience over and the answers
unread when it goes on. That time is its own, and must not count against anybody.
"""

import asyncio
import time
from collections.abc import Callable

BEAT = 0.1
"""Seconds between two beats. Ten beats a second cost a thousandth of a core."""


class AwakeClock:
    """A clock that stands still while the event loop does not run: call it for the seconds.

    The loop beats; of the time between two beats no more counts than a beat. It may be read in any
    thread.

    Args:
        loop: the loop; None to count nothing but what `beat` says.
        clock: a monotonic clock in seconds.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock, self._loop = clock, loop
        # One value, so that a reader in another thread sees both numbers of one beat.
        self._beaten = 0.0, clock()
        if loop is not None:
            loop.call_soon_threadsafe(self.beat)

    def __call__(self) -> float:
        """Return the seconds since it was made in which the loop ran."""
        counted, at = self._beaten
        return counted + min(self._clock() - at, BEAT)

    def beat(self) -> None:
        """Note that the loop runs; the loop itself calls it."""
        self._beaten = self(), self._clock()
        if self._loop is not None:
            self._loop.call_later(BEAT, self.beat)
