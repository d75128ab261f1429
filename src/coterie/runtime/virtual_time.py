"""Virtual time: how long a simulated client takes for its rounds and messages, and when it pauses.

Times are whole nanoseconds, so that sums are exact: equal speeds end at equal times. Every draw has
the key of its client, purpose and round, so that it depends on nothing else of the run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar, final

import numpy as np
from annotated_types import Gt, Le, MinLen
from jaxtyping import Float, Int
from torch import Tensor

from coterie._util.settings import (
    Configurable,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Share,
    parse_settings,
    to_plain,
)
from coterie.errors import ConfigError, describe_unknown, require
from coterie.rng import Rng

# Whole numbers: sums of times do not depend on their order, and two clients can end at one moment.
SECOND = 10**9
"""Nanoseconds in a second."""
_MOST_PAUSES = 100_000  # in one round: pauses that overlap may leave no time at all
LONGEST = 10**9
"""The longest time, in seconds (31 years): sums of several stay below 2^63 nanoseconds."""


@dataclass(frozen=True)
class Draw(Configurable):
    """The base of the distributions from which numbers of clients are drawn."""

    kind: ClassVar[str]

    def draw(self, stream: np.random.Generator) -> float:
        """Return one number, in the unit of the setting."""
        raise NotImplementedError


@final
@dataclass(frozen=True)
class LognormalDraw(Draw):
    """A lognormal distribution.

    Args:
        median: the median.
        sigma: standard deviation of the logarithm.
    """

    kind: ClassVar[str] = "lognormal"
    median: PositiveFloat
    sigma: NonNegativeFloat

    def draw(self, stream: np.random.Generator) -> float:
        """See `Draw.draw`."""
        return self.median * float(np.exp(self.sigma * stream.standard_normal()))


@final
@dataclass(frozen=True)
class UniformDraw(Draw):
    """A uniform distribution.

    Args:
        low: the least.
        high: the most.
    """

    kind: ClassVar[str] = "uniform"
    low: NonNegativeFloat
    high: NonNegativeFloat

    def check(self) -> None:
        """Require an interval."""
        require(self.high >= self.low, "high", self.high, f"low = {self.low} or more")

    def draw(self, stream: np.random.Generator) -> float:
        """See `Draw.draw`."""
        return self.low + (self.high - self.low) * float(stream.random())


@final
@dataclass(frozen=True)
class ChoiceDraw(Draw):
    """One of a few values.

    Args:
        values: the values, all equally likely; a value that is listed twice is twice as likely.
    """

    kind: ClassVar[str] = "choice"
    values: Annotated[Sequence[NonNegativeFloat], MinLen(1)]

    def draw(self, stream: np.random.Generator) -> float:
        """See `Draw.draw`."""
        return float(self.values[int(stream.integers(len(self.values)))])


DRAWS: dict[str, type[Draw]] = {
    LognormalDraw.kind: LognormalDraw,
    UniformDraw.kind: UniformDraw,
    ChoiceDraw.kind: ChoiceDraw,
}
"""Every distribution by its name."""


@dataclass(frozen=True)
class ServerRule(Configurable):
    """The base of rules by which a server takes in what arrives while others still train.

    An update is what training moved: the model that came back minus the one it began with. Its
    staleness is the number of newer models that the server has made meanwhile.
    """

    kind: ClassVar[str]

    @property
    def size(self) -> int:
        """How many updates the server collects before it makes a new model."""
        return 1

    def place(
        self,
        model: Float[Tensor, " params"],
        begun: Float[Tensor, " params"],
        trained: Float[Tensor, " params"],
        staleness: int,
    ) -> Float[Tensor, " params"]:
        """Return the model of which the mean over collected updates is the server's new one.

        Args:
            model: of the server now.
            begun: with which the client began.
            trained: that came back.
            staleness: of the update, 0 or more.
        """
        raise NotImplementedError


@final
@dataclass(frozen=True)
class FedBuffRule(ServerRule):
    r"""FedBuff: $\theta \leftarrow \theta + \frac{\eta}{K} \sum_i (1 + a_i)^{-e} \Delta_i$.

    Once for each $K$ updates.

    Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek, Huba, Federated learning with buffered
    asynchronous aggregation, 2022, https://arxiv.org/abs/2106.06639. The mean is weighted as the
    method weighs clients.

    Args:
        buffer: updates that the server collects ($K$).
        exponent: of the weight by staleness ($e$).
        server_lr: step of the server ($\eta$).
    """

    kind: ClassVar[str] = "fedbuff"
    buffer: PositiveInt = 10
    exponent: NonNegativeFloat = 0.5
    server_lr: PositiveFloat = 1.0

    @property
    def size(self) -> int:
        """See `ServerRule.size`."""
        return self.buffer

    def place(
        self,
        model: Float[Tensor, " params"],
        begun: Float[Tensor, " params"],
        trained: Float[Tensor, " params"],
        staleness: int,
    ) -> Float[Tensor, " params"]:
        """See `ServerRule.place`."""
        step = self.server_lr * (1 + staleness) ** -self.exponent
        # Nothing newer was made, so that `begun` is `model`: no rounding, as in a common round.
        if step == 1 and staleness == 0:
            return trained
        return model + step * (trained - begun)


@final
@dataclass(frozen=True)
class FedAsyncRule(ServerRule):
    r"""FedAsync: $\theta \leftarrow (1 - \alpha_a) \theta + \alpha_a \theta_i$.

    The step is $\alpha_a = \alpha (1 + a)^{-e}$.

    Xie, Koyejo, Gupta, Asynchronous federated optimization, 2019,
    https://arxiv.org/abs/1903.03934, with the polynomial weight.

    Args:
        mixing: weight of a model that is not stale ($\alpha$).
        exponent: of the weight by staleness ($e$).
    """

    kind: ClassVar[str] = "fedasync"
    mixing: Annotated[float, Gt(0), Le(1)] = 0.6
    exponent: NonNegativeFloat = 0.5

    def place(
        self,
        model: Float[Tensor, " params"],
        begun: Float[Tensor, " params"],
        trained: Float[Tensor, " params"],
        staleness: int,
    ) -> Float[Tensor, " params"]:
        """See `ServerRule.place`."""
        weight = self.mixing * (1 + staleness) ** -self.exponent
        return (1 - weight) * model + weight * trained


SERVER_RULES: dict[str, type[ServerRule]] = {
    FedBuffRule.kind: FedBuffRule,
    FedAsyncRule.kind: FedAsyncRule,
}
"""Every rule of a server by its name."""

Amount = NonNegativeFloat | Sequence[NonNegativeFloat] | Mapping[str, Any]
"""A number for all clients, a list with a number for each, or a table of a distribution."""


@final
@dataclass(frozen=True)
class Pause(Configurable):
    """A time in which some clients do not compute; what they published stays readable.

    Args:
        start: when it begins, in seconds of virtual time.
        seconds: how long it lasts.
        every: seconds from one beginning to the next; once when None.
        clients: numbers of the clients; all when empty.
    """

    start: NonNegativeFloat
    seconds: PositiveFloat
    every: PositiveFloat | None = None
    clients: Sequence[NonNegativeInt] = ()

    def check(self) -> None:
        """Require time between two pauses, and times that fit."""
        _check_longest("start", self.start)
        _check_longest("seconds", self.seconds)
        if self.every is not None:
            expected = f"more than seconds = {self.seconds}"
            # Otherwise one pause would begin before the last has ended, and the client never work.
            require(self.every > self.seconds, "every", self.every, expected)


@final
@dataclass(frozen=True)
class VirtualTime(Configurable):
    """How long things take in a simulation.

    With schedule = "synchronous" a round lasts as long as its slowest client: `max_staleness` and
    `record_seconds` say nothing then. A number of a client is given for all, as a list with one for
    each client, or as a table of a distribution from which it is drawn: `{kind = "lognormal",
    median = 1.0, sigma = 0.5}`, `{kind = "uniform", low = 1.0, high = 10.0}` or `{kind = "choice",
    values = [1.0, 10.0]}`.

    Args:
        round_seconds: how long a client takes for one local training.
        step_seconds: or how long it takes for each optimizer step of `local`; then `round_seconds`
            does not count. What a method trains in addition to `local` is not counted.
        jitter: deviation of the logarithm of a factor on this time that is drawn for every round.
        latency: seconds that a client's link adds to each message, sent or received: a message
            takes the latency of both clients.
        bandwidth: bytes a second of a client's link, above 0: a message takes its size over the
            smaller bandwidth of both clients. No limit when None.
        pause_share: probability that a client pauses in one of its rounds.
        pause_seconds: how long such a pause lasts, drawn again each time.
        pauses: tables of further pauses: `start` and `seconds`, with `every` for pauses that come
            again, and `clients` for those of some.
        max_staleness: rounds of the reader after which a message is too old to be read; none when
            None. A message that the reader could have read in its last round has age 1.
        max_staleness_seconds: seconds after which it is; none when None.
        server: how a server takes in what arrives, with a method that has one: a table of a rule,
            `{kind = "fedbuff", buffer = 10}` or `{kind = "fedasync", mixing = 0.6}`, with the
            settings of `FedBuffRule` or `FedAsyncRule`.
        deadline_seconds: with schedule = "synchronous", how long after its beginning a round ends
            at the latest; when all are done when None. Who is late misses the round: what it sends
            is dropped, and it takes part again in the first round that begins after it is done.
        record_seconds: virtual time between two records of results: a "round" of the results is
            this long, and `rounds` of them end the run.
    """

    round_seconds: Amount = 1.0
    step_seconds: Amount | None = None
    jitter: NonNegativeFloat = 0.0
    latency: Amount = 0.0
    bandwidth: Amount | None = None
    pause_share: Share = 0.0
    pause_seconds: Amount = 0.0
    pauses: Sequence[Mapping[str, Any]] = ()
    max_staleness: NonNegativeInt | None = None
    max_staleness_seconds: NonNegativeFloat | None = None
    server: Mapping[str, Any] | None = None
    deadline_seconds: PositiveFloat | None = None
    record_seconds: Annotated[float, Gt(0)] = 1.0

    def check(self) -> None:
        """Check tables, and store them in one form."""
        for name in ("round_seconds", "step_seconds", "latency", "bandwidth", "pause_seconds"):
            value = getattr(self, name)
            # A frozen dataclass takes a value in this way alone. Tables are stored with all their
            # settings, so that equal ones are equal.
            if isinstance(value, Mapping):
                object.__setattr__(self, name, to_plain(parse_draw(value, name)))
        if self.server is not None:
            object.__setattr__(self, "server", to_plain(self.server_rule))
        found = []
        for place, table in enumerate(self.pauses):
            found.append(to_plain(parse_settings(Pause, table, f"pauses[{place}]")))
        object.__setattr__(self, "pauses", tuple(found))
        if self.deadline_seconds is not None:
            _check_longest("deadline_seconds", self.deadline_seconds)
        _check_longest("record_seconds", self.record_seconds)
        # A shorter span would be rounded to 0, and virtual time would never pass.
        expected = f"{1 / SECOND} or more"
        require(
            to_nanoseconds(self.record_seconds) > 0, "record_seconds", self.record_seconds, expected
        )

    @property
    def record_nanoseconds(self) -> int:
        """Virtual time between two records."""
        return to_nanoseconds(self.record_seconds)

    @property
    def deadline_nanoseconds(self) -> int | None:
        """How long a round lasts at most; None without a deadline."""
        if self.deadline_seconds is None:
            return None
        return to_nanoseconds(self.deadline_seconds)

    @property
    def server_rule(self) -> ServerRule:
        """How a server takes in what arrives: FedBuff where nothing is said."""
        if self.server is None:
            return FedBuffRule()
        return _parse_kind(self.server, SERVER_RULES, "rule of a server", "server")

    @property
    def pause_list(self) -> tuple[Pause, ...]:
        """The pauses that are given."""
        return tuple(Pause(**table) for table in self.pauses)


def _check_longest(name: str, seconds: float) -> None:
    require(seconds <= LONGEST, name, seconds, f"at most {LONGEST} seconds")


def to_nanoseconds(seconds: float) -> int:
    """Return seconds in whole nanoseconds."""
    return round(seconds * SECOND)


def parse_draw(table: Mapping[str, Any], where: str) -> Draw:
    """Make a distribution from its table.

    Args:
        table: its `kind` and its settings.
        where: the setting's name in error messages.

    Raises:
        ConfigError: on an unknown kind or key, or a value that does not fit.

    Example:
        >>> parse_draw({"kind": "choice", "values": [1, 10]}, "latency")
        ChoiceDraw(values=(1.0, 10.0))
    """
    return _parse_kind(table, DRAWS, "distribution", where)


_Kind = TypeVar("_Kind", bound=Configurable)


def _parse_kind(
    table: Mapping[str, Any], known: Mapping[str, type[_Kind]], what: str, where: str
) -> _Kind:
    """Make one of several classes from a table with its `kind` and its settings."""
    rest = dict(table)
    kind = rest.pop("kind", None)
    if not isinstance(kind, str):
        raise ConfigError(f"{where}: kind is missing; valid: {', '.join(sorted(known))}")
    if kind not in known:
        raise ConfigError(f"{where}: {describe_unknown(what, kind, known)}")
    return parse_settings(known[kind], rest, where)


@dataclass(frozen=True)
class RoundTraffic:
    """What clients read and send in a round, a row for each.

    Args:
        peers: numbers of the clients that each reads; -1 for none.
        sizes: bytes of each of these messages.
        down: bytes from a server; None without one.
        up: bytes to a server.
    """

    peers: Int[np.ndarray, "clients slots"]
    sizes: Int[np.ndarray, "clients slots"]
    down: Float[np.ndarray, " clients"] | None = None
    up: Float[np.ndarray, " clients"] | None = None


@dataclass(frozen=True)
class RoundTimes:
    """When the clients of a round are done, a number for each, in nanoseconds.

    Args:
        trained: when its local training ends.
        done: when that is so and the messages that it waits for, or sends to a server, have come.
        worked: how long it computes: neither waits nor pauses.
    """

    trained: Int[np.ndarray, " clients"]
    done: Int[np.ndarray, " clients"]
    worked: Int[np.ndarray, " clients"]


class Clock:
    """How long each client of a run takes, by its number and the number of its round.

    Args:
        time: the settings.
        steps: optimizer steps of each client in a local training.
        seed: of the run.

    Raises:
        ConfigError: for a list that is not as long as the population, or a client that would take
            no time at all.
    """

    def __init__(self, time: VirtualTime, steps: Sequence[int], seed: int) -> None:
        self.time, self.rng, population = time, Rng(seed), len(steps)
        name, amount = "round_seconds", time.round_seconds
        if time.step_seconds is not None:
            name, amount = "step_seconds", time.step_seconds
        # Seconds of one local training of each client; jitter and pauses come with the rounds.
        self.work = self._draw_amounts(name, amount, population)
        if time.step_seconds is not None:
            self.work = self.work * np.array(steps, dtype=np.float64)
        for client, seconds in enumerate(self.work.tolist()):
            if not to_nanoseconds(seconds):
                raise ConfigError(
                    f"time.{name}: client {client} takes {seconds} seconds for a round; expected "
                    "more than 0, or it never ends one"
                )
        # In whole nanoseconds from the start, since delays are sums of these.
        self.latency = np.array(
            list(map(to_nanoseconds, self._draw_amounts("latency", time.latency, population))),
            dtype=np.int64,
        )
        # no limit is an infinite bandwidth
        self.bandwidth = np.full(population, np.inf)
        if time.bandwidth is not None:
            self.bandwidth = self._draw_amounts("bandwidth", time.bandwidth, population)
            if not (self.bandwidth > 0).all():
                raise ConfigError("time.bandwidth is 0 for a client; expected above 0")
        # the lengths of drawn pauses are drawn with each of them; a list must fit all the same
        if not isinstance(time.pause_seconds, Mapping):
            self._draw_amounts("pause_seconds", time.pause_seconds, population)
        self.pauses: list[list[Pause]] = [[] for _ in range(population)]
        for place, pause in enumerate(time.pause_list):
            for client in pause.clients or range(population):
                if client >= population:
                    raise ConfigError(
                        f"time.pauses[{place}]: clients has {client}; expected numbers below "
                        f"{population}"
                    )
                self.pauses[client].append(pause)

    def _draw_amounts(self, name: str, amount: Any, population: int) -> np.ndarray:
        """Return a number for each client, drawn once in the run where it is drawn."""
        if isinstance(amount, Mapping):
            draw, found = parse_draw(amount, f"time.{name}"), []
            for client in range(population):
                # Each client from a stream of its own: more clients change nothing for the others.
                found.append(draw.draw(self.rng.generator(f"time.{name}", client)))
        elif isinstance(amount, Sequence):
            found = list(amount)
            if len(found) != population:
                raise ConfigError(
                    f"time.{name} has {len(found)} numbers; expected one for each of the "
                    f"{population} clients"
                )
        else:
            found = [amount] * population
        for one in found:
            # Bytes a second are no time, and have no longest one.
            if name != "bandwidth":
                _check_longest(f"time.{name}", one)
        return np.array(found, dtype=np.float64)

    def end_round(self, client: int, round: int, begin: int) -> tuple[int, int]:
        """Return when a client's round ends, and how much of it the client paused.

        Args:
            client: its number.
            round: its own round.
            begin: when the round begins, in nanoseconds.

        Returns:
            The end, after the beginning, and the paused time, in nanoseconds.
        """
        streams, seconds = self.rng.at_round(round), float(self.work[client])
        if self.time.jitter:
            noise = streams.generator("time.jitter", client).standard_normal()
            # A lognormal factor has no bound, and sums must fit into 63 bits.
            seconds = min(LONGEST, seconds * float(np.exp(self.time.jitter * noise)))
        paused = 0
        if self.time.pause_share:
            stream = streams.generator("time.pause", client)
            if stream.random() < self.time.pause_share:
                paused = to_nanoseconds(self._draw_pause(stream, client))
        # a round of no time at all would never let virtual time go on
        work = max(1, to_nanoseconds(seconds)) + paused
        end = _work_between_pauses(self.pauses[client], begin, work)
        return end, end - begin - work + paused

    def time_round(
        self,
        round: int,
        begin: int,
        clients: Int[np.ndarray, " clients"],
        traffic: RoundTraffic,
        *,
        reads_first: bool,
        deadline: int = np.iinfo(np.int64).max,
    ) -> RoundTimes:
        """Return when each client of a round is done in which all begin together.

        Without a deadline the round ends when the last one is.

        Args:
            round: its number, which is that of each client's own round.
            begin: when it begins, in nanoseconds.
            clients: numbers of the participants.
            traffic: what they read and send.
            reads_first: whether they read before they train, what was published before the round;
                else they read what is published when training ends.
            deadline: after which nobody waits for messages of peers.
        """
        starts = np.full(len(clients), begin)
        if reads_first:
            published = np.full(len(self.work), begin)
            starts = np.minimum(self._wait_for_messages(clients, traffic, published), deadline)
        # Who reads first waits for its messages, then for the server's model.
        starts = starts + self.move_to_server(clients, traffic.down)
        ends, worked = np.zeros_like(starts), np.zeros_like(starts)
        for place, client in enumerate(clients.tolist()):
            start = int(starts[place])
            ends[place], paused = self.end_round(client, round, start)
            worked[place] = ends[place] - start - paused
        # An upload makes the round longer, but is not time in which a client computes.
        done = ends + self.move_to_server(clients, traffic.up)
        if not reads_first:
            # a peer that takes no part, as one that stopped, published before
            published = np.full(len(self.work), begin)
            published[clients] = ends
            came = self._wait_for_messages(clients, traffic, published)
            done = np.maximum(done, np.minimum(came, deadline))
        return RoundTimes(ends, done, worked)

    def _wait_for_messages(
        self,
        clients: Int[np.ndarray, " clients"],
        traffic: RoundTraffic,
        published: Int[np.ndarray, " population"],
    ) -> Int[np.ndarray, " clients"]:
        """Return when the last message that each client reads has reached it."""
        # A client's own model takes no message: without others it waits for nothing else.
        own = published[clients]
        if traffic.peers.shape[1] == 0:
            return own
        asked = traffic.peers >= 0
        # A slot without a peer gets the client itself, so that the lookup is legal; it is masked
        # below.
        senders = np.where(asked, traffic.peers, clients[:, None])
        delays = self.message_delays(clients[:, None], senders, traffic.sizes)
        return np.where(asked, published[senders] + delays, own[:, None]).max(1, initial=0)

    def move_to_server(
        self, clients: Int[np.ndarray, " clients"], sizes: Float[np.ndarray, " clients"] | None
    ) -> Int[np.ndarray, " clients"]:
        """Return how long bytes from or to a server take, whose own link has no limit."""
        if sizes is None:
            return np.zeros(len(clients), dtype=np.int64)
        # A server adds no latency of its own.
        return self.latency[clients] + _time_transfer(sizes, self.bandwidth[clients])

    def _draw_pause(self, stream: np.random.Generator, client: int) -> float:
        amount = self.time.pause_seconds
        if isinstance(amount, Mapping):
            # Bounded as the jitter is: a lognormal draw has no largest value.
            return min(LONGEST, parse_draw(amount, "time.pause_seconds").draw(stream))
        if isinstance(amount, Sequence):
            return float(amount[client])
        return float(amount)

    def message_delays(
        self, readers: np.ndarray, senders: np.ndarray, size: int | np.ndarray
    ) -> np.ndarray:
        """Return how long messages take, in nanoseconds.

        Args:
            readers: numbers of clients.
            senders: numbers of clients, in a shape that fits.
            size: of a message, in bytes; one for all, or one for each.
        """
        slowest = np.minimum(self.bandwidth[readers], self.bandwidth[senders])
        return self.latency[readers] + self.latency[senders] + _time_transfer(size, slowest)

    def longest_delays(self, size: int) -> np.ndarray:
        """Return the longest time that a message of each client takes to any reader."""
        population = np.arange(len(self.work))
        slowest = np.full(len(population), self.bandwidth.argmin())
        farthest = np.full(len(population), self.latency.argmax())
        # at least the delay to every reader: the worst link of each kind
        # The reader with the least bandwidth need not be the farthest: its latency is taken off
        # again, and the largest put in its place.
        transfer = self.message_delays(slowest, population, size) - self.latency[slowest]
        return transfer + self.latency[farthest]


def _time_transfer(size: int | np.ndarray, bandwidth: np.ndarray) -> np.ndarray:
    """Return how long bytes take at a bandwidth, in nanoseconds."""
    # A bandwidth has no least value, and sums of times must fit into 63 bits.
    seconds = np.minimum(size / bandwidth, LONGEST)
    # rounded up, so that a message of any size takes time where bandwidth is limited
    return np.ceil(seconds * SECOND).astype(np.int64)


def _work_between_pauses(pauses: Sequence[Pause], begin: int, work: int) -> int:
    """Return when some work ends that stops in every pause, in nanoseconds.

    Example:
        >>> night = Pause(start=10, seconds=5, every=20)
        >>> _work_between_pauses([night], 8 * SECOND, 4 * SECOND) // SECOND
        17
    """
    if not pauses:
        return begin + work
    now = begin
    for _ in range(_MOST_PAUSES):
        ends, following = [], []
        for pause in pauses:
            end, begins = _end_of_pause(pause, now), _next_pause(pause, now)
            ends += [end] if end is not None else []
            following += [begins] if begins is not None else []
        if ends:
            # another pause may begin before this one ends, hence the next turn
            now = max(ends)
            continue
        if not following or now + work <= min(following):
            return now + work
        # The client works until the next pause begins, and goes on behind it.
        work -= min(following) - now
        now = min(following)
    raise ConfigError(
        f"time.pauses leave a client no time to end a round within {_MOST_PAUSES} pauses; expected "
        "more time between them"
    )


def _end_of_pause(pause: Pause, now: int) -> int | None:
    """Return when the pause that a client is in ends; None outside of it."""
    start, since = to_nanoseconds(pause.start), now - to_nanoseconds(pause.start)
    if pause.every is not None and since >= 0:
        every = to_nanoseconds(pause.every)
        start += since // every * every
    if start <= now < start + to_nanoseconds(pause.seconds):
        return start + to_nanoseconds(pause.seconds)
    return None


def _next_pause(pause: Pause, now: int) -> int | None:
    """Return when a pause begins next, after now; None where it does not come again."""
    start, since = to_nanoseconds(pause.start), now - to_nanoseconds(pause.start)
    if since < 0:
        return start
    if pause.every is None:
        return None
    every = to_nanoseconds(pause.every)
    return start + (since // every + 1) * every
