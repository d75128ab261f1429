"""Setting up a run: the organizer's folder."""

import json
from datetime import UTC, datetime
from pathlib import Path

from coterie._util.files import write_atomically
from coterie.errors import ConfigError, TransportError
from coterie.models.layout import Layout, source, template
from coterie.net import head, latecomers, nodefile
from coterie.net import roster as rosters
from coterie.net.identity import Identity, certificate_name, read_certificate
from coterie.net.roster import Member, Roster
from coterie.simulation.settings import DTYPES
from coterie.studies import config

MEMBERS = "members.json"


def note_member(folder: Path, name: str, address: str) -> None:
    """Store a member's address, in the order of signing, for the roster."""
    path = folder / MEMBERS
    known = json.loads(path.read_text()) if path.exists() else {}
    known[name] = address
    write_atomically(path, (json.dumps(known, indent=1) + "\n").encode())


def run_of(folder: Path) -> str:
    """Return the run's id of an organizer's folder."""
    subject = read_certificate(folder / "ca.pem").subject.rfc4514_string()
    return subject.removeprefix("CN=coterie ")


def write_roster(folder: Path, study: Path, features: tuple[int, ...], classes: int, server: str = "") -> Roster:
    """Write and sign the roster of all members that have a certificate; one client each.

    Args:
        folder: the organizer's.
        study: the study file, with one method and one seed.
        features: the shape of one input.
        classes: number of classes; 0 for regression.
        server: the member in the server role.

    Raises:
        ConfigError: when no member has a certificate, or the study needs a server and none is named.
    """
    path = folder / MEMBERS
    known = json.loads(path.read_text()) if path.exists() else {}
    if not known:
        raise ConfigError(f"{folder} has signed no member yet; answer requests with `coterie net sign`")
    chosen, _, _ = nodefile.choose(config.load(study))
    plan = nodefile.plan_of(chosen)
    if plan.method.server and not server:
        raise ConfigError(
            f"{plan.method.kind} needs a server; name the member in that role: --server {next(iter(known))}"
        )
    module = template(plan.method.model(source(plan.model, features, classes or 1)))
    layout = Layout(module, DTYPES[plan.settings.dtype])
    members = []
    for number, (name, address) in enumerate(known.items()):
        certificate = read_certificate(folder / "members" / f"{name}.pem")
        if certificate_name(certificate) != name:
            raise TransportError(
                f"{folder / 'members' / name}.pem is the certificate of {certificate_name(certificate)}"
            )
        members.append(rosters.certified(Member(name, address, (number,)), certificate))
    made = Roster(
        run_of(folder),
        tuple(members),
        len(members),
        version=_last_version(folder) + 1,
        study=head.study_hash(plan.agreed(len(members))),
        schema=head.schema_hash(layout),
        server=server if plan.method.server else "",
        issued=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    latecomers.sides(made, plan.method, plan.settings, plan.seed)  # whom the study holds out must be on it
    rosters.write(folder / "roster.toml", made, folder / "organizer.key")
    return made


def _last_version(folder: Path) -> int:
    path = folder / "roster.toml"
    return rosters.load(path, folder / "organizer.pub").version if path.exists() else 0


def check_roster(path: Path, organizer: Path, node_file: Path | None) -> list[str]:
    """Return the problems of a roster, and of a node with it; empty when there are none."""
    if node_file is None:
        beside = path.with_name("organizer.pub")
        return rosters.check(path, organizer if organizer.exists() else beside)
    file = nodefile.load(node_file)
    own = Identity.load(file.path(file.key), file.path(file.certificate), file.path(file.ca))
    problems = rosters.check(path, file.path(file.organizer), own=own)
    study, label, _ = file.chosen()
    roster = rosters.load(path, file.path(file.organizer))
    found = head.study_hash(nodefile.plan_of(study).agreed(roster.population))
    if roster.study and found != roster.study:
        problems.append(f"{file.study} ({label}) is not the study of the roster; ask the organizer for its study file")
    return problems
