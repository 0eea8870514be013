"""Until every byte of its weights is read, a model's KV stays in memory; then it is saved."""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from runtime.cache.service import KvStore
from runtime.models.identified import Identity
from runtime.supervisor.supervisor import Supervisor
from runtime.types import CacheUse, GenerateRequest, TokenPrompt
from store.keyed_names import Whom
from tests.asking import (
    PATIENCE_S,
    answer,
    request,
    supervising_by,
    worker_of,
)
from tests.tiny_models import write_model
from tests.waiting import until

NUM_TOKENS = 600
MODEL = "models/m/model.safetensors"
READING = "its weights are being read"
_LOADS_PER_WAIT = 24
"""Of the time that a load may take, this share is waited for what is read."""


class Gate:
    """Reads weights when the test lets it."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self, identity: Identity, should_stop: Callable[[], bool]) -> bytes:
        self.reached.set()
        self.opened.wait()
        return identity.read(should_stop)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    write_model(tmp_path / "models" / "m")
    return tmp_path


@asynccontextmanager
async def serving(
    home: Path, gate: Gate | None = None, wait_s: float = 0.5
) -> AsyncGenerator[tuple[Supervisor, KvStore]]:
    """With an open store. Who finds the gate closed when the model is loaded waits for so long."""
    fields: dict[str, Any] = {"kv_disk": True, "prewarm_share": 0.0, "stop_timeout_s": 30.0}
    if gate is not None:
        fields["load_timeout_s"] = _LOADS_PER_WAIT * wait_s
    reader = gate or Identity.read
    async with supervising_by(lambda chosen: KvStore(chosen, reader=reader), home, **fields) as one:
        await one[1].settled(PATIENCE_S)
        yield one


def prompt(number: int) -> GenerateRequest:
    draw = random.Random(number)
    tokens = TokenPrompt(token_ids=tuple(draw.choices(range(10, 400), k=NUM_TOKENS)))
    return request(tokens, max_tokens=2)


async def use_of(supervisor: Supervisor, number: int = 1) -> CacheUse:
    said = await answer(supervisor.submit(prompt(number)))
    return said.finished.usage.cache


def num_saved(kv: KvStore) -> int:
    assert kv.store is not None
    return sum(one.head.num_tokens for one in kv.store.heads.known.values() if one.path)


async def saved(kv: KvStore) -> None:
    await until(lambda: num_saved(kv) >= NUM_TOKENS, "it is saved")


async def test_kv_stays_in_memory_until_the_weights_are_read_and_is_saved_then(home: Path):
    gate = Gate()
    async with serving(home, gate) as (supervisor, kv):
        try:
            first, again = await use_of(supervisor), await use_of(supervisor)
            assert (first.num_tokens, first.reason) == (0, "away")
            assert (again.num_tokens, again.tier) == (NUM_TOKENS - 1, "hot")
            await until(gate.reached.is_set, READING)
            assert (num_saved(kv), kv.store and kv.store.records.models()) == (0, [])
            assert not list((home / "kv").rglob("*.safetensors"))
        finally:
            gate.opened.set()
        await saved(kv)
        assert (await use_of(supervisor)).tier == "hot"
    async with serving(home) as (supervisor, _):
        again = await use_of(supervisor)
        assert (again.num_tokens, again.tier) == (NUM_TOKENS - 1, "warm")


@pytest.mark.parametrize("is_its", [True, False])
async def test_weights_that_are_deleted_while_they_are_read_leave_memory_when_they_have_a_name(
    home: Path, is_its: bool
):
    """And nobody else's do, as long as nobody can say whose they are."""
    async with serving(home) as (supervisor, kv):
        await use_of(supervisor)
        await saved(kv)
        [model] = kv.loaded_models()
    shutil.rmtree(home / "kv")
    gate = Gate()
    async with serving(home, gate) as (supervisor, kv):
        try:
            assert (await use_of(supervisor)).num_tokens == 0
            deleted = model if is_its else b"another's"
            assert (await kv.delete(Whom(), {deleted})).num_conversations == 0
        finally:
            gate.opened.set()
        await worker_of(supervisor).kv.named(30)
        assert (await use_of(supervisor)).num_tokens == (0 if is_its else NUM_TOKENS - 1)


def replaced(weights: Path) -> None:
    copy = weights.with_suffix(".copy")
    copy.write_bytes(weights.read_bytes())
    copy.replace(weights)


def written_to(weights: Path) -> None:
    status = weights.stat()
    with weights.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(byte)
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("change", [replaced, written_to])
async def test_files_that_changed_before_they_were_read_name_nothing(
    home: Path, change: Callable[[Path], None]
):
    """What was loaded is not known, even where it is the same in the end."""
    gate = Gate()
    async with serving(home, gate) as (supervisor, kv):
        try:
            assert (await use_of(supervisor)).reason == "away"
            await until(gate.reached.is_set, READING)
            change(home / MODEL)
        finally:
            gate.opened.set()
        channel = worker_of(supervisor).kv
        await channel.named(30)
        assert not channel.has_disk
        again, other = await use_of(supervisor), await use_of(supervisor, 2)
        assert (again.num_tokens, again.tier) == (NUM_TOKENS - 1, "hot")
        assert (other.num_tokens, other.reason) == (0, "away")
    async with serving(home) as (supervisor, kv):
        assert (await use_of(supervisor)).reason == "first_seen"
        await saved(kv)


async def test_a_model_that_leaves_is_heard_out_before_its_kv_has_a_name(home: Path):
    gate = Gate()
    async with serving(home, gate) as (supervisor, kv):
        try:
            await use_of(supervisor)
            await until(gate.reached.is_set, READING)
            leaving = supervisor.restart("m")
            await until(lambda: supervisor.status_of("m").state == "flushing", "it is to leave")
            assert num_saved(kv) == 0
        finally:
            gate.opened.set()
        await leaving.granted()
        await saved(kv)
    async with serving(home) as (supervisor, _):
        assert (await use_of(supervisor)).tier == "warm"


async def test_a_model_that_may_find_something_is_waited_for(home: Path):
    async with serving(home) as (supervisor, kv):
        await use_of(supervisor)
        await saved(kv)
    gate = Gate()
    async with serving(home, gate, wait_s=PATIENCE_S) as (supervisor, _):
        try:
            asked = supervisor.submit(prompt(1))
            await until(gate.reached.is_set, READING)
            await until(lambda: worker_of(supervisor).ready is not None, "the model is loaded")
        finally:
            gate.opened.set()
        use = (await answer(asked)).finished.usage.cache
        assert (use.num_tokens, use.tier) == (NUM_TOKENS - 1, "warm")


async def test_it_is_waited_for_as_long_however_long_the_model_took_to_load(
    home: Path, slow_loads: None
):
    async with serving(home) as (supervisor, kv):
        await use_of(supervisor)
        await saved(kv)
    gate = Gate()
    async with serving(home, gate, wait_s=1.5) as (supervisor, _):
        try:
            asked = supervisor.submit(prompt(1))
            await until(gate.reached.is_set, READING)
            await until(lambda: worker_of(supervisor).ready is not None, "the model is loaded")
        finally:
            gate.opened.set()
        assert (await answer(asked)).finished.usage.cache.tier == "warm"
