"""When chores are due: at their cadence, whatever was missed and wherever the clock went."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from api.jobs import Every

START = datetime(2026, 1, 1, tzinfo=UTC)


def after(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def test_a_job_is_due_each_period_and_what_was_missed_is_one_run():
    every = Every(60.0)
    assert every.get_next_fire_time(None, START) == after(60)
    assert every.get_next_fire_time(START, START) == after(60)
    assert every.get_next_fire_time(START, after(59)) == after(60)
    assert every.get_next_fire_time(START, after(60)) == after(120)
    assert every.get_next_fire_time(START, after(365 * 86_400)) == after(365 * 86_400 + 60)


@given(
    every_s=st.floats(0.1, 90 * 86_400.0),
    previous_s=st.floats(-1e9, 1e9),
    now_s=st.floats(-1e9, 1e9),
)
def test_the_next_run_is_never_missed_already_and_at_most_a_period_after_what_was_before(
    every_s: float, previous_s: float, now_s: float
):
    previous, now = after(previous_s), after(now_s)
    due = Every(every_s).get_next_fire_time(previous, now)
    slack = timedelta(microseconds=2)
    assert due > now - slack
    assert due <= max(previous, now) + timedelta(seconds=every_s) + slack
