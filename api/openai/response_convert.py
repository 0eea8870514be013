"""A Responses request, checked and turned into the runtime's own. Every refusal names its field."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from api.durations import seconds_of
from api.images import check_images
from api.lineage import Caller
from api.openai.fields import JsonSchemaFormat, is_given
from api.openai.formats import constraint_of
from api.openai.response_items import Item, transcript
from api.openai.response_schemas import FormatFields, ResponseRequest
from api.openai.response_tools import Choice, Offer, chosen, offered
from api.openai.sampling import cache_of, sampling_of
from api.openai.templates import goes_on, template_kwargs
from api.openai.thinking import Controls, all_said
from api.refusal import refuse
from runtime.prompt.begun import begun
from runtime.settings import Settings
from runtime.types import ChatPrompt, GenerateRequest, Message, ModelSpec

ENCRYPTED = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"
TRUNCATIONS = ("auto", "disabled")


class Plan(NamedTuple):
    """What is to be done for a request: what the model is asked, and how the answer is shaped."""

    request: GenerateRequest
    offer: Offer
    ignored: tuple[str, ...]
    is_begun: bool
    """The answer goes on with the last message."""


def items_of(data: ResponseRequest) -> list[Item]:
    """The items of the input; a string is one message of the user."""
    match data.input:
        case None:
            return []
        case str() as text:
            message = {"type": "message", "role": "user", "content": text}
            return [Item(msgspec.Raw(msgspec.json.encode(message)), "input")]
        case raws:
            return [Item(raw, f"input[{i}]") for i, raw in enumerate(raws)]


def check(data: ResponseRequest) -> None:
    """Refuse what cannot be served before anything is looked up.

    Raises:
        InvalidRequest: `param` names the field.
    """
    if is_given(data.conversation):
        refuse("conversation", "is not supported: use previous_response_id.")
    if is_given(data.prompt):
        refuse("prompt", "templates are not supported: send instructions and input.")
    if data.truncation is not None and data.truncation not in TRUNCATIONS:
        refuse("truncation", f"must be one of {', '.join(TRUNCATIONS)}.")
    if data.background and data.store is False:
        refuse("background", "needs the response to be stored: leave `store` out or set it true.")


def plan_of(
    data: ResponseRequest,
    items: Sequence[Item],
    request_id: str,
    spec: ModelSpec,
    caller: Caller,
    settings: Settings,
) -> Plan:
    """The request as the runtime understands it; `items` holds its whole history.

    Raises:
        InvalidRequest: a field cannot be served; `param` is its path.
    """
    offer = offered(data.tools or ())
    choice = chosen(data.tool_choice, offer, is_parallel=data.parallel_tool_calls is not False)
    form = (data.text.format if data.text is not None else None) or FormatFields()
    schema = JsonSchemaFormat(form.name, form.description, form.schema, form.strict)
    read = transcript(items, offer.names)
    messages = _instructions(data.instructions) + read.messages
    if not messages:
        refuse("input", "must not be empty: send a text or at least one item.")
    check_images(messages, spec, settings)
    constraint = constraint_of(form.type, schema, "text.format", "text.format")
    prompt = _prompt(data, messages, choice, is_over=read.is_over)
    request = GenerateRequest(
        request_id=request_id,
        model=spec.id,
        prompt=prompt,
        client=caller.client,
        priority=data.priority,
        keep_alive_s=seconds_of(data.keep_alive),
        sampling=sampling_of(data),
        constraint=constraint,
        max_tokens=data.max_output_tokens,
        top_logprobs=_top_logprobs(data),
        ignore_eos=bool(data.ignore_eos),
        deadline_s=settings.request_deadline_s,
        cache=cache_of(data, caller),
    )
    ignored = (*offer.ignored, *read.ignored, *_unknown_includes(data.include or ()))
    return Plan(request, offer, ignored, begun(prompt) is not None)


def _prompt(
    data: ResponseRequest, messages: tuple[Message, ...], choice: Choice, *, is_over: bool
) -> ChatPrompt:
    kwargs = dict(data.chat_template_kwargs or {})
    own = Controls(
        enable_thinking=data.enable_thinking,
        thinking=data.thinking,
        reasoning=data.reasoning,
        reasoning_effort=data.reasoning_effort,
        thinking_budget=data.thinking_budget,
    )
    thinking = all_said(own, kwargs, data.extra_body, data.metadata)
    return ChatPrompt(
        messages=messages,
        tools=choice.tools,
        tool_choice=choice.choice,
        thinking=thinking,
        template_kwargs=template_kwargs(kwargs),
        continues_last=goes_on(
            data.continue_final_message, data.add_generation_prompt, is_over=is_over
        ),
    )


def _instructions(text: str | None) -> tuple[Message, ...]:
    return (Message(role="system", text=text),) if text else ()


def _top_logprobs(data: ResponseRequest) -> int | None:
    if LOGPROBS in (data.include or ()) or data.top_logprobs:
        return data.top_logprobs or 0
    return None


def _unknown_includes(names: Iterable[str]) -> list[str]:
    return [f"include: {name[:64]}" for name in names if name not in (ENCRYPTED, LOGPROBS)]
