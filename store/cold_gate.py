"""Whether the cold store answers: after one contact that failed, nobody waits for it any more.

Everything that needs it is told `ColdAway` at once until a probe was answered; the pauses between
probes grow, and only what was really had of it makes them short again. What it is asked and what
becomes of that is all that is ever said of its health.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from store.cold import ColdSlot, ColdStore
from store.cold_codec import ByteSource
from store.cold_owner import Owned
from store.errors import ColdAway, ColdForeign, SlotDamaged, SlotMissing, StoreFailed, StoreFull

MIN_PAUSE_S = 1.0
MAX_PAUSE_S = 300.0


class Reach(NamedTuple):
    """How it is with the cold store; `why` is what the last failure said. Pure.

    `is_away`: nothing is to be had of it, as it is another's if `is_foreign`. `is_full`: what it
    has can be had, and the last slot that was to go there had no room.
    """

    is_away: bool = False
    num_failures: int = 0
    why: str | None = None
    is_foreign: bool = False
    is_full: bool = False

    @property
    def pause_s(self) -> float:
        """How long to leave it alone before the next probe."""
        return min(MIN_PAUSE_S * 2.0 ** min(self.num_failures - 1, 20), MAX_PAUSE_S)

    def failed(self, why: str, *, is_foreign: bool = False) -> Reach:
        """A contact or a probe failed."""
        return Reach(True, self.num_failures + 1, why, is_foreign)

    def found(self) -> Reach:
        """A probe was answered."""
        return self._replace(is_away=False, is_foreign=False)

    def used(self, *, has_taken: bool) -> Reach:
        """It did what it was asked; only what it takes shows that it has room."""
        return Reach(why=self.why, is_full=True) if self.is_full and not has_taken else Reach()


class ColdGate:
    """A `ColdStore` before another one, which may be away, or not ours. From any thread."""

    def __init__(self, cold: ColdStore, claim: Owned | None = None) -> None:
        self._cold = cold
        self._claim = claim
        self._checked_s: float | None = None
        self.reach = Reach()

    @contextmanager
    def _contact(self, *, takes: bool = False) -> Generator[None]:
        """Raises ColdAway, without any contact while it is away; `takes` is set to give to it."""
        if self.reach.is_away:
            raise ColdAway(f"the cold store is away: {self.reach.why}")
        try:
            self._check()
            yield
            if takes:  # what was just given to it may have gone to what lies below its mount
                self._check()
        except (SlotMissing, SlotDamaged):
            self._ask(self._check_now)  # with all of it, perhaps
            raise
        except ColdAway as error:
            raise self._failed(error) from error
        except StoreFull as error:
            if takes:
                self.reach = self.reach._replace(is_full=True, why=str(error))
            raise
        except StoreFailed:
            self._ask(self._cold.probe)  # or else the fast disk is to blame
            raise
        self.reach = self.reach.used(has_taken=takes)

    def _check(self) -> None:
        """See that it is ours. Raises ColdAway."""
        lasts_s = self._cold.mark_lasts_s
        if self._checked_s is None or time.monotonic() - self._checked_s >= lasts_s:
            self._check_now()

    def _check_now(self) -> None:
        if self._claim is not None:
            self._claim.check(self._cold)
            self._checked_s = time.monotonic()

    def _ask(self, question: Callable[[], None]) -> None:
        try:
            question()
        except ColdAway as error:
            raise self._failed(error) from error

    def _failed(self, error: ColdAway) -> ColdAway:
        self._checked_s = None
        is_foreign = isinstance(error, ColdForeign)
        self.reach = self.reach.failed(str(error), is_foreign=is_foreign)
        return error

    def put(self, slot_id: str, chunks: Iterable[bytes]) -> ColdSlot:
        with self._contact(takes=True):
            return self._cold.put(slot_id, chunks)

    @contextmanager
    def get(self, slot_id: str) -> Generator[ByteSource]:
        with self._contact(), self._cold.get(slot_id) as source:
            yield source

    def delete(self, slot_id: str) -> bool:
        with self._contact():
            return self._cold.delete(slot_id)

    def slots(self) -> Iterator[ColdSlot]:
        with self._contact():
            yield from self._cold.slots()

    def sweep(self) -> int:
        with self._contact():
            return self._cold.sweep()

    def probe(self) -> None:
        """Ask whether it is there, also while it is away; `reach` says it. Raises nothing."""
        try:
            self._check_now()
            self._cold.probe()
        except ColdAway as error:
            self._failed(error)
        else:
            self.reach = self.reach.found()

    @property
    def mark_lasts_s(self) -> float:
        return self._cold.mark_lasts_s

    def mark(self) -> bytes | None:
        return self._cold.mark()

    def make_mark(self, content: bytes, *, replaces: bool = False) -> bool:
        return self._cold.make_mark(content, replaces=replaces)
