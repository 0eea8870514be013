"""What Anthropic's clients send and expect back. Unknown fields are ignored, null means not given.

Content blocks are kept as they are written until their type was looked at, see `block_at`. A type
that is not here is refused, but for those that say nothing to a model.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, NoReturn

import msgspec
from msgspec import UNSET, Meta, UnsetType

from api.http.body import decoded_at
from api.http.hearth_info import HearthInfo, IgnoredInfo
from api.http.hints import PauseS
from api.http.images import image_of
from api.http.limits import ModelName
from api.http.past import Turn
from api.http.priorities import AskedPriority
from api.http.refusal import refuse
from api.http.unused import JsonObject, Kinds
from runtime.errors import UnusableImage
from runtime.prompt.past import line_for
from runtime.types import CacheMode, Image

Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Content = str | list[msgspec.Raw]
StopReason = Literal["end_turn", "tool_use", "max_tokens", "stop_sequence", "compaction"]

EMPTY_OBJECT = msgspec.Raw(b"{}")


KINDS: dict[str, type[Block]] = {}
"""The blocks by their type; filled below, as some have blocks inside."""
BLOCKS = [Kinds(KINDS)]


def empty_object() -> msgspec.Raw:
    """What a field holds that was not given; as a plain default it cannot be documented."""
    return EMPTY_OBJECT


class AnthropicBody(msgspec.Struct, gc=False):
    """Base of what goes over HTTP as JSON."""


# Requests


class CacheControl(AnthropicBody):
    """A breakpoint: what is before it is to be kept for `ttl`, `5m` or `1h`."""

    SILENT = frozenset({"scope"})
    """Who shares it: here all requests of one tenant do, and nobody else."""

    type: str | None = None
    ttl: str | None = None


class InputMessage(AnthropicBody):
    """One turn; `role` is `user`, `assistant` or, also in mid-conversation, `system`. The text of a
    system message with `clear_at: next_user_message` is read up to the next user's turn.
    """

    INNER: ClassVar[dict[str, object]] = {"content": BLOCKS}
    INSTEAD: ClassVar[dict[str, object]] = {"role": "user", "content": line_for("message")}

    role: str
    content: Content | None = None
    clear_at: str | None = None


class CustomTool(AnthropicBody):
    """A tool. One with a `type` other than `custom` is defined by Anthropic, for the client to run
    or for its own servers.
    """

    SILENT = frozenset({"eager_input_streaming"})
    """What a call is given is streamed as it is written in any case."""

    name: str = ""
    type: str | None = None
    description: str | None = None
    input_examples: list[msgspec.Raw] | None = None
    input_schema: msgspec.Raw = msgspec.field(default_factory=empty_object)
    strict: bool | None = None
    defer_loading: bool | None = None
    cache_control: CacheControl | None = None


class EditorTool(CustomTool):
    """`view` is to show so many characters at most."""

    max_characters: Count | None = None


class ComputerTool(CustomTool):
    """The display whose mouse and keyboard are used."""

    display_width_px: Count | None = None
    display_height_px: Count | None = None
    display_number: Count | None = None
    enable_zoom: bool | None = None


class ToolDefinition(ComputerTool):
    """A tool of any type, with what only some of them have."""

    max_characters: Count | None = None


def tool_type(tool: JsonObject) -> object:
    """What kind of tool it is, whatever its version."""
    kind = tool.get("type") or "custom"
    return kind.rpartition("_")[0] or kind if isinstance(kind, str) else kind


TOOLS = Kinds(
    {
        "custom": CustomTool,
        "bash": CustomTool,
        "memory": CustomTool,
        "text_editor": EditorTool,
        "computer": ComputerTool,
    },
    tool_type,
)


class ToolChoiceField(AnthropicBody):
    """`type` is `auto`, `any`, `tool` (the one of that `name`) or `none`."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingField(AnthropicBody):
    """`type` is `enabled`, `adaptive`, `disabled` or `between_tools`, which is disabled but for
    remarks between calls; `display` `summarized` or `omitted`.
    """

    type: str
    budget_tokens: Count | None = None
    display: str | None = None


