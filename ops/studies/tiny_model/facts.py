"""Facts that a conversation states and later asks for."""

from __future__ import annotations

import random
from dataclasses import dataclass

from ops.studies.tiny_model import words
from ops.studies.tiny_model.fact_texts import (
    AFTER,
    ASK,
    ASK_CONFIG,
    ASK_MY,
    ASK_NAME,
    BEFORE,
    CHANGE,
    COMMON,
    FIRST,
    GROUPS,
    ONLY,
    PERSONAL,
    STATE,
    STATE_CONFIG,
    STATE_MY,
    STATE_NAME,
    STATE_USER,
)
from ops.studies.tiny_model.values import Values


@dataclass
class Fact:
    """One key with its current value; `owner` decides the phrasing."""

    key: str
    value: str
    owner: str  # "the", "my" or "config"
    kind: str

    @property
    def title(self) -> str:
        """The key as the asker calls it: "the code word", "my name", "DB_PORT"."""
        return self.key if self.owner == "config" else f"{self.owner} {self.key}"

    def answer(self) -> str:
        """The sentence that states the value to the asker."""
        if self.owner == "config":
            return f"{self.key} is {self.value}."
        return f"{'Your' if self.owner == 'my' else 'The'} {self.key} is {self.value}."

    def thought(self) -> str:
        """The brief reasoning that recalls the value."""
        about = {"the": "the ", "my": "their ", "config": ""}[self.owner] + self.key
        return f"The user asks for {about}. It is {self.value}."


def _fill(template: str, key: str, value: str) -> str:
    return (
        template.replace("{K}", key[:1].upper() + key[1:]).replace("{k}", key).replace("{v}", value)
    )


def state(rng: random.Random, fact: Fact, voice: str = "user") -> str:
    """A sentence that states `fact`, by the user or (`voice="system"`) about the user."""
    if fact.owner == "config":
        pool = STATE_CONFIG
    elif fact.owner == "my" and voice == "system":
        pool = STATE_USER
    elif fact.owner == "my":
        pool = STATE_NAME if fact.key == "name" and rng.random() < 0.35 else STATE_MY
    else:
        pool = STATE
    return _fill(rng.choice(pool), fact.key, fact.value)


def change(rng: random.Random, fact: Fact) -> str:
    """A sentence that gives `fact` a new value (already set on it)."""
    text = _fill(rng.choice(CHANGE), fact.key, fact.value)
    if fact.owner == "my":
        text = text.replace("the new", "my new").replace("The ", "My ").replace("the ", "my ", 1)
    return text.replace("The ", "").replace("the ", "", 1) if fact.owner == "config" else text


def ask(rng: random.Random, fact: Fact) -> tuple[str, str]:
    """A question for `fact` and its answer: a sentence, or the bare value if it asks for that."""
    if rng.random() < 0.2:
        question = rng.choice(ONLY).replace("{t}", fact.title)
        return question[:1].upper() + question[1:], fact.value
    if fact.owner == "config":
        pool = ASK_CONFIG
    elif fact.owner == "my":
        pool = ASK_NAME if fact.key == "name" and rng.random() < 0.15 else ASK_MY
    else:
        pool = ASK
    question = _fill(rng.choice(pool), fact.key, "")
    if rng.random() < 0.15:
        question = question.lower() if fact.owner != "config" and fact.key.islower() else question
    question = rng.choice(BEFORE) + question + rng.choice(AFTER)
    return question, fact.answer()


def _entity_key(rng: random.Random) -> str:
    attribute = rng.choice(list(COMMON))
    entity = rng.choice(
        (
            words.made_up(rng).capitalize(),
            words.made_up(rng, 1, 2),
            f"the {rng.choice(words.OFFICE)} {rng.choice(GROUPS)}",
            f"{rng.choice(words.NAMES)}",
            f"the {rng.choice(words.ADJECTIVES)} {rng.choice(words.NOUNS)}",
            f"{rng.choice(words.OFFICE)} {rng.randint(2, 99)}",
        )
    )
    return f"{attribute} {rng.choice(('of', 'for', 'for'))} {entity}"


def make_fact(rng: random.Random, values: Values, taken: set[str]) -> Fact:
    """A fact whose key is not in `taken` (which it joins)."""
    while True:
        shape = rng.random()
        owner, kinds = "the", ("any",)
        if shape < 0.2:
            key = rng.choice(FIRST)
            kinds = COMMON[key]
        elif shape < 0.42:
            key = rng.choice(list(COMMON))
            kinds = COMMON[key]
        elif shape < 0.6:
            owner, key = "my", rng.choice(["name", "name", "name", *PERSONAL])
            kinds = PERSONAL[key]
        elif shape < 0.75:
            key = _entity_key(rng)
        elif shape < 0.87:
            key = rng.choice(
                (
                    words.made_up(rng),
                    f"{words.common(rng)} {words.common(rng)}",
                    f"{words.made_up(rng)} {rng.choice(list(COMMON))}",
                )
            )
        else:
            owner = "config"
            key = "_".join(
                rng.choice((words.common, words.made_up))(rng) for _ in range(rng.randint(1, 3))
            )
            key = rng.choice((key, key.upper(), key.replace("_", "-")))
        if key.lower() not in taken:
            break
    taken.add(key.lower())
    kind = rng.choice(kinds) if rng.random() < 0.7 else "any"
    return Fact(key, values.draw(kind), owner, kind)
