"""Never wrong: whatever happens to conversations, what is taken up is what was computed for them.

Nothing here is a model: the KV of a token is a hash of all tokens up to it, in real layer caches,
so a single wrong row or state shows. Seeds decide what happens; each names its failure.
"""

from __future__ import annotations

import itertools
import random
import shutil
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from runtime.kv.cursor import CacheCursor
from runtime.kv_messages import HotBudget
from store.types import class_of
from tests.kv_sessions import Session

WINDOW, HEADS = 8, 2
ROOT = b"nothing yet"


@dataclass
class Hashing:
    """Layer caches, and what fills them."""

    is_hybrid: bool
    kv_start: int = 0
    stream: mx.Stream = field(default_factory=lambda: mx.default_stream(mx.cpu))

    def new_kv(self, num_tokens: int = 0) -> list[Any]:
        if not self.is_hybrid:
            return [KVCache(), CacheList(KVCache(), KVCache())]
        return [KVCache(), CacheList(ArraysCache(1), KVCache()), RotatingKVCache(WINDOW)]

    def compute(self, kv: list[Any], ids: Sequence[int], start: int, end: int) -> None:
        for leaf in leaves(kv):
            if isinstance(leaf, ArraysCache):
                leaf[0] = rows(ids, end - 1, end)
            else:
                leaf.update_and_fetch(rows(ids, start, end), rows(ids, start, end))
        mx.eval([cache.state for cache in kv])

    def check(self, kv: list[Any], ids: Sequence[int], num_tokens: int) -> None:
        """These caches hold exactly the first tokens."""
        for leaf in leaves(kv):
            if not num_tokens:
                assert leaf.empty()
            elif isinstance(leaf, ArraysCache):
                assert mx.array_equal(leaf[0], rows(ids, num_tokens - 1, num_tokens))
            else:
                assert leaf.offset == num_tokens
                start, held = 0, (leaf.keys, leaf.values)
                if isinstance(leaf, RotatingKVCache):
                    start = max(0, num_tokens - WINDOW)
                    held = tuple(leaf._temporal_order(one) for one in held)
                for one in held:
                    end = num_tokens if isinstance(leaf, KVCache) else one.shape[2]
                    first = 0 if isinstance(leaf, KVCache) else end - (num_tokens - start)
                    assert mx.array_equal(one[..., first:end, :], rows(ids, start, num_tokens))


def leaves(kv: list[Any]) -> list[Any]:
    return [leaf for one in kv for leaf in (one.caches if isinstance(one, CacheList) else [one])]


@lru_cache(maxsize=100_000)
def digest(ids: tuple[int, ...]) -> bytes:
    parent = digest(ids[:-1]) if ids else ROOT
    return blake2b(parent + array("I", ids[-1:]).tobytes(), digest_size=16).digest()


def rows(ids: Sequence[int], start: int, end: int) -> mx.array:
    """`[1, heads, tokens, 4]`."""
    for length in range(0, start, 200):
        digest(tuple(ids[:length]))
    data = array("I", b"".join(digest(tuple(ids[: i + 1])) for i in range(start, end)))
    one = mx.array(data.tolist(), mx.uint32).reshape(1, 1, end - start, 4)
    return mx.concatenate([one + head for head in range(HEADS)], axis=1)


@dataclass
class Asked:
    """A request on its way: waiting, then computing."""

    cursor: CacheCursor
    output: list[int]
    kv: list[Any] | None = None
    num_computed: int = 0


