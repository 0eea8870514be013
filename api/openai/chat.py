"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence

from litestar import Response, post
from litestar.di import NamedDependency
from litestar.params import JSONBody
from msgspec import UNSET

from api.http.body import HttpRequest
from api.http.cache_header import cache_header
from api.http.caller import asker_of
from api.http.draft import Draft, collect
from api.http.errors import documented
from api.http.gate import Gate
from api.http.hearth_info import hearth_of
from api.http.sse import EventStream, open_stream, whole
from api.observe.record import Tally
from api.openai.calls import PLAIN, CallFormat, StreamedCalls, called_tool
from api.openai.convert import chat_to_generate
from api.openai.frame import (
    DONE,
    END,
    FINGERPRINT,
    CompletionEnvelope,
    chat_logprobs,
    comment,
    encode,
    error_event,
    hearth_field,
    usage_event,
    usage_of,
)
from api.openai.schemas import (
    AssistantMessage,
    CalledFunction,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatRequest,
    ChunkChoice,
    Delta,
)
from api.openai.tools import form_of, unserved_tools
from runtime.errors import HearthError
from runtime.types import (
    Chunk,
    Finished,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
)


@post(
    ["/v1/chat/completions", "/chat/completions"],
    status_code=200,
    tags=["OpenAI"],
    responses=documented(ChatCompletion),
)
async def chat_completions(
    data: JSONBody[ChatRequest], request: HttpRequest, gate: NamedDependency[Gate]
) -> Response[ChatCompletion] | EventStream:
    """Continue a conversation; with `stream`, as server-sent events."""
    spec = gate.spec(data.model)
    frame = CompletionEnvelope("chatcmpl", data.model or spec.id)
    caller = asker_of(request)
    generate = await request.apart(
        lambda: chat_to_generate(data, frame.id, spec, gate.settings, caller)
    )
    unused = await request.unused_fields(ChatRequest)
    answer = gate.submit(request.scope, [generate])
    answer.tally.ignored += [*unused, *unserved_tools(data)]
    form = form_of(data)
    if data.stream:
        has_usage = data.stream_options is not None and bool(data.stream_options.include_usage)
        stream = ChatStream(frame, answer.tally, has_usage=has_usage, form=form)
        return await open_stream(request, answer, stream, gate.settings.keep_alive_s)
    drafts = [Draft(form.customs) for _ in range(answer.num_choices)]
    await whole(request, answer, lambda chunk: collect(drafts, chunk))
    choices = [_choice(draft, index, form) for index, draft in enumerate(drafts)]
    if generate.top_logprobs is not None:
        for choice in choices:
            choice.logprobs = choice.logprobs or ChatLogprobs([])
    return Response(
        ChatCompletion(
            id=frame.id,
            created=frame.created,
            model=frame.model,
            choices=choices,
            usage=usage_of(answer.tally),
            system_fingerprint=FINGERPRINT,
            hearth=hearth_of(answer.tally),
        ),
        headers=cache_header(answer.tally.least_cached),
    )


class ChatStream:
    """An answer as a stream of `chat.completion.chunk` events."""

    def __init__(
        self, frame: CompletionEnvelope, tally: Tally, *, has_usage: bool, form: CallFormat = PLAIN
    ) -> None:
        self._head, self._tail = frame.around("chat.completion.chunk", has_usage=has_usage)
        self._tally = tally
        self._has_usage = has_usage
        self._is_older = form.is_older
        self._calls = StreamedCalls(form.customs)

    def opening(self) -> bytes:
        start = Delta(role="assistant", content="")
        return b"".join(
            self._event(ChunkChoice(index, start)) for index in range(self._tally.num_choices)
        )

    def chunks(self, chunks: Sequence[Chunk]) -> bytes:
        events: list[bytes] = []
        for chunk in chunks:
            match chunk:
                case TextDelta(index=index, text=text, logprobs=logprobs):
                    entries = chat_logprobs(logprobs) if logprobs else None
                    events.append(self._event(ChunkChoice(index, Delta(content=text), entries)))
                case ReasoningDelta(index=index, text=text, logprobs=logprobs):
                    entries = chat_logprobs(logprobs) if logprobs else None
                    delta = Delta(reasoning_content=text)
                    events.append(self._event(ChunkChoice(index, delta, entries)))
                case ToolCallDelta():
                    if (called := self._called(chunk)) is not None:
                        events.append(self._event(ChunkChoice(chunk.index, called)))
                case Finished():
                    events += map(self._event, self._ended(chunk))
                case _:
                    pass
        return b"".join(events)

    def sign_of_life(self, phase: str) -> bytes:
        return comment(phase)

    def failure(self, error: HearthError) -> bytes:
        return error_event(error)

    def closing(self) -> bytes:
        return usage_event(self._head, self._tally) + DONE if self._has_usage else DONE

    def _called(self, chunk: ToolCallDelta) -> Delta | None:
        """What a piece of a call tells, if anything; the older form has one call only."""
        if not self._is_older:
            calls = self._calls.pieces(chunk)
            return Delta(tool_calls=calls) if calls else None
        if chunk.call_index:
            return None
        call = CalledFunction(chunk.arguments, UNSET if chunk.id is None else chunk.name or "")
        return Delta(function_call=call)

    def _ended(self, chunk: Finished) -> list[ChunkChoice]:
        """What was kept of calls until they are whole, and why the choice ended."""
        calls = self._calls.rest(chunk.index)
        rest = [ChunkChoice(chunk.index, Delta(tool_calls=calls))] if calls else []
        is_older_call = self._is_older and chunk.reason == "tool_calls"
        reason = "function_call" if is_older_call else chunk.reason
        return [*rest, ChunkChoice(chunk.index, Delta(), finish_reason=reason)]

    def _event(self, choice: ChunkChoice) -> bytes:
        is_last = choice.finish_reason is not None
        extra = hearth_field(self._tally) if is_last else b""
        return self._head + encode(choice) + self._tail + extra + END


def _choice(draft: Draft, index: int, form: CallFormat) -> ChatChoice:
    calls = [called_tool(call) for call in draft.calls]
    reason, is_older = draft.finish_reason, form.is_older
    return ChatChoice(
        index=index,
        message=AssistantMessage(
            content=None if calls and not draft.text else draft.text,
            reasoning_content=draft.reasoning if draft.reasonings else UNSET,
            tool_calls=UNSET if is_older else calls or UNSET,
            function_call=calls[0].function if is_older and calls else UNSET,
        ),
        finish_reason="function_call" if is_older and reason == "tool_calls" else reason,
        logprobs=chat_logprobs(draft.logprobs),
    )
