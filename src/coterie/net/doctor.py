"""Doctor: check a node before its run, and estimate the time of its rounds."""

import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

from coterie._util.mappings import select_prefix
from coterie.data.federation import Federation
from coterie.data.schema import TableSchema
from coterie.engine import device as devices
from coterie.errors import CoterieError
from coterie.net import head as heads
from coterie.net import identity as identities
from coterie.net import nodefile, process
from coterie.net import roster as rosters
from coterie.net.head import Head
from coterie.net.identity import Identity
from coterie.net.keeper import Keeper
from coterie.net.log import Log
from coterie.net.node import Node, RunSpec
from coterie.net.nodefile import NodeFile
from coterie.net.payload import escape_text
from coterie.net.post import Post
from coterie.net.processfile import ProcessFile
from coterie.net.proxy import ProxyRefusedError, connect, find_proxy
from coterie.net.roster import Member, Roster
from coterie.net.transport import Delivery
from coterie.rng import Rng

_LOOK = 5.0  # seconds for links to come up
_CONNECT = 3.0  # seconds for a connection, to say why a member does not answer
# The search for what a roster was written for: its seconds, and numbers of columns below this.
_SEARCH, _NEAR = 10.0, 1025
_SKEW = 30.0  # seconds of clock skew that matter: certificates have five minutes to spare
Say = Callable[[str, bool], None]


@dataclass
class CheckReport:
    """Passes the results of checks on, and notes whether all have passed.

    Args:
        say: called with each result: a sentence, and whether the check passed.
        fine: whether all have passed so far.
    """

    say: Say
    fine: bool = True

    def __call__(self, text: str, good: bool = True) -> None:
        """Pass a result on."""
        self.fine &= good
        self.say(text, good)


@dataclass(frozen=True)
class LoadedNode:
    """What is known of a node whose own files are in order.

    Args:
        file: node.toml.
        own: its identity.
        roster: its roster.
        plan: the part of the run that is equal on all nodes.
        federation: its own data.
    """

    file: NodeFile
    own: Identity
    roster: Roster
    plan: RunSpec
    federation: Federation


def check_node(file: NodeFile, say: Say, *, insecure: bool = False) -> bool:
    """Check everything that can be checked before a run.

    Args:
        file: node.toml.
        say: called with each result: a sentence, and whether the check passed.
        insecure: without TLS, on loopback only.

    Returns:
        Whether all checks passed.
    """
    report = CheckReport(say)
    loaded = check_files(file, report)
    if loaded is None:
        return False
    plan = loaded.plan
    try:
        devices.check_device(plan.settings.device)
    except CoterieError as error:
        report(str(error), False)
        return False
    report(f"trains on {plan.settings.device}; {devices.describe_devices()}")
    if check_port(loaded, report):
        with open_visitor(loaded, insecure=insecure) as node:
            for sentence, good in _check_others(node, file.network.proxy):
                report(sentence, good)
    return report.fine


def check_files(file: NodeFile, report: Callable[..., None]) -> LoadedNode | None:
    """Check identity, roster, study and data; None where the rest cannot be checked.

    Args:
        file: node.toml.
        report: called with each result: a sentence, and whether the check passed.
    """
    try:
        own = file.load_identity()
        report_identity(own, report)
        roster = load_newest(file, file.resolve_path(file.runs) / own.name, report)
        problems = rosters.list_problems(roster, own=own)
        for problem in problems:
            report(problem, False)
        if not problems:
            report(
                f"roster of {roster.run}, version {roster.version}: signed, {len(roster.members)} "
                "members"
            )
        for name, (days, due) in rosters.find_ends(roster, datetime.now(UTC)).items():
            # A member whose certificate is a problem already is not named twice.
            if due is not None and not any(name in problem for problem in problems):
                report(f"the certificate of {name} ends in {days:.0f} days; it needs a new one")
        study, label, seed = file.select_run()
        plan = nodefile.make_run_spec(study)
        federation = nodefile.load_own_rows(
            file, study, roster.member(own.name).clients, roster.population
        )
        training = federation.count_samples("train").tolist()
        validation = federation.count_samples("validation").tolist()
        report(f"data: {training} training and {validation} validation samples")
    except CoterieError as error:
        report(str(error), False)
        return None
    agreed = plan.common_settings(roster.population)
    # A roster that names no study is a problem that `check_file` has reported.
    same = roster.study in ("", heads.study_hash(agreed))
    text = "is" if same else "is not"
    report(f"study: {label} with seed {seed} {text} what the roster says", same)
    return LoadedNode(file, own, roster, plan, federation)


