"""An answer as the events of Anthropic's stream, or as the blocks of a whole message; its usage."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec
from msgspec import UNSET

from api.anthropic.convert import ConvertedRequest
from api.anthropic.diagnostics import Diagnose
from api.anthropic.errors import error_answer
from api.anthropic.schemas import (
    EMPTY_OBJECT,
    CacheCreation,
    CompactionAnswer,
    ContentAnswer,
    MessageAnswer,
    OutputTokensDetails,
    StopReason,
    TextAnswer,
    ThinkingAnswer,
    ToolUseAnswer,
    Usage,
)
from api.anthropic.signature import sign
from api.http.answer import Answer
from api.http.errors import refusal_of
from api.http.hearth_info import hearth_of
from api.observe.record import Tally
from runtime.errors import HearthError, NoSummary
from runtime.types import CacheUse, Chunk, Finished, ReasoningDelta, TextDelta, ToolCallDelta

HOUR_S = 3600.0
encode = msgspec.json.Encoder().encode


class MessageEnvelope:
    """The envelope of one answer, and what must be known of its request."""

    def __init__(self, model: str) -> None:
        self.id = f"msg_{secrets.token_hex(12)}"
        self.model = model
        self.diagnose: Diagnose = lambda _: UNSET


def usage_of(tally: Tally, asked: ConvertedRequest) -> Usage:
    """The counts of a finished answer."""
    counts = _Counts(tally.num_prompt_tokens, cache_of(tally), tally.num_output_tokens)
    details = OutputTokensDetails(tally.num_reasoning_tokens)
    return msgspec.structs.replace(_usage(counts, asked), output_tokens_details=details)


def planned_usage(answer: Answer, asked: ConvertedRequest) -> Usage:
    """The counts of an answer that begins: what is about to be reused, and no output yet."""
    return in_full(_usage(_Counts(answer.num_prompt_tokens, answer.planned_cache), asked))


def in_full(usage: Usage) -> Usage:
    """The usage of a message, which says more than that of a stream's end."""
    return msgspec.structs.replace(usage, service_tier="standard")


def in_brief(usage: Usage) -> Usage:
    """The usage of a stream's end."""
    return msgspec.structs.replace(usage, cache_creation=UNSET)


class _Counts(NamedTuple):
    """Of one prompt: its tokens, what of them was reused and is kept, what was said."""

    num_prompt: int
    cache: CacheUse
    num_output: int = 0


def cache_of(tally: Tally) -> CacheUse:
    """What was reused of the prompt."""
    usage = tally.least_cached
    return CacheUse() if usage is None else usage.cache


def _usage(counts: _Counts, asked: ConvertedRequest) -> Usage:
    """With breakpoints, what was computed and is kept counts as written to the cache.

    Not so the last token, which every answer computes anew.
    """
    num_prompt, cache, num_output = counts
    num_computed = num_prompt - cache.num_tokens
    num_kept = min(cache.num_written(num_prompt), num_computed - 1) if asked.has_breakpoints else 0
    num_kept = max(num_kept, 0)
    num_long = min(cache.num_written_for(HOUR_S, num_prompt), num_kept)
    return Usage(
        input_tokens=num_computed - num_kept,
        cache_creation_input_tokens=num_kept,
        cache_read_input_tokens=cache.num_tokens,
        output_tokens=num_output,
        cache_creation=CacheCreation(num_kept - num_long, num_long),
    )


def stop_of(finished: Finished | None, asked: ConvertedRequest) -> tuple[StopReason, str | None]:
    """Why an answer ended, and the stop sequence that ended it."""
    if asked.request.work == "prefill":
        return "max_tokens", None
    match finished:
        case Finished(stop=str(stop)):
            return "stop_sequence", stop
        case Finished(reason="tool_calls"):
            return "tool_use", None
        case Finished(reason="length"):
            return "max_tokens", None
        case Finished() if asked.compacts:
            return "compaction", None
        case _:
            return "end_turn", None


