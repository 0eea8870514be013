"""Who may ask at all: host names, origins, keys. Decided purely by `judge`, enforced by `Guard`.

A page in a browser on this machine can reach loopback, under a name that its owner made resolve
there; so names and origins are checked even where no key is asked for.
"""

from __future__ import annotations

import base64
import ipaddress
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple
from urllib.parse import quote, urlencode, urlsplit

from litestar import Request
from litestar.datastructures import Headers
from litestar.types import ASGIApp, HTTPScope, Receive, Scope, Send

from api.http import pages
from api.http.errors import AnyRequest, ErrorHandlers
from api.http.sessions import KeyChecker, Sessions
from runtime.config.settings import Settings
from runtime.errors import (
    Forbidden,
    HearthError,
    MissingKey,
    SettingsError,
    TooManyWrongKeys,
    Unauthorized,
    WrongKey,
)
from runtime.keys import ANYONE, TENANT, Keyring, Need, Needs, Principal, is_digest, needs_of

SIGN_IN = "/sign-in"
SIGN_IN_FILES = frozenset({"icon.svg", "style.css", "theme.js"})
OPEN_PATHS = frozenset(
    {"/health", "/health/live", SIGN_IN, *(f"{SIGN_IN}/{name}" for name in SIGN_IN_FILES)}
)
_SUMS = frozenset({"/metrics", "/running"})
"""All callers together are summed up there, so where there may be several it is the admin's."""


class GuardRules(NamedTuple):
    """What is let in. `hosts` are names without a port; addresses need not be listed."""

    hosts: frozenset[str]
    origins: frozenset[str]
    any_address: bool
    needs: Needs
    keyring: Keyring
    keys: KeyChecker
    sessions: Sessions


def rules_of(settings: Settings, token_digest: str) -> GuardRules:
    """The settings' rules; `token_digest` is of the operator's own key on this machine.

    Raises:
        SettingsError: other machines would be let in without a key, or a digest is none.
    """
    for name, digest in {**settings.api_keys, "admin_key": settings.admin_key or ""}.items():
        if digest and not is_digest(digest):
            raise SettingsError(
                f"The key {name!r} must be given as a digest (sha256:…): `hearth key` makes one."
            )
    for name in settings.api_keys:
        if not TENANT.fullmatch(name):
            raise SettingsError(
                f"A key in [api_keys] cannot be named {name[:80]!r}: use up to 64 letters, digits, "
                "dots, dashes and underscores."
            )
    is_local = is_loopback_name(settings.host)
    if not is_local and not (settings.allow_remote and settings.api_keys):
        raise SettingsError(
            f"host = {settings.host!r} lets other machines in. That needs allow_remote = true and "
            "at least one key in [api_keys] (`hearth key` makes one); or use host = 127.0.0.1."
        )
    own = {"localhost", settings.host.lower(), *(name.lower() for name in settings.allowed_hosts)}
    if not is_local:
        name = socket.gethostname().lower()
        own |= {name, f"{name.partition('.')[0]}.local"}
    admins = (token_digest, *((settings.admin_key,) if settings.admin_key else ()))
    keyring = Keyring(settings.api_keys, admins)
    return GuardRules(
        hosts=frozenset(own),
        origins=frozenset(origin.lower().rstrip("/") for origin in settings.allowed_origins),
        any_address=not is_local,
        needs=needs_of(settings.api_keys, settings.admin_key),
        keyring=keyring,
        keys=KeyChecker(keyring),
        sessions=Sessions(keyring, settings.port),
    )


def judge(
    path: str, headers: Mapping[str, str], rules: GuardRules, method: str = "GET", address: str = ""
) -> Principal:
    """Who asks for `path` from a network address. `headers` are looked up in lower case.

    Raises:
        Forbidden: under that name, from that page, or with that key it is not to be had.
        TooManyWrongKeys: that address gave too many wrong ones.
        MissingKey, WrongKey: it needs a key, and there is none or it is unknown.
    """
    check_place(headers, rules)
    need, key = _need(path, headers, rules.needs, method), key_of(headers)
    if need == "nothing":
        # There a wrong key is none; it counts as a guess, since an admin may be told more.
        with suppress(Forbidden, TooManyWrongKeys):
            return _known(key, headers, rules, method, address) or ANYONE
        return ANYONE
    caller = _known(key, headers, rules, method, address)
    if caller is None:
        raise WrongKey if key else MissingKey(need)
    if need == "admin key" and not caller.is_admin:
        raise Forbidden("That needs the admin key.", "admin_key_needed")
    return caller


def _need(path: str, headers: Mapping[str, str], needs: Needs, method: str) -> Need:
    """The key that is asked for there. Only a browser that shows the dashboard gets it at `/`."""
    if path in OPEN_PATHS:
        return "nothing"
    if pages.is_admin(path) or (path == "/" and pages.is_for_people(method, headers)):
        return needs.admin
    return needs.sums if path in _SUMS else needs.use


