"""Setting up a run: the organizer's folder."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from coterie._util.files import write_atomically
from coterie._util.mappings import drop_keys
from coterie.errors import ConfigError, TransportError
from coterie.net import head, latecomers, nodefile
from coterie.net import roster as rosters
from coterie.net.identity import (
    OUTBOUND,
    certificate_name,
    check_address,
    load_certificate,
    sign_request,
)
from coterie.net.roster import Member, Roster
from coterie.studies import config

# Apart from each other: the place of a member in its file is its client's id.
MEMBERS, RELAYS = "members.json", "relays.json"


def load_members(folder: Path) -> dict[str, str]:
    """Return the addresses of all members ever signed, in the order of their clients' ids.

    The address of a member that was removed is "".
    """
    return _load_addresses(folder / MEMBERS)


def load_relays(folder: Path) -> dict[str, str]:
    """Return the addresses of all relays that are to be on the roster."""
    return _load_addresses(folder / RELAYS)


def _load_addresses(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    try:
        known = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is damaged ({error}); restore it from a copy") from None
    if not isinstance(known, dict):
        raise ConfigError(f"{path} is damaged: it holds no names; restore it from a copy")
    return known


def check_member(folder: Path, name: str, address: str = "", *, relay: bool = False) -> None:
    """Check that a name and an address are free, or are those of this member or relay.

    The name of a member that was removed is not.

    Args:
        folder: the organizer's.
        name: the name.
        address: the address; not checked when "".
        relay: whether it is to be that of a relay.

    Raises:
        ConfigError: when one of them is not free.
    """
    if name in (load_members(folder) if relay else load_relays(folder)):
        kind = "a member" if relay else "a relay"
        raise ConfigError(f"{name} is {kind}; agree on another name")
    # "" stands for a member that was removed: its entry keeps the places of the later ones.
    if load_members(folder).get(name) == "":
        raise ConfigError(
            f"{name} was removed, and neither names nor ids are used again; agree on another name"
        )
    # No roster can be written with one address twice, and an entry that was made stays.
    at = check_address(address) if address else ""
    for other, known in {**load_members(folder), **load_relays(folder)}.items():
        if at and known == at != OUTBOUND and other != name:
            raise ConfigError(f"{other} has the address {at}; agree on another one for {name}")


def add_member(folder: Path, name: str, address: str) -> None:
    """Store a member's address, in the order of signing, for the roster."""
    _save_addresses(folder / MEMBERS, {**load_members(folder), name: check_address(address)})


def add_relay(folder: Path, name: str, address: str) -> None:
    """Store a relay's address for the roster."""
    _save_addresses(folder / RELAYS, {**load_relays(folder), name: check_address(address)})


def _save_addresses(path: Path, known: dict[str, str]) -> None:
    write_atomically(path, (json.dumps(known, indent=1) + "\n").encode())


def remove_member(folder: Path, name: str) -> Roster:
    """Remove a member: write and sign the next roster without it; its client's id stays unused.

    A relay is removed likewise.

    Args:
        folder: the organizer's.
        name: the member's, or the relay's.

    Raises:
        ConfigError: when it has the server role, or is the last member.
        TransportError: when there is no such member.
    """
    old = rosters.load(folder / "roster.toml", folder / "organizer.pub")
    if name in (relays := load_relays(folder)):
        left = tuple(relay for relay in old.relays if relay.name != name)
        # The roster first: an entry that is lost before it would leave a relay that nobody can
        # remove.
        made = _sign_next(folder, replace(old, relays=left))
        _save_addresses(folder / RELAYS, drop_keys(relays, {name}))
        return made
    member = old.member(name)
    if old.server == name:
        raise ConfigError(
            f"{name} has the server role; write a roster with another server first: --server"
        )
    if len(old.members) == 1:
        raise ConfigError(
            f"{name} is the only member of run {old.run}; a run without members has no roster"
        )
    left = tuple(m for m in old.members if m.name != name)
    removed = tuple(sorted([*old.removed, *member.clients]))
    made = _sign_next(folder, replace(old, members=left, removed=removed))
    # The entry stays without an address, so that neither name nor id is used again.
    if name in (known := load_members(folder)):
        _save_addresses(folder / MEMBERS, {**known, name: ""})
    return made


def rekey_member(
    folder: Path, name: str, request: Path, *, address: str = "", days: float = 30.0
) -> Roster:
    """Give a member a new key: sign its request, and write and sign the next version of the roster.

    Args:
        folder: the organizer's.
        name: the member's.
        request: its new request.
        address: its new address; "" for the one that it has.
        days: validity of the certificate.

    Raises:
        TransportError: when there is no such member, or the request is not for its name and
            address.
    """
    old = rosters.load(folder / "roster.toml", folder / "organizer.pub")
    member = old.member(name)
    at = check_address(address) if address else member.address
    changed = _replace_member(old, replace(member, address=at))
    # After the changed entry was checked: a wrong address must not leave a new certificate behind.
    certificate = sign_request(folder, request, name, at, days=days, new_key=True)
    new = rosters.add_certificate(changed.member(name), certificate)
    return _store_moved(folder, _replace_member(changed, new), name)


