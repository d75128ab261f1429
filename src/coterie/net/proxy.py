"""The way out of a site: directly, or through its HTTP proxy.

A proxy is asked by CONNECT for a connection to host and port. What goes through it is the TLS
connection between two members, with both certificates, so that it learns which hosts are dialed, how
much and when, as a relay does. It resolves the names of hosts.
"""

import asyncio
import http.client
import re
import socket
import urllib.request
from base64 import b64encode
from urllib.parse import unquote, urlsplit

from coterie.errors import ConfigError
from coterie.net.payload import escape_text

ENVIRONMENT = "environment"
"""The proxy that the variables https_proxy and no_proxy name."""

_FORM = re.compile(r"http://(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})/?")


class ProxyRefusedError(OSError):
    """The proxy of this site makes no connection."""


def check_proxy(value: str) -> None:
    """Check the setting `network.proxy`.

    Raises:
        ConfigError: when it names no proxy that can be used.
    """
    if value == ENVIRONMENT:
        _read_environment()
    if value in ("", ENVIRONMENT):
        return
    if "@" in value:
        # A file is copied, stored and shown; the found value is not repeated here.
        raise ConfigError(
            "proxy names a user; expected http://host:port: put a proxy with a password "
            "into the environment of the node (https_proxy) and set proxy = 'environment'"
        )
    match = _FORM.fullmatch(value)
    if match is None or not 0 < int(match["port"]) < 1 << 16:
        raise ConfigError(f"proxy is {value!r}; expected 'http://host:port', 'environment' or ''")


def find_proxy(setting: str, host: str) -> str | None:
    """Return the URL of the proxy by which a host is dialed; None where it is dialed directly.

    Args:
        setting: `network.proxy`.
        host: to dial.

    Raises:
        ConfigError: when the environment names a proxy that cannot be used.
    """
    if setting != ENVIRONMENT:
        return setting or None
    if urllib.request.proxy_bypass(host):
        return None
    return _read_environment()


def _read_environment() -> str | None:
    found = urllib.request.getproxies().get("https")
    if found is None:
        return None
    parts = urlsplit(found if "://" in found else f"http://{found}")
    # A proxy that is itself spoken to by TLS is not supported by gRPC.
    if parts.scheme != "http" or not parts.hostname:
        raise ConfigError(
            "https_proxy of the environment is no http://host:port; proxy = 'environment' "
            "takes such a one"
        )
    return parts._replace(netloc=parts.netloc if parts.port else f"{parts.netloc}:80").geturl()


def connect(address: tuple[str, int], proxy: str | None, timeout: float) -> socket.socket:
    """Return a connection to host and port, made by a proxy where there is one.

    Args:
        address: host and port.
        proxy: URL of the proxy.
        timeout: seconds for each step.

    Raises:
        OSError: when there is no connection, or the proxy refuses it.
    """
    if proxy is None:
        return socket.create_connection(address, timeout=timeout)
    parts, (host, port) = urlsplit(proxy), address
    headers = {}
    if parts.username is not None:
        word = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        headers["Proxy-Authorization"] = "Basic " + b64encode(word.encode()).decode()
    asking = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout)
    asking.set_tunnel(f"[{host}]" if ":" in host else host, port, headers)
    try:
        asking.connect()
    except http.client.HTTPException as error:
        asking.close()
        raise ProxyRefusedError(f"the proxy does not speak HTTP: {type(error).__name__}") from None
    except OSError as error:
        asking.close()
        # The standard library raises a bare OSError with the proxy's words where it refuses.
        if type(error) is OSError and error.errno is None:
            raise ProxyRefusedError(f"the proxy refuses it: {escape_text(error)}") from None
        raise
    made, asking.sock = asking.sock, None
    return made


async def connect_in_thread(
    address: tuple[str, int], proxy: str | None, timeout: float
) -> socket.socket:
    """Return a connection as `connect` does, while the event loop goes on.

    Who does not wait for it any more leaves no connection behind: it is closed when it comes.
    """
    making = asyncio.get_running_loop().run_in_executor(None, connect, address, proxy, timeout)
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        making.add_done_callback(_close_late)
        raise


def _close_late(made: "asyncio.Future[socket.socket]") -> None:
    # To ask for the error keeps asyncio from reporting it as one that nobody saw.
    if not made.cancelled() and made.exception() is None:
        made.result().close()
