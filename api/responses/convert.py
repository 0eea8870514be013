"""A Responses request, checked and turned into the runtime's own. Every refusal names its field.

Input items become messages: what belongs to one turn of the assistant becomes one. Their ids are
never shown to the model, as they change from turn to turn; nor is anything but content.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, NoReturn

import msgspec

from api.http.body import decoded_at
from api.http.caller import Caller
from api.http.durations import seconds_of
from api.http.expansion import Expansion
from api.http.images import shown_images
from api.http.past import Turn, is_result
from api.http.priorities import priority_of
from api.http.refusal import refuse
from api.http.unused import listed
from api.openai.caching import latest, work_of
from api.openai.content import ContentPart, read
from api.openai.fields import JsonSchemaFormat, Raws, arguments_text, is_given, role_in
from api.openai.formats import constraint_of
from api.openai.freeform import freeform_arguments
from api.openai.response_schemas import (
    ITEMS,
    BackgroundOptions,
    CallItem,
    CallOutputItem,
    CompactionItem,
    CustomCallItem,
    FormatFields,
    ItemHead,
    MessageItem,
    ReasoningItem,
    ResponseRequest,
)
from api.openai.sampling import cache_of, sampling_of
from api.openai.templates import goes_on, template_kwargs
from api.openai.thinking import all_said
from api.responses.client_tools import ClientCall, ClientOutput, call_of, found_in, output_of
from api.responses.compaction import live, summary_in
from api.responses.items import Item, head_of, lost_item, unseal
from api.responses.tools import Choice, Offer, ToolNames, chosen, flat_names, offered
from runtime.config.settings import Settings
from runtime.prompt.compaction import summary_message, summary_request
from runtime.prompt.continuation import begun
from runtime.prompt.past import line_for
from runtime.types import (
    Breakpoint,
    CacheParams,
    ChatPrompt,
    GenerateRequest,
    Image,
    Message,
    ModelSpec,
    Overflow,
    Priority,
    Role,
    ToolCall,
)

ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}
UNFINISHED = ("in_progress", "incomplete")
"""What is said of a message that the next one of the assistant's goes on with."""


class ItemTranscript(NamedTuple):
    """The messages, which items had no effect, and whether the last turn says that it is over."""

    messages: tuple[Message, ...]
    ignored: tuple[str, ...]
    is_over: bool


def transcript(items: Iterable[Item], names: ToolNames, expansion: Expansion) -> ItemTranscript:
    """The items as messages.

    Raises:
        InvalidRequest: an item of a known type is malformed, or stands for more than `expansion`
            has left; `param` is its path.
    """
    writer = _Writer(names, expansion)
    items = list(items)
    for number, item in enumerate(items):
        writer.add(item, number, len(items))
    writer.end_turn()
    return ItemTranscript(
        tuple(writer.messages), tuple(writer.ignored), writer.status == "completed"
    )


def gone_on_with(items: Sequence[Item]) -> list[Item]:
    """The items, of which the last message says that the answer belongs to the same turn."""
    *earlier, last = items
    if head_of(last).type != "message":
        return [*items]
    fields = decoded_at(last.raw, Raws, last.path)
    fields["status"] = msgspec.Raw(b'"incomplete"')
    return [*earlier, Item(msgspec.Raw(msgspec.json.encode(fields)), last.path)]


UNREADABLE = frozenset({"ghost_snapshot", "mcp_list_tools"})
"""Items that say nothing to any model here: they are left out, and named."""


