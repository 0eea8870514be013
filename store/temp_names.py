"""Names of unfinished files, which tell who is writing them and whether he still lives.

A process is known by boot, number and start: numbers come again after a restart of a container.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import re
import sys
from functools import cache
from pathlib import Path

SUFFIX = ".safetensors"
TEMPORARY = ".tmp-"
_NAME = re.compile(
    r"\.tmp-(?P<boot>[0-9a-f]+)-(?P<pid>\d+)\.(?P<start>\d+)-(?P<of>.+)", flags=re.DOTALL
)
_ID = re.compile(r"[0-9a-f]{32}")


def is_slot_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def temp_name(of: str, suffix: str = SUFFIX) -> str:
    """The name of the file in which this process writes the slot `of`, or a file of that name."""
    pid = os.getpid()
    return f"{TEMPORARY}{boot_id()}-{pid}.{_start_of(pid) or 0}-{of}{suffix}"


def is_abandoned(name: str) -> bool:
    """Whether this is the name of an unfinished file whose writer is dead."""
    match = _NAME.fullmatch(name)
    if match is None:
        return False
    return match["boot"] != boot_id() or _start_of(int(match["pid"])) != int(match["start"])


def is_from_before(name: str) -> bool:
    """The same, and its writer began before this process: it was none of this server's."""
    match = _NAME.fullmatch(name)
    if match is None or not is_abandoned(name):
        return False
    return match["boot"] != boot_id() or int(match["start"]) < (_start_of(os.getpid()) or 0)


@cache
def boot_id() -> str:
    """Which boot of the machine this is, in hex; "0" where the system does not say."""
    if sys.platform == "darwin":
        text = ctypes.create_string_buffer(64)
        size = ctypes.c_size_t(64)
        libc = ctypes.CDLL(ctypes.util.find_library("c"))
        libc.sysctlbyname(b"kern.bootsessionuuid", text, ctypes.byref(size), None, 0)
        return text.value.decode().replace("-", "").lower() or "0"
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        return "0"
    return text.decode().strip().replace("-", "")


if sys.platform == "darwin":
    import psutil

    def _start_of(pid: int) -> int | None:
        try:
            return int(psutil.Process(pid).create_time() * 1e6)
        except psutil.NoSuchProcess:
            return None

else:

    def _start_of(pid: int) -> int | None:
        """When process `pid` started, on a clock that nobody sets; None where there is none."""
        try:
            # The name may hold spaces and parentheses: fields are counted after the last one.
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            return None
        return int(fields[19])
