"""The events of a response that is made in the background, for whoever reads them, and when."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator

MAX_BYTES = 32 << 20
"""Of all logs that are complete; beyond it those go that were completed first."""

_END = b"\n\n"
_SIGN_OF_LIFE = b": in progress\n\n"


class EventLog:
    """Events in their order; the number of each is its place."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.is_complete = False
        self._events: list[bytes] = []
        self._more = asyncio.Event()

    def add(self, events: bytes) -> None:
        """Some more events, each with its own end."""
        self._events += [event + _END for event in events.split(_END) if event]
        self.num_bytes += len(events)
        self._wake()

    def complete(self) -> None:
        """Nothing follows."""
        self.is_complete = True
        self._wake()

    async def follow(self, after: int, keep_alive_s: float) -> AsyncIterator[bytes]:
        """The events behind number `after`, to the end; comments while there is nothing new."""
        place = after + 1
        while True:
            more = self._more
            if place < len(self._events):
                new, place = self._events[place:], len(self._events)
                yield b"".join(new)
            elif self.is_complete:
                return
            else:
                try:
                    async with asyncio.timeout(keep_alive_s):
                        await more.wait()
                except TimeoutError:
                    yield _SIGN_OF_LIFE

    def _wake(self) -> None:
        self._more.set()
        self._more = asyncio.Event()


class EventLogs:
    """The logs of responses by their keys: all that are written, and the latest complete ones."""

    def __init__(self) -> None:
        self._logs: OrderedDict[str, EventLog] = OrderedDict()

    def begin(self, key: str) -> EventLog:
        """A log that is written from now on."""
        self._logs[key] = log = EventLog()
        return log

    def get(self, key: str) -> EventLog | None:
        """The log of a response, while it is kept."""
        return self._logs.get(key)

    def complete(self, key: str) -> None:
        """A log gets no more events; it stays for a while."""
        if (log := self._logs.get(key)) is None:
            return
        log.complete()
        self._logs.move_to_end(key)
        old = [one for one, kept in self._logs.items() if kept.is_complete]
        num_bytes = sum(self._logs[one].num_bytes for one in old)
        for one in old:
            if num_bytes <= MAX_BYTES:
                break
            num_bytes -= self._logs.pop(one).num_bytes

    def remove(self, key: str) -> None:
        """Forget a log."""
        self._logs.pop(key, None)
