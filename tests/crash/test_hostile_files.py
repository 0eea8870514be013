"""Files made to hurt the reader: bounded memory, no exception but a miss.

Each of them carries a right digest, so that only the reader's own judgement refuses it.
"""

import json
import os
import resource
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from xxhash import xxh3_128_hexdigest

from store.errors import SlotDamaged
from store.kv_file import open_file
from store.slots import SLOT
from tests.slot_samples import publish_sample, served

Table = dict[str, Any]
BEFORE_DIGEST = len(b'12345678{"__metadata__":{"format":"hearth-slot/3","digest":"')
MAX_PEAK_BYTES = 48 << 20


def forge(path: Path, json_bytes: bytes, *, length: int | None = None) -> None:
    """Write a file with this JSON, given a digest that fits, and the payload of slot 1."""
    whole = path.read_bytes()
    old = 8 + int.from_bytes(whole[:8], "little")
    front = (len(json_bytes) if length is None else length).to_bytes(8, "little") + json_bytes
    blank = front[:BEFORE_DIGEST] + b"0" * 32 + front[BEFORE_DIGEST + 32 :]
    digest = xxh3_128_hexdigest(blank).encode()
    path.write_bytes(front[:BEFORE_DIGEST] + digest + front[BEFORE_DIGEST + 32 :] + whole[old:])


def table_of(path: Path) -> Table:
    whole = path.read_bytes()
    return json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])


def read(path: Path) -> None:
    with open_file(path, SLOT) as file:
        file.read()


def spelled(table: Table) -> bytes:
    return json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()


def change(name: str, **fields: Any) -> Callable[[Table], None]:
    return lambda table: table[name].update(fields)


def drop_tensors(table: Table) -> None:
    for name in list(table)[1:]:
        del table[name]


HOSTILE: dict[str, Callable[[Table], None]] = {
    "4 TiB": change("state", shape=[1 << 20, 1 << 20]),
    "4 TiB with offsets": change("state", shape=[1 << 40], data_offsets=[408, 408 + (4 << 40)]),
    "more than 64 bits": change("state", shape=[1 << 64, 1 << 64]),
    "negative": change("state", shape=[-3, -5]),
    "a fraction": change("state", shape=[3.0, 5]),
    "a thousand dimensions": change("nothing", shape=[0] * 1000),
    "overlap": change("1.keys", data_offsets=[24, 216]),
    "a gap": change("state", data_offsets=[412, 472]),
    "backwards": change("state", data_offsets=[468, 408]),
    "three offsets": change("state", data_offsets=[408, 468, 468]),
    "unknown dtype": change("state", dtype="F128"),
    "another dtype": change("state", dtype="I32", shape=[3, 4]),
    "dtype as number": change("state", dtype=4),
    "unknown field": change("state", more=1),
    "no tensors": drop_tensors,
    "nested": lambda table: table.update(deep=json.loads("[" * 900 + "]" * 900)),
    "missing checksums": change("__metadata__", checksums=""),
    "checksum of another": change("__metadata__", checksums=" ".join(["0" * 32] * 5)),
    "metadata with more": change("__metadata__", more="x"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_is_refused(tmp_path: Path, name: str):
    path = publish_sample(tmp_path, 1)
    table = table_of(path)
    HOSTILE[name](table)
    forge(path, spelled(table))
    with pytest.raises(SlotDamaged):
        read(path)


def test_the_forger_can_forge(tmp_path: Path):
    path = publish_sample(tmp_path, 1)
    before = path.read_bytes()
    length = int.from_bytes(before[:8], "little")
    forge(path, before[8 : 8 + length])
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "spelling",
    [
        lambda text: text.replace(b'"tokens":', b'"tokens" :'),
        lambda text: text.replace(b'"state":', b'"\\u0073tate":'),
        lambda text: (
            text.rstrip()[:-1] + b',"tokens":{"dtype":"U32","shape":[0],"data_offsets":[0,0]}}'
        ),
        lambda text: text + b" " * 64,
        lambda text: text.rstrip() + b"\t" * (len(text) - len(text.rstrip())),
        lambda text: text.rstrip() + b"{}",
        lambda text: text.replace(b"0.keys", b"0.ke\xffs"),
        lambda text: text.rstrip()[:-1] + b',"deep":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    ],
)
def test_another_spelling_is_refused(tmp_path: Path, spelling: Callable[[bytes], bytes]):
    path = publish_sample(tmp_path, 1)
    whole = path.read_bytes()
    text = whole[8 : 8 + int.from_bytes(whole[:8], "little")]
    assert spelling(text) != text
    forge(path, spelling(text))
    with pytest.raises(SlotDamaged):
        read(path)


@pytest.mark.parametrize("length", [0, 1, 7, 1 << 24, (1 << 24) + 1, 1 << 31, 1 << 60, 2**64 - 1])
def test_a_length_that_lies_is_refused(tmp_path: Path, length: int):
    path = publish_sample(tmp_path, 1)
    whole = path.read_bytes()
    forge(path, whole[8 : 8 + int.from_bytes(whole[:8], "little")], length=length)
    os.truncate(path, 64 << 20)
    tracemalloc.start()
    with pytest.raises(SlotDamaged):
        read(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < MAX_PEAK_BYTES


@pytest.mark.parametrize("content", [b"", b"\0", b"\0" * 8, b"\0" * 4096, b"{}" * 99, b"\xff" * 99])
def test_what_is_no_slot_is_refused(tmp_path: Path, content: bytes):
    path = publish_sample(tmp_path, 1)
    path.write_bytes(content)
    with pytest.raises(SlotDamaged):
        read(path)


def test_a_sparse_file_of_terabytes_costs_nothing(tmp_path: Path):
    path = publish_sample(tmp_path, 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    os.truncate(path, 4 << 40)
    with pytest.raises(SlotDamaged):
        read(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MAX_PEAK_BYTES >> 10


@pytest.mark.parametrize("about", ["", "{", "[]", "{}", '{"model":7,"name":"x"}'])
def test_a_slot_that_does_not_say_of_what_it_is_is_a_miss(tmp_path: Path, about: str):
    path = publish_sample(tmp_path, 1)
    table = table_of(path)
    table["__metadata__"]["about"] = about
    forge(path, spelled(table))
    assert served(tmp_path, 1) is None
    assert not path.exists()


def test_a_slot_of_another_block_is_a_miss(tmp_path: Path):
    path, table = publish_sample(tmp_path, 1), table_of(publish_sample(tmp_path, 2))
    forge(path, spelled(table))
    assert served(tmp_path, 1) is None
