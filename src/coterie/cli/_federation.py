"""The commands of a standing federation: `coterie federation ...`, `propose`, `approve`, ..."""

import inspect
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coterie._util.files import check_folder, show_path
from coterie.cli import _net
from coterie.cli._options import Open, Port
from coterie.cli._report import show_page
from coterie.errors import ConfigError

if TYPE_CHECKING:  # it needs the extra for networks
    from coterie.net.decisions import Decisions
    from coterie.net.service import Membership

federation = typer.Typer(
    no_args_is_help=True,
    help="Set up a federation that stands: create it, join, sign members, serve.",
)
Node = Annotated[Path, typer.Option("--node", metavar="NODE.toml", help="This member's file.")]
MemberFile = Annotated[Path, typer.Argument(metavar="NODE.toml", help="This member's file.")]
Name = Annotated[str, typer.Argument(help="The study's name; `coterie studies --node` lists them.")]
_NODE = Path("node.toml")
_SENT = "it is sent to the other members while `coterie federation serve` runs"


def add_commands(app: typer.Typer) -> None:
    """Add these commands to the program's."""
    app.add_typer(federation, name="federation")
    for name, command in (
        ("propose", propose_study),
        ("approve", approve_study),
        ("decline", decline_study),
        ("withdraw", withdraw_study),
        ("stop", stop_study),
    ):
        app.command(name)(command)
    # A roster changes in the same way, whether it names a study or not.
    for name, command in (
        ("join", _net.create_member_key),
        ("remove", _net.remove_member),
        ("rekey", _net.rekey_member),
        ("move", _net.move_member),
    ):
        text = inspect.cleandoc(command.__doc__ or "")
        federation.command(name, help=text.replace("coterie net", "coterie federation"))(command)


@federation.command("create")
def create_federation(
    folder: _net.Folder,
    name: Annotated[str, typer.Option(help="The federation's name: a-z, 0-9 and -.")],
    days: _net.AuthorityDays = 365.0,
) -> None:
    """Create the organizer's key and the certificate authority of a federation.

    [bold]Example[/bold]

      coterie federation create organizer --name hearts
    """
    _net.check_packages()
    from coterie.net import identity

    check_folder(folder)
    identity.make_authority(folder, name, days=days)
    typer.echo(
        f"{show_path(folder)}: ca.key and organizer.key stay here; give every member ca.pem and "
        "organizer.pub"
    )


@federation.command("sign")
def sign_member(
    folder: _net.Folder,
    request: _net.Request,
    address: _net.Address,
    name: Annotated[str, typer.Option(help="The name as agreed with the member.")] = "",
    days: _net.Days = 30.0,
    relay: _net.Relay = False,
) -> None:
    """Sign a member's request, and the next roster of the federation with it.

    Members that serve adopt the roster when they get its two files, or from a member
    that has them.

    [bold]Examples[/bold]

      coterie federation sign organizer north.csr 192.0.2.7:7447 --name north
      coterie federation sign organizer relay.csr 192.0.2.9:443 --name relay --relay
    """
    _net.sign_member(folder, request, address, name, days, relay)
    from coterie.net import setup

    if not any(setup.load_members(folder).values()):
        return  # a relay that was signed before the first member
    made = setup.write_federation(folder)
    number = len(made.members)
    typer.echo(
        f"{show_path(folder / 'roster.toml')}, version {made.version}, has "
        f"{number} member{'s' * (number != 1)}: {_net.SEND}"
    )


@federation.command("serve")
def serve_member(file: _net.NodeFile, insecure: _net.Insecure = False) -> None:
    """Serve as a member of a federation: run the studies that it approves, one at a time.

    It runs until it is stopped; started again, it goes on where it was.

    [bold]Example[/bold]

      coterie federation serve node.toml
    """
    _net.check_packages()
    from coterie.net import service

    service.serve(file, insecure=insecure)


@federation.command("check")
def check_member(file: MemberFile) -> None:
    """Check a member before studies come: identity, roster, data of each role, and links.

    While the service runs it also says which members are here, and why the others are
    not. The exit status is 1 when something is wrong.

    [bold]Example[/bold]

      coterie federation check node.toml
    """
    _net.check_packages()
    from coterie.net import member_check, servicefile

    if not member_check.check_member(servicefile.load(file), _net.report_check):
        raise typer.Exit(1)


@federation.command("watch")
def watch_federation(file: MemberFile, port: Port = 0, open_: Open = False) -> None:
    """Serve this member's page of its federation on 127.0.0.1; Ctrl-C ends it.

    It shows members and studies, what each study would send, and the curves of studies
    that run, and approves, declines or stops a study when a button is pressed.

    [bold]Example[/bold]

      coterie federation watch node.toml --open
    """
    membership = _open_membership(file)
    from coterie.net.federation_page import FederationPage

    with FederationPage(membership, port=port) as page:
        show_page(page, str(show_path(file)), open_=open_)


