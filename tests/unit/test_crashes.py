"""What is kept of workers that were lost, in files."""

import json
import os
import signal
import stat
from pathlib import Path

import pytest

from runtime.supervisor.crashes import (
    MAX_RECORDS,
    Crashes,
    CrashRecord,
    MemoryFigures,
    name_of_signal,
    new_id,
    split_stacks,
)


def record(number: int, crash_id: str | None = None) -> CrashRecord:
    return CrashRecord(
        id=crash_id or new_id(),
        at_s=1000.0 + number,
        model="m",
        pid=number,
        code="model_crashed",
        message="The process of the model m was killed by SIGKILL.",
        signal="SIGKILL",
        phase="decode",
        step=7,
        memory=MemoryFigures(active=1, cache=2, peak=3, footprint=4, available=5),
        stderr=("x",),
    )


def test_a_record_is_found_again_as_it_was(tmp_path: Path):
    crashes = Crashes(tmp_path / "crashes")
    kept = record(1)
    crashes.keep(kept)
    assert crashes.records() == [kept]
    assert crashes.find(kept.id) == kept
    assert crashes.find(new_id()) is None


def test_only_the_owner_can_read_them(tmp_path: Path):
    crashes = Crashes(tmp_path / "crashes")
    crashes.keep(record(1))
    (file,) = (tmp_path / "crashes").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_the_latest_stay_and_come_first(tmp_path: Path):
    crashes = Crashes(tmp_path)
    for number in range(MAX_RECORDS + 3):
        kept = record(number)
        crashes.keep(kept)
        os.utime(tmp_path / f"{kept.id}.json", (number, number))
    crashes.keep(record(MAX_RECORDS + 3))
    pids = [one.pid for one in crashes.records()]
    assert pids == list(range(MAX_RECORDS + 3, 3, -1))
    assert len(list(tmp_path.iterdir())) == MAX_RECORDS


def test_files_that_are_no_records_are_passed_over(tmp_path: Path):
    crashes = Crashes(tmp_path)
    kept = record(1)
    crashes.keep(kept)
    (tmp_path / "0123456789ab.json").write_text("{")
    (tmp_path / "0123456789ac.json").write_text(json.dumps({"id": 1}))
    assert crashes.records() == [kept]
    assert crashes.find("0123456789ab") is None


@pytest.mark.parametrize("name", ["../../etc/passwd", "", "0123456789AB", "0123456789ab.json"])
def test_names_that_are_no_ids_find_nothing(tmp_path: Path, name: str):
    (tmp_path / "0123456789AB.json").write_text("{}")
    assert Crashes(tmp_path).find(name) is None


def test_a_place_that_cannot_be_written_costs_the_record_alone(tmp_path: Path):
    (tmp_path / "crashes").write_text("a file")
    crashes = Crashes(tmp_path / "crashes")
    crashes.keep(record(1))
    assert crashes.records() == []


def test_stacks_are_told_from_what_was_printed():
    lines = [
        "loading",
        "Fatal Python error: Segmentation fault",
        "",
        "Current thread 0x00007f (most recent call first):",
        '  File "/a/b.py", line 3 in f',
        '  File "/a/c.py", line 4 in g',
        "",
        "Thread 0x00007e (most recent call first):",
        "  <no Python frame>",
        "",
        "Extension modules: numpy (total: 1)",
        "terminate called",
    ]
    stacks, rest = split_stacks(lines)
    assert rest == ("loading", "terminate called")
    assert stacks == tuple(lines[1:-1])


def test_a_traceback_is_no_stack_of_the_fault_handler():
    lines = ["Traceback (most recent call last):", '  File "/a.py", line 1, in f', "ValueError"]
    assert split_stacks(lines) == ((), tuple(lines))


def test_signals_have_names():
    assert name_of_signal(-signal.SIGSEGV) == "SIGSEGV"
    assert name_of_signal(3) is None
    assert name_of_signal(None) is None
    assert name_of_signal(-63) == "signal 63"
