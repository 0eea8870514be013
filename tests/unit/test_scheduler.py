"""What the next engine step does: whose slice, how long, and decode in between."""

from dataclasses import dataclass
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from runtime.types import CacheUse, GenerateRequest, Priority, TokenPrompt
from runtime.worker.output.detokenizer import PlainDetokenizer
from runtime.worker.output.parser import Dialect, OutputParser
from runtime.worker.prompt_logprobs import MAX_LOGITS, Echo
from runtime.worker.row_memory import RowFootprint, RowMemory, reserved_tokens
from runtime.worker.scheduler import SLICE_GRID, PrefillSlice, Scheduler, StepPlan
from runtime.worker.sequence import Sequence, SequenceGroup
from runtime.worker.vision.images import ImageBatch
from store.types import MediaSpan


class NoTokenizer:
    def decode(self, token_ids: list[int]) -> str:
        return ""

    def detokenizer(self, context: object) -> PlainDetokenizer:
        return PlainDetokenizer(self)

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        return "", b""


def new_group(num_tokens: int, *, num_choices: int = 1, name: str = "r") -> SequenceGroup:
    token_ids = [0] * num_tokens
    request = GenerateRequest(
        request_id=name, model="m", prompt=TokenPrompt(token_ids=()), num_choices=num_choices
    )
    group = SequenceGroup(
        request=request,
        token_ids=token_ids,
        num_prompt_tokens=num_tokens,
        max_tokens=8,
        deadline_s=1e9,
    )
    group.sequences = [
        Sequence(
            group=group,
            index=index,
            output=OutputParser(Dialect(), index=index),
            detokenizer=PlainDetokenizer(NoTokenizer()),
        )
        for index in range(num_choices)
    ]
    return group


def new_scheduler(
    *,
    max_batch: int = 4,
    max_slice: int = 2048,
    block_s: float = 0.25,
    memory: RowMemory | None = None,
    joins_prompts: bool = False,
) -> Scheduler:
    return Scheduler(
        max_batch=max_batch,
        max_slice=max_slice,
        block_s=block_s,
        memory=memory,
        joins_prompts=joins_prompts,
    )


def scored(num_tokens: int, vocab_size: int) -> SequenceGroup:
    group = new_group(num_tokens)
    group.echo = Echo(NoTokenizer(), group.token_ids, None, num_top=1, vocab_size=vocab_size)
    return group


def test_on_a_slow_device_a_slice_stays_far_below_what_counts_as_a_hang() -> None:
    scheduler, group = new_scheduler(), new_group(10_000)
    scheduler.add(group)
    first = scheduler.plan(0)
    carry_out(scheduler, first, seconds=50.0)  # 2,048 tokens at 41 a second
    assert slice_of(scheduler, scheduler.plan(0)) == (group, 2048, 2048 + 384)


def slice_of(scheduler: Scheduler, plan: StepPlan) -> tuple[SequenceGroup, int, int]:
    assert plan.prefill is not None
    cut = scheduler.next_slice(plan.prefill, plan.num_running)
    return cut.group, cut.start, cut.end


def carry_out(
    scheduler: Scheduler,
    plan: StepPlan,
    *,
    seconds: float = 0.1,
    num_running: int = 0,
    joins: bool = True,
) -> None:
    assert plan.prefill is not None
    group, done = plan.prefill, scheduler.next_slice(plan.prefill, plan.num_running)
    group.num_computed_tokens = done.end
    scheduler.on_prefill(done, seconds, num_running)
    if group.num_remaining_tokens:
        return
    if joins:
        scheduler.on_computed(group)
    else:
        scheduler.remove(group)


def test_nothing_to_do():
    scheduler = new_scheduler()
    assert scheduler.plan(0) == StepPlan(None, 0)
    assert scheduler.plan(3) == StepPlan(None, 3)


