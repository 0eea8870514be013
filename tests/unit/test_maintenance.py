"""The pure parts of keeping the store in order: budgets, what exceeds a cap, what is merged."""

from typing import Any

import pytest
from msgspec import structs

from runtime.cache.compaction import (
    MAX_CHAIN,
    MAX_STATES,
    SMALL_BYTES,
    SMALL_TOKENS,
    Segments,
    plans,
)
from runtime.cache.maintenance import excess_bytes
from runtime.cache.owned import WriteBudget
from runtime.kv_sizes import cache_budget, hot_budget, queue_budget
from store.types import SlotRow
from store.upkeep import DiskRoom
from tests.store_samples import NOW_S, chain, row

GB = 1 << 30
ROOMY = DiskRoom(1000 * GB, 500 * GB)


@pytest.mark.parametrize(
    ("memory", "weights", "expected"),
    [(64 * GB, 16 * GB, 12 * GB), (16 * GB, 15 * GB, GB // 4), (8 * GB, 9 * GB, GB // 4)],
)
def test_hot_budget(memory: int, weights: int, expected: int):
    assert hot_budget(memory, weights) == expected


def test_other_budgets():
    assert queue_budget(16 * GB) == 16 * GB // 20
    assert queue_budget(512 * GB) == 2 * GB
    assert queue_budget(GB // 2) == GB // 16
    assert cache_budget(400 * GB, 0) == 100 * GB - (100 * GB - 100_000_000_000)
    assert cache_budget(40 * GB, 40 * GB) == 20 * GB


@pytest.mark.parametrize(
    ("used", "cap", "room", "expected"),
    [
        (100, 100, ROOMY, 0),
        (101, 100, ROOMY, 11),
        (0, 100, DiskRoom(1000 * GB, 49 * GB), GB),
        (0, 100, DiskRoom(8 * GB, GB), 0),  # nobody keeps 10 GB free of 8
    ],
)
def test_excess(used: int, cap: int, room: DiskRoom, expected: int):
    assert excess_bytes(used, cap, room) == expected


def test_wear_counts_days_apart():
    write_budget = WriteBudget()
    write_budget.add(60.0, NOW_S)
    assert write_budget.rest_s(100, NOW_S) == 0.0
    write_budget.add(60.0, NOW_S + 60)
    rest_s = write_budget.rest_s(100, NOW_S + 60)
    assert (NOW_S + 60 + rest_s) % 86_400 == 0
    assert write_budget.rest_s(100, NOW_S + 86_400) == 0.0
    write_budget.add(60.0, NOW_S + 86_400)
    assert write_budget.rest_s(100, NOW_S + 86_400) == 0.0


def numbers(found: list[SlotRow]) -> list[str]:
    return [one.header.id for one in found]


def merged(rows: list[SlotRow], ends: tuple[str, ...] = ()) -> list[list[str]]:
    """The slots of each segment of the one plan there is; none without a plan."""
    found: list[Segments] = list(plans(rows, ends))
    return [numbers([link.row for link in segment]) for plan in found for segment in plan]


def test_a_long_chain_of_small_slots_is_found_whole():
    long, short = chain(*range(1, MAX_CHAIN + 3)), chain(*range(100, 101 + MAX_CHAIN))
    assert merged([*long, *short]) == [numbers(long[1:])]


def test_a_chain_ends_at_branches_pins_state_large_slots_and_the_cold_store():
    size = MAX_CHAIN + 5
    changes: list[dict[str, Any]] = [
        {"is_pinned": True},
        {"has_state": True},
        {"tier": "cold"},
        {"end": 512 + 3000},
        {"disk_bytes": SMALL_BYTES + 1},
    ]
    for change in changes:
        first = row(1, **change)
        rest = [row(2, first.header, start=first.header.end, end=first.header.end + 512)]
        for number in range(3, size):
            rest.append(row(number, rest[-1].header))
        assert merged([first, *rest]) == [numbers(rest)]
    rows = chain(*range(1, size))
    branch = row(1000, rows[1].header)
    assert merged([*rows, branch]) == [numbers(rows[2:])]
    ended = rows[1].header.id
    assert merged(rows, (ended, rows[-1].header.id)) == [numbers(rows[2:])]


def test_slots_from_before_and_after_a_conversation_was_quantised_stay_apart():
    plain, late = chain(*range(1, MAX_CHAIN + 5)), range(100, MAX_CHAIN + 103)
    rows = list(plain)
    for number in late:
        rows.append(row(number, rows[-1].header, layout='{"layout":{"late":1},"num_slices":6}'))
    assert merged(rows) == [numbers(rows[len(plain) :])]


def test_a_short_end_that_nobody_continues_may_be_cut_off():
    root = row(1000)
    first = row(1, root.header)
    for lost, is_in in ((64, True), (65, False)):
        rest = [row(2, first.header, start=1024 - lost, end=1536)]
        for number in range(3, MAX_CHAIN + 5):
            rest.append(row(number, rest[-1].header))
        (found,) = merged([root, first, *rest])
        assert (found[0] == first.header.id) is is_in


def test_states_are_dropped_until_few_are_left_that_are_dense_at_the_end():
    rows = chain(*range(1, MAX_STATES + 4), has_state=True)
    assert merged(rows[:MAX_STATES]) == []
    bare = [one for segment in merged(rows) for one in segment]
    left = [number for number, one in enumerate(numbers(rows)) if one not in bare]
    assert left == [0, 4, 5, 6]
    assert all(len(segment) == 1 for segment in merged(rows))


def test_each_state_is_dropped_alone_and_what_has_lost_it_is_merged_when_it_is_much():
    """However long a chain becomes: a few states, few slots, each slot written a few times."""
    rows: list[SlotRow] = []
    num_new, num_rewritten, ids = 400, 0, iter(range(1, 10**6))
    for _ in range(num_new):
        rows.append(row(next(ids), rows[-1].header if rows else None, has_state=True))
        for plan in plans(rows, ()):
            for segment in plan:
                places = [rows.index(link.row) for link in segment]
                assert places == list(range(places[0], places[-1] + 1))
                start, end = segment[0].row.header.start, segment[-1].leave
                parent = rows[places[0] - 1].header if places[0] else None
                new = row(next(ids), parent, start=start, end=end, has_state=False)
                rows[places[0] : places[-1] + 1] = [new]
                num_rewritten += (end - start) // 512
            rows = [linked(one, rows[i - 1] if i else None) for i, one in enumerate(rows)]
        assert sum(one.header.has_state for one in rows) <= MAX_STATES
        assert [one.header.start for one in rows[1:]] == [one.header.end for one in rows[:-1]]
    assert len(rows) < 2 * MAX_CHAIN + num_new * 512 // SMALL_TOKENS
    assert 0 < num_rewritten <= 3 * num_new


def linked(one: SlotRow, before: SlotRow | None) -> SlotRow:
    return structs.replace(one, parent=before.header.id if before is not None else None)
