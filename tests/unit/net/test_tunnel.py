"""Tunnels: members that only dial out ask and are asked, by a member's own stream or by a relay."""

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from tests.outbound import ROW, Net, until

from coterie.net import grpc_transport, tunnel
from coterie.net.grpc_server import Question
from coterie.net.outbox import Missing
from coterie.net.tunnel import Switchboard
from coterie.net.wire import Address


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def test_members_that_only_dial_out_reach_everybody_by_a_relay(tmp_path, port, stack):
    net = Net(stack, tmp_path, 3, port=port, outbound=(1, 2), relays=1)
    for asker in net.nodes:
        for peer in net.nodes:
            assert net.ask(asker, peer) == f"{peer} 1".encode(), (asker, peer)


def test_a_member_is_reached_by_its_own_stream_where_it_dials_and_no_relay_is_needed(
    tmp_path, port, stack
):
    """n1 only dials out: n0 reaches it once it has asked n0; n2, which nobody dials either, does not."""
    net = Net(stack, tmp_path, 3, port=port, outbound=(1, 2))
    found = net.nodes["n0"].ask_head("n1", "1", 2.0)
    assert isinstance(found, Missing)
    assert "it only dials out" in found.text
    assert net.ask("n1", "n0") == b"n0 1"
    assert net.ask("n0", "n1") == b"n1 1"
    assert isinstance(net.nodes["n1"].ask_head("n2", "1", 2.0), Missing)
    assert not net.roster.has_way("n1", "n2")
    assert net.roster.has_way("n1", "n0")


@pytest.mark.full
def test_the_link_on_which_a_member_is_reached_is_not_closed_where_no_relay_stands_in(
    tmp_path, port, stack, monkeypatch
):
    monkeypatch.setattr(grpc_transport, "_IDLE", 0.2)
    net = Net(stack, tmp_path, 2, port=port, outbound=(1,))
    assert net.ask("n1", "n0") == b"n0 1"
    threading.Event().wait(1.0)
    assert set(net.nodes["n1"]._links) == {"n0"}
    assert net.ask("n0", "n1") == b"n1 1"


def test_a_tunnel_by_a_relay_gives_way_to_the_members_own_stream(
    tmp_path, port, stack, monkeypatch
):
    monkeypatch.setattr(grpc_transport, "_IDLE", 0.4)
    net = Net(stack, tmp_path, 2, port=port, outbound=(1,), relays=1)
    relay = net.relays["r0"]
    assert net.ask("n0", "n1") == b"n1 1"
    assert relay._open
    assert net.ask("n1", "n0") == b"n0 1"
    until(lambda: not relay._open)
    assert net.nodes["n0"].ask_head("n1", "2", 5.0) == b"n1 2"
    assert not relay._open


@pytest.mark.full
def test_one_of_two_relays_may_die_and_the_other_is_started_again(tmp_path, port, stack):
    net = Net(stack, tmp_path, 2, port=port, outbound=(0, 1), relays=2)
    assert net.ask("n0", "n1") == b"n1 1"
    net.relays["r1"].close()
    assert net.ask("n0", "n1") == b"n1 1"
    net.relays["r0"].close()
    assert isinstance(net.nodes["n0"].ask_head("n1", "1", 1.0), Missing)
    net.start_relay("r0")
    assert net.ask("n0", "n1", 30.0) == b"n1 1"


@pytest.mark.full
def test_a_message_is_asked_for_again_while_only_the_way_is_lost(tmp_path, port, stack):
    """The relay ends while n1 holds n0's question, and comes back; the question is answered in the same call."""
    net = Net(stack, tmp_path, 2, port=port, outbound=(0, 1), relays=1)
    posts = net.posts()
    assert net.ask("n0", "n1") == b"n1 1"
    box: list = []
    asking = threading.Thread(
        target=lambda: box.append(posts["n0"].fetch("n1", Address(0, 0, 1), ROW, 40.0))
    )
    asking.start()
    until(lambda: net.nodes["n1"].outbox.current_load[1])
    net.relays["r0"].close()
    net.start_relay("r0")
    posts["n1"].publish({"params": torch.arange(4.0)}, Address(0, 0, 1))
    asking.join(60)
    assert torch.equal(box[0].tensors["params"], torch.arange(4.0))


