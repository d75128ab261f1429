"""A node as a service of a federation: it passes statements on, and runs approved studies in turn.

One process listens at the member's address for all studies. Statements about studies are pulled
from other members, a few of them at a time, and kept as files (`ledger`); commands of the same
machine write theirs into the same folder. A study begins when its quorum has approved it and is
there, by the same order everywhere, and runs as a node of its own run over the same links. All
that a restart needs is on disk: the statements, and the checkpoints of runs.
"""

import itertools
import json
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from coterie._util.claims import claim_folder, find_owner
from coterie._util.files import write_atomically
from coterie.errors import ConfigError, CoterieError, DiskFull, QuorumError, TransportError
from coterie.net import consent, servicefile, statements
from coterie.net import roster as rosters
from coterie.net.grpc_run import GrpcRun
from coterie.net.grpc_transport import GrpcTransport
from coterie.net.head import study_hash
from coterie.net.identity import Identity, check_dates, encode_public_key
from coterie.net.keeper import Keeper, describe_changes
from coterie.net.ledger import FAILED, Entry, Ledger
from coterie.net.log import Log, MetricsServer, Sample
from coterie.net.node import Node, RunSpec
from coterie.net.nodefile import NodeFile, make_run_spec
from coterie.net.outbox import Missing
from coterie.net.payload import Refused, escape_text, parse_strict_json
from coterie.net.process import exit_on_signal, host_node, locate_run
from coterie.net.roster import Member, Roster
from coterie.net.servicefile import ServiceFile
from coterie.net.statements import DIGEST, MAX_STATEMENT, Proposal, Word
from coterie.net.wire import SIGNATURE, canonical_json
from coterie.results import summary
from coterie.results.coverage import MARKED_ROUNDS
from coterie.runtime import checkpoint
from coterie.studies.config import StudyConfig

STATE = "service.json"
"""What the service does, in the folder of studies, for `coterie studies`."""
CLAIM = ".service"
"""The folder, in that of studies, which a running service claims."""
_PAUSE = 1.0  # seconds between two looks at files and members
_ASKED = 8  # members that are asked at a look, others at the next
_ANSWER = 5.0  # seconds for an answer
_FETCHED = 64  # statements that one member is asked for at a look
_HERE = 20.0  # seconds for which a member counts as here after its answer
_AGAIN = 60.0  # seconds until a statement that was refused is asked for again
# Refusals for what another member may have taken: who came first, and how many are open.
_MAY_DIFFER = ("name", "many", "age", "proposal", "signer", "signature", "time")
_MAX_REFUSED = 10_000
_RETRY = 30.0  # seconds until a study is tried again whose quorum has left
_MAX_ANSWER = 1024 * 1024  # bytes of what a member says of its statements


@dataclass(frozen=True)
class _View:
    """What another member has said of itself: when, and the studies that it is in and has begun."""

    at: float
    running: str
    begun: str


class StudyKeeper(Keeper):
    """The roster of a study: the members of its proposal, by the federation's newest roster.

    Args:
        federation: knows the federation's newest roster.
        derive: makes the study's roster of it.
    """

    def __init__(self, federation: "FederationKeeper", derive: Callable[[Roster], Roster]) -> None:
        self._federation, self._derive = federation, derive
        self.roster = derive(federation.roster)

    @property
    def sealed(self) -> bytes:
        """The federation's roster, as it was signed."""
        return self._federation.sealed

    def save_roster(self) -> None:
        """Keep nothing: the federation's is kept."""

    def reload_file(self) -> Roster | None:
        """Return the study's roster when the federation has a newer one."""
        if self._federation.roster.version == self.roster.version:
            return None
        self.roster = self._derive(self._federation.roster)
        return self.roster

    def accept_offer(self, data: bytes, peer: str) -> Roster | None:
        """Return the study's roster when another member has sent a newer one."""
        self._federation.accept_offer(data, peer)
        return self.reload_file()


