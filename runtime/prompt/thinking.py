"""Thinking: how a request's wish becomes the switches that a model's template understands."""

from __future__ import annotations

from runtime.types import Thinking

SWITCHES = ("enable_thinking", "thinking")
EFFORT = "reasoning_effort"
OFF = frozenset({"none", "off", "disabled"})
_EFFORTS = {"minimal": "low", "xhigh": "high", "max": "high"}


_BUDGETS = {"minimal": 256, "low": 1024, "medium": 8192}


def budget_of(effort: str | None) -> int | None:
    """How many tokens of thinking an effort is worth where the template has no switch for it."""
    return None if effort is None else _BUDGETS.get(effort.lower())


def is_heeded(wish: Thinking, responds: frozenset[str], *, has_block: bool, is_open: bool) -> bool:
    """Whether a wish changes anything, or is what the model does anyway.

    `has_block` says that its thoughts have marks, `is_open` that its prompt has it think.
    """
    is_off = wish.is_enabled is False or (wish.effort is not None and wish.effort.lower() in OFF)
    if wish.is_unsaid or responds & {*SWITCHES, EFFORT}:
        return True
    if is_off:
        return not has_block
    is_bounded = wish.budget_tokens is not None or budget_of(wish.effort) is not None
    return is_open or (has_block and is_bounded)


def expects_thoughts(wish: Thinking, responds: frozenset[str], *, by_default: bool) -> bool:
    """Whether the model is known to think though its prompt opens no thoughts.

    `by_default` says that its template has it think unless it is told not to. A switch of the
    request that is on says it as well, whatever is said beside it. An effort, a budget or a choice
    left to the model says it only to a template with a switch: agents send them to every model.
    """
    if wish.is_enabled is False or (wish.effort is not None and wish.effort.lower() in OFF):
        return False
    is_on = wish.is_enabled is True or wish.effort is not None
    has_switch = bool(responds & set(SWITCHES))
    return by_default or wish.is_switched_on or (is_on and has_switch)


def switches(
    wish: Thinking, responds: frozenset[str], given: frozenset[str] = frozenset()
) -> dict[str, object]:
    """The template arguments for a wish.

    `responds` are those switches on which the template's text depends, `given` those that the
    client has set itself: an effort of its own stays, on and off follow the wish.
    """
    is_enabled, effort = wish.is_enabled, wish.effort
    if effort is not None and effort.lower() in OFF:
        is_enabled, effort = False if is_enabled is None else is_enabled, None
    chosen: dict[str, object] = {}
    if is_enabled is None and effort is not None and not given & set(SWITCHES):
        is_enabled = True
    if is_enabled is not None:
        chosen = {name: is_enabled for name in SWITCHES if name in responds}
        if not chosen and EFFORT not in responds:
            chosen = {SWITCHES[0]: is_enabled}
    if is_enabled is False and not chosen:
        effort = "low"
    if effort is not None and EFFORT not in given:
        chosen[EFFORT] = _EFFORTS.get(effort.lower(), effort)
    return chosen
