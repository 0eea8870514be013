"""Which wishes for thinking have an effect with which model, by exact values."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from runtime.prompt.thinking import expects_thoughts, is_heeded
from runtime.types import Thinking

NOTHING = frozenset[str]()
ON, OFF = Thinking.switched(True), Thinking.switched(False)
LOW = Thinking(is_enabled=True, effort="low")
BUDGET = Thinking(is_enabled=True, budget_tokens=9)


@pytest.mark.parametrize(
    ("wish", "has_block", "is_open", "heeded"),
    [
        (Thinking(), False, False, True),
        (ON, False, False, False),
        (LOW, False, False, False),
        (BUDGET, False, False, False),
        (OFF, False, False, True),
        (Thinking(effort="none"), False, False, True),
        (ON, True, False, False),
        (ON, True, True, True),
        (OFF, True, False, False),
        (LOW, True, False, True),
        (Thinking(is_enabled=True, effort="extreme"), True, False, False),
        (BUDGET, True, False, True),
    ],
)
def test_without_a_switch_only_what_can_be_bounded_or_is_so_anyway_is_heeded(
    wish: Thinking, has_block: bool, is_open: bool, heeded: bool
):
    assert is_heeded(wish, NOTHING, has_block=has_block, is_open=is_open) == heeded


@pytest.mark.parametrize("switch", ["enable_thinking", "thinking", "reasoning_effort"])
@pytest.mark.parametrize("wish", [ON, OFF, LOW, BUDGET])
def test_a_template_with_a_switch_heeds_every_wish(switch: str, wish: Thinking):
    assert is_heeded(wish, frozenset({switch}), has_block=False, is_open=False)


@pytest.mark.parametrize(
    ("wish", "without_switch", "with_switch"),
    [
        (Thinking(), False, False),
        (ON, True, True),
        (OFF, False, False),
        (Thinking(is_enabled=True, effort="none"), False, False),
        (LOW, False, True),
        (Thinking(effort="low"), False, True),
        (BUDGET, False, True),
        (replace(ON, effort="low"), True, True),
        (replace(ON, budget_tokens=9), True, True),
        (Thinking(is_enabled=True, is_adaptive=True), False, True),
    ],
)
def test_thoughts_are_expected_where_the_request_says_that_the_model_thinks(
    wish: Thinking, without_switch: bool, with_switch: bool
):
    assert expects_thoughts(wish, NOTHING, by_default=False) == without_switch
    switch = frozenset({"enable_thinking"})
    assert expects_thoughts(wish, switch, by_default=False) == with_switch


@pytest.mark.parametrize("wish", [Thinking(), ON, LOW, BUDGET, OFF])
def test_a_template_that_has_its_model_think_says_it_unless_the_request_turns_it_off(
    wish: Thinking,
):
    switch = frozenset({"thinking"})
    assert expects_thoughts(wish, switch, by_default=True) == (wish is not OFF)
