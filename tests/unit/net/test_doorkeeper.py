"""The doorkeeper: known addresses only, while broken handshakes come in numbers. Real sockets on loopback."""

import os
import select
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator

import pytest

from coterie.net import doorkeeper
from coterie.net.doorkeeper import Doorkeeper

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="socket filters are Linux's")
STRANGER = "127.0.0.2"


class Door:
    """A listening socket, its doorkeeper, and a clock that stands still unless it is moved."""

    def __init__(self, family: int, host: str, hosts: list[str]) -> None:
        self.now, self.events = 100.0, list[str]()
        self.socket = socket.create_server((host, 0), family=family)
        self.host, self.port = host, self.socket.getsockname()[1]
        self.keeper = Doorkeeper(self.port, hosts, self.told, clock=lambda: self.now)
        for thread in threading.enumerate():
            if thread.name == "coterie-resolve":
                thread.join()

    def told(self, event: str, level: str = "info", text: str = "") -> None:
        self.events.append(event)

    def flooded(self, times: int = 3) -> None:
        for _ in range(times):
            self.now += 0.1
            self.keeper.note_failure()

    def knocks(self, source: str) -> socket.socket:
        """Begin to connect from an address; on loopback the first packet has arrived when this returns."""
        found = socket.socket(self.socket.family)
        found.bind((source, 0))
        found.setblocking(False)
        found.connect_ex((self.host, self.port))
        return found

    def lets_in(self, source: str) -> bool:
        with self.knocks(source):
            readable, _, _ = select.select([self.socket], [], [], 0)
            if readable:
                self.socket.accept()[0].close()
            return bool(readable)


@pytest.fixture
def door() -> Iterator[Door]:
    found = Door(socket.AF_INET, "127.0.0.1", ["127.0.0.1"])
    yield found
    found.keeper.close()
    found.socket.close()


def test_everybody_may_connect_as_long_as_few_handshakes_break(door):
    door.flooded(2)
    door.now += 60
    door.flooded(2)
    assert not door.keeper.is_closed
    assert door.lets_in(STRANGER)


def test_a_flood_closes_the_door_to_strangers_and_not_to_members(door):
    door.keeper.add_known("127.0.0.3:40000")
    door.flooded()
    assert door.keeper.is_closed
    assert door.events == ["door_closed"]
    assert not door.lets_in(STRANGER)
    assert door.lets_in("127.0.0.1"), "the roster's address of a member"
    assert door.lets_in("127.0.0.3"), "a member came from there before"
    door.flooded(100)
    assert door.events == ["door_closed"], "nobody fills the log from outside"


def test_the_door_opens_again_after_a_quiet_minute(door):
    door.flooded()
    with door.knocks(STRANGER):
        door.now += 59
        door.keeper.reopen_if_quiet()
        assert door.keeper.is_closed
        door.now += 1
        door.keeper.reopen_if_quiet()
        assert (door.keeper.is_closed, door.events) == (False, ["door_closed", "door_open"])
        assert select.select([door.socket], [], [], 60)[0], (
            "its connection is tried again by the kernel"
        )


def test_a_connection_that_was_there_before_goes_on(door):
    client = socket.create_connection((door.host, door.port), source_address=(STRANGER, 0))
    server, _ = door.socket.accept()
    waiting = socket.create_connection((door.host, door.port), source_address=(STRANGER, 0))
    with client, server, waiting:
        door.flooded()
        client.sendall(b"x")
        server.settimeout(60)
        assert server.recv(1) == b"x"
        waiting.settimeout(60)
        assert waiting.recv(1) == b"", "one that waited to be accepted is closed"


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
@pytest.mark.parametrize(("known", "fine"), [("::1", True), ("fd00::1", False)])
def test_addresses_of_version_six(known, fine):
    try:
        door = Door(socket.AF_INET6, "::1", [])
    except OSError:
        pytest.skip("no IPv6 on this machine")
    door.keeper.add_known(f"[{known}]:1")
    door.keeper.add_known("[2001:db8::7]:1")
    door.flooded()
    assert door.lets_in("::1") is fine
    door.keeper.close()
    door.socket.close()


def test_looking_for_the_listening_socket_leaves_no_file_open():
    """Of a file that is no socket neither: who opens files at each flood has none left in the end."""

    def opened() -> int:
        return len(os.listdir("/proc/self/fd"))

    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        open(os.devnull),
        tempfile.TemporaryFile(),
    ):
        before = opened()
        assert [
            found.fileno() for found in doorkeeper._iterate_listeners(server.getsockname()[1])
        ] != []
        assert opened() == before
