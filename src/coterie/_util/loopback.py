"""Loopback: servers for this machine only, and which requests to them a browser was tricked into."""

HOST = "127.0.0.1"


def is_local_request(host: str, port: int) -> bool:
    """Return whether a request names this machine as its host.

    A page of another site can bind its own name to 127.0.0.1 (DNS rebinding) and then read what is
    served here; its requests name that site.

    Args:
        host: the request's Host header.
        port: the port that is served.

    Example:
        >>> ours("localhost:9464", 9464), ours("evil.example:9464", 9464)
        (True, False)
    """
    return host in (f"{HOST}:{port}", f"localhost:{port}")
