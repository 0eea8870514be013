"""The KV store in a server: whatever happens to it, requests are answered; caps and times hold."""

from __future__ import annotations

import asyncio
import resource
import shutil
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from runtime.cache.compaction import compact, plans
from runtime.cache.maintenance import (
    News,
    StoreLimits,
    expire,
    keep_within_caps,
    scrub,
    tidy,
    usage_of,
)
from runtime.cache.owned import OpenStore
from runtime.cache.service import KvStore
from runtime.errors import LoadFailed
from runtime.slot_events import HotBudget
from runtime.supervisor.placement import Profile
from runtime.supervisor.supervisor import Supervisor
from runtime.types import CacheParams, CacheUse, TokenPrompt
from store.disk import disk_bytes
from tests.asking import PATIENCE_S, PROBED_S, ask, supervising_with_store, worker_of
from tests.tiny_models import write_model
from tests.waiting import until

NUM_TOKENS = 1500
UNLIMITED = resource.RLIM_INFINITY
LIMITS = StoreLimits(None, 10**9, 0.0)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "m")
    write_model(folder / "other", seed=1)
    write_model(folder / "wide", head_dim=64)
    return folder


@pytest.fixture
def home(tmp_path: Path, models: Path) -> Path:
    (tmp_path / "models").symlink_to(models)
    return tmp_path


def serving(home: Path, **settings: Any) -> Any:
    return supervising_with_store(home, **({"kv_disk": True} | settings))


def prompt(seed: int, num_tokens: int = NUM_TOKENS) -> TokenPrompt:
    return TokenPrompt(token_ids=tuple(9 + (seed + i * 7919) % 400 for i in range(num_tokens)))


async def reused(
    supervisor: Supervisor, tokens: TokenPrompt, model: str = "m", **cache: Any
) -> CacheUse:
    wish = CacheParams(**cache)
    done = await ask(supervisor, tokens, model=model, max_tokens=2, cache=wish)
    return done.finished.usage.cache


async def saved(kv: KvStore, num_tokens: int = NUM_TOKENS) -> OpenStore:
    """Wait until the store has acknowledged so many tokens."""

    def is_there() -> bool:
        store = kv.store
        return store is not None and stored_tokens(store) >= num_tokens

    await until(is_there, f"{num_tokens} tokens are saved: {kv.status}")
    assert kv.store is not None
    return kv.store


def stored_tokens(store: OpenStore, tier: str = "warm") -> int:
    return sum(total.num_tokens for total in store.index.totals() if total.tier == tier)


def is_kept(use: CacheUse) -> bool:
    """It came from the disk, on demand or while nothing ran."""
    return use.tier in ("warm", "hot") and use.num_tokens >= NUM_TOKENS - 1


def files(home: Path) -> list[Path]:
    return sorted((home / "kv" / "slots").rglob("*.safetensors"))


async def repeat(kv: KvStore, work: Callable[[OpenStore], Iterable[News]], is_done: Any) -> None:
    """Do a chore until it had its effect."""
    async with asyncio.timeout(PATIENCE_S):
        while not is_done():
            await kv.chore(work)


# Trouble


async def test_the_directory_is_deleted_while_it_is_used(home: Path):
    async with serving(home) as (supervisor, kv):
        await reused(supervisor, prompt(1))
        await saved(kv)
        shutil.rmtree(home / "kv")
        assert (await reused(supervisor, prompt(1))).tier == "hot"
        assert (await reused(supervisor, prompt(2))).tier == "none"
        await until(lambda: kv.status.state == "degraded", "it is noticed")
        await until(lambda: kv.status.state == "ok", "it is made anew")
        await reused(supervisor, prompt(3))
        await saved(kv)
    async with serving(home) as (supervisor, kv):
        assert is_kept(await reused(supervisor, prompt(3)))


