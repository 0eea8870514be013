"""Which slot stands for one that was merged into it: what continued the old one continues it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

MAX_HEIRS = 10_000
"""Of the last merges; who stages what continues an older one has waited for hours."""


class SlotRedirect(NamedTuple):
    """The slot `id` has the tokens of another one up to the position `end`."""

    id: str
    end: int


class SlotRedirects:
    """Pure. Who merges notes what became of each slot."""

    def __init__(self) -> None:
        self._by_id: dict[str, SlotRedirect] = {}

    def note(self, redirects: Iterable[tuple[str, SlotRedirect]]) -> None:
        """These slots, by id, are replaced."""
        self._by_id.update(redirects)
        for slot_id in list(self._by_id)[: max(len(self._by_id) - MAX_HEIRS, 0)]:
            del self._by_id[slot_id]

    def of(self, slot_id: str | None, start: int) -> str | None:
        """The slot that has the tokens before `start` now, which `slot_id` had.

        None when it was not merged, or these tokens are no longer anywhere.
        """
        found: str | None = None
        while slot_id is not None and (heir := self._by_id.get(slot_id)) is not None:
            if start > heir.end:
                return None
            found = slot_id = heir.id
        return found
