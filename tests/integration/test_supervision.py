"""Workers that die, hang or must leave: what requests are told, and what stays behind."""

import asyncio
import gc
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest

from runtime.config.settings import ModelSettings
from runtime.errors import (
    HearthError,
    ModelUnavailable,
    Overloaded,
    PoisonRequest,
)
from runtime.supervisor.generation import Generation
from runtime.supervisor.process import WorkerProcess
from runtime.supervisor.supervisor import Supervisor
from runtime.timeouts import stop_bound_s
from runtime.types import PrefillProgress, TokenPrompt
from tests.asking import (
    PATIENCE_S,
    answer,
    ask,
    first_chunks,
    request,
    status_of,
    supervising,
    worker_of,
)
from tests.forked_worker import own_workers
from tests.tiny_models import write_model
from tests.waiting import until

LONG = TokenPrompt(token_ids=tuple(9 + i % 400 for i in range(60_000)))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    write_model(home / "models" / "m")
    write_model(home / "models" / "other", "lfm2", seed=1)
    return home


def submit_endless(supervisor: Supervisor) -> Generation:
    return supervisor.submit(request("a", max_tokens=4000, ignore_eos=True))


def phase_of(supervisor: Supervisor) -> str:
    worker = supervisor.worker("m")
    return worker.watchdog.phase if isinstance(worker, WorkerProcess) else ""


def pid_of(supervisor: Supervisor, model: str = "m") -> int:
    pid = worker_of(supervisor, model).pid
    assert pid is not None
    return pid


async def error_of(generation: Generation) -> str:
    """The code of what ended it, refused or failed."""
    try:
        return (await answer(generation)).failed.code
    except HearthError as error:
        return error.code


async def test_a_killed_worker_is_replaced_and_its_requests_go_on(home: Path):
    models = {"m": ModelSettings(context=100_000)}
    async with supervising(home, models=models, max_batch=1, prefill_slice=32) as supervisor:
        decoding = submit_endless(supervisor)
        await first_chunks(decoding)
        queued = submit_endless(supervisor)
        await queued.accepted()
        pid = pid_of(supervisor)
        os.kill(pid, signal.SIGKILL)
        await until(lambda: status_of(supervisor).num_crashes == 1, "its end")
        assert {one.is_finished for one in (decoding, queued)} == {False}
        await until(lambda: decoding.worker_pid not in (None, pid), "its going on")
        decoding.abort()
        await first_chunks(queued)
        queued.abort()
        assert "SIGKILL" in str(status_of(supervisor).last_error)
        assert (await ask(supervisor, "a", max_tokens=3)).finished.usage.num_output_tokens <= 3
        assert pid_of(supervisor) != pid
        assert status_of(supervisor).num_starts == 2


@pytest.mark.usefixtures("slow_loads")
async def test_a_request_that_waits_for_the_load_is_served_when_workers_are_killed(home: Path):
    async with supervising(home) as supervisor:
        waiting = submit_endless(supervisor)
        for number in (1, 2):
            await until(lambda n=number: status_of(supervisor).num_starts == n, "a start")
            await until(lambda: status_of(supervisor).pid, "a process")
            os.kill(pid_of(supervisor), signal.SIGKILL)
            await until(lambda n=number: status_of(supervisor).num_crashes == n, "a crash")
        await until(lambda: status_of(supervisor).state == "backing_off", "a pause")
        assert 0 < (status_of(supervisor).retry_in_s or 0) <= 1.2
        assert await first_chunks(waiting)
        assert (status_of(supervisor).num_starts, status_of(supervisor).num_crashes) == (3, 2)


@pytest.mark.usefixtures("slow_loads")  # or it may be answered before it is killed
async def test_three_crashes_in_a_row_open_the_breaker_until_somebody_restarts(home: Path):
    async with supervising(home) as supervisor:
        waiting = submit_endless(supervisor)
        for number in (1, 2, 3):
            await until(lambda n=number: status_of(supervisor).num_starts == n, "a start")
            await until(lambda: status_of(supervisor).pid, "a process")
            os.kill(pid_of(supervisor), signal.SIGKILL)
            await until(lambda n=number: status_of(supervisor).num_crashes == n, "a crash")
        with pytest.raises(ModelUnavailable, match="tried again in 600 s") as caught:
            await waiting.accepted()
        assert caught.value.retry_after_s == 600
        assert status_of(supervisor).state == "failed"
        assert await error_of(submit_endless(supervisor)) == ModelUnavailable.code
        assert status_of(supervisor).num_starts == 3
        await supervisor.restart("m").granted()
        assert (await ask(supervisor, "a", max_tokens=3)).finished