async def test_a_full_disk_degrades_the_cache_and_nothing_else(home: Path):
    async with serving(home) as (supervisor, kv):
        await reused(supervisor, prompt(1))
        await saved(kv)
        pid = worker_of(supervisor).pid
        assert pid is not None
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, UNLIMITED))
        assert (await reused(supervisor, prompt(2))).tier == "none"
        await until(lambda: kv.status.reason == "full", "it is noticed")
        assert (await reused(supervisor, prompt(2))).tier == "hot"
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (UNLIMITED, UNLIMITED))
        await until(lambda: kv.status.state == "ok", "it is tried again")


async def test_a_worker_that_cannot_write_is_no_healthy_store_however_often_it_is_tried(
    home: Path,
):
    async with serving(home) as (supervisor, kv):
        await reused(supervisor, prompt(1))
        store = await saved(kv)
        pid = worker_of(supervisor).pid
        assert pid is not None
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, UNLIMITED))
        with capture_logs() as logs:
            await reused(supervisor, prompt(2))
            await until(lambda: kv.status.state == "degraded", "it is noticed")
            num_unwritten = kv.figures().models["m"].num_unwritten
            await until(
                lambda: kv.figures().models["m"].num_unwritten >= num_unwritten + 2,
                "the worker has tried twice more",
            )
            assert kv.status.state == "degraded"
        assert not [log for log in logs if log["event"] == "store_works_again"]
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (UNLIMITED, UNLIMITED))
        await until(lambda: kv.status.state == "ok", "it works again", PROBED_S)
        # What could not be written is, though nobody asks for anything.
        await until(lambda: stored_tokens(store) >= 2 * NUM_TOKENS, "both prompts are saved")


async def test_a_store_that_cannot_be_opened_is_used_once_it_can(home: Path):
    (home / "kv").write_text("no directory")
    async with serving(home) as (supervisor, kv):
        assert (await reused(supervisor, prompt(1))).tier == "none"
        assert (await reused(supervisor, prompt(1))).tier == "hot"
        assert kv.status.state == "degraded"
        (home / "kv").unlink()
        await until(lambda: kv.status.state == "ok", "it is opened after all", PROBED_S)
        await saved(kv)
        assert (await reused(supervisor, prompt(1))).tier == "hot"


async def test_slots_cannot_be_written(home: Path):
    async with serving(home) as (supervisor, kv):
        await reused(supervisor, prompt(1))
        await saved(kv)
        (home / "kv" / "slots").rename(home / "kv" / "aside")
        (home / "kv" / "slots").write_text("no directory")
        assert (await reused(supervisor, prompt(2))).tier == "none"
        await until(lambda: kv.status.state == "degraded", "it is noticed")
        (home / "kv" / "slots").unlink()
        (home / "kv" / "aside").rename(home / "kv" / "slots")
        await until(lambda: kv.status.state == "ok", "it is tried again", PROBED_S)


@pytest.mark.parametrize("damage", ["corrupt", "missing"])
async def test_a_lost_index_is_rebuilt_from_the_slots(home: Path, damage: str):
    async with serving(home) as (supervisor, kv):
        await reused(supervisor, prompt(1))
    index = home / "kv" / "index.db"
    if damage == "corrupt":
        index.write_bytes(b"\xff" * 40_000)
    else:
        index.unlink()
    async with serving(home) as (supervisor, kv):
        await saved(kv)
        assert is_kept(await reused(supervisor, prompt(1)))


async def test_damaged_slots_are_a_miss_and_put_aside(home: Path):
    async with serving(home) as (supervisor, kv):
        await reused(supervisor, prompt(1))
    for path in files(home):
        data = bytearray(path.read_bytes())
        data[-100] ^= 1
        path.write_bytes(data)
    async with serving(home) as (supervisor, kv):
        use = await reused(supervisor, prompt(1))
        assert use.reason == "damaged"
        assert 0 < use.num_tokens < NUM_TOKENS - 1
        store = kv.store
        assert store is not None
        await until(lambda: store.counts["quarantined"], "it is put aside")
        await saved(kv)
    async with serving(home) as (supervisor, kv):
        assert is_kept(await reused(supervisor, prompt(1)))


# Chores


