"""Conversations that are quantised from a number of tokens on, in a server with a disk."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from runtime.errors import LoadFailed
from runtime.supervisor.supervisor import Supervisor
from runtime.types import CacheParams, CacheUse, TokenPrompt
from runtime.worker.output.detokenizer import token_bytes
from tests.asking import Answer, ask, supervising_with_store
from tests.kv_sessions import ids
from tests.tiny_models import write_model
from tests.tiny_vlms import write_vlm

START = 128
OFF = CacheParams(mode="off")


def serving(home: Path, **settings: Any) -> Any:
    fields: dict[str, Any] = {"kv_disk": True, "block_size": 16, "prefill_slice": 32}
    fields |= {"kv_bits": 8, "quantized_kv_start": START - 5, "prewarm_share": 0.0}
    return supervising_with_store(home, **(fields | settings))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    write_model(tmp_path / "models" / "m", head_dim=64)
    return tmp_path


async def say(
    supervisor: Supervisor, prompt: Sequence[int], num_tokens: int, **cache: Any
) -> Answer:
    wish = CacheParams(**cache)
    how: dict[str, Any] = {"max_tokens": num_tokens, "ignore_eos": True, "top_logprobs": 0}
    return await ask(supervisor, TokenPrompt(token_ids=tuple(prompt)), cache=wish, **how)


def spoken(home: Path, said: Answer) -> list[int]:
    tokenizer = Tokenizer.from_file(str(home / "models" / "m" / "tokenizer.json"))
    names = {number: tokenizer.id_to_token(number) or "" for number in range(512)}
    known = {token_bytes(name, is_byte_level=True): number for number, name in names.items()}
    return [known[one.chosen.token_bytes] for one in said.logprobs]


def use_of(said: Answer) -> CacheUse:
    return said.finished.usage.cache


async def test_an_answer_that_crosses_the_start_is_taken_up_whole_after_a_restart(home: Path):
    """And by who parts from it before the start, with KV that was never quantised."""
    prompt = ids(1, START - 20)
    async with serving(home) as (supervisor, _):
        said = await say(supervisor, prompt, 50)
        turn = [*prompt, *spoken(home, said), *ids(2, 9)]
        sibling = [*turn[: START - 10], *ids(3, 40)]
        alone = [(await say(supervisor, one, 9, mode="off")).text for one in (turn, sibling)]
        assert use_of(await say(supervisor, turn, 9)).num_tokens == len(turn) - 9
    async with serving(home) as (supervisor, _):
        again = [await say(supervisor, one, 9) for one in (sibling, turn)]
        assert [use_of(one).tier for one in again] == ["warm", "warm"]
        assert START - 10 - 16 < use_of(again[0]).num_tokens <= START - 10
        assert use_of(again[1]).num_tokens >= len(turn) - 9
        assert [one.text for one in reversed(again)] == alone


async def test_rows_that_cross_at_different_times_say_what_each_says_alone(home: Path):
    prompts = [ids(seed, START - 9 - 12 * seed) for seed in range(4)]
    async with serving(home, kv_disk=False) as (supervisor, _):
        alone = [await say(supervisor, one, 60, mode="off") for one in prompts]
        together = await asyncio.gather(*(say(supervisor, one, 60) for one in prompts))
        assert [one.text for one in together] == [one.text for one in alone]
        again = [
            await say(supervisor, [*p, *spoken(home, s), 9], 2)
            for p, s in zip(prompts, together, strict=True)
        ]
        assert [use_of(one).num_tokens for one in again] == [len(one) + 60 for one in prompts]


async def test_another_start_is_other_kv_and_the_same_blocks_are_the_same_start(home: Path):
    async with serving(home) as (supervisor, _):
        await say(supervisor, ids(1, 300), 1)
    for start, num_known in ((START, 299), (START + 1, 0), (0, 0)):
        async with serving(home, quantized_kv_start=start, kv_ttl_s=0.0) as (supervisor, _):
            assert use_of(await say(supervisor, ids(1, 300), 1)).num_tokens == num_known


async def test_a_model_that_sees_is_refused_with_what_to_do(tmp_path: Path):
    write_vlm(tmp_path / "models" / "m", "qwen3_vl", head_dim=64)
    async with serving(tmp_path) as (supervisor, _):
        with pytest.raises(LoadFailed, match=r"quantized_kv_start = 0, or set vision = false"):
            await say(supervisor, ids(1, 9), 1)
