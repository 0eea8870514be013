"""What a grammar costs, found out before anything is said."""

import json
import random
import re
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from runtime.embedded import HEARTH_TINY
from runtime.errors import InvalidRequest
from runtime.types import ChatPrompt, Constraint
from runtime.worker.input.preparer import PromptPreparer
from runtime.worker.output.dialect import ReasoningBlock
from tests.unit.test_guide import EOS, RNG, USER, allowed, plan_of, speak, tokenizer


def choices(count: int) -> Constraint:
    """A JSON object with that many members, of which any may be left out."""
    members = {f"p{i}": {"const": "q"} for i in range(count)}
    schema = {"type": "object", "properties": members}
    return Constraint(kind="json_schema", text=json.dumps(schema))


def test_a_schema_of_a_thousand_members_that_may_be_left_out_is_followed():
    wish = '{"p7": "q", "p999": "q"}'
    guide = plan_of(ChatPrompt(messages=USER), constraint=choices(1000)).start()
    said = speak(guide, wish, RNG)
    assert tokenizer().decode(said) == wish


@pytest.mark.parametrize(
    ("constraint", "why"),
    [
        (choices(2500), "max is"),
        (Constraint(kind="regex", text="(a{1000}){1000}", field="guided_regex"), "too many"),
    ],
)
def test_what_is_too_heavy_to_follow_is_refused_before_anything_is_said(
    constraint: Constraint, why: str
):
    with pytest.raises(InvalidRequest) as caught:
        plan_of(ChatPrompt(messages=USER), constraint=constraint)
    said = str(caught.value)
    assert caught.value.param == constraint.field
    assert said.startswith(f"{constraint.field} is too heavy to enforce: ")
    assert why in said
    assert said.endswith("fewer optional members and alternatives, and smaller repetitions.")
    assert "\n" not in said


@pytest.mark.parametrize("pattern", ["a?", "", "a{100000}"])
def test_a_pattern_of_whatever_length_is_no_heavy_one(pattern: str):
    constraint = Constraint(kind="regex", text=pattern)
    guide = plan_of(ChatPrompt(messages=USER), constraint=constraint).start()
    guide.advance([EOS] if not pattern else tokenizer().encode("a", add_special_tokens=False))
    assert guide.failure is None


@pytest.mark.parametrize(
    ("kind", "text"), [("regex", r"[^\s\S]"), ("json_schema", '{"$ref": "#"}')]
)
def test_what_nothing_satisfies_is_refused(kind: Literal["regex", "json_schema"], text: str):
    with pytest.raises(InvalidRequest, match=r"^f cannot be enforced: nothing satisfies it\.$"):
        plan_of(ChatPrompt(messages=USER), constraint=Constraint(kind=kind, text=text, field="f"))


@pytest.mark.parametrize("may_think", [False, True])
def test_after_a_grammar_gave_up_only_the_end_may_come(may_think: bool):
    members = {"a": {"type": "integer"}, "b": json.loads(choices(2500).text)}
    later = {"type": "object", "properties": members, "required": ["a", "b"]}
    constraint = Constraint(kind="json_schema", text=json.dumps(later))
    block: ReasoningBlock = "unsaid" if may_think else "closed"
    guide = plan_of(ChatPrompt(messages=USER), constraint=constraint, block=block).start()
    said = ""
    while (ids := allowed(guide)) != [EOS]:
        assert ids is not None
        texts = {i: tokenizer().decode([i]) for i in ids}
        wish = '{"a": 1, "b": {"'.removeprefix(said)
        said += max((t for t in texts.values() if t and wish.startswith(t)), key=len)
        guide.advance(next([i] for i, t in texts.items() if said.endswith(t) and t))
    assert said == '{"a": 1, "b": {"'
    assert guide.gave_up == "grammar_too_heavy"
    guide.advance([EOS])
    assert allowed(guide) == [EOS]


# llama.cpp's notation

JSON_GBNF = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
    string ":" ws value ("," ws string ":" ws value)*
  )? "}" ws

array  ::= "[" ws ( value ("," ws value)* )? "]" ws   # any of them

string ::=
  "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""
