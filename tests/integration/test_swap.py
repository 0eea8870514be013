"""Several models and little room: who is loaded, who leaves, and what everybody is told."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from runtime.cache.channel import WorkerChannel
from runtime.config.settings import ModelSettings
from runtime.errors import (
    Aborted,
    LoadFailed,
    ModelTooLarge,
    NoRoom,
    Overloaded,
    QueueTimeout,
    UnknownModel,
)
from runtime.kv_sizes import MIN_HOT_BYTES
from runtime.memory import Departure
from runtime.supervisor.generation import Generation
from runtime.supervisor.lifecycle import HAS_PROCESS
from runtime.supervisor.supervisor import Supervisor
from runtime.types import TokenPrompt
from tests.asking import answer, ask, first_chunks, request, status_of, supervising, worker_of
from tests.forked_worker import own_workers
from tests.tiny_models import write_model
from tests.waiting import until

MODELS = ("a", "b", "c")
LONG = TokenPrompt(token_ids=tuple(9 + i % 400 for i in range(1500)))
ENDLESS = {name: ModelSettings(context=100_000) for name in MODELS}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    for seed, name in enumerate(MODELS):
        write_model(home / "models" / name, seed=seed)
    return home


def loaded(supervisor: Supervisor) -> set[str]:
    return {one.spec.id for one in supervisor.status() if one.state in HAS_PROCESS}


def hot_share(channel: WorkerChannel, num_bytes: int) -> float:
    """What its hot tier may take beyond the least, in units of a model."""
    assert channel.budget is not None
    return round((channel.budget.num_bytes - MIN_HOT_BYTES) / num_bytes, 3)


def endless(supervisor: Supervisor, model: str, **fields: Any) -> Generation:
    return supervisor.submit(
        request("a", model=model, max_tokens=90_000, ignore_eos=True, **fields)
    )


async def test_a_conversation_goes_on_where_it_was_when_its_model_comes_back(
    home: Path, tmp_path: Path
) -> None:
    disk: dict[str, Any] = {"kv_disk": True, "kv_dir": tmp_path, "block_size": 16}
    async with supervising(home, **disk) as supervisor:
        first = await ask(supervisor, LONG, model="a", max_tokens=2)
        assert first.finished.usage.num_cached_tokens == 0
        await ask(supervisor, LONG, model="b", max_tokens=2)
        assert loaded(supervisor) == {"b"}
        longer = TokenPrompt(token_ids=(*LONG.token_ids, *range(20, 40)))
        usage = (await ask(supervisor, longer, model="a", max_tokens=2)).finished.usage
        assert usage.num_cached_tokens >= 1488
        assert usage.cache.tier in ("warm", "hot")  # hot when it was brought back at the load
        assert loaded(supervisor) == {"a"}


async def test_models_that_fit_together_stay_together_and_the_longest_idle_one_leaves(
    home: Path,
) -> None:
    async with supervising(home, max_loaded_models=None) as supervisor:
        await ask(supervisor, "a", model="a", max_tokens=1)
        num_bytes = status_of(supervisor, "a").reserved_bytes
    budget = int(num_bytes * 2.5)
    async with supervising(home, max_loaded_models=None, memory_budget=budget) as supervisor:
        await ask(supervisor, "a", model="a", max_tokens=1)
        of_a = worker_of(supervisor, "a").kv
        assert hot_share(of_a, num_bytes) == 1.5  # all that is left is lent to its hot tier
        await ask(supervisor, "a", model="b", max_tokens=1)
        of_b = worker_of(supervisor, "b").kv
        assert hot_share(of_a, num_bytes) == hot_share(of_b, num_bytes) == 0.25
        await ask(supervisor, "a", model="c", max_tokens=1)
        assert len(own_workers()) <= 2
        assert loaded(supervisor) == {"b", "c"}
        assert await ask(supervisor, "a", model="b", max_tokens=1)
        assert status_of(supervisor, "b").num_starts == 1
    async with supervising(home, memory_budget=num_bytes // 2) as supervisor:
        with pytest.raises(ModelTooLarge) as caught:
            await ask(supervisor, "a", model="a")
        assert caught.value.limit_bytes == num_bytes // 2
        assert caught.value.num_bytes == num_bytes


async def test_what_is_being_warmed_makes_way_for_another_model(home: Path) -> None:
    long = TokenPrompt(token_ids=LONG.token_ids * 40)
    async with supervising(home, models=ENDLESS, prefill_slice=8) as supervisor:
        await ask(supervisor, "a", model="a", max_tokens=1)
        prompt = request(long, model="a", work="prefill", priority="background")
        warming = supervisor.warm(prompt)
        assert warming is not None
        await first_chunks(warming)
        assert await ask(supervisor, "a", model="b", max_tokens=1)
        assert loaded(supervisor) == {"b"}
        assert (await answer(warming)).failed.code == Aborted.code


async def test_a_model_leaves_when_nobody_uses_it_unless_somebody_said_otherwise(
    home: Path,
) -> None:
    models = {"c": ModelSettings(pinned=True)}
    fields: dict[str, Any] = {"max_loaded_models": 3, "model_keep_alive_s": 3.0, "models": models}
    async with supervising(home, **fields) as supervisor:
        await until(lambda: status_of(supervisor, "c").state == "ready", "the pinned one")
        await ask(supervisor, "a", model="a", max_tokens=1)
        assert 0 < (status_of(supervisor, "a").expires_in_s or 0) <= 3.0
        await until(lambda: status_of(supervisor, "a").state == "cold", "it was unloaded")
        await ask(supervisor, "a", model="a", max_tokens=1, keep_alive_s=-1.0)
        await ask(supervisor, "a", model="b", max_tokens=1, keep_alive_s=0.0)
        await until(lambda: status_of(supervisor, "b").state == "cold", "it left at once")
        assert status_of(supervisor, "a").expires_in_s is None
        assert loaded(supervisor) == {"a", "c"}
        await ask(supervisor, "a", model="a", max_tokens=1)
        assert status_of(supervisor, "a").expires_in_s is not None
        assert status_of(supervisor, "c").expires_in_s is None
        worker_of(supervisor, "c").kill()
        await until(
            lambda: (one := status_of(supervisor, "c")).num_starts == 2 and one.state == "ready",
            "the pinned one comes back unasked",
            30,
        )


async def test_a_request_waits_only_so_long_and_queues_are_bounded(home: Path) -> None:
    fields: dict[str, Any] = {"max_queue_per_model": 2, "models": ENDLESS}
    async with supervising(home, max_wait_s=1.0, **fields) as supervisor:
        with suppress(QueueTimeout):  # which ends the wish, not the load
            await supervisor.load("a").granted()
        await until(lambda: status_of(supervisor, "a").state == "ready", "it is loaded", 30)
        running = endless(supervisor, "a")
        await first_chunks(running)
        waiting = [endless(supervisor, "b") for _ in range(2)]
        assert [one.phase for one in waiting] == ["queued 1", "queued 2"]
        with pytest.raises(Overloaded, match="max_queue_per_model"):
            endless(supervisor, "b")
        urgent = endless(supervisor, "c", priority="interactive")
        assert (urgent.phase, waiting[0].phase) == ("queued 1", "queued 2")
        for one in (*waiting, urgent):
            with pytest.raises(QueueTimeout) as caught:
                await one.accepted()
            assert caught.value.retry_after_s <= 60
        assert not running.is_finished
        running.abort()


async def test_what_is_pinned_keeps_others_out(home: Path) -> None:
    async with supervising(home) as supervisor:
        await supervisor.load("a").granted()
        supervisor.pin("a", is_pinned=True)
        with pytest.raises(NoRoom, match="pinned"):
            await ask(supervisor, "a", model="b")
        supervisor.pin("a", is_pinned=False)
        assert (await ask(supervisor, "a", model="b", max_tokens=1)).finished


async def test_models_are_preloaded_one_by_one_and_a_broken_one_stops_nobody(
    home: Path, tmp_path: Path
) -> None:
    shutil.copytree(home / "models", tmp_path / "models")
    (tmp_path / "models" / "a" / "model.safetensors").write_bytes(b"\xff" * 64)
    order: list[str] = []
    fields: dict[str, Any] = {"max_loaded_models": 2, "preload": MODELS}
    async with supervising(tmp_path, **fields) as supervisor:
        listener = supervisor.news.listen()
        await until(lambda: supervisor.is_ready, "the boot", 60)
        batch = await listener.next()
        assert batch is not None
        order = [one.model for one in batch.items if one.after in ("spawning", "ready", "failed")]
        assert order == ["a", "a", "b", "b", "c", "c"]
        states = {model: status_of(supervisor, model).state for model in MODELS}
        assert states == {"a": "failed", "b": "ready", "c": "ready"}


def change(path: Path, seed: int) -> None:
    """Other weights under the same name, as a download does it: beside, then in place."""
    fresh = write_model(path.parent.parent / "fresh", seed=seed)
    (fresh / "model.safetensors").replace(path / "model.safetensors")


async def test_weights_that_change_under_a_loaded_model_are_not_taken_for_the_old_ones(
    tmp_path: Path,
) -> None:
    path = write_model(tmp_path / "models" / "m", seed=1)
    async with supervising(tmp_path, kv_disk=True, block_size=16) as supervisor:
        before = await ask(supervisor, LONG)
        change(path, seed=2)
        assert status_of(supervisor).has_changed_files
        kept = await ask(supervisor, LONG)
        assert kept.text == before.text
        assert kept.finished.usage.num_cached_tokens > 0
        await supervisor.restart("m").granted()
        assert not status_of(supervisor).has_changed_files
        after = await ask(supervisor, LONG)
        assert after.finished.usage.num_cached_tokens == 0
        assert after.text != before.text


async def test_a_model_that_disappears_is_served_until_it_is_unloaded(tmp_path: Path) -> None:
    path = write_model(tmp_path / "models" / "m", seed=1)
    async with supervising(tmp_path) as supervisor:
        before = await ask(supervisor, "a")
        path.rename(tmp_path / "away")
        with pytest.raises(UnknownModel):
            supervisor.submit(request("a", model="nobody"))
        supervisor._catalog.refresh()
        assert (await ask(supervisor, "a")).text == before.text
        supervisor.unload("m")
        await until(lambda: status_of_any(supervisor, "m") in (None, "cold"), "it left")
        with pytest.raises(UnknownModel):
            supervisor.submit(request("a"))
        shutil.copytree(tmp_path / "away", path)
        (path / "model.safetensors").write_bytes(b"\0" * 1000)
        supervisor._catalog.refresh()
        with pytest.raises(LoadFailed, match="cannot be loaded"):
            await ask(supervisor, "a")
        shutil.copytree(tmp_path / "away", path, dirs_exist_ok=True)
        assert (await ask(supervisor, "a")).text == before.text


def status_of_any(supervisor: Supervisor, model: str) -> str | None:
    return next((one.state for one in supervisor.status() if one.spec.id == model), None)


async def test_memory_that_an_ended_process_keeps_is_no_room_until_it_is_there_again(
    home: Path,
) -> None:
    """No process can be made to keep it; what one of them would be found to have done is told."""
    pebibyte = 1 << 50
    fields: dict[str, Any] = {"memory_budget": 2 * pebibyte, "max_loaded_models": None}
    async with supervising(home, **fields) as supervisor:
        listener = supervisor.news.listen()
        lost = Departure(
            is_clean=False, footprint_bytes=pebibyte, freed_bytes=0, is_memory_suspect=True
        )
        assert status_of(supervisor, "a").state == status_of(supervisor, "b").state == "cold"
        supervisor._departed("a", lost)
        supervisor._departed("b", msgspec.structs.replace(lost, footprint_bytes=2 * pebibyte))
        batch = await listener.next()
        assert batch is not None
        assert [(one.model, one.event) for one in batch.items] == [
            ("a", "unreturned"),
            ("b", "unreturned"),
        ]
        assert status_of(supervisor, "a").unreturned_bytes == pebibyte
        assert status_of(supervisor, "a").state == "cold"
        await supervisor.relieve()
        spec = status_of(supervisor, "a").spec
        large = msgspec.structs.replace(spec, nbytes=pebibyte)
        assert not supervisor._scheduler.fits(large)
        assert (
            await ask(supervisor, "a", model="a", max_tokens=1)
        ).finished  # what is really free is room
