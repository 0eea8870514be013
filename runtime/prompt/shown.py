"""Shown: which messages of a conversation are not in the text that a chat template made of it.

Templates trim, quote and escape what they are given, so a text counts as shown in any of these
spellings. Pure; what to do about a message that is not shown is for others to decide.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from enum import IntEnum
from itertools import pairwise
from typing import cast

from runtime.types import Message, ToolCall

LOST = "lost_text"
THOUGHTS = "left_out_thoughts"
"""The rules by which it is told that the template left out words, or thoughts, of messages."""

_THOUGHT_END = "</think>"
_SWITCHES = re.compile(r"/(no_?)?think\b")
"""Words by which a user turns thinking on and off: some templates take them out."""
_NUM_WORDS = 32
_NEAR = 1 << 12
"""So many characters a template may write between the texts of two messages."""
_HTML = str.maketrans({"<": r"\u003c", ">": r"\u003e", "&": r"\u0026", "'": r"\u0027"})


class Loss(IntEnum):
    """How much of a message's words the prompt does not have."""

    NOTHING = 0
    SOME = 1
    ALL = 2


class Shown:
    """A rendered text, in which what its messages say is looked for, message after message."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._words: str | None = None

    def look_for(self, message: Message) -> tuple[Loss, bool]:
        """How much is lost of what the next message says and calls, and whether thoughts are."""
        start = self._at
        return self._loss(message), self._lacks_thoughts(message, start)

    def _loss(self, message: Message) -> Loss:
        losses = [self._loss_of_text(piece) for piece in _pieces(message)]
        if message.role == "assistant" and any(losses):
            losses = [self._loss_of_text(message.text.rpartition(_THOUGHT_END)[2])]
        for call in message.tool_calls:
            losses += [Loss(Loss.SOME * (not self._has(text))) for text in _texts_of(call)]
        if not any(losses):
            return Loss.NOTHING
        return Loss.ALL if all(one is Loss.ALL for one in losses) else Loss.SOME

    def _lacks_thoughts(self, message: Message, start: int) -> bool:
        """Thoughts came in a field or in the text, and are not beside it."""
        if message.role != "assistant":
            return False
        thoughts, found, _ = message.text.rpartition(_THOUGHT_END)
        inside = thoughts.rpartition("<think>")[2] if found else ""
        given = [one.strip() for one in (message.reasoning or "", inside)]
        return not all(self._is_beside(one, start) for one in given)

    def _is_beside(self, text: str, start: int) -> bool:
        end = self._at + len(text) + _NEAR
        return any(self._text.find(one, start, end) >= 0 for one in _spellings(text))

    def _loss_of_text(self, text: str) -> Loss:
        if self._has(text):
            return Loss.NOTHING
        words = _SWITCHES.sub("", text).split()
        if self._has(" ".join(words)):
            return Loss.NOTHING
        sample = words[:: max(len(words) // _NUM_WORDS, 1)]
        num_there = sum(word in self._text for word in sample)
        return Loss.SOME if 2 * num_there >= len(sample) else Loss.ALL

    def _has(self, text: str) -> bool:
        """It is here, in one of the spellings that templates have for a text."""
        text = text.strip()
        if not text or self._goes_on_with(text):
            return True
        spellings = _spellings(text)
        if any(map(self._goes_on_with, spellings[1:])):
            return True
        if any(one in self._text for one in spellings):
            return True
        if self._words is None:
            self._words = " ".join(self._text.split())
        return " ".join(text.split()) in self._words

    def _goes_on_with(self, spelled: str) -> bool:
        """It is not far behind what was found last."""
        at = self._text.find(spelled, self._at, self._at + len(spelled) + _NEAR)
        if at >= 0:
            self._at = at + len(spelled)
        return at >= 0


def _pieces(message: Message) -> list[str]:
    """The texts of a message between its pictures."""
    ends = sorted({0, *(image.at for image in message.images), len(message.text)})
    return [message.text[start:end] for start, end in pairwise(ends)]


def _spellings(text: str) -> list[str]:
    """As it is, and as it is written inside of quotes."""
    found = [text]
    for quoted in (json.dumps(text, ensure_ascii=False), json.dumps(text)):
        found += [quoted[1:-1], quoted[1:-1].translate(_HTML)]
    return list(dict.fromkeys([*found, repr(text)[1:-1]]))


def _texts_of(call: ToolCall) -> Iterator[str]:
    """The name of a call, and all texts in its arguments."""
    yield call.name
    try:
        yield from _strings(json.loads(call.arguments))
    except (ValueError, RecursionError):
        yield call.arguments


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for one in cast("dict[str, object]", value).values():
            yield from _strings(one)
    elif isinstance(value, list):
        for one in cast("Sequence[object]", value):
            yield from _strings(one)
