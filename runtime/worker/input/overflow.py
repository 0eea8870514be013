"""A prompt within its window: composed whole, or without the oldest turns of its conversation.

Belongs to the intake thread. What goes is decided by the client's messages alone, so that the next
request of the conversation is cut in the same place, whatever is known of it by then.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import msgspec

from runtime.errors import ContextTooLong, PromptChanged, SummaryWanted
from runtime.kv.deletions import Recognised
from runtime.kv.media import Medium
from runtime.prompt.compaction import summary_message
from runtime.prompt.healing import TurnScope
from runtime.prompt.overflow import (
    DROPPED,
    SUMMARISED,
    most_summary,
    most_tokens,
    num_dropped,
    summed_up,
    turn_starts,
    without,
)
from runtime.types import ChatPrompt, GenerateRequest, Message, Tool
from runtime.worker.input.compose import Composed, Composer
from runtime.worker.input.kept import READ
from store.keyed_names import Asker
from store.turns import Turn, summary_of

Media = Mapping[bytes, Medium]


def compose_within(
    composer: Composer, request: GenerateRequest, prompt: ChatPrompt, media: Media | None = None
) -> Composed:
    """As `Composer.compose`, without old turns where the request says so and it does not fit.

    Raises:
        InvalidRequest: the template refuses it.
        ContextTooLong: it does not fit, or not even its last turn does.
        SummaryWanted: what goes is to be summed up, and was not yet.
    """
    if request.overflow in (None, "refuse") or request.work not in READ:
        return composer.compose(request, prompt, media)
    widest = composer.context - 1
    window = min(widest, request.max_prompt_tokens or widest) + 1
    wanted = min(most_tokens(composer.context, request.max_tokens), window - 1)
    overlong = _Overlong(composer, request, prompt, media or {}, window)
    for most in (wanted, window - 1):
        if (composed := overlong.cut_to(most)) is not None:
            return composed
    num_tokens = overlong.attempt(len(overlong.starts) - 1, window - 1).num_tokens
    raise ContextTooLong(num_tokens, window, is_rest=True)


@dataclass(frozen=True)
class _Attempt:
    """What came of a cut: its tokens, at least, and the prompt if there are few enough."""

    num_tokens: int
    composed: Composed | None = None


@dataclass(frozen=True)
class _Overlong:
    """A conversation that may be longer than its window, in tokens."""

    composer: Composer
    request: GenerateRequest
    prompt: ChatPrompt
    media: Media
    window: int

    @cached_property
    def starts(self) -> list[int]:
        """Where its turns begin."""
        return turn_starts(self.prompt.messages)

    @cached_property
    def turns(self) -> list[int]:
        """The tokens of each turn, about."""
        ends = [*self.starts[1:], len(self.prompt.messages)]
        messages = self.prompt.messages
        return [
            sum(self._size(one) for one in messages[start:end] if one.role != "system")
            for start, end in zip(self.starts, ends, strict=False)
        ]

    @cached_property
    def kept(self) -> int:
        """The tokens of what stays whatever goes, about."""
        systems = [one for one in self.prompt.messages if one.role == "system"]
        return sum(map(self._size, systems)) + self._count(_told(self.prompt.tools))

    def cut_to(self, most: int) -> Composed | None:
        """The prompt with as few turns left out as it takes; None where `most` are too few."""
        attempt = self.attempt(0, most)
        if attempt.composed is not None or len(self.starts) < 2:
            return attempt.composed
        room = 0
        if self.request.overflow == "summarise":
            room = most_summary(self.window) + self._size(summary_message(""))
        target = min(most - room, self._about(0) - 1)
        while number := num_dropped(self.turns, self.kept, self.window, target):
            attempt = self.attempt(number, most)
            if attempt.composed is not None:
                return self._saying(attempt.composed, number)
            target = most - (attempt.num_tokens - self._about(number))
        return None

    def attempt(self, number: int, most: int) -> _Attempt:
        """The prompt without so many turns."""
        first = self.starts[number] if number else 0
        summary = self._summary(first) if first else None
        cut = (without(first, summary.summary if summary else ""),) if first else ()
        composer = replace(self.composer, context=most + 1, cut=cut)
        try:
            composed = composer.compose(self.request, self.prompt, self.media)
        except ContextTooLong as error:
            return _Attempt(error.num_tokens)
        if composed.lineage is not None:
            composed = composed._replace(lineage=composed.lineage._replace(summary=summary))
        num_tokens = len(composed.token_ids)
        return _Attempt(num_tokens, composed if num_tokens <= most else None)

    def _about(self, number: int) -> int:
        return self.kept + sum(self.turns[number:])

    def _saying(self, composed: Composed, number: int) -> Composed:
        """With how much was left out beside how many messages."""
        num_tokens = sum(self.turns[:number])
        changes = tuple(
            msgspec.structs.replace(change, num_turns=number, num_tokens=num_tokens)
            if change.rule in (DROPPED, SUMMARISED)
            else change
            for change in composed.changes
        )
        return composed._replace(changes=changes)

    def _summary(self, first: int) -> Turn | None:
        """What stands for the messages before that one; None where they are just dropped.

        Raises:
            SummaryWanted: it is to be made.
            PromptChanged: the answer began with one that is lost.
        """
        if self.request.overflow != "summarise":
            return None
        cache, turns = self.request.cache, self.composer.turns
        key = summed_up(cache.tenant, self.prompt.messages[:first])
        is_named = cache.session_id is not None
        asker = Asker(self.request.model, cache.session_id)
        scope = TurnScope(asker) if is_named else TurnScope(asker, key, cache.tenant)
        text = next((one.text for one in self.request.summaries if one.first == first), None)
        if text is not None:
            ids = self.composer.template.encode(text).token_ids
            kept = summary_of(key, array("I", ids).tobytes(), text)
        elif (found := turns.summary(key, scope)) is not None:
            kept = found
        elif self.request.said is not None:
            raise PromptChanged
        elif self.request.work == "generate":
            raise SummaryWanted(first)
        else:
            return None
        turns.put(kept, scope, Recognised(asker, cache.after_deletion))
        return kept

    def _size(self, message: Message) -> int:
        """The tokens of a message, about; without thoughts, which clients drop later on."""
        calls = "".join(call.name + call.arguments for call in message.tool_calls)
        words = self.composer.template.sizes.markers + self._count(message.text + calls)
        pictures = (self.media[image.data].num_tokens for image in message.images)
        return words + sum(pictures)

    def _count(self, text: str) -> int:
        return self.composer.template.sizes.of(text)


def _told(tools: Sequence[Tool]) -> str:
    return "".join(f"{one.name}{one.description or ''}{one.parameters}" for one in tools)
