"""A process tells where its threads are when it is asked by a signal, and goes on."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import ctypes, sys
from runtime.worker.stacks import print_stacks_when_asked

def work():
    print("at work", flush=True)
    {work}

print_stacks_when_asked()
work()
"""


@pytest.mark.parametrize(
    ("work", "number"),
    [
        ("sys.stdin.read()", signal.SIGUSR1),
        ("while True: pass", signal.SIGUSR1),
        (
            "while True: ctypes.PyDLL(None).sleep(600)",
            signal.SIGUSR2,
        ),  # which keeps the interpreter
    ],
)
def test_where_it_is_is_told_whatever_it_does(work: str, number: signal.Signals):
    command = [sys.executable, "-c", PROGRAM.format(work=work)]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=ROOT, text=True, stdin=pipe, stdout=pipe, stderr=pipe
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.readline() == "at work\n"
            process.send_signal(number)
            while " in work\n" not in process.stderr.readline():
                assert process.poll() is None
        finally:
            process.kill()
