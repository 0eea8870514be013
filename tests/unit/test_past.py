"""What was sent before is never refused, whatever it is; and half a character is no character."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.anthropic.convert import ConversionContext, messages_to_generate
from api.anthropic.schemas import MessagesRequest
from api.http.body import decoded, decoded_conversation
from api.http.caller import Caller
from api.http.past import whole_characters, with_whole_characters
from api.http.unused import unused_fields
from api.ollama.convert import chat_request
from api.ollama.schemas import OllamaChatRequest
from api.openai.convert import chat_to_generate
from api.openai.response_schemas import ResponseRequest
from api.openai.schemas import ChatRequest
from api.responses.convert import check, items_of, plan_of
from runtime.config.settings import Settings
from runtime.errors import InvalidRequest
from runtime.prompt.past import UNSEEN, line_for, without_lost_images
from runtime.types import Breakpoint, ChatPrompt, Image, Message, ModelSpec
from tests.damaged import DAMAGES, HISTORIES, PNG, conversation, damaged

SPEC = ModelSpec(id="m", path="/m", context=8192, model_type="qwen3", nbytes=1, created_s=1)
SETTINGS = Settings(home=Path("/nowhere"))


class Asked:
    """A request as the runtime is asked it, and what of it is told to have no effect."""

    def __init__(self, messages: tuple[Message, ...], ignored: tuple[str, ...]) -> None:
        self.messages = messages
        self.ignored = ignored
        self.texts = [message.text for message in messages]


def asked(name: str, body: Any) -> Asked:
    """The request as its protocol's handler reads it. Raises InvalidRequest."""
    raw = with_whole_characters(json.dumps(body).encode())
    kind: type[Any] = {
        "chat": ChatRequest,
        "messages": MessagesRequest,
        "responses": ResponseRequest,
        "ollama": OllamaChatRequest,
    }[name]
    data, mended = decoded_conversation(raw.body, kind)
    unused = unused_fields(mended.body, kind)
    told: tuple[str, ...] = ()
    if name == "chat":
        request = chat_to_generate(data, "r", SPEC, SETTINGS)
    elif name == "ollama":
        request = chat_request(data, "r", SPEC, SETTINGS, Caller())
    elif name == "messages":
        read = messages_to_generate(data, "r", ConversionContext(SPEC, SETTINGS))
        request, told = read.request, read.ignored
    else:
        check(data)
        plan = plan_of(data, items_of(data), "r", SPEC, Caller(), SETTINGS)
        request, told = plan.request, plan.ignored
    assert isinstance(request.prompt, ChatPrompt)
    ignored = (*raw.ignored, *mended.ignored, *unused, *request.ignored, *told)
    return Asked(without_lost_images(request.prompt)[0].messages, ignored)


@pytest.mark.parametrize("name", HISTORIES)
@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.data())
def test_whatever_happened_to_the_past_it_is_read_and_so_is_all_that_is_whole(
    name: str, data: st.DataObject
) -> None:
    body = conversation(name, data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=3)))
    wish = data.draw(st.lists(st.tuples(st.integers(0, 10**6), DAMAGES), min_size=1, max_size=3))
    broken = damaged(body, HISTORIES[name][1], wish)
    text = "\n".join(asked(name, broken.body).texts)
    assert [word for word in broken.words if word not in text] == []


# Each thing that has ended sessions, by itself

HI = {"role": "user", "content": "hi"}
YES = {"role": "assistant", "content": "yes"}
PICTURE = f"data:image/png;base64,{PNG}"
PDF: dict[str, Any] = {
    "type": "document",
    "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0xLjc="},
}
BLOCK: dict[str, Any] = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": PNG},
}


def chat(content: Any) -> Any:
    return {"messages": [{"role": "user", "content": content}, YES, HI]}


def messages(content: Any, role: str = "user") -> Any:
    return {"max_tokens": 1, "messages": [{"role": role, "content": content}, YES, HI]}


def responses(*items: Any) -> Any:
    return {"input": [*items, HI, YES, HI]}


def called(arguments: Any) -> Any:
    function = {"name": "look", "arguments": arguments}
    call = {"role": "assistant", "tool_calls": [{"id": "c", "function": function}]}
    return {"messages": [HI, call, {"role": "tool", "tool_call_id": "c", "content": "a"}, HI]}