class OutputFormat(AnthropicBody):
    """The only `type` is `json_schema`; the `schema` is kept as it is written."""

    type: str
    schema: msgspec.Raw = msgspec.field(default_factory=empty_object)


class OutputConfig(AnthropicBody):
    """How much effort an answer is worth, and the form that it must have."""

    effort: str | None = None
    format: OutputFormat | None = None


class ContextEdit(AnthropicBody):
    """An edit of the context that the client leaves to the server."""

    type: str = ""
    keep: msgspec.Raw = msgspec.field(default_factory=empty_object)


class ContextManagement(AnthropicBody):
    """What the server is to drop from a long conversation by itself."""

    edits: list[ContextEdit] | None = None


class CompactionConfig(AnthropicBody):
    """With `summarize` the conversation is summed up, in the words of `instructions` if given."""

    type: str
    instructions: str | None = None


class Metadata(AnthropicBody):
    """`user_id` is any text; Claude Code's is JSON and has the id of its session."""

    user_id: str | None = None


class ThreadField(AnthropicBody):
    """`type` is `create`, or `continue` the conversation that `previous_message_id` answered."""

    type: str
    previous_message_id: str | None = None


class DiagnosticsField(AnthropicBody):
    """The answer whose prompt this one is compared with; null for the first of a conversation."""

    previous_message_id: str | None = None


class CountRequest(AnthropicBody, kw_only=True):
    """The body of `POST /v1/messages/count_tokens`: everything that makes up a prompt."""

    HISTORY = "messages"
    INNER: ClassVar[dict[str, object]] = {"system": BLOCKS, "tools": [TOOLS]}
    REFUSED: ClassVar[dict[str, str]] = {
        "container": "names files and skills on Anthropic's servers, which are not here: leave it "
        "out, and send what they say as text.",
        "mcp_servers": "has servers that Anthropic's own servers call: connect to them in the "
        "client, and send their tools in `tools`.",
    }
    SILENT = frozenset({"anthropic_version", "betas", "inference_geo", "speed"})
    """They change nothing in an answer by themselves."""

    messages: list[InputMessage]
    model: ModelName | None = None
    system: Content | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: ToolChoiceField | None = None
    thinking: ThinkingField | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    cache_control: CacheControl | None = None
    context_management: ContextManagement | None = None
    compaction: CompactionConfig | None = None
    thread: ThreadField | None = None


class MessagesRequest(CountRequest, kw_only=True):
    """The body of `POST /v1/messages`. With 0 `max_tokens` the prompt is only computed and kept.

    `session_id`, `cache_mode`, `ttl` (seconds on disk; 0: none), `tool_pause_s` (the client comes
    back in so many seconds), `release` (it does not), `keep_alive` (how long the model stays loaded
    afterwards: seconds, `5m`, -1 for ever) and `priority` are Hearth's own.
    """

    max_tokens: Count | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    stop_sequences: list[str] | None = None
    diagnostics: DiagnosticsField | None = None
    metadata: Metadata | None = None
    service_tier: str | None = None
    session_id: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    cache_mode: CacheMode | None = None
    ttl: Annotated[float, Meta(ge=0, le=366 * 86_400)] | None = None
    tool_pause_s: PauseS | None = None
    release: bool | None = None
    keep_alive: float | str | None = None
    priority: AskedPriority | None = None


# Answers


class CacheCreation(AnthropicBody):
    """The tokens of `cache_creation_input_tokens` by how long they are kept at least."""

    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class OutputTokensDetails(AnthropicBody):
    """How many of the output's tokens are thoughts."""

    thinking_tokens: int


