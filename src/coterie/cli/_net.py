"""The commands for nodes on real machines: `coterie net ...`, `node`, `doctor`, `up`."""

import importlib.util
import json
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from coterie._util import extras
from coterie._util.files import check_folder, prepare_folder, show_path
from coterie._util.mappings import drop_empty
from coterie.cli import _cluster
from coterie.errors import ConfigError, TransportError

net = typer.Typer(
    no_args_is_help=True,
    help="Set up a run between machines: authority, members, roster; or run a demonstration.",
)
Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="The organizer's folder.")]
NodeFile = Annotated[Path, typer.Argument(metavar="NODE.toml", help="The node file.")]
Request = Annotated[Path, typer.Argument(help="The member's request, NAME.csr.")]
Address = Annotated[
    str,
    typer.Argument(
        help="host:port as agreed with the member, whose request must name this host; or "
        '"outbound".'
    ),
]
Days = Annotated[float, typer.Option(help="How long the certificate is valid.")]
AuthorityDays = Annotated[float, typer.Option(help="How long the authority is valid.")]
Relay = Annotated[
    bool, typer.Option("--relay", help="It is a relay, and no member.", show_default=False)
]
# Not 2, which is a mistake in the command.
_OPEN = 3  # the exit status when logs cannot settle something
SEND = "send it and roster.toml.sig to all members; running nodes adopt it within a round"
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure-loopback",
        help="Use no TLS, on 127.0.0.1 only; for debugging.",
        show_default=False,
    ),
]


def add_commands(app: typer.Typer) -> None:
    """Add these commands to the program's."""
    app.add_typer(net, name="net")
    app.command("node")(run_node)
    app.command("relay")(run_relay)
    app.command("doctor")(run_doctor)
    app.command("up")(start_nodes)


def check_packages() -> None:
    # Found without an import, which takes seconds.
    for package in ("cryptography", "grpc"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"{package} is not installed; real peers need it: {extras.install_command('net')}"
            )


@net.command("init")
def create_authority(
    folder: Folder,
    run: Annotated[str, typer.Option(help="The run's id: a-z, 0-9 and -.")],
    members: Annotated[
        list[str] | None,
        typer.Option(
            "--member",
            metavar="NAME=HOST:PORT",
            help="Also create this member's key here; for tests.",
        ),
    ] = None,
    days: AuthorityDays = 365.0,
) -> None:
    """Create the organizer's key and a private certificate authority for one run.

    [bold]Example[/bold]

      coterie net init organizer --run three-hospitals
    """
    check_packages()
    from coterie.net import identity, setup

    check_folder(folder)
    identity.make_authority(folder, run, days=days)
    for text in members or ():
        # NAME=HOST:PORT; the address itself has no "=".
        name, _, address = text.partition("=")
        request = identity.make_request(folder, name, address)
        # By the two steps that organizer and member take, so that the files are the same.
        identity.sign_request(folder, request, name, address, days=min(days, 30.0))
        setup.add_member(folder, name, address)
    typer.echo(
        f"{show_path(folder)}: ca.key and organizer.key stay here; give every member ca.pem and "
        "organizer.pub"
    )


@net.command("join")
def create_member_key(
    name: Annotated[str, typer.Argument(help="This member's name: a-z, 0-9 and -.")],
    address: Annotated[
        str,
        typer.Argument(
            help='host:port at which the other members reach it; "outbound" when it accepts no '
            "connection and only dials out."
        ),
    ],
    folder: Annotated[Path, typer.Option(help="Folder for the key and the request.")] = Path("."),
) -> None:
    """Create a member's key on its own machine, and the request for the organizer.

    The key stays on that machine; the request goes to the organizer. A relay does the
    same.

    [bold]Examples[/bold]

      coterie net join north 192.0.2.7:7447
      coterie net join south outbound
    """
    check_packages()
    from coterie.net import identity

    check_folder(folder)
    request = identity.make_request(folder, name, address)
    typer.echo(
        f"{show_path(folder / (name + '.key'))} stays on this machine; send {show_path(request)} "
        "to the organizer"
    )


