"""Turns of what was forgotten stay forgotten, however much is forgotten besides."""

from __future__ import annotations

from array import array

import pytest

from runtime.prompt.healing import Turn
from runtime.worker.turns import MAX_FORGOTTEN, TurnStore

KEY = b"k" * 16


def turn() -> Turn:
    ids = array("I", [1, 2, 3])
    return Turn(KEY, b"", 0, ids.tobytes(), ends=(3,), prefix_end=1)


@pytest.mark.parametrize("num_others", [0, 3 * MAX_FORGOTTEN])
def test_an_answer_that_began_before_its_conversation_was_forgotten_is_not_kept(num_others: int):
    turns = TurnStore()
    began = turns.age
    turns.forget("mine")
    for number in range(num_others):
        turns.forget(f"other-{number}")
    turns.put(turn(), "mine", is_durable=False, age=began)
    assert turns.find([KEY]) is None
    turns.put(turn(), "mine", is_durable=False, age=turns.age)
    assert turns.find([KEY]) is not None


def test_that_others_were_forgotten_costs_no_answer():
    turns = TurnStore()
    for number in range(2 * MAX_FORGOTTEN):
        turns.forget(f"other-{number}")
    began = turns.age
    turns.forget("another")
    turns.put(turn(), "mine", is_durable=False, age=began)
    assert turns.find([KEY]) is not None
    turns.forget(None)
    turns.put(turn(), "mine", is_durable=False, age=began)
    assert turns.find([KEY]) is None


def test_a_turn_that_goes_on_from_itself_is_not_followed():
    turns = TurnStore()
    turns.put(Turn(KEY, KEY, 3, b""), "mine", is_durable=False)
    assert turns.find([KEY]) is None
