"""What was sent before is never refused: what cannot be read of it is mended, and told.

`runtime/prompt/past.py` says what counts as the newest input, which alone may be refused. Here
stands how the rest is read at the door. Each part is read in the same way whether it is the newest
input or not, so that what was accepted once stays the same text for the model.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, NamedTuple, TypeVar, Union, cast, get_args, get_origin

import msgspec

from api.http.limits import MAX_MESSAGES, SHORTEN, check_entries
from runtime.errors import InvalidRequest
from runtime.prompt.past import is_newest

T = TypeVar("T")

MAX_MENDED = MAX_MESSAGES
"""So many places of a conversation are mended; each takes as long as some of a message's fields."""

RESULT_ROLES = frozenset({"tool", "function"})
_UNKNOWN = "unknown"
_NAMES = frozenset({"role", "type", "id", "tool_use_id", "call_id", "name"})
"""Required fields that a message can be read without."""
_HALF = re.compile(
    r"\\u[dD][89abAB][\da-fA-F]{2}\\u[dD][c-fC-F][\da-fA-F]{2}|\\u[dD][89a-fA-F][\da-fA-F]{2}"
)
_HALF_MARKS = (b"\\ud", b"\\uD")
"""Each is looked for in a step of its own, so that the loop turns between them."""
_PAIR_LENGTH = 12
_INSTEAD = r"\ufffd"