def load_newest(file: ProcessFile, folder: Path, report: Callable[..., None]) -> Roster:
    """Return the roster by which a member runs: that of its file, or a newer one that it has kept.

    Args:
        file: node.toml.
        folder: where it keeps the newest roster.
        report: called with a sentence where the file has an older one.

    Raises:
        TransportError: when there is none that the organizer signed.
    """
    path, organizer = file.resolve_path(file.roster), file.resolve_path(file.organizer)
    roster, first = Keeper(path, organizer, folder).roster, rosters.load(path, organizer)
    if roster.version != first.version:
        report(
            f"{path} has version {first.version} of the roster; this member has got version "
            f"{roster.version} from another one, which counts"
        )
    return roster


def report_identity(own: Identity, report: Callable[..., None]) -> None:
    """Say of a member that its files belong together, and how long its certificate is valid."""
    left = own.certificate.not_valid_after_utc - datetime.now(UTC)
    report(
        f"{own.name}: key and certificate belong together; valid for {left.days} days",
        # Two days, as for the certificates of the others in `roster.check_file`.
        left.days >= 2,
    )


def check_port(loaded: LoadedNode, report: Callable[..., None]) -> bool:
    """Check that this node can listen at its address, if it has one."""
    if loaded.roster.member(loaded.own.name).is_outbound:
        relays = ", ".join(relay.name for relay in loaded.roster.relays) or "no relay"
        report(f"only dials out: no port is opened; on the roster: {relays}")
        return True
    address = loaded.file.listen or loaded.roster.member(loaded.own.name).address
    obstacle = identities.find_obstacle(*identities.split_address(address))
    report(f"{address} {obstacle or 'is free'}", not obstacle)
    return not obstacle


@contextmanager
def open_visitor(loaded: LoadedNode, *, insecure: bool = False) -> Iterator[Node]:
    """Open a node that asks the others without taking part.

    Args:
        loaded: whose node it is.
        insecure: without TLS, on loopback only.
    """
    file, own, roster = loaded.file, loaded.own, loaded.roster
    log = Log(own.name, level="error")
    with (
        tempfile.TemporaryDirectory() as folder,
        process.open_transport(file, roster, own, insecure=insecure, log=log) as transport,
    ):
        # A visitor measures only, so it need not wait as long as a round does.
        terms = replace(file.network.terms, deadline=10.0)
        node = Node(
            loaded.plan, loaded.federation, roster, transport, own.sign, Path(folder),
            terms=terms, log=log,
        )  # fmt: skip
        try:
            yield node
        finally:
            node.close()


def _check_others(node: Node, proxy: str = "") -> Iterator[tuple[str, bool]]:
    """Results for each other member, for the model, and for a round."""
    roster, rates = node.roster, []
    heads_found = node.look_around(_LOOK)
    for relay in roster.relays:
        yield check_relay(relay, proxy)
    for name in node.other_members:
        at = str(roster.member(name))
        if name not in heads_found:
            yield f"{at}: no answer ({explain_silence(roster.member(name), proxy)})", False
            continue
        before = time.time()
        # A new head, since that of `look_around` may be seconds old, which would count as skew.
        head = node.ask_heads([name]).get(name, heads_found[name])
        # The other clock was read between the question and the answer: the middle is the best
        # guess.
        skew = head.time - (before + time.time()) / 2
        rate = measure_rate(node.post, name)
        rates += [rate] if rate else []
        text, good = describe_head(node, head, skew, rate)
        yield f"{at}: {text}", good
    text, good = compare_models(node, heads_found)
    if text:
        yield text, good
    yield _estimate_round(node, rates), True


