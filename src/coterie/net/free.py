"""Free pace: a node reads the newest message of each peer that it chooses, and waits for nobody.

Each node has rounds of its own. It publishes its messages under the number of its round, asks for
the newest ones of the peers that it chooses, and goes on with what is here. How old a message is
cannot be said without a common clock; at most how old it is, can: a member whose signed head said
in the reader's round j that it was not in round r yet published its message r later. So a message
is no older than the reader's rounds since then. What was read goes to the journal, from which a
run is repeated (see `replay`).
"""

import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from coterie._util.mappings import number_items, prefix_keys, select_prefix
from coterie.errors import ConfigError, TransportError
from coterie.exchange.base import Inbox, Message, check_peers, make_inbox
from coterie.exchange.narrowed import narrow_message
from coterie.functional import metrics
from coterie.methods.base import Info, Method, PeerMethod, Round, State, publish_all
from coterie.net.exchange import RemoteExchange, cut_row, join_messages, make_template
from coterie.net.head import Head
from coterie.net.payload import Template
from coterie.net.post import Post
from coterie.net.transport import Delivery
from coterie.net.wire import NEWEST, Address
from coterie.rng import Rng
from coterie.runtime.loop import Loop

READ = "read"
"""The event of a journal that says what was read in a round."""
_LEAST = 0.25  # seconds for which an answer is waited for at least
_ROOM = 4.0  # how many times what answers of others usually take
_FIRST = 3.0  # seconds for the first answer of a member, where `slow` is 0
_TIMES = 5  # newest times of a member that are kept
_LOOK = 0.05  # seconds between two looks at whether this node can go on
_OF_A_MEMBER = 4  # messages that are asked for at a time
_AT_A_TIME = 64  # of all members
_WATCHED = 32  # members that are asked for their heads in a round; of more, in turn
_WATCHING = 8  # at a time
_HEADS = 256  # rounds of a member of which it is known when it was in them


# ---------------------------------------------------------------- how old a message is


@dataclass(frozen=True)
class Asked:
    """A question for a member's head.

    Args:
        name: the member.
        round: the reader's round when it asked.
        time: when, by the reader's clock.
        floor: what was known of the member then: its incarnation and the newest round.
    """

    name: str
    round: int
    time: float
    floor: tuple[int, int]


@dataclass
class _Known:
    incarnation: int = 0
    round: int = -1  # the newest one, of a signed head or message
    is_done: bool = False
    # By round of the member: in which round the reader last asked and it was in that one, and when.
    heads: dict[int, tuple[int, float]] = field(default_factory=dict)


