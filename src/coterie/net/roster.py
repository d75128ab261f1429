"""The roster: the members of a run with addresses and keys, in a file that the organizer signs.

It is all that members must agree on in advance, and no machine has to serve it. The signature is
over the bytes of the file, so that a reader checks it before it reads a field.
"""

import json
import re
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime, timedelta
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from coterie._util.files import write_atomically
from coterie._util.toml import parse_toml
from coterie.errors import PeerMismatch, TransportError
from coterie.net import identity
from coterie.net.wire import NAME, SIGNATURE, VERSION

# It precedes what is signed, so that a signature of another kind of text never counts here.
_DOMAIN = b"coterie roster 1\n"
_HEX = re.compile(r"[0-9a-f]*")
MAX_MEMBERS = 10_000
"""Members of a roster; of as many it stays below `wire.MAX_ROSTER`."""
MAX_ALL_TO_ALL = 1000
"""Members of a run in which each may ask every other one: a head of all their names stays below
`wire.MAX_HEAD`."""


@dataclass(frozen=True)
class Member:
    """One node of a run.

    Args:
        name: its name in the run.
        address: host:port at which the others reach it; "outbound" when it accepts no connection.
        clients: ids of the clients it hosts; a client's id is its position in the population.
        key: its public key, 66 hexadecimal digits.
        certificate: the fingerprint of its certificate (SHA-256, hexadecimal).
        expires: when that certificate ends, in ISO 8601.
        subject: the common name of its certificate: the fingerprint of its key. Empty for
            certificates of older versions, whose common name is the member's name.
    """

    name: str
    address: str
    clients: tuple[int, ...]
    key: str = ""
    certificate: str = ""
    expires: str = ""
    subject: str = ""

    @property
    def common_name(self) -> str:
        """The common name of its certificate, by which links are allowed."""
        return self.subject or self.name

    @property
    def is_outbound(self) -> bool:
        """Whether it accepts no connection, and only dials out."""
        return self.address == identity.OUTBOUND

    @property
    def host_and_port(self) -> tuple[str, int]:
        """Where it is dialed."""
        return identity.split_address(self.address)

    def __str__(self) -> str:
        return (
            f"{self.name}, which only dials out"
            if self.is_outbound
            else f"{self.name} at {self.address}"
        )


