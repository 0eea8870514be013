"""Tools, functions and formats that are asked of a model through OpenAI's own client."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from tests.calm_model import END, saying
from tests.tiny_models import TOOL_CALL

WAIT: Any = {
    "type": "function",
    "name": "wait",
    "description": "Wait for one",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"id": {"type": "integer", "enum": [7]}},
        "required": ["id"],
        "additionalProperties": False,
    },
}
SPACE: Any = {"type": "namespace", "name": "agents", "description": "Others", "tools": [WAIT]}
LOOK: Any = {"name": "look", "parameters": {"type": "object"}}
WAVE: Any = {"name": "wave", "parameters": {"type": "object", "properties": {}}}
QUESTION: Any = [{"role": "user", "content": "What do you see?"}]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_tool_of_a_kind_that_is_not_served_is_named_in_the_answer(
    calm_client: OpenAI, is_streamed: bool
) -> None:
    tools: Any = [{"type": "function", "function": LOOK}, {"type": "web_search"}]
    body: Any = {"messages": QUESTION, "tools": tools, "max_tokens": 2, "stream": is_streamed}
    answer: Any = calm_client.chat.completions.create(model="calm", **body)
    last = list(answer)[-1] if is_streamed else answer
    assert last.hearth["ignored"] == ["tools[1]: web_search"]


class Sum(BaseModel):
    total: Literal[42]


def test_a_format_is_held_and_parsed(calm_client: OpenAI) -> None:
    answer = calm_client.responses.parse(model="calm", input="6 x 7?", text_format=Sum)
    assert answer.output_parsed == Sum(total=42)
    echoed = answer.to_dict()["text"]
    assert isinstance(echoed, dict)
    assert (echoed["format"]["name"], echoed["format"]["strict"]) == ("Sum", True)


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "name": "wait", "namespace": "agents"}]
)
def test_a_call_in_a_namespace_comes_back_with_it_and_is_answered(
    calm_client: OpenAI, choice: Any
) -> None:
    request: Any = {"model": "calm", "tools": [SPACE], "store": False}
    asked: Any = {"role": "user", "content": "Wait."}
    made = calm_client.responses.create(input=[asked], tool_choice=choice, **request)
    (call,) = made.output
    assert call.type == "function_call"
    assert (call.name, call.namespace, call.arguments) == ("wait", "agents", '{"id": 7}')
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    items: Any = [asked, call.to_dict(), result]
    after = calm_client.responses.create(input=items, max_output_tokens=4, **request)
    assert after.usage is not None
    # The call is rendered as it was written, so that all of it is still known.
    assert made.usage is not None
    before = made.usage.input_tokens + made.usage.output_tokens
    assert after.usage.input_tokens_details.cached_tokens >= before - 2


def test_a_custom_tool_is_called_with_a_text_of_its_form(calm_client: OpenAI) -> None:
    form = {"type": "grammar", "syntax": "regex", "definition": "ab[0-9]"}
    tool: Any = {"type": "custom", "name": "note", "description": "Note it", "format": form}
    request: Any = {"model": "calm", "input": "Note.", "tools": [tool], "tool_choice": "required"}
    (call,) = calm_client.responses.create(**request).output
    assert call.type == "custom_tool_call"
    assert call.name == "note"
    assert len(call.input) == 3
    assert call.input[:2] == "ab"
    events = list(calm_client.responses.create(stream=True, **request))
    (done,) = [e for e in events if e.type == "response.custom_tool_call_input.done"]
    deltas = [e.delta for e in events if e.type == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == done.input == call.input


REGEX: Any = {"syntax": "regex", "definition": "ab[0-9]"}
NOTE: Any = {
    "type": "custom",
    "custom": {"name": "note", "format": {"type": "grammar", "grammar": REGEX}},
}


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "custom", "custom": {"name": "note"}},
        {
            "type": "allowed_tools",
            "allowed_tools": {
                "mode": "required",
                "tools": [{"type": "custom", "custom": {"name": "note"}}],
            },
        },
    ],
)
def test_a_custom_tool_is_called_with_a_text_in_chat_too(calm_client: OpenAI, choice: Any) -> None:
    request: Any = {"model": "calm", "tools": [NOTE], "tool_choice": choice, "max_tokens": 40}
    request |= {"parallel_tool_calls": False}
    answer = calm_client.chat.completions.create(messages=QUESTION, **request)
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    (call,) = message.tool_calls or []
    assert call.type == "custom"
    assert (call.custom.name, call.custom.input[:2], len(call.custom.input)) == ("note", "ab", 3)
    stream = calm_client.chat.completions.create(messages=QUESTION, stream=True, **request)
    pieces: list[Any] = [
        piece.to_dict() for chunk in stream for piece in chunk.choices[0].delta.tool_calls or []
    ]
    assert [piece.get("type") for piece in pieces] == ["custom", None]
    assert pieces[0]["custom"] == {"name": "note", "input": ""}
    assert pieces[1]["custom"] == {"input": call.custom.input}
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "noted"}
    history: Any = [*QUESTION, message.to_dict(), result]
    after = calm_client.chat.completions.create(
        messages=history, model="calm", tools=[NOTE], max_tokens=4
    )
    assert after.usage is not None
    assert after.usage.prompt_tokens_details is not None
    assert answer.usage is not None
    # The call is rendered as it was written, so that all of it is still known.
    cached = after.usage.prompt_tokens_details.cached_tokens
    assert cached is not None
    assert cached >= answer.usage.total_tokens - 2


# Beginnings


def test_a_last_message_of_the_assistants_is_gone_on_with(calm_client: OpenAI, calm: Path) -> None:
    told: Any = saying(calm, f" rain falls{END}")
    biases, rest = told.pop("logit_bias"), told
    request: Any = {"model": "calm", "logit_bias": biases, **rest}
    begun: Any = [*QUESTION, {"role": "assistant", "content": "while"}]
    choice = calm_client.chat.completions.create(messages=begun, **request).choices[0]
    assert (choice.message.content, choice.finish_reason) == (" rain falls", "stop")
    stream = calm_client.chat.completions.create(messages=begun, stream=True, **request)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == " rain falls"


@pytest.mark.parametrize(
    "wish", [{"continue_final_message": False}, {"add_generation_prompt": True}]
)
def test_it_is_answered_for_whoever_wants_that(calm_client: OpenAI, wish: Any) -> None:
    begun: Any = [*QUESTION, {"role": "assistant", "content": "while"}]
    request: Any = {"model": "calm", "messages": begun, "max_tokens": 1}
    usages = [
        calm_client.chat.completions.create(**request, extra_body=extra).usage
        for extra in ({}, wish)
    ]
    begun_usage, answered_usage = usages
    assert begun_usage is not None
    assert answered_usage is not None
    assert answered_usage.prompt_tokens > begun_usage.prompt_tokens


def test_a_format_is_gone_on_with_from_where_the_client_began(calm_client: OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"]}
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    request: Any = {"model": "calm", "response_format": form, "max_tokens": 20}

    def asked(begun: str) -> Any:
        messages: Any = [*QUESTION, {"role": "assistant", "content": begun}]
        return calm_client.chat.completions.create(messages=messages, **request)

    assert asked('{"a"').choices[0].message.content == ": 7}"
    with pytest.raises(openai.BadRequestError) as caught:
        asked("Sure: ")
    assert caught.value.param == "response_format"


@pytest.mark.parametrize("end", [{"stop": ["falls"]}, {"max_tokens": 4}])
def test_the_turn_after_an_answer_that_was_cut_goes_on_from_its_tokens(
    calm_client: OpenAI, calm: Path, end: Any
) -> None:
    told: Any = saying(calm, f"while rain falls on the hearth{END}")
    biases, rest = told.pop("logit_bias"), told
    request: Any = {"model": "calm", "messages": QUESTION, "logit_bias": biases, **rest}
    cut = calm_client.chat.completions.create(**request, **end)
    text = cut.choices[0].message.content
    assert text
    assert "hearth" not in text
    later: Any = [{"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]
    after = calm_client.chat.completions.create(
        model="calm", messages=[*QUESTION, *later], max_tokens=2
    )
    told_of: Any = after.to_dict()["hearth"]
    assert told_of["prompt"] == [{"rule": "healed_turn", "num_places": 1}]


# Tools that may not be called


@pytest.mark.parametrize(
    "choice",
    [
        "none",
        {
            "type": "allowed_tools",
            "allowed_tools": {
                "mode": "auto",
                "tools": [{"type": "function", "function": {"name": "wait"}}],
            },
        },
    ],
)
def test_tools_that_may_not_be_called_stay_in_the_prompt(
    calm_client: OpenAI, calm: Path, choice: Any
) -> None:
    told: Any = saying(calm, f"let me see<tool_call>{TOOL_CALL}</tool_call>{END}")
    biases, rest = told.pop("logit_bias"), told
    tools: Any = [{"type": "function", "function": one} for one in (LOOK, LOOK | {"name": "wait"})]
    request: Any = {"model": "calm", "messages": QUESTION, "tools": tools, "max_tokens": 40}
    free, held = (
        calm_client.chat.completions.create(**request, logit_bias=biases, tool_choice=one, **rest)
        for one in ("auto", choice)
    )
    assert free.choices[0].message.tool_calls
    calls = held.choices[0].message.tool_calls or []
    assert all(call.type == "function" and call.function.name != "look" for call in calls)
    assert held.usage is not None
    assert free.usage is not None
    assert held.usage.prompt_tokens == free.usage.prompt_tokens


# The older form of tools


def test_a_function_is_called_in_the_older_form(calm_client: OpenAI, calm: Path) -> None:
    told: Any = saying(calm, f"let me see<tool_call>{TOOL_CALL}</tool_call>{END}")
    biases, rest = told.pop("logit_bias"), told
    request: Any = {"model": "calm", "messages": QUESTION, "logit_bias": biases, **rest}
    choice = calm_client.chat.completions.create(functions=[LOOK], **request).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("function_call", "let me see")
    assert choice.message.tool_calls is None
    called = choice.message.function_call
    assert called is not None
    assert (called.name, called.arguments) == ("look", '{"at":7}')
    stream = calm_client.chat.completions.create(functions=[LOOK], stream=True, **request)
    deltas = [chunk.choices[0] for chunk in stream]
    pieces = [one.delta.function_call for one in deltas if one.delta.function_call]
    assert [piece.name for piece in pieces if piece.name] == ["look"]
    assert "".join(piece.arguments or "" for piece in pieces) == '{"at":7}'
    assert deltas[-1].finish_reason == "function_call"


def test_the_answer_of_a_function_goes_back_in_the_older_form(calm_client: OpenAI) -> None:
    messages: Any = [
        *QUESTION,
        {
            "role": "assistant",
            "content": None,
            "function_call": {"name": "look", "arguments": "{}"},
        },
        {"role": "function", "name": "look", "content": "Rain"},
    ]
    with_tools: Any = {"functions": [LOOK], "function_call": "auto", "max_tokens": 2}
    assert calm_client.chat.completions.create(model="calm", messages=messages, **with_tools)


@pytest.mark.parametrize(
    ("tools", "choice"),
    [
        ({"functions": [WAVE]}, {"function_call": {"name": "wave"}}),
        (
            {"tools": [{"type": "function", "function": WAVE}]},
            {"tool_choice": {"type": "function", "function": {"name": "wave"}}},
        ),
        ({"tools": [{"type": "function", "function": WAVE}]}, {"tool_choice": "required"}),
    ],
)
def test_a_named_function_is_called(calm_client: OpenAI, tools: Any, choice: Any) -> None:
    answer = calm_client.chat.completions.create(
        model="calm", messages=QUESTION, max_tokens=60, **tools, **choice
    )
    message = answer.choices[0].message
    called = message.function_call or message.tool_calls
    assert called


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"functions": [LOOK], "function_call": {"name": "f"}}, "function_call"),
        ({"functions": [LOOK | {"parameters": [1]}]}, "functions[0].parameters"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "tool_choice"),
        ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
        (
            {"tools": [{"type": "custom", "custom": {"name": "f", "format": {"type": "grammar"}}}]},
            "tools[0].custom.format.grammar.syntax",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]},
            "messages[0].tool_calls[0].function",
        ),
    ],
)
def test_a_choice_that_cannot_be_made_is_refused(
    calm_client: OpenAI, changes: Any, param: str
) -> None:
    request: Any = {"messages": QUESTION} | changes
    with pytest.raises(openai.BadRequestError) as caught:
        calm_client.chat.completions.create(model="calm", **request)
    assert caught.value.param == param
