"""Auditor: checks audit logs, alone and against each other.

What a log proves rests on three things: the chain (a line that was changed, removed or added is
found), the node's signatures at the end of every round (the chain was not written again by somebody
without its key), and the signatures of other members under what they sent (they cannot deny it).
Keys come from rosters that the organizer signed, if they are given; else from the log itself. What
a member sent is judged by the roster that counted when it came: by its key of then, and not at all
when it was no member any more.

Nobody is accused by another's word. Two manifests for one address that a member signed are a proof;
that a log lacks a message is a contradiction only where that log is known to be complete.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coterie._util.mappings import drop_empty, select_keys
from coterie.errors import ConfigError, CoterieError
from coterie.net import audit, identity
from coterie.net.outbox import KEEP
from coterie.net.payload import Refused, escape_text, parse_strict_json
from coterie.net.roster import Roster
from coterie.net.statements import STUDY_RUN
from coterie.net.wire import NAME, parse_manifest
from coterie.net.wire import bytes_to_sign as manifest_signed

# More than a roster of 1000 members takes in a line. Longer lines are not read into memory.
MAX_LINE = 4 * 1024 * 1024
_TYPES: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(
        ("n", "format", "inc", "round", "exchange", "client", "bytes", "times", "version"), int
    ),
    **dict.fromkeys(
        ("prev", "event", "node", "run", "key", "peer", "from", "to", "reason", "code", "kind"), str
    ),
    **dict.fromkeys(("sha256", "manifest", "signature", "of", "text", "digest"), str),
    "time": (int, float),
    "members": dict,
}
_Key = tuple[int, int, int, int, str]  # incarnation, round, exchange, client, kind
# What a log says of others: their names, and words of the program that wrote it.
_NAMED = ("node", "run", "peer", "from", "to")
_WORDS = ("event", "reason", "code", "kind", "of")
_WORD = re.compile(r"[a-z0-9_:.-]{1,80}")
# Events that can name a member, by which nothing of it is refused.
_NO_REFUSALS = ("peer_up", "peer_down", "catch_up", "certificate")
_SKEW = 30.0  # seconds by which the clocks of two logs may differ; `coterie doctor` refuses more


@dataclass(frozen=True)
class Receipt:
    """A message that a log has, with its sender's signature.

    Args:
        digest: of the payload.
        key: the sender's public key by the roster that counted.
        path: the file with the line.
        place: where the line begins in it.
        time: when it came by the reader's clock, in seconds since 1970.
    """

    digest: str
    key: str
    path: Path
    place: int
    time: float


@dataclass(frozen=True)
class Equivocation:
    """Two manifests of one member for one address, with different digests, both signed.

    Args:
        run: the run's id.
        member: who signed them.
        key: its public key, under which both signatures are valid.
        address: incarnation, round, exchange, client and kind.
        found: the two manifests as they were signed, their signatures, and whose log has them.
    """

    run: str
    member: str
    key: str
    address: _Key
    found: tuple[tuple[str, str, str], tuple[str, str, str]]

    def make_document(self) -> dict[str, Any]:
        """Return the proof as plain values: all that somebody needs who has the public key."""
        signed = []
        for manifest, signature, node in self.found:
            signed.append({"manifest": manifest, "signature": signature, "log": node})
        about = {"proof": "equivocation", "run": self.run, "member": self.member, "key": self.key}
        return {**about, "signed": signed}


@dataclass
class Life:
    """What a log says of one incarnation of its node.

    Args:
        head: the last round that ended with a signature; -2 before the first.
        ended: whether the node stopped in order.
    """

    head: int = -2
    ended: bool = False


@dataclass
class MemberTraffic:
    """What a log says of one other member.

    Args:
        sent: the digest of each message that was sent to it, by incarnation, round, exchange,
            client and kind.
        received: the same of messages that it sent, with where they are in the log.
        sent_bytes: bytes of payload, repetitions included.
        received_bytes: bytes of payload.
        declined: how often it asked for something and did not get it, by reason.
        missing: how often it did not answer a question, by reason.
        refused: what of it was refused, by reason: messages, models ("rejected"), connections.
    """

    sent: dict[_Key, str] = field(default_factory=dict)
    received: dict[_Key, Receipt] = field(default_factory=dict)
    sent_bytes: int = 0
    received_bytes: int = 0
    declined: Counter[str] = field(default_factory=Counter)
    missing: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)


@dataclass
class Report:
    """What was found in the log of one node.

    Args:
        path: the folder or file.
        node: whose log it is.
        run: the run's id.
        key: the node's public key, the newest.
        lines: number of lines.
        first: time of the first line, in seconds since 1970.
        first_head: round of the first signature; -2 if there is none.
        last: time of the last line.
        begins: number of the first line; 0 for the beginning of a chain.
        heads: number of signatures of the node that are valid.
        head: number and hash of the last line.
        unsigned: number of lines after the last signature.
        starts: how often the node was started.
        unended: how often it did not stop in order before it was started again.
        rosters: versions of the roster, in order.
        confirmed: versions of the roster that were compared with a roster that the organizer
            signed.
        repaired: number of times that half a line was removed.
        members: fingerprints of the keys of members that were met, by name.
        traffic: by member; "" for what could not be ascribed to one.
        own_keys: public keys of the node, the newest last.
        lives: by incarnation, the oldest first.
        doubles: messages that came twice for one address, with different digests: the member, the
            address and both.
        keys: the members' public keys by version of the roster; of a large roster those of the
            members that the node has met.
        digests: of all members' keys, by version of the roster.
        unlisted: versions of which only some members' keys are known.
        problems: why the log cannot be trusted, the first one first; empty if it can.
        unsettled: what can be neither trusted nor called wrong.
    """

    path: Path
    node: str = ""
    run: str = ""
    key: str = ""
    lines: int = 0
    first: float = 0.0
    first_head: int = -2
    last: float = 0.0
    begins: int = 0
    heads: int = 0
    head: tuple[int, str] = (-1, audit.NOTHING)
    unsigned: int = 0
    starts: int = 0
    unended: int = 0
    rosters: list[int] = field(default_factory=list)
    confirmed: set[int] = field(default_factory=set)
    repaired: int = 0
    members: dict[str, str] = field(default_factory=dict)
    traffic: dict[str, MemberTraffic] = field(default_factory=dict)
    own_keys: list[str] = field(default_factory=list)
    lives: dict[int, Life] = field(default_factory=dict)
    doubles: list[tuple[str, _Key, Receipt, Receipt]] = field(default_factory=list)
    keys: dict[int, dict[str, str]] = field(default_factory=dict)
    digests: dict[int, str] = field(default_factory=dict)
    unlisted: set[int] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    unsettled: list[str] = field(default_factory=list)

    def traffic_with(self, member: str) -> MemberTraffic:
        """Return what is said of a member."""
        return self.traffic.setdefault(member, MemberTraffic())


def find_files(path: Path) -> list[Path]:
    """Return the files of a log, given its folder, its audit.log or one earlier file.

    Raises:
        ConfigError: when there is none.
    """
    found = []
    if path.is_file() and path.name != audit.FILE:
        found = [path]
    else:
        folder = path.parent if path.name == audit.FILE else path
        if folder.is_dir():
            found = audit.list_files(folder)
    if not found:
        raise ConfigError(
            f"{path} holds no {audit.FILE}; a node's lies in the folder `runs`/NAME of its "
            "node.toml"
        )
    return found


def check_log(path: Path, rosters: Sequence[Roster] = ()) -> Report:
    """Check one log and sum up what it says.

    Args:
        path: a folder with a log, or a file.
        rosters: rosters of the run, with verified signatures. Keys in the log must be theirs.

    Raises:
        ConfigError: when there is no log.
    """
    return _LogReader(path, rosters).parse_files(find_files(path))


def compare_logs(a: Report, b: Report) -> tuple[list[str], list[str]]:
    """Compare what two logs of one run say of each other.

    What one has from the other must be what the other says that it sent. What was sent and did not
    arrive is no contradiction.

    Returns:
        In what they contradict each other, and what cannot be judged, because the sender's log is
        not known to be complete where the message would be. Empty lists if they agree.
    """
    if a.run != b.run or a.node == b.node:
        return [], []
    differ = [v for v in a.keys.keys() & b.keys.keys() if not _name_same_keys(a, b, v)]
    if differ:
        # One of them is forged, and what it says of others proves nothing.
        return [
            f"the logs of {a.node} and {b.node} have other members or keys in version "
            f"{min(differ)} of the roster; --roster says which log is wrong"
        ], []
    wrong, unsettled = [], []
    for sender, reader in ((a, b), (b, a)):
        sent, received = (
            sender.traffic_with(reader.node).sent,
            reader.traffic_with(sender.node).received,
        )
        to_all = set()
        for of in sender.traffic.values():
            to_all |= of.sent.items()
        who = f"{reader.node} received from {sender.node}"
        unknown, known = [], {}
        for key, found in received.items():
            if found.key in sender.own_keys:
                known[key] = found
            else:
                unknown.append(key)
        if unknown:
            # Whose key it is, the reader's log alone says.
            unsettled.append(
                f"{_format_count(unknown)} that {who} are under a key that {sender.node}'s log "
                f"does not have; --roster says whose it is: {_describe_message(unknown[0])}"
            )
        lacking, other = [], []
        for key, found in known.items():
            if key in sent:
                if sent[key] != found.digest:
                    other.append(key)
            # A message that others got too may have been passed on by one of them.
            elif (key, found.digest) not in to_all:
                lacking.append(key)
        reasons = {key: _explain_gap(sender, key) for key in lacking}
        certain = [key for key in lacking if not reasons[key]]
        if certain:
            wrong.append(
                f"{_format_count(certain)} that {who} are not in {sender.node}'s log: "
                f"{_describe_message(certain[0])}"
            )
        for reason in dict.fromkeys(filter(None, reasons.values())):
            keys = [key for key in lacking if reasons[key] == reason]
            unsettled.append(
                f"{_format_count(keys)} that {who} are not in {sender.node}'s log, {reason}: "
                f"{_describe_message(keys[0])}"
            )
        if other:
            wrong.append(
                f"{_format_count(other)} that {who} have another digest in {sender.node}'s log: "
                f"{_describe_message(other[0])}"
            )
    return wrong, unsettled


def _explain_gap(sender: Report, key: _Key) -> str:
    """Return why a sender's log may lack a message that it sent; "" when it may not."""
    incarnation, round, *_ = key
    life = sender.lives.get(incarnation)
    if life is None:
        if sender.lives and incarnation > max(sender.lives):
            return "which ends before that start of the node"
        return "which begins later" if sender.begins else ""
    # A log that begins in the middle: what was sent before is in an earlier file.
    if sender.begins and incarnation == min(sender.lives) and round <= sender.first_head:
        return "which begins later"
    # A message can be asked for until it is dropped, some rounds later.
    if life.ended or round <= life.head - KEEP:
        return ""
    if incarnation == max(sender.lives):
        return f"which ends after round {life.head}: it goes on, or was cut off; ask for the rest"
    return "which may have lost lines after its last signature, since the node was killed"


