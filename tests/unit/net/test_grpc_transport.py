"""The transport over gRPC: who is dialed, who counts as there, what is refused at the door, and bounds."""

import asyncio
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import floods
import grpc
import pytest
import torch
from tests.outbound import settle, until

from coterie.errors import TransportError
from coterie.net import grpc_server, grpc_transport, incoming, local
from coterie.net.grpc_server import Question, read_certificate
from coterie.net.grpc_transport import GrpcTransport, check_loopback, escape_text
from coterie.net.incoming import LEAST, OF_A_MEMBER, list_connections
from coterie.net.log import ABOUT_ONE
from coterie.net.outbox import Missing
from coterie.net.payload import Refused, Template
from coterie.net.post import Post, Terms
from coterie.net.roster import Member, Roster
from coterie.net.transport import Delivery
from coterie.net.wire import (
    MAX_HEAD,
    SIGNATURE,
    Address,
    Expectation,
    Parcel,
    canonical_json,
    read_frame,
    write_frame,
)


@pytest.fixture
def plain(port) -> Iterator[list[GrpcTransport]]:
    """Three members without certificates, on loopback."""
    who, _ = local.make_members([[0], [1], [2]], port=port)
    made = [GrpcTransport(who, member.name, None) for member in who.members]
    for one in made:
        one.serve_head(lambda nonce: b"here")
    yield made
    for one in made:
        one.close()


def test_a_node_dials_whom_it_asks_and_nobody_else(plain):
    a, b, c = plain
    assert a.ask_head("n1", "1", 2.0) == b"here"
    assert set(a._links) == {"n1"}
    assert not b._links
    assert not c._links
    assert a.ask_head("n9", "1", 2.0) == Missing("removed")


def test_a_link_that_is_not_used_is_closed_and_one_that_was_lost_is_dialed_until_it_is_back(
    plain, monkeypatch
):
    """n1 is here and not asked any more; n2 was here and is not, without a word; n9 never was."""
    a, b, c = plain
    for one in (b, c):
        one.publish(Address(0, 0, 0), Missing("withheld", 0))
    for name in ("n1", "n2"):
        a.ask_head(name, "1", 2.0)
    until(lambda: {"n1", "n2"} <= a.alive_members())
    monkeypatch.setattr(grpc_transport, "_IDLE", 0.2)
    a._run(_restart_sweeper(a))
    until(lambda: not a._links)
    assert a.alive_members() <= {"n1", "n2"}, "a closed link says nothing of its member"

    monkeypatch.setattr(grpc_transport, "_IDLE", 60.0)
    a._run(_restart_sweeper(a))
    a.ask_head("n2", "1", 2.0)
    a._run(_stop_watching(a._links["n2"]))
    a.note_presence("n2", False)
    monkeypatch.setattr(grpc_transport, "_IDLE", 0.2)
    a._run(_restart_sweeper(a))
    threading.Event().wait(0.6)
    assert set(a._links) == {"n2"}
    a.note_presence("n2", True)
    until(lambda: not a._links)


async def _stop_watching(link: grpc_transport._Link) -> None:
    """Only the test says whether the member is there then."""
    assert link.watch is not None
    link.watch.cancel()
    with suppress(asyncio.CancelledError):
        await link.watch


async def _restart_sweeper(node: GrpcTransport) -> None:
    node._sweeper.cancel()
    node._sweeper = asyncio.create_task(node._close_unused_links())


def test_a_member_that_leaves_says_so_and_one_that_comes_back_is_there_again(plain):
    a, b, _ = plain
    told = []
    a._log = lambda event, **details: told.append((event, details.get("peer")))
    b.ask_head("n0", "1", 2.0)
    b.publish(Address(0, 0, 0), Missing("withheld", 0))
    until(lambda: "n1" in a.alive_members())
    b.close()
    until(lambda: "n1" not in a.alive_members())
    again = GrpcTransport(a.roster, "n1", None)
    try:
        again.ask_head("n0", "1", 2.0)
        again.publish(Address(0, 0, 0), Missing("withheld", 0))
        until(lambda: "n1" in a.alive_members())
    finally:
        again.close()
    until(lambda: len(told) == 4)
    assert told == [("peer_up", "n1"), ("peer_down", "n1")] * 2


