"""Doorkeeper: while broken handshakes come in numbers, the kernel lets in known addresses only.

The engine pauses for a tenth of a second after every handshake that fails, and the connections that
fail meanwhile stay open. Somebody without a certificate who makes many of them keeps new links of
members from coming up, and in the end takes every file that a node may open. Connections of
addresses that are not known are then dropped by the kernel before they reach the engine (a
socket filter, Linux only), until a minute has passed without a broken handshake.
"""

import ctypes
import ipaddress
import os
import socket
import stat
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

_MANY, _WITHIN = 3, 1.0  # broken handshakes, in seconds
_QUIET = 60.0  # seconds without one, after which everybody may connect again
_ATTACH, _DETACH = 26, 27  # SO_ATTACH_FILTER and SO_DETACH_FILTER, which Python does not name
_NETWORK = 0xFFF00000  # where a filter finds the network header
_MOST = 1000  # addresses in a filter
# What a filter returns is how many bytes of the packet pass.
_ALL, _NONE = 0xFFFFFFFF, 0
_Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand


def _build_filter(addresses: Iterable[str]) -> bytes:
    """Return a classic BPF program that accepts packets from these addresses only."""
    known = [ipaddress.ip_address(a) for a in sorted(addresses)[:_MOST]]
    # Opcodes of linux/bpf_common.h: LD W ABS, LD B ABS, ALU RSH K, JMP JEQ K, JMP JA, RET K.
    load, load_byte, shift, equal, jump, leave = 0x20, 0x30, 0x74, 0x15, 0x05, 0x06
    # The source address of IPv4 is at byte 12 of the network header.
    four: list[_Instruction] = [(load, 0, 0, _NETWORK + 12)]
    for address in known:
        if address.version == 4:
            four += [(equal, 0, 1, int(address)), (leave, 0, 0, _ALL)]
    four.append((leave, 0, 0, _NONE))
    six: list[_Instruction] = []
    for address in known:
        if address.version == 6:
            # The source address of IPv6 is at byte 8 and takes four comparisons.
            words = struct.unpack(">4I", address.packed)
            for place, word in enumerate(words):
                # Two instructions for each word that is left, and one that accepts.
                left = 2 * (3 - place) + 1  # to the next address
                six += [(load, 0, 0, _NETWORK + 8 + 4 * place), (equal, 0, left, word)]
            six.append((leave, 0, 0, _ALL))
    six.append((leave, 0, 0, _NONE))
    # The version is the upper half of the first byte. All but 4 is compared as IPv6.
    head: list[_Instruction] = [
        (load_byte, 0, 0, _NETWORK),
        (shift, 0, 0, 4),
        (equal, 1, 0, 4),
        (jump, 0, 0, len(four)),
    ]
    # Each is a `struct sock_filter` of linux/filter.h.
    return b"".join(struct.pack("HBBI", *instruction) for instruction in [*head, *four, *six])


def _iterate_listeners(port: int) -> Iterator[socket.socket]:
    """Yield the sockets on which this process listens at a port."""
    # Only Linux has this folder; elsewhere no socket is found, and the door stays open.
    with suppress(OSError):
        for number in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                if not stat.S_ISSOCK(os.fstat(int(number)).st_mode):
                    continue
                # A duplicate: closing it leaves the engine's own socket open.
                found = socket.socket(fileno=os.dup(int(number)))
                with found:
                    is_inet = found.family in (socket.AF_INET, socket.AF_INET6)
                    listens = is_inet and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                    if listens and found.getsockname()[1] == port:
                        yield found


def _turn_away(listening: socket.socket) -> None:
    """Close the connections that wait to be accepted; members among them try again."""
    listening.setblocking(False)  # as the engine has it
    # Until none waits: then `accept` raises BlockingIOError.
    with suppress(OSError):
        while True:
            listening.accept()[0].close()


class Doorkeeper:
    """Lets known addresses in, and others as long as they do not break handshakes in numbers.

    Args:
        port: where this node listens.
        hosts: the members' hosts, by the roster.
        log: receives events.
        clock: a monotonic clock in seconds.
    """

    def __init__(
        self,
        port: int,
        hosts: Iterable[str],
        log: Callable[..., None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._port, self._log, self._clock = port, log, clock
        self._known: set[str] = set()
        self._failed: deque[float] = deque(maxlen=_MANY)
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._closed = self._over = False
        threading.Thread(
            target=self._resolve_hosts, args=(list(hosts),), name="coterie-resolve", daemon=True
        ).start()

    @property
    def is_closed(self) -> bool:
        """Whether only known addresses are let in now."""
        return self._closed

    def add_known(self, address: str) -> None:
        """Note that a member has a link from an address (host:port)."""
        with suppress(ValueError), self._lock:
            # A bound on the length of the filter.
            if len(self._known) < _MOST:
                self._known.add(str(ipaddress.ip_address(address.rsplit(":", 1)[0].strip("[]"))))

    def note_failure(self) -> None:
        """Note a broken handshake; close the door when there are many."""
        with self._lock:
            now = self._clock()
            self._failed.append(now)
            many = len(self._failed) == _MANY and now - self._failed[0] <= _WITHIN
            if not many or self._closed or self._over:
                return
            program = _build_filter(self._known)
            buffer = ctypes.create_string_buffer(program, len(program))
            # A `struct sock_fprog`: the number of instructions of 8 bytes, and their address.
            # `buffer` lives until the kernel has copied them.
            code = struct.pack("HP", len(program) // 8, ctypes.addressof(buffer))
            for found in _iterate_listeners(self._port):
                with suppress(OSError):
                    # The filter first: connections that arrive while the queue is emptied meet it
                    # already.
                    found.setsockopt(socket.SOL_SOCKET, _ATTACH, code)
                    self._closed = True
                    _turn_away(found)
            if self._closed:
                self._schedule_reopening(_QUIET)
        # Outside of the lock, because writing a line can take long.
        if self._closed:
            self._log(
                "door_closed",
                level="warning",
                text="many broken handshakes: connections come from known addresses only, "
                "until a minute is quiet",
            )

    def _resolve_hosts(self, hosts: list[str]) -> None:
        """Resolve the members' hosts to addresses where possible; this may take long."""
        for host in hosts:
            with suppress(OSError):
                for entry in socket.getaddrinfo(host, None):
                    self.add_known(f"{str(entry[4][0]).split('%')[0]}:0")

    def _schedule_reopening(self, seconds: float) -> None:
        self._timer = threading.Timer(seconds, self.reopen_if_quiet)
        self._timer.daemon = True
        self._timer.start()

    def reopen_if_quiet(self) -> None:
        """Open the door again when it has been quiet for long enough."""
        with self._lock:
            left = self._failed[-1] + _QUIET - self._clock() if self._failed else 0.0
            if not self._closed or self._over:
                return
            if left > 0:
                self._schedule_reopening(left)
                return
            for found in _iterate_listeners(self._port):
                with suppress(OSError):
                    found.setsockopt(socket.SOL_SOCKET, _DETACH, 0)
            self._closed = False
        self._log("door_open")

    def close(self) -> None:
        """Look no more."""
        with self._lock:
            self._over = True
            if self._timer is not None:
                self._timer.cancel()