class FederationKeeper(Keeper):
    """The newest roster of a federation, which several threads look for.

    Attributes:
        on_change: called with a newer roster.
    """

    def __init__(self, file: Path, organizer: Path, folder: Path, log: Callable[..., None]) -> None:
        self._one_at_a_time = threading.RLock()
        self.on_change: Callable[[Roster, Roster], None] = lambda before, now: None
        super().__init__(file, organizer, folder, log)

    def reload_file(self) -> Roster | None:
        """Return the roster of the file when it has changed and holds a newer one."""
        with self._one_at_a_time:
            before = self.roster
            return self._tell(before, super().reload_file())

    def accept_offer(self, data: bytes, peer: str) -> Roster | None:
        """Return the roster that another member sent, when it is newer."""
        with self._one_at_a_time:
            before = self.roster
            return self._tell(before, super().accept_offer(data, peer))

    def _tell(self, before: Roster, found: Roster | None) -> Roster | None:
        if found is not None:
            self.on_change(before, found)
        return found


def derive_roster(proposal: Proposal, federation: Roster, plan: RunSpec) -> Roster:
    """Return the roster of a study: its members, numbered as it says, with today's keys.

    Args:
        proposal: the study.
        federation: the federation's roster; members that are not on it are removed ones.
        plan: the study's run.
    """
    known, members, removed = {m.name: m for m in federation.members}, list[Member](), list[int]()
    for number, name in enumerate(proposal.members):
        if name in known:
            members.append(replace(known[name], clients=(number,)))
        else:
            removed.append(number)
    return Roster(
        proposal.run,
        tuple(members),
        len(proposal.members),
        version=federation.version,
        study=study_hash(plan.common_settings(len(proposal.members))),
        schema=plan.compute_schema(tuple(proposal.features), proposal.outputs),
        server=proposal.server,
        issued=datetime.fromtimestamp(proposal.time, UTC).isoformat(timespec="seconds"),
        removed=tuple(removed),
        relays=federation.relays,
    )