@pytest.mark.full
def test_members_stay_present_while_their_relay_is_started_again(
    tmp_path, port, stack, monkeypatch
):
    """They go on; who would leave them out of a round would have another result than the simulation."""
    monkeypatch.setattr(grpc_transport, "_RESTART", 60.0)
    net = Net(stack, tmp_path, 2, port=port, outbound=(0, 1), relays=1)
    node, events = net.nodes["n0"], []
    for post in net.posts().values():
        post.publish({"params": torch.zeros(4)}, Address(0, 0, 0))
    assert net.ask("n0", "n1") == b"n1 1"
    until(lambda: "n1" in node.alive_members())
    monkeypatch.setattr(node, "log_event", lambda event, **details: events.append(event))
    net.relays["r0"].close()
    until(lambda: node._links["n1"].missing is not None)
    threading.Event().wait(1.0)
    assert "n1" in node.alive_members()
    again = net.start_relay("r0")
    assert net.ask("n0", "n1", 30.0) == b"n1 1"
    assert "peer_down" not in events
    assert "n1" in node.alive_members()
    # Nobody starts the relay again: it cannot be known for ever that n1 is there.
    monkeypatch.setattr(grpc_transport, "_RESTART", 0.5)
    again.close()
    until(lambda: "n1" not in node.alive_members())


@pytest.mark.full
def test_a_member_that_is_gone_is_no_lost_way(tmp_path, port, stack, monkeypatch):
    monkeypatch.setattr(tunnel, "SETTLE", 0.5)
    net = Net(stack, tmp_path, 2, port=port, outbound=(0, 1), relays=1)
    posts = net.posts()
    assert net.ask("n0", "n1") == b"n1 1"
    net.nodes["n1"].close()
    threading.Event().wait(0.6)
    began = time.monotonic()
    found = posts["n0"].fetch("n1", Address(0, 0, 1), ROW, 40.0)
    assert isinstance(found, Missing)
    assert found.reason == "unreachable"
    assert time.monotonic() - began < 20
    assert net.nodes["n0"]._tunnels.away == {"n1"}


def test_a_second_process_of_a_member_takes_no_stream_from_the_first(tmp_path, port, stack):
    """Its question to its own name comes to the first, by which a node finds out that it runs twice."""
    net = Net(stack, tmp_path, 2, port=port, outbound=(0, 1), relays=1)
    assert net.ask("n0", "n1") == b"n1 1"
    second = net.start("n1")
    second.serve_head(lambda nonce: b"second")
    until(lambda: isinstance(second.ask_head("n1", "1", 3.0), bytes))
    assert second.ask_head("n1", "1", 3.0) == b"n1 1"
    assert second._tunnels.attached == set()


def test_a_member_that_a_new_roster_removes_or_names_as_reachable(tmp_path, port, stack):
    net = Net(stack, tmp_path, 3, port=port, outbound=(1, 2), relays=1)
    relay = net.relays["r0"]
    until(lambda: relay.switchboard.attached == {"n1", "n2"})
    left = replace(
        net.roster, version=2, members=net.roster.members[:2], population=3, removed=(2,)
    )
    relay.use_roster(left)
    until(lambda: relay.switchboard.attached == {"n1"})
    none = replace(left, version=3, relays=())
    for name in ("n0", "n1"):
        net.nodes[name].use_roster(none)
    until(lambda: not relay.switchboard.attached)
    assert net.ask("n1", "n0") == b"n0 1"
    assert net.ask("n0", "n1") == b"n1 1", "by its own stream"


# ---------------------------------------------------------------- what ends in the middle


@pytest.mark.parametrize("steps", [0, 2, 6])
def test_a_member_is_called_back_on_a_connection_that_is_closed_meanwhile(
    steps, tmp_path, port, stack, monkeypatch
):
    """After so many steps of the loop. Its socket is closed, and it counts as none that is open."""
    monkeypatch.setattr(tunnel, "CONNECT", 0.5)
    net = Net(stack, tmp_path, 1, port=port, outbound=(0,), relays=1)
    node, used, opened = net.nodes["n0"], list[int](), []
    connect = asyncio.open_connection

    async def open_connection(host, port):
        opened.append(await connect(host, port))
        return opened[-1]

    monkeypatch.setattr(tunnel.asyncio, "open_connection", open_connection)

    async def call_back() -> None:
        relay = net.roster.relays[0]
        channel = node.dial(relay, relay.host_and_port, 5.0)
        calling = asyncio.create_task(node._tunnels._accept(channel, "0" * 32, used.append))
        for _ in range(steps):
            await asyncio.sleep(0)
        await channel.close()
        async with asyncio.timeout(5.0):
            await calling

    node._run(call_back())
    assert used == [1, -1]
    assert node._tunnels._num_accepted == 0
    assert [writer.is_closing() for _, writer in opened] == [True]


