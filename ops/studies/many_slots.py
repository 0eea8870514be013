"""How long a store of many slots takes: `python -m ops.studies.many_slots`.

A hundred thousand slots of few bytes, in conversations of 400 blocks each, beside a model that
serves. Times are medians over rounds, with the files in the page cache. Writes `many_slots.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import queue
import statistics
import tempfile
import time
from array import array
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from api.bench.machine import Environment, environment
from ops.bench.client import stream_completion
from ops.bench.engine import prompt
from ops.bench.processes import hearth
from runtime.cache.inventory import whom_of
from runtime.cache.opened import BlockStore, Terms, open_blocks
from runtime.cache.tending import delete_head
from runtime.cache.verification import files_of, verify
from runtime.embedded import HEARTH_TINY
from runtime.kv.reader import Asked, OnDisk, Reader
from store.head_file import Head, KnownHead, Owner, write_head
from store.kv_file import Tensor
from store.room import Limits
from store.slots import SlotAbout

NUM_SLOTS, NUM_BLOCKS, BLOCK = 100_000, 400, 256
_MODEL = b"many slots model"
_ROOMY_BYTES = 1 << 40
_REPORT = Path(__file__).parent / "many_slots.json"


class Figures(msgspec.Struct):
    """Seconds, but for those in ms. `mend_s` opens the store without its index, from the files
    alone. Half of it leaves in `evict_s`. `find_ms` looks up a prompt of 400 blocks that is all
    there, `miss_ms` one of which nothing is. `verify_s` reads every file. `ready_s` is from
    starting a server over this store to its readiness, `empty_ready_s` with nothing in the store.
    """

    open_s: float
    mend_s: float
    find_ms: float
    miss_ms: float
    evict_s: float
    delete_ms: float
    verify_s: float
    ready_s: float
    empty_ready_s: float


class Report(msgspec.Struct):
    """One run."""

    environment: Environment
    num_slots: int
    write_s: float
    rounds: list[Figures]
    medians: Figures | None = None


@contextmanager
def opened(root: Path, warm_bytes: int = _ROOMY_BYTES) -> Generator[BlockStore]:
    limits = Limits(warm_bytes=warm_bytes)
    store = open_blocks(root, Terms(BLOCK, None, limits))
    try:
        yield store
    finally:
        store.close()


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def token_ids(number: int) -> array[int]:
    return array("I", prompt(NUM_BLOCKS * BLOCK, number))


def fill(root: Path, num_slots: int) -> None:
    """Conversations as workers leave them behind."""
    with opened(root) as store:
        chain = store.chain_of(_MODEL)
        for number in range(num_slots // NUM_BLOCKS):
            ids = token_ids(number)
            for at, name in enumerate(chain.block_hashes(ids)):
                tensors = [Tensor("kv", "U8", (16,), bytes(16))]
                about = SlotAbout(_MODEL, name, "{}", 10.0)
                store.slots.put(about, ids[at * BLOCK : (at + 1) * BLOCK], tensors)
            store.slots.sync([_MODEL])
            owner = Owner(b"a" * 16, b"", b"")
            head = Head(f"{number:032x}", _MODEL, owner, len(ids), layout="{}")
            staged = store.heads.staging_path()
            write_head(staged, head, ids)
            store.heads.publish(staged, store.heads.number)


def heads_of(store: BlockStore) -> list[KnownHead]:
    """Those that `fill` made."""
    return [one for one in store.heads.known.values() if one.head.model == _MODEL]


def find(store: BlockStore, root: Path, number: int, num_blocks: int) -> float:
    """Seconds until a reader says that there are so many blocks of a prompt."""
    found: queue.SimpleQueue[object] = queue.SimpleQueue()
    reader = Reader(store.slots, root / "heads", found.put, BLOCK)
    chain, ids = store.chain_of(_MODEL), token_ids(number)
    names = chain.block_hashes(ids)
    asked = Asked(b"key", _MODEL, chain, chain.root, tuple(names), ids, 0, needs_state=False)

    def look() -> None:
        reader.ask(asked)
        said = found.get(timeout=60)
        assert isinstance(said, OnDisk)
        assert said.num_blocks == num_blocks, said.num_blocks

    try:
        look()
        return timed(look)
    finally:
        reader.close()


async def ready_s(home: Path) -> float:
    async with hearth(HEARTH_TINY, home) as server:
        await stream_completion(server.port, {"prompt": prompt(16, 1), "max_tokens": 1})
        return server.started_s


def measure(home: Path, empty: Path) -> Figures:
    """One round. What it evicts and deletes it takes away for good: later rounds have fewer."""
    root = home / "kv"
    empty_ready_s = asyncio.run(ready_s(empty))
    full_ready_s = asyncio.run(ready_s(home))

    def just_open() -> None:
        with opened(root):
            pass

    open_s = timed(just_open)
    for path in root.glob("index.db*"):
        path.unlink()
    mend_s = timed(just_open)
    with opened(root) as store:
        last = max(int(one.head.id, 16) for one in heads_of(store))
        find_s = find(store, root, last, NUM_BLOCKS)
        miss_s = find(store, root, last + 1, 0)
        verify_s = timed(lambda: [verify(store, one) for one in files_of(store)])
        head_id = min(one.head.id for one in heads_of(store))
        assert whom_of(store.heads, head_id, BLOCK).chain is not None
        delete_s = timed(lambda: delete_head(store, head_id))
        used_bytes = store.used_bytes()
    with opened(root, used_bytes // 2) as store:
        before = store.heads.kept.warm_bytes
        evict_s = timed(store.room.keep)
        assert store.heads.kept.warm_bytes < before
    return Figures(
        open_s=open_s,
        mend_s=mend_s,
        find_ms=find_s * 1000,
        miss_ms=miss_s * 1000,
        evict_s=evict_s,
        delete_ms=delete_s * 1000,
        verify_s=verify_s,
        ready_s=full_ready_s,
        empty_ready_s=empty_ready_s,
    )


def median(rounds: list[Figures]) -> Figures:
    columns = zip(*map(msgspec.structs.astuple, rounds), strict=True)
    return Figures(*(round(statistics.median(column), 3) for column in columns))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m ops.studies.many_slots", description=__doc__)
    parser.add_argument("--slots", type=int, default=NUM_SLOTS)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path, default=_REPORT)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory() as empty:
        home = Path(name)
        write_s = timed(lambda: fill(home / "kv", arguments.slots))
        report = Report(environment(), arguments.slots, round(write_s, 1), [])
        for _ in range(arguments.rounds):
            report.rounds.append(measure(home, Path(empty)))
            report.medians = median(report.rounds)
            print(report.medians)
            arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")


if __name__ == "__main__":
    main()
