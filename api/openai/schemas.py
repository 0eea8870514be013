"""What OpenAI's clients send and expect back. Unknown fields are ignored, null means not given."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from api.http.hearth_info import HearthInfo
from api.openai.content import Content
from api.openai.fields import (
    Arguments,
    Body,
    Count,
    FunctionDefinition,
    JsonSchemaFormat,
    Name,
    Raws,
    ReasoningFields,
    SamplingFields,
    no_value,
)
from api.openai.response_schemas import GrammarFields
from api.openai.thinking import PLACES, Budget, ThinkingField
from runtime.prompt.past import line_for
from runtime.types import FinishReason, Overflow, TemplateForms, ToolUse

# Requests


class FunctionCall(Body):
    """The function an assistant called; `arguments` is JSON text, or the object that it says."""

    name: str
    arguments: Arguments | None = None


class CustomCall(Body):
    """The custom tool an assistant called, and with what text."""

    name: str
    input: str | None = None


class HistoryToolCall(Body):
    """A tool call in an earlier assistant message: of a function, or of a custom tool."""

    SILENT = frozenset({"index"})

    function: FunctionCall | None = None
    custom: CustomCall | None = None
    id: str | None = None
    type: str | None = None


class ChatMessage(Body):
    """One turn of the conversation.

    `reasoning` is another name that some clients use for `reasoning_content`; `function_call`
    and the role `function` are the older form of tool calls.
    """

    SILENT = frozenset({"annotations"})
    INSTEAD: ClassVar[dict[str, object]] = {"role": "user", "content": line_for("message")}
    REFUSED: ClassVar[dict[str, str]] = {
        "audio": "is an earlier answer in sound, which is not here: send its text as `content`."
    }

    role: str
    content: Content = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[HistoryToolCall] | None = None
    tool_call_id: str | None = None
    function_call: FunctionCall | None = None
    refusal: str | None = None


class CustomFormat(Body):
    """What a custom tool's text must look like: `text`, or a `grammar`."""

    type: str = "text"
    grammar: GrammarFields | None = None


class CustomDefinition(Body):
    """A custom tool, which takes one text."""

    name: Name
    description: str | None = None
    format: CustomFormat | None = None


class ToolDefinition(Body):
    """A tool: a `function`, or a `custom` one. Other types are ignored, and named in the answer.

    What describes a function may also stand beside its type, as in the Responses API.
    """

    type: str = "function"
    function: FunctionDefinition | None = None
    custom: CustomDefinition | None = None
    name: str | None = None
    description: str | None = None
    parameters: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b"{}"))
    strict: bool | None = None


class NamedFunction(Body):
    """A function, or a custom tool, by its name."""

    name: str


class AllowedTools(Body):
    """The tools that may be called; `mode` is `auto` or `required`."""

    mode: str = "auto"
    tools: list[NamedToolChoice] = msgspec.field(default_factory=list["NamedToolChoice"])


class NamedToolChoice(Body):
    """A tool that the model must call, or those it may call."""

    type: str = "function"
    function: NamedFunction | None = None
    custom: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None


class StreamOptions(Body):
    """`include_usage` asks for a last chunk with the token counts."""

    include_usage: bool | None = None


class ResponseFormat(Body):
    """What form the answer must have: `text`, `json_object` or `json_schema`."""

    type: str = "text"
    json_schema: JsonSchemaFormat | None = None


