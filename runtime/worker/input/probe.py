"""What a chat template can do, found once per model by rendering small conversations with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import msgspec

from runtime.errors import InvalidRequest
from runtime.prompt.arrange import Abilities
from runtime.prompt.thinking import EFFORT, SWITCHES
from runtime.prompt.tools_as_text import GENERIC, NATIVE, CallForm, ToolForms
from runtime.types import ChatPrompt, Image, Message, Role, TemplateForms, Tool, ToolCall
from runtime.worker.input.template_input import STRINGS, ContentForms

Render = Callable[[ChatPrompt, bool], str]
"""A conversation as text; whether an answer is opened at its end."""

_WORDS = ("qvone", "qvtwo", "qvthree", "qvfour")
_SYSTEM, _USER = "qvsystem", "qvuser"
_TYPE = "'type'"
_CALL = ToolCall(id="call00001", name="qvlook", arguments='{"at": 7}')
_TOOL = Tool(name="qvlook", description="Look.", parameters='{"type": "object", "properties": {}}')
_MAX_HEADS = 16
_ARGUMENT = "qvargument"
_AS_PYTHON = repr({"at": _ARGUMENT})
_MADE = ToolCall(id="call00001", name="qvlook", arguments=json.dumps({"at": _ARGUMENT}))


_ODD_IDS = ("call_0123456789abcdef0123456789", "c1")
_ASKED, _ANSWERED = Message(role="user", text="a"), Message(role="assistant", text="b")


class ToolsAfterSystem(NamedTuple):
    """How a template writes tools right after the system text: what is before it, and the tools."""

    before: str
    tools: str


class Probe:
    """Asks a template; every answer is found once and kept.

    `picture` is how it writes one, where the model sees any.
    """

    def __init__(self, render: Render, picture: str = "") -> None:
        self._render = render
        self._picture = picture
        self._heads: dict[tuple[tuple[Tool, ...], str], ToolsAfterSystem | None] = {}

    @cached_property
    def abilities(self) -> Abilities:
        """What is rendered in its place, and not refused or lost."""
        late: list[tuple[Role, ...]] = [("user", "assistant", "system", "user"), ("user", "system")]
        return Abilities(
            system=self.system,
            late_system=all(self._shows(roles) for roles in late),
            users_in_a_row=self.users_in_a_row,
            user_after_tool=self._takes_a_user_after_results(),
            images_in_results=self._shows_image_in_result(),
            any_ids=all(self._takes(_ASKED, _calling(one), _returned(one)) for one in _ODD_IDS)
            or not self._takes(_ASKED, _calling(_CALL.id), _returned(_CALL.id)),
            parallel_calls=self._takes_parallel_calls(),
            open_calls=self._takes(_ASKED, _calling(_CALL.id), _ASKED)
            or not self._takes(_ASKED, _ANSWERED, _ASKED),
            leading_answers=self._takes(_ANSWERED, _ASKED) or not self._takes(_ASKED),
            empty_answers=self._takes(_ASKED, Message(role="assistant"), _ASKED)
            or not self._takes(_ASKED, _ANSWERED, _ASKED),
        )

    def _takes(self, *messages: Message) -> bool:
        """It does not refuse these."""
        return self._told(messages) is not None

    def _takes_a_user_after_results(self) -> bool:
        """A user's turn may follow a result, where the template has results at all."""
        called, user = _calling(_CALL.id), Message(role="user", text=_WORDS[3])
        before = self._told((_ASKED, called, _returned(_CALL.id)))
        after = self._told((_ASKED, called, _returned(_CALL.id), user))
        if after is None:
            return before is None
        return _WORDS[3] in after and (_WORDS[2] in after or _WORDS[2] not in (before or ""))

    def _takes_parallel_calls(self) -> bool:
        """Two calls of one message are shown, or not even one after the other."""
        first, second = _calling("call00001", _WORDS[0]), _calling("call00002", _WORDS[1])
        results = _returned("call00001"), _returned("call00002")
        both = msgspec.structs.replace(first, tool_calls=(*first.tool_calls, *second.tool_calls))
        at_once = self._told((_ASKED, both, *results)) or ""
        in_turn = self._told((_ASKED, first, results[0], second, results[1])) or ""
        return not (_WORDS[1] in in_turn and _WORDS[1] not in at_once)

    @cached_property
    def system(self) -> bool:
        """A system message may be the first."""
        return self._shows(("system", "user"))

    @cached_property
    def users_in_a_row(self) -> bool:
        """A user's turn may follow another."""
        return self._shows(("user", "user"))

    @cached_property
    def lost(self) -> tuple[str, ...]:
        """What is left out in every form, of what clients send."""
        asked = _message("user", _WORDS[0], has_result=False)
        told = _message("assistant", _WORDS[1], has_result=False)
        called = msgspec.structs.replace(told, tool_calls=(_CALL,))
        result = _message("tool", _WORDS[2], has_result=True)
        thought = msgspec.structs.replace(told, reasoning=_WORDS[3])
        thought_called = msgspec.structs.replace(called, reasoning=_WORDS[3])
        talks: dict[str, tuple[str, list[tuple[Message, ...]]]] = {
            "user": (_WORDS[0], [(asked,)]),
            "assistant": (_WORDS[1], [(asked, told), (asked, told, asked)]),
            "text beside calls": (_WORDS[1], [(asked, called, result)]),
            "tool results": (_WORDS[2], [(asked, called, result)]),
            "thoughts": (_WORDS[3], [(asked, thought), (asked, thought_called, result)]),
        }
        return tuple(
            name
            for name, (word, tried) in talks.items()
            if not any(word in (self._told(one) or "") for one in tried)
        )

    @cached_property
    def responds(self) -> frozenset[str]:
        """The switches for thinking on which the text depends."""
        values: dict[str, tuple[object, object]] = dict.fromkeys(SWITCHES, (True, False))
        values[EFFORT] = ("low", "high")
        return frozenset(
            name for name, (one, other) in values.items() if self._differs(name, one, other)
        )

    @cached_property
    def thinks_by_default(self) -> bool:
        """The text for an answer is that of thinking, unless a switch is turned off."""
        given = self._text(("user",), opens_answer=True)
        return any(
            given == self._text(("user",), kwargs=json.dumps({name: True}), opens_answer=True)
            for name in self.responds & set(SWITCHES)
        )

    def definition(self, tool: Tool) -> str:
        """A tool as the template writes it, or else as JSON."""
        tool = msgspec.structs.replace(tool, is_deferred=False)
        with_one = self._text(("user",), tools=(_TOOL,))
        with_both = self._text(("user",), tools=(_TOOL, tool))
        plain = definition_of(tool)
        if with_one is None or with_both is None:
            return plain
        start = 0
        while start < len(with_one) and with_one[start] == with_both[start]:
            start += 1
        written = with_both[start : start + len(with_both) - len(with_one)].strip(" ,\n")
        is_whole = json.dumps(tool.name)[1:-1] in written and _is_balanced(written)
        return written if is_whole else plain

    def tools_after_system(self, tools: tuple[Tool, ...], kwargs: str) -> ToolsAfterSystem | None:
        """How these tools follow the system text; None where they do not, or not right away."""
        key = (tools, kwargs)
        if key not in self._heads:
            if len(self._heads) >= _MAX_HEADS:
                self._heads.clear()
            self._heads[key] = self._find_tools(tools, kwargs)
        return self._heads[key]

    def _find_tools(self, tools: tuple[Tool, ...], kwargs: str) -> ToolsAfterSystem | None:
        words = (_SYSTEM, _USER)
        with_tools = self._text(("system", "user"), words, tools, kwargs)
        without = self._text(("system", "user"), words, (), kwargs)
        if with_tools is None or without is None:
            return None
        before, found, after = with_tools.partition(_SYSTEM)
        before_plain, _, after_plain = without.partition(_SYSTEM)
        if not found or before != before_plain or not after.endswith(after_plain):
            return None
        text = after[: len(after) - len(after_plain)]
        is_there = bool(text.strip()) and all(tool.name in text for tool in tools)
        return ToolsAfterSystem(before, text) if is_there else None

    def _differs(self, name: str, one: object, other: object) -> bool:
        texts = [
            self._text(("user",), kwargs=json.dumps({name: value}), opens_answer=True)
            for value in (one, other)
        ]
        return None not in texts and texts[0] != texts[1]

    def _shows_image_in_result(self) -> bool:
        if not self._picture:
            return True
        roles: tuple[Role, ...] = ("user", "assistant", "tool")
        with_one = self._text(roles, image=Image(at=0, field=""))
        return with_one is not None and self._picture in with_one

    def _shows(self, roles: Sequence[Role]) -> bool:
        """Every message is in the text, in its place."""
        text = self._text(roles)
        if text is None:
            return False
        places = [text.find(word) for word in _WORDS[: len(roles)]]
        return -1 not in places and places == sorted(places)

    def _text(
        self,
        roles: Sequence[Role],
        words: Sequence[str] = _WORDS,
        tools: tuple[Tool, ...] = (),
        kwargs: str = "{}",
        *,
        opens_answer: bool = False,
        image: Image | None = None,
    ) -> str | None:
        has_result = "tool" in roles
        messages = tuple(
            _message(role, word, has_result=has_result)
            for role, word in zip(roles, words, strict=False)
        )
        if image is not None:
            last = msgspec.structs.replace(messages[-1], images=(image,))
            messages = (*messages[:-1], last)
        prompt = ChatPrompt(messages=messages, tools=tools, template_kwargs=kwargs)
        return self._rendered(prompt, opens_answer=opens_answer)

    def _told(self, messages: tuple[Message, ...]) -> str | None:
        return self._rendered(ChatPrompt(messages=messages), opens_answer=False)

    def _rendered(self, prompt: ChatPrompt, *, opens_answer: bool) -> str | None:
        try:
            return self._render(prompt, opens_answer)
        except InvalidRequest:
            return None


