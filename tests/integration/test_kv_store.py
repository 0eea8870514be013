"""The KV store in a server: whatever happens to it, requests are answered; its cap holds."""

from __future__ import annotations

import resource
import shutil
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from runtime.cache.service import KvStore
from runtime.errors import LoadFailed
from runtime.kv_messages import HotBudget
from runtime.supervisor.placement import Profile
from runtime.types import CacheUse
from tests.asking import PROBED_S, worker_of
from tests.integration.test_kv_blocks_kept import (
    NUM_TOKENS,
    OVERHEAD_BYTES,
    kept,
    prompt,
    reused,
    serving,
)
from tests.tiny_models import write_model
from tests.waiting import until

UNLIMITED = resource.RLIM_INFINITY
NUM_BLOCKS = NUM_TOKENS // 256


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


def is_kept(use: CacheUse) -> bool:
    """It came from the disk, on demand or while nothing ran."""
    return use.tier in ("warm", "hot") and use.num_tokens >= NUM_TOKENS - 1


def num_slots(kv: KvStore) -> int:
    """How many slots are on the fast disk."""
    assert kv.store is not None
    totals = kv.store.totals().items()
    return sum(num for (_, tier), (num, _, _) in totals if tier == "warm")


# Trouble


async def test_the_directory_is_deleted_while_it_is_used(home: Path):
    async with serving(home) as (supervisor, kv):
        await reused(supervisor, prompt(1))
        await kept(kv)
        shutil.rmtree(home / "kv")
        assert (await reused(supervisor, prompt(1))).tier == "hot"
        assert (await reused(supervisor, prompt(2))).tier == "none"
        await until(lambda: kv.status.state == "degraded", "it is noticed")
        await until(lambda: kv.status.state == "ok", "it is made anew")
        await reused(supervisor, prompt(3))
        await kept(kv)
    async with serving(home) as (supervisor, kv):
        assert is_kept(await reused(supervisor, prompt(3)))


async def test_a_full_disk_degrades_the_cache_and_nothing_else(home: Path):
    async with serving(home) as (supervisor, kv):
        await reused(supervisor, prompt(1))
        await kept(kv)
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
        await kept(kv)
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
        await until(lambda: num_slots(kv) == 2 * NUM_BLOCKS, "both prompts are saved")


async def test_a_store_that_cannot_be_opened_is_used_once_it_can(home: Path):
    (home / "kv").write_text("no directory")
    async with serving(home) as (supervisor, kv):
        assert (await reused(supervisor, prompt(1))).tier == "none"
        assert (await reused(supervisor, prompt(1))).tier == "hot"
        assert kv.status.state == "degraded"
        (home / "kv").unlink()
        await until(lambda: kv.status.state == "ok", "it is opened after all", PROBED_S)
        await until(lambda: num_slots(kv) == NUM_BLOCKS, "it is saved")
        assert (await reused(supervisor, prompt(1))).tier == "hot"


async def test_slots_cannot_be_written(home: Path):
    async with serving(home) as (supervisor, kv):
        await reused(supervisor, prompt(1))
        await kept(kv)
        (home / "kv" / "slots").rename(home / "kv" / "aside")
        (home / "kv" / "slots").write_text("no directory")
        assert (await reused(supervisor, prompt(2))).tier == "none"
        await until(lambda: kv.status.state == "degraded", "it is noticed")
        (home / "kv" / "slots").unlink()
        (home / "kv" / "aside").rename(home / "kv" / "slots")
        await until(lambda: kv.status.state == "ok", "it is tried again", PROBED_S)


@pytest.mark.parametrize("damage", ["corrupt", "missing"])
async def test_a_lost_index_is_rebuilt_from_the_files(home: Path, damage: str):
    async with serving(home) as (supervisor, kv):
        await reused(supervisor, prompt(1))
    index = home / "kv" / "index.db"
    if damage == "corrupt":
        index.write_bytes(b"\xff" * 40_000)
    else:
        index.unlink()
    async with serving(home) as (supervisor, kv):
        await kept(kv)
        assert is_kept(await reused(supervisor, prompt(1)))


# What it may take


async def test_the_cap_counts_everything_over_all_models(home: Path):
    async with serving(home) as (supervisor, kv):
        await reused(supervisor, prompt(0))
        await kept(kv)
        assert kv.store is not None
        cap = OVERHEAD_BYTES + 3 * kv.store.room.bytes_of(kv.store.heads.known)
    async with serving(home, cache_max_bytes=cap) as (supervisor, kv):
        for model in ("m", "other"):
            for seed in range(4):
                await reused(supervisor, prompt(seed), model)
                assert kv.store is not None
                assert kv.store.used_bytes() <= cap
        assert kv.store is not None
        assert kv.store.counts["evicted_cap"] > 0
    async with serving(home, cache_max_bytes=cap) as (supervisor, kv):
        assert is_kept(await reused(supervisor, prompt(3), "other"))
        left = [(await reused(supervisor, prompt(seed))).num_tokens for seed in range(4)]
        assert min(left) < NUM_TOKENS - 256


async def test_when_enough_was_written_today_the_disk_rests(home: Path):
    async with serving(home, kv_daily_write_bytes=100_000) as (supervisor, kv):
        await reused(supervisor, prompt(1))
        await reused(supervisor, prompt(2))
        await until(lambda: kv.figures().models["m"].num_unwritten, "slots are not written")
        assert (await reused(supervisor, prompt(2))).tier == "hot"
        assert num_slots(kv) < 2 * NUM_BLOCKS
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
        await reused(supervisor, prompt(1))
    async with serving(home) as (supervisor, kv):
        row = (await kv.remembered())["m"]
        assert row.load_ms is not None
        assert row.load_ms > 0
        profile = Profile.of(supervisor.status()[0].spec, row)
        assert (profile.load_ms, profile.peak_bytes) == (row.load_ms, row.peak_bytes)


async def test_a_hot_tier_takes_what_it_is_given(home: Path):
    async with serving(home) as (supervisor, kv):
        await reused(supervisor, prompt(1))
        spec = supervisor.status()[0].spec
        given, unsaid = kv.channel(spec, HotBudget(num_bytes=12345)), kv.channel(spec)
        assert (await given.options()).hot_bytes == 12345
        assert (await unsaid.options()).hot_bytes > 12345
