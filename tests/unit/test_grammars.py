"""What a grammar costs, found out before anything is said."""

import json
from typing import Literal

import pytest

from runtime.errors import InvalidRequest
from runtime.types import ChatPrompt, Constraint
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
