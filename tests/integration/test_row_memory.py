"""What running requests hold of memory is counted before they begin, in a real worker."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from runtime.config.settings import ModelSettings
from runtime.errors import MemoryTaken, NeedsTooMuchMemory
from runtime.kv_messages import HotBudget
from runtime.supervisor.supervisor import Supervisor
from runtime.types import CacheParams, TokenPrompt
from tests.asking import Answer, ask, supervising, worker_of
from tests.tiny_models import write_model
from tests.waiting import until

TOKEN_BYTES = 2 * 2 * 2 * 16 * 4
"""KV of one token in the dense model: two layers, keys and values, two heads of 16 floats."""

ROW_TOKENS = 1024
POOL_BYTES = 4 * ROW_TOKENS * TOKEN_BYTES


def prompt(num_tokens: int, seed: int = 0) -> TokenPrompt:
    return TokenPrompt(token_ids=tuple(10 + (seed + 7 * i) % 390 for i in range(num_tokens)))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    write_model(tmp_path / "models" / "m", max_position_embeddings=20_000)
    return tmp_path


async def deal(supervisor: Supervisor, pool_bytes: int | None, most_bytes: int | None) -> None:
    budget = HotBudget(num_bytes=1 << 20, pool_bytes=pool_bytes, most_bytes=most_bytes)
    worker_of(supervisor).kv.set_budget(budget)


async def say(supervisor: Supervisor, num_tokens: int, **fields: Any) -> Answer:
    how: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True, "cache": CacheParams(mode="off")}
    return await ask(supervisor, prompt(num_tokens), **(how | fields))


async def peak_bytes(supervisor: Supervisor) -> int:
    """The most that the worker used up to now, beside its hot tier."""
    worker = worker_of(supervisor)
    last = worker.watchdog.last
    await until(lambda: worker.watchdog.last is not last, "another heartbeat")
    return worker.crash_reporter.working_bytes


async def test_sixteen_choices_take_turns_in_the_memory_there_is_and_say_the_same(home: Path):
    context = {"m": ModelSettings(context=20_000)}
    async with supervising(home, models=context, max_batch=32) as supervisor:
        alone = await say(supervisor, 1000)
        await deal(supervisor, POOL_BYTES, POOL_BYTES)
        wide, small = await asyncio.gather(
            say(supervisor, 1000, num_choices=16), say(supervisor, 20)
        )
        bounded = await peak_bytes(supervisor)
        assert {wide.choice(index).text for index in range(16)} == {alone.text}
        assert small.finished.usage.num_output_tokens == 20
        await deal(supervisor, None, None)
        await say(supervisor, 1000, num_choices=16)
        free = await peak_bytes(supervisor)
        assert free - bounded > 8 * ROW_TOKENS * TOKEN_BYTES


async def test_what_can_never_fit_is_refused_and_what_others_hold_may_be_tried_again(home: Path):
    context = {"m": ModelSettings(context=20_000)}
    async with supervising(home, models=context) as supervisor:
        await say(supervisor, 20)
        await deal(supervisor, POOL_BYTES, 2 * POOL_BYTES)
        with pytest.raises(NeedsTooMuchMemory) as never:
            await say(supervisor, 9 * ROW_TOKENS)
        assert (never.value.code, never.value.param) == ("kv_too_large", "prompt")
        assert "memory_budget" in never.value.message
        with pytest.raises(MemoryTaken) as now:
            await say(supervisor, 6 * ROW_TOKENS)
        assert now.value.retry_after_s <= 60
        said = await say(supervisor, 3 * ROW_TOKENS)
        assert said.finished.usage.num_output_tokens == 20


async def test_a_hot_tier_makes_room_for_rows_and_has_it_back_when_they_end(home: Path):
    context = {"m": ModelSettings(context=20_000)}
    async with supervising(home, models=context) as supervisor:
        await say(supervisor, 20)
        await deal(supervisor, POOL_BYTES, POOL_BYTES)
        channel = worker_of(supervisor).kv
        for seed in range(3):
            await ask(supervisor, prompt(600, seed), max_tokens=1)
        await until(lambda: channel.counts.hot_bytes > 1500 * TOKEN_BYTES, "they are in memory")
        await say(supervisor, 3 * ROW_TOKENS + 500)
        await until(lambda: channel.counts.num_evicted > 0, "some made room")
        again = await ask(supervisor, prompt(600, 9), max_tokens=1)
        assert again.finished.usage.cache.tier == "none"
        kept = await ask(supervisor, prompt(600, 9), max_tokens=1)
        assert kept.finished.usage.cache.tier == "hot"


async def test_answers_that_outgrow_the_memory_make_way_and_are_finished_later(home: Path):
    context = {"m": ModelSettings(context=20_000)}
    async with supervising(home, models=context) as supervisor:
        alone = await say(supervisor, 200, max_tokens=2200)
        await deal(supervisor, POOL_BYTES, POOL_BYTES)
        both = await asyncio.gather(*(say(supervisor, 200, max_tokens=2200) for _ in range(2)))
        assert [one.text for one in both] == [alone.text] * 2
        assert [one.finished.usage.num_output_tokens for one in both] == [2200, 2200]


async def test_quantised_kv_lowers_the_peak(tmp_path: Path):
    write_model(tmp_path / "models" / "m", head_dim=64, max_position_embeddings=20_000)
    peaks: dict[int | None, int] = {}
    for bits in (None, 8, 4):
        models = {"m": ModelSettings(context=20_000, kv_bits=bits)}
        async with supervising(tmp_path, models=models, prefill_slice=32) as supervisor:
            await say(supervisor, 2000, num_choices=4)
            peaks[bits] = await peak_bytes(supervisor)
    assert peaks[None] > peaks[8] > peaks[4]