def find_equivocations(
    reports: Sequence[Report], rosters: Sequence[Roster] = ()
) -> list[Equivocation]:
    """Return, for each address, two signed manifests with different digests, if there are.

    Logs of any readers count, those with problems included: what proves is in the signatures. They
    count under one key of the sender, which all logs, and the organizer's rosters if they were
    given, name as the member's.

    Args:
        reports: of logs of any runs.
        rosters: rosters of the organizer, with verified signatures.
    """
    first: dict[tuple[str, str, str, _Key], tuple[Report, Receipt]] = {}
    found: dict[tuple[str, str, str, _Key], Equivocation] = {}
    for report in reports:
        for member, of in report.traffic.items():
            both = list(of.received.items())
            for name, key, _, at in report.doubles:
                if name == member:
                    both.append((key, at))
            for key, at in both:
                confirmed = not rosters or _names_key(rosters, report.run, member, at.key)
                if not confirmed or not _agree_on_key(reports, report.run, member, at.key):
                    continue
                where = report.run, member, at.key, key
                known, before = first.setdefault(where, (report, at))
                if before.digest != at.digest and where not in found:
                    proofs = (*_read_signed(before), known.node), (*_read_signed(at), report.node)
                    found[where] = Equivocation(report.run, member, at.key, key, proofs)
    return list(found.values())