PAST: Mapping[str, tuple[str, Any, str]] = {
    "a picture for a model that reads text only": (
        "chat",
        chat([{"type": "image_url", "image_url": {"url": PICTURE}}]),
        UNSEEN,
    ),
    "a broken picture": ("messages", messages([{"type": "image", "source": {}}]), UNSEEN),
    "a file_id": (
        "messages",
        messages([{"type": "image", "source": {"type": "file", "file_id": "f"}}]),
        UNSEEN,
    ),
    "a file_id of responses": (
        "responses",
        responses({"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}),
        UNSEEN,
    ),
    "a PDF": ("messages", messages([PDF]), line_for("document")),
    "a file": ("chat", chat([{"type": "file", "file": {"file_id": "f"}}]), line_for("file")),
    "a server's tool": (
        "messages",
        messages([{"type": "server_tool_use", "id": "s", "name": "web_search"}], "assistant"),
        line_for("server_tool_use"),
    ),
    "an item of another server": (
        "responses",
        responses({"type": "web_search_call", "id": "w", "status": "completed"}),
        line_for("web_search_call"),
    ),
    "a summary of another server": (
        "responses",
        responses({"type": "compaction", "encrypted_content": "of theirs"}),
        line_for("compaction"),
    ),
    "a picture in a document's place": (
        "ollama",
        {"model": "m", "messages": [HI | {"images": ["%"]}, YES, HI]},
        UNSEEN,
    ),
    "an unknown role": ("chat", {"messages": [{"role": "wizard", "content": "ho"}, HI]}, "ho"),
    "a field that is refused": (
        "messages",
        {"max_tokens": 1, "messages": [HI | {"clear_at": 7}, YES, HI]},
        "hi",
    ),
}


@pytest.mark.parametrize("what", PAST)
def test_what_was_sent_before_becomes_a_line_and_is_told(what: str) -> None:
    name, body, line = PAST[what]
    read = asked(name, body)
    assert any(line in text for text in read.texts), read.texts
    assert read.ignored
    again = asked(name, body)
    assert (again.texts, again.ignored) == (read.texts, read.ignored)


def test_what_was_accepted_once_is_the_same_text_when_it_is_past() -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": [BLOCK, PDF]}
    use = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    said = [HI, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    now = asked("messages", {"max_tokens": 1, "messages": said})
    later = asked("messages", {"max_tokens": 1, "messages": [*said, YES, HI]})
    assert now.texts[-1] == f"{UNSEEN}\n{line_for('document')}"
    assert later.texts[: len(now.texts)] == now.texts
    output = {"type": "function_call_output", "call_id": "c"}
    output |= {"output": [{"type": "input_image", "image_url": PICTURE}]}
    call = {"type": "function_call", "call_id": "c", "name": "view_image", "arguments": "{}"}
    first = asked("responses", {"input": [HI, call, output]})
    then = asked("responses", {"input": [HI, call, output, YES, HI]})
    assert first.texts == ["hi", "", UNSEEN] == then.texts[:3]


def resulting(kind: str, **fields: Any) -> Any:
    """A conversation whose newest input is a tool's result with these fields."""
    call: dict[str, Any] = {"id": "c", "function": {"name": "look", "arguments": "{}"}}
    asking = [HI, {"role": "assistant", "tool_calls": [call]}]
    match kind:
        case "chat":
            return {"messages": [*asking, {"role": "tool", "tool_call_id": "c"} | fields]}
        case "ollama":
            call["function"]["arguments"] = {}
            result = {"role": "tool", "tool_name": "look"} | fields
            return {"model": "m", "messages": [*asking, result]}
        case "messages":
            use = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
            result = {"type": "tool_result", "tool_use_id": "c"} | fields
            said = [HI, {"role": "assistant", "content": [use]}]
            return {"max_tokens": 1, "messages": [*said, {"role": "user", "content": [result]}]}
        case _:
            made = {"call_id": "c", "name": "look", "arguments": "{}", "input": "x"}
            item = {"type": kind.removesuffix("_output")} | made
            return {"input": [HI, item, {"type": kind, "call_id": "c"} | fields]}


RESULTS: Mapping[str, tuple[str, ...]] = {
    "chat": ("content", "tool_call_id", "name"),
    "ollama": ("content", "tool_name", "images"),
    "messages": ("content", "tool_use_id", "is_error", "cache_control"),
    "function_call_output": ("output", "call_id", "status"),
    "custom_tool_call_output": ("output", "call_id"),
}
"""What a result has, by its protocol or the type of its item."""
ODD_VALUES = st.sampled_from(
    [5, 1.5, {}, [7], [[1]], {"odd": [1]}, [None], [{"type": 5}], [{"type": "odd"}], [{}]]
)


@pytest.mark.parametrize("name", RESULTS)
@given(data=st.data())
def test_a_result_of_odd_types_is_read_and_told_also_where_it_is_the_newest_input(
    name: str, data: st.DataObject
) -> None:
    protocol = name if name in HISTORIES else "responses"
    content = RESULTS[name][0]
    field, value = data.draw(st.sampled_from(RESULTS[name])), data.draw(ODD_VALUES)
    body = resulting(name, **{content: "dry", field: value})
    now = asked(protocol, body)
    assert [message.role for message in now.messages] == ["user", "assistant", "tool"]
    assert now.ignored or field != content
    assert now.texts[-1] == "dry" or field == content
    body[HISTORIES[protocol][1]] += [YES, HI]
    assert asked(protocol, body).texts[:3] == now.texts


@pytest.mark.parametrize(
    ("name", "body", "words"),
    [
        ("messages", {"messages": [{"role": "user", "content": [BLOCK]}]}, "process image"),
        (
            "messages",
            {"messages": [HI, YES, {"role": "user", "content": [{**BLOCK, "source": {}}]}]},
            "missing",
        ),
        ("messages", {"messages": [{"role": "user", "content": [PDF]}]}, "PDF input"),
        (
            "chat",
            {
                "messages": chat([{"type": "image_url", "image_url": {"url": PICTURE}}])[
                    "messages"
                ][:1]
            },
            "process image",
        ),
    ],
)
def test_the_newest_input_is_refused_in_words_by_which_clients_mend_themselves(
    name: str, body: Any, words: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        asked(name, {"max_tokens": 1} | body)
    known = {"process image": "Could not process image", "PDF input": "does not support PDF input"}
    assert known.get(words, words) in caught.value.message
    assert caught.value.param is not None


def test_a_refused_message_does_not_end_the_session_where_it_is_sent_again_with_the_next() -> None:
    bad = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": PICTURE}}]}
    with pytest.raises(InvalidRequest):
        asked("chat", {"messages": [HI, YES, bad]})
    assert asked("chat", {"messages": [HI, YES, bad, HI]}).texts == ["hi", "yes", UNSEEN, "hi"]


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        ({"at": 1.5, "b": "x"}, '{"at":1.5,"b":"x"}'),
        ('{"at": 7', '{"at": 7'),
        (None, "{}"),
        ('{"a": "\\ud83d"}', '{"a": "\\ufffd"}'),
    ],
)
def test_arguments_are_read_as_an_object_and_as_broken_text(arguments: Any, read: str) -> None:
    (call,) = asked("chat", called(arguments)).messages[1].tool_calls
    assert call.arguments == read
    item = {"type": "function_call", "call_id": "c", "name": "look", "arguments": arguments}
    (call,) = asked("responses", responses(HI, item)).messages[1].tool_calls
    assert call.arguments == read


def test_a_function_may_be_described_beside_its_type_or_inside_of_it() -> None:
    flat = {"type": "function", "name": "look", "parameters": {"type": "object"}}
    inside = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    for tool in (flat, inside):
        data = decoded(json.dumps({"messages": [HI], "tools": [tool]}).encode(), ChatRequest)
        prompt = chat_to_generate(data, "r", SPEC, SETTINGS).prompt
        body = json.dumps({"input": "hi", "tools": [tool]}).encode()
        given = decoded(body, ResponseRequest)
        plan = plan_of(given, items_of(given), "r", SPEC, Caller(), SETTINGS)
        assert isinstance(prompt, ChatPrompt)
        assert isinstance(plan.request.prompt, ChatPrompt)
        assert prompt.tools == plan.request.prompt.tools
        assert prompt.tools[0].name == "look"
        assert unused_fields(body, ResponseRequest) == []


@pytest.mark.parametrize(
    "part",
    [
        {"type": "thinking", "thinking": "hm"},
        {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
        {"type": "reasoning", "text": "hm"},
    ],
)
def test_thoughts_in_the_content_of_an_answer_are_its_thoughts(part: Any) -> None:
    said = {"role": "assistant", "content": [part, {"type": "text", "text": "yes"}]}
    message = asked("chat", {"messages": [HI, said, HI]}).messages[1]
    assert (message.text, message.reasoning) == ("yes", "hm")


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (r"a\ud83d b", r"a\ufffd b"),
        (r"\udc00", r"\ufffd"),
        (r"\ud83d\ud83d\ude00", r"\ufffd\ud83d\ude00"),
        (r"\uD83D\uDE00", r"\uD83D\uDE00"),
        (r"\ud83d\u0041", r"\ufffd\u0041"),
        (r"\\ud83d", r"\\ud83d"),
        (r"\\\ud83d", r"\\\ufffd"),
        (r"\\ud83d\ude00", r"\\ud83d\ufffd"),
        (r"\\ud83d\\ude00", r"\\ud83d\\ude00"),
        ("plain \\u00e4", "plain \\u00e4"),
    ],
)
def test_half_a_character_is_read_as_no_character_and_a_whole_one_is_left(
    given: str, read: str
) -> None:
    whole, count = whole_characters(given)
    assert (whole, count) == (read, int(given != read))


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(categories=["Cs", "Lu", "So", "Po"]), max_size=12))
def test_any_text_with_halves_is_decoded_as_it_was_but_for_these(text: str) -> None:
    body = json.dumps({"a": text, "b": json.dumps(text)}).encode()
    found = msgspec.json.decode(with_whole_characters(body).body)
    expected = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert found["a"] == expected
    assert json.loads(whole_characters(found["b"])[0]) == expected


