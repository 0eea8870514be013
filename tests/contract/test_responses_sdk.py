"""What OpenAI's own client and the published types say of the Responses API of a running server."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import openai
import openresponses_types as published
import pytest
from openai import OpenAI
from openai.types.responses import Response
from pydantic import BaseModel, TypeAdapter

from runtime.prompt.compaction import INTRODUCTION
from tests.calm_model import END, saying
from tests.running_server import RunningServer
from tests.tiny_models import TOOL_CALL

LOOK: Any = {
    "type": "function",
    "name": "look",
    "description": "Look at a place",
    "parameters": {"type": "object", "properties": {"at": {"type": "integer"}}},
    "strict": None,
}
EVENTS: dict[str, type[BaseModel]] = {
    "response.created": published.ResponseCreatedStreamingEvent,
    "response.in_progress": published.ResponseInProgressStreamingEvent,
    "response.completed": published.ResponseCompletedStreamingEvent,
    "response.incomplete": published.ResponseIncompleteStreamingEvent,
    "response.failed": published.ResponseFailedStreamingEvent,
    "response.output_item.added": published.ResponseOutputItemAddedStreamingEvent,
    "response.output_item.done": published.ResponseOutputItemDoneStreamingEvent,
    "response.content_part.added": published.ResponseContentPartAddedStreamingEvent,
    "response.content_part.done": published.ResponseContentPartDoneStreamingEvent,
    "response.output_text.delta": published.ResponseOutputTextDeltaStreamingEvent,
    "response.output_text.done": published.ResponseOutputTextDoneStreamingEvent,
    "response.reasoning.delta": published.ResponseReasoningDeltaStreamingEvent,
    "response.reasoning.done": published.ResponseReasoningDoneStreamingEvent,
    "response.reasoning_summary_part.added": (
        published.ResponseReasoningSummaryPartAddedStreamingEvent
    ),
    "response.reasoning_summary_part.done": (
        published.ResponseReasoningSummaryPartDoneStreamingEvent
    ),
    "response.reasoning_summary_text.delta": (
        published.ResponseReasoningSummaryDeltaStreamingEvent
    ),
    "response.reasoning_summary_text.done": published.ResponseReasoningSummaryDoneStreamingEvent,
    "response.function_call_arguments.delta": (
        published.ResponseFunctionCallArgumentsDeltaStreamingEvent
    ),
    "response.function_call_arguments.done": (
        published.ResponseFunctionCallArgumentsDoneStreamingEvent
    ),
}
# OpenAI's own clients know these two by other names than the published types do.
OTHER_NAMES = {
    "response.reasoning_text.delta": "response.reasoning.delta",
    "response.reasoning_text.done": "response.reasoning.done",
}


OWN_FIELDS = (
    *("background", "include", "metadata", "previous_response_id", "store", "stream"),
    "top_logprobs",
)


@pytest.fixture
def model(calm: Path) -> Path:
    return calm


@pytest.fixture
def server(calm_server: RunningServer) -> RunningServer:
    return calm_server


@pytest.fixture
def client(calm_client: OpenAI) -> OpenAI:
    return calm_client


def told(model: Path, text: str) -> dict[str, Any]:
    """A request that is answered with this text."""
    return {"model": "calm", "input": "What do you see?"} | saying(model, text + END)


def ask(client: OpenAI, model: Path, text: str, **changes: Any) -> Response:
    """The same through the client, which does not know all fields."""
    body = told(model, text) | changes
    known = {name: body.pop(name) for name in ("model", "input") if name in body}
    known |= {name: body.pop(name) for name in OWN_FIELDS if name in body}
    create: Any = client.responses.create
    return create(**known, extra_body=body)


def count(client: OpenAI, items: Any) -> int:
    return client.responses.input_tokens.count(model="calm", input=items).input_tokens


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("let me see", {}),
    "cut": ("let me see", {"max_output_tokens": 2}),
    "reasoning": ("let me</think>see", {"enable_thinking": True}),
    "summary": (
        "let me</think>see",
        {
            "enable_thinking": True,
            "reasoning": {"effort": "low", "summary": "auto"},
            "include": ["reasoning.encrypted_content"],
        },
    ),
    "call": (f"let me see<tool_call>{TOOL_CALL}</tool_call>", {"tools": [LOOK]}),
    "everything echoed": (
        "let me see",
        {
            "instructions": "Be brief.",
            "metadata": {"a": "b"},
            "max_tool_calls": 3,
            "parallel_tool_calls": False,
            "prompt_cache_key": "key",
            "safety_identifier": "me",
            "service_tier": "auto",
            "store": False,
            "text": {"format": {"type": "text"}, "verbosity": "low"},
            "tool_choice": "none",
            "tools": [LOOK],
            "top_logprobs": 2,
            "include": ["message.output_text.logprobs"],
            "top_p": 0.5,
            "truncation": "auto",
        },
    ),
}


def request_of(model: Path, case: str) -> dict[str, Any]:
    text, changes = CASES[case]
    return told(model, text) | changes


def events_of(server: RunningServer, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, whose names on the `event:` lines are those of their data."""
    response = server.post("/v1/responses", body | {"stream": True})
    assert response.status_code == 200, response.text
    *blocks, end = response.text.split("\n\n")
    assert end == ""
    events: list[dict[str, Any]] = []
    for block in blocks:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


