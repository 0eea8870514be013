"""Filling in the middle: each family's marks around what stands before and behind."""

from pathlib import Path
from typing import Any

import pytest
from mlx_lm.utils import load_tokenizer

from runtime.errors import InvalidRequest
from runtime.types import TextPrompt
from runtime.worker.input.infill import infilled
from runtime.worker.input.template import Template
from tests.tiny_models import write_tokenizer

FAMILIES = {
    "Qwen2.5-Coder": (
        ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        "<|fim_prefix|>def f(<|fim_suffix|>): pass<|fim_middle|>",
    ),
    "StarCoder2": (
        ("<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>"),
        "<fim_prefix>def f(<fim_suffix>): pass<fim_middle>",
    ),
    "DeepSeek-Coder": (
        ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
        "<｜fim▁begin｜>def f(<｜fim▁hole｜>): pass<｜fim▁end｜>",
    ),
    "Seed-Coder": (
        ("<[fim-suffix]>", "<[fim-prefix]>", "<[fim-middle]>"),
        "<[fim-suffix]>): pass<[fim-prefix]>def f(<[fim-middle]>",
    ),
    "Codestral": (("[PREFIX]", "[SUFFIX]", "[MIDDLE]"), "[SUFFIX]): pass[PREFIX]def f("),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_is_asked_in_its_own_order(family: str) -> None:
    marks, written = FAMILIES[family]
    assert infilled("def f(", "): pass", set(marks).__contains__) == written


def test_a_model_that_lacks_one_of_the_marks_is_told_of_by_field() -> None:
    with pytest.raises(InvalidRequest, match="fill in the middle") as refused:
        infilled("a", "b", {"<|fim_prefix|>", "<|fim_suffix|>"}.__contains__)
    assert refused.value.param == "suffix"


def test_the_marks_of_a_vocabulary_are_one_token_each(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer: Any = load_tokenizer(tmp_path)
    template = Template(tokenizer)
    prompt = TextPrompt(text="the fox ", suffix=" dog")
    with pytest.raises(InvalidRequest, match="fill in the middle"):
        template.token_ids(prompt)
    marks, _ = FAMILIES["Qwen2.5-Coder"]
    backend = tokenizer.backend_tokenizer
    backend.add_special_tokens([*marks])
    before, after, middle = (backend.token_to_id(mark) for mark in marks)
    token_ids = template.token_ids(prompt)
    assert token_ids[-1] == middle
    at = token_ids.index(after)
    assert token_ids[token_ids.index(before) + 1 : at] == template.encode("the fox ").token_ids
    assert token_ids[at + 1 : -1] == template.encode(" dog").token_ids
