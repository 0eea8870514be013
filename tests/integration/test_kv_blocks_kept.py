"""KV by blocks with real workers and a real server: kept, found, deleted, and never mixed up."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from runtime.cache.service import KvStore
from runtime.config.settings import Settings
from runtime.kv_messages import HotBudget
from runtime.models.catalog import Catalog
from runtime.supervisor.supervisor import Supervisor
from runtime.types import CacheParams, CacheUse, TokenPrompt
from store.head_file import KnownHead
from store.keyed_names import Whom
from store.slots import BlockKey
from tests.asking import PATIENCE_S, answer, ask, request, worker_of
from tests.tiny_models import write_model
from tests.waiting import until

OVERHEAD_BYTES = 500_000
"""What a small store takes beside slots and heads: its index, the log of that, and ballast."""

NUM_TOKENS = 1500


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "m")
    write_model(folder / "other", seed=1)
    return folder


@pytest.fixture
def home(tmp_path: Path, models: Path) -> Path:
    (tmp_path / "models").symlink_to(models)
    return tmp_path


@asynccontextmanager
async def serving(home: Path, **settings: Any) -> AsyncGenerator[tuple[Supervisor, KvStore]]:
    fields: dict[str, Any] = {
        "preload": (),
        "stop_timeout_s": 5.0,
        "spare_worker": False,
        "max_loaded_models": 1,
    }
    chosen = Settings(home=home, **(fields | settings))
    kv = KvStore(chosen)
    supervisor = Supervisor(chosen, Catalog(chosen, hub_cache=home / "hub"), kv)
    kv.start()
    await supervisor.start()
    try:
        yield supervisor, kv
    finally:
        await supervisor.stop()
        await kv.stop()


def prompt(seed: int, num_tokens: int = NUM_TOKENS) -> TokenPrompt:
    return TokenPrompt(token_ids=tuple(9 + (seed + i * 7919) % 400 for i in range(num_tokens)))


async def reused(
    supervisor: Supervisor, tokens: TokenPrompt, model: str = "m", **cache: Any
) -> CacheUse:
    wish = CacheParams(**cache)
    done = await ask(supervisor, tokens, model=model, max_tokens=2, cache=wish)
    return done.finished.usage.cache


def num_heads(kv: KvStore) -> int:
    return len(kv.store.heads.known) if kv.store is not None else 0


async def kept(kv: KvStore, num: int = 1) -> None:
    await until(lambda: num_heads(kv) >= num, f"{num} heads are kept: {kv.status}")


async def test_a_restart_takes_up_all_of_it(home: Path):
    async with serving(home) as (supervisor, kv):
        assert (await reused(supervisor, prompt(1))).tier == "none"
        await kept(kv)
    async with serving(home) as (supervisor, kv):
        use = await reused(supervisor, prompt(1))
        assert (use.tier, use.num_tokens) == ("warm", NUM_TOKENS - 1)


async def test_a_kill_costs_less_than_a_block(home: Path):
    async with serving(home, prewarm_share=0.0) as (supervisor, kv):
        await reused(supervisor, prompt(1))
        await kept(kv)
        pid = worker_of(supervisor).pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        use = await reused(supervisor, prompt(1))
        assert use.tier == "warm"
        assert use.num_tokens >= NUM_TOKENS - 256


async def test_what_a_worker_staged_and_could_not_tell_goes_with_it(home: Path):
    program = "from store.temp_names import temp_name; print(temp_name('head'), end='')"
    async with serving(home) as (supervisor, kv):
        await reused(supervisor, prompt(1))
        await kept(kv)
        dead = await asyncio.to_thread(
            subprocess.run, [sys.executable, "-c", program], check=True, capture_output=True
        )
        assert kv.store is not None
        staged = kv.store.root / "heads" / dead.stdout.decode()
        staged.write_bytes(b"said")
        pid = worker_of(supervisor).pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await until(lambda: not staged.exists(), "it is removed")
        assert num_heads(kv) == 1


async def test_what_goes_on_after_a_kill_stays_one_conversation(home: Path):
    async with serving(home) as (supervisor, kv):
        await reused(supervisor, prompt(1))
        await kept(kv)
        assert kv.store is not None
        [head_id] = kv.store.heads.known
        _, said, _ = kv.store.heads.read(head_id)
        pid = worker_of(supervisor).pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        longer = TokenPrompt(token_ids=(*said, *prompt(2, 600).token_ids))
        assert (await reused(supervisor, longer)).num_tokens >= NUM_TOKENS - 256
        num = len(longer.token_ids) + 2

        def there() -> list[int]:
            assert kv.store is not None
            return [one.head.num_tokens for one in [*kv.store.heads.known.values()]]

        await until(lambda: there() == [num], f"it is one: {there()}")


async def test_a_swap_brings_it_back(home: Path):
    async with serving(home) as (supervisor, kv):
        await reused(supervisor, prompt(1))
        await kept(kv)
        assert (await reused(supervisor, prompt(1), model="other")).tier == "none"
        use = await reused(supervisor, prompt(1))
        assert (use.tier, use.num_tokens) == ("warm", NUM_TOKENS - 1)


async def test_what_is_deleted_is_neither_on_disk_nor_in_memory(home: Path):
    async with serving(home) as (supervisor, kv):
        await reused(supervisor, prompt(1), session_id="goes")
        await reused(supervisor, prompt(2), session_id="stays")
        await kept(kv, 2)
        assert (await kv.delete(Whom(session_id="goes"))).num_pieces is not None
        assert num_heads(kv) == 1
        assert (await reused(supervisor, prompt(1))).num_tokens == 0
        assert (await reused(supervisor, prompt(2))).tier == "hot"
    async with serving(home) as (supervisor, kv):
        await reused(supervisor, prompt(2), session_id="stays")


async def test_a_request_that_came_before_the_deletion_leaves_nothing(home: Path):
    async with serving(home) as (supervisor, kv):
        await reused(supervisor, prompt(3), session_id="first")
        wish = CacheParams(session_id="goes")
        asking = asyncio.create_task(ask(supervisor, prompt(1), max_tokens=400, cache=wish))
        await until(lambda: worker_of(supervisor).num_running, "it is computed")
        await kv.delete(Whom(session_id="goes"))
        await asking
        await reused(supervisor, prompt(2), session_id="stays")
        await kept(kv, 2)
        assert kv.store is not None
        assert {one.head.num_tokens for one in kv.store.heads.known.values()} == {NUM_TOKENS + 2}
        assert (await reused(supervisor, prompt(1), session_id="new")).num_tokens == 0


async def test_nobody_finds_what_was_deleted_while_it_waited_for_its_model(home: Path):
    async with serving(home) as (supervisor, kv):
        goes = CacheParams(session_id="goes")
        waiting = supervisor.submit(request(prompt(1), max_tokens=2, cache=goes))
        await kv.delete(Whom(session_id="goes"))
        other = CacheParams(session_id="other")
        behind = supervisor.submit(request(prompt(1), max_tokens=2, cache=other))
        await answer(waiting)
        use = (await answer(behind)).finished.usage.cache
        assert (use.tier, use.num_tokens) == ("none", 0)


@pytest.mark.parametrize("num_pauses", [0, 3, 10, 30])
async def test_of_what_is_deleted_while_it_is_written_no_slot_stays(home: Path, num_pauses: int):
    async with serving(home, block_size=16) as (supervisor, kv):
        assert (await reused(supervisor, prompt(2), session_id="goes")).tier == "none"
        for _ in range(num_pauses):  # writing comes a little further each time
            await kv.loaded()[0].in_memory(())
        await kv.delete(Whom(session_id="goes"))
        assert [*(home / "kv" / "slots").rglob("*.safetensors")] == []
        assert num_heads(kv) == 0


async def test_without_a_disk_it_is_in_memory_and_deleted_there(home: Path):
    async with serving(home, kv_disk=False) as (supervisor, kv):
        await reused(supervisor, prompt(1), session_id="goes")
        use = await reused(supervisor, prompt(1), session_id="other")
        assert (use.tier, use.num_tokens) == ("hot", NUM_TOKENS - 1)
        await kv.delete(Whom(session_id="goes"))
        assert (await reused(supervisor, prompt(1), session_id="third")).tier == "hot"
        await kv.delete(Whom())
        assert (await reused(supervisor, prompt(1))).num_tokens == 0


async def test_a_damaged_slot_costs_its_block_and_is_written_again(home: Path):
    async with serving(home) as (supervisor, kv):
        await reused(supervisor, prompt(1))
        await kept(kv)
        assert kv.store is not None
        (known,) = kv.store.heads.known.values()
        chain = [*kv.store.heads.kept.chain(known.last)][::-1]
        damaged = kv.store.slots.path(chain[2])
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    async with serving(home) as (supervisor, kv):
        use = await reused(supervisor, prompt(1))
        assert use.num_tokens == NUM_TOKENS - 1 - 256
        await until(damaged.exists, "it is written again")
        assert kv.store is not None
        assert kv.store.slots.read(chain[2], prompt(1).token_ids[512:768]) is not None
        assert kv.store.counts["evicted_damaged"] == 1


async def test_a_cap_holds_and_what_was_used_last_stays(home: Path):
    async with serving(home) as (supervisor, kv):
        await reused(supervisor, prompt(0))
        await kept(kv)
        assert kv.store is not None
        cap_bytes = OVERHEAD_BYTES + 3 * kv.store.room.bytes_of(kv.store.heads.known)
    async with serving(home, cache_max_bytes=cap_bytes) as (supervisor, kv):
        for seed in range(1, 6):
            await reused(supervisor, prompt(seed))
            assert kv.store is not None
            (channel,) = kv.loaded()
            chain = kv.store.chain_of(channel.model_hash)
            names = chain.block_hashes(prompt(seed).token_ids, root=chain.root_of(""))
            last, blocks = BlockKey(channel.model_hash, names[-1]), kv.store.heads.kept.blocks
            await until(lambda last=last, blocks=blocks: last in blocks, "it is published")
            assert kv.store.room.used_bytes() <= cap_bytes
    async with serving(home, cache_max_bytes=cap_bytes) as (supervisor, _):
        assert (await reused(supervisor, prompt(5))).tier == "warm"
        left = [(await reused(supervisor, prompt(seed))).num_tokens for seed in range(5)]
        assert min(left) < NUM_TOKENS - 256


async def test_what_rests_in_the_cold_store_comes_back(home: Path):
    cold = str(home / "cold")
    async with serving(home, cold_store=cold) as (supervisor, kv):
        await reused(supervisor, prompt(1), ttl_s=1.0)
        await kept(kv)
        store = kv.store
        assert store is not None
        await until(store.heads.idle, "it is idle")
        await kv.chore(lambda one: one.room.keep())
        assert not list((home / "kv" / "slots").rglob("*.safetensors"))
    async with serving(home, cold_store=cold) as (supervisor, kv):
        use = await reused(supervisor, prompt(1))
        assert use.tier == "cold"
        assert use.num_tokens >= NUM_TOKENS - 256


async def test_tenants_share_nothing_and_a_private_turn_leaves_nothing(home: Path):
    async with serving(home) as (supervisor, kv):
        await reused(supervisor, prompt(1), tenant="one")
        assert (await reused(supervisor, prompt(1), tenant="other")).num_tokens == 0
        await reused(supervisor, prompt(2), ttl_s=0.0)
        await kept(kv, 3)
    async with serving(home) as (supervisor, kv):
        assert (await reused(supervisor, prompt(1), tenant="one")).tier == "warm"
        assert (await reused(supervisor, prompt(2))).num_tokens == 0


async def test_a_store_that_fails_for_a_while_costs_nothing_but_time(home: Path):
    async with serving(home) as (supervisor, kv):
        heads = home / "kv" / "heads"
        await reused(supervisor, prompt(0))
        await kept(kv)
        heads.chmod(0o500)
        heads.rename(heads.with_name("elsewhere"))
        heads.write_text("in its place")
        await reused(supervisor, prompt(1))
        await until(lambda: kv.status.state == "degraded", "it is noticed")
        assert (await reused(supervisor, prompt(1))).tier == "hot"
        heads.unlink()
        heads.with_name("elsewhere").rename(heads)
        heads.chmod(0o700)
        await until(lambda: kv.status.state == "ok", "it works again")
        await reused(supervisor, prompt(2))
        await kept(kv, 2)


async def test_what_is_in_memory_of_a_conversation_is_told_and_brought_back(home: Path):
    async with serving(home) as (supervisor, kv):
        await reused(supervisor, prompt(1), session_id="one")
        await kept(kv)
        one = kv.inventory().find("one")
        num_held = await kv.memory.num_held([one.last.head.id])
        assert num_held[one.last.head.id] >= NUM_TOKENS
    async with serving(home, prewarm_share=0.0) as (supervisor, kv):
        await reused(supervisor, prompt(2), session_id="other")
        one = kv.inventory().find("one")
        assert await kv.memory.num_held([one.last.head.id]) == {}
        assert await kv.memory.bring(one.last.head.id) >= NUM_TOKENS
        held: dict[str, int] = {}
        async with asyncio.timeout(PATIENCE_S):
            while held.get(one.last.head.id, 0) < NUM_TOKENS:
                held = await kv.memory.num_held([one.last.head.id])
        use = await reused(supervisor, prompt(1), session_id="one")
        assert use.num_tokens == NUM_TOKENS - 1


async def test_what_is_over_leaves_memory_first(home: Path):
    async with serving(home) as (supervisor, kv):
        await reused(supervisor, prompt(1), session_id="one")
        await reused(supervisor, prompt(2), session_id="other")
        await kept(kv, 2)
        kv.hint(Whom(session_id="one"), None, is_over=True)
        (channel,) = kv.loaded()
        two_bytes = kv.inventory().view(kv.inventory().find("one")).disk_bytes * 2
        channel.set_budget(HotBudget(num_bytes=two_bytes))
        await reused(supervisor, prompt(3), session_id="third")
        ids = {name: kv.inventory().find(name).last.head.id for name in ("one", "other")}
        held = await kv.memory.num_held(ids.values())
        assert held.get(ids["one"], 0) < held.get(ids["other"], 0)


def known_heads(kv: KvStore) -> list[KnownHead]:
    return [one for heads in kv.all_heads() for one in heads.known.values()]


@pytest.mark.parametrize("has_disk", [True, False])
async def test_a_conversation_without_a_session_is_deleted_by_its_head(home: Path, has_disk: bool):
    """What others of them have as well stays."""
    branch = TokenPrompt(token_ids=(*prompt(1).token_ids[:1024], *prompt(2, 400).token_ids))
    async with serving(home, kv_disk=has_disk) as (supervisor, kv):
        await reused(supervisor, prompt(1))
        await reused(supervisor, branch)
        await until(lambda: len(known_heads(kv)) >= 2, "both are known")
        sizes = {one.head.num_tokens: one.head.id for one in known_heads(kv)}
        assert (await kv.delete_head(sizes[max(sizes)])).num_conversations == 1
        use = await reused(supervisor, prompt(1), mode="prefix")
        assert use.num_tokens == 1024
        assert (await reused(supervisor, branch)).num_tokens == len(branch.token_ids) - 1


async def test_what_is_kept_is_counted(home: Path):
    async with serving(home) as (supervisor, kv):
        await reused(supervisor, prompt(1))
        await kept(kv)
        await kv.refresh()
        figures = kv.figures()
        (tier,) = figures.disk.tiers
        assert (tier.model, tier.tier) == ("m", "warm")
        assert (tier.num_slots, tier.num_tokens) == (5, 5 * 256)
        assert tier.disk_bytes >= 5 * 256
        assert figures.is_up
        assert figures.store["published_heads"] == 1
        num_computed = figures.models["m"].num_computed_tokens
    assert kv.figures().models["m"].num_computed_tokens >= num_computed
    assert kv.figures().models["m"].hot_bytes == 0
