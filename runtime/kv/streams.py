"""Streams for moving KV: on a CPU each has a thread of its own, and most of moving KV into memory
is touching it for the first time, which several threads do faster.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import os

import mlx.core as mx

_MAX_THREADS = 4
_CPU = [mx.new_thread_local_stream(mx.cpu) for _ in range(min(_MAX_THREADS, os.cpu_count() or 1))]


def moving() -> list[mx.ThreadLocalStream] | list[None]:
    """What to spread the work over; None stands for the default stream."""
    return _CPU if mx.default_device() == mx.Device(mx.cpu) else [None]
