"""Node: the run's own loop, with this node's clients and an exchange over the network.

A node waits for the others, runs the rounds, catches up when it has fallen behind, writes the files
of a simulation (with its own rows) after every round, and stays until the others have fetched its
last messages. When it is killed, it continues from its checkpoint as a new incarnation. Where the
study holds out new clients, their nodes join when the others have ended, which answer them until
they are done: see `latecomers`.
"""

import json
import os
import secrets
import statistics
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie._util.files import prepare_folder, write_atomically
from coterie._util.lines import LineFile
from coterie._util.mappings import drop_empty, drop_keys, index_by_name, map_values, select_keys
from coterie.data.federation import Federation, Truth
from coterie.engine.task import Task
from coterie.errors import ConfigError, QuorumError, TransportError
from coterie.exchange.accepting import Reputation
from coterie.functional.metrics import DIVERGED
from coterie.methods.base import Method, Round
from coterie.methods.server import ServerMethod
from coterie.models.layout import (
    Layout,
    ModelSource,
    custom_model_name,
    make_template,
    resolve_model,
)
from coterie.net import catchup, latecomers
from coterie.net import head as heads
from coterie.net import identity as identities
from coterie.net import roster as rosters
from coterie.net.audit import Audit
from coterie.net.exchange import RemoteExchange
from coterie.net.free import READ, FreeExchange, FreeLoop, check_free_pace
from coterie.net.head import Head
from coterie.net.keeper import Keeper, check_same_run, describe_changes
from coterie.net.log import Log, RateLimit, Sample
from coterie.net.neighbors import Neighbors
from coterie.net.outbox import KEEP, Missing
from coterie.net.payload import Refused
from coterie.net.post import Post, RoundMissed, Terms
from coterie.net.roster import MAX_ALL_TO_ALL, Roster
from coterie.net.transport import Transport
from coterie.net.wire import VERSION
from coterie.rng import Rng
from coterie.runtime import checkpoint, newcomers
from coterie.runtime.extensions import AcceptanceExtension
from coterie.runtime.loop import Loop
from coterie.runtime.models import collect_models
from coterie.runtime.record import Record
from coterie.runtime.settings import DTYPES, Settings
from coterie.runtime.taken_home import check_models_home
from coterie.runtime.task import make_task

ARRIVALS = "arrivals.jsonl"
# Seconds. The first rounds have no times of others to go by.
_LEAST_DEADLINE = 30.0
_PAUSE_EACH = 0.005  # seconds: asking a thousand costs some hundredths of one
_ASKING = 8  # members that are asked for their heads at a time
_FEWEST = 16  # neighbors that a node keeps links to, if views are small
_LOOK_AGAIN = 0.02  # seconds between two looks at how far those are who read this node
_SAY_AGAIN = 60.0  # seconds between two events of one wait


@dataclass(frozen=True)
class RunSpec:
    """The part of a run that is equal on all nodes.

    Args:
        method: the method.
        settings: the settings of the run.
        model: the model.
        model_name: the model in words, the same on every node.
        seed: the seed of the run.
    """

    method: Method
    settings: Settings
    model: ModelSource
    model_name: str
    seed: int = 0

    def make_task(self, federation: Federation, secret: int | None = None) -> Task:
        """Return the task of a node's rows.

        Args:
            federation: the rows.
            secret: seed of the draws of private training, which nobody else may know.
        """
        return make_task(federation, self.method, self.model, self.settings, secret)

    def compute_schema(self, features: tuple[int, ...], outputs: int) -> str:
        """Return the hash of the model's tensors for inputs of a shape and a number of outputs."""
        model = self.method.build_model(resolve_model(self.model, features, outputs))
        return heads.schema_hash(Layout(make_template(model), DTYPES[self.settings.dtype]))

    def common_settings(self, population: int) -> dict[str, Any]:
        """Return the settings that must be equal on every node."""
        return heads.settings_of(self.method, self.settings, self.seed, self.model_name, population)


@dataclass(frozen=True)
class Patience:
    """How long a node waits for others.

    Args:
        start: seconds to wait at the start for members that do not answer yet; infinite to wait for
            all of them.
        min_peers: other members that must be there at the start and in every round; with fewer a
            node waits.
        quorum_wait: seconds to wait for them in a run that has begun; infinite to wait for them
            without limit.
        linger: seconds to stay at the end for members that took part, away or not, and new ones,
            that are not done and make no progress; infinite to wait for them without limit.
        ask: seconds to wait for the answer to "how are you?".
        poll: seconds between two such questions.
    """

    start: float = 60.0
    min_peers: int = 1
    quorum_wait: float = 3600.0
    linger: float = 120.0
    ask: float = 2.0
    poll: float = 0.5


# What changes in a head while its node goes on.
_progress_of = attrgetter("state", "round")


class NodeLoop(Loop):
    """The run's loop, in which members that are away cannot be chosen.

    Attributes:
        prepare_views: called before a round whose clients choose in views.
    """

    prepare_views: Callable[[Round], object] = staticmethod(lambda rnd: None)

    def _make_round(self, index: int, rows: Tensor, cohort: Tensor) -> Round:
        rnd = super()._make_round(index, rows, cohort)
        assert isinstance(self.exchange, RemoteExchange)
        if self.method.server:
            return rnd
        if rnd.sampling is not None and index >= 0:
            self.prepare_views(rnd)
        self.exchange.readmit_slow(rnd.readable_by(torch.arange(len(rnd.ids))))
        return replace(rnd, reachable=rnd.reachable & self.exchange.reachable_clients())


