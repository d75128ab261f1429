"""The transport between machines: gRPC over HTTP/2 with mutual TLS, driven by the roster.

A node listens at its address and dials those members that it asks. Who asks is known from the
certificate of the connection, by its key, at every call: a member that was removed, or whose key
was replaced, is refused on the link that it has. Who answers is known before anything is sent: the
certificate must name the member's key. A message travels as a stream of chunks, each bounded; every
other answer is bounded too. All calls of all nodes of a program run on one event loop in one
thread, so that a question that waits for its message costs no thread.
"""

import asyncio
import math
import random
import ssl
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio

from coterie._util.mappings import drop_keys
from coterie.errors import TransportError
from coterie.net.grpc_run import GrpcRun, Request
from coterie.net.grpc_server import (
    LOOKAHEAD,
    MAX_FRAME,
    OVER,
    SERVICE,
    WINDOW,
    GrpcServer,
    Question,
    abort_missing,
    parse_fields,
    read_certificate,
    read_error,
)
from coterie.net.identity import Identity, split_address
from coterie.net.outbox import Missing
from coterie.net.payload import Refused, escape_text
from coterie.net.proxy import connect_in_thread
from coterie.net.roster import Member, Roster
from coterie.net.tunnel import Tunnels
from coterie.net.wire import (
    CHUNK,
    KINDS,
    NAME,
    NEWEST,
    Address,
    Parcel,
    canonical_json,
    write_frame,
)

_LEAVE = 5.0  # seconds for answers that are being sent when a node leaves
_CONNECT = 5.0  # seconds for a connection to come up
_AGAIN = 0.2  # seconds until a question is asked again whose way was lost
_RESTART = 30.0  # seconds in which a relay may be started again, and members come back to it
_IDLE = 60.0  # seconds after which a link that is not used is closed
_WORDS = 3  # times that a word is said without an answer in time
_INSPECT = 10.0  # seconds between two looks at who answers at an address
_LOOPBACK = ("127.", "::1", "localhost")
_READY, _IDLING, _FAILED, _OVER = (
    grpc.ChannelConnectivity.READY,
    grpc.ChannelConnectivity.IDLE,
    grpc.ChannelConnectivity.TRANSIENT_FAILURE,
    grpc.ChannelConnectivity.SHUTDOWN,
)
_Answer = TypeVar("_Answer")


