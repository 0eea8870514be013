"""Tool calls in a model's text, checked against the tools of the request.

What is no call, or no call to one of them, stays the text that it was, with a note that says why.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from runtime.types import Tool, ToolCall, ToolCallDelta
from runtime.worker.output.dialect import Dialect
from runtime.worker.output.streams import Argued, CallStream, Opened, Piece, form_of
from runtime.worker.output.tools import FREEFORM_ARGUMENT, RequestTools, properties_of, schema_of

UNCLOSED = "unclosed_tool_call"
MALFORMED = "malformed_tool_call"
UNKNOWN = "unknown_tool"
REFUSED = "refused_tool_call"
"""It calls one of the tools that must not be called now."""
REPAIRED = "repaired_tool_call"
EXTRA = "extra_tool_call"
"""A further call than the request allows; it was dropped."""

# Where a call cut off before its mark of the end is whole all the same: it ends with one of these.
_INNER_ENDS: Mapping[str, tuple[str, ...]] = {
    "function_gemma": ("}",),
    "gemma4": ("}",),
    "glm47": ("</arg_value>",),
    "kimi_k3": ("<|close|>call<|sep|>",),
    "laguna": ("</arg_value>",),
    "longcat": ("</longcat_arg_value>", "}"),
    "minicpm5": ("</param>",),
    "minimax_m2": ("</invoke>",),
    "muse_spark": ("</atem:invoke>",),
    "pythonic": ("]",),
    "qwen3_coder": ("</function>",),
    "json_tools": ("}",),
}
_PARSER_ERRORS = (ValueError, KeyError, TypeError, AttributeError, IndexError, SyntaxError)
_GLM_LIKE = frozenset({"glm47", "laguna"})


class NotCallable(ValueError):
    """The call is well-formed, but it is of no tool that may be called; `note` says why."""

    def __init__(self, note: str) -> None:
        super().__init__(note)
        self.note = note


@dataclass(slots=True)
class Section:
    """What a finished section of calls comes to: its last pieces, or text that is no call.

    `is_raw` text is the whole section without its marks; a `is_broken` section has said the
    beginning of a call that has no end.
    """

    deltas: list[ToolCallDelta]
    text: str = ""
    is_raw: bool = False
    is_broken: bool = False


class CallReader:
    """Reads one choice's tool calls, section by section; `notes` say what was odd."""

    def __init__(self, dialect: Dialect, tools: RequestTools, index: int) -> None:
        self._dialect = dialect
        self._tools = tools
        self._index = index
        self._text = ""
        self._stream = self._new_stream()
        self.num_calls = 0
        self.given_ids: tuple[str, ...] = ()
        """The ids of the first calls; the others have the model's, or new ones."""
        self.notes: list[str] = []

    @property
    def in_string(self) -> bool:
        """A mark that comes now is part of an argument."""
        return self._stream is not None and self._stream.in_string

    @property
    def is_full(self) -> bool:
        """No further call is wanted."""
        return self.num_calls > 0 and not self._tools.is_parallel

    @property
    def has_extra(self) -> bool:
        """A further call than is wanted has begun."""
        return EXTRA in self.notes

    def feed(self, text: str) -> list[ToolCallDelta]:
        """More of the open section; what of it is certain."""
        self._text += text
        if self._stream is None:
            return []
        return self._deltas(self._stream.feed(text))

    def close(self, *, is_closed: bool) -> Section:
        """The section is over; `is_closed` says whether its mark of the end was seen."""
        text, self._text = self._text, ""
        stream, self._stream = self._stream, self._new_stream()
        if stream is not None and stream.num_calls:
            return self._close_stream(stream, is_closed=is_closed)
        try:
            calls = self._parse(text)
        except NotCallable as error:
            self._note(error.note)
        except _PARSER_ERRORS:
            self._note(MALFORMED if is_closed else UNCLOSED)
        else:
            if is_closed or self._is_whole(text):
                if not is_closed:
                    self._note(REPAIRED)
                return Section([self._delta(call) for call in self._wanted(calls)])
            self._note(UNCLOSED)
        return Section([], text, is_raw=True)

    def _close_stream(self, stream: CallStream, *, is_closed: bool) -> Section:
        if stream.is_repaired:
            self._note(REPAIRED)
        if stream.is_open:
            self._note(MALFORMED if is_closed or stream.is_broken else UNCLOSED)
            return Section([], is_broken=True)
        if not is_closed or not stream.is_whole:
            self._note(REPAIRED)
        left = "" if stream.is_whole else stream.rest
        if any(character.isalnum() for character in left):
            self._note(MALFORMED)
            return Section([], left.lstrip(" \t\r\n}"))
        return Section([])

    def _new_stream(self) -> CallStream | None:
        form = form_of(self._dialect.name)
        return None if form is None else CallStream(form, self._tools.streamed_names)

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    def _deltas(self, pieces: list[Piece]) -> list[ToolCallDelta]:
        deltas: list[ToolCallDelta] = []
        for piece in pieces:
            match piece:
                case Opened():
                    if self.num_calls and not self._tools.is_parallel:
                        self._note(EXTRA)
                        break
                    deltas.append(self._delta(ToolCall(piece.id or _new_id(), piece.name, "")))
                case Argued():
                    last = self.num_calls - 1
                    delta = ToolCallDelta(index=self._index, call_index=last, arguments=piece.text)
                    deltas.append(delta)
        return deltas

    def _delta(self, call: ToolCall) -> ToolCallDelta:
        given = self.given_ids[self.num_calls : self.num_calls + 1]
        self.num_calls += 1
        return ToolCallDelta(
            index=self._index,
            call_index=self.num_calls - 1,
            arguments=call.arguments,
            id=given[0] if given else call.id,
            name=call.name,
        )

    def _wanted(self, calls: list[ToolCall]) -> list[ToolCall]:
        if self._tools.is_parallel or len(calls) + self.num_calls <= 1:
            return calls
        self._note(EXTRA)
        return calls[: 1 - self.num_calls]

    def _is_whole(self, text: str) -> bool:
        if self._dialect.calls_end_with_turn:
            return True
        ends = _INNER_ENDS.get(self._dialect.name)
        return ends is None or text.rstrip().endswith(ends)

    def _parse(self, text: str) -> list[ToolCall]:
        """The calls in a whole section.

        Raises:
            NotCallable: a name is not among the tools, or not to be called.
            Exception: one of `_PARSER_ERRORS`, it is no call.
        """
        parse = self._dialect.parse_tool_call
        if parse is None:
            raise ValueError
        parsed = parse(text, self._tools.definitions)
        found = cast("list[Any]", parsed if isinstance(parsed, list) else [parsed])
        calls = [self._checked(item, text) for item in found]
        if not calls:
            raise ValueError
        return calls

    def _checked(self, parsed: Any, text: str) -> ToolCall:
        name, arguments = parsed["name"], _arguments_of(parsed)
        if not isinstance(name, str):
            raise TypeError
        tool = self._tools.by_name.get(name)
        if tool is None:
            raise NotCallable(REFUSED if name in self._tools.refused else UNKNOWN)
        if self._dialect.name in _GLM_LIKE and _is_invented(arguments, tool, text):
            raise ValueError
        if tool.is_freeform:
            arguments = _freeform(arguments)
        elif isinstance(arguments, str):
            if not isinstance(json.loads(arguments), dict):
                raise TypeError
            return ToolCall(_id_of(parsed), name, arguments)
        elif not isinstance(arguments, dict):
            raise TypeError
        if "arguments" not in parsed and "parameters" in parsed:
            self._note(REPAIRED)
        return ToolCall(_id_of(parsed), name, json_text(arguments))


def _arguments_of(parsed: Any) -> Any:
    arguments = parsed.get("arguments")
    if arguments is None:
        arguments = parsed.get("parameters")
    return {} if arguments is None else arguments


def _is_invented(arguments: Any, tool: Tool, text: str) -> bool:
    # Upstream makes a call of whatever text there is, with all of it in `raw`.
    return (
        isinstance(arguments, dict)
        and set(cast("dict[str, Any]", arguments)) == {"raw"}
        and "<arg_key>" not in text
        and "raw" not in properties_of(schema_of(tool))
    )


def _freeform(arguments: Any) -> dict[str, str]:
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


def _id_of(parsed: Any) -> str:
    return str(parsed.get("id") or _new_id())


def _new_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
