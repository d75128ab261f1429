"""A relay: puts members through to the ones that only dial out (see `tunnel`).

It has a certificate of the run and is no member. What it passes on is the TLS of two members: it
can drop, delay and count, and read or change nothing. It holds what is in flight, and no state.
"""

import asyncio
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Le

from coterie._util.files import resolve_path
from coterie._util.settings import NonNegativeFloat, parse_settings
from coterie._util.toml import load_toml
from coterie.errors import TransportError
from coterie.net import roster as rosters
from coterie.net.grpc_server import WINDOW, GrpcServer, Question, abort_missing
from coterie.net.identity import Identity, split_address
from coterie.net.keeper import Keeper, describe_changes
from coterie.net.log import Log, MetricsServer, RateLimit, Sample
from coterie.net.outbox import Missing
from coterie.net.processfile import ProcessFile
from coterie.net.roster import Roster
from coterie.net.tunnel import AWAY, HandlerEnd, Switchboard, splice

_LOOK = 5.0  # seconds between two looks at the roster's file
_LEAVE = 1.0  # seconds for calls to end: members come again, here or at another relay
_OF_A_PAIR = 4  # tunnels of one member to one other: a link, and links that end
_OPENED, _WITHIN = 200, 10.0  # tunnels that one member may open, in so many seconds
_BURST = 1.0  # seconds for which a member may be ahead of its rate


@dataclass(frozen=True)
class RelayFile(ProcessFile):
    """The content of relay.toml. Paths are relative to the file.

    Args:
        roster: the signed roster, which names this relay.
        key: this relay's private key.
        tunnels: that one member may have open to others.
        rate: megabytes a second that one member's tunnels carry, in both directions together; 0
            for no limit.
        lease: seconds without a sign of life after which a link counts as lost.
        folder: the file's folder, in which the newest roster is kept.
    """

    key: str = "relay.key"
    certificate: str = "relay.pem"
    tunnels: Annotated[int, Ge(1), Le(10_000)] = 256
    rate: NonNegativeFloat = 0.0
    lease: Annotated[float, Ge(1)] = 10.0

    @staticmethod
    def load(path: Path) -> "RelayFile":
        """Read relay.toml.

        Raises:
            ConfigError: with what was found, what was expected and what to do.
        """
        table = load_toml(path)
        return parse_settings(RelayFile, table, str(path), folder=resolve_path(path).parent)