class _Overtaken:
    """A channel to n1, whose answer that it is not here comes after its own word that it is."""

    def __init__(self, node: GrpcTransport) -> None:
        self.node = node

    def unary_unary(self, path: str) -> Callable[..., Coroutine[Any, Any, bytes]]:
        return self.ask

    async def ask(self, question: bytes, **_: Any) -> bytes:
        await self.node._answer_presence(Question("n1", {"here": True}, no_requests()), self)
        return canonical_json({"here": False})

    async def write(self, answer: bytes) -> None:
        pass


async def no_requests() -> AsyncIterator[bytes]:
    return
    yield


def test_what_a_member_says_by_itself_is_newer_than_an_answer_that_was_overtaken(
    plain, monkeypatch
):
    """It says once that it is here; taken for away, it would never be asked again."""
    a = plain[0]
    a.ask_head("n1", "1", 2.0)
    link = a._links["n1"]
    a._run(_stop_watching(link))
    with monkeypatch.context() as change:
        change.setattr(link, "channel", _Overtaken(a))
        a._run(a._exchange_presence(link, a))
    assert a.alive_members() == {"n1"}


def test_a_member_that_comes_and_goes_does_not_fill_the_log(plain):
    a, _, _ = plain
    told = []
    a._log = lambda event, **details: told.append(event)
    for _ in range(500):
        a.note_presence("n1", True)
        a.note_presence("n1", False)
    settle(a)
    assert len(told) == ABOUT_ONE[0]


def test_what_others_say_is_shown_in_few_characters_that_can_be_printed():
    assert escape_text('a\n{"event": 1}\x1b[31m\u202e') == 'a\\n{"event": 1}\\x1b[31m\\u202e'
    assert len(escape_text("\n" * 1000)) == 200


def test_frames_come_back_and_short_ones_are_refused():
    for attachment, chunk in ((b"", b""), (b"abcd", b""), (bytes(68), bytes(1000))):
        assert read_frame(write_frame(attachment, chunk)) == (attachment, chunk)
    for frame in (b"", b"\0", b"\0\5abcd"):
        with pytest.raises(Refused, match="chunk"):
            read_frame(frame)


def test_one_member_has_so_many_questions_open_and_others_are_answered(plain):
    """Questions for messages to come wait without a thread; those beyond the bound are told so at once."""
    a, _, c = plain
    channel = grpc.insecure_channel(a.roster.members[0].address)
    ask = channel.unary_stream("/coterie.v1/Message")

    def question(round: int) -> bytes:
        return canonical_json({"run": "local", "kind": "model", "round": round, "exchange": 0, "client": 0, "wait": 60.0})  # fmt: skip

    threads = threading.active_count()
    calls = [ask(question(n), timeout=30, metadata=(("coterie-name", "n1"),)) for n in range(100)]
    until(lambda: sum(call.done() for call in calls) >= 100 - 8)
    assert a.outbox.current_load[1] == 8
    assert c.ask_head("n0", "1", 2.0) == b"here"
    assert threading.active_count() <= threads + 40
    for call in calls:
        call.cancel()
    channel.close()
    until(lambda: not a._serving.get("n1"))


