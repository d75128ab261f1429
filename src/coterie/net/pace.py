"""Pace: how long a node waits for each member, and which members it leaves out for being slow.

A member has the median of its own newest times, with a floor and a cap, so that nobody makes a node
wait longer for others. A member that has not reached a round says so before the asker's patience
ends, and is asked again; one that holds its answer for longer, or whose own median is a multiple of
the others', is slow: it is left out for 4, 16, 64, ... rounds. Then it is tried: silent it may be
for as long as the others need, and it may be a little late, as it was left behind. Time in which
this node itself could not work counts against nobody (see `awake`).
"""

import math
import statistics
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from coterie.net.outbox import Missing
from coterie.net.transport import Delivery

_NEWEST = 5  # times of a member that are kept
_ENOUGH = 3  # times without which a median says nothing: the first rounds are slow for everybody
_TIMES = 4.0  # a member is slow whose median is so many times that of the others
_ROOM = 3.0  # patience, in medians
# Seconds, where the others answer in next to no time.
_LEAST = 0.05
# After so many rounds others' times are known. A member that has none then is given less of the
# floor, since each node that meets a slow one late makes all others wait once; unless the others
# need a tenth of it, as on a machine with too much to do.
_START, _FIRST_SHARE, _FIRST_ROOM = 5, 1 / 3, 10.0
# A member that was slow is behind, because nobody has waited for it: it is given time to come, for
# so many times what the others take, or this node's training twice, or so many seconds.
_TRIAL, _TRIAL_ROUNDS, _TRIAL_LEAST = 10.0, 2, 0.5
# A share of the patience. An honest member has said at half of it (WAIT) that its message is not
# ready; what is left then is for the way of that answer, so that less than a time limit counts.
_HELD = 0.9
# A share of the floor below which no median is slow: so little is not worth a member.
_BEARABLE = 0.6
# Rounds; each pause is four times the one before, up to 4 ** 8: in a run of 200 rounds a member
# that is always slow is tried three times.
_PAUSE, _MOST_STRIKES = 4, 8


@dataclass(frozen=True)
class Wait:
    """What one question to a member took, with its repetitions.

    Args:
        peer: the member.
        seconds: until it was answered or given up.
        held: the answer came, or did not, after an honest member would have said that it is not
            ready.
        found: the answer.
    """

    peer: str
    seconds: float
    held: bool
    found: Delivery | Missing


@dataclass(frozen=True)
class Slow:
    """A member that is slow from now on.

    Args:
        peer: the member.
        seconds: how long it was waited for.
        until: the first round in which it is asked again.
    """

    peer: str
    seconds: float
    until: int


@dataclass
class _Member:
    times: deque[float] = field(default_factory=lambda: deque(maxlen=_NEWEST))
    round: int = -2  # of the newest time
    strikes: int = 0
    until: int = 0


def was_held(found: Delivery | Missing, patience: float) -> bool:
    """Return whether an answer to a question with this patience came too late, or not at all."""
    if isinstance(found, Delivery):
        return found.first > _HELD * patience
    return found.reason == "timeout"


