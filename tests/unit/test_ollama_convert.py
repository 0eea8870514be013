"""Ollama's requests, turned into the runtime's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from api.http.caller import Caller
from api.http.durations import seconds_of
from api.ollama.convert import chat_request, generate_request
from api.ollama.schemas import GenerateBody, OllamaChatRequest
from runtime.config.settings import Settings
from runtime.errors import InvalidRequest
from runtime.types import (
    ChatPrompt,
    Constraint,
    GenerateRequest,
    Image,
    Message,
    ModelSpec,
    SamplingParams,
    TextPrompt,
    Thinking,
    Tool,
    ToolCall,
)

T = TypeVar("T")
SPEC = ModelSpec(id="m", path="/m", context=4096, model_type="qwen3", nbytes=1, created_s=0)
SETTINGS = Settings(home=Path("/nowhere"))
TEN_YEARS_S = 10 * 365 * 86_400


def chat(**fields: Any) -> GenerateRequest:
    return chat_request(read(fields, OllamaChatRequest), "r", SPEC, SETTINGS, Caller())


def generate(**fields: Any) -> GenerateRequest:
    return generate_request(read(fields, GenerateBody), "r", SPEC, SETTINGS, Caller())


def read(fields: dict[str, Any], kind: type[T]) -> T:
    return msgspec.json.decode(msgspec.json.encode({"model": "m"} | fields), type=kind)


def prompt_of(request: GenerateRequest) -> ChatPrompt:
    assert isinstance(request.prompt, ChatPrompt)
    return request.prompt


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (None, None),
        (0, 0),
        (-1, -1),
        (90.5, 90.5),
        ("5m", 300),
        ("1h30m", 5400),
        ("1.5s", 1.5),
        ("250ms", 0.25),
        ("-1m", -60),
        ("-1", -1),
        ("0", 0),
        (" 24h ", 86400),
        (10**12, TEN_YEARS_S),
        ("9" * 400, TEN_YEARS_S),
        ("99999999999h", TEN_YEARS_S),
        ("7d", 604_800),
    ],
)
def test_durations_are_seconds_or_gos_words(given: Any, seconds: float | None):
    assert seconds_of(given) == seconds


@pytest.mark.parametrize(
    "given", ["soon", "", "5x", "m5", "5 m", "nan", "inf", "-inf", "1e3", "5GB"]
)
def test_what_is_no_duration_is_refused_by_name(given: str):
    with pytest.raises(InvalidRequest) as caught:
        seconds_of(given)
    assert caught.value.param == "keep_alive"


def test_a_conversation_with_a_tool_reads_as_everywhere_else():
    call = {"function": {"name": "look", "arguments": {"at": 7}}}
    request = chat(
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [call]},
            {"role": "tool", "content": "a cat", "tool_name": "look"},
        ],
        tools=[
            {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
        ],
        think=True,
    )
    made = ToolCall(id="call_messages[2]_0", name="look", arguments='{"at":7}')
    assert prompt_of(request) == ChatPrompt(
        messages=(
            Message(role="system", text="Be brief."),
            Message(role="user", text="Look."),
            Message(role="assistant", reasoning="hm", tool_calls=(made,)),
            Message(role="tool", text="a cat", tool_call_id=made.id, name="look"),
        ),
        tools=(Tool(name="look", parameters='{"type":"object"}'),),
        thinking=Thinking.switched(True, "think"),
        continues_last=True,
    )


def test_what_is_null_was_not_given():
    call = {"function": {"name": "look", "arguments": None}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    (message,) = prompt_of(chat(messages=[said], stream=None)).messages
    assert (message.text, message.tool_calls[0].arguments) == ("", "{}")
    assert chat(messages=None).work == "count"
    assert generate(prompt=None, raw=None, stream=None).work == "count"


def test_results_belong_to_the_calls_of_their_name_in_order():
    calls = [{"function": {"name": name, "arguments": {}}} for name in ("a", "b", "a")]
    results = [{"role": "tool", "content": "", "tool_name": name} for name in ("b", "a", "a", "c")]
    request = chat(messages=[{"role": "assistant", "content": "", "tool_calls": calls}, *results])
    ids = [message.tool_call_id for message in prompt_of(request).messages[1:]]
    path = "call_messages[0]"
    assert ids == [f"{path}_1", f"{path}_0", f"{path}_2", None]


def test_options_are_sampling():
    options: dict[str, Any] = {
        "temperature": 0.5,
        "top_k": -1,
        "num_predict": 9,
        "stop": ["x"],
        "num_ctx": 2048,
    }
    request = chat(
        messages=[{"role": "user", "content": "x"}], options=options | {"repeat_penalty": 2}
    )
    assert request.sampling == SamplingParams(temperature=0.5, top_k=0, repetition_penalty=2)
    assert (request.max_tokens, request.stop) == (9, ("x",))
    assert generate(prompt="x", options={"num_predict": -1}).max_tokens == SPEC.context
    assert generate(prompt="x").max_tokens is None


@pytest.mark.parametrize(
    ("last", "sampling"),
    [
        (64, SamplingParams(repetition_penalty=2.0, repetition_context_size=64)),
        (-1, SamplingParams(repetition_penalty=2.0, repetition_context_size=0)),
        (0, SamplingParams(repetition_penalty=1.0, repetition_context_size=0)),
    ],
)
def test_repeat_last_n_bounds_the_penalty_or_turns_it_off(last: int, sampling: SamplingParams):
    options = {"repeat_penalty": 2.0, "repeat_last_n": last}
    assert generate(prompt="x", options=options).sampling == sampling
    # What is said wins over a model's own, also where it says that all tokens count.
    own = SamplingParams(repetition_penalty=1.5, repetition_context_size=20)
    assert sampling.over(own) == sampling


@pytest.mark.parametrize("stop", ["", ["x", ""], ["x"] * 65, "x" * 8193])
def test_stop_strings_that_cannot_be_looked_for_are_refused(stop: str | list[str]):
    with pytest.raises(InvalidRequest, match=r"^options\.stop "):
        generate(prompt="x", options={"stop": stop})


@pytest.mark.parametrize(
    ("form", "constraint"),
    [
        ("json", Constraint(kind="json_object")),
        ({"type": "object"}, Constraint(kind="json_schema", text='{"type":"object"}')),
        ("", None),
        (None, None),
    ],
)
def test_formats_are_constraints(form: Any, constraint: Constraint | None):
    assert generate(prompt="x", format=form).constraint == constraint


def test_a_prompt_goes_through_the_template_unless_it_is_raw():
    request = generate(prompt="Hi", system="Be brief.", think=False)
    assert prompt_of(request).messages == (
        Message(role="system", text="Be brief."),
        Message(role="user", text="Hi"),
    )
    assert prompt_of(request).thinking == Thinking(is_enabled=False, fields=("think",))
    assert generate(prompt="Hi", raw=True).prompt == TextPrompt(text="Hi")


def test_images_stand_before_the_text_and_need_none():
    seeing = msgspec.structs.replace(SPEC, capabilities=("completion", "vision"))
    for text in ("Hi", ""):
        body = read({"prompt": text, "images": ["AAAA"]}, GenerateBody)
        request = generate_request(body, "r", seeing, SETTINGS, Caller())
        image = Image(at=0, field="images[0]", data=b"\0\0\0")
        assert prompt_of(request).messages == (Message(role="user", text=text, images=(image,)),)
    with pytest.raises(InvalidRequest) as caught:
        generate(prompt="Hi", raw=True, images=["AAAA"])
    assert caught.value.param == "images"


def test_a_request_without_a_prompt_only_loads_or_unloads():
    assert chat(messages=[], keep_alive="10m").work == "count"
    assert generate(keep_alive=0).keep_alive_s == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "alien", "content": "x"}]}, "messages[0].role"),
        ({"format": 7}, "format"),
        ({"think": "a lot"}, "think"),
        ({"tools": [{"function": {"name": "f", "parameters": 1}}]}, "tools[0].function.parameters"),
        (
            {"tools": [{"function": {"name": "f", "parameters": {"type": "string"}}}]},
            "tools[0].function.parameters.type",
        ),
        ({"messages": [{"role": "user", "images": ["§"]}]}, "messages[0].images[0]"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(fields: dict[str, Any], param: str):
    with pytest.raises(InvalidRequest) as caught:
        chat(**({"messages": [{"role": "user", "content": "x"}]} | fields))
    assert caught.value.param == param
