"""The transport between machines: gRPC over HTTP/2 with mutual TLS, driven by the roster.

A node listens at its address and dials those members that it asks. Who asks is known from the
certificate of the connection, by its key, at every call: a member that was removed, or whose key
was replaced, is refused on the link that it has. Who answers is known before anything is sent: the
certificate must name the member's key. A message travels as a stream of chunks, each bounded; every
other answer is bounded too. All calls of all nodes of a program run on one event loop in one
thread, so that a question that waits for its message costs no thread.
"""

import asyncio
import json
import math
import ssl
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio
from cryptography import x509

from coterie.errors import TransportError
from coterie.net import identity as identities
from coterie.net.awake import AwakeClock
from coterie.net.identity import Identity, split_address
from coterie.net.log import RateLimit, Sample
from coterie.net.outbox import NO_LAST, REASONS, Missing, Outbox
from coterie.net.payload import Refused, escape_text, parse_strict_json
from coterie.net.roster import Member, Roster
from coterie.net.transport import WAIT, Delivery, HeadSource
from coterie.net.wire import (
    CHUNK,
    KINDS,
    MAX_HEAD,
    MAX_MANIFEST,
    MAX_ROSTER,
    SIGNATURE,
    VERSION,
    Address,
    Assembler,
    Expectation,
    Parcel,
    canonical_json,
    read_frame,
    write_frame,
)

SERVICE = f"coterie.v{VERSION}"
MAX_QUESTION = 1024  # bytes
# Bytes of one HTTP/2 message; the library refuses a larger one before this program sees it.
_MAX_FRAME = CHUNK + MAX_MANIFEST + SIGNATURE + 64
_LOOKAHEAD = 4 * MAX_QUESTION  # bytes of a call that are taken before it is read
_CALLS = 32  # that one member may have open at a node, of all kinds
_LISTEN = 5.0  # seconds in which a question must have come
_LEAVE = 5.0  # seconds for answers that are being sent when a node leaves
_CONNECT = 5.0  # seconds for a connection to come up
_IDLE = 60.0  # seconds after which a link that is not used is closed
_PAUSE = 10.0  # seconds between two events of the same refusal: nobody fills the log from outside
# how often a member's coming and going is logged, in how many seconds
_CHANGES, _WITHIN = 20, 200.0
_ENDED = "its certificate is over; it needs a new one"
_LOOPBACK = ("127.", "::1", "localhost")
_READY, _IDLING, _FAILED, _OVER = (
    grpc.ChannelConnectivity.READY,
    grpc.ChannelConnectivity.IDLE,
    grpc.ChannelConnectivity.TRANSIENT_FAILURE,
    grpc.ChannelConnectivity.SHUTDOWN,
)
_Answer = TypeVar("_Answer")


@lru_cache(1)
def _start_loop() -> tuple[asyncio.AbstractEventLoop, AwakeClock]:
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


def check_loopback(roster: Roster, listen: str | None = None) -> None:
    """Check that all addresses are on loopback, as a run without TLS requires.

    Raises:
        TransportError: when a member has another address.
    """
    for address in [*(m.address for m in roster.members), *([listen] if listen else [])]:
        if not split_address(address)[0].startswith(_LOOPBACK):
            raise TransportError(
                f"{address} is not a loopback address; without TLS only those are allowed"
            )


@dataclass
class _Link:
    """The connection to a member that this node dials.

    Args:
        channel: the connection, which the library opens again when it is lost.
        member: the member as it was dialed.
        used: when it was used last.
        calls: questions that are open on it.
        missing: why the member cannot be reached now, if it could not be dialed.
        inspected: when it was looked at who answers there.
    """

    channel: grpc.aio.Channel
    member: Member
    used: float
    calls: int = 0
    missing: Missing | None = None
    watch: asyncio.Task[None] | None = None
    inspected: float = -math.inf