async def test_what_is_not_used_leaves_the_disk_in_time(home: Path):
    async with serving(home) as (supervisor, kv):
        await reused(supervisor, prompt(1), "other", ttl_s=0.1)
        await saved(kv)
        await reused(supervisor, prompt(2))
        store = await saved(kv, 2 * NUM_TOKENS)
        await repeat(kv, lambda s: expire(s, LIMITS), lambda: stored_tokens(store) < 2 * NUM_TOKENS)
        assert store.counts["evicted_expired"] > 0
        await until(lambda: len(files(home)) == len(store.index.places()), "files follow rows")
        assert (await reused(supervisor, prompt(1), "other")).tier == "none"


async def test_the_cap_counts_everything_over_all_models(home: Path):
    cap = 2_000_000
    async with serving(home, cache_max_bytes=cap) as (supervisor, kv):
        for model in ("m", "other"):
            for seed in range(3):
                await reused(supervisor, prompt(seed), model)
        store = await saved(kv)
        await until(lambda: store.counts["evicted_cap"], "something is evicted")
        work = partial(keep_within_caps, limits=StoreLimits(cap, 0, 0.0))

        def is_kept_to() -> bool:
            return sum(map(disk_bytes, files(home))) <= usage_of(store).fast_bytes <= cap

        await repeat(kv, work, is_kept_to)


async def test_unused_slots_rest_in_the_cold_store_and_come_back(home: Path):
    cold = home / "cold"
    async with serving(home, cold_store=str(cold)) as (supervisor, kv):
        await reused(supervisor, prompt(1), ttl_s=0.1)
        store = await saved(kv)
        limits = StoreLimits(None, 10**9, 1e6)
        await repeat(kv, lambda s: expire(s, limits), lambda: not stored_tokens(store))
        assert stored_tokens(store, "cold") >= NUM_TOKENS
        assert not files(home)
        assert list(cold.rglob("*.zst"))
    async with serving(home, cold_store=str(cold)) as (supervisor, kv):
        use = await reused(supervisor, prompt(1), ttl_s=0.1)
        assert (use.tier, use.num_tokens) == ("cold", NUM_TOKENS - 1)
        store = await saved(kv, NUM_TOKENS - 1)
        assert stored_tokens(store, "cold") < 10, "the answer was not asked for"
        await repeat(kv, lambda s: expire(s, limits), lambda: not stored_tokens(store))
        await repeat(kv, lambda s: expire(s, LIMITS), lambda: not store.index.places())


async def test_the_cap_holds_when_the_cold_store_fails(home: Path):
    (home / "cold").write_text("no directory")
    cap = 1_500_000
    async with serving(home, cache_max_bytes=cap, cold_store=str(home / "cold")) as (
        supervisor,
        kv,
    ):
        assert (await reused(supervisor, prompt(0))).tier == "none"
        # What is being written cannot be evicted: the others find something that can be.
        store = await saved(kv)
        for seed in (1, 2):
            assert (await reused(supervisor, prompt(seed))).tier == "none"
        await until(lambda: store.counts["evicted_cap"], "something is evicted")
        await until(lambda: usage_of(store).fast_bytes <= cap, "the cap holds")
        assert kv.status.state == "ok"


async def test_long_chains_become_short_and_are_still_found(home: Path):
    tokens = prompt(1, 4000).token_ids
    turns = [TokenPrompt(token_ids=tokens[:end]) for end in range(256, 3600, 256)]
    async with serving(home) as (supervisor, kv):
        for turn in turns:
            await reused(supervisor, turn)
        store = await saved(kv, len(turns[-1].token_ids))

        def is_done() -> bool:
            return not list(plans(store.index.all_slots(), ()))

        def merge(store: OpenStore) -> Iterable[News]:
            return compact(store, kv.loaded_models, lambda: False)

        assert not is_done()
        await repeat(kv, merge, is_done)
        assert store.counts["compacted"] > 16
        assert len(store.replaced) > 16, "who reads them gets to the end"
        longer = TokenPrompt(token_ids=tokens[:3650])
        use = await reused(supervisor, longer)
        assert (use.tier, use.num_tokens >= len(turns[-1].token_ids) - 1) == ("hot", True)
        await saved(kv, 3650)
        await repeat(kv, merge, lambda: len(files(home)) == len(store.index.places()))
        assert len(files(home)) < 12
        await reused(supervisor, prompt(2), "other")
        use = await reused(supervisor, TokenPrompt(token_ids=tokens[:3700]))
        assert use.num_tokens >= len(longer.token_ids) - 1
        assert use.tier in ("warm", "hot")


