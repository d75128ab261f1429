"""A node as a process: everything from node.toml to the exit status."""

import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from coterie._util import manifest
from coterie._util.claims import claim_folder
from coterie.data.federation import Federation
from coterie.errors import ConfigError, DiskFull, TransportError
from coterie.net import latecomers, nodefile
from coterie.net import roster as rosters
from coterie.net.audit import Audit
from coterie.net.identity import Identity, encode_public_key
from coterie.net.keeper import Keeper
from coterie.net.log import Log, MetricsServer
from coterie.net.node import Node
from coterie.net.nodefile import NodeFile
from coterie.net.roster import Roster
from coterie.net.status import NetworkStatus
from coterie.net.transport import Transport
from coterie.results import stored_runs, summary
from coterie.runtime import checkpoint
from coterie.studies import config
from coterie.studies.config import StudyConfig
from coterie.studies.describe import describe_federation

ALONE = 3
"""The exit status of a run that is over, of which some rounds were done without any message."""
_GIVEN_UP = (
    "running without TLS on loopback: every program on this machine can read and answer messages "
    "under any name; "
    "only the signatures of models are checked"
)


def load_credentials(
    file: NodeFile, log: Callable[..., None] = lambda *_, **__: None
) -> tuple[Keeper, Identity]:
    """Read the newest roster and this member's identity, and check that they belong together.

    Args:
        file: node.toml.
        log: receives events.

    Raises:
        TransportError: when they do not, or a file cannot be used.
    """
    own = file.load_identity()
    keeper = Keeper(
        file.resolve_path(file.roster),
        file.resolve_path(file.organizer),
        file.resolve_path(file.runs) / own.name,
        log,
    )
    roster = keeper.roster
    problems = rosters.check_own(roster, own)
    if problems:
        raise TransportError(problems[0])
    if (roster.server == own.name) != (file.role == "server"):
        expected = "server" if roster.server == own.name else "peer"
        raise ConfigError(
            f"role is {file.role!r}; the roster makes {own.name} a {expected}: coterie node --role "
            f"{expected}"
        )
    return keeper, own


def run_folder(file: NodeFile, name: str) -> Path:
    """Return the folder of a node's run: as in a simulation, under the node's name."""
    return locate_run(file.resolve_path(file.runs) / name, file.select_run()[0])


def locate_run(folder: Path, study: StudyConfig) -> Path:
    """Return the folder of a study's one run, in a folder of runs."""
    return folder / study.name / study.methods[0].label / f"seed-{study.seeds[0]}"


def open_transport(
    file: NodeFile, roster: Roster, own: Identity, *, insecure: bool, log: Callable[..., None]
) -> Transport:
    """Open the transport of a node: the one place that knows which network library is used.

    Args:
        file: node.toml.
        roster: the members.
        own: this member's identity.
        insecure: without TLS, on loopback only.
        log: receives events.
    """
    from coterie.net.grpc_transport import GrpcTransport

    return GrpcTransport(
        roster,
        own.name,
        None if insecure else own,
        listen=file.listen or None,
        lease=file.network.lease,
        proxy=file.network.proxy,
        log=log,
    )


@contextmanager
def open_node(file: NodeFile, *, insecure: bool = False) -> Iterator[Node]:
    """Create a node from a file, ready to run, and close all its parts at the end.

    What happens to it is written to the audit log in the member's folder, which outlives the run's
    own.

    Args:
        file: node.toml.
        insecure: without TLS, on loopback only.
    """
    study, _, _ = file.select_run()
    # The name is in the certificate, which is not read yet.
    log = Log("", level=file.log)
    keeper, own = load_credentials(file, log)
    log.node = own.name

    def open_links() -> Transport:
        return open_transport(file, keeper.roster, own, insecure=insecure, log=log)

    with host_node(file, study, keeper, own, log, open_links, insecure=insecure) as node:
        yield node


