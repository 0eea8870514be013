"""When a worker's start and end reached their phases; all times are of one monotonic clock."""

from __future__ import annotations

from runtime.supervisor.swap_cost import LeaveCost, StartCost


class WorkerClock:
    """Told of each phase when it is reached; what was not reached costs nothing.

    The first process of a server imports for all, which is no part of what a model costs.
    """

    def __init__(self, *, is_first: bool = False) -> None:
        self._is_first = is_first
        self._began_s = self._hello_s = self._load_s = self._read_s = self._ready_s = 0.0
        self._asked_s = self._flush_s = self._flushed_s = self._exited_s = 0.0

    @property
    def is_flushing(self) -> bool:
        """The flush has begun."""
        return self._flush_s > 0

    @property
    def start_cost(self) -> StartCost:
        """Spawning ends when the process is up and was told what to load."""
        spawned_s = max(self._hello_s, self._load_s) if self._hello_s else 0.0
        return StartCost(
            spawn_ms=_ms(self._began_s, spawned_s),
            load_ms=_ms(spawned_s, self._read_s),
            warm_ms=_ms(self._read_s, self._ready_s),
        )

    @property
    def leave_cost(self) -> LeaveCost:
        """The end of the running step counts as draining: requests were still computed."""
        return LeaveCost(
            drain_ms=_ms(self._asked_s, self._flush_s),
            flush_ms=_ms(self._flush_s, self._flushed_s),
            exit_ms=_ms(self._flushed_s or self._asked_s, self._exited_s),
        )

    def began(self, now_s: float) -> None:
        self._began_s = now_s

    def said_hello(self, now_s: float) -> None:
        if self._is_first:
            self._began_s = now_s
        self._hello_s = now_s

    def sent_load(self, now_s: float) -> None:
        self._load_s = now_s

    def read_weights(self, now_s: float) -> None:
        self._read_s = now_s

    def became_ready(self, now_s: float) -> None:
        self._ready_s = now_s

    def asked_to_leave(self, now_s: float) -> None:
        self._asked_s = now_s

    def began_flush(self, now_s: float) -> None:
        self._flush_s = now_s

    def flushed(self, now_s: float) -> None:
        self._flushed_s = now_s

    def exited(self, now_s: float) -> None:
        self._exited_s = now_s


def _ms(start_s: float, end_s: float) -> float:
    return (end_s - start_s) * 1000 if start_s and end_s else 0.0