# The published types


@pytest.mark.parametrize("case", CASES)
def test_an_answer_is_what_the_published_types_demand(
    server: RunningServer, model: Path, case: str
) -> None:
    answer = server.post("/v1/responses", request_of(model, case))
    assert answer.status_code == 200, answer.text
    published.ResponseResource.model_validate_json(answer.content)
    TypeAdapter(Response).validate_json(answer.content, strict=False)


@pytest.mark.parametrize("case", CASES)
def test_every_event_is_what_the_published_types_demand(
    server: RunningServer, model: Path, case: str
) -> None:
    events = events_of(server, request_of(model, case))
    for event in events:
        kind = OTHER_NAMES.get(event["type"]) or event["type"]
        EVENTS[kind].model_validate_json(json.dumps(event | {"type": kind}))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


@pytest.mark.parametrize("case", CASES)
def test_a_stream_says_what_the_whole_answer_says(
    server: RunningServer, model: Path, case: str
) -> None:
    body = request_of(model, case)
    whole = server.post("/v1/responses", body).json()
    last = events_of(server, body)[-1]["response"]
    of_a_request = {"id", "created_at", "completed_at", "hearth", "usage"}
    assert {k: v for k, v in last.items() if k not in of_a_request | {"output"}} == {
        k: v for k, v in whole.items() if k not in of_a_request | {"output"}
    }
    assert [without_ids(item) for item in last["output"]] == [
        without_ids(item) for item in whole["output"]
    ]
    assert last["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def without_ids(item: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in item.items() if key not in ("id", "call_id")}


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """The types of the events, each run of equal ones once."""
    return [
        kind.removeprefix("response.") for kind, _ in itertools.groupby(e["type"] for e in events)
    ]


def test_events_come_in_the_documented_order(server: RunningServer, model: Path) -> None:
    assert kinds(events_of(server, request_of(model, "call"))) == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done"),
        *("output_item.done", "completed"),
    ]
    assert kinds(events_of(server, request_of(model, "reasoning"))) == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added"),
        *("reasoning_text.delta", "reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done", "completed"),
    ]
    assert kinds(events_of(server, request_of(model, "summary")))[2:8] == [
        *("output_item.added", "reasoning_summary_part.added", "reasoning_summary_text.delta"),
        *("reasoning_summary_text.done", "reasoning_summary_part.done", "output_item.done"),
    ]
    assert kinds(events_of(server, request_of(model, "cut")))[-1] == "incomplete"


# OpenAI's client


def test_an_answer_has_text_usage_and_status(client: OpenAI, model: Path) -> None:
    answer = ask(client, model, "let me see")
    assert (answer.output_text, answer.status, answer.error) == ("let me see", "completed", None)
    assert answer.completed_at is not None
    usage = answer.usage
    assert usage is not None
    assert count(client, "What do you see?") == usage.input_tokens
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    details = usage.input_tokens_details
    assert details.cached_tokens + details.cache_write_tokens == usage.input_tokens


def test_the_stream_helper_puts_the_same_response_together(client: OpenAI, model: Path) -> None:
    body: Any = request_of(model, "call")
    known: Any = {name: body.pop(name) for name in ("model", "input", "tools")}
    with client.responses.stream(**known, extra_body=body) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text == "let me see"
    message, call = final.output
    assert message.type == "message"
    assert call.type == "function_call"
    assert (call.name, call.arguments) == ("look", '{"at":7}')


def test_a_stored_response_is_found_listed_and_deleted(client: OpenAI, model: Path) -> None:
    made = ask(client, model, "let me see", metadata={"a": "b"})
    found = client.responses.retrieve(made.id)
    assert found.to_dict() == made.to_dict()
    (item,) = client.responses.input_items.list(made.id).data
    assert item.to_dict() == {
        "id": item.id,
        "type": "message",
        "role": "user",
        "status": "completed",
        "content": [{"type": "input_text", "text": "What do you see?"}],
    }
    client.responses.delete(made.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError) as caught:
            call(made.id)
        assert caught.value.code == "response_not_found"


