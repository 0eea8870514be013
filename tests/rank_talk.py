"""A conversation with a model on several ranks, of which all that is said comes to disk."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from runtime.cache.opened import BlockStore
from runtime.cache.service import KvStore
from runtime.supervisor.supervisor import Supervisor
from store.head_file import KnownHead, read_end
from store.slots import BlockKey
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

    @property
    def store(self) -> BlockStore:
        store = self.kv.store
        assert store is not None
        return store

    async def published(self, *, with_end: bool = True) -> KnownHead:
        """The head of the first turn, once all of it is on disk, to its last token, or but for what
        is behind its last whole block.
        """
        usage = self.first.finished.usage
        num_tokens = usage.num_prompt_tokens + usage.num_output_tokens
        found: list[KnownHead] = []

        def is_there() -> bool:
            heads = self.store.heads
            with heads.lock:
                every = heads.known.values()
                known = [
                    one for one in every if one.head.num_tokens in (num_tokens - 1, num_tokens)
                ]
                found[:] = [
                    one for one in known if one.path and (read_end(one.path) or not with_end)
                ]
            return bool(found)

        await until(is_there, "all of the first turn on disk")
        return found[0]

    def chain(self, known: KnownHead) -> Sequence[BlockKey]:
        """The blocks that a head goes through, the first one first."""
        return [*self.store.heads.kept.chain(known.last)][::-1]

    async def kill(self) -> None:
        """End rank 0 as kill -9 does, and with it the other."""
        worker = psutil.Process(worker_of(self.supervisor, self.model).pid)
        ranks = [worker, *worker.children(recursive=True)]
        worker.kill()
        await asyncio.to_thread(psutil.wait_procs, ranks, 30)


def spoil(path: Path) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
