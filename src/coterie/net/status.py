"""What a node's live page shows of its network: who is up, who is slow, who is refused and why.

It is a small file in the run's folder, which `coterie watch` reads. Names are those of the roster,
and reasons are the node's own words: nothing that another member sent is in it.
"""

import json
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from coterie._util.files import write_atomically
from coterie.net import roster as rosters
from coterie.net.node import Node
from coterie.results.stored_runs import NETWORK

_EVERY = 5.0  # seconds between two looks; the file is written when something has changed
# Events about a member that are counted as refusals, with what says why.
_REFUSALS = {
    "refused": "code",
    "turned_away": "reason",
    "mismatch": "",
    "slow": "",
    "message_refused": "",
    "roster_refused": "",
}


class NetworkStatus:
    """Follows a node's events, and writes its state to a file.

    Args:
        clock: seconds since 1970.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._since: dict[str, float] = {}  # the last coming or going of each member
        self._refused: dict[str, Counter[str]] = {}
        self._written: dict[str, Any] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def note_event(self, event: str, level: str, details: Mapping[str, Any]) -> None:
        """Take notice of an event of the node's log."""
        # A refused roster names its source: a member, or the file.
        peer = details.get("peer", details.get("source"))
        if not isinstance(peer, str):
            return
        with self._lock:
            if event in ("peer_up", "peer_down"):
                self._since[peer] = self._clock()
            elif event in _REFUSALS:
                why = str(details.get(_REFUSALS[event], event))
                self._refused.setdefault(peer, Counter())[why] += int(details.get("times", 1))

    def collect(self, node: Node) -> dict[str, Any]:
        """Return the state of a node's network as plain values."""
        roster, alive = node.roster, node.transport.alive_members()
        ends = rosters.find_ends(roster, datetime.now(UTC))
        paces = node.post.pace.describe()
        own = node.transport.name
        members = []
        with self._lock:
            names = [m.name for m in roster.members]
            if len(names) > rosters.MAX_ALL_TO_ALL:
                # Of a large roster a node knows few, and the page is written each second.
                known = {own, *alive, *paces, *self._since, *self._refused}
                names = [name for name in names if name in known]
            for name in names:
                # Without an answer yet a member has no pace.
                median, slow = paces.get(name, (math.nan, False))
                days = ends[name][0] if name in ends else None
                members.append(
                    {
                        "name": name,
                        "here": name == own or name in alive,
                        "since": self._since.get(name),
                        "seconds": None if math.isnan(median) else round(median, 3),
                        "slow": slow,
                        "refused": dict(self._refused.get(name, ())),
                        # Down, so that a negative number says that the certificate has ended.
                        "days": None if days is None else math.floor(days),
                    }
                )
        return {
            "node": own,
            "run": roster.run,
            "roster": roster.version,
            "state": "waiting" if node.is_waiting else node.state,
            "round": node.loop.next_round,
            "min_peers": node.patience.min_peers,
            "members": members,
        }

    def write(self, node: Node) -> None:
        """Write the state if it has changed."""
        found = self.collect(node)
        # Compared without the time, which alone would be new at each look.
        if found == self._written:
            return
        text = json.dumps({**found, "time": round(self._clock(), 1)}, separators=(",", ":"))
        try:
            write_atomically(node.folder / NETWORK, text.encode())
        except OSError:  # a full disk ends the node elsewhere, where something is lost by it
            return
        self._written = found

    def follow(self, node: Node) -> None:
        """Write the state of a node until `close`, in a thread of its own."""

        def write_now_and_then() -> None:
            while not self._stop.is_set():
                self.write(node)
                self._stop.wait(_EVERY)
            # The page of a run that is over shows its end, not the last look before it.
            self.write(node)

        self._thread = threading.Thread(
            target=write_now_and_then, name="coterie-status", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop following."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
