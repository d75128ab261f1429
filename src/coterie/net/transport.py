"""Transport: the interface that carries messages, and an in-process implementation of it.

The exchange does not depend on gRPC, and another network library can implement the interface.
"""

import builtins
import queue
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from coterie.net.log import Sample
from coterie.net.outbox import NO_LAST, Missing, Outbox
from coterie.net.payload import Refused
from coterie.net.roster import Roster
from coterie.net.wire import Address, Assembler, Expectation, Manifest, Parcel


@dataclass(frozen=True)
class Delivery:
    """A message that arrived and passed every check.

    Args:
        manifest: the signed manifest.
        tensors: by name.
        bytes: length on the wire, manifest included.
        seconds: time from the question to the last chunk.
        sealed: the sender's signature and the manifest as it came.
        first: time from the question to the first chunk.
    """

    manifest: Manifest
    tensors: dict[str, Tensor]
    bytes: int
    seconds: float
    sealed: builtins.bytes = b""
    first: float = 0.0


HeadSource = Callable[[str], bytes]
"""Returns a node's signed state for the asker's nonce (see `head.Head`)."""


@runtime_checkable
class Transport(Protocol):
    """Carries one node's messages to other members; several threads may call its methods."""

    name: str
    last_questions: dict[str, float]
    """When each other member has put its newest question here, by the monotonic clock."""
    outbox: Outbox
    """What this node answers from."""
    clock: Callable[[], float]
    """Seconds in which this node could receive: patience with others is measured in them."""

    def publish(self, address: Address, what: Parcel | Missing, *, to: str = "") -> None:
        """Store a message for later requests; from the first one on, this node counts as alive."""
        ...

    def publish_standing(
        self, address: Address, seal: Callable[[Address], Parcel], *, last: int = NO_LAST
    ) -> None:
        """Answer with one and the same message from a round on, to its last round."""
        ...

    def fetch(
        self, peer: str, expect: Expectation, deadline: float, patience: float | None = None
    ) -> Delivery | Missing:
        """Ask a member for a message, and check it.

        Args:
            peer: the member.
            expect: the message.
            deadline: seconds for the whole message.
            patience: seconds without any part of it; the deadline when None.
        """
        ...

    def serve_head(self, head: HeadSource) -> None:
        """Register the handler of questions about this node's state."""
        ...

    def ask_head(self, peer: str, nonce: str, deadline: float) -> bytes | Missing:
        """Ask a member how it is."""
        ...

    def serve_roster(self, sealed: Callable[[], bytes]) -> None:
        """Register the handler of questions for this node's roster."""
        ...

    def ask_roster(self, peer: str, deadline: float) -> bytes | Missing:
        """Ask a member for its roster: the signature and then the text."""
        ...

    def use_roster(self, roster: Roster) -> None:
        """Go on with another roster of the run: links that it does not allow are closed."""
        ...

    def limit_links(self, most: int) -> None:
        """Keep at most so many links to others that this node has dialed, the newest used ones.

        Links from others are bounded by that number, too: there are a few times as many.
        """
        ...

    def prefer_members(self, names: Collection[str]) -> None:
        """Close the links from these members last, where others need room."""
        ...

    def alive_members(self) -> frozenset[str]:
        """Return the members that are known to be alive now: a hint only."""
        ...

    def lost_members(self) -> frozenset[str]:
        """Return the members that took part, are not here, and did not say that they leave."""
        ...

    def prometheus_samples(self) -> list[Sample]:
        """Return numbers for Prometheus, such as of questions turned away; it may be empty."""
        ...

    def close(self) -> None:
        """Leave the network. Open questions are answered with "closing"."""
        ...

    def __enter__(self) -> "Transport":
        """Return itself: it is open since it was made."""
        ...

    def __exit__(self, *error: object) -> None:
        """Close it."""
        ...


_LATE = 0.5  # seconds for an answer that another thread is about to hand over
WAIT = 0.5
"""The share of an asker's patience for which a peer may hold its question.

The rest is for the way of its answer, on a far link or between machines with too much to do.
"""


def assemble_delivery(
    expect: Expectation, parts: list[tuple[bytes, bytes]], seconds: float
) -> Delivery | Missing:
    """Assemble a message from (attachment, chunk) pairs, or return why it is refused."""
    assembler = Assembler(expect)
    try:
        for attachment, chunk in parts:
            assembler.feed(attachment, chunk)
        tensors = assembler.finish()
    except Refused as error:
        return Missing(f"refused:{error.code}", None, str(error))
    assert assembler.manifest is not None
    size = sum(len(a) + len(c) for a, c in parts)
    # All parts are here at once: the first has come when the last has.
    return Delivery(assembler.manifest, tensors, size, seconds, assembler.sealed, seconds)


class Hub:
    """Connects the nodes of one program.

    Attributes:
        cut: pairs (asker, answerer) without a connection.
        lost: nodes that ended without a word.
        tamper: changes the parts of a message in transit, for tests.
    """

    def __init__(self) -> None:
        self.nodes: dict[str, InProcess] = {}
        self.cut: set[tuple[str, str]] = set()
        self.lost: set[str] = set()
        self.tamper: Callable[[list[tuple[bytes, bytes]]], list[tuple[bytes, bytes]]] | None = None
        # Nodes are threads of one program, which join, ask and leave at any time.
        self.lock = threading.Lock()

    def find_node(self, asker: str, peer: str) -> "InProcess | None":
        """Return the node of a name, if the asker can reach it."""
        with self.lock:
            return None if (asker, peer) in self.cut else self.nodes.get(peer)


