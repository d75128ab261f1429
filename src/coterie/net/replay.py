"""Replay: repeat a run in which nobody waited, from the journals of all nodes and their data.

Every node's journal says which messages it read in each of its rounds (see `free`), and a
message is what its sender had after its own rounds before. So the nodes' rounds are done again,
each as soon as the messages that it read have been made. Each message is compared with the digest
that its reader wrote down.
"""

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from coterie.data.federation import Federation, Truth
from coterie.errors import ConfigError, DataError
from coterie.exchange.base import Inbox, Message, check_peers, make_inbox
from coterie.exchange.in_memory import InMemory
from coterie.net import head as heads
from coterie.net import identity, nodefile, process
from coterie.net import roster as rosters
from coterie.net.exchange import cut_row, join_messages, make_template
from coterie.net.free import READ, FreeLoop, Read, mark_reads
from coterie.net.node import ARRIVALS, RunSpec
from coterie.net.payload import Refused, decode, encode
from coterie.net.roster import Roster
from coterie.net.wire import Address
from coterie.rng import Rng
from coterie.runtime import checkpoint
from coterie.runtime.record import EDGES, METRICS, Record

_Place = tuple[int, int]  # the client and the round of a message


# ---------------------------------------------------------------- journals


@dataclass(frozen=True)
class Reach:
    """Which clients could be asked: those of a list, or all but those of a list.

    Args:
        listed: the clients of the list.
        is_open: whether they could be asked.
    """

    listed: frozenset[int]
    is_open: bool

    def mark_open(self, population: int) -> Bool[Tensor, " population"]:
        """Return the clients that could be asked.

        Raises:
            DataError: when the list has others than those of the population.
        """
        if self.listed and not (min(self.listed) >= 0 and max(self.listed) < population):
            raise DataError(f"a journal lists clients that are not among {population}")
        out = torch.full((population,), not self.is_open)
        out[list(self.listed)] = self.is_open
        return out


def read_reach(event: Mapping[str, Any]) -> Reach:
    """Return which clients could be asked, by an event of a journal; it has the shorter list.

    Raises:
        KeyError: when it has none, or both.
    """
    if ("reachable" in event) == ("unreachable" in event):
        raise KeyError("unreachable")
    is_open = "reachable" in event
    listed = event["reachable" if is_open else "unreachable"]
    return Reach(frozenset(int(client) for client in listed), is_open)


@dataclass(frozen=True)
class RoundRead:
    """What a node read in one of its rounds.

    Args:
        found: by client.
        digests: of the payloads, by client.
        reach: which clients could be chosen.
    """

    found: Mapping[int, Read]
    digests: Mapping[int, str]
    reach: Reach


@dataclass
class Journal:
    """The journal of one node, without the rounds that it did again after a kill.

    Args:
        reads: by round.
        times: of each round that ended: seconds since the warm-up, and the share of them that the
            network took.
        starts: of each start the first round, and whether models went in half precision from then
            on.
    """

    reads: dict[int, RoundRead] = field(default_factory=dict)
    times: dict[int, tuple[float, float]] = field(default_factory=dict)
    starts: list[tuple[int, bool]] = field(default_factory=list)

    @property
    def last(self) -> int:
        """The last round that ended; -1 for the warm-up, -2 for none."""
        return max(self.times, default=-2)

    def sends_half(self, round: int) -> bool:
        """Whether models went in half precision in a round."""
        return next((half for first, half in reversed(self.starts) if first <= round), False)

    def drop_from(self, round: int) -> None:
        """Forget rounds that a start of the node does again."""
        for part in (self.reads, self.times):
            for number in [number for number in part if number >= round]:
                del part[number]


