"""Slots that move between the tiers while something else happens to them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from runtime.cache.inventory import Inventory
from runtime.cache.maintenance import StoreLimits, expire, keep_within_caps, usage_of
from runtime.cache.owned import Merged, OpenStore
from runtime.cache.store_opening import open_store
from runtime.slot_events import SlotsGone, SlotStaged
from store import slots
from store.clock import Trusted, TrustedClock
from store.cold import ColdDirectory, ColdSlot
from store.cold_gate import ColdGate
from store.disk import Reserve, Yield, disk_bytes, keep_going, no_cap
from store.errors import ColdAway, StoreFailed
from store.recovery import Recovery
from store.slots import StagedSlot
from store.types import DEFAULT_TTL_S, SlotPlace, SlotRow
from tests.slot_samples import publish_sample, sample, slot_id

ONE = slot_id(1)
TIGHT = StoreLimits(1, 10**9, 1e9)


class Interrupted(ColdDirectory):
    """Something happens while a slot moves."""

    def __init__(self, directory: Path, meanwhile: Callable[[], object]) -> None:
        super().__init__(directory)
        self._meanwhile = meanwhile

    def demote(self, path: Path, yield_: Yield = keep_going) -> ColdSlot:
        moved = super().demote(path, yield_)
        self._meanwhile()
        return moved

    def promote(self, root: Path, slot_id: str, reserve: Reserve = no_cap) -> StagedSlot:
        staged = super().promote(root, slot_id, reserve)
        self._meanwhile()
        return staged


class Refusing(Interrupted):
    """The same, and nothing is deleted there, as for want of rights."""

    def delete(self, slot_id: str) -> bool:
        raise ColdAway(slot_id)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[OpenStore]:
    """With one slot, on the fast disk."""
    one = open_store(tmp_path / "kv", str(tmp_path / "cold"))
    add(one, 1)
    yield one
    one.close()


def add(store: OpenStore, number: int) -> None:
    path = publish_sample(store.root, number)
    used_s = store.clock.now_s() + number
    store.index.insert([SlotRow(slots.read_header(path), disk_bytes(path), used_s)]).result()


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


def test_what_a_later_release_wrote_is_not_said_to_be_damaged(store: OpenStore):
    [path] = files(store)
    path.write_bytes(path.read_bytes().replace(b"hearth-slot/2", b"hearth-slot/8", 1))
    gone: list[SlotsGone | Merged] = []
    view = Inventory(store, gone.append).verify()
    assert (view.num_verified, view.num_damaged, view.num_unread) == (0, 0, 1)
    assert not gone
    assert path.exists()


def test_who_writes_again_what_is_there_takes_nothing_away(store: OpenStore):
    """As a worker does that was told that the store is lost."""
    header, token_ids, tensors = sample(1)
    staged = slots.stage(store.root, header, token_ids, tensors)
    outcome = store.publish([SlotStaged(header, str(staged.path), staged.num_bytes)])
    assert [row.header.id for row in outcome.saved] == [ONE]
    assert files(store) == [slots.slot_path(store.root, ONE)]
    assert Inventory(store, lambda _: None).verify().num_verified == 1


def test_what_is_evicted_while_it_is_promoted_leaves_no_file(store: OpenStore):
    store.demote(ONE)
    interrupt(store, lambda: store.drop([ONE]))
    assert not store.promote(ONE)
    assert not files(store)


def test_what_is_evicted_while_it_is_demoted_leaves_no_file(store: OpenStore):
    interrupt(store, lambda: store.drop([ONE]))
    store.demote(ONE)
    assert not files(store)


def recover(store: OpenStore) -> None:
    """As the next start does, with a cold store that answers."""
    cold = ColdDirectory(store.root.parent / "cold")
    Recovery(store.root, store.database, cold, time.time()).run()


def refuse(store: OpenStore, meanwhile: Callable[[], object] = lambda: None) -> None:
    store.cold = ColdGate(Refusing(store.root.parent / "cold", meanwhile))


def test_what_is_deleted_while_it_is_demoted_never_comes_back(store: OpenStore):
    refuse(store, lambda: store.drop([ONE]))
    store.demote(ONE)
    assert files(store), "the cold store kept it"
    recover(store)
    assert not store.index.places()
    assert not files(store)


def test_what_is_deleted_after_it_was_promoted_never_comes_back(store: OpenStore):
    store.demote(ONE)
    refuse(store)
    assert store.promote(ONE)
    store.drop([ONE])
    assert files(store), "the cold store kept it"
    recover(store)
    assert not store.index.places()
    assert not files(store)


def test_a_move_that_a_kill_broke_off_brings_nothing_deleted_back(store: OpenStore):
    """The file is where it was going to, and its row was deleted."""

    class Killed(Exception):
        pass

    def killed() -> None:
        store.drop([ONE])
        raise Killed

    interrupt(store, killed)
    with pytest.raises(Killed):
        store.demote(ONE)
    assert files(store)
    recover(store)
    assert not store.index.places()
    assert not files(store)


def test_what_moves_back_and_forth_is_kept(store: OpenStore):
    for tier in ("cold", "warm", "cold", "warm"):
        refuse(store)
        (store.demote if tier == "cold" else store.promote)(ONE)
        recover(store)
        assert store.index.places() == [SlotPlace(ONE, tier)]
        assert len(files(store)) == 1
        assert Inventory(store, lambda _: None).verify().num_verified == 1


def again(store: OpenStore) -> SlotStaged:
    header, token_ids, tensors = sample(1)
    staged = slots.stage(store.root, header, token_ids, tensors)
    return SlotStaged(header, str(staged.path), staged.num_bytes)


def test_who_writes_again_what_is_in_the_cold_store_leaves_it_there(store: OpenStore):
    store.demote(ONE)
    assert [row.header.id for row in store.publish([again(store)]).saved] == [ONE]
    assert len(files(store)) == 1
    store.drop([ONE])
    assert not files(store)


def test_what_was_staged_and_never_published_is_staged_again(store: OpenStore):
    store.drop([ONE])
    again(store)
    assert store.publish([again(store)]).saved
    assert files(store) == [slots.slot_path(store.root, ONE)]


def test_a_file_that_was_written_again_is_not_taken_for_the_one_that_was_dropped(store: OpenStore):
    places = store.index.drop([ONE]).result()
    [path] = files(store)
    path.unlink()
    assert store.publish([again(store)]).saved
    store.unlink(places)
    assert files(store) == [path]


def test_who_reads_what_is_evicted_hears_of_it_before_the_file_leaves(store: OpenStore):
    [path] = files(store)
    add(store, 2)
    store.cold = None
    told = [(gone.ids, path.exists()) for gone in keep_within_caps(store, TIGHT)]
    assert [was_there for ids, was_there in told if ONE in ids] == [True]
    assert not path.exists()


def test_the_cold_store_never_takes_more_than_it_may(store: OpenStore):
    for number in range(2, 12):
        add(store, number)
    limits = TIGHT._replace(cold_max_bytes=4 * 4096)
    taken = [usage_of(store).cold_bytes for _ in keep_within_caps(store, limits)]
    assert 0 < max(taken) <= limits.cold_max_bytes
    assert store.counts["evicted_cold_cap"]


def test_what_expires_and_has_no_room_in_the_cold_store_goes(store: OpenStore):
    store.clock = TrustedClock(Trusted(store.clock.now_s() + 2 * DEFAULT_TTL_S))
    gone = list(expire(store, StoreLimits(None, 1, 1e9)))
    assert [one.ids for one in gone if one.ids] == [(ONE,)]
    assert not files(store)


def test_a_slot_whose_beginning_was_evicted_meanwhile_is_kept_for_when_it_is_back(
    store: OpenStore,
):
    header, token_ids, tensors = sample(2)
    before = store.index.all_slots()[0].header
    header = msgspec.structs.replace(
        header,
        start_hash=before.end_hash,
        start=before.end,
        end=before.end + header.end,
        block_hashes=(b"x" * 16, b"y" * 16),
    )
    staged = slots.stage(store.root, header, token_ids, tensors)
    store.drop([ONE])
    told = SlotStaged(header, str(staged.path), staged.num_bytes, parent=ONE)
    assert not store.publish([told]).refused
    [row] = store.index.all_slots()
    assert (row.header, row.parent) == (header, None)
    again = msgspec.structs.replace(before, id=slot_id(3))
    assert store.index.insert([SlotRow(header=again, disk_bytes=1, last_used_s=1.0)]).result()
    assert {one.header.id: one.parent for one in store.index.all_slots()} == {
        slot_id(2): slot_id(3),
        slot_id(3): None,
    }


def test_only_what_should_be_there_is_said_to_be_lost(store: OpenStore):
    store.demote(ONE)
    [packed] = files(store)
    packed.unlink()
    with capture_logs() as said:
        assert not store.promote(ONE)
        store.drop([ONE])
        assert not store.promote(ONE)
    assert [one["event"] for one in said] == ["cold_slot_lost"]


def test_deleting_removes_what_a_dead_worker_was_writing(store: OpenStore):
    left = slots.slot_path(store.root, ONE).with_name(f".tmp-0-1.1-{ONE}.safetensors")
    left.write_bytes(b"what somebody said")
    Inventory(store).remove_all()
    assert not files(store)