@pytest.mark.parametrize("end", ["call", "link"])
def test_a_question_of_a_member_that_is_gone_keeps_no_place(plain, end):
    """Eight questions wait for a minute; their asker gives up, or its link ends, and it asks again."""
    a, _, _ = plain
    options = [("grpc.use_local_subchannel_pool", 1)]

    def ask(round: int) -> Any:
        body = canonical_json({"run": "local", "kind": "model", "round": round, "exchange": 0, "client": 0, "wait": 60.0})  # fmt: skip
        found = channels[-1].unary_stream("/coterie.v1/Message")
        return found(body, timeout=30, metadata=(("coterie-name", "n1"),))

    channels = [grpc.insecure_channel(a.roster.members[0].address, options)]
    waiting = [ask(number) for number in range(8)]
    until(lambda: a.outbox.current_load[1] == 8)
    if end == "call":
        for call in waiting:
            call.cancel()
    else:
        channels[-1].close()
        channels.append(grpc.insecure_channel(a.roster.members[0].address, options))
    until(lambda: a.outbox.current_load[1] == 0)
    again = ask(8)
    until(lambda: a.outbox.current_load[1] == 1)
    a.publish(Address(8, 0, 0), Parcel(b"{}", bytes(64), b"payload"))
    assert b"payload" in b"".join(again)
    until(lambda: not a.outbox._sending)
    channels[-1].close()


def test_a_question_that_is_gone_before_the_outbox_has_it_keeps_no_place(plain):
    """All threads that answer are busy when it comes, and it is given up before one is free."""
    a, _, _ = plain
    free = threading.Event()
    busy = [a._workers.submit(free.wait, 60.0) for _ in range(16)]
    body = canonical_json({"run": "local", "kind": "model", "round": 0, "exchange": 0, "client": 0, "wait": 60.0})  # fmt: skip
    with grpc.insecure_channel(a.roster.members[0].address) as channel:
        ask = channel.unary_stream("/coterie.v1/Message")
        call = ask(body, timeout=30, metadata=(("coterie-name", "n1"),))
        until(lambda: a._serving.get("n1"))
        until(lambda: a._workers._work_queue.qsize() == 1)
        call.cancel()
        until(lambda: not a._serving["n1"])
        assert a.outbox.current_load[1] == 0
        free.set()
        for one in busy:
            one.result()
        until(lambda: a._workers._work_queue.empty())
        until(lambda: a.outbox.current_load[1] == 0)
        a._workers.submit(lambda: None).result()
        assert a.outbox.current_load[1] == 0


def test_calls_of_one_member_beyond_the_bound_are_refused_and_told_once(plain):
    """A head that takes long holds 32 of its calls; 68 are told "busy" at once, in one event."""
    a, _, c = plain
    told, free = [], threading.Event()
    a._log = lambda event, **details: told.append(
        (event, details.get("reason"), details.get("peer"))
    )
    a.serve_head(lambda nonce: free.wait(60) and b"here")
    with grpc.insecure_channel(a.roster.members[0].address) as channel:
        ask, body = (
            channel.unary_stream("/coterie.v1/Head"),
            canonical_json({"run": "local", "nonce": "1"}),
        )
        calls = [ask(body, timeout=60, metadata=(("coterie-name", "n1"),)) for _ in range(100)]
        until(lambda: sum(call.done() for call in calls) >= 68)
        assert a.turned_away == {"too_many": 68}
        assert isinstance(c.ask_roster("n0", 2.0), Missing), "others are answered"
        free.set()
        answered = [call for call in calls if not call.done()]
        assert [list(call) for call in answered] == [[b"here"]] * 32
    settle(a)
    assert [event for event in told if event[0] == "turned_away"] == [
        ("turned_away", "too_many", "n1")
    ]


def test_without_tls_every_address_is_on_loopback():
    far = Roster("r", (Member("a", "192.0.2.1:7000", (0,)),), 1)
    with pytest.raises(TransportError, match="not a loopback address"):
        check_loopback(far)
    near = replace(far, members=(Member("a", "127.0.0.1:7000", (0,)),))
    check_loopback(near)
    with pytest.raises(TransportError, match="not a loopback address"):
        check_loopback(near, "192.0.2.1:7000")


