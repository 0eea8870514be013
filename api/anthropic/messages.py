"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

from typing import TypeVar

from litestar import Response, delete, post
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody

from api.anthropic.convert import (
    ConversionContext,
    ConvertedRequest,
    after_summary,
    count_to_generate,
    messages_to_generate,
)
from api.anthropic.diagnostics import diagnosis
from api.anthropic.errors import ErrorAnswer
from api.anthropic.schemas import (
    CountRequest,
    MessageAnswer,
    MessagesRequest,
    ThreadDeleted,
    TokenCount,
)
from api.anthropic.stream import (
    Blocks,
    MessageEnvelope,
    MessageStream,
    answered,
    cache_of,
    in_full,
    stop_of,
    usage_of,
)
from api.anthropic.threads import Threads
from api.http.body import HttpRequest, apart
from api.http.cache_header import cache_header
from api.http.caller import asker_of, tenant_of
from api.http.chains import Owner
from api.http.comparisons import num_read, read_ahead
from api.http.errors import documented
from api.http.expansion import Expansion
from api.http.gate import Gate
from api.http.hearth_info import hearth_of, ignored_info
from api.http.sse import EventStream, Pace, open_stream, unless_left, whole
from api.observe.record import CompactionInfo, Tally, record_of
from runtime.errors import ContextTooLong
from runtime.keys import owned
from runtime.types import Chunk, Finished, GenerateRequest, ModelSpec

R = TypeVar("R", bound=CountRequest)

MAX_SILENCE_S = 15.0


@post(
    "/v1/messages",
    status_code=200,
    tags=["Anthropic"],
    responses=documented(MessageAnswer, ErrorAnswer),
)
async def messages(
    data: JSONBody[MessagesRequest],
    request: HttpRequest,
    gate: NamedDependency[Gate],
    threads: NamedDependency[Threads],
) -> Response[MessageAnswer] | EventStream:
    """Continue a conversation; with `stream`, as server-sent events."""
    spec = gate.spec(data.model)
    frame = MessageEnvelope(data.model or spec.id)
    whole_data, door, weight = await _opened(data, request, gate, threads, spec)
    asked = await request.apart(lambda: messages_to_generate(whole_data, frame.id, door), weight)
    comparisons = threads.comparisons
    if data.diagnostics is not None:
        await apart(num_read(asked.request), lambda: read_ahead(asked.request))
    frame.diagnose = diagnosis(data.diagnostics, comparisons, asked.request)
    is_loaded = gate.is_loaded(spec)
    following = (lambda: _after(request, asked, "")) if asked.compacts else None
    answer = gate.submit(request.scope, [asked.request], following)
    if asked.num_compacted:
        answer.tally.notes.append(f"compacted_messages:{asked.num_compacted}")

    async def settle(blocks: Blocks) -> None:
        await _look_ahead(request, gate, asked, answer.tally, blocks)
        one_id = owned(asked.request.cache.tenant, frame.id)
        num_tokens = answer.tally.num_prompt_tokens
        await apart(
            num_read(asked.request),
            lambda: comparisons.remember(one_id, asked.request, num_tokens),
        )
        if data.thread is not None:
            owner = Owner.of(asked.request, record_of(request.scope).received)
            said = [answered(block, asked) for block in blocks.written]
            if not await threads.keep(frame.id, data, said, owner):
                answer.tally.notes.append("thread_not_stored")

    if data.stream:
        stream = MessageStream(frame, answer, asked, record_of(request.scope).request_id)
        keep_alive_s = min(gate.settings.keep_alive_s, MAX_SILENCE_S)
        # Who waits for a model to load hears so at once; otherwise a refusal gets its status.
        patience_s = keep_alive_s if is_loaded else 0.0
        pace = Pace(patience_s, keep_alive_s)
        return await open_stream(request, answer, stream, pace, lambda: settle(stream.blocks))
    content = _Content(asked)
    await whole(request, answer, content.take)
    await settle(content.blocks)
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
    data: JSONBody[CountRequest],
    request: HttpRequest,
    gate: NamedDependency[Gate],
    threads: NamedDependency[Threads],
) -> TokenCount:
    """How many tokens the same request to `/v1/messages` would have, rendered by the model."""
    spec = gate.spec(data.model)
    whole_data, door, weight = await _opened(data, request, gate, threads, spec)
    request_id = record_of(request.scope).request_id
    asked = await request.apart(lambda: count_to_generate(whole_data, request_id, door), weight)
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


@delete("/v1/messages/{message_id:str}", status_code=200, tags=["Anthropic"])
async def delete_thread(
    message_id: FromPath[str], request: HttpRequest, threads: NamedDependency[Threads]
) -> ThreadDeleted:
    """Delete the thread that an answer is in: all that was said in it, before and after."""
    await threads.remove(tenant_of(request.scope), message_id)
    return ThreadDeleted(message_id)


async def _opened(
    data: R, request: HttpRequest, gate: Gate, threads: Threads, spec: ModelSpec
) -> tuple[R, ConversionContext, int]:
    """The request with all that its thread remembers, what it is turned around with, and what was
    added to it, in bytes.
    """
    unused = await request.unused_fields(MessagesRequest)
    caller, expansion = asker_of(request), Expansion.allowed(spec, gate.settings)
    resumed = await threads.resumed(data, caller.tenant, expansion)
    door = ConversionContext(spec, gate.settings, caller, unused, resumed.num_stored)
    return resumed.whole, door, resumed.num_bytes


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
            diagnostics=frame.diagnose(cache_of(tally)),
            hearth=hearth_of(tally, asked.ignored),
        )
