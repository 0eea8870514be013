"""How much one request may hold, whoever's protocol it speaks."""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping
from itertools import accumulate
from typing import Annotated, NamedTuple, cast

import msgspec
from litestar.types import AnyCallable, ASGIApp, Message, Receive, Scope, Send
from msgspec import Meta

from api.http.refusal import refuse
from runtime.config.limits import GenerateLimits, PromptLimits, RouteKind, RouteLimits
from runtime.config.settings import Settings
from runtime.errors import AnswerTooLate
from runtime.supervisor.running_time import RunningTimeout
from runtime.types import ChatPrompt, GenerateRequest

ModelName = Annotated[str, Meta(max_length=1024)]
"""What a request calls a model: it is looked up, logged and repeated as it is."""

MAX_MESSAGES = 16_384
MAX_TOOLS = 1024
"""What is done for each of them looks at others: hundreds of thousands took minutes to read."""

SHORTEN = "leave the oldest out, or sum the conversation up"
"""What helps where there are more messages."""

SLOW_NUMBER_PARTS = 64
"""A number that is long or has a large exponent is read as slowly as so many parts."""
LONG_NUMBER = 20
MAX_NUMBER = 1024
"""Characters of a number. Reading one takes as long as the square of its length."""

_TEXT = re.compile(rb'"[^"]*"')
_DIGIT_BY_DIGIT = bytes.maketrans(b"0123456789", b"0" * 10)
_NO_MARK = bytes(set(range(256)) - set(b'"[]{},.0123456789eE+-'))
_NO_BRACKET = bytes(set(range(256)) - set(b"[]{}"))
_NUMBER = b"0.eE+-"
_SLOW_NUMBER = re.compile(rb"[0.]{%d,}|[eE][+-]?0{3}" % LONG_NUMBER)
_LONG_NUMBER = re.compile(rb"[0.eE+-]{%d,}" % LONG_NUMBER)
_STEP = [0] * 256
_STEP[ord("[")] = _STEP[ord("{")] = 1
_STEP[ord("]")] = _STEP[ord("}")] = -1


class Bounds(NamedTuple):
    """What holds for the routes of a kind: its own limits within those for all routes.

    `time_s` is until the answer begins; the time of an answer as a whole is in its request.
    """

    kind: RouteKind
    limits: RouteLimits
    body_bytes: int
    image_bytes: int
    time_s: float | None

    @classmethod
    def of(cls, kind: RouteKind, settings: Settings) -> Bounds:
        """As the settings say."""
        limits = settings.limits.of(kind)
        is_answer = kind == "generate"
        times_s = (limits.time_s, settings.request_deadline_s if kind == "embed" else None)
        return cls(
            kind=kind,
            limits=limits,
            body_bytes=min(limits.body_bytes or settings.max_body_bytes, settings.max_body_bytes),
            image_bytes=settings.max_image_body_bytes - settings.max_body_bytes if is_answer else 0,
            time_s=None if is_answer else min(filter(None, times_s), default=None),
        )

    @property
    def body_setting(self) -> str:
        """What to change so that larger bodies are read."""
        is_own = self.limits.body_bytes == self.body_bytes
        return f"limits.{self.kind}.body_bytes" if is_own else "max_body_bytes"


BoundsByHandler = Mapping[AnyCallable, Bounds]


def bounds_of(scope: Scope) -> Bounds:
    """Those of the route that a request was sent to."""
    found = scope["litestar_app"].state["bounds"].get(scope["route_handler"].fn)
    assert found is not None, "handlers of the framework's own read no body"
    return cast("Bounds", found)


