"""A request without tools goes on with those of its own conversation, and with nobody else's."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.http.limits import narrowed
from runtime.config.limits import GenerateLimits
from runtime.config.settings import ModelSettings, Settings
from runtime.prompt.kept_tools import packed, with_tools_of
from runtime.supervisor.supervision_rules import with_settings
from runtime.types import ChatPrompt, GenerateRequest, Message, ModelSpec, Tool, ToolChoice
from runtime.worker.input.compose import Composed
from runtime.worker.input.explain import explain
from runtime.worker.input.kept import leaves_room
from runtime.worker.input.template import Template
from runtime.worker.input.turns import TurnStore
from runtime.worker.output.dialect import Dialect
from store.heads import Whom as HeadsOf
from store.keyed_names import Whom, conversation_key
from tests.kept_turns import SECRET, KeptHeads
from tests.templates import template_of
from tests.unit.test_compose import END, LOOK, SYSTEM, USER, Talk

CALLS = Dialect(tool_start="<tool_call>", tool_end="</tool_call>")
SAID = Message(role="assistant", text="rain falls")
RAW = f"<think>\nlet me\n</think>\n\nrain falls{END}"
SUMMARISE = Message(role="user", text="Summarise all of this.")
SCHEMA = {"type": "object", "properties": {"at": {"type": "integer"}, "why": {"type": "string"}}}
TURNED = {"properties": {"why": {"type": "string"}, "at": {"type": "integer"}}, "type": "object"}
READ = Tool(name="read", description="Read.", parameters=json.dumps(SCHEMA))
READ_ANEW = msgspec.structs.replace(READ, parameters=json.dumps(TURNED))


@pytest.fixture(params=["chatml", "qwen3"])
def talk(request, tmp_path: Path) -> Talk:
    return Talk(template_of(tmp_path, request.param), TurnStore(), dialect=CALLS)


def rules(composed: Composed) -> dict[str, int]:
    return {one.rule: one.num_places for one in composed.changes}


def begun(
    talk: Talk, session: str | None = "s", tools: tuple[Tool, ...] = (LOOK, READ)
) -> list[int]:
    """A turn of a conversation with tools: all of its tokens."""
    return talk.says(talk.compose(SYSTEM, USER, session=session, tools=tools), RAW, "rain falls")


def summary(talk: Talk, session: str | None = "s", **fields) -> Composed:
    """What a client asks that sends its whole conversation and no tools."""
    return talk.compose(SYSTEM, USER, SAID, SUMMARISE, session=session, tools=(), **fields)


@pytest.mark.parametrize("session", ["s", None])
def test_a_request_without_tools_goes_on_from_all_tokens_of_its_conversation(
    talk: Talk, session: str | None
):
    before = begun(talk, session)
    composed = summary(talk, session)
    assert composed.token_ids[: len(before)] == before
    assert rules(composed) == {"kept_tools": 2, "healed_turn": 1} | rules(composed)
    assert composed.reason is None
    assert composed.asked is not None
    assert composed.asked.prompt.tools == (LOOK, READ)
    assert composed.asked.prompt.tool_choice.mode == "none"


@pytest.mark.parametrize("name", ["gemma", "smollm2", "alternating"])
def test_tools_that_are_given_as_text_are_kept_as_well(tmp_path: Path, name: str):
    talk = Talk(template_of(tmp_path, name), TurnStore(), dialect=Dialect())
    before = begun(talk)
    composed = summary(talk)
    assert composed.token_ids[: len(before)] == before
    assert {"kept_tools", "generic_tools"} <= rules(composed).keys()


def test_it_goes_on_without_and_again_with_tools(talk: Talk):
    begun(talk)
    first = talk.says(summary(talk), f"It rained.{END}", "It rained.")
    answer = Message(role="assistant", text="It rained.")
    asked = (SYSTEM, USER, SAID, SUMMARISE, answer, USER)
    bare = talk.compose(*asked, session="s", tools=())
    assert bare.token_ids[: len(first)] == first
    assert "kept_tools" in rules(bare)
    again = talk.compose(*asked, session="s", tools=(LOOK, READ))
    assert again.token_ids == bare.token_ids
    assert "kept_tools" not in rules(again)


@pytest.mark.parametrize(
    ("session", "model", "tenant", "reason"),
    [
        ("another", "m", "", "tools_removed"),
        (None, "m", "", "tools_removed"),
        ("s", "n", "", "tools_removed"),
        ("s", "m", "bob", None),
    ],
)
def test_nobody_is_shown_the_tools_of_another_conversation(
    talk: Talk, session: str | None, model: str, tenant: str, reason: str | None
):
    begun(talk)
    composed = summary(talk, session, model=model, tenant=tenant)
    assert "look" not in talk.text_of(composed.token_ids)
    assert not rules(composed).keys() & {"kept_tools", "healed_turn"}
    assert composed.reason == reason


def test_a_conversation_that_never_had_tools_gets_none_though_it_reads_the_same(talk: Talk):
    begun(talk, None)
    talk.says(talk.compose(SYSTEM, USER, tools=()), RAW, "rain falls")
    composed = summary(talk, None)
    assert rules(composed) == {"healed_turn": 1} | rules(composed)
    assert "kept_tools" not in rules(composed)
    assert composed.reason is None


def test_whose_tools_they_would_be_is_not_guessed(talk: Talk):
    begun(talk, None, (LOOK,))
    begun(talk, None, (READ,))
    composed = summary(talk, None)
    assert "kept_tools" not in rules(composed)
    assert composed.reason == "tools_removed"


def test_of_a_session_that_changed_its_tools_the_last_ones_count(talk: Talk):
    begun(talk, tools=(LOOK,))
    after = talk.compose(SYSTEM, USER, SAID, USER, session="s", tools=(READ,))
    before = talk.says(after, RAW, "rain falls")
    messages = (SYSTEM, USER, SAID, USER, SAID, SUMMARISE)
    composed = talk.compose(*messages, session="s", tools=())
    assert composed.token_ids[: len(before)] == before


@pytest.mark.parametrize(
    "edited",
    [
        (Message(role="system", text="Be long."), USER, SAID),
        (SYSTEM, Message(role="user", text="the slow brown fox"), SAID),
        (SYSTEM, USER, Message(role="assistant", text="rain fell")),
    ],
)
def test_what_does_not_go_on_from_the_conversation_gets_nothing_of_it(talk: Talk, edited):
    begun(talk)
    composed = talk.compose(*edited, SUMMARISE, session="s", tools=())
    assert "kept_tools" not in rules(composed)
    assert composed.reason is None


def test_it_survives_a_restart_and_goes_with_its_conversation(tmp_path: Path):
    template = template_of(tmp_path, "chatml")
    heads = KeptHeads(tmp_path / "kv")
    talk = Talk(template, heads.turns(), heads, dialect=CALLS)
    before = begun(talk)
    more = talk.compose(SYSTEM, USER, SAID, USER, session="s", tools=(LOOK, READ))
    before = talk.says(more, RAW, "rain falls")
    later = Talk(template, heads.turns(), dialect=CALLS)
    messages = (SYSTEM, USER, SAID, USER, SAID, SUMMARISE)
    composed = later.compose(*messages, session="s", tools=())
    assert composed.token_ids[: len(before)] == before
    assert rules(composed)["kept_tools"] == 2
    heads.heads.delete(HeadsOf(session=conversation_key(SECRET, "s")))
    later.store.forget(Whom(session_id="s"), SECRET)
    assert "kept_tools" not in rules(later.compose(*messages, session="s", tools=()))


def test_where_calls_cannot_be_forbidden_or_one_is_demanded_nothing_is_shown(talk: Talk):
    begun(talk)
    talk.composer.dialect = Dialect()
    composed = summary(talk)
    assert (rules(composed).get("kept_tools"), composed.reason) == (None, "tools_removed")
    talk.composer.dialect = CALLS
    demanding = summary(talk, tool_choice=ToolChoice(mode="required"))
    assert "kept_tools" not in rules(demanding)


def test_tools_that_were_not_sent_leave_room_for_a_summary(talk: Talk):
    begun(talk)
    num_tokens = len(summary(talk).token_ids)
    # The least context that leaves a sixteenth of itself.
    least = next(n for n in range(num_tokens, 2 * num_tokens) if n - num_tokens >= n // 16)
    for context, max_tokens, has_tools in (
        (least, None, True),
        (least - 1, None, False),
        (num_tokens + 9, 9, True),
        (num_tokens + 9, 10, False),
    ):
        talk.composer.context = context
        composed = summary(talk, max_tokens=max_tokens)
        reason = None if has_tools else "tools_removed"
        assert (rules(composed).get("kept_tools"), composed.reason) == (
            2 * has_tools or None,
            reason,
        )
        assert (len(composed.token_ids) == num_tokens) == has_tools


@pytest.mark.parametrize(
    ("context", "max_tokens", "least"),
    [
        (2048, None, 128),  # a sixteenth
        (65_536, None, 4096),
        (262_144, None, 4096),  # which is enough for any summary
        (65_536, 500, 500),  # its own word
        (65_536, 5000, 5000),
        (65_536, 32_000, 8192),  # of what is always asked for, an eighth
    ],
)
def test_room_for_a_summary_is_what_the_request_may_say_or_a_sixteenth(
    context: int, max_tokens: int | None, least: int
):
    request = GenerateRequest(
        request_id="r", model="m", prompt=ChatPrompt(()), max_tokens=max_tokens
    )
    assert leaves_room(context - least, context, request)
    assert not leaves_room(context - least + 1, context, request)


@pytest.mark.parametrize(("max_tokens", "least"), [(1024, 128), (100, 100)])
def test_a_default_of_the_server_is_no_wish_for_an_answer_of_that_length(
    max_tokens: int, least: int
):
    request = GenerateRequest(request_id="r", model="m", prompt=ChatPrompt(()))
    spec = ModelSpec(id="m", path="/m", context=2048, model_type="t", nbytes=1, created_s=1)
    models = {"m": ModelSettings(max_tokens=max_tokens)}
    by_model = with_settings(request, spec, Settings(home=Path("/nowhere"), models=models))
    by_route = narrowed(request, GenerateLimits(output_tokens=max_tokens))
    for usual in (by_model, with_settings(by_route, spec, Settings(home=Path("/nowhere")))):
        assert usual.max_tokens == max_tokens
        assert leaves_room(2048 - least, 2048, usual)
        assert not leaves_room(2048 - least + 1, 2048, usual)
    asked = msgspec.structs.replace(request, max_tokens=1024)
    assert not leaves_room(2048 - 255, 2048, narrowed(asked, GenerateLimits(output_tokens=1024)))


def test_who_only_counts_is_told_of_what_was_sent(talk: Talk):
    begun(talk)
    assert "kept_tools" not in rules(summary(talk, work="count"))


def test_the_rule_can_be_switched_off(talk: Talk):
    talk.composer.rules_off = frozenset({"kept_tools"})
    begun(talk)
    composed = summary(talk)
    assert (rules(composed).get("kept_tools"), composed.reason) == (None, None)


def test_the_explained_prompt_says_whose_the_tools_are(talk: Talk):
    begun(talk)
    composed = summary(talk)
    explained = explain(talk.composer, composed)
    assert explained.token_ids == tuple(composed.token_ids)
    first = explained.parts[0]
    assert first.sources[0] == "tools of the conversation"
    assert "kept_tools" in first.rules


def test_keys_in_another_order_are_read_in_that_of_the_conversation(talk: Talk):
    before = begun(talk)
    asked = (SYSTEM, USER, SAID, USER)
    for session in ("s", None):
        composed = talk.compose(*asked, session=session, tools=(LOOK, READ_ANEW))
        assert composed.token_ids[: len(before)] == before
        assert rules(composed)["tool_spelling"] == 1
    as_sent = talk.compose(*asked, session="s", tools=(LOOK, READ))
    assert "tool_spelling" not in rules(as_sent)


def test_tools_in_another_order_are_read_in_that_of_the_conversation(talk: Talk):
    before = begun(talk)
    asked = (SYSTEM, USER, SAID, USER)
    for tools, num_places in {(READ, LOOK): 2, (READ_ANEW, LOOK): 2, (LOOK, READ): 0}.items():
        composed = talk.compose(*asked, session="s", tools=tools)
        assert composed.token_ids[: len(before)] == before
        assert rules(composed).get("tool_spelling", 0) == num_places
        assert composed.asked is not None
        assert composed.asked.prompt.tools == (LOOK, READ)
    fewer = talk.compose(*asked, session="s", tools=(READ,))
    assert "tool_spelling" not in rules(fewer)


def test_a_conversation_keeps_the_order_in_which_it_is_known_itself(talk: Talk):
    begun(talk, "a", (READ_ANEW,))
    mine = begun(talk, "b", (READ,))
    composed = talk.compose(SYSTEM, USER, SAID, USER, session="b", tools=(READ,))
    assert composed.token_ids[: len(mine)] == mine
    assert "tool_spelling" not in rules(composed)


@pytest.mark.parametrize(
    "parameters",
    [
        '{"type": "object", "properties": {"at": {"type": "number"}, "why": {"type": "string"}}}',
        '{"type": "object", "properties": {"at": {"type": "integer"}}}',
        "not JSON",
    ],
)
def test_tools_that_differ_in_more_are_read_as_they_were_sent(talk: Talk, parameters: str):
    begun(talk)
    other = msgspec.structs.replace(READ, parameters=parameters)
    prompt = ChatPrompt(messages=(USER,), tools=(LOOK, other))
    assert with_tools_of(prompt, packed((LOOK, READ)), can_forbid=True) is None
    described = msgspec.structs.replace(READ_ANEW, description="Read it.")
    prompt = ChatPrompt(messages=(USER,), tools=(LOOK, described))
    assert with_tools_of(prompt, packed((LOOK, READ)), can_forbid=True) is None


def test_a_spelling_changes_no_more_than_the_text_of_a_schema():
    strict = msgspec.structs.replace(READ_ANEW, is_strict=True, keep_s=300.0)
    prompt = ChatPrompt(messages=(USER,), tools=(LOOK, strict))
    changed = with_tools_of(prompt, packed((LOOK, READ)), can_forbid=False)
    assert changed is not None
    spelled = msgspec.structs.replace(strict, parameters=READ.parameters)
    assert changed.prompt == msgspec.structs.replace(prompt, tools=(LOOK, spelled))


@cache
def chatml() -> Template:
    with TemporaryDirectory() as folder:
        return template_of(Path(folder), "chatml")


@dataclass
class Client:
    """A conversation as its client has it: session, model and tenant, and what was said."""

    whose: tuple[str | None, str, str]
    messages: list[Message] = field(default_factory=lambda: [SYSTEM])


SESSIONS, MODELS, TENANTS = map(st.sampled_from, ((None, "a", "b"), ("m", "n"), ("", "t")))
WHOSE = st.tuples(SESSIONS, MODELS, TENANTS)
ASKED = st.tuples(
    st.integers(0, 3),
    st.sampled_from([(), ("hammer",), ("needle",), ("hammer", "needle")]),
    st.sampled_from(["a", "b"]),
    st.none() | st.integers(0, 3),
)


@given(whose=st.lists(WHOSE, min_size=4, max_size=4), asks=st.lists(ASKED, max_size=12))
def test_tools_are_of_this_request_or_of_its_own_conversation(
    whose: list[tuple[str | None, str, str]],
    asks: list[tuple[int, tuple[str, ...], str, int | None]],
):
    """Conversations that read the same, asked with and without tools, by several askers, some of
    which go on from what another one has.

    The model of it: for whoever asks, all sets of tools that a conversation with these messages was
    asked with by the same.
    """
    talk = Talk(chatml(), TurnStore(), needs_state=False, dialect=CALLS)
    clients = [Client(one) for one in whose]
    had: dict[tuple[object, ...], set[tuple[str, ...]]] = {}
    for number, names, question, copied in asks:
        client = clients[number]
        if copied is not None:
            client.messages = list(clients[copied].messages)
        session, model, tenant = client.whose
        client.messages.append(Message(role="user", text=question))
        tools = tuple(Tool(name=name, description="x") for name in names)
        composed = talk.compose(
            *client.messages, session=session, model=model, tenant=tenant, tools=tools
        )
        text = talk.text_of(composed.token_ids)
        shown = tuple(name for name in ("hammer", "needle") if name in text)
        before = [client.messages[:end] for end in range(1, len(client.messages))]
        known = [had.get((client.whose, *map(msgspec.json.encode, one)), set()) for one in before]
        assert shown == names or (not names and shown in set().union(*known))
        assert (shown != names) == ("kept_tools" in rules(composed))
        talk.says(composed, f"Noted.{END}", "Noted.")
        client.messages.append(Message(role="assistant", text="Noted."))
        had.setdefault((client.whose, *map(msgspec.json.encode, client.messages)), set()).add(shown)
