"""Lets turns of many agents through, and none while something happens to the server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from runtime.errors import HearthError

MAX_FAILURES = 20


class ReplayEnded(HearthError):
    """No further turn is begun; the message says why."""

    code = "bench_replay_ended"


class Happening(NamedTuple):
    """What is done between turns, once so many have begun. Raises HearthError if it fails."""

    name: str
    after_turns: int
    act: Callable[[], None]


class Gate:
    """Counts turns. Thread-safe."""

    def __init__(self, happenings: Sequence[Happening], deadline_s: float | None) -> None:
        """`deadline_s` is a time of `time.monotonic`."""
        self._ahead = sorted(happenings, key=lambda one: one.after_turns)
        self._deadline_s = deadline_s
        self._condition = threading.Condition()
        self._num_begun = 0
        self._num_running = 0
        self._num_failures = 0
        self.happened: list[str] = []
        self.ended: str | None = None

    def enter(self) -> int:
        """Wait until a turn may begin; how much has happened so far.

        Raises:
            ReplayEnded: none may begin any more.
        """
        with self._condition:
            while self.ended is None and self._is_due():
                if self._num_running:
                    self._condition.wait()
                else:
                    self._act(self._ahead.pop(0))
            if self.ended is None and self._is_late():
                self.ended = "the time was up"
            if self.ended is not None:
                raise ReplayEnded(self.ended)
            self._num_begun += 1
            self._num_running += 1
            return len(self.happened)

    def leave(self, *, is_answered: bool) -> None:
        """A turn is over. After many in a row without an answer there are no more."""
        with self._condition:
            self._num_running -= 1
            self._num_failures = 0 if is_answered else self._num_failures + 1
            if self._num_failures >= MAX_FAILURES and self.ended is None:
                self.ended = f"{MAX_FAILURES} turns in a row failed"
            self._condition.notify_all()

    def end(self, why: str) -> None:
        """No further turn may begin."""
        with self._condition:
            self.ended = self.ended or why
            self._condition.notify_all()

    def _is_due(self) -> bool:
        return bool(self._ahead) and self._num_begun >= self._ahead[0].after_turns

    def _is_late(self) -> bool:
        return self._deadline_s is not None and time.monotonic() >= self._deadline_s

    def _act(self, happening: Happening) -> None:
        """Nobody else passes meanwhile, because the lock is held."""
        try:
            happening.act()
        except HearthError as error:
            self.ended = f"{happening.name}: {error.message}"
        else:
            self.happened.append(happening.name)
