"""The spare worker: it waits with its imports done, is taken, replaced, and never in the way."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from runtime.config.settings import Settings
from runtime.supervisor.spawned import SpawnedProcess, WorkerSource
from runtime.supervisor.standby import StandbyPool
from tests.asking import PATIENCE_S, answer, request
from tests.lone_worker import lone_settings, lone_worker
from tests.tiny_models import write_model
from tests.waiting import until

IMPORT_S = 60.0


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    write_model(home / "m")
    return home


@asynccontextmanager
async def sparing(
    settings: Settings,
    has_room: Callable[[], bool] = lambda: True,
    source: WorkerSource | None = None,
) -> AsyncGenerator[StandbyPool]:
    source = source or WorkerSource(settings.cpu_blas)
    standbys = StandbyPool(settings, source, pause_s=0.05, has_room=has_room)
    try:
        yield standbys
    finally:
        await standbys.stop()
        source.forget_first()


async def waiting_pid(standbys: StandbyPool) -> int:
    await until(lambda: standbys.is_waiting, "a spare with its imports done", IMPORT_S)
    assert standbys.pid is not None
    return standbys.pid


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.usefixtures("slow_loads")
async def test_a_waiting_process_becomes_the_next_worker_and_another_one_waits(home: Path):
    settings = lone_settings(home)
    async with sparing(settings) as standbys:
        async with lone_worker(settings, home / "m", standbys) as first:
            pid = await waiting_pid(standbys)
            assert pid != first.process.pid
        async with lone_worker(settings, home / "m", standbys) as second:
            assert second.process.pid == pid
            said = await answer(second.submit(request("a", max_tokens=3)))
            assert said.finished.usage.num_output_tokens <= 3
            assert await waiting_pid(standbys) != pid
    assert not is_alive(pid)


@pytest.mark.usefixtures("slow_loads")
async def test_a_process_that_comes_back_goes_before_one_that_still_imports(home: Path):
    settings = lone_settings(home)
    async with sparing(settings) as standbys:
        async with lone_worker(settings, home / "m", standbys) as first:
            pid = first.process.pid
            await until(lambda: standbys.pid, "a spare that imports", IMPORT_S)
            assert not standbys.is_waiting
            await first.process.stop()
        assert standbys.pid == pid
        async with lone_worker(settings, home / "m", standbys) as second:
            assert second.process.pid == pid
            assert await waiting_pid(standbys) != pid


async def test_none_is_started_while_a_model_loads_or_before_anybody_wants_one(home: Path):
    settings = lone_settings(home)
    async with sparing(settings) as standbys:
        assert standbys.pid is None
        child, was_spare = await standbys.take()
        assert not was_spare
        standbys.want()
        await until(lambda: child.hello, "its imports", IMPORT_S)
        assert standbys.pid is None
        standbys.rest()
        await until(lambda: standbys.pid, "a spare")
        await child.end(1.0)
        child.close()


async def test_where_there_are_processors_for_both_the_next_one_imports_beside_a_load(home: Path):
    """Else two models that take turns would each wait for a process that is still importing."""
    source = WorkerSource("auto")
    standbys = StandbyPool(lone_settings(home), source, has_room=lambda: True, num_cores=4)
    try:
        standbys.want()
        pid = await waiting_pid(standbys)
        child, was_spare = await standbys.take()
        assert was_spare
        assert child.pid == pid
        await until(lambda: standbys.is_waiting, "the next one, while a model loads", IMPORT_S)
        assert standbys.pid != pid
        standbys.rest()
        await child.end(1.0)
        child.close()
    finally:
        await standbys.stop()
        source.forget_first()


async def test_a_spare_that_died_is_replaced(home: Path):
    async with sparing(lone_settings(home)) as standbys:
        standbys.want()
        pid = await waiting_pid(standbys)
        os.kill(pid, signal.SIGKILL)
        await until(lambda: standbys.pid not in (None, pid), "another one")


async def test_a_spare_that_went_silent_is_ended_and_replaced(home: Path):
    settings = lone_settings(home, heartbeat_timeout_s=4.0, stop_timeout_s=0.5)
    async with sparing(settings) as standbys:
        standbys.want()
        pid = await waiting_pid(standbys)
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: not is_alive(pid), "its end")
        await until(lambda: standbys.pid not in (None, pid), "another one")


async def test_a_stopped_spare_is_not_taken_and_another_one_waits_soon(home: Path):
    settings = lone_settings(home, stop_timeout_s=0.5)
    async with sparing(settings) as standbys:
        standbys.want()
        pid = await waiting_pid(standbys)
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, "its stop")
        async with lone_worker(settings, home / "m", standbys) as worker:
            assert worker.process.pid != pid
            await until(lambda: standbys.pid, "another one")
        await until(lambda: not is_alive(pid), "its end")


async def test_where_memory_is_tight_none_waits(home: Path):
    tight = asyncio.Event()
    settings = lone_settings(home, heartbeat_timeout_s=0.2)
    async with sparing(settings, has_room=lambda: not tight.is_set()) as standbys:
        standbys.want()
        await until(lambda: standbys.pid, "a spare")
        tight.set()
        await until(lambda: standbys.pid is None, "its end")


async def test_a_process_begun_before_anything_else_becomes_the_first_worker(home: Path):
    settings = lone_settings(home)
    source = WorkerSource(settings.cpu_blas)
    first = await source.begin()
    async with (
        sparing(settings, source=source) as standbys,
        lone_worker(settings, home / "m", standbys) as worker,
    ):
        source.forget_first()  # which is somebody else's by now
        said = await answer(worker.submit(request("a", max_tokens=3)))
        assert said.finished.usage.num_output_tokens <= 3
        assert worker.process.pid == first.process.pid


async def test_it_is_not_taken_when_it_died_meanwhile(home: Path):
    settings = lone_settings(home)
    source = WorkerSource(settings.cpu_blas)
    first = await source.begin()
    first.process.kill()
    await first.process.wait()
    async with (
        sparing(settings, source=source) as standbys,
        lone_worker(settings, home / "m", standbys) as worker,
    ):
        assert worker.process.pid != first.process.pid


async def test_it_ends_when_nothing_is_loaded_at_boot_and_no_spare_is_wanted(home: Path):
    settings = lone_settings(home, spare_worker=False)
    source = WorkerSource(settings.cpu_blas)
    first = await source.begin()
    async with sparing(settings, source=source) as standbys:
        standbys.want()
        await until(lambda: not is_alive(first.process.pid), "its end")


async def test_it_can_be_switched_off(home: Path):
    settings = lone_settings(home, spare_worker=False)
    async with sparing(settings) as standbys, lone_worker(settings, home / "m", standbys) as worker:
        await answer(worker.submit(request("a", max_tokens=3)))
        assert standbys.pid is None


SERVER = """
import asyncio, sys
from pathlib import Path
from runtime.supervisor.spawned import WorkerSource
from runtime.supervisor.standby import StandbyPool
from tests.lone_worker import lone_settings
from tests.waiting import until

async def main(home):
    source = WorkerSource("auto")
    spares = StandbyPool(lone_settings(home), source)
    spares.want()
    await until(lambda: spares.is_waiting, "a spare", 30)
    print(spares.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main(Path(sys.argv[1])))
"""


async def test_it_leaves_when_its_server_is_killed(home: Path):
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SERVER, str(home)),
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert server.stdout is not None
    line = b""
    async with asyncio.timeout(PATIENCE_S + IMPORT_S):
        while not line.strip().isdigit():
            line = await server.stdout.readline()
    server.kill()
    await server.wait()
    await until(lambda: not is_alive(int(line)), "its end")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is a zombie until it is heard of")
async def test_a_process_of_whose_end_nobody_has_heard_can_be_given_up(home: Path):
    spawned = await SpawnedProcess.spawn(lone_settings(home).cpu_blas)
    os.kill(spawned.process.pid, signal.SIGKILL)
    # Without a turn of the loop, in which it would be heard of.
    while psutil.pid_exists(spawned.process.pid):
        pass
    spawned.give_up()
    assert await spawned.process.wait() == -signal.SIGKILL
