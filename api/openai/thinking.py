"""The many ways in which clients say how much the model is to think, all turned into one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from api.http.refusal import refuse
from api.openai.fields import Body, Budget, Raws, ReasoningFields, ThinkingFields
from runtime.types import Thinking

ThinkingField = bool | str | ThinkingFields

_YES = frozenset({"enabled", "enable", "on", "true", "yes"})
_NO = frozenset({"disabled", "disable", "off", "false", "no", "none"})
_AS_IT_LIKES = frozenset({"adaptive", "auto", "default"})


class Controls(Body):
    """Every name under which thinking is controlled, as it stands in one JSON object."""

    enable_thinking: bool | str | None = None
    thinking: ThinkingField | None = None
    reasoning: ReasoningFields | None = None
    reasoning_effort: str | None = None
    thinking_budget: Budget | None = None


class OpenPlace(Controls):
    """An object for anything, which may hold the controls as well."""

    IS_OPEN = True


class ExtraBody(Controls):
    """What is read of `extra_body`: the controls, and the conversation's names."""

    session_id: str | None = None
    conversation_id: str | None = None
    thread_id: str | None = None
    chat_id: str | None = None
    agent_id: str | None = None


PLACES = {"extra_body": ExtraBody, "metadata": OpenPlace, "chat_template_kwargs": OpenPlace}
"""What is known of them, for naming what is not."""


class SaysThinking(Protocol):
    """A request's body, with the controls at its top and objects that may hold them as well."""

    @property
    def enable_thinking(self) -> bool | str | None: ...
    @property
    def thinking(self) -> ThinkingField | None: ...
    @property
    def reasoning(self) -> ReasoningFields | None: ...
    @property
    def reasoning_effort(self) -> str | None: ...
    @property
    def thinking_budget(self) -> int | None: ...
    @property
    def extra_body(self) -> Raws | None: ...
    @property
    def metadata(self) -> Raws | None: ...


def decided(sources: Sequence[Thinking]) -> Thinking:
    """What the sources say together: for each property the first that says anything."""
    is_enabled: bool | None = None
    effort: str | None = None
    budget_tokens: int | None = None
    for one in sources:
        is_enabled = one.is_enabled if is_enabled is None else is_enabled
        effort = one.effort if effort is None else effort
        budget_tokens = one.budget_tokens if budget_tokens is None else budget_tokens
    fields = tuple(dict.fromkeys(field for one in sources for field in one.fields))
    return Thinking(
        is_enabled=is_enabled,
        effort=effort,
        budget_tokens=budget_tokens,
        is_switched_on=is_enabled is True and any(one.is_switched_on for one in sources),
        fields=fields,
    )


def stated(controls: Controls) -> Thinking:
    """What one object says. `enable_thinking` counts before `thinking`, `reasoning`, effort."""
    said: list[Thinking] = []
    if (switch := controls.enable_thinking) is not None:
        wish = in_words(switch) if isinstance(switch, str) else Thinking.switched(switch)
        said.append(_told_by("enable_thinking", wish))
    if controls.thinking is not None:
        said.append(_told_by("thinking", _of_thinking(controls.thinking)))
    if controls.reasoning is not None:
        said.append(_told_by("reasoning", of_reasoning(controls.reasoning)))
    if controls.reasoning_effort is not None:
        said.append(_told_by("reasoning_effort", of_effort(controls.reasoning_effort)))
    if controls.thinking_budget is not None:
        said.append(_told_by("thinking_budget", of_budget(controls.thinking_budget)))
    return decided(said)


def in_words(word: str) -> Thinking:
    """`enabled`, `off`, `auto`; any other word is an effort."""
    lowered = word.strip().lower()
    if lowered in _YES:
        return Thinking.switched(True)
    if lowered in _AS_IT_LIKES or not lowered:
        return Thinking()
    return of_effort(lowered)


def of_effort(effort: str | None) -> Thinking:
    """An effort; `none` is none at all."""
    if effort is None:
        return Thinking()
    if effort.lower() in _NO:
        return Thinking(is_enabled=False)
    return Thinking(is_enabled=True, effort=effort)


def of_budget(budget: int | None) -> Thinking:
    """A number of tokens; 0 turns thinking off."""
    if budget is None:
        return Thinking()
    return Thinking(is_enabled=budget > 0, budget_tokens=budget or None)


def of_reasoning(fields: ReasoningFields) -> Thinking:
    """The object `reasoning`."""
    words = [in_words(word) for word in (fields.type, fields.level) if word is not None]
    given = [of_effort(fields.effort), *words, of_budget(fields.max_tokens)]
    return decided([Thinking.switched(fields.enabled), *given])


def _of_thinking(field: ThinkingField) -> Thinking:
    match field:
        case bool():
            return Thinking.switched(field)
        case str():
            return in_words(field)
        case ThinkingFields():
            words = [in_words(field.type)] if field.type is not None else []
            given = [of_effort(field.effort), of_budget(field.budget_tokens)]
            return decided([Thinking.switched(field.enabled), *words, *given])


def nested(raws: Raws, at: str) -> Thinking:
    """What an object for anything (`metadata`, `extra_body`) says of it; the rest is skipped."""
    found = [
        _told_by(f"{at}.{name}", _lone(name, raws[name]))
        for name in Controls.__struct_fields__
        if name in raws and bytes(raws[name]) != b"null"
    ]
    return decided(found)


def _told_by(field: str, said: Thinking) -> Thinking:
    """What a field says, with its name if that is anything."""
    return said if said.is_unsaid else msgspec.structs.replace(said, fields=(field,))


def all_said(body: SaysThinking, template: Raws) -> Thinking:
    """What a whole request says. `enable_thinking` counts first, then the template's arguments,
    from which it is removed: templates have names of their own for it. Objects for anything come
    last.

    Raises:
        InvalidRequest: `chat_template_kwargs.enable_thinking` is neither true nor false.
    """
    own = Controls(
        enable_thinking=body.enable_thinking,
        thinking=body.thinking,
        reasoning=body.reasoning,
        reasoning_effort=body.reasoning_effort,
        thinking_budget=body.thinking_budget,
    )
    said = [stated(Controls(enable_thinking=own.enable_thinking))]
    if template:
        said.append(_taken_from(template))
    said.append(stated(own))
    places = {"extra_body": body.extra_body, "metadata": body.metadata}
    said += [nested(raws, at) for at, raws in places.items() if raws]
    return decided(said)


def _taken_from(kwargs: Raws) -> Thinking:
    switch = kwargs.get("enable_thinking")
    if switch is not None and bytes(switch) not in (b"true", b"false", b"null"):
        refuse("chat_template_kwargs.enable_thinking", "must be true or false.")
    thinking = nested(kwargs, "chat_template_kwargs")
    for name in Controls.__struct_fields__:
        kwargs.pop(name, None)
    return thinking


def _lone(name: str, raw: msgspec.Raw) -> Thinking:
    """What one field says; nothing where it is not of its type."""
    try:
        return stated(msgspec.json.decode(msgspec.json.encode({name: raw}), type=Controls))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Thinking()