def test_a_short_prompt_is_one_slice_that_leaves_its_last_token():
    scheduler = new_scheduler()
    group = new_group(100)
    scheduler.add(group)
    assert slice_of(scheduler, scheduler.plan(0)) == (group, 0, 99)
    assert scheduler.plan(0).num_running == 0


def test_a_prompt_of_one_token_is_an_empty_slice():
    scheduler = new_scheduler()
    group = new_group(1)
    scheduler.add(group)
    assert slice_of(scheduler, scheduler.plan(0)) == (group, 0, 0)


def test_a_long_prompt_alone_goes_in_slices_of_the_largest_size():
    scheduler = new_scheduler(max_slice=256)
    group = new_group(600)
    scheduler.add(group)
    slices: list[tuple[int, int]] = []
    while scheduler.waiting:
        plan = scheduler.plan(0)
        slices.append(slice_of(scheduler, plan)[1:])
        carry_out(scheduler, plan)
    assert slices == [(0, 256), (256, 512), (512, 599)]


def test_the_largest_slice_is_rounded_to_the_grid():
    scheduler = new_scheduler(max_slice=100)
    scheduler.add(new_group(200))
    assert slice_of(scheduler, scheduler.plan(0))[1:] == (0, 96)
    scheduler = new_scheduler(max_slice=1)
    scheduler.add(new_group(200))
    assert slice_of(scheduler, scheduler.plan(0))[1:] == (0, SLICE_GRID)


def test_the_first_slice_beside_running_streams_is_careful():
    scheduler = new_scheduler()
    scheduler.add(new_group(5000))
    assert slice_of(scheduler, scheduler.plan(1))[1:] == (0, 256)


def test_a_slice_beside_running_streams_takes_the_time_it_may():
    scheduler = new_scheduler(block_s=0.25)
    group = new_group(5000)
    scheduler.add(group)
    scheduler.on_decode(0.05)
    carry_out(scheduler, scheduler.plan(1), seconds=0.256, num_running=1)  # 1000 tokens/s
    scheduler.on_decode(0.05)
    scheduler.on_decode(0.30)
    # The step time is now 0.05 · 0.8 + 0.3 · 0.2 = 0.1 s: 1000 · (0.25 + 2 · 0.1) = 450 tokens.
    assert slice_of(scheduler, scheduler.plan(1))[1:] == (256, 704)


def test_a_slow_model_still_gets_one_grid_cell_per_slice():
    scheduler = new_scheduler(block_s=0.0)
    scheduler.add(new_group(5000))
    carry_out(scheduler, scheduler.plan(1), seconds=100.0, num_running=1)
    scheduler.on_decode(125.0)
    scheduler.on_decode(0.001)
    for _ in range(100):
        scheduler.on_decode(0.001)
    assert slice_of(scheduler, scheduler.plan(1))[1:] == (256, 288)


def test_after_a_slice_decode_gets_a_quarter_more_time_than_it_took():
    scheduler = new_scheduler()
    scheduler.add(new_group(5000))
    carry_out(scheduler, scheduler.plan(2), seconds=0.25, num_running=2)
    for _ in range(5):
        assert scheduler.plan(2) == StepPlan(None, 2)
        scheduler.on_decode(0.0625)
    assert scheduler.plan(2).prefill
    assert scheduler.plan(2).num_running == 2


def test_short_prompts_do_not_each_wait_for_a_step_that_takes_longer_than_they():
    scheduler = new_scheduler(max_batch=64)
    for number in range(32):
        scheduler.add(new_group(17, name=str(number)))
    order = ""
    while scheduler.waiting:
        plan = scheduler.plan(32)
        if plan.prefill is None:
            scheduler.on_decode(0.05)
            order += "d"
        else:
            carry_out(scheduler, plan, seconds=0.015625, num_running=32, joins=False)
            order += "p"
    # 32 slices of a 64th of a second and what decode gets for them, 13 steps of a 20th.
    assert order.startswith("pdppdpppdppdpppd")
    assert (order.count("p"), order.count("d")) == (32, 13)


