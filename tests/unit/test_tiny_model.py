"""What the training text promises and what the shipped template and tokenizer do with it."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from safetensors import safe_open
from transformers import AutoTokenizer

from ops.studies.tiny_model import smalltalk, trials
from ops.studies.tiny_model.generate import Dialogue, DialogueMaker, Fill, Message, render
from ops.studies.tiny_model.values import Values, is_held_out
from runtime.embedded import HEARTH_TINY

SEEDS = range(60)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(HEARTH_TINY)


def text_of(dialogue: Dialogue) -> str:
    return "".join(part for part, _ in render(dialogue) if isinstance(part, str))


def filled(dialogue: Dialogue) -> Dialogue:
    """The dialogue with a word in every place for filler."""
    for message in dialogue.messages:
        message.parts = ["filler" if isinstance(part, Fill) else part for part in message.parts]
    return dialogue


def from_template(tokenizer: Any, dialogue: Dialogue, num_messages: int, **options: Any) -> str:
    return tokenizer.apply_chat_template(
        trials.openai_messages(dialogue)[:num_messages],
        tools=trials.openai_tools(dialogue),
        tokenize=False,
        **options,
    )


@pytest.mark.parametrize("size", [300, 1500])
def test_training_text_is_what_the_template_makes_of_the_same_messages(
    tokenizer: Any, size: int
) -> None:
    for seed in SEEDS:
        dialogue = filled(DialogueMaker(random.Random(seed)).make(size))

        assert from_template(tokenizer, dialogue, len(dialogue.messages)) == text_of(dialogue)


def test_the_generation_prompt_is_what_the_model_was_trained_to_continue(tokenizer: Any) -> None:
    for seed in SEEDS:
        dialogue = filled(DialogueMaker(random.Random(seed)).make(300))
        text = text_of(dialogue)
        for index, message in enumerate(dialogue.messages):
            if message.role == "assistant":
                prompt = from_template(
                    tokenizer,
                    dialogue,
                    index,
                    add_generation_prompt=True,
                    enable_thinking=message.thinking,
                )
                assert text.startswith(prompt)


def test_thinking_is_off_unless_asked_for(tokenizer: Any) -> None:
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )

    assert prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_the_order_of_a_tools_keys_does_not_change_the_prompt(tokenizer: Any) -> None:
    function = {"name": "cat", "description": "Read.", "parameters": {"type": "object"}}
    backwards = dict(reversed(function.items()))
    texts = {
        tokenizer.apply_chat_template(
            [{"role": "user", "content": "Hi"}], tools=[tool], tokenize=False
        )
        for tool in (function, {"type": "function", "function": backwards})
    }

    assert len(texts) == 1
    assert json.dumps(function) in texts.pop()


def test_a_value_has_the_same_tokens_in_prose_in_quotes_and_in_json(tokenizer: Any) -> None:
    values = Values(random.Random(1), held_out=True)
    num_whole = 0
    for value in (values.draw("hyphenated") for _ in SEEDS):
        quoted = tokenizer.tokenize(f'"{value}"')[1:-1]
        spaced = "".join(tokenizer.tokenize(f"is {value}."))
        assert spaced == "isĠ" + "".join(quoted) + "."
        num_whole += tokenizer.tokenize(f"is {value}.")[2:-1] == quoted

    # The rest begin with a common word, which takes the space along.
    assert num_whole > len(SEEDS) // 2


def test_evaluated_values_are_never_trained_on() -> None:
    for held_out in (False, True):
        values = Values(random.Random(2), held_out)

        assert {is_held_out(values.draw()) for _ in range(200)} == {held_out}


def test_a_recall_trial_states_its_needle_before_it_asks(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "library_text", lambda held_out: [])
    passages = trials.Passages(tokenizer.backend_tokenizer, 1)
    rng = random.Random(3)
    for _ in SEEDS:
        trial = trials.recall(rng, passages, 500, thinking=False)
        messages = trials.openai_messages(trial.dialogue)

        assert trial.needle in str(messages[trial.first]["content"])
        assert any(trial.needle in str(message["content"]) for message in messages[: trial.first])
        assert len(tokenizer.tokenize(text_of(trial.dialogue))) > 500


def test_every_question_has_one_answer() -> None:
    asked = [q for questions, _ in smalltalk.TOPICS for q in questions.split("|")]

    assert len(asked) == len(set(asked))


def test_a_call_is_rendered_as_json_on_its_own_line(tokenizer: Any) -> None:
    call = Message("assistant", [], calls=[("read", {"path": "käse.txt", "limit": 3})])
    dialogue = Dialogue([Message("user", ["Read käse.txt"]), call], [])

    text = from_template(tokenizer, dialogue, 2)

    line = '{"name": "read", "arguments": {"path": "käse.txt", "limit": 3}}'
    assert text.endswith(f"</think>\n\n<tool_call>\n{line}\n</tool_call><|im_end|>\n")


def test_the_shipped_weights_are_small_and_float32() -> None:
    path = HEARTH_TINY / "model.safetensors"

    assert path.stat().st_size <= 12_000_000
    with safe_open(path, "numpy") as weights:
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"F32"}  # noqa: SIM118
