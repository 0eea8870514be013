"""Row 16: a store that becomes read-only costs time only, and is used again when it can be."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.cache.service import KvStore
from runtime.types import TokenPrompt
from tests.asking import PROBED_S, ask, supervising_with_store
from tests.tiny_models import write_model
from tests.waiting import until

NUM_TOKENS = 400


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A store's directory that can be made read-only, also for root."""
    where = tmp_path / "kv"
    where.mkdir(mode=0o700)
    if os.geteuid() or not mount("--bind", str(where), str(where)):
        pytest.skip("not allowed to mount, and root may write whatever the modes say")
    allow_writing(where)
    yield where
    if where.is_mount():
        allow_writing(where)


def mount(*arguments: str) -> bool:
    return not subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode


def forbid_writing(root: Path) -> None:
    """Through this name: what is open already goes on, as the index does."""
    assert mount("--bind", str(root), str(root))
    assert mount("-o", "remount,ro,bind", str(root))


def allow_writing(root: Path) -> None:
    subprocess.run(["umount", "-l", str(root)], check=True)


def prompt(seed: int) -> TokenPrompt:
    return TokenPrompt(token_ids=tuple(9 + (seed + i * 7919) % 400 for i in range(NUM_TOKENS)))


def num_durable(kv: KvStore) -> list[int]:
    if kv.store is None:
        return []
    inventory = kv.inventory(on_disk=True)
    return [inventory.view(one).num_durable for one in inventory.conversations()]


async def test_a_store_that_becomes_read_only_and_writable_again(tmp_path: Path, root: Path):
    write_model(tmp_path / "models" / "m")
    settings = {"kv_disk": True, "kv_dir": root, "models_dir": tmp_path / "models"}
    async with supervising_with_store(tmp_path, **settings) as (supervisor, kv):
        await ask(supervisor, prompt(1), max_tokens=2)
        await until(lambda: max(num_durable(kv), default=0) >= NUM_TOKENS, "it is saved")
        forbid_writing(root)
        done = await ask(supervisor, prompt(2), max_tokens=2)
        assert done.finished.usage.num_output_tokens == 2
        await until(lambda: kv.status.state == "degraded", "it is noticed")
        again = await ask(supervisor, prompt(2), max_tokens=2)
        assert again.finished.usage.cache.tier == "hot"
        allow_writing(root)
        await until(lambda: kv.status.state == "ok", "it is tried again", PROBED_S)
    async with supervising_with_store(tmp_path, **settings) as (supervisor, kv):
        back = await ask(supervisor, prompt(1), max_tokens=2)
        assert back.finished.usage.cache.num_tokens == NUM_TOKENS - 1
