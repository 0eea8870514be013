"""Who is let in, and for how long: keys that were given, and browsers that signed in with one.

All of it is kept in memory: a server that starts again knows no session, whatever its keys are.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, TypeVar
from urllib.parse import urlsplit

from api.observe.redact import PAGE_TOKEN
from runtime.errors import Forbidden, TooManyWrongKeys
from runtime.keys import Keyring, Principal, digest_of
from store import clock

SESSION_S = 12 * 3600
MAX_SESSIONS = 64
"""The oldest one ends for the next."""

MAX_WRONG = 20
WRONG_EVERY_S = 3.0
"""So many wrong keys an address may give at once, and then one in so many seconds."""

_MAX_KNOWN = 4096
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})

K = TypeVar("K")
V = TypeVar("V")
Clock = Callable[[], float]


def monotonic_s() -> float:
    """Seconds of a clock that nobody sets, and that goes on while the machine sleeps."""
    return clock.now().monotonic_s


class Session(NamedTuple):
    """One browser, until `ends_s` of the clock, or until its key opens nothing any more."""

    key_digest: str
    page_token: str
    ends_s: float


class Sessions:
    """What cookies stand for. A cookie is random, says nothing, and is kept as a digest."""

    def __init__(self, keyring: Keyring, port: int, clock: Clock = monotonic_s) -> None:
        self._keyring = keyring
        self._clock = clock
        self._open: OrderedDict[str, Session] = OrderedDict()
        self.cookie = f"hearth_session_{port}"
        """Its name: browsers send cookies to every port of a host."""

    def open(self, key: str) -> str:
        """The value of the cookie for a browser whose user gave this key of the operator's."""
        while len(self._open) >= MAX_SESSIONS:
            self._open.popitem(last=False)
        token = secrets.token_urlsafe(32)
        ends_s = self._clock() + SESSION_S
        session = Session(digest_of(key), secrets.token_urlsafe(32), ends_s)
        self._open[_named(token)] = session
        return token

    def find(self, headers: Mapping[str, str]) -> Session | None:
        """The session of a request. `headers` are looked up in lower case."""
        for token in self._tokens(headers):
            session = self._open.get(_named(token))
            if session is not None and self._holds(session):
                return session
        return None

    def close(self, headers: Mapping[str, str]) -> None:
        """Sign out: the cookie opens nothing any more, whoever has it."""
        for token in self._tokens(headers):
            self._open.pop(_named(token), None)

    def caller(self, method: str, headers: Mapping[str, str]) -> Principal | None:
        """Who signed in and asks from a page of ours; None without a session.

        Raises:
            Forbidden: the browser says that it is another site's page, or it has no page token.
        """
        session = self.find(headers)
        if session is None:
            return None
        check_own_page(method, headers)
        given = headers.get(PAGE_TOKEN, "").encode()
        if method not in _SAFE and not hmac.compare_digest(given, session.page_token.encode()):
            raise Forbidden(
                "A request by cookie needs the token of the page; reload the page.",
                "page_token_needed",
            )
        return self._keyring.of_digest(session.key_digest)

    def _holds(self, session: Session) -> bool:
        caller = self._keyring.of_digest(session.key_digest)
        return self._clock() < session.ends_s and caller is not None and caller.is_admin

    def _tokens(self, headers: Mapping[str, str]) -> Iterator[str]:
        for part in headers.get("cookie", "").split(";"):
            name, _, value = part.strip().partition("=")
            if name == self.cookie:
                yield value


class KeyChecker:
    """Looks keys up, for as long as their address did not give too many wrong ones.

    A key that was looked up for an address before costs nothing, so that neither a program with an
    old key nor somebody who guesses keeps out those who came with the right one.
    """

    def __init__(self, keyring: Keyring, clock: Clock = monotonic_s) -> None:
        self._keyring = keyring
        self._clock = clock
        self._wrong: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._seen: OrderedDict[tuple[str, str], None] = OrderedDict()

    def find(self, key: str, address: str) -> Principal | None:
        """Whose key this is; None when it is wrong.

        Raises:
            TooManyWrongKeys: it was not even looked at.
        """
        pair = (address, digest_of(key))
        is_new, num_left = pair not in self._seen, self._num_left(address)
        if is_new and num_left < 1:
            raise TooManyWrongKeys(int((1 - num_left) * WRONG_EVERY_S) + 1)
        caller = self._keyring.of_digest(pair[1])
        if is_new and caller is None:
            _remember(self._wrong, address, (num_left - 1, self._clock()))
        _remember(self._seen, pair, None)
        return caller

    def _num_left(self, address: str) -> float:
        num_left, at_s = self._wrong.get(address, (float(MAX_WRONG), 0.0))
        return min(MAX_WRONG, num_left + (self._clock() - at_s) / WRONG_EVERY_S)


def check_own_page(method: str, headers: Mapping[str, str]) -> None:
    """Raises Forbidden unless the browser says that a page of this server asks, or its user.

    Other servers on the same host are the same site to browsers, which send them cookies as well.
    """
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    is_own = site in (None, "same-origin") and (origin is not None or site is not None)
    if origin is not None:
        is_own &= urlsplit(origin).netloc.lower() == headers.get("host", "").lower() != ""
    elif method in _SAFE:
        is_own = (
            site in (None, "same-origin", "none") or headers.get("sec-fetch-mode") == "navigate"
        )
    if not is_own:
        raise Forbidden("Only pages of this server may ask that by cookie.", "origin_not_allowed")


def _named(token: str) -> str:
    return hashlib.sha256(token.encode(errors="surrogateescape")).hexdigest()


def _remember(table: OrderedDict[K, V], key: K, value: V) -> None:
    """As the newest one of a bounded table."""
    table[key] = value
    table.move_to_end(key)
    while len(table) > _MAX_KNOWN:
        table.popitem(last=False)
