"""Rows of slots for the index, and a store that is opened and closed with its lock."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from migrations.run import upgrade
from store.database import Database
from store.opening import open_database
from store.types import Instant, SlotHeader, SlotRow
from tests.slot_samples import slot_id

MODEL = b"m" * 32
NOW_S = 1_800_000_000.0


@contextmanager
def opened(root: Path, **options: Any) -> Generator[Database]:
    database = open_database(root / "index.db", upgrade, **options)
    try:
        yield database
    finally:
        database.close()


def header(number: int, parent: SlotHeader | None = None, **fields: Any) -> SlotHeader:
    start = parent.end if parent else 0
    plain = SlotHeader(
        id=slot_id(number),
        model=parent.model if parent else MODEL,
        start_hash=parent.end_hash if parent else b"",
        start=start,
        end=start + 512,
        block_size=256,
        block_hashes=tuple(number.to_bytes(8, "big") + bytes([i] * 8) for i in range(2)),
        end_hash=number.to_bytes(16, "big"),
        layout='{"layers":1}',
        has_state=False,
        recompute_ms=100.0,
        created_s=NOW_S,
    )
    return msgspec.structs.replace(plain, **fields)


def row(number: int, parent: SlotHeader | None = None, **fields: Any) -> SlotRow:
    """Fields of the header and of the row may be mixed."""
    of_row = {name: fields.pop(name) for name in list(fields) if name in SlotRow.__struct_fields__}
    plain = SlotRow(
        header=header(number, parent, **fields),
        disk_bytes=4096,
        last_used_s=NOW_S,
        parent=parent.id if parent else None,
    )
    return msgspec.structs.replace(plain, **of_row)


def chain(*numbers: int, **fields: Any) -> list[SlotRow]:
    rows: list[SlotRow] = []
    for number in numbers:
        rows.append(row(number, rows[-1].header if rows else None, **fields))
    return rows


def instant(after_s: float, *, boot: str = "boot", jumped_s: float = 0.0) -> Instant:
    """`after_s` seconds after the beginning, with the wall clock set wrong by `jumped_s`."""
    return Instant(NOW_S + after_s + jumped_s, 1000.0 + after_s, boot)
