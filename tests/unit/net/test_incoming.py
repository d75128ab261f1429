"""Incoming links: their bound, which one makes room, and which connections are closed."""

import socket
import threading

import pytest
from tests.outbound import until

from coterie.net import incoming
from coterie.net.incoming import (
    OF_A_MEMBER,
    SILENT,
    STRANGERS,
    IncomingLinks,
    close_connections,
    list_connections,
    normalize_peer,
)


class Door:
    """Incoming links over connections that are names; each call is a second later than the one before."""

    def __init__(self, most: int) -> None:
        self.now, self.open, self.told, self.visits = 0.0, set[str](), list[str](), {}
        self.links = IncomingLinks(most, lambda: self.open, self.close, lambda: self.now)

    def close(self, peer: str) -> None:
        self.open.discard(peer)

    def call(
        self, member: str, number: int = 0, *, sends: bool = False, ends: bool = False
    ) -> bool:
        """Whether a member's call on one of its connections is taken; it stays open unless it ends."""
        self.now += 1.0
        peer = f"{member}/{number}"
        self.open.add(peer)
        visit = self.links.open_visit(member, peer, lambda: self.told.append(peer))
        if visit is None:
            return False
        visit.is_waiting = not sends
        self.visits[peer] = visit
        if ends:
            self.links.end_visit(peer, visit)
        return True


def test_the_link_that_was_not_used_for_longest_makes_room():
    door = Door(3)
    for name in ("a", "b", "c", "a", "d"):
        assert door.call(name, ends=True)
    assert door.open == {"a/0", "c/0", "d/0"}
    assert door.told == [], "nobody is on it"
    assert len(door.links) == 3


def test_a_link_that_is_used_goes_after_idle_ones_and_who_waits_on_it_is_told():
    door = Door(3)
    door.call("a")
    door.call("b", ends=True)
    door.call("c")
    assert door.call("d")
    assert door.open == {"a/0", "c/0", "d/0"}
    assert door.call("e")
    assert door.open == {"c/0", "d/0", "e/0"}
    assert door.told == ["a/0"]


def test_what_is_being_sent_goes_on_and_the_newest_comes_again():
    door = Door(2)
    door.call("a", sends=True)
    door.call("b", sends=True)
    assert not door.call("c")
    assert door.told == []
    assert door.open == {"a/0", "b/0"}
    door.links.end_visit("a/0", door.visits["a/0"])
    assert door.call("c", 1)
    assert door.open == {"b/0", "c/1"}


def test_a_connection_that_is_about_to_be_closed_takes_no_call():
    door = Door(1)
    door.call("a")
    door.call("b")
    door.open.add("a/0")  # for the moment in which it is told
    assert not door.call("a")
    assert door.told == ["a/0"]
    door.links.note_closed("a/0")
    assert door.call("a")


def test_a_member_has_few_links_and_more_cost_it_its_own():
    door = Door(100)
    door.call("honest", ends=True)
    for number in range(50):
        assert door.call("greedy", number, sends=True)
    own = {peer for peer in door.open if peer.startswith("greedy")}
    assert own == {f"greedy/{number}" for number in range(50 - OF_A_MEMBER, 50)}
    assert "honest/0" in door.open


def test_who_has_several_links_makes_room_before_others():
    door = Door(4)
    door.call("honest", ends=True)
    door.call("other", ends=True)
    door.call("greedy", 0, ends=True)
    door.call("greedy", 1, ends=True)
    assert door.call("new")
    assert door.open == {"honest/0", "other/0", "greedy/1", "new/0"}


@pytest.mark.parametrize("sends", [False, True])
def test_a_thousand_keys_do_not_push_out_members_that_this_node_prefers(sends):
    """Nor keep one from coming: they fill the other places, and no more."""
    door = Door(10)
    door.links.preferred = {f"view{number}" for number in range(5)}
    for number in range(4):
        door.call(f"view{number}", ends=True)
    for number in range(1000):
        door.call(f"enemy{number}", sends=sends)
        assert len(door.links) <= 10
    assert {f"view{number}/0" for number in range(4)} < door.open
    assert door.call("view4")
    assert {f"view{number}/0" for number in range(5)} < door.open


