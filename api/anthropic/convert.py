"""Anthropic's requests, checked and turned into the runtime's own; a refusal names its field."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import takewhile
from typing import Literal, NamedTuple

import msgspec

from api.anthropic.breakpoints import Breakpoints
from api.anthropic.schemas import (
    ContextEdit,
    ContextManagement,
    CountRequest,
    InputMessage,
    MessagesRequest,
    Metadata,
    OutputFormat,
    ThinkingField,
    ToolChoiceField,
)
from api.anthropic.tool_changes import ToolChanges
from api.anthropic.tools import tool_of
from api.anthropic.transcript import Transcript
from api.http.caller import Caller
from api.http.durations import seconds_of
from api.http.expansion import Expansion
from api.http.fields import stops_of
from api.http.images import shown_images
from api.http.json_schemas import schema_text
from api.http.past import Turn
from api.http.priorities import priority_of
from api.http.refusal import refuse
from api.http.unused import listed
from runtime.config.settings import Settings
from runtime.prompt.compaction import summary_message, summary_request
from runtime.types import (
    CacheParams,
    ChatPrompt,
    Constraint,
    GenerateRequest,
    Message,
    ModelSpec,
    SamplingParams,
    Thinking,
    Tool,
    ToolChoice,
)

CHOICES: dict[str, Literal["auto", "none", "required"]] = {
    "auto": "auto",
    "any": "required",
    "tool": "required",
    "none": "none",
}


_NO_THINKING = ("disabled", "between_tools")
_THINKING_TYPES = ("enabled", "adaptive", *_NO_THINKING)


class ConvertedRequest(NamedTuple):
    """A request in the runtime's terms, and what its answer must know of it.

    `has_breakpoints` says that the client uses prompt caching, `shows_thinking` that it wants to
    read the thoughts; `ignored` names the fields that had no effect.
    """

    request: GenerateRequest
    ignored: tuple[str, ...] = ()
    has_breakpoints: bool = False
    shows_thinking: bool = True
    compacts: bool = False
    """A summary is asked for, which takes the place of the conversation."""
    num_compacted: int = 0
    """Messages that are not read, as a summary stands for them."""


def after_summary(asked: ConvertedRequest, summary: str) -> GenerateRequest:
    """The request that a client is about to send: a summary in place of all that was said."""
    prompt = asked.request.prompt
    assert isinstance(prompt, ChatPrompt)
    head = takewhile(lambda message: message.role == "system", prompt.messages)
    prompt = msgspec.structs.replace(
        prompt, messages=(*head, summary_message(summary)), tool_choice=ToolChoice()
    )
    return msgspec.structs.replace(asked.request, request_id="", prompt=prompt)


class ConversionContext(NamedTuple):
    """What a request is turned around with."""

    spec: ModelSpec
    settings: Settings
    caller: Caller = Caller()
    unused: Sequence[str] = ()
    """The fields of the body that nobody knows."""
    num_stored: int = 0
    """The first messages, which were not sent but are kept in the thread."""


def messages_to_generate(
    data: MessagesRequest, request_id: str, door: ConversionContext
) -> ConvertedRequest:
    """The request as the runtime understands it.

    Raises:
        InvalidRequest: a field cannot be served; `param` is its path.
    """
    asked = count_to_generate(data, request_id, door)
    output_format, path = _format(data)
    request = msgspec.structs.replace(
        asked.request,
        work="prefill" if data.max_tokens == 0 else "generate",
        priority=priority_of(data.priority),
        keep_alive_s=seconds_of(data.keep_alive),
        sampling=SamplingParams(
            temperature=data.temperature,
            top_p=data.top_p,
            top_k=None if data.top_k is None else max(data.top_k, 0),
        ),
        constraint=_constraint(output_format, path),
        max_tokens=data.max_tokens or None,
        stop=stops_of(data.stop_sequences, "stop_sequences"),
        cache=CacheParams(
            mode=data.cache_mode or "full",
            ttl_s=data.ttl,
            session_id=door.caller.session_id((data.session_id,), (_session(data.metadata),)),
            pause_s=data.tool_pause_s,
            is_last=bool(data.release),
            tenant=door.caller.tenant,
        ),
    )
    asked = asked._replace(request=request)
    if data.compaction is None:
        return asked
    given = (data.compaction.instructions or "").strip()
    summary = summary_request(request, door.spec.context, given or None)
    return asked._replace(request=summary, compacts=True)


def count_to_generate(
    data: CountRequest, request_id: str, door: ConversionContext
) -> ConvertedRequest:
    """A request that only counts the prompt's tokens, of the very prompt that would be answered.

    Raises:
        InvalidRequest: a field cannot be served; `param` is its path.
    """
    if not data.messages:
        refuse("messages", "must not be empty: at least one message is required.")
    if data.compaction is not None and data.compaction.type != "summarize":
        refuse("compaction.type", f"is {data.compaction.type[:64]!r}: the only one is 'summarize'.")
    breakpoints = Breakpoints()
    changes = ToolChanges(
        [tool_of(one, f"tools[{i}]", breakpoints) for i, one in enumerate(data.tools or ())],
        breakpoints,
    )
    expansion = Expansion.allowed(door.spec, door.settings)
    transcript = _transcript(data, door, Transcript(breakpoints, expansion, changes))
    tools = changes.tools
    messages = shown_images(transcript.messages, door.spec, door.settings, transcript.ignored)
    keep_s = breakpoints.keep_s(data.cache_control, "")
    request = GenerateRequest(
        request_id=request_id,
        model=door.spec.id,
        work="count",
        client=door.caller.client,
        prompt=ChatPrompt(
            messages=_kept(messages, keep_s),
            tools=tools,
            tool_choice=changes.available(_tool_choice(data.tool_choice, tools)),
            thinking=_thinking(data, door),
            continues_last=True,
        ),
        deadline_s=door.settings.deadline_s,
    )
    for i, edit in enumerate(_edits(data.context_management)):
        if msgspec.json.decode(edit.keep) not in ("all", {"type": "all"}):
            refuse(
                f"context_management.edits[{i}]",
                f"is {edit.type[:64]!r}, which is not supported unless it keeps all: leave it out, "
                "and drop in the client what the model is not to read any more.",
            )
    is_by_default = _thinks_by_default(door)
    ignored = [
        *_unserved(data, is_by_default=is_by_default),
        *_unfinished(transcript.messages),
        *transcript.ignored,
    ]
    return ConvertedRequest(
        request=request,
        ignored=(*door.unused, *listed(iter(ignored))),
        has_breakpoints=breakpoints.count > 0,
        shows_thinking=data.thinking is None or data.thinking.display != "omitted",
        num_compacted=transcript.num_compacted,
    )


def _transcript(data: CountRequest, door: ConversionContext, transcript: Transcript) -> Transcript:
    """System prompt and turns; a system message that is to be cleared counts up to a user's."""
    transcript.add_system(data.system, "system")
    said = data.messages
    last_user = max((i for i, message in enumerate(said) if message.role == "user"), default=-1)
    for i, message in enumerate(said):
        at = i - door.num_stored
        path = f"messages[{at}]" if at >= 0 else f"thread: message {i}"
        turn = Turn.at(i, len(said), transcript.ignored)
        is_cleared = turn.read(partial(_is_cleared, message, path), instead=False)
        if is_cleared and i < last_user:
            transcript.add_changes(message.content, f"{path}.content", turn)
        else:
            transcript.add(message, path, turn)
    if not transcript.messages:
        refuse("messages", "have no content that is known here: say something in them.")
    return transcript


