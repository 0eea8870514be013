"""The disk is within its cap at every moment, as somebody outside sees it."""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
from array import array
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from migrations.run import downgrade
from runtime.cache.channel import KvChannel
from runtime.cache.service import KvStore
from runtime.cache.store_opening import open_store
from runtime.config.settings import Settings
from runtime.kv.room import UNBOUNDED, AskedRoom
from runtime.kv.writer import Packed, SlotWriter, WriteFailed, WriteJob
from runtime.prompt.healing import TurnScope
from runtime.slot_events import (
    KvNews,
    PinWanted,
    RoomGiven,
    RoomLeft,
    RoomWanted,
    SlotsGone,
    SlotsSaved,
    SlotStaged,
)
from runtime.types import ModelSpec
from runtime.worker.input.turns import TurnStore
from store.file_kinds import INDEX as INDEX_KIND
from store.keyed_names import Asker
from store.slots import StagedSlot
from store.turns import Turn, turns_root
from store.types import SlotHeader, TensorData
from tests.disk_observer import Observer, bytes_at_once
from tests.slot_samples import slot_id
from tests.waiting import until

MODEL = b"m" * 32
BLOCK_TOKENS = 256

Step = tuple[str, int]

writes = st.tuples(st.sampled_from(["write", "write", "continue", "pin"]), st.integers(0, 400))
others = st.tuples(st.sampled_from(["turn", "delete", "use", "wait"]), st.integers(0, 40))
scenarios = st.lists(st.one_of(writes, others), min_size=4, max_size=40)
caps = st.sampled_from([1_000_000, 1_300_000, 2_000_000, 4_000_000])


class OneWorker(KvStore):
    """A store with one worker, of which only the threads that write are there."""

    def __init__(
        self, home: Path, cap_bytes: int, *, asks: bool = True, num_before: int = 0
    ) -> None:
        super().__init__(Settings(home=home, cache_max_bytes=cap_bytes))
        self.root = home / "kv"
        self.fates: dict[str, str] = {}
        self._headers: list[SlotHeader] = []
        self.num_put = self.num_before = num_before
        self._loop = asyncio.get_running_loop()
        self._room = AskedRoom(self._say)
        room = self._room if asks else UNBOUNDED
        self._writer = SlotWriter(self.root, 1 << 30, self._on_staged, self._on_failed, room)
        self._writer.set_idle(is_idle=True)
        self._turns = TurnStore(room=room)
        self._threads = [threading.Thread(target=one.run) for one in (self._writer, self._turns)]
        spec = ModelSpec(id="m", path="m", context=1, model_type="m", nbytes=1, created_s=0)
        self._channel = KvChannel(self, spec)
        self._channel.model_hash = MODEL

    async def __aenter__(self) -> OneWorker:
        self.start()
        await self.settled()
        self._channel.open(self._told)
        self._turns.attach(turns_root(self.root, MODEL), b"secret")
        for one in self._threads:
            one.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()
        self._turns.close()
        for one in self._threads:
            await asyncio.to_thread(one.join)
        await asyncio.sleep(0)
        self._channel.close()
        await self.stop()

    def join(self, channel: KvChannel) -> None:
        """Nothing is on disk yet."""

    def _say(self, told: RoomWanted | RoomLeft | SlotStaged | PinWanted) -> None:
        self._loop.call_soon_threadsafe(self._channel.on_event, told)

    def _told(self, news: KvNews | RoomGiven) -> None:
        match news:
            case RoomGiven():
                self._room.hear(news)
            case SlotsSaved(ids=ids):
                self.fates |= dict.fromkeys(ids, "saved")
            case SlotsGone(ids=ids):
                self.fates |= dict.fromkeys(ids, "gone")
            case _:
                pass

    def _on_staged(self, job: WriteJob, staged: StagedSlot) -> None:
        path, size = str(staged.path), staged.num_bytes
        self._say(SlotStaged(header=job.header, path=path, num_bytes=size, asker=job.asker))

    def _on_failed(self, failure: WriteFailed) -> None:
        self.fates[failure.slot_id] = failure.reason

    async def do(self, step: Step) -> None:
        """Begin what a step says; only "wait" waits until all that was begun is over."""
        kind, number = step
        done = [one for one, fate in self.fates.items() if fate == "saved"]
        chosen = done[number % len(done)] if done else None
        match kind:
            case "turn":
                ids = array("I", range(number * 100 + 1)).tobytes()
                talk = TurnScope(Asker(session_id=str(number % 3)))
                self._turns.put(Turn(os.urandom(16), b"", 0, ids), talk, is_durable=True)
            case "delete" if chosen is not None:
                await self.tend(lambda store, _: store.drop([chosen]))
            case "use" if chosen is not None:
                await self.tend(lambda store, _: store.touch([chosen]))
            case "wait":
                await self.is_over()
            case "write" | "continue" | "pin":
                parent = self._parent() if kind == "continue" else None
                job = job_of(self.num_put, number, parent)
                self._headers.append(job.header)
                self.num_put += 1
                self._writer.put(job)
                if kind == "pin":
                    self._say(PinWanted(end_hash=job.header.end_hash, source="operator"))
            case _:
                pass

    async def is_over(self) -> None:
        await until(
            lambda: len(self.fates) == self.num_put - self.num_before, "all are saved or refused"
        )

    def _parent(self) -> SlotHeader | None:
        return self._headers[-1] if self._headers else None


