"""OpenAI's requests, checked and turned into the runtime's own. Every refusal names its field."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from api.openai.prompts import listed_prompts
from api.openai.refusal import refuse
from api.openai.schemas import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    ContentPart,
    SharedFields,
    ToolDefinition,
)
from runtime.settings import Settings
from runtime.types import (
    CacheParams,
    ChatPrompt,
    GenerateRequest,
    Message,
    ModelSpec,
    Role,
    SamplingParams,
    Thinking,
    Tool,
    ToolCall,
)

ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
MAX_STOPS = 16
DEFAULT_COMPLETION_TOKENS = 16
# The worker gives these to the template itself; a client must not take their place.
RESERVED_TEMPLATE_KWARGS = ("messages", "conversation", "tools", "tokenize", "chat_template")

Raws = dict[str, msgspec.Raw]


def chat_to_generate(
    data: ChatRequest, request_id: str, spec: ModelSpec, settings: Settings
) -> GenerateRequest:
    """The request as the runtime understands it.

    Raises:
        InvalidRequest: a field cannot be served; `param` is its path.
    """
    _refuse_unserved(data)
    if data.top_logprobs is not None and not data.logprobs:
        refuse("top_logprobs", "needs logprobs: set `logprobs` to true.")
    thinking, template_kwargs = _template_arguments(data)
    return GenerateRequest(
        request_id=request_id,
        model=spec.id,
        prompt=ChatPrompt(
            messages=_messages(data.messages),
            tools=() if data.tool_choice == "none" else _tools(data.tools or ()),
            thinking=thinking,
            template_kwargs=template_kwargs,
        ),
        sampling=_sampling(data),
        max_tokens=data.max_completion_tokens or data.max_tokens,
        stop=_stop(data.stop),
        num_choices=_num_choices(data.n, settings.max_choices),
        top_logprobs=(data.top_logprobs or 0) if data.logprobs else None,
        ignore_eos=bool(data.ignore_eos),
        deadline_s=settings.request_deadline_s,
        cache=_cache(data),
    )


def completion_to_generate(
    data: CompletionRequest, request_id: str, spec: ModelSpec, settings: Settings
) -> list[GenerateRequest]:
    """One request of the runtime for each prompt, in their order.

    Raises:
        InvalidRequest: a field cannot be served; `param` is its path.
    """
    if data.suffix:
        refuse("suffix", "is not supported: leave it out.")
    if data.echo and data.logprobs is not None:
        refuse("echo", "cannot be combined with logprobs: leave one of them out.")
    prompts = listed_prompts(data.prompt, has_echo=bool(data.echo))
    if len(prompts) > settings.max_queue:
        refuse(
            "prompt",
            f"has {len(prompts)} entries, at most {settings.max_queue} are served at once.",
        )
    return [
        GenerateRequest(
            request_id=f"{request_id}-{index}",
            model=spec.id,
            prompt=prompt,
            sampling=_sampling(data),
            max_tokens=data.max_tokens or DEFAULT_COMPLETION_TOKENS,
            stop=_stop(data.stop),
            num_choices=_num_choices(data.n, settings.max_choices),
            top_logprobs=data.logprobs,
            ignore_eos=bool(data.ignore_eos),
            deadline_s=settings.request_deadline_s,
            cache=_cache(data),
        )
        for index, prompt in enumerate(prompts)
    ]


def _refuse_unserved(data: ChatRequest) -> None:
    if data.response_format is not None and data.response_format.type != "text":
        refuse(
            "response_format",
            f"of type {data.response_format.type[:64]!r} is not supported yet: leave it out or "
            'use {"type": "text"}.',
        )
    if data.tool_choice not in (None, "auto", "none"):
        refuse("tool_choice", 'must be "auto" or "none": forcing a tool call is not supported yet.')


def _messages(messages: Sequence[ChatMessage]) -> tuple[Message, ...]:
    if not messages:
        refuse("messages", "must not be empty: send at least one message.")
    return tuple(_message(message, f"messages[{i}]") for i, message in enumerate(messages))


def _message(message: ChatMessage, path: str) -> Message:
    role = ROLES.get(message.role)
    if role is None:
        refuse(
            f"{path}.role",
            f"is {message.role[:64]!r}, which is not a known role: use one of {', '.join(ROLES)}.",
        )
    return Message(
        role=role,
        text=_text(message.content, f"{path}.content"),
        reasoning=message.reasoning_content or message.reasoning,
        tool_calls=_called_tools(message, path),
        tool_call_id=message.tool_call_id,
        name=message.name,
    )


def _text(content: str | list[ContentPart] | None, path: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(_part_text(part, f"{path}[{i}]") for i, part in enumerate(content))


def _part_text(part: ContentPart, path: str) -> str:
    text = part.refusal if part.type == "refusal" else part.text
    if part.type not in ("text", "input_text", "output_text", "refusal"):
        refuse(
            path,
            f"is a part of type {part.type[:64]!r}, which is not supported yet: "
            "send text parts only.",
        )
    if text is None:
        refuse(f"{path}.text", "is missing: give the part's text.")
    return text


def _called_tools(message: ChatMessage, path: str) -> tuple[ToolCall, ...]:
    if message.role != "assistant":
        return ()
    if message.function_call is not None and not message.tool_calls:
        call = message.function_call
        return (ToolCall(id=f"call_{call.name}", name=call.name, arguments=call.arguments),)
    return tuple(
        ToolCall(
            id=call.id or f"call_{path}_{i}",
            name=call.function.name,
            arguments=call.function.arguments,
        )
        for i, call in enumerate(message.tool_calls or ())
    )


def _tools(definitions: Sequence[ToolDefinition]) -> tuple[Tool, ...]:
    tools: list[Tool] = []
    for i, definition in enumerate(definitions):
        if definition.type != "function":
            continue
        function = definition.function
        if function is None:
            refuse(
                f"tools[{i}].function", "is missing: describe the function by name and parameters."
            )
        tools.append(
            Tool(
                name=function.name,
                description=function.description,
                parameters=_schema_text(function.parameters, f"tools[{i}].function.parameters"),
            )
        )
    return tuple(tools)


def _schema_text(raw: msgspec.Raw, path: str) -> str:
    text = bytes(raw).decode(errors="replace")
    if text == "null":
        return "{}"
    if not text.startswith("{"):
        refuse(path, "must be a JSON schema, that is an object.")
    return text


def _template_arguments(data: ChatRequest) -> tuple[Thinking, str]:
    """Whether the model may think, and what else the template is given, as a JSON object."""
    kwargs: Raws = dict(data.chat_template_kwargs or {})
    for name in RESERVED_TEMPLATE_KWARGS:
        if name in kwargs:
            refuse(f"chat_template_kwargs.{name}", "cannot be set by a request: leave it out.")
    is_enabled = _thinking_flag(kwargs.pop("enable_thinking", None))
    effort = data.reasoning_effort
    if is_enabled is None and effort is not None:
        is_enabled = effort != "none"
    if data.enable_thinking is not None:
        is_enabled = data.enable_thinking
    template_kwargs = msgspec.json.encode(kwargs).decode(errors="replace")
    return Thinking(is_enabled=is_enabled, effort=effort), template_kwargs


def _thinking_flag(raw: msgspec.Raw | None) -> bool | None:
    if raw is None:
        return None
    try:
        return msgspec.json.decode(raw, type=bool | None)
    except msgspec.DecodeError:
        refuse("chat_template_kwargs.enable_thinking", "must be true or false.")


def _cache(data: SharedFields) -> CacheParams:
    return CacheParams(mode=data.cache_mode or "full", ttl_s=data.ttl, session_id=data.session_id)


def _sampling(data: SharedFields) -> SamplingParams:
    return SamplingParams(
        temperature=data.temperature,
        top_p=data.top_p,
        top_k=None if data.top_k is None else max(data.top_k, 0),
        min_p=data.min_p,
        seed=None if data.seed is None else data.seed & (2**63 - 1),
        repetition_penalty=data.repetition_penalty,
        presence_penalty=data.presence_penalty,
        frequency_penalty=data.frequency_penalty,
        logit_bias=_logit_bias(data.logit_bias or {}),
    )


def _logit_bias(biases: dict[str, float]) -> tuple[tuple[int, float], ...]:
    for key in biases:
        if not (key.isascii() and key.isdigit() and len(key) <= 9):
            refuse("logit_bias", f"has the key {key[:32]!r}: its keys must be token ids.")
    return tuple((int(key), bias) for key, bias in biases.items())


def _stop(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS:
        refuse("stop", f"has {len(stops)} entries, at most {MAX_STOPS} are served.")
    if "" in stops:
        refuse("stop", "must not contain an empty string: remove it.")
    return stops


def _num_choices(n: int | None, limit: int) -> int:
    if n is not None and n > limit:
        refuse("n", f"is {n}, at most {limit} choices are served.")
    return n or 1
