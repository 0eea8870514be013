"""What Hearth says of an answer beyond the protocol it is given in: the object `hearth`."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from api.observe.record import CompactionInfo, Tally
from runtime.types import CacheTier, CacheUse, MissReason


class CacheInfo(msgspec.Struct, gc=False):
    """What was reused, from which tier, and why no more: `reason` is null when all was.

    `at` is the position from which on tokens were computed. The first `durable_tokens` are on disk:
    no crash loses them. Times are in ms.
    """

    tier: CacheTier
    cached_tokens: int
    durable_tokens: int
    restore_ms: float
    prefill_ms: float
    reason: MissReason | None
    at: int


class PromptRewrite(msgspec.Struct, gc=False):
    """A rule that changed the prompt before the model saw it, and in how many places.

    Where it left turns of the conversation out: how many turns, and their tokens.
    """

    rule: str
    num_places: int
    num_turns: int | UnsetType = UNSET
    num_tokens: int | UnsetType = UNSET


class IgnoredInfo(msgspec.Struct, gc=False):
    """`hearth` of an answer that has no more of it: what of the request had no effect."""

    ignored: list[str]


def ignored_info(names: Sequence[str]) -> IgnoredInfo | UnsetType:
    """What had no effect; nothing where everything had."""
    return IgnoredInfo([*names]) if names else UNSET


class SummaryInfo(msgspec.Struct, gc=False):
    """Summaries that were made for this answer because its conversation did not fit, and what they
    took in tokens, beside the answer's usage.
    """

    num_summaries: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class HearthInfo(msgspec.Struct, gc=False, omit_defaults=True):
    """`prompt` has the rewrites, `notes` machine-readable remarks, `ignored` the request's fields
    that had no effect; each is left out when there are none. `compaction` is there where a summary
    took the place of the conversation, `summaries` where some were made as it did not fit.
    """

    cache: CacheInfo
    prompt: list[PromptRewrite] | UnsetType = UNSET
    notes: list[str] | UnsetType = UNSET
    ignored: list[str] | UnsetType = UNSET
    compaction: CompactionInfo | UnsetType = UNSET
    summaries: SummaryInfo | UnsetType = UNSET


def hearth_of(tally: Tally, ignored: Sequence[str] = ()) -> HearthInfo:
    """What became of the prompt: of several, the one of which least was reused."""
    usage = tally.least_cached
    cache = usage.cache if usage is not None else CacheUse()
    rewrites = [
        PromptRewrite(
            change.rule, change.num_places, change.num_turns or UNSET, change.num_tokens or UNSET
        )
        for change in (usage.prompt_changes if usage is not None else ())
    ]
    return HearthInfo(
        cache=CacheInfo(
            tier=cache.tier,
            cached_tokens=tally.num_cached_tokens,
            durable_tokens=cache.num_durable,
            restore_ms=round(cache.restore_ms, 3),
            prefill_ms=round(usage.prefill_ms, 3) if usage is not None else 0.0,
            reason=cache.reason,
            at=cache.at,
        ),
        prompt=rewrites or UNSET,
        notes=tally.notes or UNSET,
        ignored=[*tally.ignored, *ignored] or UNSET,
        compaction=UNSET if tally.compaction is None else tally.compaction,
        summaries=UNSET if tally.summaries is None else SummaryInfo(*tally.summaries),
    )
