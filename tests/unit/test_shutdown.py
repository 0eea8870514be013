"""How a worker that hangs is put down: its stacks are heard before it is told to leave."""

from __future__ import annotations

import asyncio
import os
import signal

from typing_extensions import override

from runtime.supervisor.shutdown import WorkerShutdown
from runtime.supervisor.spawn import Child
from runtime.supervisor.worker_clock import WorkerClock
from runtime.work_page import WorkPage, new_page

STACKS = ["Current thread 0x00007f (most recent call first):", '  File "/a/b.py", line 3 in f']


class Late(Child):
    """A process that tells where it stands when it was looked at so often."""

    def __init__(self, process: asyncio.subprocess.Process, num_looks: int) -> None:
        page = new_page()
        super().__init__(process, WorkPage(page))
        os.close(page)
        self.done: list[signal.Signals | str] = []
        self._num_looks = num_looks

    @property
    @override
    def output(self) -> list[str]:
        self._num_looks -= 1
        return STACKS if self._num_looks <= 0 else []

    @override
    def signal(self, number: signal.Signals) -> None:
        if number != signal.SIGCONT:
            self.done.append(number)

    @override
    def close(self) -> None:
        self.done.append("closed" if self._num_looks <= 0 else "closed unheard")

    @override
    async def wait(self, timeout_s: float | None = None) -> bool:
        return True


async def put_down(num_looks: int) -> list[signal.Signals | str]:
    process = await asyncio.create_subprocess_exec("true")
    await process.wait()
    child = Late(process, num_looks)
    await WorkerShutdown(child, WorkerClock(), 1.0).put_down(is_silent=False)
    return child.done


async def test_a_process_that_is_slow_to_tell_its_stacks_is_heard_out():
    assert await put_down(3) == [signal.SIGUSR1, "closed"]


async def test_one_that_tells_nothing_is_asked_by_both_signals_and_closed_all_the_same():
    assert await put_down(1000) == [signal.SIGUSR1, signal.SIGUSR2, "closed unheard"]