def _counts_for(roster: Roster, run: str) -> bool:
    """Whether a roster says who is in a run: its own, or a study of its federation."""
    return roster.run == run or (not roster.study and STUDY_RUN.fullmatch(run) is not None)


def _names_key(rosters: Sequence[Roster], run: str, member: str, key: str) -> bool:
    """Whether a roster of the organizer has a key for a member of a run."""
    return any(
        _counts_for(roster, run) and roster.has_member(member) and roster.member(member).key == key
        for roster in rosters
    )


def count_changed_by_restarts(reports: Sequence[Report]) -> dict[str, int]:
    """Return, by member, of how many addresses it signed different messages in several starts.

    After a restart from an older checkpoint that is innocent, so it proves nothing.
    """
    digests: dict[tuple[str, str, tuple[int, int, int, str]], dict[int, str]] = {}
    for report in reports:
        for member, of in report.traffic.items():
            for (incarnation, *address), at in of.received.items():
                where = report.run, member, tuple(address)
                by_start = digests.setdefault(where, {})  # type: ignore[arg-type]
                by_start.setdefault(incarnation, at.digest)
    out: Counter[str] = Counter()
    for (_, member, _), by_start in digests.items():
        out[member] += len(set(by_start.values())) > 1
    return drop_empty(out)