class BodyCheck:
    """Looks at a body piece by piece while it arrives, so that nobody waits for the whole of it.

    `depth` is how deeply JSON may be nested, `parts` how many parts it may have: decoding is one
    step, in which no other thread runs, and takes as long as there are parts. Each list, each
    object and two quotation marks are a part. So are eight commas or backslashes; a slow number is
    `SLOW_NUMBER_PARTS`. Of what is inside texts only backslashes count.
    """

    def __init__(self, depth: int, parts: int) -> None:
        self.is_too_nested = False
        self.has_too_many_parts = False
        self.has_endless_number = False
        """It has one of more than `MAX_NUMBER` characters."""
        self.bad_byte: int | None = None
        """Where it is no UTF-8."""
        self._depth = depth
        self._most_eighths = 8 * parts
        self._num_eighths = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._num_bytes = 0
        self._is_in_text = False
        self._level = 0
        self._backslash = b""
        self._cut_number: bytes = b""

    def feed(self, piece: bytes, *, is_last: bool = False) -> None:
        """The next bytes; after the last ones the verdict stands."""
        if self.bad_byte is None:
            self._check_text(piece, is_last=is_last)
        if not self.is_odd:
            marks = self._marks_outside(piece)
            self._check_numbers(marks, is_last=is_last)
            self._check_nesting(marks)

    @property
    def is_odd(self) -> bool:
        """It is not to be decoded, whether it is UTF-8 or not."""
        return self.is_too_nested or self.has_too_many_parts or self.has_endless_number

    @property
    def num_parts(self) -> int:
        """So many were seen, as long as the body is not odd."""
        return -(-self._num_eighths // 8)

    def _check_text(self, piece: bytes, *, is_last: bool) -> None:
        before = len(self._decoder.getstate()[0])
        try:
            self._decoder.decode(piece, is_last)
        except UnicodeDecodeError as error:
            self.bad_byte = self._num_bytes - before + error.start
        self._num_bytes += len(piece)

    def _marks_outside(self, piece: bytes) -> bytes:
        """Brackets, commas and numbers, each digit as 0, of what is not inside texts."""
        piece = self._backslash + piece
        num_backslashes = len(piece) - len(piece.rstrip(b"\\"))
        self._backslash = b"\\" * (num_backslashes % 2)
        piece = piece.removesuffix(self._backslash)
        marks = piece.replace(rb"\\", b"").replace(rb"\"", b"")
        marks = marks.translate(_DIGIT_BY_DIGIT, _NO_MARK)
        self._count(piece.count(b"\\") + 4 * marks.count(b'"'))
        if self._is_in_text:
            _, end, marks = marks.partition(b'"')
            self._is_in_text = not end
        marks, begin, _ = _TEXT.sub(b"", marks).partition(b'"')
        self._is_in_text |= bool(begin)
        return marks

    def _check_numbers(self, marks: bytes, *, is_last: bool) -> None:
        """A number that goes on in the next piece is looked at there."""
        marks = self._cut_number + marks
        whole = marks if is_last else marks.rstrip(_NUMBER)
        self._cut_number = marks[len(whole) :]
        self._count(8 * SLOW_NUMBER_PARTS * len(_SLOW_NUMBER.findall(whole)))
        longest = max(map(len, _LONG_NUMBER.findall(marks)), default=0)
        self.has_endless_number = longest > MAX_NUMBER

    def _check_nesting(self, marks: bytes) -> None:
        brackets = marks.translate(None, _NO_BRACKET)
        num_opened = brackets.count(b"[") + brackets.count(b"{")
        self._count(8 * num_opened + marks.count(b","))
        if self.has_too_many_parts:
            return
        levels = [*accumulate(map(_STEP.__getitem__, brackets), initial=self._level)]
        self._level = levels[-1]
        self.is_too_nested = max(levels) > self._depth

    def _count(self, num_eighths: int) -> None:
        self._num_eighths += num_eighths
        self.has_too_many_parts = self._num_eighths > self._most_eighths


def narrowed(request: GenerateRequest, limits: RouteLimits) -> GenerateRequest:
    """The request, which wants no more than may be asked for where it was sent."""
    if isinstance(limits, PromptLimits) and limits.prompt_tokens is not None:
        request = msgspec.structs.replace(request, max_prompt_tokens=limits.prompt_tokens)
    if not isinstance(limits, GenerateLimits):
        return request
    if (most := limits.output_tokens) is not None:
        wanted = request.max_tokens
        max_tokens = most if wanted is None else min(wanted, most)
        request = msgspec.structs.replace(
            request, max_tokens=max_tokens, is_default_max=wanted is None
        )
    if limits.time_s is not None:
        deadline_s = min(request.deadline_s, limits.time_s)
        idle_s = min(request.idle_s, deadline_s / 2)
        request = msgspec.structs.replace(request, deadline_s=deadline_s, idle_s=idle_s)
    return request


def check_size(request: GenerateRequest) -> None:
    """Raises InvalidRequest when a prompt has more parts than any conversation has."""
    prompt = request.prompt
    if not isinstance(prompt, ChatPrompt):
        return
    check_entries("messages", len(prompt.messages))
    if (num_tools := len(prompt.tools)) > MAX_TOOLS:
        refuse("tools", f"has {num_tools} entries, at most {MAX_TOOLS} are served: leave some out.")


def check_entries(path: str, num: int, remedy: str = SHORTEN) -> None:
    """Refuse more messages or items than any conversation has. Raises InvalidRequest."""
    if num > MAX_MESSAGES:
        refuse(path, f"has {num} entries, at most {MAX_MESSAGES} are served: {remedy}.")


class TimeLimit:
    """The ASGI layer that ends a request whose answer does not begin in the time of its route."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request.

        Raises:
            AnswerTooLate: nothing of an answer was there in time.
        """
        known: BoundsByHandler = scope["litestar_app"].state["bounds"]
        bounds = known.get(scope["route_handler"].fn)
        if bounds is None or bounds.time_s is None:
            await self._app(scope, receive, send)
            return

        limit = RunningTimeout(bounds.time_s)

        async def begin(message: Message) -> None:
            limit.lift()
            await send(message)

        try:
            async with limit:
                await self._app(scope, receive, begin)
        except TimeoutError:
            if not limit.expired():
                raise
            raise AnswerTooLate(bounds.time_s, bounds.kind) from None
