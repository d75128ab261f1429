"""What a process that members dial has: who asks, well-formed questions, refusals.

Who asks is known from the certificate of the connection, by its key, at every call. Nodes answer
from it (`grpc_transport`), and so do relays (`relay`). All calls of all nodes of a program run on
one event loop in one thread, so that a question that waits for its message costs no thread.
"""

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio
from cryptography import x509

from coterie._util.mappings import index_by_name
from coterie.errors import TransportError
from coterie.net import identity as identities
from coterie.net.awake import AwakeClock
from coterie.net.identity import Identity
from coterie.net.incoming import (
    CONNECTIONS,
    LEAST,
    IncomingLinks,
    Visit,
    close_connections,
    list_connections,
)
from coterie.net.log import RateLimit, Sample
from coterie.net.outbox import REASONS, Missing
from coterie.net.payload import Refused, escape_text, parse_strict_json
from coterie.net.proxy import find_proxy
from coterie.net.roster import Member, Roster
from coterie.net.wire import CHUNK, MAX_MANIFEST, SIGNATURE, VERSION, canonical_json

SERVICE = f"coterie.v{VERSION}"
# The longest question is that for a message, of some 200 bytes.
MAX_QUESTION = 1024  # bytes
# Bytes of one HTTP/2 message of an answer; the library refuses a larger one before this program
# sees it.
MAX_FRAME = CHUNK + MAX_MANIFEST + SIGNATURE + 64
MAX_PART = 64 * 1024
"""Bytes of one message to a server: a part of a tunnel. HTTP/2 has as many of a call on the way."""
LOOKAHEAD = 4 * MAX_QUESTION
"""Bytes of a call that are taken before it is read, where only questions come."""
WINDOW = 512 * 1024
"""The same where tunnels come in: what is on the way in one direction."""
CALLS = 32
"""Calls that one member may have open at a node, of all kinds."""
_LISTEN = 5.0  # seconds in which a question must have come
_SWEEP = 5.0  # seconds between two looks at connections without a call
_TELL = 0.25  # seconds for the answer that there is no room, until the connection is closed
_PAUSE = 10.0  # seconds between two events of the same refusal: nobody fills the log from outside
OVER = "its certificate is over; it needs a new one"
_Answer = TypeVar("_Answer")


@lru_cache(1)
def start_loop() -> tuple[asyncio.AbstractEventLoop, AwakeClock]:
    """Return the event loop of this program, in a thread of its own, and the clock on it."""
    # One for all: the library wakes every loop of a program for the events of each of them.
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="coterie-net", daemon=True).start()
    return loop, AwakeClock(loop)


@lru_cache(4096)
def read_certificate(pem: bytes) -> tuple[str, float]:
    """Return the text of a certificate's public key, empty for another kind, and when it ends."""
    certificate = x509.load_pem_x509_certificate(pem)
    try:
        key = identities.encode_public_key(identities.certificate_key(certificate))
    except TransportError:
        key = ""
    return key, certificate.not_valid_after_utc.timestamp()


