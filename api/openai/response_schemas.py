"""What clients of the Responses API send. Unknown fields are ignored, null means not given.

Input items and tools are kept as they are written until their type is known: there are many more
types than are served, and a client may send any of them back.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from api.http.unused import JsonObject, Kinds
from api.openai.content import Content, ContentPart
from api.openai.fields import (
    Arguments,
    Body,
    Count,
    FunctionDefinition,
    Name,
    Raws,
    ReasoningFields,
    SamplingFields,
    no_value,
)
from api.openai.thinking import PLACES, Budget, ThinkingField


class FormatFields(Body):
    """`text.format`: its type, and the schema where it is `json_schema`."""

    type: str = "text"
    name: str | None = None
    description: str | None = None
    schema: msgspec.Raw = msgspec.field(default_factory=no_value)
    strict: bool | None = None


class TextFields(Body):
    """`text`: the form of the answer. `verbosity` is echoed only."""

    format: FormatFields | None = None
    verbosity: str | None = None


class ChosenTool(Body, omit_defaults=True):
    """One tool named by `tool_choice`."""

    type: str
    name: str | None = None
    namespace: str | None = None


class ToolChoiceFields(Body, omit_defaults=True):
    """`tool_choice` as an object: a tool that must be called, or those that may be."""

    type: str
    name: str | None = None
    namespace: str | None = None
    mode: str | None = None
    tools: list[ChosenTool] | None = None


class BackgroundOptions(Body):
    """When a response in the background is to be complete, and which ones belong together."""

    completion_window: str | None = None
    continuation_id: str | None = None


class ContextManagementFields(Body):
    """`compaction`: from so many tokens on the conversation is summed up before the answer."""

    type: str
    compact_threshold: Annotated[int, Meta(ge=1)] | None = None


# Input items


class ItemHead(Body):
    """What tells one item from another. A message may leave its type out, a reference too."""

    type: str | None = None
    role: str | None = None
    id: str | None = None


class MessageItem(Body):
    role: str
    content: Content = None
    status: str | None = None


class CallItem(Body):
    """A call of a function that the model made; `arguments` is JSON text, or what that says."""

    call_id: Name
    name: Name
    arguments: Arguments | None = None
    namespace: str | None = None


class CustomCallItem(Body):
    """A call of a custom tool; `input` is any text."""

    call_id: Name
    name: Name
    input: str | None = None
    namespace: str | None = None


class CallOutputItem(Body):
    """What a call gave."""

    call_id: Name
    output: Content = None


class ReasoningItem(Body):
    """What the model thought. `encrypted_content` is ours, or another server's and unreadable."""

    summary: list[ContentPart] | None = None
    content: list[ContentPart] | None = None
    encrypted_content: str | None = None
    status: str | None = None


class CompactionItem(Body, omit_defaults=True):
    """A summary that stands for what was said before it, as `encrypted_content`."""

    id: str | None = None
    type: str | None = None
    encrypted_content: str | None = None


class ShellAction(Body, omit_defaults=True):
    """Commands that a shell is to run."""

    commands: list[str] = msgspec.field(default_factory=list[str])
    timeout_ms: int | None = None
    max_output_length: int | None = None


class ShellCallItem(Body):
    SILENT = frozenset({"created_by"})

    call_id: Name
    action: ShellAction
    environment: msgspec.Raw = msgspec.field(default_factory=no_value)


class ShellOutcome(Body):
    """`type` is `exit` or `timeout`."""

    type: str = "exit"
    exit_code: int | None = None


class ShellOutput(Body):
    SILENT = frozenset({"created_by"})

    stdout: str = ""
    stderr: str = ""
    outcome: ShellOutcome = msgspec.field(default_factory=ShellOutcome)


class ShellCallOutputItem(Body):
    call_id: Name
    output: list[ShellOutput]
    max_output_length: int | None = None


class LocalShellAction(Body, omit_defaults=True):
    """A program that the client is to start."""

    SILENT = frozenset({"type"})

    command: list[str] = msgspec.field(default_factory=list[str])
    working_directory: str | None = None
    timeout_ms: int | None = None
    env: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    user: str | None = None


class LocalShellCallItem(Body):
    call_id: Name
    action: LocalShellAction


class LocalShellCallOutputItem(Body):
    """The `id` is that of the call, where there is no `call_id`."""

    output: str
    call_id: str | None = None
    id: str | None = None


class PatchOperation(Body, omit_defaults=True):
    """`type` is `create_file`, `update_file` or `delete_file`."""

    type: str
    path: str
    diff: str | None = None


class ApplyPatchCallItem(Body):
    call_id: Name
    operation: PatchOperation


class ApplyPatchCallOutputItem(Body):
    call_id: Name
    status: str = "completed"
    output: str | None = None


class ToolSearchCallItem(Body):
    arguments: msgspec.Raw
    call_id: str | None = None
    id: str | None = None
    execution: str | None = None


