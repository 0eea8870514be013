"""Tool calls in a model's text, checked against the tools of the request.

What is no call, or no call to one of them, stays the text that it was, with a note that says why.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field
from typing import Any, cast

from runtime.types import ToolCall, ToolCallDelta
from runtime.worker.output.dialect import Dialect
from runtime.worker.output.families import Family, family_of
from runtime.worker.output.scan import (
    Argued,
    Called,
    NotACall,
    Piece,
    Reading,
    Scan,
    Unclosed,
)
from runtime.worker.output.tools import FREEFORM_ARGUMENT, RequestTools

MALFORMED = "malformed_tool_call"
UNCLOSED = "unclosed_tool_call"
"""The answer ended inside of a call."""
UNKNOWN = "unknown_tool"
UNREAD = "unread_tool_call"
"""There is a mark in the text that ends a call or stands in it, and the answer has no call."""
REFUSED = "refused_tool_call"
"""It calls one of the tools that must not be called now."""
REPAIRED = "repaired_tool_call"
EXTRA = "extra_tool_call"
"""A further call than the request allows; it was dropped."""


@dataclass(slots=True)
class Section:
    """What a section of calls comes to at its end: its last pieces, text that is no call, and the
    `rest` that follows it. A `is_broken` one has said the beginning of a call that has no end.
    """

    deltas: list[ToolCallDelta] = field(default_factory=list[ToolCallDelta])
    text: str = ""
    rest: str = ""
    is_broken: bool = False


class CallReader:
    """Reads one choice's tool calls, section by section; `notes` say what was odd."""

    def __init__(self, dialect: Dialect, tools: RequestTools, index: int) -> None:
        self._family: Family | None = family_of(dialect.name)
        self._tools = tools
        self._index = index
        self._scan = Scan()
        self._reading: Reading | None = None
        self._ended: Section | None = None
        self._bare_mark: str | None = None
        self._is_streaming = False
        self._num_said = 0
        self._since = 0
        self._unread: list[str] = []
        self.num_calls = 0
        self.given_ids: tuple[str, ...] = ()
        """The ids of the first calls; the others have the model's, or new ones."""
        self.notes: list[str] = []

    @property
    def inner_marks(self) -> tuple[str, ...]:
        """As `Family.inner_marks`."""
        return self._family.inner_marks if self._family is not None else ()

    @property
    def is_full(self) -> bool:
        """No further call is wanted."""
        return self.num_calls > 0 and not self._tools.is_parallel

    @property
    def has_extra(self) -> bool:
        """A further call than is wanted has begun."""
        return EXTRA in self.notes

    def open(self, mark: str) -> None:
        """A section begins with this mark."""
        family = self._family
        assert family is not None
        self._scan = Scan(mark)
        self._bare_mark = mark if not mark or mark in family.bare else None
        self._reading = family.read(self._scan, self._tools)
        self._ended = None
        self._num_said = self._since = 0
        self._unread = []

    def feed(self, text: str) -> list[ToolCallDelta]:
        """More of the open section; what of it is certain."""
        self._scan.text += text
        return self._read()

    def ended(self) -> Section | None:
        """What the open section came to, once it is over."""
        return self._ended

    def close(self, *, is_cut: bool) -> Section:
        """There is no more text; `is_cut` says that the model did not end by itself."""
        self._scan.is_over, self._scan.is_cut = True, is_cut
        deltas = self._read()
        ended = self._ended or Section()
        ended.deltas = deltas
        return ended

    def _read(self) -> list[ToolCallDelta]:
        deltas: list[ToolCallDelta] = []
        while self._ended is None and not self.has_extra:
            assert self._reading is not None
            try:
                piece = next(self._reading)
                if piece is None:
                    break
                deltas += self._take(piece)
            except StopIteration:
                if self._ended is None:
                    self._end()
            except NotACall:
                self._fail(MALFORMED)
            except Unclosed:
                self._fail(UNCLOSED)
        return deltas

    def _take(self, piece: Piece) -> list[ToolCallDelta]:
        if isinstance(piece, Argued):
            self._is_streaming = not piece.is_last
            self._since = self._scan.at
            return [self._argued(piece.text)]
        if isinstance(piece, Called):
            call = self._checked(piece)
            if call is None:
                self._unread.append(piece.text or self._scan.text[self._since : self._scan.at])
            self._since = self._scan.at
            return [] if call is None else self._say(call)
        said = self._say(ToolCall(piece.id or _new_id(), piece.name, ""))
        self._is_streaming = bool(said)
        return said

    def _argued(self, text: str) -> ToolCallDelta:
        last = self.num_calls - 1
        return ToolCallDelta(index=self._index, call_index=last, arguments=text)

    def _say(self, call: ToolCall) -> list[ToolCallDelta]:
        if self.is_full:
            self._note(EXTRA)
            return []
        given = self.given_ids[self.num_calls : self.num_calls + 1]
        self.num_calls += 1
        self._num_said += 1
        return [
            ToolCallDelta(
                index=self._index,
                call_index=self.num_calls - 1,
                arguments=call.arguments,
                id=given[0] if given else call.id,
                name=call.name,
            )
        ]

    def _checked(self, call: Called) -> ToolCall | None:
        """The call as it is told; None where it is none, or none of a tool to be called."""
        tool = self._tools.by_name.get(call.name)
        if tool is None:
            if self._bare_mark is not None:
                raise NotACall
            self._note(REFUSED if call.name in self._tools.refused else UNKNOWN)
            return None
        call_id, arguments = call.id or _new_id(), call.arguments
        try:
            if tool.is_freeform:
                arguments = _freeform(arguments)
            elif isinstance(arguments, str):
                if not isinstance(json.loads(arguments), dict):
                    raise TypeError
                return ToolCall(call_id, call.name, arguments)
            elif not isinstance(arguments, dict):
                raise TypeError
            return ToolCall(call_id, call.name, json_text(arguments))
        except (TypeError, ValueError, RecursionError) as error:
            raise NotACall from error

    def _end(self) -> None:
        """The section is whole."""
        scan = self._scan
        text = "".join(self._unread) if self._num_said else scan.text[: scan.at]
        if scan.is_repaired and self._num_said:
            self._note(REPAIRED)
        self._ended = Section(text=text if self._unread else "", rest=scan.text[scan.at :])

    def _fail(self, note: str) -> None:
        """The section cannot be read on: it is text, up to its mark of the end."""
        scan, family = self._scan, self._family
        assert family is not None
        if self._bare_mark is not None and not self._num_said:
            mark = self._bare_mark
            self._ended = Section(text=mark, rest=scan.text[len(mark) :])
        elif note == UNCLOSED and scan.is_cut:
            self._note(note)
            self._ended = Section(is_broken=True)
        else:
            if not self._unread:
                self._note(note)
            self._reading = self._raw(family.end)

    def _raw(self, end: str) -> Reading:
        """The rest of a section that cannot be read."""
        scan, start = self._scan, self._scan.at
        mark = (yield from scan.until(end)) if end else ""
        is_broken = self._is_streaming
        if not end:
            scan.at = start
        left = scan.text[start : scan.at - len(mark)]
        if is_broken and left:
            yield Argued(left)
        text = scan.text[: scan.at]
        if self._num_said:
            text = "" if is_broken else _left(scan.text[self._since : scan.at - len(mark)])
        self._ended = Section(text=text, rest=scan.text[scan.at :], is_broken=is_broken)

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)


def _left(text: str) -> str:
    """Text behind a call that is none of its marks."""
    return text.lstrip(" \t\r\n}") if any(map(str.isalnum, text)) else ""


def _freeform(arguments: object) -> dict[str, str]:
    """A free-form tool takes one text, whatever the model called it."""
    if isinstance(arguments, dict):
        values = list(cast("dict[str, Any]", arguments).values())
        if len(values) != 1:
            raise TypeError
        arguments = values[0]
    if not isinstance(arguments, str):
        raise TypeError
    return {FREEFORM_ARGUMENT: arguments}


def json_text(value: Any) -> str:
    """JSON text that can be sent: half a surrogate pair stays escaped.

    Raises:
        TypeError, ValueError: JSON has no such value.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False)
    return text


def _new_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
