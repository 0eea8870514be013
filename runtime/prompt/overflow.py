"""Overflow, purely: which old turns of a conversation go when it no longer fits its window.

A turn is what the user says and all that follows until the user speaks again. Cuts lie on lines
that are far apart, counted in tokens from the conversation's beginning. So the next request of the
same conversation is cut in the same place, and what is known of it is taken up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from runtime.prompt.canonical import chain, digest, forms
from runtime.prompt.compaction import summary_message
from runtime.prompt.rewriting import Made, RewriteStep
from runtime.types import Message

DROPPED = "dropped_turns"
SUMMARISED = "summarised_turns"
_MOST_SUMMARY = 8192
_LEAST_ANSWER, _MOST_ANSWER = 8, 4
"""Parts of the window that are left to the answer."""


def most_tokens(window: int, max_tokens: int | None) -> int:
    """How long a prompt may be where turns may go: an eighth of the window is left to the answer,
    or what the answer may have, up to a quarter.
    """
    answer = max(window // _LEAST_ANSWER, min(max_tokens or 0, window // _MOST_ANSWER))
    return max(1, window - max(1, answer))


def turn_starts(messages: Sequence[Message]) -> list[int]:
    """The first message of each turn. The first turn has whatever is said before its user speaks.

    No turn begins between a call and its result.
    """
    starts: list[int] = []
    calls: dict[str | None, int] = {}
    for number, message in enumerate(messages):
        if message.role == "system":
            continue
        if not starts or message.role == "user":
            starts.append(number)
        if message.role == "tool":
            called = calls.get(message.tool_call_id, calls.get(None, number))
            starts = [start for start in starts if start <= called] or starts[:1]
        for call in message.tool_calls:
            calls[call.id] = calls[None] = number
    return starts


def num_dropped(turns: Sequence[int], kept: int, window: int, most: int) -> int | None:
    """How many of the oldest turns go so that a prompt has `most` tokens; None if all but the last
    are not enough.

    `turns` are the tokens of each, the last of which stays, and `kept` those of all else. Lines
    are half a window apart, or a quarter, an eighth and so on where less than that is free beside
    what is kept, or where turns are so long that no such line leaves enough.
    """
    total = kept + sum(turns)
    if total <= most:
        return 0
    before = [0, *accumulate(turns)][: len(turns)]
    free = most_tokens(window, None) - kept
    step = window // 2
    while step > 1 and 4 * step > 3 * free:
        step //= 2
    while step:
        for number in _on_lines(before, step):
            if total - before[number] <= most:
                return number
        step //= 2
    return None


def _on_lines(before: Sequence[int], step: int) -> Iterator[int]:
    """The first turns at or behind a line each, of which there is one every `step` tokens."""
    for number, (last, here) in enumerate(pairwise(before), 1):
        if here // step > last // step:
            yield number


def most_summary(window: int) -> int:
    """How many tokens a summary may have."""
    return min(_MOST_SUMMARY, max(1, window // _LEAST_ANSWER))


def without(first: int, summary: str = "") -> RewriteStep:
    """Leaves out what is said before message `first`, except by the system. A summary of it takes
    its place, as a message of the user's.
    """

    def apply(messages: Sequence[Message]) -> list[Made]:
        kept = [Made(message, (number,)) for number, message in enumerate(messages)]
        heads = [one for one in kept[:first] if one.message.role == "system"]
        gone = [number for one in kept[:first] if one not in heads for number in one.of]
        told = [Made(summary_message(summary), tuple(gone))] if summary else []
        return [*heads, *told, *kept[first:]]

    return RewriteStep(SUMMARISED if summary else DROPPED, apply)


def summed_up(tenant: str, messages: Sequence[Message]) -> bytes:
    """Names what a summary stands for: a tenant's messages, but for those of the system."""
    said = [message for message in messages if message.role != "system"]
    return chain(digest("summary", tenant), forms(said))[-1]
