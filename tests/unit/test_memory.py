"""Whether the memory of a process that ended came back."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from runtime.memory import (
    KEPT_BESIDE_GPU_BYTES,
    KEPT_BYTES,
    available_bytes,
    footprint_bytes,
    has_returned,
    is_given_back,
    num_oom_kills,
    trim_heap,
)
from runtime.supervisor.crash_report import CrashReporter
from runtime.wire import Heartbeat
from tests.waiting import until

GIB = 1 << 30


@pytest.mark.parametrize(
    ("footprint", "freed", "returned"),
    [
        (0, 0, True),
        (GIB // 4, -GIB, True),  # too small to be told from what other programs do
        (10 * GIB, 10 * GIB, True),
        (10 * GIB, 7 * GIB, True),
        (10 * GIB, 6 * GIB, False),
        (10 * GIB, 0, False),
        (100 * GIB, 60 * GIB, False),
    ],
)
def test_seven_tenths_of_what_it_took_must_be_available_again(
    footprint: int, freed: int, returned: bool
):
    assert has_returned(footprint, freed) is returned


@pytest.mark.parametrize(
    ("before", "after", "kept", "is_back"),
    [
        (100 << 20, 164 << 20, KEPT_BYTES, True),
        (100 << 20, (164 << 20) + 1, KEPT_BYTES, False),
        (10_000 << 20, 10_300 << 20, KEPT_BYTES, True),  # 3 %
        (10_000 << 20, 10_301 << 20, KEPT_BYTES, False),
        (780 << 20, 1320 << 20, KEPT_BESIDE_GPU_BYTES, True),
        (824 << 20, 1849 << 20, KEPT_BESIDE_GPU_BYTES, False),
        (300, 8, KEPT_BYTES, True),
    ],
)
def test_a_process_may_keep_a_little_of_all_its_models(
    before: int, after: int, kept: int, is_back: bool
):
    assert is_given_back(before, after, kept) is is_back


def test_the_footprint_is_the_larger_of_resident_and_allocated():
    resident = footprint_bytes(os.getpid(), 0)
    assert resident > 1 << 20
    assert footprint_bytes(os.getpid(), 1 << 50) == 1 << 50
    own = footprint_bytes(os.getpid(), 1 << 50, has_own_memory=True)
    assert 0 < own <= resident, "what a GPU's own memory holds is none of the machine's"


def test_a_process_that_is_gone_has_no_footprint():
    assert footprint_bytes(2**22 + 1, 0) == 0


def test_what_a_process_took_is_known_when_it_has_just_died(tmp_path: Path):
    crash_reporter = CrashReporter(tmp_path, "m")
    beat = Heartbeat(step=1, is_busy=True, phase="decode", active_bytes=1000)
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        crash_reporter.sample(process.pid, beat)
        seen = crash_reporter.footprint_bytes
        process.kill()
        child = psutil.Process(process.pid)
        asyncio.run(until(lambda: child.status() == psutil.STATUS_ZOMBIE, "its end"))
        crash_reporter.sample(process.pid, beat)
    assert crash_reporter.footprint_bytes == seen > beat.active_bytes


def test_the_machine_has_memory_and_counts_its_kills():
    assert available_bytes() > 0
    assert num_oom_kills() >= 0


FRAGMENTED = """
import psutil
from runtime.memory import trim_heap
blocks = [bytes(20_000) for _ in range(5_000)]
last = bytes(20_000)
del blocks
before = psutil.Process().memory_info().rss
trim_heap()
print(before - psutil.Process().memory_info().rss)
"""
"""100 MB are freed below a block that lives: the bytes of them that come back."""


@pytest.mark.skipif(not trim_heap(), reason="this allocator keeps no freed pages")
def test_what_is_freed_below_what_lives_comes_back_too():
    root = Path(__file__).parents[2]
    said = subprocess.check_output([sys.executable, "-c", FRAGMENTED], cwd=root, text=True)
    assert int(said) > 80e6