def tool_forms_of(render: Render, own_calls: CallForm | None) -> ToolForms:
    """What of tools a template itself shows; all of it where it cannot be asked.

    Without a form for tools it has those for calls and results if its model's own are shown.
    """

    def text(*messages: Message, tools: tuple[Tool, ...] = ()) -> str | None:
        try:
            return render(ChatPrompt(messages=messages, tools=tools), False)
        except InvalidRequest:
            return None

    system, user = Message(role="system", text=_SYSTEM), Message(role="user", text=_USER)
    if text(user) is None:
        return NATIVE
    called = Message(role="assistant", tool_calls=(_MADE,))
    result = Message(role="tool", text=_WORDS[0], tool_call_id=_MADE.id, name=_MADE.name)
    answer = Message(role="assistant", text=_WORDS[1])
    shown = [text(*head, user, tools=(_TOOL,)) for head in ((), (system,))]
    # Some have a call only while its turn goes on, or only with the tools it is of.
    talks = [
        text(user, called, result, *rest, tools=tools)
        for rest in ((), (answer, user))
        for tools in ((), (_TOOL,))
    ]
    forms = ToolForms(
        tools=_any_has(_TOOL.name, shown),
        calls=_any_has(_ARGUMENT, talks),
        results=_any_has(_WORDS[0], talks),
    )
    if not forms.tools:
        own = own_calls.begun(_MADE.name, _MADE.arguments) if own_calls is not None else ""
        if not (own and forms.results and _any_has(own, talks)):
            return GENERIC
    said = Message(role="assistant", text=_WORDS[2])
    beside = msgspec.structs.replace(called, text=_WORDS[2])
    if not forms.calls or _WORDS[2] in (text(user, beside, result, tools=(_TOOL,)) or ""):
        return forms
    talks = [
        text(user, said, called, result, *rest, tools=(_TOOL,)) for rest in ((), (answer, user))
    ]
    is_shown = all(_WORDS[2] in (one or "") for one in talks)
    return forms._replace(splits=is_shown and _any_has(_ARGUMENT, talks))