def read_journal(path: Path) -> Journal:
    """Read a node's journal.

    Raises:
        DataError: when it is none, or that of a run with common rounds.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise DataError(f"cannot read the journal {path}: {error.strerror}") from None
    out = Journal()
    for number, line in enumerate(lines, start=1):
        try:
            _take_event(out, json.loads(line))
        except ConfigError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            # A node that was killed while it wrote leaves a part of a line at the end.
            if number < len(lines):
                text = f"{type(error).__name__} {error}"[:200]
                raise DataError(f"{path} line {number} is no event of a journal: {text}") from None
    return out


def _take_event(out: Journal, event: Mapping[str, Any]) -> None:
    kind = event["event"]
    if kind == "start":
        out.drop_from(int(event["round"]))
        out.starts.append((int(event["round"]), bool(event["half"])))
    elif kind == READ:
        found, digests = {}, {}
        for one in event["read"]:
            client = int(one["client"])
            found[client] = Read(int(one["round"]), int(one["age"]), float(one["age_seconds"]))
            digests[client] = str(one["sha256"])
        out.reads[int(event["round"])] = RoundRead(found, digests, read_reach(event))
    elif kind == "round":
        elapsed, idle = event.get("elapsed", torch.nan), event.get("idle", torch.nan)
        out.times[int(event["round"])] = float(elapsed), float(idle)
    elif kind in ("pull", "redraw", "serve"):
        raise ConfigError(
            "this is the journal of a run with common rounds, which the simulation repeats; "
            "replays are of runs with pace = 'free'"
        )


# ---------------------------------------------------------------- what was published


@dataclass(frozen=True)
class _Published:
    tensors: Mapping[str, Tensor]
    digest: str


class _Table:
    """The messages that have been made, until all who read them have; one member acts at a time.

    Args:
        wanted: how often each message is read.
    """

    def __init__(self, wanted: Counter[_Place]) -> None:
        self.wanted = wanted
        self.messages: dict[_Place, _Published] = {}
        self.turn = threading.Condition()
        self.acting: str | None = None
        self.living: set[str] = set()
        self.waiting: dict[str, _Place] = {}
        self.failed = False

    @property
    def _is_stuck(self) -> bool:
        """Whether all wait for messages that are not there."""
        places = [self.waiting.get(name) for name in self.living]
        return all(place is not None and place not in self.messages for place in places)

    def take_turn(self, name: str) -> None:
        """Wait until nobody else acts; the lock is held."""
        while self.acting is not None:
            self.turn.wait()
        self.acting = name

    def end_turn(self) -> None:
        """Let another member act; the lock is held."""
        self.acting = None
        self.turn.notify_all()

    def publish(self, place: _Place, message: _Published) -> None:
        """Keep a message as long as somebody has still to read it."""
        if self.wanted[place] > 0:
            with self.turn:
                self.messages[place] = message

    def read(self, name: str, round: int, place: _Place) -> _Published:
        """Wait for a message, while others act.

        Raises:
            DataError: when nobody can make it.
        """
        with self.turn:
            while place not in self.messages:
                self.waiting[name] = place
                if self.failed or self._is_stuck:
                    self.failed = True
                    self.turn.notify_all()
                    raise DataError(
                        f"{name} read in its round {round} the message of client {place[0]} of "
                        f"round {place[1]}, and by the journals nobody made it: one is missing or "
                        "cut off, or a node went back to an older checkpoint"
                    )
                self.end_turn()
                self.turn.wait()
                del self.waiting[name]
                self.take_turn(name)
            found = self.messages[place]
            self.wanted[place] -= 1
            if not self.wanted[place]:
                del self.messages[place]
            return found


class ReplayExchange:
    """An exchange in which the clients of a node read what its journal says.

    Args:
        name: of the node.
        ids: its clients.
        population: number of clients of the run.
        journal: what it read.
        table: the messages of all.
    """

    def __init__(
        self,
        name: str,
        ids: Int[Tensor, " clients"],
        population: int,
        journal: Journal,
        table: _Table,
    ) -> None:
        self.name, self.population, self.journal, self._table = name, population, journal, table
        self._own = InMemory(ids, population)
        self.found: dict[int, Read] = {}
        self._counted: dict[int, int] = {}
        self._rng = Rng(0)

    def begin_round(self, rng: Rng) -> None:
        """Start a round."""
        self._rng, self.found = rng, {}
        self._own.begin_round(rng)

    def set_active(self, ids: Int[Tensor, " active"]) -> None:
        """Set the clients that take part."""
        self._own.set_active(ids)

    def agree_on_cohort(self, compute: Callable[[], Tensor]) -> Int[Tensor, " active"]:
        """Everybody takes part."""
        return compute()

    def skip_round(self, exchanges: int) -> None:
        """Do nothing."""

    def ask_server(self, message: Message, rule: Any, shared: Any) -> Any:
        """Refuse: there is no server."""
        raise ConfigError("a run with pace = 'free' has no server")

    def retire_clients(
        self, ids: Int[Tensor, " stopped"], params: Float[Tensor, "stopped params"]
    ) -> None:
        """Make stopped clients keep publishing."""
        self._own.retire_clients(ids, params)

    def reachable_clients(self) -> Bool[Tensor, " population"]:
        """Return the clients that could be chosen in this round."""
        read = self.journal.reads.get(self._rng.round)
        if read is None:
            return torch.ones(self.population, dtype=torch.bool)
        return read.reach.mark_open(self.population)

    def pull(self, message: Message, peers: Int[Tensor, "clients peers"]) -> Inbox:
        """Publish, and read what the node read.

        Raises:
            DataError: when a message is not the one that was read then.
        """
        own, round = self._own.active, self._rng.round
        check_peers(own, peers, self.population)
        board = self._publish_board(replace(message, ids=own))
        if round > self.journal.last:
            raise _Ended
        read = self.journal.reads.get(round)
        if read is None:
            raise DataError(
                f"the journal of {self.name} does not say what it read in round {round}"
            )
        rows = []
        for client, one in sorted(read.found.items()):
            made = self._table.read(self.name, round, (client, one.round))
            if made.digest != read.digests[client]:
                raise DataError(
                    f"{self.name} read in its round {round} a message of client {client} of round "
                    f"{one.round} whose digest is {read.digests[client][:16]}; repeated it is "
                    f"{made.digest[:16]}: the data, the study or the program are others"
                )
            self.found[client] = one
            rows.append((client, made.tensors))
        inbox = make_inbox(join_messages(board, rows), own, peers, self.population)
        return mark_reads(inbox, self.found, self._counted)

    def _publish_board(self, message: Message) -> Message:
        board, round = self._own.publish_message(message), self._rng.round
        assert board.ids is not None
        template = make_template(message, Address(round, 0, -1))
        halves = self.journal.sends_half(round)
        half = frozenset({"params"}) if halves else frozenset[str]()
        for row, client in enumerate(board.ids.tolist()):
            self.found[client] = Read(round, 0, 0.0)
            if not self._table.wanted[client, round]:
                continue
            try:
                payload = encode(cut_row(board, row), half=half)
            except Refused:  # it was withheld
                continue
            # As it came to its readers: rounded, where it travels in half precision.
            tensors = decode(bytearray(payload), template, half=halves)
            digest = hashlib.sha256(payload).hexdigest()
            self._table.publish((client, round), _Published(tensors, digest))
        return board

    def publish_last(self, round: int, message: Message | None) -> None:
        """Publish what the clients have at the end: see `FreeExchange.publish_last`."""
        last = self._own.last.get(0)
        if message is None and last is not None:
            message = last.take_rows(torch.zeros(0, dtype=torch.int64))
        if message is not None:
            self._rng = self._rng.at_round(round)
            self._own.begin_round(self._rng)
            self._publish_board(message)


class _Ended(Exception):
    """The journal ends in this round: its message is made, and nothing more is known."""


# ---------------------------------------------------------------- the run


@dataclass(frozen=True)
class ReplayMember:
    """A member whose part of a run is repeated.

    Args:
        name: its name on the roster.
        federation: its own rows, in the population of the roster.
        folder: of its run, with the journal.
    """

    name: str
    federation: Federation
    folder: Path


def replay(plan: RunSpec, roster: Roster, members: Sequence[ReplayMember]) -> dict[str, FreeLoop]:
    """Repeat a run of nodes with pace = "free".

    Args:
        plan: the part that was equal on all nodes.
        roster: the members.
        members: all that took part.

    Returns:
        The loop of each member at its end, whose models, memory and record are those of the node.

    Raises:
        ConfigError: when a run with these settings cannot be repeated.
        DataError: when the journals do not fit together, or what is made is not what was read.
    """
    if plan.settings.pace != "free":
        raise ConfigError(
            f"pace is {plan.settings.pace!r}; replays are of runs with pace = 'free': the "
            "simulation with the same study repeats a run with common rounds"
        )
    if plan.settings.local.dp_settings is not None:
        raise ConfigError(
            "local.dp is set; a run with private training cannot be repeated, since its noise is "
            "of the node alone"
        )
    journals = {}
    for one in members:
        journal = journals[one.name] = read_journal(one.folder / ARRIVALS)
        # A node that was killed before its checkpoint is what it was after the round before.
        journal.drop_from(checkpoint.count_stored_rounds(one.folder) or 0)
    wanted: Counter[_Place] = Counter()
    for journal in journals.values():
        for round, read in journal.reads.items():
            if round <= journal.last:
                wanted.update((client, one.round) for client, one in read.found.items())
    table = _Table(wanted)
    loops = {one.name: _make_loop(plan, roster, one, journals[one.name], table) for one in members}
    errors: list[Exception] = []

    def repeat(one: ReplayMember) -> None:
        with table.turn:
            table.take_turn(one.name)
        try:
            _repeat_member(loops[one.name], journals[one.name], checkpoint.is_done(one.folder))
        except Exception as error:  # of any kind: it is raised below
            errors.append(error)
            table.failed = True
        with table.turn:
            table.living.discard(one.name)
            table.end_turn()

    table.living = set(loops)
    threads = [threading.Thread(target=repeat, args=(one,)) for one in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        # The first one: what others lack is what this one did not make.
        raise errors[0]
    return loops


def _make_loop(
    plan: RunSpec, roster: Roster, one: ReplayMember, journal: Journal, table: _Table
) -> FreeLoop:
    """Return the loop of a member, as its node made it."""
    # Engines agree up to rounding only.
    settings = replace(plan.settings, **checkpoint.load_engine(one.folder))
    clusters = torch.tensor(roster.clusters or [-1] * roster.population)
    planted = Truth(clusters[one.federation.ids], (), ()) if roster.clusters else None
    federation = replace(one.federation, truth=planted)
    names = {**roster.client_names, **one.federation.names_by_id}
    record = Record(clusters, names, similarities=settings.record_similarities, ages=True)
    task = replace(plan, settings=settings).make_task(federation)
    exchange = ReplayExchange(one.name, federation.ids, roster.population, journal, table)
    loop = FreeLoop(task, plan.method, exchange, settings, Rng(plan.seed), record)
    loop.measure_times = lambda index: journal.times[index]
    return loop


def _repeat_member(loop: FreeLoop, journal: Journal, done: bool) -> None:
    """Do the rounds of a member that its journal has."""
    while not loop.is_finished and loop.next_round <= journal.last:
        loop.run_next_round()
    if loop.is_finished:
        loop.publish_last()
        if done:
            loop.evaluate_final()
    elif loop.next_round >= 0 and loop.method.exchanges:
        # It may have published in the round in which it ended.
        before = loop.state, loop.tracker, loop.validation
        with suppress(_Ended):
            loop.run_next_round()
        loop.state, loop.tracker, loop.validation = before


def load_members(paths: Sequence[Path]) -> tuple[RunSpec, Roster, list[ReplayMember]]:
    """Load the parts of a run from the node.toml of each member, with its data and its run.

    Keys are not needed, and certificates may be over.

    Args:
        paths: the files.

    Raises:
        ConfigError: when they are not of one run.
        DataError: when a run has no journal yet.
    """
    plan, newest, members = None, None, list[ReplayMember]()
    for path in paths:
        file = nodefile.load(path)
        study, _, _ = file.select_run()
        spec = nodefile.make_run_spec(study)
        roster = rosters.load(file.resolve_path(file.roster), file.resolve_path(file.organizer))
        own = identity.load_certificate(file.resolve_path(file.certificate))
        name = identity.certificate_name(own)
        if newest is None or plan is None:
            plan, newest = spec, roster
        here, there = (
            spec.common_settings(roster.population),
            plan.common_settings(roster.population),
        )
        if roster.run != newest.run or here != there:
            text = heads.describe_difference(here, there) or f"run {roster.run}, {newest.run}"
            raise ConfigError(f"{path} and {paths[0]} are not of one run: {text}")
        if roster.version > newest.version:
            newest = roster
        if name in {one.name for one in members}:
            raise ConfigError(f"{path} is of {name}, which is given twice")
        clients = roster.member(name).clients
        rows = nodefile.load_own_rows(file, study, clients, roster.population)
        folder = process.run_folder(file, name)
        if not (folder / ARRIVALS).exists():
            raise DataError(f"{folder} has no journal ({ARRIVALS}): {name} has not begun its run")
        members.append(ReplayMember(name, rows, folder))
    if plan is None or newest is None:
        raise ConfigError("no node.toml is given; expected those of all members")
    return plan, newest, members


def compare_with_stored(one: ReplayMember, loop: FreeLoop) -> list[str]:
    """Return what differs between a member's stored run and its repetition; nothing when equal.

    Compared are all models, what the method remembers and the moments of optimizers in the
    checkpoint, and the tables of results, to the byte.
    """
    stored, out = checkpoint.load_state_tensors(one.folder), []
    for name, tensor in sorted(checkpoint.list_state_tensors(loop).items()):
        if name not in stored or not _are_same(stored[name], tensor.cpu()):
            out.append(name)
    files = loop.record.encode_files()
    for name in (METRICS, EDGES):
        if (one.folder / name).read_bytes() != files[name]:
            out.append(name)
    return out


def _are_same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same bytes: NaN too."""
    same = a.dtype == b.dtype and a.shape == b.shape
    return same and a.contiguous().numpy().tobytes() == b.contiguous().numpy().tobytes()