@dataclass(frozen=True)
class Turn:
    """A message while it is read: whether it may be refused, and else where it is told what of it
    could not be read.
    """

    refuses: bool
    ignored: list[str]

    @classmethod
    def at(cls, number: int, count: int, ignored: list[str], *, is_result: bool = False) -> Turn:
        """Message `number` of so many."""
        return cls(is_newest(number, count, is_result=is_result), ignored)

    def result(self) -> Turn:
        """For what is in a tool's result."""
        return replace(self, refuses=False)

    def read(self, how: Callable[[], T], instead: T) -> T:
        """What `how` reads; `instead` where it cannot be read.

        Raises:
            InvalidRequest: it cannot, and is the newest input.
        """
        try:
            return how()
        except InvalidRequest as error:
            if self.refuses:
                raise
            tell(self.ignored, error.message)
            return instead

    def mended(self, raw: msgspec.Raw, kind: type[msgspec.Struct], path: str) -> msgspec.Raw:
        """An object as it is written, without what is not as `kind` has it, where that may be
        left out.
        """
        if self.refuses:
            return raw
        try:
            msgspec.json.decode(raw, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            try:
                mended = _mended(msgspec.json.decode(raw), kind, path, self.ignored)
            except (_Lost, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                return raw
            return msgspec.Raw(msgspec.json.encode(mended))
        return raw

    def arguments(self, text: str, path: str) -> str:
        """The arguments of a call: JSON inside of JSON, in which halves of characters may be."""
        whole, num_halves = whole_characters(text)
        if num_halves:
            tell(self.ignored, f"{path} ({halves(num_halves)})")
        return whole


STRICT = Turn(refuses=True, ignored=[])
"""For what is in no conversation."""


def tell(ignored: list[str], what: str) -> None:
    """Add one more to what of a conversation could not be read.

    Raises:
        InvalidRequest: it is more than any conversation has that somebody meant.
    """
    if len(ignored) >= MAX_MENDED:
        why = f"More than {MAX_MENDED} places of the conversation cannot be read: {SHORTEN}."
        raise InvalidRequest(f"{why} One more is: {what[:200]}", "messages")
    ignored.append(what)


def halves(count: int) -> str:
    """How it is told that halves of characters were replaced."""
    return f"{count} half characters, read as U+FFFD"


def whole_characters(text: str) -> tuple[str, int]:
    """JSON text in which U+FFFD is escaped for each half of a surrogate pair, and their number.

    It is no character, no decoder takes it, and clients that cut texts make some.
    """
    if "\\ud" not in text and "\\uD" not in text:
        return text, 0
    pieces: list[str] = []
    done = 0
    for found in _HALF.finditer(text):
        start, end = found.span()
        run = start
        while run and text[run - 1] == "\\":
            run -= 1
        is_pair = end - start == _PAIR_LENGTH
        if (start - run) % 2:  # that backslash is itself escaped: of a pair only its end is one
            start += _PAIR_LENGTH // 2
            if not is_pair:
                continue
        elif is_pair:
            continue
        pieces += (text[done:start], _INSTEAD)
        done = end
    return "".join([*pieces, text[done:]]), len(pieces) // 2


class Mended(NamedTuple):
    """A body, and what of it was replaced or left out."""

    body: bytes
    ignored: tuple[str, ...] = ()


def with_whole_characters(body: bytes) -> Mended:
    """A body without halves of characters."""
    if b"\\" not in body or not any(mark in body for mark in _HALF_MARKS):
        return Mended(body)
    whole, num_halves = whole_characters(body.decode("latin-1"))
    if not num_halves:
        return Mended(body)
    return Mended(whole.encode("latin-1"), (f"the body ({halves(num_halves)})",))


def with_mended_past(body: bytes, kind: type[msgspec.Struct]) -> Mended | None:
    """A body of that type without what was said before in wrong types; None where that is not
    what is wrong with it.

    Raises:
        InvalidRequest: there is more of it than any conversation has.
    """
    history: str | None = getattr(kind, "HISTORY", None)
    if history is None:
        return None
    try:
        given = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        turns = msgspec.json.decode(given[history], type=list[msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError):
        return None
    hint = next(one.type for one in _fields(kind) if one.name == history)
    part = next(_structs_in(hint))
    check_entries(history, len(turns))
    ignored: list[str] = []
    for number, raw in enumerate(turns):
        turn = Turn.at(number, len(turns), ignored, is_result=is_result(raw))
        turns[number] = turn.mended(raw, part, f"{history}[{number}]")
    given[history] = msgspec.Raw(msgspec.json.encode(turns))
    return Mended(msgspec.json.encode(given), tuple(ignored)) if ignored else None


def is_result(turn: msgspec.Raw | object) -> bool:
    """Whether a message or an item, of whatever protocol, is what a tool gave."""
    try:
        given = msgspec.json.decode(turn) if isinstance(turn, msgspec.Raw) else turn
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    if not isinstance(given, dict):
        return False
    fields = cast("dict[str, object]", given)
    role, kind = fields.get("role"), fields.get("type")
    return str(role) in RESULT_ROLES or str(kind).endswith("_output")


# Objects of which some fields are not of their types


class _Lost(Exception):
    """Nothing of a value can be kept."""


def _mended(value: object, kind: object, path: str, ignored: list[str]) -> object:
    """The value without what is not of its type. Raises _Lost."""
    if _fits(value, kind):
        return value
    for part in _parts_of(kind):
        origin = get_origin(part)
        if isinstance(part, type) and issubclass(part, msgspec.Struct):
            if isinstance(value, dict):
                fields = cast("dict[str, object]", value)
                return _mended_object(fields, part, path, ignored)
            if (instead := getattr(part, "INSTEAD", None)) is not None:
                tell(ignored, f"{path} (is no object)")
                return instead
        elif origin is list and isinstance(value, list):
            items = cast("list[object]", value)
            return _mended_list(items, get_args(part)[0], path, ignored)
    raise _Lost


def _mended_object(
    given: dict[str, object], kind: type[msgspec.Struct], path: str, ignored: list[str]
) -> dict[str, object]:
    kept = dict(given)
    for field in _fields(kind):
        name = field.encode_name
        at = f"{path}.{name}"
        if name in given:
            try:
                kept[name] = _mended(given[name], field.type, at, ignored)
            except _Lost:
                tell(ignored, f"{at} (has a wrong type)")
                del kept[name]
        if name in kept or not field.required:
            continue
        if name not in given and name in _NAMES:
            tell(ignored, f"{at} (is missing)")
        if name in given or name in _NAMES:
            kept[name] = _stand_in(field.type, name)
    if not _fits(kept, kind):
        raise _Lost
    return kept


def _mended_list(given: list[object], part: object, path: str, ignored: list[str]) -> list[object]:
    kept: list[object] = []
    for number, value in enumerate(given):
        at = f"{path}[{number}]"
        try:
            kept.append(_mended(value, part, at, ignored))
        except _Lost:
            tell(ignored, f"{at} (has a wrong type)")
            instead: object = getattr(part, "INSTEAD", None)
            kept += [instead] if instead is not None else []
    return kept


def _stand_in(kind: object, name: str) -> object:
    """What a required field has that cannot be read."""
    if name in _NAMES:
        return _UNKNOWN
    for part in _parts_of(kind):
        if get_origin(part) is list:
            return []
        if isinstance(part, type) and issubclass(part, msgspec.Struct):
            fields = (one for one in _fields(part) if one.required)
            return {one.encode_name: _stand_in(one.type, one.encode_name) for one in fields}
    raise _Lost


def _parts_of(kind: object) -> Sequence[object]:
    """The types of a union; another type is the only one."""
    if get_origin(kind) is Annotated:
        return _parts_of(get_args(kind)[0])
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _structs_in(kind: object) -> Iterator[type[msgspec.Struct]]:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind
    for part in get_args(kind):
        yield from _structs_in(part)


def _fits(value: object, kind: object) -> bool:
    try:
        _decoder(kind).decode(msgspec.json.encode(value))
    except msgspec.ValidationError:
        return False
    return True


@lru_cache(maxsize=256)
def _fields(kind: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    """Of each of many objects it is asked, and each time all annotations would be compiled."""
    return msgspec.structs.fields(kind)


@lru_cache(maxsize=256)
def _decoder(kind: object) -> msgspec.json.Decoder[object]:
    return msgspec.json.Decoder(cast("type[object]", kind))