@dataclass
class Membership:
    """A member's folder of studies: it reads statements, and signs its own.

    Args:
        file: node.toml.
        own: this member's identity.
        organizer: the organizer's public key.
        ledger: the statements.
        keeper: the federation's roster.
    """

    file: ServiceFile
    own: Identity
    organizer: str
    ledger: Ledger
    keeper: FederationKeeper

    @staticmethod
    def open(file: ServiceFile, log: Callable[..., None] = lambda *_, **__: None) -> "Membership":
        """Read a member's identity, the roster and its statements.

        Raises:
            TransportError: when identity and roster do not belong together.
        """
        own = file.load_identity()
        folder = file.resolve_path(file.studies)
        organizer = file.resolve_path(file.organizer)
        keeper = FederationKeeper(file.resolve_path(file.roster), organizer, folder, log)
        if problems := rosters.check_own(keeper.roster, own):
            raise TransportError(problems[0])
        key = encode_public_key(rosters.load_organizer_key(organizer))
        return Membership(file, own, key, Ledger(folder, own.name, key), keeper)

    def propose(self, proposal: Proposal) -> None:
        """Sign a proposal, and the proposer's own approval.

        Raises:
            ConfigError: when it is not one that members take.
        """
        try:
            added = self.ledger.add(statements.seal(proposal, self.own.sign), self.keeper.roster)
        except Refused as refused:
            raise ConfigError(str(refused)) from None
        if added is None:
            raise ConfigError(f"{proposal.name} is proposed already")
        self.say("approval", self.ledger.find(proposal.name))

    def say(self, kind: str, entry: Entry) -> None:
        """Sign a word about a study.

        Raises:
            ConfigError: when this member may not say it.
        """
        word = Word(
            self.keeper.roster.run, self.organizer, self.own.name, round(time.time(), 3), kind,
            entry.proposal.digest,
        )  # fmt: skip
        try:
            self.ledger.add(statements.seal(word, self.own.sign), self.keeper.roster)
        except Refused as refused:
            raise ConfigError(str(refused)) from None

    def parse_study(self, entry: Entry) -> StudyConfig:
        """Return the study of an entry, with the modules that it names."""
        return statements.parse_proposed(entry.proposal.study, to_run=True)

    def make_node_file(self, proposal: Proposal) -> NodeFile:
        """Return the node file of a study.

        Raises:
            ConfigError: when this member has no data of its role.
        """
        server = proposal.server == self.own.name
        return self.file.make_node_file(
            proposal.name, proposal.role, server=server, quorum=proposal.quorum
        )

    def locate_run(self, entry: Entry, study: StudyConfig) -> Path:
        """Return the folder of this member's run of a study."""
        return locate_run(entry.folder / self.own.name, study)

    def describe(self, entry: Entry, state: dict[str, Any]) -> tuple[str, str]:
        """Return in one word how it stands with a study here, and what there is to say about it.

        Args:
            entry: the study.
            state: see `load_state`.
        """
        name, roster, proposal = self.own.name, self.keeper.roster, entry.proposal
        taking_part = entry.list_taking_part(roster)
        number = f"{len(taking_part)} of {proposal.quorum} approved"
        if proposal.server not in ("", *taking_part):
            number += f", and the server {proposal.server} does not take part"
        if entry.says("end", name):
            return "done", f"results in {entry.folder / name}{self._describe_gaps(entry)}"
        if entry.is_withdrawn:
            return "withdrawn", f"by {proposal.by}"
        if entry.says("stop", name):
            return "stopped", "by this member"
        if (entry.folder / FAILED).exists():
            return "failed", (entry.folder / FAILED).read_text("utf-8").strip()
        if name not in proposal.members:
            return "elsewhere", "this member is none of its members"
        if not entry.says("approval", name):
            return ("declined" if entry.says("refusal", name) else "proposed"), number
        if state.get("running") == proposal.digest:
            waits = state.get("waiting")
            return "running", "waiting for members" if waits else f"round {state.get('round')}"
        if not entry.has_quorum(roster):
            return "approved", number
        if not state:
            return "queued", f"{number}; the service of this member does not run"
        return "queued", f"{number}; here: {', '.join(state.get('here', ())) or 'nobody'}"

    def _describe_gaps(self, entry: Entry) -> str:
        """Say how many rounds of a run were done alone or left out; "" for none."""
        try:
            # As the page does it: what the study names is not imported.
            folder = self.locate_run(entry, statements.parse_proposed(entry.proposal.study))
            marked = json.loads((folder / checkpoint.PROVENANCE).read_text("utf-8"))
        except (CoterieError, OSError, ValueError):  # the results were moved, or are damaged
            return ""
        text = ""
        for key in ("alone", "skipped"):
            if number := sum(last + 1 - first for first, last in marked.get(key, ())):
                text += f"; {number} of its rounds {MARKED_ROUNDS[key]}"
        return text

    def load_state(self) -> dict[str, Any]:
        """Return what the service has written of itself; nothing where none runs."""
        return load_state(self.ledger.folder)


def load_state(folder: Path) -> dict[str, Any]:
    """Return what a running service has written of itself into a folder of studies; see `STATE`.

    Nothing where none runs: one that was killed has left what it did then.
    """
    if not find_owner(folder / CLAIM):
        return {}
    try:
        found = json.loads((folder / STATE).read_text("utf-8"))
    except (OSError, ValueError):  # it has just begun
        found = None
    return found if isinstance(found, dict) and found else {"here": []}


