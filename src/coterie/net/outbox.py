"""The outbox: a node's published messages, and open questions for future ones.

It answers from memory and holds questions about a coming round. Its size is bounded: the last few
rounds are kept, each asker has few questions open, and questions about old rounds are answered with
a reason. It is independent of the network; every transport serves from one.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from coterie.errors import TransportError
from coterie.net.wire import NEWEST, Address, Parcel

KEEP = 8  # rounds with messages: a slower reader still gets the message of its own round
KEEP_BYTES = 256 * 1024 * 1024  # two rounds are kept, whatever their size
KEEP_SEALED = 64 * 1024 * 1024  # bytes of standing messages, by the rounds that were asked for
NO_LAST = (1 << 31) - 1
"""The last round that an address can name."""


@dataclass(frozen=True)
class Missing:
    """Why a message did not arrive; a value, not an exception.

    Args:
        reason: "unreachable" (no node answered), "removed" (its member was removed), "timeout",
            "not_ready" (it has not reached that round), "gone" (it is past it), "busy" (too many
            open questions), "full" (no room for one more link; ask again), "withheld" (its model is not finite), "absent" (the server continued
            without this client), "forbidden", "closing", or "refused:CODE" for a message that
            failed a check.
        round: the peer's round, when known.
        text: details for the log.
    """

    reason: str
    round: int | None = None
    text: str = ""


REASONS = ("not_ready", "gone", "busy", "full", "withheld", "absent", "forbidden", "closing")
Answer = Callable[[Parcel | Missing], None]


@dataclass(frozen=True)
class _Waiting:
    asker: str
    address: Address
    until: float
    answer: Answer


@dataclass(frozen=True)
class _Standing:
    first: int
    last: int
    seal: Callable[[Address], Parcel]


class Outbox:
    """A node's published messages and open questions.

    Args:
        per_asker: questions that one member may have open at once, those being sent included.
        clock: a monotonic clock in seconds.

    Attributes:
        lags: by how many rounds each asker's newest question for a model was behind this node, and
            when it came.
        permit: called with (asker, address, answer) before each answer is given; a message that it
            does not permit is not sent. It must not wait.
    """

    PER_ASKER: ClassVar = 8

    def __init__(
        self, *, per_asker: int = PER_ASKER, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.per_asker, self._clock = per_asker, clock
        self._published: dict[Address, tuple[str, Parcel | Missing]] = {}
        self._standing: dict[tuple[int, int, str], _Standing] = {}
        # standing messages that were requested lately
        self._sealed: dict[Address, Parcel] = {}
        self._waiting: dict[tuple[str, Address], _Waiting] = {}
        self._sending: dict[str, int] = {}
        self._newest = -2
        self.lags: dict[str, tuple[int, float]] = {}
        self.permit: Callable[[str, Address, Parcel | Missing], bool] = (
            lambda asker, address, what: True
        )
        self._closed = False
        self._change = threading.Condition()
        self._sweeper = threading.Thread(target=self._sweep, name="coterie-outbox", daemon=True)
        self._sweeper.start()

    def publish(self, address: Address, what: Parcel | Missing, *, to: str = "") -> None:
        """Store a message (or why there is none) and answer the questions that wait for it.

        Args:
            address: its address. Only the last few rounds are kept.
            what: the message.
            to: the only node that may get it; "" for all members.
        """
        with self._change:
            if self._closed:
                raise TransportError("this node is closed; it publishes nothing any more")
            self._published[address] = (to, what)
            if address.round > self._newest:
                self._newest = address.round
                self._drop_old()
            answers = self._take_due()
        # Outside of the lock: an answer may send bytes, or come back to this outbox.
        _deliver_answers(answers)

    def publish_standing(
        self, address: Address, seal: Callable[[Address], Parcel], *, last: int = NO_LAST
    ) -> None:
        """Answer with the same message in this round and later ones.

        Args:
            address: the address in the first round.
            seal: signs the message for a round.
            last: the last round; each round that is asked for costs a signature and a line of the
                audit log, so members must not choose it.
        """
        with self._change:
            key = address.exchange, address.client, address.kind
            self._standing[key] = _Standing(address.round, last, seal)
            # They are of the older message.
            self._sealed.clear()
            answers = self._take_due()
        _deliver_answers(answers)

    def ask(self, asker: str, address: Address, wait: float, answer: Answer) -> None:
        """Answer a question now, when its message is published, or after `wait` seconds.

        Args:
            asker: the asking member, as the network identifies it.
            address: the address of the message.
            wait: seconds to wait for it.
            answer: called once, unless the question is withdrawn; with a parcel, `note_sent` must
                follow when it is delivered or given up.
        """
        with self._change:
            # A bound on how long an asker can keep a question open.
            waiting = _Waiting(asker, address, self._clock() + max(0.0, min(wait, 3600.0)), answer)
            if address.kind == "model":
                self.lags[asker] = self._newest - address.round, self._clock()
            # The same question again replaces the older one, which is answered at once.
            older = self._waiting.pop((asker, address), None)
            answers = [] if older is None else [(older.answer, self._make_missing("busy"))]
            if self._closed:
                answers.append((answer, self._make_missing("closing")))
            elif self._count_open(asker) >= self.per_asker:
                busy = self._make_missing("busy")
                # `permit` writes the refusal down. It carries no message, so the result does not
                # matter.
                self.permit(asker, address, busy)
                answers.append((answer, busy))
            else:
                self._waiting[asker, address] = waiting
                answers += self._take_due()
                # The sweeper waits for the earliest limit, which may be that of this question.
                self._change.notify_all()
        _deliver_answers(answers)

    def withdraw(self, asker: str, address: Address, answer: Answer) -> bool:
        """Drop a question whose asker is gone; its place is free, and it gets no answer.

        Returns:
            Whether it was open. Else its answer has been given, or will be at once.
        """
        with self._change:
            waiting = self._waiting.get((asker, address))
            # The same question again is another one, of an asker that is there.
            if waiting is None or waiting.answer != answer:
                return False
            del self._waiting[asker, address]
            return True

    def note_sent(self, asker: str) -> None:
        """Note that a message handed out to an asker has been delivered or given up."""
        with self._change:
            left = self._sending.get(asker, 0) - 1
            self._sending[asker] = left
            if left <= 0:
                self._sending.pop(asker, None)

    def close(self) -> None:
        """Answer every open question with "closing"."""
        with self._change:
            self._closed = True
            answers = [(w.answer, self._make_missing("closing")) for w in self._waiting.values()]
            self._waiting.clear()
            self._change.notify_all()
        _deliver_answers(answers)
        self._sweeper.join()

    @property
    def current_load(self) -> tuple[int, int]:
        """The numbers of stored messages and of open questions."""
        with self._change:
            return len(self._published), len(self._waiting)

    def _drop_old(self) -> None:
        rounds = sorted({a.round for a in self._published}, reverse=True)
        sizes = dict.fromkeys(rounds, 0)
        for address, (_, what) in self._published.items():
            if isinstance(what, Parcel):
                sizes[address.round] += what.size
        kept, total = set(rounds[:2]), 0
        for round in rounds[:KEEP]:
            total += sizes[round]
            kept |= {round} if total <= KEEP_BYTES else set()
        self._published = {a: what for a, what in self._published.items() if a.round in kept}

    def _count_open(self, asker: str) -> int:
        return sum(1 for name, _ in self._waiting if name == asker) + self._sending.get(asker, 0)

    def _make_missing(self, reason: str) -> Missing:
        return Missing(reason, self._newest)

    def _find_address(self, asked: Address) -> Address:
        """Return the address of the newest message that a question is for, if it is for that."""
        if asked.kind != NEWEST:
            return asked
        rounds = [
            one.round
            for one in self._published
            if (one.exchange, one.client, one.kind) == (asked.exchange, asked.client, "model")
        ]
        newest = max(rounds, default=asked.round - 1)
        if newest < asked.round:
            return asked
        return replace(asked, round=newest, kind="model")

    def _find_answer(self, waiting: _Waiting, address: Address) -> Parcel | Missing | None:
        if address in self._published:
            to, what = self._published[address]
            if to not in ("", waiting.asker):
                return self._make_missing("forbidden")
            # The round is that of now: it shows the asker how far this node is.
            return what if isinstance(what, Parcel) else replace(what, round=self._newest)
        standing = self._standing.get((address.exchange, address.client, address.kind))
        if standing is not None and standing.first <= address.round <= standing.last:
            return self._seal_standing(address, standing.seal)
        if address.kind == NEWEST:
            # At once: who asks for the newest goes on with what it has.
            return self._make_missing("not_ready")
        if address.round < self._newest:
            return self._make_missing("gone")
        return self._make_missing("not_ready") if waiting.until <= self._clock() else None

    def _seal_standing(self, address: Address, seal: Callable[[Address], Parcel]) -> Parcel:
        """A standing message, sealed once for all who ask for it."""
        if address not in self._sealed:
            self._sealed[address] = seal(address)
            while (
                len(self._sealed) > 1
                and sum(parcel.size for parcel in self._sealed.values()) > KEEP_SEALED
            ):
                # The oldest one: a dictionary keeps the order of insertion.
                del self._sealed[next(iter(self._sealed))]
        return self._sealed[address]

    def _take_due(self) -> list[tuple[Answer, Parcel | Missing]]:
        """Take the questions that can be answered now."""
        out: list[tuple[Answer, Parcel | Missing]] = []
        for key, waiting in list(self._waiting.items()):
            address = self._find_address(waiting.address)
            found = self._find_answer(waiting, address)
            if found is not None:
                del self._waiting[key]
                if not self.permit(waiting.asker, address, found):
                    # A message that is not written down is not sent.
                    found = self._make_missing("closing")
                if isinstance(found, Parcel):
                    self._sending[waiting.asker] = self._sending.get(waiting.asker, 0) + 1
                out.append((waiting.answer, found))
        return out

    def _sweep(self) -> None:
        while True:
            with self._change:
                if self._closed:
                    return
                first = min((w.until for w in self._waiting.values()), default=None)
                self._change.wait(None if first is None else max(0.0, first - self._clock()))
                answers = self._take_due()
            _deliver_answers(answers)


def _deliver_answers(answers: Sequence[tuple[Answer, Parcel | Missing]]) -> None:
    for answer, what in answers:
        answer(what)
