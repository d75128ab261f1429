"""Tunnels: how a member that accepts no connection is reached.

It dials others, and keeps a stream open (`Attach`) at relays and at members that it dials. Who
wants to reach it is put through there: down the stream comes the number of a tunnel, and the member
calls back (`Accept`), on the same connection, and connects that call to its own server. A tunnel
carries bytes, and in them is the TLS connection of the two members: both certificates are checked
as on a direct link, and what is between them sees how much travels, and when.
"""

import asyncio
import itertools
import math
import re
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Protocol

import grpc
import grpc.aio

from coterie._util.mappings import index_by_name
from coterie.net.grpc_server import (
    MAX_PART,
    SERVICE,
    GrpcServer,
    Question,
    abort_missing,
    read_error,
)
from coterie.net.incoming import Visit
from coterie.net.log import ABOUT_ONE, RateLimit
from coterie.net.outbox import Missing
from coterie.net.payload import escape_text
from coterie.net.roster import Member, Roster

CONNECT = 5.0
"""Seconds for a member to call back, and for one that has just lost its stream to open it again."""
SETTLE = 10.0
"""Seconds in which members whose stream ended may open it again, and all of them at a relay that
has just started: twice the longest pause between their tries."""
_FLUSH = 5.0  # seconds for what is on its way when one side has ended
_EOF = grpc.aio.EOF  # type: ignore[attr-defined]  # not in its stubs
_PAUSES = (0.5, 5.0)  # seconds between two tries to open a stream: at first, and at most
_NUMBER = re.compile(rb"[0-9a-f]{32}")
AWAY = grpc.StatusCode.NOT_FOUND
"""How a relay says that a member has no stream open there."""
# The library says by an `InvalidStateError` that a call is over already.
_BROKEN = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError, OSError, TimeoutError)


class End(Protocol):
    """One end of a tunnel, as bytes."""

    async def read(self) -> bytes:
        """Return what came, at most `MAX_PART` bytes; nothing at the end."""
        ...

    async def write(self, data: bytes) -> None:
        """Send some bytes; wait while the other side does not read."""
        ...

    async def finish(self) -> None:
        """Nothing more will be written."""
        ...

    def close(self) -> None:
        """End both directions."""
        ...


class CallEnd:
    """A call that this process has made."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def read(self) -> bytes:
        """Return the next part."""
        found = await self._call.read()
        return b"" if found is _EOF else found

    async def write(self, data: bytes) -> None:
        """Send a part."""
        await self._call.write(data)

    async def finish(self) -> None:
        """Say that nothing follows, and wait until the other side has it.

        To cancel the call at once would drop what is on its way.
        """
        await self._call.done_writing()
        async with asyncio.timeout(_FLUSH):
            await self._call.code()

    def close(self) -> None:
        """End the call."""
        self._call.cancel()


class HandlerEnd:
    """A call that this process answers; its handler waits for `over`."""

    def __init__(self, requests: AsyncIterator[bytes], context: Any) -> None:
        self._requests, self._context, self.over = requests, context, asyncio.Event()

    async def read(self) -> bytes:
        """Return the next part."""
        return await anext(self._requests, b"")

    async def write(self, data: bytes) -> None:
        """Send a part."""
        await self._context.write(data)

    async def finish(self) -> None:
        """Nothing: a handler ends its call, after what it has written, by returning."""

    def close(self) -> None:
        """Let the handler return."""
        self.over.set()


class SocketEnd:
    """A connection on this machine."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def read(self) -> bytes:
        """Return the next bytes."""
        return await self._reader.read(MAX_PART)

    async def write(self, data: bytes) -> None:
        """Send some bytes."""
        self._writer.write(data)
        await self._writer.drain()

    async def finish(self) -> None:
        """Nothing: who has no more to say here closes."""

    def close(self) -> None:
        """Close the connection, after what was written."""
        self._writer.close()


async def _spend_nothing(number: int) -> None:
    pass


async def splice(
    one: End, other: End, spend: Callable[[int], Awaitable[None]] = _spend_nothing
) -> None:
    """Copy bytes in both directions until one side ends, and end both.

    Of each direction one part is held, so that who does not read stops who sends.

    Args:
        one: an end.
        other: the other one.
        spend: called with the number of bytes before they are passed on; may wait.
    """

    async def copy(source: End, target: End) -> None:
        with suppress(*_BROKEN):
            while data := await source.read():
                await spend(len(data))
                await target.write(data)
            await target.finish()

    ways = [asyncio.create_task(copy(one, other)), asyncio.create_task(copy(other, one))]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        one.close()
        other.close()
        await asyncio.gather(*ways, return_exceptions=True)


