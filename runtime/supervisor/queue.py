"""Requests that no worker has yet: bounded, in order, and each known by its id. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from runtime.types import Priority

_RANKS: dict[Priority, int] = {"interactive": 0, "default": 1, "background": 2}


class Waiter(Protocol):
    """What a queue holds. Times are of one monotonic clock; `model` is an id, never an alias."""

    @property
    def request_id(self) -> str: ...

    @property
    def model(self) -> str: ...

    @property
    def priority(self) -> Priority: ...

    @property
    def since_s(self) -> float: ...

    @property
    def until_s(self) -> float: ...

    @property
    def idle_until_s(self) -> float: ...

    @property
    def yields(self) -> bool: ...


W = TypeVar("W", bound=Waiter)


class RequestQueue(Generic[W]):
    """Every waiter once. One that comes back after its worker died keeps its place."""

    def __init__(self) -> None:
        self._waiters: dict[str, W] = {}

    def __len__(self) -> int:
        return len(self._waiters)

    def __iter__(self) -> Iterator[W]:
        return iter(tuple(self._waiters.values()))

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiters

    def add(self, waiter: W) -> None:
        """Let it wait.

        Raises:
            ValueError: one with its id waits already.
        """
        if waiter.request_id in self._waiters:
            raise ValueError(f"the request {waiter.request_id} waits already")
        self._waiters[waiter.request_id] = waiter

    def take(self, request_id: str) -> W | None:
        """The waiter of that id, which waits no longer; None when it did not."""
        return self._waiters.pop(request_id, None)

    def take_all_of(self, model: str) -> list[W]:
        """Everything that waits for a model."""
        return [self._waiters.pop(one.request_id) for one in self.of(model)]

    def take_late(self, now_s: float) -> list[W]:
        """Everything that has waited for as long as it may."""
        late = [one for one in self._waiters.values() if one.until_s <= now_s]
        for one in late:
            del self._waiters[one.request_id]
        return late

    def of(self, model: str) -> list[W]:
        """What waits for a model."""
        return [one for one in self._waiters.values() if one.model == model]

    def num_of(self, model: str) -> int:
        return sum(one.model == model for one in self._waiters.values())

    def due(self, running: Iterable[Waiter], now_s: float) -> list[W]:
        """What may be served now. Who waits for idle time lets everybody else be served first,
        until that time is over; what only warms the cache is nobody else.
        """
        everybody = (*self._waiters.values(), *running)
        is_idle = all(one.yields or _is_patient(one) for one in everybody)
        return [one for one in self._waiters.values() if is_idle or one.idle_until_s <= now_s]

    def due_s(self, now_s: float) -> float | None:
        """When the first of them will have waited for too long, or for idle time long enough."""
        times = [one.until_s for one in self._waiters.values()]
        times += [one.idle_until_s for one in self._waiters.values() if one.idle_until_s > now_s]
        return min(times, default=None)

    def in_order(self) -> list[W]:
        """Best class first, inside a class who came first."""
        return sorted(self._waiters.values(), key=lambda one: (_RANKS[one.priority], one.since_s))


def _is_patient(one: Waiter) -> bool:
    """It waits, or waited, for idle time."""
    return one.idle_until_s > one.since_s
