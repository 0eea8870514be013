"""What Anthropic's own Python client sees of a running server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal, cast

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic
from pydantic import BaseModel

from runtime.prompt.compaction import INTRODUCTION
from tests.running_server import RunningServer, running

CODE = "velvet-onyx-41"
RAIN = "Light rain, 9 degrees"
QUESTION: Any = [{"role": "user", "content": "What is the weather in Zurich?"}]
WEATHER: Any = {
    "name": "get_weather",
    "description": "Get the current weather for a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
READ: Any = {
    "name": "read_file",
    "description": "Read a file from disk.",
    "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}},
}
TOOLS: Any = [WEATHER, READ]
THINK: Any = {"type": "enabled", "budget_tokens": 1024}


@pytest.fixture(scope="module")
def tiny_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server that nobody configured."""
    with running(tmp_path_factory.mktemp("bare")) as server:
        yield server
        assert "Traceback" not in server.stderr


@pytest.fixture
def client(tiny_server: RunningServer) -> Iterator[Anthropic]:
    with Anthropic(base_url=tiny_server.url, api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture
async def async_client(tiny_server: RunningServer) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=tiny_server.url, auth_token="x", max_retries=0) as client:
        yield client


def user(text: str) -> Any:
    return {"role": "user", "content": text}


def create(client: Anthropic, **changes: Any) -> anthropic.types.Message:
    request: Any = {"model": "hearth-tiny", "max_tokens": 120, "messages": [user("Hello!")]}
    return client.messages.create(**request | changes)


def plain(message: anthropic.types.Message) -> list[Any]:
    """The content without what the client's helpers add to it."""
    dicts = [block.to_dict() for block in message.content]
    return [{k: v for k, v in one.items() if v is not None} for one in dicts]


# Messages


def test_a_message_has_everything_a_client_reads(client: Anthropic) -> None:
    answer = create(client)
    assert answer.id.startswith("msg_")
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "hearth-tiny")
    (block,) = answer.content
    assert block.type == "text"
    assert "hearth-tiny" in block.text
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert answer.usage.output_tokens > 0
    assert answer._request_id is not None


def test_a_code_word_is_recalled_from_system_blocks_over_several_turns(client: Anthropic) -> None:
    system: Any = [
        {"type": "text", "text": f"You are helpful. The code word is {CODE}."},
    ]
    turns: Any = [user("The river was calm."), {"role": "assistant", "content": "I see."}]
    answer = create(client, system=system, messages=[*turns, user("What is the code word?")])
    assert answer.content[0].type == "text"
    assert CODE in answer.content[0].text


def test_a_stream_with_ids_is_read_as_one_without(client: Anthropic) -> None:
    texts: list[str] = []
    for stays in ("false", "true"):
        with client.messages.stream(
            model="hearth-tiny",
            max_tokens=20,
            messages=[user("Hello!")],
            extra_headers={"Hearth-Resume": stays},
        ) as stream:
            texts.append(stream.get_final_text())
            assert ("hearth-stream" in stream.response.headers) == (stays == "true")
    assert texts[0] == texts[1] != ""


def test_the_streaming_helper_puts_together_what_the_whole_answer_says(client: Anthropic) -> None:
    whole = create(client)
    with client.messages.stream(
        model="hearth-tiny", max_tokens=120, messages=[user("Hello!")]
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert plain(final) == plain(whole)
    assert whole.content[0].type == "text"
    assert text == whole.content[0].text
    assert final.stop_reason == "end_turn"
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_raw_events_are_typed_from_the_first_to_the_last(client: Anthropic) -> None:
    events = list(
        client.messages.create(
            model="hearth-tiny", max_tokens=8, messages=[user("Hello!")], stream=True
        )
    )
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}


async def test_the_async_client_streams_many_answers_at_once(async_client: AsyncAnthropic) -> None:
    async def answer(city: str) -> str:
        async with async_client.messages.stream(
            model="hearth-tiny",
            max_tokens=80,
            messages=[user(f"What is the weather in {city}?")],
            tools=TOOLS,
        ) as stream:
            final = await stream.get_final_message()
        (call,) = final.content
        assert call.type == "tool_use"
        return str(call.input["city"])

    cities = ["Zurich", "Paris", "Oslo"]
    assert await asyncio.gather(*(answer(city) for city in cities)) == cities


