"""A slot is loaded as it was written or not at all, whatever happens to its file meanwhile."""

import random
from array import array
from pathlib import Path
from typing import cast

import mlx.core as mx
import pytest

from runtime.kv.reader import LoadedSlot, adopts_pages, compare, load, load_in_place, read_tensors
from store.errors import SlotDamaged, SlotMissing, StoreError
from store.slot_file import TOKENS, Damage
from store.slots import read_front
from tests.slot_samples import is_served, publish_sample, sample

NUM_FLIPS = 300
LONG = 20_000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return publish_sample(tmp_path, 1)


def loaded(path: Path, *, in_place: bool = False) -> LoadedSlot | None:
    try:
        slot = load_in_place(path, mx.asarray) if in_place else load(path)
        return None if slot.checked.damage else slot
    except StoreError:
        return None


def bytes_of(one: mx.array) -> bytes:
    return bytes(memoryview(cast("bytes", one.reshape(-1).view(mx.uint8)))) if one.size else b""


def is_exact(slot: LoadedSlot, number: int, **sizes: int) -> bool:
    """Whether it is what was computed for that number."""
    header, ids, tensors = sample(number, **sizes)
    given = {one.name: bytes(one.data) for one in tensors}
    found = {name: bytes_of(one) for name, one in slot.tensors.items()}
    return (slot.checked.header, slot.checked.token_ids, found) == (header, array("I", ids), given)


@pytest.mark.parametrize("num_tokens", [6, LONG])
def test_a_whole_slot_is_loaded_as_it_was_computed(tmp_path: Path, num_tokens: int):
    path = publish_sample(tmp_path, 1, num_tokens=num_tokens)
    slot = load(path)
    assert is_exact(slot, 1, num_tokens=num_tokens)
    assert slot.checked.num_bytes == path.stat().st_size
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


def test_where_memory_is_not_shared_a_slot_is_read_by_mlx():
    assert adopts_pages() == mx.metal.is_available()


@pytest.mark.parametrize("num_tokens", [6, LONG])
def test_a_slot_that_is_read_in_place_is_as_it_was_computed(tmp_path: Path, num_tokens: int):
    path = publish_sample(tmp_path, 1, num_tokens=num_tokens)
    # Where arrays cannot be of these pages, they are copies of them.
    slot = load_in_place(path, mx.asarray)
    assert is_exact(slot, 1, num_tokens=num_tokens)
    assert {name: one.dtype for name, one in slot.tensors.items()} == {
        name: one.dtype for name, one in load(path).tensors.items()
    }


def test_what_is_damaged_anywhere_is_told_when_it_is_read_in_place(path: Path):
    whole, generator = path.read_bytes(), random.Random(6)
    for _ in range(NUM_FLIPS):
        damaged = bytearray(whole)
        damaged[generator.randrange(len(whole))] ^= 1 << generator.randrange(8)
        path.write_bytes(damaged)
        assert loaded(path, in_place=True) is None
        path.write_bytes(whole[: generator.randrange(len(whole))])
        assert loaded(path, in_place=True) is None
    path.unlink()
    with pytest.raises(SlotMissing):
        load_in_place(path, mx.asarray)


def test_a_file_that_is_gone_is_missing(path: Path):
    path.unlink()
    with pytest.raises(SlotMissing):
        load(path)


def test_what_changes_after_its_header_was_checked_is_not_taken(path: Path):
    whole = path.read_bytes()
    front = read_front(path)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert compare(*front, read_tensors(path)) == Damage(tensors=("state",))
    path.write_bytes(whole[:-1])
    with pytest.raises(SlotDamaged, match="loaded"):
        read_tensors(path)
    path.unlink()
    with pytest.raises(SlotMissing):
        read_tensors(path)


def test_tensors_of_another_slot_shape_or_kind_are_not_taken(path: Path):
    front = read_front(path)
    other = publish_sample(path.parents[2], 2)
    assert compare(*front, read_tensors(other)).tensors == ("0.keys", "1.keys", "state")
    tensors = read_tensors(path)
    name, one = next((name, one) for name, one in tensors.items() if one.size)
    for changed in (one.reshape(-1), one.view(mx.uint16)):
        with pytest.raises(SlotDamaged, match="another one"):
            compare(*front, tensors | {name: changed})
    del tensors[name]
    with pytest.raises(SlotDamaged, match="other tensors"):
        compare(*front, tensors)
    assert not compare(*front, read_tensors(path))