@net.command("sign")
def sign_member(
    folder: Folder,
    request: Request,
    address: Address,
    name: Annotated[
        str,
        typer.Option(
            help="The name as agreed with the member; the request must have it. Prompted for if "
            "missing."
        ),
    ] = "",
    days: Days = 30.0,
    relay: Relay = False,
) -> None:
    """Sign a member's request: write its certificate.

    [bold]Examples[/bold]

      coterie net sign organizer north.csr 192.0.2.7:7447 --name north
      coterie net sign organizer south.csr outbound --name south
      coterie net sign organizer relay.csr 192.0.2.9:443 --name relay --relay
    """
    check_packages()
    from coterie.net import identity, setup

    # In a script nobody answers a prompt.
    if not name and not sys.stdin.isatty():
        raise ConfigError(
            f"say which member's request {show_path(request)} is, as agreed with it: --name NAME"
        )
    name = name or typer.prompt("The member's name, as agreed with it")
    # Before the certificate is written: a removed member's name is never used again.
    setup.check_member(folder, name, address, relay=relay)
    if relay:
        identity.split_address(address)  # it is dialed
    certificate = identity.sign_request(folder, request, name, address, days=days)
    record = setup.add_relay if relay else setup.add_member
    # Last: a request that was refused leaves no entry in the roster.
    record(folder, name, address)
    typer.echo(
        f"send {show_path(folder / 'members' / (name + '.pem'))} to {name}; fingerprint "
        f"{identity.fingerprint(certificate)}"
    )


@net.command("remove")
def remove_member(
    folder: Folder, name: Annotated[str, typer.Argument(help="The member to remove.")]
) -> None:
    """Remove a member: write and sign the next version of the roster without it.

    Running nodes adopt it within a round after they receive the files, or from a
    member that has them. The removed member's client keeps its number, which no
    other member gets.

    [bold]Example[/bold]

      coterie net remove organizer north
    """
    check_packages()
    from coterie.net import setup

    made = setup.remove_member(folder, name)
    typer.echo(
        f"{show_path(folder / 'roster.toml')}, version {made.version}, is without {name}: {SEND}"
    )


@net.command("rekey")
def rekey_member(
    folder: Folder,
    name: Annotated[str, typer.Argument(help="The member.")],
    request: Annotated[Path, typer.Argument(help="The request for its new key, NAME.csr.")],
    address: Annotated[
        str,
        typer.Option(
            help="Its new address, host:port, if it has one; the request must name this host."
        ),
    ] = "",
    days: Days = 30.0,
) -> None:
    """Give a member a new key: sign its request and the next version of the roster.

    Every node that has the new roster refuses the old key and its certificate.
    The member itself starts its node again with the new key.

    [bold]Examples[/bold]

      coterie net rekey organizer north north.csr
      coterie net rekey organizer north north.csr --address new.north.org:7447
    """
    check_packages()
    from coterie.net import setup

    made = setup.rekey_member(folder, name, request, address=address, days=days)
    typer.echo(f"send {show_path(folder / 'members' / (name + '.pem'))} to {name}")
    typer.echo(
        f"{show_path(folder / 'roster.toml')}, version {made.version}, has its new key: {SEND}"
    )


@net.command("move")
def move_member(
    folder: Folder,
    name: Annotated[str, typer.Argument(help="The member.")],
    address: Annotated[str, typer.Argument(help="Its new address, host:port.")],
) -> None:
    """Give a member another address: sign the next version of the roster.

    Its key and certificate stay valid. Running nodes dial the new address
    from their next round on; the member itself starts its node there.

    [bold]Example[/bold]

      coterie net move organizer north 192.0.2.9:7447
    """
    check_packages()
    from coterie.net import setup

    made = setup.move_member(folder, name, address)
    typer.echo(
        f"{show_path(folder / 'roster.toml')}, version {made.version}, has {name} at "
        f"{made.member(name).address}: {SEND}"
    )


