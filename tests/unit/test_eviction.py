"""What leaves when bytes are needed, by exact values."""

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from store.eviction import HALF_LIFE_S, choose, value
from store.types import HIT_HALF_LIFE_S, TTL_S, Candidate, decayed_hits

NOW_S = 1_000_000.0


def slot(name: str, parent: str | None = None, **fields: Any) -> Candidate:
    plain = Candidate(
        id=name,
        parent=parent,
        num_children=0,
        size_bytes=100,
        recompute_ms=50.0,
        last_used_s=NOW_S,
    )
    return msgspec.structs.replace(plain, **fields)


def test_a_fresh_slot_is_worth_its_prefill_time_per_byte():
    assert value(slot("a"), NOW_S) == 0.5
    assert value(slot("a", recompute_ms=200.0), NOW_S) == 2.0
    assert value(slot("a", size_bytes=25), NOW_S) == 2.0


def test_worth_halves_with_every_half_life_of_the_class():
    for ttl_class in ("short", "long", "extended"):
        half_life_s = HALF_LIFE_S[ttl_class]
        assert half_life_s == TTL_S[ttl_class] / 4
        old = slot("a", ttl_class=ttl_class, last_used_s=NOW_S - half_life_s)
        assert value(old, NOW_S) == 0.25
    assert value(slot("a", ttl_class="pinned", last_used_s=0.0), NOW_S) == 0.5


def test_hits_count_up_to_four_and_decay():
    assert value(slot("a", hits=1.0), NOW_S) == 1.0
    assert value(slot("a", hits=4.0), NOW_S) == 2.5
    assert value(slot("a", hits=400.0), NOW_S) == 2.5
    assert decayed_hits(4.0, HIT_HALF_LIFE_S) == 2.0
    aged = slot("a", hits=4.0, last_used_s=NOW_S - HIT_HALF_LIFE_S, ttl_class="pinned")
    assert value(aged, NOW_S) == 1.5


def test_a_last_use_in_the_future_counts_as_now():
    assert value(slot("a", last_used_s=NOW_S + 1e9, hits=1.0), NOW_S) == 1.0


def test_an_empty_file_does_not_divide_by_zero():
    assert value(slot("a", size_bytes=0), NOW_S) == 50.0


def test_the_least_worth_leaves_first_and_only_as_much_as_is_needed():
    slots = [
        slot("dear", recompute_ms=90.0),
        slot("cheap", recompute_ms=10.0),
        slot("middling", recompute_ms=40.0),
        slot("newest", recompute_ms=1.0, last_used_s=NOW_S + 1),
    ]
    assert choose(slots, 0, NOW_S) == ()
    assert choose(slots, 1, NOW_S) == ("cheap",)
    assert choose(slots, 100, NOW_S) == ("cheap",)
    assert choose(slots, 101, NOW_S) == ("cheap", "middling")
    assert choose(slots, 10_000, NOW_S) == ("cheap", "middling", "dear", "newest")


def test_a_parent_leaves_only_after_its_last_child():
    slots = [
        slot("root", num_children=2, recompute_ms=1.0),
        slot("left", "root", recompute_ms=2.0),
        slot("right", "root", recompute_ms=3.0),
        slot("newest", last_used_s=NOW_S + 1),
    ]
    assert choose(slots, 10_000, NOW_S) == ("left", "right", "root", "newest")
    assert choose(slots, 200, NOW_S) == ("left", "right")


def test_a_child_that_is_no_candidate_keeps_its_ancestors():
    slots = [
        slot("root", num_children=1, recompute_ms=1.0),
        slot("middle", "root", num_children=2, recompute_ms=1.0),
        slot("leaf", "middle"),
        slot("newest", last_used_s=NOW_S + 1),
    ]
    assert choose(slots, 10_000, NOW_S) == ("leaf", "newest")


def test_what_was_used_last_goes_last_and_from_its_end():
    slots = [
        slot("root", num_children=1, last_used_s=0.0),
        slot("leaf", "root"),
        slot("other", last_used_s=0.0),
    ]
    assert choose(slots, 100, NOW_S) == ("other",)
    assert choose(slots, 200, NOW_S) == ("other", "leaf")
    assert choose(slots, 10_000, NOW_S) == ("other", "leaf", "root")
    assert choose([], 1, NOW_S) == ()


def test_equal_worth_is_settled_by_the_id():
    slots = [slot(name) for name in ("c", "a", "b", "d")]
    assert choose(slots, 150, NOW_S) == ("a", "b")


@given(st.lists(st.tuples(st.integers(-1, 30), st.integers(0, 9), st.integers(0, 99)), max_size=30))
def test_children_always_leave_before_their_parents(forest: list[tuple[int, int, int]]):
    parents = [min(parent, i - 1) for i, (parent, _, _) in enumerate(forest)]
    slots = [
        slot(
            str(i),
            str(parents[i]) if parents[i] >= 0 else None,
            num_children=parents.count(i),
            recompute_ms=float(cost),
            last_used_s=NOW_S - age,
        )
        for i, (_, cost, age) in enumerate(forest)
    ]
    order = choose(slots, 10**9, NOW_S)
    assert len(set(order)) == len(order)
    gone: set[str] = set()
    for chosen in order:
        assert all(str(i) in gone for i, parent in enumerate(parents) if str(parent) == chosen)
        gone.add(chosen)


def test_what_was_released_goes_first_even_if_it_was_used_last():
    slots = [
        slot("a", last_used_s=NOW_S - 9000.0),
        slot("z", last_used_s=NOW_S, hits=9.0, is_released=True),
    ]
    assert value(slots[1], NOW_S) == 0.0
    assert choose(slots, 100, NOW_S) == ("z",)
    assert choose(slots, 200, NOW_S) == ("z", "a")


def test_while_somebody_is_awaited_it_counts_as_used_now_and_often():
    old = slot("a", last_used_s=NOW_S - 9e9)
    assert value(msgspec.structs.replace(old, awaited_s=NOW_S + 60.0), NOW_S) == 2.5
    assert value(msgspec.structs.replace(old, awaited_s=NOW_S + 60.0, hits=4.0), NOW_S) == 2.5
    assert value(msgspec.structs.replace(old, awaited_s=NOW_S), NOW_S) == 0.5
    late = msgspec.structs.replace(old, awaited_s=NOW_S - HALF_LIFE_S["long"])
    assert value(late, NOW_S) == 0.25


def test_who_is_awaited_is_worth_more_than_others_and_is_not_pinned():
    awaited = slot("a", awaited_s=NOW_S + 60.0)
    dear = slot("d", recompute_ms=300.0)
    assert choose([awaited, slot("b"), slot("c"), dear], 200, NOW_S) == ("b", "c")
    assert choose([awaited, dear, slot("z", last_used_s=NOW_S + 1)], 100, NOW_S) == ("a",)
