"""`/v1/responses` and what belongs to it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Generator, Sequence
from contextlib import contextmanager
from typing import Annotated, NamedTuple

import msgspec
from litestar import Response, delete, get, post
from litestar.di import NamedDependency
from litestar.exceptions import MethodNotAllowedException
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter

from api.http.answer import Answer
from api.http.body import HttpRequest
from api.http.cache_header import cache_header
from api.http.caller import asker_of, tenant_of
from api.http.errors import ErrorBody, ErrorEnvelope, documented
from api.http.event_log import EventLog
from api.http.expansion import Expansion
from api.http.gate import Gate
from api.http.hearth_info import hearth_of, ignored_info
from api.http.refusal import refuse
from api.http.sse import EventStream, Pace, open_stream, unless_left, whole
from api.observe.record import CompactionInfo, record_of
from api.openai.response_schemas import ResponseRequest
from api.responses.archive import in_full
from api.responses.compaction import TRIGGER_ITEM, compacted, compaction_item
from api.responses.convert import (
    ResponsePlan,
    check,
    conversation_of,
    gone_on_with,
    items_of,
    plan_of,
)
from api.responses.events import SummaryWriter, written_item
from api.responses.items import Item, stored_weight
from api.responses.output import (
    CompactedResponse,
    DeletedResponse,
    InputTokens,
    ItemList,
    ResponseResource,
)
from api.responses.pages import Order, list_of
from api.responses.repeated import check_repeated
from api.responses.service import ResponseService
from api.responses.stream import (
    Foresee,
    ResponseDraft,
    ResponsesStream,
    new_response_id,
    told_at_once,
    usage_of,
)
from api.responses.two_answers import TwoAnswers
from runtime.errors import ContextTooLong, InvalidRequest
from runtime.keys import owned
from runtime.prewarm.growing import Following
from runtime.prompt.compaction import summary_request
from runtime.types import ChatPrompt, GenerateRequest, ModelSpec
from store.history.response_rows import PageWish

MAX_PATIENCE_S = 1.0
"""A model that is loaded accepts within that; one that must be loaded shows signs of life."""

MAX_KEEP_ALIVE_S = 15.0
NO_WEBSOCKET = "Responses are not served over websockets here: send POST /v1/responses instead."


@post(
    ["/v1/responses", "/responses"],
    status_code=200,
    tags=["OpenAI"],
    responses=documented(ResponseResource),
)
async def create_response(
    data: JSONBody[ResponseRequest],
    request: HttpRequest,
    gate: NamedDependency[Gate],
    responses: NamedDependency[ResponseService],
) -> Response[ResponseResource] | EventStream:
    """Answer some input; with `stream`, as server-sent events, with `background`, later."""
    with _naming_input():
        asked = await _planned(data, request, gate, responses)
        spec, plan, new = asked.spec, asked.plan, asked.new
        remarks = [f"compacted_items:{plan.num_replaced}"] if plan.num_replaced else []
        if await _is_too_long(asked, request, gate):
            plan = plan._replace(compacts_first=True)
            answer = _summed_up_first(asked, request, gate)
        else:
            following = _following(asked, request, gate) if plan.compacts else None
            answer = gate.submit(request.scope, [plan.request], following)
            answer.tally.notes.extend(remarks)
        foresee = _foresight(asked, request, gate)
        reply = ResponseDraft(data, plan, spec, answer, foresee, record_of(request.scope).received)
        responses.begin(reply)
        if data.background:
            queued = await responses.start(reply, new, _keep_alive_s(gate))
            if data.stream:
                return _followed(await responses.events_of(reply.key), queued, None)
            return Response(queued)
        if data.stream:
            return await _streamed(request, gate, responses, reply, new)
        await whole(request, answer, reply.writer.add)
        await responses.settle(reply, new)
        return Response(reply.ended(), headers=cache_header(answer.tally.least_cached))


@post(
    ["/v1/responses/compact", "/responses/compact"],
    status_code=200,
    tags=["OpenAI"],
    responses=documented(CompactedResponse),
)
async def compact(
    data: JSONBody[ResponseRequest],
    request: HttpRequest,
    gate: NamedDependency[Gate],
    responses: NamedDependency[ResponseService],
) -> Response[CompactedResponse]:
    """Sum a conversation up: what its user said, and one item that stands for the rest of it."""
    if data.stream or data.background:
        field = "stream" if data.stream else "background"
        refuse(field, "is not supported here: leave it out, or send a compaction_trigger item.")
    with _naming_input():
        asked = await _planned(data, request, gate, responses, [Item(TRIGGER_ITEM, "input")])
        following = _following(asked, request, gate)
        answer = gate.submit(request.scope, [asked.plan.request], following)
        writer = SummaryWriter()
        await whole(request, answer, writer.add)
        (item,) = map(written_item, writer.items)
        foreseen = await _foresight(asked, request, gate)(item)
        answer.tally.compaction = CompactionInfo(foreseen)
        kept = await request.apart(lambda: in_full(compacted(asked.history, item)))
        body = CompactedResponse(
            id=asked.plan.request.request_id,
            created_at=int(time.time()),
            output=kept,
            usage=usage_of(answer.tally),
            hearth=hearth_of(answer.tally, asked.plan.ignored),
        )
        return Response(body, headers=cache_header(answer.tally.least_cached))


@post(
    ["/v1/responses/input_tokens", "/responses/input_tokens"],
    status_code=200,
    tags=["OpenAI"],
    responses=documented(InputTokens),
)
async def count_input_tokens(
    data: JSONBody[ResponseRequest],
    request: HttpRequest,
    gate: NamedDependency[Gate],
    responses: NamedDependency[ResponseService],
) -> InputTokens:
    """The exact number of tokens that this request would have."""
    with _naming_input():
        plan = (await _planned(data, request, gate, responses)).plan
        num_tokens = await unless_left(request.receive, gate.count(plan.request))
        return InputTokens(num_tokens, hearth=ignored_info(plan.ignored))


@get(
    ["/v1/responses/{response_id:str}", "/responses/{response_id:str}"],
    tags=["OpenAI"],
    responses=documented(ResponseResource),
)
async def get_response(
    response_id: FromPath[str],
    request: HttpRequest,
    responses: NamedDependency[ResponseService],
    stream: FromQuery[bool] = False,
    starting_after: Annotated[int | None, QueryParameter(ge=0)] = None,
) -> Response[ResponseResource] | EventStream:
    """A stored response; with `stream`, its events, also while it is made in the background."""
    mine = _mine(request, response_id)
    events = await responses.events_of(mine) if stream else None
    resource = await responses.find(mine)
    if not stream:
        return Response(resource)
    return _followed(events, resource, starting_after)


@delete(
    ["/v1/responses/{response_id:str}", "/responses/{response_id:str}"],
    status_code=200,
    tags=["OpenAI"],
    responses=documented(DeletedResponse),
)
async def delete_response(
    response_id: FromPath[str], request: HttpRequest, responses: NamedDependency[ResponseService]
) -> DeletedResponse:
    """Delete a stored response with its items. Responses that go on from it cannot any more."""
    await responses.remove(_mine(request, response_id))
    return DeletedResponse(response_id)


@post(
    ["/v1/responses/{response_id:str}/cancel", "/responses/{response_id:str}/cancel"],
    status_code=200,
    tags=["OpenAI"],
    responses=documented(ResponseResource),
)
async def cancel_response(
    response_id: FromPath[str], request: HttpRequest, responses: NamedDependency[ResponseService]
) -> ResponseResource:
    """End a response that is being made, in the background or not."""
    return await responses.cancel(_mine(request, response_id))


@get(
    ["/v1/responses/{response_id:str}/input_items", "/responses/{response_id:str}/input_items"],
    tags=["OpenAI"],
    responses=documented(ItemList),
)
async def list_input_items(
    response_id: FromPath[str],
    request: HttpRequest,
    responses: NamedDependency[ResponseService],
    limit: Annotated[int, QueryParameter(ge=1, le=100)] = 20,
    order: FromQuery[Order] = "desc",
    after: FromQuery[str | None] = None,
) -> ItemList:
    """The items of a stored response's own input, a page at a time."""
    wish = PageWish(limit, order == "desc", after)
    return list_of(await responses.archive.input_page(_mine(request, response_id), wish), after)


