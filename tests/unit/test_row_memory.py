"""Who may decode beside whom, in rows and in bytes: nobody starves, and nothing holds too much."""

from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from runtime.worker.row_memory import (
    ANSWER_RESERVE_TOKENS,
    RowFootprint,
    RowMemory,
    RowUse,
    bucket_of,
    reserved_tokens,
    steps_to_growth,
)
from runtime.worker.scheduler import Scheduler
from runtime.worker.sequence import Sequence, SequenceGroup
from tests.unit.test_scheduler import carry_out, new_group, new_scheduler, slice_of

ONE = RowFootprint(per_token=1)


def test_a_row_takes_its_tokens_windows_and_state_in_whole_steps_of_growth():
    footprint = RowFootprint(per_token=10, windows=((3, 500), (1, 100)), fixed=7)
    assert footprint.of(0) == 7
    assert footprint.of(1) == footprint.of(256) == 2560 + 768 + 100 + 7
    assert footprint.of(1000) == 10_240 + 1500 + 100 + 7


def test_a_row_that_is_quantised_on_its_way_takes_the_most_of_before_and_after():
    footprint = RowFootprint(per_token=8, fixed=7, kv_start=512, late_per_token=3)
    assert footprint.of(256) == 8 * 256 + 7
    assert footprint.of(512) == footprint.of(1280) == 8 * 512 + 7
    assert footprint.of(1281) == 3 * 1536 + 7
    assert RowFootprint(per_token=8, kv_start=16, late_per_token=3).of(20) == 8 * 256


def test_rows_share_a_batch_until_they_are_quantised():
    memory = RowMemory(footprint=RowFootprint(kv_start=512))
    assert [memory.batch_of(100, n) for n in (100, 511, 512)] == [0, 0, None]
    assert [RowMemory().batch_of(n, n) for n in (100, 5000)] == [0, 1]
    assert RowMemory(is_batched=False).batch_of(100, 100) is None


def test_rows_of_a_batch_take_as_much_as_the_longest():
    memory = RowMemory(footprint=ONE)
    assert memory.held([]) == 0
    assert memory.held([RowUse(0, 256), RowUse(0, 1024), RowUse(1, 512), RowUse(None, 256)]) == 2816
    assert [bucket_of(n) for n in (1, 4096, 4097, 16384, 16385, 65536, 65537)] == [
        0,
        0,
        1,
        1,
        2,
        2,
        3,
    ]


def test_an_answer_is_counted_with_what_it_may_say_up_to_a_reserve_and_then_as_it_grows():
    assert reserved_tokens(100, 0, 8) == 108
    assert reserved_tokens(100, 0, 100_000) == 100 + ANSWER_RESERVE_TOKENS
    assert reserved_tokens(100, ANSWER_RESERVE_TOKENS, 100_000) == 1380
    assert reserved_tokens(100, 4000, 4010) == 4110


@given(st.integers(1, 5000), st.integers(0, 5000), st.integers(1, 5000))
def test_a_row_takes_the_same_until_the_step_at_which_it_may_grow(
    num_tokens: int, num_said: int, max_said: int
):
    footprint = RowFootprint(per_token=10, windows=((3, 500),), fixed=7)

    def taken(said: int) -> int:
        return footprint.of(reserved_tokens(num_tokens, said, max_said))

    num_steps = steps_to_growth(num_tokens, num_said, max_said)
    assert {taken(num_said + step) for step in range(num_steps + 1)} == {taken(num_said)}


def test_a_row_that_grows_takes_more_after_at_most_one_growth():
    assert steps_to_growth(100, 0, 100_000) == 768 + 156
    assert steps_to_growth(100, 2000, 100_000) == 204


def test_what_fits_beside_others_fits_to_the_byte_and_alone_everything_does():
    memory = RowMemory(footprint=ONE, pool_bytes=1024)
    assert memory.fits([RowUse(None, 512)], [RowUse(None, 512)])
    assert not memory.fits([RowUse(None, 512)], [RowUse(None, 513)])
    assert memory.fits([], [RowUse(None, 5000)])
    assert memory.left([RowUse(None, 512)]) == 512
    assert memory.left([RowUse(None, 5000)]) == 0
    assert RowMemory(footprint=ONE).left([RowUse(None, 5000)]) is None


