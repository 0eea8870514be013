"""The dialect that a tokenizer's own files make a model speak."""

from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from mlx_lm import tokenizer_utils
from mlx_lm.utils import load_tokenizer
from tokenizers import Tokenizer

from runtime.types import ReasoningDelta, TextDelta, Tool, ToolCallDelta
from runtime.worker.output.dialect import HEADER, START
from runtime.worker.output.parser import OutputParser
from runtime.worker.output.tools import RequestTools
from runtime.worker.output.upstream import dialect_of
from tests.tiny_models import write_tokenizer

HARMONY = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|constrain|>"]


def load(directory: Path, *, template: str | None = None, more: tuple[str, ...] = ()) -> Any:
    """The tiny tokenizer, with another template and further special tokens."""
    write_tokenizer(directory)
    (directory / "config.json").write_text('{"model_type": "qwen3"}')
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    if more:
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        tokenizer.add_special_tokens(list(more))
        tokenizer.save(str(directory / "tokenizer.json"))
    return load_tokenizer(directory)


def test_marks_and_parser_are_what_upstream_finds(tmp_path: Path):
    found = dialect_of(load(tmp_path))
    assert (found.name, found.initial) == ("json_tools", START)
    assert (found.think_start, found.think_end) == ("<think>", "</think>")
    assert (found.tool_start, found.tool_end) == ("<tool_call>", "</tool_call>")


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<tool_call>{{ '<arg_key>' }}", "glm47"),
        ("<minimax:tool_call>", "minimax_m2"),
        ("[TOOL_CALLS]", "mistral"),
        ("<|tool_calls_section_begin|>", "kimi_k2"),
    ],
)
def test_a_template_that_names_a_mark_decides(tmp_path: Path, template: str, name: str):
    assert dialect_of(load(tmp_path, template=template)).name == name


@pytest.mark.parametrize("num_characters", [1, 2, 5, 99])
@pytest.mark.parametrize("tools", [(), (Tool(name="look"),)])
def test_marks_around_an_answer_that_are_tokens_are_no_text(
    tmp_path: Path, num_characters: int, tools: tuple[Tool, ...]
):
    spoken = dialect_of(load(tmp_path, more=("<response>", "</response>")))
    turn = "<think>\nhm\n</think>\n\n<response>\nHello.\n\nYou.\n</response>\n"
    parser = OutputParser(spoken, index=0, tools=RequestTools.of(tools))
    starts = range(0, len(turn), num_characters)
    chunks = [one for at in starts for one in parser.feed(turn[at : at + num_characters])]
    chunks += parser.finish()
    texts = "".join(one.text for one in chunks if isinstance(one, TextDelta))
    thoughts = "".join(one.text for one in chunks if isinstance(one, ReasoningDelta))
    assert (texts, thoughts) == ("Hello.\n\nYou.\n", "hm")
    assert "<response>" not in dialect_of(load(tmp_path)).dropped


def test_without_a_parser_a_vocabulary_with_channels_speaks_harmony(tmp_path: Path):
    found = dialect_of(load(tmp_path, template="{{ messages }}", more=tuple(HARMONY)))
    assert (found.name, found.initial) == ("harmony", HEADER)
    assert dialect_of(load(tmp_path, template="{{ messages }}")).name == ""


def test_a_response_format_of_several_messages_is_taken_over(tmp_path: Path):
    write_tokenizer(tmp_path)
    muse = {"chat_template_type": "muse_spark", "tool_parser_type": "muse_spark"}
    found = dialect_of(tokenizer_utils.load(tmp_path, defaults=muse))
    assert (found.name, found.initial) == ("muse_spark", HEADER)
    turn = (
        "to=self<|message|>hm<|eom|>to=user<|message|>I look.<|eom|>"
        '<atem:function_calls><atem:invoke name="look"></atem:invoke></atem:function_calls><|eom|>'
    )
    parser = OutputParser(found, index=0, tools=RequestTools.of((Tool(name="look"),)))
    chunks = [*parser.feed(turn), *parser.finish()]
    assert [kind for kind, _ in groupby(chunks, type)] == [ReasoningDelta, TextDelta, ToolCallDelta]
    assert "".join(c.text for c in chunks if isinstance(c, ReasoningDelta)) == "hm"
    assert "".join(c.text for c in chunks if isinstance(c, TextDelta)) == "I look."
