"""Slot files: what is written is read, by us and by other libraries; the rest is refused."""

import os
import stat
from array import array
from pathlib import Path

import mlx.core as mx
import msgspec
import numpy as np
import pytest
from safetensors import safe_open

from store import slots
from store.disk import CHUNK_BYTES, disk_bytes
from store.errors import SlotDamaged, SlotForeign, SlotMissing, SlotObsolete, StoreFailed
from store.slot_file import (
    Checksums,
    TensorEntry,
    front_bytes,
    header_problem,
    pack_front,
    place,
    unpack_front,
)
from store.types import MediaSpan, SlotHeader, TensorData
from tests.slot_samples import expected_payload, publish_sample, sample, slot_id, stage_sample


def front_of(path: Path) -> bytes:
    data = path.read_bytes()
    return data[: front_bytes(data, len(data))]


def test_what_was_staged_is_read(tmp_path: Path):
    header, ids, _ = sample(1)
    path = publish_sample(tmp_path, 1)
    verified = slots.verify(path)
    assert verified.header == header
    assert slots.read_header(path) == header
    assert verified.token_ids == slots.read_token_ids(path) == array("I", ids)
    assert verified.num_bytes == path.stat().st_size
    assert path.read_bytes().endswith(expected_payload(1))
    assert disk_bytes(path) >= path.stat().st_size


def test_the_path_is_given_by_the_id(tmp_path: Path):
    name = "ab" * 16
    assert slots.slot_path(tmp_path, name) == tmp_path / "slots" / "ab" / f"{name}.safetensors"


@pytest.mark.parametrize("name", ["", "AB" * 16, "../" + "a" * 29, "a" * 31, "a" * 32 + "\n"])
def test_no_other_name_becomes_a_path(tmp_path: Path, name: str):
    with pytest.raises(ValueError, match="not a slot id"):
        slots.slot_path(tmp_path, name)


def test_files_and_directories_are_private(tmp_path: Path):
    os.umask(0o022)
    root = tmp_path / "store"
    path = publish_sample(root, 1)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert {stat.S_IMODE(one.stat().st_mode) for one in (path.parent, root / "slots", root)} == {
        0o700
    }


def test_a_staged_slot_is_not_visible(tmp_path: Path):
    staged = stage_sample(tmp_path, 1)
    with pytest.raises(SlotMissing):
        slots.verify(slots.slot_path(tmp_path, staged.id))
    assert slots.verify(staged.path).header.id == staged.id


def test_publishing_never_replaces(tmp_path: Path):
    publish_sample(tmp_path, 1)
    again = stage_sample(tmp_path, 1)
    with pytest.raises(StoreFailed, match="exists already"):
        slots.publish(again)


def test_publishing_what_was_cut_is_refused(tmp_path: Path):
    staged = stage_sample(tmp_path, 1)
    os.truncate(staged.path, staged.num_bytes - 1)
    with pytest.raises(SlotDamaged):
        slots.publish(staged)


def test_a_group_is_published_in_order(tmp_path: Path):
    paths = slots.publish_all([stage_sample(tmp_path, number) for number in range(4)])
    assert [slots.read_header(path).id for path in paths] == [slot_id(n) for n in range(4)]


def test_the_caller_may_give_up_between_chunks(tmp_path: Path):
    class Enough(Exception):
        pass

    moved: list[int] = []

    def give_up(num_bytes: int) -> None:
        moved.append(num_bytes)
        if len(moved) == 2:
            raise Enough

    header, ids, tensors = sample(1)
    big = TensorData("big", "U8", (4 * CHUNK_BYTES,), memoryview(bytes(4 * CHUNK_BYTES)))
    with pytest.raises(Enough):
        slots.stage(tmp_path, header, ids, [*tensors, big], give_up)
    assert moved == [CHUNK_BYTES + len(expected_payload(1)), CHUNK_BYTES]
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_every_byte_is_reported_once(tmp_path: Path):
    moved: list[int] = []
    slots.stage(tmp_path, *sample(1), moved.append)
    assert sum(moved) == len(expected_payload(1))


