"""Catching up: to which round a node that has fallen behind may go.

A node leaves out rounds on nobody's word alone. The target is backed by signed heads of more than
half of the other members, lies within what the node's own clock allows, and is never the end of the
run.
"""

import time
from collections.abc import Callable, Iterable

from coterie.net.outbox import KEEP

MAX_SPEED_RATIO = 10.0
"""How many times as fast as this node the others may be."""
MIN_ROUND_SECONDS = 1e-3
"""Seconds of a round at the least, for nodes that have not trained yet."""


def newest_backed_round(rounds: Iterable[int], others: int) -> int:
    """Return the newest round that more than half of the others say they have reached; -1 for none.

    Args:
        rounds: the rounds in their signed heads. A member that did not answer counts as one that
            has reached none.
        others: how many other members there are.
    """
    claims, needed = sorted(rounds, reverse=True), others // 2 + 1
    # In descending order, the entry with this number is a round that so many members have reached.
    return claims[needed - 1] if 0 < needed <= len(claims) else -1


class RunClock:
    """How many rounds can have passed since a node was in step with others, by its own clock.

    Args:
        round: the round then.
        since: when that was, in seconds since 1970; None when that is not known.
        clock: the time now.
    """

    def __init__(
        self, round: int, since: float | None, clock: Callable[[], float] = time.time
    ) -> None:
        self.round, self.since, self._clock = round, since, clock

    def note_in_step(self, round: int) -> None:
        """Note that a message of a round came; its sender is at most a few rounds ahead."""
        self.round, self.since = max(self.round, round), self._clock()

    def newest_possible_round(self, seconds: float) -> int | None:
        """Return the newest round that others can be in; None when that is not known.

        Args:
            seconds: that this node trains in a round; others may be ten times as fast.
        """
        if self.since is None:
            return None
        # A clock that was set back gives no negative time.
        elapsed = max(0.0, self._clock() - self.since)
        # A member whose messages this node still received is at most KEEP rounds ahead.
        return self.round + KEEP + int(MAX_SPEED_RATIO * elapsed / max(seconds, MIN_ROUND_SECONDS))
