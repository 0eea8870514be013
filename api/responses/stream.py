"""A response from its beginning to its end, and the same as a stream of events."""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence

import msgspec
from msgspec import UNSET

from api.http.answer import Answer
from api.http.chains import Owner
from api.http.comparisons import Comparisons, num_read
from api.http.hearth_info import hearth_of
from api.observe.record import CompactionInfo, Tally
from api.openai.caching import applied
from api.openai.fields import CACHE_TTL_S, is_given
from api.openai.response_schemas import (
    ConversationRef,
    FormatFields,
    ResponseRequest,
    ToolChoiceFields,
)
from api.responses.archive import KIND
from api.responses.convert import ENCRYPTED, ResponsePlan, conversation_of
from api.responses.diagnostics import diagnosed
from api.responses.events import (
    Event,
    ItemWriter,
    OutputWriter,
    Shape,
    SummaryThenAnswerWriter,
    SummaryWriter,
    raw_items,
    written_item,
)
from api.responses.items import Item
from api.responses.output import (
    FormatEcho,
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    PromptCacheEcho,
    ReasoningEcho,
    ResponseErrorBody,
    ResponseResource,
    ResponseUsage,
    Status,
    TextEcho,
    WrittenByTtl,
)
from api.responses.two_answers import TwoAnswers
from runtime.cache.deletion_log import Receipt
from runtime.errors import Aborted, HearthError
from runtime.keys import owned
from runtime.types import CacheUse, Chunk, ModelSpec

NOTHING = msgspec.Raw(b"{}")

Foresee = Callable[[Item], Awaitable[str | None]]
"""Has what goes on from a compaction item computed ahead; the id of that, if it is to be."""

encode = msgspec.json.Encoder().encode


def new_response_id() -> str:
    """An id that nobody can guess."""
    return f"{KIND}{secrets.token_hex(24)}"


class ResponseDraft:
    """One response: what its request said, what is written so far, how it ends."""

    def __init__(
        self,
        data: ResponseRequest,
        plan: ResponsePlan,
        spec: ModelSpec,
        answer: Answer | TwoAnswers,
        foresee: Foresee | None = None,
        received: Receipt | None = None,
    ) -> None:
        has_summary = data.reasoning is not None and bool(
            data.reasoning.summary or data.reasoning.generate_summary
        )
        is_sealed = ENCRYPTED in (data.include or ())
        shape = Shape(plan.offer.names, has_summary, is_sealed)
        self.writer = _writer(plan, shape)
        self.remarks: list[str] = list(plan.ignored)
        """What had no effect, for `hearth.ignored`."""
        self.answer = answer
        self._plan = plan
        self._foresee = foresee
        self._is_bounded_by_us = plan.compacts and data.max_output_tokens is None
        self.owner = Owner.of(plan.request, received)
        self._begun = _begun(data, plan, spec)
        self._ended: ResponseResource | None = None

    @property
    def _tally(self) -> Tally:
        return self.answer.tally

    @property
    def id(self) -> str:
        return self._begun.id

    @property
    def key(self) -> str:
        """What the service and the archive know it by."""
        return owned(self.owner.tenant, self.id)

    @property
    def is_to_be_stored(self) -> bool:
        return self._begun.store

    def begun(self, status: Status = "in_progress") -> ResponseResource:
        """The response before there is any of it."""
        return msgspec.structs.replace(self._begun, status=status)

    async def look_ahead(self) -> None:
        """After a compaction: have the next request foreseen, before its end is told."""
        match self.writer:
            case SummaryWriter(items=[item]) if self._foresee is not None:
                self._tally.compaction = CompactionInfo(await self._foresee(written_item(item)))
            case _:
                pass

    @property
    def num_said(self) -> int:
        """Characters that are read to compare prompts."""
        return num_read(self._plan.request)

    def compare(self, comparisons: Comparisons) -> None:
        """Find where the prompt parts from the one it is to be compared with, if any, and have it
        found itself later on.
        """
        request = self._plan.request
        options = self._begun.prompt_cache_options
        earlier = options.comparison_response_id if options is not UNSET else UNSET
        if earlier is not UNSET:
            usage = self._tally.least_cached
            use = CacheUse() if usage is None else usage.cache
            found = comparisons.compared(owned(self.owner.tenant, earlier), request, use)
            is_compacted = self._plan.compacts_first or self._plan.num_replaced > 0
            told = diagnosed(found, use, is_compacted=is_compacted)
            self._begun = msgspec.structs.replace(self._begun, prompt_cache_diagnostics=told)
        if not self._plan.compacts_first:
            comparisons.remember(self.key, request, self._tally.num_prompt_tokens)

    def ended(self) -> ResponseResource:
        """The response when all chunks were written; the same one whenever it is asked for."""
        if self._ended is None:
            self._ended = self._made()
        return self._ended

    def _made(self) -> ResponseResource:
        finished = self.writer.finished
        is_cut = finished is not None and finished.reason == "length"
        if is_cut and self._is_bounded_by_us:
            # Clients do not go on from what is incomplete, and most of a summary is one.
            self._tally.notes.append("summary_cut")
            is_cut = False
        return msgspec.structs.replace(
            self._begun,
            status="incomplete" if is_cut else "completed",
            incomplete_details=IncompleteDetails("max_output_tokens") if is_cut else None,
            completed_at=None if is_cut else int(time.time()),
            output=raw_items(self.writer),
            usage=usage_of(self._tally),
            hearth=hearth_of(self._tally, self.remarks),
        )

    def failed(self, error: HearthError) -> ResponseResource:
        """The response when an error ended it; one that was cancelled is no failure."""
        is_cancelled = error.code == Aborted.code
        return msgspec.structs.replace(
            self._begun,
            status="cancelled" if is_cancelled else "failed",
            error=None if is_cancelled else ResponseErrorBody(error.code, error.message),
            output=raw_items(self.writer),
            hearth=hearth_of(self._tally, self.remarks),
        )

    def unstored(self, why: str) -> None:
        """It cannot be kept, so it must not say that it was."""
        self._begun = msgspec.structs.replace(self._begun, store=False)
        self.remarks.append(f"store: {why}")
        self._ended = None


