"""A store that opens late, or fails and comes back: what is in memory stays."""

from __future__ import annotations

import random
import threading
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from runtime.cache.opened import BlockStore
from runtime.cache.service import KvStore
from runtime.config.settings import Settings
from runtime.supervisor.supervisor import Supervisor
from runtime.types import CacheUse, GenerateRequest, TokenPrompt
from store.errors import StoreFailed
from tests.asking import answer, request, supervising_by, worker_of
from tests.tiny_models import write_model
from tests.waiting import until

NUM_TOKENS = 600


class Gate:
    """Opens the store when the test lets it, or fails as long as the test wants."""

    def __init__(self, *, is_open: bool = False, fails: bool = False) -> None:
        self.fails = fails
        self.reached = threading.Event()
        self._open = threading.Event()
        if is_open:
            self.open()

    def open(self) -> None:
        self._open.set()

    def wait(self) -> None:
        self.reached.set()
        self._open.wait()
        if self.fails:
            raise StoreFailed("not yet")


class GatedStore(KvStore):
    """One that is opened behind a gate."""

    def __init__(self, settings: Settings, gate: Gate) -> None:
        super().__init__(settings)
        self._gate = gate

    @override
    def open(self, secret: bytes | None) -> BlockStore:
        self._gate.wait()
        return super().open(secret)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "m")
    write_model(folder / "n", seed=1)
    return folder


@pytest.fixture
def home(tmp_path: Path, models: Path) -> Path:
    (tmp_path / "models").symlink_to(models)
    return tmp_path


def serving(
    home: Path, gate: Gate, **settings: Any
) -> AbstractAsyncContextManager[tuple[Supervisor, KvStore]]:
    fields = {"kv_disk": True, "prewarm_share": 0.0}
    return supervising_by(lambda chosen: GatedStore(chosen, gate), home, **(fields | settings))


def prompt(number: int, model: str = "m") -> GenerateRequest:
    draw = random.Random(number)
    tokens = TokenPrompt(token_ids=tuple(draw.choices(range(10, 400), k=NUM_TOKENS)))
    return request(tokens, model=model, max_tokens=2)


async def use_of(supervisor: Supervisor, number: int, model: str = "m") -> CacheUse:
    said = await answer(supervisor.submit(prompt(number, model)))
    return said.finished.usage.cache


async def saved(kv: KvStore) -> None:
    def is_there() -> bool:
        known = kv.store.heads.known.values() if kv.store is not None else ()
        return any(one.path is not None for one in known)

    await until(is_there, f"it is saved: {kv.status}")


async def test_while_the_store_is_being_opened_models_load_and_requests_wait(home: Path):
    async with serving(home, Gate(is_open=True)) as (supervisor, kv):
        assert (await use_of(supervisor, 1)).reason == "first_seen"
        await saved(kv)
    gate = Gate()
    async with serving(home, gate) as (supervisor, kv):
        try:
            asked = [supervisor.submit(prompt(1)), supervisor.submit(prompt(2))]
            await until(lambda: supervisor.worker("m") is not None, "a process")
            await until(lambda: worker_of(supervisor).ready is not None, "its weights are loaded")
            assert (kv.status.state, supervisor.status_of("m").state) == ("opening", "warming")
        finally:
            gate.open()
        uses = [(await answer(one)).finished.usage.cache for one in asked]
        assert uses[0].num_tokens == NUM_TOKENS - 1
        assert (uses[1].num_tokens, uses[1].reason) == (0, "first_seen")
        assert kv.status.state == "ok"


async def test_models_take_turns_while_the_store_is_being_opened_and_lose_nothing(home: Path):
    gate = Gate()
    async with serving(home, gate, max_loaded_models=1) as (supervisor, kv):
        try:
            asked = [supervisor.submit(prompt(1, model)) for model in ("m", "n")]
            await until(lambda: supervisor.worker("m") is not None, "a process")
            await until(lambda: worker_of(supervisor).ready is not None, "its weights are loaded")
        finally:
            gate.open()
        for one in asked:
            assert (await answer(one)).finished.usage.cache.reason == "first_seen"
        assert (await use_of(supervisor, 1, "m")).tier == "warm"
        assert (await use_of(supervisor, 1, "n")).tier == "warm"
        assert kv.status.state == "ok"


@pytest.mark.parametrize("trouble", ["fails", "takes long"])
async def test_a_store_that_comes_late_gets_what_is_in_memory_and_nobody_is_replaced(
    home: Path, trouble: str
):
    fails = trouble == "fails"
    gate = Gate(is_open=fails, fails=fails)
    async with serving(home, gate, load_timeout_s=8.0) as (supervisor, kv):
        try:
            first = await use_of(supervisor, 1)
            assert (first.num_tokens, first.reason) == (0, "away")
            assert kv.status.state == ("degraded" if fails else "opening")
            pid = worker_of(supervisor).pid
            assert (await use_of(supervisor, 1)).tier == "hot"
        finally:
            gate.fails = False
            gate.open()
        await saved(kv)
        again = await use_of(supervisor, 1)
        assert (again.tier, again.num_tokens) == ("hot", NUM_TOKENS - 1)
        assert (kv.status.state, worker_of(supervisor).pid) == ("ok", pid)
    async with serving(home, Gate(is_open=True)) as (supervisor, kv):
        assert (await use_of(supervisor, 1)).num_tokens == NUM_TOKENS - 1
