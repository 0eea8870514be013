"""What is kept of a worker that was lost: one small file for each, without any prompt's text."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import uuid
from collections.abc import Sequence
from pathlib import Path

import msgspec
import structlog

from runtime.types import Struct

MAX_RECORDS = 50
_MAX_BYTES = 1 << 20
_STACKS_BEGIN = re.compile(r"(Fatal Python error|(Current )?[Tt]hread 0x|Stack \(most recent)")
_STACKS_GO_ON = re.compile(r'\s+(File "|\.\.\.|<)|\s*$|Extension modules:')
_ID = re.compile(r"[0-9a-f]{12}")

_log = structlog.get_logger("hearth.crashes")


class MemoryFigures(Struct, frozen=True):
    """Bytes: of the allocator as last reported, of the process as last seen, of the machine."""

    active: int = 0
    cache: int = 0
    peak: int = 0
    footprint: int = 0
    available: int = 0


class CrashRecord(Struct, frozen=True):
    """How a worker was lost. `code` is that of the error its requests got.

    `signal` or `exit_status` is set when the process ended by itself. `step` counts engine steps
    and `phase` is what it did, both as last heard. `stacks` are Python's of all threads, `stderr`
    what may be kept of the other lines that it printed last.
    """

    id: str
    at_s: float
    model: str
    pid: int
    code: str
    message: str
    signal: str | None = None
    exit_status: int | None = None
    phase: str = ""
    step: int = 0
    num_running: int = 0
    uptime_s: float = 0.0
    memory: MemoryFigures = MemoryFigures()
    was_out_of_memory: bool = False
    stderr: tuple[str, ...] = ()
    stacks: tuple[str, ...] = ()


def new_id() -> str:
    """A name for a record."""
    return uuid.uuid4().hex[:12]


def split_stacks(lines: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What `faulthandler` wrote among the lines, and the others."""
    stacks: list[str] = []
    rest: list[str] = []
    is_inside = False
    for line in lines:
        is_inside = bool(_STACKS_BEGIN.match(line) or (is_inside and _STACKS_GO_ON.match(line)))
        (stacks if is_inside else rest).append(line)
    return tuple(stacks), tuple(rest)


def name_of_signal(returncode: int | None) -> str | None:
    """The signal that ended a process, by its `subprocess` return code."""
    if returncode is None or returncode >= 0:
        return None
    try:
        return signal.Signals(-returncode).name
    except ValueError:  # a real-time signal has no name of its own
        return f"signal {-returncode}"


class Crashes:
    """The records in one directory, the latest `MAX_RECORDS` of them; made when first needed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def keep(self, record: CrashRecord) -> None:
        """Write a record; a disk that fails costs the record and a line in the log."""
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = self._directory / f"{record.id}.json"
            temporary = path.with_suffix(".tmp")
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(record)) + b"\n")
            temporary.rename(path)
            for old in self._files()[MAX_RECORDS:]:
                old.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("crash record not kept", model=record.model, why=str(error))

    def records(self) -> list[CrashRecord]:
        """All records, the latest first; a file that is none is passed over."""
        found = [record for file in self._files() if (record := _read(file)) is not None]
        return sorted(found, key=lambda record: record.at_s, reverse=True)

    def find(self, crash_id: str) -> CrashRecord | None:
        """The record of that id."""
        if not _ID.fullmatch(crash_id):
            return None
        return _read(self._directory / f"{crash_id}.json")

    def _files(self) -> list[Path]:
        """The files of the records, the latest first."""
        dated: list[tuple[float, Path]] = []
        for file in self._directory.glob("*.json"):
            with contextlib.suppress(FileNotFoundError):
                dated.append((file.stat().st_mtime, file))
        return [file for _, file in sorted(dated, reverse=True)]


def _read(file: Path) -> CrashRecord | None:
    try:
        if file.stat().st_size > _MAX_BYTES:
            return None
        return msgspec.json.decode(file.read_bytes(), type=CrashRecord)
    except (OSError, msgspec.MsgspecError):
        return None