@net.command("rehearse")
def rehearse_links(
    file: NodeFile,
    wait: Annotated[
        float, typer.Option(help="Seconds to wait for the other members.", min=1)
    ] = 300.0,
    insecure: Insecure = False,
) -> None:
    """Try the links to and from the other members, who run this at the same time.

    Opens this node's port, answers as a counterpart, asks every member how it is and
    for a megabyte, and says what gets through in each direction and why not. Ends
    when everything has; trains nothing. The exit status is 1 when something did not.

    [bold]Example[/bold]

      coterie net rehearse node.toml
    """
    check_packages()
    from coterie.net import nodefile, rehearsal

    if not rehearsal.rehearse(nodefile.load(file), report_check, seconds=wait, insecure=insecure):
        raise typer.Exit(1)


@net.command("roster")
def write_roster(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER|ROSTER", help="The organizer's folder; with --check, a roster."
        ),
    ],
    study: Annotated[Path | None, typer.Option(help="The study file that all members run.")] = None,
    features: Annotated[str, typer.Option(help="Shape of one input, e.g. 1,8,8.")] = "",
    classes: Annotated[
        int | None, typer.Option(min=0, help="Number of classes; 0 for regression.")
    ] = None,
    server: Annotated[
        str, typer.Option(help="The member in the server role, for methods that need one.")
    ] = "",
    check: Annotated[
        bool, typer.Option("--check", help="Check a roster and list its problems.")
    ] = False,
    organizer: Annotated[
        Path, typer.Option(help="The organizer's public key, with --check.")
    ] = Path("organizer.pub"),
    node_file: Annotated[
        Path | None, typer.Option("--node", help="With --check: also check this node.toml.")
    ] = None,
) -> None:
    """Write and sign the roster of all members with a certificate, or check one.

    Client ids follow the order in which members were signed.

    [bold]Examples[/bold]

      coterie net roster organizer --study a.toml --features 1,8,8 --classes 10
      coterie net roster roster.toml --check --node node.toml
    """
    check_packages()
    from coterie.net import setup

    if check:
        problems = setup.check_roster(folder, organizer, node_file)
        for problem in problems:
            typer.echo(problem)
        # Status 1, so that a script notices.
        if problems:
            raise typer.Exit(1)
        typer.echo("the roster is in order")
        return
    if study is None or classes is None or not features:
        raise ConfigError("a roster names its study; give --study, --features and --classes")
    made = setup.write_roster(folder, study, _parse_shape(features), classes, server)
    typer.echo(
        f"{show_path(folder / 'roster.toml')}, version {made.version}: send it and "
        "roster.toml.sig to "
        "all members"
    )


def _parse_shape(features: str) -> tuple[int, ...]:
    sizes = list(map(str.strip, features.split(",")))
    if not all(size.isdecimal() and int(size) for size in sizes):
        raise ConfigError(
            f"--features is {features!r}; expected the shape of one input, as 3,32,32"
        )
    return tuple(map(int, sizes))


@net.command("replay")
def replay_run(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="NODE.TOML...", help="The files of all members of a run."),
    ],
) -> None:
    """Repeat a run with pace = "free" from its journals and the data of all members.

    A node that waits for nobody writes down whose message of which round it read. On one
    machine that has the node files, data and runs of all members, their rounds are done
    again, and models and results are compared with the stored ones, to the byte.
    The exit status is 1 when something differs.

    [bold]Example[/bold]

      coterie net replay north/node.toml south/node.toml west/node.toml
    """
    check_packages()
    from coterie.net import replay

    plan, roster, members = replay.load_members(files)
    loops, differing = replay.replay(plan, roster, members), False
    for one in members:
        loop = loops[one.name]
        differs = replay.compare_with_stored(one, loop)
        differing |= bool(differs)
        text = "differs in " + ", ".join(differs) if differs else "equal to the byte"
        typer.echo(f"{one.name}: {max(0, loop.next_round)} rounds, {text}")
    if differing:
        raise typer.Exit(1)


