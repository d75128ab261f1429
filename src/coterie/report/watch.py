"""The live page: the views of the report, following a run folder while a study runs or a node works.

It is served to this machine only: it listens on 127.0.0.1, requires the token of its address and
this machine's host name in every request (so that no other page can read it through the browser),
and only reads run folders.
"""

import hashlib
import hmac
import secrets
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, urlsplit

from coterie._util.loopback import HOST, ours
from coterie.errors import ConfigError, DataError
from coterie.report.data import blank, payload
from coterie.report.page import embed, overview, render, subtitle
from coterie.results.summary import CONFIG, EDGES, FEDERATION, METRICS, PROVENANCE, find_runs

WATCHED = (CONFIG, METRICS, EDGES, PROVENANCE, FEDERATION)


class Follower:
    """The content of a folder, read again only when a file in it has changed.

    Args:
        folder: folder of a study, a run or a node; it may not exist yet.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = Lock()
        self._read: tuple[str, dict[str, Any]] | None = None

    def signature(self) -> str:
        """Return a short text that changes whenever a file of a run does."""
        digest = hashlib.sha256()
        for path in sorted(self._files()):
            try:
                found = path.stat()
            except FileNotFoundError:  # replaced or deleted since it was listed
                continue
            digest.update(f"{path} {found.st_mtime_ns} {found.st_size}\n".encode())
        return digest.hexdigest()[:16]

    def _files(self) -> Iterator[Path]:
        for name in WATCHED:
            yield from self.folder.rglob(name)

    def message(self) -> dict[str, Any]:
        """Return the page's data: `signature`, `subtitle` and `overview` as HTML, and `data`."""
        with self._lock:
            signature = self.signature()
            if self._read is None or self._read[0] != signature:
                self._read = signature, {"signature": signature, **self._now()}
            return self._read[1]

    def _now(self) -> dict[str, Any]:
        try:
            runs, problems = find_runs([self.folder])
        except DataError:
            runs, problems = [], []
        try:
            data = payload(runs, problems, self.folder) if runs else blank(self.folder, problems)
        except DataError as error:  # a folder of several studies
            runs, data = [], {**blank(self.folder), "notes": [str(error)]}
        return {"subtitle": subtitle(data), "overview": overview(data, runs), "data": data}


class Watch:
    """A server of the live page, running from its creation until `close`.

    Args:
        folder: the folder to follow.
        port: the port; 0 for any free one.

    Raises:
        ConfigError: when the port is taken.
    """

    def __init__(self, folder: str | Path, *, port: int = 0) -> None:
        self.follower = Follower(Path(folder))
        self.token = secrets.token_urlsafe(24)
        try:
            self._server = ThreadingHTTPServer((HOST, port), _handler(self.follower, self.token))
        except OSError as error:
            raise ConfigError(
                f"port {port} of {HOST} cannot be used ({error.strerror}); choose another --port"
            ) from error
        self._server.daemon_threads = True
        self._thread = Thread(target=self._server.serve_forever, name="coterie-watch", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._server.server_address[1])

    @property
    def address(self) -> str:
        """The address of the page, with the token that gives access to it."""
        return f"http://{HOST}:{self.port}/?token={self.token}"

    def wait(self) -> None:
        """Block until the server is closed, or the process is interrupted."""
        self._thread.join()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> "Watch":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _handler(follower: Follower, token: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """Answers GET / with the page and GET /data with what is new; refuses everything else."""

        server_version, sys_version = "coterie", ""

        def do_GET(self) -> None:
            asked = urlsplit(self.path)
            given = parse_qs(asked.query)
            if not self._is_ours(given):
                self._answer(
                    HTTPStatus.FORBIDDEN,
                    "text/plain",
                    "This page is opened by the address that was printed.\n",
                )
            elif asked.path == "/":
                message = follower.message()
                text = render(
                    {**message["data"], "signature": message["signature"]},
                    message["overview"],
                    connect="'self'",
                )
                self._answer(HTTPStatus.OK, "text/html", text)
            elif asked.path == "/data":
                message = follower.message()
                if given.get("since") == [message["signature"]]:
                    self._answer(HTTPStatus.NO_CONTENT, "application/json", "")
                else:
                    self._answer(HTTPStatus.OK, "application/json", embed(message))
            else:
                self._answer(HTTPStatus.NOT_FOUND, "text/plain", "There is no such page.\n")

        def _is_ours(self, given: dict[str, list[str]]) -> bool:
            """Whether the request names this host (a name rebound to it would not) and carries the token."""
            port = self.connection.getsockname()[1]
            secret = given.get("token", [""])[0]
            return ours(self.headers.get("Host", ""), port) and hmac.compare_digest(
                secret.encode(), token.encode()
            )

        def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("Referrer-Policy", "no-referrer")
            self.send_header("Cross-Origin-Resource-Policy", "same-origin")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing: the terminal belongs to the run, and addresses hold the token."""

    return Handler
