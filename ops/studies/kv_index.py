"""The index at a million blocks: filling it, and building a worker's map from it.

`python -m ops.studies.kv_index [BLOCKS]` prints one JSON object; times in seconds, best of three.
"""

from __future__ import annotations

import json
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

from migrations.run import upgrade
from runtime.kv.prefix_tree import PrefixTree, Run, run_of
from store.block_names import HashChain
from store.database import Database
from store.index import SlotIndex
from store.opening import open_database
from store.types import SlotHeader, SlotRow

MODEL = b"m" * 32
CHAIN = HashChain(b"s" * 32, MODEL, block_size=256)
BLOCKS_PER_SLOT = 8
SLOTS_PER_CHAIN = 16
GROUP = 4


def digest(number: int) -> bytes:
    return blake2b(number.to_bytes(8, "big"), digest_size=16).digest()


def end_hash(number: int) -> bytes:
    return digest((number << 8) + BLOCKS_PER_SLOT - 1)


def slot(number: int) -> SlotRow:
    depth = number % SLOTS_PER_CHAIN
    header = SlotHeader(
        id=digest(number).hex(),
        model=MODEL,
        start_hash=end_hash(number - 1) if depth else b"",
        start=depth * 2048,
        end=depth * 2048 + 2048,
        block_size=256,
        block_hashes=tuple(digest((number << 8) + i) for i in range(BLOCKS_PER_SLOT)),
        end_hash=end_hash(number),
        layout="{}",
        has_state=False,
        recompute_ms=300.0,
        created_s=1e9,
    )
    return SlotRow(header=header, disk_bytes=1 << 28, last_used_s=1e9)


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def fill(database: Database, num_slots: int) -> None:
    """In groups of a turn's size; what waits shares transactions."""
    index = SlotIndex(database)
    for first in range(0, num_slots, 64 * GROUP):
        starts = range(first, min(first + 64 * GROUP, num_slots), GROUP)
        groups = [[slot(one + i) for i in range(GROUP)] for one in starts]
        for future in [index.insert(group) for group in groups]:
            future.result()


def raw_block_map(path: Path) -> dict[bytes, tuple[int, int]]:
    """Block hash to (slot, position), straight from the driver: the least it can cost."""
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    rows = connection.execute("SELECT hash, slot_id, position FROM blocks")
    found = {block: (slot_id, position) for block, slot_id, position in rows}
    connection.close()
    return found


def main() -> int:
    num_blocks = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    num_slots = num_blocks // BLOCKS_PER_SLOT // GROUP * GROUP
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "index.db"
        database = open_database(path, upgrade)
        index = SlotIndex(database)
        fill_s = seconds(lambda: fill(database, num_slots))
        database.checkpoint().result()
        tree, ids = tree_of(index.slots_of(MODEL)), prompt(num_slots)
        figures = {
            "num_blocks": num_slots * BLOCKS_PER_SLOT,
            "num_slots": num_slots,
            "file_bytes": path.stat().st_size,
            "insert_slots_per_s": round(num_slots / fill_s),
            "raw_block_map_s": best(lambda: raw_block_map(path)),
            "slots_of_s": best(lambda: index.slots_of(MODEL)),
            "tree_s": best(lambda: tree_of(index.slots_of(MODEL))),
            "find_ms": round(1000 * best(lambda: find(tree, ids), digits=6), 3),
            "candidates_s": best(index.candidates),
            "quick_check_s": best(database.check),
        }
        database.close()
    print(json.dumps(figures, indent=2))
    return 0


def tree_of(rows: list[SlotRow]) -> PrefixTree:
    """What a worker makes of the index before its first request."""
    tree = PrefixTree(CHAIN)
    runs: dict[str, Run] = {}
    for row in rows:
        header = row.header
        hashes = (header.start_hash, *header.block_hashes)
        parent = runs.get(row.parent or "")
        runs[header.id] = run_of(CHAIN, parent, header.start, header.end, hashes)
        tree.insert(runs[header.id])
    return tree


def prompt(num_slots: int) -> tuple[bytes, ...]:
    """The block hashes of a whole chain, in the midst of them all."""
    first = num_slots // SLOTS_PER_CHAIN // 2 * SLOTS_PER_CHAIN
    there = range(first, min(first + SLOTS_PER_CHAIN, num_slots))
    return tuple(block for number in there for block in slot(number).header.block_hashes)


def find(tree: PrefixTree, block_hashes: tuple[bytes, ...]) -> None:
    """How far a prompt of these blocks is known: as far as they go."""
    num_tokens = len(block_hashes) * CHAIN.block_size
    found = tree.match(range(num_tokens), block_hashes)
    assert found.num_tokens == num_tokens


def best(run: Callable[[], object], digits: int = 3) -> float:
    return round(min(seconds(run) for _ in range(3)), digits)


if __name__ == "__main__":
    sys.exit(main())
