"""A worker whose model has left is the next spare: it keeps nothing of it, and forgets nothing."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from runtime.supervisor.supervisor import Supervisor
from runtime.types import TokenPrompt
from tests.asking import ask, worker_of
from tests.integration.test_kv_blocks_kept import kept, reused, serving
from tests.tiny_models import write_model

FAMILIES = ["qwen3", "gemma3_text", "llama", "falcon_h1", "qwen3_moe"]
"""Of which the modules and the caches differ."""

SLICED = ["qwen3", "llama", "qwen3_moe"]
"""KV of these can be taken up at any token."""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    for family in FAMILIES:
        write_model(tmp_path / "models" / family, family=family)
    return tmp_path


def prompt(seed: int, num_tokens: int = 700) -> TokenPrompt:
    return TokenPrompt(token_ids=tuple(9 + (seed + i * 7919) % 400 for i in range(num_tokens)))


async def pid_of(supervisor: Supervisor, model: str) -> int:
    await ask(supervisor, prompt(1), model=model, max_tokens=2)
    pid = worker_of(supervisor, model).pid
    assert pid is not None
    return pid


async def test_models_that_take_turns_share_processes_and_find_their_kv(home: Path):
    async with serving(home, spare_worker=True) as (supervisor, _):
        pids: list[int] = []
        for turn in range(3):
            for family in FAMILIES:
                use = await reused(supervisor, prompt(2), family, session_id=family)
                assert use.num_tokens == (699 if turn and family in SLICED else 0)
                pid = worker_of(supervisor, family).pid
                assert pid is not None
                pids.append(pid)
        assert len({*pids}) <= 2, "one serves, and another one may wait"


async def test_what_a_large_model_took_is_given_back(home: Path):
    """Weights of 200 MB, and 64 MB of KV."""
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 64}
    changes: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 8192, **heads}
    write_model(home / "models" / "large", **changes)
    async with serving(home, spare_worker=True, hot_bytes=1 << 30) as (supervisor, kv):
        large = await pid_of(supervisor, "large")
        most_bytes = psutil.Process(large).memory_info().rss
        await reused(supervisor, prompt(3, 4000), "large")
        await kept(kv, 2)
        await ask(supervisor, prompt(1), model="qwen3", max_tokens=2)
        assert await pid_of(supervisor, "llama") == large, "it waited, and was the next one"
        assert psutil.Process(large).memory_info().rss < most_bytes - (150 << 20)


async def test_one_that_crashes_later_is_the_end_of_that_process_only(home: Path):
    async with serving(home, spare_worker=True) as (supervisor, kv):
        first = await pid_of(supervisor, "qwen3")
        second = await pid_of(supervisor, "llama")
        third = await pid_of(supervisor, "qwen3")
        assert len({first, second, third}) < 3
        os.kill(third, signal.SIGKILL)
        await kept(kv)
        assert (await reused(supervisor, prompt(1), "qwen3")).num_tokens >= 512
        assert worker_of(supervisor, "qwen3").pid not in (third, None)


def taken(pid: int) -> tuple[int, int, int]:
    """Threads, descriptors, resident bytes."""
    process = psutil.Process(pid)
    return process.num_threads(), process.num_fds(), process.memory_info().rss


@pytest.mark.soak
async def test_two_hundred_swaps_leave_nothing_behind(home: Path):
    async with serving(home, spare_worker=True) as (supervisor, _):
        first: dict[int, tuple[int, int, int]] = {}
        last: dict[int, tuple[int, int, int]] = {}
        for number in range(200):
            family = FAMILIES[number % len(FAMILIES)]
            await reused(supervisor, prompt(2), family, session_id=family)
            pid = worker_of(supervisor, family).pid
            assert pid is not None
            last[pid] = taken(pid)
            if number < 40:
                first[pid] = taken(pid)
        assert len(last) <= 2
        assert first.keys() == last.keys()
        for pid, (num_threads, num_fds, num_bytes) in last.items():
            assert num_threads <= first[pid][0] + 1
            assert num_fds <= first[pid][1] + 1
            assert num_bytes < first[pid][2] + (32 << 20)
