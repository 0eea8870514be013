"""One worker's share of KV by blocks: by what names it finds its KV, and what was deleted of it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Iterable
from typing import Protocol

from msgspec import structs

from runtime.cache.deletion_log import Receipt
from runtime.cache.worker_channel import ChannelServer, Report, WorkerChannel
from runtime.kv_messages import (
    Drop,
    Dropped,
    Ended,
    Forget,
    HotBudget,
    InMemory,
    KvNews,
    MemoryAsked,
)
from runtime.types import ModelSpec
from runtime.wire import KvOptions
from store.types import RunFigures

_PATIENCE_S = 1.0
"""A worker answers between two steps; one that takes longer is not worth waiting for."""

_DROP_PATIENCE_S = 5.0
"""Deleting waits longer."""


class ChannelOwner(ChannelServer, Protocol):
    """The store, as such a channel sees it."""

    def join(self, channel: BlockChannel) -> None: ...

    def leave(self, channel: BlockChannel) -> None: ...

    def hear(self, channel: BlockChannel, event: Report) -> None: ...

    def measured(self, channel: BlockChannel, run: RunFigures) -> None: ...


class BlockChannel(WorkerChannel):
    """As any channel. `names` key the worker's blocks until the store is open."""

    def __init__(
        self, owner: ChannelOwner, spec: ModelSpec, budget: HotBudget | None = None
    ) -> None:
        super().__init__(owner, spec, budget)
        self.names = os.urandom(16)
        self.unnamed: dict[str, Ended] = {}
        """The heads in its memory that it told before the store was open, by their ids."""
        self.unpublished: list[Ended] = []
        """Heads that it staged and that the store could not take yet."""
        self.before: Receipt | None = None
        """Held until it has names: what is deleted by model hashes may be of what it has."""
        self._owner = owner
        self._asked: dict[int, asyncio.Future[Dropped | InMemory | None]] = {}
        self._num_asked = 0
        self._dropping: dict[int, Receipt] = {}
        """What it was told to drop and has not dropped yet, by the numbers of these questions."""

    async def options(self) -> KvOptions:
        self.kv = structs.replace(await super().options(), names=self.names)
        return self.kv

    @property
    def key(self) -> str:
        """What its allowances go by."""
        return self.names.hex()

    @property
    def model_key(self) -> bytes:
        """By what the blocks in its memory are known: its model's hash, or names of its own."""
        return self.model_hash or self.names

    def on_event(self, event: Report) -> None:
        if isinstance(event, Dropped | InMemory):
            self._dropping.pop(event.number, None)
            self._answer(event.number, event)
        else:
            self._owner.hear(self, event)

    def measured(self, run: RunFigures) -> None:
        self._owner.measured(self, run)

    def opened(self) -> None:
        self._owner.join(self)

    def closed(self) -> None:
        for number in list(self._asked):
            self._answer(number, None)
        self._dropping.clear()
        self._owner.leave(self)

    # What follows is the store's side.

    def tell(self, news: KvNews | Forget) -> None:
        """Say it to the worker, if it is there."""
        if self.send is not None:
            self.send(news)

    def drop(self, names: Iterable[bytes]) -> None:
        """Have nothing of these in its memory; nobody waits for that."""
        if names := tuple(names):
            self.tell(Drop(number=0, names=names))

    async def dropped(self, names: Collection[bytes], before: Receipt) -> int | None:
        """The same; how many pieces it had. None: it has not done it yet, and `before` is held
        until it has.
        """

        def ask(number: int) -> Drop:
            self._dropping[number] = before
            return Drop(number, tuple(names))

        told = await self._ask(ask, _DROP_PATIENCE_S)
        if isinstance(told, Dropped):
            return told.num_pieces
        return None if self.send is not None else 0

    async def in_memory(self, names: Collection[bytes]) -> frozenset[bytes]:
        """Those of these that are in its memory; none if it does not answer."""
        told = await self._ask(lambda number: MemoryAsked(number, tuple(names)), _PATIENCE_S)
        return frozenset(told.names) if isinstance(told, InMemory) else frozenset()

    async def _ask(self, say: Ask, patience_s: float) -> Dropped | InMemory | None:
        if self.send is None:
            return None
        self._num_asked += 1
        number = self._num_asked
        asked = self._asked[number] = asyncio.get_running_loop().create_future()
        self.send(say(number))
        try:
            async with asyncio.timeout(patience_s):
                return await asked
        except TimeoutError:
            return None
        finally:
            del self._asked[number]

    def _answer(self, number: int, event: Dropped | InMemory | None) -> None:
        asked = self._asked.get(number)
        if asked is not None and not asked.done():
            asked.set_result(event)


class Ask(Protocol):
    """Makes a question of its number."""

    def __call__(self, number: int, /) -> Drop | MemoryAsked: ...
