"""Engine log: what the network engine rejects, as events in the node's log.

The engine drops strangers, forbidden questions and oversize messages before any code of the node
sees them, and reports that only in lines on standard output. Those lines are read here: each
rejection becomes an event with its reason, and other lines for the operator pass on to standard
output unchanged.
"""

import io
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from coterie.net.log import Log, Sample

LEVELS = "error,zenoh_link_tls=warn,zenoh::net::routing::interceptor=trace"
"""What the engine is asked to say; RUST_LOG in the environment wins."""
_PAUSE = 10.0  # seconds between two events of the same refusal: nobody fills the log from outside
_SESSIONS = 4096  # sessions whose member is known by name
_KINDS = 64  # kinds of refusals that are counted separately
_LINE = re.compile(r"\S+\s+(ERROR|WARN|INFO|DEBUG|TRACE) .*?ThreadId\((\d+)\) ([\w:]+): (.*)")
# ID [on LINK] is authorized or unauthorized to ACTION (ingress or egress) on KEY.
_RULING = re.compile(
    r"(Using cached result: )?([0-9a-f]+)(?: on .*CertCommonName\((.*?)\).*)? "
    r"is (un)?authorized to (.+?) \((in|e)gress\) on (\S+)"
)
_UNKNOWN = re.compile(r"([0-9a-f]+) did not match any configured ACL subject.*")
# the engine's next line about a link
_LINKS = re.compile(r"New low-pass filter transport unicast (.*)")
_GONE = re.compile(r"Unable to get \w+ (from|for) transport")
_LINK = re.compile(r"Link \{.*?dst: \w+/(\S+?),.*?auth_identifier: \w+\((?:Some\(\"(\w+)\"\))?")
_CACHING = re.compile(r"ACL \(\w+\): caching permissions for `(.*)` ...")
# the engine adds it to every failed handshake
_HINT = ". Hint: increase the system open file limit."
_Kind = tuple[str, str, str]  # reason, member, text without its digits
_TOO_LARGE = "a question or an answer is over its cap"
_CAPPED = ("Query", "Reply")
# whether it came from outside, was allowed; the common name, the action and key
_Ruling = tuple[bool, bool, str, str]