class Service:
    """The service of one member.

    Args:
        membership: the member's folder.
        transport: its links.
        log: receives events.
    """

    def __init__(self, membership: Membership, transport: GrpcTransport, log: Log) -> None:
        self.membership, self.ledger, self.transport, self.log = (
            membership,
            membership.ledger,
            transport,
            log,
        )
        self.keeper, self.name = membership.keeper, membership.own.name
        self._stop, self._wake = threading.Event(), threading.Event()
        self._views: dict[str, _View] = {}
        self._refused: dict[str, tuple[float, str]] = {}  # when, and by which check
        self._pauses: dict[str, float] = {}  # until when a member is asked for no statement
        self._retry_at: dict[str, float] = {}
        # The roster's version by which this member's certificate is not the newest.
        self._warned_at = 0
        # Until when a member does not count as here for a study that has failed there.
        self._over_until: dict[tuple[str, str], float] = {}
        self._decided: set[str] = set()  # proposals that no rule approves, by digest
        self._node: Node | None = None
        self._running: Entry | None = None
        self._turn = itertools.count()
        self._begun: dict[str, Path] = {}
        self._written: dict[str, Any] = {}
        self._fault: BaseException | None = None
        self._over = frozenset[str]()  # runs in which this member takes part no more
        transport.allow_runs(
            {"Studies": self._list_studies, "Statement": self.ledger.find_sealed},
            lambda run: run in self._over,
        )
        transport.serve_roster(lambda: self.keeper.sealed)
        self.keeper.on_change = self._adopt_roster
        self.keeper.save_roster()

    # ------------------------------------------------------------------ what others ask

    def _list_studies(self) -> bytes:
        running, node = self._running, self._node
        digest = "" if running is None else running.proposal.digest
        begun = digest if node is not None and node.loop.next_round >= 0 else ""
        return canonical_json(
            {
                "roster": self.keeper.roster.version,
                "running": digest,
                "begun": begun,
                "statements": self.ledger.list_digests(),
            }
        )

    # ------------------------------------------------------------------ what others have

    def look_around(self) -> None:
        """Ask some members what they have, and take what is new."""
        names = sorted(m.name for m in self.keeper.roster.members if m.name != self.name)
        # Others each time; all of a small federation.
        first = next(self._turn) * _ASKED % max(1, len(names))
        chosen = [names[(first + i) % len(names)] for i in range(min(_ASKED, len(names)))]
        with ThreadPoolExecutor(_ASKED, "coterie-look") as pool:
            for asked in [pool.submit(self._ask_member, name) for name in chosen]:
                asked.result()

    def _ask_member(self, name: str) -> None:
        answer = self.transport.ask_bytes(name, "Studies", {}, _ANSWER, _MAX_ANSWER)
        if isinstance(answer, Missing):
            return
        try:
            found = _parse_studies(answer)
        except Refused as refused:
            self.log("refused", level="warning", peer=name, code=refused.code, text=str(refused))
            return
        self._views[name] = _View(time.monotonic(), found["running"], found["begun"])
        if found["roster"] > self.keeper.roster.version:
            offered = self.transport.ask_roster(name, _ANSWER)
            if not isinstance(offered, Missing):
                self.keeper.accept_offer(offered, name)
        now, asked = time.monotonic(), 0
        if self._pauses.get(name, 0.0) > now:
            return
        for digest in self.ledger.find_new(found["statements"]):
            if digest in self._refused and self._refused[digest][0] + _AGAIN > now:
                continue
            asked += 1
            if asked > _FETCHED or not self._fetch_statement(name, digest):
                break

    def _fetch_statement(self, name: str, digest: str) -> bool:
        """Take a statement that another member has; whether to ask it for more."""
        question, limit = {"digest": digest}, MAX_STATEMENT
        data = self.transport.ask_bytes(name, "Statement", question, _ANSWER, limit)
        if isinstance(data, Missing):
            return data.reason == "gone"
        try:
            if (shown := statements.digest_of(data[SIGNATURE:])) != digest:
                raise Refused("digest", f"statement {shown[:16]}, asked for was {digest[:16]}")
            added = self.ledger.add(data, self.keeper.roster)
        except Refused as refused:
            if len(self._refused) >= _MAX_REFUSED:
                self._refused.clear()
            self._refused[digest] = time.monotonic(), refused.code
            self.log("statement_refused", level="warning", peer=name, text=str(refused))
            # What an honest member has passes these checks, which it has made itself.
            if refused.code not in _MAY_DIFFER:
                self._pauses[name] = time.monotonic() + _AGAIN
                return False
            return True
        if added is not None:
            if isinstance(added, Proposal):
                # Words about it may have come, and been refused, before it.
                for early, (_, code) in list(self._refused.items()):
                    if code == "proposal":
                        self._refused.pop(early, None)
            entry = self.ledger.find_digest(
                added.digest if isinstance(added, Proposal) else added.proposal
            )
            study = "" if entry is None else entry.proposal.name
            self.log(statements.name_kind(added), peer=added.by, about=study)
        return True

    def _adopt_roster(self, before: Roster, now: Roster) -> None:
        self.log("roster", **describe_changes(before, now))
        self.transport.use_roster(now)

    # ------------------------------------------------------------------ rules

    def decide(self) -> None:
        """Approve what rules approve."""
        for entry in list(self.ledger.entries.values()):
            proposal = entry.proposal
            said = any(entry.says(kind, self.name) for kind in ("approval", "refusal", "stop"))
            if said or self.name not in proposal.members or entry.is_withdrawn:
                continue
            if proposal.digest in self._decided:
                continue
            self._decided.add(proposal.digest)
            objections = consent.list_objections(proposal, self.membership.file.rules)
            if not objections:
                try:
                    study = self.membership.parse_study(entry)
                    number = proposal.members.index(self.name)
                    file = self.membership.make_node_file(proposal)
                    consent.load_role(file, proposal, study, (number,))
                except (CoterieError, OSError) as error:
                    objections = [str(error)]
            if objections:
                self.log("waits_for_approval", about=proposal.name, text=objections[0])
            else:
                self.membership.say("approval", entry)
                self.log("approved", about=proposal.name, text="by the rules of node.toml")

    # ------------------------------------------------------------------ which study runs

    def pick_study(self) -> Entry | None:
        """Return the study that is to run now: the same everywhere, when all know the same.

        One that has begun here comes first; then that which was proposed first. Its quorum has
        approved it, and is here and not in another study that has begun.
        """
        now, found = time.time(), list[tuple[bool, Entry]]()
        for entry in self.ledger.entries.values():
            if self._may_run(entry):
                begun = self._has_begun(entry)
                if begun or self.membership.file.rules.allows_hour(now):
                    found.append((not begun, entry))
        for fresh, entry in sorted(found, key=lambda one: one[0]):
            proposal, roster = entry.proposal, self.keeper.roster
            # Killed after its last round: nobody else is needed to say that it is over.
            if not fresh and self._is_finished(entry):
                return entry
            others = [n for n in entry.list_taking_part(roster) if n != self.name]
            here = [name for name in others if self._is_available(name, entry)]
            in_it = [n for n in here if self._views[n].running == proposal.digest]
            # Without its server nothing of a study is trained.
            ready = not fresh or proposal.server in ("", self.name, *here)
            if (len(here) + 1 >= proposal.quorum and ready) or (not fresh and in_it):
                return entry
        return None

    def note_over(self) -> None:
        """Note the runs in which others need not wait for this member, for all that is known."""
        entries = list(self.ledger.entries.values())
        self._over = frozenset(entry.proposal.run for entry in entries if self._is_over(entry))

    def _is_over(self, entry: Entry) -> bool:
        if entry.is_closed(self.name) or (entry.folder / FAILED).exists():
            return True
        # Until another member approves it: what is left of it stops everywhere, at about this time.
        stopped = any(entry.says("stop", name) for name in entry.proposal.members)
        return stopped and not entry.has_quorum(self.keeper.roster)

    def fail_left_behind(self) -> None:
        """Mark studies as failed that others have finished without this member.

        Who has finished stays for members that take part then: one that comes later waits for
        nobody.
        """
        running = self._running
        for entry in list(self.ledger.entries.values()):
            proposal = entry.proposal
            if not self._may_run(entry) or (running and running.proposal == proposal):
                continue
            taking_part = entry.list_taking_part(self.keeper.roster)
            gone = [name for name in taking_part if self._has_left(name, entry)]
            too_few = len(taking_part) - len(gone) < proposal.quorum or proposal.server in gone
            if gone and too_few and not self._is_finished(entry):
                self._note_failed(
                    entry,
                    f"{', '.join(gone[:20])} finished it without this member, and the others are too "
                    f"few for it (quorum {proposal.quorum})",
                )

    def _has_left(self, name: str, entry: Entry) -> bool:
        """Whether another member has finished a study, and waits for nobody in it any more."""
        view = self._views.get(name)
        if view is None or time.monotonic() - view.at > _HERE:
            return False
        return entry.says("end", name) and view.running != entry.proposal.digest

    def _note_failed(self, entry: Entry, text: str) -> None:
        """Write down why a study failed here, and say it."""
        write_atomically(entry.folder / FAILED, (text + "\n").encode())
        self.log("failed", level="error", about=entry.proposal.name, text=text)

    def _may_run(self, entry: Entry) -> bool:
        """Whether a study is approved and not over."""
        roster = self.keeper.roster
        return (
            not self._is_over(entry)
            and self.name in entry.list_taking_part(roster)
            and entry.has_quorum(roster)
            and self._retry_at.get(entry.proposal.digest, 0.0) < time.monotonic()
        )

    def _is_available(self, name: str, entry: Entry) -> bool:
        view, digest = self._views.get(name), entry.proposal.digest
        if view is None or time.monotonic() - view.at > _HERE:
            return False
        # Who is done stays for a while for those who are not.
        if view.running == digest:
            return True
        if self._over_until.get((name, digest), 0.0) > time.monotonic():
            return False
        return not view.begun and not entry.says("end", name)

    def _has_begun(self, entry: Entry) -> bool:
        """Whether rounds of a study are stored here."""
        folder = self._begun.get(entry.proposal.digest)
        if folder is None:
            # Nothing is imported for a study that has no folder here.
            if not (entry.folder / self.name).is_dir():
                return False
            folder = self.membership.locate_run(entry, self.membership.parse_study(entry))
            self._begun[entry.proposal.digest] = folder
        return checkpoint.count_stored_rounds(folder) is not None

    def _is_finished(self, entry: Entry) -> bool:
        """Whether this member's run of a study is over, though it may not have said so yet."""
        return self._has_begun(entry) and checkpoint.is_finished(self._begun[entry.proposal.digest])

    # ------------------------------------------------------------------ running

    def run(self) -> None:
        """Serve until `stop`, or a fault that a restart of the process mends."""
        watcher = threading.Thread(target=self._watch, name="coterie-service", daemon=True)
        watcher.start()
        try:
            while not self._stop.is_set():
                if self._fault is not None:
                    raise self._fault
                entry = self.pick_study()
                if entry is None:
                    self._wake.wait(_PAUSE)
                    self._wake.clear()
                else:
                    self._run_study(entry)
        finally:
            self.stop()
            watcher.join()

    def stop(self) -> None:
        """End after the current round."""
        self._stop.set()
        self._wake.set()
        if (node := self._node) is not None:
            node.stop()

    def _watch(self) -> None:
        """Look around, decide, and stop what is not to run; in a thread of its own."""
        while not self._stop.is_set():
            try:
                self.keeper.reload_file()
                self._check_own()
                self.ledger.reload()
                self.look_around()
                self.decide()
                self.fail_left_behind()
                self.note_over()
                self._check_running()
                self._write_state()
            except Exception as error:  # the main thread ends the service with it
                self._fault = error
                if (node := self._node) is not None:
                    node.stop()
            self._wake.set()
            # Not all members at the same moments.
            self._stop.wait(_PAUSE * (0.75 + secrets.randbelow(512) / 1024))

    def _check_own(self) -> None:
        """Check that this member is on the roster, with this key and a certificate that counts.

        Raises:
            TransportError: when it is not: the service ends, and no study has failed by that.
        """
        own, roster = self.membership.own, self.keeper.roster
        if problems := rosters.check_own(roster, own):
            key = encode_public_key(own.key.public_key())
            if not roster.has_member(self.name) or roster.member(self.name).key != key:
                raise TransportError(problems[0])
            # The organizer has renewed it. Links are bound to the key, so this one counts as well.
            if self._warned_at != roster.version:
                self._warned_at = roster.version
                end = own.certificate.not_valid_after_utc
                text = f"{problems[0]}, and start the service again before {end:%Y-%m-%d %H:%M} UTC"
                self.log("certificate", level="warning", peer=self.name, text=text)
        check_dates(own.certificate_file, own.certificate, datetime.now(UTC))

    def _check_running(self) -> None:
        """Stop the running study when it was withdrawn, or another comes first."""
        node, running = self._node, self._running
        if node is None or running is None:
            return
        entry = self.ledger.entries[running.proposal.name]
        if entry.is_withdrawn or entry.says("stop", self.name):
            node.stop()
        elif not entry.has_quorum(self.keeper.roster):
            self.log("too_few", level="warning", about=entry.proposal.name, text="members stopped")
            node.stop()
        elif node.loop.next_round < 0:
            # It only waits: members that wait for each other in different studies would do so
            # without end, and so would those of a study that has failed at one of them.
            self._note_over_elsewhere(node, entry)
            first = self.pick_study()
            if first is not None and first.proposal.digest != entry.proposal.digest:
                node.stop()

    def _note_over_elsewhere(self, node: Node, entry: Entry) -> None:
        """Ask the members that are here, and not in a study, whether it is over for them."""
        for name in entry.list_taking_part(self.keeper.roster):
            view, digest = self._views.get(name), entry.proposal.digest
            if name == self.name or view is None or view.running == digest:
                continue
            answer = node.transport.ask_head(name, secrets.token_hex(8), _ANSWER)
            if isinstance(answer, Missing) and answer.reason == "closing":
                self._over_until[name, digest] = time.monotonic() + _AGAIN

    @contextmanager
    def _open_node(self, entry: Entry) -> Iterator[Node]:
        proposal, study = entry.proposal, self.membership.parse_study(entry)
        plan = make_run_spec(study)
        of_study = StudyKeeper(self.keeper, lambda newest: derive_roster(proposal, newest, plan))
        log = replace(self.log, study=proposal.name, round=-1)
        before = self.log.also

        def open_links() -> GrpcRun:
            # The links log here what happens to them, such as a message that they refuse: while a
            # study runs, that belongs into its audit log and onto its page, too.
            def note_both(event: str, level: str, details: dict[str, Any]) -> None:
                before(event, level, details)
                log.also(event, level, details)

            self.log.also = note_both
            return self.transport.open_run(of_study.roster)

        try:
            with host_node(
                self.membership.make_node_file(proposal), study, of_study, self.membership.own, log,
                open_links,
                # They may have changed since they were approved, and be alike at most members.
                check_rows=lambda rows: consent.check_data(consent.describe_data(rows), proposal),
            ) as node:  # fmt: skip
                yield node
        finally:
            self.log.also = before

    def _run_study(self, entry: Entry) -> None:
        """Run a study to its end, or until it is stopped."""
        proposal = entry.proposal
        self._running = entry
        try:
            study = self.membership.parse_study(entry)
            folder = self.membership.locate_run(entry, study)
            self._begun[proposal.digest] = folder
            if not checkpoint.is_finished(folder):
                self.log(
                    "begins", about=proposal.name, peers=entry.list_taking_part(self.keeper.roster)
                )
                with self._open_node(entry) as node:
                    self._node = node
                    # It may have been stopped while it was made.
                    if not self._stop.is_set():
                        node.run()
                self._node = None
            if checkpoint.is_finished(folder):
                summary.write_summary(folder.parent.parent)
                self.membership.say("end", entry)
                self.log("ended", about=proposal.name)
            else:
                self._retry_at[proposal.digest] = time.monotonic() + _PAUSE
        except QuorumError as error:
            self._retry_at[proposal.digest] = time.monotonic() + _RETRY
            self.log("too_few", level="warning", about=proposal.name, text=str(error))
        except Exception as error:
            if DiskFull.matches(error):
                raise
            self._check_own()
            # One study must not end the service, which others need.
            self._note_failed(entry, escape_text(str(error) or type(error).__name__, 1000))
        finally:
            self._node = self._running = None

    def _write_state(self) -> None:
        """Write what this service does, if it has changed."""
        node, running, now = self._node, self._running, time.monotonic()
        here = sorted(name for name, view in self._views.items() if now - view.at < _HERE)
        found = {
            "running": "" if running is None else running.proposal.digest,
            "round": -1 if node is None else node.loop.next_round,
            "waiting": node is not None and (node.is_waiting or node.state == "starting"),
            "here": here,
        }
        if found != self._written:
            write_atomically(self.ledger.folder / STATE, json.dumps(found).encode())
            self._written = found

    def prometheus_samples(self) -> list[Sample]:
        """Return numbers for Prometheus."""
        node, found = self._node, self.transport.prometheus_samples()
        counts = dict[str, int]()
        state = self._written
        for entry in self.ledger.entries.values():
            word, _ = self.membership.describe(entry, state)
            counts[word] = counts.get(word, 0) + 1
        for word, number in sorted(counts.items()):
            found.append(("coterie_studies", "studies, by how they stand", {"state": word}, number))
        return found if node is None else [*node.prometheus_samples(), *found]


