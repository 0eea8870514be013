"""The cold store gives back what it was given, byte for byte, or nothing."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import obstore
import pytest
import zstandard
from obstore.store import LocalStore, MemoryStore, ObjectStore

from store import slots, upkeep
from store.cold import ColdBucket, ColdDirectory, ColdStore, open_cold
from store.cold_codec import join_planes, split_planes
from store.disk import disk_bytes
from store.errors import SlotDamaged, SlotForeign, SlotMissing, StoreError, StoreFailed
from store.types import TensorData
from tests.slot_samples import holds, publish_sample, sample, slot_id


class GiveUp(Exception):
    pass


def give_up(num_bytes: int) -> None:
    raise GiveUp(num_bytes)


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


def files_below(root: Path) -> set[Path]:
    return {path for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("item_bytes", [1, 2, 4, 8])
def test_planes_are_joined_as_they_were_split(item_bytes: int):
    chunk = bytes(range(256)) * item_bytes
    planes = split_planes(chunk, item_bytes)
    assert planes[0] == chunk[::item_bytes]
    assert len(planes) == item_bytes
    assert join_planes(b"".join(planes), item_bytes) == chunk
    assert join_planes(b"".join(split_planes(b"", item_bytes)), item_bytes) == b""


def test_what_was_demoted_comes_back(tmp_path: Path, cold: ColdStore):
    path = publish_sample(tmp_path, 1)
    before = path.read_bytes()
    assert cold.demote(path).id == slot_id(1)
    slots.remove(path)
    staged = cold.promote(tmp_path, slot_id(1))
    assert staged.path.read_bytes() == before
    assert slots.publish(staged) == path
    assert holds(path, 1)


def test_a_slot_of_many_chunks_and_every_width_comes_back(tmp_path: Path, cold: ColdStore):
    header, ids, tensors = sample(1)
    generator = random.Random(5)
    for dtype, width in (("BF16", 2), ("F32", 4), ("I64", 8), ("U8", 1)):
        data = generator.randbytes(3 * width * 900_001)
        tensors.append(TensorData(dtype, dtype, (3, 900_001), memoryview(data)))
    path = slots.publish(slots.stage(tmp_path, header, ids, tensors))
    cold.demote(path)
    assert cold.promote(tmp_path, slot_id(1)).path.read_bytes() == path.read_bytes()


def test_the_list_is_what_is_there(tmp_path: Path, cold: ColdStore):
    for number in (1, 2, 3):
        cold.demote(publish_sample(tmp_path, number))
    assert cold.delete(slot_id(2))
    assert not cold.delete(slot_id(2))
    assert [one.id for one in cold.slots()] == sorted(slot_id(number) for number in (1, 3))
    assert all(one.num_bytes > 0 for one in cold.slots())
    with pytest.raises(SlotMissing):
        cold.promote(tmp_path, slot_id(2))


def test_demoting_again_changes_nothing(tmp_path: Path, cold: ColdStore):
    path = publish_sample(tmp_path, 1)
    assert cold.demote(path) == cold.demote(path)
    assert len(list(cold.slots())) == 1


def test_giving_up_leaves_nothing_behind(tmp_path: Path, cold: ColdStore):
    path = publish_sample(tmp_path, 1)
    with pytest.raises(GiveUp):
        cold.demote(path, give_up)
    assert files_below(tmp_path) == {path}
    cold.demote(path)
    before = files_below(tmp_path)
    with pytest.raises(GiveUp):
        cold.promote(tmp_path, slot_id(1), give_up)
    assert files_below(tmp_path) == before


def test_what_is_damaged_is_not_kept(tmp_path: Path, cold: ColdStore):
    path = publish_sample(tmp_path, 1)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(SlotDamaged):
        cold.demote(path)
    assert not list(cold.slots())


@pytest.mark.parametrize("name", ["", "../" * 10 + "ab", "A" * 32])
def test_no_other_name_is_looked_up(tmp_path: Path, cold: ColdStore, name: str):
    for call in (cold.delete, lambda one: cold.promote(tmp_path, one)):
        with pytest.raises(ValueError, match="not a slot id"):
            call(name)


def packed_path(root: Path, number: int) -> Path:
    name = slot_id(number)
    return root / "cold" / name[:2] / f"{name}.safetensors.zst"


def promoted_right(cold: ColdStore, root: Path, expected: bytes) -> bool | None:
    """Whether the promoted bytes are right; None for a miss, which leaves nothing behind."""
    try:
        staged = cold.promote(root, slot_id(1))
    except StoreError:
        assert not list(root.rglob(".tmp-*"))
        return None
    is_right = staged.path.read_bytes() == expected
    staged.path.unlink()
    return is_right


def test_a_damaged_packed_slot_is_a_miss(tmp_path: Path):
    cold = ColdDirectory(tmp_path / "cold")
    path = publish_sample(tmp_path, 1)
    cold.demote(path)
    packed = packed_path(tmp_path, 1)
    whole = packed.read_bytes()
    generator = random.Random(9)
    results: set[bool | None] = set()
    for at in range(0, len(whole), 5):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << generator.randrange(8)
        packed.write_bytes(damaged)
        results.add(promoted_right(cold, tmp_path, path.read_bytes()))
        packed.write_bytes(whole[:at])
        results.add(promoted_right(cold, tmp_path, path.read_bytes()))
    assert False not in results
    packed.write_bytes(whole + b"\0")
    assert promoted_right(cold, tmp_path, path.read_bytes()) is not False


def test_a_packed_slot_under_another_id_is_a_miss(tmp_path: Path):
    cold = ColdDirectory(tmp_path / "cold")
    cold.demote(publish_sample(tmp_path, 1))
    packed_path(tmp_path, 2).parent.mkdir(exist_ok=True)
    shutil.copy(packed_path(tmp_path, 1), packed_path(tmp_path, 2))
    with pytest.raises(SlotDamaged, match="holds slot"):
        cold.promote(tmp_path, slot_id(2))


@pytest.mark.timeout(60)
def test_a_bomb_or_a_fifo_costs_nothing(tmp_path: Path):
    cold = ColdDirectory(tmp_path / "cold")
    cold.demote(publish_sample(tmp_path, 1))
    packed = packed_path(tmp_path, 1)
    bomb = zstandard.ZstdCompressor().compress(b"\xff" * (64 << 20))
    packed.write_bytes(packed.read_bytes()[:24] + bomb)
    with pytest.raises(SlotDamaged):
        cold.promote(tmp_path, slot_id(1))
    packed.unlink()
    os.mkfifo(packed)
    with pytest.raises(SlotDamaged):
        cold.promote(tmp_path, slot_id(1))


def test_another_version_is_foreign(tmp_path: Path):
    bucket = MemoryStore()
    cold = ColdBucket(bucket)
    cold.demote(publish_sample(tmp_path, 1))
    name = f"{slot_id(1)[:2]}/{slot_id(1)}.safetensors.zst"
    data = bytes(obstore.get(bucket, name).bytes()).replace(b"hearth-cold/1", b"hearth-cold/2")
    obstore.put(bucket, name, data)
    with pytest.raises(SlotForeign):
        cold.promote(tmp_path, slot_id(1))


def test_a_cold_directory_is_private_and_counted_in_blocks(tmp_path: Path):
    cold = ColdDirectory(tmp_path / "cold")
    told = cold.demote(publish_sample(tmp_path, 1))
    packed = packed_path(tmp_path, 1)
    assert packed.stat().st_mode & 0o777 == 0o600
    assert packed.parent.stat().st_mode & 0o777 == 0o700
    assert told.num_bytes == disk_bytes(packed)
    abandoned = packed.with_name(f".tmp-{'f' * 32}-1.1-{slot_id(1)}.safetensors.zst")
    abandoned.write_bytes(b"")
    assert upkeep.sweep_temp(tmp_path) == 1
    assert not abandoned.exists()


def test_the_url_decides(tmp_path: Path):
    assert isinstance(open_cold(tmp_path, None), ColdDirectory)
    assert isinstance(open_cold(tmp_path, "memory:///"), ColdBucket)
    with pytest.raises(StoreFailed):
        open_cold(tmp_path, "no such thing")


def test_a_bucket_that_fails_is_a_miss_of_ours(tmp_path: Path):
    path = publish_sample(tmp_path, 1)
    (tmp_path / "bucket").mkdir()
    cold = ColdBucket(LocalStore(str(tmp_path / "bucket")))
    (tmp_path / "bucket" / slot_id(1)[:2]).write_text("in the way")
    with pytest.raises(StoreFailed):
        cold.demote(path)
