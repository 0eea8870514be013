"""Pictures that were fetched lately, in memory only, so that a conversation's next turn need not.

Within its time an address stands for what it was when it was first asked: a conversation goes on
from the picture that it began with. After that it is asked again, and what it then is counts.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b
from typing import NamedTuple

MAX_FETCHED_BYTES = 64 << 20
MAX_FETCHED = 1024
FETCHED_TTL_S = 1800.0
"""Since it was last wanted."""

_DIGEST_BYTES = 16


class _Kept(NamedTuple):
    data: bytes
    until_s: float


class Fetched:
    """What was fetched for whom, by the digest of its address. From any thread.

    The pictures wanted last stay, as far as `max_bytes` reach.
    """

    def __init__(
        self,
        max_bytes: int = MAX_FETCHED_BYTES,
        ttl_s: float = FETCHED_TTL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()
        self._num_bytes = 0
        self._last_deletion = 0

    def get(self, tenant: str, url: str) -> bytes | None:
        """The picture, if it was fetched for this tenant and is still known."""
        key, now_s = _key(tenant, url), self._clock()
        with self._lock:
            kept = self._take(key)
            if kept is None or kept.until_s < now_s:
                return None
            self._put(key, kept.data, now_s)
            return kept.data

    def put(self, tenant: str, url: str, data: bytes, came_after: int = 0) -> None:
        """It was fetched just now, for who came after the deletion of this number.

        What somebody wanted before the last deletion is not kept: it may be of what was deleted.
        """
        now_s = self._clock()
        with self._lock:
            if came_after < self._last_deletion:
                return
            for key in [key for key, kept in self._kept.items() if kept.until_s < now_s]:
                self._take(key)
            self._put(_key(tenant, url), data, now_s)

    def clear(self, deletion: int) -> None:
        """Forget all of them at the deletion of this number."""
        with self._lock:
            self._last_deletion = max(self._last_deletion, deletion)
            self._kept.clear()
            self._num_bytes = 0

    def _put(self, key: bytes, data: bytes, now_s: float) -> None:
        self._take(key)
        self._kept[key] = _Kept(data, now_s + self._ttl_s)
        self._num_bytes += len(data)
        while self._num_bytes > self._max_bytes or len(self._kept) > MAX_FETCHED:
            self._take(next(iter(self._kept)))

    def _take(self, key: bytes) -> _Kept | None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._num_bytes -= len(kept.data)
        return kept


def _key(tenant: str, url: str) -> bytes:
    # An address may hold a secret: it is not kept itself.
    return blake2b(f"{tenant}\0{url}".encode(), digest_size=_DIGEST_BYTES).digest()
