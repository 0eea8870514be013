"""What is restored is in memory once where there is no room for it twice, and byte for byte."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from runtime.kv.cursor import CacheCursor
from tests.kv_sessions import Session, ids

NUM_LAYERS = 24
NUM_TOKENS = 4096
RUN_TOKENS = 2048
ROOM_TOKENS = 512
"""The most that caches have room for behind such a prompt."""


class Caches:
    """Layer caches of a model that nobody computes."""

    kv_start = 0

    def __init__(self, kind: str) -> None:
        self.stream = mx.default_stream(mx.default_device())
        self._kind = kind

    def new_kv(self, num_tokens: int = 0) -> list[Any]:
        if self._kind == "8 bits":
            return [QuantizedKVCache(64, 8) for _ in range(NUM_LAYERS)]
        return [KVCache() for _ in range(NUM_LAYERS)]

    def extend(self, kv: list[Any], num_tokens: int) -> None:
        dtype = mx.bfloat16 if self._kind == "bfloat16" else mx.float32
        for cache in kv:
            both = (mx.random.normal((1, 2, num_tokens, 64)).astype(dtype) for _ in range(2))
            cache.update_and_fetch(*both)
        mx.eval([cache.state for cache in kv])


@pytest.fixture(params=["float32", "bfloat16", "8 bits"])
def caches(request: pytest.FixtureRequest) -> Caches:
    return Caches(request.param)


class Kept:
    """A prompt on disk, and its caches as they were computed."""

    def __init__(self, caches: Caches, root: Path) -> None:
        self.caches, self.root = caches, root
        self.token_ids = [*ids(1, NUM_TOKENS), 7]
        session = Session(caches, root, block_size=256)
        cursor = session.cursor(self.token_ids)
        self.kv, _ = session.take_up(cursor)
        for start in range(0, NUM_TOKENS, RUN_TOKENS):
            caches.extend(self.kv, RUN_TOKENS)
            session.tiers.on_prefill(cursor, self.kv, (start, start + RUN_TOKENS), 1.0)
        session.tiers.release(cursor)
        session.close()

    def read(self) -> tuple[Session, CacheCursor]:
        """In memory again, and about to be restored."""
        session = Session(self.caches, self.root, block_size=256)
        cursor = session.cursor(self.token_ids)
        session.tiers.begin(cursor)
        session.wait_for(cursor)
        return session, cursor


@pytest.fixture
def kept(caches: Caches, tmp_path: Path) -> Iterator[Kept]:
    yield Kept(caches, tmp_path)
    mx.clear_cache()


def arrays_of(kv: list[Any]) -> list[mx.array]:
    found: list[mx.array] = []
    for cache in kv:
        for one in (cache.keys, cache.values):
            found += [one] if isinstance(one, mx.array) else one
    return [array[:, :, :NUM_TOKENS] for array in found]


def is_same(one: list[Any], other: list[Any]) -> bool:
    pairs = zip(arrays_of(one), arrays_of(other), strict=True)
    return all(mx.array_equal(a.view(mx.uint8), b.view(mx.uint8)).item() for a, b in pairs)


def test_a_restore_without_room_for_two_has_one_copy_in_memory(kept: Kept):
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    session, cursor = kept.read()
    num_bytes = session.tiers.memory.num_bytes
    assert mx.get_peak_memory() - before <= 1.02 * num_bytes
    session.tiers.leave_beside_rows(0)
    kv, num_tokens = session.tiers.restore(cursor)
    room_bytes = num_bytes * ROOM_TOKENS // NUM_TOKENS
    assert num_tokens == NUM_TOKENS
    assert mx.get_peak_memory() - before <= 1.1 * num_bytes + room_bytes
    assert mx.get_cache_memory() <= 0.1 * num_bytes
    assert session.tiers.memory.num_bytes == 0
    assert is_same(kv, kept.kv)
    session.check()
    session.close()


def test_a_restore_with_room_leaves_what_it_read_to_others(kept: Kept):
    session, cursor = kept.read()
    num_bytes = session.tiers.memory.num_bytes
    kv, _ = session.tiers.restore(cursor)
    assert session.tiers.memory.num_bytes == num_bytes
    assert is_same(kv, kept.kv)
    session.close()


def test_only_as_much_leaves_memory_as_there_is_no_room_for(kept: Kept):
    session, cursor = kept.read()
    num_bytes = session.tiers.memory.num_bytes
    session.tiers.leave_beside_rows(num_bytes - 1)
    kv, _ = session.tiers.restore(cursor)
    assert session.tiers.memory.num_bytes == num_bytes - num_bytes * 256 // NUM_TOKENS
    assert is_same(kv, kept.kv)
    session.check()
    session.close()


def test_what_another_request_is_about_to_use_stays(kept: Kept):
    session, cursor = kept.read()
    num_bytes = session.tiers.memory.num_bytes
    other = session.cursor(kept.token_ids)
    session.tiers.begin(other)
    session.tiers.leave_beside_rows(0)
    kv, _ = session.tiers.restore(cursor)
    assert session.tiers.memory.num_bytes == num_bytes
    again, num_tokens = session.tiers.restore(other)
    assert num_tokens == NUM_TOKENS
    assert session.tiers.memory.num_bytes == 0
    assert is_same(kv, kept.kv)
    assert is_same(again, kept.kv)
    session.close()
