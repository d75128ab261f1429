"""Neighbors: the members of a large roster that a node asks, since it cannot ask all.

A node looks for the members in the views of its clients (`functional.peer_sampling`). One that does
not answer is passed over for a while, and the next on the ring is looked for; in a roster of which
few take part, members that others have met are asked as well. Only what a member signs itself
counts: nobody is believed that another one is here, or is not.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice, zip_longest

from coterie._util.mappings import select_keys

# Each asks for the members of the views that are left when absent ones are passed over. Where most
# of a roster are away, a few in vain are enough for one time; but a node that knows nobody has
# nobody to ask for hints, so that it looks for as long as one time may take.
_WAVES, _IN_VAIN = 8, 2
# Seconds: members behind addresses that swallow packets must not hold up a round for long.
_LONGEST = 10.0
# Seconds until a member that did not answer is asked again: at first, and at most.
_PAUSE, _LONGEST_PAUSE = 2.0, 600.0


@dataclass
class Absence:
    """A member that has not answered: until when it is passed over, and how long that was."""

    until: float
    pause: float


class Neighbors:
    """The members that one node looks for.

    Args:
        ask: asks members how they are; returns the ones that answered, and the members that each has
            met.
        most: members that are asked at a time on the word of others.
        list_known: returns members that are known to be here.

    Attributes:
        absent: members that did not answer.
    """

    def __init__(
        self,
        ask: Callable[[Collection[str]], Mapping[str, Iterable[str]]],
        most: int,
        list_known: Callable[[], Sequence[str]],
    ) -> None:
        self._ask, self._most, self._list_known = ask, most, list_known
        self.absent: dict[str, Absence] = {}
        self._hints: dict[str, list[str]] = {}
        self._turn = 0  # of the known members that are asked again

    def list_absent(self) -> set[str]:
        """Return the members that are passed over now."""
        now = time.monotonic()
        return {name for name, one in self.absent.items() if one.until > now}

    def look(
        self,
        find_strangers: Callable[[set[str]], Collection[str]],
        list_strangers: Callable[[], Collection[str]],
    ) -> bool:
        """Look for the members of views until all that are left in them are known.

        Args:
            find_strangers: returns the unknown members of the views when some members, which are
                passed over, are left out.
            list_strangers: returns all unknown members.

        Returns:
            Whether the views have known members only.
        """
        end, in_vain = time.monotonic() + _LONGEST, 0
        for wave in count():
            strangers = sorted(find_strangers(self.list_absent()))
            if not strangers:
                return True
            enough = wave >= _WAVES or in_vain >= _IN_VAIN
            if time.monotonic() > end or (enough and self._list_known()):
                break
            answers, found = self.meet(strangers), 0
            # Where some are away, others know better who is here.
            if len(answers) < len(strangers):
                self._ask_known()
                hints = list(islice(self._list_hints(list_strangers()), self._most))
                found = len(self.meet(hints)) if hints else 0
            in_vain = 0 if answers or found else in_vain + 1
        return not find_strangers(self.list_absent())

    def meet(self, names: Collection[str]) -> Mapping[str, Iterable[str]]:
        """Ask members, and note the ones that do not answer; return what `ask` does."""
        answers = self._ask(names)
        for name in names:
            if name in answers:
                self.absent.pop(name, None)
                continue
            before = self.absent.get(name)
            pause = _PAUSE if before is None else min(2 * before.pause, _LONGEST_PAUSE)
            self.absent[name] = Absence(time.monotonic() + pause, pause)
        self._take_hints(answers)
        return answers

    def _ask_known(self) -> None:
        """Ask one known member, another one each time, which members it has met meanwhile."""
        if known := self._list_known():
            self._turn += 1
            self._take_hints(self._ask([known[self._turn % len(known)]]))

    def _take_hints(self, answers: Mapping[str, Iterable[str]]) -> None:
        for name, met in answers.items():
            self._hints.pop(name, None)
            self._hints[name] = list(met)
        # What the newest have met is enough, and is bounded.
        self._hints = select_keys(self._hints, list(self._hints)[-self._most :])

    def _list_hints(self, strangers: Collection[str]) -> Iterator[str]:
        """Return unknown members that others have met, one of each of those in turn.

        So that the names of a liar do not crowd out the names of the others.
        """
        seen, absent = set[str](), self.list_absent()
        for name in chain.from_iterable(zip_longest(*self._hints.values())):
            if name is None or name in seen or name in absent or name not in strangers:
                continue
            seen.add(name)
            yield name