def _writer(plan: ResponsePlan, shape: Shape) -> ItemWriter:
    if plan.compacts:
        return SummaryWriter()
    return SummaryThenAnswerWriter(shape) if plan.compacts_first else OutputWriter(shape)


class ResponsesStream:
    """A reply as events; `response.created` comes first, whatever else is to be said."""

    def __init__(self, reply: ResponseDraft) -> None:
        self._reply = reply
        self._number = 0

    def opening(self) -> bytes:
        """Created and in progress, unless a sign of life has said so already."""
        if self._number:
            return b""
        return self._told("response.created", self._reply.begun()) + self._in_progress()

    def chunks(self, chunks: Sequence[Chunk]) -> bytes:
        """The events of these chunks."""
        return b"".join(self._events(self._reply.writer.add(chunk)) for chunk in chunks)

    def sign_of_life(self, phase: str) -> bytes:
        """In progress, again: comments do not reset every client's idle timer."""
        del phase
        return self.opening() or self._in_progress()

    def failure(self, error: HearthError) -> bytes:
        """The response failed, or was cancelled; nothing follows."""
        return self.opening() + self._told("response.failed", self._reply.failed(error))

    def closing(self) -> bytes:
        """The whole response."""
        ended = self._reply.ended()
        return self._told(f"response.{ended.status}", ended)

    def _in_progress(self) -> bytes:
        return self._told("response.in_progress", self._reply.begun())

    def _told(self, kind: str, resource: ResponseResource) -> bytes:
        return self._event(kind, {"type": kind, "response": resource})

    def _events(self, events: Iterable[Event]) -> bytes:
        return b"".join(self._event(event.type, event) for event in events)

    def _event(self, kind: str, event: Event | dict[str, str | ResponseResource]) -> bytes:
        number, self._number = self._number, self._number + 1
        body = encode(event)[:-1] + b',"sequence_number":%d}' % number
        return b"event: " + kind.encode() + b"\ndata: " + body + b"\n\n"