def test_contradictions_are_the_callers_mistake(tmp_path: Path):
    header, ids, tensors = sample(1)
    for wrong in (
        lambda: slots.stage(tmp_path, header, ids[1:], tensors),
        lambda: slots.stage(tmp_path, header, ids, [*tensors, tensors[0]]),
        lambda: slots.stage(tmp_path, header, ids, [tensors[0]._replace(dtype="F7")]),
        lambda: slots.stage(tmp_path, header, ids, [tensors[0]._replace(shape=(6, 2, 7))]),
        lambda: slots.stage(tmp_path, header, ids, [tensors[0]._replace(name="__metadata__")]),
        lambda: slots.stage(tmp_path, header, ids, [tensors[0]._replace(name="tokens")]),
    ):
        with pytest.raises(ValueError, match=r"."):
            wrong()
    assert not (tmp_path / "slots").exists()


def test_a_strided_view_is_refused(tmp_path: Path):
    header, ids, tensors = sample(1)
    strided = tensors[0]._replace(data=memoryview(bytes(384))[::2])
    with pytest.raises(ValueError, match="contiguous"):
        slots.stage(tmp_path, header, ids, [strided])


@pytest.mark.parametrize("num_layers", [1, 7, 300])
def test_the_official_library_and_mlx_read_the_same(tmp_path: Path, num_layers: int):
    path = publish_sample(tmp_path, 1, num_layers=num_layers)
    _, ids, tensors = sample(1, num_layers=num_layers)
    arrays = mx.load(str(path))
    assert isinstance(arrays, dict)
    assert set(arrays) == {"tokens", *(one.name for one in tensors)}
    assert arrays["tokens"].tolist() == ids
    with safe_open(path, "np") as official:
        assert official.metadata()["format"] == "hearth-slot/2"
        assert official.get_tensor("tokens").tolist() == ids
        assert official.get_tensor("state").tobytes() == bytes(tensors[-2].data)
        assert official.get_tensor("nothing").shape == (1, 0, 4)
    for one in tensors:
        assert tuple(arrays[one.name].shape) == one.shape
        integers = arrays[one.name].view(mx.uint32 if one.dtype == "F32" else mx.uint16)
        if integers.size:
            assert np.array(integers).tobytes() == bytes(one.data)


@pytest.mark.parametrize(("version", "is_obsolete"), [(b"1", True), (b"3", False)])
def test_another_format_version_is_foreign(tmp_path: Path, version: bytes, is_obsolete: bool):
    path = publish_sample(tmp_path, 1)
    data = path.read_bytes().replace(b"hearth-slot/2", b"hearth-slot/" + version)
    path.write_bytes(data)
    with pytest.raises(SlotForeign) as refused:
        slots.read_header(path)
    assert isinstance(refused.value, SlotObsolete) == is_obsolete


def test_front_is_as_long_whatever_the_checksums():
    header, ids, tensors = sample(1)
    entries = place([("tokens", "U32", (6,)), *((n, d, s) for n, d, s, _ in tensors)])
    none = Checksums.none(header, entries)
    assert [len(some) for some in (none.tokens, none.blocks, none.whole)] == [2, 2, 4]
    each = ("f" * 32,) * 2
    marked = Checksums(each, each, each * 2)
    front = pack_front(header, entries, marked)
    assert len(front) == len(pack_front(header, entries))
    assert len(front) % 64 == 0
    contents = unpack_front(front, len(front) + entries[-1].end)
    assert contents.header == header
    assert (contents.tensors, contents.checksums) == (tuple(entries), marked)
    assert all(isinstance(one, TensorEntry) for one in contents.tensors)
    assert len(ids) == header.num_tokens


def test_removing_twice_is_no_error(tmp_path: Path):
    path = publish_sample(tmp_path, 1)
    assert slots.remove(path)
    assert not slots.remove(path)
    with pytest.raises(SlotMissing):
        slots.read_header(path)


def test_a_header_from_before_pictures_is_read_and_odd_pictures_are_not():
    header, _, _ = sample(1)
    old = {
        key: value
        for key, value in msgspec.json.decode(msgspec.json.encode(header), type=dict).items()
        if key not in ("media", "rope_delta")
    }
    assert msgspec.json.decode(msgspec.json.encode(old), type=SlotHeader) == header
    span = MediaSpan(header.start, header.start + 2, b"d" * 32, (1, 1, 2))
    seen = msgspec.structs.replace(header, media=(span,), rope_delta=-1)
    entries = place([("tokens", "U32", (header.num_tokens,))])
    assert msgspec.json.decode(msgspec.json.encode(seen), type=SlotHeader) == seen
    assert header_problem(seen, entries) is None
    odd = (span._replace(end=span.start), span._replace(digest=b"d"), span._replace(grid=(1, 2, 2)))
    for one in odd:
        problem = header_problem(msgspec.structs.replace(seen, media=(one,)), entries)
        assert problem is not None
