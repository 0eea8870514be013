"""A disk that lost much: each damaged slot costs itself, and not all others once more."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from runtime.cache.channel import KvChannel
from runtime.cache.service import KvStore
from runtime.config.settings import Settings
from runtime.slot_events import KvNews, RoomGiven, SlotBad, Slots, SlotsGone
from runtime.types import ModelSpec
from store.types import SlotRow
from tests.slot_samples import publish_sample, sample, slot_id
from tests.waiting import until

NUM_SLOTS = 60


class Served:
    """A store of slots, whose files are not there but for one, and a worker that knows them."""

    def __init__(self, home: Path) -> None:
        self.kv = KvStore(Settings(home=home))
        self.told: list[KvNews | RoomGiven] = []
        spec = ModelSpec(id="m", path="m", context=1, model_type="m", nbytes=1, created_s=0)
        self.worker = KvChannel(self.kv, spec)

    async def start(self) -> None:
        self.kv.start()
        await self.kv.settled(60)
        assert self.kv.store is not None
        headers = [sample(number)[0] for number in range(NUM_SLOTS + 1)]
        publish_sample(self.kv.store.root, NUM_SLOTS)
        rows = [SlotRow(header=header, disk_bytes=1, last_used_s=1.0) for header in headers]
        self.kv.store.index.insert(rows).result()
        self.worker.open(self.told.append)
        self.worker.kv = msgspec.structs.replace(self.worker.kv, block_size=4)
        self.worker.model_hash = b"m" * 32

    def find_all_bad(self) -> None:
        for number in range(NUM_SLOTS):
            self.worker.on_event(SlotBad(slot_id(number), "damaged", "holes"))

    def ids_gone(self) -> set[str]:
        return {one for news in self.told if isinstance(news, SlotsGone) for one in news.ids}

    def times_told_all(self) -> int:
        return sum(isinstance(news, Slots) for news in self.told)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    one = Served(tmp_path)
    await one.start()
    yield one
    await one.kv.stop()


async def test_workers_are_told_what_is_left_now_and_then_and_not_for_each(served: Served):
    served.find_all_bad()
    await until(lambda: len(served.ids_gone()) == NUM_SLOTS, "the worker hears of each")
    store = served.kv.store
    assert store is not None
    assert [place.id for place in store.index.places()] == [slot_id(NUM_SLOTS)]
    await served.kv.stop()
    assert served.times_told_all() < NUM_SLOTS / 2


async def test_a_server_that_stops_leaves_them_to_the_next(served: Served):
    store = served.kv.store
    assert store is not None
    served.find_all_bad()
    await until(served.ids_gone, "the worker hears of one")
    await served.kv.stop()
    assert 0 < len(served.ids_gone()) < NUM_SLOTS
