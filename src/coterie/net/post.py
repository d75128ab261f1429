"""Post: seal and publish a node's messages, fetch and check those of others, count traffic.

The exchange decides which messages to fetch.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from coterie._util.mappings import select_keys, select_prefix
from coterie.errors import ExchangeError, QuorumError, TransportError
from coterie.net import identity
from coterie.net.outbox import NO_LAST, Missing
from coterie.net.pace import Pace, Slow, Wait, was_held
from coterie.net.payload import Refused, Template
from coterie.net.roster import Roster
from coterie.net.transport import WAIT, Delivery, Transport
from coterie.net.wire import CHUNK, Address, Expectation, Parcel, seal_parcel

# messages that are asked for at a time; a member holds a few more questions open than that
_OF_A_MEMBER = 4
_AT_A_TIME = 64  # of all members
_SHORT = 0.02  # seconds that are too few for another question
_PAUSE = 0.25  # seconds between two questions to a member that does not hold them
_QUIET = 10.0  # seconds without any part of a message that is asked for in the background
_LOOK = 0.2  # seconds between two looks, while waiting for answers, at whether this node can go on


FIELD = "field."
"""What the names of a message's extra tensors begin with on the wire."""


class RoundMissed(ExchangeError):
    """The server continued without this node, which skips the round with unchanged state.

    Args:
        reason: as in `Missing`.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"the server went on without this node ({reason})")


@dataclass(frozen=True)
class Terms:
    """Deadlines and sizes of a node's exchanges.

    Args:
        deadline: seconds that a round waits for peers in one exchange.
        server_wait: seconds to keep asking a server that does not answer.
        redraws: how often the peers of a round are drawn again when some are missing.
        half: send models in half precision.
        chunk: bytes in a chunk; fewer than 262144 for links below 1 Mbit/s.
        slow: seconds that a member may be silent in the first rounds, and later when the others
            answer soon; one that is silent for longer counts as slow and is left out for some
            rounds (see `pace`). 0 to wait for everybody until the deadline.
    """

    deadline: float = 30.0
    server_wait: float = 600.0
    redraws: int = 5
    half: bool = False
    chunk: int = CHUNK
    slow: float = 3.0


@dataclass
class Traffic:
    """The network traffic so far.

    Args:
        received: messages that arrived.
        bytes: their length on the wire.
        seconds: time that rounds spent exchanging, waiting for slower peers included.
        missing: number of messages that did not arrive, by reason.
    """

    received: int = 0
    bytes: int = 0
    seconds: float = 0.0
    missing: Counter[str] = field(default_factory=Counter)


def nan_tensors(tensors: Mapping[str, Tensor], address: Address) -> frozenset[str]:
    """Return the tensors that may hold NaN: extra vectors for the server, which NaN pads."""
    if address.kind != "request":
        return frozenset()
    fields = select_prefix(FIELD, tensors)
    return frozenset(FIELD + name for name, tensor in fields.items() if tensor.ndim)


def split_found(
    found: Mapping[int, Delivery | Missing],
) -> tuple[dict[int, Delivery], dict[int, str]]:
    """Return what arrived, and why the rest is missing, by client."""
    came, lost = {}, {}
    for client, one in found.items():
        if isinstance(one, Delivery):
            came[client] = one
        else:
            lost[client] = one.reason
    return came, lost


PROBE = Address(-1, 0, -1, "probe")
"""The address at which every node answers with a megabyte of zeros, to measure the link."""
# Large enough that the rate of the link counts, and not the way of the question.
PROBE_BYTES = 1 << 20


Journal = Callable[[Mapping[str, Any]], None]
_Answer = TypeVar("_Answer")


class _Verifiers(dict[str, Callable[[bytes, bytes], bool]]):
    """What checks the signatures of each member, made when it is needed first.

    To find a point of the curve from its half takes long: once for a member and not for each
    message, and not for thousands that are never asked.
    """

    def __init__(self, roster: Roster) -> None:
        super().__init__()
        self._roster = roster

    def __missing__(self, name: str) -> Callable[[bytes, bytes], bool]:
        public = identity.decode_public_key(self._roster.member(name).key)
        self[name] = partial(identity.verify, public)
        return self[name]


class Post:
    """One node's mail.

    Args:
        transport: how messages travel.
        roster: the members; this node is the transport's.
        sign: signs bytes with this node's key.
        incarnation: grows with every start of this node.
        terms: deadlines and options.
        deadline: the deadline of a round, when it changes; `terms.deadline` when None.
        journal: receives records of what was asked and what arrived.

    Attributes:
        ahead: the latest round of a peer that says, without a signature, that it has passed this
            node's round: a reason to ask for signed heads.
        last_round: the last round of the run, for which others can still ask.
        on_answer: called with (member, address, message or reason) for every question of this node
            that has ended.
        on_server_wait: called between two questions to a server that does not answer.
        ensure_able: called now and then while this node waits for answers; raises when it cannot go
            on, and they do not count.
        server_has_reached: whether the server has signed that it is in a round or past it; asked
            when it says, without a signature, that it went on without this node.
    """

    def __init__(
        self,
        transport: Transport,
        roster: Roster,
        sign: Callable[[bytes], bytes],
        *,
        incarnation: int = 0,
        terms: Terms | None = None,
        deadline: Callable[[], float] | None = None,
        journal: Journal = lambda event: None,
    ) -> None:
        self.terms = terms or Terms()
        self.transport, self.roster, self.incarnation, self.journal = (
            transport,
            roster,
            incarnation,
            journal,
        )
        self.deadline = deadline or (lambda: self.terms.deadline)
        self.clock = transport.clock
        self.traffic, self.pace = Traffic(), Pace(self.terms.slow)
        self.ahead: int | None = None
        self.last_round = NO_LAST
        self.on_answer: Callable[[str, Address, Delivery | Missing], None] = (
            lambda peer, address, found: None
        )
        self.on_server_wait: Callable[[], None] = lambda: None
        self.ensure_able: Callable[[], None] = lambda: None
        self.server_has_reached: Callable[[int], bool] = lambda round: True
        self.sign, self._newest, self._counting = sign, dict[str, int](), threading.Lock()
        self.use_roster(roster)
        self._pool = ThreadPoolExecutor(_AT_A_TIME, "coterie-fetch")
        self._closing = threading.Event()

    def use_roster(self, roster: Roster) -> None:
        """Continue with another roster of the run: only messages by its keys count from now on."""
        keys = {m.name: m.key for m in self.roster.members}
        # A member with a new key counts its incarnations from the beginning.
        same = [m.name for m in roster.members if keys.get(m.name) == m.key]
        self._newest = select_keys(self._newest, same)
        self.roster, self.host_of = roster, roster.host_of
        self.pace.num_others = len(roster.members) - 1
        self._verify = _Verifiers(roster)

    def close(self) -> None:
        """Stop asking. The transport's owner closes the transport, which ends open questions."""
        self._closing.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def seal(self, tensors: Mapping[str, Tensor], address: Address, to: str = "") -> Parcel:
        """Encode and sign a message of this node.

        Raises:
            Refused: when a value is not finite.
        """
        half = frozenset({"params", "table"} & tensors.keys()) if self.terms.half else frozenset()
        return seal_parcel(
            tensors,
            run=self.roster.run,
            peer=self.transport.name,
            inc=self.incarnation,
            address=address,
            schema=self.roster.schema,
            sign=self.sign,
            to=to,
            half=half,
            gaps=nan_tensors(tensors, address),
            chunk=self.terms.chunk,
        )

    def publish(self, tensors: Mapping[str, Tensor], address: Address, to: str = "") -> None:
        """Store a message for those who ask, or "withheld" when its values are not finite."""
        try:
            what = self.seal(tensors, address, to)
        except Refused as refused:  # a diverged model is not sent; the others go on without it
            self.withhold(address, str(refused), to)
            return
        self.transport.publish(address, what, to=to)

    def withhold(self, address: Address, why: str, to: str = "") -> None:
        """Answer those who ask that this node does not send a message."""
        self.journal(
            {"event": "withheld", "round": address.round, "client": address.client, "why": why}
        )
        self.transport.publish(address, Missing("withheld", address.round, why), to=to)

    def verify_client(self, client: int, signature: bytes, data: bytes) -> bool:
        """Return whether a signature is by the member that hosts a client."""
        return client in self.host_of and self._verify[self.host_of[client]](signature, data)

    def serve_probe(self) -> None:
        """Answer probes of the link to this node."""
        zeros = {"probe": torch.zeros(PROBE_BYTES, dtype=torch.uint8)}
        self.transport.publish_standing(PROBE, lambda at: self.seal(zeros, at), last=PROBE.round)

    def publish_standing(self, tensors: Mapping[str, Tensor], address: Address) -> None:
        """Answer with one message from a round on, to the last one of the run."""
        self.transport.publish_standing(
            address, lambda at: self.seal(tensors, at), last=self.last_round
        )

    def measure_link(self, peer: str, seconds: float) -> Delivery | Missing:
        """Measure the link to a member with one megabyte."""
        return self.fetch(peer, PROBE, Template({"probe": (torch.uint8, (PROBE_BYTES,))}), seconds)

    def fetch(
        self, peer: str, address: Address, template: Template, seconds: float
    ) -> Delivery | Missing:
        """Ask one member for one message, check it, and count the result."""
        return self._count(peer, self._ask_once(peer, address, template, seconds))

    def fetch_newest(self, peer: str, address: Address, template: Template) -> Delivery | Missing:
        """Ask a member for a client's newest message from a round on, check it, and count it.

        That there is no newer one is no loss.
        """
        found = self._ask_once(peer, address, template, self.deadline(), _QUIET)
        if isinstance(found, Missing) and found.reason == "not_ready":
            return found
        return self._count(peer, found)

    def _ask_once(
        self,
        peer: str,
        address: Address,
        template: Template,
        seconds: float,
        patience: float | None = None,
    ) -> Delivery | Missing:
        if self._closing.is_set():
            return Missing("closing")
        expect = Expectation(
            self.roster.run, peer, self.transport.name, address, self.roster.schema, template,
            self._verify[peer], self._newest.get(peer, 0),
        )  # fmt: skip
        found = self.transport.fetch(peer, expect, seconds, patience)
        self.on_answer(peer, address, found)
        return found

    def _count(self, peer: str, found: Delivery | Missing) -> Delivery | Missing:
        if isinstance(found, Delivery):
            with self._counting:
                self._newest[peer] = max(self._newest.get(peer, 0), found.manifest.inc)
                self.traffic.received += 1
                self.traffic.bytes += found.bytes
        elif found.reason != "closing" or not self._closing.is_set():
            with self._counting:
                self.traffic.missing[found.reason] += 1
            if found.reason == "gone" and found.round is not None:
                self.ahead = max(found.round, self.ahead or 0)
        return found

    def _fetch_patiently(
        self, peer: str, address: Address, template: Template, until: float, held: set[str]
    ) -> Wait:
        """Ask one member, and again as long as it says that it has not reached the round.

        Args:
            peer: the member.
            address: of the message.
            template: its tensors.
            until: when the round goes on without it.
            held: members that have held an answer already; this one is added when it does.
        """
        began = asked = self.clock()
        patience, trial = (
            self.pace.patience(peer, until - began),
            self.pace.trial_seconds(peer, address.round),
        )
        whole_round, until = until, min(until, began + max(patience, trial))
        while True:
            left = until - asked
            # What is cut short by the deadline says nothing about the member.
            whole = patience <= left
            found = self._ask_once(peer, address, template, left, min(patience, left))
            late = whole and bool(self.pace.floor) and was_held(found, patience)
            ready = isinstance(found, Delivery) or found.reason != "not_ready"
            took, asked = self.clock() - asked, self.clock()
            again = not ready and peer not in held and bool(self.pace.floor)
            # Where this run is not open, such as at a member that starts again, nothing holds the
            # question until the message is there: it would be asked a thousand times a second.
            if again and took < 0.5 * WAIT * min(patience, left):
                self._closing.wait(max(0.0, min(_PAUSE, until - asked)))
                asked = self.clock()
            if not again or until - asked < _SHORT:
                # One that was slow, and is not there when its trial ends, is slow again.
                late |= not ready and until < whole_round
                held |= {peer} if late else set()
                return Wait(peer, asked - began, late, self._count(peer, found))
            patience *= 2  # few questions, also when a member is far behind

    def fetch_all(
        self, wanted: Iterable[Address], template: Template, seconds: float
    ) -> dict[int, Delivery | Missing]:
        """Ask for messages of several clients, all of them before the deadline.

        Few of one member are asked for at a time, and each member has its own turn, so a member
        that does not answer delays only its own messages, and only as long as its pace allows.
        """
        until, waits, held = self.clock() + seconds, list[Wait](), set[str]()

        def fetch_one(address: Address) -> Delivery | Missing:
            if address.client not in self.host_of:
                return Missing("removed")
            host = self.host_of[address.client]
            if self.clock() >= until or host in held:
                return Missing("timeout")
            waits.append(self._fetch_patiently(host, address, template, until, held))
            return waits[-1].found

        addresses, of_host = list(wanted), dict[str, list[Address]]()
        for address in addresses:
            of_host.setdefault(self.host_of.get(address.client, ""), []).append(address)
        # Lane k has each fourth message of a member. The first lanes of all members come first, so
        # that the threads begin with all members.
        lanes = []
        for lane in range(_OF_A_MEMBER):
            lanes += [mine[lane::_OF_A_MEMBER] for mine in of_host.values()]

        def fetch_in_turn(lane: list[Address]) -> dict[int, Delivery | Missing]:
            return {address.client: fetch_one(address) for address in lane}

        found: dict[int, Delivery | Missing] = {}
        for answers in self._await_all(partial(fetch_in_turn, lane) for lane in lanes if lane):
            found |= answers
        for slow in self.pace.judge_waits(addresses[0].round, waits) if addresses else ():
            self._record_slow(slow, addresses[0].round)
        return {address.client: found[address.client] for address in addresses}

    def _record_slow(self, slow: Slow, round: int) -> None:
        """Record who was slow, and from which round on it is asked again."""
        others = self.pace.typical_seconds(slow.peer)
        text = f"{slow.peer} took {slow.seconds:.1f} s, others usually {others:.1f} s; it is left "
        text += f"out until round {slow.until}"
        self.journal({"event": "slow", "round": round, "peer": slow.peer, "until": slow.until,
                      "seconds": slow.seconds, "text": text})  # fmt: skip

    def _await_all(self, questions: Iterable[Callable[[], _Answer]]) -> list[_Answer]:
        """Ask side by side, and wait for all answers as long as this node can go on."""
        try:
            asked = list(map(self._pool.submit, questions))
        except RuntimeError:  # the pool is shut down
            raise TransportError("this node is closed and sends no more requests") from None
        try:
            while wait(asked, _LOOK).not_done:
                self.ensure_able()
            # Once more, for what failed while the last answer came.
            self.ensure_able()
            return [one.result() for one in asked]
        finally:
            # After an error, questions that have not begun are dropped.
            for one in asked:
                one.cancel()

    def fetch_from_server(
        self,
        address: Address,
        template: Template,
        check: Callable[[Mapping[str, Tensor]], None] = lambda tensors: None,
    ) -> Delivery:
        """Ask the server until it answers; a round cannot continue without it.

        Args:
            address: of the answer.
            template: its tensors.
            check: raises `Refused` when they do not fit together; the answer then counts as one
                that has not come.

        Raises:
            RoundMissed: when the server continued without this node's message.
            QuorumError: when no server answers for `Terms.server_wait` seconds, or when this node
                is closed.
        """
        # The pause doubles up to five seconds: a server that is just late is met at once, and one
        # that is away for long is not asked for nothing by all its clients.
        until, pause = time.monotonic() + self.terms.server_wait, 0.2
        while True:
            # The server itself waits a deadline for its clients before it answers.
            seconds = 2 * self.deadline() + 1
            (found,) = self._await_all(
                [partial(self.fetch, self.roster.server, address, template, seconds)]
            )
            if isinstance(found, Delivery):
                try:
                    check(found.tensors)
                    return found
                except Refused as refused:
                    found = self.record_refusal(refused)
            if found.reason in ("absent", "gone", "withheld") and self.server_has_reached(
                address.round
            ):
                raise RoundMissed(found.reason)
            self.journal(
                {
                    "event": "waiting",
                    "round": address.round,
                    "for": self.roster.server,
                    "why": found.reason,
                }
            )
            self.on_server_wait()
            if time.monotonic() > until or self._closing.wait(pause):
                # The server may come back later: that is no bad input, which ends a node for good.
                raise QuorumError(
                    f"the server {self.roster.server} has not answered for "
                    f"{self.terms.server_wait:.0f} s "
                    f"({found.text or found.reason}); start it again: it goes on from its "
                    "checkpoint"
                )
            pause = min(2 * pause, 5.0)

    def record_refusal(self, refused: Refused) -> Missing:
        """Count and record an answer of the server that cannot be used."""
        self.traffic.missing[f"refused:{refused.code}"] += 1
        server, text = self.roster.server, str(refused)
        self.journal({"event": "refused", "peer": server, "code": refused.code, "text": text})
        return Missing(f"refused:{refused.code}", None, text)