def test_where_all_are_preferred_no_answer_is_cut_off():
    door = Door(2)
    door.links.preferred = {"a", "b", "c"}
    door.call("a", sends=True)
    door.call("b", sends=True)
    assert not door.call("c")


def test_where_all_are_preferred_others_come_again_later():
    door = Door(2)
    door.links.preferred = {"a", "b", "c"}
    door.call("a", ends=True)
    door.call("b", ends=True)
    assert not door.call("enemy")
    assert door.open >= {"a/0", "b/0"}
    assert door.call("c")
    assert "a/0" not in door.open


def test_connections_that_have_ended_need_no_room():
    door = Door(3)
    for name in ("a", "b", "c"):
        door.call(name, ends=True)
    door.open.discard("b/0")
    door.call("d")
    assert door.open == {"a/0", "c/0", "d/0"}
    # An address that comes again is another connection.
    assert door.links.open_visit("e", "a/0", lambda: None) is not None
    assert len(door.links) == 3


def test_connections_without_a_call_have_their_time():
    door = Door(10)
    door.call("a", ends=True)
    door.open |= {"s1", "s2"}
    assert door.links.find_silent() == []
    door.now += SILENT - 1.0
    door.open = (door.open | {"s3"}) - {"s2"}
    assert door.links.find_silent() == []
    door.now += 1.0
    door.open.add("s2")
    assert door.links.find_silent() == ["s1"], "s2 is another one since it was away"
    door.call("s3")


def test_of_many_connections_without_a_call_the_oldest_go():
    door = Door(10)
    door.open = {f"old{number}" for number in range(5)}
    door.links.find_silent()
    door.now += 1.0
    door.open |= {f"new{number}" for number in range(STRANGERS)}
    assert sorted(door.links.find_silent()) == [f"old{number}" for number in range(5)]


def test_where_the_system_does_not_say_what_is_open_the_bound_holds_all_the_same():
    closed = []
    links = IncomingLinks(2, lambda: None, closed.append)
    for name in ("a", "b", "c"):
        visit = links.open_visit(name, name, lambda: None)
        assert visit is not None
        links.end_visit(name, visit)
    assert closed == ["a"]
    assert links.find_silent() == []


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("ipv4:127.0.0.1:5000", "127.0.0.1:5000"),
        ("127.0.0.1:5000", "127.0.0.1:5000"),
        ("ipv6:%5B::1%5D:5000", "::1:5000"),
        ("ipv6:[fe80::1%25eth0]:7", "fe80::1:7"),
        ("::ffff:10.0.0.1:5000", "10.0.0.1:5000"),
        ("unix:/tmp/x", "unix:/tmp/x"),
    ],
)
def test_addresses_are_compared_in_one_form(written, expected):
    assert normalize_peer(written) == expected


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_open_connections_are_listed_and_closed_by_the_address_of_the_other_side(host):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        port = server.getsockname()[1]
        dialed = [socket.create_connection((host, port)) for _ in range(3)]
        taken = [server.accept()[0] for _ in dialed]
        peers = [normalize_peer(f"{host}:{one.getsockname()[1]}") for one in dialed]
        assert list_connections(port) == set(peers)
        close_connections(port, {peers[1]})
        assert taken[1].recv(1) == b""
        assert dialed[1].recv(1) == b""
        taken[0].sendall(b"x")
        assert dialed[0].recv(1) == b"x", "others go on"
        for one in (*dialed, *taken):
            one.close()
        until(lambda: list_connections(port) == set())


def test_files_that_come_and_go_disturb_nobody():
    """While connections are listed, another thread opens and closes files."""
    over, failed = threading.Event(), []

    def churn() -> None:
        while not over.is_set():
            with socket.create_server(("127.0.0.1", 0)) as server:
                port = server.getsockname()[1]
                with socket.create_connection(("127.0.0.1", port)) as dialed:
                    taken, _ = server.accept()
                    dialed.sendall(b"x")
                    if taken.recv(1) != b"x":
                        failed.append(port)
                    taken.close()

    thread = threading.Thread(target=churn)
    thread.start()
    for _ in range(200):
        assert incoming.list_connections(1) == set()
    over.set()
    thread.join()
    assert not failed