@get(["/v1/responses", "/responses"], tags=["OpenAI"], sync_to_thread=False)
def no_websocket(request: HttpRequest) -> Response[ErrorEnvelope]:
    """426 for a client that tries a websocket, which then falls back to POST."""
    if "x-upgrade" not in request.headers:  # as framing passes it on
        raise MethodNotAllowedException(headers={"allow": "POST"})
    body = ErrorBody(NO_WEBSOCKET, "invalid_request_error", None, "upgrade_not_supported")
    return Response(ErrorEnvelope(body), status_code=426, headers={"allow": "POST"})


class _Asked(NamedTuple):
    """What a request came to: its own items, those of the whole conversation, the plan for it."""

    data: ResponseRequest
    spec: ModelSpec
    new: list[Item]
    history: list[Item]
    plan: ResponsePlan


async def _is_too_long(asked: _Asked, request: HttpRequest, gate: Gate) -> bool:
    """It reached the length from which on its client wants it to be summed up, and can be."""
    wanted, plan = asked.data.context_management, asked.plan
    prompt = plan.request.prompt
    if not wanted or plan.compacts or not isinstance(prompt, ChatPrompt):
        return False
    if all(message.role in ("system", "user") for message in prompt.messages):
        return False
    num_tokens = await unless_left(request.receive, gate.count(plan.request))
    default = asked.spec.context * 3 // 4
    return num_tokens >= min(one.compact_threshold or default for one in wanted)