def test_beside_17_rows_of_32_a_wide_request_leaves_a_row_to_a_small_one():
    scheduler = new_scheduler(max_batch=32)
    wide, small = new_group(10, num_choices=16, name="wide"), new_group(10, name="small")
    scheduler.add(wide)
    carry_out(scheduler, scheduler.plan(17))
    scheduler.add(small)
    plan = scheduler.plan(17)
    assert slice_of(scheduler, plan)[0] is small
    assert plan.joining == tuple(wide.sequences[:14])
    carry_out(scheduler, plan)
    assert scheduler.plan(31).joining == (small.sequences[0],)
    assert scheduler.plan(30).joining == tuple(wide.sequences[14:])


def test_every_ninth_row_goes_to_a_choice_that_others_passed():
    scheduler = new_scheduler(max_batch=2)
    wide = new_group(10, num_choices=3, name="wide")
    scheduler.add(wide)
    carry_out(scheduler, scheduler.plan(1))
    order: list[str] = []
    assert scheduler.plan(1).joining == (wide.sequences[0],)
    for number in range(20):
        scheduler.add(new_group(10, name=str(number)))
        while not (plan := scheduler.plan(1)).joining:
            carry_out(scheduler, plan)
        order += [one.group.request.request_id for one in plan.joining]
    assert order.index("wide") == 8
    assert order.count("wide") == 2


def test_what_needs_much_memory_is_passed_by_eight_and_then_waited_for():
    scheduler = new_scheduler(max_batch=32, max_slice=16_384)
    scheduler.memory = RowMemory(footprint=ONE, pool_bytes=10_240)
    running = of_rows(new_group(1000))
    scheduler.add(new_group(9500, name="large"))
    begun: list[str] = []
    for number in range(12):
        scheduler.add(new_group(10, name=str(number)))
        plan = scheduler.plan(len(running), running)
        if plan.prefill is not None:
            begun.append(plan.prefill.request.request_id)
            carry_out(scheduler, plan)
    assert begun == list("01234567")
    assert slice_of(scheduler, scheduler.plan(0))[0].request.request_id == "large"


def of_rows(group: SequenceGroup) -> list[Sequence]:
    return list(group.sequences)


def test_who_said_least_makes_way_when_answers_grow_beyond_the_memory():
    scheduler = new_scheduler(max_batch=4)
    scheduler.memory = RowMemory(footprint=ONE, pool_bytes=4096)
    groups = [new_group(1000, name=name) for name in "ab"]
    for group in groups:
        group.max_tokens = 3000
    rows = [group.sequences[0] for group in groups]
    rows[0].output_token_ids = [0] * 1100
    assert scheduler.plan(2, rows).leaving == (rows[1],)
    assert scheduler.plan(1, rows[:1]).leaving == ()


@dataclass
class Served:
    """A plain model of an engine: rows end after what they are to say, one token a step."""

    scheduler: Scheduler
    max_batch: int
    running: list[Sequence] = field(default_factory=list)
    left: dict[Sequence, int] = field(default_factory=dict)
    ended: set[Sequence] = field(default_factory=set)
    claims: dict[SequenceGroup, int] = field(default_factory=dict)

    def step(self) -> None:
        scheduler, pool = self.scheduler, self.scheduler.memory.pool_bytes
        plan = scheduler.plan(len(self.running), self.running)
        assert not plan.leaving
        self.running += plan.joining
        assert len(self.running) <= self.max_batch
        assert plan.num_running == len(self.running)
        if plan.prefill is not None:
            carry_out(scheduler, plan, seconds=0.0, num_running=len(self.running))
        if pool is not None:
            held = scheduler.left_bytes(self.running)
            assert held is not None
            assert held >= 0
            assert not scheduler.memory.is_over(map(scheduler.row_of, self.running))
        for one in list(self.running):
            one.output_token_ids.append(0)
            if one.num_output_tokens >= self.left[one]:
                self.running.remove(one)
                self.ended.add(one)


asked = st.lists(
    st.tuples(st.integers(1, 900), st.integers(1, 6), st.integers(1, 12), st.booleans()),
    min_size=1,
    max_size=12,
)


