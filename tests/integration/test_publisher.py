"""What is staged for a conversation that is being deleted."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from runtime.cache.channel import KvChannel
from runtime.cache.lifecycle import StoreLife
from runtime.cache.owned import OpenStore
from runtime.cache.publisher import Publisher
from runtime.cache.service import KvStore
from runtime.cache.worker_channel import Report
from runtime.config.settings import Settings
from runtime.slot_events import (
    Attach,
    Forget,
    Forgotten,
    KvNews,
    RoomGiven,
    SlotQueued,
    SlotsGone,
    SlotStaged,
)
from runtime.types import ModelSpec
from store import slots
from store.keyed_names import Asker, Chain, Whom
from tests.asking import PATIENCE_S
from tests.slot_samples import sample, slot_id
from tests.waiting import until


class Desk(KvStore):
    """A store with one worker, which the test speaks for."""

    def __init__(self, home: Path) -> None:
        settings = Settings(home=home)
        super().__init__(settings)
        self.life = StoreLife[OpenStore](self, has_disk=True)
        self.told: list[KvNews | RoomGiven] = []
        spec = ModelSpec(id="m", path="m", context=1, model_type="m", nbytes=1, created_s=0)
        self.worker = KvChannel(self, spec)
        self.worker.model_hash = b"m"
        self.unnamed = KvChannel(self, spec)
        """One more, whose model nobody knows yet; it is opened where it is wanted."""
        self.workers = {self.worker}
        self.publisher = Publisher(self.life, self.workers, lambda: None)
        self.worker.open(self.told.append)

    def join(self, channel: KvChannel) -> None:
        """Nothing is on disk yet."""

    @property
    def forgets(self) -> list[Forget]:
        return [one for one in self.told if isinstance(one, Forget)]

    def leave(self, channel: KvChannel) -> None:
        self.workers.discard(channel)

    def hear(self, channel: KvChannel, event: Report) -> None:
        assert isinstance(event, SlotStaged)
        self.publisher.take(channel, event)


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    one = Desk(tmp_path)
    one.life.start()
    await one.life.settled.wait()
    await one.worker.told()
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


async def test_what_was_staged_without_a_session_id_is_published_before_a_chain_is_deleted(
    desk: Desk,
):
    """Whose its tokens are is told by its rows: it may be of another conversation."""
    store = desk.life.store
    assert store is not None
    header, token_ids, tensors = sample(1)
    staged = slots.stage(store.root, header, token_ids, tensors)
    busy = threading.Event()
    other = asyncio.create_task(desk.life.attempt(lambda _: busy.wait()))
    deleting = asyncio.create_task(desk.publisher.forget(Whom(model="m", chain=Chain(b""))))
    await until(lambda: desk.told, "the worker is told to forget")
    [forget] = [one for one in desk.told if isinstance(one, Forget)]
    desk.worker.on_event(SlotStaged(header, str(staged.path), staged.num_bytes, Asker("m")))
    desk.worker.on_event(Forgotten(number=forget.number, num_forgotten=0))
    await turns_of_the_loop()
    is_early = deleting.done()
    busy.set()
    assert not is_early
    await asyncio.gather(deleting, other)
    assert [place.id for place in store.index.places()] == [slot_id(1)]


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


async def test_publishing_that_broke_off_leaves_nothing_of_a_chain_and_nobody_waiting(desk: Desk):
    def fail() -> None:
        raise RuntimeError("the first group was one too many")

    desk.publisher = Publisher(desk.life, desk.workers, fail)
    store = desk.life.store
    assert store is not None
    header, token_ids, tensors = sample(1)
    staged = slots.stage(store.root, header, token_ids, tensors)
    busy = threading.Event()
    other = asyncio.create_task(desk.life.attempt(lambda _: busy.wait()))
    await turns_of_the_loop()
    desk.worker.on_event(staged_by_another(store.root))
    await turns_of_the_loop()
    desk.worker.on_event(SlotStaged(header, str(staged.path), staged.num_bytes, Asker("m")))
    deleting = asyncio.create_task(desk.publisher.forget(Whom(model="m", chain=Chain(b""))))
    await until(lambda: desk.forgets, "the worker is told to forget")
    desk.worker.on_event(Forgotten(number=desk.forgets[0].number, num_forgotten=0))
    await turns_of_the_loop()
    busy.set()
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(deleting, other)
    assert not staged.path.exists()


async def test_a_client_that_leaves_while_something_is_noted_disturbs_nobody_else(desk: Desk):
    store, written = desk.life.store, threading.Event()
    assert store is not None
    before = store.database.submit(lambda _: written.wait(PATIENCE_S))
    desk.publisher.note(desk.worker, SlotQueued(slot_id(1), Asker("m"), ()))
    leaving, staying = (asyncio.create_task(desk.publisher.noted()) for _ in range(2))
    await turns_of_the_loop()
    leaving.cancel()
    await turns_of_the_loop()
    written.set()
    async with asyncio.timeout(PATIENCE_S):
        await staying
        await desk.publisher.noted()
    assert before.result()
    assert leaving.cancelled()


async def test_who_deletes_does_not_wait_for_a_worker_that_has_ended(desk: Desk):
    deleting = asyncio.create_task(desk.publisher.forget(Whom(session_id="mine")))
    await until(lambda: desk.forgets, "the worker is told to forget")
    desk.worker.close()
    await turns_of_the_loop()
    assert deleting.done()
    assert await deleting == (0, False)


async def test_a_worker_that_is_loading_is_told_and_has_nothing_to_forget(desk: Desk):
    told: list[KvNews | RoomGiven] = []
    desk.worker.close()
    desk.workers.add(desk.unnamed)
    desk.unnamed.open(told.append)
    assert await desk.publisher.forget(Whom(session_id="mine")) == (0, False)
    assert [one.whom for one in told if isinstance(one, Forget)] == [Whom(session_id="mine")]


@pytest.mark.parametrize("model", [b"m", b"other", None])
async def test_a_worker_without_a_name_is_told_of_deleted_weights_once_it_has_one(
    desk: Desk, model: bytes | None
):
    """Before that nobody can say whether it is meant, or if it never has one: then it may be."""
    told: list[KvNews | RoomGiven] = []
    desk.worker.close()
    desk.workers.add(desk.unnamed)
    before = desk.receive()
    await desk.publisher.forget(Whom(), {b"m"})
    desk.unnamed.open(told.append)
    await desk.unnamed.told()
    deleting = asyncio.create_task(desk.publisher.forget(Whom(), {b"m"}))
    await turns_of_the_loop()
    assert not told
    assert not deleting.done()
    names = Attach(model_hash=model or b"", secret=b"")
    if model is None:
        desk.unnamed.is_nameless()
    else:
        desk.unnamed.attach(names)
    is_meant = model != b"other"
    assert [one.number for one in told if isinstance(one, Forget)] == ([1, 2] if is_meant else [])
    assert told[2 if is_meant else 0 :] == ([names] if model is not None else [])
    if is_meant:
        desk.unnamed.on_event(Forgotten(number=2, num_forgotten=3))
    assert await deleting == (3 if is_meant else 0, False)
    assert before.number == 0


async def test_a_stuck_worker_is_owed_no_more_than_so_many_deletions(desk: Desk):
    """In the end it is told that all was deleted, and until then nothing of it is taken."""
    store = desk.life.store
    assert store is not None
    deleting = [
        asyncio.create_task(desk.publisher.forget(Whom(session_id=str(number))))
        for number in range(150)
    ]
    await turns_of_the_loop()
    assert len(desk.forgets) == 100
    header, token_ids, tensors = sample(1)
    staged = slots.stage(store.root, header, token_ids, tensors)
    told = SlotStaged(header, str(staged.path), staged.num_bytes, Asker("m", "another"))
    desk.worker.on_event(told)
    await until(lambda: not staged.path.exists(), "it is turned away")
    for one in desk.forgets:
        desk.worker.on_event(Forgotten(number=one.number, num_forgotten=1))
    assert [(one.number, one.whom) for one in desk.forgets[100:]] == [(150, Whom())]
    assert desk.worker.is_forgotten(Asker("m", "another"))
    desk.worker.on_event(Forgotten(number=150, num_forgotten=1))
    assert not desk.worker.is_forgotten(Asker("m", "another"))
    done = await asyncio.gather(*deleting)
    assert [one.is_pending for one in done] == [False] * 100 + [True] * 49 + [False]
