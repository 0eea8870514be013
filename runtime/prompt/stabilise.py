"""Stabilise: take out of early messages what changes from turn to turn, so that prefixes hold.

The model is never blinded: what is stripped is telemetry, what is moved is given to it at the end
of the prompt, whole (DESIGN section 7). Everything done is reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from runtime.prompt.rules import Rule, Scope
from runtime.types import Message, PromptChange

OPEN, CLOSE = "<system-reminder>", "</system-reminder>"


class Stabilised(NamedTuple):
    """Messages that stay as they are from turn to turn, and what was moved out of them."""

    messages: tuple[Message, ...]
    moved: tuple[str, ...] = ()
    changes: tuple[PromptChange, ...] = ()


class _Cut(NamedTuple):
    start: int
    end: int
    rule: Rule


def stabilise(messages: Sequence[Message], rules: Sequence[Rule]) -> Stabilised:
    """Apply the rules. A message that only held what was taken out of it disappears."""
    kept: list[Message] = []
    moved: list[str] = []
    counts: Counter[str] = Counter()
    for message in messages:
        is_early = not any(one.role == "user" for one in kept)
        cuts = _cuts(message, [r for r in rules if _covers(r.scope, message, is_early=is_early)])
        counts.update(cut.rule.name for cut in cuts)
        moved += [
            message.text[cut.start : cut.end].strip("\n")
            for cut in cuts
            if cut.rule.kind == "relocate"
        ]
        if not cuts:
            kept.append(message)
        elif (rest := _without(message, cuts)).text.strip() or rest.images or rest.tool_calls:
            kept.append(rest)
    changes = tuple(PromptChange(rule=name, num_places=num) for name, num in counts.items())
    return Stabilised(tuple(kept), tuple(dict.fromkeys(moved)), changes)


def place(messages: Sequence[Message], moved: Sequence[str]) -> tuple[Message, ...]:
    """The messages with what was moved at their end, as a reminder in the last one."""
    if not moved:
        return tuple(messages)
    reminder = reminder_of("\n".join(moved))
    *rest, last = messages
    if last.role not in ("user", "tool"):
        return (*messages, Message(role="user", text=reminder))
    text = f"{last.text}\n\n{reminder}" if last.text else reminder
    return (*rest, msgspec.structs.replace(last, text=text))


def reminder_of(text: str) -> str:
    """Text that is not the user's, as clients mark it inside of user messages."""
    return f"{OPEN}\n{text.strip()}\n{CLOSE}"


def _covers(scope: Scope, message: Message, *, is_early: bool) -> bool:
    """Early is what comes before the end of the first user message that stays."""
    match scope:
        case "system":
            return message.role == "system"
        case "early":
            return message.role == "system" or (message.role == "user" and is_early)
        case "user":
            return message.role == "user"


def _cuts(message: Message, rules: Sequence[Rule]) -> list[_Cut]:
    """Where the rules match, in order; of two that overlap the earlier one."""
    found = [
        _Cut(*match.span(), rule) for rule in rules for match in rule.pattern.finditer(message.text)
    ]
    found.sort(key=lambda cut: (cut.start, -cut.end))
    cuts: list[_Cut] = []
    for cut in found:
        free_from = cuts[-1].end if cuts else 0
        if free_from <= cut.start < cut.end:
            cuts.append(_whole_lines(cut, message.text, free_from))
    return cuts


def _whole_lines(cut: _Cut, text: str, free_from: int) -> _Cut:
    """A line goes with one of its line breaks."""
    if cut.rule.is_inline:
        return cut
    if cut.end < len(text):
        return cut._replace(end=cut.end + 1)
    return cut._replace(start=max(cut.start - 1, free_from))


def _without(message: Message, cuts: Sequence[_Cut]) -> Message:
    pieces: list[str] = []
    position = 0
    for cut in cuts:
        pieces.append(message.text[position : cut.start])
        position = max(position, cut.end)
    pieces.append(message.text[position:])
    images = tuple(
        msgspec.structs.replace(image, at=image.at - _cut_before(image.at, cuts))
        for image in message.images
    )
    return msgspec.structs.replace(message, text="".join(pieces), images=images)


def _cut_before(at: int, cuts: Sequence[_Cut]) -> int:
    return sum(min(cut.end, at) - cut.start for cut in cuts if cut.start < at)
