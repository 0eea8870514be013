"""Chores of a store, each in a process of its own that is made to be killed.

A conversation has a model of its own, and the KV of a token is a hash of where it stands, so what
is left of it after a kill can be checked without the store.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import structlog

from runtime.cache.compaction import compact
from runtime.cache.maintenance import StoreLimits, expire, keep_within_caps, scrub, tidy, usage_of
from runtime.cache.owned import INDEX, OpenStore
from runtime.cache.store_opening import open_store
from runtime.slot_events import SlotStaged
from store import slots
from store.clock import Trusted, TrustedClock
from store.conversations import Conversations
from store.disk import disk_bytes, make_directory
from store.recovery import Recovery, never_stop
from store.slots import StagedSlot
from store.types import ConversationRow, SlotHeader, SlotRow, TensorData
from tests import slot_samples

SLOT_TOKENS = 6
BLOCK_SIZE = 4
FEW_BYTES = 16_000


class Told(NamedTuple):
    """A conversation: its slots follow one another; the last are the most recently used."""

    model: bytes
    num_slots: int
    has_state: bool = False

    @property
    def num_tokens(self) -> int:
        return self.num_slots * SLOT_TOKENS

    def token_ids(self, start: int, end: int) -> list[int]:
        return slot_samples.token_ids(self.model[0], self.num_tokens)[start:end]

    def tensors(self, start: int, end: int) -> dict[str, bytes]:
        """What a slot of these tokens has to hold, by the tensor's name."""
        ids = list(enumerate(self.token_ids(start, end), start))
        held = {
            f"kv.{layer}": b"".join(slot_samples.row(layer, at, one) for at, one in ids)
            for layer in range(2)
        }
        if self.has_state:
            held["state"] = b"".join(slot_samples.row(layer, end, ids[-1][1]) for layer in (7, 8))
        return held


LONG, THINNED, SHORT = Told(b"a" * 32, 19), Told(b"b" * 32, 18, has_state=True), Told(b"c" * 32, 4)
ALL = (LONG, THINNED, SHORT)


def cold_of(root: Path) -> Path:
    """The cold store lies on another disk, as it would be."""
    return root.with_name("elsewhere")


def opened(root: Path) -> OpenStore:
    return open_store(root, str(cold_of(root)))


def key_of(store: OpenStore, told: Told) -> bytes:
    return store.conversation_key(told.model.decode())


def slot_name(told: Told, number: int) -> str:
    return slot_samples.slot_id(told.model[0] * 1000 + number)