Kind = Literal["thinking", "text", "tool_use", "compaction"]

PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'


class OpenBlock:
    """One content block while it is written."""

    def __init__(self, kind: Kind, index: int, call: ToolCallDelta | None = None) -> None:
        self.kind: Kind = kind
        self.index = index
        self.call = call
        self.pieces: list[str] = []

    @property
    def content(self) -> str:
        return "".join(self.pieces)


class Blocks:
    """Sorts chunks into blocks, in the order in which the model wrote them.

    Of a summary only its text is a block, whatever was thought beside it.
    """

    def __init__(self, *, is_summary: bool = False) -> None:
        self.done: list[OpenBlock] = []
        self.open: OpenBlock | None = None
        self._is_summary = is_summary

    @property
    def summary(self) -> str:
        """What stands for the conversation, once it is written."""
        return self.open.content.strip() if self.open is not None else ""

    @property
    def written(self) -> list[OpenBlock]:
        """All blocks so far, the open one included."""
        return [*self.done, *([self.open] if self.open is not None else [])]

    def end(self) -> None:
        """Nothing follows. Raises NoSummary where one was asked for and there is none."""
        if self._is_summary and not self.summary:
            raise NoSummary

    def take(self, chunk: Chunk) -> tuple[OpenBlock | None, str]:
        """The block that this chunk begins, None when it goes on with the open one, and its text.

        What was open before is then the last one of `done`.
        """
        match chunk:
            case ReasoningDelta() if self._is_summary:
                return None, ""
            case TextDelta(text=text) if self._is_summary and text:
                return self._go_on("compaction"), self._add(text)
            case ReasoningDelta(text=text) if text:
                return self._go_on("thinking"), self._add(text)
            case TextDelta(text=text) if text:
                return self._go_on("text"), self._add(text)
            case ToolCallDelta(id=None, arguments=text):
                return None, self._add(text)
            case ToolCallDelta(arguments=text):
                return self._begin("tool_use", chunk), self._add(text)
            case _:
                return None, ""

    def finish(self) -> list[OpenBlock]:
        """All blocks, none of which is open any longer."""
        if self.open is not None:
            self.done.append(self.open)
            self.open = None
        return self.done

    def _go_on(self, kind: Kind) -> OpenBlock | None:
        return None if self.open is not None and self.open.kind == kind else self._begin(kind)

    def _begin(self, kind: Kind, call: ToolCallDelta | None = None) -> OpenBlock:
        self.open = OpenBlock(kind, len(self.finish()), call)
        return self.open

    def _add(self, text: str) -> str:
        if self.open is not None:
            self.open.pieces.append(text)
        return text


def answered(block: OpenBlock, asked: ConvertedRequest) -> ContentAnswer:
    """A block of a whole message."""
    match block:
        case OpenBlock(kind="thinking"):
            thinking = block.content if asked.shows_thinking else ""
            return ThinkingAnswer(thinking, sign(block.content))
        case OpenBlock(kind="compaction"):
            return CompactionAnswer(block.content.strip())
        case OpenBlock(call=ToolCallDelta() as call):
            return ToolUseAnswer(call.id or "", call.name or "", _input(block.content))
        case _:
            return TextAnswer(block.content)