@net.command("audit")
def audit_logs(
    logs: Annotated[
        list[Path],
        typer.Argument(
            metavar="FOLDER|FILE...", help="Folders with an audit.log, or files of a log."
        ),
    ],
    roster_: Annotated[
        list[Path] | None,
        typer.Option(
            "--roster", help="The organizer's roster, to check the keys in the logs. Repeatable."
        ),
    ] = None,
    organizer: Annotated[
        Path, typer.Option(help="The organizer's public key, with --roster.")
    ] = Path("organizer.pub"),
) -> None:
    """Check the audit logs of nodes, summarize them, and compare all pairs of one run.

    A node writes its log to `runs`/NAME. WRONG says that a log was changed, that two
    contradict each other, or that a member signed two messages for one address: the
    proof with both signatures follows as JSON. OPEN says what these logs cannot
    settle, such as messages after the end of a log that goes on. The exit status is
    1 when something is wrong, else 3 when something is open.

    [bold]Examples[/bold]

      coterie net audit runs/north
      coterie net audit north.log south.log --roster roster.toml
    """
    check_packages()
    from coterie.net import auditor
    from coterie.net import roster as rosters

    # Each roster's signature is checked when it is loaded.
    given = [rosters.load(path, organizer) for path in roster_ or ()]
    reports = [auditor.check_log(path, given) for path in logs]
    for report in reports:
        _print_audit(report)
    wrong, unsettled = _compare_logs(reports)
    # Over all logs together: each of two readers may have received another message.
    proofs = auditor.find_equivocations(reports, given)
    for proof in proofs:
        # Each reader once: one may have received both.
        readers = " and ".join(dict.fromkeys(node for *_, node in proof.found))
        _print_wrapped(
            f"WRONG  {proof.member} signed two messages for one address, which {readers} received. "
            "The proof, with both signatures:"
        )
        # In one line, as it was signed: JSON escapes what a terminal would interpret.
        typer.echo(json.dumps(proof.make_document()))
    overlapping = auditor.find_overlapping_starts(reports)
    for text in overlapping.values():
        _print_wrapped(f"OPEN   {text}")
    for member, number in auditor.count_changed_by_restarts(reports).items():
        # Said above already, and with its reason.
        if member in overlapping:
            continue
        _print_wrapped(
            f"note   {member} signed other messages for {number} addresses after a restart; from "
            "an older checkpoint an honest member does so, too"
        )
    # What is proved counts more than what is open.
    if wrong or proofs or any(report.problems for report in reports):
        raise typer.Exit(1)
    if unsettled or overlapping or any(report.unsettled for report in reports):
        # Not 1: for a script, what is proved is another thing than what is not known yet.
        raise typer.Exit(_OPEN)


def _compare_logs(reports: Sequence[Any]) -> tuple[int, int]:
    """Compare every pair of logs, print what is found, and count what is wrong and what is open."""
    from itertools import combinations

    from coterie.net import auditor

    wrong_in_all = open_in_all = 0
    for a, b in combinations(reports, 2):
        if a.run != b.run or a.node == b.node:
            _print_wrapped(
                f"{a.path} and {b.path} are not compared: they are not of two members of one run"
            )
            continue
        wrong, unsettled = auditor.compare_logs(a, b)
        wrong_in_all, open_in_all = wrong_in_all + len(wrong), open_in_all + len(unsettled)
        for word, texts in (("WRONG", wrong), ("OPEN ", unsettled)):
            for text in texts:
                _print_wrapped(f"{word}  {text}")
        if not wrong:
            lost = auditor.count_lost(a, b)
            rest = ""
            if lost:
                rest = f"; {lost} messages that one of them sent, the other did not receive"
            other = ", but for that," * bool(unsettled)
            _print_wrapped(
                f"ok     {a.node} and {b.node} agree{other} on what they sent each other{rest}"
            )
    return wrong_in_all, open_in_all