@pytest.mark.parametrize(
    ("text", "places", "shown"),
    [
        ("", [(0, False)], UNSEEN),
        ("ab", [(0, False)], f"{UNSEEN}\nab"),
        ("ab", [(2, False)], f"ab\n{UNSEEN}"),
        ("a\nb", [(1, False)], f"a\n{UNSEEN}\nb"),
        ("ab", [(1, False), (1, True), (1, False)], f"a\n{UNSEEN}\n{UNSEEN}\nb"),
        ("", [(0, False), (0, False)], f"{UNSEEN}\n{UNSEEN}"),
    ],
)
def test_a_lost_image_is_a_line_where_it_was_and_others_stay_in_their_places(
    text: str, places: list[tuple[int, bool]], shown: str
) -> None:
    images = tuple(Image(at=at, field="f", data=b"x" if is_seen else b"") for at, is_seen in places)
    point = Breakpoint(at=len(text), keep_s=1, num_images=len(images))
    message = Message(role="user", text=text, images=images, breakpoints=(point,))
    prompt, num_lost = without_lost_images(ChatPrompt(messages=(message,)))
    (read,) = prompt.messages
    assert (read.text, num_lost) == (shown, sum(not is_seen for _, is_seen in places))
    assert read.breakpoints[0].at == len(shown)
    assert read.breakpoints[0].num_images == len(read.images)
    assert [read.text[: one.at].count(UNSEEN) for one in read.images] == [1] * len(read.images)


