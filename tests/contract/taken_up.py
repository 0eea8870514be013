"""`python -m tests.contract.taken_up DIR`: a process with nothing but files of mlx-vlm's caches.

It goes on from each and writes digests of what the layers then see.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlx_vlm.models.cache import (
    ArraysCache,
    BufferedRotatingKVCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    PoolingCache,
    QuantizedKVCache,
    RotatingKVCache,
    SimpleKVCache,
    StaticPrefixKVCache,
)

from runtime.kv import layers
from tests.layer_samples import WINDOW, Make, assemble, feed, loaded, raw

SLICEABLE: dict[str, Make] = {
    "kv": lambda: [KVCache(), KVCache()],
    "concatenate": lambda: [ConcatenateKVCache()],
    "quantized 4": lambda: [QuantizedKVCache(group_size=32, bits=4)],
    "list of kv": lambda: [CacheList(KVCache(), KVCache()), KVCache()],
}
MAKERS: dict[str, Make] = SLICEABLE | {
    "rotating": lambda: [RotatingKVCache(WINDOW), KVCache()],
    "rotating that keeps": lambda: [RotatingKVCache(WINDOW, keep=4)],
    "buffered": lambda: [BufferedRotatingKVCache(WINDOW, buffer_size=4), KVCache()],
    "chunked": lambda: [ChunkedKVCache(WINDOW), KVCache()],
    "arrays": lambda: [ArraysCache(2), KVCache()],
    "list of both": lambda: [CacheList(ArraysCache(2), KVCache()), RotatingKVCache(WINDOW)],
    "pooling": lambda: [PoolingCache(4), KVCache()],
    "simple": lambda: [SimpleKVCache(), KVCache()],
    "static": lambda: [StaticPrefixKVCache(WINDOW), KVCache()],
}
ENDS = ((WINDOW - 5, 40), (WINDOW, 7), (3 * WINDOW + 2, 1), (3 * WINDOW + 2, 20))
"""Where a cache was left, and in slices of how many tokens it had come there."""


def future_digest(kv: Sequence[Any], at: int) -> str:
    """What the layers see of a long slice, of single tokens and of another slice."""
    hasher = hashlib.blake2b(digest_size=16)
    spans = [(at, at + 19), *((at + 19 + i, at + 20 + i) for i in range(20)), (at + 39, at + 45)]
    for start, end in spans:
        for dtype, shape, data in raw(feed(kv, start, end)):
            hasher.update(f"{dtype}{shape}".encode() + data)
    return hasher.hexdigest()


def main(folder: Path) -> None:
    found: dict[str, str] = {}
    for case in sorted(path for path in folder.iterdir() if path.is_dir()):
        name, end, _ = case.name.rsplit(" ", 2)
        (file,) = case.rglob("*.safetensors")
        run = loaded(file, layers.layout_of(MAKERS[name]()), int(end))
        found[case.name] = future_digest(assemble(MAKERS[name], [run]), int(end))
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
