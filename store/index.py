"""The index of blocks and heads: rows of what the files say, for lists, accounts, a fast start.

Nothing is decided by a row that the files do not say as well, but for how lately and how often a
head was used, and what is in the cold store. Rows are written behind the files and not waited for:
a start compares both and mends the rows. In one place the order matters, and `write_first` waits:
a row says that something is in the cold store before it is put there and until it is removed there,
so that no deletion misses it. The warm file goes when its packed copy is durable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple, cast

import msgspec
import structlog
from sqlalchemy import Connection

from store.database import Database
from store.errors import IndexDamaged, StoreError
from store.head_file import Head, KnownHead, Owner
from store.slots import BlockKey
from store.tree import Block, Sizes

_HEADS = """
SELECT h.id, m.hash, asked, session, root, num_tokens, name, continues, ttl_s, pins, block_ms,
  last, "end", num_bytes, end_bytes, created_s, h.last_used_s, hits, digests, num_turns
FROM heads h JOIN models m ON m.id = h.model_id
"""
_BLOCKS = """
SELECT model_id, name, above, recompute_ms, slot_bytes, state_bytes, cold_slot_bytes,
  cold_state_bytes
FROM blocks
"""
_PUT_MODEL = """
INSERT OR IGNORE INTO models (hash, label, layout, last_used_s) VALUES (?, '', '', 0)
"""
_PUT_HEAD = """
INSERT OR REPLACE INTO heads VALUES
  (?, (SELECT id FROM models WHERE hash = ?), ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
_PUT_BLOCK = """
INSERT OR REPLACE INTO blocks (model_id, name, above, recompute_ms, slot_bytes, state_bytes,
  cold_slot_bytes, cold_state_bytes)
VALUES ((SELECT id FROM models WHERE hash = ?), ?, ?, ?, ?, ?, ?, ?)
"""
_DROP_HEAD = "DELETE FROM heads WHERE id = ?"
_DROP_BLOCK = "DELETE FROM blocks WHERE name = ?"

_HeadTuple = tuple[
    str, bytes, bytes, bytes, bytes, int, str, bytes, float | None, bytes, float,
    bytes | None, bytes, int, int, float, float, float, bytes, int,
]  # fmt: skip
_BlockTuple = tuple[int, bytes, bytes | None, float, int, int, int, int]
_Rows = Sequence[tuple[object, ...]]

log = structlog.stdlib.get_logger("store.index")


class Change(NamedTuple):
    """Rows to write, and rows to remove, in one transaction."""

    heads: Iterable[KnownHead] = ()
    blocks: Iterable[tuple[BlockKey, Block]] = ()
    gone_heads: Iterable[str] = ()
    gone_blocks: Iterable[BlockKey] = ()


class Index:
    """The rows of a store, over its database. From any thread."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.num_lost = 0
        """Changes that could not be written; the next start mends their rows."""

    def load(self) -> tuple[list[KnownHead], dict[BlockKey, Block]]:
        """All heads, as if they were in memory only, and all blocks, as if no head went through.

        Where SQLite finds damage there are none: the next start sets the file aside.

        Raises:
            StoreFailed: it cannot be read.
        """
        try:
            return self._database.read(_load)
        except IndexDamaged as error:
            log.warning("index_damaged", error=str(error))
            return [], {}

    def write(self, change: Change) -> None:
        """Have these rows soon. Nothing fails if that does not come to be."""
        try:
            self._submit(change).add_done_callback(self._note)
        except StoreError as error:
            self._lose(error)

    def write_first(self, change: Change) -> None:
        """Have these rows before anything else happens.

        Raises:
            StoreFull, StoreFailed, IndexDamaged: there are not to be had.
        """
        self._submit(change).result()

    def flush(self) -> None:
        """Wait for what was written before."""
        self.write_first(Change())

    def _submit(self, change: Change) -> Future[None]:
        statements = [*_statements(change)]
        return self._database.submit(lambda connection: _run(connection, statements))

    def _note(self, future: Future[None]) -> None:
        if not future.cancelled() and isinstance(error := future.exception(), StoreError):
            self._lose(error)

    def _lose(self, error: StoreError) -> None:
        self.num_lost += 1
        log.warning("rows_lost", reason=error.reason, error=str(error))


def _statements(change: Change) -> Iterator[tuple[str, _Rows]]:
    """Values as they are now: blocks go on changing."""
    heads, blocks = [*change.heads], [*change.blocks]
    models = {one.head.model for one in heads} | {key.model for key, _ in blocks}
    yield _DROP_HEAD, [(one,) for one in change.gone_heads]
    yield _DROP_BLOCK, [(one.name,) for one in change.gone_blocks]
    yield _PUT_MODEL, [(one,) for one in models]
    yield _PUT_BLOCK, [_block_values(key, block) for key, block in blocks]
    yield _PUT_HEAD, [_head_values(one) for one in heads]


def _run(connection: Connection, statements: Iterable[tuple[str, _Rows]]) -> None:
    for statement, rows in statements:
        if rows:
            connection.exec_driver_sql(statement, [*rows])


def _block_values(key: BlockKey, block: Block) -> tuple[object, ...]:
    above = block.above.name if block.above else None
    return (key.model, key.name, above, block.recompute_ms, *block.sizes)


def _head_values(one: KnownHead) -> tuple[object, ...]:
    head, last = one.head, one.last.name if one.last else None
    pins = msgspec.msgpack.encode(head.pins)
    told = (head.ttl_s, pins, head.block_ms, last, one.end, one.num_bytes, one.end_bytes)
    of = (head.id, head.model, *head.owner, head.num_tokens, head.name, head.continues)
    times = (one.created_s, one.last_used_s, one.hits)
    return (*of, *told, *times, one.digests, one.num_turns)


def _load(connection: Connection) -> tuple[list[KnownHead], dict[BlockKey, Block]]:
    """By the driver's own cursor, and each key once: there may be a million blocks."""
    cursor = connection.connection.cursor()
    cursor.execute("SELECT id, hash FROM models")
    models = dict(cast("Iterable[tuple[int, bytes]]", cursor))
    keys: dict[bytes, BlockKey] = {}
    sizes: dict[tuple[int, ...], Sizes] = {}
    blocks: dict[BlockKey, Block] = {}
    cursor.execute(_BLOCKS)
    for row in cast("Iterable[_BlockTuple]", cursor):
        model, name, above, recompute_ms = models[row[0]], row[1], row[2], row[3]
        key = keys.get(name) or keys.setdefault(name, BlockKey(model, name))
        before = None
        if above is not None:
            before = keys.get(above) or keys.setdefault(above, BlockKey(model, above))
        size = sizes.get(row[4:]) or sizes.setdefault(row[4:], Sizes(*row[4:]))
        blocks[key] = Block(before, recompute_ms, size)
    cursor.execute(_HEADS)
    heads = [_known(row) for row in cast("Iterable[_HeadTuple]", cursor)]
    cursor.close()
    return heads, blocks


_read_pins: Callable[[bytes], tuple[str, ...]] = msgspec.msgpack.Decoder(tuple[str, ...]).decode


def _known(row: _HeadTuple) -> KnownHead:
    head_id, model, asked, session, root, num_tokens, name, continues = row[:8]
    ttl_s, pins, block_ms, last, end = row[8:13]
    num_bytes, end_bytes, created_s, last_used_s, hits, digests, num_turns = row[13:]
    head = Head(
        id=head_id,
        model=model,
        owner=Owner(asked, session, root),
        num_tokens=num_tokens,
        name=name,
        continues=continues,
        ttl_s=ttl_s,
        pins=_read_pins(pins),
        block_ms=block_ms,
    )
    block = BlockKey(model, last) if last else None
    sizes, times = (num_bytes, end_bytes), (created_s, last_used_s, hits)
    return KnownHead(head, block, end, None, (), *sizes, *times, digests, num_turns)
