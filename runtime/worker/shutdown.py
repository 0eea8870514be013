"""How a worker leaves: what is queued is written within bounds, and in any case it ends."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Protocol

from runtime.timeouts import flush_budget_s
from runtime.wire import Event, Flushed, Flushing

EXIT_OVERDUE = 76
"""The exit status of a worker that did not get to its end in time."""

_EXIT_S = 20.0
_REPORT_S = 0.25


class Writing(Protocol):
    """What writes KV in a thread."""

    num_queued_bytes: int

    def close(self) -> None:
        """Write what is queued, then end."""
        ...


class Deadline:
    """Ends this process when a phase of its end takes too long; that is no clean end."""

    def __init__(self) -> None:
        self.phase_s = _EXIT_S
        """What a phase without a budget of its own may take."""
        self._timer: threading.Timer | None = None

    def set(self, extra_s: float = 0.0) -> None:
        """A phase begins; it takes the place of the one before."""
        self.cancel()
        self._timer = threading.Timer(self.phase_s + extra_s, os._exit, (EXIT_OVERDUE,))
        self._timer.daemon = True
        self._timer.start()

    def cancel(self) -> None:
        """No phase is going on."""
        if self._timer is not None:
            self._timer.cancel()


def flush(
    writing: tuple[Writing, threading.Thread] | None,
    send: Callable[[Event], None],
    deadline: Deadline,
) -> bool:
    """Have the writer write what is queued, and report how much is left now and at the end; whether
    all is written.
    """
    if writing is None:
        send(Flushing(num_bytes=0))
        send(Flushed(num_unwritten_bytes=0))
        return True
    writer, thread = writing
    num_bytes = writer.num_queued_bytes
    budget_s = flush_budget_s(num_bytes)
    deadline.set(budget_s)
    send(Flushing(num_bytes=num_bytes))
    writer.close()
    over_s = time.monotonic() + budget_s
    while thread.is_alive() and time.monotonic() < over_s:
        thread.join(_REPORT_S)
        if writer.num_queued_bytes != num_bytes:
            num_bytes = writer.num_queued_bytes
            send(Flushing(num_bytes=num_bytes))
    is_alive = thread.is_alive()
    send(Flushed(num_unwritten_bytes=writer.num_queued_bytes if is_alive else 0))
    return not is_alive