def find_overlapping_starts(reports: Sequence[Report]) -> dict[str, str]:
    """Return, by member, what says that it signed as an earlier start after a later one had begun.

    A member can send each reader another model under another number of its start; an honest one
    ends before it starts again. When messages came is the readers' word, so this accuses nobody.
    """
    came: dict[tuple[str, str, str], dict[int, list[tuple[float, str]]]] = {}
    for report in reports:
        for member, of in report.traffic.items():
            for (incarnation, *_), at in of.received.items():
                starts = came.setdefault((report.run, member, at.key), {})
                starts.setdefault(incarnation, []).append((at.time, report.node))
    out = {}
    for (_, member, _), starts in came.items():
        late, reader, earlier = -math.inf, "", 0  # the newest message of all earlier starts
        for incarnation, times in sorted(starts.items()):
            began, other = min(times)
            # By less the two clocks alone may differ.
            if late - began > _SKEW:
                out[member] = (
                    f"{member} signed as its start {earlier} for {reader} after it had signed as "
                    f"its later start {incarnation} for {other}, by their clocks: its key is in "
                    "two places, or it sends each of them other models"
                )
            if max(times)[0] > late:
                (late, reader), earlier = max(times), incarnation
    return out


def _agree_on_key(reports: Sequence[Report], run: str, member: str, key: str) -> bool:
    """Whether no log has another key of a member, in a version that another has with this one."""
    logs = [report for report in reports if report.run == run]
    for one in logs:
        for version, keys in one.keys.items():
            if keys.get(member) != key:
                continue
            others = [other for other in logs if version in other.keys]
            named = [other for other in others if other.keys[version].get(member) == key]
            # Of a large roster a log has not all keys: then their digest says whether they agree.
            if any(not _name_same_keys(one, o, version) for o in others if o not in named):
                return False
            # And what one log alone says of a key may be its own invention.
            if version in one.unlisted and len({log.node for log in named}) < 2:
                return False
    return True


def _name_same_keys(a: Report, b: Report, version: int) -> bool:
    """Whether two logs have the same members with the same keys in a version of the roster."""
    one, other = a.keys[version], b.keys[version]
    common = one.keys() & other.keys()
    return a.digests[version] == b.digests[version] and all(one[n] == other[n] for n in common)


def _read_signed(at: Receipt) -> tuple[str, str]:
    """Return a manifest and its signature from the line of a log."""
    with at.path.open("rb") as file:
        file.seek(at.place)
        found = parse_strict_json(file.readline(MAX_LINE).rstrip(b"\n"), "line")
    return found["manifest"], found["signature"]


def count_lost(a: Report, b: Report) -> int:
    """Return how many messages between two nodes were sent but not received."""
    pairs = ((a, b), (b, a))
    lost = 0
    for x, y in pairs:
        sent, received = x.traffic_with(y.node).sent, y.traffic_with(x.node).received
        lost += len(sent.keys() - received.keys())
    return lost


def _format_count(keys: Sequence[_Key]) -> str:
    return f"{len(keys)} message{'s' if len(keys) > 1 else ''}"


def _describe_message(key: _Key) -> str:
    _, round, exchange, client, kind = key
    return f"{kind} of client {client}, round {round}, exchange {exchange}"


