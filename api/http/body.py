"""Requests whose JSON body is decoded straight into the struct that the handler asks for."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import lru_cache
from typing import NoReturn, TypeVar, cast

import msgspec
from litestar import Request
from litestar.datastructures import State
from litestar.exceptions import InternalServerException
from typing_extensions import override

from api.http.errors import (
    BodyTooLarge,
    ClientLeft,
    InvalidJson,
    TooManyParts,
    WrongContentEncoding,
    WrongContentType,
)
from api.http.expansion import may_expand
from api.http.limits import MAX_NUMBER, SHORTEN, BodyCheck, Bounds, bounds_of, check_entries
from api.http.past import Mended, with_mended_past, with_whole_characters
from api.http.uncollected import uncollected
from api.http.unused import listed, unused_fields
from api.observe.record import record_of
from runtime.errors import InvalidRequest

T = TypeVar("T")

LARGE_BYTES = 1 << 16
"""What is done to all of so much is done in a thread."""
_STEP_BYTES = 1 << 16
"""What arrives is looked at in steps of so many, and other requests go on in between."""
PART_BYTES = 12
"""A part of a body takes as long as a text of so many bytes at least."""
_HUGE_BYTES = 1 << 20
_ONE_AT_A_TIME = ThreadPoolExecutor(1, "huge-bodies")
"""Each step that cannot be interrupted keeps all threads waiting: no two follow one another."""

_PATH = re.compile(r" - at `(?:key in )?\$(?P<path>.*)`$")
_JSON_NAMES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}
_PYTHON_NAME = re.compile(rf"\b(?:{'|'.join(_JSON_NAMES)})\b")
_MISSING = re.compile(r"^Object missing required field `(?P<field>[^`]+)`")


class HttpRequest(Request[None, None, State]):
    """A request whose `data` is validated while it is parsed, with one pass over its bytes."""

    _check: BodyCheck | None = None
    _checked: bytes = b""
    mended: tuple[str, ...] = ()
    """What of the body was replaced or left out, as no request is refused for it."""
    _work_bytes: int = 0
    """So long a text takes as long as what the body holds."""

    @override
    async def body(self) -> bytes:
        """The bytes of the body, which Litestar asks for before it asks for `json()`.

        Raises:
            WrongContentType: it is not declared as JSON, which browsers' forms cannot be either.
            WrongContentEncoding: it is compressed.
            InvalidJson: it is empty, no UTF-8, nested too deeply, or has an endless number.
            TooManyParts: it would take too long to decode.
            ClientLeft: the client went away while it sent them.
        """
        if self._checked:
            return self._checked
        try:
            pieces = [piece async for piece in self.stream()]
        except InternalServerException as error:
            raise ClientLeft from error
        num_bytes = sum(map(len, pieces))
        if not num_bytes:
            raise InvalidJson("it is empty")
        self._check_form()
        record_of(self.scope).num_body_bytes = num_bytes
        self._refuse_odd()
        self._work_bytes = PART_BYTES * self._check.num_parts if self._check else 0
        self._take(await apart(num_bytes, lambda: with_whole_characters(b"".join(pieces))))
        if await apart(num_bytes, lambda: may_expand(self._checked)):
            self._work_bytes = max(self._work_bytes, LARGE_BYTES)
        return self._checked

    @override
    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The body in pieces. While no model sees, nobody sends as much as images need.

        Raises:
            BodyTooLarge: there is more of it than any model may be sent there.
        """
        bounds = bounds_of(self.scope)
        self._refuse_large(self.content_length or 0, bounds)
        num_bytes = 0
        self._check = BodyCheck(bounds.limits.depth, bounds.limits.parts)
        async for piece in super().stream():
            if piece:
                num_bytes += len(piece)
                self._refuse_large(num_bytes, bounds)
                await self._look_at(piece, self._check)
            yield piece
        self._check.feed(b"", is_last=True)

    async def _look_at(self, piece: bytes, check: BodyCheck) -> None:
        for begin in range(0, len(piece), _STEP_BYTES):
            if begin:
                await asyncio.sleep(0)
            check.feed(piece[begin : begin + _STEP_BYTES])

    def _refuse_large(self, num_bytes: int, bounds: Bounds) -> None:
        if num_bytes <= bounds.body_bytes:
            return
        limit = bounds.body_bytes + (bounds.image_bytes if self.app.state.has_sight() else 0)
        if num_bytes > limit:
            raise BodyTooLarge(limit, bounds.body_setting)

    @override
    async def json(self) -> object:
        """The body as the type of the handler's `data` parameter.

        Raises:
            InvalidJson: it is not JSON.
            InvalidRequest: a field has the wrong type; `param` is its path.
        """
        field = self.route_handler.parsed_data_field
        kind: type[object] = object if field is None else field.annotation
        body = await self.body()
        data, mended = await self.apart(lambda: decoded_conversation(body, kind))
        self._take(mended)
        return data

    def _take(self, mended: Mended) -> None:
        """From here on that is the body."""
        self._checked = mended.body
        self.mended += mended.ignored

    async def unused_fields(
        self, kind: type[msgspec.Struct], also: Collection[str] = ()
    ) -> list[str]:
        """Those of the body, as the function of that name has them, after what was mended."""
        body = await self.body()
        unused = await self.apart(lambda: unused_fields(body, kind, also=also))
        return [*listed(iter(self.mended)), *unused]

    async def apart(self, work: Callable[[], T], num_more_bytes: int = 0) -> T:
        """What `work` makes of the body or of what was made of it; it knows nothing of the loop.

        `num_more_bytes` is what the body stands for besides.
        """
        num_bytes = record_of(self.scope).num_body_bytes + num_more_bytes
        return await apart(max(num_bytes, self._work_bytes), work)

    def _refuse_odd(self) -> None:
        if (check := self._check) is None:
            return
        if check.bad_byte is not None:  # parts are given back as they are written
            raise InvalidJson(f"it is not UTF-8 at byte {check.bad_byte}")
        bounds = bounds_of(self.scope)
        if check.is_too_nested:
            most = f"{bounds.limits.depth} levels (limits.{bounds.kind}.depth)"
            raise InvalidJson(f"it is nested too much, at most {most} are read")
        if check.has_endless_number:
            raise InvalidJson(f"a number has more than {MAX_NUMBER} characters")
        if check.has_too_many_parts:
            raise TooManyParts(bounds.limits.parts, f"limits.{bounds.kind}.parts")

    def _check_form(self) -> None:
        media_type = self.content_type[0]
        if media_type != "application/json" and not media_type.endswith("+json"):
            raise WrongContentType(media_type)
        encoding = self.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise WrongContentEncoding(encoding)


