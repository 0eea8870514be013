"""What Anthropic's clients send and expect back. Unknown fields are ignored, null means not given.

Content blocks are kept as they are written until their type was looked at, see `blocks`.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from api.hearth_info import HearthInfo
from runtime.types import CacheMode, Priority

Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Content = str | list[msgspec.Raw]
StopReason = Literal["end_turn", "tool_use", "max_tokens", "stop_sequence"]

EMPTY_OBJECT = msgspec.Raw(b"{}")


def empty_object() -> msgspec.Raw:
    """What a field holds that was not given; as a plain default it cannot be documented."""
    return EMPTY_OBJECT


class Body(msgspec.Struct, gc=False):
    """Base of what goes over HTTP as JSON."""


# Requests


class CacheControl(Body):
    """A breakpoint: what is before it is to be kept for `ttl`, `5m` or `1h`."""

    type: str | None = None
    ttl: str | None = None


class InputMessage(Body):
    """One turn; `role` is `user`, `assistant` or, also in mid-conversation, `system`."""

    role: str
    content: Content | None = None


class ToolDefinition(Body):
    """A tool. One with a `type` other than `custom` is Anthropic's own, not the client's."""

    name: str = ""
    type: str | None = None
    description: str | None = None
    input_schema: msgspec.Raw = msgspec.field(default_factory=empty_object)
    strict: bool | None = None
    defer_loading: bool | None = None
    cache_control: CacheControl | None = None


class ToolChoiceField(Body):
    """`type` is `auto`, `any`, `tool` (the one of that `name`) or `none`."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingField(Body):
    """`type` is `enabled`, `adaptive` or `disabled`; `display` `summarized` or `omitted`."""

    type: str
    budget_tokens: Count | None = None
    display: str | None = None


class OutputFormat(Body):
    """The only `type` is `json_schema`; the `schema` is kept as it is written."""

    type: str
    schema: msgspec.Raw = msgspec.field(default_factory=empty_object)


class OutputConfig(Body):
    """How much effort an answer is worth, and the form that it must have."""

    effort: str | None = None
    format: OutputFormat | None = None


class ContextEdit(Body):
    """An edit of the context that the client leaves to the server."""

    type: str = ""
    keep: msgspec.Raw = msgspec.field(default_factory=empty_object)


class ContextManagement(Body):
    """What the server is to drop from a long conversation by itself."""

    edits: list[ContextEdit] | None = None


class Metadata(Body):
    """`user_id` is any text; Claude Code's is JSON and has the id of its session."""

    user_id: str | None = None


class CountRequest(Body, kw_only=True):
    """The body of `POST /v1/messages/count_tokens`: everything that makes up a prompt."""

    messages: list[InputMessage]
    model: str | None = None
    system: Content | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: ToolChoiceField | None = None
    thinking: ThinkingField | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    cache_control: CacheControl | None = None
    context_management: ContextManagement | None = None


class MessagesRequest(CountRequest, kw_only=True):
    """The body of `POST /v1/messages`. With 0 `max_tokens` the prompt is only computed and kept.

    `session_id`, `cache_mode`, `ttl` (seconds on disk; 0: none), `keep_alive` (how long the model
    stays loaded afterwards: seconds, `5m`, -1 for ever) and `priority` are Hearth's own.
    """

    max_tokens: Count | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    stop_sequences: list[str] | None = None
    metadata: Metadata | None = None
    service_tier: str | None = None
    session_id: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    cache_mode: CacheMode | None = None
    ttl: Annotated[float, Meta(ge=0, le=366 * 86_400)] | None = None
    keep_alive: float | str | None = None
    priority: Priority | None = None


# Answers


class Usage(Body):
    """Token counts of which the first three are disjoint: together they are the whole prompt."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    service_tier: Literal["standard"] | UnsetType = UNSET


class TextAnswer(Body, tag="text"):
    text: str


class ThinkingAnswer(Body, tag="thinking"):
    """`signature` holds the thoughts as well, for when they are not to be shown."""

    thinking: str
    signature: str


class ToolUseAnswer(Body, tag="tool_use"):
    id: str
    name: str
    input: msgspec.Raw


ContentAnswer = TextAnswer | ThinkingAnswer | ToolUseAnswer


class MessageAnswer(Body, kw_only=True):
    """The whole answer to a messages request; in a stream's beginning an empty one."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentAnswer]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: Usage
    hearth: HearthInfo | UnsetType = UNSET


class TokenCount(Body):
    """How many tokens a prompt has, its cached ones included."""

    input_tokens: int


class ModelInfo(Body, kw_only=True):
    """A model that requests can name; `max_input_tokens` is its whole context."""

    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int
    max_tokens: int


class ModelPage(Body):
    """A part of the list of models, and where it begins and ends."""

    data: list[ModelInfo]
    first_id: str | None
    last_id: str | None
    has_more: bool
