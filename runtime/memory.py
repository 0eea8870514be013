"""What a process takes of the machine's memory, and whether all of it came back after its end."""

from __future__ import annotations

import contextlib
import ctypes
import re
from pathlib import Path

import psutil

from runtime.types import Struct

RETURN_S = 15.0
_RETURNED_SHARE = 0.7
_NOISE_BYTES = 512 * 1024 * 1024
"""Other programs take and give that much within seconds; what is smaller cannot be judged."""


_KEPT_SHARE = 0.03
KEPT_BYTES = 64 << 20
"""So much a process may keep of all its models: modules, and what allocators round up."""

KEPT_BESIDE_GPU_BYTES = 1 << 30
"""The same where a driver keeps kernels in the memory of the machine: on an NVIDIA H200 440 to 540
MiB after the first model, and about 17 more after each of the next ones.
"""


class Departure(Struct, frozen=True):
    """The end of a worker. `freed_bytes` is how much more memory was available afterwards.

    `is_clean`: it left by itself when it was asked to. `is_memory_suspect`: what it held did not
    come back, which a hard end of a process with much wired memory can cause on macOS.
    """

    is_clean: bool
    footprint_bytes: int
    freed_bytes: int
    is_memory_suspect: bool


def has_returned(footprint_bytes: int, freed_bytes: int) -> bool:
    """Whether the memory of a process that took so much can be taken to be free again."""
    if footprint_bytes < _NOISE_BYTES:
        return True
    return freed_bytes >= footprint_bytes * _RETURNED_SHARE - _NOISE_BYTES / 2


def is_given_back(before_bytes: int, after_bytes: int, kept_bytes: int = KEPT_BYTES) -> bool:
    """Whether a process that took so much before its first model takes no more when one has left,
    but for so much or a small share.
    """
    return after_bytes - before_bytes <= max(before_bytes * _KEPT_SHARE, kept_bytes)


def footprint_bytes(
    pid: int, allocated_bytes: int, *, num_processes: int = 1, has_own_memory: bool = False
) -> int:
    """What a process takes of the machine: resident pages, or what its allocator holds if that is
    more.

    Metal's buffers are no resident pages. With more processes its children are taken to hold as
    much each as it says itself. One that has ended takes nothing, waited for or not. Where a GPU
    `has_own_memory` what is allocated there is none of the machine's, nor are the pages that
    processes share: its libraries are large.
    """
    resident = 0
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        family = [process, *(process.children() if num_processes > 1 else ())]
        infos = [one.memory_info() for one in family]
        resident = sum(one.rss for one in infos)
        if has_own_memory:
            return resident - sum(getattr(one, "shared", 0) for one in infos)
    return max(resident, allocated_bytes * num_processes) if resident else 0


def available_bytes() -> int:
    """What a program could take now without making others swap."""
    return psutil.virtual_memory().available


def trim_heap() -> bool:
    """Give the pages of this process that hold nothing any more back to the system.

    glibc keeps what is freed between two blocks that live. False where its `malloc_trim` is not
    to be had: other allocators give such pages back by themselves. It takes some milliseconds,
    without the GIL; see malloc_trim(3).
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return False
    trim(ctypes.c_size_t(0))
    return True


def num_oom_kills() -> int:
    """How many processes the kernel has ended for lack of memory; 0 where it does not say."""
    try:
        text = Path("/proc/vmstat").read_text()
    except OSError:
        return 0
    found = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
    return int(found.group(1)) if found else 0