def _parse_studies(data: bytes) -> dict[str, Any]:
    """Read what a member says of its studies.

    Raises:
        Refused: when it is something else.
    """
    found = parse_strict_json(data, "studies")
    expected = {"roster": int, "running": str, "begun": str, "statements": list}
    if not isinstance(found, dict) or found.keys() != expected.keys():
        raise Refused("studies", f"expected a table of {', '.join(expected)}")
    for name, kind in expected.items():
        if type(found[name]) is not kind:
            raise Refused("studies", f"{name} is not of type {kind.__name__}")
    digests = [found["running"], found["begun"]]
    digests = [one for one in digests if one] + found["statements"]
    if not all(isinstance(one, str) and DIGEST.fullmatch(one) for one in digests):
        raise Refused("studies", "expected digests")
    return found


def serve(path: Path, *, insecure: bool = False) -> None:
    """Run the service of a member until a signal ends it.

    Args:
        path: node.toml.
        insecure: without TLS, on loopback only.
    """
    file = servicefile.load(path)
    signal.signal(signal.SIGTERM, exit_on_signal)
    log = Log("", level=file.log)
    membership = Membership.open(file, log)
    log.node = membership.own.name
    with ExitStack() as stack:
        # Not the folder of studies itself: commands add statements to it.
        stack.enter_context(claim_folder(file.resolve_path(file.studies) / CLAIM))
        # Of the service before, which may have been killed.
        (file.resolve_path(file.studies) / STATE).unlink(missing_ok=True)
        transport = stack.enter_context(
            GrpcTransport(
                membership.keeper.roster, membership.own.name,
                None if insecure else membership.own,
                listen=file.listen or None, lease=file.network.lease, proxy=file.network.proxy,
                log=log,
            )
        )  # fmt: skip
        service = Service(membership, transport, log)
        stack.callback(service.stop)
        if file.metrics_port:
            stack.callback(MetricsServer(file.metrics_port, service.prometheus_samples).close)
        roster = membership.keeper.roster
        log("serves", roster=roster.version, members=len(roster.members))
        service.run()