def _summed_up_first(asked: _Asked, request: HttpRequest, gate: Gate) -> TwoAnswers:
    """A summary of the conversation, and the answer that goes on from it."""
    caller = asker_of(request)
    whole_request = asked.plan.request

    async def follow(summary: str) -> Answer:
        items = compacted(asked.history, compaction_item(summary)) if summary else asked.history
        plan = await request.apart(
            lambda: plan_of(
                asked.data, items, whole_request.request_id, asked.spec, caller, gate.settings
            ),
            stored_weight(items),
        )
        answer = gate.submit(request.scope, [plan.request])
        if summary:
            answer.tally.compaction = CompactionInfo()
        return answer

    unbounded = msgspec.structs.replace(
        whole_request, request_id=f"{whole_request.request_id}-summary", max_tokens=None
    )
    asks = summary_request(unbounded, asked.spec.context)
    following = _following(asked, request, gate)
    return TwoAnswers(gate.submit(request.scope, [asks], following), follow)


def _foresight(asked: _Asked, request: HttpRequest, gate: Gate) -> Foresee:
    """What goes on from a compaction item of this conversation is computed ahead."""

    async def foresee(item: Item) -> str | None:
        return gate.foresee(request.scope, await _after(item, asked, request, gate))

    return foresee


def _following(asked: _Asked, request: HttpRequest, gate: Gate) -> Following:
    """What goes on from a summary that is not written yet."""
    return lambda: _after(compaction_item(""), asked, request, gate)


async def _after(item: Item, asked: _Asked, request: HttpRequest, gate: Gate) -> GenerateRequest:
    """What goes on from a compaction item of this conversation."""
    items, caller = compacted(asked.history, item), asker_of(request)
    plan = await request.apart(
        lambda: plan_of(asked.data, items, "", asked.spec, caller, gate.settings),
        stored_weight(items),
    )
    return plan.request


async def _planned(
    data: ResponseRequest,
    request: HttpRequest,
    gate: Gate,
    responses: ResponseService,
    more: Sequence[Item] = (),
) -> _Asked:
    """The model, the request's items and `more`, what is to be done with the conversation."""
    check(data)
    spec = gate.spec(data.model)
    gate.check_body(request.scope, spec)
    caller = asker_of(request)
    given = data.previous_response_id
    previous_id = owned(caller.tenant, given) if given is not None else None
    if responses.is_underway(previous_id):
        refuse("previous_response_id", "is still being made: wait until it is complete.")
    await request.apart(lambda: check_repeated(data))
    items = await request.apart(lambda: items_of(data))
    stored = Expansion.allowed(spec, gate.settings)
    new = await responses.archive.resolved(items, caller.tenant, stored)
    past = await responses.archive.past(previous_id, stored)
    if (given := conversation_of(data)) is not None:
        past = await responses.archive.conversations.past(owned(caller.tenant, given), stored)
    items = [*past, *new, *more]
    plan = await request.apart(
        lambda: plan_of(data, items, new_response_id(), spec, caller, gate.settings),
        stored_weight(items),
    )
    unused = await request.unused_fields(ResponseRequest)
    plan = plan._replace(ignored=(*unused, *plan.ignored))
    history = items[:-1] if plan.compacts else items
    if plan.compacts:
        new = [item for item in new if item is not items[-1]]
    own = gone_on_with(new) if plan.is_begun and new else new
    return _Asked(data, spec, own, history, plan)


def _mine(request: HttpRequest, response_id: str) -> str:
    return owned(tenant_of(request.scope), response_id)


async def _streamed(
    request: HttpRequest,
    gate: Gate,
    responses: ResponseService,
    reply: ResponseDraft,
    new: list[Item],
) -> EventStream:
    keep_alive_s = _keep_alive_s(gate)
    pace = Pace(min(keep_alive_s, MAX_PATIENCE_S), keep_alive_s)
    stream = ResponsesStream(reply)
    return await open_stream(
        request, reply.answer, stream, pace, lambda: responses.settle(reply, new)
    )


def _keep_alive_s(gate: Gate) -> float:
    return min(gate.settings.keep_alive_s, MAX_KEEP_ALIVE_S)


def _followed(log: EventLog | None, resource: ResponseResource, after: int | None) -> EventStream:
    """The events behind that number. Whoever stops reading them ends nothing."""
    if log is not None:
        events = log.follow(-1 if after is None else after)
    else:
        events = _once(told_at_once(resource, after))
    return EventStream(events, lambda: None, {})


async def _once(events: bytes) -> AsyncIterator[bytes]:
    yield events


@contextmanager
def _naming_input() -> Generator[None]:
    """What the runtime says of messages is about the field `input`."""
    try:
        yield
    except ContextTooLong as error:
        raise ContextTooLong(
            error.num_tokens,
            error.context,
            "input",
            is_least=error.is_least,
            is_rest=error.is_rest,
        ) from error
    except InvalidRequest as error:
        if error.param != "messages":
            raise
        raise InvalidRequest(error.message, "input") from error


GENERATING = (create_response, compact, count_input_tokens)
KEEPING = (
    get_response,
    delete_response,
    cancel_response,
    list_input_items,
    no_websocket,
)