@contextmanager
def host_node(
    file: NodeFile,
    study: StudyConfig,
    keeper: Keeper,
    own: Identity,
    log: Log,
    open_links: Callable[[], Transport],
    *,
    check_rows: Callable[[Federation], None] = lambda rows: None,
    insecure: bool = False,
) -> Iterator[Node]:
    """Create a node of one run, ready to run, and close all its parts at the end.

    Args:
        file: node.toml; its study and roster are not read.
        study: a study of one run.
        keeper: the roster of the run.
        own: this member's identity.
        log: receives events; from here on they are also written to the audit log.
        open_links: opens the transport, which is closed at the end.
        check_rows: raises when this node's rows are not such as they have to be.
        insecure: whether it has no TLS, which is logged.
    """
    roster = keeper.roster
    clients = roster.member(own.name).clients
    federation = nodefile.load_own_rows(file, study, clients, roster.population)
    check_rows(federation)
    own_folder = file.resolve_path(file.runs) / own.name
    folder = locate_run(own_folder, study)
    with ExitStack() as stack:
        # Two claims: the run's folder, and the member's own, whose audit log all its runs share.
        stack.enter_context(claim_folder(folder))
        stack.enter_context(claim_folder(own_folder))
        key = encode_public_key(own.key.public_key())
        audit = stack.enter_context(Audit(own_folder, own.name, roster.run, key, own.sign))
        status = NetworkStatus()

        def record(event: str, level: str, details: dict[str, Any]) -> None:
            audit.record_event(event, level, details)
            status.note_event(event, level, details)

        # From here on: what happens before has no folder to be written to.
        log.also = record
        if insecure:
            log("insecure", level="warning", text=_GIVEN_UP)
        with defer_signals():  # threads start here: who starts them must come to own them
            transport = stack.enter_context(open_links())
        # Asked before each answer: what cannot be written down is not sent.
        transport.outbox.permit = audit.record_answer
        node = Node(
            nodefile.make_run_spec(study), federation, roster, transport, own.sign, folder,
            terms=file.network.terms, patience=file.network.patience, log=log, keeper=keeper,
            audit=audit,
        )  # fmt: skip
        # The stack closes in reverse order: the node before its transport.
        stack.callback(node.close)
        # Once the stored run is known to be this study's: another's must keep its own file.
        _write_study_files(
            folder, config.format_study(study), json.dumps(describe_federation(federation))
        )
        stack.callback(status.close)
        status.follow(node)
        if file.metrics_port:
            stack.callback(
                MetricsServer(
                    file.metrics_port,
                    lambda: [*node.prometheus_samples(), *transport.prometheus_samples()],
                ).close
            )
        yield node


@contextmanager
def defer_signals() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM to the end of the block, which must be short."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals reach the main thread only
        return
    caught: list[int] = []
    handlers = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        handlers[number] = signal.signal(number, lambda number, frame: caught.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if caught:
            # One is enough: it ends the program.
            signal.raise_signal(caught[0])


def _write_study_files(folder: Path, study: str, described: str) -> None:
    """Write the files of a study that precede a run, for report, watch, compare and show."""
    manifest.replace_files(folder, {stored_runs.CONFIG: study.encode()})
    summary.write_study_files(
        folder.parent.parent, {stored_runs.CONFIG: study, stored_runs.FEDERATION: described}
    )


def run_node(path: Path, *, role: str | None = None, insecure: bool = False) -> int:
    """Run a node to its end.

    Args:
        path: node.toml.
        role: "peer" or "server" instead of the file's.
        insecure: go without TLS, on loopback only.

    Returns:
        The exit status: 0, or `ALONE`.
    """
    file = nodefile.load(path)
    if role is not None:
        file = replace(file, role=role)
    name = load_credentials(file)[1].name
    folder = run_folder(file, name)
    # A run that is over has nothing left to do, unless others join late and ask this node.
    over = checkpoint.is_finished(folder) and _is_stored_study(file, folder)
    if over and not _answers_newcomers(file, name):
        status = _find_status(folder)
        marked = ", some of its rounds without any message of another member" if status else ""
        Log(name, level=file.log)(
            "done", text=f"the run in {folder} is over{marked}; delete the folder to run it again"
        )
        return status
    # Before anything is opened: a service manager may stop a node that is starting.
    signal.signal(signal.SIGTERM, exit_on_signal)
    try:
        with open_node(file, insecure=insecure) as node:
            node.run()
        summary.write_summary(folder.parent.parent)
    # The latter is what SIGTERM raises, see `exit_on_signal`.
    except (KeyboardInterrupt, SystemExit):
        Log(name, level=file.log)(
            "stopped",
            level="warning",
            text="stopped by a signal; when started again, it continues from here",
        )
        raise
    except Exception as error:
        if DiskFull.matches(error):
            Log(name, level=file.log)(
                "disk_full", level="error",
                text=f"{error}; nothing is lost: when started again with more room, it continues "
                "from its checkpoint",
            )  # fmt: skip
        raise
    return _find_status(folder)


def _is_stored_study(file: NodeFile, folder: Path) -> bool:
    """Whether a stored run is one of the study as it is now, in all that members agree on.

    If it is not, the run goes on, where it has become longer, or is refused with what it is.
    """
    path = folder / stored_runs.CONFIG
    try:
        stored = config.parse_study_text(path.read_text("utf-8"), str(path))
    except (OSError, ConfigError):  # damaged, or of another version: it says nothing
        return True
    one, other = map(nodefile.make_run_spec, (stored, file.select_run()[0]))
    # Of how many clients is the same for both, and not known here.
    return one.common_settings(1) == other.common_settings(1)


def _find_status(folder: Path) -> int:
    """Return the exit status of a run by what is stored of it."""
    path = folder / checkpoint.PROVENANCE
    marked = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return ALONE if marked.get("alone") else 0


def _answers_newcomers(file: NodeFile, name: str) -> bool:
    """Whether members that join late ask this one when its run is over."""
    plan = nodefile.make_run_spec(file.select_run()[0])
    sides = latecomers.find_participants(
        load_credentials(file)[0].roster, plan.method, plan.settings, plan.seed
    )
    return sides is not None and sides.answers_newcomers(name)


def exit_on_signal(number: int, frame: FrameType | None) -> None:
    """Exit cleanly on SIGTERM: close the session; the last round's checkpoint is on disk."""
    # The convention of shells for a program that a signal ended.
    sys.exit(128 + number)
