"""Harmony, the channels of gpt-oss: analysis is reasoning, final is the answer, a recipient a call.

A turn is a row of messages; its marks are special tokens.
"""

from __future__ import annotations

from runtime.worker.output.dialect import HEADER, NORMAL, REASONING, Dialect, opening

NAME = "harmony"
CALL_START = "<|channel|>commentary to="
LATE_CALL_START = " to="
HIDDEN_CALL_START = "<|channel|>analysis to="
CALL_END = "<|call|>"
FINAL_START = "<|channel|>final<|message|>"
REASONING_START = "<|channel|>analysis<|message|>"
REASONING_END = "<|end|>"
NEXT_MESSAGE = "<|start|>assistant"

_MESSAGES = (
    (REASONING_START, REASONING),
    (FINAL_START, NORMAL),
    ("<|channel|>final <|constrain|>json<|message|>", NORMAL),
    ("<|channel|>commentary<|message|>", NORMAL),
    (CALL_START, opening(CALL_START)),
    (HIDDEN_CALL_START, opening(HIDDEN_CALL_START)),
)


def dialect() -> Dialect:
    """The dialect of every gpt-oss model."""
    late_call = (LATE_CALL_START, opening(LATE_CALL_START))
    after = ((REASONING_END, HEADER), (NEXT_MESSAGE, HEADER), *_MESSAGES)
    return Dialect(
        think_start=REASONING_START,
        think_end=REASONING_END,
        tool_start=CALL_START,
        tool_end=CALL_END,
        name=NAME,
        edges={
            HEADER: ((NEXT_MESSAGE, HEADER), late_call, *_MESSAGES),
            REASONING: after,
            NORMAL: after,
        },
        initial=HEADER,
    )


def begun(text: str, reasoning: str) -> str:
    """The beginning of an answer that has thought and said this."""
    thoughts = f"{REASONING_START}{reasoning}{REASONING_END}{NEXT_MESSAGE}" if reasoning else ""
    return f"{thoughts}{FINAL_START}{text}"