class _Writer:
    """Writes messages; the assistant's current turn is open until something else follows."""

    def __init__(self, names: ToolNames, expansion: Expansion) -> None:
        self.messages: list[Message] = []
        self.ignored: list[str] = []
        self.status: str | None = None
        """What the item before says of itself, if it is the assistant's."""
        self._names = names
        self._expansion = expansion
        self._reasonings: list[str] = []
        self._texts: list[str] = []
        self._calls: list[ToolCall] = []
        self._images: list[Image] = []
        self._points: list[Breakpoint] = []
        self._length = 0
        """Of all texts of the turn."""

    def add(self, item: Item, number: int, count: int) -> None:
        """Item `number` of so many."""
        if item.lost:
            self.ignored.append(item.lost)
        kind = head_of(item).type or ""
        is_output = kind.endswith("_output")
        turn = Turn.at(number, count, self.ignored, is_result=is_output)
        shape = ITEMS.types.get(kind, ItemHead)
        if shape is not ItemHead:
            mended = turn.mended(item.raw, shape, item.path)
            read = turn.read(lambda: decoded_at(mended, shape, item.path), None)
            is_read = read is not None and self._add(read, item, turn)
        elif item.is_stored or kind in UNREADABLE:
            self.ignored.append(f"{item.path}: {kind[:64]}")
            return
        else:
            is_read = turn.read(lambda: _refuse_kind(kind, item.path), False)
        if not is_read:
            self.end_turn()
            role = "user" if is_output else "assistant"
            self.messages.append(Message(role=role, text=line_for(kind)))

    def _add(self, read: msgspec.Struct, item: Item, turn: Turn) -> bool:
        """Whether it says anything that can be read."""
        path = item.path
        match read:
            case MessageItem():
                self._add_message(read, path, turn)
            case CallItem():
                arguments = turn.arguments(arguments_text(read.arguments), f"{path}.arguments")
                self._add_call(read.call_id, read.name, read.namespace, arguments)
            case CustomCallItem():
                arguments = freeform_arguments(read.input or "")
                self._add_call(read.call_id, read.name, read.namespace, arguments)
            case CallOutputItem():
                self._add_output(read, path, turn)
            case ReasoningItem():
                self._add_reasoning(read, path, turn)
            case CompactionItem():
                summary = turn.read(lambda: summary_in(item, self._expansion), None)
                if summary is None:
                    return False
                self.end_turn()
                self.messages.append(summary_message(summary))
            case _:
                match call_of(read) or output_of(read):
                    case ClientCall(kind, call_id, arguments):
                        self._add_call(call_id, kind, None, arguments)
                    case ClientOutput() as output:
                        self._add_client_output(output)
                    case _:
                        return False
        return True

    def end_turn(self) -> None:
        """Close the assistant's turn, if one is open."""
        if not (self._reasonings or self._texts or self._calls):
            return
        reasoning = "".join(self._reasonings) if self._reasonings else None
        self.messages.append(
            Message(
                role="assistant",
                text="".join(self._texts),
                reasoning=reasoning,
                tool_calls=tuple(self._calls),
                images=tuple(self._images),
                breakpoints=tuple(self._points),
            )
        )
        self._reasonings, self._texts, self._calls = [], [], []
        self._images, self._points, self._length = [], [], 0

    def _add_message(self, item: MessageItem, path: str, turn: Turn) -> None:
        role: Role = turn.read(lambda: role_in(ROLES, item.role, path), "user")
        content = read(item.content, f"{path}.content", turn)
        before, self.status = self.status, item.status
        if role != "assistant":
            self.end_turn()
            self.messages.append(
                Message(
                    role=role,
                    text=content.text,
                    images=content.images,
                    breakpoints=content.breakpoints,
                )
            )
            return
        if self._texts and not self._calls and before not in UNFINISHED:
            self.end_turn()
        self._points += (
            msgspec.structs.replace(
                point,
                at=point.at + self._length,
                num_images=point.num_images + len(self._images),
            )
            for point in content.breakpoints
        )
        self._images += [
            msgspec.structs.replace(image, at=image.at + self._length) for image in content.images
        ]
        self._texts.append(content.text)
        self._length += len(content.text)

    def _add_call(self, call_id: str, name: str, namespace: str | None, arguments: str) -> None:
        flat = self._names.flat(name, namespace)
        self._calls.append(ToolCall(id=call_id, name=flat, arguments=arguments))

    def _add_output(self, item: CallOutputItem, path: str, turn: Turn) -> None:
        self.end_turn()
        output = read(item.output, f"{path}.output", turn)
        self.messages.append(
            Message(
                role="tool",
                text=output.text,
                tool_call_id=item.call_id,
                images=output.images,
                breakpoints=output.breakpoints,
            )
        )

    def _add_client_output(self, output: ClientOutput) -> None:
        self.end_turn()
        self.messages.append(
            Message(
                role="tool",
                text=output.text,
                tool_call_id=output.call_id,
                is_error=output.is_error,
                loaded_tools=tuple(flat_names(output.tools)),
            )
        )

    def _add_reasoning(self, item: ReasoningItem, path: str, turn: Turn) -> None:
        if self._texts or self._calls:
            self.end_turn()
        self.status = item.status
        sealed = item.encrypted_content
        opened = None
        if sealed is not None:
            opened = unseal(sealed, self._expansion, f"{path}.encrypted_content")
        if opened is None and sealed is not None and not (item.content or item.summary):
            self.ignored.append(f"{path}.encrypted_content: not written by this server")
            return
        self._reasonings.append(opened if opened is not None else _readable(item, path, turn))


