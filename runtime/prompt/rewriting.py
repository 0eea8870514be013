"""Rewriting: the only way in which a client's messages are changed, so that every change is told.

A step gives messages and says which of those it was given each is made of. What came of every
message is compared here, so a step cannot change one and keep silent about it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from runtime.types import Message, PromptChange

_WORDS = 64
"""So many characters tell a place in a text."""


class Made(NamedTuple):
    """A message that a step gives, and the numbers of those given to it that it is made of."""

    message: Message
    of: tuple[int, ...]


class RewriteStep(NamedTuple):
    """One kind of change, and the rule by which it is told."""

    rule: str
    apply: Callable[[Sequence[Message]], Iterable[Made]]


class RenderedMessage(NamedTuple):
    """A message as it is rendered, the client's messages that it is made of, and by which rules."""

    message: Message
    sources: tuple[int, ...]
    rules: tuple[str, ...] = ()


class Rewritten(NamedTuple):
    """Messages after all steps. A change counts the messages that a rule did not leave alone."""

    parts: tuple[RenderedMessage, ...]
    changes: tuple[PromptChange, ...] = ()

    @property
    def messages(self) -> tuple[Message, ...]:
        return tuple(part.message for part in self.parts)


class WrittenPrompt(NamedTuple):
    """A prompt as text, and what was done to it while it was written.

    `lost` are the messages of which nothing is in the text.
    """

    text: str
    changes: tuple[PromptChange, ...] = ()
    lost: tuple[int, ...] = ()


def each(change: Callable[[Message], Message | None]) -> Callable[[Sequence[Message]], list[Made]]:
    """A step that looks at one message at a time; None leaves it out."""

    def apply(messages: Sequence[Message]) -> list[Made]:
        made: list[Made] = []
        for number, message in enumerate(messages):
            if (changed := change(message)) is not None:
                made.append(Made(changed, (number,)))
        return made

    return apply


def rewrite(messages: Sequence[Message], steps: Sequence[RewriteStep]) -> Rewritten:
    """The messages after these steps, one after the other."""
    parts = [RenderedMessage(message, (number,)) for number, message in enumerate(messages)]
    unchanged = [Made(message, (number,)) for number, message in enumerate(messages)]
    counts: Counter[str] = Counter()
    for step in steps:
        made = [_with_breakpoints(one, messages) for one in step.apply(messages)]
        if made == unchanged:
            continue
        parts, num_changed = _stepped(parts, made, step.rule)
        messages = [part.message for part in parts]
        unchanged = [Made(message, (number,)) for number, message in enumerate(messages)]
        if num_changed:
            counts[step.rule] += num_changed
    changes = tuple(PromptChange(rule=rule, num_places=num) for rule, num in counts.items())
    return Rewritten(tuple(parts), changes)


def _with_breakpoints(one: Made, messages: Sequence[Message]) -> Made:
    """The same with its breakpoints behind the words that they were behind.

    A message of several has them where the step put them.
    """
    message = one.message
    if not message.breakpoints or len(one.of) != 1:
        return one
    before = messages[one.of[0]]
    if message.text == before.text or message.breakpoints != before.breakpoints:
        return one
    points = tuple(
        msgspec.structs.replace(point, at=moved_to(before.text, message.text, point.at))
        for point in message.breakpoints
    )
    return Made(msgspec.structs.replace(message, breakpoints=points), one.of)


def moved_to(before: str, after: str, at: int) -> int:
    """The place in a changed text that is behind the words which were before `at`.

    Where they are gone, it is as far from the end as it was, or at the same place.
    """
    if after.startswith(before[:at]):
        return at
    words = before[max(at - _WORDS, 0) : at]
    if after.count(words) == 1:
        return after.index(words) + len(words)
    rest = before[at:]
    return len(after) - len(rest) if after.endswith(rest) else min(at, len(after))


def _stepped(
    parts: list[RenderedMessage], made: Sequence[Made], rule: str
) -> tuple[list[RenderedMessage], int]:
    """What a step made of them, and how many of them it did not leave alone."""
    uses = Counter(number for one in made for number in one.of)
    in_order = iter(sorted(one.of for one in made if len(one.of) == 1 and uses[one.of[0]] == 1))
    num_alone = 0
    after: list[RenderedMessage] = []
    for one in made:
        before = [parts[number] for number in one.of]
        is_in_place = len(before) == 1 and uses[one.of[0]] == 1 and next(in_order) == one.of
        if is_in_place and one.message == before[0].message:
            num_alone += 1
            after.append(before[0])
            continue
        rules = dict.fromkeys([known for part in before for known in part.rules] + [rule])
        sources = sorted({source for part in before for source in part.sources})
        after.append(RenderedMessage(one.message, tuple(sources), tuple(rules)))
    return after, len(parts) - num_alone
