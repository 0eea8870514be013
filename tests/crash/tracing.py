"""`tests.crash.slot_writer` under strace: its system calls recorded, failed or made its last."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.crash.slot_writer import BEGIN

needs_strace = pytest.mark.skipif(
    shutil.which("strace") is None, reason="strace is not installed: system calls stay unharmed"
)

REPOSITORY = Path(__file__).parents[2]
CHANGES = "mkdir,openat,fallocate,pwrite64,write,fdatasync,fsync,rename,unlink,close"
_CALL = re.compile(r"(?:\d+ +)?(?P<name>[a-z0-9_]+)\((?P<arguments>.*)\) += (?P<result>.*)")

_ESCAPED_BEGIN = "".join(f"\\x{byte:02x}" for byte in BEGIN.encode())


class Call(NamedTuple):
    """One system call after the work began; the `nth` of its name since the process began."""

    name: str
    nth: int
    arguments: str
    result: str


class Outcome(NamedTuple):
    calls: list[Call]
    output: str
    returncode: int

    def count(self, name: str) -> int:
        return sum(call.name == name for call in self.calls)


def run_writer(folder: Path, program: str, *options: str, fault: str | None = None) -> Outcome:
    """Run the writer on `folder/store`; `fault` is what strace calls an injection."""
    log = folder / "calls"
    injection = ["-e", f"inject={fault}"] if fault else []
    command = ["strace", "-f", "-o", str(log), "-e", f"trace=newfstatat,{CHANGES}", *options]
    command += [*injection, sys.executable, "-m", "tests.crash.slot_writer"]
    command += [str(folder / "store"), program]
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return Outcome(calls_of(log, has_begun=False), done.stdout, done.returncode)


def calls_of(log: Path, *, has_begun: bool = True) -> list[Call]:
    """What strace wrote down, from where the work begins."""
    seen: Counter[str] = Counter()
    calls: list[Call] = []
    for line in log.read_text("latin-1").splitlines():
        match = _CALL.fullmatch(line)
        if match is None:
            continue
        name = match["name"]
        seen[name] += 1
        if has_begun:
            calls.append(Call(name, seen[name], match["arguments"], match["result"]))
        has_begun = has_begun or BEGIN in line or _ESCAPED_BEGIN in line
    return calls


def first_call(outcome: Outcome, name: str) -> Call:
    """The first call of this name that concerns a slot's file."""
    return next(
        call
        for call in outcome.calls
        if call.name == name and (name != "openat" or "O_CREAT" in call.arguments)
    )


def has_begun(folder: Path) -> bool:
    """Whether the writer's last run came as far as its work."""
    return BEGIN in (folder / "calls").read_text("latin-1")
