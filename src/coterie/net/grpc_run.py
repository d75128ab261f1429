"""One run's part of a node's transport: what it answers from, and who takes part.

A node of one run has one. A node of a federation has one for the federation and one for each study
that is going on, all behind the same address and over the same links (`GrpcTransport.open_run`).
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol, runtime_checkable

from coterie.net.log import ABOUT_ONE, RateLimit, Sample
from coterie.net.outbox import NO_LAST, Missing, Outbox
from coterie.net.payload import Refused, escape_text
from coterie.net.roster import Roster
from coterie.net.transport import WAIT, Delivery, HeadSource
from coterie.net.wire import (
    MAX_HEAD,
    MAX_ROSTER,
    SIGNATURE,
    Address,
    Assembler,
    Expectation,
    Parcel,
    read_frame,
)


@dataclass(frozen=True)
class Request:
    """A question to a member, and what takes its answer.

    Args:
        run: the run that it is of.
        peer: the member.
        method: the name of the call.
        question: its fields besides the run.
        deadline: seconds for the whole answer.
        take: receives the parts of the answer.
        patience: seconds without any part of it; the deadline when None.
        begin: called whenever the question is sent.
    """

    run: str
    peer: str
    method: str
    question: Mapping[str, Any]
    deadline: float
    take: Callable[[bytes], None]
    patience: float | None = None
    begin: Callable[[], None] = lambda: None


@runtime_checkable
class Links(Protocol):
    """The links of a node to other members, which its runs share."""

    name: str
    clock: Callable[[], float]

    def ask(self, request: Request) -> Missing | None:
        """Ask a member; return why there is no answer."""
        ...

    def announce(self, run: "GrpcRun", wait: float) -> None:
        """Let the members with a link to this node know whether it takes part in a run."""
        ...

    def bound_links(self, run: str, most: int) -> None:
        """Close the links that were not used for longest, where a run needs no more than `most`."""
        ...

    def prefer_links(self, run: str, members: Collection[str]) -> None:
        """Close the links from these members last, where a run needs them."""
        ...

    def log_event(self, event: str, **details: Any) -> None:
        """Log an event."""
        ...

    def drop_run(self, run: "GrpcRun") -> None:
        """Answer no more questions of a run."""
        ...


class GrpcRun:
    """One run at a node: a `Transport` over links that it does not own.

    Args:
        links: the node's links.
        roster: the members of the run.

    Attributes:
        announced: whether this node takes part.
        last_questions: when each other member has put its newest question here, by the monotonic
            clock.
    """

    def __init__(self, links: Links, roster: Roster) -> None:
        self._links_of_node, self.name, self.clock = links, links.name, links.clock
        self._use_members(roster)
        self.head: HeadSource | None = None
        self.sealed_roster: Callable[[], bytes] | None = None
        self.outbox = Outbox()
        self.last_questions: dict[str, float] = {}
        self.announced, self._closed = False, False
        self._alive: set[str] = set()
        self._known: set[str] = set()  # seen alive before, and not known to have left
        self.said: Counter[str] = Counter()  # how often each said by itself whether it is here
        self._changes: dict[str, RateLimit] = {}
        self._lock = threading.Lock()

    def _use_members(self, roster: Roster) -> None:
        self.run, self._names = roster.run, frozenset(m.name for m in roster.members)

    def takes(self, peer: str) -> bool:
        """Whether somebody is a member of this run."""
        return peer in self._names

    # ------------------------------------------------------------------ who takes part

    def note_question(self, peer: str) -> None:
        """Note that a member has put a question."""
        if peer != self.name:
            self.last_questions[peer] = time.monotonic()

    def note_presence(self, peer: str, there: bool, *, left: bool = False) -> None:
        """Note that a member takes part, or that it does not any more."""
        with self._lock:
            # A node can ask at its own address, and is no peer of its own.
            known = peer in self._names and peer != self.name
            if not known or (peer in self._alive) == there:
                return
            if there:
                self._alive.add(peer)
                self._known.add(peer)
            else:
                self._alive.discard(peer)
                # Who has said that it leaves is not dialed until it comes again.
                self._known -= {peer} if left else set()
            suppressed = self._changes.setdefault(peer, RateLimit(*ABOUT_ONE))()
        if suppressed is not None:
            details = {"untold": suppressed} if suppressed else {}
            event = "peer_up" if there else "peer_down"
            self._links_of_node.log_event(event, peer=peer, **details)

    def forget(self, names: list[str]) -> None:
        """Forget members that were removed or have another key."""
        with self._lock:
            self._alive.difference_update(names)
            self._known.difference_update(names)

    def keeps_link(self, peer: str) -> bool:
        """Whether a link is worth keeping: the member was here, and is dialed until it is back."""
        return peer in self._known and peer not in self._alive

    def alive_members(self) -> frozenset[str]:
        """Return the members that said, or showed, that they take part: a hint only."""
        with self._lock:
            return frozenset(self._alive)

    def lost_members(self) -> frozenset[str]:
        """Return the members that took part, are not here, and did not say that they leave."""
        with self._lock:
            return frozenset(self._known - self._alive)

    # ------------------------------------------------------------------ asking

    def fetch(
        self, peer: str, expect: Expectation, deadline: float, patience: float | None = None
    ) -> Delivery | Missing:
        """Ask a member for a message, and check it: see `Transport.fetch`."""
        started, at = self.clock(), expect.address
        patience = deadline if patience is None else min(deadline, patience)
        assembler, size, first, asked = Assembler(expect), 0, 0.0, started

        def begin() -> None:
            # Also a second time, when the way to the member was lost in the middle.
            nonlocal asked, assembler, size, first
            asked, assembler, size, first = self.clock(), Assembler(expect), 0, 0.0

        def take(frame: bytes) -> None:
            nonlocal size, first
            first = first or self.clock() - asked
            attachment, chunk = read_frame(frame)
            size += len(attachment) + len(chunk)
            assembler.feed(attachment, chunk)

        # The peer gives up before this node does, so that its reason still arrives.
        question = {**asdict(at), "wait": round(WAIT * patience, 3)}
        try:
            missing = self._ask(
                Request(self.run, peer, "Message", question, deadline, take, patience, begin)
            )
            if missing is not None:
                return missing
            tensors = assembler.finish()
        except Refused as wrong:
            self._links_of_node.log_event(
                "refused",
                level="warning",
                peer=peer,
                code=wrong.code,
                text=escape_text(wrong),
                about=str(at),
            )
            return Missing(f"refused:{wrong.code}", None, escape_text(wrong))
        assert assembler.manifest is not None
        self.note_presence(peer, True)
        seconds = self.clock() - started
        return Delivery(assembler.manifest, tensors, size, seconds, assembler.sealed, first)

    def ask_head(self, peer: str, nonce: str, deadline: float) -> bytes | Missing:
        """Ask a member how it is."""
        return self.ask_bytes(peer, "Head", {"nonce": nonce}, deadline, MAX_HEAD + SIGNATURE)

    def ask_roster(self, peer: str, deadline: float) -> bytes | Missing:
        """Ask a member for its roster."""
        return self.ask_bytes(peer, "Roster", {}, deadline, MAX_ROSTER + SIGNATURE)

    def ask_bytes(
        self, peer: str, method: str, question: Mapping[str, Any], deadline: float, limit: int
    ) -> bytes | Missing:
        """Ask for an answer of at most `limit` bytes."""
        answer = bytearray()

        def take(part: bytes) -> None:
            if len(answer) + len(part) > limit:
                raise Refused("size", f"over {limit} bytes; expected at most those")
            answer.extend(part)

        try:
            missing = self._ask(Request(self.run, peer, method, question, deadline, take))
        except Refused as wrong:
            return Missing(f"refused:{wrong.code}", None, escape_text(wrong))
        return bytes(answer) if missing is None else missing

    def _ask(self, request: Request) -> Missing | None:
        """Ask a member a question of this run."""
        with self._lock:
            if self._closed:
                return Missing("closing")
        return self._links_of_node.ask(request)

    # ------------------------------------------------------------------ answering

    def publish(self, address: Address, what: Parcel | Missing, *, to: str = "") -> None:
        """Store a message for later requests; from the first one on, this node counts as alive."""
        self.outbox.publish(address, what, to=to)
        self._announce()

    def publish_standing(
        self, address: Address, seal: Callable[[Address], Parcel], *, last: int = NO_LAST
    ) -> None:
        """Answer with one and the same message from a round on, to its last round."""
        self.outbox.publish_standing(address, seal, last=last)
        # A node that only answers probes does not take part yet.
        if address.kind != "probe":
            self._announce()

    def _announce(self) -> None:
        """Let the members with a link to this node know that it takes part."""
        if not self.announced:
            self.announced = True
            self._links_of_node.announce(self, 2.0)

    def serve_head(self, head: HeadSource) -> None:
        """Register the handler of questions about this node's state."""
        self.head = head

    def serve_roster(self, sealed: Callable[[], bytes]) -> None:
        """Register the handler of questions for this node's roster."""
        self.sealed_roster = sealed

    @property
    def is_here(self) -> bool:
        """Whether this node takes part now."""
        return self.announced and not self._closed

    # ------------------------------------------------------------------ roster, numbers, end

    def use_roster(self, roster: Roster) -> None:
        """Continue with another roster of the run; the node's own one closes links."""
        gone = self._names - {m.name for m in roster.members}
        self._use_members(roster)
        self.forget(list(gone))

    def limit_links(self, most: int) -> None:
        """Keep at most so many links, if no other run of this node needs more."""
        self._links_of_node.bound_links(self.run, most)

    def prefer_members(self, names: Collection[str]) -> None:
        """Close the links from these members last."""
        self._links_of_node.prefer_links(self.run, names)

    def prometheus_samples(self) -> list[Sample]:
        """Return no numbers: the links count for all runs."""
        return []

    def __enter__(self) -> "GrpcRun":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the run: let the others know, and answer open questions; the links stay."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        # Nobody waits for it, and a member that is not dialed yet has to be dialed first.
        self._links_of_node.announce(self, 10.0)
        self.outbox.close()
        self._links_of_node.drop_run(self)
