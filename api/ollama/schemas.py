"""Ollama's requests and answers. Fields that have no effect are named in `hearth.ignored`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from api.http.hearth_info import HearthInfo
from api.http.limits import ModelName
from runtime.prompt.past import line_for
from runtime.types import FinishReason, ToolUse


class OllamaBody(msgspec.Struct, gc=False, kw_only=True):
    """Base of requests."""


class OllamaAnswer(msgspec.Struct, gc=False, kw_only=True, omit_defaults=True):
    """Base of answers; fields that are not set are left out."""


class OllamaFunction(OllamaBody):
    """`arguments` is an object, not text."""

    SILENT = frozenset({"index"})

    name: str
    arguments: Raw = msgspec.field(default_factory=lambda: Raw(b"{}"))


class Call(OllamaBody):
    function: OllamaFunction
    id: str | None = None


class OllamaMessage(OllamaBody):
    INSTEAD: ClassVar[dict[str, object]] = {"role": "user", "content": line_for("message")}

    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[Call] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaToolFunction(OllamaBody):
    name: str
    description: str | None = None
    parameters: Raw = msgspec.field(default_factory=lambda: Raw(b"{}"))


class OllamaTool(OllamaBody):
    function: OllamaToolFunction
    type: str = "function"


Probability = Annotated[float, Meta(ge=0, le=1)]


class Options(OllamaBody):
    """What Ollama's `options` have that has an effect here."""

    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Probability | None = None
    top_k: int | None = None
    min_p: Probability | None = None
    seed: int | None = None
    num_predict: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: Annotated[float, Meta(gt=0)] | None = None
    repeat_last_n: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class OllamaShared(OllamaBody):
    """What chat and generate have in common."""

    model: ModelName
    stream: bool | None = None
    options: Options | None = None
    format: Raw = msgspec.field(default_factory=lambda: Raw(b"null"))
    keep_alive: float | str | None = None
    think: bool | str | None = None


class OllamaChatRequest(OllamaShared):
    HISTORY = "messages"

    messages: list[OllamaMessage] | None = None
    tools: list[OllamaTool] | None = None


class GenerateBody(OllamaShared):
    prompt: str | None = None
    system: str | None = None
    images: list[str] | None = None
    raw: bool | None = None
    suffix: str | None = None


class ShowRequest(OllamaBody):
    model: str | None = None
    name: str | None = None


class CalledFunctionOut(OllamaAnswer):
    name: str
    arguments: Raw


class CallOut(OllamaAnswer):
    function: CalledFunctionOut
    id: str | UnsetType = UNSET


class MessageOut(OllamaAnswer):
    role: Literal["assistant"]
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[CallOut] | UnsetType = UNSET


class Counts(OllamaAnswer, kw_only=True):
    """How an answer ended and what it took. Durations are in nanoseconds."""

    done_reason: FinishReason | Literal["load", "unload"] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    hearth: HearthInfo | UnsetType = UNSET


class ChatAnswer(Counts, kw_only=True):
    """A piece of an answer, or all of it where it is not streamed."""

    model: str
    created_at: str
    message: MessageOut
    done: bool


class GenerateAnswer(Counts, kw_only=True):
    """The same for `/api/generate`."""

    model: str
    created_at: str
    response: str
    done: bool
    thinking: str | UnsetType = UNSET


class Details(OllamaAnswer):
    """What kind of model it is. The sizes are Ollama's words and are empty where unknown."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class ModelTag(OllamaAnswer):
    """A model in a list; those that are loaded have an `expires_at`."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: Details
    expires_at: str | UnsetType = UNSET
    size_vram: int | UnsetType = UNSET
    context_length: int | UnsetType = UNSET


class ModelTags(OllamaAnswer):
    models: list[ModelTag]


class Shown(OllamaAnswer):
    """One model. There is no modelfile here, so its fields are empty.

    `tools` is `generic` where they are given as text, as the chat template has no form for them.
    """

    modelfile: str
    parameters: str
    template: str
    details: Details
    model_info: dict[str, str | int]
    capabilities: list[str]
    tools: ToolUse
    modified_at: str


class OllamaVersion(OllamaAnswer):
    """`version` is the one of Ollama whose protocol this is; clients ask for a least one."""

    version: str
    hearth: str


class Trouble(OllamaAnswer):
    error: str
