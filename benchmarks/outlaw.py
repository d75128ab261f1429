"""Parties that keep to no rule: they call nodes and answer them with whatever credentials they have."""

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from coterie.net.identity import Identity, key_host
from coterie.net.roster import Member

SERVICE = "coterie.v1"


@dataclass
class Outcome:
    """What a call brought: its parts, and the status at its end."""

    parts: list[bytes] = field(default_factory=list)
    status: str = "OK"
    details: str = ""

    @property
    def code(self) -> str:
        """The node's own code, where it says one."""
        return json.loads(self.details)["code"] if self.details.startswith("{") else self.status


def question(run: str, **fields: Any) -> bytes:
    return json.dumps({"run": run, **fields}).encode()


def message(run: str, round: int, client: int, *, wait: float = 1.0, kind: str = "model") -> bytes:
    return question(run, kind=kind, round=round, exchange=0, client=client, wait=wait)


@contextmanager
def channel_to(own: Identity, member: Member, address: str = "") -> Iterator[grpc.Channel]:
    """A connection with some credentials, to a member that is who it says that it is."""
    key, certificate, ca = own.read_files()
    with grpc.secure_channel(
        address or member.address,
        grpc.ssl_channel_credentials(ca, key, certificate),
        [
            ("grpc.ssl_target_name_override", key_host(member.subject)),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.max_receive_message_length", 1 << 24),
        ],
    ) as channel:
        yield channel


def call(channel: grpc.Channel, method: str, body: bytes, wait: float = 5.0) -> Outcome:
    """One call to its end."""
    found = Outcome()
    try:
        for part in channel.unary_stream(f"/{SERVICE}/{method}")(body, timeout=wait):
            found.parts.append(part)
    except grpc.RpcError as error:
        found.status, found.details = error.code().name, error.details() or ""
    return found


def ask(own: Identity, member: Member, method: str, body: bytes, wait: float = 5.0) -> Outcome:
    """One call on a connection of its own."""
    with channel_to(own, member) as channel:
        return call(channel, method, body, wait)


def frame(attachment: bytes, chunk: bytes) -> bytes:
    return len(attachment).to_bytes(2, "big") + attachment + chunk


@contextmanager
def serve(
    own: Identity, address: str, answer: Callable[[str, Mapping[str, Any]], Iterable[bytes]]
) -> Iterator[None]:
    """Answer at an address with some credentials: `answer` gets the method and the question."""
    key, certificate, ca = own.read_files()
    server = grpc.server(ThreadPoolExecutor(16), options=[("grpc.so_reuseport", 0)])
    handlers = {
        method: grpc.unary_stream_rpc_method_handler(
            lambda body, context, method=method: iter(answer(method, json.loads(body)))
        )
        for method in ("Message", "Head", "Roster", "Presence")
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    server.add_secure_port(address, grpc.ssl_server_credentials([(key, certificate)], ca, True))
    server.start()
    try:
        yield
    finally:
        server.stop(0).wait()


def wait_until(condition: Callable[[], bool], tries: int = 100) -> None:
    pause = threading.Event()
    for _ in range(tries):
        if condition():
            return
        pause.wait(0.1)
    raise AssertionError("it did not come to be")