def _is_cleared(message: InputMessage, path: str) -> bool:
    """Whether it is to be read until the next turn of a user's only."""
    if message.clear_at not in (None, "never", "next_user_message"):
        refuse(f"{path}.clear_at", "must be 'next_user_message' or 'never'.")
    is_cleared = message.clear_at == "next_user_message"
    if is_cleared and message.role != "system":
        refuse(f"{path}.clear_at", "is for system messages only: leave it out.")
    return is_cleared


def _kept(messages: Sequence[Message], keep_s: float | None) -> tuple[Message, ...]:
    """The messages, the last of them kept at least that long."""
    if keep_s is None:
        return tuple(messages)
    *earlier, last = messages
    return (*earlier, last.kept(keep_s))


def _tool_choice(given: ToolChoiceField | None, tools: Sequence[Tool]) -> ToolChoice:
    if given is None:
        return ToolChoice()
    mode = CHOICES.get(given.type)
    if mode is None:
        refuse("tool_choice.type", f"is {given.type[:64]!r}: use one of {', '.join(CHOICES)}.")
    if mode == "required" and not tools:
        refuse("tool_choice", "needs tools: give them, or leave it out.")
    return ToolChoice(
        mode=mode,
        name=_chosen(given, tools) if given.type == "tool" else None,
        is_parallel=not given.disable_parallel_tool_use,
    )