def test_a_certificate_names_its_key_and_a_dial_asks_for_it(tmp_path, port):
    """At n1's address somebody answers with n2's certificate, which has the same host: it is not asked."""
    who, people = local.create_credentials(
        tmp_path, local.make_members([[0], [1], [2]], port=port)[0]
    )
    moved = [replace(who.members[1], address=f"127.0.0.1:{port + 9}"),
             replace(who.members[2], address=who.members[1].address)]  # fmt: skip
    liar = replace(who, members=(who.members[0], *moved))
    with (
        GrpcTransport(who, "n0", people[0]) as honest,
        GrpcTransport(liar, "n2", people[2]) as wrong,
    ):
        asked = []
        wrong.serve_head(lambda nonce: asked.append(nonce) or b"here")
        found = honest.ask_head("n1", "1", 2.0)
        assert isinstance(found, Missing)
        assert found.reason == "unreachable"
    assert asked == []


def test_another_key_at_a_members_address_is_an_event_of_that_member(tmp_path, port, monkeypatch):
    """n1 goes on with the key that the organizer has replaced. n0 says so, and again after ten seconds at the earliest."""
    who, people = local.create_credentials(
        tmp_path, local.make_members([[0], [1], [2]], port=port)[0]
    )
    fresh, _ = local.create_credentials(
        tmp_path / "new", local.make_members([[0], [1], [2]], port=port)[0]
    )
    newer = replace(who, members=(who.members[0], fresh.members[1], who.members[2]))
    told = []
    monkeypatch.setattr(GrpcTransport, "_longest_pause", lambda self: 0.2)

    def log(event, **details):
        told.append((event, details))

    with (
        GrpcTransport(newer, "n0", people[0], log=log) as honest,
        GrpcTransport(who, "n1", people[1]) as old,
        GrpcTransport(newer, "n2", people[2]) as right,
    ):
        for node in (old, right):
            node.serve_head(lambda nonce: b"here")
        assert honest.ask_head("n2", "1", 5.0) == b"here"
        for _ in range(40):
            assert isinstance(honest.ask_head("n1", "1", 2.0), Missing)
            threading.Event().wait(0.05)
        until(lambda: honest.turned_away["wrong_key"] == 1)
    turned = [details for event, details in told if event == "turned_away"]
    assert [(one["reason"], one["peer"], one["times"]) for one in turned] == [
        ("wrong_key", "n1", 1)
    ]
    assert honest.turned_away == {"wrong_key": 1}


def test_a_member_whose_certificate_is_over_is_named_by_who_dials_it(tmp_path, port):
    who, people = local.create_credentials(tmp_path, local.make_members([[0], [1]], port=port)[0])
    with GrpcTransport(who, "n0", people[0]) as honest, GrpcTransport(who, "n1", people[1]):
        honest._run(honest._inspect(who.members[1]))
        assert honest.turned_away == {}
        key, _ = read_certificate(people[1].certificate_file.read_bytes())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(grpc_transport, "read_certificate", lambda pem: (key, time.time() - 1.0))
            honest._run(honest._inspect(who.members[1]))
        assert honest.turned_away == {"expired": 1}
    with GrpcTransport(who, "n0", people[0]) as honest:
        honest._run(honest._inspect(who.members[1]))  # nobody listens there
        assert honest.turned_away == {}


def test_a_member_that_moved_is_found_at_its_new_address(plain, port):
    """n1 leaves, and is started at another port; n0 takes the roster that says so, on the link that it had."""
    a, b, _ = plain
    assert a.ask_head("n1", "1", 2.0) == b"here"
    b.close()
    moved = replace(a.roster.members[1], address=f"127.0.0.1:{port + 5}")
    newer = replace(a.roster, version=2, members=(a.roster.members[0], moved, a.roster.members[2]))
    with GrpcTransport(newer, "n1", None) as again:
        again.serve_head(lambda nonce: b"moved")
        assert isinstance(a.ask_head("n1", "2", 1.0), Missing)
        a.use_roster(newer)
        assert a.ask_head("n1", "3", 5.0) == b"moved"