class _Limit:
    """Ends its block after a deadline, or a silence, by a clock that can stand still.

    Args:
        clock: the clock.
        end: when the whole is over.
        patience: seconds without any part of it; until the end when None.

    Raises:
        TimeoutError: at the end of the block.
    """

    def __init__(self, clock: AwakeClock, end: float, patience: float | None) -> None:
        self._clock, self._end = clock, end
        self._patience = math.inf if patience is None else patience
        self._limit, self._loop = asyncio.timeout(None), asyncio.get_running_loop()
        self.note_part()

    def note_part(self) -> None:
        """Note that a part has come."""
        self._until = min(self._end, self._clock() + self._patience)

    async def __aenter__(self) -> "_Limit":
        await self._limit.__aenter__()
        self._timer = self._loop.call_later(0.0, self._look)
        return self

    def _look(self) -> None:
        left = self._until - self._clock()
        if left > 0:
            self._timer = self._loop.call_later(left, self._look)
        else:
            self._limit.reschedule(self._loop.time())

    async def __aexit__(self, *error: Any) -> bool | None:
        self._timer.cancel()
        return await self._limit.__aexit__(*error)


@dataclass
class _Away:
    """A member at whose address nobody listens: until when that is not tried again, and why."""

    until: float
    pause: float
    missing: Missing


@dataclass
class _Question:
    """A question of another member, whose certificate has said who it is."""

    asker: str
    fields: Mapping[str, Any] = field(default_factory=dict)


