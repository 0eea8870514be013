"""Responses requests as the runtime gets them: items to messages, tools to flat names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from api.http.caller import Caller, caller_of
from api.http.expansion import Expansion
from api.openai.response_schemas import ResponseRequest
from api.responses.convert import (
    ResponsePlan,
    check,
    items_of,
    plan_of,
    transcript,
)
from api.responses.items import Item, seal, unseal
from api.responses.tools import ToolNames
from runtime.config.settings import Settings
from runtime.errors import InvalidRequest
from runtime.types import (
    CacheParams,
    ChatPrompt,
    Constraint,
    Message,
    ModelSpec,
    SamplingParams,
    Thinking,
    Tool,
    ToolCall,
    ToolChoice,
)

SPEC = ModelSpec(
    id="m", path="/m", context=4096, model_type="qwen3", nbytes=1, created_s=1, aliases=()
)
LOOK: dict[str, Any] = {"type": "function", "name": "look", "parameters": {"type": "object"}}
WAIT: dict[str, Any] = {"type": "function", "name": "wait", "description": "Wait for one"}
SPACE: dict[str, Any] = {
    "type": "namespace",
    "name": "agents",
    "description": "Others",
    "tools": [WAIT, LOOK],
}


def plan(caller: Caller = Caller(), **body: Any) -> ResponsePlan:  # noqa: B008
    data = msgspec.json.decode(json.dumps({"input": "hi"} | body), type=ResponseRequest)
    check(data)
    settings = Settings(home=Path("/nowhere"))
    return plan_of(data, items_of(data), "resp_1", SPEC, caller, settings)


def prompt(**body: Any) -> ChatPrompt:
    found = plan(**body).request.prompt
    assert isinstance(found, ChatPrompt)
    return found


def messages(*items: dict[str, Any], **body: Any) -> tuple[Message, ...]:
    return prompt(input=list(items), **body).messages


# Items


def test_a_request_says_how_many_tokens_its_repetition_penalty_looks_at() -> None:
    fields: dict[str, Any] = {"repetition_penalty": 1.5, "repetition_context_size": 20}
    assert plan(**fields).request.sampling == SamplingParams(**fields)
    with pytest.raises(msgspec.ValidationError, match="repetition_context_size"):
        plan(repetition_context_size=-1)


def test_a_lower_number_is_an_earlier_class() -> None:
    asked = [plan(input="Hi", priority=number).request.priority for number in (-1, 0, 7)]
    assert asked == ["interactive", "default", "background"]


def test_a_text_is_one_message_of_the_user_after_the_instructions() -> None:
    assert prompt(instructions="Be brief.").messages == (
        Message(role="system", text="Be brief."),
        Message(role="user", text="hi"),
    )


def test_parts_are_joined_and_developers_are_the_system() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert messages(
        {"role": "developer", "content": parts},
        {"type": "message", "role": "user", "content": "c"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    ) == (
        Message(role="system", text="a\nb"),
        Message(role="user", text="c"),
        Message(role="assistant", text="no"),
    )


def test_what_one_turn_of_the_model_gave_is_one_message() -> None:
    assert messages(
        {"role": "user", "content": "q"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": seal("hm")},
        {"type": "message", "id": "msg_1", "role": "assistant", "content": "let me"},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": 1}'},
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": 'a "b"'},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"},
        {
            "type": "function_call_output",
            "call_id": "c1",
            "output": [{"type": "input_text", "text": "rain"}],
        },
        {"role": "assistant", "content": "Rain."},
    ) == (
        Message(role="user", text="q"),
        Message(
            role="assistant",
            text="let me",
            reasoning="hm",
            tool_calls=(
                ToolCall(id="c1", name="look", arguments='{"at": 1}'),
                ToolCall(id="c2", name="patch", arguments='{"input":"a \\"b\\""}'),
            ),
        ),
        Message(role="tool", text="done", tool_call_id="c2"),
        Message(role="tool", text="rain", tool_call_id="c1"),
        Message(role="assistant", text="Rain."),
    )


def test_two_messages_of_the_assistant_stay_two() -> None:
    said = {"role": "assistant", "content": "a"}
    assert messages(said, said | {"content": "b"}) == (
        Message(role="assistant", text="a"),
        Message(role="assistant", text="b"),
    )


def test_pictures_stay_among_the_words_of_a_turn_in_pieces() -> None:
    part = {"type": "input_image", "image_url": "data:image/png;base64,eA=="}
    words = {"type": "output_text", "text": "cd"}
    first = {"role": "assistant", "status": "incomplete", "content": "ab"}
    second = {"role": "assistant", "content": [words, part, words | {"text": "ef"}]}
    items = [Item(msgspec.Raw(json.dumps(one).encode()), "input[0]") for one in (first, second)]
    (said,) = transcript(items, ToolNames({}), Expansion(0)).messages
    assert (said.text[: said.images[0].at], said.text) == ("abcd", "abcd\nef")


@pytest.mark.parametrize("status", ["in_progress", "incomplete"])
def test_a_message_that_is_not_complete_is_one_with_what_goes_on_with_it(status: str) -> None:
    said = {"role": "assistant", "content": "a", "status": status}
    assert messages(said, said | {"content": "b"}) == (Message(role="assistant", text="ab"),)
    asked = {"role": "user", "content": "q"}
    assert [one.text for one in messages(said, asked, said)] == ["a", "q", "a"]


@pytest.mark.parametrize(
    ("changes", "is_gone_on_with"),
    [
        ({}, True),
        ({"status": "incomplete"}, True),
        ({"status": "completed"}, False),
        ({"role": "user"}, False),
    ],
)
def test_a_last_message_that_is_not_complete_is_gone_on_with(
    changes: dict[str, Any], is_gone_on_with: bool
) -> None:
    asked = {"role": "user", "content": "q"}
    said = {"role": "assistant", "content": "a"} | changes
    assert plan(input=[asked, said]).is_begun == is_gone_on_with
    forced = plan(input=[asked, said], continue_final_message=True)
    assert forced.is_begun == (said["role"] == "assistant")
    assert not plan(input=[asked, said], add_generation_prompt=True).is_begun


def test_calls_whose_arguments_are_null_have_none() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": None}
    custom = {"type": "custom_tool_call", "call_id": "d", "name": "g", "input": None}
    made = messages(call, custom)[0].tool_calls
    assert [one.arguments for one in made] == ["{}", '{"input":""}']


def test_new_thoughts_begin_a_new_turn() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]}
    assert [one.reasoning for one in messages(call, thought, call)] == [None, "s"]


@pytest.mark.parametrize(
    ("item", "reasoning"),
    [
        ({"encrypted_content": seal("sealed"), "summary": []}, "sealed"),
        (
            {"encrypted_content": "foreign", "content": [{"type": "reasoning_text", "text": "c"}]},
            "c",
        ),
        ({"content": [{"type": "reasoning_text", "text": "c"}], "summary": []}, "c"),
        ({"content": None, "summary": [{"type": "summary_text", "text": "s"}]}, "s"),
    ],
)
def test_reasoning_is_read_where_it_is_most_exact(item: dict[str, Any], reasoning: str) -> None:
    said = {"role": "assistant", "content": "a"}
    assert messages({"type": "reasoning"} | item, said) == (
        Message(role="assistant", text="a", reasoning=reasoning),
    )


@pytest.mark.parametrize("text", ["", "hm", "a\x00b", "😀" * 1000])
def test_what_is_sealed_is_read_again(text: str) -> None:
    assert unseal(seal(text), Expansion(1 << 20), "p") == text


@pytest.mark.parametrize("sealed", ["", "gAAAA", "hearth1:", "hearth1:?", "hearth1:AAAA"])
def test_what_we_did_not_seal_is_not_read(sealed: str) -> None:
    assert unseal(sealed, Expansion(1 << 20), "p") is None
    assert unseal(seal("hm")[:-6], Expansion(1 << 20), "p") is None


def test_items_that_say_nothing_to_a_model_have_no_effect_and_are_told() -> None:
    found = plan(input=[{"type": "mcp_list_tools", "tools": 7}, {"role": "user", "content": "q"}])
    assert found.ignored == ("input[0]: mcp_list_tools",)


@pytest.mark.parametrize("kind", ["web_search_call", "computer_call", "glow"])
def test_items_that_a_model_would_read_and_nobody_knows_are_refused(kind: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        plan(input=[{"role": "user", "content": "q"}, {"type": kind, "action": 7}])
    assert caught.value.param == "input[1]"
    assert kind in caught.value.message


# Tools


def test_tools_of_a_namespace_are_shown_by_flat_names_and_lead_back() -> None:
    found = plan(tools=[LOOK | {"strict": True}, SPACE, {"type": "web_search"}])
    about_wait = "Others\n\nWait for one"
    assert found.request.prompt == ChatPrompt(
        messages=(Message(role="user", text="hi"),),
        tools=(
            Tool(name="look", parameters='{"type": "object"}', is_strict=True),
            Tool(name="agents__wait", description=about_wait, parameters="{}"),
            Tool(name="agents__look", parameters='{"type": "object"}'),
        ),
        continues_last=True,
    )
    names = found.offer.names
    assert names.ref("agents__wait")[:2] == ("wait", "agents")
    assert names.ref("look")[:2] == ("look", None)
    assert names.flat("look", "agents") == "agents__look"
    assert names.flat("gone", "agents") == "agents__gone"
    assert found.ignored == ("tools[2]: web_search",)


def test_a_tool_whose_arguments_are_no_object_is_refused():
    with pytest.raises(InvalidRequest) as refused:
        plan(tools=[LOOK | {"parameters": {"type": "array"}}])
    assert refused.value.param == "tools[0].parameters.type"


def test_names_that_would_be_the_same_are_told_apart() -> None:
    taken = LOOK | {"name": "agents__look"}
    found = plan(tools=[taken, SPACE])
    assert [tool.name for tool in prompt(tools=[taken, SPACE]).tools] == [
        "agents__look",
        "agents__wait",
        "agents__look_2",
    ]
    assert found.offer.names.flat("look", "agents") == "agents__look_2"
    assert found.offer.names.ref("agents__look_2")[:2] == ("look", "agents")


def test_a_custom_tool_takes_one_text_in_its_form() -> None:
    free = {"type": "custom", "name": "note", "description": "Note it"}
    lark = {"type": "grammar", "syntax": "lark", "definition": "start: /a+/"}
    regex = {"type": "grammar", "syntax": "regex", "definition": "a+"}
    tools = prompt(tools=[free, free | {"format": lark}, free | {"format": regex}]).tools
    schemas: list[Any] = [json.loads(tool.parameters) for tool in tools]
    assert [(tool.is_freeform, tool.is_strict) for tool in tools] == [
        (True, False),
        (True, False),
        (False, True),
    ]
    assert [schema["properties"]["input"].get("pattern") for schema in schemas] == [
        None,
        None,
        "^(?:a+)$",
    ]
    assert tools[1].description == (
        "Note it\n\nThe input must follow this Lark grammar:\nstart: /a+/"
    )
    assert plan(tools=[free | {"format": lark}]).ignored == (
        "tools[0].format: the grammar is shown to the model, not enforced",
    )


@pytest.mark.parametrize(
    ("given", "choice"),
    [
        (None, ToolChoice()),
        ("none", ToolChoice(mode="none")),
        ("required", ToolChoice(mode="required")),
        (
            {"type": "function", "name": "wait", "namespace": "agents"},
            ToolChoice(mode="required", name="agents__wait"),
        ),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "look"}],
            },
            ToolChoice(mode="required", allowed=("look",)),
        ),
    ],
)
def test_a_choice_leaves_all_tools_shown(given: Any, choice: ToolChoice) -> None:
    found = prompt(tools=[LOOK, SPACE], tool_choice=given)
    assert found.tool_choice == choice
    assert [tool.name for tool in found.tools] == ["look", "agents__wait", "agents__look"]
    one_by_one = prompt(tools=[LOOK, SPACE], tool_choice=given, parallel_tool_calls=False)
    assert one_by_one.tool_choice.is_parallel is False


# The rest


def test_formats_are_constraints() -> None:
    assert plan().request.constraint is None
    found = plan(text={"format": {"type": "json_object"}}).request.constraint
    assert found == Constraint(kind="json_object", field="text.format")
    form = {"type": "json_schema", "name": "x", "schema": {"type": "array"}, "strict": True}
    assert plan(text={"format": form}).request.constraint == Constraint(
        kind="json_schema", text='{"type": "array"}', field="text.format"
    )


@pytest.mark.parametrize(
    ("body", "thinking"),
    [
        ({}, Thinking()),
        ({"reasoning": {"effort": "low"}}, Thinking(is_enabled=True, effort="low")),
        ({"reasoning": {"effort": "none"}}, Thinking(is_enabled=False)),
        ({"thinking": {"type": "disabled", "budget_tokens": 0}}, Thinking(is_enabled=False)),
        ({"reasoning": {"summary": "auto"}}, Thinking()),
        (
            {"enable_thinking": False, "reasoning": {"effort": "high"}},
            Thinking(is_enabled=False, effort="high"),
        ),
        ({"chat_template_kwargs": {"enable_thinking": True}}, Thinking.switched(True)),
        ({"metadata": {"enable_thinking": "false"}}, Thinking(is_enabled=False)),
    ],
)
def test_reasoning_is_thinking(body: dict[str, Any], thinking: Thinking) -> None:
    assert replace(prompt(**body).thinking, fields=()) == thinking


def test_conversations_are_named_by_the_most_precise_id() -> None:
    codex = caller_of({"originator": "codex_exec", "thread-id": "t", "session-id": "s"})
    assert plan(codex, prompt_cache_key="k", user="u").request.client == "codex"

    def name(caller: Caller = Caller(), **body: Any) -> str | None:  # noqa: B008
        cache: CacheParams = plan(caller, **body).request.cache
        return cache.session_id

    assert name(codex, session_id="own", prompt_cache_key="k") == "own"
    assert name(codex, prompt_cache_key="k", user="u") == "t"
    assert name(prompt_cache_key="k", user="u") == "k"
    assert name(user="u") == "u"
    assert name() is None
    long = name(user="u" * 257)
    assert long is not None
    assert len(long) == 32


def test_limits_logprobs_and_includes() -> None:
    found = plan(max_output_tokens=7, top_logprobs=2, include=["file_search_call.results"])
    assert (found.request.max_tokens, found.request.top_logprobs) == (7, 2)
    assert found.ignored == ("include: file_search_call.results",)
    assert plan(include=["message.output_text.logprobs"]).request.top_logprobs == 0
    assert plan().request.top_logprobs is None


def test_pictures_are_refused_where_they_stand() -> None:
    picture = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "high"}
    with pytest.raises(InvalidRequest) as caught:
        plan(input=[{"role": "user", "content": [picture]}])
    assert caught.value.param == "input[0].content[0]"


# When it is to be complete


def test_what_has_hours_waits_for_idle_time_and_for_no_longer_than_it_has() -> None:
    window = {"completion_window": "8h"}
    asked = plan(background=True, background_options=window).request
    assert (asked.priority, asked.deadline_s, asked.idle_s) == ("background", 28_800.0, 28_200.0)
    shorter = plan(background=True, background_options={"completion_window": "2h"}).request
    assert (shorter.deadline_s, shorter.idle_s) == (7200.0, 6600.0)
    own = plan(background=True, background_options=window, priority="default").request
    assert (own.priority, own.idle_s) == ("default", 0.0)
    soon = plan(background_options={"completion_window": "soonest"}).request
    assert (soon.priority, soon.deadline_s) == (None, plan().request.deadline_s)
    assert soon.idle_s == plan().request.idle_s == 0.0


@pytest.mark.parametrize("more", [{}, {"background": True, "stream": True}])
def test_what_has_hours_must_be_in_the_background_and_not_streamed(more: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        plan(background_options={"completion_window": "2h"}, **more)
    assert refused.value.param == "background_options.completion_window"


def test_a_continuation_id_names_the_conversation_where_no_id_does() -> None:
    options = {"continuation_id": "run-7"}
    assert plan(background_options=options).request.cache.session_id == "run-7"
    named = plan(background_options=options, session_id="mine").request
    assert named.cache.session_id == "mine"
