"""Starting with 200 GB of KV on disk.

`python -m ops.studies.kv_restart [--slots N …] [--rounds N]` writes `kv_restart.json`: seconds from
exec to ready, from then to the first token of a short prompt that is new; medians. The slots are
rows as hearth-tiny's own, each with a file of holes only, which takes no room. 667 slots of 2,048
tokens are 200 GB with 147 KB for each token, 12,208 with 8 KB. Beside it, in turn, the same home
with one conversation.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import statistics
import tempfile
from pathlib import Path

import msgspec

from api.bench.machine import Environment, environment
from ops.bench.client import stream_completion
from ops.bench.engine import prompt
from ops.bench.processes import hearth
from ops.studies.kv_index import BLOCKS_PER_SLOT, GROUP, slot
from runtime.cache.store_opening import open_store
from runtime.embedded import HEARTH_TINY
from store.slots import slot_path
from store.types import SlotRow

STORE_BYTES = 200 * 10**9
CAP_BYTES = 10**12
_REPORT = Path(__file__).parent / "kv_restart.json"


class Start(msgspec.Struct):
    """`num_slots` with all their blocks, on so many bytes; 1 is the home without them."""

    num_slots: int
    num_blocks: int
    disk_bytes: int
    index_bytes: int
    ready_s: float
    first_token_s: float


class Figures(msgspec.Struct):
    environment: Environment
    rounds: int
    starts: list[Start]


async def begun(home: Path) -> None:
    """A store with one conversation of the model: a server writes all before it leaves."""
    async with hearth(HEARTH_TINY, home, cache_max_bytes=CAP_BYTES) as server:
        body = {"model": "bench", "prompt": prompt(2100, 1), "session_id": "a"}
        await stream_completion(server.port, body)


def filled(home: Path, num_slots: int) -> None:
    """Rows that look like the one that is there, and files of holes."""
    store = open_store(home / "kv", None)
    [there, *_] = store.index.all_slots()
    size = STORE_BYTES // num_slots
    rows: list[SlotRow] = []
    for number in range(num_slots):
        row = slot(number)
        header = msgspec.structs.replace(
            row.header, model=there.header.model, layout=there.header.layout
        )
        rows.append(SlotRow(header=header, disk_bytes=size, last_used_s=there.last_used_s))
        path = slot_path(store.root, header.id)
        path.touch(0o600)
        os.truncate(path, size)
    for first in range(0, num_slots, GROUP):
        store.index.insert(rows[first : first + GROUP]).result()
    store.close()


async def started(home: Path, num_slots: int, seed: int) -> Start:
    index = home / "kv" / "index.db"
    index_bytes = index.stat().st_size
    # Nothing is brought back unasked: files of holes are damaged, and would be put aside.
    async with hearth(HEARTH_TINY, home, cache_max_bytes=CAP_BYTES, prewarm_share=0) as server:
        body = {"model": "bench", "prompt": prompt(64, seed)}
        stream = await stream_completion(server.port, body)
        return Start(
            num_slots=num_slots,
            num_blocks=num_slots * BLOCKS_PER_SLOT,
            disk_bytes=STORE_BYTES if num_slots > 1 else 0,
            index_bytes=index_bytes,
            ready_s=round(server.started_s, 3),
            first_token_s=round(stream.ttft_s, 3),
        )


async def measure(slots: list[int], rounds: int) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        homes = {1: Path(folder) / "1"}
        homes[1].mkdir()
        await begun(homes[1])
        for num_slots in slots:
            homes[num_slots] = Path(folder) / str(num_slots)
            shutil.copytree(homes[1], homes[num_slots])
            filled(homes[num_slots], num_slots)
        taken: dict[int, list[Start]] = {num_slots: [] for num_slots in homes}
        for number in range(rounds):
            for num_slots, home in homes.items():
                taken[num_slots].append(await started(home, num_slots, 100 + number))
        return Figures(environment(), rounds, [_median(one) for one in taken.values()])


def _median(starts: list[Start]) -> Start:
    return msgspec.structs.replace(
        starts[0],
        ready_s=statistics.median(one.ready_s for one in starts),
        first_token_s=statistics.median(one.first_token_s for one in starts),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slots", type=int, nargs="+", default=[667, 12_208])
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    figures = asyncio.run(measure(given.slots, given.rounds))
    _REPORT.write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=2) + b"\n")
    print(_REPORT.read_text())


if __name__ == "__main__":
    main()
