"""Rows of finished requests, written some seconds later and several at a time."""

from __future__ import annotations

import asyncio
from collections import deque

from runtime.cache.lifecycle import StoreLife
from store.types import RequestRow

_WRITE_ROWS_S = 5.0
_MAX_WAITING_ROWS = 1000
"""While the store fails the oldest are dropped: nobody waits for them."""


class RequestRows:
    """Belongs to the event loop."""

    def __init__(self, life: StoreLife) -> None:
        self._life = life
        self._waiting: deque[RequestRow] = deque(maxlen=_MAX_WAITING_ROWS)
        self._writing: asyncio.Task[None] | None = None

    def add(self, row: RequestRow) -> None:
        """Remember a finished request; without a store it is forgotten."""
        if self._life.store is None:
            return
        self._waiting.append(row)
        if self._writing is None or self._writing.done():
            self._writing = self._life.spawn(self._write())

    async def _write(self) -> None:
        await self._life.pause(_WRITE_ROWS_S)
        rows = list(self._waiting)
        self._waiting.clear()
        await self._life.attempt(
            lambda store: store.records.add_requests(rows, store.clock.now_s()).result()
        )