@given(
    times=st.lists(st.tuples(st.floats(0.001, 0.3), st.floats(0.001, 0.3)), min_size=1),
)
def test_decode_gets_its_share_whatever_slices_and_steps_take(times: list[tuple[float, float]]):
    scheduler = new_scheduler(block_s=0.0)
    scheduler.add(new_group(10**6))
    prefill_s = decode_s = pause_s = most_pause_s = 0.0
    longest_step_s = longest_slice_s = 0.0
    for slice_s, step_s in times:
        plan = scheduler.plan(1)
        if plan.prefill is None:
            scheduler.on_decode(step_s)
            decode_s, pause_s = decode_s + step_s, 0.0
            longest_step_s = max(longest_step_s, step_s)
            continue
        carry_out(scheduler, plan, seconds=slice_s, num_running=1)
        prefill_s, pause_s = prefill_s + slice_s, pause_s + slice_s
        longest_slice_s = max(longest_slice_s, slice_s)
        most_pause_s = max(most_pause_s, pause_s)
        # All but the last slice has been paid for, whatever decode was ahead by.
        assert decode_s >= 1.25 * (prefill_s - slice_s) - 1e-9
    # Streams pause for one slice, and for what their last step has made others wait.
    assert most_pause_s <= longest_slice_s + longest_step_s / 1.25 + 1e-9


def test_a_slice_while_nobody_decodes_owes_nothing():
    scheduler = new_scheduler()
    scheduler.add(new_group(5000))
    carry_out(scheduler, scheduler.plan(0), seconds=10.0)
    assert scheduler.plan(1).prefill


def test_owed_decode_time_does_not_stop_prefill_when_nobody_decodes_any_more():
    scheduler = new_scheduler()
    scheduler.add(new_group(5000))
    carry_out(scheduler, scheduler.plan(1), seconds=10.0, num_running=1)
    assert scheduler.plan(1).prefill is None
    assert scheduler.plan(0).prefill


def test_first_come_first_served_among_equals():
    scheduler = new_scheduler()
    first, second = new_group(10, name="1"), new_group(10, name="2")
    scheduler.add(first)
    scheduler.add(second)
    assert scheduler.waiting == (first, second)
    assert slice_of(scheduler, scheduler.plan(0))[0] is first
    scheduler.remove(first)
    assert slice_of(scheduler, scheduler.plan(0))[0] is second


def served_in_order(scheduler: Scheduler) -> list[str]:
    """Whose slices are computed while nobody arrives or decodes."""
    order: list[str] = []
    while scheduler.waiting:
        plan = scheduler.plan(0)
        order.append(slice_of(scheduler, plan)[0].request.request_id)
        carry_out(scheduler, plan, joins=False)
    return order


def test_short_prompts_go_before_a_long_one_that_was_there_first():
    scheduler = new_scheduler(max_slice=64)
    long, shorts = new_group(1000, name="long"), [new_group(10, name=str(i)) for i in range(3)]
    for group in [long, *shorts]:
        scheduler.add(group)
    assert served_in_order(scheduler) == ["0", "1", "2"] + 16 * ["long"]


def test_a_prompt_of_several_slices_overtakes_one_that_lacks_more():
    scheduler = new_scheduler(max_slice=64)
    scheduler.add(new_group(1281, name="20k"))
    carry_out(scheduler, scheduler.plan(0))
    scheduler.add(new_group(129, name="2k"))
    assert served_in_order(scheduler) == 2 * ["2k"] + 19 * ["20k"]


def test_what_lacks_less_goes_on_when_another_one_arrives():
    scheduler = new_scheduler(max_slice=64)
    scheduler.add(new_group(193, name="first"))
    carry_out(scheduler, scheduler.plan(0))
    scheduler.add(new_group(193, name="second"))
    assert served_in_order(scheduler) == 2 * ["first"] + 3 * ["second"]


