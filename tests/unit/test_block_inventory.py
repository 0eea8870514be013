"""What people are shown of heads and blocks: exact values over real files and rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.cache import tending
from runtime.cache.inventory import Inventory
from runtime.errors import UnknownConversation
from store.head_file import KEPT
from store.heads import BlockFile
from store.keyed_names import conversation_key
from tests.unit.test_room import BLOCK, Store, keys_of, tokens_of

SECRET = b"secret"
ONE, OTHER = (conversation_key(SECRET, name) for name in ("one", "other"))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path)
    yield made
    made.close()


def inventory_of(store: Store) -> Inventory:
    return Inventory(store.heads, BLOCK, SECRET, lambda seconds: seconds + 1000)


def test_a_session_is_one_conversation_with_each_model_and_what_has_none_is_one_each(store: Store):
    store.turn(tokens_of(1, 3), ONE)
    store.turn([*tokens_of(1, 2), 7], ONE)
    store.turn(tokens_of(2, 1), b"")
    store.turn(tokens_of(3, 1), b"")
    found = inventory_of(store).conversations()
    assert sorted(len(one.heads) for one in found) == [1, 1, 2]
    assert [one.is_named for one in found].count(True) == 1


def test_it_is_found_by_its_session_id_and_by_the_beginning_of_its_id(store: Store):
    known = store.turn(tokens_of(1, 1), ONE)
    nameless = store.turn(tokens_of(2, 1), b"")
    inventory = inventory_of(store)
    assert inventory.find("one").last == known
    assert inventory.find(ONE.hex()[:6]).last == known
    assert inventory.find(nameless.head.id[:8]).last == nameless
    assert inventory.of_sessions(["one", "none"]) == {"one": [inventory.find("one")], "none": []}
    for name in ("two", ONE.hex()[:3]):
        with pytest.raises(UnknownConversation, match="hearth cache ls"):
            inventory.find(name)


def test_what_goes_on_or_leaves_after_it_was_looked_up_is_shown_as_it_is_then(store: Store):
    one, nameless = store.turn(tokens_of(1, 1), ONE), store.turn(tokens_of(2, 1), b"")
    other = store.turn(tokens_of(3, 1), OTHER)
    inventory = inventory_of(store)
    found = inventory.conversations()
    longer = store.turn(tokens_of(1, 2), ONE, before=one)
    store.heads.delete_head(nameless.head.id)
    kept = tending.all_kept(inventory, found)
    lengths = {one.end: one.view.num_tokens for one in kept}
    assert lengths == {other.head.id: BLOCK, longer.head.id: 2 * BLOCK}
    (gone,) = (one for one in found if not one.is_named)
    with pytest.raises(UnknownConversation, match="has gone"):
        tending.as_kept(inventory, gone)


def test_what_others_have_as_well_is_not_its_own(store: Store):
    shared = tokens_of(1, 2)
    one = store.turn([*shared, *tokens_of(2, 2)], ONE)
    store.turn([*shared, *tokens_of(3, 1)], OTHER)
    inventory = inventory_of(store)
    view = inventory.view(inventory.find("one"))
    sizes = store.heads.kept.blocks
    all_bytes = sum(sizes[key].sizes.warm for key in keys_of([*shared, *tokens_of(2, 2)]))
    own_bytes = sum(sizes[key].sizes.warm for key in keys_of([*shared, *tokens_of(2, 2)])[2:])
    assert view.num_slots == 4
    assert view.disk_bytes == all_bytes + one.num_bytes
    assert view.own_bytes == own_bytes + one.num_bytes
    assert view.last_used_s == one.last_used_s + 1000


def test_heads_of_one_conversation_own_what_they_share(store: Store):
    store.turn([*tokens_of(1, 2), *tokens_of(2, 1)], ONE)
    store.turn([*tokens_of(1, 2), *tokens_of(3, 1)], ONE)
    inventory = inventory_of(store)
    one = inventory.find("one")
    assert inventory.view(one).own_bytes == inventory.view(one).disk_bytes


def test_what_is_durable_ends_before_the_first_block_that_is_missing(store: Store):
    tokens = tokens_of(1, 4)
    store.turn(tokens, ONE)
    inventory = inventory_of(store)
    view = inventory.view(inventory.find("one"))
    assert (view.num_durable, view.is_durable, view.tier) == (4 * BLOCK, True, "warm")
    store.heads.remove_files([BlockFile(keys_of(tokens)[2])])
    view = inventory.view(inventory.find("one"))
    assert (view.num_durable, view.is_durable) == (2 * BLOCK, False)


def test_an_end_that_was_not_written_is_not_durable(store: Store):
    store.turn([*tokens_of(1, 2), 5], ONE)
    view = inventory_of(store).view(inventory_of(store).find("one"))
    assert (view.num_tokens, view.num_durable, view.is_durable) == (2 * BLOCK + 1, 2 * BLOCK, False)


def test_a_head_that_is_marked_stays_and_is_the_same_but_for_that(store: Store):
    tokens = tokens_of(1, 2)
    known = store.turn(tokens, ONE, ttl_s=10.0)
    marked = store.heads.mark(known.head.id, pins=[KEPT], ttl_s=None)
    inventory = inventory_of(store)
    assert inventory.view(inventory.find("one")).is_pinned
    store.seconds += 100
    assert store.heads.expire() == []
    store.open()
    assert store.heads.known[known.head.id].head == marked.head
    assert list(store.heads.read(known.head.id).token_ids) == tokens
    store.heads.mark(known.head.id, pins=[], ttl_s=10.0)
    assert {*store.heads.expire()} == {*keys_of(tokens)}