def test_a_member_that_calls_back_when_nobody_waits_any_more_is_let_go():
    """The asker goes in the step in which the call comes: the call ends, and holds no place."""

    async def nothing() -> AsyncIterator[bytes]:
        for part in ():
            yield part

    async def race() -> tuple[bool, bool]:
        board = Switchboard(lambda event, **details: None)
        stream = board._streams["n1"] = asyncio.Queue()
        asking = asyncio.create_task(board.call_up("n1"))
        question = Question("n1", {"tunnel": (await stream.get()).decode()}, nothing())
        answering = asyncio.create_task(board.answer_accept(question, None))
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking, answering], timeout=1.0)
        return asking.cancelled(), answering.done()

    assert asyncio.run(race()) == (True, True)


def test_a_relay_that_has_just_started_waits_longer_for_members_than_for_one_that_has_left(
    monkeypatch,
):
    """Members that found no relay for a while try again at longer and longer intervals."""
    monkeypatch.setattr(tunnel, "CONNECT", 0.1)
    monkeypatch.setattr(tunnel, "SETTLE", 20.0)

    async def attach_late(board: Switchboard, pause: float) -> tuple[bool, float]:
        """Open n1's stream after a pause; return whether a tunnel was wanted, and when that was over."""
        began = time.monotonic()
        asking = asyncio.create_task(board.call_up("n1"))
        await asyncio.sleep(pause)
        stream = board._streams["n1"] = asyncio.Queue()
        async with board._opened:
            board._opened.notify_all()
        await asyncio.wait([asking])  # n1 never calls back
        return not stream.empty(), time.monotonic() - began

    async def compare() -> None:
        fresh = Switchboard(lambda event, **details: None, time.monotonic())
        wanted, seconds = await attach_late(fresh, 0.5)
        assert wanted
        assert seconds < 10
        older = Switchboard(lambda event, **details: None, time.monotonic())
        older._ended["n1"] = time.monotonic() + 0.001
        assert await attach_late(older, 0.5) == (False, pytest.approx(0.5, abs=0.4))

    asyncio.run(compare())


def test_a_member_that_asks_is_not_away_whatever_a_relay_said_before(tmp_path, port, stack):
    """Its relay may be gone since: then only the way to it is lost."""
    net = Net(stack, tmp_path, 2, port=port, outbound=(0, 1), relays=1)
    net.nodes["n0"]._tunnels.away.add("n1")
    assert net.ask("n1", "n0") == b"n0 1"
    until(lambda: not net.nodes["n0"]._tunnels.away)


def test_a_node_that_leaves_opens_no_door_and_keeps_no_tunnel(tmp_path, port, stack, monkeypatch):
    net = Net(stack, tmp_path, 2, port=port, outbound=(1,), relays=1)
    tunnels, closed = net.nodes["n0"]._tunnels, []
    until(lambda: net.relays["r0"].switchboard.attached == {"n1"})

    async def listen() -> None:
        opening = asyncio.create_task(tunnels.listen_for("n1"))
        preparing = asyncio.create_task(tunnels.prepare("n1"))
        await asyncio.sleep(0)
        tunnels.detach()
        with pytest.raises(OSError, match="this node leaves"):
            await opening
        closed.append(await preparing)

    net.nodes["n0"]._run(listen())
    assert tunnels._listeners == {}
    assert tunnels._spare == {}
    assert [one.reason for one in closed] == ["closing"]


def test_a_relay_that_a_newer_roster_leaves_out_is_no_way(tmp_path, port, stack):
    """Its connection is closed while a tunnel is wanted there."""
    net = Net(stack, tmp_path, 2, port=port, outbound=(1,), relays=1)
    node = net.nodes["n0"]
    _, channel = node._tunnels._relays["r0"]
    node._run(channel.close())
    found = node._run(node._tunnels._open("n1"))
    assert isinstance(found, Missing)
    assert found.reason == "closing"


def test_a_node_that_leaves_ends_the_tunnels_that_are_left(tmp_path, port, stack, caplog):
    """One still waits for a member that has no stream open; nobody else would end it then."""
    net = Net(stack, tmp_path, 2, port=port, outbound=(0, 1), relays=1)
    node = net.nodes["n0"]
    net.nodes["n1"].close()
    until(lambda: net.relays["r0"].switchboard.attached == {"n0"})
    there = node._run(node._tunnels.listen_for("n1"))
    with socket.create_connection(("127.0.0.1", there)) as waiting:
        until(lambda: len(node._tunnels._going) == 1)
        node.close()
        waiting.settimeout(2.0)
        assert waiting.recv(1) == b"", "closed, and long before the wait for the member is over"
    assert node._tunnels._going == set()
    assert [one for one in caplog.records if one.name == "asyncio"] == [], "no traceback at the end"
