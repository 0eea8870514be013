"""Agents' configs, merges and messages, by exact values."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.agents import convert
from api.agents.convert import Sent
from api.agents.schemas import AgentConfig, AgentCreate, AgentFork, AgentGenerate
from api.http.draft import Draft
from api.openai.schemas import CalledCustom, CalledTool
from runtime.errors import InvalidRequest, StoreUnavailable
from runtime.types import (
    Breakpoint,
    ChatPrompt,
    Chunk,
    Finished,
    GenerateRequest,
    Image,
    Message,
    ReasoningDelta,
    TextDelta,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from store.history.agent_rows import TurnRow


def sent(kind: type[msgspec.Struct] = AgentConfig, **fields: object) -> Sent:
    return convert.sent_fields(json.dumps(fields).encode(), kind)


def test_null_is_not_given_and_unknown_fields_are_left_out():
    fields = sent(system="s", temperature=None, colour="red", id="x")
    assert {name: bytes(raw) for name, raw in fields.given.items()} == {"system": b'"s"'}
    assert fields.cleared == {"temperature"}


def test_a_system_prompt_has_two_names_of_which_one_is_sent():
    config = convert.config_of(sent(system_prompt="s", persist=False))
    assert json.loads(config) == {"system": "s", "persist": False}
    assert json.loads(convert.config_of(sent(system_prompt=None), config)) == {"persist": False}
    with pytest.raises(InvalidRequest) as caught:
        sent(system="s", system_prompt="s")
    assert caught.value.param == "system_prompt"


def test_an_id_has_two_names_that_must_agree():
    assert convert.wanted_id(AgentCreate(agent_id="a")) == "a"
    assert convert.wanted_id(AgentFork(id="a", agent_id="a")) == "a"
    assert convert.wanted_id(AgentCreate()) is None
    with pytest.raises(InvalidRequest) as caught:
        convert.wanted_id(AgentCreate(id="a", agent_id="b"))
    assert caught.value.param == "agent_id"
    assert convert.sent_fields(b'{"agent_id": "a"}', AgentCreate).unused == ()


def test_a_change_adds_replaces_and_takes_away():
    before = convert.config_of(sent(system="s", temperature=0, max_tokens=5))
    after = convert.config_of(sent(temperature=1, max_tokens=None, top_p=0.5), before)
    assert json.loads(after) == {"system": "s", "temperature": 1, "top_p": 0.5}


def test_what_is_of_one_generate_is_no_config():
    config = convert.config_of(sent(stream=True, n=3, messages=[], temperature=0))
    assert json.loads(config) == {"temperature": 0}


def test_a_schema_keeps_its_spelling_so_that_the_prefix_stays():
    body = b'{"tools":[{"type":"function","function":{"name":"f","parameters":{"b": 1,  "a":2}}}]}'
    config = convert.config_of(convert.sent_fields(body, AgentConfig))
    chat = convert.probe_of(config)
    assert chat.tools is not None
    assert chat.tools[0].function is not None
    assert bytes(chat.tools[0].function.parameters) == b'{"b": 1,  "a":2}'


def test_a_generate_says_what_differs_and_the_agent_the_rest():
    config = convert.config_of(sent(temperature=0, max_tokens=5, model="m", ttl=60, name="n"))
    wish = sent(AgentGenerate, messages=[{"role": "user", "content": "?"}], max_tokens=9)
    chat = convert.chat_of(config, wish)
    assert (chat.temperature, chat.max_tokens, chat.model, chat.ttl) == (0, 9, "m", 60)
    assert [message.content for message in chat.messages] == ["?"]


def test_several_answers_are_refused():
    wish = sent(AgentGenerate, messages=[{"role": "user", "content": "?"}], n=2)
    with pytest.raises(InvalidRequest) as caught:
        convert.chat_of(b"{}", wish)
    assert caught.value.param == "n"


def request(*messages: Message) -> GenerateRequest:
    return GenerateRequest(request_id="r", model="m", prompt=ChatPrompt(messages=messages))


def test_the_prompt_is_system_then_history_then_what_is_new():
    history = [Message(role="user", text="a"), Message(role="assistant", text="b")]
    whole, new = convert.with_history(request(Message(role="user", text="c")), "s", history)
    assert isinstance(whole.prompt, ChatPrompt)
    assert [message.text for message in whole.prompt.messages] == ["s", "a", "b", "c"]
    assert [message.text for message in new] == ["c"]
    bare, _ = convert.with_history(request(Message(role="user", text="c")), None, [])
    assert isinstance(bare.prompt, ChatPrompt)
    assert [message.role for message in bare.prompt.messages] == ["user"]


def test_a_tool_result_must_answer_a_call_of_the_history_or_before_it():
    call = ToolCall(id="call_1", name="f", arguments="{}")
    asked = Message(role="assistant", tool_calls=(call,))
    result = Message(role="tool", text="r", tool_call_id="call_1")
    convert.with_history(request(result), None, [asked])
    convert.with_history(request(asked, result), None, [])
    convert.with_history(request(Message(role="tool", text="r")), None, [])
    with pytest.raises(InvalidRequest) as caught:
        convert.with_history(request(Message(role="user"), result), None, [])
    assert caught.value.param == "messages[1].tool_call_id"


def test_an_answer_is_kept_as_its_chunks_said_it():
    draft = Draft()
    for chunk in (
        ReasoningDelta(index=0, text="\nhm "),
        ReasoningDelta(index=0, text="so\n"),
        TextDelta(index=0, text=" yes\n"),
        ToolCallDelta(index=0, call_index=0, arguments='{"a":', id="call_1", name="f"),
        ToolCallDelta(index=0, call_index=0, arguments=" 1 }"),
        Finished(index=0, reason="tool_calls", usage=Usage(num_prompt_tokens=3)),
    ):
        draft.add(chunk)
    kept = convert.unpacked(convert.packed(convert.answer_of(draft)))
    assert kept == Message(
        role="assistant",
        text=" yes\n",
        reasoning="\nhm so\n",
        tool_calls=(ToolCall(id="call_1", name="f", arguments='{"a": 1 }'),),
    )
    choice = convert.choice_of(draft)
    assert choice.message.reasoning_content == "\nhm so\n"
    assert choice.finish_reason == "tool_calls"


def test_the_call_of_a_custom_tool_is_its_text():
    draft = Draft(frozenset({"note"}))
    arguments = '{"input": "rain\\n"}'
    draft.add(ToolCallDelta(index=0, call_index=0, arguments=arguments, id="call_1", name="note"))
    called = CalledTool(id="call_1", type="custom", custom=CalledCustom("rain\n", "note"))
    assert convert.choice_of(draft).message.tool_calls == [called]
    body = convert.packed(convert.answer_of(draft))
    row = TurnRow(1, "r", "m", "tool_calls", 7, 5, 3, 1.5, (body,))
    assert convert.turn_view(row).messages[0].tool_calls == [called]


ASKED = Message(role="user", text="q")


@pytest.mark.parametrize("name", ["a\n", "a b", "../a", "a/b", "@bob/a", "", ".", "é", "a" * 129])
def test_what_is_no_id_of_an_agent_is_refused(name: str):
    body = json.dumps({"id": name})
    with pytest.raises(msgspec.ValidationError, match="id"):
        msgspec.json.decode(body, type=AgentCreate)


@pytest.mark.parametrize(
    ("last", "chunks", "kept"),
    [
        (
            Message(role="assistant", text="while", reasoning="hm"),
            [TextDelta(index=0, text=" it rains")],
            [Message(role="assistant", text="while it rains", reasoning="hm")],
        ),
        (
            Message(role="assistant", reasoning="hm"),
            [ReasoningDelta(index=0, text=" so"), TextDelta(index=0, text="a")],
            [Message(role="assistant", text="a", reasoning="hm so")],
        ),
        (
            Message(role="assistant", text="<think>hm"),
            [ReasoningDelta(index=0, text=" so"), TextDelta(index=0, text="a")],
            [
                Message(role="assistant", text="<think>hm"),
                Message(role="assistant", text="a", reasoning=" so"),
            ],
        ),
    ],
)
def test_an_answer_that_goes_on_is_one_message_with_its_beginning(
    last: Message, chunks: list[Chunk], kept: list[Message]
):
    draft = Draft()
    for chunk in chunks:
        draft.add(chunk)
    begun = ChatPrompt(messages=(ASKED, last), continues_last=True)
    assert convert.turn_of(begun, (ASKED, last), draft) == (ASKED, *kept)
    anew = ChatPrompt(messages=(ASKED, last))
    assert convert.turn_of(anew, (ASKED, last), draft)[:2] == (ASKED, last)


texts = st.text(st.characters(exclude_categories=["Cs"]))


@given(
    st.builds(
        Message,
        role=st.sampled_from(["system", "user", "assistant", "tool"]),
        text=texts,
        reasoning=st.none() | texts,
        tool_calls=st.lists(st.builds(ToolCall, id=texts, name=texts, arguments=texts)).map(tuple),
        tool_call_id=st.none() | texts,
        images=st.lists(
            st.builds(Image, at=st.integers(0, 9), field=texts, data=st.binary(), url=st.none())
        ).map(tuple),
        loaded_tools=st.lists(texts).map(tuple),
        breakpoints=st.lists(
            st.builds(Breakpoint, at=st.integers(0, 9), keep_s=st.floats(0, 1e6))
        ).map(tuple),
    )
)
def test_every_message_comes_back_from_the_store_as_it_was(message: Message):
    assert convert.unpacked(convert.packed(message)) == message


def test_a_damaged_message_is_no_message():
    with pytest.raises(StoreUnavailable):
        convert.unpacked(bytes(20))


def test_a_turn_is_shown_as_openai_would_have_it():
    picture = Image(at=4, field="messages[0].content[1]", data=b"\x89PNG")
    bodies = [
        Message(role="user", text="see this", images=(picture,)),
        Message(
            role="assistant",
            text="",
            reasoning="",
            tool_calls=(ToolCall(id="call_1", name="f", arguments="{}"),),
        ),
        Message(role="tool", text="r", tool_call_id="call_1"),
    ]
    row = TurnRow(2, "r", "m", "stop", 7, 5, 3, 1.5, tuple(map(convert.packed, bodies)))
    assert json.loads(msgspec.json.encode(convert.turn_view(row))) == {
        "turn": 2,
        "request_id": "r",
        "model": "m",
        "created_at": 1.5,
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 7, "cached_tokens": 5, "completion_tokens": 3},
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "see "},
                    {
                        "type": "image_url",
                        "image_url": {"url": "data:application/octet-stream;base64,iVBORw=="},
                    },
                    {"type": "text", "text": "this"},
                ],
            },
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": "",
                "tool_calls": [
                    {
                        "function": {"arguments": "{}", "name": "f"},
                        "id": "call_1",
                        "type": "function",
                    }
                ],
            },
            {"role": "tool", "content": "r", "tool_call_id": "call_1"},
        ],
    }


def test_a_config_is_bounded_as_a_whole_and_a_longer_one_may_only_shrink():
    half = "x" * (convert.MAX_CONFIG_BYTES // 2)
    before = convert.config_of(sent(system=half))
    with pytest.raises(InvalidRequest, match="at most 4194304 together") as caught:
        convert.config_of(sent(metadata={"a": half + "y"}), before)
    assert caught.value.param == "metadata"
    longer = json.dumps({"system": 2 * half, "user": "me", "suffix": half}).encode()
    assert convert.config_of(Sent({}, frozenset({"suffix"})), longer)
    with pytest.raises(InvalidRequest):
        convert.config_of(sent(user=half), longer)