def _chosen(given: ToolChoiceField, tools: Sequence[Tool]) -> str:
    if given.name is None or all(tool.name != given.name for tool in tools):
        refuse("tool_choice.name", "must be the name of one of the tools.")
    return given.name


def _thinks_by_default(door: ConversionContext) -> bool:
    return bool(door.settings.model(door.spec.id).thinking)


def _thinking(data: CountRequest, door: ConversionContext) -> Thinking:
    """Without `thinking` there is none, as in Anthropic's API, unless the model's settings say."""
    effort = data.output_config.effort if data.output_config is not None else None
    said = ("thinking",) if effort is None else ("thinking", "output_config.effort")
    match data.thinking:
        case None if _thinks_by_default(door):
            return Thinking(is_enabled=True, effort=effort, is_switched_on=True, fields=said[1:])
        case None:
            return Thinking(is_enabled=False)
        case ThinkingField(type="disabled" | "between_tools"):
            return Thinking(is_enabled=False, fields=said[:1])
        case ThinkingField(type="enabled", budget_tokens=budget):
            return Thinking(
                is_enabled=True,
                effort=effort,
                budget_tokens=budget,
                is_switched_on=True,
                fields=said,
            )
        case ThinkingField(type="adaptive"):
            return Thinking(is_enabled=True, effort=effort, is_adaptive=True, fields=said)
        case _:
            return Thinking(effort=effort, fields=said)


def _format(data: CountRequest) -> tuple[OutputFormat | None, str]:
    """What the answer's text must be, and where that is said."""
    if data.output_config is not None and data.output_config.format is not None:
        return data.output_config.format, "output_config.format"
    return data.output_format, "output_format"


def _constraint(given: OutputFormat | None, path: str) -> Constraint | None:
    if given is None:
        return None
    if given.type != "json_schema":
        refuse(f"{path}.type", f"is {given.type[:64]!r}: the only one is 'json_schema'.")
    text = schema_text(given.schema, f"{path}.schema")
    return Constraint(kind="json_schema", text=text, field=path)


class _ClaudeCodeUser(msgspec.Struct, gc=False):
    session_id: str | None = None


def _session(metadata: Metadata | None) -> str | None:
    """The conversation's name in `metadata.user_id`: Claude Code writes JSON, or `…_session_…`."""
    if metadata is None or metadata.user_id is None:
        return None
    user_id = metadata.user_id
    try:
        return msgspec.json.decode(user_id, type=_ClaudeCodeUser).session_id or user_id
    except (msgspec.DecodeError, RecursionError):
        return user_id.rpartition("_session_")[2]


def _unserved(data: CountRequest, *, is_by_default: bool) -> list[str]:
    """Known fields that have no effect here. An effort has none where nothing is thought, which
    the model's settings may want by default.
    """
    unserved: list[str] = []
    if data.thinking is not None and data.thinking.type not in _THINKING_TYPES:
        unserved.append(f"thinking ({data.thinking.type[:64]})")
    is_thinking = data.thinking is not None and data.thinking.type not in _NO_THINKING
    if not (is_thinking or is_by_default) and data.output_config is not None:
        unserved += ["output_config.effort"] * (data.output_config.effort is not None)
    return unserved


def _unfinished(messages: Sequence[Message]) -> list[str]:
    """Calls without results: the model is asked to go on after them."""
    has_open_calls = messages[-1].role == "assistant" and bool(messages[-1].tool_calls)
    return ["messages[-1] (its calls have no results: the answer follows them)"] * has_open_calls


def _edits(given: ContextManagement | None) -> Sequence[ContextEdit]:
    return given.edits or () if given is not None else ()
