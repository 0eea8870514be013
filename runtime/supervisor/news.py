"""News for whoever listens; one who does not keep up misses the oldest and is told how many."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")

MAX_UNREAD = 256


class Batch(NamedTuple, Generic[T]):
    """What arrived since the last time; `num_missed` older ones are lost."""

    items: list[T]
    num_missed: int


class Listener(Generic[T]):
    """One reader, from its creation until it is closed. It belongs to the event loop."""

    def __init__(self, news: News[T]) -> None:
        self.is_closed = False
        self._news = news
        self._unread: deque[T] = deque(maxlen=MAX_UNREAD)
        self._num_missed = 0
        self._arrived = asyncio.Event()

    async def next(self, timeout_s: float | None = None) -> Batch[T] | None:
        """Everything that is unread; None when nothing came in `timeout_s`.

        Nothing is in it when the listener was closed.
        """
        if not self._unread and not self.is_closed:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._arrived.wait()
            except TimeoutError:
                return None
        batch = Batch(list(self._unread), self._num_missed)
        self._unread.clear()
        self._num_missed = 0
        self._arrived.clear()
        return batch

    def tell(self, item: T) -> None:
        """For `News`."""
        self._num_missed += len(self._unread) == MAX_UNREAD
        self._unread.append(item)
        self._arrived.set()

    def close(self) -> None:
        """Hear no more. It may be called any number of times."""
        self.is_closed = True
        self._news.leave(self)
        self._arrived.set()


class News(Generic[T]):
    """Told once, heard by everybody who listens at that time."""

    def __init__(self) -> None:
        self._listeners: set[Listener[T]] = set()

    def publish(self, item: T) -> None:
        """Tell everybody; never waits for anybody."""
        for listener in self._listeners:
            listener.tell(item)

    def listen(self) -> Listener[T]:
        """A reader of all that is published from now on; it must be closed."""
        listener = Listener(self)
        self._listeners.add(listener)
        return listener

    def leave(self, listener: Listener[T]) -> None:
        """For `Listener`."""
        self._listeners.discard(listener)

    def close(self) -> None:
        """Nothing more is going to be told."""
        for listener in list(self._listeners):
            listener.close()
