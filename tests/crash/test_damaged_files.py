"""Whatever happens to a slot file, it is served as it was written or not at all."""

import os
import random
import shutil
import socket
from pathlib import Path

import pytest

from store.slots import Slots
from tests.crash.damage import unchecked_payload
from tests.slot_samples import expected_payload, key_of, publish_sample, served


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return publish_sample(tmp_path, 1)


def root_of(path: Path) -> Path:
    return path.parents[2]


def flip_bits(path: Path, num_flips: int, seed: int) -> tuple[int, int]:
    """How many single flipped bits were served as they are, with and without checksums."""
    whole = path.read_bytes()
    generator = random.Random(seed)
    num_served = unchecked = 0
    for _ in range(num_flips):
        damaged = bytearray(whole)
        damaged[generator.randrange(len(whole))] ^= 1 << generator.randrange(8)
        path.write_bytes(damaged)
        unchecked += unchecked_payload(path) not in {None, expected_payload(1)}
        num_served += served(root_of(path), 1) is not None
    path.write_bytes(whole)
    return num_served, unchecked


def test_every_truncation_is_a_miss_and_makes_way(path: Path):
    whole = path.read_bytes()
    for size in reversed(range(len(whole))):
        path.write_bytes(whole[:size])
        assert served(root_of(path), 1) is None
        assert not path.exists()
    path.write_bytes(whole)
    assert served(root_of(path), 1)


def test_every_tail_of_zeros_is_a_miss(path: Path):
    whole = path.read_bytes()
    for size in range(len(whole)):
        damaged = whole[:size] + bytes(len(whole) - size)
        path.write_bytes(damaged)
        assert served(root_of(path), 1) == (True if damaged == whole else None)


def test_a_thousand_flipped_bits_are_misses_and_without_checksums_they_are_not(path: Path):
    num_served, unchecked = flip_bits(path, 1000, seed=3)
    assert num_served == 0
    assert unchecked > 100
    assert served(root_of(path), 1)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(10))
def test_a_hundred_thousand_flipped_bits_are_misses(path: Path, seed: int):
    assert flip_bits(path, 10_000, seed)[0] == 0


def test_pages_of_another_slot_are_a_miss(path: Path):
    other = publish_sample(root_of(path), 2).read_bytes()
    whole = path.read_bytes()
    assert len(other) == len(whole)
    for start in range(0, len(whole), 64):
        damaged = whole[:start] + other[start : start + 64] + whole[start + 64 :]
        path.write_bytes(damaged)
        assert served(root_of(path), 1) == (True if damaged == whole else None)


def test_swapped_files_are_misses(path: Path):
    other = publish_sample(root_of(path), 2)
    between = path.with_suffix(".between")
    path.rename(between)
    other.rename(path)
    between.rename(other)
    assert served(root_of(path), 1) is None
    assert served(root_of(path), 2) is None


def test_a_copy_under_another_name_is_a_miss_and_the_original_is_not(path: Path):
    shutil.copy(path, Slots(root_of(path) / "slots").path(key_of(9)))
    assert served(root_of(path), 9) is None
    assert served(root_of(path), 1)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["symlink", "dangling", "fifo", "directory", "socket", "device"])
def test_what_is_no_regular_file_is_refused_without_waiting(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
):
    original = publish_sample(tmp_path, 1)
    moved = original.with_name("moved")
    original.rename(moved)
    match kind:
        case "symlink":
            original.symlink_to(moved)
        case "dangling":
            original.symlink_to(tmp_path / "nowhere")
        case "fifo":
            os.mkfifo(original)
        case "directory":
            original.mkdir()
        case "socket":
            monkeypatch.chdir(original.parent)
            with socket.socket(socket.AF_UNIX) as listening:
                listening.bind(original.name)
        case _:
            original.symlink_to("/dev/zero")
    assert served(tmp_path, 1) is None
    assert moved.is_file()
