"""Fields of a request that say how tokens are chosen and where its KV belongs."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from api.http.caller import Caller
from api.http.refusal import refuse
from api.openai.caching import keep_s_of, mode_of, ttl_s_of
from api.openai.fields import Raws, SamplingFields
from runtime.types import CacheParams, SamplingParams

SESSION_NAMES = ("session_id", "conversation_id", "thread_id", "chat_id", "agent_id")


def sampling_of(data: SamplingFields) -> SamplingParams:
    """How the next token is chosen.

    Raises:
        InvalidRequest: `logit_bias` has a key that is no token id.
    """
    return SamplingParams(
        temperature=data.temperature,
        top_p=data.top_p,
        top_k=None if data.top_k is None else max(data.top_k, 0),
        min_p=data.min_p,
        seed=None if data.seed is None else data.seed & (2**63 - 1),
        repetition_penalty=data.repetition_penalty,
        repetition_context_size=data.repetition_context_size,
        presence_penalty=data.presence_penalty,
        frequency_penalty=data.frequency_penalty,
        logit_bias=_logit_bias(data.logit_bias) if data.logit_bias else (),
    )


def cache_of(data: SamplingFields, caller: Caller, *places: Raws | None) -> CacheParams:
    """What the request wishes of the KV cache, and which conversation it belongs to.

    `places` are its objects for anything, which may name the conversation as well.
    """
    ids = (
        *(data.session_id, data.conversation_id, data.thread_id, data.chat_id, data.agent_id),
        *(name for place in places for name in _names_in(place or {})),
    )
    session_id = caller.session_id(ids, (data.prompt_cache_key, data.user))
    return CacheParams(
        mode=mode_of(data),
        ttl_s=ttl_s_of(data),
        keep_s=keep_s_of(data),
        session_id=session_id,
        pause_s=data.tool_pause_s,
        is_last=bool(data.release),
        tenant=caller.tenant,
    )


def num_choices(n: int | None, limit: int) -> int:
    """How many answers are wanted.

    Raises:
        InvalidRequest: more than `limit`.
    """
    if n is not None and n > limit:
        refuse("n", f"is {n}, at most {limit} choices are served.")
    return n or 1


def _names_in(place: Raws) -> Iterator[str]:
    """The conversation's names in an object for anything; what is no text names none."""
    for name in SESSION_NAMES:
        try:
            yield msgspec.json.decode(place.get(name, b'""'), type=str)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue


def _logit_bias(biases: dict[str, float]) -> tuple[tuple[int, float], ...]:
    for key in biases:
        if not (key.isascii() and key.isdigit() and len(key) <= 9):
            refuse("logit_bias", f"has the key {key[:32]!r}: its keys must be token ids.")
    return tuple((int(key), bias) for key, bias in biases.items())
