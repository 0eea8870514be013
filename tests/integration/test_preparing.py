"""A spare worker reads all but the weights of what follows, and nothing else depends on it."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from pathlib import Path

import psutil
import pytest

from runtime.config.settings import ModelSettings
from runtime.errors import Aborted, LoadFailed
from runtime.supervisor.generation import Generation
from runtime.supervisor.lifecycle import HAS_PROCESS
from runtime.supervisor.standby import StandbyPool
from runtime.supervisor.supervisor import Supervisor
from runtime.types import ModelSpec
from tests.asking import answer, first_chunks, request, supervising, worker_of
from tests.forked_worker import own_workers
from tests.integration.test_standby import lone_settings, sparing, waiting_pid
from tests.lone_worker import lone_worker
from tests.tiny_models import FAMILIES, write_model
from tests.waiting import until

MODELS = ("a", "b", "c")
ENDLESS = {name: ModelSettings(context=100_000) for name in MODELS}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    for seed, name in enumerate(MODELS):
        write_model(home / "models" / name, seed=seed)
    return home


def spec_of(path: Path) -> ModelSpec:
    """As `lone_worker` has it."""
    return ModelSpec(
        id="m", path=str(path), context=100_000, model_type="qwen3", nbytes=1, created_s=1
    )


def is_prepared(pid: int) -> bool:
    """There is a process that takes requests in: a child of its fork server, which is an orphan."""
    parents = {one: _parent_of(one) for one in psutil.pids() if _session_of(one) == pid != one}
    return any(parents.get(parent, pid) != pid for parent in parents.values())


def _parent_of(pid: int) -> int:
    """0 of one that has ended."""
    try:
        return psutil.Process(pid).ppid()
    except psutil.Error:
        return 0


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


async def said_by(path: Path, home: Path, standbys: StandbyPool | None = None) -> tuple[str, int]:
    """What the model there answers, and the process that did."""
    settings = lone_settings(home, spare_worker=standbys is not None)
    async with lone_worker(settings, path, standbys) as worker:
        said = await answer(worker.submit(request("tell me", max_tokens=8, ignore_eos=True)))
        assert worker.process.pid is not None
        return said.text, worker.process.pid


async def prepared(standbys: StandbyPool, path: Path) -> int:
    """The spare that waits, once it has prepared the model there."""
    standbys.want()
    pid = await waiting_pid(standbys)
    standbys.prepare(spec_of(path))
    await until(lambda: is_prepared(pid), "it is prepared")
    return pid


async def test_the_model_that_was_prepared_answers_as_ever(home: Path):
    expected, _ = await said_by(home / "models" / "a", home)
    async with sparing(lone_settings(home)) as standbys:
        pid = await prepared(standbys, home / "models" / "a")
        assert await said_by(home / "models" / "a", home, standbys) == (expected, pid)


async def test_a_process_that_has_prepared_another_model_loads_the_one_that_is_asked_for(
    home: Path,
):
    expected, _ = await said_by(home / "models" / "b", home)
    async with sparing(lone_settings(home)) as standbys:
        pid = await prepared(standbys, home / "models" / "a")
        assert await said_by(home / "models" / "b", home, standbys) == (expected, pid)


@pytest.mark.parametrize("changed", ["weights", "tokenizer"])
async def test_what_was_changed_after_it_was_prepared_is_read_again(
    home: Path, tmp_path: Path, changed: str
):
    """Or KV of other weights would be kept under the name of these."""
    write_model(tmp_path / "m", seed=0)
    write_model(tmp_path / "other", seed=7)
    async with sparing(lone_settings(home)) as standbys:
        pid = await prepared(standbys, tmp_path / "m")
        if changed == "weights":
            (tmp_path / "other/model.safetensors").replace(tmp_path / "m/model.safetensors")
        else:
            (tmp_path / "m" / "chat_template.jinja").write_text("{{ messages[0].content }}")
        found = await said_by(tmp_path / "m", home, standbys)
    expected, _ = await said_by(tmp_path / "m", home)
    assert found == (expected, pid)
    if changed == "weights":
        write_model(tmp_path / "m", seed=0)
        assert (await said_by(tmp_path / "m", home))[0] != expected, "they tell apart"


async def test_a_process_that_is_killed_when_it_has_prepared_is_no_crash_of_the_model(home: Path):
    async with sparing(lone_settings(home)) as standbys:
        pid = await prepared(standbys, home / "models" / "a")
        os.kill(pid, signal.SIGKILL)
        await until(lambda: standbys.pid != pid, "that is noticed")
        _, other = await said_by(home / "models" / "a", home, standbys)
        assert other != pid


async def test_a_model_that_cannot_be_prepared_says_so_when_it_is_loaded(
    home: Path, tmp_path: Path
):
    path = write_model(tmp_path / "m")
    (path / "model.safetensors").write_bytes(b"no weights")
    async with sparing(lone_settings(home)) as standbys:
        standbys.want()
        pid = await waiting_pid(standbys)
        standbys.prepare(spec_of(path))
        with pytest.raises(LoadFailed, match="cannot be loaded"):
            await said_by(path, home, standbys)
        assert standbys.pid != pid


def endless(supervisor: Supervisor, model: str) -> Generation:
    return supervisor.submit(request("a", model=model, max_tokens=90_000, ignore_eos=True))


def loaded(supervisor: Supervisor) -> set[str]:
    return {one.spec.id for one in supervisor.status() if one.state in HAS_PROCESS}


async def spare_beside(supervisor: Supervisor, model: str) -> int:
    """The one process beside the model's, once it has prepared another."""
    own = worker_of(supervisor, model).pid

    def prepared() -> list[int]:
        return [one.pid for one in own_workers() if one.pid != own and is_prepared(one.pid)]

    await until(prepared, "another model is prepared")
    return prepared()[0]


