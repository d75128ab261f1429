"""A node's log, one JSON line per event on stderr, and its metrics for Prometheus."""

import json
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from coterie._util.loopback import HOST, is_local_request

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
ABOUT_ONE = 20, 200.0
"""How many events of one kind about one member are logged, in how many seconds.

Some before the limit counts, so that a quarrel of a few rounds is logged in full."""


@dataclass
class Log:
    """Writes events as JSON lines. Keys and weights never occur in them.

    A line that cannot be written does not end the run; the next one that can says how many are
    missing. Of the warnings of one kind about one member only some are written, the next one with
    the number of the others in `untold`.

    Args:
        node: who writes.
        level: the least level that is written.
        stream: where: has `write` and `flush`.
        round: the round that is going on; kept up to date by the node.
        clock: seconds since 1970.
        also: receives (event, level, details) of every event, those below the least level and
            those over the limit included.
        study: the study that the events are of, where a node has several.
    """

    node: str
    level: str = "info"
    stream: Any = field(default_factory=lambda: sys.stderr)
    round: int = -1
    clock: Callable[[], float] = time.time
    also: Callable[[str, str, dict[str, Any]], None] = lambda event, level, details: None
    study: str = ""
    _lost: int = 0
    _limits: dict[tuple[str, str], "RateLimit"] = field(default_factory=dict)
    _lock: Any = field(default_factory=threading.Lock)

    def __call__(self, event: str, *, level: str = "info", **details: Any) -> None:
        """Write one event."""
        self.also(event, level, details)
        if LEVELS[level] < LEVELS[self.level]:
            return
        # Whose event it is: a member, or the source of a roster. No member fills the log.
        about = details.get("peer", details.get("source"))
        if about is not None and level in ("warning", "error"):
            with self._lock:
                allowed = self._limits.setdefault((event, str(about)), RateLimit(*ABOUT_ONE))
                suppressed = allowed()
            if suppressed is None:
                return
            details = {**details, "untold": suppressed} if suppressed else details
        line = {
            "time": round(self.clock(), 3),
            "level": level,
            "node": self.node,
            **({"study": self.study} if self.study else {}),
            "round": self.round,
            "event": event,
        }
        # Several threads write, and a line must not be split.
        with self._lock:
            lost = {"lines_lost": self._lost} if self._lost else {}
            try:
                self.stream.write(json.dumps({**line, **details, **lost}, default=str) + "\n")
                self.stream.flush()
            except OSError:  # nobody reads on, or the log is a file on a disk that is full
                self._lost += 1
            else:
                self._lost = 0


class RateLimit:
    """Limits how often an event that others can cause is logged: `times` in `seconds`.

    Args:
        times: how often.
        seconds: in how many.
        clock: a monotonic clock in seconds.

    Attributes:
        suppressed: the number suppressed since the last one.
    """

    def __init__(
        self, times: int, seconds: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._allowed_at: deque[float] = deque(maxlen=times)
        self._seconds, self._clock, self.suppressed = seconds, clock, 0

    def __call__(self) -> int | None:
        """Return None to suppress this event, or else the number suppressed since the last one."""
        now = self._clock()
        # The deque holds the last `times` events: is the oldest of them inside of the window?
        if (
            len(self._allowed_at) == self._allowed_at.maxlen
            and now - self._allowed_at[0] < self._seconds
        ):
            self.suppressed += 1
            return None
        untold, self.suppressed = self.suppressed, 0
        self._allowed_at.append(now)
        return untold


Sample = tuple[str, str, dict[str, str], float]
"""(name, help, labels, value) of one number for Prometheus."""


def format_samples(samples: Iterable[Sample]) -> str:
    """Return numbers in the text format of Prometheus."""
    lines, seen = [], set()
    for name, text, labels, value in samples:
        if name not in seen:
            seen.add(name)
            # By the convention of Prometheus, only counters end in _total.
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        inner = ",".join(f'{key}="{_escape_label(of)}"' for key, of in sorted(labels.items()))
        lines.append(f"{name}{{{inner}}} {value}" if inner else f"{name} {value}")
    return "\n".join(lines) + "\n"


def _escape_label(value: str) -> str:
    """Return the value of a label as the format wants it: a quote or a line break ends nothing."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class MetricsServer:
    """Answers http://127.0.0.1:PORT/metrics, on loopback only, under this machine's own name only.

    A page of another site, whose name was bound to 127.0.0.1 after it was loaded, is refused by its
    Host header.

    Args:
        port: where; 0 for any free one.
        collect: returns the numbers, now.
    """

    def __init__(self, port: int, collect: Callable[[], Iterable[Sample]]) -> None:
        class MetricsHandler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found, body = 404, b"see /metrics\n"
                if not is_local_request(
                    self.headers.get("Host", ""), self.connection.getsockname()[1]
                ):
                    found, body = 403, b"ask by the name 127.0.0.1 or localhost\n"
                elif self.path == "/metrics":
                    found, body = 200, format_samples(collect()).encode()
                self.send_response(found)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                # No other site may embed or reinterpret the answer.
                self.send_header("X-Content-Type-Options", "nosniff")
                self.send_header("Cross-Origin-Resource-Policy", "same-origin")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Write nothing: the log is for the run."""

        self._server = ThreadingHTTPServer((HOST, port), MetricsHandler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="coterie-metrics")
        self._thread.start()

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