class Replay:
    """Requests, evictions, deletions, damage and restarts as a seed decides."""

    def __init__(self, seed: int, home: Path) -> None:
        self.dice = random.Random(seed)
        self.roots = (home / str(number) for number in itertools.count())
        self.root = next(self.roots)
        self.model = Hashing(is_hybrid=seed % 2 == 1)
        self.said: list[list[int]] = [[]]
        self.asked: list[Asked] = []
        self.num_reused = self.num_restored_bytes = 0
        self.session = self.start()

    def start(self) -> Session:
        hot_bytes = self.dice.choice([1, 20_000, 100_000, 1 << 30])
        return Session(self.model, self.root, hot_bytes=hot_bytes, block_size=4)

    def step(self) -> None:
        chosen = self.dice.choices(
            [self.ask, self.advance, self.hear, self.lose, self.spoil, self.restart],
            weights=[20, 60, 8, 3, 1, 2],
        )[0]
        chosen()
        self.session.check()

    def ask(self) -> None:
        dice = self.dice
        if len(self.asked) == 4:
            return
        old = dice.choice(self.said[-30:])
        kept = len(old) if dice.random() < 0.6 else dice.randint(0, len(old))
        prompt = [*old[:kept][:250], *dice.choices(range(3), k=dice.randint(1, 30))]
        num = len(prompt)
        cursor = self.session.cursor(
            prompt,
            session=str(dice.randint(0, 9)),
            mode=dice.choices(["full", "prefix", "off"], weights=[8, 1, 1])[0],
            prefix_end=dice.randint(0, num - 1),
        )
        cursor.boundaries = (max(1, cursor.prefix_end), *([num - 1] if num > 1 else []))
        inner = dice.sample(range(1, num), k=min(num - 1, dice.randint(0, 10)))
        cursor.boundaries = tuple(sorted({*cursor.boundaries, *inner}))
        if dice.random() < 0.1:
            cursor.ttl_s, cursor.ttl_class = 0.0, class_of(0.0)
        self.session.tiers.begin(cursor)
        self.asked.append(Asked(cursor, dice.choices(range(3), k=dice.randint(1, 12))))

    def advance(self) -> None:
        if not self.asked:
            return
        one = self.dice.choice(self.asked)
        if one.cursor.is_waiting:
            self.wait(one)
        elif self.dice.random() < 0.03:
            self.session.tiers.release(one.cursor)
            self.asked.remove(one)
        elif one.kv is None:
            one.kv, one.num_computed = self.session.tiers.restore(one.cursor)
            self.model.check(one.kv, one.cursor.token_ids, one.num_computed)
            self.num_reused += one.num_computed
        else:
            self.compute(one)

    def wait(self, one: Asked) -> None:
        if self.dice.random() < 0.1:
            self.session.tiers.give_up(one.cursor)
        else:
            self.session.hear()

    def hear(self) -> None:
        """All that is queued is written, and heads are published."""
        self.session.settle()

    def compute(self, one: Asked) -> None:
        ids, start = one.cursor.token_ids, one.num_computed
        assert one.kv is not None
        last = len(ids) - 1
        end = min([start + 32, last, *(b for b in one.cursor.boundaries if start < b < last)])
        if end > start:
            self.model.compute(one.kv, ids, start, end)
            one.num_computed = end
        self.session.tiers.on_prefill(one.cursor, one.kv, (start, end), 1.0 * (end - start))
        if end == last:
            whole = [*ids, *one.output]
            for at in range(last, len(whole)):
                self.model.compute(one.kv, whole, at, at + 1)
            self.session.tiers.on_finished(one.cursor, one.output, one.kv)
            self.session.tiers.release(one.cursor)
            self.said.append(whole)
            self.asked.remove(one)

    def files(self) -> list[Path]:
        """Those that are whole, unless something may be about to be read."""
        if any(one.cursor.is_waiting for one in self.asked):
            return []
        return sorted(self.root.rglob("[!.]*.safetensors"))

    def lose(self) -> None:
        """A file leaves, or all of what is in memory."""
        if files := self.files():
            self.dice.choice(files).unlink(missing_ok=True)
        if self.dice.random() < 0.2:
            budget = self.session.tiers.memory.budget_bytes
            for num_bytes in (0, budget):
                self.session.tiers.hear(HotBudget(num_bytes=num_bytes))

    def spoil(self) -> None:
        """A bit of a file flips."""
        self.session.settle()
        if files := self.files():
            path = self.dice.choice(files)
            data = bytearray(path.read_bytes())
            data[self.dice.randrange(len(data))] ^= 1 << self.dice.randrange(8)
            path.write_bytes(data)

    def restart(self) -> None:
        """A stop, or a kill."""
        if self.dice.random() < 0.3:
            self.session.settle()
            before, self.root = self.root, next(self.roots)
            shutil.copytree(before, self.root)
        self.end()
        self.session = self.start()

    def end(self) -> None:
        for one in self.asked:
            self.session.tiers.release(one.cursor)
        self.asked.clear()
        self.num_restored_bytes += self.session.tiers.counts.num_restored_bytes
        self.session.close()


def replay(seed: int, root: Path, num_steps: int) -> Replay:
    one = Replay(seed, root)
    for _ in range(num_steps):
        one.step()
    one.end()
    return one


@pytest.mark.parametrize("seed", range(8))
def test_what_is_taken_up_is_what_was_computed(seed: int, tmp_path: Path):
    one = replay(seed, tmp_path, 400)
    assert one.num_reused > 0
    assert one.num_restored_bytes > 0


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 120))
def test_what_is_taken_up_is_what_was_computed_for_long(seed: int, tmp_path: Path):
    replay(seed, tmp_path, 4000)
