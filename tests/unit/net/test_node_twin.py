"""Two processes with one identity: the second ends with one line, and the first goes on."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from coterie.errors import TransportError
from coterie.methods import METHODS
from coterie.net import local
from coterie.net.grpc_transport import GrpcTransport
from coterie.net.node import Node, Patience, RunSpec
from coterie.net.outbox import Missing
from coterie.net.roster import Roster
from coterie.net.transport import Hub, InProcess
from coterie.testing import tiny_federation, tiny_settings

PLAN = RunSpec(METHODS["random"](**{"num_peers": 1}), tiny_settings(rounds=2), "linear", "linear")
PATIENCE = Patience(start=0.0, min_peers=0, linger=0.0, ask=2.0, poll=0.02)
Make = Callable[..., Node]


@pytest.fixture
def make(tmp_path: Path, port: int) -> Iterator[tuple[Roster, Make]]:
    who, keys = local.make_members([[0], [1]], port=port)
    made: list[Node] = []

    def make_node(folder: str, **options) -> Node:
        transport = GrpcTransport(who, "n0", None, **options)
        rows, sign = tiny_federation(num_clients=2).host([0]), local.make_signer(keys[0])
        made.append(Node(PLAN, rows, who, transport, sign, tmp_path / folder, patience=PATIENCE))
        return made[-1]

    yield who, make_node
    for node in made:
        node.close()
        node.transport.close()


def test_the_second_of_two_processes_with_one_identity_ends(make, port):
    """It has files and a port of its own, as on another machine; its roster names the first one's address."""
    _, make_node = make
    first = make_node("first")
    first._start_answering()
    first._check_alone()
    second = make_node("second", listen=f"127.0.0.1:{port + 5}")
    second.incarnation = first.incarnation + 7
    with pytest.raises(TransportError, match=f"n0 runs already: at 127.0.0.1:{port} a process"):
        second.run()
    assert second.loop.next_round == -1, "it has trained nothing"
    assert second.transport.outbox.current_load[0] == 0, "nor published"
    first._check_alone()
    assert isinstance(first.transport.ask_head("n0", "1", 2.0), bytes), "the first goes on"


def test_a_node_whose_own_address_is_not_to_be_reached_goes_on(make, port):
    """Behind a firewall that forwards: others reach the address, and the machine itself does not."""
    _, make_node = make
    node = make_node("only", listen=f"127.0.0.1:{port + 5}")
    node._start_answering()
    node._check_alone()
    answer = node.transport.ask_head("n0", "1", 1.0)
    assert isinstance(answer, Missing)


def test_whoever_answers_without_the_members_key_stops_nobody(tmp_path):
    """At this member's address some other member answers: its signature is not that of the name."""
    who, keys = local.make_members([[0], [1]])
    hub = Hub()
    rows, ended = tiny_federation(num_clients=2), threading.Event()
    node = Node(
        PLAN, rows.host([0]), who, InProcess(hub, "n0"), local.make_signer(keys[0]),
        tmp_path / "n0", patience=PATIENCE,
    )  # fmt: skip
    liar = Node(
        PLAN, rows.host([0]), who, InProcess(hub, "n0"), local.make_signer(keys[1]),
        tmp_path / "liar", patience=PATIENCE,
    )  # fmt: skip
    try:
        liar.incarnation = node.incarnation + 7
        liar._start_answering()
        assert hub.find_node("n0", "n0") is liar.transport
        node._check_alone()
        ended.set()
    finally:
        for one in (node, liar):
            one.close()
            one.transport.close()
    assert ended.is_set()