def _known(
    key: str, headers: Mapping[str, str], rules: GuardRules, method: str, address: str
) -> Principal | None:
    """Whose key was given, or who signed in.

    Raises:
        Forbidden: who signed in did not send this.
        TooManyWrongKeys: that address gave too many wrong ones.
    """
    return rules.keys.find(key, address) if key else rules.sessions.caller(method, headers)


def check_place(headers: Mapping[str, str], rules: GuardRules) -> None:
    """Where a request comes from and which name it asks, whoever it is.

    Raises:
        Forbidden: under that name, or from that page, it is not to be had.
    """
    host = headers.get("host", "")
    if host and not _is_own(_name_of(host), rules):
        raise Forbidden(
            f"This server does not go by the name {host[:128]!r}. Use its address, or add the "
            "name to allowed_hosts.",
            "host_not_allowed",
        )
    _check_origin(headers, host, rules)


def canonical(path: str) -> str:
    """A path as routes know it: what the router would ignore must not be what rules look at."""
    return "/" + "/".join(filter(None, path.split("/")))


def is_loopback_name(host: str) -> bool:
    """Whether nobody but this machine can reach a server that listens there."""
    if host.lower() == "localhost":
        return True
    address = _address(host)
    return address is not None and address.is_loopback


def _check_origin(headers: Mapping[str, str], host: str, rules: GuardRules) -> None:
    origin = headers.get("origin")
    if origin is None:
        is_foreign = headers.get("sec-fetch-site") == "cross-site"
        if is_foreign and headers.get("sec-fetch-mode") != "navigate":
            raise Forbidden("Pages of other sites may not ask this server.", "origin_not_allowed")
        return
    is_same = urlsplit(origin).netloc.lower() == host.lower() != ""
    if not is_same and origin.lower() not in rules.origins:
        raise Forbidden(
            f"Pages of {origin[:128]!r} may not ask this server; allowed_origins can let them.",
            "origin_not_allowed",
        )


def key_of(headers: Mapping[str, str]) -> str:
    """The key that a program sends with its request, if any."""
    scheme, _, rest = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return rest.strip()
    if scheme.lower() == "basic":  # curl's --user
        try:
            return base64.b64decode(rest, validate=True).decode().partition(":")[2]
        except ValueError:
            return ""
    return headers.get("x-api-key", "")


def _is_own(name: str, rules: GuardRules) -> bool:
    if name in rules.hosts:
        return True
    address = _address(name)
    return address is not None and (rules.any_address or address.is_loopback)


def _name_of(host: str) -> str:
    """The host without its port, and an IPv6 address without its brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.rpartition(":")[0].lower() if host.count(":") == 1 else host.lower()


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


class Guard:
    """The ASGI layer that lets in whom the rules let in; `scope["state"]["caller"]` says who."""

    def __init__(self, app: ASGIApp, rules: GuardRules, desk: ErrorHandlers) -> None:
        self._app = app
        self._rules = rules
        self._service = desk

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or the application's lifespan."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["path"] = canonical(scope["path"])  # what is judged is what is served
        headers: Mapping[str, str] = Headers.from_scope(scope)
        if leave := pages.leave(scope["path"], headers, self._rules.origins):
            send = pages.telling(send, leave)
        try:
            if leave and pages.is_preflight(scope["method"], headers):
                check_place(headers, self._rules)
                await pages.grant(send, pages.terms(headers))
                return
            address = pages.address_of(scope)
            caller = judge(scope["path"], headers, self._rules, scope["method"], address)
        except (Forbidden, TooManyWrongKeys, Unauthorized) as error:
            await self._refuse(error, Request(scope, receive, send), send)
            return
        scope["state"]["caller"] = caller
        await self._app(scope, receive, send)

    async def _refuse(self, error: HearthError, request: AnyRequest, send: Send) -> None:
        """People are asked for their key; programs are told how to send one."""
        headers, scope = request.headers, request.scope
        if isinstance(error, MissingKey) and pages.is_for_people(scope["method"], headers):
            await pages.send_on(send, _sign_in_url(scope))
            return
        if isinstance(error, Unauthorized):
            send = pages.telling(send, _challenges(headers))
        answer = self._service.refuse(request, error)
        await answer.to_asgi_response(app=None, request=request)(scope, request.receive, send)  # pyright: ignore[reportUnknownMemberType]


def _sign_in_url(scope: HTTPScope) -> str:
    query = scope["query_string"].decode("latin-1")
    wanted = quote(scope["path"]) + (f"?{query}" if query else "")
    return f"{SIGN_IN}?{urlencode({'next': wanted})}"


def _challenges(headers: Mapping[str, str]) -> pages.Headers:
    """A line for each way to send a key; a page asks its user itself, without the browser."""
    kinds = [b"Bearer"] if "sec-fetch-mode" in headers else [b"Bearer", b"Basic"]
    return [(b"www-authenticate", kind + b' realm="Hearth"') for kind in kinds]
