"""A cursor: how much of one request's tokens is kept, and what it waits for."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from msgspec import structs

from runtime.kv.block_memory import Piece
from runtime.kv.pack import RunKv
from runtime.types import CacheMode, CacheTier, CacheUse, MissReason
from store.block_names import HashChain
from store.keyed_names import NOBODY, Asker
from store.types import DEFAULT_TTL_S, MediaSpan, TtlClass, class_of


@dataclass(eq=False, slots=True, weakref_slot=True)
class CacheCursor:
    """Created by intake, owned by the tiers.

    `prefix_end` is where the system prompt and tools end. At the positions `boundaries` the state
    of layers that cannot be sliced is worth keeping. What is before a position of `keeps` is worth
    that many seconds, if that is longer than `ttl_s`. Once it is answered its client is away for
    `pause_s` seconds, or with `is_last` for good. Its request came after the deletion of the number
    `after_deletion`. Pictures, at `media`, have identity ids among `token_ids`.

    The tiers give it `names`, those of its blocks, which begin with `root`. The first `num_kept`
    tokens are kept; `ends` are positions within a block at which something was kept. `limit`
    forbids to take up more, `tier` is the slowest from which something was read, `waiting` names
    what is being read for it, and `pinned` stays in memory for it.
    """

    token_ids: Sequence[int] = ()
    tenant: str = ""
    names: list[bytes] = field(default_factory=list[bytes])
    root: bytes = b""
    mode: CacheMode = "full"
    ttl_class: TtlClass = "long"
    ttl_s: float | None = DEFAULT_TTL_S
    asker: Asker = NOBODY
    after_deletion: int = 0
    prefix_end: int = 0
    boundaries: tuple[int, ...] = ()
    keeps: tuple[tuple[int, float], ...] = ()
    pause_s: float | None = None
    is_last: bool = False
    media: tuple[MediaSpan, ...] = ()

    num_kept: int = 0
    num_told: int = 0
    """The tokens of the last head of it that was told."""
    continues: bytes = b""
    """The name of the end of what it goes on from, or of the last head of it that was told."""
    ends: set[int] = field(default_factory=set[int])
    limit: int | None = None
    reason: MissReason | None = None
    started_s: float = 0.0
    give_up_s: float = 0.0
    tier: CacheTier = "hot"
    waiting: set[bytes] = field(default_factory=set[bytes])
    pinned: dict[Piece[RunKv], None] = field(default_factory=dict["Piece[RunKv]", None])
    use: CacheUse = field(default_factory=CacheUse)

    @property
    def is_waiting(self) -> bool:
        """It waits for something to be read."""
        return bool(self.waiting)

    def stop_at(self, position: int) -> None:
        """If the prompt goes beyond, have it computed up to there first, and kept."""
        if 0 < position < len(self.token_ids) - 1:
            self.boundaries = (*self.boundaries, position)

    def rename(self, chain: HashChain) -> None:
        """Take the names that this chain gives."""
        self.root = chain.root_of(self.tenant)
        self.names = chain.block_hashes(self.token_ids, root=self.root)

    def extend(self, chain: HashChain, token_ids: Sequence[int]) -> None:
        """It has these tokens now, the first of which it had before."""
        self.token_ids = token_ids
        self.names = chain.block_hashes(token_ids, known=self.names, root=self.root)

    def above(self, chain: HashChain, number: int) -> bytes:
        """The name of what is before the block of this number."""
        return self.names[number - 1] if number else self.root or chain.root

    def name_at(self, chain: HashChain, end: int) -> bytes:
        """The name of its first `end` tokens."""
        number = end // chain.block_size
        rest = self.token_ids[number * chain.block_size : end]
        return chain.end_hash(self.above(chain, number), array("I", rest))

    def shares_block(self, other: CacheCursor, number: int) -> bool:
        """Both have a whole block of that number, and are the same up to its end."""
        span = slice(number, number + 1)
        own, theirs = self.names[span], other.names[span]
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
        """The same place, for another sequence that goes on from here."""
        return replace(
            self,
            names=list(self.names),
            ends=set(self.ends),
            boundaries=(),
            limit=None,
            reason=None,
            started_s=0.0,
            give_up_s=0.0,
            tier="hot",
            waiting=set(),
            pinned={},
        )
