"""What a disk may hold after the power failed, from a recorded sequence of system calls.

Whatever was not synced may be there, lost, torn in the middle or zeroed, each write and each
change of a directory by itself; a real filesystem is kinder.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Literal, NamedTuple

from tests.crash.tracing import Call

Fate = Literal["kept", "lost", "torn", "zeroed"]
FATES: tuple[Fate, ...] = ("kept", "lost", "torn", "zeroed")


class Write(NamedTuple):
    inode: int
    offset: int
    data: bytes


class Link(NamedTuple):
    """`inode` gets this name; with `old`, it had that one before."""

    name: str
    inode: int
    old: str | None = None


DIRECTORY = 0
"""Stands for the inode of any directory."""


class Unlink(NamedTuple):
    name: str


class Sync(NamedTuple):
    """Of a file by its inode, or of a directory by its path."""

    target: int | str


class Acknowledged(NamedTuple):
    text: str


Operation = Write | Link | Unlink | Sync | Acknowledged
Change = Write | Link | Unlink


@dataclass
class Disk:
    """Files by inode, and the names of them."""

    contents: dict[int, bytes] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)

    def copy(self) -> Disk:
        return Disk(dict(self.contents), dict(self.names))

    def apply(self, change: Change, fate: Fate = "kept") -> None:
        match change:
            case Write(inode, offset, data) if fate != "lost":
                before = self.contents.get(inode, b"")
                written = {"torn": data[: len(data) // 2], "zeroed": bytes(len(data))}
                piece = written.get(fate, data)
                padded = before.ljust(offset, b"\0")
                self.contents[inode] = padded[:offset] + piece + padded[offset + len(piece) :]
            case Link(name, inode, old) if fate == "kept":
                self.names[name] = inode
                if old is not None:
                    self.names.pop(old, None)
            case Unlink(name) if fate == "kept":
                self.names.pop(name, None)
            case _:
                pass

    def write_to(self, folder: Path, prefix: str) -> None:
        """Make these files below `folder`; only names that begin with `prefix`."""
        for name, inode in self.names.items():
            if inode == DIRECTORY or not name.startswith(prefix):
                continue
            path = folder / name.removeprefix(prefix)
            between = [str(one) for one in Path(name).parents if str(one).startswith(prefix)]
            if all(one in self.names for one in between):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(self.contents.get(inode, b""))


class Crash(NamedTuple):
    """One state in which the machine may come up again, and what had been acknowledged."""

    disk: Disk
    acknowledged: str


def is_undone_by(change: Change, sync: Sync) -> bool:
    match change:
        case Write(inode):
            return inode == sync.target
        case Link(name) | Unlink(name):
            return str(Path(name).parent) == sync.target


def crashes(operations: list[Operation], num_random: int, seed: int) -> Iterator[Crash]:
    """States after a crash before each operation: the extremes, each single loss, random ones."""
    generator = random.Random(seed)
    durable = Disk()
    pending: list[Change] = []
    acknowledged = ""
    for operation in [*operations, None]:
        for fates in _combinations(len(pending), num_random, generator):
            disk = durable.copy()
            for change, fate in zip(pending, fates, strict=True):
                disk.apply(change, fate)
            yield Crash(disk, acknowledged)
        match operation:
            case Sync():
                for change in pending:
                    if is_undone_by(change, operation):
                        durable.apply(change)
                pending = [one for one in pending if not is_undone_by(one, operation)]
            case Acknowledged(text):
                acknowledged += text
            case None:
                pass
            case _:
                pending.append(operation)


def _combinations(
    num_pending: int, num_random: int, generator: random.Random
) -> set[tuple[Fate, ...]]:
    combinations = {_same(fate, num_pending) for fate in FATES}
    for at in range(num_pending):
        for fate in FATES[1:]:
            fates: list[Fate] = ["kept"] * num_pending
            fates[at] = fate
            combinations.add(tuple(fates))
    for _ in range(num_random if num_pending > 1 else 0):
        combinations.add(tuple(generator.choices(FATES, k=num_pending)))
    return combinations


def _same(fate: Fate, num_pending: int) -> tuple[Fate, ...]:
    return (fate,) * num_pending


_FD = r"(?P<fd>\d+)<(?P<path>(?:\\x[0-9a-f]{2}|[^>])*)>"
_STRING = r'"(?P<data>(?:\\x[0-9a-f]{2})*)"'
_WRITE = re.compile(rf"{_FD}, {_STRING}, (?P<length>\d+)(?:, (?P<offset>\d+))?")
_RESERVE = re.compile(rf"{_FD}, 0, 0, (?P<length>\d+)")
_PATHS = re.compile(r'"((?:\\x[0-9a-f]{2})+)"')


def _text(escaped: str) -> bytes:
    return bytes.fromhex(escaped.replace("\\x", ""))


class _Recording:
    """Names, sizes and numbers of the files while the calls are read."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self._numbers = count(DIRECTORY + 1)
        self._inodes: dict[str, int] = {}
        self._sizes: dict[int, int] = {}

    def create(self, path: str) -> int:
        self._inodes[path] = next(self._numbers)
        self.operations.append(Link(path, self._inodes[path]))
        return self._inodes[path]

    def inode_of(self, path: str) -> int:
        """The inode behind a name; what was there before the recording is durable."""
        if path not in self._inodes:
            self.create(path)
            self.operations.append(Sync(str(Path(path).parent)))
        return self._inodes[path]

    def write(self, path: str, offset: int | None, data: bytes) -> None:
        inode = self.inode_of(path)
        end = self._sizes.get(inode, 0)
        start = end if offset is None else offset
        self._sizes[inode] = max(end, start + len(data))
        self.operations.append(Write(inode, start, data))

    def sync(self, path: str) -> None:
        self.operations.append(Sync(self._inodes.get(path, path)))

    def rename(self, old: str, new: str) -> None:
        self._inodes[new] = self._inodes.pop(old)
        self.operations.append(Link(new, self._inodes[new], old))


def operations_of(calls: list[Call]) -> list[Operation]:
    """The recorded calls (strace -y -xx) as operations; descriptor 1 acknowledges."""
    recording = _Recording()
    for call in calls:
        if not call.result.startswith("-1"):
            _read_call(recording, call)
    return recording.operations


def _read_call(recording: _Recording, call: Call) -> None:
    paths = [_text(one).decode("latin-1") for one in _PATHS.findall(call.arguments)]
    descriptor = re.match(_FD, call.arguments)
    path = _text(descriptor["path"]).decode("latin-1") if descriptor else ""
    match call.name:
        case "openat" if "O_CREAT" in call.arguments:
            recording.create(paths[0])
        case "mkdir":
            recording.operations.append(Link(paths[0], DIRECTORY))
        case "fallocate" if found := _RESERVE.match(call.arguments):
            recording.write(path, 0, bytes(int(found["length"])))
        case "pwrite64" | "write" if found := _WRITE.match(call.arguments):
            data = _text(found["data"])
            assert len(data) == int(found["length"]), "strace cut the data"
            if found["fd"] == "1":
                recording.operations.append(Acknowledged(data.decode()))
            else:
                recording.write(path, int(found["offset"]) if found["offset"] else None, data)
        case "fsync" | "fdatasync":
            recording.sync(path)
        case "rename":
            recording.rename(*paths)
        case "unlink":
            recording.operations.append(Unlink(paths[0]))
        case _:
            pass
