"""`EventLog`: the events of an answer that is made whether or not somebody reads them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from itertools import islice

_END = b"\n\n"
PIECE_BYTES = 1 << 16
"""Of events that are there already so many are given at once, rounded up to whole events."""


class EventLog:
    """The number of each event is its place, from 0.

    With `has_ids` it has that as its `id:`; comments are counted and have none. Of more than
    `max_bytes` the oldest are forgotten.
    """

    def __init__(
        self,
        events: bytes = b"",
        *,
        is_complete: bool = False,
        has_ids: bool = False,
        max_bytes: int | None = None,
    ) -> None:
        self._events: deque[bytes] = deque()
        self._has_ids = has_ids
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._more = asyncio.Event()
        self.first = 0
        """The number of the oldest event that is still known."""
        self.is_complete = is_complete
        self.add(events)

    @property
    def whole(self) -> bytes:
        """All events that are known so far."""
        return b"".join(self._events)

    def add(self, events: bytes) -> None:
        """Some more events, each with its own end."""
        for event in filter(None, events.split(_END)):
            number = self.first + len(self._events)
            has_id = self._has_ids and not event.startswith(b":")
            self._events.append((b"id: %d\n" % number if has_id else b"") + event + _END)
            self._num_bytes += len(self._events[-1])
        while self._max_bytes is not None and self._num_bytes > self._max_bytes:
            self._num_bytes -= len(self._events.popleft())
            self.first += 1
        self._wake()

    def complete(self) -> None:
        """Nothing follows."""
        self.is_complete = True
        self._wake()

    async def follow(self, after: int) -> AsyncIterator[bytes]:
        """The events behind number `after`, to the end, or until some of them are forgotten."""
        place = after + 1
        while place >= self.first:
            more, end = self._more, self.first + len(self._events)
            if place < end:
                new = self._piece(place)
                place += len(new)
                yield b"".join(new)
            elif self.is_complete:
                return
            else:
                await more.wait()

    def _piece(self, place: int) -> list[bytes]:
        """The events from that one on, until they are many bytes."""
        new: list[bytes] = []
        num_bytes = 0
        for event in islice(self._events, place - self.first, None):
            new.append(event)
            num_bytes += len(event)
            if num_bytes >= PIECE_BYTES:
                break
        return new

    def _wake(self) -> None:
        self._more.set()
        self._more = asyncio.Event()
