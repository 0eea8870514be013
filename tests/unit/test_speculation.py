"""When a wider step is taken, with exact values."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.worker.proposals import Proposer
from runtime.worker.speculation import (
    WIDTHS,
    Chance,
    Controller,
    Speculation,
    StepCosts,
    best_width,
)


def costs_of(plain_s: float, **widths: float) -> StepCosts:
    """One row: a plain step, and steps of `wN` tokens, seen twice each."""
    costs = StepCosts()
    for _ in range(2):
        costs.saw(1, 1, plain_s)
        for name, seconds in widths.items():
            costs.saw(1, int(name[1:]), seconds)
    return costs


def test_the_first_step_of_a_kind_is_not_believed():
    costs = StepCosts()
    costs.saw(1, 1, 9.0)
    assert costs.plain_s(1) is None
    costs.saw(1, 1, 2.0)
    assert costs.plain_s(1) == 2.0
    costs.saw(1, 1, 3.0)
    assert costs.plain_s(1) == pytest.approx(2.2)


def test_a_width_costs_what_was_measured_or_else_its_share_of_a_narrower_one():
    costs = costs_of(2.0, w4=3.0)
    assert costs.of(1, 4) == 1.5
    assert costs.of(1, 8) == 3.0
    assert costs.of(1, 16) == 6.0
    assert costs.of(1, 2) == pytest.approx(1.3)
    assert costs.of(2, 4) is None, "nothing is known of two rows"


def test_without_anything_measured_nothing_is_tried():
    costs = StepCosts()
    assert best_width(1, [Chance(15, 1.0)], lambda width: costs.of(1, width)) == 1


@pytest.mark.parametrize(
    ("rate", "num", "w4", "w8", "w16", "expected"),
    [
        (1.0, 15, 1.2, 1.5, 2.0, 16),
        (1.0, 15, 1.2, 1.5, 4.0, 8),
        (1.0, 3, 1.2, 1.5, 2.0, 4),
        (0.5, 15, 1.2, 1.5, 2.0, 4),
        (0.1, 15, 1.2, 1.5, 2.0, 1),
        (0.9, 15, 4.0, 8.0, 16.0, 2),
        (0.2, 15, 4.0, 8.0, 16.0, 1),
    ],
)
def test_the_width_that_says_most_per_second_is_taken(
    rate: float, num: int, w4: float, w8: float, w16: float, expected: int
):
    costs = costs_of(1.0, w2=1.15, w4=w4, w8=w8, w16=w16)
    assert best_width(1, [Chance(num, rate)], lambda width: costs.of(1, width)) == expected


def test_rows_that_propose_nothing_count_as_rows_that_wait():
    def cost(_: int) -> float:
        return 1.5

    assert best_width(1, [Chance(3, 0.8)], cost) == 4
    assert best_width(4, [Chance(3, 0.8)], cost) == 1
    assert best_width(4, [Chance(3, 0.8)] * 4, cost) == 4


def test_expected_tokens_are_the_geometric_sum():
    assert Chance(3, 0.5).expected(8) == pytest.approx(0.5 + 0.25 + 0.125)
    assert Chance(3, 0.5).expected(2) == pytest.approx(0.5)
    assert Chance(3, 1.0, 0.5).expected(4) == pytest.approx(1.5)


def test_who_loses_half_a_step_stops_and_may_try_again_later():
    controller = Controller()
    assert controller.may_try
    controller.settle(0, 0.5)
    assert not controller.may_try
    controller.saw_plain()
    assert controller.may_try
    controller.settle(0, 1.0)
    for _ in range(198):
        controller.saw_plain()
    assert not controller.may_try
    controller.saw_plain()
    controller.saw_plain()
    assert controller.may_try


@given(balance=st.floats(-20.0, 0.0))
def test_a_rest_is_as_long_as_the_plain_steps_that_would_have_been_needed(balance: float):
    noticed, rested = Controller(balance=balance), Controller(balance=balance)
    num_steps = 0
    while not noticed.may_try:
        noticed.saw_plain()
        num_steps += 1
    assert abs(num_steps - rested.num_rest_steps) <= 1, "but for how floats add up"
    rested.rest(rested.num_rest_steps)
    assert rested.may_try
    assert noticed.balance == pytest.approx(rested.balance, abs=0.006)


@pytest.mark.parametrize("next_id", [None, 5])
def test_a_row_that_rested_goes_on_as_one_that_took_notice(next_id: int | None):
    noticed, rested = (Speculation(Proposer([1, 2, 3, 4, 5, 6, 7, 8, 9])) for _ in range(2))
    said = [50, 60, 2, 3, 4]
    for token_id in said:
        noticed.note_said(token_id)
    if next_id is not None:
        noticed.note_next(next_id)
    rested.wake([1, 2, 3, 4, 5, 6, 7, 8, 9, *said], next_id, len(said))
    proposal = [5, 6, 7] if next_id is None else [6, 7, 8]
    assert rested.proposer.proposal() == proposal
    assert noticed.proposer.proposal()[:3] == proposal
    for one in (noticed, rested):
        one.note_said(5)
        assert one.proposer.guess == 6


def test_what_was_gained_long_ago_is_not_lost_for_long():
    controller = Controller()
    for _ in range(100):
        controller.settle(15, 1.0)
    num_tries = 0
    while controller.may_try:
        controller.settle(0, 0.5)
        num_tries += 1
    assert num_tries == 8


@given(lost=st.lists(st.floats(0.0, 1.5), max_size=300), num_plain=st.integers(0, 2000))
def test_who_never_gains_loses_little(lost: list[float], num_plain: int):
    """At most the credit, one step's loss, and a two hundredth of the plain steps."""
    controller, total = Controller(), 0.0
    for number, one in enumerate(lost):
        for _ in range(num_plain // max(1, len(lost))):
            controller.saw_plain()
        if controller.may_try:
            controller.settle(0, one)
            total += one
        assert total <= 0.5 + 1.5 + (number + 1) * (num_plain // max(1, len(lost))) * 0.005 + 1e-6


def test_plain_steps_test_guesses_for_nothing():
    row = Speculation(Proposer([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3]))
    before = row.controller.rate
    row.note_said(4)
    row.note_said(5)
    assert row.controller.rate > before
    row.note_said(99)
    assert row.chance is None


def test_a_token_that_is_known_early_is_noted_once():
    row = Speculation(Proposer([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2]))
    row.note_next(3)
    row.note_next(3)
    assert row.chance == Chance(3, row.controller.rate, 1.0)
    row.note_said(3)
    assert row.proposer.proposal() == [4, 5, 6]
    assert row.chance == Chance(3, row.controller.rate, row.controller.rate)


def test_widths_leave_room_for_the_longest_proposal():
    assert best_width(1, [Chance(15, 1.0)], lambda _: 1.0) == WIDTHS[-1] == 16
