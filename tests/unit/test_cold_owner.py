"""A cold store has one owner: nobody else touches it, and a missing one is not taken for empty."""

from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from obstore.store import MemoryStore

from runtime.cache.opened import BlockStore, Terms, open_blocks
from runtime.cache.upkeep import keep, tidy
from store.cold import MARK, OWNER, ColdBucket, ColdDirectory, ColdStore
from store.cold_blocks import cold_id
from store.cold_gate import ColdGate
from store.cold_owner import Claim
from store.errors import ColdForeign, SlotDamaged, SlotMissing, StoreFull
from store.room import Limits
from tests.slot_samples import slot_id
from tests.store_samples import Said, held, say

BLOCK = 4
LIMITS = Limits(10**9, 10**9, 1e9)


@pytest.fixture(params=["directory", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], ColdStore]:
    """The same cold store, as several see it."""
    memory = MemoryStore()
    if request.param == "bucket":
        return lambda: ColdBucket(memory)
    return lambda: ColdDirectory(tmp_path / "cold")


def claim(tmp_path: Path, name: str, secret: bytes | None = None) -> Claim:
    root = tmp_path / name
    root.mkdir(exist_ok=True)
    return Claim(root, secret or name.encode(), "there")


def test_the_first_one_owns_it_and_a_restored_home_is_the_same(
    tmp_path: Path, place: Callable[[], ColdStore]
):
    assert claim(tmp_path, "a").look(place()) == (None, False)
    claim(tmp_path, "a").check(place())
    with pytest.raises(ColdForeign, match=r"belongs to another Hearth \(.*/a on .*cold take"):
        claim(tmp_path, "b").check(place())
    claim(tmp_path, "restored", b"a").check(place())
    assert claim(tmp_path, "a").look(place()).is_ours


def test_of_many_at_once_one_owns_it(tmp_path: Path, place: Callable[[], ColdStore]):
    """Whoever was told that it is his finds it so ever after."""
    num = 12
    together = threading.Barrier(num)

    def run(number: int) -> bool:
        one, cold = claim(tmp_path, str(number)), place()
        together.wait()
        try:
            one.check(cold)
        except ColdForeign:
            return False
        return True

    for _ in range(3):
        with ThreadPoolExecutor(num) as threads:
            owns = list(threads.map(run, range(num)))
        assert sum(owns) == 1
        assert [claim(tmp_path, str(n)).look(place()).is_ours for n in range(num) if owns[n]]


def test_who_takes_it_has_it_and_the_other_notices(tmp_path: Path, place: Callable[[], ColdStore]):
    claim(tmp_path, "a").check(place())
    claim(tmp_path, "b").take(place())
    claim(tmp_path, "b").check(place())
    with pytest.raises(ColdForeign):
        claim(tmp_path, "a").check(place())


def test_a_mark_that_cannot_be_read_is_somebodys(tmp_path: Path, place: Callable[[], ColdStore]):
    place().make_mark(b"\xff{")
    with pytest.raises(ColdForeign, match="does not say whose"):
        claim(tmp_path, "a").check(place())


@pytest.mark.timeout(60)
def test_a_mark_that_is_endless_or_no_file_is_somebodys(tmp_path: Path):
    cold = ColdDirectory(tmp_path / "cold")
    cold.make_mark(b"{}")
    mark = tmp_path / "cold" / OWNER / MARK
    os.truncate(mark, 1 << 42)
    with pytest.raises(ColdForeign, match="does not say whose"):
        claim(tmp_path, "a").check(cold)
    mark.unlink()
    os.mkfifo(mark)
    with pytest.raises(ColdForeign, match="does not say whose"):
        claim(tmp_path, "a").check(cold)


def mark_and_die(directory: Path, calls: int) -> None:
    """A process that ends at one of its system calls."""
    left = [calls]

    def count(event: str, args: tuple[object, ...]) -> None:
        if event.split(".", maxsplit=1)[0] in ("os", "open", "tempfile", "shutil"):
            left[0] -= 1
            if left[0] < 0:
                os._exit(9)

    sys.addaudithook(count)
    ColdDirectory(directory).make_mark(b'{"owner":"dead"}')
    os._exit(0)


def test_whoever_dies_while_he_makes_the_mark_has_made_all_of_it_or_nothing(tmp_path: Path):
    num_calls, is_done = 0, False
    while not is_done:
        directory = tmp_path / str(num_calls)
        process = multiprocessing.get_context("fork").Process(
            target=mark_and_die, args=(directory, num_calls)
        )
        process.start()
        process.join()
        is_done = process.exitcode == 0
        found = ColdDirectory(directory).mark()
        assert found in (None, b'{"owner":"dead"}')
        if found is None:
            claim(tmp_path, "a").take(ColdDirectory(directory))
            ColdDirectory(directory).sweep()
            assert [path.name for path in directory.iterdir()] == [OWNER]
        num_calls += 1
    assert num_calls > 5


