"""Chat requests as the runtime gets them: every way to control thinking, tools, pictures, names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from api.http.caller import Caller, caller_of
from api.openai.content import ContentPart, ImageUrl, read
from api.openai.convert import chat_to_generate, completion_to_generate
from api.openai.schemas import ChatRequest, CompletionRequest
from runtime.config.settings import ModelSettings, Settings
from runtime.errors import InvalidRequest
from runtime.supervisor.supervision_rules import with_settings
from runtime.types import (
    ChatPrompt,
    Constraint,
    GenerateRequest,
    Image,
    Message,
    ModelSpec,
    Priority,
    SamplingParams,
    Thinking,
    Tool,
    ToolCall,
    ToolChoice,
)

SPEC = ModelSpec(id="m", path="/m", context=4096, model_type="qwen3", nbytes=1, created_s=1)
USER = {"role": "user", "content": "hi"}
LOOK: dict[str, Any] = {"name": "look", "parameters": {"type": "object"}}
TOOL: dict[str, Any] = {"type": "function", "function": LOOK}
SHOWN = Tool(name="look", parameters='{"type": "object"}')
ON, OFF = Thinking.switched(True), Thinking.switched(False)


def generate(caller: Caller | None = None, **body: Any) -> GenerateRequest:
    data = msgspec.json.decode(json.dumps({"messages": [USER]} | body), type=ChatRequest)
    settings = Settings(home=Path("/nowhere"))
    return chat_to_generate(data, "chatcmpl-1", SPEC, settings, caller or Caller())


def prompt(**body: Any) -> ChatPrompt:
    found = generate(**body).prompt
    assert isinstance(found, ChatPrompt)
    return found


@pytest.mark.parametrize(
    ("asked", "used"),
    [(-(2**63), "interactive"), (-1, "interactive"), (0, "default"), (1, "background")],
)
def test_a_lower_number_is_an_earlier_class(asked: int, used: str) -> None:
    assert generate(priority=asked).priority == used
    body = {"prompt": "Hi", "priority": asked}
    data = msgspec.json.decode(json.dumps(body), type=CompletionRequest)
    settings = Settings(home=Path("/nowhere"))
    (one,) = completion_to_generate(data, "cmpl-1", SPEC, settings)
    assert one.priority == used


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"prompt": "a", "echo": True}, "cannot be combined with echo"),
        ({"prompt": [1, 2]}, "needs the prompt as text"),
    ],
)
def test_a_suffix_belongs_to_a_prompt_of_text(body: dict[str, Any], why: str) -> None:
    data = msgspec.json.decode(json.dumps(body | {"suffix": "z"}), type=CompletionRequest)
    with pytest.raises(InvalidRequest, match=why) as refused:
        completion_to_generate(data, "cmpl-1", SPEC, Settings(home=Path("/nowhere")))
    assert refused.value.param == "suffix"


@pytest.mark.parametrize("asked", [True, 0.5, "urgent", 2**63])
def test_a_priority_that_is_no_class_and_no_whole_number_is_refused(asked: Any) -> None:
    with pytest.raises(msgspec.ValidationError, match="priority"):
        generate(priority=asked)


def test_a_request_has_its_class_and_says_how_long_its_model_stays() -> None:
    request = generate(priority="background", keep_alive="5m")
    assert (request.priority, request.keep_alive_s) == ("background", 300.0)
    assert (generate().priority, generate().keep_alive_s) == (None, None)
    with pytest.raises(InvalidRequest) as caught:
        generate(keep_alive="soon")
    assert caught.value.param == "keep_alive"


def test_a_request_says_how_many_tokens_its_repetition_penalty_looks_at() -> None:
    fields: dict[str, Any] = {"repetition_penalty": 1.5, "repetition_context_size": 20}
    assert generate(**fields).sampling == SamplingParams(**fields)
    with pytest.raises(msgspec.ValidationError, match="repetition_context_size"):
        generate(repetition_context_size=-1)


@pytest.mark.parametrize(
    ("asked", "own", "used"),
    [
        (None, None, "default"),
        (None, "background", "background"),
        ("default", "background", "default"),
        ("interactive", "background", "interactive"),
    ],
)
def test_a_model_has_a_class_for_requests_that_name_none(
    asked: Priority | None, own: Priority | None, used: Priority
) -> None:
    settings = Settings(home=Path("/nowhere"), models={"m": ModelSettings(priority=own)})
    assert with_settings(generate(priority=asked), SPEC, settings).priority == used


@pytest.mark.parametrize(
    ("asked", "own", "of_all", "used"),
    [(7, 5, 3, 7), (None, 5, 3, 5), (None, 0, 3, 0), (None, None, 3, 3), (None, None, None, None)],
)
def test_a_model_has_a_time_on_disk_for_requests_that_name_none(
    asked: float | None, own: float | None, of_all: float | None, used: float | None
) -> None:
    settings = Settings(
        home=Path("/nowhere"), models={"m": ModelSettings(kv_ttl_s=own)}, kv_ttl_s=of_all
    )
    assert with_settings(generate(ttl=asked), SPEC, settings).cache.ttl_s == used


@pytest.mark.parametrize(
    ("body", "own", "used"),
    [
        ({}, True, ON),
        ({}, False, OFF),
        ({}, None, Thinking()),
        ({"enable_thinking": False}, True, OFF),
        ({"chat_template_kwargs": {"enable_thinking": True}}, False, ON),
        ({"reasoning_effort": "low"}, False, Thinking(is_enabled=True, effort="low")),
    ],
)
def test_a_model_thinks_as_its_settings_say_when_a_request_does_not(
    body: dict[str, Any], own: bool | None, used: Thinking
) -> None:
    settings = Settings(home=Path("/nowhere"), models={"*": ModelSettings(thinking=own)})
    prompt = with_settings(generate(**body), SPEC, settings).prompt
    assert isinstance(prompt, ChatPrompt)
    assert replace(prompt.thinking, fields=()) == used


@pytest.mark.parametrize("name", ["tools", "messages", "chat_template", "documents", "tokenize"])
def test_what_is_ours_cannot_be_set_through_the_template_arguments(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        generate(chat_template_kwargs={name: "x"})
    assert caught.value.param == f"chat_template_kwargs.{name}"


@pytest.mark.parametrize(
    ("asked", "own", "used"), [(None, None, None), (None, 7, 7), (3, 7, 3), (3, None, 3)]
)
def test_a_model_has_a_longest_answer_for_requests_that_name_none(
    asked: int | None, own: int | None, used: int | None
) -> None:
    settings = Settings(home=Path("/nowhere"), models={"*": ModelSettings(max_tokens=own)})
    assert with_settings(generate(max_tokens=asked), SPEC, settings).max_tokens == used


@pytest.mark.parametrize(
    ("body", "own", "used"),
    [
        ({}, {"preserve_thinking": True}, {"preserve_thinking": True}),
        (
            {"chat_template_kwargs": {"preserve_thinking": False, "b": 1}},
            {"preserve_thinking": True, "a": [1]},
            {"preserve_thinking": False, "a": [1], "b": 1},
        ),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "high", "a": 1}, {"a": 1}),
        ({}, {"reasoning_effort": "high"}, {"reasoning_effort": "high"}),
    ],
)
def test_a_models_template_has_its_arguments_unless_a_request_gives_them(
    body: dict[str, Any], own: dict[str, object], used: dict[str, object]
) -> None:
    settings = Settings(home=Path("/nowhere"), models={"m": ModelSettings(template=own)})
    prompt = with_settings(generate(**body), SPEC, settings).prompt
    assert isinstance(prompt, ChatPrompt)
    assert msgspec.json.decode(prompt.template_kwargs) == used


@pytest.mark.parametrize(
    ("body", "thinking"),
    [
        ({}, Thinking()),
        ({"enable_thinking": True}, ON),
        ({"enable_thinking": False}, OFF),
        ({"thinking": True}, ON),
        ({"thinking": "off"}, OFF),
        ({"thinking": "adaptive"}, Thinking()),
        ({"thinking": "high"}, Thinking(is_enabled=True, effort="high")),
        ({"thinking": {"type": "disabled"}}, OFF),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 9}},
            replace(ON, budget_tokens=9),
        ),
        ({"thinking": {"type": "disabled", "budget_tokens": 0}}, OFF),
        ({"reasoning": {"max_tokens": 0}}, OFF),
        ({"thinking_budget": 0}, OFF),
        ({"thinking_budget": 9}, Thinking(is_enabled=True, budget_tokens=9)),
        ({"reasoning_effort": "none"}, OFF),
        ({"reasoning_effort": "low"}, Thinking(is_enabled=True, effort="low")),
        ({"reasoning": {"enabled": False}}, OFF),
        ({"reasoning": {"type": "disabled"}}, OFF),
        ({"reasoning": {"type": "enabled"}}, ON),
        ({"reasoning": {"type": "adaptive"}}, Thinking()),
        ({"reasoning": {"level": "high"}}, Thinking(is_enabled=True, effort="high")),
        ({"reasoning": {"level": "off"}}, OFF),
        ({"reasoning": {"type": "on", "level": "low"}}, replace(ON, effort="low")),
        (
            {"reasoning": {"effort": "low", "level": "high"}},
            Thinking(is_enabled=True, effort="low"),
        ),
        ({"extra_body": {"reasoning": {"type": "off"}}}, OFF),
        ({"reasoning": {"effort": "low"}}, Thinking(is_enabled=True, effort="low")),
        ({"reasoning": {"max_tokens": 9}}, Thinking(is_enabled=True, budget_tokens=9)),
        ({"chat_template_kwargs": {"enable_thinking": False}}, OFF),
        ({"chat_template_kwargs": {"thinking": True}}, ON),
        (
            {"chat_template_kwargs": {"thinking_budget": 9}},
            Thinking(is_enabled=True, budget_tokens=9),
        ),
        ({"extra_body": {"enable_thinking": True}}, ON),
        ({"extra_body": {"reasoning": {"effort": "low"}}}, Thinking(is_enabled=True, effort="low")),
        ({"metadata": {"enable_thinking": "true"}}, ON),
        ({"metadata": {"thinking": {"of": "anything"}, "reasoning": 7}}, Thinking()),
    ],
)
def test_every_way_to_control_thinking_is_one(body: dict[str, Any], thinking: Thinking) -> None:
    assert replace(prompt(**body).thinking, fields=()) == thinking


def test_the_plainest_switch_counts_first() -> None:
    everything: dict[str, Any] = {
        "enable_thinking": False,
        "chat_template_kwargs": {"enable_thinking": True, "custom": 1},
        "reasoning_effort": "high",
        "metadata": {"thinking_budget": 9},
    }
    found = prompt(**everything)
    assert replace(found.thinking, fields=()) == Thinking(
        is_enabled=False, effort="high", budget_tokens=9
    )
    assert found.template_kwargs == '{"custom":1}'
    del everything["enable_thinking"]
    everything["chat_template_kwargs"] = {"enable_thinking": False}
    assert prompt(**everything).thinking.is_enabled is False


@pytest.mark.parametrize(
    ("body", "tools", "choice"),
    [
        ({"tools": [TOOL]}, (SHOWN,), ToolChoice()),
        ({"tools": [TOOL], "tool_choice": "none"}, (SHOWN,), ToolChoice(mode="none")),
        ({"tools": [TOOL], "tool_choice": "required"}, (SHOWN,), ToolChoice(mode="required")),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "look"}}},
            (SHOWN,),
            ToolChoice(mode="required", name="look"),
        ),
        (
            {"tools": [TOOL], "parallel_tool_calls": False},
            (SHOWN,),
            ToolChoice(is_parallel=False),
        ),
        (
            {
                "tools": [TOOL, {"type": "function", "function": LOOK | {"name": "b"}}],
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "required", "tools": [TOOL]},
                },
            },
            (SHOWN, msgspec.structs.replace(SHOWN, name="b")),
            ToolChoice(mode="required", allowed=("look",)),
        ),
        ({"functions": [LOOK]}, (SHOWN,), ToolChoice(is_parallel=False)),
        (
            {"functions": [LOOK], "function_call": {"name": "look"}},
            (SHOWN,),
            ToolChoice(mode="required", name="look", is_parallel=False),
        ),
        (
            {"functions": [LOOK], "function_call": "none"},
            (SHOWN,),
            ToolChoice(mode="none", is_parallel=False),
        ),
    ],
)
def test_tools_and_their_choice(
    body: dict[str, Any], tools: tuple[Tool, ...], choice: ToolChoice
) -> None:
    found = prompt(**body)
    assert (found.tools, found.tool_choice) == (tools, choice)


def test_strict_tools_and_formats_are_held_to_their_schemas() -> None:
    strict = {"type": "function", "function": LOOK | {"strict": True}}
    assert prompt(tools=[strict]).tools[0].is_strict
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array"}}}
    assert generate(response_format=form).constraint == Constraint(
        kind="json_schema", text='{"type": "array"}', field="response_format"
    )
    assert generate(response_format={"type": "text"}).constraint is None


@pytest.mark.parametrize(
    ("kind", "is_served"),
    [
        ("object", True),
        (["object", "null"], True),
        (None, True),
        ([], True),
        ("dict", True),
        ("array", False),
        ("string", False),
        (["null", "integer"], False),
    ],
)
def test_arguments_are_an_object_and_a_schema_that_has_none_is_refused(kind: Any, is_served: bool):
    tool = {"type": "function", "function": LOOK | {"parameters": {"type": kind}}}
    if is_served:
        assert json.loads(prompt(tools=[tool]).tools[0].parameters) == {"type": kind}
        return
    with pytest.raises(InvalidRequest) as refused:
        prompt(tools=[tool])
    assert refused.value.param == "tools[0].function.parameters.type"


def test_messages_in_the_older_form_know_which_call_they_answer() -> None:
    called = {"name": "look", "arguments": '{"at": 1}'}
    found = prompt(
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "assistant", "content": None, "function_call": called},
            {"role": "function", "name": "look", "content": [{"type": "text", "text": "rain"}]},
        ]
    )
    call = ToolCall(id="call_look", name="look", arguments='{"at": 1}')
    assert found.messages == (
        Message(role="system", text="Be brief."),
        Message(role="assistant", tool_calls=(call,)),
        Message(role="tool", text="rain", tool_call_id="call_look", name="look"),
    )


def test_a_call_whose_arguments_and_id_are_null_has_none() -> None:
    call = {"id": None, "type": None, "function": {"name": "look", "arguments": None}}
    found = prompt(messages=[USER, {"role": "assistant", "tool_calls": [call]}]).messages[1]
    assert found.tool_calls == (ToolCall(id="call_messages[1]_0", name="look", arguments="{}"),)
    older = {"name": "look", "arguments": None}
    found = prompt(messages=[USER, {"role": "assistant", "function_call": older}]).messages[1]
    assert found.tool_calls == (ToolCall(id="call_look", name="look", arguments="{}"),)


def test_a_schema_that_is_none_is_refused_where_it_stands() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": 7}}
    with pytest.raises(InvalidRequest) as caught:
        generate(response_format=form)
    assert caught.value.param == "response_format.json_schema.schema"


def test_conversations_are_named_by_body_then_headers_then_what_is_shared() -> None:
    pi = caller_of({"session_id": "header", "user-agent": "pi/0.87"})
    assert generate(pi, conversation_id="body", user="me").cache.session_id == "body"
    assert generate(pi, prompt_cache_key="key").cache.session_id == "header"
    assert generate(prompt_cache_key="key", user="me").cache.session_id == "key"
    assert generate(user="me").cache.session_id == "me"
    assert generate(pi).client == "pi"


def test_a_conversations_name_is_read_in_objects_for_anything_too() -> None:
    pi = caller_of({"session_id": "header", "user-agent": "pi/0.87"})
    places = {"metadata": {"session_id": "m"}, "extra_body": {"chat_id": "e"}}
    assert generate(pi, **places).cache.session_id == "e"
    assert generate(pi, metadata={"thread_id": "m"}).cache.session_id == "m"
    assert generate(pi, session_id="own", **places).cache.session_id == "own"
    for odd in ({"session_id": 7}, {"session_id": None}, {"session_id": ""}, {"other": "x"}):
        assert generate(pi, metadata=odd).cache.session_id == "header"


def test_pictures_stand_where_the_text_before_them_ends() -> None:
    parts = [
        ContentPart(text="a"),
        ContentPart(type="image_url", image_url=ImageUrl("data:image/png;base64,AAAA")),
        ContentPart(text="b"),
        ContentPart(type="input_image", image_url="https://example.org/x.png"),
    ]
    found = read(parts, "p")
    assert found.text == "a\nb"
    assert found.images == (
        Image(at=1, field="p[1]", data=b"\0\0\0"),
        Image(at=3, field="p[3]", url="https://example.org/x.png"),
    )


@pytest.mark.parametrize("is_inside", [True, False])
def test_low_detail_shrinks_a_picture_wherever_it_is_said(is_inside: bool) -> None:
    url = "data:image/png;base64,AAAA"
    inside = ContentPart(type="image_url", image_url=ImageUrl(url, "low"))
    beside = ContentPart(type="input_image", image_url=url, detail="low")
    (image,) = read([inside if is_inside else beside], "p").images
    assert image.max_side == 512


@pytest.mark.parametrize(
    "url", ["", "file:///etc/passwd", "data:image/png,AAAA", "data:image/png;base64,?"]
)
def test_a_picture_that_cannot_be_had_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read([ContentPart(type="image_url", image_url=url)], "messages[0].content")
    assert caught.value.param == "messages[0].content[0]"


def test_the_fields_that_speak_of_thinking_are_known_by_name():
    body = {"reasoning": {"effort": "high"}, "metadata": {"thinking_budget": 9}}
    assert prompt(**body).thinking.fields == ("reasoning", "metadata.thinking_budget")
    assert prompt(thinking="auto", reasoning={"summary": "auto"}).thinking.fields == ()