def test_input_items_come_in_pages(client: OpenAI, model: Path) -> None:
    items: Any = [{"role": "user", "content": word} for word in ("one", "two", "three")]
    made = ask(client, model, "see", input=items)
    pages = client.responses.input_items.list(made.id, limit=1, order="asc")
    contents: list[Any] = [item.to_dict()["content"] for item in pages]
    assert [content[0]["text"] for content in contents] == ["one", "two", "three"]
    newest: Any = client.responses.input_items.list(made.id, limit=1).data[0].to_dict()
    assert newest["content"][0]["text"] == "three"


def test_pages_of_items_that_were_sent_twice_come_to_an_end(client: OpenAI, model: Path) -> None:
    again: Any = {"type": "message", "id": "msg_1", "role": "user", "content": "again"}
    made = ask(client, model, "see", input=[again, again, again])
    pages = client.responses.input_items.list(made.id, limit=1, order="asc")
    ids = [item.to_dict()["id"] for item, _ in zip(pages, range(9), strict=False)]
    assert (len(ids), len({*ids}), ids[0]) == (3, 3, "msg_1")
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.input_items.list(made.id, after="msg_0")
    assert caught.value.param == "after"


def test_a_conversation_goes_on_from_a_stored_response(client: OpenAI, model: Path) -> None:
    first = ask(client, model, "let me see")
    second = ask(client, model, "see", input="And now?", previous_response_id=first.id)
    whole: Any = [
        {"role": "user", "content": "What do you see?"},
        {"role": "assistant", "content": "let me see"},
        {"role": "user", "content": "And now?"},
    ]
    assert second.usage is not None
    assert second.usage.input_tokens == count(client, whole)
    assert second.previous_response_id == first.id
    assert second.usage.input_tokens_details.cached_tokens > 0


def test_items_are_referred_to_by_their_ids(client: OpenAI, model: Path) -> None:
    first = ask(client, model, "let me see")
    (said,) = first.output
    assert said.id is not None
    question: Any = {"role": "user", "content": "And now?"}
    by_id: Any = [{"type": "item_reference", "id": said.id}, question]
    itself: Any = [{"role": "assistant", "content": "let me see"}, question]
    assert count(client, by_id) == count(client, itself)
    unknown: Any = {"type": "item_reference", "id": "msg_0"}
    for items in ([unknown], [unknown, question]):
        with pytest.raises(openai.BadRequestError, match=r"msg_0.* not stored.* itself") as no:
            client.responses.create(model="calm", input=items)
        assert no.value.param == "input[0]"
    nameless: Any = {"type": "item_reference"}
    assert count(client, [nameless, question]) > count(client, [question])


def test_what_was_not_stored_cannot_be_gone_on_from(client: OpenAI, model: Path) -> None:
    made = ask(client, model, "see", store=False)
    assert made.to_dict()["store"] is False
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="calm", input="x", previous_response_id=made.id)
    assert (caught.value.code, caught.value.param) == (
        "previous_response_not_found",
        "previous_response_id",
    )


def test_reasoning_goes_back_to_the_model_exactly(client: OpenAI, model: Path) -> None:
    included = ["reasoning.encrypted_content"]
    made = ask(
        client, model, "let me</think>see", include=included, store=False, enable_thinking=True
    )
    reasoning: Any = made.output[0].to_dict()
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "let me"}]
    assert made.usage is not None
    assert made.usage.output_tokens_details.reasoning_tokens > 0
    sealed = reasoning["encrypted_content"]
    echo = {"type": "reasoning", "summary": [], "content": None, "encrypted_content": sealed}
    answer: Any = made.output[1].to_dict()
    question: Any = {"role": "user", "content": "And now?"}
    assert count(client, [echo, answer, question]) == count(client, [reasoning, answer, question])


def test_logprobs_are_those_of_the_text(client: OpenAI, model: Path) -> None:
    included = ["message.output_text.logprobs"]
    made = ask(client, model, "let me see", include=included, top_logprobs=3)
    message = made.output[0]
    assert message.type == "message"
    part = message.content[0]
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert "".join(entry.token for entry in part.logprobs).startswith("let me see")
    assert {len(entry.top_logprobs) for entry in part.logprobs} == {3}