def test_of_four_tokens_one_is_computed_of_the_oldest_prompt_that_is_passed():
    scheduler = new_scheduler(max_slice=64)
    scheduler.add(new_group(6401, name="old"))
    scheduler.add(new_group(641, name="long"))
    scheduler.add(new_group(257, name="short"))
    order = served_in_order(scheduler)
    assert order[:5] == 3 * ["short"] + ["old", "short"]
    assert order[5:18] == 2 * ["long"] + ["old"] + 2 * [*3 * ["long"], "old"] + 2 * ["long"]


def test_what_is_kept_of_a_prompt_does_not_count():
    scheduler = new_scheduler(max_slice=64)
    known = new_group(10_000, name="known")
    known.cursor.use = CacheUse(tier="hot", num_tokens=9990)
    assert known.num_lacking_tokens == 9
    scheduler.add(new_group(200, name="new"))
    scheduler.add(known)
    assert slice_of(scheduler, scheduler.plan(0))[0] is known


@dataclass
class Passage:
    """A prompt on its way, in tokens of work: since when, and what was computed meanwhile."""

    group: SequenceGroup
    size: int
    since: int
    own_or_shorter: int = 0
    longer: int = 0
    as_oldest: int = 0
    """What was computed of others since it is the oldest."""


def played(arrivals: list[tuple[int, int]], max_slice: int) -> list[Passage]:
    """Prompts that arrive after so much work, with so many tokens to compute, until all are."""
    scheduler = new_scheduler(max_slice=max_slice)
    coming, there, gone, now = sorted(arrivals), list[Passage](), list[Passage](), 0
    while coming or there:
        if not there:
            now = max(now, coming[0][0])
        while coming and coming[0][0] <= now:
            since, size = coming.pop(0)
            there.append(Passage(new_group(size + 1), size, since))
            scheduler.add(there[-1].group)
        plan = scheduler.plan(0)
        group, start, end = slice_of(scheduler, plan)
        lacks = group.num_remaining_tokens
        for one in there:
            if lacks > one.group.num_remaining_tokens:
                one.longer += end - start
            else:
                one.own_or_shorter += end - start
            if one is there[0] and one.group is not group:
                one.as_oldest += end - start
        carry_out(scheduler, plan, joins=False)
        now += end - start
        gone += [one for one in there if not one.group.num_remaining_tokens]
        there = [one for one in there if one.group.num_remaining_tokens]
    return gone


crowds = st.lists(st.tuples(st.integers(0, 20_000), st.integers(1, 6000)), min_size=1, max_size=25)


@given(crowds, st.sampled_from([32, 256, 1024]))
def test_longer_prompts_take_a_quarter_of_the_time_and_no_prompt_starves(
    arrivals: list[tuple[int, int]], max_slice: int
):
    """The invariants by which nobody waits three times as long as alone because of longer ones."""
    done = played(arrivals, max_slice)
    assert sorted(one.size for one in done) == sorted(size for _, size in arrivals)
    for one in done:
        assert one.longer <= one.own_or_shorter / 3 + 2 * max_slice
        assert one.as_oldest <= 3 * one.size + 4 * max_slice


@given(
    st.lists(st.integers(6000, 60_000), min_size=1, max_size=6),
    st.integers(1, 5999),
    st.integers(0, 20_000),
)
def test_a_prompt_behind_longer_ones_takes_at_most_three_times_as_long_as_alone(
    longer: list[int], size: int, since: int
):
    max_slice = 512
    done = played([*((0, one) for one in longer), (since, size)], max_slice)
    mine = next(one for one in done if one.size == size)
    # A slice that has begun is finished, and one of an older prompt may be due.
    assert mine.own_or_shorter + mine.longer <= max(3 * size, size + 2 * max_slice)