async def test_scrubbing_finds_damage_before_it_is_wanted(home: Path):
    async with serving(home) as (supervisor, kv):
        await reused(supervisor, prompt(1))
        store = await saved(kv)
        path = files(home)[0]
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        await repeat(
            kv, lambda s: scrub(s, 1e9, lambda: False), lambda: store.counts["quarantined"]
        )
        await kv.chore(lambda store: tidy(store, LIMITS))
        assert kv.status.state == "ok"


async def test_a_slot_of_a_newer_format_is_neither_used_nor_removed(home: Path):
    async with serving(home) as (supervisor, kv):
        await reused(supervisor, prompt(1))
        store = await saved(kv)
        path = files(home)[0]
        path.write_bytes(path.read_bytes().replace(b"hearth-slot/2", b"hearth-slot/3", 1))
        before = path.read_bytes()
        assert store.drop_bad(path.stem) == ()
        await kv.chore(lambda s: scrub(s, 1e9, lambda: False))
        assert path.read_bytes() == before
        assert store.counts["quarantined"] == 0


async def test_when_enough_was_written_today_the_disk_rests(home: Path):
    async with serving(home, kv_daily_write_bytes=100_000) as (supervisor, kv):
        with capture_logs() as logged:
            await reused(supervisor, prompt(1))
            store = await saved(kv, 1)  # all of it, unless the news of enough came in between
            rests = {"event": "daily_writes_used_up", "log_level": "warning"}
            await until(lambda: any(rests.items() <= one.items() for one in logged), "the news")
        await reused(supervisor, prompt(2))
        await until(lambda: kv.figures().models["m"].num_unwritten, "slots are not written")
        assert (await reused(supervisor, prompt(2))).tier == "hot"
        assert stored_tokens(store) <= NUM_TOKENS + 2  # the answer's two; nothing of the second
        assert kv.status.state == "ok"


# Quantised KV


@pytest.mark.soak
async def test_quantised_kv_survives_too_and_is_not_mixed_up(home: Path):
    for bits, is_known in ((8, False), (8, True), (None, False), (8, True)):
        async with serving(home, kv_bits=bits) as (supervisor, _):
            assert is_kept(await reused(supervisor, prompt(1), "wide")) is is_known


async def test_heads_that_cannot_be_quantised_are_refused_at_load(home: Path):
    async with serving(home, kv_bits=4) as (supervisor, _):
        with pytest.raises(LoadFailed, match="groups of 64, and this model's heads have 16"):
            await reused(supervisor, prompt(1))


async def test_what_runs_needed_is_remembered_over_restarts(home: Path):
    async with serving(home) as (supervisor, _):
        await ask(supervisor, prompt(1), model="m", max_tokens=2)
    async with serving(home) as (supervisor, kv):
        row = (await kv.remembered())["m"]
        assert row.load_ms is not None
        assert row.load_ms > 0
        profile = Profile.of(supervisor.status()[0].spec, row)
        assert (profile.load_ms, profile.peak_bytes) == (row.load_ms, row.peak_bytes)


async def test_a_hot_tier_takes_what_it_is_given(home: Path):
    async with serving(home) as (supervisor, kv):
        await ask(supervisor, prompt(1), model="m", max_tokens=2)
        spec = supervisor.status()[0].spec
        given, unsaid = kv.channel(spec, HotBudget(num_bytes=12345)), kv.channel(spec)
        assert (await given.options()).hot_bytes == 12345
        assert (await unsaid.options()).hot_bytes > 12345
