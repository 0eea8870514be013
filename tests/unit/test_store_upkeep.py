"""Abandoned files, ballast, and what was put aside of a store."""

import os
import stat
from pathlib import Path

import pytest

from store import temp_names, upkeep
from tests.slot_samples import slot_id


def test_an_owner_is_known_by_boot_number_and_start():
    own = temp_names.temp_name(slot_id(1))
    boot, pid_and_start = own.removeprefix(".tmp-").split("-")[:2]
    pid, start = pid_and_start.split(".")
    assert not temp_names.is_abandoned(own)
    assert temp_names.is_abandoned(own.replace(boot, "f" * len(boot)))
    assert temp_names.is_abandoned(own.replace(f"{pid}.{start}", f"{pid}.{int(start) + 1}"))
    assert temp_names.is_abandoned(own.replace(f"-{pid}.", "-4194999."))
    assert not temp_names.is_abandoned("notes.txt")
    assert not temp_names.is_abandoned(f"{slot_id(1)}.safetensors")


def test_what_an_earlier_server_left_unpublished_is_swept_however_new_it_is(tmp_path: Path):
    own = temp_names.temp_name(slot_id(1))
    boot, pid_and_start = own.removeprefix(".tmp-").split("-")[:2]
    pid, start = pid_and_start.split(".")
    before, after = (own.replace(f".{start}-", f".{int(start) + one}-") for one in (-1, 1))
    another_boot = own.replace(boot, "f" * len(boot)).replace(f"{pid}.", "1.")
    for name in (own, before, after, another_boot):
        (tmp_path / name).write_text("canary")
    assert upkeep.sweep_staged([tmp_path], before_s=0.0) == 2
    assert {path.name for path in tmp_path.iterdir()} == {own, after}
    assert upkeep.sweep_staged([tmp_path], before_s=float("inf")) == 1
    assert [path.name for path in tmp_path.iterdir()] == [own]


def test_ballast_takes_room_until_it_is_dropped(tmp_path: Path):
    assert upkeep.keep_ballast(tmp_path)
    assert upkeep.keep_ballast(tmp_path)
    ballast = tmp_path / "ballast"
    assert ballast.stat().st_blocks * 512 >= 2 * (8 << 20)
    assert stat.S_IMODE(ballast.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [ballast]
    assert upkeep.drop_ballast(tmp_path)
    assert not upkeep.drop_ballast(tmp_path)


def test_the_floor_is_a_share_of_the_disk_not_less_than_some_bytes_and_not_too_much():
    room = upkeep.DiskRoom(total_bytes=400 << 30, free_bytes=25 << 30)
    assert room.floor_bytes == 20 << 30
    small = upkeep.DiskRoom(total_bytes=16 << 30, free_bytes=4 << 30)
    assert small.floor_bytes == (16 << 30) // 10


@pytest.mark.parametrize(
    ("cap", "expected"), [(None, 32 << 20), (10**12, 32 << 20), (42_000_000, 2 << 20), (10**6, 0)]
)
def test_ballast_is_a_small_part_of_what_a_store_may_take(cap: int | None, expected: int):
    assert upkeep.ballast_bytes(cap) == expected


def test_ballast_becomes_smaller_with_the_cap(tmp_path: Path):
    for num_bytes in (2 << 20, 1 << 20, 0):
        assert upkeep.keep_ballast(tmp_path, num_bytes)
        assert (tmp_path / upkeep.BALLAST).stat().st_size == num_bytes


def test_only_the_newest_databases_that_were_put_aside_stay(tmp_path: Path):
    names = ["1", "schema-3", "2", "schema-4"]
    for number, name in enumerate(names):
        path = tmp_path / f"index.db.aside-{name}"
        for part in (path, path.with_name(f"{path.name}-wal")):
            part.write_bytes(b"x")
            os.utime(part, (number, number))
    (tmp_path / "index.db").touch()
    assert upkeep.trim_asides(tmp_path, "index.db") == 2
    left = {path.name for path in tmp_path.iterdir()}
    kept = {f"index.db.aside-{name}{log}" for name in names[2:] for log in ("", "-wal")}
    assert left == {"index.db", *kept}
    assert upkeep.trim_asides(tmp_path, "index.db") == 0