def describe_head(node: Node, head: Head, skew: float, rate: float | None) -> tuple[str, bool]:
    """Return what a member's head says in words, and whether it fits to the run.

    Args:
        node: this node.
        head: of the member.
        skew: by how many seconds its clock is ahead.
        rate: its bytes a second, when known.
    """
    roster = node.roster
    # Compared with what was agreed on, so that a fault of this node is none of the others'.
    study, schema = roster.study or heads.study_hash(node.settings), roster.schema or node.schema
    theirs, own = (select_prefix(heads.TABLE, one.settings) for one in (head, node))
    other_table = bool(theirs and own) and theirs != own
    wrong = head.study != study or head.schema not in (schema, node.schema) or other_table
    speed = f"{rate / 1e6:.1f} MB/s" if rate else "rate unknown"
    text = f"{head.state} in round {head.round}, clock {skew:+.1f} s, {speed}"
    if wrong:
        difference = heads.describe_difference(node.settings, head.settings)
        text += f"; it runs something else: {difference or 'a model of other shapes'}"
    if head.roster != roster.version:
        text += f"; it has version {head.roster} of the roster, this node has {roster.version}"
    return text, not wrong and head.roster == roster.version and abs(skew) < _SKEW


def compare_models(node: Node, others: Mapping[str, Head]) -> tuple[str, bool]:
    """Return whose fault it is that this node's model is not that of the roster; "" if it is.

    The study is the same, so it is the shape of an input or the number of classes.

    Args:
        node: this node.
        others: heads of the members that answer.
    """
    roster, federation = node.roster, node.federation
    if roster.schema in ("", node.schema):
        return "", True
    features = federation.features
    here = f"--features {','.join(map(str, features))} --classes {federation.classes}"
    found = find_shapes(node.plan, features, federation.outputs, roster.schema)
    text = f"model: this node's data are {here}"
    if found is None:
        text += "; the roster was written for others"
    else:
        shape, outputs = found
        there = f"--features {','.join(map(str, shape))}"
        if outputs != federation.outputs:
            there += f" --classes {outputs}"
        text += f"; the roster was written for {there}"
    # The majority shows whether the roster or this node's data are the odd one.
    alike = sum(head.schema == node.schema for head in others.values())
    agreed = sum(head.schema == roster.schema for head in others.values())
    if alike > agreed:
        why = (
            f"{alike} of {len(others)} members that answer have this node's: the roster is wrong, "
            f"and the organizer writes it again with {here}"
        )
    elif agreed:
        why = (
            f"{agreed} of {len(others)} members that answer have the roster's: this node's data "
            "have other columns or classes than theirs"
        )
    else:
        why = (
            "nobody answers who has either: compare the columns with another member; if they are "
            f"the same, the organizer writes the roster again with {here}"
        )
    schema = TableSchema.from_federation(federation)
    if schema is not None:
        names = ", ".join(escape_text(one.name, 40) for one in schema.columns[:40])
        why += f". Inputs of this node: {names}"
    return f"{text}; {why}", False