ARITHMETIC = """root ::= (expr "=" term "\\n")+
expr ::= term ([-+*/] term)*
term ::= [0-9]+ | "(" expr ")"
"""
GBNF: list[tuple[str, list[str], list[str]]] = [
    (JSON_GBNF, ['{"a": [1, -2.5e3, "x\\n"], "ü": null}'], ["{a}", "[1]"]),
    (ARITHMETIC, ["1+(2*3)=7\n"], ["1+=3\n"]),
    (r'root ::= "caf\u00e9" | "\x41b" | "\U0001F600"', ["café", "Ab", "😀"], ["cafe"]),
    (r"root ::= [\u3040-\u309F]+ | [\x41-\x43]", ["ひら", "B"], ["D", "a"]),
    (r'root ::= "a/b" [/x]+ "[" [\]\[]', ["a/b/x[]"], ["a/b["]),
    (r"root ::= [a\-z]+", ["a-z"], ["b"]),
    (r'root ::= "say \"hi\"\t" [\"] # "a"', ['say "hi"\t"'], ["say"]),
    ('root ::= Foo-bar foo_Bar1\nFoo-bar ::= "a"\nfoo_Bar1 ::= "b" Foo-bar?', ["aba"], ["a"]),
    ('root ::= start\n  | "b"\n\n  | "c"\nstart ::= "a"', ["a", "b", "c"], ["d"]),
    ('root ::= "(" root? ")"', ["(())"], ["(("]),
    ('root ::= "a"{2} "b"{1,} [c]{,3} .', ["aabbccc!"], ["aab"]),
]


def gbnf(text: str) -> Constraint:
    return Constraint(kind="gbnf", text=text, field="guided_grammar")


def takes(grammar: str, wish: str) -> bool:
    """An answer may be exactly this."""
    guide = plan_of(ChatPrompt(messages=USER), constraint=gbnf(grammar)).start()
    for token_id in [*tokenizer().encode(wish, add_special_tokens=False), EOS]:
        ids = allowed(guide)
        if ids is None or token_id not in ids:
            return False
        guide.advance([token_id])
    return True


@pytest.mark.parametrize(("grammar", "inside", "outside"), GBNF)
def test_a_grammar_in_llama_cpps_notation_holds_an_answer(
    grammar: str, inside: list[str], outside: list[str]
):
    assert all(takes(grammar, text) for text in inside)
    assert not any(takes(grammar, text) for text in outside)


@settings(max_examples=20)
@given(
    st.integers(0, 2**32),
    st.lists(st.sampled_from(["foo", "é", "a/b", '"', "]", "\\"]), min_size=1),
)
def test_whatever_is_said_is_one_of_the_grammars_texts(seed: int, words: list[str]):
    texts = " | ".join(json.dumps(word) for word in words)
    grammar = f"root ::= one{{1,3}}\none ::= ({texts}) [0-3]"
    guide = plan_of(ChatPrompt(messages=USER), constraint=gbnf(grammar)).start()
    said = tokenizer().decode(speak(guide, "", random.Random(seed)))
    any_of = "|".join(re.escape(word) for word in words)
    assert re.fullmatch(f"((?:{any_of})[0-3]){{1,3}}", said)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("root ::= b", "Rule 'b' not found"),
        ('a ::= "a"', "No 'root' rule found"),
        ('root ::= "a', "Unexpected end of input at line 1"),
        ("root ::= <[7]>", "Expected name at line 1"),
        ("root ::= " + "(" * 5000, "nested too deeply"),
    ],
)
def test_a_grammar_that_is_none_is_refused_with_its_place(text: str, why: str):
    with pytest.raises(InvalidRequest, match=r"^guided_grammar cannot be enforced: ") as caught:
        plan_of(ChatPrompt(messages=USER), constraint=gbnf(text))
    assert why in str(caught.value)
    assert caught.value.param == "guided_grammar"


def test_a_vocabulary_may_have_added_tokens_that_the_model_cannot_write():
    """Gemma 3 without vision has a mark for images beyond its logits."""
    words = AutoTokenizer.from_pretrained(HEARTH_TINY)
    num_written = len(words)
    words.add_special_tokens({"additional_special_tokens": ["<image_soft_token>"]})
    matcher = PromptPreparer(words, num_written, [EOS]).matcher('start: "{}"').matcher
    mask = int.from_bytes(matcher.compute_bitmask(), "little")
    assert 0 < mask < 1 << num_written