def test_members_reach_each_other_over_ipv6_and_by_names_with_capitals(tmp_path, port):
    who, _ = local.make_members([[0], [1]], port=port)
    addresses = (f"[0:0::1]:{port}", f"LocalHost:{port + 1}")
    members = tuple(replace(m, address=at) for m, at in zip(who.members, addresses, strict=True))
    signed, people = local.create_credentials(tmp_path, replace(who, members=members))
    with (
        GrpcTransport(signed, "n0", people[0]) as a,
        GrpcTransport(signed, "n1", people[1], listen=f"127.0.0.1:{port + 1}") as b,
    ):
        for one in (a, b):
            one.serve_head(lambda nonce: b"here")
        assert b.ask_head("n0", "1", 5.0) == b"here"
        assert a.ask_head("n1", "1", 5.0) == b"here"


def test_a_node_that_asks_its_own_name_is_no_peer_of_its_own(plain):
    a, _, _ = plain
    a.publish(Address(0, 0, 0), Missing("withheld", 0))
    assert a.ask_head("n0", "1", 2.0) == b"here"
    until(lambda: a._links["n0"].channel.get_state() is grpc.ChannelConnectivity.READY)
    assert "n0" not in a.alive_members()


@pytest.mark.full
def test_an_address_at_which_nobody_listens_costs_no_channel_and_few_dials(
    tmp_path, port, monkeypatch
):
    """It is dialed again after 0.6, 1.2, 2.5, ... s, however often it is asked, and at once when it asks itself."""
    who, _ = local.make_members([[0], [1]], port=port)
    who, people = local.create_credentials(tmp_path, who)
    with GrpcTransport(who, "n0", people[0]) as first:
        dials, connect = [], first._loop.create_connection

        async def counted(*arguments, **options):
            dials.append(arguments)
            return await connect(*arguments, **options)

        monkeypatch.setattr(first._loop, "create_connection", counted)
        began = time.monotonic()
        while time.monotonic() - began < 1.2:
            found = first.ask_head("n1", "1", 1.0)
            assert isinstance(found, Missing)
            assert found.reason == "unreachable"
            threading.Event().wait(0.02)
        assert len(dials) == 2
        assert first._links == {}
        with GrpcTransport(who, "n1", people[1]) as second:
            second.serve_head(lambda nonce: b"here")
            first.serve_head(lambda nonce: b"there")
            assert second.ask_head("n0", "1", 5.0) == b"there"
            assert first.ask_head("n1", "1", 5.0) == b"here", "who asks can be dialed at once"


def test_little_of_a_call_is_taken_before_it_is_read(plain):
    """The window that a server announces to who connects (RFC 9113, 6.5.2), read off the wire."""
    host, _, port = plain[0].roster.members[0].address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as stream:
        stream.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
        head = stream.recv(9, socket.MSG_WAITALL)
        length, kind = int.from_bytes(head[:3], "big"), head[3]
        assert kind == 4, "a server begins with its settings"
        found = dict(struct.iter_unpack(">HI", stream.recv(length, socket.MSG_WAITALL)))
    calls, window = found[3], found[4]
    assert calls == 256
    assert window == grpc_server.LOOKAHEAD


@pytest.mark.slow
def test_large_questions_over_many_calls_take_little_memory(tmp_path):
    """A member sends questions of 4 MB, 512 at a time: they took hundreds of megabytes of each link."""
    found = floods.measured(tmp_path, "large_questions", 3.0)
    before, most, _ = found["memory_mb"]
    assert most - before < 64, found
    assert found["missed"] == 0


def test_an_answer_of_more_bytes_than_are_expected_is_refused(plain):
    """A head is at most MAX_HEAD bytes and a signature: of one more the asker keeps nothing."""
    a, b, _ = plain
    most = MAX_HEAD + SIGNATURE
    for size, fine in ((most, True), (most + 1, False)):
        b.serve_head(lambda nonce, size=size: bytes(size))
        found = a.ask_head("n1", "1", 10.0)
        if fine:
            assert found == bytes(most)
        else:
            assert isinstance(found, Missing)
            assert (found.reason, found.round) == ("refused:size", None)
            assert f"over {most} bytes" in found.text


