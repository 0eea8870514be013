"""What `hearth cache` shows of a store, as JSON and as text."""

from __future__ import annotations

from runtime.types import Struct
from store.types import Tier


class ConversationView(Struct, frozen=True):
    """A line of `hearth cache ls`. Times are wall-clock seconds.

    `model` is the name that was asked. Of its `disk_bytes` so many are its `own_bytes`: they leave
    the disk with it, the others are shared. The first `num_durable` of its tokens are on disk;
    `num_tokens` counts what is being written as well, and `is_durable` says that its latest turn is
    on disk to the end. Without a session id what is being written is not told.
    """

    id: str
    model: str
    model_hash: str
    num_tokens: int
    num_durable: int
    num_turns: int
    num_slots: int
    disk_bytes: int
    own_bytes: int
    tier: str
    last_used_s: float
    is_pinned: bool
    is_durable: bool
    is_named: bool


class TierView(Struct, frozen=True):
    """What one model holds in one tier."""

    model: str
    model_hash: str
    tier: Tier
    num_slots: int
    num_tokens: int
    disk_bytes: int


class StatsView(Struct, frozen=True):
    """`hearth cache stats`. `counters` are sums since the store was made, by name."""

    root: str
    tiers: tuple[TierView, ...]
    num_conversations: int
    free_bytes: int
    counters: dict[str, float]


class VerifyView(Struct, frozen=True):
    """`hearth cache verify`: what was read; what was damaged or missing is gone now."""

    num_verified: int
    verified_bytes: int
    num_damaged: int
    num_unread: int


class CollectedView(Struct, frozen=True):
    """`hearth cache gc`: slots that left the disk, went to the cold store, or became one."""

    num_dropped: int
    num_demoted: int
    freed_bytes: int


class SlotView(Struct, frozen=True):
    """One slot of a conversation: tokens `start` to `end`, the next one continuing at `leave`."""

    id: str
    tier: Tier
    start: int
    leave: int


class SlotNode(Struct, frozen=True):
    """One slot: tokens `start` to `end` of what its parents hold. Sizes in bytes.

    It is one conversation's own, or is shared by `num_conversations`.
    """

    id: str
    parent: str | None
    start: int
    end: int
    tier: Tier
    disk_bytes: int
    is_pinned: bool
    num_conversations: int


class ShownView(Struct, frozen=True):
    """`hearth cache show`: a conversation, its slots in order, and when it leaves the disk.

    `is_kept` says that it was pinned itself; `ttl_s` is how long it stays unused, None for ever.
    """

    conversation: ConversationView
    is_kept: bool
    ttl_s: float | None
    slots: tuple[SlotView, ...]


class RemovalView(Struct, frozen=True):
    """`hearth cache rm`: what is gone. `is_cut` says that the index's log holds no trace either.

    `is_pending` says that a worker that is busy, or has yet to learn what its model is called, may
    still have some of it in memory: that is forgotten as soon as it reads what it was told, and not
    written. It is not counted here.
    """

    num_conversations: int
    num_slots: int
    is_cut: bool
    is_pending: bool = False


class ChainView(Struct, frozen=True):
    """The slot files that hold a conversation's first tokens, each with where to leave it, and how
    many conversations are part of it.
    """

    model: str
    model_hash: str
    paths: tuple[str, ...]
    leaves: tuple[int, ...]
    num_conversations: tuple[int, ...] = ()
