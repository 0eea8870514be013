"""Deletions are numbered here, and told to workers that come later while it matters.

It belongs to the event loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from typing import NamedTuple
from weakref import WeakSet

from msgspec import structs

from runtime.kv_messages import Forget
from store.keyed_names import Whom

_MAX_DELETIONS = 1000
_MAX_BYTES = 64 << 20
"""Of tokens. What came before more than that is taken for deleted."""

Models = Collection[bytes] | None
"""Hashes; None: all models."""


class Receipt:
    """Who holds it came after the deletion of this number, and before the next one."""

    __slots__ = ("__weakref__", "number")

    def __init__(self, number: int) -> None:
        self.number = number


class _Logged(NamedTuple):
    news: Forget
    models: Models

    @property
    def num_bytes(self) -> int:
        chain = self.news.whom.chain
        return len(chain.token_ids) if chain is not None else 0


class DeletionLog:
    """Those that something in flight came before, as long as its receipt is held."""

    def __init__(self) -> None:
        self._now = Receipt(0)
        self._open: WeakSet[Receipt] = WeakSet([self._now])
        self._logged: deque[_Logged] = deque()
        self._lost = 0

    def __len__(self) -> int:
        return len(self._logged)

    def receive(self) -> Receipt:
        """Something came: what is deleted from now on is deleted for it as well."""
        return self._now

    def record(self, whom: Whom, secret: bytes, models: Models = None) -> Forget:
        """Give a deletion the next number; what is to be told of it."""
        self._now = Receipt(self._now.number + 1)
        self._open.add(self._now)
        self._logged.append(_Logged(Forget(self._now.number, whom, secret), models))
        while len(self._logged) > _MAX_DELETIONS or self._num_bytes > _MAX_BYTES:
            self._lost = self._logged.popleft().news.number
        while self._logged and self._logged[0].news.number <= self.floor:
            self._logged.popleft()
        return Forget(self._now.number, whom, secret, self.floor)

    @property
    def floor(self) -> int:
        """Of what came before the deletion of this number nothing is in flight any more, or it
        counts as deleted.
        """
        return max(self._lost, min(one.number for one in self._open))

    def hold(self) -> Receipt:
        """The receipt of what came first of all that is in flight."""
        return min(self._open, key=lambda one: one.number)

    def is_deleted(self, received: Receipt, is_meant: Callable[[Forget], bool]) -> bool:
        """Whether a deletion since then is meant; what came before all that is known is deleted."""
        later = (one.news for one in self._logged if one.news.number > received.number)
        return received.number < self._lost or any(map(is_meant, later))

    def known(self) -> list[tuple[Forget, Models]]:
        """What a worker that comes now is to be told, and for which models that is."""
        floor = self.floor
        return [
            (structs.replace(one.news, floor=floor), one.models)
            for one in self._logged
            if one.news.number > floor
        ]

    @property
    def _num_bytes(self) -> int:
        return sum(one.num_bytes for one in self._logged)
