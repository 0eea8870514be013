"""A slot is loaded as it was written or not at all, whatever happens to its file meanwhile."""

import os
import random
from array import array
from pathlib import Path
from typing import BinaryIO, cast

import mlx.core as mx
import pytest

from runtime.kv.reader import LoadedSlot, load
from store.checked_file import CheckedFile, checked
from store.disk import READ_BYTES, opened
from store.errors import SlotDamaged, SlotMissing, StoreError, StoreFailed
from store.slot_format import TOKENS
from store.slots import read_front
from tests.slot_samples import ROW_BYTES, is_served, publish_sample, sample

NUM_FLIPS = 300
LONG = 2 * READ_BYTES // ROW_BYTES + 1
"""Tokens whose tensors are read in several pieces."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return publish_sample(tmp_path, 1)


def loaded(path: Path) -> LoadedSlot | None:
    try:
        return load(path)
    except StoreError:
        return None


def bytes_of(one: mx.array) -> bytes:
    return bytes(memoryview(cast("bytes", one.reshape(-1).view(mx.uint8)))) if one.size else b""


def is_exact(slot: LoadedSlot, number: int, **sizes: int) -> bool:
    """Whether it is what was computed for that number."""
    header, ids, tensors = sample(number, **sizes)
    given = {one.name: bytes(one.data) for one in tensors}
    found = {name: bytes_of(one) for name, one in slot.tensors.items()}
    return (slot.header, slot.token_ids, found) == (header, array("I", ids), given)


def read_all(file: CheckedFile) -> None:
    tensors = cast("dict[str, mx.array]", mx.load(cast("BinaryIO", file), "safetensors"))
    del tensors[TOKENS]
    mx.eval(list(tensors.values()))


@pytest.mark.parametrize("num_tokens", [6, LONG])
def test_a_whole_slot_is_loaded_as_it_was_computed(tmp_path: Path, num_tokens: int):
    path = publish_sample(tmp_path, 1, num_tokens=num_tokens)
    slot = load(path)
    assert is_exact(slot, 1, num_tokens=num_tokens)
    assert slot.num_bytes == path.stat().st_size
    assert TOKENS not in slot.tensors


def test_what_is_damaged_anywhere_is_not_loaded(path: Path):
    whole, generator = path.read_bytes(), random.Random(5)
    for _ in range(NUM_FLIPS):
        damaged = bytearray(whole)
        damaged[generator.randrange(len(whole))] ^= 1 << generator.randrange(8)
        path.write_bytes(damaged)
        assert loaded(path) is None
    for size in generator.sample(range(len(whole)), NUM_FLIPS):
        path.write_bytes(whole[:size])
        assert loaded(path) is None
        path.write_bytes(whole[:size] + bytes(len(whole) - size))
        assert (loaded(path) is not None) == is_served(path)
    path.write_bytes(whole)
    assert is_exact(load(path), 1)


def test_a_file_that_is_gone_is_missing(path: Path):
    path.unlink()
    with pytest.raises(SlotMissing):
        load(path)


def test_what_changes_after_its_header_was_checked_is_not_taken(path: Path):
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1]), bytes(len(whole))):
        with checked(path) as file:
            path.write_bytes(damaged)
            file.token_ids()
            read_all(file)
            with pytest.raises(SlotDamaged):
                file.check()
        path.write_bytes(whole)


def test_a_slot_removed_while_it_is_read_is_whole(path: Path):
    with checked(path) as file:
        path.unlink()
        file.token_ids()
        read_all(file)
        file.check()


def test_tensors_that_were_read_in_pieces_or_not_at_all_are_not_taken(path: Path):
    with checked(path) as file:
        entry = file.contents.tensors[1]
        file.seek(file.contents.payload_start + entry.start)
        half = memoryview(bytearray(entry.num_bytes // 2))
        assert file.readinto(half) == file.readinto(half) == len(half)
        file.token_ids()
        with pytest.raises(StoreFailed, match="one piece"):
            file.check()


def test_a_reading_that_fails_is_no_damage(path: Path):
    with opened(path) as fd:
        front, contents = read_front(fd)
    directory = os.open(path.parent, os.O_RDONLY)
    file = CheckedFile(directory, front, contents)
    file.token_ids()
    os.close(directory)
    with pytest.raises(StoreFailed, match="reading failed"):
        file.check()