def test_a_message_of_another_form_is_refused_and_logged_once(plain):
    a, b, _ = plain
    told = []
    a._log = lambda event, **details: told.append((event, details))
    at = Address(0, 0, 1)
    b.publish(at, Parcel(b"{}", bytes(SIGNATURE), b""))
    form = Template({"params": (torch.float32, (4,))})
    expect = Expectation("local", "n1", "n0", at, "", form, lambda *_: True)
    found = a.fetch("n1", expect, 10.0)
    assert isinstance(found, Missing)
    assert found.reason.startswith("refused:")
    assert found.text
    settle(a)
    ((_, details),) = [one for one in told if one[0] == "refused"]
    assert (details["peer"], details["about"]) == ("n1", str(at))
    assert found.reason == f"refused:{details['code']}"


def test_a_task_that_has_ended_is_not_kept(plain):
    """A node of years starts one at every look for a better way to a member."""
    a, *_ = plain

    async def start(count):
        for _ in range(count):
            a.start_task(asyncio.sleep(0))

    a._run(start(100))
    until(lambda: not a._serving["n0"])


def test_a_link_is_measured_with_a_mebibyte_of_zeros(port):
    who, keys = local.make_members([[0], [1]], port=port)
    nodes = [GrpcTransport(who, f"n{number}", None) for number in range(2)]
    posts = [Post(node, who, local.make_signer(key)) for node, key in zip(nodes, keys, strict=True)]
    try:
        posts[1].serve_probe()
        found = posts[0].measure_link("n1", 10.0)
        assert isinstance(found, Delivery)
        assert torch.equal(found.tensors["probe"], torch.zeros(1_048_576, dtype=torch.uint8))
        assert 1_048_576 < found.bytes < 1_048_576 + 4096
    finally:
        for part in (*posts, *nodes):
            part.close()


def test_a_node_keeps_the_links_that_it_used_last(port):
    """Of five members two are kept; a run that says nothing has no say, and the larger number counts."""
    who, _ = local.make_members([[number] for number in range(6)], port=port)
    made = [GrpcTransport(who, member.name, None) for member in who.members]
    a, *others = made
    try:
        for one in others:
            one.serve_head(lambda nonce: b"here")
        a.limit_links(2)
        for name in ("n1", "n2", "n1", "n3"):
            assert a.ask_head(name, "1", 2.0) == b"here"
        assert set(a._links) == {"n1", "n3"}, "n2 was used before n1"
        a.bound_links("another", 3)
        for name in ("n4", "n5"):
            assert a.ask_head(name, "1", 2.0) == b"here"
        assert set(a._links) == {"n3", "n4", "n5"}
        # One that is in use stays, however long ago that began.
        a._links["n3"].calls += 1
        for name in ("n1", "n2", "n1"):
            assert a.ask_head(name, "1", 2.0) == b"here"
        assert set(a._links) == {"n3", "n1", "n2"}
    finally:
        for one in made:
            one.close()


@contextmanager
def crowd(port: int, members: int, most: int) -> Iterator[list[GrpcTransport]]:
    """Members of which each has room for few links from others."""
    who, _ = local.make_members([[number] for number in range(members)], port=port)
    made = [GrpcTransport(who, member.name, None) for member in who.members]
    for one in made:
        one.serve_head(lambda nonce: b"here")
        one.limit_links(16)
        one.incoming.most = most
    try:
        yield made
    finally:
        for one in made:
            one.close()


def count_links(node: GrpcTransport) -> int:
    found = list_connections(node._port)
    assert found is not None
    return len(found)


