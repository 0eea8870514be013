"""Agents' requests and rows, turned into the runtime's types and back into what clients read."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NamedTuple

import msgspec
from msgspec import UNSET

from api.agents.schemas import (
    AgentConfig,
    AgentCreate,
    AgentFork,
    AgentSummary,
    AgentView,
    HistoryMessage,
    TurnUsage,
    TurnView,
)
from api.http.body import decoded
from api.http.draft import Draft
from api.http.refusal import refuse
from api.http.unused import unused_fields
from api.openai.calls import called_tool
from api.openai.fields import Raws
from api.openai.frame import chat_logprobs
from api.openai.sampling import SESSION_NAMES
from api.openai.schemas import (
    AssistantMessage,
    ChatChoice,
    ChatRequest,
)
from runtime.errors import StoreUnavailable
from runtime.prompt.continuation import begun
from runtime.types import ChatPrompt, GenerateRequest, Image, Message
from store.history.agent_rows import TurnRow

_OF_A_TURN = frozenset({"messages", "stream", "stream_options", "n"})
OF_A_GENERATE = _OF_A_TURN | {"id", "agent_id", "turn"}
MAX_CONFIG_BYTES = 4 << 20
"""Every answer repeats them, and each change reads them all."""
_OF_A_CONVERSATION = frozenset(
    {
        *SESSION_NAMES,
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    }
)
"""An agent's conversation is its own, and lives as long as its config says."""
_encode = msgspec.json.Encoder().encode
_message_decoder = msgspec.json.Decoder(Message)
_raws_decoder = msgspec.json.Decoder(Raws)


class Sent(NamedTuple):
    """A body's fields as they were written; those in `cleared` were null. `unused` are the names
    of others, which have no effect.
    """

    given: Raws
    cleared: frozenset[str]
    unused: tuple[str, ...] = ()


def sent_fields(body: bytes, kind: type[msgspec.Struct]) -> Sent:
    """The fields of a body that was found valid, as far as `kind` knows them.

    Raises:
        InvalidJson: the name of another is no text.
        InvalidRequest: a config has its system prompt under both names.
    """
    found = decoded(body, Raws)
    if issubclass(kind, AgentConfig) and "system_prompt" in found:
        if "system" in found:
            refuse("system_prompt", "is another name of system: send one of them.")
        found["system"] = found.pop("system_prompt")
    known = {name: found[name] for name in kind.__struct_fields__ if name in found}
    cleared = frozenset(name for name, raw in known.items() if bytes(raw) == b"null")
    given = {name: raw for name, raw in known.items() if name not in cleared}
    return Sent(given, cleared, tuple(unused_fields(body, kind, _without_effect(kind))))


def _without_effect(kind: type[msgspec.Struct]) -> frozenset[str]:
    """The known fields that do not count in such a body."""
    unused = _OF_A_CONVERSATION | (_OF_A_TURN if issubclass(kind, AgentConfig) else {"ttl"})
    return unused - {"agent_id"} if issubclass(kind, AgentCreate | AgentFork) else unused


def wanted_id(data: AgentCreate | AgentFork) -> str | None:
    """The id that a body asks for, under either name.

    Raises:
        InvalidRequest: the two differ.
    """
    if data.id is not None and data.agent_id not in (None, data.id):
        refuse("agent_id", "differs from id, of which it is another name: send one of them.")
    return data.id or data.agent_id


# An agent's config


def config_of(sent: Sent, before: bytes = b"{}") -> bytes:
    """The config that these fields make of an earlier one, as JSON; null takes a field away.

    Raises:
        InvalidRequest: they make it too long; `param` is the largest field.
    """
    known = _raws_decoder.decode(before)
    kept = {name: raw for name, raw in known.items() if name not in sent.cleared}
    config = kept | {name: raw for name, raw in sent.given.items() if name not in OF_A_GENERATE}
    if sum(map(len, config.values())) > max(MAX_CONFIG_BYTES, len(before)):
        largest = max(config, key=lambda name: len(config[name]))
        refuse(
            largest,
            f"has {len(config[largest])} bytes: all fields of an agent have at most "
            f"{MAX_CONFIG_BYTES} together. Make it shorter, or send the rest as a message.",
        )
    return _encode(config)


def read_config(config: bytes) -> AgentConfig:
    """A stored config."""
    return msgspec.json.decode(config, type=AgentConfig)


def in_brief(view: AgentView) -> AgentSummary:
    """The agent as a line of a listing."""
    return msgspec.convert(view, AgentSummary, from_attributes=True)


def utc(time_s: float) -> datetime:
    """A Unix time, in whole seconds."""
    return datetime.fromtimestamp(int(time_s), UTC)


class ShownConfig(msgspec.Struct, gc=False):
    """What of a config every view of an agent shows; all else in it may be long."""

    name: str | None = None
    model: str | None = None
    max_context: int | None = None
    metadata: msgspec.Raw = msgspec.Raw()


def read_shown(config: bytes) -> ShownConfig:
    """The same, of a stored config."""
    return msgspec.json.decode(config, type=ShownConfig)


def shown_config(config: bytes) -> Raws:
    """What of a config has no field of its own in an agent's view."""
    own = {"name", "model", "ttl", "pinned", "max_context", "metadata"}
    return {name: raw for name, raw in _raws_decoder.decode(config).items() if name not in own}


# A generate


