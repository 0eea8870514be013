"""What chat and completions share: ids, usage, and the constant bytes around streamed pieces."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

import msgspec

from api.http.errors import envelope_of
from api.http.hearth_info import hearth_of
from api.observe.record import Tally
from api.openai.schemas import (
    AlternativeToken,
    ChatLogprobs,
    CompletionTokensDetails,
    PromptTokensDetails,
    TokenEntry,
    Usage,
)
from runtime.errors import HearthError
from runtime.types import TokenLogprob, TokenLogprobs
from runtime.version import VERSION

FINGERPRINT = f"hearth-{VERSION}"
DONE = b"data: [DONE]\n\n"
END = b"}\n\n"

encode = msgspec.json.Encoder().encode


class CompletionEnvelope:
    """The envelope of one answer: the same id, time and model in every piece of it."""

    def __init__(self, kind: str, model: str) -> None:
        self.id = f"{kind}-{secrets.token_hex(12)}"
        self.model = model
        self.created = int(time.time())

    def around(self, object_type: str, *, has_usage: bool) -> tuple[bytes, bytes]:
        """What stands before and after the choices of a streamed piece; `END` or more follows.

        With `include_usage` every piece but the last says that it has none, as OpenAI's do.
        """
        constant = {
            "id": self.id,
            "object": object_type,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
        }
        head = b"data: " + encode(constant)[:-1] + b',"choices":['
        return head, b'],"usage":null' if has_usage else b"]"


def usage_of(tally: Tally) -> Usage:
    """The counts of a finished answer."""
    return Usage(
        prompt_tokens=tally.num_prompt_tokens,
        completion_tokens=tally.num_output_tokens,
        total_tokens=tally.num_prompt_tokens + tally.num_output_tokens,
        prompt_tokens_details=PromptTokensDetails(
            tally.num_cached_tokens, tally.num_written_tokens
        ),
        completion_tokens_details=CompletionTokensDetails(
            tally.num_reasoning_tokens, tally.num_accepted_tokens, tally.num_rejected_tokens
        ),
    )


def hearth_field(tally: Tally) -> bytes:
    """The same as one more field of a streamed piece."""
    return b',"hearth":' + encode(hearth_of(tally))


def usage_event(head: bytes, tally: Tally) -> bytes:
    """The last piece of a stream that was asked for its usage: no choices, only counts."""
    usage = encode(usage_of(tally))
    return head + b'],"usage":' + usage + hearth_field(tally) + b"}\n\n"


def comment(text: str) -> bytes:
    """A line that keeps the connection open and that clients skip."""
    return f": {text}\n\n".encode()


def error_event(error: HearthError) -> bytes:
    """An error after the headers are out; nothing follows it, not even [DONE]."""
    return b"data: " + encode(envelope_of(error)) + b"\n\n"


def chat_logprobs(entries: Sequence[TokenLogprobs]) -> ChatLogprobs | None:
    """Log probabilities in chat's form; None when there are none."""
    return ChatLogprobs([token_entry(entry) for entry in entries]) if entries else None


def token_entry(entry: TokenLogprobs) -> TokenEntry:
    """The log probabilities of one token."""
    chosen = entry.chosen
    return TokenEntry(
        token=chosen.token,
        logprob=chosen.logprob,
        bytes=list(chosen.token_bytes),
        top_logprobs=[_alternative(other) for other in entry.top],
    )


def _alternative(token: TokenLogprob) -> AlternativeToken:
    return AlternativeToken(token.token, token.logprob, list(token.token_bytes))