class Pace:
    """The times of the members that one node asks.

    Args:
        floor: seconds for which a member is waited for that was not slow before; 0 to leave nobody
            out, and wait for everybody until the deadline.

    Attributes:
        num_others: number of other members: at most half of them are slow at a time.
        local: returns the seconds of this node's own training in a round.
    """

    def __init__(self, floor: float) -> None:
        self.floor, self.num_others = floor, 0
        self.local: Callable[[], float] = lambda: 0.0
        self._members: dict[str, _Member] = {}
        self._rounds: set[int] = set()  # the first ones with times
        self._needed, self._wholly = frozenset[str](), False
        self._lock = threading.Lock()

    def typical_seconds(self, without: str = "") -> float:
        """Return the median of the members' medians: no single member moves it far.

        Args:
            without: a member that is not counted.
        """
        medians = []
        # A copy: other threads add members meanwhile.
        for name, member in list(self._members.items()):
            if member.times and not member.strikes and name != without:
                medians.append(statistics.median(member.times))
        # Of two, the smaller one: a slow member must not pass for typical.
        return statistics.median_low(medians) if medians else 0.0

    def patience(self, peer: str, deadline: float) -> float:
        """Return the seconds for which a member may be silent, within a deadline."""
        if not self.floor:
            return deadline
        with self._lock:
            member = self._members.setdefault(peer, _Member())
            others = self.typical_seconds(peer)
            own, floor = 0.0, self.floor
            if member.times:
                own = statistics.median(member.times)
            elif len(self._rounds) >= _START and not self._is_wholly_needed(peer):
                floor = max(_FIRST_SHARE * floor, min(floor, _FIRST_ROOM * others))
            wanted = max(floor, _ROOM * others, _ROOM * own)
            if member.strikes and not self._is_wholly_needed(peer):
                # Its trials must cost next to nothing; but an answer takes its way, and the answer
                # that a message is not ready half of this patience more.
                wanted = max(_LEAST, _ROOM * others)
        # Half, so that a member that waited for a slow one itself can still come in time.
        return min(deadline / 2, wanted)

    def trial_seconds(self, peer: str, round: int) -> float:
        """Return how long a member may say that it is not ready: infinite if it was not slow."""
        member = self._members.get(peer)
        if member is None or not member.strikes or self._is_wholly_needed(peer):
            return math.inf
        if member.until > round and peer not in self._needed:
            return 0.0  # left out; a server asks it in passing
        return max(_TRIAL_LEAST, _TRIAL * self.typical_seconds(peer), _TRIAL_ROUNDS * self.local())

    def _is_wholly_needed(self, peer: str) -> bool:
        return self._wholly and peer in self._needed

    def list_slow(self, round: int) -> list[str]:
        """Return the members that are left out in a round."""
        return [name for name, member in list(self._members.items()) if member.until > round]

    def note_needed(self, names: Iterable[str], *, wholly: bool) -> None:
        """Note the slow members that are asked all the same in the coming round.

        Args:
            names: the members.
            wholly: nobody else can be asked, so that they are waited for as if they were not slow;
                else it is a trial.
        """
        self._needed, self._wholly = frozenset(names), wholly

    def judge_waits(self, round: int, waits: Iterable[Wait]) -> list[Slow]:
        """Take in what an exchange took; return the members that are slow from now on."""
        worst: dict[str, Wait] = {}
        for wait in waits:
            known = worst.get(wait.peer)
            if known is None or (wait.held, wait.seconds) > (known.held, known.seconds):
                worst[wait.peer] = wait
        late = sum(wait.held for wait in worst.values())
        # When most of several are late, this node or its network is; also when both of two are.
        own_fault = late >= 2 and 2 * late > len(worst)
        if not self.floor or own_fault:
            return []
        with self._lock:
            if worst and len(self._rounds) < _START:
                self._rounds.add(round)
            found = []
            for wait in worst.values():
                # In this order: `_is_slow` also notes the time, of every member.
                if self._is_slow(wait, round) and self._may_strike(wait.peer):
                    found.append(Slow(wait.peer, wait.seconds, self._strike(wait.peer, round)))
            return found

    def _is_slow(self, wait: Wait, round: int) -> bool:
        """Note a member's time; return whether it is slow."""
        member = self._members.setdefault(wait.peer, _Member())
        if member.until > round and (wait.held or isinstance(wait.found, Missing)):
            return False  # it was asked in passing, or by need: it serves its time already
        if wait.held:
            return True
        if isinstance(wait.found, Missing) and wait.found.reason not in ("not_ready", "timeout"):
            return False  # it is away
        if member.round != round:
            member.times.append(wait.seconds)
            member.strikes = max(0, member.strikes - 1)
        elif member.times:  # none are left where it was slow in this round
            # A round has several exchanges, and what they take together is what it costs.
            member.times[-1] += wait.seconds
        member.round = round
        limit = max(_BEARABLE * self.floor, _TIMES * self.typical_seconds(wait.peer), self.local())
        return len(member.times) >= _ENOUGH and statistics.median(member.times) > limit

    def _may_strike(self, peer: str) -> bool:
        """Return whether a majority of the others is left without this member."""
        slow = sum(bool(member.strikes) for name, member in self._members.items() if name != peer)
        return 2 * (slow + 1) <= self.num_others

    def _strike(self, peer: str, round: int) -> int:
        member = self._members.setdefault(peer, _Member())
        member.strikes = min(_MOST_STRIKES, member.strikes + 1)
        # They are a slow member's times, and must not become its patience.
        member.times.clear()
        member.round = round
        member.until = round + 1 + _PAUSE**member.strikes
        return member.until

    def describe(self) -> dict[str, tuple[float, bool]]:
        """Return each member's median in seconds (NaN without times), and whether it is slow."""
        with self._lock:
            found = {}
            for name, member in self._members.items():
                median = statistics.median(member.times) if member.times else math.nan
                found[name] = median, bool(member.strikes)
            return found