# Tools and thinking


@pytest.mark.parametrize("thinking", [{"type": "disabled"}, THINK])
def test_a_tool_round_trip_ends_with_the_tools_result(client: Anthropic, thinking: Any) -> None:
    given: Any = {"tools": TOOLS, "thinking": thinking}
    first = create(client, messages=QUESTION, **given)
    call = first.content[-1]
    assert first.stop_reason == "tool_use"
    assert call.type == "tool_use"
    assert (call.name, call.input) == ("get_weather", {"city": "Zurich"})
    result: Any = {
        "type": "tool_result",
        "tool_use_id": call.id,
        "content": "Light rain, 9 degrees",
    }
    turns: Any = [*QUESTION, first.to_param(), {"role": "user", "content": [result]}]
    second = create(client, messages=turns, **given)
    assert second.stop_reason == "end_turn"
    said = second.content[-1]
    assert said.type == "text"
    assert RAIN in said.text
    assert second.usage.cache_read_input_tokens is not None
    assert second.usage.cache_read_input_tokens >= first.usage.input_tokens - 4


def test_a_streamed_tool_call_has_its_whole_input_and_its_pieces(client: Anthropic) -> None:
    with client.messages.stream(
        model="hearth-tiny", max_tokens=120, messages=QUESTION, tools=TOOLS
    ) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    (call,) = final.content
    assert call.type == "tool_use"
    assert call.input == {"city": "Zurich"}
    assert "Zurich" in "".join(pieces)


def test_thoughts_are_a_block_of_their_own_that_is_signed(client: Anthropic) -> None:
    messages: Any = [user(f"The code word is {CODE}. What is the code word?")]
    whole = create(client, messages=messages, thinking=THINK)
    thoughts, said = whole.content
    assert thoughts.type == "thinking"
    assert said.type == "text"
    assert thoughts.thinking
    assert thoughts.signature
    assert CODE in said.text
    with client.messages.stream(
        model="hearth-tiny", max_tokens=120, messages=messages, thinking=THINK
    ) as stream:
        signatures = [event.signature for event in stream if event.type == "signature"]
        final = stream.get_final_message()
    assert plain(final) == plain(whole)
    assert signatures == [thoughts.signature]


@pytest.mark.parametrize("display", ["omitted", "summarized"])
def test_thoughts_that_were_not_shown_still_lead_the_next_turn(
    client: Anthropic, display: str
) -> None:
    given: Any = {"thinking": {"type": "adaptive", "display": display}}
    messages: Any = [user(f"The code word is {CODE}. What is the code word?")]
    first = create(client, messages=messages, **given)
    thoughts = first.content[0]
    assert thoughts.type == "thinking"
    assert bool(thoughts.thinking) is (display == "summarized")
    turns: Any = [*messages, first.to_param(), user("And again?")]
    second = create(client, messages=turns, **given)
    assert second.usage.cache_read_input_tokens is not None
    num_said = first.usage.input_tokens + first.usage.output_tokens
    num_said += first.usage.cache_read_input_tokens or 0
    assert second.usage.cache_read_input_tokens >= num_said - 4


# What the answer must be


class Verdict(BaseModel):
    """The form of an answer."""

    is_ok: bool
    stars: Literal[1, 2, 3]


def test_a_schema_for_the_answer_is_followed(client: Anthropic) -> None:
    answer = client.messages.parse(
        model="hearth-tiny", max_tokens=120, messages=[user("Hello!")], output_format=Verdict
    )
    assert isinstance(answer.parsed_output, Verdict)
    assert answer.stop_reason == "end_turn"


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "set_lamp"}])
def test_a_call_that_is_demanded_is_made(client: Anthropic, choice: Any) -> None:
    states = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
    schema = states | {"additionalProperties": False}
    lamp = {"name": "set_lamp", "input_schema": schema, "strict": True}
    answer = create(client, tools=[lamp], tool_choice=choice)
    assert answer.stop_reason == "tool_use"
    call = answer.content[-1]
    assert call.type == "tool_use"
    assert call.name == "set_lamp"
    assert call.input in ({"on": True}, {"on": False})