RenderIn = Callable[[ChatPrompt, ContentForms], str | None]
"""A conversation as text in these forms; None where the template refuses it."""


def content_forms_of(render: RenderIn, picture: str, mark: str) -> ContentForms:
    """In which form a template shows what messages say, role by role.

    A string is tried first, then a list of parts; arguments of calls as objects, then as texts. A
    `picture` that it does not show among parts is tried as its `mark` in a string.
    """
    roles: tuple[tuple[Role, ...], ...] = (
        ("user",),
        ("system", "user"),
        ("user", "assistant"),
        ("user", "assistant", "tool"),
    )
    forms = STRINGS
    for talk in roles:
        role = talk[0] if talk[0] == "system" else talk[-1]
        word = _WORDS[talk.index(role)]
        words = zip(talk, _WORDS, strict=False)
        messages = (_message(one, text, has_result="tool" in talk) for one, text in words)
        prompt = ChatPrompt(messages=tuple(messages))
        if role == "tool":
            forms = _with_arguments(render, forms)
        tried = (forms, forms.with_parts(role))
        texts = (render(prompt, one) for one in tried)
        found = (one for one, text in zip(tried, texts, strict=True) if word in (text or ""))
        forms = next(found, forms)
    if not picture:
        return forms
    message = Message(role="user", text=_WORDS[0], images=(Image(at=0, field=""),))
    seen = ChatPrompt(messages=(message,))
    marked = forms._replace(picture_mark=mark)
    for one in (forms, marked):
        text = render(seen, one) or ""
        # A template that takes strings only may write the list as Python does.
        if picture in text and _WORDS[0] in text and _TYPE not in text:
            return one
    return forms


