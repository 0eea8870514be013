"""Ollama's requests, checked and turned into the runtime's own."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from api.http.caller import Caller
from api.http.durations import seconds_of
from api.http.fields import stops_of
from api.http.images import image_of, shown_images
from api.http.json_schemas import parameters_text
from api.http.past import RESULT_ROLES, STRICT, Turn
from api.http.refusal import refuse
from api.http.unused import listed
from api.ollama.schemas import (
    Call,
    GenerateBody,
    OllamaChatRequest,
    OllamaMessage,
    OllamaShared,
    OllamaTool,
    Options,
)
from runtime.config.settings import Settings
from runtime.errors import InvalidRequest
from runtime.types import (
    CacheParams,
    ChatPrompt,
    Constraint,
    GenerateRequest,
    Image,
    Message,
    ModelSpec,
    Prompt,
    Role,
    SamplingParams,
    TextPrompt,
    Thinking,
    Tool,
    ToolCall,
)

_ROLES: dict[str, Role] = {
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_EFFORTS = ("low", "medium", "high", "max")


def chat_request(
    data: OllamaChatRequest, request_id: str, spec: ModelSpec, settings: Settings, caller: Caller
) -> GenerateRequest:
    """The request as the runtime understands it; without messages it only loads the model.

    Raises:
        InvalidRequest: a field cannot be served; `param` is its path.
    """
    ignored: list[str] = []
    messages = _messages(data.messages or (), ignored)
    prompt = ChatPrompt(
        messages=shown_images(messages, spec, settings, ignored),
        tools=_tools(data.tools or ()),
        thinking=_thinking(data.think),
        continues_last=True,
    )
    wish = (caller, prompt if messages else None)
    request = _request(data, request_id, spec, settings, wish)
    return msgspec.structs.replace(request, ignored=tuple(listed(iter(ignored))))


def generate_request(
    data: GenerateBody, request_id: str, spec: ModelSpec, settings: Settings, caller: Caller
) -> GenerateRequest:
    """The same for one prompt, which goes through the chat template unless it is `raw`.

    Raises:
        InvalidRequest: a field cannot be served; `param` is its path.
    """
    prompt: Prompt | None = None
    if data.suffix and (data.images or data.system or not data.prompt):
        message = "suffix needs a prompt, and neither images nor a system text: leave those out."
        raise InvalidRequest(message, "suffix")
    if data.raw and data.images:
        message = "images cannot be shown in a raw prompt: leave out raw or the images."
        raise InvalidRequest(message, "images")
    if data.prompt and (data.raw or data.suffix):
        prompt = TextPrompt(text=data.prompt, suffix=data.suffix or "")
    elif data.prompt or data.images:
        images = _images(data.images, "images", STRICT)
        messages = (Message(role="user", text=data.prompt or "", images=images),)
        if data.system:
            messages = (Message(role="system", text=data.system), *messages)
        messages = shown_images(messages, spec, settings, [])
        prompt = ChatPrompt(messages=messages, thinking=_thinking(data.think))
    return _request(data, request_id, spec, settings, (caller, prompt))


def _request(
    data: OllamaShared,
    request_id: str,
    spec: ModelSpec,
    settings: Settings,
    wish: tuple[Caller, Prompt | None],
) -> GenerateRequest:
    caller, prompt = wish
    options = data.options or Options()
    return GenerateRequest(
        request_id=request_id,
        model=spec.id,
        prompt=prompt or TextPrompt(text=" "),
        work="generate" if prompt is not None else "count",
        client=caller.client,
        keep_alive_s=seconds_of(data.keep_alive),
        sampling=_sampling(options),
        constraint=_constraint(data.format),
        # -1 and -2 are Ollama's words for as many as it likes.
        max_tokens=spec.context if (options.num_predict or 0) < 0 else options.num_predict or None,
        stop=stops_of(options.stop, "options.stop"),
        deadline_s=settings.deadline_s,
        cache=CacheParams(session_id=caller.session_id((), ()), tenant=caller.tenant),
    )


def _sampling(options: Options) -> SamplingParams:
    last = options.repeat_last_n
    return SamplingParams(
        temperature=options.temperature,
        top_p=options.top_p or None,
        top_k=None if options.top_k is None else max(options.top_k, 0),
        min_p=options.min_p,
        seed=None if options.seed is None else options.seed & (2**63 - 1),
        # 0 is Ollama's word for no penalty, -1 that for all tokens.
        repetition_penalty=1.0 if last == 0 else options.repeat_penalty,
        repetition_context_size=None if last is None else max(last, 0),
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
    )


def _constraint(form: msgspec.Raw) -> Constraint | None:
    text = bytes(form).decode(errors="replace")
    if text in ("null", '""'):
        return None
    if text == '"json"':
        return Constraint(kind="json_object")
    if not text.startswith("{"):
        message = 'format must be "json" or a JSON schema.'
        raise InvalidRequest(message, "format")
    return Constraint(kind="json_schema", text=text)


def _thinking(think: bool | str | None) -> Thinking:
    if think is None or isinstance(think, bool):
        return Thinking.switched(think, *(() if think is None else ("think",)))
    if think not in _EFFORTS:
        message = f"think is {think[:32]!r}: use true, false or one of {', '.join(_EFFORTS)}."
        raise InvalidRequest(message, "think")
    return Thinking(is_enabled=True, effort=think, fields=("think",))


def _messages(messages: Sequence[OllamaMessage], ignored: list[str]) -> tuple[Message, ...]:
    """The messages; a tool's result belongs to the call of its name that has none yet."""
    read: list[Message] = []
    open_calls: list[ToolCall] = []
    for i, message in enumerate(messages):
        path = f"messages[{i}]"
        is_result = message.role in RESULT_ROLES
        turn = Turn.at(i, len(messages), ignored, is_result=is_result)
        role: Role = turn.read(lambda message=message, path=path: _role(message.role, path), "user")
        calls = _calls(message.tool_calls or (), path, turn)
        open_calls += calls
        call_id = message.tool_call_id
        if role == "tool" and call_id is None:
            call_id = _answered(open_calls, message.tool_name)
        read.append(
            Message(
                role=role,
                text=message.content or "",
                reasoning=message.thinking or None,
                tool_calls=calls if role == "assistant" else (),
                tool_call_id=call_id if role == "tool" else None,
                name=message.tool_name,
                images=_images(message.images, f"{path}.images", turn),
            )
        )
    return tuple(read)


