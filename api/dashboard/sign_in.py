"""Signing in with the operator's key, and out again: a browser cannot send a key by itself."""

from __future__ import annotations

import re
from html import escape
from string import Template
from urllib.parse import parse_qs

from litestar import Response, get, post
from litestar.datastructures import Cookie
from litestar.di import NamedDependency
from litestar.exceptions import NotFoundException
from litestar.params import FromPath, FromQuery
from litestar.response import Redirect

from api.dashboard.page import FILES, HEADERS, content
from api.http.body import HttpRequest
from api.http.errors import WrongContentType
from api.http.guard import SIGN_IN, SIGN_IN_FILES, GuardRules
from api.http.pages import address_of
from api.http.sessions import SESSION_S, Sessions, check_own_page
from runtime.errors import InvalidRequest, TooManyWrongKeys

FRONT = "/"
_FORM = "application/x-www-form-urlencoded"
_MAX_FIELDS = 8
_HEADERS = {
    **HEADERS,
    "content-security-policy": HEADERS["content-security-policy"].replace(
        "form-action 'none'", "form-action 'self'"
    ),
    "cache-control": "no-store",
}
_HERE = re.compile(r"/(?!/)[A-Za-z0-9_.~%/?=&:,+-]{0,500}")
"""A path and a query of this server's; what browsers would read otherwise, such as `//`, is not."""

_WRONG = "That key is not known here."
_TENANTS = "That key is a tenant's. The dashboard needs the admin key."


@get(SIGN_IN, include_in_schema=False, sync_to_thread=False)
def sign_in_page(
    request: HttpRequest,
    rules: NamedDependency[GuardRules],
    next: FromQuery[str] = FRONT,  # noqa: A002 - what the rest of the web calls it
) -> Response[bytes] | Redirect:
    """The form; whoever needs it no more is sent on."""
    if rules.needs.admin == "nothing" or rules.sessions.find(request.headers) is not None:
        return Redirect(place(next), status_code=303)
    return _page(next)


@post(SIGN_IN, include_in_schema=False, status_code=200)
async def sign_in(
    request: HttpRequest, rules: NamedDependency[GuardRules]
) -> Response[bytes] | Redirect:
    """Give a browser a cookie in exchange for the operator's key.

    Raises:
        Forbidden: the form is not ours.
        WrongContentType, BodyTooLarge, InvalidRequest: nor is what was sent.
    """
    check_own_page("POST", request.headers)
    key, wanted = await _fields(request, "key", "next")
    if rules.needs.admin == "nothing":
        return Redirect(place(wanted), status_code=303)
    try:
        caller = rules.keys.find(key, address_of(request.scope))
    except TooManyWrongKeys as error:
        answer = _page(wanted, error.message, 429)
        answer.headers["retry-after"] = str(error.retry_after_s)
        return answer
    if caller is None or not caller.is_admin:
        return _page(wanted, _WRONG if caller is None else _TENANTS, 403)
    rules.sessions.close(request.headers)
    cookie = _cookie(rules.sessions, rules.sessions.open(key), SESSION_S)
    return Redirect(place(wanted), status_code=303, cookies=[cookie])


@post("/sign-out", include_in_schema=False, status_code=204)
async def sign_out(request: HttpRequest, rules: NamedDependency[GuardRules]) -> Response[None]:
    """End the session, whoever else may have its cookie."""
    rules.sessions.close(request.headers)
    return Response(None, status_code=204, cookies=[_cookie(rules.sessions, "", 0)])


@get(f"{SIGN_IN}/{{name:str}}", include_in_schema=False, sync_to_thread=False)
def sign_in_file(name: FromPath[str]) -> Response[bytes]:
    """What the form looks like: nothing of the dashboard itself."""
    if name not in SIGN_IN_FILES:
        raise NotFoundException
    return Response(content(name), media_type=FILES[name], headers=HEADERS)


def place(wanted: str) -> str:
    """Where to go next: somewhere on this server, whatever a link said."""
    return wanted if _HERE.fullmatch(wanted) and "//" not in wanted else FRONT


async def _fields(request: HttpRequest, *names: str) -> list[str]:
    if request.content_type[0] != _FORM:
        raise WrongContentType(request.content_type[0], _FORM)
    body = b"".join([piece async for piece in request.stream()])
    try:
        given = parse_qs(body.decode("latin-1"), max_num_fields=_MAX_FIELDS)
    except ValueError as error:
        raise InvalidRequest(f"The form has more than {_MAX_FIELDS} fields.") from error
    return [given.get(name, [""])[0].strip() for name in names]


def _page(wanted: str, message: str = "", status: int = 200) -> Response[bytes]:
    words = {"next": escape(place(wanted)), "message": escape(message)}
    page = Template(content("sign_in.html").decode()).substitute(words).encode()
    return Response(page, status_code=status, media_type="text/html", headers=dict(_HEADERS))


def _cookie(sessions: Sessions, value: str, seconds: int) -> Cookie:
    return Cookie(sessions.cookie, "/", value, seconds, httponly=True, samesite="strict")


HANDLERS = [sign_in_page, sign_in, sign_out, sign_in_file]
