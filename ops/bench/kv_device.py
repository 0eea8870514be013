"""What a restore costs on this device, with an 8B shape: `python -m ops.bench.kv_device`.

Random 4-bit weights, so that nothing has to be downloaded; times, not texts, are what it measures.
The tiers run in this process, the way the worker runs them.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false

from __future__ import annotations

import argparse
import queue
import random
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
from mlx_lm.models import qwen3
from mlx_lm.models.cache import make_prompt_cache

from ops.bench.files import forget_pages, read, write
from runtime.kv.cursor import CacheCursor
from runtime.kv.deletions import Deletions
from runtime.kv.parts import Caches
from runtime.kv.reader import Reader
from runtime.kv.state import KvState
from runtime.kv.tiers import Disk, Tiers, folders
from runtime.kv.writer import AllowedBytes, Writer
from runtime.kv_messages import Allowance, Ended, Trouble
from store.block_names import HashChain
from store.head_file import head_folder, read_head
from store.slots import BlockKey, Slots
from store.temp_names import SUFFIX

SLICE = 2048
SECRET, MODEL = b"s" * 32, b"m" * 32
CHAIN = HashChain(SECRET, MODEL)


class Figures(msgspec.Struct):
    """Seconds for one length; `read_*` is one reader reading the same files from start to end.

    `durable_s` is from the end of a turn, of which nothing is written yet, until all of it is on
    disk; `plain_s` is what one thread needs to write and sync files of the same sizes.
    """

    num_tokens: int
    kv_gb: float
    prefill_s: float
    prefill_with_writes_s: float
    written_s: float
    hot_s: float
    warm_s: float
    warm_uncached_s: float
    read_s: float
    read_uncached_s: float
    durable_s: float
    plain_s: float


class Shape:
    """A model of 36 layers with 8 KV heads of 128: 147 KB of KV per token in bfloat16."""

    kv_start = 0

    def __init__(self) -> None:
        self.stream = mx.default_stream(mx.default_device())
        arguments = qwen3.ModelArgs(
            model_type="qwen3",
            hidden_size=4096,
            num_hidden_layers=36,
            intermediate_size=12288,
            num_attention_heads=32,
            rms_norm_eps=1e-6,
            vocab_size=32768,
            num_key_value_heads=8,
            max_position_embeddings=65536,
            rope_theta=1e6,
            head_dim=128,
            tie_word_embeddings=True,
        )
        self.model = qwen3.Model(arguments)
        self.model.set_dtype(mx.bfloat16)
        nn.quantize(self.model, group_size=64, bits=4)
        mx.eval(self.model.parameters())

    def new_kv(self, num_tokens: int = 0) -> list[Any]:  # noqa: ARG002
        return make_prompt_cache(self.model)

    def prefill(self, token_ids: list[int], kv: list[Any]) -> float:
        start = time.perf_counter()
        self.model(mx.array(token_ids)[None], cache=kv)
        mx.eval([cache.state for cache in kv])
        return time.perf_counter() - start


class Store:
    """The server's part, as far as it is needed here: everything may be written, and staged heads
    are published at once.
    """

    def __init__(self, root: Path) -> None:
        self.slots_at, self.heads_at = folders(root)
        self.heads_at.mkdir(parents=True, exist_ok=True)
        self.inbox: queue.SimpleQueue[object] = queue.SimpleQueue()

    def writer(self) -> Writer:
        allowed = AllowedBytes(lambda _: None)
        allowed.hear(Allowance(num_bytes=1 << 50))
        slots, put = Slots(self.slots_at), self.inbox.put
        return Writer(slots, self.heads_at, 1 << 40, self._hear, put, allowed)

    def _hear(self, event: Ended | Trouble) -> None:
        assert isinstance(event, Ended), event
        staged = Path(event.path or "")
        names = CHAIN.block_hashes(read_head(staged).token_ids)
        folder = head_folder(self.heads_at, BlockKey(MODEL, names[-1]))
        folder.mkdir(parents=True, exist_ok=True)
        staged.rename(folder / f"{event.head_id}{SUFFIX}")

    def tiers(self, caches: Caches, writer: Writer | None = None) -> Tiers:
        """A worker's, which has nothing in memory; without a `writer` it only reads."""
        put = self.inbox.put
        reader = Reader(Slots(self.slots_at), self.heads_at, put, CHAIN.block_size)
        state = KvState.of(caches, CHAIN, 1 << 40)
        disk = Disk(reader, writer or self.writer(), SECRET)
        state.model_hash = MODEL
        return Tiers(state, disk, Deletions(), lambda _: None)

    def restore(self, tiers: Tiers, cursor: CacheCursor) -> list[Any]:
        """Fresh caches with all that is kept of a prompt."""
        tiers.begin(cursor)
        cursor.give_up_s = float("inf")
        self.wait(tiers, cursor)
        kv, num_tokens = tiers.restore(cursor)
        assert num_tokens == len(cursor.token_ids) - 1, cursor.use
        return kv

    def wait(self, tiers: Tiers, cursor: CacheCursor) -> None:
        """Until all that is on disk of a prompt was read."""
        while cursor.is_waiting:
            tiers.hear(self.inbox.get())

    def paths(self) -> list[Path]:
        return [*self.slots_at.glob("*/*"), *self.heads_at.glob("*/*/*")]