def chat_of(config: bytes, sent: Sent) -> ChatRequest:
    """A generate as a chat request of its new messages; the agent's config fills what it lacks.

    Raises:
        InvalidRequest: it asks for several answers.
    """
    known = _raws_decoder.decode(config)
    merged = {name: raw for name, raw in known.items() if name in ChatRequest.__struct_fields__}
    merged |= {name: raw for name, raw in sent.given.items() if name != "expected_turn"}
    merged.setdefault("messages", msgspec.Raw(b"[]"))
    chat = msgspec.json.decode(_encode(merged), type=ChatRequest)
    if chat.n not in (None, 1):
        refuse("n", "must be 1: a history goes on in one way only.")
    return chat


def probe_of(config: bytes) -> ChatRequest:
    """A chat request that is refused if the config cannot be served."""
    message = msgspec.Raw(b'[{"role":"user","content":"?"}]')
    return chat_of(config, Sent({"messages": message}, frozenset()))


def with_history(
    request: GenerateRequest, system: str | None, history: Sequence[Message]
) -> tuple[GenerateRequest, tuple[Message, ...]]:
    """The request with everything that was said before, and its new messages by themselves.

    Raises:
        InvalidRequest: a tool result answers a call that nobody made.
    """
    prompt = request.prompt
    assert isinstance(prompt, ChatPrompt), "a chat request has a chat prompt"
    new = prompt.messages
    _check_results(history, new)
    opening = (Message(role="system", text=system),) if system else ()
    before = (_as_history(message, f"history[{i}]") for i, message in enumerate(history))
    whole = msgspec.structs.replace(prompt, messages=(*opening, *before, *new))
    return msgspec.structs.replace(request, prompt=whole), new


def _as_history(message: Message, path: str) -> Message:
    """The message, its images named by where they are now: their request is long over."""
    if not message.images:
        return message
    images = (
        msgspec.structs.replace(image, field=f"{path}.images[{i}]")
        for i, image in enumerate(message.images)
    )
    return msgspec.structs.replace(message, images=tuple(images))


def _check_results(history: Sequence[Message], new: Sequence[Message]) -> None:
    known = {call.id for message in history for call in message.tool_calls}
    for index, message in enumerate(new):
        known |= {call.id for call in message.tool_calls}
        call_id = message.tool_call_id
        if message.role == "tool" and call_id is not None and call_id not in known:
            refuse(
                f"messages[{index}].tool_call_id",
                f"is {call_id[:64]!r}, but no tool call of this agent has that id.",
            )


def choice_of(draft: Draft) -> ChatChoice:
    """The answer as the choice of a chat completion."""
    said = _message_view(answer_of(draft))
    return ChatChoice(
        index=0,
        message=AssistantMessage(
            content=None if draft.calls and not draft.text else draft.text,
            reasoning_content=said.reasoning_content,
            tool_calls=said.tool_calls,
        ),
        finish_reason=draft.finish_reason,
        logprobs=chat_logprobs(draft.logprobs),
    )


def answer_of(draft: Draft) -> Message:
    """What was generated, to the letter."""
    return Message(
        role="assistant",
        text=draft.text,
        reasoning=draft.reasoning if draft.reasonings else None,
        tool_calls=tuple(draft.calls),
    )


def turn_of(prompt: ChatPrompt, new: Sequence[Message], draft: Draft) -> tuple[Message, ...]:
    """A turn's messages; an answer that goes on with the last one is one message with it.

    Thoughts that were begun as text cannot be told from it: there the two stay apart.
    """
    answer, last = answer_of(draft), begun(prompt)
    if last is None or (last.text and draft.reasonings):
        return (*new, answer)
    reasonings = [one for one in (last.reasoning, answer.reasoning) if one is not None]
    whole = msgspec.structs.replace(
        last,
        text=last.text + answer.text,
        reasoning="".join(reasonings) if reasonings else None,
        tool_calls=answer.tool_calls,
    )
    return (*new[:-1], whole)


# What is stored


def packed(message: Message) -> bytes:
    """A message as it is stored."""
    return _encode(message)


def unpacked(body: bytes) -> Message:
    """A stored message.

    Raises:
        StoreUnavailable: it is damaged.
    """
    try:
        return _message_decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise StoreUnavailable(f"A message of the history is damaged: {error}.") from error


def turn_view(row: TurnRow) -> TurnView:
    """A turn as clients read it."""
    return TurnView(
        turn=row.number,
        request_id=row.request_id,
        model=row.model,
        created_at=row.created_s,
        finish_reason=row.finish_reason,
        usage=TurnUsage(row.num_prompt_tokens, row.num_cached_tokens, row.num_output_tokens),
        messages=[_message_view(unpacked(body)) for body in row.bodies],
    )


def _message_view(message: Message) -> HistoryMessage:
    calls = [called_tool(call) for call in message.tool_calls]
    return HistoryMessage(
        role=message.role,
        content=_parts(message) if message.images else message.text,
        reasoning_content=UNSET if message.reasoning is None else message.reasoning,
        tool_calls=calls or UNSET,
        tool_call_id=UNSET if message.tool_call_id is None else message.tool_call_id,
        name=UNSET if message.name is None else message.name,
    )


def _parts(message: Message) -> list[Raws]:
    """Text and images in their order."""
    parts: list[Raws] = []
    done = 0
    for image in message.images:
        parts += _text_part(message.text[done : image.at])
        url = msgspec.Raw(_encode({"url": _url(image)}))
        parts.append({"type": msgspec.Raw(b'"image_url"'), "image_url": url})
        done = image.at
    return parts + _text_part(message.text[done:])


def _text_part(text: str) -> list[Raws]:
    if not text:
        return []
    return [{"type": msgspec.Raw(b'"text"'), "text": msgspec.Raw(_encode(text))}]


def _url(image: Image) -> str:
    if image.url is not None:
        return image.url
    return f"data:application/octet-stream;base64,{base64.b64encode(image.data).decode()}"