def raise_file_limit() -> None:
    """Let this process open as many files as the system allows: each connection is one.

    The usual limit is 1024; strangers who fill it keep a node from reading its own files.
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # macOS says that there is no limit, and then refuses more than 10,240 (OPEN_MAX).
    for number in (most, 10_240):
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (number, most))
            return


@dataclass
class Question:
    """A question of another member, whose certificate has said who it is.

    Args:
        asker: the member.
        fields: of the question.
        requests: what comes after it, for the few calls on which anything does.
        visit: its place among the calls on incoming links.
    """

    asker: str
    fields: Mapping[str, Any]
    requests: AsyncIterator[bytes]
    visit: Visit = field(default_factory=Visit)


Handler = Callable[[Question, Any], Coroutine[Any, Any, None]]


class GrpcServer:
    """A process that the members of a roster dial.

    Args:
        roster: the members.
        name: of this process.
        identity: its key and certificate; None for plain TCP.
        lease: seconds without a sign of life after which a link counts as lost.
        proxy: by which it dials others; see `NetworkSettings.proxy`.
        log: receives events (see `log.Log`).

    Attributes:
        turned_away: numbers of questions that were refused, by reason: "not_on_roster" (a
            certificate of the run's authority whose key is no member's), "expired" (a member's
            certificate that is over), "not_allowed" (what cannot be read, or is of another run),
            "too_many" (over the number that one member may have open) and "full" (no room for its
            link; it comes again). A connection without a
            certificate of the authority ends before anybody is known, and leaves no event.
    """

    def __init__(
        self,
        roster: Roster,
        name: str,
        identity: Identity | None,
        *,
        lease: float = 10.0,
        proxy: str = "",
        log: Callable[..., None] = lambda event, **details: None,
    ) -> None:
        self.name, self._log, self._identity, self._lease = name, log, identity, lease
        self._proxy = proxy
        self.turned_away: Counter[str] = Counter()
        self._refusals: dict[tuple[str, str], RateLimit] = {}
        self._serving: dict[str, set[asyncio.Task[Any]]] = {}
        self._ended: set[asyncio.Task[Any]] = set()  # that serve members which a new roster removes
        self._yielding: set[asyncio.Task[Any]] = set()  # whose links make room for others
        self._most_needed: int | None = None
        self._port = 0
        self.incoming = IncomingLinks(
            LEAST, lambda: list_connections(self._port), self._close_connection
        )
        self._take_roster(roster)
        raise_file_limit()
        # In order, and apart: the reader of the log may be slow.
        self._logger = ThreadPoolExecutor(1, "coterie-log")
        self._loop, self.clock = start_loop()

    def _take_roster(self, roster: Roster) -> None:
        self.roster = roster
        self._members = index_by_name(roster.members)
        self._by_key = {member.key: member.name for member in roster.members if member.key}
        self._bound_incoming(self._most_needed)

    def _bound_incoming(self, most: int | None) -> None:
        """Bound the links from others: twice the members, or twice the number that a run needs."""
        self._most_needed = most
        number = len(self._members) if most is None else min(most, len(self._members))
        self.incoming.most = LEAST + 2 * number

    def _close_connection(self, peer: str) -> None:
        def close() -> None:
            close_connections(self._port, {peer})
            self.incoming.note_closed(peer)

        # A question may be on its way: its answer is that it has to come again.
        self._loop.call_later(_TELL, close)

    async def _close_silent_connections(self) -> None:
        """Close connections on which nobody has called, now and then."""
        while True:
            await asyncio.sleep(_SWEEP)
            if silent := self.incoming.find_silent():
                close_connections(self._port, silent)

    def _run(self, work: Coroutine[Any, Any, _Answer]) -> _Answer:
        """Run something on the loop, and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _listen(
        self,
        host: str,
        port: int,
        handlers: Mapping[str, tuple[Handler, dict[str, type]]],
        *,
        calls: int = CALLS,
        window: int = LOOKAHEAD,
    ) -> int:
        """Listen at an address; return the port.

        Args:
            host: at which to listen.
            port: the port; 0 for any.
            handlers: what answers a call, and the fields of its question besides the run, by name.
            calls: that one member may have open.
            window: bytes of a call that are taken before it is read.
        """
        self._server = grpc.aio.server(
            options=[
                *_link_options(self._lease),
                # Another process must not share the port.
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", MAX_PART),
                # The library would raise what it takes before it is read to megabytes for each of
                # the calls of each link, as for a long way.
                ("grpc.http2.bdp_probe", 0),
                ("grpc.http2.lookahead_bytes", window),
                ("grpc.max_concurrent_streams", 8 * calls),
                ("grpc.max_allowed_incoming_connections", CONNECTIONS),
                # The library closes links that ping more often than this: the shortest interval
                # that `_link_options` asks for must be allowed.
                ("grpc.http2.min_ping_interval_without_data_ms", 500),
                # A stranger who opens a connection and says nothing holds it no longer than this.
                ("grpc.server_handshake_timeout_ms", 10_000),
            ],
            maximum_concurrent_rpcs=calls * (len(self._members) + 32),
        )
        made = {}
        for name, (answer, expected) in handlers.items():
            admitted = self._admit(answer, expected, calls)
            made[name] = grpc.stream_stream_rpc_method_handler(admitted)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, made),)
        )
        address = identities.join_address(host, port)
        try:
            if (own := self._identity) is None:
                found = self._server.add_insecure_port(address)
            else:
                key, certificate, ca = own.read_files()
                found = self._server.add_secure_port(
                    address, grpc.ssl_server_credentials([(key, certificate)], ca, True)
                )
        except RuntimeError as error:
            obstacle = identities.find_obstacle(host, port)
            why = f"it {obstacle}" if obstacle else escape_text(error)
            raise TransportError(f"cannot listen on {address}: {why}") from None
        await self._server.start()
        self._port = found
        self._silence = asyncio.create_task(self._close_silent_connections())
        return found

    async def _stop_server(self, grace: float) -> None:
        """Answer nothing more, and end what is being answered."""
        self._silence.cancel()
        await self._server.stop(grace)

    # ------------------------------------------------------------------ dialing

    def find_proxy(self, member: Member) -> str | None:
        """Return the proxy by which a member is dialed; None where it is dialed directly."""
        # A member that only dials out is reached at a door on this machine.
        if member.is_outbound:
            return None
        return find_proxy(self._proxy, member.host_and_port[0])

    def dial(self, member: Member, at: tuple[str, int], wait: float) -> grpc.aio.Channel:
        """Return a connection to somebody on the roster, whose certificate must have its key.

        Args:
            member: the entry of the roster.
            at: host and port to dial.
            wait: the most seconds between two dials.
        """
        host, port = at
        options: list[tuple[str, Any]] = [
            *_link_options(self._lease),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.max_receive_message_length", MAX_FRAME),
            # A new link begins without the pauses of an old one.
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.initial_reconnect_backoff_ms", 500),
            # The least time between two dials is also the time for which one is tried.
            ("grpc.min_reconnect_backoff_ms", 5000),
            ("grpc.max_reconnect_backoff_ms", int(1000 * wait)),
        ]
        # Without it the library would take a proxy of the environment unasked.
        options.append(
            ("grpc.enable_http_proxy", int((proxy := self.find_proxy(member)) is not None))
        )
        if proxy is not None:
            options.append(("grpc.http_proxy", proxy))
        target = f"ipv6:[{host}]:{port}" if ":" in host else f"dns:///{host}:{port}"
        if (own := self._identity) is None:
            return grpc.aio.insecure_channel(target, options)
        key, certificate, ca = own.read_files()
        if member.subject:
            name = identities.key_host(member.subject)
            options.append(("grpc.ssl_target_name_override", name))
        credentials = grpc.ssl_channel_credentials(ca, key, certificate)
        return grpc.aio.secure_channel(target, credentials, options)

    def encode(self, question: Mapping[str, Any]) -> bytes:
        """Return a question of this run as it travels."""
        return canonical_json({"run": self.roster.run, **question})

    async def _check_run(self, run: str, context: Any) -> bool:
        """Whether a question is of a run that is known here; may end the call instead."""
        return run == self.roster.run

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with a question: without certificates a member is who it says that it is."""
        return (("coterie-name", self.name),) if self._identity is None else ()

    # ------------------------------------------------------------------ who asks, and what

    def _admit(
        self, answer: Handler, expected: Mapping[str, type], calls: int
    ) -> Callable[[Any, Any], Coroutine[Any, Any, None]]:
        """Return a handler that lets a member's well-formed question through, and no other."""

        async def handle(requests: AsyncIterator[bytes], context: Any) -> None:
            # Who it is comes first: nothing of anybody else is waited for or read.
            asker = await self._identify(context)
            open_, task = self._serving.setdefault(asker, set()), asyncio.current_task()
            assert task is not None  # of this handler

            def turn_away() -> None:
                self._yielding.add(task)
                task.cancel()

            peer = context.peer()
            # A call that is refused says as well whose its link is.
            visit = self.incoming.open_visit(asker, peer, turn_away)
            if visit is None:
                self._count_refusal("full", asker, f"{len(self.incoming)} links are open here")
                await abort_missing(context, Missing("full"))
            if len(open_) >= calls:
                self.incoming.end_visit(peer, visit)
                self._count_refusal("too_many", asker, f"more than {calls} questions at once")
                await abort_missing(context, Missing("busy"))
            open_.add(task)
            try:
                question = await self._read_question(asker, requests, expected, context)
                # From here on an answer may be on the way.
                visit.is_waiting = False
                if question is None:
                    await abort_missing(context, Missing("forbidden"))
                self._note_contact(asker)
                question.visit = visit
                await answer(question, context)
            except asyncio.CancelledError:
                if task in self._yielding:
                    await abort_missing(context, Missing("full"))
                if task not in self._ended:
                    raise
                # The library would leave a call that this node ends without an end.
                await self._abort_stranger(context)
            finally:
                self.incoming.end_visit(peer, visit)
                open_.discard(task)
                self._ended.discard(task)
                self._yielding.discard(task)

        return handle

    async def _identify(self, context: Any) -> str:
        """Return the member that asks, by the certificate of its connection; refuse others."""
        if self._identity is None:
            name = dict(context.invocation_metadata() or ()).get("coterie-name")
            if isinstance(name, str) and name in self._members:
                return name
            self._count_refusal("not_on_roster", "", "a question under no member's name")
        else:
            pem = context.auth_context().get("x509_pem_cert", [b""])[0]
            key, end = read_certificate(pem)
            name = self._by_key.get(key)
            if name is not None and end >= time.time():
                return name
            if name is not None:
                self._count_refusal("expired", name, OVER)
            else:
                self._count_refusal(
                    "not_on_roster",
                    "",
                    f"its certificate is valid, its key {key[:16]}... is no member's",
                )
        return await self._abort_stranger(context)

    async def _abort_stranger(self, context: Any) -> NoReturn:
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, "not a member by the newest roster")
        raise AssertionError("the library raises where a call is aborted")

    async def _read_question(
        self, asker: str, requests: AsyncIterator[bytes], expected: Mapping[str, type], context: Any
    ) -> Question | None:
        try:
            async with asyncio.timeout(_LISTEN):
                body = await anext(requests)
            fields = parse_fields(body, {"run": str, **expected})
            if not await self._check_run(fields["run"], context):
                raise Refused("run", "it is of another run")
            return Question(asker, fields, requests)
        except Refused as refused:
            why = escape_text(refused)
        except (TimeoutError, StopAsyncIteration):
            why = f"no question of at most {MAX_QUESTION} bytes came"
        self._count_refusal("not_allowed", asker, why)
        return None

    def _note_contact(self, peer: str) -> None:
        """Note that a member has asked something."""

    def start_task(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something on the loop later; the loop itself holds tasks weakly only."""
        task = asyncio.create_task(work)
        self._serving.setdefault(self.name, set()).add(task)
        task.add_done_callback(self._serving[self.name].discard)

    def _end_calls(self, before: Mapping[str, Member]) -> list[str]:
        """End open calls of members that the newest roster removes or gives another key.

        Returns their names.
        """
        gone = []
        for peer, member in before.items():
            now = self._members.get(peer)
            if now is None or now.key != member.key:
                gone.append(peer)
                for task in list(self._serving.get(peer, ())):
                    self._ended.add(task)
                    task.cancel()
        return gone

    # ------------------------------------------------------------------ events

    def log_event(self, event: str, **details: Any) -> None:
        """Log an event, in order and without waiting for who reads the log."""
        with suppress(RuntimeError):  # it leaves, and everything is logged
            self._logger.submit(self._log, event, **details)

    def _count_refusal(self, reason: str, peer: str, text: str) -> None:
        """Count a refusal, and log it if none of its kind was logged lately."""
        self.turned_away[reason] += 1
        suppressed = self._refusals.setdefault((reason, peer), RateLimit(1, _PAUSE))()
        if suppressed is not None:
            self._log_refusal(reason, peer, text, suppressed + 1)

    def _log_refusal(self, reason: str, peer: str, text: str, times: int) -> None:
        about = {"reason": reason, **({"peer": peer} if peer else {}), "text": text, "times": times}
        self.log_event("turned_away", level="warning", **about)

    def prometheus_samples(self) -> list[Sample]:
        """Return numbers for Prometheus."""
        name, text, samples = "coterie_turned_away_total", "questions turned away", list[Sample]()
        for reason, number in sorted(self.turned_away.items()):
            samples.append((name, text, {"reason": reason}, number))
        return samples


def _link_options(lease: float) -> list[tuple[str, int]]:
    # Half of the lease until a silent link is pinged, and half of it for the answer to come: a
    # member that is gone is noticed within one lease. Servers allow two pings a second at most.
    half = max(500, int(lease * 500))
    return [
        ("grpc.keepalive_time_ms", half),
        ("grpc.keepalive_timeout_ms", half),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


def parse_fields(body: bytes, expected: Mapping[str, type]) -> dict[str, Any]:
    """Read a JSON object of exactly these fields.

    Raises:
        Refused: when it is another.
    """
    if len(body) > MAX_QUESTION:
        raise Refused("question", f"{len(body)} bytes; expected at most {MAX_QUESTION}")
    document = parse_strict_json(body, "question")
    if not isinstance(document, dict) or document.keys() != expected.keys():
        raise Refused("question", f"expected an object with {', '.join(sorted(expected))}")
    for name, kind in expected.items():
        # By the exact type: a bool is an int. A whole number of seconds may come without a point.
        if type(document[name]) is not kind and not (kind is float and type(document[name]) is int):
            raise Refused("question", f"{name} is not of type {kind.__name__}")
        if kind in (int, float) and not -1 <= document[name] < 1 << 53:
            raise Refused("question", f"{name} is out of range")
    return document


async def abort_missing(context: Any, missing: Missing) -> NoReturn:
    """End a call with the reason why there is no message."""
    text = json.dumps({"code": missing.reason, "round": missing.round}, separators=(",", ":"))
    await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)
    raise AssertionError("the library raises where a call is aborted")


_STATUS = {
    grpc.StatusCode.DEADLINE_EXCEEDED: "timeout",
    grpc.StatusCode.PERMISSION_DENIED: "forbidden",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "busy",
}


def read_error(error: grpc.aio.AioRpcError) -> Missing:
    """Return why a question has no answer: one of our own codes, or what the library says."""
    details = error.details() or ""
    if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
        with suppress(Refused):
            document = parse_strict_json(details.encode()[:MAX_QUESTION], "error")
            document = document if isinstance(document, dict) else {}
            code, round = document.get("code"), document.get("round")
            if isinstance(code, str) and code in REASONS:
                fits = type(round) is int and -2 <= round < 1 << 31
                return Missing(code, round if fits else None)
    reason = _STATUS.get(error.code(), "unreachable")
    return Missing(reason, None, f"{error.code().name}: {escape_text(details)}")
