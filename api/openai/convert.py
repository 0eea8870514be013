"""OpenAI's requests, checked and turned into the runtime's own. Every refusal names its field."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from api.http.caller import Caller
from api.http.durations import seconds_of
from api.http.fields import stops_of
from api.http.images import shown_images
from api.http.past import RESULT_ROLES, Turn
from api.http.priorities import priority_of
from api.http.refusal import refuse
from api.http.unused import listed
from api.openai.caching import latest, work_of
from api.openai.content import read
from api.openai.fields import arguments_text, role_in
from api.openai.formats import constraint_of, structured
from api.openai.freeform import freeform_arguments
from api.openai.prompts import listed_prompts
from api.openai.sampling import cache_of, num_choices, sampling_of
from api.openai.schemas import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    HistoryToolCall,
    Prediction,
)
from api.openai.templates import goes_on, template_kwargs
from api.openai.thinking import all_said
from api.openai.tools import chosen_tools
from runtime.config.settings import ModelSettings, Settings
from runtime.types import (
    ChatPrompt,
    GenerateRequest,
    Message,
    ModelSpec,
    Prompt,
    Role,
    TextPrompt,
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
DEFAULT_COMPLETION_TOKENS = 16
MAX_STOPS = 16
NOBODY = Caller()


def chat_to_generate(
    data: ChatRequest,
    request_id: str,
    spec: ModelSpec,
    settings: Settings,
    caller: Caller = NOBODY,
    *,
    needs_messages: bool = True,
) -> GenerateRequest:
    """The request as the runtime understands it. Without `needs_messages` these are only the new
    ones of a conversation, and their images are looked at together with the others.

    Raises:
        InvalidRequest: a field cannot be served; `param` is its path.
    """
    if data.top_logprobs is not None and not data.logprobs:
        refuse("top_logprobs", "needs logprobs: set `logprobs` to true.")
    form = data.response_format
    constraint = structured(data)
    if form is not None and form.type != "text":
        if constraint is not None:
            refuse(constraint.field, "does not go with response_format: leave one of them out.")
        path = "response_format"
        constraint = constraint_of(form.type, form.json_schema, path, f"{path}.json_schema")
    if needs_messages and not data.messages:
        refuse("messages", "must not be empty: send at least one message.")
    ignored: list[str] = []
    prompt = _chat_prompt(data, ignored)
    prediction = _predicted(data.prediction)
    if needs_messages:
        messages = shown_images(prompt.messages, spec, settings, ignored)
        prompt = msgspec.structs.replace(prompt, messages=messages)
    return GenerateRequest(
        request_id=request_id,
        model=spec.id,
        prompt=prompt,
        work=work_of(data),
        client=caller.client,
        priority=priority_of(data.priority),
        keep_alive_s=seconds_of(data.keep_alive),
        sampling=sampling_of(data),
        constraint=constraint,
        max_tokens=data.max_completion_tokens or data.max_tokens,
        max_context=data.max_context,
        overflow=data.overflow,
        stop=stops_of(data.stop, "stop", MAX_STOPS),
        num_choices=num_choices(data.n, settings.max_choices),
        top_logprobs=(data.top_logprobs or 0) if data.logprobs else None,
        ignore_eos=bool(data.ignore_eos),
        deadline_s=settings.deadline_s,
        cache=cache_of(data, caller, data.extra_body, data.metadata),
        prediction=prediction,
        ignored=tuple(listed(iter(ignored))),
    )


def completion_to_generate(
    data: CompletionRequest,
    request_id: str,
    spec: ModelSpec,
    settings: Settings,
    caller: Caller = NOBODY,
) -> list[GenerateRequest]:
    """One request of the runtime for each prompt, in their order.

    Raises:
        InvalidRequest: a field cannot be served; `param` is its path.
    """
    if data.best_of is not None and data.best_of != (data.n or 1):
        refuse("best_of", "is served only when it equals n: ask for n choices and take the best.")
    constraint = structured(data)
    scores_prompt = bool(data.echo) and data.logprobs is not None
    prompts = listed_prompts(data.prompt, needs_text=bool(data.echo) and not scores_prompt)
    if data.suffix:
        if data.echo:
            refuse("suffix", "cannot be combined with echo: leave one of them out.")
        prompts = [_with_suffix(prompt, data.suffix) for prompt in prompts]
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
            work=work_of(data),
            client=caller.client,
            priority=priority_of(data.priority),
            keep_alive_s=seconds_of(data.keep_alive),
            sampling=sampling_of(data),
            constraint=constraint,
            max_tokens=_completion_tokens(data, settings.model(spec.id)),
            stop=stops_of(data.stop, "stop", MAX_STOPS),
            num_choices=num_choices(data.n, settings.max_choices),
            top_logprobs=data.logprobs,
            scores_prompt=scores_prompt,
            ignore_eos=bool(data.ignore_eos),
            deadline_s=settings.deadline_s,
            cache=cache_of(data, caller),
        )
        for index, prompt in enumerate(prompts)
    ]


def _with_suffix(prompt: Prompt, suffix: str) -> Prompt:
    if not isinstance(prompt, TextPrompt):
        refuse("suffix", "needs the prompt as text: token ids are continued as they are.")
    return msgspec.structs.replace(prompt, suffix=suffix)


def _completion_tokens(data: CompletionRequest, own: ModelSettings) -> int:
    if data.max_tokens is not None:
        return data.max_tokens
    return own.max_tokens or DEFAULT_COMPLETION_TOKENS


def _predicted(prediction: Prediction | None) -> str:
    """The text that the client expects."""
    if prediction is None:
        return ""
    if prediction.type != "content":
        refuse("prediction.type", f'is {prediction.type[:64]!r}, but must be "content".')
    content = read(prediction.content, "prediction.content")
    if content.images:
        refuse("prediction.content", "has an image: send the text that you expect.")
    return content.text


def _chat_prompt(data: ChatRequest, ignored: list[str]) -> ChatPrompt:
    kwargs = dict(data.chat_template_kwargs or {})
    thinking = all_said(data, kwargs)
    tools, choice = chosen_tools(data)
    return ChatPrompt(
        messages=latest(_messages(data.messages, ignored), data),
        tools=tools,
        tool_choice=choice,
        thinking=thinking,
        template_kwargs=template_kwargs(kwargs),
        continues_last=goes_on(data.continue_final_message, data.add_generation_prompt),
    )


def _messages(messages: Sequence[ChatMessage], ignored: list[str]) -> tuple[Message, ...]:
    count = len(messages)
    return tuple(
        _message(
            message,
            f"messages[{i}]",
            Turn.at(i, count, ignored, is_result=message.role in RESULT_ROLES),
        )
        for i, message in enumerate(messages)
    )


def _message(message: ChatMessage, path: str, turn: Turn) -> Message:
    role: Role = turn.read(lambda: role_in(ROLES, message.role, path), "user")
    is_answer = role == "assistant"
    content = read(message.content, f"{path}.content", turn, has_thoughts=is_answer)
    return Message(
        role=role,
        text=content.text or message.refusal or "",
        reasoning=message.reasoning_content or message.reasoning or content.thoughts,
        tool_calls=_called_tools(message, path, turn) if is_answer else (),
        tool_call_id=_answered_call(message) if role == "tool" else message.tool_call_id,
        name=message.name,
        images=content.images,
        breakpoints=content.breakpoints,
    )


def _answered_call(message: ChatMessage) -> str | None:
    """The call that a tool's message answers; the older form knows only the function's name."""
    if message.role == "function" and message.tool_call_id is None and message.name:
        return f"call_{message.name}"
    return message.tool_call_id


def _called_tools(message: ChatMessage, path: str, turn: Turn) -> tuple[ToolCall, ...]:
    if message.function_call is not None and not message.tool_calls:
        call = message.function_call
        arguments = turn.arguments(arguments_text(call.arguments), f"{path}.function_call")
        return (ToolCall(id=f"call_{call.name}", name=call.name, arguments=arguments),)
    calls: list[ToolCall] = []
    for i, call in enumerate(message.tool_calls or ()):
        at, own_id = f"{path}.tool_calls[{i}]", f"call_{path}_{i}"
        made = turn.read(
            lambda call=call, at=at, own_id=own_id: _called_tool(call, at, own_id), None
        )
        if made is not None:
            arguments = turn.arguments(made.arguments, f"{at}.function.arguments")
            calls.append(msgspec.structs.replace(made, arguments=arguments))
    return tuple(calls)


def _called_tool(call: HistoryToolCall, path: str, own_id: str) -> ToolCall:
    if call.custom is not None and call.function is None:
        arguments = freeform_arguments(call.custom.input or "")
        name = call.custom.name
        return ToolCall(id=call.id or own_id, name=name, arguments=arguments, is_custom=True)
    if call.function is None:
        refuse(f"{path}.function", "is missing: it is required.")
    arguments = arguments_text(call.function.arguments)
    return ToolCall(id=call.id or own_id, name=call.function.name, arguments=arguments)
