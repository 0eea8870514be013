"""Generated text to chunks: answer, reasoning, tool calls, and where a stop string ends it all.

Knows mlx-lm's `TextStateMachine` and its tool parsers.
"""

from __future__ import annotations

import importlib
import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from runtime.types import Chunk, ReasoningDelta, TextDelta, TokenLogprobs, ToolCall, ToolCallDelta

# The package re-exports a function under the module's name.
_TextStateMachine = importlib.import_module("mlx_lm.generate").TextStateMachine

NORMAL, REASONING, TOOL = "normal", "reasoning", "tool"


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a model marks its reasoning and its tool calls; empty strings mean it has no marker.

    `parse_tool_call(text, tools)` returns one call or a list of them, as mlx-lm's parsers do.
    """

    think_start: str = ""
    think_end: str = ""
    tool_start: str = ""
    tool_end: str = ""
    parse_tool_call: Callable[[str, Any], Any] | None = None


class OutputParser:
    """One sequence's text on its way out.

    Stop strings end the answer, not the reasoning, and are not part of it. Blank lines around
    reasoning and before a tool call belong to the template and are dropped. A tool call that
    cannot be understood is given to the client as the text it was.
    """

    def __init__(
        self,
        dialect: Dialect,
        *,
        index: int,
        stop: tuple[str, ...] = (),
        tool_names: frozenset[str] = frozenset(),
        starts_in_reasoning: bool = False,
    ) -> None:
        self._dialect = dialect
        self._index = index
        self._tool_names = tool_names
        self._is_stopped = False
        self._num_calls = 0
        self._tool_text = ""
        self._held = ""
        self._skips_blank = bool(tool_names) or starts_in_reasoning
        self._logprobs: list[TokenLogprobs] = []
        machine = _TextStateMachine(_transitions(dialect, stop, bool(tool_names)))
        self._state = machine.make_state(REASONING if starts_in_reasoning else NORMAL)

    @property
    def is_stopped(self) -> bool:
        """A stop string ended the answer."""
        return self._is_stopped

    @property
    def is_reasoning(self) -> bool:
        return self._state[0] == REASONING

    @property
    def num_tool_calls(self) -> int:
        return self._num_calls

    def feed(self, text: str, logprobs: TokenLogprobs | None = None) -> list[Chunk]:
        """The chunks that one token's stable text completes."""
        if logprobs is not None:
            self._logprobs.append(logprobs)
        if not text or self._is_stopped:
            return []
        before = self._state[0]
        self._state, segments = _TextStateMachine.split(self._state, text)
        chunks: list[Chunk] = []
        for state, segment in segments:
            chunks += self._enter(before, state) if state != before else ()
            before = state
            chunks += self._say(state, segment)
        return chunks

    def finish(self, text: str = "") -> list[Chunk]:
        """The chunks of the held-back rest, at the end of the sequence."""
        chunks = self.feed(text)
        if self._is_stopped:
            return chunks
        state = self._state[0]
        self._state, rest, _ = _TextStateMachine.flush(self._state)
        chunks += self._say(state, rest)
        if state == TOOL:
            chunks += self._finish_call(is_closed=False)
        if self._logprobs or (state == NORMAL and self._held):
            chunks.append(self._delta(state, self._held if state == NORMAL else ""))
        return chunks

    def _enter(self, old: str, new: str | None) -> list[Chunk]:
        """What leaving state `old` for `new` says."""
        held, self._held = self._held, ""
        self._skips_blank = True
        if new is None:
            self._is_stopped = True
            return [self._delta(NORMAL, held)] if held else []
        return self._finish_call(is_closed=True) if old == TOOL else []

    def _say(self, state: str | None, text: str) -> list[Chunk]:
        if state is None or not text:
            return []
        if state == TOOL:
            self._tool_text += text
            return []
        if self._skips_blank:
            text = text.lstrip()
            self._skips_blank = not text
        if state == REASONING or self._tool_names:
            text = self._hold_blank_end(text)
        return [self._delta(state, text)] if text else []

    def _hold_blank_end(self, text: str) -> str:
        """Trailing blanks wait for what follows: text needs them, a marker does not."""
        text = self._held + text
        body = text.rstrip()
        self._held = text[len(body) :]
        return body

    def _delta(self, state: str, text: str) -> Chunk:
        logprobs, self._logprobs = tuple(self._logprobs), []
        kind = ReasoningDelta if state == REASONING else TextDelta
        return kind(index=self._index, text=text, logprobs=logprobs)

    def _finish_call(self, *, is_closed: bool) -> list[Chunk]:
        text, self._tool_text = self._tool_text, ""
        calls = self._parse(text)
        if calls is None:
            raw = self._dialect.tool_start + text + (self._dialect.tool_end if is_closed else "")
            self._skips_blank = False
            return [self._delta(NORMAL, raw)]
        chunks: list[Chunk] = []
        for call in calls:
            chunks.append(
                ToolCallDelta(
                    index=self._index,
                    call_index=self._num_calls,
                    arguments=call.arguments,
                    id=call.id,
                    name=call.name,
                )
            )
            self._num_calls += 1
        return chunks

    def _parse(self, text: str) -> list[ToolCall] | None:
        """The calls in `text`, or None when it is no call to a tool of this request."""
        parse = self._dialect.parse_tool_call
        if parse is None:
            return None
        try:
            parsed = parse(text, None)
            found = cast("list[Any]", parsed if isinstance(parsed, list) else [parsed])
            calls = [_tool_call(item) for item in found]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, SyntaxError):
            return None
        return calls if all(call.name in self._tool_names for call in calls) else None


def _tool_call(parsed: Any) -> ToolCall:
    arguments = parsed.get("arguments", {})
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    call_id = parsed.get("id") or f"call_{uuid.uuid4().hex[:24]}"
    return ToolCall(id=str(call_id), name=str(parsed["name"]), arguments=arguments)


def _transitions(
    dialect: Dialect, stop: tuple[str, ...], has_tools: bool
) -> dict[str, list[tuple[str, str | None]]]:
    edges: dict[str, list[tuple[str, str | None]]] = {NORMAL: [(word, None) for word in stop]}
    if dialect.think_end:
        edges[NORMAL].append((dialect.think_start, REASONING))
        edges[REASONING] = [(dialect.think_end, NORMAL)]
    if dialect.tool_start and has_tools:
        edges[NORMAL].append((dialect.tool_start, TOOL))
        edges[TOOL] = [(dialect.tool_end, NORMAL)] if dialect.tool_end else []
        if dialect.think_end:
            edges[REASONING].append((dialect.tool_start, TOOL))
    return edges
