"""An HTTP proxy that makes connections by CONNECT and nothing else, as those of many sites.

python benchmarks/web_proxy.py HOST PORT     until it is stopped; prints what it is asked for
"""

import base64
import socket
import sys
import threading
from contextlib import suppress


class WebProxy:
    """Listens on a port until it is closed.

    Args:
        port: to listen on.
        names: the addresses behind host names that it alone knows.
        refused: ports to which it makes no connection.
        user: "name:password" that it demands.
        host: the address to listen on.
        say: called with each request.
    """

    def __init__(
        self, port: int, names=None, refused=(), user: str = "", host="127.0.0.1", say=None
    ) -> None:
        self.names, self.refused, self.user = dict(names or {}), set(refused), user
        self.url = f"http://{host}:{port}"
        self.asked: list[str] = []
        self._say = say or self.asked.append
        self.seen = bytearray()  # what clients sent through it
        self._open: set[socket.socket] = set()
        self._server = socket.create_server((host, port))
        threading.Thread(target=self._serve, daemon=True).start()

    def __enter__(self) -> "WebProxy":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening and end all connections, as a proxy that is switched off."""
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for one in list(self._open):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._server.accept()
                threading.Thread(target=self._answer, args=(client,), daemon=True).start()

    def _answer(self, client: socket.socket) -> None:
        self._open.add(client)
        with client, suppress(OSError, ValueError):
            head = b""
            while b"\r\n\r\n" not in head:
                piece = client.recv(4096)
                if not piece:
                    return
                head += piece
            lines = head.decode("latin-1").split("\r\n")
            method, target, _ = lines[0].split(" ")
            self._say(f"{method} {target}")
            host, _, port = target.rpartition(":")
            word = "Basic " + base64.b64encode(self.user.encode()).decode()
            given = [
                line.partition(": ")[2] for line in lines if line.lower().startswith("proxy-auth")
            ]
            if self.user and word not in given:
                client.sendall(b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n")
                return
            if method != "CONNECT" or int(port) in self.refused:
                client.sendall(b"HTTP/1.1 403 Forbidden\r\n\r\n")
                return
            host = self.names.get(host, host).strip("[]")
            with socket.create_connection((host, int(port)), timeout=5) as server:
                server.settimeout(None)
                self._open.add(server)
                client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                back = threading.Thread(target=self._copy, args=(server, client, None), daemon=True)
                back.start()
                self._copy(client, server, self.seen)
                back.join()

    @staticmethod
    def _copy(source: socket.socket, sink: socket.socket, seen: bytearray | None) -> None:
        with suppress(OSError):
            while piece := source.recv(1 << 16):
                if seen is not None and len(seen) < 1 << 20:
                    seen += piece
                sink.sendall(piece)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    with WebProxy(int(sys.argv[2]), host=sys.argv[1], say=lambda line: print(line, flush=True)):
        threading.Event().wait()
