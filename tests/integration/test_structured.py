"""Answers and calls that a real worker is held to, whatever a random model would rather say."""

import asyncio
import json
import re
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from runtime.errors import InvalidRequest
from runtime.supervisor.supervisor import Supervisor
from runtime.types import (
    ChatPrompt,
    Constraint,
    Message,
    SamplingParams,
    TextPrompt,
    Thinking,
    Tool,
    ToolChoice,
)
from tests.asking import GREEDY, Answer, answer, ask, request, script, supervising
from tests.tiny_models import TOOL_CALL, write_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

HOT = SamplingParams(temperature=1.3, seed=5)
SILENT = Thinking(is_enabled=False)
USER = (Message(role="user", text="the quick brown fox"),)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        "home": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/place"}]},
    },
    "required": ["name", "age", "tags", "home"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"x": {"type": "boolean"}},
            "additionalProperties": False,
        }
    },
}
LOOK_SCHEMA = {
    "type": "object",
    "properties": {"at": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["at"],
    "additionalProperties": False,
}
LOOK = Tool(name="look", parameters=json.dumps(LOOK_SCHEMA), is_strict=True)
WAIT = Tool(name="wait", parameters='{"type": "object", "properties": {}}')


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    write_model(home / "models" / "m")
    write_model(home / "models" / "solo", "llama4")
    return home


@pytest.fixture(scope="module")
def tokenizer(home: Path) -> Tokenizer:
    return Tokenizer.from_file(str(home / "models" / "m" / "tokenizer.json"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def supervisor(home: Path) -> AsyncGenerator[Supervisor]:
    async with supervising(home) as supervisor:
        yield supervisor


def schema(value: Any) -> Constraint:
    return Constraint(kind="json_schema", text=json.dumps(value))


def saying(tokenizer: Tokenizer, text: str) -> SamplingParams:
    return script(tokenizer.encode(text, add_special_tokens=False).ids)


def chat(**fields: Any) -> ChatPrompt:
    return ChatPrompt(messages=USER, **fields)


def assert_follows(said: Answer, wanted: Any) -> None:
    """An answer that ended by itself follows the schema; one that was cut says so."""
    if said.finished.reason == "stop":
        jsonschema.validate(json.loads(said.text), wanted)
    else:
        assert said.finished.reason == "length"


@pytest.mark.parametrize("model", ["m", "solo"])
@pytest.mark.parametrize("sampling", [GREEDY, HOT])
async def test_an_answer_follows_its_schema(
    supervisor: Supervisor, model: str, sampling: SamplingParams
):
    fields: dict[str, Any] = {"sampling": sampling, "max_tokens": 300, "model": model}
    said = await ask(supervisor, chat(thinking=SILENT), constraint=schema(PERSON), **fields)
    assert said.finished.reason == "stop"
    jsonschema.validate(json.loads(said.text), PERSON)


async def test_rows_of_a_batch_follow_their_own_constraints_or_none(supervisor: Supervisor):
    requests = [
        request(
            chat(thinking=SILENT),
            constraint=schema(PERSON),
            max_tokens=300,
            sampling=HOT,
            num_choices=2,
        ),
        request("the lazy dog", max_tokens=60, ignore_eos=True),
        request(TextPrompt(text="a"), constraint=Constraint(kind="regex", text="[a-f]{9}x?")),
        request(
            TextPrompt(text="b"),
            constraint=Constraint(kind="lark", text='start: "let" " "+ ("me" | "see") "."'),
            sampling=SamplingParams(temperature=0.7, seed=3, repetition_penalty=1.2),
        ),
        request(chat(), constraint=Constraint(kind="json_object"), max_tokens=200, sampling=HOT),
    ]
    alone = await ask(supervisor, "the lazy dog", max_tokens=60, ignore_eos=True)
    said = await asyncio.gather(*(answer(supervisor.submit(one)) for one in requests))
    for index in (0, 1):
        assert_follows(said[0].choice(index), PERSON)
    assert said[0].choice(0).text != said[0].choice(1).text
    assert said[1].text == alone.text
    assert re.fullmatch("[a-f]{9}x?", said[2].text)
    assert re.fullmatch("let +(me|see)[.]", said[3].text)
    assert_follows(said[4], {"type": "object"})


async def test_a_bias_and_ignored_ends_cannot_leave_the_grammar(supervisor: Supervisor):
    bias = tuple((token_id, -1e9 if token_id % 2 else 100.0) for token_id in range(409))
    said = await ask(
        supervisor,
        chat(),
        constraint=schema({"enum": ["kettle"]}),
        sampling=SamplingParams(temperature=0.0, logit_bias=bias, presence_penalty=2.0),
        ignore_eos=True,
        top_logprobs=3,
    )
    assert (said.text, said.finished.reason) == ('"kettle"', "stop")
    assert "".join(one.chosen.token for one in said.logprobs) == '"kettle"'
    assert all(one.chosen == one.top[0] for one in said.logprobs)


async def test_an_answer_that_is_cut_says_length(supervisor: Supervisor):
    said = await ask(supervisor, chat(), constraint=schema(PERSON), max_tokens=4)
    assert said.finished.reason == "length"
    assert said.text.startswith('{"name":')


@pytest.mark.parametrize("model", ["m", "solo"])
async def test_a_schema_that_becomes_too_heavy_ends_the_answer_with_what_was_said(
    supervisor: Supervisor, model: str
):
    """Its heavy part is met only after more tokens than a grammar is tried with."""
    many = {f"p{i}": {"const": "q"} for i in range(4000)}
    heavy = {"type": "object", "properties": many, "required": ["p3999"]}
    later = {
        "type": "object",
        "properties": {"said": {"const": "kettle"}, "then": heavy},
        "required": ["said", "then"],
    }
    fields: dict[str, Any] = {"model": model, "max_tokens": 300}
    prompt = chat(thinking=SILENT)
    said = await ask(supervisor, prompt, constraint=schema(later), ignore_eos=True, **fields)
    assert said.finished.reason == "length"
    assert said.finished.notes == ("grammar_too_heavy",)
    assert said.text.replace(" ", "").startswith('{"said":"kettle","then":{')
    assert_follows(await ask(supervisor, prompt, constraint=schema(PERSON), **fields), PERSON)


async def test_a_stop_string_ends_a_constrained_answer_too(supervisor: Supervisor):
    said = await ask(supervisor, chat(), constraint=schema(PERSON), stop=('"age"',), max_tokens=99)
    assert '"age"' not in said.text
    assert (said.finished.reason, said.finished.stop) == ("stop", '"age"')


async def test_the_constraint_begins_when_the_thinking_has_closed(
    supervisor: Supervisor, tokenizer: Tokenizer
):
    said = await ask(
        supervisor,
        chat(thinking=Thinking(is_enabled=True)),
        constraint=schema({"enum": ["fox"]}),
        sampling=saying(tokenizer, "let me</think> see"),
    )
    assert (said.reasoning, said.text) == ("let me", '"fox"')
    assert said.finished.reason == "stop"


async def test_a_model_that_opens_its_thinking_itself_may(
    supervisor: Supervisor, tokenizer: Tokenizer
):
    fields: dict[str, Any] = {
        "constraint": schema({"enum": ["fox"]}),
        "sampling": saying(tokenizer, "<think>let me</think>"),
    }
    said = await ask(supervisor, chat(), **fields)
    assert (said.reasoning, said.text) == ("let me", '"fox"')
    said = await ask(supervisor, chat(thinking=Thinking(is_enabled=False)), **fields)
    assert (said.reasoning, said.text) == ("", '"fox"')


@pytest.mark.parametrize("budget", [0, 1, 7])
async def test_a_thinking_budget_closes_the_block_and_the_answer_follows(
    supervisor: Supervisor, budget: int
):
    thinking = Thinking(is_enabled=True, budget_tokens=budget)
    said = await ask(
        supervisor, chat(thinking=thinking), max_tokens=30, ignore_eos=True, top_logprobs=0
    )
    texts = [one.chosen.token for one in said.logprobs]
    assert texts.index("</think>") <= budget
    assert said.finished.usage.num_reasoning_tokens <= budget + 1
    assert said.finished.usage.num_output_tokens == 30
    assert said.text
    together = await ask(
        supervisor, chat(thinking=thinking), constraint=schema({"enum": ["fox"]}), max_tokens=30
    )
    assert together.text == '"fox"'


async def test_an_effort_is_a_budget_where_the_template_has_no_switch_for_it(
    supervisor: Supervisor,
):
    thinking = Thinking(is_enabled=True, effort="minimal")
    said = await ask(supervisor, chat(thinking=thinking), max_tokens=300, ignore_eos=True)
    assert said.finished.usage.num_reasoning_tokens <= 257


# Tool calls


@pytest.mark.parametrize("sampling", [GREEDY, HOT])
@pytest.mark.parametrize("choice", [ToolChoice(mode="required", is_parallel=False)])
async def test_a_required_call_comes(
    supervisor: Supervisor, sampling: SamplingParams, choice: ToolChoice
):
    said = await ask(
        supervisor,
        chat(tools=(LOOK, WAIT), tool_choice=choice, thinking=SILENT),
        sampling=sampling,
        max_tokens=300,
    )
    (call,) = said.calls
    assert call.name in ("look", "wait")
    wanted = LOOK_SCHEMA if call.name == "look" else {"type": "object"}
    jsonschema.validate(json.loads(call.arguments), wanted)
    assert (said.text, said.finished.reason, said.finished.notes) == ("", "tool_calls", ())


async def test_a_named_call_comes_after_the_thinking(supervisor: Supervisor):
    choice = ToolChoice(mode="required", name="look", is_parallel=False)
    thinking = Thinking(is_enabled=True, budget_tokens=5)
    prompt = chat(tools=(WAIT, LOOK), tool_choice=choice, thinking=thinking)
    said = await ask(supervisor, prompt, sampling=HOT, max_tokens=100)
    (call,) = said.calls
    assert call.name == "look"
    jsonschema.validate(json.loads(call.arguments), LOOK_SCHEMA)
    assert said.finished.reason == "tool_calls"


async def test_a_call_to_a_strict_tool_follows_its_schema_when_the_model_makes_one(
    supervisor: Supervisor, tokenizer: Tokenizer
):
    sampling = saying(tokenizer, 'let me see<tool_call>"fox</tool_call>')
    prompt = chat(tools=(LOOK,), tool_choice=ToolChoice(is_parallel=False))
    said = await ask(supervisor, prompt, sampling=sampling, max_tokens=60)
    (call,) = said.calls
    assert said.text == "let me see"
    jsonschema.validate(json.loads(call.arguments), LOOK_SCHEMA)
    assert (said.finished.reason, said.finished.notes) == ("tool_calls", ())


async def test_a_constrained_answer_leaves_the_model_its_tools(
    supervisor: Supervisor, tokenizer: Tokenizer
):
    fields: dict[str, Any] = {"constraint": schema({"enum": ["fox"]}), "max_tokens": 60}
    prompt = chat(tools=(LOOK,))
    said = await ask(supervisor, prompt, sampling=saying(tokenizer, "<tool_call>"), **fields)
    assert [call.name for call in said.calls] == ["look"]
    assert said.text == ""
    said = await ask(supervisor, prompt, sampling=saying(tokenizer, '"'), **fields)
    assert (said.text, said.calls) == ('"fox"', [])


async def test_no_tool_may_be_called_when_none_is_chosen(
    supervisor: Supervisor, tokenizer: Tokenizer
):
    prompt = chat(tools=(LOOK,), tool_choice=ToolChoice(mode="none"))
    text = f"<tool_call>{TOOL_CALL}</tool_call>"
    said = await ask(supervisor, prompt, sampling=saying(tokenizer, f"{text}<|im_end|>"))
    assert (said.text, said.calls) == (text.removeprefix("<tool_call>"), [])
    assert said.finished.reason == "stop"


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    ({}, {"constraint": schema({"not": {"pattern": "a"}})}, "response_format", "#/not"),
    ({}, {"constraint": schema({"type": "objekt"})}, "response_format", "objekt"),
    ({}, {"constraint": Constraint(kind="json_schema", text="{")}, "response_format", "JSON"),
    ({}, {"constraint": Constraint(kind="regex", text="(")}, "response_format", "regex"),
    ({}, {"constraint": Constraint(kind="lark", text="start: nope")}, "response_format", "nope"),
    ({"tool_choice": ToolChoice(mode="required")}, {}, "tool_choice", "no tools"),
    (
        {"tools": (LOOK,), "tool_choice": ToolChoice(mode="required", name="other")},
        {},
        "tool_choice",
        "other",
    ),
    (
        {"tools": (LOOK, Tool(name="bad", parameters='{"contains": {}}', is_strict=True))},
        {},
        "tools[1]",
        "'contains' at #",
    ),
]


@pytest.mark.parametrize(("prompt", "fields", "param", "reason"), REFUSED)
async def test_what_cannot_be_enforced_is_refused_with_the_reason(
    supervisor: Supervisor, prompt: dict[str, Any], fields: dict[str, Any], param: str, reason: str
):
    with pytest.raises(InvalidRequest) as caught:
        await ask(supervisor, chat(**prompt), **fields)
    assert caught.value.param == param
    assert reason in caught.value.message
