"""A worker with nothing to do finds out in which slices to prefill, and the store remembers it."""

import sqlite3
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

from runtime.config.settings import ModelSettings
from runtime.supervisor.supervisor import Supervisor
from runtime.types import PrefillProgress, TokenPrompt
from runtime.worker.slice_learner import MIN_COMPUTED_TOKENS
from tests.asking import PATIENCE_S, ask, supervising
from tests.kv_sessions import ids
from tests.tiny_models import write_model
from tests.waiting import until

CONTEXT = 8192
LONG = 5000


@asynccontextmanager
async def learning(home: Path, **fields: Any) -> AsyncGenerator[Supervisor]:
    fields = {"learn_slice_after_s": 0.01, "models": {"m": ModelSettings(context=CONTEXT)}} | fields
    async with supervising(home, kv_disk=True, **fields) as supervisor:
        yield supervisor


async def ends_of_slices(supervisor: Supervisor, seed: int, num_tokens: int = LONG) -> list[int]:
    """Where the slices end of a prompt that nobody has sent before; the last one is not told."""
    prompt = TokenPrompt(token_ids=tuple(ids(seed, num_tokens)))
    said = await ask(supervisor, prompt, max_tokens=1)
    return [one.num_done for one in said.chunks if isinstance(one, PrefillProgress)]


def remembered(home: Path) -> tuple[int | None, str | None]:
    """The size that the store has for the only model, and the device that it is for."""
    with closing(sqlite3.connect(f"file:{home}/kv/index.db?mode=ro", uri=True)) as index:
        (row,) = index.execute("SELECT prefill_slice, slice_device FROM models")
    return row


def change(home: Path, name: str, value: object) -> None:
    """Have the store remember something else of its only model."""
    with closing(sqlite3.connect(home / "kv" / "index.db")) as index, index:
        index.execute(f"UPDATE models SET {name} = ?", (value,))


async def test_what_is_learned_is_used_by_this_worker_and_those_after_it(tmp_path: Path):
    write_model(tmp_path / "models" / "m")
    async with learning(tmp_path) as supervisor:
        assert await ends_of_slices(supervisor, 1) == list(range(256, LONG - 1, 256))
        assert remembered(tmp_path) == (None, None)
        await ends_of_slices(supervisor, 2)
        await until(lambda: remembered(tmp_path)[0], "a size that was learned", PATIENCE_S)
        size, device = remembered(tmp_path)
        assert size in (256, 512)
        assert device
        assert await ends_of_slices(supervisor, 3) == list(range(size, LONG - 1, size))
    change(tmp_path, "prefill_slice", 64)
    async with learning(tmp_path) as supervisor:
        assert await ends_of_slices(supervisor, 4, 300) == [64, 128, 192, 256]
    change(tmp_path, "slice_device", "another machine")
    async with learning(tmp_path) as supervisor:
        assert await ends_of_slices(supervisor, 5, 600) == [256, 512]
    async with learning(tmp_path, prefill_slice=32) as supervisor:
        assert await ends_of_slices(supervisor, 6, 80) == [32, 64]


async def test_nothing_is_timed_where_the_owner_does_not_want_it(tmp_path: Path):
    write_model(tmp_path / "models" / "m")
    async with learning(tmp_path, learn_slice_after_s=0) as supervisor:
        for seed in range(MIN_COMPUTED_TOKENS // LONG + 1):
            await ends_of_slices(supervisor, seed)
        assert await ends_of_slices(supervisor, 9, 600) == [256, 512]
        assert remembered(tmp_path) == (None, None)
