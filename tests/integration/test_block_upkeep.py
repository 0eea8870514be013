"""What is done now and then to what is kept by blocks, and what is told of it: real files."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from api.jobs import Jobs
from runtime.cache.contents import KvContents
from runtime.cache.figures import WrittenGroup
from runtime.cache.opened import INDEX, BlockStore
from runtime.cache.service import KvStore
from runtime.cache.verification import StoredFile, Verified, verify
from runtime.config.settings import Settings
from runtime.errors import StoreUnavailable
from runtime.kv_messages import MemoryAsked
from runtime.progress import Progress, unwatched
from store import clock, upkeep
from store.head_file import Head, KnownHead, Owner, write_head
from store.heads import Published
from store.kv_file import Tensor
from store.slots import BlockKey, SlotAbout
from store.temp_names import temp_name
from store.types import RequestRow
from tests.integration.test_kv_blocks_kept import kept, prompt, reused, serving
from tests.tiny_models import write_model
from tests.waiting import until

BLOCK = 16
NUM_BLOCKS = 5
"""Whole ones of each prompt that a worker is asked."""

MODEL, OTHER = b"m" * 16, b"o" * 16
DAY_S = 86_400.0


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "m")
    return folder


@pytest.fixture
def home(tmp_path: Path, models: Path) -> Path:
    (tmp_path / "models").symlink_to(models)
    return tmp_path


@asynccontextmanager
async def opened(
    home: Path, **settings: Any
) -> AsyncGenerator[tuple[KvStore, BlockStore, KvContents]]:
    """A store without workers."""
    chosen = Settings(home=home, block_size=BLOCK, **settings)
    kv = KvStore(chosen)
    kv.start()
    await kv.settled()
    assert kv.store is not None
    try:
        yield kv, kv.store, KvContents(kv, kv.settings)
    finally:
        await kv.stop()


def put_slots(
    store: BlockStore, tokens: list[int], model: bytes = MODEL, num_bytes: int = 4096
) -> list[BlockKey]:
    names = store.chain_of(model).block_hashes(tokens)
    for number, name in enumerate(names):
        kv = Tensor("k", "U8", (num_bytes,), bytes(num_bytes))
        own = tokens[number * BLOCK :][:BLOCK]
        store.slots.put(SlotAbout(model, name), own, [kv])
    return [BlockKey(model, one) for one in names]


def put(
    store: BlockStore,
    seed: int,
    session: bytes = b"s",
    *,
    ttl_s: float | None = None,
    num_bytes: int = 4096,
) -> KnownHead:
    """A conversation of four blocks of so many bytes that is not shared."""
    tokens = [seed * 100 + i for i in range(4 * BLOCK)]
    put_slots(store, tokens, num_bytes=num_bytes)
    owner = Owner(b"asked", session, b"")
    head = Head(uuid4().hex, MODEL, owner, len(tokens), "m", ttl_s=ttl_s)
    staged = store.heads.staging_path()
    write_head(staged, head, tokens)
    published = store.heads.publish(staged, 0)
    assert isinstance(published, Published)
    return published.known


def never() -> bool:
    return False


async def do(contents: KvContents, name: str, is_busy: bool = False) -> None:
    await {one.name: one for one in contents.jobs(lambda: is_busy)}[name].run()


def dead_name(of: str) -> str:
    """How a process that is dead calls what it has not finished."""
    program = "import sys; from store.temp_names import *; print(temp_name(sys.argv[1]), end='')"
    asked = [sys.executable, "-c", program, of]
    return subprocess.run(asked, check=True, capture_output=True, text=True).stdout


def make(path: Path, age_s: float = 0.0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("canary")
    age(path, age_s)
    return path


def age(path: Path, age_s: float) -> None:
    written_s = time.time() - age_s
    os.utime(path, (written_s, written_s))


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def disk_bytes(root: Path) -> int:
    return sum(one.stat().st_blocks * 512 for one in root.rglob("*") if one.is_file())


async def test_who_listens_is_told_what_was_written(home: Path):
    told: list[WrittenGroup] = []
    began_ns = time.time_ns()
    async with serving(home) as (supervisor, kv):
        kv.listen(told.append)
        await reused(supervisor, prompt(1), session_id="one")
        await kept(kv)
        await until(lambda: sum(one.num_slots for one in told) >= NUM_BLOCKS, "it was told")
        num_told = len(told)
        await reused(supervisor, prompt(1), session_id="two")
        await kept(kv, 2)
        await until(lambda: len(told) > num_told, "the second head was told")
        assert sum(one.num_slots for one in told) == NUM_BLOCKS
        assert told[0].num_bytes > 0
        for one in told:
            assert began_ns <= one.start_ns <= one.end_ns <= time.time_ns()
    async with serving(home, kv_disk=False) as (supervisor, kv):
        kv.listen(told.append)
        num_told = len(told)
        await reused(supervisor, prompt(1))
        assert len(told) == num_told


async def test_each_worker_is_asked_once_what_it_has_of_all(home: Path):
    async with serving(home) as (supervisor, kv):
        for seed in (1, 2, 3):
            await reused(supervisor, prompt(seed), session_id=str(seed))
        await kept(kv, 3)
        (channel,) = kv.loaded()
        send, asked = channel.send, list[object]()
        assert send is not None

        def listening(news: Any) -> None:
            asked.append(news)
            send(news)

        channel.send = listening
        assert kv.store is not None
        ends = {one: known.head.num_tokens for one, known in kv.store.heads.known.items()}
        assert await kv.memory.num_held(ends) == ends
        assert await kv.memory.num_held(["nobody"]) == {}
        assert len([one for one in asked if isinstance(one, MemoryAsked)]) == 1


async def test_jobs_end_what_is_over_and_keep_the_time(home: Path):
    async with opened(home) as (kv, store, contents):
        put(store, 1, b"goes", ttl_s=0.2)
        stays = put(store, 2, b"stays")
        began = store.database.read(clock.load)
        await until(lambda: bool(store.heads.idle()), "it is over")
        jobs = Jobs(contents.jobs, lambda: True)
        jobs.start()
        try:
            await until(lambda: len(store.slots.found()) == 4, "its slots went")
            await until(lambda: store.database.read(clock.load) != began, "the time was kept")
        finally:
            jobs.stop()
        assert store.database.read(clock.load).trusted_s > began.trusted_s
        assert [*store.heads.known] == [stays.head.id]
        assert kv.status.state == "ok"


async def test_what_takes_too_much_leaves(home: Path):
    async with opened(home) as (_, store, contents):
        for seed in range(1, 9):
            put(store, seed, bytes([seed]), num_bytes=1 << 18)  # far more than the index takes
        most_bytes = store.heads.kept.warm_bytes
    async with opened(home, cache_max_bytes=most_bytes) as (_, store, contents):
        assert store.room.used_bytes() > most_bytes
        await do(contents, "caps")
        assert store.room.used_bytes() <= store.room.warm_bytes
        assert 0 < len(store.slots.found()) < 32


async def test_what_an_earlier_release_left_counts_and_makes_way_first(home: Path):
    aside = home / "kv" / "format-2"
    async with opened(home) as (_, store, contents):
        put(store, 1)
        used_bytes = store.room.used_bytes()
        (aside / "slots").mkdir(parents=True)
        (aside / "slots" / "old").write_bytes(bytes(4 << 20))
    async with opened(home, cache_max_bytes=used_bytes + (8 << 20)) as (_, store, contents):
        assert store.room.used_bytes() > 4 << 20
        await do(contents, "caps")
        assert aside.exists()
        wanted_bytes = store.room.spare_bytes() + (1 << 20)
        assert store.room.allow("worker", wanted_bytes) == wanted_bytes
        assert not aside.exists()
        assert len(store.slots.found()) == 4


async def test_tidying_removes_what_nobody_finishes_and_nothing_else(home: Path):
    async with opened(home) as (_, store, contents):
        put(store, 1)
        root, slots = store.root, store.root / "slots" / MODEL.hex()
        dead = [root / "heads" / dead_name("head"), slots / dead_name("slot")]
        for path in dead:
            make(path, age_s=3600.0)
        stays = [
            make(root / "heads" / dead_name("young")),  # it may be on its way to be published
            make(root / "heads" / temp_name("mine"), age_s=3600.0),
            make(slots / temp_name("mine"), age_s=3600.0),
        ]
        asides = [make(root / f"{INDEX}.aside-{n}", age_s=100.0 - n) for n in range(4)]
        before = sorted(one for one in root.rglob("*.safetensors") if one not in dead)
        await do(contents, "tidy")
        assert not any(one.exists() for one in dead)
        assert all(one.exists() for one in stays)
        assert [one.exists() for one in asides] == [False, False, True, True]
        assert sorted(root.rglob("*.safetensors")) == before


async def test_the_ballast_is_part_of_what_the_store_takes(home: Path):
    most_bytes = 64 << 20
    async with opened(home, cache_max_bytes=most_bytes) as (kv, store, contents):
        put(store, 1)
        num_bytes = upkeep.ballast_bytes(most_bytes)
        assert 0 < store.room.used_bytes() < num_bytes
        await do(contents, "tidy")
        ballast = store.root / upkeep.BALLAST
        assert ballast.stat().st_size == num_bytes
        assert store.room.used_bytes() > num_bytes
        assert not store.room.allowed.total()
        kv.on_full()
        await until(lambda: not ballast.exists(), "it is given up where the disk is full")
    async with opened(home, cache_max_bytes=most_bytes) as (_, store, contents):
        store.room.allowed["worker"] = store.room.spare_bytes() - (1 << 20)
        await do(contents, "tidy")
        assert not ballast.exists()
        assert store.room.spare_bytes() >= 0
        assert len(store.slots.found()) == 4


async def test_scrubbing_reads_all_files_one_after_the_other(home: Path):
    async with opened(home) as (_, store, contents):
        heads = [put(store, seed, bytes([seed])) for seed in (1, 2)]
        num_files = 8 + 2
        await do(contents, "scrub", is_busy=True)
        assert store.counts["scrubbed_bytes"] == 0
        for _ in range(num_files):
            await do(contents, "scrub")
        files = [*(store.root / "slots").rglob("*.safetensors")]
        files += [one.path for one in heads if one.path is not None]
        assert len(files) == num_files
        assert store.counts["scrubbed_bytes"] == sum(one.stat().st_blocks * 512 for one in files)
        slot, head = files[3], files[-1]
        for path in (slot, head):
            damage(path)
        for _ in range(num_files):
            await do(contents, "scrub")
        assert not slot.exists()
        assert not head.exists()
        assert [*store.heads.known] == [heads[0].head.id]


async def test_the_names_that_leave_with_a_damaged_head_are_told(home: Path):
    async with opened(home) as (_, store, _contents):
        known, stays = put(store, 1, b"one"), put(store, 2, b"two")
        names = {*store.heads.kept.chain(known.last)}
        assert known.path is not None
        damage(known.path)
        read = verify(store, StoredFile("head", None, known.head.id))
        assert (read.found, {*read.gone}) == ("damaged", names)
        assert verify(store, StoredFile("head", None, known.head.id)) == Verified("whole", 0)
        assert [*store.heads.known] == [stays.head.id]
        assert not names & store.slots.found().keys()


async def test_old_slots_without_a_head_go(home: Path):
    async with opened(home) as (_, store, contents):
        put(store, 1)
        old, young = put_slots(store, [*range(7000, 7000 + 2 * BLOCK)], OTHER)
        age(store.slots.path(old), 2 * 3600.0)
        await do(contents, "orphans")
        assert not store.slots.has(old)
        assert store.slots.has(young)
        assert len(store.slots.found()) == 5
        assert store.heads.unowned_bytes == sum(store.slots.disk_bytes(young))


async def test_what_a_loaded_model_has_without_a_head_stays_for_a_day(home: Path):
    async with serving(home, block_size=BLOCK) as (supervisor, kv):
        await reused(supervisor, prompt(1, 100), session_id="one")
        await kept(kv)
        store, contents = kv.store, KvContents(kv, kv.settings)
        assert store is not None
        (model,) = kv.loaded_models()
        own, old = put_slots(store, [*range(7000, 7000 + 2 * BLOCK)], model)
        age(store.slots.path(own), 2 * 3600.0)
        age(store.slots.path(old), 2 * DAY_S)
        await do(contents, "orphans")
        assert (store.slots.has(own), store.slots.has(old)) == (True, False)


async def test_who_asks_has_all_of_it_done_and_is_told_what_came_of_it(home: Path):
    async with opened(home) as (_, store, contents):
        put(store, 1, b"goes", ttl_s=0.0)
        put(store, 2, b"stays")
        (old,) = put_slots(store, [*range(7000, 7000 + BLOCK)], OTHER, 4 << 20)
        age(store.slots.path(old), 2 * 3600.0)
        make(store.root / "heads" / dead_name("head"), age_s=3600.0)
        store.keep_ballast()
        await until(lambda: bool(store.heads.idle()), "it is over")
        told: list[Progress] = []
        folders = [store.root / "slots", store.root / "heads"]
        before = sum(map(disk_bytes, folders))
        done = await contents.collect(told.append, never)
        assert [one.step for one in told] == ["expire", "agree", "tidy", "caps", "done"]
        assert (told[-1].num_done, told[-1].num_total) == (4, 4)
        assert (done.num_dropped, done.num_demoted) == (5, 0)
        index_bytes = 1 << 20  # its log may grow and be cut
        freed = before - sum(map(disk_bytes, folders))
        assert freed > 4 << 20
        assert abs(done.freed_bytes - freed) < index_bytes
        assert len(store.slots.found()) == 4
        with pytest.raises(StoreUnavailable):
            await contents.collect(unwatched, lambda: True)


async def test_deleting_everything_leaves_no_trace_of_what_was_asked(home: Path):
    async with opened(home) as (_, store, contents):
        put(store, 1)
        row = RequestRow(
            id="r",
            model="canary",
            finished_s=1.0,
            num_prompt_tokens=1,
            num_cached_tokens=0,
            num_output_tokens=1,
            tier="none",
            reason="",
            finish_reason="stop",
            queue_ms=0.0,
            restore_ms=0.0,
            prefill_ms=0.0,
            decode_ms=0.0,
        )
        store.records.add_requests([row], store.clock.now_s()).result()
        await contents.count({"told": 1.0})
        traces = [
            make(store.root / f"{INDEX}.aside-1"),
            make(store.root / f"{INDEX}.aside-1-wal"),
        ]
        removed = await contents.remove_all()
        assert (removed.num_conversations, removed.num_slots) == (1, 4)
        assert removed.is_cut
        assert not any(one.exists() for one in traces)
        assert store.records.requests() == []
        assert store.records.counters() == {}
