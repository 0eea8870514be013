"""What the server is told of KV that is in memory only, so that it knows what a crash took."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from runtime.kv.ground import Ground
from runtime.kv.prefix import Run
from runtime.wire import SlotQueued, SlotsLeft
from store.keyed_names import Asker
from store.types import Piece


class Notes:
    """`report` tells the server. Without a disk (`has_disk`) nothing is told."""

    def __init__(
        self, ground: Ground, report: Callable[[SlotQueued | SlotsLeft], None], *, has_disk: bool
    ) -> None:
        self._ground = ground
        self._hot = ground.hot
        self._report = report
        self._has_disk = has_disk

    def queued(self, run: Run, asker: Asker, ends: Iterable[Piece]) -> None:
        """A run is about to be queued; `ends` were lost, and are on disk again with it."""
        held = self._hot[run]
        held.is_queued, held.completes = True, tuple(ends)
        inside = run.end % self._ground.chain.block_size > 0
        pieces = {one: Piece(one) for one in run.block_hashes}
        pieces |= {one.hash: one for one in held.completes}
        pieces[run.end_hash] = Piece(run.end_hash, run.last_block if inside else b"", run.end)
        told = tuple(pieces.values())
        self._report(SlotQueued(held.id, asker, told, run.start, held.ttl_s))

    def saved(self, run: Run) -> None:
        """A run is on disk: what was lost of it is not any more."""
        held = self._hot[run]
        held.is_written = held.is_saved = True
        ends = (one.hash for one in held.completes)
        self._ground.losses.found((*run.block_hashes, run.end_hash, *ends))

    def settle(self) -> None:
        """Tell what changed hands, or left memory before anything of it was on disk.

        What was written for a conversation that is forgotten is noted as whose it is now.
        """
        others, self._hot.others = self._hot.others, []
        if self._has_disk and not self._ground.is_apart:
            for run in (one for one in others if one in self._hot):
                held = self._hot[run]
                if held.kv is not None and not held.is_saved and held.ttl_s != 0:
                    ends = held.completes or self._ground.losses.ends_between(run.start, run.end)
                    self.queued(run, self._hot.asker_of(run), ends)
        if left := self._hot.left:
            self._report(SlotsLeft(ids=tuple(left)))
            left.clear()
