"""A server of pages for this machine only.

It listens on 127.0.0.1, and requires the token of its address and this machine's host name in every
request, so that no other page can read it through the browser. A form is taken only from a page of
its own.
"""

import hmac
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import TracebackType
from urllib.parse import parse_qsl, urlsplit

from coterie._util.loopback import HOST, is_local_request
from coterie.errors import ConfigError

_MAX_FORM = 4096  # bytes


@dataclass(frozen=True)
class Answer:
    """What is answered to a request.

    Args:
        text: the body.
        kind: its media type.
        status: of the answer.
        location: where the browser goes next, with `HTTPStatus.SEE_OTHER`.
    """

    text: str = ""
    kind: str = "text/html"
    status: HTTPStatus = HTTPStatus.OK
    location: str = ""


NO_PAGE = Answer("There is no such page.\n", "text/plain", HTTPStatus.NOT_FOUND)
Responder = Callable[[str, Mapping[str, str]], Answer]
"""Answers a request: (path, what its address or its form says)."""


class PageServer:
    """A server of pages, running from its creation until `close`.

    Args:
        answer: answers GET.
        act: answers POST, whose forms come from pages of this server; None where there are none.
        port: the port; 0 for any free one.

    Raises:
        ConfigError: when the port is taken.
    """

    def __init__(self, answer: Responder, act: Responder | None = None, *, port: int = 0) -> None:
        # 192 random bits.
        self.token = secrets.token_urlsafe(24)
        try:
            self._server = ThreadingHTTPServer((HOST, port), _make_handler(answer, act, self.token))
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

    def __enter__(self) -> "PageServer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _make_handler(
    answer: Responder, act: Responder | None, token: str
) -> type[BaseHTTPRequestHandler]:
    class PageHandler(BaseHTTPRequestHandler):
        """Answers GET, and POST where the server acts; refuses the rest."""

        # The default reveals the version of Python.
        server_version, sys_version = "coterie", ""

        def do_GET(self) -> None:
            asked = urlsplit(self.path)
            given = dict(parse_qsl(asked.query))
            if not self._is_authorized(given):
                self._refuse("This page is opened by the address that was printed.\n")
                return
            self._send_answer(answer(asked.path, given))

        def do_POST(self) -> None:
            if act is None:
                self.send_error(HTTPStatus.NOT_IMPLEMENTED)
                return
            size = self.headers.get("Content-Length", "")
            if not (size.isascii() and size.isdigit() and int(size) <= _MAX_FORM):
                self._refuse(f"Expected a form of at most {_MAX_FORM} bytes.\n")
                return
            form = self.rfile.read(int(size)).decode("utf-8", "replace")
            given = dict(parse_qsl(form))
            if not (self._is_authorized(given) and self._is_from_here()):
                self._refuse("This form is sent by the page whose address was printed.\n")
                return
            self._send_answer(act(urlsplit(self.path).path, given))

        def _is_authorized(self, given: Mapping[str, str]) -> bool:
            """Whether the request names this host (a rebound name would not) and the token."""
            # The port of this connection, since the server may have chosen it.
            port = self.connection.getsockname()[1]
            secret = given.get("token", "")
            # `compare_digest` takes equally long for every wrong token.
            return is_local_request(self.headers.get("Host", ""), port) and hmac.compare_digest(
                secret.encode(), token.encode()
            )

        def _is_from_here(self) -> bool:
            """Whether a form was sent by a page of this server, as its browser says."""
            return self.headers.get("Origin", "") == f"http://{self.headers.get('Host', '')}"

        def _refuse(self, text: str) -> None:
            self._send_answer(Answer(text, "text/plain", HTTPStatus.FORBIDDEN))

        def _send_answer(self, found: Answer) -> None:
            body = found.text.encode()
            self.send_response(found.status)
            if found.location:
                self.send_header("Location", found.location)
            self.send_header("Content-Type", f"{found.kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            # The address and the page hold the token: nothing is cached or sent to other sites,
            # and no other site shows it in a frame.
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("X-Frame-Options", "DENY")
            self.send_header("Referrer-Policy", "same-origin")
            self.send_header("Cross-Origin-Resource-Policy", "same-origin")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: the terminal belongs to the run, and addresses hold the token."""

    return PageHandler
