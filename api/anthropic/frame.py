"""What streamed and whole answers share: ids, usage, and how an answer ended."""

from __future__ import annotations

import secrets

import msgspec

from api.answer import Answer
from api.anthropic.convert import Asked
from api.anthropic.schemas import StopReason, Usage
from api.record import Tally
from runtime.types import Finished

encode = msgspec.json.Encoder().encode


class Frame:
    """The envelope of one answer, and what must be known of its request."""

    def __init__(self, model: str) -> None:
        self.id = f"msg_{secrets.token_hex(12)}"
        self.model = model


def usage_of(tally: Tally, asked: Asked) -> Usage:
    """The counts of a finished answer."""
    return _usage(tally.num_prompt_tokens, tally.num_cached_tokens, tally.num_output_tokens, asked)


def planned_usage(answer: Answer, asked: Asked) -> Usage:
    """The counts of an answer that begins: what is about to be reused, and no output yet."""
    num_cached = answer.planned_cache.num_tokens
    return in_full(_usage(answer.num_prompt_tokens, num_cached, 0, asked))


def in_full(usage: Usage) -> Usage:
    """The usage of a message, which says more than that of a stream's end."""
    return msgspec.structs.replace(usage, service_tier="standard")


def _usage(num_prompt: int, num_cached: int, num_output: int, asked: Asked) -> Usage:
    """With breakpoints, what was computed counts as written to the cache, as all of it is kept.

    Not so the last token, which every answer computes anew.
    """
    num_computed = num_prompt - num_cached
    is_kept = asked.has_breakpoints and asked.request.cache.mode == "full"
    num_kept = max(0, num_computed - 1) if is_kept else 0
    return Usage(
        input_tokens=num_computed - num_kept,
        cache_creation_input_tokens=num_kept,
        cache_read_input_tokens=num_cached,
        output_tokens=num_output,
    )


def stop_of(finished: Finished | None, asked: Asked) -> tuple[StopReason, str | None]:
    """Why an answer ended, and the stop sequence that ended it."""
    if asked.request.work == "prefill":
        return "max_tokens", None
    match finished:
        case Finished(stop=str(stop)):
            return "stop_sequence", stop
        case Finished(reason="tool_calls"):
            return "tool_use", None
        case Finished(reason="length"):
            return "max_tokens", None
        case _:
            return "end_turn", None