def measure(shape: Shape, num_tokens: int) -> Figures:
    """All figures for one length, in a directory of its own."""
    choose = random.Random(num_tokens)
    token_ids = [choose.randrange(32768) for _ in range(num_tokens)]
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder))
        prefill_s = _prefill(shape, store, None, _cursor(token_ids))
        writer = store.writer()
        tiers = store.tiers(shape, writer)
        thread = threading.Thread(target=writer.run)
        thread.start()
        start = time.perf_counter()
        with_writes_s = _prefill(shape, store, tiers, _cursor(token_ids))
        writer.close()
        thread.join()
        written_s = time.perf_counter() - start
        hot_s = min(_restore(tiers, store, token_ids) for _ in range(3))
        warm_s = min(_restore(store.tiers(shape), store, token_ids) for _ in range(3))
        read_s = min(read(store.paths(), buffer_bytes=8 << 20) for _ in range(3))
        forget_pages(store.paths())
        warm_uncached_s = _restore(store.tiers(shape), store, token_ids)
        forget_pages(store.paths())
        read_uncached_s = read(store.paths(), buffer_bytes=8 << 20)
        kv_bytes = sum(path.stat().st_size for path in store.paths())
    each = [_durable(shape, token_ids) for _ in range(3)]
    durable_s, plain_s = (min(column) for column in zip(*each, strict=True))
    return Figures(
        num_tokens=num_tokens,
        kv_gb=round(kv_bytes / 1e9, 3),
        prefill_s=round(prefill_s, 3),
        prefill_with_writes_s=round(with_writes_s, 3),
        written_s=round(written_s, 3),
        hot_s=round(hot_s, 3),
        warm_s=round(warm_s, 3),
        warm_uncached_s=round(warm_uncached_s, 3),
        read_s=round(read_s, 3),
        read_uncached_s=round(read_uncached_s, 3),
        durable_s=round(durable_s, 3),
        plain_s=round(plain_s, 3),
    )


def _durable(shape: Shape, token_ids: list[int]) -> tuple[float, float]:
    """Seconds until a turn is durable once it has ended, and for plain writes of as much."""
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder))
        writer = store.writer()
        _prefill(shape, store, store.tiers(shape, writer), _cursor(token_ids))
        start = time.perf_counter()
        writer.close()
        writer.run()
        durable_s = time.perf_counter() - start
        sizes = [path.stat().st_size for path in store.paths()]
    with tempfile.TemporaryDirectory() as folder:
        return durable_s, write(Path(folder), sizes, buffer_bytes=8 << 20)


def _cursor(token_ids: list[int]) -> CacheCursor:
    return CacheCursor(token_ids=token_ids)


def _prefill(shape: Shape, store: Store, tiers: Tiers | None, cursor: CacheCursor) -> float:
    """Seconds to compute a whole prompt in slices, and to keep it."""
    start = time.perf_counter()
    kv = shape.new_kv()
    if tiers is not None:
        tiers.begin(cursor)
        store.wait(tiers, cursor)
        kv, _ = tiers.restore(cursor)
    last = len(cursor.token_ids) - 1
    for begin in range(0, last, SLICE):
        end = min(begin + SLICE, last)
        seconds = shape.prefill([*cursor.token_ids[begin:end]], kv)
        if tiers is not None:
            tiers.on_prefill(cursor, kv, (begin, end), seconds)
    if tiers is not None:
        tiers.release(cursor)
    return time.perf_counter() - start


def _restore(tiers: Tiers, store: Store, token_ids: list[int]) -> float:
    """Seconds from the prompt to layer caches that hold all of it but its last token."""
    start = time.perf_counter()
    store.restore(tiers, _cursor(token_ids))
    return time.perf_counter() - start


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m ops.bench.kv_device", description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[10_240, 32_768])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    shape = Shape()
    warm_up = shape.new_kv()
    for _ in range(2):
        shape.prefill([1] * SLICE, warm_up)
    rows = [measure(shape, num_tokens) for num_tokens in arguments.tokens]
    report = {"device": str(mx.device_info().get("device_name", mx.default_device())), "rows": rows}
    text = msgspec.json.format(msgspec.json.encode(report)).decode()
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
