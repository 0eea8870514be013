"""The most memory that a restore takes: `python -m ops.bench.restore_memory`.

Each case is a process of its own that knows slots on disk and nothing else. It reads them and
fills layer caches, as the worker does: once with memory for a second copy in the hot tier, and
once where a request and its KV are all that there is memory for. Figures are mlx's own and the
system's high-water mark of the process. No model computes: what is in the caches is random.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import threading
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from ops.bench.kv_device import Store
from runtime.kv.cursor import CacheCursor

_HEADS, _DIM, _SLICE = 4, 64, 2048
KINDS = ("float32", "bfloat16", "8 bits")


class Case(msgspec.Struct, frozen=True):
    """What is restored. With `is_short` there is no memory for a hot tier beside the request."""

    kind: str
    num_layers: int
    num_tokens: int
    is_short: bool = False


class Figures(msgspec.Struct):
    """`kv_bytes` were restored, and the rest is in multiples of them: the most that mlx had until
    all was read, and until the caches were filled; the growth of the process; the caches alone,
    the room behind their tokens included. `promoted_bytes` is what unpacking cold slots took.
    """

    kv_bytes: int
    read: float
    restored: float
    process: float
    live: float


class Layers:
    """Empty caches of one kind."""

    kv_start = 0

    def __init__(self, case: Case) -> None:
        self.stream = mx.default_stream(mx.default_device())
        self._case = case

    def new_kv(self, num_tokens: int = 0) -> list[Any]:  # noqa: ARG002
        if self._case.kind == "8 bits":
            return [QuantizedKVCache(64, 8) for _ in range(self._case.num_layers)]
        return [KVCache() for _ in range(self._case.num_layers)]

    def extend(self, kv: list[Any], num_tokens: int) -> None:
        """Give each cache so many more tokens, of random keys and values."""
        dtype = mx.float32 if self._case.kind == "float32" else mx.bfloat16
        for cache in kv:
            shape = (1, _HEADS, num_tokens, _DIM)
            cache.update_and_fetch(*(mx.random.normal(shape).astype(dtype) for _ in range(2)))
        mx.eval([cache.state for cache in kv])


def _cursor(case: Case) -> CacheCursor:
    return CacheCursor(token_ids=[number % 30_000 for number in range(case.num_tokens + 1)])


def write(case: Case, root: Path) -> None:
    """Write the slots and the head of a prompt."""
    layers, store, cursor = Layers(case), Store(root), _cursor(case)
    writer = store.writer()
    thread = threading.Thread(target=writer.run)
    thread.start()
    tiers = store.tiers(layers, writer)
    tiers.begin(cursor)
    store.wait(tiers, cursor)
    kv, _ = tiers.restore(cursor)
    for start in range(0, case.num_tokens, _SLICE):
        end = min(start + _SLICE, case.num_tokens)
        layers.extend(kv, end - start)
        tiers.on_prefill(cursor, kv, (start, end), 1.0)
    tiers.release(cursor)
    writer.close()
    thread.join()


def restore(case: Case, root: Path) -> Figures:
    """In a process that has done nothing yet."""
    store, layers, cursor = Store(root), Layers(case), _cursor(case)
    mx.eval(mx.zeros(1))
    before = _process_bytes()
    tiers = store.tiers(layers)
    mx.reset_peak_memory()
    active = mx.get_active_memory()
    tiers.begin(cursor)
    cursor.give_up_s = float("inf")
    store.wait(tiers, cursor)
    read, kv_bytes = mx.get_peak_memory() - active, tiers.num_bytes
    if case.is_short:
        tiers.leave_beside_rows(0)
    kv, num_tokens = tiers.restore(cursor)
    assert num_tokens == case.num_tokens, cursor.use
    live = sum(array.nbytes for array in _arrays([(cache.keys, cache.values) for cache in kv]))
    restored, process = mx.get_peak_memory() - active, _process_bytes() - before
    return Figures(
        kv_bytes=kv_bytes,
        read=round(read / kv_bytes, 3),
        restored=round(restored / kv_bytes, 3),
        process=round(process / kv_bytes, 3),
        live=round(live / kv_bytes, 3),
    )


def _arrays(state: Any) -> list[mx.array]:
    if isinstance(state, mx.array):
        return [state]
    return [array for one in state for array in _arrays(one)]


def _process_bytes() -> int:
    """The most that this process ever had in memory."""
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024


def _in_a_process(*arguments: str) -> bytes:
    command = [sys.executable, "-m", "ops.bench.restore_memory", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout


def measure(case: Case) -> Figures:
    """Write in one process, restore in another."""
    with tempfile.TemporaryDirectory() as folder:
        said = msgspec.json.encode(case).decode()
        _in_a_process("--write", said, folder)
        return msgspec.json.decode(_in_a_process("--restore", said, folder), type=Figures)


def cases() -> list[Case]:
    kinds = [Case(kind, 32, tokens) for kind in KINDS for tokens in (2048, 8192)]
    kinds += [Case("bfloat16", 8, 8192)]
    return [
        msgspec.structs.replace(one, is_short=short) for one in kinds for short in (False, True)
    ]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m ops.bench.restore_memory", description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--restore", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if (one := arguments.write or arguments.restore) is not None:
        case, root = msgspec.json.decode(one[0], type=Case), Path(one[1])
        if arguments.write is not None:
            write(case, root)
        else:
            sys.stdout.buffer.write(msgspec.json.encode(restore(case, root)))
        return
    rows: list[tuple[Case, Figures]] = []
    for case in cases():
        rows.append((case, measure(case)))
        print(msgspec.json.encode(rows[-1]).decode(), flush=True)
    if arguments.json is not None:
        device = str(mx.device_info().get("device_name", mx.default_device()))
        report: dict[str, object] = {"device": device, "mlx": version("mlx"), "rows": rows}
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")


if __name__ == "__main__":
    main()