def _print_audit(report: Any) -> None:
    """Print the findings in a log."""
    from datetime import UTC, datetime

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    def format_time(seconds: float) -> str:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")

    def format_amount(of: Mapping[Any, Any], size: int) -> str:
        if not of:
            return "0"
        unit, by = "B", 1.0
        for larger, factor in (("kB", 1e3), ("MB", 1e6), ("GB", 1e9)):
            if size >= factor:
                unit, by = larger, factor
        return f"{len(of)} ({size / by:.3g} {unit})"

    def format_counts(found: Mapping[str, int]) -> str:
        return ", ".join(f"{times} {reason}" for reason, times in sorted(found.items())) or "0"

    _print_wrapped(f"{report.node or '?'} in run {report.run or '?'}: {report.path}")
    _print_wrapped(
        f"{report.lines} lines, {format_time(report.first)} to {format_time(report.last)} UTC; "
        f"{report.heads} signatures",
        "  ",
    )
    # Files are put aside at 64 MB: a log that was given may begin with a later one.
    if report.begins:
        _print_wrapped(
            f"begins with line {report.begins} of its chain; earlier lines are not here", "  "
        )
    rest = f", {report.unended} after an end that is not in the log" if report.unended else ""
    rest += f"; torn lines, removed and noted: {report.repaired}" if report.repaired else ""
    _print_wrapped(f"starts: {report.starts}{rest}", "  ")
    # Without the organizer's roster a log says itself which keys are its members'.
    trust = "keys are not verified: see --roster"
    if report.confirmed:
        known = ", ".join(map(str, sorted(report.confirmed)))
        trust = f"keys are those of the organizer's version {known}"
    versions = ", ".join(map(str, report.rosters))
    _print_wrapped(f"versions of the roster: {versions or 'none'}; {trust}", "  ")
    _print_wrapped(f"met: {', '.join(sorted(report.members)) or 'nobody'}", "  ")
    _print_wrapped(f"last line: {report.head[0]}, {report.head[1]}", "  ")
    table = Table(box=None, pad_edge=False, header_style="dim")
    for head in ("  member", "sent", "received", "declined", "missing", "refused"):
        # Folded, not cut: names and counts are what the table is for.
        table.add_column(head, overflow="fold")
    for name, of in sorted(report.traffic.items()):
        row = (
            f"  {name or 'unknown'}",
            format_amount(of.sent, of.sent_bytes),
            format_amount(of.received, of.received_bytes),
            format_counts(of.declined),
            format_counts(of.missing),
            format_counts(of.refused),
        )
        # Plain text: words of a log are no markup.
        table.add_row(*map(Text, row))
    if report.traffic:
        # As wide as the other lines (`_print_wrapped`), whatever the terminal.
        Console(width=80, highlight=False).print(table)
    if report.problems:
        more = f" (and {len(report.problems) - 1} more)" if len(report.problems) > 1 else ""
        _print_wrapped(f"WRONG  {report.problems[0]}{more}")
    elif report.unsettled:
        _print_wrapped(f"OPEN   {report.unsettled[0]}")
    else:
        rest = f"; not signed yet: the last {report.unsigned}" if report.unsigned else ""
        _print_wrapped(f"ok     the chain is whole, and signed by {report.node}{rest}")


def _print_wrapped(text: str, indent: str = "") -> None:
    """Print a text in lines of at most 80 columns, unless one of its words is longer."""
    # As wide as "WRONG  ", so that texts stand below each other.
    later = indent + "       "
    typer.echo(
        textwrap.fill(
            text,
            80,
            initial_indent=indent,
            subsequent_indent=later,
            break_long_words=False,
            break_on_hyphens=False,
        )
    )


@net.command("demo")
def run_demo(
    clients: Annotated[int, typer.Option(min=3, max=20, help="The number of nodes.")] = 8,
    rounds: Annotated[int, typer.Option(min=4, help="The number of rounds.")] = 12,
    port: Annotated[int, typer.Option(help="The first port on 127.0.0.1.")] = 21700,
    folder: Annotated[
        Path | None, typer.Option(help="Folder of the runs; a temporary one by default.")
    ] = None,
) -> None:
    """Run nodes on this machine, kill one, and compare with the simulation.

    The nodes use mutual TLS.

    [bold]Example[/bold]

      coterie net demo
    """
    check_packages()
    from rich.console import Console

    from coterie.cli import _display
    from coterie.net import fleet
    from coterie.studies.run import load_study_results

    place = folder or Path(tempfile.mkdtemp(prefix="coterie-demo-"))
    # Nothing of another run may be mixed with this one's results.
    if place.is_dir() and any(place.iterdir()):
        raise ConfigError(f"{show_path(place)} is not empty; choose another folder")
    prepare_folder(place)
    top = fleet.run_demo(
        place,
        clients=clients,
        rounds=rounds,
        port=port,
        # Standard output is for the results.
        say=lambda text: typer.echo(text, err=True),
    )
    _display.print_results(load_study_results(top), Console())
    typer.echo(f"Runs: {show_path(top)}")


