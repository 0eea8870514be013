"""Answers in Ollama's form: one JSON object per line, the last one with the counts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Protocol

import msgspec
from msgspec import UNSET, Raw

from api.http.draft import Draft, is_whole
from api.http.hearth_info import hearth_of
from api.observe.record import Tally
from api.ollama.schemas import (
    CalledFunctionOut,
    CallOut,
    ChatAnswer,
    Counts,
    GenerateAnswer,
    MessageOut,
    Trouble,
)
from runtime.errors import HearthError
from runtime.types import (
    Chunk,
    Finished,
    ReasoningDelta,
    TextDelta,
    ToolCall,
    ToolCallDelta,
)

Answer = ChatAnswer | GenerateAnswer
_encode = msgspec.json.Encoder().encode
_NS = 1_000_000_000


def now() -> str:
    """The time as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class Form(Protocol):
    """How one piece of an answer is written; `/api/chat` and `/api/generate` differ in that."""

    def __call__(
        self, model: str, text: str, thinking: str, calls: Sequence[ToolCall], *, done: bool
    ) -> Answer: ...


def chat_form(
    model: str, text: str, thinking: str, calls: Sequence[ToolCall], *, done: bool
) -> ChatAnswer:
    """A piece of `/api/chat`."""
    made = [
        CallOut(CalledFunctionOut(call.name, Raw(call.arguments.encode())), call.id)
        for call in calls
    ]
    message = MessageOut(
        role="assistant", content=text, thinking=thinking or UNSET, tool_calls=made or UNSET
    )
    return ChatAnswer(model=model, created_at=now(), message=message, done=done)


def generate_form(
    model: str, text: str, thinking: str, calls: Sequence[ToolCall], *, done: bool
) -> GenerateAnswer:
    """A piece of `/api/generate`, which knows no tools."""
    del calls
    return GenerateAnswer(
        model=model, created_at=now(), response=text, thinking=thinking or UNSET, done=done
    )


class Clock:
    """When a request came and when the model took it up."""

    def __init__(self) -> None:
        self._came_s = time.perf_counter()
        self._taken_s: float | None = None

    def take_up(self) -> None:
        self._taken_s = time.perf_counter()

    def settle(self, answer: Answer, finished: Finished, tally: Tally) -> Answer:
        """The last piece, with everything that was counted."""
        usage = finished.usage
        taken_s = self._taken_s if self._taken_s is not None else self._came_s
        counts = Counts(
            done_reason="stop" if finished.reason == "tool_calls" else finished.reason,
            total_duration=int((time.perf_counter() - self._came_s) * _NS),
            load_duration=int((taken_s - self._came_s) * _NS),
            prompt_eval_count=usage.num_prompt_tokens,
            prompt_eval_duration=int(usage.prefill_ms * 1e6),
            eval_count=usage.num_output_tokens,
            eval_duration=int(usage.decode_ms * 1e6),
            hearth=hearth_of(tally),
        )
        return msgspec.structs.replace(answer, **msgspec.structs.asdict(counts))


class LineStream:
    """An answer as lines. A tool call is one piece: Ollama's clients cannot join several."""

    def __init__(self, form: Form, model: str, tally: Tally, clock: Clock) -> None:
        self._form = form
        self._model = model
        self._tally = tally
        self._clock = clock
        self._draft = Draft()

    def opening(self) -> bytes:
        self._clock.take_up()
        return b""

    def chunks(self, chunks: Sequence[Chunk]) -> bytes:
        return b"".join(self._line(chunk) for chunk in chunks)

    def sign_of_life(self, phase: str) -> bytes:
        """Whitespace between two objects, which every reader of lines skips."""
        del phase
        return b"\n"

    def failure(self, error: HearthError) -> bytes:
        return _encode(Trouble(error=error.message)) + b"\n"

    def closing(self) -> bytes:
        return b""

    def _line(self, chunk: Chunk) -> bytes:
        match chunk:
            case ToolCallDelta():
                before = self._calls() if chunk.id is not None else b""
                self._draft.add(chunk)
                return before
            case TextDelta():
                return self._calls() + self._piece(chunk.text, "")
            case ReasoningDelta():
                return self._calls() + self._piece("", chunk.text)
            case Finished():
                last = self._form(self._model, "", "", (), done=True)
                return self._calls() + _encode(self._clock.settle(last, chunk, self._tally)) + b"\n"
            case _:
                return b""

    def _calls(self) -> bytes:
        """The call that was being written, if one was and is whole."""
        calls = [call for call in self._draft.calls if is_whole(call.arguments)]
        self._draft = Draft()
        return self._piece("", "", calls) if calls else b""

    def _piece(self, text: str, thinking: str, calls: Sequence[ToolCall] = ()) -> bytes:
        return _encode(self._form(self._model, text, thinking, calls, done=False)) + b"\n"
