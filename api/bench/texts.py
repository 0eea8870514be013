"""Conversations that differ in every round, and what an answer to them must hold."""

from __future__ import annotations

import random
import re
from typing import Literal

import msgspec

Role = Literal["system", "user", "assistant"]

SYSTEM_SHARE, DOCUMENT_SHARE = 0.5, 0.25
CHARACTERS_PER_TOKEN = 4.0
"""A first guess, until a server has counted."""

_SENTENCES = (
    "The {a} {n} stood near the {m}.",
    "Every morning {p} walks from {c} to the {n}.",
    "A {a} {n} is better than a {b} {m}.",
    "{p} and {q} met at the {n} in {c}.",
    "You must never move the {n} before the {m}.",
    "Nobody knows why the {a} {n} was moved to {c}.",
    "There are {i} {a} {n}s in the {m}.",
    "Then {q} opened the {n} and found a {m}.",
    "{p} said that the {n} is not ready.",
)
_ADJECTIVES = tuple("small red quiet heavy old bright simple empty narrow warm".split())
_NOUNS = tuple("river table garden window engine letter bridge kettle ladder market".split())
_PEOPLE = tuple("Anna Peter Maria Tom Laura Jonas Nina Oscar".split())
_CITIES = tuple("Zurich Paris Rome Vienna Lisbon Oslo Madrid Berlin".split())
_CODE = tuple("velvet onyx maple silver cobalt amber falcon cedar".split())
_PARAGRAPH = 6
COUNTED = "Count from 1 to 100."
_MIN_COUNTED = 20


class BenchMessage(msgspec.Struct, frozen=True):
    """One turn as every protocol's client knows it."""

    role: Role
    content: str


Messages = tuple[BenchMessage, ...]


class Question(msgspec.Struct, frozen=True):
    """A prompt and a text that its answer must hold."""

    messages: Messages
    needle: str

    def then(self, answer: str, following: Question) -> Question:
        """The same conversation after this answer, with the next question."""
        turn = BenchMessage("assistant", answer)
        return Question((*self.messages, turn, *following.messages), following.needle)

    def is_answered_by(self, text: str) -> bool:
        return self.needle in text


class ScriptedConversation(msgspec.Struct, frozen=True):
    """One long prompt, the questions that can follow it, and a prompt that shares its beginning."""

    first: Question
    code: Question
    door: Question
    sibling: Question
    edited_door: str

    def edited(self, turn: Question) -> Question:
        """A turn that asks for the door, with another number in the middle of the history."""
        changed = (
            BenchMessage(one.role, one.content.replace(self.door.needle, self.edited_door))
            if one.role == "user"
            else one
            for one in turn.messages
        )
        return Question(tuple(changed), self.edited_door)


def chooser(seed: int) -> random.Random:
    """The same choices for the same seed: nothing here is a secret."""
    return random.Random(seed)  # noqa: S311


def conversation(num_characters: int, seed: int) -> ScriptedConversation:
    """Half of it a system prompt, a quarter a document, a quarter the question's own text."""
    choose = chooser(seed)
    code = f"{choose.choice(_CODE)}-{choose.choice(_CODE)}-{choose.randint(10, 99)}"
    door, edited, ticket = (str(number) for number in choose.sample(range(1000, 10000), 3))
    rules = prose(choose, int(num_characters * SYSTEM_SHARE))
    system = BenchMessage(
        "system", f"You are a helpful assistant. The code word is {code}.\n\n{rules}"
    )
    quarter = int(num_characters * DOCUMENT_SHARE)
    document = (
        f"Please read this.\n\n{prose(choose, quarter // 2)}\n\nThe door number is {door}.\n\n"
        f"{prose(choose, quarter // 2)}"
    )
    last = BenchMessage("user", f"{prose(choose, quarter)}\n\nWhat is the code word?")
    sibling = f"The ticket number is {ticket}.\n\n{prose(choose, quarter)}"
    history = (system, BenchMessage("user", document), BenchMessage("assistant", "Noted."), last)
    return ScriptedConversation(
        first=Question(history, code),
        code=Question((_ask("code word"),), code),
        door=Question((_ask("door number"),), door),
        sibling=Question(
            (system, BenchMessage("user", f"{sibling}\n\nWhat is the ticket number?")), ticket
        ),
        edited_door=edited,
    )


def short_question(seed: int) -> Question:
    """A prompt of some fifty tokens."""
    number = str(chooser(seed).randint(1000, 9999))
    return Question((BenchMessage("user", f"The room number is {number}. What is it?"),), number)


def counting(seed: int) -> Messages:
    """A question whose answer takes hundreds of tokens and can be checked."""
    talk = prose(chooser(seed), 200)
    return (BenchMessage("system", talk), BenchMessage("user", COUNTED))


def counts_rightly(text: str) -> bool:
    """Whether the text counts from one; the last number may be cut."""
    numbers = [int(one) for one in re.findall(r"\d+", text)][:-1]
    return len(numbers) >= _MIN_COUNTED and numbers == list(range(1, len(numbers) + 1))


def prose(choose: random.Random, num_characters: int) -> str:
    """Sentences about nothing, in paragraphs, of about that length."""
    sentences: list[str] = []
    length = 0
    while length < num_characters:
        sentence = _sentence(choose)
        length += len(sentence) + 1
        sentences.append(sentence)
    starts = range(0, len(sentences), _PARAGRAPH)
    return "\n\n".join(" ".join(sentences[start : start + _PARAGRAPH]) for start in starts)


def _sentence(choose: random.Random) -> str:
    return choose.choice(_SENTENCES).format(
        a=choose.choice(_ADJECTIVES),
        b=choose.choice(_ADJECTIVES),
        n=choose.choice(_NOUNS),
        m=choose.choice(_NOUNS),
        p=choose.choice(_PEOPLE),
        q=choose.choice(_PEOPLE),
        c=choose.choice(_CITIES),
        i=choose.randint(2, 99),
    )


def _ask(key: str) -> BenchMessage:
    return BenchMessage("user", f"What is the {key}?")
