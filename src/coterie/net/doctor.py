"""Doctor: check a node before its run, and estimate the time of its rounds."""

import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from coterie.data.federation import Federation
from coterie.engine import device as devices
from coterie.errors import CoterieError
from coterie.net import head as heads
from coterie.net import identity as identities
from coterie.net import nodefile
from coterie.net import roster as rosters
from coterie.net.identity import Identity
from coterie.net.log import Log
from coterie.net.node import Node
from coterie.net.nodefile import NodeFile
from coterie.net.post import Post
from coterie.net.roster import Roster
from coterie.net.transport import Delivery
from coterie.rng import Rng

_LOOK = 5.0  # seconds for links to come up
_SKEW = 30.0  # seconds of clock skew that matter: certificates have five minutes to spare
Say = Callable[[str, bool], None]


def check_node(file: NodeFile, say: Say, *, insecure: bool = False) -> bool:
    """Check everything that can be checked before a run.

    Args:
        file: node.toml.
        say: called with each result: a sentence, and whether the check passed.
        insecure: without TLS, on loopback only.

    Returns:
        Whether all checks passed.
    """
    fine = True

    def report(text: str, good: bool = True) -> None:
        nonlocal fine
        fine &= good
        say(text, good)

    try:
        own = Identity.load(
            file.resolve_path(file.key),
            file.resolve_path(file.certificate),
            file.resolve_path(file.ca),
        )
        left = own.certificate.not_valid_after_utc - datetime.now(UTC)
        report(
            f"{own.name}: key and certificate belong together; valid for {left.days} days",
            left.days >= 2,
        )
        roster = rosters.load(file.resolve_path(file.roster), file.resolve_path(file.organizer))
        problems = rosters.check_file(
            file.resolve_path(file.roster), file.resolve_path(file.organizer), own=own
        )
        for problem in problems:
            report(problem, False)
        if not problems:
            report(
                f"roster of {roster.run}, version {roster.version}: signed, {len(roster.members)} "
                "members"
            )
        for name, (days, due) in rosters.find_ends(roster, datetime.now(UTC)).items():
            if due is not None and not any(name in problem for problem in problems):
                report(f"the certificate of {name} ends in {days:.0f} days; it needs a new one")
        study, label, seed = file.select_run()
        plan = nodefile.make_run_spec(study)
        federation = nodefile.load_own_rows(
            file, study, roster.member(own.name).clients, roster.population
        )
        samples = {
            split: federation.count_samples(split).tolist() for split in ("train", "validation")
        }
        report(f"data: {samples['train']} training and {samples['validation']} validation samples")
    except CoterieError as error:
        report(str(error), False)
        return False
    agreed = plan.common_settings(roster.population)
    same = roster.study in ("", heads.study_hash(agreed))
    text = "is" if same else "is not"
    report(f"study: {label} with seed {seed} {text} what the roster says", same)
    try:
        devices.check_device(plan.settings.device)
    except CoterieError as error:
        report(str(error), False)
        return False
    report(f"trains on {plan.settings.device}; {devices.describe_devices()}")
    address = file.listen or roster.member(own.name).address
    free = _is_free(address)
    if not free:
        report(f"{address} is taken: the node runs already, or another program", False)
    else:
        report(f"{address} is free")
        with _open_visitor(file, roster, own, plan, federation, insecure) as node:
            for sentence, good in _check_others(node):
                report(sentence, good)
    return fine


def _is_free(address: str) -> bool:
    host, port = identities.split_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As a server does it: a port of a connection that just ended counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


@contextmanager
def _open_visitor(
    file: NodeFile, roster: Roster, own: Identity, plan: Any, federation: Federation, insecure: bool
) -> Iterator[Node]:
    """A node that asks the others without taking part."""
    from coterie.net.grpc_transport import GrpcTransport

    log = Log(own.name, level="error")
    with (
        tempfile.TemporaryDirectory() as folder,
        GrpcTransport(
            roster, own.name, None if insecure else own, listen=file.listen or None, log=log
        ) as transport,
    ):
        # A visitor measures only, so it need not wait as long as a round does.
        terms = replace(file.network.terms, deadline=10.0)
        node = Node(
            plan, federation, roster, transport, own.sign, Path(folder), terms=terms, log=log
        )
        try:
            yield node
        finally:
            node.close()


def _check_others(node: Node) -> Iterator[tuple[str, bool]]:
    """Results for each other member, and for a round."""
    roster, rates = node.roster, []
    heads_found = node.look_around(_LOOK)
    for name in node.other_members:
        member = roster.member(name)
        if name not in heads_found:
            hint = "nothing listens there"
            if _is_reachable(member.address):
                hint = "its port is open, but it does not answer as this member"
            yield f"{name} at {member.address}: no answer ({hint})", False
            continue
        before = time.time()
        # A new head, since that of `look_around` may be seconds old, which would count as skew.
        head = node.ask_heads([name]).get(name, heads_found[name])
        # The other clock was read between the question and the answer: the middle is the best
        # guess.
        skew = head.time - (before + time.time()) / 2
        rate = _measure_rate(node.post, name)
        rates += [rate] if rate else []
        speed = f"{rate / 1e6:.1f} MB/s" if rate else "rate unknown"
        different = head.study != heads.study_hash(node.settings) or head.schema != node.schema
        text = f"{name} at {member.address}: {head.state} in round {head.round}, "
        text += f"clock {skew:+.1f} s, {speed}"
        if different:
            difference = heads.describe_difference(node.settings, head.settings)
            text += f"; it runs something else: {difference}"
        if head.roster != roster.version:
            text += f"; it has version {head.roster} of the roster, this node has {roster.version}"
        yield text, not different and head.roster == roster.version and abs(skew) < _SKEW
    yield _estimate_round(node, rates), True


def _is_reachable(address: str) -> bool:
    try:
        with socket.create_connection(identities.split_address(address), timeout=3.0):
            return True
    except OSError:
        return False


def _measure_rate(post: Post, peer: str) -> float | None:
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
    task.train(params, Rng(0).at_round(0), node.plan.settings.local)
    training = time.perf_counter() - started
    size = params.shape[1] * params.element_size()
    peers = getattr(node.plan.method, "num_peers", 1)
    text = f"one round: {training:.2f} s of training, {peers} models of {size / 1e6:.2f} MB"
    if not rates:
        return f"{text}; the network's part cannot be measured before others answer"
    return f"{text}, about {training + peers * size / statistics.median(rates):.2f} s in all"
