"""Who is next, where tenants share one thing, and the conversations of a tenant its part. Pure.

This is start-time fair queueing (Goyal, Vin and Cheng, 1996): what is served costs something, each
sharer has a time of its own that advances by its costs, and whose time is earliest is next. Who
asked for nothing in a while begins at the present and has no claim on what it left unused, so a
newcomer waits for one turn of each other sharer at most.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

from runtime.types import GenerateRequest

T = TypeVar("T")

_MOST_KNOWN = 1024
"""Of so many sharers it is known where their times are. When there are more, the half that is
furthest behind begins at the present, as who asked for nothing in a while does.
"""


class _Shares:
    """The times of sharers, in units of cost."""

    def __init__(self) -> None:
        self._now = 0.0
        self._ends: dict[Hashable, float] = {}

    def __len__(self) -> int:
        return len(self._ends)

    def start(self, sharer: Hashable) -> float:
        """When its next turn begins."""
        return max(self._now, self._ends.get(sharer, 0.0))

    def charge(self, sharer: Hashable, cost: float) -> None:
        """It had a turn that cost so much."""
        self._now = self.start(sharer)
        self._ends[sharer] = self._now + cost
        if len(self._ends) > _MOST_KNOWN:
            latest = sorted(self._ends, key=self._ends.__getitem__)[_MOST_KNOWN // 2 :]
            self._ends = {one: self._ends[one] for one in latest}


class FairShare(Generic[T]):
    """Tenants take turns, and within the turns of a tenant its conversations do.

    `request_of` says whose a thing is; a request without a session is of one conversation with all
    others of its tenant that have none.
    """

    def __init__(self, request_of: Callable[[T], GenerateRequest]) -> None:
        self._request_of = request_of
        self._tenants = _Shares()
        self._conversations: dict[str, _Shares] = {}

    @property
    def num_known(self) -> int:
        """Conversations that are remembered."""
        return sum(map(len, self._conversations.values()))

    def of_next_tenant(self, things: Iterable[T]) -> list[T]:
        """Those of the tenant whose turn it is, in the order in which they were given."""
        things = list(things)
        tenants = dict.fromkeys(self._tenant(one) for one in things)
        turn = min(tenants, key=self._tenants.start)
        return [one for one in things if self._tenant(one) == turn]

    def start(self, thing: T) -> float:
        """When the next turn of its conversation begins, beside others of its tenant."""
        cache = self._request_of(thing).cache
        shares = self._conversations.get(cache.tenant)
        return shares.start(cache.session_id) if shares is not None else 0.0

    def next(self, things: Iterable[T]) -> T:
        """The first one of the conversation whose turn it is."""
        return min(self.of_next_tenant(things), key=self.start)

    def charge(self, thing: T, cost: float = 1.0) -> None:
        """It was served, at this cost."""
        cache = self._request_of(thing).cache
        self._tenants.charge(cache.tenant, cost)
        shares = self._conversations.setdefault(cache.tenant, _Shares())
        shares.charge(cache.session_id, cost)

    def _tenant(self, thing: T) -> str:
        return self._request_of(thing).cache.tenant
