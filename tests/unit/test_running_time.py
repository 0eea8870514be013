"""Time in which this process did not run is none."""

from __future__ import annotations

import asyncio

import pytest

from runtime.running_time import RunningTime
from runtime.supervisor.running_time import LoopTime, RunningTimeout


class Hands:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.s = 100.0

    def __call__(self) -> float:
        return self.s


async def test_what_passes_between_two_looks_counts_unless_it_is_a_stall():
    hands = Hands()
    clock = LoopTime(hands)
    seen: list[float] = []
    for later_s in (0.0, 0.5, 1.9, 2.0, 3600.0, 1.0):
        hands.s += later_s
        seen.append(clock.now_s())
    assert seen == [100.0, 100.5, 102.4, 102.4, 102.4, 103.4]


def test_without_a_loop_nobody_looks_and_all_of_it_counts():
    hands = Hands()
    clock = LoopTime(hands)
    hands.s += 3600.0
    assert clock.now_s() == 3700.0


async def test_it_looks_by_itself_while_the_loop_runs():
    hands = Hands()
    clock = LoopTime(hands)
    clock.now_s()
    loop = asyncio.get_running_loop()
    ticked = loop.create_future()
    hands.s += 1.5
    loop.call_later(0.75, ticked.set_result, None)
    await ticked
    hands.s += 1.5
    assert clock.now_s() == 103.0


async def test_a_limit_ends_what_waits_and_nothing_that_is_done():
    async with RunningTimeout(None), RunningTimeout(60.0):
        pass
    for limit_s in (0.0, 0.01):
        with pytest.raises(TimeoutError):
            async with RunningTimeout(limit_s):
                await asyncio.Event().wait()


async def test_what_a_limit_is_lifted_of_may_take_longer():
    for _ in range(2):
        async with RunningTimeout(0.01) as limit:
            limit.lift()
            await asyncio.sleep(0.02)
        assert not limit.expired()


def test_a_time_without_a_loop_leaves_out_gaps_as_well():
    hands = Hands()
    time = RunningTime(hands)
    seen: list[float] = []
    for later_s in (1.9, 2.0, 3600.0, 1.0):
        hands.s += later_s
        seen.append(time.look())
    assert seen == [101.9, 101.9, 101.9, 102.9]
