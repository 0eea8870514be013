"""Stabilise: take out of system messages what is not meant for the model and always changes.

The model is never blinded: only telemetry goes, and everything done is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec

from runtime.prompt.rewriting import Rewritten, Step, each, rewrite
from runtime.prompt.rules import Rule
from runtime.types import Image, Message


def telemetry_steps(rules: Sequence[Rule]) -> list[Step]:
    """One step for each rule. A message that only held telemetry disappears."""
    return [Step(rule.name, each(partial(_stripped, rule))) for rule in rules]


def stabilise(messages: Sequence[Message], rules: Sequence[Rule]) -> Rewritten:
    """Apply these rules and nothing else."""
    return rewrite(messages, telemetry_steps(rules))


def _stripped(rule: Rule, message: Message) -> Message | None:
    match = rule.pattern.match(message.text) if message.role == "system" else None
    if match is None:
        return message
    stripped = _without(message, match.end())
    return stripped if stripped.text.strip() or stripped.images else None


def _without(message: Message, end: int) -> Message:
    """The message without its first `end` characters."""

    def earlier(image: Image) -> Image:
        return msgspec.structs.replace(image, at=max(image.at - end, 0))

    images = tuple(map(earlier, message.images))
    return msgspec.structs.replace(message, text=message.text[end:], images=images)