# Of which there is more than any conversation has

ONES = [1] * 50_000
MANY: Mapping[str, tuple[str, Any]] = {
    "chat": ("chat", {"messages": ONES}),
    "messages": ("messages", {"max_tokens": 1, "messages": ONES}),
    "responses": ("responses", {"input": ONES}),
    "ollama": ("ollama", {"messages": ONES}),
    "messages that are whole": ("chat", {"messages": [HI] * 20_000}),
}


@pytest.mark.parametrize("case", MANY)
def test_more_entries_than_a_conversation_has_are_refused_when_they_were_counted(case: str) -> None:
    name, body = MANY[case]
    field = "input" if name == "responses" else "messages"
    with pytest.raises(InvalidRequest, match=rf"{field} has .* at most 16384 .*: leave") as refused:
        asked(name, body)
    assert refused.value.param == field


ODD: Mapping[str, tuple[str, Any]] = {
    "chat": ("chat", chat(ONES)),
    "in two": ("chat", {"messages": [*[{"role": "user", "content": ONES[:9000]}] * 2, YES, HI]}),
    "calls": ("chat", {"messages": [HI, {"role": "assistant", "tool_calls": ONES}, HI]}),
    "messages": ("messages", messages(ONES)),
    "responses": ("responses", responses({"role": "user", "content": ONES})),
    "ollama": ("ollama", {"messages": [{"role": "user", "content": "a", "images": ONES}, HI]}),
}


@pytest.mark.parametrize("case", ODD)
def test_a_past_with_more_odd_places_than_that_is_refused(case: str) -> None:
    name, body = ODD[case]
    with pytest.raises(InvalidRequest, match=r"More than 16384 places .*: leave"):
        asked(name, body)


def test_as_many_as_that_are_mended() -> None:
    texts = asked("chat", chat(ONES[:16_000])).texts
    assert len(texts[0].splitlines()) == 16_000