def test_a_conversation_is_compacted_and_gone_on_with(client: OpenAI, model: Path) -> None:
    history: Any = [
        {"role": "user", "content": "Where is the kettle?"},
        {"role": "assistant", "content": "on the hearth"},
    ]
    compact: Any = client.responses.compact
    made = compact(model="calm", input=history, extra_body=saying(model, "let me see" + END))
    assert made.object == "response.compaction"
    assert made.usage.output_tokens > 0
    assert [item.type for item in made.output] == ["message", "compaction"]
    question: Any = {"role": "user", "content": "And now?"}
    after = [*(item.to_dict() for item in made.output), question]
    read = [history[0], {"role": "user", "content": INTRODUCTION + "let me see"}, question]
    assert count(client, after) == count(client, read)
    assert ask(client, model, "let me", input=after).output_text == "let me"
    # The whole history may be sent as well: the item stands for what the model said before it.
    whole = [*history, made.output[1].to_dict(), question]
    assert count(client, whole) == count(client, read)


def test_a_trigger_is_streamed_as_one_compaction_item(client: OpenAI, model: Path) -> None:
    items: Any = [{"role": "user", "content": "hi"}, {"type": "compaction_trigger"}]
    body = saying(model, "let me</think>see" + END) | {"enable_thinking": True}
    create: Any = client.responses.create
    events = list(create(model="calm", input=items, stream=True, extra_body=body))
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.compaction.compacting",
        "response.output_item.done",
        "response.completed",
    ]
    (item,) = events[-1].response.output
    assert item.type == "compaction"
    assert events[-1].response.usage.output_tokens_details.reasoning_tokens > 0
    question: Any = {"role": "user", "content": "And now?"}
    read: Any = [items[0], {"role": "user", "content": INTRODUCTION + "see"}, question]
    assert count(client, [items[0], item.to_dict(), question]) == count(client, read)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_conversation_that_became_too_long_is_summed_up_before_it_is_answered(
    client: OpenAI, model: Path, is_streamed: bool
) -> None:
    history: Any = [
        {"role": "user", "content": "Where is the kettle?"},
        {"role": "assistant", "content": "It is on the hearth, where it hums. " * 30},
        {"role": "user", "content": "And now?"},
    ]
    create: Any = client.responses.create
    body = saying(model, "let me see" + END)
    manage: Any = [{"type": "compaction", "compact_threshold": 100}]
    asked: Any = {"model": "calm", "input": history, "extra_body": body}
    if is_streamed:
        events = list(create(**asked, context_management=manage, stream=True))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        kinds = [event.type for event in events]
        assert kinds[2:5] == [
            "response.output_item.added",
            "response.compaction.compacting",
            "response.output_item.done",
        ]
        assert kinds[5:7] == ["response.output_item.added", "response.content_part.added"]
        assert events[5].output_index == 1
        made = events[-1].response
    else:
        made = create(**asked, context_management=manage)
    assert made.status == "completed"
    assert [item.type for item in made.output] == ["compaction", "message"]
    assert made.output_text == "let me see"
    read: Any = [history[0], history[2], {"role": "user", "content": INTRODUCTION + "let me see"}]
    assert made.usage.input_tokens == count(client, read)
    # A client sends all of it back, or goes on by its id: both are read from the summary on.
    question: Any = {"role": "user", "content": "So?"}
    answered: Any = {"role": "assistant", "content": "let me see"}
    back = [*history, *(item.to_dict() for item in made.output), question]
    assert count(client, back) == count(client, [*read, answered, question])
    after = create(model="calm", input=[question], previous_response_id=made.id, extra_body=body)
    assert after.usage.input_tokens == count(client, back)


def test_a_conversation_that_is_short_or_has_nothing_to_sum_up_is_answered_as_it_is(
    client: OpenAI, model: Path
) -> None:
    create: Any = client.responses.create
    body = saying(model, "let me see" + END)
    user: Any = {"role": "user", "content": "Where is the kettle? " * 30}
    said: Any = [user, {"role": "assistant", "content": "Here."}, user]
    for items, threshold in (([user], 10), (said, 100_000), (said, None)):
        manage: Any = [{"type": "compaction", "compact_threshold": threshold}]
        made = create(model="calm", input=items, context_management=manage, extra_body=body)
        assert [item.type for item in made.output] == ["message"]
    wrong: Any = [{"type": "other"}]
    with pytest.raises(openai.BadRequestError) as caught:
        create(model="calm", input=said, context_management=wrong)
    assert caught.value.param == "context_management[0].type"


def test_a_summary_that_the_client_cut_says_so(client: OpenAI, model: Path) -> None:
    items: Any = [{"role": "user", "content": "hi"}, {"type": "compaction_trigger"}]
    made = ask(client, model, "let me see", input=items, max_output_tokens=2)
    assert made.status == "incomplete"
    assert [item.type for item in made.output] == ["compaction"]