# The prompts that several hold for their other choices leave no room for the oldest one's next.
held_by_many = [
    *[(512, 4, 2, True), (321, 1, 4, True), (146, 4, 10, True), (110, 1, 10, False)],
    *[(28, 2, 7, False), (106, 3, 12, False), (512, 6, 10, True), (108, 1, 12, False)],
    *[(186, 4, 12, False), (288, 2, 1, False), (1, 1, 1, False), (1, 1, 1, False)],
]


@settings(deadline=None)
@example(asks=held_by_many, max_batch=1, pool=1755)
@given(asks=asked, max_batch=st.integers(1, 5), pool=st.one_of(st.none(), st.integers(0, 6000)))
def test_all_are_served_within_rows_and_memory_in_whatever_order_they_come(
    asks: list[tuple[int, int, int, bool]], max_batch: int, pool: int | None
):
    scheduler = new_scheduler(max_batch=max_batch, max_slice=256)
    scheduler.memory = RowMemory(footprint=ONE, pool_bytes=pool, most_bytes=pool)
    served = Served(scheduler, max_batch)
    admitted: list[SequenceGroup] = []
    for num_tokens, width, num_said, waits in asks:
        group = new_group(num_tokens, num_choices=width)
        group.max_tokens = num_said
        if pool is not None and scheduler.needs_bytes(group) > pool:
            continue
        admitted.append(group)
        served.left |= dict.fromkeys(group.sequences, num_said)
        scheduler.add(group)
        if waits:
            served.step()
    for _ in range(3000):
        if not scheduler.has_work and not served.running:
            break
        served.step()
    assert served.ended == {one for group in admitted for one in group.sequences}


@settings(deadline=None)
@given(
    widths=st.lists(st.integers(1, 8), max_size=6),
    num_steps=st.integers(0, 30),
    max_batch=st.integers(1, 8),
)
def test_with_a_free_row_a_small_request_waits_for_one_slice_at_most(
    widths: list[int], num_steps: int, max_batch: int
):
    scheduler = new_scheduler(max_batch=max_batch)
    served = Served(scheduler, max_batch)
    for width in widths:
        group = new_group(300, num_choices=width, name="wide")
        served.left |= dict.fromkeys(group.sequences, 20)
        scheduler.add(group)
    for _ in range(num_steps):
        served.step()
    if scheduler.waiting or len(served.running) >= max_batch:
        return
    small = new_group(100, name="small")
    served.left[small.sequences[0]] = 1
    scheduler.add(small)
    plan = scheduler.plan(len(served.running), served.running)
    if plan.prefill is None:  # it was the turn of one that others passed
        assert plan.joining
        assert len(served.running) + len(plan.joining) == max_batch
    else:
        assert slice_of(scheduler, plan)[0] is small


@pytest.mark.parametrize("width", [1, 16])
def test_a_wide_request_needs_memory_for_one_choice_at_a_time(width: int):
    scheduler = new_scheduler()
    scheduler.memory = RowMemory(footprint=ONE)
    group = new_group(1000, num_choices=width)
    group.request = msgspec.structs.replace(group.request, num_choices=width)
    assert scheduler.needs_bytes(group) == (1024 if width == 1 else 2048)


def test_the_hot_tier_makes_room_for_a_prompt_before_it_is_taken_up():
    scheduler = new_scheduler(max_batch=4)
    scheduler.memory = RowMemory(footprint=ONE, pool_bytes=10_240)
    group = new_group(1000)
    scheduler.add(group)
    claimed = scheduler.needs_bytes(group)
    assert scheduler.left_bytes([]) == 10_240
    assert scheduler.left_bytes([], [group]) == 10_240 - claimed
    group.num_computed_tokens = 10
    assert scheduler.left_bytes([], [group]) == scheduler.left_bytes([]) == 10_240 - claimed


def test_caches_have_room_beside_a_hot_tier_to_the_byte():
    memory = RowMemory(footprint=RowFootprint(per_token=2), pool_bytes=1124)
    assert memory.has_beside(100, 512)
    assert not memory.has_beside(101, 512)
    memory.pool_bytes = None
    assert memory.has_beside(1 << 40, 512)