async def _await_number(queue: asyncio.Queue[bytes], visit: Visit) -> bytes:
    """Wait for the next tunnel; who has no other place can have that of the stream meanwhile."""
    visit.is_waiting = True
    try:
        return await queue.get()
    finally:
        visit.is_waiting = False


class Switchboard:
    """The streams that members have opened here, and the calls with which they call back.

    Args:
        log: receives "attached" and "detached".
        began: when members could first open a stream, by the monotonic clock, where all are known
            to do so at once.
    """

    def __init__(self, log: Callable[..., None], began: float = -math.inf) -> None:
        self._log = log
        self._streams: dict[str, asyncio.Queue[bytes]] = {}
        self._awaited: dict[str, tuple[str, asyncio.Future[HandlerEnd]]] = {}
        self._changes: dict[str, RateLimit] = {}
        self._began = began
        # When each stream ended, or could first have been opened.
        self._ended: dict[str, float] = defaultdict(lambda: began)
        self._opened = asyncio.Condition()

    @property
    def attached(self) -> frozenset[str]:
        """The members that have a stream open here."""
        return frozenset(self._streams)

    def _note_change(self, event: str, peer: str) -> None:
        if self._changes.setdefault(peer, RateLimit(*ABOUT_ONE))() is not None:
            self._log(event, peer=peer)

    async def answer_attach(self, question: Question, context: Any) -> None:
        """Keep a member's stream open, and write the numbers of tunnels to it."""
        name = question.asker
        # The first one stays: a second process with the same key must not take its place.
        if name in self._streams:
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, "it has a stream open here")
        queue = self._streams[name] = asyncio.Queue()
        self._note_change("attached", name)
        try:
            async with self._opened:
                self._opened.notify_all()
            await context.write(b"")
            while number := await _await_number(queue, question.visit):
                await context.write(number)
        finally:
            del self._streams[name]
            self._ended[name] = time.monotonic()
            self._note_change("detached", name)

    async def answer_accept(self, question: Question, context: Any) -> None:
        """Give a member's call to the tunnel that waits for it, until the tunnel ends."""
        member, waiting = self._awaited.pop(question.fields["tunnel"], ("", None))
        if waiting is None or waiting.done() or member != question.asker:
            await abort_missing(context, Missing("forbidden"))
        end = HandlerEnd(question.requests, context)
        waiting.set_result(end)
        await end.over.wait()

    async def call_up(self, member: str, wait: float = SETTLE) -> HandlerEnd | None:
        """Return the end of a new tunnel to a member; None when it does not call back.

        Args:
            member: the member.
            wait: seconds to wait for one whose stream has just ended, to open it again.
        """
        number, waiting = secrets.token_hex(16), asyncio.get_running_loop().create_future()
        now = time.monotonic()
        left = self._ended[member] + SETTLE - now
        if member not in self._streams and not (left > 0 and wait):
            return None
        # Its first tries follow quickly. Who found no relay for a while tries again less often.
        longest = left if self._ended[member] == self._began else CONNECT
        end = None
        try:
            async with asyncio.timeout(min(wait, longest) if wait else None), self._opened:
                await self._opened.wait_for(lambda: member in self._streams)
            async with asyncio.timeout(CONNECT):
                self._awaited[number] = member, waiting
                self._streams[member].put_nowait(number.encode())
                end = await waiting
            return end
        except TimeoutError:
            return None
        finally:
            self._awaited.pop(number, None)
            # It called back in the moment in which nobody waited any more.
            if end is None and waiting.done() and not waiting.cancelled():
                waiting.result().close()

    def close(self) -> None:
        """End all streams."""
        for queue in self._streams.values():
            queue.put_nowait(b"")


