"""Files of turns are counted and removed while workers write and remove them."""

from __future__ import annotations

import threading
from pathlib import Path

from store import turns
from store.disk import bytes_below

MODEL = b"\1" * 32


def file_of(folder: Path) -> Path:
    return folder / f"a{turns.SUFFIX}"


def test_folders_that_come_and_go_are_no_error_of_the_store(tmp_path: Path):
    root = turns.turns_root(tmp_path, MODEL)
    root.mkdir(parents=True)
    done = threading.Event()

    def work() -> None:
        number = 0
        while not done.is_set():
            number += 1
            folder = root / f"{number % 100:032x}"
            if folder.exists():
                file_of(folder).unlink()
                folder.rmdir()
            else:
                folder.mkdir()
                file_of(folder).write_bytes(b"x")

    worker = threading.Thread(target=work)
    worker.start()
    try:
        for _ in range(300):
            assert bytes_below(tmp_path / turns.TURNS) >= 0
    finally:
        done.set()
        worker.join()


def test_unfinished_turns_count_as_well(tmp_path: Path):
    folder = turns.turns_root(tmp_path, MODEL) / "a"
    assert bytes_below(tmp_path / turns.TURNS) == 0
    folder.mkdir(parents=True)
    file_of(folder).write_bytes(b"x" * 5000)
    (folder / ".tmp-a").write_bytes(b"x" * 5000)
    assert bytes_below(tmp_path / turns.TURNS) == 2 * 8192
    turns.drop_turns(tmp_path, MODEL)
    assert bytes_below(tmp_path / turns.TURNS) == 0
