"""Loopback: servers for this machine only, and how they recognize requests of foreign sites."""

HOST = "127.0.0.1"


def is_local_request(host: str, port: int) -> bool:
    """Return whether a request names this machine as its host.

    A page of another site can bind its own name to 127.0.0.1 (DNS rebinding) and then read what is
    served here; its requests name that site.

    Args:
        host: the request's Host header.
        port: the port that is served.

    Example:
        >>> is_local_request("localhost:9464", 9464), is_local_request("evil.example:9464", 9464)
        (True, False)
    """
    return host in (f"{HOST}:{port}", f"localhost:{port}")