class Node:
    """One member of a run.

    Args:
        plan: the part that is equal on all nodes.
        federation: this node's own rows, in a population of the roster's size.
        roster: the members.
        transport: the transport of messages; its owner closes it.
        sign: signs bytes with this node's key.
        folder: folder of this node's run; a killed node continues from its checkpoint there.
        terms: deadlines and options of the exchange; a deadline of 0 is measured (see
            `round_deadline`).
        patience: how long it waits for others.
        log: receives events.
        keeper: knows of newer rosters; without one, the roster stays as it is.
        audit: receives who joins, what is received and what is refused, if that is to be kept.
    """

    def __init__(
        self,
        plan: RunSpec,
        federation: Federation,
        roster: Roster,
        transport: Transport,
        sign: Callable[[bytes], bytes],
        folder: Path,
        *,
        terms: Terms | None = None,
        patience: Patience | None = None,
        log: Log | None = None,
        keeper: Keeper | None = None,
        audit: Audit | None = None,
    ) -> None:
        self.plan, self.roster, self.transport, self.folder = plan, roster, transport, folder
        self.patience, self.log = patience or Patience(), log or Log(transport.name)
        self.keeper, self.audit, self._scout = keeper, audit, ThreadPoolExecutor(1, "coterie-scout")
        self._scouted: Future[tuple[str, bytes] | None] | None = None
        self._sign, self._stop, self._state = sign, threading.Event(), "starting"
        self._met: frozenset[str] = frozenset()
        self._heads: dict[str, Head] = {}
        self._times: dict[str, float] = {}  # of the round that has ended
        self._done: frozenset[str] = frozenset()  # members whose newest head says so
        self.is_waiting = False  # for a quorum
        self._noticed: set[tuple[str, str, int]] = set()  # ends of certificates that are logged
        self._done_answers = 0  # how often this node has answered that it is done
        self._check_federation(federation)
        clusters = torch.tensor(roster.clusters or [-1] * roster.population)
        planted = Truth(clusters[federation.ids], (), ()) if roster.clusters else None
        self.participants = latecomers.find_participants(
            roster, plan.method, plan.settings, plan.seed
        )
        self.late = (
            self.participants is not None and transport.name in self.participants.late_members
        )
        names, seen = {**roster.client_names, **federation.names_by_id}, roster
        if self.participants is not None:
            federation, seen = (
                self.participants.renumber_rows(federation, transport.name),
                self.participants.roster_for(transport.name),
            )
        self._federation = replace(federation, truth=planted)
        # drawn again at every start and never written: noise that is used twice could be subtracted
        self.task = plan.make_task(self._federation, secret=secrets.randbits(63))
        self.schema = heads.schema_hash(self.task.layout)
        common = heads.with_frozen(plan.common_settings(roster.population), self.task.layout)
        common = heads.with_given(common, self.task.model.common_digest)
        self.settings = heads.with_table(common, federation)
        prepare_folder(folder)
        self.incarnation = self._new_incarnation()
        self._journal_file = LineFile(folder / ARRIVALS)
        if torn := self._journal_file.trim_partial_line():
            self.log(
                "journal_repaired",
                level="warning",
                text=f"{len(torn)} bytes of an unfinished line are removed",
            )
        self.post = Post(
            # Messages have this node's schema, also where the roster names none.
            transport, replace(seen, schema=self.schema), sign, incarnation=self.incarnation,
            terms=terms or Terms(), deadline=self.round_deadline, journal=self._write_journal,
        )  # fmt: skip
        self.post.on_server_wait, self.post.server_has_reached = (
            self.update_roster,
            self._server_signs,
        )
        # New clients count their own rounds, from -1.
        self.post.last_round = max(plan.settings.rounds, plan.settings.new_client_rounds) - 1
        if audit is not None:
            self.post.on_answer, self.post.ensure_able = audit.record_delivery, audit.ensure_written
        self.is_free = plan.settings.pace == "free"
        self.exchange = self._make_exchange()
        ids = None if self.participants is None else self.participants.ids
        record = Record(
            clusters, names, ids, similarities=plan.settings.record_similarities, ages=self.is_free
        )
        kind = FreeLoop if self.is_free else NodeLoop
        self.loop: Loop = kind(
            self.task, plan.method, self.exchange, plan.settings, Rng(plan.seed), record
        )
        if isinstance(self.loop, FreeLoop):
            check_free_pace(self.loop)
            self.loop.measure_times = self._measure_times
        self._sampling = plan.settings.views_among(self.task.population)
        self._neighbors: Neighbors | None = None
        if self._sampling is not None:
            # Those of a round, and as many that its clients know besides.
            self._most_neighbors = max(_FEWEST, 2 * self._sampling.view)
            self._neighbors = Neighbors(
                lambda names: map_values(attrgetter("met"), self._meet(names)),
                self._most_neighbors,
                lambda: self.other_members,
            )
            transport.limit_links(self._most_neighbors)
            if isinstance(self.loop, NodeLoop):
                self.loop.prepare_views = self._prepare_views
        # a late member does not change the run of the others
        settings = plan.settings if self.late else replace(plan.settings, new_clients=None)
        self._identity = checkpoint.compute_identity(
            plan.method, settings, plan.seed, federation, self.task, custom_model_name(plan.model)
        )
        # A late member begins its few rounds again; they change nobody.
        self._earlier = {} if self.late else checkpoint.load(folder, self.loop, self._identity)
        self._ends: list[float | None] = list(self._earlier.get("ends") or ())
        # One value, because the median of no values is undefined.
        self._started, self._local, self._ignore_hints_until = time.perf_counter(), [0.0], -1
        self.post.pace.local = lambda: statistics.median(self._local)
        self.clock = self._make_clock()

    def _make_exchange(self) -> RemoteExchange:
        width, settings = self.task.sharing.shared.num_columns, self.plan.settings
        if self.late:
            return latecomers.LateExchange(self.post, width)
        if not self.is_free:
            return RemoteExchange(self.post, width)
        return FreeExchange(
            self.post,
            width,
            max_staleness=settings.max_staleness,
            ask_head=lambda name: self._ask_head(name, secrets.token_hex(8)),
        )

    def _check_federation(self, federation: Federation) -> None:
        own = sorted(self.roster.member(self.transport.name).clients)
        if (
            sorted(federation.ids.tolist()) != own
            or federation.population != self.roster.population
        ):
            raise ConfigError(
                f"the data are of clients {federation.ids.tolist()[:10]} of "
                f"{federation.population}; on the roster "
                f"{self.transport.name} hosts {own[:10]} of {self.roster.population}"
            )
        if "truth" in self.plan.method.needs and not self.roster.clusters:
            raise ConfigError(
                f"{self.plan.method.kind} needs the planted clusters; this roster names none"
            )
        if "pool" in self.plan.method.needs:
            raise ConfigError(
                f"{self.plan.method.kind} needs the data of all members in one place; between "
                "machines data stay put"
            )
        if self.plan.method.sums_groups:
            raise ConfigError(
                f"{self.plan.method.kind} reads means of groups, and between machines there is no "
                "exchange yet that hides each model of a group: it runs in a simulation only"
            )
        if self.plan.method.server and not self.roster.server:
            raise ConfigError(f"{self.plan.method.kind} needs a server; this roster names none")
        if self.plan.settings.attacks is not None:
            raise ConfigError(
                "attacks are set; between machines nobody is made to attack: leave them out"
            )
        if self.plan.settings.schedule != "synchronous":
            raise ConfigError(
                f"schedule is {self.plan.settings.schedule!r}; between machines there is only "
                "'synchronous'; nodes that wait for nobody have pace = 'free'"
            )
        if self.plan.settings.time is not None:
            raise ConfigError("time is set; between machines time is real: leave it out")
        views = self.plan.settings.views
        if views is not None and self.plan.settings.new_clients is not None:
            raise ConfigError(
                "new_clients are set; with peer_sampling between machines they are not: new "
                "members would ask all others"
            )
        number = len(self.roster.members)
        if views is None and number > MAX_ALL_TO_ALL:
            raise ConfigError(
                f"the roster has {number} members; in a run of more than {MAX_ALL_TO_ALL} not "
                "everybody can ask everybody: set peer_sampling = true in the study"
            )

    def _new_incarnation(self) -> int:
        path = self.folder / "incarnation.json"
        before = 0
        if path.exists():
            try:
                before = int(json.loads(path.read_text("utf-8"))["incarnation"])
            except (ValueError, KeyError, TypeError):
                raise ConfigError(
                    f"{path} is damaged; delete it: the number of the next start is then the time"
                ) from None
        # The clock, so that a node without its folder still gets a higher number; the last one
        # plus one, where the clock was set back.
        now = max(before + 1, int(time.time()))
        # On disk before it is used: no two starts have the same number.
        write_atomically(path, json.dumps({"incarnation": now}).encode())
        return now

    def _write_journal(self, event: Mapping[str, Any]) -> None:
        """Record what arrived in the journal, for replay, and log it."""
        self._journal_file.append(json.dumps(event).encode())
        details = drop_keys(event, ("event", "round"))
        level = "debug"
        # That a member has nothing yet, or nothing new, is usual where nobody waits.
        usual = event["event"] == READ and set(details["missing"].values()) <= {
            "not_ready",
            "stale",
        }
        if (details.get("missing") and not usual) or event["event"] in (
            "refused",
            "slow",
            "withheld",
        ):
            level = "warning"
        if event["event"] == "no_sum":  # nobody's model of this round is in the server's
            level = "error"
        self.log(str(event["event"]), level=level, **details)

    def round_deadline(self) -> float:
        """Return a deadline: as set, or thrice the others' usual time and two trainings.

        At least 30 seconds.
        """
        if self.post.terms.deadline:
            return self.post.terms.deadline
        # Medians: no single member makes this node wait longer for all.
        typical = self.post.pace.typical_seconds()
        return max(_LEAST_DEADLINE, 3 * typical + 2 * statistics.median(self._local))

    # ------------------------------------------------------------------ meeting the others

    def _make_head(self, nonce: str) -> bytes:
        self._done_answers += self._state == "done"
        return Head(
            self.roster.run, self.transport.name, self.incarnation, nonce, self.loop.next_round,
            self._state, VERSION,
            heads.study_hash(self.settings), self.schema, self.roster.version, time.time(),
            sorted(self._met), self.settings,
        ).seal(self._sign)  # fmt: skip

    def ask_heads(self, names: Iterable[str]) -> dict[str, Head]:
        """Ask members for their heads; return the heads that arrived."""
        # A new one each time, so that an old head with a good signature does not count; one for all
        # members, since each signs its own name, and there may be a thousand.
        nonce = secrets.token_hex(8)

        # One queue for all threads: a task for each of a thousand members costs more than to ask.
        # One that was just removed is not asked.
        names = [name for name in names if self.roster.has_member(name)]
        waiting, found = iter(names), dict[str, Head | None]()

        def ask_in_turn() -> None:
            for name in waiting:
                found[name] = self._ask_head(name, nonce)

        with ThreadPoolExecutor(_ASKING, "coterie-heads") as pool:
            for asked in [pool.submit(ask_in_turn) for _ in range(_ASKING)]:
                asked.result()
        # In the order of the question, whichever thread was first.
        heads_of = {}
        for name in names:
            head = found[name]
            if head is not None:
                heads_of[name] = head
        done = {name for name, head in heads_of.items() if head.state == "done"}
        self._done = self._done.difference(heads_of) | done
        return heads_of

    def _ask_head(self, name: str, nonce: str) -> Head | None:
        """Ask a member for its signed head; return it if it came and is good."""
        if not self.roster.has_member(name):
            return None
        data = self.transport.ask_head(name, nonce, self.patience.ask)
        if isinstance(data, Missing):
            return None
        key = identities.decode_public_key(self.roster.member(name).key)
        try:
            return heads.parse_head(
                data,
                lambda s, d: identities.verify(key, s, d),
                run=self.roster.run,
                peer=name,
                nonce=nonce,
            )
        except Refused as refused:
            self.log("refused", level="warning", peer=name, code=refused.code, text=str(refused))
            return None

    @property
    def state(self) -> str:
        """What this node does: "starting", "running" or "done"."""
        return self._state

    @property
    def federation(self) -> Federation:
        """This node's own rows."""
        return self._federation

    @property
    def other_members(self) -> list[str]:
        """The other members that take part in the rounds, and that this node can reach.

        Where clients choose in views, a bounded number of members that it has met: the ones
        that asked it last.
        """
        own = self.transport.name
        if self._neighbors is not None:
            asked = self.transport.last_questions
            known = self.exchange.list_present(self._all_others)
            known.sort(key=lambda name: (-asked.get(name, 0.0), name))
            return sorted(known[: self._most_neighbors])
        return [name for name in self._all_others if self.roster.has_way(own, name)]

    @property
    def _all_others(self) -> list[str]:
        members = (
            self.roster.members
            if self.participants is None
            else self.participants.run_roster.members
        )
        return [m.name for m in members if m.name != self.transport.name]

    def _meet(self, names: Iterable[str]) -> dict[str, Head]:
        """Ask members that were not met for their heads; go on without members of another study.

        Raises:
            PeerMismatch: when this node's study or model differs from the roster's.
        """
        met = self.ask_heads(names)
        if self._state == "starting":
            own = self.transport.name
            odd = heads.check_study(self.roster, self.settings, self.schema, met, own)
        else:
            # No member may end a run that has begun by a head that differs.
            mine = heads.study_hash(self.settings), self.schema, VERSION
            odd = [n for n, h in met.items() if (h.study, h.schema, h.protocol) != mine]
        self._shut_out(odd, met)
        good = drop_keys(met, odd)
        self.exchange.admit(good)
        if set(good) - self._met:
            newest = [*drop_keys(self._heads, good).items(), *good.items()]
            self._note_met(dict(newest[-self._most_neighbors :]), good)
        return good

    def _shut_out(self, odd: Collection[str], met: Mapping[str, Head]) -> None:
        """Go on without members that run another study."""
        for name in odd:
            text = heads.describe_difference(self.settings, met[name].settings)
            self.log(
                "mismatch", level="error", peer=name, text=text or "another model or wire format"
            )
        self.exchange.shut_out(odd)

    def _look_for_views(self, rnd: Round) -> bool:
        """Meet the members in the views of a round; return whether all that are left are known."""
        assert self._neighbors is not None

        def find_strangers(passed_over: set[str]) -> set[str]:
            return self._find_members(rnd, passed_over) & self.exchange.list_strangers()

        # One who asks is here, whatever the rings say of it.
        asked = self.transport.last_questions.copy()
        strangers = select_keys(asked, self.exchange.list_strangers() & asked.keys())
        newest = sorted(strangers, key=lambda name: (-strangers[name], name))
        if newest:
            self._neighbors.meet(newest[: self._most_neighbors])
        return self._neighbors.look(find_strangers, self.exchange.list_strangers)

    def _prepare_views(self, rnd: Round) -> None:
        """Meet the members in the views of a round that begins."""
        assert self._neighbors is not None
        if self._look_for_views(rnd):
            # Then no stranger is in a view: one that a client has learned of can be asked as well.
            self.exchange.admit_strangers(self._neighbors.list_absent())
        # They read this node as it reads them, since who is in whose view is mutual.
        self.transport.prefer_members(self._find_members(rnd, self._neighbors.list_absent()))

    def _find_members(self, rnd: Round, passed_over: Collection[str]) -> set[str]:
        """Return the members in the views of a round when some are passed over."""
        open_ = self.exchange.open_clients(passed_over)
        views = replace(rnd, reachable=rnd.reachable & open_).views_of(torch.arange(len(rnd.ids)))
        return {self.post.host_of[client] for client in views[views >= 0].tolist()}

    def _look_for_neighbors(self, seconds: float) -> dict[str, Head]:
        """Look for the members in the views of the next round, until they are known or time is up."""
        until, first = time.monotonic() + seconds, max(0, self.loop.next_round)
        rng, everybody = Rng(self.plan.seed), torch.ones(self.task.population, dtype=torch.bool)
        rnd = Round(
            first, self.task, self.exchange, rng.at_round(first), everybody, sampling=self._sampling
        )
        while True:
            began = time.monotonic()
            if self._look_for_views(rnd) or self._have_most_begun(self._heads):
                break
            # To look takes a fifth of the time at most: many may be away.
            now = time.monotonic()
            if now > until or self._stop.wait(max(self.patience.poll, 4 * (now - began))):
                break
        return dict(self._heads)

    @staticmethod
    def _have_most_begun(met: Mapping[str, Head]) -> bool:
        """Whether most of some members are past the first round."""
        begun = sum(head.state == "running" and head.round > 0 for head in met.values())
        return 2 * begun > len(met)

    def look_around(self, seconds: float) -> dict[str, Head]:
        """Ask for heads until all members answered, most have started, or `seconds` are over."""
        if self._neighbors is not None:
            # Only members that were met are asked for messages.
            self.exchange.set_away(self._all_others)
            self.exchange.begin_round(Rng(self.plan.seed))
            return self._look_for_neighbors(seconds)
        until, met = time.monotonic() + seconds, {}
        while len(met) < len(self.other_members):
            met |= self.ask_heads(n for n in self.other_members if n not in met)
            started = [n for n, h in met.items() if h.state == "running" and h.round > 0]
            # Where most have started, nobody waits for the members that are still absent.
            if time.monotonic() > until or 2 * len(started) > len(self.other_members):
                break
            absent = len(self.other_members) - len(met)
            if absent and self._stop.wait(self._pause_for(absent)):
                break
        return met

    def _check_alone(self) -> None:
        """Check that no other process is this member: ask for its own name at its address.

        Raises:
            TransportError: when another one answers there with this member's key.
        """
        name = self.transport.name
        # Nobody may answer there: the address can be one that only others reach.
        found = self.ask_heads([name]).get(name)
        if found is not None and found.inc != self.incarnation:
            began = datetime.fromtimestamp(found.inc, UTC)
            member = self.roster.member(name)
            where = "behind its stream" if member.is_outbound else f"at {member.address}"
            raise TransportError(
                f"{name} runs already: {where} a process answers "
                f"with its key, started on {began:%Y-%m-%d %H:%M:%S} UTC ({found.state}, round "
                f"{found.round}); stop that one first, or make a key for another member"
            )

    def _pause_for(self, absent: int) -> float:
        """Return the seconds between two questions to all absent members: longer for many."""
        return max(self.patience.poll, _PAUSE_EACH * absent)

    def _start_answering(self) -> None:
        """Answer those who ask how this node is, which roster it has, and how good the link is."""
        if self.audit is not None:
            study = heads.study_hash(self.settings)
            resumes = self.loop.next_round
            self.audit.record_start(
                self.roster, inc=self.incarnation, resumes=resumes, study=study, schema=self.schema
            )
        self.answer_visitors()
        if (keeper := self.keeper) is not None:
            keeper.save_roster()
            self.transport.serve_roster(lambda: keeper.sealed)

    def answer_visitors(self) -> None:
        """Answer those who ask how this node is, and how good the link is."""
        self.transport.serve_head(self._make_head)
        self.post.serve_probe()

    def meet_others(self) -> bool:
        """Wait for the other members and check that they run the same study.

        Returns:
            Whether they have started already, so that this node has to catch up.

        Raises:
            PeerMismatch: when this node's study or model differs from the roster's.
        """
        # Answers come first: the others wait for this node as it waits for them.
        self._start_answering()
        self._check_alone()
        met = self.look_around(self.patience.start)
        # The newest roster first: study and model are checked against it.
        if (newer := self._fetch_newer_roster(met)) is not None:
            self._take_roster(*newer)
        odd = heads.check_study(self.roster, self.settings, self.schema, met, self.transport.name)
        if self._neighbors is None:
            self.exchange.set_away([n for n in self._all_others if n not in met])
        self._shut_out(odd, met)
        absent = sorted(set(self.other_members) - set(met))
        self.log("met", peers=sorted(met), absent=absent, resumes=self.loop.next_round)
        half = {"half": self.post.terms.half} if self.is_free else {}
        self._write_journal(
            {
                "event": "start",
                "round": self.loop.next_round,
                "incarnation": self.incarnation,
                **half,
            }
        )
        self._note_met(met, None if self._neighbors is None else {})
        self._state = "running"
        if isinstance(self.exchange, FreeExchange):
            self.exchange.is_watching = True
            return False  # nobody is ahead of anybody
        if self._neighbors is not None:
            # No member lists all that take part.
            return self._have_most_begun(met) or self.loop.next_round >= 0
        # A running member that does not list this node has begun without it.
        late = any(h.state == "running" and self.transport.name not in h.met for h in met.values())
        # Also after a restart: the others have gone on meanwhile.
        return late or self.loop.next_round >= 0

    def _await_quorum(self) -> None:
        """Wait until enough other members are there.

        A round alone must not pass for a federated one.

        A client of a server needs that one only, and waits for it in the round.
        """
        if self.plan.method.server and not self.exchange.server:
            return
        may_say, began = RateLimit(1, _SAY_AGAIN), time.monotonic()
        while not self._stop.is_set():
            names = self.other_members
            possible = len(names if self._neighbors is None else self._all_others)
            present, least = (
                self.exchange.list_present(names),
                min(self.patience.min_peers, possible),
            )
            if len(present) < least and self._neighbors is not None:
                self._look_for_neighbors(0.0)
                names = self.other_members
                present = self.exchange.list_present(names)
            elif len(present) < least:
                # Absent members are asked as well, because they may be back.
                met = self.ask_heads(name for name in names if name not in present)
                self.exchange.note_present(met)
                if set(met) - self._met:
                    self._note_met(self._heads | met)
                present = self.exchange.list_present(names)
            if len(present) >= least:
                break
            self._check_quorum(names, present, least, time.monotonic() - began)
            if may_say() is not None:
                self._log_quorum(len(present), least, set(names) - set(present))
            self.is_waiting = True
            self.update_roster()
            self._stop.wait(self._pause_for(len(names) - len(present)))
        if self.is_waiting:
            self.is_waiting = False
            self.log("waited", seconds=round(time.monotonic() - began, 1))
            if self.loop.next_round >= 0 and not self.is_free:
                self._catch_up()

    def _keep_step(self) -> None:
        """Wait a little for those who read this node when half of them are rounds behind it.

        Who reads others is in step by that. Who reads nobody, or nobody who still trains, would run
        away from its readers, and the messages that they need would be dropped. It waits no longer
        than it trains, so that a member that only says so cannot hold it up.
        """
        began, longest = time.monotonic(), self.post.pace.local()
        # Who asks no more, or not for so many rounds, is not waited for.
        newest = self.post.terms.slow + KEEP * longest
        left_out = {self.transport.name, *self.post.pace.list_slow(self.loop.next_round)}
        while not self._stop.is_set() and (now := time.monotonic()) - began < longest:
            recent = []
            for name, (lag, at) in self.transport.outbox.lags.copy().items():
                if now - at < newest and name not in left_out:
                    recent.append(lag)
            # At half of KEEP there is still time to wait before their messages are dropped.
            behind = sum(lag >= KEEP // 2 for lag in recent)
            if not behind or 2 * behind < len(recent):
                return
            self._stop.wait(_LOOK_AGAIN)

    def _check_quorum(
        self, names: Iterable[str], present: Collection[str], least: int, waited: float
    ) -> None:
        """Check that enough others can still come, and that this node may wait for them.

        Raises:
            QuorumError: in a run that has begun, when it cannot go on.
        """
        gone = sorted(self._done.intersection(names).difference(present))
        never = len(list(names)) - len(gone) < least
        if self._neighbors is not None:  # there are others that it has not met
            never = False
        if self.loop.next_round < 0 or not (never or waited > self.patience.quorum_wait):
            return
        why = f"for {waited:.0f} s (quorum_wait)"
        if never:
            why = f"and {', '.join(gone[:20])} said that they are done, and have left"
        raise QuorumError(
            f"{len(present)} of {least} other members are here (min_peers) {why}: this node has "
            f"done {self.loop.next_round} of {self.plan.settings.rounds} rounds; started again, it "
            "continues from its checkpoint; with min_peers = 0 it does the rest alone, which is "
            "marked"
        )

    def _log_quorum(self, present: int, least: int, absent: Iterable[str]) -> None:
        text = f"{present} of {least} other members are here (min_peers); nothing is trained until "
        self.log("waiting", level="warning", text=text + "then", absent=sorted(absent)[:20])

    def _note_met(self, met: Mapping[str, Head], new: Mapping[str, Head] | None = None) -> None:
        """Note the members that were met, by their signed heads.

        Args:
            met: all that count as met from now on.
            new: those of them that the audit log names; all when None.
        """
        self._heads = dict(met)
        self._met = frozenset(met)
        if self.audit is not None:
            for name, head in (met if new is None else new).items():
                about = {"inc": head.inc, "version": head.roster, "state": head.state}
                self.audit.record_join(name, self.roster, **about, round=head.round)

    def _catch_up(self) -> None:
        """Jump to the round of the others, who do not wait for a node behind them: see `catchup`.

        They do wait for the server, and keep what they sent it: it repeats the round that it did
        not store.
        """
        if self.exchange.server:
            return
        heads, here = self.ask_heads(self.other_members), self.loop.next_round
        hint, self.post.ahead = self.post.ahead, None
        # No single member can send this node ahead: more than half must have reached the round.
        claimed = catchup.newest_backed_round(
            (h.round for h in heads.values()), len(self.other_members)
        )
        possible = self.clock.newest_possible_round(self._seconds_per_round())
        # Whatever others claim, this node runs the last round itself.
        target = min(
            claimed, self.plan.settings.rounds - 1, claimed if possible is None else possible
        )
        # One round behind, all messages are still there, and readers wait for those of this node. A
        # server does not: what it has averaged is over.
        late = target - here > (0 if self.plan.method.server else 1)
        if late and here >= 0:
            more = {"claimed": claimed} if claimed != target else {}
            self.log("catch_up", level="warning", came_from=here, goes_to=target, **more)
            self.loop.skip_rounds(target)
        elif hint is not None and target <= here:
            # A hint is unsigned: a false one must not cost a question to all members in each
            # round.
            self._ignore_hints_until = here + KEEP
            self.log(
                "not_backed",
                level="warning",
                text=f"a peer says that it is past round {here}; most are not",
            )

    def _server_signs(self, round: int) -> bool:
        """Whether the server's signed head says that it is in a round or past it."""
        head = self.ask_heads([self.roster.server]).get(self.roster.server)
        return head is not None and head.round >= round

    def _seconds_per_round(self) -> float:
        """Seconds that this node has trained in a round so far."""
        skipped = sum(last + 1 - first for first, last in self.loop.skipped_rounds)
        # One more for the warm-up.
        return self._timing()["train_s"] / max(1, self.loop.next_round + 1 - skipped)

    def _make_clock(self) -> catchup.RunClock:
        """The clock of the run: from the checkpoint on, or from when the roster was signed."""
        saved, issued = self.folder / checkpoint.FILE, self.roster.issued
        index, since = -1, datetime.fromisoformat(issued).timestamp() if issued else None
        if self.loop.next_round >= 0 and saved.exists():
            # When the checkpoint was written, this node was in step.
            index, since = self.loop.next_round, saved.stat().st_mtime
        # A time that is still to come is another clock's, or this one's before it was set. It bounds
        # nothing: with it a node would stay in rounds that the others have left until it has come.
        late = since is not None and since > time.time()
        return catchup.RunClock(index, None if late else since)

    # ------------------------------------------------------------------ the roster

    def update_roster(self) -> None:
        """Take a newer roster from its file or from another member; look for one once a round.

        Raises:
            TransportError: when this node cannot go on with it: see `keeper.check_same_run`.
        """
        if self.keeper is None:
            return
        found = self.keeper.reload_file()
        if found is not None:
            self._adopt_roster(found)
        self._check_certificates()
        # In a thread of its own: a member that does not answer must not delay the round.
        if self._scouted is None:
            self._scouted = self._scout.submit(self._ask_around, self.loop.next_round)
        elif self._scouted.done():
            offered, self._scouted = self._scouted.result(), None
            if offered is not None:
                self._take_roster(*offered)

    def _check_certificates(self) -> None:
        """Log certificates that end soon, each notice once.

        Raises:
            TransportError: when this node's own one is over: nobody answers it any more.
        """
        entries = index_by_name(self.roster.everyone)
        for name, (days, notice) in rosters.find_ends(self.roster, datetime.now(UTC)).items():
            if notice is None:
                continue
            key = name, entries[name].certificate, notice
            if key in self._noticed:
                continue
            self._noticed.add(key)
            end = entries[name].expires
            if notice == 0 and name == self.transport.name:
                raise TransportError(
                    f"the certificate of {name} ended on {end}, and the others refuse it: send the "
                    "organizer a new request, put the new certificate and roster in place, and "
                    "start the node again; it continues from its checkpoint"
                )
            self.log(
                "certificate", level="warning" if notice > 7 else "error", peer=name,
                days=round(days, 1), text=f"its certificate ends on {end}",
            )  # fmt: skip

    def _ask_around(self, number: int) -> tuple[str, bytes] | None:
        """Ask one member, another one every time, whether it has a newer roster."""
        alive = sorted(self.transport.alive_members())
        if not alive:
            return None
        # One a round: in a while all are asked, and a round costs one question.
        return self._fetch_newer_roster(self.ask_heads([alive[number % len(alive)]]))

    def _fetch_newer_roster(self, met: Mapping[str, Head]) -> tuple[str, bytes] | None:
        """Return the newest roster of some members if their signed heads say it is newer."""
        # One question, to the member whose signed head has the newest version.
        name = max(met, key=lambda n: met[n].roster, default="")
        if self.keeper is None or not name or met[name].roster <= self.roster.version:
            return None
        data = self.transport.ask_roster(name, self.patience.ask)
        return None if isinstance(data, Missing) else (name, data)

    def _take_roster(self, peer: str, data: bytes) -> None:
        assert self.keeper is not None
        found = self.keeper.accept_offer(data, peer)
        if found is not None:
            self._adopt_roster(found)

    def _adopt_roster(self, new: Roster) -> None:
        """Go on under a newer roster: its members, their keys, and links that it allows."""
        check_same_run(self.roster, new, self.transport.name)
        different = describe_changes(self.roster, new)
        self.log("roster", **different)
        if self.audit is not None:
            changes = select_keys(different, ("removed", "rekeyed"))
            self.audit.record_roster(new, **changes)
        own = self.transport.name
        if own in different["moved"]:
            self.log(
                "moved",
                level="warning",
                text=f"version {new.version} of the roster has the address "
                f"{new.member(own).address} for this node: stop it, and start it there; here it "
                "is not found any more",
            )
        self.roster = seen = new
        if self.participants is not None:
            self.participants = self.participants.with_roster(new)
            seen = self.participants.roster_for(self.transport.name)
        # Keys first: no message by an old key counts under the new roster.
        self.post.use_roster(replace(seen, schema=self.schema))
        self.transport.use_roster(new)

    # ------------------------------------------------------------------ the run

    def run(self) -> None:
        """Run from the checkpoint or the start to the end."""
        for line in self.loop.check_translation(self._federation):
            self.log("check", text=line)
        if self.late:
            self._join_late()
            return
        # A run of which more rounds are wanted by now is not over.
        if self._is_answering and self.loop.is_finished and checkpoint.is_finished(self.folder):
            self._answer_again()
            return
        behind = self.meet_others()
        # Catching up leaves out rounds, never the warm-up.
        if self.loop.next_round < 0 and not self._stop.is_set():
            self._run_round()
        if behind:
            self._catch_up()
        while not self.loop.is_finished and not self._stop.is_set():
            self._run_round()
        if self._stop.is_set():
            self.log("stopped", resumes=self.loop.next_round)
            return
        if self.loop.is_untrained:
            raise TransportError(
                "the server left this node out of every round: it has trained nothing and has no "
                "model"
            )
        # Before the final evaluation, which may take long: others may ask already.
        if isinstance(self.loop, FreeLoop):
            self.loop.publish_last()
        self._answer_newcomers()
        # With a server, the final evaluation asks it for models: this node is done only afterward.
        self._state = "done" if not self.plan.method.server else "running"
        self.loop.evaluate_final()
        self._finish()

    def _finish(self) -> None:
        """Store the end of the run, with the models that are taken home, and stay for others."""
        models = collect_models(self.loop, self.plan.model, self.plan.method.kind)
        if self.plan.settings.check:
            home = check_models_home(models, self.loop)
            self.loop.translation = {**self.loop.translation, "home": home}
        checkpoint.finish_run(
            self.folder, self.loop, self._identity, self._timing(), models.make_files()
        )
        self._state = "done"
        traffic = self.post.traffic
        rounds = {"skipped": self.loop.skipped_rounds, "alone": self.loop.alone_rounds}
        marked: dict[str, Any] = drop_empty(rounds)
        self.log("done", received=traffic.received, bytes=traffic.bytes, **marked)
        self._linger()

    @property
    def _reputation(self) -> Reputation | None:
        """What this node's clients remember of others; None where they accept everything."""
        found = (one.state for one in self.loop.extensions if isinstance(one, AcceptanceExtension))
        return next(found, None)

    def _run_round(self) -> None:
        self.log.round = self.loop.next_round
        # Between rounds, so that one round has one roster.
        self.update_roster()
        self._await_quorum()
        if not self.is_free:
            self._keep_step()
        if self._stop.is_set():
            return
        index, began, traffic = self.loop.next_round, time.perf_counter(), self.post.traffic
        exchanging, received = traffic.seconds, traffic.received
        self.log.round, before = index, self._reputation
        try:
            self.loop.run_next_round()
        except RoundMissed as missed:
            if index < 0 and type(self.plan.method).enroll is not Method.enroll:
                raise TransportError(
                    f"{self.plan.method.kind} enrolls its clients before the first round, and this "
                    "node came too late"
                ) from None
            self.log("round_missed", level="warning", text=str(missed))
            self._write_journal({"event": "missed", "round": index})
            self.loop.skip_rounds(index + 1)
        heard = traffic.received > received
        if isinstance(self.exchange, FreeExchange):
            # What came before is read again; before the first messages nobody has any.
            heard = self.exchange.has_read or self.exchange.is_early
        # What arrived is of this round, so the others are near.
        if heard:
            self.clock.note_in_step(index)
        elif self.exchange.is_asking and self.other_members:
            self.loop.note_alone(index)
            self.log("alone", level="warning", text="no message of another member arrived")
        # The audit log is synced before the checkpoint: no stored round is missing in it.
        self._write_down(index, before)
        seconds = time.perf_counter() - began
        exchanging = traffic.seconds - exchanging
        # The times of the warm-up and of each round; None of rounds that were left out.
        known = self._ends[: index + 1]
        self._ends = [*known, *[None] * (index + 1 - len(known)), round(time.time(), 3)]
        # The newest rounds only, so that the median follows a machine that becomes slower.
        self._local = [*self._local[-20:], seconds - exchanging]
        if self.is_free:
            # Before the checkpoint, and on the disk: no stored round is missing in the journal.
            self._write_journal({"event": "round", "round": index, **self._times})
            self._journal_file.sync()
        checkpoint.save(self.folder, self.loop, self._identity, self._timing())
        if not self.is_free:
            self._write_journal({"event": "round", "round": index})
        values: dict[str, Any] = self.loop.mean_validation()
        if lost := int(self.loop.diverged_on_validation.sum()):
            values[DIVERGED.name] = lost
        self.log("round", seconds=seconds, exchanging=exchanging, **values)
        for client, why in sorted(self.loop.refused.items()):
            peer = self.post.host_of.get(client, "")
            self.log("message_refused", level="warning", peer=peer, client=client, text=why)
        if (
            not self.is_free
            and self.post.ahead is not None
            and self.post.ahead > self.loop.next_round > self._ignore_hints_until
        ):
            self._catch_up()

    def _measure_times(self, index: int) -> tuple[float, float]:
        """Return the seconds since the warm-up, and the share of them that the network took."""
        begun = next((end for end in self._ends if end is not None), time.time())
        elapsed = max(0.0, time.time() - begun)
        spent = self.post.traffic.seconds + self._earlier.get("exchange_s", 0.0)
        idle = spent / elapsed if elapsed else 0.0
        self._times = {"elapsed": round(elapsed, 3), "idle": round(min(1.0, idle), 4)}
        return self._times["elapsed"], self._times["idle"]

    def _write_down(self, index: int, before: Reputation | None) -> None:
        """End a round in the audit log, with the models that were refused.

        Raises:
            OSError: when it cannot be written.
        """
        if self.audit is None:
            return
        now, refused, own = (
            self._reputation,
            list[tuple[int, int, str, int | None]](),
            self.exchange.ids,
        )
        found = [(reader, read, None) for reader, read in self.loop.record.list_refused(index)]
        # With reputations: new terms, which say from which round on a client is read again.
        if now is not None and before is not None:
            terms = now.list_new_terms(before)
            if terms:
                found = [(int(own[row]), read, until) for row, read, until in terms]
        for reader, read, until in found:
            refused.append((reader, read, self.post.host_of.get(read, ""), until))
        self.audit.record_rejections(index, refused)
        self.audit.end_round(index)

    def _timing(self) -> dict[str, Any]:
        free: dict[str, float] = {}
        if self.is_free:
            before = self._earlier.get("exchange_s", 0.0)
            free = {"exchange_s": self.post.traffic.seconds + before}
        return {
            **free,
            "ends": self._ends,
            "wall_s": time.perf_counter() - self._started + self._earlier.get("wall_s", 0.0),
            "train_s": self.task.trainer.totals.seconds + self._earlier.get("train_s", 0.0),
            "train_samples": self.loop.train_samples,
        }

    # ------------------------------------------------------------------ members that join late

    @property
    def _is_answering(self) -> bool:
        """Whether newcomers ask this node."""
        return self.participants is not None and self.participants.answers_newcomers(
            self.transport.name
        )

    def _answer_newcomers(self) -> None:
        """From the last round on, answer members that join late."""
        if self._is_answering:
            assert self.participants is not None
            wide, engine = (
                replace(self._federation, population=self.roster.population),
                self.task.engine.name,
            )
            # The engine and the block that this run chose: a larger population might choose
            # others.
            settings = replace(self.plan.settings, engine=engine, block=self.task.block)
            plan = replace(self.plan, settings=settings)
            if not latecomers.answer_newcomers(self.post, self.loop, lambda: plan.make_task(wide)):
                self.log(
                    "withheld",
                    level="warning",
                    text="the model is not finite; new clients get no answer",
                )

    def _answer_again(self) -> None:
        """Answer members that join late after a run that this node has finished before."""
        self._start_answering()
        heads.check_study(self.roster, self.settings, self.schema, {})
        self._answer_newcomers()
        self._state = "done"
        assert self.participants is not None
        self.log(
            "answering",
            text=f"the run is over; waiting for {', '.join(self.participants.late_members)} to "
            "join",
        )
        self._linger()

    def _join_late(self) -> None:
        """Join a run that has ended by the method's rule: train and be tested; change nobody."""
        assert isinstance(self.exchange, latecomers.LateExchange)
        assert self.participants is not None
        met = self._await_the_end()
        if self._stop.is_set():
            self.log("stopped")
            return
        # A finished member's head names the round after its last one.
        last, now = (
            max(head.round for head in met.values()) - 1,
            latecomers.make_joining(self.loop, self.participants),
        )
        self._state = "running"
        if isinstance(self.plan.method, ServerMethod):
            models = newcomers.iterate_served_models(now, self._fetch_table())
        else:
            models = newcomers.iterate_peer_models(now, replace(self.loop.state, moments=None))
        final = newcomers.evaluate_newcomers(
            now, self._follow_models(models), self.loop.record, last
        )
        self.loop.evaluated_models, self.loop.next_round = final, last + 1
        if len(self.loop.tracker.best):
            self.loop.tracker = replace(self.loop.tracker, best=final)
        checkpoint.save(self.folder, self.loop, self._identity, self._timing())
        self._finish()

    def _fetch_table(self) -> Tensor:
        """The server's models, with 0 in what clients keep at home."""
        assert isinstance(self.exchange, latecomers.LateExchange)
        part = self.task.sharing
        try:
            table = self.exchange.fetch_models(self.loop.state.params)
        except RoundMissed:
            raise TransportError(
                f"the server {self.roster.server} has no model for new clients: see its log"
            ) from None
        return table if part.shares_all else part.shared.expand_to_rows(table)

    def _follow_models(self, models: newcomers.ModelSteps) -> newcomers.ModelSteps:
        """Pass a newcomer's models on, and log its rounds."""
        # The first step is the joining, before round 0.
        for index, (params, judged) in enumerate(models, start=-1):
            self.loop.state = replace(self.loop.state, params=params)
            self.log.round = index
            self.log("joined" if index < 0 else "round", received=self.post.traffic.received)
            yield params, judged

    def _await_the_end(self) -> dict[str, Head]:
        """Wait until the members that newcomers ask are done; return the heads of all that answer.

        A run that goes on is waited for, however long it takes; members that do not answer for
        `Patience.start` seconds. Fewer peers than `Patience.min_peers` are no end of a run.

        Raises:
            TransportError: when the members that newcomers ask do not answer, and none of them has
                to be there.
            PeerMismatch: when this node's study or model differs from the roster's.
        """
        self._start_answering()
        names, least = self.other_members, min(self.patience.min_peers, len(self.other_members))
        if self.plan.method.server:
            names, least = [self.roster.server], 0
        self._check_alone()
        seen, until = {}, time.monotonic() + self.patience.start
        may_say = RateLimit(1, _SAY_AGAIN)
        while True:
            self.update_roster()
            met = self.ask_heads(names)
            found = map_values(_progress_of, met)
            if found != seen:
                seen, until = found, time.monotonic() + self.patience.start
                self.log(
                    "waiting",
                    text=", ".join(f"{n}: {s}, round {r}" for n, (s, r) in found.items())
                    or "nobody",
                )
            # Where nobody answers, this is true as well; then the time limit below decides.
            ended = all(state == "done" for state, _ in found.values())
            over = time.monotonic() > until
            self.is_waiting = over and ended and len(met) < least
            if ended and (len(met) == len(names) or (over and not self.is_waiting)):
                break
            if self.is_waiting and time.monotonic() > until + self.patience.quorum_wait:
                raise QuorumError(
                    f"{len(met)} of {least} other members have answered (min_peers) for "
                    f"{self.patience.quorum_wait:.0f} s (quorum_wait): start this node again with "
                    "them"
                )
            if self.is_waiting and may_say() is not None:
                self._log_quorum(len(met), least, set(names) - set(met))
            if self._stop.wait(self._pause_for(len(names) - len(met))):
                return met
        odd = heads.check_study(self.roster, self.settings, self.schema, met, self.transport.name)
        if not set(met) - set(odd):
            raise TransportError(
                f"{', '.join(names)} did not answer for {self.patience.start:.0f} s; a finished "
                "member "
                "answers new clients for `linger` seconds, and again when its `coterie node` is "
                "started again"
            )
        self.exchange.set_away([n for n in names if n not in met])
        self.exchange.shut_out(odd)
        self._note_met(met)
        return met

    def _linger(self) -> None:
        """Stay while others need this node's messages.

        Those are members that took part but are not done, and new ones.

        Who has not begun yet needs them all. Who does not answer now, or was killed, may come back.
        """
        seen, until = {}, time.monotonic() + self.patience.linger
        late, staying_for = list[str](), set[str]()
        # Where no messages are read, only its head shows that a member takes part, and the way to
        # one that has not begun may be lost just now.
        newest = {} if self.post.traffic.received else dict(self._heads)
        if self._is_answering and not self.late and self.participants is not None:
            late = self.participants.late_members
        while time.monotonic() < until:
            self.update_roster()
            met = self.ask_heads([*self.other_members, *late])
            found = map_values(_progress_of, met)
            done = self._done | {n for n, head in met.items() if head.state == "done"}
            late = [n for n in late if n not in done]
            if self.late and (self._done_answers >= len(self._met) or not found):
                # the last of those who waited for this node reads its answer
                self._stop.wait(self.patience.poll)
                return
            newest |= met
            starting = {name for name, head in newest.items() if head.state == "starting"}
            there = self.transport.alive_members() | self.transport.lost_members()
            there |= found.keys() | starting
            open_ = there & set(self.other_members) - done
            if not late and not self.late and not open_:
                return
            # Said once for each of them, not in every look.
            if open_ - staying_for:
                staying_for |= open_
                self.log("staying", text=f"until {', '.join(sorted(open_)[:20])} are done")
            if found != seen:
                seen, until = found, time.monotonic() + self.patience.linger
            if self._stop.wait(self.patience.poll):
                return

    def stop(self) -> None:
        """End after the current round; callable from a signal handler or another thread."""
        self._stop.set()

    def close(self) -> None:
        """Stop asking and close the journal. The transport's owner closes the transport."""
        self._stop.set()
        self.post.close()
        if isinstance(self.exchange, FreeExchange):
            self.exchange.close()
        # An open question must not delay the end.
        self._scout.shutdown(wait=False, cancel_futures=True)
        self._journal_file.close()

    def prometheus_samples(self) -> list[Sample]:
        """Return numbers for Prometheus."""
        out: list[Sample] = []

        def add(name: str, text: str, value: float, **about: str) -> None:
            labels = {"node": self.transport.name, **about}
            out.append((f"coterie_{name}", text, labels, value))

        loop, traffic = self.loop, self.post.traffic
        alive = len(self.transport.alive_members())
        add("round", "round that is going on", loop.next_round)
        add("peers_alive", "members that say that they take part", alive)
        add("waiting", "1 while fewer than min_peers are there", int(self.is_waiting))
        add("alone_rounds", "rounds without any message", loop.num_alone)
        add("received_total", "messages received", traffic.received)
        add("received_bytes_total", "bytes received", traffic.bytes)
        add("exchange_seconds_total", "time spent exchanging", traffic.seconds)
        for name, (days, _) in rosters.find_ends(self.roster, datetime.now(UTC)).items():
            add("certificate_days", "days to a certificate's end", days, member=name)
        for name, (median, is_slow) in sorted(self.post.pace.describe().items()):
            what = "median of a member's newest times, NaN while it has none"
            add("member_seconds", what, median, member=name)
            what = "1 for a member that was slow and is asked less often"
            add("member_slow", what, int(is_slow), member=name)
        for reason, number in sorted(traffic.missing.items()):
            add("missing_total", "messages missing", number, reason=reason)
        for name, mean in loop.mean_validation().items():
            add(f"validation_{name}", "newest, mean over clients; NaN when one diverged", mean)
        what = "clients of this node whose validation loss is not finite"
        add(DIVERGED.name, what, int(loop.diverged_on_validation.sum()))
        add("process_id", "id of the process", os.getpid())
        return out