def test_no_call_is_made_where_none_may_be_though_the_tools_stay_in_the_prompt(
    client: Anthropic,
) -> None:
    answer = create(client, messages=QUESTION, tools=TOOLS, tool_choice={"type": "none"})
    assert answer.stop_reason == "end_turn"
    assert {block.type for block in answer.content} == {"text"}
    usage = create(client, messages=QUESTION, tools=TOOLS).usage
    assert usage.input_tokens == 1  # the same prompt


# Beginnings


@pytest.mark.parametrize("thinking", [{"type": "disabled"}, THINK])
def test_an_answer_goes_on_from_what_the_client_begins(client: Anthropic, thinking: Any) -> None:
    begun: Any = {"role": "assistant", "content": "Hello"}
    request: Any = {"messages": [user("Hello!"), begun], "thinking": thinking}
    rest = create(client, **request)
    (said,) = rest.content
    assert said.type == "text"
    assert said.text.startswith("!")
    with client.messages.stream(model="hearth-tiny", max_tokens=120, **request) as stream:
        assert plain(stream.get_final_message()) == plain(rest)
    counted = client.messages.count_tokens(model="hearth-tiny", **request).input_tokens
    usage = rest.usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    after: Any = [user("Hello!"), {"role": "assistant", "content": f"Hello{said.text}"}]
    usage = create(client, messages=[*after, user("Hello!")], thinking=thinking).usage
    assert (usage.cache_read_input_tokens or 0) >= counted + rest.usage.output_tokens - 1


def test_an_answer_that_was_cut_off_goes_on_to_what_it_would_have_been(client: Anthropic) -> None:
    messages: Any = [user(f"The code word is {CODE}. What is the code word?")]
    whole, cut = create(client, messages=messages), create(client, messages=messages, max_tokens=5)
    assert cut.stop_reason == "max_tokens"
    begun: Any = {"role": "assistant", "content": cut.content}
    rest = create(client, messages=[*messages, begun])
    pieces = [block.text for one in (cut, rest) for block in one.content if block.type == "text"]
    assert [{"type": "text", "text": "".join(pieces)}] == plain(whole)
    assert rest.usage.input_tokens == 1  # all of it was still known


# Counting


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"system": "Be brief."},
        {"tools": TOOLS, "tool_choice": {"type": "auto"}},
        {"thinking": THINK},
        {"messages": [user("a"), {"role": "assistant", "content": "b"}, user("c")]},
    ],
    ids=["plain", "system", "tools", "thinking", "turns"],
)
def test_a_count_is_the_usage_of_the_same_request(client: Anthropic, changes: Any) -> None:
    usage = create(client, **changes, max_tokens=1).usage
    asked: Any = {"model": "hearth-tiny", "messages": [user("Hello!")]} | changes
    counted = client.messages.count_tokens(**asked).input_tokens
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_even_a_prompt_that_is_too_long_is_counted(client: Anthropic) -> None:
    counted = client.messages.count_tokens(model="hearth-tiny", messages=[user("fox " * 40_000)])
    assert counted.input_tokens > 40_000


def test_the_beta_client_is_served_alike(client: Anthropic) -> None:
    answer = client.beta.messages.create(
        model="hearth-tiny",
        max_tokens=120,
        messages=[user("Hello!")],
        betas=["context-management-2025-06-27", "some-beta-of-tomorrow-2099-01-01"],
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    )
    assert answer.content[0].type == "text"
    assert answer.content[0].text == create(client).content[0].text  # pyright: ignore[reportAttributeAccessIssue]
    counted = client.beta.messages.count_tokens(model="hearth-tiny", messages=[user("Hello!")])
    assert (
        counted.input_tokens
        == client.messages.count_tokens(model="hearth-tiny", messages=[user("Hello!")]).input_tokens
    )


# Models


def test_models_are_listed_and_found(client: Anthropic) -> None:
    listed = list(client.models.list(limit=1))
    (model,) = [one for one in listed if one.id == "hearth-tiny"]
    assert (model.type, model.display_name, model.lifecycle) == ("model", "hearth-tiny", "active")
    assert client.models.retrieve("hearth-tiny") == model
    assert model.max_input_tokens == 32768


# Errors