def check_loopback(roster: Roster, listen: str | None = None) -> None:
    """Check that all addresses are on loopback, as a run without TLS requires.

    Raises:
        TransportError: when a member has another address.
    """
    entries = (*roster.members, *roster.relays)
    addresses = [one.address for one in entries if not one.is_outbound]
    for address in [*addresses, *([listen] if listen else [])]:
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
        watch: follows its state.
        stream: keeps a stream open on it, on which this node is called back.
        words: held while this node says whether it takes part.
    """

    channel: grpc.aio.Channel
    member: Member
    used: float
    calls: int = 0
    missing: Missing | None = None
    watch: asyncio.Task[None] | None = None
    stream: asyncio.Task[None] | None = None
    inspected: float = -math.inf
    words: asyncio.Lock = field(default_factory=asyncio.Lock)


class _Limit:
    """Ends its block after a deadline, or a silence, by a clock that can stand still.

    Args:
        clock: the clock.
        end: when the whole is over.
        patience: seconds without any part of it; until the end when None.

    Raises:
        TimeoutError: at the end of the block.
    """

    def __init__(self, clock: Callable[[], float], end: float, patience: float | None) -> None:
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


class GrpcTransport(GrpcRun, GrpcServer):
    """The transport of one node: that of its roster's run, and of the runs that it opens.

    Always close it (it is a context manager): the others learn at once that it has left.

    Args:
        roster: the members.
        name: this node's.
        identity: its key and certificate; None for plain TCP, which is refused beyond loopback.
        listen: host:port to listen on instead of the roster's address (behind a firewall that
            forwards).
        lease: seconds without a sign of life after which a link counts as lost: 10 over long
            distances, 3 in one building.
        proxy: by which it dials others; see `NetworkSettings.proxy`.
        log: receives events (see `log.Log`).

    Attributes:
        turned_away: as in `GrpcServer`. Also dials that end because a member's certificate is over,
            or because somebody at its address has another key than its own ("wrong_key").
    """

    def __init__(
        self,
        roster: Roster,
        name: str,
        identity: Identity | None,
        *,
        listen: str | None = None,
        lease: float = 10.0,
        proxy: str = "",
        log: Callable[..., None] = lambda event, **details: None,
    ) -> None:
        if identity is None:
            check_loopback(roster, listen)
        elif identity.name != name:
            raise TransportError(f"the certificate is {identity.name}'s; this node is {name}")
        GrpcServer.__init__(self, roster, name, identity, lease=lease, proxy=proxy, log=log)
        GrpcRun.__init__(self, self, roster)
        self._address = listen or roster.member(name).address
        self._is_outbound = roster.member(name).is_outbound
        self._runs: dict[str, GrpcRun] = {self.run: self}
        self._opens_runs = False
        self._answers: dict[str, Callable[..., bytes]] = {}
        self._is_over: Callable[[str], bool] = lambda run: False
        self._links: dict[str, _Link] = {}
        self._away: dict[str, _Away] = {}
        self._lost: set[str] = set()  # members to which the way alone is lost, as far as is known
        self._most_links: dict[str, int] = {}  # of the runs that say how many they need
        self._preferred: dict[str, frozenset[str]] = {}
        self._asking: dict[Future[Any], str] = {}  # the run of each open question
        # What answers need of this node: signatures, and lines of the audit log.
        self._workers = ThreadPoolExecutor(16, "coterie-answer")
        self._tunnels = Tunnels(self)
        try:
            self._run(self._open())
        except BaseException:
            self._shut_down()
            raise

    async def _open(self) -> None:
        host, port = ("127.0.0.1", 0) if self._is_outbound else split_address(self._address)
        found = await self._listen(
            host,
            port,
            {
                "Message": (self._answer_message, _MESSAGE),
                "Head": (self._answer_head, {"nonce": str}),
                "Roster": (self._answer_roster, {}),
                "Presence": (self._answer_presence, {"here": bool}),
                "Studies": (partial(self._answer_federation, "Studies"), {}),
                "Statement": (partial(self._answer_federation, "Statement"), {"digest": str}),
                "Attach": (self._tunnels.switchboard.answer_attach, {}),
                "Accept": (self._tunnels.switchboard.answer_accept, {"tunnel": str}),
            },
            # Answers of members that only dial out come in as what they send to this server.
            window=WINDOW if any(m.is_outbound for m in self.roster.members) else LOOKAHEAD,
        )
        self._tunnels.own_port = found if self._is_outbound else 0
        await self._tunnels.use_roster(self.roster)
        self._sweeper = asyncio.create_task(self._close_unused_links())

    def __enter__(self) -> "GrpcTransport":
        return self

    # ------------------------------------------------------------------ runs

    def open_run(self, roster: Roster) -> GrpcRun:
        """Take part in a run of some of the members, behind the same address and by the same links.

        Questions of runs that are not open are answered with "not_ready" from then on.

        Args:
            roster: the members of the run, with the keys of this transport's roster.
        """
        opened = GrpcRun(self, roster)
        with self._lock:
            self._opens_runs = True
            if self._closed or roster.run in self._runs:
                raise TransportError(f"run {roster.run} is open, or this node leaves")
            # Copied: the loop reads it in another thread.
            self._runs = {**self._runs, roster.run: opened}
        return opened

    def drop_run(self, run: GrpcRun) -> None:
        """Answer no more questions of a run, and end the questions that this node asks in it."""
        with self._lock:
            self._most_links.pop(run.run, None)
            self._preferred.pop(run.run, None)
            self.incoming.preferred = frozenset[str]().union(*self._preferred.values())
            self._bound_incoming(max(self._most_links.values(), default=None))
            if run is not self:
                self._runs = drop_keys(self._runs, {run.run})
            asking = [question for question, of in self._asking.items() if of == run.run]
        for question in asking:
            question.cancel()

    def allow_runs(
        self, statements: Mapping[str, Callable[..., bytes]], is_over: Callable[[str], bool]
    ) -> None:
        """Be the transport of a federation.

        Args:
            statements: what answers "Studies", and "Statement" with a digest.
            is_over: whether this node will not take part in a run again; called with its name.
        """
        self._opens_runs, self._answers, self._is_over = True, dict(statements), is_over

    async def _check_run(self, run: str, context: Any) -> bool:
        """Whether a question is of a run that is open here; of one that may come, ask again."""
        if run in self._runs:
            return True
        if self._opens_runs and NAME.fullmatch(run):
            await self._refuse_run(run, context)
        return False

    async def _refuse_run(self, run: str, context: Any) -> NoReturn:
        """Say whether who asks is to wait for this node in a run that is not open here."""
        # Who has left says so: "not_ready" is waited for until the deadline of the round.
        await abort_missing(context, Missing("closing" if self._is_over(run) else "not_ready"))

    async def _find_run(self, question: Question, context: Any) -> GrpcRun:
        """Return the run of a question, whose asker takes part in it."""
        run = self._runs.get(question.fields.get("run", self.run))
        if run is None:  # it was closed meanwhile
            await self._refuse_run(question.fields["run"], context)
        if not run.takes(question.asker):
            await abort_missing(context, Missing("forbidden"))
        run.note_question(question.asker)
        return run

    # ------------------------------------------------------------------ links

    async def _locate(self, member: Member) -> tuple[str, int]:
        """Return host and port at which a member is dialed."""
        if member.is_outbound:
            return "127.0.0.1", await self._tunnels.listen_for(member.name)
        return member.host_and_port

    async def _link_to(self, peer: str) -> _Link | None:
        """Return the link to a member; dial it when there is none. None when it is no member."""
        member = self._members.get(peer)
        if member is None or self._closed:
            return None
        try:
            at = await self._locate(member)
        except OSError:  # this node leaves
            return None
        link = self._links.get(peer)
        if link is None:
            channel = self.dial(member, at, self._longest_pause())
            link = self._links[peer] = _Link(channel, member, time.monotonic())
            link.watch = asyncio.create_task(self._watch(link))
            await self._close_oldest_links()
        return link

    def bound_links(self, run: str, most: int) -> None:
        """Keep at most so many links for a run: see `Transport.limit_links`."""
        self._most_links[run] = most
        self._bound_incoming(max(self._most_links.values()))

    def prefer_links(self, run: str, members: Collection[str]) -> None:
        """Close the links from these members last: see `Transport.prefer_members`."""
        with self._lock:
            self._preferred[run] = frozenset(members)
            self.incoming.preferred = frozenset[str]().union(*self._preferred.values())

    async def _close_oldest_links(self) -> None:
        """Close the links that were not used for longest, over the number that runs need."""
        if not self._most_links:
            return
        # By others than these this node is not called back, and not all are idle.
        idle = [link for link in self._links.values() if not link.calls and link.stream is None]
        idle.sort(key=lambda link: link.used)
        # The newest is that for which room is made.
        for link in idle[:-1][: max(0, len(self._links) - max(self._most_links.values()))]:
            await self._close_unless_used(link)

    async def _find_link(self, peer: str, seconds: float) -> _Link | Missing:
        """Return the link to a member; where there is none, dial it if anybody listens there.

        A channel to nobody costs milliseconds of processor time and a connection that is refused
        next to none: a node may wait for a thousand members.
        """
        member = self._members.get(peer)
        if peer not in self._links and member is not None:
            missing = await self._try_way(member, seconds)
            if missing is not None:
                before = self._away.get(peer)
                # Doubled up to the longest: who is away for a moment is found soon, and a member
                # that stays away costs next to nothing.
                first = max(0.6, 0.05 * self._num_dialed())
                pause = first if before is None else min(2 * before.pause, self._longest_pause())
                self._away[peer] = _Away(time.monotonic() + pause, pause, missing)
                return missing
            self._away.pop(peer, None)
        return await self._link_to(peer) or Missing("removed")

    async def _try_way(self, member: Member, seconds: float) -> Missing | None:
        """Return why a member cannot be dialed, or None: a connection, or a tunnel, is made."""
        try:
            async with asyncio.timeout(seconds):
                if member.is_outbound:
                    return await self._tunnels.prepare(member.name)
                # The library cannot say quickly that nobody listens, so a plain connection is tried
                # first.
                if (proxy := self.find_proxy(member)) is not None:
                    at = member.host_and_port
                    (await connect_in_thread(at, proxy, seconds)).close()
                    return None
                host, port = member.host_and_port
                found, _ = await self._loop.create_connection(asyncio.Protocol, host, port)
                found.close()
        except (OSError, TimeoutError) as error:
            return Missing("unreachable", None, escape_text(error))
        return None

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
        """Return the most seconds between two dials: members that are away cost little in all.

        A member that comes asks this node when it starts, and is dialed at once then.
        """
        return max(5.0, 0.2 * self._num_dialed())  # some five dials a second

    def _num_dialed(self) -> int:
        """Return about how many members this node dials again when they are away."""
        number = len(self._members)
        return min(number, max(self._most_links.values())) if self._most_links else number

    async def _watch(self, link: _Link) -> None:
        """Note when a link comes up or is lost; keep it up."""
        channel, peer = link.channel, link.member.name
        state, was_up = channel.get_state(try_to_connect=True), False
        while state is not _OVER:
            if state is _READY:
                link.missing, was_up = None, True
                self._attach_to(link)
                for run in self._runs.values():
                    await self._exchange_presence(link, run)
            elif state is _FAILED:
                link.missing = link.missing or Missing("unreachable")
                if not self._may_come_back(peer):
                    self._note_absence(peer)
                elif peer not in self._lost:
                    self._lost.add(peer)
                    self.start_task(self._await_way(peer))
                if self._identity is not None and time.monotonic() - link.inspected >= _INSPECT:
                    # The library dials again and again, and says only that it failed: a look says
                    # why, at times.
                    link.inspected = time.monotonic()
                    self.start_task(self._inspect(link.member))
            elif state is _IDLING and was_up and await self._was_let_go(link):
                self.start_task(self._close_unless_used(link))
            elif state is _IDLING:
                # It was lost: whether the member is there shows when it is dialed again.
                channel.get_state(try_to_connect=True)
            await channel.wait_for_state_change(state)
            state = channel.get_state()

    async def _was_let_go(self, link: _Link) -> bool:
        """Whether a link that nobody uses was lost, and its member listens.

        Then that member has closed it for others: a new one would make another go, for nothing.
        """
        if not self._most_links or link.calls or link.stream or link.member.is_outbound:
            return False
        return await self._try_way(link.member, _CONNECT) is None and not link.calls

    async def _await_way(self, peer: str) -> None:
        """Note that a member is not here, once more is lost than the way to it.

        While a relay is started again the member goes on, and is drawn and asked as before.
        """
        until = time.monotonic() + _RESTART
        try:
            while self._may_come_back(peer) and time.monotonic() < until:
                await asyncio.sleep(_AGAIN)
                link = self._links.get(peer)
                if link is not None and link.channel.get_state() is _READY:
                    return
        finally:
            self._lost.discard(peer)
        self._note_absence(peer)

    def _note_absence(self, peer: str) -> None:
        for run in self._runs.values():
            run.note_presence(peer, False)

    def _attach_to(self, link: _Link) -> None:
        """Let a member that can be dialed reach this node, if it cannot be dialed itself."""
        if not self._is_outbound or link.member.is_outbound or link.stream is not None:
            return

        def use(more: int) -> None:
            link.calls += more
            link.used = time.monotonic()

        name, channel = link.member.name, link.channel
        link.stream = asyncio.create_task(self._tunnels.stay_attached(name, channel, use))

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
                at, proxy = await self._locate(member), self.find_proxy(member)
                where: dict[str, Any] = {"host": at[0], "port": at[1]}
                if proxy is not None:
                    made = await connect_in_thread(at, proxy, _CONNECT)
                    made.setblocking(False)
                    where = {"sock": made, "server_hostname": at[0]}
                _, writer = await asyncio.open_connection(**where, ssl=context)
            shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
            writer.transport.abort()
            key, end = read_certificate(ssl.DER_cert_to_PEM_cert(shown).encode())
        except (OSError, TimeoutError, ValueError):  # nobody, or nobody who speaks TLS
            return
        if key != member.key:
            why = "somebody answers at its address, with another key than the roster has for it"
            self._count_refusal("wrong_key", member.name, why)
        elif end < time.time():
            self._count_refusal("expired", member.name, OVER)

    async def _exchange_presence(self, link: _Link, run: GrpcRun, wait: float = 2.0) -> None:
        """Send a member whether this node takes part; its answer is whether that one does.

        One word at a time, each as it is true when it is sent, so that none overtakes another. That
        this node is here is said again when there is no answer in time: nobody would know it from
        then on.
        """
        peer = link.member.name
        if not run.takes(peer):
            return
        # One message and no stream, so that the answer is bounded.
        ask = link.channel.unary_unary(f"/{SERVICE}/Presence")
        async with link.words:
            for _ in range(_WORDS):
                before, here, left = run.said[peer], run.is_here, False
                question = self.encode({"here": here, "run": run.run})
                try:
                    answer = await ask(question, timeout=wait, metadata=self.metadata)
                    there = parse_fields(answer, {"here": bool})["here"]
                except grpc.aio.AioRpcError as error:
                    reason = read_error(error).reason
                    if reason == "timeout" and here and link.channel.get_state() is _READY:
                        continue
                    if reason not in ("closing", "not_ready"):
                        return
                    # It is not in this run, or not any more.
                    there, left = False, reason == "closing"
                except Refused:
                    return
                # What it said by itself meanwhile is newer than its answer, which may be overtaken:
                # it says only once that it is here, and would be taken for away from then on.
                if not self._closed and run.said[peer] == before:
                    run.note_presence(peer, there, left=left)
                return

    async def _close_unused_links(self) -> None:
        while True:
            await asyncio.sleep(_IDLE / 4)
            for peer, link in list(self._links.items()):
                unused = not link.calls and time.monotonic() - link.used > _IDLE
                # It goes by a relay, and the member has opened a stream here since.
                unused |= not link.calls and peer in self._tunnels.detours
                # Where no relay stands in, the other side reaches this one by this link alone.
                unused &= link.stream is None or bool(self.roster.relays)
                # One that was here and is not is dialed until it is back.
                if unused and not any(run.keeps_link(peer) for run in self._runs.values()):
                    await self._close_link(peer)

    async def _close_link(self, peer: str) -> None:
        link = self._links.pop(peer, None)
        if link is not None:
            for task in (link.watch, link.stream):
                if task is not None:
                    task.cancel()
            await link.channel.close()

    async def _close_unless_used(self, link: _Link) -> None:
        """Close a link on which no question has begun meanwhile, and not one that came after it."""
        if not link.calls and self._links.get(link.member.name) is link:
            await self._close_link(link.member.name)

    async def _redial(self, peer: str) -> None:
        await self._close_link(peer)
        await self._link_to(peer)

    def _note_contact(self, peer: str) -> None:
        """Note that a member has asked something: it can be dialed now, if it could not before."""
        self._away.pop(peer, None)
        # What a relay said of it before is over.
        self._tunnels.away.discard(peer)
        link = self._links.get(peer)
        if link is not None and not link.calls and link.channel.get_state() is _FAILED:
            self.start_task(self._redial(peer))

    def use_roster(self, roster: Roster) -> None:
        """Continue with another roster: links and questions that it does not allow end.

        What was published stays.
        """
        self._run(self._use_roster(roster))

    async def _use_roster(self, roster: Roster) -> None:
        before = self._members
        self._take_roster(roster)
        self._use_members(roster)
        self._away.clear()  # addresses may have changed
        for peer, link in list(self._links.items()):
            if self._members.get(peer) != link.member:
                await self._redial(peer)
        await self._tunnels.use_roster(roster)
        gone = self._end_calls(before)
        for run in self._runs.values():
            run.forget(gone)

    # ------------------------------------------------------------------ asking

    def ask(self, request: Request) -> Missing | None:
        """Ask a member; return why there is no answer."""
        known, away = self._links.get(request.peer), self._away.get(request.peer)
        if self._may_come_back(request.peer) and request.method == "Message":
            known = away = None
        if known is None and away is not None and time.monotonic() < away.until:
            return away.missing
        if known is not None and known.missing is not None:
            # The library dials it again; hundreds of such members must cost next to nothing.
            known.used = time.monotonic()
            return known.missing
        work = self._ask_again(request)
        with self._lock:
            if self._closed:
                work.close()
                return Missing("closing")
            asked = asyncio.run_coroutine_threadsafe(work, self._loop)
            self._asking[asked] = request.run
        try:
            return asked.result()
        except CancelledError:
            return Missing("closing")
        finally:
            with self._lock:
                self._asking.pop(asked, None)

    def _may_come_back(self, peer: str) -> bool:
        """Whether the way to a member is lost, for all that is known, and not the member."""
        member = self._members.get(peer)
        return member is not None and member.is_outbound and peer not in self._tunnels.away

    async def _ask_again(self, request: Request) -> Missing | None:
        """Ask, and again while only the way to the member is lost, or there is no room for a link.

        Who answers goes on; the relay in between may be started again.
        """
        peer, deadline, patience = request.peer, request.deadline, request.patience
        end, silent = self.clock() + deadline, deadline if patience is None else patience
        until, pause, was_up = self.clock() + min(deadline, silent), _AGAIN, False

        def note_link() -> None:
            nonlocal was_up
            link = self._links.get(peer)
            was_up = link is not None and link.channel.get_state() is _READY
            request.begin()

        while True:
            left, was_up = end - self.clock(), False
            found = await self._ask_once(replace(request, deadline=left, begin=note_link))
            reason = "" if found is None else found.reason
            lost = reason == "unreachable" and request.method == "Message"
            lost &= self._may_come_back(peer)
            # It may have been closed for another one while the question was on its way.
            lost |= reason == "unreachable" and was_up and bool(self._most_links)
            if not (lost or reason == "full") or self.clock() + pause > until:
                return found
            await asyncio.sleep(pause)
            link = self._links.get(peer)
            if reason == "full":
                # Not all in step: each that comes makes another one go.
                pause = min(2.0, pause * random.uniform(1.0, 2.0))
                if link is not None and not link.calls:
                    await self._close_link(peer)
            # A fresh one: the library tries a link that failed after a pause of its own.
            elif link is not None and link.channel.get_state() is _FAILED:
                await self._close_link(peer)

    async def _ask_once(self, request: Request) -> Missing | None:
        deadline, patience = request.deadline, request.patience
        # An address that swallows packets must not cost a round.
        wait = min(_CONNECT, deadline, deadline if patience is None else patience)
        end = self.clock() + deadline
        link = await self._find_link(request.peer, max(0.001, wait))
        if isinstance(link, Missing):
            return link
        # From here on the link is in use, and is not closed to make room for another.
        link.calls += 1
        call = None
        try:
            if not await self._await_link(link, wait):
                return Missing("unreachable", None, "the link was closed")
            request.begin()
            # Without the library's own time limit, which goes on while this node cannot work.
            question = self.encode({"run": request.run, **request.question})
            call = link.channel.unary_stream(f"/{SERVICE}/{request.method}")(
                question, metadata=self.metadata
            )
            empty = True
            async with _Limit(self.clock, end, patience) as limit:
                async for part in call:
                    empty = False
                    request.take(part)
                    limit.note_part()
            return Missing("unreachable", None, "an answer without any part") if empty else None
        except TimeoutError:
            # One that cannot be dialed is not slow.
            here = link.channel.get_state() is _READY
            return Missing("timeout" if here else "unreachable", None, "no part came for too long")
        except grpc.aio.AioRpcError as error:
            if "larger than max" in (error.details() or ""):
                raise Refused("size", f"a part of over {MAX_FRAME} bytes") from None
            missing = read_error(error)
            if link.channel.get_state() is _FAILED:
                link.missing = missing
            return missing
        finally:
            # An answer that is refused in the middle is not read to its end.
            if call is not None:
                call.cancel()
            link.calls -= 1
            link.used = time.monotonic()

    # ------------------------------------------------------------------ answering

    def announce(self, run: GrpcRun, wait: float) -> None:
        """Let the members with a link to this node know whether it takes part in a run."""
        asyncio.run_coroutine_threadsafe(self._announce_to_all(run, wait), self._loop)

    async def _announce_to_all(self, run: GrpcRun, wait: float) -> None:
        links = [li for li in self._links.values() if li.channel.get_state() is _READY]
        if run is not self and not run.is_here:
            # The links outlive the run: who dials this node and is not dialed by it learns it, too.
            dialed = {link.member.name for link in links}
            for peer in run.alive_members() - dialed:
                if (link := await self._link_to(peer)) is not None:
                    links.append(link)
        await asyncio.gather(*(self._exchange_presence(link, run, wait) for link in links))

    async def _answer_presence(self, question: Question, context: Any) -> None:
        run, here = await self._find_run(question, context), question.fields["here"]
        run.said[question.asker] += 1
        run.note_presence(question.asker, here, left=not here)
        await context.write(canonical_json({"here": run.is_here}))

    async def _answer_head(self, question: Question, context: Any) -> None:
        nonce, head = question.fields["nonce"], (await self._find_run(question, context)).head
        if head is None or not nonce.isalnum() or len(nonce) > 64 or not nonce.isascii():
            await abort_missing(context, Missing("not_ready"))
        await self._write_parts(context, await self._run_in_worker(head, nonce))

    async def _answer_roster(self, question: Question, context: Any) -> None:
        sealed = (await self._find_run(question, context)).sealed_roster
        if sealed is None:
            await abort_missing(context, Missing("not_ready"))
        await self._write_parts(context, await self._run_in_worker(sealed))

    async def _answer_federation(self, kind: str, question: Question, context: Any) -> None:
        """Answer a question about studies; "gone" is a statement that is not here."""
        await self._find_run(question, context)
        if (answer := self._answers.get(kind)) is None or question.fields["run"] != self.run:
            await abort_missing(context, Missing("not_ready"))
        words = [question.fields["digest"]] if kind == "Statement" else []
        found = await self._run_in_worker(answer, *words)
        if not found:
            await abort_missing(context, Missing("gone"))
        await self._write_parts(context, found)

    async def _write_parts(self, context: Any, data: bytes) -> None:
        for at in range(0, len(data), CHUNK):
            await context.write(data[at : at + CHUNK])

    async def _answer_message(self, question: Question, context: Any) -> None:
        found, asker, run = question.fields, question.asker, await self._find_run(question, context)
        address = Address(found["round"], found["exchange"], found["client"], found["kind"])
        # As in `wire.parse_manifest`: outside of these no message can exist.
        fits = -1 <= address.round < 1 << 31 and 0 <= address.exchange < 1 << 16
        if found["kind"] not in (*KINDS, NEWEST) or not fits or not -1 <= address.client < 1 << 31:
            self._count_refusal("not_allowed", asker, "a message of no such address")
            await abort_missing(context, Missing("forbidden"))
        answer: asyncio.Future[Parcel | Missing] = self._loop.create_future()

        def give(what: Parcel | Missing) -> None:
            self._loop.call_soon_threadsafe(answer.set_result, what)

        outbox = run.outbox
        try:
            asked = self._loop.run_in_executor(
                self._workers, outbox.ask, asker, address, float(found["wait"]), give
            )
        except RuntimeError:  # shut down: this node leaves
            raise asyncio.CancelledError from None
        try:
            # Shielded: an asker that goes does not stop what other threads are about to do.
            question.visit.is_waiting = True
            await asyncio.shield(asked)
            what = await asyncio.shield(answer)
            question.visit.is_waiting = False
            if isinstance(what, Missing):
                await abort_missing(context, what)
            for attachment, chunk in what.iterate_chunks():
                await context.write(write_frame(attachment, chunk))
        finally:

            def count_sent(given: "asyncio.Future[Parcel | Missing]") -> None:
                if isinstance(given.result(), Parcel):
                    outbox.note_sent(asker)

            def withdraw(asked: "asyncio.Future[None]") -> None:
                # Its place is for the next question of a member, not for one that nobody awaits.
                if not asked.cancelled() and not answer.done():
                    with suppress(RuntimeError):
                        self._workers.submit(outbox.withdraw, asker, address, give)

            answer.add_done_callback(count_sent)
            asked.add_done_callback(withdraw)

    async def _run_in_worker(self, job: Callable[..., _Answer], *arguments: Any) -> _Answer:
        """Do something that can take a while, in another thread."""
        try:
            return await self._loop.run_in_executor(self._workers, job, *arguments)
        except RuntimeError:  # shut down: this node leaves
            raise asyncio.CancelledError from None

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
        for run in self._runs.values():
            run._closed = True
            self._run(self._announce_to_all(run, 1.0))
            run.outbox.close()
        self._run(self._leave())
        for (reason, peer), limit in self._refusals.items():
            if limit.suppressed:
                self._log_refusal(reason, peer, "as before", limit.suppressed)
        self._shut_down()

    async def _leave(self) -> None:
        self._sweeper.cancel()
        # Streams end first, or the server would wait for them. What is being sent through tunnels
        # goes on, and ends with the server's answers.
        self._tunnels.detach()
        for peer in list(self._links):
            await self._close_link(peer)
        await self._stop_server(_LEAVE)
        await self._tunnels.close()

    def _shut_down(self) -> None:
        """End the threads."""
        self.outbox.close()
        self._workers.shutdown(wait=True, cancel_futures=True)
        self._logger.shutdown(wait=True)


_MESSAGE = {"kind": str, "round": int, "exchange": int, "client": int, "wait": float}
