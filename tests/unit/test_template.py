"""Messages to the text and the token ids that the model reads."""

from typing import Any

import pytest
from mlx_lm.utils import load_tokenizer

from runtime.types import (
    ChatPrompt,
    Image,
    Message,
    TextPrompt,
    Thinking,
    TokenPrompt,
    Tool,
    ToolCall,
)
from runtime.worker.input.template import Template
from runtime.worker.input.template_input import defused
from tests.tiny_models import write_tokenizer

HELLO = Message(role="user", text="hello")


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Template:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    tokenizer: Any = load_tokenizer(directory)
    return Template(tokenizer)


def test_messages_are_rendered_up_to_where_the_model_answers(template: Template):
    prompt = ChatPrompt(messages=(Message(role="system", text="be brief"), HELLO))
    assert template.render(prompt) == (
        "<|im_start|>system\nbe brief<|im_end|>\n"
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("enable_thinking", "kwargs", "thinks"),
    [
        (None, "{}", False),
        (True, "{}", True),
        (False, "{}", False),
        (None, '{"enable_thinking": true}', True),
        (False, '{"enable_thinking": true}', False),
    ],
)
def test_thinking_is_on_only_when_asked_for(
    template: Template, enable_thinking: bool | None, kwargs: str, thinks: bool
):
    thinking = Thinking(is_enabled=enable_thinking)
    prompt = ChatPrompt(messages=(HELLO,), thinking=thinking, template_kwargs=kwargs)
    assert template.render(prompt).endswith("assistant\n<think>\n") == thinks
    assert template.starts_in_reasoning(template.token_ids(prompt)) == thinks


def test_tools_and_calls_reach_the_template_as_objects(template: Template):
    call = ToolCall(id="c", name="look", arguments='{"at": 7}')
    messages = (HELLO, Message(role="assistant", tool_calls=(call,)))
    tool = Tool(name="look", description="Look.", parameters='{"type": "object"}')
    text = template.render(ChatPrompt(messages=messages, tools=(tool,)))
    assert '{"name": "look", "arguments": {"at": 7}}' in text
    assert '"description": "Look."' in text


def test_arguments_that_are_no_json_are_shown_as_they_are(template: Template):
    call = ToolCall(id="c", name="look", arguments="{at")
    text = template.render(ChatPrompt(messages=(Message(role="assistant", tool_calls=(call,)),)))
    assert '"arguments": "{at"' in text


def test_markers_in_a_prompt_are_one_token_each(template: Template):
    token_ids = template.token_ids(ChatPrompt(messages=(HELLO,)))
    assert token_ids.count(1) == 2
    assert token_ids.count(2) == 1


def test_a_picture_keeps_its_place_among_words_that_are_spelled_out():
    image = Image(at=len("a<pad>b"), field="f", data=b"x")
    said = Message(role="user", text="a<pad>bc<pad>", images=(image,))
    (plain,) = defused(ChatPrompt(messages=(said,)), ["<pad>"]).messages
    assert plain.text[: plain.images[0].at] == "a<\u200bpad>b"


def test_text_and_tokens_are_taken_as_they_are(template: Template):
    assert template.token_ids(TokenPrompt(token_ids=(5, 6))) == [5, 6]
    token_ids = template.token_ids(TextPrompt(text="the quick"))
    assert "".join(template.token_text(token_id)[0] for token_id in token_ids) == "the quick"


def test_marks_are_found_without_tokenizing_again(template: Template):
    text = template.render(ChatPrompt(messages=(Message(role="user", text="naïve 你好 🦊 fox"),)))
    marks = [0, text.index("naïve"), text.index("<|im_end|>"), len(text)]
    marked = template.encode(text, marks)
    assert marked.token_ids == template.encode(text).token_ids
    for at, position in zip(marks, marked.positions, strict=True):
        assert template.encode(text[:at]).token_ids == marked.token_ids[:position]


def test_a_mark_inside_of_a_token_counts_what_is_before_it(template: Template):
    text = "the quick brown"
    marked = template.encode(text, [text.index("ick")])
    before = "".join(template.token_text(i)[0] for i in marked.token_ids[: marked.positions[0]])
    assert text.startswith(before)
    assert before in ("the", "the ", "the qu")


def test_a_token_inside_a_character_has_its_bytes(template: Template):
    token_ids = template.token_ids(TextPrompt(text="🦊"))
    texts, raw = zip(*(template.token_text(token_id) for token_id in token_ids), strict=True)
    assert b"".join(raw) == "🦊".encode()
    assert set(texts) == {"\ufffd"}
