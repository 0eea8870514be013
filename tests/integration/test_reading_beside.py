"""Slots are read beside a thread that computes, and neither ever waits for the other for good."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.slot_samples import publish_sample

PROGRAM = """
import os, sys, threading
from pathlib import Path
import mlx.core as mx
from runtime.kv.reader import load

paths = [Path(name) for name in sys.argv[1:]]
reader = threading.Thread(target=lambda: [load(path) for path in paths for _ in range(20)])
reader.start()
while reader.is_alive():
    mx.eval(mx.zeros((1000,)))
    mx.clear_cache()
print("done", flush=True)
os._exit(0)
"""
"""A program of its own: whoever waits for good here holds the interpreter as well."""


def test_memory_is_given_back_while_slots_are_read(tmp_path: Path):
    """mlx then waits for all its streams, without letting go of the interpreter."""
    paths = [str(publish_sample(tmp_path, number, num_tokens=2000)) for number in range(10)]
    command = [sys.executable, "-c", PROGRAM, *paths]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, timeout=60, text=True, check=True)
    assert done.stdout == "done\n"