class Tunnels:
    """A node's tunnels: to members that only dial out, and to itself if it is one.

    To the library a tunnel is a port on 127.0.0.1. Other programs of this machine reach no more by
    it than the door of a member that wants their certificate.

    Args:
        node: the node.
    """

    def __init__(self, node: GrpcServer) -> None:
        self._node = node
        self.switchboard = Switchboard(node.log_event)
        self.own_port = 0  # of this node's server, if it is reached by tunnels alone
        self.attached: set[str] = set()  # where this node has a stream open
        self._relays: dict[str, tuple[Member, grpc.aio.Channel]] = {}
        self._streams: dict[str, asyncio.Task[None]] = {}
        self._listeners: dict[str, asyncio.Server] = {}
        self._spare: dict[str, End] = {}
        self._by_relay: set[str] = set()  # members whose last tunnel went by a relay
        # Members of which a relay says, or this node knows, that they have no stream open.
        self.away: set[str] = set()
        self._turn: dict[str, int] = {}
        self._dialed: dict[str, float] = {}
        self._changes: dict[str, RateLimit] = {}
        # Held here, as asyncio holds tasks weakly: a tunnel whose task were lost would not be
        # closed.
        self._going: set[asyncio.Task[None]] = set()
        self._num_accepted, self._closed = 0, False

    async def use_roster(self, roster: Roster) -> None:
        """Go on with the relays of a roster."""
        now = index_by_name(roster.relays)
        for name, (relay, channel) in list(self._relays.items()):
            if now.get(name) != relay:
                del self._relays[name]
                if name in self._streams:
                    self._streams.pop(name).cancel()
                await channel.close()
        for name, relay in now.items():
            if name not in self._relays:
                channel = self._node.dial(relay, relay.host_and_port, _PAUSES[1])
                self._relays[name] = relay, channel
                if self.own_port:
                    self._streams[name] = asyncio.create_task(self.stay_attached(name, channel))

    @property
    def detours(self) -> frozenset[str]:
        """The members whose last tunnel went by a relay, and that have a stream open here now."""
        return self.switchboard.attached & self._by_relay

    # ------------------------------------------------------------------ to others

    async def prepare(self, peer: str) -> Missing | None:
        """Open a tunnel, for the next connection to a member; return why there is none."""
        if peer not in self._spare:
            found = await self._open(peer)
            if isinstance(found, Missing):
                return found
            if self._closed:
                found.close()
                return Missing("closing")
            if (older := self._spare.pop(peer, None)) is not None:
                older.close()
            self._spare[peer] = found
        return None

    async def listen_for(self, peer: str) -> int:
        """Return the port on 127.0.0.1 at which connections go through tunnels to a member.

        Raises:
            OSError: when this node leaves.
        """
        if self._closed:
            raise OSError("this node leaves")
        if peer not in self._listeners:
            made = await asyncio.start_server(partial(self._carry, peer), "127.0.0.1", 0)
            if self._closed:  # meanwhile
                made.close()
                raise OSError("this node leaves")
            if self._listeners.setdefault(peer, made) is not made:  # another task was faster
                made.close()
        return self._listeners[peer].sockets[0].getsockname()[1]

    @contextmanager
    def _hold_task(self) -> Iterator[None]:
        """Hold the task that runs a tunnel during the block, so that `close` can end it."""
        task = asyncio.current_task()
        assert task is not None
        self._going.add(task)
        try:
            yield
        finally:
            self._going.discard(task)

    async def _carry(
        self, peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        near, end = SocketEnd(reader, writer), self._spare.pop(peer, None)
        # Python 3.11 prints a traceback for each connection whose task was cancelled.
        with self._hold_task(), suppress(asyncio.CancelledError):
            await self._connect(peer, near, end)

    async def _connect(self, peer: str, near: End, end: End | Missing | None) -> None:
        """Connect an end here with a tunnel to a member, until one of them ends."""
        try:
            if end is None:
                # The library dials again at once where a connection came up and broke: a relay that
                # spoils them must not keep this node busy.
                now = time.monotonic()
                self._dialed[peer] = max(now, self._dialed.get(peer, -math.inf) + _PAUSES[0])
                await asyncio.sleep(self._dialed[peer] - now)
                end = await self._open(peer)
            if not isinstance(end, Missing):
                await splice(near, end)
        finally:
            near.close()

    async def _open(self, peer: str) -> End | Missing:
        """Open a tunnel by the member's own stream to this node, or else by a relay."""
        relays = list(self._relays.items())
        near = await self.switchboard.call_up(peer, 0.0 if relays else SETTLE)
        if near is not None:
            self._by_relay.discard(peer)
            self.away.discard(peer)
            return near
        missing = Missing("unreachable", None, "it only dials out, and the roster names no relay")
        away = not relays
        # Another relay than the last time: where it was no good, none of the two needs to know.
        first = self._turn.get(peer, 0)
        order = [(first + step) % len(relays) for step in range(len(relays))]
        # All of them at once, and only then one that was just started, where the member may come.
        waits = (0.0, SETTLE) if len(order) > 1 else (SETTLE,)
        for wait, turn in itertools.product(waits, order):
            name, (_, channel) = relays[turn]
            self._turn[peer] = turn + 1
            found = await self._open_by(channel, peer, wait)
            if not isinstance(found, Missing):
                self._by_relay.add(peer)
                self.away.discard(peer)
                return found
            missing = Missing(found.reason, None, f"by {name}: {found.text or found.reason}")
            away |= wait > 0 and found.text.startswith(AWAY.name)
        # A relay that is not there says nothing of the member.
        if away:
            self.away.add(peer)
        else:
            self.away.discard(peer)
        return missing

    async def _open_by(self, channel: grpc.aio.Channel, peer: str, wait: float) -> End | Missing:
        """Open a tunnel by a relay, which waits so long for a member that just lost its stream."""
        try:
            call = self._call(channel, "Tunnel")
        except grpc.aio.UsageError:  # a newer roster is without this relay: the channel is closed
            return Missing("closing")
        try:
            async with asyncio.timeout(CONNECT + wait + 1.0):
                await call.write(self._node.encode({"to": peer, "wait": wait}))
                await call.read()
            return CallEnd(call)
        except grpc.aio.AioRpcError as error:
            found = read_error(error)
        except _BROKEN:
            found = Missing("unreachable", None, "no answer")
        except asyncio.CancelledError:
            call.cancel()
            # So the library says, too, that the connection to the relay was closed here.
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            found = Missing("closing")
        call.cancel()
        return found

    def _call(self, channel: grpc.aio.Channel, method: str) -> Any:
        return channel.stream_stream(f"/{SERVICE}/{method}")(metadata=self._node.metadata)

    # ------------------------------------------------------------------ to this node

    async def stay_attached(
        self, name: str, channel: grpc.aio.Channel, use: Callable[[int], None] = lambda more: None
    ) -> None:
        """Keep a stream open at a relay or a member, and call back when a tunnel is wanted there.

        Args:
            name: of the relay or member.
            channel: the connection to it.
            use: called with 1 and -1 when a tunnel on it begins and ends.
        """
        pause, changes = _PAUSES[0], self._changes.setdefault(name, RateLimit(*ABOUT_ONE))
        while True:
            call, text = self._call(channel, "Attach"), "it has ended the stream"
            try:
                await call.write(self._node.encode({}))
                while (number := await call.read()) is not _EOF:
                    if name not in self.attached:
                        self.attached.add(name)
                        pause = _PAUSES[0]
                        if changes() is not None:
                            self._node.log_event("attached", to=name)
                    if _NUMBER.fullmatch(number):
                        self._node.start_task(self._accept(channel, number.decode(), use))
            except grpc.aio.AioRpcError as error:
                text = read_error(error).text
            except _BROKEN as error:
                text = escape_text(error)
            finally:
                call.cancel()
                was = name in self.attached
                self.attached.discard(name)
            if was and changes() is not None:
                self._node.log_event("detached", level="warning", source=name, text=text)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _PAUSES[1])

    async def _accept(
        self, channel: grpc.aio.Channel, number: str, use: Callable[[int], None]
    ) -> None:
        """Call back, and connect that call to this node's server."""
        # As many as its members can want; who wants more is a relay that lies.
        if self._num_accepted >= 4 * len(self._node.roster.members) + 16:
            return
        self._num_accepted += 1
        use(1)
        try:
            with self._hold_task(), suppress(*_BROKEN):
                near = SocketEnd(*await asyncio.open_connection("127.0.0.1", self.own_port))
                try:
                    await self._call_back(channel, number, near)
                finally:
                    near.close()
        finally:
            use(-1)
            self._num_accepted -= 1

    async def _call_back(self, channel: grpc.aio.Channel, number: str, near: End) -> None:
        call = self._call(channel, "Accept")
        try:
            # A write on a connection that is closed before the call is under way never returns.
            async with asyncio.timeout(CONNECT):
                await call.write(self._node.encode({"tunnel": number}))
            await splice(near, CallEnd(call))
        finally:
            call.cancel()

    # ------------------------------------------------------------------ the end

    def detach(self) -> None:
        """Let nobody open a new tunnel to or from here; the open ones go on."""
        self._closed = True
        self.switchboard.close()
        for task in self._streams.values():
            task.cancel()
        for spare in self._spare.values():
            spare.close()

    async def close(self) -> None:
        """End the tunnels that are left, and close the connections to relays and the doors.

        The links that go by tunnels have to be closed: asyncio forgets, and does not close, a
        connection that comes while its door closes.
        """
        for listener in self._listeners.values():
            listener.close()
        left = list(self._going)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        for _, channel in self._relays.values():
            await channel.close()
