"""Many parts and messages become one text, each copied once, and pictures keep their places."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.anthropic.breakpoints import Breakpoints
from api.anthropic.schemas import InputMessage
from api.anthropic.transcript import Transcript
from api.http.caller import Caller
from api.http.expansion import Expansion
from api.http.past import STRICT
from api.openai.content import ContentPart, read
from api.openai.response_schemas import ResponseRequest
from api.responses.convert import items_of, plan_of
from runtime.config.settings import Settings
from runtime.prompt.arrange import Abilities, arranging_steps
from runtime.prompt.joining import JoinedMessages
from runtime.prompt.rewriting import rewrite
from runtime.prompt.tools_as_text import ToolForms, written_out
from runtime.types import Image, Message, ModelSpec

SPEC = ModelSpec(
    id="m",
    path="/m",
    context=4096,
    model_type="qwen3",
    nbytes=1,
    created_s=1,
    capabilities=("vision",),
)
PICTURE = "data:image/png;base64,iVBORw0KGgo="
TEXT = "x" * 1000
MANY = 40_000
"""Parts. Each of them copying all that was said before it would be 800 GB."""
MOST = 16_384
"""Messages, of 4,000 characters here: 537 GB."""

texts = st.lists(st.text("ab\n", max_size=3), max_size=6)


def pictures(number: int) -> tuple[Image, ...]:
    return tuple(Image(at=place, field=f"f{number}", data=b"") for place in range(number % 3))


@given(texts=texts, joint=st.sampled_from(["", "\n\n"]))
def test_joined_messages_are_what_joining_them_one_by_one_gives(
    texts: list[str], joint: str
) -> None:
    joined = JoinedMessages(Message(role="user", text="", images=pictures(2)))
    said, places = "", [0, 1]
    for number, text in enumerate(texts):
        joined.add(Message(role="user", text=text, images=pictures(number)), joint)
        said = said + joint + text if said and text else said or text
        places += [place + len(said) - len(text) for place in range(number % 3)]
        assert joined.has_text == bool(said)
    assert joined.message().text == said
    assert [image.at for image in joined.message().images] == places


def test_a_chat_of_many_parts_is_read_in_one_pass() -> None:
    parts = [ContentPart(text=TEXT), ContentPart(type="image_url", image_url=PICTURE)] * MANY
    content = read(parts, "p")
    assert content.text == "\n".join([TEXT] * MANY)
    assert [image.at for image in content.images[:3]] == [1000, 2001, 3002]


def test_a_turn_of_many_blocks_is_read_in_one_pass() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
    blocks: list[Any] = [{"type": "text", "text": TEXT}, {"type": "image", "source": source}]
    transcript = Transcript(Breakpoints(), Expansion(0))
    body = json.dumps({"role": "user", "content": blocks * MANY})
    transcript.add(msgspec.json.decode(body, type=InputMessage), "messages[0]", STRICT)
    (message,) = transcript.messages
    assert message.text == "\n".join([TEXT] * MANY)
    assert [image.at for image in message.images[:3]] == [1000, 2001, 3002]


def test_a_turn_of_many_items_is_read_in_one_pass() -> None:
    content = [{"type": "input_text", "text": TEXT}, {"type": "input_image", "image_url": PICTURE}]
    item = {"role": "assistant", "status": "in_progress", "content": content}
    body = json.dumps({"input": [item] * MANY})
    data = msgspec.json.decode(body, type=ResponseRequest)
    settings = Settings(home=Path("/nowhere"))
    plan = plan_of(data, items_of(data), "resp_1", SPEC, Caller(), settings)
    (message,) = plan.request.prompt.messages  # type: ignore[union-attr]
    assert message.text == TEXT * MANY
    assert [image.at for image in message.images[:3]] == [1000, 2000, 3000]


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_many_messages_in_a_row_are_joined_in_one_pass(role: Any) -> None:
    steps = arranging_steps(Abilities(users_in_a_row=False), lambda messages: [""] * len(messages))
    text = TEXT * 4
    rewritten = rewrite([Message(role=role, text=text)] * MOST, steps)
    joint = "\n" if role == "assistant" else "\n\n"
    assert [one.text for one in rewritten.messages] == [joint.join([text] * MOST)]


def test_many_results_as_text_are_joined_in_one_pass() -> None:
    result = Message(role="tool", text=TEXT * 4, tool_call_id="c")
    said = written_out([result] * MOST, ToolForms(False, False, False), lambda: True)
    (turn,) = said.messages
    one = f"<tool_response>\n{TEXT * 4}\n</tool_response>"
    assert turn.text == "\n".join([one] * MOST)
