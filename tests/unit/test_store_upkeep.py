"""Directories, abandoned files, quarantine and ballast of a store."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from store import slots, temp_names, upkeep
from store.errors import StoreFailed
from tests.slot_samples import holds, publish_sample, slot_id, stage_sample


def test_prepare_makes_private_directories_once(tmp_path: Path):
    root = tmp_path / "store"
    upkeep.prepare(root)
    path = publish_sample(root, 1)
    upkeep.prepare(root)
    assert holds(path, 1)
    directories = [root, *(one for one in root.rglob("*") if one.is_dir())]
    assert len(directories) == 1 + 2 + 256
    assert {stat.S_IMODE(one.stat().st_mode) for one in directories} == {0o700}


def test_an_open_store_is_made_private(tmp_path: Path):
    tmp_path.chmod(0o755)
    upkeep.prepare(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700


def test_a_file_in_the_way_is_an_error(tmp_path: Path):
    (tmp_path / "slots").write_text("")
    with pytest.raises(StoreFailed):
        upkeep.prepare(tmp_path)


def test_slot_files_are_those_with_the_name_of_one_in_its_place(tmp_path: Path):
    path = publish_sample(tmp_path, 1)
    stage_sample(tmp_path, 2)
    (path.parent / "notes.txt").write_text("")
    (path.parent / ("f" * 32 + ".safetensors")).write_text("")
    (path.parent / path.stem).write_text("")
    assert list(upkeep.slot_files(tmp_path)) == [path]


def test_only_files_of_the_dead_are_swept(tmp_path: Path):
    living = stage_sample(tmp_path, 1).path
    program = "from tests.slot_samples import *; import sys; stage_sample(Path(sys.argv[1]), 2)"
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)
    published = publish_sample(tmp_path, 3)
    assert len(list(tmp_path.rglob(".tmp-*"))) == 2
    assert upkeep.sweep_temp(tmp_path) == 1
    assert living.exists()
    assert published.exists()
    assert upkeep.sweep_temp(tmp_path) == 0


TEXTS = ("turns/model/u-conversation/key-turn.turn", "prefixes/model/prefix.name")


@pytest.mark.parametrize("text", TEXTS)
def test_unfinished_text_of_the_dead_is_swept_with_its_folder(tmp_path: Path, text: str):
    path = tmp_path / text
    path.parent.mkdir(parents=True)
    program = (
        "import sys; from store.temp_names import *; print(temp_name(sys.argv[1], ''), end='')"
    )
    dead = subprocess.run(
        [sys.executable, "-c", program, path.name], check=True, capture_output=True, text=True
    ).stdout
    living = path.with_name(temp_names.temp_name(path.name, temp_names.PART))
    living.write_text("canary")
    assert upkeep.sweep_temp(tmp_path) == 0
    living.rename(path)
    for name in (dead, f".tmp-{path.name}-1", f".tmp-{path.name}"):  # two of earlier forms
        path.with_name(name).write_text("canary")
    assert upkeep.sweep_temp(tmp_path) == 3
    assert [one for one in tmp_path.rglob("*") if one.is_file()] == [path]
    path.rename(path.with_name(dead))
    assert upkeep.sweep_temp(tmp_path) == 1
    assert not path.parent.exists()


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


def test_quarantine_moves_a_file_out_of_sight(tmp_path: Path):
    path = publish_sample(tmp_path, 1)
    moved = upkeep.quarantine(tmp_path, path)
    assert moved.parent == tmp_path / "quarantine"
    assert not path.exists()
    assert not list(upkeep.slot_files(tmp_path))
    with pytest.raises(StoreFailed):
        upkeep.quarantine(tmp_path, path)


def test_what_is_no_file_can_be_quarantined_and_removed(tmp_path: Path):
    upkeep.prepare(tmp_path)
    target = tmp_path / "target"
    target.mkdir()
    (target / "kept").write_text("")
    for number, make in enumerate((os.mkfifo, lambda path: path.symlink_to(target), Path.mkdir)):
        path = slots.slot_path(tmp_path, slot_id(number))
        make(path)
        upkeep.quarantine(tmp_path, path)
    assert upkeep.trim_quarantine(tmp_path, max_bytes=0) == 3
    assert not list((tmp_path / "quarantine").iterdir())
    assert (target / "kept").exists()


def test_the_oldest_leave_the_quarantine_first(tmp_path: Path):
    for number in range(4):
        upkeep.quarantine(tmp_path, publish_sample(tmp_path, number))
    kept = sorted((tmp_path / "quarantine").iterdir())
    room = sum(path.stat().st_blocks * 512 for path in kept[2:])
    assert upkeep.trim_quarantine(tmp_path, max_bytes=room) == 2
    assert sorted((tmp_path / "quarantine").iterdir()) == kept[2:]


def test_what_is_said_to_be_old_leaves_the_quarantine(tmp_path: Path):
    for number in (1, 2):
        upkeep.quarantine(tmp_path, publish_sample(tmp_path, number))
    old, young = upkeep.quarantined(tmp_path)
    assert upkeep.trim_quarantine(tmp_path) == 0
    assert upkeep.trim_quarantine(tmp_path, old={old}) == 1
    assert list(upkeep.quarantined(tmp_path)) == [young]


def test_ballast_takes_room_until_it_is_dropped(tmp_path: Path):
    assert upkeep.keep_ballast(tmp_path)
    assert upkeep.keep_ballast(tmp_path)
    ballast = tmp_path / "ballast"
    assert ballast.stat().st_blocks * 512 >= 2 * (8 << 20)
    assert stat.S_IMODE(ballast.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [ballast]
    assert upkeep.drop_ballast(tmp_path)
    assert not upkeep.drop_ballast(tmp_path)


def test_the_floor_is_a_share_of_the_disk_and_not_less_than_some_bytes():
    room = upkeep.DiskRoom(total_bytes=400 << 30, free_bytes=25 << 30)
    assert room.floor_bytes == 20 << 30
    small = upkeep.DiskRoom(total_bytes=16 << 30, free_bytes=4 << 30)
    assert small.floor_bytes == 10 << 30


def test_removing_a_store_that_is_gone_sweeps_nothing(tmp_path: Path):
    assert upkeep.sweep_temp(tmp_path / "nowhere") == 0
    assert not list(upkeep.slot_files(tmp_path / "nowhere"))
    assert upkeep.trim_quarantine(tmp_path / "nowhere") == 0


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
