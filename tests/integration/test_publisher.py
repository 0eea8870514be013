"""What is staged for a conversation that is being deleted."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from runtime.kv_channel import KvChannel, KvEvent
from runtime.kv_store import KvStore
from runtime.publisher import Publisher
from runtime.settings import Settings
from runtime.slot_news import Attach, SlotsGone
from runtime.store_life import StoreLife
from runtime.types import ModelSpec
from runtime.wire import Forget, Forgotten, KvNews, RoomGiven, SlotStaged
from store import slots
from store.keyed_names import Asker, Whom
from tests.slot_samples import sample, slot_id
from tests.waiting import until


class Desk(KvStore):
    """A store with one worker, which the test speaks for."""

    def __init__(self, home: Path) -> None:
        settings = Settings(home=home)
        super().__init__(settings)
        self.life = StoreLife(settings, self)
        self.told: list[KvNews | RoomGiven] = []
        spec = ModelSpec(id="m", path="m", context=1, model_type="m", nbytes=1, created_s=0)
        self.worker = KvChannel(self, spec)
        self.worker.names = Attach(model_hash=b"m", secret=b"")
        self.workers = {self.worker}
        self.publisher = Publisher(self.life, self.workers, lambda: None)
        self.worker.open(self.told.append)

    def join(self, channel: KvChannel) -> None:
        """Nothing is on disk yet."""

    def leave(self, channel: KvChannel) -> None:
        self.workers.discard(channel)

    def hear(self, channel: KvChannel, event: KvEvent) -> None:
        assert isinstance(event, SlotStaged)
        self.publisher.hear(channel, event)


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    one = Desk(tmp_path)
    one.life.start()
    await one.life.settled.wait()
    yield one
    await one.life.close()


async def turns_of_the_loop() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def staged_by_another(root: Path) -> SlotStaged:
    header, token_ids, tensors = sample(2)
    staged = slots.stage(root, header, token_ids, tensors)
    return SlotStaged(header, str(staged.path), staged.num_bytes, Asker("m", "another"))


async def test_deleting_ends_when_what_was_staged_meanwhile_is_gone(desk: Desk):
    store = desk.life.store
    assert store is not None
    header, token_ids, tensors = sample(1)
    staged = slots.stage(store.root, header, token_ids, tensors)
    deleting = asyncio.create_task(desk.publisher.forget(Whom(session_id="mine")))
    await until(lambda: desk.told, "the worker is told to forget")
    [forget] = [one for one in desk.told if isinstance(one, Forget)]
    busy = threading.Event()
    other = asyncio.create_task(desk.life.attempt(lambda _: busy.wait()))
    await turns_of_the_loop()
    desk.worker.on_event(SlotStaged(header, str(staged.path), staged.num_bytes, Asker("m", "mine")))
    desk.worker.on_event(Forgotten(number=forget.number, num_forgotten=1))
    await turns_of_the_loop()
    is_early = deleting.done()
    busy.set()
    assert not is_early
    await asyncio.gather(deleting, other)
    assert not staged.path.exists()
    assert [one.ids for one in desk.told if isinstance(one, SlotsGone)] == [(slot_id(1),)]


async def test_what_a_worker_left_behind_is_deleted_as_well(desk: Desk):
    store = desk.life.store
    assert store is not None
    header, token_ids, tensors = sample(1)
    staged = slots.stage(store.root, header, token_ids, tensors)
    busy = threading.Event()
    other = asyncio.create_task(desk.life.attempt(lambda _: busy.wait()))
    await turns_of_the_loop()
    desk.worker.on_event(staged_by_another(store.root))
    await turns_of_the_loop()
    desk.worker.on_event(SlotStaged(header, str(staged.path), staged.num_bytes, Asker("m", "mine")))
    desk.worker.close()
    deleting = asyncio.create_task(desk.publisher.forget(Whom(session_id="mine")))
    busy.set()
    await asyncio.gather(deleting, other)
    assert not staged.path.exists()
    assert [place.id for place in store.index.places()] == [slot_id(2)]
