"""`Draft`: one choice of an answer, put together from its chunks, free of any protocol."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from runtime.types import (
    Chunk,
    Finished,
    FinishReason,
    ReasoningDelta,
    ReasoningWasText,
    TextDelta,
    TextWasReasoning,
    TokenLogprobs,
    ToolCall,
    ToolCallDelta,
)


@dataclass(slots=True)
class Draft:
    """A choice that is still being written; give every chunk of the answer to `collect`.

    `customs` are the names of the tools that take one text.
    """

    customs: frozenset[str] = frozenset()
    texts: list[str] = field(default_factory=list[str])
    reasonings: list[str] = field(default_factory=list[str])
    calls: list[ToolCall] = field(default_factory=list[ToolCall])
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    finished: Finished | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def reasoning(self) -> str:
        return "".join(self.reasonings)

    @property
    def finish_reason(self) -> FinishReason:
        return self.finished.reason if self.finished is not None else "stop"

    def add(self, chunk: Chunk) -> None:
        """Take up a chunk of this choice; one that says nothing changes nothing."""
        match chunk:
            case TextDelta():
                self.texts.append(chunk.text)
                self.logprobs += chunk.logprobs
            case ReasoningDelta():
                self.reasonings.append(chunk.text)
                self.logprobs += chunk.logprobs
            case ToolCallDelta(id=None):
                last = self.calls[-1]
                arguments = last.arguments + chunk.arguments
                self.calls[-1] = msgspec.structs.replace(last, arguments=arguments)
            case ToolCallDelta(id=str(call_id)):
                name = chunk.name or ""
                is_custom = name in self.customs
                call = ToolCall(
                    id=call_id, name=name, arguments=chunk.arguments, is_custom=is_custom
                )
                self.calls.append(call)
            case Finished():
                self.finished = chunk
            case _:
                pass


def collect(drafts: Sequence[Draft], chunk: Chunk) -> None:
    """Give a chunk to the choice it belongs to."""
    if isinstance(chunk, TextDelta | ReasoningDelta | ToolCallDelta | Finished):
        drafts[chunk.index].add(chunk)


def settled(chunks: Iterable[Chunk]) -> list[Chunk]:
    """A whole answer's chunks, each piece told as what it turned out to be in the end.

    Text that turned out to be reasoning is reasoning, and a call that was cut short is none.
    """
    told: list[Chunk] = []
    texts: defaultdict[int, list[int]] = defaultdict(list)
    repeated: dict[int, tuple[TokenLogprobs, ...]] = {}
    skips_blank: set[int] = set()
    for chunk in chunks:
        match chunk:
            case TextWasReasoning(index):
                _as_reasoning(told, texts.pop(index, []))
                skips_blank.add(index)
            case ReasoningWasText(index):
                told, repeated[index] = _without_reasoning(told, index)
            case TextDelta(index) if index in repeated:
                texts[index].append(len(told))
                logprobs = repeated.pop(index) + chunk.logprobs
                told.append(msgspec.structs.replace(chunk, logprobs=logprobs))
            case TextDelta(index, text) if index in skips_blank:
                told.append(msgspec.structs.replace(chunk, text=text.lstrip()))
                skips_blank -= {index} if text.strip() else set()
            case TextDelta(index):
                texts[index].append(len(told))
                told.append(chunk)
            case Finished(index):
                texts.pop(index, None)
                told.append(chunk)
            case _:
                told.append(chunk)
    return _without_half_calls(told)


def is_whole(arguments: str) -> bool:
    """These arguments of a call are JSON, and nothing of it is missing."""
    try:
        return isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        return False


def _without_half_calls(told: list[Chunk]) -> list[Chunk]:
    """The chunks without the calls whose arguments broke off, or are no JSON."""
    written: defaultdict[tuple[int, int], str] = defaultdict(str)
    for one in told:
        if isinstance(one, ToolCallDelta):
            written[one.index, one.call_index] += one.arguments
    half = {call for call, arguments in written.items() if not is_whole(arguments)}
    return [
        one
        for one in told
        if not (isinstance(one, ToolCallDelta) and (one.index, one.call_index) in half)
    ]


def _without_reasoning(
    told: Sequence[Chunk], index: int
) -> tuple[list[Chunk], tuple[TokenLogprobs, ...]]:
    """What was told but for the reasoning of this choice, and the probabilities of its tokens."""
    pieces = [one for one in told if isinstance(one, ReasoningDelta) and one.index == index]
    rest = [one for one in told if not isinstance(one, ReasoningDelta) or one.index != index]
    return rest, tuple(entry for one in pieces for entry in one.logprobs)


def _as_reasoning(told: list[Chunk], places: Sequence[int]) -> None:
    """The text at these places is reasoning, but for the last piece, which is its mark."""
    pieces = [one for place in places if isinstance(one := told[place], TextDelta)]
    reasoning = "".join(one.text for one in pieces[:-1]).strip()
    for number, (place, one) in enumerate(zip(places, pieces, strict=True)):
        text = reasoning if number == 0 else ""
        told[place] = ReasoningDelta(one.index, text, one.logprobs)
