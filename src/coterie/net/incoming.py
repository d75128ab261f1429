"""Incoming links: the connections on which members have called this process, and their bound.

A link counts from its first call on, since only a call says whose it is. When there are too many,
one makes room for the newest: one of a member that this node does not prefer, of these one whose
member has another, of these the one that was not used for longest. Calls that wait on it end, and are
made again; an answer on its way goes on. So nobody holds a place against others by waiting, and who has
many links, or many keys, takes none from the members that this node prefers.
"""

import ipaddress
import os
import socket
import stat
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import unquote

OF_A_MEMBER = 4
"""Links that one member may have here: one, some that end, and that of another program of it."""
LEAST = 32
"""Links for which there is room, however few members a process needs."""
STRANGERS = 2048
"""Connections without a call that stay open; of more, the oldest are closed."""
CONNECTIONS = 16_384
"""Connections of all kinds beyond which the library takes none: each costs some 80 kB."""
SILENT = 20.0
"""Seconds after which a connection without a call is closed: a handshake may take ten."""


@dataclass(eq=False)
class Visit:
    """A call that is open on an incoming link.

    Args:
        turn_away: ends it, so that the caller comes again.
        is_waiting: whether it can end without a loss: nothing of its answer is on the way.
    """

    turn_away: Callable[[], object] = lambda: None
    is_waiting: bool = True


@dataclass(eq=False)
class _Incoming:
    member: str
    peer: str
    used: float
    visits: set[Visit] = field(default_factory=set)

    @property
    def is_sending(self) -> bool:
        return not all(visit.is_waiting for visit in self.visits)