def _with_arguments(render: RenderIn, forms: ContentForms) -> ContentForms:
    """The forms with arguments as texts, where only these are shown as JSON."""
    as_text = forms._replace(has_text_arguments=True)
    talks = [
        ChatPrompt(messages=(_ASKED, _calling(_MADE.id), *rest), tools=tools)
        for rest in ((), (_returned(_MADE.id),), (_returned(_MADE.id), _ANSWERED, _ASKED))
        for tools in ((), (_TOOL,))
    ]
    for talk in talks:
        text = render(talk, forms) or ""
        if _ARGUMENT in text and _AS_PYTHON not in text:
            return forms
    is_shown = any(_MADE.arguments in (render(talk, as_text) or "") for talk in talks)
    return as_text if is_shown else forms


def forms_told(content: ContentForms, tools: ToolForms, probe: Probe) -> TemplateForms:
    """What was found of a template, in the words of the API."""
    told = {"user", "assistant"} & content.parts
    return TemplateForms(
        content="parts" if len(told) == 2 else "mixed" if content.parts else "string",
        system="native" if probe.system else "user",
        tools="native" if tools.tools else "generic",
        calls="native" if tools.calls else "generic",
        arguments="text" if content.has_text_arguments else "object",
        results="native" if tools.results else "generic",
        lost=probe.lost,
    )


def _any_has(word: str, texts: Sequence[str | None]) -> bool:
    return any(word in one for one in texts if one is not None)


def definition_of(tool: Tool) -> str:
    """A tool as JSON, in the form that most templates show."""
    function: dict[str, object] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = json.loads(tool.parameters)
    return json.dumps({"type": "function", "function": function}, ensure_ascii=False)


def _message(role: Role, word: str, *, has_result: bool) -> Message:
    if role == "tool":
        return Message(role=role, text=word, tool_call_id=_CALL.id, name=_CALL.name)
    if role == "assistant" and has_result:
        return Message(role=role, text=word, tool_calls=(_CALL,))
    return Message(role=role, text=word)


def _calling(call_id: str, argument: str = "qvargument") -> Message:
    call = ToolCall(id=call_id, name=_CALL.name, arguments=json.dumps({"at": argument}))
    return Message(role="assistant", tool_calls=(call,))


def _returned(call_id: str) -> Message:
    return Message(role="tool", text=_WORDS[2], tool_call_id=call_id, name=_CALL.name)


def _is_balanced(text: str) -> bool:
    """A piece that was cut out of JSON at the wrong places has an odd bracket."""
    return all(text.count(one) == text.count(other) for one, other in ("{}", "[]"))