async def test_a_request_has_everything_reconciled_when_it_comes_and_when_it_ends(home: Path):
    calls: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name == "_reconcile":
            calls.append(frame.f_code.co_filename)

    async with supervising(home) as supervisor:
        await ask(supervisor, "a", max_tokens=3)
        sys.setprofile(note)
        try:
            generation = supervisor.submit(request("b", max_tokens=3, ignore_eos=True))
            num_at_first = len(calls)
            await answer(generation)
        finally:
            sys.setprofile(None)
    assert (num_at_first, len(calls)) == (1, 2)


async def test_the_last_words_of_a_crashed_worker_are_kept(home: Path):
    async with supervising(home) as supervisor:
        running = submit_endless(supervisor)
        await first_chunks(running)
        os.kill(pid_of(supervisor), signal.SIGABRT)
        await until(lambda: status_of(supervisor).num_crashes, "its end")
        running.abort()
        await until(lambda: "Fatal Python error: Aborted" in supervisor.stderr_tail("m"), "stacks")
        assert "SIGABRT" in str(status_of(supervisor).last_error)


async def stop_again_and_again(pid: int) -> None:
    """As a debugger does that holds it."""
    with suppress(ProcessLookupError):
        while True:
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(0)


async def test_a_worker_that_somebody_holds_is_wedged_and_replaced(home: Path):
    async with supervising(home, heartbeat_timeout_s=1.0, stop_timeout_s=1.0) as supervisor:
        running = submit_endless(supervisor)
        await first_chunks(running)
        pid = pid_of(supervisor)
        holding = asyncio.create_task(stop_again_and_again(pid))
        await until(lambda: running.worker_pid != pid, "its going on")
        await holding
        running.abort()
        assert "gave no sign of life" in str(status_of(supervisor).last_error)
        assert (await ask(supervisor, "a", max_tokens=3)).finished
        assert pid_of(supervisor) != pid
    assert not psutil.pid_exists(pid)


async def test_only_what_a_worker_computed_for_is_blamed_for_its_end(tmp_path: Path):
    write_model(tmp_path / "models" / "m", num_hidden_layers=16, max_position_embeddings=10_000)
    async with supervising(tmp_path, prefill_slice=8192, stop_timeout_s=1.0) as supervisor:
        await ask(supervisor, "a", max_tokens=1)
        guilty = supervisor.submit(request(TokenPrompt(token_ids=LONG.token_ids[:8192])))
        # In the background, because a short prompt of the same class would be computed first.
        fields: dict[str, Any] = {"max_tokens": 2, "priority": "background"}
        bystanders = [supervisor.submit(request(f"b {i}", **fields)) for i in range(3)]
        for number in (1, 2):
            await until(lambda: "prefill" in guilty.phase, "the one slice")
            await until(lambda: phase_of(supervisor) == "prefill", "its being heard of")
            os.kill(pid_of(supervisor), signal.SIGKILL)
            await until(lambda n=number: status_of(supervisor).num_crashes == n, "its end")
        assert await error_of(guilty) == PoisonRequest.code
        for one in bystanders:
            assert (await answer(one)).finished.usage.num_output_tokens
        assert status_of(supervisor).num_starts == 3


async def test_a_worker_that_is_busy_and_does_not_step_is_wedged_and_replaced(tmp_path: Path):
    write_model(tmp_path / "models" / "m", num_hidden_layers=16, max_position_embeddings=10_000)
    quick = {"wedge_timeout_s": 3.0, "stop_timeout_s": 1.0}
    async with supervising(tmp_path, prefill_slice=8192, **quick) as supervisor:
        await ask(supervisor, "a", max_tokens=1)
        pid = pid_of(supervisor)
        prompt = TokenPrompt(token_ids=LONG.token_ids[:8192])
        running = supervisor.submit(request(prompt))
        await until(lambda: not psutil.pid_exists(pid), "its end")
        assert "made no progress in prefill" in str(status_of(supervisor).last_error)
        await until(lambda: "in prefill" in supervisor.stderr_tail("m"), "its stacks")
        assert await error_of(running) == PoisonRequest.code
        assert status_of(supervisor).num_starts == 2  # the first time may have been bad luck
        with pytest.raises(PoisonRequest, match="not served again for"):
            supervisor.submit(request(prompt))


SERVER = """
import asyncio, sys
from pathlib import Path
from tests.asking import first_chunks, request, status_of, supervising
from tests.waiting import until

async def main(home, phase):
    async with supervising(home) as supervisor:
        generation = supervisor.submit(request("a", max_tokens=4000, ignore_eos=True))
        await until(lambda: status_of(supervisor).pid, "a process")
        if phase == "busy":
            await first_chunks(generation)
        print(status_of(supervisor).pid, flush=True)
        await asyncio.Event().wait()

asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
"""