def test_an_unknown_model_is_not_found(client: Anthropic) -> None:
    for call in (
        lambda: create(client, model="hearth-tinny"),
        lambda: client.models.retrieve("hearth-tinny"),
    ):
        with pytest.raises(anthropic.NotFoundError) as caught:
            call()
        assert caught.value.type == "not_found_error"
        assert caught.value.error_code == "model_not_found"
        assert "Did you mean hearth-tiny" in str(caught.value.api_message)


@pytest.mark.parametrize(
    "changes",
    [
        {"messages": []},
        {"messages": [{"role": "wizard", "content": "x"}]},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"tool_choice": {"type": "any"}},
        {"stop_sequences": [""]},
    ],
)
def test_what_cannot_be_served_is_a_bad_request(client: Anthropic, changes: Any) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        create(client, **changes)
    assert caught.value.type == "invalid_request_error"
    assert caught.value.request_id is not None


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_is_told_as_clients_compact_on(
    client: Anthropic, stream: bool
) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        create(client, messages=[user("fox " * 20_000)], stream=stream)
    message = str(caught.value.api_message)
    counted = client.messages.count_tokens(model="hearth-tiny", messages=[user("fox " * 20_000)])
    assert message == f"prompt is too long: {counted.input_tokens} tokens > 32767 maximum"
    assert caught.value.error_code == "context_length_exceeded"


HISTORY: Any = [
    user("The fox is in the box; let it out and say how that was done. " * 12),
    {"role": "assistant", "content": "Noted."},
    user("Go on with what is next."),
]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_conversation_is_compacted_into_one_block_and_gone_on_with(
    client: Anthropic, is_streamed: bool
) -> None:
    asked: Any = {
        "model": "hearth-tiny",
        "max_tokens": 64,
        "system": f"{is_streamed} " + "Rule: be kind to every boat. " * 40,
        "tools": [WEATHER],
    }
    client.beta.messages.create(messages=HISTORY, **asked)
    summarise: Any = {"messages": HISTORY, "compaction": {"type": "summarize"}}
    if is_streamed:
        with client.beta.messages.stream(**summarise, **asked) as stream:
            made = stream.get_final_message()
    else:
        made = client.beta.messages.create(**summarise, **asked)
    assert made.stop_reason == "compaction"
    (block,) = made.content
    assert block.type == "compaction"
    assert block.content
    usage = made.usage
    assert usage.cache_read_input_tokens is not None
    assert usage.cache_read_input_tokens > 0.6 * (
        usage.cache_read_input_tokens + usage.input_tokens
    )
    # The block comes first, in place of what it stands for.
    block_back = {"role": "assistant", "content": [block.to_dict()]}
    after: Any = [block_back, user("And now?")]
    read: Any = [user(INTRODUCTION + block.content), user("And now?")]
    counted = client.messages.count_tokens
    known = {name: asked[name] for name in ("model", "system", "tools")}
    assert counted(messages=after, **known) == counted(messages=read, **known)
    whole = client.beta.messages.create(messages=[*HISTORY, *after], **asked).to_dict()
    hearth: Any = whole["hearth"]
    assert hearth["notes"] == ["compacted_messages:3"]


def test_an_unknown_compaction_is_refused_and_an_empty_one_of_the_past_told(
    client: Anthropic,
) -> None:
    body: Any = {"model": "hearth-tiny", "max_tokens": 4}
    with pytest.raises(anthropic.BadRequestError) as kind:
        client.beta.messages.create(
            messages=[user("hi")], compaction=cast("Any", {"type": "other"}), **body
        )
    assert "compaction.type" in kind.value.message
    empty: Any = {"role": "assistant", "content": [{"type": "compaction", "content": ""}]}
    made: Any = client.beta.messages.create(messages=[empty, user("hi")], **body).to_dict()
    assert any("messages[0].content[0]" in one for one in made["hearth"]["ignored"])


def test_a_compaction_that_failed_stands_for_nothing_and_is_told(client: Anthropic) -> None:
    failed: Any = {"role": "assistant", "content": [{"type": "compaction", "content": None}]}
    made = client.beta.messages.create(
        model="hearth-tiny", max_tokens=4, messages=[user("hi"), failed, user("so?")]
    ).to_dict()
    hearth: Any = made["hearth"]
    assert hearth["ignored"] == ["messages[1].content[0] (a compaction without content)"]
