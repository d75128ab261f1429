"""The live page: the views of the report, following a run folder while a study or a node runs.

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

from coterie._util.loopback import HOST, is_local_request
from coterie.errors import ConfigError, DataError
from coterie.report.data import build_empty_payload
from coterie.report.network import render_networks
from coterie.report.page import (
    build_data,
    encode_for_script,
    format_subtitle,
    render_overview,
    render_page,
)
from coterie.results.stored_runs import (
    CONFIG,
    EDGES,
    FEDERATION,
    METRICS,
    NETWORK,
    PROVENANCE,
    load_runs,
)

WATCHED = (CONFIG, METRICS, EDGES, PROVENANCE, FEDERATION, NETWORK)


class FolderFollower:
    """The content of a folder, loaded again only when a file in it has changed.

    Args:
        folder: folder of a study, a run or a node; it may not exist yet.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = Lock()
        self._read: tuple[str, dict[str, Any]] | None = None

    def compute_signature(self) -> str:
        """Return a short text that changes whenever a file of a run does."""
        digest = hashlib.sha256()
        # Sorted: the order in which a file system lists files must not change the signature.
        for path in sorted(self._iterate_files()):
            try:
                found = path.stat()
            except FileNotFoundError:  # replaced or deleted since it was listed
                continue
            # Time and size, not the content: the page asks every two seconds.
            digest.update(f"{path} {found.st_mtime_ns} {found.st_size}\n".encode())
        return digest.hexdigest()[:16]

    def _iterate_files(self) -> Iterator[Path]:
        for name in WATCHED:
            yield from self.folder.rglob(name)

    def load_message(self) -> dict[str, Any]:
        """Return the page's data: `signature`, `subtitle` and `overview` as HTML, and `data`."""
        # Requests run in threads: one of them loads, the others wait and take its result.
        with self._lock:
            signature = self.compute_signature()
            if self._read is None or self._read[0] != signature:
                self._read = signature, {"signature": signature, **self._build_views()}
            return self._read[1]

    def _build_views(self) -> dict[str, Any]:
        try:
            runs, problems = load_runs([self.folder])
        except DataError:
            runs, problems = [], []
        try:
            data = build_data(runs, problems, self.folder)
        except DataError as error:  # a folder of several studies
            runs, data = [], {**build_empty_payload(self.folder), "notes": [str(error)]}
        return {
            "subtitle": format_subtitle(data),
            "overview": render_networks(self.folder) + render_overview(data, runs),
            "data": data,
        }


class WatchServer:
    """A server of the live page, running from its creation until `close`.

    Args:
        folder: the folder to follow.
        port: the port; 0 for any free one.

    Raises:
        ConfigError: when the port is taken.
    """

    def __init__(self, folder: str | Path, *, port: int = 0) -> None:
        self.follower = FolderFollower(Path(folder))
        # 192 random bits.
        self.token = secrets.token_urlsafe(24)
        try:
            self._server = ThreadingHTTPServer(
                (HOST, port), _make_handler(self.follower, self.token)
            )
        except OSError as error:
            raise ConfigError(
                f"port {port} of {HOST} cannot be used ({error.strerror}); choose another --port"
            ) from error
        # A connection that a browser keeps open must not keep the process alive.
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

    def __enter__(self) -> "WatchServer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _make_handler(follower: FolderFollower, token: str) -> type[BaseHTTPRequestHandler]:
    class PageHandler(BaseHTTPRequestHandler):
        """Answers GET / with the page and GET /data with new content; refuses the rest."""

        # The default reveals the version of Python.
        server_version, sys_version = "coterie", ""

        def do_GET(self) -> None:
            asked = urlsplit(self.path)
            given = parse_qs(asked.query)
            if not self._is_authorized(given):
                self._send_answer(
                    HTTPStatus.FORBIDDEN,
                    "text/plain",
                    "This page is opened by the address that was printed.\n",
                )
            elif asked.path == "/":
                message = follower.load_message()
                text = render_page(
                    {**message["data"], "signature": message["signature"]},
                    message["overview"],
                    connect="'self'",
                )
                self._send_answer(HTTPStatus.OK, "text/html", text)
            elif asked.path == "/data":
                message = follower.load_message()
                # The page asks every two seconds: without news the answer is empty.
                if given.get("since") == [message["signature"]]:
                    self._send_answer(HTTPStatus.NO_CONTENT, "application/json", "")
                else:
                    self._send_answer(HTTPStatus.OK, "application/json", encode_for_script(message))
            else:
                self._send_answer(HTTPStatus.NOT_FOUND, "text/plain", "There is no such page.\n")

        def _is_authorized(self, given: dict[str, list[str]]) -> bool:
            """Whether the request names this host (a rebound name would not) and the token."""
            # The port of this connection, since the server may have chosen it.
            port = self.connection.getsockname()[1]
            secret = given.get("token", [""])[0]
            # `compare_digest` takes equally long for every wrong token.
            return is_local_request(self.headers.get("Host", ""), port) and hmac.compare_digest(
                secret.encode(), token.encode()
            )

        def _send_answer(self, status: HTTPStatus, kind: str, text: str) -> None:
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            # The address and the page hold the token: nothing is cached or sent to other sites.
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("Referrer-Policy", "no-referrer")
            self.send_header("Cross-Origin-Resource-Policy", "same-origin")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: the terminal belongs to the run, and addresses hold the token."""

    return PageHandler
