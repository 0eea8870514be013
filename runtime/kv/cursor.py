"""A cursor: which pieces one request's tokens have, and what it waits for."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import structs

from runtime.kv.block_memory import Piece
from runtime.kv.deletions import Recognised
from runtime.types import CacheMode, CacheTier, CacheUse, MissReason
from store.block_names import HashChain
from store.keyed_names import NOBODY, Asker
from store.turns import NOTHING_SAID, Said
from store.types import DEFAULT_TTL_S, MediaSpan, TtlClass, class_of


@dataclass(eq=False, slots=True, weakref_slot=True)
class CacheCursor:
    """Created by intake, owned by the tiers.

    `prefix_end` is where the system prompt and tools end, `boundaries` are positions at which the
    state of layers that cannot be sliced is worth keeping; at those of `passing` in memory only,
    as a conversation that goes on leaves them behind. What is before a position of `keeps` is
    worth that many seconds on disk, if that is longer than `ttl_s`. Once it is answered its client
    is away for `pause_s` seconds, or with `is_last` for good. `leaf` holds the last of the
    first `num_kept` tokens, all of which are in the tree. `limit` forbids to take up more, `asked`
    says from where runs had to be read. Pictures, at `media`, have identity ids among `token_ids`.
    It came after the deletion of the number `after_deletion`, and before later ones; by what it is
    known whose it is then, besides `asker` and tokens, is as in `Recognised`. What it has `said` of
    its conversation goes with its head.
    The tiers give it its names, `root` of the `tenant` and `block_hashes`, and others when the
    store turns out to be another one.
    """

    token_ids: Sequence[int] = ()
    tenant: str = ""
    block_hashes: list[bytes] = field(default_factory=list[bytes])
    root: bytes = b""
    mode: CacheMode = "full"
    ttl_class: TtlClass = "long"
    ttl_s: float | None = DEFAULT_TTL_S
    asker: Asker = NOBODY
    after_deletion: int = 0
    said: Said = NOTHING_SAID
    num_said: int = 0
    prefix_end: int = 0
    boundaries: tuple[int, ...] = ()
    passing: frozenset[int] = frozenset()
    keeps: tuple[tuple[int, float], ...] = ()
    pause_s: float | None = None
    is_last: bool = False
    media: tuple[MediaSpan, ...] = ()

    num_kept: int = 0
    has_lost_slots: bool = False
    """Some of what it goes through was deleted, and is on disk no longer."""
    limit: int | None = None
    reason: MissReason | None = None
    started_s: float = 0.0
    give_up_s: float = 0.0
    use: CacheUse = field(default_factory=CacheUse)

    num_prompt: int = 0
    """The tokens that its client said."""
    num_told: int = 0
    """The tokens of the last head of it that was told."""
    continues: bytes = b""
    """The name of the end of what it goes on from, or of the last head of it that was told."""
    ends: set[int] = field(default_factory=set[int])
    """Positions within a block at which something of it was kept."""
    tier: CacheTier = "hot"
    """The slowest from which something was read."""
    awaits: set[bytes] = field(default_factory=set[bytes])
    """The names of what is being read for it."""
    spared: set[bytes] = field(default_factory=set[bytes])
    """The names of what was deleted while it was read for it."""
    holds: dict[Piece[Any], None] = field(default_factory=dict["Piece[Any]", None])
    """What stays in memory for it."""

    @property
    def is_waiting(self) -> bool:
        """It waits for something to be read."""
        return bool(self.awaits)

    @property
    def recognised(self) -> Recognised:
        """Whose it is, for deletions."""
        known = self.token_ids, self.said.beginning, self.num_said, self.root
        return Recognised(self.asker, self.after_deletion, *known)

    def delete(self) -> None:
        """What it is of was deleted: nothing of it is kept from now on, nor reused."""
        self.mode, self.reason = "off", "deleted"
        self.use = structs.replace(self.use, reason="deleted")

    def stop_at(self, position: int) -> None:
        """If the prompt goes beyond, have it computed up to there first, and kept."""
        if 0 < position < len(self.token_ids) - 1:
            self.boundaries = (*self.boundaries, position)

    def rename(self, chain: HashChain) -> None:
        """Take the names that this chain gives."""
        self.root = chain.root_of(self.tenant)
        self.block_hashes = chain.block_hashes(self.token_ids, root=self.root)

    def extend(self, chain: HashChain, token_ids: Sequence[int]) -> None:
        """It has these tokens now, the first of which it had before."""
        self.token_ids = token_ids
        self.block_hashes = chain.block_hashes(token_ids, known=self.block_hashes, root=self.root)

    def above(self, chain: HashChain, number: int) -> bytes:
        """The name of what is before the block of this number."""
        return self.block_hashes[number - 1] if number else self.root or chain.root

    def name_at(self, chain: HashChain, end: int) -> bytes:
        """The name of its first `end` tokens."""
        number = end // chain.block_size
        rest = self.token_ids[number * chain.block_size : end]
        return chain.end_hash(self.above(chain, number), array("I", rest))

    def shares_block(self, other: CacheCursor, number: int) -> bool:
        """Both have a whole block of that number, and are the same up to its end."""
        span = slice(number, number + 1)
        own, theirs = self.block_hashes[span], other.block_hashes[span]
        return own == theirs != [] and self.root == other.root

    @property
    def told_use(self) -> CacheUse:
        """What it reused, and what of its prompt is kept."""
        num_kept = {"off": 0, "prefix": self.prefix_end}.get(self.mode)
        return structs.replace(self.use, num_kept=num_kept, keeps=self.keeps)

    def worth(self, start: int) -> tuple[TtlClass, float | None]:
        """How long tokens that begin there are to be kept: longer where a client said so."""
        wished = max((keep_s for at, keep_s in self.keeps if at > start), default=0.0)
        if not self.ttl_s or wished <= self.ttl_s:
            return self.ttl_class, self.ttl_s
        return class_of(wished), wished

    def fork(self) -> CacheCursor:
        """The same place in the tree, for another sequence that goes on from here."""
        return replace(
            self,
            block_hashes=list(self.block_hashes),
            boundaries=(),
            passing=frozenset(),
            limit=None,
            reason=None,
            started_s=0.0,
            give_up_s=0.0,
            ends=set(self.ends),
            tier="hot",
            awaits=set(),
            spared=set(),
            holds={},
        )
