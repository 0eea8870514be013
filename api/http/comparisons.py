"""Fingerprints of answered prompts, by which a client is told where its next prompt parts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile
from typing import Literal, NamedTuple

from runtime.types import CacheUse, ChatPrompt, GenerateRequest, Message

MAX_KEPT = 16_384
"""Of one fingerprint there are some 500 bytes."""

Part = Literal["model", "tools", "system", "thinking", "messages", "other"]
"""The first part of a request that is not as it was; the order is that of most templates."""


class Comparison(NamedTuple):
    """Two prompts compared: the first part that differs, None where the one before is continued.

    Of the earlier prompt's `num_tokens` the last `num_missed` were computed again.
    """

    part: Part | None
    num_missed: int
    num_tokens: int


class _Fingerprint(NamedTuple):
    """A prompt in hashes, which say nothing outside of this process. An answer's beginning that
    the client sent is no message of its own: the next request has it whole.
    """

    model: str
    tools: int
    system: int
    thinking: int
    other: int
    num_messages: int
    messages: int
    num_tokens: int


def num_read(request: GenerateRequest) -> int:
    """The characters of the messages, which are read to compare or to remember a prompt."""
    prompt = request.prompt
    return sum(len(one.text) for one in prompt.messages) if isinstance(prompt, ChatPrompt) else 0


def read_ahead(request: GenerateRequest) -> None:
    """Have the hash of each text computed, which the text keeps: to compare takes no time then."""
    if isinstance(request.prompt, ChatPrompt):
        _hash_of(request.prompt.messages)


class Comparisons:
    """The prompts of the newest answers by their ids, which are as `runtime.keys.owned` makes them.

    They are in memory only: after a restart no earlier answer is found.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[str, _Fingerprint] = OrderedDict()

    def remember(self, one_id: str, request: GenerateRequest, num_tokens: int) -> None:
        """The request was answered under that id, its prompt had so many tokens."""
        prompt = request.prompt
        if not isinstance(prompt, ChatPrompt) or not num_tokens:
            return
        _, said = _parted(prompt.messages)
        if said and said[-1].role == "assistant":
            said = said[:-1]
        self._kept[one_id] = _Fingerprint(
            request.model,
            *_hashes(prompt),
            num_messages=len(said),
            messages=_hash_of(said),
            num_tokens=num_tokens,
        )
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)

    def compared(self, one_id: str, request: GenerateRequest, use: CacheUse) -> Comparison | None:
        """A request, of which `use` was reused, compared with an answered one; None where that
        one is not known.
        """
        before, prompt = self._kept.get(one_id), request.prompt
        if before is None or not isinstance(prompt, ChatPrompt):
            return None
        num_missed = max(before.num_tokens - use.num_tokens, 0)
        return Comparison(_first(before, request.model, prompt), num_missed, before.num_tokens)

    def forget(self, one_id: str) -> None:
        """The answer was deleted."""
        self._kept.pop(one_id, None)

    def clear(self) -> None:
        """Conversations were deleted: which answers were theirs is not known here."""
        self._kept.clear()


def _first(before: _Fingerprint, model: str, prompt: ChatPrompt) -> Part | None:
    tools, system, thinking, other = _hashes(prompt)
    _, said = _parted(prompt.messages)
    num = before.num_messages
    is_continued = len(said) >= num and _hash_of(said[:num]) == before.messages
    is_same: dict[Part, bool] = {
        "model": model == before.model,
        "tools": tools == before.tools,
        "system": system == before.system,
        "thinking": thinking == before.thinking,
        "messages": is_continued,
        "other": other == before.other,
    }
    return next((part for part, same in is_same.items() if not same), None)


def _parted(messages: Sequence[Message]) -> tuple[Sequence[Message], Sequence[Message]]:
    """The system prompt, and what was said."""
    num = sum(1 for _ in takewhile(lambda message: message.role == "system", messages))
    return messages[:num], messages[num:]


def _hashes(prompt: ChatPrompt) -> tuple[int, int, int, int]:
    """Of the tools, the system prompt, the thinking, and what else a template is given."""
    tools = [(one.name, one.description, one.parameters, one.is_deferred) for one in prompt.tools]
    thinking = prompt.thinking
    return (
        hash(tuple(tools)),
        _hash_of(_parted(prompt.messages)[0]),
        hash((thinking.is_enabled, thinking.effort, thinking.is_adaptive)),
        hash(prompt.template_kwargs),
    )


def _hash_of(messages: Sequence[Message]) -> int:
    """Of all that a model may read of them."""
    return hash(
        tuple(
            (
                one.role,
                one.text,
                one.reasoning,
                one.name,
                one.is_error,
                one.loaded_tools,
                tuple((call.name, call.arguments) for call in one.tool_calls),
                tuple((image.at, image.data, image.url) for image in one.images),
            )
            for one in messages
        )
    )
