"""What is tidied up in a store: turns that heal nothing any more, databases that were put aside."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.cache.maintenance import StoreLimits, tidy, usage_of
from runtime.cache.owned import INDEX, OpenStore
from runtime.cache.store_opening import open_store
from store import slots, turns
from store.clock import Trusted, TrustedClock
from store.conversations import Conversations
from store.disk import disk_bytes
from store.types import ConversationRow, SlotRow
from tests.slot_samples import publish_sample, slot_id

DAY_S = 86_400.0
MODEL = b"m" * 32
GONE = b"g" * 32
KEY, OTHER = b"\1" * 16, b"\2" * 16
LIMITS = StoreLimits(None, 10**9, 1e9)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[OpenStore]:
    """With one slot, where the conversation `KEY` ends."""
    one = open_store(tmp_path / "kv", None)
    path = publish_sample(one.root, 1)
    header, now_s = slots.read_header(path), one.clock.now_s()
    one.index.insert([SlotRow(header, disk_bytes(path), now_s)]).result()
    row = ConversationRow(
        key=KEY,
        model=MODEL,
        leaf=slot_id(1),
        num_tokens=header.end,
        last_used_s=now_s,
        created_s=now_s,
    )
    Conversations(one.database).advance(row).result()
    yield one
    one.close()


def spoken(store: OpenStore, model: bytes, name: str) -> Path:
    folder = turns.turns_root(store.root, model) / name
    folder.mkdir(parents=True)
    (folder / f"a{turns.SUFFIX}").write_bytes(b"x")
    return folder


def later(store: OpenStore, days: float) -> None:
    """So many days pass, and the store is looked after."""
    store.clock = TrustedClock(Trusted(store.clock.now_s() + days * DAY_S))
    list(tidy(store, LIMITS))


def test_turns_leave_long_after_what_they_heal(store: OpenStore):
    held = spoken(store, MODEL, KEY.hex())
    idle = [spoken(store, MODEL, name) for name in (OTHER.hex(), f"{turns.UNNAMED}a", "3" * 32)]
    orphans = [spoken(store, GONE, OTHER.hex()), spoken(store, b"h" * 32, KEY.hex())]
    for path in (held, *idle, *orphans):
        os.utime(path, (0, 0))  # what a wrong clock says of them is nothing to go by
    later(store, 0)
    later(store, 0.9)
    assert all(path.is_dir() for path in (held, *idle, *orphans))
    later(store, 0.2)
    assert not any(path.exists() for path in orphans)
    assert not orphans[-1].parent.exists()
    later(store, 88)
    (idle[0] / f"b{turns.SUFFIX}").write_bytes(b"x")
    later(store, 0)
    later(store, 2)
    assert [path.is_dir() for path in (held, *idle)] == [True, True, False, False]
    later(store, 89)
    assert [path.is_dir() for path in (held, *idle)] == [True, False, False, False]


def test_databases_put_aside_count_and_only_the_newest_stay(store: OpenStore):
    before = usage_of(store).other_bytes
    for number in range(3):
        path = store.root / f"{INDEX}.aside-{number}"
        path.write_bytes(bytes(5000))
        os.utime(path, (number, number))
    assert usage_of(store).other_bytes == before + 3 * 8192
    list(tidy(store, LIMITS))
    assert [path.name for path in sorted(store.root.glob("*.aside-*"))] == [
        f"{INDEX}.aside-1",
        f"{INDEX}.aside-2",
    ]


def test_ballast_leaves_room_below_a_small_cap(store: OpenStore):
    cap = 20_000_000
    list(tidy(store, StoreLimits(cap, 10**9, 1e9)))
    assert usage_of(store).other_bytes < cap / 2
