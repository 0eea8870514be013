"""Idle caches: the layer caches of sequences that ended, for whoever goes on from one of them.

An idle cache only spares putting KV together again from its pieces, which takes the longer the more
tokens there are. It lies in memory that neither running requests nor the hot tier want, and goes as
soon as they do, or when a piece of it is dropped or evicted. Belongs to the mlx thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.kv import layers
from store.block_names import num_common

MAX_IDLE_CACHES = 64


@dataclass(eq=False, slots=True)
class IdleCache:
    """Layer caches that hold these tokens, and room behind them; `names` are of its pieces."""

    root: bytes
    token_ids: array[int]
    names: frozenset[bytes]
    kv: list[Any]
    num_bytes: int

    def begins_with(self, root: bytes, token_ids: Sequence[int]) -> bool:
        """These tokens are its first ones."""
        return self.root == root and num_common(self.token_ids, token_ids) == len(token_ids)

    def is_before(self, other: IdleCache) -> bool:
        """A sequence goes on from all of it: nobody will want less."""
        return other.begins_with(self.root, self.token_ids)


class IdleCaches:
    """Those of one model, the one that ended last at the end."""

    def __init__(self) -> None:
        self._all: list[IdleCache] = []
        self._wanted: IdleCache | None = None

    def __len__(self) -> int:
        return len(self._all)

    @property
    def num_bytes(self) -> int:
        """What they take together."""
        return sum(one.num_bytes for one in self._all)

    def keep(
        self, root: bytes, token_ids: array[int], names: Collection[bytes], kv: list[Any]
    ) -> None:
        """Take the caches of a sequence that ended; nobody else may change them from now on.

        They are let go at once where another sequence has a part in their arrays, or where what is
        behind some number of tokens could not be forgotten.
        """
        if len(token_ids) and layers.can_go_on(kv):
            one = IdleCache(root, token_ids, frozenset(names), kv, layers.num_bytes(kv))
            self._all = [each for each in self._all if not each.is_before(one)]
            self._all.append(one)
            del self._all[:-MAX_IDLE_CACHES]

    def want(self, root: bytes, token_ids: Sequence[int]) -> None:
        """What follows these tokens is taken up next, in the memory that it has already."""
        found = (one for one in reversed(self._all) if one.begins_with(root, token_ids))
        self._wanted = next(found, None) if len(token_ids) else None

    def take(self, root: bytes, token_ids: Sequence[int]) -> list[Any] | None:
        """Caches with these tokens and no others, if there are some; they are gone."""
        self._wanted = None
        if not len(token_ids):
            return None
        found = (one for one in reversed(self._all) if one.begins_with(root, token_ids))
        taken = next(found, None)
        if taken is None:
            return None
        self._all.remove(taken)
        layers.shorten(taken.kv, len(token_ids))
        return taken.kv

    def fit(self, num_bytes: int) -> None:
        """There is so much memory for them, beside that of the one that is wanted."""
        if self._wanted is not None:
            num_bytes += self._wanted.num_bytes
        for one in [each for each in self._all if each is not self._wanted]:
            if self.num_bytes <= num_bytes:
                return
            self._all.remove(one)

    def let_go(self, names: Collection[bytes]) -> None:
        """Forget those of which a piece has gone."""
        self._all = [one for one in self._all if one.names.isdisjoint(names)]
        if self._wanted not in self._all:
            self._wanted = None
