"""What holds KV, and how full it is: for the dashboard, and for who asks whether all is well."""

from __future__ import annotations

from collections import Counter

import msgspec

from api.http.gate import Gate
from api.http.kv_access import KvAccess

REFRESH_S = 15.0
"""How often the disk is looked at for who only asks whether all is well."""


class TierUse(msgspec.Struct, gc=False):
    """What a tier holds, over all models; `cap_bytes` is null where nothing bounds it now.

    `utilization` is their ratio, null where there is none.
    """

    tier: str
    used_bytes: int
    cap_bytes: int | None
    utilization: float | None


def pools_of(gate: Gate, cache: KvAccess) -> list[TierUse]:
    """The memory of workers as it is, the disks as of when they were last counted, if they were."""
    figures = cache.kv.figures()
    hot_bytes = sum(counts.hot_bytes for counts in figures.models.values())
    hot = _use("hot", hot_bytes, gate.supervisor.budgets().hot or None)
    if figures.disk.cap_bytes is None:
        return [hot]
    used = Counter[str]()
    for one in figures.disk.tiers:
        used[one.tier] += one.disk_bytes
    cold_cap_bytes = gate.settings.cold_max_bytes if gate.settings.cold_store else None
    warm = _use("warm", used["warm"], figures.disk.cap_bytes)
    return [hot, warm, _use("cold", used["cold"], cold_cap_bytes)]


def _use(tier: str, used_bytes: int, cap_bytes: int | None) -> TierUse:
    share = round(used_bytes / cap_bytes, 4) if cap_bytes else None
    return TierUse(tier, used_bytes, cap_bytes, share)