def propose_study(
    study: Annotated[Path, typer.Argument(metavar="STUDY.toml", help="The study file.")],
    node: Node = _NODE,
    data: Annotated[
        str, typer.Option(help="The role of the data; by default what the study's data say.")
    ] = "",
    members: Annotated[
        str, typer.Option(help="Who may take part, with commas between; all by default.")
    ] = "",
    quorum: Annotated[
        int, typer.Option(min=0, help="How many must approve and be there; 0 for all.")
    ] = 0,
    server: Annotated[str, typer.Option(help="The member in the server role.")] = "",
    method: Annotated[str, typer.Option(help="Which method, if it has several.")] = "",
    seed: Annotated[int | None, typer.Option(min=0, help="Which seed.")] = None,
) -> None:
    """Propose a study to the members of the federation, signed by this member.

    What this member's own data of the role look like is what the study expects of the
    others' data. It begins when its quorum has approved it, and is there.

    [bold]Examples[/bold]

      coterie propose study.toml
      coterie propose study.toml --data heart --quorum 3
    """
    membership = _open_membership(node)
    from coterie.data.build import DataConfig
    from coterie.net import consent, nodefile
    from coterie.net.statements import Proposal
    from coterie.studies import config

    file = membership.file
    chosen, _, _ = nodefile.select_run(config.load_study(str(study)), method, seed)
    role = data or (chosen.data.dataset if isinstance(chosen.data.dataset, str) else "")
    file.find_source(role)
    roster = membership.keeper.roster
    names = [name.strip() for name in members.split(",")] if members else []
    names = names or [member.name for member in roster.members]
    for name in names:
        roster.member(name)
    if membership.own.name not in names:
        raise ConfigError(f"--members lacks {membership.own.name}, which proposes the study")
    plan = nodefile.make_run_spec(chosen)
    if plan.method.server and not server:
        raise ConfigError(f"{plan.method.kind} needs a server: --server {names[0]}")
    own_file = file.make_node_file(chosen.name, role, server=False, quorum=quorum or len(names))
    number = names.index(membership.own.name)
    rows = nodefile.load_own_rows(own_file, chosen, (number,), len(names))
    # Of its data the study says the role alone: what is in them, each member knows of its own.
    sent = replace(chosen, data=DataConfig(role))
    proposal = Proposal(
        federation=roster.run,
        organizer=membership.organizer,
        by=membership.own.name,
        time=round(time.time(), 3),
        name=chosen.name,
        study=config.format_study(sent),
        role=role,
        members=names,
        quorum=quorum or len(names),
        server=server if plan.method.server else "",
        **consent.describe_data(rows),
    )
    membership.propose(proposal)
    typer.echo(f"{chosen.name} is proposed to {', '.join(names[:20])}: {_SENT}")


def list_studies(node: Path, name: str | None) -> None:
    """List the studies of a member, or describe one: what would leave the member."""
    membership = _open_membership(node)
    from coterie.net.decisions import Decisions

    state = membership.load_state()
    entries = membership.ledger.entries
    if name is not None:
        entries = {name: membership.ledger.find(name)}
    if not entries:
        typer.echo("no study was proposed yet")
    for title, entry in entries.items():
        word, text = membership.describe(entry, state)
        typer.echo(f"{title}: {word}, proposed by {entry.proposal.by}; {text}")
    if name is not None:
        for line in Decisions(membership, entries[name]).describe():
            typer.echo(f"  {line}")


def approve_study(
    name: Name,
    node: Node = _NODE,
    code: Annotated[
        bool,
        typer.Option(
            "--code",
            help="Approve also what the study loads from this machine, such as a model by import "
            "path.",
            show_default=False,
        ),
    ] = False,
) -> None:
    """Approve a study for this member, after its data were checked; say what will leave it.

    [bold]Example[/bold]

      coterie approve hearts
    """
    for line in _open(name, node).approve(loads_code=code):
        typer.echo(line)
    typer.echo(f"{name} is approved: {_SENT}")


def decline_study(name: Name, node: Node = _NODE) -> None:
    """Decline a study for this member.

    [bold]Example[/bold]

      coterie decline hearts
    """
    _open(name, node).decline()
    typer.echo(f"{name} is declined: {_SENT}")


def withdraw_study(name: Name, node: Node = _NODE) -> None:
    """Withdraw a study that this member has proposed; it ends at all members.

    [bold]Example[/bold]

      coterie withdraw hearts
    """
    _open(name, node).withdraw()
    typer.echo(f"{name} is withdrawn: {_SENT}")


def stop_study(name: Name, node: Node = _NODE) -> None:
    """Stop a study for this member, now and for good; the others go on while enough are left.

    [bold]Example[/bold]

      coterie stop hearts
    """
    decisions = _open(name, node)
    decisions.stop()
    typer.echo(f"{name} is stopped for {decisions.own}: {_SENT}")


def _open(name: str, node: Path) -> "Decisions":
    """Return what this member may say about a study that was proposed."""
    membership = _open_membership(node)
    from coterie.net.decisions import Decisions

    return Decisions(membership, membership.ledger.find(name))


def _open_membership(node: Path) -> "Membership":
    _net.check_packages()
    from coterie.net import servicefile
    from coterie.net.service import Membership

    return Membership.open(servicefile.load(node))