class ToolSearchOutputItem(Body):
    """The tools that were found, which can be called from there on."""

    tools: list[msgspec.Raw]
    call_id: str | None = None
    id: str | None = None
    execution: str | None = None


def item_type(item: JsonObject) -> object:
    """What kind of item it is, also where that is left out."""
    is_reference = item.get("role") is None and item.get("id") is not None
    return item.get("type") or ("item_reference" if is_reference else "message")


ITEMS = Kinds(
    {
        "message": MessageItem,
        "function_call": CallItem,
        "custom_tool_call": CustomCallItem,
        "function_call_output": CallOutputItem,
        "custom_tool_call_output": CallOutputItem,
        "reasoning": ReasoningItem,
        "compaction": CompactionItem,
        "compaction_summary": CompactionItem,
        "context_compaction": CompactionItem,
        "compaction_trigger": ItemHead,
        "shell_call": ShellCallItem,
        "shell_call_output": ShellCallOutputItem,
        "local_shell_call": LocalShellCallItem,
        "local_shell_call_output": LocalShellCallOutputItem,
        "apply_patch_call": ApplyPatchCallItem,
        "apply_patch_call_output": ApplyPatchCallOutputItem,
        "tool_search_call": ToolSearchCallItem,
        "tool_search_output": ToolSearchOutputItem,
        "item_reference": ItemHead,
    },
    item_type,
    frozenset({"type", "id", "status"}),
)


# Tools


class ToolHead(Body):
    """What tells one tool from another; some clients have a `function` inside, as in chat."""

    type: str = "function"
    name: str | None = None
    function: msgspec.Raw = msgspec.field(default_factory=no_value)


def tool_type(tool: JsonObject) -> object:
    """What kind of tool it is."""
    return tool.get("type", "function")


class GrammarFields(Body):
    """What a custom tool's input must look like: `text`, or a `grammar` in `lark` or `regex`."""

    type: str = "text"
    syntax: str | None = None
    definition: str | None = None


class CustomTool(Body):
    name: Name
    description: str | None = None
    format: GrammarFields | None = None


class NamespaceTool(Body):
    """Tools that share a namespace; a call of one is given back with it."""

    INNER: ClassVar[dict[str, object]] = {
        "tools": [Kinds({"function": FunctionDefinition, "custom": CustomTool}, tool_type)]
    }

    name: Name
    tools: list[msgspec.Raw]
    description: str | None = None


class LocalSkill(Body):
    """A folder of instructions on the client's machine."""

    name: str
    path: str
    description: str = ""


class ShellEnvironment(Body):
    """Where a shell is: `local` is the client's machine, the others are OpenAI's."""

    type: str
    skills: list[LocalSkill] | None = None


class ShellToolFields(Body):
    environment: ShellEnvironment | None = None


class SearchToolFields(Body):
    """A search for tools; the client does it where `execution` is `client`."""

    execution: str | None = None
    description: str | None = None
    parameters: msgspec.Raw = msgspec.field(default_factory=no_value)


class PlainTool(Body):
    """A tool without anything to be said of it."""


TOOLS = Kinds(
    {
        "function": FunctionDefinition,
        "custom": CustomTool,
        "namespace": NamespaceTool,
        "shell": ShellToolFields,
        "local_shell": PlainTool,
        "apply_patch": PlainTool,
        "tool_search": SearchToolFields,
    },
    tool_type,
    frozenset({"type", "function"}),
)


# The request


class ConversationRef(Body):
    """The stored conversation that a response belongs to."""

    id: str


class ResponseRequest(SamplingFields, kw_only=True):
    """The body of `POST /v1/responses` and `/v1/responses/input_tokens`.

    The thinking switches, `top_k`, `min_p`, `seed` and what belongs to the KV go beyond OpenAI's;
    `continue_final_message` and `add_generation_prompt` are those of chat completions.
    """

    ENTRIES = "input"
    INNER: ClassVar[dict[str, object]] = {**PLACES, "input": [ITEMS], "tools": [TOOLS]}
    REFUSED: ClassVar[dict[str, str]] = {
        "personality": "names a text of OpenAI's, which is not here: say it in `instructions`."
    }

    input: str | list[msgspec.Raw] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    include: list[str] | None = None
    context_management: list[ContextManagementFields] | None = None
    tools: list[msgspec.Raw] | None = None
    tool_choice: str | ToolChoiceFields | None = None
    parallel_tool_calls: bool | None = None
    text: TextFields | None = None
    reasoning: ReasoningFields | None = None
    truncation: str | None = None
    max_output_tokens: Count | None = None
    max_tool_calls: Count | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    metadata: Raws | None = None
    background: bool | None = None
    background_options: BackgroundOptions | None = None
    stream: bool | None = None
    safety_identifier: str | None = None
    conversation: str | ConversationRef | None = None
    prompt: msgspec.Raw = msgspec.field(default_factory=no_value)
    enable_thinking: bool | None = None
    thinking: ThinkingField | None = None
    thinking_budget: Budget | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: Raws | None = None
    extra_body: Raws | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
