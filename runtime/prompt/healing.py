"""Healing: a turn that a client gives back changed is read as the very tokens that were generated.

What a turn was is found by the canonical form of the whole conversation up to it. The text that
follows it is rendered anew; where it begins is found by a sentinel in the turn's place, and taken
only when everything around it agrees. Otherwise nothing is healed: it costs time, never a word.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec

from runtime.prompt import canonical
from runtime.prompt.rewriting import WrittenPrompt
from runtime.types import (
    ChatPrompt,
    Chunk,
    Message,
    PromptChange,
    ReasoningDelta,
    ReasoningWasText,
    TextDelta,
    TextWasReasoning,
    ToolCall,
    ToolCallDelta,
)
from store.keyed_names import Asker
from store.turns import Turn

SENTINEL = "hearth7c1e94d2splice"


class KnownPrefix(NamedTuple):
    """A conversation's beginning as the model knows it: its turns, and all their tokens.

    `thoughts` are those of its turns by their keys.
    """

    turns: tuple[Turn, ...]
    token_ids: list[int]
    ends: tuple[int, ...]
    prefix_end: int
    thoughts: dict[bytes, bytes]

    @property
    def num_turns(self) -> int:
        return len(self.turns)

    @property
    def packed(self) -> array[int]:
        """The same tokens, of four bytes each."""
        token_ids = array("I")
        for turn in self.turns:
            token_ids.frombytes(turn.token_ids)
        return token_ids[: len(self.token_ids)]


class TurnScope(NamedTuple):
    """What its turns are kept by: who asks, and without a session's id how it began, and whose
    it is.
    """

    asker: Asker
    beginning: bytes = b""
    tenant: str = ""


class Cut(NamedTuple):
    """What an answer was cut off before: a stop string, or a mark, which `is_last` of what came."""

    mark: str
    is_last: bool = False


class Lineage(NamedTuple):
    """Where a request stands: what its answer will be noted with.

    `key` names the conversation up to the question, `way` are the turns that it goes on from;
    `begun` is what the client has the answer begin with, `bare` names the conversation up to the
    question whatever its tools are, if it has some, and `tools` are all of these, packed. A
    `summary` stands for what was said before. The rest is as in `Turn`.
    """

    key: bytes
    scope: TurnScope
    way: tuple[Turn, ...] = ()
    start: int = 0
    ends: tuple[int, ...] = ()
    prefix_end: int = 0
    begun: str = ""
    bare: bytes = b""
    tools: bytes = b""
    summary: Turn | None = None


@dataclass(slots=True)
class AnswerRecord:
    """An answer as the client sees it, taken up chunk by chunk."""

    texts: list[str] = field(default_factory=list[str])
    thoughts: list[str] = field(default_factory=list[str])
    calls: list[ToolCall] = field(default_factory=list[ToolCall])

    def add(self, chunk: Chunk) -> None:
        if isinstance(chunk, TextDelta):
            self.texts.append(chunk.text)
        elif isinstance(chunk, ReasoningDelta):
            self.thoughts.append(chunk.text)
        elif isinstance(chunk, TextWasReasoning):
            self.thoughts, self.texts = [*self.thoughts, *self.texts[:-1]], []
        elif isinstance(chunk, ReasoningWasText):
            self.thoughts = []
        elif isinstance(chunk, ToolCallDelta):
            if chunk.id is not None or not self.calls:
                self.calls.append(ToolCall(id="", name=chunk.name or "", arguments=""))
            last = self.calls[-1]
            arguments = last.arguments + chunk.arguments
            self.calls[-1] = msgspec.structs.replace(last, arguments=arguments)

    @property
    def is_empty(self) -> bool:
        return not self.calls and not "".join(self.texts).strip()

    def form(self, defaults: canonical.Defaults = canonical.NO_DEFAULTS) -> canonical.Form:
        """Its canonical form."""
        text, is_thought = "".join(self.texts), any(self.thoughts)
        return canonical.answer(text, self.calls, defaults, is_thought=is_thought)

    def thought(self) -> bytes:
        """What stands for the thoughts before it; empty where there were none."""
        thoughts = "".join(self.thoughts) or None
        message = Message(role="assistant", text="".join(self.texts), reasoning=thoughts)
        return canonical.thoughts_of(message) or b""


class TemplateRenderer(Protocol):
    """A template, as far as it is needed here."""

    def render(self, prompt: ChatPrompt, *, opens_answer: bool = True) -> str: ...
    def write(self, prompt: ChatPrompt, *, first: int = 0) -> WrittenPrompt: ...


class Spliced(NamedTuple):
    """A prompt of which the messages up to `number` are tokens already.

    `text` is the whole rendering with the sentinel, of which everything from `rest_at` on follows
    those tokens; `prompt` is what it was rendered from, with these changes. Of messages behind
    `number` it says which are `lost`.
    """

    prompt: ChatPrompt
    text: str
    number: int
    rest_at: int
    changes: tuple[PromptChange, ...] = ()
    lost: tuple[int, ...] = ()


def splice(renderer: TemplateRenderer, prompt: ChatPrompt, index: int, end: str) -> Spliced | None:
    """Find where the text goes on after message `index`, a turn that ended with the marker `end`.

    None when the template does not show it beyond doubt.

    Raises:
        InvalidRequest: the template refuses these messages.
    """
    marked = marked_prompt(prompt, index)
    text, changes, lost = renderer.write(marked, first=index + 1)
    head = _up_to(marked, index)
    if text.count(SENTINEL) != 1 or not end:
        return None
    at = text.index(SENTINEL)
    before = renderer.render(head, opens_answer=False)
    if at < len(before) or not text.startswith(before):
        return None
    closing = _closing(renderer, marked, index)
    at += len(SENTINEL)
    rest = _rest_at(text, at, closing, end) if closing is not None else None
    return Spliced(marked, text, index, rest, changes, lost) if rest is not None else None


def marked_prompt(prompt: ChatPrompt, index: int) -> ChatPrompt:
    """The prompt with the sentinel in message `index`, and without thoughts up to it."""
    messages = [
        msgspec.structs.replace(message, reasoning=None) if number <= index else message
        for number, message in enumerate(prompt.messages)
    ]
    messages[index] = _with_sentinel(messages[index])
    return msgspec.structs.replace(prompt, messages=tuple(messages))


def _with_sentinel(message: Message) -> Message:
    if not message.tool_calls:
        return msgspec.structs.replace(message, text=SENTINEL)
    *calls, last = message.tool_calls
    last = msgspec.structs.replace(last, arguments=f'{{"x": "{SENTINEL}"}}')
    return msgspec.structs.replace(message, tool_calls=(*calls, last))


def _up_to(prompt: ChatPrompt, index: int) -> ChatPrompt:
    return msgspec.structs.replace(prompt, messages=prompt.messages[:index])


def _closing(renderer: TemplateRenderer, prompt: ChatPrompt, index: int) -> str | None:
    """What the template puts behind such a turn's last word."""
    question = Message(role="user", text="x")
    small = msgspec.structs.replace(prompt, messages=(question, prompt.messages[index]), tools=())
    text = renderer.render(small, opens_answer=False)
    return text.rpartition(SENTINEL)[2] if SENTINEL in text else None