# With a store before it


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A disk that can be pulled."""
    path = tmp_path / "disk"
    path.mkdir()
    return path


def opened(root: Path, where: Path) -> BlockStore:
    return open_blocks(root, Terms(BLOCK, str(where), LIMITS))


def said(number: int) -> Said:
    """A conversation of one block."""
    return Said(number, BLOCK)


def add(store: BlockStore, number: int) -> None:
    """A conversation that rests from now on."""
    say(store, said(number), ttl_s=0.0)


def tier_of(store: BlockStore, number: int) -> str | None:
    (key,) = said(number).keys(store)
    block = store.heads.kept.blocks.get(key)
    return block.sizes.tier if block is not None else None


def name_of(store: BlockStore, number: int) -> str:
    (key,) = said(number).keys(store)
    return cold_id(key, is_state=False)


def tidied(store: BlockStore) -> None:
    """All that a server does about its cold store by itself."""
    keep(store)
    tidy(store)


def bring(store: BlockStore, number: int) -> bool:
    return bool(store.bring(said(number).keys(store)))


def test_two_hearths_on_one_cold_store_leave_each_others_slots_alone(tmp_path: Path, disk: Path):
    ours, theirs = (opened(tmp_path / name, disk / "cold") for name in "ab")
    add(ours, 1)
    add(theirs, 2)
    tidied(ours)
    before = {path for path in disk.rglob("*") if path.is_file()}
    tidied(theirs)
    assert theirs.cold is not None
    assert (theirs.cold.reach.is_away, theirs.cold.reach.is_foreign) == (True, True)
    assert {path for path in disk.rglob("*") if path.is_file()} == before
    assert (tier_of(ours, 1), tier_of(theirs, 2)) == ("cold", "warm")
    for store in (ours, theirs):
        store.close()


def test_a_disk_that_is_pulled_takes_nothing_with_it(tmp_path: Path, disk: Path):
    """Its mount point stays, or goes as well, or a file is there."""
    store = opened(tmp_path / "a", disk / "cold")
    add(store, 1)
    tidied(store)
    aside = tmp_path / "aside"
    for number, state in enumerate(("gone", "empty", "a file"), 2):
        disk.rename(aside)
        if state == "empty":
            (disk / "cold").mkdir(parents=True)
        elif state == "a file":
            disk.mkdir()
            (disk / "cold").write_text("no directory")
        assert store.cold is not None
        assert not bring(store, 1)
        add(store, number)
        tidied(store)
        assert store.cold.reach.is_away
        assert (tier_of(store, 1), tier_of(store, number)) == ("cold", "warm")
        there = [path.name for path in disk.rglob("*")] if disk.exists() else []
        assert there in ([], ["cold"])
        store.close()
        store = opened(tmp_path / "a", disk / "cold")
        tidied(store)
        assert (tier_of(store, 1), tier_of(store, number)) == ("cold", "warm")
        shutil.rmtree(disk, ignore_errors=True)
        if disk.exists():
            disk.unlink()
        aside.rename(disk)
        assert store.cold is not None
        store.cold.probe()
        assert not store.cold.reach.is_away
    assert bring(store, 1)
    assert held(store, said(1)) == {*range(BLOCK)}
    store.close()


def test_a_missing_mount_point_is_not_made(tmp_path: Path):
    store = opened(tmp_path / "a", tmp_path / "disk" / "cold")
    add(store, 1)
    tidied(store)
    assert not (tmp_path / "disk").exists()
    assert store.cold is not None
    assert store.cold.reach.is_away
    assert tier_of(store, 1) == "warm"
    (tmp_path / "disk").mkdir()
    store.cold.probe()
    tidied(store)
    assert tier_of(store, 1) == "cold"
    store.close()


def test_a_slot_that_is_missing_there_is_not_said_to_be_damaged(tmp_path: Path, disk: Path):
    store = opened(tmp_path / "a", disk / "cold")
    for number in (1, 2):
        add(store, number)
    tidied(store)
    missing, damaged = (next(disk.rglob(f"{name_of(store, number)}*")) for number in (1, 2))
    missing.unlink()
    damaged.write_bytes(damaged.read_bytes()[:100])
    for number, error in ((1, SlotMissing), (2, SlotDamaged)):
        with pytest.raises(error):
            store.read_cold(*said(number).keys(store), is_state=False)
        assert tier_of(store, number) == "missing"
    assert store.cold is not None
    assert not store.cold.reach.is_away
    store.close()


def test_what_a_store_without_a_mark_has_there_is_its_own(tmp_path: Path, disk: Path):
    """Slots that are known there show whose it is, and so an empty one is not taken for it."""
    store = opened(tmp_path / "a", disk / "cold")
    add(store, 1)
    tidied(store)
    store.close()
    shutil.rmtree(disk / "cold" / OWNER)
    (tmp_path / "a" / "cold.json").unlink()
    aside = disk.with_name("aside")
    (disk / "cold").rename(aside)
    store = opened(tmp_path / "a", disk / "cold")
    add(store, 2)
    tidied(store)
    assert (tier_of(store, 1), tier_of(store, 2)) == ("cold", "warm")
    assert store.cold is not None
    assert store.cold.reach.is_away
    aside.rename(disk / "cold")
    store.cold.probe()
    tidied(store)
    assert (disk / "cold" / OWNER / MARK).exists()
    assert bring(store, 1)
    store.close()


def test_a_full_cold_disk_is_full_until_it_takes_something(tmp_path: Path):
    gate = ColdGate(ColdDirectory(tmp_path / "cold"), claim(tmp_path, "a"))
    gate.put(slot_id(1), [b"one"])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, limits[1]))
    try:
        with pytest.raises(StoreFull):
            gate.put(slot_id(2), [bytes(4096)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert (gate.reach.is_full, gate.reach.is_away) == (True, False)
    with gate.get(slot_id(1)) as source:
        assert source.read() == b"one"
    gate.probe()
    assert gate.reach.is_full
    gate.put(slot_id(2), [bytes(4096)])
    assert not gate.reach.is_full
