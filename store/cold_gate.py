"""Whether the cold store answers: after one contact that failed, nobody waits for it any more.

Everything that needs it is told `ColdAway` at once until a probe was answered; the pauses between
probes grow, and only what was really had of it makes them short again.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from store.cold import ColdSlot, ColdStore
from store.disk import Yield, keep_going
from store.errors import ColdAway
from store.slots import StagedSlot

MIN_PAUSE_S = 1.0
MAX_PAUSE_S = 300.0


class Reach(NamedTuple):
    """How it is with the cold store; `why` is what the last failure said. Pure."""

    is_away: bool = False
    num_failures: int = 0
    why: str | None = None

    @property
    def pause_s(self) -> float:
        """How long to leave it alone before the next probe."""
        return min(MIN_PAUSE_S * 2.0 ** min(self.num_failures - 1, 20), MAX_PAUSE_S)

    def failed(self, why: str) -> Reach:
        """A contact or a probe failed."""
        return Reach(True, self.num_failures + 1, why)

    def found(self) -> Reach:
        """A probe was answered."""
        return self._replace(is_away=False)


class ColdGate:
    """A `ColdStore` before another one, which may be away. From any thread."""

    def __init__(self, cold: ColdStore) -> None:
        self._cold = cold
        self.reach = Reach()

    @contextmanager
    def _contact(self) -> Generator[None]:
        """Raises ColdAway, without any contact while it is away."""
        if self.reach.is_away:
            raise ColdAway(f"the cold store is away: {self.reach.why}")
        try:
            yield
        except ColdAway as error:
            self.reach = self.reach.failed(str(error))
            raise
        self.reach = Reach()

    def demote(self, path: Path, yield_: Yield = keep_going) -> ColdSlot:
        with self._contact():
            return self._cold.demote(path, yield_)

    def promote(self, root: Path, slot_id: str, yield_: Yield = keep_going) -> StagedSlot:
        with self._contact():
            return self._cold.promote(root, slot_id, yield_)

    def delete(self, slot_id: str) -> bool:
        with self._contact():
            return self._cold.delete(slot_id)

    def slots(self) -> Iterator[ColdSlot]:
        with self._contact():
            yield from self._cold.slots()

    def sweep(self) -> int:
        return self._cold.sweep()

    def probe(self) -> None:
        """Ask whether it is there, also while it is away; `reach` says it. Raises nothing."""
        try:
            self._cold.probe()
        except ColdAway as error:
            self.reach = self.reach.failed(str(error))
        else:
            self.reach = self.reach.found()