def _rest_at(text: str, at: int, closing: str, end: str) -> int | None:
    """Where what follows the turn's end begins, the end's marker being in the closing or next."""
    inside = closing.find(end)
    if inside >= 0:
        closing = closing[: inside + len(end)]
        return at + len(closing) if text.startswith(closing, at) else None
    if text.startswith(closing + end, at):
        return at + len(closing) + len(end)
    return None


def worth_marking(num_messages: int, first: int, limit: int) -> list[int]:
    """Messages from `first` on whose ends are worth a boundary: dense at the end, then sparser."""
    chosen: list[int] = []
    step = 1
    number = num_messages - 1
    while number >= first and len(chosen) < limit:
        chosen.append(number)
        number -= step
        if len(chosen) > 2:
            step *= 2
    return chosen[::-1]


def num_common_characters(one: str, other: str) -> int:
    """How long the common beginning of two texts is."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while low < high - 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low


def thinned(positions: Sequence[int], pinned: Sequence[int], limit: int) -> tuple[int, ...]:
    """At most `limit` positions: all pinned ones, then from the end on, the gaps growing."""
    rest = sorted(set(positions) - set(pinned))
    room = max(limit - len(set(pinned)), 1)
    if len(rest) > room:
        rest = [rest[number] for number in worth_marking(len(rest), 0, room)]
    return tuple(sorted({*rest, *pinned}))
