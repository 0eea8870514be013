"""Slots are read beside a thread that computes, and neither ever waits for the other for good."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os, sys, queue
from array import array
from pathlib import Path
import mlx.core as mx
from runtime.kv.reader import Reader
from store.kv_file import Tensor
from store.slots import SlotAbout, Slots

root, done = Path(sys.argv[1]), queue.SimpleQueue()
slots, ids = Slots(root), array("I", range(2000))
tensors = [Tensor(f"kv.{i}", "BF16", (2000, 2, 8), bytes(2000 * 32)) for i in range(2)]
reader = Reader(slots, root, done.put, len(ids))
for number in range(10):
    name = bytes([number]) * 16
    slots.put(SlotAbout(b"m", name), ids, tensors)
    for _ in range(20):
        reader.read([reader.slot(b"m", name, b"", 0, ids)])
read = []
while len(read) < 200:
    mx.eval(mx.zeros((1000,)))
    mx.clear_cache()
    while not done.empty():
        read += done.get().reads
assert all(one.error is None and len(one.arrays.tensors) == 2 for one in read)
print("done", flush=True)
os._exit(0)
"""
"""A program of its own: whoever waits for good here holds the interpreter as well."""


def test_memory_is_given_back_while_slots_are_read(tmp_path: Path):
    """mlx then waits for all its streams, without letting go of the interpreter."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, timeout=60, text=True, check=True)
    assert done.stdout == "done\n"