class Relay(GrpcServer):
    """A process by which members reach the ones that only dial out.

    Always close it (it is a context manager).

    Args:
        roster: names the members and this relay.
        name: this relay's.
        identity: its key and certificate; None for plain TCP, on loopback.
        listen: host:port to listen on instead of the roster's address.
        tunnels: that one member may have open to others.
        rate: bytes a second that one member's tunnels carry; 0 for no limit.
        lease: seconds without a sign of life after which a link counts as lost.
        log: receives events.

    Attributes:
        carried: bytes that each member's tunnels to others have carried.
    """

    def __init__(
        self,
        roster: Roster,
        name: str,
        identity: Identity | None,
        *,
        listen: str = "",
        tunnels: int = 256,
        rate: float = 0.0,
        lease: float = 10.0,
        log: Callable[..., None] = lambda event, **details: None,
    ) -> None:
        super().__init__(roster, name, identity, lease=lease, log=log)
        self.switchboard = Switchboard(self.log_event, time.monotonic())
        self.carried: Counter[str] = Counter()
        self._most, self._rate = tunnels, rate
        self._open: Counter[tuple[str, str]] = Counter()  # tunnels, by asker and member
        self._opened: dict[str, RateLimit] = {}
        self._paid: dict[str, float] = {}  # when what a member has sent is within its rate
        at = next((one.address for one in roster.relays if one.name == name), "")
        if not at:
            raise TransportError(f"the roster names no relay {name}")
        try:
            self._run(self._start(*split_address(listen or at)))
        except BaseException:
            self._logger.shutdown()
            raise

    async def _start(self, host: str, port: int) -> None:
        # A member may answer as many calls as the others open to it.
        calls = self._most + _OF_A_PAIR * len(self.roster.members) + 8
        handlers = {
            "Attach": (self.switchboard.answer_attach, {}),
            "Accept": (self.switchboard.answer_accept, {"tunnel": str}),
            "Tunnel": (self._answer_tunnel, {"to": str, "wait": float}),
        }
        await self._listen(host, port, handlers, calls=calls, window=WINDOW)

    def __enter__(self) -> "Relay":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _answer_tunnel(self, question: Question, context: Any) -> None:
        """Put a member through to another one."""
        asker, to = question.asker, question.fields["to"]
        if to not in self._members:
            self._count_refusal("not_allowed", asker, "a tunnel to nobody on the roster")
            await abort_missing(context, Missing("forbidden"))
        mine = sum(number for (name, _), number in self._open.items() if name == asker)
        may_open = self._opened.setdefault(asker, RateLimit(_OPENED, _WITHIN))
        pair = asker, to
        # Open tunnels, those to one member, and how fast they come: each alone could be used up.
        if mine >= self._most or self._open[pair] >= _OF_A_PAIR or may_open() is None:
            self._count_refusal("too_many", asker, f"{mine} tunnels, {self._open[pair]} to {to}")
            await abort_missing(context, Missing("busy"))
        self._open[pair] += 1
        try:
            end = await self.switchboard.call_up(to, float(question.fields["wait"]))
            if end is None:
                await context.abort(AWAY, f"{to} has no stream open here")
            assert end is not None  # abort raises
            await context.write(b"")
            near = HandlerEnd(question.requests, context)
            await splice(near, end, lambda number: self._spend(asker, number))
        finally:
            self._open[pair] -= 1
            if not self._open[pair]:
                del self._open[pair]

    async def _spend(self, asker: str, number: int) -> None:
        """Count bytes, and wait when a member is ahead of its rate."""
        self.carried[asker] += number
        if self._rate:
            now = time.monotonic()
            # A leaky bucket: what was not used before does not add up.
            self._paid[asker] = max(now, self._paid.get(asker, 0.0)) + number / self._rate
            if self._paid[asker] > now + _BURST:
                await asyncio.sleep(self._paid[asker] - now - _BURST)

    def use_roster(self, roster: Roster) -> None:
        """Go on with another roster: streams and tunnels of members that it removes end."""

        async def adopt() -> None:
            before = self._members
            self._take_roster(roster)
            self._end_calls(before)

        self._run(adopt())

    def prometheus_samples(self) -> list[Sample]:
        """Return numbers for Prometheus."""
        attached, tunnels = len(self.switchboard.attached), sum(self._open.values())
        samples = super().prometheus_samples()
        samples += [
            ("coterie_relay_attached", "members with a stream open", {}, attached),
            ("coterie_relay_tunnels", "tunnels that are open", {}, tunnels),
        ]
        metric, text = "coterie_relay_bytes_total", "bytes carried, by who asks"
        for name, sent in sorted(self.carried.items()):
            samples.append((metric, text, {"member": name}, sent))
        return samples

    def close(self) -> None:
        """Leave."""

        async def leave() -> None:
            self.switchboard.close()
            await self._stop_server(_LEAVE)

        self._run(leave())
        self._logger.shutdown()


def run_relay(path: Path) -> None:
    """Run a relay until a signal ends it.

    Args:
        path: relay.toml.

    Raises:
        TransportError: when roster, key and certificate do not belong together.
    """
    file = RelayFile.load(path)
    own = file.load_identity()
    log, stop = Log(own.name, level=file.log), threading.Event()
    organizer = file.resolve_path(file.organizer)
    keeper = Keeper(file.resolve_path(file.roster), organizer, file.folder, log)
    if problems := rosters.check_own(keeper.roster, own):
        raise TransportError(problems[0])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: stop.set())
    with ExitStack() as stack:
        relay = stack.enter_context(
            Relay(
                keeper.roster, own.name, own, listen=file.listen, tunnels=file.tunnels,
                rate=1e6 * file.rate, lease=file.lease, log=log,
            )
        )  # fmt: skip
        if file.metrics_port:
            stack.callback(MetricsServer(file.metrics_port, relay.prometheus_samples).close)
        log("relay", roster=keeper.roster.version, members=len(keeper.roster.members))
        warned: int | None = None
        while not stop.wait(_LOOK):
            before = keeper.roster
            if (newer := keeper.reload_file()) is not None:
                if problems := rosters.check_own(newer, own):
                    raise TransportError(problems[0])
                log("roster", **describe_changes(before, newer))
                relay.use_roster(newer)
            days, due = rosters.find_ends(keeper.roster, datetime.now(UTC))[own.name]
            if due is not None and due != warned:
                log("certificate", level="warning", days=round(days, 1), text="it ends soon")
                warned = due
    log("stopped")
