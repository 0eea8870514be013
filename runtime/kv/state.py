"""What finding, keeping and writing share: the pieces in memory, the model's layers, rates."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from runtime.kv.block_memory import BlockMemory, Piece
from runtime.kv.cursor import CacheCursor
from runtime.kv.idle_cache import IdleCaches
from runtime.kv.pack import RunKv, Slab
from runtime.kv.parts import Caches, Parts
from runtime.kv.rates import Rates
from runtime.types import MissReason
from runtime.wire import KvCounts
from store.block_names import HashChain

_MAX_MISSED = 200_000


@dataclass(slots=True)
class KvState:
    """State of one model's KV; everything in it belongs to the mlx thread."""

    model: Caches
    memory: BlockMemory[RunKv]
    parts: Parts
    model_hash: bytes = b""
    unsupported: str | None = None
    """The class of a layer cache, or kind of model, that nobody has shown can be kept."""
    keeps_pictures: bool = True
    """KV of prompts with pictures is kept as well."""
    rates: Rates = field(default_factory=Rates)
    counts: KvCounts = field(default_factory=KvCounts)
    idle_caches: IdleCaches = field(default_factory=IdleCaches)
    max_hot_bytes: int = 0
    left_bytes: int | None = None
    """What running requests leave to pieces of the memory for both; None: enough."""
    missed: OrderedDict[bytes, MissReason] = field(
        default_factory=OrderedDict["bytes", "MissReason"]
    )
    """Why pieces that were here are here no longer, by their names."""
    tenants: set[str] = field(default_factory=lambda: {""})

    @staticmethod
    def of(model: Caches, chain: HashChain, hot_bytes: int, parts: Parts | None = None) -> KvState:
        """Nothing known yet; without `parts` this process has all of the model."""
        parts = parts or Parts(model)
        memory = BlockMemory[RunKv](chain, hot_bytes, needs_state=parts.needs_state)
        return KvState(model, memory, parts, unsupported=parts.unsupported, max_hot_bytes=hot_bytes)

    @property
    def chain(self) -> HashChain:
        return self.memory.chain

    @property
    def needs_state(self) -> bool:
        """KV can be taken up at boundaries only."""
        return self.parts.needs_state

    def name(self, cursor: CacheCursor) -> None:
        """Give a request its names."""
        self.tenants.add(cursor.tenant)
        cursor.rename(self.chain)

    def rename(self, chain: HashChain, model_hash: bytes) -> None:
        """Have everything in memory bear the names of another chain."""
        old = self.chain
        roots = {(old.root_of(one) or old.root): one for one in self.tenants}

        def root_of(root: bytes) -> bytes | None:
            tenant = roots.get(root)
            return None if tenant is None else chain.root_of(tenant) or chain.root

        self.idle_caches.let_go({piece.name for piece in self.memory})
        self.memory.rename(chain, root_of)
        self.missed.clear()
        self.model_hash = model_hash

    def pin(self, cursor: CacheCursor, pieces: Iterable[Piece[RunKv]]) -> None:
        """Have these in memory until the cursor is released."""
        for piece in pieces:
            if piece not in cursor.holds:
                cursor.holds[piece] = None
                piece.num_readers += 1

    def release(self, cursor: CacheCursor) -> None:
        """A cursor needs nothing any longer, and waits for nothing."""
        cursor.awaits.clear()
        for piece in cursor.holds:
            piece.num_readers -= 1
        cursor.holds.clear()
        self.shrink()

    def drop(self, names: Collection[bytes]) -> int:
        """Have nothing of these pieces, which were deleted, nor what is behind them; how many."""
        gone = self.memory.drop(names)
        waiting = list(names)
        while waiting:
            behind = self.memory.drop([one.name for one in self.memory.behind(waiting.pop())])
            waiting += [one.name for one in behind]
            gone += behind
        self._remember([*names, *(one.name for one in gone)], "deleted")
        self.idle_caches.let_go({*names, *(one.name for one in gone)})
        self.leave_slabs(gone)
        return len(gone)

    def set_budget(self, num_bytes: int) -> None:
        """Pieces may have so much at the most."""
        self.max_hot_bytes = num_bytes
        self.leave_beside_rows(self.left_bytes)

    def leave_beside_rows(
        self, num_bytes: int | None, following: CacheCursor | None = None
    ) -> None:
        """So much is left beside running requests; None: enough.

        `following` is taken up next: the idle cache of it is among what requests have.
        """
        if following is None:
            self.idle_caches.want(b"", ())
        else:
            num_found = sum(map(len, following.holds))
            self.idle_caches.want(following.root, array("I", following.token_ids[:num_found]))
        self.left_bytes, most_bytes = num_bytes, self.max_hot_bytes
        budget_bytes = most_bytes if num_bytes is None else min(most_bytes, num_bytes)
        if budget_bytes == self.memory.budget_bytes:
            self.fit_idle_caches()
            return
        is_less = budget_bytes < self.memory.num_bytes
        self.memory.budget_bytes = budget_bytes
        self.shrink()
        if is_less:
            self.parts.give_back()

    def shrink(self) -> None:
        """Keep the budget of pieces, and remember what is missed for it."""
        gone = self.memory.shrink()
        if gone:
            self._remember([one.name for one in gone if not one.is_written], "evicted")
            self.idle_caches.let_go({one.name for one in gone if not one.is_written})
            self.leave_slabs(gone)
        self.fit_idle_caches()

    def leave_slabs(self, gone: Iterable[Piece[RunKv]]) -> None:
        """These left memory: what stays of their slabs no longer keeps their KV there."""
        self.divide_slabs(one.kv.slab for one in gone)

    def divide_slabs(self, slabs: Iterable[Slab | None]) -> None:
        """Where not all blocks of a slab are in memory, those that are have arrays of their own."""
        for slab in {*slabs}:
            pieces = [one for one in slab.pieces if one.kv.slab is slab] if slab else []
            there = [one for one in pieces if self.memory.get(one.name) is one]
            if slab is None or sum(map(len, there)) == slab.num_tokens:
                continue
            for piece in there:
                piece.kv = self.parts.on_its_own(piece.kv)

    def keep_idle(self, cursor: CacheCursor, kv: Sequence[Any]) -> None:
        """Whoever goes on from the end of a cursor is given these caches, if all of it is kept.

        Pictures have more in them than tokens say, and of the caches of ranks only a part is here.
        """
        is_plain = not cursor.media and self.parts.can_divide
        if is_plain and cursor.num_kept == len(cursor.token_ids):
            token_ids = array("I", cursor.token_ids)
            names = {
                *cursor.block_hashes,
                *(cursor.name_at(self.chain, end) for end in cursor.ends),
            }
            self.idle_caches.keep(cursor.root, token_ids, names, [*kv])
            self.fit_idle_caches()

    def fit_idle_caches(self) -> None:
        """They have what running requests and pieces leave of the memory for both."""
        both_bytes = self.max_hot_bytes if self.left_bytes is None else self.left_bytes
        self.idle_caches.fit(both_bytes - self.memory.num_bytes)

    def why_missed(self, cursor: CacheCursor, position: int) -> MissReason | None:
        """Why what a prompt has from this position on is here no longer, if it was."""
        if not self.missed:
            return None
        size = self.chain.block_size
        number = position // size
        if number < len(cursor.block_hashes) and (
            reason := self.missed.get(cursor.block_hashes[number])
        ):
            return reason
        begun = number * size
        last = min(begun + size, len(cursor.token_ids) + 1)
        above, rest = cursor.above(self.chain, number), array("I", cursor.token_ids[begun:last])
        names = (
            self.chain.end_hash(above, rest[: end - begun]) for end in range(position + 1, last)
        )
        return next((self.missed[name] for name in names if name in self.missed), None)

    def _remember(self, names: Iterable[bytes], reason: MissReason) -> None:
        for name in names:
            self.missed[name] = reason
        while len(self.missed) > _MAX_MISSED:
            self.missed.popitem(last=False)
