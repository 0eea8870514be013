"""The events of a response that is made in the background, for whoever reads them, and when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

_END = b"\n\n"


class EventLog:
    """Events in their order; the number of each is its place."""

    def __init__(self, events: bytes = b"", *, is_complete: bool = False) -> None:
        self._events: list[bytes] = []
        self._is_complete = is_complete
        self._more = asyncio.Event()
        self.add(events)

    @property
    def whole(self) -> bytes:
        """All events so far."""
        return b"".join(self._events)

    def add(self, events: bytes) -> None:
        """Some more events, each with its own end."""
        self._events += [event + _END for event in events.split(_END) if event]
        self._wake()

    def complete(self) -> None:
        """Nothing follows."""
        self._is_complete = True
        self._wake()

    async def follow(self, after: int) -> AsyncIterator[bytes]:
        """The events behind number `after`, to the end."""
        place = after + 1
        while True:
            more = self._more
            if place < len(self._events):
                new, place = self._events[place:], len(self._events)
                yield b"".join(new)
            elif self._is_complete:
                return
            else:
                await more.wait()

    def _wake(self) -> None:
        self._more.set()
        self._more = asyncio.Event()
