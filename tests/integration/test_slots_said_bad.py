"""A worker says that a slot is missing or damaged; the store looks for itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.cache.owned import OpenStore
from runtime.cache.store_opening import open_store
from store import slots
from store.disk import disk_bytes
from store.types import SlotRow
from tests.slot_samples import publish_sample, slot_id


@pytest.fixture
def store(tmp_path: Path) -> Iterator[OpenStore]:
    """With one slot."""
    one = open_store(tmp_path / "kv", None)
    path = publish_sample(one.root, 1)
    header = slots.read_header(path)
    row = SlotRow(header=header, disk_bytes=disk_bytes(path), last_used_s=one.clock.now_s())
    one.index.insert([row]).result()
    yield one
    one.close()


def test_a_slot_that_was_looked_for_before_it_had_its_name_stays(store: OpenStore):
    assert store.drop_bad(slot_id(1)) == ()
    assert [place.id for place in store.index.places()] == [slot_id(1)]
    assert slots.slot_path(store.root, slot_id(1)).exists()


def test_a_slot_that_is_damaged_goes(store: OpenStore):
    path = slots.slot_path(store.root, slot_id(1))
    os.truncate(path, path.stat().st_size - 1)
    assert store.drop_bad(slot_id(1)) == (slot_id(1),)
    assert not store.index.places()
    assert not path.exists()