def _refuse_kind(kind: str, path: str) -> NoReturn:
    refuse(
        path,
        f"is an item of type {kind[:64]!r}, which is not read here: leave it out, or send what it "
        "says as a message.",
    )


def _readable(item: ReasoningItem, path: str, turn: Turn) -> str:
    """The reasoning's content where it is there, else its summary."""
    parts: list[ContentPart] = item.content or item.summary or []
    field = "content" if item.content else "summary"
    return read(parts, f"{path}.{field}", turn).text


ENCRYPTED = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"
OVERFLOWS: Mapping[str, Overflow] = {"auto": "drop_oldest_turns", "disabled": "refuse"}
"""What `truncation` means; without it the model's settings say."""


WINDOWS_S = {"soonest": 0.0, "2h": 7200.0, "8h": 28_800.0}
"""How long a response in the background may take; 0 for as long as any other."""


class ResponsePlan(NamedTuple):
    """What is to be done for a request: what the model is asked, and how the answer is shaped."""

    request: GenerateRequest
    offer: Offer
    ignored: tuple[str, ...]
    is_begun: bool
    """The answer goes on with the last message."""
    compacts: bool = False
    """A summary is asked for, which takes the place of what was said."""
    compacts_first: bool = False
    """It is so long that it is summed up before it is answered."""
    num_replaced: int = 0
    """Items that are not read, as a summary stands for them."""


def items_of(data: ResponseRequest) -> list[Item]:
    """The items of the input; a string is one message of the user."""
    match data.input:
        case None:
            return []
        case str() as text:
            message = {"type": "message", "role": "user", "content": text}
            return [Item(msgspec.Raw(msgspec.json.encode(message)), "input")]
        case raws:
            return [_item(raw, i, len(raws)) for i, raw in enumerate(raws)]


def _item(raw: msgspec.Raw, number: int, count: int) -> Item:
    """An item, of which it is certain that it is one unless it is the newest input."""
    ignored: list[str] = []
    turn = Turn.at(number, count, ignored, is_result=is_result(raw))
    path = f"input[{number}]"
    item = Item(turn.mended(raw, ItemHead, path), path)
    if turn.read(lambda: head_of(item), None) is None:
        return lost_item(item, "item", ignored[-1])
    return item._replace(lost="; ".join(ignored))


def check(data: ResponseRequest) -> None:
    """Refuse what cannot be served before anything is looked up.

    Raises:
        InvalidRequest: `param` names the field.
    """
    if conversation_of(data) is not None and data.previous_response_id is not None:
        refuse(
            "previous_response_id", "cannot be combined with conversation: leave one of them out."
        )
    if is_given(data.prompt):
        refuse("prompt", "templates are not supported: send instructions and input.")
    if data.truncation is not None and data.truncation not in OVERFLOWS:
        refuse("truncation", f"must be one of {', '.join(OVERFLOWS)}.")
    for i, one in enumerate(data.context_management or ()):
        if one.type != "compaction":
            refuse(
                f"context_management[{i}].type",
                f"is {one.type[:64]!r}: the only one is 'compaction'.",
            )
    _check_window(data)
    if data.background and data.store is False:
        refuse("background", "needs the response to be stored: leave `store` out or set it true.")


def conversation_of(data: ResponseRequest) -> str | None:
    """The id of the stored conversation that is gone on with."""
    given = data.conversation
    return given if given is None or isinstance(given, str) else given.id


def _check_window(data: ResponseRequest) -> None:
    window = data.background_options.completion_window if data.background_options else None
    if window is None:
        return
    if window not in WINDOWS_S:
        refuse("background_options.completion_window", f"must be one of {', '.join(WINDOWS_S)}.")
    if WINDOWS_S[window] and (not data.background or data.stream):
        refuse(
            "background_options.completion_window",
            f"is {window!r}, which is for responses in the background that are not streamed: set "
            "`background` and leave `stream` out.",
        )


