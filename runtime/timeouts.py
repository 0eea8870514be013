"""How long a worker that leaves may take, purely: the outer bounds hold the inner ones."""

from __future__ import annotations

MAX_TERM_GRACE_S = 5.0
_FLUSH_FLOOR_S = 10.0
_FLUSH_BYTES_PER_S = 1e9
_FLUSH_EXTRA_S = 2.0
MARGIN_S = 0.5
"""The server waits this much longer than the worker is told to take: a message takes time too."""


def flush_budget_s(num_bytes: int) -> float:
    """Seconds that writing `num_bytes` of KV may take when a worker leaves."""
    return max(_FLUSH_FLOOR_S, num_bytes / _FLUSH_BYTES_PER_S + _FLUSH_EXTRA_S)


def term_grace_s(stop_timeout_s: float) -> float:
    """Seconds between SIGTERM and SIGKILL."""
    return min(MAX_TERM_GRACE_S, stop_timeout_s)


def stop_bound_s(stop_timeout_s: float, num_bytes: int) -> float:
    """The longest that `WorkerProcess.stop()` takes with so much to be written.

    The end of the running step, the flush, the exit, and the grace before SIGKILL. What it waits
    before that for the name of its KV, half of the first at most, is taken off the others.
    """
    inner_s = stop_timeout_s + flush_budget_s(num_bytes) + stop_timeout_s
    return inner_s + 3 * MARGIN_S + term_grace_s(stop_timeout_s)
