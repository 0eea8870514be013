"""Requests whose JSON body is decoded straight into the struct that the handler asks for."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Container
from functools import lru_cache
from typing import NoReturn, TypeVar, cast

import msgspec
from litestar import Request
from litestar.datastructures import State
from litestar.exceptions import InternalServerException
from typing_extensions import override

from api.errors import (
    BodyTooLarge,
    ClientLeft,
    InvalidJson,
    WrongContentEncoding,
    WrongContentType,
)
from api.limits import MAX_CONTAINERS, BodyCheck, bounds_of
from api.record import record_of
from runtime.errors import InvalidRequest

T = TypeVar("T")

LARGE_BYTES = 1 << 20
"""Reading so much takes milliseconds, and each of the ways it is read as long again."""
MAX_IGNORED = 32
"""So many fields without an effect are named."""
_NOTHING = (msgspec.Raw(b"null"), msgspec.Raw(b"false"))
_SILENT = frozenset({"client_metadata", "safety_identifier", "service_tier"})
"""They change nothing in an answer by themselves, so that nobody need be told."""

_PATH = re.compile(r" - at `(?:key in )?\$(?P<path>.*)`$")
_JSON_NAMES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}
_PYTHON_NAME = re.compile(rf"\b(?:{'|'.join(_JSON_NAMES)})\b")
_MISSING = re.compile(r"^Object missing required field `(?P<field>[^`]+)`")


class HttpRequest(Request[None, None, State]):
    """A request whose `data` is validated while it is parsed, with one pass over its bytes."""

    _check: BodyCheck | None = None

    @override
    async def body(self) -> bytes:
        """The bytes of the body, which Litestar asks for before it asks for `json()`.

        Raises:
            WrongContentType: it is not declared as JSON, which browsers' forms cannot be either.
            WrongContentEncoding: it is compressed.
            InvalidJson: it is empty, no UTF-8, or nested too deeply.
            ClientLeft: the client went away while it sent them.
        """
        try:
            body = await super().body()
        except InternalServerException as error:
            raise ClientLeft from error
        if not body:
            raise InvalidJson("it is empty")
        self._check_form()
        record = record_of(self.scope)
        if not record.num_body_bytes:  # or it was looked at when it was asked for first
            record.num_body_bytes = len(body)
            self._refuse_odd()
        await let_others(len(body))
        return body

    @override
    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The body in pieces. While no model sees, nobody sends as much as images need.

        Raises:
            BodyTooLarge: there is more of it than any model may be sent there.
        """
        bounds = bounds_of(self.scope)
        limit = bounds.body_bytes + (bounds.image_bytes if self.app.state.has_sight() else 0)
        num_bytes = self.content_length or 0
        if num_bytes > limit:
            raise BodyTooLarge(limit, bounds.body_setting)
        num_bytes = 0
        self._check = BodyCheck(bounds.limits.depth)
        async for piece in super().stream():
            num_bytes += len(piece)
            if num_bytes > limit:
                raise BodyTooLarge(limit, bounds.body_setting)
            self._check.feed(piece)
            yield piece
        self._check.feed(b"", is_last=True)

    @override
    async def json(self) -> object:
        """The body as the type of the handler's `data` parameter.

        Raises:
            InvalidJson: it is not JSON.
            InvalidRequest: a field has the wrong type; `param` is its path.
        """
        field = self.route_handler.parsed_data_field
        body = await self.body()
        data = decoded(body, object if field is None else field.annotation)
        await let_others(len(body))
        return data

    async def unused_fields(self, known: Container[str]) -> list[str]:
        """Those of the body, as the function of that name has them."""
        body = await self.body()
        unused = unused_fields(body, known)
        await let_others(len(body))
        return unused

    def _refuse_odd(self) -> None:
        if (check := self._check) is None:
            return
        if check.bad_byte is not None:  # parts are given back as they are written
            raise InvalidJson(f"it is not UTF-8 at byte {check.bad_byte}")
        if check.is_too_nested:
            bounds = bounds_of(self.scope)
            most = f"{bounds.limits.depth} levels (limits.{bounds.kind}.depth)"
            raise InvalidJson(
                f"it is nested too much, at most {most} and {MAX_CONTAINERS} parts are read"
            )

    def _check_form(self) -> None:
        media_type = self.content_type[0]
        if media_type != "application/json" and not media_type.endswith("+json"):
            raise WrongContentType(media_type)
        encoding = self.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise WrongContentEncoding(encoding)


async def let_others(num_bytes: int) -> None:
    """After work on so many bytes, which nothing interrupts: have whoever waits go first."""
    if num_bytes >= LARGE_BYTES:
        await asyncio.sleep(0)


@lru_cache(maxsize=64)
def _decoder(body_type: type[object]) -> msgspec.json.Decoder[object]:
    return msgspec.json.Decoder(body_type)


def decoded_at(raw: msgspec.Raw, kind: type[T], path: str) -> T:
    """A part of a body that was kept as it is written until its type was known.

    Raises:
        InvalidRequest: it is not of that type; `param` is the field's path in the whole body.
        InvalidJson: it is not even JSON, which was not looked at so far.
    """
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        _refuse_field(str(error), path)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidJson(f"{path}: {error}") from None
    except RecursionError:
        raise InvalidJson(f"{path} is nested too deeply") from None


def decoded(body: bytes, body_type: type[T]) -> T:
    """A whole body as that type.

    Raises:
        InvalidJson: it is not JSON, or nested too deeply.
        InvalidRequest: a field has the wrong type; `param` is its path.
    """
    try:
        return cast("T", _decoder(body_type).decode(body))
    except msgspec.ValidationError as error:
        _refuse_field(str(error))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidJson(str(error)) from None
    except RecursionError:
        raise InvalidJson(f"it is nested too deeply ({len(body)} bytes)") from None


def unused_fields(body: bytes, known: Container[str]) -> list[str]:
    """The names of fields that nobody here knows, as `hearth.ignored` has them; null and false
    ask for nothing.

    Raises:
        InvalidJson: a name is no text.
    """
    given = decoded(body, dict[str, msgspec.Raw])
    asked = {name for name, raw in given.items() if raw not in _NOTHING}
    return sorted(name[:64] for name in asked - _SILENT if name not in known)[:MAX_IGNORED]


def _refuse_field(complaint: str, root: str = "") -> NoReturn:
    """Turn a complaint such as "Expected `str`, got `int` - at `$.messages[2].role`" around."""
    at = _PATH.search(complaint)
    path = (root + (at["path"] if at else "")).removeprefix(".")
    problem = complaint[: at.start()] if at else complaint
    if missing := _MISSING.match(complaint):
        field = f"{path}.{missing['field']}".removeprefix(".")
        raise InvalidRequest(f"{field} is missing: it is required.", param=field)
    problem = _PYTHON_NAME.sub(lambda match: _JSON_NAMES[match[0]], problem)
    name = path or "The body"
    raise InvalidRequest(f"{name}: {problem[0].lower()}{problem[1:]}.", param=path or None)