class EngineLog:
    """Reads the engine's lines and logs an event for each connection or message that it rejects.

    Reasons are "certificate" (no link: the certificate or the handshake is not in order),
    "not_on_roster" (a link, but nothing passes), "not_allowed" (a member asked, answered or
    announced under a key that is not its own) and "too_large". The engine writes the same line for
    a message over its size limit and for any message of a peer that is not on the roster; once such
    a link has been seen, the reason is "dropped".

    Only what comes from outside counts. What the node's own access list keeps from going out
    accuses nobody, and neither does a link that is closed before the engine could see whose it is.

    Args:
        log: receives the events.
        out: receives the lines that pass on, without those for debugging.
        clock: a monotonic clock in seconds.
        everything: whether lines for debugging pass on as well.
    """

    def __init__(
        self,
        log: Callable[..., None],
        out: io.TextIOBase,
        *,
        clock: Callable[[], float] = time.monotonic,
        everything: bool = False,
    ) -> None:
        self.times: Counter[str] = Counter()
        self._log, self._out, self._clock, self._everything = log, out, clock, everything
        self._unreported: Counter[_Kind] = Counter()
        self._logged_at: dict[_Kind, float] = {}
        self._newest: dict[_Kind, str] = {}
        # by the engine's thread: its newest ruling on a message
        self._ruled: dict[str, _Ruling] = {}
        self._cached: dict[str, str] = {}  # by thread: the key of which it has ruled in advance
        self._names: dict[str, str] = {}  # common names by the engine's id of their session
        self._unknown: set[str] = set()  # threads that have just met a link without a subject
        self._strangers = False
        # whose a certificate is
        self.name_of: Callable[[str], str] = lambda common_name: common_name
        self.on_failed: Callable[[], None] = lambda: None  # a handshake failed
        # a member has a link, from or to an address
        self.on_link: Callable[[str], None] = lambda address: None

    def take_line(self, text: str) -> None:
        """Take one line."""
        found = _LINE.match(text)
        if found is None or self._everything or found[1] not in ("DEBUG", "TRACE"):
            with suppress(OSError):  # nobody reads on: the engine must not wait for that
                self._out.write(text)
                self._out.flush()
        if found is not None:
            self._interpret_line(found[2], found[3], found[4].strip())

    def _interpret_line(self, thread: str, source: str, text: str) -> None:
        if thread in self._unknown:
            # The engine names the link in the next line of the same thread.
            self._unknown.remove(thread)
            self._report_stranger(text)
        elif (links := _LINKS.fullmatch(text)) and (link := _LINK.search(links[1])):
            self.on_link(link[1])
        if source.startswith("zenoh_link_tls"):
            self._count_refusal("certificate", "", text.removesuffix(_HINT))
            self.on_failed()
        elif text == "Msg intercepted!":
            # The newest ruling of the same thread: lines of several threads alternate.
            self._report_interception(self._ruled.pop(thread, None))
        elif caching := _CACHING.fullmatch(text):
            self._cached[thread] = caching[1]
        elif _UNKNOWN.fullmatch(text):
            self._unknown.add(thread)
        elif ruling := _RULING.fullmatch(text):
            at_once, session, name, denied, what, way, key = ruling.groups()
            if name and len(self._names) < _SESSIONS:
                self._names[session] = name
            # else it rules in advance, not on a message
            if at_once or key != self._cached.get(thread):
                who = name or self._names.get(session, "")
                self._ruled[thread] = (way == "in", not denied, who, f"{what} on {key}")

    def _report_stranger(self, text: str) -> None:
        """Report a link that matches no member, by the engine's next line about it."""
        links = _LINKS.fullmatch(text)
        link = None if links is None else _LINK.search(links[1])
        if _GONE.match(text) or (links is not None and link is None):
            return  # it is closed already; whose it was is not known
        self._strangers = True
        who = "" if link is None else f" (from {link[1]}, common name {link[2] or 'unknown'})"
        self._count_refusal(
            "not_on_roster", "", f"its certificate is valid; nothing that it sends is read{who}"
        )

    def _report_interception(self, ruling: _Ruling | None) -> None:
        inside, allowed, common, what = ruling or (True, True, "", "")
        who = self.name_of(common) if common else ""
        if not inside:
            return
        if not allowed:
            self._count_refusal("not_allowed", who, what)
        elif self._strangers:
            self._count_refusal(
                "dropped", "", f"{_TOO_LARGE}, or of somebody who is not on the roster"
            )
        elif what.startswith(_CAPPED):
            self._count_refusal("too_large", who, _TOO_LARGE)

    def _count_refusal(self, reason: str, peer: str, text: str) -> None:
        self.times[reason] += 1
        # Without digits, so that ports and ids do not make a kind of every line.
        kind, now = (reason, peer, re.sub(r"\d+", "0", text)), self._clock()
        # Kinds beyond the bound share one, since text from outside must not fill the memory.
        if kind not in self._logged_at and len(self._logged_at) >= _KINDS:
            kind = (reason, "", "more")
        self._unreported[kind] += 1
        self._newest[kind] = text[:300]
        if kind not in self._logged_at or now - self._logged_at[kind] >= _PAUSE:
            self._logged_at[kind] = now
            self._log_refusals(kind)

    def _log_refusals(self, kind: _Kind) -> None:
        reason, peer, _ = kind
        who, times = ({"peer": peer} if peer else {}), self._unreported.pop(kind)
        self._log(
            "turned_away",
            level="warning",
            reason=reason,
            **who,
            text=self._newest[kind],
            times=times,
        )

    def close(self) -> None:
        """Log the remaining events."""
        while self._unknown:
            self._unknown.pop()
            self._report_stranger("")
        for kind in list(self._unreported):
            self._log_refusals(kind)

    def prometheus_samples(self) -> list[Sample]:
        """Return numbers for Prometheus."""
        return [
            ("coterie_turned_away_total", "turned away by the engine", {"reason": reason}, number)
            for reason, number in sorted(self.times.items())
        ]


@contextmanager
def capture_engine_log(log: Log) -> Iterator[EngineLog]:
    """Read what the engine writes to standard output until the end of the block."""
    import zenoh

    # The patterns do not know the escape codes of colors.
    os.environ.setdefault("NO_COLOR", "1")
    zenoh.init_log_from_env_or(LEVELS)
    # What Python has buffered still goes to the old standard output.
    sys.stdout.flush()
    kept, (reading, writing) = os.dup(1), os.pipe()
    # The descriptor itself is replaced: the engine is native code, which knows no `sys.stdout`.
    os.dup2(writing, 1)
    os.close(writing)
    with os.fdopen(kept, "w") as out, os.fdopen(reading, errors="replace") as lines:
        engine = EngineLog(log, out, everything="RUST_LOG" in os.environ)

        def take_lines() -> None:
            for line in lines:
                engine.take_line(line)

        reader = threading.Thread(target=take_lines, name="coterie-engine-log")
        reader.start()
        try:
            yield engine
        finally:
            sys.stdout.flush()
            os.dup2(kept, 1)  # the pipe's last writer is gone: the reader comes to its end
            reader.join()
            engine.close()
