"""How a worker ends: by itself, asked, hard; what its requests are told and what is kept of it."""

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest

from runtime.cache.service import KvStore
from runtime.errors import LoadFailed, WorkerDied, WorkerWedged
from runtime.supervisor.crashes import Crashes, CrashRecord
from runtime.supervisor.generation import Generation
from runtime.supervisor.process import WorkerProcess
from runtime.types import TokenPrompt
from runtime.worker.shutdown import EXIT_OVERDUE
from tests.asking import PATIENCE_S, answer, first_chunks, request
from tests.lone_worker import LoneWorker, lone_settings, lone_worker
from tests.tiny_models import write_model
from tests.waiting import until

SLOW_TOKENS = 8192
LONG = TokenPrompt(token_ids=tuple(9 + i % 400 for i in range(60_000)))
SLOW = TokenPrompt(token_ids=LONG.token_ids[:SLOW_TOKENS])
SECRET = "the quick brown fox 42"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`m` is quick, `slow` takes seconds for one slice of `SLOW`."""
    models = tmp_path_factory.mktemp("models")
    write_model(models / "m")
    write_model(models / "slow", num_hidden_layers=16, max_position_embeddings=10_000)
    return models


async def decoding(worker: LoneWorker) -> Generation:
    generation = worker.submit(request(SECRET, max_tokens=4000, ignore_eos=True))
    await first_chunks(generation)
    return generation


def record_of(home: Path, process: WorkerProcess) -> CrashRecord:
    """The one record there is."""
    (record,) = Crashes(home / "crashes").records()
    assert (record.model, record.pid) == ("m", process.pid)
    assert process.error is not None
    assert (record.code, record.message) == (process.error.code, process.error.message)
    return record


async def gone(process: WorkerProcess) -> None:
    async with asyncio.timeout(PATIENCE_S):
        await process.gone()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
async def test_a_worker_that_is_killed_or_crashes_leaves_a_record(
    tmp_path: Path, models: Path, number: signal.Signals
):
    async with lone_worker(lone_settings(tmp_path), models / "m") as worker:
        running = await decoding(worker)
        process = worker.process
        await until(
            lambda: process.watchdog.last and process.watchdog.last.phase == "decode", "a beat"
        )
        assert process.pid is not None
        os.kill(process.pid, number)
        assert (await answer(running)).failed.code == WorkerDied.code
        await gone(process)
        record = record_of(tmp_path, process)
        assert (record.signal, record.exit_status) == (number.name, None)
        assert (record.phase, record.num_running) == ("decode", 1)
        assert record.step > 0
        assert record.memory.footprint > 10_000_000
        assert 0 < record.memory.active <= record.memory.peak <= process.crash_reporter.peak_bytes
        assert any("in run" in line for line in record.stacks) is (number is signal.SIGSEGV)
        (file,) = (tmp_path / "crashes").iterdir()
        assert SECRET not in file.read_text()
        await until(lambda: process.crash_reporter.departure, "a look at its memory")
        departure = process.crash_reporter.departure
        assert departure is not None
        assert (departure.is_clean, departure.is_memory_suspect) == (False, False)


async def test_a_hang_in_an_evaluation_is_ended_and_says_where(tmp_path: Path, models: Path):
    settings = lone_settings(
        tmp_path, wedge_timeout_s=3.0, prefill_slice=SLOW_TOKENS, stop_timeout_s=1.0
    )
    async with lone_worker(settings, models / "slow") as worker:
        running = worker.submit(request(SLOW))
        assert (await answer(running)).failed.code == WorkerWedged.code
        await gone(worker.process)
        record = record_of(tmp_path, worker.process)
        assert "made no progress in prefill" in record.message
        assert record.phase == "prefill"
        assert any("in prefill" in line for line in record.stacks)


async def test_a_kill_reaches_a_worker_that_is_already_being_ended(tmp_path: Path, models: Path):
    settings = lone_settings(tmp_path, wedge_timeout_s=3.0, prefill_slice=SLOW_TOKENS)
    async with lone_worker(settings, models / "slow") as worker:
        process = worker.process
        running = worker.submit(request(SLOW))
        await until(lambda: process.state == "wedged", "its wedge")
        assert running.is_finished
        assert not process.is_gone
        process.kill()
        await gone(process)
        assert record_of(tmp_path, process).signal == "SIGKILL"


async def test_a_worker_that_cannot_understand_the_server_ends(tmp_path: Path, models: Path):
    """Deaf it would hold its memory and wait for a long time."""
    async with lone_worker(lone_settings(tmp_path), models / "m") as worker:
        running = await decoding(worker)
        child = worker.process._child
        assert child is not None
        assert child._transport is not None
        child._transport.write(b"\x01\0\0\0\xc1")  # a byte that MessagePack never uses
        assert (await answer(running)).failed.code == WorkerDied.code
        await gone(worker.process)
        assert any("DecodeError" in line for line in record_of(tmp_path, worker.process).stderr)


async def test_a_worker_without_memory_fails_its_requests_and_is_gone(tmp_path: Path, models: Path):
    async with lone_worker(lone_settings(tmp_path), models / "m") as worker:
        process = psutil.Process(worker.process.pid)
        running = worker.submit(request(LONG))
        watchdog = worker.process.watchdog
        await until(lambda: watchdog.phase == "prefill", "a beat from the prefill")
        limit = process.memory_info().vms + (64 << 20)
        process.rlimit(psutil.RLIMIT_AS, (limit, limit))
        failed = (await answer(running)).failed
        # The allocator crashes or refuses, as it happens to be asked; both are answered.
        assert failed.code in (WorkerDied.code, "model_error")
        if failed.code == WorkerDied.code:
            await gone(worker.process)
            record = record_of(tmp_path, worker.process)
            assert record.phase == "prefill"
            assert record.signal or record.exit_status


async def test_weights_that_cannot_be_loaded_leave_a_record(tmp_path: Path, models: Path):
    path = write_model(tmp_path / "m")
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    settings = lone_settings(tmp_path)
    kv = KvStore(settings)
    kv.start()
    process = LoneWorker(settings, kv, path).process
    with pytest.raises(LoadFailed):
        await process.start()
    await gone(process)
    record = record_of(tmp_path, process)
    assert (record.code, record.exit_status) == (LoadFailed.code, 1)
    assert "incomplete download" in record.message
    assert any("Traceback" in line for line in record.stderr)
    await kv.stop()


async def test_a_worker_that_is_asked_leaves_phase_by_phase(tmp_path: Path, models: Path):
    async with lone_worker(lone_settings(tmp_path), models / "m") as worker:
        running = await decoding(worker)
        process = worker.process
        await process.stop()
        assert running.is_finished
        assert worker.states == [
            *("spawning", "loading", "warming", "ready"),
            *("flushing", "stopping", "cold"),
        ]
        assert process.error is None
        assert Crashes(tmp_path / "crashes").records() == []
        start, leave = process.clock.start_cost, process.clock.leave_cost
        assert min(start.spawn_ms, start.load_ms, start.warm_ms) > 0
        assert min(leave.drain_ms, leave.flush_ms, leave.exit_ms) > 0
        await until(lambda: process.crash_reporter.departure, "a look at its memory")
        departure = process.crash_reporter.departure
        assert departure is not None
        assert (departure.is_clean, departure.is_memory_suspect) == (True, False)
        assert departure.footprint_bytes > 10_000_000


async def test_a_worker_that_is_killed_while_it_leaves_leaves_a_record(
    tmp_path: Path, models: Path
):
    async with lone_worker(
        lone_settings(tmp_path, stop_timeout_s=PATIENCE_S), models / "m"
    ) as worker:
        process = worker.process
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        stopping = asyncio.create_task(process.stop())
        await until(lambda: process.state == "flushing", "it is asked to leave")
        os.kill(process.pid, signal.SIGKILL)
        await stopping
        (record,) = Crashes(tmp_path / "crashes").records()
        assert (record.code, record.signal, record.pid) == (
            WorkerDied.code,
            "SIGKILL",
            process.pid,
        )
        assert record.message.endswith("was killed by SIGKILL while it was leaving.")
        assert process.error is None


async def test_what_a_run_took_is_remembered_for_the_next_one(tmp_path: Path, models: Path):
    async with lone_worker(lone_settings(tmp_path, kv_disk=True), models / "m") as worker:
        await answer(worker.submit(request("a", max_tokens=3)))
        process = worker.process
        await process.stop()
        working_bytes = process.crash_reporter.working_bytes
        start_ms = process.clock.start_cost.total_ms
        async with asyncio.timeout(PATIENCE_S):
            row = (await worker.kv.remembered())["m"]
            while row.peak_bytes is None:
                row = (await worker.kv.remembered())["m"]
    assert row.load_ms == pytest.approx(start_ms)
    assert row.peak_bytes == working_bytes
    assert 0 < working_bytes <= process.crash_reporter.peak_bytes


async def test_a_worker_that_is_asked_to_leave_while_it_loads_leaves_cleanly(
    tmp_path: Path, models: Path
):
    settings = lone_settings(tmp_path, stop_timeout_s=PATIENCE_S)
    kv = KvStore(settings)
    kv.start()
    process = LoneWorker(settings, kv, models / "slow").process
    starting = asyncio.create_task(process.start())
    await until(lambda: process.pid, "a process")
    await process.stop()
    await asyncio.wait([starting])
    assert isinstance(starting.exception(), WorkerDied | None)
    assert process.crash_reporter.returncode == 0
    assert Crashes(tmp_path / "crashes").records() == []
    await kv.stop()


async def test_what_a_worker_counted_last_is_told_when_it_leaves(tmp_path: Path, models: Path):
    async with lone_worker(lone_settings(tmp_path), models / "m") as worker:
        usage = (await answer(worker.submit(request("a kettle hums", max_tokens=3)))).finished.usage
        await worker.process.stop()
        counts = worker.process.kv.counts
        assert counts.num_computed_tokens == usage.num_prompt_tokens - 1


async def test_a_worker_that_cannot_leave_in_time_ends_anyway(tmp_path: Path, models: Path):
    settings = lone_settings(tmp_path, stop_timeout_s=0.3, prefill_slice=SLOW_TOKENS)
    async with lone_worker(settings, models / "slow") as worker:
        process = worker.process
        running = worker.submit(request(SLOW))
        await running.accepted()
        await until(lambda: process.watchdog.last and process.watchdog.last.is_busy, "a slice")
        await process.stop()
        assert process.is_gone
        await until(lambda: process.crash_reporter.departure, "a look at its memory")
        departure = process.crash_reporter.departure
        assert departure is not None
        assert not departure.is_clean
        assert process.crash_reporter.returncode in (EXIT_OVERDUE, -signal.SIGTERM)


async def test_a_worker_that_dies_before_it_is_told_to_load_is_told_nothing(
    tmp_path: Path, models: Path
):
    """Its KV is looked for while it dies: the store is opened only afterwards."""
    settings = lone_settings(tmp_path, kv_disk=True)
    kv = KvStore(settings)
    process = LoneWorker(settings, kv, models / "m").process
    starting = asyncio.create_task(process.start())
    await until(lambda: process.pid, "a process")
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    await gone(process)
    kv.start()
    with pytest.raises(WorkerDied):
        await starting
    assert kv.loaded_models() == frozenset()
    await kv.stop()
