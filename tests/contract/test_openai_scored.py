"""What OpenAI's own Python client sees of prompts that are scored."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from tokenizers import Tokenizer

from tests.running_server import RunningServer


@pytest.fixture
def client(server: RunningServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer(models_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(models_dir / "tiny" / "tokenizer.json"))


def test_an_echoed_prompt_has_log_probabilities_of_its_own(
    client: OpenAI, tokenizer: Tokenizer
) -> None:
    prompt = "the quick brown 狐 sees"
    request: Any = {"model": "tiny", "prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 3}
    request["extra_body"] = {"ignore_eos": True}
    choice = client.completions.create(**request).choices[0]
    assert choice.text.startswith(prompt)
    logprobs = choice.logprobs
    assert logprobs is not None
    tokens, values = logprobs.tokens or [], logprobs.token_logprobs or []
    tops, offsets = logprobs.top_logprobs or [], logprobs.text_offset or []
    num_prompt = len(tokenizer.encode(prompt).ids)
    assert [len(one) for one in (tokens, values, tops, offsets)] == [num_prompt + 3] * 4
    assert (values[0], tops[0], offsets[0]) == (None, None, 0)
    for token, value, top in list(zip(tokens, values, tops, strict=True))[1:]:
        assert top[token] >= value  # two tokens may have the same text
        assert max(top.values()) <= 0
        assert 1 <= len(top) <= 3
    assert offsets[num_prompt] == len(prompt)
    alone = client.completions.create(**request | {"echo": False}).choices[0]
    assert choice.text == prompt + alone.text
    assert alone.logprobs is not None
    assert values[num_prompt:] == pytest.approx(alone.logprobs.token_logprobs, abs=1e-4)
    pieces = [chunk.choices[0] for chunk in client.completions.create(stream=True, **request)]
    assert "".join(piece.text for piece in pieces) == choice.text
    streamed = [piece.logprobs for piece in pieces if piece.logprobs is not None]
    assert [one for piece in streamed for one in piece.tokens or []] == tokens
    assert [one for piece in streamed for one in piece.text_offset or []] == offsets
    assert [one for piece in streamed for one in piece.token_logprobs or []][1:] == pytest.approx(
        values[1:], abs=1e-4
    )


def test_texts_are_scored_as_evaluation_harnesses_ask_for_it(
    client: OpenAI, tokenizer: Tokenizer
) -> None:
    """lm-evaluation-harness sends token ids, several at once, and sums what follows a context."""
    texts = ["the fox sees the dog", "a kettle hums", "rain falls on the hearth"]
    prompts = [tokenizer.encode(text).ids for text in texts]
    request: Any = {"model": "tiny", "echo": True, "logprobs": 1, "seed": 1}
    answer = client.completions.create(prompt=prompts, max_tokens=1, **request)
    nothing = client.completions.create(prompt=texts, max_tokens=0, n=2, **request)
    assert [choice.text for choice in nothing.choices] == [text for text in texts for _ in "12"]
    assert {choice.finish_reason for choice in nothing.choices} == {"length"}
    for number, (text, token_ids) in enumerate(zip(texts, prompts, strict=True)):
        choice = answer.choices[number]
        assert (choice.index, choice.text[: len(text)]) == (number, text)
        assert choice.logprobs is not None
        values, tops = choice.logprobs.token_logprobs or [], choice.logprobs.top_logprobs or []
        assert len(values) == len(token_ids) + 1
        for beside in nothing.choices[2 * number : 2 * number + 2]:
            assert beside.logprobs is not None
            assert beside.logprobs.token_logprobs == pytest.approx(values[:-1], abs=1e-4)
        # Where a token is the likeliest, both say the same number, to the last digit.
        likeliest = [max(top.values()) for top in tops[1:]]
        assert all(one <= best for one, best in zip(values[1:], likeliest, strict=True))
        assert values[-1] == likeliest[-1]
    assert nothing.usage is not None
    assert nothing.usage.completion_tokens == 0