class GrpcTransport:
    """The transport of one node.

    Always close it (it is a context manager): the others learn at once that it has left.

    Args:
        roster: the members.
        name: this node's.
        identity: its key and certificate; None for plain TCP, which is refused beyond loopback.
        listen: host:port to listen on instead of the roster's address (behind a firewall that
            forwards).
        lease: seconds without a sign of life after which a link counts as lost: 10 over long
            distances, 3 in one building.
        log: receives events (see `log.Log`).

    Attributes:
        turned_away: numbers of questions that were refused, by reason: "not_on_roster" (a
            certificate of the run's authority whose key is no member's), "expired" (a member's
            certificate that is over), "not_allowed" (what cannot be read, or is of another run) and
            "too_many" (over the number that one member may have open). Also dials that end because
            a member's certificate is over, or because somebody at its address has another key than
            its own ("wrong_key"). A connection without a certificate of the authority ends before
            anybody is known, and leaves no event.
        last_questions: when each other member has put its newest question here, by the monotonic
            clock.
    """

    def __init__(
        self,
        roster: Roster,
        name: str,
        identity: Identity | None,
        *,
        listen: str | None = None,
        lease: float = 10.0,
        log: Callable[..., None] = lambda event, **details: None,
    ) -> None:
        if identity is None:
            check_loopback(roster, listen)
        elif identity.name != name:
            raise TransportError(f"the certificate is {identity.name}'s; this node is {name}")
        self.name, self._log, self._identity = name, log, identity
        self._address, self._lease = listen or roster.member(name).address, lease
        self._head: HeadSource | None = None
        self._sealed: Callable[[], bytes] | None = None
        self.turned_away: Counter[str] = Counter()
        self.last_questions: dict[str, float] = {}
        self._refusals: dict[tuple[str, str], RateLimit] = {}
        self._alive: set[str] = set()
        self._known: set[str] = set()  # seen alive before, and not known to have left
        self._changes: dict[str, RateLimit] = {}
        self._links: dict[str, _Link] = {}
        self._away: dict[str, _Away] = {}
        self._serving: dict[str, set[asyncio.Task[Any]]] = {}
        self._ended: set[asyncio.Task[Any]] = set()  # that serve members which a new roster removes
        self._asking: set[Future[Any]] = set()
        self._lock, self._closed, self._announced = threading.Lock(), False, False
        self._take_roster(roster)
        raise_file_limit()
        self.outbox = Outbox()
        # What answers need of this node: signatures, and lines of the audit log.
        self._workers = ThreadPoolExecutor(16, "coterie-answer")
        # In order, and apart: the reader of the log may be slow.
        self._logger = ThreadPoolExecutor(1, "coterie-log")
        self._loop, self.clock = _start_loop()
        try:
            self._run(self._open())
        except BaseException:
            self._shut_down()
            raise

    def _take_roster(self, roster: Roster) -> None:
        self.roster = roster
        self._members = {member.name: member for member in roster.members}
        self._by_key = {member.key: member.name for member in roster.members if member.key}

    def _run(self, work: Coroutine[Any, Any, _Answer]) -> _Answer:
        """Run something on the loop, and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _open(self) -> None:
        members = len(self.roster.members)
        self._server = grpc.aio.server(
            options=[
                *self._link_options(),
                # Another process must not share the port.
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", MAX_QUESTION),
                # What is taken of a call before it is read: the library would raise it to megabytes
                # for each of the calls of each link, as for a long way, and questions are short.
                ("grpc.http2.bdp_probe", 0),
                ("grpc.http2.lookahead_bytes", _LOOKAHEAD),
                ("grpc.max_concurrent_streams", 8 * _CALLS),
                ("grpc.http2.min_ping_interval_without_data_ms", 500),
                ("grpc.server_handshake_timeout_ms", 10_000),
            ],
            maximum_concurrent_rpcs=_CALLS * (members + 32),
        )
        handlers = {
            name: grpc.stream_stream_rpc_method_handler(self._admit(answer, expected))
            for name, answer, expected in (
                ("Message", self._answer_message, _MESSAGE),
                ("Head", self._answer_head, {"nonce": str}),
                ("Roster", self._answer_roster, {}),
                ("Presence", self._answer_presence, {"here": bool}),
            )
        }
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, handlers),)
        )
        host, port = split_address(self._address)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if (own := self._identity) is None:
                self._server.add_insecure_port(address)
            else:
                key, certificate, ca = own.read_files()
                self._server.add_secure_port(
                    address, grpc.ssl_server_credentials([(key, certificate)], ca, True)
                )
        except RuntimeError as error:
            raise TransportError(_explain_bind(host, port, error)) from None
        await self._server.start()
        self._sweeper = asyncio.create_task(self._close_unused_links())

    def _link_options(self) -> list[tuple[str, int]]:
        half = max(500, int(self._lease * 500))
        return [
            ("grpc.keepalive_time_ms", half),
            ("grpc.keepalive_timeout_ms", half),
            ("grpc.keepalive_permit_without_calls", 1),
        ]

    def __enter__(self) -> "GrpcTransport":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ links

    def _link_to(self, peer: str) -> _Link | None:
        """Return the link to a member; dial it when there is none. None when it is no member."""
        member = self._members.get(peer)
        if member is None or self._closed:
            return None
        link = self._links.get(peer)
        if link is None:
            link = self._links[peer] = _Link(self._dial(member), member, time.monotonic())
            link.watch = asyncio.create_task(self._watch(link))
        return link

    async def _find_link(self, peer: str, seconds: float) -> _Link | Missing:
        """Return the link to a member; where there is none, dial it if anybody listens there.

        A channel to nobody costs milliseconds of processor time and a connection that is refused
        next to none: a node may wait for a thousand members.
        """
        member = self._members.get(peer)
        if peer not in self._links and member is not None:
            host, port = split_address(member.address)
            try:
                async with asyncio.timeout(seconds):
                    found, _ = await self._loop.create_connection(asyncio.Protocol, host, port)
                found.close()
                self._away.pop(peer, None)
            except (OSError, TimeoutError) as error:
                before = self._away.get(peer)
                longest = self._longest_pause()
                pause = longest / 8 if before is None else min(2 * before.pause, longest)
                missing = Missing("unreachable", None, escape_text(error))
                self._away[peer] = _Away(time.monotonic() + pause, pause, missing)
                return missing
        return self._link_to(peer) or Missing("removed")

    async def _await_link(self, link: _Link, seconds: float) -> bool:
        """Wait so long for a link to come up; return whether it can be used.

        Between far places this takes several ways there and back, and is no silence of the member.
        """
        channel, ended = link.channel, (_READY, _FAILED, _OVER)
        with suppress(TimeoutError, grpc.aio.UsageError):  # it is closed while this waits
            async with asyncio.timeout(seconds):
                while (state := channel.get_state(try_to_connect=True)) not in ended:
                    await channel.wait_for_state_change(state)
        return channel.get_state() is not _OVER

    def _longest_pause(self) -> float:
        """Return the most seconds between two dials: members that are away cost little in all."""
        return max(5.0, 0.1 * len(self._members))  # some ten dials a second

    def _dial(self, member: Member) -> grpc.aio.Channel:
        host, port = split_address(member.address)
        target = f"ipv6:[{host}]:{port}" if ":" in host else f"dns:///{host}:{port}"
        options: list[tuple[str, Any]] = [
            *self._link_options(),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.max_receive_message_length", _MAX_FRAME),
            ("grpc.enable_http_proxy", 0),
            # A new link begins without the pauses of an old one.
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.initial_reconnect_backoff_ms", 500),
            # The least time between two dials is also the time for which one is tried.
            ("grpc.min_reconnect_backoff_ms", 5000),
            ("grpc.max_reconnect_backoff_ms", int(1000 * self._longest_pause())),
        ]
        if (own := self._identity) is None:
            return grpc.aio.insecure_channel(target, options)
        key, certificate, ca = own.read_files()
        if member.subject:
            name = identities.key_host(member.subject)
            options.append(("grpc.ssl_target_name_override", name))
        credentials = grpc.ssl_channel_credentials(ca, key, certificate)
        return grpc.aio.secure_channel(target, credentials, options)

    async def _watch(self, link: _Link) -> None:
        """Note when a link comes up or is lost; keep it up."""
        channel, peer = link.channel, link.member.name
        state = channel.get_state(try_to_connect=True)
        while state is not _OVER:
            if state is _READY:
                link.missing = None
                await self._exchange_presence(link, self._announced)
            elif state is _FAILED:
                link.missing = link.missing or Missing("unreachable")
                self._note_presence(peer, False)
                if self._identity is not None and time.monotonic() - link.inspected >= _PAUSE:
                    link.inspected = time.monotonic()
                    self._start_task(self._inspect(link.member))
            elif state is _IDLING:
                # It was lost: whether the member is there shows when it is dialed again.
                channel.get_state(try_to_connect=True)
            await channel.wait_for_state_change(state)
            state = channel.get_state()

    async def _inspect(self, member: Member) -> None:
        """Log it when a dial ends for the certificate that is shown at a member's address.

        The library says no more than that there is no connection.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        # Anybody is let show a certificate, and is sent nothing.
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        try:
            async with asyncio.timeout(_CONNECT):
                _, writer = await asyncio.open_connection(
                    *split_address(member.address), ssl=context
                )
            shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
            writer.transport.abort()
            key, end = read_certificate(ssl.DER_cert_to_PEM_cert(shown).encode())
        except (OSError, TimeoutError, ValueError):  # nobody, or nobody who speaks TLS
            return
        if key != member.key:
            why = "somebody answers at its address, with another key than the roster has for it"
            self._count_refusal("wrong_key", member.name, why)
        elif end < time.time():
            self._count_refusal("expired", member.name, _ENDED)

    async def _exchange_presence(self, link: _Link, here: bool, wait: float = 2.0) -> None:
        """Send a member whether this node takes part; its answer is whether that one does."""
        # One message and no stream, so that the answer is bounded.
        ask = link.channel.unary_unary(f"/{SERVICE}/Presence")
        with suppress(grpc.aio.AioRpcError, Refused):
            answer = await ask(self._encode({"here": here}), timeout=wait, metadata=self._metadata)
            there = _parse_fields(answer, {"here": bool})["here"]
            if not self._closed:
                self._note_presence(link.member.name, there)

    async def _close_unused_links(self) -> None:
        while True:
            await asyncio.sleep(_IDLE / 4)
            for peer, link in list(self._links.items()):
                unused = not link.calls and time.monotonic() - link.used > _IDLE
                # One that was here and is not is dialed until it is back.
                if unused and (peer in self._alive or peer not in self._known):
                    await self._close_link(peer)

    async def _close_link(self, peer: str) -> None:
        link = self._links.pop(peer, None)
        if link is not None:
            if link.watch is not None:
                link.watch.cancel()
            await link.channel.close()

    async def _redial(self, peer: str) -> None:
        await self._close_link(peer)
        self._link_to(peer)

    def _note_contact(self, peer: str) -> None:
        """Note that a member has asked something: it can be dialed now, if it could not before."""
        self._away.pop(peer, None)
        if peer != self.name:
            self.last_questions[peer] = time.monotonic()
        link = self._links.get(peer)
        if link is not None and not link.calls and link.channel.get_state() is _FAILED:
            self._start_task(self._redial(peer))

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something on the loop later; the loop itself holds tasks weakly only."""
        task = asyncio.create_task(work)
        self._serving.setdefault(self.name, set()).add(task)
        task.add_done_callback(self._serving[self.name].discard)

    def _note_presence(self, peer: str, there: bool, *, left: bool = False) -> None:
        """Note that a member takes part, or that it does not any more."""
        with self._lock:
            # A node can ask at its own address, and is no peer of its own.
            known = peer in self._members and peer != self.name
            if not known or (peer in self._alive) == there:
                return
            if there:
                self._alive.add(peer)
                self._known.add(peer)
            else:
                self._alive.discard(peer)
                self._known -= {peer} if left else set()
            suppressed = self._changes.setdefault(peer, RateLimit(_CHANGES, _WITHIN))()
        if suppressed is not None:
            details = {"untold": suppressed} if suppressed else {}
            self._log_event("peer_up" if there else "peer_down", peer=peer, **details)

    def alive_members(self) -> frozenset[str]:
        """Return the members that said, or showed, that they take part: a hint only."""
        with self._lock:
            return frozenset(self._alive)

    def lost_members(self) -> frozenset[str]:
        """Return the members that took part, are not here, and did not say that they leave."""
        with self._lock:
            return frozenset(self._known - self._alive)

    def use_roster(self, roster: Roster) -> None:
        """Continue with another roster: links and questions that it does not allow end.

        What was published stays.
        """
        self._run(self._use_roster(roster))

    async def _use_roster(self, roster: Roster) -> None:
        before = self._members
        self._take_roster(roster)
        self._away.clear()  # addresses may have changed
        for peer, link in list(self._links.items()):
            if self._members.get(peer) != link.member:
                await self._redial(peer)
        for peer, member in before.items():
            now = self._members.get(peer)
            if now is None or now.key != member.key:
                with self._lock:
                    self._alive.discard(peer)
                    self._known.discard(peer)
                for task in list(self._serving.get(peer, ())):
                    self._ended.add(task)
                    task.cancel()

    # ------------------------------------------------------------------ asking

    def fetch(
        self, peer: str, expect: Expectation, deadline: float, patience: float | None = None
    ) -> Delivery | Missing:
        """Ask a member for a message, and check it: see `Transport.fetch`."""
        started, at = self.clock(), expect.address
        patience = deadline if patience is None else min(deadline, patience)
        assembler, size, first, asked = Assembler(expect), 0, 0.0, started

        def begin() -> None:
            nonlocal asked
            asked = self.clock()

        def take(frame: bytes) -> None:
            nonlocal size, first
            first = first or self.clock() - asked
            attachment, chunk = read_frame(frame)
            size += len(attachment) + len(chunk)
            assembler.feed(attachment, chunk)

        question = {
            "kind": at.kind,
            "round": at.round,
            "exchange": at.exchange,
            "client": at.client,
            # The peer gives up before this node does, so that its reason still arrives.
            "wait": round(WAIT * patience, 3),
        }
        try:
            missing = self._ask(peer, "Message", question, deadline, take, patience, begin)
            if missing is not None:
                return missing
            tensors = assembler.finish()
        except Refused as wrong:
            self._log_event(
                "refused",
                level="warning",
                peer=peer,
                code=wrong.code,
                text=escape_text(wrong),
                about=str(at),
            )
            return Missing(f"refused:{wrong.code}", None, escape_text(wrong))
        assert assembler.manifest is not None
        self._note_presence(peer, True)
        seconds = self.clock() - started
        return Delivery(assembler.manifest, tensors, size, seconds, assembler.sealed, first)

    def ask_head(self, peer: str, nonce: str, deadline: float) -> bytes | Missing:
        """Ask a member how it is."""
        return self._ask_bytes(peer, "Head", {"nonce": nonce}, deadline, MAX_HEAD + SIGNATURE)

    def ask_roster(self, peer: str, deadline: float) -> bytes | Missing:
        """Ask a member for its roster."""
        return self._ask_bytes(peer, "Roster", {}, deadline, MAX_ROSTER + SIGNATURE)

    def _ask_bytes(
        self, peer: str, method: str, question: Mapping[str, Any], deadline: float, limit: int
    ) -> bytes | Missing:
        """Ask for an answer of at most `limit` bytes."""
        answer = bytearray()

        def take(part: bytes) -> None:
            if len(answer) + len(part) > limit:
                raise Refused("size", f"over {limit} bytes; expected at most those")
            answer.extend(part)

        try:
            missing = self._ask(peer, method, question, deadline, take)
        except Refused as wrong:
            return Missing(f"refused:{wrong.code}", None, escape_text(wrong))
        return bytes(answer) if missing is None else missing

    def _ask(
        self,
        peer: str,
        method: str,
        question: Mapping[str, Any],
        deadline: float,
        take: Callable[[bytes], None],
        patience: float | None = None,
        begin: Callable[[], None] = lambda: None,
    ) -> Missing | None:
        """Ask a member, and give the parts of its answer to `take`; return why there is none."""
        known, away = self._links.get(peer), self._away.get(peer)
        if known is None and away is not None and time.monotonic() < away.until:
            return away.missing
        if known is not None and known.missing is not None:
            # The library dials it again; hundreds of such members must cost next to nothing.
            known.used = time.monotonic()
            return known.missing
        work = self._ask_on_loop(peer, method, question, deadline, take, patience, begin)
        with self._lock:
            if self._closed:
                work.close()
                return Missing("closing")
            asked = asyncio.run_coroutine_threadsafe(work, self._loop)
            self._asking.add(asked)
        try:
            return asked.result()
        except CancelledError:
            return Missing("closing")
        finally:
            with self._lock:
                self._asking.discard(asked)

    async def _ask_on_loop(
        self,
        peer: str,
        method: str,
        question: Mapping[str, Any],
        deadline: float,
        take: Callable[[bytes], None],
        patience: float | None,
        begin: Callable[[], None],
    ) -> Missing | None:
        # An address that swallows packets must not cost a round.
        wait = min(_CONNECT, deadline, deadline if patience is None else patience)
        end = self.clock() + deadline
        link = await self._find_link(peer, max(0.001, wait))
        if isinstance(link, Missing):
            return link
        if not await self._await_link(link, wait):
            return Missing("unreachable", None, "the link was closed")
        begin()
        link.calls += 1
        # Without the library's own time limit, which goes on while this node cannot work.
        call = link.channel.unary_stream(f"/{SERVICE}/{method}")(
            self._encode(question), metadata=self._metadata
        )
        try:
            empty = True
            async with _Limit(self.clock, end, patience) as limit:
                async for part in call:
                    empty = False
                    take(part)
                    limit.note_part()
            return Missing("unreachable", None, "an answer without any part") if empty else None
        except TimeoutError:
            # One that cannot be dialed is not slow.
            here = link.channel.get_state() is _READY
            return Missing("timeout" if here else "unreachable", None, "no part came for too long")
        except grpc.aio.AioRpcError as error:
            if "larger than max" in (error.details() or ""):
                raise Refused("size", f"a part of over {_MAX_FRAME} bytes") from None
            missing = _read_error(error)
            if link.channel.get_state() is _FAILED:
                link.missing = missing
            return missing
        finally:
            # An answer that is refused in the middle is not read to its end.
            call.cancel()
            link.calls -= 1
            link.used = time.monotonic()

    def _encode(self, question: Mapping[str, Any]) -> bytes:
        return canonical_json({"run": self.roster.run, **question})

    @property
    def _metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with a question: without certificates a member is who it says that it is."""
        return (("coterie-name", self.name),) if self._identity is None else ()

    # ------------------------------------------------------------------ answering

    def publish(self, address: Address, what: Parcel | Missing, *, to: str = "") -> None:
        """Store a message for later requests; from the first one on, this node counts as alive."""
        self.outbox.publish(address, what, to=to)
        self._announce()

    def publish_standing(
        self, address: Address, seal: Callable[[Address], Parcel], *, last: int = NO_LAST
    ) -> None:
        """Answer with one and the same message from a round on, to its last round."""
        self.outbox.publish_standing(address, seal, last=last)
        # A node that only answers probes does not take part yet.
        if address.kind != "probe":
            self._announce()

    def _announce(self) -> None:
        """Let the members with a link to this node know that it takes part."""
        if self._announced:
            return
        self._announced = True
        asyncio.run_coroutine_threadsafe(self._announce_to_all(True, 2.0), self._loop)

    async def _announce_to_all(self, here: bool, wait: float) -> None:
        links = [li for li in self._links.values() if li.channel.get_state() is _READY]
        await asyncio.gather(*(self._exchange_presence(link, here, wait) for link in links))

    def serve_head(self, head: HeadSource) -> None:
        """Register the handler of questions about this node's state."""
        self._head = head

    def serve_roster(self, sealed: Callable[[], bytes]) -> None:
        """Register the handler of questions for this node's roster."""
        self._sealed = sealed

    def _admit(
        self, answer: Callable[[_Question, Any], Coroutine[Any, Any, None]], expected: dict
    ) -> Callable[[Any, Any], Coroutine[Any, Any, None]]:
        """Return a handler that lets a member's well-formed question through, and no other."""

        async def handle(requests: AsyncIterator[bytes], context: Any) -> None:
            # Who it is comes first: nothing of anybody else is waited for or read.
            asker = await self._identify(context)
            open_, task = self._serving.setdefault(asker, set()), asyncio.current_task()
            assert task is not None  # of this handler
            if len(open_) >= _CALLS:
                self._count_refusal("too_many", asker, f"more than {_CALLS} questions at once")
                await _abort_missing(context, Missing("busy"))
            open_.add(task)
            try:
                question = await self._read_question(asker, requests, expected)
                if question is None:
                    await _abort_missing(context, Missing("forbidden"))
                self._note_contact(asker)
                await answer(question, context)
            except asyncio.CancelledError:
                if task not in self._ended:
                    raise
                # The library would leave a call that this node ends without an end.
                await self._abort_stranger(context)
            finally:
                open_.discard(task)
                self._ended.discard(task)

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
                self._count_refusal("expired", name, _ENDED)
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
        self, asker: str, requests: AsyncIterator[bytes], expected: Mapping[str, type]
    ) -> _Question | None:
        try:
            async with asyncio.timeout(_LISTEN):
                body = await anext(requests)
            fields = _parse_fields(body, {"run": str, **expected})
            if fields["run"] != self.roster.run:
                raise Refused("run", "it is of another run")
            return _Question(asker, fields)
        except Refused as refused:
            why = escape_text(refused)
        except (TimeoutError, StopAsyncIteration):
            why = f"no question of at most {MAX_QUESTION} bytes came"
        self._count_refusal("not_allowed", asker, why)
        return None

    async def _answer_presence(self, question: _Question, context: Any) -> None:
        here = question.fields["here"]
        self._note_presence(question.asker, here, left=not here)
        await context.write(canonical_json({"here": self._announced and not self._closed}))

    async def _answer_head(self, question: _Question, context: Any) -> None:
        nonce, head = question.fields["nonce"], self._head
        if head is None or not nonce.isalnum() or len(nonce) > 64 or not nonce.isascii():
            await _abort_missing(context, Missing("not_ready"))
        await self._write_parts(context, await self._run_in_worker(head, nonce))

    async def _answer_roster(self, question: _Question, context: Any) -> None:
        if self._sealed is None:
            await _abort_missing(context, Missing("not_ready"))
        await self._write_parts(context, await self._run_in_worker(self._sealed))

    async def _write_parts(self, context: Any, data: bytes) -> None:
        for at in range(0, len(data), CHUNK):
            await context.write(data[at : at + CHUNK])

    async def _answer_message(self, question: _Question, context: Any) -> None:
        found, asker = question.fields, question.asker
        address = Address(found["round"], found["exchange"], found["client"], found["kind"])
        fits = -1 <= address.round < 1 << 31 and 0 <= address.exchange < 1 << 16
        if found["kind"] not in KINDS or not fits or not -1 <= address.client < 1 << 31:
            self._count_refusal("not_allowed", asker, "a message of no such address")
            await _abort_missing(context, Missing("forbidden"))
        answer: asyncio.Future[Parcel | Missing] = self._loop.create_future()

        def give(what: Parcel | Missing) -> None:
            self._loop.call_soon_threadsafe(answer.set_result, what)

        await self._run_in_worker(self.outbox.ask, asker, address, float(found["wait"]), give)
        try:
            # Shielded: when the asker goes, the outbox still gives its answer once.
            what = await asyncio.shield(answer)
            if isinstance(what, Missing):
                await _abort_missing(context, what)
            for attachment, chunk in what.iterate_chunks():
                await context.write(write_frame(attachment, chunk))
        finally:
            answer.add_done_callback(lambda given: self._count_sent(asker, given.result()))

    def _count_sent(self, asker: str, what: Parcel | Missing) -> None:
        if isinstance(what, Parcel):
            self.outbox.note_sent(asker)

    async def _run_in_worker(self, job: Callable[..., _Answer], *arguments: Any) -> _Answer:
        """Do something that can take a while, in another thread."""
        try:
            return await self._loop.run_in_executor(self._workers, job, *arguments)
        except RuntimeError:  # shut down: this node leaves
            raise asyncio.CancelledError from None

    # ------------------------------------------------------------------ events

    def _log_event(self, event: str, **details: Any) -> None:
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
        self._log_event("turned_away", level="warning", **about)

    def prometheus_samples(self) -> list[Sample]:
        """Return numbers for Prometheus."""
        return [
            ("coterie_turned_away_total", "questions turned away", {"reason": reason}, number)
            for reason, number in sorted(self.turned_away.items())
        ]

    # ------------------------------------------------------------------ leaving

    def close(self) -> None:
        """Leave: let the others know, answer open questions, end what is being sent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            asking = list(self._asking)
        # Own questions end first. The outbox then answers what is open.
        for question in asking:
            question.cancel()
        self._run(self._announce_to_all(False, 1.0))
        self.outbox.close()
        self._run(self._leave())
        for (reason, peer), limit in self._refusals.items():
            if limit.suppressed:
                self._log_refusal(reason, peer, "as before", limit.suppressed)
        self._shut_down()

    async def _leave(self) -> None:
        self._sweeper.cancel()
        await self._server.stop(_LEAVE)
        for peer in list(self._links):
            await self._close_link(peer)

    def _shut_down(self) -> None:
        """End the threads."""
        self.outbox.close()
        self._workers.shutdown(wait=True, cancel_futures=True)
        self._logger.shutdown(wait=True)


_MESSAGE = {"kind": str, "round": int, "exchange": int, "client": int, "wait": float}


def _parse_fields(body: bytes, expected: Mapping[str, type]) -> dict[str, Any]:
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


async def _abort_missing(context: Any, missing: Missing) -> NoReturn:
    """End a call with the reason why there is no message."""
    text = json.dumps({"code": missing.reason, "round": missing.round}, separators=(",", ":"))
    await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)
    raise AssertionError("the library raises where a call is aborted")


_STATUS = {
    grpc.StatusCode.DEADLINE_EXCEEDED: "timeout",
    grpc.StatusCode.PERMISSION_DENIED: "forbidden",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "busy",
}


def _read_error(error: grpc.aio.AioRpcError) -> Missing:
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


def _explain_bind(host: str, port: int, error: Exception) -> str:
    """Say why this node cannot listen."""
    import errno
    import socket

    why = escape_text(error)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As a server does it: a port of a connection that just ended counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as found:
            why = str(found.strerror)
            if found.errno == errno.EADDRINUSE:
                why = "it is in use: this node runs already, or another program does"
    return f"cannot listen on {host}:{port}: {why}"
