"""The cold store gives back what it was given, byte for byte, or nothing."""

import os
import random
from collections.abc import Callable
from pathlib import Path

import obstore
import pytest
import zstandard
from obstore.store import LocalStore, MemoryStore, ObjectStore

from store.cold import ColdBucket, ColdDirectory, ColdSlot, ColdStore, open_cold
from store.cold_codec import UnpackedBytes, join_planes, pack, split_planes
from store.disk import disk_bytes
from store.errors import SlotDamaged, SlotForeign, SlotMissing, StoreError, StoreFailed
from store.kv_file import Tensor, open_file, unpack_front
from store.slots import SLOT, Slots
from tests.slot_samples import key_of, publish_sample, sample, slot_id


class GiveUp(Exception):
    pass


def give_up(num_bytes: int) -> None:
    raise GiveUp(num_bytes)


def go_on(num_bytes: int) -> None:
    assert num_bytes


def put(
    cold: ColdStore, path: Path, number: int = 1, yield_: Callable[[int], None] = go_on
) -> ColdSlot:
    """Put the slot at `path` there, packed, as slot `number`."""
    with open_file(path, SLOT) as file:
        front = file.front
        chunks = pack(file.fd, front.payload_start, front.entries, yield_)
        return cold.put(slot_id(number), chunks)


def got(cold: ColdStore, number: int = 1) -> bytes:
    """All bytes of the slot's file, unpacked."""
    with cold.get(slot_id(number)) as source:
        unpacked = UnpackedBytes(source)
        entries = unpack_front(SLOT, unpacked.front).entries
        parts = [part for entry in entries for part in unpacked.tensor(entry)]
        unpacked.end()
        return unpacked.front + b"".join(parts)


def local(root: Path) -> ObjectStore:
    return LocalStore(str(root / "bucket"), mkdir=True)


STORES: dict[str, Callable[[Path], ColdStore]] = {
    "directory": lambda root: ColdDirectory(root / "cold"),
    "memory": lambda root: ColdBucket(MemoryStore()),
    "local": lambda root: ColdBucket(local(root)),
}


@pytest.fixture(params=STORES)
def cold(request: pytest.FixtureRequest, tmp_path: Path) -> ColdStore:
    return STORES[request.param](tmp_path)


@pytest.mark.parametrize("item_bytes", [1, 2, 4, 8])
def test_planes_are_joined_as_they_were_split(item_bytes: int):
    chunk = bytes(range(256)) * item_bytes
    planes = split_planes(chunk, item_bytes)
    assert planes[0] == chunk[::item_bytes]
    assert len(planes) == item_bytes
    assert join_planes(b"".join(planes), item_bytes) == chunk
    assert join_planes(b"".join(split_planes(b"", item_bytes)), item_bytes) == b""


def test_what_was_put_comes_back(tmp_path: Path, cold: ColdStore):
    path = publish_sample(tmp_path, 1)
    assert put(cold, path).id == slot_id(1)
    assert got(cold) == path.read_bytes()


def test_a_slot_of_many_chunks_and_every_width_comes_back(tmp_path: Path, cold: ColdStore):
    about, ids, tensors = sample(1)
    generator = random.Random(5)
    for dtype, width in (("BF16", 2), ("F32", 4), ("I64", 8), ("U8", 1)):
        data = generator.randbytes(3 * width * 900_001)
        tensors.append(Tensor(dtype, dtype, (3, 900_001), data))
    slots = Slots(tmp_path)
    slots.put(about, ids, tensors)
    path = slots.path(key_of(1))
    put(cold, path)
    assert got(cold) == path.read_bytes()


def test_the_list_is_what_is_there(tmp_path: Path, cold: ColdStore):
    for number in (1, 2, 3):
        put(cold, publish_sample(tmp_path, number), number)
    assert cold.delete(slot_id(2))
    assert not cold.delete(slot_id(2))
    assert [one.id for one in cold.slots()] == sorted(slot_id(number) for number in (1, 3))
    assert all(one.num_bytes > 0 for one in cold.slots())
    with pytest.raises(SlotMissing):
        got(cold, 2)


def test_putting_again_changes_nothing(tmp_path: Path, cold: ColdStore):
    path = publish_sample(tmp_path, 1)
    assert put(cold, path) == put(cold, path)
    assert len(list(cold.slots())) == 1