@dataclass(frozen=True)
class Roster:
    """Everything the members of a run agree on.

    Args:
        run: the run's id, of the characters a-z, 0-9 and -.
        members: the nodes; each dials the ones before it.
        population: number of clients in all.
        version: increases when the roster changes; a node refuses one older than it has seen.
        protocol: version of the wire format.
        study: hash of method, hyperparameters, model and settings.
        schema: hash of the model's tensors.
        server: the member in the server role, "" for peer-to-peer methods.
        clusters: planted cluster of each client, for tests with Oracle only.
        issued: when it was signed, in ISO 8601.
        removed: ids of clients whose member was removed. Ids are never used again, so that the
            population keeps its size; these clients receive no requests.
        relays: processes by which members that only dial out are reached; no members, and without
            clients.
    """

    run: str
    members: tuple[Member, ...]
    population: int
    version: int = 1
    protocol: int = VERSION
    study: str = ""
    schema: str = ""
    server: str = ""
    clusters: tuple[int, ...] = ()
    issued: str = ""
    removed: tuple[int, ...] = ()
    relays: tuple[Member, ...] = ()

    def __post_init__(self) -> None:
        # The format first: another one may mean something else by the same fields.
        if self.protocol != VERSION:
            raise PeerMismatch(
                f"the roster has wire format {self.protocol}; this program speaks wire format "
                f"{VERSION}"
            )
        problems = self.find_problems()
        if problems:
            raise TransportError(f"the roster is wrong: {problems[0]}")

    def find_problems(self) -> list[str]:
        """Return the roster's internal errors; empty for a valid roster."""
        names, everyone = [m.name for m in self.members], self.everyone
        clients = sorted([*self.removed, *chain.from_iterable(m.clients for m in self.members)])
        found = []
        for member in everyone:
            if not NAME.fullmatch(member.name):
                found.append(f"name {member.name[:80]!r}; expected 1 to 63 of a-z, 0-9 and -")
        if not NAME.fullmatch(self.run):
            found.append(f"run {self.run[:80]!r}; expected 1 to 63 of a-z, 0-9 and -")
        if not 1 <= len(names) <= MAX_MEMBERS:
            found.append(f"{len(names)} members; expected 1 to {MAX_MEMBERS}")
        # In one form each: two members behind one address would be mistaken for each other.
        addresses = [_normalize_address(m.address) for m in everyone if not m.is_outbound]
        for what, values in (("name", [m.name for m in everyone]), ("address", addresses),
                             ("key", [m.key for m in everyone if m.key])):  # fmt: skip
            twice = sorted(v for v, times in Counter(values).items() if times > 1)
            found += [f"two members have the {what} {v}" for v in twice]
        # Ids are positions in the population: each is used once, and none is free.
        if clients != list(range(self.population)):
            found.append(
                f"the members host, or once hosted, clients {clients[:20]}; "
                f"expected each of 0 to {self.population - 1} once"
            )
        if self.server and self.server not in names:
            found.append(
                f"the server {self.server!r} is not a member; members: {', '.join(names[:10])}"
            )
        if self.clusters and len(self.clusters) != self.population:
            found.append(
                f"{len(self.clusters)} clusters for {self.population} clients; expected one a "
                "client"
            )
        for relay in self.relays:
            if relay.is_outbound or relay.clients:
                found.append(f"{relay.name}: a relay has an address, and no clients")
        for member in everyone:
            try:
                identity.check_address(member.address)
                if member.key:
                    key = identity.decode_public_key(member.key)
                    # Links are allowed by common name, so that must be the fingerprint of the
                    # member's key.
                    if member.subject not in ("", identity.key_fingerprint(key)):
                        found.append(f"{member.name}: its certificate is not bound to its key")
            except TransportError as error:
                found.append(f"{member.name}: {error}")
        return found

    @cached_property
    def _by_name(self) -> dict[str, Member]:
        # With thousands of members, a search for each of them would take seconds.
        return {member.name: member for member in reversed(self.members)}

    def has_member(self, name: str) -> bool:
        """Whether somebody is on the roster."""
        return name in self._by_name

    @property
    def everyone(self) -> tuple[Member, ...]:
        """The members and the relays."""
        return (*self.members, *self.relays)

    def member(self, name: str) -> Member:
        """Return a member by name.

        Raises:
            TransportError: when there is none of that name.
        """
        if (found := self._by_name.get(name)) is not None:
            return found
        names = ", ".join(m.name for m in self.members[:10])
        raise TransportError(f"{name!r} is not on the roster of run {self.run}; members: {names}")

    def has_way(self, one: str, other: str) -> bool:
        """Whether two members can reach each other: one by dialing the other, or by a relay."""
        return bool(self.relays) or not (
            self.member(one).is_outbound and self.member(other).is_outbound
        )

    def name_of(self, common_name: str) -> str:
        """Return the member with a common name, or the common name itself if none has it."""
        return next((m.name for m in self.members if m.common_name == common_name), common_name)

    @property
    def host_of(self) -> dict[int, str]:
        """The member that hosts each client."""
        hosts = {}
        for member in self.members:
            hosts |= dict.fromkeys(member.clients, member.name)
        return hosts

    @property
    def client_names(self) -> dict[int, str]:
        """The name of each client that is the only one of its member: the member's."""
        names = {}
        for member in self.members:
            if len(member.clients) == 1:
                names[member.clients[0]] = member.name
        return names


def _normalize_address(address: str) -> str:
    """Return an address in its one form, or as it is when it is none."""
    try:
        return identity.check_address(address)
    except TransportError:
        return address


def add_certificate(member: Member, certificate: x509.Certificate) -> Member:
    """Return a member with the key, fingerprint and end of its certificate."""
    # In certificates of older versions the common name is the member's, which `subject` need
    # not repeat.
    return replace(
        member,
        key=identity.encode_public_key(identity.certificate_key(certificate)),
        certificate=identity.fingerprint(certificate),
        expires=certificate.not_valid_after_utc.isoformat(),
        subject=name if (name := identity.common_name(certificate)) != member.name else "",
    )


def dumps(roster: Roster) -> str:
    """Return a roster as text."""
    lines = []
    # JSON's texts, whole numbers and lists of these are valid TOML.
    for field in fields(Roster):
        if field.name not in ("members", "relays"):
            lines.append(f"{field.name} = {json.dumps(getattr(roster, field.name))}")
    for kind in ("members", "relays"):
        for member in getattr(roster, kind):
            lines += ["", f"[[{kind}]]"]
            for field in fields(Member):
                lines.append(f"{field.name} = {json.dumps(getattr(member, field.name))}")
    return "\n".join(lines) + "\n"


