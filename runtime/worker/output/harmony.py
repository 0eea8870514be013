"""Harmony, the channels of gpt-oss: analysis is reasoning, final is the answer, a recipient a call.

mlx-lm has no parser for it. A turn is a row of messages; its marks are special tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from runtime.worker.output.dialect import HEADER, NORMAL, REASONING, TOOL, Dialect

NAME = "harmony"
CALL_START = "<|channel|>commentary to="
CALL_END = "<|call|>"
FINAL_START = "<|channel|>final<|message|>"
REASONING_START = "<|channel|>analysis<|message|>"
REASONING_END = "<|end|>"
NEXT_MESSAGE = "<|start|>assistant"

_MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>")
_CALL = re.compile(
    r"(?:functions\.)?(?P<name>[^\s<{]+).*?<\|message\|>(?P<arguments>.*)", re.DOTALL
)

_MESSAGES = (
    (REASONING_START, REASONING),
    (FINAL_START, NORMAL),
    ("<|channel|>final <|constrain|>json<|message|>", NORMAL),
    ("<|channel|>commentary<|message|>", NORMAL),
    (CALL_START, TOOL),
    ("<|channel|>analysis to=", TOOL),
)


def is_spoken_by(vocab: Mapping[str, int]) -> bool:
    """The vocabulary has all the marks."""
    return all(mark in vocab for mark in _MARKS)


def dialect() -> Dialect:
    """The dialect of every gpt-oss model."""
    after = ((REASONING_END, HEADER), (NEXT_MESSAGE, HEADER), *_MESSAGES)
    return Dialect(
        think_start=REASONING_START,
        think_end=REASONING_END,
        tool_start=CALL_START,
        tool_end=CALL_END,
        parse_tool_call=parse_tool_call,
        name=NAME,
        edges={
            HEADER: ((NEXT_MESSAGE, HEADER), (" to=", TOOL), *_MESSAGES),
            REASONING: after,
            NORMAL: after,
        },
        initial=HEADER,
    )


def begun(text: str, reasoning: str) -> str:
    """The beginning of an answer that has thought and said this."""
    thoughts = f"{REASONING_START}{reasoning}{REASONING_END}{NEXT_MESSAGE}" if reasoning else ""
    return f"{thoughts}{FINAL_START}{text}"


def parse_tool_call(text: str, tools: Any = None) -> dict[str, object]:  # noqa: ARG001
    """`functions.name <|constrain|>json<|message|>{...}`, what follows `to=`.

    Raises:
        ValueError: it is no call.
    """
    found = _CALL.fullmatch(text.strip())
    if found is None:
        message = "No function provided."
        raise ValueError(message)
    arguments = found["arguments"].strip()
    try:
        return {"name": found["name"], "arguments": json.loads(arguments)}
    except ValueError:
        # A tool that takes one text is given it as it is.
        return {"name": found["name"], "arguments": arguments}