def test_giving_up_leaves_nothing_behind(tmp_path: Path, cold: ColdStore):
    path = publish_sample(tmp_path, 1)
    with pytest.raises(GiveUp):
        put(cold, path, yield_=give_up)
    assert [one for one in tmp_path.rglob("*") if one.is_file()] == [path]


@pytest.mark.parametrize("name", ["", "../" * 10 + "ab", "A" * 32])
def test_no_other_name_is_looked_up(cold: ColdStore, name: str):
    for call in (cold.delete, lambda one: cold.put(one, [])):
        with pytest.raises(ValueError, match="not a slot id"):
            call(name)
    with pytest.raises(ValueError, match="not a slot id"), cold.get(name):
        pass


def packed_path(root: Path) -> Path:
    name = slot_id(1)
    return root / "cold" / name[:2] / f"{name}.safetensors.zst"


def is_wrong(cold: ColdStore, expected: bytes) -> bool:
    """Whether it is unpacked to something else."""
    try:
        return got(cold) != expected
    except StoreError:
        return False


def test_a_damaged_packed_slot_is_a_miss(tmp_path: Path):
    cold = ColdDirectory(tmp_path / "cold")
    expected = publish_sample(tmp_path, 1).read_bytes()
    put(cold, publish_sample(tmp_path, 1))
    packed = packed_path(tmp_path)
    whole = packed.read_bytes()
    generator = random.Random(9)
    for at in range(0, len(whole), 5):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << generator.randrange(8)
        for content in (damaged, whole[:at]):
            packed.write_bytes(content)
            assert not is_wrong(cold, expected)
    packed.write_bytes(whole + b"\0")
    assert not is_wrong(cold, expected)
    packed.write_bytes(whole)
    assert got(cold) == expected


@pytest.mark.timeout(60)
def test_a_bomb_or_a_fifo_costs_nothing(tmp_path: Path):
    cold = ColdDirectory(tmp_path / "cold")
    put(cold, publish_sample(tmp_path, 1))
    packed = packed_path(tmp_path)
    bomb = zstandard.ZstdCompressor().compress(b"\xff" * (64 << 20))
    packed.write_bytes(packed.read_bytes()[:24] + bomb)
    with pytest.raises(SlotDamaged):
        got(cold)
    packed.unlink()
    os.mkfifo(packed)
    with pytest.raises(SlotDamaged):
        got(cold)


def test_another_version_is_foreign(tmp_path: Path):
    bucket = MemoryStore()
    cold = ColdBucket(bucket)
    put(cold, publish_sample(tmp_path, 1))
    name = f"{slot_id(1)[:2]}/{slot_id(1)}.safetensors.zst"
    data = bytes(obstore.get(bucket, name).bytes()).replace(b"hearth-cold/1", b"hearth-cold/2")
    obstore.put(bucket, name, data)
    with pytest.raises(SlotForeign):
        got(cold)


def test_a_cold_directory_is_private_and_counted_in_blocks(tmp_path: Path):
    cold = ColdDirectory(tmp_path / "cold")
    told = put(cold, publish_sample(tmp_path, 1))
    packed = packed_path(tmp_path)
    assert packed.stat().st_mode & 0o777 == 0o600
    assert packed.parent.stat().st_mode & 0o777 == 0o700
    assert told.num_bytes == disk_bytes(packed)
    abandoned = packed.with_name(f".tmp-{'f' * 32}-1.1-{slot_id(1)}.safetensors.zst")
    abandoned.write_bytes(b"")
    assert cold.sweep() == 1
    assert not abandoned.exists()


def test_the_url_decides():
    assert isinstance(open_cold("memory:///"), ColdBucket)
    with pytest.raises(StoreFailed):
        open_cold("no such thing")


def test_a_bucket_that_fails_is_a_failure_of_the_store(tmp_path: Path):
    path = publish_sample(tmp_path, 1)
    (tmp_path / "bucket").mkdir()
    cold = ColdBucket(LocalStore(str(tmp_path / "bucket")))
    (tmp_path / "bucket" / slot_id(1)[:2]).write_text("in the way")
    with pytest.raises(StoreFailed):
        put(cold, path)
