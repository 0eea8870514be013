"""What becomes of the fields of a Messages request: tools, choices, thinking, limits, names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from api.anthropic.convert import ConversionContext, count_to_generate
from api.anthropic.schemas import CountRequest
from api.http.caller import Caller
from runtime.config.settings import ModelSettings, Settings
from runtime.types import (
    CacheParams,
    ChatPrompt,
    Constraint,
    SamplingParams,
    Thinking,
    Tool,
    ToolChoice,
)
from tests.anthropic_requests import (
    HOUR,
    LOOK,
    SPEC,
    asked,
    prompt_of,
    refused,
)

# Tools, choices, thinking, form


def test_tools_are_functions_with_their_schema_as_it_was_written() -> None:
    schema = b'{"type": "object",  "properties": {"b": {}, "a": {}}}'
    body = b'{"messages":[{"role":"user","content":"x"}],"tools":[{"name":"look","input_schema":'
    data = msgspec.json.decode(body + schema + b"}]}", type=CountRequest)
    prompt = count_to_generate(
        data, "c", ConversionContext(SPEC, Settings(home=Path("/n")))
    ).request.prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.tools == (Tool(name="look", parameters=schema.decode()),)


def test_a_tool_says_whether_it_is_strict_deferred_or_the_end_of_what_is_cached() -> None:
    tool = LOOK | {"type": "custom", "description": "Look", "eager_input_streaming": True}
    tool |= {"strict": True, "defer_loading": True, "cache_control": HOUR}
    tool |= {"input_examples": [{"at": 1}]}
    assert prompt_of(tools=[tool]).tools == (
        Tool(
            name="look",
            description='Look\nExamples of its input:\n{"at": 1}',
            parameters='{"type": "object"}',
            is_strict=True,
            is_deferred=True,
            keep_s=3600.0,
        ),
    )


def test_a_tool_that_anthropic_runs_is_refused_by_name() -> None:
    tool = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    param, message = refused(tools=[LOOK, tool])
    assert param == "tools[1]"
    assert "web_search" in message
    assert "web_search_20250305" in message


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, ToolChoice()),
        ({"type": "auto"}, ToolChoice()),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice(is_parallel=False)),
        ({"type": "any"}, ToolChoice(mode="required")),
        ({"type": "tool", "name": "look"}, ToolChoice(mode="required", name="look")),
        ({"type": "none"}, ToolChoice(mode="none")),
    ],
)
def test_tool_choices(given: Any, expected: ToolChoice) -> None:
    prompt = prompt_of(tools=[LOOK], tool_choice=given)
    assert prompt.tool_choice == expected
    assert prompt.tools  # even where none may be called: they are part of the cached prefix


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, Thinking(is_enabled=False)),
        ({"thinking": {"type": "disabled"}}, Thinking(is_enabled=False)),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 2048}},
            Thinking(is_enabled=True, budget_tokens=2048, is_switched_on=True),
        ),
        (
            {"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}},
            Thinking(is_enabled=True, effort="high", is_adaptive=True),
        ),
    ],
)
def test_thinking_is_off_unless_it_is_asked_for(given: Any, expected: Thinking) -> None:
    assert replace(prompt_of(**given).thinking, fields=()) == expected


@pytest.mark.parametrize(
    ("given", "own", "is_enabled"),
    [("null", True, True), ("null", False, False), ('{"type":"disabled"}', True, False)],
)
def test_a_model_of_the_settings_may_think_unasked(given: str, own: bool, is_enabled: bool) -> None:
    settings = Settings(home=Path("/n"), models={"m": ModelSettings(thinking=own)})
    body = f'{{"messages":[{{"role":"user","content":"Hi"}}],"thinking":{given}}}'
    data = msgspec.json.decode(body, type=CountRequest)
    prompt = count_to_generate(data, "c", ConversionContext(SPEC, settings)).request.prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.thinking.is_enabled is is_enabled


def test_thoughts_are_shown_unless_they_are_to_be_left_out() -> None:
    assert asked().shows_thinking
    assert asked(thinking={"type": "adaptive", "display": "summarized"}).shows_thinking
    assert not asked(thinking={"type": "adaptive", "display": "omitted"}).shows_thinking


@pytest.mark.parametrize(
    "fields",
    [
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
        {"output_format": {"type": "json_schema", "schema": {"type": "object"}}},
    ],
)
def test_a_schema_for_the_answer_is_a_constraint(fields: Any) -> None:
    constraint = asked(**fields).request.constraint
    (field,) = (name if name == "output_format" else f"{name}.format" for name in fields)
    assert constraint == Constraint(kind="json_schema", text='{"type": "object"}', field=field)


def test_limits_and_sampling_are_handed_on() -> None:
    request = asked(
        temperature=0.5,
        top_p=0.9,
        top_k=-1,
        stop_sequences=["a", "b"],
        cache_mode="prefix",
        ttl=7,
        keep_alive="1h",
        priority="interactive",
    ).request
    assert (request.keep_alive_s, request.priority) == (3600.0, "interactive")
    assert request.sampling == SamplingParams(temperature=0.5, top_p=0.9, top_k=0)
    assert (request.max_tokens, request.stop, request.work) == (9, ("a", "b"), "generate")
    assert request.cache == CacheParams(mode="prefix", ttl_s=7.0)
    warming = asked(max_tokens=0).request
    assert (warming.work, warming.max_tokens) == ("prefill", None)


def test_a_number_stands_for_a_class() -> None:
    assert [asked(priority=one).request.priority for one in (-3, 0, 3)] == [
        "interactive",
        "default",
        "background",
    ]


def test_context_edits_are_refused_unless_they_keep_everything() -> None:
    keep_all = {"type": "clear_thinking_20251015", "keep": "all"}
    clear = {"type": "clear_tool_uses_20250919"}
    assert asked(context_management={"edits": [keep_all]}).ignored == ()
    param, message = refused(context_management={"edits": [keep_all, clear]})
    assert param == "context_management.edits[1]"
    assert "clear_tool_uses_20250919" in message


# Whose conversation


@pytest.mark.parametrize(
    ("user_id", "expected"),
    [
        ('{"device_id": "d", "account_uuid": "", "session_id": "s-1"}', "s-1"),
        ("user_0a_account__session_5f2c", "5f2c"),
        ("me", "me"),
        ("{", "{"),
    ],
)
def test_the_session_in_the_metadata(user_id: str, expected: str) -> None:
    given = asked(metadata={"user_id": user_id})
    assert given.request.cache.session_id == expected


def test_a_session_in_the_body_comes_before_one_in_the_headers_and_in_the_metadata() -> None:
    caller = Caller("claude-code", "s1/a7")
    fields = {"metadata": {"user_id": "me"}}
    by_header = asked(caller, **fields).request
    assert (by_header.client, by_header.cache.session_id) == ("claude-code", "s1/a7")
    by_body = asked(caller, session_id="mine", **fields).request
    assert by_body.cache.session_id == "mine"


@pytest.mark.parametrize(
    ("given", "ignored"),
    [
        ({}, ("output_config.effort",)),
        ({"thinking": {"type": "disabled"}}, ("output_config.effort",)),
        ({"thinking": {"type": "adaptive"}}, ()),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, ()),
    ],
)
def test_an_effort_without_thinking_is_named(given: Any, ignored: tuple[str, ...]) -> None:
    assert asked(output_config={"effort": "low"}, **given).ignored == ignored


def test_an_effort_counts_for_a_model_that_thinks_by_default() -> None:
    settings = Settings(home=Path("/n"), models={"m": ModelSettings(thinking=True)})
    body = '{"messages":[{"role":"user","content":"Hi"}],"output_config":{"effort":"low"}}'
    data = msgspec.json.decode(body, type=CountRequest)
    asked = count_to_generate(data, "c", ConversionContext(SPEC, settings))
    assert isinstance(asked.request.prompt, ChatPrompt)
    assert (asked.request.prompt.thinking.effort, asked.ignored) == ("low", ())
