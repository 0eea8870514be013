"""The limits that this account has on the machine (ulimit), and which of them are too low.

Nothing is imported here that takes time: it is looked at before the first worker is spawned.
"""

from __future__ import annotations

import resource
from collections.abc import Mapping
from typing import NamedTuple

OPEN_FILES = 8192
"""So many the server has itself allow, where it may."""
WORKER_FILES = 4096
"""mlx-lm raises the limit to as many when it is imported, and fails where it may not."""
_LEAST_PROCESSES = 512
_LEAST_FILE_BYTES = 4 << 30
_LEAST_MAPPED_BYTES = 16 << 30
_NO_LIMIT = resource.RLIM_INFINITY


class TooLow(NamedTuple):
    """A limit that is too low: two sentences, and what to type. With `forbids_workers` no model
    can be loaded at all.
    """

    fact: str
    remedy: str
    forbids_workers: bool = False

    @property
    def text(self) -> str:
        """All of it."""
        return f"{self.fact} {self.remedy}"


def too_low(limits: Mapping[int, tuple[int, int]]) -> tuple[TooLow, ...]:
    """What is wrong with these pairs of a soft and a hard limit, the worst first."""
    found: list[TooLow] = []
    _, hard = limits[resource.RLIMIT_NOFILE]
    if hard != _NO_LIMIT and hard < WORKER_FILES:
        fact = (
            f"This account may open {hard} files at most, and importing mlx-lm fails with fewer "
            f"than {WORKER_FILES}, so no model can be loaded."
        )
        remedy = f"Allow {WORKER_FILES} (ulimit -Hn {WORKER_FILES} as root) and start it again."
        found.append(TooLow(fact, remedy, forbids_workers=True))
    for limit, least, what, letter in (
        (resource.RLIMIT_NPROC, _LEAST_PROCESSES, "processes and threads", "u"),
        (resource.RLIMIT_AS, _LEAST_MAPPED_BYTES, "bytes of address space for a process", "v"),
        (resource.RLIMIT_DATA, _LEAST_MAPPED_BYTES, "bytes of data for a process", "d"),
        (resource.RLIMIT_FSIZE, _LEAST_FILE_BYTES, "bytes in a file", "f"),
    ):
        soft, _ = limits[limit]
        if soft != _NO_LIMIT and soft < least:
            fact = f"This account may have {soft} {what}, which is too little for most models."
            found.append(TooLow(fact, f"Raise it with ulimit -{letter} and start it again."))
    seconds, _ = limits[resource.RLIMIT_CPU]
    if seconds != _NO_LIMIT:
        fact = f"Each process of this account is ended after {seconds} s of computing."
        found.append(TooLow(fact, "Lift that with ulimit -t unlimited and start it again."))
    return tuple(found)


def limits_here() -> dict[int, tuple[int, int]]:
    """The limits of this process, which its children inherit."""
    return {
        limit: resource.getrlimit(limit)
        for limit in (
            *(resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_AS),
            *(resource.RLIMIT_DATA, resource.RLIMIT_FSIZE, resource.RLIMIT_CPU),
        )
    }


def raise_limits() -> None:
    """Have as many files allowed as a busy server opens, as far as this account may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != _NO_LIMIT and hard < WORKER_FILES:
        hard = _raised(soft, WORKER_FILES) or hard
    wanted = OPEN_FILES if hard == _NO_LIMIT else min(OPEN_FILES, hard)
    if soft != _NO_LIMIT and soft < wanted:
        _raised(wanted, hard)


def why_no_worker() -> str | None:
    """Why no worker could be started here, and the remedy; None where nothing forbids it."""
    return next((one.text for one in too_low(limits_here()) if one.forbids_workers), None)


def _raised(soft: int, hard: int) -> int | None:
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    except (ValueError, OSError):
        return None
    return hard
