"""Workers forked from the zygote: they live and die as others do, whatever becomes of it."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from runtime.errors import WorkerDied
from runtime.supervisor.crashes import Crashes
from runtime.supervisor.source import WorkerSource, Zygote
from runtime.supervisor.spawn import Child
from runtime.supervisor.standby import StandbyPool
from runtime.types import SamplingParams
from runtime.zygote import EXIT_UNFIT, STATUS_UNKNOWN
from tests.asking import answer, request
from tests.lone_worker import LoneWorker, lone_settings, lone_worker
from tests.tiny_models import write_model
from tests.waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is forked")
HELLO_S = 120.0
NOTICED_S = 120.0


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    write_model(home / "m")
    return home


@asynccontextmanager
async def forking() -> AsyncGenerator[tuple[WorkerSource, Zygote]]:
    source = WorkerSource("auto")
    await source.prepare()
    assert source.zygote is not None
    try:
        yield source, source.zygote
    finally:
        await source.close()


@asynccontextmanager
async def loaded(home: Path, source: WorkerSource) -> AsyncGenerator[LoneWorker]:
    settings = lone_settings(home)
    standbys = StandbyPool(settings, source, pause_s=0.05, has_room=lambda: True)
    try:
        async with lone_worker(settings, home / "m", standbys) as worker:
            yield worker
    finally:
        await standbys.stop()


async def child_of(source: WorkerSource) -> Child:
    """A worker that waits for its model."""
    child = await Child.adopt(await source.get())
    await until(lambda: child.hello, "its hello", HELLO_S)
    return child


async def said_by(worker: LoneWorker) -> str:
    return (await answer(worker.submit(request("a", max_tokens=3)))).text


async def test_each_has_a_process_of_the_zygotes_whose_end_is_told_with_its_status():
    async with forking() as (source, zygote):
        first, second, third = [await child_of(source) for _ in range(3)]
        pids = {one.pid for one in (first, second, third)}
        assert {psutil.Process(pid).ppid() for pid in pids} == {zygote.pid}
        assert len(pids) == 3
        second.signal(signal.SIGKILL)  # whose socket later ones must not hold
        await second.closed.wait()
        assert await second.wait()
        assert second.returncode == -signal.SIGKILL
        first.close()
        assert await first.wait()
        assert first.returncode == 0
        assert third.is_fit(HELLO_S)
        os.kill(third.pid, signal.SIGABRT)  # faulthandler tells its stacks
        assert await third.wait()
        await third.hear_out()
        assert third.returncode == -signal.SIGABRT
        assert "Fatal Python error: Aborted" in third.output


async def test_workers_of_one_zygote_draw_each_for_itself(home: Path):
    async with forking() as (source, _):
        texts: list[str] = []
        for _ in range(2):
            async with loaded(home, source) as worker:
                drawn = request("a", sampling=SamplingParams(temperature=1.0), max_tokens=16)
                texts.append((await answer(worker.submit(drawn))).text)
        assert texts[0] != texts[1]


async def test_a_worker_outlives_the_zygote_and_another_zygote_forks_the_next(home: Path):
    async with forking() as (source, zygote), loaded(home, source) as worker:
        text = await said_by(worker)
        os.kill(zygote.pid, signal.SIGKILL)
        await until(lambda: source.zygote not in (None, zygote), "another zygote")
        assert await said_by(worker) == text
        async with loaded(home, source) as another:
            assert await said_by(another) == text


async def test_the_end_of_a_worker_that_outlived_the_zygote_is_noticed_and_no_cause_made_up(
    home: Path,
):
    async with forking() as (source, zygote), loaded(home, source) as worker:
        process = worker.process
        assert process.pid is not None
        os.kill(zygote.pid, signal.SIGKILL)
        await until(lambda: source.zygote is not zygote, "its end")
        os.kill(process.pid, signal.SIGKILL)
        await process.gone()
        assert isinstance(process.error, WorkerDied)
        assert "the process that could tell how has ended before it" in process.error.message
        (record,) = Crashes(home / "crashes").records()
        assert (record.pid, record.signal, record.exit_status) == (process.pid, None, None)
        assert process.crash_reporter.returncode == STATUS_UNKNOWN


async def test_the_end_of_a_worker_is_noticed_while_the_zygote_is_stopped():
    async with forking() as (source, zygote):
        child = await child_of(source)
        os.kill(zygote.pid, signal.SIGSTOP)
        child.signal(signal.SIGKILL)
        assert await child.wait(NOTICED_S)
        assert child.returncode == STATUS_UNKNOWN


async def test_while_there_is_no_zygote_workers_are_spawned(home: Path):
    async with forking() as (source, zygote):
        os.kill(zygote.pid, signal.SIGKILL)
        await until(lambda: source.zygote is None, "its end")
        async with loaded(home, source) as worker:
            assert worker.process.pid is not None
            assert psutil.Process(worker.process.pid).ppid() != zygote.pid
            assert await said_by(worker)


async def test_one_that_can_fork_no_more_goes_on_and_the_worker_is_spawned(home: Path):
    async with forking() as (source, zygote):
        first = await child_of(source)
        process = psutil.Process(zygote.pid)
        process.rlimit(psutil.RLIMIT_NOFILE, (process.num_fds(), process.num_fds()))
        second = await child_of(source)
        assert psutil.Process(second.pid).ppid() != zygote.pid
        first.signal(signal.SIGKILL)
        assert await first.wait()
        second.close()
        assert await second.wait()


UNFIT = """
import runpy, socket, sys, threading
import runtime.worker.__main__
threading.Thread(target=threading.Event().wait, daemon=True).start()
ours, theirs = socket.socketpair()
sys.argv = ["worker", "--fd", str(theirs.fileno()), "--forks"]
runpy.run_module("runtime.worker", run_name="__main__", alter_sys=True)
"""


async def test_a_process_in_which_a_thread_runs_refuses_to_be_one():
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", UNFIT),
        stdin=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    _, said = await process.communicate()
    assert process.returncode == EXIT_UNFIT
    assert b"workers are not forked: something that was imported runs a thread" in said