def job_of(number: int, num_kilobytes: int, parent: SlotHeader | None) -> WriteJob:
    start = parent.end if parent is not None else 0
    end = start + BLOCK_TOKENS
    header = SlotHeader(
        id=slot_id(number),
        model=MODEL,
        start_hash=parent.end_hash if parent is not None else b"",
        start=start,
        end=end,
        block_size=BLOCK_TOKENS,
        block_hashes=(number.to_bytes(16, "little"),),
        end_hash=number.to_bytes(16, "big"),
        layout='{"layers":["sliced"]}',
        has_state=False,
        recompute_ms=1.0 + number % 7,
        created_s=1.0,
    )
    data = memoryview(os.urandom(BLOCK_TOKENS * (1 + 4 * num_kilobytes)))
    tensors = [TensorData("kv.0", "U8", (BLOCK_TOKENS, 1 + 4 * num_kilobytes), data)]
    asker = Asker("m", str(number % 3))
    before = parent.id if parent is not None else None
    packed = Packed(header.layout, tensors)
    return WriteJob(header, array("I", range(BLOCK_TOKENS)), packed, asker, parent=before)


async def lived(home: Path, cap_bytes: int, steps: list[Step], *, asks: bool = True) -> Observer:
    """What somebody outside saw while this was done."""
    async with OneWorker(home, cap_bytes, asks=asks) as store:
        with Observer(store.root) as observer:
            for step in steps:
                await store.do(step)
            await store.is_over()
    return observer


@settings(max_examples=15)
@given(cap_bytes=caps, steps=scenarios)
def test_nobody_ever_sees_more_on_the_disk_than_the_cap(cap_bytes: int, steps: list[Step]):
    with tempfile.TemporaryDirectory() as folder:
        observer = asyncio.run(lived(Path(folder), cap_bytes, steps))
        assert observer.num_looks > 0
        assert observer.most_bytes <= cap_bytes
        assert bytes_at_once(Path(folder) / "kv") <= cap_bytes


@pytest.mark.soak
@settings(max_examples=300, derandomize=False)
@given(cap_bytes=caps, steps=scenarios)
def test_nobody_ever_sees_more_than_the_cap_in_many_lives(cap_bytes: int, steps: list[Step]):
    with tempfile.TemporaryDirectory() as folder:
        assert asyncio.run(lived(Path(folder), cap_bytes, steps)).most_bytes <= cap_bytes


async def test_who_writes_without_asking_is_seen(tmp_path: Path):
    """The observer can fail."""
    observer = await lived(tmp_path, 1_000_000, [("write", 200)] * 20, asks=False)
    assert observer.most_bytes > 1_000_000


async def test_what_cannot_be_made_to_fit_is_refused_and_counted(tmp_path: Path):
    async with OneWorker(tmp_path, 1_000_000) as store:
        await store.do(("write", 10))
        await store.is_over()
        await store.do(("write", 2000))
        await store.do(("continue", 10))
        await store.is_over()
        assert store.fates == {slot_id(0): "saved", slot_id(1): "cap", slot_id(2): "saved"}
        assert store.figures().store["refused_cap"] == 1


async def test_what_is_continued_is_not_evicted_for_what_continues_it(tmp_path: Path):
    async with OneWorker(tmp_path, 1_000_000) as store:
        for _ in range(12):
            await store.do(("continue", 100))
            await store.is_over()
        fates = list(store.fates.values())
        assert fates == sorted(fates, key=["saved", "cap", "gone"].index)
        assert "saved" in fates
        assert "cap" in fates


@pytest.mark.parametrize("version", [6, INDEX_KIND.version - 1])
async def test_an_index_is_copied_before_an_upgrade_within_the_cap(tmp_path: Path, version: int):
    async with OneWorker(tmp_path, 1_000_000) as store:
        while "cap" not in store.fates.values():
            await store.do(("pin", 0))
            await store.is_over()
        num_put = store.num_put
    with closing(open_store(tmp_path / "kv", None)) as older:
        older.database.submit(lambda one: downgrade(one, version)).result()
    with Observer(tmp_path / "kv") as observer:
        async with OneWorker(tmp_path, 1_000_000, num_before=num_put) as store:
            await store.do(("write", 0))
            await store.is_over()
    assert list((tmp_path / "kv").glob("*.aside-schema-*"))
    assert observer.most_bytes <= 1_000_000


async def test_under_a_lowered_cap_the_disk_holds_less_and_less_until_it_is_kept(tmp_path: Path):
    async with OneWorker(tmp_path, 4_000_000) as store:
        for _ in range(20):
            await store.do(("write", 100))
        await store.is_over()
    before = bytes_at_once(tmp_path / "kv")
    assert before > 2_000_000
    with Observer(tmp_path / "kv") as observer:
        async with OneWorker(tmp_path, 2_000_000, num_before=40) as store:
            for _ in range(3):
                await store.do(("write", 100))
            await store.is_over()
            await until(lambda: bytes_at_once(tmp_path / "kv") <= 2_000_000, "the cap")
    log_bytes = 512 << 10
    assert observer.most_bytes <= before + log_bytes
