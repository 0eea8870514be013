"""A conversation with a model on several ranks, of which all that is said comes to disk."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import NamedTuple

import psutil

from runtime.cache.service import KvStore
from runtime.supervisor.supervisor import Supervisor
from store.slots import opened, read_contents
from store.types import SlotRow
from tests.asking import Answer, ask, worker_of
from tests.waiting import until

LONG = "the quick brown fox jumps over the lazy dog while a kettle hums on the hearth " * 20


class Talk(NamedTuple):
    """A supervisor with its store, and a conversation's first answer."""

    supervisor: Supervisor
    kv: KvStore
    first: Answer
    model: str = "m"

    async def go_on(self) -> Answer:
        """The second turn."""
        prompt = LONG + self.first.text + " and then"
        return await ask(self.supervisor, prompt, model=self.model)

    def slots(self) -> list[SlotRow]:
        store = self.kv.store
        assert store is not None
        return store.index.all_slots()

    async def published(self) -> list[SlotRow]:
        """The slots of the first turn, once all of it is on disk."""
        usage = self.first.finished.usage

        def is_there() -> bool:
            ends = [row.header.end for row in self.slots()]
            return max(ends, default=0) >= usage.num_prompt_tokens + usage.num_output_tokens - 1

        await until(is_there, "all of the first turn on disk")
        return self.slots()

    async def kill(self) -> None:
        """End rank 0 as kill -9 does, and with it the other."""
        worker = psutil.Process(worker_of(self.supervisor, self.model).pid)
        ranks = [worker, *worker.children(recursive=True)]
        worker.kill()
        await asyncio.to_thread(psutil.wait_procs, ranks, 30)


def spoil(path: Path, suffix: str) -> None:
    """Flip one bit of what one rank wrote."""
    with opened(path) as fd:
        contents = read_contents(fd)
    entry = next(one for one in contents.tensors if one.name.endswith(suffix))
    data = bytearray(path.read_bytes())
    data[contents.payload_start + entry.start] ^= 1
    path.write_bytes(data)
