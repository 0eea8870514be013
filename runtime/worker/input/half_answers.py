"""Half of an answer of ours that a client gives back becomes a turn that ends where the half does.

A client that leaves, or is cut off, has less of an answer than the model said. What was said is
read once more from its tokens, as it was when they were generated, up to what the client has.
Belongs to the intake thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from runtime.prompt.canonical import answer, defaults_of, shown
from runtime.prompt.healing import AnswerRecord
from runtime.types import ChatPrompt, Chunk, Message, TextDelta, TextWasReasoning, ToolCallDelta
from runtime.worker.input.template import Template
from runtime.worker.output.dialect import Dialect
from runtime.worker.output.parser import OutputParser
from runtime.worker.output.tools import RequestTools
from store.turns import Turn

_CONTEXT_TOKENS = 64
"""Before an answer: they say whether it begins inside of thoughts."""


class Half(NamedTuple):
    """A message that may be half of an answer; `key` and `bare` name the conversation up to it."""

    message: Message
    key: bytes
    bare: bytes


class _End(NamedTuple):
    """An answer could end after so many tokens, which said so many chunks."""

    num_tokens: int
    num_chunks: int


@dataclass(slots=True)
class _Said:
    """An answer as its client was told it, and where it could end."""

    chunks: list[Chunk] = field(default_factory=list[Chunk])
    ends: list[_End] = field(default_factory=list[_End])

    def up_to(self, end: _End) -> AnswerRecord:
        record = AnswerRecord()
        for chunk in self.chunks[: end.num_chunks]:
            record.add(chunk)
        return record


@dataclass(frozen=True, slots=True)
class HalfAnswers:
    """Cuts answers to this prompt's tools, as this template and dialect have them written."""

    template: Template
    dialect: Dialect
    prompt: ChatPrompt
    eos_token_ids: frozenset[int]

    def cut(self, way: Sequence[Turn], half: Half) -> list[Turn] | None:
        """A way with its last turn cut to this half; None where that did not begin like it."""
        turn, token_ids = way[-1], array("I")
        for one in way:
            token_ids.frombytes(one.token_ids)
        output_ids = token_ids[turn.said_at :].tolist()
        if output_ids[-1:] and output_ids[-1] in self.eos_token_ids:
            output_ids.pop()
        before = token_ids[max(turn.said_at - _CONTEXT_TOKENS, 0) : turn.said_at].tolist()
        said = self._said(before, output_ids)
        end, text = self._after_calls(said, half.message), ""
        if not half.message.tool_calls:
            end, text = _after_text(said, shown(half.message))
        if end is None or turn.said_at + end.num_tokens <= turn.start:
            return None
        if (rest := self._ids_of(text, output_ids[: end.num_tokens])) is None:
            return None
        kept = token_ids[turn.start : turn.said_at + end.num_tokens] + array("I", rest)
        ends = [one for one in turn.ends if one <= turn.said_at]
        cut = msgspec.structs.replace(
            turn,
            key=half.key,
            bare=half.bare,
            token_ids=kept.tobytes(),
            ends=(*ends, turn.start + len(kept)),
            thoughts=said.up_to(end).thought(),
        )
        return [*way[:-1], cut]

    def _after_calls(self, said: _Said, given: Message) -> _End | None:
        """Where all was said that this message with calls says, and nothing else."""
        defaults, calls = defaults_of(self.prompt.tools), given.tool_calls
        form = answer(given.text, calls, defaults, is_thought=bool(given.reasoning))
        for end in said.ends:
            record = said.up_to(end)
            if len(record.calls) >= len(calls):
                return end if record.form(defaults) == form else None
        return None

    def _said(self, before: list[int], output_ids: Sequence[int]) -> _Said:
        tools = RequestTools.of(self.prompt.tools, self.prompt.tool_choice)
        block = self.template.reasoning_block(before)
        parser = OutputParser(self.dialect, index=0, tools=tools, reasoning=block)
        detokenizer = self.template.detokenizer(before)
        said = _Said()
        for number, token_id in enumerate(output_ids, 1):
            text = detokenizer.add(token_id)
            said.chunks += parser.feed(text)
            is_new = len(said.chunks) > (said.ends[-1].num_chunks if said.ends else 0)
            if text and is_new and parser.is_settled:
                said.ends.append(_End(number, len(said.chunks)))
            if parser.is_stopped:
                return said
        said.chunks += parser.finish(detokenizer.finish(), is_cut=True)
        return said

    def _ids_of(self, text: str, before: list[int]) -> list[int] | None:
        """The tokens of a text that ends inside of what a token said; None where in doubt."""
        if not text.strip():
            return []
        token_ids = self.template.encode(text).token_ids
        detokenizer = self.template.detokenizer(before)
        read = "".join(detokenizer.add(one) for one in token_ids) + detokenizer.finish()
        return token_ids if read == text else None


def _after_text(said: _Said, given: str) -> tuple[_End | None, str]:
    """The last place where no more was said than this text, and what it says further.

    None where an answer without calls goes on in another way, or says nothing of it.
    """
    given = given.lstrip()
    ends = iter(said.ends)
    end, best, text, agrees = next(ends, None), None, "", True
    for number, chunk in enumerate(said.chunks, 1):
        if isinstance(chunk, ToolCallDelta):
            break
        if isinstance(chunk, TextWasReasoning):
            text, agrees = "", True
        if isinstance(chunk, TextDelta):
            piece = chunk.text if text else chunk.text.lstrip()
            agrees = agrees and given.startswith(piece, len(text))
            text += piece
        while end is not None and end.num_chunks <= number:
            if end.num_chunks == number and agrees and text:
                best = end, len(text)
            end = next(ends, None)
    if best is None or not text.startswith(given.rstrip()):
        return None, ""
    end, length = best
    return end, given[length:]
