"""Whatever happens to a slot file, it is served as it was written or not at all."""

import os
import random
import shutil
import socket
from pathlib import Path

import pytest

from store import slots
from store.errors import SlotDamaged, SlotMissing
from tests.crash.damage import unchecked_payload
from tests.slot_samples import expected_payload, holds, is_served, publish_sample, slot_id


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return publish_sample(tmp_path, 1)


def flip_bits(path: Path, num_flips: int, seed: int) -> tuple[int, int]:
    """How many single flipped bits were served as they are, with and without checksums."""
    whole = path.read_bytes()
    generator = random.Random(seed)
    served = unchecked = 0
    for _ in range(num_flips):
        damaged = bytearray(whole)
        damaged[generator.randrange(len(whole))] ^= 1 << generator.randrange(8)
        path.write_bytes(damaged)
        served += is_served(path)
        unchecked += unchecked_payload(path) not in {None, expected_payload(1)}
    path.write_bytes(whole)
    return served, unchecked


def test_every_truncation_is_a_miss(path: Path):
    whole = path.read_bytes()
    for size in reversed(range(len(whole))):
        os.truncate(path, size)
        assert not is_served(path)
    path.write_bytes(whole)
    assert holds(path, 1)


def test_every_tail_of_zeros_is_a_miss(path: Path):
    whole = path.read_bytes()
    for size in range(len(whole)):
        damaged = whole[:size] + bytes(len(whole) - size)
        path.write_bytes(damaged)
        assert is_served(path) == (damaged == whole)


def test_a_thousand_flipped_bits_are_misses_and_without_checksums_they_are_not(path: Path):
    served, unchecked = flip_bits(path, 1000, seed=3)
    assert served == 0
    assert unchecked > 100
    assert holds(path, 1)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(10))
def test_a_hundred_thousand_flipped_bits_are_misses(path: Path, seed: int):
    assert flip_bits(path, 10_000, seed)[0] == 0


def test_every_byte_of_the_header_counts(path: Path):
    whole = path.read_bytes()
    num_front = len(whole) - len(expected_payload(1))
    for at in range(num_front):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x20]) + whole[at + 1 :])
        assert not is_served(path)


def test_pages_of_another_slot_are_a_miss(path: Path):
    other = publish_sample(path.parents[2], 2).read_bytes()
    whole = path.read_bytes()
    assert len(other) == len(whole)
    for start in range(0, len(whole), 64):
        path.write_bytes(whole[:start] + other[start : start + 64] + whole[start + 64 :])
        assert not is_served(path) or path.read_bytes() == whole


def test_appended_bytes_are_a_miss(path: Path):
    with path.open("ab") as file:
        file.write(b"\0")
    assert not is_served(path)


def test_swapped_files_are_misses(path: Path):
    other = publish_sample(path.parents[2], 2)
    between = path.with_suffix(".between")
    path.rename(between)
    other.rename(path)
    between.rename(other)
    for one in (path, other):
        with pytest.raises(SlotDamaged, match="holds slot"):
            slots.read_header(one)
        assert not is_served(one)


def test_a_copy_under_another_id_is_a_miss_and_the_original_is_not(path: Path):
    copy = slots.slot_path(path.parents[2], slot_id(9))
    copy.parent.mkdir(exist_ok=True)
    shutil.copy(path, copy)
    assert not is_served(copy)
    assert holds(path, 1)


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
    for read in (slots.read_header, slots.read_token_ids, slots.verify):
        with pytest.raises(SlotDamaged):
            read(original)


def test_nothing_is_a_miss(tmp_path: Path):
    with pytest.raises(SlotMissing):
        slots.verify(slots.slot_path(tmp_path, slot_id(1)))
