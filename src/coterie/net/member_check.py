"""Checks of a federation's member: all that can go wrong before a study comes."""

from collections.abc import Callable

from coterie.errors import CoterieError
from coterie.net import doctor, nodefile
from coterie.net import roster as rosters
from coterie.net.identity import Identity
from coterie.net.roster import Roster
from coterie.net.service import load_state
from coterie.net.servicefile import ServiceFile
from coterie.studies.config import parse_study_text

# Sources of data take the seed of a study, and nothing else of it.
_ANY_STUDY = "seeds = [0]\n[data]\ndataset = 'digits'\n[[methods]]\nkind = 'local'"


def check_member(file: ServiceFile, say: doctor.Say) -> bool:
    """Check a member's identity, roster and data, and the members that it can dial.

    Args:
        file: node.toml.
        say: called with each result: a sentence, and whether the check passed.

    Returns:
        Whether all checks passed.
    """
    report = doctor.CheckReport(say)
    found = _check_identity(file, report)
    for role in file.data:
        _check_role(file, role, report)
    if not file.data:
        report("no data: a study names data by a role, in a table [data.ROLE]", False)
    if found is not None:
        own, roster = found
        _check_links(file, own, roster, report)
    return report.fine


def _check_identity(
    file: ServiceFile, report: Callable[..., None]
) -> tuple[Identity, Roster] | None:
    try:
        own = file.load_identity()
        doctor.report_identity(own, report)
        roster = doctor.load_newest(file, file.resolve_path(file.studies), report)
        problems = rosters.check_own(roster, own)
    except CoterieError as error:
        report(str(error), False)
        return None
    for problem in problems:
        report(problem, False)
    names = ", ".join(member.name for member in roster.members[:20])
    report(f"federation {roster.run}: roster {roster.version} is signed; members: {names}")
    return own, roster


def _check_role(file: ServiceFile, role: str, report: Callable[..., None]) -> None:
    try:
        source = file.make_node_file("check", role, server=False, quorum=1)
        rows = nodefile.load_own_rows(source, parse_study_text(_ANY_STUDY, name="check"), (0,), 1)
    except (CoterieError, OSError) as error:
        report(f"[data.{role}]: {error}", False)
        return
    counts = [int(rows.count_samples(split).sum()) for split in ("train", "validation")]
    kind = f"{rows.classes} classes" if rows.classes else "numbers to predict"
    report(
        f"[data.{role}]: {counts[0]} training and {counts[1]} validation samples of "
        f"{list(rows.features)} numbers, {kind}"
    )


def _check_links(
    file: ServiceFile, own: Identity, roster: Roster, report: Callable[..., None]
) -> None:
    proxy = file.network.proxy
    for relay in roster.relays:
        report(*doctor.check_relay(relay, proxy))
    others = [member for member in roster.members if member.name != own.name]
    if state := load_state(file.resolve_path(file.studies)):
        report("the service runs")
        here = state.get("here", ())
        for member in others:
            text = "here"
            if member.name not in here:
                text = doctor.explain_silence(member, proxy)
            report(f"{member.name}: {text}", member.name in here)
        return
    report("the service does not run; members answer when it does: coterie federation serve")
    for member in others:
        if not member.is_outbound:
            report(*doctor.check_door(member, proxy))