def test_where_everybody_wants_everybody_all_questions_are_answered(port):
    """Each of eight has room for two, and says what it has only when it has read all of a first exchange."""
    posts: list[Post] = []
    with crowd(port, 8, 2) as nodes:
        who, keys = local.make_members([[number] for number in range(8)], port=port)
        for node, key in zip(nodes, keys, strict=True):
            terms = Terms(deadline=60.0, slow=20.0)
            posts.append(Post(node, who, local.make_signer(key), terms=terms))
        got: list[dict[int, Delivery | Missing]] = []

        def take_part(post: Post) -> None:
            own = post.roster.member(post.transport.name).clients[0]
            row = {"params": torch.full((4,), float(own))}
            template = Template({"params": (torch.float32, (4,))})
            for exchange in range(2):
                # The others wait here for a while.
                threading.Event().wait(0.1 * own)
                post.publish(row, Address(0, exchange, own))
                wanted = [Address(0, exchange, other) for other in range(8) if other != own]
                got.append(post.fetch_all(wanted, template, 60.0))

        threads = [threading.Thread(target=take_part, args=(post,)) for post in posts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        missed = [one for found in got for one in found.values() if not isinstance(one, Delivery)]
        assert missed == []
        assert len(got) == 16
        assert max(len(node.incoming) for node in nodes) <= 2
        for post in posts:
            post.close()


@pytest.mark.parametrize("why", ["another", "meanwhile"])
def test_a_question_whose_link_was_closed_is_asked_again(port, why):
    """n1 waits for a message, and n2 needs the only place; or the connection ends under the question."""
    with crowd(port, 3, 1) as (a, b, c), ThreadPoolExecutor(1) as pool:
        who, keys = local.make_members([[0], [1], [2]], port=port)
        template = Template({"params": (torch.float32, (4,))})
        reader = Post(b, who, local.make_signer(keys[1]))
        waiting = pool.submit(reader.fetch, "n0", Address(0, 0, 0), template, 20.0)
        until(lambda: a.outbox.current_load[1] == 1)
        if why == "another":
            assert c.ask_head("n0", "1", 5.0) == b"here"
        else:
            incoming.close_connections(a._port, list_connections(a._port) or ())
        sender = Post(a, who, local.make_signer(keys[0]))
        sender.publish({"params": torch.ones(4)}, Address(0, 0, 0))
        assert isinstance(waiting.result(30), Delivery)
        for one in (reader, sender):
            one.close()


def test_a_link_that_made_room_is_dialed_again_when_it_is_needed_and_not_before(port):
    with crowd(port, 5, 2) as (a, *others):
        a.publish(Address(0, 0, 0), Missing("withheld", 0))
        for one in others:
            one.limit_links(16)
            assert one.ask_head("n0", "1", 2.0) == b"here"
            until(lambda: "n0" in one.alive_members())  # noqa: B023
        until(lambda: count_links(a) == 2)
        until(lambda: sum("n0" in one._links for one in others) == 2)
        threading.Event().wait(1.0)
        assert count_links(a) == 2
        assert "n0" not in others[0]._links, "it was used first"
        assert "n0" in others[0].alive_members(), "it listens: it has not gone"
        for _ in range(3):
            for one in others:
                assert one.ask_head("n0", "1", 5.0) == b"here"
        assert len(a.incoming) <= 2


def test_a_link_that_made_room_and_is_needed_at_that_moment_is_not_closed_under_the_question(port):
    with crowd(port, 2, 16) as (a, b):
        assert b.ask_head("n0", "1", 2.0) == b"here"
        link = b._links["n0"]
        was_let_go, noticed = b._was_let_go, threading.Event()

        async def begin_a_question(one: Any) -> bool:
            found = await was_let_go(one)

            def begin() -> None:
                link.calls += 1
                noticed.set()

            b._loop.call_soon(begin)
            return found

        b._was_let_go = begin_a_question
        incoming.close_connections(a._port, list_connections(a._port) or ())
        assert noticed.wait(20)
        threading.Event().wait(0.2)
        assert b._links["n0"] is link
        assert link.channel.get_state() is not grpc.ChannelConnectivity.SHUTDOWN
        link.calls -= 1


def test_a_member_whose_link_is_lost_is_not_taken_for_one_that_made_room(plain):
    a, b, _ = plain
    a.limit_links(16)
    b.publish(Address(0, 0, 0), Missing("withheld", 0))
    a.ask_head("n1", "1", 2.0)
    until(lambda: "n1" in a.alive_members())
    until(lambda: a._links["n1"].channel.get_state() is grpc.ChannelConnectivity.READY)
    # Without a word.
    b._run(b._stop_server(0.0))
    until(lambda: "n1" not in a.alive_members())


def drain(call: Any) -> None:
    with suppress(grpc.RpcError):
        list(call)


@pytest.mark.parametrize("method", ["Head", "Message"])
def test_who_opens_many_links_pushes_out_nobody_else(port, method):
    """n2 has forty links to n0, some of them with questions that wait; n1 keeps the one that it has."""
    with crowd(port, 3, 6) as (a, b, _):
        assert b.ask_head("n0", "1", 2.0) == b"here"
        mine = list_connections(a._port)
        options, who = [("grpc.use_local_subchannel_pool", 1)], (("coterie-name", "n2"),)
        fields = {"nonce": "1"} if method == "Head" else {"kind": "model", "round": 0, "exchange": 0, "client": 0, "wait": 60.0}  # fmt: skip
        body = canonical_json({"run": "local", **fields})
        channels = [grpc.insecure_channel(a.roster.members[0].address, options) for _ in range(40)]
        calls = [one.unary_stream(f"/coterie.v1/{method}")(body, metadata=who) for one in channels]
        for call in calls:
            # One that is answered is over when its answer was read.
            threading.Thread(target=drain, args=(call,), daemon=True).start()
        until(lambda: len(calls) - sum(call.done() for call in calls) <= OF_A_MEMBER)
        until(lambda: count_links(a) <= 1 + OF_A_MEMBER)
        now = list_connections(a._port)
        assert mine is not None
        assert now is not None
        assert mine <= now
        assert b.ask_head("n0", "1", 2.0) == b"here"
        for channel in channels:
            channel.close()


def test_connections_without_a_call_are_closed(plain, monkeypatch):
    """Strangers, or a member that says nothing: here plain connections."""
    a, b, _ = plain
    monkeypatch.setattr(incoming, "SILENT", 0.3)
    monkeypatch.setattr(grpc_server, "_SWEEP", 0.1)
    a._run(_restart_sweep_of_silence(a))
    assert b.ask_head("n0", "1", 2.0) == b"here"
    host, at = a.roster.members[0].host_and_port
    strangers = [socket.create_connection((host, at)) for _ in range(20)]
    until(lambda: count_links(a) >= 15)
    until(lambda: count_links(a) == 1)
    for one in strangers:
        one.close()
    assert b.ask_head("n0", "1", 2.0) == b"here"
    assert len(a.incoming) == 1


def test_the_library_takes_a_bounded_number_of_connections(port, monkeypatch):
    monkeypatch.setattr(grpc_server, "CONNECTIONS", 5)
    with crowd(port, 2, 6) as (a, b):
        assert b.ask_head("n0", "1", 2.0) == b"here"
        held = [socket.create_connection(a.roster.members[0].host_and_port) for _ in range(30)]
        until(lambda: count_links(a) == 5)
        threading.Event().wait(0.3)
        assert count_links(a) == 5
        assert b.ask_head("n0", "1", 2.0) == b"here", "links that are open go on"
        for one in held:
            one.close()


async def _restart_sweep_of_silence(node: GrpcTransport) -> None:
    node._silence.cancel()
    node._silence = asyncio.create_task(node._close_silent_connections())


def test_a_node_has_room_for_links_by_the_number_of_members_or_of_those_that_it_needs(plain):
    a, _, _ = plain
    assert a.incoming.most == LEAST + 2 * 3
    a.limit_links(2)
    assert a.incoming.most == LEAST + 2 * 2
    a.bound_links("another", 100)
    assert a.incoming.most == LEAST + 2 * 3
    a.prefer_members({"n1"})
    a.prefer_links("another", {"n2"})
    assert a.incoming.preferred == {"n1", "n2"}
    a.drop_run(a)
    assert a.incoming.preferred == {"n2"}
