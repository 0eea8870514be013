"""`python -m ops.studies.slots`: slot files beside the machine's own speed, and what packing saves.

Reads come from the page cache, the fastest a file can be; each figure is the median of rounds in
which plain reading and verifying take turns. KV is that of `hearth-tiny` (as it is, and in BF16)
and of a model with random weights in BF16, for the text of this repository.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import argparse
import os
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import mlx.core as mx
import mlx.nn as nn
import msgspec
import zstandard
from mlx_lm.models import qwen3
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.utils import load_model
from tokenizers import Tokenizer

from runtime.embedded import HEARTH_TINY
from runtime.kv.reader import load
from store import slots
from store.cold import ColdDirectory
from store.cold_codec import split_planes
from store.disk import CHUNK_BYTES
from store.types import SlotHeader, TensorData

PREFILL_SLICE = 256
LEVELS = (1, 3)


class Packing(msgspec.Struct):
    """Packed size as a fraction of the KV, and MB of KV per second of one core, by method."""

    method: str
    ratio: float
    pack_mb_per_core_s: float


class Sample(msgspec.Struct):
    """One kind of KV."""

    kv: str
    num_tokens: int
    num_bytes: int
    packings: list[Packing]
    demote_mb_per_core_s: float
    promote_mb_per_core_s: float
    cold_ratio: float


class Reading(msgspec.Struct):
    """GB/s from the page cache; `ratio` is verifying against plain reading, both sequential."""

    num_bytes: int
    stage_gb_per_s: float
    plain_gb_per_s: float
    verify_gb_per_s: float
    ratio: float


class Loading(msgspec.Struct):
    """Milliseconds from a file in the page cache to memory of its own, with this machine's pages.

    `checked` loads and compares what is in memory then, as restoring does, all of it beside the
    thread that computes. `verified` reads and compares first and loads then, of which
    `verified_blocking` was that thread's. `kept` is a plain read by one thread, without a check.
    """

    num_bytes: int
    checked_ms: float
    verified_ms: float
    verified_blocking_ms: float
    kept_ms: float


def load_unchecked(path: Path) -> None:
    """Have the arrays in memory, whatever is in them."""
    mx.eval(list(cast("dict[str, mx.array]", mx.load(str(path))).values()))


def timed(call: Callable[[], object]) -> float:
    """Seconds that `call` takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def core_seconds(call: Callable[[], object]) -> float:
    """Seconds of a core that `call` takes, whoever else is busy."""
    start = time.process_time()
    call()
    return time.process_time() - start


def tensors_of(model: nn.Module, token_ids: list[int]) -> list[TensorData]:
    """The KV of these tokens, token-major, as slots hold it."""
    caches: list[KVCache] = make_prompt_cache(model)
    for start in range(0, len(token_ids), PREFILL_SLICE):
        model(mx.array(token_ids[start : start + PREFILL_SLICE])[None], cache=caches)
        mx.eval([cache.keys for cache in caches])
    tensors: list[TensorData] = []
    for layer, cache in enumerate(caches):
        for name, whole in (("keys", cache.keys), ("values", cache.values)):
            assert whole is not None
            rows = mx.contiguous(whole[0, :, : len(token_ids)].transpose(1, 0, 2))
            is_bf16 = rows.dtype == mx.bfloat16
            host = memoryview(cast("bytes", rows.view(mx.uint16) if is_bf16 else rows))
            dtype = "BF16" if is_bf16 else "F32"
            tensors.append(TensorData(f"{layer}.{name}", dtype, tuple(rows.shape), host))
    return tensors


def random_model() -> nn.Module:
    """A dense model with random weights in BF16."""
    mx.random.seed(0)
    arguments = qwen3.ModelArgs(
        model_type="qwen3",
        hidden_size=512,
        num_hidden_layers=8,
        intermediate_size=1024,
        num_attention_heads=8,
        rms_norm_eps=1e-6,
        vocab_size=8192,
        num_key_value_heads=4,
        max_position_embeddings=8192,
        rope_theta=1e6,
        head_dim=128,
        tie_word_embeddings=True,
    )
    model = qwen3.Model(arguments)
    model.set_dtype(mx.bfloat16)
    return model


def staged(root: Path, num_tokens: int, tensors: Sequence[TensorData]) -> slots.StagedSlot:
    header = SlotHeader(
        id=secrets.token_hex(16),
        model=bytes(32),
        start_hash=b"",
        start=0,
        end=num_tokens,
        block_size=256,
        block_hashes=(),
        end_hash=bytes(16),
        layout="",
        has_state=False,
        recompute_ms=0.0,
        created_s=0.0,
    )
    return slots.stage(root, header, range(num_tokens), tensors)


def packed_bytes(chunks: Sequence[Sequence[bytes]], level: int) -> int:
    """What one zstd stream of these planes takes, each plane in blocks of its own."""
    size = sum(len(plane) for planes in chunks for plane in planes)
    stream = zstandard.ZstdCompressor(level=level).chunker(size, CHUNK_BYTES)
    num_packed = 0
    for planes in chunks:
        for plane in planes:
            num_packed += sum(len(one) for one in stream.compress(plane))
            num_packed += sum(len(one) for one in stream.flush())
    return num_packed + sum(len(one) for one in stream.finish())


