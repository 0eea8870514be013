"""What an earlier release left is set aside as it is, and goes when it is old or all is deleted."""

from __future__ import annotations

import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from store import earlier
from store.disk import disk_bytes
from tests.store_samples import opened

APPLICATION_ID = 0x48525448
SLOT_BYTES = 40_000


def leave_earlier(root: Path) -> None:
    """A store as a release with slots of format 2 left it."""
    for number in range(256):
        (root / "slots" / f"{number:02x}").mkdir(parents=True)
    slot = root / "slots" / "0a" / f"0a{'7' * 30}.safetensors"
    slot.write_bytes(bytes(SLOT_BYTES))
    (root / "quarantine").mkdir()
    with closing(sqlite3.connect(root / "index.db")) as database:
        database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        database.execute("CREATE TABLE slots (name)")
        database.commit()
    (root / "index.db.aside-1").touch()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    leave_earlier(tmp_path)
    for name in ("turns", "prefixes"):
        (tmp_path / name).mkdir()
    (tmp_path / "secret").write_bytes(b"s" * 32)
    return tmp_path


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("has_index", [True, False])
def test_it_is_set_aside_and_all_else_stays(root: Path, has_index: bool):
    if not has_index:
        (root / "index.db").unlink()
    earlier.set_aside(root)
    left = {"slots", "quarantine", "index.db.aside-1"} | ({"index.db"} if has_index else set())
    assert names_in(root) == {"secret", "format-2"}
    assert names_in(root / "format-2") == left
    (slot,) = (root / "format-2").rglob("*.safetensors")
    assert slot.stat().st_size == SLOT_BYTES
    assert earlier.num_bytes(root) >= disk_bytes(slot)
    earlier.set_aside(root)
    assert names_in(root / "format-2") == left


def test_a_store_of_this_release_stays_where_it_is(tmp_path: Path):
    with opened(tmp_path):
        pass
    (tmp_path / "slots" / ("ab" * 16)).mkdir(parents=True)
    before = names_in(tmp_path)
    earlier.set_aside(tmp_path)
    assert names_in(tmp_path) == before
    assert earlier.num_bytes(tmp_path) == 0


def test_it_is_removed_when_it_is_old(root: Path):
    earlier.set_aside(root)
    earlier.remove(root, earlier.KEPT_S)
    assert (root / "format-2").exists()
    then_s = time.time() - earlier.KEPT_S - 1
    os.utime(root / "format-2", (then_s, then_s))
    earlier.remove(root, earlier.KEPT_S)
    assert not (root / "format-2").exists()
    earlier.remove(root)
