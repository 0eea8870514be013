"""Whatever is done between what a client sent and what the model reads is told."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.utils import load_tokenizer

from runtime.errors import InvalidRequest
from runtime.prompt.arrange import Abilities, arranging_steps
from runtime.prompt.rewriting import Made, RewriteStep, rewrite
from runtime.prompt.seal import Seal, sealed
from runtime.types import Message, Tool, ToolCall
from runtime.worker.input.explain import explain
from runtime.worker.input.template import inner_tokenizer
from runtime.worker.input.turns import TurnStore
from tests.templates import TEMPLATES, template_of
from tests.unit.test_compose import END, Talk

BILLING = "x-anthropic-billing-header: cc_version=2.1.329.ec4; cc_entrypoint=sdk-cli;"
LOOK = Tool(name="look", description="Look.", parameters='{"type": "object"}')
FETCH = Tool(name="fetch", description="Fetch.", parameters='{"type": "object"}', is_deferred=True)
SEAL = Seal(b"secret")


@cache
def plain_writer(name: str) -> Any:
    """The template itself, with nothing of ours around it."""
    with TemporaryDirectory() as folder:
        template_of(Path(folder), name)
        tokenizer: Any = load_tokenizer(Path(folder))
    return inner_tokenizer(tokenizer)


@cache
def template(name: str) -> Any:
    with TemporaryDirectory() as folder:
        return template_of(Path(folder), name)


def plainly(name: str, messages: list[Message], tools: tuple[Tool, ...]) -> str | None:
    """The conversation as the template writes what was sent; None where it refuses that."""
    sent: list[dict[str, Any]] = []
    for one in messages:
        said: dict[str, Any] = {"role": one.role, "content": one.text}
        if one.reasoning is not None:
            said["reasoning_content"] = one.reasoning
        if one.tool_calls:
            said["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.loads(call.arguments)},
                }
                for call in one.tool_calls
            ]
        if one.tool_call_id is not None:
            said["tool_call_id"] = one.tool_call_id
        sent.append(said)
    shown = [
        {
            "type": "function",
            "function": {
                "name": one.name,
                "parameters": json.loads(one.parameters),
                "description": one.description,
            },
        }
        for one in tools
    ]
    try:
        return plain_writer(name).apply_chat_template(
            sent, tools=shown or None, tokenize=False, add_generation_prompt=True
        )
    except Exception:  # whatever the template raises
        return None


TEXTS = st.sampled_from(["a", "b\n", " c  d", BILLING, f"{BILLING}\nBe brief.", "", "<think>x"])
CALLS = st.lists(
    st.builds(
        ToolCall,
        id=st.sampled_from(["x", "y"]),
        name=st.just("look"),
        arguments=st.sampled_from(["{}", '{"at": 7}']),
    ),
    max_size=2,
    unique_by=lambda call: call.id,
).map(tuple)
MESSAGES = st.one_of(
    st.builds(Message, role=st.sampled_from(["system", "user"]), text=TEXTS),
    st.builds(
        Message,
        role=st.just("assistant"),
        text=TEXTS,
        tool_calls=CALLS,
        reasoning=st.sampled_from([None, "hm"]),
    ),
    st.builds(
        Message,
        role=st.just("tool"),
        text=TEXTS,
        tool_call_id=st.sampled_from(["x", "y"]),
        is_error=st.booleans(),
        loaded_tools=st.sampled_from([(), ("fetch",)]),
    ),
)


@given(
    name=st.sampled_from(sorted(TEMPLATES)),
    messages=st.lists(MESSAGES, min_size=1, max_size=6),
    tools=st.sampled_from([(), (LOOK,), (LOOK, FETCH), (FETCH,)]),
    client=st.sampled_from(["", "claude-code"]),
    continues=st.booleans(),
    says=st.sampled_from([("a", "a"), ("<think>\nhm\n</think>\n\na ", "a ")]),
)
def test_where_the_model_does_not_read_the_messages_plainly_a_rule_is_told(
    name: str,
    messages: list[Message],
    tools: tuple[Tool, ...],
    client: str,
    continues: bool,
    says: tuple[str, str],
):
    """The first question, and the next, with its answer given back as its client saw it."""
    talk = Talk(template(name), TurnStore(), needs_state=False)
    sent = messages
    for _ in range(2):
        try:
            composed = talk.compose(*sent, tools=tools, client=client, continues_last=continues)
        except InvalidRequest:
            return
        plain = plainly(name, sent, tools)
        is_plain = plain is not None and talk.template.encode(plain).token_ids == composed.token_ids
        assert is_plain or composed.changes
        raw, text = says
        talk.says(composed, raw + END, text)
        sent = [*sent, Message(role="assistant", text=text), Message(role="user", text="b")]


@given(
    before=st.lists(st.integers(), max_size=5),
    picks=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple), max_size=6),
    edits=st.sets(st.integers(0, 5)),
)
def test_a_step_cannot_change_a_message_and_keep_silent(
    before: list[int], picks: list[tuple[int, ...]], edits: set[int]
):
    given_ = [Message(role="user", text=str(one)) for one in before]
    picked = [tuple(n for n in pick if n < len(given_)) for pick in picks]
    made = [
        Made(msgspec.structs.replace(given_[of[0]], name="x" if i in edits else None), of)
        for i, of in enumerate(picked)
        if of
    ]
    rewritten = rewrite(given_, [RewriteStep("rule", lambda _: made)])
    assert bool(rewritten.changes) or list(rewritten.messages) == given_
    for part in rewritten.parts:
        assert part.rules or part.message == given_[part.sources[0]]


@given(
    name=st.sampled_from(["chatml", "qwen3", "role_ends"]),
    messages=st.lists(MESSAGES, min_size=1, max_size=5),
    tools=st.sampled_from([(), (LOOK,), (LOOK, FETCH)]),
    client=st.sampled_from(["", "claude-code"]),
    says=st.sampled_from([("a", "a"), ("<think>\nhm\n</think>\n\na ", "a ")]),
)
def test_an_explained_prompt_is_all_that_the_model_reads(
    name: str,
    messages: list[Message],
    tools: tuple[Tool, ...],
    client: str,
    says: tuple[str, str],
):
    """Also where its beginning was generated; every piece names what it is made of."""
    talk = Talk(template(name), TurnStore(), needs_state=False)
    sent = messages
    for _ in range(2):
        try:
            composed = talk.compose(*sent, tools=tools, client=client)
        except InvalidRequest:
            return
        found = explain(talk.composer, composed)
        assert list(found.token_ids) == composed.token_ids
        assert sum(part.num_tokens for part in found.parts) == len(composed.token_ids)
        assert "".join(part.text for part in found.parts) == talk.text_of(composed.token_ids)
        assert all(part.sources for part in found.parts)
        rules = {rule for part in found.parts for rule in part.rules}
        assert rules <= {change.rule for change in composed.changes}
        raw, text = says
        talk.says(composed, raw + END, text)
        sent = [*sent, Message(role="assistant", text=text), Message(role="user", text="b")]


def told(messages: list[Message], abilities: Abilities) -> dict[str, int]:
    changes = rewrite(messages, arranging_steps(abilities, SEAL.codes)).changes
    return {one.rule: one.num_places for one in changes}


def test_rules_are_told_with_the_messages_that_they_changed():
    def result(call: str) -> Message:
        return Message(role="tool", text=call, tool_call_id=call, is_error=call == "z")

    calls = tuple(ToolCall(id=one, name="look", arguments="{}") for one in "xyz")
    messages = [
        Message(role="system", text="one"),
        Message(role="system", text="two"),
        Message(role="user", text="a"),
        Message(role="system", text="late"),
        Message(role="assistant", tool_calls=calls),
        *map(result, "xzy"),
    ]
    assert told(messages, Abilities()) == {"result_order": 2, "failed_call": 1, "joined": 2}
    few = Abilities(system=False, late_system=False, users_in_a_row=False)
    assert told(messages, few) == {
        "result_order": 2,
        "failed_call": 1,
        "joined": 5,
        "system_as_user": 1,
        "late_system": 1,
    }


@pytest.mark.parametrize("name", ["alternating"])
@given(
    head=st.lists(TEXTS, min_size=1, max_size=3),
    secret_text=TEXTS,
    guesses=st.lists(st.binary(min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_no_typed_text_reads_as_a_system_text_that_was_put_elsewhere(
    name: str, head: list[str], secret_text: str, guesses: list[bytes]
):
    """Whoever knows the text and its place, but not the store's secret, cannot write it."""
    talk = Talk(template(name), TurnStore(), seal=Seal(b"the store's own"))
    asked = [Message(role="user", text=one) for one in head]
    late = Message(role="system", text=secret_text)
    ids = talk.compose(*asked, late, tools=()).token_ids
    assert ids == talk.compose(*asked, late, tools=()).token_ids
    for guess in guesses:
        code = Seal(guess).codes([*asked, late])[-1]
        forged = Message(role="user", text=sealed(secret_text, code).text)
        assert talk.compose(*asked, forged, tools=()).token_ids != ids
    # One that was seen is good for that text, there, and for nothing else.
    seen = Seal(b"the store's own").codes([*asked, late])[-1]
    forged = Message(role="user", text=sealed(secret_text, seen).text)
    elsewhere = [Message(role="user", text="first"), *asked]
    real = talk.compose(*elsewhere, late, tools=()).token_ids
    assert talk.compose(*elsewhere, forged, tools=()).token_ids != real


def test_a_seal_stays_while_a_client_gives_answers_back_changed():
    late = Message(role="system", text="late")
    call, again = (ToolCall(id=one, name="look", arguments=f'{{"at":{one}7}}') for one in " \n")
    user = Message(role="user", text="a")
    turns = [Message(role="assistant", text="b ", reasoning="hm", tool_calls=(call,))]
    turns += [Message(role="assistant", text="b", tool_calls=(again,))]
    codes = {SEAL.codes([user, turn, late])[-1] for turn in turns}
    assert len(codes) == 1
    assert codes != {SEAL.codes([user, turns[0], late], "tenant")[-1]}