class InProcess:
    """A transport inside one program: the same outbox and wire format, without sockets.

    Args:
        hub: connects the nodes.
        name: this node's name.
    """

    def __init__(self, hub: Hub, name: str) -> None:
        self.hub, self.name, self.outbox, self.clock = hub, name, Outbox(), time.monotonic
        # Whether it takes part: others see it once it has published something.
        self._announced = False
        self.last_questions: dict[str, float] = {}
        self._head: HeadSource | None = None
        self._sealed: Callable[[], bytes] | None = None
        with hub.lock:
            hub.nodes[name] = self

    def publish(self, address: Address, what: Parcel | Missing, *, to: str = "") -> None:
        """Keep a message for those who ask for it."""
        self.outbox.publish(address, what, to=to)
        self._announce()

    def publish_standing(
        self, address: Address, seal: Callable[[Address], Parcel], *, last: int = NO_LAST
    ) -> None:
        """Answer with one and the same message from a round on, to its last round."""
        self.outbox.publish_standing(address, seal, last=last)
        # Answering a probe of the link does not mean that a node takes part.
        if address.kind != "probe":
            self._announce()

    def _announce(self) -> None:
        if not self._announced:
            with self.hub.lock:
                self._announced = True
                # It is back: when it leaves later, it says so, and nobody stays for it any more.
                self.hub.lost.discard(self.name)

    def fetch(
        self, peer: str, expect: Expectation, deadline: float, patience: float | None = None
    ) -> Delivery | Missing:
        """Ask a node of the hub: a message comes in one piece."""
        started = time.monotonic()
        # A message comes in one piece, so that waiting for a part is waiting for all of it.
        deadline = deadline if patience is None else min(deadline, patience)
        node = self.hub.find_node(self.name, peer)
        if node is None:
            return Missing("unreachable")
        node.note_question(self.name)
        # The outbox answers from another thread, when the message is published.
        box: queue.Queue[Parcel | Missing] = queue.Queue()
        # The peer gives up before this node does, so that its reason still arrives.
        node.outbox.ask(self.name, expect.address, WAIT * deadline, box.put)
        try:
            answer = box.get(timeout=deadline)
        except queue.Empty:
            if node.outbox.withdraw(self.name, expect.address, box.put):
                return Missing("timeout")
            # It comes in this moment: it was taken from the outbox already.
            with suppress(queue.Empty):
                return self._take_answer(node, expect, box.get(timeout=_LATE), started)
            return Missing("timeout")
        return self._take_answer(node, expect, answer, started)

    def _take_answer(
        self, node: "InProcess", expect: Expectation, answer: Parcel | Missing, started: float
    ) -> Delivery | Missing:
        if isinstance(answer, Missing):
            return answer
        parts = [(attachment, bytes(chunk)) for attachment, chunk in answer.iterate_chunks()]
        node.outbox.note_sent(self.name)
        if self.hub.tamper is not None:
            parts = self.hub.tamper(parts)
        return assemble_delivery(expect, parts, time.monotonic() - started)

    def note_question(self, asker: str) -> None:
        """Note that another node has put a question here."""
        if asker != self.name:
            self.last_questions[asker] = time.monotonic()

    def serve_head(self, head: HeadSource) -> None:
        """Register the handler of questions about this node's state."""
        self._head = head

    def ask_head(self, peer: str, nonce: str, deadline: float) -> bytes | Missing:
        """Ask a node of the hub how it is."""
        node = self.hub.find_node(self.name, peer)
        if node is None or node._head is None:
            return Missing("unreachable")
        node.note_question(self.name)
        return node._head(nonce)

    def serve_roster(self, sealed: Callable[[], bytes]) -> None:
        """Register the handler of questions for this node's roster."""
        self._sealed = sealed

    def ask_roster(self, peer: str, deadline: float) -> bytes | Missing:
        """Ask a node of the hub for its roster."""
        node = self.hub.find_node(self.name, peer)
        return Missing("unreachable") if node is None or node._sealed is None else node._sealed()

    def use_roster(self, roster: Roster) -> None:
        """Go on: a hub has no links that could be closed."""

    def limit_links(self, most: int) -> None:
        """Do nothing: a hub has no links."""

    def prefer_members(self, names: Collection[str]) -> None:
        """Do nothing: a hub has no links."""

    def alive_members(self) -> frozenset[str]:
        """Return the nodes that have published something and can be reached."""
        with self.hub.lock:
            there = [n for n, node in self.hub.nodes.items() if node._announced]
            cut = {name for name in there if (self.name, name) in self.hub.cut}
            # As over a network: who cannot be reached is not seen either.
            return frozenset(there) - cut - {self.name}

    def lost_members(self) -> frozenset[str]:
        """Return the nodes that ended without a word and take part no more, or not yet again."""
        # One that is back but has published nothing is neither lost nor alive otherwise, and those
        # who stay for it would leave.
        return frozenset(self.hub.lost - self.alive_members())

    def prometheus_samples(self) -> list[Sample]:
        """Return no numbers: nobody is turned away here."""
        return []

    def __enter__(self) -> "InProcess":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the hub."""
        # No new question finds this node; then the open ones end.
        with self.hub.lock:
            self.hub.nodes.pop(self.name, None)
        self.outbox.close()
