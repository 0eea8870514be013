"""Fields that several of OpenAI's requests share, and the bounds of their values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from api.http.hints import PauseS
from api.http.limits import ModelName
from api.http.priorities import AskedPriority
from api.http.refusal import refuse
from runtime.types import CacheMode, Role

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Budget = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""Tokens of thinking; 0 is none."""
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Name = Annotated[str, Meta(min_length=1)]

Raws = dict[str, msgspec.Raw]


Arguments = str | dict[str, msgspec.Raw]
"""Of a call: JSON text, or as some clients give it back, what that text says."""


class Body(msgspec.Struct, gc=False):
    """Base of what goes over HTTP as JSON."""


CacheTtl = Literal["30m", "12h"]
CACHE_TTL_S: dict[CacheTtl | None, float] = {None: 1800.0, "30m": 1800.0, "12h": 43_200.0}
Retention = Literal["in_memory", "24h"]


class CacheBreakpoint(Body):
    """`prompt_cache_breakpoint`: a reusable prefix ends behind this part, at this very token."""

    mode: Literal["explicit"]
    ttl: CacheTtl | None = None


class CacheOptions(Body):
    """`prompt_cache_options`. With `explicit` only what precedes a breakpoint is kept, and nothing
    without one; `ttl` is how long at least. With `prewarm` the prompt is read, nothing is said.
    """

    mode: Literal["implicit", "explicit"] | None = None
    ttl: CacheTtl | None = None
    prewarm: bool | None = None


class PromptCacheOptions(CacheOptions):
    """The same of a response, which says where its prompt parts from that of another one."""

    comparison_response_id: str | None = None


class SamplingFields(Body, kw_only=True):
    """How tokens are chosen and what becomes of the KV, in every request for an answer.

    `session_id`, `cache_mode`, `ttl` (seconds on disk; 0: none), `tool_pause_s` (the client comes
    back in so many seconds), `release` (it does not), `keep_alive` (how long the model stays loaded
    afterwards: seconds, `5m`, -1 for ever) and `priority` are Hearth's own; the other
    ids (`agent_id` among them) name the conversation as well, see `api/http/caller.py`.
    """

    INNER: ClassVar[dict[str, object]] = {"prompt_cache_options": CacheOptions}
    SILENT = frozenset({"client_metadata", "safety_identifier", "service_tier"})

    session_id: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    conversation_id: str | None = None
    thread_id: str | None = None
    chat_id: str | None = None
    agent_id: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: Retention | None = None
    user: str | None = None
    cache_mode: CacheMode | None = None
    ttl: Annotated[float, Meta(ge=0, le=366 * 86_400)] | None = None
    tool_pause_s: PauseS | None = None
    release: bool | None = None
    keep_alive: float | str | None = None
    priority: AskedPriority | None = None

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Fraction | None = None
    seed: Seed | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    repetition_context_size: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    ignore_eos: bool | None = None
    model: ModelName | None = None


class ReasoningFields(Body):
    """`reasoning`: OpenAI's `effort` and `summary`, and the switches other servers know: `type` and
    `level` are words like those of `thinking` and of efforts.
    """

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    enabled: bool | None = None
    type: str | None = None
    level: str | None = None
    max_tokens: Budget | None = None


class ThinkingFields(Body):
    """`thinking` as an object: `type` is `enabled`, `disabled` or `adaptive`."""

    type: str | None = None
    enabled: bool | None = None
    budget_tokens: Budget | None = None
    effort: str | None = None


class FunctionDefinition(Body):
    """A function the model may call; `parameters` is a JSON schema and kept as it is written."""

    name: Name
    description: str | None = None
    parameters: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b"{}"))
    strict: bool | None = None


def arguments_text(arguments: Arguments | None) -> str:
    """The arguments of a call as JSON text."""
    if isinstance(arguments, dict):
        return msgspec.json.encode(arguments).decode()
    return "{}" if arguments is None else arguments


def no_value() -> msgspec.Raw:
    """A raw field that was left out: null, for msgspec takes no object as `Raw | None`."""
    return msgspec.Raw(b"null")


def is_given(raw: msgspec.Raw) -> bool:
    """The field has a value."""
    return bytes(raw) != b"null"


class JsonSchemaFormat(Body):
    """A JSON schema that an answer must follow; `schema` is kept as it is written."""

    name: str | None = None
    description: str | None = None
    schema: msgspec.Raw = msgspec.field(default_factory=no_value)
    strict: bool | None = None


def role_in(roles: Mapping[str, Role], name: str, path: str) -> Role:
    """The role of this name among those that a message of a protocol may have.

    Raises:
        InvalidRequest: it is none of them.
    """
    role = roles.get(name)
    if role is None:
        refuse(
            f"{path}.role",
            f"is {name[:64]!r}, which is not a known role: use one of {', '.join(roles)}.",
        )
    return role
