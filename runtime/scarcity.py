"""Errors that say that the machine has no more to give: files, threads, memory, room on a disk.

They say nothing of the model or the request at which they were met.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable

LACKING = (
    errno.EMFILE,
    errno.ENFILE,
    errno.EAGAIN,
    errno.ENOMEM,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.ENOBUFS,
)
_TEXTS = (
    *(os.strerror(number) for number in LACKING),
    "can't start new thread",
    "not allowed to raise maximum limit",
)
LINE = re.compile(
    rf"((?P<name>[\w.]*Error): (\[Errno \d+\] )?({'|'.join(map(re.escape, _TEXTS))}))"
    r"(: .*|\. .*)?$"
)
"""The last line of a traceback that says so; the first group quotes nobody."""


def is_scarcity(error: BaseException) -> bool:
    """Whether that, or what it was raised for, is such an error, or a connection that was lost."""
    seen: set[int] = set()
    while id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, MemoryError | ConnectionError):
            return True
        if isinstance(error, OSError) and error.errno in LACKING:
            return True
        if says_so([f"{type(error).__name__}: {error}"]):
            return True
        error = error.__cause__ or error.__context__ or error
    return False


def says_so(lines: Iterable[str]) -> bool:
    """Whether the last error among lines that a process printed is one."""
    found = [line for line in lines if re.match(r"[\w.]*Error(:|$)", line)]
    last = found[-1] if found else ""
    return LINE.match(last) is not None or last.startswith("MemoryError")
