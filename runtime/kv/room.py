"""Room on the disk, as the threads of a worker that write files ask for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from runtime.kv_messages import RoomGiven, RoomWanted
from store.errors import OverCap


class WriteRoom(Protocol):
    """Who writes a file takes room before."""

    def take(self, key: str, num_bytes: int) -> None:
        """Wait until there is room for a file. Raises OverCap where there is to be none."""
        ...


class _Unbounded:
    """Where nobody counts."""

    def take(self, key: str, num_bytes: int) -> None:
        pass


UNBOUNDED: WriteRoom = _Unbounded()


class AskedRoom:
    """The server is asked through `send`, and `hear` takes its answers. From any thread."""

    def __init__(self, send: Callable[[RoomWanted], None]) -> None:
        self._send = send
        self._answers: dict[str, bool | None] = {}
        self._told = threading.Condition()
        self._is_closed = False

    def take(self, key: str, num_bytes: int) -> None:
        """As `WriteRoom`."""
        with self._told:
            self._answers[key] = None
            if not self._is_closed:
                self._send(RoomWanted(key=key, num_bytes=num_bytes))
            self._told.wait_for(lambda: self._is_closed or self._answers[key] is not None)
            if not self._answers.pop(key):
                raise OverCap(num_bytes)

    def hear(self, given: RoomGiven) -> None:
        """The server has answered."""
        with self._told:
            if given.key in self._answers:
                self._answers[given.key] = given.is_given
                self._told.notify_all()

    def close(self) -> None:
        """The server is gone: nothing is given any more."""
        with self._told:
            self._is_closed = True
            self._told.notify_all()