def run_node(
    file: NodeFile,
    role: Annotated[
        str | None, typer.Option(help="The role: server, on the member that has it.")
    ] = None,
    insecure: Insecure = False,
) -> None:
    """Run one member's node; a stopped node continues from its checkpoint.

    [bold]Example[/bold]

      coterie node node.toml
    """
    check_packages()
    from coterie.net import process

    if role not in (None, "peer", "server"):
        raise ConfigError(f"--role is {role!r}; expected peer or server")
    # The status of the node is that of the command: a service manager decides by it.
    raise typer.Exit(process.run_node(file, role=role, insecure=insecure))


def run_relay(
    file: Annotated[Path, typer.Argument(metavar="RELAY.toml", help="The relay's file.")],
) -> None:
    """Run a relay, by which members reach the ones that only dial out.

    It needs a certificate of the run, is no member, and reads nothing that passes.

    [bold]Example[/bold]

      coterie relay relay.toml
    """
    check_packages()
    from coterie.net import relay

    relay.run_relay(file)


def run_doctor(
    file: Annotated[
        Path | None, typer.Argument(metavar="[NODE.toml]", help="The node file.")
    ] = None,
    insecure: Insecure = False,
    model: Annotated[
        str | None,
        typer.Option(help="Instead: a model, to show its engine; a name, or package.module:Net."),
    ] = None,
    features: Annotated[
        str, typer.Option(help="With --model: the shape of one input.")
    ] = "3,32,32",
    outputs: Annotated[int, typer.Option(help="With --model: the number of classes.", min=1)] = 10,
    batch_size: Annotated[int, typer.Option(help="With --model: samples per step.", min=1)] = 32,
    samples: Annotated[
        float, typer.Option(help="With --model: training samples in all rounds.", min=0)
    ] = 1e6,
    data: Annotated[
        str | None,
        typer.Option(
            help="With --model: check the translation on real samples: a stored federation "
            "(.safetensors), or a study for its data and settings."
        ),
    ] = None,
    on: Annotated[
        str | None, typer.Option(help="Instead: a cluster, to compare its machines: ray:auto, ...")
    ] = None,
) -> None:
    """Check a node before its run, an engine for a model, or a cluster.

    With a node file, check identity, roster, data, port, clocks and each member,
    and estimate the time of a round. With --model, show which engine trains a
    model on this machine, and what prevents a faster one; with --data too, compare
    what it trains with the module in plain PyTorch, as a run does at its start. With
    --on, compare all machines of a cluster, as `coterie run --on` does before its
    first run.

    [bold]Examples[/bold]

      coterie doctor node.toml
      coterie doctor --model cnn-b --features 1,28,28
      coterie doctor --model mypackage.nets:Net --features 6 --outputs 2
      coterie doctor --model mlp-bn --data rotated-digits
      coterie doctor --on ray:auto
    """
    if sum(one is not None for one in (file, model, on)) != 1:
        raise ConfigError(
            "doctor takes one of a node file, --model and --on; see `coterie doctor --help`"
        )
    if on is not None:
        raise typer.Exit(_cluster.check_cluster(on))
    if data is not None and model is None:
        raise ConfigError("--data is for a model; give --model, a name or package.module:Net")
    if model is not None and data is not None:
        _check_model(model, data)
        return
    if model is not None:
        typer.echo(f"{model}: {_describe_engine(model, features, outputs, batch_size, samples)}")
        return
    # One of three was given, and the other two have returned.
    assert file is not None
    check_packages()
    from coterie.net import doctor as examiner
    from coterie.net import nodefile

    if not examiner.check_node(nodefile.load(file), report_check, insecure=insecure):
        raise typer.Exit(1)


