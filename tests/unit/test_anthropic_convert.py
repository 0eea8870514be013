"""What becomes of the turns of a Messages request: exact messages, and what is refused."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import msgspec
import pytest

from api.anthropic.breakpoints import Breakpoints
from api.anthropic.convert import ConversionContext, count_to_generate
from api.anthropic.schemas import CountRequest, ImageBlock, InputMessage, Source, picture_at
from api.anthropic.signature import MAX_BYTES, reasoning_in, sign
from api.anthropic.transcript import Transcript
from api.http.expansion import Expansion
from api.http.past import STRICT
from runtime.config.settings import Settings
from runtime.types import (
    ChatPrompt,
    Image,
    Message,
    ToolCall,
)
from tests.anthropic_requests import (
    EPHEMERAL,
    HOUR,
    LOOK,
    SPEC,
    USER,
    asked,
    assistant,
    messages_of,
    refused,
    text,
    user,
)

# Messages


def test_what_is_null_was_not_given() -> None:
    signed = {"type": "thinking", "thinking": None, "signature": sign("hm")}
    call = {"type": "tool_use", "id": "t", "name": "look", "input": None}
    found = {"type": "search_result", "source": None, "title": None, "content": [text("a")]}
    read = messages_of(user(found | {"cache_control": {"type": None}}), assistant(signed, call))
    assert read == [
        Message(role="user", text="a").kept(300.0),
        Message(
            role="assistant",
            reasoning="hm",
            tool_calls=(ToolCall(id="t", name="look", arguments="{}"),),
        ),
    ]


def test_a_text_is_the_same_as_one_block_of_it() -> None:
    plain = messages_of(USER, {"role": "assistant", "content": "yes"}, system="Be kind.")
    blocks = messages_of(user(text("hi")), assistant(text("yes")), system=[text("Be kind.")])
    assert plain == blocks
    assert plain == [
        Message(role="system", text="Be kind."),
        Message(role="user", text="hi"),
        Message(role="assistant", text="yes"),
    ]


def test_each_system_block_is_a_message_of_its_own_and_empty_ones_are_none() -> None:
    system = [text("x-anthropic-billing-header: cc_version=1;"), text(""), text("Be kind.")]
    assert messages_of(USER, system=system)[:-1] == [
        Message(role="system", text="x-anthropic-billing-header: cc_version=1;"),
        Message(role="system", text="Be kind."),
    ]
    for nothing in ("", [], None):
        assert messages_of(USER, system=nothing) == [Message(role="user", text="hi")]


def test_a_system_message_stays_where_it_is_said() -> None:
    turns = [USER, {"role": "system", "content": [text("Date: today", cache_control=EPHEMERAL)]}]
    kept = Message(role="system", text="Date: today").kept(300.0)
    assert messages_of(*turns) == [Message(role="user", text="hi"), kept]


def test_texts_of_a_user_are_lines_and_those_of_an_assistant_one_text() -> None:
    turns = [user(text("a"), text("b")), assistant(text("c"), text("d"))]
    assert [message.text for message in messages_of(*turns)] == ["a\nb", "cd"]


def test_a_tool_round_trip_keeps_ids_and_the_arguments_as_they_were_written() -> None:
    body = (
        b'{"messages":[{"role":"assistant","content":[{"type":"text","text":"Well."},'
        b'{"type":"tool_use","id":"toolu_1","name":"look","input":{"b" : 1.50, "a":"\\u00e4"}}]},'
        b'{"role":"user","content":[{"type":"tool_result","tool_use_id":"toolu_1",'
        b'"content":"nothing","is_error":true},{"type":"text","text":"And?"}]}]}'
    )
    data = msgspec.json.decode(body, type=CountRequest)
    prompt = count_to_generate(
        data, "c", ConversionContext(SPEC, Settings(home=Path("/n")))
    ).request.prompt
    assert isinstance(prompt, ChatPrompt)
    call = ToolCall(id="toolu_1", name="look", arguments='{"b" : 1.50, "a":"\\u00e4"}')
    assert prompt.messages == (
        Message(role="assistant", text="Well.", tool_calls=(call,)),
        Message(role="tool", text="nothing", tool_call_id="toolu_1", is_error=True),
        Message(role="user", text="And?"),
    )


def test_tool_results_keep_their_order_and_what_is_said_between_them() -> None:
    def result(name: str, content: Any) -> dict[str, Any]:
        return {"type": "tool_result", "tool_use_id": name, "content": content}

    turn = user(result("2", [text("x"), text("y")]), text("wait"), result("1", None))
    assert messages_of(turn) == [
        Message(role="tool", text="x\ny", tool_call_id="2"),
        Message(role="user", text="wait"),
        Message(role="tool", tool_call_id="1"),
    ]


def test_a_tool_reference_loads_its_tool_where_it_stands() -> None:
    content = [{"type": "tool_reference", "tool_name": name} for name in ("WebFetch", "Monitor")]
    turn = user({"type": "tool_result", "tool_use_id": "t", "content": content})
    assert messages_of(turn) == [
        Message(role="tool", tool_call_id="t", loaded_tools=("WebFetch", "Monitor"))
    ]


def test_thoughts_come_back_from_their_signature_though_they_were_not_shown() -> None:
    thoughts = "First é,\nthen 😀."
    for shown in ("", thoughts, "a summary"):
        block = {"type": "thinking", "thinking": shown, "signature": sign(thoughts)}
        (message,) = messages_of(assistant(block, text("Done.")))
        assert message == Message(role="assistant", text="Done.", reasoning=thoughts)
    shown_only = {"type": "thinking", "thinking": "hm", "signature": "EqQBCg=="}
    assert messages_of(assistant(shown_only))[0].reasoning == "hm"
    foreign = asked(messages=[assistant(shown_only | {"thinking": ""}, text("x")), USER])
    assert foreign.ignored == ("messages[0].content[0].signature",)


@pytest.mark.parametrize(
    "damaged", ["", "hearth1.", "hearth1.!", "hearth1.aGVq", sign("thought")[:-6], "x" + sign("t")]
)
def test_a_damaged_signature_has_no_thoughts(damaged: str) -> None:
    assert reasoning_in(damaged, Expansion(MAX_BYTES), "p") is None


def test_a_signature_cannot_swell_without_bound() -> None:
    whole = Expansion(2 * MAX_BYTES)
    assert reasoning_in(sign("x" * MAX_BYTES), whole, "p") == "x" * MAX_BYTES
    assert reasoning_in(sign("x" * (MAX_BYTES + 1)), Expansion(2 * MAX_BYTES), "p") is None


def test_what_says_nothing_to_a_model_is_left_out_and_named() -> None:
    fallback = {"type": "fallback", "from": {"model": "a"}, "to": {"model": "b"}}
    turns = [
        user(text("hi")),
        assistant({"type": "redacted_thinking", "data": "ab"}, fallback),
        USER,
    ]
    given = asked(messages=turns, safeguards=[{"type": "x"}], betas=["b"], anthropic_version="v")
    assert given.ignored == (
        "safeguards",
        "messages[1].content[0] (redacted_thinking)",
        "messages[1].content[1] (fallback)",
    )
    assert isinstance(given.request.prompt, ChatPrompt)
    assert given.request.prompt.messages[0] == Message(role="user", text="hi")


@pytest.mark.parametrize("kind", ["container_upload", "server_tool_use", "glow"])
def test_a_block_that_a_model_would_read_and_nobody_knows_is_refused(kind: str) -> None:
    param, message = refused(messages=[user(text("hi"), {"type": kind})])
    assert param == "messages[0].content[1]"
    assert kind in message


def test_text_documents_and_search_results_are_text() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "Once."}
    document = {"type": "document", "source": source, "title": "Tale", "citations": {}}
    result = {"type": "search_result", "source": "s", "title": "t", "content": [text("c")]}
    assert messages_of(user(document, result))[0].text == "Tale\nOnce.\nt\ns\nc"


@pytest.mark.parametrize("content", ["Once.\nThere was.", [text("Once."), text("There was.")]])
def test_a_document_of_blocks_is_the_text_of_them(content: Any) -> None:
    document = {"type": "document", "source": {"type": "content", "content": content}}
    said = [text("Read:"), document | {"title": "Tale", "context": "A book"}]
    wanted = "Read:\nTale\nA book\nOnce.\nThere was."
    assert messages_of(user(*said))[0].text == wanted
    result = {"type": "tool_result", "tool_use_id": "t", "content": said}
    assert messages_of(user(result))[0].text == wanted


@pytest.mark.parametrize(
    ("source", "place"),
    [
        ({"type": "base64", "media_type": "application/pdf", "data": "eA=="}, ""),
        ({"type": "file", "file_id": "f"}, ""),
        ({"type": "url", "url": "https://example.org/a.pdf"}, ""),
        ({"type": "content"}, ""),
        ({"type": "text", "media_type": "text/plain"}, ""),
        (
            {"type": "content", "content": [{"type": "tool_reference", "tool_name": "x"}]},
            ".source.content[0]",
        ),
    ],
)
def test_a_document_that_is_no_text_is_refused_by_its_part(source: Any, place: str) -> None:
    document = {"type": "document", "source": source}
    param, message = refused(messages=[user(text("Read:"), document)])
    assert param == f"messages[0].content[1]{place}"
    assert "document" in message


# Pictures


def test_a_picture_is_refused_by_name_for_a_model_that_reads_text_only() -> None:
    data = base64.b64encode(b"png").decode()
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    param, message = refused(messages=[user(text("what?"), image)])
    assert param == "messages[0].content[1]"
    assert "reads text only" in message
    result = {"type": "tool_result", "tool_use_id": "t", "content": [text("see"), image]}
    made = asked(messages=[user(result)])
    (told,) = made.ignored
    assert told.startswith("messages[0].content[0].content[1] is an image")
    assert [one.is_lost for one in messages_of(user(result))[0].images] == [True]


def test_a_picture_stays_among_the_words_of_an_assistant() -> None:
    transcript = Transcript(Breakpoints(), Expansion(0))
    source = {"type": "base64", "media_type": "image/png", "data": "eA=="}
    turn = assistant(text("ab"), text("cd"), {"type": "image", "source": source}, text("ef"))
    read = msgspec.json.decode(msgspec.json.encode(turn), type=InputMessage)
    transcript.add(read, "messages[0]", STRICT)
    (said,) = transcript.messages
    assert (said.text[: said.images[0].at], said.text) == ("abcd", "abcdef")


def test_a_picture_is_its_bytes_or_where_they_are() -> None:
    data = base64.b64encode(b"\x89PNG").decode()
    inside = ImageBlock(Source("base64", "image/png", data))
    assert picture_at(inside, 3, "f") == Image(at=3, field="f", data=b"\x89PNG")
    outside = ImageBlock(Source("url", url="https://example.org/a.png"))
    assert picture_at(outside, 0, "f") == Image(at=0, field="f", url="https://example.org/a.png")


@pytest.mark.parametrize(
    ("source", "param"),
    [
        ({"type": "base64", "media_type": "image/png", "data": "%"}, "[0]"),
        ({"type": "base64", "media_type": "image/png"}, "[0].source.data"),
        ({"type": "url"}, "[0].source.url"),
        ({"type": "url", "url": "file:///etc/passwd"}, "[0]"),
        ({"type": "file", "file_id": "file_1"}, "[0].source"),
    ],
)
def test_a_picture_that_cannot_be_had_is_refused(source: Any, param: str) -> None:
    field, _ = refused(messages=[user({"type": "image", "source": source})])
    assert field == f"messages[0].content{param}"


# Breakpoints


def places_of(message: Message) -> list[tuple[str, float]]:
    """What of its text is before each breakpoint, and how long that is kept."""
    return [(message.text[: point.at], point.keep_s) for point in message.breakpoints]


def test_a_breakpoint_stands_behind_its_block_and_not_behind_its_message() -> None:
    call = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    inside = [text("r", cache_control=HOUR), text("s")]
    result = {"type": "tool_result", "tool_use_id": "t", "content": inside}
    read = messages_of(
        user(text("a"), text("b", cache_control=EPHEMERAL), text("c")),
        assistant(text("x"), call | {"cache_control": EPHEMERAL}, call | {"id": "u"}),
        user(result),
    )
    assert [places_of(message) for message in read] == [
        [("a\nb", 300.0)],
        [("x", 300.0)],
        [("r", 3600.0)],
    ]
    assert read[1].breakpoints[0].num_calls == 1


def test_breakpoints_become_how_long_what_is_before_them_is_kept() -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": [text("r")]}
    given = asked(
        tools=[LOOK | {"cache_control": HOUR}],
        system=[text("a"), text("b", cache_control=EPHEMERAL)],
        messages=[
            user(text("c", cache_control={"type": "ephemeral", "ttl": "5m"}), text("d")),
            user(result | {"cache_control": HOUR}),
        ],
    )
    assert isinstance(given.request.prompt, ChatPrompt)
    assert [tool.keep_s for tool in given.request.prompt.tools] == [3600.0]
    assert [places_of(message) for message in given.request.prompt.messages] == [
        [],
        [("b", 300.0)],
        [("c", 300.0)],
        [("r", 3600.0)],
    ]
    assert given.has_breakpoints
    assert not asked().has_breakpoints


def test_a_breakpoint_at_the_top_stands_behind_the_last_message() -> None:
    turns = [USER, {"role": "assistant", "content": "x"}, USER]
    kept = [places_of(message) for message in messages_of(*turns, cache_control=HOUR)]
    assert kept == [[], [], [("hi", 3600.0)]]


def test_four_breakpoints_are_served_and_a_fifth_is_refused() -> None:
    system = [text("s", cache_control=EPHEMERAL) for _ in range(4)]
    assert asked(system=system).has_breakpoints
    fifth = [user(text("u", cache_control=EPHEMERAL))]
    param, message = refused(system=system, messages=fifth)
    assert param == "messages[0].content[0].cache_control"
    assert "a maximum of 4 blocks with cache_control may be provided" in message
    assert refused(system=system, cache_control=EPHEMERAL)[0] == "cache_control"


# Refusals


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": ""}]}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [user({"type": "text"})]}, "messages[0].content[0].text"),
        ({"messages": [user({"text": "x"})]}, "messages[0].content[0].type"),
        ({"messages": [user("x")]}, "messages[0].content[0]"),
        ({"messages": [user(text(["x"]))]}, "messages[0].content[0].text"),  # pyright: ignore[reportArgumentType]
        (
            {"messages": [user({"type": "tool_use", "id": "1", "name": "n"})]},
            "messages[0].content[0]",
        ),
        (
            {"messages": [assistant({"type": "tool_result", "tool_use_id": "1"})]},
            "messages[0].content[0]",
        ),
        ({"messages": [user({"type": "thinking", "thinking": "x"})]}, "messages[0].content[0]"),
        (
            {"messages": [assistant({"type": "tool_use", "id": "1", "name": "n", "input": []})]},
            "messages[0].content[0].input",
        ),
        (
            {"messages": [user({"type": "document", "source": {"type": "url", "url": "u"}})]},
            "messages[0].content[0]",
        ),
        ({"system": [{"type": "thinking", "thinking": ""}]}, "system[0]"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tools": [LOOK | {"input_schema": [1]}]}, "tools[0].input_schema"),
        ({"tools": [LOOK | {"input_schema": {"type": "array"}}]}, "tools[0].input_schema.type"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [LOOK], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [LOOK], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["x"] * 65}, "stop_sequences"),
        ({"stop_sequences": ["x" * 8000, "y" * 193]}, "stop_sequences"),
        ({"output_format": {"type": "regex"}}, "output_format.type"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": 1}}},
            "output_config.format.schema",
        ),
        ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control.ttl"),
    ],
)
def test_what_cannot_be_served_is_refused_by_its_path(fields: Any, param: str) -> None:
    field, message = refused(**fields)
    assert field == param, message
    assert message.startswith(param)