class IncomingLinks:
    """The incoming links of one process.

    Args:
        most: links that are kept.
        list_open: returns the connections that are open, by the address of the other side; None
            where the system does not say.
        close: closes a connection, after a moment in which its callers learn of it.
        clock: a monotonic clock in seconds.

    Attributes:
        preferred: members whose links are closed last.
    """

    def __init__(
        self,
        most: int,
        list_open: Callable[[], Collection[str] | None],
        close: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.most, self._list_open, self._close, self._clock = most, list_open, close, clock
        self.preferred: Collection[str] = frozenset()
        self._links: dict[str, _Incoming] = {}
        self._ending: set[str] = set()  # peers whose connections are about to be closed
        self._silent: dict[str, float] = {}  # when a connection without a call was first seen

    def __len__(self) -> int:
        return len(self._links)

    def open_visit(self, member: str, peer: str, turn_away: Callable[[], object]) -> Visit | None:
        """Note a call; where it comes on a new link, make room for that.

        Args:
            member: who calls.
            peer: the address of the other side.
            turn_away: see `Visit`.

        Returns:
            The call, which `end_visit` ends; None where there is no room, and its link is closed.
        """
        peer = normalize_peer(peer)
        link = self._links.get(peer)
        if link is None or link.member != member:
            # The same address again is another connection, or one under another name.
            link = _Incoming(member, peer, self._clock())
            if peer in self._ending or not self._make_room(link):
                self._end(link)
                return None
            self._links[peer] = link
        link.used = self._clock()
        link.visits.add(visit := Visit(turn_away))
        return visit

    def end_visit(self, peer: str, visit: Visit) -> None:
        """Note that a call has ended."""
        link = self._links.get(normalize_peer(peer))
        if link is not None and visit in link.visits:
            link.visits.discard(visit)
            link.used = self._clock()

    def _make_room(self, new: _Incoming) -> bool:
        def list_own() -> list[_Incoming]:
            return [one for one in self._links.values() if one.member == new.member]

        if len(self._links) < self.most and len(list_own()) < OF_A_MEMBER:
            return True
        # The library reports no end of a connection, and only here does it matter.
        self._forget_closed()
        own = sorted(list_own(), key=self._rank)
        for one in own[: max(0, len(own) + 1 - OF_A_MEMBER)]:
            self._end(one)
        while len(self._links) >= self.most:
            links, several = list(self._links.values()), Counter[str]()
            several.update(one.member for one in links)
            # Preferred members make room for each other alone.
            others = [one for one in links if one.member not in self.preferred]
            if not others and new.member not in self.preferred:
                return False
            first = min(others or links, key=lambda one: self._rank(one, several[one.member] > 1))
            # What is being sent ends soon by itself, and makes room for nobody who is needed less.
            needed = new.member in self.preferred and bool(others)
            if first.is_sending and not needed and first.member != new.member:
                return False
            self._end(first)
        return True

    @staticmethod
    def _rank(link: _Incoming, is_one_of_several: bool = True) -> tuple[bool, bool, bool, float]:
        """Return the place of a link in the order in which they make room: the smallest first."""
        return link.is_sending, not is_one_of_several, bool(link.visits), link.used

    def _end(self, link: _Incoming) -> None:
        if self._links.get(link.peer) is link:
            del self._links[link.peer]
        self._ending.add(link.peer)
        for visit in link.visits:
            visit.turn_away()
        self._close(link.peer)

    def _forget_closed(self) -> None:
        open_ = self._list_open()
        if open_ is not None:
            for peer in self._links.keys() - set(open_):
                del self._links[peer]

    def note_closed(self, peer: str) -> None:
        """Note that a connection has been closed: its address can come again."""
        self._ending.discard(peer)

    def find_silent(self) -> list[str]:
        """Return the connections without a call that have had their time, or are too many."""
        open_, now = self._list_open(), self._clock()
        if open_ is None:
            return []
        silent = {}
        for peer in open_:
            if peer not in self._links:
                silent[peer] = self._silent.get(peer, now)
        self._silent = silent
        oldest = sorted(silent, key=lambda peer: silent[peer])
        surplus = oldest[: max(0, len(oldest) - STRANGERS)]
        return [*surplus, *(p for p in oldest[len(surplus) :] if now - silent[p] >= SILENT)]


def normalize_peer(peer: str) -> str:
    """Return an address as the library or the system writes it in one form."""
    text = unquote(peer)
    kind, _, rest = text.partition(":")
    host, _, port = (rest if kind in ("ipv4", "ipv6") else text).rpartition(":")
    try:
        at = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return text
    mapped = at.ipv4_mapped if isinstance(at, ipaddress.IPv6Address) else None
    return f"{mapped or at}:{port}"


def _iterate_connections(port: int) -> Iterator[tuple[str, socket.socket]]:
    """Iterate the connections that came in at a port: the other side's address, and a socket.

    The library has no call for it. A copy of each file is looked at: the library may close its own
    at any moment, and another may get its number.
    """
    for name in os.listdir("/dev/fd"):
        if (found := _copy_socket(int(name))) is None:
            continue
        with found, suppress(OSError):
            if found.getsockname()[1] == port:
                host, at = found.getpeername()[:2]
                yield normalize_peer(f"{host}:{at}"), found


def _copy_socket(number: int) -> socket.socket | None:
    """Return a copy of a file of this process that is a socket of the internet; else None."""
    try:
        # First: to close a copy of a regular file would give up locks of this process on it.
        if not stat.S_ISSOCK(os.fstat(number).st_mode):
            return None
        copy = os.dup(number)
    except OSError:
        return None
    try:
        found = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return None
    if found.family in (socket.AF_INET, socket.AF_INET6):
        return found
    found.close()
    return None


def list_connections(port: int) -> set[str] | None:
    """Return the open connections that came in at a port, by the address of the other side.

    None where the system does not say.
    """
    try:
        return {peer for peer, _ in _iterate_connections(port)}
    except OSError:
        return None


def close_connections(port: int, peers: Collection[str]) -> None:
    """Close connections that came in at a port, by the address of the other side."""
    with suppress(OSError):  # where the system does not say what is open
        for peer, found in _iterate_connections(port):
            if peer in peers:
                with suppress(OSError):  # it has just ended
                    # Of the connection: the library sees its end, and closes its own file.
                    found.shutdown(socket.SHUT_RDWR)
