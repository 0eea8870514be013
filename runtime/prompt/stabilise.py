"""Stabilise: take out of system messages what is not meant for the model and always changes.

The model is never blinded: only telemetry goes, and everything done is reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from runtime.prompt.rules import Rule
from runtime.types import Image, Message, PromptChange

OPEN, CLOSE = "<system-reminder>", "</system-reminder>"


class Stabilised(NamedTuple):
    """Messages without telemetry, and what was done to them."""

    messages: tuple[Message, ...]
    changes: tuple[PromptChange, ...] = ()


def stabilise(messages: Sequence[Message], rules: Sequence[Rule]) -> Stabilised:
    """Apply the rules. A message that only held telemetry disappears."""
    kept: list[Message] = []
    counts: Counter[str] = Counter()
    for message in messages:
        stripped = message
        for rule in rules if message.role == "system" else ():
            if (match := rule.pattern.match(stripped.text)) is not None:
                stripped = _without(stripped, match.end())
                counts[rule.name] += 1
        if stripped is message or stripped.text.strip() or stripped.images:
            kept.append(stripped)
    changes = tuple(PromptChange(rule=name, num_places=num) for name, num in counts.items())
    return Stabilised(tuple(kept), changes)


def reminder_of(text: str) -> str:
    """Text that is not the user's, as clients mark it inside of user messages."""
    return f"{OPEN}\n{text.strip()}\n{CLOSE}"


def _without(message: Message, end: int) -> Message:
    """The message without its first `end` characters."""

    def earlier(image: Image) -> Image:
        return msgspec.structs.replace(image, at=max(image.at - end, 0))

    images = tuple(map(earlier, message.images))
    return msgspec.structs.replace(message, text=message.text[end:], images=images)