def _input(arguments: str) -> msgspec.Raw:
    """A call's arguments as an object; what is none is still shown to whoever must repair it."""
    try:
        msgspec.json.decode(arguments, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return msgspec.Raw(encode({"arguments": arguments}) if arguments else bytes(EMPTY_OBJECT))
    return msgspec.Raw(arguments.encode())


class MessageStream:
    """An answer as events: its start, its blocks one after another, its end."""

    def __init__(
        self, frame: MessageEnvelope, answer: Answer, asked: ConvertedRequest, request_id: str
    ) -> None:
        self._frame = frame
        self._answer = answer
        self._asked = asked
        self._request_id = request_id
        self.blocks = Blocks(is_summary=asked.compacts)
        self._finished: Finished | None = None

    def opening(self) -> bytes:
        """The message without content, and what its prompt costs."""
        message = MessageAnswer(
            id=self._frame.id,
            model=self._frame.model,
            content=[],
            diagnostics=self._frame.diagnose(self._answer.planned_cache),
            usage=planned_usage(self._answer, self._asked),
        )
        return _event("message_start", message=message)

    def chunks(self, chunks: Sequence[Chunk]) -> bytes:
        """The deltas, and the borders of blocks where they are."""
        return b"".join(self._written(chunk) for chunk in chunks)

    def sign_of_life(self, phase: str) -> bytes:
        """A ping, which is what clients' idle timers count; what it waits for is for people."""
        return f": {phase}\n\n".encode() + PING

    def failure(self, error: HearthError) -> bytes:
        """An error event; nothing follows it."""
        answer = error_answer(refusal_of(error), self._request_id)
        return b"event: error\ndata: " + encode(answer) + b"\n\n"

    def closing(self) -> bytes:
        """The end of the last block, how the answer ended and what it cost."""
        tally = self._answer.tally
        reason, stop = stop_of(self._finished, self._asked)
        last = self.blocks.open
        end = _event(
            "message_delta",
            delta={"stop_reason": reason, "stop_sequence": stop},
            usage=in_brief(usage_of(tally, self._asked)),
            hearth=hearth_of(tally, self._asked.ignored),
        )
        return (self._closed(last) if last is not None else b"") + end + _STOP

    def _written(self, chunk: Chunk) -> bytes:
        if isinstance(chunk, Finished):
            self._finished = chunk
            self.blocks.end()
            return b""
        before = self.blocks.open
        new, text = self.blocks.take(chunk)
        block = self.blocks.open
        events = b""
        if new is not None:
            events = (self._closed(before) if before is not None else b"") + _opened(new)
        return events + (self._delta(block, text) if block is not None and text else b"")

    def _delta(self, block: OpenBlock, text: str) -> bytes:
        match block.kind:
            case "compaction":
                return b""  # it is told whole, at its end
            case "thinking" if not self._asked.shows_thinking:
                return b""
            case "thinking":
                return _delta(block, b'"thinking_delta","thinking":', text)
            case "tool_use":
                return _delta(block, b'"input_json_delta","partial_json":', text)
            case "text":
                return _delta(block, b'"text_delta","text":', text)

    def _closed(self, block: OpenBlock) -> bytes:
        stop = _event("content_block_stop", index=block.index)
        if block.kind == "compaction":
            return _delta(block, b'"compaction_delta","content":', block.content.strip()) + stop
        if block.kind != "thinking":
            return stop
        return _delta(block, b'"signature_delta","signature":', sign(block.content)) + stop


def _opened(block: OpenBlock) -> bytes:
    """The start of a block; behind the first one stands a ping, as in Anthropic's own streams."""
    match block:
        case OpenBlock(kind="thinking"):
            content: ContentAnswer = ThinkingAnswer("", "")
        case OpenBlock(kind="compaction"):
            content = CompactionAnswer(None)
        case OpenBlock(call=ToolCallDelta() as call):
            content = ToolUseAnswer(call.id or "", call.name or "", EMPTY_OBJECT)
        case _:
            content = TextAnswer("")
    start = _event("content_block_start", index=block.index, content_block=content)
    return start + PING if block.index == 0 else start


def _delta(block: OpenBlock, head: bytes, text: str) -> bytes:
    start = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'
    return start % block.index + b'"delta":{"type":' + head + encode(text) + b"}}\n\n"


def _event(kind: str, **fields: object) -> bytes:
    return f"event: {kind}\ndata: ".encode() + encode({"type": kind, **fields}) + b"\n\n"