def find_shapes(
    plan: RunSpec, features: tuple[int, ...], outputs: int, schema: str
) -> tuple[tuple[int, ...], int] | None:
    """Find the shape of an input or the number of outputs that a hash of a model was made with.

    Near ones only: another number of columns or channels, or another number of outputs.

    Args:
        plan: the run.
        features: the shape of this node's inputs.
        outputs: the number of this node's outputs.
        schema: the hash.
    """
    until = time.monotonic() + _SEARCH
    # The first axis: the columns of a table, or the channels of an image.
    near = sorted(range(1, _NEAR), key=lambda n: abs(n - features[0]))
    # Numbers of outputs first: there are few that anybody has.
    shapes = [(features, n) for n in range(1, 65)]
    # Then numbers of columns, the nearest first: a table mostly differs by a column or two.
    shapes += [((n, *features[1:]), outputs) for n in near]
    for shape, number in shapes:
        # Each shape makes a model to be hashed, and large ones take long.
        if time.monotonic() > until:
            return None
        try:
            if plan.compute_schema(shape, number) == schema:
                return shape, number
        except (CoterieError, RuntimeError, ValueError):  # the model has no such form
            continue
    return None


def check_door(member: Member, proxy: str = "") -> tuple[str, bool]:
    """Return what a connection shows of a member or a relay, and whether it can be dialed.

    Args:
        member: it has an address.
        proxy: see `NetworkSettings.proxy`.
    """
    at = member.host_and_port
    try:
        with connect(at, find_proxy(proxy, at[0]), _CONNECT):
            return f"{member}: its port is open", True
    except OSError:
        return f"{member}: {explain_silence(member, proxy)}", False


def check_relay(relay: Member, proxy: str = "") -> tuple[str, bool]:
    """Return what a connection shows of a relay, and whether it can be dialed; see `check_door`."""
    text, good = check_door(relay, proxy)
    return f"relay {text}", good


def explain_silence(member: Member, proxy: str = "") -> str:
    """Say why a member does not answer at its address, as far as a connection shows it.

    Args:
        member: the member.
        proxy: see `NetworkSettings.proxy`.
    """
    if member.is_outbound:
        return (
            "it has opened no stream to this node or to a relay: it does not run, or cannot dial "
            "out"
        )
    (host, port), url = member.host_and_port, find_proxy(proxy, member.host_and_port[0])
    # Without the user and the password that a proxy of the environment may have.
    dialed = host if url is None else f"{urlsplit(url).hostname} of the proxy"
    try:
        with connect((host, port), url, _CONNECT):
            return (
                "its port is open, but it does not answer as this member: another program, an "
                "older roster, or a device in between that opens TLS"
            )
    # The four kinds that say more are OSErrors, too, and come first.
    except ProxyRefusedError as error:
        return f"{error}; it has to allow CONNECT to {host} at port {port}"
    except socket.gaierror:
        return f"the host name {dialed} is not known here: DNS"
    except TimeoutError:
        why = "a firewall drops packets, or the machine is off"
        return f"no connection to {dialed} within {_CONNECT:.0f} s: {why}"
    except ConnectionRefusedError:
        if url is not None:
            return f"no proxy listens at {dialed}"
        return "nothing listens there: the machine is on, and its node or rehearsal does not run"
    except OSError as error:
        return f"no connection: {error.strerror or type(error).__name__}"


def measure_rate(post: Post, peer: str) -> float | None:
    """Return a member's bytes a second; the second measurement, since the first warms the link."""
    post.measure_link(peer, 10.0)
    found = post.measure_link(peer, 10.0)
    return (
        found.bytes / found.seconds if isinstance(found, Delivery) and found.seconds > 0 else None
    )


def _estimate_round(node: Node, rates: list[float]) -> str:
    """Estimated time of a round: one local training, measured, and the transfers of its models."""
    task, started = node.task, time.perf_counter()
    params = task.initial_models(Rng(0))
    # With a stream of its own: nothing of the run is drawn or changed.
    task.train(params, Rng(0).at_round(0), node.plan.settings.local)
    training = time.perf_counter() - started
    size = params.shape[1] * params.element_size()
    peers = getattr(node.plan.method, "num_peers", 1)
    text = f"one round: {training:.2f} s of training, {peers} models of {size / 1e6:.2f} MB"
    if not rates:
        return f"{text}; the network's part cannot be measured before others answer"
    # The median of the links: a single slow member is left out in a run.
    return f"{text}, about {training + peers * size / statistics.median(rates):.2f} s in all"