class Ages:
    """How old the messages of others are at most, by their signed heads.

    Args:
        began: when the reader's run began, by its clock.
    """

    def __init__(self, began: float) -> None:
        self.began = began
        self._members: dict[str, _Known] = {}
        self._lock = threading.Lock()

    def ask(self, name: str, round: int, now: float) -> Asked:
        """Note that a member is asked for its head in a round of the reader."""
        with self._lock:
            known = self._members.setdefault(name, _Known())
            return Asked(name, round, now, (known.incarnation, known.round))

    def note_head(self, asked: Asked, head: Head) -> bool:
        """Take in a signed head; return whether it counts: one that goes back in rounds does not.

        Args:
            asked: the question.
            head: the answer.
        """
        incarnation, round = asked.floor
        if head.inc < incarnation or head.round < round:
            return False
        with self._lock:
            known = self._members.setdefault(asked.name, _Known())
            known.incarnation = max(known.incarnation, head.inc)
            known.round = max(known.round, head.round)
            known.is_done |= head.state == "done"
            before = known.heads.get(head.round, (-1, self.began))
            known.heads[head.round] = max(before, (asked.round, asked.time))
            while len(known.heads) > _HEADS:
                del known.heads[min(known.heads)]
        return True

    def note_message(self, name: str, incarnation: int, round: int) -> None:
        """Take in that a member has signed a message of a round."""
        with self._lock:
            known = self._members.setdefault(name, _Known())
            known.incarnation = max(known.incarnation, incarnation)
            known.round = max(known.round, round)

    def first_round(self, name: str) -> int:
        """Return the round below which no message of a member is its newest.

        Who has signed that it is in a round has published the message of the round before.
        """
        with self._lock:
            return max(0, self._members.setdefault(name, _Known()).round - 1)

    def measure(self, name: str, round: int, reader: int, now: float) -> tuple[int, float]:
        """Return how old a message is at most: in the reader's rounds, and in seconds.

        What a member that is done published last is its model for good, and never old.

        Args:
            name: its sender.
            round: of the sender.
            reader: the reader's round.
            now: the reader's time.
        """
        with self._lock:
            known = self._members.setdefault(name, _Known())
            if known.is_done and round >= known.round - 1:
                return 0, 0.0
            # The newest question to which the member was not in that round yet.
            before = [at for number, at in known.heads.items() if number < round]
            begun, when = max(before, default=(-1, self.began))
        return max(0, reader - 1 - begun), max(0.0, now - when)

    def forget(self, name: str) -> None:
        """Forget a member, which has another key."""
        with self._lock:
            self._members.pop(name, None)

    def snapshot(self, number_of: Mapping[str, int]) -> dict[str, Tensor]:
        """Return what is known as tensors; members by number."""
        states, heads, times = [], [], []
        with self._lock:
            for name, known in sorted(self._members.items()):
                if name not in number_of:
                    continue
                number = number_of[name]
                states.append([number, known.incarnation, known.round, known.is_done])
                for round, (reader, when) in sorted(known.heads.items()):
                    heads.append([number, round, reader])
                    times.append(when)
        return {
            "states": torch.tensor(states, dtype=torch.int64).reshape(-1, 4),
            "heads": torch.tensor(heads, dtype=torch.int64).reshape(-1, 3),
            "times": torch.tensor([self.began, *times], dtype=torch.float64),
        }

    def restore(self, tensors: Mapping[str, Tensor], name_of: Mapping[int, str]) -> None:
        """Restore the result of `snapshot`."""
        began, *times = tensors["times"].tolist()
        self.began = began
        for number, incarnation, round, done in tensors["states"].tolist():
            if number in name_of:
                self._members[name_of[number]] = _Known(incarnation, round, bool(done))
        for (number, round, reader), when in zip(tensors["heads"].tolist(), times, strict=True):
            if number in name_of:
                self._members[name_of[number]].heads[round] = reader, when


# ---------------------------------------------------------------- what has come


def _submit(pool: ThreadPoolExecutor, work: Callable[..., None], *arguments: Any) -> None:
    """Do work in the background.

    Raises:
        TransportError: when this node is closed.
    """
    try:
        pool.submit(work, *arguments)
    except RuntimeError:  # the pool is shut down
        raise TransportError("this node is closed and sends no more requests") from None


@dataclass(frozen=True)
class _Kept:
    delivery: Delivery
    key: str  # of the member that signed it


