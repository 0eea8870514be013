"""An answer whose beginning the client has written: the last message of a prompt, gone on with."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from runtime.prompt.continuation import begun
from runtime.types import ChatPrompt
from runtime.worker.output import harmony
from runtime.worker.output.dialect import Dialect


class Beginning(NamedTuple):
    """What the answer has said already. With `is_thinking` its thoughts go on, too."""

    text: str
    reasoning: str = ""
    is_thinking: bool = False


def taken_out(prompt: ChatPrompt, dialect: Dialect) -> tuple[ChatPrompt, Beginning | None]:
    """The prompt without the beginning of its answer, and that; None where there is none."""
    if (last := begun(prompt)) is None:
        return prompt, None
    shorter = msgspec.structs.replace(prompt, messages=prompt.messages[:-1])
    return shorter, _beginning(last.text, last.reasoning or "", dialect)


def _beginning(text: str, reasoning: str, dialect: Dialect) -> Beginning:
    start, end = dialect.think_start, dialect.think_end
    body = text.lstrip()
    if not start or dialect.name == harmony.NAME or not body.startswith(start):
        return Beginning(text, reasoning)
    thoughts, closing, rest = body.removeprefix(start).partition(end)
    return Beginning(rest.lstrip("\n"), thoughts, is_thinking=not closing)


def gone_on(text: str, beginning: Beginning | None, dialect: Dialect) -> str:
    """A rendered prompt with the beginning of the answer that it opens."""
    if beginning is None:
        return text
    said, reasoning, is_thinking = beginning
    if dialect.name == harmony.NAME:
        return text + harmony.begun(said, reasoning)
    start, end = dialect.think_start, dialect.think_end
    bare = text.rstrip()
    is_open = bool(start) and bare.endswith(start)
    if is_thinking:
        thoughts = reasoning.removeprefix("\n") if text.endswith("\n") else reasoning
        return text + (thoughts if is_open else start + reasoning)
    thoughts = reasoning.strip("\n")
    if is_open:
        return f"{text}{thoughts}\n{end}\n\n{said}"
    if thoughts and start and not bare.endswith(end):
        return f"{text}{start}\n{thoughts}\n{end}\n\n{said}"
    return text + said