class _InvalidLine(Exception):
    """A line that proves that a log was changed, or that is none."""


class _LogReader:
    """Reads one log."""

    def __init__(self, path: Path, rosters: Sequence[Roster]) -> None:
        self.report, self._given = Report(path), rosters
        self._keys: dict[str, str] = {}  # keys of members, by the roster that counts
        self._life = Life()  # of the incarnation that the lines are of
        self._running = False
        self._n: int | None = None
        self._raw, self._path, self._place = b"", path, 0
        self._prev = audit.NOTHING

    def parse_files(self, paths: Sequence[Path]) -> Report:
        """Read the files of a chain."""
        report = self.report
        for path in paths:
            self._path, end = path, 0
            for number, line in enumerate(_iterate_lines(path), 1):
                self._place, end = end, end + len(line)
                # A problem does not end the reading: the report names every line that is wrong.
                try:
                    self._check_line(line)
                except (_InvalidLine, Refused) as bad:
                    report.problems.append(f"{path.name} line {number}: {bad}")
                except (KeyError, TypeError, ValueError, AttributeError, CoterieError) as bad:
                    report.problems.append(
                        f"{path.name} line {number}: it is no line of an audit log: "
                        f"{escape_text(repr(bad))}"
                    )
                # The hash of the line as it is: a changed line breaks the chain once, not at all
                # later lines.
                self._prev = audit.hash_line(line.removesuffix(b"\n"))
                report.head = (report.head[0] if self._n is None else self._n - 1), self._prev
        if not report.lines:
            report.problems.append("it is empty")
        elif not report.heads and (report.problems or not report.starts):
            report.problems.append("no line of it is signed by the node")
        elif not report.heads:
            # A node signs at the end of each round: one that was killed before has signed nothing.
            report.unsettled.append(
                f"no line of it is signed yet: {report.node} ended before its first round did, or "
                "somebody else made the lines"
            )
        if self._given and not report.confirmed and not report.problems:
            given = ", ".join(map(str, sorted({r.version for r in self._given})))
            found = ", ".join(map(str, sorted(report.rosters)))
            report.problems.append(
                f"it has versions {found or 'none'} of the roster; given was {given}"
            )
        return report

    def _check_line(self, line: bytes) -> None:
        report = self.report
        if len(line) > MAX_LINE:
            raise _InvalidLine(f"it has more than {MAX_LINE} bytes")
        if not line.endswith(b"\n"):
            raise _InvalidLine(
                "it is torn: its end is missing; the node says so in its next line when it is "
                "started again"
            )
        self._raw = line = line.removesuffix(b"\n")
        found = parse_strict_json(line, "line")
        _check_types(found)
        n, prev, event, time = found["n"], found["prev"], found["event"], float(found["time"])
        expected, before = self._n, self._prev
        self._n = n + 1
        report.lines, report.last, report.unsigned = report.lines + 1, time, report.unsigned + 1
        # The log may be one file from the middle of a chain; only line 0 must name no line before
        # it.
        if expected is None:
            report.begins, report.first = n, time
            if n == 0 and prev != audit.NOTHING:
                raise _InvalidLine("it is the first of a chain and names a line before it")
        elif prev != before or n != expected:
            # What the line says counts all the same.
            self._take_event(event, found)
            changed, moved = (
                "one of them was changed",
                f"lines were taken out or added ({n} follows {expected - 1})",
            )
            raise _InvalidLine(
                f"it does not follow the line before: {changed if n == expected else moved}"
            )
        self._take_event(event, found)

    def _take_event(self, event: str, found: Mapping[str, Any]) -> None:
        take = getattr(self, f"_on_{event}", None)
        if take is not None:
            take(found)
        elif "peer" in found:
            refused = self.report.traffic_with(found["peer"]).refused
            # Any other event about a peer is a refusal.
            if event not in _NO_REFUSALS:
                refused[str(found.get("code", found.get("reason", event)))] += found.get("times", 1)

    # ------------------------------------------------------------------ whose it is

    def _on_file(self, found: Mapping[str, Any]) -> None:
        report = self.report
        if found["format"] != audit.FORMAT:
            raise _InvalidLine(
                f"format {found['format']}; this program reads format {audit.FORMAT}"
            )
        who = found["node"], found["run"]
        if report.node and who != (report.node, report.run):
            raise _InvalidLine(
                f"it is of {who[0]} in run {who[1]}; the lines before are of {report.node} in "
                f"{report.run}"
            )
        report.node, report.run, report.key = *who, found["key"]
        if self._given and not any(_counts_for(roster, report.run) for roster in self._given):
            raise _InvalidLine(
                f"it is of run {report.run}; the roster that was given is of "
                f"{', '.join(sorted({roster.run for roster in self._given}))}"
            )
        # A member can get another key, and older lines keep theirs.
        if report.key not in report.own_keys:
            report.own_keys.append(report.key)

    def _on_broken(self, found: Mapping[str, Any]) -> None:
        self._on_file(found)
        raise _InvalidLine(
            f"a new chain begins, since the node found the one before damaged: "
            f"{escape_text(found['text'])}"
        )

    def _on_repaired(self, found: Mapping[str, Any]) -> None:
        self.report.repaired += 1

    def _on_start(self, found: Mapping[str, Any]) -> None:
        self._on_file(found)
        self.report.starts += 1
        self._life = self.report.lives.setdefault(found["inc"], Life())
        # A start after a start: the node did not stop in order in between.
        self.report.unended += self._running
        self._running = True

    def _on_stop(self, found: Mapping[str, Any]) -> None:
        self._running, self._life.ended = False, True

    def _on_roster(self, found: Mapping[str, Any]) -> None:
        report, version = self.report, found["version"]
        if report.rosters and version < report.rosters[-1]:
            raise _InvalidLine(
                f"version {version} of the roster after version {report.rosters[-1]}; versions "
                "only rise"
            )
        if version not in report.rosters:
            report.rosters.append(version)
        theirs, of_study = None, False
        for given in self._given:
            if given.version == version and _counts_for(given, report.run):
                theirs = {m.name: m.key for m in given.members}
                of_study = given.run != report.run
        if "members" in found:
            for name, member in found["members"].items():
                _check_types({"node": name, **member})
            keys = {name: member["key"] for name, member in found["members"].items()}
            if theirs is not None and of_study:
                # The members of a study are some of the federation's.
                theirs = select_keys(theirs, keys)
            digest = audit.hash_keys(keys)
        else:
            # Of a large roster a line for each member follows that the node meets.
            keys, digest = theirs, found["digest"]
            if keys is None:
                same = report.digests.get(version) == digest
                keys = report.keys[version] if same else {}
                report.unlisted.add(version)
        if theirs is not None:
            if digest != audit.hash_keys(theirs):
                raise _InvalidLine(
                    f"its members or their keys are not those of version {version} of the "
                    "organizer's roster"
                )
            report.confirmed.add(version)
        self._check_own_key(keys)
        report.digests[version] = digest
        # Replaced, not added: what comes under a roster is judged by the keys of that one.
        self._keys = report.keys[version] = dict(keys)

    def _check_own_key(self, keys: Mapping[str, str]) -> None:
        node = self.report.node
        if node in keys and keys[node] not in self.report.own_keys:
            raise _InvalidLine(f"the roster has another key for {node} than the log")

    def _on_member(self, found: Mapping[str, Any]) -> None:
        name, key = found["peer"], found["key"]
        if self._keys.setdefault(name, key) != key:
            raise _InvalidLine(f"the roster has another key for {name} than this line")
        self._check_own_key({name: key})

    def _on_joined(self, found: Mapping[str, Any]) -> None:
        self.report.members[found["peer"]] = found["key"]

    def _on_head(self, found: Mapping[str, Any]) -> None:
        report = self.report
        if (found["run"], found["node"]) != (report.run, report.node):
            raise _InvalidLine(f"it is of {found['node']} in run {found['run']}")
        # The newest own key alone: a head is signed with the key of its time.
        if not _is_signed_by(report.own_keys[-1:], *audit.split_signature(self._raw)):
            raise _InvalidLine(f"the signature is not that of {report.node}'s key")
        if not report.heads:
            report.first_head = found["round"]
        report.heads, report.unsigned = report.heads + 1, 0
        # A start that failed has signed, too, and was in no round.
        self._life.head = max(self._life.head, found["round"])

    # ------------------------------------------------------------------ messages

    def _on_sent(self, found: Mapping[str, Any]) -> None:
        to = self.report.traffic_with(found["to"])
        key = found["inc"], found["round"], found["exchange"], found["client"], found["kind"]
        # Of a log that begins in the middle, messages say which start of the node it is.
        if found["inc"] not in self.report.lives:
            self._life = self.report.lives.setdefault(found["inc"], Life(self._life.head))
        to.sent[key] = found["sha256"]
        to.sent_bytes += found["bytes"]

    def _on_received(self, found: Mapping[str, Any]) -> None:
        report, peer = self.report, found["from"]
        text = found["manifest"].encode()
        m = parse_manifest(text)
        if (m.run, m.peer) != (report.run, peer) or m.to not in ("", report.node):
            raise _InvalidLine(
                f"a message of {m.peer} to {m.to or 'all'} in run {m.run}; expected one of {peer}"
            )
        key = self._keys.get(peer)
        if key is None:
            raise _InvalidLine(
                f"{peer} is no member by version {report.rosters[-1] if report.rosters else 0} of "
                "the roster, which counted then"
            )
        if not _is_signed_by([key], bytes.fromhex(found["signature"]), manifest_signed(text)):
            raise _InvalidLine(
                f"the message is not signed by {peer}'s key of the roster that counted then"
            )
        of = report.traffic_with(peer)
        address = m.inc, m.round, m.exchange, m.client, m.kind
        receipt = Receipt(m.sha256, key, self._path, self._place, float(found["time"]))
        known = of.received.setdefault(address, receipt)
        if known.digest != m.sha256:
            report.doubles.append((peer, address, known, receipt))
        of.received_bytes += m.bytes

    def _on_declined(self, found: Mapping[str, Any]) -> None:
        self.report.traffic_with(found["to"]).declined[found["reason"]] += 1

    def _on_missing(self, found: Mapping[str, Any]) -> None:
        self.report.traffic_with(found["peer"]).missing[found["reason"]] += 1

    def _on_rejected(self, found: Mapping[str, Any]) -> None:
        self.report.traffic_with(found["peer"]).refused["rejected"] += 1

    def _on_turned_away(self, found: Mapping[str, Any]) -> None:
        self.report.traffic_with(found.get("peer", "")).refused[found["reason"]] += found.get(
            "times", 1
        )

    def _on_again(self, found: Mapping[str, Any]) -> None:
        # The first event of a kind has a line of its own; this line counts the others.
        times, of = found["times"], found["of"]
        if of in ("declined", "missing"):
            traffic = self.report.traffic_with(found["to" if of == "declined" else "peer"])
            getattr(traffic, of)[found["reason"]] += times
        # A message that is sent again is no new message, and peers that come and go are no
        # refusals.
        elif of != "sent" and of not in _NO_REFUSALS:
            what = str(found.get("code", found.get("reason", of)))
            self.report.traffic_with(found.get("peer", "")).refused[what] += times


