"""Files of KV: read back as they were written, by others too, or not at all."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from store.errors import SlotDamaged, SlotForeign, SlotMissing
from store.kv_file import Tensor, kind_of, open_file, size_of, write
from store.slots import BlockKey, SlotAbout, Slots

KIND = "hearth-slot/3"
ABOUT = b'{"name":"\xc3\xa9 \\" {","n":[1,2]}'
TENSORS = [
    Tensor("tokens", "U32", (3,), bytes(range(12))),
    Tensor("kv.0", "F16", (3, 2), bytes(range(100, 112))),
    Tensor("empty", "U8", (0,), b""),
]


def new_file(folder: Path, kind: str = KIND) -> Path:
    path = folder / "one.safetensors"
    path.unlink(missing_ok=True)
    assert write(path, kind, ABOUT, TENSORS) == path.stat().st_size
    return path


def test_a_file_is_read_back_as_it_was_written(tmp_path: Path):
    with open_file(new_file(tmp_path), KIND) as file:
        assert file.front.about == ABOUT
        assert [one.name for one in file.front.entries] == ["tokens", "kv.0", "empty"]
        assert file.read() == TENSORS
        assert file.read({"kv.0"}) == TENSORS[1:2]


def test_its_size_is_known_before_and_its_kind_without_its_payload(tmp_path: Path):
    path = new_file(tmp_path, "hearth-head/1")
    assert size_of("hearth-head/1", ABOUT, TENSORS) == path.stat().st_size
    assert kind_of(path) == "hearth-head/1"
    for content in (b"", b"\xff" * 64, b"\x02" + bytes(7) + b"{}", b"\x10" + bytes(7) + b"{}"):
        path.write_bytes(content)
        with pytest.raises(SlotDamaged):
            kind_of(path)
    path.unlink()
    with pytest.raises(SlotMissing):
        kind_of(path)


def test_it_is_private_and_anybody_s_safetensors(tmp_path: Path):
    path = new_file(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600
    loaded = load_file(path)
    assert loaded["kv.0"].tobytes() == TENSORS[1].data
    assert loaded["kv.0"].shape == (3, 2)


def read_all(path: Path) -> tuple[bytes, list[Tensor]]:
    with open_file(path, KIND) as file:
        return file.front.about, file.read()


def test_a_byte_that_changed_anywhere_is_noticed(tmp_path: Path):
    path = new_file(tmp_path)
    content = path.read_bytes()
    for position in range(len(content)):
        for bit in (1, 0x20, 0x80):
            damaged = bytearray(content)
            damaged[position] ^= bit
            path.write_bytes(damaged)
            with pytest.raises(SlotDamaged):
                read_all(path)


@pytest.mark.parametrize("change", [slice(0), slice(7), slice(8), slice(100), slice(-1)])
def test_a_file_that_ends_early_or_late_is_noticed(tmp_path: Path, change: slice):
    path = new_file(tmp_path)
    content = path.read_bytes()
    for other in (content[change], content + b"x", content + content):
        path.write_bytes(other)
        with pytest.raises(SlotDamaged):
            read_all(path)


def test_what_is_no_such_file_is_told_apart(tmp_path: Path):
    with pytest.raises(SlotMissing):
        read_all(tmp_path / "nothing")
    with pytest.raises(SlotForeign, match="hearth-slot/4"):
        read_all(new_file(tmp_path, "hearth-slot/4"))
    with pytest.raises(SlotDamaged, match="hearth-head/1"):
        read_all(new_file(tmp_path, "hearth-head/1"))
    (tmp_path / "link").symlink_to(new_file(tmp_path))
    with pytest.raises(SlotDamaged):
        read_all(tmp_path / "link")


@given(st.binary(max_size=400))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_bytes_of_strangers_are_damage_and_nothing_else(tmp_path: Path, content: bytes):
    path = tmp_path / "strange"
    for one in (content, len(content).to_bytes(8, "little") + content):
        path.write_bytes(one)
        with pytest.raises(SlotDamaged):
            read_all(path)


def test_an_empty_file_in_the_place_of_a_slot_is_written_again(tmp_path: Path):
    slots, key = Slots(tmp_path), BlockKey(b"m" * 16, b"n" * 16)
    slots.path(key).parent.mkdir()
    slots.path(key).touch()
    assert slots.put(SlotAbout(*key), [1, 2], [])
    assert slots.read(key, [1, 2]) is not None
    assert slots.put(SlotAbout(*key), [1, 2], []) is None