class NewestMessages:
    """The newest message of each client that has come to this node.

    Questions go on in the background; a round waits for an answer no longer than a few times what
    the other members usually take, and for a member that was silent for longer not at all until it
    has answered.

    Args:
        post: asks.
        ages: what is known of the members.
    """

    def __init__(self, post: Post, ages: Ages) -> None:
        self.post, self.ages = post, ages
        self._kept: dict[int, _Kept] = {}
        self._first: dict[int, int] = {}  # of a client: older rounds were read before a restart
        self._busy: dict[str, dict[int, Future[str]]] = {}
        self._silent: set[str] = set()
        self._times: dict[str, deque[float]] = {}
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(_AT_A_TIME, "coterie-newest")

    def close(self) -> None:
        """Ask no more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def take(self, wanted: Iterable[int], template: Template) -> dict[int, Delivery | str]:
        """Ask for the newest messages of clients; return the newest that are here.

        Args:
            wanted: the clients.
            template: of a message.

        Returns:
            A message of each client, or the reason why there is none.
        """
        began, host_of = time.monotonic(), self.post.host_of
        out: dict[int, Delivery | str] = {}
        of_host: dict[str, list[int]] = {}
        for client in wanted:
            if client in host_of:
                of_host.setdefault(host_of[client], []).append(client)
            else:
                out[client] = "removed"
        asked: dict[int, Future[str]] = {}
        until: dict[int, float] = {}
        for name, clients in of_host.items():
            patience = began + self._patience(name)
            for client, answer in self._ask(name, clients, template).items():
                asked[client], until[client] = answer, patience
        self._await(asked, until)
        for name, clients in of_host.items():
            late = False
            for client in clients:
                reason = "timeout"
                if client in asked and asked[client].done():
                    reason = asked[client].result()
                else:
                    late = True
                out[client] = self._find(name, client, reason)
            if late:
                with self._lock:
                    if name in self._busy:
                        self._silent.add(name)
        return out

    def _find(self, name: str, client: int, reason: str) -> Delivery | str:
        """Return the newest message of a client that is here, unless its newest is withheld."""
        with self._lock:
            kept = self._kept.get(client)
        if kept is None or reason == "withheld":
            return reason or "not_ready"
        if kept.key != self.post.roster.member(name).key:
            return "removed"
        return kept.delivery

    def _patience(self, name: str) -> float:
        """Return the seconds for which this node waits for answers of a member."""
        first = self.post.terms.slow or _FIRST
        with self._lock:
            if name in self._silent:
                return 0.0
            if name not in self._times:
                return first
            own = statistics.median(self._times[name])
            others = [statistics.median(t) for n, t in self._times.items() if n != name]
        # By what others take: a member must not raise its own limit by being slow, answer by
        # answer. With nobody else there is a bound at least.
        usual = statistics.median_low(others) if others else min(own, first / _ROOM)
        return max(_LEAST, _ROOM * usual)

    def _ask(self, name: str, clients: list[int], template: Template) -> dict[int, Future[str]]:
        """Ask a member that is not being asked already; a few of its messages at a time."""
        with self._lock:
            if name in self._busy:
                return {c: self._busy[name][c] for c in clients if c in self._busy[name]}
            answers: dict[int, Future[str]] = {client: Future() for client in clients}
            self._busy[name] = answers
            # A member that is silent holds one thread at a time.
            lanes = 1 if name in self._silent else min(_OF_A_MEMBER, len(clients))
        began, left = time.monotonic(), [len(answers)]

        def ask_in_turn(lane: list[int]) -> None:
            for client in lane:
                reason, failure = "closing", None
                try:
                    reason = self._ask_one(name, client, template)
                except Exception as error:  # it is raised where the answer is waited for
                    failure = error
                with self._lock:
                    left[0] -= 1
                    if not left[0]:
                        self._end(name, time.monotonic() - began, reason)
                if failure is None:
                    answers[client].set_result(reason)
                else:
                    answers[client].set_exception(failure)

        for start in range(lanes):
            _submit(self._pool, ask_in_turn, clients[start::lanes])
        return answers

    def _end(self, name: str, seconds: float, reason: str) -> None:
        """Note that all questions to a member have ended; the lock is held."""
        del self._busy[name]
        if reason in ("timeout", "unreachable", "busy", "full"):
            return
        self._silent.discard(name)
        self._times.setdefault(name, deque(maxlen=_TIMES)).append(seconds)

    def _ask_one(self, name: str, client: int, template: Template) -> str:
        """Ask for a client's newest message, if it is newer than the one here.

        Returns:
            Why none came; "" when one did.
        """
        if self.post.host_of.get(client) != name:
            return "removed"
        key = self.post.roster.member(name).key
        with self._lock:
            kept = self._kept.get(client)
            first = self._first.get(client, 0)
            if kept is not None and kept.key == key:
                first = kept.delivery.manifest.round + 1
        first = max(first, self.ages.first_round(name))
        found = self.post.fetch_newest(name, Address(first, 0, client, NEWEST), template)
        if not isinstance(found, Delivery):
            return found.reason
        self.ages.note_message(name, found.manifest.inc, found.manifest.round)
        with self._lock:
            self._kept[client] = _Kept(found, key)
        return ""

    def _await(self, asked: Mapping[int, Future[str]], until: Mapping[int, float]) -> None:
        """Wait for answers, for each until its time."""
        while True:
            now = time.monotonic()
            left = [c for c, answer in asked.items() if not answer.done() and until[c] > now]
            if not left:
                self.post.ensure_able()
                return
            seconds = min(_LOOK, min(until[c] for c in left) - now)
            wait([asked[c] for c in left], max(0.0, seconds))
            self.post.ensure_able()

    def snapshot(self) -> Tensor:
        """Return the round of the newest message of each client, as pairs."""
        with self._lock:
            known = dict(self._first)
            for client, kept in self._kept.items():
                known[client] = kept.delivery.manifest.round
        return torch.tensor(sorted(known.items()), dtype=torch.int64).reshape(-1, 2)

    def restore(self, pairs: Tensor) -> None:
        """Restore the result of `snapshot`: older messages are not read."""
        self._first = {client: round for client, round in pairs.tolist()}


# ---------------------------------------------------------------- the exchange


@dataclass(frozen=True)
class Read:
    """A message that was read.

    Args:
        round: of its sender.
        age: at most, in rounds of the reader.
        age_seconds: at most, in seconds.
    """

    round: int
    age: int
    age_seconds: float


class FreeExchange(RemoteExchange):
    """The exchange of a node that waits for nobody; see `RemoteExchange`.

    Args:
        post: publishes and fetches single messages.
        width: numbers of a model in a message.
        max_staleness: rounds of this node after which a message is too old; None for never.
        ask_head: asks a member for its signed head; None when it does not answer.
    """

    def __init__(
        self,
        post: Post,
        width: int | None = None,
        *,
        max_staleness: int | None = None,
        ask_head: Callable[[str], Head | None],
    ) -> None:
        self.max_staleness, self._ask_head = max_staleness, ask_head
        self.ages = Ages(time.time())
        self.newest = NewestMessages(post, self.ages)
        self.found: dict[int, Read] = {}
        self._counted: dict[int, int] = {}  # of each client: the round of the message read last
        self.is_watching = False  # whether others are asked how far they are
        # Whether nobody who was asked in this round has published anything yet.
        self.is_early = False
        self._watching: set[str] = set()
        self._rewound: deque[dict[str, Any]] = deque()  # heads that went back in rounds
        self._turn = 0
        self._watchers = ThreadPoolExecutor(_WATCHING, "coterie-watch")
        self._keys: dict[str, str] = {}
        super().__init__(post, width)

    def close(self) -> None:
        """Ask no more."""
        self.newest.close()
        self._watchers.shutdown(wait=False, cancel_futures=True)

    def begin_round(self, rng: Rng) -> None:
        """Start a round, and ask others in the background how far they are."""
        super().begin_round(rng)
        self.found, self.is_early = {}, False
        # Nobody is left out for being slow: nobody waits for it.
        self._slow, self._down = set(), self._unreachable_clients()
        # Here, since the journal takes lines of one thread.
        while self._rewound:
            self.post.journal({"event": "refused", "round": rng.round, **self._rewound.popleft()})
        if self.is_watching:
            self._watch()

    def readmit_slow(self, readable: Bool[Tensor, "*clients population"]) -> None:
        """Do nothing: nobody is left out for being slow."""

    @property
    def has_read(self) -> bool:
        """Whether a message of another member was read in this round."""
        return any(self.post.host_of.get(client) != self.name for client in self.found)

    def _watch(self) -> None:
        """Ask members how far they are, a number of them in turn."""
        others = [m.name for m in self.roster.members if m.name != self.name]
        for member in self.roster.members:
            if self._keys.setdefault(member.name, member.key) != member.key:
                # A member with a new key counts its incarnations from the beginning.
                self._keys[member.name] = member.key
                self.ages.forget(member.name)
        number = min(_WATCHED, len(others))
        for place in range(number):
            name = others[(self._turn + place) % len(others)]
            if name not in self._watching:
                self._watching.add(name)
                _submit(self._watchers, self._look_at, name, self._rng.round)
        self._turn += number

    def _look_at(self, name: str, round: int) -> None:
        """Ask a member for its head."""
        try:
            asked = self.ages.ask(name, round, time.time())
            head = self._ask_head(name)
            if head is not None and not self.ages.note_head(asked, head):
                text = f"its head is of round {head.round}, after one of {asked.floor[1]}"
                self._rewound.append({"peer": name, "code": "rewound", "text": text})
        finally:
            self._watching.discard(name)

    def pull(self, message: Message, peers: Int[Tensor, "clients peers"]) -> Inbox:
        """Publish the hosted clients' messages, and read the newest of the chosen peers that came.

        See `Exchange.pull`.

        Raises:
            ConfigError: when it is not the first exchange of the round.
        """
        if self._next_number():
            raise ConfigError(
                "a method pulled twice in a round; with pace = 'free' a round has one exchange"
            )
        started, own = time.monotonic(), self._own.active
        check_peers(own, peers, self.roster.population)
        board = self._publish_board(replace(message, ids=own))
        assert board.ids is not None
        wanted = sorted(set(peers[peers >= 0].tolist()) - set(board.ids.tolist()))
        self.is_asking |= bool(wanted or self._down)
        template = make_template(message, self._address_of(0, -1))
        came, lost = self._judge(self.newest.take(wanted, template))
        self.is_early = bool(lost) and set(lost.values()) == {"not_ready"}
        seconds = time.monotonic() - started
        self.post.traffic.seconds += seconds
        read = []
        for client, delivery in came.items():
            one, m = self.found[client], delivery.manifest
            read.append({"client": client, "round": m.round, "age": one.age,
                         "age_seconds": one.age_seconds, "sha256": m.sha256})  # fmt: skip
        # All that a replay needs: who could be chosen, and what was read.
        self.post.journal({
            "event": READ, "round": self._rng.round, "readers": own.tolist(), "read": read,
            "missing": prefix_keys("", lost), **self._members_of(lost),
            **self._describe_reach(self._down), "seconds": seconds,
        })  # fmt: skip
        rows = [(client, delivery.tensors) for client, delivery in came.items()]
        inbox = make_inbox(join_messages(board, rows), own, peers, self.roster.population)
        return mark_reads(inbox, self.found, self._counted)

    def _judge(
        self, found: Mapping[int, Delivery | str]
    ) -> tuple[dict[int, Delivery], dict[int, str]]:
        """Return the messages that may be read, and why there are none of others."""
        came, lost, now = {}, {}, time.time()
        removed = set(self.roster.removed)
        for client, one in sorted(found.items()):
            if client in removed:
                one = "removed"
            if isinstance(one, str):
                lost[client] = one
                continue
            host, round = self.post.host_of[client], one.manifest.round
            age, seconds = self.ages.measure(host, round, self._rng.round, now)
            if self.max_staleness is not None and age > self.max_staleness:
                lost[client] = "stale"
                continue
            came[client], self.found[client] = one, Read(round, age, seconds)
        return came, lost

    def _publish_board(self, message: Message) -> Message:
        """Publish what the clients here send in this round, stopped clients included."""
        board = self._own.publish_message(message)
        assert board.ids is not None
        for row, client in enumerate(board.ids.tolist()):
            self.post.publish(cut_row(board, row), self._address_of(0, client))
            self.found[client] = Read(self._rng.round, 0, 0.0)
        return board

    def publish_last(self, round: int, message: Message | None) -> None:
        """Publish what the clients here have at the end, for those who still train.

        Args:
            round: the round after the last.
            message: of the clients that have not stopped; None when all have.
        """
        last = self._own.last.get(0)
        if message is None and last is not None:
            message = last.take_rows(torch.zeros(0, dtype=torch.int64))
        if message is None:
            return
        super().begin_round(self._rng.at_round(round))
        self._publish_board(message)

    def _publish_stopped(self, clients: Iterable[int]) -> None:
        """Do nothing: what stopped clients send is published in each round."""

    def snapshot(self) -> dict[str, Tensor]:
        """Return the state that a later round depends on, for a checkpoint."""
        number_of = number_items([m.name for m in self.roster.members])
        counted = torch.tensor(sorted(self._counted.items()), dtype=torch.int64).reshape(-1, 2)
        known = prefix_keys("ages.", self.ages.snapshot(number_of))
        return super().snapshot() | known | {"newest": self.newest.snapshot(), "counted": counted}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the result of `snapshot`."""
        super().restore(tensors)
        name_of = dict(enumerate(m.name for m in self.roster.members))
        self.ages.restore(select_prefix("ages.", tensors), name_of)
        self.newest.restore(tensors["newest"])
        self._counted = {client: round for client, round in tensors["counted"].tolist()}