async def test_a_model_is_prepared_while_the_one_before_still_answers_and_loaded_when_it_has_left(
    home: Path,
):
    """Of two wishes in turn each is prepared by whoever waits; there is room for one model."""
    async with supervising(home, spare_worker=True, models=ENDLESS) as supervisor:
        running = endless(supervisor, "a")
        await first_chunks(running)
        wish = asyncio.create_task(answer(supervisor.submit(request("x", model="b"))))
        spare = await spare_beside(supervisor, "a")
        assert loaded(supervisor) == {"a"}
        assert worker_of(supervisor, "a").state == "ready"
        running.abort()
        assert (await wish).finished.usage.num_output_tokens > 0
        assert worker_of(supervisor, "b").pid == spare
        assert loaded(supervisor) == {"b"}


async def test_a_model_that_made_room_is_prepared_before_anybody_asks_for_it_again(home: Path):
    async with supervising(home, spare_worker=True, models=ENDLESS) as supervisor:
        for model in ("a", "b"):
            await answer(supervisor.submit(request("x", model=model)))
        spare = await spare_beside(supervisor, "b")
        assert loaded(supervisor) == {"b"}
        assert (await answer(supervisor.submit(request("x", model="a")))).finished
        assert worker_of(supervisor, "a").pid == spare


async def test_a_wish_that_is_given_up_while_its_model_is_prepared_changes_nothing(home: Path):
    async with supervising(home, spare_worker=True, models=ENDLESS) as supervisor:
        running = endless(supervisor, "a")
        await first_chunks(running)
        given_up = supervisor.submit(request("x", model="b"))
        spare = await spare_beside(supervisor, "a")
        given_up.abort()
        with pytest.raises(Aborted):
            await answer(given_up)
        wish = asyncio.create_task(answer(supervisor.submit(request("x", model="c"))))
        assert loaded(supervisor) == {"a"}
        running.abort()
        assert (await wish).finished.usage.num_output_tokens > 0
        assert worker_of(supervisor, "c").pid == spare


@pytest.mark.parametrize("family", FAMILIES)
def test_no_memory_is_taken_for_weights_before_they_are_read(tmp_path: Path, family: str):
    import mlx.core as mx

    from runtime.worker.model import OpenedModel

    spec = spec_of(write_model(tmp_path / "m", family))
    gc.collect()  # what tests before have left would be freed in the midst of this one
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    opened = OpenedModel(spec)
    vocabulary = opened.beside(len).result()
    taken = mx.get_peak_memory() - before
    model = opened.read(lambda _: None)
    assert mx.get_active_memory() - before >= model.weights_bytes
    assert taken <= model.weights_bytes / 20
    assert 0 < vocabulary <= model.vocab_size
