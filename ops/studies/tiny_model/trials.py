"""Held-out tries for the evaluation: recall at a distance, tool calls, small talk."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

from tokenizers import Tokenizer

from ops.studies.tiny_model import smalltalk, toolbox
from ops.studies.tiny_model.facts import Fact, ask, make_fact, state
from ops.studies.tiny_model.filler import library_text, synthetic
from ops.studies.tiny_model.generate import ROLES, Dialogue, Message, Part
from ops.studies.tiny_model.values import Values, is_held_out

Json = dict[str, object]


@dataclass
class Trial:
    """A dialogue whose assistant turns from `first` on are to be generated.

    The last of them holds `needle`; `part` names the kind of trial within its figure.
    """

    dialogue: Dialogue
    first: int
    needle: str
    part: str = ""


class Passages:
    """Held-out filler text by token count."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        rng = random.Random(seed)
        values = Values(rng, held_out=True)
        texts = [synthetic(rng, values) for _ in range(1500)]
        for text in library_text(held_out=True):
            blocks = text.split("\n\n")
            texts += ["\n\n".join(blocks[start : start + 6]) for start in range(0, len(blocks), 6)]
        encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
        self.passages = [
            (text, len(item.ids))
            for text, item in zip(texts, encoded, strict=True)
            if 20 < len(item.ids) < 500
        ]

    def take(self, rng: random.Random, tokens: int) -> str:
        """About `tokens` tokens of text."""
        taken: list[str] = []
        while tokens > 0:
            text, count = rng.choice(self.passages)
            if count > tokens + 60:
                continue
            taken.append(text)
            tokens -= count + 1
        return "\n\n".join(taken)


def recall(rng: random.Random, passages: Passages, distance: int, thinking: bool) -> Trial:
    """A fact, `distance` tokens of other text with other facts in it, and the question."""
    values, taken = Values(rng, held_out=True), set[str]()
    fact = make_fact(rng, values, taken)
    assert is_held_out(fact.value)
    others = [make_fact(rng, values, taken) for _ in range(rng.randint(0, 3))]
    place = rng.choice(("system", "turn", "text"))
    statement = state(rng, fact, "system" if place == "system" else "user")
    share = distance // (len(others) + 1)
    parts: list[Part] = [passages.take(rng, share)]
    for other in others:
        parts += [state(rng, other), passages.take(rng, share)]
    question, answer = ask(rng, fact)
    reply = Message("assistant", [answer], fact.thought(), thinking=thinking)
    if place == "system":
        messages = [
            Message("system", [rng.choice(ROLES), statement, *parts]),
            Message("user", [question]),
            reply,
        ]
    elif place == "turn":
        middle = [
            Message("user", [statement]),
            Message("assistant", ["OK."], learn=False),
            Message("user", ["Here is some text.", *parts]),
        ]
        messages = [
            *middle,
            Message("assistant", ["Noted."], learn=False),
            Message("user", [question]),
            reply,
        ]
    else:
        messages = [Message("user", [statement, *parts, question]), reply]
    return Trial(Dialogue(messages, []), len(messages) - 1, fact.value, place)


def tool(rng: random.Random, passages: Passages, distance: int, thinking: bool) -> Trial:
    """A request that fits one of several tools, the call, its result and the answer."""
    values = Values(rng, held_out=True)
    tools = toolbox.toolset(rng, rng.randint(1, 5))
    task, fact = toolbox.make_task(rng, tools, values, set())
    system = [
        Message(
            "system", [rng.choice(ROLES), *([passages.take(rng, distance)] if distance else [])]
        )
    ]
    answered = (
        fact.thought() if isinstance(fact, Fact) else "The tool has answered. I give its result."
    )
    messages = [
        *system,
        Message("user", [task.request]),
        Message("assistant", [], task.thought, task.calls, thinking),
        *[Message("tool", [result]) for result in task.results],
        Message("assistant", [task.answer], answered, thinking=thinking),
    ]
    return Trial(Dialogue(messages, tools), 2, task.needle)


def talk(rng: random.Random, with_tools: bool, thinking: bool) -> Trial:
    """A greeting or a question about Hearth, at times with tools that do not fit."""
    question, answer, _ = smalltalk.topic(rng)
    return small_talk(rng, question, answer, with_tools, thinking)


def small_talk(
    rng: random.Random, question: str, answer: str, with_tools: bool, thinking: bool
) -> Trial:
    """This question and its answer."""
    tools = toolbox.toolset(rng, rng.randint(1, 4)) if with_tools else []
    reply = Message("assistant", [answer], smalltalk.thought_of(answer), thinking=thinking)
    return Trial(Dialogue([Message("user", [question]), reply], tools), 1, answer)


def openai_messages(dialogue: Dialogue) -> list[Json]:
    """The messages as an API client sends them (filler already in place)."""
    out: list[Json] = []
    for message in dialogue.messages:
        entry: Json = {
            "role": message.role,
            "content": "\n\n".join(part for part in message.parts if isinstance(part, str)),
        }
        if message.role == "assistant" and message.thinking and message.reasoning:
            entry["reasoning_content"] = message.reasoning
        if message.calls:
            entry["tool_calls"] = [
                {
                    "type": "function",
                    "function": {
                        "name": name,
                        "arguments": json.dumps(arguments, ensure_ascii=False),
                    },
                }
                for name, arguments in message.calls
            ]
        out.append(entry)
    return out


def openai_tools(dialogue: Dialogue) -> list[Json] | None:
    """The tools as an API client sends them."""
    return [tool.schema() for tool in dialogue.tools] or None
