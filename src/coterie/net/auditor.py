"""Auditor: checks audit logs, alone and against each other.

What a log proves rests on three things: the chain (a line that was changed, removed or added is
found), the node's signatures at the end of every round (the chain was not written again by somebody
without its key), and the signatures of other members under what they sent (they cannot deny it).
Keys come from rosters that the organizer signed, if they are given; else from the log itself.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coterie.errors import ConfigError, CoterieError
from coterie.net import audit, identity
from coterie.net.payload import Refused, parse_strict_json
from coterie.net.roster import Roster
from coterie.net.wire import bytes_to_sign as manifest_signed
from coterie.net.wire import parse_manifest

# More than a roster of 1000 members takes in a line. Longer lines are not read into memory.
MAX_LINE = 4 * 1024 * 1024
_TYPES: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(
        ("n", "format", "inc", "round", "exchange", "client", "bytes", "times", "version"), int
    ),
    **dict.fromkeys(
        ("prev", "event", "node", "run", "key", "peer", "from", "to", "reason", "code", "kind"), str
    ),
    **dict.fromkeys(("sha256", "manifest", "signature", "of", "text"), str),
    "time": (int, float),
    "members": dict,
}
_Key = tuple[int, int, int, int, str]  # incarnation, round, exchange, client, kind


@dataclass
class MemberTraffic:
    """What a log says of one other member.

    Args:
        sent: the digest of each message that was sent to it, by incarnation, round, exchange,
            client and kind.
        received: the same of messages that it sent.
        sent_bytes: bytes of payload, repetitions included.
        received_bytes: bytes of payload.
        declined: how often it asked for something and did not get it, by reason.
        missing: how often it did not answer a question, by reason.
        refused: what of it was refused, by reason: messages, models ("rejected"), connections.
    """

    sent: dict[_Key, str] = field(default_factory=dict)
    received: dict[_Key, str] = field(default_factory=dict)
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
        problems: why the log cannot be trusted, the first one first; empty if it can.
    """

    path: Path
    node: str = ""
    run: str = ""
    key: str = ""
    lines: int = 0
    first: float = 0.0
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
    problems: list[str] = field(default_factory=list)

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


def compare_logs(a: Report, b: Report) -> list[str]:
    """Return in what two logs of one run contradict each other; empty if they do not.

    What one has from the other must be what the other says that it sent. What was sent and did not
    arrive is no contradiction.
    """
    if a.run != b.run or a.node == b.node:
        return []
    out = []
    for sender, reader in ((a, b), (b, a)):
        sent, received = (
            sender.traffic_with(reader.node).sent,
            reader.traffic_with(sender.node).received,
        )
        lacking = [key for key in received if key not in sent]
        other = [key for key, found in received.items() if key in sent and sent[key] != found]
        who = f"{reader.node} received from {sender.node}"
        if lacking:
            # A power cut can take lines that were not synced, which explains that some are
            # missing.
            torn = " (its log has a break)" if sender.repaired or sender.unended else ""
            out.append(
                f"{_format_count(lacking)} that {who} are not in {sender.node}'s log{torn}: "
                f"{_describe_message(lacking[0])}"
            )
        if other:
            out.append(
                f"{_format_count(other)} that {who} have another digest in {sender.node}'s log: "
                f"{_describe_message(other[0])}"
            )
    return out