def report_check(text: str, good: bool) -> None:
    """Print the result of a check."""
    typer.echo(f"{'ok   ' if good else 'WRONG'}  {text}")


def _check_model(model: str, data: str) -> None:
    """Check what trains a model on real data, and print what was compared."""
    from coterie.data.build import build_federation
    from coterie.data.federation import Federation
    from coterie.methods.local import Local
    from coterie.rng import Rng
    from coterie.runtime.settings import Settings
    from coterie.runtime.task import make_task
    from coterie.runtime.translation import check_translation
    from coterie.studies.config import load_study

    if data.endswith(".safetensors"):
        federation, settings = Federation.load(data), Settings()
    else:
        study = load_study(data)
        # Of the first seed: the translation does not depend on how the data are drawn.
        federation, settings = build_federation(study.data, study.seeds[0]), study.settings
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the reason of the engine says the same
        # Training alone: what is compared here is the same under every method.
        task = make_task(federation, Local(), model, settings)
    typer.echo(f"{model}: {task.engine.reason}")
    found = check_translation(task, federation, settings.local, Rng(0))
    for name, value in found.compared.items():
        typer.echo(f"ok     {name}" + ("" if name == "random draws" else f": {value:.1g}"))
    for line in found.lines:
        typer.echo(f"note   {line}")


def _describe_engine(
    model: str, features: str, outputs: int, batch_size: int, samples: float
) -> str:
    """Describe which engine trains a model by default, and why."""
    import torch

    from coterie import engine
    from coterie.engine.options import Workload
    from coterie.models.layout import Layout, make_template, resolve_model

    shape = _parse_shape(features)
    layout = Layout(make_template(resolve_model(model, shape, outputs)))
    # Two samples: with one, layers that normalize by the batch cannot train.
    x, y = torch.zeros(2, *shape), torch.zeros(2, dtype=torch.int64)
    work = Workload(train_samples=samples, batch_size=batch_size)
    with warnings.catch_warnings():
        # A fallback to a slower engine warns; `doctor` prints the reason itself.
        warnings.simplefilter("ignore")
        found = engine.make_engine("auto", layout, engine.cross_entropy, x, y, work)
    return found.reason


def start_nodes(
    roster_file: Annotated[Path, typer.Argument(metavar="ROSTER.toml", help="The signed roster.")],
    nodes: Annotated[
        Path | None,
        typer.Option(help="Folder with NAME.toml of each member; by default the roster's."),
    ] = None,
    logs: Annotated[
        Path | None, typer.Option(help="Folder for logs; by default they go to standard error.")
    ] = None,
) -> None:
    """Start the nodes of all members with a node file on this machine, and wait.

    [bold]Example[/bold]

      coterie up roster.toml --nodes nodes
    """
    check_packages()
    from coterie.net import fleet
    from coterie.net import roster as rosters

    where = nodes or roster_file.parent
    files, expected = {}, []
    for member in rosters.loads(roster_file.read_text(encoding="utf-8")).members:
        file = where / f"{member.name}.toml"
        expected.append(file.name)
        # Members on other machines have no node file here.
        if file.exists():
            files[member.name] = file
    if not files:
        raise ConfigError(
            f"no NAME.toml of a member in {where}; expected one of {', '.join(expected[:3])}; or "
            "give their folder: --nodes FOLDER"
        )
    if logs is not None:
        prepare_folder(logs)
    with fleet.Fleet(files, logs=logs) as running:
        for name in files:
            running.start(name)
        # As long as the runs take, which nobody here knows.
        statuses = running.wait(float("inf"))
    # A status of 0 is success, as of any process.
    bad = drop_empty(statuses)
    # The logs of the nodes have the errors themselves.
    if bad:
        raise TransportError(f"some nodes failed: {bad}")
    place = f"; their logs are in {show_path(logs)}" if logs else ""
    typer.echo(f"{len(files)} nodes finished: {', '.join(files)}{place}")