def packings_of(tensors: Sequence[TensorData]) -> list[Packing]:
    """Every method on the same bytes: zstd alone, and zstd after splitting planes."""
    payload = [bytes(one.data.cast("B")) for one in tensors]
    num_bytes = sum(map(len, payload))
    width = 2 if tensors[0].dtype == "BF16" else 4
    chunks = [
        one[at : at + CHUNK_BYTES] for one in payload for at in range(0, len(one), CHUNK_BYTES)
    ]
    results: list[Packing] = []
    for level in LEVELS:
        for method, item_bytes in (("zstd", 1), ("planes + zstd", width)):
            start = time.process_time()
            size = packed_bytes([split_planes(chunk, item_bytes) for chunk in chunks], level)
            rate = num_bytes / 1e6 / (time.process_time() - start)
            results.append(Packing(f"{method} {level}", round(size / num_bytes, 3), round(rate)))
    return results


def measure_kv(root: Path, kv: str, tensors: Sequence[TensorData]) -> Sample:
    """What packing makes of this KV, and how fast the cold store takes and gives it."""
    num_tokens = tensors[0].shape[0]
    slot = staged(root, num_tokens, tensors)
    path = slots.publish(slot)
    cold = ColdDirectory(root / "cold")
    cold.demote(path)
    demote_s = core_seconds(lambda: cold.demote(path))
    promote_s = core_seconds(lambda: cold.promote(root, slot.id))
    packed = next((root / "cold").rglob(f"{slot.id}*"))
    return Sample(
        kv=kv,
        num_tokens=num_tokens,
        num_bytes=slot.num_bytes,
        packings=packings_of(tensors),
        demote_mb_per_core_s=round(slot.num_bytes / 1e6 / demote_s),
        promote_mb_per_core_s=round(slot.num_bytes / 1e6 / promote_s),
        cold_ratio=round(packed.stat().st_size / slot.num_bytes, 3),
    )


def read_plainly(path: Path) -> None:
    """The same bytes in the same order through one buffer, and nothing else."""
    buffer = memoryview(bytearray(CHUNK_BYTES))
    fd = os.open(path, os.O_RDONLY)
    position = 0
    while num_read := os.preadv(fd, [buffer], position):
        position += num_read
    os.close(fd)


def measure_reading(root: Path, rounds: int) -> tuple[Reading, Loading]:
    """One slot of 2,048 tokens in the shape of an 8B model: 36 layers, 8 KV heads of 128, BF16."""
    rows = memoryview(os.urandom(2048 * 8 * 128 * 2))
    names = [f"{layer}.{one}" for layer in range(36) for one in ("keys", "values")]
    tensors = [TensorData(name, "BF16", (2048, 8, 128), rows) for name in names]
    start = time.perf_counter()
    slot = staged(root, 2048, tensors)
    stage_s = time.perf_counter() - start
    plain: list[float] = []
    verified: list[float] = []
    for _ in range(rounds):
        plain.append(timed(lambda: read_plainly(slot.path)))
        verified.append(timed(lambda: slots.verify(slot.path)))
    ratios = [one / other for one, other in zip(plain, verified, strict=True)]
    gigabytes = slot.num_bytes / 1e9
    reading = Reading(
        num_bytes=slot.num_bytes,
        stage_gb_per_s=round(gigabytes / stage_s, 2),
        plain_gb_per_s=round(gigabytes / statistics.median(plain), 2),
        verify_gb_per_s=round(gigabytes / statistics.median(verified), 2),
        ratio=round(statistics.median(ratios), 3),
    )
    return reading, measure_loading(slots.publish(slot), rounds)


def read_and_keep(path: Path) -> bytearray:
    """The same bytes in new memory."""
    kept = bytearray(path.stat().st_size)
    with path.open("rb", buffering=0) as file:
        file.readinto(kept)
    return kept


def measure_loading(path: Path, rounds: int) -> Loading:
    """All ways in turn, from the same file."""
    calls: tuple[Callable[[], object], ...] = (
        lambda: load(path),
        lambda: slots.verify(path),
        lambda: load_unchecked(path),
        lambda: read_and_keep(path),
    )
    times = [[timed(call) * 1000 for call in calls] for _ in range(rounds)]
    checked, verify, unchecked, kept = map(statistics.median, zip(*times, strict=True))
    return Loading(
        num_bytes=path.stat().st_size,
        checked_ms=round(checked, 2),
        verified_ms=round(verify + unchecked, 2),
        verified_blocking_ms=round(unchecked, 2),
        kept_ms=round(kept, 2),
    )


class Report(msgspec.Struct):
    reading: Reading
    loading: Loading
    samples: list[Sample]


def measure(root: Path, num_tokens: int, rounds: int) -> Report:
    """The whole report, with files below `root`."""
    text = "\n".join(path.read_text() for path in sorted(Path("store").glob("*.py")))
    ids = Tokenizer.from_file(str(HEARTH_TINY / "tokenizer.json")).encode(text).ids[:num_tokens]
    tiny, _ = load_model(HEARTH_TINY)
    samples = [measure_kv(root, "hearth-tiny F32", tensors_of(tiny, ids))]
    tiny.set_dtype(mx.bfloat16)
    samples.append(measure_kv(root, "hearth-tiny BF16", tensors_of(tiny, ids)))
    samples.append(measure_kv(root, "random BF16", tensors_of(random_model(), ids)))
    return Report(*measure_reading(root, rounds), samples)


def main() -> None:
    """Parse the command line, run, print JSON."""
    parser = argparse.ArgumentParser(prog="python -m ops.studies.slots", description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        report = measure(Path(folder), arguments.tokens, arguments.rounds)
    print(msgspec.json.format(msgspec.json.encode(report)).decode())


if __name__ == "__main__":
    main()