def count_lost(a: Report, b: Report) -> int:
    """Return how many messages between two nodes were sent but not received."""
    pairs = ((a, b), (b, a))
    return sum(
        len(x.traffic_with(y.node).sent.keys() - y.traffic_with(x.node).received.keys())
        for x, y in pairs
    )


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
        self.report, self._given = Report(path), {r.version: r for r in rosters}
        self._runs = {r.run for r in rosters}
        self._own: list[str] = []  # keys of the node, the newest first
        self._keys: dict[str, list[str]] = {}  # keys of members, the newest first
        self._running = False
        self._n: int | None = None
        self._raw = b""
        self._prev = audit.NOTHING

    def parse_files(self, paths: Sequence[Path]) -> Report:
        """Read the files of a chain."""
        report = self.report
        for path in paths:
            for number, line in enumerate(_iterate_lines(path), 1):
                # A problem does not end the reading: the report names every line that is wrong.
                try:
                    self._check_line(line)
                except (_InvalidLine, Refused) as bad:
                    report.problems.append(f"{path.name} line {number}: {bad}")
                except (KeyError, TypeError, ValueError, AttributeError, CoterieError) as bad:
                    report.problems.append(
                        f"{path.name} line {number}: it is no line of an audit log: {bad!r}"
                    )
                # The hash of the line as it is: a changed line breaks the chain once, not at all
                # later lines.
                self._prev = audit.hash_line(line.removesuffix(b"\n"))
                report.head = (report.head[0] if self._n is None else self._n - 1), self._prev
        if not report.lines:
            report.problems.append("it is empty")
        elif not report.heads:
            report.problems.append("no line of it is signed by the node")
        if self._given and not report.confirmed and not report.problems:
            given, found = (
                ", ".join(map(str, sorted(versions))) for versions in (self._given, report.rosters)
            )
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
            if event not in ("peer_up", "peer_down", "catch_up"):
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
        if self._runs and report.run not in self._runs:
            raise _InvalidLine(
                f"it is of run {report.run}; the roster that was given is of "
                f"{', '.join(sorted(self._runs))}"
            )
        # The newest key is the first one: a member can get another key, and older lines keep
        # theirs.
        if report.key not in self._own:
            self._own.insert(0, report.key)

    def _on_broken(self, found: Mapping[str, Any]) -> None:
        self._on_file(found)
        raise _InvalidLine(
            f"a new chain begins, since the node found the one before damaged: {found['text']}"
        )

    def _on_repaired(self, found: Mapping[str, Any]) -> None:
        self.report.repaired += 1

    def _on_start(self, found: Mapping[str, Any]) -> None:
        self._on_file(found)
        self.report.starts += 1
        # A start after a start: the node did not stop in order in between.
        self.report.unended += self._running
        self._running = True

    def _on_stop(self, found: Mapping[str, Any]) -> None:
        self._running = False

    def _on_roster(self, found: Mapping[str, Any]) -> None:
        report, version = self.report, found["version"]
        if report.rosters and version < report.rosters[-1]:
            raise _InvalidLine(
                f"version {version} of the roster after version {report.rosters[-1]}; versions "
                "only rise"
            )
        if version not in report.rosters:
            report.rosters.append(version)
        for member in found["members"].values():
            _check_types(member)
        keys = {name: member["key"] for name, member in found["members"].items()}
        given = self._given.get(version)
        if given is not None:
            if keys != {m.name: m.key for m in given.members}:
                raise _InvalidLine(
                    f"its members or their keys are not those of version {version} of the "
                    "organizer's roster"
                )
            report.confirmed.add(version)
        if report.node in keys and keys[report.node] not in self._own:
            raise _InvalidLine(f"the roster has another key for {report.node} than the log")
        # Keys are added, not replaced: messages from before a change have the older key.
        for name, key in keys.items():
            known = self._keys.setdefault(name, [])
            if key not in known:
                known.insert(0, key)

    def _on_joined(self, found: Mapping[str, Any]) -> None:
        self.report.members[found["peer"]] = found["key"]

    def _on_head(self, found: Mapping[str, Any]) -> None:
        report = self.report
        if (found["run"], found["node"]) != (report.run, report.node):
            raise _InvalidLine(f"it is of {found['node']} in run {found['run']}")
        # The newest own key alone: a head is signed with the key of its time.
        if not _is_signed_by(self._own[:1], *audit.split_signature(self._raw)):
            raise _InvalidLine(f"the signature is not that of {report.node}'s key")
        report.heads, report.unsigned = report.heads + 1, 0

    # ------------------------------------------------------------------ messages

    def _on_sent(self, found: Mapping[str, Any]) -> None:
        to = self.report.traffic_with(found["to"])
        key = found["inc"], found["round"], found["exchange"], found["client"], found["kind"]
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
        if not _is_signed_by(
            self._keys.get(peer, []), bytes.fromhex(found["signature"]), manifest_signed(text)
        ):
            raise _InvalidLine(f"the message is not signed by {peer}'s key")
        of = report.traffic_with(peer)
        of.received[m.inc, m.round, m.exchange, m.client, m.kind] = m.sha256
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
        elif of != "sent" and not of.startswith("peer_"):
            what = str(found.get("code", found.get("reason", of)))
            self.report.traffic_with(found.get("peer", "")).refused[what] += times


def _check_types(found: Any) -> None:
    """Check that the fields that this program reads have their types."""
    if not isinstance(found, dict):
        raise _InvalidLine("it is no JSON object")
    for name, value in found.items():
        kind = _TYPES.get(name, object)
        # A bool is an int for `isinstance`, and not every JSON reader holds integers from 2^53 on.
        if (
            not isinstance(value, kind)
            or isinstance(value, bool)
            or (type(value) is int and abs(value) >= 1 << 53)
        ):
            raise _InvalidLine(
                f"{name[:40]} is {str(value)[:40]}; expected "
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
