"""What the dashboard is told: counts, sizes, times and names. Nothing that anybody said."""

from __future__ import annotations

import msgspec

from api.admin.models import RunningModel
from api.admin.pools import TierUse
from api.observe.trend import Sample
from runtime.cache.views import SlotNode


class MemoryUse(msgspec.Struct, gc=False):
    """What models reserve of what they may, and what the hot tiers hold of their budgets."""

    budget_bytes: int
    reserved_bytes: int


class Saved(msgspec.Struct, gc=False):
    """What was asked and not computed again; `hit_rate` is their ratio, null before any prompt."""

    prompt_tokens: int
    saved_tokens: int
    saved_prefill_s: float
    hit_rate: float | None


class OpenRequest(msgspec.Struct, gc=False):
    """One request that is being answered. `num_pieces` of output arrived so far."""

    id: str
    model: str
    phase: str
    for_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_pieces: int


class Snapshot(msgspec.Struct, gc=False):
    """How everything stands; `saved_today` counts from midnight UTC."""

    at_s: float
    models: list[RunningModel]
    known_models: list[str]
    default_model: str | None
    memory: MemoryUse
    tiers: list[TierUse]
    cache: str
    history: str
    history_message: str | None
    saved_today: Saved
    saved_total: Saved
    requests: list[OpenRequest]
    sample: Sample | None


class Samples(msgspec.Struct, gc=False):
    """Speed over the last hour, the oldest first."""

    every_s: float
    samples: list[Sample]


class KeptView(msgspec.Struct, gc=False):
    """A conversation; `own_bytes` would leave the disk with it. `tier` is `hot` when its end is in
    memory now; `expires_in_s` is when it leaves the disk unless it is used, null for never.
    """

    id: str
    model: str
    num_tokens: int
    num_turns: int
    disk_bytes: int
    own_bytes: int
    tier: str
    last_used_s: float
    expires_in_s: float | None
    is_pinned: bool
    is_named: bool


class KeptListing(msgspec.Struct, gc=False):
    """The latest used first; `num_found` fit the search, of which these are some."""

    num_found: int
    conversations: list[KeptView]


class SlotTree(msgspec.Struct, gc=False):
    """The slots of one model, parents before children; `num_slots` there are, maybe more."""

    model: str
    num_slots: int
    slots: list[SlotNode]


class Prewarmed(msgspec.Struct, gc=False):
    """`num_tokens` are on their way into memory; none when the model is not loaded."""

    id: str
    num_tokens: int
    message: str
