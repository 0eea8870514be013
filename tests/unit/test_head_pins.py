"""Pins: who wants a head to stay, and what becomes of that as its conversation goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from store.head_file import KEPT, HeadFile, KnownHead, Owner
from store.heads import Published
from tests.unit.test_room import BLOCK, MODEL, Store, head_of, keys_of, tokens_of

OWNER = Owner(b"asked", b"s", b"")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path)
    yield store
    store.close()


def pins(store: Store) -> dict[int, tuple[str, ...]]:
    """The pins of all heads, by how many tokens they have."""
    return {one.head.num_tokens: one.head.pins for one in store.heads.known.values()}


def mark(store: Store, known: KnownHead, *sources: str) -> None:
    store.heads.mark(known.head.id, pins=sources, ttl_s=None)


def test_what_a_pinned_conversation_becomes_is_pinned_instead(store: Store):
    tokens = tokens_of(1, 2)
    first = store.turn(tokens)
    mark(store, first, KEPT)
    store.turn([*tokens, *tokens_of(2, 1)], before=first)
    assert pins(store) == {3 * BLOCK: (KEPT,)}


def test_a_pinned_conversation_that_is_rewritten_takes_its_pin_with_it(store: Store):
    first = store.turn(tokens_of(1, 2))
    mark(store, first, KEPT)
    store.turn(tokens_of(7, 3))
    assert pins(store) == {2 * BLOCK: (), 3 * BLOCK: (KEPT,)}
    store.open()
    assert pins(store) == {2 * BLOCK: (), 3 * BLOCK: (KEPT,)}


def test_another_conversation_takes_no_pin(store: Store):
    first = store.turn(tokens_of(1, 2))
    mark(store, first, KEPT)
    store.turn(tokens_of(7, 3), b"other", before=first)
    assert pins(store) == {2 * BLOCK: (KEPT,), 3 * BLOCK: ()}


def test_a_prompt_that_is_pinned_stays_where_it_is(store: Store):
    tokens = tokens_of(1, 2)
    first = store.turn(tokens)
    mark(store, first, "config:a")
    store.turn([*tokens, *tokens_of(2, 1)], before=first)
    assert pins(store) == {2 * BLOCK: ("config:a",), 3 * BLOCK: ()}


def test_whoever_pinned_an_end_still_does_when_it_is_said_again(store: Store):
    tokens = tokens_of(1, 2)
    mark(store, store.turn(tokens), "config:a", "prewarm-1")
    store.turn(tokens)
    assert pins(store) == {2 * BLOCK: ("config:a", "prewarm-1")}
    assert len(store.heads.known) == 1


def test_a_head_that_goes_on_from_a_pinned_prompt_does_not_replace_it_at_a_start(store: Store):
    tokens = tokens_of(1, 2)
    first = store.turn(tokens)
    mark(store, first, "config:a")
    store.turn([*tokens, *tokens_of(2, 1)], before=first)
    store.open()
    assert pins(store) == {2 * BLOCK: ("config:a",), 3 * BLOCK: ()}


@pytest.mark.parametrize("is_restarted", [False, True])
def test_what_is_pinned_ahead_is_pinned_when_it_comes(store: Store, is_restarted: bool):
    store.heads.keep_ahead(MODEL, OWNER, "tiny")
    assert pins(store) == {0: (KEPT,)}
    if is_restarted:
        store.open()
    known = store.turn(tokens_of(1, 2), b"s", ttl_s=1.0)
    assert pins(store) == {2 * BLOCK: (KEPT,)}
    store.seconds += 100
    assert store.heads.expire() == []
    mark(store, known._replace(head=store.heads.known[known.head.id].head))
    assert store.heads.known[known.head.id].head.ttl_s is None


def test_what_was_pinned_ahead_twice_is_pinned_once(store: Store):
    for _ in range(2):
        store.heads.keep_ahead(MODEL, OWNER, "tiny")
    assert len(store.heads.known) == 1


def test_what_is_said_again_in_memory_only_has_no_pin_of_what_is_on_disk(store: Store):
    tokens = tokens_of(1, 2)
    first = store.turn(tokens)
    mark(store, first, KEPT, "config:a")
    told = HeadFile(head_of(tokens, b"s"), tokens)
    said = store.heads.publish(told, store.heads.number)
    assert isinstance(said, Published)
    assert said.known.head.pins == ()
    assert store.heads.known[first.head.id].head.pins == ("config:a", KEPT)


def test_what_heads_take_together_is_counted_once(store: Store):
    tokens = tokens_of(1, 2)
    one, two = store.turn(tokens, b"one"), store.turn([*tokens, *tokens_of(2, 1)], b"two")
    sizes = store.heads.kept.blocks
    block_bytes = sum(sizes[key].sizes.warm for key in keys_of([*tokens, *tokens_of(2, 1)]))
    both = store.room.bytes_of([one.head.id, two.head.id])
    assert both == block_bytes + one.num_bytes + two.num_bytes
    assert store.room.bytes_of(["gone"]) == 0