def move_member(folder: Path, name: str, address: str) -> Roster:
    """Give a member another address: write and sign the next version of the roster.

    Its certificate goes on counting: others demand the name of its key, not that of its host.

    Args:
        folder: the organizer's.
        name: the member's.
        address: its new address.

    Raises:
        TransportError: when there is no such member, or another one has that address.
        ConfigError: when the certificate is of an older version, which is bound to the host.
    """
    old = rosters.load(folder / "roster.toml", folder / "organizer.pub")
    member = old.member(name)
    if not member.subject:
        raise ConfigError(
            f"the certificate of {name} is bound to its host, not to its key; sign a new request: "
            f"coterie net rekey {folder} {name} {name}.csr --address {address}"
        )
    moved = replace(member, address=check_address(address))
    return _store_moved(folder, _replace_member(old, moved), name)


def _replace_member(old: Roster, new: Member) -> Roster:
    """Return a roster with another entry of one member, which is checked."""
    members = list(old.members)
    members[members.index(old.member(new.name))] = new
    return replace(old, members=tuple(members))


def _store_moved(folder: Path, changed: Roster, name: str) -> Roster:
    """Sign a roster with a changed entry, and note the address for rosters of later runs."""
    made = _sign_next(folder, changed)
    if name in (known := load_members(folder)):
        _save_addresses(folder / MEMBERS, {**known, name: changed.member(name).address})
    return made


def _sign_next(folder: Path, changed: Roster) -> Roster:
    """Sign a changed roster as its next version."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    made = replace(changed, version=changed.version + 1, issued=now)
    rosters.write_signed(folder / "roster.toml", made, folder / "organizer.key")
    return made


def load_run_id(folder: Path) -> str:
    """Return the run's id of an organizer's folder."""
    subject = load_certificate(folder / "ca.pem").subject.rfc4514_string()
    return subject.removeprefix("CN=coterie ")


def write_roster(
    folder: Path, study: Path, features: tuple[int, ...], classes: int, server: str = ""
) -> Roster:
    """Write and sign the roster of all members that have a certificate; one client each.

    Args:
        folder: the organizer's.
        study: the study file, with one method and one seed.
        features: the shape of one input.
        classes: number of classes; 0 for regression.
        server: the member in the server role.

    Raises:
        ConfigError: when no member has a certificate, or the study needs a server and none is
            named.
    """
    known = load_members(folder)
    if not any(known.values()):
        raise ConfigError(
            f"{folder} has signed no member yet; answer requests with `coterie net sign`"
        )
    chosen, _, _ = nodefile.select_run(config.load_study(study))
    plan = nodefile.make_run_spec(chosen)
    if plan.method.server and not server:
        raise ConfigError(
            f"{plan.method.kind} needs a server; name the member in that role: "
            f"--server {next(name for name, address in known.items() if address)}"
        )
    made = replace(
        _enroll(folder),
        study=head.study_hash(plan.common_settings(len(known))),
        # The shape of an input and the number of classes make the model: no data are needed.
        schema=plan.compute_schema(features, classes or 1),
        server=server if plan.method.server else "",
    )
    # clients that the study holds out must be on the roster
    latecomers.find_participants(made, plan.method, plan.settings, plan.seed)
    rosters.write_signed(folder / "roster.toml", made, folder / "organizer.key")
    return made


def write_federation(folder: Path) -> Roster:
    """Write and sign the roster of a federation: all members with a certificate, and no study.

    Args:
        folder: the organizer's.
    """
    made = _enroll(folder)
    rosters.write_signed(folder / "roster.toml", made, folder / "organizer.key")
    return made


def _enroll(folder: Path) -> Roster:
    """Return the next roster of all members that have a certificate; it names no study."""
    known = load_members(folder)
    members, removed = [], []
    # A client's id is its position among all members ever signed, the removed ones included.
    for number, (name, address) in enumerate(known.items()):
        if not address:
            removed.append(number)
            continue
        members.append(_enter(folder, Member(name, address, (number,))))
    return Roster(
        load_run_id(folder),
        tuple(members),
        len(known),
        # Members refuse a roster whose version is not above the one that they have seen.
        version=_last_version(folder) + 1,
        issued=datetime.now(UTC).isoformat(timespec="seconds"),
        removed=tuple(removed),
        relays=tuple(_enter(folder, Member(*one, ())) for one in load_relays(folder).items()),
    )


def _enter(folder: Path, member: Member) -> Member:
    """Return an entry of the roster with the certificate that was signed for it."""
    path = folder / "members" / f"{member.name}.pem"
    certificate = load_certificate(path)
    if certificate_name(certificate) != member.name:
        raise TransportError(f"{path} is the certificate of {certificate_name(certificate)}")
    return rosters.add_certificate(member, certificate)


def _last_version(folder: Path) -> int:
    path = folder / "roster.toml"
    return rosters.load(path, folder / "organizer.pub").version if path.exists() else 0


def check_roster(path: Path, organizer: Path, node_file: Path | None) -> list[str]:
    """Return the problems of a roster, and of a node with it; empty when there are none."""
    if node_file is None:
        # The organizer's files usually lie in one folder.
        same_folder = path.with_name("organizer.pub")
        return rosters.check_file(path, organizer if organizer.exists() else same_folder)
    file = nodefile.load(node_file)
    own = file.load_identity()
    problems = rosters.check_file(path, file.resolve_path(file.organizer), own=own)
    study, label, _ = file.select_run()
    roster = rosters.load(path, file.resolve_path(file.organizer))
    found = head.study_hash(nodefile.make_run_spec(study).common_settings(roster.population))
    if roster.study and found != roster.study:
        problems.append(
            f"{file.study} ({label}) is not the study of the roster; ask the organizer for its "
            "study file"
        )
    return problems
