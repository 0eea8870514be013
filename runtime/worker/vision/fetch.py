"""Fetching a picture that a client only named, without being sent to places of our own network.

https only; every name is resolved here, every address checked, and the connection made to exactly
that address; a redirect is a new address and is checked like the first one.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import SplitResult, urljoin, urlsplit

from typing_extensions import override

from runtime.errors import UnusableImage
from runtime.types import MAX_IMAGE_BYTES

_MAX_REDIRECTS = 3
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_CHUNK_BYTES = 64 * 1024
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class FetchPolicy(NamedTuple):
    """Where pictures may be fetched from, and how long that may take altogether.

    `context` is for servers whose certificates the machine does not know.
    """

    is_allowed: Callable[[Address], bool]
    timeout_s: float = 10.0
    max_bytes: int = MAX_IMAGE_BYTES
    context: ssl.SSLContext | None = None


def is_public(address: Address) -> bool:
    """Whether an address belongs to the internet, and not to this machine or its networks."""
    inner = _inner(address) if isinstance(address, ipaddress.IPv6Address) else None
    if inner is not None:
        return is_public(inner)
    return address.is_global and not address.is_multicast


def _inner(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address that an IPv6 one leads to, in the ways in which one can."""
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    return address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1]


PUBLIC = FetchPolicy(is_public)


def fetch(url: str, field: str, policy: FetchPolicy = PUBLIC) -> bytes:
    """The bytes at an https address. Blocks.

    Raises:
        UnusableImage: it may not be fetched, cannot be, is too large, or takes too long; `param`
            is the field.
    """
    deadline_s = time.monotonic() + policy.timeout_s
    try:
        for _ in range(_MAX_REDIRECTS + 1):
            answer = _get(url, policy, deadline_s)
            if isinstance(answer, bytes):
                return answer
            url = urljoin(url, answer.location)
    except _Refused as error:
        raise UnusableImage(field, f"cannot be fetched: {error}") from error
    except TimeoutError as error:
        problem = f"cannot be fetched: it took longer than {policy.timeout_s:g} s."
        raise UnusableImage(field, problem) from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        problem = f"cannot be fetched: {type(error).__name__} at its server."
        raise UnusableImage(field, problem) from error
    raise UnusableImage(field, "cannot be fetched: it is redirected too often.")


class _Refused(Exception):
    pass


class _Redirect(NamedTuple):
    location: str


def _get(url: str, policy: FetchPolicy, deadline_s: float) -> bytes | _Redirect:
    place = urlsplit(url)
    if place.scheme != "https" or not place.hostname:
        why = "only https addresses are."
        raise _Refused(why)
    connection = _Pinned(place, _address_of(place, policy), policy, _left(deadline_s))
    # A server that sends a byte now and then would never meet the socket's own timeout.
    alarm = threading.Timer(_left(deadline_s), connection.hang_up)
    alarm.start()
    try:
        target = (place.path or "/") + (f"?{place.query}" if place.query else "")
        connection.request("GET", target, headers={"accept": "image/*", "user-agent": "hearth"})
        # The socket is the response's own where its server closes after it.
        with connection.getresponse() as response:
            if response.status in _REDIRECTS:
                return _Redirect(response.headers.get("location", ""))
            if response.status != 200:
                raise _Refused(f"its server answers {response.status}.")
            data = _body(response, policy)
        _left(deadline_s)
        return data
    except (OSError, http.client.HTTPException):
        _left(deadline_s)
        raise
    finally:
        alarm.cancel()
        connection.close()


def _address_of(place: SplitResult, policy: FetchPolicy) -> str:
    """The address to connect to; all that the name stands for must be allowed."""
    found = socket.getaddrinfo(place.hostname, place.port or 443, type=socket.SOCK_STREAM)
    addresses = [str(entry[4][0]) for entry in found]
    for address in addresses:
        if not policy.is_allowed(ipaddress.ip_address(address.partition("%")[0])):
            why = "its server is not on the public internet."
            raise _Refused(why)
    return addresses[0]


def _body(response: http.client.HTTPResponse, policy: FetchPolicy) -> bytes:
    data = bytearray()
    while piece := response.read1(_CHUNK_BYTES):
        data += piece
        if len(data) > policy.max_bytes:
            raise _Refused(f"it has more than {policy.max_bytes} bytes.")
    return bytes(data)


def _left(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s


class _Pinned(http.client.HTTPSConnection):
    """Connects to the address that was checked, and asks it for the certificate of the name."""

    def __init__(
        self, place: SplitResult, address: str, policy: FetchPolicy, timeout_s: float
    ) -> None:
        self._context_used = policy.context or ssl.create_default_context()
        super().__init__(
            place.hostname or "", place.port, timeout=timeout_s, context=self._context_used
        )
        self._address = address
        self._is_over = False

    @override
    def connect(self) -> None:
        plain = socket.create_connection((self._address, self.port), self.timeout)
        self.sock = self._context_used.wrap_socket(plain, server_hostname=self.host)
        if self._is_over:
            raise TimeoutError

    def hang_up(self) -> None:
        """End whatever is going on, for good. May be called from another thread."""
        self._is_over = True
        with contextlib.suppress(OSError, AttributeError):
            self.sock.shutdown(socket.SHUT_RDWR)
