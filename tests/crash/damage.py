"""Readers without one of our promises, for the tests that show what the promise is worth."""

from __future__ import annotations

import json
from array import array
from pathlib import Path

from store.kv_file import DTYPE_BYTES


def unchecked_payload(path: Path) -> bytes | None:
    """The payload as a reader without checksums gives it; None where even that one notices."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    try:
        table = json.loads(data[8 : 8 + length])
        del table["__metadata__"]
        parts = [data[8 + length + a : 8 + length + b] for a, b in map(_offsets, table.values())]
    except (ValueError, KeyError, TypeError):
        return None
    return b"".join(parts)


def _offsets(tensor: dict[str, list[int] | str]) -> list[int]:
    if tensor["dtype"] not in DTYPE_BYTES:
        raise KeyError(tensor["dtype"])
    return [int(one) for one in tensor["data_offsets"]]


def tokens_of(path: Path) -> list[int]:
    """The token ids that a slot or a head says it is of, damaged or not; none where none can be
    read.
    """
    data = path.read_bytes()
    try:
        start = 8 + int.from_bytes(data[:8], "little")
        begin, end = _offsets(json.loads(data[8:start])["tokens"])
        return array("I", data[start + begin : start + end]).tolist()
    except (ValueError, KeyError, TypeError):
        return []
