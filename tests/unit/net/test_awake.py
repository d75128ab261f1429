"""Time in which a node could not work is its own: it counts against nobody whom it asked."""

import asyncio
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from coterie.net import local
from coterie.net.awake import BEAT, AwakeClock
from coterie.net.grpc_server import start_loop
from coterie.net.grpc_transport import GrpcTransport
from coterie.net.outbox import Missing
from coterie.net.payload import Template
from coterie.net.post import Post
from coterie.net.transport import Delivery
from coterie.net.wire import Address, Expectation

AT = Address(0, 0, 1)
ROWS = {"params": torch.zeros(4)}


def test_the_clock_goes_with_the_beats_and_stands_still_without_them():
    """Beats at 0.05 and 0.15 s, a pause of a minute, and a beat at its end."""
    now = SimpleNamespace(at=100.0)
    clock = AwakeClock(None, lambda: now.at)
    shown = []
    for at, beats in (
        (100.05, True),
        (100.15, True),
        (160.0, False),
        (160.15, True),
        (160.2, False),
    ):
        now.at = at
        shown.append(clock())
        if beats:
            clock.beat()
            assert clock() == shown[-1], "a beat moves nothing"
    assert shown == pytest.approx([0.05, 0.15, 0.15 + BEAT, 0.15 + BEAT, 0.2 + BEAT])


@pytest.mark.full
def test_the_clock_follows_its_loop():
    async def measure() -> tuple[float, float, float]:
        clock = AwakeClock(asyncio.get_running_loop())
        await asyncio.sleep(0.3)
        awake = clock()
        time.sleep(0.7)
        stalled = clock()
        await asyncio.sleep(0.3)
        return awake, stalled, clock()

    awake, stalled, after = asyncio.run(measure())
    assert 0.1 < awake < 0.4
    assert stalled - awake <= BEAT + 0.01
    assert 0.1 < after - stalled < 0.4


@pytest.fixture
def two(port):
    """Two nodes without TLS that share the loop of this program, and the second one's post."""
    who, keys = local.make_members([[0], [1]], port=port)
    nodes = [GrpcTransport(who, f"n{number}", None) for number in range(2)]
    posts = [Post(node, who, local.make_signer(key)) for node, key in zip(nodes, keys, strict=True)]
    yield nodes, posts
    for part in (*posts, *nodes):
        part.close()


def ask(posts, patience: float, deadline: float = 20.0) -> Delivery | Missing:
    post = posts[0]
    template = Template({"params": (torch.float32, (4,))})
    expect = Expectation(
        post.roster.run, "n1", "n0", AT, post.roster.schema, template, post._verify["n1"], 0
    )
    return post.transport.fetch("n1", expect, deadline, patience)


@pytest.mark.full
@pytest.mark.parametrize(("patience", "deadline"), [(0.5, 20.0), (20.0, 0.5)])
def test_an_answer_that_waits_unread_while_the_asker_stands_still_is_read(two, patience, deadline):
    """The loop stands still for three times the patience, and the message is published meanwhile."""
    nodes, posts = two
    asking = threading.Event()
    real = nodes[1].outbox.ask

    def hold(asker, address, wait, answer):
        real(asker, address, wait, answer)
        nodes[1]._loop.call_soon_threadsafe(stand_still)

    def stand_still():
        asking.set()
        time.sleep(1.5)

    nodes[1].outbox.ask = hold

    def publish():
        assert asking.wait(10)
        posts[1].publish(ROWS, AT)

    publishing = threading.Thread(target=publish)
    publishing.start()
    found = ask(posts, patience, deadline)
    publishing.join()
    assert isinstance(found, Delivery), found
    assert found.seconds < 0.45, "what is counted for the member is less than its patience"


def test_the_time_until_a_link_is_up_is_not_the_members(port):
    """Through a relay that passes on the first bytes after a second."""
    who, keys = local.make_members([[0], [1]], port=port)
    far = replace(who.members[1], address=f"127.0.0.1:{port + 5}")
    seen = replace(who, members=(who.members[0], far))
    loop, _ = start_loop()

    async def copy(reader, writer, seconds):
        await asyncio.sleep(seconds)
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()

    async def relay(reader, writer):
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port + 1)
        await asyncio.gather(copy(reader, far_writer, 1.0), copy(far_reader, writer, 1.0))

    async def listen():
        return await asyncio.start_server(relay, "127.0.0.1", port + 5)

    server = asyncio.run_coroutine_threadsafe(listen(), loop).result()
    nodes = [GrpcTransport(roster, f"n{i}", None) for i, roster in enumerate((seen, who))]
    posts = [Post(node, who, local.make_signer(key)) for node, key in zip(nodes, keys, strict=True)]
    try:
        posts[1].publish(ROWS, AT)
        began = time.monotonic()
        found = ask(posts, 3.0)
        assert isinstance(found, Delivery), found
        assert time.monotonic() - began > 1.0
        assert found.first < 0.9, "without the second in which the link came up"
    finally:
        for part in (*posts, *nodes):
            part.close()
        loop.call_soon_threadsafe(server.close)


@pytest.mark.parametrize(("patience", "deadline"), [(0.3, 20.0), (20.0, 0.3)])
def test_a_member_that_holds_its_answer_is_still_given_up(two, patience, deadline):
    nodes, posts = two
    nodes[1].outbox.ask = lambda asker, address, wait, answer: None
    began = time.monotonic()
    assert ask(posts, patience, deadline) == Missing("timeout", None, "no part came for too long")
    assert 0.25 < time.monotonic() - began < 5.0
