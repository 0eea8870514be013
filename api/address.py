"""Where the server listens."""

from __future__ import annotations

import errno
import socket

from runtime.config.settings import Settings


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to that address; port 0 takes any free one.

    Raises:
        OSError: the address cannot be had.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()  # until somebody listens, two can bind to the same port
    except OSError:
        listener.close()
        raise
    return listener


def url_of(host: str, port: int) -> str:
    """How the server is reached from this machine."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)  # noqa: S104
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


def why_not(settings: Settings, error: OSError) -> str:
    """Why the address cannot be had, and what to do about it."""
    host, port = settings.host, settings.port
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} on {host} is already in use, perhaps by another hearth. "
            f"Stop what uses it (lsof -i :{port}) or choose another with --port."
        )
    return f"cannot listen on {host} port {port}: {error.strerror}. Correct --host or --port."