class Usage(AnthropicBody):
    """Token counts of which the first three are disjoint: together they are the whole prompt."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    cache_creation: CacheCreation | UnsetType = UNSET
    service_tier: Literal["standard"] | UnsetType = UNSET
    output_tokens_details: OutputTokensDetails | UnsetType = UNSET


class TextAnswer(AnthropicBody, tag="text"):
    text: str


class ThinkingAnswer(AnthropicBody, tag="thinking"):
    """`signature` holds the thoughts as well, for when they are not to be shown."""

    thinking: str
    signature: str


class ToolUseAnswer(AnthropicBody, tag="tool_use"):
    id: str
    name: str
    input: msgspec.Raw


class CompactionAnswer(AnthropicBody, tag="compaction"):
    """A summary, for the client to send back in place of what it stands for."""

    content: str | None


ContentAnswer = TextAnswer | ThinkingAnswer | ToolUseAnswer | CompactionAnswer


CacheMissReason = Literal[
    "model_changed",
    "tools_changed",
    "system_changed",
    "messages_changed",
    "previous_message_not_found",
    "unavailable",
]


class CacheMissed(AnthropicBody):
    """Where the prompts part, and about how many tokens could have been reused otherwise."""

    type: CacheMissReason
    cache_missed_input_tokens: int | UnsetType = UNSET


class Diagnostics(AnthropicBody):
    """Why less was reused than the earlier prompt had."""

    cache_miss_reason: CacheMissed


class MessageAnswer(AnthropicBody, kw_only=True):
    """The whole answer to a messages request; in a stream's beginning an empty one."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentAnswer]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    diagnostics: Diagnostics | UnsetType | None = UNSET
    usage: Usage
    hearth: HearthInfo | UnsetType = UNSET


class ThreadDeleted(AnthropicBody):
    """The thread that this message was in is deleted."""

    id: str
    type: Literal["message_deleted"] = "message_deleted"


class TokenCount(AnthropicBody):
    """How many tokens a prompt has, its cached ones included."""

    input_tokens: int
    hearth: IgnoredInfo | UnsetType = UNSET


class ModelInfo(AnthropicBody, kw_only=True):
    """A model that requests can name; `max_input_tokens` is its whole context."""

    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int
    max_tokens: int


class ModelPage(AnthropicBody):
    """A part of the list of models, and where it begins and ends."""

    data: list[ModelInfo]
    first_id: str | None
    last_id: str | None
    has_more: bool


UNREADABLE = frozenset({"fallback", "redacted_thinking"})
"""Blocks that say nothing to any model here: they are left out, and named."""


class AnyBlock(AnthropicBody):
    type: str


class TextBlock(AnthropicBody):
    SILENT = frozenset({"citations", "type"})

    text: str
    cache_control: CacheControl | None = None


class ThinkingBlock(AnthropicBody):
    thinking: str | None = None
    signature: str | None = None


class ToolUseBlock(AnthropicBody):
    id: str
    name: str
    input: msgspec.Raw = msgspec.field(default_factory=empty_object)
    cache_control: CacheControl | None = None


class ToolResultBlock(AnthropicBody):
    INNER: ClassVar[dict[str, object]] = {"content": BLOCKS}

    tool_use_id: str
    content: Content | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


class Source(AnthropicBody):
    """Where a picture or document is: `base64`, `url`, `text`, `content` or `file`."""

    INNER: ClassVar[dict[str, object]] = {"content": BLOCKS}

    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None
    content: Content | None = None


class ImageBlock(AnthropicBody):
    source: Source
    cache_control: CacheControl | None = None


class DocumentBlock(AnthropicBody):
    source: Source
    title: str | None = None
    context: str | None = None
    cache_control: CacheControl | None = None


class SearchResultBlock(AnthropicBody):
    content: list[TextBlock]
    source: str | None = None
    title: str | None = None
    cache_control: CacheControl | None = None


class ToolReferenceBlock(AnthropicBody):
    tool_name: str
    cache_control: CacheControl | None = None


class ChangedTool(AnthropicBody):
    """A tool by its name, or with its definition."""

    INNER: ClassVar[dict[str, object]] = {"definition": TOOLS}

    type: str
    name: str | None = None
    definition: ToolDefinition | None = None