@given(crowds, st.sampled_from([256, 1024]))
def test_prompts_are_cut_as_if_each_were_alone(arrivals: list[tuple[int, int]], max_slice: int):
    """No order costs more work than another: taking turns adds no slice and no token."""
    scheduler = new_scheduler(max_slice=max_slice)
    groups = [new_group(size + 1) for _, size in arrivals]
    for group in groups:
        scheduler.add(group)
    sizes = [size for _, size in arrivals]
    assert len(served_in_order(scheduler)) == sum(-(-size // max_slice) for size in sizes)


def test_nobody_joins_a_full_batch():
    scheduler = new_scheduler(max_batch=4)
    group = new_group(10)
    scheduler.add(group)
    assert scheduler.plan(4) == StepPlan(None, 4)
    assert slice_of(scheduler, scheduler.plan(3))[0] is group


def test_a_wide_group_begins_with_the_rows_there_are():
    scheduler = new_scheduler(max_batch=4)
    wide = new_group(10, num_choices=9)
    scheduler.add(wide)
    assert slice_of(scheduler, scheduler.plan(3))[0] is wide
    scheduler.on_computed(wide)
    assert scheduler.plan(3).joining == tuple(wide.sequences[:1])
    assert scheduler.plan(4).joining == ()
    assert scheduler.plan(1).joining == tuple(wide.sequences[1:4])


def test_groups_that_lost_their_kv_come_first_in_their_order():
    scheduler = new_scheduler()
    waiting, lost, lost_too = (new_group(10, name=name) for name in "abc")
    scheduler.add(waiting)
    scheduler.add_first([lost, lost_too])
    assert scheduler.waiting == (lost, lost_too, waiting)


def test_removing_a_stranger_is_no_error():
    scheduler = new_scheduler()
    scheduler.add(new_group(10))
    scheduler.remove(new_group(10))
    assert len(scheduler.waiting) == 1


@given(
    prompts=st.lists(st.tuples(st.integers(1, 700), st.integers(1, 5)), min_size=1, max_size=6),
    max_slice=st.integers(1, 300),
    max_batch=st.integers(1, 4),
    data=st.data(),
)
def test_every_prompt_is_computed_once_on_the_grid_and_every_group_gets_its_turn(
    prompts: list[tuple[int, int]], max_slice: int, max_batch: int, data: st.DataObject
):
    scheduler = new_scheduler(max_batch=max_batch, max_slice=max_slice)
    groups = [new_group(tokens, num_choices=width) for tokens, width in prompts]
    for group in groups:
        scheduler.add(group)
    running: list[Sequence] = []
    for number in range(2000):
        plan = scheduler.plan(len(running), running)
        running += plan.joining
        assert len(running) <= max_batch
        assert plan.num_running == len(running)
        num_running = len(running)
        if plan.prefill is not None:
            group, start, end = slice_of(scheduler, plan)
            assert start == group.num_computed_tokens
            assert start % SLICE_GRID == 0
            assert end % SLICE_GRID == 0 or end == group.num_prefill_tokens
            assert start < end or group.num_prefill_tokens == 0
            assert num_running < max_batch
            seconds = data.draw(st.sampled_from([0.0, 1e-6, 0.01, 0.5]))
            carry_out(scheduler, plan, seconds=seconds, num_running=num_running)
        if num_running:
            scheduler.on_decode(0.2)
            # Rows end sooner or later: a full batch of endless ones begins nothing.
            if number % 20 == 19 or data.draw(st.booleans()):
                running.pop(0)
        if not scheduler.has_work:
            break
    assert all(not group.num_remaining_tokens for group in groups)


def warming_group(num_tokens: int) -> SequenceGroup:
    group = new_group(num_tokens, name="w")
    request = msgspec.structs.replace(group.request, work="prefill", priority="background")
    group.request = request
    return group


def test_a_request_overtakes_what_warms_the_cache_after_one_slice():
    scheduler = new_scheduler()
    warming = warming_group(100_000)
    scheduler.add(warming)
    carry_out(scheduler, scheduler.plan(0))
    scheduler.add(request := new_group(50_000))
    while request.num_remaining_tokens:
        assert slice_of(scheduler, scheduler.plan(0))[0] is request
        carry_out(scheduler, scheduler.plan(0))
    scheduler.remove(request)
    assert slice_of(scheduler, scheduler.plan(0)) == (warming, 2048, 4096)


def test_nothing_is_warmed_while_somebody_decodes():
    scheduler = new_scheduler()
    scheduler.add(warming_group(10_000))
    assert scheduler.plan(1) == StepPlan(None, 1)
    assert slice_of(scheduler, scheduler.plan(0))[1:] == (0, 2048)


def foreseen_group(num_tokens: int, writer: str) -> SequenceGroup:
    group = warming_group(num_tokens)
    group.request = msgspec.structs.replace(group.request, written_by=writer)
    return group


def test_what_goes_on_from_an_answer_is_computed_beside_it_in_small_slices_for_less_than_half():
    scheduler = new_scheduler(block_s=0.25)
    scheduler.add(foreseen := foreseen_group(10_000, "summary"))
    running = new_group(10, name="summary").sequences
    scheduler.on_decode(0.05)
    plan = scheduler.plan(1, running)
    assert slice_of(scheduler, plan) == (foreseen, 0, 256)
    carry_out(scheduler, plan, seconds=0.256, num_running=1)
    # At 1,000 tokens a second: what decode may wait for, and two of its steps.
    num_steps = 0
    while (plan := scheduler.plan(1, running)).prefill is None:
        scheduler.on_decode(0.05)
        num_steps += 1
    assert num_steps == 6  # 1.25 x 0.256 s, of which decode had one step before
    assert slice_of(scheduler, plan) == (foreseen, 256, 576)


def test_it_needs_no_row_and_waits_for_whoever_else_decodes_waits_or_is_about_to_begin():
    summary = new_group(10, name="summary").sequences
    others = new_group(10, name="other").sequences

    def planned(*waiting: SequenceGroup, running: list[Sequence], max_batch: int = 1):
        scheduler = new_scheduler(max_batch=max_batch)
        for group in (foreseen_group(10_000, "summary"), *waiting):
            scheduler.add(group)
        return scheduler.plan(len(running), running).prefill

    assert planned(running=summary) is not None
    assert planned(running=others, max_batch=4) is None
    assert planned(running=[*summary, *others], max_batch=4) is None
    waiting = new_group(500, name="waits")
    assert planned(waiting, running=summary) is None
    assert planned(waiting, running=summary, max_batch=4) is waiting
    scheduler = new_scheduler(max_batch=1)
    scheduler.add(foreseen_group(10_000, "summary"))
    scheduler.add(waiting)
    scheduler.on_computed(waiting)
    assert scheduler.plan(1, summary).prefill is None


@given(
    st.lists(st.sampled_from(["step", "come", "go"]), min_size=1, max_size=40),
    st.integers(min_value=1, max_value=3),
)
def test_nobody_ever_has_a_slice_of_it_before_his_own(events: list[str], max_batch: int):
    """It is computed only while nobody but its own writer is there, whoever comes and goes."""
    scheduler = new_scheduler(max_batch=max_batch)
    scheduler.add(foreseen := foreseen_group(100_000, "summary"))
    running, waiting = list(new_group(10, name="summary").sequences), list[SequenceGroup]()
    for number, event in enumerate(events):
        if event == "come":
            waiting.append(group := new_group(400, name=f"r{number}"))
            scheduler.add(group)
        elif event == "go":
            running = running[:1]
        plan = scheduler.plan(len(running), running)
        running += plan.joining
        if plan.prefill is foreseen:
            assert not waiting
            assert len(running) == 1
        if plan.prefill is not None:
            carry_out(scheduler, plan, num_running=len(running))
        if len(running) > 1:
            waiting = [g for g in waiting if g not in [one.group for one in running]]
        scheduler.on_decode(0.01)


def test_background_requests_are_computed_beside_decode_but_after_others():
    scheduler = new_scheduler()
    background = new_group(500, name="b")
    background.request = msgspec.structs.replace(background.request, priority="background")
    scheduler.add(background)
    scheduler.add(other := new_group(500))
    assert slice_of(scheduler, scheduler.plan(1))[0] is other
    scheduler.remove(other)
    assert slice_of(scheduler, scheduler.plan(1))[0] is background


def of_class(priority: Priority, num_tokens: int, name: str) -> SequenceGroup:
    group = new_group(num_tokens, name=name)
    group.request = msgspec.structs.replace(group.request, priority=priority)
    return group


def test_an_interactive_request_overtakes_between_two_slices_and_starves_nobody():
    scheduler = new_scheduler()
    scheduler.add(default := of_class("default", 100_000, "d"))
    carry_out(scheduler, scheduler.plan(0))
    scheduler.add(background := of_class("background", 100_000, "b"))
    scheduler.add(interactive := of_class("interactive", 100_000, "i"))
    turns: list[SequenceGroup] = []

    def take_turns(number: int) -> None:
        for _ in range(number):
            turns.append(slice_of(scheduler, plan := scheduler.plan(0))[0])
            carry_out(scheduler, plan)

    take_turns(18)
    assert turns == 2 * ([interactive] * 8 + [default])
    scheduler.remove(default)
    take_turns(9)
    assert turns[18:] == [interactive] * 8 + [background]


def test_pictures_that_may_not_be_divided_are_computed_in_one_slice():
    def ends(spans: tuple[tuple[int, int], ...], *, is_whole: bool) -> list[int]:
        group = new_group(300)
        group.image_batch = ImageBatch(
            tuple(MediaSpan(start, end, b"") for start, end in spans), is_whole=is_whole
        )
        scheduler = new_scheduler(max_slice=64)
        found: list[int] = []
        while group.num_remaining_tokens:
            group.num_computed_tokens = scheduler.next_slice(group, 0).end
            found.append(group.num_computed_tokens)
        return found

    spans = ((60, 70), (70, 80), (120, 250))
    assert ends(spans, is_whole=False) == [64, 128, 192, 256, 299]
    assert ends(spans, is_whole=True) == [60, 70, 120, 250, 256, 299]


def test_a_prompt_that_is_scored_comes_in_slices_whose_logits_have_room():
    scheduler = new_scheduler()
    scheduler.add(scored(5000, MAX_LOGITS // 300))
    assert slice_of(scheduler, scheduler.plan(0))[1:] == (0, 288)
    wide = new_scheduler()
    wide.add(scored(5000, MAX_LOGITS // 4000))
    assert slice_of(wide, wide.plan(0))[1:] == (0, 2048)
    narrow = new_scheduler()
    narrow.add(scored(5000, 10 * MAX_LOGITS))
    assert slice_of(narrow, narrow.plan(0))[1:] == (0, SLICE_GRID)


def together(scheduler: Scheduler, num_running: int = 0) -> list[str]:
    """Whose prompts are computed in the next forward."""
    return [one.request.request_id for one in scheduler.plan(num_running).prefills]


def joining_scheduler(
    *sizes: int, max_batch: int = 8, rate: float = 20_000.0, **options: Any
) -> Scheduler:
    scheduler = new_scheduler(max_batch=max_batch, joins_prompts=True, **options)
    scheduler.on_prefill(PrefillSlice(new_group(2000), 0, 1000), 1000 / rate, 0)
    for number, size in enumerate(sizes):
        scheduler.add(new_group(size, name=str(number)))
    return scheduler


def test_tiny_prompts_are_computed_in_one_forward():
    assert together(joining_scheduler(40, 65, 66, 65)) == ["0", "1", "3"]
    assert together(joining_scheduler(1, 40)) == ["0"]  # nothing is lacking but the last token
    apart = new_scheduler(max_batch=8)
    apart.add(new_group(40, name="0"))
    apart.add(new_group(40, name="1"))
    assert together(apart) == ["0"]


def test_as_many_are_computed_together_as_there_are_rows():
    assert together(joining_scheduler(40, 40, 40, 40, max_batch=3)) == ["0", "1", "2"]
    running = joining_scheduler(40, 40, 40, 40, max_batch=3)
    assert together(running, num_running=1) == ["0", "1"]


def test_a_common_forward_takes_a_twentieth_of_a_second_at_most():
    alone = joining_scheduler(*[65] * 20, max_batch=32)
    assert len(together(alone)) == 8  # of 512 tokens
    slow = joining_scheduler(*[65] * 20, max_batch=32, rate=4000.0)
    assert len(together(slow)) == 3  # of 200 tokens
    assert len(together(joining_scheduler(*[65] * 20, rate=2000.0))) == 1
    unknown = new_scheduler(joins_prompts=True)
    unknown.add(new_group(40))
    unknown.add(new_group(40))
    assert len(together(unknown)) == 1


def test_a_prompt_that_is_scored_or_shows_a_picture_or_is_read_is_computed_alone():
    scheduler = joining_scheduler(40, 40)
    scheduler.add(scored(40, 400))
    seeing = new_group(40, name="seeing")
    seeing.image_batch = ImageBatch(spans=(MediaSpan(start=2, end=9, digest=b"x"),))
    scheduler.add(seeing)
    reading = new_group(40, name="reading")
    reading.cursor.awaits.add(b"name")
    scheduler.add(reading)
    assert together(scheduler) == ["0", "1"]


def test_what_is_long_is_not_copied_to_be_computed_beside_others():
    scheduler = joining_scheduler(40, 40)
    long = new_group(600, name="long")
    long.num_computed_tokens = 550
    scheduler.add(long)
    short = new_group(500, name="short")
    short.num_computed_tokens = 450
    scheduler.add(short)
    assert together(scheduler) == ["0", "1", "short"]


def test_another_class_is_not_computed_along():
    scheduler = joining_scheduler(40)
    scheduler.add(of_class("interactive", 40, "first"))
    scheduler.add(of_class("background", 40, "last"))
    scheduler.add(of_class("interactive", 40, "second"))
    assert together(scheduler) == ["first", "second"]


def test_all_of_a_common_forward_have_memory():
    of_one_byte = RowFootprint(per_token=1)
    one = of_one_byte.of(reserved_tokens(40, 0, 8))
    memory = RowMemory(of_one_byte, is_batched=False, pool_bytes=2 * one)
    assert together(joining_scheduler(40, 40, 40, memory=memory)) == ["0", "1"]


def test_whoever_waits_for_memory_is_passed_by_no_more_because_they_are_computed_together():
    footprint = RowFootprint(per_token=1)
    one = footprint.of(reserved_tokens(40, 0, 8))
    memory = RowMemory(footprint, is_batched=False, pool_bytes=footprint.of(5_000 + 8) + one // 2)
    scheduler = joining_scheduler(memory=memory)
    running = new_group(40, name="running")
    scheduler.add(running)
    carry_out(scheduler, scheduler.plan(0))
    scheduler.plan(0)
    large = new_group(5_000, name="large")
    scheduler.add(large)
    passed = 0
    for number in range(40):
        for _ in range(4):
            scheduler.add(new_group(40, name=str(number)))
        plan = scheduler.plan(1, running.sequences)
        passed += sum(group is not large for group in plan.prefills)
        scheduler.on_decode(1.0)
        if plan.prefill is not None:
            for group in plan.prefills:
                scheduler.remove(group)
    assert 0 < passed <= 8
