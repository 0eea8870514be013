"""A worker whose model has left is the next spare: it keeps nothing of it, and forgets nothing."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from runtime.supervisor.supervisor import Supervisor
from runtime.types import CacheParams, SamplingParams, TokenPrompt
from store.keyed_names import Whom
from tests.asking import GREEDY, ask, worker_of
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


async def said(supervisor: Supervisor, family: str, seed: int) -> tuple[str, int]:
    """What a model says to a prompt of its own, and how much of that was known."""
    sampling = SamplingParams(temperature=0.8, seed=seed) if seed % 2 else GREEDY
    wish = CacheParams(session_id=f"{family}-{seed}")
    asked = {"model": family, "max_tokens": 12, "sampling": sampling, "cache": wish}
    done = await ask(supervisor, prompt(seed), **asked)
    return done.text, done.finished.usage.cache.num_tokens


@pytest.mark.parametrize("seed", [1, 2])
async def test_who_had_the_process_before_changes_no_answer_and_brings_nothing_back(
    home: Path, tmp_path_factory: pytest.TempPathFactory, seed: int
):
    """Over random turns of five families, with deletions and kills, beside processes that had no
    model before.
    """
    chance, fresh = random.Random(seed), tmp_path_factory.mktemp("fresh")
    (fresh / "models").symlink_to(home / "models")
    talks = [(family, number) for family in FAMILIES for number in (11, 12)]
    async with serving(fresh, spare_worker=False) as (supervisor, _):
        expected = {talk: (await said(supervisor, *talk))[0] for talk in talks}
    assert len({*expected.values()}) > len(FAMILIES)
    known: set[tuple[str, int]] = set()
    sure: set[tuple[str, int]] = set()
    """What was written: of an answer right before a kill nothing may be."""
    pids: list[int | None] = []
    async with serving(home, spare_worker=True) as (supervisor, kv):
        for _ in range(24):
            talk = chance.choice(talks)
            text, num_known = await said(supervisor, *talk)
            assert text == expected[talk]
            assert not num_known or talk in known, "it was never said, or is deleted"
            assert num_known >= 512 or talk not in sure or talk[0] not in SLICED
            known.add(talk)
            sure.add(talk)
            pids.append(worker_of(supervisor, talk[0]).pid)
            if chance.random() < 0.2:
                gone = chance.choice(sorted(known))
                await kv.delete(Whom(session_id=f"{gone[0]}-{gone[1]}"))
                known.discard(gone)
                sure.discard(gone)
            if chance.random() < 0.1 and pids[-1] is not None:
                os.kill(pids[-1], signal.SIGKILL)
                sure.discard(talk)
        assert len({*pids}) < len(pids) / 3, "processes were used again"


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
