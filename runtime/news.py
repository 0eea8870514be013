"""News for whoever listens; one who does not keep up misses the oldest and is told how many."""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")

MAX_UNREAD = 256


class Batch(NamedTuple, Generic[T]):
    """What arrived since the last time; `num_missed` older ones are lost."""

    items: list[T]
    num_missed: int


class Listener(Generic[T]):
    """One reader, for as long as its `with` block lasts. It belongs to the event loop."""

    def __init__(self, news: News[T]) -> None:
        self._news = news
        self._unread: deque[T] = deque(maxlen=MAX_UNREAD)
        self._num_missed = 0
        self._arrived = asyncio.Event()

    def __enter__(self) -> Listener[T]:
        self._news.join(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._news.leave(self)

    async def next(self, timeout_s: float | None = None) -> Batch[T] | None:
        """Everything that is unread, at least one; None when nothing came in `timeout_s`."""
        if not self._unread:
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


class News(Generic[T]):
    """Told once, heard by everybody who listens at that time."""

    def __init__(self) -> None:
        self._listeners: set[Listener[T]] = set()

    @property
    def num_listeners(self) -> int:
        return len(self._listeners)

    def publish(self, item: T) -> None:
        """Tell everybody; never waits for anybody."""
        for listener in self._listeners:
            listener.tell(item)

    def listen(self) -> Listener[T]:
        """A reader, to be entered before it hears anything."""
        return Listener(self)

    def join(self, listener: Listener[T]) -> None:
        """For `Listener`."""
        self._listeners.add(listener)

    def leave(self, listener: Listener[T]) -> None:
        """For `Listener`."""
        self._listeners.discard(listener)