def mark_reads(inbox: Inbox, found: Mapping[int, Read], counted: dict[int, int]) -> Inbox:
    """Return an inbox with the age of each message; a message costs bytes when it is read first.

    Args:
        inbox: of this round.
        found: what was read of each client.
        counted: the round of the message of each client that was read last; it is brought up to
            date.
    """
    ages, new = torch.zeros_like(inbox.age), torch.ones_like(inbox.mask)
    for client, one in found.items():
        slots = inbox.peers == client
        ages[slots] = one.age
        if counted.get(client) == one.round:
            new[slots] = False
    for client, one in found.items():
        if bool((inbox.peers == client).any()):
            counted[client] = one.round
    return replace(inbox, age=torch.where(inbox.mask, ages, 0), bytes=inbox.bytes * new)


# ---------------------------------------------------------------- the loop


class FreeLoop(Loop):
    """The rounds of the clients of one node that waits for nobody, and of their repetition.

    Attributes:
        measure_times: returns, of a round that ends, the seconds since the warm-up and the share of
            them in which the node did not compute.
    """

    measure_times: Callable[[int], tuple[float, float]] = staticmethod(
        lambda index: (math.nan, math.nan)
    )

    def _make_round(self, index: int, rows: Tensor, cohort: Tensor) -> Round:
        rnd = super()._make_round(index, rows, cohort)
        return replace(rnd, reachable=rnd.reachable & self._free.reachable_clients())

    @property
    def _free(self) -> Any:
        return self.exchange

    def _apply_method(self, rnd: Round, state: State) -> tuple[State, Info]:
        new, info = super()._apply_method(rnd, state)
        if "peers" not in info:
            return new, info
        ages = torch.full(info["peers"].shape, -1, dtype=torch.int64)
        seconds = torch.full(info["peers"].shape, math.nan, dtype=torch.float64)
        for client, one in self._free.found.items():
            slots = info["peers"] == client
            ages[slots], seconds[slots] = one.age, one.age_seconds
        return new, {**info, "ages": ages, "age_seconds": seconds}

    def _finish_round(self, index: int, rows: Int[Tensor, " rows"], info: Info) -> None:
        super()._finish_round(index, rows, info)
        if index < 0:
            return
        number = len(self.task)
        elapsed, idle = self.measure_times(index)
        values = {
            metrics.ELAPSED.name: torch.full((number,), elapsed, dtype=torch.float64),
            metrics.OWN_ROUNDS.name: torch.full((number,), index + 1),
            metrics.IDLE_SHARE.name: torch.full((number,), idle, dtype=torch.float64),
        }
        if "ages" in info:
            read = info["ages"] >= 0
            if "arrived" in info:
                read = read & info["arrived"]
            for name, value in (
                (metrics.STALENESS.name, info["ages"].double()),
                (metrics.STALENESS_SECONDS.name, info["age_seconds"]),
            ):
                mean = torch.full((number,), math.nan, dtype=torch.float64)
                mean[rows] = torch.where(read, value, 0).sum(1) / read.sum(1)
                values[name] = mean
        self.record.add_metrics(index, self.task.ids, "train", "current", values)

    def publish_last(self) -> None:
        """Publish the models of the end, which no exchange of a round has sent yet."""
        assert isinstance(self.method, PeerMethod)
        if not self.method.exchanges or self.order != "exchange_first":
            return
        rows = (~self.tracker.stopped).nonzero().flatten()
        message = None
        if len(rows):
            task = self.task.select_clients(rows)
            message = narrow_message(
                task.sharing, self.method.publish(task, self.state.select_rows(rows))
            )
        self.exchange.set_active(self.task.ids[rows])
        self._free.publish_last(self.next_round, message)


def check_free_pace(loop: Loop) -> None:
    """Check that nodes can run a method without waiting for each other.

    Raises:
        ConfigError: in one line, with the reason.
    """
    method, why = loop.method, ""
    if not isinstance(method, PeerMethod):
        why = "it has one model for all: a round is over when the server has it"
    elif method.exchanges > 1:
        why = f"it makes {method.exchanges} exchanges a round, in which members answer each other"
    elif type(method).enroll is not Method.enroll:
        why = "its members exchange with all others before the first round"
    else:
        one = torch.zeros(1, dtype=torch.int64)
        try:
            publish_all(method, loop.task.select_clients(one), loop.state.select_rows(one))
        except ConfigError as error:
            why = str(error)
    if why:
        raise ConfigError(f"pace = 'free' does not go with {method.kind}: {why}; use 'common'")
