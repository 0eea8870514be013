"""Eviction decides, purely, what leaves when bytes are needed: leaves first, the least worth first.

A slot is worth what it is likely to save per byte it takes: p(reuse) * recompute_ms / bytes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from store.types import Candidate, TtlClass, decayed_hits

HALF_LIFE_S: dict[TtlClass, float] = {
    "short": 900.0,
    "long": 6 * 3600.0,
    "extended": 84 * 3600.0,
    "pinned": float("inf"),
}
"""After this long without use a reuse is half as likely: a quarter of the class's life on disk."""

MAX_HITS = 4.0
"""More hits than these say nothing more: otherwise old favourites would stay for ever."""


def value(candidate: Candidate, now_s: float) -> float:
    """Milliseconds of prefill this candidate is expected to save, per byte.

    A `last_used_s` after `now_s` counts as now. While somebody is awaited it is as if it was used
    now, and often before. What was released saves nothing.
    """
    if candidate.is_released:
        return 0.0
    age_s = max(now_s - max(candidate.last_used_s, candidate.awaited_s), 0.0)
    recency = 2.0 ** (-age_s / HALF_LIFE_S[candidate.ttl_class])
    is_awaited = candidate.awaited_s > now_s
    hits = MAX_HITS if is_awaited else min(decayed_hits(candidate.hits, age_s), MAX_HITS)
    popularity = 1.0 + hits
    return recency * popularity * candidate.recompute_ms / max(candidate.size_bytes, 1)


def densest(positions: Sequence[int]) -> int:
    """Which of at least three rising positions is missed least, seen from the last one.

    What lies between its neighbours is weighed by how far back it is.
    """
    end = positions[-1]

    def loss(number: int) -> float:
        before, here, after = positions[number - 1 : number + 2]
        return (after - before) / (end - here + 1)

    return min(range(1, len(positions) - 1), key=loss)


def choose(candidates: Iterable[Candidate], bytes_to_free: int, now_s: float) -> tuple[str, ...]:
    """The ids to evict, in this order, until `bytes_to_free` bytes are free or nothing is left.

    A parent becomes a candidate when its last child is chosen; a child that is not among the
    candidates (pinned, being read) therefore keeps all its ancestors. The newest leaf goes last:
    only when everything else is not enough does its chain become shorter, from its end.
    """
    if bytes_to_free <= 0:
        return ()
    known = {candidate.id: candidate for candidate in candidates}
    num_children = {candidate.id: candidate.num_children for candidate in known.values()}
    leaves = [candidate for candidate in known.values() if candidate.num_children == 0]
    if not leaves:
        return ()
    newest = max(leaves, key=lambda leaf: (not leaf.is_released, leaf.last_used_s, leaf.id))
    heap = [(leaf is newest, value(leaf, now_s), leaf.id) for leaf in leaves]
    heapq.heapify(heap)
    chosen: list[str] = []
    freed_bytes = 0
    while heap and freed_bytes < bytes_to_free:
        _, _, chosen_id = heapq.heappop(heap)
        chosen.append(chosen_id)
        freed_bytes += known[chosen_id].size_bytes
        parent = known.get(known[chosen_id].parent or "")
        if parent is None:
            continue
        num_children[parent.id] -= 1
        if num_children[parent.id] == 0:
            heapq.heappush(heap, (False, value(parent, now_s), parent.id))
    return tuple(chosen)
