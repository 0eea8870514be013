"""What is done now and then to what is kept by blocks, and what is told of it: real files."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from runtime.cache.figures import WrittenGroup
from tests.integration.test_kv_blocks_kept import kept, prompt, reused, serving
from tests.tiny_models import write_model
from tests.waiting import until

BLOCK = 256
NUM_BLOCKS = 5
"""Whole ones of each prompt."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "m")
    return folder


@pytest.fixture
def home(tmp_path: Path, models: Path) -> Path:
    (tmp_path / "models").symlink_to(models)
    return tmp_path


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