@pytest.mark.parametrize("phase", ["starting", "busy"])
async def test_a_worker_ends_when_its_server_is_killed(home: Path, phase: str):
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SERVER, str(home), phase),
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert server.stdout is not None
    line = b""
    async with asyncio.timeout(PATIENCE_S):
        while not line.strip().isdigit():
            line = await server.stdout.readline()
    pid = int(line)
    server.kill()
    await server.wait()
    await until(lambda: not is_alive(pid), "the worker's end")


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_models_take_turns_as_requests_name_them(home: Path):
    async with supervising(home) as supervisor:
        generations = [supervisor.submit(request("a", model=name)) for name in ("other", "m", "m")]
        texts: list[str] = []
        for generation in generations:
            texts.append((await answer(generation)).text)
            assert len(own_workers()) <= 1  # the one that answered may have left
        assert texts[0] != texts[1] == texts[2]
        assert (await ask(supervisor, "a", model="other")).text == texts[0]
        assert status_of(supervisor, "m").state == "cold"
        assert status_of(supervisor, "other").state == "ready"
        assert status_of(supervisor, "other").num_crashes == 0


async def test_a_busy_model_is_not_taken_away(home: Path):
    async with supervising(home) as supervisor:
        running = supervisor.submit(request("a", max_tokens=1200, ignore_eos=True))
        await first_chunks(running)
        waiting = supervisor.submit(request("a", model="other", max_tokens=3))
        assert waiting.phase == "queued 1"
        rest = await answer(running)
        assert rest.finished.usage.num_output_tokens == 1200
        assert (await answer(waiting)).finished
        assert status_of(supervisor).state == "cold"


@pytest.mark.usefixtures("slow_loads")
async def test_an_abort_while_loading_leaves_the_model_to_the_others(home: Path):
    async with supervising(home, max_queue=2) as supervisor:
        first, second = submit_endless(supervisor), supervisor.submit(request("a", max_tokens=2))
        with pytest.raises(Overloaded):
            submit_endless(supervisor)
        first.abort()
        assert await error_of(first) == "cancelled"
        assert status_of(supervisor).num_waiting == 1
        assert (await answer(second)).finished
        assert status_of(supervisor).num_starts == 1


@pytest.mark.usefixtures("slow_loads")
async def test_the_deadline_counts_the_wait_for_the_model(home: Path):
    async with supervising(home) as supervisor:
        waiting = supervisor.submit(request("a", ignore_eos=True, deadline_s=0.05))
        late = await answer(waiting)
        assert late.finished.reason == "length"
        assert late.finished.usage.num_output_tokens == 0


async def spawn_nothing(supervisor: Supervisor, generation: Generation) -> None:
    assert worker_of(supervisor).pid is None


async def spawn(supervisor: Supervisor, generation: Generation) -> None:
    await until(lambda: status_of(supervisor).pid, "a process")


async def load(supervisor: Supervisor, generation: Generation) -> None:
    # It may be over already when this looks: the model is small.
    await until(lambda: worker_of(supervisor).state in ("loading", "warming", "ready"), "loading")


async def prefill(supervisor: Supervisor, generation: Generation) -> None:
    assert isinstance((await first_chunks(generation))[0], PrefillProgress)


async def idle(supervisor: Supervisor, generation: Generation) -> None:
    await generation.accepted()
    generation.abort()


PHASES = (spawn_nothing, spawn, load, prefill, idle)


@pytest.mark.usefixtures("slow_loads")
@pytest.mark.parametrize("reach", PHASES)
async def test_a_stop_in_any_phase_ends_requests_and_processes(
    home: Path, reach: Callable[[Supervisor, Generation], Awaitable[None]]
):
    models = {"m": ModelSettings(context=100_000)}
    async with supervising(home, models=models, prefill_slice=32) as supervisor:
        generation = supervisor.submit(request(LONG))
        await reach(supervisor, generation)
        start = time.monotonic()
        await supervisor.stop()
        assert time.monotonic() - start < stop_bound_s(5.0, 0)
        assert generation.is_finished
        assert own_workers() == []
        assert status_of(supervisor).num_crashes == 0
        with pytest.raises(Overloaded):
            submit_endless(supervisor)


async def cycle(home: Path, number: int) -> None:
    async with supervising(home) as supervisor:
        await first_chunks(submit_endless(supervisor))
        if number % 2:
            os.kill(pid_of(supervisor), signal.SIGKILL)


async def num_left_after(home: Path, num_cycles: int) -> int:
    """How many descriptors the cycles leave behind."""
    await cycle(home, 0)
    before = num_descriptors()
    for number in range(num_cycles):
        await cycle(home, number)
    assert own_workers() == []
    return num_descriptors() - before


def num_descriptors() -> int:
    gc.collect()  # what earlier tests left is not theirs
    return psutil.Process().num_fds()


async def test_a_few_workers_leave_nothing_behind(home: Path):
    assert await num_left_after(home, 2) == 0


@pytest.mark.soak
async def test_many_workers_leave_nothing_behind(home: Path):
    assert await num_left_after(home, 20) == 0
