"""What a guide lets through, without a model: a random or wilful speaker against its masks."""

import json
import random
import re
from functools import cache
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from runtime.errors import InvalidRequest
from runtime.types import (
    ChatPrompt,
    Chunk,
    Constraint,
    GenerateRequest,
    Message,
    ReasoningDelta,
    TextDelta,
    Thinking,
    Tool,
    ToolCallDelta,
    ToolChoice,
)
from runtime.worker.output import forced_calls, harmony
from runtime.worker.output.constraint import Constrainer
from runtime.worker.output.dialect import Dialect, ReasoningBlock
from runtime.worker.output.families import FAMILIES, speaking
from runtime.worker.output.grammar import Grammars
from runtime.worker.output.guide import Guide, GuidePlan
from runtime.worker.output.parser import OutputParser
from runtime.worker.output.tools import RequestTools

FORCED = sorted(FAMILIES.keys() - {"function_gemma", "muse_spark"})
MARKS = """<|end_of_turn|> <think> </think> <tool_call> </tool_call> [TOOL_CALLS] [ARGS]
<|tool_calls_section_begin|> <|tool_calls_section_end|> <|tool_call_begin|> <|tool_call_end|>
<|tool_call_argument_begin|> <|open|> <|close|> <|sep|> <|start|> <|end|> <|channel|> <|message|>
<|call|> <|constrain|> <arg_key> </arg_key> <arg_value> </arg_value> <minimax:tool_call>
</minimax:tool_call> <longcat_tool_call> </longcat_tool_call> <|tool_call> <tool_call|> <|"|>
<|tool_call_start|> <|tool_call_end|> <start_function_call> <end_function_call> <escape>
<｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁sep｜>
｜DSML｜ ｜GCML｜""".split()
EOS = 0
USER = (Message(role="user", text="hi"),)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "unit": {"type": "string", "enum": ["day", "<week>"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
        "where": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["unit", "days"],
    "additionalProperties": False,
}
LOOK = Tool(name="look", parameters=json.dumps(SCHEMA), is_strict=True)


@cache
def tokenizer() -> Any:
    base = Tokenizer(models.BPE())
    base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    base.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=MARKS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    base.train_from_iterator(['{"name": "look", "arguments": {"days": 3}}'] * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=base, eos_token=MARKS[EOS])


@cache
def dialect(name: str) -> Dialect:
    if name == "harmony":
        return harmony.dialect()
    return speaking(FAMILIES[name], Dialect(think_start="<think>", think_end="</think>"))


@cache
def constrainer(name: str) -> Constrainer:
    grammars = Grammars(tokenizer(), len(tokenizer()), [EOS])
    return Constrainer(dialect(name), tokenizer(), grammars)


def ids_of(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


def plan_of(
    prompt: ChatPrompt,
    name: str = "json_tools",
    *,
    constraint: Constraint | None = None,
    block: ReasoningBlock = "closed",
    budget: int | None = None,
) -> GuidePlan:
    request = GenerateRequest(request_id="r", model="m", prompt=prompt, constraint=constraint)
    plan = constrainer(name).demands(request, block, budget).plan
    assert plan is not None
    return plan


def allowed(guide: Guide) -> list[int] | None:
    mask = guide.mask()
    if mask is None:
        return None
    bits = int.from_bytes(mask, "little")
    return [i for i in range(len(tokenizer())) if bits >> i & 1]


def speak(guide: Guide, wish: str, rng: random.Random, *, limit: int = 400) -> list[int]:
    """What comes out when somebody wants to say `wish`, else anything, without its end."""
    said: list[int] = []
    rest = wish
    while len(said) < limit:
        ids = allowed(guide)
        assert guide.failure is None
        if ids is None:
            ids = ids_of(rest)[:1] or [EOS]
        texts = {i: tokenizer().decode([i]) for i in ids}
        wanted = [i for i in ids if texts[i] and rest.startswith(texts[i])]
        if wish and not rest and EOS in ids:  # who goes on at random says marks now and then
            ids = [EOS]
        token_id = max(wanted, key=lambda i: len(texts[i])) if wanted else rng.choice(ids)
        rest = rest.removeprefix(texts[token_id]) if wanted else rest
        guide.advance([token_id])
        if token_id == EOS:
            return said
        said.append(token_id)
    return said


def read(
    said: list[int], spoken: Dialect, tools: tuple[Tool, ...] = (), **fields: Any
) -> tuple[str, str, list[tuple[str, str]]]:
    """Answer, reasoning and calls of what was said."""
    parser = OutputParser(spoken, index=0, tools=RequestTools.of(tools), **fields)
    chunks: list[Chunk] = [c for piece in tokenizer().decode(said) for c in parser.feed(piece)]
    chunks += parser.finish()
    assert parser.notes == ()
    calls: list[tuple[str, str]] = []
    for chunk in chunks:
        if isinstance(chunk, ToolCallDelta) and chunk.name is not None:
            calls.append((chunk.name, chunk.arguments))
        elif isinstance(chunk, ToolCallDelta):
            calls[-1] = (calls[-1][0], calls[-1][1] + chunk.arguments)
    text = "".join(c.text for c in chunks if isinstance(c, TextDelta))
    return text, "".join(c.text for c in chunks if isinstance(c, ReasoningDelta)), calls


def required(*tools: Tool, **fields: Any) -> ChatPrompt:
    choice = ToolChoice(mode="required", is_parallel=False)
    return ChatPrompt(messages=USER, tools=tools, tool_choice=choice, **fields)


@given(seed=st.integers(0, 10_000))
@pytest.mark.parametrize("name", FORCED)
@settings(max_examples=5)
def test_a_forced_call_is_a_call_whatever_is_said(name: str, seed: int):
    said = speak(plan_of(required(LOOK), name).start(), "", random.Random(seed))
    text, _, ((called, arguments),) = read(said, dialect(name), (LOOK,))
    assert (text, called) == ("", "look")
    jsonschema.validate(json.loads(arguments), SCHEMA)


@given(seed=st.integers(0, 10_000))
@pytest.mark.parametrize("name", FORCED)
@settings(max_examples=5)
def test_a_forced_call_follows_its_schema_though_the_tool_is_not_strict(name: str, seed: int):
    look = replace(LOOK, is_strict=False)
    said = speak(plan_of(required(look), name).start(), "", random.Random(seed))
    ((_, arguments),) = read(said, dialect(name), (look,))[2]
    jsonschema.validate(json.loads(arguments), SCHEMA)


def test_a_forced_call_invents_no_arguments_where_its_tool_names_all_of_them():
    wait = Tool(name="wait", parameters='{"type":"object","properties":{}}')
    said = speak(plan_of(required(wait)).start(), "", random.Random(1))
    assert read(said, dialect("json_tools"), (wait,))[2] == [("wait", "{}")]


def test_a_schema_that_cannot_be_enforced_leaves_a_forced_call_any_arguments():
    names = {"type": "object", "propertyNames": {"pattern": "^[a-z]$"}}
    odd = Tool(name="odd", parameters=json.dumps(names))
    look = replace(LOOK, is_strict=False)
    request = GenerateRequest(request_id="r", model="m", prompt=required(odd, look))
    demands = constrainer("json_tools").demands(request, "closed", None)
    assert demands.notes == ("tool_schema_not_enforced",)
    assert demands.plan is not None
    opening = dialect("json_tools").tool_start
    wish = opening + '\n{"name": "odd", "arguments": {"a": [1]}}\n</tool_call>'
    said = speak(demands.plan.start(), wish, RNG)
    assert read(said, dialect("json_tools"), (odd, look))[2] == [("odd", '{"a": [1]}')]
    wish = opening + '\n{"name": "look", "arguments": {"a": [1]}}\n</tool_call>'
    said = speak(demands.plan.start(), wish, RNG)
    ((called, arguments),) = read(said, dialect("json_tools"), (odd, look))[2]
    assert called == "look"
    jsonschema.validate(json.loads(arguments), SCHEMA)


@pytest.mark.parametrize("name", FORCED)
def test_a_forced_call_can_say_any_text(name: str):
    note = Tool(
        name="note",
        parameters='{"type":"object","properties":{"text":{"type":"string"},"n":{"type":"integer"}}'
        ',"required":["text"],"additionalProperties":false}',
        is_strict=True,
    )
    value = 'a < b </x> {"c"} \\ d'
    form = forced_calls.form_of(dialect(name))
    assert form is not None
    wish = json.dumps({"text": value, "n": 7})
    if form.row is not None:
        mark = form.row.mark
        text = f"{mark}{value}{mark}" if mark else json.dumps(value)
        members = (("text", text), ("n", "7"))
        wish = form.row.joint.join(form.row.argument.format(key=k) + v for k, v in members)
    if form.argument:
        wish = "".join(
            form.argument.format(key=key, is_text=is_text) + text + form.argument_end
            for key, text, is_text in (("text", value, "true"), ("n", "7", "false"))
        )
    wish = form.opening.format(name="note", name_json='"note"', n=12) + wish + form.closing
    said = speak(plan_of(required(note), name).start(), dialect(name).tool_start + wish, RNG)
    assert json.loads(read(said, dialect(name), (note,))[2][0][1]) == {"text": value, "n": 7}


RNG = random.Random(1)


@pytest.mark.parametrize("name", ["function_gemma", "muse_spark"])
def test_a_dialect_that_cannot_be_forced_says_so(name: str):
    request = GenerateRequest(request_id="r", model="m", prompt=required(LOOK))
    with pytest.raises(InvalidRequest) as caught:
        constrainer(name).demands(request, "closed", None)
    assert caught.value.param == "tool_choice"
    free = GenerateRequest(
        request_id="r", model="m", prompt=ChatPrompt(messages=USER, tools=(LOOK,))
    )
    demands = constrainer(name).demands(free, "closed", None)
    assert (demands.plan, demands.notes) == (None, ("strict_not_enforced",))


def test_every_dialect_that_can_be_forced_is_tried_here():
    assert {name for name in FAMILIES if forced_calls.can_force(dialect(name), (LOOK,))} == {
        *FORCED
    }


SCHEMAS: st.SearchStrategy[dict[str, Any]] = st.recursive(
    st.sampled_from(
        [
            {"type": "boolean"},
            {"type": "null"},
            {"type": "integer", "minimum": -5, "maximum": 40},
            {"type": "number", "minimum": 0, "maximum": 1},
            {"type": "string", "maxLength": 4},
            {"type": "string", "pattern": "^[a-c]{1,3}$"},
            {"type": "string", "format": "date"},
            {"enum": ["x", 7, None]},
            {"const": {"a": 1}},
        ]
    ),
    lambda inner: (
        st.fixed_dictionaries({"type": st.just("array"), "items": inner, "maxItems": st.just(2)})
        | st.lists(inner, min_size=1, max_size=2).map(lambda options: {"anyOf": options})
        | st.dictionaries(st.sampled_from(["a", "b c", 'd"']), inner, max_size=3).map(
            lambda properties: {
                "type": "object",
                "properties": properties,
                "required": sorted(properties)[:1],
                "additionalProperties": False,
            }
        )
    ),
    max_leaves=4,
)


@given(schema=SCHEMAS, seed=st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_whatever_is_said_follows_the_schema(schema: dict[str, Any], seed: int):
    constraint = Constraint(kind="json_schema", text=json.dumps(schema))
    plan = plan_of(ChatPrompt(messages=USER), constraint=constraint)
    said = speak(plan.start(), "", random.Random(seed))
    text, _, _ = read(said, dialect("json_tools"), is_constrained=True)
    jsonschema.validate(json.loads(text), schema)


@given(schema=SCHEMAS, seed=st.integers(0, 10_000), cut=st.integers(0, 30))
@settings(max_examples=20, deadline=None)
def test_a_guide_that_begins_anew_catches_up(schema: dict[str, Any], seed: int, cut: int):
    constraint = Constraint(kind="json_schema", text=json.dumps(schema))
    plan = plan_of(ChatPrompt(messages=USER), constraint=constraint, block="unsaid")
    said = speak(plan.start(), "<think>a</think>\n", random.Random(seed))
    first, second = plan.start(), plan.start()
    for token_id in said[:cut]:
        first.mask()
        first.advance([token_id])
    second.advance(said[:cut])
    assert first.mask() == second.mask()


FOX = Constraint(kind="json_schema", text='{"enum": ["fox"]}')


@pytest.mark.parametrize(
    ("block", "thinking", "wish", "expected"),
    [
        ("open", Thinking(), "hm</think>\n\nno", ('"fox"', "hm")),
        ("open", Thinking(), "hm<|end_of_turn|><tool_call>", ('"fox"', None)),
        ("unsaid", Thinking(), "<think>hm</think>", ('"fox"', "hm")),
        ("unsaid", Thinking(is_enabled=False), "<think>hm</think>", ('"fox"', "")),
        ("closed", Thinking(), "<think>hm</think>", ('"fox"', "")),
    ],
)
def test_thinking_comes_before_the_answer_where_it_may(
    block: ReasoningBlock, thinking: Thinking, wish: str, expected: tuple[str, str | None]
):
    prompt = ChatPrompt(messages=USER, thinking=thinking)
    plan = plan_of(prompt, constraint=FOX, block=block, budget=40)
    text, reasoning, _ = read(
        speak(plan.start(), wish, RNG),
        dialect("json_tools"),
        reasoning=block,
        is_constrained=True,
    )
    assert text == expected[0]
    assert reasoning == expected[1] or (expected[1] is None and reasoning)


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_a_spent_budget_closes_the_block_and_keeps_it_closed(budget: int):
    plan = plan_of(ChatPrompt(messages=USER), block="open", budget=budget)
    guide = plan.start()
    said = speak(guide, "abcdefghijklm<think>more", RNG, limit=30)
    assert said.count(ids_of("</think>")[0]) == 1
    assert said.index(ids_of("</think>")[0]) <= budget
    assert ids_of("<think>")[0] not in said


def test_channels_are_forced_in_their_order():
    final = "<|start|>assistant<|channel|>final<|message|>"
    analysis = "<|channel|>analysis<|message|>hm<|end|>"
    plan = plan_of(ChatPrompt(messages=USER), "harmony", constraint=FOX, block="unsaid")
    said = speak(plan.start(), analysis, RNG)
    assert tokenizer().decode(said) == analysis + final + '"fox"'
    silent = speak(plan.start(), "<|channel|>final", RNG)
    assert tokenizer().decode(silent) == '<|channel|>final<|message|>"fox"'
    tight = plan_of(ChatPrompt(messages=USER), "harmony", constraint=FOX, block="unsaid", budget=1)
    said = speak(tight.start(), "<|channel|>analysis<|message|>abc", RNG)
    assert tokenizer().decode(said) == "<|channel|>analysis<|message|>a<|end|>" + final + '"fox"'


def test_a_strict_call_in_free_text_is_held_to_its_schema_and_more_may_follow():
    prompt = ChatPrompt(messages=USER, tools=(LOOK,))
    wish = 'I look.<tool_call>\n{"name": "other"</tool_call><tool_call>'
    said = speak(plan_of(prompt).start(), wish, random.Random(4))
    text, _, calls = read(said, dialect("json_tools"), (LOOK,))
    assert text.startswith("I look.")
    assert calls
    for name, arguments in calls:
        assert name == "look"
        jsonschema.validate(json.loads(arguments), SCHEMA)


def test_the_same_grammar_is_compiled_once_and_never_shared():
    grammars = Grammars(tokenizer(), len(tokenizer()), [EOS])
    first = grammars.of_constraint(FOX)
    second = grammars.of_constraint(FOX)
    first.consume_tokens(ids_of('"fox"'))
    assert first.is_stopped()
    assert not second.is_stopped()


WIDE = {"type": "object", "properties": {f"p{i}": {"const": "q"} for i in range(2500)}}
BROAD = Constraint(kind="json_schema", text=json.dumps({**WIDE, "properties": {"a": WIDE}}))


@pytest.mark.parametrize(("constraint", "said"), [(FOX, '"dog'), (BROAD, '{"a": {"p0"')])
def test_a_guide_whose_grammar_breaks_says_so_and_allows_the_end(constraint: Constraint, said: str):
    guide = plan_of(ChatPrompt(messages=USER), constraint=constraint).start()
    guide.advance(ids_of(said))
    assert guide.failure is not None
    assert re.fullmatch("Parser Error: (token .d. does|.* max is ).*", guide.failure)
    assert allowed(guide) == [EOS]