def usage_of(tally: Tally) -> ResponseUsage:
    """The counts of an answer; what was computed is written where KV is kept."""
    num_written = tally.num_written_tokens
    num_long = tally.num_written_tokens_for(CACHE_TTL_S["12h"])
    details = WrittenByTtl(num_long, num_written - num_long)
    return ResponseUsage(
        input_tokens=tally.num_prompt_tokens,
        input_tokens_details=InputTokensDetails(tally.num_cached_tokens, num_written, details),
        output_tokens=tally.num_output_tokens,
        output_tokens_details=OutputTokensDetails(tally.num_reasoning_tokens),
        total_tokens=tally.num_prompt_tokens + tally.num_output_tokens,
    )


def told_at_once(resource: ResponseResource, after: int | None) -> bytes:
    """The events of a stored response of which only the end is known: all there is to read."""
    number = 0 if after is None else after + 1
    begun = msgspec.structs.replace(resource, status="in_progress", output=[], error=None)
    begun = msgspec.structs.replace(begun, usage=None, incomplete_details=None, completed_at=None)
    kind = "failed" if resource.status == "cancelled" else resource.status
    events = [("created", begun)] if after is None else []
    return b"".join(
        _written(f"response.{name}", {"response": told}, number + i)
        for i, (name, told) in enumerate([*events, (kind, resource)])
    )


def _written(kind: str, fields: dict[str, ResponseResource], number: int) -> bytes:
    body = encode({"type": kind, **fields, "sequence_number": number})
    return b"event: " + kind.encode() + b"\ndata: " + body + b"\n\n"


def _begun(data: ResponseRequest, plan: ResponsePlan, spec: ModelSpec) -> ResponseResource:
    sampling = plan.request.sampling.over(spec.sampling)
    in_conversation = conversation_of(data)
    return ResponseResource(
        id=plan.request.request_id,
        created_at=int(time.time()),
        status="in_progress",
        background=bool(data.background),
        conversation=ConversationRef(in_conversation) if in_conversation is not None else None,
        instructions=data.instructions,
        max_output_tokens=data.max_output_tokens,
        max_tool_calls=data.max_tool_calls,
        model=data.model or spec.id,
        parallel_tool_calls=data.parallel_tool_calls is not False,
        previous_response_id=data.previous_response_id,
        prompt_cache_key=data.prompt_cache_key,
        prompt_cache_options=UNSET
        if data.prompt_cache_options is None
        else PromptCacheEcho(
            *applied(data), data.prompt_cache_options.comparison_response_id or UNSET
        ),
        prompt_cache_retention=data.prompt_cache_retention or UNSET,
        reasoning=_reasoning(data),
        safety_identifier=data.safety_identifier,
        store=data.store is not False,
        temperature=_or(sampling.temperature, 1.0),
        text=_text(data),
        tool_choice=_tool_choice(data.tool_choice),
        tools=plan.offer.echo,
        top_logprobs=data.top_logprobs or 0,
        top_p=_or(sampling.top_p, 1.0),
        presence_penalty=_or(sampling.presence_penalty, 0.0),
        frequency_penalty=_or(sampling.frequency_penalty, 0.0),
        truncation=data.truncation or "disabled",
        user=data.user,
        metadata=NOTHING if data.metadata is None else msgspec.Raw(encode(data.metadata)),
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _reasoning(data: ResponseRequest) -> ReasoningEcho:
    given = data.reasoning
    if given is None:
        return ReasoningEcho(data.reasoning_effort)
    return ReasoningEcho(given.effort, given.summary or given.generate_summary)


def _text(data: ResponseRequest) -> TextEcho:
    form = (data.text.format if data.text is not None else None) or FormatFields()
    verbosity = data.text.verbosity if data.text is not None else None
    if form.type != "json_schema" or not is_given(form.schema):
        return TextEcho(FormatEcho(form.type), verbosity)
    echo = FormatEcho(
        form.type, form.name or UNSET, form.description, form.schema, bool(form.strict)
    )
    return TextEcho(echo, verbosity)


def _tool_choice(given: str | ToolChoiceFields | None) -> msgspec.Raw:
    if isinstance(given, ToolChoiceFields) and given.type == "allowed_tools":
        given = msgspec.structs.replace(given, mode=given.mode or "auto")
    return msgspec.Raw(encode(given or "auto"))
