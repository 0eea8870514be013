"""What the Responses API answers with: items, the response around them, usage."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from api.http.hearth_info import HearthInfo, IgnoredInfo
from api.openai.fields import Body, CacheTtl, Retention
from api.openai.response_schemas import ConversationRef
from api.openai.schemas import TokenEntry

ItemStatus = Literal["in_progress", "completed", "incomplete"]
Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(Body):
    text: str
    logprobs: list[TokenEntry] = msgspec.field(default_factory=list[TokenEntry])
    annotations: tuple[()] = ()
    type: Literal["output_text"] = "output_text"


class SummaryText(Body):
    text: str
    type: Literal["summary_text"] = "summary_text"


class ReasoningText(Body):
    text: str
    type: Literal["reasoning_text"] = "reasoning_text"


class OutputMessage(Body):
    id: str
    status: ItemStatus
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"
    type: Literal["message"] = "message"


class OutputReasoning(Body):
    """What the model thought is `content`; `summary` is there when the client asked for one."""

    id: str
    status: ItemStatus
    summary: list[SummaryText]
    content: list[ReasoningText]
    encrypted_content: str | UnsetType = UNSET
    type: Literal["reasoning"] = "reasoning"


class OutputCall(Body):
    """A call of a function; `namespace` is the one that its tool was offered in."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str
    namespace: str | UnsetType = UNSET
    type: Literal["function_call"] = "function_call"


class OutputCustomCall(Body):
    """A call of a custom tool."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    input: str
    namespace: str | UnsetType = UNSET
    type: Literal["custom_tool_call"] = "custom_tool_call"


class ShellActionAnswer(Body):
    commands: list[str]
    timeout_ms: int | None
    max_output_length: int | None


class OutputShellCall(Body):
    """Commands for the client's shell."""

    id: str
    status: ItemStatus
    call_id: str
    action: ShellActionAnswer
    type: Literal["shell_call"] = "shell_call"


class LocalShellActionAnswer(Body):
    command: list[str]
    env: dict[str, str]
    working_directory: str | None
    timeout_ms: int | None
    user: str | None
    type: Literal["exec"] = "exec"


class OutputLocalShellCall(Body):
    """A program for the client to start."""

    id: str
    status: ItemStatus
    call_id: str
    action: LocalShellActionAnswer
    type: Literal["local_shell_call"] = "local_shell_call"


class PatchAnswer(Body, omit_defaults=True):
    type: str
    path: str
    diff: str | UnsetType = UNSET


class OutputPatchCall(Body):
    """A change of one file for the client to make; one that was cut stays in progress."""

    id: str
    status: Literal["in_progress", "completed"]
    call_id: str
    operation: PatchAnswer
    type: Literal["apply_patch_call"] = "apply_patch_call"


class OutputSearchCall(Body):
    """A search for tools for the client to do."""

    id: str
    status: ItemStatus
    call_id: str
    arguments: msgspec.Raw
    execution: Literal["client"] = "client"
    type: Literal["tool_search_call"] = "tool_search_call"


class OutputCompaction(Body):
    """A summary that takes the place of what was said, for the client to send back."""

    id: str
    encrypted_content: str
    type: Literal["compaction"] = "compaction"


OutputItem = (
    OutputMessage
    | OutputReasoning
    | OutputCall
    | OutputCustomCall
    | OutputShellCall
    | OutputLocalShellCall
    | OutputPatchCall
    | OutputSearchCall
    | OutputCompaction
)


class WrittenByTtl(Body):
    """How long the written tokens are kept at least."""

    ttl_12h_tokens: int
    ttl_30m_tokens: int


class InputTokensDetails(Body):
    """`cache_write_tokens` were computed, and kept for the next request."""

    cached_tokens: int
    cache_write_tokens: int
    cache_write_tokens_details: WrittenByTtl | UnsetType = UNSET


class OutputTokensDetails(Body):
    reasoning_tokens: int


class ResponseUsage(Body):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseErrorBody(Body):
    code: str
    message: str


class IncompleteDetails(Body):
    reason: str


class ReasoningEcho(Body):
    effort: str | None = None
    summary: str | None = None


class FormatEcho(Body, omit_defaults=True):
    """The form asked for; `description` and `strict` are there for a schema only."""

    type: str
    name: str | UnsetType = UNSET
    description: str | UnsetType | None = UNSET
    schema: msgspec.Raw | UnsetType = UNSET
    strict: bool | UnsetType = UNSET


class TextEcho(Body):
    format: FormatEcho
    verbosity: str | None = None


class PromptCacheEcho(Body):
    """The options that were applied, where there were any."""

    mode: Literal["implicit", "explicit"]
    ttl: CacheTtl
    comparison_response_id: str | UnsetType = UNSET


class PromptCacheDiagnostics(Body, omit_defaults=True):
    """Where the prompt parts from that of the response it was to be compared with. Of that one's
    `comparison_reusable_tokens` so many were missed.
    """

    type: Literal["cache_miss", "cache_hit", "comparison_response_not_found", "unavailable"]
    reason: str | UnsetType = UNSET
    cache_missed_tokens: int | UnsetType = UNSET
    comparison_reusable_tokens: int | UnsetType = UNSET


class ResponseResource(Body, kw_only=True):
    """A response, whole or in the making. What the request said is repeated in it."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status
    background: bool
    conversation: ConversationRef | None = None
    error: ResponseErrorBody | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[msgspec.Raw] = msgspec.field(default_factory=list[msgspec.Raw])
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    prompt_cache_options: PromptCacheEcho | UnsetType = UNSET
    prompt_cache_diagnostics: PromptCacheDiagnostics | UnsetType = UNSET
    prompt_cache_retention: Retention | UnsetType = UNSET
    reasoning: ReasoningEcho
    safety_identifier: str | None
    service_tier: str = "default"
    store: bool
    temperature: float
    text: TextEcho
    tool_choice: msgspec.Raw
    tools: tuple[msgspec.Raw, ...]
    top_logprobs: int
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    truncation: str
    usage: ResponseUsage | None = None
    user: str | None
    metadata: msgspec.Raw
    hearth: HearthInfo | None = None


class CompactedResponse(Body, kw_only=True):
    """What takes the place of a conversation: what its user said, then one compaction item."""

    id: str
    object: Literal["response.compaction"] = "response.compaction"
    created_at: int
    output: list[msgspec.Raw]
    usage: ResponseUsage
    hearth: HearthInfo


class InputTokens(Body):
    """How many tokens a request would have."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"
    hearth: IgnoredInfo | UnsetType = UNSET


class DeletedResponse(Body):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class ItemList(Body):
    """A page of input items."""

    data: list[msgspec.Raw]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"
    hearth: IgnoredInfo | UnsetType = UNSET
