"""Row 10: a full disk is noticed early, leaves nothing behind, and ends by itself."""

import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from store import upkeep
from store.disk import NewFile
from store.errors import StoreFull
from store.kv_file import Tensor
from store.slots import Slots
from store.temp_names import TEMPORARY
from tests.crash.tracing import first_call, needs_strace, run_writer
from tests.slot_samples import key_of, publish_sample, sample, served

BIG_BYTES = 3 << 20


def put_big(root: Path, number: int) -> Path:
    about, ids, tensors = sample(number)
    slots = Slots(root / "slots")
    slots.put(about, ids, [*tensors, Tensor("big", "U8", (BIG_BYTES,), bytes(BIG_BYTES))])
    return slots.path(key_of(number))


def is_whole(root: Path, number: int) -> bool:
    return Slots(root / "slots").read(key_of(number), sample(number)[1]) is not None


def files_below(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


def fill(path: Path) -> None:
    """Write to `path` until the disk is full."""
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    where = tmp_path / "disk"
    where.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m,mode=0700", "hearth-test", str(where)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("not allowed to mount a small tmpfs")
    yield where
    subprocess.run(["umount", str(where)], check=True)


def test_a_full_disk_refuses_early_and_recovers(small_disk: Path):
    root = small_disk / "store"
    paths = [put_big(root, number) for number in (1, 2)]
    with pytest.raises(StoreFull):
        put_big(root, 3)
    assert sorted(files_below(root)) == sorted(paths)
    assert is_whole(root, 1)
    assert is_whole(root, 2)
    Slots(root / "slots").remove(key_of(1))
    put_big(root, 3)
    assert is_whole(root, 3)


def test_somebody_else_fills_the_disk(small_disk: Path):
    root = small_disk / "store"
    path = publish_sample(root, 1)
    foreign = small_disk / "foreign"
    fill(foreign)
    with pytest.raises(StoreFull):
        put_big(root, 2)
    assert files_below(root) == [path]
    assert served(root, 1)
    foreign.unlink()
    put_big(root, 2)
    assert is_whole(root, 2)


def test_no_ballast_where_there_is_no_room(small_disk: Path):
    assert not upkeep.keep_ballast(small_disk)
    assert not upkeep.drop_ballast(small_disk)
    assert not files_below(small_disk)


def test_a_file_limit_counts_as_full_and_leaves_nothing(tmp_path: Path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(StoreFull):
            put_big(tmp_path, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not files_below(tmp_path)


def test_a_short_write_is_continued_until_it_fails(tmp_path: Path):
    path = tmp_path / "file"
    limit = (1 << 20) + 100
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(StoreFull):
            NewFile(path, fd).write(bytes(2 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        os.close(fd)
    assert path.stat().st_size == limit


@needs_strace
@pytest.mark.parametrize("call", ["openat", "fallocate", "pwrite64", "fdatasync", "rename"])
def test_no_room_at_any_call(tmp_path: Path, call: str):
    first = first_call(run_writer(tmp_path, "one"), call)
    for error in ("ENOSPC", "EDQUOT"):
        folder = tmp_path / error
        folder.mkdir()
        outcome = run_writer(folder, "one", fault=f"{call}:error={error}:when={first.nth}")
        assert outcome.output == "StoreFull\n"
        left = files_below(folder / "store")
        assert len(left) == (call == "rename")
        assert all(path.name.startswith(TEMPORARY) for path in left)