def loads(text: str) -> Roster:
    """Read a roster from text, strictly.

    Raises:
        TransportError: when it is not a roster, or has internal errors.
    """
    try:
        table = parse_toml(text)
    except tomllib.TOMLDecodeError as error:
        raise TransportError(f"the roster is not valid TOML: {error}") from None
    members, relays = _take_entries(table, "members"), _take_entries(table, "relays")
    # The entries have been taken out: what is left are the roster's own keys.
    _check_types(Roster, table, {"members", "relays"})
    for name in ("clusters", "removed"):
        table[name] = tuple(table.get(name, ()))
    return Roster(members=members, relays=relays, **table)


def _take_entries(table: dict[str, Any], kind: str) -> tuple[Member, ...]:
    """Take the [[members]] or the [[relays]] out of a roster's table."""
    entries = table.pop(kind, [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise TransportError(f"the roster's {kind} are not [[{kind}]] tables")
    members = []
    for entry in entries:
        _check_types(Member, entry, set())
        members.append(Member(**{**entry, "clients": tuple(entry["clients"])}))
    return tuple(members)


def _check_types(kind: type, table: Mapping[str, Any], skip: set[str]) -> None:
    known = {f.name: f for f in fields(kind) if f.name not in skip}
    for key, value in table.items():
        if key not in known:
            raise TransportError(
                f"the roster has the unknown key {key!r}; known: {', '.join(known)}"
            )
        # The other fields are tuples, which are lists in TOML.
        wanted = known[key].type if known[key].type in (str, int) else list
        # Lists hold integers only; by the exact type, a bool is none.
        numbers = wanted is not list or (
            isinstance(value, list) and all(type(v) is int for v in value)
        )
        if type(value) is not wanted or not numbers:
            raise TransportError(f"{key} in the roster is {value!r}; expected {wanted}")
    required = {"run", "population"} if kind is Roster else {"name", "address", "clients"}
    if not required <= set(table):
        raise TransportError(f"the roster lacks {', '.join(sorted(required - set(table)))}")


def write_signed(path: Path, roster: Roster, organizer: Path) -> None:
    """Sign a roster, and write it and its signature (`PATH.sig`).

    Args:
        path: the file to write.
        roster: the roster.
        organizer: the organizer's private key.
    """
    text = dumps(roster).encode()
    signature = identity.sign(identity.load_key(organizer), _DOMAIN + text)
    # Two files cannot change at once. In between the signature does not fit, and readers look
    # again when the files change.
    write_atomically(path, text)
    write_atomically(path.with_name(path.name + ".sig"), (signature.hex() + "\n").encode())


def load(path: Path, organizer: Path) -> Roster:
    """Read a signed roster.

    Args:
        path: the roster; its signature is next to it.
        organizer: the organizer's public key (`organizer.pub`), received over a trusted channel.

    Raises:
        TransportError: when the signature is not the organizer's, or the roster has errors.
    """
    return parse_signed(
        load_signed(path),
        load_organizer_key(organizer),
        f"{path} is not signed by the organizer in {organizer}",
    )


def load_signed(path: Path) -> bytes:
    """Return a roster with its signature before it, as it travels between members.

    Raises:
        TransportError: when a file is missing, or holds no signature.
    """
    text, signature = _load_bytes(path), _load_bytes(path.with_name(path.name + ".sig"))
    hexadecimal = signature.decode("ascii", "replace").strip()
    # A signature is 64 bytes, two digits each.
    if not _HEX.fullmatch(hexadecimal) or len(hexadecimal) != 128:
        raise TransportError(
            f"{path}.sig holds no signature; ask the organizer for both files again"
        )
    return bytes.fromhex(hexadecimal) + text


def load_organizer_key(path: Path) -> ec.EllipticCurvePublicKey:
    """Read the organizer's public key.

    Raises:
        TransportError: when the file holds none.
    """
    return identity.decode_public_key(_load_bytes(path).decode("ascii", "replace").strip())


def parse_signed(
    data: bytes,
    organizer: ec.EllipticCurvePublicKey,
    what: str = "the roster is not the organizer's",
) -> Roster:
    """Check the signature of the result of `load_signed`, and then read the roster.

    Raises:
        TransportError: when the signature is not the organizer's; `what` begins the text.
    """
    signature, text = data[:SIGNATURE], data[SIGNATURE:]
    if not identity.verify(organizer, signature, _DOMAIN + text):
        raise TransportError(f"{what}: it was changed, or belongs to another run")
    # Parsed only now: nothing of a text is interpreted before its signature is checked.
    return loads(text.decode("utf-8", "replace"))


def _load_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TransportError(f"cannot read {path}: {error.strerror}") from None


def check_file(
    path: Path,
    organizer: Path,
    *,
    own: identity.Identity | None = None,
    now: datetime | None = None,
) -> list[str]:
    """Check a roster for all members and for one member.

    Args:
        path: the roster.
        organizer: the organizer's public key.
        own: the member to check it for.
        now: the time.

    Returns:
        The problems, as sentences; empty when there are none.
    """
    try:
        roster = load(path, organizer)
    except (PeerMismatch, TransportError) as error:
        return [str(error)]
    return list_problems(roster, own=own, now=now)


def list_problems(
    roster: Roster, *, own: identity.Identity | None = None, now: datetime | None = None
) -> list[str]:
    """Return the problems of a roster of a run, as sentences; see `check_file`.

    Args:
        roster: the roster.
        own: the member to check it for.
        now: the time.
    """
    now = now or datetime.now(UTC)
    ending = {}
    for name, (days, due) in find_ends(roster, now).items():
        # A certificate that was made for so short a time is none that somebody forgot.
        if due is not None and due <= _GRAVE_DAYS:
            ending[name] = days
    found = _find_unreachable(roster)
    for member in roster.everyone:
        if not member.key or not member.certificate:
            found.append(
                f"{member.name} has no certificate yet: answer its request with `coterie net sign`"
            )
            continue
        end = datetime.fromisoformat(member.expires)
        if end < now:
            found.append(
                f"the certificate of {member.name} ended on {end:%Y-%m-%d %H:%M} UTC; sign a new "
                "request"
            )
        # Two days are warned of in any case, also where certificates are made for a short time.
        elif end - now < timedelta(days=2):
            found.append(
                f"the certificate of {member.name} ends on {end:%Y-%m-%d %H:%M} UTC, in less than "
                "two days"
            )
        elif member.name in ending:
            found.append(
                f"the certificate of {member.name} ends on {end:%Y-%m-%d %H:%M} UTC, in "
                f"{ending[member.name]:.0f} days; sign a new request"
            )
    if not roster.study or not roster.schema:
        found.append(
            "the roster names no study: write it again with `coterie net roster --study STUDY.toml`"
        )
    if own is not None:
        found += check_own(roster, own)
    return found


def _find_unreachable(roster: Roster) -> list[str]:
    """Return a sentence about members that only dial out and need a relay that is not there."""
    outbound = [m.name for m in roster.members if m.is_outbound]
    # A server that can be dialed is all that its clients need.
    direct = bool(roster.server) and roster.server not in outbound
    if roster.relays or direct or len(outbound) < 2:
        return []
    return [
        f"{', '.join(outbound[:10])} only dial out, and no relay is on the roster by which they "
        "reach each other: sign one with `coterie net sign --relay`, and write the roster again"
    ]


NOTICE_DAYS = (30, 14, 7, 1)
"""Days before the end of a certificate at which nodes log it."""
# From here on a notice is an error in the log, and a problem of the roster for all who check it.
_GRAVE_DAYS = 7


def find_ends(roster: Roster, now: datetime) -> dict[str, tuple[float, int | None]]:
    """Return, for each member with a certificate, the days to its end and the newest notice due.

    A notice that was due before the roster was signed is none: its organizer knew. 0 is that of the
    end itself; None: none is due.
    """
    signed = datetime.fromisoformat(roster.issued) if roster.issued else now
    found = {}
    for member in roster.everyone:
        if member.expires:
            end = datetime.fromisoformat(member.expires)
            due = []
            for days in (*NOTICE_DAYS, 0):
                at = end - timedelta(days=days)
                # A notice that was due before the roster was signed is not given again.
                if at <= now and (days == 0 or at > signed):
                    due.append(days)
            # The newest notice is that of the fewest days, since it comes last.
            found[member.name] = (end - now) / timedelta(days=1), min(due, default=None)
    return found


def check_own(roster: Roster, own: identity.Identity) -> list[str]:
    """Return the problems of a roster for one member or relay; empty when there are none."""
    member = next((one for one in roster.relays if one.name == own.name), None)
    try:
        member = member or roster.member(own.name)
    except TransportError as error:
        return [str(error)]
    # The key first: with another key the certificate is another, too, and would be blamed.
    if member.key != identity.encode_public_key(own.key.public_key()):
        return [
            f"the roster has another key for {own.name} than {own.key_file}; ask the organizer for "
            "a new roster"
        ]
    if member.certificate != identity.fingerprint(own.certificate):
        return [
            f"the roster knows another certificate of {own.name} than {own.certificate_file}; use "
            "the newest of both"
        ]
    return []
