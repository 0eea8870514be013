"""The many ways in which clients say how much the model is to think, all turned into one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from api.openai.fields import Body, Budget, Raws, ReasoningFields, ThinkingFields
from api.refusal import refuse
from runtime.types import Thinking

T = TypeVar("T")

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


def decided(sources: Sequence[Thinking]) -> Thinking:
    """What the sources say together: for each property the first that says anything."""
    return Thinking(
        is_enabled=_first([one.is_enabled for one in sources]),
        effort=_first([one.effort for one in sources]),
        budget_tokens=_first([one.budget_tokens for one in sources]),
    )


def stated(controls: Controls) -> Thinking:
    """What one object says. `enable_thinking` counts before `thinking`, `reasoning`, effort."""
    switch = controls.enable_thinking
    return decided(
        [
            Thinking(is_enabled=switch) if not isinstance(switch, str) else in_words(switch),
            _of_thinking(controls.thinking),
            of_reasoning(controls.reasoning),
            of_effort(controls.reasoning_effort),
            of_budget(controls.thinking_budget),
        ]
    )


def in_words(word: str) -> Thinking:
    """`enabled`, `off`, `auto`; any other word is an effort."""
    lowered = word.strip().lower()
    if lowered in _YES:
        return Thinking(is_enabled=True)
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


def of_reasoning(fields: ReasoningFields | None) -> Thinking:
    """The object `reasoning`."""
    if fields is None:
        return Thinking()
    given = [of_effort(fields.effort), of_budget(fields.max_tokens)]
    return decided([Thinking(is_enabled=fields.enabled), *given])


def _of_thinking(field: ThinkingField | None) -> Thinking:
    match field:
        case None:
            return Thinking()
        case bool():
            return Thinking(is_enabled=field)
        case str():
            return in_words(field)
        case ThinkingFields():
            words = [in_words(field.type)] if field.type is not None else []
            given = [of_effort(field.effort), of_budget(field.budget_tokens)]
            return decided([Thinking(is_enabled=field.enabled), *words, *given])


def nested(raws: Raws) -> Thinking:
    """What an object for anything (`metadata`, `extra_body`) says of it; the rest is skipped."""
    found = [
        _lone(name, raws[name])
        for name in Controls.__struct_fields__
        if name in raws and bytes(raws[name]) != b"null"
    ]
    return decided(found)


def all_said(own: Controls, template: Raws, *others: Raws | None) -> Thinking:
    """What a whole request says. `enable_thinking` counts first, then the template's arguments,
    from which it is removed: templates have names of their own for it. `others` come last.

    Raises:
        InvalidRequest: `chat_template_kwargs.enable_thinking` is neither true nor false.
    """
    switch = Controls(enable_thinking=own.enable_thinking)
    of_template = _taken_from(template)
    return decided(
        [stated(switch), of_template, stated(own), *(nested(other or {}) for other in others)]
    )


def _taken_from(kwargs: Raws) -> Thinking:
    switch = kwargs.get("enable_thinking")
    if switch is not None and bytes(switch) not in (b"true", b"false", b"null"):
        refuse("chat_template_kwargs.enable_thinking", "must be true or false.")
    thinking = nested(kwargs)
    for name in Controls.__struct_fields__:
        kwargs.pop(name, None)
    return thinking


def _first(values: Sequence[T | None]) -> T | None:
    return next((value for value in values if value is not None), None)


def _lone(name: str, raw: msgspec.Raw) -> Thinking:
    """What one field says; nothing where it is not of its type."""
    try:
        return stated(msgspec.json.decode(msgspec.json.encode({name: raw}), type=Controls))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Thinking()