async def apart(num_bytes: int, work: Callable[[], T]) -> T:
    """What comes of work that takes as long as so many bytes; of many in a thread, so that the
    event loop does other things meanwhile.
    """
    if num_bytes < LARGE_BYTES:
        return work()
    if num_bytes < _HUGE_BYTES:
        return await asyncio.to_thread(work)
    context = copy_context()
    return await asyncio.get_running_loop().run_in_executor(_ONE_AT_A_TIME, context.run, work)


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
        InvalidRequest: a field has the wrong type, or more entries than any conversation has;
            `param` is its path.
    """
    try:
        with uncollected():
            data = cast("T", _decoder(body_type).decode(body))
    except msgspec.ValidationError as error:
        _refuse_field(str(error))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidJson(str(error)) from None
    except RecursionError:
        raise InvalidJson(f"it is nested too deeply ({len(body)} bytes)") from None
    field = getattr(body_type, "ENTRIES", "") or getattr(body_type, "HISTORY", "")
    if isinstance(data, msgspec.Struct) and field:
        _check_entries(field, msgspec.structs.asdict(data)[field], body_type)
    return data


def _check_entries(field: str, entries: object, kind: type[object]) -> None:
    if isinstance(entries, list):
        check_entries(field, len(cast("list[object]", entries)), getattr(kind, "REMEDY", SHORTEN))


def decoded_conversation(body: bytes, body_type: type[T]) -> tuple[T, Mended]:
    """The same, and the body without what of its past had a wrong type. Raises as well."""
    try:
        return decoded(body, body_type), Mended(body)
    except InvalidRequest:
        is_struct = issubclass(body_type, msgspec.Struct)
        mended = with_mended_past(body, body_type) if is_struct else None
        if mended is None:
            raise
        return decoded(mended.body, body_type), mended


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
