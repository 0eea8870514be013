"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

from functools import partial

from litestar import Response, post
from litestar.di import NamedDependency
from litestar.params import JSONBody

from api.anthropic.convert import (
    ConversionContext,
    ConvertedRequest,
    after_summary,
    count_to_generate,
    messages_to_generate,
)
from api.anthropic.errors import ErrorAnswer
from api.anthropic.schemas import CountRequest, MessageAnswer, MessagesRequest, TokenCount
from api.anthropic.stream import (
    Blocks,
    MessageEnvelope,
    MessageStream,
    answered,
    in_full,
    stop_of,
    usage_of,
)
from api.http.body import HttpRequest
from api.http.cache_header import cache_header
from api.http.caller import asker_of
from api.http.errors import documented
from api.http.gate import Gate
from api.http.hearth_info import hearth_of, ignored_info
from api.http.sse import EventStream, Pace, open_stream, unless_left, whole
from api.observe.record import CompactionInfo, Tally, record_of
from runtime.errors import ContextTooLong
from runtime.types import Chunk, Finished, GenerateRequest, ModelSpec

MAX_SILENCE_S = 15.0


@post(
    "/v1/messages",
    status_code=200,
    tags=["Anthropic"],
    responses=documented(MessageAnswer, ErrorAnswer),
)
async def messages(
    data: JSONBody[MessagesRequest], request: HttpRequest, gate: NamedDependency[Gate]
) -> Response[MessageAnswer] | EventStream:
    """Continue a conversation; with `stream`, as server-sent events."""
    spec = gate.spec(data.model)
    frame = MessageEnvelope(data.model or spec.id)
    door = await _door(request, gate, spec)
    asked = await request.apart(lambda: messages_to_generate(data, frame.id, door))
    is_loaded = gate.is_loaded(spec)
    following = (lambda: _after(request, asked, "")) if asked.compacts else None
    answer = gate.submit(request.scope, [asked.request], following)
    if asked.num_compacted:
        answer.tally.notes.append(f"compacted_messages:{asked.num_compacted}")
    if data.stream:
        stream = MessageStream(frame, answer, asked, record_of(request.scope).request_id)
        keep_alive_s = min(gate.settings.keep_alive_s, MAX_SILENCE_S)
        # Who waits for a model to load hears so at once; otherwise a refusal gets its status.
        patience_s = keep_alive_s if is_loaded else 0.0
        ahead = partial(_look_ahead, request, gate, asked, answer.tally, stream.blocks)
        return await open_stream(request, answer, stream, Pace(patience_s, keep_alive_s), ahead)
    content = _Content(asked)
    await whole(request, answer, content.take)
    await _look_ahead(request, gate, asked, answer.tally, content.blocks)
    return Response(
        content.message(frame, asked, answer.tally),
        headers=cache_header(answer.tally.least_cached),
    )


@post(
    "/v1/messages/count_tokens",
    status_code=200,
    tags=["Anthropic"],
    responses=documented(TokenCount, ErrorAnswer),
)
async def count_tokens(
    data: JSONBody[CountRequest], request: HttpRequest, gate: NamedDependency[Gate]
) -> TokenCount:
    """How many tokens the same request to `/v1/messages` would have, rendered by the model."""
    spec = gate.spec(data.model)
    door, request_id = await _door(request, gate, spec), record_of(request.scope).request_id
    asked = await request.apart(lambda: count_to_generate(data, request_id, door))
    answer = gate.submit(request.scope, [asked.request])
    record_of(request.scope).tally = None  # no answer, whose tokens the log could name
    try:
        await unless_left(request.receive, answer.accepted())
        num_tokens = answer.num_prompt_tokens
    except ContextTooLong as error:
        num_tokens = error.num_tokens
    finally:
        answer.close()
    return TokenCount(num_tokens, ignored_info(asked.ignored))


async def _door(request: HttpRequest, gate: Gate, spec: ModelSpec) -> ConversionContext:
    unused = await request.unused_fields(MessagesRequest)
    return ConversionContext(spec, gate.settings, asker_of(request), unused)


async def _look_ahead(
    request: HttpRequest, gate: Gate, asked: ConvertedRequest, tally: Tally, blocks: Blocks
) -> None:
    """After a compaction: have the next request foreseen, before its end is told."""
    if asked.compacts:
        following = await _after(request, asked, blocks.summary)
        tally.compaction = CompactionInfo(gate.foresee(request.scope, following))


async def _after(request: HttpRequest, asked: ConvertedRequest, summary: str) -> GenerateRequest:
    return await request.apart(lambda: after_summary(asked, summary))


class _Content:
    """A whole answer while it is put together."""

    def __init__(self, asked: ConvertedRequest) -> None:
        self.blocks = Blocks(is_summary=asked.compacts)
        self._finished: Finished | None = None

    def take(self, chunk: Chunk) -> None:
        """Take up a chunk."""
        if isinstance(chunk, Finished):
            self._finished = chunk
            self.blocks.end()
        else:
            self.blocks.take(chunk)

    def message(
        self, frame: MessageEnvelope, asked: ConvertedRequest, tally: Tally
    ) -> MessageAnswer:
        """The message that it became."""
        reason, stop = stop_of(self._finished, asked)
        return MessageAnswer(
            id=frame.id,
            model=frame.model,
            content=[answered(block, asked) for block in self.blocks.finish()],
            usage=in_full(usage_of(tally, asked)),
            stop_reason=reason,
            stop_sequence=stop,
            hearth=hearth_of(tally, asked.ignored),
        )