def _check_types(found: Any) -> None:
    """Check that the fields that this program reads have their types."""
    if not isinstance(found, dict):
        raise _InvalidLine("it is no JSON object")
    for name, value in found.items():
        kind = _TYPES.get(name, object)
        # A bool is an int for `isinstance`, and not every JSON reader holds integers from 2^53 on.
        fits = (
            isinstance(value, kind)
            and not isinstance(value, bool)
            and not (type(value) is int and abs(value) >= 1 << 53)
        )
        # What is shown has no line breaks and no commands for a terminal. Nobody is the member "".
        if name in _NAMED:
            fits = fits and (value == "" or NAME.fullmatch(str(value)) is not None)
        elif name in _WORDS:
            fits = fits and _WORD.fullmatch(str(value)) is not None
        if not fits:
            raise _InvalidLine(
                f"{escape_text(name, 40)} is {escape_text(value, 40)}; expected "
                f"{getattr(kind, '__name__', 'a number')}"
            )


def _iterate_lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        # A little more than the limit, so that a longer line shows that it is too long.
        while line := file.readline(MAX_LINE + 2):
            yield line


def _is_signed_by(keys: Sequence[str], signature: bytes, text: bytes) -> bool:
    """Whether a signature is by one of some keys."""
    return any(identity.verify(identity.decode_public_key(key), signature, text) for key in keys)