class ToolAdditionBlock(AnthropicBody):
    """From here on there is this tool."""

    tool: ChangedTool
    cache_control: CacheControl | None = None


class ToolRemovalBlock(AnthropicBody):
    """From here on this tool is gone."""

    tool: ChangedTool
    cache_control: CacheControl | None = None


class CompactionBlock(AnthropicBody):
    """A summary of all that stands before it; one without content stands for nothing. The changes
    of tools that were made there are `tool_changes`.
    """

    INNER: ClassVar[dict[str, object]] = {"tool_changes": BLOCKS}

    content: str | None = None
    tool_changes: list[msgspec.Raw] | None = None
    cache_control: CacheControl | None = None


Block = (
    TextBlock
    | ThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
    | ToolReferenceBlock
    | CompactionBlock
    | ToolAdditionBlock
    | ToolRemovalBlock
)

_KNOWN: dict[str, type[Block]] = {
    "text": TextBlock,
    "thinking": ThinkingBlock,
    "tool_use": ToolUseBlock,
    "tool_result": ToolResultBlock,
    "image": ImageBlock,
    "document": DocumentBlock,
    "search_result": SearchResultBlock,
    "tool_reference": ToolReferenceBlock,
    "compaction": CompactionBlock,
    "tool_addition": ToolAdditionBlock,
    "tool_removal": ToolRemovalBlock,
}
KINDS.update(_KNOWN)


def block_at(raw: msgspec.Raw, path: str, turn: Turn) -> Block | str:
    """The block, or the name of its type where it says nothing to any model. What cannot be read is
    a line of text.

    Raises:
        InvalidRequest: it is in the newest input and no result of a tool's, and is no block, of a
            type that is not known, or lacks what its type needs; `param` is the field's path.
    """
    kind = turn.read(lambda: decoded_at(raw, AnyBlock, path), AnyBlock("")).type
    if kind in UNREADABLE:
        return kind
    instead = TextBlock(line_for(kind or "block"))
    block_type = KINDS.get(kind)
    if block_type is not None:
        turn = turn.result() if block_type is ToolResultBlock else turn
        mended = turn.mended(raw, block_type, path)
        return turn.read(lambda: decoded_at(mended, block_type, path), instead)
    return turn.read(lambda: _refuse_kind(kind, path), instead) if kind else instead


def _refuse_kind(kind: str, path: str) -> NoReturn:
    refuse(
        path,
        f"is a block of type {kind[:64]!r}, which is not read here: leave it out, or send what it "
        "says as text.",
    )


def picture_at(block: ImageBlock, at: int, path: str) -> Image:
    """The picture in a block; `at` is its place in the text.

    Raises:
        InvalidRequest: it is in a place that cannot be read, or damaged.
    """
    source = block.source
    if source.type not in ("base64", "url"):
        raise UnusableImage(
            f"{path}.source",
            f"is of type {source.type[:64]!r}: send the image itself (base64) or its url.",
        )
    if source.type == "url":
        url = source.url
    else:
        url = f"data:{source.media_type};base64,{source.data}" if source.data else None
    if not url:
        missing = "url" if source.type == "url" else "data"
        refuse(f"{path}.source.{missing}", "is missing: it is required.")
    return image_of(url, at, path)


def document_content(block: DocumentBlock, path: str) -> Content:
    """What a document says: a text, or blocks of text and pictures.

    Raises:
        InvalidRequest: it is neither.
    """
    source = block.source
    content = source.content if source.type == "content" else source.data
    if source.type not in ("text", "content") or content is None:
        # By the words about PDF Claude Code knows that it is to leave its documents out.
        refuse(
            path,
            f"is a document of type {(source.media_type or source.type)[:64]!r}: Hearth does not "
            "support PDF input, nor other files: send its text, as a text block or as a source of "
            "type 'text' or 'content'.",
        )
    return content


def search_result_text(block: SearchResultBlock) -> str:
    """A search result as text."""
    texts = (text.text for text in block.content)
    return "\n".join(part for part in (block.title, block.source, *texts) if part)