def _staged(store: OpenStore, told: Told, number: int) -> tuple[SlotHeader, StagedSlot]:
    start, end = number * SLOT_TOKENS, (number + 1) * SLOT_TOKENS
    header = SlotHeader(
        id=slot_name(told, number),
        model=told.model,
        start_hash=_end_hash(told, number - 1) if number else b"",
        start=start,
        end=end,
        block_size=BLOCK_SIZE,
        block_hashes=tuple(
            bytes([told.model[0], block] * 8)
            for block in range(start // BLOCK_SIZE, end // BLOCK_SIZE)
        ),
        end_hash=_end_hash(told, number),
        layout="{}",
        has_state=told.has_state,
        recompute_ms=10.0,
        created_s=store.clock.now_s(),
        ttl_s=3600.0,
    )
    tensors = [
        TensorData(key, "U8", (SLOT_TOKENS if key != "state" else 2, 32), memoryview(data))
        for key, data in told.tensors(start, end).items()
    ]
    return header, slots.stage(store.root, header, told.token_ids(start, end), tensors)


def _end_hash(told: Told, number: int) -> bytes:
    return bytes([told.model[0], number] * 8)


def _slot(store: OpenStore, told: Told, number: int) -> SlotRow:
    header, staged = _staged(store, told, number)
    path = slots.publish(staged)
    used_s = store.clock.now_s() - 600.0 + ALL.index(told) * 100
    return SlotRow(header=header, disk_bytes=disk_bytes(path), last_used_s=used_s)


def fill(root: Path) -> None:
    """Make a store of all that was told, closed as it should be."""
    make_directory(cold_of(root))
    store = opened(root)
    for told in ALL:
        rows = [_slot(store, told, number) for number in range(told.num_slots)]
        store.index.insert(rows).result()
        Conversations(store.database).advance(
            ConversationRow(
                key=key_of(store, told),
                model=told.model,
                leaf=rows[-1].header.id,
                num_tokens=told.num_tokens,
                last_used_s=rows[-1].last_used_s,
                created_s=rows[-1].last_used_s,
                ttl_s=3600.0,
                num_turns=told.num_slots,
            )
        ).result()
    store.close()


def _done(news: Iterable[object]) -> None:
    for _ in news:
        pass


def _merge(store: OpenStore) -> None:
    """The first time the files stay, as one model is loaded; the second time they go."""
    _done(compact(store, lambda: {THINNED.model}, never_stop))
    _done(compact(store, lambda: (), never_stop))


def _continue(store: OpenStore) -> None:
    """A slot is staged, what it continues is merged, and then it is published."""
    number, last = LONG.num_slots - 1, store.index.slots_of(LONG.model)[-1].header
    if last.end == LONG.num_tokens:
        return
    header, staged = _staged(store, LONG, number)
    _merge(store)
    told = SlotStaged(header=header, path=str(staged.path), num_bytes=staged.num_bytes)
    assert store.publish([told]).saved


def _tight(store: OpenStore) -> StoreLimits:
    """A tenth of it has to go."""
    return StoreLimits(usage_of(store).fast_bytes - 1, 1 << 40, 1e9)


def _evict(store: OpenStore) -> None:
    """Without a cold store."""
    store.cold = None
    _done(keep_within_caps(store, _tight(store)))


def _demote(store: OpenStore) -> None:
    _done(keep_within_caps(store, _tight(store)))


def _expire(store: OpenStore) -> None:
    """Everything is over: half of it was cold already and goes for good."""
    store.clock = TrustedClock(Trusted(store.clock.now_s() + 7200.0))
    _done(expire(store, StoreLimits(1 << 40, 1 << 40, 3600.0)))


def _evict_cold(store: OpenStore) -> None:
    _done(
        keep_within_caps(store, StoreLimits(1 << 40, usage_of(store).cold_bytes - FEW_BYTES, 1e9))
    )


def _promote(store: OpenStore) -> None:
    for place in store.index.places():
        if place.tier == "cold":
            store.promote(place.id)


def _rebuild(store: OpenStore) -> None:
    Recovery(store.root, store.database, store.cold, time.time()).run()


def _scrub(store: OpenStore) -> None:
    _done(scrub(store, 7 * 86_400.0, never_stop))
    _done(tidy(store, StoreLimits(None, 1 << 40, 1e9)))


def _lose_index(root: Path) -> None:
    for path in root.glob(f"{INDEX}*"):
        path.unlink()


def _spoil_index(root: Path) -> None:
    with (root / INDEX).open("r+b") as file:
        file.write(bytes(200))


def _spoil_slot(root: Path) -> None:
    path = slots.slot_path(root, slot_name(SHORT, 1))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _shorten(root: Path) -> None:
    """The last slot of a chain is yet to be written."""
    store = opened(root)
    store.drop([slot_name(LONG, LONG.num_slots - 1)])
    store.close()


def _cool(root: Path) -> None:
    """Some of everything lies in the cold store."""
    store = opened(root)
    for told in ALL:
        for number in range(told.num_slots // 2, told.num_slots):
            store.demote(slot_name(told, number))
    store.close()


def _cool_and_lose_index(root: Path) -> None:
    _cool(root)
    _lose_index(root)


def _nothing(_: object) -> None:
    pass


class Chore(NamedTuple):
    """What is done to a store that `prepare` made ready.

    `is_opening`: opening it is part of it; `finds_damage`, so before it was done some is there;
    what it `adds` is there when it was done.
    """

    run: Callable[[OpenStore], None]
    prepare: Callable[[Path], None] = _nothing
    is_opening: bool = False
    finds_damage: bool = False
    adds: bool = False


CHORES = {
    "merge": Chore(_merge),
    "continue": Chore(_continue, _shorten, adds=True),
    "evict": Chore(_evict),
    "demote": Chore(_demote),
    "promote": Chore(_promote, _cool),
    "expire": Chore(_expire, _cool),
    "evict_cold": Chore(_evict_cold, _cool),
    "scrub": Chore(_scrub, _spoil_slot, finds_damage=True),
    "open_lost": Chore(_nothing, _lose_index, is_opening=True),
    "open_spoilt": Chore(_nothing, _spoil_index, is_opening=True),
    "rebuild": Chore(_rebuild, _cool_and_lose_index),
}


def copied(original: Path, folder: Path) -> Path:
    """A copy of a store with its cold store, in a folder of its own."""
    root = folder / original.name
    shutil.copytree(original, root)
    shutil.copytree(cold_of(original), cold_of(root))
    return root


def perform(name: str, root: Path, on_ready: Callable[[], None] = lambda: None) -> None:
    """Do a chore from the beginning to the end."""
    chore = CHORES[name]
    if chore.is_opening:
        on_ready()
        opened(root).close()
        return
    store = opened(root)
    on_ready()
    chore.run(store)
    store.close()


def main(name: str, root: Path, parent: Connection) -> None:
    """As a process: say which threads there are, and begin when told."""
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())

    def ready() -> None:
        parent.send({thread.name: thread.native_id for thread in threading.enumerate()})
        parent.recv()

    perform(name, root, ready)