class Prediction(Body):
    """What the answer will mostly be, such as the file that is edited; its type is `content`."""

    type: str = "content"
    content: Content = None


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`: one of these is what the answer must be."""

    json: msgspec.Raw = msgspec.field(default_factory=no_value)
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class SharedFields(SamplingFields, kw_only=True):
    """What chat and completions have in common beside how tokens are chosen. The form of an answer
    in vLLM's words is `structured_outputs`, or a `guided_…` field for each kind.
    """

    max_tokens: Count | None = None
    stop: str | list[str] | None = None
    n: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: msgspec.Raw = msgspec.field(default_factory=no_value)
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class ChatRequest(SharedFields, kw_only=True):
    """The body of `POST /v1/chat/completions`.

    `functions` and `function_call` are the older form of tools. The many ways to control thinking,
    `chat_template_kwargs`, `top_k`, `min_p`, `repetition_penalty`, `repetition_context_size` and
    `ignore_eos` go beyond OpenAI's API, and so do `continue_final_message: false` and
    `add_generation_prompt: true`, which have a last message of the assistant's answered instead of
    gone on with. `max_context` is how many tokens prompt and answer may have together, where that
    is less than the model's context, and `overflow` what is done with a conversation that has more.
    """

    HISTORY = "messages"
    INNER: ClassVar[dict[str, object]] = {**SamplingFields.INNER, **PLACES}
    REFUSED: ClassVar[dict[str, str]] = {
        "web_search_options": "asks for a search of the web, which is not done here: leave it out, "
        "or give the model a tool that searches."
    }

    messages: list[ChatMessage]
    max_completion_tokens: Count | None = None
    max_context: Annotated[int, Meta(ge=2, le=2**31 - 1)] | None = None
    overflow: Overflow | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: str | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: list[FunctionDefinition] | None = None
    function_call: str | NamedFunction | None = None
    response_format: ResponseFormat | None = None
    prediction: Prediction | None = None
    reasoning_effort: str | None = None
    reasoning: ReasoningFields | None = None
    enable_thinking: bool | None = None
    thinking: ThinkingField | None = None
    thinking_budget: Budget | None = None
    chat_template_kwargs: Raws | None = None
    metadata: Raws | None = None
    extra_body: Raws | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None


class CompletionRequest(SharedFields, kw_only=True):
    """The body of `POST /v1/completions`. Several prompts give several choices, in their order.

    `max_tokens` may be 0: nothing is said then but, with `echo`, the prompt. With `echo` and
    `logprobs` the prompt's own tokens have log probabilities, too.
    """

    prompt: str | list[str | int | list[int]]
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


# Answers

ChatFinish = FinishReason | Literal["function_call"]


class PromptTokensDetails(Body):
    """`cache_write_tokens` were computed, and are kept for the next request."""

    cached_tokens: int
    cache_write_tokens: int


class CompletionTokensDetails(Body):
    """Of the tokens that were guessed, so many stand in the answer, and so many do not."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(Body):
    """Exact token counts; a prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class AlternativeToken(Body):
    token: str
    logprob: float
    bytes: list[int]


class TokenEntry(AlternativeToken):
    top_logprobs: list[AlternativeToken]


class ChatLogprobs(Body):
    content: list[TokenEntry]


class CalledFunction(Body):
    """What is called and how; in a stream only the first piece of a call has its name."""

    arguments: str
    name: str | UnsetType = UNSET


class CalledCustom(Body):
    """What custom tool is called, with what text; streams name it in the first piece only."""

    input: str
    name: str | UnsetType = UNSET


class CalledTool(Body):
    """A tool call; streams give its `index`, and `id` and `type` with the first piece only.

    It has what its type says: a `function`, or what is called in a `custom` one.
    """

    function: CalledFunction | UnsetType = UNSET
    custom: CalledCustom | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function", "custom"] | UnsetType = UNSET
    index: int | UnsetType = UNSET


class AssistantMessage(Body):
    """`function_call` is there for a request with `functions`, `tool_calls` for one with tools."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CalledTool] | UnsetType = UNSET
    function_call: CalledFunction | UnsetType = UNSET


class ChatChoice(Body):
    index: int
    message: AssistantMessage
    finish_reason: ChatFinish
    logprobs: ChatLogprobs | None = None


class ChatCompletion(Body):
    """The whole answer to a chat request."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    hearth: HearthInfo
    object: Literal["chat.completion"] = "chat.completion"


class Delta(Body):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CalledTool] | UnsetType = UNSET
    function_call: CalledFunction | UnsetType = UNSET


class ChunkChoice(Body):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinish | None = None


class CompletionLogprobs(Body):
    """The older form: parallel lists, one entry for each token; a text's first token has none."""

    tokens: list[str] = msgspec.field(default_factory=list[str])
    token_logprobs: list[float | None] = msgspec.field(default_factory=list[float | None])
    top_logprobs: list[dict[str, float] | None] = msgspec.field(
        default_factory=list[dict[str, float] | None]
    )
    text_offset: list[int] = msgspec.field(default_factory=list[int])


class CompletionChoice(Body):
    """A choice of a completion, or in a stream its next piece."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None


class Completion(Body):
    """The whole answer to a completion request."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    system_fingerprint: str
    hearth: HearthInfo
    object: Literal["text_completion"] = "text_completion"


class ModelCard(Body):
    """A model that requests can name; `context` and `max_model_len` are the same number.

    `tools` is `generic` where the chat template has no form for tools and they are given as text.
    `template` is what was found of the template when the model was loaded: null before.
    `vision` is `untried` where only loading shows whether it sees; `vision_reason` is why not.
    """

    id: str
    created: int
    state: str
    context: int
    max_model_len: int
    size_bytes: int
    aliases: tuple[str, ...]
    capabilities: tuple[str, ...]
    pinned: bool
    tools: ToolUse = "no"
    template: TemplateForms | None = None
    vision: Literal["yes", "no", "untried"] = "no"
    vision_reason: str | None = None
    object: Literal["model"] = "model"
    owned_by: Literal["hearth"] = "hearth"


class RefusedModel(Body):
    """A model that cannot be used; requests that name it get an error of that code."""

    id: str
    code: str
    reason: str


class ModelList(Body):
    """The models that requests can name; `refused` are those that are there and cannot be used."""

    data: list[ModelCard]
    object: Literal["list"] = "list"
    refused: tuple[RefusedModel, ...] = ()
