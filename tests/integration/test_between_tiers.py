"""Slots that move between the tiers while something else happens to them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from runtime.inventory import Inventory
from runtime.open_store import OpenStore
from runtime.store_opening import open_store
from store import slots
from store.cold import ColdDirectory, ColdSlot
from store.cold_gate import ColdGate
from store.disk import Yield, disk_bytes, keep_going
from store.errors import StoreFailed
from store.slots import StagedSlot
from store.types import SlotRow
from tests.slot_samples import publish_sample, slot_id

ONE = slot_id(1)


class Interrupted(ColdDirectory):
    """Something happens while a slot moves."""

    def __init__(self, directory: Path, meanwhile: Callable[[], object]) -> None:
        super().__init__(directory)
        self._meanwhile = meanwhile

    def demote(self, path: Path, yield_: Yield = keep_going) -> ColdSlot:
        moved = super().demote(path, yield_)
        self._meanwhile()
        return moved

    def promote(self, root: Path, slot_id: str, yield_: Yield = keep_going) -> StagedSlot:
        staged = super().promote(root, slot_id, yield_)
        self._meanwhile()
        return staged


@pytest.fixture
def store(tmp_path: Path) -> Iterator[OpenStore]:
    """With one slot, on the fast disk."""
    one = open_store(tmp_path / "kv", str(tmp_path / "cold"))
    path = publish_sample(one.root, 1)
    header = slots.read_header(path)
    row = SlotRow(header=header, disk_bytes=disk_bytes(path), last_used_s=one.clock().wall_s)
    one.index.insert([row]).result()
    yield one
    one.close()


def files(store: OpenStore) -> list[Path]:
    return [path for path in store.root.parent.rglob("*") if ONE in path.name]


def interrupt(store: OpenStore, meanwhile: Callable[[], object]) -> None:
    store.cold = ColdGate(Interrupted(store.root.parent / "cold", meanwhile))


def test_a_promotion_that_fails_can_be_tried_again(store: OpenStore):
    path = slots.slot_path(store.root, ONE)
    store.demote(ONE)
    path.symlink_to(path.parent / "nothing")
    with pytest.raises(StoreFailed):
        store.promote(ONE)
    path.unlink()
    assert store.promote(ONE)
    assert files(store) == [path]


def test_verifying_is_no_trouble_for_who_promotes(store: OpenStore):
    done = threading.Event()

    def verify() -> None:
        inventory = Inventory(store, lambda _: None)
        while not done.is_set():
            inventory.verify()

    beside = threading.Thread(target=verify)
    beside.start()
    try:
        for _ in range(60):
            store.demote(ONE)
            assert store.promote(ONE)
    finally:
        done.set()
        beside.join()


def test_what_is_evicted_while_it_is_promoted_leaves_no_file(store: OpenStore):
    store.demote(ONE)
    interrupt(store, lambda: store.drop([ONE]))
    assert not store.promote(ONE)
    assert not files(store)


def test_what_is_evicted_while_it_is_demoted_leaves_no_file(store: OpenStore):
    interrupt(store, lambda: store.drop([ONE]))
    store.demote(ONE)
    assert not files(store)


def test_only_what_should_be_there_is_said_to_be_lost(store: OpenStore):
    store.demote(ONE)
    [packed] = files(store)
    packed.unlink()
    with capture_logs() as said:
        assert not store.promote(ONE)
        store.drop([ONE])
        assert not store.promote(ONE)
    assert [one["event"] for one in said] == ["cold_slot_lost"]