def _waiting(
    data: ResponseRequest, caller: Caller, settings: Settings
) -> tuple[Caller, Priority | None, float, float]:
    """Who asks, with which priority, how many seconds it may take, and wait for idle time. What
    has hours is answered when nobody else asks, and begins while there is time for it; a
    continuation id names the conversation where nothing else in the request's head does.
    """
    options = data.background_options or BackgroundOptions()
    asker = caller._replace(session=caller.session or options.continuation_id)
    window_s = WINDOWS_S[options.completion_window or "soonest"]
    priority = priority_of(data.priority) or ("background" if window_s else None)
    idle_s = 0.0 if data.priority is not None else window_s - min(settings.deadline_s, window_s / 2)
    return asker, priority, max(settings.deadline_s, window_s), max(0.0, idle_s)


def plan_of(
    data: ResponseRequest,
    items: Sequence[Item],
    request_id: str,
    spec: ModelSpec,
    caller: Caller,
    settings: Settings,
) -> ResponsePlan:
    """The request as the runtime understands it; `items` holds its whole history.

    Raises:
        InvalidRequest: a field cannot be served; `param` is its path.
    """
    offer = offered(data.tools or (), list(_found_tools(items)))
    choice = chosen(data.tool_choice, offer, is_parallel=data.parallel_tool_calls is not False)
    form = (data.text.format if data.text is not None else None) or FormatFields()
    schema = JsonSchemaFormat(form.name, form.description, form.schema, form.strict)
    expansion = Expansion.allowed(spec, settings)
    for item in items:
        if item.is_stored:
            expansion.count(len(item.raw), item.path)
    living = live(items)
    read = transcript(living.items, offer.names, expansion)
    messages = _instructions(data.instructions) + read.messages
    if not messages:
        refuse("input", "must not be empty: send a text or at least one item.")
    unshown: list[str] = []
    messages = shown_images(messages, spec, settings, unshown)
    constraint = constraint_of(form.type, schema, "text.format", "text.format")
    prompt = _prompt(data, messages, choice, is_over=read.is_over)
    asker, priority, deadline_s, idle_s = _waiting(data, caller, settings)
    request = GenerateRequest(
        request_id=request_id,
        model=spec.id,
        prompt=prompt,
        work=work_of(data),
        client=asker.client,
        priority=priority,
        keep_alive_s=seconds_of(data.keep_alive),
        sampling=sampling_of(data),
        constraint=constraint,
        max_tokens=data.max_output_tokens,
        top_logprobs=_top_logprobs(data),
        ignore_eos=bool(data.ignore_eos),
        deadline_s=deadline_s,
        idle_s=idle_s,
        cache=_cache(data, asker),
        overflow=OVERFLOWS.get(data.truncation) if data.truncation else None,
    )
    unserved = (*offer.ignored, *read.ignored, *unshown, *_unknown_includes(data.include or ()))
    ignored = tuple(listed(iter(unserved)))
    plan = ResponsePlan(request, offer, ignored, begun(prompt) is not None)
    if not living.is_to_be_compacted:
        return plan._replace(num_replaced=len(items) - len(living.items))
    return plan._replace(
        request=summary_request(request, spec.context), is_begun=False, compacts=True
    )


def _cache(data: ResponseRequest, asker: Caller) -> CacheParams:
    """What is wished of the KV. A stored conversation has one name, its id, whatever else the
    request is called: so what deletes that name deletes all that is kept of it.
    """
    cache = cache_of(data, asker, data.extra_body, data.metadata)
    if (conversation := conversation_of(data)) is None:
        return cache
    name = asker.session_id((conversation,), ())
    return msgspec.structs.replace(cache, session_id=name)


def _found_tools(items: Sequence[Item]) -> Iterator[tuple[msgspec.Raw, str]]:
    """The tools that searches found, and where they stand."""
    for item in items:
        if head_of(item).type == "tool_search_output":
            tools = found_in(item)
            yield from ((raw, f"{item.path}.tools[{i}]") for i, raw in enumerate(tools))


def _prompt(
    data: ResponseRequest, messages: tuple[Message, ...], choice: Choice, *, is_over: bool
) -> ChatPrompt:
    kwargs = dict(data.chat_template_kwargs or {})
    thinking = all_said(data, kwargs)
    return ChatPrompt(
        messages=latest(messages, data),
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