def _role(name: str, path: str) -> Role:
    if name not in _ROLES:
        known = ", ".join(_ROLES)
        refuse(f"{path}.role", f"is {name[:64]!r}: use one of {known}.")
    return _ROLES[name]


def _calls(calls: Sequence[Call], path: str, turn: Turn) -> tuple[ToolCall, ...]:
    return tuple(
        ToolCall(
            id=call.id or f"call_{path}_{i}",
            name=call.function.name,
            arguments=turn.arguments(
                _arguments(call.function.arguments), f"{path}.tool_calls[{i}].function.arguments"
            ),
        )
        for i, call in enumerate(calls)
    )


def _arguments(given: msgspec.Raw) -> str:
    text = bytes(given).decode(errors="replace")
    if text.startswith('"'):
        return msgspec.json.decode(text, type=str)
    return "{}" if text == "null" else text


def _answered(open_calls: list[ToolCall], name: str | None) -> str | None:
    found = next((call for call in open_calls if name in (None, call.name)), None)
    if found is None:
        return None
    open_calls.remove(found)
    return found.id


def _images(images: Sequence[str] | None, path: str, turn: Turn) -> tuple[Image, ...]:
    """Ollama shows images before the text."""
    return tuple(
        turn.read(
            lambda data=data, at=f"{path}[{i}]": image_of(f"data:;base64,{data}", 0, at),
            Image(at=0, field=f"{path}[{i}]"),
        )
        for i, data in enumerate(images or ())
    )


def _tools(definitions: Sequence[OllamaTool]) -> tuple[Tool, ...]:
    tools: list[Tool] = []
    for i, definition in enumerate(definitions):
        function = definition.function
        path = f"tools[{i}].function.parameters"
        tools.append(
            Tool(
                name=function.name,
                description=function.description,
                parameters=parameters_text(function.parameters, path),
            )
        )
    return tuple(tools)
